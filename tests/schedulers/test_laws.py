"""The closed cost laws against queues of servers played event by event."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from schedulers import (
    MODES,
    Cluster,
    Component,
    DeviceRange,
    Edge,
    Mode,
    Node,
    Phase,
    Placement,
    Plan,
    Profile,
    SearchOptions,
    Together,
    Workflow,
    alternatives,
    expected_seconds,
    predict,
    simulate,
    validate,
)
from schedulers.cost.laws import loop_completion, loop_seconds, revisiting_loop, stream_seconds
from tests.schedulers.baselines import SMALL
from tests.schedulers.instances import TWO_CORES, measured, ppo, ppo_profile, random_problem, some


def played_pipeline(times: dict[str, float], edges: Sequence[tuple[str, str]], parts: int) -> float:
    """A reference of its own: first come, first served, one server a node."""
    done: dict[tuple[str, int], float] = {}
    free = dict.fromkeys(times, 0.0)
    waiting = {(name, k) for name in times for k in range(parts)}
    while waiting:
        ready = [
            (max([done[source, k] for source, target in edges if target == name], default=0.0), k, name)
            for name, k in waiting
            if all((source, k) in done for source, target in edges if target == name)
        ]
        when, k, name = min(ready)
        free[name] = done[name, k] = max(when, free[name]) + times[name]
        waiting.remove((name, k))
    return max(done.values())


def played_loop(times: Sequence[float], groups: int, rounds: int) -> list[list[float]]:
    """End of every group's every round where each server takes whoever comes first."""
    queue = [(0.0, group, 0, 0) for group in range(groups)]
    free = [0.0] * len(times)
    ends = [[0.0] * rounds for _ in range(groups)]
    while queue:
        queue.sort()
        when, group, server, turn = queue.pop(0)
        end = free[server] = max(when, free[server]) + times[server]
        if server + 1 < len(times):
            queue.append((end, group, server + 1, turn))
        else:
            ends[group][turn] = end
            if turn + 1 < rounds:
                queue.append((end, group, 0, turn + 1))
    return ends


@pytest.mark.parametrize("seed", some(6, of=60))
def test_pipeline_law_equals_the_queues(seed: int) -> None:
    random = np.random.default_rng(seed)
    count, parts = int(random.integers(1, 7)), int(random.integers(1, 9))
    times = {f"v{i}": float(random.uniform(0.01, 1)) for i in range(count)}
    edges = [(f"v{i}", f"v{j}") for j in range(count) for i in range(j) if random.random() < 0.5]
    components = {name: measured("cores", {(1, 1): seconds}) for name, seconds in times.items()}
    flows = tuple(Edge(source, target, "parts", "micro_batch") for source, target in edges)
    workflow = Workflow("pipeline", tuple(Component(name) for name in times), flows, (), parts)
    placements = tuple(Placement((name,), (DeviceRange("node0", "cores", i, 1),)) for i, name in enumerate(times))
    plan = Plan("pipeline", "disaggregated", (Phase(placements, 1),))
    predicted = predict(plan, workflow, Profile("pipeline", {}, components)).iteration_s
    assert predicted == pytest.approx(played_pipeline(times, edges, parts), rel=1e-12)


@pytest.mark.parametrize("seed", some(6, of=80))
def test_loop_law_equals_the_queues(seed: int) -> None:
    random = np.random.default_rng(seed)
    servers, groups, rounds = int(random.integers(1, 5)), int(random.integers(1, 6)), int(random.integers(1, 20))
    times = [float(random.uniform(0.01, 1)) for _ in range(servers)]
    played = played_loop(times, groups, rounds)
    assert loop_seconds(times, groups, rounds) == pytest.approx(max(map(max, played)), rel=1e-12)
    for group in range(groups):
        for turn in range(rounds):
            law = loop_completion(sum(times), max(times), groups, turn + 1, group)
            assert law == pytest.approx(played[group][turn], rel=1e-12)


def test_loop_law_is_the_published_one_for_two_servers() -> None:
    te, tp, groups, rounds = 0.3, 0.5, 3, 7
    law = te + tp + (groups - 1) * max(te, tp) + (rounds - 1) * max(te + tp, groups * te, groups * tp)
    assert loop_seconds([te, tp], groups, rounds) == pytest.approx(law, rel=1e-15)


@pytest.mark.parametrize("seed", some(6, of=20))
def test_a_loop_in_which_each_server_comes_once_is_a_case_of_the_shared_one(seed: int) -> None:
    random = np.random.default_rng(seed)
    times, groups = list(random.uniform(0.1, 1, size=3)), int(random.integers(1, 4))
    assert revisiting_loop(times, [0, 1, 2], groups, 9)[-1][-1] == pytest.approx(loop_seconds(times, groups, 9))
    one = revisiting_loop(times, [0, 1, 0], groups, 9)[-1][-1]
    load = max(times[0] + times[2], times[1])
    assert one >= 9 * max(sum(times), groups * load) - 1e-9


@pytest.mark.parametrize("seed", some(6, of=30))
def test_tail_law_equals_the_recursion(seed: int) -> None:
    random = np.random.default_rng(seed)
    arrivals = np.sort(random.uniform(0, 10, size=int(random.integers(1, 12))))
    times = random.uniform(0.1, 2, size=3)
    done = np.zeros(3)
    for when in arrivals:
        for server, time in enumerate(times):
            done[server] = max(when if server == 0 else done[server - 1], done[server]) + time
    deliveries = list(enumerate(arrivals, start=1))
    found = stream_seconds(deliveries, times.sum(), times.max(), len(arrivals))
    assert found == pytest.approx(done[-1], rel=1e-12)


@pytest.mark.parametrize("seed", some(6, of=60))
def test_prediction_equals_simulation_of_the_best_plans(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2)
    for plan in alternatives(workflow, profile, cluster, search=SMALL).values():
        played = simulate(plan, workflow, profile, cluster)
        assert predict(plan, workflow, profile, cluster).iteration_s == pytest.approx(played.seconds, rel=1e-9)
        assert max(event.end_s for event in played.events) == pytest.approx(played.seconds, rel=1e-9)


@pytest.mark.parametrize("free", [("physics",), ("render",), ("policy",), ("physics", "render")])
@pytest.mark.parametrize("mode", MODES)
def test_a_component_that_takes_no_time_leaves_that_of_the_others(mode: Mode, free: tuple[str, ...]) -> None:
    """A line through two measured batches is cut off at zero: steep ones say so of small batches."""
    workflow, profile = ppo(), ppo_profile()
    nothing = measured("cores", {(1, 1): 0.0})
    profile = replace(profile, components={**profile.components, **dict.fromkeys(free, nothing)})
    plan = alternatives(workflow, profile, TWO_CORES)[mode]
    played = simulate(plan, workflow, profile)
    assert played.seconds == pytest.approx(predict(plan, workflow, profile).iteration_s, rel=1e-9)
    assert {event.component for event in played.events if event.end_s > event.start_s}.isdisjoint(free)
    assert expected_seconds(plan, workflow, profile) == pytest.approx(played.seconds, rel=1e-9)
    varied = {name: replace(component, variation=1e-3) for name, component in profile.components.items()}
    drawn = expected_seconds(plan, workflow, replace(profile, components=varied))
    assert drawn == pytest.approx(played.seconds, rel=0.01), "what the choice between modes goes by"


@pytest.mark.parametrize("free", [(), ("physics",), ("physics", "render", "policy")])
def test_times_measured_together_are_simulated_as_a_whole(free: tuple[str, ...]) -> None:
    workflow, profile = ppo(), ppo_profile()
    nothing = measured("cores", {(1, 1): 0.0})
    both = Together(("physics", "render", "policy"), 16, 2, 1, 0.5, 0.5, 0.5)
    profile = replace(profile, components={**profile.components, **dict.fromkeys(free, nothing)}, together=(both,))
    everything = Placement(workflow.names, (DeviceRange("node0", "cores", 0, 2),))
    plan = Plan("ppo", "collocated", (Phase((everything,), 16),))
    played = simulate(plan, workflow, profile).seconds
    assert played == pytest.approx(predict(plan, workflow, profile).iteration_s, rel=1e-9)
    assert played > 20 * 0.5


def test_transfers_between_nodes_cost_what_the_link_says() -> None:
    workflow, profile = ppo(), replace(ppo_profile(), transfers={"physics>render": 1e3, "learner>sync": 1e3})
    cluster = Cluster((Node("a", 1), Node("b", 1)), link_bytes_per_s=1e6)

    def on(node: str, *names: str) -> Placement:
        return Placement(names, (DeviceRange(node, "cores", 0, 1),))

    rest = ("render", "policy", "advantage", "learner", "sync")
    plan = Plan("ppo", "disaggregated", (Phase((on("a", "physics"), on("b", *rest)), 16),))
    near = predict(plan, workflow, profile).iteration_s
    far = predict(plan, workflow, profile, cluster).iteration_s
    assert far - near == pytest.approx(20 * 16 * 1e3 / 1e6)  # Once a round; learner and sync share a node.
    assert simulate(plan, workflow, profile, cluster).seconds == pytest.approx(far)


@pytest.mark.parametrize("seed", some(6, of=20))
def test_one_step_ahead_is_played_as_predicted(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, count=4)
    found = alternatives(workflow, profile, cluster, ahead=True, search=SMALL)
    plan = found.get("disaggregated")
    if plan is not None:
        validate(plan, workflow, cluster, profile)
        played = simulate(plan, workflow, profile, cluster).seconds
        assert plan.prediction is not None
        assert plan.prediction.iteration_s == pytest.approx(played, rel=1e-9)


def test_no_two_events_of_a_timeline_use_a_device_at_once() -> None:
    workflow, profile = ppo(flow="micro_batch"), ppo_profile()
    for mode in MODES:
        plan = alternatives(workflow, profile, TWO_CORES)[mode]
        events = simulate(plan, workflow, profile, seed=3, variation=0.3).events
        for track in {event.track for event in events}:
            mine = sorted((event.start_s, event.end_s) for event in events if event.track == track)
            assert all(after[0] >= before[1] - 1e-9 for before, after in zip(mine, mine[1:], strict=False))


def test_noise_costs_a_balanced_chain_a_few_percent() -> None:
    """Published for a chain of three: 0.3, 2.2 and 6.8% at coefficients of variation of 0.1, 0.3 and 0.6."""
    names = ("a", "b", "c")
    edges = tuple(Edge(x, y, "parts", "micro_batch") for x, y in zip(names, names[1:], strict=False))
    workflow = Workflow("chain", tuple(Component(name) for name in names), edges, (), 64)
    profile = Profile("chain", {}, {name: measured("cores", {(1, 1): 0.01}) for name in names})
    plan = alternatives(workflow, profile, Cluster((Node("node0", 3),)), search=SearchOptions(micro_batches=(32,)))[
        "disaggregated"
    ]
    constant = simulate(plan, workflow, profile).seconds
    costs = {
        cv: np.mean([simulate(plan, workflow, profile, seed=s, variation=cv).seconds for s in range(30)]) / constant - 1
        for cv in (0.1, 0.3, 0.6)
    }
    assert 0 < costs[0.1] < costs[0.3] < costs[0.6] < 0.25


def test_long_tails_delay_a_learner_that_streams() -> None:
    workflow, profile = ppo(flow="micro_batch"), ppo_profile(learner=2.0)
    plan = alternatives(workflow, profile, TWO_CORES)["disaggregated"]
    tailed = replace(profile, arrivals=(0.1, 0.2, 0.3, 1.0))
    even = replace(profile, arrivals=(0.25, 0.5, 0.75, 1.0))
    assert predict(plan, workflow, tailed).iteration_s == pytest.approx(simulate(plan, workflow, tailed).seconds)
    assert predict(plan, workflow, even).iteration_s == pytest.approx(simulate(plan, workflow, even).seconds)
