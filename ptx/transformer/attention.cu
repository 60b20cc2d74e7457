// Causal attention without a library: `--attention plain`. See src/device/cpu/kernels/attention{,_backward}.rs.
//
// Blocks of TILE queries meet blocks of TILE keys. Both matrix products of such a pair run on fp32 cores out of shared
// memory, 4 x 4 (scores) and 4 x 8 (results) numbers a thread. Scores need all channels of a head; results are computed
// SLICE channels at a time, by different blocks, so that they stay in registers for any head_dim.
//
// Every sum is a chain of one thread in a fixed order. Keys that a query does not see count with probability 0 if they lie
// in a tile that some query of its tile sees: only a value that is not finite can be seen that way.
#include "common.cuh"
#include "math.cuh"

// Queries, and keys, of a pair of blocks.
constexpr unsigned TILE = 64;
// Channels of two tiles that lie in shared memory at a time, for scores.
constexpr unsigned CHUNK = 32;
// Channels of a block's result, and rows of a tile that lie in shared memory at a time for it.
constexpr unsigned SLICE = 128;
constexpr unsigned SLICE_ROWS = 32;
constexpr unsigned THREADS = 256;
// Threads along a row of a tile; each has ROWS x COLS of its numbers, and of every 64 channels of a result.
constexpr unsigned LANES = 16;
constexpr unsigned ROWS = 4;
constexpr unsigned COLS = 4;
constexpr unsigned PARTS = SLICE / (LANES * COLS);
// Rows of 64 numbers, shifted so that neighbours in a column lie in different banks, at addresses divisible by 16.
constexpr unsigned PITCH = TILE + 4;

struct Shape {
    unsigned seq_length, heads, kv_heads, head_dim, window;
    float scale;
    // Whether every 16 bytes of a head start at an address that 16 divides.
    unsigned wide;
    // Where in its row each token's document begins, `[batch, seq_length]`; null: at 0. They do not descend along a row.
    const int* documents;

    __device__ __forceinline__ unsigned qkv_heads() const { return heads + 2 * kv_heads; }
    // The first key that a query of the row sees; it never descends along a row.
    __device__ __forceinline__ unsigned first(unsigned sequence, unsigned query) const {
        const unsigned in_window = query < window ? 0 : query + 1 - window;
        return documents == nullptr ? in_window : max(in_window, (unsigned)documents[(size_t)sequence * seq_length + query]);
    }
    // Whether a query sees a key, when `first` is what it sees first.
    __device__ __forceinline__ bool sees(unsigned query, unsigned first, unsigned key) const {
        return first <= key && key <= query && query < seq_length;
    }
    // Where `[batch, heads, seq_length]` has this head.
    __device__ __forceinline__ size_t row(unsigned sequence, unsigned head) const {
        return ((size_t)sequence * heads + head) * seq_length;
    }
};

// One head of one sequence: `rows` of head_dim numbers, `pitch` apart.
template <typename T>
struct Head {
    T* data;
    size_t pitch;
    unsigned rows, head_dim, wide;

    __device__ __forceinline__ bool holds(unsigned row, unsigned channel) const { return row < rows && channel < head_dim; }
    __device__ __forceinline__ T* at(unsigned row, unsigned channel) const { return data + row * pitch + channel; }
};

// Head `index` of rows of `heads` heads. T may be const.
template <typename T>
__device__ __forceinline__ Head<T> head_of(T* x, const Shape& s, unsigned heads, unsigned sequence, unsigned index) {
    const size_t pitch = (size_t)heads * s.head_dim;
    return {x + sequence * s.seq_length * pitch + (size_t)index * s.head_dim, pitch, s.seq_length, s.head_dim, s.wide};
}

// The heads that a block works on.
template <typename T>
struct Inputs {
    Head<const T> q, k, v;

    __device__ __forceinline__ Inputs(const T* qkv, const Shape& s, unsigned sequence, unsigned head) {
        const unsigned kv_head = head / (s.heads / s.kv_heads);
        q = head_of(qkv, s, s.qkv_heads(), sequence, head);
        k = head_of(qkv, s, s.qkv_heads(), sequence, s.heads + kv_head);
        v = head_of(qkv, s, s.qkv_heads(), sequence, s.heads + s.kv_heads + kv_head);
    }
};

// What a block shares.
struct Shared {
    union {
        float by_channel[2][CHUNK][PITCH];
        float by_row[SLICE_ROWS][SLICE];
    };
    // What the rows of a result weigh rows with: [row to weigh][row of the result].
    float weights[TILE][PITCH];
    // The first key that each query of a tile sees: registers are short.
    unsigned first[TILE];

    // The queries from `start` on; readers come after a barrier.
    __device__ __forceinline__ void note_first(const Shape& s, unsigned sequence, unsigned start) {
        if (threadIdx.x < TILE) first[threadIdx.x] = s.first(sequence, min(start + threadIdx.x, s.seq_length - 1));
    }
};

// A thread's place: its numbers are rows row() .. + ROWS, columns column() .. + COLS.
__device__ __forceinline__ unsigned lane() { return threadIdx.x % LANES; }
__device__ __forceinline__ unsigned row() { return threadIdx.x / LANES * ROWS; }
__device__ __forceinline__ unsigned column() { return lane() * COLS; }

__device__ __forceinline__ void load4(const float* p, float (&x)[4]) {
    const float4 v = *reinterpret_cast<const float4*>(p);
    x[0] = v.x, x[1] = v.y, x[2] = v.z, x[3] = v.w;
}

__device__ __forceinline__ void store4(float* p, const float* x) {
    *reinterpret_cast<float4*>(p) = make_float4(x[0], x[1], x[2], x[3]);
}

// Calls `put(row, channel, numbers)` for N neighbours at a time of HEIGHT x WIDTH numbers of a head from (`row`, `channel`)
// on, zeros outside of it. Of the groups of a row, neighbouring threads take ALONG, and then those of other rows.
template <unsigned HEIGHT, unsigned WIDTH, unsigned ALONG, int N, typename T, typename F>
__device__ __forceinline__ void load_groups(const Head<const T>& head, unsigned row, unsigned channel, F put) {
#pragma unroll (N > 1 ? 4 : 1)
    for (unsigned i = threadIdx.x; i < HEIGHT * WIDTH / N; i += THREADS) {
        const unsigned r = i / ALONG % HEIGHT, c = (i % ALONG + i / (ALONG * HEIGHT) * ALONG) * N;
        float x[N] = {};
        if (head.holds(row + r, channel + c)) Vec<T, N>::load(head.at(row + r, channel + c)).widen(x);
        put(r, c, x);
    }
}

// CHUNK channels of TILE rows. A warp takes 32 bytes of 16 rows: whole sectors, and at most two threads on a bank.
template <typename T>
__device__ __forceinline__ void load_by_channel(const Head<const T>& head, unsigned row, unsigned channel, float (&to)[CHUNK][PITCH]) {
    const auto put = [&](unsigned r, unsigned c, const auto& x) {
        constexpr unsigned N = sizeof(x) / sizeof(float);
#pragma unroll
        for (unsigned i = 0; i < N; i++) to[c + i][r] = x[i];
    };
    if (head.wide) {
        load_groups<TILE, CHUNK, 2, WIDE<T>>(head, row, channel, put);
    } else {
        load_groups<TILE, CHUNK, 2, 1>(head, row, channel, put);
    }
}

// SLICE channels of SLICE_ROWS rows.
template <typename T>
__device__ __forceinline__ void load_by_row(const Head<const T>& head, unsigned row, unsigned channel, float (&to)[SLICE_ROWS][SLICE]) {
    if (head.wide) {
        load_groups<SLICE_ROWS, SLICE, SLICE / WIDE<T>, WIDE<T>>(head, row, channel, [&](unsigned r, unsigned c, const auto& x) {
#pragma unroll
            for (int i = 0; i < WIDE<T>; i += 4) store4(&to[r][c + i], x + i);
        });
    } else {
        load_groups<SLICE_ROWS, SLICE, SLICE, 1>(head, row, channel, [&](unsigned r, unsigned c, const auto& x) { to[r][c] = x[0]; });
    }
}

// Products of TILE rows of `a` with TILE rows of `b`.
struct Scores {
    float x[ROWS][COLS];

    template <typename T>
    __device__ __forceinline__ Scores(const Head<T>& a, unsigned a_start, const Head<T>& b, unsigned b_start, Shared& shared) : x{} {
        for (unsigned channel = 0; channel < a.head_dim; channel += CHUNK) {
            __syncthreads();
            load_by_channel(a, a_start, channel, shared.by_channel[0]);
            load_by_channel(b, b_start, channel, shared.by_channel[1]);
            __syncthreads();
#pragma unroll 4
            for (unsigned k = 0; k < CHUNK; k++) {
                float left[ROWS], right[COLS];
                load4(&shared.by_channel[0][k][row()], left);
                load4(&shared.by_channel[1][k][column()], right);
#pragma unroll
                for (unsigned i = 0; i < ROWS; i++) {
#pragma unroll
                    for (unsigned j = 0; j < COLS; j++) x[i][j] = fmaf(left[i], right[j], x[i][j]);
                }
            }
        }
    }

    // Hands them to all threads as the weights of a Result's rows.
    __device__ __forceinline__ void share(Shared& shared) const {
        __syncthreads();
#pragma unroll
        for (unsigned j = 0; j < COLS; j++) {
            const float numbers[ROWS] = {x[0][j], x[1][j], x[2][j], x[3][j]};
            store4(&shared.weights[column() + j][row()], numbers);
        }
    }
};

// Channels first .. first + SLICE of TILE rows of a result; of each 64 of them, a thread has those from column() on.
struct Result {
    unsigned first;
    float x[PARTS][ROWS][COLS] = {};

    __device__ __forceinline__ Result(unsigned first) : first(first) {}

    // Adds the shared weights times TILE rows of `values`.
    template <typename T>
    __device__ __forceinline__ void add(const Head<T>& values, unsigned start, Shared& shared) {
        for (unsigned rows = 0; rows < TILE; rows += SLICE_ROWS) {
            __syncthreads();
            load_by_row(values, start + rows, first, shared.by_row);
            __syncthreads();
#pragma unroll 4
            for (unsigned k = 0; k < SLICE_ROWS; k++) {
                float weight[ROWS];
                load4(&shared.weights[rows + k][row()], weight);
#pragma unroll
                for (unsigned part = 0; part < PARTS; part++) {
                    if (first + part * LANES * COLS >= values.head_dim) break;
                    float value[COLS];
                    load4(&shared.by_row[k][part * LANES * COLS + column()], value);
#pragma unroll
                    for (unsigned i = 0; i < ROWS; i++) {
#pragma unroll
                        for (unsigned j = 0; j < COLS; j++) x[part][i][j] = fmaf(weight[i], value[j], x[part][i][j]);
                    }
                }
            }
        }
    }

    __device__ __forceinline__ void scale(unsigned i, float factor) {
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
#pragma unroll
            for (unsigned j = 0; j < COLS; j++) x[part][i][j] *= factor;
        }
    }

    template <typename T>
    __device__ __forceinline__ void store(const Head<T>& to, unsigned start) const {
#pragma unroll
        for (unsigned part = 0; part < PARTS; part++) {
#pragma unroll
            for (unsigned i = 0; i < ROWS; i++) {
#pragma unroll
                for (unsigned j = 0; j < COLS; j++) {
                    const unsigned to_row = start + row() + i, channel = first + part * LANES * COLS + column() + j;
                    if (to.holds(to_row, channel)) *to.at(to_row, channel) = narrow<T>(x[part][i][j]);
                }
            }
        }
    }
};

// Over the threads of one row of a tile; all get the result.
template <typename F>
__device__ __forceinline__ float reduce_row(float x, F f) {
#pragma unroll
    for (unsigned distance = LANES / 2; distance > 0; distance /= 2) x = f(x, __shfl_xor_sync(ALL_LANES, x, distance));
    return x;
}

// Maximum and sum of exponentials of the scores so far of this thread's rows.
struct Softmax {
    float max[ROWS], sum[ROWS];

    __device__ __forceinline__ Softmax() {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) max[i] = -INFINITY, sum[i] = 0.0f;
    }

    // Turns scores (minus infinity where not seen) into probabilities that are yet to be divided by the sum.
    __device__ __forceinline__ void extend(Scores& scores, Result& out) {
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
            float(&x)[COLS] = scores.x[i];
            const auto larger = [](float a, float b) { return fmaxf(a, b); };
            const float top = larger(max[i], reduce_row(larger(larger(x[0], x[1]), larger(x[2], x[3])), larger));
            // A row that sees none of the keys so far has no maximum.
            const float base = top == -INFINITY ? 0.0f : top;
            const float rescale = exp_exact(max[i] - base);
#pragma unroll
            for (unsigned j = 0; j < COLS; j++) x[j] = exp_exact(x[j] - base);
            const float part = reduce_row((x[0] + x[1]) + (x[2] + x[3]), [](float a, float b) { return a + b; });
            sum[i] = fmaf(sum[i], rescale, part);
            max[i] = top;
            out.scale(i, rescale);
        }
    }
};

// Blocks: tiles of queries, those with the most keys first; heads and slices; sequences.
template <typename T, typename Cap>
__device__ __forceinline__ void attention(const T* qkv, T* out, float* lse, const Shape s, Cap cap) {
    __shared__ Shared shared;
    const unsigned start = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y % s.heads, slice = blockIdx.y / s.heads;
    const Inputs<T> in(qkv, s, blockIdx.z, head);
    shared.note_first(s, blockIdx.z, start);
    Softmax softmax;
    Result result(slice * SLICE);
    for (unsigned key = s.first(blockIdx.z, start) / TILE * TILE; key < min(start + TILE, s.seq_length); key += TILE) {
        Scores p(in.q, start, in.k, key, shared);
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
#pragma unroll
            for (unsigned j = 0; j < COLS; j++) {
                const bool seen = s.sees(start + row() + i, shared.first[row() + i], key + column() + j);
                p.x[i][j] = seen ? cap(p.x[i][j] * s.scale).value : -INFINITY;
            }
        }
        softmax.extend(p, result);
        p.share(shared);
        result.add(in.v, key, shared);
    }
#pragma unroll
    for (unsigned i = 0; i < ROWS; i++) {
        const unsigned query = start + row() + i;
        result.scale(i, 1.0f / softmax.sum[i]);
        if (slice == 0 && lane() == 0 && query < s.seq_length) {
            lse[s.row(blockIdx.z, head) + query] = softmax.max[i] + logf(softmax.sum[i]);
        }
    }
    result.store(head_of(out, s, s.heads, blockIdx.z, head), start);
}

// The sum of dout * out over the channels of each head of each token, as `[batch, heads, seq_length]`: a warp each.
template <typename T>
__device__ __forceinline__ void attention_delta(
    const T* dout, const T* out, float* delta, unsigned rows, unsigned seq_length, unsigned heads, unsigned head_dim) {
    const unsigned row = blockIdx.x * (THREADS / WARP) + threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (row >= rows) return;
    const size_t start = (size_t)row * head_dim;
    float sum = 0.0f;
    for (unsigned channel = lane; channel < head_dim; channel += WARP) {
        sum = fmaf(widen(dout[start + channel]), widen(out[start + channel]), sum);
    }
    sum = warp_sum(sum);
    const unsigned token = row / heads, head = row % heads;
    const unsigned sequence = token / seq_length, query = token % seq_length;
    if (lane == 0) delta[((size_t)sequence * heads + head) * seq_length + query] = sum;
}

// Turns scores `p` into probabilities and gradients `ds` of probabilities into gradients of raw scores.
template <typename Cap>
__device__ __forceinline__ void score_gradient(float& p, float& ds, bool seen, float scale, float lse, float delta, Cap cap) {
    const Capped score = cap(p * scale);
    p = seen ? exp_exact(score.value - lse) : 0.0f;
    ds = seen ? p * (ds - delta) * score.slope * scale : 0.0f;
}

// Blocks as those of `attention`.
template <typename T, typename Cap>
__device__ __forceinline__ void attention_backward_q(
    const T* dout, const T* qkv, const float* lse, const float* delta, T* dqkv, const Shape s, Cap cap) {
    __shared__ Shared shared;
    const unsigned start = (gridDim.x - 1 - blockIdx.x) * TILE, head = blockIdx.y % s.heads, slice = blockIdx.y / s.heads;
    const Inputs<T> in(qkv, s, blockIdx.z, head);
    const Head<const T> d = head_of(dout, s, s.heads, blockIdx.z, head);
    __shared__ float row_lse[TILE], row_delta[TILE];
    if (threadIdx.x < TILE) {
        const size_t query = s.row(blockIdx.z, head) + min(start + threadIdx.x, s.seq_length - 1);
        row_lse[threadIdx.x] = lse[query];
        row_delta[threadIdx.x] = delta[query];
    }
    shared.note_first(s, blockIdx.z, start);
    Result dq(slice * SLICE);
    for (unsigned key = s.first(blockIdx.z, start) / TILE * TILE; key < min(start + TILE, s.seq_length); key += TILE) {
        Scores p(in.q, start, in.k, key, shared), ds(d, start, in.v, key, shared);
#pragma unroll
        for (unsigned i = 0; i < ROWS; i++) {
#pragma unroll
            for (unsigned j = 0; j < COLS; j++) {
                const bool seen = s.sees(start + row() + i, shared.first[row() + i], key + column() + j);
                score_gradient(p.x[i][j], ds.x[i][j], seen, s.scale, row_lse[row() + i], row_delta[row() + i], cap);
            }
        }
        ds.share(shared);
        dq.add(in.k, key, shared);
    }
    dq.store(head_of(dqkv, s, s.qkv_heads(), blockIdx.z, head), start);
}

// Blocks: tiles of keys, those that most queries see first; key heads and slices; sequences. Rows of a tile are keys here.
template <typename T, typename Cap>
__device__ __forceinline__ void attention_backward_kv(
    const T* dout, const T* qkv, const float* lse, const float* delta, T* dqkv, const Shape s, Cap cap) {
    __shared__ Shared shared;
    const unsigned start = blockIdx.x * TILE, kv_head = blockIdx.y % s.kv_heads, slice = blockIdx.y / s.kv_heads;
    const unsigned group = s.heads / s.kv_heads;
    Result dk(slice * SLICE), dv(slice * SLICE);
    for (unsigned head = kv_head * group; head < (kv_head + 1) * group; head++) {
        const Inputs<T> in(qkv, s, blockIdx.z, head);
        const Head<const T> d = head_of(dout, s, s.heads, blockIdx.z, head);
        // A query that sees none of the tile's keys is followed by none that does.
        for (unsigned query = start; query < s.seq_length && s.first(blockIdx.z, query) < start + TILE; query += TILE) {
            Scores p(in.k, start, in.q, query, shared), ds(in.v, start, d, query, shared);
#pragma unroll
            for (unsigned j = 0; j < COLS; j++) {
                const unsigned at = query + column() + j, inside = min(at, s.seq_length - 1);
                const size_t stat = s.row(blockIdx.z, head) + inside;
                const float query_lse = lse[stat], query_delta = delta[stat];
                const unsigned first = s.first(blockIdx.z, inside);
#pragma unroll
                for (unsigned i = 0; i < ROWS; i++) {
                    score_gradient(p.x[i][j], ds.x[i][j], s.sees(at, first, start + row() + i), s.scale, query_lse, query_delta, cap);
                }
            }
            p.share(shared);
            dv.add(d, query, shared);
            ds.share(shared);
            dk.add(in.q, query, shared);
        }
    }
    dk.store(head_of(dqkv, s, s.qkv_heads(), blockIdx.z, s.heads + kv_head), start);
    dv.store(head_of(dqkv, s, s.qkv_heads(), blockIdx.z, s.heads + s.kv_heads + kv_head), start);
}

#define KERNEL(blocks) extern "C" __global__ void __launch_bounds__(THREADS, blocks)
#define SIZES unsigned seq_length, unsigned heads, unsigned kv_heads, unsigned head_dim, unsigned window, float scale, unsigned wide
#define SHAPE Shape{seq_length, heads, kv_heads, head_dim, window, scale, wide, documents}
// The number of blocks that share a multiprocessor keeps registers in bounds; two sums for keys and values take more, and so do soft
// caps.
#define KERNELS_OF(blocks, name, T, MORE, CAP)                                                                       \
    KERNEL(blocks) attention##name(const T* qkv, const int* documents, T* out, float* lse, SIZES MORE) {             \
        attention(qkv, out, lse, SHAPE, CAP);                                                                        \
    }                                                                                                                \
    KERNEL(blocks) attention_backward_q##name(                                                                       \
        const T* dout, const T* qkv, const int* documents, const float* lse, const float* delta, T* dqkv,            \
        SIZES MORE) {                                                                                                \
        attention_backward_q(dout, qkv, lse, delta, dqkv, SHAPE, CAP);                                               \
    }                                                                                                                \
    KERNEL(1) attention_backward_kv##name(                                                                           \
        const T* dout, const T* qkv, const int* documents, const float* lse, const float* delta, T* dqkv,            \
        SIZES MORE) {                                                                                                \
        attention_backward_kv(dout, qkv, lse, delta, dqkv, SHAPE, CAP);                                              \
    }
#define NO_MORE
#define AND_CAP , float cap
#define KERNELS(dtype, T)                                                                                            \
    KERNELS_OF(2, _##dtype, T, NO_MORE, AsItIs{})                                                                    \
    KERNELS_OF(1, _capped_##dtype, T, AND_CAP, SoftCap{cap})                                                         \
    KERNEL(2) attention_delta_##dtype(                                                                               \
        const T* dout, const T* out, float* delta, unsigned rows, unsigned seq_length, unsigned heads, unsigned head_dim) { \
        attention_delta(dout, out, delta, rows, seq_length, heads, head_dim);                                        \
    }

FOR_EACH_FORMAT(KERNELS)
