// Documents that lie one behind the other in rows, to sequences of one padded length and back: what an attention that knows one document a
// sequence computes. See src/device/documents.rs.
//
// `table` has a document's first token and its number of tokens. Everything is copied once: Llama-8B's 16384 x 6144 in bf16 are read and
// written in 94 us at 4.3 TB/s.
#include "common.cuh"

constexpr unsigned THREADS = 256;

// What a padded row is of: a token, if it is of any.
struct Place {
    size_t token;
    bool is_real;

    __device__ __forceinline__ Place(const int2* table, unsigned count, unsigned slot, unsigned at) : token(0), is_real(false) {
        if (slot >= count) return;
        const int2 document = table[slot];
        token = (size_t)document.x + at;
        is_real = at < (unsigned)document.y;
    }
};

// padded[slot, at] = rows[token], or zeros; one block a padded row of `vectors` times 16 bytes.
extern "C" __global__ void __launch_bounds__(THREADS) gather_documents(
    const uint4* rows, const int2* table, uint4* padded, unsigned count, unsigned length, unsigned vectors) {
    const Place place(table, count, blockIdx.x / length, blockIdx.x % length);
    rows += place.token * vectors, padded += (size_t)blockIdx.x * vectors;
    for (unsigned v = threadIdx.x; v < vectors; v += blockDim.x) padded[v] = place.is_real ? rows[v] : make_uint4(0, 0, 0, 0);
}

// rows[token] = padded[slot, at]; one block a padded row.
extern "C" __global__ void __launch_bounds__(THREADS) scatter_documents(
    const uint4* padded, const int2* table, uint4* rows, unsigned count, unsigned length, unsigned vectors) {
    const Place place(table, count, blockIdx.x / length, blockIdx.x % length);
    if (!place.is_real) return;
    rows += place.token * vectors, padded += (size_t)blockIdx.x * vectors;
    for (unsigned v = threadIdx.x; v < vectors; v += blockDim.x) rows[v] = padded[v];
}

// Where [batch, heads, seq_length] has a head of a token.
__device__ __forceinline__ size_t in_rows(size_t token, unsigned head, unsigned heads, unsigned seq_length) {
    return (token / seq_length * heads + head) * seq_length + token % seq_length;
}

// As above for the log-sum-exp: padded is [documents, heads, length]; block (x, head, slot) has THREADS tokens of a document.
extern "C" __global__ void __launch_bounds__(THREADS) gather_lse(
    const float* rows, const int2* table, float* padded, unsigned count, unsigned length, unsigned heads, unsigned seq_length) {
    const unsigned at = blockIdx.x * THREADS + threadIdx.x, head = blockIdx.y, slot = blockIdx.z;
    if (at >= length) return;
    const Place place(table, count, slot, at);
    padded[((size_t)slot * heads + head) * length + at] = place.is_real ? rows[in_rows(place.token, head, heads, seq_length)] : 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS) scatter_lse(
    const float* padded, const int2* table, float* rows, unsigned count, unsigned length, unsigned heads, unsigned seq_length) {
    const unsigned at = blockIdx.x * THREADS + threadIdx.x, head = blockIdx.y, slot = blockIdx.z;
    if (at >= length) return;
    const Place place(table, count, slot, at);
    if (place.is_real) rows[in_rows(place.token, head, heads, seq_length)] = padded[((size_t)slot * heads + head) * length + at];
}
