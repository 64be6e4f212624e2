// Element types of tensors, and their conversion to fp32.
#pragma once
#include "timeline.cuh"

// Element types: `dtype` of Q, `dtype_k` of K, `dtype_v` of V, `dtype_o` of O. They differ only with float8. FLOAT8: Q,
// K and V are float8. FLOAT8_KEYS: K and V are, Q may be. `Kernel.defines` (sandbox/core/kernel.py) sets
// DTYPE_float16 and so on. Arithmetic is in fp32.
__device__ __forceinline__ float to_float(float x) { return x; }
#if defined(DTYPE_float8_e4m3) || defined(DTYPE_float8_e5m2)
#define FLOAT8 1
#else
#define FLOAT8 0
#endif
#if FLOAT8 || defined(DTYPE_K_float8_e4m3) || defined(DTYPE_K_float8_e5m2)
#define FLOAT8_KEYS 1
#include <cuda_fp8.h>
__device__ __forceinline__ float to_float(__nv_fp8_e4m3 x) { return static_cast<float>(x); }
__device__ __forceinline__ float to_float(__nv_fp8_e5m2 x) { return static_cast<float>(x); }
#else
#define FLOAT8_KEYS 0
#endif
#if defined(DTYPE_float16) || defined(DTYPE_O_float16)
#include <cuda_fp16.h>
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
#elif defined(DTYPE_bfloat16) || defined(DTYPE_O_bfloat16)
#include <cuda_bf16.h>
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
#endif

#if defined(DTYPE_float32)
using dtype = float;
#elif defined(DTYPE_float16)
using dtype = __half;
#elif defined(DTYPE_bfloat16)
using dtype = __nv_bfloat16;
#elif defined(DTYPE_float8_e4m3)
using dtype = __nv_fp8_e4m3;
#elif defined(DTYPE_float8_e5m2)
using dtype = __nv_fp8_e5m2;
#else
#error "Kernel.defines sets DTYPE_float32, DTYPE_float16, DTYPE_bfloat16, DTYPE_float8_e4m3 or DTYPE_float8_e5m2"
#endif
#if defined(DTYPE_K_float8_e4m3)
using dtype_k = __nv_fp8_e4m3;
#elif defined(DTYPE_K_float8_e5m2)
using dtype_k = __nv_fp8_e5m2;
#else
using dtype_k = dtype;
#endif
#if !FLOAT8_KEYS
using dtype_v = dtype;
#elif defined(DTYPE_V_float8_e4m3)
using dtype_v = __nv_fp8_e4m3;
#else
using dtype_v = __nv_fp8_e5m2;
#endif
#if !FLOAT8
using dtype_o = dtype;
#elif defined(DTYPE_O_float32)
using dtype_o = float;
#elif defined(DTYPE_O_float16)
using dtype_o = __half;
#elif defined(DTYPE_O_bfloat16)  // no #else: kernels of other operations (docs/custom-operations.md) have none
using dtype_o = __nv_bfloat16;
#endif

#define INF __int_as_float(0x7f800000)  // NVRTC has no INFINITY
#define NOT_A_NUMBER __int_as_float(0x7fffffff)
