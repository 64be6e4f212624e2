// Blocks that share the keys of a tile of rows: which of them walks which part, where it leaves what it has summed up, and how that is
// merged. Everything is in a fixed order, so that the same inputs give the same bits.
//
//   Partials(partials, blocks, rows, own).O(row, own.split)     where O lies, not yet divided by l; and m and l: sums
//   Merged::add                                                 several parts of four columns, made one
//
// Where batch entries have keys of different numbers (key_lengths) only the device knows how much there is to do. All of it is
// laid out in one line, in rounds of a block's warps, and cut into equal stretches, one for each block of the grid:
//
// clang-format off
//   entry 0: unit 0     unit 1    | entry 1: 0  1 | entry 2: unit 0               unit 1            a unit: a tile of rows
//   - r r r r r r r - r r r r r r r - r - r - r r r r r r r r r r r r - r r r r r r r r r r r r   of a key/value head
//   |  block 0      |   block 1     |    block 2    |    block 3    |    block 4    | block 5       -: what a unit costs besides
// clang-format on
//
// A unit within a stretch is a block's alone; of one that several share, a block leaves at most two: that it begins with, and that
// it ends with. So there is room for two of each block, however many units there are.
#pragma once
#include "score.cuh"

// What m and l of several parts of a row's keys come to: each part counts e^(its m - m) times.
__device__ __forceinline__ float share(float part, float m, float exponent) {
    return part == m ? 1.0f : ex2((part - m) * exponent);  // equal infinities: not NaN
}

constexpr bool DEALT = KEY_LENGTHS && !RAGGED;  // batch entries have keys of different numbers: more blocks for more keys

// Part `split` of the `splits` that the keys of a tile of rows of batch entry b are in. `before`: blocks before the first of them.
struct Split {
    int b, split, splits, before;
    Range tiles;  // if dealt: of keys, those of this part
};

// The line. Every warp finds its place in it for itself, by all its lanes.
struct Deal {
    static constexpr int BESIDES = 1, LEAST = STAGES - 1 + BESIDES;  // rounds that a unit costs besides; that a stretch has at least
    const Score& score;
    int entries, units, lane, each;  // units of an entry; rounds of a stretch

    __device__ __forceinline__ Deal(const Score& score, int entries, int units, int blocks)
        : score(score), entries(entries), units(units), lane(threadIdx.x % 32) {
        int all = 0;
#pragma unroll 1
        for (int b = lane; b < entries; b += 32) all += cost(b);
        each = max((static_cast<int>(__reduce_add_sync(0xffffffffu, all)) * units + blocks - 1) / blocks, LEAST);
    }
    // Key tiles that some row of batch entry b sees.
    __device__ __forceinline__ Range tiles(int b) const {
        const Head any(score, b, 0);
        const Range keys = any.keys(0, any.Sq);
        return {keys.begin / BLOCK_N, (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N};
    }
    // Rounds of a unit of batch entry b. One that has no keys has O to write.
    __device__ __forceinline__ int rounds(int b) const {
        const Range all = tiles(b);
        return max((all.end - all.begin + WARPS - 1) / WARPS, 1);
    }
    __device__ __forceinline__ int cost(int b) const { return rounds(b) + BESIDES; }

    // The batch entry in which place `at` of the line lies, and where the entry begins; `entries` if the line ends before.
    __device__ __forceinline__ int entry_at(int at, int& begin) const {
        begin = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < entries; b0 += 32) {
            int upto = b0 + lane < entries ? cost(b0 + lane) : 0;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, begin + upto * units > at);
            if (found) {
                const int who = __ffs(found) - 1, before = __shfl_sync(0xffffffffu, upto, max(who - 1, 0));
                begin += who ? before * units : 0;
                return b0 + who;
            }
            begin += __shfl_sync(0xffffffffu, upto, 31) * units;
        }
        return entries;
    }
    // Where batch entry b begins.
    __device__ __forceinline__ int begin_of(int b) const {
        int before = 0;
#pragma unroll 1
        for (int other = lane; other < b; other += 32) before += cost(other);
        return static_cast<int>(__reduce_add_sync(0xffffffffu, before)) * units;
    }
    // Whose a unit is that begins at `begin`, as block `number` sees it.
    __device__ __forceinline__ Split split_of(int b, int begin, int number) const {
        const int first_round = begin + BESIDES, all = rounds(b), first = first_round / each, key_tile = tiles(b).begin;
        const int from = max(number * each - first_round, 0), to = min((number + 1) * each - first_round, all);
        return {b, number - first, (first_round + all - 1) / each - first + 1, first,
                {key_tile + from * WARPS, key_tile + to * WARPS}};
    }
};

// The parts of units that are a block's, one after the other.
struct Stretch {
    const Deal deal;
    int number, b, begin, unit;  // of the next part: its batch entry, where the entry begins, its unit of those

    __device__ __forceinline__ Stretch(const Deal& deal, int number) : deal(deal), number(number) {
        b = deal.entry_at(number * deal.each, begin);
        unit = b < deal.entries ? (number * deal.each - begin) / deal.cost(b) : 0;
    }
    // Whether there is another part. What a unit costs besides is nobody's: it may lie in the stretch before its first round's.
    __device__ __forceinline__ bool more() const {
        return b < deal.entries && begin + unit * deal.cost(b) + Deal::BESIDES < (number + 1) * deal.each;
    }
    __device__ __forceinline__ Split split() const { return deal.split_of(b, begin + unit * deal.cost(b), number); }
    __device__ __forceinline__ void advance() {
        if (++unit < deal.units) return;
        begin += deal.units * deal.cost(b++), unit = 0;
    }
};

// Where blocks leave their part of a row: O, not yet divided by l, and m and l. `row` is a row's number among all, whose parts lie
// side by side; if dealt, among those of its tile.
struct Partials {
    float* data;
    long long count, origin;
    int splits, before;
    // `blocks`: those that share keys, of all entries; `rows`: of an entry, or of a tile.
    __device__ __forceinline__ Partials(float* data, int blocks, long long rows, const Split& of)
        : data(data), count((DEALT ? 2 : 1) * blocks * rows), origin((of.before - static_cast<long long>(of.b) * of.splits) * rows),
          splits(of.splits), before(of.before) {}
    __device__ __forceinline__ long long place(long long row, int split) const {
        if (DEALT) return (2ll * (before + split) + (split == 0)) * BLOCK_M + row;  // what a block ends with comes second
        return origin + row * splits + split;
    }
    __device__ __forceinline__ float* O(long long row, int split) const { return data + place(row, split) * HEAD_DIM_V; }
    __device__ __forceinline__ float2* sums(long long row, int split) const {
        return reinterpret_cast<float2*>(data + count * HEAD_DIM_V) + place(row, split);
    }
};

// Four columns of a row, merged.
struct Merged {
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
