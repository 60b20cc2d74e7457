// libcuda.so.1 and libcublasLt.so.13 of a machine without a GPU, for the host's side of a run: memory is the host's, copies are made at
// once, kernels and products do nothing, so that all numbers are zero. What a real driver would not forgive ends the process with a line:
// handles that are gone, or of another context than the current one; copies from memory that is not there, or out of reach; a context
// that goes while its memory is in use. At the end it counts.
//
// FAKE_GPUS: how many (2). FAKE_MODELS: each is a model of its own. FAKE_NO_LINK: none reaches another. FAKE_ALGORITHMS: cuBLASLt chooses
// otherwise on each. FAKE_FAULT: GPU 1 is lost after so many pulls. FAKE_NO_MEMORY and FAKE_NO_PINS: the n-th allocation of a GPU's memory,
// or the n-th host memory that is to be page-locked, cannot be had; with a + behind the number none from there on. FAKE_FAIL=CALL,CODE: that
// call of the driver, counted from 0, answers with CODE, and so does every later one, as a driver does whose context is lost. FAKE_SLOW: a pull takes the host a millisecond. FAKE_CUBLASLT:
// its version. FAKE_PORTABLE: refuses kernels that Hopper alone takes. FAKE_CUDA: the newest release of CUDA that the driver serves (13000). FAKE_CUDNN: the one that a cuDNN is built for, of which
// nothing else is here.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define GPUS_MAX 8
typedef uint64_t u64;
typedef struct { int gpu, retained, reaches[GPUS_MAX]; } Context;
// What was enqueued, and as much of it as the host has seen pass.
typedef struct { int is_live; Context *context; u64 enqueued, seen; } Stream;
typedef struct { int is_live, is_recorded, pending; Context *context; double ms; Stream *stream; u64 at; } Event;
typedef struct { int is_live; u64 start, bytes; Context *context; } Memory;

enum { OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, NOT_READY = 600, NO_LINK = 217, ILLEGAL_ADDRESS = 700, ALREADY_ENABLED = 704, COMPUTE_CAPABILITY_MAJOR = 75 };

static Context contexts[GPUS_MAX];
static __thread Context *stack[16];
static __thread int depth;
static Memory memories[1 << 16];
static int allocated, direct, staged, waits, pinned, pinned_beside, longest, before_forward;
// Ranges of host memory whose pages are locked.
static struct { u64 start, end; } locks[1 << 12];
// Of the thread: pulls since the last update or forward pass on its GPU, and whether there was an update.
static __thread int in_a_row, has_stepped;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void refuse(const char *why) {
  fprintf(stderr, "fake driver: %s\n", why);
  _exit(99);
}

static int called;

// What this call answers instead of being carried out; 0: it is carried out.
static int lost(void) {
  const char *fail = getenv("FAKE_FAIL");
  int call = __atomic_fetch_add(&called, 1, __ATOMIC_RELAXED);
  return fail && call >= atoi(fail) ? atoi(strchr(fail, ',') + 1) : 0;
}
#define FALLIBLE { int code = lost(); if (code) return code; }

static int gpus(void) { return getenv("FAKE_GPUS") ? atoi(getenv("FAKE_GPUS")) : 2; }

static Context *current(void) {
  if (!depth || !stack[depth - 1] || !stack[depth - 1]->retained) refuse("no context is current, or it is gone");
  return stack[depth - 1];
}

static Stream *live_stream(Stream *stream) {
  if (!stream->is_live || stream->context != current()) refuse("a stream that is gone, or of another context");
  return stream;
}

// The stream, on which one thing more is enqueued.
static Stream *enqueue_on(Stream *stream) {
  int ahead = ++live_stream(stream)->enqueued - __atomic_load_n(&stream->seen, __ATOMIC_RELAXED);
  if (ahead > longest) longest = ahead;
  return stream;
}

static void saw(Stream *stream, u64 at) {
  if (at > __atomic_load_n(&stream->seen, __ATOMIC_RELAXED)) __atomic_store_n(&stream->seen, at, __ATOMIC_RELAXED);
}

static Event *live_event(Event *event) {
  if (!event->is_live || !event->context->retained) refuse("an event that is gone, or its context");
  return event;
}

static Memory *memory_of(u64 start, u64 bytes) {
  for (int i = 0; i < allocated; i++)
    if (memories[i].is_live && memories[i].start <= start && start + bytes <= memories[i].start + memories[i].bytes) return &memories[i];
  refuse("memory that is not there");
  return 0;
}

static void own_memory(u64 start, u64 bytes, Stream *stream) {
  if (memory_of(start, bytes)->context != live_stream(stream)->context) refuse("memory of another GPU");
}

// Whether the n-th call is one that fails.
static int fails(const char *variable, int nth) {
  char *at = getenv(variable), *end;
  if (!at) return 0;
  int first = strtol(at, &end, 10);
  return nth == first || (*end == '+' && nth > first);
}

__attribute__((destructor)) static void count(void) {
  int left = 0, retained = 0;
  for (int i = 0; i < allocated; i++) left += memories[i].is_live;
  for (int i = 0; i < GPUS_MAX; i++) retained += contexts[i].retained;
  printf("fake driver: %d pulls, %d staged, %d waits for others, %d allocations left, %d contexts left, %d calls\n", direct, staged, waits, left, retained, called);
  printf("fake driver took: %d allocations, %d page locks\n", allocated, pinned);
  int locked = 0;
  for (int i = 0; i < 1 << 12; i++) locked += locks[i].end > 0;
  printf("fake driver locked beside steps: %d, and %d were left\n", pinned_beside, locked);
  printf("fake driver was behind by %d operations\n", longest);
  printf("fake driver had %d pulls before a forward pass\n", before_forward);
  for (int gpu = 0; gpu < GPUS_MAX; gpu++) {
    int count = 0;
    for (int i = 0; i < allocated; i++) count += memories[i].context == &contexts[gpu];
    if (count) printf("fake driver: GPU %d gave %d pieces of memory\n", gpu, count);
  }
}

int cuInit(unsigned flags) { FALLIBLE return 0; }
int cuDriverGetVersion(int *version) { FALLIBLE *version = getenv("FAKE_CUDA") ? atoi(getenv("FAKE_CUDA")) : 13000; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "as the fake driver says"; return 0; }

int cuDeviceGetCount(int *count) { FALLIBLE *count = gpus(); return 0; }
int cuDeviceGet(int *gpu, int ordinal) { FALLIBLE *gpu = ordinal; return ordinal < gpus() ? 0 : INVALID_DEVICE; }
// Of Hopper's generation, and unable in all else.
int cuDeviceGetAttribute(int *value, int attribute, int gpu) { FALLIBLE *value = attribute == COMPUTE_CAPABILITY_MAJOR ? 9 : 0; return 0; }
int cuDeviceGetName(char *name, int bytes, int gpu) { FALLIBLE snprintf(name, bytes, "Fake %d", getenv("FAKE_MODELS") ? gpu : 0); return 0; }
int cuDeviceGetPCIBusId(char *text, int bytes, int gpu) { FALLIBLE snprintf(text, bytes, "0000:%dF:00.0", gpu); return 0; }
int cuDeviceCanAccessPeer(int *can, int gpu, int other) { FALLIBLE *can = gpu != other && !getenv("FAKE_NO_LINK"); return 0; }

int cuDevicePrimaryCtxRetain(Context **context, int gpu) { FALLIBLE
  pthread_mutex_lock(&lock);
  contexts[gpu].gpu = gpu;
  contexts[gpu].retained++;
  pthread_mutex_unlock(&lock);
  *context = &contexts[gpu];
  return 0;
}

int cuDevicePrimaryCtxRelease_v2(int gpu) { FALLIBLE
  pthread_mutex_lock(&lock);
  if (contexts[gpu].retained-- <= 0) refuse("a context is released that nobody has");
  for (int i = 0; i < allocated && !contexts[gpu].retained; i++)
    if (memories[i].is_live && memories[i].context == &contexts[gpu]) refuse("a context goes before its memory");
  if (!contexts[gpu].retained) memset(contexts[gpu].reaches, 0, sizeof contexts[gpu].reaches);
  pthread_mutex_unlock(&lock);
  return 0;
}

int cuCtxSetCurrent(Context *context) { FALLIBLE if (!depth) depth = 1; stack[depth - 1] = context; return 0; }
int cuCtxPushCurrent_v2(Context *context) { FALLIBLE stack[depth++] = context; current(); return 0; }
int cuCtxPopCurrent_v2(Context **context) { FALLIBLE *context = stack[--depth]; return 0; }
int cuCtxGetStreamPriorityRange(int *least, int *most) { FALLIBLE current(); *least = 0; *most = -5; return 0; }

int cuCtxEnablePeerAccess(Context *other, unsigned flags) { FALLIBLE
  if (!other->retained) refuse("a peer whose context is gone");
  if (other == current() || getenv("FAKE_NO_LINK")) return NO_LINK;
  if (current()->reaches[other->gpu]) return ALREADY_ENABLED;
  current()->reaches[other->gpu] = 1;
  return 0;
}

int cuStreamCreateWithPriority(Stream **stream, unsigned flags, int priority) { FALLIBLE
  *stream = malloc(sizeof **stream);
  **stream = (Stream){1, current()};
  return 0;
}
int cuStreamSynchronize(Stream *stream) { FALLIBLE saw(stream, live_stream(stream)->enqueued); return 0; }
int cuStreamDestroy_v2(Stream *stream) { FALLIBLE live_stream(stream)->is_live = 0; return 0; }

int cuStreamWaitEvent(Stream *stream, Event *event, unsigned flags) { FALLIBLE
  if (!live_event(event)->is_recorded) refuse("a wait for an event that was not recorded is none");
  waits += enqueue_on(stream)->context != event->context;
  return 0;
}

int cuEventCreate(Event **event, unsigned flags) { FALLIBLE
  *event = malloc(sizeof **event);
  **event = (Event){1, 0, 0, current()};
  return 0;
}
int cuEventRecord(Event *event, Stream *stream) { FALLIBLE
  if (live_event(event)->context != enqueue_on(stream)->context) refuse("an event is recorded in another context");
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  *event = (Event){1, 1, 2, event->context, now.tv_sec * 1e3 + now.tv_nsec / 1e6, stream, stream->enqueued};
  return 0;
}
// Not done at first, so that somebody waits.
int cuEventQuery(Event *event) { FALLIBLE
  if (!live_event(event)->is_recorded && event->context != current()) refuse("an event of another GPU that was not recorded counts as done");
  if (event->pending-- > 0) return NOT_READY;
  if (event->is_recorded) saw(event->stream, event->at);
  return 0;
}
int cuEventSynchronize(Event *event) { FALLIBLE
  live_event(event)->pending = 0;
  if (event->is_recorded) saw(event->stream, event->at);
  return 0;
}
int cuEventElapsedTime(float *ms, Event *start, Event *end) { FALLIBLE *ms = live_event(end)->ms - live_event(start)->ms; return 0; }
int cuEventDestroy_v2(Event *event) { FALLIBLE
  if (live_event(event)->context != current()) refuse("an event ends in another context");
  event->is_live = 0;
  return 0;
}

int cuMemGetInfo_v2(size_t *free, size_t *total) { FALLIBLE current(); *free = *total = 8ull << 30; return 0; }
int cuMemAlloc_v2(u64 *address, size_t bytes) { FALLIBLE
  *address = (u64)aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  memset((void *)*address, 0xff, bytes);
  pthread_mutex_lock(&lock);
  int is_live = !fails("FAKE_NO_MEMORY", allocated + 1);
  memories[allocated++] = (Memory){is_live, *address, bytes, current()};
  pthread_mutex_unlock(&lock);
  return is_live ? 0 : OUT_OF_MEMORY;
}
int cuMemFree_v2(u64 address) { FALLIBLE
  Memory *memory = memory_of(address, 1);
  if (memory->start != address || memory->context != current()) refuse("memory is freed in another context");
  memory->is_live = 0;
  return 0;
}
int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) { FALLIBLE
  current();
  if (fails("FAKE_NO_PINS", __atomic_add_fetch(&pinned, 1, __ATOMIC_RELAXED))) return OUT_OF_MEMORY;
  u64 start = (u64)address / 4096 * 4096, end = (u64)address + bytes;
  char thread[16];
  pthread_getname_np(pthread_self(), thread, sizeof thread);
  pthread_mutex_lock(&lock);
  int free = -1;
  for (int i = 0; i < 1 << 12; i++) {
    if (start < locks[i].end && locks[i].start < end) refuse("pages are locked twice");
    if (!locks[i].end) free = i;
  }
  locks[free].start = start, locks[free].end = end;
  pinned_beside += !strcmp(thread, "page locks");
  pthread_mutex_unlock(&lock);
  return 0;
}
int cuMemHostUnregister(void *address) { FALLIBLE
  current();
  int found = 0;
  pthread_mutex_lock(&lock);
  for (int i = 0; i < 1 << 12; i++)
    if (locks[i].end && locks[i].start == (u64)address / 4096 * 4096) locks[i].end = 0, found = 1;
  pthread_mutex_unlock(&lock);
  if (!found) refuse("pages that are not locked are unlocked");
  return 0;
}

int cuMemsetD8Async(u64 to, unsigned char byte, size_t bytes, Stream *stream) { FALLIBLE enqueue_on(stream); own_memory(to, bytes, stream); memset((void *)to, byte, bytes); return 0; }
int cuMemcpyHtoDAsync_v2(u64 to, void *from, size_t bytes, Stream *stream) { FALLIBLE enqueue_on(stream); own_memory(to, bytes, stream); memcpy((void *)to, from, bytes); return 0; }
int cuMemcpyDtoHAsync_v2(void *to, u64 from, size_t bytes, Stream *stream) { FALLIBLE enqueue_on(stream); own_memory(from, bytes, stream); memcpy(to, (void *)from, bytes); return 0; }
int cuMemcpyDtoDAsync_v2(u64 to, u64 from, size_t bytes, Stream *stream) { FALLIBLE
  enqueue_on(stream);
  own_memory(to, bytes, stream);
  Context *theirs = memory_of(from, bytes)->context;
  if (theirs != stream->context && !stream->context->reaches[theirs->gpu]) refuse("a copy from a GPU that is out of reach");
  direct += theirs != stream->context;
  in_a_row += theirs != stream->context;
  if (getenv("FAKE_SLOW") && theirs != stream->context) usleep(1000);
  // A copy within GPU 1 may come between pulls of the other GPU.
  if (getenv("FAKE_FAULT") && theirs != stream->context && stream->context->gpu == 1 && direct > atoi(getenv("FAKE_FAULT"))) return ILLEGAL_ADDRESS;
  memmove((void *)to, (void *)from, bytes);
  return 0;
}
int cuMemcpyPeerAsync(u64 to, Context *here, u64 from, Context *there, size_t bytes, Stream *stream) { FALLIBLE
  enqueue_on(stream);
  own_memory(to, bytes, stream);
  if (here != stream->context || there != memory_of(from, bytes)->context) refuse("a copy that names other contexts than its memory's");
  staged++;
  memmove((void *)to, (void *)from, bytes);
  return 0;
}

typedef struct { size_t x, y; int type; void *host; u64 device; void *array; size_t pitch; } Side;
typedef struct { Side from, to; size_t width, height; } Copy2D;
typedef struct { size_t x, y, z, lod; int type; void *host; u64 device; void *array; Context *context; size_t pitch, height; } PeerSide;
typedef struct { PeerSide from, to; size_t width, height, depth; } PeerCopy;

static int copy_rows(u64 to, size_t to_pitch, u64 from, size_t from_pitch, size_t width, size_t height) {
  if (width > to_pitch || width > from_pitch) refuse("a copy whose rows overlap");
  for (size_t row = 0; row < height; row++) memmove((void *)(to + row * to_pitch), (void *)(from + row * from_pitch), width);
  return 0;
}
int cuMemcpy2DAsync_v2(const Copy2D *copy, Stream *stream) { FALLIBLE
  enqueue_on(stream);
  own_memory(copy->to.device, (copy->height - 1) * copy->to.pitch + copy->width, stream);
  Context *theirs = memory_of(copy->from.device, (copy->height - 1) * copy->from.pitch + copy->width)->context;
  if (theirs != stream->context && !stream->context->reaches[theirs->gpu]) refuse("a copy from a GPU that is out of reach");
  direct += theirs != stream->context;
  return copy_rows(copy->to.device, copy->to.pitch, copy->from.device, copy->from.pitch, copy->width, copy->height);
}
int cuMemcpy3DPeerAsync(const PeerCopy *copy, Stream *stream) { FALLIBLE
  enqueue_on(stream);
  own_memory(copy->to.device, (copy->height - 1) * copy->to.pitch + copy->width, stream);
  Context *theirs = memory_of(copy->from.device, (copy->height - 1) * copy->from.pitch + copy->width)->context;
  if (copy->to.context != stream->context || copy->from.context != theirs) refuse("a copy that names other contexts than its memory's");
  staged++;
  return copy_rows(copy->to.device, copy->to.pitch, copy->from.device, copy->from.pitch, copy->width, copy->height);
}

int cuModuleLoadDataEx(void **module, const char *ptx, unsigned count, void *options, void *values) { FALLIBLE
  current();
  if (getenv("FAKE_PORTABLE") && strstr(ptx, ".target sm_90a")) refuse("kernels for Hopper alone");
  *module = malloc(1);
  return 0;
}
int cuModuleUnload(void *module) { FALLIBLE current(); return 0; }
int cuFuncSetAttribute(const char *function, int attribute, int value) { FALLIBLE return 0; }
int cuModuleGetFunction(const char **function, void *module, const char *name) { FALLIBLE *function = strdup(name); return 0; }

static void *argument(void **arguments, int nth) { return (void *)*(u64 *)arguments[nth]; }
int cuLaunchKernel(const char *name, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, Stream *stream, void **arguments, void **extra) { FALLIBLE
  enqueue_on(stream);
  int is_forward = !strncmp(name, "embed_", 6) && strncmp(name, "embed_backward", 14);
  if (is_forward && has_stepped && in_a_row > before_forward) before_forward = in_a_row;
  if (is_forward || !strncmp(name, "adam", 4)) in_a_row = 0;
  has_stepped |= !strncmp(name, "adam", 4);
  // Its numbers come to the host.
  if (!strcmp(name, "copy_words")) memcpy(argument(arguments, 1), argument(arguments, 0), 4 * (u64)argument(arguments, 2));
  for (int part = 0; !strncmp(name, "sum_slices", 10) && part < 8; part++)
    if (argument(arguments, part)) own_memory((u64)argument(arguments, part), 1, stream);
  return 0;
}

typedef struct { u64 algorithm[8]; size_t workspace; int status; float waves; int reserved[4]; } Suggestion;
static int make(void **made) { *made = malloc(1); return 0; }
size_t cublasLtGetVersion(void) { return getenv("FAKE_CUBLASLT") ? atoi(getenv("FAKE_CUBLASLT")) : 130100; }
size_t cudnnGetCudartVersion(void) { return atoi(getenv("FAKE_CUDNN")); }
const char *cublasLtGetStatusName(int status) { return "FAKE"; }
int cublasLtCreate(void **handle) { current(); return make(handle); }
int cublasLtDestroy(void *handle) { current(); return 0; }
int cublasLtMatrixLayoutCreate(void **layout, int type, u64 rows, u64 columns, int64_t stride) { return make(layout); }
int cublasLtMatrixLayoutDestroy(void *layout) { return 0; }
int cublasLtMatrixLayoutSetAttribute(void *layout, int which, void *value, size_t bytes) { return 0; }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) { return make(description); }
int cublasLtMatmulDescSetAttribute(void *description, int which, void *value, size_t bytes) { return 0; }
int cublasLtMatmulDescDestroy(void *description) { return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { return make(preference); }
int cublasLtMatmulPreferenceSetAttribute(void *preference, int which, void *value, size_t bytes) { return 0; }
int cublasLtMatmulPreferenceDestroy(void *preference) { return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c, void *d, void *preference, int most, Suggestion *found, int *count) {
  *found = (Suggestion){{getenv("FAKE_ALGORITHMS") ? 70 + current()->gpu : 70}};
  *count = 1;
  return 0;
}
int cublasLtMatmulAlgoCheck(void *handle, void *product, void *a, void *b, void *c, void *d, u64 *algorithm, Suggestion *found) {
  *found = (Suggestion){{algorithm[0]}};
  return 0;
}
int cublasLtMatmulAlgoConfigGetAttribute(u64 *algorithm, int which, int *value, size_t bytes, size_t *written) { *value = which ? 1 : algorithm[0]; return 0; }
int cublasLtMatmul(void *handle, void *product, float *alpha, u64 a, void *la, u64 b, void *lb, float *beta, u64 c, void *lc, u64 d, void *ld, u64 *algorithm, u64 workspace, size_t bytes, Stream *stream) {
  enqueue_on(stream);
  u64 used[] = {a, b, c, d, workspace};
  for (int i = 0; i < 5; i++) own_memory(used[i], 1, stream);
  return 0;
}
