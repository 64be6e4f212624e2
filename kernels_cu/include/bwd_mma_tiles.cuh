// The tiles of bwd_mma: how its warps divide the keys, queries and columns, padded head dimensions, layouts in shared
// memory. Names that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "mma_smem.cuh"
#include "score_mod.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int KEY_WARPS = WARPS * 32 / BLOCK_N;     // warps that own the same 32 keys
constexpr int DQ_COL_WARPS = WARPS * 32 / BLOCK_M;  // warps that divide the columns of the same 32 rows of dQ
constexpr int MOST_COL_WARPS = KEY_WARPS > DQ_COL_WARPS ? KEY_WARPS : DQ_COL_WARPS;
constexpr int MIN_COLUMNS = 16 * MOST_COL_WARPS;  // 16 columns, one MMA step, per warp
// The smallest columns * 2^n that is at least width.
__device__ constexpr int padded(int columns, int width) {
    return columns >= width ? columns : padded(2 * columns, width);
}
constexpr int D_PAD = padded(MIN_COLUMNS, HEAD_DIM);  // a power of two; columns >= HEAD_DIM are zeros
constexpr int DV_PAD = padded(MIN_COLUMNS, HEAD_DIM_V);
constexpr int QUERIES = BLOCK_M / KEY_WARPS, COLS = D_PAD / KEY_WARPS, V_COLS = DV_PAD / KEY_WARPS;
constexpr int DQ_COLS = D_PAD / DQ_COL_WARPS;
// These options would spill otherwise.
constexpr bool SMALL_STEPS =
    Head::HAS_SCORE_MOD || Head::ELEMENT_MASK || WINDOW || KEY_LENGTHS || (DROPOUT && KEY_WARPS == 1);
constexpr int SUB_M = QUERIES < 32 || SMALL_STEPS ? 16 : 32;  // queries per step
using Tile = SwizzledRows<D_PAD>;                             // rows of Q, K
using VTile = SwizzledRows<DV_PAD>;                           // rows of V, dO
using PTile = SwizzledRows<BLOCK_M>;                          // rows of P^T, dS^T
using QKOffsets = FragmentOffsets<D_PAD>;
using VOffsets = FragmentOffsets<DV_PAD>;
using POffsets = FragmentOffsets<BLOCK_M>;
constexpr unsigned ROW_BYTES = Tile::ROW, V_ROW_BYTES = VTile::ROW, P_BYTES = BLOCK_N * PTile::ROW;
constexpr unsigned Q_BYTES = BLOCK_M * ROW_BYTES, dO_BYTES = BLOCK_M * V_ROW_BYTES, K_BYTES = BLOCK_N * ROW_BYTES,
                   V_BYTES = BLOCK_N * V_ROW_BYTES;
constexpr unsigned STAGES_AT = K_BYTES + V_BYTES, STAGE_BYTES = Q_BYTES + dO_BYTES + 8 * BLOCK_M;  // Q, dO, LSE, delta
static_assert(SMEM_BYTES == STAGES_AT + 2 * STAGE_BYTES + (KEY_WARPS > 1 ? 2 : 1) * P_BYTES,
              "spec and kernel disagree on shared memory");
static_assert(KEY_WARPS * BLOCK_N == 32 * WARPS && DQ_COL_WARPS * BLOCK_M == 32 * WARPS && QUERIES % SUB_M == 0 &&
                  SUB_M % 16 == 0,
              "32 rows per warp, whole MMA steps");
static_assert(HEAD_DIM % 8 == 0 && HEAD_DIM_V % 8 == 0, "rows are copied in 16-byte chunks");
