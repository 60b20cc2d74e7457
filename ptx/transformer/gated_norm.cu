// RMS normalisation with a gate. See src/device/kernels/gated_norm.rs. A warp has a row; its lanes take N columns at a time.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256, WARPS = THREADS / WARP;

template <typename T, int N>
__device__ __forceinline__ float rstd_of(const T* x, unsigned cols, float eps) {
    float sum = 0.0f;
    for (unsigned col = threadIdx.x % WARP * N; col < cols; col += WARP * N) {
        float own[N];
        Vec<T, N>::load(x + col).widen(own);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(own[i], own[i], sum);
    }
    return __frcp_rn(__fsqrt_rn(__fdiv_rn(warp_sum(sum), float(cols)) + eps));
}

// Reads x and gate and writes out, 16384 x 4096 in bf16 each: 403 MB, 94 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void gated_norm(const T* x, const T* gate, const T* weight, float eps, T* out, unsigned rows, unsigned cols) {
    const unsigned row = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (row >= rows) return;
    const size_t start = (size_t)row * cols;
    const float rstd = rstd_of<T, N>(x + start, cols, eps);
    for (unsigned col = threadIdx.x % WARP * N; col < cols; col += WARP * N) {
        float own[N], g[N], w[N];
        Vec<T, N>::load(x + start + col).widen(own);
        Vec<T, N>::load(gate + start + col).widen(g);
        Vec<T, N>::load(weight + col).widen(w);
#pragma unroll
        for (int i = 0; i < N; i++) own[i] = own[i] * rstd * w[i] * (g[i] * sigmoid(g[i]));
        Vec<T, N>::narrow(own).store(out + start + col);
    }
}

// partials, fp32 [gridDim.x * WARPS, cols], has the gradients of the weight over the rows of each warp. The kernel for vectors has
// them in registers: it takes rows of at most 128 columns.
// Reads dout, x and gate and writes dx and dgate, 16384 x 4096 in bf16 each: 671 MB, 156 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void gated_norm_backward(
    const T* dout, const T* x, const T* gate, const T* weight, float eps, T* dx, T* dgate, float* partials, unsigned rows, unsigned cols) {
    const unsigned warp = blockIdx.x * WARPS + threadIdx.x / WARP, first = threadIdx.x % WARP * N;
    float* const own_sums = partials + (size_t)warp * cols;
    float sums[N] = {};
    if (N == 1) {
        for (unsigned col = first; col < cols; col += WARP) own_sums[col] = 0.0f;
    }
    for (unsigned row = warp; row < rows; row += gridDim.x * WARPS) {
        const size_t start = (size_t)row * cols;
        const float rstd = rstd_of<T, N>(x + start, cols, eps);
        float along = 0.0f;
        for (unsigned col = first; col < cols; col += WARP * N) {
            float d[N], xhat[N], g[N], w[N];
            Vec<T, N>::load(dout + start + col).widen(d);
            Vec<T, N>::load(x + start + col).widen(xhat);
            Vec<T, N>::load(gate + start + col).widen(g);
            Vec<T, N>::load(weight + col).widen(w);
#pragma unroll
            for (int i = 0; i < N; i++) {
                xhat[i] *= rstd;
                const float s = sigmoid(g[i]), gated = d[i] * (g[i] * s);
                along = fmaf(gated * w[i], xhat[i], along);
                if (N == 1) own_sums[col] = fmaf(gated, xhat[i], own_sums[col]);
                else sums[i] = fmaf(gated, xhat[i], sums[i]);
                g[i] = d[i] * w[i] * xhat[i] * silu_slope(g[i], s);
            }
            Vec<T, N>::narrow(g).store(dgate + start + col);
        }
        const float mean = __fdiv_rn(warp_sum(along), float(cols));
        for (unsigned col = first; col < cols; col += WARP * N) {
            float d[N], xhat[N], g[N], w[N];
            Vec<T, N>::load(dout + start + col).widen(d);
            Vec<T, N>::load(x + start + col).widen(xhat);
            Vec<T, N>::load(gate + start + col).widen(g);
            Vec<T, N>::load(weight + col).widen(w);
#pragma unroll
            for (int i = 0; i < N; i++) d[i] = rstd * fmaf(xhat[i] * rstd, -mean, d[i] * (g[i] * sigmoid(g[i])) * w[i]);
            Vec<T, N>::narrow(d).store(dx + start + col);
        }
    }
    if (N > 1 && first < cols) {
#pragma unroll
        for (int i = 0; i < N; i++) own_sums[first + i] = sums[i];
    }
}

#define GATED_NORM_OF(NAME, T, N)                                                                                                   \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_norm##NAME(                                                          \
        const T* x, const T* gate, const T* weight, float eps, T* out, unsigned rows, unsigned cols) {                              \
        gated_norm<T, N>(x, gate, weight, eps, out, rows, cols);                                                                    \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS) gated_norm_backward##NAME(const T* dout, const T* x, const T* gate,        \
        const T* weight, float eps, T* dx, T* dgate, float* partials, unsigned rows, unsigned cols) {                               \
        gated_norm_backward<T, N>(dout, x, gate, weight, eps, dx, dgate, partials, rows, cols);                                     \
    }
#define GATED_NORM(NAME, T) GATED_NORM_OF(_##NAME, T, 4) GATED_NORM_OF(_any_##NAME, T, 1)
FOR_EACH_FORMAT(GATED_NORM)
