"""What a Trainer of Hugging Face needs besides an attached pair: over ranks, and at any size."""

from __future__ import annotations

import os
from typing import Any

import torch

from offload.checkpoint.directory import RUN
from offload.checkpoint.saving import load, save
from offload.model.engine import attached_to
from offload.optim.optimizer import ELSEWHERE

SAVED = "offload"
"""The folder in a checkpoint that has weights and states."""

_Trainer: Any = object
"""What comes after the mixin, for a checker of types."""


class TrainerMixin(_Trainer):  # type: ignore[misc]
    """Let a Trainer save and resume an attached model over several ranks, and at any size.

        class Trainer(offload.TrainerMixin, transformers.Trainer): ...

    A checkpoint has the model as Hugging Face writes it, and `offload.save` of all that training
    goes on from, in the folder `offload`: no copy of the states is in memory, and any number of
    ranks resumes it. Over ranks, where Trainers save on the first one alone, all of them take part.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        first = cls.__mro__[: cls.__mro__.index(TrainerMixin)]
        for one in first:
            if "_wrap_model" in vars(one) and not issubclass(one, TrainerMixin):
                name, other = cls.__name__, one.__name__
                raise TypeError(
                    f"class {name}: found TrainerMixin after {other}, whose methods go first then: "
                    f"write class {name}(offload.TrainerMixin, {other})"
                )

    def create_optimizer(self, *args: Any, **options: Any) -> Any:
        """Refuse to make another optimizer than that of an attached model."""
        if self.optimizer is None and attached_to(self.model):
            raise ValueError(
                "asked to train an attached model; found no optimizer, and the Trainer would make "
                "one that is not the engine's: write Trainer(..., optimizers=(optimizer, None)) "
                "with the one that attach returned"
            )
        return super().create_optimizer(*args, **options)

    def _ranks(self) -> Any:
        return found.engine.ranks if (found := attached_to(self.model)) else None

    def _clips(self) -> bool:
        return bool((found := attached_to(self.model)) and found.engine.plan.clips)

    def _wrap_model(self, model: Any, *args: Any, **options: Any) -> Any:
        """Let accelerate put its mixed precision around a model over ranks, and nothing else."""
        told = vars(model).get("_is_accelerate_prepared") and attached_to(model)
        if told and "_original_forward" not in vars(model):
            model._is_accelerate_prepared = False
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
        return super()._wrap_model(model, *args, **options)

    def _clip_grad_norm(self, model: Any) -> Any:
        """Let the engine clip, where it does."""
        return None if self._clips() else super()._clip_grad_norm(model)

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Read no gradients for the log where updates may have begun, or where the engine clips."""
        early = (found := attached_to(self.model)) and found.engine.early.begins_early
        return None if early or self._clips() else super()._get_grad_norm(model, grad_norm)

    def log(self, logs: dict[str, Any], *args: Any, **options: Any) -> None:
        """Show the norm of an engine that clips."""
        if "loss" in logs and self._clips():
            logs.setdefault("grad_norm", self._optimizer().grad_norm())
        super().log(logs, *args, **options)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write the model on the first rank; all of them call it."""
        if self._ranks() is not None and not self.args.should_save:
            self.model.save_pretrained(output_dir or self.args.output_dir)
        super().save_model(output_dir, _internal_call)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if not attached_to(self.model):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        where, pair = os.path.join(output_dir, SAVED), (self.model, self._optimizer())
        save(*pair, where, scheduler=self.lr_scheduler)
        if self.args.should_save:  # Where a Trainer looks that does not know of the folder.
            for name in ("optimizer.pt", "scheduler.pt"):
                torch.save({"param_groups": (), ELSEWHERE: SAVED}, os.path.join(output_dir, name))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        where = os.path.join(checkpoint or "", SAVED)
        if checkpoint is None or not os.path.exists(os.path.join(where, RUN)):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        load(self.model, self._optimizer(), where, scheduler=self.lr_scheduler)

    def _optimizer(self) -> Any:
        """What `attach` returned, of which accelerate has a wrapper."""
        return getattr(self.optimizer, "optimizer", self.optimizer)
