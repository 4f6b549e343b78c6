"""Runs as files: what is kept, what is damaged, and that every report says which run it is of."""

import json
from dataclasses import replace

import pytest

from offload import reporting
from tests.command import SHORT, run
from tests.test_report import MADE


def test_a_file_holds_all_of_a_run(tmp_path):
    path = tmp_path / "deep" / "run.json"
    for made in (MADE, replace(MADE, prediction=None)):
        reporting.save(made, path)
        assert reporting.load(path) == made
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"format": "another program\'s", "version": 3}',
        '{"format": "offload run", "version": 2}',
        '{"format": "offload run", "version": 3}',
        "{" + '"cut off": ' * 3,
    ],
)
def test_what_is_no_run_is_refused_in_a_sentence(text, tmp_path, capsys):
    path = tmp_path / "run.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a run that this release can show"):
        reporting.load(path)
    assert run("report", str(path)) == 2
    told = capsys.readouterr().err
    assert "see offload report --list" in told
    assert told.count("\n") == 1


def test_the_last_runs_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert reporting.kept() == []
    times = [MADE.made, MADE.made, *(f"2026-12-0{day}T00:00:00" for day in range(1, 6))]
    paths = []
    for made in times:
        paths.append(reporting.keep(replace(MADE, made=made)))
        paths[-1].with_suffix(".html").touch()
    assert len(set(paths)) == len(times)
    kept = paths[: -reporting.KEPT_MAX - 1 : -1]
    assert reporting.kept() == kept
    pages = [path.with_suffix(".html") for path in kept]
    assert sorted(reporting.folder().iterdir()) == sorted([*kept, *pages])


def test_help_is_the_same_after_an_argument(capsys):
    assert run("report", "run.json", "--help") == 0
    assert "[RUN]" in capsys.readouterr().out


def test_from_training_to_a_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("report") == 2
    assert "holds no run; likely nothing was trained yet" in capsys.readouterr().err
    assert run("report", "--list") == 0
    assert "holds no run" in capsys.readouterr().out
    assert run(*SHORT, "--optimizer", "cpu") == 0
    assert "note: offload report shows where the time went" in capsys.readouterr().err
    assert run("report") == 0
    shown = capsys.readouterr().out
    for told in ("a step took", "forward and backward", "Lanes, in a step", "bounds the step"):
        assert told in shown
    (path,) = (one for one in reporting.folder().iterdir() if one.suffixes == [".json"])
    names = {f"{path.stem}{ending}" for ending in (".json", ".html")}
    assert {one.name for one in reporting.folder().iterdir()} == names
    # Which run it is of.
    typed = " ".join(["offload", *SHORT, "--optimizer", "cpu"])
    assert shown.startswith(f"{typed}\n")
    assert f"as {path}" in shown
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
    path = reporting.keep(MADE)
    for arguments, told in (
        (("a", "b"), "expected one file"),
        (("a", "--list"), "contradicts --list"),
        (("a",), "a: there is no such run; likely it is misspelt; try: offload report --list"),
    ):
        assert run("report", *map(str, arguments)) == 2
        assert told in capsys.readouterr().err
    (path.parent / "2027.json").write_text("{}")
    assert run("report", "--list") == 0
    assert "is not a run" in capsys.readouterr().out


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(*SHORT, "--steps", "1") == 0
    assert "note: no trace was left at" in capsys.readouterr().err
