#include "runner.h"

#include "turn.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>
#include <system_error>

namespace runner {

static void require(bool so, const char* what) {
    if (!so) throw std::logic_error(what);
}

static std::chrono::steady_clock::time_point after(double seconds) {
    return std::chrono::steady_clock::now() + std::chrono::nanoseconds(int64_t(seconds * 1e9));
}

Runner::Runner(Options options) : options_(std::move(options)), lanes_(options_.lanes) {
    for (int slot = 0; slot < options_.slots; slot++) free_.push_back(slot);
    if (!options_.threads) return;
    try {
        for (int lane = 0; lane < options_.lanes; lane++)
            threads_.emplace_back([this, lane] { live(lane); });
        if (options_.driver) threads_.emplace_back([this] { live_of_device(); });
    } catch (const std::system_error&) {
        stop(true);
        throw;
    }
}

Runner::~Runner() {
    stop(true);
    for (Lane& lane : lanes_) end_stream(lane);
}

void Runner::stop(bool closing) {
    std::vector<std::thread> threads;
    {
        const Turn turn(*this);
        stopped_ = told_ = true;
        closing_ = closing_ || closing;
        if (closing_) {
            for (Lane& lane : lanes_) lane.wake.notify_all();
            computes_.notify_all();
            threads.swap(threads_);
        }
    }
    for (std::thread& thread : threads) thread.join();
}

std::exception_ptr Runner::failure() {
    const Turn turn(*this);
    return failure_;
}

void Runner::fail(Turn&, std::exception_ptr failure) {
    if (failure_ == nullptr) failure_ = std::move(failure);
    stopped_ = told_ = failed_ = true;
}

// Wait for what is under way there, whatever fails.
void Runner::end_stream(Lane& lane) {
    if (const driver::Stream stream = std::exchange(lane.stream, 0))
        options_.driver->end_stream(stream);
}

// -- tasks ------------------------------------------------------------------------------------

void Runner::start(const TaskPtr& task, const Cells& reads, const Cells& writes) {
    Turn turn(*this);
    require(task->serial == 0, "a task is queued once");
    queue(task, board_.waits(reads, writes));
    board_.note(task, reads, writes);
    work_at_hand(turn);
}

std::vector<TaskPtr> Runner::touching(const Cells& reads, const Cells& writes) {
    const Turn turn(*this);
    return board_.waits(reads, writes);
}

std::vector<TaskPtr> Runner::all() {
    const Turn turn(*this);
    return board_.all();
}

void Runner::cancel(const std::vector<TaskPtr>& tasks) {
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

bool Runner::begin(Task& task, double seconds) {
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

bool Runner::over(Task& task, double seconds) {
    Turn turn(*this);
    if (!task.over() && seconds > 0) {
        const auto until = after(seconds);
        task.awaited = true;
        while (!task.over() && !stopped_ && turn.sleep(until)) {}
    }
    return task.over();
}

void Runner::finish(Task& task, const std::vector<driver::Stream>& streams) {
    Queued compute{task.shared_from_this(), task.began_at, {}, {}};
    if (options_.driver) {
        for (const driver::Stream stream : streams)
            compute.events.push_back(options_.driver->record(stream));
    }
    Turn turn(*this);
    require(task.state == State::RUNNING && task.ended_at == 0, "what is finished has begun");
    if (task.of_user) record({task.number, int(Part::WORK), task.bytes, task.began_at, now()});
    if (compute.events.empty()) {
        done(&task);
        work_at_hand(turn);
        return;
    }
    task.ended_at = now();
    computing_.push_back(std::move(compute));
    computes_.notify_one();
}

// Let the user's computes be over, in their order, when the device is through with them.
void Runner::live_of_device() {
    Turn turn(*this);
    while (!closing_ || !computing_.empty()) {
        if (computing_.empty()) {
            turn.sleep(computes_);
            continue;
        }
        const Queued compute = std::move(computing_.front());
        computing_.pop_front();
        const std::exception_ptr failure = turn.without([&] {
            for (const driver::Event event : compute.events) options_.driver->wait(event);
        });
        if (failure) return fail(turn, failure);
        done(compute.task.get());
        work_at_hand(turn);
    }
}

std::tuple<Key, std::vector<int64_t>, Path> Runner::look(const Task& task) {
    const Turn turn(*this);
    std::vector<int64_t> waits;
    for (const Task* other : task.waits) waits.push_back(other->serial);
    return {task.key, waits, path_of(task)};
}

void Runner::perform(const Work& work, const Settings* settings, driver::Stream stream) {
    if (!work.on_device()) return work.run(0, settings);
    driver::Driver& device = *options_.driver;
    if (const After end = work.queue(device, stream, 0, settings)) {
        device.wait(device.record(stream));
        end();
    }
}

// -- lanes ------------------------------------------------------------------------------------

void Runner::live(int number) {
    Lane& lane = lanes_[number];
    try {
        work_on(lane);
    } catch (...) {
        Turn turn(*this);
        fail(turn, std::current_exception());
    }
}

void Runner::work_on(Lane& lane) {
    Turn turn(*this);
    while (!closing_ || !lane.flights.empty() || !lane.queued.empty()) {
        if (!lane.landed.empty()) {
            land(turn, lane);
            continue;
        }
        if (lane.failure && lane.flights.empty()) {
            turn.without([&] { end_stream(lane); });
            lane.queued.clear();
            std::rethrow_exception(lane.failure);
        }
        const bool may_begin = !stopped_ && !lane.failure &&
                               lane.flying_bytes < options_.flying_bytes_max &&
                               lane.queued.size() < QUEUED_MAX;
        if (Task* task = may_begin ? next(lane) : nullptr) {
            turn.tell();
            begin_work(turn, lane, task);
        } else if (!lane.queued.empty()) {
            end_queued(turn, lane);
        } else {
            turn.sleep(lane);
        }
    }
}

TaskPtr Runner::first(int number) {
    Turn turn(*this);
    Task* const task = stopped_ ? nullptr : next(lanes_[number]);
    return task == nullptr ? nullptr : task->shared_from_this();
}

std::tuple<double, int64_t, int64_t> Runner::used(int number) {
    const Turn turn(*this);
    const Lane& lane = lanes_[number];
    const double flying_s = lane.flying_bytes > 0 ? now() - lane.flying_since : 0;
    return {lane.used.busy_s + flying_s, lane.used.bytes, lane.used.operations};
}

std::vector<Ran> Runner::ran() {
    const Turn turn(*this);
    return {ran_.begin(), ran_.end()};
}

static const std::vector<Link>* links_of(const Task& task) {
    return task.work != nullptr ? task.work->links() : nullptr;
}

int Runner::number_of(const Task& task) const {
    const auto* links = links_of(task);
    return links != nullptr && !links->empty() ? links->front().front().lane : task.lane;
}

// The most urgent task that a lane may begin. A stream is passed by while no slot is free.
Runner::Ready::const_iterator Runner::may_begin(const Lane& lane) const {
    return std::ranges::find_if(lane.ready, [this](const auto& entry) {
        const auto* links = links_of(*entry.second);
        return links == nullptr || links->empty() || !free_.empty();
    });
}

// A stream stays queued until all its links have begun.
Task* Runner::next(Lane& lane) {
    const auto at = may_begin(lane);
    if (at == lane.ready.end()) return nullptr;
    Task* const task = at->second;
    const auto* links = links_of(*task);
    if (links == nullptr || task->next_link + 1 >= links->size()) lane.ready.erase(at);
    task->state = State::RUNNING;
    return task;
}

// On slower hardware, as tests imitate it, what began at that time ends later.
double Runner::delayed(Turn& turn, Lane& lane, const Task& task, double since) {
    if (!options_.pace) return since;
    since = std::max(since, lane.ended_at);  // The imitated one does one thing at a time.
    const auto failure = turn.without([&] {
        const double until = options_.pace(task, since);
        std::this_thread::sleep_for(std::chrono::duration<double>(until - now()));
    });
    if (failure) std::rethrow_exception(failure);
    return since;
}

void Runner::ended(Lane& lane, const TaskPtr& task, double since) {
    lane.ended_at = now();
    record({task->number, int(task->part), task->bytes, since, lane.ended_at});
    lane.used.bytes += task->bytes;
    lane.used.operations++;
    done(task.get());
}

void Runner::begin_work(Turn& turn, Lane& lane, Task* task) {
    if (task->work == nullptr) throw std::logic_error("a lane has nothing to do for a task");
    if (task->work->links() != nullptr) begin_link(task);
    else if (const auto* transfer = task->work->transfer()) take_off(turn, lane, task, *transfer);
    else if (task->work->on_device()) queue_work(turn, lane, task);
    else run_work(turn, lane, task);
}

void Runner::run_work(Turn& turn, Lane& lane, Task* task) {
    const TaskPtr kept = task->shared_from_this();
    const double since = delayed(turn, lane, *task, now());
    const std::exception_ptr failure =
        turn.without([&] { task->work->run(task->slot, task->settings.get()); });
    if (failure) std::rethrow_exception(failure);
    ended(lane, kept, since);
    lane.used.busy_s += lane.ended_at - since;
}

// [Note: Works under way]
// A lane queues the work of a task on its stream, and an event behind it; then the next task's, and
// sleeps until the device has come to the first event. So the device never waits for the host
// between two works, and nothing but the device says that one is over. After a failure nothing more
// is queued, and it is told when the stream has come to its end: memory outlives what goes there.
void Runner::queue_work(Turn& turn, Lane& lane, Task* task) {
    lane.queued.push_back({task->shared_from_this(), now(), {}, {}});
    Queued& queued = lane.queued.back();
    driver::Driver& device = *options_.driver;
    const std::exception_ptr failure = turn.without([&] {
        if (lane.stream == 0) lane.stream = device.make_stream();
        queued.after = task->work->queue(device, lane.stream, task->slot, task->settings.get());
        queued.events.push_back(device.record(lane.stream));
    });
    if (failure) lane.failure = failure;
}

void Runner::end_queued(Turn& turn, Lane& lane) {
    const Queued over = std::move(lane.queued.front());
    lane.queued.pop_front();
    if (lane.failure) return;
    if (const auto failure = turn.without([&] {
            options_.driver->wait(over.events.front());
            if (over.after) over.after();
        })) {
        lane.failure = failure;
        return;
    }
    const double begun = std::max(over.since, lane.ended_at);
    ended(lane, over.task, over.since);
    lane.used.busy_s += lane.ended_at - begun;
}

// Spare lanes that sleep what takes no longer than to wake them.
void Runner::work_at_hand(Turn& turn) {
    size_t left = options_.threads && !options_.pace ? AT_HAND_BYTES_MAX : 0;
    for (Lane& lane : lanes_) {
        while (left > 0 && lane.asleep && !lane.ready.empty() && !stopped_) {
            const Work* work = lane.ready.begin()->second->work.get();
            if (work == nullptr || work->bytes_at_hand() > left) break;
            left -= work->bytes_at_hand();
            run_work(turn, lane, next(lane));
        }
    }
}

void Runner::record(const Ran& ran) {
    if (options_.ran_max == 0) return;
    if (ran_.size() == options_.ran_max) ran_.pop_front();
    ran_.push_back(ran);
}

}  // namespace runner
