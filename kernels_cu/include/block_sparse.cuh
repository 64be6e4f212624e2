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
    unsigned list = 0, place = 0, count = 0;  // which, and for who reads: how many entries of how many are read

    __device__ __forceinline__ explicit TileLists(char* smem) : smem(smem) {}

    static __device__ __forceinline__ void init_barriers(SmemAddr at) {
        for (unsigned i = 0; i < 4; ++i) mbarrier_init(at + 8 * i, 1);
        fence_proxy_async();
    }

    // Lists the tiles of `range` of which query rows m0 .. m0 + BLOCK_M see something; where nothing is seen, the first. By all
    // lanes of a warp.
    __device__ __forceinline__ void write(const Head& head, int m0, Range range) {
        const unsigned lane = threadIdx.x % 32;
        unsigned newest = range.begin * (2 * LAST_TILE), held = 0;  // held: whether the newest was found
#pragma unroll 1
        for (int first = range.begin; first < range.end; first += 32) {
            const int tile = min(first + static_cast<int>(lane), range.end - 1);
            bool seen = false;
            unsigned entry = tile * (2 * LAST_TILE);
#pragma unroll
            for (int i = 0; i < BLOCK_M / 64; ++i) {
                const Head::MapTile own = head.map_tile<BLOCK_N>(m0 + 64 * i, tile * BLOCK_N);
                seen |= own.some_visible;
                entry |= own.fully_visible << i;
            }
            seen = seen && first + static_cast<int>(lane) < range.end;
            const unsigned found = __ballot_sync(0xffffffffu, seen);
            if (!found) continue;
            const unsigned last = 31 - __clz(found), entries = held + __popc(found) - 1;
            if (entries) {
                unsigned* const words = open();
                if (lane == 0) words[0] = entries;
                if (lane == 0 && held) words[1] = newest;
                if (seen && lane != last) words[1 + held + __popc(found & ~(~0u << lane))] = entry;
                close();
            }
            newest = __shfl_sync(0xffffffffu, entry, last), held = 1;
        }
        unsigned* const words = open();
        if (lane == 0) words[0] = 1, words[1] = newest | LAST_TILE;
        close();
    }

    // The next entry, by one thread.
    __device__ __forceinline__ unsigned next() {
        if (place == count) {
            mbarrier_wait(full(), list / 2 % 2);
            place = 0, count = words()[0];
        }
        const unsigned entry = words()[1 + place++];
        if (place == count) mbarrier_arrive(empty()), ++list;
        return entry;
    }

  private:
    __device__ __forceinline__ SmemAddr full() const { return smem_address(smem) + list % 2 * 8; }
    __device__ __forceinline__ SmemAddr empty() const { return full() + 16; }
    __device__ __forceinline__ unsigned* words() const { return reinterpret_cast<unsigned*>(smem + 32) + list % 2 * WORDS; }
    __device__ __forceinline__ unsigned* open() {
        mbarrier_wait(empty(), list / 2 % 2 ^ 1);
        return words();
    }
    __device__ __forceinline__ void close() {
        __syncwarp();  // every lane's entry is there before one lane says so
        if (threadIdx.x % 32 == 0) mbarrier_arrive(full());
        ++list;
    }
};
