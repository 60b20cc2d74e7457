/* Sits between the program and the C library (LD_PRELOAD) and sees every call that changes the disk below CAMPAIGN_ROOT.
 *
 * CAMPAIGN_LOG=FILE     writes down each one that worked, with its number and its data: what power.rs replays
 * CAMPAIGN_FAIL_AT=N    the N-th call, counted from 0, fails with CAMPAIGN_ERRNO
 * CAMPAIGN_STICKY=1     and so does every later one
 * CAMPAIGN_ONLY=CALL     of these calls alone the N-th is counted
 * CAMPAIGN_DELAY_MS=N    instead of failing a call takes so much longer
 * CAMPAIGN_KILL_AT=N    the program is killed before the N-th call
 * CAMPAIGN_HANG=FILE    once it exists, reads at offsets of .bin files never come back
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long calls, fail_at = -1, kill_at = -1;
static int sticky, error, log_fd = -1;
static const char *root, *only;
static long delay_ms;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void begin(void) {
    const char *at = getenv("CAMPAIGN_FAIL_AT"), *code = getenv("CAMPAIGN_ERRNO"), *file = getenv("CAMPAIGN_LOG");
    const char *kill_text = getenv("CAMPAIGN_KILL_AT");
    const char *delay = getenv("CAMPAIGN_DELAY_MS");
    root = getenv("CAMPAIGN_ROOT");
    only = getenv("CAMPAIGN_ONLY");
    if (delay) delay_ms = atol(delay);
    if (kill_text) kill_at = atol(kill_text);
    if (at) fail_at = atol(at);
    if (code) error = atoi(code);
    sticky = getenv("CAMPAIGN_STICKY") != NULL;
    if (file) log_fd = syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
}

/* The absolute path of an open file. */
static void of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, out, PATH_MAX - 1);
    out[len > 0 ? len : 0] = 0;
}

/* The absolute path of a name. */
static void of_name(int dir, const char *name, char *out) {
    if (name[0] == '/') {
        snprintf(out, PATH_MAX, "%s", name);
        return;
    }
    if (dir == AT_FDCWD) {
        if (!getcwd(out, PATH_MAX)) out[0] = 0;
    } else {
        of_fd(dir, out);
    }
    size_t len = strlen(out);
    snprintf(out + len, PATH_MAX - len, "/%s", name);
}

/* Whether it is ours to see; then the lock is held until `done`. */
static int ours(const char *path) {
    size_t len = root ? strlen(root) : 0;
    if (!len || strncmp(path, root, len) || strstr(path, " (deleted)")) return 0;
    pthread_mutex_lock(&lock);
    return 1;
}

static int fails(const char *op) {
    if (only && strcmp(op, only)) return 0;
    long n = calls++;
    if (n == kill_at) raise(SIGKILL);
    int is_hit = fail_at >= 0 && (n == fail_at || (sticky && n > fail_at));
    if (is_hit && delay_ms) usleep(delay_ms * 1000);
    return is_hit && !delay_ms;
}

static void done(int worked, const char *op, const char *path, const char *to, long long at, const void *data, size_t len) {
    int kept = errno;
    if (worked && log_fd >= 0) {
        char line[2 * PATH_MAX + 64];
        int n = snprintf(line, sizeof line, "%ld\t%s\t%s\t%s\t%lld\t%zu\n", calls - 1, op, path, to, at, data ? len : 0);
        syscall(SYS_write, log_fd, line, n);
        if (data) syscall(SYS_write, log_fd, data, len);
    }
    pthread_mutex_unlock(&lock);
    errno = kept;
}

/* Runs CALL under the name OP and returns its result; or the error that was asked for. */
#define SEEN(OP, PATH, TO, AT, DATA, LEN, CALL)                            \
    do {                                                                   \
        if (fails(OP)) {                                                   \
            pthread_mutex_unlock(&lock);                                   \
            errno = error;                                                 \
            return -1;                                                     \
        }                                                                  \
        long long result = (CALL);                                         \
        done(result >= 0, OP, PATH, TO, AT, DATA, result > 0 ? (size_t)(LEN) : 0); \
        return result;                                                     \
    } while (0)

static int open_any(int dir, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int changes = flags & (O_CREAT | O_TRUNC);
    if (changes) of_name(dir, name, path);
    if (!changes || !ours(path)) return syscall(SYS_openat, dir, name, flags, mode);
    struct stat before;
    /* What is there already is opened and nothing more. */
    int is_new = syscall(SYS_newfstatat, AT_FDCWD, path, &before, 0) != 0;
    if (!is_new && !(flags & O_TRUNC)) {
        pthread_mutex_unlock(&lock);
        return syscall(SYS_openat, dir, name, flags, mode);
    }
    SEEN(is_new ? "create" : "truncate", path, "", 0, NULL, 0, syscall(SYS_openat, dir, name, flags, mode));
}

#define MODE()                                      \
    mode_t mode = 0;                                \
    if (flags & (O_CREAT | O_TMPFILE)) {            \
        va_list more;                               \
        va_start(more, flags);                      \
        mode = va_arg(more, mode_t);                \
        va_end(more);                               \
    }

int open(const char *name, int flags, ...) { MODE() return open_any(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE() return open_any(AT_FDCWD, name, flags | O_LARGEFILE, mode); }
int openat(int dir, const char *name, int flags, ...) { MODE() return open_any(dir, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE() return open_any(dir, name, flags | O_LARGEFILE, mode); }

ssize_t write(int fd, const void *data, size_t len) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_write, fd, data, len);
    struct stat now;
    long long at = (fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &now) ? now.st_size : lseek(fd, 0, SEEK_CUR);
    SEEN("write", path, "", at, data, result, syscall(SYS_write, fd, data, len));
}

ssize_t pwrite64(int fd, const void *data, size_t len, off64_t at) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_pwrite64, fd, data, len, at);
    SEEN("write", path, "", at, data, result, syscall(SYS_pwrite64, fd, data, len, at));
}

/* The first part alone: a short write, which every caller must be ready for. */
ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_writev, fd, parts, count);
    pthread_mutex_unlock(&lock);
    while (count > 1 && !parts->iov_len) parts++, count--;
    return write(fd, parts->iov_base, parts->iov_len);
}

ssize_t pread64(int fd, void *data, size_t len, off64_t at) {
    const char *hang = getenv("CAMPAIGN_HANG");
    char path[PATH_MAX];
    if (hang && !access(hang, F_OK)) {
        of_fd(fd, path);
        while (strstr(path, ".bin")) pause();
    }
    return syscall(SYS_pread64, fd, data, len, at);
}

#define ON_FD(name, op)                                                   \
    int name(int fd) {                                                    \
        char path[PATH_MAX];                                              \
        of_fd(fd, path);                                                  \
        if (!ours(path)) return REAL(name)(fd);                           \
        SEEN(op, path, "", 0, NULL, 0, REAL(name)(fd));                   \
    }
ON_FD(fsync, "fsync")
ON_FD(fdatasync, "fsync")

int flock(int fd, int how) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_flock, fd, how);
    SEEN("lock", path, "", 0, NULL, 0, syscall(SYS_flock, fd, how));
}

int ftruncate64(int fd, off64_t size) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_ftruncate, fd, size);
    SEEN("resize", path, "", size, NULL, 0, syscall(SYS_ftruncate, fd, size));
}

int fallocate64(int fd, int mode, off64_t at, off64_t len) {
    char path[PATH_MAX];
    of_fd(fd, path);
    if (!ours(path)) return syscall(SYS_fallocate, fd, mode, at, len);
    SEEN("allocate", path, "", at + len, NULL, 0, syscall(SYS_fallocate, fd, mode, at, len));
}

static int rename_any(int from_dir, const char *from, int to_dir, const char *to, unsigned flags) {
    char source[PATH_MAX], target[PATH_MAX];
    of_name(from_dir, from, source);
    of_name(to_dir, to, target);
    if (!ours(source)) return syscall(SYS_renameat2, from_dir, from, to_dir, to, flags);
    SEEN("rename", source, target, 0, NULL, 0, syscall(SYS_renameat2, from_dir, from, to_dir, to, flags));
}
int rename(const char *from, const char *to) { return rename_any(AT_FDCWD, from, AT_FDCWD, to, 0); }
int renameat(int a, const char *from, int b, const char *to) { return rename_any(a, from, b, to, 0); }
int renameat2(int a, const char *from, int b, const char *to, unsigned flags) { return rename_any(a, from, b, to, flags); }

int mkdirat(int dir, const char *name, mode_t mode) {
    char path[PATH_MAX];
    of_name(dir, name, path);
    if (!ours(path)) return syscall(SYS_mkdirat, dir, name, mode);
    SEEN("mkdir", path, "", 0, NULL, 0, syscall(SYS_mkdirat, dir, name, mode));
}
int mkdir(const char *name, mode_t mode) { return mkdirat(AT_FDCWD, name, mode); }

int unlinkat(int dir, const char *name, int flags) {
    char path[PATH_MAX];
    of_name(dir, name, path);
    if (!ours(path)) return syscall(SYS_unlinkat, dir, name, flags);
    SEEN("remove", path, "", 0, NULL, 0, syscall(SYS_unlinkat, dir, name, flags));
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
