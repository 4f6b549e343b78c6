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

Books::Books(int lanes, int disk, int slots, size_t ran_max)
    : lanes_(lanes), disk_(disk), ran_max_(ran_max) {
    for (int slot = 0; slot < slots; slot++) free_.push_back(slot);
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

Seen Books::look(const Task& task) {
    const Turn turn(*this);
    Seen seen{task.key, {}, {}};
    for (const Task* other : task.waits) seen.waits.push_back(other->serial);
    if (!task.of_user) seen.path.emplace_back(number_of(task), task.ready_at);
    seen.path.insert(seen.path.end(), task.history.begin(), task.history.end());
    return seen;
}

void Books::stop(bool closing) {
    const Turn turn(*this);
    stopped_ = told_ = true;
    closing_ = closing_ || closing;
    if (closing_) {
        for (Lane& lane : lanes_) lane.wake.notify_all();
    }
}

// -- lanes ------------------------------------------------------------------------------------

TaskPtr Books::take(int number, bool wait) {
    Turn turn(*this);
    Lane& lane = lanes_[number];
    while (!closing_ || !lane.flights.empty()) {
        if (!lane.landed.empty()) {
            land(turn, lane);
            continue;
        }
        if (lane.failure && lane.flights.empty()) std::rethrow_exception(lane.failure);
        const bool may_begin =
            !stopped_ && !lane.failure && lane.flying_bytes < FLYING_BYTES_MAX;
        if (may_begin && !lane.worked.empty()) {
            const TaskPtr work = lane.worked.front();
            lane.worked.pop_front();
            const Link& link = (*work->stream->work->links())[work->link];
            const aio::ChunkTransfer& transfer = *link.writes->transfer();
            take_off(turn, lane, {work->stream, now(), transfer, {transfer, work->slot}, true,
                                  work->link, work->slot});
        } else if (Task* task = may_begin ? first(lane) : nullptr) {
            if (task->work == nullptr) return task->shared_from_this();
            turn.tell();
            if (task->work->links() != nullptr) {
                begin_link(turn, lane, task);
            } else if (const aio::ChunkTransfer* transfer = task->work->transfer()) {
                take_off(turn, lane, {task->shared_from_this(), now(), *transfer, {*transfer, 0},
                                      false, 0, 0});
            } else {
                run_work(turn, lane, task);
            }
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
    return task.work != nullptr && task.work->links() != nullptr ? disk_ : task.lane;
}

bool Books::has_work(const Lane& lane) const {
    return !lane.worked.empty() || std::ranges::any_of(lane.ready, [this](const auto& entry) {
        return !free_.empty() || number_of(*entry.second) == entry.second->lane;
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

void Books::count(Lane& lane, const Ran& ran) {
    record(ran);
    lane.used.bytes += ran.bytes;
    lane.used.operations++;
}

void Books::run_work(Turn& turn, Lane& lane, Task* task) {
    const TaskPtr kept = task->shared_from_this();
    const double since = now();
    std::exception_ptr failure;
    turn.without([&] {
        try {
            task->work->run(task->slot, task->settings.get());
        } catch (...) {
            failure = std::current_exception();
        }
    });
    if (failure) std::rethrow_exception(failure);
    const double until = now();
    count(lane, {task->number, Part::WORK, task->bytes, since, until});
    lane.used.busy_s += until - since;
    if (task->stream) worked(task);
    else done(task);
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
