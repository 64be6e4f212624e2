// Blocks that share the keys of a tile of rows: which of them walks which part, where it leaves what it has summed up, and how that is
// merged. Everything is in a fixed order, so that the same inputs give the same bits.
//
//   const Split own = DYNAMIC_SPLITS ? Deal(score, entries, splits).block(number) : ...     part own.split of own.splits, of batch entry own.b
//   Merged::add                                                                    several parts of four columns, made one
//   Partials(partials, blocks, rows, own).put(row, own.split, quad, merged)        leaves it for another entry, not yet divided by l
//
// Where batch entries have keys of different numbers (key_lengths) only the device knows how many blocks each is worth: they are
// dealt, by every warp for itself, which reads all lengths.
#pragma once
#include "score_mod.cuh"

// What m and l of several parts of a row's keys come to: each part counts e^(its m - m) times.
__device__ __forceinline__ float share(float part, float m, float exponent) {
    return part == m ? 1.0f : ex2((part - m) * exponent);  // equal infinities: not NaN
}

constexpr bool DYNAMIC_SPLITS = KEY_LENGTHS && !RAGGED && CLUSTER == 1;  // batch entries have keys of different numbers: more blocks for more keys

// The block that is number `split` of `splits` that share the keys of batch entry b; those of entries before are `before`.
struct Split {
    int b, split, splits, before;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

// How blocks are dealt to batch entries of different numbers of keys: `splits` in all where every entry has a multiple of what a
// block then takes, at most one more for each entry, and at least one for each. By all lanes of a warp.
struct SplitScheduler {
    const Score& score;
    int entries, lane, most;  // most: rounds of a block's warps that a block takes

    __device__ __forceinline__ SplitScheduler(const Score& score, int entries, int splits)
        : score(score), entries(entries), lane(threadIdx.x % 32) {
        int all = 0;
#pragma unroll 1
        for (int b = lane; b < entries; b += 32) all += rounds(b);
        most = max((__reduce_add_sync(0xffffffffu, all) + splits - 1) / splits, 1);
    }
    __device__ __forceinline__ int rounds(int b) const {
        const Head any(score, b, 0);
        const Range keys = any.keys(0, any.Sq);
        return (max(max(keys.end, 0) - keys.begin / BLOCK_N * BLOCK_N, 0) + BLOCK_N * WARPS - 1) / (BLOCK_N * WARPS);
    }
    __device__ __forceinline__ int blocks(int b) const { return max((rounds(b) + most - 1) / most, 1); }

    // The block of that number.
    __device__ __forceinline__ Split block(int number) const {
        int before = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            const int own = b0 + lane < entries ? blocks(b0 + lane) : 0;
            int upto = before + own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto - before, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, upto > number);
            if (found) {
                const int who = __ffs(found) - 1, splits = __shfl_sync(0xffffffffu, own, who);
                const int first = __shfl_sync(0xffffffffu, upto, who) - splits;
                return {b0 + who, number - first, splits, first};
            }
            before = __shfl_sync(0xffffffffu, upto, 31);
        }
        return {-1, 0, 1, 0};
    }
    // The first block of batch entry b.
    __device__ __forceinline__ Split first_of(int b) const {
        int before = 0;
#pragma unroll 1
        for (int other = lane; other < b; other += 32) before += blocks(other);
        return {b, 0, blocks(b), static_cast<int>(__reduce_add_sync(0xffffffffu, before))};
    }
};

// Four columns of a row, merged.
struct CombinedRow {
    float m = -INF, l = 0.0f;
    float4 O = {0.0f, 0.0f, 0.0f, 0.0f};

    template <int COUNT>
    __device__ __forceinline__ void add(const float2 (&sums)[COUNT], const float4 (&parts)[COUNT], float exponent) {
        float top = m;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) top = fmaxf(top, sums[i].x);
        const float alpha = share(m, top, exponent);
        m = top, l *= alpha, O.x *= alpha, O.y *= alpha, O.z *= alpha, O.w *= alpha;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const float weight = share(sums[i].x, top, exponent);
            l += weight * sums[i].y;
            O.x += weight * parts[i].x, O.y += weight * parts[i].y, O.z += weight * parts[i].z, O.w += weight * parts[i].w;
        }
    }
};

// Where blocks leave their part of row `row` of all: O, not yet divided by l, and m and l. A row's parts lie side by side.
struct Partials {
    float* data;
    long long count, origin;
    int splits;
    // `blocks`: those that share keys, of all entries; `rows`: of an entry.
    __device__ __forceinline__ Partials(float* data, int blocks, long long rows, const Split& of)
        : data(data), count(blocks * rows), origin((of.before - static_cast<long long>(of.b) * of.splits) * rows), splits(of.splits) {}
    __device__ __forceinline__ float* O(long long row, int split) const {
        return data + (origin + row * splits + split) * HEAD_DIM_V;
    }
    __device__ __forceinline__ float2* sums(long long row, int split) const {
        return reinterpret_cast<float2*>(data + count * HEAD_DIM_V) + origin + row * splits + split;
    }
    // Leaves columns 4 quad ..; m and l with the first of them.
    __device__ __forceinline__ void put(long long row, int split, int quad, const CombinedRow& part) const {
        reinterpret_cast<float4*>(O(row, split))[quad] = part.O;
        if (quad == 0) *sums(row, split) = make_float2(part.m, part.l);
    }
};
