"""`PushRedCube-v1` and `PushGreenCube-v1`: ManiSkill's PushCube with two cubes; the instruction names one of them.

Both tasks have the same scenes and pictures, seed by seed. Importing this module registers them with ManiSkill.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
import torch
from mani_skill.envs.tasks.tabletop.push_cube import PushCubeEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.building import actors
from mani_skill.utils.registration import register_env
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs import Pose

MAX_EPISODE_STEPS = 40
COLOURS = {"red": (0.75, 0.06, 0.05, 1.0), "green": (0.05, 0.55, 0.12, 1.0)}
PUSH_M = 0.10
"""Distance of a cube to its goal's edge, along x, in m."""
FINGER_M = 0.015
"""Distance from a finger's middle to its front, in m."""
REACH_M = 0.4
"""At this distance, and beyond, progress is zero."""
FACE_UP = (0.5**0.5, 0.0, 0.5**0.5, 0.0)
"""The goal's disc, turned by a right angle about y."""
GOAL_HEIGHT_M = 1e-3
"""The goal's disc lies so far above the table, or the table would be drawn through it."""


class TwoCubesEnv(PushCubeEnv):
    """PushCube with a red and a green cube, each with a goal in front of it.

    Success is PushCube's, of the cube that `wanted` names. When the other cube reaches its goal the episode has failed.
    The dense reward of an env step is how far it has brought the task, and 1 for success: an episode's return is the
    same however long it takes. The state lists the wanted cube's goal and pose, and then the other cube's pose.
    """

    wanted = "red"
    goal_radius = 0.06
    cube_half_size = 0.025

    @property
    def _default_sensor_configs(self) -> Any:
        # Nearer than PushCube's: a cube is ten pixels wide at 128 x 128, there four.
        pose = sapien_utils.look_at(eye=[0.4, 0.0, 0.45], target=[0.0, 0.0, 0.02])
        return [CameraConfig("base_camera", pose=pose, width=128, height=128, fov=1.0, near=0.01, far=100)]

    def _load_scene(self, options: dict[str, Any]) -> None:
        self.table_scene = TableSceneBuilder(env=self, robot_init_qpos_noise=self.robot_init_qpos_noise)
        self.table_scene.build()
        self.cubes, self.goals = {}, {}
        for name, colour in COLOURS.items():
            self.cubes[name] = actors.build_cube(
                self.scene,
                half_size=self.cube_half_size,
                color=np.array(colour),
                name=f"{name}_cube",
                initial_pose=sapien.Pose(p=[0, 0, self.cube_half_size]),
            )
            self.goals[name] = actors.build_red_white_target(
                self.scene,
                radius=self.goal_radius,
                thickness=1e-5,
                name=f"{name}_goal",
                add_collision=False,
                body_type="kinematic",
                initial_pose=sapien.Pose(p=[0, 0, GOAL_HEIGHT_M]),
            )
        self.obj, self.goal_region = self.cubes[self.wanted], self.goals[self.wanted]
        (self.other,) = set(COLOURS) - {self.wanted}

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        with torch.device(self.device):
            count = len(env_idx)
            self.table_scene.initialize(env_idx)
            left = torch.where(torch.rand(count) < 0.5, 1.0, -1.0)
            for side, name in zip((left, -left), COLOURS, strict=True):
                place = torch.zeros(count, 3)
                place[:, 0] = torch.rand(count) * 0.14 - 0.08
                place[:, 1] = side * (torch.rand(count) * 0.06 + 0.07)
                place[:, 2] = self.cube_half_size
                self.cubes[name].set_pose(Pose.create_from_pq(p=place, q=[1, 0, 0, 0]))
                goal = place + torch.tensor([PUSH_M + self.goal_radius, 0.0, 0.0])
                goal[:, 2] = GOAL_HEIGHT_M
                self.goals[name].set_pose(Pose.create_from_pq(p=goal, q=FACE_UP))
            self._reached = self._progress()

    def evaluate(self) -> dict[str, torch.Tensor]:
        return {"success": self._at_goal(self.wanted), "fail": self._at_goal(self.other)}

    def _at_goal(self, name: str) -> torch.Tensor:
        cube, goal = self.cubes[name].pose.p, self.goals[name].pose.p
        near = torch.linalg.norm(cube[:, :2] - goal[:, :2], dim=1) < self.goal_radius
        return near & (cube[:, 2] < self.cube_half_size + 5e-3)

    def compute_dense_reward(self, obs: Any, action: Any, info: dict[str, torch.Tensor]) -> torch.Tensor:
        before, self._reached = self._reached, self._progress()
        return self._reached - before + info["success"]

    def compute_normalized_dense_reward(self, obs: Any, action: Any, info: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.compute_dense_reward(obs, action, info)

    def _progress(self) -> torch.Tensor:
        """[N] in 0..1: of the gripper towards the place behind the wanted cube, and of the cube towards its goal."""
        cube = self.obj.pose.p
        behind = cube - torch.tensor([self.cube_half_size + FINGER_M, 0.0, 0.0], device=self.device)
        to_cube = torch.linalg.norm(behind - self.agent.tcp.pose.p, dim=1)
        to_goal = torch.linalg.norm((cube - self.goal_region.pose.p)[:, :2], dim=1)
        return 0.3 * (1 - to_cube / REACH_M).clamp(min=0) + 0.7 * (1 - to_goal / REACH_M).clamp(min=0)

    def _get_obs_extra(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        obs = super()._get_obs_extra(info)
        if self.obs_mode_struct.use_state:
            obs["other_pose"] = self.cubes[self.other].pose.raw_pose
        return obs


@register_env("PushRedCube-v1", max_episode_steps=MAX_EPISODE_STEPS)
class PushRedCubeEnv(TwoCubesEnv):
    wanted = "red"


@register_env("PushGreenCube-v1", max_episode_steps=MAX_EPISODE_STEPS)
class PushGreenCubeEnv(TwoCubesEnv):
    wanted = "green"
