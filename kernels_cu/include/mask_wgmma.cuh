// Score modification, masking and dropout of a wgmma accumulator of BLOCK_N columns. mask.cuh defines which keys a row
// sees. Lane 4 g + q of a warp has rows g and g + 8 of 16, and columns 2q and 2q + 1 of every 8 (QueryRows).
#pragma once
#include "score_mod.cuh"
#include "softmax_rows.cuh"

constexpr int LOOKUP_BATCH = 8;  // scores per iteration of a mask lookup; with more, the addresses spill
static_assert(BLOCK_N / 2 % LOOKUP_BATCH == 0, "whole batches per tile");
static_assert(!Head::ELEMENT_MASK || BLOCK_N <= 128, "32 bits hold a thread's BLOCK_N / 4 scores of a row");

// One bit for each column of the accumulator that a thread has in a row (two of every 8), set for the columns before
// `end`, which is relative to the thread's first column.
__device__ __forceinline__ unsigned columns_before(int end) {
    const int count = end <= 0 ? 0 : end / 8 * 2 + min(end % 8, 2);
    return count < 32 ? ~(~0u << count) : ~0u;
}
// The same bits, for the visible columns of rows `row` and `row` + 8. The loop is not unrolled, so that the code of
// head.visible is not repeated for each score.
__device__ __forceinline__ void look_up_mask(unsigned (&visible_bits)[2], const Head& head, int row, int column) {
    visible_bits[0] = visible_bits[1] = 0;
#pragma unroll 1
    for (int first = 0; first < BLOCK_N / 4; first += LOOKUP_BATCH / 2) {
        unsigned batch[2] = {};
#pragma unroll
        for (int i = 0; i < LOOKUP_BATCH; ++i) {
            const ScoreIndex at = QueryRows::index(row, column + 4 * first, i);
            const unsigned visible = head.visible(at.query_row(), at.key_col());
            batch[QueryRows::row(i)] |= visible << (i / 4 * 2 + i % 2);
        }
        visible_bits[0] |= batch[0] << first, visible_bits[1] |= batch[1] << first;
    }
}
static_assert(!Head::HAS_ELEMENT_BITS || 2 * Head::MAP_M % BLOCK_M == 0,
              "the rows of a work tile must be in one pair of rows of the block map (block_map.cuh)");
constexpr int WORDS = (BLOCK_N + 31) / 32;
// Element bits (block_map.cuh) of the thread's two rows in a key tile, 32 keys per word; all ones if mask_allows_all.
struct ElementBits {
    unsigned words[2][WORDS];
    __device__ __forceinline__ void load(const Head& head, int row, int n0, bool mask_allows_all) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (mask_allows_all)
                for (unsigned& word : words[half]) word = ~0u;
            else head.element_bits<BLOCK_N>(words[half], row + 8 * half, n0);
        }
    }
    // Shifts the bits so that bit 0 is the thread's first column (`column` in the tile), and clears those outside of
    // begin .. end - 1, which are relative to the thread's first column.
    __device__ __forceinline__ void clip(int half, int column, int begin, int end) {
        const auto low_bits = [](int count) { return count <= 0 ? 0u : count < 32 ? ~(~0u << count) : ~0u; };
#pragma unroll
        for (int k = 0; k < WORDS; ++k)
            words[half][k] = words[half][k] >> column & low_bits(end - 32 * k) &
                             ~(Head::HAS_LEFT_BOUND ? low_bits(begin - 32 * k) : 0u);
    }
    // Whether accumulator S[i] is visible.
    __device__ __forceinline__ bool has(int i) const {
        return words[QueryRows::row(i)][i / 16] >> QueryRows::column(i % 16) & 1;
    }
};

// The raw scores of S (score_mod.cuh); without HAS_SCORE_MOD S already is the raw score. row, column: the thread's
// first element.
__device__ __forceinline__ void apply_score_mod(float (&S)[BLOCK_N / 2], const Head& head, int row, int column) {
#pragma unroll
    for (int i = 0; i < (Head::HAS_SCORE_MOD ? BLOCK_N / 2 : 0); ++i)
        S[i] = head.raw(S[i], QueryRows::index(row, column, i));
}

// Keys that the thread's rows, `row` and row + 8, see. keep: they are computed once per work tile; otherwise the ends
// are not opaque, and the compiler computes them again for each masked tile, which frees two registers.
struct RowKeyRanges {
    Range of_row[2];
    __device__ __forceinline__ RowKeyRanges(const Head& head, int row, bool keep = true)
        : of_row{head.keys(row, row + 1), head.keys(row + 8, row + 9)} {
        if (keep && Head::HAS_RIGHT_BOUND) of_row[0].end = opaque(of_row[0].end), of_row[1].end = opaque(of_row[1].end);
    }
};

// Sets masked scores to -INF. row: the thread's first one; n0: first key of the tile; fully_visible_keys: those that
// all rows of the warp see by lengths, causality and window; mask_allows_all: whether the mask tensor and mask_mod hide
// nothing in the tile. The tile needs no mask if all of its keys are in fully_visible_keys and
// mask_allows_all. element_bits: used with HAS_ELEMENT_BITS.
__device__ __forceinline__ void apply_mask(float (&S)[BLOCK_N / 2], const Head& head, int row, int n0, int q,
                                           const RowKeyRanges& row_keys, Range fully_visible_keys, bool mask_allows_all,
                                           ElementBits element_bits) {
    const int column = n0 + 2 * q;
    const bool at_begin = Head::HAS_LEFT_BOUND && fully_visible_keys.begin > n0,
               at_end = n0 + BLOCK_N > fully_visible_keys.end;
    if (!at_begin && !at_end && mask_allows_all) return;
    const Range(&visible)[2] = row_keys.of_row;
    const int end[2] = {visible[0].end - column, visible[1].end - column};
    const int begin[2] = {visible[0].begin - column, visible[1].begin - column};
    if (Head::HAS_ELEMENT_BITS) {
#pragma unroll
        for (int half = 0; half < 2; ++half) element_bits.clip(half, 2 * q, begin[half], end[half]);
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i)
            if (!element_bits.has(i)) S[i] = -INF;
    } else if (Head::ELEMENT_MASK) {
        unsigned visible_bits[2];
        if (mask_allows_all) {
            for (int half = 0; half < 2; ++half)
                visible_bits[half] = columns_before(end[half]) & ~columns_before(begin[half]);
        } else {
            look_up_mask(visible_bits, head, row, column);
        }
#pragma unroll
        for (int i = 0; i < BLOCK_N / 2; ++i)
            if (!(visible_bits[QueryRows::row(i)] >> (i / 4 * 2 + i % 2) & 1)) S[i] = -INF;
    } else {
        if (at_end) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                if (QueryRows::column(i) >= end[QueryRows::row(i)]) S[i] = -INF;
        }
        if (at_begin) {
#pragma unroll
            for (int i = 0; i < BLOCK_N / 2; ++i)
                if (QueryRows::column(i) < begin[QueryRows::row(i)]) S[i] = -INF;
        }
    }
}

// Sets the dropped elements of P to 0. first_row: first query row of the warp.
__device__ __forceinline__ void apply_dropout(unsigned (&P)[BLOCK_N / 16][4], const Head& head, int first_row, int n0) {
    Head::Kept kept[BLOCK_N / 16];
    head.keep_along_queries(kept, first_row, n0);
#pragma unroll
    for (int i = 0; i < BLOCK_N / 4; ++i) P[i / 4][i % 4] = kept[i / 4].apply(i % 4, P[i / 4][i % 4]);
}
