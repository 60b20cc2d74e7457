// Preloaded into a program on a machine whose GPUs read each other's memory, it makes them GPUs that do not, as most pairs of consumer cards
// are: the driver answers "no" to whether one reaches the other, and nothing else changes. verify.sh builds and uses it.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

static int may_not(int *may, int gpu, int other) {
  (void)gpu, (void)other;
  *may = 0;
  return 0;
}

void *dlsym(void *library, const char *name) {
  static void *(*real)(void *, const char *);
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
  if (!real) real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
  return strcmp(name, "cuDeviceCanAccessPeer") == 0 ? (void *)may_not : real(library, name);
}
