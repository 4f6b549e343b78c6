"""Every key of DeepSpeed's JSON that people have in files for offload, and what it is here.

The keys, their defaults and their other names are those of DeepSpeed 0.19 (`runtime/config.py`,
`runtime/zero/config.py`, `runtime/zero/offload_config.py`, `runtime/swap_tensor/aio_config.py`).
docs/deepspeed.md is made from this table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, Literal

Kind = Literal["bool", "int", "float", "text", "section", "any"]
"""What a value is read as. `bool` takes the texts true and false too, `int` takes 5e8; every kind
takes "auto" and null, which are the default. `section` holds keys of its own."""

Fate = Literal["field", "yours", "nothing"]
"""`field`: it becomes a field of Config. `yours`: your program has it already, and that counts.
`nothing`: it has no meaning here."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Key:
    """One key."""

    name: str
    """With the sections that it is in: `zero_optimization.stage`."""
    kind: Kind
    default: Any
    fate: Fate
    becomes: str = ""
    """The field of Config, where it becomes one."""
    says: str
    """How it is translated, or why it has no meaning."""
    choices: tuple[str, ...] = ()
    """The only texts allowed, where that is so."""
    aliases: tuple[str, ...] = ()
    """Other names, without sections."""


OPEN_SECTIONS = ("", "aio", "activation_checkpointing", "fp16", "bf16", "data_types")
"""In these DeepSpeed ignores keys that it does not know; "" is the file itself."""

FREE_SECTIONS = ("optimizer.params", "scheduler.params")
"""In these any key may be: they are arguments of a class."""

_OPTIMIZERS = """
lr betas eps weight_decay momentum dampening nesterov amsgrad maximize foreach fused capturable
differentiable bias_correction adam_w_mode torch_adam fp32_optimizer_states set_grad_none
freeze_step max_coeff min_coeff max_grad_norm muon_lr adam_lr ns_method cuda_aware
comm_backend_name var_freeze_step factor_min factor_max
"""

_SCHEDULERS = """
warmup_min_lr warmup_max_lr warmup_num_steps warmup_type total_num_steps warmup_min_ratio
cos_min_ratio last_batch_iteration cycle_min_lr cycle_max_lr decay_lr_rate cycle_first_step_size
cycle_second_step_size cycle_first_stair_count cycle_second_stair_count decay_step_size
cycle_momentum cycle_min_mom cycle_max_mom decay_mom_rate lr_range_test_min_lr
lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase
"""

ARGUMENTS: dict[str, tuple[str, ...]] = {
    "optimizer.params": (*_OPTIMIZERS.split(),),
    "scheduler.params": (*_SCHEDULERS.split(),),
}
"""Of the classes that DeepSpeed has itself: what is nearly one of these is misspelt."""

_PLANNED = "buffers and their number are planned, to fit the budgets (device_memory, cpu_memory)"
_ALWAYS = "always so here"
_RANKS = "concerns traffic between ranks; one process drives one device here"
_MEASURED = "chosen for the drive by itself; `offload bench nvme` shows what was measured"
_WHOLE = "state_dict() is always whole, whatever lives where"
_MONITOR = "engine.report() and `offload report` tell where the time goes"
_ELSE = "not a matter of offloading: what it asks for is not done here"
OTHER = "not done here: where it is on, what is trained without it is something else"
"""What a key says that changes the mathematics, and that nothing here does."""
_DEVICES = ("none", "cpu", "nvme")


def _none(section: str, why: str, names: str) -> list[Key]:
    """Keys without a meaning here, each as `name=default` or `name=default|alias|...`."""
    found = []
    for word in names.split():
        name, _, rest = word.partition("=")
        text, *aliases = rest.split("|")
        default = json.loads(text)
        found.append(
            Key(
                name=f"{section}.{name}".lstrip("."),
                kind=_KINDS[type(default)],
                default=default,
                fate="nothing",
                says=why,
                aliases=tuple(aliases),
            )
        )
    return found


_KINDS: dict[type, Kind] = {bool: "bool", int: "int", float: "float", type(None): "any"}
_KINDS |= {dict: "any"}


def _key(name: str, kind: Kind, default: Any, becomes: str, says: str, **more: Any) -> Key:
    fate: Fate = "field" if becomes else "yours"
    return Key(name=name, kind=kind, default=default, fate=fate, becomes=becomes, says=says, **more)


def _section(name: str) -> Key:
    return Key(name=name, kind="section", default=None, fate="nothing", says="")


_ZERO = "zero_optimization"
_PARAM, _OPTIMIZER = f"{_ZERO}.offload_param", f"{_ZERO}.offload_optimizer"
_TIERS = "cpu is cpu, nvme is nvme, none is device; where the section is missing, auto"
_PATH = "where device is nvme; different paths of weights and states are striped over together"

_LOOP = (
    _key(
        "train_batch_size",
        "int",
        None,
        "micro_batches",
        "divided by the micro-batch and WORLD_SIZE where gradient_accumulation_steps is missing, 1 "
        "where both are; must agree with them",
    ),
    _key("train_micro_batch_size_per_gpu", "int", None, "", "the batch size of your DataLoader"),
    _key(
        "gradient_accumulation_steps",
        "int",
        None,
        "micro_batches",
        "backward() calls before each step(); 1 where it is missing and nothing else tells, unless "
        "one of the three is auto",
    ),
    _key(
        "gradient_clipping",
        "float",
        1.0,
        "max_grad_norm",
        "0 is None; where it is missing 1.0, as in DeepSpeed since June 2026",
    ),
    _section("optimizer"),
    _key(
        "optimizer.type",
        "text",
        None,
        "",
        "the optimizer that you give to attach, which must be of that kind",
    ),
    _key("optimizer.params", "any", None, "", "arguments of your optimizer, which must be equal"),
    _key("optimizer.legacy_fusion", "bool", False, "", "the optimizer that you give to attach"),
    _section("scheduler"),
    _key(
        "scheduler.type",
        "text",
        None,
        "",
        "the scheduler that you make with torch.optim.lr_scheduler; one made before attach is "
        "refused while the file has one too",
    ),
    _key("scheduler.params", "any", None, "", "arguments of your scheduler"),
    replace(_section("bf16"), aliases=("bfloat16",)),
    _key("bf16.enabled", "bool", False, "", "model.to(torch.bfloat16); fp32 masters are kept"),
    *_none("bf16", _ALWAYS, "immediate_grad_update=true check_grad_overflow=false|check_overflow"),
    _section("fp16"),
    _key(
        "fp16.enabled",
        "bool",
        False,
        "",
        "fp32 parameters under torch.autocast with a GradScaler",
    ),
    *_none(
        "fp16",
        "the GradScaler of your loop has it",
        "auto_cast=false loss_scale=0.0 initial_scale_power=16 loss_scale_window=1000 "
        "hysteresis=2 consecutive_hysteresis=false min_loss_scale=1",
    ),
    *_none("fp16", "masters are always fp32", "fp16_master_weights_and_grads=false"),
    _section("data_types"),
    _key(
        "data_types.grad_accum_dtype",
        "text",
        None,
        "gradient_dtype",
        "fp32 is fp32, bf16 and fp16 are param",
        choices=("fp32", "bf16", "fp16"),
    ),
)

_OFFLOAD = (
    _section(_ZERO),
    Key(
        name=f"{_ZERO}.stage",
        kind="int",
        default=0,
        fate="nothing",
        says="sharding over ranks is torch's (FSDP2); the offload sections say which tier holds "
        "what",
    ),
    _section(_PARAM),
    _key(f"{_PARAM}.device", "text", "none", "params", _TIERS, choices=_DEVICES),
    _key(f"{_PARAM}.nvme_path", "text", None, "nvme_path", _PATH),
    *_none(_PARAM, _PLANNED, "buffer_count=5 buffer_size=100000000 max_in_cpu=1000000000"),
    *_none(_PARAM, _ALWAYS, "pin_memory=true"),
    _section(_OPTIMIZER),
    _key(
        f"{_OPTIMIZER}.device",
        "text",
        "none",
        "optimizer",
        f"{_TIERS}; with cpu and nvme `gradients` is cpu, where DeepSpeed has them",
        choices=_DEVICES,
    ),
    _key(f"{_OPTIMIZER}.nvme_path", "text", None, "nvme_path", _PATH),
    _key(
        f"{_OPTIMIZER}.ratio",
        "float",
        1.0,
        "optimizer",
        "below 1, where device is cpu, it is auto: what fits on the device is updated there",
    ),
    *_none(_OPTIMIZER, _PLANNED, "buffer_count=4 buffer_size=100000000"),
    *_none(
        _OPTIMIZER,
        _ALWAYS,
        "pin_memory=true pipeline=false pipeline_read=false pipeline_write=false fast_init=false "
        "super_offload=false",
    ),
    *_none(
        _OPTIMIZER,
        "the update takes all cores of this process (CPU_ADAM_THREADS)",
        "cpuadam_cores_perc=0.8",
    ),
    _key(
        f"{_ZERO}.cpu_offload",
        "bool",
        False,
        "optimizer",
        "deprecated: true is offload_optimizer with device cpu",
    ),
    _key(
        f"{_ZERO}.cpu_offload_param",
        "bool",
        False,
        "params",
        "deprecated: true is offload_param with device cpu",
    ),
    *_none(_ZERO, _ALWAYS, "cpu_offload_use_pin_memory=true contiguous_gradients=true"),
    *_none(
        _ZERO,
        _PLANNED,
        "sub_group_size=1000000000 stage3_prefetch_bucket_size=50000000|prefetch_bucket_size "
        "stage3_param_persistence_threshold=100000|param_persistence_threshold "
        "stage3_model_persistence_threshold=9223372036854775807|model_persistence_threshold "
        "stage3_max_live_parameters=1000000000|max_live_parameters "
        "stage3_max_reuse_distance=1000000000|max_reuse_distance "
        "stage3_module_granularity_threshold=0|module_granularity_threshold",
    ),
    *_none(
        _ZERO,
        _RANKS,
        "overlap_comm=false reduce_scatter=true reduce_bucket_size=500000000 "
        "use_multi_rank_bucket_allreduce=true allgather_partitions=true "
        "allgather_bucket_size=500000000 allgather_sequential=false|stage3_allgather_sequential "
        "stage3_use_all_reduce_for_fetch_params=false|use_all_reduce_for_fetch_params "
        "round_robin_gradients=false zero_hpz_partition_size=1 zero_quantized_weights=false "
        "zero_quantized_nontrainable_weights=false zero_quantized_gradients=false "
        "zeropp_loco_param=null mics_shard_size=-1 mics_hierarchical_params_gather=false",
    ),
    *_none(
        _ZERO,
        _WHOLE,
        "stage3_gather_16bit_weights_on_model_save=false|"
        "stage3_gather_fp16_weights_on_model_save|gather_16bit_weights_on_model_save "
        "elastic_checkpoint=false load_from_fp32_weights=true pipeline_loading_checkpoint=false",
    ),
    *_none(
        _ZERO,
        "a switch of DeepSpeed's own engine",
        "ignore_unused_parameters=true legacy_stage1=false memory_efficient_linear=true "
        "override_module_apply=true log_trace_cache_warnings=false enable_sanity_checks=false "
        "leaf_module=null save_muon_momentum_buffer_in_memory=false",
    ),
    *_none(_ZERO, _PLANNED, "stage3_partition_stream_chunk_size=null"),
    *_none(_ZERO, OTHER, "zenflow=null"),
)

_REST = (
    _section("aio"),
    *_none(
        "aio",
        _MEASURED,
        "block_size=1048576 queue_depth=8 intra_op_parallelism=1|thread_count|num_threads "
        "single_submit=false overlap_events=true use_gds=false",
    ),
    _section("activation_checkpointing"),
    *_none(
        "activation_checkpointing",
        "activations stay on the device; torch.utils.checkpoint in the model keeps them small",
        "partition_activations=false cpu_checkpointing=false "
        "contiguous_memory_optimization=false number_checkpoints=null "
        "synchronize_checkpoint_boundary=false profile=false",
    ),
    *_none(
        "",
        "the optimizer is yours, and its update on the CPU gives the same bits",
        "zero_force_ds_cpu_optimizer=true zero_allow_untested_optimizer=false",
    ),
    *_none(
        "",
        _MONITOR,
        "wall_clock_breakdown=false memory_breakdown=false steps_per_print=null dump_state=false "
        "flops_profiler={} comms_logger={} monitor_config={} tensorboard={} wandb={} comet={} "
        "csv_monitor={}",
    ),
    *_none(
        "",
        _RANKS,
        "communication_data_type=null "
        "seq_parallel_communication_data_type=null|seq_parallel_comm_data_type "
        "prescale_gradients=false gradient_predivide_factor=1.0 sparse_gradients=false "
        "sequence_parallel_size=1 tensor_parallel={} pipeline={} elasticity={} nebula={} "
        "disable_allgather=false",
    ),
    *_none("", _WHOLE, "checkpoint={}"),
    *_none(
        "",
        OTHER,
        "amp={} data_efficiency={} curriculum_learning={} compression_training={} "
        "sparse_attention={} progressive_layer_drop={} quantize_training={} torch_autocast={} "
        "dataloader_drop_last=false",
    ),
    *_none(
        "",
        _ELSE,
        "autotuning={} eigenvalue={} hybrid_engine={} compile={} graph_harvesting=false "
        "use_node_local_storage=false load_universal_checkpoint=false",
    ),
)

KEYS: tuple[Key, ...] = (*_LOOP, *_OFFLOAD, *_REST)

BY_NAME: dict[str, Key] = {key.name: key for key in KEYS}

ALIASES: dict[str, str] = {
    f"{key.name.rpartition('.')[0]}.{alias}".lstrip("."): key.name
    for key in KEYS
    for alias in key.aliases
}
"""The proper name of each other name."""


def known_in(section: str) -> list[str]:
    """All names, other names too, that may be in a section ("": the file), without it."""
    if section in ARGUMENTS:
        return list(ARGUMENTS[section])
    names = [*BY_NAME, *ALIASES]
    return [name.rpartition(".")[2] for name in names if name.rpartition(".")[0] == section]


def page() -> str:
    """The keys as a table in Markdown."""
    fates = {"yours": "yours", "nothing": "no meaning"}
    rows = ["| key | default | here | how, or why not |", "|---|---|---|---|"]
    for key in KEYS:
        if key.kind == "section":
            continue
        names = ", ".join(f"`{name}`" for name in (key.name, *key.aliases))
        default = "-" if key.default in (None, {}) else f"`{json.dumps(key.default)}`"
        here = f"`{key.becomes}`" if key.becomes else fates[key.fate]
        rows.append(f"| {names} | {default} | {here} | {key.says} |")
    return "\n".join(rows) + "\n"
