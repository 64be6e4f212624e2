// Loads a tile of Q or dO (load_query_tile), or of K or V (load_key_tile), by TMA: from row m0 or n0 on of head h in
// batch entry b, which seqlen.cuh maps to coordinates. A dimension with stride 0 (broadcast) has size 1 in the tensor
// map: its coordinate is 0. `extra_tx_bytes`: bytes that further loads write with the same mbarrier, `full`.
#pragma once
#include "swizzle.cuh"

template <class SmemLayout, class Tensor, class Sequence>
__device__ __forceinline__ void load_query_tile(SmemAddr tile, const TensorMap& map, const Tensor& tensor,
                                                const Sequence& sequence, int b, int h, int m0, SmemAddr full,
                                                unsigned extra_tx_bytes = 0) {
    SmemLayout::load(tile, map, sequence.tma_query_row(m0), tensor.stride_h ? h : 0,
                     sequence.tma_query_batch(tensor.stride_b ? b : 0), full, extra_tx_bytes);
}
template <class SmemLayout, class Tensor, class Sequence>
__device__ __forceinline__ void load_key_tile(SmemAddr tile, const TensorMap& map, const Tensor& tensor,
                                              const Sequence& sequence, int b, int h, int n0, SmemAddr full,
                                              unsigned extra_tx_bytes = 0) {
    SmemLayout::load(tile, map, sequence.tma_key_row(n0), tensor.stride_h ? h : 0,
                     sequence.tma_key_batch(tensor.stride_b ? b : 0), full, extra_tx_bytes);
}
