// Transfers of files: many under way at once, begun and looked at by the lane of the drives.
//
// [Note: Flights]
// The lane begins the transfers of an op, and the engines' threads tell of each part that has
// landed. What has landed the lane looks at, and when all of an op has, the op is done. Nobody
// waits for a transfer but who has nothing else to do. After a failure nothing begins, and it is
// told when nothing is under way: memory outlives what goes there.
//
// A stream goes link by link, as many as there are staging slots, and each through its stages: what
// it reads lands, is brought to where its own lane does the work, and goes back. Each stage is a
// task of its lane. Between two links goes whatever is more urgent.
#include "turn.h"

#include <limits>

namespace runner {

// What a drive has brought is worked on and written before all else: slots are few, and while none
// is free the drive stands still.
constexpr Key AT_ONCE{std::numeric_limits<int64_t>::min(), 0};

// Begin the next link of a stream, in a slot of its own.
void Runner::begin_link(Task* stream) {
    const auto& links = *stream->work->links();
    if (links.empty()) return done(stream);
    if (stream->next_link == 0) stream->links_left = links.size();
    const int slot = free_.back();
    free_.pop_back();
    next_stage(stream->shared_from_this(), stream->next_link++, 0, slot);
}

void Runner::next_stage(const TaskPtr& stream, size_t link, size_t stage, int slot) {
    const Link& stages = (*stream->work->links())[link];
    if (stage == stages.size()) {
        free_.push_back(slot);
        if (--stream->links_left == 0) done(stream.get());
        return;
    }
    const Stage& one = stages[stage];
    const bool brought = stage > 0 && stages.front().part == Part::READ;
    const TaskPtr task = std::make_shared<Task>();
    task->lane = one.lane;
    task->key = brought ? AT_ONCE : stream->key;
    task->work = one.work;
    task->settings = stream->settings;
    task->bytes = one.bytes;
    task->number = stream->number;
    task->part = one.part;
    task->stream = stream;
    task->link = link;
    task->stage = stage;
    task->slot = slot;
    queue(task, {});
}

void Runner::take_off(Turn& turn, Lane& lane, Task* task, const aio::ChunkTransfer& transfer) {
    lane.flights.push_back(std::make_unique<Flight>(
        Flight{task->shared_from_this(), now(), transfer, {transfer, task->slot}}));
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
void Runner::land(Turn& turn, Lane& lane) {
    const auto [flight, part] = lane.landed.back();
    lane.landed.pop_back();
    const bool look = lane.failure == nullptr;
    const std::exception_ptr failure = turn.without(
        [&, flight = flight, part = part] { flight->inner.land(part, look); });
    if (failure) lane.failure = failure;
    if (!flight->inner.over()) return;
    const auto found = std::ranges::find_if(
        lane.flights, [flight = flight](const auto& one) { return one.get() == flight; });
    const std::unique_ptr<Flight> over = std::move(*found);
    lane.flights.erase(found);
    lane.flying_bytes -= over->transfer.bytes();
    if (lane.flying_bytes == 0) lane.used.busy_s += now() - lane.flying_since;
    if (!lane.failure) ended(lane, over->task, delayed(turn, lane, *over->task, over->since));
}

}  // namespace runner
