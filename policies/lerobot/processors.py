"""The processors of a LeRobot directory: what they do to observations and actions, step by step.

    policy_preprocessor.json     rename, relative actions, normalise, words
    policy_postprocessor.json    unnormalise, absolute actions

Every step is applied, or refused by name: one that is left out would change what the network reads or says. Sources:
lerobot/processor/*.py and lerobot/policies/pi0*/processor_pi0*.py of 0.4.0 to 0.6.1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, Field

from policies.contract import PolicyError
from policies.files import CONFIG, checked, read_json, shown, write_json
from policies.units import Mode

PRE, POST = "policy_preprocessor.json", "policy_postprocessor.json"
STATE, ACTION = "observation.state", "action"

Text = Annotated[str, Field(max_length=1000)]

FeatureType = Literal["STATE", "VISUAL", "ENV", "ACTION", "REWARD", "LANGUAGE"]
"""LeRobot's kinds of features, by which they are normalised (lerobot/configs/types.py)."""


class _Step(BaseModel, extra="forbid"):
    """A step's parameters. LeRobot's own constructors refuse others too."""


class Feature(BaseModel, extra="ignore"):
    """A feature as config.json and normalisers have it."""

    type: FeatureType
    shape: list[Annotated[int, Field(ge=0, le=2**20)]]


class _Rename(_Step):
    rename_map: dict[Text, Text] = {}


class _Device(_Step):
    device: Text | None = "cpu"
    float_dtype: Literal["float32", "float"] | None = None


class Normaliser(_Step):
    """A step that normalises or unnormalises."""

    eps: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1e-8
    features: dict[Text, Feature] = {}
    norm_map: dict[FeatureType, Mode] = {}
    normalize_observation_keys: list[Text] | None = None

    def mode_of(self, key: str) -> Mode:
        """Normalisation mode of a feature: actions always by their kind, observations if the step has them."""
        if key == ACTION:
            return self.norm_map.get("ACTION", "IDENTITY")
        feature, only = self.features.get(key), self.normalize_observation_keys
        if feature is None or feature.type == "ACTION" or (only is not None and key not in only):
            return "IDENTITY"
        return self.norm_map.get(feature.type, "IDENTITY")


class Relative(_Step):
    """Actions of a chunk are differences to the state at its beginning, but for those of excluded joints."""

    enabled: bool = False
    exclude_joints: list[Any] = []
    action_names: list[Any] | None = None

    def dims(self, action_dim: int) -> tuple[int, ...]:
        """Numbers of an action that are relative. A joint is excluded whose name has the excluded one in it, in
        letters of either case; without names none is, and numbers beyond the names are relative."""
        excluded = [str(name).lower() for name in self.exclude_joints if name]
        names = [str(name).lower() for name in self.action_names or []]
        kept = {i for i, name in enumerate(names) if any(token in name for token in excluded)}
        return tuple(i for i in range(action_dim) if i not in kept)


class _Absolute(_Step):
    enabled: bool = False


class StateWords(_Step):
    """pi0.5's prompt with a state in it."""

    max_state_dim: Annotated[int, Field(ge=1, le=2**20)] = 32
    task_key: Literal["task"] = "task"
    include_state_in_prompt: Literal[True] = True


class Tokenizer(_Step):
    """Tokens that fill up are masked, and positions count the others: on which side they are does not matter."""

    tokenizer_name: Text | None = None
    max_length: Annotated[int, Field(ge=1, le=2**20)] = 512
    task_key: Literal["task"] = "task"
    padding_side: Literal["left", "right"] = "right"
    padding: Literal["max_length", "longest"] | bool = "max_length"
    truncation: bool = True


class _Crop(_Step):
    """Cuts and resizes pictures; only one that does neither is known."""

    crop_params_dict: Annotated[dict[str, Any], Field(max_length=0)] | None = None
    resize_size: None = None


class _Nothing(_Step):
    """No parameters."""


class _Squeeze(_Step):
    squeeze_batch_dim: bool = True


SHARED: Mapping[str, type[_Step]] = {
    "device_processor": _Device,
    "to_batch_processor": _Nothing,
    "to_batch_processor_action": _Nothing,
    "to_batch_processor_observation": _Nothing,
    "to_batch_processor_complementary_data": _Nothing,
}
KNOWN: Mapping[str, Mapping[str, type[_Step]]] = {
    PRE: {
        **SHARED,
        "rename_observations_processor": _Rename,
        "observation_processor": _Nothing,  # a gym environment's keys and layout of pictures to LeRobot's
        "image_crop_resize_processor": _Crop,
        "relative_actions_processor": Relative,
        "delta_actions_processor": Relative,  # its name in 0.5.1
        "normalizer_processor": Normaliser,
        "pi0_new_line_processor": _Nothing,
        "smolvla_new_line_processor": _Nothing,
        "pi05_prepare_state_tokenizer_processor_step": StateWords,
        "tokenizer_processor": Tokenizer,
    },
    POST: {
        **SHARED,
        "unnormalizer_processor": Normaliser,
        "absolute_actions_processor": _Absolute,
        "torch2numpy_action_processor": _Squeeze,
        "numpy2torch_action_processor": _Nothing,
    },
}
ORDERS: Sequence[tuple[type[_Step], type[_Step]]] = (
    (_Rename, Relative),
    (_Rename, Normaliser),
    (Relative, Normaliser),
    (Normaliser, StateWords),
    (StateWords, Tokenizer),
    (Normaliser, _Absolute),
)
"""Pairs of steps in which the second reads the first one's result: actions are relative to raw states."""
S = TypeVar("S", bound=_Step)


@dataclass(frozen=True)
class Step:
    """One entry of a processor."""

    path: Path
    place: int
    name: str
    config: _Step
    state_file: Path | None

    def __str__(self) -> str:
        return f"{self.path}, step {self.place} ({self.name})"


@dataclass(frozen=True)
class Processors:
    """Steps of both processors of a directory."""

    folder: Path
    steps: Mapping[str, Sequence[Step]] = field(repr=False)
    """Steps by file."""

    def one(self, file: str, kind: type[S]) -> tuple[Step, S] | None:
        """The step of this kind, and its parameters."""
        return next(((s, s.config) for s in self.steps[file] if isinstance(s.config, kind)), None)

    def needed(self, file: str, name: str, kind: type[S]) -> tuple[Step, S]:
        """The same. Raises `PolicyError` where it is missing."""
        found = self.one(file, kind)
        if found is None:
            raise PolicyError(
                f"{self.folder / file} has no step {name}: it is of no trained policy; take the processors that were "
                "saved with it"
            )
        return found

    @property
    def state_files(self) -> set[Path]:
        """Files that steps name."""
        return {step.state_file for steps in self.steps.values() for step in steps if step.state_file is not None}

    @property
    def prompt_length(self) -> int:
        """Tokens to which prompts are filled up."""
        return self.needed(PRE, "tokenizer_processor", Tokenizer)[1].max_length

    def relative_dims(self, action_dim: int) -> tuple[int, ...]:
        """Numbers of an action that are relative to the state."""
        found = self.one(PRE, Relative)
        return found[1].dims(action_dim) if found is not None and found[1].enabled else ()

    @property
    def unmatched_joints(self) -> tuple[str, ...]:
        """Joints that the step of relative actions excludes, and that no name of an action has in it."""
        found = self.one(PRE, Relative)
        if found is None or not found[1].enabled:
            return ()
        names = [str(name).lower() for name in found[1].action_names or []]
        joints = [str(joint) for joint in found[1].exclude_joints if joint]
        return tuple(joint for joint in joints if not any(joint.lower() in name for name in names))

    @property
    def rename_map(self) -> Mapping[str, str]:
        """The policy's names of observations that have others."""
        found = self.one(PRE, _Rename)
        return {} if found is None else found[1].rename_map

    def renamed(self, key: str) -> str:
        """The policy's name of an observation."""
        return self.rename_map.get(key, key)


def read_processors(folder: Path, raw: Mapping[str, Any]) -> Processors:
    """Both files' steps, of a directory whose config.json is `raw`. Raises `PolicyError` for a step that is not applied
    here, for steps that contradict each other, and where config.json says something else."""
    for file in (PRE, POST):
        if not (folder / file).is_file():
            raise PolicyError(
                f"incomplete checkpoint: {folder / file} is missing, which says how numbers are normalised. "
                "Checkpoints of LeRobot 0.3 have that among their weights: convert them with LeRobot's "
                "processor/migrate_policy_normalization.py"
            )
    found = Processors(folder, {file: _steps(folder / file) for file in (PRE, POST)})
    for steps in found.steps.values():
        _check_order(steps)
    _check_relative(found, raw)
    found.needed(PRE, "normalizer_processor", Normaliser)
    found.needed(POST, "unnormalizer_processor", Normaliser)
    _check_length(found, raw)
    _check_renamed(found)
    return found


def check_modes(
    found: Processors, raw: Mapping[str, Any], kinds: Sequence[FeatureType] = ("VISUAL", "STATE", "ACTION")
) -> None:
    """Raise `PolicyError` unless actions are normalised as they are unnormalised, and config.json says so too. Only
    features of these kinds are compared."""
    before = found.needed(PRE, "normalizer_processor", Normaliser)
    after = found.needed(POST, "unnormalizer_processor", Normaliser)
    said = raw.get("normalization_mapping")
    config = found.folder / CONFIG
    if said is not None and not isinstance(said, dict):
        raise PolicyError(f"{config}: normalization_mapping is {shown(said)} in place of an object")
    for kind in kinds:
        modes = {f"{step}": one.norm_map.get(kind, "IDENTITY") for step, one in (before, after)}
        if kind != "ACTION":  # the other step reads none
            modes = dict([next(iter(modes.items()))])
        if said is not None:
            modes[str(config)] = said.get(kind, "IDENTITY")
        if len({str(mode) for mode in modes.values()}) > 1:
            raise PolicyError(
                f"{kind} is normalised in several ways: "
                + "; ".join(f"{shown(mode)} in {where}" for where, mode in modes.items())
                + ": make them say how the policy was trained"
            )


def _steps(path: Path) -> list[Step]:
    raw = read_json(path)
    entries = raw.get("steps")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise PolicyError(f"{path}: steps is {shown(entries)} in place of a list of objects")
    strange = sorted(set(raw) - {"name", "steps"})
    if strange:
        raise PolicyError(f"{path} has {shown(strange)} beside name and steps: take it out if nothing depends on it")
    return [_step(path, place, entry) for place, entry in enumerate(entries)]


def _step(path: Path, place: int, entry: Mapping[str, Any]) -> Step:
    name, said = entry.get("registry_name", entry.get("class")), entry.get("config") or {}
    known = KNOWN[path.name]
    if not isinstance(name, str) or name not in known:
        raise PolicyError(
            f"{path}, step {place}: {shown(name)} with {shown(said, 300)} is not applied here; known are "
            f"{', '.join(sorted(known))}. Where the task gives already what the step makes, take it out of the file; "
            "else convert the policy with LeRobot to one without it"
        )
    strange = sorted(set(entry) - {"registry_name", "class", "config", "state_file", "artifacts"})
    if strange or not isinstance(said, dict):
        raise PolicyError(f"{path}, step {place} ({name}) is {shown(dict(entry), 300)}, which no LeRobot writes")
    try:
        config = checked(path, known[name], said)
    except PolicyError as error:
        raise PolicyError(
            f"{path}, step {place}: {name} with {shown(said, 300)} is not applied here: "
            f"{str(error).removeprefix(f'{path} ')}"
        ) from None
    step = Step(path, place, name, config, _state_file(path, place, entry.get("state_file")))
    if step.state_file is not None and not isinstance(config, Normaliser):
        raise PolicyError(f"{step} has a state in {step.state_file.name}, which nothing here reads")
    return step


def _state_file(path: Path, place: int, name: Any) -> Path | None:
    if name is None:
        return None
    # A processor is outside data: it must not lead out of its folder.
    if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors") or "\0" in name:
        raise PolicyError(f"{path}, step {place}: state_file {shown(name)} is no safetensors file beside it")
    return path.parent / name


def _check_order(steps: Sequence[Step]) -> None:
    """Raise `PolicyError` where a step is there twice, or before one whose results it reads."""
    for before, after in ORDERS:
        first, second = ([step for step in steps if isinstance(step.config, kind)] for kind in (before, after))
        for twice in (first, second):
            if len(twice) > 1:
                raise PolicyError(f"{twice[1]}: there is one already, {twice[0].name} at step {twice[0].place}")
        if first and second and first[0].place > second[0].place and _does_something(first[0].config):
            raise PolicyError(f"{first[0]} comes after {second[0].name}, which reads what it makes: have it before")


def _does_something(config: _Step) -> bool:
    if isinstance(config, _Rename):
        return bool(config.rename_map)
    return config.enabled if isinstance(config, Relative) else True


def _check_relative(found: Processors, raw: Mapping[str, Any]) -> None:
    """Both ways are switched on, or neither, and config.json says so too."""
    before, after = found.one(PRE, Relative), found.one(POST, _Absolute)
    there = before[1] if before is not None else Relative()
    back = after is not None and after[1].enabled
    if there.enabled != back:
        ways = ("relative", "absolute") if there.enabled else ("absolute", "relative")
        raise PolicyError(
            f"{found.folder}: a step makes actions {ways[0]}, and none is enabled that makes them {ways[1]} "
            f"({PRE} and {POST}): enable both or neither, as the policy was trained"
        )
    config, said = found.folder / CONFIG, raw.get("use_relative_actions")
    if said is not None and said != there.enabled:
        raise PolicyError(
            f"{config}: use_relative_actions is {shown(said)}, and the steps of {PRE} say {there.enabled}: make both "
            "say how the policy was trained"
        )
    if there.enabled:
        names = {"relative_exclude_joints": there.exclude_joints, "action_feature_names": there.action_names}
        for name, value in names.items():
            if name in raw and (raw[name] or []) != (value or []):
                raise PolicyError(
                    f"{config}: {name} is {shown(raw[name], 300)}, and the step in {PRE} has {shown(value, 300)}: make "
                    "both say how the policy was trained"
                )


def _check_length(found: Processors, raw: Mapping[str, Any]) -> None:
    """Prompts are as long as config.json says."""
    tokens, said = found.one(PRE, Tokenizer), raw.get("tokenizer_max_length")
    if tokens is None:  # a policy that reads no words
        return
    step, tokenizer = tokens
    if said is not None and said != tokenizer.max_length:
        raise PolicyError(
            f"{step}: max_length is {tokenizer.max_length}, and config.json's tokenizer_max_length {shown(said)}"
        )


def _check_renamed(found: Processors) -> None:
    rename = found.one(PRE, _Rename)
    if rename is None:
        return
    step, names = rename[0], rename[1].rename_map
    twice = sorted(new for new in names.values() if list(names.values()).count(new) > 1)
    if twice:
        raise PolicyError(f"{step}: rename_map makes {shown(twice[0])} of two observations")
    if names.get(STATE, STATE) != STATE:
        raise PolicyError(f"{step}: rename_map makes {shown(names[STATE])} of {STATE}, and no policy reads that")


def write_processors(folder: Path, config: Mapping[str, Any], words: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Write both files as LeRobot makes them for a policy with this config.json; `words` are the steps of its prompt.
    Statistics are not written: every number is as it is."""
    features = {**(config.get("input_features") or {}), **(config.get("output_features") or {})}
    modes = {kind: "IDENTITY" for kind in ("VISUAL", "STATE", "ACTION")}
    normal = {"eps": 1e-8, "features": features, "norm_map": modes}
    after = {"eps": 1e-8, "features": config.get("output_features") or {}, "norm_map": modes}
    device = ("device_processor", {"device": "cpu", "float_dtype": None})
    before = [("rename_observations_processor", {"rename_map": {}}), ("to_batch_processor", {}), *words, device]
    steps = {PRE: [*before, ("normalizer_processor", normal)], POST: [("unnormalizer_processor", after), device]}
    for file, each in steps.items():
        entries = [{"registry_name": name, "config": dict(said)} for name, said in each]
        write_json(folder / file, {"name": Path(file).stem, "steps": entries})
