"""How every backend ends: forks, exits, Ctrl-C, and opened and closed again and again."""

import gc
import mmap
import os
import signal
import threading
import time
from pathlib import Path

import pytest

import aio
from tests.backends import ENGINE, USABLE, busy, few, interpreter, interpreters, opened
from tests.faults import aligned, descriptors, in_child, scratch

pytestmark = pytest.mark.usefixtures("leaks_nothing")

BLOCK = aio.ALIGN_BYTES


@pytest.fixture(params=USABLE)
def name(request):
    return request.param


def test_forked_child_touches_nothing(name, tmp_path):
    with (
        opened(name, depth=1, piece_bytes=BLOCK) as backend,
        scratch(backend, 1 << 20, tmp_path) as file,
    ):
        memory = aligned(1 << 20, b"x" * (1 << 20))
        finished = file.write_from(memory, 0)
        finished.wait()
        ticket = file.read_into(memory, 0)

        def child():
            refused = [lambda: file.read_into(memory, 0), lambda: scratch(backend)]
            if not ticket.done():
                refused.append(ticket.wait)
            for call in refused:
                with pytest.raises(RuntimeError, match="fork"):
                    call()
            assert finished.done()
            file.close()
            backend.close()
            os.fstat(file.fd)  # still open
            with opened(name) as own, scratch(own, BLOCK, tmp_path) as other:
                other.write_from(aligned(BLOCK), 0).wait()

        assert in_child(child) == 0
        ticket.wait()
        assert bytes(memory) == b"x" * (1 << 20)


def test_child_that_exits_as_usual(tmp_path):
    code = (
        "import aio, mmap, os, sys, warnings\n"
        "warnings.simplefilter('ignore', DeprecationWarning)\n"
        "backend = aio.open_backend(sys.argv[2])\n"
        "file = aio.create_scratch(sys.argv[1], 8 << 20, backend)\n"
        "ticket = file.write_from(mmap.mmap(-1, 8 << 20), 0)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    del backend, file, ticket\n"
        "    sys.exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7\n"
        "ticket.wait()\n"
    )
    assert not any(interpreters([(code, tmp_path, name) for name in USABLE]))


@pytest.mark.parametrize("name", few(USABLE))
def test_exit_without_closing(name, tmp_path):
    """An interpreter that ends in the middle of its work ends well and says nothing."""
    code = (
        "import sys, aio, mmap\n"
        "backend = aio.open_backend(sys.argv[2])\n"
        "file = aio.create_scratch(sys.argv[1], 8 << 20, backend)\n"
        "tickets = [file.write_from(mmap.mmap(-1, 1 << 20), n << 20) for n in range(8)]\n"
    )
    for forget in ("", "del backend, file, tickets\n"):
        assert interpreter(code + forget, tmp_path, name) == ""
    assert os.listdir(tmp_path) == []


LASTING = [name for name in ENGINE if name != "linux_aio"]
"""In memory Linux AIO is done before a signal can come."""


@pytest.mark.parametrize("name", few(LASTING))
def test_ctrl_c_while_waiting(name):
    """A wait in the main thread ends by Ctrl-C, whichever thread the signal goes to."""
    with busy(name) as (_, _, tickets):
        timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            tickets[-1].wait()
        timer.join()
        assert not tickets[-1].done()


@pytest.mark.parametrize("name", few(LASTING))
def test_ctrl_c_while_closing(name):
    """It ends the wait and not the work: nothing new is taken, and closing again waits again."""
    with busy(name) as (backend, file, tickets):
        for close in (file.close, backend.close):
            timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                close()
            assert not tickets[-1].done()
            timer.join()
        with pytest.raises(ValueError, match="closed"):
            file.write_from(aligned(BLOCK), 0)
        backend.close()
        assert all(ticket.done() for ticket in tickets)


def open_and_close(name, directory, times):
    for _ in range(times):
        with opened(name, depth=4) as backend, scratch(backend, BLOCK, directory) as file:
            file.write_from(aligned(BLOCK), 0).wait()


def check_no_leak(name, directory, times):
    def held():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        maps = Path("/proc/self/maps").read_text().count("\n")
        return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd")), maps, pages

    def grew():
        before = held()
        open_and_close(name, directory, times)
        end = time.monotonic() + 5
        while held()[0] > before[0] and time.monotonic() < end:
            time.sleep(0.01)
        threads, files, maps, pages = (now - then for then, now in zip(before, held()))
        return threads > 0, files > 0, maps > 20, pages * mmap.PAGESIZE >= 2 << 20

    open_and_close(name, directory, 20)
    # What leaks does so each time; what earlier tests left behind here changes once at most.
    assert any(not any(grew()) for _ in range(3))


@pytest.mark.parametrize("name", few(USABLE))
def test_open_and_close_leak_nothing(name):
    check_no_leak(name, "/dev/shm", 30)


@pytest.mark.slow
def test_ten_thousand_opens_leak_nothing(name):
    # To give a context of Linux AIO back takes the kernel 40 ms.
    check_no_leak(name, "/dev/shm", 2_000 if "aio" in name else 10_000)


@pytest.mark.parametrize("name", [name for name in USABLE if name not in ENGINE])
def test_without_threads_there_is_no_backend(name, monkeypatch):
    def start(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(ValueError, match="no thread for file I/O: can't start"):
        aio.open_backend(name)
    before, caught = descriptors(), None
    try:
        raise KeyError("the caller's own")
    except KeyError:
        try:
            aio.open_backend(name)
        except Exception as error:
            caught = error  # and with it all frames
    assert "no thread for file I/O: can't start" in str(caught)
    assert descriptors() == before
