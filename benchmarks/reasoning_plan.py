"""Would the planner have chosen what RLinf measured as best for reasoning, on 64 GPUs and from published times?

    python benchmarks/reasoning_plan.py --json benchmarks/results/reasoning_plan.json

RLinf (arXiv:2509.15965) trains DeepSeek-R1-Distill-Qwen by GRPO. Its documentation publishes seconds of generation,
log-probs and training for 1.5B on 8 H100, and, in a comment of the same page, veRL's for 7B on 64. Of 64 GPUs its paper
publishes ratios. What is published, derived and assumed is in `NOTES` and in the result. A device here is a pair of
H100 with one engine (tensor parallelism of 2).
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import tyro

import schedulers
from embodied_bench.settings import show_and_write
from schedulers import Cluster, Component, ComponentProfile, Edge, Loop, Node, Point, Profile, SearchOptions, Workflow
from schedulers.turns import Turns

PAIRS = 32
LONGEST = 27_648
"""Tokens: a context of 28,672 less a prompt of 1,024."""
DONE, AT = 0.95, 0.80
"""Share of the answers that were complete at this share of the rollout's time (7B, GRPO)."""
SLOTS = 64
"""`max_running_requests` of RLinf's recipes."""
GROUP, MINIBATCHES = 16, 4
BANDWIDTH = 2 * 3.35e12
"""Bytes per second of a pair's memory."""
PARTS = 64

NOTES = (
    "published: 1.5B on 8 H100, 512 answers of 13,975 tokens on average: generation 266.08 s, log-probs 17.78 s, "
    "training 61.12 s, step 346.33 s (RLinf's documentation, comparison with veRL)",
    "published: 7B on 64 GPUs by veRL, 2,048 answers of 10,426 tokens: generation 316.96 s (325.09 with resharding), "
    "log-probs 21.58 and 20.74 s, update 73.01 s, step 447.36 s (a comment in the source of that page)",
    "published, by a public summary of the paper, whose text was not at hand: 95% of 7B's answers were complete after "
    "80% of the rollout; GRPO: collocated is best, and the disaggregated placement is 44 to 69% slower",
    "derived: lengths are log-normal, cut at 27,648 tokens; sigma from the 95% point, as if all answers began at once, "
    "mu from the mean; the same sigma for 1.5B",
    "derived: per answer c = keys and values read at full bandwidth; the rest of generation is per turn (a)",
    "derived: arrivals of answers by list scheduling of drawn lengths on half of the pairs",
    "assumed: log-probs and training are data parallel and in proportion to answers; four minibatches, each of whole "
    "groups of 16; 64 answers under way on each engine; the engine's memory and the learner's do not fit together, "
    "8.1 s for a switch (325.09 - 316.96 s, 7B); 1.5B on 64 GPUs: 8,192 answers (512 prompts x 16, RLinf's recipe)",
)


@dataclass(frozen=True)
class Workload:
    """One model, as published."""

    answers: int
    pairs: int
    """Pairs of GPUs that the seconds are of."""
    mean: float
    """Tokens of an answer."""
    generation_s: float
    log_probs_s: float
    training_s: float
    cache_bytes: float
    """Keys and values of one token: 2 x layers x heads x width x 2 bytes."""
    answers_on_64: int
    """Answers of an iteration on 64 GPUs."""


WORKLOADS = {
    "1.5b": Workload(512, 4, 13_975.0, 266.08, 17.78, 61.12, 2 * 28 * 2 * 128 * 2, 8192),
    "7b": Workload(2048, PAIRS, 10_426.0, 316.96, 21.58 + 20.74, 73.01, 2 * 28 * 4 * 128 * 2, 2048),
}
SWITCH_S = 325.09 - 316.96


@dataclass(frozen=True)
class Arguments:
    """The planner's choice and prediction from RLinf's published times of reasoning, on 64 GPUs."""

    json: Path | None = None
    """Write the result to this file."""


def sigma() -> float:
    """Standard deviation of the logarithm of lengths: the mean is 7B's, and `DONE` of the answers have at most `AT` of
    the longest."""
    high = NormalDist().inv_cdf(DONE)
    return high - math.sqrt(high**2 - 2 * math.log(AT * LONGEST / WORKLOADS["7b"].mean))


def lengths(mean: float, count: int = 256) -> tuple[float, ...]:
    """Quantiles of the log-normal distribution, cut at the longest, of this mean."""
    normal = np.array([NormalDist().inv_cdf((i + 0.5) / count) for i in range(count)])
    low, high = 0.0, math.log(LONGEST)
    while high - low > 1e-9:
        middle = (low + high) / 2
        cut = np.minimum(np.exp(middle + sigma() * normal), LONGEST)
        low, high = (middle, high) if cut.mean() < mean else (low, middle)
    return tuple(float(n) for n in np.minimum(np.exp(low + sigma() * normal), LONGEST))


def arrivals(turns: Turns, answers: int, engines: int) -> tuple[float, ...]:
    """Share of the rollout's time at which 1/PARTS, 2/PARTS, ... of the answers are complete."""
    random = np.random.default_rng(0)
    done: list[float] = []
    for drawn in np.array_split(random.choice(turns.quantiles, answers), engines):
        ready = [0.0] * turns.slots
        for taken in drawn.tolist():
            done.append(ready[0] + taken)
            heapq.heapreplace(ready, done[-1])
    ends = np.sort(done)
    return tuple(float(ends[math.ceil(answers * part / PARTS) - 1] / ends[-1]) for part in range(1, PARTS + 1))


def problem(name: str) -> tuple[Workflow, Profile]:
    """The workload on 64 GPUs, with times made from the published ones as `NOTES` says."""
    workload = WORKLOADS[name]
    turns = Turns(SLOTS, lengths(workload.mean))
    answers, each = workload.answers_on_64, workload.answers // workload.pairs
    # An answer of n tokens reads the keys and values of 1, 2, ..., n of them.
    read = float(np.mean(np.square(turns.quantiles))) / 2 * workload.cache_bytes
    per_answer = read / BANDWIDTH
    passes = turns.passes(np.array([1, each]))
    per_turn = (workload.generation_s - per_answer * each) / float(passes[1])
    seconds = {1: per_turn * float(passes[0]) + per_answer, each: workload.generation_s}
    rollout = ComponentProfile(
        "accelerators",
        tuple(Point(batch, 1, s, s, s) for batch, s in seconds.items()),
        turns=turns,
        resident_bytes=100e9,
        unload_s=SWITCH_S / 2,
        load_s=SWITCH_S / 2,
    )

    def parallel(published_s: float) -> ComponentProfile:
        whole = published_s * workload.pairs  # of all the workload's answers on one pair
        return ComponentProfile("accelerators", (Point(workload.answers, 1, whole, whole, whole),), resident_bytes=40e9)

    components = {
        "rollout": rollout,
        "log_probs": parallel(workload.log_probs_s),
        "learner": parallel(workload.training_s),
    }
    minibatch = answers // MINIBATCHES
    workflow = Workflow(
        name,
        (Component("rollout", "writes answers"), Component("log_probs"), Component("learner")),
        (
            Edge("rollout", "log_probs", "answers", "micro_batch", GROUP),
            Edge("log_probs", "learner", "log-probs", "micro_batch", minibatch),
        ),
        (Loop(("rollout",), 1),),
        answers,
    )
    profile = Profile(name, {"gpu": "H100"}, components, arrivals=arrivals(turns, answers, PAIRS // 2))
    return workflow, profile


def cluster() -> Cluster:
    return Cluster(tuple(Node(f"node{i}", 96, 4, accelerator_bytes=2 * 80e9) for i in range(8)))


def planned(name: str) -> dict[str, Any]:
    """The planner's choice on 64 GPUs, and what each mode would take."""
    workflow, profile = problem(name)
    search = SearchOptions(micro_batches=(1, 2, MINIBATCHES))
    chosen = schedulers.plan(workflow, profile, cluster(), search=search)
    found = schedulers.alternatives(workflow, profile, cluster(), search=search)
    seconds = {mode: plan.prediction.iteration_s for mode, plan in found.items() if plan.prediction}
    turns = profile.components["rollout"].turns
    assert turns is not None
    return {
        "chosen": chosen.mode,
        "predicted_s": seconds,
        "slower_than_collocated": {mode: s / seconds["collocated"] - 1 for mode, s in seconds.items()},
        "devices": {
            mode: [{" ".join(p.components): 2 * p.count for p in phase.placements} for phase in plan.phases]
            for mode, plan in found.items()
        },
        "answers_complete_at_80_percent": float(np.interp(AT, profile.arrivals, np.arange(1, PARTS + 1) / PARTS)),
        "empty_slots": turns.waiting(workflow.items / PAIRS),
        "without_the_tail_s": {
            mode: plan.prediction.iteration_s
            for mode, plan in schedulers.alternatives(workflow, even(profile), cluster(), search=search).items()
            if plan.prediction
        },
        "why": chosen.why,
    }


def even(profile: Profile) -> Profile:
    """The profile of a planner that knows no tail: generation in proportion to answers per engine, evenly delivered."""
    rollout = profile.components["rollout"]
    rollout = replace(rollout, turns=None, points=rollout.points[-1:])
    return replace(profile, arrivals=(), components={**profile.components, "rollout": rollout})


def main() -> None:
    arguments = tyro.cli(Arguments)
    figures: dict[str, Any] = {"notes": NOTES, "sigma": sigma()} | {name: planned(name) for name in WORKLOADS}
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main()
