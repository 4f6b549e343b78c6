// What callers do, by any thread.
#include "engine.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core.h"

namespace aio {

void Request::watch(const std::shared_ptr<Signal>& signal) {
    std::lock_guard lock(mutex_);
    if (done_.is_set()) signal->set();
    else watchers_.push_back(signal);
}

void Request::unwatch(const std::shared_ptr<Signal>& signal) {
    std::lock_guard lock(mutex_);
    std::erase(watchers_, signal);
}

static const Options& checked(const Options& options) {
    if (options.depth < 1 || options.depth > DEPTH_MAX)
        throw std::invalid_argument("depth: expected 1 to 4096");
    if (options.piece_bytes < 1 || options.piece_bytes > PIECE_BYTES_MAX)
        throw std::invalid_argument("piece_bytes: expected 1 to 1 GiB");
    if (options.inflight_bytes_max < options.piece_bytes)
        throw std::invalid_argument("inflight_bytes_max: expected at least piece_bytes");
    return options;
}

Core::Core(const Options& options)
    : options_(checked(options)), flights_(size_t(options.depth)) {
    for (auto* pieces : {&free_, &resting_}) pieces->reserve(flights_.size());
    ready_.reserve(flights_.size());
    over_.reserve(flights_.size());
    for (Flight& flight : flights_) free_.push_back(&flight);
    Signal opened;
    std::exception_ptr failure;
    sigset_t all, before;  // signals are left to the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    try {
        thread_ = std::thread([&] { run(opened, failure); });
    } catch (const std::system_error&) {
        failure = std::current_exception();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (thread_.joinable()) {
        handle_ = thread_.native_handle();
        opened.wait(FOREVER);
    }
    if (failure == nullptr) return;
    if (thread_.joinable()) thread_.join();
    std::rethrow_exception(failure);
}

// Called with the lock held, after something was put where the thread looks before it sleeps.
void Core::wake_if_asleep() {
    if (!asleep_) return;
    asleep_ = idle_ = false;
    queue_->wake();
}

std::shared_ptr<Request> Core::submit(Transfer transfer) {
    std::erase_if(transfer.parts, [](const Part& part) { return part.bytes == 0; });
    auto request = std::make_shared<Request>(std::move(transfer));
    std::unique_lock lock(mutex_);
    if (closing_) return nullptr;
    const std::vector<Part>& parts = request->transfer_.parts;
    if (parts.empty() || broken_ != 0) {
        if (!parts.empty())
            request->failure_ = {.code = EIO, .cause = Cause::queue_broken,
                                 .offset = parts[0].offset, .bytes = parts[0].bytes,
                                 .last_code = broken_};
        lock.unlock();
        request->finish();
        return request;
    }
    pending_[request->transfer_.fd]++;
    inbox_.push_back(request);
    if (idle_) wake_if_asleep();
    return request;
}

bool Core::drain(int fd, int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    const auto over = [&] { return !pending_.contains(fd); };
    if (wait_ns == FOREVER) drained_.wait(lock, over);
    else drained_.wait_for(lock, std::chrono::nanoseconds(wait_ns), over);
    return over();
}

// Have the engine's thread do something with the queue; not at all once it has ended.
void Core::call(const std::function<void(Queue&)>& action) {
    Call call{&action, {}};
    {
        std::lock_guard lock(mutex_);
        if (!open_) return;
        calls_.push_back(&call);
        wake_if_asleep();
    }
    call.done.wait(FOREVER);
}

Counters Core::counters() {
    Counters found;
    found.bytes_read = bytes_read_.get();
    found.bytes_written = bytes_written_.get();
    found.operations = operations_.get();
    found.retries = retries_.get();
    found.depth_max = depth_max_.get();
    for (size_t k = 0; k < LATENCIES; k++) found.latencies[k] = latencies_[k].get();
    std::lock_guard lock(mutex_);
    found.cpu_ns = cpu_ns_at_end_;
    clockid_t clock;
    timespec used{};
    if (queue_ && pthread_getcpuclockid(handle_, &clock) == 0) {
        clock_gettime(clock, &used);
        found.cpu_ns = queue_->cpu_ns() + used.tv_sec * int64_t(1'000'000'000) + used.tv_nsec;
    }
    return found;
}

bool Core::close(int64_t wait_ns) {
    std::unique_lock lock(mutex_);
    closing_ = true;
    if (queue_) wake_if_asleep();
    const auto over = [&] { return ended_thread_; };
    if (wait_ns == FOREVER) ended_.wait(lock, over);
    else if (!ended_.wait_for(lock, std::chrono::nanoseconds(wait_ns), over)) return false;
    if (joining_) {  // by another thread, or over
        ended_.wait(lock, [&] { return joined_; });
        return true;
    }
    joining_ = true;
    lock.unlock();
    thread_.join();
    lock.lock();
    joined_ = true;
    ended_.notify_all();
    return true;
}

Engine::Engine(const Options& options) : core_(std::make_unique<Core>(options)) {}

Engine::~Engine() {
    if (getpid() == core_->pid) core_->close(FOREVER);
    else static_cast<void>(core_.release());  // its thread and locks are the parent's
}

std::shared_ptr<Request> Engine::submit(Transfer transfer) {
    return core_->submit(std::move(transfer));
}

bool Engine::drain(int fd, int64_t wait_ns) { return core_->drain(fd, wait_ns); }

void Engine::forget(int fd) {
    core_->call([&](Queue& queue) { queue.forget(fd); });
}

int Engine::register_buffer(std::byte* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += BUFFER_BYTES_MAX) {
        int code = ESHUTDOWN;
        core_->call([&](Queue& queue) {  // for each: transfers go on in between
            code = queue.register_buffer(data + at, std::min(BUFFER_BYTES_MAX, bytes - at));
        });
        if (code == 0) continue;
        unregister_buffer(data, at);
        return code;
    }
    return 0;
}

void Engine::unregister_buffer(std::byte* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += BUFFER_BYTES_MAX)
        core_->call([&](Queue& queue) {
            queue.unregister_buffer(data + at, std::min(BUFFER_BYTES_MAX, bytes - at));
        });
}

Counters Engine::counters() { return core_->counters(); }

bool Engine::close(int64_t wait_ns) { return core_->close(wait_ns); }

}  // namespace aio
