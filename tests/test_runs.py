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
    assert "a run of another release: train again" in told
    assert told.count("\n") == 1


def test_help_is_the_same_after_an_argument(capsys):
    assert run("report", "run.json", "--help") == 0
    assert "[RUN]" in capsys.readouterr().out


def test_from_training_to_a_report(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert run("report") == 2
    assert (
        "there is no such run; likely it is misspelt, or nothing was trained yet"
        in capsys.readouterr().err
    )
    assert run(*SHORT, "--optimizer", "cpu") == 0
    assert "note: offload report shows where the time went" in capsys.readouterr().err
    assert run("report") == 0
    shown = capsys.readouterr().out
    for told in ("a step took", "forward and backward", "Lanes, in a step", "bounds the step"):
        assert told in shown
    path = reporting.last()
    assert {one.name for one in path.parent.iterdir()} == {"run.json", "run.html"}
    # Which run it is of.
    typed = " ".join(["offload", *SHORT, "--optimizer", "cpu"])
    assert shown.startswith(f"{typed}\n")
    assert f"as {path}" in shown
    assert typed in path.with_suffix(".html").read_text()
    assert run("report", str(path), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["run"], found["command"]) == (str(path), typed.split())
    assert sum(found["parts"].values()) == pytest.approx(found["step_s"])


def test_what_a_report_refuses(capsys):
    for arguments, told in (
        (("a", "b"), "expected one file"),
        (("a",), "a: there is no such run; likely it is misspelt"),
    ):
        assert run("report", *arguments) == 2
        assert told in capsys.readouterr().err


def test_a_cache_that_cannot_be_written_is_a_note(tmp_path, capsys, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert run(*SHORT, "--steps", "1") == 0
    assert "note: no trace was left at" in capsys.readouterr().err
