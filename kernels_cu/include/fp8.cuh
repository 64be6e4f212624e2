// What tensor-core kernels of float8 (sm_89 and later) use beside ptx.cuh. The CPU backend has a twin of this file,
// sandbox/cpu/include/fp8.cuh. Fragments as those of 16 bits in ptx.cuh, four elements in each register instead of two:
// clang-format off
//
//   A (16 x 32)                                    B (32 x 8)
//   a0: row g,     columns 4q .. 4q + 3            b0: rows 4q .. 4q + 3,           column g
//   a1: row g + 8, the same                        b1: rows 4q + 16 .. 4q + 19,     column g
//   a2, a3: the same, columns 4q + 16 ..           g = lane / 4, q = lane % 4
//
// clang-format on
// An accumulator of S is not that: a lane has columns 2q and 2q + 1 of each 8. But the order in which P V sums over the keys is
// free. Where 16 keys are taken in the order SLOTS
//
//   0 1 8 9   2 3 10 11   4 5 12 13   6 7 14 15
//
// in P and in V alike, the lane's own scores are its part of the A operand, and P needs no shuffle (FlashAttention-3, section
// 3.3). V has to be transposed for the B operand, in which keys are neighbours; the bytes of a pair of columns, which
// ldmatrix.trans keeps together, are parted on the way, and the keys come out in that very order.
#pragma once
#include <ptx.cuh>  // along the include path: on the CPU backend its twin

template <class T>
constexpr bool IS_E5M2 = false;
template <>
constexpr bool IS_E5M2<__nv_fp8_e5m2> = true;

// What P = 1 is multiplied by before it is rounded to V's type: the largest number there is, and its logarithm.
constexpr float P_MAX = IS_E5M2<dtype_v> ? 57344.0f : 448.0f, LOG2_P_MAX = IS_E5M2<dtype_v> ? 15.8073549f : 8.80735492f;

// Four floats rounded to T in one register, the first in the lowest byte.
template <class T>
__device__ __forceinline__ unsigned pack4(float x0, float x1, float x2, float x3) {
    unsigned packed;
    if (IS_E5M2<T>)
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e5m2x2.f32 low, %2, %1;\ncvt.rn.satfinite.e5m2x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}" : "=r"(packed) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    else
        asm("{\n.reg .b16 low, high;\ncvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\ncvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
            "mov.b32 %0, {low, high};\n}" : "=r"(packed) : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
    return packed;
}

// C += A B, both of T, in fp32.
template <class T>
__device__ __forceinline__ void mma_m16n8k32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    if (IS_E5M2<T>)
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};" : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers of T, of what ldmatrix_x4_trans gives for keys 2q, 2q + 1 and for 8 keys on, of columns 2g and 2g + 1 each: four
// keys in the order SLOTS of one column, the even or the odd.
__device__ __forceinline__ unsigned even_column(unsigned keys, unsigned keys_8) { return __byte_perm(keys, keys_8, 0x6420); }
__device__ __forceinline__ unsigned odd_column(unsigned keys, unsigned keys_8) { return __byte_perm(keys, keys_8, 0x7531); }

// For products of 16 bits with V: two floats rounded to halves, the first in the low half of the register; and of what
// ldmatrix_x4_trans gives for keys 2q and 2q + 1, columns 2g and 2g + 1 each, those of the even column and of the odd one. Exact.
__device__ __forceinline__ unsigned pack_halves(float low, float high) {
    unsigned packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
template <class T>
__device__ __forceinline__ void columns_as_halves(unsigned keys, unsigned& even, unsigned& odd) {
    const unsigned columns = __byte_perm(keys, 0, 0x3120);
    if (IS_E5M2<T>)
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e5m2x2 %0, low;\ncvt.rn.f16x2.e5m2x2 %1, high;\n}"
            : "=r"(even), "=r"(odd) : "r"(columns));
    else
        asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
            : "=r"(even), "=r"(odd) : "r"(columns));
}

// Four neighbouring elements of O, at a multiple of their size.
__device__ __forceinline__ void store4(dtype_o* to, float x0, float x1, float x2, float x3) {
#if defined(DTYPE_O_float32)
    *reinterpret_cast<float4*>(to) = make_float4(x0, x1, x2, x3);
#else
    *reinterpret_cast<uint2*>(to) = make_uint2(pack(x0, x1), pack(x2, x3));
#endif
}
