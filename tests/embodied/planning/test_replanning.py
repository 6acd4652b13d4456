"""Planning again: what is noticed, what pays, and that a run that moves computes what one that stays does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import schedulers
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import fingerprint
from embodied.execution.iteration import Iteration, start_run
from embodied.execution.session import open_session
from embodied.planning import run_plans
from embodied.planning.clusters import local_cluster
from embodied.planning.profiler import work_of
from embodied.planning.run_plans import PAYS, PERSISTENT, Watch, sized_workflow
from embodied.reporting.metrics import read
from embodied.rollout.rollout_summary import Clock
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from schedulers import ComponentProfile, DeviceRange, Phase, Placement, Plan, Point, Profile, Together, Workflow

ENVS, DECISIONS = 3, 8
SETTINGS: dict[str, Any] = {
    "seed": 6,
    "iterations": PERSISTENT + 2,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 9},
    "farm": {"groups": 1, "physics_workers": 1},
    "policy": {"chunk": 2, "options": {"widths": [16]}},
    "rollout": {"decisions": DECISIONS},
    "optim": {"epochs": 1, "minibatch": 16},
    "runtime": {"mode": "inline", "deadline_s": 120},
}
CONFIG = parse_config(SETTINGS, "test")
WORKFLOW = sized_workflow(RunSpec.of(CONFIG))
PHYSICS, POLICY, LEARNER = 0.05, 0.02, 0.1
"""Seconds on one core: of a round, of a round, of an iteration."""
TAKES = DECISIONS * (PHYSICS + POLICY) + LEARNER


TWO_CORES = local_cluster(2)


def component(seconds: float, on_two: float) -> ComponentProfile:
    """As long for one environment as for all, and on two cores `on_two` times as long."""
    times = {1: seconds, 2: seconds * on_two}
    points = tuple(Point(batch, n, s, s, s) for n, s in times.items() for batch in (1, ENVS))
    return ComponentProfile("cores", points)


PROFILE = Profile(
    "ppo",
    {**fingerprint(), **work_of(CONFIG)},
    {"physics": component(PHYSICS, 1.0), "policy": component(POLICY, 1.0), "learner": component(LEARNER, 0.5)},
    (Together(("physics", "policy"), ENVS, 2, 1, 0.07, 0.06, 0.08),),
)


def on(*cores: int) -> tuple[DeviceRange, ...]:
    return (DeviceRange("here", "cores", cores[0], len(cores)),)


def planned(*phases: tuple[Placement, ...], mode: schedulers.Mode, groups: int = 1) -> Plan:
    plan = Plan("ppo", mode, tuple(Phase(places, ENVS) for places in phases), (groups,))
    return replace(plan, prediction=schedulers.predict(plan, WORKFLOW, PROFILE))


ALL_ON_ONE = planned((Placement(("physics", "policy", "learner"), on(0)),), mode="collocated")
LEARNER_ON_TWO = planned(
    (Placement(("physics",), on(0)), Placement(("policy",), on(1))),
    (Placement(("learner",), on(0, 1)),),
    mode="hybrid",
)


def seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


# --- the watch


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iteration:
    """An iteration that took place."""
    folder = tmp_path_factory.mktemp("real")
    with open_session(CONFIG) as session:
        placed = run_plans.plan_run(RunSpec.of(CONFIG), session, folder)
        with start_run(RunSpec.of(CONFIG), folder, session, placed.assignment) as workers:
            workers.begin(None, 0)
            return workers.iterate(0, drain=True)


@pytest.fixture
def took(real: Iteration) -> Callable[..., Iteration]:
    """The real iteration with clocks that say what the profile says, times a factor for each component.

    `nobody`: seconds that no component explains."""

    def make(physics: float = 1.0, policy: float = 1.0, learner: float = 1.0, nobody: float = 0.0) -> Iteration:
        stepping, acting = DECISIONS * PHYSICS * physics, DECISIONS * POLICY * policy
        clock = Clock(policy=acting, waiting=stepping + nobody, stepping=(stepping,), drawing=(0.0,))
        summary = replace(real.summary, clock=clock, wall_s=acting + stepping + nobody, spans=())
        end = real.begin_ns + round((summary.wall_s + LEARNER * learner) * 1e9)
        return replace(real, summary=summary, end_ns=end)

    return make


@dataclass
class RecordingPlanner:
    """A planner that answers with one plan and keeps what it was asked."""

    answer: Plan
    profiles: list[Profile] = field(default_factory=list)

    def __call__(self, profile: Profile) -> Plan:
        self.profiles.append(profile)
        found = replace(self.answer, prediction=schedulers.predict(self.answer, WORKFLOW, profile))
        return found

    @property
    def factors(self) -> dict[str, float]:
        """Of each component's times in the last question, all of its points alike."""
        found = {}
        for name, measured in self.profiles[-1].components.items():
            pairs = zip(measured.points, PROFILE.components[name].points, strict=True)
            (found[name],) = {round(now.seconds / before.seconds, 6) for now, before in pairs}
        return found


def watch(planner: RecordingPlanner, plan: Plan = ALL_ON_ONE, switch_s: float = 0.0) -> Watch:
    return Watch(plan, PROFILE, WORKFLOW, TWO_CORES, planner, switch_s)


def test_the_iterations_are_those_that_the_plan_predicts(took: Callable[..., Iteration]) -> None:
    assert seconds(ALL_ON_ONE) == pytest.approx(TAKES) == pytest.approx(took().wall_s)


def test_nothing_happens_within_the_tolerance(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    for number in range(4 * PERSISTENT):
        by = 1.13 if number % 3 else 0.88
        assert watching.see(took(by, by, by), left=10**6) is None
    assert not planner.profiles


def test_single_outliers_are_no_change(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    for number in range(6 * PERSISTENT):
        assert watching.see(took(1.0 if number % PERSISTENT == 0 else 5.0), left=10**6) is None
    watching = watch(planner)
    for number in range(4 * PERSISTENT):  # off every time, but not in one direction
        assert watching.see(took(*[0.5 if number % 2 else 2.0] * 3), left=10**6) is None
    assert not planner.profiles


@pytest.mark.parametrize("slow", ["physics", "policy", "learner"])
@pytest.mark.parametrize("by", [2.0, 5.0])
def test_what_has_become_slower_is_noticed_with_its_factor(
    slow: str, by: float, took: Callable[..., Iteration]
) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    change = took(**{slow: by}).wall_s / TAKES
    decisions = [watching.see(took(**{slow: by}), left=10**6) for _ in range(PERSISTENT)]
    if change < 1.15:
        assert not planner.profiles
        return
    assert decisions[:-1] == [None] * (PERSISTENT - 1) and len(planner.profiles) == 1
    assert planner.factors == pytest.approx({"physics": 1.0, "policy": 1.0, "learner": 1.0} | {slow: by})
    decision = decisions[-1]
    assert decision is not None and decision.plan.phases == LEARNER_ON_TWO.phases
    assert decision.profile is planner.profiles[0] and f"{slow} x {by:.3g}" in decision.reason
    assert f"{change:.3g} times" in decision.reason
    # All that the other plan saves is half of the update.
    assert decision.gain_s == pytest.approx(LEARNER / 2 * (by if slow == "learner" else 1.0), rel=1e-3)


def test_what_has_become_faster_is_noticed_too(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    for _ in range(PERSISTENT):
        watching.see(took(physics=0.5), left=10**6)
    assert planner.factors == pytest.approx({"physics": 0.5, "policy": 1.0, "learner": 1.0})


def test_several_workers_and_groups_are_accounted_for(took: Callable[..., Iteration]) -> None:
    """Busy times add up over the workers: on two cores each round is as long for both of them here."""
    plan = planned(
        (Placement(("physics",), on(0, 1)), Placement(("policy",), on(2))),
        (Placement(("learner",), on(0)),),
        mode="hybrid",
        groups=3,
    )
    planner = RecordingPlanner(ALL_ON_ONE)
    watching = watch(planner, plan)
    for _ in range(PERSISTENT):
        watching.see(took(physics=2 * 2 * 3, policy=3, learner=6), left=0)
    assert planner.factors == pytest.approx({"physics": 2.0, "policy": 1.0, "learner": 6.0})


def test_times_that_were_measured_together_follow(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    for _ in range(PERSISTENT):
        watching.see(took(3.0, 3.0), left=10**6)
    (now,), (before,) = planner.profiles[0].together, PROFILE.together
    ratios = [now.seconds / before.seconds, now.low / before.low, now.high / before.high]
    assert ratios == pytest.approx([3.0] * 3)


@pytest.mark.parametrize(("left", "pays"), [(0, False), (199, False), (201, True)])
def test_a_plan_is_adopted_only_when_it_pays(left: int, pays: bool, took: Callable[..., Iteration]) -> None:
    gain = LEARNER / 2  # per iteration
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner, switch_s=200 * gain / PAYS)
    decisions = [watching.see(took(physics=2.0), left) for _ in range(PERSISTENT)]
    assert len(planner.profiles) == 1
    assert (decisions[-1] is not None) == pays
    if decisions[-1] is not None:
        assert decisions[-1].gain_s == pytest.approx(gain, rel=1e-3)


def test_after_an_answer_as_many_iterations_pass_before_the_next_question(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(ALL_ON_ONE)
    watching = watch(planner)
    questions = []
    for _ in range(3 * PERSISTENT):
        assert watching.see(took(2.0), left=10**6) is None, "a plan was swapped for itself"
        questions.append(len(planner.profiles))
    assert questions == [number // PERSISTENT for number in range(1, 3 * PERSISTENT + 1)]


def test_where_there_is_one_plan_nothing_moves(took: Callable[..., Iteration]) -> None:
    cluster = local_cluster(1)

    def only(profile: Profile) -> Plan:
        return schedulers.plan(WORKFLOW, profile, cluster, "collocated", search=schedulers.SearchOptions(groups=(1,)))

    watching = Watch(only(PROFILE), PROFILE, WORKFLOW, cluster, only, 0.0)
    for _ in range(2 * PERSISTENT):
        assert watching.see(took(7.0, 0.3, 2.0), left=10**6) is None


def test_time_that_no_component_explains_is_not_what_another_plan_saves(took: Callable[..., Iteration]) -> None:
    """Two plans that are equally fast: whichever runs, the other seems better if only it is spared the delay."""
    twin = planned((Placement(("physics", "policy"), on(0)), Placement(("learner",), on(1))), mode="disaggregated")
    assert seconds(twin) == pytest.approx(seconds(ALL_ON_ONE))
    for present, other in ((ALL_ON_ONE, twin), (twin, ALL_ON_ONE)):
        planner = RecordingPlanner(other)
        watching = watch(planner, present)
        for _ in range(3 * PERSISTENT):
            assert watching.see(took(nobody=TAKES), left=10**6) is None
        assert len(planner.profiles) == 3


TWO_TASKS = parse_config({**SETTINGS, "extra_tasks": [{"num_envs": ENVS}]}, "test")
TWO = Profile(
    "ppo",
    {**fingerprint(), **work_of(TWO_TASKS)},
    {**PROFILE.components, "physics-1": component(PHYSICS, 1.0)},
    (Together(("physics-1", "policy"), ENVS, 2, 1, 0.07, 0.06, 0.08),),
)
TURNS = Plan("ppo", "collocated", (Phase((Placement(tuple(TWO.components), on(0)),), 2 * ENVS),), (1, 1))


def test_one_watch_sees_every_tasks_simulators(took: Callable[..., Iteration]) -> None:
    """Only the second task's are slow; the policy decides for both."""
    workflow, profiles = sized_workflow(RunSpec.of(TWO_TASKS)), list[Profile]()
    plan = replace(TURNS, prediction=schedulers.predict(TURNS, workflow, TWO))

    def ask(profile: Profile) -> Plan:
        profiles.append(profile)
        return replace(plan, prediction=schedulers.predict(plan, workflow, profile))

    watching = Watch(plan, TWO, workflow, TWO_CORES, ask, 0.0)
    stepping = DECISIONS * PHYSICS
    clock = Clock(2 * DECISIONS * POLICY, 4 * stepping, stepping=(stepping, 3 * stepping), drawing=(0.0, 0.0))
    one = took()
    wall = clock.policy + clock.waiting
    both = replace(one, summary=replace(one.summary, clock=clock, wall_s=wall))
    both = replace(both, end_ns=both.begin_ns + round((wall + LEARNER) * 1e9))
    for _ in range(PERSISTENT):
        assert watching.see(both, left=10**6) is None, "a plan was swapped for itself"
    (found,) = profiles
    factors = {name: found.components[name].points[0].seconds / TWO.components[name].points[0].seconds for name in
               TWO.components}  # fmt: skip
    assert factors == pytest.approx({"physics": 1.0, "physics-1": 3.0, "policy": 1.0, "learner": 1.0})
    assert found.together[0].seconds == pytest.approx(2 * 0.07), "the median of what took part"


def test_scorers_are_distinguished_from_the_learner(took: Callable[..., Iteration]) -> None:
    """By its own clock, whatever it is called."""
    judge = schedulers.Component("judge")
    edges = (*WORKFLOW.edges[:-1], schedulers.Edge("policy", "judge", "x"), schedulers.Edge("judge", "learner", "x"))
    workflow = Workflow("judged", (*WORKFLOW.components, judge), edges, WORKFLOW.loops, WORKFLOW.items)
    one = took()
    judged = replace(one, learned={**one.learned, "time/judge_s": 0.25}, end_ns=one.end_ns + 250_000_000)
    assert run_plans.busy_seconds(judged, workflow) == pytest.approx(
        {"physics": DECISIONS * PHYSICS, "policy": DECISIONS * POLICY, "judge": 0.25, "learner": LEARNER}
    )


def test_switches_are_not_the_learners_time(took: Callable[..., Iteration]) -> None:
    planner = RecordingPlanner(LEARNER_ON_TWO)
    watching = watch(planner)
    for _ in range(PERSISTENT):
        one = took(physics=2.0)
        switched = {**one.learned, "time/switch_s": 0.5}
        watching.see(replace(one, learned=switched, end_ns=one.end_ns + 500_000_000), left=10**6)
    assert planner.factors == pytest.approx({"physics": 2.0, "policy": 1.0, "learner": 1.0})


# --- a run that moves


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    clock = ("time/", "farm/")
    return {k: v for k, v in row.items() if not k.startswith(clock) and k not in ("wall_s", "learner/update_s")}


def tensors(run: Path, number: int) -> dict[str, np.ndarray]:
    folder = run / "checkpoints" / f"{number:06d}"
    checkpoint.verify(folder)
    return {f"{path.name}: {k}": a for path in folder.rglob("*.safetensors") for k, a in load_file(path).items()}


def train(folder: Path, config: Config) -> dict[str, Any]:
    found = prepare_run(config, folder, resume=False)
    with open_session(config) as session:
        return training.train(RunSpec.of(config), folder, session, found)


def much_slower(profile: Profile) -> Profile:
    """A profile of a hundred times the seconds: one stall of a busy machine makes no iteration as long."""
    components = {
        name: replace(one, points=tuple(Point(p.batch, p.devices, *[100 * p.seconds] * 3) for p in one.points))
        for name, one in profile.components.items()
    }
    return replace(profile, components=components, together=())


@pytest.fixture
def files(tmp_path: Path) -> Iterator[dict[str, Any]]:
    """A plan and a profile that is wrong: everything takes a fraction of its times, however slow the machine is."""
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one core there is one plan")
    schedulers.save(much_slower(PROFILE), tmp_path / "profile.json")
    schedulers.save(ALL_ON_ONE, tmp_path / "first.json")
    yield {"mode": str(tmp_path / "first.json"), "profile": str(tmp_path / "profile.json")}


@pytest.mark.parametrize("mode", ["inline", pytest.param("ray", marks=pytest.mark.slow)])
def test_a_run_that_moves_computes_what_one_that_stays_does(
    mode: str,
    files: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(run_plans, "PAYS", 0.0)
    runtime = {**SETTINGS["runtime"], "mode": mode}
    moved = parse_config({**SETTINGS, "runtime": runtime, "plan": {**files, "replan": True}}, "test")
    stayed = parse_config({**SETTINGS, "plan": files}, "test")
    result = train(tmp_path / "moved", moved)
    assert "planned again" in " ".join(capsys.readouterr().out.split())
    before = train(tmp_path / "stayed", stayed)
    kept = schedulers.load(Plan, tmp_path / "moved" / "plan.json")
    assert (before["mode"], result["mode"]) == ("collocated", kept.mode)
    assert kept.phases != ALL_ON_ONE.phases and kept.prediction is not None
    assert kept.prediction.iteration_s < 100 * TAKES / 2, "its prediction is of the times that were measured"
    assert result["predicted_iteration_s"] == kept.prediction.iteration_s
    assert schedulers.load(Plan, tmp_path / "stayed" / "plan.json").phases == ALL_ON_ONE.phases
    # One environment in three cannot be split: the batches are the same, and so is every bit.
    assert kept.groups == (1,)
    rows, others = read(tmp_path / "moved"), read(tmp_path / "stayed")
    assert [row["iteration"] for row in rows] == list(range(1, CONFIG.iterations + 1))
    assert [timeless(row) for row in rows] == [timeless(row) for row in others]
    found, expected = (tensors(tmp_path / name, CONFIG.iterations) for name in ("moved", "stayed"))
    assert found.keys() == expected.keys()
    assert [key for key, array in expected.items() if found[key].tobytes() != array.tobytes()] == []
    assert (tmp_path / "moved" / "checkpoints" / f"{PERSISTENT:06d}").is_dir(), "it moved at another moment"


def test_a_run_of_several_tasks_moves_too(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plans, "PAYS", 0.0)
    schedulers.save(much_slower(TWO), Path(files["profile"]))
    schedulers.save(TURNS, Path(files["mode"]))
    settings = {**SETTINGS, "extra_tasks": TWO_TASKS.model_dump()["extra_tasks"]}
    for name, plan in {"moved": {**files, "replan": True}, "stayed": files}.items():
        train(tmp_path / name, parse_config({**settings, "plan": plan}, "test"))
    kept = schedulers.load(Plan, tmp_path / "moved" / "plan.json")
    assert kept.phases != TURNS.phases and kept.groups == (1, 1)
    rows, others = read(tmp_path / "moved"), read(tmp_path / "stayed")
    assert [timeless(row) for row in rows] == [timeless(row) for row in others]
    found, expected = (tensors(tmp_path / name, CONFIG.iterations) for name in ("moved", "stayed"))
    assert [key for key, array in expected.items() if found[key].tobytes() != array.tobytes()] == []


def test_a_run_that_has_no_iterations_left_to_gain_from_stays(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plans, "PAYS", 0.0)
    plan = {**files, "replan": True}
    train(tmp_path / "run", parse_config({**SETTINGS, "iterations": PERSISTENT, "plan": plan}, "test"))
    assert schedulers.load(Plan, tmp_path / "run" / "plan.json").phases == ALL_ON_ONE.phases
    monkeypatch.setattr(run_plans, "PAYS", 1e9)
    train(tmp_path / "dear", parse_config({**SETTINGS, "plan": plan}, "test"))
    assert schedulers.load(Plan, tmp_path / "dear" / "plan.json").phases == ALL_ON_ONE.phases


def test_the_run_goes_on_after_a_stop_where_it_had_moved(
    files: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_plans, "PAYS", 0.0)
    plan = {**files, "replan": True}
    whole = parse_config({**SETTINGS, "plan": plan}, "test")
    train(tmp_path / "whole", whole)
    train(tmp_path / "parts", parse_config({**SETTINGS, "iterations": PERSISTENT + 1, "plan": plan}, "test"))
    found = prepare_run(whole, tmp_path / "parts", resume=True)
    with open_session(whole) as session:
        training.train(RunSpec.of(whole), tmp_path / "parts", session, found)
    mine, other = (tensors(tmp_path / name, whole.iterations) for name in ("parts", "whole"))
    assert all(mine[key].tobytes() == array.tobytes() for key, array in other.items())
    assert [row["iteration"] for row in map(json.loads, (tmp_path / "parts" / "metrics.jsonl").open())] == list(
        range(1, whole.iterations + 1)
    )
