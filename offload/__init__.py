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
from types import ModuleType as _ModuleType

# Read when torch is first imported: its threads that wait must not spin on the lanes' cores.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [
    "BudgetError",
    "Config",
    "Engine",
    "EngineError",
    "Report",
    "SharedBudget",
    "attach",
    "detach",
    "engine_of",
    "sleep",
    "wake",
]


def __dir__() -> list[str]:
    return list(__all__)


class _Package(_ModuleType):
    """The import system binds each file it loads to its name here; two names are functions."""

    def __setattr__(self, name: str, value: object) -> None:
        if name in ("attach", "sleep") and isinstance(value, _ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


_sys.modules[__name__].__class__ = _Package

TYPE_CHECKING = False  # As typing has it, which takes its time to import.

if TYPE_CHECKING:
    from offload.attach import attach, detach, engine_of
    from offload.config import Config
    from offload.engine import Engine
    from offload.lanes import EngineError
    from offload.plan import BudgetError
    from offload.shared import SharedBudget
    from offload.sleep import sleep, wake
    from offload.totals import Report
else:
    _HOMES = dict.fromkeys(("attach", "detach", "engine_of"), "attach")
    _HOMES |= {"Config": "config", "Engine": "engine", "Report": "totals"}
    _HOMES |= {"EngineError": "lanes", "BudgetError": "plan", "SharedBudget": "shared"}
    _HOMES |= {"sleep": "sleep", "wake": "sleep"}

    def __getattr__(name):
        if name not in _HOMES:
            from difflib import get_close_matches

            likely = get_close_matches(name, __all__, n=1)
            close = f": did you mean {likely[0]!r}?" if likely else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{close}")
        from importlib import import_module

        value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        globals()[name] = value
        return value

    if "torch" in _sys.modules:
        for _name in __all__:
            __getattr__(_name)
