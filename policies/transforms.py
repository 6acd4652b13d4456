"""Transforms between a task's conventions and a checkpoint's: a list of small pieces of data, saved with the policy.

    policy:
      options:
        transforms:
          - {kind: turn_images}
          - {kind: delta_actions, dims: 6}

What is observed passes through the list from the first entry to the last, and actions from the last to the first. An
entry that reads the robot's state reads it as the entries before have left it. Resizing and normalisation come after:
they belong to the checkpoint, which has a preprocessor and statistics.

B rows, C actions of a chunk, A action dimensions, P numbers of the robot's state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass
from torch import Tensor

from policies.contract import PolicyError, PolicySpec

STRICT = ConfigDict(extra="forbid")


class Transform:
    """One convention. What an entry does not define stays as it is."""

    environment: ClassVar[Mapping[str, str]] = {}
    """Settings of the environment from which it converts. With another one the network would see or say what it was
    never trained with."""

    def spec(self, spec: PolicySpec) -> PolicySpec:
        """The sizes after it. Raises `PolicyError` where those before it cannot be converted."""
        return spec

    def frames(self, frames: Tensor) -> Tensor:
        """A camera's pictures uint8 [B, H, W, 3]."""
        return frames

    def state(self, state: Tensor) -> Tensor:
        """The robot's state [B, P]."""
        return state

    def executed(self, actions: Tensor, state: Tensor) -> Tensor:
        """[B, C, A] as the network says them to what the environment takes, in the state before this entry [B, P]."""
        return actions

    def demonstrated(self, actions: Tensor, state: Tensor) -> Tensor:
        """The inverse: what the network should say."""
        return actions


@dataclass(frozen=True, config=STRICT)
class TurnImages(Transform):
    """Pictures are turned by 180 degrees, as in LIBERO's training data, from what the simulator gives."""

    kind: Literal["turn_images"] = "turn_images"
    environment: ClassVar[Mapping[str, str]] = {"orientation": "stock"}

    def frames(self, frames: Tensor) -> Tensor:
        return frames.flip(1, 2)


@dataclass(frozen=True, config=STRICT)
class State(Transform):
    """The network's state has these numbers of the robot's, in this order."""

    take: tuple[Annotated[int, Field(ge=0)], ...]
    kind: Literal["state"] = "state"

    def spec(self, spec: PolicySpec) -> PolicySpec:
        if not self.take or max(self.take) >= spec.proprio_dim:
            raise PolicyError(
                f"the transform state takes some of the numbers 0 to {spec.proprio_dim - 1} of proprioception (which "
                f"'proprio' in policy.reads gives), got {list(self.take)}"
            )
        return replace(spec, proprio_dim=len(self.take))

    def state(self, state: Tensor) -> Tensor:
        return state[:, list(self.take)]


class Differences(Transform):
    """The network says some numbers of its actions as differences to the same numbers of the state."""

    def relative(self) -> list[int]:
        """Indices of the numbers that the network gives as differences."""
        raise NotImplementedError

    def executed(self, actions: Tensor, state: Tensor) -> Tensor:
        return actions + self._offset(actions, state)

    def demonstrated(self, actions: Tensor, state: Tensor) -> Tensor:
        return actions - self._offset(actions, state)

    def _offset(self, actions: Tensor, state: Tensor) -> Tensor:
        offset, numbers = torch.zeros_like(actions[:, :1]), self.relative()
        offset[:, 0, numbers] = state[:, numbers].to(offset.dtype)
        return offset


@dataclass(frozen=True, config=STRICT)
class DeltaActions(Differences):
    """The network predicts the first action dimensions relative to the corresponding state dimensions."""

    dims: Annotated[int, Field(ge=1)]
    kind: Literal["delta_actions"] = "delta_actions"

    def spec(self, spec: PolicySpec) -> PolicySpec:
        most = min(spec.action_dim, spec.proprio_dim)
        if self.dims > most:
            raise PolicyError(
                f"the transform delta_actions has dims of 1 to {most}, which state and actions both have; got "
                f"{self.dims}"
            )
        return spec

    def relative(self) -> list[int]:
        return list(range(self.dims))


@dataclass(frozen=True, config=STRICT)
class RelativeActions(Differences):
    """The network says these numbers of its actions as differences to the state's: those between others that are
    absolute, a first arm's gripper for example."""

    numbers: tuple[Annotated[int, Field(ge=0)], ...]
    kind: Literal["relative_actions"] = "relative_actions"

    def spec(self, spec: PolicySpec) -> PolicySpec:
        most = min(spec.action_dim, spec.proprio_dim)
        if not self.numbers or max(self.numbers) >= most or len(set(self.numbers)) < len(self.numbers):
            raise PolicyError(
                f"relative_actions takes some of the numbers 0 to {most - 1}, which state ({spec.proprio_dim}) and "
                f"actions ({spec.action_dim}) both have, each once; got {list(self.numbers)}. The state is read where "
                "'proprio' is in policy.reads"
            )
        return spec

    def relative(self) -> list[int]:
        return list(self.numbers)


@dataclass(frozen=True, config=STRICT)
class Gripper(Transform):
    """The network says 0 for closed and 1 for open, as an action's last number. `libero` takes -1 for open and 1 for
    closed, `maniskill` (and SimplerEnv's WidowX) 1 for open and -1 for closed; nothing between.

    Source: experiments/robot/robot_utils.py of openvla/openvla.
    """

    convention: Literal["libero", "maniskill"]
    kind: Literal["gripper"] = "gripper"
    environment: ClassVar[Mapping[str, str]] = {"gripper": "simulator"}

    def executed(self, actions: Tensor, state: Tensor) -> Tensor:
        said = actions[..., -1:]
        if self.convention == "libero":
            command = -torch.sign(2 * said - 1)
        else:
            command = 2 * (said > 0.5).to(actions.dtype) - 1
        return torch.cat([actions[..., :-1], command], -1)

    def demonstrated(self, actions: Tensor, state: Tensor) -> Tensor:
        """A command between the two ends, which the network cannot give, is the end that it leans to."""
        command = actions[..., -1:]
        is_open = command < 0 if self.convention == "libero" else command > 0
        return torch.cat([actions[..., :-1], is_open.to(actions.dtype)], -1)


Entry = TurnImages | State | DeltaActions | Gripper | RelativeActions
_READER: TypeAdapter[Entry] = TypeAdapter(Annotated[Entry, Field(discriminator="kind")])


class Transforms:
    """A list of them. It holds no tensor and moves none."""

    def __init__(self, said: Sequence[Any]) -> None:
        """`said` are mappings with a `kind`, as in a configuration. Raises `PolicyError` for what is none, and for a
        kind that is there twice: a convention is converted once."""
        self.entries = tuple(_read(place, entry) for place, entry in enumerate(said))
        kinds = [entry.kind for entry in self.entries]
        for kind in kinds:
            if kinds.count(kind) > 1:
                raise PolicyError(f"policy.options.transforms has {kind} {kinds.count(kind)} times: say it once")

    def has(self, kind: type[Transform]) -> bool:
        return any(isinstance(entry, kind) for entry in self.entries)

    def as_data(self) -> list[dict[str, Any]]:
        """The transform as JSON."""
        found = [asdict(entry) for entry in self.entries]
        return [{name: list(v) if isinstance(v, tuple) else v for name, v in entry.items()} for entry in found]

    def conventions(self) -> dict[str, tuple[str, str]]:
        """Settings of the environment that are converted: the transform's name, and the value it converts from."""
        return {
            setting: (f"transforms has {entry.kind}", wanted)
            for entry in self.entries
            for setting, wanted in entry.environment.items()
        }

    def spec(self, spec: PolicySpec) -> PolicySpec:
        """The sizes that the network is shown. Raises `PolicyError` where an entry does not fit."""
        for entry in self.entries:
            spec = entry.spec(spec)
        return spec

    def check_demonstrated_units(self) -> None:
        """Raise `PolicyError` where units cannot be those of demonstrated actions, one env step at a time."""
        for entry in self.entries:
            if isinstance(entry, Differences):
                raise PolicyError(
                    "units of demonstrations are of actions, not of a chunk's differences to the state: leave "
                    f"{entry.kind} out of transforms, or name the checkpoint's own statistics"
                )

    def frames(self, frames: Tensor) -> Tensor:
        """A camera's pictures uint8 [B, H, W, 3], as the network is shown them."""
        for entry in self.entries:
            frames = entry.frames(frames)
        return frames

    def state(self, state: Tensor) -> Tensor:
        """[B, P] to what the network is shown."""
        return self._states(state)[-1]

    def executed(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """[B, C, A] as the network says them, to the environment's, from observations with `state` [B, P]."""
        return self._through(actions, state, lambda entry: entry.executed, reverse=True)

    def demonstrated(self, actions: Tensor, state: Tensor | None) -> Tensor:
        """The inverse."""
        return self._through(actions, state, lambda entry: entry.demonstrated, reverse=False)

    def _through(
        self,
        actions: Tensor,
        state: Tensor | None,
        step: Callable[[Transform], Callable[[Tensor, Tensor], Tensor]],
        reverse: bool,
    ) -> Tensor:
        nothing = actions.new_zeros(len(actions), 0)
        pairs = list(zip(self.entries, self._states(nothing if state is None else state), strict=False))
        for entry, seen in reversed(pairs) if reverse else pairs:
            actions = step(entry)(actions, seen)
        return actions

    def _states(self, state: Tensor) -> list[Tensor]:
        """Before each entry, and after the last."""
        states = [state]
        for entry in self.entries:
            states.append(entry.state(states[-1]))
        return states


def _read(place: int, said: Any) -> Entry:
    try:
        return _READER.validate_python(said)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in found["loc"])
        raise PolicyError(
            f"policy.options.transforms, entry {place}: {where + ': ' if where else ''}{found['msg']}; got {said!r} "
            "(docs/adding-a-policy.md#conventions lists what there is)"
        ) from None
