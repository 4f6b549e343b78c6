// Calls of the C library that change files, failing for paths under a directory from the n-th call
// on, as on a drive that is full, read-only or broken. Preloaded (LD_PRELOAD) into a real process.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

char directory[4096];
std::atomic<long> calls{0}, first{0}, last{0};
std::atomic<int> code{0}, halves{0};

bool inside(const char* path) {
    const size_t length = strlen(directory);
    return length && strncmp(path, directory, length) == 0;
}

bool inside(int fd) {
    char link[64], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, path, sizeof path - 1);
    path[length < 0 ? 0 : length] = 0;
    return inside(path);
}

// Whether this call fails. The first one that does falls short instead, where that was asked for.
bool fails(bool counted, bool* falls_short = nullptr) {
    if (!counted) return false;
    const long number = ++calls;
    if (number < first || number > last) return false;
    if (falls_short && number == first && halves) {
        *falls_short = true;
        return false;
    }
    errno = code;
    return true;
}

template <typename Call>
Call next(const char* name, Call) {
    return reinterpret_cast<Call>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

// From now on: calls `from` to `to` under `where` fail with `error`; where `half` is not 0 a write
// that is the first of them writes a half. Returns how many calls there were since the last time.
long fail_writes(const char* where, long from, long to, int error, int half) {
    const long before = calls.exchange(0);
    strncpy(directory, where, sizeof directory - 1);
    first = from, last = to, code = error, halves = half;
    return before;
}

#define FAIL(name, counted, ...)                                 \
    static const auto call = next(#name, &name);                 \
    return fails(counted) ? -1 : call(__VA_ARGS__)
#define OF_FD(name, result, parameters, fd, ...) \
    result name parameters { FAIL(name, inside(fd), fd __VA_OPT__(,) __VA_ARGS__); }
#define OF_PATH(name, parameters, path, ...) \
    int name parameters { FAIL(name, inside(path), __VA_ARGS__); }

OF_FD(fsync, int, (int fd), fd)
OF_FD(fdatasync, int, (int fd), fd)
OF_FD(ftruncate, int, (int fd, off_t size) noexcept, fd, size)
OF_FD(ftruncate64, int, (int fd, off64_t size) noexcept, fd, size)
OF_FD(fallocate, int, (int fd, int mode, off_t at, off_t size), fd, mode, at, size)
OF_FD(fallocate64, int, (int fd, int mode, off64_t at, off64_t size), fd, mode, at, size)
OF_PATH(rename, (const char* old, const char* to) noexcept, to, old, to)
OF_PATH(link, (const char* old, const char* to) noexcept, to, old, to)
OF_PATH(mkdir, (const char* path, mode_t mode) noexcept, path, path, mode)
OF_PATH(unlink, (const char* path) noexcept, path, path)
OF_PATH(rmdir, (const char* path) noexcept, path, path)
OF_PATH(renameat2, (int at, const char* old, int there, const char* to, unsigned flags) noexcept,
        to, at, old, there, to, flags)

#define OPEN(name)                                                                 \
    int name(const char* path, int flags, ...) {                                   \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        const mode_t mode = va_arg(rest, mode_t);                                  \
        va_end(rest);                                                              \
        const bool writes = (flags & (O_ACCMODE | O_CREAT)) != O_RDONLY;           \
        FAIL(name, writes && inside(path), path, flags, mode);                     \
    }
OPEN(open)
OPEN(open64)

#define WRITE(name, offset, ...)                                                        \
    ssize_t name(int fd, const void* from, size_t size __VA_OPT__(, offset at)) {       \
        static const auto call = next(#name, &name);                                    \
        bool half = false;                                                              \
        if (fails(inside(fd), &half)) return -1;                                        \
        return call(fd, from, half && size > 1 ? size / 2 : size __VA_OPT__(, at));     \
    }
WRITE(write, void)
WRITE(pwrite, off_t, at)
WRITE(pwrite64, off64_t, at)

#define PWRITEV(name, offset)                                                           \
    ssize_t name(int fd, const iovec* parts, int count, offset at) {                    \
        static const auto call = next(#name, &name);                                    \
        bool half = false;                                                              \
        if (fails(inside(fd), &half)) return -1;                                        \
        const iovec one{parts->iov_base, parts->iov_len > 1 ? parts->iov_len / 2 : 1};  \
        return half ? call(fd, &one, 1, at) : call(fd, parts, count, at);               \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)
}
