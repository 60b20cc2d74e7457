// RMS normalisation of queries, keys and values, and a factor on the residual stream. See src/device/kernels/normed_values.rs.
#include "common.cuh"

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
// Channels of a lane, for heads of up to 512 channels: channel `lane + i * WARP`.
constexpr unsigned CHANNELS = 16;

__device__ __forceinline__ unsigned lane() { return threadIdx.x % WARP; }

// The channels of a head that a lane has, zeros beyond its end.
template <typename T>
__device__ __forceinline__ void load_head(const T* head, unsigned d, float (&x)[CHANNELS]) {
#pragma unroll
    for (unsigned i = 0; i < CHANNELS; i++) {
        const unsigned channel = lane() + i * WARP;
        x[i] = channel < d ? widen(head[channel]) : 0.0f;
    }
}

template <typename T, typename F>
__device__ __forceinline__ void store_head(T* head, unsigned d, F value) {
#pragma unroll
    for (unsigned i = 0; i < CHANNELS; i++) {
        const unsigned channel = lane() + i * WARP;
        if (channel < d) head[channel] = narrow<T>(value(i, channel));
    }
}

// A warp has a head before its norm. Reads the raw heads and writes all heads: 16384 tokens of 32 + 2 x 4 heads of 512 channels in bf16 are
// 1.3 GB, 0.3 ms at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void qkv_norm(
    const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned items, unsigned heads, unsigned kv_heads,
    unsigned d, bool values_are_keys) {
    const unsigned item = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (item >= items) return;
    const unsigned keys_end = heads + kv_heads, raw = values_are_keys ? keys_end : keys_end + kv_heads, all = keys_end + kv_heads;
    const unsigned token = item / raw, head = item % raw;
    float x[CHANNELS], sum = 0.0f;
    load_head(qkv + (size_t)item * d, d, x);
#pragma unroll
    for (unsigned i = 0; i < CHANNELS; i++) sum = fmaf(x[i], x[i], sum);
    const float scale = __frcp_rn(__fsqrt_rn(warp_sum(sum) / (float)d + eps));
    if (lane() == 0) rstd[item] = scale;
    T* const to = out + ((size_t)token * all + head) * d;
    if (head >= keys_end) {
        store_head(to, d, [&](unsigned i, unsigned) { return x[i] * scale; });
        return;
    }
    const T* const weight = head < heads ? q_weight : k_weight;
    store_head(to, d, [&](unsigned i, unsigned channel) { return x[i] * scale * widen(weight[channel]); });
    if (values_are_keys && head >= heads) {
        store_head(to + (size_t)kv_heads * d, d, [&](unsigned i, unsigned) { return x[i] * scale; });
    }
}

// Some heads of every token; a warp takes several of them, and writes its sum of the weight's gradient to `partials`, `[warps, d]`. Without a weight
// there are no partials. With `second`, heads from there on have the same input without a weight. Reads gradients and raw heads, and writes raw
// heads: 16384 tokens of 32 + 2 x 4 heads of 512 channels in bf16 are 1.9 GB, 0.44 ms at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void qkv_norm_backward(
    const T* dout, T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first, unsigned count,
    unsigned second, unsigned raw, unsigned all, unsigned d) {
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / WARP;
    float sums[CHANNELS] = {};
    for (unsigned item = warp; item < tokens * count; item += gridDim.x * WARPS) {
        const unsigned token = item / count, head = item % count;
        const size_t place = (size_t)token * raw + first + head, row = (size_t)token * all;
        float x[CHANNELS], g[CHANNELS], mean = 0.0f;
        load_head(qkv + place * d, d, x);
        load_head(dout + (row + first + head) * d, d, g);
        const float scale = rstd[place];
#pragma unroll
        for (unsigned i = 0; i < CHANNELS; i++) {
            const unsigned channel = lane() + i * WARP;
            x[i] *= scale;
            if (weight != nullptr && channel < d) {
                sums[i] = fmaf(g[i], x[i], sums[i]);
                g[i] *= widen(weight[channel]);
            }
            if (second != 0 && channel < d) g[i] += widen(dout[(row + second + head) * d + channel]);
            mean = fmaf(g[i], x[i], mean);
        }
        mean = warp_sum(mean) / (float)d;
        store_head(qkv + place * d, d, [&](unsigned i, unsigned) { return scale * fmaf(x[i], -mean, g[i]); });
    }
    if (partials == nullptr) return;
#pragma unroll
    for (unsigned i = 0; i < CHANNELS; i++) {
        const unsigned channel = lane() + i * WARP;
        if (channel < d) partials[(size_t)warp * d + channel] = sums[i];
    }
}

// Reads and writes all elements: 16384 x 5376 in bf16 are 352 MB, 82 us at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void scale_by(T* x, const T* factor, size_t elems) {
    constexpr unsigned EACH = 8;
    const float scale = widen(factor[0]);
    const size_t first = (size_t)blockIdx.x * THREADS * EACH + threadIdx.x;
#pragma unroll
    for (unsigned i = 0; i < EACH; i++) {
        const size_t at = first + i * THREADS;
        if (at < elems) x[at] = narrow<T>(widen(x[at]) * scale);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define KERNELS(NAME, T)                                                                                                       \
    KERNEL qkv_norm_##NAME(const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned items, \
        unsigned heads, unsigned kv_heads, unsigned d, unsigned values_are_keys) {                                             \
        qkv_norm(qkv, q_weight, k_weight, eps, out, rstd, items, heads, kv_heads, d, values_are_keys != 0);                    \
    }                                                                                                                          \
    KERNEL qkv_norm_backward_##NAME(const T* dout, T* qkv, const T* weight, const float* rstd, float* partials,                \
        unsigned tokens, unsigned first, unsigned count, unsigned second, unsigned raw, unsigned all, unsigned d) {            \
        qkv_norm_backward(dout, qkv, weight, rstd, partials, tokens, first, count, second, raw, all, d);                       \
    }                                                                                                                          \
    KERNEL scale_by_##NAME(T* x, const T* factor, unsigned long long elems) { scale_by(x, factor, elems); }
FOR_EACH_FORMAT(KERNELS)
