// Wrappers of inline PTX: mma.sync, ldmatrix, cp.async, approximate functions, programmatic dependent launch and
// others. Those of warpgroup MMA and TMA are in hopper.cuh, further ones in fp8.cuh and cluster.cuh.
// sandbox/cpu/include/ptx.cuh has the same functions for the CPU backend. Fragment layouts: PTX ISA, "Matrix fragments
// for mma.m16n8k16".
// clang-format off
//
//   accumulator C (16 x 8)                 A (16 x 16), 2 elements per register   B (16 x 8), 2 elements per register
//   c0 c1: row g,     columns 2q, 2q+1     a0: row g,     columns 2q, 2q+1        b0: rows 2q, 2q+1,   column g
//   c2 c3: row g + 8, columns 2q, 2q+1     a1: row g + 8, columns 2q, 2q+1        b1: rows 2q+8, 2q+9, column g
//                                          a2: row g,     columns 2q+8, 2q+9
//                                          a3: row g + 8, columns 2q+8, 2q+9      g = lane / 4, q = lane % 4
//
// clang-format on
// Two adjacent accumulators of S, packed to 16 bits, are an A operand of P V: no shuffle between the MMAs.
#pragma once
#include "reduce.cuh"

using SmemAddr = unsigned;  // a byte address in shared memory

// Device-side assertions: enabled on the CPU backend, and on a GPU if SANDBOX_CHECKED is set. A failure on a GPU prints
// `message` and destroys the CUDA context. On a GPU only the condition of lane 0 of a warp is tested.
#if CHECKED_KERNELS
constexpr bool CHECKED = true;
extern "C" __device__ void __assertfail(const char*, const char*, unsigned, const char*, unsigned long);
__device__ __forceinline__ void require(bool condition, const char* message) {
    if (!condition && threadIdx.x % 32 == 0) __assertfail(message, __FILE__, __LINE__, "require", 1);
}
#else
constexpr bool CHECKED = false;
__device__ __forceinline__ void require(bool, const char*) {}
#endif

__device__ __forceinline__ SmemAddr smem_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// threadIdx.x, read from the special register at each call: the compiler then recomputes values derived from it instead
// of keeping them in registers.
__device__ __forceinline__ unsigned thread_index_x() {
    unsigned index;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index)::"memory");
    return index;
}

// A copy of x whose origin the compiler does not know. Called in a loop: what is derived from the copy is computed in
// each iteration, not kept in registers across the loop. Called before a loop: the copy is kept in a register, since it
// cannot be computed again.
__device__ __forceinline__ unsigned opaque(unsigned x) {
    unsigned y;
    asm volatile("mov.u32 %0, %1;" : "=r"(y) : "r"(x) : "memory");
    return y;
}

// blockIdx.x, blockIdx.y and gridDim.x, read at each call like thread_index_x.
__device__ __forceinline__ unsigned block_index_x() {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(index)::"memory");
    return index;
}
__device__ __forceinline__ unsigned block_index_y() {
    unsigned index;
    asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(index)::"memory");
    return index;
}
__device__ __forceinline__ unsigned grid_size_x() {
    unsigned size;
    asm volatile("mov.u32 %0, %%nctaid.x;" : "=r"(size)::"memory");
    return size;
}

// The maximum of three integers: one instruction on compute capability 9.0.
__device__ __forceinline__ int max3(int a, int b, int c) { return __vimax3_s32(a, b, c); }

// Loads four 8 x 8 matrices of 16-bit elements. Lane i passes the address of row i % 8 of matrix i / 8 and gets
// elements (g; 2q, 2q+1) of each matrix, or with _trans elements (2q, 2q+1; g).
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SmemAddr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], SmemAddr row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit elements, of which a lane has elements (g; 2q, 2q+1).
__device__ __forceinline__ unsigned movmatrix_trans(unsigned pair) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
    return transposed;
}

// Eight bytes of shared memory; the address is a multiple of 8.
__device__ __forceinline__ uint2 load_shared_8(SmemAddr from) {
    uint2 x;
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(x.x), "=r"(x.y) : "r"(from) : "memory");
    return x;
}

// C += A B with fp32 accumulation. In float8 kernels the operands are fp16.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(DTYPE_bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// All ones in each 16-bit half whose sign bit is 1, zeros in the other halves.
__device__ __forceinline__ unsigned signs_of_halves(unsigned x) {
    unsigned mask;
    asm("prmt.b32 %0, %1, 0, 0xbb99;" : "=r"(mask) : "r"(x));  // selectors 9 and b: the sign of bytes 1 and 3
    return mask;
}

// Two floats rounded to dtype (in float8 kernels to dtype_o) in one register, the first in the low half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
#if defined(DTYPE_bfloat16) || defined(DTYPE_O_bfloat16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// The inverse of pack.
__device__ __forceinline__ float2 unpack(unsigned packed) {
    const dtype* pair = reinterpret_cast<const dtype*>(&packed);
    return make_float2(to_float(pair[0]), to_float(pair[1]));
}

// 2^x with an error of 2 ulp; exact for -inf and NaN.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Base-2 logarithm with an error of 2^-22 near 1; -inf for 0.
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// 1 / x with an error of 1 ulp.
__device__ __forceinline__ float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh with a relative error of 2^-11.
__device__ __forceinline__ float tanh_approx(float x) {
    float y;
    asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies 16 bytes from global to shared memory asynchronously; writes zeros if `valid` is false. The data is visible to
// this thread after cp_async_wait, to others after a subsequent barrier.
// WHOLE_LINE: asks L2 to read the whole 128-byte line of `from` from memory.
template <bool WHOLE_LINE = false>
__device__ __forceinline__ void cp_async_16(SmemAddr to, const void* from, bool valid) {
    if (WHOLE_LINE)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                     : "memory");
    else
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0)
                     : "memory");
}

// The same for four bytes.
__device__ __forceinline__ void cp_async_4(SmemAddr to, const void* from, bool valid) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(valid ? 4 : 0) : "memory");
}

// Commits this thread's copies since the last commit as a group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the PENDING most recent groups of this thread are incomplete.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// Prefetches the cache line of an address into L2, or into L1 and L2.
__device__ __forceinline__ void prefetch_L2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void prefetch_L1(const void* from) {
    asm volatile("{ .reg .b32 unused; ld.global.ca.b32 unused, [%0]; }" ::"l"(from));
}

// Programmatic dependent launch: the next entry point in the stream may start when every block of the current one has
// called this function or exited, if the next one has programmatic_launch=True (Entry in sandbox/core/kernel.py). The
// next one must call griddepcontrol_wait before it reads the results of the current one. No effect before compute
// capability 9.0.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous entry point has completed and its writes are visible.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Adds a warp's 16 x 8 accumulator atomically to 128 floats of global memory at `to`, aligned to 16 bytes. The order of
// the floats minimizes transactions: one of 512 bytes (sm_90), else four of 128. load_fragment_rows reads this order.
__device__ __forceinline__ void add_fragment(float* to, const float (&c)[4]) {
    const unsigned lane = threadIdx.x % 32;
#if __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to + 4 * lane), "f"(c[0]), "f"(c[1]), "f"(c[2]),
                 "f"(c[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(to + 32 * i + lane, c[i]);
#endif
}

// Rows g and g + 8 of a 16 x 8 sum in the order of add_fragment.
__device__ __forceinline__ void load_fragment_rows(float (&rows)[2][8], const float* from, unsigned g) {
    const float4* const sums = reinterpret_cast<const float4*>(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#if __CUDA_ARCH__ >= 900
        const float4 lane = sums[4 * g + i];  // columns 2i and 2i + 1
        rows[0][2 * i] = lane.x, rows[0][2 * i + 1] = lane.y, rows[1][2 * i] = lane.z, rows[1][2 * i + 1] = lane.w;
#else
        const float4 lanes = sums[8 * i + g];  // element i of the four lanes of a row
        float (&row)[8] = rows[i / 2];
        row[i % 2] = lanes.x, row[2 + i % 2] = lanes.y, row[4 + i % 2] = lanes.z, row[6 + i % 2] = lanes.w;
#endif
    }
}
