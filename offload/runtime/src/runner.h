// The native runner: lanes as threads that run what may start, the most urgent first, without
// Python and the GIL. Which op waits for which, and which goes first, is what `program/schedule.py`
// says, the reference; what an op does is a `Work` (work.h).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "board.h"
#include "driver.h"
#include "task.h"
#include "work.h"

namespace runner {

// How many tasks back a wait is traced to the lanes that caused it.
constexpr size_t HISTORY_MAX = 16;

double now();  // as Python's time.perf_counter

// A sleeping lane's copy of at most so many bytes is done by who makes it ready: to wake the lane
// takes as long (14 us beside 8 us for 64 KiB and 17 us for 128 KiB, measured).
constexpr size_t AT_HAND_BYTES_MAX = 128 << 10;

// So many works of a lane are queued on its stream at once: the next begins when one ends.
constexpr size_t QUEUED_MAX = 2;

struct Used {
    double busy_s = 0;
    int64_t bytes = 0, operations = 0;
};

// A task whose transfers are under way.
struct Flight {
    TaskPtr task;
    double since;
    const aio::ChunkTransfer& transfer;
    aio::ChunkFlight inner;
};

// A task whose work is queued on the stream of its lane, or the user's compute on its streams.
struct Queued {
    TaskPtr task;
    double since;
    std::vector<driver::Event> events;
    After after;
};

// The number of an op, which part of it, its bytes, when it began and ended.
using Ran = std::tuple<int64_t, int, int64_t, double, double>;

// Lanes that led to a task, latest first, each with the time since when that could begin.
using Path = std::vector<std::pair<int, double>>;

// When a task, or a part of one, that began at that time may end at the earliest: for tests that
// imitate slower hardware. It may throw.
using Pace = std::function<double(const Task& task, double since)>;

struct Options {
    int lanes;
    int disk;      // which of them is that of the drives
    int slots;     // of each staging ring
    int64_t flying_bytes_max;  // as FLYING_BYTES_MAX of program/schedule.py
    size_t ran_max;
    driver::DriverPtr driver;  // none where the CPU computes
    Pace pace;
    bool threads = true;  // else nothing runs but what a test begins by `first`
};

// Every call may come from any thread. None asks for the GIL. What must not be is refused before
// anything is written (`std::logic_error`).
class Runner {
public:
    explicit Runner(Options options);
    Runner(const Runner&) = delete;
    ~Runner();

    // Queue a task behind those that touched the places that it reads and writes.
    void start(const TaskPtr& task, const Cells& reads, const Cells& writes);
    // Whom a task would have to wait for that reads and writes these places; all that touch any.
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes);
    std::vector<TaskPtr> all();
    void cancel(const std::vector<TaskPtr>& tasks);
    // Begin the user's own task; wait for that at most so long. Whether it has begun.
    bool begin(Task& task, double seconds);
    // It is over; where a device computes, once that is through with what these streams have now.
    void finish(Task& task, const std::vector<driver::Stream>& streams);
    // Wait at most so long until a task is over. Whether it is.
    bool over(Task& task, double seconds);
    // The urgency of a task, the serial numbers of those that it waits for, and what led to it.
    std::tuple<Key, std::vector<int64_t>, Path> look(const Task& task);
    // Begin the most urgent task of a lane, and nothing of its work; none where none is ready.
    TaskPtr first(int lane);
    // Do a work on the calling thread, or on that stream of the user's. Returns when the host is
    // through with it.
    void perform(const Work& work, const Settings* settings, driver::Stream stream);
    // What a lane has met; none where nothing has failed.
    std::exception_ptr failure();
    bool failed() const { return failed_; }
    // Start nothing more, and end all waits; with `closing`, the lanes too, once what is under way
    // has ended. It raises nothing.
    void stop(bool closing);
    // Seconds, bytes and operations of what a lane has done.
    std::tuple<double, int64_t, int64_t> used(int lane);
    // The last works and computes of the user, in the order of their end.
    std::vector<Ran> ran();

private:
    using Place = std::tuple<Key, int64_t>;

    using Ready = std::set<std::pair<Place, Task*>>;

    struct Lane {
        Ready ready;
        std::condition_variable wake;
        bool asleep = false;
        Used used;
        std::vector<std::unique_ptr<Flight>> flights;
        std::vector<std::pair<Flight*, aio::ChunkFlight::Landed>> landed;
        int64_t flying_bytes = 0;
        double flying_since = 0;
        driver::Stream stream = 0;
        std::deque<Queued> queued;
        double ended_at = 0;  // what ended last
        std::exception_ptr failure;  // of what is under way; nothing more begins
    };
    // The lock; who is to be woken is told when it is let go.
    class Turn;

    void live(int lane);      // the life of a lane's thread
    void work_on(Lane& lane);
    void live_of_device();    // of the thread that waits for the user's computes
    void fail(Turn& turn, std::exception_ptr failure);
    // The lane that runs a task; of a stream that of the drives, which hands its works out.
    int number_of(const Task& task) const;
    Ready::const_iterator may_begin(const Lane& lane) const;
    bool has_work(const Lane& lane) const { return may_begin(lane) != lane.ready.end(); }
    Task* next(Lane& lane);
    void begin_work(Turn& turn, Lane& lane, Task* task);
    void run_work(Turn& turn, Lane& lane, Task* task);
    void work_at_hand(Turn& turn);
    void begin_link(Task* stream);
    void next_stage(const TaskPtr& stream, size_t link, size_t stage, int slot);
    void take_off(Turn& turn, Lane& lane, Task* task, const aio::ChunkTransfer& transfer);
    void land(Turn& turn, Lane& lane);
    void queue_work(Turn& turn, Lane& lane, Task* task);
    void end_queued(Turn& turn, Lane& lane);
    void end_stream(Lane& lane);
    double delayed(Turn& turn, Lane& lane, const Task& task, double since);
    void ended(Lane& lane, const TaskPtr& task, double since);
    void queue(const TaskPtr& task, const std::vector<TaskPtr>& waits);
    void record(const Ran& ran);
    void link(Task* other, Task* task);
    void done(Task* task);
    Path path_of(const Task& task) const;
    void release(Task* task);
    void try_ready(Task* task, Task* last);
    void hurry(Task* task, Key key);

    const Options options_;
    std::mutex mutex_;
    std::deque<Lane> lanes_;
    std::condition_variable changed_;
    bool told_ = false;  // what somebody waits for has come
    bool stopped_ = false, closing_ = false;
    std::exception_ptr failure_;
    std::atomic<bool> failed_ = false;
    int64_t serial_ = 0;
    Board board_;
    std::unordered_map<Task*, TaskPtr> alive_;  // all that are not over
    std::vector<int> free_;                     // staging slots
    std::deque<Queued> computing_;              // the user's, on the device
    std::condition_variable computes_;          // told when there is one more
    std::deque<Ran> ran_;
    std::vector<std::thread> threads_;
};

}  // namespace runner
