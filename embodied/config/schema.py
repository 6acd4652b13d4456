"""Everything a user can set, with its default and its meaning in one place.

A YAML file in `configs/` says what differs from here (`embodied/config/files.py` reads it); the command line overrides
it (`--loss.clip 0.1`).
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator
from tyro.constructors import PrimitiveConstructorSpec

from embodied.errors import UserError, nearest, shown
from embodied.files import parse_yaml, yaml_text
from embodied.hub import checkpoint_folder, is_repository
from sim_farm.contract import Gripper, Orientation

HERE = Path(__file__).parent.parent
"""In the source tree `configs` and `assets` are links in this folder, so that an installed package has copies."""
LARGEST = 2**31 - 1
"""Limit of whole numbers in a configuration."""
LARGEST_INDEX = 99_999
"""The largest number that a range may name."""
SEEDS = "seeds:"
"""Begins the value of env.init_states that is a number of seeds."""


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # what may be infinite is saved so, and not as null
    )

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with other values, which are checked as those of a file are. Raises `UserError` for an unknown key,
        with the nearest valid one, and for a value that the key cannot take."""
        if not update:
            return super().model_copy(deep=deep)
        try:
            return type(self).model_validate(dict(self) | dict(update))
        except ValidationError as error:
            raise UserError(f"{type(self).__name__}: {explained(error, list(type(self).model_fields))}") from None

    @field_validator("*")
    @classmethod
    def _not_too_large(cls, value: Any) -> Any:
        items = value if isinstance(value, tuple) else (value,)
        if any(isinstance(item, int) and abs(item) > LARGEST for item in items):
            raise ValueError(f"a whole number can be at most {LARGEST}")
        return value


WORDS = {
    "Value error, ": "",
    "Input should": "it should",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
}
"""Words of pydantic's messages, and ours in their place."""
JOINED = {
    "advantage.mask_truncated": "advantage.overlong masked",
    "advantage.overlong_margin": "advantage.overlong",
    "env.start_seeds": "env.init_states seeds:64",
    "eval.event": "eval.axes",
    "eval.prompt": "eval.protocol libero-plus-published",
    "plan.file": "plan.mode",
    "policy.path": "policy.options.checkpoint",
    "reward.classifier": "reward.model",
    "reward.function": "reward.model",
    "sft.only_successes": "sft.episodes solved",
    "stop_at_return": "stop_at",
    "stop_at_success": "stop_at",
}
"""Former settings that are part of another one now. Messages name that one, with its value where the two differ."""
MOST_PROBLEMS = 5
"""Number of mistakes that one message names."""


def explained(error: ValidationError, known: Sequence[str]) -> str:
    """The mistakes in words, of many the first; an unknown key with the nearest of the `known`."""
    by_key: dict[str, list[Any]] = {}
    for item in error.errors(include_url=False):
        place, unknown = item["loc"], item["type"] == "extra_forbidden"
        key = ".".join(map(str, place)) if unknown else _key_of(place, known)
        by_key.setdefault(key, []).append(item)
    every = [_explain(key, items, known) for key, items in by_key.items()]
    more = f"; and {len(every) - MOST_PROBLEMS} more" if len(every) > MOST_PROBLEMS else ""
    return "; ".join(every[:MOST_PROBLEMS]) + more


def _key_of(place: Sequence[str | int], known: Sequence[str]) -> str:
    """The key of a mistake, with its place in a list; without the names of the types that the value could have had."""
    keys = [".".join(map(str, place[: i + 1])) for i in range(len(place))]
    last = next((i for i, key in enumerate(keys) if key in known), len(place))
    return ".".join(str(part) for i, part in enumerate(place) if i <= last or isinstance(part, int))


def _explain(key: str, items: Sequence[Any], known: Sequence[str]) -> str:
    """One mistake: of a setting that may be of several types, what each of them says."""
    item = items[0]
    if item["type"] == "extra_forbidden":
        hint = f"; it is {JOINED[key]} now" if key in JOINED else nearest(key[:100], list(known))
        return f"unknown key {shown(key)}{hint}"
    says = " or ".join(dict.fromkeys(_says(item["msg"]) for item in items))
    given = str(item["input"]) if isinstance(item["input"], Path) else item["input"]
    return f"{key[:100]}: {says} (got {shown(given)}){_as_a_share(item)}"


def _says(message: str) -> str:
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message[:300]


def _as_a_share(item: Any) -> str:
    """The end of a message: the share for a percentage that was given to a setting of at most 1; else empty."""
    given, most = item["input"], item.get("ctx", {}).get("le", item.get("ctx", {}).get("lt"))
    with suppress(TypeError, ValueError):  # a text may be a number, too
        if most == 1 and 2 <= float(given) <= 100:
            return f"; {float(given):g}% is {float(given) / 100:g}"
    return ""


def _below_runs(name: str) -> str:
    if Path(name).is_absolute() or ".." in Path(name).parts or len(name) > 200:
        raise ValueError("a run's name is that of a folder below runs/: it does not lead out, and is not too long")
    return name


def indices_of(text: str) -> tuple[int, ...]:
    """The numbers that ranges such as `0-24,30` name, in their order. Raises `ValueError` for another text, and where a
    number is named twice."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part, re.ASCII)
        if found is None:
            raise ValueError(f"{text[:100]!r} is no list of ranges such as 0-24,30")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} goes down: write {last}-{first}")
        if last > LARGEST_INDEX:
            raise ValueError(f"the range {part.strip()} names numbers beyond {LARGEST_INDEX}")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"{text[:100]} names {twice} twice")
    return tuple(numbers)


def _starts(states: int | str) -> int | str:
    if isinstance(states, str) and states.strip().isdecimal():  # as the command line reads it
        states = int(states)
    if isinstance(states, str):
        if states.startswith(SEEDS):
            _number_of_seeds(states)
        else:
            indices_of(states)
    elif states < 0:
        raise ValueError("the number of recorded initial states cannot be below 0")
    return states


def _number_of_seeds(text: str) -> int:
    number = text.removeprefix(SEEDS).strip()
    if re.fullmatch(r"[0-9]{1,9}", number, re.ASCII) is None or int(number) < 1:
        raise ValueError(f"{text[:100]!r} is no number of seeds such as {SEEDS}64")
    return int(number)


def _indices(states: tuple[int | str, ...] | None) -> tuple[int | str, ...] | None:
    if states is not None and min((part for part in states if isinstance(part, int)), default=0) < 0:
        raise ValueError("the recorded initial states are counted from 0")
    for part in states or ():
        if isinstance(part, str):
            indices_of(part)
    return states


LEVELS = "1-5"
"""Levels of an axis that is named without any."""


def levels_of(entries: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The levels of each axis in entries such as `camera`, `start:1-3,5` or `camera:2,noise`. Raises `ValueError`."""
    found: dict[str, str] = {}
    for entry in entries:
        graded = ""
        for part in filter(None, map(str.strip, entry.split(","))):
            if graded and re.fullmatch(r"[0-9]+\s*(-\s*[0-9]+)?", part, re.ASCII):
                found[graded] += f",{part}"
                continue
            axis, colon, levels = part.partition(":")
            found[axis] = levels if colon else LEVELS
            graded = axis if colon else ""
    return {axis: indices_of(levels) for axis, levels in found.items()}


def _axes(entries: tuple[str, ...]) -> tuple[str, ...]:
    levels_of(entries)
    return entries


def is_event(entry: str) -> bool:
    """True for an entry of eval.axes that ends in an env step, as `objects:3@20` does."""
    return re.search(r"@\s*[0-9]+\s*$", entry, re.ASCII) is not None


def _axes_and_events(entries: tuple[str, ...]) -> tuple[str, ...]:
    for entry in entries:
        if is_event(entry):
            event_of(entry)
        else:
            levels_of([entry])
    return entries


def _each(value: Any) -> Any:
    """One entry alone stands for a list of one."""
    return (value,) if isinstance(value, (str, int, float, dict)) else value


def _entry(text: str) -> Any:
    """An entry of sft.features or extra_tasks as the command line has it: a name, or a mapping in YAML."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        return parse_yaml(text, "it")
    except UserError:
        raise ValueError(f"{text[:200]} is no mapping in YAML, as '{{image: observation.images.front}}' is") from None


def _with_a_text_as_task(differs: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(differs.get("task", ""), str):  # binary data would become one only after `named_code` was asked
        raise ValueError("the task is a text")
    return differs


def _entry_text(value: Any) -> str:
    return value if isinstance(value, str) else yaml_text(value, flow=True).strip()


FeatureNames = Annotated[
    str | dict[str, str],
    BeforeValidator(lambda value: _entry(value) if isinstance(value, str) else value),
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME|{KEY: OURS, ...}",
        instance_from_str=lambda words: _entry(words[0]),
        is_instance=lambda value: isinstance(value, (str, dict)),
        str_from_instance=lambda value: [_entry_text(value)],
    ),
]
"""Names of one dataset's features: a shipped mapping, or the dataset's keys with this project's names."""
ExtraTask = Annotated[
    dict[str, Any],
    AfterValidator(_with_a_text_as_task),
    PrimitiveConstructorSpec(
        nargs=1,
        metavar="{task: TASK, ...}",
        instance_from_str=lambda words: _entry(words[0]),
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [_entry_text(value)],
    ),
]
"""Settings of a further task that differ from `env`."""


def _device(name: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?", name, re.ASCII) is None:
        raise ValueError("it should be auto, cpu, cuda, or a GPU by its number (cuda:1)")
    return name


def _ascending(rates: tuple[float, float]) -> tuple[float, float]:
    if rates[0] > rates[1]:
        raise ValueError(f"the lower rate comes first: {rates[1]:g} {rates[0]:g}")
    return rates


Share = Annotated[float, Field(ge=0, le=1)]


LEAST_SHARE = 1e-4
"""Smallest probability that a delay may have."""


def delay_of(text: str) -> tuple[tuple[int, float], ...]:
    """Delays in env steps with their probabilities, which `3` or `2:80,3:20` names by weights. Raises `ValueError`."""
    found = dict[int, float]()
    for part in text.split(","):
        one = re.fullmatch(r"\s*([0-9]{1,5})\s*(?::\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*)?", part, re.ASCII)
        if one is None or (one[2] is None and "," in text) or int(one[1]) in found:
            raise ValueError(
                f"{text[:100]!r} is no delay: a number of env steps such as 3, or several with weights such as "
                "2:80,3:20"
            )
        found[int(one[1])] = float(one[2] or 1)
    total = sum(found.values())
    if min(found.values()) <= 0:
        raise ValueError(f"the delay {text[:100]} has a weight of 0: leave that one out")
    if min(found.values()) < LEAST_SHARE * total:
        raise ValueError(f"the delay {text[:100]} has a weight below {LEAST_SHARE:g} of all: leave that one out")
    return tuple((steps, weight / total) for steps, weight in sorted(found.items()))


def delay_text(shares: Iterable[tuple[int, float]]) -> str:
    """The text of delays with their shares, the same whatever the weights were given in: `2:0.8,3:0.2`, or `3`. A share
    below `LEAST_SHARE` is left out."""
    known = [(steps, share) for steps, share in shares if share >= LEAST_SHARE]
    if len(known) == 1:
        return str(known[0][0])
    return ",".join(f"{steps}:{f'{share:.6f}'.rstrip('0')}" for steps, share in known)


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, int) else value


def _delay(text: str) -> str:
    return delay_text(delay_of(text))


class EnvConfig(Section):
    task: str = "maniskill/PushCube-v1"
    """`<simulator>/<task>`. Your own simulator is named `package.module:NAME`. A shipped simulator with your own
    tasks is named `package.module:<simulator>` (docs/adding-a-simulator.md)."""
    control_mode: str | None = None
    """One of the task's control modes. None: the simulator's default."""
    reward: Literal["dense", "sparse"] | None = None
    """`dense`: shaped, at most 1 per env step. `sparse`: 1 where the task is solved. None: sparse in LIBERO, dense in
    the other simulators."""
    max_episode_steps: Annotated[int, Field(ge=1)] | None = None
    """Env steps after which an episode is truncated. None: the task's own limit."""
    cameras: Annotated[int, Field(ge=0)] | tuple[str, ...] = 0
    """Cameras that the policy observes: names, or a number N for the task's first N cameras."""
    image_size: Annotated[int, Field(ge=16, le=1024)] = 128
    """Height and width of a frame in pixels."""
    settle_steps: Annotated[int, Field(ge=0)] = 0
    """Env steps at rest before the first observation of an episode. They do not count as steps of the episode."""
    init_states: Annotated[int | str, AfterValidator(_starts)] = 0
    """Initial states of training episodes. `50`: the first 50 recorded ones; `0-24,30`: the recorded ones of these
    numbers; `seeds:64`: those of 64 seeds, the same in every run. 0: each episode has a new seed."""
    randomise: Annotated[tuple[str, ...], BeforeValidator(_each), AfterValidator(_axes)] = ()
    """Axes along which training episodes are perturbed (docs/generalisation.md): `camera`, `start`, `objects`, `noise`,
    `brightness`, `words`, with levels as `camera:1-3` or at all five. For each episode one axis and level, or no
    perturbation, is drawn with equal probability."""
    orientation: Orientation = "upright"
    """Orientation of frames: `upright`; `stock`: as the simulator returns them; `rotated`: those of `stock`, turned by
    180 degrees."""
    gripper: Gripper = "simulator"
    """Meaning of the last action element. `simulator`: the simulator's; `binary`: its sign alone counts; `inverted`: 1
    opens and 0 closes."""
    options: dict[str, Any] = {}
    """Options that the task's simulator declares (docs/adding-a-simulator.md)."""
    num_envs: Annotated[int, Field(ge=1, le=65536)] = 16
    """Number of environments that run in parallel."""
    delay: Annotated[str, BeforeValidator(_text), AfterValidator(_delay)] = "0"
    """Delay, in env steps, between an observation and the first action that follows from it, in training; meanwhile the
    rest of the last chunk is executed (docs/latency.md). `1`; or `1:80,2:20`, drawn for each decision with these
    weights. 0: the simulator waits for decisions. At most `policy.chunk`, and the policy has to predict
    as many actions more than that. The run's evaluations have the same delay (`eval.delay`)."""

    @property
    def most_delay(self) -> int:
        """The largest delay, in env steps."""
        return delay_of(self.delay)[-1][0]

    @property
    def recorded_starts(self) -> Sequence[int]:
        """Indices of the recorded initial states that training episodes begin from; empty: from seeds alone."""
        if isinstance(self.init_states, int):
            return range(self.init_states)
        return () if self.init_states.startswith(SEEDS) else indices_of(self.init_states)

    @property
    def start_seeds(self) -> int:
        """Number of seeds that training episodes begin from, the same in every run; 0: each episode has a new one."""
        states = self.init_states
        return _number_of_seeds(states) if isinstance(states, str) and states.startswith(SEEDS) else 0

    @property
    def simulator_options(self) -> dict[str, Any]:
        """`options` as the simulator takes them: a folder of `assets/` that the current folder does not have is the
        project's own."""
        return {
            name: _own_folder(value) if isinstance(value, str) and value.startswith("assets/") else value
            for name, value in self.options.items()
        }

    @property
    def perturbed(self) -> dict[str, tuple[int, ...]]:
        """The levels of each axis of `randomise`."""
        return levels_of(self.randomise)


class FarmConfig(Section):
    physics_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that step environments. 0: one per CPU core."""
    render_workers: Annotated[int, Field(ge=0)] = 0
    """Processes that draw frames. 0: each physics worker draws the frames of its environments (fused)."""
    nodes: tuple[str, ...] = ()
    """Nodes of the Ray cluster, by name or address, whose cores step environments in evaluations and in runs without a
    plan. None: this machine. Set it if this machine is short of cores (docs/cluster.md)."""
    devices: tuple[Annotated[int, Field(ge=0)], ...] | Literal["cpu"] = ()
    """GPUs that draw frames, by their CUDA numbers; the processes that draw are distributed over them. `cpu`: frames
    are drawn in software. None: the graphics driver's first device. Set it to draw on several GPUs. A plan has its
    own."""
    groups: Annotated[int, Field(ge=1)] = 2
    """Number of groups into which each task's environments are divided. While one group is simulated, the policy
    decides for another."""


def _own_folder(name: str) -> str:
    """The project's own folder of that relative name, where the current folder has none."""
    return str(HERE / name) if not Path(name).exists() and (HERE / name).is_dir() else name


class PolicyConfig(Section):
    kind: str = "gaussian_mlp"
    """A policy of the `policies` package, or your own as `package.module:Class`."""
    reads: tuple[Literal["state", "proprio", "images", "instruction", "episode"], ...] = ("state",)
    """Observations of the policy: `state`, the simulator's full state; `proprio`, proprioception; `images`, frames of
    `env.cameras`; `instruction`; `episode`, for policies that replay recorded episodes."""
    chunk: Annotated[int, Field(ge=0)] = 1
    """Actions per decision, executed open loop. 0: as many as the checkpoint's own program executes (LeRobot's
    `n_action_steps`)."""
    horizon: Annotated[int, Field(ge=0)] = 0
    """Number of actions that a decision predicts. The first `chunk` of them are executed. 0: as the checkpoint has it,
    else `chunk`. Demonstrations are learned in pieces of this length."""
    options: dict[str, Any] = {}
    """Options of the policy's kind (docs/adding-a-policy.md). `checkpoint`: the pretrained checkpoint that the policy
    is built from, a directory or a Hugging Face name (`org/name`, `org/name@revision`). The latter is downloaded, and
    the run records its commit."""
    base: Literal["nf4", "int8"] | None = None
    """Type in which the frozen matrices under an adapter are stored (docs/small-cards.md): `nf4`, 4 bits, or `int8`.
    None: the policy's own type. Rollouts and updates compute with the same numbers; checkpoints hold the adapter
    alone."""
    device: Annotated[str, AfterValidator(_device)] = "auto"
    """Device of policy worker, learner and evaluator: `cpu`, `cuda`, `cuda:1`; `auto`: the first GPU, if any. A plan
    may choose other devices, unless this names one by its number. With `cpu`, processes on the CPU stand in for the
    accelerators of a plan file."""
    replicas: Annotated[int, Field(ge=1)] = 1
    """Number of policy workers, among which the groups of environments are divided (farm.groups); usually one for each
    GPU. A plan has its own number. With runtime.mode `inline` there is one, and the result is the same."""
    init: Path | None = None
    """Run or checkpoint of the same policy from whose weights and statistics this run begins."""

    @property
    def architecture(self) -> dict[str, Any]:
        """`options` with folders in place of names. A relative folder that the current one does not have is the
        project's own of that name (`assets/openvla_tiny`), so that a shipped configuration works from any folder.
        Raises `UserError` where a Hugging Face name is not in the cache."""
        found = dict(self.options)
        for option in ("tokenizer", "checkpoint"):
            if isinstance(folder := found.get(option), str):
                found[option] = _own_folder(folder)
        if (name := self.hub_name) is not None:
            found["checkpoint"] = str(checkpoint_folder(name, fetch=False))
        return found

    @property
    def hub_name(self) -> str | None:
        """The Hugging Face name of the checkpoint; None where `options` names a folder, or no checkpoint."""
        named = self.options.get("checkpoint")
        if not isinstance(named, str) or named.startswith("assets/"):  # those are the project's own folders
            return None
        return named if is_repository(named) else None


class RolloutConfig(Section):
    decisions: Annotated[int, Field(ge=1)] = 64
    """Decisions of each environment per iteration, in workflows with rollouts of a fixed length (ppo)."""
    episodes_per_env: Annotated[int, Field(ge=1)] = 1
    """Episodes of each environment per iteration, in workflows with rollouts of whole episodes (grpo)."""
    max_episodes_per_env: Annotated[int, Field(ge=1)] | None = None
    """DAPO's dynamic sampling: a rollout continues until as many episode groups are informative as `episodes_per_env`
    yields, but for no more than this number of episodes of each environment. None: no dynamic sampling."""
    episode_group: Annotated[int, Field(ge=1)] = 8
    """Number of episodes in an episode group (grpo). They have the same task and the same initial state."""


class AdvantageConfig(Section):
    gamma: Share = 0.99
    """Discount per decision, or per action with credit `action`."""
    lam: Share = 0.95
    """Lambda of generalised advantage estimation."""
    credit: Literal["chunk", "action"] = "chunk"
    """Unit that gets an advantage, and over which gamma and lam count: a decision (`chunk`) or each of its actions
    (`action`). The latter needs loss.ratio_unit `action` or `element` and, with a critic, a policy with a value for
    each action."""
    bootstrap: Literal["truncated", "always"] = "truncated"
    """Ends of episodes at which the critic's value continues the return: `truncated`: those at the step limit;
    `always`: also those at which the task ends the episode."""
    normalise_returns: bool = False
    """Train the critic on returns minus their mean, divided by their standard deviation (mostly of the last ten
    iterations), so that value_lr and value_coef mean the same for rewards of any size."""
    outcome: Literal["success", "return"] = "success"
    """Outcome by which an episode is judged (grpo, reinforce): `success`, 1 if it was solved and else 0; or its
    `return`."""
    scale: Literal["group", "batch", "none"] = "group"
    """Divisor of advantages (grpo): the standard deviation of the episode `group`, that of the `batch`, or `none`
    (Dr.GRPO)."""
    overlong: Annotated[int, Field(ge=1)] | Literal["masked"] | None = None
    """Treatment of long episodes. A number: the outcome falls by up to 1 over this many last env steps before the
    limit, env.max_episode_steps (DAPO's soft overlong punishment). `masked`: an episode that is cut off at its limit
    carries no gradient; its outcome counts in its episode group (DAPO's overlong filtering). None: length does not
    count."""
    baseline: Literal["none", "group"] = "none"
    """Baseline that is subtracted from an episode's outcome (reinforce): none, or the mean of its episode group."""
    keep_rates: Annotated[tuple[Share, Share], AfterValidator(_ascending)] | None = None
    """Lowest and highest success rate of an episode group that is learned from (SimpleVLA-RL, RLinf: 0.1 and 0.9).
    Groups whose episodes all have the same outcome are always left out."""

    @property
    def overlong_margin(self) -> int | None:
        """Last env steps before an episode's limit over which its outcome falls; None where it does not."""
        return self.overlong if isinstance(self.overlong, int) else None


class LossConfig(Section):
    clip: Annotated[float, Field(gt=0, le=1)] = 0.2
    """Clip range of the probability ratio: from 1 - clip to 1 + clip (above, clip_high if it is set)."""
    clip_high: Annotated[float, Field(gt=0)] | None = None
    """Clip range above one, up to 1 + clip_high (DAPO's clip-higher). None: clip."""
    ratio_unit: Literal["chunk", "action", "element"] = "chunk"
    """Unit of a probability ratio: a whole chunk, one action of it, or one element of an action."""
    value_clip: Annotated[float, Field(gt=0)] | None = 0.2
    """Clip range of the value prediction. None: no clipping."""
    value_coef: Annotated[float, Field(ge=0)] = 0.5
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    reference_kl: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the KL divergence to the frozen reference policy; read where the workflow has one (ppo_reference,
    grpo_reference, reinforce_reference)."""


class OptimConfig(Section):
    epochs: Annotated[int, Field(ge=1)] = 4
    """Passes over an iteration's samples."""
    minibatch: Annotated[int, Field(ge=0)] = 256
    """Samples per optimiser step; 0: all samples of an iteration."""
    micro_batch: Annotated[int, Field(ge=1)] | None = None
    """Samples per forward pass; changes memory, never the result. None: the whole minibatch."""
    recompute: bool = False
    """Keep only the inputs of a large policy's blocks for the backward pass, which computes each block again: less
    memory, longer updates, the same result."""
    policy_lr: Annotated[float, Field(ge=0)] = 3e-4
    """Learning rate of the policy."""
    value_lr: Annotated[float, Field(ge=0)] = 3e-4
    """Learning rate of the value head."""
    critic_warmup: Annotated[int, Field(ge=0)] = 0
    """Iterations at the beginning in which only the value head is trained, so that an untrained critic does not spoil a
    policy that has already learned."""
    lr_warmup: Annotated[int, Field(ge=0)] = 0
    """Iterations at the beginning over which the learning rates rise linearly; the policy's rises after
    `critic_warmup`. Adam's first steps are as long as the rate, however small the gradient, and can undo what a policy
    has learned."""
    lr_schedule: Literal["constant", "linear", "cosine"] | None = None
    """Course of the learning rates over the run: `constant`, or falling to zero along a line (`linear`) or along half a
    cosine (`cosine`). None: `constant` in reinforcement, `linear` for demonstrations."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's decay of trained matrices, as a share of the learning rate per step. Norms and biases do not decay."""
    ema: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay per step of an exponential moving average of the trained weights (openpi: 0.99, for π₀.₅ on LIBERO 0.999).
    Every checkpoint has the average in `average/` beside the weights, and `--checkpoint average` evaluates it. None: no
    average is kept."""
    moments: Literal["int8"] | None = None
    """Type in which Adam's two moments are stored (docs/small-cards.md). None: that of the trained weights. Checkpoints
    are the same."""
    adam_eps: Annotated[float, Field(gt=0)] = 1e-5
    """Epsilon of Adam, which is added to the root of the second moment: much smaller gradients hardly change the
    weights. For policies of 7B weights 1e-8 is usual, because their gradients are about 1e-5 at a norm of 1."""
    max_grad_norm: Annotated[float, Field(ge=0, allow_inf_nan=True)] = 0.5
    """Largest norm of the gradient, to which larger ones are scaled down. `.inf`: no limit."""
    target_kl: Annotated[float, Field(gt=0)] | None = None
    """Ends an iteration's update early when a minibatch's approximate KL exceeds 1.5 times this."""
    ranks: Annotated[int, Field(ge=1)] = 1
    """Number of learner processes, among which every minibatch is divided. A plan has its own number. With runtime.mode
    `inline` there is one, and the result is the same."""
    sharding: Literal["auto", "whole", "sharded"] = "auto"
    """Part of the policy on each of several learner ranks: the `whole` policy, or a shard of its parameters, gradients
    and optimiser state (`sharded`, FSDP2). `auto`: the whole policy if only adapters are trained or the CPU computes,
    else shards."""

    def fallen(self, step: int, steps: int, schedule: str = "constant") -> float:
        """Share of the learning rate that `lr_schedule` leaves at a step; `schedule` is what None stands for."""
        share = 1 - step / steps
        left = {"constant": 1.0, "linear": share, "cosine": (1 - math.cos(math.pi * share)) / 2}
        return left[self.lr_schedule or schedule]


def risen(step: int, warmup: int) -> float:
    """Share of the learning rate that is reached at a step (from 0) of a linear rise over `warmup` steps."""
    return max(0.0, min(1.0, (step + 1) / (warmup + 1)))


class RewardConfig(Section):
    """Reward in place of the simulator's, if the workflow has a reward worker (ppo_reward). See docs/workflows.md."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """The reward model: the folder of a classifier that `embodied reward` wrote, whose reward is the probability that
    the task is solved or nearly; or a function as `package.module:NAME`. The function gets frames (uint8 [N, H, W, 3]
    for each camera) and N instructions, and returns float32 [N]."""

    @property
    def function(self) -> str | None:
        """`model` if it names a function."""
        return self.model if self.model is not None and ":" in self.model else None

    @property
    def classifier(self) -> Path | None:
        """`model` if it is a folder; the project's own of that name (`assets/reach_success`) where the current folder
        has none."""
        return None if self.model is None or self.function is not None else Path(_own_folder(self.model))


Check = Literal["actions", "gripper", "fps", "orientation", "repeated", "statistics"]
"""Checks of demonstrations whose refusals `sft.insist` overrules."""


class SFTConfig(Section):
    """Supervised learning from demonstrations (`embodied sft`)."""

    data: tuple[Path, ...] = ()
    """Datasets in LeRobot's layout, as `embodied record` writes them, or Hugging Face names. On the command line it is
    `--data`."""
    features: Annotated[tuple[FeatureNames, ...], BeforeValidator(_each)] = ()
    """Names of the datasets' features, by the datasets' keys: `{image: observation.images.front, state:
    observation.state, actions: action}`; or the name of a shipped mapping (docs/demonstrations.md). One for all
    datasets, or one for each."""
    episodes: Annotated[tuple[str, ...], BeforeValidator(_each)] = ()
    """Episodes that are learned from: by number and range (`0-49,60`), the solved ones (`solved`), the solved ones of a
    range (`solved:0-49`), or `all`. One text for all datasets, or one for each. None: all. `solved` is refused for a
    dataset that does not record success."""
    weights: Annotated[tuple[Annotated[float, Field(gt=0)], ...], BeforeValidator(_each)] = ()
    """Relative weights of the datasets: `3 1` draws three rows of the first for one of the second, with repetition.
    None: an epoch visits every row of every dataset once."""
    gripper: Literal["as_is", "from_0_1", "from_1_0", "from_minus_plus", "from_plus_minus"] = "as_is"
    """Conversion of the datasets' last action element to that of env.gripper: `from_0_1`: 0 and 1 become the lower and
    the upper end of its range; `from_1_0`: 1 and 0 do; `from_minus_plus`: -1 and 1; `from_plus_minus`: 1 and -1."""
    insist: Annotated[tuple[Check, ...], BeforeValidator(_each)] = ()
    """Checks of the data whose refusals become warnings (docs/demonstrations.md)."""
    steps: Annotated[int, Field(ge=1)] = 1000
    """Optimiser steps."""
    batch: Annotated[int, Field(ge=1)] = 64
    """Rows per optimiser step. A row is an env step with the action chunk from that step on. optim.micro_batch divides
    it."""
    lr: Annotated[float, Field(gt=0)] = 3e-4
    """Learning rate of the first step. It falls linearly to zero unless `optim.lr_schedule` names another schedule."""
    warmup: Annotated[int, Field(ge=0)] = 0
    """Optimiser steps at the beginning over which the learning rate rises linearly (openpi: 1,000)."""
    augment: Literal["openpi", "oft", "lerobot"] | None = None
    """Random changes of the pictures that are learned from, as these projects publish them: `openpi`: crop and rotation
    (not of cameras at a wrist), brightness, contrast, saturation; `oft`: crop, brightness, contrast, saturation, hue,
    for a policy that acts on the centre crop; `lerobot`: three of brightness, contrast, saturation, hue, sharpness, and
    rotation with shift. None: the pictures as recorded."""
    loader_workers: Annotated[int, Field(ge=0)] = 0
    """Processes of each learner rank that read demonstrations ahead. 0: threads of the learner's process. If decoding
    or augmentation keeps the learner waiting, set it to the number of free cores. The result is the same."""
    holdout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Share of each dataset's episodes that is not learned from, but measured."""
    measure_every: Annotated[int, Field(ge=1)] = 100
    """Steps between rows of metrics."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 500
    """Steps between checkpoints; the last step always writes one."""


@dataclass(frozen=True)
class Event:
    """A change in the middle of an episode."""

    axis: str
    level: int
    """Level of the graded axis; 0 where the instruction is given."""
    step: int
    """Env steps before it."""
    instruction: str | None = None


def event_of(text: str) -> Event:
    """The event that `AXIS:LEVEL@STEP` or `words:INSTRUCTION@STEP` describes. Raises `ValueError`."""
    found = re.fullmatch(r"\s*(\w+)\s*:(.+)@\s*([0-9]{1,6})\s*", text, re.ASCII | re.DOTALL)
    if found is None:
        raise ValueError(f"{text[:100]!r} is no event such as objects:3@20 or words:push the green cube@20")
    axis, what, step = found[1], found[2].strip(), int(found[3])
    if what.isdecimal():
        return Event(axis, int(what), step)
    if axis != "words":
        raise ValueError(f"the event {text[:100]!r} names no level of {axis}: write {axis}:3@{step}")
    return Event(axis, 0, step, what)


NO_DELAY = ("0",)
"""The value of `eval.delay` with which an evaluation has no delay, not that of the training either."""


def _delays(entries: tuple[str, ...]) -> tuple[str, ...]:
    found = tuple(map(_delay, entries))
    for entry in found:
        if delay_of(entry)[-1][0] < 1 and found != NO_DELAY:
            raise ValueError(
                f"the delay {entry} has no env steps: beside other delays, trials without one are always run"
            )
    if len(set(found)) < len(found):
        raise ValueError(f"a delay is named twice in {' '.join(entries)[:100]}")
    return found


def _delay_texts(value: Any) -> Any:
    return tuple(map(_text, _each(value) or ()))


DelayMethod = Literal["naive", "ensemble", "rtc", "rtc_lerobot"]
"""Methods of acting while a decision is computed (docs/latency.md)."""


class EvalConfig(Section):
    tasks: tuple[str, ...] = ()
    """Tasks (`libero/libero_spatial/0`), suites (`libero/libero_spatial`) or simulators, also `package.module:NAME`.
    None: env.task."""
    protocol: (
        Literal[
            "openvla-oft",
            "openpi",
            "lerobot",
            "simplevla-rl",
            "libero-plus",
            "libero-plus-published",
            "libero-pro",
            "libero-pro-published",
            "generalisation",
            "latency",
        ]
        | None
    ) = None
    """A published protocol for LIBERO, which overrides env's max_episode_steps, settle_steps, orientation, image_size
    and gripper (docs/evaluating.md). `libero-plus`, `libero-pro`: these suites of perturbations, with the instructions
    of their task files; `libero-plus-published`, `libero-pro-published`: with the instructions that the suites' code
    makes from file names, as their published scores have them. `generalisation`: the settings of `env`, under graded
    perturbations of every axis (docs/generalisation.md). `latency`: the settings of `env`, under every delay of a
    decision that its chunk leaves room for (docs/latency.md). None: the settings of `env`."""
    axes: Annotated[tuple[str, ...], BeforeValidator(_each), AfterValidator(_axes_and_events)] = ()
    """Axes along which every trial is repeated with a perturbation: `camera`, `start`, `objects`, `noise`,
    `brightness`, `words`, with levels as `camera:1,3` or at all five. An entry `AXIS:LEVEL@STEP`, such as
    `objects:3@20`, or `words:INSTRUCTION@STEP` perturbs the trial from that env step on. None: no perturbation, except
    in the protocol `generalisation`, which has every axis that the simulator supports and the policy observes."""
    delay: Annotated[tuple[str, ...], BeforeValidator(_delay_texts), AfterValidator(_delays)] = ()
    """Delays, in env steps, between an observation and the first action that follows from it; meanwhile the rest of
    the last chunk is executed (docs/latency.md). Every trial is repeated under each: `3`; or `2:80,3:20`, drawn for
    each decision with these weights. None: the delay that the run was trained under (`env.delay`), with the same trials
    without it beside; in the protocol `latency` 1, 2, ... up to what chunks have room for, at most 8. 0: no delay."""
    delay_method: Annotated[tuple[DelayMethod, ...], BeforeValidator(_each)] = ()
    """Methods under a delay. `naive`: the new chunk takes over when it arrives; `ensemble`: the mean of all predictions
    for an env step so far (temporal ensembling); `rtc`: real-time chunking, with the Jacobian as in the
    paper; `rtc_lerobot`: without it, as LeRobot computes it; both for pi0 and smolvla. None: `naive`, or, in the
    protocol `latency`, all that the policy can have."""
    episodes: Annotated[int, Field(ge=1)] | None = None
    """Trials of each task, and of each perturbation or delay of it, from seeds that training does not draw. None: the
    protocol's number, or 100, or 50 with perturbations or delays; for a file of problems, at most one trial per
    problem, in the file's order."""
    attempts: Annotated[int, Field(ge=1)] = 1
    """Attempts at each trial, which differ by the policy's noise alone. With several, the result has pass@k: the share
    of trials that at least one of k attempts solves, for k = 1, 2, 4, ... up to all (docs/evaluating.md)."""
    init_states: Annotated[tuple[int | str, ...] | None, BeforeValidator(_each), AfterValidator(_indices)] = None
    """Recorded initial states that the trials begin from, in turn: indices, and ranges such as `25-49`. None: the
    protocol's, or seeds."""
    ignore_terminations: bool = False
    """Episodes continue to the step limit after the task is solved (ManiSkill's name), so that success at the end can
    differ from success once. False: success ends an episode; in Gymnasium the environment decides."""
    greedy: bool | None = None
    """True: actions are the policy's mode. False: actions are sampled. None: as the protocol has it, else greedy for
    one attempt and sampled for several."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """Instruction that replaces each task's own, such as another wording or another task's instruction, to test whether
    the policy reads it."""
    num_envs: Annotated[int, Field(ge=1)] | None = None
    """Number of environments that run in parallel. None: env.num_envs. Set it lower if an evaluation runs out of
    memory, or higher if the tasks of a run have few environments each."""
    every: Annotated[int, Field(ge=0)] = 0
    """Iterations between evaluations during training, each of `episodes` trials of each task, at most 50. Their
    episodes are neither those of training nor those of the evaluation at the end. The best checkpoint is kept, and the
    run ends with it. 0: no such evaluations; the run ends with the newest checkpoint."""
    videos: Annotated[int, Field(ge=0, le=16)] = 9
    """Episodes in the tiled video, failures first; 0 makes none."""

    @property
    def recorded_states(self) -> tuple[int, ...] | None:
        """Indices of the recorded initial states that the trials begin from, in turn; None where none are named."""
        parts = [(part,) if isinstance(part, int) else indices_of(part) for part in self.init_states or ()]
        return tuple(index for part in parts for index in part) or None

    @property
    def perturbed(self) -> dict[str, tuple[int, ...]]:
        """The levels of each axis of `axes`."""
        return levels_of([entry for entry in self.axes if not is_event(entry)])

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of `axes`."""
        return tuple(event_of(entry) for entry in self.axes if is_event(entry))


class RuntimeConfig(Section):
    mode: Literal["ray", "inline"] = "ray"
    """`ray`: workers are processes. `inline`: everything runs in this process, in order; for debugging."""
    address: str = "local"
    """Address of a running Ray cluster that has this machine as a node. `auto`: the cluster of the Ray job that runs
    the command, or of this machine's `ray start`. `local`: Ray is started on this machine."""
    deadline_s: Annotated[float, Field(gt=0)] = 600.0
    """Longest time in seconds that a worker may make no progress while others wait for it. Half of it is the limit for
    a worker's simulators, a quarter the time before a simulator is replaced. Raise it for slow resets."""
    worker_gb: Annotated[float, Field(gt=0)] | None = None
    """Largest private memory, in gigabytes (1e9 bytes), of a worker process on this machine. Set it if a simulator or
    library leaks memory. A process beyond it is replaced, with the same result: a simulator at once, another worker
    from a checkpoint that is written for it. None: no limit."""


def _plan_file(path: Path) -> Path:
    if path.suffix != ".json":
        raise ValueError("the file of a plan, which ends in .json")
    return path


class PlanConfig(Section):
    """When and where: see docs/planning.md."""

    mode: (
        Literal["configured", "auto", "collocated", "disaggregated", "hybrid"]
        | Annotated[Path, AfterValidator(_plan_file)]
    ) = "configured"
    """`configured`: no plan; `farm`, `policy` and `optim` decide. `auto`: the best plan; `collocated`, `disaggregated`,
    `hybrid`: the best plan of that mode. A file that ends in .json: the plan in it, edited or not."""
    profile: Path | None = None
    """File of measured times to plan with, as `embodied profile` writes it. None: the run measures them first, which
    takes about ten iterations' time."""
    ahead: bool = False
    """In disaggregated plans, roll out one update ahead of the learner, so that both work at the same time. The loss is
    then the decoupled objective."""
    replan: bool = False
    """Change to another plan during the run when five iterations in a row differ from the prediction and the change
    pays (docs/planning.md): for long runs on machines whose load changes."""

    @property
    def file(self) -> Path | None:
        """The file of the plan that is run; None where `mode` names no file."""
        return self.mode if isinstance(self.mode, Path) else None


TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]


class Config(Section):
    """One training run."""

    name: Annotated[str, AfterValidator(_below_runs)] | None = None
    """The run's folder below `runs/`. None: a name made of the configuration's name and the time."""
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    """Everything random in the run is a function of it."""
    workflow: str = "ppo"
    """The workflow: `ppo`, `grpo`, `reinforce`, each also with a frozen reference policy (`ppo_reference`, ...),
    `stepnft`, `ppo` with a reward judged from frames (`ppo_reward`), or your own as `package.module:NAME`
    (docs/workflows.md)."""
    iterations: Annotated[int, Field(ge=1)] = 100
    """Number of iterations, each of a rollout and an update."""
    stop_at: float | None = None
    """End the run when the mean success of the last 100 training episodes reaches this share (0.95, for example), or,
    in tasks that report no success, their mean return reaches this. None: the run does all its iterations."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 25
    """Iterations between checkpoints; the last iteration always writes one."""
    keep_checkpoints: Annotated[int, Field(ge=1)] | None = None
    """Number of the newest checkpoints that are kept, beside the best one (eval.every); older ones are removed once a
    newer one is written. Set it where checkpoints are large. None keeps all."""
    track: Annotated[tuple[TrackerName, ...], BeforeValidator(_each)] = ("tensorboard",)
    """Libraries that log the run (docs/tracking.md). Without any, only the run's folder has the metrics."""
    env: EnvConfig = EnvConfig()
    farm: FarmConfig = FarmConfig()
    extra_tasks: tuple[ExtraTask, ...] = ()
    """More tasks that the policy is trained on. Each entry names its task, also `package.module:NAME/<task>`, and the
    settings that differ from `env`."""
    policy: PolicyConfig = PolicyConfig()
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    reward: RewardConfig = RewardConfig()
    sft: SFTConfig = SFTConfig()
    eval: EvalConfig = EvalConfig()
    plan: PlanConfig = PlanConfig()
    runtime: RuntimeConfig = RuntimeConfig()

    @property
    def decided(self) -> int:
        """Actions of a decision that may be executed: `policy.chunk`, and as many more as the largest delay in training
        has env steps. The policy is built for them."""
        return self.policy.chunk + self.env.most_delay

    @property
    def named_code(self) -> dict[str, str]:
        """The setting's key of each code that is named, by the code's name (of a task, its simulator's); what comes
        with the project is none."""
        code = {"workflow": self.workflow, "reward.model": self.reward.model, "policy.kind": self.policy.kind}
        tasks = {
            "env.task": [self.env.task],
            "extra_tasks": [differs.get("task", "") for differs in self.extra_tasks],
            "eval.tasks": self.eval.tasks,
        }
        named = [(name, key) for key, name in code.items() if name is not None]
        named += [(name, key) for key, found in tasks.items() for task in found for name in simulators_of(task)]
        return {name: key for name, key in reversed(named) if ":" in name}  # the first of several keys

    def typed(self, key: str) -> str:
        """The setting as it is typed on the command line."""
        value: Any = self
        for part in key.split("."):
            value = getattr(value, part)
        words = [value] if isinstance(value, str) else [_entry_text(item) for item in value]
        return shlex.join([f"--{key}", *words])


# --- settings that name code, `package.module:NAME`: their author decides what the run executes


KEYS = ("workflow", "reward.model", "policy.kind", "env.task", "extra_tasks", "eval.tasks")


def simulators_of(tasks: str) -> list[str]:
    """The simulators named in a comma-separated list of tasks, suites or simulators."""
    return [name.strip().partition("/")[0] for name in tasks.split(",")]


def typed_code(word: str) -> str:
    """The names of code in one word that was typed after a key of `KEYS`: of a further task's entry, its task."""
    try:
        entry = _entry(word)
    except ValueError:  # the parser of all arguments says so
        return ""
    return str(entry.get("task", "")) if isinstance(entry, dict) else entry


def refuse_code(saved: Config, path: Path, allowed: Collection[str]) -> None:
    """Raise `UserError` where the configuration that a run has `saved` at `path` names other code than is `allowed`, by
    its name or that of a task."""
    known = {*allowed, *(name for task in allowed for name in simulators_of(task))}
    refused = {name: key for name, key in saved.named_code.items() if name not in known}
    if refused:
        raise UserError(
            f"{path} names code that would be run: {', '.join(f'{key}: {name}' for name, key in refused.items())}. "
            "A run's folder may come from elsewhere, so this is done only if you say so. If you trust the code that "
            "has this name on this machine, type "
            + " ".join(saved.typed(key) for key in dict.fromkeys(refused.values()))
            + f" as well (from Python: code={[*refused]})"
        )
