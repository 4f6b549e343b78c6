"""Scratch files: reserved, private, gone however the process ends; clear where none can be had."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

import aio
from tests.faults import scratch
from tests.simulated import MemoryIO, SimulatedIO

pytestmark = pytest.mark.usefixtures("leaks_nothing")

BLOCK = aio.ALIGN_BYTES


def test_tmpfs_is_buffered_with_a_notice():
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no tmpfs here")
    with aio.ThreadBackend(1) as pool, scratch(pool, 3 * BLOCK, "/dev/shm") as file:
        assert not file.direct
        assert "tmpfs" in file.notice
        assert file.notice.endswith(".")
        data = bytearray(b"not aligned at all")
        file.write_from(data, 5).wait()
        back = bytearray(len(data))
        file.read_into(back, 5).wait()
        assert back == data


def test_mode_and_size(tmp_path):
    with aio.ThreadBackend(1) as pool, scratch(pool, 5000, tmp_path) as file:
        found = os.fstat(file.fd)
        assert found.st_mode & 0o777 == 0o600
        assert found.st_nlink == 0
        assert file.bytes == found.st_size == 2 * BLOCK
        assert found.st_blocks * 512 >= 2 * BLOCK  # reserved, not a hole
        assert not os.get_inheritable(file.fd)


def test_without_tmpfile_or_fallocate_or_direct(tmp_path):
    """Older file systems: a name unlinked at once, zeros written, buffered with a notice."""

    class Poor(aio.IO):
        def open(self, path, flags, mode):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no")
            assert flags & os.O_EXCL
            return super().open(path, flags, mode)

        def fallocate(self, fd, offset, count):
            raise OSError(errno.EOPNOTSUPP, "no")

        def set_direct(self, fd, direct):
            raise OSError(errno.EINVAL, "no")

    with aio.ThreadBackend(1, Poor()) as pool, scratch(pool, 9 * BLOCK, tmp_path) as file:
        assert os.listdir(tmp_path) == []
        assert not file.direct
        assert "zeros" in file.notice
        assert "O_DIRECT" in file.notice
        assert os.fstat(file.fd).st_blocks * 512 >= 9 * BLOCK


def test_direct_that_refuses_transfers_is_turned_off():
    io = MemoryIO()
    refusing = SimulatedIO(0, io, errors={4: errno.EINVAL})  # open, fallocate, direct, probe
    with aio.ThreadBackend(1, refusing) as pool, scratch(pool) as file:
        assert not file.direct
        assert io.direct == set()
        assert "refuses" in file.notice


def test_bad_directories(tmp_path):
    plain = tmp_path / "file"
    plain.write_bytes(b"")
    with aio.ThreadBackend(1) as pool:
        with pytest.raises(FileNotFoundError, match=r"does not exist.*create or mount"):
            scratch(pool, BLOCK, tmp_path / "missing")
        with pytest.raises(NotADirectoryError, match="give a directory"):
            scratch(pool, BLOCK, plain)
    for code, kind in ((errno.EACCES, PermissionError), (errno.EROFS, OSError)):
        with aio.ThreadBackend(1, SimulatedIO(0, errors={1: code})) as pool:
            with pytest.raises(kind, match=r"scratch file of 4,096 bytes failed.*give") as caught:
                scratch(pool, BLOCK, tmp_path)
            assert caught.value.errno == code
            assert caught.value.filename == str(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_unwritable_directory(tmp_path):
    tmp_path.chmod(0o500)
    with aio.ThreadBackend(1) as pool, pytest.raises(PermissionError, match="may not write"):
        scratch(pool, BLOCK, tmp_path)


def test_no_space(tmp_path):
    io = MemoryIO(capacity_bytes=10 * BLOCK)
    with aio.ThreadBackend(1, io) as pool:
        with pytest.raises(OSError, match=r"45,056 bytes failed.*40,960 bytes are free") as caught:
            scratch(pool, 11 * BLOCK)
        assert caught.value.errno == errno.ENOSPC
        assert io.files == {}
    with aio.ThreadBackend(1) as pool:  # the real one, asked for more than any disk has
        with pytest.raises(OSError, match=r"bytes are free.*free some space") as caught:
            scratch(pool, 1 << 60, tmp_path)
        assert caught.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert os.listdir(tmp_path) == []


def test_file_size_limit(tmp_path):
    """A real failure of the system in the middle of reserving space."""
    code = (
        "import resource, sys, aio\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))\n"
        "with aio.ThreadBackend(1) as pool:\n"
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
        "pool = aio.ThreadBackend(3)\n"
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
