// Query and key heads: their RMS normalisation and their rotation. A row of `qkv` is a token: `per_token` heads, of which the
// first `normed` are queries, then keys; the rest are values.
//
// The kernels named `any` take one element at a time, for heads that are not whole vectors, or too long.
#include "common.cuh"

// The launchers know these three.
constexpr int HEAD_VECS = 2;
constexpr unsigned HEAD_WARPS = 8;
constexpr int ROPE_HEADS = 4;
// Longest head in registers, and so in a warp's vectors.
constexpr unsigned HEAD_MAX = HEAD_VECS * WARP * WIDE<bf16>;

// What a stored weight stands for.
template <bool PLUS_ONE>
__device__ __forceinline__ float factor(float weight) {
    return PLUS_ONE ? 1.0f + weight : weight;
}

__device__ __forceinline__ float rms_gradient(float dweighted, float xhat, float rstd, float mean) {
    return rstd * fmaf(xhat, -mean, dweighted);
}

// 2^lanes_log2 lanes take a head, HEAD_VECS vectors each, lane l the vectors l, l + lanes, ...
// Reads and writes qkv once: 16384 tokens of 48 heads of 128 in bf16 are 403 MB, 94 us at 4.3 TB/s.
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm(
    const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned all_heads, unsigned heads,
    unsigned normed, unsigned per_token, unsigned head_dim, unsigned lanes_log2) {
    constexpr int N = WIDE<T>;
    const unsigned lanes = 1u << lanes_log2, lane = threadIdx.x & (lanes - 1);
    const unsigned index = blockIdx.x * (blockDim.x >> lanes_log2) + (threadIdx.x >> lanes_log2);
    const unsigned token = index / per_token, head = index - token * per_token;
    const size_t start = (size_t)index * head_dim;
    const auto col = [=](int k) { return (lane + k * lanes) * N; };
    const unsigned cols = index < all_heads ? head_dim : 0;
    Vec<T> held[HEAD_VECS];
    float sum = 0.0f;
#pragma unroll
    for (int k = 0; k < HEAD_VECS; k++) {
        if (col(k) < cols) held[k] = Vec<T>::load(qkv + start + col(k));
    }
#pragma unroll
    for (int k = 0; k < HEAD_VECS; k++) {
        if (col(k) >= cols) break;
        float x[N];
        held[k].widen(x);
#pragma unroll
        for (int i = 0; i < N; i++) sum = fmaf(x[i], x[i], sum);
    }
    const float scale = 1.0f / sqrtf(warp_sum(sum, lanes) / head_dim + eps);
    const bool is_normed = head < normed;
    const T* weight = head < heads ? q_weight : k_weight;
#pragma unroll
    for (int k = 0; k < HEAD_VECS; k++) {
        if (col(k) >= cols) break;
        if (is_normed) {
            float x[N], w[N];
            held[k].widen(x);
            Vec<T>::load(weight + col(k)).widen(w);
#pragma unroll
            for (int i = 0; i < N; i++) x[i] = x[i] * scale * factor<PLUS_ONE>(w[i]);
            held[k] = Vec<T>::narrow(x);
        }
        held[k].store(out + start + col(k));
    }
    if (is_normed && lane == 0 && cols > 0) rstd[(size_t)token * normed + head] = scale;
}

// A warp takes a head.
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm_any(
    const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned all_heads, unsigned heads,
    unsigned normed, unsigned per_token, unsigned head_dim) {
    const unsigned lane = threadIdx.x % WARP, index = blockIdx.x * HEAD_WARPS + threadIdx.x / WARP;
    if (index >= all_heads) return;
    const unsigned token = index / per_token, head = index - token * per_token;
    qkv += (size_t)index * head_dim;
    out += (size_t)index * head_dim;
    if (head >= normed) {
        for (unsigned c = lane; c < head_dim; c += WARP) out[c] = qkv[c];
        return;
    }
    float sum = 0.0f;
    for (unsigned c = lane; c < head_dim; c += WARP) sum = fmaf(widen(qkv[c]), widen(qkv[c]), sum);
    const float scale = 1.0f / sqrtf(warp_sum(sum) / head_dim + eps);
    const T* weight = head < heads ? q_weight : k_weight;
    for (unsigned c = lane; c < head_dim; c += WARP) out[c] = narrow<T>(widen(qkv[c]) * scale * factor<PLUS_ONE>(widen(weight[c])));
    if (lane == 0) rstd[(size_t)token * normed + head] = scale;
}

// The heads [first, first + count) of every token, all with one weight: dqkv becomes the gradient of the norm's input, and
// a block's sums of the weight's gradient go to its row of partials [gridDim.x, head_dim]. Lanes as in qk_norm; a block's
// groups of lanes take the heads in turn. Reads dqkv and qkv and writes dqkv once: 32 heads of 128 and 16384 tokens in
// bf16 are 403 MB, 94 us at 4.3 TB/s.
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm_backward(
    T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first, unsigned count,
    unsigned normed, unsigned per_token, unsigned head_dim, unsigned lanes_log2) {
    constexpr int N = WIDE<T>;
    __shared__ float shared[HEAD_WARPS][HEAD_MAX];
    const unsigned lanes = 1u << lanes_log2, lane = threadIdx.x & (lanes - 1);
    const unsigned groups = blockDim.x >> lanes_log2, group = threadIdx.x >> lanes_log2, all_heads = tokens * count;
    const auto col = [=](int k) { return (lane + k * lanes) * N; };
    float sums[HEAD_VECS][N] = {};
    for (unsigned base = blockIdx.x * groups; base < all_heads; base += gridDim.x * groups) {
        const unsigned index = base + group, token = index / count, head = first + index - token * count;
        const size_t start = ((size_t)token * per_token + head) * head_dim;
        const unsigned cols = index < all_heads ? head_dim : 0;
        const float scale = cols > 0 ? rstd[(size_t)token * normed + head] : 0.0f;
        Vec<T> held_d[HEAD_VECS], held_x[HEAD_VECS];
#pragma unroll
        for (int k = 0; k < HEAD_VECS; k++) {
            if (col(k) >= cols) break;
            held_d[k] = Vec<T>::load(dqkv + start + col(k));
            held_x[k] = Vec<T>::load(qkv + start + col(k));
        }
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < HEAD_VECS; k++) {
            if (col(k) >= cols) break;
            float d[N], x[N], w[N];
            held_d[k].widen(d);
            held_x[k].widen(x);
            Vec<T>::load(weight + col(k)).widen(w);
#pragma unroll
            for (int i = 0; i < N; i++) sum = fmaf(d[i] * factor<PLUS_ONE>(w[i]), x[i] * scale, sum);
        }
        const float mean = warp_sum(sum, lanes) / head_dim;
#pragma unroll
        for (int k = 0; k < HEAD_VECS; k++) {
            if (col(k) >= cols) break;
            float d[N], x[N], w[N];
            held_d[k].widen(d);
            held_x[k].widen(x);
            Vec<T>::load(weight + col(k)).widen(w);
#pragma unroll
            for (int i = 0; i < N; i++) {
                const float xhat = x[i] * scale;
                sums[k][i] = fmaf(d[i], xhat, sums[k][i]);
                d[i] = rms_gradient(d[i] * factor<PLUS_ONE>(w[i]), xhat, scale, mean);
            }
            Vec<T>::narrow(d).store(dqkv + start + col(k));
        }
    }
    // Groups of a warp, then warps.
    const unsigned warp = threadIdx.x / WARP;
#pragma unroll
    for (int k = 0; k < HEAD_VECS; k++) {
#pragma unroll
        for (int i = 0; i < N; i++) {
            for (unsigned distance = lanes; distance < WARP; distance *= 2) {
                sums[k][i] += __shfl_xor_sync(ALL_LANES, sums[k][i], distance);
            }
            if (threadIdx.x % WARP < lanes && col(k) < head_dim) shared[warp][col(k) + i] = sums[k][i];
        }
    }
    __syncthreads();
    for (unsigned c = threadIdx.x; c < head_dim; c += blockDim.x) {
        float sum = 0.0f;
#pragma unroll
        for (unsigned w = 0; w < HEAD_WARPS; w++) sum += shared[w][c];
        partials[(size_t)blockIdx.x * head_dim + c] = sum;
    }
}

// As above; a warp takes a head and keeps its sums in its own row of partials [gridDim.x * HEAD_WARPS, head_dim].
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm_backward_any(
    T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first, unsigned count,
    unsigned normed, unsigned per_token, unsigned head_dim) {
    const unsigned lane = threadIdx.x % WARP, warp = blockIdx.x * HEAD_WARPS + threadIdx.x / WARP;
    const unsigned warps = gridDim.x * HEAD_WARPS, all_heads = tokens * count;
    float* sums = partials + (size_t)warp * head_dim;
    for (unsigned c = lane; c < head_dim; c += WARP) sums[c] = 0.0f;
    for (unsigned index = warp; index < all_heads; index += warps) {
        const unsigned token = index / count, head = first + index - token * count;
        const size_t start = ((size_t)token * per_token + head) * head_dim;
        const float scale = rstd[(size_t)token * normed + head];
        float sum = 0.0f;
        for (unsigned c = lane; c < head_dim; c += WARP) {
            sum = fmaf(widen(dqkv[start + c]) * factor<PLUS_ONE>(widen(weight[c])), widen(qkv[start + c]) * scale, sum);
        }
        const float mean = warp_sum(sum) / head_dim;
        for (unsigned c = lane; c < head_dim; c += WARP) {
            const float d = widen(dqkv[start + c]), xhat = widen(qkv[start + c]) * scale;
            sums[c] = fmaf(d, xhat, sums[c]);
            dqkv[start + c] = narrow<T>(rms_gradient(d * factor<PLUS_ONE>(widen(weight[c])), xhat, scale, mean));
        }
    }
}

// N pairs of (cos, sin).
template <int N>
__device__ __forceinline__ void load_angles(const float* table, float (&angles)[2 * N]) {
    if constexpr (N == 1) {
        angles[0] = table[0];
        angles[1] = table[1];
    } else {
#pragma unroll
        for (int i = 0; i < 2 * N; i += 4) {
            const float4 quad = *reinterpret_cast<const float4*>(table + i);
            angles[i] = quad.x;
            angles[i + 1] = quad.y;
            angles[i + 2] = quad.z;
            angles[i + 3] = quad.w;
        }
    }
}

// A thread rotates N channels of the lower half with their partners, in ROPE_HEADS heads of a token: `steps` threads cover
// a half, `groups` times as many the heads, neighbours in `groups` having neighbouring heads.
// Reads and writes queries and keys once: 16384 tokens of 40 heads of 128 in bf16 are 336 MB, 78 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void rope(
    T* qkv, const int* positions, const float* table, unsigned tokens, unsigned heads, unsigned per_token, unsigned head_dim,
    unsigned half, unsigned groups, bool inverse) {
    const unsigned steps = half / N, index = blockIdx.x * blockDim.x + threadIdx.x;
    const unsigned slot = index / steps, channel = (index - slot * steps) * N;
    const unsigned token = slot / groups, group = slot - token * groups;
    if (token >= tokens) return;
    const int position = positions[token];
    T* row = qkv + (size_t)token * per_token * head_dim + channel;
    const auto head = [=](int k) { return group + k * groups; };
    Vec<T, N> low[ROPE_HEADS], high[ROPE_HEADS];
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++) {
        if (head(k) >= heads) break;
        low[k] = Vec<T, N>::load(row + head(k) * head_dim);
        high[k] = Vec<T, N>::load(row + head(k) * head_dim + half);
    }
    float angles[2 * N];
    load_angles<N>(table + ((size_t)position * half + channel) * 2, angles);
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++) {
        if (head(k) >= heads) break;
        float x[N], y[N];
        low[k].widen(x);
        high[k].widen(y);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float cos = angles[2 * i], sin = inverse ? -angles[2 * i + 1] : angles[2 * i + 1], old = x[i];
            x[i] = fmaf(old, cos, -(y[i] * sin));
            y[i] = fmaf(y[i], cos, old * sin);
        }
        Vec<T, N>::narrow(x).store(row + head(k) * head_dim);
        Vec<T, N>::narrow(y).store(row + head(k) * head_dim + half);
    }
}

// As `rope`, for pairs of neighbouring channels: a thread rotates one pair in ROPE_HEADS heads, and a pair may lie at any address.
template <typename T>
__device__ __forceinline__ void rope_neighbours(
    T* qkv, const int* positions, const float* table, unsigned tokens, unsigned heads, unsigned per_token, unsigned head_dim,
    unsigned half, unsigned groups, bool inverse) {
    const unsigned index = blockIdx.x * blockDim.x + threadIdx.x, slot = index / half, pair = index - slot * half;
    const unsigned token = slot / groups, group = slot - token * groups;
    if (token >= tokens) return;
    float angle[2];
    load_angles<1>(table + ((size_t)positions[token] * half + pair) * 2, angle);
    const float cos = angle[0], sin = inverse ? -angle[1] : angle[1];
    T* row = qkv + (size_t)token * per_token * head_dim + 2 * pair;
#pragma unroll
    for (int k = 0; k < ROPE_HEADS; k++) {
        const unsigned head = group + k * groups;
        if (head >= heads) break;
        T* at = row + head * head_dim;
        const float x = widen(at[0]), y = widen(at[1]);
        at[0] = narrow<T>(fmaf(x, cos, -(y * sin)));
        at[1] = narrow<T>(fmaf(y, cos, x * sin));
    }
}

// Norms whose span is all queries of a token, or all its keys: block (token, 0) takes the queries, (token, 1) the keys, and (token, 2)
// copies the values; N elements at a time. What is read twice comes from the cache.
// Reads and writes qkv once: 32768 tokens of 48 heads of 128 in bf16 are 805 MB, 0.19 ms at 4.3 TB/s.
template <typename T, bool PLUS_ONE, int N>
__device__ __forceinline__ void qk_norm_whole(
    const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned q_cols, unsigned k_cols) {
    __shared__ float shared[1][WARP];
    const unsigned token = blockIdx.x, part = blockIdx.y, cols = part == 0 ? q_cols : k_cols;
    const size_t start = (size_t)token * (q_cols + 2 * k_cols) + (part > 0 ? q_cols : 0) + (part > 1 ? k_cols : 0);
    qkv += start;
    out += start;
    if (part == 2) {
        for (unsigned c = threadIdx.x * N; c < cols; c += blockDim.x * N) Vec<T, N>::load(qkv + c).store(out + c);
        return;
    }
    float sum[1] = {0.0f};
    for (unsigned c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
        float x[N];
        Vec<T, N>::load(qkv + c).widen(x);
#pragma unroll
        for (int i = 0; i < N; i++) sum[0] = fmaf(x[i], x[i], sum[0]);
    }
    block_sum(sum, shared);
    const float scale = 1.0f / sqrtf(sum[0] / cols + eps);
    const T* weight = part == 0 ? q_weight : k_weight;
    for (unsigned c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
        float x[N], w[N];
        Vec<T, N>::load(qkv + c).widen(x);
        Vec<T, N>::load(weight + c).widen(w);
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = x[i] * scale * factor<PLUS_ONE>(w[i]);
        Vec<T, N>::narrow(x).store(out + c);
    }
    if (threadIdx.x == 0) rstd[2 * (size_t)token + part] = scale;
}

// Columns [first, first + cols) of every token, the span `part` of it, a vector each thread: dqkv becomes the gradient of the norm's input. A block
// takes the tokens b, b + gridDim.x, ... and sums the weight's gradient over them, in that order, into its row of partials [gridDim.x, cols].
// Reads dqkv and qkv and writes dqkv once: 32768 tokens of 16 heads of 128 in bf16 are 403 MB, 94 us at 4.3 TB/s.
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm_whole_backward(
    T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first, unsigned cols,
    unsigned per_token, unsigned part) {
    constexpr int N = WIDE<T>;
    __shared__ float shared[2][1][WARP];
    const unsigned c = threadIdx.x * N;
    const bool has_cols = c < cols;
    float sums[N] = {}, w[N] = {};
    if (has_cols) Vec<T>::load(weight + c).widen(w);
#pragma unroll
    for (int i = 0; i < N; i++) w[i] = factor<PLUS_ONE>(w[i]);
    unsigned turn = 0;
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
        const size_t at = (size_t)token * per_token + first + c;
        const float scale = rstd[2 * (size_t)token + part];
        float d[N] = {}, xhat[N] = {}, sum[1] = {0.0f};
        if (has_cols) {
            Vec<T>::load(dqkv + at).widen(d);
            Vec<T>::load(qkv + at).widen(xhat);
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            xhat[i] *= scale;
            sum[0] = fmaf(d[i] * w[i], xhat[i], sum[0]);
        }
        block_sum(sum, shared[turn]);
        const float mean = sum[0] / cols;
#pragma unroll
        for (int i = 0; i < N; i++) {
            sums[i] = fmaf(d[i], xhat[i], sums[i]);
            d[i] = rms_gradient(d[i] * w[i], xhat[i], scale, mean);
        }
        if (has_cols) Vec<T>::narrow(d).store(dqkv + at);
    }
    if (!has_cols) return;
#pragma unroll
    for (int i = 0; i < N; i++) partials[(size_t)blockIdx.x * cols + c + i] = sums[i];
}

// As above; a thread takes one column after the other, and keeps its sums in the partials.
template <typename T, bool PLUS_ONE>
__device__ __forceinline__ void qk_norm_whole_backward_any(
    T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first, unsigned cols,
    unsigned per_token, unsigned part) {
    __shared__ float shared[2][1][WARP];
    float* sums = partials + (size_t)blockIdx.x * cols;
    unsigned turn = 0;
    for (unsigned token = blockIdx.x; token < tokens; token += gridDim.x, turn ^= 1) {
        T* d = dqkv + (size_t)token * per_token + first;
        const T* x = qkv + (size_t)token * per_token + first;
        const float scale = rstd[2 * (size_t)token + part];
        float sum[1] = {0.0f};
        for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
            sum[0] = fmaf(widen(d[c]) * factor<PLUS_ONE>(widen(weight[c])), widen(x[c]) * scale, sum[0]);
        }
        block_sum(sum, shared[turn]);
        const float mean = sum[0] / cols;
        for (unsigned c = threadIdx.x; c < cols; c += blockDim.x) {
            const float dout = widen(d[c]), xhat = widen(x[c]) * scale;
            sums[c] = fmaf(dout, xhat, token == blockIdx.x ? 0.0f : sums[c]);
            d[c] = narrow<T>(rms_gradient(dout * factor<PLUS_ONE>(widen(weight[c])), xhat, scale, mean));
        }
    }
}

#define ROPE_OF(NAME, T, N)                                                                                             \
    extern "C" __global__ void __launch_bounds__(256) rope##NAME(                                                       \
        T* qkv, const int* positions, const float* table, unsigned tokens, unsigned heads, unsigned per_token,          \
        unsigned head_dim, unsigned half, unsigned groups, unsigned inverse) {                                          \
        rope<T, N>(qkv, positions, table, tokens, heads, per_token, head_dim, half, groups, inverse != 0);              \
    }
#define QK_NORM_WHOLE_OF(NAME, T, PLUS_ONE, N)                                                                           \
    extern "C" __global__ void __launch_bounds__(256) NAME(                                                             \
        const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned q_cols,            \
        unsigned k_cols) {                                                                                              \
        qk_norm_whole<T, PLUS_ONE, N>(qkv, q_weight, k_weight, eps, out, rstd, q_cols, k_cols);                         \
    }
#define QK_NORM_OF(KIND, NAME, T, PLUS_ONE)                                                                             \
    extern "C" __global__ void __launch_bounds__(WARP * HEAD_WARPS) qk_norm##KIND##_##NAME(                             \
        const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned all_heads,         \
        unsigned heads, unsigned normed, unsigned per_token, unsigned head_dim, unsigned lanes_log2) {                  \
        qk_norm<T, PLUS_ONE>(                                                                                           \
            qkv, q_weight, k_weight, eps, out, rstd, all_heads, heads, normed, per_token, head_dim, lanes_log2);        \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP * HEAD_WARPS) qk_norm##KIND##_any_##NAME(                         \
        const T* qkv, const T* q_weight, const T* k_weight, float eps, T* out, float* rstd, unsigned all_heads,         \
        unsigned heads, unsigned normed, unsigned per_token, unsigned head_dim) {                                       \
        qk_norm_any<T, PLUS_ONE>(                                                                                       \
            qkv, q_weight, k_weight, eps, out, rstd, all_heads, heads, normed, per_token, head_dim);                    \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP * HEAD_WARPS) qk_norm##KIND##_backward_##NAME(                    \
        T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first,    \
        unsigned count, unsigned normed, unsigned per_token, unsigned head_dim, unsigned lanes_log2) {                  \
        qk_norm_backward<T, PLUS_ONE>(                                                                                  \
            dqkv, qkv, weight, rstd, partials, tokens, first, count, normed, per_token, head_dim, lanes_log2);          \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(WARP * HEAD_WARPS) qk_norm##KIND##_backward_any_##NAME(                \
        T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first,    \
        unsigned count, unsigned normed, unsigned per_token, unsigned head_dim) {                                       \
        qk_norm_backward_any<T, PLUS_ONE>(                                                                              \
            dqkv, qkv, weight, rstd, partials, tokens, first, count, normed, per_token, head_dim);                      \
    }                                                                                                                   \
    QK_NORM_WHOLE_OF(qk_norm##KIND##_whole_##NAME, T, PLUS_ONE, WIDE<T>)                                                \
    QK_NORM_WHOLE_OF(qk_norm##KIND##_whole_any_##NAME, T, PLUS_ONE, 1)                                                  \
    extern "C" __global__ void __launch_bounds__(1024) qk_norm##KIND##_whole_backward_##NAME(                           \
        T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first,    \
        unsigned cols, unsigned per_token, unsigned part) {                                                             \
        qk_norm_whole_backward<T, PLUS_ONE>(dqkv, qkv, weight, rstd, partials, tokens, first, cols, per_token, part);   \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) qk_norm##KIND##_whole_backward_any_##NAME(                        \
        T* dqkv, const T* qkv, const T* weight, const float* rstd, float* partials, unsigned tokens, unsigned first,    \
        unsigned cols, unsigned per_token, unsigned part) {                                                             \
        qk_norm_whole_backward_any<T, PLUS_ONE>(                                                                        \
            dqkv, qkv, weight, rstd, partials, tokens, first, cols, per_token, part);                                   \
    }
#define ROPE(NAME, T)                                                                                                   \
    ROPE_OF(_##NAME, T, WIDE<T>)                                                                                        \
    ROPE_OF(_any_##NAME, T, 1)                                                                                          \
    QK_NORM_OF(, NAME, T, false)                                                                                        \
    QK_NORM_OF(_plus_one, NAME, T, true)                                                                                \
    extern "C" __global__ void __launch_bounds__(256) rope_neighbours_##NAME(                                           \
        T* qkv, const int* positions, const float* table, unsigned tokens, unsigned heads, unsigned per_token,          \
        unsigned head_dim, unsigned half, unsigned groups, unsigned inverse) {                                          \
        rope_neighbours<T>(qkv, positions, table, tokens, heads, per_token, head_dim, half, groups, inverse != 0);      \
    }
FOR_EACH_FORMAT(ROPE)
