// Which tiles a mask or a user's condition leaves: the map that tensor-core kernels walk by (include/block_map.cuh).
//
// A block makes a word of each kind, of 64 queries x 512 keys. A warp looks at 16 queries x 128 keys, a lane at four keys of
// each query: what depends on the key alone is read once, what depends on the query alone once for four, a mask's rows 32
// neighbours at a time. Rows and keys beyond the last are looked at as the last: they change nothing. BY_PAIR each row's 128 bits
// are kept as they are found, a row in a lane, and stored as they are.
#include "common.cuh"
#include "score.cuh"

constexpr int ROWS = 16, KEYS = 128, WARPS = BLOCK_N / KEYS * (BLOCK_M / ROWS);
static_assert(BLOCK_M == Head::MAP_M && BLOCK_N == Head::WORD_KEYS && SMEM_BYTES == 0, "a block has a word of the map");

extern "C" __global__ __launch_bounds__(32 * WARPS) void block_map(
    unsigned* block_map,  // (B or 1, H or 1, rows, Head::row_words), contiguous
    int map_rows,         // of MAP_M queries; 1 where all are alike
    const __grid_constant__ Score score) {
#if BLOCK_MAP
    __shared__ unsigned bits[2][WARPS];
    const int words = gridDim.x / map_rows, word = blockIdx.x % words, row = blockIdx.x / words, h = blockIdx.y, b = blockIdx.z;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, m0 = row * BLOCK_M;
    const int first_row = m0 + warp / (BLOCK_N / KEYS) * ROWS, first_key = word * BLOCK_N + warp % (BLOCK_N / KEYS) * KEYS;
    const Head head(score, b, h);
    const int keys = Snippet::HIDES ? head.Sk : score.Sk;  // a mask alone: b may stand for others, of other lengths
    const Range reached = head.keys(m0, m0 + BLOCK_M);     // no kernel asks for the rest
    const bool by_row = map_rows > 1 && (Snippet::HIDES || !KEY_LENGTHS);
    unsigned* const own_row = block_map + ((static_cast<long long>(b) * gridDim.y + h) * map_rows + row) * Head::row_words(score);
    const bool asked = first_key < keys && (!by_row || (first_key < reached.end && reached.begin < first_key + KEYS));
    bool some[KEYS / 32] = {}, all[KEYS / 32];
#pragma unroll
    for (bool& own : all) own = true;
    unsigned pairs[KEYS / 32] = {};  // of row `lane`
#pragma unroll 4
    for (int i = 0; i < (asked ? ROWS : 0); ++i) {
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) {
            const bool seen = head.uncovers(min(first_row + i, score.Sq - 1), min(first_key + 32 * k + lane, keys - 1));
            some[k] |= seen, all[k] &= seen;
            if (Head::BY_PAIR) {
                const unsigned found = __ballot_sync(0xffffffffu, seen);
                if (lane == i) pairs[k] = found;
            }
        }
    }
    if (Head::BY_PAIR && lane < ROWS) {
        unsigned* const to = own_row + Head::pairs_at(score, first_row - m0 + lane) + first_key / 32;
        *reinterpret_cast<uint4*>(to) = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
    unsigned something = 0, everything = 0;  // two bits of each ballot, 16 keys a bit
#pragma unroll
    for (int k = 0; k < KEYS / 32; ++k) {
        const unsigned found = __ballot_sync(0xffffffffu, some[k]), hidden = __ballot_sync(0xffffffffu, !all[k]);
        something |= ((found & 0xffff ? 1 : 0) | (found >> 16 ? 2 : 0)) << 2 * k;
        everything |= ((hidden & 0xffff ? 0 : 1) | (hidden >> 16 ? 0 : 2)) << 2 * k;
    }
    if (lane == 0) bits[0][warp] = something, bits[1][warp] = everything;
    __syncthreads();  // every warp's bits are there
    if (threadIdx.x < 2) {
        unsigned found = threadIdx.x ? ~0u : 0;
        for (int rows = 0; rows < BLOCK_M / ROWS; ++rows) {
            unsigned own = 0;
            for (int i = 0; i < BLOCK_N / KEYS; ++i) own |= bits[threadIdx.x][rows * (BLOCK_N / KEYS) + i] << KEYS / 16 * i;
            found = threadIdx.x ? found & own : found | own;
        }
        own_row[threadIdx.x * words + word] = found;
    }
#endif
}
