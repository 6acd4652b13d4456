"""Stage `graph`: decisions replayed as a CUDA graph (`policies.cuda_graphs`), beside kernels launched one by one.

Both are whole decisions, preprocessing included, from the same noise.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu_stages.work import Figures, Work
from embodied.bench.machine import repeat
from embodied.bench.measured_policy import build, make_inputs
from embodied.bench.settings import BenchPolicy
from policies.contract import Action, Inputs, Policy
from policies.cuda_graphs import forget

BATCHES, SECONDS = (1, 8, 64), 0.4
BATCHES_TINY, SECONDS_TINY = (1,), 0.05


def graph(work: Work) -> Figures:
    """Seconds of each batch with and without, and whether the decisions are equal to the last bit."""
    policy = build(BenchPolicy(model=work.model, random_weights=True, device=work.device))
    found: Figures = {"batches": []}
    for batch in BATCHES_TINY if work.tiny else BATCHES:
        found["batches"].append({"batch": batch} | _measure(policy, batch, work))
        work.keep(found)
    return found


def _measure(policy: Policy, batch: int, work: Work) -> Figures:
    device, seconds = torch.device(work.device), SECONDS_TINY if work.tiny else SECONDS
    one, other = (make_inputs(policy, batch, seed, device) for seed in (0, 1))
    noise = torch.randn(batch, policy.noise_dim, generator=torch.Generator().manual_seed(0)).to(device)

    def eager(inputs: Inputs = one) -> Action:
        forget(policy)  # of what has no recording the first call runs as it is
        return policy.act(inputs, noise)

    expected = [eager(inputs) for inputs in (one, other)]
    found: Figures = {"eager_s": median(repeat(eager, device, seconds))}
    if work.tiny:
        return found
    before = torch.cuda.memory_reserved()
    for _ in range(2):
        policy.act(one, noise)
    found["graph_bytes"] = torch.cuda.memory_reserved() - before
    given = [policy.act(inputs, noise) for inputs in (one, other)]
    pairs = [
        (a, b) for old, new in zip(expected, given, strict=True) for a, b in zip(_all(old), _all(new), strict=True)
    ]
    found["equal"] = all(torch.equal(a, b) for a, b in pairs)
    found["largest_difference"] = max(float((a.double() - b.double()).abs().max()) for a, b in pairs)
    found["graph_s"] = median(repeat(lambda: policy.act(one, noise), device, seconds))
    found["ratio"] = found["eager_s"] / found["graph_s"]
    return found


def _all(action: Action) -> list[Tensor]:
    return [action.chunk, action.log_prob, action.value, *action.trace.values()]
