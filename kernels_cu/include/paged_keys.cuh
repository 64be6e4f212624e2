// Keys in pages, as arguments of the functions that load tiles (tensor.cuh, mma_smem.cuh). Included by seqlen.cuh,
// after SeqlenInfo, if PAGE_SIZE is set.
#pragma once

// View (view.cuh) for keys in pages: row s is key s, and a row beyond the last key has the address of the last one.
// At least one key is required.
template <class T>
struct PagedView {
    const View<T>& tensor;
    const SeqlenInfo& seqlen;

    struct Step {
        const PagedView& view;
        int h, s, rows;
    };
    __device__ __forceinline__ T* row(int, int h, int s) const { return seqlen.key(tensor, h, min(s, seqlen.Sk - 1)); }
    __device__ __forceinline__ Step step(int, int h, int s, int rows) const { return {*this, h, s, rows}; }
    static __device__ __forceinline__ void advance(T*& at, Step& step) {
        const long long column = at - step.view.row(0, step.h, step.s);
        at = step.view.row(0, step.h, step.s += step.rows) + column;
    }
    __device__ __forceinline__ bool aligned(int, int, unsigned bytes) const {
        const long long strides = tensor.stride_b | tensor.stride_h | tensor.stride_s;
        return (reinterpret_cast<unsigned long long>(tensor.data) | strides * sizeof(T)) % bytes == 0;
    }
};

// DenseRows (tensor.cuh) for keys in pages.
template <class T>
struct PagedRows {
    const View<T>& tensor;
    const SeqlenInfo& seqlen;
    int h;

    template <int ROWS>
    static constexpr bool adjacent() {
        return PAGE_SIZE % ROWS == 0;
    }
    __device__ __forceinline__ T* first_row(int n0) const { return (*this)(n0)-n0 * tensor.stride_s; }
    __device__ __forceinline__ T* operator()(int j) const { return PagedView<T>{tensor, seqlen}.row(0, h, j); }
};
