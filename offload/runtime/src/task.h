// One op in one step, and a chunk on its way: what `program/schedule.py` says.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace books {

using Key = std::pair<int64_t, int64_t>;  // number of the pass, position in it
constexpr Key LAST{int64_t(1) << 62, 0};

enum class State { WAITING, READY, RUNNING, DONE, CANCELLED };

struct Task;

// Shared with Python as Task is: else the last to let go would need the GIL.
struct Passage : std::enable_shared_from_this<Passage> {
    int slot = -1;
    std::vector<Task*> tasks;
    int left = 0, missing = 1;
    Key key = LAST;
    int64_t serial = 0;

    bool started() const { return slot >= 0; }
};

class Work;
struct Settings;

struct Task : std::enable_shared_from_this<Task> {
    int lane = 0;
    bool of_user = false;
    Key key = LAST;
    std::shared_ptr<const Work> work;  // none where its lane has to call Python
    std::shared_ptr<const Settings> settings;  // of the step
    int64_t bytes = 0;                         // that it counts for
    int64_t number = -1;  // by which Python knows what has run; less than zero: it need not
    std::shared_ptr<Passage> passage;

    int64_t serial = 0;
    std::atomic<State> state = State::WAITING;
    int missing = 0;
    std::vector<Task*> followers, waits;  // as long as they are not over
    bool awaited = false;                 // somebody is blocked until it is ready or over
    double ready_at = 0, began_at = 0;
    std::vector<std::pair<int, double>> history;  // lane, since when it was ready; latest first

    int slot() const { return passage ? passage->slot : 0; }
    bool over() const { return state >= State::DONE; }
    bool begun() const { return state == State::RUNNING || state == State::DONE; }
};

using TaskPtr = std::shared_ptr<Task>;
using PassagePtr = std::shared_ptr<Passage>;

}  // namespace books
