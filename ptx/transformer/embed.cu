// Token and position embeddings, and their gradients.
#include "common.cuh"

// Vectors of a row in a thread's registers at a time; the launcher knows this.
constexpr int EMBED_VECS = 2;
constexpr unsigned SORT_WARPS = 8;
// Goes after every entry of a table.
constexpr int NO_ENTRY = 0x7fffffff;
// Rows whose loads are in flight at a time.
constexpr unsigned BATCH = 8;

// out[t] = wte[tokens[t]] + wpe[positions[t]]; one block per token. Without wpe a copy to the bit.
// Reads and writes T x C once: 16384 x 2560 in bf16 is 168 MB, 39 us at 4.3 TB/s.
template <typename T, int N>
__device__ __forceinline__ void embed(
    const int* tokens, const int* positions, const T* wte, const T* wpe, T* out, unsigned cols) {
    const unsigned t = blockIdx.x;
    wte += (size_t)tokens[t] * cols;
    if (wpe != nullptr) wpe += (size_t)positions[t] * cols;
    out += (size_t)t * cols;
    for (unsigned first = threadIdx.x * N; first < cols; first += EMBED_VECS * blockDim.x * N) {
        const auto col = [=](int k) { return first + k * blockDim.x * N; };
        Vec<T, N> held[EMBED_VECS];
#pragma unroll
        for (int k = 0; k < EMBED_VECS; k++) {
            if (col(k) < cols) held[k] = Vec<T, N>::load(wte + col(k));
        }
        if (wpe != nullptr) {
#pragma unroll
            for (int k = 0; k < EMBED_VECS; k++) {
                if (col(k) >= cols) break;
                float x[N], p[N];
                held[k].widen(x);
                Vec<T, N>::load(wpe + col(k)).widen(p);
#pragma unroll
                for (int i = 0; i < N; i++) x[i] += p[i];
                held[k] = Vec<T, N>::narrow(x);
            }
        }
#pragma unroll
        for (int k = 0; k < EMBED_VECS; k++) {
            if (col(k) < cols) held[k].store(out + col(k));
        }
    }
}

// Rows sorted by entry, then by row: sorted[rank] = (entry, row). A row's rank is the number of rows that go before it, counted
// by comparing it with all others: 16384 rows are 2.7e8 comparisons, 40 us.
// A block ranks 32 rows, one per lane; its 8 warps share out the others, 32 at a time.
extern "C" __global__ void __launch_bounds__(WARP * SORT_WARPS) sort_entries(const int* entries, int2* sorted, unsigned count) {
    __shared__ int4 others[SORT_WARPS][WARP / 4];
    __shared__ unsigned counts[SORT_WARPS][WARP];
    const unsigned lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const unsigned row = blockIdx.x * WARP + lane;
    const int entry = row < count ? entries[row] : NO_ENTRY;
    unsigned before = 0;
    for (unsigned chunk = warp; chunk * WARP < count; chunk += SORT_WARPS) {
        const unsigned other = chunk * WARP + lane;
        __syncwarp();
        reinterpret_cast<int*>(others[warp])[lane] = other < count ? entries[other] : NO_ENTRY;
        __syncwarp();
        // Of equal entries the earlier row goes first.
        const int bound = entry + (chunk < blockIdx.x && row < count);
#pragma unroll
        for (unsigned i = 0; i < WARP / 4; i++) {
            const int4 four = others[warp][i];
            before += (four.x < bound) + (four.y < bound) + (four.z < bound) + (four.w < bound);
        }
        if (chunk == blockIdx.x) {
            before += __popc(__match_any_sync(ALL_LANES, entry) & ((1u << lane) - 1));
        }
    }
    counts[warp][lane] = before;
    __syncthreads();
    if (warp > 0 || row >= count) return;
    unsigned rank = 0;
#pragma unroll
    for (unsigned w = 0; w < SORT_WARPS; w++) rank += counts[w][lane];
    sorted[rank] = make_int2(entry, row);
}

// dtable[entry - lowest] (+)= the sum of the rows of dout that used it, in ascending order, for the `entries` entries from `lowest` on. A
// block that finds the first of such an entry's rows at its place in `sorted` sums them all, over one part of the columns; the others have
// nothing to do.
// Reads dout once. One entry alone takes T / BATCH round trips to memory: about 1 ms for 16384.
template <typename T, int N>
__device__ __forceinline__ void embed_backward(
    const int2* sorted, const T* dout, T* dtable, unsigned count, unsigned cols, unsigned lowest, unsigned entries, bool accumulate) {
    const unsigned first = blockIdx.x, c = (blockIdx.y * blockDim.x + threadIdx.x) * N;
    const int entry = sorted[first].x;
    // An entry below `lowest` wraps around to a place above all others.
    const unsigned place = (unsigned)entry - lowest;
    if (c >= cols || place >= entries || (first > 0 && sorted[first - 1].x == entry)) return;
    float sums[N] = {};
    bool more = true;
    for (unsigned start = first; more; start += BATCH) {
        int2 batch[BATCH];
        Vec<T, N> held[BATCH];
#pragma unroll
        for (unsigned b = 0; b < BATCH; b++) {
            batch[b] = sorted[min(start + b, count - 1)];
            if (start + b >= count) batch[b].x = NO_ENTRY;
        }
#pragma unroll
        for (unsigned b = 0; b < BATCH; b++) {
            if (batch[b].x == entry) held[b] = Vec<T, N>::load(dout + (size_t)batch[b].y * cols + c);
        }
#pragma unroll
        for (unsigned b = 0; b < BATCH; b++) {
            if (batch[b].x != entry) break;
            float x[N];
            held[b].widen(x);
#pragma unroll
            for (int i = 0; i < N; i++) sums[i] += x[i];
        }
        more = batch[BATCH - 1].x == entry;
    }
    store_sums<T, N>(sums, dtable + (size_t)place * cols + c, accumulate);
}

// table[rows[b] * cols + c - below] = packed[b * cols + c - skipped]: `packed` are rows behind each other, of which the first lacks its first
// `skipped` elements and the last may end early; `table` lacks its first `below`. One block per row.
template <typename T, int N>
__device__ __forceinline__ void scatter_rows(
    const int* rows, const T* packed, T* table, size_t elems, size_t below, unsigned skipped, unsigned cols) {
    const size_t row = (size_t)rows[blockIdx.x] * cols, from = (size_t)blockIdx.x * cols;
    for (unsigned c = threadIdx.x * N; c < cols; c += blockDim.x * N) {
        const size_t at = from + c;
        if (at >= skipped && at - skipped < elems) Vec<T, N>::load(packed + (at - skipped)).store(table + (row + c - below));
    }
}

#define EMBED_OF(NAME, T, N)                                                                                            \
    extern "C" __global__ void __launch_bounds__(256) embed##NAME(                                                      \
        const int* tokens, const int* positions, const T* wte, const T* wpe, T* out, unsigned cols) {                   \
        embed<T, N>(tokens, positions, wte, wpe, out, cols);                                                            \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(128) embed_backward##NAME(                                             \
        const int2* sorted, const T* dout, T* dtable, unsigned count, unsigned cols, unsigned lowest, unsigned entries, \
        unsigned accumulate) {                                                                                          \
        embed_backward<T, N>(sorted, dout, dtable, count, cols, lowest, entries, accumulate != 0);                      \
    }                                                                                                                   \
    extern "C" __global__ void __launch_bounds__(256) scatter_rows##NAME(                                               \
        const int* rows, const T* packed, T* table, size_t elems, size_t below, unsigned skipped, unsigned cols) {      \
        scatter_rows<T, N>(rows, packed, table, elems, below, skipped, cols);                                           \
    }
#define EMBED(NAME, T) EMBED_OF(_##NAME, T, WIDE<T>) EMBED_OF(_any_##NAME, T, 1)
FOR_EACH_FORMAT(EMBED)
