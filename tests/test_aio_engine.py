"""The compiled engine: memory is the caller's once a ticket is done, and not a moment earlier."""

import errno
import os
import platform

import pytest

import aio
from tests.backends import ENGINE, interpreter
from tests.faults import aligned, nothing_leaks, scratch
from tests.test_aio_choice import FORBID

if ENGINE:
    from aio import _native
    from aio.native import Faults, Native

BLOCK = aio.ALIGN_BYTES


@pytest.fixture(autouse=True)
def _nothing_leaks():
    with nothing_leaks():
        yield


@pytest.mark.skipif("io_uring" not in ENGINE, reason="no io_uring here")
@pytest.mark.parametrize("register", [True, False])
def test_a_ring_closed_by_others(register, tmp_path):
    """A read that is under way, of a pipe that is empty, ends before its ticket does: well where
    the kernel knows the ring by an index, and else with everything that comes later."""
    if not register and platform.machine() != "x86_64":
        pytest.skip("the number of the call is that of x86-64")
    code = FORBID + (
        "import aio, mmap, os, sys, time, types\n"
        f"if not {register}: forbid((427,), 22)\n"
        "backend = aio.open_backend('io_uring')\n"
        "file = aio.create_scratch(sys.argv[1], 4096, backend)\n"
        "memory, (empty, end) = mmap.mmap(-1, 4096), os.pipe()\n"
        "pipe = types.SimpleNamespace(\n"
        "    fd=empty, closed=False, pending=0, operations=0, bytes_read=0\n"
        ")\n"
        "read = backend._engine.submit(pipe, False, 1, ((memoryview(memory), 0),))\n"
        "while not backend.counters().depth_max: pass\n"
        "time.sleep(0.05)  # it is with the kernel\n"
        "for fd in range(3, file.fd):\n"
        "    if 'io_uring' in os.readlink(f'/proc/self/fd/{fd}'): os.close(fd); break\n"
        "write = file.write_from(mmap.mmap(-1, 4096), 0)\n"
        "assert not read.wait(0.2)\n"
        "os.write(end, b'x' * 4096)\n"
        "assert read.wait(20)\n"
        "assert memory[:] == b'x' * 4096\n"
        "print(read.failure())\n"
        "try: write.wait(20)\n"
        "except OSError as error: print(error)\n"
        "else: print(None)\n"
        "backend.close()\n"
    )
    read, write = interpreter(code, tmp_path).splitlines()
    if register:
        assert (read, write) == ("None", "None")
    else:
        assert read.startswith(f"({errno.EIO}, 3,")
        assert "takes no more calls" in write


class Asking(bytearray):
    """Memory that asks something when it is let go of, which may be in the midst of anything."""

    ask = None

    def __del__(self):
        self.ask()


@pytest.mark.parametrize("name", ENGINE)
@pytest.mark.parametrize("together", [True, False])
def test_a_ticket_that_is_done_holds_no_buffer(name, together):
    """Whenever it is asked, in the midst of giving back other memory too, and by any thread."""
    faults = Faults(errors=dict.fromkeys(range(1, 20), errno.EAGAIN))  # about 20 ms
    with (
        Native(name, depth=1, faults=faults) as backend,
        scratch(backend, BLOCK, "/dev/shm") as file,
    ):
        align = file.offset_align_bytes
        memory, asking, found = bytearray(align), Asking(align), []
        if together:
            tickets = [file.read_into([asking, memory], [0, 0])]
        else:
            tickets = [file.read_into(memory, 0), file.read_into(asking, 0)]

        def ask():
            done = tickets[0].done()
            try:
                memory.append(1)
                found.append((done, True))
            except BufferError:
                found.append((done, False))
            if not done:
                with pytest.raises(RuntimeError, match="finaliser"):  # of this very thread
                    tickets[0].wait()

        asking.ask = ask
        del asking
        over = _native.Signal()
        tickets[-1].watch(over)
        assert over.wait(20)  # and nobody has looked at the tickets yet
        assert tickets[-1].done()
        assert found == [(not together, not together)]
        memory.append(1)


@pytest.mark.parametrize("name", ENGINE)
@pytest.mark.parametrize("size", [1000, BLOCK + 1000])
def test_a_file_that_ends_within_a_block(name, size, tmp_path):
    """It is told as shortened, not as a drive that does nothing."""
    with aio.open_backend(name) as backend, scratch(backend, 4 * BLOCK, tmp_path) as file:
        os.ftruncate(file.fd, size)
        with pytest.raises(OSError, match=f"offset {size} failed: the file ends at {size}.*short"):
            file.read_into(aligned(4 * BLOCK), 0).wait()
