// Rung 4: latent attention (DeepSeek's MLA, absorbed) on Hopper: V is the first HEAD_DIM_V columns of K, which is read
// once. Few queries, many keys, split-KV; up to 576 columns of K and 512 of V.
//
// The query heads of a key/value head are rows of one tile (packed GQA), 64 of them. O is 64 x 512 in fp32, half of the
// register file, so a block has one tile, and two warpgroups own its left and right half. A third warpgroup computes S
// and P of all rows, 64 keys at a time. There is no producer: a thread of the warpgroup that has read a stage loads it
// again. (With a fourth warpgroup, ptxas has 128 registers per thread, too few for O.)
//
// clang-format off
//   S warpgroup   QK0 softmax0 | QK1          softmax1 | QK2          softmax2 |       time ->
//   left O                     | PV0                   | PV1                   | PV2
//   right O                                  PV0                    PV1                PV2
//
//   shared memory: halves of V [STAGES] | rest of K [REST_STAGES] | P [2] | Q, columns that are not in registers
//                  | factors of O [2] | m, l | mbarriers             O finds room where the halves were
// clang-format on
//
// The right half is late by one Q K^T: its P V keeps the tensor cores busy during the softmax of the next keys, and the
// left half of V is free for the next load early. Most of Q is in registers of the S warpgroup: with both operands in
// shared memory, the m64n64 products of Q K^T would need all of its bandwidth.
//
// Deferred rescaling as in fwd_wgmma: P uses the maximum m of the first keys, and O is multiplied only if m is raised.
// The scheme of two halves of O is FlashMLA's (deepseek-ai/FlashMLA, docs/20250422). Names that end in _AT are offsets
// in shared memory, in bytes.
#define FALLBACK_INLINE __forceinline__  // non_finite.cuh explains why
#include "pipeline.cuh"
#include "softmax.cuh"
#include "swizzle.cuh"

constexpr int WARPS = 1, CLUSTER = 1;  // split_kv.cuh: the key tiles of a block are not divided further
constexpr unsigned THREADS = 256;      // of O's warpgroups, which store the result; of a block of the combine kernel
constexpr unsigned ALL_THREADS = 384;  // O's left and right half, S: 128 each
#include "split_epilogue.cuh"

constexpr int O_REGISTERS = 160, S_REGISTERS = 184;    // per thread; 168 at launch
constexpr int V_SLABS = (HEAD_DIM_V + 127) / 128 * 2;  // slabs of 64 columns
constexpr int SLABS = V_SLABS * 64 < HEAD_DIM ? (HEAD_DIM + 63) / 64 : V_SLABS, REST_SLABS = SLABS - V_SLABS;
constexpr int HALF_COLUMNS = 32 * V_SLABS, DV_PAD = 64 * V_SLABS;
constexpr int Q_REGISTER_SLABS = Q_SLABS < SLABS ? Q_SLABS : SLABS;  // the first ones
using Half = Swizzled<BLOCK_N, HALF_COLUMNS>;                        // 64 keys of the left, or right, half of V
using Rest = Swizzled<BLOCK_N, 64 * REST_SLABS>;                     // their columns that are not in V
using Queries = Swizzled<BLOCK_M, 64 * (SLABS - Q_REGISTER_SLABS)>;
using Pairs = Swizzled<BLOCK_M, BLOCK_N>;  // P
static_assert(BLOCK_M == 64 && BLOCK_N == 64, "one m64n64 accumulator");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "a tensor map's rows are multiples of 16 bytes");
static_assert(STAGES / 2 == 2, "the left half's thread loads the rest and the right half of one key tile");
static_assert(V_SLABS <= 8, "half of O is at most 256 columns, the widest wgmma");
static_assert(PAGE_SIZE % BLOCK_N == 0, "a key tile is in one page");

constexpr unsigned REST_STAGES = 2, REST_AT = STAGES * Half::BYTES;
constexpr unsigned P_AT = REST_AT + REST_STAGES * Rest::BYTES, Q_AT = P_AT + 2 * Pairs::BYTES;
constexpr unsigned ALPHA_AT = Q_AT + Queries::BYTES, SUMS_AT = ALPHA_AT + 2 * 4 * BLOCK_M;
constexpr unsigned BARRIERS_AT = SUMS_AT + 8 * BLOCK_M;
using HalfPipeline = Pipeline<BARRIERS_AT, STAGES>;  // left half of keys 0, right half, left half of keys 1, ...
using RestPipeline = Pipeline<HalfPipeline::END, REST_STAGES>;
using PPipeline = Pipeline<RestPipeline::END, 2>;
using NearlyDone = BarrierArray<PPipeline::END, 2>;  // Q K^T of a key tile, except for its last slab: the turn of the
                                                     // right half's P V of the previous one
static_assert(SMEM_BYTES == NearlyDone::END, "spec and kernel disagree on shared memory");

// Named barriers: all warps (P V of both halves are complete, m and l are stored); those of the left and right half
// of O; those of S.
constexpr unsigned BLOCK_BARRIER = 1, HALF_BARRIER = 2, SCORE_BARRIER = 4;

__device__ __forceinline__ void init_barriers(SmemAddr base) {
    for (unsigned stage = 0; stage < STAGES; ++stage) {
        mbarrier_init(HalfPipeline::full(base, stage), 1);
        mbarrier_init(HalfPipeline::empty(base, stage), 4);  // one lane of each warp
    }
    for (unsigned stage = 0; stage < REST_STAGES; ++stage) {
        mbarrier_init(RestPipeline::full(base, stage), 1);
        mbarrier_init(RestPipeline::empty(base, stage), 4);
    }
    for (unsigned stage = 0; stage < 2; ++stage) {
        mbarrier_init(PPipeline::full(base, stage), 4);
        mbarrier_init(PPipeline::empty(base, stage), 8);  // both halves
        mbarrier_init(NearlyDone::at(base, stage), 4);
    }
    fence_proxy_async();
}

// The rows and keys of a block: packed rows row0 .. rows_end - 1 of key/value head `kv_head`, and key tiles `first` ..
// first + tiles - 1.
struct BlockTile {
    const SeqlenInfo seqlen;
    const int kv_head, group, row0, rows_end;
    const Head head0;  // all heads of the group have its mask
    Range fully_visible;
    int first, tiles;

    __device__ __forceinline__ BlockTile(const Score& score, const Split& split, int row_tile, int kv_head, int group)
        : seqlen(score, split.b), kv_head(kv_head), group(group), row0(row_tile * BLOCK_M),
          rows_end(min(row0 + BLOCK_M, seqlen.Sq * group)), head0(seqlen, kv_head * group) {
        const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;  // queries
        const Range keys = head0.keys(i0, i1);
        fully_visible = head0.fully_visible_keys(i0, i1);
        const int begin = keys.begin / BLOCK_N, all = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
        const int per_split = (all + split.splits - 1) / split.splits, skipped = min(split.split * per_split, all);
        first = begin + skipped, tiles = min(per_split, all - skipped);
    }
    __device__ __forceinline__ int first_key(int j) const { return (first + j) * BLOCK_N; }
    __device__ __forceinline__ bool has(int row) const { return row0 + row < rows_end; }
    __device__ __forceinline__ PackedRow row(int r) const { return PackedRow(row0 + r, kv_head, group); }
};

// Loads K. One thread of a warpgroup calls it.
struct KeyLoader {
    const SmemAddr base;
    const BlockTile& tile;
    const TensorMap& K_map;
    const int h;
    const bool broadcast;  // over batch entries

    // The tensor map of a broadcast dimension (stride 0) has size 1.
    __device__ __forceinline__ KeyLoader(SmemAddr base, const BlockTile& tile, const View<const dtype>& K,
                                         const TensorMap& K_map)
        : base(base), tile(tile), K_map(K_map), h(K.stride_h ? tile.kv_head : 0), broadcast(K.stride_b == 0) {}

    // The address of key tile j, for the functions below. Paged keys: reads the block table.
    __device__ __forceinline__ KeyAddress address(int j) const {
        return j < tile.tiles ? tile.seqlen.key_address(tile.first_key(j)) : KeyAddress{};
    }
    // Loads half a V, when its stage is empty: left halves have even numbers.
    __device__ __forceinline__ void load_half(unsigned number, KeyAddress from) const {
        if (static_cast<int>(number / 2) >= tile.tiles) return;
        HalfPipeline::acquire(base, number);
        load<Half, HalfPipeline>(base, stage_of<STAGES>(number), number % 2 * HALF_COLUMNS, from);
    }
    // Loads the rest of key tile j.
    __device__ __forceinline__ void load_rest(unsigned j, KeyAddress from) const {
        if (REST_SLABS == 0 || static_cast<int>(j) >= tile.tiles) return;
        RestPipeline::acquire(base, j);
        load<Rest, RestPipeline>(base + REST_AT, stage_of<REST_STAGES>(j), DV_PAD, from);
    }
    // Fills all stages.
    __device__ __forceinline__ void load_first() const {
        constexpr unsigned TILES = (STAGES + 1) / 2;
        KeyAddress from[TILES];
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) from[j] = address(j);  // reads the block table at once
#pragma unroll
        for (unsigned j = 0; j < TILES; ++j) {
            if (j < REST_STAGES) load_rest(j, from[j]);
            load_half(2 * j, from[j]);
            if (2 * j + 1 < STAGES) load_half(2 * j + 1, from[j]);
        }
    }

  private:
    template <class Box, class BoxPipeline>
    __device__ __forceinline__ void load(SmemAddr stages, unsigned stage, int column, KeyAddress from) const {
        const SmemAddr full = BoxPipeline::full(base, stage);
        mbarrier_arrive_expect_tx(full, Box::BYTES);
        Box::load_part(stages + stage * Box::BYTES, K_map, column, static_cast<int>(from.row), h,
                       broadcast ? 0 : from.entry, full);
    }
};

template <bool FLAG>
struct Flag {
    static constexpr bool YES = FLAG;
};

// The warpgroup that computes S and P.
struct ScoreWarpgroup {
    const BlockTile& tile;
    const SmemAddr base;
    const int warp, lane;  // warp: of the warpgroup's four
    unsigned Q_rmem[Q_REGISTER_SLABS * 4][4];
    using Scores = float[BLOCK_N / 2];

    __device__ __forceinline__ ScoreWarpgroup(const BlockTile& tile, SmemAddr base, int warp, int lane)
        : tile(tile), base(base), warp(warp), lane(lane) {}

    // Loads Q: the columns of the first slabs to registers, as A operands, the others to shared memory. Rows and
    // columns out of range become zeros.
    __device__ __forceinline__ void load_Q(const View<const dtype>& Q) {
        constexpr int Q_CHUNKS = Queries::SLABS > 0 ? Queries::SLABS * 8 : 1;  // of 16 bytes, per row
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < (SLABS > Q_REGISTER_SLABS ? BLOCK_M * Q_CHUNKS : 0); i += 128) {
            const int r = i / Q_CHUNKS, chunk = i % Q_CHUNKS;
            const int column = Q_REGISTER_SLABS * 64 + chunk * 8;
            const bool valid = tile.has(r) && column < HEAD_DIM;
            const PackedRow row = tile.row(valid ? r : 0);
            cp_async_16(base + Q_AT + Queries::chunk(r, chunk),
                        tile.seqlen.query(Q, row.h, row.i) + (valid ? column : 0), valid);
        }
        cp_async_commit();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            const PackedRow row = tile.row(tile.has(r) ? r : 0);
            const unsigned* const from = reinterpret_cast<const unsigned*>(tile.seqlen.query(Q, row.h, row.i));
#pragma unroll
            for (int i = 0; i < Q_REGISTER_SLABS * 8; ++i) {  // pairs of columns 8 i + 2 q
                const int column = 8 * i + 2 * (lane % 4);
                Q_rmem[i / 2][i % 2 * 2 + half] = tile.has(r) && column < HEAD_DIM ? from[column / 2] : 0;
            }
        }
        cp_async_wait<0>();
        fence_proxy_async();
        named_barrier_sync(SCORE_BARRIER, 128);  // all threads have loaded their part of Q
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

    // S = Q K^T of key tile j, except for the right half; then the right half. Each part when it has arrived; issue
    // only.
    __device__ __forceinline__ void mma_rest_and_left(Scores& S, unsigned j) {
        wgmma_fence();
        if constexpr (REST_SLABS > 0) {
            RestPipeline::wait(base, j);
            mma_slabs<V_SLABS, REST_SLABS>(S, Rest::k_major(base + REST_AT + stage_of<REST_STAGES>(j) * Rest::BYTES));
        }
        HalfPipeline::wait(base, 2 * j);
        mma_slabs<0, V_SLABS / 2>(S, Half::k_major(base + stage_of<STAGES>(2 * j) * Half::BYTES));
        wgmma_commit();
    }
    template <int FIRST, int COUNT>
    __device__ __forceinline__ void mma_right(Scores& S, unsigned j) {
        const SmemAddr right = base + stage_of<STAGES>(2 * j + 1) * Half::BYTES;
        wgmma_fence();
        mma_slabs<V_SLABS / 2 + FIRST, COUNT>(S, Half::k_major(right + FIRST * Half::SLAB_BYTES));
        wgmma_commit();
    }

    // S = Q K^T of key tile j is complete. With two buffers, the first part of the next tile is then in flight, so that
    // the tensor cores have work during the softmax; otherwise the right half of O has.
    template <bool LAST>
    __device__ __forceinline__ void finish_QK(Scores& S, Scores& next, unsigned j) {
        constexpr int SLABS_OF_HALF = V_SLABS / 2;
        if constexpr (S_BUFFERS == 1) mma_rest_and_left(S, j);
        HalfPipeline::wait(base, 2 * j + 1);
        if constexpr (S_BUFFERS == 1) {
            mma_right<0, SLABS_OF_HALF - 1>(S, j);
            mma_right<SLABS_OF_HALF - 1, 1>(S, j);
            wgmma_wait<1>();
            if (lane == 0) mbarrier_arrive(NearlyDone::at(base, j % 2));
            wgmma_wait<0>();
        } else {
            mma_right<0, SLABS_OF_HALF>(S, j);
            if (!LAST) mma_rest_and_left(next, j + 1);
            wgmma_wait<LAST ? 0 : 1>();
        }
        warpgroup_fence_operand(S);
        if (REST_SLABS > 0 && lane == 0) RestPipeline::release(base, j);
    }

    // Masked scores become -INF. visible: keys that the thread's two rows see.
    __device__ __forceinline__ void apply_mask(Scores& S, int n0, const Range (&visible)[2]) const {
        const bool at_begin = Head::FIRST && n0 < tile.fully_visible.begin;
        if (!at_begin && n0 + BLOCK_N <= tile.fully_visible.end) return;
        const int column = n0 + 2 * (lane % 4);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i) {
            const int key = i / 4 * 8 + i % 2, half = i / 2 % 2;
            if (key >= visible[half].end - column || (Head::FIRST && key < visible[half].begin - column)) S[i] = -INF;
        }
    }

    // Q K^T and softmax of key tile j: stores P, and the factors of O.
    template <bool LAST>
    __device__ __forceinline__ void key_tile(Scores& S, Scores& next_S, RowStats& stats, const Range (&visible)[2],
                                             float exponent, unsigned j, float* factors) {
        finish_QK<LAST>(S, next_S, j);
        apply_mask(S, tile.first_key(j), visible);
        float factor[2] = {1.0f, 1.0f};
        unsigned P[BLOCK_N / 16][4];
        stats.update<false>(P, S, exponent,
                            [&](const float (&alpha)[2]) { factor[0] = alpha[0], factor[1] = alpha[1]; });
        PPipeline::acquire(base, j);
        const SmemAddr P_smem = base + P_AT + j % 2 * Pairs::BYTES;
#pragma unroll
        for (int step = 0; step < BLOCK_N / 16; ++step)
            stmatrix_x4(P_smem + Pairs::chunk(16 * warp + lane % 16, 2 * step + lane / 16), P[step][0], P[step][1],
                        P[step][2], P[step][3]);
        const int r = 16 * warp + lane / 4;
        if (lane % 4 == 0) {
            factors[j % 2 * BLOCK_M + r] = factor[0];
            factors[j % 2 * BLOCK_M + r + 8] = factor[1];
        }
        fence_proxy_async();
        __syncwarp();  // all lanes have stored P and the factors
        if (lane == 0) mbarrier_arrive(PPipeline::full(base, j % 2));
    }

    __device__ __forceinline__ void run(const View<const dtype>& Q, char* smem) {
        load_Q(Q);
        RowStats stats;
        Scores S[S_BUFFERS];
        const float exponent = Head::unit_of(tile.seqlen.score) * Head::LOG2E;
        const int r = 16 * warp + lane / 4, i0 = (tile.row0 + r) / tile.group, i1 = (tile.row0 + r + 8) / tile.group;
        const Range visible[2] = {tile.head0.keys(i0, i0 + 1), tile.head0.keys(i1, i1 + 1)};
        float* const factors = reinterpret_cast<float*>(smem + ALPHA_AT);  // [2][BLOCK_M]
        const auto key_tile_of = [&](auto& own, auto& next, int j, auto last) {
            key_tile<last.YES>(own, next, stats, visible, exponent, uniform(j), factors);
        };
        if constexpr (S_BUFFERS == 1) {
#pragma unroll 1
            for (int j = 0; j < tile.tiles; ++j) key_tile_of(S[0], S[0], j, Flag<true>());
        } else if (tile.tiles > 0) {
            mma_rest_and_left(S[0], 0);
#pragma unroll 1
            for (int j = 0;; j += 2) {
                if (j + 1 == tile.tiles) {
                    key_tile_of(S[0], S[S_BUFFERS - 1], j, Flag<true>());
                    break;
                }
                key_tile_of(S[0], S[S_BUFFERS - 1], j, Flag<false>());
                if (j + 2 == tile.tiles) {
                    key_tile_of(S[S_BUFFERS - 1], S[0], j + 1, Flag<true>());
                    break;
                }
                key_tile_of(S[S_BUFFERS - 1], S[0], j + 1, Flag<false>());
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float l = row_sum<4>(stats.l[half]);
            if (lane % 4 == 0) reinterpret_cast<float2*>(smem + SUMS_AT)[r + 8 * half] = make_float2(stats.m[half], l);
        }
        // m and l are stored; P V is complete. The vote is that of the warps of O.
        named_barrier_or(BLOCK_BARRIER, ALL_THREADS, false);
    }
};

// Where the result of a block goes: to O and LSE, or with several splits to `parts`.
struct Result {
    const View<dtype>& O;
    float* LSE;
    const Partials& parts;
    const Split& split;
    int H;
    // Number of a row in LSE.
    __device__ __forceinline__ long long number(const BlockTile& tile, const PackedRow& row) const {
        return tile.seqlen.lse_offset(H, row.h) + row.i;
    }
};

// The left (half 0) or right warpgroup of O.
template <int HALF>
struct OutputWarpgroup {
    const BlockTile& tile;
    const SmemAddr base;
    const int warp, lane;  // warp: of the warpgroup's four
    float O[HALF_COLUMNS / 2];
    // Steps of P V, of 16 keys, and those that do not wait for the next Q K^T.
    static constexpr int STEPS = BLOCK_N / 16, EARLY = S_BUFFERS > 1 ? STEPS : HALF == 0 ? EARLY_STEPS : 0;

    __device__ __forceinline__ OutputWarpgroup(const BlockTile& tile, SmemAddr base, int warp, int lane)
        : tile(tile), base(base), warp(warp), lane(lane) {}

    // Zeros in the rows of keys that no row sees: P is 0 there, but 0 * NaN would be NaN. Rows beyond the tensor are
    // zeros already.
    __device__ __forceinline__ void clear_hidden(SmemAddr V_smem, char* V, int keys) {
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < (BLOCK_N - keys) * Half::SLABS * 8; i += 128) {
            const int row = keys + i / (Half::SLABS * 8), chunk = i % (Half::SLABS * 8);
            store_floats(V_smem + Half::chunk(row, chunk), 0.0f, 0.0f, 0.0f, 0.0f);
        }
        fence_proxy_async();
        named_barrier_sync(HALF_BARRIER + HALF, 128);  // all rows are cleared before wgmma reads them
    }

    // O += P V of key tile j: 16 keys per step.
    template <int BEGIN, int END>
    __device__ __forceinline__ void mma_PV(unsigned j, SmemAddr V_at) {
        const Descriptor P_smem = Pairs::k_major(base + P_AT + j % 2 * Pairs::BYTES), V_smem = Half::mn_major(V_at);
        wgmma_fence();
#pragma unroll
        for (int step = BEGIN; step < END; ++step)
            wgmma<Order::MN_MAJOR>(O, P_smem + Pairs::k_step(step), V_smem + Half::mn_step(step), true);
        wgmma_commit();
    }

    __device__ __forceinline__ void mainloop(const KeyLoader& loader, char* smem) {
        const bool loads = warp == 0 && lane == 0;
        const int r = 16 * warp + lane / 4;
        const float* const factors = reinterpret_cast<const float*>(smem + ALPHA_AT);
        if (HALF == 0 && loads) loader.load_first();  // while the warpgroup of S loads Q
        __syncwarp();
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) O[i] = 0.0f;
#pragma unroll 1
        for (int j = 0; j < tile.tiles; ++j) {
            const unsigned index = uniform(j), unit = 2 * index + HALF;
            KeyAddress next = {};
            if (loads) {
                next = loader.address((unit + STAGES) / 2);
                if (HALF == 0) loader.load_rest(index + REST_STAGES, next);  // when Q K^T of key tile j is complete
            }
            __syncwarp();  // wgmma needs the whole warp
            PPipeline::wait(base, index);
            const float alpha[2] = {factors[index % 2 * BLOCK_M + r], factors[index % 2 * BLOCK_M + r + 8]};
            if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) RowStats::scale_O(O, alpha);
            HalfPipeline::wait(base, unit);
            const SmemAddr V_at = base + stage_of<STAGES>(unit) * Half::BYTES;
            const int keys = tile.seqlen.Sk - tile.first_key(j);
            if (KEY_LENGTHS && keys < BLOCK_N) clear_hidden(V_at, smem, keys);
            if constexpr (EARLY > 0) mma_PV<0, EARLY>(index, V_at);
            if constexpr (EARLY < STEPS) {
                if (j + 1 < tile.tiles) mbarrier_wait(NearlyDone::at(base, (index + 1) % 2), (index + 1) / 2 % 2);
                mma_PV<EARLY, STEPS>(index, V_at);
            }
            wgmma_wait<0>();
            warpgroup_fence_operand(O);
            __syncwarp();  // all lanes have read the factors
            if (lane == 0) {
                HalfPipeline::release(base, unit);
                PPipeline::release(base, index);
            }
            if (loads) loader.load_half(unit + STAGES, next);
            __syncwarp();  // wgmma needs the whole warp
        }
    }

    // Stores m, l and this half of O, not divided by l, for the combine kernel.
    __device__ __forceinline__ void store_partial(const Result& result, const float2* sums) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            if (!tile.has(r)) continue;
            const long long number = result.number(tile, tile.row(r));
            float* const to = result.parts.O(number, result.split.split) + HALF * HALF_COLUMNS + lane % 4 * 2;
#pragma unroll
            for (int i = 0; i < HALF_COLUMNS / 8; ++i)
                if (HALF * HALF_COLUMNS + 8 * i < HEAD_DIM_V)
                    *reinterpret_cast<float2*>(to + 8 * i) = make_float2(O[4 * i + 2 * half], O[4 * i + 2 * half + 1]);
            if (HALF == 0 && lane % 4 == 0) *result.parts.sums(number, result.split.split) = sums[r];
        }
    }

    // Stores this half of O, and the left half LSE. O goes through shared memory, where K was, to global memory: 16
    // bytes per lane.
    __device__ __forceinline__ void store_final(const Result& result, const float2* sums, const char* smem) const {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int r = 16 * warp + 8 * half + lane / 4;
            const PackedRow row = tile.row(tile.has(r) ? r : 0);
            const FinalizedRow final_row = Head(tile.seqlen, row.h).finalize(sums[r].x, sums[r].y);
            inverse[half] = final_row.inverse;
            if (HALF == 0 && lane % 4 == 0 && tile.has(r)) result.LSE[result.number(tile, row)] = final_row.lse;
        }
        const unsigned O_AT = HALF * Half::BYTES;  // [64][HALF_COLUMNS], as large as 64 keys
#pragma unroll
        for (int step = 0; step < HALF_COLUMNS / 16; ++step) {
            unsigned pairs[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                pairs[k] = pack(O[8 * step + 2 * k] * inverse[k % 2], O[8 * step + 2 * k + 1] * inverse[k % 2]);
            stmatrix_x4(base + O_AT + Half::chunk(16 * warp + lane % 16, 2 * step + lane / 16), pairs[0], pairs[1],
                        pairs[2], pairs[3]);
        }
        __syncwarp();  // the warp's 16 rows are in shared memory
#pragma unroll 4
        for (int r = 16 * warp; r < 16 * warp + 16; ++r) {
            if (!tile.has(r)) continue;
            const PackedRow row = tile.row(r);
            dtype* const to = tile.seqlen.query(result.O, row.h, row.i) + HALF * HALF_COLUMNS;
#pragma unroll
            for (int chunk = lane; chunk < HALF_COLUMNS / 8; chunk += 32)
                if (HALF * HALF_COLUMNS + 8 * chunk < HEAD_DIM_V)
                    *reinterpret_cast<uint4*>(to + 8 * chunk) =
                        *reinterpret_cast<const uint4*>(smem + O_AT + Half::chunk(r, chunk));
        }
    }

    // The non-finite fallback: each of the eight warps computes every eighth row again. O_smem: a row of each warp.
    __device__ __forceinline__ void store_non_finite(const Result& result, const View<const dtype>& Q,
                                                     const View<const dtype>& K, const View<const dtype>& V,
                                                     float* O_smem) const {
        float* const O_row = O_smem + (4 * HALF + warp) * DV_PAD;
#pragma unroll 1
        for (int r = 4 * HALF + warp; tile.has(r) && r < BLOCK_M; r += THREADS / 32) {
            const PackedRow row = tile.row(r);
            const Head head(tile.seqlen, row.h);
            const float2 stats =
                partial_non_finite(Q, K, V, tile.seqlen, row, tile.kv_head, tile.first, tile.first + tile.tiles, O_row);
            CombinedRow sum;
            sum.m = stats.x, sum.l = stats.y;
            __syncwarp();  // the row is complete
#pragma unroll 1
            for (int quad = lane; quad < HEAD_DIM_V / 4; quad += 32) {
                sum.O = reinterpret_cast<const float4*>(O_row)[quad];
                const long long number = result.number(tile, row);
                if (result.split.splits > 1) result.parts.store(number, result.split.split, quad, sum);
                else store_row(result.O, result.LSE, head, row.h, row.i, number, quad, sum);
            }
            __syncwarp();  // the row has been read before it is overwritten
        }
    }

    __device__ __forceinline__ void run(const KeyLoader& loader, const View<const dtype>& Q, const View<const dtype>& K,
                                        const View<const dtype>& V, const Result& result, char* smem) {
        mainloop(loader, smem);
        const float2* const sums = reinterpret_cast<const float2*>(smem + SUMS_AT);
        // P V of both halves is complete, and m and l are stored.
        if (named_barrier_or(BLOCK_BARRIER, ALL_THREADS, Head::HIDES && !all_finite<4>(O)))
            store_non_finite(result, Q, K, V, reinterpret_cast<float*>(smem));
        else if (result.split.splits > 1) store_partial(result, sums);
        else store_final(result, sums, smem);
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
    const SmemAddr base = smem_address(smem);
    griddepcontrol_launch_dependents();
    const int z = blockIdx.z, each = max(splits, 1);
    const bool dynamic = DYNAMIC_SPLITS && splits > 0;
    const Split split = dynamic ? SplitScheduler(score, gridDim.z - splits, splits).block(z)
                                : Split{z / each, z % each, each, z / each * each};
    if (dynamic && split.invalid()) return;
    if (threadIdx.x == 0) init_barriers(base);
    __syncthreads();  // the mbarriers are initialised before they are used
    const unsigned warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
    const BlockTile tile(score, split, blockIdx.x, blockIdx.y, group);

    const KeyLoader loader(base, tile, K, K_map);
    if (warp >= 8) {
        setmaxnreg_inc<S_REGISTERS>();
        ScoreWarpgroup(tile, base, warp - 8, lane).run(Q, smem);
        return;
    }
    setmaxnreg_dec<O_REGISTERS>();
    const Partials parts(partials, gridDim.z, static_cast<long long>(H) * query_rows(score), split);
    const Result result{O, LSE, parts, split, H};
    if (warp < 4) OutputWarpgroup<0>(tile, base, warp, lane).run(loader, Q, K, V, result, smem);
    else OutputWarpgroup<1>(tile, base, warp - 4, lane).run(loader, Q, K, V, result, smem);
}

extern "C" __global__ __launch_bounds__(THREADS) void fwd_latent_wgmma_combine(
    const __grid_constant__ View<dtype_o> O,  // (B, H, Sq, HEAD_DIM_V)
    float* LSE,                               // (B, H, Sq), contiguous
    float* partials,                          // Partials of combine.cuh
    int H, int splits, const __grid_constant__ Score score) {
    combine_splits(O, LSE, partials, H, splits, score);
}
