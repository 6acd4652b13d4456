"""Running mean and variance of a vector, and the vector normalised with them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from policies.contract import PolicyError

EPS = 1e-8
CLIP = 10.0


class Normalizer(nn.Module):
    """(x - mean) / sqrt(var + 1e-8), clipped to +-10. Until the first `observe`: the identity, clipped alike.

    The statistics are float64 buffers: they are saved with the policy, and after millions of rows a small
    variance around a large mean is still right.
    """

    mean: Tensor
    """[S] float64."""
    var: Tensor
    """[S] float64, of the population (divided by the count)."""
    count: Tensor
    """[] float64, rows seen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[.., S] to float32 [.., S]."""
        return ((x - self.mean) * torch.rsqrt(self.var + EPS)).float().clamp(-CLIP, CLIP)

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Merge the rows of [.., S] into the statistics; how they are split into calls does not matter.

        Formula: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances" (1979). Rows with a non-finite number raise `PolicyError`, since they would stay in the
        statistics for ever.
        """
        x = x.reshape(-1, x.shape[-1]).double()
        if len(x) == 0:
            return
        finite = x.isfinite().all(0)
        if not finite.all():
            columns = (~finite).nonzero().flatten().tolist()
            raise PolicyError(f"observations to normalise are not finite in columns {columns}")
        var, mean = torch.var_mean(x, 0, correction=0)
        total = self.count + len(x)
        delta = mean - self.mean
        within = self.var * self.count + var * len(x)
        between = delta.square() * self.count * len(x) / total
        self.mean += delta * len(x) / total
        self.var.copy_((within + between) / total)
        self.count.copy_(total)
