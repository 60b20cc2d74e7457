// Products of experts, and one product with an fp32 result. See src/device/kernels/grouped.rs for the three layouts.
//
// The bounds of the experts' segments are read here, so that nobody waits for them on the host. Grids follow from sizes alone: rows of R
// rows and E experts fill at most R / TILE + E tiles, and the blocks that find no tile end at once.
//
// Narrow formats go through the tensor cores: tiles of 128 x 128, 32 steps of k at a time, two of them in shared memory, where cp.async
// brings the next while the last is multiplied. fp32 takes the same way with plain fused multiply-adds on tiles of 64 x 64.
// An element is one sum over k in ascending order of steps, whatever the other segments are.
#include "grouped.cuh"
#include "matrix.cuh"

constexpr unsigned THREADS = 256;
constexpr unsigned STEP = 32;

// A factor as a block sees it: `count` rows (or columns) of the result's tile, `k` steps.
template <typename T>
struct Factor {
    const T* data;
    // Elements from one row of memory to the next.
    unsigned pitch;
    unsigned count, k;
};

// Shared memory of a factor's tile of TILE x STEP: by rows of k, or by steps, as it lies in memory, so that copies are whole vectors.
// Pitches keep 16-byte vectors of neighbouring rows in different banks.
template <typename T, unsigned TILE, bool BY_STEP>
struct Tile {
    static constexpr unsigned ROWS = BY_STEP ? STEP : TILE;
    static constexpr unsigned COLS = BY_STEP ? TILE : STEP;
    static constexpr unsigned PITCH = COLS + 8;
    T data[ROWS][PITCH];

    // Brings the tile of `factor` that begins at `step`; what lies outside becomes zero.
    template <bool VECTORS>
    __device__ __forceinline__ void load(const Factor<T>& factor, unsigned step) {
        constexpr int N = VECTORS ? WIDE<T> : 1;
#pragma unroll (VECTORS ? ROWS * COLS / N / THREADS : 1)
        for (unsigned i = threadIdx.x; i < ROWS * COLS / N; i += THREADS) {
            const unsigned row = i / (COLS / N), col = i % (COLS / N) * N;
            const unsigned in_tile = BY_STEP ? col : row, k = step + (BY_STEP ? row : col);
            const bool inside = in_tile < factor.count && k < factor.k;
            const size_t at = BY_STEP ? (size_t)k * factor.pitch + in_tile : (size_t)in_tile * factor.pitch + k;
            const T* from = factor.data + (inside ? at : 0);
            if (VECTORS) {
                const unsigned to = (unsigned)__cvta_generic_to_shared(&data[row][col]);
                asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(inside ? 16u : 0u) : "memory");
            } else {
                data[row][col] = inside ? *from : narrow<T>(0.0f);
            }
        }
    }
};

// What a block computes and where it goes: result (row, col) lies at c[row * pitch + col].
template <typename OUT, typename T>
struct Result {
    OUT* c;
    unsigned pitch, rows, cols;
    // Added to every row; null: nothing.
    const T* bias;
    bool accumulate;

    __device__ __forceinline__ void put(unsigned row, unsigned col, float sum) const {
        if (row >= rows || col >= cols) return;
        if (bias != nullptr) sum += widen(bias[col]);
        OUT* out = c + (size_t)row * pitch + col;
        if (accumulate) sum += widen(*out);
        *out = narrow<OUT>(sum);
    }
};

// Tensor cores: eight warps, 2 x 4, each with 64 x 32 of the tile.
template <typename T>
struct Tensor {
    static constexpr unsigned TILE = 128;
    float sums[4][4][4] = {};

    static __device__ __forceinline__ unsigned warp_row() { return threadIdx.x / WARP / 4 * 64; }
    static __device__ __forceinline__ unsigned warp_col() { return threadIdx.x / WARP % 4 * 32; }

    template <bool A_BY_STEP, bool B_BY_STEP>
    __device__ __forceinline__ void add(const Tile<T, TILE, A_BY_STEP>& a, const Tile<T, TILE, B_BY_STEP>& b) {
        const unsigned lane = threadIdx.x % WARP, low = lane % 8, second = lane / 8 % 2 * 8, upper = lane / 16 * 8;
#pragma unroll
        for (unsigned k = 0; k < STEP; k += 16) {
            unsigned columns[2][4];
#pragma unroll
            for (unsigned j = 0; j < 2; j++) {
                const unsigned col = warp_col() + j * 16;
                const T* from = B_BY_STEP ? &b.data[k + low + second][col + upper] : &b.data[col + low + upper][k + second];
                load_matrices<B_BY_STEP>(columns[j], from);
            }
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned row = warp_row() + i * 16;
                unsigned rows[4];
                const T* from = A_BY_STEP ? &a.data[k + low + upper][row + second] : &a.data[row + low + second][k + upper];
                load_matrices<A_BY_STEP>(rows, from);
#pragma unroll
                for (unsigned j = 0; j < 4; j++) multiply(sums[i][j], rows, &columns[j / 2][j % 2 * 2], T());
            }
        }
    }

    template <typename OUT>
    __device__ __forceinline__ void put(const Result<OUT, T>& result) const {
        const unsigned lane = threadIdx.x % WARP;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
#pragma unroll
            for (unsigned j = 0; j < 4; j++) {
                const unsigned row = warp_row() + i * 16 + lane / 4, col = warp_col() + j * 8 + lane % 4 * 2;
#pragma unroll
                for (unsigned n = 0; n < 4; n++) result.put(row + n / 2 * 8, col + n % 2, sums[i][j][n]);
            }
        }
    }
};

// fp32 cores: 16 x 16 threads, each with 4 x 4 of the tile, 16 apart.
struct Scalar {
    static constexpr unsigned TILE = 64;
    float sums[4][4] = {};

    static __device__ __forceinline__ unsigned row() { return threadIdx.x / 16; }
    static __device__ __forceinline__ unsigned col() { return threadIdx.x % 16; }

    template <bool A_BY_STEP, bool B_BY_STEP>
    __device__ __forceinline__ void add(const Tile<float, TILE, A_BY_STEP>& a, const Tile<float, TILE, B_BY_STEP>& b) {
#pragma unroll 4
        for (unsigned k = 0; k < STEP; k++) {
            float rows[4], cols[4];
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
                const unsigned r = row() + 16 * i, c = col() + 16 * i;
                rows[i] = A_BY_STEP ? a.data[k][r] : a.data[r][k];
                cols[i] = B_BY_STEP ? b.data[k][c] : b.data[c][k];
            }
#pragma unroll
            for (unsigned i = 0; i < 4; i++) {
#pragma unroll
                for (unsigned j = 0; j < 4; j++) sums[i][j] = fmaf(rows[i], cols[j], sums[i][j]);
            }
        }
    }

    template <typename OUT>
    __device__ __forceinline__ void put(const Result<OUT, float>& result) const {
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
#pragma unroll
            for (unsigned j = 0; j < 4; j++) result.put(row() + 16 * i, col() + 16 * j, sums[i][j]);
        }
    }
};

template <typename T>
struct Cores {
    typedef Tensor<T> Type;
};
template <>
struct Cores<float> {
    typedef Scalar Type;
};

// One tile of a product, two steps in shared memory.
template <typename T, typename OUT, bool A_BY_STEP, bool B_BY_STEP, bool VECTORS>
__device__ __forceinline__ void product(const Factor<T>& a, const Factor<T>& b, const Result<OUT, T>& result) {
    typedef typename Cores<T>::Type Sums;
    __shared__ __align__(16) Tile<T, Sums::TILE, A_BY_STEP> rows[2];
    __shared__ __align__(16) Tile<T, Sums::TILE, B_BY_STEP> cols[2];
    Sums sums;
    const unsigned steps = (a.k + STEP - 1) / STEP;
    if (steps > 0) {
        rows[0].template load<VECTORS>(a, 0);
        cols[0].template load<VECTORS>(b, 0);
    }
    commit_copies();
    for (unsigned step = 0; step < steps; step++) {
        const unsigned now = step % 2;
        if (step + 1 < steps) {
            rows[1 - now].template load<VECTORS>(a, (step + 1) * STEP);
            cols[1 - now].template load<VECTORS>(b, (step + 1) * STEP);
        }
        commit_copies();
        wait_for_copies<1>();
        __syncthreads();
        sums.add(rows[now], cols[now]);
        __syncthreads();
    }
    sums.put(result);
}

// c[rows, outs] = a[rows, ins] b_e[outs, ins]^T, or with NN c[rows, ins] = a[rows, outs] b_e[outs, ins]. Block (x, y) has tile y of the
// rows and tile x of the columns. Without bounds there is one weight, and a bias may be added.
template <typename T, typename OUT, Layout LAYOUT, bool VECTORS>
__device__ __forceinline__ void by_rows(
    const T* a, const T* b, const int* bounds, const T* bias, OUT* c, unsigned experts, unsigned rows, unsigned outs, unsigned ins) {
    constexpr unsigned TILE = Cores<T>::Type::TILE;
    Place place;
    if (!find_tile(bounds, experts, rows, TILE, blockIdx.y, place)) return;
    const unsigned n = LAYOUT == NT ? outs : ins, k = LAYOUT == NT ? ins : outs, col = blockIdx.x * TILE;
    const T* weight = b + (size_t)place.expert * outs * ins;
    const Factor<T> left = {a + (size_t)place.first * k, k, place.end - place.first, k};
    const Factor<T> right = {weight + (LAYOUT == NT ? (size_t)col * ins : col), ins, n - col, k};
    const Result<OUT, T> result = {
        c + (size_t)place.first * n + col, n, place.end - place.first, n - col, bias == nullptr ? nullptr : bias + col, false};
    product<T, OUT, false, LAYOUT == NN, VECTORS>(left, right, result);
}

// c_e[outs, ins] (+)= a[rows, outs]^T b[rows, ins] over the rows of expert e; block (x, y, e) has tile y of outs and tile x of ins.
template <typename T, bool VECTORS>
__device__ __forceinline__ void by_weights(
    const T* a, const T* b, const int* bounds, T* c, unsigned outs, unsigned ins, bool accumulate) {
    constexpr unsigned TILE = Cores<T>::Type::TILE;
    const unsigned expert = blockIdx.z, row = blockIdx.y * TILE, col = blockIdx.x * TILE;
    const unsigned first = bounds[expert], k = bounds[expert + 1] - first;
    const Factor<T> left = {a + (size_t)first * outs + row, outs, outs - row, k};
    const Factor<T> right = {b + (size_t)first * ins + col, ins, ins - col, k};
    const Result<T, T> result = {c + ((size_t)expert * outs + row) * ins + col, ins, outs - row, ins - col, nullptr, accumulate};
    product<T, T, true, true, VECTORS>(left, right, result);
}

// Warps of a block of SegmentSums, which has all rows of an expert, and rows whose loads a warp has in flight; the launcher knows the first.
constexpr unsigned SUM_WARPS = 32;
constexpr unsigned SUM_BATCH = 4;

// out_e[c] (+)= the sum over the rows of expert e of x[row, c], each times weights[entries[row]] where there are weights. Block (x, e) has N
// columns a lane of expert e; warp w of it the rows w, w + 32, ... of the segment.
// Reads x: 65536 x 5760 in bf16 are 755 MB, 0.18 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void segment_sums(
    const T* x, const float* weights, const int* entries, const int* bounds, T* out, unsigned cols, bool accumulate) {
    __shared__ float shared[SUM_WARPS][WARP * N];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, first = blockIdx.x * WARP * N, end = bounds[blockIdx.y + 1];
    const unsigned col = first + lane * N;
    float sums[N] = {};
    if (col < cols) {
        for (unsigned start = bounds[blockIdx.y] + warp; start < end; start += SUM_BATCH * SUM_WARPS) {
            Vec<T, N> held[SUM_BATCH];
            float factors[SUM_BATCH];
#pragma unroll
            for (unsigned b = 0; b < SUM_BATCH; b++) {
                const unsigned row = start + b * SUM_WARPS;
                if (row >= end) break;
                held[b] = Vec<T, N>::load(x + (size_t)row * cols + col);
                factors[b] = weights == nullptr ? 1.0f : weights[entries[row]];
            }
#pragma unroll
            for (unsigned b = 0; b < SUM_BATCH; b++) {
                if (start + b * SUM_WARPS >= end) break;
                float values[N];
                held[b].widen(values);
#pragma unroll
                for (int i = 0; i < N; i++) sums[i] = fmaf(factors[b], values[i], sums[i]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++) shared[warp][lane * N + i] = sums[i];
    __syncthreads();
    for (unsigned c = threadIdx.x; c < WARP * N && first + c < cols; c += SUM_WARPS * WARP) {
        float total[1] = {0.0f};
#pragma unroll
        for (unsigned w = 0; w < SUM_WARPS; w++) total[0] += shared[w][c];
        store_sums<T, 1>(total, out + (size_t)blockIdx.y * cols + first + c, accumulate);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define GROUPED_OF(NAME, T, VECTORS)                                                                                          \
    KERNEL grouped_nt##NAME(const T* a, const T* b, const int* bounds, T* c, unsigned experts, unsigned rows, unsigned outs,  \
        unsigned ins) {                                                                                                       \
        by_rows<T, T, NT, VECTORS>(a, b, bounds, nullptr, c, experts, rows, outs, ins);                                       \
    }                                                                                                                         \
    KERNEL grouped_nn##NAME(const T* a, const T* b, const int* bounds, T* c, unsigned experts, unsigned rows, unsigned outs,  \
        unsigned ins) {                                                                                                       \
        by_rows<T, T, NN, VECTORS>(a, b, bounds, nullptr, c, experts, rows, outs, ins);                                       \
    }                                                                                                                         \
    KERNEL grouped_tn##NAME(                                                                                                  \
        const T* a, const T* b, const int* bounds, T* c, unsigned outs, unsigned ins, unsigned accumulate) {                  \
        by_weights<T, VECTORS>(a, b, bounds, c, outs, ins, accumulate != 0);                                                  \
    }                                                                                                                         \
    KERNEL router_logits##NAME(                                                                                               \
        const T* a, const T* b, const T* bias, float* c, unsigned rows, unsigned outs, unsigned ins) {                        \
        by_rows<T, float, NT, VECTORS>(a, b, nullptr, bias, c, 1, rows, outs, ins);                                           \
    }
#define SEGMENT_SUMS_OF(NAME, T, N)                                                                                           \
    extern "C" __global__ void __launch_bounds__(SUM_WARPS* WARP) segment_sums##NAME(const T* x, const float* weights,        \
        const int* entries, const int* bounds, T* out, unsigned cols, unsigned accumulate) {                                  \
        segment_sums<T, N>(x, weights, entries, bounds, out, cols, accumulate != 0);                                          \
    }
#define GROUPED(NAME, T)                                                                                                      \
    GROUPED_OF(_##NAME, T, true) GROUPED_OF(_any_##NAME, T, false)                                                            \
    SEGMENT_SUMS_OF(_##NAME, T, WIDE<T>) SEGMENT_SUMS_OF(_any_##NAME, T, 1)
FOR_EACH_FORMAT(GROUPED)
