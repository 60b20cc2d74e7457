// libnccl.so.2 for the host's side of a run: nothing moves, but a group is done only when the other process has called its own, with as many
// bytes the other way. What NCCL would not forgive ends the process with a line. At the end it counts.
//
// FAKE_NCCL: its release, as 22809. FAKE_NCCL_FAILS: the error of every group. FAKE_NCCL_HANGS: no communicator ends.
#define _GNU_SOURCE
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define RANKS_MAX 8
#define GROUPS_MAX (1 << 14)
enum { SUCCESS = 0, INVALID_ARGUMENT = 4, IN_PROGRESS = 7 };

typedef struct { char path[128]; } Id;
typedef struct { size_t size; unsigned magic, version; int blocking, cga, min_ctas, max_ctas; const char *net; } Config;
// By sender, receiver and group; groups are counted from 1, and 0 bytes are one more.
typedef struct { int came[RANKS_MAX]; size_t bytes[RANKS_MAX][RANKS_MAX][GROUPS_MAX]; } Shared;
typedef struct { Shared *shared; int rank, ranks, is_open, groups; size_t out[RANKS_MAX], in[RANKS_MAX], awaited[RANKS_MAX]; Id id; } Comm;

static int depth, swaps, opened, aborted;
static Comm *grouped;

static void refuse(const char *why) {
  fprintf(stderr, "fake nccl: %s\n", why);
  _exit(98);
}

__attribute__((destructor)) static void count(void) { printf("fake nccl: %d swaps, %d communicators, %d aborted\n", swaps, opened, aborted); }

int ncclGetVersion(int *version) { *version = getenv("FAKE_NCCL") ? atoi(getenv("FAKE_NCCL")) : 22809; return SUCCESS; }
const char *ncclGetErrorString(int status) { return status == 2 ? "unhandled system error" : "as the fake nccl says"; }
const char *ncclGetLastError(void *comm) { return "nothing is wrong but the test"; }

int ncclGetUniqueId(Id *id) {
  strcpy(id->path, "/dev/shm/fake-nccl-XXXXXX");
  int file = mkstemp(id->path);
  if (file < 0 || ftruncate(file, sizeof(Shared))) refuse("no shared memory");
  close(file);
  return SUCCESS;
}

int ncclCommInitRankConfig(Comm **comm, int ranks, Id id, int rank, Config *config) {
  const char *nvls = getenv("NCCL_NVLS_ENABLE");
  if (!nvls || strcmp(nvls, "0")) refuse("multicast is not off");
  if (config->magic != 0xcafebeef || config->blocking || config->size != sizeof *config || config->max_ctas != INT_MIN) refuse("another configuration");
  int file = open(id.path, O_RDWR);
  if (file < 0) refuse("a key that nobody has made");
  *comm = calloc(1, sizeof **comm);
  **comm = (Comm){mmap(0, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0), rank, ranks, .id = id};
  close(file);
  if (__atomic_exchange_n(&(*comm)->shared->came[rank], 1, __ATOMIC_SEQ_CST)) refuse("a rank that is there twice");
  opened++;
  return IN_PROGRESS;
}

static size_t posted(Comm *comm, int from, int to) {
  return __atomic_load_n(&comm->shared->bytes[from][to][comm->groups], __ATOMIC_SEQ_CST);
}

int ncclCommGetAsyncError(Comm *comm, int *state) {
  *state = SUCCESS;
  for (int peer = 0; peer < comm->ranks; peer++) {
    if (peer == comm->rank) continue;
    if (!comm->is_open) {
      if (!__atomic_load_n(&comm->shared->came[peer], __ATOMIC_SEQ_CST)) *state = IN_PROGRESS;
    } else if (comm->groups) {
      size_t theirs = posted(comm, peer, comm->rank);
      if (!theirs) *state = IN_PROGRESS;
      else if (theirs - 1 != comm->awaited[peer]) refuse("a swap whose sides differ");
    }
  }
  if (*state == SUCCESS && !comm->is_open) {
    comm->is_open = 1;
    // Whoever is first; all have it open.
    unlink(comm->id.path);
  }
  return SUCCESS;
}

int ncclGroupStart(void) {
  if (depth++) refuse("a group within a group");
  grouped = 0;
  return SUCCESS;
}

static Comm *ready(Comm *comm, int peer, int type) {
  int state;
  ncclCommGetAsyncError(comm, &state);
  if (!depth || state != SUCCESS || type != 1 || peer == comm->rank) refuse("a call out of place");
  if (!grouped) {
    memset(comm->out, 0, sizeof comm->out);
    memset(comm->in, 0, sizeof comm->in);
  }
  return grouped = comm;
}
int ncclSend(void *from, size_t bytes, int type, int peer, Comm *comm, void *stream) { ready(comm, peer, type)->out[peer] += bytes; return SUCCESS; }
int ncclRecv(void *to, size_t bytes, int type, int peer, Comm *comm, void *stream) { ready(comm, peer, type)->in[peer] += bytes; return SUCCESS; }

int ncclGroupEnd(void) {
  if (depth-- != 1) refuse("no group to end");
  Comm *comm = grouped;
  if (!comm) return SUCCESS;
  if (getenv("FAKE_NCCL_FAILS")) return atoi(getenv("FAKE_NCCL_FAILS"));
  memcpy(comm->awaited, comm->in, sizeof comm->in);
  if (++comm->groups >= GROUPS_MAX) refuse("more groups than it has room for");
  for (int peer = 0; peer < comm->ranks; peer++)
    if (peer != comm->rank) __atomic_store_n(&comm->shared->bytes[comm->rank][peer][comm->groups], comm->out[peer] + 1, __ATOMIC_SEQ_CST);
  swaps++;
  return IN_PROGRESS;
}

int ncclCommAbort(Comm *comm) {
  aborted++;
  while (getenv("FAKE_NCCL_HANGS")) pause();
  munmap(comm->shared, sizeof(Shared));
  free(comm);
  return SUCCESS;
}
