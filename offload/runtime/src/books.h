// The lanes' books without Python: what `program/schedule.py` and `books.py` do, which
// are the reference and say why. Here lanes do their work (`work.h`) on their own, so that it costs
// the user's thread neither Python nor the wait for the GIL.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "board.h"
#include "driver.h"
#include "task.h"
#include "work.h"

namespace books {

// How many tasks back a wait is traced to the lanes that caused it.
constexpr size_t HISTORY_MAX = 16;

double now();  // as Python's time.perf_counter

// A sleeping lane's copy of at most so many bytes is done by who makes it ready: to wake the lane
// takes as long (14 us beside 8 us for 64 KiB and 17 us for 128 KiB, measured).
constexpr size_t AT_HAND_BYTES_MAX = 128 << 10;

// Transfers of files are begun as long as those under way are of fewer bytes: that keeps a drive
// busy, and what is urgent waits for no more.
constexpr int64_t FLYING_BYTES_MAX = 64 << 20;

// So many copies of a lane are queued on its stream at once: the next begins when one ends.
constexpr size_t COPIES_MAX = 2;

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

// A task whose copies are queued on the stream of its lane, or the user's compute on its streams.
struct Queued {
    TaskPtr task;
    double since;
    std::vector<driver::Event> events;
};

struct Ran {
    int64_t number;
    Part part;
    int64_t bytes;
    double start, stop;
};

// What can be seen of a task that others are changing.
struct Seen {
    Key key;
    std::vector<int64_t> waits;  // serial numbers
    // The lanes that led to it, latest first, each with the time since when it could.
    std::vector<std::pair<int, double>> path;
};

// Every call may come from any thread. None asks for the GIL. What must not be is refused before
// anything is written (`std::logic_error`).
class Books {
public:
    // With so many lanes, of which one is that of the drives, and so many staging slots; with a
    // driver but one, which is Python's ([Note: Who runs what] of `native_work`).
    Books(int lanes, int disk, int slots, size_t ran_max, driver::DriverPtr driver = nullptr);
    Books(const Books&) = delete;
    ~Books();

    // Queue a task behind those that touched the places that it reads and writes.
    void issue(const TaskPtr& task, const Cells& reads, const Cells& writes);
    // Whom a task would have to wait for that reads and writes these places; all that touch any.
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes);
    std::vector<TaskPtr> all();
    void cancel(const std::vector<TaskPtr>& tasks);
    // Begin the user's own task; wait for that at most so long. Whether it has begun.
    bool begin(Task& task, double seconds);
    void finish(Task& task);
    // The user's own task is over when the device is through with what these streams have now.
    void finish(Task& task, const std::vector<driver::Stream>& streams);
    // The life of the thread that waits for that, until the books are closed.
    void end();
    // Wait at most so long until a task is over. Whether it is.
    bool over(Task& task, double seconds);
    Seen look(const Task& task);
    // Begin the most urgent task of a lane that has no work of its own, and do the works before it.
    // With `wait` as soon as there is one; none where the books are closed. What a work throws
    // comes when no transfer of the lane is under way any more.
    TaskPtr take(int lane, bool wait);
    // Start nothing more, and end all waits; those of lanes only where the books are closed.
    // For the end, so it raises nothing.
    void stop(bool closing);
    // What works have done on a lane since the last time that this was asked.
    Used used(int lane);
    // The last works and computes of the user since that was asked, in the order of their end.
    std::deque<Ran> ran();

private:
    using Place = std::tuple<Key, int64_t>;

    struct Lane {
        std::set<std::pair<Place, Task*>> ready;
        std::condition_variable wake;
        bool asleep = false;
        Used used;
        std::vector<std::unique_ptr<Flight>> flights;
        std::vector<std::pair<Flight*, aio::ChunkFlight::Landed>> landed;
        int64_t flying_bytes = 0;
        double flying_since = 0;
        driver::Stream stream = 0;
        std::deque<Queued> copying;
        double copied_until = 0;
        std::exception_ptr failure;  // of what is under way; nothing more begins
    };
    // The lock; who is to be woken is told when it is let go.
    class Turn;

    // The lane that runs a task; of a stream that of the drives, which hands its works out.
    int number_of(const Task& task) const;
    bool has_work(const Lane& lane) const;
    Task* first(Lane& lane);
    void start(Turn& turn, Lane& lane, Task* task);
    void run_work(Turn& turn, Lane& lane, Task* task);
    void work_at_hand(Turn& turn);
    void begin_link(Task* stream);
    void next_stage(const TaskPtr& stream, size_t link, size_t stage, int slot);
    void take_off(Turn& turn, Lane& lane, Task* task, const aio::ChunkTransfer& transfer);
    void land(Turn& turn, Lane& lane);
    void queue_copies(Turn& turn, Lane& lane, Task* task);
    void end_copies(Turn& turn, Lane& lane);
    void end_stream(Lane& lane);
    void count(Lane& lane, const Task& task, double since, double until);
    void queue(const TaskPtr& task, const std::vector<TaskPtr>& waits);
    void record(const Ran& ran);
    void link(Task* other, Task* task);
    void done(Task* task);
    std::vector<std::pair<int, double>> path_of(const Task& task) const;
    void release(Task* task);
    void try_ready(Task* task, Task* last);
    void hurry(Task* task, Key key);

    std::mutex mutex_;
    std::deque<Lane> lanes_;
    std::condition_variable changed_;
    bool told_ = false;  // what somebody waits for has come
    bool stopped_ = false, closing_ = false;
    int64_t serial_ = 0;
    Board board_;
    std::unordered_map<Task*, TaskPtr> alive_;  // all that are not over
    const int disk_;
    std::vector<int> free_;  // staging slots
    const driver::DriverPtr driver_;  // none where the CPU computes
    std::deque<Queued> ending_;       // the user's computes
    std::condition_variable ended_;   // told when there is one more
    std::deque<Ran> ran_;
    size_t ran_max_;
};

}  // namespace books
