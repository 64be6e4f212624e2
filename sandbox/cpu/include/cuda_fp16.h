// cuda_fp16.h of the CPU backend.
#pragma once
#include "half_types.h"

SANDBOX_HALF_TYPE(__half, __half2, cpu::half_to_float, cpu::float_to_half)
using half = __half;
using half2 = __half2;

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return __half(f); }
inline __half __float2half_rn(float f) { return __half(f); }
inline __half2 __floats2half2_rn(float low, float high) { return {__half(low), __half(high)}; }
inline __half2 __float22half2_rn(float2 f) { return {__half(f.x), __half(f.y)}; }
inline __half2 __float2half2_rn(float f) { return {__half(f), __half(f)}; }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline __half2 __halves2half2(__half low, __half high) { return {low, high}; }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline unsigned short __half_as_ushort(__half h) { return h.__x; }
inline __half __ushort_as_half(unsigned short x) { return cpu::bits<__half>(x); }
