// The gated delta rule in chunks of 64 tokens. See src/device/kernels/delta.rs for the rule, and src/device/cpu/kernels/delta_chunk.rs and
// delta_backward.rs for its matrices, whose names are used here:
//
//     A_ij = beta_i (k_i k_j) D_ij, i > j;  P_ij = (q_i k_j) D_ij, i >= j;  D_ij = e^(g_i - g_j);  R = (I + A)^-1
//     U = R (beta v);  W = R (beta e^g k);  N = U - W S;  O = (e^g q) S + P N;  S <- e^g_last S + (e^(g_last - g) k)^T N
//
// Factors of products are bfloat16 and sums fp32; gates, decays and R are fp32. A chunk begins at every 64th token of a document. A block
// of a kernel over chunks computes the chunks that begin among its 64 tokens, and a block of a scan the documents that begin among its
// tokens, so grids follow from sizes alone. A state lies in the workspace at the number of the 64 tokens in which its chunk begins: of the
// chunks that need the state before them, and of those that need the gradient behind them, no two begin in the same 64 tokens.
#include "common.cuh"
#include "math.cuh"
#include "matrix.cuh"

constexpr unsigned CHUNK = 64, THREADS = 256, WARPS = THREADS / WARP;

// Elements between rows of a tile in shared memory: eight more than its columns, so that eight rows of 16 bytes lie in all banks.
template <unsigned COLS>
constexpr unsigned PITCH = COLS + 8;

// For each token: its index in its document, and the tokens from it to the document's end.
extern "C" __global__ void __launch_bounds__(THREADS) delta_spans(const int* documents, int2* spans, unsigned tokens, unsigned seq_length) {
    const unsigned token = blockIdx.x * THREADS + threadIdx.x;
    if (token >= tokens) return;
    const unsigned at = token % seq_length;
    if (documents == nullptr) {
        spans[token] = make_int2(at, seq_length - at);
        return;
    }
    const int* row = documents + (token - at);
    const int start = row[at];
    // The first token of a later document, between `low` and `high`.
    unsigned low = at + 1, high = seq_length;
    while (low < high) {
        const unsigned middle = (low + high) / 2;
        if (row[middle] > start) high = middle;
        else low = middle + 1;
    }
    spans[token] = make_int2(at - start, low - at);
}

// The first token from `token` on with which a chunk begins.
__device__ __forceinline__ unsigned first_chunk(const int2* spans, unsigned token) {
    const int2 span = spans[token];
    const unsigned skip = (CHUNK - span.x % CHUNK) % CHUNK;
    return token + min(skip, unsigned(span.y));
}

// Queries (times the reciprocal root of D) and keys of unit length, and the reciprocals of their lengths; D / 4 lanes a vector.
// units is [2, key_heads, tokens, D], lengths [2, key_heads, tokens]; the key heads of qkv begin with `first`.
template <typename T, unsigned D>
__device__ __forceinline__ void delta_units(
    const T* qkv, bf16* units, float* lengths, unsigned tokens, unsigned key_heads, unsigned first, unsigned all_key_heads, unsigned cols) {
    constexpr unsigned LANES = D / 4;
    const unsigned row = blockIdx.x * (THREADS / LANES) + threadIdx.x / LANES, lane = threadIdx.x % LANES;
    const unsigned which = blockIdx.y, token = row / key_heads, head = row - token * key_heads;
    const bool is_row = token < tokens;
    float x[4] = {};
    const size_t from = (size_t)token * cols + (size_t)(which * all_key_heads + first + head) * D + lane * 4;
    if (is_row) Vec<T, 4>::load(qkv + from).widen(x);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; i++) sum = fmaf(x[i], x[i], sum);
    sum = warp_sum(sum, LANES);
    const float length = __frcp_rn(__fsqrt_rn(sum + 1e-6f)), scale = which == 0 ? __frcp_rn(__fsqrt_rn(float(D))) : 1.0f;
    if (!is_row) return;
#pragma unroll
    for (int i = 0; i < 4; i++) x[i] = x[i] * length * scale;
    const size_t to = ((size_t)which * key_heads + head) * tokens + token;
    Vec<bf16, 4>::narrow(x).store(units + to * D + lane * 4);
    if (lane == 0) lengths[to] = length;
}

// Copies `rows` rows of COLS elements to a tile of ROWS rows; the others become zero. Copies of bf16 run beside other work.
template <unsigned COLS, unsigned ROWS = CHUNK>
__device__ __forceinline__ void load_tile(bf16* tile, const bf16* from, size_t pitch, unsigned rows) {
    constexpr unsigned VECS = COLS / 8;
#pragma unroll
    for (unsigned i = threadIdx.x; i < ROWS * VECS; i += THREADS) {
        const unsigned row = i / VECS, col = i % VECS * 8;
        const bool inside = row < rows;
        const unsigned to = (unsigned)__cvta_generic_to_shared(tile + row * PITCH<COLS> + col);
        const bf16* source = from + (inside ? row * pitch + col : 0);
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(source), "r"(inside ? 16u : 0u) : "memory");
    }
}
template <unsigned COLS, unsigned ROWS = CHUNK>
__device__ __forceinline__ void load_tile(bf16* tile, const f16* from, size_t pitch, unsigned rows) {
    constexpr unsigned VECS = COLS / 8;
#pragma unroll 2
    for (unsigned i = threadIdx.x; i < ROWS * VECS; i += THREADS) {
        const unsigned row = i / VECS, col = i % VECS * 8;
        float x[8] = {};
        if (row < rows) Vec<f16>::load(from + row * pitch + col).widen(x);
        Vec<bf16>::narrow(x).store(tile + row * PITCH<COLS> + col);
    }
}

// A warp's result is 16 rows of TILES x 8 columns: lane l has row l / 4 (and 8 more) and columns 2 (l % 4), 2 (l % 4) + 1 of each tile.
template <int TILES>
__device__ __forceinline__ void clear(float (&c)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) c[n][0] = c[n][1] = c[n][2] = c[n][3] = 0.0f;
}

// Factors of rows l / 4 and l / 4 + 8.
template <int TILES>
__device__ __forceinline__ void scale_rows(float (&c)[TILES][4], float above, float below) {
#pragma unroll
    for (int n = 0; n < TILES; n++) c[n][0] *= above, c[n][1] *= above, c[n][2] *= below, c[n][3] *= below;
}

// A warp's left factor in registers: 16 rows of STEPS x 16 columns.
template <bool BY_STEP>
__device__ __forceinline__ void load_left(unsigned (&x)[4], const bf16* a, unsigned pitch, int step) {
    const unsigned lane = threadIdx.x % WARP, part = lane / 8, row = lane % 8;
    if (BY_STEP) load_matrices<true>(x, a + (step * 16 + part / 2 * 8 + row) * pitch + part % 2 * 8);
    else load_matrices<false>(x, a + lane % 16 * pitch + step * 16 + lane / 16 * 8);
}

// c += a b for step `step` of 16 terms, in the first `pairs` pairs of tiles. b is [terms, columns] if BY_STEP, else [columns, terms].
template <bool BY_STEP, int TILES>
__device__ __forceinline__ void multiply_step(
    float (&c)[TILES][4], const unsigned (&a)[4], const bf16* b, unsigned pitch, int step, int pairs = TILES / 2) {
    const unsigned lane = threadIdx.x % WARP, part = lane / 8, row = lane % 8;
#pragma unroll
    for (int n = 0; n < TILES / 2; n++) {
        if (n >= pairs) continue;
        unsigned x[4];
        if (BY_STEP) load_matrices<true>(x, b + (step * 16 + part % 2 * 8 + row) * pitch + n * 16 + part / 2 * 8);
        else load_matrices<false>(x, b + (n * 16 + part / 2 * 8 + row) * pitch + step * 16 + part % 2 * 8);
        multiply(c[2 * n], a, x, bf16());
        multiply(c[2 * n + 1], a, x + 2, bf16());
    }
}

// c += a b over the steps from `first` to before `last`, with a in shared memory: [rows, terms], or [terms, rows] if A_BY_STEP.
template <bool A_BY_STEP, bool B_BY_STEP, int STEPS, int TILES>
__device__ __forceinline__ void product(
    float (&c)[TILES][4], const bf16* a, unsigned a_pitch, const bf16* b, unsigned b_pitch, int first = 0, int last = STEPS,
    int pairs = TILES / 2) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        if (step < first || step >= last) continue;
        unsigned x[4];
        load_left<A_BY_STEP>(x, a, a_pitch, step);
        multiply_step<B_BY_STEP>(c, x, b, b_pitch, step, pairs);
    }
}
template <bool B_BY_STEP, int STEPS, int TILES>
__device__ __forceinline__ void product(
    float (&c)[TILES][4], const unsigned (&a)[STEPS][4], const bf16* b, unsigned b_pitch, int pairs = TILES / 2) {
#pragma unroll
    for (int step = 0; step < STEPS; step++) multiply_step<B_BY_STEP>(c, a[step], b, b_pitch, step, pairs);
}

// Where a warp's part of 64 rows lies: 16 rows, and one half of the columns.
struct Part {
    unsigned quarter, half, row;
    __device__ __forceinline__ Part() : quarter(threadIdx.x / WARP % 4), half(threadIdx.x / WARP / 4), row(quarter * 16) {}
    // Steps of a lower triangle as the left factor, and the first step of its transpose.
    __device__ __forceinline__ int below() const { return int(quarter) + 1; }
    // Pairs of tiles of the warp's half of a square that are not above the diagonal.
    __device__ __forceinline__ int pairs() const { return min(max(int(quarter) + 1 - 2 * int(half), 0), 2); }
};

__device__ __forceinline__ unsigned pack(float x, float y) {
    const float pair[2] = {x, y};
    return Word<bf16>::narrow(pair);
}

// A result as bfloat16: the words that store_tile writes.
template <int TILES>
__device__ __forceinline__ void narrow_result(unsigned (&words)[TILES][2], const float (&c)[TILES][4]) {
#pragma unroll
    for (int n = 0; n < TILES; n++) words[n][0] = pack(c[n][0], c[n][1]), words[n][1] = pack(c[n][2], c[n][3]);
}

// Reads 16 rows of STEPS x 16 columns from global memory as a left factor; rows from `rows` on are zero.
template <int STEPS, typename T>
__device__ __forceinline__ void read_left(unsigned (&a)[STEPS][4], const T* from, size_t pitch, unsigned rows) {
    const unsigned lane = threadIdx.x % WARP, row = lane / 4, col = lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned own = row + i % 2 * 8;
        const T* at = from + own * pitch + col + i / 2 * 8;
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            float x[2] = {};
            if (own < rows) Word<T>::widen(*reinterpret_cast<const unsigned*>(at + step * 16), x);
            a[step][i] = pack(x[0], x[1]);
        }
    }
}

// Writes a result to a tile, from its first row and column on.
template <int TILES>
__device__ __forceinline__ void store_tile(bf16* tile, unsigned pitch, const unsigned (&words)[TILES][2]) {
    const unsigned lane = threadIdx.x % WARP;
    bf16* at = tile + lane / 4 * pitch + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        *reinterpret_cast<unsigned*>(at + n * 8) = words[n][0];
        *reinterpret_cast<unsigned*>(at + 8 * pitch + n * 8) = words[n][1];
    }
}
template <int TILES>
__device__ __forceinline__ void store_tile(bf16* tile, unsigned pitch, const float (&c)[TILES][4]) {
    unsigned words[TILES][2];
    narrow_result(words, c);
    store_tile(tile, pitch, words);
}

// Writes the first `rows` of a warp's 16 rows to global memory. Lanes exchange pairs, so that each writes four neighbours and four lanes 32
// bytes.
template <int TILES, typename T>
__device__ __forceinline__ void store_rows(T* out, size_t pitch, unsigned rows, const float (&c)[TILES][4]) {
    const unsigned lane = threadIdx.x % WARP, odd = lane % 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const unsigned row = lane / 4 + half * 8;
#pragma unroll
        for (int n = 0; n < TILES; n += 2) {
            const unsigned here = Word<T>::narrow(&c[n][half * 2]), there = Word<T>::narrow(&c[n + 1][half * 2]);
            const unsigned given = __shfl_xor_sync(ALL_LANES, odd ? here : there, 1);
            const uint2 words = odd ? make_uint2(given, there) : make_uint2(here, given);
            T* at = out + row * pitch + (n + odd) * 8 + lane % 4 / 2 * 4;
            if (row < rows) *reinterpret_cast<uint2*>(at) = words;
        }
    }
}

// Sums over the columns of rows l / 4 and l / 4 + 8 of a result times a tile, whose first row is that of the warp.
template <int TILES>
__device__ __forceinline__ float2 row_dots(const float (&c)[TILES][4], const bf16* tile, unsigned pitch) {
    const unsigned lane = threadIdx.x % WARP;
    const bf16* at = tile + lane / 4 * pitch + lane % 4 * 2;
    float2 sums = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
        float x[2];
        Word<bf16>::widen(*reinterpret_cast<const unsigned*>(at + n * 8), x);
        sums.x = fmaf(c[n][1], x[1], fmaf(c[n][0], x[0], sums.x));
        Word<bf16>::widen(*reinterpret_cast<const unsigned*>(at + 8 * pitch + n * 8), x);
        sums.y = fmaf(c[n][3], x[1], fmaf(c[n][2], x[0], sums.y));
    }
    return make_float2(warp_sum(sums.x, 4), warp_sum(sums.y, 4));
}

// Multiplies the entries of a warp's part of a square by D and by a factor for each row; entries above the diagonal become zero, and with
// STRICT those on it.
template <bool STRICT>
__device__ __forceinline__ void decay_square(float (&c)[CHUNK / 16][4], const float* g, const Part& part, float above, float below) {
    const unsigned lane = threadIdx.x % WARP;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned row = part.row + lane / 4 + i / 2 * 8;
        const float own = g[row], factor = i < 2 ? above : below;
#pragma unroll
        for (int n = 0; n < int(CHUNK / 16); n++) {
            const unsigned col = part.half * (CHUNK / 2) + n * 8 + lane % 4 * 2 + i % 2;
            const bool seen = STRICT ? col < row : col <= row;
            c[n][i] = seen ? c[n][i] * factor * exp_nonpositive(own - g[col]) : 0.0f;
        }
    }
}

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(exp_exact(x)); }

constexpr unsigned A_PITCH = CHUNK + 4, HALF = CHUNK / 2;

// Column `col` of the inverse of one half of I + A, by substitution. A is zero on the diagonal and above, so whole vectors of it are read.
__device__ __forceinline__ void solve_column(float (&x)[HALF], const float* a, unsigned col) {
#pragma unroll
    for (int row = 0; row < int(HALF); row++) x[row] = 0.0f;
#pragma unroll
    for (int row = 0; row < int(HALF); row++) {
        float sums[4] = {row == col ? 1.0f : 0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < row; j += 4) {
            const float4 factors = *reinterpret_cast<const float4*>(a + row * A_PITCH + j);
            sums[0] = fmaf(-factors.x, x[j], sums[0]);
            sums[1] = fmaf(-factors.y, x[j + 1], sums[1]);
            sums[2] = fmaf(-factors.z, x[j + 2], sums[2]);
            sums[3] = fmaf(-factors.w, x[j + 3], sums[3]);
        }
        x[row] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    }
}

// Four rows of a product of two squares of HALF x HALF: one column for each lane, four rows for each warp.
__device__ __forceinline__ void multiply_halves(float (&sums)[4], const float* a, const float* b) {
    const unsigned lane = threadIdx.x % WARP;
    sums[0] = sums[1] = sums[2] = sums[3] = 0.0f;
#pragma unroll
    for (int k = 0; k < int(HALF); k += 4) {
        float x[4];
#pragma unroll
        for (int j = 0; j < 4; j++) x[j] = b[(k + j) * A_PITCH + lane];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 factors = *reinterpret_cast<const float4*>(a + i * A_PITCH + k);
            sums[i] = fmaf(factors.w, x[3], fmaf(factors.z, x[2], fmaf(factors.y, x[1], fmaf(factors.x, x[0], sums[i]))));
        }
    }
}

// Replaces A by R = (I + A)^-1: the halves on the diagonal by substitution, then R_21 = -R_22 A_21 R_11. The half above the
// diagonal holds a product.
__device__ __forceinline__ void invert(float* system) {
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (warp < 2) {
        float* const own = system + warp * HALF * (A_PITCH + 1);
        float x[HALF];
        solve_column(x, own, lane);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < int(HALF); i++) own[i * A_PITCH + lane] = x[i];
    }
    __syncthreads();
    float sums[4];
    multiply_halves(sums, system + (HALF + warp * 4) * A_PITCH, system);
#pragma unroll
    for (int i = 0; i < 4; i++) system[(warp * 4 + i) * A_PITCH + HALF + lane] = sums[i];
    __syncthreads();
    multiply_halves(sums, system + (HALF + warp * 4) * A_PITCH + HALF, system + HALF);
#pragma unroll
    for (int i = 0; i < 4; i++) system[(HALF + warp * 4 + i) * A_PITCH + lane] = -sums[i];
    __syncthreads();
}

// U, W, P, g and beta of the chunks that begin in 64 tokens, for one value head, and with `inverse` R. The workspace has value heads from
// `first` on.
template <typename T, unsigned D>
__device__ __forceinline__ void delta_prepare(
    const T* qkv, const T* a, const T* b, const T* a_log, const T* dt_bias, const int2* spans, const bf16* units, float* gates, bf16* u,
    bf16* w, bf16* p, bf16* inverse, unsigned tokens, unsigned key_heads, unsigned heads, unsigned first, unsigned all_key_heads,
    unsigned all_heads) {
    extern __shared__ __align__(16) unsigned char memory[];
    bf16* const keys = reinterpret_cast<bf16*>(memory);
    bf16* const others = keys + CHUNK * PITCH<D>;
    float* const system = reinterpret_cast<float*>(others + CHUNK * PITCH<D>);
    bf16* const by_v = reinterpret_cast<bf16*>(system);
    bf16* const by_k = by_v + CHUNK * PITCH<CHUNK>;
    __shared__ float g[CHUNK], beta[CHUNK], decayed[CHUNK], carry;
    const Part part;
    const unsigned head = blockIdx.y, key_head = head / (heads / key_heads), lane = threadIdx.x % WARP, row = part.row;
    const unsigned col = part.half * (D / 2), square_col = part.half * HALF;
    const unsigned end = min((blockIdx.x + 1) * CHUNK, tokens);
    const size_t cols = (size_t)(2 * all_key_heads + all_heads) * D;
    for (unsigned token = first_chunk(spans, blockIdx.x * CHUNK), n; token < end; token += n) {
        n = min(unsigned(spans[token].y), CHUNK);
        const bf16* const of_keys = units + ((size_t)key_head * tokens + token) * D;
        load_tile<D>(keys, of_keys + (size_t)key_heads * tokens * D, D, n);
        load_tile<D>(others, of_keys, D, n);
        commit_copies();
        const size_t place = (size_t)head * tokens + token;
        if (threadIdx.x < CHUNK) {
            const bool inside = threadIdx.x < n;
            const size_t at = (size_t)(token + threadIdx.x) * all_heads + first + head;
            const float rate = exp_exact(widen(a_log[first + head]));
            float sum = inside ? -rate * softplus(widen(a[at]) + widen(dt_bias[first + head])) : 0.0f;
            beta[threadIdx.x] = inside ? sigmoid(widen(b[at])) : 0.0f;
#pragma unroll
            for (unsigned distance = 1; distance < WARP; distance *= 2) {
                const float before = __shfl_up_sync(ALL_LANES, sum, distance);
                if (lane >= distance) sum += before;
            }
            g[threadIdx.x] = sum;
            if (threadIdx.x == WARP - 1) carry = sum;
        }
        wait_for_copies<0>();
        __syncthreads();
        if (threadIdx.x >= WARP && threadIdx.x < CHUNK) g[threadIdx.x] += carry;
        __syncthreads();
        if (threadIdx.x < n) {
            gates[place + threadIdx.x] = g[threadIdx.x];
            gates[(size_t)heads * tokens + place + threadIdx.x] = beta[threadIdx.x];
        }
        if (threadIdx.x < CHUNK) decayed[threadIdx.x] = beta[threadIdx.x] * exp_nonpositive(g[threadIdx.x]);
        const unsigned rows = n > row ? n - row : 0;
        float square[CHUNK / 16][4];
        clear(square);
        product<false, false, D / 16>(square, others + row * PITCH<D>, PITCH<D>, keys + square_col * PITCH<D>, PITCH<D>, 0, D / 16,
            part.pairs());
        decay_square<false>(square, g, part, 1.0f, 1.0f);
        store_rows(p + (place + row) * CHUNK + square_col, CHUNK, rows, square);
        clear(square);
        product<false, false, D / 16>(square, keys + row * PITCH<D>, PITCH<D>, keys + square_col * PITCH<D>, PITCH<D>, 0, D / 16,
            part.pairs());
        decay_square<true>(square, g, part, beta[row + lane / 4], beta[row + lane / 4 + 8]);
#pragma unroll
        for (int i = 0; i < int(CHUNK / 16); i++) {
            float* const at = system + (row + lane / 4) * A_PITCH + square_col + i * 8 + lane % 4 * 2;
            *reinterpret_cast<float2*>(at) = make_float2(square[i][0], square[i][1]);
            *reinterpret_cast<float2*>(at + 8 * A_PITCH) = make_float2(square[i][2], square[i][3]);
        }
        __syncthreads();
        load_tile<D>(others, qkv + (size_t)token * cols + (size_t)(2 * all_key_heads + first + head) * D, cols, n);
        commit_copies();
        invert(system);
        constexpr unsigned EACH = CHUNK * CHUNK / 4 / THREADS;
        float4 x[EACH];
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            const unsigned own = (threadIdx.x + i * THREADS) / (CHUNK / 4), at = (threadIdx.x + i * THREADS) % (CHUNK / 4) * 4;
            x[i] = own < HALF && at >= HALF ? make_float4(0.0f, 0.0f, 0.0f, 0.0f)
                : *reinterpret_cast<const float4*>(system + own * A_PITCH + at);
        }
        __syncthreads();
#pragma unroll
        for (unsigned i = 0; i < EACH; i++) {
            const unsigned own = (threadIdx.x + i * THREADS) / (CHUNK / 4), at = (threadIdx.x + i * THREADS) % (CHUNK / 4) * 4;
            const float plain[4] = {x[i].x, x[i].y, x[i].z, x[i].w};
            float of_v[4], of_k[4];
#pragma unroll
            for (int k = 0; k < 4; k++) of_v[k] = plain[k] * beta[at + k], of_k[k] = plain[k] * decayed[at + k];
            Vec<bf16, 4>::narrow(of_v).store(by_v + own * PITCH<CHUNK> + at);
            Vec<bf16, 4>::narrow(of_k).store(by_k + own * PITCH<CHUNK> + at);
            if (inverse != nullptr && own < n) Vec<bf16, 4>::narrow(plain).store(inverse + (place + own) * CHUNK + at);
        }
        wait_for_copies<0>();
        __syncthreads();
        float result[D / 16][4];
        clear(result);
        product<false, true, CHUNK / 16>(result, by_v + row * PITCH<CHUNK>, PITCH<CHUNK>, others + col, PITCH<D>, 0, part.below());
        store_rows(u + (place + row) * D + col, D, rows, result);
        clear(result);
        product<false, true, CHUNK / 16>(result, by_k + row * PITCH<CHUNK>, PITCH<CHUNK>, keys + col, PITCH<D>, 0, part.below());
        store_rows(w + (place + row) * D + col, D, rows, result);
        __syncthreads();
    }
}

// The state of one value head, or 64 of its columns, through every document that begins in `window` tokens. Forward: the output. Otherwise,
// for the backward pass, N and the states before all chunks but the first of each document.
template <typename T, unsigned D, bool FORWARD>
__device__ __forceinline__ void delta_scan(
    const int2* spans, const bf16* units, const float* gates, const bf16* u, const bf16* w, const bf16* p, T* out, bf16* corrections,
    bf16* states, unsigned tokens, unsigned window, unsigned key_heads, unsigned heads, unsigned first, unsigned all_heads) {
    constexpr unsigned COLS = 64, ACROSS = WARPS / (D / 16), TILES = COLS / 8 / ACROSS;
    extern __shared__ __align__(16) unsigned char memory[];
    bf16* const state = reinterpret_cast<bf16*>(memory);
    bf16* const new_rows = state + D * PITCH<COLS>;
    bf16* const scaled = new_rows + CHUNK * PITCH<COLS>;
    bf16* const keys = scaled + CHUNK * PITCH<COLS>;
    bf16* const of_w = keys + CHUNK * PITCH<D>;
    bf16* const queries = of_w + CHUNK * PITCH<D>;
    bf16* const of_p = queries + CHUNK * PITCH<D>;
    const unsigned head = blockIdx.y, key_head = head / (heads / key_heads), col = blockIdx.z * COLS, lane = threadIdx.x % WARP;
    // The warp's part of 64 tokens, and of the state.
    const Part part;
    const unsigned row = part.row, part_col = part.half * (COLS / 2), warp = threadIdx.x / WARP, slots = (tokens + CHUNK - 1) / CHUNK;
    const unsigned down = warp % (D / 16) * 16, across = warp / (D / 16) * (COLS / ACROSS);
    const unsigned end = min((blockIdx.x + 1) * window, tokens);
    const size_t head_row = (size_t)head * tokens;
    const bf16* const of_queries = units + (size_t)key_head * tokens * D;
    const bf16* const of_keys = of_queries + (size_t)key_heads * tokens * D;
    auto load_early = [&](unsigned token, unsigned n) {
        load_tile<D>(of_w, w + (head_row + token) * D, D, n);
        if (FORWARD) load_tile<D>(queries, of_queries + (size_t)token * D, D, n);
        commit_copies();
    };
    auto load_late = [&](unsigned token, unsigned n) {
        load_tile<COLS>(new_rows, u + (head_row + token) * D + col, D, n);
        load_tile<D>(keys, of_keys + (size_t)token * D, D, n);
        if (FORWARD) load_tile<CHUNK>(of_p, p + (head_row + token) * CHUNK, CHUNK, n);
        commit_copies();
    };
    const int2 before = spans[blockIdx.x * window];
    for (unsigned document = blockIdx.x * window + (before.x == 0 ? 0 : before.y), length; document < end; document += length) {
        length = spans[document].y;
        float sums[TILES][4];
        clear(sums);
        __syncthreads();
        store_tile(state + down * PITCH<COLS> + across, PITCH<COLS>, sums);
        load_early(document, min(length, CHUNK));
        load_late(document, min(length, CHUNK));
        for (unsigned done = 0; done < length; done += CHUNK) {
            const unsigned token = document + done, n = min(length - done, CHUNK), left = length - done - n;
            const float* const g = gates + head_row + token;
            const unsigned above = row + lane / 4, below = above + 8, rows = n > row ? n - row : 0;
            const float last = g[n - 1], of_above = above < n ? g[above] : last, of_below = below < n ? g[below] : last;
            wait_for_copies<1>();
            __syncthreads();
            float correction[COLS / 16][4], result[COLS / 16][4];
            clear(correction);
            product<false, true, D / 16>(correction, of_w + row * PITCH<D>, PITCH<D>, state + part_col, PITCH<COLS>);
            if (FORWARD) {
                clear(result);
                product<false, true, D / 16>(result, queries + row * PITCH<D>, PITCH<D>, state + part_col, PITCH<COLS>);
                scale_rows(result, exp_nonpositive(of_above), exp_nonpositive(of_below));
            } else if (done > 0) {
                store_rows(states + (((size_t)head * slots + token / CHUNK) * D + down) * D + col + across, D, 16, sums);
            }
            wait_for_copies<0>();
            __syncthreads();
            if (left > 0) load_early(token + CHUNK, min(left, CHUNK));
#pragma unroll
            for (int i = 0; i < int(COLS / 16); i++) {
                const bf16* const at = new_rows + above * PITCH<COLS> + part_col + i * 8 + lane % 4 * 2;
                float x[2];
                Word<bf16>::widen(*reinterpret_cast<const unsigned*>(at), x);
                correction[i][0] = x[0] - correction[i][0], correction[i][1] = x[1] - correction[i][1];
                Word<bf16>::widen(*reinterpret_cast<const unsigned*>(at + 8 * PITCH<COLS>), x);
                correction[i][2] = x[0] - correction[i][2], correction[i][3] = x[1] - correction[i][3];
            }
            if (FORWARD) store_tile(new_rows + row * PITCH<COLS> + part_col, PITCH<COLS>, correction);
            else store_rows(corrections + (head_row + token + row) * D + col + part_col, D, rows, correction);
            scale_rows(correction, exp_nonpositive(last - of_above), exp_nonpositive(last - of_below));
            store_tile(scaled + row * PITCH<COLS> + part_col, PITCH<COLS>, correction);
            __syncthreads();
            if (FORWARD) {
                product<false, true, CHUNK / 16>(result, of_p + row * PITCH<CHUNK>, PITCH<CHUNK>, new_rows + part_col, PITCH<COLS>, 0,
                    part.below());
                T* const at = out + ((size_t)(token + row) * all_heads + first + head) * D + col + part_col;
                store_rows(at, (size_t)all_heads * D, rows, result);
            }
            const float decay = exp_nonpositive(last);
            scale_rows(sums, decay, decay);
            product<true, true, CHUNK / 16>(sums, keys + down, PITCH<D>, scaled + across, PITCH<COLS>);
            store_tile(state + down * PITCH<COLS> + across, PITCH<COLS>, sums);
            __syncthreads();
            if (left > 0) load_late(token + CHUNK, min(left, CHUNK));
        }
        wait_for_copies<0>();
    }
}

// The gradient of the state of one value head, or of 64 of its columns, through every document that begins in `window` tokens, from its
// end: the gradients of N, and of the states behind all chunks but the last of each document.
template <typename T, unsigned D>
__device__ __forceinline__ void delta_scan_backward(
    const int2* spans, const bf16* units, const float* gates, const bf16* w, const bf16* p, const T* dout, bf16* dcorrections,
        bf16* dstates,
    unsigned tokens, unsigned window, unsigned key_heads, unsigned heads, unsigned first, unsigned all_heads) {
    constexpr unsigned COLS = 64, ACROSS = WARPS / (D / 16), TILES = COLS / 8 / ACROSS;
    extern __shared__ __align__(16) unsigned char memory[];
    bf16* const dstate = reinterpret_cast<bf16*>(memory);
    bf16* const of_dout = dstate + D * PITCH<COLS>;
    bf16* const scaled = of_dout + CHUNK * PITCH<COLS>;
    bf16* const keys = scaled + CHUNK * PITCH<COLS>;
    bf16* const of_w = keys + CHUNK * PITCH<D>;
    bf16* const queries = of_w + CHUNK * PITCH<D>;
    bf16* const of_p = queries + CHUNK * PITCH<D>;
    const unsigned head = blockIdx.y, key_head = head / (heads / key_heads), col = blockIdx.z * COLS, lane = threadIdx.x % WARP;
    // The warp's part of 64 tokens, and of the state.
    const Part part;
    const unsigned row = part.row, part_col = part.half * (COLS / 2), warp = threadIdx.x / WARP, slots = (tokens + CHUNK - 1) / CHUNK;
    const unsigned down = warp % (D / 16) * 16, across = warp / (D / 16) * (COLS / ACROSS);
    const unsigned end = min((blockIdx.x + 1) * window, tokens);
    const size_t head_row = (size_t)head * tokens;
    const bf16* const of_queries = units + (size_t)key_head * tokens * D;
    const bf16* const of_keys = of_queries + (size_t)key_heads * tokens * D;
    auto load_early = [&](unsigned token, unsigned n) {
        load_tile<D>(keys, of_keys + (size_t)token * D, D, n);
        load_tile<CHUNK>(of_p, p + (head_row + token) * CHUNK, CHUNK, n);
    };
    auto load_late = [&](unsigned token, unsigned n) {
        load_tile<COLS>(of_dout, dout + ((size_t)token * all_heads + first + head) * D + col, (size_t)all_heads * D, n);
        commit_copies();
        load_tile<D>(of_w, w + (head_row + token) * D, D, n);
        load_tile<D>(queries, of_queries + (size_t)token * D, D, n);
        commit_copies();
    };
    const int2 before = spans[blockIdx.x * window];
    for (unsigned document = blockIdx.x * window + (before.x == 0 ? 0 : before.y), length; document < end; document += length) {
        length = spans[document].y;
        float sums[TILES][4];
        clear(sums);
        __syncthreads();
        store_tile(dstate + down * PITCH<COLS> + across, PITCH<COLS>, sums);
        const unsigned last_chunk = (length - 1) / CHUNK * CHUNK;
        load_early(document + last_chunk, length - last_chunk);
        load_late(document + last_chunk, length - last_chunk);
        for (unsigned done = last_chunk;; done -= CHUNK) {
            const unsigned token = document + done, n = min(length - done, CHUNK);
            const float* const g = gates + head_row + token;
            const unsigned above = row + lane / 4, below = above + 8, rows = n > row ? n - row : 0;
            const float last = g[n - 1], of_above = above < n ? g[above] : last, of_below = below < n ? g[below] : last;
            wait_for_copies<1>();
            __syncthreads();
            float gradient[COLS / 16][4];
            clear(gradient);
            product<false, true, D / 16>(gradient, keys + row * PITCH<D>, PITCH<D>, dstate + part_col, PITCH<COLS>);
            scale_rows(gradient, exp_nonpositive(last - of_above), exp_nonpositive(last - of_below));
            product<true, true, CHUNK / 16>(gradient, of_p + row, PITCH<CHUNK>, of_dout + part_col, PITCH<COLS>, part.quarter);
            store_rows(dcorrections + (head_row + token + row) * D + col + part_col, D, rows, gradient);
            if (done < last_chunk) {
                store_rows(dstates + (((size_t)head * slots + token / CHUNK) * D + down) * D + col + across, D, 16, sums);
            }
            for (unsigned i = threadIdx.x; i < CHUNK * COLS / 8; i += THREADS) {
                const unsigned at = i / (COLS / 8) * PITCH<COLS> + i % (COLS / 8) * 8, own = i / (COLS / 8);
                const float decay = exp_nonpositive(own < n ? g[own] : last);
                float x[8];
                Vec<bf16>::load(of_dout + at).widen(x);
#pragma unroll
                for (int k = 0; k < 8; k++) x[k] *= decay;
                Vec<bf16>::narrow(x).store(scaled + at);
            }
            __syncthreads();
            if (done > 0) load_early(token - CHUNK, CHUNK);
            scale_rows(gradient, -1.0f, -1.0f);
            store_tile(of_dout + row * PITCH<COLS> + part_col, PITCH<COLS>, gradient);
            wait_for_copies<0>();
            __syncthreads();
            const float decay = exp_nonpositive(last);
            scale_rows(sums, decay, decay);
            product<true, true, CHUNK / 16>(sums, queries + down, PITCH<D>, scaled + across, PITCH<COLS>);
            product<true, true, CHUNK / 16>(sums, of_w + down, PITCH<D>, of_dout + across, PITCH<COLS>);
            store_tile(dstate + down * PITCH<COLS> + across, PITCH<COLS>, sums);
            __syncthreads();
            if (done == 0) break;
            load_late(token - CHUNK, CHUNK);
        }
    }
}

// Sums of the columns of both halves of a row, as two warps have them.
typedef float RowSums[2][CHUNK];

// Writes the sums of a warp's rows.
__device__ __forceinline__ void store_sums(RowSums& sums, const Part& part, float2 own) {
    const unsigned lane = threadIdx.x % WARP;
    if (lane % 4 == 0) sums[part.half][part.row + lane / 4] = own.x, sums[part.half][part.row + lane / 4 + 8] = own.y;
}

// Adds the gradients `c` of a warp's part of the queries or keys of one chunk to those of earlier value heads in `partial`.
template <unsigned D>
__device__ __forceinline__ void add_readers(float (&c)[D / 16][4], float* partial, bool is_first, bool is_last, unsigned rows) {
    const unsigned lane = threadIdx.x % WARP;
    float* const at = partial + lane / 4 * D + lane % 4 * 2;
    const bool is_above = lane / 4 < rows, is_below = lane / 4 + 8 < rows;
#pragma unroll
    for (int n = 0; n < int(D / 16); n++) {
        float2* const above = reinterpret_cast<float2*>(at + n * 8);
        float2* const below = reinterpret_cast<float2*>(at + 8 * D + n * 8);
        if (!is_first) {
            const float2 x = is_above ? *above : make_float2(0.0f, 0.0f), y = is_below ? *below : make_float2(0.0f, 0.0f);
            c[n][0] += x.x, c[n][1] += x.y, c[n][2] += y.x, c[n][3] += y.y;
        }
        if (!is_last) {
            if (is_above) *above = make_float2(c[n][0], c[n][1]);
            if (is_below) *below = make_float2(c[n][2], c[n][3]);
        }
    }
}

// Writes the gradients of vectors before they were scaled to length `scale`, from those of the scaled vectors `units`.
template <typename T, unsigned D>
__device__ __forceinline__ void store_vectors(
    float (&c)[D / 16][4], const bf16* units, const float* lengths, float scale, RowSums& sums, const Part& part, T* out, size_t pitch,
    unsigned rows) {
    const unsigned lane = threadIdx.x % WARP, above = part.row + lane / 4, below = above + 8;
    store_sums(sums, part, row_dots(c, units, PITCH<D>));
    __syncthreads();
    const float inverse = __frcp_rn(scale);
    const float along_above = (sums[0][above] + sums[1][above]) * inverse, along_below = (sums[0][below] + sums[1][below]) * inverse;
    const float of_above = lane / 4 < rows ? lengths[lane / 4] : 0.0f, of_below = lane / 4 + 8 < rows ? lengths[lane / 4 + 8] : 0.0f;
    const bf16* const own = units + lane / 4 * PITCH<D> + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < int(D / 16); n++) {
        float x[2], y[2];
        Word<bf16>::widen(*reinterpret_cast<const unsigned*>(own + n * 8), x);
        Word<bf16>::widen(*reinterpret_cast<const unsigned*>(own + 8 * PITCH<D> + n * 8), y);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            c[n][i] = of_above * fmaf(-along_above, x[i], scale * c[n][i]);
            c[n][2 + i] = of_below * fmaf(-along_below, y[i], scale * c[n][2 + i]);
        }
    }
    store_rows(out, pitch, rows, c);
}

// Gradients of the gates of a chunk for one value head, from those of g; `whole` is that of the chunk's decay. Adds the parts of the
// gradients of a_log and dt_bias to `sums` and to what lies `pitch` behind it.
template <typename T>
__device__ __forceinline__ void store_gates(
    float (&dg)[CHUNK], float whole, const T* a, T* da, float rate, float bias, unsigned heads, unsigned n, float* sums, size_t pitch) {
    __shared__ float carry[2];
    const unsigned lane = threadIdx.x % WARP, row = threadIdx.x;
    if (row < CHUNK) {
        // From the last token to the first.
        const unsigned from_end = CHUNK - 1 - row;
        float dal = from_end < n ? dg[from_end] : 0.0f;
        if (row == 0) dal += whole;
#pragma unroll
        for (unsigned distance = 1; distance < WARP; distance *= 2) {
            const float before = __shfl_up_sync(ALL_LANES, dal, distance);
            if (lane >= distance) dal += before;
        }
        dg[from_end] = dal;
    }
    __syncthreads();
    float of_rate = 0.0f, of_bias = 0.0f;
    if (row < CHUNK) {
        const float dal = dg[row] + (row < WARP ? dg[WARP] : 0.0f);
        if (row < n) {
            const float gate = widen(a[(size_t)row * heads]) + bias;
            of_bias = -rate * sigmoid(gate) * dal, of_rate = -rate * softplus(gate) * dal;
            da[(size_t)row * heads] = narrow<T>(of_bias);
        }
        of_rate = warp_sum(of_rate), of_bias = warp_sum(of_bias);
        if (row == WARP) carry[0] = of_rate, carry[1] = of_bias;
    }
    __syncthreads();
    if (row == 0) {
        sums[0] += of_rate + carry[0];
        sums[pitch] += of_bias + carry[1];
    }
}

// Gradients of the inputs of the chunks that begin in 64 tokens, for the value heads of one key head. `sums`, [2, blocks, all_heads], has
// the parts of the gradients of a_log and dt_bias.
template <typename T, unsigned D>
__device__ __forceinline__ void delta_gradients(
    const T* dout, const T* qkv, const T* a, const T* a_log, const T* dt_bias, const int2* spans, const bf16* units, const float* lengths,
    const float* gates, const bf16* u, const bf16* w, const bf16* inverse, const bf16* corrections, const bf16* dcorrections,
    const bf16* states, const bf16* dstates, float* partials, float* sums, T* dqkv, T* da, T* db, unsigned tokens, unsigned key_heads,
    unsigned heads, unsigned first, unsigned all_key_heads, unsigned all_heads) {
    constexpr int STEPS = D / 16, TILES = D / 16, SQUARE = CHUNK / 16;
    extern __shared__ __align__(16) unsigned char memory[];
    bf16* const keys = reinterpret_cast<bf16*>(memory);
    bf16* const queries = keys + CHUNK * PITCH<D>;
    bf16* const state = queries + CHUNK * PITCH<D>;
    bf16* const of_u = state;
    bf16* const of_w = state + CHUNK * PITCH<D>;
    bf16* const tile = of_w + CHUNK * PITCH<D>;
    bf16* const square = tile + CHUNK * PITCH<D>;
    __shared__ float g[CHUNK], beta[CHUNK], dg[CHUNK], by_warp[2][WARPS];
    __shared__ RowSums of_queries, of_vectors, gained, lost, of_values;
    const Part part;
    const unsigned key_head = blockIdx.y, sharing = heads / key_heads, lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned row = part.row, col = part.half * (D / 2), square_col = part.half * HALF, slots = (tokens + CHUNK - 1) / CHUNK;
    const unsigned begin = blockIdx.x * CHUNK, end = min(begin + CHUNK, tokens), above = row + lane / 4, below = above + 8;
    const unsigned cols = (2 * all_key_heads + all_heads) * D, out_cols = all_heads * D;
    const float scale = __frcp_rn(__fsqrt_rn(float(D)));
    for (unsigned i = threadIdx.x; i < 2 * sharing; i += THREADS) {
        sums[((size_t)(i / sharing) * gridDim.x + blockIdx.x) * all_heads + first + key_head * sharing + i % sharing] = 0.0f;
    }
    for (unsigned token = first_chunk(spans, begin), n; token < end; token += n) {
        const int2 span = spans[token];
        n = min(unsigned(span.y), CHUNK);
        const bool has_state = span.x > 0, has_next = unsigned(span.y) > CHUNK;
        const unsigned rows = n > row ? n - row : 0;
        const unsigned unit = key_head * tokens + token, all_units = key_heads * tokens;
        __syncthreads();
        load_tile<D>(keys, units + (size_t)(all_units + unit) * D, D, n);
        for (unsigned reader = 0; reader < sharing; reader++) {
            const unsigned head = key_head * sharing + reader, all_head = first + head;
            const bool is_first = reader == 0, is_last = reader + 1 == sharing;
            const unsigned place = head * tokens + token;
            const size_t slot = (size_t)(head * slots + token / CHUNK) * D * D;
            __syncthreads();
            load_tile<D>(queries, units + (size_t)unit * D, D, n);
            if (has_state) load_tile<D, D>(state, states + slot, D, D);
            load_tile<D>(tile, corrections + (size_t)place * D, D, n);
            commit_copies();
            if (threadIdx.x < CHUNK) {
                g[threadIdx.x] = gates[place + min(threadIdx.x, n - 1)];
                beta[threadIdx.x] = threadIdx.x < n ? gates[heads * tokens + place + threadIdx.x] : 0.0f;
            }
            float c[TILES][4];
            unsigned dw[TILES][2];
            wait_for_copies<0>();
            __syncthreads();
            const float last = g[n - 1];
            clear(c);
            {
                unsigned left[STEPS][4];
                if (has_state) {
                    read_left(left, dcorrections + (size_t)(place + row) * D, D, rows);
                    product<false, STEPS>(c, left, state + col * PITCH<D>, PITCH<D>);
                    scale_rows(c, -1.0f, -1.0f);
                }
                narrow_result(dw, c);
                read_left(left, dout + (size_t)(token + row) * out_cols + all_head * D, out_cols, rows);
                float scores[SQUARE][4];
                clear(scores);
                product<false, STEPS>(scores, left, tile + square_col * PITCH<D>, PITCH<D>, part.pairs());
                decay_square<false>(scores, g, part, 1.0f, 1.0f);
                store_tile(square + row * PITCH<CHUNK> + square_col, PITCH<CHUNK>, scores);
                clear(c);
                if (has_state) {
                    product<false, STEPS>(c, left, state + col * PITCH<D>, PITCH<D>);
                    scale_rows(c, exp_nonpositive(g[above]), exp_nonpositive(g[below]));
                }
            }
            __syncthreads();
            float dot = 0.0f;
            if (has_next) {
#pragma unroll 4
                for (unsigned vec = threadIdx.x; vec < D * D / 8; vec += THREADS) {
                    bf16* const at = state + vec / (D / 8) * PITCH<D> + vec % (D / 8) * 8;
                    const Vec<bf16> next = Vec<bf16>::load(dstates + slot + vec * 8);
                    if (has_state) {
                        float x[8], y[8];
                        next.widen(x);
                        Vec<bf16>::load(at).widen(y);
#pragma unroll
                        for (int k = 0; k < 8; k++) dot = fmaf(x[k], y[k], dot);
                    }
                    next.store(at);
                }
            }
            product<false, true, SQUARE>(c, square + row * PITCH<CHUNK>, PITCH<CHUNK>, keys + col, PITCH<D>, 0, part.below());
            store_sums(of_queries, part, row_dots(c, queries + row * PITCH<D> + col, PITCH<D>));
            add_readers<D>(c, partials + (size_t)(unit + row) * D + col, is_first, is_last, rows);
            if (is_last) {
                store_vectors<T, D>(c, queries + row * PITCH<D> + col, lengths + unit + row, scale, of_vectors, part,
                    dqkv + (size_t)(token + row) * cols + col + (first / sharing + key_head) * D, cols, rows);
            } else {
                __syncthreads();
            }
            float dk[TILES][4];
            clear(dk);
            float2 ends = make_float2(0.0f, 0.0f);
            if (has_next) {
                product<false, false, STEPS>(dk, tile + row * PITCH<D>, PITCH<D>, state + col * PITCH<D>, PITCH<D>);
                scale_rows(dk, exp_nonpositive(last - g[above]), exp_nonpositive(last - g[below]));
                ends = row_dots(dk, keys + row * PITCH<D> + col, PITCH<D>);
            }
            const float of_warp = warp_sum(lane % 4 == 0 ? ends.x + ends.y : 0.0f), state_dot = warp_sum(dot);
            if (lane == 0) by_warp[0][warp] = of_warp, by_warp[1][warp] = state_dot;
            product<true, true, SQUARE>(dk, square + row, PITCH<CHUNK>, queries + col, PITCH<D>, part.quarter);
            __syncthreads();
            load_tile<D>(tile, dcorrections + (size_t)place * D, D, n);
            load_tile<CHUNK>(square, inverse + (size_t)place * CHUNK, CHUNK, n);
            load_tile<D>(of_u, u + (size_t)place * D, D, n);
            load_tile<D>(of_w, w + (size_t)place * D, D, n);
            commit_copies();
            // The queries are no longer needed.
            store_tile(queries + row * PITCH<D> + col, PITCH<D>, dw);
            wait_for_copies<0>();
            __syncthreads();
            clear(c);
            product<true, true, SQUARE>(c, square + row, PITCH<CHUNK>, tile + col, PITCH<D>, part.quarter);
            bf16* const own_tile = tile + row * PITCH<D> + col;
            __syncthreads();
            store_tile(own_tile, PITCH<D>, c);
            {
                const T* const at = qkv + (size_t)(token + above) * cols + (2 * all_key_heads + all_head) * D + col + lane % 4 * 2;
                float2 own = make_float2(0.0f, 0.0f);
#pragma unroll
                for (int i = 0; i < TILES; i++) {
                    float x[2] = {}, y[2] = {};
                    if (above < n) Word<T>::widen(*reinterpret_cast<const unsigned*>(at + i * 8), x);
                    if (below < n) Word<T>::widen(*reinterpret_cast<const unsigned*>(at + 8 * cols + i * 8), y);
                    own.x = fmaf(c[i][1], x[1], fmaf(c[i][0], x[0], own.x));
                    own.y = fmaf(c[i][3], y[1], fmaf(c[i][2], y[0], own.y));
                }
                store_sums(of_values, part, make_float2(warp_sum(own.x, 4), warp_sum(own.y, 4)));
                scale_rows(c, beta[above], beta[below]);
                store_rows(dqkv + (size_t)(token + row) * cols + col + (2 * all_key_heads + all_head) * D, cols, rows, c);
            }
            __syncthreads();
            float system[SQUARE][4];
            clear(system);
            product<false, false, STEPS>(system, tile + row * PITCH<D>, PITCH<D>, of_u + square_col * PITCH<D>, PITCH<D>, 0, STEPS,
                part.pairs());
            clear(c);
            if (has_state) {
                product<true, true, SQUARE>(c, square + row, PITCH<CHUNK>, queries + col, PITCH<D>, part.quarter);
                __syncthreads();
                store_tile(own_tile, PITCH<D>, c);
                scale_rows(c, beta[above] * exp_nonpositive(g[above]), beta[below] * exp_nonpositive(g[below]));
                __syncthreads();
                product<false, false, STEPS>(system, tile + row * PITCH<D>, PITCH<D>, of_w + square_col * PITCH<D>, PITCH<D>, 0, STEPS,
                    part.pairs());
            }
            decay_square<true>(system, g, part, -beta[above], -beta[below]);
            store_tile(square + row * PITCH<CHUNK> + square_col, PITCH<CHUNK>, system);
            __syncthreads();
            product<false, true, SQUARE>(c, square + row * PITCH<CHUNK>, PITCH<CHUNK>, keys + col, PITCH<D>, 0, part.below());
            product<true, true, SQUARE>(dk, square + row, PITCH<CHUNK>, keys + col, PITCH<D>, part.quarter);
            store_sums(gained, part, row_dots(c, keys + row * PITCH<D> + col, PITCH<D>));
            store_sums(lost, part, row_dots(dk, keys + row * PITCH<D> + col, PITCH<D>));
#pragma unroll
            for (int i = 0; i < TILES; i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) dk[i][k] += c[i][k];
            }
            add_readers<D>(dk, partials + (size_t)(all_units + unit + row) * D + col, is_first, is_last, rows);
            if (is_last) {
                store_vectors<T, D>(dk, keys + row * PITCH<D> + col, lengths + all_units + unit + row, 1.0f, of_vectors, part,
                    dqkv + (size_t)(token + row) * cols + col + (all_key_heads + first / sharing + key_head) * D, cols, rows);
            } else {
                __syncthreads();
            }
            const size_t gate = (size_t)token * all_heads + all_head;
            if (threadIdx.x < n) {
                const unsigned own = threadIdx.x;
                const float gain = gained[0][own] + gained[1][own], of_v = of_values[0][own] + of_values[1][own];
                dg[own] = of_queries[0][own] + of_queries[1][own] + gain - (lost[0][own] + lost[1][own]);
                db[gate + (size_t)own * all_heads] = narrow<T>((1.0f - beta[own]) * fmaf(beta[own], of_v, gain));
            }
            float ending = 0.0f, of_states = 0.0f;
#pragma unroll
            for (int i = 0; i < int(WARPS); i++) ending += by_warp[0][i], of_states += by_warp[1][i];
            __syncthreads();
            store_gates(dg, fmaf(exp_nonpositive(last), of_states, ending), a + gate, da + gate, exp_exact(widen(a_log[all_head])),
                widen(dt_bias[all_head]), all_heads, n, sums + (size_t)blockIdx.x * all_heads + all_head, (size_t)gridDim.x * all_heads);
        }
    }
}

#define DELTA(NAME, T, D) \
    extern "C" __global__ void __launch_bounds__(THREADS) delta_units_##D##_##NAME(const T* qkv, bf16* units, float* lengths, \
        unsigned tokens, unsigned key_heads, unsigned first, unsigned all_key_heads, unsigned cols) { \
        delta_units<T, D>(qkv, units, lengths, tokens, key_heads, first, all_key_heads, cols); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 3) delta_prepare_##D##_##NAME(const T* qkv, const T* a, const T* b, \
        const T* a_log, const T* dt_bias, const int2* spans, const bf16* units, float* gates, bf16* u, bf16* w, bf16* p, bf16* inverse, \
        unsigned tokens, unsigned key_heads, unsigned heads, unsigned first, unsigned all_key_heads, unsigned all_heads) { \
        delta_prepare<T, D>(qkv, a, b, a_log, dt_bias, spans, units, gates, u, w, p, inverse, tokens, key_heads, heads, first, \
            all_key_heads, all_heads); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_scan_##D##_##NAME(const int2* spans, const bf16* units, \
        const float* gates, \
        const bf16* u, const bf16* w, const bf16* p, T* out, unsigned tokens, unsigned window, unsigned key_heads, unsigned heads, \
        unsigned first, unsigned all_heads) { \
        delta_scan<T, D, true>(spans, units, gates, u, w, p, out, nullptr, nullptr, tokens, window, key_heads, heads, first, all_heads); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_scan_backward_##D##_##NAME(const int2* spans, const bf16* units, \
        const float* gates, const bf16* w, const bf16* p, const T* dout, bf16* dcorrections, bf16* dstates, unsigned tokens, \
        unsigned window, unsigned key_heads, unsigned heads, unsigned first, unsigned all_heads) { \
        delta_scan_backward<T, D>(spans, units, gates, w, p, dout, dcorrections, dstates, tokens, window, key_heads, heads, first, \
            all_heads); \
    } \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_gradients_##D##_##NAME(const T* dout, const T* qkv, const T* a, \
        const T* a_log, const T* dt_bias, const int2* spans, const bf16* units, const float* lengths, const float* gates, const bf16* u, \
        const bf16* w, const bf16* inverse, const bf16* corrections, const bf16* dcorrections, const bf16* states, const bf16* dstates, \
        float* partials, float* sums, T* dqkv, T* da, T* db, unsigned tokens, unsigned key_heads, unsigned heads, unsigned first, \
        unsigned all_key_heads, unsigned all_heads) { \
        delta_gradients<T, D>(dout, qkv, a, a_log, dt_bias, spans, units, lengths, gates, u, w, inverse, corrections, dcorrections, \
            states, dstates, partials, sums, dqkv, da, db, tokens, key_heads, heads, first, all_key_heads, all_heads); \
    }
DELTA(bf16, bf16, 64)
DELTA(bf16, bf16, 128)
DELTA(f16, f16, 64)
DELTA(f16, f16, 128)

// The states before all chunks and the corrections, for the backward pass; no operand has the layer's format.
#define STATES(D) \
    extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_states_##D(const int2* spans, const bf16* units, const float* gates, \
        const bf16* u, const bf16* w, bf16* corrections, bf16* states, unsigned tokens, unsigned window, unsigned key_heads, \
        unsigned heads) { \
        delta_scan<bf16, D, false>(spans, units, gates, u, w, nullptr, nullptr, corrections, states, tokens, window, key_heads, heads, 0, \
            0); \
    }
STATES(64)
STATES(128)
