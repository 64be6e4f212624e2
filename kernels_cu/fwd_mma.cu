// Rung 3: attention forward on tensor cores with mma.sync (sm_80 and later). FlashAttention-2 (arXiv:2307.08691).
//
// A block has WARPS warps and BLOCK_M query rows. A warp owns M_TILES tiles of 16 rows, so that the softmax needs no
// communication between warps ("split-Q", FlashAttention-2 section 3.3). K and V tiles of BLOCK_N keys are loaded by
// cp.async into two stages: tile j + 1 is loaded while tile j is computed, with one barrier per tile.
//
// clang-format off
//   warp 0  rows   0 ..  31   state.Q (A operand)  S = Q K^T, SUB_N keys at a time   state.O (accumulators)
//   warp 1  rows  32 ..  63     "                  P = exp2((S - m) * scale_log2),    O += P V
//   ...                                            packed to 16 bits: an A operand of P V in the same lanes
//
//   shared memory: Q [BLOCK_M][D_PAD] | stage 0: K [BLOCK_N][D_PAD], V [BLOCK_N][DV_PAD] | stage 1
//   O is staged in Q's memory. Unless Q_IN_REGISTERS, each step reads Q from shared memory.
// clang-format on
//
// BLOCK_N is the number of keys of a stage, SUB_N (which divides it) that of keys whose S is in registers at a time.
// Tiles are swizzled (include/mma_smem.cuh), and rescaling is deferred (include/softmax_mma.cuh). Tiles that are fully
// visible to all rows of the block are computed by a loop without masking.
#define TIMELINE_BRANCH 1  // timeline marks cost 3% instead of 7 … 9% of the time at D = 128 (experiments/018_timeline)
#include "fwd_mma_tiles.cuh"
#include "non_finite.cuh"

// The block's key tiles, and their loads by cp.async into two stages.
struct KeyTileLoader {
    const View<const dtype_k>& K;
    const View<const dtype_v>& V;
    const Head& head;
    const KeyRows<const dtype_k> K_rows;
    const KeyRows<const dtype_v> V_rows;
    char* stages;
    int m0, begin, end;                          // first query row of the block; its key tiles are begin .. end - 1
    int fully_visible_begin, fully_visible_end;  // key tiles without hidden scores, unless a block map has some
    int stage_count = 0;                         // tiles so far: selects the stage if a block map makes j skip tiles
    int next = 0;                                // the tile that load_next_part loads, with K_copies and V_copies
    TileCopies<BLOCK_N, K_COLUMNS, THREADS, HEAD_DIM, dtype_k> K_copies;
    TileCopies<BLOCK_N, V_COLUMNS, THREADS, HEAD_DIM_V, dtype_v> V_copies;

    __device__ __forceinline__ KeyTileLoader(const View<const dtype_k>& K, const View<const dtype_v>& V,
                                             const Head& head, int kv_head, int m0, char* stages)
        : K(K), V(V), head(head), K_rows(head.rows_of_keys(K, kv_head)), V_rows(head.rows_of_keys(V, kv_head)),
          stages(stages), m0(m0) {
        const Range keys = head.keys(m0, m0 + BLOCK_M),
                    visible_to_all = head.fully_visible_keys<Head::HAS_BLOCK_MAP>(m0, m0 + BLOCK_M);
        fully_visible_begin = (visible_to_all.begin + BLOCK_N - 1) / BLOCK_N;
        fully_visible_end = max(visible_to_all.end, 0) / BLOCK_N;
        begin = keys.begin / BLOCK_N, end = (max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N;
        begin = next_tile(begin);
    }
    // Tile j, or the next one that the block map does not exclude.
    __device__ __forceinline__ int next_tile(int j) const {
        return head.next_key_tile<BLOCK_N>(m0, m0 + BLOCK_M, j, end);
    }
    __device__ __forceinline__ bool fully_visible(int j) const {
        return fully_visible_begin <= j && j < fully_visible_end &&
               head.map_covers<Head::FULLY_VISIBLE, BLOCK_N>(m0, m0 + BLOCK_M, j * BLOCK_N);
    }

    // The stage of tile j; ahead = 1: j is the tile after the current one.
    __device__ __forceinline__ char* stage_of(int j, int ahead = 0) const {
        return stages + (Head::HAS_BLOCK_MAP ? stage_count + ahead : j) % 2 * STAGE_BYTES;
    }
    __device__ __forceinline__ void load(int j, int ahead = 0) const {
        const SmemAddr stage = smem_address(stage_of(j, ahead));
        cp_async_tile<BLOCK_N, K_COLUMNS, THREADS>(stage, K_rows, j * BLOCK_N, head.Sk);
        cp_async_tile<BLOCK_N, V_COLUMNS, THREADS, HEAD_DIM_V>(stage + K_BYTES, V_rows, j * BLOCK_N, head.Sk);
        cp_async_commit();
    }
    // Loads the tile after tile j.
    __device__ __forceinline__ void load_next(int j) const {
        const int next = next_tile(j + 1);
        if (next < end) load(next, 1);
    }
    // The same in COUNT equal parts, distributed over the steps after the first one: part i is loaded at step
    // 1 + i * (QK_STEPS - 1) / COUNT. After the last tile it writes zeros, to avoid a branch.
    __device__ __forceinline__ void load_next_part(int j, int step) {
        constexpr int K_COUNT = decltype(K_copies)::COUNT, COUNT = K_COUNT + decltype(V_copies)::COUNT;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            if (step != 1 + i * (QK_STEPS - 1) / COUNT) continue;
            if (i == 0) next = next_tile(j + 1);
            const SmemAddr stage = smem_address(stage_of(next, 1));
            if (i == 0) K_copies.begin(stage, K_rows, next * BLOCK_N, next < end ? head.Sk : 0);
            if (i == K_COUNT) V_copies.begin(stage + K_BYTES, V_rows, next * BLOCK_N, next < end ? head.Sk : 0);
            if (i < K_COUNT) K_copies.load(i, K.stride_s);
            else V_copies.load(i - K_COUNT, V.stride_s);
            if (i == COUNT - 1) cp_async_commit();
        }
    }
};

struct WarpState : WarpSoftmax<M_TILES, DV_PAD> {
    unsigned Q[Q_IN_REGISTERS ? M_TILES : 1][D_PAD / STEP_D][Q_REGISTERS];
};

// A warp and its WARP_ROWS query rows. `state` and `offsets` are references: as members they cost up to 1% more
// instructions.
struct ConsumerWarp {
    const Head& head;
    KeyTileLoader& tiles;
    const int warp_row;  // first query row
    const SmemAddr Q_smem;
    const LaneOffsets& offsets;
    WarpState& state;

    __device__ __forceinline__ void load_Q() {
#pragma unroll
        for (int i = 0; i < M_TILES * D_PAD / STEP_D; ++i) {
            const int mt = i / (D_PAD / STEP_D), step = i % (D_PAD / STEP_D);
            offsets.Q.load(state.Q[Q_IN_REGISTERS ? mt : 0][step], Q_smem, 16 * mt, step);
        }
    }

    // S = Q K^T for KEYS keys from row n of the K tile. Calls load_part(step) before the MMAs of each step.
    template <int KEYS, class Call>
    __device__ __forceinline__ void mma_QK(float (&S)[M_TILES][KEYS / 8][4], SmemAddr K_smem, int n,
                                           const Call& load_part) const {
#pragma unroll
        for (int step = 0; step < D_PAD / STEP_D; ++step) {
            load_part(step);
            unsigned Q[M_TILES][Q_REGISTERS];
#pragma unroll
            for (int mt = 0; mt < M_TILES; ++mt) {
                if (!Q_IN_REGISTERS) offsets.Q.load(Q[mt], Q_smem, 16 * mt, step);
                else
                    for (int i = 0; i < Q_REGISTERS; ++i) Q[mt][i] = state.Q[Q_IN_REGISTERS ? mt : 0][step][i];
            }
            mma_ABt_step(S, Q, K_smem, n, step, offsets.K, MmaQK());
        }
    }

    // Computes P of S, packed to 16 bits in the order of A operands; updates m, l and O. n0: first key.
    template <bool MASKED, int KEYS>
    __device__ __forceinline__ void online_softmax(unsigned (&P)[KEYS / 16][M_TILES][4],
                                                   float (&S)[M_TILES][KEYS / 8][4], int n0) {
        const float scale_log2 = head.softmax_scale * Head::LOG2E, margin = RESCALE_THRESHOLD / scale_log2;
        const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
        float lane_max[M_TILES][2], scales_log2[M_TILES][2];
        bool exceeds = state.large;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                lane_max[mt][half] =
                    score_mod_and_mask(S[mt], half, head, warp_row + g, 16 * mt + 8 * half, n0 + 2 * q, MASKED);
                exceeds |= lane_max[mt][half] > state.m[mt][half] + margin;
                scales_log2[mt][half] = scale_log2;  // one per row, because rows of fwd_decode have different scales
            }
        }
        if (__any_sync(0xffffffffu, exceeds)) state.rescale(S, lane_max, scales_log2);
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                state.exponentiate(mt, half, S[mt], scale_log2, [&](int nt, float p0, float p1) {
                    P[nt / 2][mt][nt % 2 * 2 + half] = pack_P(p0, p1);
                });
            Head::Kept kept[KEYS / 16];
            head.keep_along_queries(kept, warp_row + 16 * mt, n0);
#pragma unroll
            for (int i = 0; i < KEYS / 4; ++i) P[i / 4][mt][i % 4] = kept[i / 4].apply(i % 4, P[i / 4][mt][i % 4]);
        }
    }

    // The K/V tile j, KEYS keys at a time. MASKED: the tile may have hidden scores; steps are then of 16 keys (of SUB_N
    // with an element mask, or INVARIANT), and steps outside of the key range of all rows are skipped. Otherwise calls
    // load_part(step) for each of the tile's QK_STEPS.
    template <bool MASKED, class Call>
    __device__ __forceinline__ void process_keys(int j, const Call& load_part) {
        // INVARIANT: m may change after the same keys in a masked tile, too.
        constexpr int KEYS = MASKED && !Head::ELEMENT_MASK && !INVARIANT ? 16 : SUB_N;
        const char* const stage = tiles.stage_of(j);
        const SmemAddr K_smem = smem_address(stage), V_smem = smem_address(stage + K_BYTES);
        const int n0 = j * BLOCK_N;
#pragma unroll(MASKED || LOOP_STEPS ? 1 : BLOCK_N / KEYS)
        for (int n = 0; n < BLOCK_N; n += KEYS) {
            const Range keys = head.keys(warp_row, warp_row + WARP_ROWS);
            if (MASKED && n0 + n >= keys.end) break;  // hidden from all rows of the warp
            if (MASKED && Head::HAS_LEFT_BOUND && n0 + n + KEYS <= keys.begin) continue;
            float S[M_TILES][KEYS / 8][4] = {};
            TIMELINE(QK);
            mma_QK<KEYS>(S, K_smem, n, [&](int step) {
                if (!MASKED) load_part(n / KEYS * (D_PAD / STEP_D) + step);
            });
            TIMELINE(softmax);
            unsigned P[KEYS / 16][M_TILES][4];
            online_softmax<MASKED, KEYS>(P, S, n0 + n);
            TIMELINE(PV);
#pragma unroll
            for (int step = 0; step < KEYS / 16; ++step)
                mma_AB_step(state.O, P[step], V_smem, n + 16 * step, offsets.V, MmaPV());
        }
    }

    template <bool MASKED>
    __device__ __forceinline__ void process_tile(int j) {
        constexpr bool interleave_loads = INTERLEAVE_LOADS && !MASKED;
        TIMELINE(wait_load);
        cp_async_wait<0>();
        __syncthreads();  // all threads have loaded tile j, and have read tile j - 1, whose stage is loaded next
        if (!interleave_loads) {
            TIMELINE(load);
            tiles.load_next(j);
        }
        if (Q_IN_REGISTERS && j == tiles.begin) load_Q();
        process_keys<MASKED>(j, [&](int step) {
            if (interleave_loads) tiles.load_next_part(j, step);
        });
        ++tiles.stage_count;
    }

    __device__ __forceinline__ void mainloop() {
        int j = tiles.begin;
        // With a left bound or a block map, any tile may need a mask: this loop computes all tiles, and none is left
        // for the other two loops. (In an `else`, these would change the machine code, which has not been timed.)
#pragma unroll 1
        for (; (Head::HAS_LEFT_BOUND || Head::HAS_BLOCK_MAP) && j < tiles.end; j = tiles.next_tile(j + 1)) {
            if (tiles.fully_visible(j)) process_tile<false>(j);
            else process_tile<true>(j);
        }
        // Otherwise the tiles that need a mask are the last ones.
#pragma unroll 1
        for (; j < tiles.fully_visible_end; ++j) process_tile<false>(j);
#pragma unroll 1
        for (; j < tiles.end; ++j) process_tile<true>(j);
        if (INTERLEAVE_LOADS) cp_async_wait<0>();  // the zeros after the last tile
    }

    // Epilogue: writes the warp's rows of O to shared memory, and LSE to global memory.
    __device__ __forceinline__ void stage_O_and_store_LSE(char* O_warp, float* LSE, int h, unsigned lane) const {
        const int g = lane / 4, q = lane % 4;
#pragma unroll
        for (int mt = 0; mt < M_TILES; ++mt) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const FinalizedRow final_row = state.finalize(head, mt, half);
                const int row = 16 * mt + 8 * half + g;
#pragma unroll
                for (int nt = 0; nt < DV_PAD / 8; ++nt) {
                    const OutputPair at(nt, q);
                    const float low = state.O[mt][at.low][2 * half + at.low_element],
                                high = state.O[mt][at.high][2 * half + at.high_element];
                    *reinterpret_cast<unsigned*>(O_warp + OTile::at(row, at.chunk) + at.byte) =
                        pack(low * final_row.O_scale, high * final_row.O_scale);
                }
                if (q == 0 && warp_row + row < head.Sq)
                    LSE[head.lse_offset(gridDim.y, h) + warp_row + row] = final_row.lse;
            }
        }
    }
};

extern "C" __global__ __launch_bounds__(THREADS, MIN_BLOCKS) void fwd_mma(
    const __grid_constant__ View<const dtype> Q,    // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype_k> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype_v> V,  // (B, Hk, Sk, HEAD_DIM_V)
    const __grid_constant__ View<dtype> O,          // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                     // (B, H, Sq), contiguous
    int group,                                      // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    // The sequences with few queries: the next kernel runs them on SMs that this one leaves idle (cu_seqlens.cuh).
    if (LONG_SEQUENCES) griddepcontrol_launch_dependents();
    const unsigned warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const int x = CAUSAL ? gridDim.x - 1 - blockIdx.x : blockIdx.x;  // causal: the longest tiles start first
    const int h = blockIdx.y;
    const RowTile tile = query_tile<BLOCK_M>(score, x, blockIdx.z);
    if (RAGGED && tile.invalid()) return;
    const int b = tile.b, m0 = tile.row0;
    const Head head(score, b, h);
    KeyTileLoader tiles(K, V, head, h / group, m0, smem + STAGES_AT);
    char* const Q_warp = smem + warp * WARP_ROWS * Q_ROW_BYTES;
    const int warp_row = m0 + warp * WARP_ROWS;
    const LaneOffsets offsets(lane);
    WarpState state;
    ConsumerWarp consumer{head, tiles, warp_row, smem_address(Q_warp), offsets, state};

    if (tiles.end > tiles.begin)
        cp_async_tile<BLOCK_M, D_PAD, THREADS>(smem_address(smem), head.query(Q, h, 0), Q.stride_s, m0, head.Sq);
    state.reset();
    if (tiles.end > tiles.begin) tiles.load(tiles.begin);
    consumer.mainloop();
    // P of a masked key is 0, but 0 * NaN = NaN: the fallback computes non-finite tiles again.
    if (Head::HAS_MASK && !INVARIANT && __syncthreads_or(!all_finite(state.O)))
        return attend_non_finite<BLOCK_M, WARPS>(Q, K, V, O, LSE, group, score, b, h, gridDim.y, m0, warp);

    TIMELINE(store);
    // O overwrites Q: the warp's own rows, or if rows of O are wider, also those of other warps, which must have read
    // them.
    if (O_ROW_BYTES > Q_ROW_BYTES) __syncthreads();
    __syncwarp();  // every lane has read the warp's rows of Q
    char* const O_warp = O_ROW_BYTES > Q_ROW_BYTES ? smem + warp * WARP_ROWS * O_ROW_BYTES : Q_warp;
    consumer.stage_O_and_store_LSE(O_warp, LSE, h, lane);
    __syncwarp();  // the warp's rows of O are complete before its lanes copy them in 16-byte chunks
#pragma unroll 4
    for (int i = lane; i < WARP_ROWS * OTile::CHUNKS; i += 32) {
        const int row = i / OTile::CHUNKS, chunk = i % OTile::CHUNKS;
        if (warp_row + row < head.Sq && chunk * 8 < HEAD_DIM_V)
            *reinterpret_cast<uint4*>(head.query(O, h, warp_row + row) + chunk * 8) =
                *reinterpret_cast<const uint4*>(O_warp + OTile::at(row, chunk));
    }
    if (Head::HAS_MASK && INVARIANT) {
        __syncwarp();  // the warp's rows are stored before some of them are replaced
#pragma unroll
        for (int i = 0; i < 2 * M_TILES; ++i)
            attend_non_finite_rows(Q, K, V, O, LSE, group, score, b, h, gridDim.y, warp_row + 8 * i,
                                   state.non_finite_lanes(i / 2, i % 2));
    }
    TIMELINE(done);
}
