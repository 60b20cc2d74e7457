// What experts do to their rows between the two products. See src/device/cpu/kernels/experts.rs: elements have its bits.
//
// Bound by memory. Gate and up lie apart (all gates, then all ups) or in turns; the launcher says how many elements a thread takes.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256;

struct Glu {
    float out, by_gate, by_up;
};

// How gate and up make an activation: clamped if `limit` is positive.
struct Activation {
    float alpha, limit;

    __device__ __forceinline__ bool is_clamped() const { return limit > 0.0f; }

    __device__ __forceinline__ Glu plain(float gate, float up) const {
        const float s = sigmoid(gate), silu = gate * s;
        return {silu * up, up * silu_slope(gate, s), silu};
    }

    __device__ __forceinline__ Glu clamped(float gate, float up) const {
        const float g = gate > limit ? limit : gate;
        float u = up > limit ? limit : up;
        u = u < -limit ? -limit : u;
        const float s = sigmoid(alpha * g), glu = g * s;
        u += 1.0f;
        return {u * glu, gate > limit ? 0.0f : u * silu_slope(alpha * g, s), up > limit || up < -limit ? 0.0f : glu};
    }
};

// out = clamped_swiglu(gate_up), gate and up in turns; a thread takes one output.
// Reads two values and writes one: 65536 x 2880 in bf16 are 1.1 GB, 0.26 ms at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void clamped_swiglu(const T* gate_up, T* out, size_t count, Activation activation) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i < count) out[i] = narrow<T>(activation.clamped(widen(gate_up[2 * i]), widen(gate_up[2 * i + 1])).out);
}

// x[row] += the bias of the row's expert; block (row, y) has a part of the columns, N a thread.
template <typename T, int N>
__device__ __forceinline__ void expert_bias(const T* bias, const int* experts, const int* entries, T* x, unsigned cols) {
    const unsigned row = blockIdx.x, col = (blockIdx.y * THREADS + threadIdx.x) * N;
    if (col >= cols) return;
    float sums[N];
    Vec<T, N>::load(bias + (size_t)experts[entries[row]] * cols + col).widen(sums);
    store_sums<T, N>(sums, x + (size_t)row * cols + col, true);
}

// One block a row. Reads three values and writes three for each of `cols`.
template <typename T>
__device__ __forceinline__ void expert_backward(
    const T* da, const T* gate_up, const float* weights, const int* entries, T* dgate_up, T* weighted, float* dweights, unsigned cols,
    Activation activation) {
    __shared__ float shared[1][WARP];
    const size_t row = blockIdx.x, first = row * cols;
    const bool clamped = activation.is_clamped();
    const float weight = weights[entries[row]];
    float sum[1] = {0.0f};
    for (unsigned col = threadIdx.x; col < cols; col += THREADS) {
        const size_t gate = 2 * first + (clamped ? 2 * col : col), up = clamped ? gate + 1 : gate + cols;
        const float g = widen(gate_up[gate]), u = widen(gate_up[up]), d = widen(da[first + col]), scaled = weight * d;
        const Glu glu = clamped ? activation.clamped(g, u) : activation.plain(g, u);
        dgate_up[gate] = narrow<T>(scaled * glu.by_gate);
        dgate_up[up] = narrow<T>(scaled * glu.by_up);
        weighted[first + col] = narrow<T>(weight * glu.out);
        sum[0] = fmaf(d, glu.out, sum[0]);
    }
    block_sum(sum, shared);
    if (threadIdx.x == 0) dweights[row] = sum[0];
}

// dweights[row] += <dout[row], the bias of the row's expert>; one block a row.
template <typename T>
__device__ __forceinline__ void expert_bias_dot(
    const T* dout, const T* bias, const int* experts, const int* entries, float* dweights, unsigned cols) {
    __shared__ float shared[1][WARP];
    const size_t row = blockIdx.x, expert = experts[entries[row]];
    float sum[1] = {0.0f};
    for (unsigned col = threadIdx.x; col < cols; col += THREADS) {
        sum[0] = fmaf(widen(dout[row * cols + col]), widen(bias[expert * cols + col]), sum[0]);
    }
    block_sum(sum, shared);
    if (threadIdx.x == 0) dweights[row] += sum[0];
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define EXPERTS(NAME, T)                                                                                                      \
    KERNEL clamped_swiglu_##NAME(const T* gate_up, T* out, unsigned long long count, float alpha, float limit) {              \
        clamped_swiglu(gate_up, out, count, {alpha, limit});                                                                  \
    }                                                                                                                         \
    KERNEL expert_bias_##NAME(const T* bias, const int* experts, const int* entries, T* x, unsigned cols) {                   \
        expert_bias<T, WIDE<T>>(bias, experts, entries, x, cols);                                                             \
    }                                                                                                                         \
    KERNEL expert_bias_any_##NAME(const T* bias, const int* experts, const int* entries, T* x, unsigned cols) {               \
        expert_bias<T, 1>(bias, experts, entries, x, cols);                                                                   \
    }                                                                                                                         \
    KERNEL expert_backward_##NAME(const T* da, const T* gate_up, const float* weights, const int* entries, T* dgate_up,       \
        T* weighted, float* dweights, unsigned cols, float alpha, float limit) {                                              \
        expert_backward(da, gate_up, weights, entries, dgate_up, weighted, dweights, cols, {alpha, limit});                   \
    }                                                                                                                         \
    KERNEL expert_bias_dot_##NAME(                                                                                            \
        const T* dout, const T* bias, const int* experts, const int* entries, float* dweights, unsigned cols) {               \
        expert_bias_dot(dout, bias, experts, entries, dweights, cols);                                                        \
    }
FOR_EACH_FORMAT(EXPERTS)
