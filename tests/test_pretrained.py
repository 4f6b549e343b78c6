"""offload.from_pretrained and export: what transformers itself loads, and reads again."""

from __future__ import annotations

import copy
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offload
from offload import pretrained
from tests.pretrained import INPUTS, MIXED, SIZES, llama, loaded, saved
from tests.small import config
from tests.training import RESIDENT, same_bits

os.environ.setdefault("HF_HUB_OFFLINE", "1")

transformers: Any = pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

VISION: Any = {key: SIZES[key] for key in SIZES if key[:3] in ("hid", "num", "int")}
VISION |= {"image_size": 32, "patch_size": 8}

T5: Any = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
EXPERTS: Any = {"num_key_value_heads": 2, "num_local_experts": 4}


def made(kind: str, configured: str, **options: Any) -> Any:
    torch.manual_seed(3)
    return getattr(transformers, kind)(getattr(transformers, configured)(**options))


def llava() -> Any:
    text, vision = transformers.LlamaConfig(**SIZES), transformers.CLIPVisionConfig(**VISION)
    options = {"text_config": text, "vision_config": vision}
    return made("LlavaForConditionalGeneration", "LlavaConfig", **options)


LOADED: dict[str, tuple[Callable[[], Any], str, dict[str, Any]]] = {
    "cast": (lambda: llama(), "AutoModelForCausalLM", {"dtype": torch.bfloat16}),
    "tied": (lambda: llama(tie_word_embeddings=True), "AutoModelForCausalLM", {}),
    "base": (lambda: llama(tie_word_embeddings=True), "AutoModel", {}),
    "new head": (
        lambda: made("BertForMaskedLM", "BertConfig", **SIZES),
        "AutoModelForSequenceClassification",
        {"num_labels": 3},
    ),
    "other shape": (
        lambda: made("BertForSequenceClassification", "BertConfig", **SIZES, num_labels=4),
        "AutoModelForSequenceClassification",
        {"num_labels": 3, "ignore_mismatched_sizes": True},
    ),
    "shared": (
        lambda: made("T5ForConditionalGeneration", "T5Config", **T5),
        "AutoModelForSeq2SeqLM",
        {},
    ),
    "experts": (
        lambda: made("MixtralForCausalLM", "MixtralConfig", **SIZES, **EXPERTS),
        "AutoModelForCausalLM",
        {},
    ),
    "renamed": (llava, "LlavaForConditionalGeneration", {}),
    "buffers": (
        lambda: made(
            *("ResNetForImageClassification", "ResNetConfig"),
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
        ),
        "AutoModelForImageClassification",
        {},
    ),
}


def ties(model: Any) -> set[tuple[str, ...]]:
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    return {tuple(one) for one in names.values()}


def assert_alike(ours: Any, theirs: Any) -> None:
    """The same names, values, buffers (also those of no file) and ties."""
    a, b = ours.state_dict(), theirs.state_dict()
    a |= dict(ours.named_buffers())
    b |= dict(theirs.named_buffers())
    assert a.keys() == b.keys()
    for name, value in b.items():
        assert a[name].dtype == value.dtype, name
        assert torch.equal(a[name], value), name
    assert ties(ours) == ties(theirs)


@pytest.mark.parametrize("name", LOADED)
def test_it_is_what_transformers_loads_and_goes_back(name: str, tmp_path: Path) -> None:
    build, named, options = LOADED[name]
    kind = getattr(transformers, named)
    folder = saved(build(), tmp_path / "theirs", max_shard_size="100KB")
    torch.manual_seed(5)
    theirs = kind.from_pretrained(folder, **options)
    torch.manual_seed(5)
    ours, optimizer = loaded(kind, folder, tmp_path, **options)
    assert type(ours) is type(theirs)
    assert_alike(ours, theirs)
    ours.save_pretrained(tmp_path / "ours", max_shard_size="100KB")
    optimizer.engine.close()
    options.pop("ignore_mismatched_sizes", None)
    again, report = kind.from_pretrained(tmp_path / "ours", output_loading_info=True, **options)
    assert not any(report.values())
    assert_alike(again, theirs)


@pytest.mark.parametrize("placement", [RESIDENT, ("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme")])
def test_it_trains_everywhere_and_the_folder_has_the_same_logits(
    placement: Any, tmp_path: Path
) -> None:
    kind = transformers.AutoModelForCausalLM
    build = llama(tie_word_embeddings=True)
    build.generation_config.max_new_tokens = 3
    folder = saved(build, tmp_path / "theirs")
    model, optimizer = loaded(kind, folder, tmp_path, placement)
    assert model.training
    assert model.generation_config.max_new_tokens == 3
    for _ in range(2):
        model(INPUTS, labels=INPUTS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        expected = model(INPUTS).logits
    offload.export(model, tmp_path / "ours")
    files = load_file(tmp_path / "ours" / "model-00001-of-00001.safetensors")
    assert "lm_head.weight" not in files  # Tied: once, under the name that transformers keeps.
    optimizer.engine.close()
    plain = kind.from_pretrained(tmp_path / "ours")
    assert plain.generation_config.max_new_tokens == 3
    with torch.no_grad():
        assert same_bits(plain(INPUTS).logits, expected)
    served, none = offload.from_pretrained(kind, tmp_path / "ours", config(placement, tmp_path))
    assert none is None
    assert not served.training
    with torch.no_grad():
        assert same_bits(served(INPUTS).logits, expected)
    offload.engine_of(served).close()


def test_two_that_are_tied_are_compared_where_the_files_have_both(tmp_path: Path) -> None:
    kind = transformers.AutoModelForCausalLM
    folder = saved(llama(tie_word_embeddings=True), tmp_path / "model")
    values = load_file(folder / "model.safetensors")
    values["lm_head.weight"] = values["model.embed_tokens.weight"].clone()
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    model, optimizer = loaded(kind, folder, tmp_path)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    optimizer.engine.close()
    values["lm_head.weight"][0, 0] += 1
    save_file(values, folder / "model.safetensors", {"format": "pt"})
    with pytest.warns(RuntimeWarning, match="is not tied to model.embed_tokens"):
        model, optimizer = loaded(kind, folder, tmp_path)
    assert same_bits(model.lm_head.weight.detach(), values["lm_head.weight"])
    assert not same_bits(model.model.embed_tokens.weight.detach(), values["lm_head.weight"])
    optimizer.engine.close()


def test_a_folder_of_the_hubs_cache_has_links(tmp_path: Path) -> None:
    blobs, folder = saved(llama(), tmp_path / "blobs", max_shard_size="50KB"), tmp_path / "snapshot"
    folder.mkdir()
    for one in blobs.iterdir():
        (folder / one.name).symlink_to(one)
    model, optimizer = loaded(transformers.AutoModelForCausalLM, folder, tmp_path)
    assert_alike(model, llama())
    model.save_pretrained(folder)
    optimizer.engine.close()
    assert_alike(transformers.AutoModelForCausalLM.from_pretrained(folder), llama())
    assert_alike(transformers.AutoModelForCausalLM.from_pretrained(blobs), llama())  # As before.


# -- refused before anything is taken --------------------------------------------------------------


def folder_with(change: Callable[[Path], object], tmp_path: Path) -> Path:
    folder = saved(llama(), tmp_path / "model")
    change(folder)
    return folder


def quantized(folder: Path) -> None:
    found = json.loads((folder / "config.json").read_text())
    found["quantization_config"] = {"quant_method": "fp8"}
    (folder / "config.json").write_text(json.dumps(found))


REFUSED: dict[str, tuple[Callable[[Path], object], dict[str, Any], type[Exception], str]] = {
    "a name of the hub": (
        lambda folder: (folder / "config.json").unlink(),
        {},
        ValueError,
        "found no config.json.*snapshot_download",
    ),
    "no weights": (
        lambda folder: (folder / "model.safetensors").unlink(),
        {},
        ValueError,
        "found neither .*model.safetensors.index.json",
    ),
    "cut short": (
        lambda folder: os.truncate(folder / "model.safetensors", 5000),
        {},
        ValueError,
        "cut short",
    ),
    "quantized": (quantized, {}, ValueError, "quantized model"),
    "device_map": (lambda folder: None, {"device_map": "auto"}, ValueError, "device_map is not"),
    "a class": (
        lambda folder: None,
        {"optimizer": torch.optim.AdamW},
        TypeError,
        "optimizer is the class",
    ),
    "no function": (lambda folder: None, {"prepare": 3}, TypeError, "prepare is a int: write"),
    "no model": (lambda folder: None, {"prepare": lambda model: None}, TypeError, "turned None"),
    "shapes": (lambda folder: None, {"hidden_size": 48}, RuntimeError, "ignore_mismatched_sizes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_streamed_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, options, kind, told = REFUSED[name]
    folder = folder_with(change, tmp_path)
    monkeypatch.delattr(pretrained, "attach")
    with pytest.raises(kind, match=told):
        loaded(transformers.AutoModelForCausalLM, folder, tmp_path, **options)


@pytest.mark.parametrize("taken", [True, False])
def test_a_converter_that_takes_more_than_the_window_is_refused(
    taken: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stacked experts are made one after the other, and one alone may be too large."""
    build, named, _ = LOADED["experts"]
    folder = saved(build(), tmp_path / "model")
    one = 3 * 2 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 4
    monkeypatch.setattr(pretrained, "WINDOW_BYTES", one if taken else one - 1)
    kind = getattr(transformers, named)
    if taken:
        loaded(kind, folder, tmp_path)[1].engine.close()
        return
    with pytest.raises(ValueError, match=r"experts.*MergeModulelist.*at most.*save_original_form"):
        loaded(kind, folder, tmp_path)


def test_files_that_lack_most_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(llama(), tmp_path / "model")
    save_file({"other": torch.ones(2)}, folder / "model.safetensors", {"format": "pt"})
    monkeypatch.setattr(pretrained, "WINDOW_BYTES", 1000)
    with pytest.raises(ValueError, match="the files lack model"):
        loaded(transformers.AutoModelForCausalLM, folder, tmp_path)


def test_what_only_transformers_has_found_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have values of its own, in silence."""

    class Blind(pretrained.SetsReader):
        def __init__(self, *given: Any, **options: Any):
            super().__init__(*given, **options)
            del self.places["model"]["model.norm.weight"]

    monkeypatch.setattr(pretrained, "SetsReader", Blind)
    folder = saved(llama(), tmp_path / "model")
    with pytest.raises(ValueError, match=r"transformers has model\.norm\.weight of what is not"):
        loaded(transformers.AutoModelForCausalLM, folder, tmp_path)


def test_a_bit_that_changed_in_our_files_is_found(tmp_path: Path) -> None:
    kind = transformers.AutoModelForCausalLM
    folder = saved(llama(), tmp_path / "theirs")
    model, optimizer = loaded(kind, folder, tmp_path)
    offload.export(model, tmp_path / "ours")
    optimizer.engine.close()
    file = tmp_path / "ours" / "model-00001-of-00001.safetensors"
    content = bytearray(file.read_bytes())
    content[-100] ^= 4
    file.write_bytes(content)
    with pytest.raises(OSError, match="checksum mismatch"):
        loaded(kind, tmp_path / "ours", tmp_path)


# -- whole, or not at all --------------------------------------------------------------------------


def test_an_export_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.checkpoint import exporting

    kind, folder = transformers.AutoModelForCausalLM, saved(llama(), tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    before = {one.name: one.read_bytes() for one in folder.iterdir()}
    model, optimizer = loaded(kind, folder, tmp_path)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(exporting, "write_sets", full)
        for where in (folder, tmp_path / "new"):
            with pytest.raises(OSError, match="No space"):
                model.save_pretrained(where)
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == before
    assert not (tmp_path / "new").exists()
    model.save_pretrained(folder)
    names = {one.name for one in folder.iterdir()}
    assert "tokenizer.json" in names
    assert "model.safetensors" not in names
    model.save_pretrained(folder, max_shard_size="20KB")  # More files than before, then fewer.
    offload.export(model, folder)
    assert sum(one.suffix == ".safetensors" for one in folder.iterdir()) == 1
    optimizer.engine.close()
    assert_alike(kind.from_pretrained(folder), llama())


def test_save_pretrained_goes_with_detach_and_copies_have_their_own(tmp_path: Path) -> None:
    folder = saved(llama(), tmp_path / "model")
    model, optimizer = loaded(transformers.LlamaForCausalLM, folder, tmp_path)
    assert "save_pretrained" in vars(model)
    copied = copy.deepcopy(model)
    again = pickle.loads(pickle.dumps(copied))
    for number, one in enumerate((copied, again)):
        assert one.save_pretrained.__self__ is one
        one.save_pretrained(tmp_path / str(number))
        assert (tmp_path / str(number) / "model.safetensors").exists()
    model.save_pretrained(tmp_path / "given", state_dict=model.state_dict())  # Their own.
    assert (tmp_path / "given" / "model.safetensors").exists()
    with pytest.raises(TypeError, match="selected_adapters is of adapters"):
        offload.export(model, tmp_path / "x", selected_adapters=["a"])
    model, _ = offload.detach(model)
    assert "save_pretrained" not in vars(model)
    optimizer.engine.close()


def test_a_model_of_nobody_is_not_exported_and_keeps_what_its_class_has(tmp_path: Path) -> None:
    class Own(torch.nn.Linear):
        def save_pretrained(self, folder: Path) -> None:
            torch.save(self.state_dict(), folder)

    model, _ = offload.attach(Own(4, 4), None, config(MIXED, tmp_path))
    with pytest.raises(TypeError, match=r"asked to export a Own; found no .* of transformers"):
        offload.export(model, tmp_path / "x")
    model.save_pretrained(tmp_path / "own")  # type: ignore[operator]
    assert same_bits(torch.load(tmp_path / "own")["weight"], model.weight.detach())
    offload.engine_of(model).close()


_PEAKS = """
import json, os, sys, threading, time, torch, transformers, offload
from transformers.models.llama import modeling_llama
from transformers import generation
from tests.test_budgets import anonymous
from tests.pretrained import llama

base, out = sys.argv[1:]
llama().save_pretrained(out + "/first")  # What is imported at the first use.
transformers.AutoModelForCausalLM.from_pretrained(out + "/first", device_map="meta")

def resident():
    with open("/proc/self/status") as status:
        return anonymous(status.read())

def watch():
    while True:
        peaks[-1] = max(peaks[-1], resident())
        time.sleep(0.002)

before, peaks = resident(), [0]
threading.Thread(target=watch, daemon=True).start()
config = offload.Config(params="nvme", nvme_path=out, device_memory="140MiB", cpu_memory="240MiB")
model, _ = offload.from_pretrained(transformers.AutoModelForCausalLM, base, config)
peaks.append(0)
model.save_pretrained(out + "/export")
taken = offload.engine_of(model).plan.taken_bytes
print(json.dumps([one - before - taken("device") - taken("cpu") for one in peaks]))
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_loading_and_exporting_take_a_window_beside_the_budgets(tmp_path: Path) -> None:
    build = llama(hidden_size=512, intermediate_size=2048, num_hidden_layers=40, vocab_size=60000)
    size = sum(one.nbytes for one in build.parameters())
    assert size > 600 << 20
    assert build.lm_head.weight.nbytes > 100 << 20  # A unit of it alone would be seen.
    saved(build.to(torch.bfloat16), tmp_path / "base", max_shard_size="100MB")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    (tmp_path / "base" / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _PEAKS, str(tmp_path / "base"), str(tmp_path)],
        capture_output=True,
        check=False,
    )
    assert not done.returncode, done.stderr.decode()[-2000:]
    peaks = json.loads(done.stdout)
    assert max(peaks) < 128 << 20, peaks
    files = (tmp_path / "export").glob("*.safetensors")
    assert sum(one.stat().st_size for one in files) > size


@pytest.mark.parametrize("placement", [RESIDENT, MIXED])
def test_a_run_that_goes_on_reads_no_weights_of_the_folder(
    placement: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, plain, found = saved(llama(), tmp_path / "base"), pretrained._Source.values, []
    given = config(placement, tmp_path, durable=str(tmp_path / "run"))
    for resumed in (None, (1, None)):
        names: list[str] = []

        def values(self: Any, prefix: str, name: str, *part: int, to: Any = names) -> torch.Tensor:
            to.append(name)
            return plain(self, prefix, name, *part)

        monkeypatch.setattr(pretrained._Source, "values", values)
        model, optimizer = offload.from_pretrained(
            transformers.LlamaForCausalLM,
            folder,
            given,
            optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        )
        assert (optimizer.engine.resumed, bool(names)) == (resumed, resumed is None)
        if resumed is None:
            model(input_ids=INPUTS, labels=INPUTS).loss.backward()
            optimizer.step()
        with torch.no_grad():
            found.append(model(input_ids=INPUTS).logits)
        optimizer.engine.close()
    assert same_bits(*found)
