// Transfers of files: many under way at once, begun and looked at by the lane of the drives.
//
// [Note: Flights]
// The lane takes an op off: it hands the parts of each chunk to the engine of their drive. The
// engine's thread tells of each part that is over. When the last of a chunk is, the lane checks
// what was read, and when the last chunk is, the op is done. The checksum of what is written is
// taken while the drives write. Nobody waits for a transfer but who has nothing else to do.
//
// After a failure nothing begins, and it is told when nothing is under way: memory outlives what
// goes there.
#include "turn.h"

namespace books {

void Books::take_off(Turn& turn, Lane& lane, Task* task) {
    const Transfers& transfers = *task->work->transfers();
    lane.flights.push_back(std::make_unique<Flight>());
    Flight& flight = *lane.flights.back();
    flight.task = task->shared_from_this();
    flight.open = transfers.chunks.size();
    flight.since = now();
    if (lane.flying_bytes == 0) lane.flying_since = flight.since;
    lane.flying_bytes += transfers.bytes;
    for (const StoredChunk& chunk : transfers.chunks) {
        flight.parts_open.push_back(chunk.parts.size());
        flight.crcs.push_back(0);
    }
    turn.without([&] { submit(lane, flight); });
}

void Books::submit(Lane& lane, Flight& flight) noexcept {
    const Transfers& transfers = *flight.task->work->transfers();
    const int slot = flight.task->slot();
    const auto land_later = [this, &lane](Flight* one, size_t chunk, const aio::Failure& failure) {
        const std::lock_guard lock(mutex_);
        lane.landed.push_back({one, chunk, failure});
        if (std::exchange(lane.asleep, false)) lane.wake.notify_one();
    };
    for (size_t at = 0; at < transfers.chunks.size(); at++) {
        const StoredChunk& chunk = transfers.chunks[at];
        Check& check = *chunk.check;
        if (transfers.writing) check.writes++;
        flight.crcs[at] = check.crc;
        if (!transfers.writing && (check.writes == 0 || check.writes != check.ended)) {
            for (size_t part = 0; part < chunk.parts.size(); part++)
                land_later(&flight, at, {.cause = aio::Cause::stopped});  // Never written.
            continue;
        }
        for (const Stored& part : chunk.parts) {
            const auto data = reinterpret_cast<std::byte*>(chunk.at.at(slot)) + part.start;
            auto finished = [&flight, at, land_later](const aio::Failure& failure, auto...) {
                land_later(&flight, at, failure);
            };
            const aio::Failure closed{EBADF, aio::Cause::refused, part.offset, part.bytes};
            if (!part.engine->submit({part.fd, transfers.writing, part.align,
                                      {{data, part.bytes, part.offset}}, std::move(finished)}))
                land_later(&flight, at, closed);
        }
    }
    if (!transfers.writing) return;
    for (size_t at = 0; at < transfers.chunks.size(); at++) {
        const StoredChunk& chunk = transfers.chunks[at];
        flight.crcs[at] = transfers.crc(0, chunk.at.at(slot), chunk.bytes);
    }
}

// One part is over.
void Books::land(Turn& turn, Lane& lane) {
    const Landed landed = lane.landed.back();
    lane.landed.pop_back();
    Flight& flight = *landed.flight;
    const Transfers& transfers = *flight.task->work->transfers();
    std::exception_ptr failure;
    const bool whole = --flight.parts_open[landed.chunk] == 0;
    if (lane.failure == nullptr && (whole || landed.failure.code != 0)) {
        turn.without([&] {
            try {
                check(flight, landed);
            } catch (...) {
                failure = std::current_exception();
            }
        });
    }
    if (failure && !lane.failure) lane.failure = failure;
    if (!whole || --flight.open > 0) return;
    const double until = now();
    lane.flying_bytes -= transfers.bytes;
    if (lane.flying_bytes == 0) lane.used.busy_s += until - lane.flying_since;
    const TaskPtr task = flight.task;
    const double since = flight.since;
    std::erase_if(lane.flights, [&](const auto& one) { return one.get() == &flight; });
    if (lane.failure) return;
    count(lane, *task, since, until);
    done(task.get());
}

// The last part of a chunk has landed, or one has failed.
void Books::check(const Flight& flight, const Landed& landed) {
    const WorkPtr& work = flight.task->work;
    const Transfers& transfers = *work->transfers();
    const StoredChunk& chunk = transfers.chunks[landed.chunk];
    if (landed.failure.code != 0 || landed.failure.cause == aio::Cause::stopped)
        throw TransferFailed(work, chunk.number, landed.failure, -1);
    int64_t& moved = transfers.writing ? transfers.moved->written : transfers.moved->read;
    moved += chunk.bytes;
    if (transfers.writing) {
        chunk.check->crc = flight.crcs[landed.chunk];
        chunk.check->step = *transfers.step;
        chunk.check->ended = chunk.check->writes;
        return;
    }
    const int64_t found = transfers.crc(0, chunk.at.at(flight.task->slot()), chunk.bytes);
    if (found != flight.crcs[landed.chunk])
        throw TransferFailed(work, chunk.number, {}, found);
}

}  // namespace books
