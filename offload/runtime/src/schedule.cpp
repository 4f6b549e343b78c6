// Which task may start: what `program/schedule.py` does, which says why. All with the lock.
#include <time.h>

#include <algorithm>

#include "runner.h"

namespace runner {

double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

void Runner::queue(const TaskPtr& task, const std::vector<TaskPtr>& waits) {
    task->serial = ++serial_;
    alive_.emplace(task.get(), task);
    for (const TaskPtr& other : waits) {
        if (other->over()) continue;
        link(other.get(), task.get());
        if (task->key < other->key) hurry(other.get(), task->key);
    }
    try_ready(task.get(), nullptr);
}

void Runner::link(Task* other, Task* task) {
    other->followers.push_back(task);
    task->waits.push_back(other);
}

void Runner::done(Task* task) {
    const TaskPtr kept = task->shared_from_this();
    task->state = State::DONE;
    release(task);
    if (task->stream) next_stage(task->stream, task->link, task->stage + 1, task->slot);
}

// The lanes that led to a task, latest first; before them the one that does it. A stream is the
// drive's, whatever lane computes, and the user's compute is the device's once it is queued there.
Path Runner::path_of(const Task& task) const {
    Path found;
    if (!task.of_user)
        found.emplace_back(number_of(task) == options_.disk ? options_.disk : task.lane,
                           task.ready_at);
    else if (task.ended_at > 0) found.emplace_back(task.lane, task.ended_at);
    found.insert(found.end(), task.history.begin(), task.history.end());
    return found;
}

// A task is over: who waits for it may be ready.
void Runner::release(Task* task) {
    const TaskPtr kept = task->shared_from_this();
    told_ = told_ || task->awaited;
    for (Task* other : task->waits) std::erase(other->followers, task);
    task->waits.clear();
    for (Task* follower : std::exchange(task->followers, {})) {
        std::erase(follower->waits, task);
        try_ready(follower, task);
    }
    alive_.erase(task);
}

void Runner::try_ready(Task* task, Task* last) {
    if (!task->waits.empty() || task->state != State::WAITING) return;
    task->state = State::READY;
    task->ready_at = now();
    if (last != nullptr && (!last->of_user || last->ended_at > 0)) {
        task->history = path_of(*last);
        task->history.resize(std::min(task->history.size(), HISTORY_MAX));
    }
    if (task->of_user) {
        told_ = told_ || task->awaited;
    } else {
        lanes_[number_of(*task)].ready.insert({{task->key, task->serial}, task});
    }
}

void Runner::hurry(Task* task, Key key) {
    std::vector<Task*> found{task};
    while (!found.empty()) {
        Task* one = found.back();
        found.pop_back();
        if (one->over() || one->key <= key) continue;
        auto& ready = lanes_[number_of(*one)].ready;
        const bool queued = ready.erase({{one->key, one->serial}, one}) > 0;
        one->key = key;
        if (queued) ready.insert({{key, one->serial}, one});
        found.insert(found.end(), one->waits.begin(), one->waits.end());
    }
}

}  // namespace runner
