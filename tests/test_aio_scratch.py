"""Scratch files: reserved, private, gone however the process ends; clear where none can be had."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

import aio
from aio.load import Load
from aio.sweep import Setting, Spent
from tests.faults import nothing_leaks, scratch

BLOCK = aio.ALIGN_BYTES


@pytest.fixture(autouse=True)
def _nothing_leaks():
    with nothing_leaks():
        yield


def test_tmpfs_is_buffered_with_a_notice():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    with aio.Pool(1) as pool, scratch(pool, 3 * BLOCK, "/dev/shm") as file:
        assert not file.direct
        assert "tmpfs" in file.notice
        assert file.notice.endswith(".")
        data = bytearray(b"not aligned at all")
        file.write_from(data, 5).wait()
        back = bytearray(len(data))
        file.read_into(back, 5).wait()
        assert back == data


def test_mode_and_size(tmp_path):
    with aio.Pool(1) as pool, scratch(pool, 5000, tmp_path) as file:
        found = os.fstat(file.fd)
        assert found.st_mode & 0o777 == 0o600
        assert found.st_nlink == 0
        assert file.bytes == found.st_size == 2 * BLOCK
        assert found.st_blocks * 512 >= 2 * BLOCK  # reserved, not a hole
        assert not os.get_inheritable(file.fd)


def test_without_tmpfile_or_fallocate_or_direct(tmp_path):
    """Older file systems: a name unlinked at once, zeros written, buffered with a notice."""

    class Poor(aio.SystemIO):
        def open(self, path, flags, mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            assert flags & os.O_EXCL
            return super().open(path, flags, mode)

        def fallocate(self, fd, offset, count):
            raise OSError(errno.EOPNOTSUPP, "no")

        def set_direct(self, fd, direct):
            raise OSError(errno.EINVAL, "no")

    with aio.Pool(1, Poor()) as pool, scratch(pool, 9 * BLOCK, tmp_path) as file:
        assert os.listdir(tmp_path) == []
        assert not file.direct
        assert "zeros" in file.notice
        assert "O_DIRECT" in file.notice
        assert os.fstat(file.fd).st_blocks * 512 >= 9 * BLOCK


def test_direct_that_refuses_transfers_is_turned_off():
    io = aio.MemoryIO()
    refusing = aio.SimulatedIO(0, io, errors={4: errno.EINVAL})  # open, fallocate, direct, probe
    with aio.Pool(1, refusing) as pool, scratch(pool) as file:
        assert not file.direct
        assert io.direct == set()
        assert "refuses" in file.notice


def test_bad_directories(tmp_path):
    plain = tmp_path / "file"
    plain.write_bytes(b"")
    with aio.Pool(1) as pool:
        with pytest.raises(FileNotFoundError, match=r"does not exist.*create or mount"):
            scratch(pool, BLOCK, tmp_path / "missing")
        with pytest.raises(NotADirectoryError, match="give a directory"):
            scratch(pool, BLOCK, plain)
    for code, kind in ((errno.EACCES, PermissionError), (errno.EROFS, OSError)):
        with aio.Pool(1, aio.SimulatedIO(0, errors={1: code})) as pool:
            with pytest.raises(kind, match=r"scratch file of 4096 bytes failed.*give") as caught:
                scratch(pool, BLOCK, tmp_path)
            assert caught.value.errno == code
            assert caught.value.filename == str(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with aio.Pool(1) as pool, pytest.raises(PermissionError, match="may not write"):
        scratch(pool, BLOCK, tmp_path)


def test_no_space(tmp_path):
    io = aio.MemoryIO(capacity_bytes=10 * BLOCK)
    with aio.Pool(1, io) as pool:
        with pytest.raises(OSError, match=r"45056 bytes failed.*40960 bytes are free") as caught:
            scratch(pool, 11 * BLOCK)
        assert caught.value.errno == errno.ENOSPC
        assert io.files == {}
    with aio.Pool(1) as pool:  # the real one, asked for more than any disk has
        with pytest.raises(OSError, match=r"bytes are free.*free some space") as caught:
            scratch(pool, 1 << 60, tmp_path)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.listdir(tmp_path) == []


def test_file_size_limit(tmp_path):
    """A real failure of the system in the middle of reserving space."""
    code = (
        "import resource, sys, aio\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "with aio.Pool(1) as pool:\n"
        "    try: aio.create_scratch(sys.argv[1], 1 << 20, pool)\n"
        "    except OSError as error: print(error)\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True)
    assert "ulimit -f" in done.stdout
    assert os.listdir(tmp_path) == []


def test_killed_process_leaves_nothing(tmp_path):
    code = (
        "import sys, mmap, aio\n"
        "pool = aio.Pool(3)\n"
        "file = aio.create_scratch(sys.argv[1], 8 << 20, pool)\n"
        "memory = mmap.mmap(-1, 8 << 20)\n"
        "print('ready', flush=True)\n"
        "while True: file.write_from(memory, 0).wait()\n"
    )
    run = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(run, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        time.sleep(0.05)
        process.kill()
        assert process.wait(20) == -signal.SIGKILL
    assert os.listdir(tmp_path) == []


def test_space_that_is_interrupted_for_ever_is_no_lack_of_reserving():
    class Interrupted(aio.MemoryIO):
        def fallocate(self, fd, offset, count):
            raise InterruptedError(errno.EINTR, os.strerror(errno.EINTR))

        def pwritev(self, fd, views, offset):
            raise AssertionError("zeros are written")

    io = Interrupted()
    with aio.Pool(1, io) as pool, pytest.raises(InterruptedError, match="scratch file of"):
        scratch(pool, BLOCK)
    assert not io.files


class Unreserving(aio.MemoryIO):
    """A file system that cannot reserve space, so that zeros are written instead."""

    written = 0

    def fallocate(self, fd, offset, count):
        raise OSError(errno.EOPNOTSUPP, "not supported")

    def pwritev(self, fd, views, offset):
        self.written += sum(view.nbytes for view in views)
        return super().pwritev(fd, views, offset)


def test_where_space_cannot_be_reserved_the_zeros_count_among_what_is_written():
    io, most = Unreserving(), 6 << 20
    limits = {"directory": "/simulated", "size": 2 << 20, "backend": "python"}
    limits |= {"block_bytes_max": 1 << 20, "under_way_bytes_max": 2 << 20}
    with Load(written_bytes_max=most, io=io, **limits) as made:
        assert len(made._memory) < 64 << 20  # As the file is small.
        assert sum(sample.bytes_written for sample in made.fill()) == 2 << 20
        made.allow(1.0)
        with pytest.raises(Spent):
            while True:
                made.run("write", Setting("python", 1 << 18, 2), 0.001)
        assert made.bytes_written == io.written - 4096 <= most  # a block was tried for O_DIRECT
        assert made.bytes_written > most - (1 << 20)
    with pytest.raises(ValueError, match=r"cannot reserve space; try: .* half the size"):
        Load(written_bytes_max=3 << 20, io=Unreserving(), **limits)
