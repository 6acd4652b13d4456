"""The policy that is measured, and its inputs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

import policies
from embodied.bench.flops import Costs, FlowCosts
from embodied.bench.machine import Machine, choose_dtype
from embodied.bench.settings import BenchLearner, BenchPolicy, provenance
from embodied.devices import find_device, settle
from embodied.errors import UserError
from policies.contract import Inputs, Policy, PolicySpec
from policies.openvla import sizes
from policies.openvla.base import TokenPolicy
from policies.openvla.config import read_config
from policies.pi0 import sizes as pi0_sizes
from policies.pi0.config import read_sizes
from policies.pi0.policy import Pi0
from policies.random_weights import INSTRUCTION

CAMERA, WRIST = "camera", "wrist"
PROPRIO_DIM = 8
"""LIBERO's."""
COARSE = 8
"""Patches of colour along a side of the frames: noise of single pixels looks the same to a network that averages."""


@dataclass(frozen=True)
class Network:
    """What figures are of, whatever the policy's kind."""

    module: nn.Module
    costs: Costs | FlowCosts
    dtype: torch.dtype
    patches: int
    """Of one image."""
    prompt_tokens: int
    action_tokens: int


def network_of(policy: Policy) -> Network:
    """Of a policy that `build` returned."""
    if isinstance(policy, Pi0):
        costs = FlowCosts(policy)
        dtype = policy.network.projector.weight.dtype
        return Network(policy.network, costs, dtype, policy.sizes.patches, policy.sizes.prompt_len, costs.suffix_tokens)
    assert isinstance(policy, TokenPolicy)
    prompt, tokens = len(policy.prompts.tokens(INSTRUCTION)), policy.spec.chunk * policy.spec.action_dim
    return Network(policy.model, Costs(policy, prompt), policy.model.dtype, policy.model.config.patches, prompt, tokens)


def build(bench: BenchPolicy | BenchLearner, **options: Any) -> Policy:
    """The policy that the settings name, on its device, with its `options`. Raises `UserError`, `PolicyError`."""
    flow = bench.model in pi0_sizes.MODELS
    kind = "pi0" if flow else sizes.find(bench.model)[0]
    if (bench.checkpoint is None) != bench.random_weights:
        raise UserError(
            "say which weights to measure: --random-weights, or --checkpoint DIR"
            + (" (both are given)" if bench.random_weights else "")
        )
    if not bench.seconds > 0:
        raise UserError(f"seconds must be greater than 0, got {bench.seconds}")
    device = find_device(bench.device)
    named = {"asset": bench.unnorm_key} if flow else {"unnorm_key": bench.unnorm_key}
    options |= {"dtype": choose_dtype(bench.dtype, device), **named}
    # Random weights are drawn where they are needed: 15 GB take long to draw on a CPU, and to copy.
    where = torch.device(device) if bench.random_weights else contextlib.nullcontext()
    with _source(bench) as folder:
        spec = _flow_spec(folder, bench.model) if flow else _token_spec(folder, kind)
        try:
            with where:
                policy = policies.build(kind, spec, bench.seed, checkpoint=str(folder), **options)
            settle(policy, device)
        except torch.OutOfMemoryError as error:
            raise UserError(f"{bench.model} in {options['dtype']} does not fit into the memory of {device}") from error
    return policy


def _token_spec(folder: Path, kind: str) -> PolicySpec:
    chunk = sizes.CHUNK if kind == "openvla_oft" else 1
    return PolicySpec(sizes.ACTION_DIM, chunk, cameras=(CAMERA,), image_size=read_config(folder).image_size)


def _flow_spec(folder: Path, model: str) -> PolicySpec:
    """All actions that are predicted are executed; two cameras."""
    adaptive, _ = pi0_sizes.find(model)
    found, _ = read_sizes(folder, adaptive)
    proprio, size = 0 if adaptive else PROPRIO_DIM, found.vision.image_size
    return PolicySpec(sizes.ACTION_DIM, found.horizon, cameras=(CAMERA, WRIST), image_size=size, proprio_dim=proprio)


@contextlib.contextmanager
def _source(bench: BenchPolicy | BenchLearner) -> Iterator[Path]:
    if bench.checkpoint is not None:
        yield bench.checkpoint
        return
    write = pi0_sizes.write_random if bench.model in pi0_sizes.MODELS else sizes.write_random
    with tempfile.TemporaryDirectory() as folder:
        yield write(folder, bench.model, bench.seed)


def check_batches(batches: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Ascending, each once. Raises `UserError`."""
    if not batches or min(batches) < 1:
        raise UserError(f"{name} must be whole numbers of 1 or more, got {' '.join(map(str, batches)) or 'none'}")
    return tuple(sorted(set(batches)))


def make_inputs(policy: Policy, rows: int, seed: int, device: torch.device) -> Inputs:
    """Frames of random coarse patches, of the size that the network takes, a random state where the policy reads one,
    and one instruction for all rows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    size, proprio_dim = policy.spec.image_size, policy.spec.proprio_dim

    def frames() -> torch.Tensor:
        coarse = torch.randint(0, 256, (rows, 3, COARSE, COARSE), generator=generator, device="cpu").float()
        fine = torch.nn.functional.interpolate(coarse, size=(size, size)).permute(0, 2, 3, 1).to(torch.uint8)
        return fine.contiguous().to(device)

    seen = {camera: frames() for camera in policy.spec.cameras}
    state = torch.randn(rows, proprio_dim, generator=generator, device="cpu").to(device) if proprio_dim else None
    return Inputs(frames=seen, proprio=state, instruction=(INSTRUCTION,) * rows)


def describe(bench: BenchPolicy | BenchLearner, policy: Policy, machine: Machine) -> dict[str, Any]:
    """What the figures are of, and on."""
    network = network_of(policy)
    parameters = list(network.module.parameters())
    return provenance() | {
        "model": bench.model,
        "policy": policy.kind,
        "weights": f"random, seed {bench.seed}" if bench.checkpoint is None else str(bench.checkpoint),
        "dtype": str(network.dtype).removeprefix("torch."),
        "device": str(parameters[0].device),
        "software": {"torch": torch.__version__, "transformers": _version("transformers")},
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "patches": network.patches,
        "prompt_tokens": network.prompt_tokens,
        "action_tokens": network.action_tokens,
        "matmul_flops_per_s": machine.flops_per_s,
        "memory_bytes_per_s": machine.bytes_per_s,
    }


def measured_here(result: Mapping[str, Any]) -> str:
    """The rates that limits come from, in words."""
    return (
        f"measured here: {result['matmul_flops_per_s'] / 1e12:,.2f} TFLOP/s, "
        f"{result['memory_bytes_per_s'] / 1e9:,.0f} GB/s"
    )


def results_table(title: str, unit: str) -> Table:
    """Columns of rates beside their limit."""
    table = Table(title=title)
    for column in ("", unit, "min-max", "limit", "of limit", "MFU", "memory"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    return table


def add_rates(table: Table, name: str, found: Mapping[str, Any], rate: str) -> None:
    """The row of a measurement, whose rates are called `rate`."""
    if "mfu" not in found:
        table.add_row(name, "no memory")
        return
    spread = f"{found[f'{rate}_min']:,.2f}-{found[f'{rate}_max']:,.2f}"
    shares = [f"{found[key]:.0%}" for key in ("share_of_limit", "mfu")]
    held = f"{found['peak_memory_bytes'] / 1e9:.2f} GB"
    table.add_row(name, f"{found[rate]:,.2f}", spread, f"{found[f'limit_{rate}']:,.2f}", *shares, held)


def _version(name: str) -> str:
    from importlib.metadata import version

    return version(name)
