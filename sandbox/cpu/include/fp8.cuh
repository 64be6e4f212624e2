// kernels_cu/include/fp8.cuh for the CPU backend: the same functions, lane by lane.
#pragma once
#include "ptx.cuh"

template <class T>
constexpr bool IS_E5M2 = false;
template <>
constexpr bool IS_E5M2<__nv_fp8_e5m2> = true;
constexpr float P_MAX = IS_E5M2<dtype_v> ? 57344.0f : 448.0f, LOG2_P_MAX = IS_E5M2<dtype_v> ? 15.8073549f : 8.80735492f;

template <class T>
inline unsigned pack4(float x0, float x1, float x2, float x3) {
    return T(x0).__x | unsigned(T(x1).__x) << 8 | unsigned(T(x2).__x) << 16 | unsigned(T(x3).__x) << 24;
}

template <class T>
inline void mma_m16n8k32(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SANDBOX_SITE) {
    const uint64_t mine[3] = {a[0] | uint64_t(a[2]) << 32, a[1] | uint64_t(a[3]) << 32, b0 | uint64_t(b1) << 32};
    uint64_t all[3][32];
    for (int i = 0; i < 3; ++i)
        memcpy(all[i], cpu::sandbox_collective(cpu::Collective::mma, 0xffffffffu, mine[i], site), sizeof all[i]);
    const int g = int(cpu::sandbox_self->lane) / 4, q = int(cpu::sandbox_self->lane) % 4;
    for (int i = 0; i < 4; ++i) {
        float sum = 0.0f;
        for (int k = 0; k < 32; ++k) {  // element k of a row is in lane k % 16 / 4, register k / 16, byte k % 4
            const int place = 32 * (k / 16) + 8 * (k % 4);
            const uint64_t row = all[i / 2][4 * g + k % 16 / 4] >> place;
            const uint64_t col = all[2][4 * (2 * q + i % 2) + k % 16 / 4] >> place;
            sum += to_float(cpu::bits<T>(static_cast<unsigned char>(row))) *
                   to_float(cpu::bits<T>(static_cast<unsigned char>(col)));
        }
        c[i] += sum;
    }
}

inline unsigned even_column(unsigned keys, unsigned keys_8) { return __byte_perm(keys, keys_8, 0x6420); }
inline unsigned odd_column(unsigned keys, unsigned keys_8) { return __byte_perm(keys, keys_8, 0x7531); }

inline unsigned pack_halves(float low, float high) {
    return cpu::float_to_half(low) | unsigned(cpu::float_to_half(high)) << 16;
}
template <class T>
inline void bytes_as_halves(unsigned bytes, unsigned (&pairs)[2]) {
    const auto number = [&](int byte) { return to_float(cpu::bits<T>(static_cast<unsigned char>(bytes >> 8 * byte))); };
    for (int i = 0; i < 2; ++i) pairs[i] = pack_halves(number(2 * i), number(2 * i + 1));
}
inline float2 halves_as_floats(unsigned halves) {
    return {cpu::half_to_float(halves & 0xffffu), cpu::half_to_float(halves >> 16)};
}
template <class T>
inline void columns_as_halves(unsigned keys, unsigned& even, unsigned& odd) {
    unsigned pairs[2];
    bytes_as_halves<T>(__byte_perm(keys, 0, 0x3120), pairs);
    even = pairs[0], odd = pairs[1];
}
inline void mma_m16n8k16_halves(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, SANDBOX_SITE) {
    cpu::multiply_16(c, a, b0, b1, site,
                     [](unsigned pair, int which) { return cpu::half_to_float(pair >> 16 * which & 0xffffu); });
}

inline void store4(dtype_o* to, float x0, float x1, float x2, float x3) {
    const float x[4] = {x0, x1, x2, x3};
    for (int i = 0; i < 4; ++i) to[i] = dtype_o(x[i]);
}
