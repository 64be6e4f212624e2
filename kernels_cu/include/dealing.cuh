// Who works on which query tile of a ragged batch, for kernels whose blocks stay on their SM and take one piece after the
// other: pieces are handed out one by one, those that see keys the farthest on first, to whoever is ready. Nobody knows
// before how long the sequences are, nor how fast each SM is.
//
//   const LongestFirst pieces(score);                 by all lanes of a warp, as everything here
//   pieces.piece(number, heads, group)                the number-th; numbers come from a counter in memory
//
// Heads come in sections, so that the keys and values that are read at one time stay in L2; the last section is up to
// two of them, whose short pieces then even out what long ones left uneven. Pieces count as equally long within two key
// tiles, so that those of one sequence and head come together. (Four sections, one key tile: 3% slower, for L2.)
#pragma once
#include "score.cuh"

#if RAGGED
struct Dealt {  // a piece as one warp of a block tells the others, whom it saves looking up its sequence
    int b, row0, head;
    Extent extent;
    __device__ __forceinline__ bool none() const { return b < 0; }
};

struct LongestFirst {
    static constexpr unsigned SECTION_ROWS = (16 << 20) / ((HEAD_DIM + HEAD_DIM_V) * sizeof(dtype));  // a third of L2

    static constexpr int LEVEL = 2 * BLOCK_N;  // keys

    const Score& score;
    int lane, all;  // pieces of a head

    __device__ __forceinline__ explicit LongestFirst(const Score& score) : score(score), lane(threadIdx.x % 32) {
        all = count(-1);
    }

    struct Reach {  // of sequence b's query tiles; of one that there is not, nothing
        int tiles = 0, Sk = 0, diagonal = 0;
        __device__ __forceinline__ Reach(const Score& score, int b) {
            if (b >= score.sequences) return;
            const Sequence own(score, b);
            tiles = (own.Sq + BLOCK_M - 1) / BLOCK_M, Sk = own.Sk, diagonal = own.diagonal;
        }
        // So many see keys of level `level` or beyond: the last ones. Of level -1: all there are.
        __device__ __forceinline__ int beyond(int level) const {
            const int key = level * LEVEL, blind = CAUSAL ? max(key - diagonal, 0) / BLOCK_M : 0;
            return level < 0 ? tiles : Sk <= key ? 0 : max(tiles - blind, 0);
        }
    };
    // The same of all sequences.
    __device__ __forceinline__ int count(int level) const {
        int own = 0;
#pragma unroll 1
        for (int b = lane; b < score.sequences; b += 32) own += Reach(score, b).beyond(level);
        return __reduce_add_sync(0xffffffffu, own);
    }

    // The number-th query tile of a head.
    __device__ __forceinline__ RowTile tile(int number) const {
        int level = -1, end = (score.Sk + LEVEL - 1) / LEVEL, at_end = 0;  // more than `number` reach `level`, not `end`
#pragma unroll 1
        while (end - level > 1) {
            const int middle = (level + end) / 2, reach = count(middle);
            if (reach > number) level = middle;
            else end = middle, at_end = reach;
        }
        number -= at_end;
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // those of the level, one sequence after the other
            const Reach reach(score, b0 + lane);
            const int last = reach.beyond(level), own = last - reach.beyond(level + 1);
            int upto = own;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, upto > number);
            if (found) {
                const int row0 = (reach.tiles - last + number - (upto - own)) * BLOCK_M, who = __ffs(found) - 1;
                return {b0 + who, __shfl_sync(0xffffffffu, row0, who)};
            }
            number -= __shfl_sync(0xffffffffu, upto, 31);
        }
    }

    // The number-th piece of all heads, of which `group` at a time share keys and values; none when there is no such.
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned group) const {
        if (number >= all * heads) return {-1};
        const unsigned section = min(SECTION_ROWS * group / (score.rows_k + 1) + 1, heads);
        const unsigned sections = heads > 2 * section ? (heads - section - 1) / section : 0;  // before the last
        const unsigned own = min(number / (section * all), sections), first = own * section;
        const unsigned width = own < sections ? section : heads - first, i = number - first * all;
        const RowTile rows = tile(i / width);
        return {rows.b, rows.row0, static_cast<int>(first + i % width), Sequence(score, rows.b).extent()};
    }
};
#elif BLOCK_MAP
struct Dealt {  // of a dense batch whose pieces a block map shortens, nobody knows before by how much
    int tile, head;
    __device__ __forceinline__ bool none() const { return head < 0; }
};

struct LongestFirst {  // as far as causality tells; heads in sections, as for_each_query_tile has them
    const unsigned tiles;
    __device__ __forceinline__ explicit LongestFirst(const Score& score) : tiles(query_tiles<BLOCK_M>(score)) {}
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned) const {
        if (number >= tiles * heads) return {0, -1};
        const unsigned section = CAUSAL ? max(2 * gridDim.x / tiles, 1) : 1, first = number / (section * tiles) * section;
        const unsigned width = min(section, heads - first), i = number - first * tiles;
        return {static_cast<int>(tiles - 1 - i / width), static_cast<int>(first + i % width)};
    }
};
#endif
