// Split-KV: several blocks (splits) share the keys of a tile of query rows; the combine kernel merges their partial
// results (combine.cuh).
//
//   DYNAMIC_SPLITS ? SplitScheduler(score, entries, splits).block(z) : ...    split.split of the split.splits of
//                                                                             entry split.b
//
// With key_lengths the host does not know the keys per batch entry. SplitScheduler then assigns blocks on the device in
// proportion to the keys; each warp reads all lengths and computes the assignment itself.
#pragma once
#include "score_mod.cuh"

// Whether the number of splits depends on the batch entry's keys.
constexpr bool DYNAMIC_SPLITS = KEY_LENGTHS && !RAGGED && CLUSTER == 1;

// Split `split` of the `splits` of batch entry b; `before`: the splits of earlier entries.
struct Split {
    int b, split, splits, before;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

// Assigns blocks to batch entries in proportion to their keys. A round is one key tile per warp of a block; no block
// has more than max_rounds. At least one block per entry, and at most splits + entries in total. A warp collective.
struct SplitScheduler {
    const Score& score;
    int entries, lane, max_rounds;

    __device__ __forceinline__ SplitScheduler(const Score& score, int entries, int splits)
        : score(score), entries(entries), lane(threadIdx.x % 32) {
        int sum = 0;
#pragma unroll 1
        for (int b = lane; b < entries; b += 32) sum += rounds(b);
        max_rounds = max((__reduce_add_sync(0xffffffffu, sum) + splits - 1) / splits, 1);
    }
    __device__ __forceinline__ int rounds(int b) const {
        const Head head0(score, b, 0);  // ranges are the same for all heads
        const Range keys = head0.keys(0, head0.Sq);
        return (max(max(keys.end, 0) - keys.begin / BLOCK_N * BLOCK_N, 0) + BLOCK_N * WARPS - 1) / (BLOCK_N * WARPS);
    }
    __device__ __forceinline__ int blocks(int b) const { return max((rounds(b) + max_rounds - 1) / max_rounds, 1); }

    // The split of block `number`; invalid if the grid has more blocks than splits.
    __device__ __forceinline__ Split block(int number) const {
        int before = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            const int count = b0 + lane < entries ? blocks(b0 + lane) : 0;
            int upto = before + count;  // inclusive prefix sum over the lanes
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto - before, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, upto > number);
            if (lanes) {
                const int lane_of_b = __ffs(lanes) - 1, splits = __shfl_sync(0xffffffffu, count, lane_of_b);
                const int first = __shfl_sync(0xffffffffu, upto, lane_of_b) - splits;
                return {b0 + lane_of_b, number - first, splits, first};
            }
            before = __shfl_sync(0xffffffffu, upto, 31);
        }
        return {-1, 0, 1, 0};
    }
    // The first split of batch entry b.
    __device__ __forceinline__ Split first_split(int b) const {
        int before = 0;
#pragma unroll 1
        for (int other = lane; other < b; other += 32) before += blocks(other);
        return {b, 0, blocks(b), static_cast<int>(__reduce_add_sync(0xffffffffu, before))};
    }
};
