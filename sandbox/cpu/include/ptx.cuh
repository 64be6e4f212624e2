// kernels_cu/include/ptx.cuh for the CPU backend: the same functions, lane by lane. A warp-wide instruction is a
// collective of the runtime: it exchanges the registers of the lanes and reports lanes that do not reach it.
#pragma once
#include "reduce.cuh"

using SmemAddr = char*;

#if !defined(CHECKED_KERNELS)
#define CHECKED_KERNELS 1  // 0: as on a GPU, where kernels clamp the values that `require` checks
#endif
constexpr bool CHECKED = CHECKED_KERNELS;
inline void require(bool holds, const char* otherwise, SANDBOX_SITE) {
    if (!holds) cpu::sandbox_trap(otherwise, site);
}

inline SmemAddr smem_address(const void* p) { return static_cast<char*>(const_cast<void*>(p)); }

inline unsigned block_index_x() { return blockIdx.x; }
inline unsigned block_index_y() { return blockIdx.y; }
inline unsigned opaque(unsigned x) { return x; }
inline unsigned thread_index_x() { return threadIdx.x; }
inline unsigned grid_size_x() { return gridDim.x; }

inline int max3(int a, int b, int c) { return max(max(a, b), c); }

namespace cpu {

// The 16-bit elements (row, column) and (row, column + 1), or transposed (column, row) and (column + 1, row), of an
// 8 x 8 matrix whose row i begins at rows[i].
inline unsigned matrix_pair(const uint64_t* rows, int row, int column, bool transposed) {
    unsigned short pair[2];
    for (int i = 0; i < 2; ++i) {
        const int r = transposed ? column + i : row, c = transposed ? row : column + i;
        memcpy(&pair[i], reinterpret_cast<const char*>(rows[r]) + 2 * c, 2);
    }
    return pair[0] | unsigned(pair[1]) << 16;
}

inline void load_matrices(unsigned (&r)[4], SmemAddr row, bool transposed, Site site) {
    if (reinterpret_cast<uint64_t>(row) % 16)
        sandbox_trap("ldmatrix from an address that is not a multiple of 16", site);
    const uint64_t* rows = sandbox_collective(Collective::ldmatrix, 0xffffffffu, reinterpret_cast<uint64_t>(row), site);
    const int lane = int(sandbox_self->lane);
    for (int matrix = 0; matrix < 4; ++matrix) {
        r[matrix] = matrix_pair(rows + 8 * matrix, lane / 4, lane % 4 * 2, transposed);
    }
}

inline float element(unsigned pair, int which) {
#if defined(DTYPE_bfloat16)
    return bfloat16_to_float(pair >> 16 * which & 0xffffu);
#elif defined(DTYPE_float16) || FLOAT8
    return half_to_float(pair >> 16 * which & 0xffffu);
#else
    return 0.0f;  // no tensor-core kernel takes fp32
#endif
}

}  // namespace cpu

inline void ldmatrix_x4(unsigned (&r)[4], SmemAddr row, SANDBOX_SITE) { cpu::load_matrices(r, row, false, site); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], SmemAddr row, SANDBOX_SITE) { cpu::load_matrices(r, row, true, site); }

inline unsigned movmatrix_trans(unsigned pair, SANDBOX_SITE) {
    const int lane = int(cpu::sandbox_self->lane), row = lane / 4, column = lane % 4 * 2;
    unsigned transposed = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned found = __shfl_sync(0xffffffffu, pair, (column + i) * 4 + row / 2, 32, site);
        transposed |= (found >> row % 2 * 16 & 0xffffu) << 16 * i;
    }
    return transposed;
}

inline uint2 load_shared_8(SmemAddr from, SANDBOX_SITE) {
    if (reinterpret_cast<uint64_t>(from) % 8)
        cpu::sandbox_trap("a load of 8 bytes from an address that is not a multiple of 8", site);
    uint2 x;
    memcpy(&x, from, sizeof x);
    return x;
}

namespace cpu {
// C += A B of elements that `element(pair, which)` converts to fp32.
template <class Element>
inline void multiply_16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Site site, Element element) {
    // Exchange two registers at a time: rows g and g + 8 of A, and B, of all lanes.
    const uint64_t mine[3] = {a[0] | uint64_t(a[2]) << 32, a[1] | uint64_t(a[3]) << 32, b0 | uint64_t(b1) << 32};
    uint64_t all[3][32];
    for (int i = 0; i < 3; ++i) {
        memcpy(all[i], sandbox_collective(Collective::mma, 0xffffffffu, mine[i], site), sizeof all[i]);
    }
    const int g = int(sandbox_self->lane) / 4, q = int(sandbox_self->lane) % 4;
    for (int i = 0; i < 4; ++i) {
        const int column = 2 * q + i % 2;
        float sum = 0.0f;
        for (int k = 0; k < 16; ++k) {  // element k of a row is in lane k % 8 / 2, register k / 8, half k % 2
            const uint64_t row = all[i / 2][4 * g + k % 8 / 2], col = all[2][4 * column + k % 8 / 2];
            sum += element(unsigned(row >> 32 * (k / 8)), k % 2) * element(unsigned(col >> 32 * (k / 8)), k % 2);
        }
        c[i] += sum;
    }
}
}  // namespace cpu

inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SANDBOX_SITE) {
    cpu::multiply_16(c, a, b0, b1, site, [](unsigned pair, int which) { return cpu::element(pair, which); });
}

inline unsigned signs_of_halves(unsigned x) { return (x >> 15 & 0x10001) * 0xffff; }

inline unsigned pack(float low, float high) {
#if defined(DTYPE_bfloat16) || defined(DTYPE_O_bfloat16)
    return cpu::float_to_bfloat16(low) | unsigned(cpu::float_to_bfloat16(high)) << 16;
#elif defined(DTYPE_float16) || defined(DTYPE_O_float16)
    return cpu::float_to_half(low) | unsigned(cpu::float_to_half(high)) << 16;
#else
    return 0;
#endif
}

inline float2 unpack(unsigned packed) { return {cpu::element(packed, 0), cpu::element(packed, 1)}; }
inline float ex2(float x) { return exp2f(x); }
inline float lg2(float x) { return log2f(x); }
inline float reciprocal(float x) { return 1.0f / x; }
inline float tanh_approx(float x) {  // exact, then rounded to 11 bits, the precision of the hardware
    const float y = tanhf(x), coarse = y * 8193.0f;
    return coarse - (coarse - y);
}

// Inlined, so that the return address that the deferred copy records is in the caller.
template <bool WHOLE_LINE = false>
__forceinline__ void cp_async_16(SmemAddr to, const void* from, bool valid, SANDBOX_SITE) {
    if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 16) {
        cpu::sandbox_trap("cp.async of 16 bytes between addresses that are not multiples of 16", site);
    }
    cpu::sandbox_cp_async(to, from, 16, valid ? 16 : 0);
}
__forceinline__ void cp_async_4(SmemAddr to, const void* from, bool valid, SANDBOX_SITE) {
    if ((reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from)) % 4) {
        cpu::sandbox_trap("cp.async of 4 bytes between addresses that are not multiples of 4", site);
    }
    cpu::sandbox_cp_async(to, from, 4, valid ? 4 : 0);
}
inline void cp_async_commit() { cpu::sandbox_cp_async_commit(); }
template <int PENDING>
inline void cp_async_wait() {
    cpu::sandbox_cp_async_wait(PENDING);
}

inline void prefetch_L2(const void*) {}
inline void prefetch_L1(const void*) {}
inline void griddepcontrol_launch_dependents() {}  // entries run one after the other
inline void griddepcontrol_wait() {}

inline void add_fragment(float* to, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i) atomicAdd(to + 4 * (threadIdx.x % 32) + i, x[i]);  // as on Hopper
}
inline void load_fragment_rows(float (&rows)[2][8], const float* from, unsigned g) {
    for (int i = 0; i < 16; ++i) rows[i / 2 % 2][i / 4 * 2 + i % 2] = from[16 * g + i];
}
