"""How a rank of a `ranks.World` begins: nothing of what it imports is garbage."""

from __future__ import annotations

import gc
from typing import Any


def begin(*args: Any) -> None:
    """Serve; a third of the time until then would go to a collector of garbage."""
    gc.disable()
    from tests.ranks import serve

    serve(*args)
