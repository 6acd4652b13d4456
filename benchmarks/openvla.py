"""OpenVLA's speed on this processor: a batch against one row at a time.

    python benchmarks/openvla.py --out benchmarks/results

--model (random weights, 256 patches, float32) decides for the same eight pictures: in one batch, one after the other,
and one after the other by Hugging Face's library by three calls (`embodied_bench.measured_policy`); all give the same
tokens, or the script fails. Writes openvla_Ncores.json. The 7.5B network on a GPU: `benchmarks/gpu.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import tyro
from scipy.stats import binom

from embodied_bench.machine import measure_machine, seconds_of
from embodied_bench.measured_policy import LOOP, OneAtATime, build, describe, make_inputs, peer_calls, rows_of
from embodied_bench.settings import BenchPolicy, show_and_write
from policies.openvla.policy import TokenPolicy
from policies.random_weights import INSTRUCTION

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Arguments:
    """OpenVLA's speed with 100M parameters on the processor."""

    model: str = "openvla-100m"
    """openvla-100m or openvla-100m-deep (`policies.openvla.sizes`)."""
    rows: int = 8
    """Batch size."""
    rounds: int = 7
    """Number of times that all calls are measured, in turn."""
    out: Path | None = None
    """Write the result into this folder."""


def on_processor(model: str, rows: int, rounds: int) -> dict[str, Any]:
    """Decisions per second, in a batch and one at a time; medians, with intervals of the ratios round by round."""
    bench = BenchPolicy(model=model, random_weights=True, device="cpu", dtype="float32")
    policy = build(bench)
    assert isinstance(policy, TokenPolicy)
    inputs = make_inputs(policy, rows, bench.seed, CPU)
    alone = rows_of(inputs)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "batched": lambda: policy.act(inputs, None).trace["tokens"],
        "own, one at a time": lambda: torch.cat([policy.act(row, None).trace["tokens"] for row in alone]),
    }
    for call in peer_calls(policy):
        peer = OneAtATime(policy, call)
        calls[call.name] = lambda peer=peer: peer.tokens(inputs)
    tokens = {name: call() for name, call in calls.items()}
    different = [name for name, answer in tokens.items() if not torch.equal(answer, tokens["batched"])]
    if different:
        raise SystemExit(f"these calls give other tokens than the batch: {', '.join(different)}")
    times: dict[str, list[float]] = {name: [] for name in calls}
    machine = measure_machine(CPU, "float32")
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds_of(call, CPU))
    machine = machine.best(measure_machine(CPU, "float32"))
    ratios = {name: [a / b for a, b in zip(t, times["batched"], strict=True)] for name, t in times.items()}
    passes = policy.costs(INSTRUCTION).decision(rows)
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
        "peer_calls": {
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


def main() -> None:
    arguments = tyro.cli(Arguments)
    figures = on_processor(arguments.model, arguments.rows, arguments.rounds)
    suffix = arguments.model.removeprefix("openvla-100m").replace("-", "_")
    name = f"openvla{suffix}_{torch.get_num_threads()}cores.json"
    show_and_write(figures, arguments.out / name if arguments.out else None)


if __name__ == "__main__":
    main()
