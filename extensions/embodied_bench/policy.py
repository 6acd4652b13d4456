"""`embodied bench policy`: decisions per second by batch size, beside Hugging Face's loop and the hardware's limits.

A decision is one action of OpenVLA, whose tokens are generated one after the other, or one chunk of OpenVLA-OFT, which
one forward pass generates. All decisions are greedy, so that every implementation must give the same tokens. Times
include preprocessing.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from embodied.devices import device_of, release
from embodied.errors import UserError
from embodied.reporting.live import steps
from embodied_bench.machine import Machine, Peak, measure_machine, peak_memory, repeat
from embodied_bench.measured_policy import (
    LOOP,
    OneAtATime,
    add_rates,
    build,
    check_batches,
    describe,
    make_inputs,
    measured_here,
    network_of,
    peer_calls,
    results_table,
)
from embodied_bench.settings import BenchPolicy
from policies.contract import Policy
from policies.openvla.action_tokens import decode
from policies.openvla.policy import OpenVLA, TokenPolicy
from policies.work import Costs, nbytes

ROUNDS, FIRST = 3, "first token"
PEER_ROWS = 4
"""Rows whose tokens are compared with the peer's."""


def bench_policy(bench: BenchPolicy) -> dict[str, Any]:
    """Measure every batch size and every call of the peer in turn, three rounds; medians count."""
    batches = check_batches(bench.batches, "batches")
    policy = build(bench)
    device, network = device_of(policy), network_of(policy)
    costs, dtype = network.costs, str(network.dtype).removeprefix("torch.")
    rates = Rates(policy, bench, batches, device)
    with steps("Measuring", ROUNDS) as bar:
        machine = measure_machine(device, dtype)
        for _ in range(ROUNDS):
            rates.measure()
            bar.advance()
        machine = machine.best(measure_machine(device, dtype))
    result = describe(bench, policy, machine) | _latency(rates, costs, machine)
    result["weights_bytes"] = nbytes(policy)
    result["batches"] = [_batch(rates, batch, costs, machine) for batch in batches]
    result |= _best(result["batches"], policy.spec.chunk)
    if rates.peers:
        result["peers"] = {name: _peer(rates, name, result) for name in rates.peers}
        result |= {"peer": LOOP.name, "peer_decisions_per_s": result["peers"][LOOP.name]["decisions_per_s"]}
        result["ratio_to_peer"] = result["decisions_per_s"] / result["peer_decisions_per_s"]
    _show(result)
    return result


class Rates:
    """Seconds of each call, of everything that is measured."""

    def __init__(self, policy: Policy, bench: BenchPolicy, batches: tuple[int, ...], device: torch.device) -> None:
        self.policy, self.seconds, self.device = policy, bench.seconds, device
        self.inputs = {batch: make_inputs(policy, batch, bench.seed, device) for batch in {*batches, 1}}
        self.times: dict[str, list[float]] = {}
        self.peaks: dict[int, Peak] = {}
        self.batches = list(batches)
        """Those that fit into memory."""
        self._warm_up()
        self.peers: dict[str, OneAtATime] = {}
        self.equal: dict[str, float] = {}
        if bench.peer and isinstance(policy, TokenPolicy):
            self.peers = {call.name: OneAtATime(policy, call) for call in peer_calls(policy)}
            self.equal = self._compare(make_inputs(policy, min(max(self.batches), PEER_ROWS), bench.seed, device))

    def measure(self) -> None:
        """One round."""
        one = self.inputs[1]
        if isinstance(self.policy, TokenPolicy):
            token_policy = self.policy
            self._time(FIRST, lambda: first_token(token_policy, self.inputs[1]))
        for batch in dict.fromkeys([1, *self.batches]):
            self._time(str(batch), lambda batch=batch: self.policy.act(self.inputs[batch], None))
        for name, peer in self.peers.items():
            self._time(name, lambda peer=peer: peer.tokens(one))

    def _time(self, name: str, call: Callable[[], object]) -> None:
        self.times.setdefault(name, []).extend(repeat(call, self.device, self.seconds))

    def _warm_up(self) -> None:
        for batch in list(self.batches):
            try:
                with peak_memory(self.device) as peak:
                    for _ in range(2):
                        self.policy.act(self.inputs[batch], None)
                self.peaks[batch] = peak
            except torch.OutOfMemoryError:
                release()
                self.batches = [smaller for smaller in self.batches if smaller < batch]
                if not self.batches:
                    raise UserError(f"a batch of {batch} does not fit into the memory of {self.device}") from None
                break

    def _compare(self, inputs: Any) -> dict[str, float]:
        """Share of rows whose tokens equal those of each call of the peer. Raises where arithmetic is exact enough for
        all of them, and some differ."""
        ours = self.policy.act(inputs, None).trace["tokens"]
        equal = {name: share_of_equal_rows(ours, peer.tokens(inputs)) for name, peer in self.peers.items()}
        if network_of(self.policy).dtype == torch.float32 and min(equal.values(), default=1.0) < 1.0:
            raise RuntimeError(
                f"the policy and Hugging Face's loop say different tokens; shares of equal rows: {equal}"
            )
        return equal


def share_of_equal_rows(a: Tensor, b: Tensor) -> float:
    """Share of the rows of two [B, K] that are the same."""
    return float((a == b).all(1).double().mean())


@torch.no_grad()
def first_token(policy: TokenPolicy, inputs: Any) -> None:
    """All that comes before the first token can be known; for OpenVLA-OFT the whole decision."""
    if isinstance(policy, OpenVLA):
        decode(policy.model, policy.prepare(inputs, policy.spec.action_dim), 1, None)
    else:
        policy.act(inputs, None)


def _latency(rates: Rates, costs: Costs, machine: Machine) -> dict[str, float]:
    limit = sum(machine.seconds(work.flops, work.nbytes) for work in costs.decision(1))
    token = {"time_to_first_token_s": median(rates.times[FIRST])} if FIRST in rates.times else {}
    return {
        **token,
        "time_to_first_action_s": median(rates.times["1"]),
        "limit_time_to_first_action_s": limit,
    }


def _batch(rates: Rates, batch: int, costs: Costs, machine: Machine) -> dict[str, Any]:
    """Figures of a batch size. Each pass waits for the one before, so the limit is a sum over passes."""
    if batch not in rates.batches:
        return {"batch": batch, "out_of_memory": True}
    passes, times = costs.decision(batch), rates.times[str(batch)]
    seconds, limit = median(times), sum(machine.seconds(work.flops, work.nbytes) for work in passes)
    flops = sum(work.flops for work in passes)
    return {
        "batch": batch,
        "decisions_per_s": batch / seconds,
        "decisions_per_s_min": batch / max(times),
        "decisions_per_s_max": batch / min(times),
        "limit_decisions_per_s": batch / limit,
        "limit_by_flops_decisions_per_s": batch * machine.flops_per_s / flops,
        "limit_by_memory_decisions_per_s": batch * machine.bytes_per_s / sum(work.nbytes for work in passes),
        "share_of_limit": limit / seconds,
        "model_flops": flops,
        "mfu": flops / seconds / machine.flops_per_s,
        "peak_memory_bytes": rates.peaks[batch].nbytes,
        "times_s": times,
    }


def _best(batches: list[dict[str, Any]], chunk: int) -> dict[str, Any]:
    fitting = [batch for batch in batches if "mfu" in batch]
    best = max(fitting, key=lambda batch: batch["decisions_per_s"])
    kept = ("batch", "decisions_per_s", "limit_decisions_per_s", "share_of_limit", "mfu", "peak_memory_bytes")
    named = "actions_per_s" if chunk == 1 else "chunks_per_s"
    return {name: best[name] for name in kept} | {named: best["decisions_per_s"]}


def _peer(rates: Rates, name: str, result: dict[str, Any]) -> dict[str, Any]:
    seconds = median(rates.times[name])
    return {
        "decisions_per_s": 1 / seconds,
        "rows_with_equal_tokens": rates.equal[name],
        "ratio_to_peer": seconds * result["decisions_per_s"],
        "times_s": rates.times[name],
    }


def _show(result: dict[str, Any]) -> None:
    unit = "actions/s" if "actions_per_s" in result else "chunks/s"
    table = results_table(f"{result['model']}, {result['dtype']}, {result['hardware']}", unit)
    for found in result["batches"]:
        add_rates(table, f"batch {found['batch']}", found, "decisions_per_s")
    peers = result.get("peers", {})
    for name, found in peers.items():
        times = found["times_s"]
        name = "HF " + name.replace("(", "").replace(")", "")
        table.add_row(name, f"{found['decisions_per_s']:,.2f}", f"{1 / max(times):,.2f}-{1 / min(times):,.2f}")
    console = Console()
    console.print(table)
    firsts = {name: result.get(f"time_to_first_{name}_s") for name in ("token", "action")}
    times = ", ".join(f"first {name} after {1e3 * s:,.0f} ms" for name, s in firsts.items() if s is not None)
    console.print(f"batch 1: {times}")
    console.print(measured_here(result))
    for name, found in peers.items():
        console.print(
            f"{found['ratio_to_peer']:.2f} x Hugging Face's {name}, one at a time; the same tokens in "
            f"{found['rows_with_equal_tokens']:.0%} of rows"
        )
