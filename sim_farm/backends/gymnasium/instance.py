"""One instance of a Gymnasium environment, whose answers are checked, and whose exceptions say where they come from."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sim_farm.contract import FarmError, Float32, UInt8
from sim_farm.failures import failures_of

SUCCESS = ("is_success", "success")
"""Keys of the info by which environments report success."""
NESTED = ("final_info", "episode")
"""Keys of the info under which wrappers put that of an episode's end."""


@dataclass(frozen=True)
class Seen:
    """Answer to a reset or to an action."""

    observation: Any
    reward: float = 0.0
    terminated: bool = False
    truncated: bool = False
    solved: bool | None = None
    """Success as the info has it; None where it says nothing."""


class Instance:
    """See the module's docstring. What goes wrong is raised as `FarmError`."""

    def __init__(self, name: str, env: gymnasium.Env[Any, Any]) -> None:
        self.name, self.env = name, env
        self._seed, self._steps = 0, 0

    def reset(self, seed: int) -> Seen:
        self._seed, self._steps = seed, 0
        with failures_of(self.name, f"reset(seed={seed})"):
            try:
                found = self.env.reset(seed=seed)
            except TypeError:
                self._require_seed()
                raise
        if isinstance(found, tuple) and len(found) == 2:
            self._require_info(found[1], "reset")
        else:
            raise FarmError(
                f"{self.name}: reset returns {_shape(found)}, and Gymnasium's an observation and an info; an "
                "environment of the older gym is registered with a wrapper (shimmy's GymV21CompatibilityV0)"
            )
        return Seen(found[0])

    def step(self, action: Float32) -> Seen:
        """The action [A] is within the bounds."""
        self._steps += 1
        with failures_of(self.name, f"step {self._steps} after reset(seed={self._seed})"):
            found = self.env.step(self._own(action))
            if not isinstance(found, tuple) or len(found) != 5:
                raise FarmError(
                    f"{self.name}: step returns {_shape(found)}, and Gymnasium's an observation, a reward, terminated, "
                    "truncated and an info; an environment of the older gym is registered with a wrapper (shimmy's "
                    "GymV21CompatibilityV0)"
                )
            observation, reward, terminated, truncated, info = found
            self._require_info(info, "step")
            return Seen(
                observation,
                self._number("a reward", reward, "one number: register it with gymnasium.wrappers.TransformReward"),
                bool(self._number("terminated", terminated, "True or False: let step give one of them")),
                bool(self._number("truncated", truncated, "True or False: let step give one of them")),
                self._solved(info),
            )

    @property
    def when(self) -> str:
        """The episode's position, for messages."""
        began = f"reset(seed={self._seed})"
        return f"at step {self._steps} after {began}" if self._steps else f"after {began}"

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Errors while the answer is read are raised with the environment and the step."""
        with failures_of(self.name, f"its observation {self.when}"):
            try:
                yield
            except FarmError as error:
                raise FarmError(f"{self.name}: {error} ({self.when})") from error

    def draw(self) -> UInt8:
        """uint8 [H, W, 3]: what the environment shows now, in its own size."""
        try:
            drawn = self.env.render()
        except (Exception, SystemExit) as error:  # whatever its authors draw with; its message has what is missing
            raise FarmError(
                f"{self.name} cannot draw ({error}). Set env.cameras and eval.videos to 0, or install what draws it: "
                "pip install 'embodied-farm[gymnasium]' has pygame. MuJoCo's environments need MUJOCO_GL=egl or osmesa "
                "where there is no display"
            ) from error
        if not isinstance(drawn, np.ndarray) or drawn.dtype != np.uint8 or drawn.ndim != 3 or drawn.shape[2] != 3:
            raise FarmError(f"{self.name} draws {_shape(drawn)}, and frames are uint8 [H, W, 3]: set env.cameras to 0")
        return drawn

    def close(self) -> None:
        self.env.close()

    def _own(self, action: Float32) -> Any:
        space = self.env.action_space
        if isinstance(space, spaces.Discrete):
            return space.start + int(np.rint(action[0]))
        assert isinstance(space, spaces.Box)
        # Bounds of another precision are not those that float32 rounds them to.
        return np.clip(action.reshape(space.shape).astype(space.dtype), space.low, space.high)

    def _require_seed(self) -> None:
        """Raise `FarmError` for a `reset` of the environment's own that takes no seed."""
        kind = type(self.env.unwrapped)
        taken = inspect.signature(kind.reset).parameters
        if "seed" not in taken and not any(one.kind is one.VAR_KEYWORD for one in taken.values()):
            raise FarmError(
                f"{self.name}: reset of {kind.__module__}.{kind.__qualname__} takes no seed: write reset(self, *, "
                "seed=None, options=None), and call super().reset(seed=seed) in it"
            )

    def _require_info(self, info: Any, method: str) -> None:
        if not isinstance(info, Mapping):
            given = "None" if info is None else f"a {type(info).__name__}"
            raise FarmError(
                f"{self.name}: the info that {method} returns is {given}, and an info is a dictionary: return {{}} "
                f"where there is nothing to say ({self.when})"
            )

    def _number(self, name: str, given: Any, allowed: str) -> float:
        """The only number in what is given."""
        numbers = np.asarray(given)
        if numbers.size == 1 and numbers.dtype.kind in "biuf":
            return float(numbers.item())
        what = f"{name} of shape {list(numbers.shape)}" if numbers.size != 1 else f"{name} that is {given!r}"
        raise FarmError(f"{self.name} gives {what} {self.when}, and it is {allowed}")

    def _solved(self, info: Mapping[str, Any]) -> bool | None:
        parts = [info, *(info[key] for key in NESTED if isinstance(info.get(key), Mapping))]
        said = [(key, part[key]) for part in parts for key in SUCCESS if part.get(key) is not None]
        for key, value in said:
            if np.size(value) != 1 or np.asarray(value).item() not in (0, 1):
                raise FarmError(
                    f"{self.name} reports {key} as {value!r}, which is neither success nor failure: it is True or "
                    "False; leave it out of the info where it is not known"
                )
        return any(bool(np.asarray(value).item()) for _, value in said) if said else None


def _shape(found: Any) -> str:
    if isinstance(found, tuple):
        return f"a tuple of {len(found)}"
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else f"a {type(found).__name__}"
