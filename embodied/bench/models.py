"""The policy that is measured, and its inputs."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

import policies
from embodied.bench.machine import Machine, choose_dtype
from embodied.bench.results import provenance
from embodied.bench.settings import BenchLearner, BenchPolicy
from embodied.errors import UserError
from embodied.workers.devices import find_device, settle
from policies.contract import Inputs, PolicySpec
from policies.openvla import sizes
from policies.openvla.base import TokenPolicy
from policies.openvla.config import read_config
from policies.random_weights import INSTRUCTION

CAMERA = "camera"
COARSE = 8
"""Patches of colour along a side of the frames: noise of single pixels looks the same to a network that averages."""


def build(bench: BenchPolicy | BenchLearner, **options: Any) -> TokenPolicy:
    """The policy that the settings name, on its device, with its `options`. Raises `UserError`, `PolicyError`."""
    kind, _ = sizes.find(bench.model)
    if (bench.checkpoint is None) != bench.random_weights:
        raise UserError(
            "say which weights to measure: --random-weights, or --checkpoint DIR"
            + (" (both are given)" if bench.random_weights else "")
        )
    if not bench.seconds > 0:
        raise UserError(f"seconds must be greater than 0, got {bench.seconds}")
    device = find_device(bench.device)
    options |= {"dtype": choose_dtype(bench.dtype, device), "unnorm_key": bench.unnorm_key}
    chunk = sizes.CHUNK if kind == "openvla_oft" else 1
    # Random weights are drawn where they are needed: 15 GB take long to draw on a CPU, and to copy.
    where = torch.device(device) if bench.random_weights else contextlib.nullcontext()
    with _source(bench) as folder:
        spec = PolicySpec(sizes.ACTION_DIM, chunk, cameras=(CAMERA,), image_size=read_config(folder).image_size)
        try:
            with where:
                policy = policies.build(kind, spec, bench.seed, checkpoint=str(folder), **options)
            settle(policy, device)
        except torch.OutOfMemoryError as error:
            raise UserError(f"{bench.model} in {options['dtype']} does not fit into the memory of {device}") from error
    assert isinstance(policy, TokenPolicy)
    return policy


@contextlib.contextmanager
def _source(bench: BenchPolicy | BenchLearner) -> Iterator[Path]:
    if bench.checkpoint is not None:
        yield bench.checkpoint
        return
    with tempfile.TemporaryDirectory() as folder:
        yield sizes.write_random(folder, bench.model, bench.seed)


def check_batches(batches: tuple[int, ...], name: str) -> tuple[int, ...]:
    """Ascending, each once. Raises `UserError`."""
    if not batches or min(batches) < 1:
        raise UserError(f"{name} must be whole numbers of 1 or more, got {' '.join(map(str, batches)) or 'none'}")
    return tuple(sorted(set(batches)))


def make_inputs(policy: TokenPolicy, rows: int, seed: int, device: torch.device) -> Inputs:
    """Frames of random coarse patches, of the size that the network takes, and one instruction for all rows."""
    generator = torch.Generator("cpu").manual_seed(seed)
    coarse = torch.randint(0, 256, (rows, 3, COARSE, COARSE), generator=generator, device="cpu").float()
    size = policy.spec.image_size
    frames = torch.nn.functional.interpolate(coarse, size=(size, size)).permute(0, 2, 3, 1).to(torch.uint8)
    return Inputs(frames={CAMERA: frames.contiguous().to(device)}, instruction=(INSTRUCTION,) * rows)


def describe(bench: BenchPolicy | BenchLearner, policy: TokenPolicy, machine: Machine) -> dict[str, Any]:
    """What the figures are of, and on."""
    parameters = list(policy.model.parameters())
    return provenance() | {
        "model": bench.model,
        "policy": policy.kind,
        "weights": f"random, seed {bench.seed}" if bench.checkpoint is None else str(bench.checkpoint),
        "dtype": str(policy.model.dtype).removeprefix("torch."),
        "device": str(parameters[0].device),
        "software": {"torch": torch.__version__, "transformers": _version("transformers")},
        "threads": torch.get_num_threads(),
        "parameters": sum(p.numel() for p in parameters),
        "patches": policy.model.config.patches,
        "prompt_tokens": len(policy.prompts.tokens(INSTRUCTION)),
        "action_tokens": policy.spec.chunk * policy.spec.action_dim,
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
