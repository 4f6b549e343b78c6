#include "chunks.h"

#include <cerrno>
#include <utility>

namespace aio {

int64_t ChunkTransfer::bytes() const {
    int64_t sum = 0;
    for (const Chunk& chunk : chunks) sum += chunk.bytes;
    return sum;
}

ChunkFlight::ChunkFlight(const ChunkTransfer& transfer, int slot)
    : transfer_(transfer), slot_(slot), open_(transfer.chunks.size()) {
    for (const Chunk& chunk : transfer.chunks) {
        const Check& check = *chunk.check;
        const bool other = transfer.writing && chunk.homes.size() > 1;
        homes_.push_back(other ? 1 - check.protected_home : check.home);
        parts_open_.push_back(chunk.homes[size_t(homes_.back())].size());
        crcs_.push_back(chunk.check->crc);
    }
}

const unsigned char* ChunkFlight::data(const Chunk& chunk) const {
    return reinterpret_cast<const unsigned char*>(chunk.memory + chunk.stride * slot_);
}

void ChunkFlight::begin(const std::function<void(const Landed&)>& landed) noexcept {
    for (size_t at = 0; at < transfer_.chunks.size(); at++) {
        const Chunk& chunk = transfer_.chunks[at];
        Check& check = *chunk.check;
        if (transfer_.writing) check.begun++;
        const bool readable = check.begun > 0 && check.begun == check.ended;
        for (const ChunkPart& part : chunk.homes[size_t(homes_[at])]) {
            if (!transfer_.writing && !readable) {
                landed({at, {.cause = Cause::stopped}});  // Never written.
                continue;
            }
            Transfer one{part.fd, transfer_.writing, part.align, {}};
            one.parts.push_back(
                {chunk.memory + chunk.stride * slot_ + part.start, part.bytes, part.offset});
            one.finished = [landed, at](const Failure& failure) { landed({at, failure}); };
            if (part.engine->submit(std::move(one)) == nullptr)
                landed({at, {EBADF, Cause::refused, part.offset, part.bytes}});  // It is closed.
        }
    }
    if (!transfer_.writing) return;
    for (size_t at = 0; at < transfer_.chunks.size(); at++) {
        const Chunk& chunk = transfer_.chunks[at];
        crcs_[at] = transfer_.crc(0, data(chunk), chunk.bytes);
    }
}

void ChunkFlight::land(const Landed& landed, bool look) {
    const bool whole = --parts_open_[landed.chunk] == 0;
    if (whole) open_--;
    if (!look) return;
    const Failure& failure = landed.failure;
    if (failure.code != 0 || failure.cause == Cause::stopped)
        throw ChunkFailed(transfer_.writing, transfer_.chunks[landed.chunk].number, failure, -1);
    if (whole) look_at(landed.chunk);
}

void ChunkFlight::look_at(size_t at) {
    const Chunk& chunk = transfer_.chunks[at];
    (transfer_.writing ? transfer_.moved->written : transfer_.moved->read) += chunk.bytes;
    if (transfer_.writing) {
        chunk.check->earlier_step = std::exchange(chunk.check->step, *transfer_.step);
        chunk.check->earlier_crc = std::exchange(chunk.check->crc, crcs_[at]);
        chunk.check->home = homes_[at];
        chunk.check->ended = chunk.check->begun;
        return;
    }
    const int64_t found = transfer_.crc(0, data(chunk), chunk.bytes);
    if (found != crcs_[at]) throw ChunkFailed(false, chunk.number, {}, found);
}

}  // namespace aio
