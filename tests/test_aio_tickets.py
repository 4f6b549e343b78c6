"""Tickets of several parts, which end while they are looked at."""

import errno
import signal

import pytest

import aio
from aio.ticket import Latch
from tests.backends import ENGINE, USABLE, opened
from tests.faults import aligned, nothing_leaks, scratch

BLOCK = aio.ALIGN_BYTES
KINDS = [Latch]

if ENGINE:
    from aio._native import Signal

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


class Late(aio.Ticket):
    """Ends after the first look at it."""

    def __init__(self, failure=None):
        super().__init__("write of nothing")
        self.looks, self.failure = 0, failure

    def done(self):
        self.looks += 1
        return self.looks > 1

    def watch(self, waiter):
        waiter.set()

    def unwatch(self, waiter):
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
def test_a_signal_in_the_midst_of_a_call_leaves_no_lock(name, tmp_path):
    """A handler that raises, at any moment of 400 transfers, and all goes on."""

    class Interrupted(Exception):
        pass

    def raise_it(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, raise_it)
    interrupts = 0
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
    assert interrupts > 10


@pytest.mark.parametrize("timeout", [0, 0.01, 1e-9])
def test_waiting_ends(timeout):
    for kind in KINDS:
        waiter = kind()
        assert not waiter.wait(timeout)
        waiter.set()
        waiter.set()
        assert waiter.wait(timeout)


def test_timeouts_that_are_no_numbers():
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"NaN|no number"):
            kind().wait(float("nan"))
        waiter = kind()
        waiter.set()
        assert waiter.wait(float("inf"))
