// The expressions of a Score in double precision, element by element, for the reference. Compiled by the host compiler
// only.
#define REAL double
#include <tensor.cuh>
#include <score_mod.cuh>

static_assert(sizeof(Snippet) == SNIPPET_BYTES, "Snippet differs from sandbox/cpu/expressions.py");

// Row blockIdx.x of x (rows, keys): replaces x by the new score; writes its derivative and whether the mask keeps it.
extern "C" __global__ void expressions(Snippet snippet, double* x, double* derivative, bool* visible,
                                       const int* query_rows, const int* key_cols, int keys, int b, int h, int Sq,
                                       int Sk) {
    const int i = query_rows[blockIdx.x];
    for (int n = 0; n < keys; ++n) {
        const long long index = 1ll * blockIdx.x * keys + n;
        const Dual y = snippet.new_score(Dual(x[index], 1.0), b, h, i, key_cols[n], Sq, Sk);
        x[index] = y.value, derivative[index] = y.derivative;
        visible[index] = snippet.new_mask(b, h, i, key_cols[n], Sq, Sk);
    }
}
