// Which task may start: what `program/schedule.py` does, which says why. All with the books' lock.
#include <time.h>

#include <algorithm>

#include "books.h"

namespace books {

double now() {
    timespec at;
    clock_gettime(CLOCK_MONOTONIC, &at);
    return double(at.tv_sec) + 1e-9 * double(at.tv_nsec);
}

void Books::queue(const TaskPtr& task, const std::vector<TaskPtr>& waits) {
    task->serial = ++serial_;
    alive_.emplace(task.get(), task);
    for (const TaskPtr& other : waits) {
        if (other->over()) continue;
        link(other.get(), task.get());
        if (task->key < other->key) hurry(other.get(), task->key);
    }
    try_ready(task.get(), nullptr);
}

void Books::link(Task* other, Task* task) {
    other->followers.push_back(task);
    task->waits.push_back(other);
    task->missing++;
}

void Books::done(Task* task) {
    const TaskPtr kept = task->shared_from_this();
    task->state = State::DONE;
    release(task);
}

// A task is over: who waits for it may be ready.
void Books::release(Task* task) {
    const TaskPtr kept = task->shared_from_this();
    told_ = told_ || task->awaited;
    for (Task* other : task->waits) std::erase(other->followers, task);
    task->waits.clear();
    for (Task* follower : std::exchange(task->followers, {})) {
        std::erase(follower->waits, task);
        follower->missing--;
        try_ready(follower, task);
    }
    alive_.erase(task);
}

void Books::try_ready(Task* task, Task* last) {
    if (task->missing > 0 || task->state != State::WAITING) return;
    task->state = State::READY;
    task->ready_at = now();
    if (last != nullptr && !last->of_user) {
        task->history = {{number_of(*last), last->ready_at}};
        const size_t more = std::min(last->history.size(), HISTORY_MAX - 1);
        task->history.insert(
            task->history.end(), last->history.begin(), last->history.begin() + more);
    }
    if (task->of_user) {
        told_ = told_ || task->awaited;
    } else {
        lanes_[number_of(*task)].ready.insert({{task->key, task->serial}, task});
    }
}

void Books::hurry(Task* task, Key key) {
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

}  // namespace books
