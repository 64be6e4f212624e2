// Members of Sight (mask.cuh): which tiles a mask or a user's condition leaves, as FlexAttention's block mask tells it
// (Dong et al. 2024, arXiv:2412.05496). Causality, windows and lengths are not in it: ranges tell of them.
//
// The map has a bit for MAP_M queries x MAP_N keys, so fine that tiles of every kernel are made of whole ones; 32 to a word. A
// row of it, MAP_M queries: the words that tell whether something is seen, then those that tell whether everything is. BY_PAIR,
// of a mask without a condition, follows a bit for each pair, row after row: kernels then read 32 keys of a row at once, and
// ask the mask itself, a byte a key, nothing. Not all pairs are written: of the 512 keys of a word only those that somebody asks
// for whose tiles are within a word, and of one or two rows of the map, where they see part of it.
//
//   block_map [B or 1][H or 1][ceil(Sq / MAP_M) or 1][words, words, MAP_M * 16 * words],    words = 4 * ceil(Sk / (4 * 32 * MAP_N))
//
// A kernel that walks by it (`MAPPED`) goes from one tile to the next one that holds something, and takes those that hold
// everything as it takes tiles without a mask. Tiles are multiples of MAP_N keys.
static constexpr bool MAPPED = BLOCK_MAP, BY_PAIR = BLOCK_MAP == 2;
static constexpr int MAP_M = 64, MAP_N = 16, WORD_KEYS = 32 * MAP_N;

// Words of a row of the map that tell one thing of its keys; where the pairs of its row-th query begin; and all it has.
static __device__ __forceinline__ int kind_words(const Score& score) { return (score.Sk + 4 * WORD_KEYS - 1) / (4 * WORD_KEYS) * 4; }
static __device__ __forceinline__ int pair_bits_at(const Score& score, int row) { return kind_words(score) * (2 + row * (WORD_KEYS / 32)); }
static __device__ __forceinline__ int row_words(const Score& score) { return pair_bits_at(score, BY_PAIR ? MAP_M : 0); }

enum Told { SOME_VISIBLE, FULLY_VISIBLE };

// A word, of keys from WORD_KEYS * word on: whether some, or all, of query rows m0 .. m1 see something, or everything, of it.
template <Told TOLD>
__device__ __forceinline__ unsigned map_word(int m0, int m1, int word) const {
    unsigned bits = TOLD == FULLY_VISIBLE ? ~0u : 0;
#if BLOCK_MAP
    const unsigned* const at = block_map + (TOLD == FULLY_VISIBLE ? kind_words(score) : 0) + word;
#pragma unroll 1
    for (int row = m0 / MAP_M; row <= (min(m1, Sq) - 1) / MAP_M; ++row) {
        const unsigned own = at[row * score.block_map.stride_i];
        bits = TOLD == FULLY_VISIBLE ? bits & own : bits | own;
    }
#endif
    return bits;
}

// Whether query rows m0 .. m1 see something, or everything, of keys n0 .. n0 + KEYS, of which those from Sk on do not count.
template <Told TOLD, int KEYS>
__device__ __forceinline__ bool map_covers(int m0, int m1, int n0) const {
    static_assert(!MAPPED || KEYS % MAP_N == 0, "the map has a bit for every MAP_N keys");
    if (!MAPPED) return !ELEMENT_MASK;
    const int begin = n0 / MAP_N, end = (min(n0 + KEYS, score.Sk) + MAP_N - 1) / MAP_N;
#pragma unroll 1
    for (int word = begin / 32; word * 32 < end; ++word) {
        const unsigned own = (begin > word * 32 ? ~0u << begin % 32 : ~0u) & (end < word * 32 + 32 ? ~(~0u << end % 32) : ~0u);
        const unsigned bits = map_word<TOLD>(m0, m1, word) & own;
        if (TOLD == SOME_VISIBLE && bits) return true;
        if (TOLD == FULLY_VISIBLE && bits != own) return false;
    }
    return TOLD == FULLY_VISIBLE;
}

// The same of the 64 query rows of one row of the map, both at once: what is loaded is not waited for one by one. Of rows from Sq
// on nothing, and everything.
struct MapTile {
    bool some_visible, fully_visible;
};
template <int KEYS>
__device__ __forceinline__ MapTile map_tile(int m0, int n0) const {
#if BLOCK_MAP
    static_assert(MAP_M == 64 && KEYS % MAP_N == 0 && KEYS <= WORD_KEYS, "a row of the map, and a word or two of it");
    const int words = kind_words(score), begin = n0 / MAP_N, word = begin / 32;
    const int next = WORD_KEYS % KEYS ? min(word + 1, words - 1) : word;  // where a tile may begin in one and end in the next
    const unsigned* const at = block_map + min(m0, Sq - 1) / MAP_M * score.block_map.stride_i;
    const unsigned own = ~(~0u << min(KEYS / MAP_N, (score.Sk + MAP_N - 1) / MAP_N - begin));
    const auto bits = [&](const unsigned* kind) {
        return static_cast<unsigned>((static_cast<unsigned long long>(kind[next]) << 32 | kind[word]) >> begin % 32) & own;
    };
    const unsigned some = bits(at), all = bits(at + words);
    return {m0 < Sq && some, m0 >= Sq || all == own};
#else
    return {true, !ELEMENT_MASK};
#endif
}

// BY_PAIR: of a query row, or of the last one, a bit for each of keys n0 .. n0 + KEYS, in their order: halves of words, from an n0
// that is a multiple of 16; whole ones, where KEYS and n0 are multiples of 32.
template <int KEYS>
__device__ __forceinline__ void pair_bits(unsigned (&bits)[(KEYS + 31) / 32], int query_row, int n0) const {
#if BLOCK_MAP
    static_assert(KEYS % MAP_N == 0, "halves of words");
    static_assert(!BY_PAIR || WORD_KEYS % KEYS == 0, "who asks for pairs asks within a word: others may not be written");
    const int row = min(query_row, Sq - 1);
    const unsigned* const at = block_map + row / MAP_M * score.block_map.stride_i + pair_bits_at(score, row % MAP_M);
    const unsigned short* const halves = reinterpret_cast<const unsigned short*>(at) + n0 / 16;
#pragma unroll
    for (int k = 0; k < (KEYS + 31) / 32; ++k)
        bits[k] = KEYS % 32 == 0 ? at[n0 / 32 + k] : halves[2 * k] | (2 * k + 1 < KEYS / 16 ? halves[2 * k + 1] << 16 : 0);
#endif
}

// Of key tiles `tile` .. `end`, KEYS keys each, the first one of which some of query rows m0 .. m1 see something; or `end`.
// Four words at a time, so that long stretches of nothing are soon behind.
template <int KEYS>
__device__ __forceinline__ int next_key_tile(int m0, int m1, int tile, int end) const {
#if BLOCK_MAP
#pragma unroll 1
    for (int bit = tile * (KEYS / MAP_N); tile < end && bit * MAP_N < score.Sk; bit = (bit / 128 + 1) * 128) {
        uint4 words = {};
#pragma unroll 2
        for (int row = m0 / MAP_M; row <= (min(m1, Sq) - 1) / MAP_M; ++row) {
            const uint4 own = *reinterpret_cast<const uint4*>(block_map + row * score.block_map.stride_i + bit / 128 * 4);
            words.x |= own.x, words.y |= own.y, words.z |= own.z, words.w |= own.w;
        }
        const unsigned four[4] = {words.x, words.y, words.z, words.w};
        int found = -1;
#pragma unroll
        for (int k = 3; k >= 0; --k) {
            const int from = min(max(bit % 128 - 32 * k, 0), 32);  // the word's bits before are behind
            const unsigned left = from < 32 ? four[k] & ~0u << from : 0;
            if (left) found = bit / 128 * 128 + 32 * k + __ffs(left) - 1;
        }
        if (found >= 0) return min(found / (KEYS / MAP_N), end);
    }
    return end;
#else
    return tile;
#endif
}

// Of query tiles of ROWS rows, from row m0 on, the first row of the first one before `end` that sees something of keys n0 ..
// n0 + KEYS, or some row from `end` on: by all lanes of a warp, a tile each.
template <int ROWS, int KEYS>
__device__ __forceinline__ int next_query_tile(int m0, int end, int n0) const {
    for (; MAPPED && m0 < end; m0 += 32 * ROWS) {
        const int own = m0 + static_cast<int>(threadIdx.x % 32) * ROWS;
        const unsigned found = __ballot_sync(0xffffffffu, own < end && map_covers<SOME_VISIBLE, KEYS>(own, own + ROWS, n0));
        if (found) return m0 + (__ffs(found) - 1) * ROWS;
    }
    return m0;
}
