// Where the rows of a batch entry lie, and how many there are: dense, shortened (key_lengths), ragged and paged batches differ
// in this alone. A kernel asks for its tile and its sequence, and goes on as if there were no other:
//
//   const RowTile tile = query_tile<BLOCK_M>(score, blockIdx.x, blockIdx.z);   which batch entry, which rows of it
//   if (RAGGED && tile.surplus()) return;
//   const Head head(score, tile.b, h);                                         head.Sq, head.Sk, head.query(Q, h, i)
//
// The sequences of a ragged batch lie one after the other in tensors of one batch entry, (1, heads, rows, columns): sequence b
// is rows cu_seqlens[b] .. cu_seqlens[b + 1]. Nobody on the host knows these, so that a grid has as many tiles as there may be:
// sequence b has the tiles of numbers cu_seqlens[b] / ROWS + b and on, which is at least as many as it needs, and what a
// sequence leaves over is surplus. A tile finds its sequence by bisection, and no block waits for another.
//
// The keys of a paged batch lie in pages of PAGE_SIZE rows, in tensors (pages, heads, PAGE_SIZE, columns): key j of batch entry b
// is row j % PAGE_SIZE of page block_table[b][j / PAGE_SIZE]. Only pages of keys that count are looked up.
//
// Lengths and pages that make no sense are cut to what lies inside of the tensors; the CPU backend reports them.
// A part of score_mod.cuh, after struct Score.
#pragma once

struct RowTile {  // of rows of one sequence
    int b, row0;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

#if RAGGED
// One of the two lists of where sequences begin, and what there is of them.
// `packed`: so many query heads are rows of one tile, each query's one after the other.
struct Offsets {
    const int* cu_seqlens;  // (count + 1,)
    long long stride;
    int count, rows, most;  // rows of the tensors, rows of a sequence at most

    // The first row of sequence b; of b = count one past the last one's.
    __device__ __forceinline__ int begin(int b) const { return min(max(cu_seqlens[b * stride], 0), rows); }
    __device__ __forceinline__ int length(int b) const { return min(max(begin(b + 1) - begin(b), 0), most); }

    template <int ROWS>
    __device__ __forceinline__ int first_tile(int b, int packed = 1) const { return begin(b) * packed / ROWS + b; }
    template <int ROWS>
    __device__ __forceinline__ int tiles() const { return rows / ROWS + count; }  // of the grid

    template <int ROWS>
    __device__ __forceinline__ RowTile tile(int number, int packed = 1) const {
        if (CHECKED) check();
        int b = 0, end = count;
        while (end - b > 1) {
            const int middle = (b + end) / 2;
            if (first_tile<ROWS>(middle, packed) <= number) b = middle;
            else end = middle;
        }
        return tile_of<ROWS>(b, number, packed);
    }
    // The same, by all lanes of a warp: 32 sequences at a time, where bisection waits for memory once for each of its steps.
    template <int ROWS>
    __device__ __forceinline__ RowTile tile_by_warp(int number) const {
        if (CHECKED) check();
        int b = 0;
        for (int b0 = 0; b0 < count; b0 += 32) {
            const int own = b0 + threadIdx.x % 32;
            const unsigned begun = __ballot_sync(0xffffffffu, own < count && first_tile<ROWS>(own) <= number);
            if (begun) b = b0 + 31 - __clz(begun);
            if (begun != 0xffffffffu) break;
        }
        return tile_of<ROWS>(b, number);
    }
    template <int ROWS>
    __device__ __forceinline__ RowTile tile_of(int b, int number, int packed = 1) const {
        const int own = number - first_tile<ROWS>(b, packed), row0 = own * ROWS;
        return own >= 0 && row0 < length(b) * packed ? RowTile{b, row0} : RowTile{-1, 0};
    }

    __device__ __forceinline__ void check() const {
        require(cu_seqlens[0] == 0, "cu_seqlens does not begin with 0");
        for (int b = 0; b < count; ++b)
            require(cu_seqlens[b * stride] <= cu_seqlens[(b + 1) * stride], "cu_seqlens falls");
        require(cu_seqlens[count * stride] <= rows, "cu_seqlens ends beyond the rows that there are");
        for (int b = 0; b < count; ++b)  // such rows would not be written, such keys not be seen
            require(cu_seqlens[(b + 1) * stride] - cu_seqlens[b * stride] <= most, "a sequence is longer than max_seqlen");
    }
};

__device__ __forceinline__ Offsets query_offsets(const Score& score) {
    return {score.cu_seqlens_q, score.cu_seqlens_q_stride_b, score.sequences, score.rows_q, score.Sq};
}
__device__ __forceinline__ Offsets key_offsets(const Score& score) {
    return {score.cu_seqlens_k, score.cu_seqlens_k_stride_b, score.sequences, score.rows_k, score.Sk};
}
#endif

// How many batch entries there are: `dense`, or sequences.
__device__ __forceinline__ int batch_size(const Score& score, int dense) {
#if RAGGED
    return score.sequences;
#else
    return dense;
#endif
}

// The tile of ROWS query rows, or key rows, that is number x of all of a ragged batch, or of those of batch entry b.
template <int ROWS>
__device__ __forceinline__ RowTile query_tile(const Score& score, unsigned x, int b, int packed = 1) {
#if RAGGED
    return query_offsets(score).template tile<ROWS>(x, packed);
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
#if RAGGED
    return key_offsets(score).template tile<ROWS>(x);
#else
    return {b, static_cast<int>(x * ROWS)};
#endif
}

// How many query rows a head has in LSE and delta.
__device__ __forceinline__ int query_rows(const Score& score) {
#if RAGGED
    return score.rows_q;
#else
    return score.Sq;
#endif
}

// How many tiles of ROWS query rows a head has, of a ragged batch at most.
template <int ROWS>
__device__ __forceinline__ unsigned query_tiles(const Score& score) {
#if RAGGED
    return query_offsets(score).template tiles<ROWS>();
#else
    return (score.Sq + ROWS - 1u) / ROWS;
#endif
}

#if RAGGED
struct SeqlenOffsets {  // where a sequence lies, as its `Sequence` found it
    int first_query, Sq, first_key, all_keys, Sk;
};
#endif

// Where a key lies: row `row` of batch entry, or page, `entry` of a tensor. Those after it follow, as far as its page goes.
struct KeyAddress {
    int entry;
    long long row;
};

struct SeqlenInfo {
    const Score& score;
    int b;
    int Sq, Sk;    // rows of queries, and of keys that count
    int diagonal;  // key i + diagonal lies opposite of query i
#if RAGGED
    int first_query, first_key, all_keys;

    __device__ __forceinline__ SeqlenInfo(const Score& score, int b) : score(score), b(b) {
        const Offsets queries = query_offsets(score), keys = key_offsets(score);
        if (CHECKED) queries.check(), keys.check();
        first_query = queries.begin(b), Sq = queries.length(b);
        first_key = keys.begin(b), Sk = all_keys = keys.length(b);
#if KEY_LENGTHS
        Sk = min(max(score.key_lengths[b * score.key_lengths_stride_b], 0), Sk);
#endif
        diagonal = score.bottom_right ? Sk - Sq : 0;
    }
    // The same, of what somebody has found before.
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b, SeqlenOffsets found)
        : score(score), b(b), Sq(found.Sq), Sk(found.Sk), diagonal(score.bottom_right ? found.Sk - found.Sq : 0),
          first_query(found.first_query), first_key(found.first_key), all_keys(found.all_keys) {}
    __device__ __forceinline__ SeqlenOffsets extent() const { return {first_query, Sq, first_key, all_keys, Sk}; }
    __device__ __forceinline__ int key_rows() const { return all_keys; }  // that are there

    // The address of query row i, or key j, in head h of a tensor.
    template <class T>
    __device__ __forceinline__ T* query(const View<T>& tensor, int h, long long i) const {
        return tensor.row(0, h, first_query + i);
    }
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const {
        return tensor.row(0, h, first_key + j);
    }
    __device__ __forceinline__ KeyAddress key_address(int j) const { return {0, static_cast<long long>(first_key) + j}; }

    // Moves tensors so that row 0 of batch entry b, as of every other, is this sequence's first.
    template <class... T>
    __device__ __forceinline__ void offset_queries(View<T>&... tensors) const {
        ((tensors.data += first_query * tensors.stride_s, tensors.stride_b = 0), ...);
    }
    template <class... T>
    __device__ __forceinline__ void offset_keys(View<T>&... tensors) const {
        ((tensors.data += first_key * tensors.stride_s, tensors.stride_b = 0), ...);
    }

    // Where query row 0 of a head, one of all of the tensors' or h of H, stands in LSE and delta; and how many query tiles of
    // all heads come before its first.
    __device__ __forceinline__ long long lse_offset(long long head) const { return head * score.rows_q + first_query; }
    template <class Number>
    __device__ __forceinline__ long long lse_offset(Number, int h) const { return lse_offset(h); }
    template <int ROWS>
    __device__ __forceinline__ long long first_tile(int, int h) const {
        return static_cast<long long>(h) * query_offsets(score).template tiles<ROWS>() + first_query / ROWS + b;
    }

    // Coordinates, of row and batch entry, of a box that begins with query row i, or key j, in a tensor map: the row counted
    // back from the sequence's end, and the end. What a box has beyond the end is outside of the map: zeros when it is
    // requested, and not written when it is sent (tma_load of hopper.cuh).
    __device__ __forceinline__ int query_box(int i) const { return i - Sq; }
    __device__ __forceinline__ int key_box(int j) const { return j - Sk; }
    __device__ __forceinline__ int query_batch(int) const { return first_query + Sq; }
    __device__ __forceinline__ int key_batch(int) const { return first_key + Sk; }
    // Likewise of all keys that are there: of dK and dV, which keys that do not count have too.
    __device__ __forceinline__ int key_row_box(int j) const { return j - all_keys; }
    __device__ __forceinline__ int key_row_batch(int) const { return first_key + all_keys; }
#else
    __device__ __forceinline__ SeqlenInfo(const Score& score, int b)
        : score(score), b(b), Sq(score.Sq), Sk(score.Sk), diagonal(score.diagonal) {
#if KEY_LENGTHS
        Sk = min(max(score.key_lengths[b * score.key_lengths_stride_b], 0), score.Sk);
        if (score.bottom_right) diagonal = Sk - Sq;
#endif
#if PAGE_SIZE
        if (CHECKED && threadIdx.x == 0) check_pages();
#endif
    }
    __device__ __forceinline__ int key_rows() const { return score.Sk; }
    template <class T>
    __device__ __forceinline__ T* query(const View<T>& tensor, int h, long long i) const { return tensor.row(b, h, i); }
#if PAGE_SIZE
    __device__ __forceinline__ int page(int j) const {
        return score.block_table[b * score.block_table_stride_b + j / PAGE_SIZE * score.block_table_stride_i];
    }
    __device__ __forceinline__ KeyAddress key_address(int j) const {
        return {min(max(page(j), 0), score.pages - 1), j % PAGE_SIZE};
    }
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const {
        const KeyAddress place = key_address(static_cast<int>(j));
        return tensor.row(place.entry, h, place.row);
    }
    __device__ __forceinline__ void check_pages() const {
        for (int j = 0; j < Sk; j += PAGE_SIZE)
            require(0 <= page(j) && page(j) < score.pages, "block_table names a page that there is not");
    }
#else
    __device__ __forceinline__ KeyAddress key_address(int j) const { return {b, j}; }
    template <class T>
    __device__ __forceinline__ T* key(const View<T>& tensor, int h, long long j) const { return tensor.row(b, h, j); }
#endif
    template <class... T>
    __device__ __forceinline__ void offset_queries(View<T>&...) const {}
    template <class... T>
    __device__ __forceinline__ void offset_keys(View<T>&...) const {}
    __device__ __forceinline__ long long lse_offset(long long head) const { return head * score.Sq; }
    template <class Number>
    __device__ __forceinline__ long long lse_offset(Number H, int h) const {
        return lse_offset(static_cast<long long>(b) * H + h);
    }
    template <int ROWS>
    __device__ __forceinline__ long long first_tile(int H, int h) const {
        return (static_cast<long long>(b) * H + h) * query_tiles<ROWS>(score);
    }
    __device__ __forceinline__ int query_box(int i) const { return i; }
    __device__ __forceinline__ int key_box(int j) const { return j; }
    __device__ __forceinline__ int query_batch(int b) const { return b; }
    __device__ __forceinline__ int key_batch(int b) const { return b; }
    __device__ __forceinline__ int key_row_box(int j) const { return j; }
    __device__ __forceinline__ int key_row_batch(int b) const { return b; }
#endif
};
