// kernels_cu/fwd_mma.cu with its optimisations as switches. The switches are numbers of the tile, OFF or ON. With all of them
// OFF it is a plain tensor-core kernel. steps.py turns them on one after another; run.py measures the gain of each.
//
// In every variant: fp32 accumulators and softmax state, 16-byte copies, no work above the diagonal of a causal mask, long rows
// first. Not supported: head widths other than 64 and 128. NaN and inf behind a mask reach the output, unlike in fwd_mma.
//
// clang-format off
//   SPLIT_Q OFF   warps share all rows: each computes S for a part of the keys and O for a part of the columns; row maxima,
//                 P and row sums go through shared memory
//   SPLIT_Q ON    each warp has its own rows; P stays in registers
//
//   shared memory: Q [BLOCK_M][HEAD_DIM] | STAGES times: K, V [BLOCK_N][HEAD_DIM]       (the epilogue stages O in Q's place)
// clang-format on
#include "ptx.cuh"
#include "score_mod.cuh"

constexpr int OFF = 1, ON = 2;  // the numbers of a tile are positive
constexpr unsigned THREADS = 32 * WARPS, CHUNKS = HEAD_DIM / 8;  // 16-byte chunks of a row
constexpr unsigned ROW = 2 * HEAD_DIM, STAGE = 2 * BLOCK_N * ROW;  // bytes
constexpr int AHEAD = STAGES - 1;  // tiles in flight during the computation of one; 0: synchronous copies through registers
constexpr int M_TILES = BLOCK_M / 16 / (SPLIT_Q == ON ? WARPS : 1);     // 16-row tiles of a warp
constexpr int COLUMNS = SPLIT_Q == ON ? HEAD_DIM : HEAD_DIM / WARPS;  // of O, per warp
constexpr int MIN_BLOCKS = MANY_REGISTERS == ON ? 8 / WARPS : 0;     // per SM; 0: ptxas chooses between registers and occupancy
constexpr float MARGIN = 8.0f;  // the rescale threshold in the exponent: P up to 2^8 fits fp16
static_assert(HEAD_DIM % 64 == 0 && THREADS % CHUNKS == 0, "each thread copies one chunk of every THREADS / CHUNKS rows");
static_assert(BLOCK_N % SUB_N == 0 && SUB_N % 16 == 0 && M_TILES > 0, "a tile must consist of whole MMA steps");
static_assert(SPLIT_Q == ON || (BLOCK_M <= BLOCK_N && BLOCK_N <= HEAD_DIM && SUB_N == BLOCK_N), "P must fit into the place of K");
static_assert(SWIZZLE == OFF || LDMATRIX == ON, "plain loads do not support the swizzle");
static_assert(RESCALE_THRESHOLD == OFF || (FOLDED_SCALE == ON && SPLIT_Q == ON),
              "the threshold is a power of 2; each warp votes by itself");
static_assert(SMEM_BYTES == BLOCK_M * ROW + STAGES * STAGE, "spec and kernel disagree on shared memory");

__device__ __forceinline__ int warp_index() { return __shfl_sync(0xffffffffu, threadIdx.x / 32, 0); }

// Byte offset of chunk `chunk` of row `row` in its tile. With the swizzle, equal chunks of eight rows are in eight different
// bank groups.
__device__ __forceinline__ unsigned offset(unsigned row, unsigned chunk) {
    return row * ROW + (SWIZZLE == ON ? chunk ^ row % 8 : chunk) * 16;
}

// SoftmaxState n0 .. n0 + ROWS of a (S, HEAD_DIM) matrix; rows >= S are zero-filled.
template <int ROWS>
__device__ __forceinline__ void copy_tile(char* tile, const dtype* matrix, long long stride, int n0, int S) {
    constexpr unsigned STEP = THREADS / CHUNKS;
    static_assert(ROWS % STEP == 0, "all threads must copy the same number of chunks");
    const unsigned row0 = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const dtype* from = matrix + (n0 + static_cast<int>(row0)) * stride + chunk * 8;
    const auto copy = [&](unsigned i, bool inside) {
        const unsigned to = offset(row0 + i * STEP, chunk);
        if (AHEAD) cp_async_16(smem_address(tile) + to, from, inside);
        else *reinterpret_cast<uint4*>(tile + to) = inside ? *reinterpret_cast<const uint4*>(from) : uint4{};
    };
    const bool whole = n0 + ROWS <= S;
#pragma unroll
    for (unsigned i = 0; whole && i < ROWS / STEP; ++i, from += STEP * stride) copy(i, true);
#pragma unroll
    for (unsigned i = 0; !whole && i < ROWS / STEP; ++i, from += STEP * stride)
        copy(i, n0 + static_cast<int>(row0 + i * STEP) < S);
}

// The four 8 x 8 matrices of a 16 x 16 block are the four registers of an operand: for Q, P and V (transposed) ordered by rows,
// for K by columns, so that the two registers of a B operand are adjacent. A FragmentOffsets holds the offsets of this lane's
// ldmatrix address, computed once.
template <bool BY_COLUMNS>
struct FragmentOffsets {
    unsigned first_chunk, at[4];

    static __device__ __forceinline__ unsigned down(unsigned matrix) { return BY_COLUMNS ? matrix / 2 : matrix % 2; }
    static __device__ __forceinline__ unsigned right(unsigned matrix) { return BY_COLUMNS ? matrix % 2 : matrix / 2; }
    __device__ __forceinline__ explicit FragmentOffsets(unsigned first_chunk = 0) : first_chunk(first_chunk) {
        const unsigned matrix = threadIdx.x % 32 / 8, row = threadIdx.x % 8;
#pragma unroll
        for (unsigned i = 0; i < 4; ++i) at[i] = offset(8 * down(matrix) + row, first_chunk + 2 * i + right(matrix));
    }
};

// The block at row `row`, a multiple of 16, and 16-column step `step` of a tile.
template <bool TRANSPOSED, bool BY_COLUMNS>
__device__ __forceinline__ void load_block(unsigned (&r)[4], const char* tile, const FragmentOffsets<BY_COLUMNS>& fragment,
                                           int row, int step) {
    if (LDMATRIX == ON) {
        const SmemAddr address = smem_address(tile) + (row * ROW + fragment.at[step % 4] + step / 4 * 128);
        TRANSPOSED ? ldmatrix_x4_trans(r, address) : ldmatrix_x4(r, address);
        return;
    }
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const char* matrix = tile + offset(row + 8 * fragment.down(i), fragment.first_chunk + 2 * step + fragment.right(i));
        const auto element = [&](int k, int d) -> unsigned {
            return *reinterpret_cast<const unsigned short*>(matrix + k * ROW + 2 * d);
        };
        if (TRANSPOSED) r[i] = element(2 * q, g) | element(2 * q + 1, g) << 16;
        else r[i] = *reinterpret_cast<const unsigned*>(matrix + g * ROW + 4 * q);
    }
}

struct TileOffsets {
    FragmentOffsets<false> rows, values;
    FragmentOffsets<ONE_LANE_MAP == OFF> keys;
    __device__ __forceinline__ TileOffsets() : values(SPLIT_Q == ON ? 0 : warp_index() * COLUMNS / 8) {}
};

struct SoftmaxState {  // Q, O, m, l of a warp's query rows; a lane has rows g and g + 8 of each 16-row tile
    unsigned Q[Q_IN_REGISTERS == ON ? M_TILES : 1][HEAD_DIM / 16][4];
    float O[M_TILES][COLUMNS / 8][4];
    float m[M_TILES][2], l[M_TILES][2];  // m: of dot products, or (scale not folded) of scores; l: partial sum of this lane

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            m[mt][0] = m[mt][1] = -INF;
            l[mt][0] = l[mt][1] = 0.0f;
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; ++i) O[mt][i / 4][i % 4] = 0.0f;
        }
    }
    __device__ __forceinline__ void load_queries(const char* Q_smem, const TileOffsets& offsets) {
#pragma unroll
        for (int i = 0; i < M_TILES * HEAD_DIM / 16; ++i) {
            const int mt = i / (HEAD_DIM / 16), step = i % (HEAD_DIM / 16);
            load_block<false>(Q[Q_IN_REGISTERS == ON ? mt : 0][step], Q_smem, offsets.rows, 16 * mt, step);
        }
    }
};

// Reduces one value per row over all warps with f. Needed only where warps share rows.
template <class F>
__device__ __forceinline__ void reduce_over_warps(float (&x)[M_TILES][2], F f) {
    __shared__ float x_smem[WARPS][BLOCK_M];
    const int warp = warp_index(), g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i)
        if (threadIdx.x % 4 == 0) x_smem[warp][8 * i + g] = x[i / 2][i % 2];
    __syncthreads();  // all warps have written their values
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) {
        x[i / 2][i % 2] = x_smem[0][8 * i + g];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) x[i / 2][i % 2] = f(x[i / 2][i % 2], x_smem[w][8 * i + g]);
    }
}

// S = Q K^T for KEYS keys from key row `n` of the tile on.
template <int KEYS>
__device__ __forceinline__ void dot_products(float (&S)[M_TILES][KEYS / 8][4], const SoftmaxState& rows, const char* Q_smem,
                                             const char* K_smem, int n, const TileOffsets& offsets) {
    constexpr int SECOND = ONE_LANE_MAP == ON ? 2 : 1;  // index of a B operand's second register
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; ++step) {
        unsigned Q[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            if (Q_IN_REGISTERS == OFF) load_block<false>(Q[mt], Q_smem, offsets.rows, 16 * mt, step);
            else for (int i = 0; i < 4; ++i) Q[mt][i] = rows.Q[Q_IN_REGISTERS == ON ? mt : 0][step][i];
        }
#pragma unroll
        for (int nt = 0; nt < KEYS / 16; ++nt) {
            unsigned K[4];
            load_block<false>(K, K_smem, offsets.keys, n + 16 * nt, step);
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                mma_m16n8k16(S[mt][2 * nt], Q[mt], K[0], K[SECOND]);
                mma_m16n8k16(S[mt][2 * nt + 1], Q[mt], K[3 - SECOND], K[3]);
            }
        }
    }
}

// O += P V for the 16 keys from key row `n` of the tile on.
__device__ __forceinline__ void add_PV(SoftmaxState& rows, const unsigned (&P)[M_TILES][4], const char* V_smem, int n,
                                           const TileOffsets& offsets) {
#pragma unroll
    for (int dt = 0; dt < COLUMNS / 16; ++dt) {
        unsigned V[4];
        load_block<true>(V, V_smem, offsets.values, n, dt);
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
            mma_m16n8k16(rows.O[mt][2 * dt], P[mt], V[0], V[1]);
            mma_m16n8k16(rows.O[mt][2 * dt + 1], P[mt], V[2], V[3]);
        }
    }
}

// e^(x - m) for scores; 2^((x - m) exponent) for dot products, one FFMA and one ex2.
__device__ __forceinline__ float power(float x, float m, float exponent) {
    return FOLDED_SCALE == ON ? ex2(fmaf(x, exponent, -m * exponent)) : expf(x - m);
}

// Updates m with the row maxima `top` and rescales l and O.
__device__ __forceinline__ void update_maximum(SoftmaxState& rows, float (&top)[M_TILES][2], float exponent) {
#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) top[i / 2][i % 2] = row_max<4>(top[i / 2][i % 2]);
    if (SPLIT_Q == OFF) reduce_over_warps(top, [](float x, float y) { return fmaxf(x, y); });
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float& m = rows.m[mt][half];
            const float m_new = fmaxf(m, top[mt][half]);
            const float alpha = m == m_new ? 1.0f : power(m, m_new, exponent);  // equal infinities: not NaN
            m = m_new;
            rows.l[mt][half] *= alpha;
#pragma unroll
            for (int nt = 0; nt < COLUMNS / 8; ++nt) {
                rows.O[mt][nt][2 * half] *= alpha;
                rows.O[mt][nt][2 * half + 1] *= alpha;
            }
        }
    }
}

// Computes P from S, packed as A operands, and adds it to l.
template <int KEYS>
__device__ __forceinline__ void probabilities(unsigned (&P)[KEYS / 16][M_TILES][4], const float (&S)[M_TILES][KEYS / 8][4],
                                              SoftmaxState& rows, float exponent) {
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float m = rows.m[mt][half] == -INF ? 0.0f : rows.m[mt][half];  // no visible key: P = 0, not NaN
#pragma unroll
            for (int nt = 0; nt < KEYS / 8; ++nt) {
                const float p0 = power(S[mt][nt][2 * half], m, exponent), p1 = power(S[mt][nt][2 * half + 1], m, exponent);
                rows.l[mt][half] += p0 + p1;
                P[nt / 2][mt][nt % 2 * 2 + half] = pack(p0, p1);
            }
        }
    }
}

// O += P V where warps share rows. P of all warps goes through shared memory, in the place of K: all warps have read K before
// the reduction of the row maxima.
template <int KEYS>
__device__ __forceinline__ void add_shared_PV(SoftmaxState& rows, const unsigned (&P)[KEYS / 16][M_TILES][4], char* stage, int n,
                                                  const TileOffsets& offsets) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < KEYS / 16 * M_TILES * 4; ++i) {
        const int step = i / 4 / M_TILES, mt = i / 4 % M_TILES, matrix = i % 4;
        const unsigned at = offset(16 * mt + 8 * (matrix % 2) + g, n / 8 + 2 * step + matrix / 2);
        *reinterpret_cast<unsigned*>(stage + at + 4 * q) = P[step][mt][matrix];
    }
    __syncthreads();  // P of all keys has been written
#pragma unroll
    for (int step = 0; step < BLOCK_N / 16; ++step) {
        unsigned all[M_TILES][4];
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) load_block<false>(all[mt], stage, offsets.rows, 16 * mt, step);
        add_PV(rows, all, stage + BLOCK_N * ROW, 16 * step, offsets);
    }
}

// One K/V tile. MASKED: not every key is visible to every row of the block. With TWO_LOOPS such tiles are rare and go in steps
// of 16 keys up to the last key visible to the warp.
template <bool MASKED>
__device__ __forceinline__ void attend(SoftmaxState& rows, const Head& head, int first_row, int n0, const char* Q_smem,
                                       char* stage, const TileOffsets& offsets) {
    constexpr bool SMALL = MASKED && TWO_LOOPS == ON;
    constexpr int KEYS = SPLIT_Q == OFF ? BLOCK_N / WARPS : SMALL ? 16 : SUB_N;
    constexpr int STRIDE = SPLIT_Q == OFF ? BLOCK_N : KEYS;
    const float exponent = FOLDED_SCALE == ON ? head.softmax_scale * Head::LOG2E : 1.0f;
    const float margin = MARGIN / exponent;
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll (SMALL ? 1 : BLOCK_N / STRIDE)
    for (int n = SPLIT_Q == OFF ? warp_index() * KEYS : 0; n < BLOCK_N; n += STRIDE) {
        if (SMALL && n0 + n >= head.keys(first_row, first_row + 16 * M_TILES).end) break;
        float S[M_TILES][KEYS / 8][4] = {};
        dot_products<KEYS>(S, rows, Q_smem, stage, n, offsets);

        float top[M_TILES][2];
        bool exceeds = false;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                top[mt][half] = -INF;
#pragma unroll
                for (int i = 0; i < KEYS / 4; ++i) {
                    float& s = S[mt][i / 2][2 * half + i % 2];
                    const int query_row = first_row + 16 * mt + 8 * half + g, key_col = n0 + n + i / 2 * 8 + 2 * q + i % 2;
                    if (FOLDED_SCALE == OFF) s *= head.softmax_scale;
                    if (MASKED && !head.visible(query_row, key_col)) s = -INF;
                    top[mt][half] = fmaxf(top[mt][half], s);
                }
                exceeds |= top[mt][half] > rows.m[mt][half] + margin;
            }
        }
        if (RESCALE_THRESHOLD == OFF || __any_sync(0xffffffffu, exceeds)) update_maximum(rows, top, exponent);

        unsigned P[KEYS / 16][M_TILES][4];
        probabilities<KEYS>(P, S, rows, exponent);
        if (SPLIT_Q == OFF) add_shared_PV<KEYS>(rows, P, stage, n, offsets);
#pragma unroll
        for (int step = 0; SPLIT_Q == ON && step < KEYS / 16; ++step)
            add_PV(rows, P[step], stage + BLOCK_N * ROW, n + 16 * step, offsets);
    }
}

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void fwd_ladder(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM)
    float* LSE,                                   // (B, H, Sq), contiguous
    int group,                                    // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    char* const stages = smem + BLOCK_M * ROW;
    const int h = blockIdx.y, b = blockIdx.z, warp = warp_index(), lane = threadIdx.x % 32;
    const int m0 = (CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * BLOCK_M;  // causal: long rows first
    const int own_row = SPLIT_Q == ON ? warp * 16 * M_TILES : 0, own_chunk = SPLIT_Q == ON ? 0 : warp * COLUMNS / 8;
    const dtype* const K_head = K.row(b, h / group, 0);
    const dtype* const V_head = V.row(b, h / group, 0);
    const Head head(score, b, h);
    const int tiles = (max(head.keys(m0, m0 + BLOCK_M).end, 0) + BLOCK_N - 1) / BLOCK_N;
    // The first `whole` tiles are fully visible.
    const int whole = TWO_LOOPS == ON ? max(head.fully_visible_keys(m0, m0 + BLOCK_M).end, 0) / BLOCK_N : 0;
    const auto load_stage = [&](int j) {
        char* const stage = stages + j % STAGES * STAGE;
        copy_tile<BLOCK_N>(stage, K_head, K.stride_s, j * BLOCK_N, score.Sk);
        copy_tile<BLOCK_N>(stage + BLOCK_N * ROW, V_head, V.stride_s, j * BLOCK_N, score.Sk);
    };
    char* const Q_smem = smem + own_row * ROW;
    const TileOffsets offsets;

    SoftmaxState rows;
    rows.clear();
    if (tiles > 0) copy_tile<BLOCK_M>(smem, Q.row(b, h, 0), Q.stride_s, m0, score.Sq);
#pragma unroll
    for (int j = 0; j < AHEAD; ++j) {
        if (j < tiles) load_stage(j);
        cp_async_commit();
    }
    const auto wait_for_tile = [&](int j) {
        if (AHEAD) cp_async_wait<AHEAD ? AHEAD - 1 : 0>();
        __syncthreads();  // tile j - 1 has been read by all threads, and tile j, if copied asynchronously, is complete
        if (j + AHEAD < tiles) load_stage(j + AHEAD);
        if (AHEAD) cp_async_commit();
        else __syncthreads();  // tile j is complete
        if (Q_IN_REGISTERS == ON && j == 0) rows.load_queries(Q_smem, offsets);
    };
    int j = 0;
#pragma unroll 1
    for (; j < whole; ++j) {
        wait_for_tile(j);
        attend<false>(rows, head, m0 + own_row, j * BLOCK_N, Q_smem, stages + j % STAGES * STAGE, offsets);
    }
#pragma unroll 1
    for (; j < tiles; ++j) {
        wait_for_tile(j);
        attend<true>(rows, head, m0 + own_row, j * BLOCK_N, Q_smem, stages + j % STAGES * STAGE, offsets);
    }

#pragma unroll
    for (int i = 0; i < 2 * M_TILES; ++i) rows.l[i / 2][i % 2] = row_sum<4>(rows.l[i / 2][i % 2]);
    if (SPLIT_Q == OFF) reduce_over_warps(rows.l, [](float x, float y) { return x + y; });
    __syncthreads();  // all threads have read Q before O is written in its place
    const int g = lane / 4, q = lane % 4;
#pragma unroll
    for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = rows.l[mt][half], inverse = l == 0.0f ? 0.0f : 1.0f / l;  // a row without visible keys
            const int row = own_row + 16 * mt + 8 * half + g;
#pragma unroll
            for (int nt = 0; nt < COLUMNS / 8; ++nt) {
                const unsigned pair = pack(rows.O[mt][nt][2 * half] * inverse, rows.O[mt][nt][2 * half + 1] * inverse);
                *reinterpret_cast<unsigned*>(smem + offset(row, own_chunk + nt) + 4 * q) = pair;
            }
            if (q == 0 && own_chunk == 0 && m0 + row < score.Sq)
                LSE[(static_cast<long long>(b) * gridDim.y + h) * score.Sq + m0 + row] =
                    rows.m[mt][half] * (FOLDED_SCALE == ON ? score.scale : 1.0f) + logf(l);
        }
    }
    __syncthreads();  // O is complete; stored in coalesced 16-byte chunks
#pragma unroll 4
    for (int i = threadIdx.x; i < BLOCK_M * static_cast<int>(CHUNKS); i += THREADS) {
        const int row = i / CHUNKS, chunk = i % CHUNKS;
        if (m0 + row < score.Sq)
            *reinterpret_cast<uint4*>(O.row(b, h, m0 + row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(smem + offset(row, chunk));
    }
}
