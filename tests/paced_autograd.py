"""Autograd on a paced accelerator: on a thread of its own, each node under its forward's stream.

[Note: Streams of a backward]
On a device autograd runs a node, and the hooks of what it takes and gives, under the stream on
which its forward ran, and lets that stream wait for the nodes that made what it takes: for these
only, and for nothing that their hooks have queued since. A gradient's accumulation runs under the
stream of the node that made it. When all is done the caller's stream waits for all of them. On the
CPU torch knows no streams, so this is done here: who asks for the current stream inside backward is
told that of the node under way, and a node that is asked for the first time waits.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from tests.paced_streams import Event, Stream, Timeline

Key = tuple[str, int]


def _key(node: Any) -> Key:
    number = node._sequence_nr()
    return ("node", number) if number < 1 << 63 else ("leaf", id(node.variable))


class Nodes:
    """On which stream the nodes of a graph were made, and the backward that goes over them."""

    def __init__(self, timeline: Timeline):
        self._timeline = timeline
        self._made: dict[Key, Stream] = {}
        self._makers: dict[Key, list[Key]] = {}
        """Of each node those that make what it takes."""
        self._ends: dict[Key, Event] = {}
        self._last: Key | None = None

    def note(self) -> None:
        """An operation runs in a forward: the node made last is of the current stream."""
        if torch.is_grad_enabled() and torch._C._current_autograd_node() is None:
            number: int = torch.autograd._get_sequence_nr()  # type: ignore[attr-defined]
            self._made["node", number - 1] = self._timeline.current

    def backward(self, loss: torch.Tensor, mode: Any) -> None:
        """`loss.backward()` in a thread of its own, inside `mode`."""
        caller, raised = self._timeline.current, list[BaseException]()
        self._makers, self._ends, self._last = {}, {}, None
        found, seen = [loss.grad_fn], set[Key]()
        while found:
            node: Any = found.pop()
            if _key(node) not in seen:
                seen.add(_key(node))
                for after, _ in node.next_functions:
                    if after is not None:
                        self._makers.setdefault(_key(after), []).append(_key(node))
                        found.append(after)

        def run() -> None:
            self._timeline.current = caller
            self._timeline.choose(self._stream)
            try:
                with mode:
                    loss.backward()
            except BaseException as error:
                raised.append(error)

        thread = threading.Thread(target=run, name="autograd")
        thread.start()
        thread.join()
        for stream in {id(one): one for one in self._made.values()}.values():
            if stream is not caller:
                self._timeline.stream_waits(caller, Event(self._timeline, stream))
        self._made = {}
        if raised:
            raise raised[0]

    def _stream(self) -> Stream | None:
        """That of the node under way, which waits if it is new; None outside of all."""
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        key = _key(node)
        stream = self._of(key)
        if stream is not None and key != self._last:
            if self._last is not None:
                last = self._of(self._last)
                assert last is not None
                self._ends.setdefault(self._last, Event(self._timeline, last))
            self._last = key
            for end in self._awaited(key):
                if end.stream is not stream:
                    self._timeline.stream_waits(stream, end)
        return stream

    def _of(self, key: Key) -> Stream | None:
        if key[0] == "node":
            return self._made.get(key)
        return next(
            (self._made[one] for one in self._makers.get(key, ()) if one in self._made), None
        )

    def _awaited(self, key: Key) -> list[Event]:
        """The ends of those that made what a node takes; of those before, if they did nothing."""
        found, left = [], list(self._makers.get(key, ()))
        while left:
            one = left.pop()
            if one in self._ends:
                found.append(self._ends[one])
            else:
                left += self._makers.get(one, ())
        return found
