"""Time to 0.9 success on PushCube-v1, from states or pixels: this project beside stable-baselines3, in the same run.

    python benchmarks/time_to_success.py --seeds 1 2 3 --json benchmarks/results/time_to_success.json
    python benchmarks/time_to_success.py --config pushcube_rgb --seeds 1 --json FILE

Both train until the mean success of the last 100 training episodes is 0.9, on the same cores, in turn, seed
by seed. Success ends an episode and counts as a truncation (its value is bootstrapped). Start-up (processes,
simulators) is reported apart. The peer is well tuned: 8 processes, 3 x 256 tanh, rollout 128, minibatch 256,
8 epochs, learning rate 5e-4, gamma 0.8, lambda 0.9, target KL 0.1, initial log-std -1, observations normalised.

From pixels both see one 128 x 128 camera and the robot's joints. The peer's policy is stable-baselines3's own for
pictures and vectors (`MultiInputPolicy`, the convolutions of Mnih et al. 2015), with the same settings but a learning
rate of 3e-4. It is stopped at twice our time; what it had come to is recorded.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tyro

TARGET = 0.9
WINDOW = 100
LIMIT_STEPS = 200_000


@dataclass(frozen=True)
class Arguments:
    """Time to 0.9 success on PushCube-v1, beside stable-baselines3."""

    seeds: tuple[int, ...] = (1, 2, 3)
    """One training of each for every seed."""
    config: Literal["pushcube", "pushcube_rgb"] = "pushcube"
    """From states, or from pixels."""
    json: Path | None = None
    """Write the result to this file."""
    peer_seed: int | None = None
    """Used by the benchmark itself: train the peer once with this seed and print its result."""
    peer_limit_s: float = float("inf")
    """Used by the benchmark itself: when to stop the peer."""

    @property
    def pixels(self) -> bool:
        return self.config == "pushcube_rgb"


def train_ours(config: str, seed: int) -> dict[str, float]:
    """`embodied train` until 0.9, or for as many iterations as the configuration says."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = ["embodied", "train", config, "--seed", str(seed), "--stop-at", str(TARGET)]
        command += ["--runs-dir", folder, "--json", str(result), "--eval.episodes", "100", "--eval.videos", "0"]
        subprocess.run([str(Path(sys.executable).parent / command[0]), *command[1:]], check=True)
        found = json.loads(result.read_text())
    keys = {"time_to_target_s": f"success_{TARGET}_wall_s", "env_steps": f"success_{TARGET}_env_steps"}
    return {
        **{name: found.get(key, float("inf")) for name, key in keys.items()},
        "startup_s": found["startup_s"],
        "training_s": found["env_steps"] / found["env_steps_per_s"],
        "eval_success_rate": found["success_rate"],
    }


def train_peer(config: str, seed: int, limit_s: float) -> dict[str, float]:
    """The peer in a process of its own, so that neither sees the other's threads."""
    command = [sys.executable, __file__, "--config", config, "--peer-seed", str(seed), "--peer-limit-s", str(limit_s)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return json.loads(next(line for line in output.splitlines() if line.startswith('{"time_to_target_s"')))


def _peer_env(seed: int, pixels: bool) -> Any:
    import gymnasium as gym
    import mani_skill.envs  # noqa: F401  (registers the tasks)
    import torch
    from mani_skill.utils.wrappers.gymnasium import CPUGymWrapper

    torch.set_num_threads(1)
    env = gym.make(
        "PushCube-v1",
        num_envs=1,
        sim_backend="physx_cpu",
        render_backend="cpu" if pixels else "none",
        obs_mode="rgb" if pixels else "state",
        reward_mode="normalized_dense",
        control_mode="pd_joint_delta_pos",
        sensor_configs={"width": 128, "height": 128},
    )

    class SuccessTruncates(gym.Wrapper):
        def step(self, action: Any) -> Any:
            obs, reward, terminated, truncated, info = super().step(action)
            info["is_success"] = bool(info["success"])
            return obs, float(reward), False, bool(terminated or truncated), info

    class PictureAndJoints(gym.ObservationWrapper):
        """What our policy sees."""

        def __init__(self, env: gym.Env) -> None:
            super().__init__(env)
            first = self.observation(env.reset()[0])
            self.observation_space = gym.spaces.Dict(
                picture=gym.spaces.Box(0, 255, first["picture"].shape, np.uint8),
                joints=gym.spaces.Box(-np.inf, np.inf, first["joints"].shape, np.float32),
            )

        def observation(self, observation: Any) -> dict[str, np.ndarray]:
            joints = np.concatenate([np.ravel(part) for part in observation["agent"].values()])
            (camera,) = observation["sensor_data"].values()
            return {"picture": camera["rgb"], "joints": joints.astype(np.float32)}

    wrapped: gym.Env = SuccessTruncates(CPUGymWrapper(env))
    wrapped = PictureAndJoints(wrapped) if pixels else wrapped
    wrapped.reset(seed=seed)
    return wrapped


def run_peer(seed: int, pixels: bool, limit_s: float) -> dict[str, float]:
    """Train stable-baselines3's PPO until the target, or for so long."""
    from functools import partial

    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import SubprocVecEnv, VecNormalize
    from torch import nn

    class UntilTarget(BaseCallback):
        recent: deque[bool] = deque(maxlen=WINDOW)
        reached_s = float("inf")
        began_s = 0.0

        def _on_training_start(self) -> None:
            self.began_s = time.perf_counter()

        def _on_step(self) -> bool:
            for done, info in zip(self.locals["dones"], self.locals["infos"], strict=True):
                if done:
                    self.recent.append(info["is_success"])
            elapsed = time.perf_counter() - self.began_s
            if len(self.recent) == WINDOW and np.mean(self.recent) >= TARGET:
                self.reached_s = elapsed
                return False
            return elapsed < limit_s

    begin = time.perf_counter()
    envs = SubprocVecEnv([partial(_peer_env, 1000 * seed + i, pixels) for i in range(8)], start_method="spawn")
    normalised = VecNormalize(envs, norm_reward=False, norm_obs_keys=["joints"] if pixels else None)
    model = PPO(
        "MultiInputPolicy" if pixels else "MlpPolicy",
        normalised,
        seed=seed,
        n_steps=128,
        batch_size=256,
        n_epochs=8,
        learning_rate=3e-4 if pixels else 5e-4,
        gamma=0.8,
        gae_lambda=0.9,
        target_kl=0.1,
        policy_kwargs={"net_arch": [256, 256, 256], "activation_fn": nn.Tanh, "log_std_init": -1.0},
        device="cpu",
    )
    startup_s = time.perf_counter() - begin
    callback = UntilTarget()
    model.learn(LIMIT_STEPS, callback=callback)
    training_s = time.perf_counter() - callback.began_s
    envs.close()
    return {
        "time_to_target_s": callback.reached_s,
        "env_steps": model.num_timesteps,
        "startup_s": startup_s,
        "training_s": training_s,
        "recent_success": float(np.mean(callback.recent)),
    }


def _finite(run: dict[str, float]) -> dict[str, float | None]:
    """What was not reached is null: JSON knows no infinity."""
    return {key: number if np.isfinite(number) else None for key, number in run.items()}


def main() -> None:
    arguments = tyro.cli(Arguments)
    if arguments.peer_seed is not None:
        found = run_peer(arguments.peer_seed, arguments.pixels, arguments.peer_limit_s)
        print(json.dumps(found), flush=True)
        return
    from embodied_bench.settings import show_and_write

    ours, peer = [], []
    for seed in arguments.seeds:
        ours.append(train_ours(arguments.config, seed))
        limit_s = 2 * ours[-1]["training_s"] if arguments.pixels else float("inf")
        peer.append(train_peer(arguments.config, seed, limit_s))
        print(f"seed {seed}: ours {ours[-1]}, peer {peer[-1]}", flush=True)
    ours_s, peer_s = (float(np.median([run["time_to_target_s"] for run in runs])) for runs in (ours, peer))
    reached = np.isfinite([ours_s, peer_s])
    figures = {
        "target": f"{TARGET} success over the last {WINDOW} training episodes",
        "config": arguments.config,
        "time_to_target_s": ours_s if reached[0] else None,
        "peer": "stable-baselines3 PPO, 8 processes",
        "peer_time_to_target_s": peer_s if reached[1] else None,
        "ratio_to_peer": ours_s / peer_s if reached.all() else None,
        "runs": {"ours": [_finite(run) for run in ours], "peer": [_finite(run) for run in peer]},
    }
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main()
