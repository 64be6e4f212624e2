// Rung 4: latent attention (DeepSeek's MLA, absorbed) on Hopper: V is the first HEAD_DIM_V columns of K, which is read
// once. Few queries, many keys, split-KV; up to 576 columns of K and 512 of V.
//
// The query heads of a key/value head are rows of one tile (packed GQA), 64 of them. O is 64 x 512 in fp32, half of the
// register file, so a block has one tile, and two warpgroups own its left and right half. A third warpgroup computes S
// and P of all rows, 64 keys at a time. There is no producer: when one of O's warpgroups has read a half of V, one of
// its threads loads another into that stage; the first one's thread also loads the rest of K, when Q K^T has read it,
// and in a pair the half of V that is not the block's. The second one loads Q. (With a fourth warpgroup, ptxas has 128
// registers per thread, too few for O.)
//
// clang-format off
//   S warpgroup   QK0 | softmax0 | QK1            | softmax1      | QK2                               time ->
//   left O                       | PV0            |               | PV1
//   right O                                       | PV0           |
//
//   shared memory: halves of V [STAGES] | P [2] | rest of K [2] | Q, columns that are not in registers
//                  | factors of O [2] | m, l | mbarriers             O finds room where the halves were
//                  CLUSTER = 2: also the peer's P, factors, m and l; votes
// clang-format on
//
// The right half's P V is late by one Q K^T, so that the tensor cores have work during the softmax. Many columns of Q
// are in registers of the S warpgroup, which leaves shared memory for stages.
//
// CLUSTER = 2: two row tiles of the same keys. Each block has one half of O of both, so P V needs only half of V, and
// the rest of a key tile is free after Q K^T: P V of both warpgroups is late. Each block computes P of its own rows and
// copies it to the other one (PAIR in latent_tiles.cuh).
//
// Deferred rescaling as in fwd_wgmma: P uses the maximum m of the first keys, and O is multiplied only if m is raised.
// The two halves of O are those of FlashMLA (deepseek-ai/FlashMLA, docs/20250422), where each of their warpgroups also
// computes S of every second key tile. Measurements: experiments/024_latent.
#include "latent_output.cuh"

// The warpgroup that computes S and P.
struct ScoreWarpgroup {
    const BlockTile& tile;
    const SmemAddr base;
    const int warp, lane;  // warp: of the warpgroup's four
    unsigned Q_rmem[Q_REGISTER_SLABS * 4][4];
    using Scores = float[BLOCK_N / 2];

    __device__ __forceinline__ ScoreWarpgroup(const BlockTile& tile, SmemAddr base, int warp, int lane)
        : tile(tile), base(base), warp(warp), lane(lane) {}

    // Reads Q, 16 rows per warp, when it has arrived in shared memory: the columns of the first slabs to registers, as
    // A operands, the others to Q_AT. Rows and columns out of range become zeros.
    __device__ __forceinline__ void read_Q() {
        const int row0 = 16 * warp, r = row0 + lane % 16;
        TIMELINE(wait_Q);
        mbarrier_wait(FullQ::at(base, 0), 0);
        TIMELINE(read_Q);
        const SmemAddr own_row = q_row(base, tile.has(r) ? r : 0);
        const bool valid[2] = {tile.has(row0 + lane / 4), tile.has(row0 + lane / 4 + 8)};
#pragma unroll
        for (int step = 0; step < SLABS * 4; ++step) {
            const int chunk = 2 * step + lane / 16;
            unsigned A[4];
            ldmatrix_x4(A, own_row + (8 * chunk < HEAD_DIM ? 16 * chunk : 0));
#pragma unroll
            for (int i = 0; i < 4; ++i)
                if (!valid[i % 2] || 16 * step + i / 2 * 8 >= HEAD_DIM) A[i] = 0;
            if (step < Q_REGISTER_SLABS * 4) {
#pragma unroll
                for (int i = 0; i < 4; ++i) Q_rmem[step][i] = A[i];
            } else {
                stmatrix_x4(base + Q_AT + Queries::chunk(r, chunk - Q_REGISTER_SLABS * 8), A[0], A[1], A[2], A[3]);
            }
        }
        fence_proxy_async();
        __syncwarp();  // all lanes have read their rows
        if (lane == 0) mbarrier_arrive(ReadQ::at(base, 0));
        named_barrier_sync(SCORE_BARRIER, 128);  // all warps have stored their rows
    }

    // S += Q K^T over COUNT slabs of columns, from slab SLAB of Q.
    template <int SLAB, int COUNT>
    __device__ __forceinline__ void mma_slabs(Scores& S, Descriptor K_smem) {
        const Descriptor Q_smem = Queries::k_major(base + Q_AT);
#pragma unroll
        for (int step = 4 * SLAB; step < 4 * (SLAB + COUNT); ++step) {
            const Descriptor K_step = K_smem + Half::k_step(step - 4 * SLAB);
            // The first product overwrites S: that of the rest, or of the left half.
            const bool accumulate = step != (REST_SLABS > 0 ? 4 * V_SLABS : 0);
            if (step < 4 * Q_REGISTER_SLABS) wgmma<Order::K_MAJOR>(S, Q_rmem[step], K_step, accumulate);
            else wgmma<Order::K_MAJOR>(S, Q_smem + Queries::k_step(step - 4 * Q_REGISTER_SLABS), K_step, accumulate);
        }
    }

    // S = Q K^T of key tile j, each part when it has arrived. Before its last slab is complete, those
    // warpgroups of O that are late may begin P V of the previous key tile.
    __device__ __forceinline__ void mma_QK(Scores& S, unsigned j) {
        constexpr int SLABS_OF_HALF = V_SLABS / 2;
        TIMELINE(wait_K);
        wgmma_fence();
        if constexpr (REST_SLABS > 0) {
            RestPipeline::wait(base, j);
            mma_slabs<V_SLABS, REST_SLABS>(S, Rest::k_major(base + REST_AT + stage_of<REST_STAGES>(j) * Rest::BYTES));
        }
        const HalfStage left(j, 0), right(j, 1);
        left.wait(base);
        mma_slabs<0, SLABS_OF_HALF>(S, Half::k_major(left.at(base)));
        wgmma_commit();
        TIMELINE(wait_right_K);
        right.wait(base);
        TIMELINE(QK);
        mma_right<0, SLABS_OF_HALF - 1>(S, right.at(base));
        mma_right<SLABS_OF_HALF - 1, 1>(S, right.at(base));
        PPipeline::acquire(base, j);  // for the P of this key tile
        wgmma_wait<1>();
        if (lane == 0) mbarrier_arrive(NearlyDone::at(base, j % 2));
        wgmma_wait<0>();
        warpgroup_fence_operand(S);
        if (REST_SLABS > 0 && lane == 0) RestPipeline::release(base, j);
        if (PAIR && lane == 0) HalfStage(j, peer_rank()).release(base);  // the half that no P V reads
    }
    // The slabs of the right half from FIRST on.
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void mma_right(Scores& S, SmemAddr right) {
        wgmma_fence();
        mma_slabs<V_SLABS / 2 + FIRST, COUNT>(S, Half::k_major(right + FIRST * Half::SLAB_BYTES));
        wgmma_commit();
    }

    // Masked scores become -INF. visible: keys that the thread's two rows see.
    __device__ __forceinline__ void apply_mask(Scores& S, int n0, const Range (&visible)[2]) const {
        const bool at_begin = Head::HAS_LEFT_BOUND && n0 < tile.fully_visible.begin;
        if (!at_begin && n0 + BLOCK_N <= tile.fully_visible.end) return;
        const int column = n0 + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int key = QueryRows::column(i), half = QueryRows::row(i);
            if (key >= visible[half].end - column || (Head::HAS_LEFT_BOUND && key < visible[half].begin - column))
                S[i] = -INF;
        }
    }

    // Q K^T and softmax of key tile j: stores P, and the factors of O.
    __device__ __forceinline__ void key_tile(Scores& S, SoftmaxStats& stats, const Range (&visible)[2],
                                             float scale_log2, unsigned j, float* factors) {
        mma_QK(S, j);
        TIMELINE(softmax);
        apply_mask(S, tile.n0(j), visible);
        float factor[2] = {1.0f, 1.0f};
        unsigned P[BLOCK_N / 16][4];
        const SmemAddr P_smem = base + P_AT + j % 2 * PTile::BYTES;
        stats.update<false>(
            P, S, scale_log2, [&](const float (&alpha)[2]) { factor[0] = alpha[0], factor[1] = alpha[1]; },
            [&](int step, const unsigned (&p)[4]) {  // while the next 16 columns are computed
                stmatrix_x4(P_smem + PTile::chunk(16 * warp + lane % 16, 2 * step + lane / 16), p[0], p[1], p[2], p[3]);
            });
        TIMELINE(store_factors);
        const int r = 16 * warp + lane / 4;
        if (lane % 4 == 0) {
            factors[j % 2 * BLOCK_M + r] = factor[0];
            factors[j % 2 * BLOCK_M + r + 8] = factor[1];
        }
        fence_proxy_async();
        __syncwarp();  // all lanes have stored P and the factors
        if (lane == 0) mbarrier_arrive(PPipeline::full(base, j % 2));
    }

    __device__ __forceinline__ void run(char* smem) {
        read_Q();
        SoftmaxStats stats;
        Scores S;
        const float scale_log2 = Head::softmax_scale_of(tile.seqlen.score) * Head::LOG2E;
        const int r = 16 * warp + lane / 4, i0 = (tile.row0 + r) / tile.group, i1 = (tile.row0 + r + 8) / tile.group;
        const Range visible[2] = {tile.head0.keys(i0, i0 + 1), tile.head0.keys(i1, i1 + 1)};
        float* const factors = reinterpret_cast<float*>(smem + ALPHA_AT);  // [2][BLOCK_M]
#pragma unroll 1
        for (int j = 0; j < tile.tiles; ++j) key_tile(S, stats, visible, scale_log2, uniform(j), factors);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = row_sum<4>(stats.l[half]);
            if (lane % 4 != 0) continue;
            float2* const sums = reinterpret_cast<float2*>(smem + SUMS_AT);
            sums[r + 8 * half] = make_float2(stats.m[half], l);
            if (PAIR) map_shared_rank(sums, peer_rank())[BLOCK_M + r + 8 * half] = make_float2(stats.m[half], l);
        }
        TIMELINE(done);
        vote_at_end(smem, 8 + warp, lane, false);
    }
};

extern "C" __global__ __launch_bounds__(ALL_THREADS, 1) void fwd_latent_wgmma(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM), or (pages, Hk, PAGE_SIZE, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // the first HEAD_DIM_V columns of K; read by the non-finite fallback
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    float* partials,                              // Partials of combine.cuh; not used with one split
    int H,
    int group,   // H / Hk
    int splits,  // per row tile and batch entry; with DYNAMIC_SPLITS a target for the sum over entries, or 0: no splits
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = uniform(smem_address(smem));
    griddepcontrol_launch_dependents();
    const int z = blockIdx.z, each = max(splits, 1);
    const bool dynamic = DYNAMIC_SPLITS && splits > 0;
    const Split split = dynamic ? SplitScheduler(score, gridDim.z - splits, splits).first(z)
                                : EqualSplits(score, gridDim.z, each).first(z);
    if (dynamic && split.invalid()) return;
    const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const BlockTile tile(score, split, blockIdx.x, blockIdx.y, group);
    if (threadIdx.x == 0) init_barriers(base);
    cluster_sync();  // the mbarriers are initialised before they are used

    const KeyLoader loader(base, tile, K, K_map);
    if (warp >= 8) {
        setmaxnreg_inc<S_REGISTERS>();
        ScoreWarpgroup(tile, base, warp - 8, lane).run(smem);
        return;
    }
    setmaxnreg_dec<O_REGISTERS>();
    const Partials parts(partials, gridDim.z, static_cast<long long>(H) * query_rows(score), split);
    const Result result{O, LSE, parts, split, H};
    float O_rmem[HALF_COLUMNS / 2];
    const auto store = [&](int index, int own_warp) {
        OutputEpilogue{tile, base, index, own_warp, lane, O_rmem}.run(Q, K, V, result, smem);
    };
    // One epilogue for both: with two, the code of the warpgroup of S is far from the start of the kernel, and 16 heads
    // take 150 instead of 146 us. But with one, a pair takes 2% longer (experiments/024_latent, eighth run).
    if (warp < 4) {
        OutputMainloop<0>{tile, base, warp, lane, O_rmem}.run(loader, Q, smem);
        if (PAIR) return store(0, warp);
    } else {
        OutputMainloop<1>{tile, base, warp - 4, lane, O_rmem}.run(loader, Q, smem);
        if (PAIR) return store(1, warp - 4);
    }
    store(warp / 4, warp % 4);
}

extern "C" __global__ __launch_bounds__(THREADS) void fwd_latent_wgmma_combine(
    const __grid_constant__ View<dtype_o> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                               // (B, H, Sq), contiguous
    float* partials,                          // Partials of combine.cuh
    int H, int splits, const __grid_constant__ Score score) {
    combine_splits<SchedulerOf<SplitScheduler>::Type>(O, LSE, partials, H, splits, gridDim.z, score);
}
