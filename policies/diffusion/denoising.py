"""Denoising as a chain of normal distributions, which reinforcement learning scores (DPPO, arXiv 2409.00588).

From x_T, which is noise, N steps come to the actions x_0. Each has a mean that the network's prediction gives, by DDPM
(arXiv 2006.11239, formula 7) or DDIM (arXiv 2010.02502, formula 12, eta 0), and a deviation s:

    clean = (x - sqrt(1 - a_t) e) / sqrt(a_t), clipped          e: the predicted noise; or clean is predicted itself
    DDPM  x' = sqrt(a_t') b / (1 - a_t) clean + sqrt(1 - b) (1 - a_t') / (1 - a_t) x + s z,     b = 1 - a_t / a_t'
    DDIM  x' = sqrt(a_t') clean + sqrt(1 - a_t') e + s z

The times t, the products a_t and DDPM's deviations are diffusers' own. To explore, s is at least a number that does not
depend on the step, and scores have such a bound of their own.

B rows, T actions of A numbers, N steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.diffusion.config import DiffusionConfig, Sampler


@dataclass(frozen=True)
class Exploration:
    """Settings of reinforcement learning: which denoising steps are scored, and how far they deviate."""

    trained_steps: int
    """Number of the last steps that are scored, each as likely as the next but for the discount; 0: all."""
    least_sampled_std: float
    """Smallest deviation of a step when actions are drawn."""
    least_scored_std: float
    """Smallest deviation of a step in log-probs."""
    discount: float
    """Each step before the last is scored as many times less often."""


class Denoising(nn.Module):
    """The steps from noise to actions. Has no weights."""

    weights: Tensor
    """[N, 5]: sqrt(a_t) and sqrt(1 - a_t), and the mean's weights of clean actions, of x and of predicted noise."""
    deviations: Tensor
    """[N] of the drawn steps."""
    log_scored: Tensor
    """[N] logarithms of the deviations in log-probs."""
    times: Tensor
    """[N] int64 t of each step."""
    levels: Tensor
    """[num_train_timesteps, 2]: sqrt(a_t) and sqrt(1 - a_t) of every t."""
    chances: Tensor
    """[trained_steps] float64, ascending to 1: sums of the probabilities with which steps are scored."""

    def __init__(self, config: DiffusionConfig, sampler: Sampler, steps: int, exploration: Exploration) -> None:
        """Raises `PolicyError` where a schedule leaves no signal, and for more steps than there are."""
        super().__init__()
        if steps > config.num_train_timesteps:
            raise PolicyError(
                f"num_inference_steps is {steps}, and at most the {config.num_train_timesteps} steps of the training "
                "are taken: set policy.options.num_inference_steps to fewer"
            )
        scheduler = make_scheduler(config, sampler)
        scheduler.set_timesteps(steps)
        self.steps = len(scheduler.timesteps)
        self.trained = exploration.trained_steps or self.steps
        if self.trained > self.steps:
            raise PolicyError(f"trained_steps is {self.trained}, and there are {self.steps} denoising steps")
        self.predicts_noise = config.prediction_type == "epsilon"
        self.clip = config.clip_sample_range if config.clip_sample else None
        products = scheduler.alphas_cumprod
        table, deviations = [], []
        for t in scheduler.timesteps.tolist():
            before = t - config.num_train_timesteps // steps
            product = products[t]
            ahead = products[before] if before >= 0 else torch.ones(())
            if sampler == "DDPM":
                rest = product / ahead
                mean = (ahead**0.5 * (1 - rest) / (1 - product), rest**0.5 * (1 - ahead) / (1 - product), 0.0)
                deviations.append(float(scheduler._get_variance(t) ** 0.5) if t > 0 else 0.0)
            else:
                mean = (ahead**0.5, 0.0, (1 - ahead) ** 0.5)
                deviations.append(0.0)
            table.append([product**0.5, (1 - product) ** 0.5, *mean])
        weights, own = torch.tensor(table), torch.tensor(deviations)
        levels = torch.stack([products**0.5, (1 - products) ** 0.5], 1)
        if not weights.isfinite().all() or not (levels > 0).all():
            raise PolicyError(
                f"beta_schedule {config.beta_schedule} from {config.beta_start} to {config.beta_end} in "
                f"{config.num_train_timesteps} steps leaves no signal, or no noise: take the schedule of the training"
            )
        later = torch.arange(self.trained - 1, -1, -1, dtype=torch.float64)
        chances = (exploration.discount**later).cumsum(0)
        for name, tensor in {
            "weights": weights,
            "deviations": own.clamp(min=exploration.least_sampled_std),
            "log_scored": own.clamp(min=exploration.least_scored_std).log(),
            "times": scheduler.timesteps.clone(),
            "levels": levels,
            "chances": chances / chances[-1],
        }.items():
            self.register_buffer(name, tensor, persistent=False)

    def step_of(self, uniform: Tensor) -> Tensor:
        """int64 [B]: the scored steps that numbers [B] float64 in 0..1 pick."""
        later = (uniform[:, None] >= self.chances).sum(1).clamp(max=self.trained - 1)
        return self.steps - self.trained + later

    def time_of(self, uniform: Tensor) -> Tensor:
        """int64 [B]: times of the training that numbers [B] float64 in 0..1 pick, each as likely as the next."""
        return (uniform * len(self.levels)).long().clamp(max=len(self.levels) - 1)

    def noisy(self, actions: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """[B, T, A]: actions with as much noise as there is at the times [B]."""
        signal, spread = self.levels[time][..., None, None].unbind(1)
        return signal * actions + spread * noise

    def mean(self, x: Tensor, predicted: Tensor, step: int | Tensor) -> Tensor:
        """[B, T, A] of x [B, T, A] and what the network predicts of it, in one step or in the steps [B]."""
        signal, spread, of_clean, of_x, of_noise = self.weights[step][..., None, None].unbind(-3)
        if self.predicts_noise:
            clean, noise = (x - spread * predicted) / signal, predicted
        else:
            clean, noise = predicted, (x - signal * predicted) / spread
        if self.clip is not None:
            clean = clean.clamp(-self.clip, self.clip)
        return of_clean * clean + of_x * x + of_noise * noise


def make_scheduler(config: DiffusionConfig, sampler: Sampler) -> Any:
    """The scheduler of diffusers that LeRobot makes. Raises `PolicyError` where diffusers is missing."""
    try:
        from diffusers.schedulers.scheduling_ddim import DDIMScheduler
        from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
    except ImportError as error:
        raise PolicyError(f"diffusion needs diffusers: pip install 'embodied-farm[vla]' ({error})") from error

    return {"DDPM": DDPMScheduler, "DDIM": DDIMScheduler}[sampler](
        num_train_timesteps=config.num_train_timesteps,
        beta_start=config.beta_start,
        beta_end=config.beta_end,
        beta_schedule=config.beta_schedule,
        clip_sample=config.clip_sample,
        clip_sample_range=config.clip_sample_range,
        prediction_type=config.prediction_type,
    )
