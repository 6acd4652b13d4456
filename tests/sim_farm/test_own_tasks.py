"""Tasks that a module of the user's registers with ManiSkill or LIBERO are served by the backend that is here."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sim_farm.backends.libero import tasks as libero
from sim_farm.backends.maniskill.tasks import INSTRUCTIONS
from sim_farm.catalogue import check_task, task_files, task_names, versions
from sim_farm.conformance.checks import Law, name_of
from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.conformance.render_laws import RENDER_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, PhysicsResult, TaskInfo, TaskSpec
from sim_farm.registry import make_physics

MANISKILL = """
import sapien
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.registration import register_env


@register_env("PushCubeSide-v1", max_episode_steps=12)
class PushCubeSide(PushCubeEnv):
    instruction = "push the cube, seen from the side"

    @property
    def _default_sensor_configs(self):
        pose = sapien_utils.look_at(eye=[0.0, 0.6, 0.4], target=[0.0, 0.0, 0.02])
        side = CameraConfig("side", pose=pose, width=128, height=128, fov=1.0, near=0.01, far=100)
        return [*super()._default_sensor_configs, side]

    def compute_normalized_dense_reward(self, obs, action, info):
        return super().compute_normalized_dense_reward(obs, action, info) * 0.5


@register_env("PushCubeQuickly-v2", max_episode_steps=5)
class Quickly(PushCubeEnv):
    pass


@register_env("Endless-v1")
class Endless(PushCubeEnv):
    instruction = 7
"""
LIBERO = """
import libero.libero.benchmark
from libero.libero.benchmark import Benchmark, Task, register_benchmark, task_maps


@register_benchmark
class My_Suite(Benchmark):
    def __init__(self, task_order_index=0):
        super().__init__(task_order_index)
        self.name = "my_suite"
        task = next(iter(task_maps["libero_spatial"].values()))
        self.tasks = [
            task._replace(language="put the bowl on the plate, please"),
            Task("own", "move the bowl", "Libero", {folder!r}, "own.bddl", ""),
        ]
        self.n_tasks = len(self.tasks)
"""
BROKEN = """
from libero.libero.benchmark import Benchmark, register_benchmark


@register_benchmark
class Broken_Suite(Benchmark):
    pass
"""
SIDE = "my_maniskill:maniskill/PushCubeSide-v1"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder on `sys.path` with the modules; what they register is taken back."""
    from gymnasium.envs.registration import registry
    from mani_skill.utils.registration import REGISTERED_ENVS

    path = tmp_path_factory.mktemp("own")
    (path / "my_maniskill.py").write_text(MANISKILL)
    before = dict(REGISTERED_ENVS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path)
        yield path
    for name in set(REGISTERED_ENVS) - set(before):
        del REGISTERED_ENVS[name], registry[name]
    for name in ("my_maniskill", "my_libero", "my_broken"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def suites(folder: Path) -> Iterator[Path]:
    libero.prepare()
    from libero.libero.benchmark import BENCHMARK_MAPPING

    text = libero.find_task("libero/libero_spatial/0").bddl.read_text()
    (folder / "own.bddl").write_text(text.replace("(:language ", "(:language gladly "))
    (folder / "my_libero.py").write_text(LIBERO.replace("{folder!r}", repr(str(folder))))
    before = dict(BENCHMARK_MAPPING)
    yield folder
    for name in set(BENCHMARK_MAPPING) - set(before):
        del BENCHMARK_MAPPING[name]
    libero._suite.cache_clear()


def after_a_step(task: str, cameras: int) -> tuple[TaskInfo, PhysicsResult]:
    """The task, and the result of an env step of an episode of it."""
    with closing(make_physics(TaskSpec(task, cameras=cameras))) as physics:
        physics.reset(EpisodeSpec(3))
        return physics.info, physics.step(np.full((1, physics.info.action_dim), 0.2, np.float32))


def test_an_own_maniskill_task_is_served_with_its_reward_cameras_and_words(folder: Path) -> None:
    check_task(SIDE)
    info, result = after_a_step(SIDE, cameras=2)
    assert info.cameras == ("base_camera", "side") and info.max_episode_steps == 12
    assert result.instruction == "push the cube, seen from the side"
    stock = after_a_step("maniskill/PushCube-v1", cameras=1)[1]
    assert result.reward[0] == pytest.approx(0.5 * stock.reward[0]) and result.reward[0] > 0
    assert np.array_equal(result.state, stock.state)
    assert versions("my_maniskill:maniskill").startswith("mani-skill ")


def test_a_task_without_words_is_told_its_name(folder: Path) -> None:
    with closing(make_physics(TaskSpec("my_maniskill:maniskill/PushCubeQuickly-v2"))) as physics:
        assert physics.reset(EpisodeSpec(1)).instruction == "push cube quickly"


def test_the_shipped_tasks_are_served_too_and_the_shipped_names_stay(folder: Path) -> None:
    known = task_names("my_maniskill:maniskill")
    assert set(known) >= {*INSTRUCTIONS, "PushCubeSide-v1", "PushCubeQuickly-v2"} and "PushCubeSide-v1" in known
    assert "AnymalC-Reach-v1" not in known, "ManiSkill's own that are not in the catalogue may need downloads"
    with pytest.raises(FarmError, match="unknown task 'maniskill/PushCubeSide-v1'"):
        check_task("maniskill/PushCubeSide-v1")


def test_what_is_wrong_with_an_own_maniskill_task_is_said(folder: Path) -> None:
    with pytest.raises(FarmError, match="did you mean my_maniskill:maniskill/PushCubeSide-v1"):
        check_task("my_maniskill:maniskill/PushCubSide-v1")
    with pytest.raises(FarmError, match=r"without a step limit: register_env\('Endless-v1', max_episode_steps="):
        make_physics(TaskSpec("my_maniskill:maniskill/Endless-v1"))
    with pytest.raises(FarmError, match=r"Endless.instruction, of Endless-v1, is a text of 1 to 512 bytes, got '7'"):
        make_physics(TaskSpec("my_maniskill:maniskill/Endless-v1", max_episode_steps=5))


@pytest.mark.slow
@pytest.mark.parametrize("law", [*PHYSICS_LAWS, *RENDER_LAWS], ids=name_of)
def test_an_own_maniskill_task_keeps_the_laws(law: Law, folder: Path) -> None:
    law(TaskSpec(SIDE, cameras=2, image_size=64))


def test_an_own_libero_suite_is_served_with_its_files_and_words(suites: Path) -> None:
    assert [name for name in task_names("my_libero:libero") if "my_suite" in name] == ["my_suite/0", "my_suite/1"]
    first, own = "my_libero:libero/my_suite/0", "my_libero:libero/my_suite/1"
    for task in (first, own):
        check_task(task)
    stock = task_files("libero/libero_spatial/0")
    digests = {files.digest for task in (first, own) if (files := task_files(task)) and not files.foreign}
    assert len(digests) == 2 and stock is not None and stock.digest not in digests
    with closing(make_physics(TaskSpec(first))) as physics, closing(make_physics(TaskSpec(own))) as other:
        result, seeded = physics.reset(EpisodeSpec(1, init_state=2)), other.reset(EpisodeSpec(1))
        assert (result.instruction, seeded.instruction) == ("put the bowl on the plate, please", "move the bowl")
        assert (physics.info.init_states, other.info.init_states) == (50, 0)
        assert physics.info.max_episode_steps == other.info.max_episode_steps == libero.OWN_LIMIT == 520
    assert versions("my_libero:libero").startswith("hf-libero ")


@pytest.mark.slow
@pytest.mark.parametrize("law", [*PHYSICS_LAWS, *RENDER_LAWS], ids=name_of)
def test_an_own_libero_task_keeps_the_laws(law: Law, suites: Path) -> None:
    law(TaskSpec("my_libero:libero/my_suite/1", cameras=1, image_size=64))


def test_what_is_wrong_with_an_own_libero_suite_is_said(suites: Path) -> None:
    with pytest.raises(FarmError, match="unknown task 'my_libero:libero/my_suite/2'; did you mean my_libero:"):
        check_task("my_libero:libero/my_suite/2")
    (suites / "my_broken.py").write_text(BROKEN)
    with pytest.raises(FarmError, match=r"my_broken.Broken_Suite gives no tasks \(AttributeError: .*a list of libero"):
        check_task("my_broken:libero/broken_suite/0")
