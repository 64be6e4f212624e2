// Lengths and row addresses of a batch entry. With these, most code does not depend on whether a batch is dense,
// shortened (key_lengths), ragged or paged. Exceptions: the order of work tiles, tensor maps (tma.cuh) and the loads of
// pages (fwd_load.cuh).
//
// clang-format off
//   const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);   batch entry and first row of a tile
//   if (RAGGED && tile.invalid()) return;
//   const Head head(score, tile.b, h);                                         head.Sq, head.Sk, head.query(Q, h, i)
// clang-format on
//
// A ragged batch is stored in tensors (1, heads, total rows, columns): sequence b is rows cu_seqlens[b] ..
// cu_seqlens[b + 1] - 1 (cu_seqlens.cuh).
//
// A paged batch stores keys in pages of PAGE_SIZE rows, tensors (pages, heads, PAGE_SIZE, columns): key j of batch
// entry b is row j % PAGE_SIZE of page block_table[b][j / PAGE_SIZE]. Only the entries of block_table whose pages
// have keys before key_lengths[b] are read. The queries of a paged batch may be dense or ragged.
//
// Invalid lengths and pages are clamped to the bounds of the tensors; with CHECKED they are reported.
// Part of score_mod.cuh, included after struct Score.
#pragma once

#include "cu_seqlens.cuh"

#define RAGGED_KEYS (RAGGED && !PAGE_SIZE)  // keys are stored one sequence after the other, like queries

#if RAGGED
__device__ __forceinline__ Offsets query_offsets(const Score& score) {
    return {score.cu_seqlens_q, score.cu_seqlens_q_stride_b, score.sequences, score.rows_q, score.Sq};
}
#endif
#if RAGGED_KEYS
__device__ __forceinline__ Offsets key_offsets(const Score& score) {
    return {score.cu_seqlens_k, score.cu_seqlens_k_stride_b, score.sequences, score.rows_k, score.Sk};
}
#endif

// Batch size: `dense`, or the number of sequences of a ragged batch.
__device__ __forceinline__ int batch_size(const Score& score, int dense) {
#if RAGGED
    return score.sequences;
#else
    return dense;
#endif
}

// Tile x of ROWS query rows, or key rows. x counts the tiles of batch entry b, or those of all sequences of a ragged
// batch.
template <int ROWS>
__device__ __forceinline__ RowTile query_tile(const Score& score, unsigned x, int b, int qhead_per_khead = 1) {
#if RAGGED
    return query_offsets(score).template tile<ROWS>(x, qhead_per_khead);
#else
    return {b, static_cast<int>(x * ROWS)};
#endif
}
template <int ROWS>
__device__ __forceinline__ RowTile query_tile_by_warp(const Score& score, unsigned x, int b) {
#if RAGGED
    return query_offsets(score).template tile_by_warp<ROWS>(x);
#else
    return query_tile<ROWS>(score, x, b);
#endif
}
template <int ROWS>
__device__ __forceinline__ RowTile key_tile(const Score& score, unsigned x, int b) {
#if RAGGED_KEYS
    return key_offsets(score).template tile<ROWS>(x);
#else
    return {b, static_cast<int>(x * ROWS)};
#endif
}

// Query rows per head in LSE and delta.
__device__ __forceinline__ int query_rows(const Score& score) {
#if RAGGED
    return score.rows_q;
#else
    return score.Sq;
#endif
}

// Tiles of ROWS query rows per head in the grid; an upper bound for a ragged batch.
template <int ROWS>
__device__ __forceinline__ unsigned query_tiles(const Score& score) {
#if RAGGED
    return query_offsets(score).template tiles<ROWS>();
#else
    return (score.Sq + ROWS - 1u) / ROWS;
#endif
}

#if RAGGED
// Offsets and lengths of a sequence, as read by the constructor of SeqlenInfo. all_keys: its rows of K, of which Sk are
// valid. With pages there is no first key.
struct SequenceExtent {
    int first_query, Sq, first_key, all_keys, Sk;
};
#endif

// A key's address in K and V: a batch entry or page, and the row in it. The keys of a page are in consecutive rows.
struct KeyAddress {
    int batch_or_page;
    long long row;
};

#if PAGE_SIZE
template <class T>
struct PagedView;
template <class T>
struct PagedRows;
template <class T>
using KeyRows = PagedRows<T>;
#else
template <class T>
using KeyRows = DenseRows<T>;
#endif

// Batch entry b: its lengths, and the addresses of its rows.
struct SeqlenInfo {
    const Score& score;
    int b;
    int Sq, Sk;    // queries and valid keys
    int diagonal;  // key i + diagonal is on the diagonal of query i
#if RAGGED
    int first_query;
#endif
#if RAGGED_KEYS
    int first_key, all_keys;
#endif

#if RAGGED
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b) : score(score), b(b) {
        const Offsets queries = query_offsets(score);
        if (CHECKED) queries.check();
        first_query = queries.begin(b), Sq = queries.length(b);
#if RAGGED_KEYS
        const Offsets keys = key_offsets(score);
        if (CHECKED) keys.check();
        first_key = keys.begin(b), Sk = all_keys = keys.length(b);
#else
        Sk = score.Sk;
#endif
#if KEY_LENGTHS
        Sk = min(max(score.key_lengths[b * score.key_lengths_stride_b], 0), Sk);
#endif
        diagonal = score.bottom_right ? Sk - Sq : 0;
#if PAGE_SIZE
        if (CHECKED) check_pages();
#endif
    }
#else
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b)
        : score(score), b(b), Sq(score.Sq), Sk(score.Sk), diagonal(score.diagonal) {
#if KEY_LENGTHS
        Sk = min(max(score.key_lengths[b * score.key_lengths_stride_b], 0), score.Sk);
        if (score.bottom_right) diagonal = Sk - Sq;
#endif
#if PAGE_SIZE
        if (CHECKED) check_pages();
#endif
    }
#endif
#if RAGGED_KEYS
    // From offsets that were read before.
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b, SequenceExtent extent)
        : score(score), b(b), Sq(extent.Sq), Sk(extent.Sk), diagonal(score.bottom_right ? extent.Sk - extent.Sq : 0),
          first_query(extent.first_query), first_key(extent.first_key), all_keys(extent.all_keys) {}
    __device__ __forceinline__ SequenceExtent extent() const { return {first_query, Sq, first_key, all_keys, Sk}; }
#elif RAGGED
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b, SequenceExtent extent)
        : score(score), b(b), Sq(extent.Sq), Sk(extent.Sk), diagonal(score.bottom_right ? extent.Sk - extent.Sq : 0),
          first_query(extent.first_query) {}
    __device__ __forceinline__ SequenceExtent extent() const { return {first_query, Sq, 0, Sk, Sk}; }
#endif

    // ---- queries

#if RAGGED
    // The address of query row i in head h of a tensor.
    template <class T>
    __device__ __forceinline__ T* query(const View<T>& tensor, int h, long long i) const {
        return tensor.row(0, h, first_query + i);
    }
    // Advances views so that row(b, h, i) is query i of this sequence.
    template <class... T>
    __device__ __forceinline__ void offset_queries(View<T>&... tensors) const {
        ((tensors.data += first_query * tensors.stride_s, tensors.stride_b = 0), ...);
    }
    // Offset of query row 0 in LSE and delta, given the index of the head in these tensors (WorkTile::batch_head), or
    // head h of H of this batch entry.
    __device__ __forceinline__ long long lse_offset(long long batch_head) const {
        return batch_head * score.rows_q + first_query;
    }
    template <class Int>
    __device__ __forceinline__ long long lse_offset(Int /*H*/, int h) const {
        return lse_offset(h);
    }
    // Index of the first query tile of this batch entry in head h of H, among the query tiles of all heads in the grid.
    template <int ROWS>
    __device__ __forceinline__ long long first_tile(int, int h) const {
        return static_cast<long long>(h) * query_offsets(score).template tiles<ROWS>() + first_query / ROWS + b;
    }
    // TMA coordinates s and b of a box that begins at query row i, or key j. Here b is the row at which the sequence
    // ends, and s is relative to it: rows of the box beyond the end are outside of the tensor map, so that a load fills
    // them with zeros and a store skips them (TensorMap in tma.cuh).
    __device__ __forceinline__ int tma_query_row(int i) const { return i - Sq; }
    __device__ __forceinline__ int tma_query_batch(int) const { return first_query + Sq; }
#else
    template <class T>
    __device__ __forceinline__ T* query(const View<T>& tensor, int h, long long i) const {
        return tensor.row(b, h, i);
    }
    template <class... T>
    __device__ __forceinline__ void offset_queries(View<T>&...) const {}
    __device__ __forceinline__ long long lse_offset(long long batch_head) const { return batch_head * score.Sq; }
    template <class Int>
    __device__ __forceinline__ long long lse_offset(Int H, int h) const {
        return lse_offset(static_cast<long long>(b) * H + h);
    }
    template <int ROWS>
    __device__ __forceinline__ long long first_tile(int H, int h) const {
        return (static_cast<long long>(b) * H + h) * query_tiles<ROWS>(score);
    }
    __device__ __forceinline__ int tma_query_row(int i) const { return i; }
    __device__ __forceinline__ int tma_query_batch(int b) const { return b; }
#endif

    // ---- keys
    //
    // key: the address of key j in head h of a tensor; key_address: its KeyAddress (without the head); rows_of_keys:
    // all rows of the head; key_view: a view whose row (b, h, j) is key j (in a ragged batch: after offset_keys).

#if PAGE_SIZE
    __device__ __forceinline__ int page(int j) const {
        return score.block_table[b * score.block_table_stride_b + j / PAGE_SIZE * score.block_table_stride_i];
    }
    // page: result of page(j).
    __device__ __forceinline__ KeyAddress key_address(int j, int page) const {
        if (CHECKED) check_page(j);
        return {min(max(page, 0), score.pages - 1), j % PAGE_SIZE};
    }
    __device__ __forceinline__ KeyAddress key_address(int j) const { return key_address(j, page(j)); }
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const {
        const KeyAddress address = key_address(static_cast<int>(j));
        return tensor.row(address.batch_or_page, h, address.row);
    }
    // TMA coordinates (s, b) of a box of ROWS keys from key j on; the keys are in one page. As in a ragged batch
    // (tma_query_row above), b is the row at which the valid keys of the box end, and s is relative to it; rows are
    // counted over all pages. Keys from Sk on are therefore outside of the map.
    template <int ROWS>
    __device__ __forceinline__ int2 tma_page_coords(int j) const {
        if (j >= Sk) return {0, 0};
        return tma_page_coords<ROWS>(j, key_address(j));
    }
    // The same if the address of key j is known.
    template <int ROWS>
    __device__ __forceinline__ int2 tma_page_coords(int j, const KeyAddress& address) const {
        if (j >= Sk) return {0, 0};
        const int keys = min(Sk - j, ROWS);
        return {-keys, address.batch_or_page * PAGE_SIZE + static_cast<int>(address.row) + keys};
    }
    template <class T>
    __device__ __forceinline__ KeyRows<T> rows_of_keys(const View<T>& tensor, int h) const {
        return {tensor, *this, h};
    }
    template <class T>
    __device__ __forceinline__ PagedView<T> key_view(const View<T>& tensor) const {
        return {tensor, *this};
    }
    __device__ __forceinline__ int key_rows() const { return score.Sk; }
    template <class... T>
    __device__ __forceinline__ void offset_keys(View<T>&...) const {}
    // Checks key_lengths[b], and in thread 0 all pages of the batch entry. In a ragged batch of fwd_wgmma, thread 0
    // does not call this: key_address checks each page that is read.
    __device__ __forceinline__ void check_pages() const {
        require(score.key_lengths[b * score.key_lengths_stride_b] <= score.Sk,
                "key_lengths has more keys than block_table has pages for");
        for (int j = 0; threadIdx.x == 0 && j < Sk; j += PAGE_SIZE) check_page(j);
    }
    __device__ __forceinline__ void check_page(int j) const {
        if (0 <= j && j < Sk)
            require(0 <= page(j) && page(j) < score.pages, "block_table has a page that does not exist");
    }
#else
#if RAGGED
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const {
        return tensor.row(0, h, first_key + j);
    }
    __device__ __forceinline__ int page(int) const { return 0; }
    __device__ __forceinline__ KeyAddress key_address(int j, int = 0) const {
        return {0, static_cast<long long>(first_key) + j};
    }
    __device__ __forceinline__ int key_rows() const { return all_keys; }  // of K, V, dK and dV; Sk of them are valid
    // Advances views so that row(b, h, j) is key j of this sequence.
    template <class... T>
    __device__ __forceinline__ void offset_keys(View<T>&... tensors) const {
        ((tensors.data += first_key * tensors.stride_s, tensors.stride_b = 0), ...);
    }
    __device__ __forceinline__ int tma_key_row(int j) const { return j - Sk; }
    __device__ __forceinline__ int tma_key_batch(int) const { return first_key + Sk; }
    // The same for dK and dV, where rows beyond key_lengths are written, too.
    __device__ __forceinline__ int tma_dKV_row(int j) const { return j - all_keys; }
    __device__ __forceinline__ int tma_dKV_batch(int) const { return first_key + all_keys; }
#else
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const {
        return tensor.row(b, h, j);
    }
    __device__ __forceinline__ int page(int) const { return 0; }
    __device__ __forceinline__ KeyAddress key_address(int j, int = 0) const { return {b, j}; }
    __device__ __forceinline__ int key_rows() const { return score.Sk; }
    template <class... T>
    __device__ __forceinline__ void offset_keys(View<T>&...) const {}
    __device__ __forceinline__ int tma_key_row(int j) const { return j; }
    __device__ __forceinline__ int tma_key_batch(int b) const { return b; }
    __device__ __forceinline__ int tma_dKV_row(int j) const { return j; }
    __device__ __forceinline__ int tma_dKV_batch(int b) const { return b; }
#endif
    template <class T>
    __device__ __forceinline__ KeyRows<T> rows_of_keys(const View<T>& tensor, int h) const {
        return {tensor, key(tensor, h, 0)};
    }
    template <class T>
    __device__ __forceinline__ View<T> key_view(View<T> tensor) const {
        return tensor;
    }
#endif
};

#if PAGE_SIZE
#include "paged_keys.cuh"
#endif
