// Members of Mask (mask.cuh): the block map, which says for each block of MAP_M queries x MAP_N keys whether a mask
// tensor or mask_mod leaves some scores visible, and whether all (FlexAttention's block mask: Dong et al.
// 2024, arXiv:2412.05496). Causality, windows and lengths are not in the map: mask.cuh computes their ranges.
//
// clang-format off
//   block_map [B or 1][H or 1][ceil(Sq / MAP_M) or 1][words, words, MAP_M * 16 * words]
//                                                     words = 4 * ceil(Sk / (4 * 32 * MAP_N))
// clang-format on
//
// A block has two bits: SOME_VISIBLE (the mask leaves some scores of the block visible), FULLY_VISIBLE (all scores). A
// row of the map has `words` words of SOME_VISIBLE bits, 32 blocks per word, then as many of FULLY_VISIBLE bits. With
// HAS_ELEMENT_BITS (a mask tensor without mask_mod) element bits follow, one per (query, key), so that kernels read 32
// keys of a row at once instead of a byte per key.
//
// Rows 2k and 2k + 1 of the map are a pair. Element bits of 64 queries x 512 keys are written only if the mask hides
// some of these elements, and leaves some of the pair's (128 queries x the same keys) visible. The second
// condition is about the pair, not the 64 queries alone, because a work tile also reads the bits of 64 hidden rows if
// others of its rows see a key. The rows of a work tile must therefore be in one pair.
//
// A kernel with HAS_BLOCK_MAP skips tiles without a visible score, and does not mask fully visible tiles. Tiles are
// multiples of MAP_N keys.
static constexpr bool HAS_BLOCK_MAP = BLOCK_MAP, HAS_ELEMENT_BITS = BLOCK_MAP == 2;
static_assert(!BLOCK_MAP || !(RAGGED || PAGE_SIZE), "a ragged or paged batch has no map (sandbox/core/block_map.py)");
static constexpr int MAP_M = 64, MAP_N = 16, WORD_KEYS = 32 * MAP_N;

// Sizes and offsets within a row of the map, in words of 32 bits. kind_words: `words` in the diagram above;
// element_bits_at: where the element bits of query `row` (0 .. MAP_M - 1) begin; row_words: the size of the row.
static __device__ __forceinline__ int kind_words(const Score& score) {
    return (score.Sk + 4 * WORD_KEYS - 1) / (4 * WORD_KEYS) * 4;
}
static __device__ __forceinline__ int element_bits_at(const Score& score, int row) {
    return kind_words(score) * (2 + row * (WORD_KEYS / 32));
}
static __device__ __forceinline__ int row_words(const Score& score) {
    return element_bits_at(score, HAS_ELEMENT_BITS ? MAP_M : 0);
}

enum MapBits { SOME_VISIBLE, FULLY_VISIBLE };

// A word of bits for query rows m0 .. m1 - 1 and keys from WORD_KEYS * word: the OR of the rows of the map for
// SOME_VISIBLE, else the AND.
template <MapBits BITS>
__device__ __forceinline__ unsigned map_word(int m0, int m1, int word) const {
    unsigned bits = BITS == FULLY_VISIBLE ? ~0u : 0;
#if BLOCK_MAP
    const unsigned* const at = block_map + (BITS == FULLY_VISIBLE ? kind_words(score) : 0) + word;
#pragma unroll 1
    for (int row = m0 / MAP_M; row <= (min(m1, Sq) - 1) / MAP_M; ++row) {
        const unsigned row_bits = at[row * score.block_map.stride_i];
        bits = BITS == FULLY_VISIBLE ? bits & row_bits : bits | row_bits;
    }
#endif
    return bits;
}

// Whether some scores, or all, of query rows m0 .. m1 - 1 and keys n0 .. n0 + KEYS - 1 are visible. Keys >= Sk are
// ignored.
template <MapBits BITS, int KEYS>
__device__ __forceinline__ bool map_covers(int m0, int m1, int n0) const {
    static_assert(!HAS_BLOCK_MAP || KEYS % MAP_N == 0, "the map has a bit for every MAP_N keys");
    if (!HAS_BLOCK_MAP) return BITS == SOME_VISIBLE || !ELEMENT_MASK;
    const int begin = n0 / MAP_N, end = (min(n0 + KEYS, score.Sk) + MAP_N - 1) / MAP_N;
#pragma unroll 1
    for (int word = begin / 32; word * 32 < end; ++word) {
        const unsigned in_tile =
            (begin > word * 32 ? ~0u << begin % 32 : ~0u) & (end < word * 32 + 32 ? ~(~0u << end % 32) : ~0u);
        const unsigned bits = map_word<BITS>(m0, m1, word) & in_tile;
        if (BITS == SOME_VISIBLE && bits) return true;
        if (BITS == FULLY_VISIBLE && bits != in_tile) return false;
    }
    return BITS == FULLY_VISIBLE;
}

// map_covers with SOME_VISIBLE, and with FULLY_VISIBLE, of the 64 query rows of one row of the map; the loads of both
// overlap. For m0 >= Sq: false, true.
struct MapTile {
    bool some_visible, fully_visible;
};
template <int KEYS>
__device__ __forceinline__ MapTile map_tile(int m0, int n0) const {
#if BLOCK_MAP
    static_assert(MAP_M == 64 && KEYS % MAP_N == 0 && KEYS <= WORD_KEYS, "one row of the map, at most two words");
    const int words = kind_words(score), begin = n0 / MAP_N, word = begin / 32;
    const int next = WORD_KEYS % KEYS ? min(word + 1, words - 1) : word;  // a tile may extend into the next word
    const unsigned* const at = block_map + min(m0, Sq - 1) / MAP_M * score.block_map.stride_i;
    const unsigned in_tile = ~(~0u << min(KEYS / MAP_N, (score.Sk + MAP_N - 1) / MAP_N - begin));
    const auto bits = [&](const unsigned* kind) {
        return static_cast<unsigned>((static_cast<unsigned long long>(kind[next]) << 32 | kind[word]) >> begin % 32) &
               in_tile;
    };
    const unsigned some = bits(at), all = bits(at + words);
    return {m0 < Sq && some, m0 >= Sq || all == in_tile};
#else
    return {true, !ELEMENT_MASK};
#endif
}

// HAS_ELEMENT_BITS: the bits of keys n0 .. n0 + KEYS - 1 of query_row, or of the last query row if query_row >= Sq.
// n0 is a multiple of 16, or of 32 if KEYS is.
template <int KEYS>
__device__ __forceinline__ void element_bits(unsigned (&bits)[(KEYS + 31) / 32], int query_row, int n0) const {
#if BLOCK_MAP
    static_assert(KEYS % MAP_N == 0, "whole half-words");
    static_assert(!HAS_ELEMENT_BITS || WORD_KEYS % KEYS == 0,
                  "a tile's keys must be in one word of the map: the element bits of another are possibly unwritten");
    const int row = min(query_row, Sq - 1);
    const unsigned* const at = block_map + row / MAP_M * score.block_map.stride_i + element_bits_at(score, row % MAP_M);
    const unsigned short* const halves = reinterpret_cast<const unsigned short*>(at) + n0 / 16;
#pragma unroll
    for (int k = 0; k < (KEYS + 31) / 32; ++k)
        bits[k] =
            KEYS % 32 == 0 ? at[n0 / 32 + k] : halves[2 * k] | (2 * k + 1 < KEYS / 16 ? halves[2 * k + 1] << 16 : 0);
#endif
}

// The first of the key tiles `tile` .. `end` - 1, KEYS keys each, with a score visible to query rows m0 .. m1 - 1;
// `end` if there is none. Reads four words at a time, 2048 keys, to skip long hidden ranges quickly.
template <int KEYS>
__device__ __forceinline__ int next_key_tile(int m0, int m1, int tile, int end) const {
#if BLOCK_MAP
#pragma unroll 1
    for (int bit = tile * (KEYS / MAP_N); tile < end && bit * MAP_N < score.Sk; bit = (bit / 128 + 1) * 128) {
        uint4 words = {};
#pragma unroll 2
        for (int row = m0 / MAP_M; row <= (min(m1, Sq) - 1) / MAP_M; ++row) {
            const uint4 four =
                *reinterpret_cast<const uint4*>(block_map + row * score.block_map.stride_i + bit / 128 * 4);
            words.x |= four.x, words.y |= four.y, words.z |= four.z, words.w |= four.w;
        }
        const unsigned four[4] = {words.x, words.y, words.z, words.w};
        int first = -1;
#pragma unroll
        for (int k = 3; k >= 0; --k) {
            const int from = min(max(bit % 128 - 32 * k, 0), 32);  // ignore the bits of earlier tiles
            const unsigned remaining = from < 32 ? four[k] & ~0u << from : 0;
            if (remaining) first = bit / 128 * 128 + 32 * k + __ffs(remaining) - 1;
        }
        if (first >= 0) return min(first / (KEYS / MAP_N), end);
    }
    return end;
#else
    return tile;
#endif
}

// The first row of the first query tile of ROWS rows in m0 .. end - 1 with a score visible in keys n0 .. n0 + KEYS - 1;
// a row >= end if there is none. A warp collective: each lane tests one tile.
template <int ROWS, int KEYS>
__device__ __forceinline__ int next_query_tile(int m0, int end, int n0) const {
    for (; HAS_BLOCK_MAP && m0 < end; m0 += 32 * ROWS) {
        const int lane_m0 = m0 + static_cast<int>(threadIdx.x % 32) * ROWS;
        const unsigned lanes =
            __ballot_sync(0xffffffffu, lane_m0 < end && map_covers<SOME_VISIBLE, KEYS>(lane_m0, lane_m0 + ROWS, n0));
        if (lanes) return m0 + (__ffs(lanes) - 1) * ROWS;
    }
    return m0;
}
