"""The protocol of an evaluation as data: everything beside the policy that determines its result."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from dataclasses import fields as dataclass_fields
from typing import Any, Literal

from pydantic import TypeAdapter

from embodied.config.schema import NO_DELAY, Config, DelayMethod, levels_of
from embodied.errors import UserError, nearest
from embodied.rollout.executed_chunks import Delayed
from sim_farm.catalogue import foreign_suite, problem_file, success_ends, suites_of, task_files, task_names
from sim_farm.contract import EpisodeSpec, Gripper, Orientation, Prompt, TaskFiles, TaskInfo
from sim_farm.episodes import evaluation_episodes
from sim_farm.graded_axes import axes_of, graded
from sim_farm.perturbations import Perturbation
from sim_farm.registry import simulators

GENERALISATION = "generalisation"
"""Protocol of the run's own settings under graded perturbations of every axis."""
LATENCY = "latency"
"""Protocol of the run's own settings under delays of its decisions."""
MOST_DELAY = 8
"""Largest delay of that protocol, in env steps, where nothing else is said."""
TRIALS = 100
"""Trials of each task, where nothing else is said; of a file of problems no more than it has."""
PERTURBED_TRIALS = 50
"""Trials of each task under each perturbation or delay, where nothing else is said."""
VERSION = 3
"""Version of protocols, which is a part of their hash."""

Seeding = Literal["each", "rising", "once"]
"""Seeding of the simulator. `each`: every trial with the same seed; `rising`: trial i with the seed + i; `once`: before
trial 0 alone, so that trial i begins with what i resets have left of the seed's stream."""


@dataclass(frozen=True)
class Preset:
    """Settings of a published protocol for LIBERO. Trial i begins from recorded initial state i."""

    source: str
    limits: Mapping[str, int]
    """Env steps of an episode after settling, by suite."""
    gripper: Gripper | None
    """None: the configuration's."""
    greedy: bool
    env_seed: int
    seeding: Seeding
    chunk: int | None
    """Env steps from one decision to the next; None: as the policy says."""
    cameras: tuple[str, ...] = ("agentview", "robot0_eye_in_hand")
    unseeded_resets: int = 0
    trials: int = 50
    settle_steps: int = 10
    orientation: Orientation = "rotated"
    image_size: int = 256
    suite: str | None = None
    """The simulator's suite of perturbations (`Backend.suites`) under which every trial is repeated."""
    prompt: Prompt = "intended"
    """Instructions of the suite's trials."""


def _limits(spatial: int, object: int, goal: int, ten: int, ninety: int) -> dict[str, int]:
    suites = ("spatial", "object", "goal", "10", "90")
    return {f"libero/libero_{suite}": n for suite, n in zip(suites, (spatial, object, goal, ten, ninety), strict=True)}


def _four_limits() -> dict[str, int]:
    """Those of the suites that have variants."""
    return {suite: limit for suite, limit in _limits(220, 280, 300, 520, 400).items() if not suite.endswith("_90")}


PRESETS = {
    "openvla-oft": Preset(
        "github.com/moojink/openvla-oft, experiments/robot/libero",
        _limits(220, 280, 300, 520, 400),
        gripper="inverted",
        greedy=True,
        env_seed=0,
        seeding="once",
        chunk=8,
    ),
    "openpi": Preset(
        "github.com/Physical-Intelligence/openpi, examples/libero",
        _limits(220, 280, 300, 520, 400),
        gripper="simulator",
        greedy=False,
        env_seed=7,
        seeding="once",
        chunk=5,
    ),
    "lerobot": Preset(
        # An environment for each trial (`eval.batch_size` as many as `eval.n_episodes`), as its pages advise.
        "github.com/huggingface/lerobot, src/lerobot/envs/libero.py",
        _limits(280, 280, 300, 520, 400),
        gripper="simulator",
        greedy=False,
        env_seed=1000,
        seeding="rising",
        unseeded_resets=1,
        chunk=None,
    ),
    "simplevla-rl": Preset(
        "github.com/PRIME-RL/SimpleVLA-RL, verl/workers/rollout/rob_rollout.py",
        # A new process for each trial.
        _limits(512, 512, 512, 512, 512),
        gripper="inverted",
        greedy=True,
        env_seed=0,
        seeding="each",
        chunk=8,
        cameras=("agentview",),
    ),
    "libero-plus": Preset(
        # One trial of each variant, in an environment of its own. The gripper's meaning is the policy's.
        "github.com/sylvestf/LIBERO-plus",
        _four_limits(),
        gripper=None,
        greedy=True,
        env_seed=7,
        seeding="each",
        chunk=None,
        trials=1,
        suite="libero-plus",
    ),
    "libero-pro": Preset(
        "github.com/Zxy-MLlab/LIBERO-PRO",
        _four_limits(),
        gripper=None,
        greedy=True,
        env_seed=7,
        seeding="once",
        chunk=None,
        suite="libero-pro",
    ),
}
PRESETS |= {f"{name}-published": replace(PRESETS[name], prompt="published") for name in ("libero-plus", "libero-pro")}
"""Published protocols by name. `greedy` is what the project's own evaluation does: flow policies draw their noise."""


@dataclass(frozen=True)
class Protocol:
    """Equal protocols give a policy the same episodes, which it sees and acts in alike."""

    name: str | None
    """Name of the published protocol; None: the run's own settings."""
    limits: Mapping[str, int | None]
    """Tasks in the order of their rows; env steps after which an episode is truncated, None: the task's own limit."""
    trials: int
    """Episodes of each task, all attempts counted."""
    init_states: tuple[int, ...] | None
    """Trial i begins from recorded state `init_states[i % len]`; None: from its seed alone."""
    env_seed: int | None
    """The simulator's seed (`seeding`); None: trial i has its own, from a stream that training does not draw from."""
    settle_steps: int
    orientation: Orientation
    image_size: int
    gripper: Gripper
    control_mode: str | None
    reward: str | None
    greedy: bool
    """True: actions are the policy's mode; False: sampled, with noise keyed by (seed, task, trial, env step)."""
    seed: int
    instruction: str | None = None
    """Instruction of the policy; None: each task's own."""
    seeding: Seeding = "each"
    unseeded_resets: int = 0
    """Resets of the simulator before it is seeded."""
    cameras: int | tuple[str, ...] = 0
    """Cameras of the policy: names, or their number."""
    chunk: int = 1
    """Env steps per action chunk."""
    ignore_terminations: bool = False
    """True: episodes run to their limit; False: what ends a task ends them, as success does in most."""
    task_digests: Mapping[str, str] = field(default_factory=dict)
    """For each task that files define, the sha256 over its instruction, its task file and its initial states."""
    perturbations: Mapping[str, tuple[Perturbation, ...]] = field(default_factory=dict)
    """Perturbations by task, for tasks that are perturbed. Trials 0 to `trials` - 1 are unperturbed. Then each
    perturbation in turn has `trials` more, each the repetition of an unperturbed trial."""
    delays: tuple[Delayed, ...] = ()
    """Delays under which trials are repeated likewise, in place of perturbations; `wait`: without one."""
    trained_delay: Delayed | None = None
    """The delay that the policy learned under, which all trials have that are not repeated under another. None: the
    simulator waits for the policy."""
    attempts: int = 1
    """Trials, one after the other, that begin alike; noise tells them apart."""
    version: int = VERSION

    @property
    def tasks(self) -> tuple[str, ...]:
        return tuple(self.limits)

    @property
    def sha256(self) -> str:
        """sha256 of the protocol as JSON with sorted keys and without white space."""
        text = json.dumps(_as_dict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def count(self, task: str) -> int:
        """Number of the task's episodes."""
        return self.trials * (1 + len(self.conditions(task)))

    @property
    def total(self) -> int:
        """Number of all episodes."""
        return sum(map(self.count, self.tasks))

    def conditions(self, task: str) -> Sequence[Perturbation | Delayed]:
        """The perturbations or delays under which the task's trials are repeated."""
        return self.perturbations.get(task) or self.delays

    @property
    def has_conditions(self) -> bool:
        """True if trials are repeated under perturbations or delays."""
        return bool(self.perturbations or self.delays)

    def delayed(self, task: str, trial: int) -> Delayed | None:
        """The trial's delay; None: it has none."""
        found = self.condition(task, trial)
        return _late(found if isinstance(found, Delayed) else self.trained_delay)

    @property
    def every_delay(self) -> tuple[Delayed | None, ...]:
        """Each delay that some trials have; None stands for trials that have none."""
        return tuple(map(_late, (self.trained_delay, *self.delays)))

    def condition(self, task: str, trial: int) -> Perturbation | Delayed | None:
        """That of the trial; None: it has none."""
        return self.conditions(task)[trial // self.trials - 1] if trial >= self.trials else None

    def episodes(self, task: str) -> tuple[EpisodeSpec, ...]:
        """The episode of each of the task's trials; those without a perturbation are the same for every task."""
        plain = self._unperturbed()
        perturbed = range(len(self.perturbations.get(task, ())))
        repeated = tuple(replace(spec, perturbation=number) for number in perturbed for spec in plain)
        return plain + repeated + plain * len(self.delays)

    def _unperturbed(self) -> tuple[EpisodeSpec, ...]:
        states = self.init_states or (None,)
        return tuple(
            EpisodeSpec(
                self._env_seed(start, spec.seed),
                states[start % len(states)],
                resets=start if self.env_seed is not None and self.seeding == "once" else 0,
                unseeded_resets=self.unseeded_resets,
            )
            for start, spec in enumerate(evaluation_episodes(self.seed, self.trials // self.attempts))
            for _ in range(self.attempts)
        )

    def _env_seed(self, start: int, own: int) -> int:
        if self.env_seed is None:
            return own
        return self.env_seed + start if self.seeding == "rising" else self.env_seed

    def shown_to(self, config: Config) -> Protocol:
        """A protocol of the same episodes, which the configuration's policy sees and acts in by its own conventions, as
        far as no published protocol determines them."""
        env, preset = config.env, PRESETS.get(self.name or "")
        shown = replace(
            self,
            cameras=_cameras(config),
            chunk=config.policy.chunk,
            control_mode=env.control_mode,
            gripper=env.gripper if preset is None or preset.gripper is None else preset.gripper,
            delays=_fitted(self.delays, config),
            trained_delay=None if self.trained_delay is None else _fitted((self.trained_delay,), config)[0],
        )
        if preset is not None or not shown.cameras:
            return shown
        return replace(shown, orientation=env.orientation, image_size=env.image_size)

    def same_episodes(self, other: Protocol) -> bool:
        """True if episodes of the two can be paired, by whatever conventions their policies see and act."""
        own = replace(self, cameras=other.cameras, chunk=other.chunk, image_size=other.image_size)
        own = replace(own, orientation=other.orientation, gripper=other.gripper, control_mode=other.control_mode)
        mine, its = (
            [None if late is None else (late.method, late.delay) for late in (one.trained_delay, *one.delays)]
            for one in (self, other)
        )
        return mine == its and replace(own, delays=other.delays, trained_delay=other.trained_delay) == other

    @property
    def conventions(self) -> str:
        """The conventions by which the policy sees and acts, for people."""
        mode = "" if self.control_mode is None else f", control mode {self.control_mode}"
        return f"{self.orientation} {self.image_size} x {self.image_size} images, gripper {self.gripper}{mode}"

    def applied(self, config: Config, task: str) -> Config:
        """The configuration as this protocol has it for one of its tasks."""
        env = config.env.model_copy(
            update={
                "task": task,
                "max_episode_steps": self.limits[task],
                "control_mode": self.control_mode,
                "reward": self.reward,
                "settle_steps": self.settle_steps,
                "orientation": self.orientation,
                "image_size": self.image_size,
                "gripper": self.gripper,
            }
        )
        policy = config.policy
        if self.cameras:
            env = env.model_copy(update={"cameras": self.cameras})
        if self.chunk is not None:
            policy = policy.model_copy(update={"chunk": self.chunk})
        evaluation = config.eval.model_copy(
            update={
                "greedy": self.greedy,
                "instruction": self.instruction,
                "ignore_terminations": self.ignore_terminations,
            }
        )
        update = {"env": env, "extra_tasks": (), "policy": policy, "eval": evaluation, "seed": self.seed}
        return config.model_copy(update=update)

    def check(self, task: str, info: TaskInfo) -> None:
        """Raise `UserError` if the task lacks an initial state that a trial begins from, or if the simulator that runs
        has other files of it than this process."""
        if info.digest != self.task_digests.get(task):
            raise UserError(
                f"the simulator of {task} has other task files than the process that evaluates: set LIBERO_CONFIG_PATH "
                "alike for both, and install the same packages on every machine"
            )
        if self.init_states is not None:
            require_states(task, self.init_states[: self.trials // self.attempts], info)

    def line(self, limits: Collection[int] = (), has_success: bool = True) -> str:
        """The protocol in a sentence, for people; `limits` are the tasks' own maximum steps, once they are known."""
        measure = self.success_line if has_success else "measured by the return: the tasks have no success"
        published = PRESETS.get(self.name or "")
        starts = self.trials // self.attempts
        trials = f"{starts} trials a task"
        if published is not None and starts != published.trials:
            trials += f" (published: {published.trials})"
        if self.attempts > 1:
            trials += f", each attempted {self.attempts} times,"
        seeds = self._seeds_line()
        if self.init_states is not None:
            seeds = f"initial states {_ranges(self.init_states[:starts])}, {seeds}"
        instruction = "" if self.instruction is None else f", instruction {self.instruction!r}"
        known = sorted(set(limits or (n for n in self.limits.values() if n is not None)))
        longest = "/".join(map(str, known)) or "the task's own"
        return (
            f"{self.name or 'own'} (sha256 {self.sha256[:12]}): {trials} from {seeds}; maximum steps "
            f"{longest}, {self.settle_steps} settling steps, {self.orientation} "
            f"{self.image_size} x {self.image_size} images, gripper {self.gripper}, "
            f"{'greedy' if self.greedy else 'sampled'}, seed {self.seed}{instruction}"
            f"{self._policy_line(published)}{self._perturbed_line()}{self._delayed_line()}; {measure}"
        )

    @property
    def success_line(self) -> str:
        """The two kinds of success, for people."""
        once = "success once: solved after any env step; at the end: after the last one"
        if self.ignore_terminations:
            return f"{once}, as episodes run to their limit"
        if not all(map(success_ends, self.tasks)):
            return f"{once}, as success need not end an episode"
        return f"{once}, which is the same, as success ends an episode"

    def _seeds_line(self) -> str:
        before = f" after {self.unseeded_resets} unseeded" if self.unseeded_resets else ""
        if self.env_seed is None:
            return "seeds of a stream that training does not draw from" + before
        seeds = {
            "each": "simulator seed {}",
            "rising": "simulator seeds {} and up",
            "once": "one stream of simulator seed {}",
        }
        return seeds[self.seeding].format(self.env_seed) + before

    def _perturbed_line(self) -> str:
        """The axes with their levels, and the events."""
        conditions = dict.fromkeys(
            (one.axis, one.level, one.from_step) for table in self.perturbations.values() for one in table
        )
        axes = {(axis, step): [] for axis, _, step in conditions}
        for axis, level, step in conditions:
            axes[axis, step].append(level)
        texts = [
            f"{axis} {_ranges(sorted(levels))}" + (f" from env step {step}" if step else "")
            for (axis, step), levels in axes.items()
        ]
        return f"; each trial also perturbed by {', '.join(texts)}" if texts else ""

    def _delayed_line(self) -> str:
        """The methods with their delays."""
        fewer = sorted({one.interval for one in self.every_delay if one is not None and one.interval < self.chunk})
        often = f" (a decision every {'/'.join(map(str, fewer))} env steps where chunks are too short)" if fewer else ""
        if (own := self.trained_delay) is not None:
            beside = "; each trial also without a delay" if self.delays else ""
            return f"; with the delay of the training, in env steps: {own.method} {own.delay}{often}{beside}"
        methods = dict.fromkeys(one.method for one in self.delays)
        texts = [f"{method} {' '.join(o.delay for o in self.delays if o.method == method)}" for method in methods]
        return f"; each trial also with a delay of env steps: {', '.join(texts)}{often}" if texts else ""

    def _policy_line(self, published: Preset | None) -> str:
        """Cameras and action chunk, with the published values where these differ."""
        text = f", action chunks of {self.chunk} env steps"
        if published is not None and published.chunk not in (None, self.chunk):
            text += f" (published: {published.chunk})"
        if self.cameras:
            text += f", cameras {self.cameras if isinstance(self.cameras, int) else ', '.join(self.cameras)}"
            if published is not None and self.cameras != published.cameras:
                text += f" (published: {', '.join(published.cameras)})"
        return text


def _late(delayed: Delayed | None) -> Delayed | None:
    return None if delayed is None or delayed.method == "wait" else delayed


def require_states(task: str, states: Sequence[int], info: TaskInfo) -> None:
    """Raise `UserError` if the task lacks one of the recorded initial states."""
    there = f"its recorded initial states are 0 to {info.init_states - 1}"
    if not info.init_states:
        there = "it has no recorded initial states: its episodes begin from their seeds"
    missing = sorted({state for state in states if state >= info.init_states})
    if missing:
        raise UserError(
            f"{task} has no initial state {', '.join(map(str, missing))}; {there}. Change --eval.init-states"
        )


def _cameras(config: Config) -> int | tuple[str, ...]:
    """Cameras of the configuration's policy."""
    return config.env.cameras if "images" in config.policy.reads else 0


def protocol_of(config: Config) -> Protocol:
    """The protocol of the configuration. Raises `UserError`, or `FarmError` where files of a task are
    missing."""
    settings, env = config.eval, config.env
    # A single task is looked up by the farm that simulates it.
    tasks = expand(settings.tasks) if settings.tasks else (env.task,)
    files = {task: task_files(task) for task in tasks}
    # Problems are asked in the order of their file, each as often: drawn seeds would ask one twice and another never.
    listed = settings.recorded_states is None and all(found and found.instructions for found in files.values())
    perturbations = {task: table for task in tasks if (table := _perturbations(config, task))}
    trained, delays = _trained_delay(config), _delays(config)
    if perturbations and delays:
        raise UserError(
            "a trial is repeated under perturbations or under delays: leave eval.axes away, or eval.delay and the "
            f"protocol {LATENCY}"
        )
    if trained is not None and not perturbations:
        delays = (Delayed("wait", "0", config.policy.chunk),)
    trials = settings.episodes or (PERTURBED_TRIALS if perturbations or delays else TRIALS)
    if listed and settings.episodes is None:
        trials = min(trials, *(len(found.instructions) for found in files.values() if found is not None))
    own = Protocol(
        name=settings.protocol if settings.protocol in (GENERALISATION, LATENCY) else None,
        limits=dict.fromkeys(tasks, env.max_episode_steps),
        trials=settings.attempts * trials,
        init_states=settings.recorded_states,
        env_seed=0 if listed else None,
        seeding="rising" if listed else "each",
        settle_steps=env.settle_steps,
        orientation=env.orientation,
        image_size=env.image_size,
        gripper=env.gripper,
        control_mode=env.control_mode,
        reward=env.reward,
        greedy=settings.attempts == 1 if settings.greedy is None else settings.greedy,
        seed=config.seed,
        instruction=settings.instruction,
        cameras=_cameras(config),
        chunk=config.policy.chunk,
        ignore_terminations=settings.ignore_terminations,
        attempts=settings.attempts,
        task_digests={task: found.digest for task, found in files.items() if found is not None},
        perturbations=perturbations,
        delays=delays,
        trained_delay=trained,
    )
    if settings.instruction is not None and any(one.words for table in perturbations.values() for one in table):
        raise UserError(
            f"eval.instruction {settings.instruction!r} takes the place of every instruction, so that other words "
            "would change nothing: leave it away, or the axis words"
        )
    if settings.instruction is not None and "instruction" not in config.policy.reads:
        raise UserError(
            f"eval.instruction is {settings.instruction!r}, and the policy reads {', '.join(config.policy.reads)}: "
            "only one that reads the instruction can take another"
        )
    protocol = _published(own, settings.protocol, config) if settings.protocol in PRESETS else own
    if protocol.greedy and protocol.attempts > 1:
        raise UserError(
            f"eval.attempts is {protocol.attempts}, and greedy attempts at a trial are all the same: set --eval.greedy "
            "False"
        )
    states = protocol.init_states
    distinct = 0 if states is None else len(set(states[: protocol.trials]))
    if states is not None and protocol.greedy and protocol.trials > distinct:
        raise UserError(
            f"{protocol.trials} greedy trials from {distinct} initial states would repeat episodes: set "
            f"--eval.episodes to {distinct} or less, name each state once, or set --eval.greedy False"
        )
    return protocol


def _trained_delay(config: Config) -> Delayed | None:
    """The delay that the policy learned under, executed as in training; None where there was none, and where the
    evaluation's settings name delays. Raises `UserError` if chunks have no room for it."""
    if not config.env.most_delay or config.eval.delay or config.eval.protocol == LATENCY:
        return None
    return _fitted((Delayed("naive", config.env.delay, 0),), config)[0]


def _delays(config: Config) -> tuple[Delayed, ...]:
    """The delays that the settings ask for, each by each method. Raises `UserError` for one that a chunk has no room
    for."""
    settings = config.eval
    whole = settings.protocol == LATENCY
    if whole and settings.delay == NO_DELAY:
        raise UserError(
            f"eval.delay is 0, and the protocol {LATENCY} repeats trials under delays: leave one of them out"
        )
    if not whole and settings.delay in ((), NO_DELAY):
        if settings.delay_method:
            raise UserError(
                f"eval.delay_method is {' '.join(settings.delay_method)}, and no delay is asked for: set eval.delay to "
                f"a number of env steps, or eval.protocol to {LATENCY}"
            )
        return ()
    from embodied.rollout.evaluator import methods_of, predicted_by  # imports torch

    methods: Sequence[DelayMethod] = settings.delay_method or ("naive",)
    if whole and not settings.delay_method:
        methods = methods_of(config.policy.kind, config.policy.architecture)
    room = min(config.policy.chunk, predicted_by(config) // 2, MOST_DELAY)
    delays = settings.delay or tuple(map(str, range(1, max(1, room) + 1)))
    return _fitted(tuple(Delayed(method, delay, 0) for delay in delays for method in methods), config)


def _fitted(delays: tuple[Delayed, ...], config: Config) -> tuple[Delayed, ...]:
    """The delays with the configuration's intervals of decisions. Raises `UserError` for a method that its policy
    cannot have, and for a delay that its chunks have no room for."""
    if not any(map(_late, delays)):
        return tuple(replace(one, interval=config.policy.chunk) for one in delays)
    from embodied.rollout.evaluator import methods_of, predicted_by  # imports torch

    policy, predicted, settings = config.policy, predicted_by(config), config.eval
    named = bool(settings.delay) or settings.protocol == LATENCY
    setting, further = ("eval.delay", "") if named else ("env.delay", " (of a trained policy, eval.delay)")
    possible, room = methods_of(policy.kind, policy.architecture), min(policy.chunk, predicted // 2)
    for one in delays:
        if one.method not in possible:
            raise UserError(
                f"eval.delay_method {one.method} is not for the policy {policy.kind}: real-time chunking guides the "
                "denoising of a flow policy (pi0, smolvla), and temporal ensembling averages actions that are real "
                f"numbers. Set eval.delay_method to {' '.join(possible)}"
            )
        if one.most > room:
            most = f"Set {setting} to {f'at most {room}' if room else 0}{further}"
            raise UserError(
                f"a delay of {one.most} env steps is beyond the chunk: a decision of {policy.kind} predicts "
                f"{predicted} actions, and policy.chunk is {policy.chunk}. The first {one.most} actions are past when "
                "they arrive, as many more are executed while the next decision is computed, and that begins at most "
                f"policy.chunk env steps later. {most}, or policy.chunk to at least {one.most} for a policy that "
                f"predicts at least {2 * one.most} actions"
            )
    # A decision begins when as many actions are left as the delay, if not before.
    return tuple(replace(one, interval=min(policy.chunk, predicted - one.most)) for one in delays)


def _perturbations(config: Config, task: str) -> tuple[Perturbation, ...]:
    """The perturbations of the task that the settings ask for. Raises `FarmError` for an axis that its simulator has
    not or the policy cannot notice, and for a level out of range."""
    settings, reads = config.eval, config.policy.reads
    axes = settings.perturbed
    preset = PRESETS.get(settings.protocol or "")
    if preset is not None and preset.suite is not None:
        return _of_suite(config, task, preset.suite, preset.prompt)
    if settings.protocol == GENERALISATION and not axes and not settings.events:
        axes = levels_of(axes_of(task, reads))
    found = [graded(task, axis, level, reads) for axis, levels in axes.items() for level in levels]
    for event in settings.events:
        # The axis is checked here, also where the words are given.
        one = graded(task, event.axis, event.level or 1, reads, event.step)
        found.append(one if event.instruction is None else replace(one, level=0, words=event.instruction))
    return tuple(found)


def _of_suite(config: Config, task: str, suite: str, prompt: Prompt) -> tuple[Perturbation, ...]:
    """The perturbations of the task that a published suite has, on the axes and levels that the settings name."""
    settings = config.eval
    if settings.events:
        raise UserError(f"the protocol {suite} has no events: leave those of eval.axes out (AXIS:LEVEL@STEP)")
    found = suites_of(task).get(suite)
    if found is None:
        raise UserError(f"the protocol {suite} says nothing of {task}")
    axes = settings.perturbed or levels_of(found.axes)
    for axis in axes:
        if axis not in found.axes:
            raise UserError(f"the protocol {suite} has no axis {axis!r}: it has {', '.join(found.axes)}")
    every = sorted({level for levels in axes.values() for level in levels})
    table = found.table(task, prompt, tuple(axes), every)
    return tuple(one for one in table if one.level in axes[one.axis])


def suite_notes(protocol: Protocol) -> list[str]:
    """Notes on the published suite of perturbations that the protocol follows."""
    suite = PRESETS[protocol.name].suite if protocol.name in PRESETS else None
    if suite is None:
        return []
    return list(suites_of(protocol.tasks[0])[suite].notes(protocol.tasks))


def problem_notes(protocol: Protocol) -> list[str]:
    """Notes on which problems of files the evaluation uses, and how often."""
    if protocol.env_seed != 0 or protocol.seeding != "rising":
        return []
    return [_asked(found, protocol) for task in protocol.tasks if (found := problem_file(task)) is not None]


def _asked(found: TaskFiles, protocol: Protocol) -> str:
    trials, problems = protocol.trials // protocol.attempts, len(found.instructions)
    if trials < problems:
        return f"the first {trials} of the {problems} problems of {found.source} are asked, each once"
    times, more = divmod(trials, problems)
    often = "once" if times == 1 else f"{times} times"
    sentence = f"each of the {problems} problems of {found.source} is asked {often}"
    if more:
        sentence += f", the first {more} once more"
    if protocol.greedy and trials > problems:
        sentence += f", and answered greedily alike each time: --eval.episodes {problems} asks each once"
    return sentence


def _published(own: Protocol, name: str, config: Config) -> Protocol:
    preset = PRESETS[name]
    limits: dict[str, int | None] = {}
    for task in own.tasks:
        suite = task.rpartition("/")[0]
        if suite not in preset.limits:
            raise UserError(
                f"the protocol {name} says nothing of {task}; it covers {', '.join(preset.limits)}. "
                "Leave --eval.protocol away to evaluate as the configuration says"
            )
        limits[task] = preset.limits[suite]
    return replace(
        own,
        name=preset.suite or name,  # the words of its perturbations differ by the prompt
        limits=limits,
        trials=own.attempts * (config.eval.episodes or preset.trials),
        init_states=config.eval.recorded_states or tuple(range(preset.trials)),
        env_seed=preset.env_seed,
        seeding=preset.seeding,
        unseeded_resets=preset.unseeded_resets,
        cameras=_named(own.cameras, preset.cameras),
        settle_steps=preset.settle_steps,
        orientation=preset.orientation,
        image_size=preset.image_size,
        gripper=preset.gripper or own.gripper,
        greedy=preset.greedy and own.attempts == 1 if config.eval.greedy is None else config.eval.greedy,
    )


def _named(cameras: int | tuple[str, ...], published: tuple[str, ...]) -> int | tuple[str, ...]:
    """The protocol's cameras by name, if `cameras` is their number."""
    return published[:cameras] if isinstance(cameras, int) and 0 < cameras <= len(published) else cameras


def expand(patterns: Sequence[str]) -> tuple[str, ...]:
    """The tasks that the patterns name, each once, in the order of the patterns.

    A pattern is a task (`tabletop/reach`, `libero/libero_spatial/0`), a suite (`libero/libero_spatial`) or a
    simulator (`tabletop`), or several of them with commas between. Raises `UserError` for what is none of them.
    """
    names = [name.strip() for pattern in patterns for name in pattern.split(",")]
    return tuple(dict.fromkeys(task for name in names for task in _matching(name)))


def suite_of(task: str) -> str:
    """`libero/libero_spatial` of `libero/libero_spatial/0`, `tabletop` of `tabletop/reach`."""
    return task.rpartition("/")[0]


def _matching(name: str) -> list[str]:
    simulator = name.partition("/")[0]
    if ":" not in simulator and simulator not in simulators():
        raise UserError(f"no simulator {simulator!r} (in {name!r}){nearest(simulator, sorted(simulators()))}")
    tasks = [f"{simulator}/{task}" for task in task_names(simulator)]
    found = [task for task in tasks if task == name or task.startswith(f"{name}/")]
    if found:
        return found
    suite = suite_of(name)
    siblings = [task.rpartition("/")[2] for task in tasks if suite_of(task) == suite]
    if siblings and all(sibling.isdecimal() for sibling in siblings):
        raise UserError(f"no task {name!r}: {suite} has the tasks {_ranges(sorted(map(int, siblings)))}")
    suites = list(dict.fromkeys(suite_of(task) for task in tasks))
    raise UserError(f"no task or suite {name!r}{foreign_suite(name) or nearest(name, sorted(suites + tasks))}")


def _ranges(numbers: Sequence[int]) -> str:
    """`0 to 24, 30`: three consecutive numbers or more as a range."""
    parts: list[str] = []
    place = 0
    while place < len(numbers):
        end = place
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        run = numbers[place : end + 1]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
        place = end + 1
    return ", ".join(parts)


def as_data(protocol: Protocol) -> dict[str, Any]:
    """For JSON files, with its hash."""
    return {**_as_dict(protocol), "sha256": protocol.sha256}


def _as_dict(protocol: Protocol) -> dict[str, Any]:
    """The protocol's fields; without an instruction where each task has its own, without perturbations and delays where
    there are none, and without attempts where there is one."""
    absent = [
        name
        for name, there in (
            ("instruction", protocol.instruction is not None),
            ("perturbations", protocol.perturbations),
            ("delays", protocol.delays),
            ("trained_delay", protocol.trained_delay),
            ("attempts", protocol.attempts > 1),
        )
        if not there
    ]
    return {key: value for key, value in asdict(protocol).items() if key not in absent}


_PROTOCOL = TypeAdapter(Protocol)


def from_data(data: Mapping[str, Any]) -> Protocol:
    """The protocol that `as_data` wrote. Raises `UserError` for another version, or data that do not match the hash."""
    if data.get("version") != VERSION:
        raise UserError(f"version {data.get('version')!r} of protocols is not known here, only {VERSION}")
    fields = dict(data)
    try:
        written = str(fields.pop("sha256"))
        if unknown := fields.keys() - {field.name for field in dataclass_fields(Protocol)}:
            raise ValueError(f"unknown {', '.join(map(repr, sorted(unknown)))}")
        protocol = _PROTOCOL.validate_python(fields)
    except (KeyError, ValueError) as error:
        raise UserError(f"not an evaluation's protocol: {str(error)[:300]}") from error
    if protocol.sha256 != written:
        raise UserError(f"the protocol's hash is {protocol.sha256[:12]}, written is {written[:12]}: it was changed")
    return protocol
