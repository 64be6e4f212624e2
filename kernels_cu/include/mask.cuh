// Masking: which scores are hidden, which tiles have a visible score, and which tiles need no mask.
//
// Lengths, causality and windows are ranges of keys per query row, computed without memory accesses. A mask tensor and
// mask_mod (the user's condition) are evaluated per (query, key); whether they hide a whole tile, or none of it, is in
// the block map (block_map.cuh), if there is one. Part of score_mod.cuh, included after seqlen.cuh. Kernels use these
// functions through their Head.
#pragma once

struct Range {
    int begin, end;
};

// The mask of head h of batch entry b.
struct Mask : SeqlenInfo {
    static constexpr bool HAS_LEFT_BOUND = WINDOW & 1;                   // the keys of a row have a lower bound
    static constexpr bool HAS_RIGHT_BOUND = CAUSAL || WINDOW & 2;        // the keys of a row have an upper bound
    static constexpr bool ELEMENT_MASK = MASK || Snippet::HAS_MASK_MOD;  // visibility is read or computed per element
    static constexpr bool HAS_MASK =
        HAS_LEFT_BOUND || HAS_RIGHT_BOUND || ELEMENT_MASK || KEY_LENGTHS;  // some score within Sq x Sk may be hidden

#if MASK
    const bool* mask;
#endif
#if BLOCK_MAP
    const unsigned* block_map;
#endif
#if SCORE_SNIPPET
    int h;
#endif

    __device__ __forceinline__ Mask(const SeqlenInfo& seqlen, int h) : SeqlenInfo(seqlen) {
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

    // The first and the last key of a query row according to window and causality; may be < 0 or >= Sk.
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

    // ---- elements

    // Whether lengths, causality and window leave key_col visible to query_row.
    __device__ __forceinline__ bool in_range(int query_row, int key_col) const {
        return key_col < Sk && (!HAS_RIGHT_BOUND || key_col <= last_key(query_row)) &&
               (!HAS_LEFT_BOUND || key_col >= first_key(query_row));
    }

    // Whether the mask tensor and mask_mod leave key_col visible to query_row. Requires query_row < Sq,
    // key_col < Sk.
    __device__ __forceinline__ bool mask_allows(int query_row, int key_col) const {
        bool allowed = true;
#if MASK
        allowed = mask[query_row * score.mask.stride_i + (MASK_SAME_FOR_KEYS ? 0 : key_col)];
#endif
#if SCORE_SNIPPET
        if (Snippet::HAS_MASK_MOD) allowed = allowed && score.snippet.new_mask(b, h, query_row, key_col, Sq, Sk);
#endif
        return allowed;
    }

    // Whether key_col is visible to query_row. The result for query_row >= Sq is unspecified: such rows are not stored.
    __device__ __forceinline__ bool visible(int query_row, int key_col) const {
        const bool reached = in_range(query_row, key_col);
        return ELEMENT_MASK ? reached && query_row < Sq && mask_allows(query_row, key_col) : reached;
    }

    // The same, and false for query_row >= Sq. Used where a sum over query rows includes rows of a partial tile.
    __device__ __forceinline__ bool visible_in_bounds(int query_row, int key_col) const {
        return query_row < Sq && visible(query_row, key_col);
    }

    // Visibility of COUNT consecutive keys of a query row, or with ALONG_KEYS = false of query rows of a key, from
    // (query_row, key_col) on: operator()(k) is that of the k-th. The constructor evaluates an element mask; ranges are
    // compared at each call.
    template <int COUNT, bool ALONG_KEYS>
    struct VisibleRun {
        static_assert(!ELEMENT_MASK || COUNT <= 64, "one bit per pair");
        const Mask& mask;
        int query_row, key_col;
        unsigned long long bits = 0;

        __device__ __forceinline__ VisibleRun(const Mask& mask, int query_row, int key_col)
            : mask(mask), query_row(query_row), key_col(key_col) {
            for (int k = 0; ELEMENT_MASK && k < COUNT; ++k)
                bits |= static_cast<unsigned long long>(
                            mask.visible_in_bounds(query_row + (ALONG_KEYS ? 0 : k), key_col + (ALONG_KEYS ? k : 0)))
                        << k;
        }
        __device__ __forceinline__ bool operator()(int k) const {
            if (ELEMENT_MASK) return bits >> k & 1;
            return ALONG_KEYS ? mask.visible(query_row, key_col + k) : mask.visible_in_bounds(query_row + k, key_col);
        }
    };
    template <int COUNT>
    __device__ __forceinline__ VisibleRun<COUNT, true> visible_keys(int query_row, int n0) const {
        return {*this, query_row, n0};
    }
    template <int COUNT>
    __device__ __forceinline__ VisibleRun<COUNT, false> visible_query_rows(int m0, int key_col) const {
        return {*this, m0, key_col};
    }

    // ---- ranges of keys for a tile of query rows, and of query rows for a tile of keys. Outside of `keys` and
    // `queries` no score of the tile is visible; in `fully_visible_…` every score is. A range is begin .. end - 1, and
    // empty if end <= begin. BY_MAP: the caller handles the element mask, by the block map or by element; otherwise an
    // element mask makes the fully visible range empty.

    // Keys for query rows m0 .. m1 - 1; m1 may exceed Sq.
    __device__ __forceinline__ Range keys(int m0, int m1) const {
        return {HAS_LEFT_BOUND ? max(0, first_key(m0)) : 0,
                HAS_RIGHT_BOUND ? min(Sk, last_key(min(m1, Sq) - 1) + 1) : Sk};
    }
    template <bool BY_MAP = false>
    __device__ __forceinline__ Range fully_visible_keys(int m0, int m1) const {
        if (ELEMENT_MASK && !BY_MAP) return {0, 0};
        return {HAS_LEFT_BOUND ? max(0, first_key(min(m1, Sq) - 1)) : 0,
                HAS_RIGHT_BOUND ? min(Sk, last_key(m0) + 1) : Sk};
    }

    // Query rows for keys n0 .. n1 - 1; n1 may exceed Sk.
    __device__ __forceinline__ Range queries(int n0, int n1) const {
        if (KEY_LENGTHS && n0 >= Sk) return {0, 0};
        return {HAS_RIGHT_BOUND ? max(0, n0 - last_key(0)) : 0,
                HAS_LEFT_BOUND ? min(Sq, min(n1, Sk) - first_key(0)) : Sq};
    }
    template <bool BY_MAP = false>
    __device__ __forceinline__ Range fully_visible_queries(int n0, int n1) const {
        if ((ELEMENT_MASK && !BY_MAP) || n1 > Sk) return {Sq, 0};
        return {HAS_RIGHT_BOUND ? max(0, n1 - 1 - last_key(0)) : 0,
                HAS_LEFT_BOUND ? min(Sq, n0 - first_key(0) + 1) : Sq};
    }

    // Query rows for key j.
    __device__ __forceinline__ Range visible_queries(int j) const { return j < Sk ? queries(j, j + 1) : Range{0, 0}; }

#include "block_map.cuh"  // members: which tiles a mask tensor or mask_mod hides
};
