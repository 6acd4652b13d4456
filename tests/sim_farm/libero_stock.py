"""LIBERO's own environments, to compare with: built as its evaluation scripts build them. What comparisons share."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from sim_farm.backends import mujoco_gl
from sim_farm.backends.libero.assets import assets
from sim_farm.backends.libero.environment import FIELDS
from sim_farm.backends.libero.package import prepare, settings_file
from sim_farm.backends.libero.tasks import find_task, initial_states

SIZE = 64


def stock_environment(task: str, size: int | None = None, cameras: tuple[str, ...] = ()) -> Any:
    """`OffScreenRenderEnv` of the task with cameras of `size` pixels; without a size, `ControlEnv` that never draws."""
    prepare()
    assets()
    wrapper = importlib.import_module("libero.libero.envs.env_wrapper")
    bddl = str(find_task(task).bddl)
    if size is None:
        return wrapper.ControlEnv(bddl_file_name=bddl, use_camera_obs=False, has_offscreen_renderer=False)
    _lend_opengl()
    env = wrapper.OffScreenRenderEnv(
        bddl_file_name=bddl, camera_names=list(cameras), camera_heights=size, camera_widths=size
    )
    for name in ("reset", "set_init_state", "step", "close"):
        setattr(env, name, functools.partial(_in_its_context, env, getattr(env, name)))
    return env


def _in_its_context(env: Any, method: Callable[..., Any], *arguments: Any) -> Any:
    """Call a method of the environment. Its renderer draws in whichever OpenGL context is current, and frees objects of
    that one: make it its own first."""
    env.sim._render_context_offscreen.gl_ctx.make_current()
    return method(*arguments)


def settings_naming(folder: Path, own_assets: Path | None) -> Path:
    """The folder, made, with a settings file of LIBERO that names the task files that are here, and those assets."""
    prepare()
    settings = yaml.safe_load(settings_file().read_text())
    settings.pop("assets", None)
    folder.mkdir(exist_ok=True)
    named = {} if own_assets is None else {"assets": str(own_assets)}
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | named))
    return folder


def begin(env: Any, task: str, seed: int, init_state: int | None) -> dict[str, np.ndarray]:
    """The first observation of an episode, as published evaluations begin one."""
    env.seed(seed)
    seen = env.reset()
    return seen if init_state is None else env.set_init_state(initial_states(find_task(task))[init_state])


def _lend_opengl() -> None:
    """The backend imports robosuite without a platform for drawing; stock environments need one."""
    binding: Any = importlib.import_module("robosuite.utils.binding_utils")
    if not hasattr(binding, "GLContext"):
        name = mujoco_gl.platform()
        module: Any = importlib.import_module(f"robosuite.renderers.context.{name}_context")
        binding.GLContext = getattr(module, {"egl": "EGLGLContext", "osmesa": "OSMesaGLContext"}[name])


def random_actions(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-1, 1, (count, 7)).astype(np.float32)


def backend_of(physics: Any) -> Any:
    """LIBERO's physics, without the check and the conventions around it."""
    return getattr(physics, "backend", physics)


def simulator(physics: Any) -> Any:
    """robosuite's simulation behind our physics."""
    return backend_of(physics)._env.sim


def assert_states_equal(env: Any, physics: Any, when: str) -> None:
    for name in ("qpos", "qvel", "qacc_warmstart", "ctrl"):
        ours, theirs = getattr(simulator(physics).data._data, name), getattr(env.sim.data._data, name)
        assert ours.tobytes() == theirs.tobytes(), f"{name} differs {when}"


def assert_models_equal(env: Any, physics: Any) -> None:
    """Every array of the model, not only those that we know to change, is what the stock environment's is."""
    user = backend_of(physics)._user
    user.take()
    theirs, ours, compiled = env.sim.model._model, simulator(physics).model._model, user.shared.pristine
    arrays = [name for name in dir(theirs) if isinstance(getattr(theirs, name, None), np.ndarray)]
    assert len(arrays) > 200
    for name in arrays:
        assert getattr(ours, name).tobytes() == getattr(theirs, name).tobytes(), f"the model's {name} differs"
    assert set(compiled) == set(FIELDS)
