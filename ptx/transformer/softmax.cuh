// Parts of kernels that read rows of logits: cross_entropy.cu and teacher.cu.
//
// A row may start anywhere: its first and last elements are taken one by one, those between them 16 bytes at a time.
#pragma once
#include "common.cuh"
#include "math.cuh"
#include "reduce.cuh"

constexpr unsigned THREADS = 512;
// Vectors of a thread that are under way together.
constexpr int BATCH = 4;

// Where one row's whole vectors lie: `vectors` of them from column `head` on.
template <typename T>
struct Row {
    unsigned cols, head, vectors;

    __device__ __forceinline__ Row(const T* row, unsigned cols) : cols(cols) {
        constexpr unsigned N = WIDE<T>;
        const unsigned past = unsigned((size_t)row / sizeof(T)) % N;
        head = min(cols, (N - past) % N);
        vectors = (cols - head) / N;
    }
    __device__ __forceinline__ unsigned column(unsigned vector) const { return head + vector * WIDE<T>; }
    // Elements outside of the vectors, fewer than two vectors, and their columns.
    __device__ __forceinline__ unsigned singles() const { return cols - vectors * WIDE<T>; }
    __device__ __forceinline__ unsigned single(unsigned i) const { return i < head ? i : i + vectors * WIDE<T>; }
};

// The word of a target: the lowest bits are its token, the bits above are the units that its weight lacks; see src/data/loss_weight.rs.
constexpr unsigned ID_BITS = 19;
constexpr int WHOLE_UNITS = 1 << (31 - ID_BITS);

// The column of a row's target, or a column that no tile has.
__device__ __forceinline__ unsigned target_column(int word, unsigned vocab_start) {
    return word < 0 ? ~0u : (unsigned(word) & ((1u << ID_BITS) - 1)) - vocab_start;
}

__device__ __forceinline__ float target_weight(int word) {
    return word < 0 ? 0.0f : float(WHOLE_UNITS - (word >> ID_BITS)) * (1.0f / WHOLE_UNITS);
}

// Passes over NaN.
__device__ __forceinline__ float larger(float a, float b) { return fmaxf(a, b); }

// The largest of some logits, and the sum of e^(logit - max).
struct Softmax {
    float max = -INFINITY;
    float sum = 0.0f;

    template <typename V, int COUNT, typename Cap>
    __device__ __forceinline__ void extend(const V (&batch)[COUNT], Cap cap) {
        float x[COUNT][V::N];
        float top = max;
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
            batch[i].widen(x[i]);
#pragma unroll
            for (int lane = 0; lane < V::N; lane++) {
                x[i][lane] = cap(x[i][lane]).value;
                top = larger(top, x[i][lane]);
            }
        }
        // As long as all are minus infinity their exponentials are as good as 0, not those of NaN.
        const float base = top == -INFINITY ? 0.0f : top;
        sum *= exp_nonpositive(max - base);
#pragma unroll
        for (int i = 0; i < COUNT; i++) {
#pragma unroll
            for (int lane = 0; lane < V::N; lane++) sum += exp_nonpositive(x[i][lane] - base);
        }
        max = top;
    }
};

template <typename T, typename Cap>
__device__ __forceinline__ Softmax softmax_of_thread(const T* logits, const Row<T>& row, Cap cap) {
    Softmax softmax;
    unsigned v = threadIdx.x;
    for (; v + (BATCH - 1) * THREADS < row.vectors; v += BATCH * THREADS) {
        Vec<T> batch[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) batch[i] = Vec<T>::load(logits + row.column(v + i * THREADS));
        softmax.extend(batch, cap);
    }
    for (; v < row.vectors; v += THREADS) softmax.extend({Vec<T>::load(logits + row.column(v))}, cap);
    if (threadIdx.x < row.singles()) softmax.extend({Vec<T, 1>::load(logits + row.single(threadIdx.x))}, cap);
    return softmax;
}

// Numbers that a step reports of a loss.
constexpr unsigned REPORT_WORDS = 6;

// A 64-bit float is two words, which may begin at any of them.
__device__ __forceinline__ double read_double(const int* words) { return __hiloint2double(words[1], words[0]); }

__device__ __forceinline__ void write_double(int* words, double x) {
    words[0] = __double2loint(x);
    words[1] = __double2hiint(x);
}
