"""LIBERO's own environments, to compare with: built as its evaluation scripts build them."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from sim_farm.backends import mujoco_gl
from sim_farm.backends.libero.package import assets, prepare
from sim_farm.backends.libero.tasks import find_task, initial_states


def stock_environment(task: str, size: int | None = None, cameras: tuple[str, ...] = ()) -> Any:
    """`OffScreenRenderEnv` of the task with cameras of `size` pixels; without a size, `ControlEnv` that never draws."""
    prepare()
    assets()
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
    bddl = str(find_task(task).bddl)
    if size is None:
        return wrapper.ControlEnv(bddl_file_name=bddl, use_camera_obs=False, has_offscreen_renderer=False)
    _lend_opengl()
    return wrapper.OffScreenRenderEnv(
        bddl_file_name=bddl, camera_names=list(cameras), camera_heights=size, camera_widths=size
    )


def begin(env: Any, task: str, seed: int, init_state: int | None) -> dict[str, np.ndarray]:
    """The first observation of an episode, as published evaluations begin one."""
    env.seed(seed)
    _make_current(env)
    seen = env.reset()
    return seen if init_state is None else env.set_init_state(initial_states(find_task(task))[init_state])


def close(env: Any) -> None:
    _make_current(env)
    env.close()


def _make_current(env: Any) -> None:
    """Its renderer frees OpenGL objects of whichever context is current, at a reset too: make that its own."""
    context = env.sim._render_context_offscreen
    if context is not None:
        context.gl_ctx.make_current()


def _lend_opengl() -> None:
    """The backend imports robosuite without a platform for drawing; stock environments need one."""
    binding: Any = importlib.import_module("robosuite.utils.binding_utils")
    if not hasattr(binding, "GLContext"):
        name = mujoco_gl.platform()
        module: Any = importlib.import_module(f"robosuite.renderers.context.{name}_context")
        binding.GLContext = getattr(module, {"egl": "EGLGLContext", "osmesa": "OSMesaGLContext"}[name])
