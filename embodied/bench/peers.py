"""The simulators' own environments, as their users run them: what the farm is compared with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np


@dataclass(frozen=True)
class PeerSpec:
    """One environment of a peer."""

    task: str
    cameras: int
    size: int


@dataclass(frozen=True)
class VectorEnv:
    """Environments in processes of their own, stepped together."""

    kind: Literal["async", "subproc"]
    """async: gymnasium's AsyncVectorEnv; subproc: LIBERO's SubprocVectorEnv."""
    num_envs: int

    @property
    def name(self) -> str:
        return f"{'AsyncVectorEnv' if self.kind == 'async' else 'SubprocVectorEnv'} {self.num_envs}"


@dataclass(frozen=True)
class Peers:
    """What a simulator's users run."""

    env: Callable[[PeerSpec], Any]
    """A gymnasium environment that shows the task's cameras at every env step."""
    vector_envs: tuple[VectorEnv, ...]


def peers_of(task: str) -> Peers | None:
    """The peers of the task's simulator; None if it has no environment but ours."""
    return PEERS.get(task.partition("/")[0])


def peer_env(spec: PeerSpec) -> Any:
    """A gymnasium environment that shows the task's cameras at every env step, as the simulator's users have it."""
    return PEERS[spec.task.partition("/")[0]].env(spec)


def subproc_vector_env(spec: PeerSpec, count: int, cores: tuple[int, ...]) -> tuple[Callable[[np.ndarray], Any], int]:
    """LIBERO's own `SubprocVectorEnv`, pinned: its step function, and the action's size."""
    import importlib
    import multiprocessing

    _import_libero()
    venv: Any = importlib.import_module("libero.libero.envs.venv")
    # Its workers are started by `fork` by default, which an initialised OpenGL does not survive.
    multiprocessing.set_start_method("spawn", force=True)
    envs = venv.SubprocVectorEnv([partial(_pinned_libero, spec, cores[i % len(cores)]) for i in range(count)])
    envs.seed(0)
    envs.reset()
    return envs.step, 7


def _maniskill(spec: PeerSpec) -> Any:
    """Plain ManiSkill, as its documentation has it run on the CPU."""
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    env = gym.make(
        spec.task.partition("/")[2],
        num_envs=1,
        sim_backend="physx_cpu",
        render_backend="cpu" if spec.cameras else "none",
        obs_mode="rgb" if spec.cameras else "state",
        reward_mode="normalized_dense",
        control_mode="pd_joint_delta_pos",
        sensor_configs={"width": spec.size, "height": spec.size},
    )
    return CPUGymWrapper(env)


def _import_libero() -> None:
    """LIBERO with robosuite's own renderer, on the platform that the farm draws with."""
    from sim_farm.backends import mujoco_gl

    os.environ["MUJOCO_GL"] = os.environ["PYOPENGL_PLATFORM"] = mujoco_gl.platform()
    import robosuite  # noqa: F401

    from sim_farm.backends.libero.package import assets

    assets()


def _pinned_libero(spec: PeerSpec, core: int) -> Any:
    os.sched_setaffinity(0, {core})
    return _stock_libero(spec)


def _stock_libero(spec: PeerSpec) -> Any:
    _import_libero()
    import importlib

    from sim_farm.backends.libero.environment import CAMERAS
    from sim_farm.backends.libero.tasks import find_task

    wrapper: Any = importlib.import_module("libero.libero.envs.env_wrapper")
    bddl = str(find_task(spec.task).bddl)
    if not spec.cameras:
        return wrapper.ControlEnv(bddl_file_name=bddl, use_camera_obs=False, has_offscreen_renderer=False)
    names = list(CAMERAS[: spec.cameras])
    return wrapper.OffScreenRenderEnv(
        bddl_file_name=bddl, camera_names=names, camera_heights=spec.size, camera_widths=spec.size
    )


def _libero(spec: PeerSpec) -> Any:
    """`OffScreenRenderEnv` as gymnasium wants it."""
    import gymnasium as gym

    class Libero(gym.Env[Any, np.ndarray]):
        def __init__(self) -> None:
            self._env = _stock_libero(spec)
            self._keys = [f"{name}_image" for name in self._env.env.camera_names] if spec.cameras else []
            image = gym.spaces.Box(0, 255, (spec.size, spec.size, 3), np.uint8)
            proprio = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
            self.observation_space = gym.spaces.Dict({**dict.fromkeys(self._keys, image), "robot0_eef_pos": proprio})
            self.action_space = gym.spaces.Box(-1, 1, (7,), np.float32)

        def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
            self._env.seed(seed or 0)
            return self._shown(self._env.reset()), {}

        def step(self, action: np.ndarray) -> Any:
            seen, reward, done, _ = self._env.step(action)
            return self._shown(seen), float(reward), bool(done), False, {}

        def _shown(self, seen: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            return {key: np.ascontiguousarray(seen[key]) for key in (*self._keys, "robot0_eef_pos")}

    return Libero()


PEERS = {
    "maniskill": Peers(_maniskill, (VectorEnv("async", 2), VectorEnv("async", 8))),
    # LIBERO's need seconds and most of a gigabyte each.
    "libero": Peers(_libero, (VectorEnv("async", 2), VectorEnv("subproc", 2))),
}
"""By simulator. One that is only ours has none."""
