// Tiles of rows, and the offsets of a ragged batch, from which a block finds the rows of its tile.
//
// The host does not know the offsets, so the grid has enough tiles for all possible offsets: the tiles of sequence b
// begin at index cu_seqlens[b] / ROWS + b. This leaves each sequence enough tile indices; those that it does not need
// are invalid tiles. A block finds the sequence of its tile by binary search, or a warp by testing 32 sequences at a
// time.
#pragma once

// A tile of rows: its batch entry and its first row there.
struct RowTile {
    int b, row0;
    __device__ __forceinline__ bool invalid() const { return b < 0; }
};

// Two kernels may share a ragged batch with keys in pages. The one compiled with SHORT_SEQUENCES = n takes the
// sequences of at most n queries, the one compiled with LONG_SEQUENCES = n those of more than n. The other's sequences
// have length 0. Both macros 0: one kernel takes all sequences.
#ifndef SHORT_SEQUENCES
#define SHORT_SEQUENCES 0
#endif
#ifndef LONG_SEQUENCES
#define LONG_SEQUENCES 0
#endif
constexpr int MOST_QUERIES = SHORT_SEQUENCES ? SHORT_SEQUENCES : 0x7fffffff;

#if RAGGED
// cu_seqlens of queries or of keys. qhead_per_khead: with the packed rows of fwd_decode, the number of query heads that
// are rows of one tile; row = query * qhead_per_khead + head in the group (PACK_GQA in work_tile.cuh has another
// order).
struct Offsets {
    const int* cu_seqlens;  // (count + 1,)
    long long stride;
    int count, rows, max_length;  // sequences, total rows, max_seqlen

    // The first row of sequence b; for b = count the end of the last sequence.
    __device__ __forceinline__ int begin(int b) const { return min(max(cu_seqlens[b * stride], 0), rows); }
    // 0 for a sequence of the other kernel.
    __device__ __forceinline__ int length(int b) const {
        const int rows_of_b = min(max(begin(b + 1) - begin(b), 0), max_length);
        if (!SHORT_SEQUENCES && !LONG_SEQUENCES) return rows_of_b;
        return LONG_SEQUENCES < rows_of_b && rows_of_b <= MOST_QUERIES ? rows_of_b : 0;
    }

    template <int ROWS>
    __device__ __forceinline__ int first_tile(int b, int qhead_per_khead = 1) const {
        return begin(b) * qhead_per_khead / ROWS + b;
    }
    template <int ROWS>
    __device__ __forceinline__ int tiles() const {  // of the grid
        return rows / ROWS + count;
    }

    template <int ROWS>
    __device__ __forceinline__ RowTile tile(int tile_index, int qhead_per_khead = 1) const {
        if (CHECKED) check();
        int b = 0, end = count;
        while (end - b > 1) {
            const int middle = (b + end) / 2;
            if (first_tile<ROWS>(middle, qhead_per_khead) <= tile_index) b = middle;
            else end = middle;
        }
        return tile_of<ROWS>(b, tile_index, qhead_per_khead);
    }
    // The same, called by all lanes of a warp: tests 32 sequences at a time. A binary search waits for memory in every
    // step.
    template <int ROWS>
    __device__ __forceinline__ RowTile tile_by_warp(int tile_index) const {
        if (CHECKED) check();
        int b = 0;
        for (int b0 = 0; b0 < count; b0 += 32) {
            const int candidate = b0 + threadIdx.x % 32;
            const unsigned before =
                __ballot_sync(0xffffffffu, candidate < count && first_tile<ROWS>(candidate) <= tile_index);
            if (before) b = b0 + 31 - __clz(before);
            if (before != 0xffffffffu) break;
        }
        return tile_of<ROWS>(b, tile_index);
    }
    template <int ROWS>
    __device__ __forceinline__ RowTile tile_of(int b, int tile_index, int qhead_per_khead = 1) const {
        const int tile = tile_index - first_tile<ROWS>(b, qhead_per_khead), row0 = tile * ROWS;
        return tile >= 0 && row0 < length(b) * qhead_per_khead ? RowTile{b, row0} : RowTile{-1, 0};
    }

    __device__ __forceinline__ void check() const {
        require(cu_seqlens[0] == 0, "cu_seqlens does not begin with 0");
        for (int b = 0; b < count; ++b)
            require(cu_seqlens[b * stride] <= cu_seqlens[(b + 1) * stride], "cu_seqlens decreases");
        require(cu_seqlens[count * stride] <= rows, "cu_seqlens ends beyond the last row of the tensor");
        for (int b = 0; b < count; ++b)  // the kernel would ignore the rows and keys beyond max_seqlen
            require(cu_seqlens[(b + 1) * stride] - cu_seqlens[b * stride] <= max_length,
                    "a sequence is longer than max_seqlen");
    }
};
#endif
