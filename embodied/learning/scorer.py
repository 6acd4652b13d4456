"""What scorers have in common: parts of an iteration's trajectories come in, are worked on, and go out in order."""

from __future__ import annotations

import time
from collections import deque
from typing import ClassVar

from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.trajectories.batch import Trajectories
from policies.contract import Policy


class Scorer:
    """A scorer: it stands between policy and learner. Subclasses define `make` and `work`."""

    takes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    makes: ClassVar[frozenset[str]] = takes
    """Hands on what it was given: whole rollouts, or parts of whole episodes."""
    adds: ClassVar[frozenset[str]] = frozenset()
    """Fields of `Trajectories` that are None before it, and filled after."""

    def __init__(self, affinity: Affinity | None = None) -> None:
        self._affinity = affinity or Affinity()
        self._ready: deque[Trajectories] = deque()

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` for settings that it cannot work with. Asked before any worker is started."""

    def work(self, batch: Trajectories) -> Trajectories:
        """The trajectories with what this component adds. It must not write into the tensors that it is given."""
        raise NotImplementedError

    def receive(self, batch: Trajectories, iteration: int) -> float:
        """Work on a part of an iteration's trajectories; the seconds that it took."""
        begin = time.monotonic()
        with self._affinity.applied():
            self._ready.append(self.work(batch))
        return time.monotonic() - begin

    def trajectories(self) -> Trajectories:
        """The oldest part that was worked on and not yet handed out."""
        return self._ready.popleft()

    def share(self, policy: Policy) -> None:
        """The learner is in this process. Who needs no policy has no use for its."""
