"""Gradients, as the user meets them: shown as `p.grad`, edited, assigned, given up.

`Collector` knows whether a gradient is there at all, and brings it home. What `p.grad` shows of it
is known here, see `shown` [Note: Where a gradient is].
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator

import torch

from offload.arena import host_tensor
from offload.assigned import lies_in, may_be_shown, require_fitting, require_shape
from offload.collector import Collector
from offload.config import format_bytes
from offload.executor import Executor
from offload.exposure import use_count
from offload.extents import ALONE, Named, expanded, zero
from offload.places import Places
from offload.program import Value
from offload.shown import SharingLook, Showing, Shown, WrittenInside, is_same

_NO_COPY = (
    "Clip with Config(max_grad_norm=...) instead of clip_grad_norm_, keep gradients in cpu memory "
    "with Config(gradients='cpu')"
)


class Gradients:
    """What `p.grad` shows, see [Note: Where a gradient is]."""

    def __init__(self, executor: Executor, collector: Collector, limit_bytes: int):
        """Show what `collector` brings home, with at most `limit_bytes` of copies at once."""
        self._executor, self._plan = executor, executor.plan
        self._collector = collector
        self._limit_bytes = limit_bytes
        self._units: dict[int, Showing] = {}
        """Those of which anything is shown."""
        self._look = SharingLook()
        self.written = WrittenInside()
        self._places = Places(executor, collector.home_moved)

    def has(self, unit: int, parameter: int) -> bool:
        """Whether a parameter has a gradient."""
        return self._collector.has(unit, parameter)

    @property
    def followed(self) -> Container[int]:
        """Units of whose gradients somebody may hold what was shown, and change it until `step()`.

        As the backward began; until that is over nothing is shown.
        """
        return self._units

    # -- what `p.grad` does ----------------------------------------------------------------------

    def show(self, unit: int, parameter: int) -> torch.Tensor | None:
        """The gradient as a contiguous CPU tensor in the parameter's shape; edits count.

        Raises:
            MemoryError: the gradient is not in CPU memory, and a copy has no room.
        """
        if not self._collector.has(unit, parameter):
            return None
        self._renew(unit)
        self._executor.quiesce("gradient", unit)
        now = self._showing(unit)
        if parameter not in now.shown:
            now.shown[parameter] = Shown.of(self._seen(unit, parameter))
        return now.shown[parameter].tensor

    def replace(self, unit: int, parameter: int, gradient: torch.Tensor | None) -> None:
        """Assign `p.grad`, see [Note: Assigned gradients].

        Raises:
            TypeError: it is no tensor.
            ValueError: it does not fit the parameter, or that was frozen at attach.
        """
        if gradient is None:
            self.give_up(unit, parameter)
            return
        one, place = self._plan.profile.units[unit].parameters[parameter], self._executor.device
        kept = self._collector.dtype_of(unit, parameter)
        require_fitting(one, gradient, kept, place.torch_device)
        self._renew(unit)
        now = self._showing(unit)
        before = now.shown.get(parameter)
        if before is not None and before.tensor is gradient:
            return  # As `p.grad *= 2` ends.
        self._executor.quiesce("gradient", unit)
        window = self._seen(unit, parameter)
        if lies_in(gradient, window) and expanded(gradient):  # `p.grad[:1].expand_as(p.grad)`
            gradient.data = gradient.clone()
        shows, same = may_be_shown(gradient, window), is_same(gradient, window)
        if not same:  # Else `p.grad = p.grad.detach()`.
            del window  # No view of the user's.
            self._lose(unit, parameter, others=True)
            window = self._seen(unit, parameter)
            if not shows:
                self._executor.copy_now(window, gradient)
        self._collector.assigned(unit, parameter)
        found = Shown.of(gradient if shows else window, apart=shows and not same)
        if same and before is not None and not before.apart:
            found = found.after(before) if shows else before  # Which has that memory.
        now.shown[parameter] = found

    def give_up(self, unit: int, parameter: int) -> None:
        """Let a parameter have no gradient."""
        self._renew(unit)
        if unit in self._units:
            self._lose(unit, parameter)
        self._collector.give_up(unit, parameter)
        if unit not in self._units:
            return
        if not self._collector.has_any(unit):
            self._units[unit].copied = None
        self._tidy(unit)

    def zero(self, unit: int, parameters: Iterable[int]) -> None:
        """Make gradients zeros, as `zero_grad(set_to_none=False)` does.

        Those that are not shown become so at home, as to show them may take a copy.
        """
        self._renew(unit)
        kept = [one for one in parameters if self._collector.has(unit, one)]
        now = self._units.get(unit, Showing())
        hidden = [one for one in kept if one not in now.shown and now.copied is None]
        for parameter in kept:
            if parameter not in hidden and (shown := self.show(unit, parameter)) is not None:
                self._come(unit, parameter)
                zero(shown)
        if hidden:
            self._collector.zero(unit, hidden, elsewhere=now.shown)

    @torch.no_grad()
    def hand_over(self, unit: int) -> list[torch.Tensor | None]:
        """The gradients of a unit in memory of their own, whatever the limit; None where none is.

        What somebody holds, or has a view of, is handed over itself.
        """
        found: list[torch.Tensor | None] = [None] * len(self._plan.profile.units[unit].parameters)
        if not self._collector.has_any(unit):
            return found
        self._executor.quiesce("gradient", unit)
        self._put_home(unit)
        flat = self._executor.peek(Value("gradient", unit))
        for parameter in range(len(found)):
            if self._collector.has(unit, parameter):
                self._set_apart(unit, parameter)
                shown = self._showing(unit).shown.get(parameter)
                if shown is not None:
                    found[parameter] = shown.tensor
                else:
                    found[parameter] = self._collector.shaped(flat, unit, parameter).clone()
        return found

    # -- what happens to all ---------------------------------------------------------------------

    def begin_backward(self, others: Iterable[Named]) -> None:
        """Put home what is shown, before more is added; `others` are gradients not kept here.

        Raises:
            RuntimeError: a gradient that was assigned shares memory with another.
        """
        self.put_shown_home()
        for unit in list(self._units):
            now = self._units[unit]
            now.shown = {at: shown for at, shown in now.shown.items() if shown.followed}
            self._tidy(unit)
        if named := list(self._named()):
            self._look.refuse([(name, shown.tensor) for name, shown in named], others)
        for _, shown in named:
            shown.version = shown.tensor._version

    def _named(self) -> Iterator[tuple[str, Shown]]:
        """What is shown, by name."""
        for unit, now in self._units.items():
            for parameter, shown in now.shown.items():
                yield self._plan.profile.units[unit].parameters[parameter].name, shown

    @torch.no_grad()
    def put_shown_home(self) -> None:
        """Put home what `p.grad` has shown from elsewhere, edited or not."""
        if self._units:  # Copies into it are asynchronous where its memory is pinned.
            self._executor.lanes.drain()
        for unit in self._units:
            self._put_home(unit)

    def renew_shown(self) -> None:
        """After a backward: gradients that are still held show what was added to them."""
        self.written.look(self._named())
        for now in self._units.values():
            now.due = True
        for unit in self._units:
            self._renew(unit)

    @torch.no_grad()
    def _renew(self, unit: int) -> None:
        """Show what was added; where home cannot be read, whoever asks for it next tries again."""
        now = self._units.get(unit)
        if now is None or not now.due:
            return
        self._executor.quiesce("gradient", unit)
        if now.copied is not None:
            self._executor.copy_now(now.copied, self._executor.peek(Value("gradient", unit)))
        for parameter, shown in now.shown.items():
            if shown.apart:
                shown.tensor.copy_(self._at_home(unit, parameter))
        now.due = False

    def let_go(self) -> None:
        """Put home what is shown, and leave it to the update: who holds a gradient gets its bytes.

        What is done to those counts for the next backward, as it does with torch's own.
        """
        self.put_shown_home()
        for unit in list(self._units):
            now = self._units[unit]
            for parameter in list(now.shown) if now.copied is None else ():
                self._set_apart(unit, parameter)
            self._tidy(unit)

    def wait_where_viewed(self) -> None:
        """Updates are queued: wait for those of gradients that could be changed at home."""
        for unit, now in self._units.items():
            if now.copied is None and not all(shown.apart for shown in now.shown.values()):
                self._executor.quiesce("gradient", unit)

    def forget_places(self, tiers: Container[str]) -> None:
        """Memory tiers are given back; who has views of what was there keeps it."""
        every, home = range(len(self._plan.profile.units)), self._plan.home
        gone = {unit for unit in every if home("gradient", unit).tier in tiers}
        self._places.forget(gone)
        for now in (now for unit, now in self._units.items() if unit in gone):
            for shown in now.shown.values() if now.copied is None else ():
                shown.apart = True

    # -- one unit, one gradient ------------------------------------------------------------------

    def _showing(self, unit: int) -> Showing:
        return self._units.setdefault(unit, Showing())

    def _tidy(self, unit: int) -> None:
        """Forget a unit of which nothing is shown."""
        if not self._units[unit].shown:
            del self._units[unit]

    def _name(self, unit: int) -> str:
        return self._plan.profile.units[unit].name

    def _seen(self, unit: int, parameter: int) -> torch.Tensor:
        """A gradient as `p.grad` shows it: by a storage of its own, so that views are counted."""
        window, copied = self._window(unit), self._showing(unit).copied
        with torch.inference_mode(False):
            own = torch.from_numpy(self._places.array(unit) if copied is None else window.numpy())
            # Torch's views keep what they were made of, whatever their data becomes.
            return self._collector.shaped(own, unit, parameter).data

    def _at_home(self, unit: int, parameter: int) -> torch.Tensor:
        return self._collector.shaped(self._window(unit), unit, parameter)

    def _window(self, unit: int) -> torch.Tensor:
        """A unit's gradients in CPU memory: the home itself, or a copy that is put home later."""
        now, value = self._showing(unit), Value("gradient", unit)
        home = self._plan.home("gradient", unit)
        if home.tier == "cpu" or (home.tier == "device" and self._executor.device.is_host):
            return self._executor.peek(value)
        if now.copied is None:
            copied = self._fresh(unit)
            if self._collector.has_any(unit):
                self._executor.copy_now(copied, self._executor.peek(value))
            now.copied = copied  # Last: what could not be read is not shown, nor put home.
        return now.copied

    def _fresh(self, unit: int) -> torch.Tensor:
        """Memory for a copy of a unit's gradients.

        Raises:
            MemoryError: there is no room for it.
        """
        size, tier = self._plan.bytes_of("gradient", unit), self._plan.home("gradient", unit).tier
        what = f"showing the gradients of {self._name(unit)} needs a copy from {tier}"
        self._make_room(size, what, _NO_COPY)
        return host_tensor(size).data  # With no base.

    def _make_room(self, size: int, what: str, remedy: str) -> None:
        """Refuse more memory than the user has granted."""
        copied = (one.copied for one in self._units.values())
        held = sum(one.nbytes for one in copied if one is not None) + self._places.bytes
        if held + size > self._limit_bytes:
            held -= self._places.trim()
        if held + size > self._limit_bytes:
            raise MemoryError(
                f"{what}: {format_bytes(size)} beside {format_bytes(held)} that are held so, and "
                f"exposed_memory is {format_bytes(self._limit_bytes)}. {remedy}, or raise "
                "Config.exposed_memory"
            )

    def _come(self, unit: int, parameter: int) -> None:
        """Wait for what the device may still copy into a gradient that was shown.

        Where p.grad lies in pinned memory the user's own copies into it are asynchronous.
        """
        if unit in self._units and parameter in self._units[unit].shown:
            self._executor.lanes.drain()

    def _put_home(self, unit: int) -> None:
        """Put home what is shown of a unit from elsewhere."""
        self._renew(unit)
        now = self._units.get(unit)
        if now is None:
            return
        self._executor.quiesce("gradient", unit)
        for parameter, shown in now.shown.items():
            here = self._at_home(unit, parameter)
            require_shape(self._plan.profile.units[unit].parameters[parameter], shown.tensor)
            if not is_same(shown.tensor, here):
                if not shown.apart and self._others_view(unit):  # `p.grad.t_()`, or its data set.
                    self._part(unit)
                    here = self._at_home(unit, parameter)
                here.copy_(shown.tensor)
                shown.apart = True
        if now.copied is not None:
            self._executor.poke(Value("gradient", unit), now.copied)

    def _lose(self, unit: int, parameter: int, *, others: bool = False) -> None:
        """What was shown of one gradient will never count again, or `others` in its place."""
        self._come(unit, parameter)
        now = self._showing(unit)
        shown = now.shown.get(parameter)
        if shown is not None and not shown.apart:
            here = is_same(shown.tensor, self._at_home(unit, parameter))  # Else its data was set.
            if shown.viewed if here else self._others_view(unit):
                self._part(unit, others=others)
            elif shown.held:
                shown.set_apart()
        now.shown.pop(parameter, None)

    def _set_apart(self, unit: int, parameter: int) -> None:
        """What was shown of one gradient is its holder's, if there is one; else it is hidden."""
        shown = self._showing(unit).shown.get(parameter)
        if shown is None or shown.apart or shown.viewed:
            return
        if shown.held:
            shown.set_apart()
        else:
            del self._showing(unit).shown[parameter]

    def _part(self, unit: int, *, others: bool = False) -> None:
        """Leave the home of a unit's gradients, or the copy of it, to who has views of that.

        With `others` to be shown there is another copy then.

        Raises:
            MemoryError: there is no room for another home.
        """
        self._executor.quiesce("gradient", unit)
        now = self._showing(unit)
        if now.copied is not None:
            fresh = self._fresh(unit).copy_(now.copied) if others else None
            self._executor.poke(Value("gradient", unit), now.copied)
            self._places.leave(now.copied)
            now.copied = fresh
        else:
            if size := self._places.needs(unit):
                what = (
                    f"a view of the gradient of a parameter in {self._name(unit)} (p.grad.data, "
                    ".view(), p.grad[0]) is held as that is given up, and takes its memory along"
                )
                self._make_room(size, what, "Let go of it before, or keep p.grad or a clone()")
            self._places.move(unit)
        for shown in now.shown.values():
            shown.apart = True

    def _others_view(self, unit: int) -> bool:
        """Whether anybody has a view of where a unit's gradients are shown, but of none shown."""
        now, shown = self._showing(unit), 0
        for parameter, one in now.shown.items():
            shown += not one.apart and is_same(one.tensor, self._at_home(unit, parameter))
        if now.copied is not None:
            return use_count(now.copied) - ALONE > shown
        return self._places.viewed(unit, shown)
