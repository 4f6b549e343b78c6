// A descriptor of the engine's own, in a process where anybody may close any.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

namespace aio {

// Closed at the end, if it is still ours: where something else in the process has closed it, its
// number may be another file's by then, which is neither to be written nor closed. Eventfds and
// rings have one inode in common, so that somebody else's are not told from ours.
class Descriptor {
public:
    explicit Descriptor(int fd) : fd_(fd) {
        if (fd_ >= 0 && fstat(fd_, &first_) != 0) first_ = {};
    }
    Descriptor(const Descriptor&) = delete;
    ~Descriptor() {
        if (is_ours()) close(fd_);
    }
    operator int() const { return fd_; }

    bool is_ours() const {
        struct stat now;
        return fd_ >= 0 && fstat(fd_, &now) == 0 && now.st_dev == first_.st_dev &&
               now.st_ino == first_.st_ino;
    }

private:
    const int fd_;
    struct stat first_{};
};

}  // namespace aio
