// A queue that fails on purpose, for tests: the same faults for the same numbers and seed.
#pragma once

#include <map>
#include <memory>

#include "queue.h"

namespace aio {

struct Faults {
    std::map<int64_t, int> errors;  // errno by number of the piece submitted, from 1
    uint64_t seed = 0;              // of what follows: shares of the pieces
    double short_rate = 0;          // that move a part only
    double retry_rate = 0;          // that fail with EINTR or EAGAIN
    double refusal_rate = 0;        // before which the queue says that it has no room
    int64_t broken_at = 0;          // number of the piece after which the queue itself fails

    bool any() const {
        return !errors.empty() || short_rate > 0 || retry_rate > 0 || refusal_rate > 0 ||
               broken_at > 0;
    }
};

// `inner` with faults put in; a piece that fails never reaches it.
std::unique_ptr<Queue> with_faults(std::unique_ptr<Queue> inner, const Faults& faults);

}  // namespace aio
