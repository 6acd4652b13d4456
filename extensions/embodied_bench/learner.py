"""`embodied bench learner`: samples per second of a PPO update by micro-batch, beside the hardware's limit.

A sample is a decision. An update evaluates every sample of the minibatch once, micro-batch by micro-batch, and takes
one step; the gradient is the learner's own (`learning/update.py`), with one ratio for a decision, and as in the
learner the device is waited for once per step. The module that decides is the module that is trained, as in a
collocated run: there is one copy of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from embodied.algorithms.samples import Samples
from embodied.config.schema import LossConfig, OptimConfig
from embodied.devices import CPU, decide, device_of, release, to_host
from embodied.errors import UserError
from embodied.learning.optimizer import make_optimizer
from embodied.learning.recompute import recompute
from embodied.learning.update import Denominators, LossFunction, micro_batch_loss, read_losses
from embodied.reporting.live import steps
from embodied.trajectories.batch import TensorDecisions
from embodied_bench.machine import Machine, Peak, finish, measure_machine, peak_memory, repeat
from embodied_bench.measured_policy import (
    add_rates,
    build,
    check_batches,
    describe,
    make_inputs,
    measured_here,
    network_of,
    results_table,
    rows_of,
)
from embodied_bench.settings import BenchLearner
from policies.capabilities import GathersInGroups, Precomputes
from policies.contract import Inputs, Policy
from policies.openvla.policy import TokenPolicy
from policies.pi0 import sizes as pi0_sizes
from policies.work import Costs, nbytes

ROUNDS = 3


@dataclass(frozen=True)
class Case:
    """A variant of the update."""

    micro_batch: int
    recomputed: bool
    """True: activations are computed again in the backward pass, as by `optim.recompute`."""
    cached: bool
    """True: features that depend on no trained weight are computed once for all epochs, outside the measured time."""

    @property
    def name(self) -> str:
        notes = ["recompute"] * self.recomputed + ["cache"] * self.cached
        return ", ".join([str(self.micro_batch), *notes])


class Update:
    """The policy's PPO update on fixed samples."""

    def __init__(self, policy: Policy, minibatch: int, seed: int) -> None:
        self.policy, self.device = policy, device_of(policy)
        loss, settings = LossConfig(), OptimConfig()
        self._loss, self._max_grad_norm = loss, settings.max_grad_norm
        self.optimizer = make_optimizer(
            policy, settings, policy_lr=settings.policy_lr, value_lr=settings.value_lr, eps=settings.adam_eps
        )
        generator = torch.Generator("cpu").manual_seed(seed)
        inputs = make_inputs(policy, minibatch, seed, CPU)
        noise, advantage = (torch.randn(minibatch, n, generator=generator) for n in (policy.noise_dim, 1))
        decided = self._decide(inputs, noise, advantage[:, 0])
        self.rows = {False: decided, True: self._with_features(decided)}
        """The decisions in the host's memory, as they are and with what `precompute` finds, if it finds anything."""
        self.off_policy = float("nan")
        """Mean |ratio - 1| before the first step."""

    def _decide(self, inputs: Inputs, noise: Tensor, advantage: Tensor) -> Samples:
        """Row by row: how many decide together is the policy's bench's matter, and memory is scarce."""
        actions = [decide(self.policy, row, noise[i : i + 1]) for i, row in enumerate(rows_of(inputs))]
        count, value = len(actions), torch.cat([action.value for action in actions])
        trace = {name: torch.cat([action.trace[name] for action in actions]) for name in actions[0].trace}
        return Samples(
            TensorDecisions(inputs, trace),
            torch.cat([action.log_prob for action in actions]),
            value,
            advantage,
            returns=value + advantage,
            executed=torch.full((count,), self.policy.spec.chunk),
            weight=torch.ones(count),
            importance=torch.ones(count, 1),
        )

    def _with_features(self, rows: Samples) -> Samples | None:
        if not isinstance(self.policy, Precomputes):
            return None
        parts = [to_host(self.policy.precompute(row.to(self.device))) for row in rows_of(rows.inputs)]
        if not parts[0]:
            return None
        features = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        return replace(rows, precomputed=features)

    def step(self, case: Case) -> None:
        """One optimiser step on all samples, as `Learner` takes it."""
        with _recomputing(self.policy) if case.recomputed else nullcontext():
            self._step(case)

    def _step(self, case: Case) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        rows, loss_function = self.rows[case.cached], LossFunction(self._loss)
        assert rows is not None
        minibatch, losses = torch.arange(len(rows)), []
        denominators = Denominators.of(rows, minibatch, loss_function)
        for index in minibatch.split(case.micro_batch):
            loss, statistics = micro_batch_loss(self.policy, rows.take(index), loss_function, denominators)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss  # its graph
            losses.append(statistics)
        norm = nn.utils.clip_grad_norm_(self.policy.parameters(), self._max_grad_norm)
        sums, _ = read_losses(losses, norm)  # the learner looks whether they are finite: one wait for the device
        if math.isnan(self.off_policy):
            self.off_policy = sums.off_policy / sums.units
        self.optimizer.step()


@contextmanager
def _recomputing(policy: Policy) -> Iterator[None]:
    """Within, the activations of the policy's blocks are recomputed."""
    before = {module: module.forward for module in policy.modules()}
    recompute(policy)
    try:
        yield
    finally:
        for module, forward in before.items():
            if module.forward != forward:
                module.forward = forward


def bench_learner(bench: BenchLearner) -> dict[str, Any]:
    """Measure every micro-batch, with and without recomputation (and cached features), three rounds in turn."""
    micro_batches = check_batches(bench.micro_batches, "micro-batches")
    minibatch = bench.minibatch or max(micro_batches)
    if minibatch < max(micro_batches):
        raise UserError(f"minibatch {minibatch} is smaller than the micro-batch {max(micro_batches)}")
    if bench.lora_rank < 0:
        raise UserError(f"lora-rank must be 0 (every weight is trained) or more, got {bench.lora_rank}")
    policy = build(bench, **_options(bench))
    device, network = device_of(policy), network_of(policy)
    costs, dtype = network.costs, str(network.dtype).removeprefix("torch.")
    update = Update(policy, minibatch, bench.seed)
    cached = (False, True) if update.rows[True] is not None else (False,)
    recomputed = (False, True) if isinstance(policy, GathersInGroups) else (False,)
    cases = [Case(m, again, c) for c in cached for again in recomputed for m in micro_batches]
    machine = measure_machine(device, dtype)
    peaks = _warm_up(update, cases, device)
    times: dict[Case, list[float]] = {case: [] for case in cases if peaks[case] is not None}
    if not times:
        raise UserError(f"not even one sample of {bench.model} fits into the memory of {device} beside its weights")
    with steps("Measuring", ROUNDS * len(times)) as bar:
        for _ in range(ROUNDS):
            for case, seconds in times.items():
                seconds.extend(repeat(lambda case=case: update.step(case), device, bench.seconds))
                bar.advance()
    machine = machine.best(measure_machine(device, dtype))
    result = describe(bench, policy, machine)
    trained = "every weight" if all(p.requires_grad for p in policy.parameters()) else "what is not frozen"
    rank = bench.lora_rank if isinstance(policy, TokenPolicy) else 0
    result |= {"minibatch": minibatch, "lora_rank": rank, "trained": trained, "off_policy": update.off_policy}
    result["cases"] = [_case(case, times.get(case), peaks[case], minibatch, costs, machine) for case in cases]
    best = max((case for case in result["cases"] if "mfu" in case), key=lambda case: case["samples_per_s"])
    kept = ("micro_batch", "recomputed", "cached_features", "samples_per_s", "limit_samples_per_s")
    result |= {name: best[name] for name in (*kept, "share_of_limit", "mfu", "peak_memory_bytes")}
    result["memory"] = memory(policy, update.optimizer, device)
    _show(result)
    return result


def _options(bench: BenchLearner) -> dict[str, Any]:
    """Options of the policy: adapters are for OpenVLA; pi0's expert is trained, as published."""
    return {} if bench.model in pi0_sizes.MODELS else {"lora_rank": bench.lora_rank}


def _warm_up(update: Update, cases: Iterable[Case], device: torch.device) -> dict[Case, Peak | None]:
    """Each case twice; the memory it takes, or None where there is not enough."""
    peaks: dict[Case, Peak | None] = {}
    for case in cases:
        try:
            with peak_memory(device) as peak:
                for _ in range(2):
                    update.step(case)
            peaks[case] = peak
        except torch.OutOfMemoryError:
            update.optimizer.zero_grad(set_to_none=True)
            release()
            peaks[case] = None
    return peaks


def _case(
    case: Case, times: list[float] | None, peak: Peak | None, minibatch: int, costs: Costs, machine: Machine
) -> dict[str, Any]:
    named = {
        "micro_batch": case.micro_batch,
        "recomputed": case.recomputed,
        "cached_features": case.cached,
    }
    if times is None or peak is None:
        return named | {"out_of_memory": True}
    full, rest = divmod(minibatch, case.micro_batch)
    works = [costs.update(case.micro_batch, case.cached)] * full
    works += [costs.update(rest, case.cached)] if rest else []
    seconds, limit = median(times), sum(machine.seconds(work.flops, work.nbytes) for work in works)
    flops = sum(work.flops for work in works)
    return named | {
        "samples_per_s": minibatch / seconds,
        "samples_per_s_min": minibatch / max(times),
        "samples_per_s_max": minibatch / min(times),
        "limit_samples_per_s": minibatch / limit,
        "share_of_limit": limit / seconds,
        "model_flops": flops,
        "mfu": flops / seconds / machine.flops_per_s,
        "peak_memory_bytes": peak.nbytes,
        "times_s": times,
    }


def memory(policy: Policy, optimizer: torch.optim.Optimizer, device: torch.device) -> dict[str, int]:
    """Bytes that rollout and learner hold between them, with one copy of the weights and with two.

    `resident` is what the device's allocator holds for all of it, where there is one to ask.
    """
    trained = sum(p.numel() * p.element_size() for p in policy.parameters() if p.requires_grad)
    moments = [tensor for state in optimizer.state.values() for tensor in state.values()]
    state = sum(tensor.numel() * tensor.element_size() for tensor in moments)
    found = {"weights_bytes": nbytes(policy), "of_which_trained_bytes": trained, "optimizer_bytes": state}
    found["one_copy_bytes"] = found["weights_bytes"] + trained + state  # a gradient for each trained weight
    found["two_copies_bytes"] = found["one_copy_bytes"] + found["weights_bytes"]
    if device.type == "cuda":
        finish(device)
        found["resident_bytes"] = torch.cuda.memory_allocated(device)
    return found


def _show(result: dict[str, Any]) -> None:
    what = f"LoRA rank {result['lora_rank']}" if result["lora_rank"] else result["trained"]
    table = results_table(f"{result['model']}, {what}, {result['dtype']}, {result['hardware']}", "samples/s")
    for found in result["cases"]:
        name = Case(found["micro_batch"], found["recomputed"], found["cached_features"]).name
        add_rates(table, name, found, "samples_per_s")
    console, memory = Console(), {name: value / 1e9 for name, value in result["memory"].items()}
    console.print(table)
    console.print("rows: micro-batch; recompute: activations, in the backward pass; cache: vision features, given")
    console.print(
        f"rollout and learner share the weights: {memory['one_copy_bytes']:.2f} GB with gradients and optimiser, "
        f"{memory['two_copies_bytes']:.2f} GB with two copies"
    )
    console.print(f"{measured_here(result)}; mean |ratio - 1| before the first step {result['off_policy']:.1e}")
