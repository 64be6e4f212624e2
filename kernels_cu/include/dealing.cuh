// Who works on which tile of a ragged batch: of queries, for kernels whose blocks stay on their SM and take one piece after the
// other; of keys, for those whose blocks take one piece each, the backward. Pieces are handed out one by one, the longest first,
// to whoever is ready. Nobody knows before how long the sequences are, nor how fast each SM is.
// Likewise who works on which query tile of a dense batch with a block map, of which nobody knows what it leaves.
//
//   const LongestFirst<QueryTiles> pieces(score);     or <KeyTiles>; by all lanes of a warp, as everything here
//   pieces.piece(number, heads, group)                the number-th; numbers come from a counter in memory, or are a block's own
//
// Heads come in sections, so that the keys and values that are read at one time stay in L2; the last section is up to
// two of them, whose short pieces then even out what long ones left uneven. Pieces count as equally long within two of the tiles
// they walk, so that those of one sequence and head come together. (Four sections, one key tile: 3% slower, for L2.)
#pragma once
#include "score.cuh"

#if RAGGED
struct Dealt {  // a piece as one warp of a block tells the others, whom it saves looking up its sequence
    int b, row0, head;
    Extent extent;
    __device__ __forceinline__ bool none() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head; }
    __device__ __forceinline__ Sequence sequence(const Score& score) const { return {score, b, extent}; }
};

constexpr unsigned SECTION_ROWS = (16 << 20) / ((HEAD_DIM + HEAD_DIM_V) * sizeof(dtype));  // of K and V, or of Q and dO: a third of L2

struct QueryTiles {  // of sequence b; of one that there is not, nothing
    static constexpr int ROWS = BLOCK_M, LEVEL = 2 * BLOCK_N;  // keys
    static constexpr bool KEPT = false;                        // a piece is found while another is worked on: nobody waits
    int tiles = 0, Sk = 0, diagonal = 0;
    QueryTiles() = default;
    __device__ __forceinline__ QueryTiles(const Score& score, int b) {
        if (b >= score.sequences) return;
        const Sequence own(score, b);
        tiles = (own.Sq + BLOCK_M - 1) / BLOCK_M, Sk = own.Sk, diagonal = own.diagonal;
    }
    // So many see keys of level `level` or beyond: the last ones. Of level -1: all there are.
    __device__ __forceinline__ int beyond(int level) const {
        const int key = level * LEVEL, blind = CAUSAL ? max(key - diagonal, 0) / BLOCK_M : 0;
        return level < 0 ? tiles : Sk <= key ? 0 : max(tiles - blind, 0);
    }
    // The first of those of a level, beyond which there are none but so many.
    __device__ __forceinline__ int first(int, int last) const { return tiles - last; }
    // How far levels go; how many heads have a section.
    static __device__ __forceinline__ int most(const Score& score) { return score.Sk; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        return SECTION_ROWS * group / (score.rows_k + 1) + 1;
    }
};

struct KeyTiles {  // likewise
    static constexpr int ROWS = BLOCK_N, LEVEL = 2 * BLOCK_M;  // queries
    static constexpr bool KEPT = true;                         // the block waits for its piece
    int tiles = 0, Sq = 0, Sk = 0, diagonal = 0;
    KeyTiles() = default;
    __device__ __forceinline__ KeyTiles(const Score& score, int b) {
        if (b >= score.sequences) return;
        const Sequence own(score, b);
        tiles = (own.key_rows() + BLOCK_N - 1) / BLOCK_N, Sq = own.Sq, Sk = own.Sk, diagonal = own.diagonal;
    }
    // So many are seen by more than `level` levels of queries: the first ones, of keys that count.
    __device__ __forceinline__ int beyond(int level) const {
        const int rows = level * LEVEL, keys = CAUSAL ? min(Sk, max(Sq - rows + diagonal, 0)) : Sk;
        return level < 0 ? tiles : Sq <= rows ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first(int beyond, int) const { return beyond; }
    static __device__ __forceinline__ int most(const Score& score) { return score.Sq; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        return SECTION_ROWS / group / (score.rows_q + 1) + 1;
    }
};

template <class Tiles>
struct LongestFirst {
    const Score& score;
    int lane, all;  // pieces of a head
    Tiles own;      // of sequence `lane`, where they are kept: few batches have more than 32 sequences

    __device__ __forceinline__ explicit LongestFirst(const Score& score) : score(score), lane(threadIdx.x % 32) {
        if (Tiles::KEPT) own = Tiles(score, lane);
        all = count(-1);
    }

    // Of sequence b, which is the lane's or so many times 32 further.
    __device__ __forceinline__ Tiles of(int b) const { return Tiles::KEPT && b < 32 ? own : Tiles(score, b); }

    // How many tiles of all sequences are of level `level` or beyond.
    __device__ __forceinline__ int count(int level) const {
        int tiles = 0;
#pragma unroll 1
        for (int b = lane; b < score.sequences; b += 32) tiles += of(b).beyond(level);
        return __reduce_add_sync(0xffffffffu, tiles);
    }

    // The number-th tile of a head.
    __device__ __forceinline__ RowTile tile(int number) const {
        int level = -1, end = (Tiles::most(score) + Tiles::LEVEL - 1) / Tiles::LEVEL, at_end = 0;  // more than `number` reach `level`, not `end`
#pragma unroll 1
        while (end - level > 1) {
            const int middle = (level + end) / 2, reach = count(middle);
            if (reach > number) level = middle;
            else end = middle, at_end = reach;
        }
        number -= at_end;
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // those of the level, one sequence after the other
            const Tiles tiles = of(b0 + lane);
            const int last = tiles.beyond(level), beyond = tiles.beyond(level + 1), here = last - beyond;
            int upto = here;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, upto > number);
            if (found) {
                const int row0 = (tiles.first(beyond, last) + number - (upto - here)) * Tiles::ROWS, who = __ffs(found) - 1;
                return {b0 + who, __shfl_sync(0xffffffffu, row0, who)};
            }
            number -= __shfl_sync(0xffffffffu, upto, 31);
        }
    }

    // The number-th piece of all heads: of queries, of which `group` at a time share keys and values; or of keys, each shared by
    // a group. None when there is no such.
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned group) const {
        if (number >= all * heads) return {-1};
        const unsigned section = min(Tiles::section(score, group), heads);
        const unsigned sections = heads > 2 * section ? (heads - section - 1) / section : 0;  // before the last
        const unsigned own = min(number / (section * all), sections), first = own * section;
        const unsigned width = own < sections ? section : heads - first, i = number - first * all;
        const RowTile rows = tile(i / width);
        return {rows.b, rows.row0, static_cast<int>(first + i % width), Sequence(score, rows.b).extent()};
    }
};
#else
struct Dealt {  // likewise of a dense batch, whom it saves divisions: head `head` of all is head_of_b of batch entry b
    int b = -1, row0 = 0, head = 0, head_of_b = 0;
    Dealt() = default;
    __device__ __forceinline__ Dealt(unsigned row0, unsigned head, unsigned H)
        : b(head / H), row0(row0), head(head), head_of_b(head % H) {}
    __device__ __forceinline__ bool none() const { return b < 0; }
    __device__ __forceinline__ int h() const { return head_of_b; }
    __device__ __forceinline__ Sequence sequence(const Score& score) const { return {score, b}; }
};
#endif

#if BLOCK_MAP && !RAGGED
struct QueryTiles;
template <class Tiles>
struct LongestFirst {  // as far as causality tells; heads in sections, as for_each_query_tile has them
    const unsigned tiles, H;
    __device__ __forceinline__ LongestFirst(const Score& score, unsigned H) : tiles(query_tiles<BLOCK_M>(score)), H(H) {}
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned) const {
        if (number >= tiles * heads) return {};
        const unsigned section = CAUSAL ? max(2 * gridDim.x / tiles, 1) : 1, first = number / (section * tiles) * section;
        const unsigned width = min(section, heads - first), i = number - first * tiles;
        return {(tiles - 1 - i / width) * BLOCK_M, first + i % width, H};
    }
};
#endif
