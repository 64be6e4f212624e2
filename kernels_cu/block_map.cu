// Which tiles a mask or a user's condition leaves: the map that tensor-core kernels walk by (include/block_map.cuh).
//
// A block makes a word of each kind, of 64 queries x 512 keys. A condition: a warp looks at 16 queries x 128 keys, a lane at four
// keys of each query: what depends on the key alone is read once, what depends on the query alone once for four. Rows and keys
// beyond the last are looked at as the last: they change nothing.
//
// A mask, BY_PAIR: a block makes such words of two rows of the map. A warp has 8 queries x 512 keys, a lane 16 keys of each query,
// which are a bit of the word, and half of a word of pairs; they are read in words as wide as all rows are aligned. Pairs are
// stored where somebody may ask for them: where a row hides some of 512 keys, and it or the other one shows some.
#include "tensor.cuh"
#include "score_mod.cuh"

constexpr int ROWS = 16, KEYS = 128, WARPS = BLOCK_N / KEYS * (BLOCK_M / ROWS), LANE_KEYS = Head::MAP_N;
static_assert(BLOCK_M == Head::MAP_M && BLOCK_N == Head::WORD_KEYS && SMEM_BYTES == 0, "a block has a word of the map");
static_assert(LANE_KEYS == 16, "a load, and a bit of the word");

// Which of a word's bytes are not 0, a bit each.
__device__ __forceinline__ unsigned truths(unsigned char byte) { return byte != 0; }
__device__ __forceinline__ unsigned truths(unsigned bytes) {
    const unsigned tops = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
    return tops * 0x00204081u >> 28;
}
__device__ __forceinline__ unsigned truths(uint4 bytes) {
    return truths(bytes.x) | truths(bytes.y) << 4 | truths(bytes.z) << 8 | truths(bytes.w) << 12;
}

extern "C" __global__ __launch_bounds__(32 * WARPS, Head::BY_PAIR ? 3 : 0) void block_map(
    unsigned* block_map,  // (B or 1, H or 1, rows, Head::row_words), contiguous
    int map_rows,         // of MAP_M queries; 1 where all are alike
    const __grid_constant__ Score score) {
#if BLOCK_MAP
    constexpr int MAP_ROWS = Head::BY_PAIR ? 2 : 1, ROW_WARPS = WARPS / MAP_ROWS;  // of the block; of each of them
    __shared__ unsigned bits[2][WARPS];
    const int words = Head::kind_words(score), word = blockIdx.x % words, row0 = blockIdx.x / words * MAP_ROWS, h = blockIdx.y, b = blockIdx.z;
    const int warp = threadIdx.x / 32 % ROW_WARPS, lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 / ROW_WARPS, m0 = row * BLOCK_M;
    const Head head(score, b, h);
    const int keys = Snippet::HIDES ? head.Sk : score.Sk;  // a mask alone: b may stand for others, of other lengths
    const Range reached = head.keys(m0, m0 + BLOCK_M);     // no kernel asks for the rest
    const bool by_row = map_rows > 1 && (Snippet::HIDES || !KEY_LENGTHS);
    const auto row_at = [&](int row) {
        return block_map + ((static_cast<long long>(b) * gridDim.y + h) * map_rows + row) * Head::row_words(score);
    };
    const auto asked = [&](int begin, int end) {
        return row < map_rows && begin < keys && (!by_row || (begin < reached.end && reached.begin < end));
    };
    unsigned some_visible = 0, holes = 0;  // of the word's bits: whether some pair is seen, and whether some is hidden
#if BLOCK_MAP == 2
    const int first_key = word * BLOCK_N + lane * LANE_KEYS, group = first_key / KEYS * KEYS;
    const bool own = asked(group, group + KEYS);
    constexpr int OWN_ROWS = BLOCK_M / ROW_WARPS, ABREAST = 4;  // of a warp; whose pairs are kept in a number
    unsigned long long kept[OWN_ROWS / ABREAST];
    const auto look = [&](auto example) {
        using Word = decltype(example);
        constexpr int WIDTH = sizeof(Word), AT_ONCE = WIDTH == 16 ? ABREAST : 1;  // rows, of 16 loads at most
        unsigned some = 0, all = 0xffff;
#pragma unroll
        for (int part = 0; part < OWN_ROWS / ABREAST; ++part) {
            kept[part] = 0;
#pragma unroll 1
            for (int first = 0; first < ABREAST; first += AT_ONCE) {
                Word bytes[AT_ONCE][LANE_KEYS / WIDTH] = {};
#pragma unroll
                for (int i = 0; i < (own ? AT_ONCE : 0); ++i) {
                    const int query_row = min(m0 + warp * OWN_ROWS + part * ABREAST + first + i, score.Sq - 1);
                    const bool* const from = head.mask + query_row * score.mask.stride_i;
#pragma unroll
                    for (int k = 0; k < LANE_KEYS; k += WIDTH)
                        bytes[i][k / WIDTH] = *reinterpret_cast<const Word*>(from + min(first_key + k, keys - WIDTH));
                }
#pragma unroll
                for (int i = 0; i < AT_ONCE; ++i) {
                    unsigned pairs = 0;
#pragma unroll
                    for (int k = 0; k < LANE_KEYS; k += WIDTH) {
                        unsigned found = truths(bytes[i][k / WIDTH]);
                        if (first_key + k >= keys) found = found >> (WIDTH - 1) ? (1u << WIDTH) - 1 : 0;  // as the last key
                        pairs |= found << k;
                    }
                    some |= pairs, all &= pairs;
                    kept[part] |= static_cast<unsigned long long>(pairs) << LANE_KEYS * (first + i);
                }
            }
        }
        some_visible = __ballot_sync(0xffffffffu, some != 0);
        holes = __ballot_sync(0xffffffffu, own && all != 0xffff);
    };
    const auto rows_at = reinterpret_cast<size_t>(head.mask) | score.mask.stride_i | keys;
    if (rows_at % sizeof(uint4) == 0) look(uint4{});
    else if (rows_at % sizeof(unsigned) == 0) look(0u);
    else look(static_cast<unsigned char>(0));
#else
    const int first_row = m0 + warp / (BLOCK_N / KEYS) * ROWS, first_key = word * BLOCK_N + warp % (BLOCK_N / KEYS) * KEYS;
    const bool own = asked(first_key, first_key + KEYS);
    bool some[KEYS / 32] = {}, all[KEYS / 32];
#pragma unroll
    for (bool& each : all) each = true;
#pragma unroll 4
    for (int i = 0; i < (own ? ROWS : 0); ++i) {
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) {
            const bool seen = head.mask_allows(min(first_row + i, score.Sq - 1), min(first_key + 32 * k + lane, keys - 1));
            some[k] |= seen, all[k] &= seen;
        }
    }
#pragma unroll
    for (int k = 0; k < KEYS / 32; ++k) {  // two bits of each ballot
        const unsigned found = __ballot_sync(0xffffffffu, some[k]), hidden = __ballot_sync(0xffffffffu, !all[k]);
        some_visible |= ((found & 0xffff ? 1 : 0) | (found >> 16 ? 2 : 0)) << 2 * k;
        holes |= ((hidden & 0xffff ? 1 : 0) | (hidden >> 16 ? 2 : 0)) << 2 * k;
    }
    const int from = first_key % BLOCK_N / LANE_KEYS;
    some_visible <<= from, holes <<= from;
#endif
    if (lane == 0) bits[0][threadIdx.x / 32] = some_visible, bits[1][threadIdx.x / 32] = holes;
    __syncthreads();  // every warp's bits are there
    const int kind = threadIdx.x % 2, whose = row0 + threadIdx.x / 2;
    if (threadIdx.x < 2 * MAP_ROWS && whose < map_rows) {
        unsigned found = 0;
        for (int i = 0; i < ROW_WARPS; ++i) found |= bits[kind][threadIdx.x / 2 * ROW_WARPS + i];
        row_at(whose)[kind * words + word] = kind ? ~found : found;
    }
#if BLOCK_MAP == 2
    const bool shown = __any_sync(0xffffffffu, bits[0][lane % WARPS] != 0);
    const bool hidden = __any_sync(0xffffffffu, bits[1][(row - row0) * ROW_WARPS + lane % ROW_WARPS] != 0);
    if (shown && hidden) {
#pragma unroll
        for (int i = 0; i < OWN_ROWS; ++i) {
            unsigned* const to = row_at(row) + Head::pair_bits_at(score, warp * OWN_ROWS + i);
            reinterpret_cast<unsigned short*>(to)[first_key / LANE_KEYS] = static_cast<unsigned short>(kept[i / ABREAST] >> LANE_KEYS * (i % ABREAST));
        }
    }
#endif
#endif
}
