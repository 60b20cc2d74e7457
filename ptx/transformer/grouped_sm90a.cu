// Products of experts by Hopper's warpgroup instructions; results and arguments are those of grouped.cu, for operands of whole vectors.
//
// A block has one producer warpgroup and two that multiply, each 64 rows of a tile of 128 x 256. The producer brings 64 steps of k at a
// time with cp.async, which also fills with zeros what lies outside, into a ring of four slots; it is ahead of the others by whole
// tiles where they write a result. Blocks take tile after tile, as many blocks as the GPU has multiprocessors.
// An element is one sum over k in ascending order of steps, whatever the other segments are.
#include "grouped.cuh"

constexpr unsigned GROUP = 128;
constexpr unsigned BLOCK = 3 * GROUP;
constexpr unsigned TILE_ROWS = 128, TILE_COLS = 256, STEP = 64;
constexpr unsigned SLOTS = 4;
// Steps that are on their way while the producer waits for the one before them: with two, products wait longer.
constexpr unsigned IN_FLIGHT = 1;

// A factor in shared memory: rows of 64 elements, 128 bytes, whose 16-byte vectors are exchanged within groups of eight rows so that
// neither copies nor products meet in one bank (the hardware's 128-byte swizzle). By rows of k: a row for each row of the tile. By
// steps: for each 64 columns of the tile a panel of 64 rows, one for each step.
constexpr unsigned ROW_BYTES = 128, PANEL_BYTES = STEP * ROW_BYTES, EIGHT_ROWS = 8 * ROW_BYTES;
constexpr unsigned SLOT_BYTES = (TILE_ROWS + TILE_COLS) * ROW_BYTES;

__device__ __forceinline__ unsigned in_shared(const void* at) { return (unsigned)__cvta_generic_to_shared(at); }

// The ring: a slot is full when every producer's copies have arrived, and empty when every multiplying warp has read it.
struct Ring {
    // Shared addresses.
    unsigned slots, full, empty;

    __device__ __forceinline__ unsigned slot(unsigned turn) const { return slots + turn % SLOTS * SLOT_BYTES; }

    static __device__ __forceinline__ void arrive(unsigned barriers, unsigned turn) {
        asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barriers + turn % SLOTS * 8) : "memory");
    }
    static __device__ __forceinline__ void wait(unsigned barriers, unsigned turn, unsigned parity) {
        asm volatile(
            "{\n.reg .pred done;\nAGAIN:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra AGAIN;\n}"
            ::"r"(barriers + turn % SLOTS * 8), "r"(parity) : "memory");
    }
    __device__ __forceinline__ void wait_full(unsigned turn) const { wait(full, turn, turn / SLOTS & 1); }
    // A fresh barrier is in phase 0; the phase before it counts as over.
    __device__ __forceinline__ void wait_empty(unsigned turn) const { wait(empty, turn, turn / SLOTS & 1 ^ 1); }
};

// A factor as a tile sees it: `count` rows (or columns) of the result's tile, `k` steps.
template <typename T>
struct Factor {
    const T* data;
    // Elements from one row of memory to the next.
    unsigned pitch;
    unsigned count, k;

    // Brings the steps from `step` on to shared memory at `to`.
    template <unsigned TILE, bool BY_STEP>
    __device__ __forceinline__ void load(unsigned to, unsigned step) const {
        const unsigned thread = threadIdx.x % GROUP, vector = thread % 8, first = thread / 8;
        const unsigned at = to + first * ROW_BYTES + ((vector ^ first % 8) * 16);
        const T* from = data + (BY_STEP ? (size_t)(step + first) * pitch + vector * 8 : (size_t)first * pitch + step + vector * 8);
#pragma unroll
        for (unsigned i = 0; i < TILE / 16; i++) {
            // Sixteen rows of shared memory at a time; by steps, four times that are a panel.
            const unsigned row = BY_STEP ? first + i % 4 * 16 : first + i * 16;
            const bool inside = BY_STEP ? step + row < k && i / 4 * 64 + vector * 8 < count : row < count && step + vector * 8 < k;
            const size_t ahead = BY_STEP ? (size_t)(i % 4 * 16) * pitch + i / 4 * 64 : (size_t)(i * 16) * pitch;
            const T* source = inside ? from + ahead : data;
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
                         ::"r"(at + i * 16 * ROW_BYTES), "l"(source), "r"(inside ? 16u : 0u) : "memory");
        }
    }
};

// How a product finds a factor in shared memory.
template <bool BY_STEP>
__device__ __forceinline__ unsigned long long descriptor(unsigned at) {
    constexpr unsigned long long SWIZZLE_128 = 1ull << 62;
    constexpr unsigned long long LEADING = BY_STEP ? PANEL_BYTES / 16 : 1, STRIDE = EIGHT_ROWS / 16;
    return SWIZZLE_128 | STRIDE << 32 | LEADING << 16 | (at & 0x3ffff) / 16;
}
// Bytes of shared memory from sixteen steps to the next.
template <bool BY_STEP>
constexpr unsigned SIXTEEN_STEPS = BY_STEP ? 16 * ROW_BYTES : 32;

#define SUM4(N) "+f"(d[N]), "+f"(d[N + 1]), "+f"(d[N + 2]), "+f"(d[N + 3])
#define SUM16(N) SUM4(N), SUM4(N + 4), SUM4(N + 8), SUM4(N + 12)
#define SUM64(N) SUM16(N), SUM16(N + 16), SUM16(N + 32), SUM16(N + 48)
#define MULTIPLY(FORMAT)                                                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." FORMAT "." FORMAT " {"                                        \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                                              \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "                                    \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "                                    \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "                                    \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "                                    \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "                                    \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "                        \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, "                   \
        "%128, %129, 1, 1, 1, %130, %131;"                                                                                    \
        : SUM64(0), SUM64(64) : "l"(a), "l"(b), "n"(A_BY_STEP), "n"(B_BY_STEP))

// sums += a [64, 16] b [16, 256]
template <bool A_BY_STEP, bool B_BY_STEP>
__device__ __forceinline__ void multiply(float (&d)[128], unsigned long long a, unsigned long long b, bf16) { MULTIPLY("bf16"); }
template <bool A_BY_STEP, bool B_BY_STEP>
__device__ __forceinline__ void multiply(float (&d)[128], unsigned long long a, unsigned long long b, f16) { MULTIPLY("f16"); }

// Waits until at most `LEFT` groups of products are under way, and keeps reads of the sums behind it.
template <int LEFT>
__device__ __forceinline__ void wait_for_products(float (&d)[128]) {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
    if (LEFT == 0) {
#pragma unroll
        for (unsigned i = 0; i < 128; i++) asm volatile("" : "+f"(d[i])::"memory");
    }
}

// Lane q of four gives its word r to lane r's place q.
__device__ __forceinline__ void exchange(unsigned (&words)[4]) {
#pragma unroll
    for (unsigned distance = 1; distance < 4; distance *= 2) {
        const bool upper = threadIdx.x & distance;
#pragma unroll
        for (unsigned i = 0; i < 4; i++) {
            if (i & distance) continue;
            const unsigned got = __shfl_xor_sync(ALL_LANES, upper ? words[i] : words[i + distance], distance);
            if (upper) words[i] = got; else words[i + distance] = got;
        }
    }
}

// Where a tile goes: result (row, col) lies at c[row * pitch + col].
template <typename T>
struct Result {
    T* c;
    unsigned pitch, rows, cols;
    bool accumulate;

    // A warpgroup's 64 rows: four lanes hold eight columns of a row, two each, and store sixteen bytes each of four times as many.
    __device__ __forceinline__ void put(const float (&d)[128], unsigned first) const {
        const unsigned lane = threadIdx.x % WARP, low = first + threadIdx.x % GROUP / WARP * 16 + lane / 4;
#pragma unroll
        for (unsigned half = 0; half < 2; half++) {
            const unsigned row = low + half * 8;
#pragma unroll
            for (unsigned j = 0; j < 32; j += 4) {
                const unsigned col = (j + lane % 4) * 8;
                const bool inside = row < rows && col < cols;
                uint4* at = reinterpret_cast<uint4*>(c + (size_t)row * pitch + col);
                unsigned words[4] = {};
                if (accumulate) {
                    const uint4 old = inside ? *at : make_uint4(0, 0, 0, 0);
                    words[0] = old.x, words[1] = old.y, words[2] = old.z, words[3] = old.w;
                    exchange(words);
                }
#pragma unroll
                for (unsigned i = 0; i < 4; i++) {
                    float sums[2] = {d[(j + i) * 4 + half * 2], d[(j + i) * 4 + half * 2 + 1]};
                    if (accumulate) {
                        float old[2];
                        Word<T>::widen(words[i], old);
                        sums[0] += old[0], sums[1] += old[1];
                    }
                    words[i] = Word<T>::narrow(sums);
                }
                exchange(words);
                if (inside) *at = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};

// One tile of a product.
template <typename T>
struct Work {
    Factor<T> a, b;
    Result<T> result;

    __device__ __forceinline__ unsigned steps() const { return (a.k + STEP - 1) / STEP; }
};

// The tiles of c[rows, outs] = a[rows, ins] b_e[outs, ins]^T, or with NN of c[rows, ins] = a[rows, outs] b_e[outs, ins]: column by column.
template <typename T, bool NN_LAYOUT>
struct ByRows {
    static constexpr bool A_BY_STEP = false, B_BY_STEP = NN_LAYOUT;
    const T *a, *b;
    const int* bounds;
    T* c;
    unsigned experts, rows, outs, ins;

    __device__ __forceinline__ bool find(unsigned index, Work<T>& work) const {
        const unsigned n = NN_LAYOUT ? ins : outs, k = NN_LAYOUT ? outs : ins, across = (n + TILE_COLS - 1) / TILE_COLS;
        Place place;
        if (!find_tile(bounds, experts, rows, TILE_ROWS, index / across, place)) return false;
        const unsigned col = index % across * TILE_COLS;
        const T* weight = b + (size_t)place.expert * outs * ins + (NN_LAYOUT ? col : (size_t)col * ins);
        work.a = {a + (size_t)place.first * k, k, place.end - place.first, k};
        work.b = {weight, ins, n - col, k};
        work.result = {c + (size_t)place.first * n + col, n, place.end - place.first, n - col, false};
        return true;
    }
};

// The tiles of c_e[outs, ins] (+)= a[rows, outs]^T b[rows, ins] over the rows of each expert.
template <typename T>
struct ByWeights {
    static constexpr bool A_BY_STEP = true, B_BY_STEP = true;
    const T *a, *b;
    const int* bounds;
    T* c;
    unsigned experts, outs, ins;
    bool accumulate;

    __device__ __forceinline__ bool find(unsigned index, Work<T>& work) const {
        const unsigned across = (ins + TILE_COLS - 1) / TILE_COLS, down = (outs + TILE_ROWS - 1) / TILE_ROWS;
        const unsigned expert = index / (across * down), row = index / across % down * TILE_ROWS, col = index % across * TILE_COLS;
        if (expert >= experts) return false;
        const unsigned first = bounds[expert], end = bounds[expert + 1];
        work.a = {a + (size_t)first * outs + row, outs, outs - row, end - first};
        work.b = {b + (size_t)first * ins + col, ins, ins - col, end - first};
        work.result = {c + ((size_t)expert * outs + row) * ins + col, ins, outs - row, ins - col, accumulate};
        return true;
    }
};

// The producer's part: fills slot after slot, and says so once what it copied has arrived.
template <typename T, typename Tiles>
__device__ __forceinline__ void produce(const Tiles& tiles, const Ring& ring) {
    unsigned turn = 0;
    Work<T> work;
    for (unsigned index = blockIdx.x; tiles.find(index, work); index += gridDim.x) {
        for (unsigned step = 0; step < work.a.k; step += STEP, turn++) {
            ring.wait_empty(turn);
            const unsigned slot = ring.slot(turn);
            work.a.template load<TILE_ROWS, Tiles::A_BY_STEP>(slot, step);
            work.b.template load<TILE_COLS, Tiles::B_BY_STEP>(slot + TILE_ROWS * ROW_BYTES, step);
            asm volatile("cp.async.commit_group;" ::: "memory");
            if (turn < IN_FLIGHT) continue;
            asm volatile("cp.async.wait_group %0;" ::"n"(IN_FLIGHT) : "memory");
            // Products read shared memory by another way than copies write it.
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            Ring::arrive(ring.full, turn - IN_FLIGHT);
        }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    for (unsigned left = turn < IN_FLIGHT ? turn : IN_FLIGHT; left > 0; left--) Ring::arrive(ring.full, turn - left);
}

// The part of a warpgroup that multiplies: its 64 rows of every tile.
template <typename T, typename Tiles>
__device__ __forceinline__ void consume(const Tiles& tiles, const Ring& ring, unsigned group) {
    constexpr bool A = Tiles::A_BY_STEP, B = Tiles::B_BY_STEP;
    unsigned turn = 0;
    Work<T> work;
    for (unsigned index = blockIdx.x; tiles.find(index, work); index += gridDim.x) {
        float sums[128];
#pragma unroll
        for (unsigned i = 0; i < 128; i++) sums[i] = 0.0f;
        const unsigned steps = work.steps();
        for (unsigned step = 0; step < steps; step++, turn++) {
            ring.wait_full(turn);
            const unsigned slot = ring.slot(turn);
            const unsigned long long a = descriptor<A>(slot + group * 64 * ROW_BYTES), b = descriptor<B>(slot + TILE_ROWS * ROW_BYTES);
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (unsigned k = 0; k < STEP / 16; k++) {
                multiply<A, B>(sums, a + k * SIXTEEN_STEPS<A> / 16, b + k * SIXTEEN_STEPS<B> / 16, T());
            }
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The step before this one has been read.
            wait_for_products<1>(sums);
            if (step > 0 && threadIdx.x % WARP == 0) Ring::arrive(ring.empty, turn - 1);
        }
        wait_for_products<0>(sums);
        if (steps > 0 && threadIdx.x % WARP == 0) Ring::arrive(ring.empty, turn - 1);
        work.result.put(sums, group * 64);
    }
}

template <typename T, typename Tiles>
__device__ __forceinline__ void product(const Tiles& tiles) {
    extern __shared__ unsigned char shared[];
    __shared__ __align__(8) unsigned long long full[SLOTS], empty[SLOTS];
    const Ring ring = {(in_shared(shared) + EIGHT_ROWS - 1) / EIGHT_ROWS * EIGHT_ROWS, in_shared(full), in_shared(empty)};
    if (threadIdx.x < SLOTS) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring.full + threadIdx.x * 8), "r"(GROUP) : "memory");
        asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(ring.empty + threadIdx.x * 8), "r"(2 * GROUP / WARP) : "memory");
    }
    __syncthreads();
    // Registers of a multiprocessor go to those who hold the sums.
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        produce<T>(tiles, ring);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        consume<T>(tiles, ring, threadIdx.x / GROUP - 1);
    }
}

#define KERNEL extern "C" __global__ void __launch_bounds__(BLOCK, 1)
#define GROUPED(NAME, T)                                                                                                      \
    KERNEL grouped_nt_sm90a_##NAME(const T* a, const T* b, const int* bounds, T* c, unsigned experts, unsigned rows,          \
        unsigned outs, unsigned ins) {                                                                                        \
        product<T>(ByRows<T, false>{a, b, bounds, c, experts, rows, outs, ins});                                              \
    }                                                                                                                         \
    KERNEL grouped_nn_sm90a_##NAME(const T* a, const T* b, const int* bounds, T* c, unsigned experts, unsigned rows,          \
        unsigned outs, unsigned ins) {                                                                                        \
        product<T>(ByRows<T, true>{a, b, bounds, c, experts, rows, outs, ins});                                               \
    }                                                                                                                         \
    KERNEL grouped_tn_sm90a_##NAME(const T* a, const T* b, const int* bounds, T* c, unsigned experts, unsigned outs,          \
        unsigned ins, unsigned accumulate) {                                                                                  \
        product<T>(ByWeights<T>{a, b, bounds, c, experts, outs, ins, accumulate != 0});                                       \
    }
GROUPED(bf16, bf16)
GROUPED(f16, f16)
