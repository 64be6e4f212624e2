// Which tiles a mask or a user's condition leaves: the map that tensor-core kernels walk by (include/block_map.cuh).
//
// A warp looks at 64 queries x 32 keys, a lane at one key of all the queries: what depends on the key alone is read once,
// what depends on the query alone by all lanes at once, a mask's rows 32 neighbours at a time. Two ballots make two bits of
// each kind, a block's 16 warps a word. Rows and keys beyond the last are looked at as the last: they change nothing.
#include "common.cuh"
#include "score.cuh"

constexpr int WARPS = BLOCK_N / 32;
static_assert(BLOCK_M == Head::MAP_M && BLOCK_N == Head::WORD_KEYS && SMEM_BYTES == 0, "a block has a word of the map");

extern "C" __global__ __launch_bounds__(32 * WARPS) void block_map(
    unsigned* block_map,  // (B or 1, H or 1, rows, 2 * words), contiguous
    int map_rows,         // of MAP_M queries; 1 where all are alike
    const __grid_constant__ Score score) {
#if BLOCK_MAP
    __shared__ unsigned bits[2][WARPS];
    const int words = gridDim.x / map_rows, word = blockIdx.x % words, row = blockIdx.x / words, h = blockIdx.y, b = blockIdx.z;
    const int warp = threadIdx.x / 32, m0 = row * BLOCK_M, first_key = word * BLOCK_N + warp * 32;  // of the warp
    const Head head(score, b, h);
    const int keys = Snippet::HIDES ? head.Sk : score.Sk;  // a mask alone: b may stand for others, of other lengths
    const int key_col = min(first_key + static_cast<int>(threadIdx.x % 32), keys - 1);
    const Range reached = head.keys(m0, m0 + BLOCK_M);  // no kernel asks for the rest
    const bool by_row = map_rows > 1 && (Snippet::HIDES || !KEY_LENGTHS);
    const bool asked = first_key < keys && (!by_row || (first_key < reached.end && reached.begin < first_key + 32));
    bool some = false, all = true;
#pragma unroll 16
    for (int i = 0; i < (asked ? BLOCK_M : 0); ++i) {
        const bool seen = head.uncovers(min(m0 + i, score.Sq - 1), key_col);
        some |= seen, all &= seen;
    }
    const unsigned something = __ballot_sync(0xffffffffu, some), everything = __ballot_sync(0xffffffffu, all);
    if (threadIdx.x % 32 == 0) {
        bits[0][warp] = (something & 0xffff ? 1 : 0) | (something >> 16 ? 2 : 0);
        bits[1][warp] = ((everything & 0xffff) == 0xffff ? 1 : 0) | (everything >> 16 == 0xffff ? 2 : 0);
    }
    __syncthreads();  // every warp's bits are there
    if (threadIdx.x < 2) {
        unsigned found = 0;
        for (int i = 0; i < WARPS; ++i) found |= bits[threadIdx.x][i] << 2 * i;
        block_map[((static_cast<long long>(b) * gridDim.y + h) * map_rows + row) * 2 * words + threadIdx.x * words + word] = found;
    }
#endif
}
