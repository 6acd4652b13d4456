"""Where a run is between two iterations."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from embodied.run import checkpoint

RECENT = 100
"""Training episodes over which the success that is reported as `env/success_recent` is averaged."""


@dataclass
class Position:
    """Where a run is between two iterations: everything but weights and environments."""

    iteration: int = 0
    env_steps: int = 0
    wall_s: float = 0.0
    recent: deque[bool] = field(default_factory=lambda: deque(maxlen=RECENT))
    """Outcomes of the last training episodes, oldest first."""

    def state(self) -> checkpoint.RunState:
        return checkpoint.RunState(self.iteration, self.env_steps, self.wall_s, tuple(self.recent))

    @classmethod
    def of(cls, state: checkpoint.RunState) -> Position:
        return cls(state.iteration, state.env_steps, state.wall_s, deque(state.recent_success, maxlen=RECENT))
