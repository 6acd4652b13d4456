"""Does pipelining pay what the law says? `python benchmarks/pipelining.py --json FILE`.

Simulation on one core, the policy on another, with one and with two groups of environments. The policy is chosen so
that both take about as long, where two groups gain most. Predicted: the loop's law from times that were measured with
one group, for all and for half of the environments. Nothing else should run on the machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro

from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import start_run
from embodied.execution.session import Session, open_session
from embodied.planning.profiler import Measured, decided_s, looped_s, measure, waited_s
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write
from schedulers.cost.laws import loop_seconds

POLICIES: tuple[tuple[tuple[int, int, int], int], ...] = (
    ((64, 128, 192), 2), ((96, 160, 256), 2), ((128, 256, 384), 2), ((160, 320, 512), 3),
)  # fmt: skip
"""(channels, extra layers) from light to heavy."""


@dataclass(frozen=True)
class Pipelining:
    """One against two groups of environments."""

    config: str = "pushcube_rgb"
    json: Path | None = None
    """Write the figures to this file."""


def main(settings: Pipelining) -> None:
    base = _with(load_config(settings.config), POLICIES[0])
    with open_session(base) as session, tempfile.TemporaryDirectory() as folder:
        bench = _Bench(session, Path(folder))
        chosen = min(POLICIES, key=lambda policy: bench.imbalance(_with(base, policy)))
        config = _with(base, chosen)
        half = _envs(config, config.env.num_envs // 2)
        one, small = bench.run(config, 1), bench.run(half, 1)
        two = bench.run(config, 2)
    rounds = one.rounds
    predicted_one = loop_seconds([_farm(one), _policy(one)], 1, rounds)
    predicted_two = loop_seconds([_farm(small), _policy(small)], 2, rounds)
    measured_one, measured_two = fmean(one.per_round(looped_s)), fmean(two.per_round(looped_s))
    predicted, measured = predicted_one / predicted_two, measured_one / measured_two
    figures: dict[str, Any] = {
        "task": config.env.task,
        "policy": {"channels": chosen[0], "extra_layers": chosen[1]},
        "simulation_s": _farm(one),
        "inference_s": _policy(one),
        "round_one_group_s": measured_one,
        "round_two_groups_s": measured_two,
        "predicted_speed_up": predicted,
        "measured_speed_up": measured,
        "share_of_predicted": measured / predicted,
    }
    show_and_write(figures, settings.json)


@dataclass
class _Bench:
    session: Session
    folder: Path

    def run(self, config: Config, groups: int) -> Measured:
        with self._workers(config, groups) as workers:
            return measure(workers)

    def imbalance(self, config: Config) -> float:
        """How far from 1 the ratio of inference to simulation is."""
        found = self.run(config, 1)
        ratio = _policy(found) / _farm(found)
        return max(ratio, 1 / ratio)

    @contextmanager
    def _workers(self, config: Config, groups: int) -> Iterator[Any]:
        first, second = self.session.cores[:2]
        affinity = Affinity((second,), 1)
        farm = FarmAssignment(groups, (first,), (HERE,))
        place = Assignment("hybrid", (farm,), {"policy": (affinity,), "learner": (affinity,)}, hosts=(0,))
        with start_run(RunSpec.of(config), self.folder, self.session, place) as workers:
            yield workers


def _farm(measured: Measured) -> float:
    return fmean(measured.per_round(waited_s))


def _policy(measured: Measured) -> float:
    return fmean(measured.per_round(decided_s))


def _with(config: Config, policy: tuple[tuple[int, int, int], int]) -> Config:
    data = config.model_dump(mode="json")
    data["policy"]["options"] |= {"channels": list(policy[0]), "extra_layers": policy[1]}
    # Short iterations: only the loop is looked at.
    data["optim"] |= {"epochs": 1}
    data["rollout"] |= {"decisions": 8}
    data["env"] |= {"num_envs": 8}
    return parse_config(data, "benchmarks/pipelining.py")


def _envs(config: Config, envs: int) -> Config:
    return config.model_copy(update={"env": config.env.model_copy(update={"num_envs": envs})})


if __name__ == "__main__":
    main(tyro.cli(Pipelining, description=__doc__))
