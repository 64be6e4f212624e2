// Step 0 of the Hopper ladder: the plain forward with warpgroup MMA (wgmma) and TMA. Read it before fwd_wgmma.cu.
//
// A block computes 64 query rows of one head. One thread, the producer, loads tiles of Q, K and V by TMA. One
// warpgroup (128 threads), the consumer, multiplies and computes the softmax. K and V have one stage each: the next K
// loads during softmax and P V, when Q K^T has read this one; the next V loads after P V.
//
// clang-format off
//   producer      K0 V0       | K1         V1  | K2  ...      time ->
//   consumer      |QK0 softmax PV0|   QK1 softmax PV1|  ...
//
//   shared memory: Q | at byte K_AT: K [STAGES] | at V_AT: V [STAGES] | at BARRIERS_AT: mbarriers of K, V and Q
// clang-format on
//
// Each stage has two mbarriers. "Full" completes when TMA has written the tile; the consumer waits for it. "Empty"
// completes when all four consumer warps have read the tile; the producer waits for it before it overwrites the tile.
#include "epilogue.cuh"
#include "mask_wgmma.cuh"
#include "n_block_range.cuh"
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

using Queries = Swizzled<64, HEAD_DIM>;
using Keys = Swizzled<BLOCK_N, HEAD_DIM>;

constexpr unsigned K_AT = Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES, BARRIERS_AT = V_AT + STAGES * Keys::BYTES;
using KPipeline = TilePipeline<Keys, K_AT, BARRIERS_AT>;
using VPipeline = TilePipeline<Keys, V_AT, KPipeline::END>;
using FullQ = BarrierArray<VPipeline::END, 1>;
static_assert(BLOCK_M == 64 && FullQ::END <= SMEM_BYTES, "one consumer warpgroup; tiles and barriers fit");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(KPipeline::full(base, stage), 1);  // one arrival of the producer, and the bytes of the tile
        mbarrier_init(VPipeline::full(base, stage), 1);
        mbarrier_init(KPipeline::empty(base, stage), 4);  // one lane of each consumer warp
        mbarrier_init(VPipeline::empty(base, stage), 4);
    }
    mbarrier_init(FullQ::at(base, 0), 1);
    fence_proxy_async();  // TMA sees the initialised barriers
}

__device__ __forceinline__ void produce(SmemAddr base, const TensorMap& Q_map, const TensorMap& K_map,
                                        const TensorMap& V_map, int m0, int tiles, int h, int kv_head, int b) {
    Queries::load(base, Q_map, m0, h, b, FullQ::at(base, 0));
#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
        TIMELINE(wait_empty);
        KPipeline::acquire(base, j);
        TIMELINE(load);
        KPipeline::load(base, j, K_map, j * BLOCK_N, kv_head, b);
        TIMELINE(wait_empty);
        VPipeline::acquire(base, j);
        TIMELINE(load);
        VPipeline::load(base, j, V_map, j * BLOCK_N, kv_head, b);
    }
}

// Softmax state and O of the warpgroup's rows after all key tiles. first_row: of the warp's 16.
__device__ __forceinline__ void consume(SoftmaxState& softmax, SmemAddr base, const Head& head, int first_row,
                                        int tiles, float scale_log2) {
    const unsigned lane = threadIdx.x % 32;
    const RowKeyRanges row_keys(head, first_row + lane / 4);
    const Range fully_visible = head.fully_visible_keys<false>(first_row, first_row + 16);
#pragma unroll
    for (float& x : softmax.O) x = 0.0f;
    TIMELINE(wait_Q);
    mbarrier_wait(FullQ::at(base, 0), 0);
#pragma unroll 1
    for (int j = 0; j < tiles; ++j) {
        float S[BLOCK_N / 2];
        unsigned P[BLOCK_N / 16][4];
        float sum[2], alpha[2];

        TIMELINE(wait_K);
        KPipeline::wait(base, j);
        wgmma_fence();  // the hardware: earlier accesses to registers of S and O precede those of wgmma
        TIMELINE(QK);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)  // S = Q K^T
            wgmma<Order::K_MAJOR>(S, Queries::k_major(base) + Queries::k_step(step),
                                  Keys::k_major(base + KPipeline::tile_at(j)) + Keys::k_step(step), step > 0);
        wgmma_commit();
        wgmma_wait<0>();
        warpgroup_fence_operand(S);
        TIMELINE(softmax);
        if (lane == 0) KPipeline::release(base, j);  // all lanes have waited: wgmma_wait is executed by the whole warp

        apply_mask(S, head, first_row + lane / 4, j * BLOCK_N, lane % 4, row_keys, fully_visible, true, {});
        softmax.raise_max(S, scale_log2, alpha);  // m and l
        softmax.scale_O(softmax.O, alpha);
        softmax.exponentiate(P, S, scale_log2, sum);
        softmax.l[0] += sum[0];
        softmax.l[1] += sum[1];

        TIMELINE(wait_V);
        VPipeline::wait(base, j);
        wgmma_fence();
        TIMELINE(PV);
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)  // O += P V; A in registers has the layout of S
            wgmma<Order::MN_MAJOR>(softmax.O, P[step],
                                   Keys::mn_major(base + VPipeline::tile_at(j)) + Keys::mn_step(step), true);
        wgmma_commit();
        wgmma_wait<0>();
        warpgroup_fence_operand(softmax.O);  // the compiler: no access to O moves above the wait
        if (lane == 0) VPipeline::release(base, j);
    }
}

extern "C" __global__ __launch_bounds__(256) void hopper_plain(
    View<const dtype> Q,                      // (B, H, Sq, HEAD_DIM)
    View<const dtype> K,                      // (B, Hk, Sk, HEAD_DIM)
    View<const dtype> V,                      // (B, Hk, Sk, HEAD_DIM)
    View<dtype> O,                            // (B, H, Sq, HEAD_DIM)
    float* LSE,                               // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,  // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,  // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map, int H,
    int group,  // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    const int m0 = blockIdx.x * BLOCK_M, h = blockIdx.y, b = blockIdx.z;
    const Head head(score, b, h);
    const int tiles = n_block_range(head, m0, m0 + BLOCK_M).end;
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are initialised before they are used

    if (threadIdx.x < 128) {
        if (threadIdx.x == 0) produce(base, Q_map, K_map, V_map, m0, tiles, h, h / group, b);
        TIMELINE(done);
        return;
    }
    const unsigned lane = threadIdx.x % 32;
    const int first_row = m0 + threadIdx.x / 32 % 4 * 16, row = first_row + lane / 4;
    SoftmaxState softmax;
    consume(softmax, base, head, first_row, tiles, Head::softmax_scale_of(score) * Head::LOG2E);

    float O_scale[2];
    TIMELINE(store);
    finalize_rows(softmax, head, LSE, b * H + h, row, lane % 4, O_scale);
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i += 2) {  // O / l: two columns from registers; fwd_wgmma stores by TMA
        const int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2;
        if (row + 8 * half < head.Sq)
            *reinterpret_cast<unsigned*>(O.row(b, h, row + 8 * half) + column) =
                pack(softmax.O[i] * O_scale[half], softmax.O[i + 1] * O_scale[half]);
    }
    TIMELINE(done);
}
