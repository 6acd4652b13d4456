"""The rollout loop of a run with several policy replicas. It holds no policy.

    until every group is done:  a group that is ready -> the desk of a replica that is free -> submit

Which replica acts for which group changes nothing: a batch is a group's rows, whoever decides for them. So a slow
replica holds up the group that it decides for, and no other.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.rollout.acting import EnvironmentGroup, RolloutSettings
from embodied.rollout.desks import Desks
from embodied.rollout.rollout_loop import RolloutLoop
from embodied.trajectories.memory import FrameCounts
from policies.contract import Inputs
from sim_farm.client.farm import Farm, WorkerFailed, WorkerTimeout
from sim_farm.client.observations import Observations

TRACK = "rollout loop"


class ReplicaFailed(WorkerFailed):
    """A replica met an error of its own, which its call of `serve` raises."""


class SharedLoop(RolloutLoop):
    """See the module's docstring."""

    track = TRACK

    def __init__(self, farm: Farm, settings: RolloutSettings, names: Sequence[str]) -> None:
        """`names` of the replicas, in the order of their ranks: for messages and the trace."""
        super().__init__(farm, settings)
        self._names = tuple(names)
        self._free = deque(range(len(names)))
        """Replicas without work, the one that has had none for longest first."""
        self._busy: dict[int, Callable[[int], None]] = {}
        """What is to be done with what each replica that has work will have done."""
        self._doing: dict[int, str] = {}
        self._rollouts = 0
        self._copies = 0
        """Frames that were copied onto desks, to be valued."""

    def meet(self, desks: Desks) -> None:
        """Hand work to the replicas at these desks from now on."""
        self._desks = desks

    @property
    def version(self) -> int:
        """Raises `WorkerFailed` where replicas act with different ones."""
        versions = self._desks.versions()
        if len(set(versions)) > 1:
            each = ", ".join(f"{name} with {version}" for name, version in zip(self._names, versions, strict=True))
            raise WorkerFailed(f"the replicas act with weights of different versions: {each}")
        return versions[0]

    @contextmanager
    def rollout(self) -> Iterator[None]:
        """Every replica serves it in one call, which returns when the block ends."""
        self._rollouts += 1
        try:
            assert self.version >= 0
            yield
        finally:
            self._desks.end_rollout(self._rollouts)
        self.clock.replicas = len(self._names)
        self.clock.waiting = max(self.clock.waiting, 0.0)

    def values(self, inputs: Inputs, deadline_s: float) -> Tensor:
        """Each replica values as many as the others, in calls of no more rows than the largest group has."""
        count = _count(inputs)
        calls = min(count, max(len(self._names), -(-count // self._desks.rows)))
        waiting = deque(torch.from_numpy(piece) for piece in np.array_split(np.arange(count), calls))
        found = torch.empty(count)

        def keep(piece: Tensor, replica: int) -> None:
            found[piece] = self._desks.values(replica, len(piece))
            self.span(self._names[replica], f"value {len(piece)} observations", *self._desks.times_ns(replica))

        while waiting or self._busy:
            self._take_back()
            while waiting and self._free:
                piece, replica = waiting.popleft(), self._free.popleft()
                self._copies += len(piece) if inputs.frames else 0
                self._desks.ask_to_value(replica, self._rollouts, inputs.rows(piece), len(piece))
                self._busy[replica] = partial(keep, piece)
                self._doing[replica] = f"valuing {len(piece)} observations"
            if self._busy:
                self._wait(lambda: False, deadline_s)
        return found

    def frames(self) -> FrameCounts:
        return self.memory.counts + FrameCounts(0, self.farm.frame_copies + self._copies) + self._desks.counts()

    def _next_group(self, resting: set[int], deadline_s: float) -> EnvironmentGroup:
        while True:
            self._take_back()
            ready = self._ready(resting) if self._free else []
            if ready:
                return min(ready, key=lambda group: (len(group.decisions), group.number))
            mark = time.monotonic_ns()
            self._wait(lambda: bool(self._free and self._ready(resting)), deadline_s)
            self._waited(mark, "any group or replica")

    def _decide(self, group: EnvironmentGroup, seen: Observations) -> None:
        replica = self._free.popleft()
        self._desks.ask_to_act(replica, self._rollouts, group.number, group.row)
        self._busy[replica] = partial(self._acted, group, group.arrow)
        self._doing[replica] = f"deciding for group {group.number}"
        self._decided(group, seen, group.flat(group.row, self.width))

    def _settle(self, deadline_s: float) -> None:
        while self._busy:
            mark = time.monotonic_ns()
            self._wait(lambda: False, deadline_s)
            self._waited(mark, "replicas")
            self._take_back()

    def _take_back(self) -> None:
        """Do what is to be done with what replicas have done; they are free then."""
        for replica in self._desks.failed():
            raise ReplicaFailed(f"{self._names[replica]} met an error and serves no more")
        for replica in [replica for replica in self._busy if self._desks.is_done(replica)]:
            self._busy.pop(replica)(replica)
            self._free.append(replica)
            progress.report()

    def _acted(self, group: EnvironmentGroup, arrow: int, replica: int) -> None:
        begin, end = self._desks.times_ns(replica)
        self.span(self._names[replica], f"act for group {group.number}", begin, end, flow_from=(arrow,))
        # The loop waits while replicas work. On average a replica waits that much less.
        self.clock.policy += (end - begin) / 1e9
        self.clock.waiting -= (end - begin) / 1e9 / len(self._names)
        mark = time.monotonic_ns()
        self._submit(group, self._desks.chunks(replica, len(group.columns)))
        self.clock.transport += (time.monotonic_ns() - mark) / 1e9

    def _wait(self, found: Callable[[], bool], deadline_s: float) -> None:
        """Wait until this is found, or a replica has done its work or failed: at most `deadline_s` seconds without
        progress of a group or a replica."""
        desks = self._desks
        self.farm.wait(
            lambda: any(map(desks.is_done, self._busy)) or bool(desks.failed()) or found(),
            lambda: self._late(deadline_s),
            deadline_s,
            lambda: max([self.farm.progress_ns(), *map(desks.requested_ns, self._busy)]),
        )

    def _late(self, deadline_s: float) -> WorkerTimeout:
        if not self._busy:
            return self.farm.late(deadline_s)
        replica = min(self._busy, key=self._desks.requested_ns)
        since_s = (time.monotonic_ns() - self._desks.requested_ns(replica)) / 1e9
        return WorkerTimeout(
            f"{self._names[replica]} did not answer within {deadline_s:.0f} s: it has been {self._doing[replica]} for "
            f"{since_s:.1f} s"
        )


def _count(inputs: Inputs) -> int:
    """B."""
    tensors = [tensor for tensor in (inputs.state, inputs.proprio, inputs.episode, *inputs.frames.values())]
    return next((len(tensor) for tensor in tensors if tensor is not None), len(inputs.instruction))
