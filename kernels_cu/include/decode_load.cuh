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

    // Splits share the visible key tiles evenly, or, with stream-K, in whole rounds of the batch entry.
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
            first = max(origin + split.rounds.begin * WARPS, begin);
            end = min(origin + split.rounds.end * WARPS, begin + tiles);
        } else {
            const int blocks = split.splits * CLUSTER, each = (tiles + blocks - 1) / blocks,
                      before = min((split.split * CLUSTER + static_cast<int>(cluster_cta_rank())) * each, tiles);
            first = begin + before, end = begin + min(before + each, tiles);
        }
        first += warp;
    }
};

// A warp's pipeline of STAGES stages of K and V.
struct KeyPipeline {
    const View<const dtype_k>& K;
    const View<const dtype_v>& V;
    const int kv_head;
    const unsigned lane;
    const SmemAddr stages;
    SmemAddr write_stage, read_stage;  // the next stages to load and to read
    KeyAddress next = {};              // of the next tile to load, or of its first half, or of this lane's key of it
    KeyAddress next_half = {};         // of its second half, if the halves may be in two pages
    static constexpr bool TWO_PAGES = ADDRESSED == 16 && BLOCK_N == 32;

    __device__ __forceinline__ KeyPipeline(const View<const dtype_k>& K, const View<const dtype_v>& V, int kv_head,
                                           unsigned lane, SmemAddr stages)
        : K(K), V(V), kv_head(kv_head), lane(lane), stages(stages) {}

    __device__ __forceinline__ SmemAddr next_stage(SmemAddr stage) const {
        return stage + STAGE == stages + STAGES_BYTES ? stages : stage + STAGE;
    }
    // The first tile will be `part.first`. No loads are in flight.
    __device__ __forceinline__ void begin(const SplitPart& part) {
        write_stage = read_stage = stages;
        update_address(part, part.first);
    }
    __device__ __forceinline__ void advance() { read_stage = next_stage(read_stage); }
    __device__ __forceinline__ void update_address(const SplitPart& part, int j) {
        const int n0 = j * BLOCK_N, last = part.seqlen.Sk - 1;
        if (j < part.end) next = part.seqlen.key_address(ADDRESSED == 1 ? min(n0 + static_cast<int>(lane), last) : n0);
        if (TWO_PAGES && j < part.end) next_half = part.seqlen.key_address(min(n0 + ADDRESSED, last));
    }
    template <class TileRows, int WIDTH, class T>
    __device__ __forceinline__ void load_tile(SmemAddr tile, const View<const T>& tensor, int valid_rows) const {
        if (ADDRESSED > 1) load_rows<TileRows, WIDTH>(tile, tensor, kv_head, next, valid_rows, lane);
        else load_rows_of_pages<TileRows, WIDTH>(tile, tensor, kv_head, next, valid_rows, lane);
        if (TWO_PAGES)
            load_rows<TileRows, WIDTH>(tile + ADDRESSED * TileRows::ROW, tensor, kv_head, next_half,
                                       valid_rows - ADDRESSED, lane);
    }
    // Loads key tile j, and reads the address of the warp's next tile.
    __device__ __forceinline__ void load(const SplitPart& part, int j) {
        if (j < part.end) {
            const int valid_rows = part.seqlen.Sk - j * BLOCK_N;
            load_tile<KTile, HEAD_DIM>(write_stage, K, valid_rows);
            load_tile<VTile, HEAD_DIM_V>(write_stage + K_BYTES, V, valid_rows);
        }
        cp_async_commit();
        write_stage = next_stage(write_stage);
        update_address(part, j + WARPS);
    }
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
