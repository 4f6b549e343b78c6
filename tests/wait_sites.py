"""The waits of the engine: where each stands in the source, and the source without it.

Not among them is what bounds and does not order: pieces under way (`copies`), a step that waits for
the updates of the one before (`engine`).
"""

from __future__ import annotations

from typing import NamedTuple


class Wait(NamedTuple):
    """A wait, and the source without it."""

    name: str
    file: str
    present: str
    absent: str
    tests: tuple[str, ...] = ()
    """Files with tests that are meant for it, beside those of all."""


WAITS = (
    Wait(
        "user: for the tasks before its compute",
        "lanes",
        "            self._block(task, lambda: self._books.begin(task, LOOK_AGAIN_S))\n",
        "            task.state = type(task.state)('ready')\n"
        "            self._books.begin(task, 0.0)\n",
    ),
    Wait(
        "user: its stream for computes on other streams",
        "lanes",
        "        for fence in task.fences:\n            fence.wait()\n        task.streams = ",
        "        task.streams = ",
    ),
    Wait(
        "user: another stream of its compute, for the same",
        "lanes",
        "            for fence in task.fences:\n                fence.wait()\n"
        "            task.streams.append",
        "            task.streams.append",
    ),
    Wait(
        "user: fences on all streams of its compute",
        "lanes",
        "for stream in task.streams]",
        "for stream in task.streams[-1:]]",
    ),
    Wait(
        "user: any fence of its compute",
        "lanes",
        "[fence for fence in fences if fence is not None]",
        "[]",
    ),
    Wait(
        "user: until tasks are over",
        "lanes",
        "                self._block(task, partial(self._books.over, task, LOOK_AGAIN_S))\n",
        "                pass\n",
    ),
    Wait(
        "user: until tasks are over on the device",
        "lanes",
        "                        fence.synchronize()\n        self.check()",
        "                        pass\n        self.check()",
    ),
    Wait(
        "lane: for fences before its op",
        "lanes",
        "            start += self._come(task, task.fences)\n",
        "",
    ),
    Wait(
        "lane: until its op is through",
        "lanes",
        "            self._device.drain()\n            if self._pace",
        "            if self._pace",
    ),
    Wait(
        "schedule: fences of tasks that were over",
        "schedule",
        "                task.fences += other.fences\n",
        "                pass\n",
    ),
    Wait(
        "schedule: fences of tasks that end",
        "schedule",
        "            follower.fences += task.fences\n",
        "",
    ),
    Wait("schedule: a task for others", "schedule", "task.missing or task.state", "task.state"),
    Wait(
        "schedule: what a cancelled task waited for",
        "schedule",
        "                if other not in follower.waits:\n",
        "                if False:\n",
    ),
    Wait(
        "schedule: a chunk for its slot",
        "schedule",
        "            elif self._free:\n                heapq.heappop(self._waiting)\n"
        "                passage.slot = self._free.pop()\n",
        "            elif True:\n                heapq.heappop(self._waiting)\n"
        "                passage.slot = self._free.pop() if self._free else 0\n",
    ),
    Wait(
        "schedule: a chunk for what is outside it",
        "schedule",
        "            task.passage.missing += 1\n",
        "            task.passage.missing += 0 * task.serial\n",
    ),
    Wait("order: a read for the last write", "scoreboard", "if wrote or writing:", "if writing:"),
    Wait(
        "order: a write for the reads",
        "scoreboard",
        "if wrote or writing:",
        "if wrote:",
    ),
    Wait(
        "order: a write for the last write",
        "scoreboard",
        "if wrote or writing:",
        "if not (wrote and writing):",
    ),
    Wait(
        "order: past a write that was taken back",
        "scoreboard",
        "                    if taken_back(task):\n                        continue\n",
        "",
    ),
    Wait(
        "order: past a write that may be taken back",
        "scoreboard",
        "if wrote and self._fixed(other) and not self._taken_back(other):",
        "if wrote:",
    ),
    Wait(
        "order: tasks over on the host only",
        "task",
        "return self.over and not (self.fences and self.fenced)",
        "return self.over",
    ),
    Wait(
        "home: after a write",
        "executor",
        "                self.lanes.drain()\n",
        "                pass\n",
    ),
    Wait(
        "home: until nobody writes or reads it",
        "executor",
        "        self.lanes.wait(self.lanes.touching(reads, writes))\n",
        "        self.lanes.touching(reads, writes)\n",
    ),
    Wait(
        "home: until nobody reads it",
        "executor",
        "((), touched) if to_write",
        "(touched, ()) if to_write",
    ),
    Wait(
        "weights: of a unit beside the slot",
        "in_use",
        '            self._executor.quiesce("weight", bound.index, to_write=False)\n',
        "",
        ("test_in_use",),
    ),
    Wait(
        "weights: before a private copy",
        "exposure",
        '            self._executor.quiesce("weight", unit, to_write=False)\n            copied',
        "            copied",
    ),
    Wait(
        "weights: before edits are put home",
        "exposure",
        '            self._executor.quiesce("weight", unit)\n            self._write_back',
        "            self._write_back",
    ),
    Wait(
        "weights: before they are read",
        "exposure",
        '        self._executor.quiesce("weight", unit, to_write=False)\n        with',
        "        with",
    ),
    Wait(
        "weights: after they are read",
        "exposure",
        "        self._executor.lanes.drain()  # Before an update may write where it reads.\n",
        "",
    ),
    Wait(
        "weights: before copies are renewed",
        "exposure",
        '            self._executor.quiesce("weight", unit, to_write=False)\n            for',
        "            for",
    ),
    Wait(
        "weights: after a private copy",
        "exposure",
        "            self._executor.lanes.drain()  # Other streams look at it, and write what was "
        "read.\n",
        "",
    ),
    Wait(
        "weights: after copies are renewed",
        "exposure",
        "            self._homes.forget()\n            self._executor.lanes.drain()\n",
        "            self._homes.forget()\n",
    ),
    Wait(
        "states: for updates before they are read",
        "optimizer",
        "            self.engine.settle()\n            self.engine.exposures",
        "            self.engine.exposures",
    ),
    Wait(
        "states: for updates before they are written",
        "optimizer",
        "        self.engine.settle()\n        for",
        "        for",
    ),
    Wait(
        "updates: until all are done",
        "updates",
        "        self._executor.lanes.wait(self._pending)\n",
        "",
    ),
    Wait(
        "updates: until the norm is known",
        "updates",
        "        self._executor.lanes.wait([self._normed])\n        return",
        "        return",
        ("test_exact",),
    ),
    Wait(
        "residents: until the norm is known",
        "updates",
        "            self._executor.lanes.wait([self._normed])\n        for _, unit",
        "            pass\n        for _, unit",
    ),
    Wait(
        "residents: for updates in a lane, in the same workspace",
        "updates",
        "            self.settle()  # The user's stream is about to use the workspace.\n",
        "            pass\n",
    ),
    Wait(
        "residents: before a lane uses the workspace",
        "updates",
        "            self._executor.lanes.drain()  # Before a lane uses the workspace.\n",
        "            pass\n",
    ),
    Wait(
        "residents: until through",
        "updates",
        "                self._queued.synchronize()\n",
        "                pass\n",
    ),
    Wait(
        "home: asleep, until what is to be copied is there",
        "executor",
        "            self.lanes.drain()  # Which sleeps and is told as compute; a copy spins.\n",
        "",
    ),
    Wait(
        "awaited: who meets one, for its weights",
        "awaited",
        "        self._executor.lanes.wait(self.tasks)\n",
        "",
        ("test_awaited",),
    ),
    Wait(
        "awaited: in step(), where somebody holds what lanes change",
        "awaited",
        "                self._executor.lanes.wait(away.tasks)\n",
        "                pass\n",
        ("test_awaited",),
    ),
    Wait(
        "awaited: a lane, for the compute before step()",
        "carrier",
        "            yield self.fence\n",
        "            yield None\n",
    ),
    Wait("residents: after they were attached", "resident", "    device.drain()\n", ""),
    Wait(
        "weights: before changes in use are put home",
        "in_use",
        '            self._executor.quiesce("weight", unit)\n            changed',
        "            changed",
        ("test_in_use",),
    ),
    Wait(
        "states: after they are read",
        "states",
        "        self._executor.lanes.drain()  # Before an update may write where it reads.\n",
        "",
    ),
    Wait(
        "gradients: before they are shown",
        "gradients",
        '        self._executor.quiesce("gradient", unit)\n        now = self._showing(unit)\n'
        "        if parameter",
        "        now = self._showing(unit)\n        if parameter",
    ),
    Wait(
        "gradients: before they are read",
        "gradients",
        '        self._executor.quiesce("gradient", unit)\n        self._put_home(unit)',
        "        self._put_home(unit)",
    ),
    Wait(
        "gradients: before one is replaced",
        "gradients",
        '        self._executor.quiesce("gradient", unit)\n        window = self._seen',
        "        window = self._seen",
    ),
    Wait(
        "gradients: before those shown are put home",
        "gradients",
        '        self._executor.quiesce("gradient", unit)\n        for parameter, shown',
        "        for parameter, shown",
    ),
    Wait(
        "gradients: before those held are renewed",
        "gradients",
        '        self._executor.quiesce("gradient", unit)\n        if now.copied is not None',
        "        if now.copied is not None",
    ),
    Wait(
        "gradients: for the place where they are collected",
        "collector",
        "            self._executor.lanes.begin(task)\n        except",
        "            from dataclasses import replace\n"
        "            alone = self._executor.known(replace(known.op, reads=(), writes=()))\n"
        "            number = self._passes.number\n"
        "            self._executor.lanes.begin(self._executor.lanes.issue(alone, number, None))\n"
        "        except",
    ),
    Wait(
        "sleep: for a piece before it is filled again",
        "bounce",
        "        if before is not None:\n            before.synchronize()\n",
        "",
    ),
    Wait(
        "sleep: for a piece before it is emptied",
        "bounce",
        "            if fence is not None:\n                fence.synchronize()\n",
        "",
    ),
    Wait(
        "sleep: until the last piece is through",
        "bounce",
        "        left[turn % 2] = device.fence(device.stream())\n    device.drain()\n",
        "        left[turn % 2] = device.fence(device.stream())\n",
    ),
    Wait(
        "sleep: for a copy on the device",
        "bounce",
        "            _at_once(into, source)\n            device.drain()\n",
        "            _at_once(into, source)\n",
    ),
    Wait(
        "sleep: for all that is under way",
        "sleep",
        "    engine.executor.idle()\n",
        "",
        ("test_sleep",),
    ),
    Wait(
        "sleep: after a copy that failed, or of a resident",
        "bounce",
        "        device.drain()  # A copy may be under way: after an error, or of who goes on by "
        "himself.\n",
        "",
    ),
    Wait(
        "memory: before it is given back",
        "arena",
        '        if tier == "device":\n            self._device.drain_all()\n',
        "",
        ("test_arena",),
    ),
    Wait(
        "memory: before all of it is given back",
        "arena",
        "            self._device.drain_all()\n        self._homes, self._slots",
        "            pass\n        self._homes, self._slots",
        ("test_arena",),
    ),
    Wait(
        "store: until a piece is through",
        "store",
        "        try:\n            ticket.wait()\n",
        "        try:\n            pass\n",
        ("test_store",),
    ),
    Wait(
        "store: until none is under way",
        "store",
        "            aio.wait_all(ticket for pieces in parts for _, ticket in pieces)\n",
        "            pass\n",
        ("test_store",),
    ),
    Wait(
        "store: until a header is read",
        "store",
        "extent.header_offset).wait()",
        "extent.header_offset)",
        ("test_store",),
    ),
    Wait(
        "store: until a header is written",
        "store",
        "write_from(block, offset).wait()",
        "write_from(block, offset)",
        ("test_store",),
    ),
    Wait(
        "scaler: its numbers on their way to the CPU",
        "scaler",
        '    if device.type == "cpu" and device not in known:\n',
        "    if device is None:\n",
        ("test_scaler",),
    ),
    Wait(
        "gradients: what the device copies into one",
        "gradients",
        "asynchronous where its memory is pinned.\n            self._executor.lanes.drain()\n",
        "asynchronous where its memory is pinned.\n            pass\n",
        ("test_paced",),
    ),
    Wait(
        "gradients: the same, before one is zeroed or given up",
        "gradients",
        "shown:\n            self._executor.lanes.drain()\n",
        "shown:\n            pass\n",
    ),
    Wait(
        "device: after zeros were written",
        "device",
        "        self.drain()\n        return made",
        "        return made",
    ),
)
