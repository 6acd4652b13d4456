"""stable-baselines3's PPO on `sim_farm.vector_env`, beside the same PPO on Gymnasium's AsyncVectorEnv, in the same run.

    python benchmarks/sb3_vector_env.py --json benchmarks/results/sb3_vector_env.json

Both learn PushCube-v1 from states, with the same settings and seeds, in turns, until nine tenths of the last hundred
episodes were solved. A solved episode is over, as one that was cut off: its reward is dense, and a policy would avoid
success if nothing came after it. The peer's environments are ManiSkill's own, each in a process of its own, put on
stable-baselines3 by the same adapter as the farm's.
"""

from __future__ import annotations

import os
import time
from collections import deque
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

NUM_ENVS = 8
WINDOW = 100
"""Episodes, over which success is counted."""
TARGET = 0.9
LIMIT_STEPS = 120_000
"""Env steps after which a run is given up."""


@dataclass(frozen=True)
class Arguments:
    """stable-baselines3's PPO on `sim_farm.vector_env`, beside AsyncVectorEnv."""

    seeds: tuple[int, ...] = (1, 2, 3)
    """One run of each per seed."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    seconds: float
    """From the first env step to the target, or to the limit."""
    env_steps: int
    success: float
    """Share of the last `WINDOW` episodes that were solved."""


def farm() -> Any:
    import sim_farm

    return sim_farm.vector_env("maniskill/PushCube-v1", NUM_ENVS, workers=2, autoreset_mode="SameStep")


def own_env() -> Any:
    """One environment of ManiSkill's, as its documentation has it run on the CPU."""
    import gymnasium
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    settings: dict[str, Any] = {"sim_backend": "physx_cpu", "render_backend": "none", "obs_mode": "state"}
    settings |= {"reward_mode": "normalized_dense", "control_mode": "pd_joint_delta_pos"}
    return CPUGymWrapper(gymnasium.make("PushCube-v1", num_envs=1, **settings))


def peer() -> Any:
    from gymnasium.vector import AsyncVectorEnv

    return AsyncVectorEnv([own_env] * NUM_ENVS, context="spawn", autoreset_mode="SameStep")


def learn(envs: Any, seed: int) -> Run:
    """Train until the target."""
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import VecNormalize

    from sim_farm.client.stable_baselines3 import SB3VecEnv

    class SuccessCutsOff(SB3VecEnv):
        def step_wait(self) -> Any:
            observations, rewards, dones, infos = super().step_wait()
            for i in np.flatnonzero(dones).tolist():
                infos[i]["TimeLimit.truncated"] = True
            return observations, rewards, dones, infos

    class UntilTarget(BaseCallback):
        recent: deque[bool] = deque(maxlen=WINDOW)

        def _on_training_start(self) -> None:
            self.recent.clear()
            self.began_s = time.perf_counter()

        def _on_step(self) -> bool:
            for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
                if done:
                    self.recent.append(info["is_success"])
            return len(self.recent) < WINDOW or float(np.mean(self.recent)) < TARGET

    torch.set_num_threads(1)
    callback = UntilTarget()
    model = PPO(
        "MlpPolicy",
        VecNormalize(SuccessCutsOff(envs), norm_reward=False),
        n_steps=128,
        batch_size=256,
        n_epochs=8,
        learning_rate=5e-4,
        gamma=0.8,
        gae_lambda=0.9,
        target_kl=0.1,
        policy_kwargs={"net_arch": [256, 256, 256], "activation_fn": torch.nn.Tanh, "log_std_init": -1.0},
        device="cpu",
        seed=seed,
    )
    model.learn(LIMIT_STEPS, callback=callback)
    return Run(time.perf_counter() - callback.began_s, model.num_timesteps, float(np.mean(callback.recent)))


def main() -> None:
    arguments = tyro.cli(Arguments)
    # One thread for each process, also of the peer: they share the cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    from embodied_bench.settings import show_and_write

    runs: dict[str, list[Run]] = {"vector_env": [], "AsyncVectorEnv": []}
    for seed in arguments.seeds:
        for name, make in {"vector_env": farm, "AsyncVectorEnv": peer}.items():
            with closing(make()) as envs:
                runs[name].append(learn(envs, seed))
            print(f"seed {seed}, {name}: {runs[name][-1]}", flush=True)
    pairs = list(zip(runs["vector_env"], runs["AsyncVectorEnv"], strict=True))
    ratios = {
        "time_ratio_to_peer": float(np.median([ours.seconds / peers.seconds for ours, peers in pairs])),
        "env_steps_ratio_to_peer": float(np.median([ours.env_steps / peers.env_steps for ours, peers in pairs])),
    }
    show_and_write(
        {
            "target": f"{TARGET} of the last {WINDOW} episodes solved",
            **ratios,
            "runs": {name: [asdict(run) for run in each] for name, each in runs.items()},
        },
        arguments.json,
    )


if __name__ == "__main__":
    main()
