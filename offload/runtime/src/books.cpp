#include "books.h"

#include "turn.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace books {

static void require(bool so, const char* what) {
    if (!so) throw std::logic_error(what);
}

static void require_new(const Task& task) {
    require(task.serial == 0, "a task is queued once");
}

static std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

Books::Books(int lanes, int disk, int slots, size_t ran_max, driver::DriverPtr driver)
    : lanes_(lanes), disk_(disk), driver_(std::move(driver)), ran_max_(ran_max) {
    for (int slot = driver_ ? 1 : 0; slot < slots; slot++) free_.push_back(slot);
}

Books::~Books() {
    for (Lane& lane : lanes_) end_stream(lane);
}

// Wait for what is under way there, whatever fails.
void Books::end_stream(Lane& lane) {
    if (const driver::Stream stream = std::exchange(lane.stream, 0)) driver_->end_stream(stream);
}

// -- tasks ------------------------------------------------------------------------------------

void Books::issue(const TaskPtr& task, const Cells& reads, const Cells& writes) {
    Turn turn(*this);
    require_new(*task);
    queue(task, board_.waits(reads, writes));
    board_.note(task, reads, writes);
    work_at_hand(turn);
}

std::vector<TaskPtr> Books::touching(const Cells& reads, const Cells& writes) {
    const Turn turn(*this);
    return board_.waits(reads, writes);
}

std::vector<TaskPtr> Books::all() {
    const Turn turn(*this);
    return board_.all();
}

void Books::cancel(const std::vector<TaskPtr>& tasks) {
    Turn turn(*this);
    const auto open = [](const TaskPtr& task) {
        return task->state == State::WAITING || task->state == State::READY;
    };
    for (const TaskPtr& task : tasks) {
        if (!open(task)) continue;
        if (!task->of_user) {
            lanes_[number_of(*task)].ready.erase({{task->key, task->serial}, task.get()});
        }
        task->state = State::CANCELLED;
        for (Task* other : task->waits) {
            for (Task* follower : task->followers) {
                if (std::ranges::find(follower->waits, other) == follower->waits.end()) {
                    link(other, follower);
                }
            }
        }
        release(task.get());
    }
}

bool Books::begin(Task& task, double seconds) {
    Turn turn(*this);
    require(!task.begun() && !task.over(), "what begins has not begun, and was not taken back");
    if (task.state == State::WAITING && seconds > 0) {
        const auto until = after(seconds);
        task.awaited = true;
        while (task.state == State::WAITING && !stopped_ && turn.sleep(until)) {}
    }
    if (task.state != State::READY || stopped_) return false;
    task.state = State::RUNNING;
    task.began_at = now();
    return true;
}

bool Books::over(Task& task, double seconds) {
    Turn turn(*this);
    if (!task.over() && seconds > 0) {
        const auto until = after(seconds);
        task.awaited = true;
        while (!task.over() && !stopped_ && turn.sleep(until)) {}
    }
    return task.over();
}

void Books::finish(Task& task) {
    Turn turn(*this);
    require(task.state == State::RUNNING, "what is finished has begun");
    if (task.of_user) record({task.number, Part::WORK, task.bytes, task.began_at, now()});
    done(&task);
    work_at_hand(turn);
}

void Books::finish(Task& task, const std::vector<driver::Stream>& streams) {
    Queued compute{task.shared_from_this(), task.began_at, {}};
    for (const driver::Stream stream : streams) compute.events.push_back(driver_->record(stream));
    Turn turn(*this);
    require(task.state == State::RUNNING && task.ended_at == 0, "what is finished has begun");
    task.ended_at = now();
    record({task.number, Part::WORK, task.bytes, task.began_at, task.ended_at});
    ending_.push_back(std::move(compute));
    ended_.notify_one();
}

void Books::end() {
    Turn turn(*this);
    while (!closing_ || !ending_.empty()) {
        if (ending_.empty()) {
            turn.sleep(ended_);
            continue;
        }
        const Queued compute = std::move(ending_.front());
        ending_.pop_front();
        const std::exception_ptr failure = turn.without([&] {
            for (const driver::Event event : compute.events) driver_->wait(event);
        });
        if (failure) std::rethrow_exception(failure);
        done(compute.task.get());
        work_at_hand(turn);
    }
}

Seen Books::look(const Task& task) {
    const Turn turn(*this);
    Seen seen{task.key, {}, path_of(task)};
    for (const Task* other : task.waits) seen.waits.push_back(other->serial);
    return seen;
}

void Books::stop(bool closing) {
    const Turn turn(*this);
    stopped_ = told_ = true;
    closing_ = closing_ || closing;
    if (closing_) {
        for (Lane& lane : lanes_) lane.wake.notify_all();
        ended_.notify_all();
    }
}

// -- lanes ------------------------------------------------------------------------------------

TaskPtr Books::take(int number, bool wait) {
    Turn turn(*this);
    Lane& lane = lanes_[number];
    while (!closing_ || !lane.flights.empty() || !lane.copying.empty()) {
        if (!lane.landed.empty()) {
            land(turn, lane);
            continue;
        }
        if (lane.failure && lane.flights.empty()) {
            turn.without([&] { end_stream(lane); });
            lane.copying.clear();
            std::rethrow_exception(lane.failure);
        }
        const bool may_begin = !stopped_ && !lane.failure &&
                               lane.flying_bytes < FLYING_BYTES_MAX &&
                               lane.copying.size() < COPIES_MAX;
        if (Task* task = may_begin ? first(lane) : nullptr) {
            if (task->work == nullptr) return task->shared_from_this();
            turn.tell();
            start(turn, lane, task);
        } else if (!lane.copying.empty()) {
            end_copies(turn, lane);
        } else if (wait || !lane.flights.empty()) {
            turn.sleep(lane);
        } else {
            break;
        }
    }
    return nullptr;
}

Used Books::used(int lane) {
    const Turn turn(*this);
    Lane& one = lanes_[lane];
    if (one.flying_bytes > 0) {
        const double until = now();
        one.used.busy_s += until - std::exchange(one.flying_since, until);
    }
    return std::exchange(one.used, {});
}

std::deque<Ran> Books::ran() {
    const Turn turn(*this);
    return std::exchange(ran_, {});
}

int Books::number_of(const Task& task) const {
    const auto* links = task.work != nullptr ? task.work->links() : nullptr;
    return links != nullptr && !links->empty() ? links->front().front().lane : task.lane;
}

bool Books::has_work(const Lane& lane) const {
    return std::ranges::any_of(lane.ready, [this](const auto& entry) {
        const Work* work = entry.second->work.get();
        return !free_.empty() || work == nullptr || work->links() == nullptr;
    });
}

// A stream stays queued until all its links have begun, and is passed by while no slot is free.
Task* Books::first(Lane& lane) {
    for (auto at = lane.ready.begin(); at != lane.ready.end(); ++at) {
        Task* task = at->second;
        const auto* links = task->work != nullptr ? task->work->links() : nullptr;
        if (links != nullptr && !links->empty() && free_.empty()) continue;
        if (links == nullptr || task->next_link + 1 >= links->size()) lane.ready.erase(at);
        task->state = State::RUNNING;
        return task;
    }
    return nullptr;
}

void Books::count(Lane& lane, const Task& task, double since, double until) {
    record({task.number, task.part, task.bytes, since, until});
    lane.used.bytes += task.bytes;
    lane.used.operations++;
}

void Books::start(Turn& turn, Lane& lane, Task* task) {
    if (task->work->links() != nullptr) begin_link(task);
    else if (const auto* transfer = task->work->transfer()) take_off(turn, lane, task, *transfer);
    else if (task->work->device_copies() != nullptr) queue_copies(turn, lane, task);
    else run_work(turn, lane, task);
}

void Books::run_work(Turn& turn, Lane& lane, Task* task) {
    const TaskPtr kept = task->shared_from_this();
    const double since = now();
    const std::exception_ptr failure =
        turn.without([&] { task->work->run(task->slot, task->settings.get()); });
    if (failure) std::rethrow_exception(failure);
    const double until = now();
    count(lane, *task, since, until);
    lane.used.busy_s += until - since;
    done(task);
}

// [Note: Copies under way]
// A lane queues the copies of a task on its stream, and an event behind them; then the next task's,
// and sleeps until the device has come to the first event. So the device never waits for the host
// between two copies, and nothing but the device says that one is over. After a failure nothing
// more is queued, and it is told when the stream has come to its end: memory outlives what goes
// there.
void Books::queue_copies(Turn& turn, Lane& lane, Task* task) {
    lane.copying.push_back({task->shared_from_this(), now(), {}});
    Queued& copying = lane.copying.back();
    const std::exception_ptr failure = turn.without([&] {
        if (lane.stream == 0) lane.stream = driver_->make_stream();
        const int slot = task->slot;
        for (const Copy& one : *task->work->device_copies())
            driver_->copy(one.into.at(slot), one.source.at(slot), one.bytes, lane.stream);
        copying.events.push_back(driver_->record(lane.stream));
    });
    if (failure) lane.failure = failure;
}

void Books::end_copies(Turn& turn, Lane& lane) {
    const Queued copied = std::move(lane.copying.front());
    lane.copying.pop_front();
    if (lane.failure) return;
    if (const auto failure = turn.without([&] { driver_->wait(copied.events.front()); })) {
        lane.failure = failure;
        return;
    }
    const double until = now();
    lane.used.busy_s += until - std::max(copied.since, lane.copied_until);
    lane.copied_until = until;
    count(lane, *copied.task, copied.since, until);
    done(copied.task.get());
}

// Spare lanes that sleep what takes no longer than to wake them.
void Books::work_at_hand(Turn& turn) {
    size_t left = AT_HAND_BYTES_MAX;
    for (Lane& lane : lanes_) {
        while (lane.asleep && !lane.ready.empty() && !stopped_) {
            const Work* work = lane.ready.begin()->second->work.get();
            if (work == nullptr || work->bytes_at_hand() > left) break;
            left -= work->bytes_at_hand();
            run_work(turn, lane, first(lane));
        }
    }
}

void Books::record(const Ran& ran) {
    if (ran.number < 0 || ran_max_ == 0) return;
    if (ran_.size() == ran_max_) ran_.pop_front();
    ran_.push_back(ran);
}

}  // namespace books
