"""Where the command line begins: `offload`, or `python -m offload`.

[Note: Early Ctrl-C]
Importing torch takes seconds, in which Ctrl-C would end in a traceback out of somebody's import, or
be lost in a callback that ignores exceptions. So before anything heavy is imported a handler is set
that ends the process at once. That is clean: until a command enters `Signals`, which take over,
nothing has been made that would have to be undone.
"""

import os
import signal
import sys
from types import FrameType

_EXIT_STOPPED = 128 + signal.SIGINT


def _leave(_number: int, _frame: FrameType | None) -> None:
    # Not print: the signal may have come in the middle of one.
    try:
        os.write(2, b"\noffload: stopped by Ctrl-C before a run began\n")
    finally:
        os._exit(_EXIT_STOPPED)


def main() -> int:
    """Runs the command line as a process of its own; returns its exit status."""
    try:
        # Ignored signals (nohup, a shell's background job) stay ignored.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, _leave)
        from offload.cli import main as run

        return run()
    except KeyboardInterrupt:
        return _EXIT_STOPPED


if __name__ == "__main__":
    sys.exit(main())
