// From MXFP4 to bfloat16. See src/dtype/mxfp4.rs: every number has its bits.
#include "common.cuh"

constexpr unsigned THREADS = 256;
// Codes in a word, words that share a scale, and words of a thread; the launcher knows the first and the last.
constexpr unsigned CODES = 8;
constexpr unsigned SHARED = 4;
constexpr unsigned EACH = 4;

// 2^(scale - 127); the smallest is subnormal, and 255 is NaN.
__device__ __forceinline__ float power_of_two(unsigned scale) {
    const unsigned bits = scale == 0 ? 1u << 22 : scale << 23;
    return __uint_as_float(scale == 255 ? 0x7fffffffu : bits);
}

// Code `i` of a word: exponent and fraction, as those of a float32, make the value times 2^-126. Subnormal codes are subnormal there too.
__device__ __forceinline__ float value(unsigned word, unsigned i) {
    const unsigned code = word >> 4 * i;
    const float small = __uint_as_float((code & 7) << 22 | (code & 8) << 28);
    return __fmul_rn(small, __uint_as_float((126u + 127u) << 23));
}

// expand_mxfp4(codes, scales, out, words)
//
// out[i] = value of code i * 2^(scales[i / 32] - 127), which is exact. `words` of 8 codes; codes aligned to 4 bytes, out to 16. A lane reads
// 4 bytes and writes 16, so that reads and writes of a warp are contiguous; its four words are read before the first is written. Blocks of
// 256 take 1024 words.
// Reads 17/32 and writes 2 bytes a number: 1.9 ms for the experts of a layer of GPT-OSS-120B, 128 x (5760 + 2880) x 2880, at 4.3 TB/s.
extern "C" __global__ void __launch_bounds__(THREADS)
    expand_mxfp4(const unsigned* codes, const unsigned char* scales, uint4* out, unsigned long long words) {
    const unsigned long long first = 1ull * blockIdx.x * (EACH * THREADS) + threadIdx.x;
    unsigned word[EACH], scale[EACH];
#pragma unroll
    for (unsigned e = 0; e < EACH; e++) {
        const unsigned long long at = first + e * THREADS;
        word[e] = at < words ? codes[at] : 0;
        scale[e] = at < words ? scales[at / SHARED] : 0;
    }
#pragma unroll
    for (unsigned e = 0; e < EACH; e++) {
        const unsigned long long at = first + e * THREADS;
        if (at >= words) return;
        const float factor = power_of_two(scale[e]);
        unsigned pairs[CODES / 2];
#pragma unroll
        for (unsigned p = 0; p < CODES / 2; p++) {
            const float pair[2] = {__fmul_rn(value(word[e], 2 * p), factor), __fmul_rn(value(word[e], 2 * p + 1), factor)};
            pairs[p] = Word<bf16>::narrow(pair);
        }
        out[at] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    }
}
