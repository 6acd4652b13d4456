"""Plans executed by real Ray actors that occupy their devices for the profiled times: predicted against measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

from schedulers import MODES, Plan, Profile, Workflow, alternatives
from schedulers.cost.prediction import phase_costs, problem_of
from tests.schedulers.instances import TWO_CORES, ppo, ppo_profile

pytestmark = pytest.mark.slow


class Device:
    """Does one thing at a time, in the order of its calls: the lock that components on one device share."""

    def occupy(self, seconds: float, *_needs: object) -> None:
        time.sleep(seconds)


@pytest.fixture(scope="module")
def devices() -> Iterator[list[Any]]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    remote: Any = ray.remote(Device)
    actors = [remote.options(num_cpus=0).remote() for _ in range(2)]
    ray.get([actor.occupy.remote(0.0) for actor in actors])
    yield actors
    ray.shutdown()


def run(plan: Plan, workflow: Workflow, profile: Profile, devices: list[Any]) -> float:
    """Seconds of one iteration."""
    problem = problem_of(plan, workflow, profile)
    begun = time.perf_counter()
    for phase in plan.phases:
        costs = phase_costs(plan, phase, problem)
        model = costs.model
        group: list[Any] = [None] * (model.loops[0].groups if model.loops else 0)
        delivered: dict[tuple[int, int], Any] = {}
        for turn in range(model.loops[0].steps if model.loops else 0):
            for visit, seconds in zip(model.visits, costs.visits, strict=True):
                for s in range(len(group)):
                    group[s] = devices[visit.placement].occupy.remote(seconds, group[s])
            delivered |= {(turn + 1, s): group[s] for s in range(len(group))}
        done: dict[tuple[int, int], Any] = {}
        for i, stage in enumerate(model.stages):
            for part in range(stage.parts):
                needs = [
                    done[source, model.stages[source].parts - 1 if barrier else part]
                    for source, target, barrier in model.dependencies
                    if target == i
                ]
                if "loop" in model.starts[i]:
                    needs += group
                if "stream" in model.starts[i]:
                    _, h, s, _ = model.deliveries[part]
                    needs.append(delivered[h, s])
                done[i, part] = devices[stage.placement].occupy.remote(costs.stages[i], *needs)
        ray.get([*done.values(), *(ref for ref in group if ref is not None)])
    return time.perf_counter() - begun


@pytest.mark.parametrize("flow", ["barrier", "micro_batch"])
def test_measured_times_follow_predictions(
    flow: str, devices: list[Any], record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    workflow = ppo(steps=12, flow=flow)
    profile = ppo_profile(physics=0.05, policy=0.05, learner=0.6)
    found = alternatives(workflow, profile, TWO_CORES)
    predicted, measured = [], []
    for mode in MODES:
        plan = found[mode]
        assert plan.prediction is not None
        predicted.append(plan.prediction.iteration_s)
        measured.append(min(run(plan, workflow, profile, devices) for _ in range(2)))
        error = measured[-1] / predicted[-1] - 1
        record_property(f"{mode}_error", error)
        with capsys.disabled():
            print(f"\n{flow} {mode}: predicted {predicted[-1]:.3f} s, measured {measured[-1]:.3f} s ({error:+.1%})")
    ratios = np.array(measured) / np.array(predicted)
    assert (ratios > 0.95).all() and (ratios < 1.25).all()
    order = np.argsort(predicted)
    for fast, slow in zip(order, order[1:], strict=False):
        if predicted[slow] > predicted[fast] * 1.1:
            assert measured[slow] > measured[fast]
