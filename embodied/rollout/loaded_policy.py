"""A trained policy to act with, outside of a simulator farm: observations as NumPy arrays in, action chunks out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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
        uint8 [H, W, 3] or [B, H, W, 3] (row 0 at the top, as env.orientation has them), `instruction` a text or B.
        `seed`: draw the action from the policy's distribution; None: its mode. Raises `UserError` for an observation
        that lacks something, or has it in another shape.
        """
        inputs, batched = self.inputs(observation)
        noise = None if seed is None else _noise(seed, rows_of(inputs), self.policy.noise_dim)
        with torch.no_grad():
            chunk = decide(self.policy, inputs, noise).chunk.numpy()
        return chunk if batched else chunk[0]

    def inputs(self, observation: Mapping[str, Any]) -> tuple[Inputs, bool]:
        """The observation of `act` as a batch, and whether it was one. Raises `UserError` as `act` does."""
        spec, batched = self.spec, set[bool]()

        def array(name: str, value: Any, shapes: Sequence[tuple[int, ...]], kind: type) -> Tensor:
            found = _numbers(name, value, kind)
            shape = next((s for s in shapes if found.shape in (s, (*found.shape[:1], *s))), None)
            if shape is None:
                raise UserError(f"{name} has the shape {found.shape}: the policy reads {shapes[0]}, or a batch of such")
            batched.add(found.shape != shape)
            return torch.from_numpy(found.reshape(-1, *shape))

        vectors = {
            name: array(name, _part(observation, name), [(size,)], np.float32)
            for name, size in (("state", spec.state_dim), ("proprio", spec.proprio_dim))
            if size
        }
        frames = {
            name: array(
                f"images[{name!r}]",
                _part(_part(observation, "images"), name),
                [(side, side, 3) for side in sorted(self.image_sizes, key=spec.image_size.__ne__)],
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
