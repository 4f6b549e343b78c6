"""`offload bench adam` on a few thousand parameters: what it shows, refuses, and how it stops.

Figures are not judged: that is what the benchmark is for, on a machine at rest.
"""

import json
import re
import signal
import sys
from functools import partial

import pytest
import torch

import cpu_adam
import offload.cli
from cpu_adam import FORMATS, bench, choice, peers
from offload.cli import EXIT_BAD_INPUT, bench_adam, bench_adam_report, main
from tests.covering import by_turns

TINY = ["bench", "adam", "--elements", "8Ki", "--seconds", "0"]
FLAGS = [
    "--elements", "--formats", "--kernels", "--threads", "--gradients", "--seconds", "--peers",
    "--no-peers", "--plot", "--json", "--no-json",
]  # fmt: skip


@pytest.fixture(autouse=True)
def terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


@pytest.fixture(autouse=True)
def at_rest(monkeypatch):
    monkeypatch.setattr(bench_adam.psutil, "cpu_percent", lambda interval: 0.0)


@pytest.fixture(autouse=True)
def not_deepspeed(monkeypatch):
    """Its first use would compile for minutes."""
    ours = tuple(peer for peer in peers.PEERS if not peer.name.startswith("DeepSpeed"))
    monkeypatch.setattr(peers, "PEERS", ours)


def run(*arguments):
    try:
        return main(arguments)
    except SystemExit as stop:
        return stop.code


def is_spread(found):
    return found["min"] <= found["median"] <= found["max"]


def test_help_says_what_there_is(capsys):
    assert run("--help") == 0
    assert "bench " in capsys.readouterr().out
    for arguments in (["bench"], ["bench", "--help"]):
        assert run(*arguments) == 0
        assert "adam   " in capsys.readouterr().out
    assert run("bench", "adam", "--help") == 0
    shown = re.findall(r"(?<![\w-])--[a-z][a-z-]*", capsys.readouterr().out)
    assert [flag for flag in dict.fromkeys(shown) if flag != "--help"] == FLAGS


def test_json_has_every_figure_and_nothing_else(capsys):
    cpu_adam.set_threads(None)
    threads_by_default = cpu_adam.threads()
    assert run(*TINY, "--json", "--threads", "2", "1") == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert found["kind"] == "bench adam"
    assert found["elements"] == 8192
    assert {"cpu", "cores", "memory_bytes", "kernel"} <= set(found["machine"])
    assert {"python", "torch", "numpy"} <= set(found["versions"])
    groups = found["groups"]
    wanted = [(name, threads) for name in FORMATS for threads in (2, 1)]
    assert [(group["format"], group["threads"]) for group in groups] == wanted
    for group in groups:
        of_role = {"stream": [], "update": [], "peer": []}
        for figure in group["figures"]:
            of_role[figure["role"]].append(figure)
            for key in ("seconds", "parameters_per_s", "bytes_per_s", "of_stream"):
                assert is_spread(figure[key])
            assert figure["rounds"] >= bench.ROUNDS_MIN
        assert [figure["name"] for figure in of_role["update"]] == [*bench.default_kernels()]
        assert 1.0 in [figure["of_stream"]["median"] for figure in of_role["stream"]]
        has_peer = FORMATS[group["format"]].rule in {peer.rule for peer in peers.PEERS}
        assert bool(of_role["peer"]) == has_peer
        assert all((figure["of_peer"] is not None) == has_peer for figure in group["figures"])
        assert (group["small"]["tensors"], group["small"]["elements"]) == (2, 4096)
    assert groups[0]["bytes_per_element"] == 26
    assert "7 B model" in found["verdict"]
    assert any("caches" in notice for notice in found["notices"])
    assert "of stream" in shown.err
    assert cpu_adam.threads() == threads_by_default


@pytest.mark.parametrize("gradients", ["fp16", "fp32"])
def test_the_table_is_plain_and_fits_eighty_columns(gradients, capsys):
    assert run(*TINY, "--gradients", gradients, "--formats", "exact", "fp32") == 0
    shown = capsys.readouterr()
    moved = {"fp16": 26, "fp32": 28}[gradients]
    assert f"exact: {moved} bytes moved per parameter" in shown.out
    for expected in ("M/s", "GB/s", "of peer", "torch AdamW fused", "In other formats: fp32"):
        assert expected in shown.out
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "\x1b" not in shown.out + shown.err
    assert "measuring exact, threads: 1" in shown.err


def test_one_format_kernel_and_thread_without_peers(capsys):
    only = ["--formats", "exact", "exact", "--kernels", "python", "--threads", "1", "--no-peers"]
    assert run(*TINY, *only, "--json") == 0
    (group,) = json.loads(capsys.readouterr().out)["groups"]
    assert [figure["name"] for figure in group["figures"] if figure["role"] != "stream"] == [
        "python"
    ]
    assert group["figures"][0]["of_peer"] is None


def test_without_compiled_kernels_it_runs_and_says_so(monkeypatch, capsys):
    monkeypatch.setenv(choice.KERNEL_VARIABLE, "python")
    monkeypatch.setattr(choice, "_kernel", None)
    assert run(*TINY, "--formats", "exact", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert any("the Python reference serves" in notice for notice in found["notices"])
    figures = [figure["name"] for figure in found["groups"][0]["figures"]]
    assert figures == ["torch in-place add", "python", "torch AdamW fused"]


def test_a_busy_machine_is_remarked_on_at_both_ends(monkeypatch, capsys):
    monkeypatch.setattr(bench_adam.psutil, "cpu_percent", lambda interval: 60.0)
    assert run(*TINY, "--formats", "exact", "--threads", "1", "--no-peers") == 0
    shown = capsys.readouterr()
    remark = "other programs keep 60% of the processors busy"
    assert f"note: {remark}" in shown.err
    assert f"But {remark}" in " ".join(shown.out.split())


def job_of(format, elements=8192, gradient=torch.bfloat16):
    """The memory of a job, the job, and its tensors in the order in which they lie there."""
    wanted = bench.Wanted(
        elements=elements, formats=(format,), kernels=bench.default_kernels(), threads=(1,),
        gradient=gradient, peers=(), seconds=0.0,
    )  # fmt: skip
    memory = bench._Memory(bench.needed_bytes(wanted))
    job = bench._Job(FORMATS[format], wanted, memory)
    return memory, job, (job._gradient, job._weight, *job._slots.values())


@pytest.mark.parametrize(
    ("format", "gradient", "kernel", "elements"),
    by_turns([*FORMATS], [*bench.GRADIENTS.values()], choice.available(), [128, 8192 + 77]),
)
def test_streams_leave_every_byte_as_it_was(format, gradient, kernel, elements):
    """Whatever it is: NaN, subnormal, codes."""
    memory, job, _ = job_of(format, elements, gradient)
    memory._bytes.copy_(torch.randint(256, memory._bytes.shape, dtype=torch.uint8))
    before = memory._bytes.clone()
    with choice.forced(kernel):
        for stream in job._streams().values():
            stream()
    assert torch.equal(memory._bytes, before)


needs_kernels = pytest.mark.skipif(cpu_adam.kernel().native is None, reason="no compiled kernels")


@needs_kernels
@pytest.mark.parametrize("kernel", [name for name in choice.available() if name != "python"])
@pytest.mark.parametrize("gradient", bench.GRADIENTS.values(), ids=str)
@pytest.mark.parametrize("format", FORMATS)
def test_streams_go_over_the_bytes_of_the_update(format, gradient, kernel, monkeypatch):
    """Seen by letting them add one instead of nothing."""
    monkeypatch.setattr(bench.native, "stream", partial(bench.native.stream, added=1))
    memory, job, own = job_of(format, gradient=gradient)
    ends = [x.data_ptr() + -(-x.nbytes // 64) * 64 + bench.SPACE_BYTES for x in own]
    assert [x.data_ptr() for x in own] == [memory._bytes.data_ptr(), *ends[:-1]]
    moved = own[0].nbytes + 2 * sum(x.nbytes for x in own[1:])
    assert job._moved_bytes == moved
    with choice.forced(kernel):
        streams = job._streams()
    before = memory._bytes.clone()
    streams["one array"]()
    assert torch.equal(memory.words(moved // 8), before[: moved // 2].view(torch.int32) + 1)
    assert torch.equal(memory._bytes[moved // 2 :], before[moved // 2 :])
    own[0].copy_(torch.randn(own[0].numel()))
    bits = own[0].float().view(torch.int32) & 0x10001  # what of a gradient goes into its weight
    before = [x.view(getattr(torch, f"int{8 * x.itemsize}")).clone() for x in own]
    streams["as many arrays"]()
    found = [x.view(y.dtype) for x, y in zip(own, before)]
    changed = before[1] ^ (bits if own[1].itemsize == 4 else (bits >> 16).short())
    want = [before[0], changed, *(x + 1 for x in before[2:])]
    assert all(map(torch.equal, found, want))


@needs_kernels
@pytest.mark.parametrize("format", FORMATS)
def test_many_small_tensors_are_the_bytes_of_the_one_that_they_are_compared_with(
    format, monkeypatch
):
    _, job, own = job_of(format, 3 * bench.SMALL_ELEMENTS + 128)
    tables, calls = [], []
    make = job._table

    def making(tensors, elements):
        tables.append(make(tensors, elements))
        return tables[-1]

    monkeypatch.setattr(job, "_table", making)
    monkeypatch.setattr(bench.native.UpdateTable, "update", lambda self, _: calls.append(self))
    small = job._small()
    many, one = tables
    assert (small.tensors, calls) == (3, [many, one] * (bench.SMALL_ROUNDS + 1))
    slots = list(FORMATS[format].slots)
    for k, x in enumerate(own[1:]):
        items = bench.SMALL_ELEMENTS // (slots[k - 1].elements_per_item if k else 1)
        starts = [x.data_ptr() + i * items * x.itemsize for i in range(3)]
        assert [int(row[4 + k]) for row in many._rows] == starts
        assert [int(row[4 + k]) for row in one._rows] == starts[:1]
    for table, count in ((many, 3), (one, 1)):
        assert table._elements == [3 * bench.SMALL_ELEMENTS // count] * count
        gradients = [g.data_ptr() for g in table._own]
        size = 3 * bench.SMALL_ELEMENTS // count * own[0].itemsize
        assert gradients == [own[0].data_ptr() + i * size for i in range(count)]


REFUSED = {
    "bench adm": "there is no benchmark 'adm' (did you mean adam?)",
    "bench adam --elements many": "--elements many: expected a number of parameters, such as 64Mi",
    "bench adam --elements 0": "--elements 0: expected a number of parameters",
    "bench adam --elements 2Ti": "--elements 2Ti: expected a number of parameters",
    "bench adam --threads 0": "--threads 0: expected numbers from 1 to 1024",
    "bench adam --threads two": "--threads: 'two' is not what this option takes",
    "bench adam --formats exat": "--formats exat: there is none of that name here (did you",
    "bench adam --kernels avx5": "--kernels avx5: there is none of that name here",
    "bench adam --seconds nan": "--seconds nan: expected 0 to 3600",
    "bench adam --gradients fp8": "--gradients fp8: it cannot be that; it takes bf16",
    "bench adam --element 4": "--element",
    "bench adam 64Mi": "64Mi belongs to no option",
    "bench adam --elements 1Ti": "of memory; found",
}


@pytest.mark.parametrize(("line", "expected"), REFUSED.items())
def test_what_cannot_be_is_refused_in_one_message(line, expected, monkeypatch, capsys):
    monkeypatch.setattr(bench, "measure", lambda *_: pytest.fail("measured"))
    assert run(*line.split()) == EXIT_BAD_INPUT
    shown = capsys.readouterr()
    assert expected in shown.err
    assert shown.err.startswith("offload: error: ")
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_memory_is_asked_for_before_it_is_taken(monkeypatch, capsys):
    monkeypatch.setattr(bench_adam, "host_free_bytes", lambda: 512 << 20)
    assert run("bench", "adam", "--formats", "exact", "--no-peers") == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    needed = "asked for updates of 64Mi parameters, which take 896.33 MiB of memory"
    for part in (needed, "found 512.00 MiB free", "likely cause: ", "try: --elements 36Mi"):
        assert part in told


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def update(*arguments, **options):
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(bench.native, "update", update)
    threads = cpu_adam.threads()
    assert run(*TINY, "--formats", "exact", "--threads", "1", "--no-peers") == 130
    told = capsys.readouterr().err.splitlines()
    assert told[-1] == "offload: stopped by Ctrl-C while measuring exact, threads: 1"
    assert cpu_adam.threads() == threads


def test_a_chart_is_drawn(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "chart.png"
    assert run(*TINY, "--formats", "exact", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    for name, expected in (("chart.pgn", "no kind of picture"), ("no/a.png", "no such folder")):
        assert run(*TINY, "--plot", str(tmp_path / name)) == EXIT_BAD_INPUT
        assert expected in capsys.readouterr().err


def test_without_matplotlib_a_chart_is_refused_with_the_remedy(monkeypatch, capsys):
    for name in ("matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "offload.cli.bench_adam_plot", raising=False)
    monkeypatch.delattr(offload.cli, "bench_adam_plot", raising=False)
    assert run(*TINY, "--plot", "chart.png") == EXIT_BAD_INPUT
    told = capsys.readouterr().err
    assert "-m pip install 'offload-engine[plot]'" in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("gradient", bench.GRADIENTS.values())
def test_a_peer_does_the_same_job(gradient):
    fmt = FORMATS["exact"]
    weight = torch.randn(256).bfloat16()
    given = torch.randn(256).to(gradient)
    (peer,), left_out = peers.usable({"adam"})
    assert not left_out
    layout = peers.arrays((peer,), fmt, gradient)
    assert ("gradient" in layout) == (gradient != torch.float32)
    shared = {name: torch.zeros(256, dtype=dtype) for name, dtype in layout.items()}
    shared["master"].copy_(weight)
    peers.PeerJob(peer, given, shared)()
    slots = {slot.name: torch.zeros(256, dtype=getattr(torch, slot.dtype)) for slot in fmt.slots}
    cpu_adam.update(weight, given, slots, bench.HYPERS["adam"], step=bench.STEP, format=fmt)
    torch.testing.assert_close(cpu_adam.join(weight, slots["residue"]), shared["master"])
    torch.testing.assert_close(weight, shared["served"])


def test_a_peer_that_cannot_be_made_is_left_out_with_its_reason(monkeypatch):
    def missing(parameter):
        raise ModuleNotFoundError("no", name="deepspeed")

    def broken(parameter):
        raise RuntimeError("no compiler\nand more")

    rows = [peers.Peer(make.__name__, "adam", (), make, lambda: 0) for make in (missing, broken)]
    monkeypatch.setattr(peers, "PEERS", tuple(rows))
    assert peers.usable({"adam"}) == (
        (),
        {
            "missing": "deepspeed is not installed",
            "broken": "it failed with RuntimeError: no compiler",
        },
    )
    assert peers.usable({"lion"}) == ((), {})


def test_the_verdict_says_what_bounds_the_update():
    def spread(value):
        return bench.Spread(value, value, value)

    def group(share):
        figure = bench.Figure(
            role="update", name="avx2", rounds=3, seconds=spread(0.1), of_peer=None,
            parameters_per_s=spread(1e9), bytes_per_s=spread(26e9), of_stream=spread(share),
        )  # fmt: skip
        return bench.Group(
            format="exact", threads=2, elements=10**8, bytes_per_element=26.0, small=None,
            figures=(figure,),
        )  # fmt: skip

    assert bench_adam_report.verdict([group(0.98)]) == (
        "The update of a 7 B model takes 7 s (exact, 2 threads, avx2); bounded by memory "
        "(0.98 of an in-place stream)."
    )
    assert "bounded by the processor (0.50" in bench_adam_report.verdict([group(0.5)])
