"""Tickets of several parts, which end while they are looked at."""

import errno

import pytest

import aio
from tests.backends import USABLE
from tests.faults import aligned, nothing_leaks

BLOCK = aio.ALIGN_BYTES


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
    failure = OSError(errno.ETIMEDOUT, "the drive gave up", "/drive0")
    ticket = aio.JointTicket("joint", [Late(), Late(failure)])
    with pytest.raises(TimeoutError, match="not finished"):
        ticket.wait(0)
    with pytest.raises(TimeoutError, match="gave up") as caught:
        ticket.wait(0)
    assert (caught.value.errno, caught.value.filename) == (errno.ETIMEDOUT, "/drive0")
