"""The loops that the farm is compared with. Each runs in a process of its own and measures on request.

    python -m embodied_bench.farm_peers '{"kind": "async", "task": "maniskill/PushCube-v1", ...}'

reads a number of seconds per line from standard input, runs that long, and answers with a line of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

Kind = Literal["bare", "farm", "stock", "async", "subproc"]


@dataclass(frozen=True)
class LoopSpec:
    """One measured loop."""

    kind: Kind
    """bare: our physics (and one picture of each camera per chunk), nothing else, one environment after the other on
    one core. farm: the same by a farm within the loop's process. stock: the simulator's own `step` on one core,
    pictures at every env step. async: gymnasium's AsyncVectorEnv over it, pinned. subproc: LIBERO's SubprocVectorEnv,
    pinned."""
    task: str
    cameras: int
    size: int
    chunk: int
    num_envs: int
    cores: tuple[int, ...]


class LoopProcess:
    """A loop in its own process."""

    def __init__(self, spec: LoopSpec) -> None:
        env = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
        self.spec = spec
        self._process = subprocess.Popen(
            [sys.executable, "-m", "embodied_bench.farm_peers", json.dumps(asdict(spec))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
            start_new_session=True,
        )

    def wait_ready(self) -> None:
        """Until it is built and has run a little."""
        self._answer("ready")

    def start(self, seconds: float) -> None:
        """Begin to measure env steps per second over about that time; `finish` waits for the answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{seconds}\n")
        self._process.stdin.flush()

    def finish(self) -> float:
        return self._answer("env_steps_per_s")

    def close(self) -> None:
        """End it and the workers it started."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answer(self, key: str) -> float:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(f'{{"{key}"'):
                return float(json.loads(line)[key])
        raise RuntimeError(f"the {self.spec.kind} loop ended without an answer, status {self._process.wait()}")


def _bare(spec: LoopSpec) -> Callable[[], int]:
    from sim_farm.contract import TaskSpec
    from sim_farm.episodes import EndlessEpisodes
    from sim_farm.registry import make_physics, make_renderer

    os.sched_setaffinity(0, {spec.cores[0]})
    task = TaskSpec(spec.task, cameras=spec.cameras, image_size=spec.size)
    environments = [make_physics(task) for _ in range(spec.num_envs)]
    renderer = make_renderer(task) if spec.cameras else None
    actions = _actions(environments[0].info.action_dim, spec.chunk)
    episodes, begun = EndlessEpisodes(0), [0] * spec.num_envs
    for env, physics in enumerate(environments):
        physics.reset(episodes.spec(env, 0))
    turn = 0

    def once() -> int:
        nonlocal turn
        env = turn % spec.num_envs
        physics = environments[env]
        result = physics.step(actions[turn % len(actions)])
        turn += 1
        if result.ended:
            begun[env] += 1
            scene = physics.reset(episodes.spec(env, begun[env])).scene
        else:
            scene = result.scene
        if renderer is not None:
            renderer.render([scene], physics.info.cameras)
        return result.steps

    return once


def _farm(spec: LoopSpec) -> Callable[[], int]:
    from sim_farm.client.farm import Farm
    from sim_farm.contract import TaskSpec
    from sim_farm.episodes import EndlessEpisodes
    from sim_farm.shared_memory.slot_layout import FarmSpec
    from sim_farm.workers.hosts import InProcess

    os.sched_setaffinity(0, {spec.cores[0]})
    task = TaskSpec(spec.task, cameras=spec.cameras, image_size=spec.size)
    alone = FarmSpec(
        task, EndlessEpisodes(0), spec.num_envs, spec.chunk, groups=1, physics_workers=1, final_frames="never"
    )
    farm = Farm.create(alone, InProcess())
    rows = _actions(farm.infos[0].action_dim, spec.num_envs * spec.chunk)
    actions = rows.reshape(len(rows), spec.num_envs, spec.chunk, -1)
    farm.reset(0)
    turn = 0

    def once() -> int:
        nonlocal turn
        steps = int(farm.collect(0).steps.sum())
        farm.submit(0, actions[turn % len(actions)])
        turn += 1
        return steps

    return once


def _peer(spec: LoopSpec) -> PeerSpec:
    return PeerSpec(spec.task, spec.cameras, spec.size)


def _stock(spec: LoopSpec) -> Callable[[], int]:
    os.sched_setaffinity(0, {spec.cores[0]})
    env = peer_env(_peer(spec))
    actions = _actions(env.action_space.shape[0], 1)[:, 0]
    env.reset(seed=0)
    turn = 0

    def once() -> int:
        nonlocal turn
        *_, terminated, truncated, _ = env.step(actions[turn % len(actions)])
        turn += 1
        if terminated or truncated:
            env.reset()
        return 1

    return once


def _pinned_env(spec: LoopSpec, index: int) -> Any:
    os.sched_setaffinity(0, {spec.cores[index % len(spec.cores)]})
    return peer_env(_peer(spec))


def _async(spec: LoopSpec) -> Callable[[], int]:
    from gymnasium.vector import AsyncVectorEnv

    # A dummy environment for the spaces is made in this process first, which must not pin it.
    here = os.sched_getaffinity(0)
    env = AsyncVectorEnv([partial(_pinned_env, spec, i) for i in range(spec.num_envs)], context="spawn")
    os.sched_setaffinity(0, here)
    actions = _actions(int(np.prod(env.single_action_space.shape or ())), spec.num_envs)
    env.reset(seed=0)
    turn = 0

    def once() -> int:
        nonlocal turn
        for _ in range(spec.chunk):
            env.step(actions[turn % len(actions)])
            turn += 1
        return spec.chunk * spec.num_envs

    return once


def _subproc(spec: LoopSpec) -> Callable[[], int]:
    step, dims = subproc_vector_env(_peer(spec), spec.num_envs, spec.cores)
    actions = _actions(dims, spec.num_envs)
    turn = 0

    def once() -> int:
        nonlocal turn
        for _ in range(spec.chunk):
            step(actions[turn % len(actions)])
            turn += 1
        return spec.chunk * spec.num_envs

    return once


def _actions(dims: int, rows: int) -> np.ndarray:
    """[512, rows, dims] uniform in [-1, 1]."""
    return np.random.default_rng(0).uniform(-1, 1, (512, rows, dims)).astype(np.float32)


def main() -> None:
    data = json.loads(sys.argv[1])
    settings: dict[str, Any] = {**data, "cores": tuple(data["cores"])}
    spec = LoopSpec(**settings)
    once = {"bare": _bare, "farm": _farm, "stock": _stock, "async": _async, "subproc": _subproc}[spec.kind](spec)
    for _ in range(3):
        once()
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        seconds = float(line)
        once()
        steps, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            steps += once()
        rate = steps / (time.perf_counter() - begin)
        print(json.dumps({"env_steps_per_s": rate}), flush=True)


# --- The simulators' own environments, as their users run them: what the farm is compared with.


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
    """Environments that a simulator's users run."""

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

    from sim_farm.backends.libero.assets import assets

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


if __name__ == "__main__":
    main()
