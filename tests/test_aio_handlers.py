"""Signal handlers and finalisers that themselves transfer, sync and close, wherever they come."""

import errno
import threading
import time
import weakref

import pytest

import aio
from aio import joint
from aio.part import Part
from aio.request import Request
from aio.ticket import THIS_THREAD, LockSignal, QueuedTicket
from tests.backends import ENGINE, USABLE, interpreter, interpreters, opened
from tests.faults import GateIO, aligned, nothing_leaks, scratch

BLOCK = aio.ALIGN_BYTES
QUEUED = [name for name in USABLE if name in ("libaio", "python")]

# What a program does, with a handler before its n-th line within aio (or, to be finer, opcode), for
# n from `first` on in steps. The handler is called as Python calls those of signals: by the thread
# that started it, in between. The program may find closed what the handler has closed, or be done
# before the handler's turn, which ends the whole.
PROGRAM = """
import traceback, aio, faulthandler, gc, mmap, os, sys
directory, name, all_done, first, step, opcodes = sys.argv[1:]
first, step, opcodes = int(first), int(step), opcodes == "opcodes"
BLOCK = 4096
memory, other = (mmap.mmap(-1, 2 * BLOCK) for _ in range(2))


class Interrupted(TimeoutError, RuntimeError, ValueError, IndexError):
    pass  # of each kind that aio itself looks for


def once(turn):
    volume = aio.create_volume([directory] * 2, 4 * BLOCK, lambda: aio.open_backend(name, depth=2),
                               unit_bytes=BLOCK)
    file, seen, ticket, raised = volume.files[0], 0, None, None

    def handle():
        if done == "transfers":
            other[:4] = b"four"
            volume.write_from(other, 2 * BLOCK).wait(20)
            if ticket is not None:
                ticket.wait(20)
            sum(volume.counters(), aio.Counters())
        elif done == "syncs":
            volume.sync()
        elif done == "closes":
            file.close()
        elif done == "ends":
            volume.close()
            assert volume.closed and all(one.closed for one in volume.files)
        else:
            raise Interrupted("by a handler")

    def trace(frame, event, argument):
        nonlocal seen, raised
        if "/aio/" not in frame.f_code.co_filename:
            return None
        frame.f_trace_opcodes = opcodes
        if event == ("opcode" if opcodes else "line"):
            seen += 1
            if seen == turn:
                try:
                    handle()
                except Interrupted:
                    raised = "".join(traceback.format_stack(frame))
                    raise
                except (ValueError, OSError) as error:
                    assert "closed" in str(error)
        return trace

    by_python = []  # what is raised in a finaliser Python tells, and goes on
    sys.unraisablehook = lambda told: by_python.append(told.exc_type)
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        ticket = volume.write_from(memory, 0)
        ticket.wait(20)
        aio.wait_all([volume.read_into(memory, 0)])
        volume.sync()
        volume.counters()
        volume.close()
    except Interrupted:
        raised = None
    except (ValueError, OSError) as error:
        assert done in ("closes", "ends") and " is closed" in str(error), error
    finally:
        sys.settrace(None)
        volume.close()
    assert raised is None or Interrupted in by_python, (turn, raised)  # else it was swallowed
    assert not any(file.pending or file._close_fd.alive for file in volume.files), turn
    return seen >= turn


open_before = len(os.listdir("/proc/self/fd"))
for done in all_done.split():
    faulthandler.dump_traceback_later(90, exit=True)
    turn = first
    while once(turn):
        turn += step
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == open_before
    print(turn)
"""


@pytest.fixture(autouse=True)
def _nothing_leaks():
    with nothing_leaks():
        yield


DONE = ["transfers", "syncs", "closes", "ends", "raises"]

STEPS = dict.fromkeys(USABLE, 149) | dict.fromkeys(("linux_aio", "libaio"), 293)
"""To give a context of Linux AIO back takes the kernel 40 ms."""

FINER = dict.fromkeys(USABLE, 7 * 7) | dict.fromkeys(("linux_aio", "libaio"), 7 * 41)
"""Of opcodes, some six of which are a line."""


def test_a_handler_that_itself_does_io_never_hangs(tmp_path):
    """All backends beside one another, as they wait most of the time."""
    ways = [(name, done) for name in USABLE for done in (DONE[:2], DONE[2:])]
    runs = [(tmp_path, name, " ".join(done), 1, STEPS[name], "lines") for name, done in ways]
    for turns, (name, done) in zip(interpreters([(PROGRAM, *run) for run in runs]), ways):
        assert len(turns.split()) == len(done), name
        assert min(map(int, turns.split())) > 40, name


@pytest.mark.slow
@pytest.mark.parametrize("done", DONE)
@pytest.mark.parametrize("name", USABLE)
def test_a_handler_before_every_opcode(name, done, tmp_path):
    for first in range(1, 4):
        interpreter(PROGRAM, tmp_path, name, done, first, FINER[name], "opcodes")


class Owner(bytearray):
    """Memory that does something when nobody has it any more."""

    def __del__(self):
        if self.at_end is not None:
            self.at_end()

    at_end = None


@pytest.mark.parametrize("name", QUEUED)
def test_finalisers_in_a_thread_that_serves_are_refused_and_hang_nobody(name):
    """The memory of a transfer dies there where the transfer held it last."""
    found, queued, mine = [], threading.Event(), threading.current_thread()

    def asks():
        found.append(threading.current_thread())
        if found[0] is mine or not queued.wait(20):
            return
        for call in (lambda: file.write_from(aligned(BLOCK), 0), later.wait, file.close):
            try:
                call()
            except (RuntimeError, ValueError) as error:
                found.append(str(error))
        sum([backend.counters()], aio.Counters())
        backend.close()

    limits = {"depth": 1, "piece_bytes": BLOCK}
    with opened(name, **limits) as backend, scratch(backend, 1 << 20, "/dev/shm") as file:
        while not found or found[0] is mine:  # Here it dies where all is written before `del`.
            found.clear()
            queued.clear()
            memory = Owner(256 * BLOCK)
            memory.at_end = asks
            first = file.write_from(memory, 0)
            del memory
            later = file.write_from(aligned(256 * BLOCK), 0)
            queued.set()
            first.wait(20)
            later.wait(20)
            while not found:
                time.sleep(0.001)
        until = time.perf_counter() + 20
        while len(found) < 4 and time.perf_counter() < until:  # By then it need not be through.
            time.sleep(0.001)
        thread, *refused = found
        assert thread is not mine
        assert [text.split(": asked for in a thread of aio")[0] for text in refused] == [
            "a write of 4096 bytes at offset 0 of /dev/shm/(unnamed scratch file)",
            "a wait for the write of 1048576 bytes at offset 0 of /dev/shm/(unnamed scratch file)",
            "the end of transfers of /dev/shm/(unnamed scratch file)",
        ]
        with pytest.raises(ValueError, match="closed"):
            file.write_from(aligned(BLOCK), 0)


@pytest.mark.parametrize("name", ENGINE)
def test_a_finaliser_may_transfer_but_not_wait_for_the_transfer_of_its_own_memory(name):
    """The engine gives memory back in the thread that next looks, which holds nothing then."""
    found = []

    def asks():
        file.write_from(aligned(BLOCK), 0).wait(20)
        file.sync()
        for tickets in ([ticket], [joint.JointTicket("both", [ticket])]):
            for wait in (tickets[0].wait, lambda: aio.wait_all(tickets)):  # noqa: B023
                try:
                    wait()
                except RuntimeError as error:
                    found.append(str(error))

    with opened(name) as backend, scratch(backend, BLOCK, "/dev/shm") as file:
        memory = Owner(BLOCK)
        memory.at_end = asks
        ticket = file.write_from(memory, 0)
        del memory
        ticket.wait(20)
        assert len(found) == 4
        assert all("waited for by a finaliser of its own memory" in text for text in found)


class Poor(aio.MemoryIO):
    """A system in which memory runs out in the midst of the n-th transfer from now on."""

    turn = 0

    def pwritev(self, fd, views, offset):
        self.turn -= 1
        if self.turn == 0:
            raise MemoryError
        return super().pwritev(fd, views, offset)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("turn", [1, 2, 8])
def test_without_memory_a_transfer_fails_and_the_next_does_not(turn, threads):
    io = Poor()
    with aio.Pool(threads, io, piece_bytes=BLOCK) as pool, scratch(pool, 8 * BLOCK) as file:
        io.turn = turn
        with pytest.raises(OSError, match=r"no memory left.*lower the memory budgets") as caught:
            file.write_from(aligned(8 * BLOCK), 0).wait(20)
        assert (caught.value.errno, caught.value.filename) == (errno.ENOMEM, file.path)
        file.write_from(aligned(8 * BLOCK), 0).wait(20)


@pytest.mark.parametrize("what", ["Piece.__init__", "Piece.failed", "Requests.count"])
@pytest.mark.parametrize("turn", [1, 3])
def test_a_thread_without_memory_of_its_own_reaches_the_ticket(what, turn, monkeypatch):
    """Where not even the message can be made, or a piece be cut, nobody waits for ever."""
    io = aio.SimulatedIO(0)
    owner, name = what.split(".")
    inner, calls = getattr(getattr(aio.request, owner), name), []

    def poor(self, *arguments):
        calls.append(name)
        if len(calls) == turn:
            raise MemoryError
        return inner(self, *arguments)

    with aio.Pool(2, io, piece_bytes=BLOCK) as pool, scratch(pool, 8 * BLOCK) as file:
        file.write_from(aligned(8 * BLOCK), 0).wait(20)
        monkeypatch.setattr(getattr(aio.request, owner), name, poor)
        if name == "failed":
            io.errors = dict.fromkeys(range(len(io.calls) + turn, len(io.calls) + 40), errno.EIO)
        ticket = file.write_from(aligned(8 * BLOCK), 0)
        if name == "count":  # its figures are lost, but the bytes are there
            ticket.wait(20)
        else:
            with pytest.raises(OSError, match=r"write of .* failed") as caught:
                ticket.wait(20)
            assert caught.value.filename == file.path
            assert caught.value.errno in (errno.ENOMEM, errno.EIO)
            assert turn > 1 or caught.value.errno == errno.ENOMEM
        io.errors = {}
        file.write_from(aligned(8 * BLOCK), 0).wait(20)


def test_closing_in_the_midst_of_a_sync_leaves_the_descriptor_to_that():
    class Closing(aio.MemoryIO):
        syncs = 0

        def fsync(self, fd):
            self.syncs += 1
            if self.syncs == 1:
                file.sync()  # within the other
                file.close()
                assert fd in self.files
            super().fsync(fd)

    io = Closing()
    with aio.Pool(1, io) as pool:
        file = scratch(pool, BLOCK)
        file.sync()
        assert (io.syncs, file.closed, io.files) == (2, True, {})
        with pytest.raises(ValueError, match="closed"):
            file.sync()
        file.close()


@pytest.mark.parametrize("name", QUEUED)
def test_what_is_queued_too_late_never_meets_another_file(name, tmp_path):
    """By who had seen the file open before a handler closed it: others have its descriptor."""
    with opened(name) as backend:
        file = scratch(backend, BLOCK, tmp_path)
        file.close()
        with scratch(backend, BLOCK, tmp_path) as other:
            assert other.fd == file.fd
            late = Request(file, True, [Part(memoryview(aligned(BLOCK)), 0)])
            backend._requests.queue.append(late)
            backend._requests.wake()
            with pytest.raises(OSError, match="the file is closed; likely it was closed") as caught:
                late.ticket.wait(20)
            assert caught.value.errno == errno.EBADF
            backend.drain(file)
            assert (file.bytes_written, file.pending) == (0, 0)


def test_what_begins_while_it_is_looked_at_is_seen():
    """It leaves the queue between two looks: closing a file waits for it all the same."""
    io, lets = GateIO(), []
    with aio.Pool(1, io) as pool, scratch(pool, BLOCK) as file:
        requests = pool._requests

        class Watched(type(file)):
            @property
            def pending(self):
                found = self.__dict__["pending"]
                while lets and not THIS_THREAD.serves and requests.queue:
                    lets.pop()()  # the thread takes it, now
                    time.sleep(0.05)
                return found

            @pending.setter
            def pending(self, count):
                self.__dict__["pending"] = count

        file.__class__ = Watched
        io.gate.clear()
        with requests.lock:
            ticket = file.write_from(aligned(BLOCK), 0)
            lets.append(requests.lock.release)
            seen = requests.has(file)
            if not lets:
                requests.lock.acquire()
            lets.clear()
        io.gate.set()
        ticket.wait(20)
        assert seen


def test_who_closes_a_file_finds_its_tickets_done(monkeypatch):
    inner = QueuedTicket.finish

    def slow(*arguments):
        time.sleep(0.05)
        inner(*arguments)

    with aio.Pool(1, aio.MemoryIO()) as pool, scratch(pool, BLOCK) as file:
        monkeypatch.setattr(QueuedTicket, "finish", slow)
        ticket = file.write_from(aligned(BLOCK), 0)
        file.close()
        assert ticket.done()


def test_without_memory_to_wake_another_thread(monkeypatch):
    with aio.Pool(2, aio.MemoryIO(), piece_bytes=BLOCK) as pool, scratch(pool, 8 * BLOCK) as file:
        inner, calls = pool._requests.wake, []

        def poor():
            if THIS_THREAD.serves:
                calls.append("wake")
                if len(calls) == 1:
                    raise MemoryError
            inner()

        monkeypatch.setattr(pool._requests, "wake", poor)
        with pytest.raises(OSError, match="no memory left"):
            file.write_from(aligned(8 * BLOCK), 0).wait(20)
        file.write_from(aligned(8 * BLOCK), 0).wait(20)


def test_without_memory_to_tell_who_waits(monkeypatch):
    """Each looks by himself, too."""
    for module in (aio.ticket, aio.request, joint):  # He would a second later.
        monkeypatch.setattr(module, "SLEEP_S_MAX", 0.1)
    io = GateIO()
    with aio.Pool(1, io) as pool, scratch(pool, BLOCK) as file:
        inner, calls = LockSignal.set, []

        def poor(signal):
            if THIS_THREAD.serves:
                calls.append("set")
                raise MemoryError
            inner(signal)

        monkeypatch.setattr(LockSignal, "set", poor)
        for wait in (aio.Ticket.wait, lambda ticket: aio.wait_all([ticket])):
            io.gate.clear()
            written = file.write_from(aligned(BLOCK), 0)
            waiter = threading.Thread(target=wait, args=(written,), daemon=True)
            waiter.start()
            while not written._watchers:
                time.sleep(0.001)
            io.gate.set()
            waiter.join(10)
            assert not waiter.is_alive()
        assert calls or joint.CommonSignal is not LockSignal


def test_a_finaliser_may_sync_what_is_synced_while_that_waits_for_it():
    """A handler, in the midst of a sync, waits for a transfer whose memory's end syncs, too."""

    class Waiting(aio.system.SystemIO):
        syncs = 0

        def fsync(self, fd):
            self.syncs += 1
            if self.syncs == 1:
                memory = Owner(BLOCK)
                memory.at_end = file.sync
                ticket = file.write_from(memory, 0)
                del memory
                ticket.wait(20)
            super().fsync(fd)

    io = Waiting()
    with aio.Pool(1, io) as pool, scratch(pool, BLOCK, "/dev/shm") as file:
        thread = threading.Thread(target=file.sync, daemon=True)
        thread.start()
        thread.join(10)
        assert not thread.is_alive()
        assert io.syncs == 2


def test_what_a_handler_raises_as_a_file_closes_leaves_no_descriptor(monkeypatch):
    """As weakref.finalize has taken its entry out, and not yet called what stands there."""

    class Interrupted(Exception):
        pass

    class Registry(dict):
        def pop(self, *arguments):
            super().pop(*arguments)
            registry.pop(*arguments)
            raise Interrupted

    io, registry = aio.MemoryIO(), weakref.finalize._registry
    with aio.Pool(1, io) as pool:
        file = scratch(pool, BLOCK)
        with monkeypatch.context() as patched, pytest.raises(Interrupted):
            patched.setattr(weakref.finalize, "_registry", Registry(registry))
            file.close()
        assert not io.files
        file.close()
