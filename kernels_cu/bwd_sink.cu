// The gradient of the sinks: dsink[h] = -sum over b and i of exp(sink[h] - LSE) * delta.
//
// A sink is a key of score sink[h] and value 0, which every row sees: P = exp(sink - LSE), dP = dO . 0 = 0, and
// dS = P * (dP - delta). One block a head; each thread's sum and the tree over the block have an order that never changes.
#include "common.cuh"
#include "score.cuh"

static_assert(SMEM_BYTES == 0, "spec and kernel disagree on shared memory");

extern "C" __global__ __launch_bounds__(32 * WARPS) void bwd_sink(
    const float* LSE,    // (B, H, Sq), contiguous
    const float* delta,  // (B, H, Sq), contiguous
    float* dsink,        // (H,)
    int B,
    int H,
    Score score) {
    __shared__ float sums[WARPS];
    const int h = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float sum = 0.0f;
#if SINK
    const float sink = Head(score, 0, h).sink;
    for (int b = 0; b < B && sink != -INF; ++b) {
        const Sequence sequence(score, b);
        const long long first = sequence.first_row(H, h);
        for (int i = threadIdx.x; i < sequence.Sq; i += 32 * WARPS) sum -= expf(sink - LSE[first + i]) * delta[first + i];
    }
#endif
    sum = row_sum<32>(sum);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();  // every warp's sum is there
    if (warp > 0) return;
    sum = row_sum<32>(lane < WARPS ? sums[lane] : 0.0f);
    if (lane == 0) dsink[h] = sum;
}
