// Shared-memory layouts of TMA and wgmma as plain functions: boxes of tensors, 128-byte swizzle, matrix descriptors,
// products.
#pragma once
#include <stdint.h>
#include <string.h>

#include "runtime.h"

namespace cpu {

// 128-byte swizzle: permutes 16-byte chunks within 128 bytes. The offset counts from an address that is a multiple of
// 1024.
inline uint64_t swizzled(uint64_t offset) { return offset ^ (offset >> 3 & 0x70); }

constexpr unsigned BOX_ROW = 128;  // bytes, the width of the swizzle

inline uint64_t box_bytes(const TensorMap& map) { return uint64_t(BOX_ROW) * map.box[1]; }

// Calls f(address in the tensor, offset in the box, bytes inside the tensor) for each 16-byte chunk.
template <class F>
inline void for_box_chunks(const TensorMap& map, const int (&at)[MAP_RANK], F f) {
    uint64_t place = 0;
    for (unsigned s = 0; s < map.box[1]; ++s)
        for (unsigned chunk = 0; chunk < BOX_ROW / 16; ++chunk, place += 16) {
            const int64_t index[MAP_RANK] = {int64_t(at[0]) + chunk * 16 / map.itemsize, int64_t(at[1]) + s, at[2],
                                             at[3], at[4]};
            bool inside = true;
            for (unsigned i = 0; i < MAP_RANK; ++i) inside &= index[i] >= 0 && index[i] < int64_t(map.size[i]);
            const int64_t left = (int64_t(map.size[0]) - index[0]) * map.itemsize;
            uint64_t from =
                reinterpret_cast<uint64_t>(map.data) + index[0] * map.itemsize;  // modulo 2^64, as in hardware
            for (unsigned i = 1; i < MAP_RANK; ++i) from += uint64_t(index[i]) * map.stride[i - 1];
            f(reinterpret_cast<char*>(from), swizzled(place), inside ? (left < 16 ? unsigned(left) : 16u) : 0u);
        }
}

inline void load_box(char* smem, const TensorMap& map, const int (&at)[MAP_RANK]) {
    for_box_chunks(map, at, [&](const char* from, uint64_t place, unsigned valid) {
        memcpy(smem + place, from, valid);
        memset(smem + place + valid, 0, 16 - valid);
    });
}
inline void store_box(const char* smem, const TensorMap& map, const int (&at)[MAP_RANK]) {
    for_box_chunks(map, at, [&](char* to, uint64_t place, unsigned valid) { memcpy(to, smem + place, valid); });
}

// ---- matrices of 16-bit elements, addressed by a wgmma descriptor

struct MatrixDescriptor {
    uint64_t start, leading, stride;  // bytes
    unsigned swizzle, base_offset;
    explicit MatrixDescriptor(uint64_t bits)
        : start((bits & 0x3fff) << 4), leading((bits >> 16 & 0x3fff) << 4), stride((bits >> 32 & 0x3fff) << 4),
          swizzle(bits >> 62), base_offset(bits >> 49 & 7) {}
};

constexpr unsigned DEPTH = 16, WIDEST = 256;  // K and the largest N of one wgmma

struct ByteRange {
    uint64_t begin, end;
};

// Reads elements (k, first ... first + count - 1) of the matrix described by `place`; K-major or MN-major. Returns the
// byte range of the matrix in `smem`; reads nothing at or after `end`. Calls reads(offset) for each 16 bytes read.
template <class F>
inline ByteRange read_matrix(uint16_t (&to)[DEPTH][WIDEST], const char* smem, uint64_t end,
                             const MatrixDescriptor& place, bool k_major, unsigned first, unsigned count, F reads) {
    ByteRange range{~0ull, 0};
    const auto chunk = [&](uint64_t offset, uint16_t (&elements)[8]) {
        offset = swizzled(place.start + offset);
        if (offset < range.begin) range.begin = offset;
        if (offset + 16 > range.end) range.end = offset + 16;
        if (offset + 16 > end) return;
        reads(offset);
        memcpy(elements, smem + offset, 16);
    };
    uint16_t eight[8] = {};
    if (k_major) {
        for (unsigned i = 0; i < count; ++i)
            for (unsigned k = 0; k < DEPTH; k += 8) {
                chunk((first + i) % 8 * 128 + (first + i) / 8 * place.stride + 2 * k, eight);
                for (unsigned e = 0; e < 8; ++e) to[k + e][i] = eight[e];
            }
    } else {
        for (unsigned k = 0; k < DEPTH; ++k)
            for (unsigned i = 0; i < count; i += 8) {
                const unsigned column = first + i;
                chunk(k % 8 * 128 + k / 8 * place.stride + column % 64 * 2 + column / 64 * place.leading, eight);
                memcpy(&to[k][i], eight, 16);
            }
    }
    return range;
}

inline float widened(uint16_t x, bool bfloat16) {  // branch-free, so that the compiler vectorises it
    const uint32_t sign = (x & 0x8000u) << 16, magnitude = (x & 0x7fffu) << (bfloat16 ? 16 : 13);
    uint32_t bits = magnitude;
    if (!bfloat16) {
        float scaled;
        memcpy(&scaled, &magnitude, 4);
        scaled *= 0x1p112f;  // difference of the exponent biases
        memcpy(&bits, &scaled, 4);
        bits |= magnitude >= 0x0f800000u ? 0x7f800000u : 0u;  // inf, NaN
    }
    bits |= sign;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

inline float widened8(unsigned x, bool e5m2) {
    const uint32_t sign = (x & 0x80u) << 24;
    uint32_t magnitude = (x & 0x7fu) << (e5m2 ? 21 : 20), bits;
    const bool special = e5m2 ? (x & 0x7fu) >= 0x7cu : (x & 0x7fu) == 0x7fu;
    float scaled;
    memcpy(&scaled, &magnitude, 4);
    scaled *= e5m2 ? 0x1p112f : 0x1p120f;  // difference of the exponent biases
    memcpy(&bits, &scaled, 4);
    if (special) bits = 0x7f800000u | (e5m2 && (x & 0x7fu) == 0x7cu ? 0u : 0x400000u);  // inf; NaN
    bits |= sign;
    memcpy(&scaled, &bits, 4);
    return scaled;
}

// Rounds towards zero to 14 bits, the precision of a sum of FP8 products in Hopper's tensor cores.
inline float round_to_fp8_accumulator(double x) {
    float sum = static_cast<float>(x);
    uint32_t bits;
    memcpy(&bits, &sum, 4);
    if ((bits & 0x7f800000u) == 0x7f800000u) return sum;
    bits &= 0xfffffc00u;
    memcpy(&sum, &bits, 4);
    return sum;
}

// `multiply` for FP8 operands: a 16-bit element contains two, k = 2 i in its low byte.
inline void multiply8(float (&D)[16][WIDEST], const uint16_t (&A)[DEPTH][WIDEST], const uint16_t (&B)[DEPTH][WIDEST],
                      unsigned n, bool accumulate, bool e5m2) {
    float b[2 * DEPTH][WIDEST];
    for (unsigned k = 0; k < 2 * DEPTH; ++k)
        for (unsigned i = 0; i < n; ++i) b[k][i] = widened8(B[k / 2][i] >> 8 * (k % 2) & 0xffu, e5m2);
    for (unsigned row = 0; row < 16; ++row) {
        double sum[WIDEST];
        for (unsigned i = 0; i < n; ++i) sum[i] = accumulate ? D[row][i] : 0.0;
        for (unsigned k = 0; k < 2 * DEPTH; ++k) {
            const float a = widened8(A[k / 2][row] >> 8 * (k % 2) & 0xffu, e5m2);
            for (unsigned i = 0; i < n; ++i) sum[i] += static_cast<double>(a) * b[k][i];
        }
        for (unsigned i = 0; i < n; ++i) D[row][i] = round_to_fp8_accumulator(sum[i]);
    }
}

// D (16 x n) = or += A (16 x 16, stored [k][row]) B (16 x n, stored [k][column]).
inline void multiply(float (&D)[16][WIDEST], const uint16_t (&A)[DEPTH][WIDEST], const uint16_t (&B)[DEPTH][WIDEST],
                     unsigned n, bool accumulate, Format format) {
    if (format == Format::e4m3 || format == Format::e5m2)
        return multiply8(D, A, B, n, accumulate, format == Format::e5m2);
    const bool bfloat16 = format == Format::bfloat16;
    float b[DEPTH][WIDEST];
    for (unsigned k = 0; k < DEPTH; ++k)
        for (unsigned i = 0; i < n; ++i) b[k][i] = widened(B[k][i], bfloat16);
    for (unsigned row = 0; row < 16; ++row) {
        if (!accumulate) memset(D[row], 0, sizeof(D[row]));
        for (unsigned k = 0; k < DEPTH; ++k) {
            const float a = widened(A[k][row], bfloat16);
            for (unsigned i = 0; i < n; i += 8)
                for (unsigned e = 0; e < 8; ++e) D[row][i + e] += a * b[k][i + e];
        }
    }
}

}  // namespace cpu
