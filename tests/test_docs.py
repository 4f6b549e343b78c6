"""The docs: pages made from the code are in step with it, links lead somewhere, code runs."""

import importlib
import os
import re
import runpy
import subprocess
import sys
import unicodedata
from pathlib import Path

import pytest
import torch

import offload
from aio.backends import BACKEND_NAMES, BACKEND_VARIABLE
from cpu_adam.choice import KERNEL_NAMES, KERNEL_VARIABLE
from offload.cli import COMMANDS, options
from offload.cli.flags import fields_of, flag
from offload.config import Config

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [*DOCS, ROOT / "README.md"]
IDS = [page.name for page in PAGES]


def test_pages_made_from_the_code_are_in_step_with_it():
    made = runpy.run_path(str(ROOT / "docs/pages.py"))["pages"]()
    for path, text in made.items():
        assert path.read_text("utf-8") == text, f"{path.name}: run python docs/pages.py"


def test_every_field_of_config_is_there():
    text = (ROOT / "docs/configuration.md").read_text("utf-8")
    for name in Config.__slots__:
        assert f"\n## {name}\n" in text


def plain(text):
    """Without blocks of code."""
    return re.sub(r"^```.*?^```|^(?: {4}|\t).*?$", "", text, flags=re.M | re.S)


def anchors(path):
    """What may stand after # in a link to a page."""
    titles = re.findall(r"^#+ (.*)$", plain(path.read_text("utf-8")), re.M)
    lower = (unicodedata.normalize("NFKD", title.lower()) for title in titles)
    return {re.sub(r"[^\w -]", "", title).strip().replace(" ", "-") for title in lower}


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", plain(page.read_text("utf-8"))):
        if target.startswith(("http:", "https:")):
            continue
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.is_file(), f"{page.name} links to {target}"
        assert ROOT / "docs" in path.parents or page.name == "README.md", target
        assert not anchor or anchor in anchors(path), f"{page.name} links to {target}"


def blocks(page, language):
    """The blocks of code of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text("utf-8"), re.M | re.S)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_is_python(page):
    for block in blocks(page, "python"):
        compile(block, page.name, "exec")


def test_the_quickstart_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = compile("\n".join(blocks(ROOT / "docs/quickstart.md", "python")), "quickstart", "exec")
    names = {}
    exec(code, names)
    assert "3 steps" in capsys.readouterr().out
    assert set(names["weights"]) == set(names["model"].state_dict())
    names["engine"].close()
    exec(code, names)
    assert names["engine"].resumed[0] == 5, "its last lines go on from a commit"
    names["engine"].close()


@pytest.mark.slow
def test_the_loop_over_ranks_runs_under_torchrun(tmp_path):
    page = ROOT / "docs/ranks.md"
    (text,) = blocks(page, "python")
    (tmp_path / "train.py").write_text(text, "utf-8")
    (line,) = re.findall(r"^    torchrun (.* train\.py .*)$", page.read_text("utf-8"), re.M)
    launch = [sys.executable, "-m", "torch.distributed.run", *line.split()]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    shown = subprocess.check_output(launch, cwd=tmp_path, env=environment, text=True)
    assert re.findall(r"^epoch (\d): test loss", shown, re.M) == ["1", "2", "3", "4"]


def test_the_readme_s_lines_for_saving_and_resuming(tmp_path, monkeypatch):
    """Saved with states on nvme, resumed with them in memory: the bits of one that never ended."""
    (block,) = [code for code in blocks(ROOT / "README.md", "python") if "offload.save" in code]
    save, resume = block.split("\n\n")
    monkeypatch.chdir(tmp_path)

    def begun(tier):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2))).bfloat16()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        config = offload.Config(params="cpu", optimizer=tier, nvme_path=str(tmp_path))
        model, optimizer = offload.attach(model, optimizer, config)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        names = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return {"offload": offload, **names}

    def go_on(names):
        for seed in range(3):
            torch.manual_seed(seed)
            names["model"](torch.randn(4, 8).bfloat16()).square().mean().backward()
            names["optimizer"].step()
            names["scheduler"].step()
            names["optimizer"].zero_grad()

    first, second = begun("nvme"), begun("cpu")
    go_on(first)
    exec(save, first)
    go_on(first)
    exec(resume, second)
    go_on(second)
    assert second["progress"] == {"epoch": 1}
    for one, other in zip(first["model"].parameters(), second["model"].parameters()):
        assert torch.equal(one, other)
    for names in (first, second):
        names["optimizer"].engine.close()


def test_the_readme_s_program_has_as_many_lines():
    page, program = (ROOT / name for name in ("README.md", "examples/train_gpt.py"))
    (lines,) = re.findall("a whole program in ([0-9]+) lines", page.read_text("utf-8"))
    assert int(lines) == len(program.read_text("utf-8").splitlines())


def test_the_readme_s_line_that_tells_what_lives_where(capsys):
    (line,) = re.findall(r"`(print\(.*rows\(\).*?\))`", (ROOT / "README.md").read_text("utf-8"))
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(2)))
    optimizer = torch.optim.AdamW(model.parameters())
    config = offload.Config(params="cpu", gradients="cpu", optimizer="device")
    _, optimizer = offload.attach(model, optimizer, config)
    with optimizer.engine:
        exec(line, {"optimizer": optimizer})
    told = re.compile(r"(weight|gradient|state) +on (cpu|device) +[0-9.]+ KiB of \d units?")
    tiers = [told.fullmatch(row)[2] for row in capsys.readouterr().out.splitlines()]
    assert tiers == ["cpu", "cpu", "device"]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_and_flags_that_are_named_exist(page):
    text = page.read_text("utf-8")
    for name in re.findall(r"\boffload ([a-z]+)(?= |`|\n)(?=[^\n]*`|[^\n]*--)", text):
        known = (*COMMANDS, "engine", "is", "of", "and", "for")
        assert name in known, f"{page.name} names offload {name}"
    own = {flag(one.name) for one in fields_of(options.Train)}
    for line in re.findall(r"offload train ([^`\n]*)", text):
        for name in re.findall(r"--[a-z][a-z-]*", line):
            assert name.replace("--no-", "--") in own, f"{page.name} names {name}"


def test_messages_of_the_troubleshooting_are_those_of_the_code():
    sources = [
        path for name in ("offload", "aio", "cpu_adam") for path in (ROOT / name).rglob("*.py")
    ]
    code = " ".join(path.read_text("utf-8") for path in sources)
    joined = re.sub(r'"\s+f?"', "", code)
    for told in re.findall(r"^\| `(.*?)` \|", (ROOT / "docs/troubleshooting.md").read_text(), re.M):
        assert told in joined, f"no message says: {told}"


def test_what_python_says_of_a_pair_that_is_called_is_in_the_troubleshooting():
    pair = (torch.nn.Linear(1, 1), None)
    with pytest.raises(TypeError) as caught:
        pair(torch.ones(1))
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    assert f'| Python: "{caught.value}" | `attach` returns two' in text


def test_what_the_api_page_names_exists():
    for name in re.findall(r"^::: (\S+)$", (ROOT / "docs/api.md").read_text("utf-8"), re.M):
        module, _, last = name.rpartition(".")
        assert getattr(importlib.import_module(module), last).__doc__, name


def test_the_api_page_names_all_that_is_public():
    text = (ROOT / "docs/api.md").read_text("utf-8")
    for name in offload.__all__:
        assert re.search(rf"^::: offload\.\S+\.{name}$", text, re.M), name


@pytest.mark.slow
def test_mkdocs_builds_without_a_complaint(tmp_path):
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "api/index.html").read_text().count('class="doc doc-object') >= 10


def test_every_backend_and_kernel_is_listed():
    text = (ROOT / "docs/troubleshooting.md").read_text("utf-8")
    for variable, names in ((BACKEND_VARIABLE, BACKEND_NAMES), (KERNEL_VARIABLE, KERNEL_NAMES)):
        (row,) = re.findall(rf"^\| `{variable}` \| (.*) \|$", text, re.M)
        assert all(f"`{name}`" in row for name in names), row
