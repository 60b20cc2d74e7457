// Attention sinks, behind attention. See src/device/kernels/sinks.rs.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
constexpr unsigned BACKWARD_THREADS = 1024;

// Where `[batch, heads, seq_length]` has head `row % heads` of token `row / heads`.
__device__ __forceinline__ size_t place(size_t row, unsigned heads, unsigned seq_length) {
    const size_t token = row / heads, head = row % heads;
    return (token / seq_length * heads + head) * seq_length + token % seq_length;
}

// Scales the head of a token, and corrects its log-sum-exp; one warp each.
// Reads and writes T x heads x head_dim: 16384 x 4096 in bf16 are 268 MB, 62 us at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void sinks(
    const T* sinks, T* out, float* lse, size_t rows, unsigned heads, unsigned head_dim, unsigned seq_length) {
    const unsigned lane = threadIdx.x % WARP;
    const size_t row = (size_t)blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    float* const own = lse + place(row, heads, seq_length);
    const float before = *own, sink = widen(sinks[row % heads]), largest = sink > before ? sink : before;
    const float seen = exp_exact(before - largest), sunk = exp_exact(sink - largest), scale = __fdiv_rn(seen, seen + sunk);
    out += row * head_dim;
    for (unsigned i = lane; i < head_dim; i += WARP) out[i] = narrow<T>(widen(out[i]) * scale);
    __syncwarp();
    if (lane == 0) *own = largest + logf(seen + sunk);
}

// dsinks[head] (+)= - the sum over tokens of exp(sink - lse) <dout, out>. One block a head; warp w of it has the tokens w, w + 32, ...
template <typename T>
__device__ __forceinline__ void sinks_backward(
    const T* dout, const T* out, const float* lse, const T* sinks, T* dsinks, unsigned tokens, unsigned heads, unsigned head_dim,
    unsigned seq_length, bool accumulate) {
    __shared__ float shared[WARP];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, head = blockIdx.x;
    const float sink = widen(sinks[head]);
    float sum = 0.0f;
    for (unsigned token = warp; token < tokens; token += BACKWARD_THREADS / WARP) {
        const size_t row = (size_t)token * heads + head;
        float delta = 0.0f;
        for (unsigned i = lane; i < head_dim; i += WARP) delta = fmaf(widen(dout[row * head_dim + i]), widen(out[row * head_dim + i]), delta);
        sum = fmaf(exp_exact(sink - lse[place(row, heads, seq_length)]), -warp_sum(delta), sum);
    }
    if (lane == 0) shared[warp] = sum;
    __syncthreads();
    if (warp > 0) return;
    float total[1] = {warp_sum(shared[lane])};
    if (lane == 0) store_sums<T, 1>(total, dsinks + head, accumulate);
}

#define SINKS(NAME, T)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(THREADS) sinks_##NAME(const T* s, T* out, float* lse,                        \
        unsigned long long rows, unsigned heads, unsigned head_dim, unsigned seq_length) {                                    \
        sinks(s, out, lse, rows, heads, head_dim, seq_length);                                                                \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) sinks_backward_##NAME(const T* dout, const T* out,         \
        const float* lse, const T* s, T* dsinks, unsigned tokens, unsigned heads, unsigned head_dim, unsigned seq_length,     \
        unsigned accumulate) {                                                                                                \
        sinks_backward(dout, out, lse, s, dsinks, tokens, heads, head_dim, seq_length, accumulate != 0);                      \
    }
FOR_EACH_FORMAT(SINKS)
