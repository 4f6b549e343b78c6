"""Tickets of several parts, which end while they are looked at."""

import contextlib
import errno
import functools
import gc
import os
import signal
import sys
import threading
import time

import pytest

import aio
from aio.ticket import LockSignal
from tests.backends import ENGINE, USABLE, engine, opened
from tests.faults import GateIO, aligned, nothing_leaks, scratch, volume_of

BLOCK = aio.ALIGN_BYTES
KINDS = [LockSignal]

if ENGINE:
    from aio._native import Signal
    from aio.native import Faults

    KINDS.append(Signal)


@pytest.mark.parametrize("name", USABLE)
def test_no_end_is_overslept(name):
    """Waiting for short tickets of several parts, again and again."""
    with (
        nothing_leaks(),
        aio.create_volume(
            ["/dev/shm"] * 2, 4 * BLOCK, lambda: aio.open_backend(name), unit_bytes=BLOCK
        ) as volume,
    ):
        memory = aligned(2 * BLOCK)
        for _ in range(300):
            tickets = [volume.write_from(memory, 0), volume.read_into(aligned(BLOCK), 3 * BLOCK)]
            assert isinstance(tickets[0], aio.JointTicket)
            assert aio.wait_any(tickets, timeout=20).done()
            aio.wait_all(tickets)
            tickets[0].wait(0)


@contextlib.contextmanager
def in_each_wait(*calls):
    """By a thread of its own: the first call as soon as this one waits for a ticket, the next when
    it waits anew, and so on."""
    main, ended = threading.get_ident(), threading.Event()

    def run():
        seen = None  # Held, so that no other frame is taken for it.
        for call in calls:
            while (frame := sys._current_frames()[main]) is seen or frame.f_code is not WAIT:
                if ended.wait(0.001):
                    return
            seen = frame
            call()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


WAIT = LockSignal.wait.__code__
"""In which Python code a thread is that waits."""


@pytest.mark.parametrize("presses", [1, 2])
def test_the_first_ctrl_c_waits_for_the_buffers_and_a_second_does_not(presses):
    io = GateIO()
    with aio.Pool(1, io) as pool, scratch(pool, 2 * BLOCK) as file:
        io.gate.clear()
        tickets = [file.write_from(aligned(BLOCK), n * BLOCK) for n in range(2)]
        press = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        try:
            with in_each_wait(*[press] * presses, io.gate.set), pytest.raises(KeyboardInterrupt):
                aio.wait_all(tickets)
            assert [ticket.done() for ticket in tickets] == [presses == 1] * 2
        finally:
            io.gate.set()


def test_whoever_closes_a_volume_finds_it_closed():
    ios = [GateIO(), GateIO()]
    volume = volume_of(ios, 4, unit_bytes=BLOCK)
    for io in ios:
        io.gate.clear()
    ticket = volume.write_from(aligned(4 * BLOCK), 0)
    closers = [threading.Thread(target=volume.close) for _ in range(2)]
    for closer in closers:
        closer.start()
    closers[1].join(0.1)
    assert all(closer.is_alive() for closer in closers)
    for io in ios:
        io.gate.set()
    for closer in closers:
        closer.join()
    assert ticket.done()
    assert not any(io.files for io in ios)


def test_a_descriptor_stays_as_long_as_it_is_synced():
    """Its number may be another file's as soon as it is closed."""
    begun = threading.Event()

    class Syncing(GateIO):
        def fsync(self, fd):
            begun.set()
            super().fsync(fd)

    io = Syncing()
    with aio.Pool(1, io) as pool, scratch(pool, BLOCK) as file:
        io.gate.clear()
        sync, close = threading.Thread(target=file.sync), threading.Thread(target=file.close)
        sync.start()
        assert begun.wait(20)
        close.start()
        close.join(0.05)
        assert file.fd in io.files
        io.gate.set()
        sync.join()
        close.join()
    assert file.fd not in io.files


class Late(aio.Ticket):
    """Ends after the first look at it."""

    def __init__(self, failure=None):
        super().__init__("write of nothing")
        self.looks, self.failure = 0, failure

    def done(self):
        self.looks += 1
        return self.looks > 1

    def watch(self, signal):
        signal.set()

    def unwatch(self, signal):
        pass

    def _wait(self, timeout):
        return False

    def _failed(self):
        return self.failure


def test_an_end_between_two_looks():
    ticket = aio.JointTicket("joint", [Late()])
    assert aio.wait_any([ticket], timeout=5) is ticket
    ticket = aio.JointTicket("joint", [Late(), Late()])
    with pytest.raises(TimeoutError, match=r"joint: not finished within 0.5 s"):
        ticket.wait(0.5)
    ticket.wait(0)  # being late is no failure


def test_a_drive_that_times_out_is_no_wait_that_does():
    with aio.Pool(1, aio.SimulatedIO(0, errors={9: errno.ETIMEDOUT})) as pool:
        with scratch(pool, BLOCK) as file, pytest.raises(OSError, match="timed out") as caught:
            for _ in range(9):
                file.write_from(aligned(BLOCK), 0).wait()
        assert (type(caught.value), caught.value.errno) == (OSError, errno.EIO)


@pytest.mark.parametrize("name", [name for name in ("libaio", "python") if name in USABLE])
def test_a_transfer_whose_start_was_interrupted(name, tmp_path, monkeypatch):
    """It is under way, or not at all, and closing ends."""

    def interrupted():
        raise KeyboardInterrupt

    with opened(name) as backend:
        file = scratch(backend, BLOCK, tmp_path)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(backend._requests, "wake", interrupted)
            file.write_from(aligned(BLOCK), 0)
        close = threading.Thread(target=file.close, daemon=True)
        close.start()
        close.join(20)
        assert not close.is_alive()
        assert (file.pending, file.bytes_written) == (0, BLOCK)


@pytest.mark.parametrize("name", [name for name in ("libaio", "python") if name in USABLE])
def test_a_signal_in_the_midst_of_a_call_leaves_no_lock(name, tmp_path):
    """A handler that raises, at any moment of 400 transfers, and all goes on."""

    class Interrupted(Exception):
        pass

    def raise_it(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    interrupts = 0
    gc.disable()  # Where hypothesis has a callback, which would be interrupted, too.
    try:
        with opened(name) as backend, scratch(backend, BLOCK, tmp_path) as file:
            memory = aligned(BLOCK)
            for turn in range(400):
                try:
                    signal.setitimer(signal.ITIMER_REAL, 2e-5 + turn % 100 * 2e-6)
                    file.write_from(memory, 0).wait(20)
                    backend.counters()
                    signal.setitimer(signal.ITIMER_REAL, 0)
                except Interrupted:
                    interrupts += 1
                    signal.setitimer(signal.ITIMER_REAL, 0)
            file.read_into(memory, 0).wait(20)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert interrupts > 10


@pytest.mark.parametrize("name", USABLE)
def test_what_is_refused_at_once_makes_room_for_the_next(name, tmp_path):
    """One at a time and many of them: nobody is left in the queue."""
    with (
        opened(name, depth=1, piece_bytes=BLOCK) as backend,
        scratch(backend, 64 * BLOCK, tmp_path) as file,
    ):
        whole, file.fd = file.fd, os.open(f"/proc/self/fd/{file.fd}", os.O_RDONLY)
        tickets = [file.write_from(aligned(BLOCK), n * BLOCK) for n in range(64)]
        for ticket in tickets:
            with pytest.raises(OSError, match="Bad file descriptor"):
                ticket.wait(20)
        os.close(file.fd)
        file.fd = whole


@pytest.mark.parametrize("timeout", [0, 0.01, 1e-9])
def test_waiting_ends(timeout):
    for kind in KINDS:
        found = kind()
        assert not found.wait(timeout)
        found.set()
        found.set()
        assert found.wait(timeout)


def test_timeouts_that_are_no_numbers():
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"NaN|no number"):
            kind().wait(float("nan"))
        found = kind()
        found.set()
        assert found.wait(float("inf"))


@pytest.mark.skipif(not ENGINE, reason="no native core here")
def test_buffers_are_free_though_another_thread_lets_one_go():
    """Which takes long, and lets others run."""
    begun, go = threading.Event(), threading.Event()

    class Slow(bytearray):
        def __del__(self):
            begun.set()
            go.wait(20)

    late = Faults(errors=dict.fromkeys(range(1, 20), errno.EAGAIN))  # so that both are asked for
    with (
        engine("threads", late, depth=1) as backend,
        scratch(backend, 2 * BLOCK, "/dev/shm") as file,
    ):
        memory = bytearray(BLOCK)
        tickets = [file.write_from(memory, 0), file.write_from(Slow(BLOCK), BLOCK)]
        while backend.counters().bytes_written < 2 * BLOCK:
            time.sleep(0.001)
        time.sleep(0.05)  # Else both may not be on the list yet, and there is nothing to see.
        other = threading.Thread(target=tickets[1].wait)
        other.start()
        assert begun.wait(20)
        tickets[0].wait()
        memory.append(1)  # BufferError where it is still lent
        go.set()
        other.join()
