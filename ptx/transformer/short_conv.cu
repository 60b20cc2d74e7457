// Short causal convolutions along the tokens of a document. See src/device/kernels/short_conv.rs.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 128, TAPS = 4;

// The weights of N channels, and the tokens that an output sees, the oldest first.
template <int N>
struct Window {
    float weight[N][TAPS], x[TAPS][N];

    template <typename T>
    __device__ __forceinline__ void load_weight(const T* from) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            float taps[TAPS];
            if (N > 1) {
                Vec<T, 4>::load(from + i * TAPS).widen(taps);
            } else {
#pragma unroll
                for (unsigned tap = 0; tap < TAPS; tap++) taps[tap] = widen(from[tap]);
            }
#pragma unroll
            for (unsigned tap = 0; tap < TAPS; tap++) weight[i][tap] = taps[tap];
        }
    }

    // Moves on by one token.
    template <typename T>
    __device__ __forceinline__ void push(const T* from, bool exists) {
#pragma unroll
        for (int tap = 0; tap + 1 < int(TAPS); tap++) {
#pragma unroll
            for (int i = 0; i < N; i++) x[tap][i] = x[tap + 1][i];
        }
#pragma unroll
        for (int i = 0; i < N; i++) x[TAPS - 1][i] = 0.0f;
        if (exists) Vec<T, N>::load(from).widen(x[TAPS - 1]);
    }

    // The convolution for a token with `index` tokens before it in its document.
    __device__ __forceinline__ float result(int i, unsigned index) const {
        float sum = 0.0f;
#pragma unroll
        for (unsigned tap = 0; tap < TAPS; tap++) {
            if (index + tap >= TAPS - 1) sum = fmaf(weight[i][tap], x[tap][i], sum);
        }
        return sum;
    }
};

// Index of a token in its document.
__device__ __forceinline__ unsigned index_of(const int* documents, unsigned token, unsigned seq_length) {
    return token % seq_length - (documents == nullptr ? 0 : documents[token]);
}

// Each thread has N channels of `run` tokens; blockIdx.x counts runs.
// Reads and writes 16384 x 8192 in bf16: 537 MB, 125 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void short_conv(
    const T* x, const T* weight, const int* documents, T* out, unsigned tokens, unsigned channels, unsigned seq_length, unsigned run) {
    const unsigned channel = (blockIdx.y * THREADS + threadIdx.x) * N, first = blockIdx.x * run, end = min(first + run, tokens);
    if (channel >= channels) return;
    Window<N> window;
    window.load_weight(weight + (size_t)channel * TAPS);
    for (unsigned i = TAPS - 1; i > 0; i--) window.push(x + (size_t)(first - i) * channels + channel, first >= i);
    for (unsigned token = first; token < end; token++) {
        const size_t at = (size_t)token * channels + channel;
        const unsigned index = index_of(documents, token, seq_length);
        window.push(x + at, true);
        float y[N];
#pragma unroll
        for (int i = 0; i < N; i++) {
            y[i] = window.result(i, index);
            y[i] *= sigmoid(y[i]);
        }
        Vec<T, N>::narrow(y).store(out + at);
    }
}

// partials, fp32 [gridDim.x, channels, 4], has the gradients of the weight over the tokens of each run.
// Reads dout and x, writes dx, 16384 x 8192 in bf16 each: 805 MB, 187 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void short_conv_backward(
    const T* dout, const T* x, const T* weight, const int* documents, T* dx, float* partials, unsigned tokens, unsigned channels,
    unsigned seq_length, unsigned run) {
    const unsigned channel = (blockIdx.y * THREADS + threadIdx.x) * N, first = blockIdx.x * run, end = min(first + run, tokens);
    if (channel >= channels) return;
    Window<N> window;
    window.load_weight(weight + (size_t)channel * TAPS);
    for (unsigned i = TAPS - 1; i > 0; i--) window.push(x + (size_t)(first - i) * channels + channel, first >= i);
    // Gradients of the token and of those before it, the oldest first.
    float gradients[TAPS][N] = {}, sums[N][TAPS] = {};
    // Three more outputs see the last tokens of the run.
    for (unsigned token = first; token < end + TAPS - 1; token++) {
        const bool exists = token < tokens;
        const size_t at = (size_t)token * channels + channel;
        const unsigned index = exists ? index_of(documents, token, seq_length) : 0;
        window.push(x + at, exists);
        float d[N] = {};
        if (exists) Vec<T, N>::load(dout + at).widen(d);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float y = window.result(i, index), dy = d[i] * silu_slope(y, sigmoid(y));
#pragma unroll
            for (unsigned tap = 0; tap < TAPS; tap++) {
                const float before = tap + 1 < TAPS ? gradients[(tap + 1) % TAPS][i] : 0.0f;
                const bool sees = exists && index + tap >= TAPS - 1;
                gradients[tap][i] = sees ? fmaf(window.weight[i][tap], dy, before) : before;
                if (sees && token < end) sums[i][tap] = fmaf(dy, window.x[tap][i], sums[i][tap]);
            }
        }
        if (token >= first + TAPS - 1) Vec<T, N>::narrow(gradients[0]).store(dx + at - (size_t)(TAPS - 1) * channels);
    }
    float* const to = partials + ((size_t)blockIdx.x * channels + channel) * TAPS;
#pragma unroll
    for (int i = 0; i < N; i++) *reinterpret_cast<float4*>(to + i * TAPS) = make_float4(sums[i][0], sums[i][1], sums[i][2], sums[i][3]);
}

#define SHORT_CONV_OF(NAME, T, N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) short_conv##NAME(const T* x, const T* weight, const int* documents,       \
        T* out, unsigned tokens, unsigned channels, unsigned seq_length, unsigned run) {                                            \
        short_conv<T, N>(x, weight, documents, out, tokens, channels, seq_length, run);                                             \
    }                                                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 5) short_conv_backward##NAME(const T* dout, const T* x, const T* weight,      \
        const int* documents, T* dx, float* partials, unsigned tokens, unsigned channels, unsigned seq_length, unsigned run) {      \
        short_conv_backward<T, N>(dout, x, weight, documents, dx, partials, tokens, channels, seq_length, run);                     \
    }
#define SHORT_CONV(NAME, T) SHORT_CONV_OF(_##NAME, T, 4) SHORT_CONV_OF(_any_##NAME, T, 1)
FOR_EACH_FORMAT(SHORT_CONV)
