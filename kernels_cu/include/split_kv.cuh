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

// Whether each batch entry has its own blocks along z. If sequences may have many queries, the row tiles of all of them
// are along x instead.
constexpr bool BLOCKS_BY_ENTRY = !RAGGED || SHORT_SEQUENCES;
// Whether the number of splits depends on the batch entry's keys.
constexpr bool DYNAMIC_SPLITS = KEY_LENGTHS && BLOCKS_BY_ENTRY && CLUSTER == 1;

// Row tile number x of batch entry b, or of all sequences. Ragged queries: invalid if the sequence has fewer rows.
template <int ROWS>
__device__ __forceinline__ RowTile row_tile(const Score& score, unsigned x, int b, int packed = 1) {
    if (RAGGED && BLOCKS_BY_ENTRY) {
        const int row0 = static_cast<int>(x * ROWS);
        return row0 < SeqlenInfo(score, b).Sq * packed ? RowTile{b, row0} : RowTile{-1, 0};
    }
    return query_tile<ROWS>(score, x, b, packed);
}

// The last call of a block that has not waited for the previous entry point. The first block waits here, so that this
// grid does not end before the previous one.
__device__ __forceinline__ void end_after_previous_entry_point() {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) griddepcontrol_wait();
}

// Split `split` of the `splits` of batch entry b; `before`: the splits of earlier entries.
struct Split {
    int b, split, splits, before;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

// Assigns blocks to batch entries in proportion to their keys. A round is one key tile per warp of a block; no block
// has more than max_rounds. At least one block per entry with queries, and at most splits + entries in total. A warp
// collective.
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
        if (RAGGED && head0.Sq == 0) return 0;
        const Range keys = head0.keys(0, head0.Sq);
        return (max(max(keys.end, 0) - keys.begin / BLOCK_N * BLOCK_N, 0) + BLOCK_N * WARPS - 1) / (BLOCK_N * WARPS);
    }
    __device__ __forceinline__ int blocks(int b) const {
        const int least = RAGGED ? min(SeqlenInfo(score, b).Sq, 1) : 1;
        return max((rounds(b) + max_rounds - 1) / max_rounds, least);
    }

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
