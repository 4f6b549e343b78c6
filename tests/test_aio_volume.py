"""Volumes: stripes against a byte oracle, a drive that fails or is full, what is told of drives."""

import errno
import itertools
import math
import os
import threading
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import aio
from tests.faults import GateIO, aligned, failure_of, in_child, volume_of
from tests.simulated import MemoryIO, SimulatedIO

pytestmark = pytest.mark.usefixtures("leaks_nothing")

BLOCK = aio.ALIGN_BYTES

UNITS = st.sampled_from([BLOCK, 2 * BLOCK, 5 * BLOCK])
WEIGHTS = st.lists(st.floats(1, 12), min_size=1, max_size=5)


# -- stripes ----------------------------------------------------------------------------------


@given(WEIGHTS, UNITS, st.integers(1, 400))
def test_every_byte_has_one_place_and_drives_have_no_gaps(weights, unit, blocks):
    found = aio.stripes(weights, unit)
    size = blocks * BLOCK
    end = Counter()
    at = 0
    for extent in found.extents(0, size):
        assert (extent.start, extent.offset) == (at, end[extent.drive])
        end[extent.drive] += extent.stop - extent.start
        at = extent.stop
    assert at == size
    assert [end[d] for d in range(len(weights))] == [
        found.bytes_on(d, size) for d in range(len(weights))
    ]


@given(WEIGHTS, UNITS, st.data())
def test_any_stretch_lies_where_its_blocks_lie(weights, unit, data):
    found = aio.stripes(weights, unit)
    start, count = data.draw(st.integers(0, 300)), data.draw(st.integers(1, 60))
    places = []
    for extent in found.extents(start * BLOCK, count * BLOCK):
        inside = range(extent.offset, extent.offset + extent.stop - extent.start, BLOCK)
        places += [(extent.drive, offset) for offset in inside]
    alone = [next(found.extents((start + n) * BLOCK, BLOCK)) for n in range(count)]
    assert places == [(extent.drive, extent.offset) for extent in alone]
    drives = [extent.drive for extent in found.extents(start * BLOCK, count * BLOCK)]
    assert all(one != two for one, two in itertools.pairwise(drives))


@given(WEIGHTS)
def test_shares_are_as_the_weights(weights):
    """All drives at work at once take at most a few hundredths longer than without units."""
    pattern = aio.stripes(weights).pattern
    assert set(pattern) == set(range(len(weights)))
    slowest = max(pattern.count(d) / weight for d, weight in enumerate(weights))
    assert slowest / len(pattern) * sum(weights) < 1.09


def test_patterns():
    assert aio.stripes([7.0]).pattern == (0,)
    assert aio.stripes([2, 2, 2]).pattern == (0, 1, 2)
    assert aio.stripes([3, 1]).pattern == (0, 0, 0, 1)
    assert aio.stripes([1, 3]).pattern == (1, 1, 0, 1)


@pytest.mark.parametrize("weights", [[], [1, 0], [1, -1], [1, math.nan], [math.inf]])
def test_weights_that_are_none(weights):
    with pytest.raises(ValueError, match="positive finite number for each"):
        aio.stripes(weights)


def test_what_a_caller_can_get_wrong():
    with pytest.raises(ValueError, match=r"drive 1 would hold less.*leave it out"):
        aio.stripes([7.0, 0.1])
    for unit in (0, -BLOCK, 1000):
        with pytest.raises(ValueError, match=f"unit_bytes={unit}: .*multiple of 4096"):
            aio.stripes([1], unit)
    ios = [MemoryIO(), MemoryIO()]
    with pytest.raises(ValueError, match="must be positive"):
        volume_of(ios, 0)
    with pytest.raises(ValueError, match="over 2 directories with 1 weights"):
        volume_of(ios, 9, weights=[1])
    with pytest.raises(ValueError, match="over 0 directories with no weights"):
        volume_of([], 9)
    with volume_of(ios, 9, unit_bytes=BLOCK) as volume:
        with pytest.raises(ValueError, match=r"outside of its 36864 bytes.*too small"):
            volume.read_into(aligned(2 * BLOCK), 8 * BLOCK)
        with pytest.raises(ValueError, match=r"and offset 100 not a multiple of 4096"):
            volume.read_into(aligned(2 * BLOCK)[1 : BLOCK + 1], 100)
        volume.write_from(b"", 0).wait()
        assert volume.write_from(b"", 3).done()
    for call in (volume.read_into, volume.write_from):
        with pytest.raises(ValueError, match="closed"):
            call(aligned(BLOCK), 0)


# -- bytes ------------------------------------------------------------------------------------


@given(WEIGHTS, UNITS, st.integers(1, 80), st.integers(0, 2**32))
def test_oracle(weights, unit, blocks, seed):
    """Any layout, many transfers at once, drives that are late, short and interrupted."""
    rng = np.random.default_rng(seed)
    ios = [SimulatedIO(seed + n, short_rate=0.2, retry_rate=0.01) for n in range(len(weights))]
    with volume_of(ios, blocks, threads=2, weights=weights, unit_bytes=unit) as volume:
        truth = np.zeros(volume.bytes, np.uint8)
        for _ in range(6):
            cuts = sorted({0, blocks, *rng.integers(0, blocks + 1, 4).tolist()})
            tickets, checks = [], []
            for start, stop in itertools.pairwise(n * BLOCK for n in cuts):
                buffer = aligned(stop - start)
                if rng.random() < 0.5:
                    buffer[:] = truth[start:stop] = rng.integers(0, 256, stop - start, np.uint8)
                    tickets.append(volume.write_from(buffer, start))
                else:
                    tickets.append(volume.read_into(buffer, start))
                    checks.append((buffer, truth[start:stop]))
            for ticket in tickets:
                ticket.wait()
            for found, expected in checks:
                np.testing.assert_array_equal(found, expected)
    assert all(io.inner.files == {} for io in ios)


def test_several_real_directories(tmp_path):
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    size = 64 * BLOCK
    with aio.create_volume(
        folders, size, lambda: aio.ThreadBackend(2), weights=[1, 2, 1], unit_bytes=BLOCK
    ) as volume:
        assert [file.bytes for file in volume.files] == [size // 4, size // 2, size // 4]
        assert (volume.notice is None) == volume.direct
        data = aligned(size, np.random.default_rng(1).bytes(size))
        back = aligned(size)
        volume.write_from(data, 0).wait()
        volume.read_into(back, 0).wait()
        np.testing.assert_array_equal(data, back)
        found = aligned(size // 2)
        volume.files[1].read_into(found, 0).wait()
        places = [next(volume.stripes.extents(at, BLOCK)).drive for at in range(0, size, BLOCK)]
        mine = data.reshape(-1, BLOCK)[np.array(places) == 1]
        np.testing.assert_array_equal(found, mine.reshape(-1))
        assert str(folders[0]) in volume.path_of(0, size)
        assert volume.path_of(0, BLOCK) == volume.files[places[0]].path
    volume.close()
    assert [os.listdir(folder) for folder in folders] == [[], [], []]


def test_one_directory_is_a_file(tmp_path):
    """A transfer of any length is one transfer, whose ticket is the file's own."""
    with aio.create_volume(tmp_path, 8 << 20, lambda: aio.ThreadBackend(1)) as volume:
        (file,) = volume.files
        assert (volume.path, volume.bytes, volume.direct) == (file.path, file.bytes, file.direct)
        ticket = volume.write_from(aligned(8 << 20), 0)
        assert not isinstance(ticket, aio.JointTicket)
        ticket.wait()
        assert list(volume.stripes.extents(4096, 5 << 20)) == [(0, 4096, 0, 5 << 20)]


def test_a_volume_smaller_than_its_units():
    """Drives whose turn does not come hold nothing, wherever they are named."""
    ios = [MemoryIO() for _ in range(3)]
    with volume_of(ios, 3, weights=[1, 3, 2], unit_bytes=2 * BLOCK) as volume:
        assert [file.bytes for file in volume.files] == [2 * BLOCK, BLOCK]
        assert [os.path.dirname(file.path) for file in volume.files] == ["/drive1", "/drive2"]
        data, back = aligned(3 * BLOCK, bytes(range(256)) * 48), aligned(3 * BLOCK)
        volume.write_from(data, 0).wait()
        volume.read_into(back, 0).wait()
        np.testing.assert_array_equal(data, back)


def test_a_dropped_volume_takes_its_files_and_threads_with_it(tmp_path):
    volume = aio.create_volume([tmp_path, tmp_path], 4 << 20, lambda: aio.ThreadBackend(2))
    volume.write_from(aligned(4 << 20), 0)
    assert len(volume.files) == 2
    del volume  # what is under way ends first; the fixture waits for it


# -- drives that fail -------------------------------------------------------------------------


def run_all(volume):
    size = volume.bytes
    data, back = aligned(size), aligned(size)
    for step in range(3):
        data[:] = step + 1
        volume.write_from(data, 0).wait()
        volume.read_into(back, 0).wait()
        np.testing.assert_array_equal(data, back)


@pytest.mark.parametrize("bad", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2))])
@pytest.mark.parametrize(
    "code", [errno.ETIMEDOUT, *(pytest.param(c, marks=pytest.mark.slow) for c in (5, 28))]
)
def test_a_drive_can_fail_at_every_call(bad, code):
    """The n-th call of one drive fails for every n: its name is told, the volume goes on."""
    for number in itertools.count(1):
        ios = [SimulatedIO(n, errors={number: code} if n == bad else {}) for n in range(3)]
        error = None
        try:
            with volume_of(ios, 24, unit_bytes=2 * BLOCK) as volume:
                error = failure_of(lambda volume=volume: run_all(volume))
                run_all(volume)
                calls = len(ios[bad].calls) // 2
        except OSError as refused:
            error = refused
        assert all(io.inner.files == {} for io in ios)
        if error is None:
            break
        assert error.errno == (errno.EIO if code == errno.ETIMEDOUT else code)
        assert "failed: " in error.strerror
        assert error.filename.startswith(f"/drive{bad}")
        if number > 4 and number > calls:
            break
    assert number > 15


def test_space_missing_on_one_leaves_nothing_on_the_others():
    for full in range(3):
        ios = [SimulatedIO(n, MemoryIO(BLOCK if n == full else None)) for n in range(3)]
        with pytest.raises(
            OSError, match=r"of 8,192 bytes failed.*\(4,096 bytes are free\)"
        ) as caught:
            volume_of(ios, 6, unit_bytes=BLOCK)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, f"/drive{full}")
        assert all(io.inner.files == {} for io in ios)
        assert all(io.calls == [] for io in ios)  # looked at before anything was made


def test_space_that_goes_while_it_is_taken():
    """Two directories on one drive that has room for either file, but not for both."""
    shared = MemoryIO(3 * BLOCK)
    with pytest.raises(OSError, match="bytes are free") as caught:
        volume_of([shared, shared], 4, unit_bytes=BLOCK)
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/drive1")
    assert shared.files == {}


def test_directories_that_cannot_be_used(tmp_path):
    for wrong in (["missing"], [".", "missing"], ["missing", "."]):
        with pytest.raises(FileNotFoundError, match="create or mount it first") as caught:
            aio.create_volume([tmp_path / name for name in wrong], 4 << 20, aio.ThreadBackend)
        assert caught.value.filename == str(tmp_path / "missing")
    assert os.listdir(tmp_path) == []


def test_backends_that_do_not_start():
    io = MemoryIO()
    made = []

    def start():
        if made:
            raise RuntimeError("no more threads")
        made.append(aio.ThreadBackend(1, io))
        return made[0]

    with pytest.raises(RuntimeError, match="no more threads"):
        aio.create_volume(["/a", "/b"], 4 << 20, start)
    assert io.files == {}
    with pytest.raises(ValueError, match="closed"):
        aio.create_scratch("/a", BLOCK, made[0]).read_into(aligned(BLOCK), 0)
    assert in_child(lambda: None) == 0


# -- tickets ----------------------------------------------------------------------------------


def test_a_ticket_is_done_when_its_last_part_is():
    drive = GateIO()
    with volume_of([MemoryIO(), drive], 8, unit_bytes=BLOCK) as volume:
        drive.gate.clear()
        ticket = volume.write_from(aligned(8 * BLOCK), 0)
        alone = volume.write_from(aligned(BLOCK), 0)
        alone.wait()
        assert not ticket.done()

        def child():
            for call in (ticket.wait, lambda: run_all(volume)):
                with pytest.raises(RuntimeError, match="fork"):
                    call()
            volume.close()

        assert in_child(child) == 0
        threading.Timer(0.05, drive.gate.set).start()
        ticket.wait()


def test_closing_waits_for_what_is_under_way():
    drive = GateIO()
    volume = volume_of([MemoryIO(), drive], 8, unit_bytes=BLOCK)
    drive.gate.clear()
    ticket = volume.write_from(aligned(8 * BLOCK), 0)
    threading.Timer(0.05, drive.gate.set).start()
    volume.close()
    assert ticket.done()
    ticket.wait()


# -- what is told of a drive --------------------------------------------------------------------


class Drive(MemoryIO):
    """A drive that tells what it asks of O_DIRECT."""

    def __init__(self, memory, offset, kind="ext4"):
        super().__init__(kind=kind)
        self.asks = memory, offset

    def direct_alignment(self, fd):
        return self.asks


def test_alignment_is_what_the_kernel_tells():
    with volume_of([Drive(4, 512), Drive(16, 1024)], 8, unit_bytes=BLOCK) as volume:
        assert (volume.memory_align_bytes, volume.offset_align_bytes) == (16, 1024)
        assert volume.files[0].offset_align_bytes == 512
        with pytest.raises(ValueError, match=r"offset 512 .*of 16 \(addresses\) or 1024 \(the"):
            volume.write_from(aligned(BLOCK), 512)
    with volume_of([Drive(0, 0), MemoryIO()], 8, unit_bytes=BLOCK) as volume:
        assert not volume.direct
        assert volume.files[1].direct
        assert "/drive0 is on ext4, which has no O_DIRECT for this file: tr" in volume.notice
        assert volume.offset_align_bytes == BLOCK
    with volume_of([Drive(512, 16384), Drive(0, 0)], 8, unit_bytes=BLOCK) as volume:
        assert "multiples of 16384 bytes only" in volume.notice
        assert volume.notice.count("buffered") == 2
        volume.write_from(bytearray(100), 4000).wait()


def test_short_transfers_go_on_at_the_drives_own_blocks():
    io = SimulatedIO(3, Drive(1, 512), short_rate=0.7)
    io.inner.set_direct = lambda fd, direct: None  # its own check asks for blocks of 4096
    with volume_of([io], 8) as volume:
        data, back = aligned(5 * 512, np.random.default_rng(2).bytes(5 * 512)), aligned(5 * 512)
        volume.write_from(data, 7 * 512).wait()
        volume.read_into(back, 7 * 512).wait()
        np.testing.assert_array_equal(data, back)


def test_the_kernel_tells_the_alignment_here(tmp_path):
    with aio.create_volume(tmp_path, 8 * BLOCK, lambda: aio.ThreadBackend(1)) as volume:
        found = volume.files[0]._backend.io.direct_alignment(volume.files[0].fd)
        if not volume.direct or found is None:
            pytest.skip("no O_DIRECT here, or a kernel that does not tell")
        assert (volume.memory_align_bytes, volume.offset_align_bytes) == found
        step = volume.offset_align_bytes
        data, back = aligned(step, np.random.default_rng(2).bytes(step)), aligned(step)
        volume.write_from(data, 3 * step).wait()
        volume.read_into(back, 3 * step).wait()
        np.testing.assert_array_equal(data, back)
        assert aio.IO().direct_alignment(-1) is None


@pytest.mark.parametrize("kind", ["btrfs", "zfs", "bcachefs", "nilfs2"])
def test_copy_on_write_is_switched_off_or_told(kind):
    io = SimulatedIO(0, MemoryIO(kind=kind))
    with volume_of([io, MemoryIO(kind="xfs")], 8, unit_bytes=BLOCK) as volume:
        if kind == "btrfs":
            assert volume.notice is None
            assert io.calls.index("write_in_place") < io.calls.index("fallocate")
        else:
            assert f"/drive0 is on {kind}, which copies on write: " in volume.notice
            assert volume.notice.endswith("give a directory on ext4 or xfs.")


def test_marking_a_file_on_this_file_system(tmp_path):
    """ext4 and xfs know no such mark and say so; what the ioctl was asked is not silently lost."""
    io = aio.IO()
    fd = io.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        if io.file_system(fd) not in ("ext4", "xfs"):
            pytest.skip("neither ext4 nor xfs")
        with pytest.raises(OSError, match="not supported") as caught:
            io.write_in_place(fd)
        assert caught.value.errno == errno.EOPNOTSUPP
    finally:
        io.close(fd)
