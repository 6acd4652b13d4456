"""A Gymnasium environment and its description: which spaces a task of this project can be made of, and what is refused.

What an environment offers is known only from an instance, which is made, reset and stepped once to see whether it
reports success, and drawn once where frames are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sim_farm.contract import FarmError, Float32, TaskInfo, TaskSpec

CAMERA = "render"
"""Name of the one camera: what the environment's `render` shows."""
SUCCESS = ("is_success", "success")
"""Keys of the info by which environments report success."""
USUAL_HZ = 30.0
"""Control rate of an environment whose metadata has no `render_fps`."""


@dataclass(frozen=True)
class Environment:
    """An environment that was just made, and its description."""

    env: gymnasium.Env[Any, Any]
    info: TaskInfo


def open_environment(spec: TaskSpec) -> Environment:
    """The task's environment. Raises `FarmError` where it cannot be made or drawn, or is of spaces that are not
    understood."""
    limit = spec.max_episode_steps or gymnasium.registry[id_of(spec)].max_episode_steps
    if limit is None:
        raise FarmError(f"{spec.name} has no time limit of its own: set env.max_episode_steps (TaskSpec's)")
    cameras = _cameras(spec)
    env = _made(spec, limit)
    try:
        if cameras:
            _check_draws(spec.name, env)
            env.close()
            env = _made(spec, limit, render_mode="rgb_array")
        return Environment(env, _described(spec, env, limit, cameras))
    except BaseException:
        env.close()
        raise


def id_of(spec: TaskSpec) -> str:
    """The environment's id in Gymnasium's registry, which may have slashes of its own."""
    return spec.name.partition("/")[2]


def picture(env: gymnasium.Env[Any, Any], name: str) -> np.ndarray:
    """uint8 [H, W, 3]: what the environment shows now, in its own size. Raises `FarmError`."""
    try:
        drawn = env.render()
    except Exception as error:  # whatever its authors draw with; what is missing is in the message
        raise FarmError(
            f"{name} cannot draw ({error}). Set env.cameras and eval.videos to 0, or install what draws it: "
            "pip install 'embodied-farm[gymnasium]' has pygame. MuJoCo's environments need MUJOCO_GL=egl or osmesa "
            "where there is no display"
        ) from error
    if not isinstance(drawn, np.ndarray) or drawn.dtype != np.uint8 or drawn.ndim != 3 or drawn.shape[2] != 3:
        shown = f"{drawn.dtype} {list(drawn.shape)}" if isinstance(drawn, np.ndarray) else type(drawn).__name__
        raise FarmError(f"{name} draws {shown}, and frames are uint8 [H, W, 3]: set env.cameras to 0")
    return drawn


def flat_state(env: gymnasium.Env[Any, Any], observation: Any) -> Float32:
    """[S] the observation as one new array, a dictionary's parts in the order of its space."""
    flat = spaces.flatten(env.observation_space, observation)
    return np.array(flat, np.float32).reshape(-1)


def is_solved(info: Mapping[str, Any]) -> bool:
    """Success as the environment reports it; False where it does not."""
    return any(bool(info[key]) for key in SUCCESS if key in info)


def _made(spec: TaskSpec, limit: int, **arguments: Any) -> gymnasium.Env[Any, Any]:
    try:
        # Its checker would compare spaces at every call, and warn of what is no concern here.
        return gymnasium.make(id_of(spec), limit, disable_env_checker=True, **arguments)
    except (gymnasium.error.Error, ImportError) as error:
        raise FarmError(f"{spec.name} cannot be made: {error}") from error


def _check_draws(name: str, env: gymnasium.Env[Any, Any]) -> None:
    modes = env.metadata.get("render_modes", ())
    if "rgb_array" not in modes:
        raise FarmError(
            f"{name} draws no frames: its render modes are {', '.join(modes) or 'none'}, and rgb_array is needed; set "
            "env.cameras and eval.videos to 0"
        )


def _cameras(spec: TaskSpec) -> tuple[str, ...]:
    if isinstance(spec.cameras, int):
        if spec.cameras > 1:
            raise FarmError(f"{spec.name} has no {spec.cameras} cameras, only {CAMERA}")
        return (CAMERA,)[: spec.cameras]
    for name in spec.cameras:
        if name != CAMERA:
            raise FarmError(f"{spec.name} has no camera {name!r}; valid: {CAMERA}")
    return spec.cameras


def _described(spec: TaskSpec, env: gymnasium.Env[Any, Any], limit: int, cameras: tuple[str, ...]) -> TaskInfo:
    low, high, mode = _actions(spec.name, env.action_space)
    if spec.control_mode not in (None, mode):
        raise FarmError(f"{spec.name} has no control mode {spec.control_mode!r}; valid: {mode}")
    if spec.reward != "dense":
        raise FarmError(f"{spec.name} has no {spec.reward} reward, only its own, which is called dense")
    if not env.observation_space.is_np_flattenable:
        raise FarmError(
            f"{spec.name} has observations of {env.observation_space}, which have no fixed length: a state is a Box "
            "or a dictionary of boxes"
        )
    if cameras:
        env.reset(seed=0)
        picture(env, spec.name)
    return TaskInfo(
        spec=replace(spec, control_mode=mode, max_episode_steps=limit, cameras=cameras),
        action_dim=len(low),
        action_low=low,
        action_high=high,
        proprio_dim=0,
        state_dim=spaces.flatdim(env.observation_space),
        scene_bytes=3 * spec.image_size**2 if cameras else 0,
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=float(env.metadata.get("render_fps") or USUAL_HZ),
        discrete_actions=int(env.action_space.n) if isinstance(env.action_space, spaces.Discrete) else 0,
        has_success=_reports_success(env),
    )


def _actions(name: str, space: spaces.Space[Any]) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Lower and upper bounds of the flattened action, and the name of its kind."""
    if isinstance(space, spaces.Discrete):
        return (0.0,), (float(space.n - 1),), "discrete"
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        if space.is_bounded():
            return tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist()), "continuous"
        raise FarmError(
            f"{name} takes actions of {space}, without bounds: register it with a wrapper that gives them some "
            "(gymnasium.wrappers.RescaleAction)"
        )
    raise FarmError(
        f"{name} takes actions of {space}, and an action is one Discrete choice or one Box of floating-point numbers: "
        "register it with a wrapper that takes one of these (gymnasium.ActionWrapper)"
    )


def _reports_success(env: gymnasium.Env[Any, Any]) -> bool:
    env.reset(seed=0)
    env.action_space.seed(0)
    *_, info = env.step(env.action_space.sample())
    return any(key in info for key in SUCCESS)
