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
        "runtime/src/runner.cpp",
        "    if (task.state != State::READY || stopped_) return false;\n",
        "    if (stopped_) return false;\n",
    ),
    Wait(
        "user: on all streams of its compute",
        "runtime/runner",
        "            self._lanes.finish(task, list(streams))\n",
        "            self._lanes.finish(task, list(streams)[-1:])\n",
    ),
    Wait(
        "user: until tasks are over",
        "runtime/runner",
        "                self._block(task, partial(self._lanes.over, task, LOOK_AGAIN_S))\n",
        "                pass\n",
    ),
    Wait(
        "user: until the device is through with its compute",
        "runtime/src/runner.cpp",
        "            for (const driver::Event event : compute.events) "
        "options_.driver->wait(event);\n",
        "",
    ),
    Wait(
        "lane: until the device is through with its op",
        "runtime/src/runner.cpp",
        "            options_.driver->wait(over.events.front());\n",
        "",
    ),
    Wait(
        "schedule: a task for others",
        "runtime/src/schedule.cpp",
        "!task->waits.empty() || task->state",
        "task->state",
    ),
    Wait(
        "schedule: what a cancelled task waited for",
        "runtime/src/runner.cpp",
        "                    link(other, follower);\n",
        "",
    ),
    Wait(
        "order: a read for the last write",
        "runtime/src/board.h",
        "(access->wrote || writing) &&",
        "writing &&",
    ),
    Wait(
        "order: a write for the reads",
        "runtime/src/board.h",
        "(access->wrote || writing) &&",
        "access->wrote &&",
    ),
    Wait(
        "order: a write for the last write",
        "runtime/src/board.h",
        "(access->wrote || writing) &&",
        "access->wrote != writing &&",
    ),
    Wait(
        "order: past a write that was taken back",
        "runtime/src/board.h",
        "            if (access->task->state == State::CANCELLED) continue;\n",
        "",
    ),
    Wait(
        "home: after a write",
        "runtime/runner",
        "                self.drain()\n",
        "                pass\n",
    ),
    Wait(
        "home: until nobody writes or reads it",
        "runtime/runner",
        "        self.wait(self.touching(reads, writes))\n",
        "        self.touching(reads, writes)\n",
    ),
    Wait(
        "home: until nobody reads it",
        "runtime/runner",
        "((), touched) if to_write",
        "(touched, ()) if to_write",
        ("test_snapshots",),
    ),
    Wait(
        "weights: of a unit beside the slot",
        "runtime/runner",
        '        self.quiesce("weight", unit, to_write=False)\n',
        "",
        ("test_active_units",),
    ),
    Wait(
        "snapshots: before a value is read",
        "model/snapshots",
        "        self._runner.quiesce(key.kind, key.unit, to_write=False)\n",
        "",
    ),
    Wait(
        "snapshots: after a value is read",
        "model/snapshots",
        "        self._runner.drain()  # Before other streams look at it, or a lane writes home.\n",
        "",
    ),
    Wait(
        "snapshots: before edits are put home",
        "model/snapshots",
        "                self._runner.quiesce(kind, unit)\n",
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
        "        self.engine.settle()\n        begun",
        "        begun",
        ("test_early_updates",),
    ),
    Wait(
        "updates: until all are done",
        "optim/update",
        "        self._runner.wait(self._pending.values())\n",
        "",
    ),
    Wait(
        "updates: until the norm is known",
        "optim/update",
        "        self._runner.wait([self._normed])\n        return",
        "        return",
        ("test_exact",),
    ),
    Wait(
        "residents: until the norm is known",
        "optim/update",
        "            self._runner.wait([self._normed])\n        for unit in here",
        "            pass\n        for unit in here",
    ),
    Wait(
        "residents: for sums in a lane, in the same workspace",
        "optim/update",
        "        self._runner.wait(begun)\n",
        "",
    ),
    Wait(
        "residents: until through",
        "optim/update",
        "                self._queued.synchronize()\n",
        "                pass\n",
    ),
    Wait(
        "home: asleep, until what is to be copied is there",
        "runtime/runner",
        "            self.drain()  # Which sleeps and is told as compute; a copy spins.\n",
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
        "residents: after they were attached",
        "attachment",
        "            self.device.drain()\n            return\n",
        "            return\n",
    ),
    Wait(
        "states: after they are read",
        "optim/states",
        "        self._runner.drain()  # Before an update may write where it reads.\n",
        "",
    ),
    Wait(
        "gradients: before they are shown",
        "model/gradients",
        '        self._runner.quiesce("gradient", unit)\n        found',
        "        found",
    ),
    Wait(
        "gradients: before one is replaced",
        "model/gradients",
        '            self._runner.quiesce("gradient", unit)\n            self._runner.copy_now',
        "            self._runner.copy_now",
    ),
    Wait(
        "gradients: before one that is held is let go of",
        "model/gradients",
        '            self._runner.quiesce("gradient", unit, to_write=False)\n',
        "",
    ),
    Wait(
        "gradients: for the place where they are collected",
        "program/compile",
        "Op(Lane.COMPUTE, Verb.COLLECT, there.value, (), (there,), 0, deadline)",
        "Op(Lane.COMPUTE, Verb.COLLECT, there.value, (), (), 0, deadline)",
        ("test_program",),
    ),
    Wait(
        "sleep and save: for all that is under way",
        "model/engine",
        "        self.runner.idle()\n",
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
        "            self._device.drain_all()\n        for arena in self.arenas.values():",
        "            pass\n        for arena in self.arenas.values():",
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
        "            self._runner.drain()  # The user's stream may still edit them.\n",
        "            pass\n",
    ),
    Wait(
        "device: after zeros were written",
        "runtime/device",
        "        self.drain()\n        return made",
        "        return made",
    ),
)
