"""Stage `offload`: a policy leaves the GPU's memory and comes back, as at a context switch of a collocated plan.

The limit is bytes over the bandwidth that is measured in the same process: of copies between the GPU and pinned memory
of the host; on a CPU, where what leaves goes to a file, of a file.
"""

from __future__ import annotations

from statistics import median

import torch

from benchmarks.gpu_stages.bandwidth import between_host_and_device, through_file
from benchmarks.gpu_stages.work import Figures, Work
from embodied.devices import device_of
from embodied.learning.offload import Offload
from embodied_bench.measured_policy import build
from embodied_bench.settings import BenchPolicy
from policies.contract import Policy

ROUNDS = 3
PIECE = 2**30
"""Bytes of a copy that bandwidth is measured with; on a CPU as many as the policy has."""


def offload(work: Work) -> Figures:
    """Seconds out and back. The first round also takes the host's memory, which is kept for the next ones."""
    policy = build(BenchPolicy(model=work.model, random_weights=True, device=work.device))
    before = {name: tensor.detach().flatten()[:64].to("cpu", copy=True) for name, tensor in policy.named_parameters()}
    rounds = [_round(policy, work) for _ in range(ROUNDS)]
    same = all(torch.equal(tensor.flatten()[:64].cpu(), before[name]) for name, tensor in policy.named_parameters())
    nbytes = int(rounds[0]["bytes"])
    out_limit, back_limit = _limits(work, device_of(policy), nbytes)
    out, back = (median([one[name] for one in rounds[1:]]) for name in ("unload_s", "load_s"))
    return {
        "bytes": nbytes,
        "parameters": sum(p.numel() for p in policy.parameters()),
        "equal_after": same,
        "unload_s": out,
        "load_s": back,
        "first_unload_s": rounds[0]["unload_s"],
        "left_on_device_bytes": rounds[0]["left_bytes"],
        "limit_unload_s": nbytes / out_limit,
        "limit_load_s": nbytes / back_limit,
        "unload_share_of_limit": nbytes / out_limit / out,
        "load_share_of_limit": nbytes / back_limit / back,
        "to_host_bytes_per_s": out_limit,
        "to_device_bytes_per_s": back_limit,
        "rounds": rounds,
    }


def _round(policy: Policy, work: Work) -> dict[str, float]:
    leaving = Offload(work.scratch / "spill.safetensors", policy, None)
    out = leaving.unload()
    left = torch.cuda.memory_allocated() if work.device == "cuda" else 0
    back = leaving.load()
    return {"bytes": out.bytes, "unload_s": out.seconds, "load_s": back.seconds, "left_bytes": left}


def _limits(work: Work, device: torch.device, nbytes: int) -> tuple[float, float]:
    if work.device == "cuda":
        return between_host_and_device(device, PIECE)
    return through_file(work.scratch / "bandwidth", nbytes)
