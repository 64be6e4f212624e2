// Wrappers of the PTX of warpgroup MMA (wgmma, sm_90a). Part of hopper.cuh; the CPU backend has its own,
// sandbox/cpu/include/wgmma.cuh. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
// clang-format off
//
//   accumulator D (64 x N) of a warpgroup: warp w holds rows 16 w ..       A (64 x 16) from registers: as in ptx.cuh,
//   d[4 j + 0], d[4 j + 1]: row g,     columns 8 j + 2q, 8 j + 2q + 1      rows 16 w .. of warp w
//   d[4 j + 2], d[4 j + 3]: row g + 8, the same columns                    g = lane / 4, q = lane % 4
//
// clang-format on
#pragma once
#include "descriptor.cuh"
#include "ptx.cuh"

enum class Order { K_MAJOR, MN_MAJOR };  // which index of an operand is contiguous in shared memory

// Orders earlier register accesses before the following wgmmas; once before each sequence of them.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// Commits the previous wgmmas as one group.
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING groups are in flight.
template <int PENDING>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}

// Keeps the compiler from moving accesses to the accumulators above the wait (CUTLASS: warpgroup_fence_operand).
template <int R>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "+f"(d[i])::"memory");
}

// Marks accumulators as undefined before the first wgmma overwrites them, so that the compiler need not keep their
// values.
template <int R>
__device__ __forceinline__ void wgmma_discard(float (&d)[R]) {
#pragma unroll
    for (int i = 0; i < R; ++i) asm volatile("" : "=f"(d[i]));
}

// Each WGMMA(...) below is one width N of wgmma: the N / 2 accumulators in the asm text (L...) and as asm operands
// (D...), then the numbers of the other operands.
#define D8(i)                                                                                                   \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define D16(i) D8(i), D8(i + 8)
#define D32(i) D16(i), D16(i + 16)
#define D64(i) D32(i), D32(i + 32)
#define L8 "%0, %1, %2, %3, %4, %5, %6, %7"
#define L16 L8 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define L24 L16 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define L32 L24 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define L40 L32 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define L48 L40 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define L56 L48 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define L64 L56 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define L72 L64 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define L80 L72 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define L88 L80 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define L96 L88 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define L104 L96 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define L112 L104 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define L120 L112 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define L128 L120 ", %120, %121, %122, %123, %124, %125, %126, %127"
#if defined(DTYPE_bfloat16)
#define WGMMA_TYPES "f32.bf16.bf16"
#else
#define WGMMA_TYPES "f32.f16.f16"
#endif

template <int R>
struct Wgmma;  // R = N / 2 accumulators per thread

#define WGMMA(N, LIST, OUT, X0, X1, X2, X3, X4, X5, X6)                                                                \
    template <>                                                                                                        \
    struct Wgmma<N / 2> {                                                                                              \
        template <int A_TRANSPOSED, int B_TRANSPOSED>                                                                  \
        static __device__ __forceinline__ void ss(float (&d)[N / 2], Descriptor a, Descriptor b, bool accumulate) {    \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " X2                                      \
                         ", 0;\n"                                                                                      \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" LIST "}, " X0 ", " X1          \
                         ", accumulate, 1, 1, " X3 ", " X4 ";\n}"                                                      \
                         : OUT                                                                                         \
                         : "l"(a.bits()), "l"(b.bits()), "r"(static_cast<int>(accumulate)), "n"(A_TRANSPOSED),         \
                           "n"(B_TRANSPOSED));                                                                         \
        }                                                                                                              \
        template <int TRANSPOSED>                                                                                      \
        static __device__ __forceinline__ void rs(float (&d)[N / 2], const unsigned (&a)[4], Descriptor b,             \
                                                  bool accumulate) {                                                   \
            asm volatile("{\n.reg .pred accumulate;\nsetp.ne.b32 accumulate, " X5                                      \
                         ", 0;\n"                                                                                      \
                         "wgmma.mma_async.sync.aligned.m64n" #N "k16." WGMMA_TYPES " {" LIST "}, {" X0 ", " X1 ", " X2 \
                         ", " X3 "}, " X4 ", accumulate, 1, 1, " X6 ";\n}"                                             \
                         : OUT                                                                                         \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b.bits()),                                  \
                           "r"(static_cast<int>(accumulate)), "n"(TRANSPOSED));                                        \
        }                                                                                                              \
    };
#define OUT(...) __VA_ARGS__
WGMMA(16, L8, OUT(D8(0)), "%8", "%9", "%10", "%11", "%12", "%13", "%14")
WGMMA(32, L16, OUT(D16(0)), "%16", "%17", "%18", "%19", "%20", "%21", "%22")
WGMMA(48, L24, OUT(D16(0), D8(16)), "%24", "%25", "%26", "%27", "%28", "%29", "%30")
WGMMA(64, L32, OUT(D32(0)), "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(80, L40, OUT(D32(0), D8(32)), "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(96, L48, OUT(D32(0), D16(32)), "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(112, L56, OUT(D32(0), D16(32), D8(48)), "%56", "%57", "%58", "%59", "%60", "%61", "%62")
WGMMA(128, L64, OUT(D64(0)), "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(144, L72, OUT(D64(0), D8(64)), "%72", "%73", "%74", "%75", "%76", "%77", "%78")
WGMMA(160, L80, OUT(D64(0), D16(64)), "%80", "%81", "%82", "%83", "%84", "%85", "%86")
WGMMA(176, L88, OUT(D64(0), D16(64), D8(80)), "%88", "%89", "%90", "%91", "%92", "%93", "%94")
WGMMA(192, L96, OUT(D64(0), D32(64)), "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA(208, L104, OUT(D64(0), D32(64), D8(96)), "%104", "%105", "%106", "%107", "%108", "%109", "%110")
WGMMA(224, L112, OUT(D64(0), D32(64), D16(96)), "%112", "%113", "%114", "%115", "%116", "%117", "%118")
WGMMA(240, L120, OUT(D64(0), D32(64), D16(96), D8(112)), "%120", "%121", "%122", "%123", "%124", "%125", "%126")
WGMMA(256, L128, OUT(D64(0), D64(64)), "%128", "%129", "%130", "%131", "%132", "%133", "%134")
#undef WGMMA
#undef OUT

// D = A B, or D += A B, in fp32, by a warpgroup: A (64 x 16) and B (16 x N), N = 2 R, in either order. Accumulators
// must not be accessed before wgmma_wait and warpgroup_fence_operand, A's registers not before wgmma_wait.
template <Order B_ORDER, Order A_ORDER = Order::K_MAJOR, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], Descriptor a, Descriptor b, bool accumulate) {
    Wgmma<R>::template ss<A_ORDER == Order::MN_MAJOR, B_ORDER == Order::MN_MAJOR>(d, a, b, accumulate);
}
template <Order B_ORDER, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate) {
    Wgmma<R>::template rs<B_ORDER == Order::MN_MAJOR>(d, a, b, accumulate);
}
