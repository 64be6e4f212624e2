// Functions of the float8 tensor-core kernels (sm_89 and later), in addition to ptx.cuh. The CPU backend has the same
// ones in sandbox/cpu/include/fp8.cuh. Fragments as in ptx.cuh, with four elements per register instead of two:
// clang-format off
//
//   A (16 x 32)                                    B (32 x 8)
//   a0: row g,     columns 4q .. 4q + 3            b0: rows 4q .. 4q + 3,           column g
//   a1: row g + 8, the same                        b1: rows 4q + 16 .. 4q + 19,     column g
//   a2, a3: the same, columns 4q + 16 ..           g = lane / 4, q = lane % 4
//
// clang-format on
// The accumulator of S has another layout: a lane has columns 2q and 2q + 1 of each 8. But the order in which P V sums
// over the keys is arbitrary. With every 16 keys in the order SLOTS, in P and in V,
//
//   0 1 8 9   2 3 10 11   4 5 12 13   6 7 14 15
//
// a lane's scores are its part of the A operand, and P needs no shuffle (FlashAttention-3, section 3.3). V is
// transposed for the B operand, in which keys are contiguous: ldmatrix.trans keeps the two bytes of a pair of columns
// together, a byte permutation separates them, and the keys come out in the order SLOTS.
#pragma once
#include <ptx.cuh>  // angle brackets: the CPU backend has its own

template <class T>
constexpr bool IS_E5M2 = false;
template <>
constexpr bool IS_E5M2<__nv_fp8_e5m2> = true;

// P is multiplied by P_MAX, the largest number of V's type, before it is rounded to that type; and its binary
// logarithm.
constexpr float P_MAX = IS_E5M2<dtype_v> ? 57344.0f : 448.0f, LOG2_P_MAX = IS_E5M2<dtype_v> ? 15.8073549f : 8.80735492f;

// Four floats, rounded to T, in one register; the first in the lowest byte.
template <class T>
__device__ __forceinline__ unsigned pack4(float x0, float x1, float x2, float x3) {
    unsigned packed;
    if (IS_E5M2<T>)
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}"
            : "=r"(packed)
            : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    else
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
            "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}"
            : "=r"(packed)
            : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return packed;
}

// C += A B in fp32; A and B are of type T.
template <class T>
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (IS_E5M2<T>)
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Input: results of ldmatrix_x4_trans for keys 2q, 2q + 1, and for the keys 8 further, each with columns 2g and 2g + 1.
// Output: four keys of the even or odd column, in the order SLOTS.
__device__ __forceinline__ unsigned even_column(unsigned keys, unsigned keys_8) {
    return __byte_perm(keys, keys_8, 0x6420);
}
__device__ __forceinline__ unsigned odd_column(unsigned keys, unsigned keys_8) {
    return __byte_perm(keys, keys_8, 0x7531);
}

// C += A B of halves with fp32 accumulation, whatever dtype is.
__device__ __forceinline__ void mma_m16n8k16_halves(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Bytes 0 and 1, and bytes 2 and 3, as pairs of halves (exact).
template <class T>
__device__ __forceinline__ void bytes_as_halves(unsigned bytes, unsigned (&pairs)[2]) {
    if (IS_E5M2<T>)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e5m2x2 %0, low;\ncvt.rn.f16x2.e5m2x2 %1, high;\n}"
            : "=r"(pairs[0]), "=r"(pairs[1])
            : "r"(bytes));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
            "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
            : "=r"(pairs[0]), "=r"(pairs[1])
            : "r"(bytes));
}
__device__ __forceinline__ float2 halves_as_floats(unsigned halves) {
    float2 x;
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
        : "=f"(x.x), "=f"(x.y)
        : "r"(halves));
    return x;
}

// For 16-bit products with V. pack_halves: two floats as halves, the first in the low half of the register.
// columns_as_halves: the even and the odd column of an ldmatrix_x4_trans result as pairs of halves (exact).
__device__ __forceinline__ unsigned pack_halves(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <class T>
__device__ __forceinline__ void columns_as_halves(unsigned keys, unsigned& even, unsigned& odd) {
    unsigned pairs[2];
    bytes_as_halves<T>(__byte_perm(keys, 0, 0x3120), pairs);
    even = pairs[0], odd = pairs[1];
}

// Stores four adjacent elements of O, aligned to their total size.

__device__ __forceinline__ void store4(dtype_o* to, float x0, float x1, float x2, float x3) {
#if defined(DTYPE_O_float32)
    *reinterpret_cast<float4*>(to) = make_float4(x0, x1, x2, x3);
#else
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(x0, x1), pack(x2, x3));
#endif
}
