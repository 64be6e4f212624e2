// Appends rows of K and V to a cache, one warp per row and head.
//
//   row i of sequence b  ->  key j = key_lengths[b] + i  ->  row j % page_rows of page block_table[b][j / page_rows]
//
// The rows of a sequence are an entry of k_new and v_new, or with cu_seqlens (offsets > 0) consecutive rows of entry 0.
// Without block_table (table_rows = 0) sequence b is page b. Rows beyond the table, and rows whose page does not
// exist, are not written; with CHECKED they are errors.
#include <ptx.cuh>
#include "element.cuh"
#include "view.cuh"
#if PAGES_E4M3 || PAGES_E5M2
#include <cuda_fp8.h>
#endif

#if PAGES_E4M3
#define append_kv append_kv_e4m3
using page_t = __nv_fp8_e4m3;
#elif PAGES_E5M2
#define append_kv append_kv_e5m2
using page_t = __nv_fp8_e5m2;
#else
using page_t = dtype;
#endif

// A row of k_new and v_new: row i of sequence b; b < 0: none.
struct NewRow {
    int b, i;
};

// Row `row` of entry 0, given the first row of each sequence and the end of the last one.
__device__ __forceinline__ NewRow row_of(const int* cu_seqlens, int sequences, int rows, int row) {
    if (CHECKED) {
        require(cu_seqlens[0] == 0, "cu_seqlens does not begin with 0");
        for (int b = 0; b < sequences; ++b) require(cu_seqlens[b] <= cu_seqlens[b + 1], "cu_seqlens decreases");
        require(cu_seqlens[sequences] <= rows, "cu_seqlens ends beyond the last row of k_new");
    }
    int b = 0, end = sequences;
    while (end - b > 1) {
        const int middle = (b + end) / 2;
        if (cu_seqlens[middle] <= row) b = middle;
        else end = middle;
    }
    return cu_seqlens[b] <= row && row < cu_seqlens[b + 1] ? NewRow{b, row - cu_seqlens[b]} : NewRow{-1, 0};
}

__device__ __forceinline__ void copy_row(page_t* to, const dtype* from, int columns) {
    for (int d = threadIdx.x % 32; d < columns; d += 32) to[d] = page_t(to_float(from[d]));
}

extern "C" __global__ __launch_bounds__(32 * WARPS) void append_kv(
    const __grid_constant__ View<const dtype> k_new,  // (N, Hk, n, D)
    const __grid_constant__ View<const dtype> v_new,  // (N, Hk, n, Dv)
    const int* block_table,                           // (table_rows, max_pages)
    const int* key_lengths,                           // (B), before the call
    const int* cu_seqlens,                            // (offsets)
    const __grid_constant__ View<page_t> k_pages,     // (pages, Hk, page_rows, D)
    const __grid_constant__ View<page_t> v_pages,     // (pages, Hk, page_rows, Dv)
    int N, int n, int B, int offsets, int table_rows, int max_pages, int pages, int page_rows, int D, int Dv) {
    const int row = blockIdx.x * WARPS + threadIdx.x / 32, h = blockIdx.y;
    if (row >= N * n) return;
    const NewRow place = offsets ? row_of(cu_seqlens, B, n, row) : NewRow{row / n, row % n};
    if (place.b < 0) return;

    const long long key = max(key_lengths[place.b], 0) + static_cast<long long>(place.i);
    const bool fits = key < (table_rows ? static_cast<long long>(max_pages) * page_rows : page_rows);
    if (CHECKED)
        require(fits, "key_lengths and the new rows need more keys than block_table, or the cache, has room for");
    if (!fits) return;
    const int page = table_rows ? block_table[static_cast<long long>(place.b) * max_pages + key / page_rows] : place.b;
    const bool exists = 0 <= page && page < pages;
    if (CHECKED) require(exists, "block_table has a page that does not exist");
    if (!exists) return;
    const int entry = offsets ? 0 : place.b, entry_row = offsets ? row : place.i;
    copy_row(k_pages.row(page, h, key % page_rows), k_new.row(entry, h, entry_row), D);
    copy_row(v_pages.row(page, h, key % page_rows), v_new.row(entry, h, entry_row), Dv);
}
