// What a score means: scale and mask today; bias, window, softcap and slopes would come here and nowhere else. Every
// kernel, forward and backward, sees scores through `sees` and `score`, and walks the tiles that the ranges bound.
#pragma once

// Passed by value to every kernel. Mirrored by Score in sandbox/launch/arguments.py.
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

    // As `sees`, of a row in a query tile that may reach beyond the last: for walks over query rows.
    __device__ __forceinline__ bool counts(int query_row, int key_col) const {
        return query_row < Sq && sees(query_row, key_col);
    }

    // P of a dot product, recomputed from its row's LSE; 0 when masked, unless the LSE is NaN.
    __device__ __forceinline__ float P(float dot, float lse, int query_row, int key_col) const {
        return expf(score(dot, query_row, key_col) - (lse == -INF ? 0.0f : lse));  // LSE of a row without keys: not NaN
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

    // Query rows before here see none of the keys from `key_col` on: where the backward's walk over query rows begins.
    __device__ __forceinline__ int query_start(int key_col) const { return CAUSAL ? max(0, key_col - diagonal) : 0; }

    // Query rows from here on see all of the keys before `key_end`, at most Sk.
    __device__ __forceinline__ int query_all(int key_end) const { return CAUSAL ? max(0, key_end - 1 - diagonal) : 0; }
};
static_assert(sizeof(Score) == 16, "Score differs from sandbox/launch/arguments.py");
