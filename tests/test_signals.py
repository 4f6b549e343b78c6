"""Handlers of any signal that raise inside the engine: as if the signal had come between calls."""

from __future__ import annotations

import contextlib
import gc
import random
import signal
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import offload
from cpu_adam import interrupt as of_steps
from offload import interrupt
from tests.forked import Forked, anew
from tests.training import assert_same, attached, plain, result_of, train

ENGINE = str(Path(offload.__file__).parent)
PLACEMENT = ("nvme", "cpu", "nvme")


class Stopped(Exception):
    """What the handlers here raise."""


@contextmanager
def handler_of(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def stop(*_: object) -> None:
    raise Stopped


@contextmanager
def sent(number: int, at: int) -> Iterator[list[int]]:
    """Send a signal at a line that the engine runs; counts the lines."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not frame.f_code.co_filename.startswith(ENGINE):
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == at:
                signal.raise_signal(number)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


@pytest.mark.parametrize(
    ("number", "parts"),
    [(signal.SIGTERM, 5), pytest.param(signal.SIGALRM, 20, marks=pytest.mark.slow)],
)
def test_a_handler_that_raises_anywhere_in_a_step(number: int, parts: int, tmp_path: Path) -> None:
    expected = train(PLACEMENT, tmp_path, steps=3)
    with attached(PLACEMENT, tmp_path) as run:
        plain(run, 0)
        with sent(number, -1) as counted:
            plain(run, 1)
    rng, stopped = random.Random(int(number)), 0
    for part in range(parts):
        at = rng.randrange(part * counted[0] // parts, (part + 1) * counted[0] // parts)
        with handler_of(number, stop), attached(PLACEMENT, tmp_path) as run:
            plain(run, 0)
            losses, state = list(run.losses), run.generator.get_state()
            try:
                with sent(number, at):
                    plain(run, 1)
            except Stopped:
                stopped += 1
                run.optimizer.zero_grad()
                if run.engine.steps == 1:
                    run.losses[:] = losses
                    run.generator.set_state(state)
                    plain(run, 1)
            plain(run, 2)
            assert_same(result_of(run), expected)
    assert stopped >= parts * 4 // 5


def test_what_is_whole_ends_before_any_handler_is_called(whole: Any) -> None:
    """And what it raises holds on to nothing of what was interrupted."""
    called: list[int] = []
    local: list[weakref.ref[torch.Tensor]] = []

    def note(number: int, frame: FrameType | None) -> None:
        assert frame is not None
        called.append(number)
        raise Stopped(number)

    @whole
    def work() -> None:
        held = torch.ones(3)
        local.append(weakref.ref(held))
        for number in (signal.SIGTERM, signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1):
            signal.raise_signal(number)
        assert not called

    with handler_of(signal.SIGTERM, note), handler_of(signal.SIGALRM, note):
        with handler_of(signal.SIGUSR1, signal.SIG_IGN), pytest.raises(Stopped) as caught:
            work()
        assert called == [signal.SIGTERM, signal.SIGALRM]
        assert [one() for one in local] == [None]
        assert isinstance(caught.value.__context__, Stopped)
        assert signal.getsignal(signal.SIGTERM) is note
        assert signal.getsignal(signal.SIGALRM) is note
    assert not interrupt.inside()


def test_a_handler_set_inside_stays(whole: Any) -> None:
    def mine(*_: object) -> None:
        """Handles."""

    with handler_of(signal.SIGTERM, stop):
        whole(lambda: signal.signal(signal.SIGTERM, mine))()
        assert signal.getsignal(signal.SIGTERM) is mine


def test_a_handler_that_is_set_anew_waits_too(whole: Any) -> None:
    """The same one, too, by which Python takes off whatever lay over it."""
    done: list[int] = []

    def work() -> None:
        signal.raise_signal(signal.SIGALRM)
        done.append(1)

    for count in (1, 2, 3):
        with handler_of(signal.SIGALRM, stop):
            signal.signal(signal.SIGALRM, stop)
            with pytest.raises(Stopped):
                whole(work)()
        assert len(done) == count


def test_no_signal_is_lost_that_another_thread_gets(whole: Any) -> None:
    """Where it meets the last end of what is whole, one of both has to see the other."""
    came: list[int] = []
    work, luck, over = whole(lambda: None), random.Random(0), threading.Event()
    other = threading.Thread(target=over.wait)
    other.start()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])  # So the other one gets it.
    try:
        with handler_of(signal.SIGALRM, lambda number, _: came.append(number)):
            for sent in range(1, 1001):
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + luck.random() * 1e-4)
                until = time.perf_counter() + luck.random() * 2e-4
                while time.perf_counter() < until:
                    work()
                limit = time.perf_counter() + 10
                while len(came) < sent and time.perf_counter() < limit:
                    time.sleep(1e-4)  # After which Python looks what other threads got.
                assert len(came) == sent
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
        over.set()
        other.join()


def test_a_signal_as_something_whole_begins_leaves_nothing_under_way(whole: Any) -> None:
    """Python calls its handler when it looks the next time, which may be inside."""
    luck, torn, raised = random.Random(5), len(interrupt.torn()), 0
    work, armed = whole(lambda: None), False

    def stop_once(number: int, frame: FrameType | None) -> None:
        nonlocal armed
        if armed:
            armed = False
            raise Stopped

    gc.disable()  # Where hypothesis has a callback, what is raised in it is lost.
    with contextlib.ExitStack() as ends, handler_of(signal.SIGALRM, stop_once):
        ends.callback(gc.enable)
        for _ in range(300):
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, luck.uniform(1e-4, 5e-4))
                until = time.perf_counter() + 10
                while time.perf_counter() < until:
                    for _ in range(1000):
                        work()
            except Stopped:
                raised += 1
            assert not interrupt.inside()
    assert raised == 300
    assert len(interrupt.torn()) == torn


CHAINED = """
import faulthandler, os, signal, sys
from offload import interrupt
for name in sys.argv[1:]:
    work = getattr(interrupt, name)(lambda: os.kill(os.getpid(), signal.SIGUSR1))
    signal.signal(signal.SIGUSR1, lambda *_: print("handled"))
    work()
    faulthandler.register(signal.SIGUSR1, chain=True, file=open(os.devnull, "w"))
    work()
    faulthandler.unregister(signal.SIGUSR1)
"""


def test_a_handler_below_python_that_calls_what_was_there_before() -> None:
    """As faulthandler does, which lies over ours then."""
    ways = ["by_exchange", *["by_note"] * (interrupt._native is not None)]
    printed, errors = Forked(lambda: anew(CHAINED, *ways)).communicate()
    assert printed == "handled\n" * (2 * len(ways)), errors


def test_errors_of_handlers_keep_what_led_to_them(whole: Any) -> None:
    def first(number: int, frame: FrameType | None) -> None:
        raise ValueError("first")

    def second(number: int, frame: FrameType | None) -> None:
        try:
            raise KeyError("led to it")
        except KeyError:
            raise ValueError("second")  # noqa: B904

    @whole
    def work() -> None:
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR2)

    with (
        handler_of(signal.SIGUSR1, first),
        handler_of(signal.SIGUSR2, second),
        pytest.raises(ValueError, match="second") as caught,
    ):
        work()
    led = caught.value.__context__
    assert isinstance(led, KeyError)
    assert isinstance(led.__context__, ValueError)


def test_what_ends_another_thread_tears_nothing(whole: Any) -> None:
    torn = interrupt.torn_times()

    @whole
    def end() -> None:
        raise SystemExit

    def ended() -> None:
        with pytest.raises(SystemExit):
            end()

    thread = threading.Thread(target=ended)
    thread.start()
    thread.join()
    assert interrupt.torn_times() == torn


def test_what_is_shown_as_handlers_is_what_was_set() -> None:
    if interrupt._native is None:
        pytest.skip("not compiled here")
    with handler_of(signal.SIGTERM, stop):
        assert interrupt.by_note(signal.getsignal)(signal.SIGTERM) is stop


def test_what_no_handler_can_raise_tears_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as an exception set from another thread: what is half done is not known."""
    monkeypatch.setattr(interrupt, "_torn", [])
    with attached(PLACEMENT, tmp_path) as run:
        run.loss().backward()
        seal = run.engine.executor.lanes.seal

        def broken(passage: Any) -> None:
            monkeypatch.setattr(run.engine.executor.lanes, "seal", seal)
            raise SystemExit(3)

        monkeypatch.setattr(run.engine.executor.lanes, "seal", broken)
        with pytest.raises(SystemExit):
            run.optimizer.step()
        for touch in (run.loss, run.step, run.model.state_dict):
            with pytest.raises(offload.EngineError, match="SystemExit was raised while the engine"):
                touch()


def test_a_chunk_that_cannot_be_queued_ends_every_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with attached(PLACEMENT, tmp_path) as run:
        run.loss().backward()

        def broken(passage: Any) -> None:
            raise MemoryError("on purpose")

        monkeypatch.setattr(run.engine.executor.lanes, "seal", broken)
        with pytest.raises(MemoryError):
            run.optimizer.step()
        for touch in (run.loss, run.step, run.model.state_dict):
            with pytest.raises(offload.EngineError, match="on purpose") as caught:
                touch()
            assert isinstance(caught.value.__cause__, MemoryError)


def test_a_step_within_what_is_whole_lets_no_signal_in(whole: Any) -> None:
    """Of an optimizer that holds signals back on its own."""
    assert callable(offload.attach)  # Loaded, and with it the engine tells those who step.
    done: list[str] = []

    @whole
    def run() -> None:
        of_steps.whole(signal.raise_signal, signal.SIGUSR1)
        done.append("step")
        signal.raise_signal(signal.SIGUSR1)
        done.append("rest")

    before = signal.signal(signal.SIGUSR1, lambda *_: done.append("handler"))
    try:
        run()
        assert done == ["step", "rest", "handler"]
        of_steps.whole(signal.raise_signal, signal.SIGUSR1)
        assert done[3:] == ["handler"]
    finally:
        signal.signal(signal.SIGUSR1, before)
