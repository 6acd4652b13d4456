"""Scripted policies on the real LIBERO, and recordings played again, both through `embodied eval`."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied.commands.evaluate import evaluate_run
from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.evaluation.folder import EvalFolder, read_folder
from policies.contract import PolicyError
from policies.scripted.libero import SCRIPTS, find_script
from policies.scripted.replay import save_recording
from sim_farm.backends.libero.environment import parts
from sim_farm.backends.libero.physics import LiberoPhysics
from sim_farm.backends.libero.tasks import find_task, task_names
from sim_farm.contract import EpisodeSpec, TaskSpec
from tests.variants import often

SUITES = ("libero_goal", "libero_spatial", "libero_object")
SCRIPTED = [
    f"libero/{name}"
    for name in task_names()
    if name.startswith(SUITES) and find_task(f"libero/{name}").instruction in SCRIPTS
]
DRAWER, PLATE, STOVE, BOWL = (f"libero/libero_goal/{i}" for i in (0, 5, 7, 8))
RANDOM: dict[str, Any] = {
    "env": {"task": "tabletop/push", "num_envs": 4, "max_episode_steps": 30},
    "policy": {"kind": "random", "chunk": 2},
    "farm": {"physics_workers": 1},
    "eval": {"greedy": False, "videos": 0, "episodes": 9},
    "runtime": {"mode": "inline"},
}


def config(**sections: dict[str, Any]) -> Config:
    return parse_config({name: RANDOM[name] | sections.get(name, {}) for name in RANDOM}, "test")


def evaluated(settings: Config, folder: Path) -> EvalFolder:
    evaluate_run("untrained", settings, None, folder.parent, into=folder)
    return read_folder(folder)


def scripted(tasks: list[str], trials: int, **evaluation: Any) -> Config:
    """`configs/libero_scripted.yaml` on some of the tasks, in this process."""
    data = load_config("libero_scripted").model_dump(mode="json")
    data["eval"] |= {"tasks": tasks, "episodes": trials} | evaluation
    data["env"] |= {"num_envs": 2}
    data["farm"] |= {"physics_workers": 1, "groups": 1}
    data["runtime"] |= {"mode": "inline"}
    return parse_config(data, "test")


# --- scripts


def test_three_suites_have_scripts_for_nearly_all_of_their_tasks() -> None:
    assert {DRAWER, PLATE, STOVE, BOWL} < set(SCRIPTED)
    assert len(SCRIPTED) == len(SCRIPTS) == 29


@pytest.mark.parametrize(
    "task",
    often(
        [BOWL, "libero/libero_object/1"],
        [BOWL, "libero/libero_spatial/0", *(task for task in SCRIPTED if "object" in task)],
    ),
)
def test_a_layout_is_that_of_its_task(task: str) -> None:
    with closing(LiberoPhysics(TaskSpec(task))) as physics:
        layout = find_script(find_task(task).instruction).layout
        named = [(name, 0) for name in layout.movables] + list(layout.fixtures)
        assert named == [(name, len(joints)) for name, joints in parts(physics._env)]
        assert layout.size == physics.info.state_dim


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    often([STOVE], (DRAWER, PLATE, STOVE, BOWL, "libero/libero_spatial/4", "libero/libero_object/1")),
)
def test_scripts_solve_their_tasks(task: str, tmp_path: Path) -> None:
    folder = evaluated(scripted([task], 3, init_states=[0, 24, 49]), tmp_path / "e")
    assert [outcome.success for outcome in folder.in_order()] == [True] * 3
    assert [outcome.spec.init_state for outcome in folder.in_order()] == [0, 24, 49]


@pytest.mark.slow
@pytest.mark.parametrize("task", SCRIPTED)
def test_scripts_solve_their_tasks_from_at_least_eighty_percent_of_the_initial_states(
    task: str, tmp_path: Path
) -> None:
    folder = evaluated(scripted([task], 50), tmp_path / "e")
    assert sum(bool(outcome.success) for outcome in folder.in_order()) >= 40


@pytest.mark.slow
def test_a_knocked_over_plan_is_tried_again(tmp_path: Path) -> None:
    """A controller without memory: after 40 random env steps the task is solved all the same."""
    import policies

    with closing(LiberoPhysics(TaskSpec(BOWL))) as physics:
        policy = policies.build("scripted", policies.PolicySpec(7, 1, physics.info.state_dim), seed=0)
        result = physics.reset(EpisodeSpec(3, 3))
        physics.step(np.random.default_rng(0).uniform(-1, 1, (40, 7)).astype(np.float32))
        while not result.ended:
            inputs = policies.Inputs(state=torch.from_numpy(result.state)[None], instruction=(result.instruction,))
            result = physics.step(policy.act(inputs, None).chunk[0].numpy())
        assert result.success[-1]


def test_a_task_without_a_script_is_refused() -> None:
    with pytest.raises(PolicyError, match="no script for .*docs/scripted-policies.md"):
        find_script(find_task("libero/libero_90/3").instruction)


@pytest.mark.slow
def test_a_task_without_script_ends_the_evaluation_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="no script for .*docs/scripted-policies.md"):
        evaluated(scripted(["libero/libero_90/3"], 1), tmp_path / "e")


# --- replay


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> EvalFolder:
    """Random episodes of tabletop/push."""
    return evaluated(config(), tmp_path_factory.mktemp("random") / "e")


def record(folder: EvalFolder, path: Path, count: int | None = None) -> str:
    outcomes = folder.in_order()[:count]
    episodes = [(outcome.spec.seed, outcome.spec.init_state) for outcome in outcomes]
    save_recording(path, episodes, [folder.actions(outcome) for outcome in outcomes])
    return str(path)


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"env": {"num_envs": 6}, "farm": {"groups": 1}},
        pytest.param({"runtime": {"mode": "ray"}, "farm": {"physics_workers": 2}}, marks=pytest.mark.slow),
    ],
    ids=["as recorded", "other environments", "ray"],
)
def test_a_replay_gives_the_recorded_episodes(recorded: EvalFolder, how: dict[str, Any], tmp_path: Path) -> None:
    path = record(recorded, tmp_path / "actions.safetensors")
    playing = {"kind": "replay", "reads": ["episode"], "options": {"recording": path}}
    sections = {name: RANDOM[name] | how.get(name, {}) for name in RANDOM}
    again = evaluated(config(**sections | {"policy": sections["policy"] | playing}), tmp_path / "e")
    assert again.in_order() == recorded.in_order()
    for outcome in recorded.in_order():
        assert np.array_equal(again.actions(outcome), recorded.actions(outcome))


def test_a_replay_in_longer_chunks_gives_the_same_episodes(recorded: EvalFolder, tmp_path: Path) -> None:
    """Rewards are summed chunk by chunk: the return is the same up to that sum's rounding."""
    path = record(recorded, tmp_path / "actions.safetensors")
    playing = {"kind": "replay", "reads": ["episode"], "chunk": 7, "options": {"recording": path}}
    again = evaluated(config(policy=playing), tmp_path / "e")
    for one, other in zip(again.in_order(), recorded.in_order(), strict=True):
        assert (one.spec, one.length, one.success) == (other.spec, other.length, other.success)
        assert one.total_reward == pytest.approx(other.total_reward, rel=1e-5)
        assert np.array_equal(again.actions(one), recorded.actions(other))


@pytest.mark.slow
def test_a_replay_of_libero_solves_what_was_solved(tmp_path: Path) -> None:
    settings = scripted([DRAWER], 2, init_states=[4, 5])
    solved = evaluated(settings, tmp_path / "scripted")
    path = record(solved, tmp_path / "actions.safetensors")
    data = settings.model_dump(mode="json")
    data["policy"] |= {"kind": "replay", "reads": ["episode"], "chunk": 5, "options": {"recording": path}}
    again = evaluated(parse_config(data, "test"), tmp_path / "e")
    assert again.in_order() == solved.in_order() and all(outcome.success for outcome in again.in_order())


def test_an_episode_that_was_not_recorded_ends_the_replay(recorded: EvalFolder, tmp_path: Path) -> None:
    path = record(recorded, tmp_path / "actions.safetensors", count=8)
    playing = {"kind": "replay", "reads": ["episode"], "options": {"recording": path}}
    with pytest.raises(PolicyError, match="no episode of seed .*; it has 8 others"):
        evaluated(config(policy=playing), tmp_path / "e")
