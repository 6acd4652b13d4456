"""A Gymnasium environment and its description: which spaces a task of this project can be made of, and what is refused.

What an environment offers is known only from an instance: the first one of a process is tried (`trial`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sim_farm.backends.gymnasium.instance import Instance
from sim_farm.backends.gymnasium.observation import MOST_CODES, RENDER, Observation, read_space
from sim_farm.backends.gymnasium.trial import Trial, try_out
from sim_farm.contract import FarmError, TaskInfo, TaskSpec
from sim_farm.failures import failures_of

USUAL_HZ = 30.0
"""Control rate of an environment whose metadata has no `render_fps`."""


@dataclass(frozen=True)
class Environment:
    """An environment that was just made, and its description."""

    instance: Instance
    observation: Observation
    info: TaskInfo
    again: Callable[[], Instance] | None
    """Makes a new environment for the next episode, if an episode leaves traces in its environment; else None."""


def open_environment(spec: TaskSpec) -> Environment:
    """The task's environment. Raises `FarmError` where it cannot be made or drawn, or is of spaces that are
    not understood."""
    limit = spec.max_episode_steps or gymnasium.registry[id_of(spec)].max_episode_steps
    if limit is None:
        raise FarmError(f"{spec.name} has no time limit of its own: set env.max_episode_steps (TaskSpec's)")
    instance = _made(spec, limit)
    try:
        space = instance.env.observation_space
        _cameras(spec, _understood(spec.name, space), instance.env)
        _actions(spec.name, instance.env.action_space)
        tried = _tried(spec.name, limit)
        observation = read_space(space, tried.codes)
        cameras = _cameras(spec, observation, instance.env)
        info = _described(spec, instance.env, limit, observation, cameras)
        info = replace(info, has_success=tried.reports_success, inexact=tried.inexact)
        drawn = {"render_mode": "rgb_array"} if RENDER in cameras else {}
        if drawn:
            instance.close()
            instance = _made(spec, limit, **drawn)
            instance.reset(0)
            instance.draw()
        again = partial(_made, spec, limit, **drawn) if tried.leaves_traces else None
        return Environment(instance, observation, info, again)
    except BaseException:
        instance.close()
        raise


def id_of(spec: TaskSpec) -> str:
    """The environment's id in Gymnasium's registry, which may contain slashes."""
    return spec.name.partition("/")[2]


def _made(spec: TaskSpec, limit: int, **arguments: Any) -> Instance:
    try:
        with failures_of(spec.name, "its making"):
            # Its checker would compare spaces at every call, and warn of what is no concern here.
            env = gymnasium.make(id_of(spec), limit, disable_env_checker=True, **arguments)
    except FarmError as error:
        if isinstance(error.__cause__, gymnasium.error.Error | ImportError):  # its message says it all
            raise FarmError(f"{spec.name} cannot be made: {error.__cause__}") from error.__cause__
        raise
    return Instance(spec.name, env)


@cache
def _tried(name: str, limit: int) -> Trial:
    """The trial of the environment, once per process."""
    spec = TaskSpec(name)
    if gymnasium.registry[id_of(spec)].nondeterministic:
        return replace(try_out(lambda: _made(spec, limit)), inexact="it is registered with nondeterministic=True")
    return try_out(lambda: _made(spec, limit))


def _understood(name: str, space: spaces.Space[Any]) -> Observation:
    try:
        return read_space(space)
    except FarmError as error:
        raise FarmError(f"{name} has {error}") from error


def _cameras(spec: TaskSpec, observation: Observation, env: gymnasium.Env[Any, Any]) -> tuple[str, ...]:
    """The cameras that are asked for: the pictures of the observation come first, then what `render` draws."""
    modes = env.metadata.get("render_modes") or ()
    known = (*observation.cameras, *((RENDER,) if "rgb_array" in modes else ()))
    if isinstance(spec.cameras, int) and len(known) < spec.cameras <= len(known) + len(observation.grids):
        raise FarmError(
            f"{spec.name} has no {spec.cameras} cameras: its {', '.join(observation.grids)} is a grid of codes, whole "
            f"numbers up to {MOST_CODES}, which is state: set env.cameras to {len(known)}, or register it with a "
            "wrapper that draws it (minigrid.wrappers.RGBImgObsWrapper)"
        )
    if spec.cameras and not known:
        raise FarmError(
            f"{spec.name} draws no frames: its render modes are {', '.join(map(str, modes)) or 'none'}, and rgb_array "
            "is needed; set env.cameras and eval.videos to 0"
        )
    if isinstance(spec.cameras, int):
        if spec.cameras > len(known):
            raise FarmError(f"{spec.name} has no {spec.cameras} cameras, only {', '.join(known)}")
        return known[: spec.cameras]
    for name in spec.cameras:
        if name not in known:
            raise FarmError(f"{spec.name} has no camera {name!r}; valid: {', '.join(known)}")
    return spec.cameras


def _described(
    spec: TaskSpec, env: gymnasium.Env[Any, Any], limit: int, observation: Observation, cameras: tuple[str, ...]
) -> TaskInfo:
    low, high, mode = _actions(spec.name, env.action_space)
    if spec.control_mode not in (None, mode):
        raise FarmError(f"{spec.name} has no control mode {spec.control_mode!r}; valid: {mode}")
    if spec.reward != "dense":
        raise FarmError(f"{spec.name} has no {spec.reward} reward, only its own, which is called dense")
    choices = env.action_space if isinstance(env.action_space, spaces.Discrete) else None
    return TaskInfo(
        spec=replace(spec, control_mode=mode, max_episode_steps=limit, cameras=cameras),
        action_dim=len(low),
        action_low=low,
        action_high=high,
        proprio_dim=0,
        state_dim=observation.state_dim,
        scene_bytes=3 * spec.image_size**2 * len(cameras),
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=float(env.metadata.get("render_fps") or USUAL_HZ),
        discrete_actions=0 if choices is None else int(choices.n),
        first_choice=0 if choices is None else int(choices.start),
        instruction_bytes=observation.instruction_bytes,
    )


def _actions(name: str, space: spaces.Space[Any]) -> tuple[tuple[float, ...], tuple[float, ...], str]:
    """Lower and upper bounds of the flattened action, and the name of its kind."""
    if isinstance(space, spaces.Discrete):
        return (0.0,), (float(space.n - 1),), "discrete"
    if isinstance(space, spaces.Box) and np.issubdtype(space.dtype, np.floating):
        low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
        with np.errstate(over="ignore", invalid="ignore"):
            width = (high - low).astype(np.float32)
        if not np.isfinite(width).all():
            raise FarmError(
                f"{name} takes actions of {space}, without bounds: register it with a wrapper that gives them some "
                "(gymnasium.wrappers.RescaleAction)"
            )
        if len(width) and (width > 0).all():
            return tuple(low.tolist()), tuple(high.tolist()), "continuous"
        raise FarmError(
            f"{name} takes actions of {space}, of which nothing, or an element, leaves no choice: register it with a "
            "wrapper that takes the others alone (gymnasium.ActionWrapper)"
        )
    raise FarmError(
        f"{name} takes actions of {space}, and an action is one Discrete choice or one Box of floating-point numbers: "
        "register it with a wrapper that takes one of these (gymnasium.ActionWrapper)"
    )
