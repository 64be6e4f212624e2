// CUDA C++ for the host compiler: the declarations that a `.cu` file can use without an include, as in NVRTC.
//
// The generated translation unit consists of this header, the unmodified `.cu`, the dynamic shared memory, and
// SANDBOX_ENTRY. Functions that may report an error take the file and line of the call as a default argument
// (SANDBOX_SITE).
#pragma once
#if __has_include(<bits/c++config.h>)
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS  // the C headers: libstdc++'s wrappers take 0.1 s to parse
#define SANDBOX_OVERLOADS
#endif
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "../runtime.h"

#define __global__ __attribute__((unused))
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))  // glibc's headers use this name: do not include them below
#define __launch_bounds__(...)                  // see SANDBOX_ENTRY
#define __align__(n) __attribute__((aligned(n)))
#define alignas(n) __align__(n)  // valid in any position: `__shared__ alignas(128) float a[4];`
#define __shared__ thread_local  // an OS thread runs one block at a time; `extern` arrays: see SANDBOX_DYNAMIC
#define __CUDA_ARCH__ 900
#define SANDBOX_CPU 1  // for code that depends on the backend

#define SANDBOX_SITE const cpu::Site site = {__builtin_FILE(), __builtin_LINE()}

#define threadIdx (cpu::sandbox_self->thread_idx)
#define blockIdx (cpu::sandbox_self->block_idx)
#define blockDim (cpu::sandbox_self->block_dim)
#define gridDim (cpu::sandbox_self->grid_dim)
constexpr int warpSize = 32;

// ---- barriers and fences

inline void __syncthreads(SANDBOX_SITE) { cpu::sandbox_barrier(site); }
inline int __syncthreads_or(int predicate, SANDBOX_SITE) { return cpu::sandbox_barrier_or(predicate != 0, site); }
inline void __syncwarp(unsigned mask = 0xffffffffu, SANDBOX_SITE) {
    cpu::sandbox_collective(cpu::Collective::syncwarp, mask, 0, site);
}
inline void __threadfence() { cpu::sandbox_fence(); }
inline void __threadfence_block() { cpu::sandbox_fence(); }
[[noreturn]] inline void __trap(SANDBOX_SITE) { cpu::sandbox_trap("__trap()", site); }
#ifdef NDEBUG
#define assert(condition) ((void)0)
#else
#define assert(condition) ((condition) ? (void)0 : cpu::sandbox_trap("assert(" #condition ")", {__FILE__, __LINE__}))
#endif

// ---- shuffles and votes

namespace cpu {

template <class To, class From>
inline To bits(From from) {  // copies the low-order bytes
    To to{};
    memcpy(&to, &from, sizeof(To) < sizeof(From) ? sizeof(To) : sizeof(From));
    return to;
}

[[noreturn]] inline void wrong_source(unsigned mask, int source, Site site) {
    char reason[128];
    snprintf(reason, sizeof reason,
             "lane %u shuffles from lane %d, which is not in the mask 0x%08x or not in the block", sandbox_self->lane,
             source, mask);
    sandbox_trap(reason, site);
}

// The value of lane `source` of the group of `width` lanes; this lane's own value if `source` is outside of the group.
template <class T>
inline T shuffle(Collective what, unsigned mask, T mine, int source, int width, Site site) {
    static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
    const uint64_t* values = sandbox_collective(what, mask, bits<uint64_t>(mine), site);
    const int lane = int(sandbox_self->lane), first = lane & ~(width - 1);
    if (what == Collective::shfl) source = first + (source & (width - 1));
    // An xor may read earlier groups, but not later ones.
    if ((source < first && what != Collective::shfl_xor) || source >= first + width) return mine;
    if (!(mask & sandbox_self->warp_mask & 1u << source)) wrong_source(mask, source, site);
    return bits<T>(values[source]);
}

template <class F>
inline void for_lanes(unsigned mask, const uint64_t* values, F f) {
    mask &= sandbox_self->warp_mask;
    for (int lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) f(lane, values[lane]);
}

inline unsigned ballot(Collective what, unsigned mask, bool predicate, Site site) {
    unsigned result = 0;
    for_lanes(mask, sandbox_collective(what, mask, predicate, site),
              [&](int lane, uint64_t value) { result |= unsigned(value) << lane; });
    return result;
}

template <class T, class F>
inline T reduce(unsigned mask, T mine, F f, Site site) {
    bool first = true;
    T result{};
    for_lanes(mask, sandbox_collective(Collective::reduce, mask, bits<uint64_t>(mine), site), [&](int, uint64_t value) {
        result = first ? bits<T>(value) : f(result, bits<T>(value));
        first = false;
    });
    return result;
}

}  // namespace cpu

template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32, SANDBOX_SITE) {
    return cpu::shuffle(cpu::Collective::shfl, mask, value, source, width, site);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, SANDBOX_SITE) {
    return cpu::shuffle(cpu::Collective::shfl_up, mask, value, int(cpu::sandbox_self->lane) - int(delta), width, site);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, SANDBOX_SITE) {
    return cpu::shuffle(cpu::Collective::shfl_down, mask, value, int(cpu::sandbox_self->lane + delta), width, site);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, SANDBOX_SITE) {
    return cpu::shuffle(cpu::Collective::shfl_xor, mask, value, int(cpu::sandbox_self->lane) ^ lanes, width, site);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, SANDBOX_SITE) {
    return cpu::ballot(cpu::Collective::ballot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, SANDBOX_SITE) {
    return cpu::ballot(cpu::Collective::any, mask, predicate != 0, site) != 0;
}
inline int __all_sync(unsigned mask, int predicate, SANDBOX_SITE) {
    return cpu::ballot(cpu::Collective::all, mask, predicate != 0, site) == (mask & cpu::sandbox_self->warp_mask);
}
template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, SANDBOX_SITE) {
    const uint64_t mine = cpu::bits<uint64_t>(value);
    unsigned result = 0;
    cpu::for_lanes(mask, cpu::sandbox_collective(cpu::Collective::match, mask, mine, site),
                   [&](int lane, uint64_t other) { result |= unsigned(other == mine) << lane; });
    return result;
}
#define SANDBOX_REDUCE(name, T, expression)                                              \
    inline T name(unsigned mask, T value, SANDBOX_SITE) {                                \
        return cpu::reduce(mask, value, [](T a, T b) -> T { return expression; }, site); \
    }
SANDBOX_REDUCE(__reduce_add_sync, int, a + b)
SANDBOX_REDUCE(__reduce_add_sync, unsigned, a + b)
SANDBOX_REDUCE(__reduce_max_sync, int, a > b ? a : b)
SANDBOX_REDUCE(__reduce_max_sync, unsigned, a > b ? a : b)
SANDBOX_REDUCE(__reduce_min_sync, int, a < b ? a : b)
SANDBOX_REDUCE(__reduce_min_sync, unsigned, a < b ? a : b)
SANDBOX_REDUCE(__reduce_and_sync, unsigned, a& b)
SANDBOX_REDUCE(__reduce_or_sync, unsigned, a | b)
#undef SANDBOX_REDUCE

// ---- atomics: hardware atomics, because blocks run on several OS threads

namespace cpu {
template <class T, class F>
inline T atomic_update(T* address, F f) {
    T expected = __atomic_load_n(address, __ATOMIC_RELAXED);
    while (!__atomic_compare_exchange_n(address, &expected, f(expected), true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {}
    return expected;
}
template <class Bits, class T>
inline T atomic_add_float(T* address, T value) {
    return bits<T>(
        atomic_update(reinterpret_cast<Bits*>(address), [=](Bits old) { return bits<Bits>(T(bits<T>(old) + value)); }));
}
}  // namespace cpu

inline float atomicAdd(float* address, float value) { return cpu::atomic_add_float<uint32_t>(address, value); }
inline double atomicAdd(double* address, double value) { return cpu::atomic_add_float<uint64_t>(address, value); }
#define SANDBOX_ATOMICS(T)                                                                       \
    inline T atomicAdd(T* p, T v) { return __atomic_fetch_add(p, v, __ATOMIC_RELAXED); }         \
    inline T atomicSub(T* p, T v) { return __atomic_fetch_sub(p, v, __ATOMIC_RELAXED); }         \
    inline T atomicAnd(T* p, T v) { return __atomic_fetch_and(p, v, __ATOMIC_RELAXED); }         \
    inline T atomicOr(T* p, T v) { return __atomic_fetch_or(p, v, __ATOMIC_RELAXED); }           \
    inline T atomicXor(T* p, T v) { return __atomic_fetch_xor(p, v, __ATOMIC_RELAXED); }         \
    inline T atomicExch(T* p, T v) { return __atomic_exchange_n(p, v, __ATOMIC_RELAXED); }       \
    inline T atomicMax(T* p, T v) {                                                              \
        return cpu::atomic_update(p, [=](T old) { return old > v ? old : v; });                  \
    }                                                                                            \
    inline T atomicMin(T* p, T v) {                                                              \
        return cpu::atomic_update(p, [=](T old) { return old < v ? old : v; });                  \
    }                                                                                            \
    inline T atomicCAS(T* p, T expected, T v) {                                                  \
        __atomic_compare_exchange_n(p, &expected, v, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); \
        return expected;                                                                         \
    }
SANDBOX_ATOMICS(int)
SANDBOX_ATOMICS(unsigned)
SANDBOX_ATOMICS(unsigned long long)
#undef SANDBOX_ATOMICS

// ---- vector types

#define SANDBOX_VECTORS(T, name)                                                                        \
    struct __attribute__((aligned(2 * sizeof(T)))) name##2 { T x, y; };                                 \
    struct name##3 { T x, y, z; };                                                                      \
    struct __attribute__((aligned(4 * sizeof(T) < 16 ? 4 * sizeof(T) : 16))) name##4 { T x, y, z, w; }; \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                          \
    inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                                  \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
SANDBOX_VECTORS(char, char)
SANDBOX_VECTORS(unsigned char, uchar)
SANDBOX_VECTORS(short, short)
SANDBOX_VECTORS(unsigned short, ushort)
SANDBOX_VECTORS(int, int)
SANDBOX_VECTORS(float, float)
SANDBOX_VECTORS(double, double)
SANDBOX_VECTORS(long long, longlong)
SANDBOX_VECTORS(unsigned long long, ulonglong)
#undef SANDBOX_VECTORS
struct __attribute__((aligned(8))) uint2 {
    unsigned x, y;
};
struct __attribute__((aligned(16))) uint4 {
    unsigned x, y, z, w;
};
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// ---- arithmetic. Macros, because glibc declares some of these names (__expf).

#ifdef SANDBOX_OVERLOADS  // float and double overloads, as in NVRTC
#define SANDBOX_UNARY(name) \
    inline float name(float x) { return name##f(x); }
#define SANDBOX_BINARY(name) \
    inline float name(float x, float y) { return name##f(x, y); }
SANDBOX_UNARY(acos)
SANDBOX_UNARY(asin)
SANDBOX_UNARY(atan)
SANDBOX_UNARY(cbrt)
SANDBOX_UNARY(ceil)
SANDBOX_UNARY(cos)
SANDBOX_UNARY(cosh)
SANDBOX_UNARY(erf)
SANDBOX_UNARY(erfc)
SANDBOX_UNARY(exp)
SANDBOX_UNARY(exp2)
SANDBOX_UNARY(expm1)
SANDBOX_UNARY(fabs)
SANDBOX_UNARY(floor)
SANDBOX_UNARY(log)
SANDBOX_UNARY(log10)
SANDBOX_UNARY(log1p)
SANDBOX_UNARY(log2)
SANDBOX_UNARY(rint)
SANDBOX_UNARY(round)
SANDBOX_UNARY(sin)
SANDBOX_UNARY(sinh)
SANDBOX_UNARY(sqrt)
SANDBOX_UNARY(tan)
SANDBOX_UNARY(tanh)
SANDBOX_UNARY(trunc)
SANDBOX_BINARY(atan2)
SANDBOX_BINARY(copysign)
SANDBOX_BINARY(fmax)
SANDBOX_BINARY(fmin)
SANDBOX_BINARY(fmod)
SANDBOX_BINARY(hypot)
SANDBOX_BINARY(pow)
#undef SANDBOX_UNARY
#undef SANDBOX_BINARY
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
#undef isnan
#undef isinf
#undef isfinite
#undef signbit
#define SANDBOX_CLASSIFICATION(T, name)                         \
    inline bool isnan(T x) { return __builtin_isnan(x); }       \
    inline bool isinf(T x) { return __builtin_isinf(x); }       \
    inline bool isfinite(T x) { return __builtin_isfinite(x); } \
    inline bool signbit(T x) { return __builtin_signbit(x); }   \
    inline T abs(T x) { return name(x); }
SANDBOX_CLASSIFICATION(float, fabsf)
SANDBOX_CLASSIFICATION(double, fabs)
#undef SANDBOX_CLASSIFICATION
inline int abs(int x) { return x < 0 ? -x : x; }
inline long abs(long x) { return x < 0 ? -x : x; }
inline long long abs(long long x) { return x < 0 ? -x : x; }
#endif

#define SANDBOX_MIN_MAX(T, A, B)                     \
    inline T min(A a, B b) { return b < a ? b : a; } \
    inline T max(A a, B b) { return a < b ? b : a; }
SANDBOX_MIN_MAX(int, int, int)
SANDBOX_MIN_MAX(unsigned, unsigned, unsigned)
SANDBOX_MIN_MAX(unsigned, int, unsigned)
SANDBOX_MIN_MAX(unsigned, unsigned, int)
SANDBOX_MIN_MAX(long, long, long)
SANDBOX_MIN_MAX(unsigned long, unsigned long, unsigned long)
SANDBOX_MIN_MAX(long long, long long, long long)
SANDBOX_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
#undef SANDBOX_MIN_MAX
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {  // bytes of high:low, selected by nibble
    unsigned found = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = selector >> 4 * i, byte = (nibble & 4 ? high : low) >> 8 * (nibble & 3) & 0xff;
        found |= (nibble & 8 ? byte >> 7 ? 0xff : 0 : byte)
                 << 8 * i;  // bit 3 of the nibble: replicate the sign of the byte
    }
    return found;
}

namespace cpu {
inline float reciprocal(float x) { return 1.0f / x; }
inline float quotient(float x, float y) { return x / y; }
inline float rounded(float x) {  // never part of a fused multiply-add
    asm("" : "+g"(x));
    return x;
}
}  // namespace cpu
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
#define __expf(x) expf(x)
#define __exp10f(x) powf(10.0f, x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __powf(x, y) powf(x, y)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanhf(x) tanhf(x)
#define __fdividef(x, y) cpu::quotient(x, y)
#define __fdiv_rn(x, y) cpu::quotient(x, y)
#define __frcp_rn(x) cpu::reciprocal(x)
#define __fsqrt_rn(x) sqrtf(x)
#define __frsqrt_rn(x) rsqrtf(x)
#define __fadd_rn(x, y) cpu::rounded(cpu::rounded(x) + cpu::rounded(y))
#define __fsub_rn(x, y) cpu::rounded(cpu::rounded(x) - cpu::rounded(y))
#define __fmul_rn(x, y) cpu::rounded((x) * (y))
#define __fmaf_rn(x, y, z) fmaf(x, y, z)

inline float __uint_as_float(unsigned x) { return cpu::bits<float>(x); }
inline float __int_as_float(int x) { return cpu::bits<float>(x); }
inline unsigned __float_as_uint(float x) { return cpu::bits<unsigned>(x); }
inline int __float_as_int(float x) { return cpu::bits<int>(x); }
inline int __float2int_rn(float x) { return int(rintf(x)); }
inline int __float2int_rd(float x) { return int(floorf(x)); }
inline float __int2float_rn(int x) { return float(x); }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= (x >> bit & 1u) << (31 - bit);
    return result;
}
template <class T>
inline T __ldg(const T* address) {
    return *address;
}
template <class T>
inline void __stcs(T* address, T value) {
    *address = value;
}
inline long long clock64() { return 0; }

// ---- entry points

namespace cpu {
template <int... I>
struct Indices {};
template <int N, int... I>
struct MakeIndices : MakeIndices<N - 1, N - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
    using type = Indices<I...>;
};

template <class A>
inline A argument(const void* at) {  // the source may be less aligned than A
    __align__(alignof(A)) char value[sizeof(A)];
    memcpy(value, at, sizeof(A));
    return *reinterpret_cast<A*>(value);
}
template <class... A, int... I>
inline void call(void (*kernel)(A...), void** args, Indices<I...>) {
    kernel(argument<A>(args[I])...);  // by value, as in cuLaunchKernel
}
template <class... A>
inline void call(void (*kernel)(A...), void** args) {
    call(kernel, args, typename MakeIndices<sizeof...(A)>::type());
}
template <class T>
struct Kind {
    static constexpr unsigned value = __is_class(T) || __is_union(T) ? 3 : 1;
};
template <class T>
struct Kind<T*> {
    static constexpr unsigned value = 0;
};
template <>
struct Kind<float> {
    static constexpr unsigned value = 2;
};
template <>
struct Kind<double> {
    static constexpr unsigned value = 2;
};
template <class... A>
inline unsigned parameters(void (*)(A...), unsigned* each) {  // decoded by CpuFunction in launch.py
    const unsigned found[] = {unsigned(sizeof(A)) << 2 | Kind<A>::value..., 0};
    memcpy(each, found, sizeof...(A) * sizeof *each);
    return sizeof...(A);
}
}  // namespace cpu

// All `extern __shared__` arrays are one buffer: each name becomes a linker alias of it.
#define SANDBOX_DYNAMIC(name) \
    asm(".globl " #name "\n.type " #name ", %tls_object\n.set " #name ", sandbox_dynamic_smem\n");
#define SANDBOX_ENTRY(name, bound)                                                \
    extern "C" unsigned sandbox_max_threads_##name() { return unsigned(bound); }  \
    extern "C" void sandbox_entry_##name(void** args) { cpu::call(&name, args); } \
    extern "C" unsigned sandbox_parameters_##name(unsigned* sandbox_each) {       \
        return cpu::parameters(&name, sandbox_each);                              \
    }

extern "C" {
extern thread_local char sandbox_dynamic_smem[];
}
