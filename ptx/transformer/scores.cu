// The softmax of attention by products: see src/device/kernels/scores.rs.
//
// A block has one row of scores, that of a query of a head. Its sums have an order that depends on the row's length alone. Scores are read
// where the query sees them, four columns at a time; every column of the results is written.
#include "common.cuh"
#include "math.cuh"
#include "reduce.cuh"

constexpr unsigned THREADS = 256;
// Columns that a thread takes at once. Rows begin at multiples of 8 columns.
constexpr unsigned GROUP = 4;
// Groups of a row that a thread of masked_softmax keeps in registers: rows of 4096 columns.
constexpr unsigned KEPT = 4;

struct Tile {
    // Heads: see ScoreTile.
    unsigned sequence, kv_head, member, lanes, across_sequences;
    // The first query, and the number of queries; the first key, and the number of keys.
    unsigned query, rows, key, keys;
    unsigned pitch;
    // Of the whole attention.
    unsigned seq_length, heads, group, window;
    float scale;
};

// The row of a block.
struct Row {
    unsigned sequence, head, query;
    // Columns that the query sees.
    unsigned begin, end;
    // Its first column in an array of scores.
    size_t at;

    __device__ __forceinline__ Row(const Tile& t) {
        const unsigned matrix = blockIdx.x / t.rows, row = blockIdx.x - matrix * t.rows;
        const unsigned member = matrix / t.lanes, lane = matrix - member * t.lanes;
        sequence = t.sequence + (t.across_sequences ? lane : 0);
        head = (t.kv_head + (t.across_sequences ? 0 : lane)) * t.group + t.member + member;
        query = t.query + row;
        const unsigned first = query < t.window ? 0 : query + 1 - t.window;
        begin = max(first, t.key) - t.key;
        end = query + 1 - t.key;
        at = (size_t)blockIdx.x * t.pitch;
    }
    // Where `[batch, heads, seq_length]` has it.
    __device__ __forceinline__ size_t place(const Tile& t) const { return ((size_t)sequence * t.heads + head) * t.seq_length + query; }
    __device__ __forceinline__ bool sees(unsigned column) const { return begin <= column && column < end; }
};

__device__ __forceinline__ void load_group(const float* from, float (&x)[GROUP]) { Vec<float>::load(from).widen(x); }

template <typename T>
__device__ __forceinline__ void store_group(const float (&x)[GROUP], T* to) {
    Vec<T, GROUP>::narrow(x).store(to);
}

// Reads the seen scores, from memory once where a row has at most KEPT groups for each thread or fits the cache, and writes all columns: 16384
// rows of 2304 scores are 227 MB, 53 us at 4.3 TB/s.
template <typename T, typename Cap>
__device__ __forceinline__ void masked_softmax(const float* scores, T* probabilities, float* lse, const Tile t, Cap cap) {
    const Row row(t);
    scores += row.at;
    // Scores of columns that the query does not see are minus infinity.
    const auto load_scores = [&](unsigned column, float (&x)[GROUP]) {
        const bool is_seen = column < row.end && column + GROUP > row.begin;
        if (is_seen) load_group(scores + column, x);
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) x[i] = is_seen && row.sees(column + i) ? cap(x[i] * t.scale).value : -INFINITY;
    };
    float kept[KEPT][GROUP], top = -INFINITY;
#pragma unroll
    for (unsigned group = 0; group < KEPT; group++) {
        load_scores((group * THREADS + threadIdx.x) * GROUP, kept[group]);
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) top = fmaxf(top, kept[group][i]);
    }
    const unsigned after_kept = (KEPT * THREADS + threadIdx.x) * GROUP;
    for (unsigned column = after_kept; column < row.end; column += THREADS * GROUP) {
        float x[GROUP];
        load_scores(column, x);
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) top = fmaxf(top, x[i]);
    }
    const float largest = reduce_block<THREADS>(top, [](float a, float b) { return fmaxf(a, b); });
    const auto exponential = [&](float x) { return x == -INFINITY ? 0.0f : exp_nonpositive(x - largest); };
    float sum = 0.0f;
#pragma unroll
    for (unsigned group = 0; group < KEPT; group++) {
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) sum += kept[group][i] = exponential(kept[group][i]);
    }
    for (unsigned column = after_kept; column < row.end; column += THREADS * GROUP) {
        float x[GROUP];
        load_scores(column, x);
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) sum += exponential(x[i]);
    }
    sum = reduce_block<THREADS>(sum, [](float a, float b) { return a + b; });
    const float inverse = __frcp_rn(sum);
#pragma unroll
    for (unsigned group = 0; group < KEPT; group++) {
        const unsigned column = (group * THREADS + threadIdx.x) * GROUP;
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) kept[group][i] *= inverse;
        if (column < t.keys) store_group(kept[group], probabilities + row.at + column);
    }
    for (unsigned column = after_kept; column < t.keys; column += THREADS * GROUP) {
        float x[GROUP];
        load_scores(column, x);
#pragma unroll
        for (unsigned i = 0; i < GROUP; i++) x[i] = exponential(x[i]) * inverse;
        store_group(x, probabilities + row.at + column);
    }
    if (threadIdx.x == 0) lse[row.place(t)] = largest + logf(sum);
}

// Reads the seen scores and gradients of probabilities, and writes all columns: 16384 rows of 2304 scores are 453 MB, 105 us at 4.3 TB/s.
template <typename T, typename Cap>
__device__ __forceinline__ void softmax_backward(
    const float* scores, const float* dprobabilities, const T* dout, const T* out, const float* lse, T* probabilities, T* dscores,
    const Tile t, unsigned head_dim, Cap cap) {
    const Row row(t);
    const size_t first = (((size_t)row.sequence * t.seq_length + row.query) * t.heads + row.head) * head_dim;
    float delta = 0.0f;
    for (unsigned channel = threadIdx.x; channel < head_dim; channel += THREADS) {
        delta = fmaf(widen(dout[first + channel]), widen(out[first + channel]), delta);
    }
    delta = reduce_block<THREADS>(delta, [](float a, float b) { return a + b; });
    const float row_lse = lse[row.place(t)];
    for (unsigned column = threadIdx.x * GROUP; column < t.keys; column += THREADS * GROUP) {
        float p[GROUP] = {}, ds[GROUP] = {};
        if (column < row.end && column + GROUP > row.begin) {
            load_group(scores + row.at + column, p);
            load_group(dprobabilities + row.at + column, ds);
#pragma unroll
            for (unsigned i = 0; i < GROUP; i++) {
                const bool seen = row.sees(column + i);
                const Capped score = cap(p[i] * t.scale);
                p[i] = seen ? exp_nonpositive(score.value - row_lse) : 0.0f;
                ds[i] = seen ? p[i] * (ds[i] - delta) * score.slope * t.scale : 0.0f;
            }
        }
        store_group(p, probabilities + row.at + column);
        store_group(ds, dscores + row.at + column);
    }
}

// One thread for N sums, 4 or 1. Reads count x rows x cols sums and writes as many numbers: 4 x 4096 x 512 are 50 MB, 12 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void round_sums(
    const float* sums, T* out, size_t items, unsigned rows, unsigned cols, size_t pitch, size_t stride) {
    const size_t i = (size_t)blockIdx.x * THREADS + threadIdx.x;
    if (i >= items) return;
    const unsigned each = cols / N, column = i % each * N, row = i / each % rows;
    const size_t matrix = i / each / rows;
    float x[N];
    Vec<float, N>::load(sums + i * N).widen(x);
    Vec<T, N>::narrow(x).store(out + matrix * stride + row * pitch + column);
}

#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)
#define TILE                                                                                                               \
    unsigned sequence, unsigned kv_head, unsigned member, unsigned lanes, unsigned across_sequences, unsigned query,       \
        unsigned rows, unsigned key, unsigned keys, unsigned pitch, unsigned seq_length, unsigned heads,                   \
        unsigned group, unsigned window, float scale, float cap
#define TILE_OF                                                                                                            \
    Tile{sequence, kv_head, member, lanes, across_sequences, query, rows, key, keys, pitch, seq_length, heads, group, window, scale}
#define SOFTMAX(NAME, T, CAP)                                                                                              \
    KERNEL masked_softmax##NAME(const float* scores, T* probabilities, float* lse, TILE) {                                 \
        masked_softmax(scores, probabilities, lse, TILE_OF, CAP);                                                          \
    }                                                                                                                      \
    KERNEL softmax_backward##NAME(const float* scores, const float* dprobabilities, const T* dout, const T* out,           \
        const float* lse, T* probabilities, T* dscores, unsigned head_dim, TILE) {                                         \
        softmax_backward(scores, dprobabilities, dout, out, lse, probabilities, dscores, TILE_OF, head_dim, CAP);          \
    }
#define KERNELS(NAME, T)                                                                                                   \
    SOFTMAX(_##NAME, T, AsItIs{})                                                                                          \
    SOFTMAX(_capped_##NAME, T, SoftCap{cap})                                                                               \
    KERNEL round_sums_##NAME(const float* sums, T* out, unsigned long long items, unsigned rows, unsigned cols,            \
        unsigned long long pitch, unsigned long long stride) {                                                             \
        round_sums<T, 4>(sums, out, items, rows, cols, pitch, stride);                                                     \
    }                                                                                                                      \
    KERNEL round_sums_any_##NAME(const float* sums, T* out, unsigned long long items, unsigned rows, unsigned cols,        \
        unsigned long long pitch, unsigned long long stride) {                                                             \
        round_sums<T, 1>(sums, out, items, rows, cols, pitch, stride);                                                     \
    }
FOR_EACH_FORMAT(KERNELS)
