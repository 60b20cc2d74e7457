// Values of the threads of a block, combined.
#pragma once
#include "common.cuh"

// All threads' values combined by `f`, on all of them, in an order that depends on the block's size alone.
template <unsigned BLOCK, typename V, typename F>
__device__ __forceinline__ V reduce_block(V value, F f) {
    constexpr unsigned WARPS = BLOCK / WARP;
    __shared__ V shared[WARPS];
    for (unsigned lane = WARP / 2; lane > 0; lane /= 2) value = f(value, __shfl_xor_sync(ALL_LANES, value, lane));
    if (threadIdx.x % WARP == 0) shared[threadIdx.x / WARP] = value;
    __syncthreads();
    value = shared[threadIdx.x % WARPS];
    for (unsigned lane = WARPS / 2; lane > 0; lane /= 2) value = f(value, __shfl_xor_sync(ALL_LANES, value, lane));
    return value;
}
