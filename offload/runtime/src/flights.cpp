// Transfers of files: many under way at once, begun and looked at by the lane of the drives.
//
// [Note: Flights]
// The lane begins the transfers of an op, and the engines' threads tell of each part that has
// landed. What has landed the lane looks at, and when all of an op has, the op is done. Nobody
// waits for a transfer but who has nothing else to do. After a failure nothing begins, and it is
// told when nothing is under way: memory outlives what goes there.
#include "turn.h"

namespace books {

void Books::take_off(Turn& turn, Lane& lane, Task* task) {
    const aio::ChunkTransfer& transfer = *task->work->transfer();
    lane.flights.push_back(std::make_unique<Flight>(
        task->shared_from_this(), now(), aio::ChunkFlight(transfer, task->slot())));
    Flight* flight = lane.flights.back().get();
    if (lane.flying_bytes == 0) lane.flying_since = flight->since;
    lane.flying_bytes += transfer.bytes();
    turn.without([&] {
        flight->inner.begin([this, &lane, flight](const aio::ChunkFlight::Landed& landed) {
            const std::lock_guard lock(mutex_);
            lane.landed.emplace_back(flight, landed);
            if (std::exchange(lane.asleep, false)) lane.wake.notify_one();
        });
    });
}

// One part is over.
void Books::land(Turn& turn, Lane& lane) {
    const auto [flight, landed] = lane.landed.back();
    lane.landed.pop_back();
    std::exception_ptr failure;
    const bool look = lane.failure == nullptr;
    turn.without([&, flight = flight, landed = landed] {
        try {
            flight->inner.land(landed, look);
        } catch (...) {
            failure = std::current_exception();
        }
    });
    if (failure) lane.failure = failure;
    if (!flight->inner.over()) return;
    const TaskPtr task = flight->task;
    const double since = flight->since, until = now();
    lane.flying_bytes -= task->work->transfer()->bytes();
    if (lane.flying_bytes == 0) lane.used.busy_s += until - lane.flying_since;
    std::erase_if(lane.flights, [flight = flight](const auto& one) { return one.get() == flight; });
    if (lane.failure) return;
    count(lane, *task, since, until);
    done(task.get());
}

}  // namespace books
