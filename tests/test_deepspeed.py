"""DeepSpeed files: what each key becomes, and what is refused."""

import dataclasses
import json
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload import deepspeed
from offload.config import Config
from offload.deepspeed import ALIASES, KEYS

HUGGING_FACE = """{
    // as the integration's guide has it
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto",
                                              "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": "auto",
                  "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true, "contiguous_gradients": true, "sub_group_size": 1e9,
        "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto", "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": true,
    },
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
    "steps_per_print": 2000, "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto", "wall_clock_breakdown": false
}"""

NVME = """{
  "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8, /* a
  comment // over "lines" */
  "gradient_clipping": 0.5,  # and one of a shell
  "zero_optimization": {
    "stage": 3, "sub_group_size": 2e7,
    "offload_param": {"device": "nvme", "nvme_path": "/mnt/a//b", "buffer_count": 5,
                      "buffer_size": 1e8, "max_in_cpu": 1e9},
    "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/c#d", "pipeline_read": true,
                          "pipeline_write": true, "fast_init": false}
  },
  "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": "false",
          "overlap_events": "true", "of_my_own": 3},
  "optimizer": {"type": "Adam", "params": {"lr": 3e-4, "betas": [0.9, 0.99], "weight_decay": 0.1}}
}"""


def read(text, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(text)
    return deepspeed.read(path)


def config_of(found):
    found = deepspeed.translate(found) if isinstance(found, dict) else found
    return Config(**found.fields)


def test_a_file_with_auto_everywhere(tmp_path):
    found = read(HUGGING_FACE, tmp_path)
    config = config_of(found)
    assert (config.params, config.gradients, config.optimizer) == ("cpu", "cpu", "cpu")
    assert (config.max_grad_norm, config.micro_batches, config.nvme_path) == (1.0, None, ())
    assert not found.unknown
    assert found.values["optimizer.type"] == "AdamW"


def test_a_file_for_nvme_with_comments(tmp_path):
    found = read(NVME, tmp_path)
    config = config_of(found)
    assert (config.params, config.gradients, config.optimizer) == ("nvme", "cpu", "nvme")
    assert config.nvme_path == ("/mnt/a//b", "/mnt/c#d")
    assert (config.max_grad_norm, config.micro_batches) == (0.5, 8)
    assert found.values["train_micro_batch_size_per_gpu"] == 4
    assert found.values["aio.intra_op_parallelism"] == 1
    assert found.unknown == ["aio.of_my_own"]
    report = found.report()
    told = "\n".join(report)
    assert "zero_optimization.offload_param.device = \"nvme\": Config.params='nvme'" in report
    assert "gradient_accumulation_steps = 8: Config.micro_batches=8" in report
    assert "aio.of_my_own" in report[-1]
    for name in found.values:
        assert name in told


def test_what_is_missing_is_the_default():
    found = deepspeed.translate({})
    config = config_of(found)
    assert (config.params, config.gradients, config.optimizer) == ("auto", "auto", "auto")
    assert (config.max_grad_norm, config.gradient_dtype) == (1.0, "param")
    assert found.report() == [
        "gradient_clipping is not set: Config.max_grad_norm=1.0, DeepSpeed's default"
    ]
    assert config_of({"gradient_clipping": 0}).max_grad_norm is None
    auto = {"gradient_clipping": "auto", "fp16": {"enabled": "auto"}, "bf16": "auto"}
    assert deepspeed.translate(auto).report() == [
        "gradient_clipping is not set: Config.max_grad_norm=1.0, DeepSpeed's default",
        '"auto", so as if missing: gradient_clipping, fp16.enabled, bf16',
    ]


def zero(**section):
    return config_of({"zero_optimization": section})


def test_devices():
    for device, tier in (("none", "device"), ("cpu", "cpu"), ("NVMe", "nvme")):
        path = "/x" if tier == "nvme" else None
        config = zero(offload_param={"device": device, "nvme_path": path})
        assert (config.params, config.optimizer, config.gradients) == (tier, "auto", "auto")
        config = zero(offload_optimizer={"device": device, "nvme_path": path})
        grads = "auto" if tier == "device" else "cpu"
        assert (config.params, config.optimizer, config.gradients) == ("auto", tier, grads)
    both = {"device": "nvme", "nvme_path": "/x"}
    assert zero(offload_param=both, offload_optimizer=both).nvme_path == ("/x",)
    one = zero(offload_param={"device": "cpu", "nvme_path": "/y"}, offload_optimizer=both)
    assert one.nvme_path == ("/x",)
    assert zero(offload_param=None, offload_optimizer={}).params == "auto"


def test_old_switches_and_a_share_on_the_device():
    config = zero(cpu_offload=True, cpu_offload_param="true")
    assert (config.params, config.gradients, config.optimizer) == ("cpu", "cpu", "cpu")
    assert zero(cpu_offload=False).optimizer == "auto"
    config = zero(offload_optimizer={"device": "cpu", "ratio": 0.3})
    assert (config.optimizer, config.gradients) == ("auto", "cpu")
    assert config_of({"data_types": {"grad_accum_dtype": "fp32"}}).gradient_dtype


@pytest.mark.parametrize(
    ("whole", "micro", "count", "ranks", "found"),
    [
        (None, 4, 8, 1, 8),
        (32, 4, None, 1, 8),
        (32, 4, 8, 1, 8),
        (64, 4, 8, 2, 8),
        (32, None, 8, 1, 8),
        (None, None, None, 1, None),
        (32, None, None, 2, None),
        (None, 4, None, 1, None),
        (32, "auto", None, 1, None),
        (32, None, "auto", 1, None),
        ("auto", 4, None, 1, None),
        ("auto", "auto", 4, 1, 4),
    ],
)
def test_micro_batches(whole, micro, count, ranks, found, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", str(ranks))
    content = {"train_batch_size": whole, "train_micro_batch_size_per_gpu": micro}
    content["gradient_accumulation_steps"] = count
    got = deepspeed.translate(content)
    assert got.fields["micro_batches"] == found


def test_what_people_have_and_deepspeed_takes():
    old = {"bfloat16": {"enabled": True}, "timers": 3, "monitor": {}}
    found = deepspeed.translate(old | {"model_parallel_size": 2})
    assert found.values == {"bf16.enabled": True}
    assert found.unknown == ["timers", "monitor", "model_parallel_size"]
    assert deepspeed.translate({"aoi": {}}).report()[-1].endswith("as DeepSpeed does: aoi")
    assert zero(overlap_comm=1, stage3_allgather_sequential=True, zenflow={"topk_ratio": 0.1})
    assert zero(offload_param={"device": "cpu", "nvme_path": ""}).params == "cpu"
    nvme = [{"device": "nvme", "nvme_path": path} for path in ("/a", "/a/")]
    assert len(zero(offload_param=nvme[0], offload_optimizer=nvme[1]).nvme_path) == 1


WRONG = {
    '{"zero_optimization": {"offload_parm": {}}}': "did you mean 'offload_param'?",
    '{"zero_optimisation": {}}': "did you mean 'zero_optimization'?",
    '{"zero_optimization": {"xyzzy": 1}}': "no key 'xyzzy' in zero_optimization: DeepSpeed 0.19",
    '{"aio": {"queue_dept": 8}}': "in aio: did you mean 'queue_depth'?",
    '{"zero_optimization": {"offload_param": {"device": "disk"}}}': "expected one of none, cpu",
    '{"gradient_accumulation_steps": true}': "expected a whole number from 1",
    '{"gradient_accumulation_steps": 1.5}': "expected a whole number from 1",
    '{"zero_optimization": {"cpu_offload": 2}}': "expected true or false",
    '{"zero_optimization": 3}': "expected an object",
    '{"gradient_clipping": "x"}': 'gradient_clipping holds "x": expected a number',
    '{"gradient_accumulation_steps": 0}': "expected a whole number from 1",
    '{"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}': "do not agree",
    '{"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4,'
    ' "gradient_accumulation_steps": 4}': "do not agree",
    "[1]": "expected an object",
    "{": "line 1",
    '{"a": 1\n // x\n "b": 2}': "line 3",
}


@pytest.mark.parametrize(("text", "told"), WRONG.items(), ids=range(len(WRONG)))
def test_what_is_wrong_is_named(text, told, tmp_path):
    with pytest.raises(ValueError) as caught:
        read(text, tmp_path)
    assert told in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/ds.json: ")


def test_every_key_is_accepted_under_every_name():
    names = {**{name: name for name in KEYS}, **ALIASES}
    del names["bfloat16"]  # A section.
    for name, key in ((name, KEYS[proper]) for name, proper in names.items()):
        value = key.choices[0] if key.choices else key.default
        *sections, last = name.split(".")
        content = {last: value}
        for section in reversed(sections):
            content = {section: content}
        found = deepspeed.translate(content)
        assert not found.unknown
        assert (key.name in found.values) == (value is not None)


@given(st.sampled_from([*KEYS.values()]), st.data())
def test_a_value_of_any_kind_is_taken_or_refused_by_name(key, data):
    value = data.draw(
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers())
    )
    *sections, last = key.name.split(".")
    content = {last: value}
    for section in reversed(sections):
        content = {section: content}
    try:
        found = deepspeed.translate(content)
    except ValueError as error:
        told = str(error)
    else:
        assert set(found.values) <= {key.name}
        told = "\n".join(found.report())
        told = told if found.values else last
    assert any(name in told for name in (last, "max_grad_norm", "nvme_path", "WORLD_SIZE"))


def test_config_says_once_what_became_of_a_file(tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(HUGGING_FACE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            config = Config.from_deepspeed(path)
    (told,) = caught
    assert told.filename == __file__
    assert "offload_param.device = \"cpu\": Config.params='cpu'" in str(told.message)
    assert isinstance(config, Config)
    assert config == config_of(deepspeed.read(path))
    assert hash(config)


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"gradient_clipping": -1}, "Config.max_grad_norm=-1.0: expected a positive"),
        ({"zero_optimization": {"offload_param": {"device": "nvme"}}}, "nvme_path is empty"),
    ],
)
def test_what_a_config_cannot_be_is_refused_by_its_field(content, told):
    with pytest.raises(ValueError, match=told):
        Config.from_deepspeed(content, report=False)


def file_of(content, tmp_path):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_dict_and_a_file_that_is_not_there(tmp_path):
    content = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}
    with pytest.warns(UserWarning, match="what a DeepSpeed dict became:"):
        config = Config.from_deepspeed(content)
    assert Config.from_deepspeed(file_of(content, tmp_path), report=False) == config
    with pytest.raises(FileNotFoundError, match="gone") as caught:
        Config.from_deepspeed(tmp_path / "gone")
    assert caught.value.filename == str(tmp_path / "gone")


def test_what_is_not_done_and_matters_is_told_first():
    on = {"sparse_attention": {"mode": "fixed"}, "amp": {"enabled": "false"}, "compile": {"a": 1}}
    first, *others = deepspeed.translate(on).report()
    assert first == "NOT DONE HERE, so training differs from DeepSpeed's: sparse_attention"
    assert not [line for line in others if line.startswith("NOT DONE") or "sparse" in line]


def test_budgets_beside_a_file():
    """As docs/deepspeed.md says."""
    config = dataclasses.replace(config_of({}), cpu_memory="64MiB")
    model = torch.nn.Linear(2, 2)
    _, optimizer = offload.attach(model, torch.optim.AdamW(model.parameters()), config)
    with optimizer.engine as engine:
        budgets = {use.tier: use.budget_bytes for use in engine.report().tiers}
    assert budgets["cpu"] == 64 << 20


def test_what_a_file_does_to_gradients_is_told():
    found = deepspeed.translate(
        {
            "zero_optimization": {
                "offload_optimizer": {"device": "nvme", "nvme_path": "/a"},
                "offload_param": {"device": "nvme", "nvme_path": "/a"},
            }
        }
    )
    assert "with the optimizer states go gradients: Config.gradients='cpu'" in found.report()
