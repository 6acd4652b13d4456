"""One comparison of `best_peers.py`: measured in the environment where the peer is installed.

    python benchmarks/best_peers_loops.py '{"task": "tabletop/push", "peer": "mjbatch", ...}'

prints one line of JSON. The farm and its peer live in this process's tree, on the same cores; while one is measured,
the other rests.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ("metaworld", "gymnasium_robotics")
MUJOCO_CALLS = ("mj_step", "mj_forward")
"""Calls in which a simulator's env step leaves Python for MuJoCo."""
ALONE_STEPS = 1000
"""Env steps of one environment by itself, where the parts of an env step are measured."""


@dataclass(frozen=True)
class Comparison:
    """One task, beside one peer."""

    name: str
    task: str
    """The farm's."""
    peer: Literal["envpool", "mjbatch", "rollout"]
    peer_task: str = ""
    """EnvPool's."""
    peer_options: tuple[tuple[str, Any], ...] = ()
    same: tuple[int, int] = (0, 0)
    """First and last + 1 of the state's numbers that do not depend on the random stream, so that both must agree: the
    robot's numbers, until it touches something."""
    reward_scale: float = 1.0
    """The peer's reward by the farm's."""
    stock: str = ""
    """Class of the stock environment in tests/stock_examples.py; empty where the project's environment is its own."""
    num_envs: int = 16
    cores: tuple[int, ...] = (0,)
    seconds: float = 2.0
    """Duration of a measurement."""
    rounds: int = 3
    """Measurements of each, in turn."""


@dataclass(frozen=True)
class Rates:
    """Env steps per second, and per second of CPU time of all processes and threads."""

    wall: float
    cpu: float


class FarmSide:
    """`sim_farm.vector_env`; episodes end at their limit alone."""

    def __init__(self, given: Comparison) -> None:
        import sim_farm

        self._envs = sim_farm.vector_env(given.task, given.num_envs, workers=len(given.cores), ignore_terminations=True)
        self.limit = self._envs.task_info.max_episode_steps
        self.action_dim = self._envs.task_info.action_dim

    def reset(self) -> np.ndarray:
        return self._envs.reset(seed=0)[0]

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        state, reward, terminated, truncated, _ = self._envs.step(actions)
        return state, reward, terminated | truncated

    def close(self) -> None:
        self._envs.close()


class EnvPoolSide:
    """EnvPool with a thread for each core. Like the farm, it begins a new episode in the step after an end."""

    def __init__(self, given: Comparison, limit: int) -> None:
        import envpool

        self._envs: Any = envpool.make(
            given.peer_task,
            env_type="gymnasium",
            num_envs=given.num_envs,
            num_threads=len(given.cores),
            max_episode_steps=limit,
            seed=0,
            **dict(given.peer_options),
        )
        self._kind = self._envs.action_space.dtype

    def reset(self) -> np.ndarray:
        return self._state(self._envs.reset()[0])

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        observation, reward, terminated, truncated, _ = self._envs.step(actions.astype(self._kind))
        return self._state(observation), reward, terminated | truncated

    def close(self) -> None:
        self._envs.close()

    def _state(self, observation: Any) -> np.ndarray:
        """A dictionary's parts in the order of their names, as the farm's state has them."""
        if isinstance(observation, np.ndarray):
            return observation
        return np.concatenate([observation[key] for key in sorted(observation)], axis=1)


class Bare:
    """A tabletop task in MuJoCo alone: the model, the starts and the controls of the farm's episodes."""

    def __init__(self, given: Comparison, limit: int) -> None:
        from sim_farm.backends.mujoco_gl import mujoco
        from sim_farm.backends.tabletop.physics import FINGER_TRAVEL, STEP
        from sim_farm.backends.tabletop.tasks import CONTROL_HZ, TASKS, load_model

        self.mujoco, self.limit, self.num_envs, self.threads = mujoco, limit, given.num_envs, len(given.cores)
        self._step, self._travel = STEP, FINGER_TRAVEL
        task = TASKS[given.task.partition("/")[2]]
        self.model = load_model(task)
        self.substeps = round(1 / (CONTROL_HZ * self.model.opt.timestep))
        self.data = [mujoco.MjData(self.model) for _ in range(given.num_envs)]
        for seed, data in enumerate(self.data):
            start, marks = task.begin(np.random.default_rng(seed))
            data.qpos[:], data.ctrl[:], data.mocap_pos[:] = start, start[:5], marks

    def states(self, kind: Any) -> np.ndarray:
        """[B, S] the starts, as that kind of MuJoCo's state."""
        found = np.empty((self.num_envs, self.mujoco.mj_stateSize(self.model, kind)))
        for row, data in zip(found, self.data, strict=True):
            self.mujoco.mj_getState(self.model, data, row, kind)
        return found

    def control(self, ctrl: np.ndarray, qpos: np.ndarray, actions: np.ndarray) -> None:
        """Set `ctrl` [B, U] as the farm does."""
        ctrl[:, :3] = qpos[:, :3] + self._step * actions[:, :3].astype(np.float64)
        if actions.shape[1] == 4:
            ctrl[:, 3:] = 0.5 * self._travel * (actions[:, 3:].astype(np.float64) + 1.0)


class MjbatchSide:
    """mjbatch: all environments' simulation steps in its threads, controls in NumPy, states back; no reward."""

    def __init__(self, given: Comparison, limit: int) -> None:
        from mjbatch import Batch

        self._bare = Bare(given, limit)
        self._batch: Any = Batch(self._bare.model, given.num_envs, num_threads=len(given.cores))
        self._states, self._qpos, self._qvel, self.ctrl = map(self._batch.bind, ("state", "qpos", "qvel", "ctrl"))
        self._starts = self._bare.states(self._bare.mujoco.mjtState.mjSTATE_INTEGRATION)
        self._steps = 0

    def reset(self) -> np.ndarray:
        self._states[:], self._steps = self._starts, 0
        return self._state()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        if self._steps == self._bare.limit:
            state = self.reset()
        else:
            self._bare.control(self.ctrl, self._qpos, actions)
            self._batch.step(nstep=self._bare.substeps)
            self._steps += 1
            state = self._state()
        count = len(state)
        return state, np.zeros(count), np.full(count, self._steps == self._bare.limit)

    def close(self) -> None: ...

    def _state(self) -> np.ndarray:
        return np.concatenate((self._qpos, self._qvel), axis=1, dtype=np.float32)


class RolloutSide:
    """`mujoco.rollout`: whole episodes at once from controls that are known beforehand; nothing is decided between env
    steps, and no reward is computed."""

    def __init__(self, given: Comparison, limit: int) -> None:
        from mujoco import rollout

        self._bare = Bare(given, limit)
        self._pool = rollout.Rollout(nthread=len(given.cores))
        self._data = [self._bare.mujoco.MjData(self._bare.model) for _ in range(len(given.cores))]
        self._starts = self._bare.states(self._bare.mujoco.mjtState.mjSTATE_FULLPHYSICS)

    def controls(self, actions: np.ndarray) -> np.ndarray:
        """[B, T x substeps, U] those of an episode of the actions [T, B, A], which the states of the way decide."""
        bare, found = self._bare, []
        ctrl = np.stack([data.ctrl for data in bare.data])
        for each in actions:
            bare.control(ctrl, np.stack([data.qpos for data in bare.data]), each)
            for row, data in zip(ctrl, bare.data, strict=True):
                data.ctrl[:] = row
                bare.mujoco.mj_step(bare.model, data, bare.substeps)
            found.append(ctrl.copy())
        return np.repeat(np.stack(found, axis=1), bare.substeps, axis=1)

    def episode(self, controls: np.ndarray) -> np.ndarray:
        """[B, S] the states at its end."""
        states, _ = self._pool.rollout(self._bare.model, self._data, self._starts, controls)
        return states[:, -1]

    def close(self) -> None:
        self._pool.close()


def cpu_s() -> float:
    """CPU time of this process and those that it has started. Of two that are measured in turn, one rests."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def rates(once: Callable[[], int], seconds: float) -> Rates:
    """`once` executes env steps and returns their number."""
    steps, cpu_begin, begin = 0, cpu_s(), time.perf_counter()
    while time.perf_counter() - begin < seconds:
        steps += once()
    return Rates(steps / (time.perf_counter() - begin), steps / (cpu_s() - cpu_begin))


def stepper(side: Any, actions: np.ndarray) -> Callable[[], int]:
    """Steps all environments, with the next of the actions [T, B, A]."""
    turn = 0

    def once() -> int:
        nonlocal turn
        side.step(actions[turn % len(actions)])
        turn += 1
        return actions.shape[1]

    return once


def compared(given: Comparison, farm: FarmSide, peer: Any, actions: np.ndarray) -> dict[str, Any]:
    """An episode of both with the same actions: differences of what must agree, mean rewards, and its length. Raises
    `SystemExit` where an episode of either does not end at its limit, so that the work would not be equal."""
    ours, theirs = farm.reset(), peer.reset()
    differences, rewards = [], []
    part = slice(*given.same)
    for step, action in enumerate(actions, start=1):
        differences.append(np.abs(ours[:, part] - theirs[:, part].astype(np.float32)).max(1))
        (ours, gained, ended), (theirs, peer_gained, peer_ended) = farm.step(action), peer.step(action)
        rewards.append((gained.mean(), peer_gained.mean() / given.reward_scale))
        for name, ends in (("farm", ended), ("peer", peer_ended)):
            if not (ends == (step == farm.limit)).all():
                raise SystemExit(f"{given.name}: after {step} of {farm.limit} env steps {ends.sum()} end in the {name}")
    largest = np.max(differences, axis=0)
    means = np.mean(rewards, axis=0)
    return {
        "episode_steps": farm.limit,
        "difference_after_reset": float(differences[0].max()),
        "largest_difference": float(largest.max()),
        "largest_difference_median_environment": float(np.median(largest)),
        "mean_reward": float(means[0]),
        "peer_mean_reward": float(means[1]),
    }


def parts(given: Comparison, actions: np.ndarray) -> dict[str, float]:
    """CPU time in ms of an env step of one environment in this process: MuJoCo's calls, the whole, and the stock
    environment's own step."""
    from sim_farm.backends.mujoco_gl import mujoco
    from sim_farm.contract import EpisodeSpec, TaskSpec
    from sim_farm.registry import make_physics

    physics = make_physics(TaskSpec(given.task, ignore_terminations=True))
    inside = 0.0

    def timed(call: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        nonlocal inside
        begin = time.process_time()
        try:
            return call(*arguments, **named)
        finally:
            inside += time.process_time() - begin

    def ours(steps: int) -> float:
        physics.reset(EpisodeSpec(0))
        spent = 0.0
        for step in range(steps):
            begin = time.process_time()
            ended = physics.step(actions[step % len(actions), :1]).ended
            spent += time.process_time() - begin
            if ended:
                physics.reset(EpisodeSpec(step))
        return 1e3 * spent / steps

    ours(ALONE_STEPS // 10)
    found = {"ours": ours(ALONE_STEPS)}
    calls = {name: getattr(mujoco, name) for name in MUJOCO_CALLS}
    for name, call in calls.items():
        setattr(mujoco, name, partial(timed, call))
    physics.reset(EpisodeSpec(0))
    inside = 0.0
    for step in range(min(ALONE_STEPS, physics.info.max_episode_steps)):
        physics.step(actions[step % len(actions), :1])
    found["mujoco"] = 1e3 * inside / (step + 1)
    for name, call in calls.items():
        setattr(mujoco, name, call)
    physics.close()
    if given.stock:
        import tests.stock_examples as stock_examples

        stock = getattr(stock_examples, given.stock)(given.task.rpartition("/")[2])
        spent = 0.0
        for step in range(ALONE_STEPS):
            if step % physics.info.max_episode_steps == 0:
                stock.reset()
            action = actions[step % len(actions), 0].astype(np.float64)
            begin = time.process_time()
            stock.step(action)
            spent += time.process_time() - begin
        found["stock"] = 1e3 * spent / ALONE_STEPS
        stock.close()
    return found


@dataclass(frozen=True)
class Peer:
    """A peer that is ready to be measured."""

    side: Any
    run: Callable[[], int]
    equal_work: dict[str, Any]

    def close(self) -> None:
        self.side.close()


def stepped_peer(given: Comparison, farm: FarmSide, actions: np.ndarray) -> Peer:
    side = (EnvPoolSide if given.peer == "envpool" else MjbatchSide)(given, farm.limit)
    return Peer(side, stepper(side, actions), compared(given, farm, side, actions))


def rollout_peer(given: Comparison, farm: FarmSide, actions: np.ndarray) -> Peer:
    side = RolloutSide(given, farm.limit)
    controls = side.controls(actions)
    state = farm.reset()
    for each in actions:
        state, *_ = farm.step(each)
    part = slice(*given.same)
    end = side.episode(controls)[:, 1:].astype(np.float32)  # the time comes first
    difference = float(np.abs(state[:, part] - end[:, part]).max())

    def run() -> int:
        side.episode(controls)
        return farm.limit * given.num_envs

    return Peer(side, run, {"episode_steps": farm.limit, "largest_difference": difference})


def main(given: Comparison) -> None:
    os.sched_setaffinity(0, set(given.cores))
    with closing(FarmSide(given)) as farm:
        drawn = np.random.default_rng(0).uniform(-1, 1, (farm.limit, given.num_envs, farm.action_dim))
        actions = drawn.astype(np.float32)
        with closing((rollout_peer if given.peer == "rollout" else stepped_peer)(given, farm, actions)) as peer:
            run_farm = stepper(farm, actions)
            rates(run_farm, 0.5 * given.seconds), rates(peer.run, 0.5 * given.seconds)
            pairs = [(rates(run_farm, given.seconds), rates(peer.run, given.seconds)) for _ in range(given.rounds)]

    def median(of: Callable[[Rates, Rates], float]) -> float:
        return float(np.median([of(*pair) for pair in pairs]))

    by_cpu = sorted(ours.cpu / theirs.cpu for ours, theirs in pairs)
    result = {
        "env_steps_per_s": median(lambda ours, theirs: ours.wall),
        "peer_env_steps_per_s": median(lambda ours, theirs: theirs.wall),
        "ratio_to_peer": median(lambda ours, theirs: ours.wall / theirs.wall),
        "cpu_ms": 1e3 / median(lambda ours, theirs: ours.cpu),
        "peer_cpu_ms": 1e3 / median(lambda ours, theirs: theirs.cpu),
        "ratio_to_peer_by_cpu_time": median(lambda ours, theirs: ours.cpu / theirs.cpu),
        "ratio_by_cpu_time_least_most": [by_cpu[0], by_cpu[-1]],
        "equal_work": peer.equal_work,
        "cpu_ms_of_one_environment": parts(given, actions),
        "pairs": [[asdict(ours), asdict(theirs)] for ours, theirs in pairs],
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), *(str(ROOT / "examples" / name) for name in EXAMPLES)]
    values = json.loads(sys.argv[1])
    values |= {key: tuple(values[key]) for key in ("same", "cores", "peer_options")}
    main(Comparison(**values))
