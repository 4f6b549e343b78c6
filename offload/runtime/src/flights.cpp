// Transfers of files: many under way at once, begun and looked at by the lane of the drives.
//
// [Note: Flights]
// The lane begins the transfers of an op, and the engines' threads tell of each part that has
// landed. What has landed the lane looks at, and when all of an op has, the op is done. Nobody
// waits for a transfer but who has nothing else to do. After a failure nothing begins, and it is
// told when nothing is under way: memory outlives what goes there.
//
// A stream goes link by link, as many as there are staging slots: what it reads lands, its own lane
// does the work, and what is written back lands. Between two links goes whatever is more urgent.
#include "turn.h"

namespace books {

// Begin the next link of a stream, in a slot of its own.
void Books::begin_link(Turn& turn, Lane& lane, Task* stream) {
    const auto& links = *stream->work->links();
    if (links.empty()) return done(stream);
    if (stream->next_link == 0) stream->links_left = links.size();
    const size_t link = stream->next_link++;
    const int slot = free_.back();
    free_.pop_back();
    const aio::ChunkTransfer& transfer = *links[link].reads->transfer();
    take_off(turn, lane,
             {stream->shared_from_this(), now(), transfer, {transfer, slot}, true, link, slot});
}

void Books::take_off(Turn& turn, Lane& lane, Flight begun) {
    lane.flights.push_back(std::make_unique<Flight>(std::move(begun)));
    Flight* flight = lane.flights.back().get();
    if (lane.flying_bytes == 0) lane.flying_since = flight->since;
    lane.flying_bytes += flight->transfer.bytes();
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
    const auto [flight, part] = lane.landed.back();
    lane.landed.pop_back();
    std::exception_ptr failure;
    const bool look = lane.failure == nullptr;
    turn.without([&, flight = flight, part = part] {
        try {
            flight->inner.land(part, look);
        } catch (...) {
            failure = std::current_exception();
        }
    });
    if (failure) lane.failure = failure;
    if (!flight->inner.over()) return;
    const auto found = std::ranges::find_if(
        lane.flights, [flight = flight](const auto& one) { return one.get() == flight; });
    const std::unique_ptr<Flight> over = std::move(*found);
    lane.flights.erase(found);
    const double until = now();
    lane.flying_bytes -= over->transfer.bytes();
    if (lane.flying_bytes == 0) lane.used.busy_s += until - lane.flying_since;
    if (lane.failure) return;
    const Part what = over->transfer.writing ? Part::WRITE : Part::READ;
    count(lane, {over->task->number, over->of_stream ? what : Part::WORK, over->transfer.bytes(),
                 over->since, until});
    if (!over->of_stream) done(over->task.get());
    else if (over->transfer.writing) link_over(over->task.get(), over->slot);
    else landed(*over);
}

// What a link reads is there: its work is for the stream's own lane, as urgent as the stream.
void Books::landed(Flight& flight) {
    const TaskPtr work = std::make_shared<Task>();
    const Link& link = (*flight.task->work->links())[flight.link];
    work->lane = flight.task->lane;
    work->key = flight.task->key;
    work->work = link.work;
    work->settings = flight.task->settings;
    work->bytes = link.bytes;
    work->number = flight.task->number;
    work->stream = flight.task;
    work->link = flight.link;
    work->slot = flight.slot;
    work->serial = ++serial_;
    alive_.emplace(work.get(), work);
    try_ready(work.get(), nullptr);
}

// The work of a link is done: what it changed is written back.
void Books::worked(Task* work) {
    const TaskPtr kept = work->shared_from_this();
    done(work);
    if ((*kept->stream->work->links())[kept->link].writes == nullptr)
        return link_over(kept->stream.get(), kept->slot);
    Lane& drives = lanes_[size_t(disk_)];
    drives.worked.push_back(kept);
}

void Books::link_over(Task* stream, int slot) {
    free_.push_back(slot);
    if (--stream->links_left == 0) done(stream);
}

}  // namespace books
