"""Checkpoints: complete or absent.

    checkpoints/
      000120/
        manifest.json              sha256 of every other file; written last
        policy/                    config.json, model.safetensors (or the community's own layout)
        value_head.safetensors
        optimizer.safetensors      the optimiser's tensors, by parameter name
        average/                   where optim.ema keeps an average of the weights: the policy with it, and state.json
        optimizer/                 instead of that, where ranks hold shards: what each of them has written
        state.json                 iteration, counters, configuration of the policy
        environments.safetensors   each environment's episode and its executed actions
      latest                       text: the newest one's name, for people and scripts; this project does not read it
      best                         text: the name of the best by evaluations during training, where there were any
      000140.damaged/              a checkpoint that a resumed run found damaged and skipped
      .000140.partial/             a checkpoint that is being written
      .000140.replaced/            the checkpoint that it replaces; whole, and put back if the replacement failed

A checkpoint is written aside and renamed, so that a crash leaves none or a whole one. Before a tensor of it
is read, every file is compared with the manifest; what is read is checked before any of it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import reprlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import load_file, save_file

import policies
from embodied.errors import CheckpointError as CheckpointError
from embodied.errors import nearest, unreadable
from embodied.files import read_json, sync, write_whole
from policies.contract import Policy, PolicyError
from policies.files import check_finite, layout

LATEST, BEST = "latest", "best"
SHARDS = "optimizer"
"""The folder that several ranks write instead of `optimizer.safetensors`."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Adam's state of each parameter, beside its steps."""
AVERAGE = "average"
"""Exponential moving average of a parameter, in the optimiser's state where one is kept; and the folder of a checkpoint
with the policy that has these weights."""
MASTER = "master."
"""Begins the name of a parameter's float32 copy, where ranks that hold shards train it in 16 bits."""
REAL = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
UNREADABLE = (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError)
"""Exceptions that readers of safetensors raise for files that are damaged or not known."""
Arrays = dict[str, np.ndarray]


@runtime_checkable
class PacksMoments(Protocol):
    """An optimiser that stores its moments in fewer bits than a checkpoint does."""

    def moment(self, parameter: torch.Tensor, key: str) -> torch.Tensor:
        """The moment `key` of a parameter, in its type."""
        ...

    def pack(self) -> None:
        """Store the moments of all parameters, which are as a checkpoint has them, in fewer bits."""
        ...


@dataclass(frozen=True)
class OptimizerState:
    """State of Adam, by the parameters' names."""

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
            for key in kept(state):
                tensor = state[key]
                if isinstance(optimizer, PacksMoments) and key in MOMENTS:
                    tensor = optimizer.moment(parameter, key)
                found.tensors[f"{key}.{name}"] = tensor.detach()
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
        keys = (*MOMENTS, AVERAGE) if self.averages else MOMENTS
        known = {f"{key}.{name}" for name in self.steps for key in keys}
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

    @property
    def averages(self) -> dict[str, torch.Tensor]:
        """The average of each parameter by its name; empty where none is kept."""
        begin = f"{AVERAGE}."
        return {name.removeprefix(begin): tensor for name, tensor in self.tensors.items() if name.startswith(begin)}

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


def kept(state: Mapping[str, Any]) -> tuple[str, ...]:
    """The tensors of a parameter's state in the optimiser that a checkpoint has, beside its steps."""
    return tuple(key for key in (*MOMENTS, AVERAGE) if key in state)


def write(root: Path, state: RunState, policy: Policy, optimizer: torch.optim.Optimizer, environments: Arrays) -> Path:
    """Write the checkpoint of `state.iteration` below `root` and make it the latest. Returns its folder."""
    return write_state(root, state, policy, OptimizerState.of(policy, optimizer), environments)


def write_state(root: Path, state: RunState, policy: Policy, optimizer: OptimizerState, environments: Arrays) -> Path:
    """`write` with what is known of the optimiser. Raises `CheckpointError`; then nothing is left of it."""
    partial = begin(root, state)
    try:
        with writing(root, state):
            write_run(partial, state, policy, optimizer.steps, environments, optimizer.averages)
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


def write_run(
    partial: Path,
    state: RunState,
    policy: Policy,
    steps: Mapping[str, float],
    environments: Arrays,
    averages: Mapping[str, torch.Tensor],
) -> None:
    """Write all but the optimiser's tensors, whose `steps` and `averages`, by the parameters' names, are known."""
    policies.save(policy, partial)
    arrays = {key: np.ascontiguousarray(array) for key, array in environments.items()}
    save_numpy(arrays, partial / "environments.safetensors")
    write_state_file(partial, state, steps)
    if averages:
        with _averaged(policy, averages):
            policies.save(policy, partial / AVERAGE)
        write_state_file(partial / AVERAGE, state, {})
        write_manifest(partial / AVERAGE)


@contextmanager
def _averaged(policy: Policy, averages: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """A block in which the policy's parameters of these names have the averages as values."""
    parameters = {name: p for name, p in policy.named_parameters() if name in averages}
    raw = {name: parameter.data for name, parameter in parameters.items()}
    for name, parameter in parameters.items():
        parameter.data = averages[name].to(parameter.device, parameter.dtype)
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data = raw[name]


def write_optimizer(partial: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write the optimiser's tensors as one process that has all of them."""
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, partial / "optimizer.safetensors")


def partial_folder(root: Path, state: RunState) -> Path:
    """Folder that `begin` writes."""
    return root / f".{state.iteration:06d}.partial"


def complete(partial: Path) -> Path:
    """Make a completely written checkpoint the latest. Returns its folder.

    A checkpoint of the same name, written before a resume, stays whole until the new one replaces it.
    """
    root, name = partial.parent, partial.name.split(".")[1]
    final, replaced = root / name, root / f".{name}.replaced"
    write_manifest(partial)
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
    """The best checkpoint below `root`, where evaluations during training have chosen one. It is not verified."""
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
        reasons = "; ".join(str(error) for error in damages.values())
        raise CheckpointError(
            f"no checkpoint of {root} is whole: {reasons}. Restore one from a copy; or remove the folder {root} to "
            "begin anew (the metrics so far are kept aside); or choose another --name"
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
    """Saved states of the environments. The farm, which takes them, checks that they are of this run."""
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
                **{
                    key: found.tensors[f"{key}.{name}"].to(parameter.device, copy=True)
                    for key in (*MOMENTS, AVERAGE)
                    if f"{key}.{name}" in found.tensors
                },
            }


def _names(policy: Policy) -> dict[int, str]:
    return {id(parameter): name for name, parameter in policy.named_parameters()}


def discard(root: Path, state: RunState) -> None:
    """Remove what was written of a checkpoint that could not be completed."""
    shutil.rmtree(partial_folder(root, state), ignore_errors=True)


def _mark_latest(root: Path, name: str) -> None:
    with suppress(OSError):  # the checkpoint itself is there: this is for people and scripts
        write_whole(root / LATEST, name + "\n")


# --- What besides weights a run needs to go on: `state.json` of a checkpoint, checked before any of it is used.


FILE = "state.json"
STAGES = ("rl", "sft")
MOST_COUNT = 2**53
"""Counts above it are nothing that was counted; up to it they are exact as floats too."""
MOST_NUMBER = 1e100
"""Its square is still a number."""


@dataclass(frozen=True)
class RunState:
    """State of a run, beside weights, from which it resumes."""

    iteration: int
    """Iterations done."""
    env_steps: int
    wall_s: float
    recent_success: tuple[bool, ...]
    """Outcome of the last training episodes, oldest first."""
    stage: str = "rl"
    """Source of the training data: simulation (`rl`) or demonstrations (`sft`, whose iterations are optimiser
    steps)."""
    controls: Mapping[str, float] = field(default_factory=dict)
    """Running statistics of returns (`embodied.algorithms.controls`)."""
    recent_return: tuple[float, ...] = ()
    """Return of the last training episodes, oldest first."""


def write_state_file(folder: Path, state: RunState, steps: Mapping[str, float]) -> None:
    """Write the state, and the optimiser's steps by the parameters' names, into a checkpoint that is begun."""
    data = {**state.__dict__, "recent_success": list(state.recent_success), "optimizer": {"step": dict(steps)}}
    (folder / FILE).write_text(json.dumps(data, indent=1))


def read_state_file(folder: Path) -> tuple[RunState, dict[str, float]]:
    """The state and the optimiser's steps. Raises `CheckpointError` where they are nothing that was written."""
    path = folder / FILE
    try:
        return _parsed(read_json(path))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _parsed(data: Any) -> tuple[RunState, dict[str, float]]:
    data = _mapping("it", data)
    required = ["iteration", "env_steps", "wall_s", "recent_success", "optimizer"]
    for key in required:
        if key not in data:
            raise ValueError(f"{key} is missing")
    known = [*required, "recent_return", "stage", "controls"]
    for key in data:
        if key not in known:
            raise ValueError(f"unknown key {key[:80]!r}{nearest(key[:80], known)}")
    recent, stage = data["recent_success"], data.get("stage", "rl")
    if not isinstance(recent, list) or not all(isinstance(one, bool) for one in recent):
        raise ValueError("recent_success must be a list of true and false")
    returns = data.get("recent_return", [])
    if not isinstance(returns, list):
        raise ValueError("recent_return must be a list of numbers")
    if stage not in STAGES:
        raise ValueError(f"stage must be {' or '.join(STAGES)}, not {_shown(stage)}")
    steps = _mapping("optimizer.step", _mapping("optimizer", data["optimizer"]).get("step"))
    controls = _mapping("controls", data.get("controls", {}))
    state = RunState(
        iteration=_count("iteration", data["iteration"]),
        env_steps=_count("env_steps", data["env_steps"]),
        wall_s=_number("wall_s", data["wall_s"], 0.0),
        recent_success=tuple(recent),
        recent_return=tuple(_number("recent_return", one) for one in returns),
        stage=stage,
        controls={name: _number(f"controls.{name}", number) for name, number in controls.items()},
    )
    return state, {name: float(_count(f"optimizer.step of {name}", step)) for name, step in steps.items()}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {_shown(value)}")
    return value


def _number(name: str, value: Any, least: float = -MOST_NUMBER) -> float:
    # In this order: an integer may be larger than a float can be.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_NUMBER:
        raise ValueError(f"{name} must be a finite number{' from 0 on' if least == 0 else ''}, not {_shown(value)}")
    return float(value)


def _count(name: str, value: Any) -> int:
    number = _number(name, value, 0.0)
    if number > MOST_COUNT or number != math.floor(number):
        raise ValueError(f"{name} must be a whole number up to {MOST_COUNT}, not {_shown(value)}")
    return int(value)


def _shown(value: Any) -> str:
    return reprlib.repr(value)


# --- A folder's manifest: the sha256 of every file in it. A folder whose files are not exactly these is refused.


MANIFEST = "manifest.json"
MOST_MANIFEST_BYTES = 4 * 2**20
"""Size limit of a manifest: tens of thousands of files."""
_DIGEST = re.compile("[0-9a-f]{64}")


def write_manifest(folder: Path) -> None:
    """Write the manifest of what is in the folder, and have all of it on the disk."""
    (folder / MANIFEST).write_text(json.dumps(_hashes(folder), indent=1))
    for path in (*folder.rglob("*"), folder):
        sync(path)


def verify(folder: Path) -> None:
    """Raise `CheckpointError` unless the files are there, are what was written, and there is nothing beside them."""
    if not folder.exists():
        raise CheckpointError(absent(folder))
    expected = _listed(folder)
    try:
        wrong = _unlisted(folder, expected) or _damaged(folder, expected)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read ({error}); use an earlier one") from error
    if wrong:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {wrong}; use an earlier one")


def absent(folder: Path) -> str:
    """Message on a checkpoint's folder that is not there, with the nearest ones that are."""
    there = [str(one) for one in reversed(_newest_first(folder.parent))]
    number = int(folder.name) if folder.name.isdecimal() else None
    if number is not None:
        there.sort(key=lambda one: abs(int(Path(one).name) - number))
    several = f": {', '.join(there[:3])} {'is' if len(there) == 1 else 'are'} there" if there else ""
    none = f", and none beside it in {folder.parent}: name its folder, runs/NAME/checkpoints/NNNNNN"
    return f"there is no checkpoint {folder}{several or none}"


def digest(folder: Path) -> str:
    """sha256 of the manifest, which has the digest of every other file of the checkpoint."""
    return hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()


def _unlisted(folder: Path, expected: Mapping[str, str]) -> str:
    """Readers look at folders and at names that are there: none may be there that was not written."""
    folders = {str(parent) for name in expected for parent in PurePosixPath(name).parents}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not (name in expected or name == MANIFEST or (name in folders and path.is_dir())):
            return f"{name} is not in its {MANIFEST}, so it was put there later"
    return ""


def _damaged(folder: Path, expected: Mapping[str, str]) -> str:
    for name, digest in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _hash(folder / name) != digest:
            return f"{name} is not what was written"
    return ""


def _listed(folder: Path) -> Mapping[str, str]:
    """The manifest's entries: files below the folder."""
    try:
        listed = read_json(folder / MANIFEST, MOST_MANIFEST_BYTES)
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists no files")
        for name, digest in listed.items():
            _check_listed(name, digest)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); use an earlier one"
        ) from error
    return listed


def _check_listed(name: str, digest: Any) -> None:
    """Raise `ValueError` for what is no file below the folder, or no sha256."""
    path = PurePosixPath(name)
    below = not path.is_absolute() and bool(path.parts) and ".." not in path.parts
    if not below or str(path) != name or not name.isprintable() or name == MANIFEST:
        raise ValueError(f"{name[:80]!r} is no name of a file in the folder")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name[:80]!r} has no sha256")


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {str(p.relative_to(folder)): _hash(p) for p in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:  # piece by piece: a file may be larger than the memory
        return hashlib.file_digest(file, "sha256").hexdigest()
