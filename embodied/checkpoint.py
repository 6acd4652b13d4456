"""Checkpoints: complete or absent.

    checkpoints/
      000120/
        manifest.json              sha256 of every other file; written last
        policy/                    config.json, model.safetensors (or the community's own layout)
        value_head.safetensors
        optimizer.safetensors      the optimiser's tensors, by parameter name
        optimizer/                 instead of that, where ranks hold shards: what each of them has written
        state.json                 iteration, counters, configuration of the policy
        environments.safetensors   each environment's episode and its executed actions
      latest                       text: the newest one's name, for people and scripts; nothing here reads it
      best                         text: the name of the best by evaluations during training, where there were any
      000140.damaged/              what a resumed run found damaged and did not go on from

A checkpoint is written aside and renamed, so that a crash leaves none or a whole one. Before a tensor of it
is read, every file is compared with the manifest.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

import policies
from embodied.errors import UserError
from policies.contract import Policy

MANIFEST = "manifest.json"
BEST = "best"
SHARDS = "optimizer"
"""The folder that several ranks write instead of `optimizer.safetensors`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter, beside its steps."""
Arrays = dict[str, np.ndarray]


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, or of something else."""


@dataclass(frozen=True)
class RunState:
    """What besides weights a run needs to go on."""

    iteration: int
    """Iterations done."""
    env_steps: int
    wall_s: float
    recent_success: tuple[bool, ...]
    """Outcome of the last training episodes, oldest first."""
    stage: str = "rl"
    """What was learned from: simulation (`rl`) or demonstrations (`sft`, whose iterations are optimiser steps)."""
    controls: Mapping[str, float] = field(default_factory=dict)
    """What has adapted itself from update to update (`embodied.algorithms.controls`)."""


@dataclass(frozen=True)
class OptimizerState:
    """What Adam knows, by the parameters' names."""

    tensors: dict[str, torch.Tensor]
    """`exp_avg.NAME` and the like; those of an optimiser themselves, those of a checkpoint on the CPU."""
    steps: dict[str, float]

    @classmethod
    def of(cls, policy: Policy, optimizer: torch.optim.Optimizer) -> OptimizerState:
        names = _names(policy)
        found = cls({}, {})
        for parameter, state in optimizer.state.items():
            name = names[id(parameter)]
            found.steps[name] = float(state["step"])
            for key in MOMENTS:
                found.tensors[f"{key}.{name}"] = state[key].detach()
        return found

    @classmethod
    def read(cls, folder: Path) -> OptimizerState:
        """From a verified checkpoint."""
        steps = read_steps(folder)
        if (shards := folder / SHARDS).is_dir():
            from embodied import optimizer_shards  # takes a second, and only ranks write shards

            return cls(optimizer_shards.read(shards), steps)
        return cls(load_file(folder / "optimizer.safetensors"), steps)


def write(root: Path, state: RunState, policy: Policy, optimizer: torch.optim.Optimizer, environments: Arrays) -> Path:
    """Write the checkpoint of `state.iteration` below `root` and make it the latest. Returns its folder."""
    return write_state(root, state, policy, OptimizerState.of(policy, optimizer), environments)


def write_state(root: Path, state: RunState, policy: Policy, optimizer: OptimizerState, environments: Arrays) -> Path:
    """`write` with what is known of the optimiser."""
    partial = begin(root, state)
    with writing(root, state):
        write_run(partial, state, policy, optimizer.steps, environments)
        write_optimizer(partial, optimizer.tensors)
        return complete(partial)


def begin(root: Path, state: RunState) -> Path:
    """An empty folder aside for a checkpoint's files; `complete` makes them count. Raises `CheckpointError`."""
    partial = partial_folder(root, state)
    with writing(root, state):
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    return partial


def write_run(partial: Path, state: RunState, policy: Policy, steps: Mapping[str, float], environments: Arrays) -> None:
    """Write all but the optimiser's tensors, whose `steps` are known."""
    policies.save(policy, partial)
    arrays = {key: np.ascontiguousarray(array) for key, array in environments.items()}
    save_numpy(arrays, partial / "environments.safetensors")
    data = {**state.__dict__, "recent_success": list(state.recent_success), "optimizer": {"step": dict(steps)}}
    (partial / "state.json").write_text(json.dumps(data, indent=1))


def write_optimizer(partial: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the optimiser's tensors as one process that has all of them."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / "optimizer.safetensors")


def partial_folder(root: Path, state: RunState) -> Path:
    """Where `begin` writes."""
    return root / f".{state.iteration:06d}.partial"


def complete(partial: Path) -> Path:
    """Make a checkpoint of which every file has been written the latest. Returns its folder."""
    root, name = partial.parent, partial.name.split(".")[1]
    final = root / name
    (partial / MANIFEST).write_text(json.dumps(_hashes(partial), indent=1))
    _flush(partial)
    if final.exists():  # written again after a resume; it stays whole until the new one is there
        replaced = root / f".{name}.replaced"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
    else:
        partial.rename(final)
    _point(root, name)
    return final


@contextmanager
def writing(root: Path, state: RunState) -> Iterator[None]:
    """Raise `CheckpointError`, which names the checkpoint, where a file cannot be written within."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports a full disk by an error of its own
        raise CheckpointError(
            f"cannot write the checkpoint {root / f'{state.iteration:06d}'}: {error}. Earlier checkpoints are untouched"
        ) from error


def keep_newest(root: Path, count: int) -> None:
    """Remove all but the newest checkpoints and the best. What was found damaged stays."""
    kept = best(root)
    for folder in _newest_first(root)[count:]:
        if folder == kept:
            continue
        # Renamed first: a half-removed folder would be taken for a damaged checkpoint.
        gone = root / f".{folder.name}.replaced"
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def mark_best(root: Path, folder: Path | None) -> None:
    """Make a checkpoint below `root` the best; None: there is none."""
    if folder is None:
        (root / BEST).unlink(missing_ok=True)
    else:
        _point(root, folder.name, BEST)


def best(root: Path) -> Path | None:
    """The best checkpoint below `root`, where evaluations during training have told one. It is not verified."""
    try:
        folder = root / (root / BEST).read_text().strip()
    except (OSError, ValueError):  # ValueError: not even text
        return None
    return folder if folder in _newest_first(root) else None


def latest(root: Path) -> Path | None:
    """The newest checkpoint below `root`, or None. It is not verified."""
    folders = _newest_first(root)
    return folders[0] if folders else None


def recover(root: Path) -> tuple[Path | None, list[CheckpointError]]:
    """The newest checkpoint below `root` that is whole, or None, and what is wrong with each newer one.

    The damaged newer ones are renamed NAME.damaged, so that `latest` is the one that was found. The caller owns the
    run. Raises `CheckpointError`, and changes nothing, if there are checkpoints and none of them is whole.
    """
    damages: dict[Path, CheckpointError] = {}
    for folder in _newest_first(root):
        try:
            verify(folder)
        except CheckpointError as error:
            damages[folder] = error
            continue
        for damaged in damages:
            aside = damaged.with_name(f"{damaged.name}.damaged")
            shutil.rmtree(aside, ignore_errors=True)
            damaged.rename(aside)
        _point(root, folder.name)
        return folder, list(damages.values())
    if damages:
        said = "; ".join(str(error) for error in damages.values())
        raise CheckpointError(
            f"no checkpoint of {root} is whole: {said}. Restore one from a copy; or remove the folder {root} to begin "
            "anew (the metrics so far are kept aside); or choose another --name"
        )
    return None, []


def _newest_first(root: Path) -> list[Path]:
    """Checkpoints' folders, whole or damaged; without those that are being written or were set aside."""
    folders = [path for path in root.glob("[0-9]*") if path.name.isdecimal() and path.is_dir()]
    return sorted(folders, key=lambda path: int(path.name), reverse=True)


def verify(folder: Path) -> None:
    """Raise `CheckpointError` unless every file is there and is what was written."""
    try:
        expected = json.loads((folder / MANIFEST).read_text())
        if not isinstance(expected, dict) or not expected:
            raise ValueError("it lists no files")
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error})"
        ) from error
    found = _hashes(folder)
    for name, digest in expected.items():
        if name not in found:
            raise CheckpointError(f"the checkpoint {folder} is damaged: {name} is missing; use an earlier one")
        if found[name] != digest:
            raise CheckpointError(
                f"the checkpoint {folder} is damaged: {name} is not what was written; use an earlier one"
            )


def read_state(folder: Path) -> RunState:
    """The run's counters. The checkpoint must have been verified."""
    data = json.loads((folder / "state.json").read_text())
    data.pop("optimizer")
    return RunState(**{**data, "recent_success": tuple(data["recent_success"])})


def read_steps(folder: Path) -> dict[str, float]:
    """The optimiser's step counts, by parameter name."""
    steps: dict[str, float] = json.loads((folder / "state.json").read_text())["optimizer"]["step"]
    return steps


def read_environments(folder: Path) -> dict[str, np.ndarray]:
    return load_numpy(folder / "environments.safetensors")


def load_weights(folder: Path, policy: Policy) -> None:
    """Into a policy of the same kind and sizes; anything else is refused."""
    policies.load_into(policy, folder)


def load_optimizer(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's tensors and step counts."""
    found = OptimizerState.read(folder)
    names = _names(policy)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in found.steps:
                continue
            optimizer.state[parameter] = {
                "step": torch.tensor(float(found.steps[name])).to(parameter.device),
                **{key: found.tensors[f"{key}.{name}"].to(parameter.device, copy=True) for key in MOMENTS},
            }


def _names(policy: Policy) -> dict[int, str]:
    return {id(parameter): name for name, parameter in policy.named_parameters()}


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    return {str(p.relative_to(folder)): _hash(p) for p in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:  # piece by piece: a file may be larger than the memory
        return hashlib.file_digest(file, "sha256").hexdigest()


def _flush(folder: Path) -> None:
    """Have the files on the disk before the rename makes them count."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def discard(root: Path, state: RunState) -> None:
    """Remove what was written of a checkpoint that could not be completed."""
    shutil.rmtree(partial_folder(root, state), ignore_errors=True)


def _point(root: Path, name: str, pointer: str = "latest") -> None:
    aside = root / f".{pointer}.partial"
    aside.write_text(name + "\n")
    aside.replace(root / pointer)
