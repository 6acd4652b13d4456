"""OpenVLA's speed: a batch against one row at a time on this processor; the 7.5B network on a GPU, if there is one.

    python benchmarks/openvla.py --out benchmarks/results

On the processor, --model (random weights, 256 patches, float32) decides for the same eight pictures: in one batch,
one after the other, and one after the other by Hugging Face's library in three ways (`embodied.bench.generate`); all
say the same tokens, or the script fails. On the GPU, what `embodied bench policy|learner` measure of openvla-7b and
openvla-oft-7b in bfloat16. Writes openvla_Ncores.json and openvla_gpu.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from scipy.stats import binom

from embodied.bench.flops import Costs
from embodied.bench.generate import LOOP, OneAtATime, rows_of, ways
from embodied.bench.learner import bench_learner
from embodied.bench.machine import measure_machine, median, seconds_of
from embodied.bench.models import build, describe, make_inputs
from embodied.bench.policy import bench_policy
from embodied.bench.results import show_and_write
from embodied.bench.settings import BenchLearner, BenchPolicy
from embodied.workers.devices import release
from policies.openvla import sizes

CPU = torch.device("cpu")
TARGETS = {
    "openvla-7b": {"actions_per_s": 100.0},
    "openvla-oft-7b": {"chunks_per_s": 90.0},
    "learner": {"samples_per_s": 25.0, "mfu": 0.35},
}
"""On one H200, in bfloat16."""


@dataclass(frozen=True)
class Arguments:
    """OpenVLA's speed: 100M parameters on the processor, 7.5B on a GPU."""

    what: Literal["all", "cpu", "gpu"] = "all"
    """all leaves out the GPU where there is none."""
    model: str = "openvla-100m"
    """Of the comparison on the processor: openvla-100m or openvla-100m-deep (`policies.openvla.sizes`)."""
    rows: int = 8
    """Batch size of the comparison on the processor."""
    rounds: int = 7
    """How often all ways are measured, in turn."""
    gpu_models: tuple[str, ...] = ("openvla-7b", "openvla-oft-7b")
    """What is measured on the GPU, some ten minutes each."""
    seconds: float = 3.0
    """Duration of each of three measurements of each batch size on the GPU."""
    out: Path | None = None
    """Write the results into this folder."""


def on_processor(model: str, rows: int, rounds: int) -> dict[str, Any]:
    """Decisions per second, in a batch and one at a time; medians, with intervals of the ratios round by round."""
    bench = BenchPolicy(model=model, random_weights=True, device="cpu", dtype="float32")
    policy = build(bench)
    inputs = make_inputs(policy, rows, bench.seed, CPU)
    alone = rows_of(inputs)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "batched": lambda: policy.act(inputs, None).trace["tokens"],
        "own, one at a time": lambda: torch.cat([policy.act(row, None).trace["tokens"] for row in alone]),
    }
    for way in ways(policy):
        peer = OneAtATime(policy, way)
        calls[way.name] = lambda peer=peer: peer.tokens(inputs)  # type: ignore[misc]
    tokens = {name: call() for name, call in calls.items()}
    different = [name for name, said in tokens.items() if not torch.equal(said, tokens["batched"])]
    if different:
        raise SystemExit(f"these ways say other tokens than the batch: {', '.join(different)}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    machine = measure_machine(CPU, "float32")
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds_of(call, CPU))
    machine = machine.best(measure_machine(CPU, "float32"))
    ratios = {name: [a / b for a, b in zip(t, times["batched"], strict=True)] for name, t in times.items()}
    passes = Costs(policy, len(policy.prompts.tokens(sizes.INSTRUCTION))).decision(rows)
    limit = rows / sum(machine.seconds(work.flops, work.nbytes) for work in passes)
    rate = rows / median(times["batched"])
    return describe(bench, policy, machine) | {
        "rows": rows,
        "same_tokens": True,
        "different_answers": len(tokens["batched"].unique(dim=0)),
        "actions_per_s": rate,
        "limit_actions_per_s": limit,
        "share_of_limit": rate / limit,
        "ratio_to_peer": median(ratios[LOOP.name]),
        "ways": {
            name: {"actions_per_s": rows / median(t), "batched_is_faster_by": interval(ratios[name]), "times_s": t}
            for name, t in times.items()
        },
    }


def interval(values: list[float]) -> dict[str, float]:
    """Median with the interval between two of the values that holds it with at least 95% confidence, whatever the
    distribution (order statistics; with fewer than six values no such interval exists, and these are the extremes)."""
    ordered, count = sorted(values), len(values)
    outer = 0
    while outer + 1 < count / 2 and 2 * binom.cdf(outer + 1, count, 0.5) <= 0.05:
        outer += 1
    confidence = 1 - 2 * float(binom.cdf(outer, count, 0.5))
    return {
        "median": median(values),
        "low": ordered[outer],
        "high": ordered[count - 1 - outer],
        "confidence": max(confidence, 0.0),
    }


def on_gpu(models: tuple[str, ...], seconds: float) -> dict[str, Any]:
    """The published networks in bfloat16, as `embodied bench policy|learner` measure them."""
    found: dict[str, Any] = {"targets": TARGETS}
    for model in models:
        found[model] = bench_policy(BenchPolicy(model=model, random_weights=True, device="cuda", seconds=seconds))
        release()
        learner = BenchLearner(model=model, random_weights=True, device="cuda", seconds=seconds)
        found[f"{model} learner"] = bench_learner(learner)
        release()
    found["reached"] = {
        name: {key: found[name][key] >= least for key, least in TARGETS.get(name, TARGETS["learner"]).items()}
        for name in found
        if name != "targets"
    }
    return found


def main() -> None:
    arguments = tyro.cli(Arguments)
    if arguments.what != "gpu":
        figures = on_processor(arguments.model, arguments.rows, arguments.rounds)
        suffix = arguments.model.removeprefix("openvla-100m").replace("-", "_")
        name = f"openvla{suffix}_{torch.get_num_threads()}cores.json"
        show_and_write(figures, arguments.out / name if arguments.out else None)
    if torch.cuda.is_available() and arguments.what != "cpu":
        figures = on_gpu(arguments.gpu_models, arguments.seconds)
        show_and_write(figures, arguments.out / "openvla_gpu.json" if arguments.out else None)
    elif arguments.what == "gpu":
        raise SystemExit("this torch sees no GPU: run it where there is one, with a build of torch for CUDA")


if __name__ == "__main__":
    main()
