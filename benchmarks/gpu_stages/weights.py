"""Stage `weights`: the learner's weights on their way to the policy worker, after updates of a real run.

reference   one process, one network: a version's number is all that is handed over
adapter     two processes, a LoRA adapter
full        two processes, every weight
by_host     the same by way of the host's memory, which two processes of one GPU do not need
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import torch

from benchmarks.gpu_stages.checkpoints import write_checkpoint
from benchmarks.gpu_stages.runs import Runtime, on_one_core, vla_config
from benchmarks.gpu_stages.work import Figures, Work
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import open_session
from embodied.learning.weight_sync import Transport
from embodied.workflows.run_spec import RunSpec

ITERATIONS = 3
PUBLISH = "publish weights"
"""The executor's span."""


def weights(work: Work) -> Figures:
    """Seconds of each hand-over, the way that it takes, and bytes."""
    folder, shares = work.scratch / "checkpoint", work.variant == "reference"
    whole = write_checkpoint(folder, work.model, work.device, "float32" if work.tiny else "bfloat16")
    if work.device == "cuda":
        torch.cuda.empty_cache()
    runtime: Runtime = "inline" if shares else "ray"
    rank = 32 if work.variant == "adapter" or shares else 0
    config = vla_config(work, folder, runtime, rank, optim={"minibatch": 4, "micro_batch": 2})
    with (
        open_session(config) as session,
        start_run(RunSpec.of(config), work.scratch, session, on_one_core(shares)) as workers,
    ):
        if work.variant == "by_host":
            workers.weight_sync = replace(workers.weight_sync, transports=(Transport.SHARED_MEMORY,))
        workers.begin(None, 0)
        found: Figures = {"weights_bytes": whole, "path": workers.weight_sync.path}
        spans = [s for i in range(ITERATIONS) for s in workers.iterate(i).spans if s.name == PUBLISH]
        found["handed_over_bytes"] = 0 if shares else whole if not rank else _adapter_bytes(workers)
        if shares and work.device == "cuda":
            found["copies_of_weights"] = torch.cuda.memory_allocated() / whole
    times = [(span.end_ns - span.start_ns) / 1e9 for span in spans]
    found |= {"seconds": median(times), "times_s": times}
    return found | {"bytes_per_s": found["handed_over_bytes"] / found["seconds"]}


def _adapter_bytes(workers: OnPolicy) -> int:
    return sum(t.numel() * t.element_size() for t in workers.learner.call(LearnerRole.weights).values())
