// What the transformer's kernels share: the three float formats, sixteen bytes at a time, and sums in a fixed order.
//
// Compiled with -fmad=false: a fused multiply-add is where fmaf stands and nowhere else, as on the CPU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

typedef __nv_bfloat16 bf16;
typedef __half f16;

constexpr unsigned WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;

// Instantiates a kernel: KERNEL(name's ending, type).
#define FOR_EACH_FORMAT(KERNEL) KERNEL(bf16, bf16) KERNEL(f16, f16) KERNEL(f32, float)

// How the numbers in 32 bits widen, which is exact, and narrow: to the nearest even value, subnormals kept, every NaN to
// 0x7fff. cvt.rn does all of that.
template <typename T>
struct Word;

template <>
struct Word<float> {
    static constexpr int N = 1;
    static __device__ __forceinline__ void widen(unsigned word, float* x) { x[0] = __uint_as_float(word); }
    static __device__ __forceinline__ unsigned narrow(const float* x) { return __float_as_uint(x[0]); }
};

template <>
struct Word<bf16> {
    static constexpr int N = 2;
    static __device__ __forceinline__ void widen(unsigned word, float* x) {
        x[0] = __uint_as_float(word << 16);
        x[1] = __uint_as_float(word & 0xffff0000u);
    }
    static __device__ __forceinline__ unsigned narrow(const float* x) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x[0], x[1]);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
};

template <>
struct Word<f16> {
    static constexpr int N = 2;
    static __device__ __forceinline__ void widen(unsigned word, float* x) {
        const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&word));
        x[0] = pair.x;
        x[1] = pair.y;
    }
    static __device__ __forceinline__ unsigned narrow(const float* x) {
        const __half2 pair = __floats2half2_rn(x[0], x[1]);
        return *reinterpret_cast<const unsigned*>(&pair);
    }
};

__device__ __forceinline__ float widen(float x) { return x; }
// Exact. CUDA's own function takes this instruction from sm_90 on only, and another one before, which does the same.
__device__ __forceinline__ float widen(bf16 x) {
    float y;
    asm("cvt.f32.bf16 %0, %1;" : "=f"(y) : "h"(__bfloat16_as_ushort(x)));
    return y;
}
__device__ __forceinline__ float widen(f16 x) { return __half2float(x); }

template <typename T>
__device__ __forceinline__ T narrow(float x);
template <>
__device__ __forceinline__ float narrow<float>(float x) {
    return x;
}
template <>
__device__ __forceinline__ bf16 narrow<bf16>(float x) {
    return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ f16 narrow<f16>(float x) {
    return __float2half_rn(x);
}

// Elements in 16 bytes.
template <typename T>
constexpr int WIDE = 16 / sizeof(T);

// As many 32-bit words as a vector has.
template <int WORDS>
struct Raw;
template <>
struct Raw<4> {
    typedef uint4 Bits;
    static __device__ __forceinline__ void split(uint4 bits, unsigned (&words)[4]) {
        words[0] = bits.x, words[1] = bits.y, words[2] = bits.z, words[3] = bits.w;
    }
    static __device__ __forceinline__ uint4 join(const unsigned (&words)[4]) { return make_uint4(words[0], words[1], words[2], words[3]); }
};
template <>
struct Raw<2> {
    typedef uint2 Bits;
    static __device__ __forceinline__ void split(uint2 bits, unsigned (&words)[2]) { words[0] = bits.x, words[1] = bits.y; }
    static __device__ __forceinline__ uint2 join(const unsigned (&words)[2]) { return make_uint2(words[0], words[1]); }
};

// Neighbours as they lie in memory: WIDE of them at an address divisible by 16, half as many at one divisible by 8, or one anywhere.
template <typename T, int LANES = WIDE<T>>
struct Vec {
    static_assert(LANES == WIDE<T> || 2 * LANES == WIDE<T>, "16 bytes, 8 bytes or one element");
    static constexpr int N = LANES, EACH = Word<T>::N, WORDS = N / EACH;
    typedef typename Raw<WORDS>::Bits Bits;
    Bits bits;

    static __device__ __forceinline__ Vec load(const T* p) { return {*reinterpret_cast<const Bits*>(p)}; }
    __device__ __forceinline__ void store(T* p) const { *reinterpret_cast<Bits*>(p) = bits; }

    __device__ __forceinline__ void widen(float (&x)[N]) const {
        unsigned words[WORDS];
        Raw<WORDS>::split(bits, words);
#pragma unroll
        for (int w = 0; w < WORDS; w++) Word<T>::widen(words[w], x + w * EACH);
    }
    static __device__ __forceinline__ Vec narrow(const float (&x)[N]) {
        unsigned words[WORDS];
#pragma unroll
        for (int w = 0; w < WORDS; w++) words[w] = Word<T>::narrow(x + w * EACH);
        return {Raw<WORDS>::join(words)};
    }
};

template <typename T>
struct Vec<T, 1> {
    static constexpr int N = 1;
    T bits;

    static __device__ __forceinline__ Vec load(const T* p) { return {*p}; }
    __device__ __forceinline__ void store(T* p) const { *p = bits; }
    __device__ __forceinline__ void widen(float (&x)[1]) const { x[0] = ::widen(bits); }
    static __device__ __forceinline__ Vec narrow(const float (&x)[1]) { return {::narrow<T>(x[0])}; }
};

// Writes `sums` to `out`, added to what `out` holds if `accumulate`.
template <typename T, int N>
__device__ __forceinline__ void store_sums(float (&sums)[N], T* out, bool accumulate) {
    if (accumulate) {
        float old[N];
        Vec<T, N>::load(out).widen(old);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] += old[i];
    }
    Vec<T, N>::narrow(sums).store(out);
}

// The sum over each group of `lanes` neighbours in a warp, a power of two, on all of them; the whole warp must call.
__device__ __forceinline__ float warp_sum(float x, unsigned lanes = WARP) {
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(ALL_LANES, x, distance);
    return x;
}

// The sums over a block of whole warps, on all threads. One barrier: calls in a row take turns with two `shared`.
template <int SUMS>
__device__ __forceinline__ void block_sum(float (&x)[SUMS], float (&shared)[SUMS][WARP]) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
#pragma unroll
    for (int s = 0; s < SUMS; s++) {
        x[s] = warp_sum(x[s]);
        if (lane == 0) shared[s][warp] = x[s];
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < SUMS; s++) x[s] = warp_sum(lane < blockDim.x / WARP ? shared[s][lane] : 0.0f);
}
