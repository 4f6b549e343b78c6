"""`offload convert`: checkpoints of DeepSpeed, of Hugging Face and of ours."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

import offload
from benchmarks.deepspeed_checkpoints import CHECKPOINTS, STEPS, optimizer_of
from benchmarks.deepspeed_checkpoints import Net as Theirs
from cpu_adam import CPUAdam
from cpu_adam.reference import join
from offload.checkpoint import conversion
from offload.checkpoint.conversion import convert
from offload.cli import main
from tests import save_reader
from tests.training import Net, attached, config_of, in_turn, plain

DATA = Path(__file__).parent / "data/deepspeed"
MADE = [f"zero{stage}-{ranks}-{dtype}" for stage, ranks, dtype in CHECKPOINTS]


def attached_to_theirs(dtype: torch.dtype, path: Path) -> tuple[Theirs, Any]:
    """A model and optimizer such as DeepSpeed had, with what was converted."""
    model = Theirs().to(dtype)
    model.scale = model.scale.float()
    config = config_of(("cpu", "cpu", "cpu"), path.parent)
    _, optimizer = offload.attach(model, optimizer_of(model), config)
    user = offload.load(model, optimizer, path)
    assert user["epoch"] == 2
    assert user["global_steps"] == STEPS
    return model, optimizer


def backward(model: torch.nn.Module) -> None:
    tokens = torch.arange(10).view(2, 5)
    F.cross_entropy(model(tokens).float().view(-1, 11), tokens.roll(1, 1).view(-1)).backward()


@pytest.mark.parametrize(("name", "dtype"), in_turn(MADE, [None, "float32", "bfloat16"]))
def test_the_next_step_is_that_of_the_fp32_masters(
    name: str, dtype: str | None, tmp_path: Path
) -> None:
    """All that DeepSpeed has is in the save to the bit, and trained on from there."""
    assert (
        main(
            [
                "convert",
                str(DATA / name),
                str(tmp_path / "save"),
                *(["--dtype", dtype] if dtype else []),
            ]
        )
        == 0
    )
    dtype = dtype or ("bfloat16" if name.endswith("bf16") else "float32")
    expected = torch.load(DATA / name / "expected.pt")
    model, optimizer = attached_to_theirs(getattr(torch, dtype), tmp_path / "save")
    parameters = dict(model.named_parameters())

    def master(one: str) -> torch.Tensor:
        weight, state = parameters[one].detach().clone(), optimizer.state[parameters[one]]
        return join(weight, state["residue"]) if dtype == "bfloat16" else weight

    for one, (weight, first, second) in expected.items():
        state = optimizer.state[parameters[one]]
        assert torch.equal(master(one), weight)
        assert torch.equal(state["exp_avg"], first)
        assert torch.equal(state["exp_avg_sq"], second)
        assert state["step"] == STEPS
    backward(model)
    plain_ = {one: torch.nn.Parameter(all_[0].clone()) for one, all_ in expected.items()}
    both = []
    for kind in (CPUAdam, torch.optim.AdamW):
        twin = Theirs()
        made = kind(optimizer_of(twin).param_groups)
        for one, parameter in twin.named_parameters():
            if one in plain_:
                parameter.data = plain_[one].detach().clone()
                parameter.grad = parameters[one].grad.float()
                moments = dict(zip(("exp_avg", "exp_avg_sq"), expected[one][1:].clone()))
                made.state[parameter] = {"step": torch.tensor(float(STEPS)), **moments}
        made.step()
        both.append(dict(twin.named_parameters()))
    optimizer.step()
    for one in expected:
        assert torch.equal(master(one), both[0][one])
        torch.testing.assert_close(master(one), both[1][one], rtol=1e-6, atol=1e-8)
    optimizer.engine.close()


@pytest.mark.parametrize("name", MADE)
def test_what_was_not_trained_comes_along(name: str, tmp_path: Path) -> None:
    convert(str(DATA / name), str(tmp_path / "save"))
    run, sets = save_reader.read(str(tmp_path / "save"))
    assert sets["model"].keys() - sets["exp_avg"].keys() == {"frozen.weight", "scale"}
    torch.manual_seed(3)
    frozen = Theirs().frozen.weight.to(getattr(torch, "float16" if "fp16" in name else "bfloat16"))
    found = load_file(tmp_path / "save" / "model-00001-of-00001.safetensors")
    assert torch.equal(found["frozen.weight"], frozen.to(found["frozen.weight"].dtype))
    assert found["scale"].tolist() == [0.5, 2.0, 1.0]
    assert "head.weight" not in found
    decay, no_decay = run["optimizer"]["groups"]
    assert decay["options"]["weight_decay"] == 0.1
    assert no_decay["options"]["lr"] == 2e-3
    assert set(no_decay["parameters"]) == {"block.bias", "norm.weight", "norm.bias"}


def test_a_damaged_checkpoint_is_refused_in_a_sentence(tmp_path: Path) -> None:
    for at, name in enumerate(MADE):
        path = tmp_path / name
        shutil.copytree(DATA / name, path)
        files = sorted((path / "global_step3").iterdir())
        whole = files[at % len(files)].read_bytes()
        for damage in (whole[:-700], whole[:3000] + b"\xff" * 99 + whole[3099:], b"", None):
            if damage is None:
                files[at % len(files)].unlink()
            else:
                files[at % len(files)].write_bytes(damage)
            error = None
            try:
                convert(str(path), str(tmp_path / "save"))
                shutil.rmtree(tmp_path / "save")  # It was in values, which have no checksum.
            except (OSError, ValueError) as raised:
                error = raised
            assert error is not None or damage is not None
            assert "\n" not in str(error)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return print, ("ran",)

    shutil.copytree(DATA / "zero2-1-bf16", tmp_path / "ds")
    file = tmp_path / "ds/global_step3/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "evil": Evil()}, file)
    with pytest.raises(ValueError, match="print, which could run code"):
        convert(str(tmp_path / "ds"), str(tmp_path / "save"))
    assert [one.name for one in tmp_path.iterdir()] == ["ds"]


def test_what_is_no_data_is_left_out_and_told(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero2-1-bf16", tmp_path / "ds")
    file = tmp_path / "ds/global_step3/mp_rank_00_model_states.pt"
    content = torch.load(file, weights_only=True)
    torch.save({**content, "mine": torch.ones(3), "lr_scheduler": {"last_epoch": 3}}, file)
    (told,) = convert(str(tmp_path / "ds"), str(tmp_path / "save"))
    assert told.startswith("left out: mine is a Tensor")
    user = save_reader.read(str(tmp_path / "save"))[0]["user"]
    assert user["lr_scheduler"] == {"last_epoch": 3}


# -- saves and folders of Hugging Face -------------------------------------------------------------


@pytest.fixture
def save(tmp_path: Path) -> Path:
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=lambda: Net(layers=2)) as run:
        plain(run, 0)
        plain(run, 1)
        offload.save(run.model, run.optimizer, tmp_path / "save", user=1, shard_bytes=9_000)
    return tmp_path / "save"


def test_a_save_in_another_dtype_keeps_its_masters(
    save: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(conversion, "PART_ELEMENTS", 1000)
    convert(str(save), str(tmp_path / "fp32"), dtype="float32")
    convert(str(tmp_path / "fp32"), str(tmp_path / "bf16"), dtype="bfloat16")
    (run, before), (again, after) = (save_reader.read(str(x)) for x in (save, tmp_path / "bf16"))
    assert run.pop("sets").keys() == again.pop("sets").keys()
    assert run == again
    for prefix, tensors in before.items():
        assert all((after[prefix][name] == one).all() for name, one in tensors.items())
    fp32 = save_reader.read(str(tmp_path / "fp32"))[1]
    assert "residue" not in fp32
    for name, one in save_reader.masters(before).items():
        assert (fp32["model"][name] == one).all()
    with attached(
        ("cpu", "cpu", "cpu"), tmp_path, build=lambda: Net(layers=2), dtype=torch.float32
    ) as there:
        assert offload.load(there.model, there.optimizer, tmp_path / "fp32") == 1
        plain(there, 2)


def test_weights_go_to_a_folder_of_hugging_face_and_come_back(
    save: Path, tmp_path: Path, capsys: Any
) -> None:
    assert main(["convert", str(save), str(tmp_path / "hf"), "--to", "huggingface"]) == 0
    assert "left out: the optimizer's states" in capsys.readouterr().out
    assert main(["convert", str(tmp_path / "hf"), str(tmp_path / "back")]) == 0
    files = {one.name for one in (tmp_path / "hf").iterdir()}
    assert files == {"model-00001-of-00001.safetensors", "model.safetensors.index.json"}
    with attached(("cpu", "cpu", "cpu"), tmp_path, build=lambda: Net(layers=2)) as run:
        offload.load(run.model, None, tmp_path / "back")
        weights = load_file(tmp_path / "hf" / "model-00001-of-00001.safetensors")
        assert all(torch.equal(weights[k], v) for k, v in run.model.state_dict().items())


def test_states_of_which_nothing_tells_are_left_out_with_a_word(save: Path, tmp_path: Path) -> None:
    (save / "run.json").unlink()
    told = convert(str(save), str(tmp_path / "hf"), "huggingface")
    names = "exp_avg", "exp_avg_sq", "residue"
    assert told == [f"left out: {one}, as found no run.json that tells of it" for one in names]


def test_one_file_without_an_index_is_read(tmp_path: Path) -> None:
    values = {"a": torch.randn(5, 3), "b": torch.arange(3), "none": torch.zeros(0, 2)}
    (tmp_path / "hf").mkdir()
    save_file(values, tmp_path / "hf" / "model.safetensors")
    convert(str(tmp_path / "hf"), str(tmp_path / "save"), dtype="bfloat16")
    found = load_file(tmp_path / "save" / "model-00001-of-00001.safetensors")
    assert torch.equal(found["a"], values["a"].bfloat16())
    assert torch.equal(found["b"], values["b"])
    assert found["none"].shape == (0, 2)


def test_only_an_earlier_save_is_replaced(save: Path, tmp_path: Path) -> None:
    before = {one.name: one.read_bytes() for one in save.iterdir()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("mine")
    for target, to in (("save", "save"), ("save", "huggingface"), ("other", "save")):
        assert main(["convert", str(save), str(tmp_path / target), "--to", to]) == 2
    assert {one.name: one.read_bytes() for one in save.iterdir()} == before
    convert(str(DATA / "zero2-1-bf16"), str(save))
    assert save_reader.read(str(save))[0]["step"] == STEPS
    assert sorted(one.name for one in tmp_path.iterdir()) == ["other", "save"]


def test_damage_is_found_and_nothing_is_left(save: Path, tmp_path: Path) -> None:
    file = sorted(save.glob("exp_avg-*"))[0]
    content = bytearray(file.read_bytes())
    content[-2] ^= 1
    file.write_bytes(content)
    with pytest.raises(OSError, match="checksum"):
        convert(str(save), str(tmp_path / "other"))
    with pytest.raises(ValueError, match="found no run"):
        convert(str(tmp_path), str(tmp_path / "other"))
    assert [one.name for one in tmp_path.iterdir()] == ["save"]


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    shutil.copytree(DATA / "zero2-1-bf16", tmp_path / "ds")
    (file,) = (tmp_path / "ds/global_step3").glob("*optim*")
    content = file.read_bytes()
    file.write_bytes(content.replace(b"exp_avg_sq", b"exp_inf_xx"))
    with pytest.raises(ValueError, match="exp_avg, exp_inf_xx: an optimizer that is not offered"):
        convert(str(tmp_path / "ds"), str(tmp_path / "save"))


@pytest.mark.parametrize(("states", "home"), [("exact", "nvme"), ("compact", "cpu")])
def test_of_a_durable_run_the_last_commit_is_that_save(
    states: str, home: str, tmp_path: Path
) -> None:
    config = {"durable": str(tmp_path / "run"), "commit_every": 1, "states": states}
    with attached((home,) * 3, tmp_path, **config) as one:
        one.engine.user_state = lambda: {"at": one.engine.steps}
        for number in range(3):
            plain(one, number)
        offload.save(one.model, one.optimizer, tmp_path / "saved", user={"at": 3})
    assert convert(str(tmp_path / "run"), str(tmp_path / "converted")) == []
    (run, sets), (again, found) = (
        save_reader.read(str(tmp_path / name)) for name in ("saved", "converted")
    )
    for state in run["optimizer"]["states"].values():  # Compact moments are float32 there.
        state["slots"] = {k: v for k, v in state["slots"].items() if not k.endswith("_scale")}
    del again["sets"], run["sets"]  # Others, as their tensors have another order.
    assert {"frozen": True, **again} == run
    assert found.keys() == {prefix for prefix in sets if not prefix.endswith("_scale")}
    for prefix, tensors in found.items():
        assert tensors.keys() == sets[prefix].keys()
        assert all((sets[prefix][name] == one).all() for name, one in tensors.items())
    main(["convert", str(tmp_path / "run"), str(tmp_path / "weights"), "--to", "huggingface"])
    (weights,) = (tmp_path / "weights").glob("*.safetensors")
    assert load_file(weights).keys() == sets["model"].keys()
