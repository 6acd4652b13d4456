"""A trained policy to act with, outside of a simulator farm: observations as NumPy arrays in, action chunks out."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

import policies
from embodied.config.schema import Config
from embodied.devices import decide, find_device, settle
from embodied.errors import UserError, shown
from embodied.workflows.conventions import check_checkpoint
from policies.capabilities import ResizesFrames
from policies.contract import Inputs, Policy, PolicySpec


@dataclass(frozen=True)
class LoadedPolicy:
    """The policy of a run's checkpoint."""

    policy: Policy
    config: Config
    """Configuration of the run."""
    checkpoint: Path | None
    """None: a policy that was trained elsewhere, as the configuration names it."""

    @property
    def spec(self) -> PolicySpec:
        """The sizes of what the policy reads and returns."""
        return self.policy.spec

    @property
    def image_sizes(self) -> set[int]:
        """Sides in pixels of the pictures that it reads: the environment's, and the network's own."""
        own = {self.policy.network_image_size} if isinstance(self.policy, ResizesFrames) else set[int]()
        return {self.spec.image_size} | own

    def act(self, observation: Mapping[str, Any], *, seed: int | None = None) -> npt.NDArray[np.float32]:
        """Action chunk float32 [C, A] for one observation, [B, C, A] for a batch, in the environment's units.

        `observation` has what `policy.reads` names: `state` [S] or [B, S], `proprio` [P] or [B, P], `images` by camera
        uint8 [H, W, 3] or [B, H, W, 3] (row 0 at the top, as env.orientation has them), `instruction` a text or B. For
        a policy that decides on K > 1 observations the arrays have an axis K, the oldest first: [K, S] or [B, K, S];
        `begin_episode` makes them of single observations. `seed`: draw the action from the policy's distribution; None:
        its mode. Raises `UserError` for an observation that lacks something, or has it in another shape.
        """
        inputs, batched = self.inputs(observation)
        chunk = self.chunks(inputs, seed)
        return chunk if batched else chunk[0]

    def begin_episode(self) -> ObservedEpisode:
        """An episode before its first observation."""
        return ObservedEpisode(self)

    def chunks(self, inputs: Inputs, seed: int | None) -> npt.NDArray[np.float32]:
        """Action chunks [B, C, A] for inputs, drawn by the seed; None: the mode."""
        noise = None if seed is None else _noise(seed, rows_of(inputs), self.policy.noise_dim)
        with torch.no_grad():
            return decide(self.policy, inputs, noise).chunk.numpy()

    def inputs(self, observation: Mapping[str, Any], *, observations: int | None = None) -> tuple[Inputs, bool]:
        """The observation of `act` as a batch, and whether it was one. Raises `UserError` as `act` does.

        `observations`: number of observations in it; None: as many as the policy decides on.
        """
        spec, batched = self.spec, set[bool]()
        count = spec.observations if observations is None else observations
        several = () if count == 1 else (count,)
        apart = f"{spec.distance} env step{'s' if spec.distance > 1 else ''} apart"
        history = f" ({count} observations, {apart}, the oldest first)" if several else ""

        def array(name: str, value: Any, shapes: Sequence[tuple[int, ...]], kind: type) -> Tensor:
            found = _numbers(name, value, kind)
            shape = next((s for s in shapes if found.shape in (s, (*found.shape[:1], *s))), None)
            if shape is None:
                raise UserError(
                    f"{name} has the shape {found.shape}: the policy reads {shapes[0]}{history}, or a batch of such"
                )
            batched.add(found.shape != shape)
            return torch.from_numpy(found.reshape(-1, *shape))

        vectors = {
            name: array(name, _part(observation, name), [(*several, size)], np.float32)
            for name, size in (("state", spec.state_dim), ("proprio", spec.proprio_dim))
            if size
        }
        frames = {
            name: array(
                f"images[{name!r}]",
                _part(_part(observation, "images"), name),
                [(*several, side, side, 3) for side in sorted(self.image_sizes, key=spec.image_size.__ne__)],
                np.uint8,
            )
            for name in spec.cameras
        }
        if len(batched) > 1:
            raise UserError("some parts of the observation are a batch and others are not: give all of them rows")
        one = not next(iter(batched), False)
        texts: tuple[str, ...] = ()
        if "instruction" in self.config.policy.reads:
            said = _part(observation, "instruction")
            texts = (said,) if isinstance(said, str) else tuple(said) if isinstance(said, (list, tuple)) else ()
            if not texts or not all(isinstance(text, str) for text in texts):
                raise UserError(f"instruction is a text, or a list of them; got {shown(said)}")
        inputs = Inputs(vectors.get("state"), vectors.get("proprio"), frames, texts)
        lengths = {len(part) for part in (*vectors.values(), *frames.values(), *([texts] if texts else []))}
        if len(lengths) != 1:
            raise UserError(f"the parts of the observation have {' and '.join(map(str, sorted(lengths)))} rows")
        return inputs, not one


class ObservedEpisode:
    """The observations of an episode so far, as a loaded policy decides on them.

        episode = loaded.begin_episode()
        episode.observe(observation)     # of the reset, and of each env step
        actions = episode.act()          # [C, A], whenever a decision is due

    The first observation of the episode stands for those before its beginning.
    """

    def __init__(self, loaded: LoadedPolicy) -> None:
        self._loaded = loaded
        self._seen: deque[Inputs] = deque(maxlen=1 + loaded.spec.distance * (loaded.spec.observations - 1))
        """The latest observations, one for each env step; the first of a short episode is among them."""

    @property
    def begun(self) -> bool:
        """True if something was observed."""
        return bool(self._seen)

    def observe(self, observation: Mapping[str, Any]) -> None:
        """Add the observation of the next env step, as `LoadedPolicy.act` takes it, but for the axis K. Raises
        `UserError`, and adds nothing, for one that the policy does not read."""
        inputs, batched = self._loaded.inputs(observation, observations=1)
        if batched:
            raise UserError("an episode is observed one env step at a time: begin an episode for each row of a batch")
        self._seen.append(inputs)

    def act(self, *, seed: int | None = None) -> npt.NDArray[np.float32]:
        """Action chunk float32 [C, A] for what was observed last; `seed` as in `LoadedPolicy.act`."""
        return self._loaded.chunks(self.inputs(), seed)[0]

    def inputs(self) -> Inputs:
        """The inputs of a decision now, a batch of one. Raises `UserError` if nothing was observed."""
        spec, last = self._loaded.spec, len(self._seen) - 1
        if last < 0:
            raise UserError("nothing was observed of this episode: its first observation comes before a decision")
        if spec.observations == 1:
            return self._seen[-1]
        back = [spec.distance * k for k in reversed(range(spec.observations))]
        found = [self._seen[max(last - steps, 0)] for steps in back]

        def joined(part: Callable[[Inputs], Tensor | None]) -> Tensor | None:
            """[1, K, ...]."""
            tensors = [tensor for one in found if (tensor := part(one)) is not None]
            return torch.stack(tensors, 1) if tensors else None

        frames = {name: torch.stack([one.frames[name] for one in found], 1) for name in spec.cameras}
        return Inputs(joined(lambda one: one.state), joined(lambda one: one.proprio), frames, found[-1].instruction)


def load_policy(run: str | Path, checkpoint: str | Path | None = None, code: Collection[str] = ()) -> LoadedPolicy:
    """The policy that a run ends with (the best of its evaluations, else the newest), or that of another checkpoint.

    `code`: what the run's configuration may name as `package.module:NAME`. Raises `UserError` or `PolicyError`.
    """
    from embodied.run.folder import whole_checkpoint
    from embodied.run.saved_settings import find_run, settings_of

    config = settings_of(str(run), Path("runs"), code)
    folder = whole_checkpoint(find_run(str(run), Path("runs")), None if checkpoint is None else Path(checkpoint))
    if folder is None:
        raise UserError(f"{run} is a configuration, and has no checkpoint: train it first, or name a checkpoint")
    check_checkpoint(folder, config, f"name the run of {folder}")
    # The kind of the configuration was allowed with it.
    policy = policies.load(folder, code=[config.policy.kind])
    return LoadedPolicy(settle(policy, find_device(config.policy.device)), config, folder)


def _numbers(name: str, value: Any, kind: type) -> npt.NDArray[Any]:
    """A copy of the numbers. Raises `UserError` for others, and for pictures that are not of bytes."""
    try:
        found = np.array(value)
        if found.dtype.kind not in "biuf" or (kind is np.uint8 and found.dtype != np.uint8):
            raise ValueError(f"the dtype {found.dtype}")
        if found.dtype.kind == "f" and not np.isfinite(found).all():
            raise ValueError("a number that is not finite")
        return found.astype(kind, order="C", copy=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"{name} is {kind.__name__} for the policy, got {str(error)[:200]}") from error


def _part(observation: Any, name: str) -> Any:
    if not isinstance(observation, Mapping) or name not in observation:
        has = shown(sorted(observation)) if isinstance(observation, Mapping) else type(observation).__name__
        raise UserError(f"the observation lacks {name!r}, which the policy reads; it has {has}")
    return observation[name]


def rows_of(inputs: Inputs) -> int:
    """B."""
    for part in (inputs.state, inputs.proprio, *inputs.frames.values()):
        if part is not None:
            return len(part)
    return len(inputs.instruction)


def _noise(seed: int, rows: int, size: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, size), np.float32))
