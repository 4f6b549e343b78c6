// One op in one step: what `program/schedule.py` says.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace runner {

using Key = std::pair<int64_t, int64_t>;  // number of the pass, position in it

enum class State { WAITING, READY, RUNNING, DONE, CANCELLED };

// What is told of a task: all of it, or of a stream its work, and what goes from tier to tier.
enum class Part { WORK, READ, WRITE, DOWN, UP };

class Work;
struct Settings;

struct Task : std::enable_shared_from_this<Task> {
    int lane = 0;
    bool of_user = false;
    Key key{};
    std::shared_ptr<const Work> work;  // none where it is the user's
    std::shared_ptr<const Settings> settings;  // of the step
    int64_t bytes = 0;                         // that it counts for
    int64_t number = 0;  // by which Python knows what has run
    Part part = Part::WORK;
    // Of a stream: its next link to begin, and how many are not over. Of a stage of a link: whose
    // it is, which, and the staging slot.
    size_t next_link = 0, links_left = 0;
    std::shared_ptr<Task> stream;
    size_t link = 0, stage = 0;
    int slot = 0;

    int64_t serial = 0;
    std::atomic<State> state = State::WAITING;
    std::vector<Task*> followers, waits;  // as long as they are not over
    bool awaited = false;                 // somebody is blocked until it is ready or over
    double ready_at = 0, began_at = 0;
    double ended_at = 0;  // when the host had queued all of it, where a device does it later
    std::vector<std::pair<int, double>> history;  // lane, since when it was ready; latest first

    bool over() const { return state >= State::DONE; }
    bool begun() const { return state == State::RUNNING || state == State::DONE; }
};

using TaskPtr = std::shared_ptr<Task>;

}  // namespace runner
