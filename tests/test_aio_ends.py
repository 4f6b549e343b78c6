"""How every backend ends: forks, exits, Ctrl-C, and opened and closed again and again."""

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import aio
from aio.part import Part
from aio.request import Request
from tests.backends import ENGINE, USABLE, few, interpreter, interpreters, opened, refusing
from tests.faults import aligned, descriptors, in_child, nothing_leaks, scratch

BLOCK = aio.ALIGN_BYTES


@pytest.fixture(autouse=True)
def _nothing_leaks():
    with nothing_leaks():
        yield


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
            refused = [lambda: file.read_into(memory, 0), lambda: scratch(backend), file.sync]
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


@pytest.mark.parametrize("name", few(ENGINE))
def test_ctrl_c_while_waiting(name, tmp_path):
    """A wait in the main thread ends by Ctrl-C, whichever thread the signal goes to."""
    with refusing(name, 12, tmp_path) as (_, _, tickets):
        for wait in (tickets[-1].wait, lambda: aio.wait_any(tickets[-1:])):
            timer = threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            with pytest.raises(KeyboardInterrupt):
                wait()
            timer.join()
        assert not tickets[-1].done()  # Which it is after 0.8 s.


@pytest.mark.parametrize("name", few(ENGINE))
def test_ctrl_c_while_closing(name, tmp_path):
    """It ends the wait and not the work: nothing new is taken, and closing again waits again."""
    with refusing(name, 8, tmp_path) as (backend, file, tickets):
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


@pytest.mark.parametrize("name", few(ENGINE))
def test_ctrl_c_at_exit(name, tmp_path):
    """Who does not want to wait for what is queued need not."""
    code = (
        "import aio, errno, mmap, signal, sys\n"
        "from aio.native import Faults, Native\n"
        "faults = Faults(errors=dict.fromkeys(range(1, 200000), errno.EAGAIN))\n"
        "backend = Native(sys.argv[2], faults=faults, depth=1, piece_bytes=4096)\n"
        "file = aio.create_scratch(sys.argv[1], 4096, backend)\n"
        "tickets = [file.write_from(mmap.mmap(-1, 4096), 0) for n in range(2000)]\n"
        "signal.signal(signal.SIGALRM, signal.default_int_handler)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.2)\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path), name]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)  # all would take 130 s
    assert "KeyboardInterrupt" in done.stderr
    assert os.listdir(tmp_path) == []


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
def test_a_collection_in_the_midst_of_a_backend_waits_for_no_lock(name):
    """It may run in any thread at any time, and find a backend that nobody has any more."""
    backend = aio.open_backend(name)
    requests, threads = backend._requests, backend._threads
    backend = [backend]

    def collect():
        with requests.lock:
            backend.clear()

    collector = threading.Thread(target=collect, daemon=True)
    collector.start()
    for thread in (collector, *threads):
        thread.join(20)
        assert not thread.is_alive()


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


GIVING_UP = ("abandon", "finish", "taken_out", "_closed_meanwhile")
ABOVE = ("close", "drain", "wait_until", "over")
"""Functions that get there."""


STEPS = [("python", 1), ("libaio", 5), pytest.param("libaio", 1, marks=pytest.mark.slow)]
"""To give a context of Linux AIO back takes the kernel 40 ms."""


@pytest.mark.parametrize("closes", [False, True])
@pytest.mark.parametrize(("name", "step"), STEPS)
def test_what_nobody_serves_any_more_ends_wherever_a_handler_comes(name, step, closes):
    """A handler that raises, or closes the file itself, before the n-th line of the giving up."""
    if name not in USABLE:
        pytest.skip(f"no {name} here")

    class Interrupted(Exception):
        pass

    left = 0

    def trace(frame, event, _):
        nonlocal left
        code = frame.f_code
        if "/aio/" not in code.co_filename or code.co_name not in (*GIVING_UP, *ABOVE):
            return None
        if event == "line" and code.co_name in GIVING_UP:
            left -= 1
            if left == 0:
                if not closes:
                    raise Interrupted
                file.close()
        return trace

    turn = 0
    while left <= 0:
        backend = aio.open_backend(name)
        file = scratch(backend, BLOCK, "/dev/shm")
        backend.close()
        late = Request(file, True, [Part(memoryview(aligned(BLOCK)), 0)])
        backend._requests.queue.append(late)
        turn += step
        left = turn
        sys.settrace(trace)
        try:
            file.close()
        except Interrupted:
            pass
        finally:
            sys.settrace(None)
        file.close()
        assert late.ticket.done(), turn
        assert not backend._requests.queue
        with pytest.raises(OSError, match=r"the (file|backend) is closed"):
            late.ticket.wait(1)
    assert turn > 10
