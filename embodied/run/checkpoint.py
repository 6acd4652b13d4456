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
      .000140.partial/             what is being written
      .000140.replaced/            what that takes the place of; whole, and put back where that did not happen

A checkpoint is written aside and renamed, so that a crash leaves none or a whole one. Before a tensor of it
is read, every file is compared with the manifest; what is read is checked before any of it is used.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

import policies
from embodied.errors import CheckpointError as CheckpointError
from embodied.errors import unreadable
from embodied.files import sync, write_whole
from embodied.run import manifest
from embodied.run.manifest import MANIFEST as MANIFEST
from embodied.run.manifest import verify as verify
from embodied.run.state import RunState as RunState
from embodied.run.state import read_state_file, write_state_file
from policies.contract import Policy, PolicyError
from policies.files import check_finite, layout

LATEST, BEST = "latest", "best"
SHARDS = "optimizer"
"""The folder that several ranks write instead of `optimizer.safetensors`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""What Adam keeps of each parameter, beside its steps."""
MASTER = "master."
"""Begins the name of a parameter's float32 copy, where ranks that hold shards train it in 16 bits."""
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError)
"""What readers of safetensors raise for a file that is none, or holds what they do not know."""
Arrays = dict[str, np.ndarray]


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
        """From a verified checkpoint. Raises `CheckpointError` for numbers that no optimiser has."""
        steps, path = read_steps(folder), folder / "optimizer.safetensors"
        if (shards := folder / SHARDS).is_dir():
            from embodied.run import optimizer_shards

            found = cls(optimizer_shards.read(shards), steps)
            found._check(shards)
            return found
        try:
            found = cls(load_file(path), steps)
        except UNREADABLE as error:
            raise unreadable(path, error) from error
        found._check(path)
        return found

    def _check(self, path: Path) -> None:
        known = {f"{key}.{name}" for name in self.steps for key in MOMENTS}
        found = {name for name in self.tensors if not name.startswith(MASTER)}
        if known != found:
            name = min(known ^ found)
            raise unreadable(path, f"{name} is {'in state.json alone' if name in known else 'not in state.json'}")
        for name, tensor in self.tensors.items():
            if tensor.dtype not in REAL:
                raise unreadable(path, f"{name} holds {tensor.dtype}, and no real numbers")
        try:
            check_finite(path, self.tensors)
        except PolicyError as error:
            raise CheckpointError(str(error)) from error
        for name, tensor in self.tensors.items():
            if name.startswith(f"{MOMENTS[1]}.") and (tensor < 0).any():
                raise unreadable(path, f"{name} is a mean of squares and holds negative numbers")

    def check_fits(self, folder: Path, parameters: Mapping[str, torch.Tensor]) -> None:
        """Raise `CheckpointError` unless it is of a policy with these parameters, by name, shape and type."""
        for name in self.steps:
            if name not in parameters:
                raise unreadable(folder, f"its optimiser knows {name!r}, and this run's policy has no such parameter")
        for name, tensor in self.tensors.items():
            own = parameters.get(name.partition(".")[2])
            if own is None:
                raise unreadable(folder, f"the optimiser's {name!r} is of no parameter of this run's policy")
            if own.shape != tensor.shape or tensor.dtype not in (own.dtype, torch.float32):
                raise unreadable(folder, f"the optimiser's {name!r} is {layout(tensor)}, the parameter {layout(own)}")


def write(root: Path, state: RunState, policy: Policy, optimizer: torch.optim.Optimizer, environments: Arrays) -> Path:
    """Write the checkpoint of `state.iteration` below `root` and make it the latest. Returns its folder."""
    return write_state(root, state, policy, OptimizerState.of(policy, optimizer), environments)


def write_state(root: Path, state: RunState, policy: Policy, optimizer: OptimizerState, environments: Arrays) -> Path:
    """`write` with what is known of the optimiser. Raises `CheckpointError`; then nothing is left of it."""
    partial = begin(root, state)
    try:
        with writing(root, state):
            write_run(partial, state, policy, optimizer.steps, environments)
            write_optimizer(partial, optimizer.tensors)
            return complete(partial)
    except BaseException:
        discard(root, state)
        raise


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
    write_state_file(partial, state, steps)


def write_optimizer(partial: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the optimiser's tensors as one process that has all of them."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / "optimizer.safetensors")


def partial_folder(root: Path, state: RunState) -> Path:
    """Where `begin` writes."""
    return root / f".{state.iteration:06d}.partial"


def complete(partial: Path) -> Path:
    """Make a checkpoint of which every file has been written the latest. Returns its folder.

    One of the same name, written before a resume, stays whole until the new one is there.
    """
    root, name = partial.parent, partial.name.split(".")[1]
    final, replaced = root / name, root / f".{name}.replaced"
    manifest.write(partial)
    if final.exists():
        _remove(replaced)
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        _bring_back(root)
        raise
    sync(root)
    _remove(replaced)
    _mark_latest(root, name)
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
        if folder != kept:
            with suppress(OSError):  # the next time, then
                _remove(folder)


def _remove(folder: Path) -> None:
    """Renamed first: a half-removed folder would be taken for a damaged checkpoint."""
    if folder.exists():
        gone = folder.with_name(f".{folder.name.strip('.').partition('.')[0]}.removed")
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _bring_back(root: Path) -> None:
    """Give a checkpoint its place again that was to be replaced, if it came no further, and take away what was left
    half written and half removed."""
    for replaced in root.glob(".[0-9]*.replaced"):
        final = root / replaced.name.split(".")[1]
        if not final.exists():
            replaced.rename(final)
    for ending in ("replaced", "partial", "removed"):
        for left in root.glob(f".[0-9]*.{ending}"):
            shutil.rmtree(left, ignore_errors=True)


def mark_best(root: Path, folder: Path | None) -> None:
    """Make a checkpoint below `root` the best; None: there is none."""
    if folder is None:
        (root / BEST).unlink(missing_ok=True)
    else:
        write_whole(root / BEST, folder.name + "\n")


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

    The damaged newer ones are renamed NAME.damaged, so that `latest` is the one that was found. One that a crash kept
    from being replaced counts again. The caller owns the run. Raises `CheckpointError`, and changes nothing else, if
    there are checkpoints and none of them is whole.
    """
    _bring_back(root)
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
        _mark_latest(root, folder.name)
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


def read_state(folder: Path) -> RunState:
    """The run's counters. The checkpoint must have been verified."""
    return read_state_file(folder)[0]


def read_steps(folder: Path) -> dict[str, float]:
    """The optimiser's step counts, by parameter name."""
    return read_state_file(folder)[1]


def read_environments(folder: Path) -> Arrays:
    """Where the environments were. Whether they are of this run the farm knows, which takes them."""
    path = folder / "environments.safetensors"
    try:
        return load_numpy(path)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def load_weights(folder: Path, policy: Policy) -> None:
    """Into a policy of the same kind and sizes; anything else is refused."""
    policies.load_into(policy, folder)


def load_optimizer(folder: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """The optimiser's tensors and step counts; of another policy they are refused, and nothing is changed."""
    found = OptimizerState.read(folder)
    found.check_fits(folder, dict(policy.named_parameters()))
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


def discard(root: Path, state: RunState) -> None:
    """Remove what was written of a checkpoint that could not be completed."""
    shutil.rmtree(partial_folder(root, state), ignore_errors=True)


def _mark_latest(root: Path, name: str) -> None:
    with suppress(OSError):  # the checkpoint itself is there: this is for people and scripts
        write_whole(root / LATEST, name + "\n")
