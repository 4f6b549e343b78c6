"""aio: every byte arrives, every failure is told, nothing is left behind."""

import errno
import itertools
import random
import re
import threading
import time

import numpy as np
import pytest

import aio
from tests.faults import GateIO, aligned, failure_of, in_child, scratch
from tests.simulated import MemoryIO, SimulatedIO

pytestmark = pytest.mark.usefixtures("leaks_nothing")

BLOCK = aio.ALIGN_BYTES


@pytest.mark.parametrize("seed", range(12))
def test_short_transfers_retries_and_delays(seed):
    """Bytes arrive whatever the system does short of an error; direct and buffered."""
    inner = MemoryIO(kind="tmpfs" if seed % 2 else "simulated")
    io = SimulatedIO(seed, inner, short_rate=0.5, retry_rate=0.3, delay_s_max=0.0005)
    rng = np.random.default_rng(seed)
    size = 40 * BLOCK
    source = aligned(size, rng.bytes(size))
    back = aligned(size)
    with aio.ThreadBackend(4, io, piece_bytes=3 * BLOCK) as pool, scratch(pool, size) as file:
        assert file.direct == (seed % 2 == 0)
        cuts = [0, 7 * BLOCK, 8 * BLOCK, 30 * BLOCK, size]
        pairs = list(itertools.pairwise(cuts))
        random.Random(seed).shuffle(pairs)
        for ticket in [file.write_from(source[a:b], a) for a, b in pairs]:
            ticket.wait()
        for ticket in [file.read_into(back[a:b], a) for a, b in pairs]:
            ticket.wait()
        assert np.array_equal(source, back), f"seed {seed}"


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_every_call_can_fail(code):
    """The n-th call fails for every n: an OSError with everything in it, and nothing is left."""
    memory = aligned(9 * BLOCK)

    def work():
        with (
            aio.ThreadBackend(1, io, piece_bytes=2 * BLOCK) as pool,
            scratch(pool, 9 * BLOCK) as file,
        ):
            file.write_from(memory, 0).wait()
            file.read_into(memory, 0).wait()

    for number in itertools.count(1):
        io = SimulatedIO(0, MemoryIO(10 << 20), errors={number: code})
        error = failure_of(work)
        assert io.inner.files == {}
        if error is None:
            break
        assert error.errno == code
        assert re.search(r"of [\d,]+ bytes.* failed: .*; likely .*; ", error.strerror)
        assert error.filename.startswith("/simulated")
        assert code != errno.ENOSPC or "bytes are free" in error.strerror
    assert number == len(io.calls) + 1 == 15


def test_endless_retries_and_end_of_file():
    io = MemoryIO()
    with aio.ThreadBackend(1, io) as pool, scratch(pool) as file:
        del io.files[file.fd][BLOCK:]
        with pytest.raises(OSError, match=f"file ends at {BLOCK}") as caught:
            file.read_into(aligned(2 * BLOCK), 0).wait()
        assert caught.value.errno == errno.EIO
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(io, "pwritev", lambda *_: 0)
            patch.setattr("aio.threads.RETRY_DELAY_S", 0)
            with pytest.raises(OSError, match="in a row"):
                file.write_from(aligned(BLOCK), 0).wait()


def test_what_a_caller_can_get_wrong():
    with aio.ThreadBackend(1, MemoryIO()) as pool:
        with scratch(pool, 8 * BLOCK) as file:
            memory = aligned(4 * BLOCK)
            with pytest.raises(ValueError, match=r"address .* not a multiple"):
                file.read_into(memory[1 : BLOCK + 1], 0)
            with pytest.raises(ValueError, match="and length 100 and offset 3 not"):
                file.write_from(memory[8:108], 3)
            with pytest.raises(ValueError, match="outside of its 32768"):
                file.read_into(memory, 5 * BLOCK)
            with pytest.raises(ValueError, match="outside"):
                file.read_into(memory, -BLOCK)
            with pytest.raises(ValueError, match="contiguous"):
                file.read_into(memory[::2], 0)
            with pytest.raises(ValueError, match="read-only"):
                file.read_into(bytes(BLOCK), 0)
            file.read_into(memory[:0], 0).wait()
            file.write_from(memory.view(np.float32).reshape(4, -1), 0).wait()
        with pytest.raises(ValueError, match="positive"):
            scratch(pool, 0)


def test_close_with_work_in_flight():
    io = GateIO()
    with aio.ThreadBackend(2, io) as pool:
        file = scratch(pool, 4 * BLOCK)
        io.gate.clear()
        slow = file.read_into(aligned(BLOCK), 0)
        assert not slow.done()
        closer = threading.Thread(target=file.close)
        closer.start()
        time.sleep(0.02)
        assert closer.is_alive()
        io.gate.set()
        closer.join(20)
        assert slow.done()
        slow.wait()
        assert file.fd not in io.files
        file.close()


def test_forked_child_does_not_wait_for_ever():
    io = GateIO()
    with aio.ThreadBackend(1, io) as pool, scratch(pool) as file:
        io.gate.clear()
        ticket = file.read_into(aligned(BLOCK), 0)

        def child():
            with pytest.raises(RuntimeError, match="fork"):
                ticket.wait()

        assert in_child(child) == 0
        io.gate.set()
        ticket.wait()
