// The backward's first step: delta = rowsum(dO * O), one warp per query row.
//
// dS = P * (dP - rowsum(P * dP)), and rowsum(P * dP) = rowsum(P * (dO V^T)) = dO (P V)^T = rowsum(dO * O): D products a
// row, once, instead of Sk in each of its tiles. FlashAttention-2's Algorithm 2, line 4 (arXiv:2307.08691).
//
// It reads dO and O once and is limited by that: neighbouring lanes read neighbouring columns, and a row's sum is
// reduced by shuffles in a fixed order.
#include "common.cuh"
#include "score.cuh"

static_assert(SMEM_BYTES == 0, "spec and kernel disagree on shared memory");

extern "C" __global__ __launch_bounds__(32 * BLOCK_M) void bwd_delta(
    View<const dtype> dO,  // (B, H, Sq, HEAD_DIM)
    View<const dtype> O,   // (B, H, Sq, HEAD_DIM)
    float* delta,          // (B, H, Sq), contiguous
    Score score) {
    const int lane = threadIdx.x, h = blockIdx.y, b = blockIdx.z, query_row = blockIdx.x * BLOCK_M + threadIdx.y;
    if (query_row >= score.Sq) return;  // a whole warp, and no barrier below
    const dtype *dO_row = dO.row(b, h, query_row), *O_row = O.row(b, h, query_row);
    float sum = 0.0f;
    for (int d = lane; d < HEAD_DIM; d += 32) sum += to_float(dO_row[d]) * to_float(O_row[d]);
    sum = row_sum<32>(sum);
    if (lane == 0) delta[(static_cast<long long>(b) * gridDim.y + h) * score.Sq + query_row] = sum;
}
