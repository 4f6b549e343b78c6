// The engine's thread: it cuts, submits, reaps and tries again. And what callers do.
#include "engine.h"

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <new>
#include <system_error>
#include <utility>

namespace aio {

namespace {

constexpr int64_t TRY_OUT_NS = 1'000'000'000;

// Opened and tried: a sandbox may let a queue be opened and then forbid it, or do nothing.
std::unique_ptr<Queue> open_queue(Kind kind, int depth) {
    std::unique_ptr<Queue> queue = kind == Kind::io_uring    ? open_io_uring(depth)
                                   : kind == Kind::linux_aio ? open_linux_aio(depth)
                                                             : open_thread_pool(depth);
    std::vector<Completion> over;
    queue->reap(over, 1);
    queue->wake();
    if (!queue->reap(over, TRY_OUT_NS))
        throw std::system_error(ETIME, std::generic_category(), "it cannot be woken");
    return queue;
}

}  // namespace

void Request::finish() {
    if (transfer_.finished) transfer_.finished(failure_);
    done_.set();
}

Engine::Engine(const Options& options) : options_(options), flights_(size_t(options.depth)) {
    for (auto* pieces : {&free_, &resting_}) pieces->reserve(flights_.size());
    ready_.reserve(flights_.size());
    for (Flight& flight : flights_) free_.push_back(&flight);
    std::promise<void> opened;
    auto works = opened.get_future();
    sigset_t all, before;  // signals are left to the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([this, opened = std::move(opened)]() mutable { run(opened); });
    } catch (...) {
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        throw;
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    try {
        works.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

Engine::~Engine() {
    close();
    thread_.join();
}

// Called with the lock held, after something was put where the thread looks before it sleeps.
void Engine::wake_if_asleep() {
    if (!asleep_) return;
    asleep_ = idle_ = false;
    queue_->wake();
}

std::shared_ptr<Request> Engine::submit(Transfer transfer) {
    auto request = std::make_shared<Request>(std::move(transfer));
    const std::vector<Part>& parts = request->transfer_.parts;
    std::unique_lock lock(mutex_);
    if (closing_) return nullptr;
    if (parts.empty() || stopped_ != 0) {
        if (!parts.empty())
            request->failure_ = {EIO, Cause::stopped, parts[0].offset, parts[0].bytes, stopped_};
        lock.unlock();
        request->finish();
        return request;
    }
    pending_[request->transfer_.fd]++;
    inbox_.push_back(request);
    if (idle_) wake_if_asleep();
    return request;
}

bool Engine::drain(int fd, int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    return wait_for(changed_, lock, wait_ns, [&] { return !pending_.contains(fd); });
}

bool Engine::close(int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    closing_ = true;
    wake_if_asleep();
    return wait_for(changed_, lock, wait_ns, [&] { return ended_; });
}

void Engine::run(std::promise<void>& opened) {
    static constexpr const char* NAMES[] = {"aio-io_uring", "aio-linux_aio", "aio-threads"};
    prctl(PR_SET_NAME, NAMES[int(options_.kind)], 0, 0, 0);
    try {
        auto queue = open_queue(options_.kind, options_.depth);
        if (options_.wrap) queue = options_.wrap(std::move(queue));
        std::lock_guard lock(mutex_);
        queue_ = std::move(queue);
    } catch (...) {
        opened.set_exception(std::current_exception());
        return;
    }
    opened.set_value();
    try {
        while (take_inbox()) {
            give();
            reap();
        }
    } catch (const std::system_error& error) {
        stop(error.code().value());
    } catch (const std::bad_alloc&) {
        stop(ENOMEM);
    }
    close_queue();
    std::lock_guard lock(mutex_);
    ended_ = true;
    changed_.notify_all();
}

// Without the lock, which callers may take with one of their own: some kernels take 40 ms for it.
void Engine::close_queue() {
    std::unique_ptr<Queue> queue;
    std::lock_guard lock(mutex_);
    asleep_ = idle_ = false;
    queue = std::move(queue_);
}

// The queue is out of order: everything fails, once nothing is under way any more.
void Engine::stop(int code) {
    {
        std::lock_guard lock(mutex_);
        stopped_ = code;
    }
    close_queue();
    const Failure failure{.code = EIO, .cause = Cause::stopped, .last_code = code};
    for (Flight& flight : flights_)
        if (flight.request != nullptr) end(flight, failure);
    std::move(inbox_.begin(), inbox_.end(), std::back_inserter(requests_));
    for (const auto& request : requests_) {
        const Part& part = request->transfer_.parts[request->part_];
        request->failure_ = {EIO, Cause::stopped, part.offset + request->given_,
                             part.bytes - request->given_, code};
        finish(*request);
    }
    requests_.clear();
    inbox_.clear();
}

// False when the engine is closed and nothing is left to do.
bool Engine::take_inbox() {
    std::lock_guard lock(mutex_);
    asleep_ = idle_ = false;
    std::move(inbox_.begin(), inbox_.end(), std::back_inserter(requests_));
    inbox_.clear();
    return !closing_ || !requests_.empty() || free_.size() < flights_.size();
}

void Engine::give() {
    const int64_t now = now_ns();
    std::erase_if(resting_, [&](Flight* flight) {
        if (flight->due > now) return false;
        ready_.push_back(flight);
        return true;
    });
    cut();
    if (ready_.empty()) return;
    const auto taken = ptrdiff_t(queue_->submit(ready_));
    ready_.erase(ready_.begin(), ready_.begin() + taken);
    submitted_ += taken;
}

// Cut pieces from the oldest requests, as many as may be in flight: from reads and writes by turns,
// as a drive does both at once faster than one after the other.
void Engine::cut() {
    while (!requests_.empty() && !free_.empty()) {
        const bool writing = running_[true] < running_[false];
        auto next = std::ranges::find_if(requests_, [&](const std::shared_ptr<Request>& one) {
            return one->transfer_.writing == writing;
        });
        if (next == requests_.end()) next = requests_.begin();
        const std::shared_ptr<Request>& request = *next;
        const Transfer& transfer = request->transfer_;
        const Part& part = transfer.parts[request->part_];
        const int64_t bytes = std::min(options_.piece_bytes, part.bytes - request->given_);
        Flight& flight = *free_.back();
        free_.pop_back();
        static_cast<Piece&>(flight) = {transfer.fd, transfer.writing, part.data + request->given_,
                                       bytes, part.offset + request->given_};
        flight.request = request;
        flight.tries = 0;
        request->running_++;
        running_[transfer.writing]++;
        ready_.push_back(&flight);
        request->given_ += bytes;
        if (request->given_ < part.bytes) continue;
        request->given_ = 0;
        if (++request->part_ == transfer.parts.size()) requests_.erase(next);
    }
}

// How long to wait for what is over. A new request is worth being woken for only where it could be
// cut at once; else it is found when something is over, which is when there is room for it.
int64_t Engine::time_to_sleep() {
    const bool later = !resting_.empty() || (!ready_.empty() && submitted_ == 0);
    const bool room = requests_.empty() && !free_.empty();
    const bool nothing = requests_.empty() && free_.size() == flights_.size();
    std::lock_guard lock(mutex_);
    if ((room && !inbox_.empty()) || (closing_ && nothing)) return 0;
    asleep_ = true;
    idle_ = room;
    return later ? RETRY_DELAY_NS : FOREVER;
}

void Engine::reap() {
    over_.clear();
    queue_->reap(over_, time_to_sleep());
    submitted_ -= int64_t(over_.size());
    for (const Completion& completion : over_) {
        Flight& flight = static_cast<Flight&>(*completion.piece);
        const bool fails = fails_in_ > 0 && --fails_in_ == 0;
        complete(flight, fails ? -fails_with_ : completion.result);
    }
}

// What the kernel said of a piece: it is over, goes on where it stands, or has failed.
void Engine::complete(Flight& flight, int64_t result) {
    // Canceled is what needs a worker of the kernel's, where no process may be made.
    if (result == -EINTR || result == -EAGAIN || result == -ECANCELED)
        return again(flight, int(-result));
    if (result < 0) return end(flight, {.code = int(-result)});
    if (result == 0 && !flight.writing)
        return end(flight, {.code = EIO, .cause = Cause::end_of_file});
    const int64_t moved = std::min(result, flight.bytes), align = flight.request->transfer_.align;
    const int64_t kept = moved == flight.bytes ? moved : moved - moved % align;
    flight.data += kept;
    flight.offset += kept;
    flight.bytes -= kept;
    if (flight.bytes == 0) return end(flight, {});
    if (kept == 0) return again(flight, 0);
    flight.tries = 0;
    ready_.push_back(&flight);
}

void Engine::again(Flight& flight, int last_code) {
    if (++flight.tries > RETRIES_MAX)
        return end(flight, {.code = EIO, .cause = Cause::no_progress, .last_code = last_code});
    flight.due = now_ns() + RETRY_DELAY_NS;
    resting_.push_back(&flight);
}

void Engine::end(Flight& flight, Failure failure) {
    const std::shared_ptr<Request> request = std::move(flight.request);
    free_.push_back(&flight);
    request->running_--;
    running_[flight.writing]--;
    if (failure.code != 0) {
        failure.offset = flight.offset;
        failure.bytes = flight.bytes;
        const Failure& first = request->failure_;
        if (first.code == 0 || failure.offset < first.offset) request->failure_ = failure;
        std::erase(requests_, request);
        request->part_ = request->transfer_.parts.size();
    }
    if (request->running_ == 0 && request->part_ == request->transfer_.parts.size())
        finish(*request);
}

void Engine::finish(Request& request) {
    request.finish();
    std::lock_guard lock(mutex_);
    const auto found = pending_.find(request.transfer_.fd);
    if (--found->second > 0) return;
    pending_.erase(found);
    changed_.notify_all();
}

}  // namespace aio
