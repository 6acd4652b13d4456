"""Mistakes that only a simulator can name are refused by every command before it builds an environment of a farm. A
quick simulator is asked in the command's process, before Ray is started; another one in a process of the session, while
Ray is started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from embodied import cli
from embodied.config.files import parse_config, save_config
from embodied.runtime.ray.cluster import RayCluster
from embodied.runtime.ray.runtime import RayRuntime
from tests.embodied.support import stranger

OWN = "tests.sim_farm.test_gymnasium:gymnasium/farm-tests"
REACH = {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 10}
SLOW = {"env": {"task": f"{stranger.NAMES['env.task']}/reach", "num_envs": 2}}
"""A stranger's simulator, of which nothing is known before it is asked."""
SEEING = {
    "policy": {"kind": "flow", "reads": ["images"], "options": {"encoder": "cnn"}},
    "env": {**REACH, "cameras": 1, "image_size": 32},
}
UNTRAINED = "has to be trained before it is evaluated"
STATES = {"eval": {"init_states": [0, 1], "episodes": 2, "greedy": False}}
RUNS, EVERY = ("train", "profile", "compare"), ("train", "profile", "compare", "eval", "record")
MISTAKES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "discrete actions": (
        {"env": {"task": "gymnasium/CartPole-v1", "num_envs": 2}},
        "one of 2 choices, and gaussian_mlp says real numbers",
        EVERY,
    ),
    "actions of several numbers of choices": (
        {"env": {"task": f"{OWN}/Choices-v0", "num_envs": 2}},
        "MultiDiscrete",
        EVERY,
    ),
    "no time limit": ({"env": {"task": f"{OWN}/Endless-v0", "num_envs": 2}}, "no time limit of its own", EVERY),
    "tasks of other sizes": (
        {**SEEING, "extra_tasks": [{"task": "tabletop/push", "image_size": 64}]},
        "its image_size is 64, the first task's 32",
        RUNS,
    ),
    "recorded states": ({"env": {**REACH, "init_states": 3}}, "the task's recorded initial states are none", RUNS),
    "a measure": (
        {"env": {"task": "gymnasium/Pendulum-v1", "num_envs": 2}, "workflow": "grpo", "rollout": {"episode_group": 2}},
        "gymnasium/Pendulum-v1 has no success",
        ("train",),
    ),
    "states of the evaluation": ({"env": REACH, **STATES}, "has no initial state 0, 1", ("train",)),
    "states of an evaluation": (
        {"env": REACH, "policy": {"kind": "scripted"}, **STATES},
        "has no initial state 0, 1",
        ("eval", "record"),
    ),
    "no weights": ({"env": REACH}, UNTRAINED, ("eval", "record")),
    "slow: choices": ({**SLOW, "policy": {"kind": "categorical_mlp"}}, "and the task's are real numbers", EVERY),
    "slow: recorded states": (
        {"env": {**SLOW["env"], "init_states": 3}},
        "the task's recorded initial states are none",
        RUNS,
    ),
    "slow: states": ({**SLOW, "policy": {"kind": "random"}, **STATES}, "has no initial state 0, 1", ("eval", "record")),
    "slow: no weights": (SLOW, UNTRAINED, ("eval", "record")),
    "slow: no camera": ({**SEEING, "env": {**SLOW["env"], "cameras": 1}}, "and no camera, got", ("train", "eval")),
}


class RayStarted(Exception):
    """A command came as far as starting Ray."""


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """Numbers of the workers for which Ray would have been started early."""

    def start_ray(self: RayCluster, *arguments: Any) -> None:
        raise RayStarted

    numbers: list[int] = []
    monkeypatch.setattr(RayCluster, "start_ray", start_ray)
    # A start of Ray takes seconds, for each of these mistakes; tests/embodied/runtime/test_leaks.py really starts it.
    monkeypatch.setattr(RayRuntime, "prepare", lambda self, workers: numbers.append(workers))
    monkeypatch.chdir(tmp_path)
    stranger.write(tmp_path / "packages")
    monkeypatch.syspath_prepend(tmp_path / "packages")
    for name in [name for name in sys.modules if name.partition(".")[0] == "stranger"]:
        monkeypatch.delitem(sys.modules, name)
    return numbers


def command(verb: str, settings: dict[str, Any], folder: Path) -> list[str]:
    farm = {"groups": 1, "physics_workers": 1}
    config = parse_config({"farm": farm, "runtime": {"mode": "ray"}, **settings}, "test")
    save_config(config, folder / "own.yaml")
    return [verb, "own.yaml", *(["--out", "out"] if verb in ("record", "compare", "profile") else [])]


@pytest.mark.parametrize(
    ("verb", "mistake"), [(verb, mistake) for mistake, (_, _, verbs) in MISTAKES.items() for verb in verbs]
)
def test_what_a_simulator_knows_is_refused_before_a_farm_is_built(
    verb: str, mistake: str, prepared: list[int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, says, _ = MISTAKES[mistake]
    status = cli.main(command(verb, settings, tmp_path))
    said = " ".join(capsys.readouterr().err.split())
    assert status == 2 and says in said, said
    assert len(prepared) == mistake.startswith("slow"), "Ray is started while slow simulators are asked"
    left = [path for path in tmp_path.rglob("*") if path.is_file() and "packages" not in path.parts]
    assert left == [tmp_path / "own.yaml"], "nothing is left behind"


@pytest.mark.parametrize("task", [REACH["task"], SLOW["env"]["task"]])
@pytest.mark.parametrize("verb", EVERY)
def test_what_is_right_goes_on_to_start_ray(verb: str, task: Any, tmp_path: Path) -> None:
    acts = {"policy": {"kind": "random"}} if verb in ("eval", "record") else {}
    with pytest.raises(RayStarted):
        cli.main(command(verb, {"env": {"task": task, "num_envs": 8}, **acts}, tmp_path))
