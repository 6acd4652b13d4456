"""What a rollout hands to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.contract import Inputs
from sim_farm.episodes import Episodes
from sim_farm.observations import FinalObservations, Observations


@dataclass(frozen=True)
class Trajectories:
    """T decisions of each of B environments. Row t * B + b of the flat tensors is decision t of environment b.

    Nothing in here depends on how many workers or stages produced it.
    """

    inputs: Inputs
    """T * B rows."""
    trace: Mapping[str, Tensor]
    """T * B rows each."""
    log_prob: Tensor
    """[T, B, C, A] under the policy that acted, per element."""
    value: Tensor
    """[T, B], or [T, B, C] of a policy with a value for each action of a chunk."""
    reward: Tensor
    """[T, B] summed over the executed steps of the chunk."""
    success: Tensor
    """[T, B] bool, the task was solved at a step of the chunk."""
    executed: Tensor
    """[T, B] int64, executed env steps of the chunk."""
    mask: Tensor
    """[T, B] bool, the decision was really taken."""
    terminated: Tensor
    truncated: Tensor
    """[T, B] bool, the decision ended its episode."""
    final_value: Tensor
    """[T, B] value of the ended episode's own final observation (of the first action there); zero elsewhere."""
    last_value: Tensor
    """[B] value of the observation after the last decision (of the first action there)."""
    version: int
    """Number of updates the acting policy had seen."""
    group: Tensor | None = None
    """[B] int64, where row t is decision t of each environment's one episode: the group that the episode belongs to.
    None: rows are the decisions of a rollout, in which episodes end and others begin."""
    step_reward: Tensor | None = None
    """[T, B, C] of each env step, zero beyond the executed ones; what credit for single actions needs."""

    @property
    def env_steps(self) -> int:
        return int(self.executed[self.mask].sum())


def to_inputs(
    seen: Observations | FinalObservations,
    reads: Sequence[str],
    episodes: Episodes | None = None,
    cameras: Sequence[str] = (),
) -> Inputs:
    """What of the observations a policy is shown; tensors share the observations' memory.

    `episodes` names the episodes of a farm, for policies that read them; `cameras` are the policy's names for the
    farm's cameras, in order, where they are not the farm's own.
    """
    names = cameras or tuple(seen.frames)
    return Inputs(
        state=torch.from_numpy(seen.state) if "state" in reads else None,
        proprio=torch.from_numpy(seen.proprio) if "proprio" in reads else None,
        frames={k: torch.from_numpy(v) for k, v in zip(names, seen.frames.values(), strict=True)}
        if "images" in reads
        else {},
        instruction=seen.instruction if "instruction" in reads else (),
        episode=_names(seen, episodes) if "episode" in reads and episodes is not None else None,
    )


def _names(seen: Observations | FinalObservations, episodes: Episodes) -> Tensor:
    """[B, 3] of `Inputs.episode`; zeros for the last observation of an episode, after which nothing is decided."""
    names = torch.zeros(len(seen.state), 3, dtype=torch.int64)
    if isinstance(seen, Observations):
        for row, (env, episode, step) in enumerate(
            zip(seen.envs.tolist(), seen.episode.tolist(), seen.episode_step.tolist(), strict=True)
        ):
            spec = episodes.spec(env, episode)
            if spec is not None:
                initial = -1 if spec.init_state is None else spec.init_state
                names[row] = torch.tensor([spec.seed, initial, step])
    return names


def join_inputs(parts: Sequence[Inputs], order: Tensor) -> Inputs:
    """The rows of `parts`, one after the other, rearranged so that new row i is old row `order[i]`."""
    first = parts[0]
    whole = replace(
        first,
        state=None if first.state is None else torch.cat([p.state for p in parts if p.state is not None]),
        proprio=None if first.proprio is None else torch.cat([p.proprio for p in parts if p.proprio is not None]),
        frames={name: torch.cat([p.frames[name] for p in parts]) for name in first.frames},
        instruction=tuple(text for p in parts for text in p.instruction),
        episode=None if first.episode is None else torch.cat([p.episode for p in parts if p.episode is not None]),
    )
    return whole.rows(order)
