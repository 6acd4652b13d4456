"""Recordings of ManiSkill, LIBERO and robomimic: HDF5 files with the actions and states of a simulator's episodes.

    ManiSkill (`RecordEpisode`)                     LIBERO (`collect_demonstration.py`, `create_dataset.py`), robomimic
      NAME.json     env_info, episodes                data               attributes: env_args, bddl_file_name ...
      NAME.h5                                           demo_0           attributes: model_file
        traj_0/actions        [n, A]                      actions        [n, A]
        traj_0/success        [n]                         states         [n, 1 + nq + nv] before each action
        traj_0/env_states/... [n + 1, ...]                rewards        [n] 0 or 1
                                                      mask/NAME          names of demonstrations

The files are data: nothing is unpickled, no link is followed out of the file, arrays are numbers of bounded size.
Recorded pictures are not read: they are drawn anew.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol

import h5py
import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ValidationError

from embodied.demonstrations.layout import DatasetError
from embodied.errors import nearest, shown
from sim_farm.client.episode_replay import Recording
from sim_farm.contract import EpisodeSpec, FarmError
from sim_farm.registry import resolve

Kind = Literal["maniskill", "libero", "robomimic"]
Reward = Literal["dense", "sparse"] | None

MOST_BYTES = 2**28
"""Bytes of one array of one episode."""
MOST_STEPS = 100_000
"""Env steps of one episode."""
MOST_TEXT = 2**26
"""Bytes of the JSON file, or of one attribute."""
MOST_EPISODES = 1_000_000
FAILURES = (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, OverflowError, MemoryError)
"""Exceptions that h5py raises for damaged files."""


class RecordingFile(Protocol):
    """The episodes of one recording, of one task and control mode."""

    path: Path
    format: str
    """Format's name in messages."""
    task: str
    """`<simulator>/<task>`"""
    control_mode: str
    reward: Reward
    tolerance: float
    """Deviation of a state (m, rad) below which an episode counts as reproduced, where the user names none."""
    goes_on: bool
    """True if an episode may depend on those before it in the file: the recorder's resets leave something behind."""
    episodes: tuple[str, ...]
    """Names of the episodes in their order."""
    absent: Mapping[str, str]
    """Names of episodes that cannot be replayed, with the reason."""
    subsets: Mapping[str, tuple[str, ...]]
    """Episodes by the name of the file's own selection (robomimic's filter keys)."""
    notes: tuple[str, ...]
    """Statements of the file that the import does not use, or treats differently."""

    def read(self, name: str) -> Recording:
        """One episode. Raises `DatasetError` where the file is damaged."""
        ...


def kind_of(path: Path) -> Kind | None:
    """Format of the file, by the groups in it; None for any other file. Raises nothing."""
    try:
        if not path.is_file() or not h5py.is_hdf5(path):
            return None
        with h5py.File(path, "r") as file:
            if "data" in file and _hard(file, "data", h5py.Group):
                attributes = file["data"].attrs
                if "bddl_file_name" in attributes:
                    return "libero"
                return "robomimic" if "env_args" in attributes else None
            names = list(file)
            ours = bool(names) and all(re.fullmatch(r"traj_\d+", name) for name in names)
            found = ours and any(_hard(file, name, h5py.Group) and "actions" in file[name] for name in names)
            return "maniskill" if found else None
    except FAILURES:
        return None


def open_recording(path: Path, task: str | None) -> RecordingFile:
    """The recording in the file; `task` in place of the one that it names. Raises `DatasetError` for a file that is
    damaged, or of a task, robot or controller that no simulator here has."""
    return ManiSkillFile(path, task) if kind_of(path) == "maniskill" else RobosuiteFile(path, task)


class _Reset(BaseModel):
    """Arguments of the reset before an episode."""

    seed: Any = None
    options: dict[str, Any] | None = None


class _Episode(BaseModel):
    """An entry of `episodes` in ManiSkill's JSON file."""

    episode_id: int
    episode_seed: int | None = None
    control_mode: str
    elapsed_steps: int | None = None
    reset_kwargs: _Reset = _Reset()

    @property
    def seed(self) -> object:
        """The seed of its environment. Of several environments that were reset at once each has its own."""
        given = self.reset_kwargs.seed if self.episode_seed is None else self.episode_seed
        return given[0] if isinstance(given, list) and len(given) == 1 else given


class _EnvInfo(BaseModel):
    env_id: str
    env_kwargs: dict[str, Any] = {}


class _Metadata(BaseModel):
    """ManiSkill's JSON file."""

    env_info: _EnvInfo
    episodes: list[_Episode]


HARMLESS = frozenset({
    "obs_mode", "control_mode", "render_mode", "reward_mode", "sim_backend", "render_backend", "num_envs",
    "sensor_configs", "human_render_camera_configs", "viewer_camera_configs", "shader_dir", "max_episode_steps",
    "reconfiguration_freq", "enhanced_determinism", "parallel_in_single_scene", "enable_shadow", "robot_uids",
})  # fmt: skip
"""Arguments of ManiSkill's environments that do not change what its physics does from a given state; the robot is
compared by the bodies of the state."""


class ManiSkillFile:
    """A file of ManiSkill's `RecordEpisode`, with its JSON file beside it."""

    format = "ManiSkill's trajectories"
    tolerance = 1e-3
    goes_on = True
    subsets: Mapping[str, tuple[str, ...]] = {}

    def __init__(self, path: Path, task: str | None) -> None:
        self.path = path
        about = path.with_suffix(".json")
        described = _read_json(about, path)
        self.task = task or f"maniskill/{described.env_info.env_id}"
        _check_task(path, self.task, "maniskill")
        self._entries = {f"traj_{entry.episode_id}": entry for entry in described.episodes}
        if len(self._entries) < len(described.episodes):
            raise DatasetError(f"{about} names an episode twice: merge the recordings with ManiSkill's own tool")
        modes = sorted({entry.control_mode for entry in described.episodes})
        if len(modes) != 1:
            raise DatasetError(
                f"{about} has episodes of {len(modes)} control modes "
                f"({_plain(', '.join(modes)) or 'no episode at all'}): a dataset has one; "
                "record or convert them with ManiSkill's replay_trajectory first"
            )
        self.control_mode = modes[0]
        kwargs = described.env_info.env_kwargs
        unknown = sorted(name for name, value in kwargs.items() if name not in HARMLESS and value not in (None, {}))
        if unknown:
            raise DatasetError(
                f"{about} was recorded with {_plain(unknown[0])}={shown(kwargs[unknown[0]])}, with which the task is "
                f"not simulated here; these may be given: {', '.join(sorted(HARMLESS))}"
            )
        self.reward: Literal["dense", "sparse"] | None = "sparse" if kwargs.get("reward_mode") == "sparse" else None
        with _opened(path) as file:
            groups = set(file)
        known = {name: entry for name, entry in self._entries.items() if name in groups}
        self.episodes: tuple[str, ...] = tuple(known)
        self.absent: Mapping[str, str] = {
            **{name: "the .h5 file has no such group" for name in self._entries if name not in groups},
            **{name: f"{about.name} has no entry of it" for name in sorted(groups - set(self._entries))},
        }
        gpu = str(kwargs.get("sim_backend", "")) not in ("", "auto", "cpu", "physx_cpu", "None")
        notes = ["recorded on another solver than PhysX's on the CPU: expect deviations"] * gpu
        self.notes: tuple[str, ...] = (*notes, "recorded observations and rewards are not copied: both are made anew")

    def read(self, name: str) -> Recording:
        entry = self._entries[name]
        options = entry.reset_kwargs.options or {}
        if unknown := sorted(set(options) - {"reconfigure"}):
            raise DatasetError(f"{self.path}: {name} was reset with the option {unknown[0]!r}, which is not known here")
        with _opened(self.path) as file:
            group = _group(self.path, file, name)
            actions = _actions(self.path, group)
            steps = len(actions)
            if entry.elapsed_steps not in (None, steps):
                raise DatasetError(
                    f"{self.path}: {name} has {steps} actions, its .json says {entry.elapsed_steps}: it is cut short"
                )
            success = np.full(steps, -1, np.int8)
            if "success" in group:
                success = _array(self.path, group, "success", (steps,)).astype(np.bool_).astype(np.int8)
            if "env_states" not in group:
                raise DatasetError(
                    f"{self.path}: {name} has no env_states, with which the replay is compared: record with "
                    "RecordEpisode's record_env_state=True, or let ManiSkill's replay_trajectory write them"
                )
            states = dict(_leaves(self.path, group, "env_states", steps + 1))
        seed = entry.seed
        if not isinstance(seed, int) or not 0 <= seed < 2**31:
            raise DatasetError(f"{self.path}: {name} was reset with the seed {shown(seed)}; known are 0 to 2**31 - 1")
        return Recording(
            spec=EpisodeSpec(seed),
            start={state: rows[0] for state, rows in states.items()},
            actions=actions,
            states={state: rows[1:] for state, rows in states.items()},
            success=success,
        )


class RobosuiteFile:
    """A file of LIBERO's or robomimic's layout, of one of LIBERO's tasks."""

    reward: Reward = "sparse"
    control_mode = "osc_pose"
    tolerance = 1e-2
    goes_on = False

    def __init__(self, path: Path, task: str | None) -> None:
        self.path = path
        with _opened(path) as file:
            data = _group(path, file, "data")
            described = _attributes(path, data)
            names = [name for name in data if _hard(data, name, h5py.Group)]
            self.subsets: Mapping[str, tuple[str, ...]] = _subsets(path, file)
        env_args = _json(path, "env_args", described.get("env_args", "{}"))
        kwargs = env_args.get("env_kwargs") or _json(path, "env_info", described.get("env_info", "{}"))
        if not isinstance(kwargs, dict):
            raise DatasetError(f"{path}: env_kwargs in its attributes is no table")
        bddl = described.get("bddl_file_name") or env_args.get("bddl_file") or kwargs.get("bddl_file_name")
        self.format = "LIBERO's demonstrations" if "bddl_file_name" in described else "robomimic's demonstrations"
        if bddl is None and task is None:
            raise DatasetError(
                f"{path} is robomimic's recording of {shown(env_args.get('env_name'))}, and names no .bddl "
                "file: of robomimic's recordings those of LIBERO's tasks are accepted; name the task with --task "
                "libero/SUITE/NUMBER"
            )
        self.task = task or task_of_bddl(path, str(bddl))
        _check_task(path, self.task, "libero")
        _check_robot(path, kwargs)
        unknown = [name for name in names if not re.fullmatch(r"demo_\d+", name)]
        if unknown:
            raise DatasetError(f"{path}: data/{shown(unknown[0])} is none of the demonstrations demo_0, demo_1 ...")
        self.episodes = tuple(sorted(names, key=lambda name: int(name.removeprefix("demo_"))))
        self.absent: Mapping[str, str] = {}
        self.notes: tuple[str, ...] = ("recorded observations are not copied: they are made anew",)
        content = described.get("bddl_file_content", "")
        if content.lstrip().startswith("(define") and not _same_task_file(self.task, content):
            self.notes += ("the recording's task file (bddl_file_content) differs from the installed LIBERO's",)

    def read(self, name: str) -> Recording:
        with _opened(self.path) as file:
            group = _group(self.path, _group(self.path, file, "data"), name)
            actions = _actions(self.path, group)
            steps = len(actions)
            states = _array(self.path, group, "states", (steps, -1)).astype(np.float64)
            solved = _array(self.path, group, "rewards", (steps,))[-1] > 0 if "rewards" in group else None
            model = _attributes(self.path, group).get("model_file")
        success = np.full(steps, -1, np.int8)
        if solved is not None:
            # LIBERO's script writes a reward of 1 at the last step alone, whenever the task was solved.
            success[-1] = solved
        from sim_farm.backends.libero.recordings import GRIP, MODEL, STATE

        start: dict[str, npt.NDArray[Any]] = {STATE: states[0], GRIP: actions[0, -1:].astype(np.float64)}
        if model is not None:
            start[MODEL] = np.frombuffer(model.encode(errors="replace"), np.uint8)
        return Recording(EpisodeSpec(0), start, actions, {STATE: states[1:]}, success)


def task_of_bddl(path: Path, bddl: str) -> str:
    """LIBERO's task whose file is called as `bddl`, in the suite whose folder it lies in, or in the only one that has
    it. Raises `DatasetError`."""
    from sim_farm.backends.libero.tasks import find_task, task_names

    parts = bddl.replace("\\", "/").split("/")
    folder, name = parts[-2] if len(parts) > 1 else "", parts[-1]
    tasks = {f"libero/{task}": find_task(f"libero/{task}") for task in task_names()}
    found = [known for known, task in tasks.items() if task.bddl.name == name]
    found = [known for known in found if tasks[known].suite == folder] or found
    if len(found) == 1:
        return found[0]
    if found:
        raise DatasetError(f"{path} is of {name}, which is the file of {', '.join(found)}: name one with --task")
    raise DatasetError(
        f"{path} is a recording of {shown(name)}, which is none of LIBERO's 130 tasks"
        f"{nearest(name, sorted({task.bddl.name for task in tasks.values()}))}"[:600]
    )


def _check_task(path: Path, task: str, simulator: str) -> None:
    if task.partition("/")[0].rpartition(":")[2] != simulator:  # also with a module that registers tasks of your own
        raise DatasetError(f"{path} is a recording of {simulator}'s, --task names {task}: name one of {simulator}/...")
    try:
        resolve(task)
    except FarmError as error:
        raise DatasetError(f"{path} is a recording of a task that is not here: {error}"[:1000]) from error


def _check_robot(path: Path, kwargs: Mapping[str, Any]) -> None:
    """Raise `DatasetError` for a robot, controller or control rate that LIBERO's tasks do not have here."""
    robots = kwargs.get("robots", ["Panda"])
    if robots not in ("Panda", ["Panda"]):
        raise DatasetError(f"{path} was recorded with the robots {shown(robots)}; LIBERO's tasks have Panda here")
    if kwargs.get("control_freq", 20) != 20:
        raise DatasetError(f"{path} was recorded at {shown(kwargs['control_freq'])} Hz; LIBERO's tasks run at 20 here")
    if kwargs.get("gripper_types", "default") not in ("default", "PandaGripper", ["default"], ["PandaGripper"]):
        raise DatasetError(f"{path} was recorded with the gripper {shown(kwargs['gripper_types'])}; here: PandaGripper")
    given = kwargs.get("controller_configs")
    if given is None:
        return
    given = given[0] if isinstance(given, list) and len(given) == 1 else given
    if not isinstance(given, dict):
        raise DatasetError(f"{path}: its controller_configs are {shown(given)}, and no table")
    from sim_farm.backends.libero.package import prepare

    prepare()
    import robosuite

    ours = robosuite.load_controller_config(default_controller="OSC_POSE")
    for key, value in given.items():
        if key in ours and not _same(value, ours[key]):
            raise DatasetError(
                f"{path} was recorded with the controller's {key} {shown(value)}; here it is {shown(ours[key])}"
            )


def _same(one: Any, other: Any) -> bool:
    """Equal, numbers and lists of the same number alike (robosuite widens what it is given)."""
    if one is None or other is None or isinstance(one, str | bool) or isinstance(other, str | bool):
        return bool(one == other)
    try:
        return bool((np.asarray(one, np.float64) == np.asarray(other, np.float64)).all())
    except (TypeError, ValueError):
        return False


def _same_task_file(task: str, content: str) -> bool:
    from sim_farm.backends.libero.tasks import find_task

    return find_task(task).bddl.read_text().split() == content.split()


def _subsets(path: Path, file: h5py.File) -> dict[str, tuple[str, ...]]:
    """robomimic's filter keys: names of demonstrations by the key's name."""
    if "mask" not in file:
        return {}
    found = {}
    group = _group(path, file, "mask")
    for key in group:
        names = _dataset(path, group, key)
        if names.ndim != 1 or names.size > MOST_EPISODES or names.dtype.kind not in "SO":
            raise DatasetError(f"{path}: mask/{_plain(key)} is no list of names")
        try:
            found[key] = tuple(text.decode() if isinstance(text, bytes) else str(text) for text in names[()].tolist())
        except FAILURES as error:
            raise _damaged(path, f"mask/{_plain(key)}", error) from error
    return found


def _read_json(about: Path, path: Path) -> _Metadata:
    if not about.is_file():
        raise DatasetError(
            f"{path} lacks {about.name} beside it, in which ManiSkill writes the task and the seeds: copy it there"
        )
    if about.stat().st_size > MOST_TEXT:
        raise DatasetError(f"{about} has more than {MOST_TEXT} bytes")
    try:
        return _Metadata.model_validate(json.loads(about.read_text()))
    except (OSError, ValueError, RecursionError) as error:  # ValidationError and JSONDecodeError are ValueErrors
        what = error.errors()[0] if isinstance(error, ValidationError) else None
        reason = f"{'.'.join(map(str, what['loc']))}: {what['msg']}" if what else error
        raise DatasetError(f"{about} is damaged, or not written by ManiSkill's RecordEpisode ({reason})") from error


def _json(path: Path, name: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{path}: its attribute {name} is no JSON ({error})") from error
    if not isinstance(value, dict):
        raise DatasetError(f"{path}: its attribute {name} is no table")
    return value


@contextmanager
def _opened(path: Path) -> Iterator[h5py.File]:
    """The file. What h5py raises for damage within the block is a `DatasetError`."""
    try:
        with h5py.File(path, "r") as file:
            yield file
    except FAILURES as error:
        raise _damaged(path, "it", error) from error


def _plain(name: str) -> str:
    """A name from the file as it can be printed, of no more than 200 characters."""
    return repr(name)[1:-1][:200]


def _damaged(path: Path, what: str, error: Exception) -> DatasetError:
    return DatasetError(f"{path} is damaged or cut short: {what} cannot be read ({str(error)[:200]}); copy it again")


def _hard(group: h5py.Group, name: str, kind: type) -> bool:
    """True if the member lies in the group itself, and not behind a link that may lead out of the file."""
    return isinstance(group.get(name, getlink=True), h5py.HardLink) and isinstance(group.get(name), kind)


def _group(path: Path, parent: h5py.Group, name: str) -> h5py.Group:
    if not _hard(parent, name, h5py.Group):
        where = parent.name.rstrip("/")
        raise DatasetError(f"{path} has no group {_plain(f'{where}/{name}')} (links are not followed)")
    return parent[name]


def _dataset(path: Path, group: h5py.Group, name: str) -> h5py.Dataset:
    """The dataset, whose numbers lie in this file."""
    if not _hard(group, name, h5py.Dataset):
        raise DatasetError(f"{path} has no dataset {_plain(f'{group.name}/{name}')} (links are not followed)")
    found = group[name]
    if found.is_virtual or found.external:
        raise DatasetError(f"{path}: {_plain(found.name)} lies in another file, which is not read: h5repack it")
    if found.shape is None:
        raise DatasetError(f"{path}: {_plain(found.name)} holds nothing")
    if found.size * found.dtype.itemsize > MOST_BYTES:
        raise DatasetError(f"{path}: {_plain(found.name)} has {found.size} elements, more than {MOST_BYTES} bytes")
    return found


def _array(path: Path, group: h5py.Group, name: str, shape: Sequence[int]) -> npt.NDArray[Any]:
    """The numbers of the dataset, finite, of that shape, in which -1 is any size."""
    found = _dataset(path, group, name)
    if found.dtype.kind not in "biuf":
        raise DatasetError(f"{path}: {_plain(found.name)} holds {found.dtype}, and no numbers")
    fits = len(found.shape) == len(shape)
    if not fits or any(want not in (-1, got) for want, got in zip(shape, found.shape, strict=True)):
        words = ", ".join("any" if size == -1 else str(size) for size in shape)
        raise DatasetError(f"{path}: {_plain(found.name)} has shape {list(found.shape)}, and [{words}] was expected")
    try:
        values = found[()]
    except FAILURES as error:
        raise _damaged(path, _plain(found.name), error) from error
    if values.dtype.kind == "f" and not np.isfinite(values).all():
        step = int(np.argwhere(~np.isfinite(values))[0][0])
        raise DatasetError(f"{path}: {_plain(found.name)} has a number that is not finite at step {step}")
    return values


def _actions(path: Path, group: h5py.Group) -> npt.NDArray[np.float32]:
    """[n, A], n at least 1; of several robots one after the other in the order of their names."""
    if _hard(group, "actions", h5py.Group):
        parts = [_array(path, group["actions"], name, (-1, -1)) for name in sorted(group["actions"])]
        if not parts or len({len(part) for part in parts}) != 1:
            raise DatasetError(f"{path}: the robots' actions in {group.name}/actions are not of one length")
        actions = np.concatenate(parts, axis=1)
    else:
        actions = _array(path, group, "actions", (-1, -1))
    if not 1 <= len(actions) <= MOST_STEPS or actions.shape[1] < 1:
        raise DatasetError(
            f"{path}: {group.name}/actions has shape {list(actions.shape)}; an episode has 1 to {MOST_STEPS} steps"
        )
    with np.errstate(over="ignore"):
        actions = actions.astype(np.float32)
    if not np.isfinite(actions).all():
        raise DatasetError(f"{path}: {group.name}/actions has numbers beyond those of float32")
    return actions


def _leaves(
    path: Path, group: h5py.Group, name: str, rows: int, prefix: str = "", depth: int = 0
) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """The arrays [rows, d] below `name`, by their names below it."""
    if depth == 0 and _hard(group, name, h5py.Dataset):
        raise DatasetError(
            f"{path}: {group[name].name} is one array, as ManiSkill 2 wrote it: record it anew with ManiSkill 3"
        )
    inner = _group(path, group, name)
    for key in inner:
        if _hard(inner, key, h5py.Group) and depth < 5:
            yield from _leaves(path, inner, key, rows, f"{prefix}{key}/", depth + 1)
        else:
            yield prefix + key, _array(path, inner, key, (rows, -1))


def _attributes(path: Path, group: h5py.Group) -> dict[str, str]:
    """The attributes that are texts."""
    found = {}
    for name in group.attrs:
        kind = group.attrs.get_id(name)
        if kind.get_storage_size() > MOST_TEXT:
            raise DatasetError(f"{path}: the attribute {shown(name)} has more than {MOST_TEXT} bytes")
        if kind.dtype.kind not in "SO":
            continue
        try:
            value = group.attrs[name]
        except FAILURES as error:
            raise _damaged(path, f"the attribute {shown(name)}", error) from error
        if isinstance(value, bytes):
            value = value.decode(errors="replace")
        if isinstance(value, str):
            found[name] = str(value)
    return found
