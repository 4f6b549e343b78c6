#include "books.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <stdexcept>

namespace books {

static void require(bool so, const char* what) {
    if (!so) throw std::logic_error(what);
}

static void require_new(const Task& task) {
    require(task.serial == 0, "a task is queued once");
    require(!task.passage || !task.passage->started(), "a passage is sealed before it starts");
}

class Books::Turn {
public:
    explicit Turn(Books& books) : books_(books), lock_(books.mutex_) {}
    Turn(const Turn&) = delete;
    ~Turn() {
        if (writing_ && std::uncaught_exceptions() > before_) {
            books_.torn_ = books_.stopped_ = books_.told_ = true;
            for (Lane& lane : books_.lanes_) lane.wake.notify_all();
        }
        tell();
    }

    // From here on an error leaves the books half written.
    void write() {
        books_.require_whole();
        writing_ = true;
    }

    // Do something without the lock; nothing that may fail.
    template <typename Function>
    void without(Function function) {
        lock_.unlock();
        function();
        lock_.lock();
        write();  // Somebody else may have torn them meanwhile.
    }

    // Wait until somebody tells, or the time is up; whether it is not.
    bool sleep(std::chrono::steady_clock::time_point until) {
        return books_.changed_.wait_until(lock_, until) != std::cv_status::timeout;
    }
    // Wait until the lane may have something to do.
    void sleep(Lane& lane) {
        tell();
        lane.asleep = true;
        lane.wake.wait(lock_);
        lane.asleep = false;
    }
    // Wake whom it concerns.
    void tell() {
        if (std::exchange(books_.told_, false)) books_.changed_.notify_all();
        for (Lane& lane : books_.lanes_) {
            if (!lane.asleep || lane.ready.empty() || books_.stopped_) continue;
            lane.asleep = false;
            lane.wake.notify_one();
        }
    }

private:
    Books& books_;
    std::unique_lock<std::mutex> lock_;
    const int before_ = std::uncaught_exceptions();
    bool writing_ = false;
};

void Books::require_whole() const {
    if (torn_) {
        throw std::runtime_error(
            "the books of the lanes are half written, as memory ran out in the midst of it");
    }
}

static std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

Books::Books(int lanes, int slots, size_t ran_max) : lanes_(lanes), ran_max_(ran_max) {
    for (int slot = 0; slot < slots; slot++) free_.push_back(slot);
}

// -- tasks ------------------------------------------------------------------------------------

void Books::add(const TaskPtr& task, const std::vector<TaskPtr>& waits) {
    Turn turn(*this);
    require_new(*task);
    turn.write();
    queue(task, waits);
    copy_at_hand(turn);
}

void Books::issue(const TaskPtr& task, const Cells& reads, const Cells& writes) {
    Turn turn(*this);
    require_new(*task);
    turn.write();
    queue(task, board_.waits(reads, writes));
    board_.note(task, reads, writes);
    copy_at_hand(turn);
}

std::vector<TaskPtr> Books::touching(const Cells& reads, const Cells& writes) {
    const Turn turn(*this);
    return board_.waits(reads, writes);
}

std::vector<TaskPtr> Books::all() {
    const Turn turn(*this);
    return board_.all();
}

size_t Books::most_kept() {
    const Turn turn(*this);
    return board_.most_kept();
}

void Books::seal(const PassagePtr& passage) {
    Turn turn(*this);
    require(!passage->tasks.empty(), "a passage that is sealed has tasks: its end frees its slot");
    turn.write();
    for (Task* task : passage->tasks) {
        for (Task* other : task->waits) {
            hurry(other, other->passage != passage ? passage->key : task->key);
        }
    }
    came(passage.get(), nullptr);
    copy_at_hand(turn);
}

void Books::cancel(const std::vector<TaskPtr>& tasks) {
    Turn turn(*this);
    const auto open = [](const TaskPtr& task) {
        return task->state == State::WAITING || task->state == State::READY;
    };
    for (const TaskPtr& task : tasks) {
        require(!task->passage || !open(task), "a passage is not taken back");
    }
    turn.write();
    for (const TaskPtr& task : tasks) {
        if (!open(task)) continue;
        if (!task->of_user) {
            lanes_[task->lane].ready.erase({{task->key, task->serial}, task.get()});
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
    require_whole();
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
    require_whole();
    return task.over();
}

void Books::finish(Task& task) {
    Turn turn(*this);
    require(task.state == State::RUNNING, "what is finished has begun");
    turn.write();
    if (task.of_user) record(task.number, task.began_at, now());
    done(&task);
    copy_at_hand(turn);
}

Seen Books::look(const Task& task) {
    const Turn turn(*this);
    Seen seen{task.key, {}, {}};
    for (const Task* other : task.waits) seen.waits.push_back(other->serial);
    if (!task.of_user) seen.path.emplace_back(task.lane, task.ready_at);
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
    while (!closing_) {
        turn.write();
        if (Task* task = stopped_ ? nullptr : first(lane)) {
            if (task->copy.bytes == 0) return task->shared_from_this();
            turn.tell();
            run_copy(turn, lane, task);
        } else if (wait) {
            turn.sleep(lane);
        } else {
            break;
        }
    }
    return nullptr;
}

TaskPtr Books::overtaking(int number, const Task& than) {
    Turn turn(*this);
    Lane& lane = lanes_[number];
    turn.write();
    while (!stopped_ && !lane.ready.empty() && lane.ready.begin()->second->key < than.key) {
        Task* task = first(lane);
        if (task->copy.bytes == 0) return task->shared_from_this();
        turn.tell();
        run_copy(turn, lane, task);
    }
    return nullptr;
}

Copied Books::copied(int lane) {
    const Turn turn(*this);
    return std::exchange(lanes_[lane].copied, {});
}

std::deque<Ran> Books::ran() {
    const Turn turn(*this);
    return std::exchange(ran_, {});
}

Task* Books::first(Lane& lane) {
    if (lane.ready.empty()) return nullptr;
    Task* task = lane.ready.begin()->second;
    lane.ready.erase(lane.ready.begin());
    task->state = State::RUNNING;
    return task;
}

void Books::run_copy(Turn& turn, Lane& lane, Task* task) {
    const double since = now();
    turn.without([task] {
        std::memcpy(task->copy.into, task->copy.source, task->copy.bytes);
    });
    const double until = now();
    record(task->number, since, until);
    lane.copied.busy_s += until - since;
    lane.copied.bytes += int64_t(task->copy.bytes);
    lane.copied.operations++;
    done(task);
}

// Spare lanes that sleep what takes no longer than to wake them.
void Books::copy_at_hand(Turn& turn) {
    size_t left = AT_HAND_BYTES_MAX;
    for (Lane& lane : lanes_) {
        while (lane.asleep && !lane.ready.empty() && !stopped_) {
            const size_t bytes = lane.ready.begin()->second->copy.bytes;
            if (bytes == 0 || bytes > left) break;
            left -= bytes;
            run_copy(turn, lane, first(lane));
        }
    }
}

void Books::record(int64_t number, double since, double until) {
    if (number < 0 || ran_max_ == 0) return;
    if (ran_.size() == ran_max_) ran_.pop_front();
    ran_.push_back({number, since, until});
}

}  // namespace books
