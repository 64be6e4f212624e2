// What a warp of fwd_decode computes of a split, and the loads of its queries and keys by cp.async. Included by
// fwd_decode.cu after its constants.
#pragma once
#include "split_epilogue.cuh"

// Issues cp.async for ADDRESSED rows of K or V with the lanes of a warp; rows >= valid_rows are filled with
// zeros. Fewer instructions than cp_async_tile: the instruction cache misses of a new block delay its first loads.
template <class TileRows, int WIDTH, class T>
__device__ __forceinline__ void load_rows(SmemAddr tile, const View<const T>& tensor, int kv_head, KeyAddress address,
                                          int valid_rows, unsigned lane) {
    constexpr unsigned STEP = 32 / TileRows::CHUNKS, ACTIVE = STEP * TileRows::CHUNKS;
    const unsigned row0 = lane / TileRows::CHUNKS, chunk = lane % TileRows::CHUNKS;
    if (ACTIVE < 32 && lane >= ACTIVE) return;
    const int rows = chunk * CHUNK < WIDTH ? valid_rows - static_cast<int>(row0) : 0;
    const T* from = tensor.row(address.batch_or_page, kv_head, address.row);
    from += row0 * tensor.stride_s + chunk * CHUNK;
#pragma unroll
    for (unsigned i = 0; i < (ADDRESSED + STEP - 1) / STEP; ++i, from += STEP * tensor.stride_s)
        if (ADDRESSED % STEP == 0 || row0 + i * STEP < ADDRESSED)
            cp_async_16<SHARED_LINES>(tile + TileRows::at(row0 + i * STEP, chunk), from,
                                      static_cast<int>(i * STEP) < rows);
}

// The same for a tile of BLOCK_N rows; `address` is that of the key of this lane.
template <class TileRows, int WIDTH, class T>
__device__ __forceinline__ void load_rows_of_pages(SmemAddr tile, const View<const T>& tensor, int kv_head,
                                                   KeyAddress address, int valid_rows, unsigned lane) {
    const T* const own = tensor.row(address.batch_or_page, kv_head, address.row);
#pragma unroll
    for (unsigned i = 0; i < (BLOCK_N * TileRows::CHUNKS + 31) / 32; ++i) {
        const unsigned row = (lane + 32 * i) / TileRows::CHUNKS, chunk = (lane + 32 * i) % TileRows::CHUNKS;
        const unsigned long long from = __shfl_sync(0xffffffffu, reinterpret_cast<unsigned long long>(own), row);
        if (row < BLOCK_N)
            cp_async_16<SHARED_LINES>(tile + TileRows::at(row, chunk), reinterpret_cast<const T*>(from) + chunk * CHUNK,
                                      static_cast<int>(row) < valid_rows && chunk * CHUNK < WIDTH);
    }
}

// The part of a split that a warp computes: packed rows row0 .. rows_end - 1, and key tiles `first`, `first` + WARPS,
// ... before `end`.
struct SplitPart {
    const SeqlenInfo seqlen;
    const int row0, rows_end;
    Range visible_to_all;  // keys
    int first, end;

    // Splits share the visible key tiles of the row tile evenly, or, with stream-K, those of the batch entry.
    __device__ __forceinline__ SplitPart(const Score& score, const Split& split, RowTile tile, int kv_head, int group,
                                         unsigned warp)
        : seqlen(score, tile.b), row0(tile.row0), rows_end(min(row0 + BLOCK_M, seqlen.Sq * group)) {
        const int i0 = row0 / group, i1 = (rows_end - 1) / group + 1;  // queries
        const Head head(seqlen, kv_head * group);
        const Range keys = head.keys(i0, i1);
        visible_to_all = head.fully_visible_keys(i0, i1);
        const int begin = keys.begin / BLOCK_N, tiles = max((max(keys.end, 0) + BLOCK_N - 1) / BLOCK_N - begin, 0);
        if (DYNAMIC_SPLITS) {
            const int origin = head.keys(0, head.Sq).begin / BLOCK_N;
            first = max(origin + split.tiles.begin, begin);
            end = min(origin + split.tiles.end, begin + tiles);
        } else {
            const int blocks = split.splits * CLUSTER, each = (tiles + blocks - 1) / blocks,
                      before = min((split.split * CLUSTER + static_cast<int>(cluster_cta_rank())) * each, tiles);
            first = begin + before, end = begin + min(before + each, tiles);
        }
        first += warp;
    }
};

// The pages of the keys that a warp loads. They are read 32 tiles at a time, by lane i those of the i-th tile: a warp
// that reads the page of each tile waits for it some 1000 cycles, behind its own copies. ADDRESSED = 1: one tile at a
// time, by each lane that of its key, two tiles before it is needed.
struct PagesAhead {
    static constexpr bool BY_KEY = ADDRESSED == 1;
    static constexpr int PER_TILE = ADDRESSED == 16 && BLOCK_N == 32 ? 2 : 1, TILES = BY_KEY ? 1 : 32;
    int now[PER_TILE] = {}, later[PER_TILE] = {};  // of these TILES tiles, and of the next ones

    // Key 0 of tile j, or of its second half, or this lane's key.
    static __device__ __forceinline__ int key(const SplitPart& part, int j, int half, unsigned lane) {
        const int n = j * BLOCK_N + (BY_KEY ? static_cast<int>(lane) : half * ADDRESSED);
        return BY_KEY || half > 0 ? min(n, part.seqlen.Sk - 1) : n;
    }
    // Reads the pages of TILES tiles of the warp from tile j on.
    static __device__ __forceinline__ void read(int (&pages)[PER_TILE], const SplitPart& part, int j, unsigned lane) {
        if (PAGE_SIZE == 0) return;
        if (!BY_KEY) j += static_cast<int>(lane) * WARPS;
#pragma unroll
        for (int i = 0; i < PER_TILE; ++i) pages[i] = j < part.end ? part.seqlen.page(key(part, j, i, lane)) : 0;
    }
    __device__ __forceinline__ void begin(const SplitPart& part, unsigned lane) {
        read(now, part, part.first, lane);
        read(later, part, part.first + TILES * WARPS, lane);
    }
    // The addresses of tile j, which follows the tile of the previous call.
    __device__ __forceinline__ void next(KeyAddress (&addresses)[PER_TILE], const SplitPart& part, int j,
                                         unsigned lane) {
        const int tile = BY_KEY ? 0 : (j - part.first) / WARPS % TILES;
#pragma unroll
        for (int i = 0; i < PER_TILE; ++i) {
            const int page = BY_KEY || PAGE_SIZE == 0 ? now[i] : __shfl_sync(0xffffffffu, now[i], tile);
            addresses[i] = part.seqlen.key_address(key(part, j, i, lane), page);
        }
        if (PAGE_SIZE > 0 && tile == TILES - 1) {
#pragma unroll
            for (int i = 0; i < PER_TILE; ++i) now[i] = later[i];
            read(later, part, j + (TILES + 1) * WARPS, lane);
        }
    }
};

// A warp's pipeline of STAGES stages of K and V, filled by cp.async. TmaPipeline (decode_load_tma.cuh) has the same
// functions.
struct CpAsyncPipeline {
    const View<const dtype_k>& K;
    const View<const dtype_v>& V;
    const int kv_head;
    const unsigned lane;
    const SmemAddr stages;
    SmemAddr write_stage, read_stage;  // the next stages to load and to read
    PagesAhead pages;

    __device__ __forceinline__ CpAsyncPipeline(const View<const dtype_k>& K, const View<const dtype_v>& V,
                                               const TensorMap& /*K_map*/, const TensorMap& /*V_map*/, int kv_head,
                                               unsigned lane, SmemAddr stages, SmemAddr /*barriers*/)
        : K(K), V(V), kv_head(kv_head), lane(lane), stages(stages) {}

    __device__ __forceinline__ SmemAddr next_stage(SmemAddr stage) const {
        return stage + STAGE == stages + STAGES_BYTES ? stages : stage + STAGE;
    }
    // The first tile will be `part.first`. No loads are in flight.
    __device__ __forceinline__ void begin(const SplitPart& part) {
        write_stage = read_stage = stages;
        pages.begin(part, lane);
    }
    __device__ __forceinline__ void advance() { read_stage = next_stage(read_stage); }
    template <class TileRows, int WIDTH, class T>
    __device__ __forceinline__ void load_tile(SmemAddr tile, const View<const T>& tensor, int valid_rows,
                                              const KeyAddress (&addresses)[PagesAhead::PER_TILE]) const {
        if (PagesAhead::BY_KEY)
            load_rows_of_pages<TileRows, WIDTH>(tile, tensor, kv_head, addresses[0], valid_rows, lane);
#pragma unroll
        for (int i = 0; i < (PagesAhead::BY_KEY ? 0 : PagesAhead::PER_TILE); ++i)
            load_rows<TileRows, WIDTH>(tile + i * ADDRESSED * TileRows::ROW, tensor, kv_head, addresses[i],
                                       valid_rows - i * ADDRESSED, lane);
    }
    // Loads key tile j.
    __device__ __forceinline__ void load(const SplitPart& part, int j) {
        if (j < part.end) {
            const int valid_rows = part.seqlen.Sk - j * BLOCK_N;
            KeyAddress addresses[PagesAhead::PER_TILE];
            pages.next(addresses, part, j, lane);
            load_tile<KTile, HEAD_DIM>(write_stage, K, valid_rows, addresses);
            load_tile<VTile, HEAD_DIM_V>(write_stage + K_BYTES, V, valid_rows, addresses);
        }
        cp_async_commit();
        write_stage = next_stage(write_stage);
    }
    // Waits for Q, which was loaded before the first STAGES - 1 tiles.
    static __device__ __forceinline__ void wait_for_Q() { cp_async_wait<STAGES - 1>(); }
    // Waits for the tile in read_stage, after STAGES - 1 later calls of `load`.
    __device__ __forceinline__ void wait() const {
        cp_async_wait<STAGES - 1>();
        __syncwarp();  // all lanes' loads of the tile are complete
    }
    // Waits for all loads.
    static __device__ __forceinline__ void wait_for_all() { cp_async_wait<0>(); }
    // Loads after the next barrier may overwrite what this thread has written to the stages.
    static __device__ __forceinline__ void release_results() {}
};

// Loads the rows of Q with all threads, 16 bytes each.
__device__ __forceinline__ void load_Q(SmemAddr Q_smem, const View<const dtype>& Q, const SplitPart& part, int kv_head,
                                       int group) {
#pragma unroll 1
    for (int i = threadIdx.x; i < BLOCK_M * static_cast<int>(QTile::CHUNKS); i += THREADS) {
        const int r = i / QTile::CHUNKS, chunk = i % QTile::CHUNKS;
        const bool there = part.row0 + r < part.rows_end && chunk * Q_CHUNK < HEAD_DIM;
        const PackedRow row(part.row0 + (there ? r : 0), kv_head, group);
        cp_async_16(Q_smem + QTile::at(r, chunk), part.seqlen.query(Q, row.h, row.i) + (there ? chunk * Q_CHUNK : 0),
                    there);
    }
    cp_async_commit();
}
