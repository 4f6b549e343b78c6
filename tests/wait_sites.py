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
        "runtime/lanes",
        "            self._block(task, lambda: self._books.begin(task, LOOK_AGAIN_S))\n",
        "            task.state = type(task.state)('ready')\n"
        "            self._books.begin(task, 0.0)\n",
    ),
    Wait(
        "user: fences on all streams of its compute",
        "runtime/lanes",
        "for stream in task.streams]",
        "for stream in task.streams[-1:]]",
    ),
    Wait(
        "user: until tasks are over",
        "runtime/lanes",
        "                self._block(task, partial(self._books.over, task, LOOK_AGAIN_S))\n",
        "                pass\n",
    ),
    Wait(
        "user: until the device is through with its compute",
        "runtime/books",
        "            for fence in one[1]:\n                fence.synchronize()\n",
        "",
    ),
    Wait(
        "lane: until its op is through",
        "runtime/lanes",
        "            self._device.drain()\n            if self._pace",
        "            if self._pace",
    ),
    Wait(
        "schedule: a task for others",
        "program/schedule",
        "not task.missing and task.state",
        "task.state",
    ),
    Wait(
        "schedule: what a cancelled task waited for",
        "program/schedule",
        "                if other not in follower.waits:\n",
        "                if False:\n",
    ),
    Wait(
        "order: a read for the last write",
        "program/schedule",
        "if wrote or writing:",
        "if writing:",
    ),
    Wait(
        "order: a write for the reads",
        "program/schedule",
        "if wrote or writing:",
        "if wrote:",
    ),
    Wait(
        "order: a write for the last write",
        "program/schedule",
        "if wrote or writing:",
        "if not (wrote and writing):",
    ),
    Wait(
        "order: past a write that was taken back",
        "program/schedule",
        "                    if taken_back(task):\n                        continue\n",
        "",
    ),
    Wait(
        "order: past a write that may be taken back",
        "program/schedule",
        "if wrote and self._fixed(other) and not self._taken_back(other):",
        "if wrote:",
    ),
    Wait(
        "home: after a write",
        "runtime/executor",
        "                self.lanes.drain()\n",
        "                pass\n",
    ),
    Wait(
        "home: until nobody writes or reads it",
        "runtime/executor",
        "        self.lanes.wait(self.lanes.touching(reads, writes))\n",
        "        self.lanes.touching(reads, writes)\n",
    ),
    Wait(
        "home: until nobody reads it",
        "runtime/executor",
        "((), touched) if to_write",
        "(touched, ()) if to_write",
    ),
    Wait(
        "weights: of a unit beside the slot",
        "model/active_units",
        '            self._executor.quiesce("weight", unit.index, to_write=False)\n',
        "",
        ("test_active_units",),
    ),
    Wait(
        "snapshots: before a value is read",
        "model/snapshots",
        "        self._executor.quiesce(key.kind, key.unit, to_write=False)\n",
        "",
    ),
    Wait(
        "snapshots: after a value is read",
        "model/snapshots",
        "        self._executor.lanes.drain()  # Before other streams look at it, or a lane writes "
        "home.\n",
        "",
    ),
    Wait(
        "snapshots: before edits are put home",
        "model/snapshots",
        "                self._executor.quiesce(kind, unit)\n",
        "",
    ),
    Wait(
        "states: for updates before they are read",
        "optim/optimizer",
        "            self.engine.settle()\n",
        "            pass\n",
    ),
    Wait(
        "states: for updates before they are written",
        "optim/optimizer",
        "        self.engine.settle()\n        for",
        "        for",
    ),
    Wait(
        "updates: until all are done",
        "optim/update",
        "        self._executor.lanes.wait(self._pending)\n",
        "",
    ),
    Wait(
        "updates: until the norm is known",
        "optim/update",
        "        self._executor.lanes.wait([self._normed])\n        return",
        "        return",
        ("test_exact",),
    ),
    Wait(
        "residents: until the norm is known",
        "optim/update",
        "            self._executor.lanes.wait([self._normed])\n        for unit in here",
        "            pass\n        for unit in here",
    ),
    Wait(
        "residents: for updates in a lane, in the same workspace",
        "optim/update",
        "            self.settle()  # The user's stream is about to use the workspace.\n",
        "            pass\n",
    ),
    Wait(
        "residents: before a lane uses the workspace",
        "optim/update",
        "            self._executor.lanes.drain()  # Before a lane uses the workspace.\n",
        "            pass\n",
    ),
    Wait(
        "residents: until through",
        "optim/update",
        "                self._queued.synchronize()\n",
        "                pass\n",
    ),
    Wait(
        "home: asleep, until what is to be copied is there",
        "runtime/executor",
        "            self.lanes.drain()  # Which sleeps and is told as compute; a copy spins.\n",
        "",
    ),
    Wait(
        "pending: until the weights are there",
        "model/resident",
        "                self._runner.wait([one.task])\n",
        "",
        ("test_pending",),
    ),
    Wait(
        "pending: a lane, for the compute before step()",
        "model/resident",
        "            if not runner.device.is_host:",
        "            if False:",
    ),
    Wait(
        "stream: until a chunk is there",
        "runtime/works",
        "        if len(stops) > 1:\n            self._device.drain()\n",
        "",
    ),
    Wait(
        "stream: for a chunk that is to be written",
        "runtime/works",
        "                self._device.drain()\n                self._transfer",
        "                self._transfer",
    ),
    Wait("residents: after they were attached", "model/resident", "    device.drain()\n", ""),
    Wait(
        "states: after they are read",
        "optim/states",
        "        self._executor.lanes.drain()  # Before an update may write where it reads.\n",
        "",
    ),
    Wait(
        "gradients: before they are shown",
        "model/gradients",
        '        self._executor.quiesce("gradient", unit)\n        shown',
        "        shown",
    ),
    Wait(
        "gradients: before one is replaced",
        "model/gradients",
        '            self._executor.quiesce("gradient", unit)\n            self._executor.copy_now',
        "            self._executor.copy_now",
    ),
    Wait(
        "gradients: before those on nvme are zeroed",
        "model/gradients",
        '            self._executor.quiesce("gradient", unit)\n            self._executor.clear',
        "            self._executor.clear",
    ),
    Wait(
        "gradients: before one that is held is let go of",
        "model/gradients",
        '            self._executor.quiesce("gradient", unit, to_write=False)\n',
        "",
    ),
    Wait(
        "gradients: for the place where they are collected",
        "model/gradients",
        "            self._executor.lanes.begin(task)\n        except",
        "            alone = self._executor.lanes.know(known[0].op, (), ())\n"
        "            number = self._passes.number\n"
        "            self._executor.lanes.begin(*self._executor.lanes.issue([alone], number))\n"
        "        except",
    ),
    Wait(
        "sleep: for all that is under way",
        "sleeping",
        "    engine.runner.idle()\n",
        "",
        ("test_sleep",),
    ),
    Wait(
        "memory: before it is given back",
        "runtime/memory",
        '        if tier == "device":\n            self._device.drain_all()\n',
        "",
        ("test_memory",),
    ),
    Wait(
        "memory: before all of it is given back",
        "runtime/memory",
        "            self._device.drain_all()\n        self._homes, self._slots",
        "            pass\n        self._homes, self._slots",
        ("test_memory",),
    ),
    Wait(
        "store: until a piece is through",
        "aio/chunks",
        "        try:\n            ticket.wait()\n",
        "        try:\n            pass\n",
        ("test_store",),
    ),
    Wait(
        "store: until none is under way",
        "aio/chunks",
        "            wait_all(ticket for transfers in by_chunk for _, ticket in transfers)\n",
        "            pass\n",
        ("test_store",),
    ),
    Wait(
        "scaler: its numbers on their way to the CPU",
        "runtime/device",
        '    if device.type == "cpu" and device not in known:\n',
        "    if device is None:\n",
        ("test_scaler",),
    ),
    Wait(
        "gradients: what the user's stream writes, before an update reads",
        "model/gradients",
        "            self._executor.lanes.drain()  # The user's stream may still edit them.\n",
        "            pass\n",
    ),
    Wait(
        "device: after zeros were written",
        "runtime/device",
        "        self.drain()\n        return made",
        "        return made",
    ),
)
