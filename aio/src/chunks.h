// Chunks of a volume, with checksums: what aio/chunks.py says, without Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <vector>

#include "engine.h"

namespace aio {

// What is kept of a chunk, in memory that Python reads, too.
struct Check {
    int64_t begun, ended, step, crc, earlier_step, earlier_crc, home, protected_home;
};

// Bytes moved so far; likewise.
struct Moved {
    int64_t read, written;
};

using Crc = uint32_t (*)(uint32_t crc, const unsigned char* data, int64_t bytes);

struct ChunkPart {
    Engine* engine;
    int fd;
    int64_t align;
    int64_t start, bytes, offset;  // in the chunk's memory, and in the file
};

struct Chunk {
    int64_t number;
    std::byte* memory;  // in a ring of slots that of the first, and the way from one to the next:
    int64_t stride;
    int64_t bytes;
    Check* check;
    std::vector<std::vector<ChunkPart>> homes;  // one or two: [Note: Two homes] of aio/chunks.py
};

// Some chunks to be read or written, any number of times.
struct ChunkTransfer {
    bool writing;
    std::vector<Chunk> chunks;
    Crc crc;
    Moved* moved;
    const int64_t* step;  // stamped on what is written

    int64_t bytes() const;
};

// A chunk that failed. Without an errno its checksum is `found`; below zero: it was never written.
struct ChunkFailed : std::runtime_error {
    ChunkFailed(bool writing, int64_t number, const Failure& failure, int64_t found)
        : std::runtime_error("a transfer of a chunk failed"),
          writing(writing), number(number), failure(failure), found(found) {}

    bool writing;
    int64_t number;
    Failure failure;
    int64_t found;
};

// One run of a transfer, which outlives it. The engines' threads tell of parts that have landed;
// all else is for one thread at a time.
class ChunkFlight {
public:
    struct Landed {
        size_t chunk;
        Failure failure;
    };

    ChunkFlight(const ChunkTransfer& transfer, int slot);

    // Hand all parts to their engines: `landed` is called once for each, by any thread, and must
    // not wait. The checksums of what is written are taken while the drives write.
    void begin(const std::function<void(const Landed&)>& landed) noexcept;

    // A part has landed. With `look` a whole chunk is checked and noted: throws ChunkFailed.
    void land(const Landed& landed, bool look);

    bool over() const { return open_ == 0; }

private:
    void look_at(size_t chunk);
    const unsigned char* data(const Chunk& chunk) const;

    const ChunkTransfer& transfer_;
    const int slot_;
    size_t open_;                     // chunks
    std::vector<int64_t> homes_;      // by chunk: read, or written
    std::vector<size_t> parts_open_;  // by chunk
    std::vector<int64_t> crcs_;       // by chunk: expected, or written
};

}  // namespace aio
