"""Shell completion: the scripts of tyro's, run by the shells that are here."""

import os
import shutil
import subprocess

import pytest

from offload.cli import COMMANDS, completion, options
from offload.cli.flags import fields_of, flag
from tests.command import run


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_what_bash_offers(tmp_path):
    script = tmp_path / "offload.bash"
    script.write_text(completion.script("bash"))

    def completed(*typed):
        words = " ".join(f"'{word}'" for word in ("offload", *typed))
        told = f"source {script}; COMP_WORDS=({words}); COMP_CWORD={len(typed)}; "
        told += (
            "$(complete -p offload | sed 's/.*-F //; s/ .*//'); printf '%s\\n' \"${COMPREPLY[@]}\""
        )
        found = subprocess.run(["bash", "-c", told], capture_output=True, text=True, check=True)
        return {line.partition("\t")[0] for line in found.stdout.splitlines()}

    assert completed("tr") == {"train"}
    assert set(COMMANDS) <= completed("")
    assert completed("train", "--seq") == {"--seq-len"}
    assert completed("train", "--size", "1") == {"10m", "100m", "1b"}
    assert completed("bench", "n") == {"nvme"}
    assert completed("bench", "nvme", "--si") == {"--size"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_what_fish_offers(tmp_path):
    told = completion.script("fish") + 'complete -C "offload train --seq"'
    fish = ["fish", "--no-config", "-c", told]
    environment = {**os.environ, "HOME": str(tmp_path)}
    found = subprocess.run(fish, capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.split()[0] == "--seq-len"


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_flag_is_offered(shell):
    text = completion.script(shell)
    for one in fields_of(options.Train):
        assert flag(one.name) in text, one.name
    for own in ("--writes-max", "--elements", "--list"):
        assert own in text


def test_the_command(capsys):
    assert run("completion", "bash") == 0
    assert capsys.readouterr().out == completion.script("bash")
    assert run("completion") == 0
    assert "usage: offload completion" in capsys.readouterr().out
    assert run("completion", "bsh") == 2
    assert "did you mean bash?" in capsys.readouterr().err
