// Packed GQA: the queries of all query heads of a key/value head are the rows of one tile. Row r is query r / group of
// head r % group of the group.
#pragma once
#include "score_mod.cuh"

// A work tile: packed rows row0 .. rows_end - 1 of key/value head h, and the key tiles that they see.
struct PackedWorkTile {
    int row0, rows_end, h, b, begin, tiles;
    int group, first_query, first_head;  // of row 0 of the tile: its query, and its head within the group
    __device__ __forceinline__ PackedWorkTile(int tile_index, int row_tiles, int Hk, int group, const Score& score)
        : group(group) {
        row0 = tile_index % row_tiles * BLOCK_M, h = tile_index / row_tiles % Hk, b = tile_index / row_tiles / Hk;
        first_query = row0 / group, first_head = row0 % group;
        const Head group_head(score, b, h * group);
        rows_end = min(row0 + BLOCK_M, group_head.Sq * group);
        const Range keys = group_head.keys(first_query, end_of_queries());
        begin = keys.begin / BLOCK_N;
        tiles = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
    }
    __device__ __forceinline__ int index(int row_tiles, int Hk) const {
        return (b * Hk + h) * row_tiles + row0 / BLOCK_M;
    }
    __device__ __forceinline__ int end_of_queries() const { return query(rows_end - 1 - row0) + 1; }
    // First key of the j-th key tile. Descending: the tiles that need a mask come first.
    __device__ __forceinline__ int n0(int j) const { return (begin + tiles - 1 - j) * BLOCK_N; }
    // Query and head of a row of the tile. The quotient of so few rows is exact in fp32; an integer division takes 30
    // instructions.
    __device__ __forceinline__ int query(int row) const { return first_query + queries_after(row); }
    __device__ __forceinline__ int head(int row) const {
        return h * group + first_head + row - queries_after(row) * group;
    }
    __device__ __forceinline__ bool has(int row) const { return row0 + row < rows_end; }

  private:
    __device__ __forceinline__ int queries_after(int row) const {
        return static_cast<int>((first_head + row + 0.5f) * reciprocal(static_cast<float>(group)));
    }
};

// By THREADS threads: copies Q of a work tile to `tile`, 16 bytes per copy (cp.async). Rows of other work tiles and
// columns from COLUMNS on become zeros.
template <class Tile, int COLUMNS, unsigned THREADS>
__device__ __forceinline__ void load_packed_rows(SmemAddr tile, const View<const dtype>& Q,
                                                 const PackedWorkTile& work_tile, const Score& score) {
    const SeqlenInfo sequence(score, work_tile.b);
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_M * Tile::SLABS * 8; i += THREADS) {
        const int row = i / (Tile::SLABS * 8), chunk = i % (Tile::SLABS * 8);
        const bool valid = work_tile.has(row) && chunk * 8 < COLUMNS;
        const int src_row = valid ? row : 0;
        cp_async_16(tile + Tile::chunk(row, chunk),
                    sequence.query(Q, work_tile.head(src_row), work_tile.query(src_row)) + (valid ? 8 * chunk : 0),
                    valid);
    }
    cp_async_commit();
}

// By THREADS threads: copies O of a work tile from shared memory, 16 bytes per copy. Each Slab has 64 columns.
template <class Slab, int COLUMNS, unsigned THREADS>
__device__ __forceinline__ void store_packed_rows(const char* slabs, const View<dtype>& O,
                                                  const PackedWorkTile& work_tile, const Head& group_head) {
    constexpr int CHUNKS = (COLUMNS + 63) / 64 * 8;  // of 8 columns
    // Opaque: otherwise the compiler computes the rows of 24 chunks before the mainloop, and spills.
    const int thread = CHUNKS & (CHUNKS - 1) ? opaque(threadIdx.x) : threadIdx.x;
#pragma unroll
    for (int first = 0; first < BLOCK_M * CHUNKS; first += THREADS) {
        const int i = first + thread, row = i / CHUNKS, chunk = i % CHUNKS;
        if (!work_tile.has(row) || chunk * 8 >= COLUMNS) continue;
        const char* const from = slabs + chunk / 8 * Slab::BYTES + Slab::chunk(row, chunk % 8);
        *reinterpret_cast<uint4*>(group_head.query(O, work_tile.head(row), work_tile.query(row)) + 8 * chunk) =
            *reinterpret_cast<const uint4*>(from);
    }
}
