"""Shell completion: the script run by a real bash, and its words beside the flags there are."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from offload.cli import COMMANDS, completion, settings
from offload.cli.flags import flag
from tests.command import run


def completed(*typed):
    """What bash offers for the last of `typed`."""
    words = " ".join(json.dumps(word) for word in ("offload", *typed))
    told = f'COMP_WORDS=({words}); COMP_CWORD={len(typed)}; _offload; echo "${{COMPREPLY[@]}}"'
    bash = ["bash", "-c", completion.script("bash") + told]
    found = subprocess.run(bash, capture_output=True, text=True, check=True)
    assert not found.stderr
    return found.stdout.split()


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_what_bash_offers():
    assert completed("tr") == ["train"]
    assert set(completed("")) == {*COMMANDS, "--help", "--version"}
    assert completed("train", "--seq") == ["--seq-len"]
    assert completed("train", "--size", "1") == ["10m", "100m", "1b"]
    assert completed("train", "--params", "") == ["auto", "device", "cpu", "nvme"]
    assert completed("train", "--size", "10m", "--no-j") == ["--no-json"]
    assert completed("train", "--nvme-path", "/") == []
    for before in (["train", "--data"], ["train", "--lr"], ["report"], ["bench", "nvme"]):
        assert completed(*before, "") == []  # The shell offers files.
    assert completed("train", "--size", "=") == completed("train", "--size", "")
    assert completed("train", "--size", "=", "1") == ["10m", "100m", "1b"]
    assert {"adam", "nvme"} < set(completed("bench", ""))
    assert completed("bench", "n") == ["nvme"]
    assert completed("bench", "nvme", "--bl") == ["--blocks"]
    assert completed("doctor", "--j") == ["--json"]
    assert completed("completion", "b") == ["bash"]


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_what_fish_offers(tmp_path):
    def offered(typed):
        told = completion.script("fish") + f'complete -C "{typed}"'
        fish = ["fish", "--no-config", "-c", told]
        environment = {**os.environ, "HOME": str(tmp_path)}
        found = subprocess.run(fish, capture_output=True, text=True, check=True, env=environment)
        assert not found.stderr
        return found.stdout.split()

    assert offered("offload tr") == ["train"]
    assert set(offered("offload train --params ")) == {"auto", "device", "cpu", "nvme"}
    assert offered("offload train --seq") == ["--seq-len"]
    assert offered("offload bench n") == ["nvme"]
    assert offered("offload bench nvme --bl") == ["--blocks"]
    assert offered("offload train --plot /etc/host") == sorted(map(str, Path("/etc").glob("host*")))


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_flag_is_offered(shell):
    text = completion.script(shell)
    for key in settings.keys():  # noqa: SIM118
        assert f"{flag(key)} " in text, key
    assert "--paths" not in text


def test_the_command(capsys):
    assert run("completion", "bash") == 0
    assert capsys.readouterr().out == completion.script("bash")
    assert run("completion", "zsh") == 0
    assert capsys.readouterr().out.endswith("bashcompinit\n" + completion.script("bash"))
    assert run("completion") == 0
    assert "usage: offload completion" in capsys.readouterr().out
    assert run("completion", "bsh") == 2
    assert "did you mean bash?" in capsys.readouterr().err
