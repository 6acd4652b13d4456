"""Recorded action sequences, played again: the policy that does what was done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.files import read_tensors
from policies.policy_kind import PolicyFormat, PolicyKind

FORMAT = {"actions": (3, torch.float32), "lengths": (1, torch.int64), "episodes": (2, torch.int64)}
"""Dimensions and dtype of a recording's tensors."""


def save_recording(
    path: str | Path, episodes: Sequence[tuple[int, int | None]], actions: Sequence[npt.NDArray[np.float32]]
) -> None:
    """Write N episodes of one task as safetensors, to be played by the policy `replay`.

    `episodes` are their seeds and initial states (None: none), `actions` what was executed, [T_i, A] each. The
    file holds `actions` float32 [N, T, A], zero beyond an episode's end, `lengths` int64 [N], and `episodes` int64
    [N, 2] with -1 for no initial state. Raises `PolicyError` if the episodes are not distinct.
    """
    lengths = torch.tensor([len(sequence) for sequence in actions])
    padded = nn.utils.rnn.pad_sequence([torch.tensor(np.asarray(sequence, np.float32)) for sequence in actions], True)
    keys = torch.tensor([(seed, -1 if initial is None else initial) for seed, initial in episodes])
    tensors = {"actions": padded, "lengths": lengths, "episodes": keys}
    _check(tensors, Path(path))
    save_file(tensors, path)


class Replay(Policy):
    """Plays a file of `save_recording`. Reads `episode` alone: the seed, the initial state and the env step say
    which action is due.

    After an episode's end it rests: zeros, and where there are more than three dimensions the last one, the
    gripper's, stays as it was. Every log-prob and value is zero; there is nothing to train. What `policies.save`
    keeps of it is the recording's path.
    """

    kind = "replay"

    def __init__(self, spec: PolicySpec, *, recording: str = "") -> None:
        """`recording` is the file's path. Raises `PolicyError` if it is damaged, or of another action size."""
        super().__init__()
        if not recording:
            raise PolicyError("a replay needs the file that it plays: set policy.options.recording to its path")
        self.spec = spec
        self.noise_dim = 0
        self.value_head = nn.Identity()
        self.path = Path(recording).resolve()
        tensors = _read(self.path)
        self.actions, self.lengths = tensors["actions"], tensors["lengths"]
        if self.actions.shape[2] != spec.action_dim:
            raise PolicyError(
                f"{self.path} holds actions of {self.actions.shape[2]} dimensions, the task takes {spec.action_dim}: "
                "it was recorded in another task or control mode"
            )
        self._rows = {(int(seed), int(initial)): row for row, (seed, initial) in enumerate(tensors["episodes"])}

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        episode = _episode(inputs)
        chunks = [self._chunk(seed, initial, step) for seed, initial, step in episode.tolist()]
        chunk = torch.stack(chunks).to(episode.device)
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(len(_episode(inputs)), device=_episode(inputs).device)

    def architecture(self) -> dict[str, Any]:
        return {"recording": str(self.path)}

    def _chunk(self, seed: int, initial: int, step: int) -> Tensor:
        """[C, A]: the recorded actions from `step` on."""
        chunk = torch.zeros(self.spec.chunk, self.spec.action_dim)
        row = self._rows.get((seed, initial))
        if row is None:
            # Environments that rest are named by zeros.
            if (seed, initial, step) == (0, 0, 0):
                return chunk
            which = f"seed {seed}" + ("" if initial < 0 else f" and initial state {initial}")
            raise PolicyError(
                f"{self.path} has no episode of {which}; it has {len(self._rows)} others, such as (seed, initial "
                f"state) {next(iter(self._rows))}: evaluate with the seed and the episodes of the recording"
            )
        length = int(self.lengths[row])
        if self.spec.action_dim > 3:
            chunk[:, -1] = self.actions[row, length - 1, -1]
        due = self.actions[row, step : min(step + self.spec.chunk, length)]
        chunk[: len(due)] = due
        return chunk


class Recording(PolicyFormat):
    """The path of a recording, which the policy is all of."""

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        path = Path(str(architecture.get("recording", "")))
        if not path.is_file():
            raise PolicyError(f"no recording here: set policy.options.recording to a file, got {str(path)!r}")


REPLAY = PolicyKind(Replay, format=Recording(), trainable=False)


def _episode(inputs: Inputs) -> Tensor:
    if inputs.episode is None:
        raise PolicyError("a replay finds its actions by the episode: add 'episode' to policy.reads")
    return inputs.episode


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise PolicyError(f"no recording here: {path} is missing")
    tensors = read_tensors(path)
    _check(tensors, path)
    return tensors


def _check(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Raises `PolicyError` unless the tensors are a recording."""
    for name, (dimensions, dtype) in FORMAT.items():
        found = tensors.get(name)
        if found is None or found.dim() != dimensions or found.dtype != dtype:
            what = "nothing" if found is None else f"{found.dtype} {list(found.shape)}"
            raise PolicyError(f"{path} is no recording: {name} must be {dtype} of {dimensions} dimensions, got {what}")
    lengths, episodes = tensors["lengths"], tensors["episodes"]
    count, longest, _ = tensors["actions"].shape
    if episodes.shape != (count, 2) or lengths.shape != (count,):
        raise PolicyError(f"{path} is no recording: actions, lengths and episodes are of different numbers of episodes")
    if count and (int(lengths.min()) < 1 or int(lengths.max()) > longest):
        raise PolicyError(f"{path} is no recording: lengths must be from 1 to {longest}")
    if len(episodes.unique(dim=0)) < count:
        raise PolicyError(f"{path}: two episodes have the same seed and initial state; keep one of them")
