// Dropout: which elements of P are kept, as a pure function of the seed and of (b, h, i, j): the same in every kernel
// and tile. sandbox/reference/dropout.py is the definition in NumPy.
//
// One call of Philox 4x32-7 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3") gives random bits for
// the eight elements of a 16 x 16 block of P that one lane has in the accumulators of two adjacent m16n8 MMAs. Packed
// to 16 bits, these elements are the four registers of an A operand. Word k of the call belongs to register k, 16 bits
// per element:
//
// clang-format off
//   queries along rows (forward)            keys along rows (backward: S^T)
//     word 0: row g,     keys 2q, 2q+1        element (g, 2q) has half-word g % 2 of a word that lane 4 (2q) + g / 2
//     word 1: row g + 8, keys 2q, 2q+1        draws in the forward; element (g, 2q + 1) has half-word g % 2 of a
//     word 2: row g,     keys 2q+8, 2q+9      word that lane 4 (2q + 1) + g / 2 draws. Lanes l and l ^ 4 (rows g and
//     word 3: row g + 8, keys 2q+8, 2q+9      g ^ 1) need the same two calls: the lane with even g uses all low
//                                             half-words, the one with odd g all high ones. Each makes one of the
//                                             calls, keeps the half-words that it uses, and sends the others to the
//                                             other lane.
// clang-format on
#pragma once
#include <ptx.cuh>  // the CPU backend has its own

// Philox 4x32-7 of N counters of four words, in place, with the seed as key. The N calls run in lockstep and share the
// round keys. A round is two wide multiplications and two three-input XORs.
template <int N>
__device__ __forceinline__ void philox(unsigned (&counters)[N][4], unsigned long long seed) {
    unsigned k0 = static_cast<unsigned>(seed), k1 = static_cast<unsigned>(seed >> 32);
#pragma unroll
    for (int round = 0; round < 7; ++round) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            unsigned (&c)[4] = counters[n];
            const unsigned long long product0 = 0xD2511F53ull * c[0], product1 = 0xCD9E8D57ull * c[2];
            c[0] = static_cast<unsigned>(product1 >> 32) ^ c[1] ^ k0;
            c[1] = static_cast<unsigned>(product1);
            c[2] = static_cast<unsigned>(product0 >> 32) ^ c[3] ^ k1;
            c[3] = static_cast<unsigned>(product0);
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

// The keep mask of a lane's elements of a 16 x 16 block: two elements in each register of the A operand.
struct KeepMask {
    unsigned word[4], threshold;

    // Register i, two 16-bit elements, with dropped elements set to 0. Two predicated instructions; `mask` and an AND
    // take three.
    __device__ __forceinline__ unsigned apply(int i, unsigned packed) const {
        if (!keep_low(i)) packed &= 0xffff0000u;
        if (!keep_high(i)) packed &= 0x0000ffffu;
        return packed;
    }
    // All ones in the halves of register i whose elements are kept.
    __device__ __forceinline__ unsigned mask(int i) const {
        return (keep_low(i) ? 0x0000ffffu : 0) | (keep_high(i) ? 0xffff0000u : 0);
    }

    // Whether element `which` of register i is kept; 0: low half, 1: high half.
    __device__ __forceinline__ bool keep(int i, int which) const { return which ? keep_high(i) : keep_low(i); }

  private:
    __device__ __forceinline__ bool keep_low(int i) const { return word[i] << 16 >= threshold; }
    __device__ __forceinline__ bool keep_high(int i) const { return word[i] >= threshold; }
};

// Without dropout.
struct KeepAll {
    __device__ __forceinline__ unsigned apply(int, unsigned packed) const { return packed; }
    __device__ __forceinline__ unsigned mask(int) const { return ~0u; }
    __device__ __forceinline__ bool keep(int, int) const { return true; }
};

// Dropout of head h of batch entry b. An element is kept if (its 16 random bits << 16) >= threshold.
struct Dropout {
    const unsigned long long* seed;
    unsigned threshold, h, b;

    // Whether element (i, j) is kept.
    __device__ __forceinline__ bool keep(unsigned i, unsigned j) const {
        unsigned words[1][4];
        draw(words, *seed, i, j, i % 8 * 4 + j % 8 / 2);
        const unsigned low_keys = i & 8 ? words[0][1] : words[0][0], high_keys = i & 8 ? words[0][3] : words[0][2];
        const unsigned word = j & 8 ? high_keys : low_keys;
        return (j & 1 ? word : word << 16) >= threshold;
    }

    // Keep masks of this lane's elements of N blocks, adjacent along the keys, the first at (i, j), multiples of 16.
    // The elements are those of an A operand with queries along rows.
    template <int N>
    __device__ __forceinline__ void along_queries(KeepMask (&kept)[N], unsigned i, unsigned j) const {
        unsigned words[N][4];
        draw(words, *seed, i, j, thread_index_x() % 32);
#pragma unroll
        for (int n = 0; n < N; ++n) kept[n] = {{words[n][0], words[n][1], words[n][2], words[n][3]}, threshold};
    }

    // The same with keys along rows, given the value of the seed. A warp collective.
    template <int N>
    __device__ __forceinline__ void along_keys(KeepMask (&kept)[N], unsigned long long seed_value, unsigned i,
                                               unsigned j) const {
        const unsigned thread = thread_index_x(), g = thread % 32 / 4, q = thread % 4;
        unsigned words[N][4];
        draw(words, seed_value, i, j, (2 * q + g % 2) * 4 + g / 2);
        const unsigned low = 0x5410,
                       high = 0x7632;  // selectors of __byte_perm: the low, or high, half-words of both words
        const unsigned own = g % 2 ? high : low, other = g % 2 ? low : high;
        const unsigned first = g % 2 ? 0x1054 : 0x5410,
                       second = g % 2 ? 0x3276 : 0x7632;  // own bits belong to query 2q + g % 2
#pragma unroll
        for (int n = 0; n < N; ++n) {
            kept[n].threshold = threshold;
#pragma unroll
            for (int k = 0; k < 2; ++k) {                                     // keys g + 8k
                const unsigned a = words[n][2 * k], b = words[n][2 * k + 1];  // queries 0 .. 7, queries 8 .. 15
                const unsigned used = __byte_perm(a, b, own);
                const unsigned received = __shfl_xor_sync(0xffffffffu, __byte_perm(a, b, other), 4);
                kept[n].word[k] = __byte_perm(used, received, first);
                kept[n].word[k + 2] = __byte_perm(used, received, second);
            }
        }
    }

  private:
    // The random words of lane `lane` for N blocks, adjacent along the keys.
    template <int N>
    __device__ __forceinline__ void draw(unsigned (&words)[N][4], unsigned long long seed_value, unsigned i, unsigned j,
                                         unsigned lane) const {
#pragma unroll
        for (int n = 0; n < N; ++n)
            words[n][0] = i / 16 * 32 + lane, words[n][1] = j / 16 + n, words[n][2] = h, words[n][3] = b;
        philox(words, seed_value);
    }
};
