"""`sim_farm.vector_env`: equal, bit for bit, to Gymnasium's own loop over the same physics, in processes that end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

import sim_farm
from sim_farm.client.vector_env import FarmVectorEnv, vector_env
from sim_farm.contract import FarmError, PhysicsResult, TaskSpec
from sim_farm.conventions import MAX_SEED
from sim_farm.registry import make_physics, make_renderer
from sim_farm.workers import faults
from sim_farm.workers.supervision import FRUITLESS
from tests.variants import often

ROOT = Path(__file__).resolve().parents[2]
REACH, PUSH = "tabletop/reach", "maniskill/PushCube-v1"
ENVS, LIMIT = 4, 7
MODES = tuple(AutoresetMode)


class Single(gymnasium.Env[Any, np.ndarray]):
    """One environment over the physics, and the renderer if there are cameras, as Gymnasium has environments."""

    def __init__(self, task: str, cameras: int = 0) -> None:
        spec = TaskSpec(task, cameras=cameras, image_size=32, max_episode_steps=LIMIT)
        self.physics = make_physics(spec)
        self.renderer = make_renderer(spec) if cameras else None
        info = self.info = self.physics.info
        state = gymnasium.spaces.Box(-np.inf, np.inf, (info.state_dim,), np.float32)
        image = gymnasium.spaces.Box(0, 255, (32, 32, 3), np.uint8)
        pictures = dict.fromkeys(info.cameras, image)
        self.observation_space = gymnasium.spaces.Dict({"state": state, **pictures}) if cameras else state
        low, high = (np.array(bound, np.float32) for bound in (info.action_low, info.action_high))
        self.action_space = gymnasium.spaces.Box(low, high)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        super().reset(seed=seed)
        number = int(self.np_random.integers(MAX_SEED + 1)) if seed is None else seed
        result = self.physics.reset(sim_farm.EpisodeSpec(number))
        return self._shown(result), {"instruction": result.instruction}

    def step(self, action: np.ndarray) -> Any:
        result = self.physics.step(action[None])
        info = {"success": bool(result.success[0]), "instruction": result.instruction}
        ends = bool(result.terminated[0]), bool(result.truncated[0])
        return self._shown(result), float(result.reward[0]), *ends, info

    def _shown(self, result: PhysicsResult) -> Any:
        if self.renderer is None:
            return result.state
        frames = self.renderer.render([result.scene], self.info.cameras)
        return {"state": result.state, **{camera: frame[0] for camera, frame in frames.items()}}

    def close(self) -> None:
        self.physics.close()
        if self.renderer is not None:
            self.renderer.close()


def gymnasiums_own(task: str, mode: AutoresetMode, cameras: int = 0) -> SyncVectorEnv:
    return SyncVectorEnv([partial(Single, task, cameras)] * ENVS, autoreset_mode=mode)


def farms(task: str = REACH, mode: AutoresetMode = AutoresetMode.NEXT_STEP, cameras: int = 0) -> FarmVectorEnv:
    size = 32 if cameras else 128
    return vector_env(
        task, ENVS, workers=2, cameras=cameras, image_size=size, max_episode_steps=LIMIT, autoreset_mode=mode
    )


def assert_equal(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal in structure, type and every bit. Tuples and arrays of objects are compared one by one."""
    if isinstance(theirs, dict):
        assert set(ours) == set(theirs), where
        for key in theirs:
            assert_equal(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, tuple) or (isinstance(theirs, np.ndarray) and theirs.dtype == object):
        assert len(ours) == len(theirs), where
        for i, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            assert_equal(one, other, f"{where}[{i}]")
    elif isinstance(theirs, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape, where
        assert ours.tobytes() == theirs.tobytes(), where
    else:
        assert ours == theirs, where


def actions_of(task: str, steps: int) -> np.ndarray:
    """[steps, ENVS, A]; those of environment 1 are small, so that not all episodes end alike."""
    dims = {REACH: 3, PUSH: 8}[task]
    actions = np.random.default_rng(0).uniform(-1.2, 1.2, (steps, ENVS, dims)).astype(np.float32)
    actions[:, 1] *= 0.1
    return actions


CASES = [(task, mode, cameras) for task in (REACH, PUSH) for mode in MODES for cameras in (0, 1)]
DEFAULT = [(REACH, mode, 0) for mode in MODES] + [(REACH, AutoresetMode.SAME_STEP, 1)]
"""Only in this mode pictures of an episode's end are shown beside the next one's beginning."""


@pytest.mark.parametrize(("task", "mode", "cameras"), often(DEFAULT, CASES))
def test_it_is_gymnasium_s_own_loop_bit_for_bit(task: str, mode: AutoresetMode, cameras: int) -> None:
    with closing(farms(task, mode, cameras)) as ours, closing(gymnasiums_own(task, mode, cameras)) as theirs:
        for space in ("observation_space", "single_observation_space", "action_space", "single_action_space"):
            assert getattr(ours, space) == getattr(theirs, space), space
        assert ours.metadata["autoreset_mode"] is theirs.metadata["autoreset_mode"] is mode
        assert_equal(ours.reset(seed=5), theirs.reset(seed=5), "reset")
        ended = 0
        for step, actions in enumerate(actions_of(task, 40)):
            mine, other = ours.step(actions), theirs.step(actions)
            assert_equal(mine[:4], other[:4], f"step {step}")
            assert_equal(mine[4], other[4], f"infos of step {step}")
            assert ours.observation_space.contains(mine[0])
            ends = mine[2] | mine[3]
            ended += int(ends.sum())
            if step == 16:  # of one environment, whatever it is doing
                mask = np.arange(ENVS) == 2
                one, other = (envs.reset(seed=[1, 2, 3, 4], options={"reset_mask": mask}) for envs in (ours, theirs))
                assert_equal(one, other, "reset of one")
                ends = ends & ~mask
            if step == 21:
                assert_equal(ours.reset(), theirs.reset(), "reset without a seed")
            elif mode is AutoresetMode.DISABLED and ends.any():
                one, other = (envs.reset(options={"reset_mask": ends}) for envs in (ours, theirs))
                assert_equal(one, other, f"reset after step {step}")
        assert ended > 2 * ENVS


def test_environment_i_begins_with_the_seed_plus_i() -> None:
    with closing(farms()) as envs:
        first, _ = envs.reset(seed=5)
        later = envs.step(actions_of(REACH, 1)[0])[0]
        shifted, _ = envs.reset(seed=6)
        assert (first[1:] == shifted[:-1]).all() and (first[0] != first[1]).any()
        unseeded, _ = envs.reset()
        assert (unseeded != shifted).any(axis=1).all()
        again, _ = envs.reset(seed=5)
        assert (again == first).all() and (envs.step(actions_of(REACH, 1)[0])[0] == later).all()


@pytest.mark.parametrize("shown", ["state", "proprio", "frames"])
def test_what_is_returned_is_in_its_space(shown: Any) -> None:
    with closing(vector_env(REACH, 2, workers=1, observations=shown, cameras=2, image_size=16)) as envs:
        seen, _ = envs.reset(seed=0)
        assert envs.observation_space.contains(seen)
        cameras = set(envs.task_info.cameras)
        assert set(seen) == (cameras if shown == "frames" else {shown, *cameras})
        kept = {key: rows.copy() for key, rows in seen.items()}
        for _ in range(3):
            assert envs.observation_space.contains(envs.step(envs.action_space.sample())[0])
        assert_equal(seen, kept)  # what was returned is the caller's


def test_gymnasium_s_wrappers_take_it() -> None:
    envs = gymnasium.wrappers.vector.RecordEpisodeStatistics(farms())
    with closing(gymnasium.wrappers.vector.NormalizeObservation(envs)) as wrapped:
        wrapped.reset(seed=0)
        lengths = list[int]()
        for actions in actions_of(REACH, 20):
            infos = wrapped.step(actions)[-1]
            lengths += infos["episode"]["l"][infos["_episode"]].tolist() if "episode" in infos else []
        assert len(lengths) >= 2 * ENVS and max(lengths) == LIMIT


# --- mistakes


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"task": "tabletop/raech"}, "did you mean tabletop/reach"),
        ({"num_envs": 3, "workers": 2}, "use a multiple of 2"),
        ({"observations": "pixels"}, "observations is one of state, proprio, frames, got 'pixels'"),
        ({"observations": "frames"}, "needs cameras"),
        ({"autoreset_mode": "never"}, "autoreset_mode is one of 'NextStep', 'SameStep', 'Disabled', got 'never'"),
        ({"cameras": ("nowhere",)}, "nowhere"),
        ({"max_episode_steps": 0}, "max_episode_steps is a whole number from 1"),
    ],
)
def test_a_mistake_has_one_message(settings: dict[str, Any], message: str) -> None:
    whole: dict[str, Any] = {"task": REACH, "num_envs": 2, "workers": 1}
    with pytest.raises(FarmError, match=message):
        vector_env(**(whole | settings))


@pytest.mark.parametrize(("package", "name"), [("gymnasium", "vector_env"), ("stable_baselines3", "sb3_vec_env")])
def test_a_library_that_is_missing_is_named(package: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    for module in ("vector_env", "stable_baselines3"):
        monkeypatch.delitem(sys.modules, f"sim_farm.client.{module}", raising=False)
    with pytest.raises(
        FarmError, match=f"sim_farm.{name} needs the package '{package.replace('_', '-')}': pip install"
    ):
        getattr(sim_farm, name)


def test_calls_that_cannot_be_are_refused_and_harm_nothing() -> None:
    with closing(farms(mode=AutoresetMode.DISABLED)) as envs:
        zeros = np.zeros((ENVS, 3), np.float32)
        some = {"reset_mask": np.arange(ENVS) == 1}
        refused: list[tuple[Callable[[], Any], str]] = [
            (lambda: envs.step(zeros), "reset the environments before their first step"),
            (lambda: envs.reset(options=some), "reset all environments before you reset some"),
            (lambda: envs.reset(seed=[1, 2]), "one number or 4"),
            (lambda: envs.reset(seed=-1), "from 0 to 2147483647, got -1"),
            (lambda: envs.reset(options={"state": 1}), "knows the option reset_mask, got state"),
            (lambda: envs.reset(options={"reset_mask": np.zeros(ENVS, bool)}), "names no environment"),
            (lambda: envs.reset(options={"reset_mask": [True] * ENVS}), "bool array of shape"),
        ]
        for call, message in refused:
            with pytest.raises(FarmError, match=message):
                call()
        envs.reset(seed=0)
        for wrong, message in (
            (zeros[:, :2], r"shape \[4, 3\], got \[4, 2\]"),
            (np.full_like(zeros, np.nan), "environment 0 has nan at 0"),
            ("left", "are numbers"),
        ):
            with pytest.raises(FarmError, match=message):
                envs.step(wrong)  # pyrefly: ignore
        assert [envs.step(zeros)[3].all() for _ in range(LIMIT)] == [False] * (LIMIT - 1) + [True]
        with pytest.raises(FarmError, match=r"environments \[0, 1, 2, 3\] have ended"):
            envs.step(zeros)
        envs.reset(options=some)
        with pytest.raises(FarmError, match=r"environments \[0, 2, 3\] have ended"):
            envs.step(zeros)
    with pytest.raises(FarmError, match="are closed"):
        envs.reset()


# --- processes


def gone(pid: int) -> bool:
    """True once the process has ended, waited for up to a minute."""
    for _ in range(1200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def fault_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "faults.json"
    monkeypatch.setenv(faults.VARIABLE, str(path))
    yield path


def test_close_leaves_neither_process_nor_memory(own_memory: Callable[[], set[Path]]) -> None:
    envs = farms(cameras=1)
    pids = envs.worker_pids
    assert len(pids) == 2 and own_memory()
    envs.reset(seed=0)
    envs.close()
    envs.close()
    assert all(gone(pid) for pid in pids) and not own_memory()


def test_a_worker_that_dies_is_replaced_and_nothing_changes() -> None:
    with closing(farms()) as envs, closing(gymnasiums_own(REACH, MODES[0])) as theirs:
        assert_equal(envs.reset(seed=1), theirs.reset(seed=1))
        for step, actions in enumerate(actions_of(REACH, 20)):
            if step in (3, 12):
                os.kill(envs.worker_pids[step % 2], signal.SIGKILL)
            assert_equal(envs.step(actions), theirs.step(actions), f"step {step}")


def test_a_worker_that_cannot_serve_is_given_up(fault_file: Path, own_memory: Callable[[], set[Path]]) -> None:
    every = [{"worker": "physics 1", "phase": "step", "kind": "kill"}] * FRUITLESS
    fault_file.write_text(str(every).replace("'", '"'))
    envs = farms()
    pids = envs.worker_pids
    envs.reset(seed=0)
    with pytest.raises(FarmError, match=rf"physics 1 was lost {FRUITLESS} times, .* its process died \(signal 9\)"):
        envs.step(np.zeros((ENVS, 3), np.float32))
    assert envs.closed and all(gone(pid) for pid in pids) and not own_memory()


def test_an_error_in_a_simulator_is_raised_and_ends_the_processes(fault_file: Path) -> None:
    fault_file.write_text('[{"worker": "physics 0", "phase": "step", "kind": "raise", "nth": 2}]')
    envs = farms()
    pids = envs.worker_pids
    envs.reset(seed=0)
    with pytest.raises(FarmError, match="a fault was injected into physics 0"):
        envs.step(np.zeros((ENVS, 3), np.float32))
    assert envs.closed and all(gone(pid) for pid in pids)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_are_not_finite_end_the_episode_and_are_not_shown(mode: AutoresetMode, fault_file: Path) -> None:
    fault_file.write_text('[{"worker": "physics 1", "phase": "state", "kind": "corrupt", "nth": 1}]')
    with closing(farms(mode=mode)) as envs:
        envs.reset(seed=0)
        seen, rewards, terminations, truncations, infos = envs.step(np.full((ENVS, 3), 0.5, np.float32))
        broken = np.arange(ENVS) == 1
        assert (terminations == broken).all() and not truncations.any()
        assert np.isfinite(rewards).all() and rewards[1] == 0 and np.isfinite(seen).all()
        said = infos["final_info"] if mode is AutoresetMode.SAME_STEP else infos
        assert (said["broken"] == broken).all() and (said["_broken"] == broken).all()
        last = infos["final_obs"][1] if mode is AutoresetMode.SAME_STEP else seen[1]
        assert not last.any()


UNGUARDED = """
import os, sim_farm
envs = sim_farm.vector_env("tabletop/reach", 2, workers=2)
envs.reset(seed=0)
print(*envs.worker_pids, flush=True)
{end}
"""
"""A script without `if __name__ == "__main__"`."""


ENDS = ("", "raise RuntimeError('the training failed')", "os.kill(os.getpid(), 9)")


@pytest.mark.parametrize("end", often(ENDS[2:], ENDS))
def test_the_processes_end_with_the_script(end: str) -> None:
    script = [sys.executable, "-c", UNGUARDED.format(end=end)]
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == (0 if not end else 1 if "raise" in end else -signal.SIGKILL)
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and all(gone(pid) for pid in pids)
    assert done.stderr.count("Traceback") == ("raise" in end), done.stderr


def test_a_simulator_of_the_script_s_own_folder_is_found(tmp_path: Path) -> None:
    example = (ROOT / "examples" / "own_simulator.py").read_text()
    (tmp_path / "own_simulator.py").write_text(example)
    (tmp_path / "script.py").write_text(
        "import sim_farm\n"
        "envs = sim_farm.vector_env('own_simulator:BACKEND/reach', 2, workers=1)\n"
        "print(envs.reset(seed=0)[0].shape)\nenvs.close()\n"
    )
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, str(tmp_path / "script.py")],
        capture_output=True, text=True, timeout=300, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.stdout.startswith("(2, "), done.stderr


# --- stable-baselines3


def test_stable_baselines3_gets_what_its_own_loop_would_give() -> None:
    from stable_baselines3.common.vec_env import DummyVecEnv, VecMonitor

    ours = sim_farm.sb3_vec_env(REACH, ENVS, workers=2, max_episode_steps=LIMIT)
    theirs = VecMonitor(DummyVecEnv([partial(Single, REACH)] * ENVS))
    with closing(ours), closing(theirs):
        for envs in (ours, theirs):
            envs.seed(3)
        assert_equal(ours.reset(), theirs.reset())
        for step, actions in enumerate(actions_of(REACH, 30)):
            mine, other = ours.step(actions), theirs.step(actions)
            assert_equal(mine[:3], other[:3], f"step {step}")
            for one, two in zip(mine[3], other[3], strict=True):
                assert one["TimeLimit.truncated"] == two["TimeLimit.truncated"]
                assert ("terminal_observation" in one) == ("terminal_observation" in two)
                if "terminal_observation" in two:
                    assert_equal(one["terminal_observation"], two["terminal_observation"])
                    assert one["is_success"] == two["success"]
                    assert (one["episode"]["r"], one["episode"]["l"]) == (two["episode"]["r"], two["episode"]["l"])


def test_choices_are_discrete_actions() -> None:
    envs = sim_farm.vector_env("gymnasium/CartPole-v1", 2, workers=1, max_episode_steps=LIMIT)
    bare = SyncVectorEnv([lambda: gymnasium.make("CartPole-v1", max_episode_steps=LIMIT)] * 2)
    with closing(envs), closing(bare):
        assert envs.single_action_space == bare.single_action_space == gymnasium.spaces.Discrete(2)
        assert_equal(envs.reset(seed=3)[0], bare.reset(seed=3)[0])
        for choices in np.random.default_rng(0).integers(0, 2, (LIMIT, 2)):
            ours, theirs = envs.step(choices), bare.step(choices)
            assert_equal(ours[:4], theirs[:4])
