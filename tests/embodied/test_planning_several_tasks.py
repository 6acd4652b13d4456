"""A run of several tasks has one profile and one plan, and computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedulers
from embodied.config.files import parse_config
from embodied.execution.session import open_session
from embodied.planning.profiler import profile_config
from schedulers import Plan, Profile
from tests.embodied import planned
from tests.embodied.planned import CORES, ENVS, SETTINGS, Said, assert_same_parameters, train, write_config

few_iterations, profile, files, embodied = planned.few_iterations, planned.profile, planned.files, planned.embodied


MIXED: dict[str, Any] = {**SETTINGS, "extra_tasks": [{"num_envs": 2 * ENVS}]}
"""The same task again: not the same work."""


@pytest.fixture(scope="module")
def mixed(few_iterations: None, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    config = parse_config(MIXED, "test")
    with open_session(config) as session:
        folder = tmp_path_factory.mktemp("mixed")
        return profile_config(config, replace(session, cores=tuple(CORES)), folder)


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
    mixed: Profile, embodied: Said, files: Path
) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    said = embodied.done("plan", "mixed.yaml", "--profile", "mixed.json", "--json", "result.json")
    plan, result = schedulers.load(Plan, "plan/plan.json"), json.loads(Path("result.json").read_text())
    assert sorted(path.name for path in Path("plan").iterdir()) == ["plan.json", "predicted.json", "predicted.png"]
    assert len(plan.groups) == 2 and all(sentence in said for sentence in plan.why)
    assert "one after the other" in said
    assert sum("task 1" in sentence.lower() for sentence in plan.why) >= 1, "why the second task is where it is"
    # Where components slow each other down at the same time, as measured, overlapping may cost something.
    together, in_turn = result["iteration_s"], result["tasks_in_turn_iteration_s"]
    effect = f"saves {1 - together / in_turn:.0%}" if together <= in_turn else f"costs {together / in_turn - 1:.0%}"
    assert together > 0 and f"overlapping {effect}" in said


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
    by_hand = {"file": str(files / "turns.json")}
    assert_same_parameters(planned_run, train(files / "turns", **{**MIXED, "plan": by_hand}))


def test_a_profile_of_one_task_is_not_one_of_two(mixed: Profile, embodied: Said, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    said = embodied.refused("train", "mixed.yaml", "--plan.mode", "auto", "--plan.profile", "profile.json")
    assert "profile.json was measured with other settings of extra_tasks" in said
    schedulers.save(mixed, "mixed.json")
    said = embodied.refused("train", "small.yaml", "--plan.mode", "auto", "--plan.profile", "mixed.json")
    assert "mixed.json was measured with other settings of extra_tasks" in said


@pytest.mark.slow
def test_modes_are_compared_on_several_tasks_too(mixed: Profile, embodied: Said, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    options = ["--profile", "mixed.json", "--repeats", "1", "--out", "it", "--json", "r.json"]
    embodied.done("compare", "mixed.yaml", *options)
    result = json.loads(Path("r.json").read_text())
    assert result["task"] == "tabletop/reach, tabletop/reach"
    assert all(len(row["groups"]) == 2 and "physics-1" in row["placement"] for row in result["modes"])
