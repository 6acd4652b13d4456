"""From a configuration to a plan: what is measured, what is refused, and what `embodied plan` says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

import schedulers
from embodied.config.files import parse_config
from embodied.errors import UserError
from embodied.execution.session import open_session
from embodied.planning import clusters
from embodied.planning import run_plans as planning
from embodied.planning.profiler import profile_run
from embodied.workflows.run_spec import RunSpec
from schedulers import Plan, PlanError, Profile
from tests.embodied.support import planned
from tests.embodied.support.planned import (
    CORES,
    ENVS,
    IMAGES,
    SETTINGS,
    Commands,
    assert_same_parameters,
    train,
    write_config,
)
from tests.variants import often

few_iterations, profile, files, embodied = planned.few_iterations, planned.profile, planned.files, planned.embodied


# --- what is measured


def test_every_component_is_measured_on_one_core_and_on_all(profile: Profile) -> None:
    assert profile.workflow == "ppo"
    assert set(profile.components) == {"physics", "policy", "learner"}
    for name, component in profile.components.items():
        measured = {(point.batch, point.devices) for point in component.points}
        assert measured == {(batch, devices) for batch in (ENVS // 2, ENVS) for devices in (1, len(CORES))}, name
        for point in component.points:
            assert 0 < point.seconds < 10 and 0 <= point.low <= point.seconds <= point.high, (name, point)
        assert component.pool == "cores" and component.contention >= 1 and component.variation >= 0
    (shared,) = profile.together
    assert shared.components == ("physics", "policy") and (shared.batch, shared.groups) == (ENVS, 2)
    assert 0 <= shared.low <= shared.seconds <= shared.high and shared.seconds > 0


def test_memory_and_switches_are_measured(profile: Profile) -> None:
    physics, policy, learner = (profile.components[name] for name in ("physics", "policy", "learner"))
    # A process with Python, NumPy and MuJoCo in it; the tabletop's environments are small.
    assert 2e7 < physics.resident_bytes + physics.bytes_per_item * ENVS < 2e9
    # Adam keeps two more numbers for each parameter.
    assert 0 < policy.process_bytes < learner.process_bytes < 4 * policy.process_bytes
    for component in (policy, learner):
        assert component.unload_s > 0
        assert component.load_s > 0
    # Ranks would hold the whole policy.
    assert (physics.shares_weights, policy.shares_weights, learner.shares_weights) == (False, False, True)


def test_a_profile_says_what_it_belongs_to(profile: Profile) -> None:
    assert {"hardware.processor", "hardware.cores", "hardware.accelerator"} <= set(profile.fingerprint)
    assert {"software.torch", "software.python"} <= set(profile.fingerprint)
    sections = {"workflow", "env", "extra_tasks", "policy", "rollout", "advantage", "loss", "optim"}
    assert sections == {key.removeprefix("work.") for key in profile.fingerprint if key.startswith("work.")}
    assert json.loads(profile.fingerprint["work.env"])["num_envs"] == ENVS


def test_a_profile_is_equal_when_it_is_read_again(profile: Profile, tmp_path: Path) -> None:
    schedulers.save(profile, tmp_path / "profile.json")
    assert schedulers.load(Profile, tmp_path / "profile.json") == profile


@pytest.mark.slow
def test_drawing_is_measured_where_the_policy_looks(tmp_path: Path) -> None:
    config = parse_config(IMAGES, "test")
    with open_session(config) as session:
        found = profile_run(RunSpec.of(config), replace(session, cores=tuple(CORES)), tmp_path)
    assert set(found.components) == {"physics", "render", "policy", "learner"}
    assert all(point.seconds > 0 for point in found.components["render"].points)
    assert found.components["render"].unload_s > 0 and found.components["render"].load_s > 0
    assert found.transfers["render>policy"] >= 32 * 32 * 3 > found.transfers["physics>render"] > 0
    assert not list(tmp_path.iterdir()), "measuring leaves nothing behind"


def test_environments_that_cannot_be_halved_are_refused(embodied: Commands, files: Path) -> None:
    output = embodied.refused("profile", "small.yaml", "--env.num-envs", "3")
    assert "3 environments do not divide" in output and "env.num_envs" in output


@pytest.mark.slow
def test_the_profile_command_makes_the_folder_it_writes_to(embodied: Commands, files: Path) -> None:
    embodied.done("profile", "small.yaml", "--out", "deep/er/profile.json", "--json", "result.json")
    written = json.loads(Path("deep/er/profile.json").read_text())
    result = json.loads(Path("result.json").read_text())
    assert result["components"].keys() == written["components"].keys() and result["profile"] == "deep/er/profile.json"


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(embodied: Commands, files: Path) -> None:
    output = embodied.refused("profile", "small.yaml", "--out", "small.yaml/profile.json")
    assert "small.yaml" in output and "--out" in output
    assert "--out" in embodied.refused("plan", "small.yaml", "--out", "small.yaml")


# --- profiles that do not belong


AUTO = ["train", "--plan.mode", "auto", "--name", "it", "--plan.profile"]


@pytest.mark.parametrize(
    ("verb", "change", "named"),
    [
        (["plan", "--profile"], ["--optim.epochs", "3"], "optim"),
        (["plan", "--profile"], ["--env.task", "tabletop/push"], "env"),
        (["plan", "--profile"], ["--workflow", "grpo", "--rollout.episode-group", "2"], "workflow"),
        (["compare", "--profile"], ["--env.num-envs", "8"], "env"),
        (AUTO, ["--optim.epochs", "3"], "optim"),
        (AUTO, ["--env.num-envs", "8"], "env"),
    ],
)
def test_a_profile_of_other_settings_is_refused(
    verb: list[str], change: list[str], named: str, embodied: Commands, files: Path
) -> None:
    output = embodied.refused(verb[0], "small.yaml", *verb[1:], "profile.json", *change)
    assert "profile.json was measured with other settings of" in output and named in output
    assert "embodied profile" in output, "what to do is not said"
    assert not any(Path(name).exists() for name in ("runs/it", "compare", "plan"))


def test_settings_that_times_do_not_depend_on_may_differ(embodied: Commands, files: Path) -> None:
    settings = yaml.safe_load(Path("small.yaml").read_text())
    Path("longer.yaml").write_text(yaml.safe_dump({**settings, "iterations": 7, "stop_at": 0.5}))
    embodied.done("plan", "longer.yaml", "--seed", "9")


def test_a_profile_of_other_hardware_or_settings_is_refused(embodied: Commands, files: Path, profile: Profile) -> None:
    other = replace(profile, fingerprint={**profile.fingerprint, "hardware.processor": "Abacus 9"})
    schedulers.save(other, "profile.json")
    output = embodied.refused("plan", "small.yaml")
    assert "other hardware" in output and "Abacus 9" in output
    output = embodied.refused("plan", "small.yaml", "--optim.epochs", "3")
    assert "optim" in output, "other settings are no other hardware"


def test_a_profile_of_another_workflow_is_refused(files: Path, profile: Profile) -> None:
    config = parse_config(SETTINGS, "test")
    schedulers.save(replace(profile, workflow="grpo"), "profile.json")
    with pytest.raises((UserError, PlanError), match="profile.json.*'grpo', not of 'ppo'"):
        planning.checked_profile(
            Path("profile.json"), RunSpec.of(config), planning.sized_workflow(RunSpec.of(config)), any_hardware=True
        )


def test_files_that_are_no_profile_are_refused(embodied: Commands, files: Path) -> None:
    text = Path("profile.json").read_text()
    Path("half.json").write_text(text[: len(text) // 2])
    assert "'half.json' cannot be read as JSON" in embodied.refused("plan", "small.yaml", "--profile", "half.json")
    output = embodied.refused("plan", "small.yaml", "--profile", "missing.json")
    assert "there is no profile file 'missing.json'" in output
    Path("typed.json").write_text(text.replace('"seconds"', '"second"', 1))
    output = embodied.refused("plan", "small.yaml", "--profile", "typed.json")
    assert "typed.json" in output and "unknown key 'second'; nearest: seconds" in output
    data = json.loads(text)
    data["components"]["policy"]["points"][0]["seconds"] = -1
    Path("negative.json").write_text(json.dumps(data))
    assert "cannot be less than 0" in embodied.refused("plan", "small.yaml", "--profile", "negative.json")


# --- embodied plan


def test_a_plan_comes_with_its_reasons_its_timeline_and_its_picture(embodied: Commands, files: Path) -> None:
    output = embodied.done("plan", "small.yaml", "--json", "result.json")
    result = json.loads(Path("result.json").read_text())
    plan = schedulers.load(Plan, "plan/plan.json")
    assert plan == schedulers.from_data(Plan, result["plan"])
    assert plan.why and all(sentence in output for sentence in plan.why)
    assert plan.prediction is not None and result["iteration_s"] == plan.prediction.iteration_s
    assert "collocated" in result["modes"] and result["modes"][plan.mode] == result["iteration_s"]
    assert plan.prediction.lower_bound_s <= min(result["modes"].values()) * (1 + 1e-9)
    events = json.loads(Path("plan/predicted.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert {"physics", "policy", "learner"} <= {event["name"].split()[0] for event in work}
    longest = max(event["ts"] + event["dur"] for event in work) / 1e6
    assert longest == pytest.approx(plan.prediction.iteration_s)
    assert Path("plan/predicted.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", often(["hybrid"], ["collocated", "hybrid", "disaggregated"]))
def test_one_mode_can_be_requested(mode: str, embodied: Commands, files: Path) -> None:
    embodied.done("plan", "small.yaml", "--plan.mode", mode)
    assert schedulers.load(Plan, "plan/plan.json").mode == mode


def test_a_mode_that_does_not_exist_is_refused(embodied: Commands, files: Path) -> None:
    output = embodied.refused("plan", "small.yaml", "--plan.mode", "colocated")
    assert "colocated" in output and "'collocated'" in output
    write_config(Path("wrong.yaml"), {**SETTINGS, "plan": {"mode": "colocated"}})
    output = embodied.refused("train", "wrong.yaml")
    assert "plan.mode" in output and "'collocated'" in output


def test_a_cluster_that_one_does_not_have(embodied: Commands, files: Path) -> None:
    # As docs/planning.md writes it.
    Path("cluster.yaml").write_text(
        "nodes:\n  - {count: 64, cores: 96, accelerators: 8, memory_bytes: 1.0e12, accelerator_bytes: 80.0e9}\n"
        "link_bytes_per_s: 5.0e10\n"
    )
    found = clusters.read_cluster("cluster.yaml", "cpu")
    assert len(found.nodes) == 64 and found.nodes[63].cores == 96 and found.link_bytes_per_s == 5e10
    assert (found.nodes[0].memory_bytes, found.nodes[0].accelerator_bytes) == (1e12, 80e9)
    output = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml")
    plan = schedulers.load(Plan, "plan/plan.json")
    names = {node.name for node in found.nodes}
    assert {span.node for phase in plan.phases for p in phase.placements for span in p.devices} <= names
    assert "per iteration" in output


@pytest.mark.slow
def test_a_cluster_file_may_have_a_home(embodied: Commands, files: Path) -> None:
    """What does not travel is planned for it, whatever the other node could do."""
    Path("cluster.yaml").write_text(
        "nodes:\n  - {name: small, cores: 2}\n  - {name: large, cores: 64}\nhead_node: small\nlink_s: 1.0e-9\n"
    )
    output = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml")
    plan = schedulers.load(Plan, "plan/plan.json")
    for phase in plan.phases:
        for placement in phase.placements:
            assert placement.components == ("physics",) or placement.nodes == {"small"}
    assert "On small alone" in output or "Nothing is on large" in output


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nodes: [{name: a, cores: 4}]\nhead_node: b\n", "head_node 'b' is none of its nodes"),
        ("nodes: []\n", "the cluster has no nodes"),
        ("nodes: [{count: 0, cores: 4}]\n", "at least 1, not 0"),
        ("nodes: [{cores: 0}]\n", "0 cores"),
        ("nodes: [{coers: 4}]\n", "unknown key 'coers'; nearest: cores"),
        ("nodes: [{cores: many}]\n", "cores is a whole number"),
        ("nodes: [{cores: 4}\n", "is not valid YAML"),
        ("", "a cluster is a mapping"),
    ],
)
def test_a_cluster_file_with_a_mistake_is_refused(text: str, named: str, embodied: Commands, files: Path) -> None:
    Path("cluster.yaml").write_text(text)
    output = embodied.refused("plan", "small.yaml", "--cluster", "cluster.yaml")
    assert named in output and "cluster.yaml" in output
    assert not Path("plan").exists(), "nothing may be written"


def test_a_cluster_file_that_is_not_there_or_no_text_is_refused(embodied: Commands, files: Path) -> None:
    assert "no cluster file 'clstr.yaml'" in embodied.refused("plan", "small.yaml", "--cluster", "clstr.yaml")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml is not valid YAML" in embodied.refused("plan", "small.yaml", "--cluster", "binary.yaml")


MIXED: dict[str, Any] = {**SETTINGS, "extra_tasks": [{"num_envs": 2 * ENVS}]}
"""The same task again: not the same work."""


@pytest.fixture(scope="module")
def mixed(few_iterations: None, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    config = parse_config(MIXED, "test")
    with open_session(config) as session:
        folder = tmp_path_factory.mktemp("mixed")
        return profile_run(RunSpec.of(config), replace(session, cores=tuple(CORES)), folder)


def test_a_run_of_several_tasks_has_one_profile(mixed: Profile) -> None:
    """Each task's simulators by themselves, the policy by the environments that it decides for, the learner once."""
    assert list(mixed.components) == ["physics", "physics-1", "policy", "learner"]
    sizes = {name: {point.batch for point in found.points} for name, found in mixed.components.items()}
    assert sizes == {
        "physics": {ENVS // 2, ENVS}, "physics-1": {ENVS, 2 * ENVS}, "policy": {ENVS // 2, ENVS, 2 * ENVS},
        "learner": {3 * ENVS // 2, 3 * ENVS},
    }  # fmt: skip
    assert all(point.seconds > 0 for found in mixed.components.values() for point in found.points)
    calls = [(point.batch, point.devices) for point in mixed.components["policy"].points]
    assert len(calls) == len(set(calls)), "what two tasks measured of the same batch is one point"
    assert {entry.components for entry in mixed.together} == {("physics", "policy"), ("physics-1", "policy")}
    assert {"policy>physics-1", "physics-1>policy", "policy>learner"} <= mixed.transfers.keys()


@pytest.mark.slow
def test_a_run_of_several_tasks_has_one_plan_that_says_what_overlapping_gains(
    mixed: Profile, embodied: Commands, files: Path
) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    output = embodied.done("plan", "mixed.yaml", "--profile", "mixed.json", "--json", "result.json")
    plan, result = schedulers.load(Plan, "plan/plan.json"), json.loads(Path("result.json").read_text())
    assert sorted(path.name for path in Path("plan").iterdir()) == ["plan.json", "predicted.json", "predicted.png"]
    assert len(plan.groups) == 2 and all(sentence in output for sentence in plan.why)
    assert "one after the other" in output
    assert sum("task 1" in sentence.lower() for sentence in plan.why) >= 1, "why the second task is where it is"
    # Where components slow each other down at the same time, as measured, overlapping may cost something.
    together, in_turn = result["iteration_s"], result["tasks_in_turn_iteration_s"]
    effect = f"saves {1 - together / in_turn:.0%}" if together <= in_turn else f"costs {together / in_turn - 1:.0%}"
    assert together > 0 and f"overlapping {effect}" in output


@pytest.mark.slow
def test_a_run_of_several_tasks_keeps_one_plan_and_computes_the_same(mixed: Profile, files: Path) -> None:
    schedulers.save(mixed, "mixed.json")
    planned_run = train(files / "planned", **{**MIXED, "plan": {"mode": "auto", "profile": "mixed.json"}})
    plan = schedulers.load(Plan, planned_run / "plan.json")
    assert [path.name for path in planned_run.glob("plan*.json")] == ["plan.json"]
    assert [path.name for path in planned_run.glob("profile*.json")] == ["profile.json"]
    core = (schedulers.DeviceRange("here", "cores", 0, 1),)
    turns = schedulers.Phase((schedulers.Placement(("physics", "physics-1", "policy", "learner"), core),), 3 * ENVS)
    schedulers.save(Plan("ppo", "collocated", (turns,), plan.groups), files / "turns.json")
    by_hand = {"mode": str(files / "turns.json")}
    assert_same_parameters(planned_run, train(files / "turns", **{**MIXED, "plan": by_hand}))


def test_a_profile_of_one_task_is_not_one_of_two(mixed: Profile, embodied: Commands, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    output = embodied.refused("train", "mixed.yaml", "--plan.mode", "auto", "--plan.profile", "profile.json")
    assert "profile.json was measured with other settings of extra_tasks" in output
    schedulers.save(mixed, "mixed.json")
    output = embodied.refused("train", "small.yaml", "--plan.mode", "auto", "--plan.profile", "mixed.json")
    assert "mixed.json was measured with other settings of extra_tasks" in output


@pytest.mark.slow
def test_modes_are_compared_on_several_tasks_too(mixed: Profile, embodied: Commands, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    options = ["--profile", "mixed.json", "--repeats", "1", "--out", "it", "--json", "r.json"]
    embodied.done("compare", "mixed.yaml", *options)
    result = json.loads(Path("r.json").read_text())
    assert result["task"] == "tabletop/reach, tabletop/reach"
    assert all(len(row["groups"]) == 2 and "physics-1" in row["placement"] for row in result["modes"])
