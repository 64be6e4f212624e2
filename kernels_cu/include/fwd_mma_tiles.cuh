// The tiles of fwd_mma: padded head dimensions, layouts in shared memory, what is unrolled, and whether Q stays in
// registers. Names that end in _AT are offsets in shared memory, in bytes.
#pragma once
#include "mma_operands.cuh"
#include "softmax_mma.cuh"

constexpr unsigned THREADS = 32 * WARPS;
constexpr int M_TILES = BLOCK_M / (16 * WARPS), WARP_ROWS = 16 * M_TILES;
constexpr int STEP_D = 32 / sizeof(dtype_k);                      // columns per MMA step of S, and per fragment of V
constexpr int D_PAD = (HEAD_DIM + STEP_D - 1) / STEP_D * STEP_D;  // columns >= HEAD_DIM are zeros
constexpr int DV_PAD = (HEAD_DIM_V + STEP_D - 1) / STEP_D * STEP_D;
constexpr int K_COLUMNS = D_PAD * sizeof(dtype_k) / 2, V_COLUMNS = DV_PAD * sizeof(dtype_v) / 2;  // in 16-bit units
using QTile = SwizzledRows<D_PAD>;
using KTile = SwizzledRows<K_COLUMNS>;
using VTile = SwizzledRows<V_COLUMNS>;
using OTile = SwizzledRows<DV_PAD>;
// D = 96 and 128: the loads of the next tile are interleaved with the MMAs of Q K^T, and ldmatrix offsets take fewer
// registers (COMPACT_OFFSETS): 6% and 3% faster. D = 64 is 2% slower, D = 256 equal.
// The interleaved loads of a tile have one stride: the tile must be in one page.
constexpr bool INTERLEAVE_LOADS =
    M_TILES == 2 && (D_PAD == 96 || D_PAD == 128) && DV_PAD == D_PAD && PAGE_SIZE % BLOCK_N == 0;
constexpr int QK_STEPS = BLOCK_N / SUB_N * (D_PAD / STEP_D);  // MMA steps of Q K^T per tile
// Large tiles would spill if they were unrolled: their steps of SUB_N keys are a loop. 128 × 64 keys at D = 256 in
// steps of 16 are 4 … 7% faster than 64 × 32 unrolled.
constexpr bool LOOP_STEPS = BLOCK_N * D_PAD > 8192;
// FragmentOffsets with one register (ONE_REGISTER, mma_smem.cuh). As INTERLEAVE_LOADS, except on sm_80 with SUB_N = 48
// at D = 128, where NVRTC 13.5 then spills 20 bytes.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 800
constexpr bool COMPACT_OFFSETS = INTERLEAVE_LOADS && !(D_PAD == 128 && SUB_N == 48);
#else
constexpr bool COMPACT_OFFSETS = INTERLEAVE_LOADS;
#endif
using LaneOffsets = ForwardOffsets<QOffsets<D_PAD, COMPACT_OFFSETS>, FragmentOffsets<K_COLUMNS, COMPACT_OFFSETS>,
                                   FragmentOffsets<V_COLUMNS, COMPACT_OFFSETS>>;
constexpr unsigned Q_ROW_BYTES = QTile::ROW, O_ROW_BYTES = OTile::ROW;
constexpr unsigned QO_ROW_BYTES = Q_ROW_BYTES > O_ROW_BYTES ? Q_ROW_BYTES : O_ROW_BYTES;  // Q and O share memory
constexpr unsigned K_BYTES = BLOCK_N * KTile::ROW, STAGES_AT = BLOCK_M * QO_ROW_BYTES;
constexpr unsigned STAGE_BYTES = K_BYTES + BLOCK_N * VTile::ROW;
// Q stays in registers if the registers of Q, O and S are at most MAX_REGISTERS - OPTION_REGISTERS. These limits were
// found by trial with each architecture: with larger ones the compiler spills (`sandbox compile --sweep` lists spills).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ != 900
constexpr int MAX_REGISTERS = 180;
#else
constexpr int MAX_REGISTERS = M_TILES == 1 ? 208 : 180;  // D = 256: 8% faster than from shared memory
#endif
constexpr int OPTION_REGISTERS = Head::READS_TENSORS ? 60 : Head::HAS_SCORE_MOD ? 8 : 0;
constexpr bool Q_IN_REGISTERS = M_TILES * (D_PAD / 4 + DV_PAD / 2 + SUB_N / 2) <= MAX_REGISTERS - OPTION_REGISTERS;
static_assert(BLOCK_M == WARPS * WARP_ROWS && BLOCK_N % SUB_N == 0 && SUB_N % 16 == 0,
              "a tile consists of whole MMA steps");
static_assert(SMEM_BYTES == STAGES_AT + 2 * STAGE_BYTES, "spec and kernel disagree on shared memory");
static_assert(HEAD_DIM % (STEP_D / 2) == 0 && HEAD_DIM_V % (STEP_D / 2) == 0, "rows are copied in 16-byte chunks");
