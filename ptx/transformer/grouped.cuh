// What every kernel of experts' products shares: which rows a tile has, where only the GPU knows the segments.
#pragma once
#include "common.cuh"

// How the factors lie: see MatmulLayout.
enum Layout { NT, NN, TN };

// Which rows a block computes, and with which weight.
struct Place {
    unsigned expert, first, end;
};

// The `index`-th tile of `tile` rows over all segments; false where there are fewer.
__device__ __forceinline__ bool find_tile(const int* bounds, unsigned experts, unsigned rows, unsigned tile, unsigned index, Place& place) {
    if (bounds == nullptr) {
        place = {0, index * tile, rows};
        return place.first < rows;
    }
    const unsigned lane = threadIdx.x % WARP;
    unsigned before = 0;
    for (unsigned base = 0; base < experts; base += WARP) {
        const unsigned expert = base + lane;
        const unsigned start = expert < experts ? bounds[expert] : 0, end = expert < experts ? bounds[expert + 1] : 0;
        const unsigned tiles = (end - start + tile - 1) / tile;
        unsigned through = tiles;
#pragma unroll
        for (unsigned distance = 1; distance < WARP; distance *= 2) {
            const unsigned other = __shfl_up_sync(ALL_LANES, through, distance);
            if (lane >= distance) through += other;
        }
        through += before;
        const unsigned found = __ballot_sync(ALL_LANES, index < through);
        if (found != 0) {
            const unsigned owner = __ffs(found) - 1;
            place.expert = base + owner;
            place.first = __shfl_sync(ALL_LANES, start + (index - (through - tiles)) * tile, owner);
            place.end = __shfl_sync(ALL_LANES, end, owner);
            return true;
        }
        before = __shfl_sync(ALL_LANES, through, WARP - 1);
    }
    return false;
}
