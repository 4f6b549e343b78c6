"""`offload report`: what a trace holds, shares that add up, the page and the timeline."""

import json
import re
import sys
import time
from collections import deque
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload import recording
from offload.cli import report
from offload.cli.breakdown import bound, breakdown, verdict
from offload.planning import profile
from offload.planning.layout import Place
from offload.planning.machine import Machine
from offload.program.ops import Lane, Op, Use, Value, Verb
from offload.program.simulate import simulate
from offload.reporting import OTHER, Prediction, Run, Span, Wait, clip, seconds
from offload.runtime.stats import SPANS_MAX, Ran, Stepped, Trace
from tests import test_overlap as overlap_tests
from tests.examples import cheap
from tests.paced import paced
from tests.profiles import moved

INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(sorted).map(tuple))


def whole(found):
    """The whole seconds in any of some intervals."""
    return {at for start, stop in found for at in range(start, stop)}


@given(INTERVALS, INTERVALS, st.integers(0, 30), st.integers(0, 30))
@cheap(100)
def test_intervals_are_sets_of_seconds(one, other, since, until):
    assert seconds(one) == len(whole(one))
    assert seconds(one, other) == len(whole(one) | whole(other))
    assert whole(clip(one, since, until)) == {s for s in whole(one) if since <= s < until}


MADE = Run(
    made="2026-11-21T12:00:00",
    command=["offload", "train", "--data", "a file"],
    model="1,000 parameters in bfloat16, 2 units",
    device="cpu",
    device_is_host=True,
    residents=0,
    versions={"torch": "2.13.0"},
    steps=3,
    homes=[["weight", "cpu", 1 << 20], ["state", "nvme", 6 << 20]],
    tiers={"device": [0, 0], "cpu": [1 << 20, 1 << 30], "nvme": [6 << 20, 1 << 40]},
    drive_bytes_per_s=0.0,
    spans=[
        Span("model", "forward", "a", 0.0, 9.0, 0),
        Span("model", "forward", "a<script>", 10.0, 14.0, 0),
        Span("model", "backward", "b", 13.0, 17.0, 0),
        Span("disk", "state nvme to cpu", "a", 11.0, 15.0, 400),
        Span("disk", "state cpu to nvme", "a", 15.0, 19.0, 300),
        Span("cpu", "update", "a", 15.0, 15.5, 50),
        Span("disk", "state cpu to nvme", "a", 31.0, 32.0, 1000),
        Span("engine", "call", "", 9.0, 11.0, 0),
        Span("engine", "call", "", 15.5, 20.5, 0),
    ],
    waits=[Wait("disk", 16.0, 19.0), Wait("cpu", 19.0, 19.5), Wait("disk", 2.0, 3.0)],
    stepped=[[1, 10.0, 1], [2, 20.0, 3], [3, 30.0, 4]],
    since=0.0,
    prediction=Prediction(9.5, 1.0, {"disk": 4.0}, {}, {"model": 8.0, "disk": 6.0, "cpu": 9.5}),
    unpredicted="",
)
"""Two whole steps, from 10 to 30."""


ROWS = ["model 1", "model 2", "engine", "waiting", "cpu", "disk"]


def test_the_shares_of_a_step():
    found = breakdown(MADE)
    assert (found.steps, found.step_s, found.misses) == (2, 10.0, 3)
    # The model worked from 10 to 17; of that, calls took 10 to 11 and 15.5 on, waiting from 16 on.
    parts = {"model": 2.25, "disk": 1.5, "cpu": 0.25, "engine": 1.25, "other": 4.75}
    assert found.parts == parts
    assert sum(found.parts.values()) == found.step_s
    assert found.busy == {"disk": 4.0, "cpu": 0.25}
    assert found.bytes == {"disk": 350.0, "cpu": 25.0}


def test_what_was_forgotten_is_not_looked_at():
    found = breakdown(replace(MADE, since=15.0))
    assert (found.since, found.until, found.steps) == (20.0, 30.0, 1)
    for since, stepped in ((25.0, MADE.stepped), (0.0, MADE.stepped[:1]), (0.0, [])):
        with pytest.raises(ValueError, match="holds no whole step; likely it was too short"):
            breakdown(replace(MADE, since=since, stepped=stepped))


@pytest.mark.parametrize(
    ("changes", "drive", "told"),
    [
        (
            {},
            90,
            "moved 0.00 GB/s while it worked; bench nvme measured 0.00 for reading and writing",
        ),
        ({}, 90, "at once."),
        ({}, 0, ""),
        ({"size": 1 << 30}, 1 << 30, "at once. Likely the model and the updates take"),
        ({"size": 1 << 30, "host": False}, 1 << 30, "at once. Likely other programs use the drive"),
    ],
)
def test_the_speed_of_the_disk_lane_is_held_against_the_drive(changes, drive, told):
    spans = [one._replace(bytes=changes.get("size", one.bytes)) for one in MADE.spans]
    host = changes.get("host", True)
    made = replace(MADE, spans=spans, drive_bytes_per_s=drive, device_is_host=host)
    said = " ".join(verdict(made, breakdown(made)))
    assert told in said
    assert ("bench nvme measured" in said) == bool(drive)
    assert ("Likely" in said) == ("Likely" in told)


def test_what_bounds_the_step_is_what_would_help():
    found = breakdown(MADE)
    assert bound(MADE, found) == "disk"
    told = " ".join(verdict(MADE, found))
    assert "The disk lane bounds the step: it works 40% of the time, and training waits 18%" in told
    assert "save 37% of the step" in told
    assert "Try one more drive (nvme_path takes several)" in told
    compute = replace(MADE, prediction=Prediction(9.5, 0, {}, {}, {"model": 5.0, "disk": 9.0}))
    assert bound(compute, found) == "model"
    assert "without offloading: 22% of it." in verdict(compute, found)[0]
    assert "A device twice as fast would save 47%" in verdict(compute, found)[1]
    calling = replace(found, parts={**found.parts, "engine": 8.0})
    assert bound(MADE, calling) == "engine"
    assert "engine itself bounds the step: 80%" in " ".join(verdict(MADE, calling))
    waiting = replace(found, parts={**found.parts, "other": 8.0})
    assert bound(compute, waiting) == "model"  # Saves 4.5 of 9.5 s, half of the rest 4.
    assert bound(MADE, waiting) == "other"  # The disk saves 3.5 s.
    assert "more workers of the DataLoader" in " ".join(verdict(MADE, waiting))
    nothing = replace(MADE, prediction=Prediction(9.5, 0, {}, {}, {"model": 9.45}))
    assert bound(nothing, found) == "other"
    alone = replace(MADE, prediction=None, unpredicted="for a reason")
    assert verdict(alone, found)[-1] == "What would help was not simulated: for a reason."
    idle = replace(found, parts={"model": 9.9, "engine": 0.1}, busy={})
    assert "lives on the device" in verdict(replace(MADE, prediction=None), idle)[-1]


@pytest.mark.parametrize("lane", ["model", *(one.value for one in Lane if one != Lane.COMPUTE)])
def test_every_lane_that_can_bound_a_step_has_advice(lane):
    predicted = Prediction(9.5, 0, {}, {}, {lane: 1.0})
    made = replace(MADE, prediction=predicted, waits=[Wait(lane, 16.0, 19.0)])
    report.page(made, breakdown(made), "")
    (_, advice) = verdict(made, breakdown(made))
    assert "twice as fast would save 89% of the step" in advice
    assert "Try " in advice


class Elements(HTMLParser):
    """Names of elements that are open, and what is asked of elsewhere."""

    EMPTY = ("meta", "br", "link")

    def __init__(self):
        super().__init__()
        self.open, self.asked, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.asked += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if self.open[-1:] != ["script"] else ""


def test_the_page_is_whole_and_asks_for_nothing():
    found = breakdown(MADE)
    text = report.page(MADE, found, report._text(MADE, found, Path("a<b.json")))
    page = Elements()
    page.feed(text)
    assert page.open == []
    assert page.asked == []
    assert not re.search(r"<!--[A-Z]", text)
    assert "The disk lane bounds the step" in page.text
    assert "waiting for disk" in page.text
    for about in ("offload train --data 'a file'", "1,000 parameters", "2.13.0", "a<b.json"):
        assert about in page.text
    (data,) = re.findall(r'<script id="data" type="application/json">(.*?)</script>', text, re.S)
    found = json.loads(data)
    assert [name for name, _ in found["rows"]] == ROWS
    assert found["rows"][0][1][1][3] == "a<script>"  # Which its bar is labelled by.
    assert "const unit = span[3]" in text
    assert "point at it to see what was done" in " ".join(page.text.split())


def attached(layers=3, pace=None, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = offload.Config(**{"params": "cpu", "gradients": "cpu", "optimizer": "cpu"} | options)
    return offload.attach(model, optimizer, config, pace=pace)


def stepped(model, optimizer, steps, width=32):
    for _ in range(steps):
        model(torch.ones(4, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def predicted_and_measured(optimizer):
    """Seconds that each lane works in a step, as the simulator has it and as the engine had it."""
    model, optimizer = attached(layers=12, optimizer=optimizer)
    with optimizer.engine as engine:
        for _ in range(5):
            for _ in range(2):
                model(torch.ones(512, 32)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():  # An evaluation is no micro-batch.
                model(torch.ones(1, 32))
        engine.settle()
        made = recording.run_of(engine)
    found = breakdown(made)
    predicted = {name: made.prediction.busy[name] for name in found.busy}
    assert ("compute" in predicted) == (engine.plan.home("state", 0).tier == "device")
    return made, predicted, found.busy


@pytest.mark.parametrize("optimizer", ["device", "cpu"])
def test_what_is_predicted_of_a_lane_is_what_is_measured(optimizer):
    """At the speeds that were seen, the lanes of the simulator work as long as the engine's did.

    States on the device are updated there: on the same lane as the user's own compute. One of a
    few tries, as a lane of a millisecond is as long again where others have the processor.
    """
    for _ in range(5):
        made, predicted, measured = predicted_and_measured(optimizer)
        if predicted == pytest.approx(measured, rel=0.3):
            break
    else:
        pytest.fail(f"predicted {predicted}, measured {measured}")
    # With states on the host a faster device updates nothing faster: it is the user's own compute.
    assert made.prediction.faster["model"] < made.prediction.step_seconds


@pytest.mark.parametrize("micro_batches", [None, 1])
def test_an_engine_s_run(micro_batches, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["here/train.py", "--token", "secret"])
    model, optimizer = attached(micro_batches=micro_batches)
    with optimizer.engine as engine:
        stepped(model, optimizer, 5)
        engine.settle()
        made, report = recording.run_of(engine), engine.report()
    assert [number for number, _, _ in made.stepped] == [1, 2, 3, 4, 5]
    assert made.command == ["train.py"]  # Of its arguments nothing.
    assert made.model == "3,168 parameters in float32, 3 units"
    assert (made.device_is_host, made.versions["torch"]) == (True, torch.__version__)
    for lane, use in report.lanes.items():
        own = [span for span in made.spans if span.lane == lane]
        assert len(own) == use.operations
        assert sum(span.bytes for span in own) == use.bytes
        assert sum(s.stop - s.start for s in own) == pytest.approx(use.busy_s, abs=1e-6)
        waited = sum(w.stop - w.start for w in made.waits if w.lane == lane)
        assert waited == pytest.approx(use.exposed_s, abs=1e-6)
    model_spans = [span for span in made.spans if span.lane == "model"]
    assert {span.unit for span in model_spans} == {"0", "1", "2"}
    assert sum(span.name == "forward" for span in model_spans) == 15
    found = breakdown(made)
    assert found.steps == 3  # In the first interval are two steps' updates.
    assert sum(found.parts.values()) == pytest.approx(found.step_s)
    assert found.parts["engine"] > 0
    assert made.prediction.step_seconds > 0
    assert set(made.prediction.faster) <= {"model", *report.lanes}


def test_a_run_begins_with_a_wait_where_that_was_first(monkeypatch):
    """Perfetto drops what is before 0, and says that the file is broken."""
    model, optimizer = attached()
    with optimizer.engine as engine:
        stepped(model, optimizer, 2)
        engine.settle()
        trace = engine.runner.stats.traced()
        first = min(ran.start for ran in trace.ran)
        trace.waited.appendleft(Wait(Lane.H2D, first - 1, first))
        monkeypatch.setattr(engine.runner.stats, "traced", lambda: trace)
        made = recording.run_of(engine)
    assert min(one.start for one in (*made.spans, *made.waits)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["cpu", "nvme"])
def test_on_a_paced_device_the_shares_are_those_that_were_asked_for(
    placement, tmp_path, monkeypatch
):
    """Compute sleeps for a known time, and the disk is paced slower than that.

    What is measured, so all but `other`, adds up to the step by another clock: the loop's own.
    """
    monkeypatch.setattr(profile, "FUSED_BYTES_MAX", 0)
    seconds = 0.004
    pace = overlap_tests.Pace()
    case = (placement,) * 3, tmp_path, overlap_tests.SMALL
    model, optimizer = overlap_tests.attached(case, seconds, pace=pace)
    x, ends = torch.zeros(4, dtype=torch.bfloat16, requires_grad=True), []
    with optimizer.engine as engine:
        for _ in range(5):
            model(x).sum().backward()
            optimizer.step()
            ends.append(time.perf_counter())
            optimizer.zero_grad()
        made = recording.run_of(engine)
    found = breakdown(made)
    assert found.steps == 3
    assert 3 * overlap_tests.UNITS * seconds <= found.parts["model"]
    measured = sum(spent for name, spent in found.parts.items() if name != OTHER)
    assert measured == pytest.approx((ends[-1] - ends[1]) / 3, rel=0.02)
    if placement == "nvme":
        assert bound(made, found) == "disk"
        assert made.prediction.step_seconds == pytest.approx(found.step_s, rel=0.1)


def test_ops_of_a_lane_that_overlap_share_its_time():
    """Of 400 bytes read and written in 2 s, two ops at a time, the lane has moved 200 a second."""
    value = Value("weight", 0)
    drive, memory = Use(Place("nvme", "home"), value), Use(Place("cpu", "home"), value)
    ran = []
    for number, (source, into) in enumerate([(drive, memory), (memory, drive)] * 2):
        op = Op(Lane.DISK, Verb.MOVE, value, (source,), (into,), 100, 0)
        ran.append(Ran(op, number // 2, number // 2 + 1))
    machine = recording._machine(ran, device_is_cpu=True)
    assert machine.disk_read_bytes_per_s == machine.disk_write_bytes_per_s == 200


def test_a_ring_says_from_when_it_is_whole():
    trace = Trace(deque(maxlen=SPANS_MAX), deque(), deque(maxlen=1), deque())
    assert trace.since == 0.0
    for k in range(SPANS_MAX + 10):
        trace.ran.append(Ran(None, k, k + 0.5))
    trace.stepped.append(Stepped(1, 5.0, 0))
    assert trace.since == 10.5


def test_calls_into_another_engine_are_not_this_one_s():
    """What the other one's lanes are waited for takes the time of `other`: paced, most of it."""
    model, optimizer = attached(layers=2)
    beside, theirs = attached(layers=6, pace=lambda op, since: since + 0.015)
    with optimizer.engine as engine, theirs.engine as other:
        for _ in range(4):
            stepped(model, optimizer, 1)
            stepped(beside, theirs, 1)
        made, of_other = recording.run_of(engine), recording.run_of(other)
    found, slow = breakdown(made), breakdown(of_other)
    assert found.parts["engine"] + found.waited_s < 0.3 * found.step_s
    assert slow.parts["engine"] + slow.waited_s > 0.5 * slow.step_s
    assert bound(made, found) == OTHER


@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_the_simulator_moves_what_the_engine_does(micro_batches, tmp_path):
    """Weights that a micro-batch finds in their slots from the backward before are not copied."""
    where = {"params": "nvme", "nvme_path": tmp_path, "cpu_memory": "2MiB"}
    model, optimizer = attached(layers=5, micro_batches=micro_batches, **where)

    def step():
        for _ in range(micro_batches):
            model(torch.ones(4, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.settle()
        return {name: use.bytes for name, use in engine.report().lanes.items()}

    with optimizer.engine as engine:
        step()
        before, after = step(), step()
        made = simulate(
            recording.program_of(engine),
            Machine(device_bytes=0, cpu_bytes=0),
            lambda unit, verb: 0.1,
            steps=2,
            micro_batches=micro_batches,
        )
    found = {name: after[name] - before[name] for name in after}
    assert found["h2d"]
    assert found == {lane.value: moved(made, lane) // 2 for lane in Lane}


def test_on_an_accelerator_the_report_says_what_its_times_are(capsys):
    """Queueing and waiting for it are one part, and nothing is said of a faster device."""
    made = replace(MADE, device="cuda:0", device_is_host=False)
    made = replace(made, prediction=replace(MADE.prediction, faster={"disk": 9.4}))
    found = breakdown(made)
    assert found.parts == {"model": 7.0, "disk": 1.5, "cpu": 0.25, "engine": 1.25}
    told = " ".join(verdict(made, found))
    assert (
        "Your own code (model, data, loss) bounds the step, as it would without offloading: 70%"
        in told
    )
    assert "Times are those of the host's thread: cuda:0 computes beside it" in told
    assert "forward, backward, data, loss" in report._text(made, found, Path("run.json"))
    assert "Times are those" not in " ".join(verdict(MADE, breakdown(MADE)))


def test_a_step_of_too_many_operations_is_not_simulated_and_it_is_told(monkeypatch):
    model, optimizer = attached()
    with optimizer.engine as engine:
        stepped(model, optimizer, 5)
        engine.settle()
        monkeypatch.setattr(recording, "SIMULATED_OPS_MAX", 0)
        refused = recording.run_of(engine)
        told = re.match("a step has ([0-9]+) operations, more than", refused.unpredicted)
        monkeypatch.setattr(recording, "SIMULATED_OPS_MAX", int(told[1]))
        assert recording.run_of(engine).prediction is not None
    assert refused.prediction is None
    assert f"was not simulated: {refused.unpredicted}." in verdict(refused, breakdown(refused))[1]


def test_a_run_on_an_accelerator():
    with paced() as device:
        model, optimizer = attached(micro_batches=1)
        with optimizer.engine as engine:
            for _ in range(4):
                device.backward(model(torch.ones(4, 32)).sum())
                optimizer.step()
                optimizer.zero_grad()
            engine.settle()
            made = recording.run_of(engine)
        device.timeline.finish()
    assert not made.device_is_host
    assert OTHER not in breakdown(made).parts
    assert "model" not in made.prediction.faster
    assert "Times are those of the host's thread" in verdict(made, breakdown(made))[-1]
