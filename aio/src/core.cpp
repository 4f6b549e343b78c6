// The engine's thread: it cuts, submits, reaps, tries again, counts.
#include "core.h"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <iterator>
#include <system_error>

namespace aio {

namespace {

int64_t cpu_ns_of_this_thread() {
    timespec used{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return used.tv_sec * int64_t(1'000'000'000) + used.tv_nsec;
}

constexpr int64_t TRY_OUT_NS = 1'000'000'000;
constexpr int LOOKS = 100;
constexpr int64_t SLEEP_NS_MAX = 1'000'000'000;  // a wake gets lost where its descriptor was closed
constexpr int64_t BLOCK_BYTES = 4096;

// Bytes free on the file system of a file, for a message; -1 where it does not say.
int64_t free_bytes_of(int fd) {
    struct statvfs found;
    if (fstatvfs(fd, &found) != 0 || found.f_blocks == 0) return -1;
    return int64_t((geteuid() == 0 ? found.f_bfree : found.f_bavail) * found.f_frsize);
}

// Whether a file has nothing from there on. O_DIRECT reads the rest of a block at its end again and
// again, as it starts at the block.
bool ends_at(int fd, int64_t offset) {
    struct stat found;
    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode) && found.st_size <= offset;
}

std::unique_ptr<Queue> opened_queue(Kind kind, int depth) {
    switch (kind) {
        case Kind::io_uring: return open_io_uring(depth);
        case Kind::linux_aio: return open_linux_aio(depth);
        case Kind::threads: return open_thread_pool(depth);
    }
    throw std::system_error(EINVAL, std::generic_category(), "kind of queue");
}

[[noreturn]] void not_working(const char* what, int code = ETIME) {
    throw std::system_error(code, std::generic_category(), what);
}

// Wakes the queue and has it read a block of a file in memory.
void try_out(Queue& queue) {
    std::vector<Completion> over;
    queue.wake();
    if (!queue.reap(over, TRY_OUT_NS)) not_working("it cannot be woken");
    const int fd = memfd_create("aio", MFD_CLOEXEC);
    if (fd < 0) return;  // that is not its fault
    auto block = std::make_unique<std::byte[]>(BLOCK_BYTES);
    Piece piece{fd, false, block.get(), BLOCK_BYTES, 0};
    Piece* const pieces[] = {&piece};
    const bool sized = ftruncate(fd, BLOCK_BYTES) == 0;
    size_t taken = 0;
    // Looks count, too, not time alone: a process that was stopped meanwhile has not looked.
    const int64_t end = now_ns() + TRY_OUT_NS;
    for (int look = 0; sized && over.empty() && (look < LOOKS || now_ns() < end); look++) {
        if (taken == 0) taken = queue.submit(pieces);
        queue.reap(over, TRY_OUT_NS / LOOKS);
    }
    queue.forget(fd);
    close(fd);
    if (!sized) return;
    if (over.empty()) {
        static_cast<void>(block.release());  // it may come after all
        not_working("it takes transfers and does not do them");
    }
    if (over[0].result != BLOCK_BYTES)
        not_working("read of a file in memory", over[0].result < 0 ? int(-over[0].result) : EIO);
}

}  // namespace

std::unique_ptr<Queue> open_queue(Kind kind, int depth) {
    auto queue = opened_queue(kind, depth);
    try_out(*queue);
    return queue;
}

void Request::finish() {
    if (transfer_.finished) transfer_.finished(moved_, operations_);
    std::lock_guard lock(mutex_);
    done_.set();
    for (const auto& watcher : watchers_) watcher->set();
    watchers_.clear();
}

void Core::run(Signal& opened, std::exception_ptr& failure) {
    static constexpr const char* NAMES[] = {"aio-io_uring", "aio-linux_aio", "aio-threads"};
    prctl(PR_SET_NAME, NAMES[int(options_.kind)], 0, 0, 0);
    try {
        auto queue = with_faults(open_queue(options_.kind, options_.depth), options_.faults);
        std::lock_guard lock(mutex_);
        queue_ = std::move(queue);
        open_ = true;
    } catch (...) {
        failure = std::current_exception();
    }
    const bool works = failure == nullptr;
    opened.set();
    try {
        while (works && take_inbox()) {
            give();
            reap();
        }
    } catch (const std::system_error& error) {
        give_up(error.code().value());
    } catch (...) {  // no memory: what else there is to be thrown is of that kind
        give_up(ENOMEM);
    }
    close_queue();
    std::lock_guard lock(mutex_);
    ended_thread_ = true;
    ended_.notify_all();
}

// Without the lock, which callers may take with one of their own: some kernels take 40 ms for it.
void Core::close_queue() {
    std::unique_ptr<Queue> queue;
    {
        std::lock_guard lock(mutex_);
        open_ = asleep_ = idle_ = false;
        if (queue_) cpu_ns_at_end_ = queue_->cpu_ns() + cpu_ns_of_this_thread();
        queue = std::move(queue_);
    }
}

// The queue is out of order, and nothing more comes back from it: everything fails. It takes no
// memory, as there may be none, and no lock for what nobody adds to any more.
void Core::give_up(int code) {
    {
        std::lock_guard lock(mutex_);
        broken_ = code;
        open_ = asleep_ = idle_ = false;
    }
    for (auto* calls : {&taken_calls_, &calls_}) {
        for (Call* call : *calls) call->done.set();
        calls->clear();
    }
    queue_->quiesce();  // first: what is under way goes on without us, in memory to be given back
    close_queue();
    const Failure failure{.code = EIO, .cause = Cause::queue_broken, .last_code = code};
    for (Flight& flight : flights_)
        if (flight.request != nullptr) end(flight, failure);
    const auto fail = [&](const std::shared_ptr<Request>& request) {
        if (request == nullptr) return;  // moved from one of these to another
        const Part& part = request->transfer_.parts[request->part_];
        request->failure_ = failure;
        request->failure_.offset = part.offset + request->given_;
        request->failure_.bytes = part.bytes - request->given_;
        finish(*request);
    };
    for (; !requests_.empty(); requests_.pop_front()) fail(requests_.front());
    for (auto* requests : {&taken_, &inbox_}) {
        std::for_each(requests->begin(), requests->end(), fail);
        requests->clear();
    }
}

// False when the engine is closed and nothing is left to do.
bool Core::take_inbox() {
    {
        std::lock_guard lock(mutex_);
        asleep_ = idle_ = false;
        taken_.swap(inbox_);
        taken_calls_.swap(calls_);
        const bool idle = taken_.empty() && requests_.empty() && free_.size() == flights_.size();
        if (closing_ && idle && taken_calls_.empty()) {
            open_ = false;
            return false;
        }
    }
    while (!taken_calls_.empty()) {  // those that remain are waited for still, whatever is thrown
        Call* const call = taken_calls_.back();
        (*call->action)(*queue_);
        taken_calls_.pop_back();
        call->done.set();
    }
    std::move(taken_.begin(), taken_.end(), std::back_inserter(requests_));
    taken_.clear();
    return true;
}

void Core::give() {
    const int64_t now = now_ns();
    std::erase_if(resting_, [&](Flight* flight) {
        if (flight->due > now) return false;
        ready_.push_back(flight);
        return true;
    });
    cut();
    if (ready_.empty()) return;
    for (Piece* piece : ready_) static_cast<Flight*>(piece)->started = now;
    const size_t taken = queue_->submit(ready_);
    ready_.erase(ready_.begin(), ready_.begin() + ptrdiff_t(taken));
    submitted_ += taken;
    refusals_ = submitted_ > 0 ? 0 : refusals_ + 1;
    if (refusals_ > RETRIES_MAX) {
        Flight& first = static_cast<Flight&>(*ready_.front());
        ready_.erase(ready_.begin());
        end(first, {.code = EIO, .cause = Cause::no_progress, .tries = refusals_,
                    .last_code = EAGAIN});
        refusals_ = 0;
    }
    depth_max_.add(std::max<int64_t>(0, int64_t(submitted_) - depth_max_.get()));
}

// Cut pieces from the oldest requests, as many as may be in flight.
void Core::cut() {
    while (!requests_.empty() && !free_.empty()) {
        const std::shared_ptr<Request>& request = requests_.front();
        const Transfer& transfer = request->transfer_;
        const Part& part = transfer.parts[request->part_];
        const int64_t bytes = std::min(options_.piece_bytes, part.bytes - request->given_);
        if (inflight_bytes_ + bytes > options_.inflight_bytes_max) return;
        Flight& flight = *free_.back();
        free_.pop_back();
        static_cast<Piece&>(flight) = {transfer.fd, transfer.writing, part.data + request->given_,
                                       bytes, part.offset + request->given_};
        flight.request = request;
        flight.room = bytes;
        flight.tries = 0;
        inflight_bytes_ += bytes;
        request->running_++;
        ready_.push_back(&flight);
        request->given_ += bytes;
        if (request->given_ < part.bytes) continue;
        request->given_ = 0;
        if (++request->part_ == transfer.parts.size()) requests_.pop_front();
    }
}

// How long to wait for what is over. A new request is worth being woken for only where it could be
// cut at once; else it is found when something is over, which is when there is room for it.
int64_t Core::time_to_sleep() {
    int64_t wait_ns = SLEEP_NS_MAX;
    if (!resting_.empty()) {
        const auto earlier = [](const Flight* a, const Flight* b) { return a->due < b->due; };
        const int64_t due = (*std::min_element(resting_.begin(), resting_.end(), earlier))->due;
        wait_ns = std::max<int64_t>(0, due - now_ns());
    } else if (!ready_.empty() && submitted_ == 0) {
        wait_ns = RETRY_DELAY_NS;  // what the queue had no room for
    }
    const bool room = requests_.empty() && !free_.empty() &&
                      inflight_bytes_ < options_.inflight_bytes_max;
    const bool nothing = requests_.empty() && free_.size() == flights_.size();
    std::lock_guard lock(mutex_);
    if (!calls_.empty() || (room && !inbox_.empty()) || (closing_ && nothing)) return 0;
    asleep_ = wait_ns != 0;
    idle_ = asleep_ && room;
    return wait_ns;
}

void Core::reap() {
    over_.clear();
    queue_->reap(over_, time_to_sleep());
    if (over_.empty()) return;
    const int64_t now = now_ns();
    submitted_ -= over_.size();
    for (const Completion& completion : over_) {
        Flight& flight = static_cast<Flight&>(*completion.piece);
        count(flight, now);
        complete(flight, completion.result);
    }
}

void Core::count(const Flight& flight, int64_t now) {
    const uint64_t us = uint64_t(std::max<int64_t>(now - flight.started, 0)) / 1000;
    const size_t bucket = us == 0 ? 0 : size_t(std::bit_width(us)) - 1;
    latencies_[std::min(bucket, LATENCIES - 1)].add(1);
    operations_.add(1);
    flight.request->operations_++;
}

// What the kernel said of a piece: it is over, goes on where it stands, or has failed.
void Core::complete(Flight& flight, int64_t result) {
    if (result == -EINTR || result == -EAGAIN) return again(flight, int(-result));
    if (result < 0) return end(flight, {.code = int(-result)});
    if (result == 0 && !flight.writing)
        return end(flight, {.code = EIO, .cause = Cause::end_of_file});
    Request& request = *flight.request;
    const int64_t moved = std::min(result, flight.bytes);
    const int64_t kept = moved == flight.bytes ? moved : moved - moved % request.transfer_.align;
    flight.data += kept;
    flight.offset += kept;
    flight.bytes -= kept;
    request.moved_ += kept;
    (flight.writing ? bytes_written_ : bytes_read_).add(kept);
    if (flight.bytes == 0) return end(flight, {});
    if (kept == 0 && !flight.writing && ends_at(flight.fd, flight.offset + moved)) {
        flight.offset += moved;
        flight.bytes -= moved;
        return end(flight, {.code = EIO, .cause = Cause::end_of_file});
    }
    if (kept == 0) return again(flight, 0);
    flight.tries = 0;
    retries_.add(1);
    ready_.push_back(&flight);
}

void Core::again(Flight& flight, int last_code) {
    if (++flight.tries > RETRIES_MAX)
        return end(flight, {.code = EIO, .cause = Cause::no_progress, .tries = flight.tries,
                            .last_code = last_code});
    retries_.add(1);
    flight.due = now_ns() + RETRY_DELAY_NS;
    resting_.push_back(&flight);
}

void Core::end(Flight& flight, Failure failure) {
    const std::shared_ptr<Request> request = std::move(flight.request);
    inflight_bytes_ -= flight.room;
    free_.push_back(&flight);
    request->running_--;
    if (failure.code != 0) {
        failure.offset = flight.offset;
        failure.bytes = flight.bytes;
        const Failure& first = request->failure_;
        if (first.code == 0 || failure.offset < first.offset) request->failure_ = failure;
        const auto uncut = std::find(requests_.begin(), requests_.end(), request);
        if (uncut != requests_.end()) requests_.erase(uncut);
        request->part_ = request->transfer_.parts.size();
    }
    if (request->running_ == 0 && request->part_ == request->transfer_.parts.size())
        finish(*request);
}

void Core::finish(Request& request) {
    const int fd = request.transfer_.fd, code = request.failure_.code;
    if (code == ENOSPC || code == EDQUOT || code == EFBIG)
        request.failure_.free_bytes = free_bytes_of(fd);
    request.finish();
    std::lock_guard lock(mutex_);
    const auto found = pending_.find(fd);
    if (--found->second > 0) return;
    pending_.erase(found);
    drained_.notify_all();
}

}  // namespace aio
