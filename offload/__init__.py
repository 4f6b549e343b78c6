"""Train PyTorch models larger than the device: values live in device memory, CPU memory and NVMe.

    model, optimizer = offload.attach(model, optimizer, offload.Config(params="nvme", ...))

and the training loop stays as it is.
"""

import os as _os

# Read when torch is first imported: its threads that wait must not spin on the lanes' cores.
_os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from offload.attach import attach, detach, engine_of
from offload.config import Config
from offload.engine import Engine, Report
from offload.lanes import EngineError
from offload.plan import BudgetError

__all__ = [
    "BudgetError",
    "Config",
    "Engine",
    "EngineError",
    "Report",
    "attach",
    "detach",
    "engine_of",
]


def __dir__() -> list[str]:
    return list(__all__)
