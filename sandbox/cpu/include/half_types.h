// __half and __nv_bfloat16 in software, with the conversions and operations of cuda_fp16.h and cuda_bf16.h that kernels
// use. Conversions round to nearest even. Arithmetic is computed in float and rounded: add, sub, mul and div are
// bit-equal to the hardware (float has more than twice the precision), except for subnormal bfloat16. An fma may differ
// in the last bit.
#pragma once

namespace cpu {

inline float half_to_float(unsigned short h) {
    const unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31u, fraction = h & 0x3ffu;
    if (exponent == 31) return bits<float>(sign | 0x7f800000u | fraction << 13);  // inf, NaN
    if (exponent) return bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
    const float magnitude = float(fraction) * 5.9604644775390625e-8f;  // subnormal: fraction * 2^-24
    return sign ? -magnitude : magnitude;
}

inline unsigned short float_to_half(float f) {
    const unsigned x = bits<unsigned>(f), sign = x >> 16 & 0x8000u, magnitude = x & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fff;           // NaN, canonical as on the GPU
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u;  // rounds to inf
    if (magnitude < 0x38800000u)                          // subnormal or zero: the float addition rounds at 2^-24
        return sign | (bits<unsigned>(bits<float>(magnitude) + 0.5f) - bits<unsigned>(0.5f));
    const unsigned odd = magnitude >> 13 & 1u;
    return sign | ((magnitude - (112u << 23) + 0xfffu + odd) >> 13);
}

inline float bfloat16_to_float(unsigned short b) { return bits<float>(unsigned(b) << 16); }

inline unsigned short float_to_bfloat16(float f) {
    const unsigned x = bits<unsigned>(f);
    if ((x & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
    return (x + 0x7fffu + (x >> 16 & 1u)) >> 16;
}

}  // namespace cpu

#define SANDBOX_HALF_TYPE(H, H2, to_float, from_float)                                             \
    struct __attribute__((aligned(2))) H {                                                         \
        unsigned short __x;                                                                        \
        H() = default;                                                                             \
        H(float f) : __x(from_float(f)) {}                                                         \
        H(double f) : __x(from_float(float(f))) {}                                                 \
        H(int i) : __x(from_float(float(i))) {}                                                    \
        H(unsigned i) : __x(from_float(float(i))) {}                                               \
        H(long long i) : __x(from_float(float(i))) {}                                              \
        operator float() const { return to_float(__x); }                                           \
        H& operator+=(H b) { return *this = H(float(*this) + float(b)); }                          \
        H& operator-=(H b) { return *this = H(float(*this) - float(b)); }                          \
        H& operator*=(H b) { return *this = H(float(*this) * float(b)); }                          \
    };                                                                                             \
    struct __attribute__((aligned(4))) H2 {                                                        \
        H x, y;                                                                                    \
    };                                                                                             \
    inline H operator+(H a, H b) { return H(float(a) + float(b)); }                                \
    inline H operator-(H a, H b) { return H(float(a) - float(b)); }                                \
    inline H operator*(H a, H b) { return H(float(a) * float(b)); }                                \
    inline H operator/(H a, H b) { return H(float(a) / float(b)); }                                \
    inline H operator-(H a) { return H(-float(a)); }                                               \
    inline bool operator<(H a, H b) { return float(a) < float(b); }                                \
    inline bool operator>(H a, H b) { return float(a) > float(b); }                                \
    inline bool operator<=(H a, H b) { return float(a) <= float(b); }                              \
    inline bool operator>=(H a, H b) { return float(a) >= float(b); }                              \
    inline bool operator==(H a, H b) { return float(a) == float(b); }                              \
    inline bool operator!=(H a, H b) { return float(a) != float(b); }                              \
    inline H __hadd(H a, H b) { return a + b; }                                                    \
    inline H __hsub(H a, H b) { return a - b; }                                                    \
    inline H __hmul(H a, H b) { return a * b; }                                                    \
    inline H __hfma(H a, H b, H c) { return H(fmaf(a, b, c)); }                                    \
    inline H __hneg(H a) { return -a; }                                                            \
    inline H __hmax(H a, H b) { return H(fmaxf(a, b)); }                                           \
    inline H __hmin(H a, H b) { return H(fminf(a, b)); }                                           \
    inline bool __hisnan(H a) { return float(a) != float(a); }                                     \
    inline H2 __hadd2(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                               \
    inline H2 __hsub2(H2 a, H2 b) { return {a.x - b.x, a.y - b.y}; }                               \
    inline H2 __hmul2(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                               \
    inline H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; } \
    inline float __low2float(H2 a) { return a.x; }                                                 \
    inline float __high2float(H2 a) { return a.y; }
