// Which tasks last touched every place: what `program/schedule.py` does, which says why. Places
// are numbers, from zero on.
#pragma once

#include <algorithm>
#include <vector>

#include "task.h"

namespace runner {

using Cells = std::vector<int>;

class Board {
public:
    // Tasks to wait for: a read waits for the last write, a write for that and all reads.
    std::vector<TaskPtr> waits(const Cells& reads, const Cells& writes) const {
        std::vector<TaskPtr> found;
        for (const int cell : reads) look(cell, false, found);
        for (const int cell : writes) look(cell, true, found);
        return found;
    }

    std::vector<TaskPtr> all() const {
        std::vector<TaskPtr> found;
        for (size_t cell = 0; cell < places_.size(); cell++) look(int(cell), true, found);
        return found;
    }

    void note(const TaskPtr& task, const Cells& reads, const Cells& writes) {
        for (const int cell : reads) under_way(cell).push_back({task, false});
        for (const int cell : writes) under_way(cell).push_back({task, true});
    }

private:
    struct Access {
        TaskPtr task;
        bool wrote;
    };

    void look(int cell, bool writing, std::vector<TaskPtr>& found) const {
        if (size_t(cell) >= places_.size()) return;
        const std::vector<Access>& place = places_[size_t(cell)];
        for (auto access = place.rbegin(); access != place.rend(); ++access) {
            if (access->task->state == State::CANCELLED) continue;
            if ((access->wrote || writing) &&
                std::ranges::find(found, access->task) == found.end()) {
                found.push_back(access->task);
            }
            if (access->wrote) break;
        }
    }

    // The accesses of a place, from the first on that is not over.
    std::vector<Access>& under_way(int cell) {
        if (size_t(cell) >= places_.size()) places_.resize(size_t(cell) + 1);
        std::vector<Access>& place = places_[size_t(cell)];
        const auto open = std::ranges::find_if(
            place, [](const Access& access) { return !access.task->over(); });
        place.erase(place.begin(), open);
        return place;
    }

    std::vector<std::vector<Access>> places_;
};

}  // namespace runner
