// SPLIT_GROUP: with grouped heads, a work tile of the backward is one n_block of one query head, not of all query heads
// of a key/value head. There are H / Hk times as many work tiles, which fill the GPU if a batch has few key/value heads
// or keys. Each work tile stores its own dK and dV in 16 bits; combine_group adds them, in float32 and in a fixed
// order. STREAM_K: so do the parts of a work tile (bwd_stream_k.cuh).
//
// dKV_partials, per n_block and query head, or per part: for each 64 keys the slabs of dK, then those of dV. A slab (64
// keys x 64 columns) is a copy of the staged slab in shared memory, with the swizzle.
#pragma once
#include "bwd_tiles.cuh"
#include "non_finite.cuh"

#ifndef SPLIT_GROUP
#define SPLIT_GROUP 0
#endif

enum class Gradient { dK, dV };

constexpr unsigned PARTIAL_SLAB_BYTES = 64 * 128;
constexpr int PARTIAL_SLABS_K = (D_PAD + 63) / 64, PARTIAL_SLABS = PARTIAL_SLABS_K + (DV_PAD + 63) / 64;

// Number of heads of a batch entry that have work tiles of their own, and the query heads of each work tile.
__device__ __forceinline__ int work_tile_heads(int Hk, int group) { return SPLIT_GROUP ? Hk * group : Hk; }
__device__ __forceinline__ int query_heads_per_work_tile(int group) { return SPLIT_GROUP ? 1 : group; }

// Index of the first n_block of a batch entry, counted over the batch. ROWS: BLOCK_N. RAGGED: first_key / ROWS + b,
// which is at least the number of earlier n_blocks (each earlier sequence has at most one incomplete tile): indices are
// distinct, with gaps.
template <int ROWS>
__device__ __forceinline__ long long first_n_block(const SeqlenInfo& sequence) {
#if RAGGED
    return sequence.first_key / ROWS + sequence.b;
#else
    return sequence.b * ((sequence.score.Sk + ROWS - 1ll) / ROWS);
#endif
}

// Offset of a slab in units of 4 bytes, two elements. number: (index of the n_block in the batch) * H + query head,
// or the slot of a part; key_offset: 0 or 64. The offset is linear in `number`: partial_index(n, Gradient::dK, 0, 0) is
// the distance between the partial results of query heads h and h + n, or of slots.
__device__ __forceinline__ long long partial_index(long long number, Gradient gradient, int key_offset, int slab) {
    const long long half = number * (BLOCK_N / 64) + key_offset / 64;
    const int first = gradient == Gradient::dV ? PARTIAL_SLABS_K : 0;
    return (half * PARTIAL_SLABS + first + slab) * (PARTIAL_SLAB_BYTES / 4);
}

// dK and dV of ROWS keys of a key/value head: the sums of `count` partial results from number `first` on. If a sum is
// not finite, the rows are computed again (non_finite.cuh).
template <int ROWS>
__device__ __forceinline__ void add_partials(const View<const dtype>& Q, const View<const dtype>& K,
                                             const View<const dtype>& V, const View<const dtype>& dO, const float* LSE,
                                             const float* delta, const View<dtype>& dK, const View<dtype>& dV,
                                             int group, const Score& score, const float* dKV_partials,
                                             const RowTile& rows, int kv_head, int H, long long first, int count) {
    const SeqlenInfo sequence(score, rows.b);
    constexpr int CHUNKS_K = HEAD_DIM / 8, CHUNKS = CHUNKS_K + HEAD_DIM_V / 8;  // of 8 columns
    float nan_if_not_finite = 0.0f;
    for (int item = threadIdx.x; item < ROWS * CHUNKS; item += blockDim.x) {
        const int row = rows.row0 + item / CHUNKS, chunk = item % CHUNKS;
        const Gradient gradient = chunk < CHUNKS_K ? Gradient::dK : Gradient::dV;
        const int column = 8 * (chunk < CHUNKS_K ? chunk : chunk - CHUNKS_K);
        if (row >= sequence.key_rows()) break;
        const long long from = partial_index(first, gradient, row % BLOCK_N / 64 * 64, column / 64) +
                               Swizzled<64, 64>::chunk(row % 64, column % 64 / 8) / 4;
        float sum[8] = {};
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            const uint4 packed =
                *reinterpret_cast<const uint4*>(dKV_partials + from + partial_index(i, Gradient::dK, 0, 0));
            const unsigned pairs[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
            for (int pair = 0; pair < 4; ++pair) {
                const float2 x = unpack(pairs[pair]);
                sum[2 * pair] += x.x, sum[2 * pair + 1] += x.y;
            }
        }
        for (int e = 0; e < 8; ++e) nan_if_not_finite = fmaf(sum[e], 0.0f, nan_if_not_finite);
        dtype* const to = (gradient == Gradient::dK ? sequence.key(dK, kv_head, row) : sequence.key(dV, kv_head, row));
        *reinterpret_cast<uint4*>(to + column) =
            make_uint4(pack(sum[0], sum[1]), pack(sum[2], sum[3]), pack(sum[4], sum[5]), pack(sum[6], sum[7]));
    }
    if (!__syncthreads_or(nan_if_not_finite != 0.0f)) return;
    key_gradients_non_finite<ROWS, 8>(Q, K, V, dO, LSE, delta, dK, dV, group, score, rows.b, kv_head, H, rows.row0,
                                      threadIdx.x / 32);
}

// SPLIT_GROUP: the sums over the query heads of key/value head blockIdx.y.
template <int ROWS>
__device__ __forceinline__ void combine_group(const View<const dtype>& Q, const View<const dtype>& K,
                                              const View<const dtype>& V, const View<const dtype>& dO, const float* LSE,
                                              const float* delta, const View<dtype>& dK, const View<dtype>& dV,
                                              int group, const Score& score, const float* dKV_partials) {
    const RowTile rows = key_tile<ROWS>(score, blockIdx.x, blockIdx.z);
    if (RAGGED && rows.invalid()) return;
    const int kv_head = blockIdx.y, H = gridDim.y * group;
    const long long tile = first_n_block<BLOCK_N>(SeqlenInfo(score, rows.b)) + rows.row0 / BLOCK_N;
    add_partials<ROWS>(Q, K, V, dO, LSE, delta, dK, dV, group, score, dKV_partials, rows, kv_head, H,
                       tile * H + kv_head * group, group);
}
