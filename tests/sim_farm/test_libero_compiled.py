"""LIBERO's compiled simulation steps, beside LIBERO's own environment: every state equal to the last bit."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sim_farm.backends.libero.control import Control, _say
from sim_farm.backends.libero.package import prepare
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.registry import make_physics
from tests.sim_farm import libero_stock as stock
from tests.sim_farm.libero_stock import assert_states_equal, backend_of, random_actions
from tests.variants import often

DRAWER, STOVE = "libero/libero_goal/0", "libero/libero_goal/7"
TASKS = [
    f"libero/{name}"
    for name in (
        *("libero_spatial/0", "libero_spatial/5", "libero_object/3", "libero_object/8", "libero_goal/0"),
        *("libero_goal/7", "libero_10/3", "libero_10/9", "libero_90/20", "libero_90/66"),
    )
]
"""Ten tasks of all five suites, in every kind of room."""
KERNELS = ["Nehalem", "Sandybridge", "Haswell", "Zen", "SkylakeX"]
"""OpenBLAS's sets for x86-64; one that the processor lacks is replaced by one that it has."""
ARRAYS = ("qpos", "qvel", "qacc", "qacc_warmstart", "ctrl", "actuator_force", "sensordata", "cfrc_ext")


RECORDED, DRAWN = EpisodeSpec(5, 11), EpisodeSpec(6)
"""Both kinds of beginnings."""


def compare(
    task: str, steps: int | None, episodes: Sequence[EpisodeSpec] = (RECORDED, DRAWN), compiled: bool = True
) -> None:
    """Episodes in one environment, `steps` long or whole, each beside a new stock environment."""
    with closing(make_physics(TaskSpec(task, ignore_terminations=True))) as physics:
        limit = physics.info.max_episode_steps if steps is None else steps
        for episode in episodes:
            env = stock.stock_environment(task)
            stock.begin(env, task, episode.seed, episode.init_state)
            physics.reset(episode)
            control = backend_of(physics)._control
            assert (type(control) is Control) == (not compiled), f"{type(control).__name__} steps the environment"
            # Actions that last several steps reach farther than white noise does; without turning, the goal's stays.
            actions = np.repeat(random_actions(limit // 5 + 1, seed=episode.seed), 5, axis=0)[:limit]
            actions[10:15, 3:6] = 0.0
            for step, action in enumerate(actions):
                _, _, done, _ = env.step(action)
                result = physics.step(action[None])
                when = f"after step {step} of {episode} of {task}"
                assert_states_equal(env, physics, when)
                for name in ARRAYS:
                    ours, theirs = (getattr(one.sim.data._data, name) for one in (backend_of(physics)._env, env))
                    assert ours.tobytes() == theirs.tobytes(), f"{name} differs {when}"
                assert bool(result.success[-1]) == bool(done)
            env.close()


@pytest.mark.parametrize("task", often((DRAWER,), (DRAWER, STOVE)))
def test_compiled_steps_equal_those_of_stock_libero(task: str) -> None:
    compare(task, 12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kernels", KERNELS)
def test_compiled_steps_equal_those_of_stock_libero_over_whole_episodes_with_every_kernel(kernels: str) -> None:
    program = "for index, task in enumerate(TASKS): compare(task, None, [(RECORDED, DRAWN)[index % 2]])"
    run(program, OPENBLAS_CORETYPE=kernels)


def test_a_control_that_is_not_known_is_stepped_in_python_and_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare()
    monkeypatch.setattr("robosuite.__version__", "1.5.1")
    _say.cache_clear()
    with closing(make_physics(TaskSpec(DRAWER))) as physics:
        with pytest.warns(UserWarning, match="run in Python.* robosuite 1.4.0's, and 1.5.1 is installed") as said:
            for seed in range(3):
                physics.reset(EpisodeSpec(seed))
        assert len(said) == 1
        assert type(backend_of(physics)._control) is Control


def test_without_numba_the_steps_equal_those_of_stock_libero_without_numba() -> None:
    said = run(f"compare({DRAWER!r}, 5, [RECORDED], compiled=False)", NUMBA_DISABLE_JIT="1")
    assert "run in Python" in said and "numba is switched off" in said


@pytest.mark.slow
def test_what_is_compiled_is_found_by_the_next_process(tmp_path: Path) -> None:
    program = "compare(DRAWER, 1); from sim_farm.backends.libero.compiled import simulate; stats = simulate.stats; "
    run(program + "assert stats.cache_misses and not stats.cache_hits", NUMBA_CACHE_DIR=str(tmp_path))
    run(program + "assert stats.cache_hits and not stats.cache_misses", NUMBA_CACHE_DIR=str(tmp_path))


def run(program: str, **variables: str) -> str:
    """Run it in a process with these environment variables; its standard error."""
    module = "from tests.sim_farm.test_libero_compiled import *\n"
    done = subprocess.run(
        [sys.executable, "-c", module + program],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr
