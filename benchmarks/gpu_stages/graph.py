"""Stage `graph`: decisions replayed as a CUDA graph (`policies.cuda_graphs`), beside kernels launched one by one.

Both are whole decisions, preprocessing included, from the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu_stages.work import Figures, Work
from embodied_bench.machine import repeat
from embodied_bench.measured_policy import build, make_inputs
from embodied_bench.settings import BenchPolicy
from policies.contract import Action, Inputs, Policy
from policies.cuda_graphs import one_by_one

BATCHES, SECONDS = (1, 8, 64), 0.4
BATCHES_TINY, SECONDS_TINY = (1,), 0.05


def graph(work: Work) -> Figures:
    """Seconds of each batch with and without, whether the decisions are equal to the last bit, and whether those
    launched one by one are equal to themselves when they are made again."""
    policy = build(BenchPolicy(model=work.model, random_weights=True, device=work.device))
    found: Figures = {"batches": []}
    for batch in BATCHES_TINY if work.tiny else BATCHES:
        found["batches"].append({"batch": batch} | _measure(policy, batch, work))
        work.keep(found)
    return found


def _measure(policy: Policy, batch: int, work: Work) -> Figures:
    device, seconds = torch.device(work.device), SECONDS_TINY if work.tiny else SECONDS
    several = [make_inputs(policy, batch, seed, device) for seed in (0, 1)]
    noise = torch.randn(batch, policy.noise_dim, generator=torch.Generator().manual_seed(0)).to(device)

    def act(inputs: Inputs = several[0]) -> Action:
        return policy.act(inputs, noise)

    with one_by_one():
        expected, again = ([act(inputs) for inputs in several] for _ in range(2))
        found: Figures = {"eager_s": median(repeat(act, device, seconds))}
    found["repeatable"] = _difference(expected, again) == 0
    if work.tiny:
        return found
    torch.cuda.empty_cache()  # as recording does
    before = torch.cuda.memory_reserved()
    found["first_s"] = repeat(act, device, 0)[0]
    torch.cuda.empty_cache()
    found["graph_bytes"] = torch.cuda.memory_reserved() - before
    found["largest_difference"] = _difference(expected, [act(inputs) for inputs in several])
    found["equal"] = found["largest_difference"] == 0
    found["graph_s"] = median(repeat(act, device, seconds))
    found["ratio"] = found["eager_s"] / found["graph_s"]
    return found


def _difference(first: Sequence[Action], second: Sequence[Action]) -> float:
    """Largest difference of two numbers in the same place."""
    pairs = [(a, b) for old, new in zip(first, second, strict=True) for a, b in zip(_all(old), _all(new), strict=True)]
    return max(float((a.double() - b.double()).abs().max()) for a, b in pairs)


def _all(action: Action) -> list[Tensor]:
    return [action.chunk, action.log_prob, action.value, *action.trace.values()]
