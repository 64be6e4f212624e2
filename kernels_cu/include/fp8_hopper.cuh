// Wrappers of the warpgroup MMA of float8. The CPU backend has the same functions in
// sandbox/cpu/include/fp8_hopper.cuh.
//
// A step is 32 deep. B is read K-major from shared memory; A, too, or from registers. There are no transposed operands.
// The accumulation has about 14 bits: callers accumulate long sums in fp32.
#pragma once
#include <hopper.cuh>
#include "fp8.cuh"

template <class T, int R>
struct Wgmma8;  // operands of type T, R = N / 2 accumulators per thread

// Each WGMMA8(...) below is one width N, as in wgmma.cuh, for both types.
#define WGMMA8_OF(T, TYPES, N, LIST, OUT, X0, X1, X2, X3, X4, X5)                                                    \
    template <>                                                                                                      \
    struct Wgmma8<T, N / 2> {                                                                                        \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate) {  \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " X2                                    \
                         ", 0;\n"                                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" LIST "}, " X0 ", " X1          \
                         ", accumulate, 1, 1;\n}"                                                                    \
                         : OUT                                                                                       \
                         : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(accumulate)));                         \
        }                                                                                                            \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const unsigned (&a)[4], Descriptor b,           \
                                                  bool accumulate) {                                                 \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " X5                                    \
                         ", 0;\n"                                                                                    \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k32.f32." TYPES " {" LIST "}, {" X0 ", " X1 ", " X2 \
                         ", " X3 "}, " X4 ", accumulate, 1, 1;\n}"                                                   \
                         : OUT                                                                                       \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()),                                \
                           "r"(static_cast<int>(accumulate)));                                                       \
        }                                                                                                            \
    };
#define OUT(...) __VA_ARGS__
#define WGMMA8(N, LIST, D, ...)                                         \
    WGMMA8_OF(__nv_fp8_e4m3, "e4m3.e4m3", N, LIST, OUT(D), __VA_ARGS__) \
    WGMMA8_OF(__nv_fp8_e5m2, "e5m2.e5m2", N, LIST, OUT(D), __VA_ARGS__)
WGMMA8(16, L8, OUT(D8(0)), "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA8(32, L16, OUT(D16(0)), "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA8(48, L24, OUT(D16(0), D8(16)), "%24", "%25", "%26", "%27", "%28", "%29")
WGMMA8(64, L32, OUT(D32(0)), "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA8(80, L40, OUT(D32(0), D8(32)), "%40", "%41", "%42", "%43", "%44", "%45")
WGMMA8(96, L48, OUT(D32(0), D16(32)), "%48", "%49", "%50", "%51", "%52", "%53")
WGMMA8(112, L56, OUT(D32(0), D16(32), D8(48)), "%56", "%57", "%58", "%59", "%60", "%61")
WGMMA8(128, L64, OUT(D64(0)), "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA8(144, L72, OUT(D64(0), D8(64)), "%72", "%73", "%74", "%75", "%76", "%77")
WGMMA8(160, L80, OUT(D64(0), D16(64)), "%80", "%81", "%82", "%83", "%84", "%85")
WGMMA8(176, L88, OUT(D64(0), D16(64), D8(80)), "%88", "%89", "%90", "%91", "%92", "%93")
WGMMA8(192, L96, OUT(D64(0), D32(64)), "%96", "%97", "%98", "%99", "%100", "%101")
WGMMA8(208, L104, OUT(D64(0), D32(64), D8(96)), "%104", "%105", "%106", "%107", "%108", "%109")
WGMMA8(224, L112, OUT(D64(0), D32(64), D16(96)), "%112", "%113", "%114", "%115", "%116", "%117")
WGMMA8(240, L120, OUT(D64(0), D32(64), D16(96), D8(112)), "%120", "%121", "%122", "%123", "%124", "%125")
WGMMA8(256, L128, OUT(D64(0), D64(64)), "%128", "%129", "%130", "%131", "%132", "%133")
#undef WGMMA8
#undef WGMMA8_OF
#undef OUT

// D = A B, or D += A B, in fp32, by a warpgroup: A (64 x 32) and B (32 x N), N = 2 R, of type T, K-major.
template <class T, int R>
__device__ __forceinline__ void wgmma8(float (&d)[R], Descriptor a, Descriptor b, bool accumulate) {
    Wgmma8<T, R>::ss(d, a, b, accumulate);
}
template <class T, int R>
__device__ __forceinline__ void wgmma8(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate) {
    Wgmma8<T, R>::rs(d, a, b, accumulate);
}
