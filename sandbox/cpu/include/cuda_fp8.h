// cuda_fp8.h of the CPU backend: __nv_fp8_e4m3 (largest value 448, NaN, no infinity) and __nv_fp8_e5m2 in software.
// Conversions from float round to nearest even and saturate, as in CUDA; NaN stays NaN.
#pragma once
#include "half_types.h"

namespace cpu {

inline float e4m3_to_float(unsigned char x) {
    const unsigned sign = (x & 0x80u) << 24, exponent = x >> 3 & 15u, fraction = x & 7u;
    if ((x & 0x7fu) == 0x7fu) return bits<float>(sign | 0x7fc00000u);
    if (exponent) return bits<float>(sign | (exponent + 120) << 23 | fraction << 20);
    const float magnitude = float(fraction) * 0.001953125f;  // subnormal: fraction * 2^-9
    return sign ? -magnitude : magnitude;
}
inline float e5m2_to_float(unsigned char x) { return half_to_float(static_cast<unsigned short>(x << 8)); }

// FRACTION: bits of the fraction; OFFSET: exponent bias; LARGEST: code of the largest finite value.
template <unsigned FRACTION, unsigned OFFSET, unsigned LARGEST>
inline unsigned char float_to_fp8(float f) {
    const unsigned x = bits<unsigned>(f), sign = x >> 24 & 0x80u, magnitude = x & 0x7fffffffu;
    constexpr unsigned SHIFT = 23 - FRACTION, REBIAS = (127 - OFFSET) << FRACTION;
    if (magnitude > 0x7f800000u) return 0x7f;  // NaN, canonical as on the GPU
    if (magnitude >= (LARGEST + REBIAS) << SHIFT) return static_cast<unsigned char>(sign | LARGEST);
    if (magnitude < (128 - OFFSET) << 23) {  // subnormal: the float addition rounds
        const float step =
            bits<float>((127 - OFFSET + 1 + SHIFT) << 23);  // step: last place equal to that of subnormals
        return static_cast<unsigned char>(sign |
                                          (bits<unsigned>(bits<float>(magnitude) + step) - bits<unsigned>(step)));
    }
    const unsigned rounded = (magnitude + (1u << (SHIFT - 1)) - 1 + (magnitude >> SHIFT & 1u)) >> SHIFT;
    return static_cast<unsigned char>(sign | (rounded - REBIAS));
}
inline unsigned char float_to_e4m3(float f) { return float_to_fp8<3, 7, 0x7e>(f); }
inline unsigned char float_to_e5m2(float f) { return float_to_fp8<2, 15, 0x7b>(f); }

}  // namespace cpu

#define SANDBOX_FP8_TYPE(T, to_float, from_float)                 \
    struct T {                                                    \
        unsigned char __x;                                        \
        T() = default;                                            \
        explicit T(float f) : __x(from_float(f)) {}               \
        explicit T(double f) : __x(from_float(float(f))) {}       \
        explicit operator float() const { return to_float(__x); } \
    };
SANDBOX_FP8_TYPE(__nv_fp8_e4m3, cpu::e4m3_to_float, cpu::float_to_e4m3)
SANDBOX_FP8_TYPE(__nv_fp8_e5m2, cpu::e5m2_to_float, cpu::float_to_e5m2)
#undef SANDBOX_FP8_TYPE
