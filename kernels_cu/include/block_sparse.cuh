// Which key tiles of a piece the block map leaves, for kernels whose blocks stay on their SM: a warp looks at 32 tiles at once,
// a lane each, while the block still works on the piece before, and the thread that requests tiles reads what it found from two
// lists in shared memory. Looked for by that thread alone, between its requests, each tile waited for three loads in a row.
//
// An entry is what consumers are told of a tile: a bit for each that sees all of it, one for the piece's last tile, and which it
// is. To mark the last one the newest entry is held back, until there is another or the piece ends.
#pragma once
#include <hopper.cuh>
#include "score_mod.cuh"

constexpr unsigned LAST_TILE = 1 << BLOCK_M / 64;

struct TileLists {
    static constexpr unsigned WORDS = 1 + 32, BYTES = 4 * 8 + 2 * 4 * WORDS;  // mbarriers; a count and entries, twice

    char* const smem;
    unsigned list = 0, position = 0, count = 0;  // which, and for who reads: how many entries of how many are read

    __device__ __forceinline__ explicit TileLists(char* smem) : smem(smem) {}

    static __device__ __forceinline__ void init_barriers(SmemAddr at) {
        for (unsigned i = 0; i < 4; ++i) mbarrier_init(at + 8 * i, 1);
        fence_proxy_async();
    }

    // Lists the tiles of `range` of which query rows m0 .. m0 + BLOCK_M see something; where nothing is seen, the first. By all
    // lanes of a warp.
    __device__ __forceinline__ void write(const Head& head, int m0, Range range) {
        const unsigned lane = threadIdx.x % 32;
        unsigned newest = range.begin * (2 * LAST_TILE), pending = 0;  // held: whether the newest was found
#pragma unroll 1
        for (int first = range.begin; first < range.end; first += 32) {
            const int tile = min(first + static_cast<int>(lane), range.end - 1);
            bool visible = false;
            unsigned entry = tile * (2 * LAST_TILE);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 64; ++i) {
                const Head::MapTile map_tile = head.map_tile<BLOCK_N>(m0 + 64 * i, tile * BLOCK_N);
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
        if (lane == 0) words[0] = 1, words[1] = newest | LAST_TILE;
        commit();
    }

    // The next entry, by one thread.
    __device__ __forceinline__ unsigned next() {
        if (position == count) {
            mbarrier_wait(full(), list / 2 % 2);
            position = 0, count = words()[0];
        }
        const unsigned entry = words()[1 + position++];
        if (position == count) mbarrier_arrive(empty()), ++list;
        return entry;
    }

  private:
    __device__ __forceinline__ SmemAddr full() const { return smem_address(smem) + list % 2 * 8; }
    __device__ __forceinline__ SmemAddr empty() const { return full() + 16; }
    __device__ __forceinline__ unsigned* words() const { return reinterpret_cast<unsigned*>(smem + 32) + list % 2 * WORDS; }
    __device__ __forceinline__ unsigned* acquire() {
        mbarrier_wait(empty(), list / 2 % 2 ^ 1);
        return words();
    }
    __device__ __forceinline__ void commit() {
        __syncwarp();  // every lane's entry is there before one lane says so
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full());
        ++list;
    }
};
