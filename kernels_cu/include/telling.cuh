// A block's pieces of work, one after the other: one warp finds them and tells everybody else through shared memory. For kernels
// whose blocks stay on their SM.
//
//   using Next = Telling<AT>;                   at byte AT of shared memory, BYTES of them
//   Next::Teller teller{smem};                  the warp that finds them:   teller.tell(piece), or all of them: tell_as_asked
//   Next::Pieces pieces(smem);                  everybody else:             while (pieces.take()) ... pieces.dealt ...
//
// Two mbarriers: that the next piece is told, and that everybody has asked for it; then the piece.
#pragma once
#include <hopper.cuh>
#include "dealing.cuh"
#include "pieces.cuh"

template <unsigned AT>
struct Telling {
    static constexpr unsigned TOLD = AT, ASKED = AT + 8, PIECE = AT + 16, BYTES = 48;
    static_assert(sizeof(Dealt) <= BYTES - 16, "a piece finds room");

    // So many are told, each of whom asks.
    static __device__ __forceinline__ void init_barriers(SmemAddress base, unsigned many) {
        mbarrier_init(base + TOLD, 1);
        mbarrier_init(base + ASKED, many);
    }

    struct Teller {
        char* const smem;
        unsigned round = 0;
        // Tells the next piece, when everybody has asked for it.
        __device__ __forceinline__ void tell(const Dealt& piece) {
            await_asked();
            write(piece);
        }
#if RAGGED || BLOCK_MAP
        // All pieces that the block gets, by all lanes of a warp: the first is its own, each other one comes from the counter
        // `dealt`, when everybody has asked for it and no sooner, or after a brief one while that is still told. Of each, when it
        // is told, f(piece).
        template <class F>
        __device__ __forceinline__ void tell_as_asked(const LongestFirst<QueryTiles>& pieces, unsigned heads, unsigned group,
                                                      unsigned* dealt, F f) {
            const bool leader = threadIdx.x % 32 == 0;
            bool ahead = true;
#pragma unroll 1
            for (unsigned number = blockIdx.x;;) {
                const Dealt piece = pieces.piece(number, heads, group);
                if (leader) {
                    if (ahead) await_asked();
                    write(piece);
                }
                await_previous_entry();  // which clears the counter
                if (piece.none()) return;
                f(piece);
                ahead = pieces.brief(piece);
                if (leader) {
                    if (!ahead) await_asked();
                    number = atomicAdd(dealt, 1u);
                }
                number = __shfl_sync(0xffffffffu, number, 0) + grid_size_x();
            }
        }
#endif

      private:
        // Nobody asks for the first piece.
        __device__ __forceinline__ void await_asked() { mbarrier_wait(smem_address(smem) + ASKED, round++ % 2 ^ 1); }
        __device__ __forceinline__ void write(const Dealt& piece) {
            *reinterpret_cast<Dealt*>(smem + PIECE) = piece;
            mbarrier_arrive(smem_address(smem) + TOLD);
        }
    };

    struct Pieces {
        const char* const smem;
        unsigned round = 0;
        Dealt dealt;
        __device__ __forceinline__ explicit Pieces(const char* smem) : smem(smem) {}
        // The next one; whether there is any. Asks for the one after, unless the caller does, later.
        __device__ __forceinline__ bool take(bool asks = true) {
            const SmemAddress base = smem_address(smem);
            mbarrier_wait(base + TOLD, round++ % 2);
            dealt = *reinterpret_cast<const Dealt*>(smem + PIECE);
            if (dealt.none()) return false;
            if (asks) mbarrier_arrive(base + ASKED);
            return true;
        }
        __device__ __forceinline__ void ask() const { mbarrier_arrive(smem_address(smem) + ASKED); }
        // Of the mbarriers that each piece uses once.
        __device__ __forceinline__ unsigned parity() const { return (round - 1) % 2; }
    };
};

// The same piece, by all lanes of a warp: so the compiler knows that all were told the same.
__device__ __forceinline__ Dealt uniform(Dealt piece) {
    unsigned* const words = reinterpret_cast<unsigned*>(&piece);
#pragma unroll
    for (unsigned i = 0; i < sizeof(Dealt) / 4; ++i) words[i] = uniform(words[i]);
    return piece;
}
