"""Makes the checkpoints in tests/data/deepspeed, with DeepSpeed 0.19.8 and torch 2.13 on the CPU.

    DS_ACCELERATOR=cpu python benchmarks/deepspeed_checkpoints.py tests/data/deepspeed

in an environment of its own, which has both. Beside each lies `expected.pt`: what DeepSpeed itself
gives, before it saves, as the fp32 master and the moments of each parameter (stacked), and what its
zero_to_fp32 makes of the files is compared with that.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import nn

CHECKPOINTS = [(stage, ranks, "bf16") for stage in (1, 2, 3) for ranks in (1, 2)] + [(2, 2, "fp16")]
STEPS = 3
PORT = 29_610


class Net(nn.Module):
    """Tied, frozen, of odd sizes, in two groups, with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.block = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.frozen = nn.Linear(7, 7, bias=False)
        self.back = nn.Linear(7, 6, bias=False)
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.weight.requires_grad_(False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0, 1.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        y = self.frozen(self.norm(self.block(x))) * self.scale[1]
        return self.head(x + self.back(torch.tanh(y)))


def optimizer_of(model: nn.Module) -> torch.optim.AdamW:
    trained = [one for one in model.parameters() if one.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in trained if one.ndim > 1], "weight_decay": 0.1},
        {"params": [one for one in trained if one.ndim == 1], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return torch.optim.AdamW(groups, lr=1e-2)


def make(rank: int, stage: int, ranks: int, dtype: str, out: str, port: int) -> None:
    """Trains and saves as one of `ranks` processes."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "DS_ACCELERATOR": "cpu"}
    import deepspeed
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import (
        lazy_init_hp_params_optimizer_state,
        safe_get_full_fp32_param,
        safe_get_full_optimizer_state,
    )

    get_accelerator().is_fp16_supported = lambda: True  # Torch's CPU computes in it by now.
    torch.manual_seed(3)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "zero_allow_untested_optimizer": True,
        "gradient_clipping": 1.0,
        dtype: {"enabled": True},
    }
    if ranks == 2:  # In stage 3 several flat groups are one of the optimizer's.
        config["zero_optimization"]["sub_group_size"] = 60
    if dtype == "fp16":
        config[dtype]["initial_scale_power"] = 8
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=config)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        tokens = torch.randint(0, 11, (2, 5), generator=generator)
        logits = engine(tokens).float().view(-1, 11)
        engine.backward(nn.functional.cross_entropy(logits, tokens.roll(1, 1).view(-1)))
        engine.step()
    if stage < 3:  # It links all groups after the first one's first step, when others had none.
        inner = engine.optimizer
        for lp, hp in zip(inner.bit16_groups, inner.single_partition_of_fp32_groups):
            lazy_init_hp_params_optimizer_state(lp, hp, inner.optimizer.state)
    found = {}
    for name, one in model.named_parameters():
        if one.requires_grad:
            moments = [safe_get_full_optimizer_state(one, k) for k in ("exp_avg", "exp_avg_sq")]
            found[name] = torch.stack([safe_get_full_fp32_param(one), *moments]).detach()
    engine.save_checkpoint(out, tag="global_step3", client_state={"epoch": 2})
    if not rank:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        torch.save(found, f"{out}/expected.pt")
        theirs = get_fp32_state_dict_from_zero_checkpoint(out)
        assert all(torch.equal(theirs[name].contiguous(), one[0]) for name, one in found.items())


if __name__ == "__main__":
    for number, (stage, ranks, dtype) in enumerate(CHECKPOINTS):
        folder = Path(sys.argv[1]) / f"zero{stage}-{ranks}-{dtype}"
        mp.spawn(make, (stage, ranks, dtype, str(folder), PORT + number), nprocs=ranks)
        for script in folder.glob("*.py"):
            script.unlink()
