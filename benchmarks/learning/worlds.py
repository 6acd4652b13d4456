"""Training pictures of the small base checkpoints: a task's scenes, with the places of gripper and objects."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import numpy as np
import torch
from torch import Tensor, nn

import sim_farm
from embodied.reporting.live import steps
from policies.scripted import two_cubes
from sim_farm import EpisodeSpec, TaskSpec

Draw = Callable[[str, int, int, int], tuple[Tensor, Tensor]]
"""`(task, number of pictures N, their size S, seed)`: uint8 [N, S, S, 3], and float32 [N, 3, 3]: the places of gripper,
first and second object, in metres."""


@dataclass(frozen=True)
class Eye:
    """The pinhole camera that the pictures are drawn by: square pictures, lengths in metres."""

    position: tuple[float, float, float]
    right: tuple[float, float, float]
    up: tuple[float, float, float]
    angle: float
    """Field of view in radians."""

    def points(self, places: Tensor) -> Tensor:
        """Column, row and depth [..., 3] at which places [..., 3] (metres) are seen. Columns and rows in sight lie in
        -1..1, from the picture's first pixel on; depth 0 is that of the world's origin, 1 is `DEPTH_M` farther."""
        right, up = (nn.functional.normalize(torch.tensor(v), dim=0) for v in (self.right, self.up))
        forward = torch.linalg.cross(up, right)
        seen = places - torch.tensor(self.position)
        depth = seen @ forward
        half = depth * math.tan(self.angle / 2)
        middle = -torch.tensor(self.position) @ forward
        return torch.stack((seen @ right / half, -(seen @ up) / half, (depth - middle) / DEPTH_M), -1)


DEPTH_M = 0.3


@dataclass(frozen=True)
class World:
    """A scene with a gripper and two objects, which can be told apart by their names alone."""

    task: str
    camera: str
    eye: Eye
    size: str
    """The network's: the end of its name in `policies.openvla.sizes` and `policies.pi0.sizes`."""
    image_size: int
    objects: tuple[str, str]
    low: tuple[float, float, float]
    high: tuple[float, float, float]
    """Metres: what is in sight lies between."""
    draw: Draw

    @property
    def questions(self) -> tuple[str, ...]:
        """First where the three are, then the way from the gripper to each object."""
        ways = (f"point from the gripper to the {name}" for name in self.objects)
        return ("point at the gripper", *(f"point at the {name}" for name in self.objects), *ways)


POSE_NUMBERS = 5
"""The table's scene is qpos, of which the first three numbers are the gripper's place, and then each ball's place."""
TABLE_LOW, TABLE_HIGH = (-0.22, -0.27, 0.014), (0.22, 0.27, 0.25)
NEAR_M = 0.05
"""Every second gripper is about so far from a ball: there it matters most where they are."""


def _draw_table(task: str, pictures: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The gripper is put anywhere: the scene is written, not simulated."""
    physics, renderer = sim_farm.make(task, cameras=1, size=size)
    random = np.random.default_rng(seed)
    frames, places = [], []
    for episode in range(pictures):
        scene = physics.reset(EpisodeSpec(seed * pictures + episode)).scene.view(np.float64).copy()
        balls = scene[POSE_NUMBERS:].reshape(2, 3)
        near = balls[random.integers(2)] + random.normal(0, NEAR_M, 3)
        beside = random.random() < 0.5
        scene[:3] = np.clip(near, TABLE_LOW, TABLE_HIGH) if beside else random.uniform(TABLE_LOW, TABLE_HIGH)
        (frame,) = renderer.render([scene.view(np.uint8)], (TABLE.camera,)).values()
        frames.append(frame[0])
        places.append(np.stack((scene[:3], *balls)))
    renderer.close()
    return torch.from_numpy(np.array(frames)), torch.from_numpy(np.array(places, np.float32))


STEPS_BETWEEN = 2
WANDER = 0.8
"""Standard deviation of what is added to the script's actions."""


def _draw_cubes(task: str, pictures: int, size: int, seed: int) -> tuple[Tensor, Tensor]:
    """The gripper follows the script unsteadily, towards one cube in some episodes and the other in the others."""
    spec = TaskSpec(task, control_mode="pd_ee_delta_pos", cameras=1, image_size=size)
    physics, renderer = sim_farm.make_physics(spec), sim_farm.make_renderer(spec)
    random = np.random.default_rng(seed)
    frames: list[np.ndarray] = []
    places: list[np.ndarray] = []
    with steps("Drawing pictures", pictures) as bar:
        for episode in count(seed * pictures):
            result = physics.reset(EpisodeSpec(episode))
            swapped = random.random() < 0.5
            while not result.ended and len(frames) < pictures:
                (frame,) = renderer.render([result.scene], (CUBES.camera,)).values()
                frames.append(frame[0].copy())
                state = result.state.astype(np.float64)
                places.append(np.stack((state[two_cubes.GRIPPER], state[two_cubes.CUBE], state[two_cubes.OTHER])))
                bar.advance(1, "")
                if swapped:
                    state[two_cubes.CUBE] = state[two_cubes.OTHER]
                action = two_cubes.act(state, two_cubes.INSTRUCTIONS[0])
                action = np.clip(action + random.normal(0, WANDER, len(action)), -1, 1)
                result = physics.step(np.tile(action, (STEPS_BETWEEN, 1)).astype(np.float32))
            if len(frames) == pictures:
                break
    physics.close()
    renderer.close()
    return torch.from_numpy(np.array(frames)), torch.from_numpy(np.array(places, np.float32))


FRONT = Eye((0.60, 0.0, 0.47), (0.0, 1.0, 0.0), (-0.55, 0.0, 0.835), math.radians(50))
BASE_CAMERA = Eye((0.4, 0.0, 0.45), (0.0, 1.0, 0.0), (-0.43, 0.0, 0.4), 1.0)
TABLE = World(
    "tabletop/reach_red", "front", FRONT, "small", 56, ("red ball", "blue ball"), TABLE_LOW, TABLE_HIGH, _draw_table
)
CUBES = World(
    "maniskill/PushRedCube-v1", "base_camera", BASE_CAMERA, "small-128", 128, ("red cube", "green cube"),
    (-0.20, -0.18, 0.0), (0.25, 0.18, 0.25), _draw_cubes,
)  # fmt: skip
WORLDS = {"table": TABLE, "cubes": CUBES}
