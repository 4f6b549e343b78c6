"""One conformance suite for every backend: every byte arrives, every failure is told, nothing left.

`AIO_SECONDS=360 pytest -m slow -s -k for_long` looks for an hour in all, at other examples every
time. Faults within the engine are for tests/src/engine_test.cpp.
"""

import errno
import gc
import itertools
import mmap
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import aio
from tests.backends import USABLE, few, interpreter, opened
from tests.faults import aligned, scratch

pytestmark = pytest.mark.usefixtures("leaks_nothing")

BLOCK = aio.ALIGN_BYTES


@pytest.fixture(params=USABLE)
def name(request):
    return request.param


def check_against_oracle(backend, directory, data, steps, most=24):
    """Transfers of any offset and length, some under way at once, against a plain array."""
    with scratch(backend, most * BLOCK, directory) as file:
        grain = BLOCK if file.direct else 1
        size = file.bytes // grain
        truth = np.zeros(file.bytes, np.uint8)
        zeros = aligned(file.bytes)
        file.write_from(zeros, 0).wait()
        for _ in range(steps):
            cuts = data.draw(st.lists(st.integers(0, size), min_size=2, max_size=6, unique=True))
            spans = [(a * grain, b * grain) for a, b in itertools.pairwise(sorted(cuts))]
            shift = 0 if file.direct else data.draw(st.integers(0, 17))
            memory = aligned(file.bytes + BLOCK)[shift:]
            writing = data.draw(st.booleans())
            call = file.write_from if writing else file.read_into
            if writing:
                seed = data.draw(st.integers(0, 1 << 32))
                memory[:] = np.random.default_rng(seed).integers(0, 256, memory.size, np.uint8)
            for ticket in [call(memory[a:b], a) for a, b in spans]:
                ticket.wait()
            for a, b in spans:
                if writing:
                    truth[a:b] = memory[a:b]
                assert np.array_equal(memory[a:b], truth[a:b])
        back = aligned(file.bytes)
        file.read_into(back, 0).wait()
        assert np.array_equal(back, truth)


LIMITS = st.fixed_dictionaries(
    {
        "depth": st.integers(1, 9),
        "piece_bytes": st.sampled_from([1, 2, 3, 8]).map(lambda n: n * BLOCK),
    }
)


def conformance(name, directory, examples, seconds=0.0):
    """Checks so many examples, and as many others again while there is time; counts them."""
    end, done = time.monotonic() + seconds, 0

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        derandomize=not seconds,
    )
    @given(st.data(), LIMITS)
    def check(data, limits):
        nonlocal done
        with opened(name, **limits) as backend:
            check_against_oracle(backend, directory, data, steps=4)
        done += 1

    check()
    while time.monotonic() < end:
        check()
    return done


@pytest.mark.parametrize("directory", ["disk", "/dev/shm"])
def test_any_offset_and_length(name, directory, tmp_path):
    conformance(name, tmp_path if directory == "disk" else directory, 6)


@pytest.mark.slow
@pytest.mark.parametrize("directory", ["disk", "/dev/shm"])
def test_any_offset_and_length_for_long(name, directory, tmp_path):
    where = tmp_path if directory == "disk" else directory
    seconds = float(os.environ.get("AIO_SECONDS", "0"))
    done = conformance(name, where, 300 if seconds else 1500, seconds)
    print(f"{name} on {directory}: {done} examples")


def test_end_of_file_and_what_the_kernel_refuses(name, tmp_path):
    with opened(name) as backend, scratch(backend, 4 * BLOCK, tmp_path) as file:
        os.ftruncate(file.fd, BLOCK)
        with pytest.raises(OSError, match=f"file ends at {BLOCK}") as caught:
            file.read_into(aligned(2 * BLOCK), 0).wait()
        assert caught.value.errno == errno.EIO
        whole, file.fd = file.fd, os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
        with pytest.raises(OSError, match="write of 4096 bytes at offset 0 failed: Bad") as caught:
            file.write_from(aligned(BLOCK), 0).wait()
        assert caught.value.errno == errno.EBADF
        os.close(file.fd)
        file.fd = whole


def test_tensors_and_what_is_no_memory(name, tmp_path):
    with opened(name) as backend, scratch(backend, 16 * BLOCK, tmp_path) as file:
        data = torch.from_numpy(aligned(BLOCK)).view(torch.int32)
        data.copy_(torch.arange(BLOCK // 4))
        back = torch.from_numpy(aligned(BLOCK)).view(torch.float32)
        file.write_from(data, 0).wait()
        file.read_into(back, 0).wait()  # into the tensor itself
        assert torch.equal(back.view(torch.int32), data)
        half = torch.zeros(BLOCK // 2, dtype=torch.bfloat16)
        for wrong in (half, torch.zeros(BLOCK // 4, requires_grad=True), [back], None):
            with pytest.raises(TypeError, match=r"transfer of memory; found|bytes-like"):
                file.read_into(wrong, 0)
        with pytest.raises(TypeError, match="objects of Python"):
            file.read_into(np.empty(BLOCK // 8, object), 0)
        file.read_into(bytearray(0), 0).wait()


def test_a_file_size_limit_is_told(tmp_path):
    """A real failure of the system in the middle of a transfer."""
    code = (
        "import aio, mmap, resource, signal, sys\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "backends = [aio.open_backend(name, piece_bytes=4096) for name in sys.argv[2:]]\n"
        "files = [aio.create_scratch(sys.argv[1], 1 << 16, backend) for backend in backends]\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))\n"
        "for file in files:\n"
        "    try: file.write_from(mmap.mmap(-1, 1 << 16), 0).wait()\n"
        "    except OSError as error: print(error)\n"
    )
    told = interpreter(code, tmp_path, *USABLE)
    assert told.count(f"offset {1 << 14} failed") == len(USABLE)
    assert told.count("ulimit -f") == len(USABLE)


def test_nothing_holds_a_finished_buffer(name, tmp_path):
    with opened(name) as backend, scratch(backend, 1 << 20, tmp_path) as file:
        for ending in ("wait", "done"):
            memory = mmap.mmap(-1, 1 << 20)
            ticket = file.write_from(memory, 0)
            if ending == "wait":
                ticket.wait()
            else:
                while not ticket.done():
                    time.sleep(0.001)
            memory.close()  # BufferError if anything still pointed into it


@pytest.mark.parametrize("name", few(USABLE))
def test_a_buffer_that_is_dropped_stays_until_it_is_written(name, tmp_path):
    with (
        opened(name, depth=2, piece_bytes=BLOCK) as backend,
        scratch(backend, 1 << 20, tmp_path) as file,
    ):
        ticket = file.write_from(aligned(1 << 20, b"x" * (1 << 20)), 0)
        back = aligned(1 << 20)
        while not ticket.done():
            file.read_into(back[:BLOCK], 0).wait()
        file.read_into(back, 0).wait()
        assert bytes(back[-5:]) == b"xxxxx"


def test_what_a_caller_can_get_wrong(name, tmp_path):
    for limits in ({"piece_bytes": 5}, {"depth": 0}):
        with pytest.raises(ValueError, match=next(iter(limits))):
            aio.open_backend(name, **limits)
    with opened(name) as backend:
        file = scratch(backend, BLOCK, tmp_path)
        file.close()
        file.close()
        with pytest.raises(ValueError, match="closed"):
            file.read_into(aligned(BLOCK), 0)
        left = scratch(backend, BLOCK, tmp_path)
    with pytest.raises(ValueError, match="backend is closed"):
        left.read_into(aligned(BLOCK), 0)
    left.close()
    backend.close()


def test_dropped_objects_are_given_back(name, tmp_path):
    backend = aio.open_backend(name)
    file = aio.create_scratch(tmp_path, BLOCK, backend)
    file.write_from(aligned(BLOCK), 0).wait()
    seen = weakref.ref(backend)
    del backend, file
    end = time.monotonic() + 5
    while seen() is not None:  # While the backend's thread collects, a call of ours does nothing.
        assert time.monotonic() < end
        gc.collect()


def test_descriptors_may_be_given_again(name, tmp_path):
    """A file closed and another opened with its number: each has its own bytes."""
    with opened(name) as backend:
        for number in range(20):
            with scratch(backend, BLOCK, tmp_path) as file:
                back = aligned(BLOCK)
                file.read_into(back, 0).wait()
                assert not back.any()
                file.write_from(aligned(BLOCK, bytes([number + 1]) * BLOCK), 0).wait()


def test_many_threads(name, tmp_path):
    with (
        opened(name, depth=8, piece_bytes=BLOCK) as backend,
        scratch(backend, 64 * BLOCK, tmp_path) as file,
    ):

        def work(number):
            mine = slice(number * 8 * BLOCK, (number + 1) * 8 * BLOCK)
            for turn in range(20):
                data = aligned(8 * BLOCK, bytes([number * 20 + turn]) * 8 * BLOCK)
                file.write_from(data, mine.start).wait()
                back = aligned(8 * BLOCK)
                file.read_into(back, mine.start).wait()
                if not np.array_equal(back, data):
                    wrong.append(number)

        wrong = []
        threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
