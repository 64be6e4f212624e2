// What a score means: scale and mask today; bias, window, softcap and slopes would come here and nowhere else. Every
// kernel, forward and backward, sees scores through `sees` and `score`, and walks the key tiles that `key_end` bounds.
#pragma once

// Passed by value to every kernel. Mirrored by Score in sandbox/arguments.py.
struct Score {
    int Sq, Sk;
    int diagonal;  // causal: query i sees keys j <= i + diagonal (Sk - Sq: bottom-right, 0: top-left)
    float scale;

    // Whether query row i may look at key j.
    __device__ __forceinline__ bool sees(int query_row, int key_col) const {
        return key_col < Sk && (!CAUSAL || key_col <= query_row + diagonal);
    }

    // The score of a dot product q_i . k_j; -INF when masked, whatever NaN the dot product holds.
    __device__ __forceinline__ float score(float dot, int query_row, int key_col) const {
        return sees(query_row, key_col) ? dot * scale : -INF;
    }

    // Keys from here on are seen by none of the query rows before `query_end`.
    __device__ __forceinline__ int key_end(int query_end) const {
        if (!CAUSAL) return Sk;
        const int last_row = min(query_end, Sq) - 1;
        return min(Sk, last_row + diagonal + 1);
    }

    // Keys before here are seen by all of the query rows from `query_row` on.
    __device__ __forceinline__ int key_all(int query_row) const {
        return CAUSAL ? min(Sk, query_row + diagonal + 1) : Sk;
    }
};
static_assert(sizeof(Score) == 16, "Score differs from sandbox/arguments.py");
