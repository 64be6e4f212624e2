// The ideas of fwd_wgmma.cu as switches (OFF, ON): hopper_ladder.py defines them, run.py enables one after another.
// The first steps are kernels_cu/course/hopper_plain.cu, which is also the introduction to the barriers.
//
// clang-format off
//   OVERLAP       Q K^T of a key tile is issued together with P V of the previous one
//   PING_PONG     consumers take turns with the tensor cores: one multiplies, the others compute exponentials
//   DEFERRED      the maximum m changes, and O is rescaled, only if a sum of P would exceed a limit
//   TMA_STORE     O leaves through a buffer in shared memory by TMA; the next work tile does not wait for it
//   SCHEDULE      1: a block per work tile; 2: persistent blocks, longest work tiles first; 3: a scheduler warp, and
//                 L2 head groups
//   BLOCK_M       64 rows for each consumer warpgroup;    BLOCK_N, STAGES: keys of a tile, stages of K and of V
// clang-format on
//
// A work tile is BLOCK_M query rows of a head. Warp 0 loads K and V, warp 1 loads Q, warp 2 is the scheduler warp. An
// index i counts all key tiles of the block: stages and phases follow from it (pipeline.cuh).
#include "epilogue.cuh"
#include "mask_wgmma.cuh"
#include "n_block_range.cuh"
#include "ping_pong.cuh"
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

constexpr int ON = 2;  // 1: off
constexpr unsigned THREADS = 128 * (1 + CONSUMERS);
using Queries = Swizzled<64, HEAD_DIM>;
using Keys = Swizzled<BLOCK_N, HEAD_DIM>;

constexpr unsigned K_AT = CONSUMERS * Queries::BYTES, V_AT = K_AT + STAGES * Keys::BYTES;
using OBuffer = OutputBuffer<Queries, Queries, CONSUMERS, V_AT + STAGES * Keys::BYTES>;
static_assert(OBuffer::SEPARATE, "O has a buffer of its own");
constexpr unsigned BARRIERS_AT = SMEM_BYTES - BARRIER_BYTES;
using KPipeline = TilePipeline<Keys, K_AT, BARRIERS_AT>;
using VPipeline = TilePipeline<Keys, V_AT, KPipeline::END>;
using FullQ = BarrierArray<VPipeline::END, CONSUMERS>;
using EmptyQ = BarrierArray<FullQ::END, CONSUMERS>;
using Scheduler = SchedulerPipeline<EmptyQ::END>;
static_assert(Scheduler::END <= SMEM_BYTES, "the barriers fit");

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    init_QKV_barriers<KPipeline, VPipeline, FullQ, EmptyQ>(base, CONSUMERS);
    Scheduler::init_barriers(base, 2 + 128 * CONSUMERS);  // the two load threads and all consumer threads
    fence_proxy_async();
}

struct Arguments {  // of the kernel
    const View<dtype>& O;
    float* LSE;
    const TensorMap &Q_map, &K_map, &V_map, &O_warp_map;
    int H, heads, group;
    const Score& score;
};

// Calls f(work tile, number of key tiles, how many work tiles came before) for each work tile of the block.
template <class F>
__device__ __forceinline__ void for_each_tile(const char* smem, const Arguments& args, F f) {
    const unsigned tiles = query_tiles<BLOCK_M>(args.score), heads = args.heads;
    unsigned count = 0;
    const auto call = [&](const WorkTile& work_tile) {
        const Head head(work_tile.sequence(args.score), work_tile.h());
        f(work_tile, n_block_range(head, work_tile.row0, work_tile.row0 + BLOCK_M).end, count++);
    };
    if constexpr (SCHEDULE == 1) {
        call(WorkTile(blockIdx.x % tiles * BLOCK_M, blockIdx.x / tiles, args.H));
    } else if constexpr (SCHEDULE == 2) {
        serpentine(blockIdx.x, tiles * heads, 1, [&](unsigned i) {
            const unsigned tile = CAUSAL ? tiles - 1 - i / heads : i % tiles, head = CAUSAL ? i % heads : i / tiles;
            call(WorkTile(tile * BLOCK_M, head, args.H));
        });
    } else {
        Scheduler::Reader scheduler(smem);
#pragma unroll 1
        while (scheduler.next()) call(scheduler.tile);
    }
}

// ---- producer warps

__device__ __forceinline__ void load_KV(char* smem, const Arguments& args) {
    const SmemAddr base = smem_address(smem);
    unsigned pipe_index = 0;
    for_each_tile(smem, args, [&](const WorkTile& work_tile, int tiles, unsigned) {
        const int h = work_tile.h() / args.group, b = work_tile.b;
        const auto load_K = [&](int j) {
            TIMELINE(wait_empty);
            KPipeline::acquire(base, pipe_index + j);
            TIMELINE(load);
            KPipeline::load(base, pipe_index + j, args.K_map, j * BLOCK_N, h, b);
        };
        const auto load_V = [&](int j) {
            TIMELINE(wait_empty);
            VPipeline::acquire(base, pipe_index + j);
            TIMELINE(load);
            VPipeline::load(base, pipe_index + j, args.V_map, j * BLOCK_N, h, b);
        };
        constexpr int AHEAD = OVERLAP == ON;  // in the order in which the consumers need them
#pragma unroll 1
        for (int j = 0; j < tiles + AHEAD; ++j) {
            if (j < tiles) load_K(j);
            if (j >= AHEAD) load_V(j - AHEAD);
        }
        pipe_index += tiles;
    });
}

__device__ __forceinline__ void load_Q(char* smem, const Arguments& args) {
    const SmemAddr base = smem_address(smem);
    for_each_tile(smem, args, [&](const WorkTile& work_tile, int, unsigned count) {
#pragma unroll 1
        for (int consumer = 0; consumer < CONSUMERS; ++consumer) {
            TIMELINE(wait_empty_Q);
            mbarrier_wait(EmptyQ::at(base, consumer), count % 2 ^ 1);
            TIMELINE(load_Q);
            Queries::load(base + consumer * Queries::BYTES, args.Q_map, work_tile.row0 + 64 * consumer, work_tile.h(),
                          work_tile.b, FullQ::at(base, consumer));
        }
    });
}

// ---- consumer warpgroups

// One consumer warpgroup and its 64 query rows of one work tile.
struct ConsumerWarpgroup {
    using FragmentS = float[BLOCK_N / 2];
    using FragmentP = unsigned[BLOCK_N / 16][4];

    const SmemAddr base;
    const Head& head;
    const unsigned consumer, lane, pipe_index;  // index in the pipelines of the first key tile
    const int first_row;                        // of the warp's 16
    const int tiles, own_tiles;                 // key tiles of the work tile, and those that this consumer's rows see
    const float scale_log2;
    const WarpSchedulerBarrier turn{consumer};
    const RowKeyRanges row_keys{head, first_row + static_cast<int>(lane) / 4};
    const Range fully_visible = head.fully_visible_keys<false>(first_row, first_row + 16);

    __device__ __forceinline__ void mma_QK(FragmentS& S, int j) {
        KPipeline::wait(base, pipe_index + j);
        wgmma_fence();
        TIMELINE(multiply);
#pragma unroll
        for (int step = 0; step < HEAD_DIM / 16; ++step)
            wgmma<Order::K_MAJOR>(S, Queries::k_major(base + consumer * Queries::BYTES) + Queries::k_step(step),
                                  Keys::k_major(base + KPipeline::tile_at(pipe_index + j)) + Keys::k_step(step),
                                  step > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void mma_PV(SoftmaxState& softmax, const FragmentP& P, int j) {
        VPipeline::wait(base, pipe_index + j);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            wgmma<Order::MN_MAJOR>(softmax.O, P[step],
                                   Keys::mn_major(base + VPipeline::tile_at(pipe_index + j)) + Keys::mn_step(step),
                                   step > 0 || j > 0);
        wgmma_commit();
    }
    __device__ __forceinline__ void wait_mma(SoftmaxState& softmax, FragmentS& S) {
        wgmma_wait<0>();
        warpgroup_fence_operand(S);
        warpgroup_fence_operand(softmax.O);
    }
    template <bool FIRST>
    __device__ __forceinline__ void softmax_tile(SoftmaxState& softmax, FragmentP& P, FragmentS& S, int j) {
        TIMELINE(softmax);
        apply_mask(S, head, first_row + lane / 4, j * BLOCK_N, lane % 4, row_keys, fully_visible, true, {});
        if constexpr (DEFERRED == ON || FIRST) {
            softmax.update<FIRST>(P, S, scale_log2);
        } else {
            float sum[2], alpha[2];
            softmax.raise_max(S, scale_log2, alpha);
            softmax.scale_O(softmax.O, alpha);
            softmax.exponentiate(P, S, scale_log2, sum);
            softmax.l[0] += sum[0], softmax.l[1] += sum[1];
        }
    }
    __device__ __forceinline__ void release_K(int j) const {
        if (lane == 0) KPipeline::release(base, pipe_index + j);
    }
    __device__ __forceinline__ void release_V(int j) const {
        if (lane == 0) VPipeline::release(base, pipe_index + j);
    }
    __device__ __forceinline__ void wait_turn() const {
        if constexpr (PING_PONG == ON && CONSUMERS > 1) turn.wait();
    }
    __device__ __forceinline__ void pass_turn() const {
        if constexpr (PING_PONG == ON && CONSUMERS > 1) turn.pass();
    }

    __device__ __forceinline__ void mainloop(SoftmaxState& softmax) {
        FragmentS S;
        FragmentP P;
        mma_QK(S, 0);
        wait_mma(softmax, S);
        release_K(0);
        softmax_tile<true>(softmax, P, S, 0);
#pragma unroll 1
        for (int j = 1; j < own_tiles; ++j) {
            TIMELINE(wait_barrier);
            wait_turn();
            if constexpr (OVERLAP == ON) {
                mma_QK(S, j);
                mma_PV(softmax, P, j - 1);
            } else {
                mma_PV(softmax, P, j - 1);
                wait_mma(softmax, S);
                mma_QK(S, j);
            }
            pass_turn();
            wait_mma(softmax, S);
            release_V(j - 1);
            release_K(j);
            softmax_tile<false>(softmax, P, S, j);
        }
        release_Q();
        mma_PV(softmax, P, own_tiles - 1);
        wait_mma(softmax, S);
        release_V(own_tiles - 1);
    }
    __device__ __forceinline__ void release_Q() const {
        if (lane == 0) mbarrier_arrive(EmptyQ::at(base, consumer));
    }

    // Takes part in the barriers of the key tiles that only other consumers see.
    __device__ __forceinline__ void skip_last_tiles() const {
#pragma unroll 1
        for (int j = own_tiles; j < tiles; ++j) {
            if (j > 0) {
                wait_turn();
                pass_turn();
            }
            KPipeline::wait(base, pipe_index + j);
            release_K(j);
            VPipeline::wait(base, pipe_index + j);
            release_V(j);
        }
    }
};

// LSE, and O / l to global memory.
__device__ __forceinline__ void epilogue(const SoftmaxState& softmax, SmemAddr base, const Arguments& args,
                                         const WorkTile& work_tile, const Head& head, int first_row, unsigned warp,
                                         unsigned lane) {
    const int row = first_row + lane / 4;
    float O_scale[2];
    TIMELINE(store);
    finalize_rows(softmax, head, args.LSE, work_tile.batch_head, row, lane % 4, O_scale);
    if constexpr (TMA_STORE == ON) {
        if (lane == 0) tma_store_wait_read();  // the previous O has left the buffer
        __syncwarp();
        OBuffer::store(softmax, O_scale, OBuffer::warp_rows(base, warp / 4 - 1, warp), args.O_warp_map, head,
                       work_tile.h(), work_tile.b, first_row, lane, lane == 0);
    } else {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i += 2) {
            const int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2;
            if (row + 8 * half < head.Sq)
                *reinterpret_cast<unsigned*>(args.O.row(work_tile.b, work_tile.h(), row + 8 * half) + column) =
                    pack(softmax.O[i] * O_scale[half], softmax.O[i + 1] * O_scale[half]);
        }
    }
}

__device__ __forceinline__ void consume(char* smem, unsigned warp, const Arguments& args) {
    const SmemAddr base = smem_address(smem);
    const unsigned consumer = warp / 4 - 1, lane = threadIdx.x % 32;
    unsigned pipe_index = 0;
    if constexpr (PING_PONG == ON) start_ping_pong(consumer);
    for_each_tile(smem, args, [&](const WorkTile& of_lane, int tiles, unsigned count) {
        const WorkTile work_tile = uniform(of_lane);  // addresses in uniform registers
        const Head head(work_tile.sequence(args.score), work_tile.h());
        const int m0 = work_tile.row0 + 64 * consumer, first_row = m0 + warp % 4 * 16;
        const int own_tiles = m0 < head.Sq ? n_block_range(head, m0, m0 + 64).end : 0;
        ConsumerWarpgroup warpgroup{base,  head,       consumer,
                                    lane,  pipe_index, first_row,
                                    tiles, own_tiles,  Head::softmax_scale_of(args.score) * Head::LOG2E};
        SoftmaxState softmax;
        wgmma_discard(softmax.O);  // the first P V overwrites it
        TIMELINE(wait_Q);
        mbarrier_wait(FullQ::at(base, consumer), count % 2);
        if (own_tiles > 0) {
            warpgroup.mainloop(softmax);
        } else {
            warpgroup.release_Q();
#pragma unroll
            for (float& x : softmax.O) x = 0.0f;
        }
        warpgroup.skip_last_tiles();
        pipe_index += tiles;
        epilogue(softmax, base, args, work_tile, head, first_row, warp, lane);
    });
    if (TMA_STORE == ON && lane == 0) tma_store_wait_read();  // shared memory must outlive the stores
}

extern "C" __global__ __launch_bounds__(THREADS, 1) void hopper_ladder(
    const __grid_constant__ View<const dtype> Q,  // (B, H, Sq, HEAD_DIM)
    const __grid_constant__ View<const dtype> K,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<const dtype> V,  // (B, Hk, Sk, HEAD_DIM)
    const __grid_constant__ View<dtype> O,        // (B, H, Sq, HEAD_DIM)
    float* LSE,                                   // (B, H, Sq), contiguous
    const __grid_constant__ TensorMap Q_map,      // boxes of 64 rows
    const __grid_constant__ TensorMap K_map,      // boxes of BLOCK_N rows
    const __grid_constant__ TensorMap V_map,
    const __grid_constant__ TensorMap O_warp_map,  // boxes of 16 rows
    int H,
    int heads,  // B * H
    int group,  // H / Hk
    const __grid_constant__ Score score) {
    extern __shared__ __align__(1024) char smem[];
    const SmemAddr base = smem_address(smem);
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are initialised before they are used
    const Arguments args = {O, LSE, Q_map, K_map, V_map, O_warp_map, H, heads, group, score};
    const unsigned warp = uniform(threadIdx.x / 32);
    if (warp < 4) {
        if constexpr (CONSUMERS > 1) setmaxnreg_dec<CONSUMERS == 2 ? 40 : 32>();
        if (warp == 0 && elect()) {
            load_KV(smem, args);
        } else if (warp == 1 && elect()) {
            load_Q(smem, args);
        } else if (SCHEDULE == 3 && warp == 2) {
            Scheduler::Writer work_tiles{smem};
            work_tiles.publish_all<false>(score, heads, H, group, nullptr, [](const WorkTile&) {});
        }
    } else {
        if constexpr (CONSUMERS > 1) setmaxnreg_inc<CONSUMERS == 2 ? 232 : 160>();
        consume(smem, warp, args);
    }
    TIMELINE(done);
}
