// Block sparsity: the list of a work tile's key tiles that are visible in the block map. The scheduler warp tests 32
// tiles at a time, while the block processes the previous work tile, and passes the list to the load warp through two
// buffers in shared memory, in parts of at most 32 entries. (If the load warp itself read the map, each tile would
// wait for three dependent loads.)
//
// Only when no further tile is found is it known which entry is the last one, so the newest entry is written when the
// next one is found, or at the end.
#pragma once
#include <hopper.cuh>
#include "work_tile.cuh"

// A list entry is a word: the tile's n_block, whether it is the work tile's last one, and, in the lowest bits, for each
// consumer whether the block map allows all keys of the tile to all of its rows.
namespace list_entry {
constexpr unsigned LAST_FLAG = 1 << BLOCK_M / WARPGROUP_ROWS, N_BLOCK_UNIT = 2 * LAST_FLAG;
__device__ __forceinline__ int n_block(unsigned entry) { return entry / N_BLOCK_UNIT; }
__device__ __forceinline__ bool is_last(unsigned entry) { return entry & LAST_FLAG; }
__device__ __forceinline__ bool all_allowed(unsigned entry, unsigned consumer) { return entry >> consumer & 1; }
}  // namespace list_entry

// The list entry of the key tile in each stage of K, one word per stage at byte AT of shared memory. The load warp
// writes the word before it loads K; consumers read it before they release K.
template <unsigned AT, unsigned STAGES_>
struct StageEntries {
    static constexpr unsigned END = AT + 4 * STAGES_;
    static __device__ __forceinline__ unsigned& entry(char* smem, unsigned stage) {
        return reinterpret_cast<unsigned*>(smem + AT)[stage];
    }
};

struct TileLists {
    // A pipeline of two buffers of a count and 32 entries: two full and two empty mbarriers, then the buffers. Its
    // functions are written out: Pipeline<0, 2> gives other machine code, which has not been timed.
    static constexpr unsigned WORDS = 1 + 32, BARRIERS = 4, BYTES = 8 * BARRIERS + 2 * 4 * WORDS;

    char* const smem;
    unsigned part = 0;                 // parts so far, of all lists: index in the pipeline
    unsigned position = 0, count = 0;  // the reader's position in a part of `count` entries

    __device__ __forceinline__ explicit TileLists(char* smem) : smem(smem) {}

    static __device__ __forceinline__ void init_barriers(SmemAddr at) {
        for (unsigned i = 0; i < BARRIERS; ++i) mbarrier_init(at + 8 * i, 1);
        fence_proxy_async();
    }

    // Lists the tiles of `range` that query rows m0 .. m0 + BLOCK_M - 1 see, or the first tile if they see none. All
    // lanes of the warp call it.
    __device__ __forceinline__ void write(const Head& head, int m0, Range range) {
        const unsigned lane = threadIdx.x % 32;
        unsigned newest = range.begin * list_entry::N_BLOCK_UNIT;
        unsigned pending = 0;  // 1: newest is valid and not yet written
#pragma unroll 1
        for (int first = range.begin; first < range.end; first += 32) {
            const int tile = min(first + static_cast<int>(lane), range.end - 1);
            bool visible = false;
            unsigned entry = tile * list_entry::N_BLOCK_UNIT;
#pragma unroll
            for (int i = 0; i < BLOCK_M / WARPGROUP_ROWS; ++i) {
                const Head::MapTile map_tile = head.map_tile<BLOCK_N>(m0 + WARPGROUP_ROWS * i, tile * BLOCK_N);
                visible |= map_tile.some_visible;
                entry |= map_tile.fully_visible << i;
            }
            visible = visible && first + static_cast<int>(lane) < range.end;
            const unsigned ballot = __ballot_sync(0xffffffffu, visible);
            if (!ballot) continue;
            const unsigned last = 31 - __clz(ballot), entries = pending + __popc(ballot) - 1;
            if (entries) {
                unsigned* const words = acquire();
                if (lane == 0) words[0] = entries;
                if (lane == 0 && pending) words[1] = newest;
                if (visible && lane != last) words[1 + pending + __popc(ballot & ~(~0u << lane))] = entry;
                commit();
            }
            newest = __shfl_sync(0xffffffffu, entry, last), pending = 1;
        }
        unsigned* const words = acquire();
        if (lane == 0) words[0] = 1, words[1] = newest | list_entry::LAST_FLAG;
        commit();
    }

    // The next entry; called by one thread.
    __device__ __forceinline__ unsigned next() {
        if (position == count) {
            mbarrier_wait(full(), part / 2 % 2);
            position = 0, count = words()[0];
        }
        const unsigned entry = words()[1 + position++];
        if (position == count) mbarrier_arrive(empty()), ++part;
        return entry;
    }

  private:
    __device__ __forceinline__ SmemAddr full() const { return smem_address(smem) + part % 2 * 8; }
    __device__ __forceinline__ SmemAddr empty() const { return full() + 16; }
    __device__ __forceinline__ unsigned* words() const {
        return reinterpret_cast<unsigned*>(smem + 8 * BARRIERS) + part % 2 * WORDS;
    }
    __device__ __forceinline__ unsigned* acquire() {
        mbarrier_wait(empty(), part / 2 % 2 ^ 1);
        return words();
    }
    __device__ __forceinline__ void commit() {
        __syncwarp();  // all lanes have written their entries
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full());
        ++part;
    }
};
