"""LIBERO's backend against LIBERO itself: states and pictures equal to the last bit, resets without a rebuild."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import resource
import subprocess
import sys
import weakref
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import linregress

from sim_farm.backends.libero import tasks
from sim_farm.backends.libero.assets import assets
from sim_farm.backends.libero.environment import shared_model
from sim_farm.backends.libero.physics import LiberoPhysics
from sim_farm.conformance.checks import name_of
from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.conformance.process_laws import PROCESS_LAWS
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm import libero_stock as stock
from tests.sim_farm.libero_stock import (
    SIZE,
    assert_models_equal,
    assert_states_equal,
    random_actions,
    settings_naming,
    simulator,
)
from tests.variants import often

CAMERAS = ("agentview", "robot0_eye_in_hand")
ALL = [f"libero/{name}" for name in tasks.task_names()]
SOME = [
    "libero/libero_spatial/3",
    "libero/libero_goal/0",
    "libero/libero_10/9",
]
"""Tasks of several kinds of room; among them drawers and a microwave. The slow run has all 130."""
DRAWER, STOVE, BOWL = "libero/libero_goal/0", "libero/libero_goal/7", "libero/libero_spatial/0"


def assert_observed(seen: dict[str, np.ndarray], state: np.ndarray, when: str) -> None:
    theirs = np.concatenate(
        [seen[f"robot0_{name}"] for name in ("eef_pos", "eef_quat", "gripper_qpos", "joint_pos", "joint_vel")]
    ).astype(np.float32)
    assert np.array_equal(theirs, state[: len(theirs)]), f"the robot's observation differs {when}"


@pytest.mark.parametrize("law", PHYSICS_LAWS, ids=name_of)
@pytest.mark.parametrize(
    "spec", often([TaskSpec(BOWL, cameras=1)], [TaskSpec(BOWL, cameras=1), TaskSpec(STOVE, cameras=1)]), ids=name_of
)
def test_physics(law: Any, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.slow
@pytest.mark.parametrize("law", PROCESS_LAWS, ids=name_of)
def test_law_across_processes(law: Any) -> None:
    law(TaskSpec(DRAWER, cameras=1, image_size=SIZE))


@pytest.mark.parametrize("law", RENDER_LAWS, ids=name_of)
@pytest.mark.parametrize("spec", [TaskSpec(DRAWER, cameras=CAMERAS, image_size=SIZE)], ids=name_of)
def test_rendering(law: Any, spec: TaskSpec) -> None:
    law(spec)


@pytest.mark.slow
@pytest.mark.parametrize("law", PHYSICS_LAWS, ids=name_of)
@pytest.mark.parametrize("name", ALL[::32])
def test_physics_of_many_tasks(law: Any, name: str) -> None:
    law(TaskSpec(name, cameras=1))


def compare_with_native(task: str, steps: int) -> None:
    """States, observations, success and pictures equal those of `OffScreenRenderEnv`, in a reused environment."""
    spec = TaskSpec(task, cameras=CAMERAS, image_size=SIZE, orientation="stock")
    with closing(make_physics(TaskSpec(task, cameras=CAMERAS, image_size=SIZE))) as physics:
        with closing(make_renderer(spec)) as renderer:
            physics.reset(EpisodeSpec(99))
            physics.step(random_actions(3, seed=1))
            env = stock.stock_environment(task, SIZE, CAMERAS)
            try:
                for episode in (EpisodeSpec(3), EpisodeSpec(4, init_state=7)):
                    seen = stock.begin(env, task, episode.seed, episode.init_state)
                    result = physics.reset(episode)
                    for step, action in enumerate([None, *random_actions(steps, seed=episode.seed)]):
                        if action is not None:
                            seen, _, done, _ = env.step(action)
                            result = physics.step(action[None])
                            assert bool(result.success[-1]) == bool(done)
                        when = f"after step {step} of {episode}"
                        assert_states_equal(env, physics, when)
                        assert_observed(seen, result.state, when)
                        frames = renderer.render([result.scene], CAMERAS)
                        for camera in CAMERAS:
                            assert np.array_equal(frames[camera][0], seen[f"{camera}_image"]), f"{camera} {when}"
                    if env.env.object_property_initializers and episode.init_state is None:
                        # Its next reset would draw the articulated fixtures' positions a third time.
                        env.close()
                        env = stock.stock_environment(task, SIZE, CAMERAS)
                assert_models_equal(env, physics)
            finally:
                env.close()


@pytest.mark.parametrize("task", often((DRAWER,), SOME))
def test_split_frames_and_states_equal_native_ones(task: str) -> None:
    compare_with_native(task, steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("task", ALL[::3])
def test_split_frames_and_states_equal_native_ones_in_many_tasks(task: str) -> None:
    compare_with_native(task, steps=12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "task",
    [BOWL, DRAWER, "libero/libero_90/20"],
)
def test_states_equal_stock_robosuite_over_full_episodes(task: str) -> None:
    env = stock.stock_environment(task)
    with closing(make_physics(TaskSpec(task))) as physics:
        limit = physics.info.max_episode_steps
        seen = stock.begin(env, task, 5, 11)
        result = physics.reset(EpisodeSpec(5, 11))
        # Actions that last several steps reach farther than white noise does.
        actions = np.repeat(random_actions(limit // 10 + 1, seed=2), 10, axis=0)[:limit]
        for step, action in enumerate(actions):
            seen, _, done, _ = env.step(action)
            result = physics.step(action[None])
            assert_states_equal(env, physics, f"after step {step}")
            assert_observed(seen, result.state, f"after step {step}")
            assert bool(result.success[-1]) == bool(done)
            if result.ended:
                break
        assert result.ended
    env.close()


@pytest.mark.slow
def test_a_stove_that_is_on_glows_as_in_the_native_picture_and_is_off_after_a_reset() -> None:
    spec = TaskSpec(STOVE, cameras=("agentview",), image_size=SIZE)
    physics, renderer = LiberoPhysics(TaskSpec(STOVE, None, "sparse", None, ("agentview",), SIZE)), make_renderer(spec)
    env = stock.stock_environment(STOVE, SIZE, ("agentview",))
    off = physics.reset(EpisodeSpec(0, 0))
    stock.begin(env, STOVE, 0, 0)
    lit = tasks.initial_states(tasks.find_task(STOVE))[0].copy()
    knob = simulator(physics).model.get_joint_qpos_addr("flat_stove_1_button")
    lit[1 + knob] = 1.2
    physics._begin_at(lit)
    seen = env.set_init_state(lit)
    on = physics._result([], [], False, False)
    frames = renderer.render([off.scene, on.scene, physics.reset(EpisodeSpec(0, 0)).scene], ["agentview"])["agentview"]
    assert np.array_equal(frames[1][::-1], seen["agentview_image"])
    assert not np.array_equal(frames[0], frames[1]), "the burner does not show"
    assert np.array_equal(frames[0], frames[2]), "the burner is still on after the reset"
    env.close()


@pytest.mark.slow
def test_reset_of_a_used_environment_equals_that_of_a_new_one_for_recorded_states() -> None:
    for task in (BOWL, DRAWER, STOVE):
        with closing(make_physics(TaskSpec(task))) as used:
            for i in range(3):
                used.reset(EpisodeSpec(i, 40 + i))
                used.step(random_actions(12, seed=i))
            with closing(make_physics(TaskSpec(task))) as new:
                one, two = used.reset(EpisodeSpec(8, 21)), new.reset(EpisodeSpec(8, 21))
                assert one.state.tobytes() == two.state.tobytes()
                for action in random_actions(15, seed=9):
                    one, two = used.step(action[None]), new.step(action[None])
                    assert one.state.tobytes() == two.state.tobytes()
                for name in ("qpos", "qvel"):
                    ours, theirs = getattr(simulator(used).data, name), getattr(simulator(new).data, name)
                    assert ours.tobytes() == theirs.tobytes()


def test_environments_that_share_a_model_do_not_disturb_each_other() -> None:
    with closing(make_physics(TaskSpec(DRAWER))) as one, closing(make_physics(TaskSpec(DRAWER))) as two:
        assert simulator(one).model._model is simulator(two).model._model
        actions = random_actions(6)
        one.reset(EpisodeSpec(1))
        alone = one.step(actions)
        one.reset(EpisodeSpec(1))
        two.reset(EpisodeSpec(2))
        for i in range(6):
            mixed = one.step(actions[i : i + 1])
            two.step(actions[5 - i : 6 - i])
        assert mixed.state.tobytes() == alone.state.tobytes()


@pytest.mark.parametrize("task", [BOWL, "libero/libero_10/3", "libero/libero_90/88"])
def test_converted_initial_states_are_those_of_the_pickles(task: str) -> None:
    found = tasks.find_task(task)
    assert found.initial is not None
    assert np.array_equal(tasks.initial_states(found), torch.load(found.initial, weights_only=False))


def test_all_130_tasks_have_fifty_initial_states_and_an_instruction() -> None:
    assert len(ALL) == 130
    for name in ALL:
        task = tasks.find_task(name)
        assert task.initial is not None
        assert len(tasks.read_pickled_array(task.initial.read_bytes(), task.initial)) == 50
        assert task.instruction and task.bddl.is_file()


def test_a_damaged_file_of_initial_states_is_refused(tmp_path: Path) -> None:
    initial = tasks.find_task(BOWL).initial
    assert initial is not None
    source = initial.read_bytes()
    for damaged in (source[: len(source) // 2], b"", b"not a pickle"):
        with pytest.raises(FarmError, match="damaged"):
            tasks.read_pickled_array(damaged, tmp_path / "x")


@pytest.mark.parametrize(
    "name, hint",
    [
        ("libero/libero_spatal/0", "libero_spatial"),
        ("libero/libero_spatial/10", "libero_spatial/"),
        ("libero/libero_spatial", "libero_spatial/"),
    ],
)
def test_unknown_suites_and_indices_are_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(FarmError, match=hint):
        make_physics(TaskSpec(name))


def test_an_initial_state_out_of_range_is_refused() -> None:
    with closing(make_physics(TaskSpec(BOWL))) as physics:
        for index in (-1, 50):
            with pytest.raises(FarmError, match="0 to 49"):
                physics.reset(EpisodeSpec(0, index))


@pytest.mark.slow
def test_a_missing_asset_is_named(tmp_path: Path) -> None:
    whole = assets()
    partial = tmp_path / "assets"
    partial.mkdir()
    for folder in whole.iterdir():
        if folder.name != "stable_hope_objects":
            (partial / folder.name).symlink_to(folder)
    (partial / "stable_hope_objects").mkdir()
    output = run_python(
        "from sim_farm import *; make_physics(TaskSpec('libero/libero_object/0'))",
        {"LIBERO_CONFIG_PATH": str(settings_naming(tmp_path / "settings", partial))},
    )
    assert "FarmError" in output and "stable_hope_objects" in output and ".xml" in output, output[-600:]


@pytest.mark.slow
def test_first_use_asks_nothing_and_physics_loads_no_opengl(tmp_path: Path) -> None:
    code = (
        "import sys; from sim_farm import *; p = make_physics(TaskSpec('libero/libero_goal/0'));"
        "p.reset(EpisodeSpec(0));"
        "print('OPENGL', any(m.split('.')[0] == 'OpenGL' for m in sys.modules))"
    )
    output = run_python(code, {"HOME": str(tmp_path)})
    assert "OPENGL False" in output, output[-600:]
    assert not (tmp_path / ".libero").exists() or not list((tmp_path / ".libero").iterdir())


def run_python(code: str, variables: dict[str, str]) -> str:
    """What a new interpreter prints, with nothing on its standard input."""
    hidden = ("LIBERO_CONFIG_PATH", "MUJOCO_GL", "PYOPENGL_PLATFORM")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        cwd=Path(__file__).resolve().parents[2],
    )
    return done.stdout


def test_a_closed_environment_frees_its_memory_at_once() -> None:
    """Without waiting for the garbage collector: MuJoCo reserves more than a gigabyte of addresses for each."""
    make_physics(TaskSpec(BOWL)).close()
    gc.collect()
    gc.disable()
    try:
        before = _addresses()
        for i in range(5):
            with closing(make_physics(TaskSpec(BOWL))) as physics:
                physics.reset(EpisodeSpec(i, 0))
                physics.step(random_actions(2))
                assert _addresses() - before > 1e9, "the measure does not see an environment"
        assert _addresses() - before < 1e9, "closed environments keep their memory"
    finally:
        gc.enable()


def test_an_episode_keeps_no_page_of_the_contacts_of_its_reset() -> None:
    with closing(LiberoPhysics(TaskSpec(BOWL, cameras=()))) as physics:
        physics.reset(EpisodeSpec(0, 0))
        data = physics._data
        assert data.maxuse_arena > 4e6, "a reset uses the arena"
        assert _resident(data.contact.dist.__array_interface__["data"][0], data.narena) < 4e5
        result = physics.step(random_actions(3))
        assert np.isfinite(result.state).all()


def _resident(address: int, length: int) -> int:
    """Bytes of that memory that are in use by the system's account."""
    page = resource.getpagesize()
    begin = address // page * page
    pages = np.empty((address + length - begin) // page, np.uint8)
    done = ctypes.CDLL(None).mincore(
        ctypes.c_void_p(begin), ctypes.c_size_t(len(pages) * page), ctypes.c_void_p(pages.ctypes.data)
    )
    assert done == 0
    return int((pages & 1).sum()) * page


def test_a_model_that_nobody_keeps_is_freed_at_once() -> None:
    """Also without the garbage collector, which ninety tasks in turn would have to wait for: 240 MB each."""
    gc.disable()
    try:
        with closing(LiberoPhysics(TaskSpec(BOWL, cameras=()))) as physics:
            assert physics._own is not None
            model = weakref.ref(physics._own.user.shared)
        del physics
        shared_model.cache_clear()
        assert model() is None
    finally:
        gc.enable()


def _addresses() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def memory_over_resets() -> list[int]:
    """[100] bytes in memory after every twentieth of resets 200 to 2,200."""
    used = []
    with closing(make_physics(TaskSpec(BOWL))) as physics:
        for i in range(2200):
            physics.reset(EpisodeSpec(i, i % 50))
            if i >= 200 and i % 20 == 0:
                gc.collect()
                used.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return used


@pytest.mark.slow
def test_memory_does_not_grow_over_two_thousand_resets() -> None:
    # A new process: in this one, earlier tests have freed memory, which later resets fill again.
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        used = pool.apply(memory_over_resets)
    fit = linregress(np.arange(len(used)) * 20, used)
    high = fit.slope + 1.96 * fit.stderr if np.ptp(used) else 0.0
    print(f"slope {fit.slope:.1f} bytes per reset, 95% interval to {high:.1f}")
    assert high < 512, f"memory grows by {fit.slope:.0f} (up to {high:.0f}) bytes per reset"
