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
    Passage* passage = task->passage.get();
    task->serial = ++serial_;
    alive_.emplace(task.get(), task);
    if (passage != nullptr) {
        if (passage->serial == 0) passage->serial = task->serial;
        passage->tasks.push_back(task.get());
        passage->left++;
        passage->key = std::min(passage->key, task->key);
    }
    for (const TaskPtr& other : waits) {
        if (other->over()) continue;
        link(other.get(), task.get());
        if (task->key < other->key) hurry(other.get(), task->key);
    }
    if (task->missing == 0) try_ready(task.get(), nullptr);
}

void Books::link(Task* other, Task* task) {
    other->followers.push_back(task);
    task->waits.push_back(other);
    task->missing++;
    if (task->passage && task->passage != other->passage) task->passage->missing++;
}

void Books::done(Task* task) {
    const TaskPtr kept = task->shared_from_this();
    Passage* passage = task->passage.get();
    task->state = State::DONE;
    if (passage != nullptr) std::erase(passage->tasks, task);
    release(task);
    if (passage != nullptr && --passage->left == 0) {
        std::erase(started_, passage);
        free_.push_back(passage->slot);
        start(task);
    }
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
        if (follower->passage && follower->passage != task->passage) {
            came(follower->passage.get(), task);
        }
        if (follower->missing == 0) try_ready(follower, task);
    }
    alive_.erase(task);
}

void Books::try_ready(Task* task, Task* last) {
    if (task->missing > 0 || task->state != State::WAITING) return;
    if (task->passage && !task->passage->started()) return;
    task->state = State::READY;
    task->ready_at = now();
    if (last != nullptr && !last->of_user) {
        task->history = {{last->lane, last->ready_at}};
        const size_t more = std::min(last->history.size(), HISTORY_MAX - 1);
        task->history.insert(
            task->history.end(), last->history.begin(), last->history.begin() + more);
    }
    if (task->of_user) {
        told_ = told_ || task->awaited;
    } else {
        lanes_[task->lane].ready.insert({{task->key, task->serial}, task});
    }
}

void Books::came(Passage* passage, Task* last) {
    if (--passage->missing == 0) {
        waiting_.insert({{passage->key, passage->serial}, passage});
        start(last);
    }
}

// Start the passages for which there are slots.
void Books::start(Task* last) {
    while (!waiting_.empty()) {
        Passage* passage = waiting_.begin()->second;
        if (free_.empty()) {
            const auto ending = std::ranges::min_element(started_, {}, [](const Passage* one) {
                return std::pair(one->left, one->serial);
            });
            for (Task* task : (*ending)->tasks) hurry(task, passage->key);
            return;
        }
        waiting_.erase(waiting_.begin());
        passage->slot = free_.back();
        free_.pop_back();
        started_.push_back(passage);
        for (Task* task : passage->tasks) try_ready(task, last);
    }
}

void Books::hurry(Task* task, Key key) {
    std::vector<Task*> found{task};
    while (!found.empty()) {
        Task* one = found.back();
        found.pop_back();
        if (one->over() || one->key <= key) continue;
        auto& ready = lanes_[one->lane].ready;
        const bool queued = ready.erase({{one->key, one->serial}, one}) > 0;
        one->key = key;
        if (queued) ready.insert({{key, one->serial}, one});
        found.insert(found.end(), one->waits.begin(), one->waits.end());
        Passage* passage = one->passage.get();
        if (passage == nullptr || passage->started() || passage->key <= key) continue;
        const bool waits = waiting_.erase({{passage->key, passage->serial}, passage}) > 0;
        passage->key = key;
        for (Task* inner : passage->tasks) {
            for (Task* other : inner->waits) {
                if (other->passage.get() != passage) found.push_back(other);
            }
        }
        if (waits) {
            waiting_.insert({{key, passage->serial}, passage});
            start(nullptr);
        }
    }
}

}  // namespace books
