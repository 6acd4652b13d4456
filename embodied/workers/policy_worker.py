"""The policy worker: turns a farm's observations into decisions and gathers trajectories.

    for each decision: for each group: collect -> act -> submit

With two groups of environments (the farm's stages) one is simulated while the policy decides for the other. The
rows of the result are in the order (decision, environment) whatever the groups, and noise is keyed by
(environment, episode, step).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.data.assembly import EndedEpisode, EpisodeSums, Step, gather_decisions, gather_wave
from embodied.data.random_streams import SamplingNoise
from embodied.data.trajectories import Trajectories, join_inputs, to_inputs
from embodied.tracing import Span
from embodied.workers.affinity import Affinity
from embodied.workers.devices import decide, value_of
from embodied.workers.offload import Offload, Switch
from policies.contract import Inputs, Policy
from sim_farm.episodes import GroupedEpisodes
from sim_farm.farm import Farm
from sim_farm.observations import Observations


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

    def __add__(self, other: Clock) -> Clock:
        return Clock(*(getattr(self, key) + getattr(other, key) for key in self.__dataclass_fields__))


@dataclass(frozen=True)
class RolloutSummary:
    """What the driver learns of a rollout; the trajectories themselves go to the learner."""

    env_steps: int
    version: int
    """Updates that the acting policy had seen."""
    episodes: tuple[EndedEpisode, ...]
    """Those that ended in this rollout, in the order (decision, environment); of a wave, its own, by environment."""
    clock: Clock
    wall_s: float
    spans: tuple[Span, ...]
    wire_bytes: int = 0
    """To and from physics workers on other machines."""

    def __add__(self, later: RolloutSummary) -> RolloutSummary:
        """Both parts as one."""
        return replace(
            later,
            version=min(self.version, later.version),
            env_steps=self.env_steps + later.env_steps,
            episodes=self.episodes + later.episodes,
            clock=self.clock + later.clock,
            wall_s=self.wall_s + later.wall_s,
            spans=self.spans + later.spans,
            wire_bytes=self.wire_bytes + later.wire_bytes,
        )


class PolicyWorker:
    """Holds a policy and a farm. `reads` names what of an observation the policy is shown."""

    policy: Policy
    _noise: SamplingNoise

    def __init__(
        self,
        policy: Policy | None,
        farm: Farm,
        reads: Sequence[str],
        seed: int,
        bootstrap: str,
        affinity: Affinity | None = None,
    ) -> None:
        """`policy` None: it will be given one by `share`."""
        self.farm, self._seed = farm, seed
        self._reads = tuple(reads)
        self._bootstrap = bootstrap
        self._affinity = affinity or Affinity()
        self._offload: Offload | None = None
        self._version = 0
        self._trajectories: Trajectories | None = None
        self._steps: list[list[Step]] = [[] for _ in range(farm.spec.stages)]
        self._now: list[Observations | None] = [None] * farm.spec.stages
        self._wave = 0
        """The next wave of episodes to be rolled out, where rollouts are of whole episodes."""
        self._sums = EpisodeSums(farm.spec.num_envs)
        self._ended: list[tuple[int, int, EndedEpisode]] = []
        """(number of the environment's episode, number of the decision, episode) that no summary has told yet."""
        self._wired = 0
        self._arrows = 0
        self._arrow = [0] * farm.spec.stages
        """For each stage the number of the trace's arrow from its observation to the next decision."""
        if policy is not None:
            self.share(policy)

    def begin(self, snapshot: Mapping[str, np.ndarray] | None = None, rest: bool = False) -> None:
        """Start every environment's first episode, or continue from a snapshot; with `rest`, at the next wave."""
        if rest:
            self._wave = 0 if snapshot is None else int(snapshot["base_episode"].min())
            self.farm.hold(self._wave)
        if snapshot is not None:
            self.farm.restore(snapshot)
            self._sums.total[:] = snapshot["episode_return"]
            self._sums.solved[:] = snapshot["episode_solved"]
            self._sums.length[:] = snapshot["base_step"]
        for stage in range(self.farm.spec.stages):
            self.farm.reset(stage)

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        """Take what the learner has trained: parameters and statistics."""
        unknown = self.policy.load_state_dict(dict(state), strict=False).unexpected_keys
        assert not unknown, f"weights of another policy: {unknown}"
        self._version = version

    def share(self, policy: Policy) -> None:
        """Act with the learner's own policy, which is in this process: nothing is copied any more."""
        self.policy = policy
        self._noise = SamplingNoise(self._seed, policy.noise_dim)

    def at_version(self, version: int) -> None:
        """The shared policy has seen so many updates."""
        self._version = version

    def unload(self, spill: Path) -> Switch:
        """Let the policy leave the device's memory; `load_back` before the next rollout."""
        self._offload = Offload(spill, self.policy, None)
        return self._offload.unload()

    def load_back(self) -> Switch:
        """Return to the device's memory."""
        return self._offload.load() if self._offload is not None else Switch(0, 0.0)

    def unload_renderers(self, deadline_s: float) -> Switch:
        """Let the farm's renderers and scene replicas leave the memory; `load_renderers` before the next rollout."""
        left = self.farm.unload_renderers(deadline_s)
        return Switch(left.bytes, left.seconds)

    def load_renderers(self, deadline_s: float) -> Switch:
        """Have the farm's renderers back."""
        back = self.farm.load_renderers(deadline_s)
        return Switch(back.bytes, back.seconds)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Where the environments are, to be given to `begin` of a later worker."""
        return {
            **self.farm.snapshot(),
            "episode_return": self._sums.total.copy(),
            "episode_solved": self._sums.solved.copy(),
        }

    def rollout(self, decisions: int, deadline_s: float = 600.0, after: RolloutSummary | None = None) -> RolloutSummary:
        """Let every environment take `decisions` decisions; `trajectories` then hands them out.

        `after`: another task's rollout, whose end is waited for by whoever passes it on.

        Raises what `Farm.collect` raises. The observations that follow the last decision are kept: the next
        rollout begins with them.
        """
        with self._affinity.applied():
            return self._rollout(decisions, deadline_s)

    def rollout_wave(
        self, waves: int, deadline_s: float = 600.0, after: RolloutSummary | None = None
    ) -> RolloutSummary:
        """Go on until every environment has ended one more episode; `trajectories` then hands these out.

        Environments that are done early go on, until they have ended `waves` episodes beyond the last wave, and rest.
        What they did beyond this wave is kept for the next calls.
        """
        with self._affinity.applied():
            self._wave += 1
            return self._rollout_wave(self._wave - 1, self._wave - 1 + waves, deadline_s)

    def trajectories(self) -> Trajectories:
        """What the last rollout gathered, once."""
        gathered, self._trajectories = self._trajectories, None
        assert gathered is not None, "trajectories are handed out once per rollout"
        return gathered

    def _rollout(self, decisions: int, deadline_s: float) -> RolloutSummary:
        begin = time.monotonic_ns()
        clock, spans = Clock(), list[Span]()
        stages = range(self.farm.spec.stages)
        self._steps = [[] for _ in stages]
        for t in range(decisions + 1):
            for stage in stages:
                seen = self._observe(stage, clock, spans, deadline_s)
                if t < decisions:
                    self._decide(stage, seen, clock, spans)
        mark = time.monotonic_ns()
        order = torch.argsort(torch.from_numpy(np.concatenate([self.farm.envs_of(s) for s in stages])))
        last = join_inputs([self._inputs(seen) for seen in self._now if seen is not None], order)
        self._trajectories = gather_decisions(
            self._steps, self.farm.spec.num_envs, partial(value_of, self.policy), last, self._version
        )
        places = sorted(self._ended, key=lambda place: (place[1], place[2].env))
        self._ended = []
        return self._summary(begin, mark, clock, spans, [episode for _, _, episode in places])

    def _rollout_wave(self, wave: int, limit: int, deadline_s: float) -> RolloutSummary:
        begin = time.monotonic_ns()
        clock, spans = Clock(), list[Span]()
        stages = range(self.farm.spec.stages)
        seen = [self._observe(stage, clock, spans, deadline_s) for stage in stages]
        if not any(now.active.any() for now in seen):  # all rest at the last limit
            self.farm.hold(limit)
            self._now = [None] * len(stages)
            for stage in stages:
                self.farm.reset(stage)
        open_stages = set(stages)
        while open_stages:
            for stage in stages:
                now = self._observe(stage, clock, spans, deadline_s)
                if (now.episode > wave).all():
                    open_stages.discard(stage)
                if open_stages and now.active.any():
                    self._decide(stage, now, clock, spans)
        for stage in stages:  # a group that went on may have been submitted: what it did is known before the end
            self._observe(stage, clock, spans, deadline_s)
        mark = time.monotonic_ns()
        episodes = self.farm.spec.episodes
        assert isinstance(episodes, GroupedEpisodes), "waves are of episodes that come in groups"
        group = torch.tensor([episodes.group(env, wave) for env in range(self.farm.spec.num_envs)])
        self._trajectories = gather_wave(
            self._steps, wave, self.farm.spec.num_envs, partial(value_of, self.policy), group, self._version
        )
        self._steps = [[step for step in steps if (step.episode[step.rows] > wave).any()] for steps in self._steps]
        # How far environments went beyond the wave is the plan's affair: those episodes are told with their own wave.
        ended = sorted((e for number, _, e in self._ended if number == wave), key=lambda episode: episode.env)
        self._ended = [place for place in self._ended if place[0] > wave]
        return self._summary(begin, mark, clock, spans, ended)

    def _summary(
        self, begin: int, mark: int, clock: Clock, spans: list[Span], ended: Sequence[EndedEpisode]
    ) -> RolloutSummary:
        end = time.monotonic_ns()
        clock.transport += (end - mark) / 1e9
        spans.append(Span("policy", "transport", mark, end))
        assert self._trajectories is not None
        wall_s = (end - begin) / 1e9
        wired, self._wired = self.farm.wire_bytes - self._wired, self.farm.wire_bytes
        steps = self._trajectories.env_steps
        return RolloutSummary(steps, self._version, tuple(ended), clock, wall_s, tuple(spans), wired)

    def _inputs(self, seen: Observations) -> Inputs:
        return to_inputs(seen, self._reads, self.farm.spec.episodes, self.policy.spec.cameras)

    def _observe(self, stage: int, clock: Clock, spans: list[Span], deadline_s: float) -> Observations:
        """The stage's present observations; collects them unless that was done already."""
        held = self._now[stage]
        if held is not None:
            return held
        mark = time.monotonic_ns()
        seen = self.farm.collect(stage, deadline_s)
        waited = (time.monotonic_ns() - mark) / 1e9
        clock.waiting += waited
        spans.append(Span("policy", "idle", mark, time.monotonic_ns(), {"waiting for stage": stage}))
        self._account(stage, seen, clock, spans)
        steps = self._steps[stage]
        if steps and steps[-1].outcome is None:
            mark = time.monotonic_ns()
            steps[-1].outcome = seen
            if len(seen.final.rows):
                steps[-1].finals = self._finals(seen)
            number = dict(zip(seen.envs.tolist(), steps[-1].episode.tolist(), strict=True))
            self._ended += [(number[episode.env], len(steps), episode) for episode in self._sums.add(seen)]
            clock.transport += (time.monotonic_ns() - mark) / 1e9
        self._now[stage] = seen
        return seen

    def _decide(self, stage: int, seen: Observations, clock: Clock, spans: list[Span]) -> None:
        """Act for the environments of the group that have an episode, and have the farm execute it."""
        if not seen.active.any():
            return
        start = time.monotonic_ns()
        rows = np.flatnonzero(seen.active)
        inputs = self._inputs(seen)
        if len(rows) < len(seen.envs):
            inputs = inputs.rows(torch.from_numpy(rows))
        noise = torch.from_numpy(self._noise.draw(seen.envs[rows], seen.episode[rows], seen.episode_step[rows]))
        action = decide(self.policy, inputs, noise)
        acted = time.monotonic_ns()
        spans.append(Span("policy", f"act for stage {stage}", start, acted, flow_from=(self._arrow[stage],)))
        self._now[stage] = None
        chunks = action.chunk.numpy()
        if len(rows) < len(seen.envs):
            chunks = np.zeros((len(seen.envs), *chunks.shape[1:]), np.float32)
            chunks[rows] = action.chunk.numpy()
        self.farm.submit(stage, chunks)
        clock.policy += (acted - start) / 1e9
        submitted = (time.monotonic_ns() - acted) / 1e9
        if self.farm.in_process:  # the ring has just run the workers
            clock.waiting += submitted
        else:
            clock.transport += submitted
        self._steps[stage].append(Step(seen.envs, rows, seen.episode, inputs, action))

    def _finals(self, seen: Observations) -> list[tuple[int, Inputs]]:
        """(environment, final observation) of the ended episodes whose value will be bootstrapped."""
        if self._bootstrap == "never":
            return []
        wanted = seen.truncated if self._bootstrap == "truncated" else seen.truncated | seen.terminated
        inputs = to_inputs(seen.final, self._reads, self.farm.spec.episodes, self.policy.spec.cameras)
        return [
            (int(seen.envs[row]), inputs.rows(torch.tensor([i])))
            for i, row in enumerate(seen.final.rows.tolist())
            if wanted[row]
        ]

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
