// Kernels that treat every element alone, to the bit as src/device/cpu/kernels/pointwise.rs does.
//
// Bound by memory. Floors at 4.3 TB/s for 16384 x 12288 in bf16: swiglu reads two values of 2 bytes and writes one for each
// output, 0.28 ms; its backward reads three and writes two, 0.47 ms; gelu reads one and writes one, 0.19 ms; its backward
// reads two and writes one, 0.28 ms. A sigmoid is some thirty instructions, which 132 SMs issue in 0.2 ms.
//
// An output may be one of the inputs: every thread reads its elements before it writes them, and no other reads them.
#include "math.cuh"
#include "scale.cuh"

constexpr unsigned THREADS = 256;

// Neighbours that one thread takes together, as a type.
template <int LANES>
struct Group {
    static constexpr int N = LANES;
    unsigned index;

    __device__ __forceinline__ size_t start() const { return (size_t)index * N; }
    // Where [rows, 2 cols] has the gate of these elements of [rows, cols]; `cols` is a multiple of N.
    __device__ __forceinline__ size_t gate(unsigned cols) const {
        const unsigned row = index / (cols / N);
        return start() + (size_t)row * cols;
    }
};

// Calls `f` with each thread's group out of `groups`: of 16 bytes if `wide`, else of one element; and with what sees all that is written, for
// the scale in `cell`.
template <typename T, typename F>
__device__ __forceinline__ void for_each(unsigned groups, unsigned wide, ScaleCell cell, F f) {
    const unsigned index = blockIdx.x * THREADS + threadIdx.x;
    Largest<T> largest;
    if (index < groups) {
        if (wide) {
            f(Group<WIDE<T>>{index}, largest);
        } else {
            f(Group<1>{index}, largest);
        }
    }
    largest.publish(cell);
}

template <typename T, int N>
__device__ __forceinline__ void load(const T* p, float (&x)[N]) {
    Vec<T, N>::load(p).widen(x);
}

template <typename T, int N>
__device__ __forceinline__ void store(T* p, const float (&x)[N], Largest<T>& largest) {
    const Vec<T, N> narrow = Vec<T, N>::narrow(x);
    narrow.store(p);
    largest.take(narrow);
}

template <typename T>
__device__ __forceinline__ void swiglu(const T* gate_up, T* out, unsigned groups, unsigned cols, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        const T* at = gate_up + group.gate(cols);
        float gate[N], up[N];
        load(at, gate);
        load(at + cols, up);
#pragma unroll
        for (int i = 0; i < N; i++) gate[i] = gate[i] * sigmoid(gate[i]) * up[i];
        store(out + group.start(), gate, largest);
    });
}

template <typename T>
__device__ __forceinline__ void swiglu_backward(
    const T* dout, const T* gate_up, T* dgate_up, unsigned groups, unsigned cols, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        const size_t at = group.gate(cols);
        float dy[N], gate[N], up[N], dgate[N], dup[N];
        load(dout + group.start(), dy);
        load(gate_up + at, gate);
        load(gate_up + at + cols, up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float s = sigmoid(gate[i]);
            dgate[i] = dy[i] * up[i] * silu_slope(gate[i], s);
            dup[i] = dy[i] * (gate[i] * s);
        }
        store(dgate_up + at, dgate, largest);
        store(dgate_up + at + cols, dup, largest);
    });
}

template <typename T>
__device__ __forceinline__ void geglu(const T* gate_up, T* out, unsigned groups, unsigned cols, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        const T* at = gate_up + group.gate(cols);
        float gate[N], up[N];
        load(at, gate);
        load(at + cols, up);
#pragma unroll
        for (int i = 0; i < N; i++) gate[i] = gelu(gate[i]) * up[i];
        store(out + group.start(), gate, largest);
    });
}

template <typename T>
__device__ __forceinline__ void geglu_backward(
    const T* dout, const T* gate_up, T* dgate_up, unsigned groups, unsigned cols, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        const size_t at = group.gate(cols);
        float dy[N], gate[N], up[N], dgate[N], dup[N];
        load(dout + group.start(), dy);
        load(gate_up + at, gate);
        load(gate_up + at + cols, up);
#pragma unroll
        for (int i = 0; i < N; i++) {
            dgate[i] = dy[i] * up[i] * gelu_slope(gate[i]);
            dup[i] = dy[i] * gelu(gate[i]);
        }
        store(dgate_up + at, dgate, largest);
        store(dgate_up + at + cols, dup, largest);
    });
}

template <typename T>
__device__ __forceinline__ void gelu(const T* in, T* out, unsigned groups, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        float x[N];
        load(in + group.start(), x);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = gelu(x[i]);
        store(out + group.start(), x, largest);
    });
}

template <typename T>
__device__ __forceinline__ void gelu_backward(const T* dout, const T* in, T* din, unsigned groups, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        float dy[N], x[N];
        load(dout + group.start(), dy);
        load(in + group.start(), x);
#pragma unroll
        for (int i = 0; i < N; i++) dy[i] = dy[i] * gelu_slope(x[i]);
        store(din + group.start(), dy, largest);
    });
}

template <typename T>
__device__ __forceinline__ void scale_add(const T* in, const T* base, T* out, unsigned groups, float scale, unsigned wide, ScaleCell cell) {
    for_each<T>(groups, wide, cell, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        float x[N], sum[N];
        load(in + group.start(), x);
        if (base != nullptr) load(base + group.start(), sum);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = base != nullptr ? fmaf(x[i], scale, sum[i]) : x[i] * scale;
        store(out + group.start(), x, largest);
    });
}

template <typename T>
__device__ __forceinline__ void sigmoid_gate(const T* in, const T* gate, T* out, unsigned groups, unsigned wide) {
    for_each<T>(groups, wide, ScaleCell{}, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        float x[N], g[N];
        load(in + group.start(), x);
        load(gate + group.start(), g);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = x[i] * sigmoid(g[i]);
        store(out + group.start(), x, largest);
    });
}

template <typename T>
__device__ __forceinline__ void sigmoid_gate_backward(
    const T* dout, const T* in, const T* gate, T* din, T* dgate, unsigned groups, unsigned wide) {
    for_each<T>(groups, wide, ScaleCell{}, [=](auto group, Largest<T>& largest) {
        constexpr int N = decltype(group)::N;
        float dy[N], x[N], g[N];
        load(dout + group.start(), dy);
        load(in + group.start(), x);
        load(gate + group.start(), g);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float s = sigmoid(g[i]);
            g[i] = dy[i] * x[i] * (s * (1.0f - s));
            x[i] = dy[i] * s;
        }
        store(din + group.start(), x, largest);
        store(dgate + group.start(), g, largest);
    });
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define KERNELS(dtype, T)                                                                                                \
    KERNEL swiglu_##dtype(const T* gate_up, T* out, unsigned groups, unsigned cols, unsigned wide, SCALE_PARAMS) {       \
        swiglu(gate_up, out, groups, cols, wide, {scale, exponent});                                                     \
    }                                                                                                                    \
    KERNEL swiglu_backward_##dtype(                                                                                      \
        const T* dout, const T* gate_up, T* dgate_up, unsigned groups, unsigned cols, unsigned wide, SCALE_PARAMS) {     \
        swiglu_backward(dout, gate_up, dgate_up, groups, cols, wide, {scale, exponent});                                 \
    }                                                                                                                    \
    KERNEL geglu_##dtype(const T* gate_up, T* out, unsigned groups, unsigned cols, unsigned wide, SCALE_PARAMS) {        \
        geglu(gate_up, out, groups, cols, wide, {scale, exponent});                                                      \
    }                                                                                                                    \
    KERNEL geglu_backward_##dtype(                                                                                       \
        const T* dout, const T* gate_up, T* dgate_up, unsigned groups, unsigned cols, unsigned wide, SCALE_PARAMS) {     \
        geglu_backward(dout, gate_up, dgate_up, groups, cols, wide, {scale, exponent});                                  \
    }                                                                                                                    \
    KERNEL gelu_##dtype(const T* in, T* out, unsigned groups, unsigned wide, SCALE_PARAMS) {                             \
        gelu(in, out, groups, wide, {scale, exponent});                                                                  \
    }                                                                                                                    \
    KERNEL gelu_backward_##dtype(const T* dout, const T* in, T* din, unsigned groups, unsigned wide, SCALE_PARAMS) {     \
        gelu_backward(dout, in, din, groups, wide, {scale, exponent});                                                   \
    }                                                                                                                    \
    KERNEL scale_add_##dtype(                                                                                            \
        const T* in, const T* base, T* out, unsigned groups, float factor, unsigned wide, SCALE_PARAMS) {                \
        scale_add(in, base, out, groups, factor, wide, {scale, exponent});                                               \
    }                                                                                                                    \
    KERNEL sigmoid_gate_##dtype(const T* in, const T* gate, T* out, unsigned groups, unsigned wide) {                    \
        sigmoid_gate(in, gate, out, groups, wide);                                                                       \
    }                                                                                                                    \
    KERNEL sigmoid_gate_backward_##dtype(                                                                                \
        const T* dout, const T* in, const T* gate, T* din, T* dgate, unsigned groups, unsigned wide) {                   \
        sigmoid_gate_backward(dout, in, gate, din, dgate, groups, wide);                                                 \
    }

FOR_EACH_FORMAT(KERNELS)
