// The query tiles that a block of bwd_mma visits, and their loads by cp.async.
#pragma once
#include "bwd_mma_tiles.cuh"

// The query tiles of a block's keys: which ones, in the query heads of its key/value head, and their loads. Little is
// stored, and much is computed again or read again from L1: the accumulators leave no registers.
struct MBlockLoader {
    const View<const dtype>&Q, &dO;
    const float *LSE, *delta;
    const Score& score;
    const SeqlenInfo& seqlen_of_block;
    const RowTile& tile_of_block;
    const SmemAddr smem;
    const int b, kv_head, group, H;

    // RAGGED: constructed again, which saves registers.
    __device__ __forceinline__ SeqlenInfo seqlen() const { return RAGGED ? SeqlenInfo(score, b) : seqlen_of_block; }
    __device__ __forceinline__ int n0() const {
        return RAGGED ? tile_of_block.row0 : static_cast<int>(block_index_x()) * BLOCK_N;
    }
    __device__ __forceinline__ Range queries() const {
        return Head(seqlen_of_block, kv_head * group).queries(n0(), n0() + BLOCK_N);
    }
    __device__ __forceinline__ int first_row() const { return queries().begin / BLOCK_M * BLOCK_M; }
    __device__ __forceinline__ int row_end() const { return queries().end; }

    // Block map: moves to the first visible tile from row m0 of head h on; false if there is none.
    __device__ __forceinline__ bool next_tile(int& h, int& m0) const {
        for (; h < (kv_head + 1) * group; ++h, m0 = first_row()) {
            m0 = Head(score, b, h).next_query_tile<BLOCK_M, BLOCK_N>(m0, row_end(), n0());
            if (m0 < row_end()) return true;
        }
        return false;
    }

    // Loads Q, dO, LSE and delta of a tile into the stage at offset `at`.
    __device__ __forceinline__ void load(unsigned at, int h, int m0) const {
        const SmemAddr stage = smem + at;
        const unsigned thread = thread_index_x();
        const SeqlenInfo seqlen_info = seqlen();
        cp_async_tile<BLOCK_M, D_PAD, THREADS>(stage, seqlen_info.query(Q, h, 0), Q.stride_s, m0, seqlen_info.Sq,
                                               thread);
        cp_async_tile<BLOCK_M, DV_PAD, THREADS, HEAD_DIM_V>(stage + Q_BYTES, seqlen_info.query(dO, h, 0), dO.stride_s,
                                                            m0, seqlen_info.Sq, thread);
        const long long row = seqlen_info.lse_offset(H, h) + m0;
        for (int t = thread; t < 2 * BLOCK_M; t += THREADS) {
            const int query = t % BLOCK_M;
            cp_async_4(stage + Q_BYTES + dO_BYTES + 4 * t, (t < BLOCK_M ? LSE : delta) + row + query,
                       m0 + query < seqlen_info.Sq);
        }
        cp_async_commit();
    }

    // Whether a tile may have hidden scores. Rows >= Sq are masked, too: their q is 0, and 0 * inf is NaN.
    __device__ __forceinline__ bool masked(const Head& head, int m0) const {
        const Range fully_visible = head.fully_visible_queries<Head::HAS_BLOCK_MAP>(n0(), n0() + BLOCK_N);
        // Rows whose window begins after the tile's first key.
        const bool beyond_fully_visible = Head::HAS_LEFT_BOUND && min(m0 + BLOCK_M, head.Sq) > fully_visible.end;
        return m0 < fully_visible.begin || beyond_fully_visible || m0 + BLOCK_M > head.Sq ||
               (Head::HAS_BLOCK_MAP && !head.map_covers<Head::FULLY_VISIBLE, BLOCK_N>(m0, m0 + BLOCK_M, n0()));
    }
};

// The other one of the two stages: their offsets are STAGES_AT and STAGES_AT + STAGE_BYTES.
__device__ __forceinline__ unsigned other_stage(unsigned stage) { return 2 * STAGES_AT + STAGE_BYTES - stage; }
