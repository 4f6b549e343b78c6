"""Tickets of several parts, which end while they are looked at."""

import errno
import functools
import os
import signal
import threading

import pytest

import aio
from tests.backends import USABLE, opened
from tests.faults import GateIO, aligned, nothing_leaks, scratch, volume_of
from tests.simulated import SimulatedIO

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
            aio.wait_all(tickets)
            assert all(ticket.done() for ticket in tickets)


@pytest.mark.parametrize("presses", [1, 2])
def test_the_first_ctrl_c_waits_for_the_buffers_and_a_second_does_not(presses):
    io = GateIO()
    with aio.ThreadBackend(1, io) as pool, scratch(pool, 2 * BLOCK) as file:
        io.gate.clear()
        tickets = [file.write_from(aligned(BLOCK), n * BLOCK) for n in range(2)]
        press = functools.partial(signal.pthread_kill, threading.get_ident(), signal.SIGINT)
        timers = [threading.Timer(0.2 * (n + 1), press) for n in range(presses)]
        timers.append(threading.Timer(0.2 * (presses + 1), io.gate.set))
        for timer in timers:
            timer.start()
        with pytest.raises(KeyboardInterrupt):
            aio.wait_all(tickets)
        assert [ticket.done() for ticket in tickets] == [presses == 1] * 2
        for timer in timers:
            timer.join()


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
                ticket.wait()
        os.close(file.fd)
        file.fd = whole


def test_a_drive_that_times_out_is_no_wait_that_does():
    with aio.ThreadBackend(1, SimulatedIO(0, errors={9: errno.ETIMEDOUT})) as pool:
        with scratch(pool, BLOCK) as file, pytest.raises(OSError, match="timed out") as caught:
            for _ in range(9):
                file.write_from(aligned(BLOCK), 0).wait()
        assert (type(caught.value), caught.value.errno) == (OSError, errno.EIO)
