"""The evaluator: runs a fixed list of episodes on a farm, each exactly once, also when it is stopped and continued.

A group's decisions are taken in one batch of `rows` = num_envs / groups, and trial t always in row t % rows of it,
whatever the number of workers or groups, and wherever an earlier session stopped. A policy's row depends on that
row alone, but the rounding of a matrix product may depend on the number of rows and on a row's place. So:

- with the same `rows`, workers, groups, mode and interruptions change no bit of an episode (on a CPU; on a GPU as
  far as its kernels are reproducible);
- with other `rows` an episode is the same up to the rounding of the policy's arithmetic.

The cost is that rows of resting environments are computed too, where episodes are few or few are left. Such a row
repeats a row that has an episode, since a policy may not accept the zeros that a resting environment shows (without any
episode it has no instruction). Its action is not executed.
"""

from __future__ import annotations

import hashlib
import math
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from embodied import progress
from embodied.config.schema import Config, DelayMethod
from embodied.devices import continue_chunk, decide, predict
from embodied.rollout.environment_groups import EnvironmentGroup, groups_of, next_group
from embodied.rollout.executed_chunks import COEFFICIENT, REAL_TIME, Delayed, ExecutedChunks, measured_delay
from embodied.statistics import latency_percentiles, mean_interval, wilson
from embodied.trajectories.batch import EpisodeSums, to_inputs
from embodied.trajectories.random_streams import DISTURBANCE, EVALUATION, SamplingNoise
from embodied.workflows.context import make_policy
from policies.capabilities import Ensembles, LeftOver, Predicts
from policies.contract import Inputs, Policy, PolicyError, PolicySpec
from policies.registry import policy_kind
from sim_farm.client.farm import Farm, FarmAddress, WorkerTimeout
from sim_farm.client.observations import Observations
from sim_farm.contract import EpisodeSpec, Float32
from sim_farm.episodes import ListedEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec


@dataclass(frozen=True)
class EpisodeOutcome:
    """Outcome of one episode."""

    task: str
    trial: int
    spec: EpisodeSpec
    success: bool | None
    """Success once: solved after any env step; not where a number of the simulator's was not finite. None: the task has
    no success."""
    success_at_end: bool | None
    """Solved after the last env step; not where a number of the simulator's was not finite. None: as above."""
    total_reward: float
    """Not finite where a reward was not, or an observation."""
    length: int
    """Env steps."""
    limit: int
    """Env steps after which it would have been truncated."""
    beginning: str = field(default="", kw_only=True)
    """Digest of its first observation; empty where none was kept."""


@dataclass(frozen=True)
class EpisodeResult(EpisodeOutcome):
    """An episode as it comes from the farm: with `spec`, its actions are all that is needed to see it again."""

    actions: Float32
    """[length, A] as executed."""
    decided: Float32 | None = None
    """[length, A] as the policy decided, where noise was added to them."""
    fault: str = ""
    """Why a number was not finite, where that is known."""


def deal_out(spec: FarmSpec, specs: tuple[EpisodeSpec, ...], left: Sequence[int], paired: int = 0) -> FarmSpec:
    """The farm with the trials `left` (indices of `specs`) assigned: trial t to row t % rows of a group. With `paired`
    (`ListedEpisodes`) to that of the trial which it repeats, unless fewer than the rows are repeated: the others would
    stand idle."""
    listed = ListedEpisodes(specs, spec.num_envs, paired=paired)
    queues: list[list[int]] = [[] for _ in range(spec.num_envs)]
    if spec.num_envs % (spec.physics_workers * spec.groups) == 0:  # otherwise the farm refuses, and says why
        rows = spec.num_envs // spec.groups
        groups = [[e for e in range(spec.num_envs) if spec.group_of(e) == group] for group in range(spec.groups)]
        for row in range(rows):
            mine = [t for t in left if (listed.unperturbed(t) if paired >= rows else t) % rows == row]
            for turn, trial in enumerate(mine):
                queues[groups[turn % spec.groups][row]].append(trial)
    return replace(spec, episodes=replace(listed, queues=tuple(map(tuple, queues))))


@dataclass
class DecisionTimes:
    """Latencies of an evaluator's decisions, and how much of its time it waited for them."""

    latencies_s: list[float] = field(default_factory=list)
    """Seconds of each group's decision, from its observations to its action chunks."""
    wall_s: float = 0.0
    waiting_s: float = 0.0
    """Seconds of `wall_s` in which at least one decision was under way."""
    _under_way: int = 0
    _since: float = 0.0

    def begin(self) -> float:
        """A decision begins; the time, for `end`."""
        now = time.monotonic()
        if self._under_way == 0:
            self._since = now
        self._under_way += 1
        return now

    def end(self, begun: float, ended: float) -> None:
        """A decision that `begun` has ended."""
        self.latencies_s.append(ended - begun)
        self._under_way -= 1
        if self._under_way == 0:
            self.waiting_s += time.monotonic() - self._since

    def as_data(self) -> dict[str, float]:
        share = self.waiting_s / self.wall_s if self.wall_s else 0.0
        return {**latency_percentiles(self.latencies_s), "waiting_share": min(share, 1.0), "wall_s": self.wall_s}


class Evaluator:
    """Runs one policy over the farms of one task after the other."""

    def __init__(
        self,
        make: Callable[[PolicySpec], Policy],
        reads: Sequence[str],
        seed: int,
        greedy: bool,
        instruction: str | None = None,
        disturbance: float = 0.0,
    ) -> None:
        """`make` gives the policy for a task's sizes; tasks of the same sizes share one. `instruction` replaces the
        tasks' own. `disturbance` is the standard deviation of noise that is added to every number of its actions before
        they are executed."""
        self._make, self._reads, self._seed, self._greedy = make, tuple(reads), seed, greedy
        self._instruction, self._disturbance = instruction, disturbance
        self._policy: Policy | None = None
        self._sizes: PolicySpec | None = None
        self._task: _Task | None = None
        self._times = DecisionTimes()

    def begin(self, name: str, sizes: PolicySpec, farm: Farm | FarmAddress, delayed: Delayed | None = None) -> None:
        """Begin the next task, whose farm has listed episodes and takes a chunk for each interval of decisions. Raises
        `PolicyError` if the policy does not fit it."""
        torch.set_num_threads(1)
        if self._policy is None or self._sizes != sizes:
            try:
                self._policy, self._sizes = self._make(sizes), sizes
            except PolicyError as error:
                advice = "; name tasks of the sizes it was trained on in eval.tasks" if self._policy is not None else ""
                raise PolicyError(f"{name}: {error}{advice}") from error
        self._task = _Task(
            name,
            self._policy,
            farm,
            self._reads,
            self._seed,
            self._greedy,
            self._instruction,
            self._disturbance,
            self._times,
            delayed,
        )

    def advance(self, budget_s: float, deadline_s: float) -> list[EpisodeResult]:
        """Run until episodes have ended, or for about `budget_s` seconds, and return those that ended."""
        assert self._task is not None, "begin a task first"
        return self._task.advance(budget_s, deadline_s)

    def decision_times(self, control_hz: float) -> dict[str, float | str]:
        """Number of decisions so far, percentiles of their latency, the share of the episodes' time that they took,
        that time in seconds, and the delay that they would have at this rate of env steps, as `eval.delay` takes it."""
        delay = measured_delay(self._times.latencies_s, control_hz)
        return {**self._times.as_data(), "control_hz": control_hz, "delay": delay}

    def end(self) -> None:
        """Detach from the task's farm; its creator closes it."""
        if self._task is not None:
            self._task.release()
        self._task = None


class _Task:
    """The episodes of one task under way."""

    def __init__(
        self,
        name: str,
        policy: Policy,
        farm: Farm | FarmAddress,
        reads: Sequence[str],
        seed: int,
        greedy: bool,
        instruction: str | None,
        disturbance: float,
        times: DecisionTimes,
        delayed: Delayed | None,
    ) -> None:
        self._times = times
        self._name, self._policy, self._reads, self._greedy = name, policy, reads, greedy
        self._instruction, self._disturbance = instruction, disturbance
        self._attached = isinstance(farm, FarmAddress)
        self._farm = Farm.attach(farm) if isinstance(farm, FarmAddress) else farm
        episodes = self._farm.specs[0].episodes
        assert isinstance(episodes, ListedEpisodes)
        self._episodes = episodes
        self._noise = SamplingNoise(seed, policy.noise_dim, EVALUATION)
        self._interval = self._farm.specs[0].chunk
        self._disturbances = SamplingNoise(seed, self._interval * policy.spec.action_dim, DISTURBANCE)
        self._seed, self._key = seed, zlib.crc32(name.encode())
        num_envs = self._farm.specs[0].num_envs
        self._sums = EpisodeSums(num_envs)
        self._executed: list[list[Float32]] = [[] for _ in range(num_envs)]
        """Chunks of each environment's episode, as executed."""
        self._decided: list[list[Float32]] = [[] for _ in range(num_envs)]
        """The same chunks as the policy decided, where noise was added."""
        self._begun = [""] * num_envs
        """Digest of the first observation of each environment's episode."""
        self._delayed = delayed
        self._ensemble = policy.ensemble if isinstance(policy, Ensembles) else None
        """Coefficient with which predictions of several decisions are averaged."""
        if delayed is not None:
            self._ensemble = COEFFICIENT if delayed.method == "ensemble" else None
        self._chunks: dict[int, ExecutedChunks] = {}
        """Decisions of each environment's episode, where more than the last one decides what is executed."""
        self._groups = groups_of(self._farm)
        self._threads = ThreadPoolExecutor(len(self._groups), "decisions") if policy_kind(policy.kind).waits else None
        self._deciding: dict[int, _Deciding] = {}
        """The decisions under way, by the group's number."""
        self._unfinished = {group.number for group in self._groups}
        for number in self._unfinished:
            self._farm.reset(number)

    def advance(self, budget_s: float, deadline_s: float) -> list[EpisodeResult]:
        results: list[EpisodeResult] = []
        begin = time.monotonic()
        # Not longer than until something has ended: what is returned can be kept, whatever happens next.
        while self._unfinished and not results and time.monotonic() - begin < budget_s:
            self._await(deadline_s)
            for number in [number for number, deciding in self._deciding.items() if deciding.action.done()]:
                self._submit(number)
            group = next_group(self._farm, self._groups, ())
            if group is None:  # a decision had ended, and all groups are simulated or decided for
                continue
            seen = self._farm.collect(group.number, deadline_s)
            results = self._ended(group, seen)
            if seen.active.any():
                self._decide(group, seen)
            else:
                self._unfinished.discard(group.number)
            progress.report()
        self._times.wall_s += time.monotonic() - begin
        return results

    def release(self) -> None:
        if self._threads is not None:
            self._threads.shutdown()
        if self._attached:
            self._farm.detach()

    def _await(self, deadline_s: float) -> None:
        """Wait until a group has been simulated, or decided for."""
        if not self._deciding:
            self._farm.wait_ready(deadline_s)
            return

        def done() -> bool:
            return any(each.action.done() for each in self._deciding.values()) or bool(self._farm.ready())

        def late() -> Exception:
            if len(self._deciding) < len(self._unfinished):
                return self._farm.late(deadline_s)
            return WorkerTimeout(f"the policy {self._policy.kind} has not decided within {deadline_s:g} s")

        self._farm.wait(done, late, deadline_s, self._farm.progress_ns)

    def _decide(self, group: EnvironmentGroup, seen: Observations) -> None:
        """Decide for the group and submit its chunks; or begin to, where the policy waits for another program."""
        inputs = to_inputs(seen, self._reads, self._episodes)
        for row in np.flatnonzero(seen.active & (seen.episode_step == 0)).tolist():
            env = int(seen.envs[row])
            self._begun[env] = _digest(seen, row)
            self._chunks[env] = ExecutedChunks(self._interval, self._ensemble)
        if self._instruction is not None:
            inputs = replace(inputs, instruction=(self._instruction,) * len(seen.active))
        rows = np.arange(len(seen.active))
        if not seen.active.all():  # resting rows repeat one that has an episode: see the module's docstring
            rows = np.where(seen.active, rows, np.argmax(seen.active))
            inputs = inputs.rows(torch.from_numpy(rows))
        left = self._left_over(seen.envs[rows])
        noise = None if self._greedy else torch.from_numpy(self._draw(seen, self._noise))
        group.decided += 1
        begun = self._times.begin()
        if self._threads is not None:
            action = self._threads.submit(self._timed, inputs, noise, left)
            self._deciding[group.number] = _Deciding(seen, begun, action)
            action.add_done_callback(lambda _: self._farm.ring_client())
            return
        action = Future[tuple[Float32, float]]()
        action.set_result(self._timed(inputs, noise, left))
        self._deciding[group.number] = _Deciding(seen, begun, action)
        self._submit(group.number)

    def _timed(self, inputs: Inputs, noise: torch.Tensor | None, left: LeftOver | None) -> tuple[Float32, float]:
        """[n, C, A] chunks, or all [n, P, A] predictions where these are averaged or continue the last chunk, and the
        time."""
        policy = self._policy
        if left is not None:
            said = continue_chunk(policy, inputs, noise, left)
        elif (self._ensemble is not None or self._delayed is not None) and isinstance(policy, Predicts):
            said = predict(policy, inputs, noise)
        else:
            said = decide(policy, inputs, noise).chunk
            if self._ensemble is None and self._delayed is None:
                said = said[:, : self._interval]
        return said.numpy(), time.monotonic()

    def _left_over(self, envs: npt.NDArray[np.int64]) -> LeftOver | None:
        """The remaining actions of the last decisions in these environments [n], which the next decisions continue."""
        if self._delayed is None or self._delayed.method not in REAL_TIME:
            return None
        kept = [self._chunks[env].left_over for env in envs.tolist()]
        steps = max((len(one) for one in kept if one is not None), default=0)
        actions = np.zeros((len(kept), steps, self._policy.spec.action_dim), np.float32)
        for row, one in enumerate(kept):
            if one is not None:
                actions[row] = one
        there = torch.tensor([one is not None for one in kept])
        return LeftOver(torch.from_numpy(actions), there, self._delayed.most, self._delayed.method == "rtc")

    def _submit(self, number: int) -> None:
        """Let the group execute what was decided. The chunks are kept until their episodes end."""
        deciding = self._deciding.pop(number)
        decided, ended = deciding.action.result()
        self._times.end(deciding.begun, ended)
        seen = deciding.seen
        if self._ensemble is not None or self._delayed is not None:
            decided = self._executed_of(seen, decided)
        executed = decided
        if self._disturbance:
            noise = self._draw(seen, self._disturbances).reshape(decided.shape)
            executed = np.add(decided, np.float32(self._disturbance) * noise, dtype=np.float32)
        for row in np.flatnonzero(seen.active).tolist():
            env = int(seen.envs[row])
            self._executed[env].append(executed[row])
            if self._disturbance:
                self._decided[env].append(decided[row])
        self._farm.submit(number, executed)

    def _executed_of(self, seen: Observations, predicted: Float32) -> Float32:
        """[n, s, A] actions of the next env steps, of the decisions [n, P, A] of its environments and their earlier
        ones."""
        delayed, rows = self._delayed, np.flatnonzero(seen.active)
        if delayed is not None and predicted.shape[1] < self._interval + delayed.most:
            raise PolicyError(
                f"the policy {self._policy.kind} predicts {predicted.shape[1]} actions, and a delay of {delayed.most} "
                f"env steps needs {self._interval + delayed.most}: set eval.delay or policy.chunk to less"
            )
        actions = predicted[:, : self._interval].copy()
        for row, trial in zip(rows.tolist(), self._trials(seen, rows), strict=True):
            delay = 0
            if delayed is not None:
                delay = delayed.drawn(self._seed, self._key, trial, int(seen.episode_step[row]))
            actions[row] = self._chunks[int(seen.envs[row])].execute(predicted[row], delay)
        return actions

    def _draw(self, seen: Observations, noise: SamplingNoise) -> Float32:
        """Noise keyed by (seed, task, trial, env step), so that it does not depend on the rows of trials. A trial that
        repeats another has its noise."""
        trials = np.array(self._trials(seen, np.arange(len(seen.envs))))
        return noise.draw(trials, np.full_like(trials, self._key), seen.episode_step)

    def _trials(self, seen: Observations, rows: npt.NDArray[np.int64]) -> list[int]:
        """Trials of these rows, each by the one that it repeats."""
        trial, unperturbed = self._episodes.trial, self._episodes.unperturbed
        pairs = zip(seen.envs[rows].tolist(), seen.episode[rows].tolist(), strict=True)
        return [unperturbed(trial(env, episode)) for env, episode in pairs]

    def _ended(self, group: EnvironmentGroup, seen: Observations) -> list[EpisodeResult]:
        """The episodes that ended with these observations."""
        results, rows = [], {env: row for row, env in enumerate(group.envs.tolist())}
        info = self._farm.infos[0]
        for episode in self._sums.add(group.envs, seen):
            env, row = episode.env, rows[episode.env]
            trial = self._episodes.trial(env, int(seen.episode[row]) - 1)
            at_end = bool(seen.success[row, max(int(seen.steps[row]) - 1, 0)])
            results.append(
                EpisodeResult(
                    task=self._name,
                    trial=trial,
                    spec=self._episodes.specs[trial],
                    success=episode.success if info.has_success else None,
                    success_at_end=at_end and math.isfinite(episode.total_reward) if info.has_success else None,
                    total_reward=episode.total_reward,
                    length=episode.length,
                    limit=info.max_episode_steps,
                    actions=np.concatenate(self._executed[env])[: episode.length],
                    decided=np.concatenate(self._decided[env])[: episode.length] if self._disturbance else None,
                    fault=episode.fault,
                    beginning=self._begun[env],
                )
            )
            self._executed[env], self._decided[env] = [], []
        return results


@dataclass(frozen=True)
class _Deciding:
    """A group's decision under way."""

    seen: Observations
    begun: float
    action: Future[tuple[Float32, float]]
    """[n, C, A] chunks, or all [n, P, A] predictions, and the time at which they were complete."""


def _digest(seen: Observations, row: int) -> str:
    """Digest of everything that the row observes first: sha256, cut to 64 bits. Of several observations, which are
    the same then, one counts."""
    found, several = hashlib.sha256(seen.instruction[row].encode()), seen.frame_rows.ndim > 1
    for numbers in (seen.state[row], seen.proprio[row], *(frames[row] for frames in seen.frames.values())):
        found.update(np.ascontiguousarray(numbers[-1] if several else numbers).tobytes())
    return found.hexdigest()[:16]


def as_they_end(advance: Callable[[float], list[EpisodeResult]], episodes: int) -> Iterator[EpisodeResult]:
    """Call `advance` with a budget in seconds until it has returned `episodes` episodes."""
    seen = 0
    while seen < episodes:
        more = advance(1.0)
        seen += len(more)
        yield from more


def run_to_end(
    advance: Callable[[float], list[EpisodeResult]], episodes: int, report: Callable[[int], Any]
) -> list[EpisodeResult]:
    """All episodes in the order of trials; `report` is called with the number that was added."""
    results: list[EpisodeResult] = []
    for result in as_they_end(advance, episodes):
        results.append(result)
        report(1)
    return sorted(results, key=lambda result: result.trial)


def summarise(outcomes: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Success of the episodes whose tasks have one (`success_of`), mean length, mean return of those whose numbers are
    finite with its 95% interval, and how many are broken: they count as failed."""
    returns = [outcome.total_reward for outcome in outcomes if math.isfinite(outcome.total_reward)]
    mean, low, high = mean_interval(returns or [0.0])
    return {
        "episodes": len(outcomes),
        **success_of(outcomes),
        "episode_len": float(np.mean([outcome.length for outcome in outcomes])),
        "return": mean,
        "return_low": low,
        "return_high": high,
        **({"broken_episodes": len(outcomes) - len(returns)} if len(returns) < len(outcomes) else {}),
    }


def success_of(outcomes: Sequence[EpisodeOutcome]) -> dict[str, float]:
    """Success once, which is `success_rate` too, and at the end, with their 95% Wilson intervals; empty where no task
    has a success."""
    known = [outcome for outcome in outcomes if outcome.success is not None]
    if not known:
        return {}
    once, at_end = sum(bool(o.success) for o in known), sum(bool(o.success_at_end) for o in known)
    low, high = wilson(once, len(known))
    end_low, end_high = wilson(at_end, len(known))
    return {
        "success_rate": once / len(known),
        "success_low": low,
        "success_high": high,
        "success_once": once / len(known),
        "success_once_low": low,
        "success_once_high": high,
        "success_at_end": at_end / len(known),
        "success_at_end_low": end_low,
        "success_at_end_high": end_high,
    }


def make_evaluator(
    config: Config,
    spec: PolicySpec,
    farm: Farm | FarmAddress,
    checkpoint: Path | None,
    disturbance: float = 0.0,
    delayed: Delayed | None = None,
) -> Evaluator:
    """An evaluator that has begun the configuration's task. `disturbance`: see `Evaluator`."""
    evaluator = Evaluator(
        lambda sizes: make_policy(config, sizes, checkpoint),
        config.policy.reads,
        config.seed,
        config.eval.greedy is not False,
        config.eval.instruction,
        disturbance,
    )
    evaluator.begin(config.env.task, spec, farm, delayed)
    return evaluator


def predicted_by(config: Config) -> int:
    """Number of actions that a decision of the configuration's policy predicts."""
    policy = config.policy
    return policy.horizon or policy_kind(policy.kind).format.predicts(policy.architecture) or config.decided


def methods_of(kind: str, architecture: Mapping[str, Any]) -> tuple[DelayMethod, ...]:
    """The methods under a delay that a policy with these options can have."""
    found = policy_kind(kind)
    averaged: tuple[DelayMethod, ...] = () if found.chooses else ("ensemble",)
    continued: tuple[DelayMethod, ...] = ()
    if found.format.continues(architecture):
        continued = ("rtc", "rtc_lerobot")
    return ("naive", *averaged, *continued)
