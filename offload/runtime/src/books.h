// The lanes' books without Python: what `program/schedule.py` and `books.py` do, which
// are the reference and say why. Here lanes copy within CPU memory on their own, so that a copy
// costs the user's thread neither its Python nor the wait for the GIL.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "board.h"
#include "task.h"

namespace books {

// How many tasks back a wait is traced to the lanes that caused it.
constexpr size_t HISTORY_MAX = 16;

double now();  // as Python's time.perf_counter

// A sleeping lane's copy of at most so many bytes is done by who makes it ready: to wake the lane
// takes as long (14 us beside 8 us for 64 KiB and 17 us for 128 KiB, measured).
constexpr size_t AT_HAND_BYTES_MAX = 128 << 10;

struct Copied {
    double busy_s = 0;
    int64_t bytes = 0, operations = 0;
};

struct Ran {
    int64_t number;
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
// anything is written (`std::logic_error`). Any other error in the midst of writing, which is
// memory that ran out, leaves the books half written: that ends all waits, and is told to whoever
// calls from then on, lanes first.
class Books {
public:
    Books(int lanes, int slots, size_t ran_max);

    void add(const TaskPtr& task, const std::vector<TaskPtr>& waits);
    // Queue a task behind those that touched the places that it reads and writes.
    void issue(const TaskPtr& task, const Cells& reads, const Cells& writes);
    // Whom a task would have to wait for that reads and writes these places; all that touch any.
    std::vector<TaskPtr> touching(const Cells& reads, const Cells& writes);
    std::vector<TaskPtr> all();
    size_t most_kept();
    void seal(const PassagePtr& passage);
    void cancel(const std::vector<TaskPtr>& tasks);
    // Begin the user's own task; wait for that at most so long. Whether it has begun.
    bool begin(Task& task, double seconds);
    void finish(Task& task);
    // Wait at most so long until a task is over. Whether it is.
    bool over(Task& task, double seconds);
    Seen look(const Task& task);
    // Begin the most urgent task of a lane that is not a copy, and do the copies before it. With
    // `wait` as soon as there is one; none where the books are closed.
    TaskPtr take(int lane, bool wait);
    // Begin what may start at once and is more urgent, and is not a copy; do the copies before it.
    TaskPtr overtaking(int lane, const Task& than);
    // Start nothing more, and end all waits; those of lanes only where the books are closed.
    // For the end, so it raises nothing.
    void stop(bool closing);
    // What copies have done on a lane since the last time that this was asked.
    Copied copied(int lane);
    // The last copies and computes of the user since that was asked, in the order of their end.
    std::deque<Ran> ran();

private:
    using Place = std::tuple<Key, int64_t>;

    struct Lane {
        std::set<std::pair<Place, Task*>> ready;
        std::condition_variable wake;
        bool asleep = false;
        Copied copied;
    };
    // The lock; who is to be woken is told when it is let go.
    class Turn;

    Task* first(Lane& lane);
    void run_copy(Turn& turn, Lane& lane, Task* task);
    void copy_at_hand(Turn& turn);
    void require_whole() const;
    void queue(const TaskPtr& task, const std::vector<TaskPtr>& waits);
    void record(int64_t number, double since, double until);
    void link(Task* other, Task* task);
    void done(Task* task);
    void release(Task* task);
    void try_ready(Task* task, Task* last);
    void came(Passage* passage, Task* last);
    void start(Task* last);
    void hurry(Task* task, Key key);

    std::mutex mutex_;
    std::deque<Lane> lanes_;
    std::condition_variable changed_;
    bool told_ = false;  // what somebody waits for has come
    bool stopped_ = false, closing_ = false;
    bool torn_ = false;  // half written, see above
    int64_t serial_ = 0;
    Board board_;
    std::unordered_map<Task*, TaskPtr> alive_;  // all that are not over
    std::set<std::pair<Place, Passage*>> waiting_;
    std::vector<int> free_;
    std::vector<Passage*> started_;
    std::deque<Ran> ran_;
    size_t ran_max_;
};

}  // namespace books
