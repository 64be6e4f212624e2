// Every line of inline PTX that warp-level kernels use, behind a verb each. The CPU backend has a twin of this file,
// sandbox/cpu/include/ptx.cuh, with the same verbs. Fragment layouts: PTX ISA, "Matrix fragments for mma.m16n8k16".
// clang-format off
//
//   accumulator C (16 x 8)                 A (16 x 16), two elements a register   B (16 x 8), two elements a register
//   c0 c1: row g,     columns 2q, 2q+1     a0: row g,     columns 2q, 2q+1        b0: rows 2q, 2q+1,   column g
//   c2 c3: row g + 8, columns 2q, 2q+1     a1: row g + 8, columns 2q, 2q+1        b1: rows 2q+8, 2q+9, column g
//                                          a2: row g,     columns 2q+8, 2q+9
//                                          a3: row g + 8, columns 2q+8, 2q+9      g = lane / 4, q = lane % 4
//
// clang-format on
// So two neighbouring accumulators of S are, packed to 16 bits, an A operand of P V: no shuffle between the products.
#pragma once
#include "common.cuh"

using SmemAddress = unsigned;  // a byte address in shared memory

__device__ __forceinline__ SmemAddress smem_address(const void* p) {
    return static_cast<unsigned>(__cvta_generic_to_shared(p));
}

// Four 8 x 8 matrices of 16-bit elements: lane i gives the address of row i % 8 of matrix i / 8, and receives of each
// matrix the elements (g; 2q, 2q+1), or with _trans the elements (2q, 2q+1; g).
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], SmemAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], SmemAddress row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row) : "memory");
}

// C += A B in fp32.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
#if defined(DTYPE_bfloat16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two floats rounded to 16 bits in one register, the first in the low half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned packed;
#if defined(DTYPE_bfloat16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
#endif
    return packed;
}

// 2^x to 2 ulp; exact for -inf and NaN.
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Copies 16 bytes from global to shared memory without passing through registers; zeros when `valid` is false. The
// bytes are there for this thread after cp_async_wait, for others after a barrier too.
__device__ __forceinline__ void cp_async_16(SmemAddress to, const void* from, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(valid ? 16 : 0) : "memory");
}

// Closes a group of copies.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's newest groups are still on their way.
template <int PENDING>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}
