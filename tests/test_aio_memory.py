"""Backends of Python without memory, and with what callers who were interrupted have left."""

import errno
import sys
import threading

import pytest

import aio
from aio.part import Part
from aio.request import Request
from tests.backends import USABLE, interpreters, opened
from tests.faults import aligned, nothing_leaks, scratch

BLOCK = aio.ALIGN_BYTES
QUEUED = [name for name in USABLE if name in ("libaio", "python")]

# The n-th time from the submission on that anybody asks Python for memory there is none, for n from
# `first` on. What is asked afterwards must end, too.
PROGRAM = """
import _testcapi, aio, errno, faulthandler, mmap, sys
name, first, step = sys.argv[1], *map(int, sys.argv[2:])
faulthandler.dump_traceback_later(90, exit=True)
memory, failed, lasting = mmap.mmap(-1, 8 * 4096), 0, 0
for turn in range(first, 600, step):
    with aio.open_backend(name, depth=2, piece_bytes=4096) as backend:
        with aio.create_scratch("/dev/shm", 8 * 4096, backend) as file:
            file.write_from(memory, 0).wait(20)
            ticket = None
            _testcapi.set_nomemory(turn, turn + 1)
            try:
                ticket = file.write_from(memory, 0)
                ticket.wait(20)
            except (MemoryError, OSError, RuntimeError) as error:
                _testcapi.remove_mem_hooks()
                told = str(error)
                failed += 1
                assert isinstance(error, MemoryError) or "memory" in told or "lock" in told, told
                assert getattr(error, "errno", errno.ENOMEM) == errno.ENOMEM, told
            _testcapi.remove_mem_hooks()
            for again in (ticket, None):
                try:
                    (again or file.write_from(memory, 0)).wait(20)
                except OSError as error:
                    assert error.errno == errno.ENOMEM and "memory" in str(error), error
                    lasting += again is None
print(failed, lasting)
"""


@pytest.fixture(autouse=True)
def _nothing_leaks():
    with nothing_leaks():
        yield


def test_no_memory_at_any_place_ends_in_that_error():
    """libaio's own code may lose what the kernel has said: then all fails, and says so.

    All beside one another: to give a context of Linux AIO back takes the kernel 40 ms.
    """
    pytest.importorskip("_testcapi")
    runs = [(name, 5, 3) for name in QUEUED if name != "libaio"]
    runs += [("libaio", first, 22) for first in (5, 16) if "libaio" in QUEUED]
    for printed, (name, *_) in zip(interpreters([(PROGRAM, *run) for run in runs]), runs):
        failed, lasting = map(int, printed.split())
        assert failed > 10, name
        assert lasting == 0 or name == "libaio"


@pytest.mark.parametrize("name", QUEUED)
def test_what_is_queued_as_the_last_thread_leaves_holds_up_nobody(name, tmp_path):
    """By who was interrupted before he could look whether it was too late."""
    with opened(name) as backend:
        file = scratch(backend, BLOCK, tmp_path)
        backend.close()
        late = Request(file, True, [Part(memoryview(aligned(BLOCK)), 0)])
        backend._requests.queue.append(late)
        closing = threading.Thread(target=file.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        with pytest.raises(OSError, match="closed meanwhile") as caught:
            late.ticket.wait(1)
        assert caught.value.errno == errno.EBADF


OPENED = """
import aio, gc, os, sys
name, seen, turn, step = sys.argv[1], 0, *map(int, sys.argv[2:])


class Interrupted(BaseException):
    pass


def trace(frame, event, argument):
    global seen
    if "/aio/" not in frame.f_code.co_filename:
        return None
    if event == "line":
        seen += 1
        if seen == turn:
            raise Interrupted
    return trace


aio.open_backend(name).close()
before, raised = len(os.listdir("/proc/self/fd")), 0
while True:
    seen, turn = 0, turn + step
    sys.settrace(trace)
    try:
        backend = aio.open_backend(name)
        sys.settrace(None)
        backend.close()
        break
    except Interrupted:
        sys.settrace(None)
        raised += 1
    finally:
        backend = None
gc.collect()
print(raised, len(os.listdir("/proc/self/fd")) - before)
"""


@pytest.mark.skipif(sys.version_info < (3, 11), reason="its tracer enters __del__'s lines twice")
def test_opening_that_is_interrupted_leaves_no_descriptor():
    """As by Ctrl-C, before any line of it."""
    runs = [(name, first, 2) for name in QUEUED for first in (-1, 0)]
    for printed, (name, *_) in zip(interpreters([(OPENED, *run) for run in runs]), runs):
        raised, left = map(int, printed.split())
        assert raised > 20, name
        assert left == 0, name


def test_what_an_injected_system_has_wrong_is_told_and_ends_no_thread(monkeypatch):
    io = aio.MemoryIO()
    with aio.Pool(1, io) as pool, scratch(pool, BLOCK) as file:
        with monkeypatch.context() as patched:
            patched.setattr(io, "free_bytes", lambda target: 1 // 0)
            patched.setattr(io, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
            with pytest.raises(OSError, match="ZeroDivisionError") as caught:
                file.write_from(aligned(BLOCK), 0).wait(20)
            assert caught.value.errno == errno.EIO
        file.write_from(aligned(BLOCK), 0).wait(20)
