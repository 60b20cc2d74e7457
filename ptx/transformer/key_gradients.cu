// Gradients of keys and values that come block by block of queries. See src/device/kernels/key_gradients.rs.
#include "common.cuh"

constexpr unsigned THREADS = 256;

// N sums, 16 bytes at a time where there are as many.
template <int N>
__device__ __forceinline__ void load_sums(const float* sums, float (&x)[N]) {
    constexpr int EACH = N < 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < N; i += EACH) Vec<float, EACH>::load(sums + i).widen(reinterpret_cast<float(&)[EACH]>(x[i]));
}

template <int N>
__device__ __forceinline__ void store_sums(const float (&x)[N], float* sums) {
    constexpr int EACH = N < 4 ? 1 : 4;
#pragma unroll
    for (int i = 0; i < N; i += EACH) Vec<float, EACH>::narrow(reinterpret_cast<const float(&)[EACH]>(x[i])).store(sums + i);
}

// Item `i`, N neighbours: of gradients of keys or of values, key by key.
template <typename T, int N>
__device__ __forceinline__ void add(
    T* dqkv, float* sums, size_t i, unsigned pitch, unsigned keys_from, unsigned values_from, unsigned width, unsigned begun, unsigned done) {
    const unsigned each = width / N, at = i % each * N, of_values = i / each % 2;
    const size_t key = i / each / 2;
    T* const gradient = dqkv + key * pitch + (of_values ? values_from : keys_from) + at;
    float* const sum = sums + (2 * key + of_values) * width + at;
    float x[N], before[N];
    Vec<T, N>::load(gradient).widen(x);
#pragma unroll
    for (int n = 0; n < N; n++) before[n] = 0.0f;
    if (key < begun) load_sums(sum, before);
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = before[n] + x[n];
    if (key < done) {
        Vec<T, N>::narrow(x).store(gradient);
    } else {
        store_sums(x, sum);
    }
}

// One thread an item of 16 bytes of gradients, or of one element where not `wide`. Reads 2 x width gradients of each key and as many sums, and
// writes one of both: Llama-8B's 131072 keys of one head are 336 MB, 78 us at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void add_key_gradients(
    T* dqkv, float* sums, size_t items, unsigned pitch, unsigned keys_from, unsigned values_from, unsigned width, unsigned begun,
    unsigned done, bool wide) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= items) return;
    if (wide) {
        add<T, WIDE<T>>(dqkv, sums, i, pitch, keys_from, values_from, width, begun, done);
    } else {
        add<T, 1>(dqkv, sums, i, pitch, keys_from, values_from, width, begun, done);
    }
}

#define ADD_KEY_GRADIENTS(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(THREADS) add_key_gradients_##NAME(T* dqkv, float* sums,                      \
        unsigned long long items, unsigned pitch, unsigned keys_from, unsigned values_from, unsigned width, unsigned begun,   \
        unsigned done, unsigned wide) {                                                                                       \
        add_key_gradients(dqkv, sums, items, pitch, keys_from, values_from, width, begun, done, wide != 0);                   \
    }
FOR_EACH_FORMAT(ADD_KEY_GRADIENTS)
