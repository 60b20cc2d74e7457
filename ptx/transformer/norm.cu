// RMS and layer normalisation by rows. CENTRED is layer norm: it subtracts the mean and adds a bias; its `stats` are
// [rows, 2] with mean and rstd, those of RMS norm [rows] with rstd.
//
// One block takes a row; each thread keeps its vectors of it in registers between the sums and the result. The kernels
// named `any` read a row again for each pass, one element at a time: for rows that are not whole vectors, or too long.
//
// Where a scale is asked for, it is that of what a kernel writes to `out` or `dx`, from what is in registers anyway.
//
// Bytes at 16384 x 2560 in bf16: forward reads x and writes out, 168 MB, 39 us at 4.3 TB/s; backward reads dout, x, dx and
// writes dx, 336 MB, 78 us.
#include "scale.cuh"

// Vectors of a row in a thread's registers, and most threads of a block; the launchers know these.
constexpr int FORWARD_VECS = 4;
constexpr int BACKWARD_VECS = 2;
constexpr unsigned FORWARD_THREADS = 1024;
constexpr unsigned BACKWARD_THREADS = 512;

struct Stats {
    float mean, rstd;
};

// What a stored weight stands for.
template <bool PLUS_ONE>
__device__ __forceinline__ float factor(float weight) {
    return PLUS_ONE ? 1.0f + weight : weight;
}

template <bool PLUS_ONE, int N>
__device__ __forceinline__ void to_factors(float (&weights)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) weights[i] = factor<PLUS_ONE>(weights[i]);
}

template <bool CENTRED>
__device__ __forceinline__ Stats load_stats(const float* stats, unsigned row) {
    return CENTRED ? Stats{stats[2 * (size_t)row], stats[2 * (size_t)row + 1]} : Stats{0.0f, stats[row]};
}

template <bool CENTRED>
__device__ __forceinline__ void store_stats(Stats s, float* stats, unsigned row) {
    if (threadIdx.x > 0) return;
    if (CENTRED) {
        stats[2 * (size_t)row] = s.mean;
        stats[2 * (size_t)row + 1] = s.rstd;
    } else {
        stats[row] = s.rstd;
    }
}

template <bool CENTRED>
__device__ __forceinline__ float normalised(float x, Stats s) {
    return (CENTRED ? x - s.mean : x) * s.rstd;
}

template <bool CENTRED>
__device__ __forceinline__ float scaled(float xhat, float weight, float bias) {
    return CENTRED ? fmaf(xhat, weight, bias) : xhat * weight;
}

// What a row's gradient sums: dout * weight * xhat, and for layer norm dout * weight.
template <bool CENTRED>
struct RowSums {
    static constexpr int N = CENTRED ? 2 : 1;
    float sums[N] = {};

    __device__ __forceinline__ void add(float dout, float weight, float xhat) {
        sums[0] = fmaf(dout * weight, xhat, sums[0]);
        if (CENTRED) sums[N - 1] = fmaf(dout, weight, sums[N - 1]);
    }
    // `sums` are means by now.
    __device__ __forceinline__ float gradient(float dout, float weight, float xhat, float rstd) const {
        const float dweighted = CENTRED ? fmaf(dout, weight, -sums[N - 1]) : dout * weight;
        return rstd * fmaf(xhat, -sums[0], dweighted);
    }
    __device__ __forceinline__ void to_means(float (&shared)[N][WARP], unsigned cols) {
        block_sum(sums, shared);
#pragma unroll
        for (int s = 0; s < N; s++) sums[s] /= cols;
    }
};

template <typename T, bool CENTRED, bool PLUS_ONE = false>
__device__ __forceinline__ void norm(
    const T* x, const T* weight, const T* bias, float eps, T* out, float* stats, unsigned cols, ScaleCell cell) {
    constexpr int N = WIDE<T>;
    __shared__ float shared[2][1][WARP];
    const unsigned row = blockIdx.x;
    x += (size_t)row * cols;
    out += (size_t)row * cols;
    const auto col = [](int k) { return (threadIdx.x + k * blockDim.x) * N; };
    Vec<T> held[FORWARD_VECS];
#pragma unroll
    for (int k = 0; k < FORWARD_VECS; k++) {
        if (col(k) < cols) held[k] = Vec<T>::load(x + col(k));
    }
    Stats s = {0.0f, 0.0f};
    Largest<T> largest;
    if (CENTRED) {
        float sum[1] = {0.0f};
#pragma unroll
        for (int k = 0; k < FORWARD_VECS; k++) {
            if (col(k) >= cols) break;
            float v[N];
            held[k].widen(v);
#pragma unroll
            for (int i = 0; i < N; i++) sum[0] += v[i];
        }
        block_sum(sum, shared[0]);
        s.mean = sum[0] / cols;
    }
    float sum[1] = {0.0f};
#pragma unroll
    for (int k = 0; k < FORWARD_VECS; k++) {
        if (col(k) >= cols) break;
        float v[N];
        held[k].widen(v);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float centred = CENTRED ? v[i] - s.mean : v[i];
            sum[0] = fmaf(centred, centred, sum[0]);
        }
    }
    // On their way while the block sums.
    Vec<T> held_w[FORWARD_VECS], held_b[FORWARD_VECS];
#pragma unroll
    for (int k = 0; k < FORWARD_VECS; k++) {
        if (col(k) >= cols) break;
        held_w[k] = Vec<T>::load(weight + col(k));
        if (CENTRED) held_b[k] = Vec<T>::load(bias + col(k));
    }
    block_sum(sum, shared[1]);
    s.rstd = 1.0f / sqrtf(sum[0] / cols + eps);
#pragma unroll
    for (int k = 0; k < FORWARD_VECS; k++) {
        if (col(k) >= cols) break;
        float v[N], w[N], b[N];
        held[k].widen(v);
        held_w[k].widen(w);
        to_factors<PLUS_ONE>(w);
        if (CENTRED) held_b[k].widen(b);
#pragma unroll
        for (int i = 0; i < N; i++) v[i] = scaled<CENTRED>(normalised<CENTRED>(v[i], s), w[i], CENTRED ? b[i] : 0.0f);
        const Vec<T> y = Vec<T>::narrow(v);
        y.store(out + col(k));
        largest.take(y);
    }
    store_stats<CENTRED>(s, stats, row);
    largest.publish(cell);
}

template <typename T, bool CENTRED, bool PLUS_ONE = false>
__device__ __forceinline__ void norm_any(
    const T* x, const T* weight, const T* bias, float eps, T* out, float* stats, unsigned cols, ScaleCell cell) {
    __shared__ float shared[2][1][WARP];
    const unsigned row = blockIdx.x;
    x += (size_t)row * cols;
    out += (size_t)row * cols;
    Stats s = {0.0f, 0.0f};
    Largest<T> largest;
    if (CENTRED) {
        float sum[1] = {0.0f};
        for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) sum[0] += widen(x[c]);
        block_sum(sum, shared[0]);
        s.mean = sum[0] / cols;
    }
    float sum[1] = {0.0f};
    for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
        const float centred = CENTRED ? widen(x[c]) - s.mean : widen(x[c]);
        sum[0] = fmaf(centred, centred, sum[0]);
    }
    block_sum(sum, shared[1]);
    s.rstd = 1.0f / sqrtf(sum[0] / cols + eps);
    for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
        const float b = CENTRED ? widen(bias[c]) : 0.0f;
        const Vec<T, 1> y = {narrow<T>(scaled<CENTRED>(normalised<CENTRED>(widen(x[c]), s), factor<PLUS_ONE>(widen(weight[c])), b))};
        y.store(out + c);
        largest.take(y);
    }
    store_stats<CENTRED>(s, stats, row);
    largest.publish(cell);
}

// Adds the input's gradient to dx. A block takes the rows b, b + gridDim.x, ... and sums the parameters' gradients over
// them, in that order, into its row of `partials`: [gridDim.x, cols] for the weight, then the same for a bias.
template <typename T, bool CENTRED, bool PLUS_ONE = false>
__device__ __forceinline__ void norm_backward(
    const T* dout, const T* x, const T* weight, const float* stats, T* dx, float* partials, unsigned rows, unsigned cols,
    ScaleCell cell) {
    constexpr int N = WIDE<T>, VECS = BACKWARD_VECS;
    __shared__ float shared[2][RowSums<CENTRED>::N][WARP];
    // Each thread's own; it is here to leave registers for more threads.
    __shared__ Vec<T> held_w[VECS][BACKWARD_THREADS];
    const auto col = [](int k) { return (threadIdx.x + k * blockDim.x) * N; };
#pragma unroll
    for (int k = 0; k < VECS; k++) {
        if (col(k) < cols) held_w[k][threadIdx.x] = Vec<T>::load(weight + col(k));
    }
    float dweight[VECS][N] = {}, dbias[VECS][N] = {};
    Largest<T> largest;
    unsigned turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        const size_t start = (size_t)row * cols;
        Vec<T> held_d[VECS], held_x[VECS], held_dx[VECS];
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            if (col(k) >= cols) break;
            held_d[k] = Vec<T>::load(dout + start + col(k));
            held_x[k] = Vec<T>::load(x + start + col(k));
            held_dx[k] = Vec<T>::load(dx + start + col(k));
        }
        const Stats s = load_stats<CENTRED>(stats, row);
        RowSums<CENTRED> means;
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            if (col(k) >= cols) break;
            float d[N], xhat[N], w[N];
            held_d[k].widen(d);
            held_x[k].widen(xhat);
            held_w[k][threadIdx.x].widen(w);
            to_factors<PLUS_ONE>(w);
#pragma unroll
            for (int i = 0; i < N; i++) means.add(d[i], w[i], normalised<CENTRED>(xhat[i], s));
        }
        means.to_means(shared[turn], cols);
#pragma unroll
        for (int k = 0; k < VECS; k++) {
            if (col(k) >= cols) break;
            float d[N], xhat[N], w[N], sum[N];
            held_d[k].widen(d);
            held_x[k].widen(xhat);
            held_w[k][threadIdx.x].widen(w);
            to_factors<PLUS_ONE>(w);
            held_dx[k].widen(sum);
#pragma unroll
            for (int i = 0; i < N; i++) {
                xhat[i] = normalised<CENTRED>(xhat[i], s);
                dweight[k][i] = fmaf(d[i], xhat[i], dweight[k][i]);
                if (CENTRED) dbias[k][i] += d[i];
                sum[i] += means.gradient(d[i], w[i], xhat[i], s.rstd);
            }
            const Vec<T> gradient = Vec<T>::narrow(sum);
            gradient.store(dx + start + col(k));
            largest.take(gradient);
        }
    }
    float* weight_sums = partials + (size_t)blockIdx.x * cols;
    float* bias_sums = weight_sums + (size_t)gridDim.x * cols;
#pragma unroll
    for (int k = 0; k < VECS; k++) {
        if (col(k) >= cols) break;
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            *reinterpret_cast<float4*>(weight_sums + col(k) + i) =
                make_float4(dweight[k][i], dweight[k][i + 1], dweight[k][i + 2], dweight[k][i + 3]);
            if (CENTRED) {
                *reinterpret_cast<float4*>(bias_sums + col(k) + i) =
                    make_float4(dbias[k][i], dbias[k][i + 1], dbias[k][i + 2], dbias[k][i + 3]);
            }
        }
    }
    largest.publish(cell);
}

// As above; a thread keeps its columns' sums in `partials` itself.
template <typename T, bool CENTRED, bool PLUS_ONE = false>
__device__ __forceinline__ void norm_backward_any(
    const T* dout, const T* x, const T* weight, const float* stats, T* dx, float* partials, unsigned rows, unsigned cols,
    ScaleCell cell) {
    __shared__ float shared[2][RowSums<CENTRED>::N][WARP];
    float* weight_sums = partials + (size_t)blockIdx.x * cols;
    float* bias_sums = weight_sums + (size_t)gridDim.x * cols;
    Largest<T> largest;
    unsigned turn = 0;
    for (unsigned row = blockIdx.x; row < rows; row += gridDim.x, turn ^= 1) {
        const size_t start = (size_t)row * cols;
        const bool first = row == blockIdx.x;
        const Stats s = load_stats<CENTRED>(stats, row);
        RowSums<CENTRED> means;
        for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
            means.add(widen(dout[start + c]), factor<PLUS_ONE>(widen(weight[c])), normalised<CENTRED>(widen(x[start + c]), s));
        }
        means.to_means(shared[turn], cols);
        for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
            const float d = widen(dout[start + c]), xhat = normalised<CENTRED>(widen(x[start + c]), s);
            weight_sums[c] = fmaf(d, xhat, first ? 0.0f : weight_sums[c]);
            if (CENTRED) bias_sums[c] = (first ? 0.0f : bias_sums[c]) + d;
            const float sum = widen(dx[start + c]) + means.gradient(d, factor<PLUS_ONE>(widen(weight[c])), xhat, s.rstd);
            const Vec<T, 1> gradient = {narrow<T>(sum)};
            gradient.store(dx + start + c);
            largest.take(gradient);
        }
    }
    largest.publish(cell);
}

// ANY is empty or _any. With more than 96 registers one block of layer norm's backward fewer would fit on a multiprocessor.
#define NORM_OF(NAME, T, ANY)                                                                                           \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS) rms_norm##ANY##_##NAME(                               \
        const T* x, const T* weight, float eps, T* out, float* rstd, unsigned cols, SCALE_PARAMS) {                     \
        norm##ANY<T, false>(x, weight, nullptr, eps, out, rstd, cols, {scale, exponent});                               \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS) layer_norm##ANY##_##NAME(                             \
        const T* x, const T* weight, const T* bias, float eps, T* out, float* stats, unsigned cols, SCALE_PARAMS) {     \
        norm##ANY<T, true>(x, weight, bias, eps, out, stats, cols, {scale, exponent});                                  \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) rms_norm_backward##ANY##_##NAME(                     \
        const T* dout, const T* x, const T* weight, const float* rstd, T* dx, float* partials, unsigned rows,           \
        unsigned cols, SCALE_PARAMS) {                                                                                  \
        norm_backward##ANY<T, false>(dout, x, weight, rstd, dx, partials, rows, cols, {scale, exponent});               \
    }                                                                                                                   \
    extern "C" __global__ void __maxnreg__(96) layer_norm_backward##ANY##_##NAME(                                       \
        const T* dout, const T* x, const T* weight, const float* stats, T* dx, float* partials, unsigned rows,          \
        unsigned cols, SCALE_PARAMS) {                                                                                  \
        norm_backward##ANY<T, true>(dout, x, weight, stats, dx, partials, rows, cols, {scale, exponent});               \
    }
#define PLUS_ONE_OF(NAME, T, ANY)                                                                                       \
    extern "C" __global__ void __launch_bounds__(FORWARD_THREADS) rms_norm_plus_one##ANY##_##NAME(                      \
        const T* x, const T* weight, float eps, T* out, float* rstd, unsigned cols, SCALE_PARAMS) {                     \
        norm##ANY<T, false, true>(x, weight, nullptr, eps, out, rstd, cols, {scale, exponent});                         \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(BACKWARD_THREADS) rms_norm_plus_one_backward##ANY##_##NAME(            \
        const T* dout, const T* x, const T* weight, const float* rstd, T* dx, float* partials, unsigned rows,           \
        unsigned cols, SCALE_PARAMS) {                                                                                  \
        norm_backward##ANY<T, false, true>(dout, x, weight, rstd, dx, partials, rows, cols, {scale, exponent});         \
    }
#define NORM(NAME, T) NORM_OF(NAME, T, ) NORM_OF(NAME, T, _any) PLUS_ONE_OF(NAME, T, ) PLUS_ONE_OF(NAME, T, _any)
FOR_EACH_FORMAT(NORM)
