// The router: choices, their order by expert, and the way back. See src/device/cpu/kernels/route.rs, whose bits these are.
#include "common.cuh"
#include "math.cuh"

constexpr unsigned THREADS = 256;
constexpr unsigned WARPS = THREADS / WARP;
// Choices that a block of the sort counts.
constexpr unsigned CHUNK = 1024;
// As EXPERTS_MAX in src/device/kernels/grouped.rs.
constexpr unsigned EXPERTS_MAX = 1024;

// Orders like the numbers: both zeros are one, and NaN is the least.
__device__ __forceinline__ unsigned order(float x) {
    const unsigned bits = __float_as_uint(x + 0.0f);
    if (isnan(x)) return 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The sum of exp(logit - largest) over all experts, on all lanes of the warp that calls.
__device__ __forceinline__ float exp_sum(const float* logits, unsigned experts, float largest) {
    float sum = 0.0f;
    for (unsigned i = threadIdx.x % WARP; i < experts; i += WARP) sum += exp_exact(logits[i] - largest);
    return warp_sum(sum);
}

// A place in the order of keys, the largest key first, of equal ones the first.
__device__ __forceinline__ unsigned long long place_of(float key, unsigned i) { return (unsigned long long)order(key) << 32 | ~i; }

// The largest place of a warp.
__device__ __forceinline__ unsigned long long best_place(unsigned long long best) {
    for (unsigned distance = WARP / 2; distance > 0; distance /= 2) {
        const unsigned long long other = __shfl_xor_sync(ALL_LANES, best, distance);
        best = other > best ? other : best;
    }
    return best;
}

// The top_k largest logits of a token, of equal ones the first; their weights. One warp a token.
// Reads T x E logits top_k times, from the cache after the first: 16384 x 128 are 8 MB, 2 us at 4.3 TB/s.
extern "C" __global__ void __launch_bounds__(THREADS) route(
    const float* logits, int* chosen, float* weights, unsigned tokens, unsigned experts, unsigned top_k, unsigned all) {
    const unsigned lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (token >= tokens) return;
    logits += (size_t)token * experts, chosen += (size_t)token * top_k, weights += (size_t)token * top_k;
    unsigned long long last = ~0ull;
    float largest = 0.0f, sum = 0.0f;
    for (unsigned j = 0; j < top_k; j++) {
        unsigned long long best = 0;
        for (unsigned i = lane; i < experts; i += WARP) {
            const unsigned long long place = place_of(logits[i], i);
            if (place < last && place > best) best = place;
        }
        last = best_place(best);
        const unsigned expert = ~(unsigned)last;
        const float logit = logits[expert];
        if (j == 0) largest = logit;
        const float weight = exp_exact(logit - largest);
        sum += weight;
        if (lane == 0) chosen[j] = expert, weights[j] = weight;
    }
    if (all) sum = exp_sum(logits, experts, largest);
    if (lane != 0) return;
    for (unsigned j = 0; j < top_k; j++) weights[j] = __fdiv_rn(weights[j], sum);
}

// As the CPU's sigmoid, to the bit.
__device__ __forceinline__ float score_of(float logit) { return __fdiv_rn(1.0f, 1.0f + exp_exact(-logit)); }

// The score by which expert i is chosen; a correction has three parts.
template <typename T>
__device__ __forceinline__ float key_of(const float* logits, const T* correction, unsigned experts, unsigned i) {
    const float score = score_of(logits[i]);
    if (correction == nullptr) return score + 0.0f;
    return score + (widen(correction[i]) + widen(correction[experts + i]) + widen(correction[2 * experts + i]));
}

// Bit g says whether a token may choose experts of group g: of the top_groups groups whose two largest keys have the largest sums. Lane g
// adds up group g.
template <typename T>
__device__ __forceinline__ unsigned allowed_groups(
    const float* logits, const T* correction, unsigned experts, unsigned groups, unsigned top_groups) {
    if (top_groups == groups) return ~0u;
    const unsigned lane = threadIdx.x % WARP, group = experts / groups;
    unsigned long long own = 0;
    if (lane < groups) {
        unsigned long long first = 0, second = 0;
        for (unsigned i = lane * group; i < (lane + 1) * group; i++) {
            const unsigned long long place = place_of(key_of(logits, correction, experts, i), i);
            if (place > first) second = first, first = place;
            else if (place > second) second = place;
        }
        const float sum = key_of(logits, correction, experts, ~(unsigned)first) + key_of(logits, correction, experts, ~(unsigned)second);
        own = place_of(sum, lane);
    }
    unsigned allowed = 0;
    for (unsigned j = 0; j < top_groups; j++) {
        const unsigned long long best = best_place(own);
        allowed |= 1u << ~(unsigned)best;
        if (own == best) own = 0;
    }
    return allowed;
}

// The top_k experts of a token by SigmoidRule, and their weights. One warp a token.
// Reads T x E logits top_k times, from the cache after the first: 16384 x 128 are 8 MB, 2 us at 4.3 TB/s.
template <typename T>
__device__ __forceinline__ void route_scores(
    const float* logits, const T* correction, int* chosen, float* weights, unsigned tokens, unsigned experts, unsigned top_k, unsigned groups,
    unsigned top_groups, bool renormalised, float scale) {
    const unsigned lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (token >= tokens) return;
    logits += (size_t)token * experts, chosen += (size_t)token * top_k, weights += (size_t)token * top_k;
    const unsigned allowed = allowed_groups(logits, correction, experts, groups, top_groups), group = experts / groups;
    unsigned long long last = ~0ull;
    float sum = 0.0f;
    for (unsigned j = 0; j < top_k; j++) {
        unsigned long long best = 0;
        for (unsigned i = lane; i < experts; i += WARP) {
            if (!(allowed >> i / group & 1)) continue;
            const unsigned long long place = place_of(key_of(logits, correction, experts, i), i);
            if (place < last && place > best) best = place;
        }
        last = best_place(best);
        const unsigned expert = ~(unsigned)last;
        const float score = score_of(logits[expert]);
        sum += score;
        if (lane == 0) chosen[j] = expert, weights[j] = score;
    }
    if (lane != 0) return;
    sum += 1e-20f;
    for (unsigned j = 0; j < top_k; j++) weights[j] = (renormalised ? __fdiv_rn(weights[j], sum) : weights[j]) * scale;
}

// Calls `f(expert, i, before, mask)` in every warp for each of its experts and each 32 choices of a chunk, in order: `mask` says which lanes'
// choice `i` is that expert, `before` how many of the chunk were before these 32.
template <typename F>
__device__ __forceinline__ void for_each_choice(const int* chosen, unsigned rows, unsigned experts, int (&chunk)[CHUNK], F f) {
    const unsigned first = blockIdx.x * CHUNK, lane = threadIdx.x % WARP;
    for (unsigned i = threadIdx.x; i < CHUNK; i += THREADS) chunk[i] = first + i < rows ? chosen[first + i] : -1;
    __syncthreads();
    for (unsigned expert = threadIdx.x / WARP; expert < experts; expert += WARPS) {
        unsigned before = 0;
        for (unsigned i = 0; i < CHUNK; i += WARP) {
            const unsigned mask = __ballot_sync(ALL_LANES, chunk[i + lane] == (int)expert);
            f(expert, first + i + lane, before, mask);
            before += __popc(mask);
        }
        f(expert, ~0u, before, 0);
    }
}

// counts[chunk, expert]: the choices of each expert in each chunk of CHUNK; one block a chunk.
extern "C" __global__ void __launch_bounds__(THREADS) segment_counts(
    const int* chosen, unsigned* counts, unsigned rows, unsigned experts) {
    __shared__ int chunk[CHUNK];
    unsigned* const own = counts + (size_t)blockIdx.x * experts;
    for_each_choice(chosen, rows, experts, chunk, [=](unsigned expert, unsigned i, unsigned before, unsigned) {
        if (i == ~0u && threadIdx.x % WARP == 0) own[expert] = before;
    });
}

// counts[chunk, expert] becomes the row of the first such choice, and bounds the experts' segments. One block.
extern "C" __global__ void __launch_bounds__(EXPERTS_MAX) segment_starts(
    unsigned* counts, int* bounds, unsigned chunks, unsigned experts) {
    __shared__ unsigned totals[EXPERTS_MAX];
    const unsigned expert = threadIdx.x;
    unsigned total = 0;
    if (expert < experts) {
        for (unsigned c = 0; c < chunks; c++) total += counts[(size_t)c * experts + expert];
    }
    totals[expert] = total;
    __syncthreads();
    if (expert >= experts) return;
    unsigned start = 0;
    for (unsigned e = 0; e < expert; e++) start += totals[e];
    bounds[expert] = start;
    if (expert == experts - 1) bounds[experts] = start + total;
    for (unsigned c = 0; c < chunks; c++) {
        unsigned* const count = &counts[(size_t)c * experts + expert];
        const unsigned own = *count;
        *count = start;
        start += own;
    }
}

// The row of each choice, and the choice of each row; one block a chunk, as segment_counts.
extern "C" __global__ void __launch_bounds__(THREADS) segment_rows(
    const int* chosen, const unsigned* starts, int* slots, int* entries, unsigned rows, unsigned experts) {
    __shared__ int chunk[CHUNK];
    const unsigned* const own = starts + (size_t)blockIdx.x * experts;
    const unsigned lower = (1u << threadIdx.x % WARP) - 1;
    for_each_choice(chosen, rows, experts, chunk, [=](unsigned expert, unsigned i, unsigned before, unsigned mask) {
        if (!(mask >> threadIdx.x % WARP & 1)) return;
        const unsigned row = own[expert] + before + __popc(mask & lower);
        slots[i] = row, entries[row] = i;
    });
}

// out[slots[t,j]] = x[t]: a token's rows, to the bit. Block (t, y) has a part of the columns, which it reads once.
// Writes k rows for each that it reads: 16384 x 4 x 2880 in bf16 are 472 MB, 0.11 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void dispatch(const T* x, const int* slots, T* out, unsigned cols, unsigned top_k) {
    const unsigned token = blockIdx.x, col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (col >= cols) return;
    const Vec<T, N> held = Vec<T, N>::load(x + (size_t)token * cols + col);
    for (unsigned j = 0; j < top_k; j++) held.store(out + (size_t)slots[(size_t)token * top_k + j] * cols + col);
}

// out[t] = base[t] + the sum of weights[t,j] x[slots[t,j]] in the order of j. Block (t, y) has a part of the columns.
// Reads k + 1 rows and writes one: 16384 x 4 x 2880 in bf16 are 566 MB, 0.13 ms at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void combine(
    const T* x, const int* slots, const float* weights, const T* base, T* out, unsigned cols, unsigned top_k) {
    const unsigned token = blockIdx.x, col = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    if (col >= cols) return;
    float sums[N] = {};
    for (unsigned j = 0; j < top_k; j++) {
        const size_t entry = (size_t)token * top_k + j;
        const float weight = weights == nullptr ? 1.0f : weights[entry];
        float values[N];
        Vec<T, N>::load(x + (size_t)slots[entry] * cols + col).widen(values);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] = fmaf(weight, values[i], sums[i]);
    }
    const size_t at = (size_t)token * cols + col;
    if (base != nullptr) {
        float values[N];
        Vec<T, N>::load(base + at).widen(values);
#pragma unroll
        for (int i = 0; i < N; i++) sums[i] += values[i];
    }
    Vec<T, N>::narrow(sums).store(out + at);
}

// The gradient of a token's logits; one warp a token.
template <typename T>
__device__ __forceinline__ void router_backward(
    const float* logits, const int* chosen, const float* weights, const int* slots, const float* dweights, T* dlogits, unsigned tokens,
    unsigned experts, unsigned top_k, bool all) {
    const unsigned lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (token >= tokens) return;
    const size_t first = (size_t)token * top_k;
    logits += (size_t)token * experts, dlogits += (size_t)token * experts, chosen += first, weights += first, slots += first;
    float mean = 0.0f;
    for (unsigned j = 0; j < top_k; j++) mean = fmaf(weights[j], dweights[slots[j]], mean);
    const float largest = logits[chosen[0]], sum = all ? exp_sum(logits, experts, largest) : 1.0f;
    for (unsigned i = lane; i < experts; i += WARP) {
        dlogits[i] = narrow<T>(all ? -(__fdiv_rn(exp_exact(logits[i] - largest), sum) * mean) : 0.0f);
    }
    __syncwarp();
    for (unsigned j = lane; j < top_k; j += WARP) dlogits[chosen[j]] = narrow<T>(weights[j] * (dweights[slots[j]] - mean));
}

// The gradient of a token's logits by SigmoidRule; one warp a token.
template <typename T>
__device__ __forceinline__ void scores_backward(
    const float* logits, const int* chosen, const float* weights, const int* slots, const float* dweights, T* dlogits, unsigned tokens,
    unsigned experts, unsigned top_k, bool renormalised, float scale) {
    const unsigned lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (token >= tokens) return;
    const size_t first = (size_t)token * top_k;
    logits += (size_t)token * experts, dlogits += (size_t)token * experts, chosen += first, weights += first, slots += first;
    float mean = 0.0f, sum = 0.0f;
    for (unsigned j = 0; j < top_k; j++) {
        mean = fmaf(weights[j], dweights[slots[j]], mean);
        sum += score_of(logits[chosen[j]]);
    }
    sum += 1e-20f;
    if (!renormalised) mean = 0.0f, sum = 1.0f;
    for (unsigned i = lane; i < experts; i += WARP) dlogits[i] = narrow<T>(0.0f);
    __syncwarp();
    for (unsigned j = lane; j < top_k; j += WARP) {
        const float score = score_of(logits[chosen[j]]);
        const float dscore = __fdiv_rn(fmaf(scale, dweights[slots[j]], -mean), sum);
        dlogits[chosen[j]] = narrow<T>(dscore * (score * (1.0f - score)));
    }
}

// Adds the gradient of the loss that balances experts; one warp a token. Every block counts the choices of all layers for itself: 48 layers of
// 128 experts are 25 kB, from the cache.
template <typename T>
__device__ __forceinline__ void router_balance(
    const float* logits, const int* chosen, const int* bounds, T* dlogits, unsigned tokens, unsigned experts, unsigned top_k, unsigned layers,
    unsigned stride, float factor) {
    __shared__ float counts[EXPERTS_MAX];
    for (unsigned expert = threadIdx.x; expert < experts; expert += THREADS) {
        int count = 0;
        for (unsigned layer = 0; layer < layers; layer++) {
            const int* const own = bounds + (size_t)layer * stride + expert;
            count += own[1] - own[0];
        }
        counts[expert] = (float)count;
    }
    __syncthreads();
    const unsigned lane = threadIdx.x % WARP, token = blockIdx.x * WARPS + threadIdx.x / WARP;
    if (token >= tokens) return;
    logits += (size_t)token * experts, dlogits += (size_t)token * experts;
    const float largest = logits[chosen[(size_t)token * top_k]], sum = exp_sum(logits, experts, largest);
    float mean = 0.0f;
    for (unsigned i = lane; i < experts; i += WARP) mean = fmaf(counts[i], __fdiv_rn(exp_exact(logits[i] - largest), sum), mean);
    mean = warp_sum(mean);
    for (unsigned i = lane; i < experts; i += WARP) {
        const float slope = __fdiv_rn(exp_exact(logits[i] - largest), sum) * (counts[i] - mean);
        dlogits[i] = narrow<T>(fmaf(factor, slope, widen(dlogits[i])));
    }
}

#define ROUTE_OF(NAME, T, N)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(THREADS) dispatch##NAME(                                                     \
        const T* x, const int* slots, T* out, unsigned cols, unsigned top_k) {                                                \
        dispatch<T, N>(x, slots, out, cols, top_k);                                                                           \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) combine##NAME(const T* x, const int* slots, const float* weights,   \
        const T* base, T* out, unsigned cols, unsigned top_k) {                                                               \
        combine<T, N>(x, slots, weights, base, out, cols, top_k);                                                             \
    }
#define ROUTE(NAME, T)                                                                                                        \
    ROUTE_OF(_##NAME, T, WIDE<T>) ROUTE_OF(_any_##NAME, T, 1)                                                                 \
    extern "C" __global__ void __launch_bounds__(THREADS) router_backward_##NAME(const float* logits, const int* chosen,      \
        const float* weights, const int* slots, const float* dweights, T* dlogits, unsigned tokens, unsigned experts,         \
        unsigned top_k, unsigned all) {                                                                                       \
        router_backward(logits, chosen, weights, slots, dweights, dlogits, tokens, experts, top_k, all != 0);                 \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) route_scores_##NAME(const float* logits, const T* correction,       \
        int* chosen, float* weights, unsigned tokens, unsigned experts, unsigned top_k, unsigned groups, unsigned top_groups, \
        unsigned renormalised, float scale) {                                                                                 \
        route_scores(                                                                                                         \
            logits, correction, chosen, weights, tokens, experts, top_k, groups, top_groups, renormalised != 0, scale);       \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) scores_backward_##NAME(const float* logits, const int* chosen,      \
        const float* weights, const int* slots, const float* dweights, T* dlogits, unsigned tokens, unsigned experts,         \
        unsigned top_k, unsigned renormalised, float scale) {                                                                 \
        scores_backward(                                                                                                      \
            logits, chosen, weights, slots, dweights, dlogits, tokens, experts, top_k, renormalised != 0, scale);             \
    }                                                                                                                         \
    extern "C" __global__ void __launch_bounds__(THREADS) router_balance_##NAME(const float* logits, const int* chosen,       \
        const int* bounds, T* dlogits, unsigned tokens, unsigned experts, unsigned top_k, unsigned layers, unsigned stride,   \
        float factor) {                                                                                                       \
        router_balance(logits, chosen, bounds, dlogits, tokens, experts, top_k, layers, stride, factor);                      \
    }
FOR_EACH_FORMAT(ROUTE)
