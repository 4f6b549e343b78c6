"""Runs as files: what is kept, what is damaged, and that every report says which run it is of."""

import json
import math
import os
import re
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from offload import runs
from offload.breakdown import breakdown, verdict
from offload.cli import report, report_html, report_list, report_timeline
from offload.cli.console import Output
from offload.kept import write_whole
from tests.command import SHORT, run
from tests.test_report import MADE


def test_a_file_holds_all_of_a_run(tmp_path):
    path = tmp_path / "deep" / "run.json"
    runs.save(MADE, path)
    assert runs.load(path) == MADE
    runs.save(replace(MADE, prediction=None), path)
    assert runs.load(path).prediction is None
    assert list(path.parent.iterdir()) == [path]


def test_a_link_stays_one_and_a_device_a_device(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "there")
    runs.save(MADE, tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert runs.load(tmp_path / "there") == MADE
    os.mkfifo(tmp_path / "pipe")
    with open(os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK), "rb", buffering=0) as pipe:
        write_whole(tmp_path / "pipe", "x")
        assert pipe.read(1) == b"x"
    assert (tmp_path / "pipe").is_fifo()


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "is no run: likely another kind of file"),
        ("[]", "is no run"),
        ("[" * 100_000, "is no run"),
        ('{"version": 1' + "0" * 9999, "is no run"),
        ('{"format": "x", "version": 1}', "is 'x' of version 1"),
        ('{"format": "offload run", "version": 1}', "another release wrote it; train again"),
        ('{"format": "offload run", "version": 9}', "a later release wrote it; show it with that"),
        ('{"format": "offload run", "version": 2}', "is a damaged run: command is None, expected"),
    ],
)
def test_what_is_no_run(text, told, tmp_path, capsys):
    path = written(tmp_path / "run.json", text)
    with pytest.raises(ValueError, match=told):
        runs.load(path)
    assert run("report", str(path)) == 2
    assert told in capsys.readouterr().err


def test_what_never_ends_is_no_run(monkeypatch, capsys):
    monkeypatch.setattr(runs, "RUN_BYTES_MAX", 1 << 20)
    assert run("report", "/dev/zero") == 2
    assert "/dev/zero is no run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def content(tmp_path_factory):
    """What a file of a run holds, as text."""
    path = tmp_path_factory.mktemp("runs") / "run.json"
    runs.save(MADE, path)
    return path.read_text()


DAMAGES = [
    (("steps",), "3", "steps is '3', expected a whole number from 0"),
    (("steps",), True, "steps is True"),
    (("misses",), -1, "misses is -1"),
    (("wall_s",), math.nan, "wall_s is nan, expected a number"),
    (("made",), "yesterday", "'yesterday', expected a time in ISO 8601"),
    (("model",), "x\x1b[2J", "expected a line of text"),
    (("command", 1), None, "command[1] is None"),
    (("spans", 3, 4), "x", "spans[3].stop is 'x', expected a number"),
    (("spans", 3), [1, 2], "spans[3] is [1, 2], expected a list of 7"),
    (("spans", 3, 0), "nowhere", "'nowhere', expected one of the lanes model,"),
    (("waits", 0), ["disk", 5.0, 4.0], "(5.0, 4.0), expected a start and a stop after it"),
    (("homes", 0, 1), "moon", "'moon', expected one of the tiers device, cpu, nvme"),
    (("tiers", "cpu"), [1], "tiers.'cpu' is [1], expected a list of 2"),
    (("stepped", 2, 1), 20.0, "expected a step after (2, 20.0, 3)"),
    (("prediction", "what_if", "disk"), [], "prediction.what_if.'disk' is []"),
    (("prediction", "step_s"), 0, "expected times of steps that take some"),
    (("prediction", "more"), 1, "expected none of that name: 'more'"),
    (("lanes",), [], "lanes is [], expected an object"),
]


@pytest.mark.parametrize(("where", "value", "told"), DAMAGES, ids=[str(d[0]) for d in DAMAGES])
def test_what_is_damaged_is_named(content, tmp_path, where, value, told):
    made = inside = json.loads(content)
    for key in where[:-1]:
        inside = inside[key]
    inside[where[-1]] = value
    with pytest.raises(ValueError, match="is a damaged run") as found:
        runs.load(written(tmp_path / "run.json", made))
    assert told in str(found.value)
    assert "train again" in str(found.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@st.composite
def damages(draw, value):
    """`value` with something else in one place, or something less, or something more."""
    if isinstance(value, (list, dict)) and value and draw(st.integers(0, 9)):
        made = value.copy()
        key = draw(st.sampled_from(range(len(value)) if isinstance(value, list) else sorted(value)))
        if draw(st.integers(0, 9)):
            made[key] = draw(damages(value[key]))
        else:
            del made[key]
        return made
    near = [value, -value, value * 1e9] if isinstance(value, float) else [value]
    return draw(JSON | st.sampled_from(near))


@given(st.data())
@settings(suppress_health_check=list(HealthCheck))
def test_a_run_with_anything_in_it_is_refused_or_shown(content, tmp_path, data):
    path = written(tmp_path / "run.json", data.draw(damages(json.loads(content))))
    told = ""
    try:
        made = runs.load(path)
        found = breakdown(made)
    except ValueError as error:
        told = str(error)
    if told:
        assert re.search("is no run|is a damaged run|of version|whole steps", told)
        return
    verdict(made, found)
    with open(os.devnull, "w") as nowhere:
        report.show(Output(file=nowhere), made, found, path)
    report_html.page(made, found, path).encode()
    json.dumps(report_timeline.timeline(made))


@given(st.binary(max_size=60), st.floats(0, 1))
@example(b"", 0.5)
@settings(suppress_health_check=list(HealthCheck))
def test_bytes_that_are_lost_or_wrong_are_told(content, tmp_path, wrong, at):
    text, place = content.encode(), int(at * len(content))
    path = tmp_path / "run.json"
    path.write_bytes(text[:place] + wrong + (text[place + len(wrong) :] if wrong else b""))
    with suppress(ValueError):
        runs.load(path)


def test_of_kept_runs_the_last_ones_stay(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert runs.kept() == []
    paths = [runs.keep(MADE) for _ in range(12)]
    assert len(set(paths)) == 12
    assert runs.kept() == paths[:1:-1]
    paths[-1].with_suffix(".html").touch()
    late = runs.keep(replace(MADE, made="2026-12-01T00:00:00"))
    monkeypatch.setattr(runs, "KEPT_BYTES_MAX", 1)
    last = runs.keep(replace(MADE, made="2026-12-02T00:00:00"))
    assert list(runs.folder().iterdir()) == [last]
    assert (late.stem, last.stem) == ("2026-12-01-000000", "2026-12-02-000000")


def test_how_long_ago_is_told():
    for seconds, told in ((5, "less than a minute"), (61, "1 minute"), (7300, "2 hours")):
        made = datetime.now() - timedelta(seconds=seconds)
        assert report_list.age(made.isoformat()) == told
    assert report_list.age("2020-01-01T00:00:00+00:00").endswith("days")


def test_a_place_that_cannot_be_written_is_why_no_run_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "access", lambda path, _: str(path) != str(tmp_path))
    assert run("report") == 2
    told = capsys.readouterr().err
    assert f"this user may not write to {tmp_path}; try: offload train --trace-file FILE" in told


def test_a_full_disk_is_why_no_run_is_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    full = SimpleNamespace(total=1 << 30, used=1 << 30, free=4096)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    assert run("report") == 2
    assert "as the disk is full; free some space, or try: offload" in capsys.readouterr().err


def test_help_is_the_same_after_an_argument(capsys):
    assert run("report", "run.json", "--help") == 0
    assert "[RUN]" in capsys.readouterr().out


def test_from_training_to_a_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("report") == 2
    assert "holds no run; likely nothing was trained yet" in capsys.readouterr().err
    assert run("report", "--list") == 0
    assert "holds no run" in capsys.readouterr().out
    assert run(*SHORT, "--trace", "--optimizer", "cpu") == 0
    assert "note: offload report shows where the time went" in capsys.readouterr().err
    assert run(*SHORT) == 0  # Leaves nothing, so the report is of the one before.
    capsys.readouterr()
    assert run("report") == 0
    shown = capsys.readouterr().out
    for told in ("a step took", "forward and backward", "Lanes, in a step", "bounds the step"):
        assert told in shown
    (path,) = (one for one in runs.folder().iterdir() if one.suffixes == [".json"])
    names = {f"{path.stem}{ending}" for ending in (".json", ".html", ".trace.json")}
    assert {one.name for one in runs.folder().iterdir()} == names
    assert json.loads(path.with_suffix(".trace.json").read_text())["traceEvents"]
    # Which run it is of.
    typed = " ".join(["offload", *SHORT, "--trace", "--optimizer", "cpu"])
    assert shown.startswith(f"{typed}\n")
    assert f"as {path}" in shown
    assert "less than a minute ago" in shown
    assert typed in path.with_suffix(".html").read_text()
    assert run("report", "--list", "--json") == 0
    (listed,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (listed["run"], listed["steps"]) == (str(path), 3)
    assert run("report", path.stem, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["command"]) == (str(path), typed.split())
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"])


def test_what_a_report_refuses(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = runs.keep(MADE)
    for arguments, told in (
        ((path, "--html", "/dev/null/x.html"), "try --html FILE in a folder of yours"),
        ((path, "--html", path), "two of them are one file"),
        (("a", "b"), "expected one file"),
        (("a", "--list"), "contradicts --list"),
        (("a",), "a: there is no such run; likely it is misspelt; try: offload report --list"),
    ):
        assert run("report", *map(str, arguments)) == 2
        assert told in capsys.readouterr().err
    (path.parent / "2027.json").write_text("{}")
    assert run("report", "--list") == 0
    assert "is no run" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(*SHORT, "--trace", "--steps", "1") == 0
    assert "note: no trace was left at" in capsys.readouterr().err
