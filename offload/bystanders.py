"""Other threads of Python: whether one may be inside a function of torch's just now.

Torch asks for the class of what it is given, lets go of the interpreter, and looks at the memory
later. So who changes the class of a parameter and then takes its memory away must know that nobody
has come past the class before. That cannot be asked of torch; where each thread is, of Python: who
waits in a way that is known does nothing with a parameter, and any other thread may.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

_OURS = ("offload-", "aio-")
"""Names of threads that only move bytes begin so."""

_WAITING = frozenset(
    (
        *("threading", "queue", "selectors", "socket", "ssl", "subprocess"),
        *("multiprocessing.connection", "multiprocessing.queues", "concurrent.futures.thread"),
        "execnet.gateway_base",
    )
)
"""Modules whose own code calls no function of torch's, but in a `run`, whatever it was given."""

_HEARTBEAT = "ipykernel.heartbeat"
"""Of every notebook; it gives nothing to anybody in its `run`."""


def any_in_torch() -> bool:
    """Whether another thread may be inside a function of torch's, called before this was."""
    known, others = threading._active, sys._current_frames()  # type: ignore[attr-defined]
    # A frame that has itself stays, and so do all from which it was called.
    others.pop(threading.get_ident(), None)
    for ident, frame in others.items():
        if not _apart(frame):
            thread = known.get(ident)
            if thread is None or not thread.name.startswith(_OURS):
                return True
    return False


def _apart(frame: FrameType) -> bool:
    """Whether a thread whose innermost frame this is does something else."""
    module = frame.f_globals.get("__name__")
    return module == _HEARTBEAT or (module in _WAITING and frame.f_code.co_name != "run")
