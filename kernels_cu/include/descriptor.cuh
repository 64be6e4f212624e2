// Matrix descriptors of wgmma: matrices in shared memory. Created by swizzle.cuh and bwd_consumer_keys.cuh. Both
// backends compute them here.
#pragma once

struct Descriptor {
    unsigned low, high;
    __device__ __forceinline__ unsigned long long bits() const {
        return static_cast<unsigned long long>(high) << 32 | low;
    }
};
constexpr unsigned SWIZZLE_128B = 1u << 30;

// The matrix begins at `at`, an address in shared memory. leading, stride: PTX's leading and stride dimension byte
// offsets; their meaning depends on the order (swizzle.cuh).
__device__ __forceinline__ Descriptor make_descriptor(unsigned at, unsigned leading, unsigned stride) {
#if CLUSTER > 1
    at &= 0x3ffff;  // in a cluster, bits 24 and up of an address are the block's rank: they would change `leading`
#endif
    return {at / 16 | leading / 16 << 16, stride / 16 | SWIZZLE_128B};
}

// The descriptor advanced by `bytes`.
__device__ __forceinline__ Descriptor operator+(Descriptor descriptor, unsigned bytes) {
    return {descriptor.low + bytes / 16, descriptor.high};
}
