/* Faults at the calls of the C library that change files: loaded into a process by LD_PRELOAD.

   Once `arm` was called, calls are counted that would change something beneath a directory. At the n-th the process is
   killed before anything has happened, or when half of the bytes are written; or, if an error was given, this call and
   those after it fail with that error, until `arm` is called again. What writes to mapped memory would not be counted;
   trainkit and its libraries write files by the calls below. One of them is made without the C library, by what Rust
   renames temporary files with; a filter of the kernel (seccomp) hands it to `trapped`. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <ucontext.h>
#include <unistd.h>

static char directory[PATH_MAX];
static atomic_long count, at;
static atomic_int error, removals;

static void install(void);

/* Counts anew beneath `path`, an absolute one without links: kills the process at call `n`, or lets this call and those
   after it fail with `number`; never for n = 0. With `only_removals`, calls that remove or rename are counted only. */
void arm(const char *path, long n, int number, int only_removals) {
    at = 0;
    install();
    snprintf(directory, sizeof directory, "%s", path);
    count = 0;
    error = number;
    removals = only_removals;
    at = n;
}

long counted(void) { return count; }

static _Noreturn void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static int beneath(const char *path) {
    size_t length = strlen(directory);
    return length && !strncmp(path, directory, length) && (path[length] == '/' || path[length] == 0);
}

static int names(int folder, const char *path) {
    char whole[2 * PATH_MAX + 2], link[64];
    if (!directory[0] || !path) return 0;
    if (path[0] == '/') return beneath(path);
    if (folder == AT_FDCWD) {
        if (!getcwd(whole, PATH_MAX)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
        ssize_t length = readlink(link, whole, PATH_MAX);
        if (length < 0) return 0;
        whole[length] = 0;
    }
    size_t length = strlen(whole);
    snprintf(whole + length, PATH_MAX, "/%s", path);
    return beneath(whole);
}

static int holds(int file) {
    char link[64], path[PATH_MAX];
    if (!directory[0]) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = before;
    if (length < 0) return 0;
    path[length] = 0;
    return beneath(path);
}

/* Whether a call is the one: the process is to die, or (the error is set then) the call is to fail. */
enum { NO, DIES, FAILS };
static int strikes(int counts) {
    if (!counts) return NO;
    long now = atomic_fetch_add(&count, 1) + 1, wanted = at;
    if (!wanted || now < wanted) return NO;
    if (error) return errno = error, FAILS;
    return now == wanted ? DIES : NO;
}

static int before(int counts) {
    int found = strikes(counts);
    if (found == DIES) die();
    return found;
}

static _Thread_local int within;

#define TRUE_ONE(name) __typeof__(&name) honest = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define CHANGES(type, failed, name, given, passed, counts)                                                             \
    type name given {                                                                                                  \
        TRUE_ONE(name);                                                                                                \
        if (before(counts)) return (type)failed;                                                                       \
        within++;                                                                                                      \
        type found = honest passed;                                                                                    \
        within--;                                                                                                      \
        return found;                                                                                                  \
    }
#define ALTERS(name, given, passed, counts) CHANGES(int, -1, name, given, passed, !removals && (counts))
/* A full disk lets go of files. */
#define REMOVES(name, given, passed, counts) CHANGES(int, -1, name, given, passed, error != ENOSPC && (counts))

/* ------------------------------------------------------------------------------------------------------ opening */

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC) && !((flags) & O_DIRECTORY))
#define OPENS(name, given, folder, passed)                                                                             \
    int name given {                                                                                                   \
        TRUE_ONE(name);                                                                                                \
        va_list rest;                                                                                                  \
        va_start(rest, flags);                                                                                         \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;                                      \
        va_end(rest);                                                                                                  \
        return before(!removals && WRITES(flags) && names(folder, path)) ? -1 : honest passed;                         \
    }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD, (path, flags, mode))
OPENS(openat, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
OPENS(openat64, (int folder, const char *path, int flags, ...), folder, (folder, path, flags, mode))
ALTERS(creat, (const char *path, mode_t mode), (path, mode), names(AT_FDCWD, path))
ALTERS(creat64, (const char *path, mode_t mode), (path, mode), names(AT_FDCWD, path))

#define OPENS_STREAM(name)                                                                                             \
    CHANGES(FILE *, NULL, name, (const char *path, const char *mode), (path, mode),                                    \
            !removals && (mode[0] != 'r' || strchr(mode, '+')) && names(AT_FDCWD, path))
OPENS_STREAM(fopen)
OPENS_STREAM(fopen64)

/* ------------------------------------------------------------------------------------------------------ writing */

#define HALF(half)                                                                                                     \
    switch (strikes(!removals && holds(file))) {                                                                       \
    case DIES:                                                                                                         \
        half;                                                                                                          \
        die();                                                                                                         \
    case FAILS:                                                                                                        \
        return -1;                                                                                                     \
    default:                                                                                                           \
        break;                                                                                                         \
    }
#define WRITES_BYTES(name, given, passed, halved)                                                                      \
    ssize_t name given {                                                                                               \
        TRUE_ONE(name);                                                                                                \
        HALF(if (size / 2 && honest halved < 0) abort())                                                         \
        return honest passed;                                                                                          \
    }
WRITES_BYTES(write, (int file, const void *bytes, size_t size), (file, bytes, size), (file, bytes, size / 2))
WRITES_BYTES(pwrite, (int file, const void *bytes, size_t size, off_t place), (file, bytes, size, place),
             (file, bytes, size / 2, place))
WRITES_BYTES(pwrite64, (int file, const void *bytes, size_t size, off64_t place), (file, bytes, size, place),
             (file, bytes, size / 2, place))
WRITES_BYTES(sendfile, (int file, int from, off_t *place, size_t size), (file, from, place, size),
             (file, from, place, size / 2))
WRITES_BYTES(sendfile64, (int file, int from, off64_t *place, size_t size), (file, from, place, size),
             (file, from, place, size / 2))
WRITES_BYTES(copy_file_range, (int from, off64_t *there, int file, off64_t *here, size_t size, unsigned flags),
             (from, there, file, here, size, flags), (from, there, file, here, size / 2, flags))

static void half_of(int file, const struct iovec *parts, int number) {
    size_t size = 0;
    for (int i = 0; i < number; i++) size += parts[i].iov_len;
    __typeof__(&write) honest = (__typeof__(&write))dlsym(RTLD_NEXT, "write");
    size /= 2;
    for (int i = 0; i < number && size; i++) {
        size_t bytes = parts[i].iov_len < size ? parts[i].iov_len : size;
        if (honest(file, parts[i].iov_base, bytes) < 0) abort();
        size -= bytes;
    }
}
ssize_t writev(int file, const struct iovec *parts, int number) {
    TRUE_ONE(writev);
    HALF(half_of(file, parts, number))
    return honest(file, parts, number);
}

/* ------------------------------------------------------------------------------------------------ all the others */

ALTERS(fsync, (int file), (file), holds(file))
ALTERS(fdatasync, (int file), (file), holds(file))
ALTERS(ftruncate, (int file, off_t size), (file, size), holds(file))
ALTERS(ftruncate64, (int file, off64_t size), (file, size), holds(file))
ALTERS(truncate, (const char *path, off_t size), (path, size), names(AT_FDCWD, path))
ALTERS(truncate64, (const char *path, off64_t size), (path, size), names(AT_FDCWD, path))
ALTERS(fallocate, (int file, int mode, off_t from, off_t size), (file, mode, from, size), holds(file))
ALTERS(fallocate64, (int file, int mode, off64_t from, off64_t size), (file, mode, from, size), holds(file))
CHANGES(int, errno, posix_fallocate, (int file, off_t from, off_t size), (file, from, size), !removals && holds(file))
CHANGES(int, errno, posix_fallocate64, (int file, off64_t from, off64_t size), (file, from, size),
        !removals && holds(file))
ALTERS(mkdir, (const char *path, mode_t mode), (path, mode), names(AT_FDCWD, path))
ALTERS(mkdirat, (int folder, const char *path, mode_t mode), (folder, path, mode), names(folder, path))
ALTERS(chmod, (const char *path, mode_t mode), (path, mode), names(AT_FDCWD, path))
ALTERS(fchmod, (int file, mode_t mode), (file, mode), holds(file))
ALTERS(fchmodat, (int folder, const char *path, mode_t mode, int flags), (folder, path, mode, flags),
       names(folder, path))
ALTERS(link, (const char *from, const char *path), (from, path), names(AT_FDCWD, path))
ALTERS(linkat, (int there, const char *from, int folder, const char *path, int flags),
       (there, from, folder, path, flags), names(folder, path))
ALTERS(symlink, (const char *from, const char *path), (from, path), names(AT_FDCWD, path))
ALTERS(symlinkat, (const char *from, int folder, const char *path), (from, folder, path), names(folder, path))
REMOVES(rename, (const char *from, const char *path), (from, path),
        names(AT_FDCWD, from) || names(AT_FDCWD, path))
REMOVES(renameat, (int there, const char *from, int folder, const char *path), (there, from, folder, path),
        names(there, from) || names(folder, path))
REMOVES(renameat2, (int there, const char *from, int folder, const char *path, unsigned flags),
        (there, from, folder, path, flags), names(there, from) || names(folder, path))
REMOVES(remove, (const char *path), (path), names(AT_FDCWD, path))
REMOVES(unlink, (const char *path), (path), names(AT_FDCWD, path))
REMOVES(unlinkat, (int folder, const char *path, int flags), (folder, path, flags), names(folder, path))
REMOVES(rmdir, (const char *path), (path), names(AT_FDCWD, path))

/* -------------------------------------------------------------------------------- renaming without the C library */

#define OURS 0x7a11
#if defined(__x86_64__)
#define ARGUMENT(i) (long)context->uc_mcontext.gregs[(const int[]){REG_RDI, REG_RSI, REG_RDX, REG_R10}[i]]
#define RESULT context->uc_mcontext.gregs[REG_RAX]
#elif defined(__aarch64__)
#define ARGUMENT(i) (long)context->uc_mcontext.regs[i]
#define RESULT context->uc_mcontext.regs[0]
#else
#error "x86-64 or arm64 is needed: the arguments of a call are read from registers"
#endif

static void trapped(int number, siginfo_t *info, void *given) {
    (void)number, (void)info;
    int kept = errno;
    ucontext_t *context = given;
    const char *from = (const char *)ARGUMENT(1), *path = (const char *)ARGUMENT(3);
    int there = (int)ARGUMENT(0), folder = (int)ARGUMENT(2);
    int counts = !within && error != ENOSPC && (names(there, from) || names(folder, path));
    long found = before(counts) ? -1 : syscall(SYS_renameat, there, from, folder, path, 0L, (long)OURS);
    RESULT = found < 0 ? -errno : found;
    errno = kept;
}

/* Also in programs that a process with the filter starts. */
__attribute__((constructor)) static void handle(void) {
    struct sigaction action = {.sa_sigaction = trapped, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigaction(SIGSYS, &action, NULL);
}

static void install(void) {
    static int installed;
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_renameat, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[5])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, OURS, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};
    if (installed++) return;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) ||
        syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program)) {
        perror("faults: the kernel's filter of renameat cannot be installed");
        abort();
    }
}
