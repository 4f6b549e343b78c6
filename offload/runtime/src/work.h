// What lanes do by themselves, without Python and the GIL: copies, sums, updates, and transfers of
// files. `native_work.py` makes them; what each does is there, and in the modules of Python that it
// stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <vector>

#include "../../../aio/src/chunks.h"
#include "../../../cpu_adam/src/sweep.h"
#include "task.h"

namespace books {

using cpu_adam::Byte;

// An address; in a staging ring that of slot 0, and the way from a slot to the next.
struct Where {
    Byte* base = nullptr;
    int64_t stride = 0;

    Byte* at(int slot) const { return base + stride * slot; }
};

// The clipping of one step: sums of squares come in any order, and are added up in theirs.
struct Clip {
    explicit Clip(double max_norm) : max_norm(max_norm) {}

    void put(int64_t leaf, const cpu_adam::Nodes& nodes) {
        const std::lock_guard lock(mutex);
        parts[leaf] = nodes;
    }
    void combine();

    double max_norm, norm = 0, factor = 1;
    std::mutex mutex;  // guards
    std::map<int64_t, cpu_adam::Nodes> parts;
};

// What of a step its works are given: rows of factors, and what scales gradients.
struct Settings {
    std::vector<float> factors;
    std::shared_ptr<Clip> clip;
};

class Work;
using WorkPtr = std::shared_ptr<const Work>;

// What is done for a chunk of a stream, one after the other: read and brought, worked on, put back.
struct Stage {
    int lane;
    WorkPtr work;
    Part part;
    int64_t bytes;
};
using Link = std::vector<Stage>;

struct Copy {
    Where into, source;
    size_t bytes;
};

class Work {
public:
    virtual ~Work() = default;
    // With the staging slot of its chunk, 0 where it has none.
    virtual void run(int slot, const Settings* settings) const = 0;
    // Bytes of a copy that is done by who makes it ready, where they are few.
    virtual size_t bytes_at_hand() const { return SIZE_MAX; }
    // What it is for the lane of the drives, which has many under way.
    virtual const aio::ChunkTransfer* transfer() const { return nullptr; }
    // What the device copies, which has several under way.
    virtual const std::vector<Copy>* device_copies() const { return nullptr; }
    // The chunks of a stream.
    virtual const std::vector<Link>* links() const { return nullptr; }
};

class Several : public Work {
public:
    explicit Several(std::vector<WorkPtr> works) : works_(std::move(works)) {}
    void run(int slot, const Settings* settings) const override;

private:
    std::vector<WorkPtr> works_;
};

class Copies : public Work {
public:
    explicit Copies(std::vector<Copy> copies, bool on_device = false);
    void run(int slot, const Settings*) const override;
    size_t bytes_at_hand() const override { return on_device_ ? SIZE_MAX : bytes_; }
    const std::vector<Copy>* device_copies() const override {
        return on_device_ ? &copies_ : nullptr;
    }

private:
    std::vector<Copy> copies_;
    const bool on_device_;
    size_t bytes_ = 0;
};

// A table of cpu_adam (sweep.h), whose arrays may lie in a staging slot: `strides` by array.
class Sweep : public Work {
public:
    Sweep(const cpu_adam::Action& action, std::vector<int64_t> rows, std::vector<int64_t> strides);
    void run(int slot, const Settings* settings) const override;

private:
    const cpu_adam::Action& action_;
    std::vector<int64_t> rows_, strides_;
    int64_t columns_, factors_ = 0;  // rows of factors that it uses
};

struct Stretch {
    int64_t leaf, first;  // number of its first leaf for a `Clip`, and in its parameter
    Where at;
    int64_t elements;
};

// Sums of squares of parts of parameters.
class Squares : public Work {
public:
    Squares(const cpu_adam::Kernel& kernel, cpu_adam::Gradient dtype, std::vector<Stretch> all)
        : kernel_(kernel), dtype_(dtype), all_(std::move(all)) {}
    void run(int slot, const Settings* settings) const override;

private:
    const cpu_adam::Kernel& kernel_;
    cpu_adam::Gradient dtype_;
    std::vector<Stretch> all_;
};

class Combine : public Work {
public:
    void run(int, const Settings* settings) const override { settings->clip->combine(); }
};

class Chunks : public Work {
public:
    explicit Chunks(aio::ChunkTransfer transfer) : transfer_(std::move(transfer)) {}
    void run(int, const Settings*) const override { throw std::logic_error("of another lane"); }
    const aio::ChunkTransfer* transfer() const override { return &transfer_; }

private:
    const aio::ChunkTransfer transfer_;
};

// See [Note: Streams] of `program/ops.py`.
class Stream : public Work {
public:
    explicit Stream(std::vector<Link> links) : links_(std::move(links)) {}
    void run(int, const Settings*) const override { throw std::logic_error("of another lane"); }
    const std::vector<Link>* links() const override { return &links_; }

private:
    const std::vector<Link> links_;
};

}  // namespace books
