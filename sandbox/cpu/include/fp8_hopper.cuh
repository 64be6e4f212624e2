// kernels_cu/include/fp8_hopper.cuh for the CPU backend: the same functions.
#pragma once
#include "fp8.cuh"
#include "hopper.cuh"

namespace cpu {
template <class T>
constexpr Format FORMAT = IS_E5M2<T> ? Format::e5m2 : Format::e4m3;
}

template <class T, int R>
inline void wgmma8(float (&d)[R], Descriptor a, Descriptor b, bool accumulate, SANDBOX_SITE) {
    const cpu::Product mine{d, nullptr, a.bits(), b.bits(), 2 * R, true, true, accumulate, cpu::FORMAT<T>};
    cpu::sandbox_wgmma(&mine, site);
}
template <class T, int R>
inline void wgmma8(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate, SANDBOX_SITE) {
    const cpu::Product mine{d, a, 0, b.bits(), 2 * R, true, true, accumulate, cpu::FORMAT<T>};
    cpu::sandbox_wgmma(&mine, site);
}
