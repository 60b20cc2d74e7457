// From bfloat16 to numbers of 8 bits and one scale for all of them: what products in FP8 read.
//
// A scale is a power of two: dividing by it is exact, and cvt.rn.satfinite rounds once, as the CPU does.
#include "scale.cuh"

constexpr unsigned THREADS = 256;

// Two numbers of 8 bits, the first in the lower byte.
struct E4m3 {
    static __device__ __forceinline__ unsigned narrow(float low, float high) {
        unsigned short pair;
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

struct E5m2 {
    static __device__ __forceinline__ unsigned narrow(float low, float high) {
        unsigned short pair;
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
        return pair;
    }
};

// abs_max_scale(x, scale, exponent, vectors, rest)
//
// scale[0], 0 before, becomes the scale of `vectors` of 8 numbers and of `rest` more. Blocks of 256; any grid.
// Reads 2 bytes an element: 31 us for 16384 x 4096 at 4.3 TB/s.
extern "C" __global__ void __launch_bounds__(THREADS)
    abs_max_scale(const bf16* x, unsigned* scale, unsigned exponent, unsigned long long vectors, unsigned rest) {
    Largest<bf16> largest;
    const unsigned long long stride = 1ull * gridDim.x * THREADS;
    const unsigned long long first = 1ull * blockIdx.x * THREADS + threadIdx.x;
    for (unsigned long long v = first; v < vectors; v += stride) largest.take(Vec<bf16>::load(x + 8 * v));
    if (first < rest) largest.take(Vec<bf16, 1>::load(x + 8 * vectors + first));
    largest.publish({scale, exponent});
}

// Rows and columns of a block's tile.
constexpr unsigned TILE = 128;
// Columns that a thread reads at once, and rows of a column that it writes at once.
constexpr unsigned READ = 8;
constexpr unsigned WRITE = 16;

// quantize_{e4m3,e5m2}(x, scale, out, transposed, rows, cols)
//
// out[r, c] = transposed[c, r] = x[r, c] / scale[0]; either may be left out. A scale of 0, which nobody found, makes NaN of all. `rows` and
// `cols` are multiples of 16, pointers aligned to 16 bytes. A block of 256 takes a tile of 128 x 128; tiles are counted along rows. In
// shared memory a row's words are turned by four for every 16 rows, so that the 8 lanes that write a column read 8 banks of their own.
// Reads 2 bytes an element and writes 1 or 2: 62 us for 16384 x 4096 with both, at 4.3 TB/s.
template <typename Q>
__device__ __forceinline__ void quantize(const bf16* x, const float* scale, unsigned char* out, unsigned char* transposed, unsigned rows,
                                         unsigned cols) {
    __shared__ __align__(16) unsigned char tile[TILE * TILE];
    const float inverse = scale[0] > 0.0f ? __fdiv_rn(1.0f, scale[0]) : __uint_as_float(NOT_A_NUMBER);
    const unsigned across = (cols + TILE - 1) / TILE;
    const unsigned row0 = blockIdx.x / across * TILE, col0 = blockIdx.x % across * TILE;
#pragma unroll
    for (unsigned i = 0; i < TILE * TILE / READ / THREADS; i++) {
        const unsigned v = i * THREADS + threadIdx.x;
        const unsigned r = v / (TILE / READ), c = v % (TILE / READ) * READ;
        if (row0 + r >= rows || col0 + c >= cols) continue;
        const unsigned long long at = 1ull * (row0 + r) * cols + col0 + c;
        float wide[READ];
        Vec<bf16>::load(x + at).widen(wide);
        unsigned pairs[READ / 2];
#pragma unroll
        for (unsigned p = 0; p < READ / 2; p++) pairs[p] = Q::narrow(wide[2 * p] * inverse, wide[2 * p + 1] * inverse);
        const uint2 narrow = make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
        if (out) *reinterpret_cast<uint2*>(out + at) = narrow;
        *reinterpret_cast<uint2*>(tile + r * TILE + (c + 4 * 4 * (r / WRITE)) % TILE) = narrow;
    }
    if (!transposed) return;
    __syncthreads();
#pragma unroll
    for (unsigned i = 0; i < TILE * TILE / WRITE / THREADS; i++) {
        const unsigned v = i * THREADS + threadIdx.x;
        const unsigned group = v % (TILE / WRITE), c = v / (TILE / WRITE);
        if (row0 + group * WRITE >= rows || col0 + c >= cols) continue;
        const unsigned char* column = tile + group * WRITE * TILE + (c + 4 * 4 * group) % TILE;
        unsigned words[WRITE / 4];
#pragma unroll
        for (unsigned w = 0; w < WRITE / 4; w++) {
            const unsigned char* four = column + 4 * w * TILE;
            words[w] = four[0] | four[TILE] << 8 | four[2 * TILE] << 16 | four[3 * TILE] << 24;
        }
        *reinterpret_cast<uint4*>(transposed + 1ull * (col0 + c) * rows + row0 + group * WRITE) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

#define QUANTIZE(NAME, Q)                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(THREADS)                                                                                     \
        quantize_##NAME(const bf16* x, const float* scale, unsigned char* out, unsigned char* transposed, unsigned rows, unsigned cols) {     \
        quantize<Q>(x, scale, out, transposed, rows, cols);                                                                                   \
    }

QUANTIZE(e4m3, E4m3)
QUANTIZE(e5m2, E5m2)
