// Cross-entropy over the vocabulary, one tile of logits at a time; see src/device/cpu/kernels/cross_entropy.rs.
//
// The statistics read a tile once: 16384 x 151936 in bf16 is 5.0 GB, 1.2 ms at 4.3 TB/s; the gradient reads and writes it,
// 2.3 ms. An exponential is some twenty instructions: the statistics are about as much work for the SMs as for the memory. Logits in fp32
// are twice as many bytes; their gradient in 16 bits reads 10.0 GB and writes 5.0 GB, 3.5 ms.
#include "softmax.cuh"

constexpr unsigned LOSS_THREADS = 1024;

// One block takes one row.
template <typename T, typename Cap>
__device__ __forceinline__ void cross_entropy_stats(
    const T* logits, const int* targets, float* stats, unsigned vocab_start, unsigned cols, unsigned first, Cap cap) {
    logits += (size_t)blockIdx.x * cols;
    stats += (size_t)blockIdx.x * 3;
    const Softmax part = softmax_of_thread(logits, Row<T>(logits, cols), cap);
    const float old_max = first ? -INFINITY : stats[0];
    const float max = larger(reduce_block<THREADS>(part.max, larger), old_max);
    const float sum = reduce_block<THREADS>(part.sum * exp_exact(part.max - max), [](float a, float b) { return a + b; });
    if (threadIdx.x > 0) return;
    const int word = targets[blockIdx.x];
    const unsigned target = target_column(word, vocab_start);
    const float old_sum = first ? 0.0f : stats[1];
    const float old_target = first ? 0.0f : stats[2];
    // A negative word is no target: 0 + ln 1 - 0, no loss, whatever the logits are.
    const bool counts = word >= 0;
    stats[0] = counts ? max : 0.0f;
    stats[1] = counts ? fmaf(old_sum, exp_exact(old_max - max), sum) : 1.0f;
    stats[2] = !counts ? 0.0f : target < cols ? cap(widen(logits[target])).value : old_target;
}

// What turns one row's logits into gradients.
struct Gradient {
    float max, sum, inv_sum, scale;
    unsigned target;

    // `x` holds the logits from column `start` on.
    template <int N, typename Cap>
    __device__ __forceinline__ void apply(float (&x)[N], unsigned start, Cap cap) const {
        const unsigned hit = target - start;
        Capped at_target = {0.0f, 0.0f};
#pragma unroll
        for (int i = 0; i < N; i++) {
            const Capped logit = cap(x[i]);
            if (hit == i) at_target = logit;
            x[i] = exp_exact(logit.value - max) * inv_sum * logit.slope * scale;
        }
        if (hit >= N) return;
        const float gradient = (exp_exact(at_target.value - max) / sum - 1.0f) * at_target.slope * scale;
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = hit == i ? gradient : x[i];
    }
};

// The factor on the gradient of a row: its target's weight times a scale, or a scale of its own.
struct WeightScale {
    float scale;
    __device__ __forceinline__ float operator()(int word) const { return target_weight(word) * scale; }
};

struct RowScale {
    const float* scales;
    __device__ __forceinline__ float operator()(int) const { return scales[blockIdx.x]; }
};

// The blocks of one `blockIdx.x` take one row.
template <typename T, typename Scale, typename Cap>
__device__ __forceinline__ void cross_entropy_grad(
    T* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, Scale scale, Cap cap) {
    constexpr int N = WIDE<T>;
    logits += (size_t)blockIdx.x * cols;
    stats += (size_t)blockIdx.x * 3;
    const Row<T> row(logits, cols);
    const int word = targets[blockIdx.x];
    const Gradient gradient = {stats[0], stats[1], 1.0f / stats[1], scale(word), target_column(word, vocab_start)};
    // Without a target every gradient is 0, whatever the logits are.
    const bool counts = word >= 0;
    const unsigned thread = blockIdx.y * THREADS + threadIdx.x;
    for (unsigned v = thread; v < row.vectors; v += gridDim.y * THREADS) {
        T* at = logits + row.column(v);
        float x[N];
        Vec<T>::load(at).widen(x);
        gradient.apply(x, row.column(v), cap);
        (counts ? Vec<T>::narrow(x) : Vec<T>{}).store(at);
    }
    if (thread < row.singles()) {
        const unsigned column = row.single(thread);
        float x[1] = {widen(logits[column])};
        gradient.apply(x, column, cap);
        logits[column] = narrow<T>(counts ? x[0] : 0.0f);
    }
}

// The block of a row turns its fp32 logits into gradients of the narrower format T. The gradients begin where the logits do, so they overwrite
// logits of columns that other threads take. The vectors of all threads are read before any of them is written, and gradients of the first
// columns lie on no logit behind those columns.
template <typename T, typename Scale, typename Cap>
__device__ __forceinline__ void cross_entropy_grad_narrowed(
    float* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, Scale scale, Cap cap) {
    constexpr int N = WIDE<float>;
    static_assert(2 * sizeof(T) == sizeof(float), "a gradient is half of a logit");
    logits += (size_t)blockIdx.x * cols;
    stats += (size_t)blockIdx.x * 3;
    T* gradients = reinterpret_cast<T*>(logits);
    const Row<float> row(logits, cols);
    const int word = targets[blockIdx.x];
    const Gradient gradient = {stats[0], stats[1], 1.0f / stats[1], scale(word), target_column(word, vocab_start)};
    // Without a target every gradient is 0, whatever the logits are.
    const bool counts = word >= 0;
    // Only a row that begins with a whole vector has gradients at multiples of 8 bytes.
    const bool has_vectors = row.head == 0;
    const bool has_single = threadIdx.x < row.singles();
    const unsigned column = has_single ? row.single(threadIdx.x) : 0;
    float single[1] = {has_single ? logits[column] : 0.0f};
    for (unsigned start = 0; start < row.vectors; start += BATCH * THREADS) {
        Vec<float> batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const unsigned v = start + i * THREADS + threadIdx.x;
            if (v < row.vectors) batch[i] = Vec<float>::load(logits + row.column(v));
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const unsigned v = start + i * THREADS + threadIdx.x;
            if (v >= row.vectors) continue;
            float x[N];
            batch[i].widen(x);
            gradient.apply(x, row.column(v), cap);
            if (has_vectors) {
                (counts ? Vec<T, N>::narrow(x) : Vec<T, N>{}).store(gradients + row.column(v));
            } else {
#pragma unroll
                for (int lane = 0; lane < N; lane++) gradients[row.column(v) + lane] = narrow<T>(counts ? x[lane] : 0.0f);
            }
        }
    }
    __syncthreads();
    if (!has_single) return;
    gradient.apply(single, column, cap);
    gradients[column] = narrow<T>(counts ? single[0] : 0.0f);
}

// One block: rows are few, and their order is part of the result.
extern "C" __global__ void __launch_bounds__(LOSS_THREADS)
    cross_entropy_loss(
        const int* targets, const float* stats, float* loss, unsigned rows, float scale, unsigned accumulate) {
    double total = 0.0;
#pragma unroll 4
    for (unsigned row = threadIdx.x; row < rows; row += LOSS_THREADS) {
        const float* at = stats + (size_t)row * 3;
        total += (double)target_weight(targets[row]) * ((double)at[0] + log((double)at[1]) - (double)at[2]);
    }
    total = reduce_block<LOSS_THREADS>(total, [](double a, double b) { return a + b; });
    if (threadIdx.x > 0) return;
    const double old = accumulate ? (double)loss[0] : 0.0;
    loss[0] = (float)(old + (double)scale * total);
}

// Losses of pairs; see src/pair_loss.rs, which numbers them.
enum PairLossKind : unsigned { DPO, HINGE, IPO, ROBUST, APO_ZERO, APO_DOWN, SIGMOID_NORM, SIMPO, CPO, ORPO };

__device__ __forceinline__ double sigmoid(double x) {
    const double small = exp(-fabs(x));
    return (x >= 0.0 ? 1.0 : small) / (1.0 + small);
}

__device__ __forceinline__ double sigmoid_slope(double x) {
    const double y = sigmoid(x);
    return y * (1.0 - y);
}

// -ln(sigmoid(x))
__device__ __forceinline__ double log_loss(double x) { return fmax(-x, 0.0) + log1p(exp(-fabs(x))); }

// The log-probabilities of an answer: their sum, their number, the sum of the reference, and sum and number of the prompt's.
struct Answer {
    double sum, tokens, reference, prompt, prompt_tokens;
};

// The loss of a pair, its derivatives by the sums of both answers and of the chosen answer's prompt, and the rewards of both answers.
struct PairTerms {
    double loss, slopes[2], prompt_slope, rewards[2];

    __device__ __forceinline__ void by_sums(double slope) {
        slopes[0] = slope;
        slopes[1] = -slope;
    }
    __device__ __forceinline__ void by_means(double slope, double c_tokens, double r_tokens) {
        slopes[0] = slope / c_tokens;
        slopes[1] = -slope / r_tokens;
    }
    // Adds the mean cross-entropy of the chosen answer.
    __device__ __forceinline__ void add_cross_entropy(double alpha, const Answer& chosen) {
        const double slope = -alpha / fmax(chosen.tokens + chosen.prompt_tokens, 1.0);
        loss += slope * (chosen.sum + chosen.prompt);
        slopes[0] += slope;
        prompt_slope = slope;
    }
};

// `own` is the probability of a wrong label, or the factor on the cross-entropy.
__device__ __forceinline__ PairTerms pair_terms(
    unsigned kind, double beta, double own, double margin, const Answer& chosen, const Answer& rejected) {
    const double c = chosen.sum - chosen.reference, r = rejected.sum - rejected.reference;
    const double c_tokens = fmax(chosen.tokens, 1.0), r_tokens = fmax(rejected.tokens, 1.0);
    const double difference = beta * (c - r), mean_difference = c / c_tokens - r / r_tokens;
    PairTerms terms = {0.0, {0.0, 0.0}, 0.0, {beta * c, beta * r}};
    if (kind == DPO || kind == CPO) {
        terms.loss = log_loss(difference);
        terms.by_sums(-beta * sigmoid(-difference));
    } else if (kind == HINGE) {
        terms.loss = fmax(1.0 - difference, 0.0);
        terms.by_sums(difference < 1.0 ? -beta : 0.0);
    } else if (kind == IPO) {
        const double distance = mean_difference - 1.0 / (2.0 * beta);
        terms.loss = distance * distance;
        terms.by_means(2.0 * distance, c_tokens, r_tokens);
    } else if (kind == ROBUST) {
        const double wrong = own, right = 1.0 - wrong, scale = 1.0 - 2.0 * wrong;
        terms.loss = (right * log_loss(difference) - wrong * log_loss(-difference)) / scale;
        terms.by_sums(-beta * (right * sigmoid(-difference) + wrong * sigmoid(difference)) / scale);
    } else if (kind == APO_ZERO) {
        terms.loss = 1.0 - sigmoid(beta * c) + sigmoid(beta * r);
        terms.slopes[0] = -beta * sigmoid_slope(beta * c);
        terms.slopes[1] = beta * sigmoid_slope(beta * r);
    } else if (kind == APO_DOWN) {
        const double both = beta * sigmoid_slope(difference);
        terms.loss = sigmoid(beta * c) + 1.0 - sigmoid(difference);
        terms.slopes[0] = beta * sigmoid_slope(beta * c) - both;
        terms.slopes[1] = both;
    } else if (kind == ORPO) {
        const double c_rest = -expm1(c / c_tokens), r_rest = -expm1(r / r_tokens);
        const double odds = mean_difference - (log(c_rest) - log(r_rest));
        terms.loss = beta * log_loss(odds);
        terms.by_means(-beta * sigmoid(-odds), c_tokens, r_tokens);
        terms.slopes[0] /= c_rest;
        terms.slopes[1] /= r_rest;
    } else {
        const double x = beta * mean_difference - (kind == SIMPO ? margin : 0.0);
        terms.loss = log_loss(x);
        terms.by_means(-beta * sigmoid(-x), c_tokens, r_tokens);
    }
    if (kind == SIMPO || kind == ORPO) {
        terms.rewards[0] /= c_tokens;
        terms.rewards[1] /= r_tokens;
    }
    if (kind >= SIMPO && own > 0.0) terms.add_cross_entropy(own, chosen);
    return terms;
}

// Whether a target that counts is a token of a prompt, which has less than the whole weight.
__device__ __forceinline__ bool is_of_prompt(int word) { return word >= 1 << ID_BITS; }

// The sum of an answer's rows, on all lanes of a warp. Each lane adds every 32nd row, and the lanes are added in a fixed order.
__device__ __forceinline__ Answer answer_sum(const int* targets, const float* stats, int first, int end, double reference) {
    Answer answer = {0.0, 0.0, reference, 0.0, 0.0};
    for (int row = first + int(threadIdx.x % WARP); row < end; row += WARP) {
        if (targets[row] < 0) continue;
        const float* at = stats + (size_t)row * 3;
        const double logp = (double)at[2] - (double)at[0] - log((double)at[1]);
        if (is_of_prompt(targets[row])) {
            answer.prompt += logp;
            answer.prompt_tokens += 1.0;
        } else {
            answer.sum += logp;
            answer.tokens += 1.0;
        }
    }
    for (unsigned lane = WARP / 2; lane > 0; lane /= 2) {
        answer.sum += __shfl_xor_sync(ALL_LANES, answer.sum, lane);
        answer.tokens += __shfl_xor_sync(ALL_LANES, answer.tokens, lane);
        answer.prompt += __shfl_xor_sync(ALL_LANES, answer.prompt, lane);
        answer.prompt_tokens += __shfl_xor_sync(ALL_LANES, answer.prompt_tokens, lane);
    }
    return answer;
}

// One block. Warps take pairs in turn, and the totals of the warps are added in their order.
extern "C" __global__ void __launch_bounds__(THREADS)
    pair_losses(
        const int* pairs, const int* targets, const float* stats, float* scales, int* sums, int* totals, float* report,
        unsigned places, unsigned kind, double beta, double own, double margin, double step_pairs, float scale, unsigned accumulate) {
    constexpr unsigned WARPS = THREADS / WARP;
    __shared__ double shared[WARPS][REPORT_WORDS];
    const unsigned warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    double total[REPORT_WORDS] = {};
    for (unsigned pair = warp; pair < places; pair += WARPS) {
        const int* words = pairs + (size_t)pair * 8;
        const int first = words[0], middle = words[1], end = words[2];
        if (end <= first) {
            if (lane < 4) sums[(size_t)pair * 4 + lane] = 0;
            continue;
        }
        const Answer chosen = answer_sum(targets, stats, first, middle, read_double(words + 4));
        const Answer rejected = answer_sum(targets, stats, middle, end, read_double(words + 6));
        const PairTerms terms = pair_terms(kind, beta, own, margin, chosen, rejected);
        for (int row = first + int(lane); row < end; row += WARP) {
            const double of_answer = row < middle ? terms.slopes[0] : terms.slopes[1];
            const double slope = is_of_prompt(targets[row]) ? terms.prompt_slope : of_answer;
            scales[row] = (float)(-slope / step_pairs * (double)scale);
        }
        if (lane < 2) write_double(sums + (size_t)pair * 4 + lane * 2, lane == 0 ? chosen.sum : rejected.sum);
        total[0] += terms.loss;
        total[1] += terms.rewards[0];
        total[2] += terms.rewards[1];
        total[3] += terms.rewards[0] > terms.rewards[1] ? 1.0 : 0.0;
        total[4] += chosen.sum;
        total[5] += rejected.sum;
    }
    if (lane == 0) {
#pragma unroll
        for (unsigned word = 0; word < REPORT_WORDS; word++) shared[warp][word] = total[word];
    }
    __syncthreads();
    if (threadIdx.x >= REPORT_WORDS) return;
    double all = 0.0;
    for (unsigned other = 0; other < WARPS; other++) all += shared[other][threadIdx.x];
    all += accumulate ? read_double(totals + threadIdx.x * 2) : 0.0;
    write_double(totals + threadIdx.x * 2, all);
    report[threadIdx.x] = (float)(all / step_pairs);
}

// Losses of sampled completions; see src/policy_loss.rs, which numbers them.
enum PolicyLossKind : unsigned { DAPO, GRPO, DR_GRPO };

// The words of a token: its advantage, its log-probability when it was sampled and that of the reference, and the tokens of its completion.
struct PolicyToken {
    int advantage, old, reference, tokens;
};

// The numbers that are reported of a token, and the derivative of its loss by its log-probability.
struct PolicyTerms {
    double report[REPORT_WORDS], slope;
};

__device__ __forceinline__ PolicyTerms policy_terms(
    unsigned kind, double least, double most, double beta, double most_tokens, double logp, const PolicyToken& token) {
    const double advantage = (double)__int_as_float(token.advantage), old = (double)__int_as_float(token.old);
    const double ratio = isnan(old) ? 1.0 : exp(logp - old);
    const double gain = ratio * advantage, clipped_gain = fmin(fmax(ratio, least), most) * advantage;
    const double difference = beta == 0.0 ? 0.0 : (double)__int_as_float(token.reference) - logp;
    const double x = beta == 0.0 ? 1.0 : exp(difference);
    const double kl = (x - difference - 1.0) * ratio;
    const double live = gain <= clipped_gain ? gain : 0.0;
    const double weight = kind == DAPO ? 1.0 : 1.0 / (kind == GRPO ? fmax((double)token.tokens, 1.0) : most_tokens);
    const double low = ratio < least && advantage < 0.0 ? 1.0 : 0.0, high = ratio > most && advantage > 0.0 ? 1.0 : 0.0;
    const double loss = weight * (beta * kl - fmin(gain, clipped_gain));
    return {{loss, ratio, low, high, kl, 1.0}, weight * (beta * ((1.0 - x) * ratio + kl) - live)};
}

// One block: rows are few, and their order is part of the result.
extern "C" __global__ void __launch_bounds__(THREADS)
    policy_losses(
        int* tokens, const int* targets, const float* stats, float* scales, int* totals, float* report, unsigned rows,
        unsigned kind, double least, double most, double beta, double most_tokens, double count, float scale, unsigned accumulate) {
    double total[REPORT_WORDS] = {};
    for (unsigned row = threadIdx.x; row < rows; row += THREADS) {
        scales[row] = 0.0f;
        if (targets[row] < 0) continue;
        const float* at = stats + (size_t)row * 3;
        int* words = tokens + (size_t)row * 4;
        double logp = (double)at[2] - (double)at[0] - log((double)at[1]);
        PolicyToken token = {words[0], words[1], words[2], words[3]};
        if (beta > 0.0) {
            // As the reference is stored, so that equal weights have the divergence 0. Only the pass that computes it meets none.
            const float rounded = (float)logp;
            logp = (double)rounded;
            if (isnan(__int_as_float(token.reference))) words[2] = token.reference = __float_as_int(rounded);
        }
        const PolicyTerms terms = policy_terms(kind, least, most, beta, most_tokens, logp, token);
        scales[row] = (float)(-terms.slope / count * (double)scale);
#pragma unroll
        for (unsigned word = 0; word < REPORT_WORDS; word++) total[word] += terms.report[word];
    }
    for (unsigned word = 0; word < REPORT_WORDS; word++) {
        const double sum = reduce_block<THREADS>(total[word], [](double a, double b) { return a + b; });
        __syncthreads();
        if (threadIdx.x > 0) continue;
        const double all = sum + (accumulate ? read_double(totals + word * 2) : 0.0);
        write_double(totals + word * 2, all);
        report[word] = (float)(all / count);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define KERNELS(dtype, T)                                                                                            \
    KERNEL cross_entropy_stats_##dtype(                                                                              \
        const T* logits, const int* targets, float* stats, unsigned vocab_start, unsigned cols, unsigned first) {    \
        cross_entropy_stats(logits, targets, stats, vocab_start, cols, first, AsItIs{});                              \
    }                                                                                                                \
    KERNEL cross_entropy_grad_##dtype(                                                                               \
        T* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, float scale) {       \
        cross_entropy_grad(logits, targets, stats, vocab_start, cols, WeightScale{scale}, AsItIs{});                 \
    }                                                                                                                \
    KERNEL cross_entropy_row_grad_##dtype(                                                                           \
        T* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols,                      \
        const float* scales) {                                                                                       \
        cross_entropy_grad(logits, targets, stats, vocab_start, cols, RowScale{scales}, AsItIs{});                   \
    }                                                                                                                \
    KERNEL cross_entropy_stats_capped_##dtype(                                                                       \
        const T* logits, const int* targets, float* stats, unsigned vocab_start, unsigned cols, unsigned first,      \
        float cap) {                                                                                                 \
        cross_entropy_stats(logits, targets, stats, vocab_start, cols, first, SoftCap{cap});                         \
    }                                                                                                                \
    KERNEL cross_entropy_grad_capped_##dtype(                                                                        \
        T* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, float scale,         \
        float cap) {                                                                                                 \
        cross_entropy_grad(logits, targets, stats, vocab_start, cols, WeightScale{scale}, SoftCap{cap});             \
    }                                                                                                                \
    KERNEL cross_entropy_row_grad_capped_##dtype(                                                                    \
        T* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols,                      \
        const float* scales, float cap) {                                                                            \
        cross_entropy_grad(logits, targets, stats, vocab_start, cols, RowScale{scales}, SoftCap{cap});               \
    }

FOR_EACH_FORMAT(KERNELS)

// Gradients of fp32 logits in 16 bits.
#define NARROWED(dtype, T)                                                                                           \
    KERNEL cross_entropy_grad_f32_##dtype(                                                                           \
        float* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, float scale) {   \
        cross_entropy_grad_narrowed<T>(logits, targets, stats, vocab_start, cols, WeightScale{scale}, AsItIs{});     \
    }                                                                                                                \
    KERNEL cross_entropy_row_grad_f32_##dtype(                                                                       \
        float* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols,                  \
        const float* scales) {                                                                                       \
        cross_entropy_grad_narrowed<T>(logits, targets, stats, vocab_start, cols, RowScale{scales}, AsItIs{});       \
    }                                                                                                                \
    KERNEL cross_entropy_grad_capped_f32_##dtype(                                                                    \
        float* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols, float scale,     \
        float cap) {                                                                                                 \
        cross_entropy_grad_narrowed<T>(logits, targets, stats, vocab_start, cols, WeightScale{scale}, SoftCap{cap}); \
    }                                                                                                                \
    KERNEL cross_entropy_row_grad_capped_f32_##dtype(                                                                \
        float* logits, const int* targets, const float* stats, unsigned vocab_start, unsigned cols,                  \
        const float* scales, float cap) {                                                                            \
        cross_entropy_grad_narrowed<T>(logits, targets, stats, vocab_start, cols, RowScale{scales}, SoftCap{cap});   \
    }

NARROWED(bf16, bf16)
NARROWED(f16, f16)
