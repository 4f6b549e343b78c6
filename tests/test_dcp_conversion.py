"""`offload convert` of folders of torch.distributed.checkpoint, from and to."""

from __future__ import annotations

import gc
import io
import pickle
import random
import resource
import shutil
from itertools import combinations
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import offload
from benchmarks.deepspeed_checkpoints import Net, optimizer_of
from cpu_adam import CPUAdam
from cpu_adam.reference import join
from offload.checkpoint import conversion, dcp_folder
from offload.checkpoint.conversion import convert
from offload.checkpoint.shards import Tensor
from offload.cli import main
from tests import save_reader
from tests.training import config_of, some_fast

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:TypedStorage is deprecated"
)

DATA = Path(__file__).parent / "data/dcp"
"""Of FSDP2 on two processes, cut by rows and by columns."""


def backward(model: torch.nn.Module) -> None:
    tokens = torch.arange(10).view(2, 5)
    F.cross_entropy(model(tokens).float().view(-1, 11), tokens.roll(1, 1).view(-1)).backward()


def plain_run(folder: Path, kind: Any = torch.optim.AdamW, partial: bool = False) -> Any:
    """Plain torch's model and optimizer with what is in a folder."""
    model = Net()
    optimizer = kind(optimizer_of(model).param_groups)
    if kind is CPUAdam:  # Torch has what it needs to make states ready for AdamW only.
        other, theirs = plain_run(folder)
        model.load_state_dict(other.state_dict())
        for mine, one in zip(model.parameters(), other.parameters()):
            if one in theirs.state:
                optimizer.state[mine] = dict(theirs.state[one])
        for mine, one in zip(optimizer.param_groups, theirs.param_groups):
            mine["lr"] = one["lr"]
        return model, optimizer
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    planner = dcp.DefaultLoadPlanner(allow_partial_load=partial)
    dcp.load(state, checkpoint_id=folder, planner=planner)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )
    return model, optimizer


def attached_run(dtype: torch.dtype, tmp_path: Path, save: Path | None = None) -> Any:
    """The same, attached, with what is in a save."""
    torch.manual_seed(1)
    model = Net().to(dtype)
    config = config_of(("cpu", "cpu", "cpu"), tmp_path)
    _, optimizer = offload.attach(model, optimizer_of(model), config)
    if save is not None:
        offload.load(model, optimizer, save)
    return model, optimizer


def values(model: Any, optimizer: Any) -> dict[str, dict[str, torch.Tensor]]:
    """By name the master, and the state."""
    found = {}
    for name, one in model.named_parameters():
        if one.requires_grad:
            state = {k: torch.as_tensor(v).clone() for k, v in optimizer.state[one].items()}
            master = one.detach().clone()
            if "residue" in state:
                master = join(master, state["residue"])
            moments = {k: state[k].float() for k in ("step", "exp_avg", "exp_avg_sq")}
            found[name] = {"master": master.float(), **moments}
    return found


def assert_equal(mine: Any, theirs: Any) -> None:
    assert mine.keys() == theirs.keys()
    for name, one in mine.items():
        for key, value in one.items():
            assert torch.equal(value, theirs[name][key]), (name, key)


def assert_close(mine: Any, theirs: Any) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-8)


def step(model: Any, optimizer: Any) -> Any:
    backward(model)
    optimizer.step()
    return values(model, optimizer)


def one_save(path: Path) -> tuple[Any, Any]:
    run, sets = save_reader.read(str(path))
    return run, {prefix: {k: v.tobytes() for k, v in one.items()} for prefix, one in sets.items()}


# -- from a folder ---------------------------------------------------------------------------------


def test_the_next_step_is_that_of_plain_torch(tmp_path: Path, capsys: Any) -> None:
    assert main(["convert", str(DATA), str(tmp_path / "save")]) == 0
    assert "head.weight, which has the bits of embed.weight" in capsys.readouterr().out
    run, mine = attached_run(torch.float32, tmp_path, tmp_path / "save")
    theirs, ours = plain_run(DATA), plain_run(DATA, CPUAdam)
    assert_equal(values(run, mine), values(*theirs))
    assert torch.equal(run.frozen.weight, theirs[0].frozen.weight)
    assert torch.equal(run.scale, theirs[0].scale)
    assert [one["lr"] for one in mine.param_groups] == [one["lr"] for one in theirs[1].param_groups]
    found = step(run, mine)
    assert_equal(found, step(*ours))
    assert_close(found, step(*theirs))
    mine.engine.close()


def test_masters_stay_in_bfloat16(tmp_path: Path) -> None:
    convert(str(DATA), str(tmp_path / "save"), dtype="bfloat16")
    run, mine = attached_run(torch.bfloat16, tmp_path, tmp_path / "save")
    assert_equal(values(run, mine), values(*plain_run(DATA)))
    mine.engine.close()


def test_a_folder_of_hugging_face_has_the_weights_alone(tmp_path: Path) -> None:
    (told,) = convert(str(DATA), str(tmp_path / "folder"), "huggingface")[-1:]
    assert told.startswith("left out: the optimizer's states")
    (weights,) = (tmp_path / "folder").glob("*.safetensors")
    model = plain_run(DATA)[0]
    found = load_file(weights)
    assert torch.equal(found["frozen.weight"], model.frozen.weight)


def test_what_is_beside_comes_along(tmp_path: Path) -> None:
    convert(str(DATA), str(tmp_path / "save"))
    run, _ = save_reader.read(str(tmp_path / "save"))
    assert run["step"] == 3
    assert run["user"]["epoch"] == 2
    assert run["user"]["lr_scheduler"]["last_epoch"] == 3


def test_all_names_that_torch_gives_are_read(tmp_path: Path) -> None:
    model, optimizer = plain_run(DATA)
    flat = get_state_dict(
        model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True)
    )
    by_name = get_state_dict(model, optimizer)
    named = torch.optim.AdamW(
        [(name, one) for name, one in model.named_parameters() if one.requires_grad]
    )
    named.state.update(optimizer.state)
    written = {
        "names": {"app": dict(zip(("model", "optim"), by_name))},
        "flat": dict(zip(("model", "optimizer"), flat)),
        "numbers": {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        "named": {"model": model.state_dict(), "optimizer": named.state_dict()},
    }
    saves = {}
    for name, state in written.items():
        dcp.save(state, checkpoint_id=tmp_path / name)
        convert(str(tmp_path / name), str(tmp_path / f"{name}-save"))
        saves[name] = one_save(tmp_path / f"{name}-save")
    run, sets = saves["names"]
    for other, theirs in saves.values():
        assert theirs == sets
        assert other["optimizer"]["states"] == run["optimizer"]["states"]
    for name in ("flat", "numbers"):
        groups = [sorted(one["parameters"]) for one in saves[name][0]["optimizer"]["groups"]]
        assert sorted(groups) == sorted(sorted(x["parameters"]) for x in run["optimizer"]["groups"])


def test_numbers_that_may_be_of_several_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    optimizer = torch.optim.AdamW([{"params": one.parameters()} for one in model])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")
    with pytest.raises(ValueError, match=r"several ways .* get_state_dict"):
        convert(str(tmp_path / "dcp"), str(tmp_path / "save"))
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "weights")
    convert(str(tmp_path / "weights"), str(tmp_path / "hf"), "huggingface")
    weights = load_file(tmp_path / "hf/model-00001-of-00001.safetensors")
    assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())


# -- to a folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_plain_torch_goes_on_from_a_save(dtype: torch.dtype, tmp_path: Path) -> None:
    run, mine = attached_run(dtype, tmp_path)
    for _ in range(2):
        step(run, mine)
    offload.save(run, mine, tmp_path / "save", user={"epoch": 2})
    command = ["convert", str(tmp_path / "save"), str(tmp_path / "dcp"), "--to", "dcp"]
    assert main([*command, "--dtype", "float32"]) == 0
    theirs = plain_run(tmp_path / "dcp", partial=True)  # Tied names are one in a save.
    assert_equal(values(run, mine), values(*theirs))
    mine.engine.close()
    convert(str(tmp_path / "dcp"), str(tmp_path / "back"), dtype="float32")
    run, mine = attached_run(torch.float32, tmp_path, tmp_path / "back")
    assert_close(step(run, mine), step(*theirs))
    mine.engine.close()


def test_plain_torch_reads_flattened_names(tmp_path: Path) -> None:
    convert(str(DATA), str(tmp_path / "save"))
    convert(str(tmp_path / "save"), str(tmp_path / "dcp"), "dcp")
    model = Net()
    optimizer = optimizer_of(model)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options)))
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=planner)
    theirs, expected = plain_run(DATA)
    assert state["optimizer"]["param_groups.block.weight.lr"] == expected.param_groups[0]["lr"]
    found = state["optimizer"]["state.block.weight.exp_avg"]
    assert torch.equal(found, expected.state[theirs.block.weight]["exp_avg"])


@pytest.mark.parametrize("small", [False, True])
def test_a_save_is_the_same_after_a_way_through_a_folder(
    small: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    convert(str(DATA), str(tmp_path / "save"), dtype="bfloat16")
    if small:  # A row is larger than a chunk, and a chunk than a part.
        monkeypatch.setattr(dcp_folder, "PART_ELEMENTS", 4)
        monkeypatch.setattr(conversion, "PART_ELEMENTS", 3)
    (told,) = convert(str(tmp_path / "save"), str(tmp_path / "dcp"), "dcp")
    assert "--dtype float32 writes the masters" in told
    convert(str(tmp_path / "dcp"), str(tmp_path / "back"))
    before, after = one_save(tmp_path / "save"), one_save(tmp_path / "back")
    assert before[1] == after[1]
    for group in (*before[0]["optimizer"]["groups"], *after[0]["optimizer"]["groups"]):
        group["options"] = dict(sorted(group["options"].items()))
    assert before[0] == after[0]
    assert len(list((tmp_path / "dcp").iterdir())) == 2


def test_any_layout_of_a_tensor_is_read(tmp_path: Path) -> None:
    tensors = {
        "turned": torch.arange(35.0).view(5, 7).t(),
        "last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": torch.arange(20)[3:8],
        "none": torch.zeros(0, 3),
        "flag": torch.tensor(True),
        "small": torch.randn(3).to(torch.float8_e4m3fn),
    }
    dcp.save({"model": tensors}, checkpoint_id=tmp_path / "dcp")
    convert(str(tmp_path / "dcp"), str(tmp_path / "hf"), "huggingface")
    convert(str(tmp_path / "hf"), str(tmp_path / "again"), "dcp")
    found = load_file(tmp_path / "hf/model-00001-of-00001.safetensors")
    state = {"model": {name: torch.zeros_like(one) for name, one in tensors.items()}}
    dcp.load(state, checkpoint_id=tmp_path / "again")
    for name, one in tensors.items():
        assert torch.equal(found[name].float(), one.float())
        assert torch.equal(state["model"][name].float(), one.float())


def test_any_range_of_a_tensor_is_read() -> None:
    folder = dcp_folder.Folder(str(DATA))
    for name, one in folder.tensors.items():
        elements = prod(one.shape)
        whole = torch.cat([folder.values(name, at, 1) for at in range(elements)])
        for start, stop in combinations(range(0, elements + 1, 1 + elements // 12), 2):
            assert torch.equal(folder.values(name, start, stop - start), whole[start:stop])


def test_one_chunk_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(dcp_folder, "PART_ELEMENTS", 1 << 18)
    tensors: dict[Any, Any] = {
        ("model", f"{at}"): ("model", Tensor(f"{at}", "float32", (3, 1 << 19))) for at in range(3)
    }
    largest = moved = 0

    def values(prefix: str, name: str, start: int, count: int) -> torch.Tensor:
        nonlocal largest
        alive = [one for one in gc.get_objects() if type(one) is torch.Tensor]
        sizes = {one.data_ptr(): one.untyped_storage().nbytes() for one in alive}
        largest = max(largest, sum(sizes.values()))
        return torch.ones(count)

    def told(count: int) -> None:
        nonlocal moved
        moved += count

    (tmp_path / "dcp").mkdir()
    dcp_folder.write_folder(str(tmp_path / "dcp"), tensors, [], values, told)
    assert largest < 8 << 20
    assert moved == 18 << 20


# -- what is refused -------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> Any:
        return print, ("ran",)


def test_code_in_a_folder_is_not_run(tmp_path: Path, capsys: Any) -> None:
    shutil.copytree(DATA, tmp_path / "dcp")
    metadata = tmp_path / "dcp/.metadata"
    found = pickle.loads(metadata.read_bytes())
    metadata.write_bytes(pickle.dumps((found, Evil())))
    with pytest.raises(ValueError, match=r"builtins\.print, which could run code"):
        convert(str(tmp_path / "dcp"), str(tmp_path / "save"))
    evil = io.BytesIO()
    torch.save(Evil(), evil)
    for name in ("model.block.bias", "optimizer.param_groups.0.lr"):
        for index, place in found.storage_data.items():
            if index.fqn == name:
                place.relative_path, place.offset, place.length = "evil", 0, len(evil.getvalue())
        (tmp_path / "dcp/evil").write_bytes(evil.getvalue())
        metadata.write_bytes(pickle.dumps(found))
        with pytest.raises(ValueError) as refused:
            convert(str(tmp_path / "dcp"), str(tmp_path / "save"))
        assert "\n" not in str(refused.value)
    assert capsys.readouterr().out == ""
    assert [one.name for one in tmp_path.iterdir()] == ["dcp"]


@pytest.mark.parametrize("count", some_fast([45, 150]))
def test_a_damaged_folder_is_refused_in_a_sentence(count: int, tmp_path: Path) -> None:
    shutil.copytree(DATA, tmp_path / "dcp")
    refused = 0
    for seed in range(count):
        draw = random.Random(seed)
        file = draw.choice([*sorted((tmp_path / "dcp").iterdir()), tmp_path / "dcp/.metadata"])
        whole = file.read_bytes()
        at = draw.randrange(len(whole))
        change = draw.choice((whole[at : at + 1], b"\xff" * 8, draw.randbytes(20), b""))
        file.write_bytes(whole[:at] + change + whole[at + draw.choice((1, 8, len(whole))) :])
        told = ""
        try:
            convert(str(tmp_path / "dcp"), str(tmp_path / "save"))
            shutil.rmtree(tmp_path / "save")  # It was in values, which have no checksum.
        except (OSError, ValueError) as error:
            told = str(error)
        assert "\n" not in told
        refused += bool(told)
        file.write_bytes(whole)
        assert [one.name for one in tmp_path.iterdir()] == ["dcp"]
    assert refused > count / 3


def test_other_files_and_damage_leave_nothing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken/notes").write_text("mine")
    with pytest.raises(FileExistsError):
        convert(str(tmp_path), str(tmp_path / "taken"), "dcp")
    convert(str(DATA), str(tmp_path / "save"))
    (file,) = (tmp_path / "save").glob("exp_avg-*.safetensors")
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="checksum"):
        convert(str(tmp_path / "save"), str(tmp_path / "dcp"), "dcp")
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model.safetensors", "save", "taken"]


def test_a_file_that_cannot_grow_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    convert(str(DATA), str(tmp_path / "save"))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, before[1]))
    try:
        with pytest.raises(OSError, match=r"__0_0.distcp"):
            convert(str(tmp_path / "save"), str(tmp_path / "made"), "dcp")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "made").exists()
