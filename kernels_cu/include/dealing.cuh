// Who works on which tile of a ragged batch: of queries, for kernels whose blocks stay on their SM and take one piece after the
// other; of keys, for those whose blocks take one piece each, the backward. Pieces are handed out one by one, the longest first,
// to whoever is ready. Nobody knows before how long the sequences are, nor how fast each SM is.
// Likewise who works on which query tile of a dense batch with a block map, of which nobody knows what it leaves.
//
//   const LongestFirst<QueryTiles> pieces(score);     or <KeyTiles>; by all lanes of a warp, as everything here
//   pieces.piece(number, heads, group)                the number-th; numbers come from a counter in memory, or are a block's own
//
// Heads come in sections, so that the keys and values that are read at one time stay in L2; the last section is up to
// two of them, whose short pieces then even out what long ones left uneven. Pieces count as equally long within two of the key tiles
// that they walk, or four query tiles, so that those of one sequence and head come together. (Of queries four sections, one key tile:
// 3% slower, for L2; of keys a head more in a section: 0 ... 4%.)
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

// Where a level begins. Where the first one would be of several tiles of a sequence, it is two: the very last pieces even out what
// others leave (16 x 512: +3%, of keys +0.5%). But where all sequences end within it: short pieces alone wait for each other (32 x 256: -4%).
template <class Tiles>
__device__ __forceinline__ int level_begins(int level) {
    return !Tiles::HALVED ? level * Tiles::LEVEL : level > 1 ? (level - 1) * Tiles::LEVEL : level * Tiles::LEVEL / 2;
}

struct QueryTiles {  // of a sequence that lies so
    static constexpr int ROWS = BLOCK_M, LEVEL = 2 * BLOCK_N;  // keys
    int tiles, Sk, diagonal;
    __device__ __forceinline__ QueryTiles(const Score& score, const Extent& own)
        : tiles((own.Sq + BLOCK_M - 1) / BLOCK_M), Sk(own.Sk), diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    static constexpr bool HALVED = LEVEL >= 2 * ROWS;
    // So many see keys of level `level` or beyond: the last ones. Of level -1: all there are.
    __device__ __forceinline__ int beyond(int level) const {
        const int key = level_begins<QueryTiles>(level);
        const int blind = CAUSAL ? max(key - diagonal, 0) / BLOCK_M : 0;
        return level < 0 ? tiles : Sk <= key ? 0 : max(tiles - blind, 0);
    }
    // The first of those of a level, beyond which there are none but so many.
    __device__ __forceinline__ int first(int, int last) const { return tiles - last; }
    // Whether a piece walks so little of its keys that the next one comes late unless it is dealt ahead (16 x 512: +1%).
    static __device__ __forceinline__ bool brief(const Score& score, const Dealt& piece) {
        const Extent& own = piece.extent;
        return CAUSAL && own.Sk > LEVEL && piece.row0 + ROWS + (score.bottom_right ? own.Sk - own.Sq : 0) <= LEVEL;
    }
    // How far levels go, of so many queries and keys; how many heads have a section.
    static __device__ __forceinline__ int most(int, int Sk) { return Sk; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        return SECTION_ROWS * group / (score.rows_k + 1) + 1;
    }
};

struct KeyTiles {  // likewise
    static constexpr int ROWS = BLOCK_N, LEVEL = 4 * BLOCK_M;  // queries
    static constexpr bool HALVED = LEVEL >= 2 * ROWS;
    int tiles, Sq, Sk, diagonal;
    __device__ __forceinline__ KeyTiles(const Score& score, const Extent& own)
        : tiles((own.all_keys + BLOCK_N - 1) / BLOCK_N), Sq(own.Sq), Sk(own.Sk),
          diagonal(score.bottom_right ? own.Sk - own.Sq : 0) {}
    // So many are seen by more than `level` levels of queries: the first ones, of keys that count.
    __device__ __forceinline__ int beyond(int level) const {
        const int rows = level_begins<KeyTiles>(level), keys = CAUSAL ? min(Sk, max(Sq - rows + diagonal, 0)) : Sk;
        return level < 0 ? tiles : Sq <= rows ? 0 : (keys + BLOCK_N - 1) / BLOCK_N;
    }
    __device__ __forceinline__ int first(int beyond, int) const { return beyond; }
    static __device__ __forceinline__ int most(int Sq, int) { return Sq; }
    static __device__ __forceinline__ unsigned section(const Score& score, unsigned group) {
        // L2 holds dQ's sums, too: a quarter of the heads (16 x 512: +1.9%, of lengths drawn up to 883 +2.7%; D = 64, with zeros
        // to be added to: -0.7%), but where so many fit that they are the whole batch, or half of it (4 x 512: +4.3%).
        const unsigned heads = SECTION_ROWS / group / (score.rows_q + 1);
        return max(HEAD_DIM > 64 && heads < 7 ? heads / 4 : heads, 1u);
    }
};

// Little is kept from one piece to the next: three warpgroups of consumers leave a warp that deals 32 registers.
template <class Tiles>
struct LongestFirst {
    const Score& score;
    const Extent own;  // where the lane's sequence lies: few batches have more than 32

    __device__ __forceinline__ explicit LongestFirst(const Score& score) : score(score), own(extent(threadIdx.x % 32)) {}

    // Where sequence b lies; of one that there is not, nowhere.
    __device__ __forceinline__ Extent extent(int b) const {
        return b < score.sequences ? Sequence(score, b).extent() : Extent{};
    }
    // Of sequences b0 .. b0 + 32 the lane's. (The lane is asked for anew: addresses would be kept.)
    __device__ __forceinline__ Extent of(int b0) const { return b0 == 0 ? own : extent(b0 + thread_index_x() % 32); }

    // How many tiles of all sequences are of level `level` or beyond.
    __device__ __forceinline__ int count(int level) const {
        int tiles = 0;
#pragma unroll 1
        for (int b0 = 0; b0 < score.sequences; b0 += 32) tiles += Tiles(score, of(b0)).beyond(level);
        return __reduce_add_sync(0xffffffffu, tiles);
    }

    struct Found {
        RowTile rows;
        Extent extent;
    };
    // The number-th tile of a head.
    __device__ __forceinline__ Found tile(int number) const {
        int most = __reduce_max_sync(0xffffffffu, Tiles::most(own.Sq, own.Sk));
        if (score.sequences > 32) most = Tiles::most(score.Sq, score.Sk);
        // More than `number` reach `level`, not `end`.
        int level = -1, end = (most + Tiles::LEVEL - 1) / Tiles::LEVEL + Tiles::HALVED, at_end = 0;
        const bool whole = Tiles::HALVED && most <= Tiles::LEVEL;
#pragma unroll 1
        while (end - level > (whole && level == 0 ? 2 : 1)) {
            const int middle = (level + end) / 2, reach = count(middle);
            if (reach > number) level = middle;
            else end = middle, at_end = reach;
        }
        number -= at_end;
#pragma unroll 1
        for (int b0 = 0;; b0 += 32) {  // those of the level, one sequence after the other
            const Extent lies = of(b0);
            const Tiles tiles(score, lies);
            const int last = tiles.beyond(level), beyond = tiles.beyond(Tiles::HALVED ? end : level + 1);
            const int here = last - beyond, lane = threadIdx.x % 32;
            int upto = here;
#pragma unroll
            for (int step = 1; step < 32; step *= 2) {
                const int more = __shfl_up_sync(0xffffffffu, upto, step);
                upto += lane >= step ? more : 0;
            }
            const unsigned found = __ballot_sync(0xffffffffu, upto > number);
            if (found) {
                const int who = __ffs(found) - 1, row0 = (tiles.first(beyond, last) + number - (upto - here)) * Tiles::ROWS;
                const auto his = [&](int x) { return __shfl_sync(0xffffffffu, x, who); };
                return {{b0 + who, his(row0)},
                        {his(lies.first_query), his(lies.Sq), his(lies.first_key), his(lies.all_keys), his(lies.Sk)}};
            }
            number -= __shfl_sync(0xffffffffu, upto, 31);
        }
    }

    __device__ __forceinline__ bool brief(const Dealt& piece) const { return Tiles::brief(score, piece); }

    // The number-th piece of all heads: of queries, of which `group` at a time share keys and values; or of keys, each shared by
    // a group. None when there is no such.
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned group) const {
        const unsigned all = count(-1);
        if (number >= all * heads) return {-1};
        const unsigned section = min(Tiles::section(score, group), heads);
        unsigned first = 0;
#pragma unroll 1
        while (heads - first > 2 * section && number >= section * all) first += section, number -= section * all;
        const unsigned width = heads - first > 2 * section ? section : heads - first;
        const Found found = tile(number / width);
        return {found.rows.b, found.rows.row0, static_cast<int>(first + number % width), found.extent};
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
    __device__ __forceinline__ bool brief(const Dealt&) const { return false; }  // nobody knows
    __device__ __forceinline__ Dealt piece(unsigned number, unsigned heads, unsigned) const {
        if (number >= tiles * heads) return {};
        const unsigned section = CAUSAL ? max(2 * gridDim.x / tiles, 1) : 1, first = number / (section * tiles) * section;
        const unsigned width = min(section, heads - first), i = number - first * tiles;
        return {(tiles - 1 - i / width) * BLOCK_M, first + i % width, H};
    }
};
#endif
