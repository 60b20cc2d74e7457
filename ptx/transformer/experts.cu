// What experts do to their rows between the two products. See src/device/cpu/kernels/experts.rs: elements have its bits.
//
// Bound by memory. Gate and up lie apart (all gates, then all ups) or in turns. The kernels named `any` take one element at a time, for rows that
// are not whole vectors.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256;
// Rows of a block of expert_bias; the launcher knows this.
constexpr unsigned BIAS_ROWS = 4;

struct Glu {
    float out, by_gate, by_up;
};

// How gate and up make an activation.
enum class Kind { SWIGLU, CLAMPED, GEGLU };

// Clamped if `limit` is positive; GELU if it is negative.
struct Activation {
    float alpha, limit;

    __device__ __forceinline__ bool is_clamped() const { return limit > 0.0f; }
    __device__ __forceinline__ bool is_gelu() const { return limit < 0.0f; }

    __device__ __forceinline__ Glu plain(float gate, float up) const {
        const float s = sigmoid(gate), silu = gate * s;
        return {silu * up, up * silu_slope(gate, s), silu};
    }

    __device__ __forceinline__ Glu with_gelu(float gate, float up) const {
        const float glu = gelu(gate);
        return {glu * up, up * gelu_slope(gate), glu};
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

// Gates and ups in turns, as they lie in memory, `N` of each.
template <typename T, int N>
struct Turns {
    float gate[N], up[N];

    static __device__ __forceinline__ Turns load(const T* p) {
        float x[2 * N];
        Turns turns;
        if constexpr (N == 1) {
            x[0] = widen(p[0]), x[1] = widen(p[1]);
        } else {
            Vec<T, 2 * N>::load(p).widen(x);
        }
#pragma unroll
        for (int i = 0; i < N; i++) turns.gate[i] = x[2 * i], turns.up[i] = x[2 * i + 1];
        return turns;
    }
    __device__ __forceinline__ void store(T* p) const {
        float x[2 * N];
#pragma unroll
        for (int i = 0; i < N; i++) x[2 * i] = gate[i], x[2 * i + 1] = up[i];
        if constexpr (N == 1) {
            p[0] = narrow<T>(x[0]), p[1] = narrow<T>(x[1]);
        } else {
            Vec<T, 2 * N>::narrow(x).store(p);
        }
    }
};

// All gates of a row, then all ups: `N` of each, `cols` apart.
template <typename T, int N>
struct Halves {
    float gate[N], up[N];

    static __device__ __forceinline__ Halves load(const T* p, unsigned cols) {
        Halves halves;
        Vec<T, N>::load(p).widen(halves.gate);
        Vec<T, N>::load(p + cols).widen(halves.up);
        return halves;
    }
    __device__ __forceinline__ void store(T* p, unsigned cols) const {
        Vec<T, N>::narrow(gate).store(p);
        Vec<T, N>::narrow(up).store(p + cols);
    }
};

// out = clamped_swiglu(gate_up), gate and up in turns; a thread takes N outputs.
// Reads two values and writes one: 65536 x 2880 in bf16 are 1.1 GB, 0.26 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void clamped_swiglu(const T* gate_up, T* out, size_t count, Activation activation) {
    const size_t i = ((size_t)blockIdx.x * THREADS + threadIdx.x) * N;
    if (i >= count) return;
    const Turns<T, N> in = Turns<T, N>::load(gate_up + 2 * i);
    float y[N];
#pragma unroll
    for (int k = 0; k < N; k++) y[k] = activation.clamped(in.gate[k], in.up[k]).out;
    Vec<T, N>::narrow(y).store(out + i);
}

// x[row] += the bias of the row's expert. Block (b, y) has a part of the columns of BIAS_ROWS rows, N columns a thread: what it reads of all rows
// is in flight together.
// Reads and writes x: 65536 x 5760 in bf16 are 1.5 GB, 0.35 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void expert_bias(
    const T* bias, const int* experts, const int* entries, T* x, unsigned rows, unsigned cols) {
    const unsigned first = blockIdx.x * BIAS_ROWS, col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (col >= cols) return;
    Vec<T, N> held[BIAS_ROWS], biases[BIAS_ROWS];
#pragma unroll
    for (unsigned r = 0; r < BIAS_ROWS; r++) {
        if (first + r >= rows) break;
        held[r] = Vec<T, N>::load(x + (size_t)(first + r) * cols + col);
        biases[r] = Vec<T, N>::load(bias + (size_t)experts[entries[first + r]] * cols + col);
    }
#pragma unroll
    for (unsigned r = 0; r < BIAS_ROWS; r++) {
        if (first + r >= rows) break;
        float sums[N], before[N];
        biases[r].widen(sums);
        held[r].widen(before);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] += before[i];
        Vec<T, N>::narrow(sums).store(x + (size_t)(first + r) * cols + col);
    }
}

// Writes the gradients of N elements of a row and their weighted activations, and adds their part to `sum`.
template <Kind KIND, typename T, int N>
__device__ __forceinline__ void glu_backward(
    const T* da, T* weighted, float (&gate)[N], float (&up)[N], float weight, const Activation& activation, float& sum) {
    float d[N], out[N];
    Vec<T, N>::load(da).widen(d);
#pragma unroll
    for (int i = 0; i < N; i++) {
        const Glu glu = KIND == Kind::CLAMPED ? activation.clamped(gate[i], up[i])
            : KIND == Kind::GEGLU             ? activation.with_gelu(gate[i], up[i])
                                              : activation.plain(gate[i], up[i]);
        const float scaled = weight * d[i];
        gate[i] = scaled * glu.by_gate;
        up[i] = scaled * glu.by_up;
        out[i] = weight * glu.out;
        sum = fmaf(d[i], glu.out, sum);
    }
    Vec<T, N>::narrow(out).store(weighted);
}

// The same for a whole row of gates and then ups.
template <Kind KIND, typename T, int N>
__device__ __forceinline__ void halves_backward(
    const T* da, const T* gate_up, T* dgate_up, T* weighted, float weight, unsigned cols, const Activation& activation, float& sum) {
    for (unsigned col = threadIdx.x * N; col < cols; col += blockDim.x * N) {
        Halves<T, N> at = Halves<T, N>::load(gate_up + col, cols);
        glu_backward<KIND, T, N>(da + col, weighted + col, at.gate, at.up, weight, activation, sum);
        at.store(dgate_up + col, cols);
    }
}

// One block a row; a thread takes N neighbours of either half, or half as many in turns, so that what a warp reads and writes lies together.
// Reads three values and writes three for each of `cols`: 262144 x 1024 in bf16 are 3.2 GB, 0.75 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void expert_backward(
    const T* da, const T* gate_up, const float* weights, const int* entries, T* dgate_up, T* weighted, float* dweights, unsigned cols,
    Activation activation) {
    constexpr int TURNS = N > 1 ? N / 2 : 1;
    __shared__ float shared[1][WARP];
    const size_t row = blockIdx.x, first = row * cols;
    const float weight = weights[entries[row]];
    da += first, weighted += first, gate_up += 2 * first, dgate_up += 2 * first;
    float sum[1] = {0.0f};
    if (activation.is_clamped()) {
        for (unsigned col = threadIdx.x * TURNS; col < cols; col += blockDim.x * TURNS) {
            Turns<T, TURNS> at = Turns<T, TURNS>::load(gate_up + 2 * col);
            glu_backward<Kind::CLAMPED, T, TURNS>(da + col, weighted + col, at.gate, at.up, weight, activation, sum[0]);
            at.store(dgate_up + 2 * col);
        }
    } else if (activation.is_gelu()) {
        halves_backward<Kind::GEGLU, T, N>(da, gate_up, dgate_up, weighted, weight, cols, activation, sum[0]);
    } else {
        halves_backward<Kind::SWIGLU, T, N>(da, gate_up, dgate_up, weighted, weight, cols, activation, sum[0]);
    }
    block_sum(sum, shared);
    if (threadIdx.x == 0) dweights[row] = sum[0];
}

// dweights[row] += <dout[row], the bias of the row's expert>; one warp a row.
// Reads dout: 65536 x 2880 in bf16 are 377 MB, 88 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void expert_bias_dot(
    const T* dout, const T* bias, const int* experts, const int* entries, float* dweights, unsigned rows, unsigned cols) {
    const unsigned lane = threadIdx.x % WARP, row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    dout += (size_t)row * cols, bias += (size_t)experts[entries[row]] * cols;
    float sum = 0.0f;
#pragma unroll 4
    for (unsigned col = lane * N; col < cols; col += WARP * N) {
        float x[N], y[N];
        Vec<T, N>::load(dout + col).widen(x);
        Vec<T, N>::load(bias + col).widen(y);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(x[i], y[i], sum);
    }
    sum = warp_sum(sum);
    if (lane == 0) dweights[row] += sum;
}

// out[choice] = weights[choice] * the scale of its expert; one thread a choice.
// Reads two values and writes one for each choice: 131072 are 1.6 MB, less than a launch takes.
template <typename T>
__device__ __forceinline__ void scale_choices(const float* weights, const int* experts, const T* scale, float* out, unsigned choices) {
    const unsigned i = blockIdx.x * THREADS + threadIdx.x;
    if (i < choices) out[i] = weights[i] * widen(scale[experts[i]]);
}

// dscale[e] (+)= the sum over the rows of expert e of weights[entries[row]] * dweights[row], and then dweights[row] *= scale[e]; one block an
// expert, thread t of it the rows t, t + 256, ... of the segment.
// Reads three values and writes one for each row: 131072 are 2.1 MB, less than a launch takes.
template <typename T>
__device__ __forceinline__ void scale_choices_backward(
    const float* weights, const int* entries, const int* bounds, const T* scale, float* dweights, T* dscale, bool accumulate) {
    __shared__ float shared[1][WARP];
    const unsigned expert = blockIdx.x, end = bounds[expert + 1];
    const float factor = widen(scale[expert]);
    float sum[1] = {0.0f};
    for (unsigned row = bounds[expert] + threadIdx.x; row < end; row += THREADS) {
        const float dweight = dweights[row];
        sum[0] = fmaf(weights[entries[row]], dweight, sum[0]);
        dweights[row] = dweight * factor;
    }
    block_sum(sum, shared);
    if (threadIdx.x == 0) store_sums<T, 1>(sum, dscale + expert, accumulate);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define EXPERTS_OF(NAME, T, N)                                                                                                \
    KERNEL clamped_swiglu##NAME(const T* gate_up, T* out, unsigned long long count, float alpha, float limit) {               \
        clamped_swiglu<T, (N > 1 ? N / 2 : 1)>(gate_up, out, count, {alpha, limit});                                          \
    }                                                                                                                         \
    KERNEL expert_bias##NAME(                                                                                                 \
        const T* bias, const int* experts, const int* entries, T* x, unsigned rows, unsigned cols) {                          \
        expert_bias<T, N>(bias, experts, entries, x, rows, cols);                                                             \
    }                                                                                                                         \
    KERNEL expert_backward##NAME(const T* da, const T* gate_up, const float* weights, const int* entries, T* dgate_up,        \
        T* weighted, float* dweights, unsigned cols, float alpha, float limit) {                                              \
        expert_backward<T, N>(da, gate_up, weights, entries, dgate_up, weighted, dweights, cols, {alpha, limit});             \
    }                                                                                                                         \
    KERNEL expert_bias_dot##NAME(const T* dout, const T* bias, const int* experts, const int* entries, float* dweights,       \
        unsigned rows, unsigned cols) {                                                                                       \
        expert_bias_dot<T, N>(dout, bias, experts, entries, dweights, rows, cols);                                            \
    }
#define SCALES_OF(NAME, T)                                                                                                    \
    KERNEL scale_choices##NAME(const float* weights, const int* experts, const T* scale, float* out, unsigned choices) {      \
        scale_choices<T>(weights, experts, scale, out, choices);                                                              \
    }                                                                                                                         \
    KERNEL scale_choices_backward##NAME(const float* weights, const int* entries, const int* bounds, const T* scale,          \
        float* dweights, T* dscale, unsigned accumulate) {                                                                    \
        scale_choices_backward<T>(weights, entries, bounds, scale, dweights, dscale, accumulate != 0);                        \
    }
#define EXPERTS(NAME, T) EXPERTS_OF(_##NAME, T, WIDE<T>) EXPERTS_OF(_any_##NAME, T, 1) SCALES_OF(_##NAME, T)
FOR_EACH_FORMAT(EXPERTS)
