"""Flow-SDE: a flow policy's denoising as a stochastic process whose steps have a density, and the sampler built on it.

Time runs from t = 1 (noise) to t = 0 (action) in N equal steps, t_i = 1 - i/N, delta = 1/N, with velocity
v = dx/dt. The ODE step is x - delta v. Flow-SDE (pi-RL, arXiv 2510.25889; Flow-GRPO, arXiv 2505.05470) adds
noise of strength sigma and the score term that keeps the marginals of the process:

    x_{i+1} = x - delta [v + sigma_i^2 / (2 t_i) (x + (1 - t_i) v)] + sigma_i sqrt(delta) z,   z ~ N(0, I)
    sigma_i = noise_level sqrt(t_i / (1 - t_i)),  with t_1 for t_0 in the denominator, where 1 - t_0 = 0

The mean is linear in x and v with weights that depend on the step alone, hence `mean_weights`. All of it is
computed in float64; cast it where it meets the network's numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.layers import checked_noise, gaussian_entropy, gaussian_log_prob


def timesteps(steps: int) -> Tensor:
    """t_0 = 1 .. t_N = 0, float64 [N + 1]."""
    return 1 - torch.arange(steps + 1, dtype=torch.float64) / steps


def sigmas(steps: int, noise_level: float) -> Tensor:
    """Noise strength sigma_i of each step, float64 [N]."""
    t = timesteps(steps)
    denominator = 1 - t[:-1]
    denominator[0] = 1 - t[1]
    return noise_level * torch.sqrt(t[:-1] / denominator)


def stds(steps: int, noise_level: float) -> Tensor:
    """Standard deviation s_i = sigma_i sqrt(delta) of each step's result, float64 [N]."""
    return sigmas(steps, noise_level) * steps**-0.5


def mean_weights(steps: int, noise_level: float) -> tuple[Tensor, Tensor]:
    """The weights (of x, of v), each float64 [N], with which step i has the mean w_x x + w_v v.

    At noise level 0 they are (1, -delta): the ODE.
    """
    t, sigma = timesteps(steps)[:-1], sigmas(steps, noise_level)
    score = sigma**2 / (2 * t)
    return 1 - score / steps, -(1 + score * (1 - t)) / steps


# --- the sampler of every flow policy: from noise to actions in N steps, some of which are drawn and scored

PICKING, REDUCTIONS = ("one", "any"), ("sum", "mean")
SCORED = (*PICKING, "all", "learned")
VARIANCE_EPS = 1e-4
"""Added to a step's variance where velocities are contrasted (pi-StepNFT's code)."""


@dataclass(frozen=True)
class Field:
    """Prediction of the network for a partly denoised chunk."""

    v: Tensor
    """[.., D] velocity."""
    log_std: Tensor | None = None
    """[.., D] of a drawn step's result, where it is learned."""


def stacked(fields: Sequence[Field]) -> Field:
    """[B, K, D] of K times [B, D]."""
    spreads = [field.log_std for field in fields if field.log_std is not None]
    return Field(torch.stack([field.v for field in fields], 1), torch.stack(spreads, 1) if spreads else None)


@dataclass(frozen=True)
class Draws:
    """A row's noise, and what it decides."""

    x: Tensor
    """[B, D] starting point x^(0) of the denoising."""
    z: Tensor
    """[B, 1 or N, D]: of the drawn steps."""
    step: Tensor
    """int64 [B, K]: the scored steps."""
    drawn: Tensor
    """bool [B, N]."""


class Denoising(nn.Module):
    """The steps of an integration. Has no weights."""

    transitions: Tensor
    """[N, 3]: of a step by flow-SDE the mean's weights of x and of v, and the standard deviation."""
    ode: Tensor
    """[3]: the same of an ODE step."""
    times: Tensor
    """[N]: at which each step begins, from 1, the noise. Acting and scoring read the same numbers: an
    embedding of time tells 1e-7 apart."""
    executed: Tensor | None

    def __init__(
        self,
        size: int,
        steps: int,
        noise_level: float,
        scored: str = "one",
        reduction: str = "sum",
        executed: Sequence[int] | None = None,
        start_noise: float = 1.0,
    ) -> None:
        """`size` is D, `steps` N, `start_noise` the standard deviation of x^(0). Raises `PolicyError`."""
        super().__init__()
        if steps < 1 or noise_level <= 0:
            raise PolicyError(f"a flow policy needs steps >= 1 and noise_level > 0, got {steps}, {noise_level}")
        if not 0 <= start_noise <= 1:
            raise PolicyError(f"a flow policy needs 0 <= start_noise <= 1, got {start_noise}")
        if scored not in SCORED or reduction not in REDUCTIONS:
            raise PolicyError(
                f"the scored steps must be {', '.join(SCORED)} and their reduction {', '.join(REDUCTIONS)}, got "
                f"{scored!r}, {reduction!r}"
            )
        self.size, self.steps, self.scored, self.start_noise = size, steps, scored, start_noise
        self.divisor = 1 if reduction == "sum" or self.picks else steps + 1
        table = [*mean_weights(steps, noise_level), stds(steps, noise_level)]
        transitions, ode = torch.stack(table, -1).float(), torch.tensor([1.0, -1.0 / steps, 0.0])
        if scored == "learned":
            transitions = ode.expand(steps, 3).clone()
        self.register_buffer("ode", ode, persistent=False)
        self.register_buffer("transitions", transitions, persistent=False)
        self.register_buffer("times", timesteps(steps)[:-1].float(), persistent=False)
        kept = None if executed is None else torch.tensor(executed)
        self.register_buffer("executed", kept, persistent=False)

    @property
    def picks(self) -> bool:
        """True if one step is scored."""
        return self.scored in PICKING

    @property
    def noise_dim(self) -> int:
        """Length of a row's noise: D numbers for x^(0), D for each drawn step (one, or all N), and one more that picks
        the step if only one is scored."""
        return self.size * (1 + (1 if self.scored == "one" else self.steps)) + self.picks

    def draws(self, noise: Tensor | None, rows: int) -> Draws:
        """None: the ODE from x^(0) = 0, scored as if its first step, or all of them, had been drawn."""
        every = torch.arange(self.steps, device=self.times.device).expand(rows, self.steps)
        if noise is None:
            x = torch.zeros(rows, self.size, device=self.times.device)
            step = every[:, :1] if self.picks else every
            return Draws(x, x[:, None], step, torch.zeros_like(every, dtype=torch.bool))
        noise = checked_noise(noise, self.noise_dim)
        x = self.start_noise * noise[:, : self.size]
        z = noise[:, self.size : -1 if self.picks else None].reshape(rows, -1, self.size)
        step = self.step_of(noise) if self.picks else every
        drawn = every == step if self.scored == "one" else torch.ones_like(every, dtype=torch.bool)
        return Draws(x, z, step, drawn)

    def uniform_of(self, noise: Tensor) -> Tensor:
        """float64 [B, 1] in 0..1, from the noise's last number."""
        return torch.special.ndtr(noise[:, -1:].double())

    def step_of(self, noise: Tensor) -> Tensor:
        """int64 [B, 1], uniform in 0..N-1, from the noise's last number."""
        return (self.uniform_of(noise) * self.steps).long().clamp_(max=self.steps - 1)

    def run(self, draws: Draws, field: Callable[[Tensor, int], Field]) -> tuple[Tensor, dict[str, Tensor], Field]:
        """The chunk [B, D]; the trace: `x` [B, K, D], `x_next` and `v` [B, K, E] float32, `step` int64 [B, K]; and what
        the network said at the scored steps."""
        weight_x, weight_v, std = torch.where(draws.drawn[..., None], self.transitions, self.ode).split(1, -1)
        shock = std * draws.z
        x, states, fields = draws.x, [draws.x], []
        for i in range(self.steps):
            found = field(x, i)
            mean = weight_x[:, i] * x + weight_v[:, i] * found.v
            if found.log_std is None:
                x = mean + shock[:, i]
            else:
                z = draws.z[:, i if draws.z.shape[1] > 1 else 0]
                x = torch.where(draws.drawn[:, i : i + 1], mean + found.log_std.exp() * z, mean)
            states.append(x)
            fields.append(found)
        row, state = torch.arange(len(x), device=x.device)[:, None], torch.stack(states, 1)
        after = state[row, draws.step + 1]
        said = stacked(fields)
        spread = None if said.log_std is None else said.log_std[row, draws.step]
        field_there = Field(said.v[row, draws.step], spread)
        trace = {"x": state[row, draws.step], "x_next": self._kept(after), "step": draws.step}
        return x, trace | {"v": self._kept(field_there.v)}, field_there

    def log_prob(self, trace: Mapping[str, Tensor], field: Field) -> Tensor:
        """[B, E] under what the network says of `trace["x"]`."""
        weight_x, weight_v, std = self.transitions[trace["step"]].split(1, -1)
        mean = self._kept(weight_x * trace["x"] + weight_v * field.v)
        log_std = std.log() if field.log_std is None else self._kept(field.log_std)
        return gaussian_log_prob(trace["x_next"], mean, log_std).sum(1) / self.divisor

    def contrast(self, trace: Mapping[str, Tensor], field: Field) -> tuple[Tensor, Tensor]:
        """[B, E] each, of the one scored step: how far the velocity is from that of the trace, and how far that moves
        the mean towards what was drawn, in the step's variance (`Contrast`)."""
        assert self.picks, "velocities of several steps do not add up"
        weight_x, weight_v, std = self.transitions[trace["step"]].split(1, -1)
        drift = self._kept(field.v) - trace["v"]
        missed = trace["x_next"] - (self._kept(weight_x * trace["x"]) + weight_v * trace["v"])
        pull = missed * weight_v * drift / (std.square() + VARIANCE_EPS)
        return drift[:, 0], pull[:, 0]

    def entropy(self, field: Field, log_prob: Tensor) -> Tensor:
        """[B, E], reduced as log-probs are: 0 where the standard deviation is not learned, constant that it is."""
        if field.log_std is None:
            return torch.zeros_like(log_prob)
        return gaussian_entropy(self._kept(field.log_std)).sum(1) / self.divisor

    def _kept(self, x: Tensor) -> Tensor:
        """[.., E] of [.., D]."""
        return x if self.executed is None else x[..., self.executed]
