"""One plan for a run of several tasks: against every plan there is, and what must hold of it."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schedulers import (
    MODES,
    Cluster,
    Component,
    DeviceRange,
    Edge,
    Loop,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Profile,
    SearchOptions,
    Workflow,
    alternatives,
    chrome_trace,
    load,
    plan,
    predict,
    predict_sequential,
    save,
    simulate,
    to_data,
    validate,
)
from schedulers.cost.prediction import problem_of
from schedulers.explain import explain_tasks
from schedulers.search import several_tasks
from schedulers.workflow import graph_of
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import (
    NEAR,
    libero_tasks,
    lowest,
    measured,
    ppo,
    ppo_profile,
    random_problem,
    random_tasks,
    seconds,
    some,
    tasks,
)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", some(3, 60))
def test_two_tasks_are_planned_as_by_exhaustive_search(seed: int, memory: bool) -> None:
    workflow, profile, cluster = random_tasks(seed, gpu=seed % 2 == 0, memory=memory)
    everything = Exhaustive(workflow, profile, cluster)
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = everything.best(mode)
        assert (mode in found) == (best < math.inf)
        if mode in found:
            assert best * (1 - 1e-9) <= seconds(found[mode]) <= best * NEAR
            assert lowest(found[mode]) <= best * (1 + 1e-9)
            assert seconds(found[mode]) <= max(lowest(found[mode]), best) * NEAR
            validate(found[mode], workflow, cluster, profile)
            assert simulate(found[mode], workflow, profile, cluster).seconds == pytest.approx(seconds(found[mode]))


@pytest.mark.parametrize("seed", some(6, 40))
def test_step_by_step_comes_near_and_its_bound_is_honest(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    workflow, profile, cluster = random_tasks(seed, gpu=seed % 2 == 0)
    exact = alternatives(workflow, profile, cluster, search=SMALL)
    monkeypatch.setattr(several_tasks, "MAX_CANDIDATES", 1)
    for mode, found in alternatives(workflow, profile, cluster, search=SMALL).items():
        assert lowest(found) <= seconds(exact[mode]) * (1 + 1e-9)
        assert seconds(exact[mode]) <= seconds(found) * NEAR <= seconds(exact[mode]) * 1.1
        validate(found, workflow, cluster, profile)


@pytest.mark.slow
def test_ten_tasks_are_planned_with_a_small_certified_gap() -> None:
    workflow, profile = libero_tasks(10)
    best = plan(workflow, profile, Cluster((Node("node0", 16, 1),)), explain=False)
    validate(best, workflow, Cluster((Node("node0", 16, 1),)), profile)
    assert seconds(best) <= lowest(best) * 1.02
    # Eight environments divide among eight cores, so that half of the tasks share each half of sixteen.
    loops = [placement for placement in best.phases[0].placements if placement.pool == "cores"]
    assert sorted(placement.count for placement in loops) == [8, 8]
    assert best.groups == (1,) * 10


@pytest.mark.slow
def test_ten_tasks_that_do_not_fit_beside_the_learner_are_unloaded_or_refused() -> None:
    workflow, profile = libero_tasks(10)
    sizes = {"physics": 0.5e9, "render": 1e9, "policy": 16e9, "learner": 70e9}
    components = {
        name: replace(component, resident_bytes=sizes[name.split("-")[0]], unload_s=1.0, load_s=1.0)
        for name, component in profile.components.items()
    }
    heavy = replace(profile, components=components)
    roomy = Cluster((Node("node0", 16, 1, memory_bytes=256e9, accelerator_bytes=80e9),))
    best = plan(workflow, heavy, roomy, explain=False)
    validate(best, workflow, roomy, heavy)
    assert best.unload and best.mode != "disaggregated"
    assert seconds(best) <= lowest(best) * 1.1
    tight = Cluster((Node("node0", 16, 1, memory_bytes=2e9, accelerator_bytes=80e9),))
    with pytest.raises(PlanError, match="fits in the cluster's memory"):
        plan(workflow, heavy, tight, explain=False)


def test_tasks_that_are_alike_are_planned_alike() -> None:
    workflow, profile = libero_tasks(2)
    best = plan(workflow, profile, Cluster((Node("node0", 8, 1),)))
    cores = {name: p.count for phase in best.phases for p in phase.placements for name in p.components}
    assert cores["physics"] == cores["physics-1"] and cores["render"] == cores["render-1"]


@pytest.mark.parametrize("seed", some(4, 20))
def test_the_order_of_declarations_and_the_unit_of_time_change_nothing(seed: int) -> None:
    workflow, profile, cluster = random_tasks(seed, gpu=seed % 2 == 0)
    swapped = replace(workflow, components=workflow.components[::-1], edges=workflow.edges[::-1])
    slower = replace(
        profile,
        components={
            name: replace(c, points=tuple(replace(p, seconds=p.seconds * 3) for p in c.points))
            for name, c in profile.components.items()
        },
    )
    once = alternatives(workflow, profile, cluster, search=SMALL)
    other = alternatives(swapped, profile, cluster, search=SMALL)
    thrice = alternatives(workflow, slower, cluster, search=SMALL)
    for mode, found in once.items():
        assert seconds(other[mode]) == pytest.approx(seconds(found), rel=NEAR - 1)
        assert seconds(thrice[mode]) == pytest.approx(3 * seconds(found), rel=NEAR - 1)


# --- together, and one after the other

OWN = Cluster((Node("node0", 8, 1),))


def on(pool: Any, first: int, count: int = 1) -> tuple[DeviceRange, ...]:
    return (DeviceRange("node0", pool, first, count),)


def own_cores(groups: tuple[int, int]) -> Plan:
    places = (
        Placement(("physics", "render"), on("cores", 0, 2)),
        Placement(("physics-1",), on("cores", 2, 2)),
        Placement(("render-1",), on("cores", 4, 4)),
        Placement(("policy",), on("accelerators", 0)),
    )
    last = Phase((Placement(("learner",), on("accelerators", 0)),), 16)
    return Plan("tasks", "hybrid", (Phase(places, 16), last), groups)


@pytest.mark.parametrize("groups", [(1, 1), (1, 2), (2, 1), (2, 4)])
@pytest.mark.parametrize("policy_s", [0.01, 0.3, 2.0])
def test_tasks_on_cores_of_their_own_are_never_slower_together(groups: tuple[int, int], policy_s: float) -> None:
    workflow, profile = libero_tasks(2, policy_s)
    validate(own_cores(groups), workflow, OWN, profile)
    together = predict(own_cores(groups), workflow, profile, OWN)
    after = predict_sequential(own_cores(groups), workflow, profile, OWN)
    assert together.iteration_s <= after.iteration_s
    assert together.phases_s[1] == after.phases_s[1]


def test_one_after_the_other_is_the_sum_of_the_tasks_alone() -> None:
    workflow, profile = libero_tasks(2)
    slow = replace(profile.components["physics-1"], contention=1.2)
    profile = replace(profile, components={**profile.components, "physics-1": slow})
    total = 0.0
    for number, groups in enumerate((1, 2)):
        names = graph_of(workflow).loops[number]
        alone = Workflow(
            "tasks",
            tuple(component for component in workflow.components if component.name in names),
            tuple(edge for edge in workflow.edges if {edge.source, edge.target} <= set(names)),
            (replace(workflow.loops[number], items=0),),
            8,
        )
        places = tuple(
            replace(p, components=tuple(name for name in p.components if name in names))
            for p in own_cores((1, 2)).phases[0].placements
            if set(p.components) & set(names)
        )
        total += predict(Plan("tasks", "hybrid", (Phase(places, 8),), (groups,)), alone, profile, OWN).iteration_s
    assert predict_sequential(own_cores((1, 2)), workflow, profile, OWN).phases_s[0] == pytest.approx(total)


@pytest.mark.parametrize("seed", range(10))
def test_one_task_after_no_other_takes_what_it_takes(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2)
    for found in alternatives(workflow, profile, cluster, search=SearchOptions((1, 2), (1, 2))).values():
        assert predict_sequential(found, workflow, profile, cluster).iteration_s == seconds(found)


# --- the simulation


def test_the_policy_serves_the_group_that_is_ready_first_and_devices_one_at_a_time() -> None:
    workflow, profile = libero_tasks(2, 0.5)
    for seed in (None, 3):
        events = simulate(own_cores((2, 2)), workflow, profile, OWN, seed=seed, variation=0.3).events
        acts = [event for event in events if event.component == "policy"]
        assert {event.task for event in acts} == {0, 1}
        came = []
        for act in acts:
            mine = [e for e in events if e.task == act.task and e.group == act.group and e.step == act.step]
            came.append(max(e.end_s for e in mine if e.component != "policy"))
        assert all(one <= other + 1e-9 for one, other in zip(came, came[1:], strict=False))
        for track in {event.track for event in events}:
            times = sorted((event.start_s, event.end_s) for event in events if event.track == track)
            assert all(after[0] >= before[1] - 1e-9 for before, after in zip(times, times[1:], strict=False))


def test_the_timeline_has_a_track_for_each_component() -> None:
    workflow, profile = libero_tasks(2)
    trace = chrome_trace(simulate(own_cores((1, 2)), workflow, profile, OWN))["traceEvents"]
    tracks = {event["args"]["name"].split(" on ")[0] for event in trace if event["name"] == "thread_name"}
    assert tracks == {"physics", "render", "physics-1", "render-1", "policy", "learner"}


def test_a_learner_that_streams_begins_when_both_tasks_have_delivered_its_part() -> None:
    workflow = tasks(2, [2, 2], [1, 4], learner="micro_batch")
    times = {"physics": 1.0, "render": 1.0, "physics-1": 1.0, "render-1": 1.0, "policy": 0.5, "learner": 4.0}
    profile = Profile("tasks", {}, {name: measured("cores", {(2, 1): t, (4, 1): t}) for name, t in times.items()})
    profile = replace(profile, components={**profile.components, "learner": measured("cores", {(4, 1): 4.0})})
    blocks = (("physics", "render"), ("physics-1", "render-1"), ("policy",), ("learner",))
    places = tuple(Placement(names, on("cores", i)) for i, names in enumerate(blocks))
    split = Plan("tasks", "disaggregated", (Phase(places, 2),), (1, 1))
    validate(split, workflow, Cluster((Node("node0", 4),)), profile)
    parts = [e.start_s for e in simulate(split, workflow, profile).events if e.component == "learner"]
    # The first part is the first task's, whose one round takes 2.5 s; the second waits for the second task's four.
    assert parts == [pytest.approx(2.5), pytest.approx(10.5)]
    assert predict(split, workflow, profile).iteration_s == pytest.approx(12.5)


# --- files, words, mistakes


def test_groups_of_several_tasks_are_written_and_read(tmp_path: Path) -> None:
    workflow, profile = libero_tasks(2)
    for kind, value in ((Plan, own_cores((2, 1))), (Workflow, workflow), (Profile, profile)):
        save(value, tmp_path / "file.json")
        assert load(kind, tmp_path / "file.json") == value  # type: ignore[type-var]
    assert json.loads(json.dumps(to_data(own_cores((2, 1)))))["groups"] == [2, 1]
    assert own_cores((2, 1)).groups_of(0) == 2


def test_explanations_name_each_task_its_bottleneck_and_the_gain_of_overlapping() -> None:
    workflow, profile = libero_tasks(2, policy_s=2.0)
    text = " ".join(plan(workflow, profile, OWN, mode="hybrid").why)
    for words in ("one after the other", "overlapping saves", "Task 0 (task0)", "Task 1 (task1)", "its bottleneck is"):
        assert words in text, text
    assert "Fused: split, on the same devices" in text or "Split: fused, on the same devices" in text, text


def test_reasons_say_so_where_overlapping_costs_more_than_it_saves() -> None:
    """Each component was measured to be three times as slow beside others."""
    workflow, profile = libero_tasks(2, policy_s=0.01)
    slowed = {name: replace(found, contention=3.0) for name, found in profile.components.items()}
    known = (own_cores((1, 1)), workflow, replace(profile, components=slowed), OWN)
    together, after = predict(*known).iteration_s, predict_sequential(*known).iteration_s
    assert together > after
    assert f"so overlapping costs {together / after - 1:.0%}." in explain_tasks(known[0], problem_of(*known))[0]


def refused(found: Plan, *words: str, **changes: Any) -> None:
    workflow, profile = libero_tasks(2)
    with pytest.raises(PlanError) as error:
        validate(found, replace(workflow, **changes), OWN, profile)
    for word in words:
        assert word in str(error.value), str(error.value)


def test_mistakes_in_plans_of_several_tasks_name_the_task() -> None:
    refused(own_cores((1, 3)), "3 groups", "8 items of the loop of task 1 (task1)")
    refused(own_cores((2, 8)), "1 items of each group of task 1 (task1)", "2 devices of 'physics-1'")
    refused(replace(own_cores((1, 1)), groups=(1,)), "numbers of groups for 1 loops", "has 2")
    phases = own_cores((1, 1)).phases
    fewer = replace(phases[0], placements=(phases[0].placements[0], *phases[0].placements[2:]))
    refused(replace(own_cores((1, 1)), phases=(fewer, phases[1])), "leaves out physics-1")
    apart = Phase(phases[0].placements[1:3], 16), Phase((phases[0].placements[0], phases[0].placements[3]), 16)
    refused(replace(own_cores((1, 1)), phases=(*apart, phases[1])), "work in one phase", "physics-1 in phase 0")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"items": 15}, "15 items, but its loops have 8 \\+ 8"),
        ({"loops": (Loop((), 3, 8), Loop(("physics", "policy"), 3, 8, "b"))}, "loop of task 0 needs components"),
        ({"loops": (Loop(("physics", "physics"), 3),)}, "names a component twice"),
        ({"loops": (Loop(("physics", "plicy"), 3),)}, "'plicy' in its loop, but does not declare it; nearest: policy"),
        ({"edges": (Edge("physics", "render-1", "scenes"),)}, "physics>render-1 joins the loops of two tasks"),
        ({"edges": (Edge("physics", "nobody", "scenes"),)}, "'nobody' in edge physics>nobody"),
        ({"loops": (Loop(("physics", "policy"), 3, 7),)}, "16 items, but its only loop 7"),
        ({"episodes_per_env": 16}, "8 items of the loop of task 0 \\(task0\\) do not divide into 16 episodes"),
    ],
)
def test_workflows_of_several_tasks_that_contradict_themselves(changes: dict[str, Any], message: str) -> None:
    workflow, profile = libero_tasks(2)
    with pytest.raises(PlanError, match=message):
        plan(replace(workflow, **changes), profile, OWN)


def test_a_component_without_a_profile_is_named() -> None:
    workflow, profile = libero_tasks(2)
    fewer = {name: component for name, component in profile.components.items() if name != "render-1"}
    with pytest.raises(PlanError, match="no times of component 'render-1'"):
        plan(workflow, replace(profile, components=fewer), OWN)


@pytest.mark.parametrize("link_s", [0.0, 1e-4])
def test_each_task_may_be_simulated_away_from_home(link_s: float) -> None:
    workflow, profile = libero_tasks(2)
    travelling = tuple(
        Component(c.name, task=c.task, movable=c.name.startswith("physics")) for c in workflow.components
    )
    workflow = replace(workflow, components=travelling)
    transfers = {
        f"{a}>{b}": 100.0 for names in graph_of(workflow).loops for a, b in zip(names, names[1:], strict=False)
    }
    cluster = Cluster((Node("here", 8, 1), Node("far", 32)), 1e9, link_s, head_node="here")
    best = plan(workflow, replace(profile, transfers=transfers), cluster, explain=False)
    validate(best, workflow, cluster, profile)
    near = plan(workflow, profile, Cluster((Node("here", 8, 1),)), explain=False)
    assert lowest(best) <= seconds(best) <= seconds(near) * NEAR
    away = {p.components for phase in best.phases for p in phase.placements if "far" in p.nodes}
    assert away and all(name.startswith("physics") for names in away for name in names)


def test_a_workflow_of_one_loop_may_still_be_planned_with_a_tuple_of_groups() -> None:
    found = plan(ppo(), ppo_profile(), Cluster((Node("node0", 2),)), mode="hybrid")
    assert len(found.groups) == 1 and found.groups_of(0) == found.groups[0]
