"""Stage `graph`: what a CUDA graph would save pi0's decisions: launching their thousands of kernels.

From the observation to the chunk, prefix and denoising are recorded once and replayed; preprocessing is left out of
both. The pictures' and the noise's place in memory stays.
"""

from __future__ import annotations

from statistics import median

import torch
from torch import Tensor

from benchmarks.gpu_stages.work import Figures, Work
from embodied.bench.machine import repeat
from embodied.bench.measured_policy import build, make_inputs
from embodied.bench.settings import BenchPolicy
from policies.pi0.policy import Pi0

BATCHES, SECONDS = (1, 8, 32), 0.5
BATCHES_TINY, SECONDS_TINY = (1,), 0.05


@torch.no_grad()
def graph(work: Work) -> Figures:
    """Seconds of each batch with and without, and whether the chunks are equal."""
    policy = build(BenchPolicy(model=work.variant + "-tiny" * work.tiny, random_weights=True, device=work.device))
    assert isinstance(policy, Pi0)
    found: Figures = {"batches": []}
    for batch in BATCHES_TINY if work.tiny else BATCHES:
        found["batches"].append({"batch": batch} | _measure(policy, batch, work))
        work.keep(found)
    return found


def _measure(policy: Pi0, batch: int, work: Work) -> Figures:
    device, seconds = torch.device(work.device), SECONDS_TINY if work.tiny else SECONDS
    inputs = make_inputs(policy, batch, 0, device)
    noise = torch.randn(batch, policy.noise_dim, generator=torch.Generator().manual_seed(0)).to(device)
    seen, draws = policy._observation(inputs), policy.denoising.draws(noise, batch)
    times = policy.denoising.times.expand(batch, -1)

    def decide() -> Tensor:
        prefix = policy.network.prefix(seen)
        return policy.denoising.run(draws, lambda x, i: policy._field(prefix, seen.state, x, times[:, i]))[0]

    eager = decide().clone()
    found: Figures = {
        "act_s": median(repeat(lambda: policy.act(inputs, noise), device, seconds)),
        "observation_s": median(repeat(lambda: policy._observation(inputs), device, seconds)),
        "eager_s": median(repeat(decide, device, seconds)),
    }
    if work.tiny:
        return found
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            decide()
    torch.cuda.current_stream().wait_stream(stream)
    recorded = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_reserved()
    with torch.cuda.graph(recorded):
        chunk = decide()
    found["graph_s"] = median(repeat(recorded.replay, device, seconds))
    found["ratio"] = found["eager_s"] / found["graph_s"]
    found["graph_bytes"] = torch.cuda.memory_reserved() - before
    found["equal"] = bool(torch.equal(chunk, eager))
    found["largest_difference"] = float((chunk - eager).abs().max())
    return found
