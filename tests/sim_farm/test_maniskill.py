"""`maniskill/*`: the laws of a backend, and equality to the last bit with stock ManiSkill.

The stock environments run in a process of their own that never imports this project, so that what is compared
with is ManiSkill without our speed-ups. It builds a new environment for each episode; ours is reused.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sapien
from mani_skill.utils.registration import REGISTERED_ENVS

from sim_farm.backends.maniskill import rendering
from sim_farm.backends.maniskill.simulator import INSTRUCTIONS
from sim_farm.conformance.checks import Law, name_of, random_actions
from sim_farm.conformance.physics_laws import (
    PHYSICS_LAWS,
    actions_are_clipped,
    chunk_equals_single_steps,
    reset_of_reused_equals_new,
)
from sim_farm.conformance.process_laws import PROCESS_LAWS
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, Float32, PhysicsResult, TaskInfo, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm.histories import pushing_action
from tests.variants import often

ROOT = Path(__file__).resolve().parents[2]
CAMERAS = {
    "PegInsertionSide-v1": 2,
    "PlugCharger-v1": 2,
    "StackCube-v1": 2,
    "StackPyramid-v1": 2,
    "TwoRobotPickCube-v1": 3,
    "TwoRobotStackCube-v1": 3,
}
"""How many cameras a task has, where it has more than one."""


def spec_of(task: str) -> TaskSpec:
    """The task with all its cameras, and shaped reward where it has it."""
    shaped = "normalized_dense" in REGISTERED_ENVS[task].cls.SUPPORTED_REWARD_MODES
    reward: Any = "dense" if shaped else "sparse"
    return TaskSpec(f"maniskill/{task}", reward=reward, cameras=CAMERAS.get(task, 1), image_size=64)


PUSH_CUBE = spec_of("PushCube-v1")
PEG = spec_of("PegInsertionSide-v1")  # draws its geometry when it is reconfigured
PUSH_T = spec_of("PushT-v1")  # rebuilt each episode, recolours its table
PULL_TOOL = spec_of("PullCubeTool-v1")  # these episodes show whether PhysX remembers contacts of earlier ones
TWO_ROBOTS = spec_of("TwoRobotPickCube-v1")

EVERY = tuple(spec_of(task) for task in INSTRUCTIONS)

each_task = pytest.mark.parametrize("spec", EVERY, ids=name_of)
each_kind = pytest.mark.parametrize("spec", (PEG, PUSH_T, PULL_TOOL, TWO_ROBOTS), ids=name_of)
"""Tasks that begin in different ways. Of all tasks, frames and states are compared with stock ManiSkill's."""
# The topmost decorator varies fastest: so all laws of a task come one after another, in the same environments.
each_physics_law = pytest.mark.parametrize("law", PHYSICS_LAWS, ids=name_of)
each_render_law = pytest.mark.parametrize("law", RENDER_LAWS, ids=name_of)


@pytest.fixture(scope="module", autouse=True)
def compiled_shaders() -> Iterator[None]:
    """SAPIEN compiles its shaders, for seven seconds, whenever no other renderer is alive: so one is kept."""
    with closing(make_renderer(PUSH_CUBE)):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("law", PROCESS_LAWS, ids=name_of)
def test_law_across_processes(law: Law) -> None:
    law(PUSH_CUBE)


# tests/sim_farm/test_reused.py compares reused environments with new ones on this task.
@pytest.mark.parametrize(
    "law", often([law for law in PHYSICS_LAWS if law is not reset_of_reused_equals_new], PHYSICS_LAWS), ids=name_of
)
@pytest.mark.parametrize("spec", (PUSH_CUBE,), ids=name_of)
def test_physics_law(law: Law, spec: TaskSpec) -> None:
    law(spec)


@each_render_law
@pytest.mark.parametrize("spec", (PUSH_CUBE,), ids=name_of)
def test_render_law(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.slow
@each_physics_law
@each_kind
def test_physics_law_in_every_kind_of_task(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.slow
@each_render_law
@each_kind
def test_render_law_in_every_kind_of_task(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.slow
@pytest.mark.parametrize("mode", often(("pd_ee_delta_pose",), ("pd_joint_pos", "pd_joint_vel", "pd_ee_delta_pose")))
@pytest.mark.parametrize("law", [actions_are_clipped, chunk_equals_single_steps], ids=name_of)
def test_law_in_other_control_modes(law: Law, mode: str) -> None:
    law(TaskSpec("maniskill/PickCube-v1", control_mode=mode))


# --- stock ManiSkill, in a process that knows nothing of this project

TWO_CUBES = ROOT / "sim_farm/backends/maniskill/two_cubes.py"
"""Our own tasks, as a plain extension of ManiSkill."""
STOCK = """
import json
import runpy
import sys

import gymnasium as gym
import mani_skill.envs
import numpy as np
import torch

torch.set_num_threads(1)
runpy.run_path(sys.argv[1])
kept = []  # the last environment, closed: while it exists SAPIEN does not compile its shaders again


def taken(space, action):
    if isinstance(space, gym.spaces.Dict):
        half = len(action) // 2
        return {"panda_wristcam-0": action[:half], "panda_wristcam-1": action[half:]}
    return action


def seen(obs):
    if not isinstance(obs, dict):
        return {"state": obs[0].numpy().copy()}
    return {name: data["rgb"][0].numpy().copy() for name, data in obs["sensor_data"].items()}


def episode(options, seed, actions):
    env = gym.make(num_envs=1, sim_backend="physx_cpu", **options)
    shown, told = [seen(env.reset(seed=seed)[0])], []
    for action in actions:
        obs, reward, terminated, truncated, info = env.step(taken(env.action_space, action))
        shown.append(seen(obs))
        terminated, truncated = bool(terminated), bool(truncated)
        success = bool(info["success"])
        told.append((np.float32(reward.item()), success, terminated, truncated and not terminated))
        if terminated or truncated:
            break
    env.close()
    kept[:] = [env]
    rows = {name: np.stack([row[name] for row in shown]) for name in shown[0]}
    rows |= zip(("reward", "success", "terminated", "truncated"), map(np.array, zip(*told)))
    return rows


for line in sys.stdin:
    job = json.loads(line)
    results = {}
    for i, (seed, actions) in enumerate(zip(job["seeds"], np.load(job["actions"]))):
        results |= {f"{i} {name}": array for name, array in episode(job["options"], seed, actions).items()}
    assert not any(name.partition(".")[0] == "sim_farm" for name in sys.modules)
    np.savez(job["results"], **results)
    print("done", flush=True)
"""

Episode = dict[str, np.ndarray]
Stock = Callable[[dict[str, Any], list[int], np.ndarray], list[Episode]]


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stock]:
    """Runs episodes `(gym.make's options, seeds, actions [episodes, steps, A])` in stock ManiSkill."""
    folder = tmp_path_factory.mktemp("stock")
    actions_file, results_file = folder / "actions.npy", folder / "results.npz"
    command = [sys.executable, "-c", STOCK, str(TWO_CUBES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder) as process:
        questions, answers = process.stdin, process.stdout
        assert questions is not None and answers is not None

        def run(options: dict[str, Any], seeds: list[int], actions: np.ndarray) -> list[Episode]:
            np.save(actions_file, actions)
            job = {"options": options, "seeds": seeds, "actions": str(actions_file), "results": str(results_file)}
            print(json.dumps(job), file=questions, flush=True)
            while (line := answers.readline()) != "done\n":
                assert line, "stock ManiSkill ended with an error, which it wrote to stderr"
            with np.load(results_file) as results:
                return [_episode(results, i) for i in range(len(seeds))]

        yield run
        questions.close()


def _episode(results: Any, index: int) -> Episode:
    return {key.partition(" ")[2]: results[key] for key in results.files if key.startswith(f"{index} ")}


def stock_options(info: TaskInfo, drawn: bool) -> dict[str, Any]:
    """What a user of plain ManiSkill would pass to `gym.make` for the same task."""
    task = info.spec.name.partition("/")[2]
    size = info.spec.image_size
    paints_its_table = task == "PushT-v1"
    return {
        "id": task,
        "obs_mode": "rgb" if drawn else "state",
        "render_backend": "cpu" if drawn or paints_its_table else "none",
        "reward_mode": {"dense": "normalized_dense", "sparse": "sparse"}[info.spec.reward or "dense"],
        "control_mode": info.spec.control_mode,
        "sensor_configs": {"width": size, "height": size},
    }


def pushing_walk(info: TaskInfo, count: int, seed: int) -> Float32:
    """A random walk between the bounds with a drift that leans a Panda's arm forward, down onto the table."""
    rng = np.random.default_rng(seed)
    low, high = np.array(info.action_low), np.array(info.action_high)
    walk = np.cumsum(rng.normal(0, 0.2, (count, info.action_dim)), axis=0)
    walk[:, 1] += 0.5
    return (low + (high - low) * (np.clip(walk, -1, 1) + 1) / 2).astype(np.float32)


def episodes_of(info: TaskInfo, seeds: list[int], steps: int) -> np.ndarray:
    """Actions [episodes, steps, A]: walks and uniform ones in turn."""
    draws = (pushing_walk, random_actions)
    return np.stack([draws[i % 2](info, steps, seed) for i, seed in enumerate(seeds)])


def our_episode(physics: Any, seed: int, actions: np.ndarray) -> list[PhysicsResult]:
    results = [physics.reset(EpisodeSpec(seed))]
    for action in actions:
        results.append(physics.step(action[None]))
        if results[-1].ended:
            break
    return results


def states_equal_stock(stock: Stock, spec: TaskSpec, seeds: list[int]) -> list[Episode]:
    """Whole episodes of one reused environment equal those of new stock environments, bit for bit."""
    with closing(make_physics(spec)) as physics:
        actions = episodes_of(physics.info, seeds, physics.info.max_episode_steps)
        ours = [our_episode(physics, seed, chosen) for seed, chosen in zip(seeds, actions, strict=True)]
        theirs = stock(stock_options(physics.info, drawn=False), seeds, actions)
    for seed, results, expected in zip(seeds, ours, theirs, strict=True):
        state = np.stack([result.state for result in results])
        _assert_rows_equal(state, expected["state"], f"seed {seed}: state")
        for name in ("reward", "success", "terminated", "truncated"):
            reported = np.concatenate([getattr(result, name) for result in results[1:]])
            _assert_rows_equal(reported, expected[name], f"seed {seed}: {name}")
    return theirs


def frames_equal_stock(stock: Stock, spec: TaskSpec, seeds: list[int], steps: int) -> None:
    """Frames of one reused renderer equal those of new stock environments, every camera, bit for bit."""
    with closing(make_physics(spec)) as physics, closing(make_renderer(spec)) as renderer:
        cameras = physics.info.cameras
        actions = episodes_of(physics.info, seeds, steps)
        theirs = stock(stock_options(physics.info, drawn=True), seeds, actions)
        for seed, chosen, expected in zip(seeds, actions, theirs, strict=True):
            assert set(cameras) <= set(expected), f"stock shows {list(expected)}"
            assert len(expected) == len(cameras) + 4, f"stock has cameras that this test leaves out: {list(expected)}"
            scenes = [result.scene for result in our_episode(physics, seed, chosen)]
            for name, frames in renderer.render(scenes, cameras).items():
                _assert_rows_equal(frames, expected[name], f"seed {seed}: camera {name}")


def _assert_rows_equal(ours: np.ndarray, theirs: np.ndarray, what: str) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, f"{what}: {ours.shape} and {theirs.shape}"
    for step, (one, two) in enumerate(zip(ours, theirs, strict=True)):
        assert one.tobytes() == two.tobytes(), f"{what} differs at row {step}: {one} and {two}"


@pytest.mark.slow  # in the default run the frames of two episodes are compared, which show the states
@pytest.mark.parametrize("spec", (PEG, PUSH_T, PULL_TOOL, TWO_ROBOTS), ids=name_of)
def test_state_reward_and_success_equal_stock_maniskill(stock: Stock, spec: TaskSpec) -> None:
    """Of PushCube in the test of contacts, too."""
    states_equal_stock(stock, replace(spec, cameras=0), seeds=[4, 5])


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode",
    often(("pd_ee_delta_pose",), ("pd_joint_pos", "pd_ee_delta_pose", "pd_joint_vel", "pd_joint_delta_pos_vel")),
)
def test_other_control_modes_equal_stock_maniskill(stock: Stock, mode: str) -> None:
    states_equal_stock(stock, TaskSpec("maniskill/PickCube-v1", control_mode=mode), seeds=[0, 1])


@pytest.mark.slow
def test_episodes_that_are_rich_in_contacts_equal_stock_maniskill(stock: Stock) -> None:
    """Otherwise equality would say little: the arm hits the cube in some of the compared episodes."""
    episodes = states_equal_stock(stock, replace(PUSH_CUBE, cameras=0), seeds=list(range(10)))
    moved = [np.linalg.norm(e["state"][-1, -7:-4] - e["state"][0, -7:-4]) > 0.01 for e in episodes]
    assert any(moved), "no episode moved the cube by a centimetre"


@pytest.mark.parametrize("spec", (PUSH_CUBE, pytest.param(PEG, marks=pytest.mark.slow)), ids=name_of)
def test_split_frames_equal_stock_maniskill(stock: Stock, spec: TaskSpec) -> None:
    frames_equal_stock(stock, spec, seeds=[0, 1], steps=5)


# --- a reused environment after bodies have come to rest


@dataclass(frozen=True)
class Push:
    """An episode of PushCube that a closed-loop controller drives."""

    seed: int
    wait: int
    """Env steps before the controller begins; the cube falls asleep after eight."""
    short: float
    """Metres before the goal's centre at which the controller lets go of the cube; negative: never."""


RESTING = (
    (Push(62, wait=4, short=-1), Push(485, wait=9, short=-1)),
    (Push(54, wait=5, short=-1), Push(819, wait=6, short=-1)),
    (Push(885, wait=6, short=-1), Push(268, wait=6, short=-1)),
    (Push(632, wait=8, short=-1), Push(268, wait=9, short=0.15)),
    (Push(311, wait=8, short=-1), Push(257, wait=7, short=0.18)),
)
"""An episode, and the one that follows it in the same environment. The latter took another course there than in a new
environment when bodies were not woken at a reset."""


def push(physics: Any, episode: Push) -> Float32:
    """The states [n, S] of the episode: the gripper goes behind the cube, pushes it and lets it come to rest."""
    states = [physics.reset(EpisodeSpec(episode.seed)).state]
    for step in range(physics.info.max_episode_steps):
        chosen = pushing_action(states[-1], episode.short) if step >= episode.wait else np.array([0, 0, 0, -1])
        result = physics.step(chosen.astype(np.float32)[None])
        states.append(result.state)
        if result.ended:
            break
    return np.stack(states)


@pytest.mark.slow
def test_a_reused_environment_equals_a_new_one_after_bodies_came_to_rest() -> None:
    spec = TaskSpec("maniskill/PushCube-v1", control_mode="pd_ee_delta_pos", max_episode_steps=60)
    for earlier, later in RESTING:
        with closing(make_physics(spec)) as used, closing(make_physics(spec)) as new:
            pushed = push(used, earlier)
            assert np.linalg.norm(pushed[-1, 28:31] - pushed[0, 28:31]) > 0.05, f"{earlier} does not push the cube"
            _assert_rows_equal(push(used, later), push(new, later), f"{later} after {earlier}: state")


@pytest.mark.slow
@each_task
def test_state_reward_and_success_equal_stock_in_every_task(stock: Stock, spec: TaskSpec) -> None:
    states_equal_stock(stock, replace(spec, cameras=0), seeds=[4, 5])


@pytest.mark.slow
@each_task
def test_split_frames_equal_stock_in_every_task(stock: Stock, spec: TaskSpec) -> None:
    frames_equal_stock(stock, replace(spec, image_size=128), seeds=[4, 5, 6], steps=12)


# --- what the user can mend


@pytest.mark.slow
def test_building_and_closing_an_environment_collects_nothing_of_the_callers() -> None:
    """ManiSkill collects garbage each time, which takes longer the more objects there are."""
    make_physics(TaskSpec("maniskill/PushCube-v1")).close()  # what is imported and cached now is not made below
    gc.unfreeze()  # as in a process that did not freeze anything
    gc.collect()
    gc.disable()
    try:
        garbage = type("Garbage", (), {})()
        garbage.itself, known = garbage, weakref.ref(garbage)
        del garbage
        make_physics(TaskSpec("maniskill/PushCube-v1")).close()
        assert known() is not None, "it was looked at"
        assert not gc.get_freeze_count()
        gc.collect()
        assert known() is None, "it is never collected"
    finally:
        gc.enable()
        gc.freeze()


def test_the_installed_shader_is_the_one_that_is_rewritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """For cameras that are made within the block; one that asks for another shader has that."""
    before = sapien.render.get_camera_shader_dir()
    chosen: list[str] = []
    monkeypatch.setattr(sapien.render, "set_camera_shader_dir", chosen.append)
    with rendering.light_cameras():
        for name in ("minimal", "default"):
            sapien.render.set_camera_shader_dir(name)
    light = Path(chosen[0])
    assert chosen[1:] == ["default", before] and light.name == "minimal" and light.is_absolute()
    for name in ("gbuffer.vert", "gbuffer.frag"):
        vectors = [line for line in (light / name).read_text().splitlines() if line.startswith("layout(location")]
        handed_on = [line for line in vectors if (" out " if name.endswith("vert") else " in ") in line]
        assert len(handed_on) == 4


def test_without_a_cache_folder_pictures_are_drawn_as_sapien_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "embodied").write_text("no folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "embodied"))  # takes the place of such a cache
    assert rendering._light.__wrapped__() == "minimal"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    light = Path(rendering._light.__wrapped__())
    assert light.name == "minimal" and [folder.name for folder in light.parents[1].iterdir()] == [light.parent.name]


@pytest.mark.parametrize("text", ["", "an old part", "an old part, an old part"])
def test_an_unknown_shader_is_not_rewritten(text: str) -> None:
    found = rendering._rewritten(text, {"an old part": "a new one"})
    assert found == ("a new one" if text == "an old part" else None)


def test_unknown_task_shows_the_nearest() -> None:
    with pytest.raises(FarmError, match="did you mean.* maniskill/PushCube-v1"):
        make_physics(TaskSpec("maniskill/PushCube"))


def test_missing_control_mode_lists_those_there_are() -> None:
    with pytest.raises(FarmError, match="no control mode 'pd_ee_delta_pose'; it has: .*pd_joint_delta_pos"):
        make_physics(TaskSpec("maniskill/PickCubeSO100-v1", control_mode="pd_ee_delta_pose"))


def test_unsupported_reward_names_the_supported() -> None:
    with pytest.raises(FarmError, match="PlugCharger-v1 has no dense reward; it has: sparse"):
        make_physics(TaskSpec("maniskill/PlugCharger-v1", reward="dense"))


def test_too_many_cameras_names_those_there_are() -> None:
    with pytest.raises(FarmError, match="3 cameras were asked for, .* has 2: base_camera, hand_camera"):
        make_physics(replace(PEG, cameras=3))


def test_recorded_initial_state_is_refused() -> None:
    with closing(make_physics(replace(PUSH_CUBE, cameras=0))) as physics:
        with pytest.raises(FarmError, match="no recorded initial states"):
            physics.reset(EpisodeSpec(0, init_state=1))


@pytest.mark.slow
@pytest.mark.parametrize("make", often(("make_renderer",), ("make_physics", "make_renderer")))
def test_without_a_vulkan_device_the_doctor_is_named(make: str, tmp_path: Path) -> None:
    code = f"""
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.registry import {make}
try:
    {make}(TaskSpec("maniskill/PushCube-v1", cameras=1))
except FarmError as error:
    assert "embodied doctor" in str(error) and "Vulkan" in str(error), error
else:
    raise AssertionError("an environment without Vulkan")
"""
    hidden = dict.fromkeys(("VK_ICD_FILENAMES", "VK_DRIVER_FILES"), str(tmp_path))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT, env=os.environ | hidden)


@pytest.mark.slow
def test_actions_of_two_robots_lie_one_after_the_other() -> None:
    with closing(make_physics(replace(TWO_ROBOTS, cameras=0))) as physics:
        assert physics.info.action_dim == 16
        for robot in (0, 1):
            before = physics.reset(EpisodeSpec(0)).proprio.reshape(2, 2, 9)[:, 0]
            actions = np.zeros((5, 2, 8), np.float32)
            actions[:, robot, 0] = 1
            after = physics.step(actions.reshape(5, 16)).proprio.reshape(2, 2, 9)[:, 0]
            turned = np.abs(after - before)[:, 0]
            assert turned[robot] > 0.1, f"robot {robot} did not turn"
            assert turned[1 - robot] < 0.01, f"robot {1 - robot} turned by the other's action"
