// Attention sinks, behind attention. See src/device/kernels/sinks.rs.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256;

// Where `[batch, heads, seq_length]` has a head of a token.
__device__ __forceinline__ size_t place(unsigned token, unsigned head, unsigned heads, unsigned seq_length) {
    const unsigned sequence = token / seq_length;
    return ((size_t)sequence * heads + head) * seq_length + (token - sequence * seq_length);
}

// Scales the head of a token, and corrects its log-sum-exp; 2^lanes_log2 lanes each, N elements at a time.
// Reads and writes T x heads x head_dim: 16384 x 4096 in bf16 are 268 MB, 62 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void sinks(
    const T* sinks, T* out, float* lse, unsigned rows, unsigned heads, unsigned head_dim, unsigned seq_length, unsigned lanes_log2) {
    const unsigned lanes = 1u << lanes_log2, lane = threadIdx.x & (lanes - 1);
    const unsigned row = blockIdx.x * (THREADS >> lanes_log2) + (threadIdx.x >> lanes_log2);
    const bool is_row = row < rows;
    const unsigned token = row / heads, head = row - token * heads;
    float* const own = lse + place(token, head, heads, seq_length);
    const float before = is_row ? *own : 0.0f, sink = is_row ? widen(sinks[head]) : 0.0f, largest = sink > before ? sink : before;
    const float seen = exp_exact(before - largest), sunk = exp_exact(sink - largest), scale = __fdiv_rn(seen, seen + sunk);
    // Every lane of the row has read before one writes.
    __syncwarp();
    if (!is_row) return;
    out += (size_t)row * head_dim;
    for (unsigned i = lane * N; i < head_dim; i += lanes * N) {
        float x[N];
        Vec<T, N>::load(out + i).widen(x);
#pragma unroll
        for (int k = 0; k < N; k++) x[k] *= scale;
        Vec<T, N>::narrow(x).store(out + i);
    }
    if (lane == 0) *own = largest + logf(seen + sunk);
}

// partials[b, head] = - the sum over the tokens b, b + gridDim.x, ... of exp(sink - lse) <dout, out>, fp32 [gridDim.x, heads]. Block (b, y) has as
// many heads as it has groups of 2^lanes_log2 lanes.
// Reads dout and out: 16384 x 4096 in bf16 are 268 MB, 62 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void sinks_backward(
    const T* dout, const T* out, const float* lse, const T* sinks, float* partials, unsigned tokens, unsigned heads, unsigned head_dim,
    unsigned seq_length, unsigned lanes_log2) {
    const unsigned lanes = 1u << lanes_log2, lane = threadIdx.x & (lanes - 1);
    const unsigned head = blockIdx.y * (THREADS >> lanes_log2) + (threadIdx.x >> lanes_log2);
    const bool is_head = head < heads;
    const float sink = is_head ? widen(sinks[head]) : 0.0f;
    const unsigned cols = is_head ? head_dim : 0;
    float sum = 0.0f;
#pragma unroll 2
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x) {
        const size_t row = ((size_t)token * heads + head) * head_dim;
        float delta = 0.0f;
        for (unsigned i = lane * N; i < cols; i += lanes * N) {
            float x[N], y[N];
            Vec<T, N>::load(dout + row + i).widen(x);
            Vec<T, N>::load(out + row + i).widen(y);
#pragma unroll
            for (int k = 0; k < N; k++) delta = fmaf(x[k], y[k], delta);
        }
        delta = warp_sum(delta, lanes);
        const float probability = is_head ? exp_exact(sink - lse[place(token, head, heads, seq_length)]) : 0.0f;
        sum = fmaf(probability, -delta, sum);
    }
    if (is_head && lane == 0) partials[(size_t)blockIdx.x * heads + head] = sum;
}

#define SINKS_OF(NAME, T, N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) sinks##NAME(const T* s, T* out, float* lse, unsigned rows,          \
        unsigned heads, unsigned head_dim, unsigned seq_length, unsigned lanes_log2) {                                        \
        sinks<T, N>(s, out, lse, rows, heads, head_dim, seq_length, lanes_log2);                                              \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) sinks_backward##NAME(const T* dout, const T* out, const float* lse, \
        const T* s, float* partials, unsigned tokens, unsigned heads, unsigned head_dim, unsigned seq_length,                 \
        unsigned lanes_log2) {                                                                                                \
        sinks_backward<T, N>(dout, out, lse, s, partials, tokens, heads, head_dim, seq_length, lanes_log2);                   \
    }
#define SINKS(NAME, T) SINKS_OF(_##NAME, T, WIDE<T>) SINKS_OF(_any_##NAME, T, 1)
FOR_EACH_FORMAT(SINKS)
