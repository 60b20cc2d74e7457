// Distillation: rows of logits beside the tokens of a teacher; see src/device/cpu/kernels/teacher.rs and src/teacher_loss.rs.
//
// The statistics read a tile once, as those of the cross-entropy do: 16384 x 151936 in bf16 is 5.0 GB, 1.2 ms at 4.3 TB/s. The losses and
// the gradients read some numbers of each token of a teacher: 16384 x 64 are 12 MB.
#include "softmax.cuh"

constexpr unsigned TOP_K_MAX = 64;
// Tokens of a teacher that a lane takes.
constexpr int EACH = TOP_K_MAX / WARP;

// The column of a teacher's token, or a column that no tile has. The word is the token plus 1, and 0 without a token.
__device__ __forceinline__ unsigned teacher_column(int word, unsigned vocab_start) {
    return word == 0 ? ~0u : unsigned(word) - 1 - vocab_start;
}

// Takes logits as `cap` does, but keeps minus infinity, which a soft cap would bend.
template <typename Cap>
struct Outside {
    Cap cap;
    __device__ __forceinline__ Capped operator()(float x) const {
        if (x == -INFINITY) return {x, 0.0f};
        return cap(x);
    }
};

// One block takes one row.
template <typename T, typename Cap>
__device__ __forceinline__ void teacher_stats(
    T* logits, const int* targets, const int* teacher, float* stats, float* entries, unsigned top_k, unsigned vocab_start, unsigned cols,
    unsigned first, Cap cap) {
    logits += (size_t)blockIdx.x * cols;
    stats += (size_t)blockIdx.x * 3;
    teacher += (size_t)blockIdx.x * top_k * 2;
    entries += (size_t)blockIdx.x * (top_k + 1);
    const int word = targets[blockIdx.x];
    if (word < 0) {
        if (threadIdx.x < 3) stats[threadIdx.x] = threadIdx.x == 1 ? 1.0f : 0.0f;
        return;
    }
    const unsigned target = target_column(word, vocab_start);
    const float target_logit = target < cols ? cap(widen(logits[target])).value : first ? 0.0f : stats[2];
    const unsigned column = threadIdx.x < top_k ? teacher_column(teacher[threadIdx.x * 2], vocab_start) : ~0u;
    if (column < cols) entries[threadIdx.x] = cap(widen(logits[column])).value;
    __syncthreads();
    if (column < cols) logits[column] = narrow<T>(-INFINITY);
    __syncthreads();
    const Softmax part = softmax_of_thread(logits, Row<T>(logits, cols), Outside<Cap>{cap});
    const float old_max = first ? -INFINITY : stats[0];
    const float old_sum = first ? 0.0f : stats[1];
    const float max = larger(reduce_block<THREADS>(part.max, larger), old_max);
    // As long as all are minus infinity their exponentials are as good as 0, not those of NaN.
    const float base = max == -INFINITY ? 0.0f : max;
    const float sum = reduce_block<THREADS>(part.sum * exp_exact(part.max - base), [](float a, float b) { return a + b; });
    if (threadIdx.x > 0) return;
    stats[0] = max;
    stats[1] = fmaf(old_sum, exp_exact(old_max - base), sum);
    stats[2] = target_logit;
}

// The sum of `x` over a warp, on all lanes, in a fixed order.
__device__ __forceinline__ double warp_sum(double x) {
    for (unsigned lane = WARP / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(ALL_LANES, x, lane);
    return x;
}

__device__ __forceinline__ double warp_max(double x) {
    for (unsigned lane = WARP / 2; lane > 0; lane /= 2) x = fmax(x, __shfl_xor_sync(ALL_LANES, x, lane));
    return x;
}

// A teacher's token: its probability, its logit, and whether it is the data's token. A place without a token has no part in any sum.
struct TeacherEntry {
    double probability = 0.0, logit = -INFINITY;
    bool is_there = false, is_target = false;
};

// The slope of the soft cap at a logit behind it; a cap of 0 is none.
__device__ __forceinline__ double cap_slope(double logit, double cap) {
    const double bent = cap == 0.0 ? 0.0 : logit / cap;
    return 1.0 - bent * bent;
}

__device__ __forceinline__ double x_log_x(double x) { return x == 0.0 ? 0.0 : x * log(x); }

// One block. Warps take rows in turn, and the totals of the warps are added in their order.
extern "C" __global__ void __launch_bounds__(THREADS)
    teacher_losses(
        const int* teacher, const int* targets, const float* stats, float* entries, float* scales, int* totals, float* report,
        unsigned rows, unsigned top_k, double kd_ratio, float cap, double step_weight, float scale, unsigned accumulate) {
    constexpr unsigned WARPS = THREADS / WARP;
    __shared__ double shared[WARPS][REPORT_WORDS];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const double other = 1.0 - kd_ratio;
    double total[REPORT_WORDS] = {};
    for (unsigned row = warp; row < rows; row += WARPS) {
        const int word = targets[row];
        if (word < 0) {
            if (lane == 0) scales[row] = 0.0f;
            continue;
        }
        const int token = int(target_column(word, 0));
        const int* words = teacher + (size_t)row * top_k * 2;
        float* places = entries + (size_t)row * (top_k + 1);
        const double outside_max = (double)stats[(size_t)row * 3], outside_sum = (double)stats[(size_t)row * 3 + 1];
        const double target = (double)stats[(size_t)row * 3 + 2];
        TeacherEntry entry[EACH];
        double max = -INFINITY, known = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const unsigned place = i * WARP + lane;
            if (place >= top_k || words[place * 2] == 0) continue;
            entry[i] = {(double)__int_as_float(words[place * 2 + 1]), (double)places[place], true, words[place * 2] - 1 == token};
            max = fmax(max, entry[i].logit);
            known += entry[i].probability;
        }
        max = fmax(warp_max(max), outside_max);
        known = warp_sum(known);
        const bool is_whole = outside_sum == 0.0;
        const double outside = is_whole ? 0.0 : outside_sum * exp(outside_max - max);
        double exponentials[EACH], inside = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            exponentials[i] = entry[i].is_there ? exp(entry[i].logit - max) : 0.0;
            inside += exponentials[i];
        }
        inside = warp_sum(inside);
        const double sum = inside + outside, log_sum = max + log(sum);
        const double tail = is_whole ? 0.0 : fmax(1.0 - known, 0.0);
        double distillation = 0.0, entropy = 0.0;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (!(entry[i].probability > 0.0)) continue;
            distillation += entry[i].probability * (log_sum - entry[i].logit);
            entropy -= x_log_x(entry[i].probability);
        }
        distillation = warp_sum(distillation) + (tail > 0.0 ? tail * (log_sum - outside_max - log(outside_sum)) : 0.0);
        entropy = warp_sum(entropy) - x_log_x(tail);
        const double weight = (double)target_weight(word), factor = weight / step_weight * (double)scale;
        const double of_outside = kd_ratio * (known * (outside / sum) - tail * (inside / sum)) + other * (outside / sum);
        bool is_inside = false;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            if (!entry[i].is_there) continue;
            const double q = exponentials[i] / sum;
            const double own = q * (known + tail) - entry[i].probability, of_data = q - (entry[i].is_target ? 1.0 : 0.0);
            const double slope = cap_slope(entry[i].logit, (double)cap);
            places[i * WARP + lane] = (float)((kd_ratio * own + other * of_data) * slope * factor);
            if (entry[i].is_target) places[top_k] = places[i * WARP + lane];
            is_inside = is_inside || entry[i].is_target;
        }
        is_inside = __any_sync(ALL_LANES, is_inside);
        if (lane == 0) {
            scales[row] = (float)(of_outside * factor);
            const double own = exp(target - outside_max) / outside_sum * of_outside - other;
            if (!is_inside) places[top_k] = (float)(own * cap_slope(target, (double)cap) * factor);
        }
        total[0] += weight * (kd_ratio * distillation + other * (log_sum - target));
        total[1] += weight * (distillation - entropy);
        total[2] += weight * (log_sum - target);
        total[5] += weight;
    }
    if (lane == 0) {
#pragma unroll
        for (unsigned i = 0; i < REPORT_WORDS; i++) shared[warp][i] = total[i];
    }
    __syncthreads();
    if (threadIdx.x >= REPORT_WORDS) return;
    double all = 0.0;
    for (unsigned i = 0; i < WARPS; i++) all += shared[i][threadIdx.x];
    all += accumulate ? read_double(totals + threadIdx.x * 2) : 0.0;
    write_double(totals + threadIdx.x * 2, all);
    report[threadIdx.x] = (float)(all / step_weight);
}

// Threads take the places of all rows, which begin `pitch` elements apart. The place behind a teacher's tokens is that of the target, which has the gradient of the same token.
template <typename T>
__device__ __forceinline__ void teacher_grad(
    T* logits, const int* targets, const int* teacher, const float* entries, unsigned rows, unsigned top_k, unsigned vocab_start,
    unsigned cols, unsigned pitch) {
    const unsigned places = top_k + 1;
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const size_t row = at / places;
    const unsigned place = unsigned(at % places);
    if (row >= rows) return;
    const int word = targets[row];
    if (word < 0) return;
    const bool is_teacher = place < top_k;
    const unsigned column = is_teacher ? teacher_column(teacher[(row * top_k + place) * 2], vocab_start) : target_column(word, vocab_start);
    if (column < cols) logits[row * pitch + column] = narrow<T>(entries[at]);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define KERNELS(dtype, T)                                                                                            \
    KERNEL teacher_stats_##dtype(                                                                                    \
        T* logits, const int* targets, const int* teacher, float* stats, float* entries, unsigned top_k,             \
        unsigned vocab_start, unsigned cols, unsigned first) {                                                       \
        teacher_stats(logits, targets, teacher, stats, entries, top_k, vocab_start, cols, first, AsItIs{});          \
    }                                                                                                                \
    KERNEL teacher_stats_capped_##dtype(                                                                             \
        T* logits, const int* targets, const int* teacher, float* stats, float* entries, unsigned top_k,             \
        unsigned vocab_start, unsigned cols, unsigned first, float cap) {                                            \
        teacher_stats(logits, targets, teacher, stats, entries, top_k, vocab_start, cols, first, SoftCap{cap});      \
    }                                                                                                                \
    KERNEL teacher_grad_##dtype(                                                                                     \
        T* logits, const int* targets, const int* teacher, const float* entries, unsigned rows, unsigned top_k,      \
        unsigned vocab_start, unsigned cols, unsigned pitch) {                                                       \
        teacher_grad(logits, targets, teacher, entries, rows, top_k, vocab_start, cols, pitch);                      \
    }

FOR_EACH_FORMAT(KERNELS)
