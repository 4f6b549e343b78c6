"""Which backend serves, why the others do not, and what only the compiled engine has."""

import errno
import os
import platform
import re

import pytest

import aio
from aio import backends
from tests.backends import ENGINE, few, interpreter
from tests.faults import nothing_leaks
from tests.simulated import MemoryIO

BLOCK = aio.ALIGN_BYTES
FOUND = {found.name: found for found in aio.probe()}
native = pytest.mark.skipif(not FOUND["threads"].usable, reason="the engine is not compiled")

# A seccomp filter as containers have: a few calls fail with a given errno.
FORBID = """
import ctypes, struct
def forbid(calls, code):
    load = struct.pack("HBBI", 0x20, 0, 0, 0)
    tests = [struct.pack("HBBI", 0x15, len(calls) - n, 0, call) for n, call in enumerate(calls)]
    ends = [struct.pack("HBBI", 6, 0, 0, value) for value in (0x7FFF0000, 0x50000 | code)]
    program = ctypes.create_string_buffer(b"".join([load, *tests, *ends]))
    head = struct.pack("HxxxxxxP", len(calls) + 3, ctypes.addressof(program))
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.prctl(38, 1, 0, 0, 0) == 0
    assert libc.prctl(22, 2, ctypes.c_char_p(head), 0, 0) == 0, ctypes.get_errno()
"""


def test_the_first_that_works_serves():
    assert tuple(FOUND) == aio.BACKEND_NAMES
    with nothing_leaks():
        backend = aio.open_backend()
        assert backend.name == next(name for name in FOUND if FOUND[name].usable)
        backend.close()


def test_one_can_be_asked_for(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "python")
    backend = aio.open_backend()
    assert isinstance(backend, aio.ThreadBackend)
    backend.close()
    with pytest.raises(ValueError, match=r"'uring'.*typing error.*io_uring, linux_aio"):
        aio.open_backend("uring")


def test_a_simulation_goes_through_python(monkeypatch):
    monkeypatch.setenv(backends.BACKEND_VARIABLE, "threads")
    io = MemoryIO()
    backend = aio.open_backend(io=io)
    assert backend.name == "python"
    assert backend.io is io
    backend.close()


@pytest.mark.parametrize(
    ("name", "code", "setting", "reason"),
    [
        ("io_uring", errno.EPERM, "2", "switched off: kernel.io_uring_disabled = 2"),
        ("io_uring", errno.EPERM, "0", "seccomp"),
        ("io_uring", errno.ENOSYS, "0", "no such call"),
        ("io_uring", errno.EOPNOTSUPP, "0", "older than 5.11"),
        ("io_uring", errno.ENOMEM, "0", "ulimit -l"),
        ("linux_aio", errno.EAGAIN, "7", "fs.aio-max-nr allows (7 of 7 are taken)"),
        ("linux_aio", errno.EPERM, "7", "seccomp"),
        ("linux_aio", errno.EOPNOTSUPP, "7", "older than 4.18"),
        ("threads", errno.EMFILE, "0", "eventfd"),
    ],
)
def test_reasons(monkeypatch, tmp_path, name, code, setting, reason):
    for file in ("kernel/io_uring_disabled", "fs/aio-max-nr", "fs/aio-nr"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(setting + "\n")
    monkeypatch.setattr(backends, "_KERNEL", tmp_path)
    assert reason in backends._why(name, OSError(code, "eventfd: out of them"), 8)


def test_reasons_of_what_is_not_installed():
    for name in ("io_uring", "libaio"):
        assert "install" in backends._why(name, ImportError("No module named x"), 8)
    assert "libaio of PyPI is missing" in backends._why("libaio", ImportError("No module"), 8)
    lacking = OSError("libaio.so.1: cannot open shared object file: No such file or directory")
    assert "not the system's library" in (told := backends._why("libaio", lacking, 8))
    assert "install libaio1" in told


def test_without_the_engine():
    """As where it was not compiled: the tests' own machine may have no compiler."""
    code = (
        "import sys; sys.modules['aio._native'] = None\n"
        "import aio\n"
        "found = {p.name: p for p in aio.probe()}\n"
        "assert not found['io_uring'].usable and 'not compiled' in found['threads'].reason\n"
        "backend = aio.open_backend()\n"
        "print(backend.name)\n"
        "backend.close()\n"
    )
    assert interpreter(code).strip() == ("libaio" if FOUND["libaio"].usable else "python")


@native
def test_no_descriptor_is_left():
    """Nothing slower takes its place: the file could not be opened either."""
    code = (
        "import aio, os, resource\n"
        "aio.open_backend().close()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))\n"
        "try: aio.open_backend()\n"
        "except OSError as error: print(error)\n"
    )
    assert re.match(
        r"\[Errno 24\] asked for a backend.*no descriptor is left.*ulimit -n", interpreter(code)
    )


@native
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of calls are of x86-64")
def test_all_requests_of_linux_aio_are_taken():
    """For real: contexts until the kernel has no room for another, in a process of its own."""
    code = (
        "import aio, ctypes, sys\n"
        "setup = ctypes.CDLL(None, use_errno=True).syscall\n"
        "size = 1 << 16\n"
        "while size:\n"
        "    if setup(206, size, ctypes.byref(ctypes.c_ulong(0))) != 0: size //= 2\n"
        "assert ctypes.get_errno() == 11\n"
        "found = {one.name: one for one in aio.probe()}\n"
        "for name in ('linux_aio', 'libaio'): print(found[name].usable, found[name].reason)\n"
        "try: aio.open_backend('linux_aio')\n"
        "except ValueError as error: print(error, '|', error.__cause__)\n"
    )
    shown = interpreter(code).splitlines()
    for line in shown[:2]:
        assert re.fullmatch(
            r"False fewer requests .* fs.aio-max-nr allows \(\d+ of \d+ are taken\): raise it"
            r"|False the package libaio of PyPI is missing.*",
            line,
        )
    assert "are taken)" in shown[2]
    assert shown[2].endswith("[Errno 11] io_setup: Resource temporarily unavailable")


@native
@pytest.mark.skipif(not FOUND["linux_aio"].usable, reason="no Linux AIO here")
def test_the_probe_asks_for_what_will_be_used(monkeypatch):
    """As where nearly all requests of Linux AIO are taken: what is left does for eight."""
    monkeypatch.delenv(backends.BACKEND_VARIABLE, raising=False)
    inner = backends._OPENERS["linux_aio"]

    def opener(name, depth, *limits):
        if depth > 8:
            raise OSError(errno.EAGAIN, "io_setup")
        return inner(name, depth, *limits)

    monkeypatch.setitem(backends._OPENERS, "linux_aio", opener)
    assert aio.probe(8)[1] == FOUND["linux_aio"]
    for found in (aio.probe()[1], aio.probe(9)[1]):
        assert not found.usable
        assert "fewer requests are left than the" in found.reason


@native
@pytest.mark.skipif(platform.machine() != "x86_64", reason="numbers of calls are of x86-64")
@pytest.mark.parametrize(
    ("calls", "name", "serves"),
    [
        ((425,), "io_uring", "linux_aio"),
        ((426,), "io_uring", "linux_aio"),  # may be opened, does nothing
        ((425, 206), "linux_aio", "threads"),
        ((425, 208), "linux_aio", "threads"),
    ],
)
def test_seccomp(calls, name, serves, tmp_path):
    code = FORBID + (
        "import aio, sys, mmap\n"
        f"forbid({calls}, 1)\n"
        "print({p.name: p for p in aio.probe()}[sys.argv[2]].reason)\n"
        "with aio.open_backend() as backend, aio.create_scratch(sys.argv[1], 4096, backend) as f:\n"
        "    f.write_from(mmap.mmap(-1, 4096), 0).wait()\n"
        "    print(backend.name)\n"
    )
    reason, found = interpreter(code, tmp_path, name).splitlines()
    assert "forbidden" in reason
    assert found == serves


@native
@pytest.mark.parametrize("name", few(ENGINE))
def test_daemon_threads_at_exit(name, tmp_path):
    """Threads in the midst of transfers, at whatever point, when the interpreter ends."""
    code = (
        "import sys, aio, mmap, threading, time\n"
        "backend = aio.open_backend(sys.argv[2])\n"
        "file = aio.create_scratch(sys.argv[1], 8 << 20, backend)\n"
        "def work():\n"
        "    try:\n"
        "        while True: file.write_from(mmap.mmap(-1, 8 << 20), 0).wait()\n"
        "    except ValueError: pass\n"
        "for _ in range(3): threading.Thread(target=work, daemon=True).start()\n"
        "time.sleep(0.05)\n"
    )
    for _ in range(2):
        assert interpreter(code, tmp_path, name) == ""
    assert os.listdir(tmp_path) == []
