"""Terminals of few columns, or whose encoding lacks most characters: nothing is lost on them."""

import fcntl
import os
import pty
import re
import struct
import termios

import pytest

from tests.command import SHORT, run
from tests.forked import fork, wait

COLUMNS = 60


def on_terminal(encoding):
    """Exit status and text of a short training on a terminal of `COLUMNS`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    options = {"encoding": encoding, "errors": "surrogateescape"}
    child = fork(lambda: run(*SHORT), (theirs,) * 3, **options)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 1 << 16):
            seen += part
    except OSError:  # Linux says so where the other side is closed.
        pass
    os.close(ours)
    return wait(child), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode("latin-1"))


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_run_tells_its_result_in_any_encoding(encoding, monkeypatch):
    for name in ("COLUMNS", "LINES", "LANG", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    # In the C locale what an encoding lacks is met in another way.
    status, shown = on_terminal(encoding)
    assert status == 0, shown
    assert "held-out loss" in shown
    assert "Lanes" in shown
    assert "\\u" not in shown
