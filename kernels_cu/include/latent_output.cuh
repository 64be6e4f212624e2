// The warpgroups of fwd_latent_wgmma that own the left and the right half of O: P V, and the epilogue.
#pragma once
#include "latent_tiles.cuh"

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

// The first or second warpgroup of O (INDEX 0 or 1): it owns the left or right half of the block's rows. PAIR: the half
// with the number of the block's rank, of the block's rows or of the peer's.
template <int INDEX>
struct OutputMainloop {
    const BlockTile& tile;
    const SmemAddr base;
    const int warp, lane;  // warp: of the warpgroup's four
    float (&O)[HALF_COLUMNS / 2];
    static constexpr int STEPS = BLOCK_N / 16;  // of P V, of 16 keys
    static constexpr bool OF_PEER = PAIR && INDEX == 1;
    // Whether P V of a key tile waits until Q K^T of the next one is nearly done.
    static constexpr bool LATE = PAIR || INDEX == 1;
    static __device__ __forceinline__ int half() { return PAIR ? cluster_cta_rank() : INDEX; }

    // Copies the rows of Q to shared memory, a warp 16 of them.
    __device__ __forceinline__ void load_Q(const View<const dtype>& Q) const {
        TIMELINE(load_Q);
        const SmemAddr full = FullQ::at(base, 0);
        const int row0 = 16 * warp, r = row0 + lane % 16;
        if (lane == 0) mbarrier_arrive_expect_tx(full, max(min(tile.rows() - row0, 16), 0) * 2 * HEAD_DIM);
        __syncwarp();
        if (lane < 16 && tile.has(r)) {
            const PackedRow row = tile.row(r);
            bulk_load(q_row(base, r), tile.seqlen.query(Q, row.h, row.i), 2 * HEAD_DIM, full);
        }
        __syncwarp();
    }

    // Sets the rows of V from `keys` on, which are behind the last valid key, to 0: P is 0 there, but 0 * NaN would be
    // NaN. Rows beyond the tensor are zeros already. PAIR: the first warpgroup does it for both, since the peer's P may
    // arrive while the block's Q K^T still reads these rows.
    __device__ __forceinline__ void clear_invalid_V(SmemAddr V_smem, int keys) {
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < (BLOCK_N - keys) * Half::SLABS * 8 && !OF_PEER; i += 128) {
            const int row = keys + i / (Half::SLABS * 8), chunk = i % (Half::SLABS * 8);
            store_floats(V_smem + Half::chunk(row, chunk), 0.0f, 0.0f, 0.0f, 0.0f);
        }
        fence_proxy_async();
        named_barrier_sync(HALF_BARRIER + (PAIR ? 0 : INDEX), PAIR ? THREADS : 128);  // wgmma reads zeros
    }

    // Copies P of key tile j, and the factors of O, to the peer. One thread of the first warpgroup calls it.
    __device__ __forceinline__ void send_P(unsigned j) const {
        const SmemAddr full = PeerFullP::at(base, j % 2);
        const unsigned P_at = j % 2 * PTile::BYTES, factors_at = j % 2 * 4 * BLOCK_M;
        mbarrier_arrive_expect_tx_at_rank(full, PTile::BYTES + 4 * BLOCK_M, peer_rank());
        bulk_copy_to_rank(base + PEER_P_AT + P_at, base + P_AT + P_at, PTile::BYTES, full, peer_rank());
        bulk_copy_to_rank(base + PEER_ALPHA_AT + factors_at, base + ALPHA_AT + factors_at, 4 * BLOCK_M, full,
                          peer_rank());
    }

    // O += P V of key tile j.
    __device__ __forceinline__ void mma_PV(unsigned j, SmemAddr V_at) {
        const Descriptor P_smem = PTile::k_major(base + (OF_PEER ? PEER_P_AT : P_AT) + j % 2 * PTile::BYTES),
                         V_smem = Half::mn_major(V_at);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
            wgmma<Order::MN_MAJOR>(O, P_smem + PTile::k_step(step), V_smem + Half::mn_step(step), true);
        wgmma_commit();
    }

    __device__ __forceinline__ void run(const KeyLoader& loader, const View<const dtype>& Q, char* smem) {
        if (INDEX == 1) load_Q(Q);  // while the first warpgroup loads keys
        const bool loads = warp == 0 && lane == 0;
        const int r = 16 * warp + lane / 4;
        const float* const factors = reinterpret_cast<const float*>(smem + (OF_PEER ? PEER_ALPHA_AT : ALPHA_AT));
        TIMELINE(load_first);
        if (INDEX == 0 && loads) loader.load_first();
        __syncwarp();
#pragma unroll
        for (int i = 0; i < HALF_COLUMNS / 2; ++i) O[i] = 0.0f;
        if (LATE && tile.tiles > 0) mbarrier_wait(NearlyDone::at(base, 0), 0);  // else no one waits for this phase
#pragma unroll 1
        for (int j = 0; j < tile.tiles; ++j) {
            // ahead: the half of V that is loaded to this one's stage, 2 * key tile + half; PAIR: only its key tile.
            const unsigned index = uniform(j), ahead = PAIR ? 2 * index + 4 + INDEX * 2 : 2 * index + INDEX + STAGES;
            KeyAddress next = {};
            if (loads) {
                next = loader.address(ahead / 2);
                if (INDEX == 0) loader.load_rest(index + REST_STAGES, next);  // when Q K^T of key tile j is complete
                if (INDEX == 0 && PAIR) loader.load_half(ahead / 2, peer_rank(), next);
            }
            __syncwarp();  // wgmma needs the whole warp
            TIMELINE(wait_P);
            if (OF_PEER) mbarrier_wait(PeerFullP::at(base, index % 2), parity_of<2>(index));
            else PPipeline::wait(base, index);
            if (PAIR && !OF_PEER) {
                if (warp == 1 && lane == 0) send_P(index);
                __syncwarp();
            }
            const float alpha[2] = {factors[index % 2 * BLOCK_M + r], factors[index % 2 * BLOCK_M + r + 8]};
            if (__any_sync(0xffffffffu, alpha[0] != 1.0f || alpha[1] != 1.0f)) SoftmaxStats::scale_O(O, alpha);
            TIMELINE(PV);
            const HalfStage V(index, half());
            V.wait(base);
            const int keys = tile.seqlen.Sk - tile.n0(j);
            if (KEY_LENGTHS && keys < BLOCK_N) clear_invalid_V(V.at(base), keys);
            if (LATE && j + 1 < tile.tiles)
                mbarrier_wait(NearlyDone::at(base, (index + 1) % 2), parity_of<2>(index + 1));
            mma_PV(index, V.at(base));
            wgmma_wait<0>();
            warpgroup_fence_operand(O);
            TIMELINE(load);
            __syncwarp();  // all lanes have read the factors
            if (lane == 0) {
                V.release(base);
                if (OF_PEER) mbarrier_arrive_at_rank(PPipeline::empty(base, index % 2), peer_rank());
                else PPipeline::release(base, index);
            }
            if (loads && (INDEX == 1 || !PAIR)) loader.load_half(ahead / 2, PAIR ? half() : ahead % 2, next);
            __syncwarp();  // wgmma needs the whole warp
        }
    }
};

// The epilogue of a warpgroup of O.
struct OutputEpilogue {
    const BlockTile& tile;
    const SmemAddr base;
    const int index, warp, lane;  // index: of the warpgroup; warp: of its four
    const float (&O)[HALF_COLUMNS / 2];

    __device__ __forceinline__ bool of_peer() const { return PAIR && index == 1; }
    __device__ __forceinline__ int half() const { return PAIR ? cluster_cta_rank() : index; }

    // Stores m, l and this half of O, not divided by l, for the combine kernel.
    __device__ __forceinline__ void store_partial(const BlockTile& rows, const Result& result,
                                                  const float2* sums) const {
        const int first = half() * HALF_COLUMNS;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 16 * warp + 8 * i + lane / 4;
            if (!rows.has(r)) continue;
            const long long number = result.number(rows, rows.row(r));
            float* const to = result.parts.O(number, result.split.split) + first + lane % 4 * 2;
#pragma unroll
            for (int k = 0; k < HALF_COLUMNS / 8; ++k)
                if (first + 8 * k < HEAD_DIM_V)
                    *reinterpret_cast<float2*>(to + 8 * k) = make_float2(O[4 * k + 2 * i], O[4 * k + 2 * i + 1]);
            if (half() == 0 && lane % 4 == 0) *result.parts.sums(number, result.split.split) = sums[r];
        }
    }

    // Stores this half of O, and the left half LSE. O goes through shared memory, where K was: a bulk store for each
    // row.
    __device__ __forceinline__ void store_final(const BlockTile& rows, const Result& result, const float2* sums) const {
        float O_scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int r = 16 * warp + 8 * i + lane / 4;
            const PackedRow row = rows.row(rows.has(r) ? r : 0);
            const FinalizedRow final_row = Head(rows.seqlen, row.h).finalize(sums[r].x, sums[r].y);
            O_scale[i] = final_row.O_scale;
            if (half() == 0 && lane % 4 == 0 && rows.has(r)) result.LSE[result.number(rows, row)] = final_row.lse;
        }
        constexpr unsigned ROW_BYTES = 2 * HALF_COLUMNS + 16;  // 16: no bank conflicts
        const SmemAddr from = base + (index * BLOCK_M + 16 * warp) * ROW_BYTES;
#pragma unroll
        for (int step = 0; step < HALF_COLUMNS / 16; ++step) {
            unsigned packed[4];
#pragma unroll
            for (int k = 0; k < 4; ++k)
                packed[k] = pack(O[8 * step + 2 * k] * O_scale[k % 2], O[8 * step + 2 * k + 1] * O_scale[k % 2]);
            stmatrix_x4(from + lane % 16 * ROW_BYTES + (2 * step + lane / 16) * 16, packed[0], packed[1], packed[2],
                        packed[3]);
        }
        fence_proxy_async();
        __syncwarp();  // the warp's 16 rows are in shared memory
        const int r = 16 * warp + lane, first = half() * HALF_COLUMNS, columns = min(HEAD_DIM_V - first, HALF_COLUMNS);
        if (columns > 0 && lane < 16 && rows.has(r)) {
            const PackedRow row = rows.row(r);
            bulk_store(rows.seqlen.query(result.O, row.h, row.i) + first, from + lane * ROW_BYTES, 2 * columns);
            tma_store_commit();
            tma_store_wait_read();  // shared memory must outlive the store
        }
    }

    // The non-finite fallback: each of the eight warps computes every eighth row again. O_smem: a row of each warp.
    __device__ __forceinline__ void store_non_finite(const Result& result, const View<const dtype>& Q,
                                                     const View<const dtype>& K, const View<const dtype>& V,
                                                     float* O_smem) const {
        float* const O_row = O_smem + (4 * index + warp) * DV_PAD;
#pragma unroll 1
        for (int r = 4 * index + warp; tile.has(r) && r < BLOCK_M; r += THREADS / 32) {
            const PackedRow row = tile.row(r);
            const Head head(tile.seqlen, row.h);
            const float2 stats = partial_non_finite(Q, K, V, tile.seqlen, row, tile.kv_head, tile.first,
                                                    tile.first + tile.tiles, [&](int d) -> float& { return O_row[d]; });
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

    __device__ __forceinline__ void run(const View<const dtype>& Q, const View<const dtype>& K,
                                        const View<const dtype>& V, const Result& result, char* smem) const {
        TIMELINE(wait_block);
        const float2* const sums = reinterpret_cast<const float2*>(smem + SUMS_AT) + (of_peer() ? BLOCK_M : 0);
        const BlockTile rows = of_peer() ? tile.of_peer() : tile;
        if (vote_at_end(smem, 4 * index + warp, lane, Head::HAS_MASK && !all_finite<4>(O)))
            store_non_finite(result, Q, K, V, reinterpret_cast<float*>(smem));
        else if (result.split.splits > 1) store_partial(rows, result, sums);
        else store_final(rows, result, sums);
        TIMELINE(done);
    }
};
