"""Terminals of few columns, or whose encoding lacks most characters: nothing is lost on them."""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from functools import partial

import pytest

from aio.figures import Figure, Found, Sample, Setting
from aio.fio import Compared
from cpu_adam import bench
from offload.cli import bench_adam_report, bench_nvme_report
from offload.cli.bench_nvme_verdict import EachWay, Verdict
from offload.cli.console import Output
from tests.command import SHORT, run
from tests.forked import fork, wait

COLUMNS = 60


def in_fork(terminal, encoding):
    options = {"encoding": encoding, "errors": "surrogateescape"}
    return partial(wait, fork(lambda: run(*SHORT), (terminal,) * 3, **options))


def by_itself(terminal, encoding):
    """An interpreter of its own, which finds these streams by its environment."""
    command = [sys.executable, "-m", "offload", *SHORT]
    variables = {**os.environ, "PYTHONIOENCODING": encoding, "LC_ALL": "C"}
    return subprocess.Popen(
        command, stdin=terminal, stdout=terminal, stderr=terminal, env=variables
    ).wait


def on_terminal(begin, encoding):
    """Exit status and text of a short training on a terminal of `COLUMNS`."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    ended = begin(theirs, encoding)
    os.close(theirs)
    seen = b""
    try:
        while part := os.read(ours, 1 << 16):
            seen += part
    except OSError:  # Linux says so where the other side is closed.
        pass
    os.close(ours)
    return ended(), re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", seen.decode("latin-1"))


@pytest.mark.parametrize(
    ("begin", "encoding"),
    [
        (in_fork, "ascii"),
        pytest.param(by_itself, "ascii", marks=pytest.mark.slow),
        pytest.param(by_itself, "latin-1", marks=pytest.mark.slow),
    ],
)
def test_a_run_tells_its_result_in_any_encoding(begin, encoding, monkeypatch):
    for name in ("COLUMNS", "LINES", "LANG", "PYTHONUTF8"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    # In the C locale what an encoding lacks is met in another way.
    status, shown = on_terminal(begin, encoding)
    assert status == 0, shown
    assert "held-out loss" in shown
    assert "Lanes" in shown
    assert "\\u" not in shown
    assert re.search(r"^ \d\.\d{3} ['.:]", shown, re.M)


def drawn(table, *, encoding="utf-8", columns=COLUMNS):
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding=encoding)
    Output(file=file, width=columns, force_terminal=True, no_color=True).print(table)
    file.flush()
    text = re.sub(r"\x1b\[[0-9;?]*m", "", raw.getvalue().decode(encoding))
    assert max(map(len, text.splitlines())) <= columns
    return text


def spread(value):
    return bench.Spread(value, value * 0.9, value * 1.1)


def whole(text, *words):
    """Whether all words are there, each in one piece or broken over lines of its column."""
    squeezed = re.sub(r"\s", "", text)
    assert not [word for word in words if re.sub(r"\s", "", word) not in squeezed], text


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_figures_of_the_update_keep_all_columns(encoding):
    figure = bench.Figure(
        role="peer", name="torch.optim fused", rounds=3, seconds=spread(0.1), of_peer=spread(1.5),
        parameters_per_s=spread(1.2e9), bytes_per_s=spread(126e9), of_stream=spread(0.98),
    )  # fmt: skip
    group = bench.Group(
        format="exact", threads=2, elements=10**8, bytes_per_element=26.0, small=None,
        figures=(figure,),
    )  # fmt: skip
    text = drawn(bench_adam_report.table([group], narrow=True), encoding=encoding)
    whole(text, "threads", "M/s", "GB/s", "of peer", "1.50", "126.0", "1200", "(0.88-1.08)", "0.98")
    assert "\u2026" not in text


def test_figures_of_drives_keep_all_columns():
    setting = Setting("linux_aio", 512 << 10, 128)
    sample = Sample(1.0, 12_340_000_000, 0, 1.5, (0,) * 17 + (9,))
    figure = Figure.of("write", setting, [sample])
    found = Found(
        path="/a", file_bytes=1, file_system="ext4", direct=True, notice=None, cells=(),
        fill_bytes_per_s=1e9, bytes_written=0, figures=(figure,),
    )  # fmt: skip
    (table,) = bench_nvme_report.shown(found, narrow=True)
    titles = ("GB/s", "GiB/s", "p50 ms", "p99 ms", "CPU s/GB", "12.34", "11.49", "0.122")
    p99 = f"{figure.p99_s * 1e3:.3g}"
    whole(drawn(table), *titles, p99, "512", "linux_aio", f"{figure.p50_s * 1e3:.3g}")


def test_what_follows_for_formats_and_beside_fio_keeps_all_columns():
    verdict = Verdict(
        parameters=70e9, model="70b", gpu="h100", gpu_flops=989e12, endurance_bytes=600e12,
        each_way=EachWay(1e9, True),
    )  # fmt: skip
    text = drawn(bench_nvme_report.formats(verdict, narrow=True))
    whole(text, "bytes", "M/s", "s/step", "tokens/step", "GB/step", "endured", "compact", "700")
    setting = Setting("io_uring", 1 << 20, 32)
    compared = Compared(
        mode="both", setting=setting, fio_setting=setting, ours_bytes_per_s=(1e9, 1.1e9),
        fio_bytes_per_s=(1e9, 1e9), ours_cpu_s_per_gb=0.5, fio_cpu_s_per_gb=1.0,
    )  # fmt: skip
    (table,) = bench_nvme_report.shown([compared], narrow=True)
    whole(drawn(table), "ratio", "CPU ratio", "0.50", "io_uring", "1.05")
