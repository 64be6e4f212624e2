// Wrappers of the PTX of asynchronous copies (sm_90a): mbarriers, TMA, bulk copies. Part of hopper.cuh; the CPU backend
// has its own, sandbox/cpu/include/tma.cuh.
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

// mbarrier_test_wait: whether the phase of that parity has completed, without waiting. mbarrier_wait_unless: waits,
// unless `ended`, the result of mbarrier_test_wait, says that the phase has completed.
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
// parameter, `const __grid_constant__`; mirrored by TensorMap in sandbox/launch/tensor_maps.py.
//
// In a ragged batch, and for keys in pages (except in fwd_latent_wgmma), the map has five dimensions. The row of the
// tensor is end + s. `end`, passed as b, is the row at which the sequence (with pages: the valid keys of the box) ends;
// s = -1, -2, ... counts backwards from `end`. Coordinate 1 is s + RAGGED_OFFSET, since a negative coordinate would be
// out of bounds. The size of dimension 1 is RAGGED_OFFSET, so rows from s = 0 on are out of bounds. The coordinates
// h, `end` and RAGGED_OFFSET are always in bounds:
//
//   dimension     0        1                    2           3           4
//   coordinate    d        s + RAGGED_OFFSET    h           end         RAGGED_OFFSET
//   size          D        RAGGED_OFFSET        heads       rows + 1    RAGGED_OFFSET + 1
//   stride        –        stride_s             stride_h    stride_s    2^34 - stride_s
//
// (strides in bytes; elements of dimension 0 are adjacent). Dimension 4 subtracts RAGGED_OFFSET * stride_s: 2^34 *
// RAGGED_OFFSET is 0 modulo 2^64.
struct alignas(64) TensorMap {
    unsigned long long opaque[16];
};
static_assert(sizeof(TensorMap) == 128, "TensorMap differs from sandbox/launch/tensor_maps.py");
constexpr int RAGGED_OFFSET = 1 << 30;

// Loads the box at column d, row s of head (b, h); elements out of bounds become zeros. The bytes of the box count
// towards the barrier's transactions when they have arrived. tma_load_5d: from a map of five dimensions.
__device__ __forceinline__ void tma_load_5d(SmemAddr to, const TensorMap& map, int d, int s, int h, int b,
                                            SmemAddr barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
        "l"(&map), "r"(barrier), "r"(d), "r"(s + RAGGED_OFFSET), "r"(h), "r"(b), "r"(RAGGED_OFFSET)
        : "memory");
}
__device__ __forceinline__ void tma_load(SmemAddr to, const TensorMap& map, int d, int s, int h, int b,
                                         SmemAddr barrier) {
#if RAGGED
    tma_load_5d(to, map, d, s, h, b, barrier);
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
                 "r"(from), "r"(d), "r"(s + RAGGED_OFFSET), "r"(h), "r"(b), "r"(RAGGED_OFFSET)
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

// A lane's part of add_fragment (ptx.cuh): adds four floats to those at `to` in global memory; each lane has an address
// of its own. store_floats: stores them there.
__device__ __forceinline__ void add_floats(float* to, const float (&x)[4]) {
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
}
__device__ __forceinline__ void store_floats(float* to, const float (&x)[4]) {
    *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
}

// Adds `bytes` bytes of fp32 values in shared memory to those at `to`, atomically, in L2. Both addresses and `bytes`
// are multiples of 16. Belongs to a bulk group, as tma_store, but has no tensor map (CUTLASS: SM90_BULK_REDUCE_ADD).
__device__ __forceinline__ void tma_reduce_add(float* to, SmemAddr from, unsigned bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to), "r"(from),
                 "r"(bytes)
                 : "memory");
}

// The same for any values, and stores instead of adding.
__device__ __forceinline__ void bulk_store(void* to, SmemAddr from, unsigned bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}

// Loads `bytes` contiguous bytes, and counts them at the barrier. Both addresses and `bytes` are multiples of 16.
__device__ __forceinline__ void bulk_load(SmemAddr to, const void* from, unsigned bytes, SmemAddr barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Waits until this thread's bulk groups have read shared memory, except for the PENDING newest ones. CUTLASS's
// tma_store_wait<PENDING>.
template <int PENDING = 0>
__device__ __forceinline__ void tma_store_wait_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}

// Waits until all have also been written to global memory.
__device__ __forceinline__ void tma_store_wait_complete() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
