"""The desk of one policy replica: what it is shown there, and what becomes of its answers.

desk -> look at the group -> replica decides -> trajectory memory, desk
"""

from __future__ import annotations

import time
from typing import Any, Protocol, TypeAlias

from torch import Tensor

from embodied import progress
from embodied.rollout.acting import Observer, RolloutSettings, Shown, groups_of
from embodied.rollout.desks import Desks, Request, Work
from embodied.trajectories.memory import FrameCounts, TrajectoryMemory
from policies.contract import Action, Inputs
from sim_farm.client.farm import Farm, FarmAddress

Asked: TypeAlias = Shown | Inputs
"""What a replica is to decide, or to value."""
Answer: TypeAlias = Action | Tensor
"""Decisions, or values float32 [B]."""


class Desk(Protocol):
    """Where a replica is handed work, and hands back what it has done."""

    def next(self, rollout: int) -> Asked | None:
        """Wait for work of this rollout; None when that is over. Waiting for work is progress."""
        ...

    def answer(self, answer: Answer) -> None:
        """What became of the work that was handed out last."""
        ...

    def fail(self) -> None:
        """The replica serves no more; its call says why."""
        ...

    def note_version(self, version: int) -> None:
        """So many updates have the replica's weights seen."""
        ...


class OwnDesk:
    """A desk on the machine of the farm and the trajectory memory. It reads the one and writes into the other."""

    def __init__(
        self, farm: Farm, settings: RolloutSettings, rank: int, memory: TrajectoryMemory, desks: Desks
    ) -> None:
        self._farm, self._settings, self._rank, self._memory, self._desks = farm, settings, rank, memory, desks
        self._observer = Observer(farm, settings)
        self._groups = groups_of(farm)
        self._width = sum(len(group.columns) for group in self._groups)
        self._request: Request | None = None
        """What is being worked on."""

    def __reduce__(self) -> Any:
        # Who is sent a desk, attaches to its farm.
        return _attached, (self._farm.address, self._settings, self._rank, self._memory, self._desks)

    def next(self, rollout: int) -> Asked | None:
        while not self.is_over(rollout):
            if (asked := self.look(rollout)) is not None:
                return asked
            progress.report()
        return None

    def is_over(self, rollout: int) -> bool:
        return self._desks.is_over(rollout)

    def look(self, rollout: int) -> Asked | None:
        """`next`, but for some time only."""
        self._request = request = self._desks.await_request(self._rank, rollout)
        if request is None:
            return None
        self._begin_ns, self._before = time.monotonic_ns(), self._observer.frames(self._memory)
        if request.work is Work.VALUE:
            return self._desks.inputs(self._rank, request.count)
        self._seen = self._farm.look(request.group)
        self._shown = self._observer.show(self._groups[request.group], self._seen, self._memory.shape.cameras)
        return self._shown

    def answer(self, answer: Answer, spent_ns: int | None = None, sent: FrameCounts | None = None) -> None:
        """As `Desk.answer`. Of a replica on another machine: it has worked for `spent_ns` until a moment ago, and what
        it was shown was `sent` there."""
        request = self._request
        assert request is not None, "what nobody has asked is answered"
        if isinstance(answer, Action):
            flat = self._groups[request.group].flat(request.row, self._width)
            chunks = self._observer.write(self._seen, self._shown, answer, self._memory, flat)
            self._desks.chunks(self._rank, len(flat))[...] = chunks
        else:
            self._desks.values(self._rank, request.count)[...] = answer
        frames = self._observer.frames(self._memory) - self._before + (sent or FrameCounts())
        begin_ns = self._begin_ns if spent_ns is None else time.monotonic_ns() - spent_ns
        self._request = None
        self._desks.finish(self._rank, request, begin_ns, frames)
        self._farm.ring_client()

    def fail(self) -> None:
        self._desks.fail(self._rank)
        self._farm.ring_client()

    def note_version(self, version: int) -> None:
        self._desks.note_version(self._rank, version)


def _attached(
    farm: FarmAddress, settings: RolloutSettings, rank: int, memory: TrajectoryMemory, desks: Desks
) -> OwnDesk:
    return OwnDesk(Farm.attach(farm), settings, rank, memory, desks)
