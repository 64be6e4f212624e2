// A user's expressions in double, element by element: what the truth is computed with. Compiled by the host compiler alone.
#define REAL double
#include <tensor.cuh>
#include <score_mod.cuh>

static_assert(sizeof(Snippet) == SNIPPET_BYTES, "Snippet differs from sandbox/cpu/expressions.py");

// Row query_rows[blockIdx.x] of x (rows, keys): what x becomes, its derivative, and whether it is seen, in its place.
extern "C" __global__ void expressions(Snippet snippet, double* x, double* derivative, bool* seen, const int* query_rows,
                                       const int* key_cols, int keys, int b, int h, int Sq, int Sk) {
    const int i = query_rows[blockIdx.x];
    for (int n = 0; n < keys; ++n) {
        const long long at = 1ll * blockIdx.x * keys + n;
        const Dual y = snippet.new_score(Dual(x[at], 1.0), b, h, i, key_cols[n], Sq, Sk);
        x[at] = y.value, derivative[at] = y.derivative;
        seen[at] = snippet.new_mask(b, h, i, key_cols[n], Sq, Sk);
    }
}
