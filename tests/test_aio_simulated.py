"""Simulated drives take the time of their shape."""

import mmap

import pytest

import aio
from tests.drives import Direction, Drive, DriveIO

BLOCK = aio.ALIGN_BYTES
FLAT = Direction(bytes_per_s=1e9)


def test_a_drive_takes_what_its_shape_says():
    slept = []
    read = Direction(bytes_per_s=1e6, latency_s=0.5)
    drive = Drive(read=read, write=Direction(bytes_per_s=1e3, latency_s=1e-9))
    io = DriveIO(drive, sleep=slept.append)
    with (
        aio.ThreadBackend(1, io) as pool,
        aio.create_scratch("/simulated", 4 * BLOCK, pool) as file,
    ):
        buffer = mmap.mmap(-1, BLOCK)
        buffer[:5] = b"bytes"
        slept.clear()
        file.write_from(buffer, 0).wait()
        back = mmap.mmap(-1, BLOCK)
        file.read_into(back, 0).wait()
    assert back[:5] == b"bytes"
    assert slept == pytest.approx([BLOCK / 1e3, 0.5], rel=0.02)


def test_directions_share_a_drive_that_is_not_duplex():
    shared = Drive(read=FLAT, write=FLAT)
    duplex = Drive(read=FLAT, write=FLAT, duplex=1.0)
    one = 1 << 20
    assert shared.seconds(False, one, 4, 4) == pytest.approx(2 * shared.seconds(False, one, 4, 0))
    assert duplex.seconds(True, one, 4, 4) == pytest.approx(duplex.seconds(True, one, 4, 0))
