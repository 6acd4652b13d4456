"""The planner against every plan there is, and against simpler planners."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import schedulers
from schedulers import (
    MODES,
    Cluster,
    Component,
    Edge,
    Loop,
    Node,
    PlanError,
    Profile,
    SearchOptions,
    Workflow,
    alternatives,
    plan,
    predict,
    validate,
)
from schedulers.cost.problem import Problem
from schedulers.cost.simulation import expected_seconds
from schedulers.search.allocation import MemoryLimits, least_sums, options_of
from schedulers.search.phases import PhaseSolver
from tests.schedulers.baselines import (
    PARTS,
    SMALL,
    Exhaustive,
    all_collocated,
    hill_climbing,
    published_recursion,
    uniform_split,
)
from tests.schedulers.instances import (
    TWO_CORES,
    Together,
    measured,
    ppo,
    ppo_profile,
    random_component,
    random_problem,
    random_workflow,
    seconds,
    some,
)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", some(6, of=75))
def test_planner_equals_exhaustive_search(seed: int, memory: bool) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=memory)
    everything = Exhaustive(workflow, profile, cluster)
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = everything.best(mode)
        if mode not in found:
            assert best == math.inf
            continue
        prediction = found[mode].prediction
        assert prediction is not None
        assert prediction.iteration_s == pytest.approx(best, rel=1e-9)
        assert prediction.lower_bound_s == pytest.approx(best, rel=1e-9)
        assert prediction.lower_bound_s <= prediction.iteration_s
        validate(found[mode], workflow, cluster, profile)


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", some(6, of=20))
def test_planner_equals_exhaustive_search_where_components_do_not_spread(seed: int, memory: bool) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=memory)
    random = np.random.default_rng((seed, 2))
    components = {
        # Of what was measured on one device or two, more is never given.
        name: replace(c, data_parallel=False, points=tuple(point for point in c.points if point.devices <= 2))
        if random.random() < 0.6
        else c
        for name, c in profile.components.items()
    }
    profile = replace(profile, components=components)
    everything = Exhaustive(workflow, profile, cluster)
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = everything.best(mode)
        assert (mode in found) == (best < math.inf)
        if mode in found:
            prediction = found[mode].prediction
            assert prediction is not None and prediction.lower_bound_s == pytest.approx(prediction.iteration_s)
            assert prediction.iteration_s == pytest.approx(best, rel=1e-9)
            validate(found[mode], workflow, cluster, profile)


SHORT = Workflow(
    "short",
    tuple(Component(name) for name in ("physics", "policy", "learner")),
    (Edge("physics", "policy", "observations"), Edge("policy", "learner", "trajectories")),
    (Loop(("physics", "policy"), 20),),
    16,
)


def test_a_second_gpu_is_not_given_to_processes_that_compute_on_one() -> None:
    """Not even for its memory: one process has its working set on one device."""
    one = {"data_parallel": False, "unload_s": 5.0, "load_s": 5.0}
    components = {
        "physics": measured("cores", {(16, 1): 0.02}),
        "policy": measured("accelerators", {(16, 1): 0.01}, resident_bytes=15e9, **one),
        "learner": measured("accelerators", {(16, 1): 0.3}, resident_bytes=45e9, bytes_per_item=25e9 / 16, **one),
    }
    profile = Profile("short", {}, components)
    cluster = Cluster((Node("node0", 2, 2, accelerator_bytes=80e9),))
    for mode, chosen in alternatives(SHORT, profile, cluster).items():
        taken = [p.count for phase in chosen.phases for p in phase.placements if p.pool == "accelerators"]
        assert taken == [1] * len(taken)
        validate(chosen, SHORT, cluster, profile)
        assert chosen.unload == (mode == "collocated")
    assert plan(SHORT, profile, cluster).mode == "disaggregated"
    # On a large cluster too, where devices are handed out eight at a time.
    many = Cluster(tuple(Node(f"node{i}", 2, 8, accelerator_bytes=80e9) for i in range(32)))
    chosen = plan(SHORT, profile, many, "disaggregated", explain=False)
    assert {p.count for p in chosen.phases[0].placements if p.pool == "accelerators"} == {1}
    validate(chosen, SHORT, many, profile)


@pytest.mark.parametrize("seed", some(6, of=40))
def test_planner_equals_exhaustive_search_with_tails_and_one_step_ahead(seed: int) -> None:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2)
    profile = replace(profile, arrivals=(0.3, 0.5, 0.6, 1.0) if seed % 3 else ())
    ahead = bool(workflow.loops) and seed % 2 == 0
    best = Exhaustive(workflow, profile, cluster, ahead).best("disaggregated")
    found = alternatives(workflow, profile, cluster, ahead=ahead, search=SMALL, modes=("disaggregated",))
    assert [seconds(chosen) for chosen in found.values()] == ([] if best == math.inf else [pytest.approx(best)])


@pytest.mark.parametrize("seed", some(6, of=25))
def test_planner_never_loses_to_simpler_planners(seed: int) -> None:
    workflow, profile, cluster = random_problem(1000 + seed, count=4)
    best = seconds(plan(workflow, profile, cluster, search=SMALL, explain=False))
    problem = Problem(workflow, profile, cluster)
    assert best <= predict(all_collocated(problem), workflow, profile, cluster).iteration_s * (1 + 1e-9)
    uniform = uniform_split(problem)
    if uniform is not None:
        assert best <= predict(uniform, workflow, profile, cluster).iteration_s * (1 + 1e-9)
    assert best <= hill_climbing(problem, seed) * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(6, of=25))
def test_planner_never_loses_to_the_published_recursion(seed: int) -> None:
    random = np.random.default_rng(seed)
    workflow = random_workflow(random, 4, 0)
    edges = tuple(replace(edge, source=f"c{int(edge.target[1:]) - 1}", flow="micro_batch") for edge in workflow.edges)
    workflow = replace(workflow, edges=tuple(dict.fromkeys(edges)))
    _, profile, cluster = random_problem(seed, count=4)
    components = {name: random_component(random, "cores", 8, 5) for name in workflow.names}
    profile = replace(profile, components=components, together=())
    problem = Problem(workflow, profile, cluster)
    best = seconds(plan(workflow, profile, cluster, search=SearchOptions(micro_batches=PARTS), explain=False))
    for parts in PARTS:
        other = published_recursion(problem, parts)
        validate(other, workflow, cluster, profile)
        assert best <= predict(other, workflow, profile, cluster).iteration_s * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_least_sums_of_open_placements_are_those_of_the_best_division(seed: int) -> None:
    """The bound of partial allocations: too much of it would leave the best plan out, unseen in most problems."""
    random = np.random.default_rng(seed)
    workflow, profile, cluster = random_problem(seed, count=3)
    problem = Problem(workflow, profile, Cluster((Node("node0", 9),)))
    model = next(PhaseSolver(problem, 0.0).models(frozenset(workflow.names), "split"))
    options = options_of(problem, model, 0, MemoryLimits(problem.memory_limits, problem.memory_limits))
    rest = np.sort(random.uniform(0, 1, size=(10, options.sums.shape[1])), axis=0)[::-1]
    found = least_sums(rest, options)
    for units in range(10):
        sums = [rest[units - k] + own for k, own in zip(options.units, options.sums, strict=True) if k <= units]
        least = np.min(sums, axis=0) if sums else np.full(rest.shape[1], math.inf)
        assert np.array_equal(found[units], least)


def test_each_mode_wins_where_it_should() -> None:
    workflow = ppo()
    assert plan(workflow, ppo_profile(policy=0.002), TWO_CORES).mode == "collocated"
    assert plan(workflow, ppo_profile(policy=0.02), TWO_CORES).mode == "hybrid"
    slow = ppo_profile(policy=0.02, learner=0.001)
    found = alternatives(workflow, slow, TWO_CORES)
    assert seconds(found["disaggregated"]) < seconds(found["collocated"])


def test_measured_together_decides_for_groups_on_shared_cores() -> None:
    workflow, profile = ppo(), ppo_profile(policy=0.1)
    assert plan(workflow, profile, TWO_CORES, mode="collocated").groups == (1,)
    loop = ("physics", "render", "policy")
    shared = replace(profile, together=(Together(loop, 16, 2, 2, 0.03, 0.03, 0.03),))
    chosen = plan(workflow, shared, TWO_CORES, mode="collocated")
    assert chosen.groups == (2,)
    assert chosen.prediction is not None
    assert chosen.prediction.phases_s[0] == pytest.approx(20 * 0.03)


def test_small_case_has_its_candidates() -> None:
    found = alternatives(ppo(), ppo_profile(), TWO_CORES)
    blocks = {
        mode: [[set(p.components) for p in phase.placements] for phase in chosen.phases]
        for mode, chosen in found.items()
    }
    rest = {"advantage", "learner", "sync"}
    assert blocks["collocated"] == [[{"physics", "render", "policy"}], [rest]]
    assert blocks["hybrid"] == [[{"physics", "render"}, {"policy"}], [rest]]
    assert blocks["disaggregated"] == [[{"physics", "render"}, {"policy", *rest}]]


@pytest.mark.slow
def test_deadline_gives_a_plan_and_an_honest_bound() -> None:
    from benchmarks.planner import large

    workflow, profile, cluster = large("ppo", 0)
    quick = plan(workflow, profile, cluster, search=SearchOptions(deadline_s=0.0), explain=False)
    full = plan(workflow, profile, cluster, explain=False)
    validate(quick, workflow, cluster, profile)
    assert quick.prediction is not None
    assert quick.prediction.lower_bound_s <= seconds(full) * (1 + 1e-9)
    assert seconds(full) <= seconds(quick) * (1 + 1e-9)


def test_one_step_ahead_takes_the_longer_part_and_the_weights() -> None:
    workflow, profile = ppo(), ppo_profile(policy=0.01, learner=0.8)
    chosen = plan(workflow, profile, TWO_CORES, mode="disaggregated", ahead=True)
    assert chosen.ahead == 1
    validate(chosen, workflow, TWO_CORES, profile)
    rollout = 20 * (0.02 + 0.002 + 0.01)
    learner = 0.001 + 0.8
    assert seconds(chosen) == pytest.approx(max(rollout, learner) + 0.001)


def test_unloading_is_paid_only_where_it_does_not_fit() -> None:
    workflow, profile = ppo(), ppo_profile(resident_bytes=1.0, unload_s=0.1, load_s=0.2)
    roomy = replace(TWO_CORES, nodes=(replace(TWO_CORES.nodes[0], memory_bytes=100.0),))
    tight = replace(TWO_CORES, nodes=(replace(TWO_CORES.nodes[0], memory_bytes=8.0),))
    free, paid = (plan(workflow, profile, cluster, mode="collocated") for cluster in (roomy, tight))
    assert free.prediction is not None and paid.prediction is not None
    assert not free.unload and free.prediction.switch_s == 0
    assert "switches cost nothing" in " ".join(free.why)
    assert paid.unload and paid.prediction.switch_s == pytest.approx(6 * 0.3)
    assert seconds(paid) == pytest.approx(seconds(free) + 1.8)
    with pytest.raises(PlanError, match="set unload"):
        validate(replace(paid, unload=False), workflow, tight, profile)


def test_why_says_what_the_others_cost_and_what_would_help() -> None:
    chosen = plan(ppo(), ppo_profile(), TWO_CORES)
    text = " ".join(chosen.why)
    for words in ("best collocated plan would take", "best disaggregated plan would take", "ne more core", "certified"):
        assert words in text, words


@pytest.mark.parametrize(("share", "said"), [(0.4, True), (0.01, False), (None, False)])
def test_why_says_that_the_machine_was_busy_when_it_was_measured(share: float | None, said: bool) -> None:
    profile = replace(ppo_profile(), other_programs=share)
    why = plan(ppo(), profile, TWO_CORES).why
    sentence = "Other programs used 40% of the cores' time when this was profiled: alone it is shorter."
    assert (sentence in why) is said and any("Other programs" in text for text in why) is said
    assert schedulers.from_data(Profile, schedulers.to_data(profile)) == profile


def test_a_plan_that_is_shorter_only_by_its_mean_times_is_compared_in_numbers() -> None:
    known = ppo_profile()
    uneven = {
        name: replace(component, variation=0.6 if name in ("physics", "render", "policy") else 0.0)
        for name, component in known.components.items()
    }
    profile = replace(known, components=uneven)
    chosen, hybrid = (plan(ppo(), profile, TWO_CORES, mode=mode) for mode in (None, "hybrid"))
    theirs, own = (expected_seconds(one, ppo(), profile, TWO_CORES) for one in (hybrid, chosen))
    assert chosen.mode == "collocated" and seconds(hybrid) < seconds(chosen) and theirs > own
    (sentence,) = [sentence for sentence in chosen.why if "hybrid" in sentence]
    assert f"and {theirs / own:.2f} times as long (899 ms against 837 ms) as calls vary." in sentence


def test_one_step_ahead_a_learner_that_nothing_follows_works_beside_the_loop() -> None:
    known = ppo_profile(policy=0.01, learner=0.8)
    profile = replace(known, components={name: known.components[name] for name in SHORT.names})
    chosen = plan(SHORT, profile, TWO_CORES, mode="disaggregated", ahead=True)
    assert {placement.components for placement in chosen.phases[0].placements} == {("physics", "policy"), ("learner",)}
    assert seconds(chosen) == pytest.approx(max(20 * (0.02 + 0.01), 0.8))
