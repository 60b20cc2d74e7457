// Sums down the columns of a matrix, in two stages and always in the same order: slices of rows, then the slices.
#include "common.cuh"

constexpr unsigned SLICE_WARPS = 8;
constexpr unsigned FOLD_WARPS = 32;
// Rows whose loads are in flight at a time.
constexpr unsigned BATCH = 4;

// The sums over a slice of rows into partials [slices, cols]. Blocks of 32 x 8 threads; block (x, y) has columns
// [32 N x, 32 N (x + 1)) and slice y; warp w of it the rows w, w + 8, ... of the slice.
// Reads the matrix once: 16384 x 3072 in bf16 is 100 MB, 24 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void column_sums(const T* x, float* partials, unsigned rows, unsigned cols, unsigned slice_rows) {
    __shared__ float shared[SLICE_WARPS][N][WARP];
    const unsigned lane = threadIdx.x, warp = threadIdx.y;
    const unsigned col = (blockIdx.x * WARP + lane) * N;
    const unsigned first = blockIdx.y * slice_rows, end = min(rows, first + slice_rows);
    float sums[N] = {};
    if (col < cols) {
        for (unsigned row = first + warp; row < end; row += SLICE_WARPS * BATCH) {
            Vec<T, N> held[BATCH];
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                const unsigned r = row + b * SLICE_WARPS;
                if (r < end) held[b] = Vec<T, N>::load(x + (size_t)r * cols + col);
            }
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                if (row + b * SLICE_WARPS >= end) break;
                float values[N];
                held[b].widen(values);
#pragma unroll
                for (int i = 0; i < N; i++) sums[i] += values[i];
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) shared[warp][i][lane] = sums[i];
    __syncthreads();
    if (col >= cols || warp >= N) return;
    float total = 0.0f;
#pragma unroll
    for (unsigned w = 0; w < SLICE_WARPS; w++) total += shared[w][warp][lane];
    partials[(size_t)blockIdx.y * cols + col + warp] = total;
}

// out[c] (+)= the sum over rows of partials [outs, rows, cols]; blockIdx.y says which of two outs. Blocks of 32 x 32
// threads: warp w has rows w, w + 32, ...
template <typename T>
__device__ __forceinline__ void fold_columns(
    const float* partials, T* first, T* second, unsigned rows, unsigned cols, bool accumulate) {
    __shared__ float shared[FOLD_WARPS][WARP];
    const unsigned lane = threadIdx.x, warp = threadIdx.y, col = blockIdx.x * WARP + lane;
    partials += (size_t)blockIdx.y * rows * cols;
    float sum = 0.0f;
    if (col < cols) {
        for (unsigned row = warp; row < rows; row += FOLD_WARPS * BATCH) {
            float held[BATCH];
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) {
                const unsigned r = row + b * FOLD_WARPS;
                held[b] = r < rows ? partials[(size_t)r * cols + col] : 0.0f;
            }
#pragma unroll
            for (unsigned b = 0; b < BATCH; b++) sum += held[b];
        }
    }
    shared[warp][lane] = sum;
    __syncthreads();
    if (warp > 0 || col >= cols) return;
    float total[1] = {0.0f};
#pragma unroll
    for (unsigned w = 0; w < FOLD_WARPS; w++) total[0] += shared[w][lane];
    store_sums<T, 1>(total, (blockIdx.y == 0 ? first : second) + col, accumulate);
}

#define COLUMN_SUMS(NAME, T)                                                                                            \
    extern "C" __global__ void __launch_bounds__(WARP * SLICE_WARPS) column_sums_##NAME(                                \
        const T* x, float* partials, unsigned rows, unsigned cols, unsigned slice_rows) {                               \
        column_sums<T, WIDE<T>>(x, partials, rows, cols, slice_rows);                                                   \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP * SLICE_WARPS) column_sums_any_##NAME(                            \
        const T* x, float* partials, unsigned rows, unsigned cols, unsigned slice_rows) {                               \
        column_sums<T, 1>(x, partials, rows, cols, slice_rows);                                                         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP * FOLD_WARPS) fold_columns_##NAME(                                \
        const float* partials, T* first, T* second, unsigned rows, unsigned cols, unsigned accumulate) {                \
        fold_columns<T>(partials, first, second, rows, cols, accumulate != 0);                                          \
    }
FOR_EACH_FORMAT(COLUMN_SUMS)
