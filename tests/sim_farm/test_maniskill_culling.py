"""`sim_farm/backends/maniskill/culling.py`: pictures equal those of all triangles to the last bit.

Whole episodes are compared with stock ManiSkill in `test_maniskill.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import sapien

from sim_farm.backends.maniskill import culling, simulator
from sim_farm.contract import EpisodeSpec, Renderer, TaskSpec, UInt8
from sim_farm.perturbations import CameraPose, Perturbation
from sim_farm.registry import make_renderer
from tests.variants import often

TURNED = Perturbation("camera", 1, cameras=(CameraPose("base_camera", (0, 0, 1), (1, 0, 0, 0)),))
PUSH = TaskSpec("maniskill/PushCube-v1", cameras=1, image_size=96, perturbations=(TURNED,))
TASKS = ("PushCube-v1", "PegInsertionSide-v1", "PickCubeSO100-v1", "PlugCharger-v1", "RollBall-v1", "PushT-v1")


@pytest.fixture(scope="module", autouse=True)
def compiled_shaders() -> Iterator[None]:
    """SAPIEN compiles its shaders, for seven seconds, whenever no other renderer is alive: so one is kept."""
    with closing(make_renderer(PUSH)):
        yield


class Both:
    """A scene that is drawn with culling and without."""

    def __init__(self, spec: TaskSpec, monkeypatch: pytest.MonkeyPatch) -> None:
        with closing(simulator.ManiSkillPhysics(spec)) as physics:
            results = [physics.reset(EpisodeSpec(0))]
            for _ in range(3):
                results.append(physics.step(np.full((1, physics.info.action_dim), 0.7, np.float32)))
        self.scenes = [result.scene for result in results]
        self.ours = simulator.ManiSkillRenderer(spec)
        self.whole = simulator.ManiSkillRenderer(spec)
        self.draw(self.ours, self.scenes[:1])
        with monkeypatch.context() as patched:
            patched.setattr(simulator, "draws_in_software", lambda: False)
            self.draw(self.whole, self.scenes[:1])

    @staticmethod
    def draw(renderer: Renderer, scenes: Sequence[UInt8]) -> dict[str, UInt8]:
        return dict(renderer.render(scenes, renderer.info.cameras))

    @property
    def environments(self) -> list[Any]:
        """Both; of a task with one geometry."""
        return [next(reversed(renderer._replicas.values())).env for renderer in (self.ours, self.whole)]

    def compare(self, what: object) -> UInt8:
        """The last picture of the first camera."""
        ours, whole = self.draw(self.ours, self.scenes), self.draw(self.whole, self.scenes)
        for name, frames in ours.items():
            differing = (frames != whole[name]).any(-1).sum((1, 2))
            assert not differing.any(), f"{what}: {name} differs in {differing.tolist()} pixels"
        return ours[self.ours.info.cameras[0]][-1]

    def close(self) -> None:
        self.ours.close()
        self.whole.close()


def camera_poses(count: int) -> Iterator[CameraPose]:
    """Around the robot and within it, towards it and elsewhere."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        position = rng.uniform((-0.9, -0.5, 0), (0.4, 0.5, 1.0))
        quaternion = rng.normal(size=4)
        yield CameraPose(
            "base_camera", tuple(position.tolist()), tuple((quaternion / np.linalg.norm(quaternion)).tolist())
        )


def test_pictures_from_any_camera_equal_those_of_all_triangles(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Both(PUSH, monkeypatch)) as both:
        for pose in camera_poses(25):
            for renderer in (both.ours, both.whole):
                renderer.aim([pose], np.random.default_rng(0))
            both.compare(pose)


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("size", (64, 224))
def test_pictures_from_any_camera_equal_in_other_tasks(task: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(
        Both(TaskSpec(f"maniskill/{task}", cameras=1, image_size=size, perturbations=(TURNED,)), monkeypatch)
    ) as both:
        for pose in camera_poses(40):
            for renderer in (both.ours, both.whole):
                renderer.aim([pose], np.random.default_rng(0))
            both.compare(pose)


def test_what_is_changed_in_a_scene_later_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bodies that are added, hidden, coloured, moved and taken away, and a light that casts shadows."""
    with closing(Both(PUSH, monkeypatch)) as both:
        scenes = [env.scene.sub_scenes[0] for env in both.environments]
        pictures = [both.compare("as it was")]

        def differs(what: str) -> None:
            pictures.append(both.compare(what))
            assert (pictures[-1] != pictures[-2]).any(), f"{what} shows nothing"

        balls = []
        for scene in scenes:
            ball, component = sapien.Entity(), sapien.render.RenderBodyComponent()
            ball.pose = sapien.Pose([0, 0.15, 0.1])
            component.attach(sapien.render.RenderShapeSphere(0.05, sapien.render.RenderMaterial()))
            ball.add_component(component)
            scene.add_entity(ball)
            balls.append(ball)
        differs("a ball is added")
        for scene in scenes:
            light, component = sapien.Entity(), sapien.render.RenderDirectionalLightComponent()
            component.shadow, component.color = True, [2, 1, 1]
            light.pose = sapien.Pose([0, 0, 2], [0.7071, 0, 0.7071, 0])
            light.add_component(component)
            scene.add_entity(light)
        differs("a light casts shadows")
        for scene in scenes:
            for body in scene.render_system.render_bodies:
                if body.entity.name == "panda_link2":
                    body.visibility = 0.0
        differs("a link is hidden")
        for scene in scenes:
            for body in scene.render_system.render_bodies:
                if body.entity.name == "panda_hand":
                    for part in body.render_shapes[0].parts:
                        part.material.base_color = [0, 1, 0, 1]
        differs("the hand is green")
        for ball in balls:
            ball.pose = sapien.Pose([0, -0.15, 0.1])
        differs("the ball is elsewhere")
        for scene, ball in zip(scenes, balls, strict=True):
            scene.remove_entity(ball)
        differs("the ball is taken away")


def test_most_triangles_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Both(PUSH, monkeypatch)) as both:
        found = next(iter(both.ours._replicas.values())).culling
        assert found is not None
        drawn = sum(part.which.size for _, part in found._parts if part.which is not None)
        assert 1000 < drawn < 0.1 * found._corners.shape[1]


@pytest.mark.parametrize("seed", often((0,), range(20)))
def test_no_triangle_that_contains_a_centre_is_left_out(seed: int) -> None:
    """Wherever its corners are rounded to, within less than the margin."""
    rng, size, count = np.random.default_rng(seed), (9, 7), 20_000
    middle = rng.uniform(-2, 11, (count, 1, 2))
    corners = middle + rng.normal(size=(count, 3, 2)) * 10 ** rng.uniform(-2, 0.7, (count, 1, 1))
    x, y = corners.reshape(-1, 2).astype(np.float32).T
    kept = np.zeros(count, bool)
    kept[culling._containing(x, y, size, np.arange(3 * count).reshape(-1, 3).T)] = True
    centres = np.stack(np.meshgrid(np.arange(size[0]) + 0.5, np.arange(size[1]) + 0.5), -1).reshape(-1, 1, 2)
    coloured = np.zeros(count, bool)
    for _ in range(5):
        rounded = corners + rng.uniform(-0.9, 0.9, corners.shape) / 64
        along = np.roll(rounded, -1, 1) - rounded
        for centre in centres:
            to = centre - rounded
            side = along[..., 0] * to[..., 1] - along[..., 1] * to[..., 0]
            coloured |= (side >= 0).all(1) | (side <= 0).all(1)
    assert coloured.sum() > 2000 and not (coloured & ~kept).any()
    assert kept.sum() < 2 * coloured.sum(), "many are kept that contain no centre"
