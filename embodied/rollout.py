"""The policy worker: turns a farm's observations into decisions and gathers trajectories.

    for each decision: for each stage: collect -> act -> submit

With two stages the farm simulates one while the policy decides for the other. The rows of the result are in
the order (decision, environment) whatever the stages, and noise is keyed by (environment, episode, step).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from embodied.noise import SamplingNoise
from embodied.reporting.trace import Span
from embodied.trajectories import Trajectories, join_inputs, to_inputs
from policies.contract import Action, Inputs, Policy
from sim_farm.farm import Farm
from sim_farm.observations import Observations


@dataclass(frozen=True)
class Episode:
    """One ended training episode."""

    env: int
    success: bool
    """Solved at any env step."""
    total_reward: float
    length: int
    """Env steps."""


@dataclass
class Clock:
    """Where the policy worker's own time went, in seconds; they add up to the rollout's wall time."""

    policy: float = 0.0
    """Inference: noise, forward passes."""
    waiting: float = 0.0
    """For the farm."""
    transport: float = 0.0
    """Reading and writing slots, gathering trajectories."""
    physics_busy: float = 0.0
    """Summed over the workers' own clocks; more than the wall time where they work side by side."""
    render_busy: float = 0.0


@dataclass(frozen=True)
class RolloutSummary:
    """What the driver learns of a rollout; the trajectories themselves go to the learner."""

    env_steps: int
    version: int
    """Updates that the acting policy had seen."""
    episodes: tuple[Episode, ...]
    """Those that ended in this rollout, in the order (decision, environment)."""
    clock: Clock
    wall_s: float
    spans: tuple[Span, ...]


@dataclass
class _Step:
    """One decision of one stage, until what became of it is known."""

    envs: np.ndarray
    inputs: Inputs
    action: Action
    mask: np.ndarray
    outcome: Observations | None = None
    finals: list[tuple[int, Inputs]] = field(default_factory=list)


class PolicyWorker:
    """Holds a policy and a farm. `reads` names what of an observation the policy is shown."""

    def __init__(self, policy: Policy, farm: Farm, reads: Sequence[str], seed: int, bootstrap: str) -> None:
        self.policy, self.farm = policy, farm
        self._reads = tuple(reads)
        self._bootstrap = bootstrap
        self._noise = SamplingNoise(seed, policy.noise_dim)
        self._version = 0
        self._trajectories: Trajectories | None = None
        self._now: list[Observations | None] = [None] * farm.spec.stages
        self._return = np.zeros(farm.spec.num_envs)
        self._solved = np.zeros(farm.spec.num_envs, np.bool_)
        self._length = np.zeros(farm.spec.num_envs, np.int64)
        self._arrows = 0
        self._arrow = [0] * farm.spec.stages
        """For each stage the number of the trace's arrow from its observation to the next decision."""

    def begin(self, snapshot: Mapping[str, np.ndarray] | None = None) -> None:
        """Start every environment's first episode, or continue from a snapshot."""
        if snapshot is not None:
            self.farm.restore(snapshot)
            self._return[:] = snapshot["episode_return"]
            self._solved[:] = snapshot["episode_solved"]
            self._length[:] = snapshot["base_step"]
        for stage in range(self.farm.spec.stages):
            self.farm.reset(stage)

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take the learner's parameters and statistics."""
        self.policy.load_state_dict(dict(state))
        self._version = version

    def snapshot(self) -> dict[str, np.ndarray]:
        """Where the environments are, to be given to `begin` of a later worker."""
        return {
            **self.farm.snapshot(),
            "episode_return": self._return.copy(),
            "episode_solved": self._solved.copy(),
        }

    def rollout(self, decisions: int, deadline_s: float = 600.0) -> RolloutSummary:
        """Let every environment take `decisions` decisions; `trajectories` then hands them out.

        Raises what `Farm.collect` raises. The observations that follow the last decision are kept: the next
        rollout begins with them.
        """
        torch.set_num_threads(1)
        begin = time.monotonic_ns()
        clock = Clock()
        spans: list[Span] = []
        stages = range(self.farm.spec.stages)
        steps: list[list[_Step]] = [[] for _ in stages]
        for t in range(decisions + 1):
            for stage in stages:
                seen = self._observe(stage, steps[stage], clock, spans, deadline_s)
                if t < decisions:
                    steps[stage].append(self._decide(stage, seen, clock, spans))
        mark = time.monotonic_ns()
        self._trajectories, episodes = self._gather(steps, clock)
        end = time.monotonic_ns()
        spans.append(Span("policy", "transport", mark, end))
        wall_s = (end - begin) / 1e9
        return RolloutSummary(self._trajectories.env_steps, self._version, episodes, clock, wall_s, tuple(spans))

    def trajectories(self) -> Trajectories:
        """What the last rollout gathered, once."""
        gathered, self._trajectories = self._trajectories, None
        assert gathered is not None, "trajectories are handed out once per rollout"
        return gathered

    def _observe(
        self, stage: int, steps: list[_Step], clock: Clock, spans: list[Span], deadline_s: float
    ) -> Observations:
        """The stage's present observations; collects them unless the last rollout already has."""
        held = self._now[stage]
        if held is not None:
            return held
        mark = time.monotonic_ns()
        seen = self.farm.collect(stage, deadline_s)
        waited = (time.monotonic_ns() - mark) / 1e9
        clock.waiting += waited
        spans.append(Span("policy", "idle", mark, time.monotonic_ns(), {"waiting for stage": stage}))
        self._account(stage, seen, clock, spans)
        if steps:
            mark = time.monotonic_ns()
            steps[-1].outcome = seen
            if len(seen.final.rows):
                steps[-1].finals = self._finals(seen)
            clock.transport += (time.monotonic_ns() - mark) / 1e9
        self._now[stage] = seen
        return seen

    def _decide(self, stage: int, seen: Observations, clock: Clock, spans: list[Span]) -> _Step:
        start = time.monotonic_ns()
        inputs = to_inputs(seen, self._reads, self.farm.spec.episodes)
        noise = torch.from_numpy(self._noise.draw(seen.envs, seen.episode, seen.episode_step))
        action = self.policy.act(inputs, noise)
        acted = time.monotonic_ns()
        spans.append(Span("policy", f"act for stage {stage}", start, acted, flow_from=(self._arrow[stage],)))
        self._now[stage] = None
        self.farm.submit(stage, action.chunk.numpy())
        clock.policy += (acted - start) / 1e9
        submitted = (time.monotonic_ns() - acted) / 1e9
        if self.farm.in_process:  # the ring has just run the workers
            clock.waiting += submitted
        else:
            clock.transport += submitted
        return _Step(seen.envs, inputs, action, seen.active)

    def _finals(self, seen: Observations) -> list[tuple[int, Inputs]]:
        """(environment, final observation) of the ended episodes whose value will be bootstrapped."""
        wanted = seen.truncated if self._bootstrap == "truncated" else seen.truncated | seen.terminated
        inputs = to_inputs(seen.final, self._reads, self.farm.spec.episodes)
        return [
            (int(seen.envs[row]), inputs.rows(torch.tensor([i])))
            for i, row in enumerate(seen.final.rows.tolist())
            if wanted[row]
        ]

    def _gather(self, steps: list[list[_Step]], clock: Clock) -> tuple[Trajectories, tuple[Episode, ...]]:
        """Arrange everything by (decision, environment), and value what comes after the end."""
        mark = time.monotonic_ns()
        count, width = len(steps[0]), self.farm.spec.num_envs
        flat = [steps[s][t] for t in range(count) for s in range(len(steps))]
        envs = torch.from_numpy(np.concatenate([step.envs for step in flat[: len(steps)]]))
        order = torch.argsort(envs)
        every = (torch.arange(count)[:, None] * width + order[None, :]).reshape(-1)

        def arrange(parts: Sequence[Tensor]) -> Tensor:
            return torch.cat(list(parts))[every]

        def outcome(name: str) -> Tensor:
            return arrange([torch.from_numpy(getattr(step.outcome, name)) for step in flat]).reshape(count, width)

        episodes = tuple(e for t in range(count) for e in self._ended([steps[s][t] for s in range(len(steps))]))
        reward = arrange([torch.from_numpy(step.outcome.reward.sum(1)) for step in flat if step.outcome])
        log_prob = arrange([step.action.log_prob for step in flat])
        clock.transport += (time.monotonic_ns() - mark) / 1e9
        mark = time.monotonic_ns()
        final_value = self._final_values([[steps[s][t] for s in range(len(steps))] for t in range(count)])
        last = join_inputs(
            [to_inputs(seen, self._reads, self.farm.spec.episodes) for seen in self._now if seen is not None], order
        )
        last_value = self.policy.value(last)
        clock.policy += (time.monotonic_ns() - mark) / 1e9
        trajectories = Trajectories(
            inputs=join_inputs([step.inputs for step in flat], every),
            trace={key: arrange([step.action.trace[key] for step in flat]) for key in flat[0].action.trace},
            log_prob=log_prob.reshape(count, width, *log_prob.shape[1:]),
            value=arrange([step.action.value for step in flat]).reshape(count, width),
            reward=reward.reshape(count, width).float(),
            executed=outcome("steps"),
            mask=arrange([torch.from_numpy(step.mask) for step in flat]).reshape(count, width),
            terminated=outcome("terminated"),
            truncated=outcome("truncated"),
            final_value=final_value,
            last_value=last_value,
            version=self._version,
        )
        return trajectories, episodes

    def _final_values(self, rows: list[list[_Step]]) -> Tensor:
        """[T, B] the value of each ended episode's own final observation, in one forward pass."""
        values = torch.zeros(len(rows), self.farm.spec.num_envs)
        places = [(t, env, inputs) for t, row in enumerate(rows) for step in row for env, inputs in step.finals]
        if places:
            places.sort(key=lambda place: place[:2])
            found = self.policy.value(join_inputs([p[2] for p in places], torch.arange(len(places))))
            values[[p[0] for p in places], [p[1] for p in places]] = found
        return values

    def _ended(self, row: list[_Step]) -> list[Episode]:
        """Episodes that ended with this decision, in the order of environments; keeps the running sums."""
        ended = []
        for step in row:
            seen = step.outcome
            assert seen is not None
            self._return[seen.envs] += seen.reward.sum(1)
            self._solved[seen.envs] |= seen.success.any(1)
            self._length[seen.envs] += seen.steps
            for env in seen.envs[seen.terminated | seen.truncated].tolist():
                ended.append(Episode(env, bool(self._solved[env]), float(self._return[env]), int(self._length[env])))
                self._return[env] = self._length[env] = 0
                self._solved[env] = False
        return sorted(ended, key=lambda episode: episode.env)

    def _account(self, stage: int, seen: Observations, clock: Clock, spans: list[Span]) -> None:
        """The workers' own clocks, which travel in the slots."""
        spec = self.farm.spec
        times = seen.times_ns
        clock.physics_busy += float((times[:, 1] - times[:, 0]).sum()) / 1e9
        self._arrows += 1
        self._arrow[stage] = self._arrows
        last = int(np.argmax(times[:, [1, 3]].max(1)))
        for i, env in enumerate(seen.envs.tolist()):
            start, end, draw_start, draw_end = times[i].tolist()
            to = (self._arrows,) if i == last else ()
            drawn = draw_end > start
            spans.append(
                Span(f"physics {spec.worker_of(env)}", f"step env {env}", start, end, flow_to=() if drawn else to)
            )
            if drawn:
                clock.render_busy += (draw_end - draw_start) / 1e9
                track = f"render {spec.renderer_of(env)}" if spec.render_workers else f"physics {spec.worker_of(env)}"
                spans.append(Span(track, f"draw env {env}", draw_start, draw_end, flow_to=to))
