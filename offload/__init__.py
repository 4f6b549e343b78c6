"""Train PyTorch models larger than the device: values live in device memory, CPU memory and NVMe.

    model, optimizer = offload.attach(model, optimizer, offload.Config(...))

and the training loop stays as it is.

[Note: Light import]
Importing torch takes seconds, and the command line must answer `--help`, a typing error or Ctrl-C
without them. So where torch is not yet there, a public name is loaded when it is first asked for;
where it is, all of them are loaded at once, and what is wrong with an installation shows here.
"""

import os as _os
import sys as _sys

if _sys.platform != "linux":
    raise ImportError(
        f"offload runs on Linux, as it uses its calls for memory and files; found {_sys.platform}; "
        "try: WSL 2 on Windows, or a container"
    )

# Read when torch is first imported: its threads that wait must not spin on the lanes' cores.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "BudgetError",
    "Config",
    "Engine",
    "EngineError",
    "Report",
    "ShardError",
    "TrainerMixin",
    "attach",
    "detach",
    "empty_weights",
    "engine_of",
    "export",
    "from_pretrained",
    "gathered",
    "load",
    "local",
    "save",
    "sleep",
    "wake",
]


def __dir__() -> list[str]:
    return list(__all__)


TYPE_CHECKING = False  # As typing has it, which takes its time to import.

if TYPE_CHECKING:
    from offload.attachment import attach, detach, empty_weights
    from offload.checkpoint.exporting import export
    from offload.checkpoint.saving import load, save
    from offload.config import Config
    from offload.model.engine import Engine, engine_of
    from offload.parallel import gathered, local
    from offload.parallel.flat_shard import ShardError
    from offload.planning.planner import BudgetError
    from offload.pretrained import from_pretrained
    from offload.runtime.entry import EngineError
    from offload.runtime.stats import Report
    from offload.sleeping import sleep, wake
    from offload.trainer_mixin import TrainerMixin
else:
    _HOMES = dict.fromkeys(("attach", "detach", "empty_weights"), "attachment")
    _HOMES |= dict.fromkeys(("load", "save"), "checkpoint.saving")
    _HOMES |= dict.fromkeys(("Engine", "engine_of"), "model.engine")
    _HOMES |= {"export": "checkpoint.exporting", "from_pretrained": "pretrained"}
    _HOMES |= {"EngineError": "runtime.entry", "BudgetError": "planning.planner"}
    _HOMES |= {"gathered": "parallel", "local": "parallel", "ShardError": "parallel.flat_shard"}
    _HOMES |= {"Config": "config", "Report": "runtime.stats", "TrainerMixin": "trainer_mixin"}
    _HOMES |= {"sleep": "sleeping", "wake": "sleeping"}

    def __getattr__(name):
        if name not in _HOMES:
            told, me = f"module {__name__!r} has no attribute {name!r}", _sys.modules[__name__]
            raise AttributeError(told, name=name, obj=me)  # Python adds the likely one.
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    if "torch" in _sys.modules:
        for _name in __all__:  # What is of several ranks is loaded where there are.
            if not _HOMES[_name].startswith("parallel"):
                __getattr__(_name)
