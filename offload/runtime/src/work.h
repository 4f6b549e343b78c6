// What lanes do, without Python and the GIL: copies, sums, updates, transfers of files. `works.py`
// says what of it an op does, and `native.py` makes it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "../../../aio/src/chunks.h"
#include "../../../cpu_adam/src/sweep.h"
#include "driver.h"
#include "task.h"

namespace runner {

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
struct Settings : std::enable_shared_from_this<Settings> {
    Settings(std::vector<float> factors, std::shared_ptr<Clip> clip)
        : factors(std::move(factors)), clip(std::move(clip)) {}

    std::vector<float> factors;
    std::shared_ptr<Clip> clip;

    // At least so many rows, with the scale of the clipping.
    std::vector<float> scaled(int64_t rows) const;
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

// What is left to do when the device is through with a work; empty where nothing is.
using After = std::function<void()>;

class Work : public std::enable_shared_from_this<Work> {
public:
    virtual ~Work() = default;
    // On the calling thread, with the staging slot of its chunk, 0 where it has none.
    virtual void run(int, const Settings*) const { throw std::logic_error("of another lane"); }
    // Bytes of a copy that is done by who makes it ready, where they are few.
    virtual size_t bytes_at_hand() const { return SIZE_MAX; }
    // What it is for the lane of the drives, which has many under way.
    virtual const aio::ChunkTransfer* transfer() const { return nullptr; }
    // The chunks of a stream.
    virtual const std::vector<Link>* links() const { return nullptr; }
    // Whether the device does it, once it is queued on one of its streams.
    virtual bool on_device() const { return false; }
    virtual After queue(driver::Driver&, driver::Stream, int, const Settings*) const {
        throw std::logic_error("of another lane");
    }
};

class Several : public Work {
public:
    explicit Several(std::vector<WorkPtr> works) : works_(std::move(works)) {}
    void run(int slot, const Settings* settings) const override;
    bool on_device() const override { return !works_.empty() && works_.front()->on_device(); }
    After queue(driver::Driver& device, driver::Stream stream, int slot,
                const Settings* settings) const override;

private:
    const std::vector<WorkPtr> works_;
};

struct Copy {
    Where into, source;
    size_t bytes;
};

class Copies : public Work {
public:
    Copies(std::vector<Copy> copies, bool on_device);
    void run(int slot, const Settings*) const override;
    size_t bytes_at_hand() const override { return on_device_ ? SIZE_MAX : bytes_; }
    bool on_device() const override { return on_device_; }
    After queue(driver::Driver& device, driver::Stream stream, int slot,
                const Settings*) const override;

private:
    const std::vector<Copy> copies_;
    const bool on_device_;
    size_t bytes_ = 0;
};

// A table of cpu_adam (sweep.h), whose arrays may lie in a staging slot: `strides` by array.
struct Rows {
    Rows(std::vector<int64_t> rows, std::vector<int64_t> strides);
    // The table of a staging slot.
    std::vector<int64_t> at(int slot) const;

    const std::vector<int64_t> rows, strides;
    const int64_t columns;
    int64_t factors = 0;  // rows of factors that it uses
};

class Sweep : public Work {
public:
    Sweep(const cpu_adam::Action& action, Rows rows) : action_(action), rows_(std::move(rows)) {}
    void run(int slot, const Settings* settings) const override;

private:
    const cpu_adam::Action& action_;
    const Rows rows_;
};

// The same by a kernel of the device, see [Note: Launches] of cpu_adam/src/device/table.cuh.
class DeviceSweep : public Work {
public:
    DeviceSweep(std::string name, cpu_adam::Gradient dtype, int64_t block_elements, Rows rows)
        : name_(std::move(name)), dtype_(dtype), block_elements_(block_elements),
          rows_(std::move(rows)) {}
    bool on_device() const override { return true; }
    After queue(driver::Driver& device, driver::Stream stream, int slot,
                const Settings* settings) const override;

private:
    const std::string name_;
    const cpu_adam::Gradient dtype_;
    const int64_t block_elements_;
    const Rows rows_;
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
    const cpu_adam::Gradient dtype_;
    const std::vector<Stretch> all_;
};

// The same by a kernel of the device, for as many stretches at once as have room in `scratch`: in a
// float64 for each of so many leaves, at least those of the largest stretch.
class DeviceSquares : public Work {
public:
    DeviceSquares(cpu_adam::Gradient dtype, Byte* scratch, int64_t scratch_leaves,
                  int64_t block_elements, std::vector<Stretch> all)
        : dtype_(dtype), scratch_(scratch), scratch_leaves_(scratch_leaves),
          block_elements_(block_elements), all_(std::move(all)) {}
    bool on_device() const override { return true; }
    After queue(driver::Driver& device, driver::Stream stream, int slot,
                const Settings* settings) const override;

private:
    const cpu_adam::Gradient dtype_;
    Byte* const scratch_;
    const int64_t scratch_leaves_, block_elements_;
    const std::vector<Stretch> all_;
};

class Combine : public Work {
public:
    void run(int, const Settings* settings) const override { settings->clip->combine(); }
};

class Chunks : public Work {
public:
    explicit Chunks(aio::ChunkTransfer transfer) : transfer_(std::move(transfer)) {}
    const aio::ChunkTransfer* transfer() const override { return &transfer_; }

private:
    const aio::ChunkTransfer transfer_;
};

// See [Note: Streams] of `program/ops.py`.
class Stream : public Work {
public:
    explicit Stream(std::vector<Link> links) : links_(std::move(links)) {}
    const std::vector<Link>* links() const override { return &links_; }

private:
    const std::vector<Link> links_;
};

}  // namespace runner
