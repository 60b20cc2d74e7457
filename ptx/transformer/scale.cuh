// The scale of a matrix that is turned into numbers of 8 bits, from its largest magnitude: by a pass over it, or by the kernel that writes it.
#pragma once
#include "common.cuh"

constexpr unsigned NOT_A_NUMBER = 0x7fc00000u;

// Where a matrix's scale goes, fp32; null: nowhere. It is 0 before: positive numbers have the order of their bits, so that the largest scale is
// the largest integer, in whatever order blocks come.
struct ScaleCell {
    unsigned* scale;
    // Of the largest number of the format of 8 bits: 8 for E4M3 (448), 15 for E5M2 (57344).
    unsigned exponent;
};

// A kernel's last parameters, from which it makes a ScaleCell.
#define SCALE_PARAMS unsigned* scale, unsigned exponent

// The bits of the scale for numbers whose largest magnitude has these `bits`: the least power of two, from 2^-126 on, by whose division it
// lies within the format; the mantissa of both largest numbers is 1.75.
__device__ __forceinline__ unsigned scale_bits(unsigned bits, unsigned exponent) {
    if (bits >= 0x7f800000u) return NOT_A_NUMBER;
    const unsigned above = (bits >> 23) + ((bits & 0x7fffffu) > 0x600000u);
    return (above > exponent ? above - exponent : 1u) << 23;
}

// The largest magnitude of what a thread writes. Only bfloat16 is turned into 8 bits.
template <typename T>
struct Largest {
    template <int LANES>
    __device__ __forceinline__ void take(const Vec<T, LANES>&) {}
    __device__ __forceinline__ void publish(ScaleCell) const {}
};

template <>
struct Largest<bf16> {
    // Of the numbers in the lower and in the upper half of words. NaN is larger than all numbers.
    unsigned pair = 0;

    __device__ __forceinline__ void take(unsigned word) {
        asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(pair), "r"(word & 0x7fff7fffu));
    }
    __device__ __forceinline__ void take(const Vec<bf16>& v) {
        take(v.bits.x);
        take(v.bits.y);
        take(v.bits.z);
        take(v.bits.w);
    }
    __device__ __forceinline__ void take(const Vec<bf16, 1>& v) { take(__bfloat16_as_ushort(v.bits)); }

    // Raises the scale to that of what the block's threads took, all of which must call.
    __device__ __forceinline__ void publish(ScaleCell cell) const {
        if (cell.scale == nullptr) return;
        __shared__ unsigned shared[WARP];
        unsigned largest = __reduce_max_sync(ALL_LANES, max(pair << 16, pair & 0xffff0000u));
        if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = largest;
        __syncthreads();
        if (threadIdx.x >= WARP) return;
        largest = __reduce_max_sync(ALL_LANES, threadIdx.x < blockDim.x / WARP ? shared[threadIdx.x] : 0u);
        if (threadIdx.x == 0) atomicMax(cell.scale, scale_bits(largest, cell.exponent));
    }
};
