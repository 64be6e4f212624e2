// Which keys a query row sees, which tiles that leaves, and which of these are seen whole: lengths, causality and windows tell it
// by ranges; a mask and a user's condition pair by pair, and of tiles by the block map.
// A part of score_mod.cuh, after seqlen.cuh; kernels ask their Head.
#pragma once

struct Range {
    int begin, end;
};

// Of head h of batch entry b.
struct Mask : SeqlenInfo {
    static constexpr bool FIRST = WINDOW & 1, LAST = CAUSAL || WINDOW & 2;  // a row's keys have a first, a last one
    static constexpr bool ELEMENT_MASK = MASK || Snippet::HIDES;               // what is seen has to be looked up
    static constexpr bool HIDES = FIRST || LAST || ELEMENT_MASK || KEY_LENGTHS;  // some key within Sk, from some row

#if MASK
    const bool* mask;
#endif
#if BLOCK_MAP
    const unsigned* block_map;
#endif
#if SCORE_SNIPPET
    int h;
#endif

    __device__ __forceinline__ Mask(const SeqlenInfo& sequence, int h) : SeqlenInfo(sequence) {
#if MASK
        mask = score.mask.head(b, h);
#endif
#if BLOCK_MAP
        block_map = score.block_map.head(b, h);
#endif
#if SCORE_SNIPPET
        this->h = h;
#endif
    }

    __device__ __forceinline__ int first_key(int query_row) const {
#if WINDOW & 1
        return query_row + diagonal - score.left;
#else
        return 0;
#endif
    }
    __device__ __forceinline__ int last_key(int query_row) const {
#if WINDOW & 2
        return query_row + diagonal + score.right;
#else
        return query_row + diagonal;
#endif
    }

    // Whether query row i may look at key j, as far as lengths, causality and window go.
    __device__ __forceinline__ bool in_range(int query_row, int key_col) const {
        return key_col < Sk && (!LAST || key_col <= last_key(query_row)) && (!FIRST || key_col >= first_key(query_row));
    }

    // Whether mask and the user's own condition let query row i look at key j; both must exist.
    __device__ __forceinline__ bool mask_allows(int query_row, int key_col) const {
        bool seen = true;
#if MASK
        seen = mask[query_row * score.mask.stride_i + (MASK & 4 ? 0 : key_col)];
#endif
#if SCORE_SNIPPET
        if (Snippet::HIDES) seen = seen && score.snippet.new_mask(b, h, query_row, key_col, Sq, Sk);
#endif
        return seen;
    }

    // Whether query row i may look at key j. Of a row from Sq on: as a row that there is, or not at all.
    __device__ __forceinline__ bool visible(int query_row, int key_col) const {
        const bool reached = in_range(query_row, key_col);
        return ELEMENT_MASK ? reached && query_row < Sq && mask_allows(query_row, key_col) : reached;
    }

    // As `sees`, of a row in a query tile that may reach beyond the last: for walks over query rows.
    __device__ __forceinline__ bool visible_in_bounds(int query_row, int key_col) const {
        return query_row < Sq && visible(query_row, key_col);
    }

    // `visible_in_bounds` of a row, or a key, and others that follow one another, up to 64: a bit each, where it takes a look into memory.
    template <int COUNT>
    __device__ __forceinline__ unsigned long long visible_bits(int query_row, int key_col, bool along_keys) const {
        static_assert(!ELEMENT_MASK || COUNT <= 64, "a bit for each pair");
        unsigned long long bits = 0;
        for (int k = 0; ELEMENT_MASK && k < COUNT; ++k)
            bits |= static_cast<unsigned long long>(visible_in_bounds(query_row + (along_keys ? 0 : k), key_col + (along_keys ? k : 0))) << k;
        return bits;
    }

    // ---- which tiles: ranges of what some row or key sees, and of what all of them see. `end` may be less than `begin`.
    // BY_MAP: of what all of them see where the block map tells nothing else.

    // Of the keys, for query rows m0 .. m1. m1 may exceed Sq.
    __device__ __forceinline__ Range keys(int m0, int m1) const {
        return {FIRST ? max(0, first_key(m0)) : 0, LAST ? min(Sk, last_key(min(m1, Sq) - 1) + 1) : Sk};
    }
    template <bool BY_MAP = false>
    __device__ __forceinline__ Range fully_visible_keys(int m0, int m1) const {
        if (ELEMENT_MASK && !BY_MAP) return {0, 0};
        return {FIRST ? max(0, first_key(min(m1, Sq) - 1)) : 0, LAST ? min(Sk, last_key(m0) + 1) : Sk};
    }

    // Of the query rows, for keys n0 .. n1, of which those from Sk on do not count.
    __device__ __forceinline__ Range queries(int n0, int n1) const {
        if (KEY_LENGTHS && n0 >= Sk) return {0, 0};
        return {LAST ? max(0, n0 - last_key(0)) : 0, FIRST ? min(Sq, min(n1, Sk) - first_key(0)) : Sq};
    }
    template <bool BY_MAP = false>
    __device__ __forceinline__ Range fully_visible_queries(int n0, int n1) const {
        if ((ELEMENT_MASK && !BY_MAP) || n1 > Sk) return {Sq, 0};
        return {LAST ? max(0, n1 - 1 - last_key(0)) : 0, FIRST ? min(Sq, n0 - first_key(0) + 1) : Sq};
    }

    // Of the query rows, those that reach key j.
    __device__ __forceinline__ Range visible_queries(int j) const { return j < Sk ? queries(j, j + 1) : Range{0, 0}; }

#include "block_map.cuh"  // which tiles mask and condition leave
};
