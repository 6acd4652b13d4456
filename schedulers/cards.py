"""Accelerator cards by their published rates, and the roofline: the least seconds that a computation takes on one."""

from __future__ import annotations

from dataclasses import dataclass

from schedulers.errors import PlanError, nearest

EFFICIENCY, UPDATE_EFFICIENCY = 0.4, 0.25
"""Share of a card's rate that a large network's decisions, and its updates, reach as far as nothing was measured. On an
H200, 128 rows of OpenVLA, OpenVLA-OFT and pi0 decide at 0.42, 0.48 and 0.37, and OpenVLA's LoRA update has 0.25 to 0.27
(benchmarks/results/gpu.json)."""


@dataclass(frozen=True)
class Card:
    """A card's published rates."""

    name: str
    flops_per_s: float
    """Matrix products in BF16, without sparsity, sums in FP32."""
    bytes_per_s: float
    """Bandwidth of its memory."""

    def seconds(self, flops: float, nbytes: float, efficiency: float = EFFICIENCY) -> float:
        """Seconds of one computation that reads `nbytes`, by the roofline (Williams et al. 2009): the longer of
        arithmetic, at a share of the rate, and of memory traffic. The time for launching kernels is not counted."""
        return max(flops / (self.flops_per_s * efficiency), nbytes / self.bytes_per_s)


# NVIDIA's data sheets; where they give the rate with sparsity, half of it.
CARDS = {
    card.name: card
    for card in (
        Card("H100", 989.4e12, 3.35e12),  # H100 Tensor Core GPU, SXM, 80 GB: 1,979 TFLOPS with sparsity
        Card("H200", 989.4e12, 4.8e12),  # H200 Tensor Core GPU, SXM, 141 GB: the H100's chip, faster memory
        Card("A100", 312e12, 2.039e12),  # A100 Tensor Core GPU, SXM, 80 GB: 312 TFLOPS dense, 624 with sparsity
        Card("L40S", 362.05e12, 864e9),  # L40S: 362.05 TFLOPS dense, 733 with sparsity
        Card("RTX 4090", 165.2e12, 1.008e12),  # Ada architecture, appendix A: 165.2 TFLOPS dense, 330.4 with sparsity
    )
}


def find_card(name: str) -> Card:
    """The card of this name. Raises `PlanError` for one that is not in `CARDS`."""
    if name not in CARDS:
        raise PlanError(f"there are no published rates of a card {name!r}{nearest(name, CARDS)}")
    return CARDS[name]
