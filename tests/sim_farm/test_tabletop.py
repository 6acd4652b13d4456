"""`tabletop/*`: the laws of a backend, frames against MuJoCo's own, and that the tasks can be solved."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sim_farm.backends import mujoco_gl as gl
from sim_farm.backends.tabletop.tasks import TASKS
from sim_farm.conformance.checks import Law, name_of, random_actions
from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.conformance.process_laws import PROCESS_LAWS
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, PhysicsResult, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm.tabletop_controllers import Controller, pick_and_place, push, reach
from tests.variants import often

ROOT = Path(__file__).resolve().parents[2]
REACH = TaskSpec("tabletop/reach", cameras=3, image_size=48)
PUSH = replace(REACH, name="tabletop/push")
PICK_AND_PLACE = replace(REACH, name="tabletop/pick_and_place")
REACH_RED = replace(REACH, name="tabletop/reach_red")
REACH_BLUE = replace(REACH, name="tabletop/reach_blue")
SPECS = (REACH, REACH_RED, REACH_BLUE, PUSH, PICK_AND_PLACE)

# The other two are REACH with other colours.
each_task = pytest.mark.parametrize("spec", often((REACH, PUSH, PICK_AND_PLACE), SPECS), ids=name_of)


@pytest.mark.parametrize("law", PHYSICS_LAWS, ids=name_of)
@each_task
def test_physics_law(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.parametrize("law", RENDER_LAWS, ids=name_of)
@each_task
def test_render_law(law: Law, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.parametrize("law", PROCESS_LAWS, ids=name_of)
def test_law_across_processes(law: Law) -> None:
    law(REACH)


# --- frames equal those of MuJoCo's own renderer, in a process that knows nothing of this project

NATIVE = """
import sys
import mujoco, numpy as np

scene_file, episode_file, frames_file, size = sys.argv[1:]
model = mujoco.MjModel.from_xml_path(scene_file)
data = mujoco.MjData(model)
episode = np.load(episode_file)
data.qpos[:] = episode["qpos"]
data.mocap_pos[:] = episode["marks"]
data.ctrl[:] = data.qpos[:5]
frames = []
with mujoco.Renderer(model, int(size), int(size)) as renderer:
    for action in episode["actions"].astype(np.float64):
        data.ctrl[:3] = data.qpos[:3] + 0.03 * action[:3]
        if len(action) == 4:
            data.ctrl[3:5] = 0.02 * (action[3] + 1)
        for _ in range(5):
            mujoco.mj_step(model, data)
        seen = mujoco.MjData(model)
        seen.qpos[:] = data.qpos
        seen.mocap_pos[:] = data.mocap_pos
        mujoco.mj_forward(model, seen)
        for camera in ("front", "wrist", "side"):
            renderer.update_scene(seen, camera)
            frames.append(renderer.render())
np.save(frames_file, np.stack(frames))
"""


@each_task
def test_split_frames_equal_native_frames(spec: TaskSpec, tmp_path: Path) -> None:
    with closing(make_physics(spec)) as physics, closing(make_renderer(spec)) as renderer:
        start = physics.reset(EpisodeSpec(7)).scene.view(np.float64)
        actions = random_actions(physics.info, 15)
        scenes = [physics.step(action[None]).scene for action in actions]
        frames = renderer.render(scenes, physics.info.cameras)
    split = np.stack([frames[name][i] for i in range(len(scenes)) for name in ("front", "wrist", "side")])

    episode, native = tmp_path / "episode.npz", tmp_path / "native.npy"
    task = TASKS[spec.name.removeprefix("tabletop/")]
    end = -3 * task.marks
    np.savez(episode, qpos=start[:end], marks=start[end:].reshape(-1, 3), actions=actions)
    scene = ROOT / "assets/tabletop" / f"{task.scene}.xml"
    command = [sys.executable, "-c", NATIVE, str(scene), str(episode), str(native), str(spec.image_size)]
    subprocess.run(command, check=True, timeout=240, env=os.environ | {"MUJOCO_GL": gl.platform()})
    assert np.array_equal(split, np.load(native)), "a split frame differs from MuJoCo's own"


def test_physics_needs_no_opengl() -> None:
    """A process that only steps loads no OpenGL binding and makes no context, even if it has a renderer."""
    code = """
import sys
import numpy as np
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.registry import make_physics, make_renderer
spec = TaskSpec("tabletop/push", cameras=1)
physics, renderer = make_physics(spec), make_renderer(spec)
physics.reset(EpisodeSpec(0))
physics.step(np.zeros((2, 3), np.float32))
loaded = {name.partition(".")[0] for name in sys.modules} & {"OpenGL", "glfw"}
assert not loaded, loaded
"""
    plain = {key: value for key, value in os.environ.items() if key not in ("MUJOCO_GL", "PYOPENGL_PLATFORM")}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT, env=plain)


def test_drawing_without_opengl_says_what_to_do() -> None:
    code = """
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics, make_renderer
spec = TaskSpec("tabletop/reach", cameras=1)
scene = make_physics(spec).reset(EpisodeSpec(0)).scene
try:
    make_renderer(spec).render([scene], ["front"])
except FarmError as error:
    assert "embodied doctor" in str(error), error
else:
    raise AssertionError("a picture without OpenGL")
"""
    forbidden = os.environ | {"MUJOCO_GL": "disable"}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT, env=forbidden)


# --- the tasks can be solved

CONTROLLED = pytest.mark.parametrize(
    ("spec", "controller"),
    [(REACH, reach), (REACH_RED, reach), (REACH_BLUE, reach), (PUSH, push), (PICK_AND_PLACE, pick_and_place)],
    ids=("reach", "reach_red", "reach_blue", "push", "pick_and_place"),
)


def episodes(spec: TaskSpec, controller: Controller, seeds: range) -> Iterator[list[PhysicsResult]]:
    """The single-step results of one episode per seed."""
    with closing(make_physics(spec)) as physics:
        for seed in seeds:
            results = [physics.reset(EpisodeSpec(seed))]
            while not results[-1].ended:
                action = controller(results[-1].state.astype(np.float64))
                results.append(physics.step(action.astype(np.float32)[None]))
            yield results[1:]


@CONTROLLED
def test_a_scripted_controller_solves_the_task(spec: TaskSpec, controller: Controller) -> None:
    solved = [results[-1].success[0] for results in episodes(spec, controller, range(20))]
    assert sum(solved) >= 18, f"solved {sum(solved)} of 20"


@CONTROLLED
def test_dense_reward_is_progress_and_then_one(spec: TaskSpec, controller: Controller) -> None:
    for results in episodes(spec, controller, range(5)):
        assert results[-1].terminated[0], "solving the task does not terminate the episode"
        assert results[-1].reward[0] == 1, "the solving step's reward is not 1"
        before = [result.reward[0] for result in results[:-1]]
        assert all(abs(reward) < 0.5 for reward in before), "a step before the solution pays like one"
        assert 0 < sum(before) <= 1, "the way to the solution pays nothing, or more than the solution"


@each_task
def test_lingering_never_pays(spec: TaskSpec) -> None:
    """Shaped reward telescopes: without a solution an episode's return stays within one, however long."""
    rng = np.random.default_rng(0)
    still = replace(spec, max_episode_steps=200)
    for results in episodes(still, lambda state: rng.uniform(-0.3, 0.3, 4 if "pick" in spec.name else 3), range(3)):
        shaped = [result.reward[0] for result in results if not result.success[0]]
        assert abs(sum(shaped)) <= 1, "shaped reward accumulates"


@CONTROLLED
def test_sparse_reward_is_one_where_solved(spec: TaskSpec, controller: Controller) -> None:
    for results in episodes(replace(spec, reward="sparse"), controller, range(5)):
        rewards = [result.reward[0] for result in results]
        assert rewards == [0.0] * (len(rewards) - 1) + [1.0]


@each_task
def test_no_episode_begins_solved(spec: TaskSpec) -> None:
    """The first step of an idle robot never solves the task, so a success is always the policy's."""
    with closing(make_physics(spec)) as physics:
        idle = np.zeros((1, physics.info.action_dim), np.float32)
        for seed in range(200):
            physics.reset(EpisodeSpec(seed))
            assert not physics.step(idle).success[0], f"seed {seed} is solved by doing nothing"


def test_two_tasks_differ_in_their_instruction_alone() -> None:
    """The same seeds give the same scenes and pictures; what solves one ends the other, unsolved."""
    with closing(make_physics(REACH_RED)) as red, closing(make_physics(REACH_BLUE)) as blue:
        for seed in range(20):
            begun = [physics.reset(EpisodeSpec(seed)) for physics in (red, blue)]
            assert np.array_equal(begun[0].scene, begun[1].scene)
            assert [result.instruction for result in begun] == [
                "move the gripper to the red ball", "move the gripper to the blue ball",
            ]  # fmt: skip
            seen, other = begun
            while not seen.ended:
                action = reach(seen.state.astype(np.float64)).astype(np.float32)[None]
                seen, other = red.step(action), blue.step(action)
                assert np.array_equal(seen.scene, other.scene)
            assert seen.success[-1] and seen.terminated[-1] and seen.reward[-1] == 1
            assert other.terminated[-1] and not other.success[-1] and not other.truncated[-1] and other.reward[-1] < 0.5


def test_a_mistyped_task_is_refused_with_the_nearest() -> None:
    with pytest.raises(FarmError, match="did you mean tabletop/reach"):
        make_physics(TaskSpec("tabletop/reahc"))
