// Wrappers of the inline PTX of Hopper's kernels (sm_90a), in addition to ptx.cuh: mbarriers, TMA, warpgroup MMA
// (wgmma), register allocation and named barriers. sandbox/cpu/include/hopper.cuh has the same functions for the CPU
// backend. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions".
// clang-format off
//
//   accumulator D (64 x N) of a warpgroup: warp w holds rows 16 w ..       A (64 x 16) from registers: as in ptx.cuh,
//   d[4 j + 0], d[4 j + 1]: row g,     columns 8 j + 2q, 8 j + 2q + 1      rows 16 w .. of warp w
//   d[4 j + 2], d[4 j + 3]: row g + 8, the same columns                    g = lane / 4, q = lane % 4
//
// clang-format on
#pragma once
#include "ptx.cuh"

// ---- mbarriers: 64-bit words in shared memory, 8-byte aligned. A phase completes when the number of arrivals given to
// mbarrier_init, and all expected bytes, have been counted. The parity of the phases alternates, from 0.

__device__ __forceinline__ void mbarrier_init(SmemAddr barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void mbarrier_arrive(SmemAddr barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and adds `bytes` to the transaction count that TMA loads must complete before the phase can complete.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(SmemAddr barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of that parity has completed. Parity 1 on a new barrier returns at once.
__device__ __forceinline__ void mbarrier_wait(SmemAddr barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether the phase of that parity has completed, without waiting; and a wait that is skipped if that is known
// (`ended`).
__device__ __forceinline__ unsigned mbarrier_test_wait(SmemAddr barrier, unsigned parity) {
    unsigned ended;
    asm volatile(
        "{\n.reg .pred ended;\nmbarrier.test_wait.parity.shared::cta.b64 ended, [%1], %2;\nselp.b32 %0, 1, 0, ended;\n}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
    return ended;
}
__device__ __forceinline__ void mbarrier_wait_unless(unsigned ended, SmemAddr barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "setp.ne.u32 ended, %2, 0;\n"
        "@ended bra there;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra again;\n"
        "there:\n"
        "}" ::"r"(barrier),
        "r"(parity), "r"(ended)
        : "memory");
}

// ---- the async proxy, through which TMA and wgmma access shared memory

// Makes this thread's earlier writes to shared memory, and mbarrier initialisations, visible to later TMA and wgmma.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// ---- tensor maps

// A tensor map, encoded by cuTensorMapEncodeTiled: a (B, H, S, D) tensor, and the box that one copy moves. A kernel
// parameter, `const __grid_constant__`; mirrored by TensorMap in sandbox/launch/tensor_maps.py. Ragged batch:
// coordinate b is the row at which the sequence ends, and s = -1, -2, ... counts backwards from it. Their sum is the
// address, but only s is checked against a bound, so rows beyond the sequence are out of bounds. Coordinates must not
// be negative: RAGGED_ROWS is added to s, and the coordinate of a fifth dimension subtracts it.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "TensorMap differs from sandbox/launch/tensor_maps.py");
constexpr int RAGGED_ROWS = 1 << 30;

// Loads the box at column d, row s of head (b, h); elements out of bounds become zeros. The bytes of the box count
// towards the barrier's transactions when they have arrived.
__device__ __forceinline__ void tma_load(SmemAddr to, const TensorMap& map, int d, int s, int h, int b,
                                         SmemAddr barrier) {
#if RAGGED
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(d), "r"(s + RAGGED_ROWS), "r"(h), "r"(b), "r"(RAGGED_ROWS)
        : "memory");
#else
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(d), "r"(s), "r"(h), "r"(b)
        : "memory");
#endif
}

// Stores a box from shared memory; elements out of bounds are not written.
__device__ __forceinline__ void tma_store(const TensorMap& map, int d, int s, int h, int b, SmemAddr from) {
#if RAGGED
    asm volatile("cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::"l"(&map),
                 "r"(from), "r"(d), "r"(s + RAGGED_ROWS), "r"(h), "r"(b), "r"(RAGGED_ROWS)
                 : "memory");
#else
    asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
                 "r"(from), "r"(d), "r"(s), "r"(h), "r"(b)
                 : "memory");
#endif
}

// Commits this thread's stores as one bulk group.
__device__ __forceinline__ void tma_store_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Four floats to shared memory, 16-byte aligned, as the source of a bulk store.
__device__ __forceinline__ void store_floats(SmemAddr to, float x0, float x1, float x2, float x3) {
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to), "f"(x0), "f"(x1), "f"(x2), "f"(x3) : "memory");
}

// Adds, or stores, a lane's four floats of add_fragment (ptx.cuh) at its own address in global memory.
__device__ __forceinline__ void add_floats(float* to, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void store_floats(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// Adds `bytes` bytes of fp32 values in shared memory to those at `to`, atomically, in L2. Both addresses and `bytes`
// are multiples of 16. Belongs to a bulk group, as tma_store.
__device__ __forceinline__ void tma_reduce_add(float* to, SmemAddr from, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

// The same, but stores instead of adding.
__device__ __forceinline__ void bulk_store(float* to, SmemAddr from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Waits until this thread's bulk groups have read shared memory, except for the PENDING newest ones.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until they have also been written to global memory.
__device__ __forceinline__ void tma_store_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// ---- counters in global memory, with which blocks wait for each other

// Whether the counter has reached `arrivals`; and a wait until it has. Acquire: what the arriving threads wrote before
// is then visible to this thread, and to its TMA stores.
__device__ __forceinline__ bool counter_reached(const unsigned* counter, unsigned arrivals) {
    unsigned arrived;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return arrived >= arrivals;
}
__device__ __forceinline__ void counter_wait(const unsigned* counter, unsigned arrivals) {
    unsigned arrived;
    do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    while (arrived < arrivals);
    asm volatile("fence.proxy.async.global;" ::: "memory");
}
__device__ __forceinline__ void counter_arrive(unsigned* counter, unsigned arrivals = 1) {
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(counter), "r"(arrivals) : "memory");
}
// Reads the counter, without acquire: what the arriving threads wrote is visible only after the fence of a later
// counter_arrive_acquire. That fence also orders this thread's own writes before its arrival.
__device__ __forceinline__ unsigned counter_load(const unsigned* counter) {
    unsigned arrived;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    return arrived;
}
__device__ __forceinline__ void counter_arrive_acquire(unsigned* counter) {
    asm volatile("fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%0], 1;\nfence.proxy.async.global;" ::"l"(counter)
                 : "memory");
}
// Adds one and returns the previous value; acquire, as counter_wait.
__device__ __forceinline__ unsigned counter_fetch_add(unsigned* counter) {
    unsigned before;
    asm volatile("atom.acquire.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    asm volatile("fence.proxy.async.global;" ::: "memory");
    return before;
}

// ---- warpgroup MMA

// Matrix descriptor of wgmma: a matrix in shared memory. Created by swizzle.cuh.
struct Descriptor {
    unsigned low, high;
    __device__ __forceinline__ unsigned long long bits() const {
        return static_cast<unsigned long long>(high) << 32 | low;
    }
};
constexpr unsigned SWIZZLE_128B = 1u << 30;

// The matrix begins at `at`. leading, stride: PTX's leading and stride dimension byte offsets; their meaning depends on
// the order (swizzle.cuh).
__device__ __forceinline__ Descriptor make_descriptor(SmemAddr at, unsigned leading, unsigned stride) {
    return {at / 16 | leading / 16 << 16, stride / 16 | SWIZZLE_128B};
}

// The descriptor advanced by `bytes`.
__device__ __forceinline__ Descriptor operator+(Descriptor descriptor, unsigned bytes) {
    return {descriptor.low + bytes / 16, descriptor.high};
}

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

// D = A B, or D += A B, in fp32, by a warpgroup: A (64 x 16) and B (16 x N), N = 2 R, in either order. Accumulators and
// A's registers must not be accessed before wgmma_wait and warpgroup_fence_operand.
template <Order B_ORDER, Order A_ORDER = Order::K_MAJOR, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], Descriptor a, Descriptor b, bool accumulate) {
    Wgmma<R>::template ss<A_ORDER == Order::MN_MAJOR, B_ORDER == Order::MN_MAJOR>(d, a, b, accumulate);
}
template <Order B_ORDER, int R>
__device__ __forceinline__ void wgmma(float (&d)[R], const unsigned (&a)[4], Descriptor b, bool accumulate) {
    Wgmma<R>::template rs<B_ORDER == Order::MN_MAJOR>(d, a, b, accumulate);
}

// ---- warps and warpgroups

// True in one lane of the warp.
__device__ __forceinline__ bool elect() {
    unsigned elected;
    asm volatile("{\n.reg .pred elected;\nelect.sync _|elected, 0xffffffff;\nselp.b32 %0, 1, 0, elected;\n}"
                 : "=r"(elected));
    return elected;
}

// Tells the compiler that all lanes have the same value. What depends on it, such as a descriptor, is then computed
// once per warp in uniform registers, as wgmma requires. volatile: not hoisted out of loops, since there are few
// uniform registers.
__device__ __forceinline__ unsigned uniform(unsigned x) {
    unsigned y;
    asm volatile("redux.sync.or.b32 %0, %1, 0xffffffff;" : "=r"(y) : "r"(x));
    return y;
}

// A lane's address, computed at this point: the compiler moves it neither behind a wait nor into branches.
__device__ __forceinline__ float* pin_address(float* address) {
    const unsigned long long whole = reinterpret_cast<unsigned long long>(address);
    const unsigned low = __shfl_sync(0xffffffffu, static_cast<unsigned>(whole), threadIdx.x % 32);
    const unsigned high = __shfl_sync(0xffffffffu, static_cast<unsigned>(whole >> 32), threadIdx.x % 32);
    return reinterpret_cast<float*>(static_cast<unsigned long long>(high) << 32 | low);
}

// Sets the number of registers per thread of a warpgroup; inc waits until other warpgroups have released enough.
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ __forceinline__ void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(REGISTERS));
}

// Named barriers 1 to 15 of a block, for `threads` threads in whole warps (0 is __syncthreads). sync waits until all
// threads have arrived; arrive does not wait.
__device__ __forceinline__ void named_barrier_sync(unsigned id, unsigned threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(unsigned id, unsigned threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// As sync; returns whether the predicate is true in any thread. The result is uniform over the warp.
__device__ __forceinline__ bool named_barrier_or(unsigned id, unsigned threads, bool predicate) {
    unsigned any;
    asm volatile(
        "{\n.reg .pred mine, any;\nsetp.ne.b32 mine, %3, 0;\n"
        "bar.red.or.pred any, %1, %2, mine;\nselp.b32 %0, 1, 0, any;\n}"
        : "=r"(any)
        : "r"(id), "r"(threads), "r"(static_cast<int>(predicate))
        : "memory");
    return uniform(any);
}

// The inverse of ldmatrix_x4: lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}

// The same with each matrix transposed: lane i gives the address of row i % 8 of the transposed matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_trans(SmemAddr row, unsigned r0, unsigned r1, unsigned r2, unsigned r3) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(r0), "r"(r1),
                 "r"(r2), "r"(r3)
                 : "memory");
}
