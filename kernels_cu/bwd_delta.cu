// The backward's first step: delta = rowsum(dO * O).
//
// dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(P * (dO V^T)) = dO (P V)^T = rowsum(dO * O): D products a
// row, once, instead of Sk in each pass. FlashAttention-2's Algorithm 2, line 4 (arXiv:2307.08691).
//
// LSE may have a gradient of its own: dx = P * (dP - delta) + P * dLSE, so that it is subtracted here, once a row.
//
// Each element is read once, and that is what it costs: LANES neighbouring lanes share a row, four elements a load where
// the tensors are aligned for it, and nothing is written before all of a thread's rows are read, so that their loads
// overlap. The lanes' sums meet by shuffles, in an order that never changes.
#include "common.cuh"
#include "score.cuh"

constexpr int LANES = HEAD_DIM_V > 64 ? 32 : HEAD_DIM_V > 32 ? 16 : 8;  // of a row
constexpr int ROWS = 32 * WARPS / LANES;                            // of a block at a time
static_assert(SMEM_BYTES == 0, "spec and kernel disagree on shared memory");
static_assert(BLOCK_M % ROWS == 0, "each thread has as many rows");

extern "C" __global__ __launch_bounds__(32 * WARPS) void bwd_delta(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM_V)
    View<const dtype> O,   // (B, H, Sq, HEAD_DIM_V)
    const float* dLSE,     // (B, H, Sq), contiguous; null where LSE has no gradient of its own
    float* delta,          // (B, H, Sq), contiguous
    Score score) {
    const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && tile.surplus()) return;
    const int lane = threadIdx.x % LANES, h = blockIdx.y, b = tile.b;
    const int first_row = tile.row0 + threadIdx.x / LANES;  // of this thread's; then every ROWS-th
    const Sequence sequence(score, b);
    sequence.to_queries(dO, O);
    const bool by_fours = HEAD_DIM_V % 4 == 0 && aligned_for_dtype4(dO, b, h) && aligned_for_dtype4(O, b, h);
    float sums[BLOCK_M / ROWS] = {};
#pragma unroll
    for (int i = 0; i < BLOCK_M / ROWS; ++i) {
        const int query_row = first_row + i * ROWS, columns = query_row < sequence.Sq ? HEAD_DIM_V : 0;
        const dtype *dO_row = dO.row(b, h, query_row), *O_row = O.row(b, h, query_row);
        if (by_fours) {
            for (int d = 4 * lane; d < columns; d += 4 * LANES) {
                const float4 g = to_float4(*reinterpret_cast<const dtype4*>(dO_row + d));
                const float4 o = to_float4(*reinterpret_cast<const dtype4*>(O_row + d));
                sums[i] += g.x * o.x + g.y * o.y + g.z * o.z + g.w * o.w;
            }
        } else {
            for (int d = lane; d < columns; d += LANES) sums[i] += to_float(dO_row[d]) * to_float(O_row[d]);
        }
    }
    const long long first = sequence.first_row(gridDim.y, h) + first_row;
#pragma unroll
    for (int i = 0; i < BLOCK_M / ROWS; ++i) {
        const float sum = row_sum<LANES>(sums[i]);
        if (lane == 0 && first_row + i * ROWS < sequence.Sq)
            delta[first + i * ROWS] = dLSE ? sum - dLSE[first + i * ROWS] : sum;
    }
}
