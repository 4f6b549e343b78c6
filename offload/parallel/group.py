"""The ranks that share a model, and what they send each other, by torch.distributed.

[Note: Waits]
A wait for other ranks goes on in short slices, so that Ctrl-C is seen. It ends with an error that
names the rank that did not come. A rank that raises writes the reason into the store of the process
group, and the others read it once a collective has failed or taken long. A rank that was killed
writes nothing: the others write that they live, and a rank that has not after a while is named.
"""

from __future__ import annotations

import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import nn

from cpu_adam.checksum import crc32c
from offload.config import warn_user
from offload.planning.layout import Plan
from offload.planning.machine import Machine
from offload.runtime.device import Device
from offload.runtime.entry import EngineError, interruptible
from offload.runtime.torch_internals import group_store, local_part

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""Which of the two names a release of torch has."""

LOOK_AGAIN_S = 0.1
"""A slice of a wait."""

PATIENCE_S = 2.0
"""After so long in one wait a rank says that it lives, and looks in the store; the others give it
twice as long to say so."""

TELL_S = 60.0
"""After so long the user is told whom a rank waits for."""

LATE_S = 1800.0
"""So much later than the others a rank may come to attach."""

_numbers: dict[Any, int] = {}
"""How many models the ranks of a group have attached."""

Handles: TypeAlias = list[Any]
"""What torch.distributed gives for collectives that have begun."""


class Message(NamedTuple):
    """What a rank says to all others."""

    kind: int
    unit: int = 0
    payload: int = 0
    members: int = 0
    """A set of parameters or units, a bit each."""


class Group:
    """The ranks of a process group; every call is one that all of them make."""

    def __init__(self, group: Any, device: Device, timeout_s: float, ranks: Sequence[int] = ()):
        """Of a process group that is there, or of these `ranks`, some of which are in it."""
        group = group or dist.group.WORLD
        self._device, self._timeout_s = device, timeout_s
        self._talk = own_group(group, "gloo", timeout_s, tuple(ranks))
        """For what lies in CPU memory: messages, sums, values. No stream of a device waits."""
        self.rank, self.ranks = dist.get_rank(self._talk), dist.get_world_size(self._talk)
        self.order: Sequence[int] = range(self.ranks)
        """The ranks in the order in which a model is cut over them."""
        self.folds = self.ranks
        """How many parts of a gradient come to its owner in an exchange, to be added in order."""
        self._backend = str(dist.get_backend_config(group))
        """Of what lies on the device."""
        if device.is_host or f"{device.torch_device.type}:gloo" in self._backend:
            self._backend = "gloo"
        self._gather_parts = _gather_by_broadcast if self._backend == "gloo" else _all_gather
        self._group = own_group(group, self._backend, timeout_s, tuple(ranks))
        self.comm_stream = device.new_stream()
        """In this context collectives of slots begin. Their ops have waited for the slots, so no
        compute of the user has to end first."""
        self._number = _numbers[self._talk] = _numbers.get(self._talk, 0) + 1
        """Of the model, among those of these ranks."""
        self.sent_bytes = 0
        """What this rank has sent of weights and gradients so far."""
        self.step = 0
        """The last that all ranks have taken."""
        self._met = device.is_host
        """Whether the devices have; before, what a backend raises is told as it is."""
        self._over: EngineError | None = None
        """What has ended all exchange with the others."""
        self.checksum, self._told = 0, False
        self._queued = Handles()
        """The last that a stream of the device waits for."""
        if not ranks:
            self._meet(self._group)

    @property
    def position(self) -> int:
        """Which part of the model this rank has."""
        return self.order.index(self.rank)

    # -- attach ----------------------------------------------------------------------------------

    def _meet(self, *groups: Any) -> None:
        """Let the ranks' devices meet in each group: what is wrong with them shows at attach, and
        communicators have taken their memory before it is asked what is free."""
        if self._device.is_host:
            return
        if self._backend != "gloo":
            require_different(self.all_objects((socket.gethostname(), self._device.identity())))
        for group in groups:
            count = dist.get_world_size(group)
            with self.comm_stream(), torch.no_grad():
                part, whole, other = (self._device.zeros(size) for size in (1, count, count))
                works = self._begun(self._gather_parts, whole, part, group)
                for one in [*works, *self._begun(dist.all_to_all_single, other, whole, group)]:
                    one.wait()
                self._device.drain()
        self._met = True

    def least(self, machine: Machine) -> Machine:
        """What each rank has at least, so that all of them plan alike."""
        found = self.all_objects(machine)
        names = ("device_bytes", "cpu_bytes", "nvme_bytes")
        least: Machine = replace(
            machine, **{n: min(getattr(one, n) for one in found) for n in names}
        )
        return least

    @contextmanager
    def all_or_none(self) -> Iterator[None]:
        """A context in which each rank does its part, and begins no collective; at its end all hear
        whether one raised an Exception, and then all raise."""
        failed = None
        try:
            yield
        except Exception as error:
            failed = error
        said = self.all_objects(failed and f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        for rank, text in enumerate(said):
            if text:
                raise RuntimeError(f"rank {rank} could not do its part of what all do: {text}")

    def add_to_checksum(self, weights: torch.Tensor) -> None:
        """These are values of the model, the next in order."""
        self.checksum = crc32c(weights.contiguous().cpu(), self.checksum)

    def require_alike_model(self, model: nn.Module, plan: Plan) -> None:
        """Refuse ranks with another model, before anything of it moves."""
        for one in chain(model.parameters(), model.buffers()):
            if not one.is_meta:
                self.add_to_checksum(local_part(one.detach()))
        cut = replace(plan.profile.sharding, position=0)
        values = f"parameters and buffers whose checksum is {self.checksum}"
        self.require_alike(cut, *plan.profile.full, values)

    def require_same(self, call: str) -> None:
        """Refuse ranks that are at different calls."""
        said = self.all_objects(call)
        for rank, one in enumerate(said):
            if one != said[0]:
                raise ValueError(
                    f"the ranks are at different calls: rank 0 at {said[0]}, rank {rank} at {one}. "
                    "All of them make each call, and name one directory: likely one stands in "
                    "`if rank == 0`"
                )

    def require_alike(self, *mine: object) -> None:
        """Refuse ranks of which one has another object in the place of one of these."""
        said = self.all_objects(mine)
        for rank, one in enumerate(said):
            for first, other in zip(said[0], one):
                if first != other:
                    texts = str(first), str(other)
                    at = max(0, next((n for n, (a, b) in enumerate(zip(*texts)) if a != b), 0) - 50)
                    here, there = (f"{'...' * bool(at)}{text[at : at + 100]}" for text in texts)
                    raise ValueError(
                        f"the ranks attach different models: rank 0 has {here}, and rank {rank} "
                        f"has {there}. Build the model alike on all ranks: torch.manual_seed() "
                        "before it, or load the same checkpoint; and give all the same Config"
                    )

    # -- collectives ---------------------------------------------------------------------------

    def gather(
        self,
        into: torch.Tensor,
        part: torch.Tensor,
        column: torch.Tensor | None = None,
        in_column: bool = False,
    ) -> Handles:
        """Begin to gather a part from each rank, in the order of their positions. Over two levels
        what a column has stays in `column`, or is there from before."""
        return self._gather(into, part, self._group)

    def exchange(self, into: torch.Tensor, source: torch.Tensor) -> Handles:
        """Begin to send each rank its part of a gradient, `source`; `folds` parts come in order."""
        return self._exchange(into, source, self._group)

    def _gather(self, into: torch.Tensor, part: torch.Tensor, on: Any) -> Handles:
        self.sent_bytes += into.nbytes - part.nbytes
        return self._begun(self._gather_parts, into, part, on)

    def _exchange(self, into: torch.Tensor, source: torch.Tensor, on: Any) -> Handles:
        self.sent_bytes += source.nbytes - source.nbytes // dist.get_world_size(on)
        pair = into.view(torch.uint8), source.view(torch.uint8)
        return self._begun(dist.all_to_all_single, *pair, on)

    def all_tensors(self, part: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of each rank, all of one shape; waits."""
        flat = part.contiguous().view(-1).view(torch.uint8).cpu()
        into = torch.empty(self.ranks * flat.numel(), dtype=torch.uint8)
        self.wait(self._begun(_all_gather, into, flat, self._talk), on_host=True)
        rows = into.to(part.device).chunk(self.ranks)
        return [row.view(part.dtype).view(part.shape) for row in rows]

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Give all ranks the values that one of them has."""
        on = self._talk if tensor.is_cpu else self._group
        with self._failing(), torch.no_grad():
            work = dist.broadcast(tensor, group=on, group_src=source, async_op=True)
        self.wait([work], on_host=tensor.is_cpu)

    def all_messages(self, mine: Message) -> list[Message]:
        """What each rank says, where this one says `mine`."""
        head = [self._number, mine.members.bit_length(), *mine[:3]]
        rows = [one.tolist() for one in self.all_tensors(torch.tensor(head, dtype=torch.int64))]
        if any(row[0] != self._number for row in rows):
            with self._failing():
                raise EngineError(
                    f"the ranks use different models at one time, by numbers of their attach "
                    f"{[row[0] for row in rows]}: let all ranks call the forwards, backwards and "
                    "steps of all models in one order"
                )
        sets = [b""] * len(rows)
        if most := max(row[1] for row in rows):
            sets = self._all_bytes(mine.members.to_bytes(-(-most // 8), "little"))
        members = [int.from_bytes(one, "little") for one in sets]
        return [Message(row[2], row[3], row[4], one) for row, one in zip(rows, members)]

    def all_objects(self, mine: object) -> list[Any]:
        """An object of each rank; twice as slow as a message."""
        pickled = pickle.dumps(mine)
        most = max(int(one) for one in self.all_tensors(torch.tensor([len(pickled)])))
        return [pickle.loads(one) for one in self._all_bytes(pickled.ljust(most))]

    def _all_bytes(self, mine: bytes) -> list[bytes]:
        """As many bytes of each rank."""
        rows = self.all_tensors(torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [row.numpy().tobytes() for row in rows]

    def share_squares(self, clip: Any) -> None:
        """Let all ranks have the sums of squares of each: parts of a tensor are added in the order
        of ranks, and what several of them have counts once."""
        for parts in self.all_objects(clip.parts()):
            for leaf, nodes in parts.items():
                clip.put(leaf, nodes)

    def _begun(self, collective: Any, into: torch.Tensor, source: torch.Tensor, on: Any) -> Handles:
        if self._over is not None:
            raise EngineError(f"no more is asked of the other ranks: {self._over}") from self._over
        with self._failing(), torch.no_grad():
            work = collective(into, source, group=on, async_op=True)
        return work if isinstance(work, list) else [work]

    # -- waits and failures ----------------------------------------------------------------------

    def wait(self, works: Handles, *, on_host: bool = False) -> None:
        """Block until works are over; on a device the stream does, but for those `on_host`."""
        if (on_host or self._device.is_host) and not all(one.is_completed() for one in works):
            done, since = threading.Event(), time.monotonic()
            over = torch.futures.collect_all([one.get_future() for one in works])
            over.add_done_callback(lambda _: done.set())
            with interruptible(), self._failing():
                while not done.wait(LOOK_AGAIN_S):
                    self._look(time.monotonic() - since)
        self._queued = works
        with self._failing():  # Where one has failed, of none that may never end.
            for one in sorted(works, key=lambda one: not one.is_completed()):
                one.wait()

    def count_commit(self) -> None:
        """This rank has made one more; from any thread."""
        with suppress(RuntimeError):  # The process group is gone, and nobody waits.
            group_store(self._talk).add(f"offload {self._number} commits", 1)

    def wait_for_commits(self, times: int) -> None:
        """Block until the ranks together have made so many."""
        since, key = time.monotonic(), f"offload {self._number} commits"
        with interruptible(), self._failing():
            while group_store(self._talk).add(key, 0) < times:
                self._look(time.monotonic() - since)
                time.sleep(LOOK_AGAIN_S / 50)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank cannot go on; the first one that says so is named."""
        if self._failure() is None:
            self._write("failed", f"{type(error).__name__}: {error}")

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """An error of torch.distributed becomes one that names the rank, and ends all exchange."""
        try:
            yield
        except RuntimeError as error:
            if not self._met:
                raise
            found = error if isinstance(error, EngineError) else self._blame(error)
            self._over = self._over or found
            if found is error:
                raise
            self.fail(found)  # Who waits for this rank hears why.
            raise found from error

    def look(self, waited_s: float) -> None:
        """See whether the others live, in a wait for what may wait for them."""
        with self._failing():
            if not all(one.is_completed() for one in self._queued):
                self._look(waited_s)

    def _look(self, waited_s: float) -> None:
        if waited_s < PATIENCE_S:
            return
        self._live()
        self._raise_failed()
        if waited_s > TELL_S and not self._told:
            self._told = True
            warn_user(
                f"waiting for {self._missing() or 'another rank'} in a collective of the offload "
                f"engine, up to Config.comm_timeout={self._timeout_s:.0f} s: likely it is slow, "
                "or waits in a collective of its own while this rank saves alone"
            )
        if waited_s > self._timeout_s:
            missing = self._missing()
            raise EngineError(
                f"{missing or 'another rank'} did not come to a collective of the offload engine "
                f"in {self._timeout_s:.0f} s, after step {self.step}: likely it is stopped, or "
                "waits elsewhere, as in a collective of its own while this rank saves alone, in "
                "`if rank == 0`, a Trainer without offload.TrainerMixin, or an except without "
                "engine.skip_backward(); end the job, and go on from the last commit or checkpoint"
            )

    def _raise_failed(self) -> None:
        told = self._failure()
        if told is not None and told["rank"] != self.rank:
            raise EngineError(
                f"rank {told['rank']} on {told['host']}, process {told['pid']}, failed after step "
                f"{told['step']}: {told['what']}. This rank cannot go on without it: end the job, "
                "and go on from the last commit or checkpoint"
            )

    def _failure(self) -> Any:
        """What a rank has told of a failure, but before this model was attached."""
        told = self._read("failed")
        return told if told is not None and told["models"] >= self._number else None

    def _blame(self, error: RuntimeError) -> EngineError:
        """What to raise where a collective has failed: which rank caused it, as far as is known."""
        time.sleep(LOOK_AGAIN_S)  # The rank that raised may still be writing why.
        try:
            self._raise_failed()
        except EngineError as found:
            return found
        missing, first = self._missing() or "another rank", str(error).partition("\n")[0]
        return EngineError(
            f"{missing} {'are' if ',' in missing else 'is'} gone after step {self.step}, or gave "
            f"no sign in {2 * PATIENCE_S:.0f} s of computing, as a collective of the offload "
            f"engine on {socket.gethostname()} failed ({first}): likely its "
            "process was killed, has raised or has ended, as where its data ended sooner: see its "
            "own output; go on from the last commit or checkpoint"
        )

    def _missing(self) -> str:
        """The ranks that do not answer, as text."""
        self._live()
        others, until = set(range(self.ranks)) - {self.rank}, time.monotonic() + 2 * PATIENCE_S
        while others and time.monotonic() < until:
            others = {rank for rank in others if not self._read(f"lives {rank} {self.step}")}
            time.sleep(LOOK_AGAIN_S / 2)
        names = ", ".join(map(str, sorted(others)))
        return f"rank {names}" if len(others) == 1 else f"ranks {names}" if others else ""

    def _live(self) -> None:
        """Tell the others, which may look for a rank that does not."""
        self._write(f"lives {self.rank} {self.step}", "")

    def _write(self, key: str, what: str) -> None:
        me = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid()}
        with suppress(RuntimeError):  # The store is gone with its host.
            now = {"step": self.step, "models": _numbers[self._talk]}
            told = json.dumps({**me, **now, "what": what})
            group_store(self._talk).set(f"offload {key}", told)

    def _read(self, key: str) -> Any:
        with suppress(RuntimeError):
            store = group_store(self._talk)
            if store.check([f"offload {key}"]):
                return json.loads(store.get(f"offload {key}"))
        return None


def require_different(places: Sequence[tuple[str, str]]) -> None:
    """Refuse ranks that have one device together, by their hosts and what tells devices apart."""
    if len({*places}) < len(places):
        raise ValueError(
            f"attach: asked for a device for each rank; found {places}, by rank: let the one that "
            "is current before attach be that of the number in LOCAL_RANK"
        )


def _gather_by_broadcast(
    into: torch.Tensor, part: torch.Tensor, group: Any, async_op: Literal[True]
) -> Handles:
    """What `_all_gather` does. Over gloo it makes a copy of all that it gathers and takes more than
    twice as long (docs/decisions.md)."""
    parts = into.chunk(dist.get_world_size(group))
    parts[dist.get_rank(group)].copy_(part)
    begin = partial(dist.broadcast, group=group, async_op=async_op)
    return [begin(one, group_src=rank) for rank, one in enumerate(parts)]


@cache
def own_group(group: Any, backend: str, timeout_s: float, ranks: tuple[int, ...] = ()) -> Any:
    """The same ranks, or these, as a group of the engine's own: else a collective of the user's on
    one rank could take, or give, the bytes of one of the engine's on another. Torch's own timeout,
    which ends the process where a device hangs, comes after ours; over gloo it is for ranks that
    come late to attach."""
    every = list(ranks) or dist.get_process_group_ranks(group)
    # Some ranks alone name a group by how many they know, which others may not.
    some = len(every) < dist.get_world_size()
    least = LATE_S if backend == "gloo" else 0.0
    until = timedelta(seconds=max(timeout_s + TELL_S, least))
    return dist.new_group(every, until, backend, use_local_synchronization=some)
