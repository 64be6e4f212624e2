// Computes the block map (include/block_map.cuh): which tiles a mask tensor or mask_mod leaves visible.
//
// mask_mod: a block computes one word of each kind of bits, for 64 queries x 512 keys. A warp evaluates 16 queries x
// 128 keys, a lane four keys per query, so that terms that depend on the key alone are computed once, and those that
// depend on the query alone once per four keys. Indices beyond Sq and Sk are clamped to the last, which does not change
// the result.
//
// A mask tensor (HAS_ELEMENT_BITS): a block computes the words of two rows of the map. A warp reads 8 queries x 512
// keys, a lane 16 keys per query, which are one bit of the word and 16 element bits. Loads are as wide as the alignment
// of all rows allows. The element bits of one row of the map (64 queries) x 512 keys are stored if the mask hides some
// of them, and leaves some of the two rows' visible: only then do kernels read them.
#include "tensor.cuh"
#include "score_mod.cuh"

constexpr int ROWS = 16, KEYS = 128, WARPS = BLOCK_N / KEYS * (BLOCK_M / ROWS), LANE_KEYS = Head::MAP_N;
static_assert(BLOCK_M == Head::MAP_M && BLOCK_N == Head::WORD_KEYS && SMEM_BYTES == 0,
              "a block computes one word of the map");
static_assert(LANE_KEYS == 16, "one load and one bit per lane");
#if BLOCK_MAP  // otherwise unused, of which NVRTC warns
constexpr int MAP_ROWS = Head::HAS_ELEMENT_BITS ? 2 : 1, ROW_WARPS = WARPS / MAP_ROWS;  // rows per block; warps per row
#endif

// One bit per byte: whether it is not 0.
__device__ __forceinline__ unsigned nonzero_bytes(unsigned char byte) { return byte != 0; }
__device__ __forceinline__ unsigned nonzero_bytes(unsigned bytes) {
    const unsigned high_bits = (((bytes & 0x7f7f7f7fu) + 0x7f7f7f7fu) | bytes) & 0x80808080u;
    return high_bits * 0x00204081u >> 28;
}
__device__ __forceinline__ unsigned nonzero_bytes(uint4 bytes) {
    return nonzero_bytes(bytes.x) | nonzero_bytes(bytes.y) << 4 | nonzero_bytes(bytes.z) << 8 |
           nonzero_bytes(bytes.w) << 12;
}

// The bits of a word that one warp computes, one per 16 keys: some score is visible; some score is hidden.
struct WordBits {
    unsigned some_visible = 0, some_hidden = 0;
};

#if BLOCK_MAP == 2
// A warp's rows of a mask tensor.
struct TensorRows {
    // Queries per warp; queries per word of element_words.
    static constexpr int WARP_ROWS = BLOCK_M / ROW_WARPS, ROWS_PER_WORD = 4;
    unsigned long long element_words[WARP_ROWS / ROWS_PER_WORD];  // the element bits of this lane's 16 keys

    // 16 keys from first_key on, in loads of a Word. needed: whether kernels read the map for the 128 keys (KEYS) that
    // contain these.
    template <class Word>
    __device__ __forceinline__ void scan(WordBits& bits, const Head& head, int first_row, int first_key, int keys,
                                         bool needed) {
        constexpr int WIDTH = sizeof(Word), ROWS_IN_FLIGHT = WIDTH == 16 ? ROWS_PER_WORD : 1;  // rows; at most 16 loads
        unsigned some_visible_lane = 0, all_visible_lane = 0xffff;
#pragma unroll
        for (int part = 0; part < WARP_ROWS / ROWS_PER_WORD; ++part) {
            element_words[part] = 0;
#pragma unroll 1
            for (int row_offset = 0; row_offset < ROWS_PER_WORD; row_offset += ROWS_IN_FLIGHT) {
                Word bytes[ROWS_IN_FLIGHT][LANE_KEYS / WIDTH] = {};
#pragma unroll
                for (int i = 0; i < (needed ? ROWS_IN_FLIGHT : 0); ++i) {
                    const int query_row = min(first_row + part * ROWS_PER_WORD + row_offset + i, head.score.Sq - 1);
                    const bool* const src = head.mask + query_row * head.score.mask.stride_i;
#pragma unroll
                    for (int k = 0; k < LANE_KEYS; k += WIDTH)
                        bytes[i][k / WIDTH] = *reinterpret_cast<const Word*>(src + min(first_key + k, keys - WIDTH));
                }
#pragma unroll
                for (int i = 0; i < ROWS_IN_FLIGHT; ++i) {
                    unsigned row_bits = 0;
#pragma unroll
                    for (int k = 0; k < LANE_KEYS; k += WIDTH) {
                        unsigned visible = nonzero_bytes(bytes[i][k / WIDTH]);
                        if (first_key + k >= keys)
                            visible = visible >> (WIDTH - 1) ? (1u << WIDTH) - 1 : 0;  // copy the last key
                        row_bits |= visible << k;
                    }
                    some_visible_lane |= row_bits, all_visible_lane &= row_bits;
                    element_words[part] |= static_cast<unsigned long long>(row_bits) << LANE_KEYS * (row_offset + i);
                }
            }
        }
        bits.some_visible = __ballot_sync(0xffffffffu, some_visible_lane != 0);
        bits.some_hidden = __ballot_sync(0xffffffffu, needed && all_visible_lane != 0xffff);
    }
    // The lane's element bits of the warp's i-th row.
    __device__ __forceinline__ unsigned short element_bits(int i) const {
        return static_cast<unsigned short>(element_words[i / ROWS_PER_WORD] >> LANE_KEYS * (i % ROWS_PER_WORD));
    }
};
#elif BLOCK_MAP
// mask_mod of a warp's 16 queries x 128 keys from (first_row, first_key) on. needed: whether kernels read the map
// there.
__device__ __forceinline__ WordBits scan_mask_mod(const Head& head, int first_row, int first_key, int keys,
                                                  bool needed) {
    WordBits bits;
    bool some_visible_lane[KEYS / 32] = {}, all_visible_lane[KEYS / 32];
#pragma unroll
    for (bool& each : all_visible_lane) each = true;
#pragma unroll 4
    for (int i = 0; i < (needed ? ROWS : 0); ++i) {
#pragma unroll
        for (int k = 0; k < KEYS / 32; ++k) {
            const bool visible =
                head.mask_allows(min(first_row + i, head.score.Sq - 1),
                                 min(first_key + 32 * k + static_cast<int>(threadIdx.x % 32), keys - 1));
            some_visible_lane[k] |= visible, all_visible_lane[k] &= visible;
        }
    }
#pragma unroll
    for (int k = 0; k < KEYS / 32; ++k) {  // a ballot gives two bits
        const unsigned visible = __ballot_sync(0xffffffffu, some_visible_lane[k]),
                       any_hidden = __ballot_sync(0xffffffffu, !all_visible_lane[k]);
        bits.some_visible |= ((visible & 0xffff ? 1 : 0) | (visible >> 16 ? 2 : 0)) << 2 * k;
        bits.some_hidden |= ((any_hidden & 0xffff ? 1 : 0) | (any_hidden >> 16 ? 2 : 0)) << 2 * k;
    }
    const int first_bit = first_key % BLOCK_N / LANE_KEYS;
    bits.some_visible <<= first_bit, bits.some_hidden <<= first_bit;
    return bits;
}
#endif

extern "C" __global__ __launch_bounds__(32 * WARPS, Head::HAS_ELEMENT_BITS ? 3 : 0) void block_map(
    unsigned* block_map,  // (B or 1, H or 1, rows, Head::row_words), contiguous
    int map_rows,         // rows of the map, MAP_M queries each; 1 if the mask does not depend on the query
    const __grid_constant__ Score score) {
#if BLOCK_MAP
    __shared__ unsigned bits_smem[2][WARPS];
    const int words = Head::kind_words(score), word = blockIdx.x % words, row0 = blockIdx.x / words * MAP_ROWS,
              h = blockIdx.y, b = blockIdx.z;
    const int warp = threadIdx.x / 32 % ROW_WARPS, lane = threadIdx.x % 32, row = row0 + threadIdx.x / 32 / ROW_WARPS,
              m0 = row * BLOCK_M;
    const Head head(score, b, h);
    const int keys =
        Snippet::HAS_MASK_MOD ? head.Sk : score.Sk;   // a broadcast mask: b may represent entries with other lengths
    const Range range = head.keys(m0, m0 + BLOCK_M);  // kernels do not read the map elsewhere
    const bool by_row = map_rows > 1 && (Snippet::HAS_MASK_MOD || !KEY_LENGTHS);
    const auto row_address = [&](int row) {
        return block_map + ((static_cast<long long>(b) * gridDim.y + h) * map_rows + row) * Head::row_words(score);
    };
    const auto is_needed = [&](int begin, int end) {
        return row < map_rows && begin < keys && (!by_row || (begin < range.end && range.begin < end));
    };
    WordBits bits;
#if BLOCK_MAP == 2
    const int first_key = word * BLOCK_N + lane * LANE_KEYS, first_of_128 = first_key / KEYS * KEYS;
    const int first_row = m0 + warp * TensorRows::WARP_ROWS;
    const bool needed = is_needed(first_of_128, first_of_128 + KEYS);
    TensorRows rows;
    const auto alignment = reinterpret_cast<size_t>(head.mask) | score.mask.stride_i | keys;
    if (alignment % sizeof(uint4) == 0) rows.scan<uint4>(bits, head, first_row, first_key, keys, needed);
    else if (alignment % sizeof(unsigned) == 0) rows.scan<unsigned>(bits, head, first_row, first_key, keys, needed);
    else rows.scan<unsigned char>(bits, head, first_row, first_key, keys, needed);
#else
    const int first_key = word * BLOCK_N + warp % (BLOCK_N / KEYS) * KEYS;
    bits = scan_mask_mod(head, m0 + warp / (BLOCK_N / KEYS) * ROWS, first_key, keys,
                         is_needed(first_key, first_key + KEYS));
#endif
    if (lane == 0)
        bits_smem[0][threadIdx.x / 32] = bits.some_visible, bits_smem[1][threadIdx.x / 32] = bits.some_hidden;
    __syncthreads();  // the bits of all warps are in shared memory
    const int kind = threadIdx.x % 2, map_row = row0 + threadIdx.x / 2;
    if (threadIdx.x < 2 * MAP_ROWS && map_row < map_rows) {
        unsigned word_bits = 0;
        for (int i = 0; i < ROW_WARPS; ++i) word_bits |= bits_smem[kind][threadIdx.x / 2 * ROW_WARPS + i];
        row_address(map_row)[kind * words + word] = kind ? ~word_bits : word_bits;
    }
#if BLOCK_MAP == 2
    const bool any_visible = __any_sync(0xffffffffu, bits_smem[0][lane % WARPS] != 0);
    const bool any_hidden = __any_sync(0xffffffffu, bits_smem[1][(row - row0) * ROW_WARPS + lane % ROW_WARPS] != 0);
    if (any_visible && any_hidden) {
#pragma unroll
        for (int i = 0; i < TensorRows::WARP_ROWS; ++i) {
            unsigned* const out = row_address(row) + Head::element_bits_at(score, warp * TensorRows::WARP_ROWS + i);
            reinterpret_cast<unsigned short*>(out)[first_key / LANE_KEYS] = rows.element_bits(i);
        }
    }
#endif
#endif
}
