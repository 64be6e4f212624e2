// Stream-K over keys: the key tiles of all batch entries, one entry after the other, are divided evenly into `parts`. A
// block processes one part: a segment of every entry that the part overlaps. An entry in several parts has as many
// splits, which a second kernel combines.
//
//   KeyScheduler scheduler(score, entries, parts, queries);
//   for (scheduler.begin(score, part); scheduler.valid(); scheduler.next(score)) scheduler.segment(score) ...
//
// With key_lengths each warp reads all lengths and computes the division itself. An entry without keys counts as one
// key tile, so that a block stores its rows.
#pragma once
#include "score_mod.cuh"

// Key tiles first .. first + tiles - 1 of batch entry b: split `split` of the `splits` of the entry. slot: the number
// of its partial result, below parts + entries; the slots of an entry are consecutive.
struct Segment {
    int b, first, tiles, split, splits, slot;
};

struct KeyScheduler {
    int entries, per_part;  // per_part: key tiles
    Range queries;          // of the block's row tile
    // The position in the sequence of key tiles: the batch entry and the number of its first key tile; the number of
    // the next key tile; the end of the part.
    int b, entry_begin, at, end;

    __device__ __forceinline__ KeyScheduler(const Score& score, int entries, int parts, Range queries)
        : entries(entries), queries(queries) {
        int all = 0;
        if (KEY_LENGTHS) {
#pragma unroll 1
            for (int b = threadIdx.x % 32; b < entries; b += 32) all += rounds(score, b);
            all = __reduce_add_sync(0xffffffffu, all);
        } else all = entries * rounds(score, 0);
        per_part = max((all + parts - 1) / parts, 1);
    }
    // The key tiles that the queries see.
    __device__ __forceinline__ Range tiles(const Score& score, int b) const {
        const Range keys = Head(score, b, 0).keys(queries.begin, queries.end);  // the same for all heads
        const int begin = keys.begin / BLOCK_N;
        return {begin, max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N, begin)};
    }
    __device__ __forceinline__ int rounds(const Score& score, int b) const {
        const Range range = tiles(score, b);
        return max(range.end - range.begin, 1);
    }

    __device__ __forceinline__ bool valid() const { return at < end && b < entries; }
    __device__ __forceinline__ Segment segment(const Score& score) const {
        const Range range = tiles(score, b);
        const int entry_end = entry_begin + max(range.end - range.begin, 1), part = at / per_part;
        const int first_part = entry_begin / per_part, last_part = (entry_end - 1) / per_part;
        return {b,
                range.begin + at - entry_begin,
                range.end > range.begin ? min(entry_end, end) - at : 0,
                part - first_part,
                last_part - first_part + 1,
                part + b};
    }
    // To the next segment.
    __device__ __forceinline__ void next(const Score& score) {
        entry_begin += rounds(score, b);
        at = entry_begin;
        ++b;
    }
    // To the first segment of a part. A warp collective.
    __device__ __forceinline__ void begin(const Score& score, int part) {
        const int lane = threadIdx.x % 32;
        at = part * per_part, end = at + per_part;
        if (!KEY_LENGTHS) {
            const int each = rounds(score, 0);
            b = at / each, entry_begin = b * each;
            return;
        }
        entry_begin = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            const int count = b0 + lane < entries ? rounds(score, b0 + lane) : 0;
            int upto = entry_begin + count;  // inclusive prefix sum over the lanes
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto - entry_begin, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned lanes = __ballot_sync(0xffffffffu, upto > at);
            if (lanes) {
                const int lane_of_b = __ffs(lanes) - 1;
                b = b0 + lane_of_b, entry_begin = __shfl_sync(0xffffffffu, upto - count, lane_of_b);
                return;
            }
            entry_begin = __shfl_sync(0xffffffffu, upto, 31);
        }
        b = entries;
    }
    // The first split of batch entry b. A warp collective.
    __device__ __forceinline__ Segment first_split(const Score& score, int entry) {
        int before = KEY_LENGTHS ? 0 : entry * rounds(score, 0);
        if (KEY_LENGTHS) {
#pragma unroll 1
            for (int other = threadIdx.x % 32; other < entry; other += 32) before += rounds(score, other);
            before = __reduce_add_sync(0xffffffffu, before);
        }
        b = entry, at = entry_begin = before, end = at + per_part;
        return segment(score);
    }
};
