"""stable-baselines3's PPO on the farm: two worker processes run its environments.

    python examples/sb3_ppo.py

Prints stable-baselines3's own table, then the success of the last hundred training episodes.
"""

from __future__ import annotations

import numpy as np
import torch
from stable_baselines3 import PPO

import sim_farm


def main(steps: int = 10_000) -> float:
    torch.set_num_threads(1)  # the network is small, and the workers need the cores
    envs = sim_farm.sb3_vec_env("tabletop/reach", 8, workers=2)  # any task; cameras=1 goes with MultiInputPolicy
    model = PPO(
        "MlpPolicy",
        envs,
        n_steps=64,
        batch_size=128,
        n_epochs=8,
        learning_rate=1e-3,
        gamma=0.9,
        gae_lambda=0.9,
        policy_kwargs={"log_std_init": -1.0},
        device="cpu",
        seed=0,
        verbose=1,
    )
    model.learn(steps)
    envs.close()
    success = float(np.mean(list(model.ep_success_buffer or [0.0])))
    print(f"success {success:.0%} of the last {len(model.ep_success_buffer or [])} episodes")
    return success


if __name__ == "__main__":
    main()
