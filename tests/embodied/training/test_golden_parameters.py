"""The same seeds give the same parameters, bit for bit, whatever is rebuilt inside.

`golden_parameters.json` holds, for five short runs, a hash of all parameters and the sum of each tensor. Arithmetic
rounds by processor: the hash is compared on the kind of processor that recorded it, the sums everywhere. After a change
that is meant to change results: `python -m tests.embodied.training.test_golden_parameters`, for one run with
`"libero images"` after it.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.execution.session import open_session
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from tests.variants import often

RECORD = Path(__file__).with_name("golden_parameters.json")
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pushcube states": (
        "pushcube",
        {
            "env": {"num_envs": 8},
            "farm": {"groups": 2},
            "rollout": {"decisions": 64},
            "iterations": 3,
            "advantage": {"gamma": 0.9, "lam": 0.95, "normalise_returns": False},
        },
    ),
    "reach by ppo": ("reach", {"iterations": 5}),
    "reach by grpo": ("reach_grpo", {"iterations": 5}),
    "openvla tiny": ("openvla_tiny", {"iterations": 2, "env": {"num_envs": 4}, "rollout": {"decisions": 8}}),
    "libero images": (
        "libero_spatial_ppo",
        {
            "iterations": 2,
            "env": {"num_envs": 2, "image_size": 64, "init_states": 50},
            "rollout": {"decisions": 6},
            "optim": {"minibatch": 6},
        },
    ),
}


def config_of(run: str) -> Config:
    name, differs = RUNS[run]
    data = load_config(name).model_dump(mode="json")
    for key, value in differs.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    data["runtime"] = {"mode": "inline"}
    return parse_config(data, name)


def parameters_after(run: str, folder: Path) -> dict[str, Tensor]:
    config = config_of(run)
    run_dir = folder / "run"
    prepare_run(config, run_dir, resume=False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        with open_session(config) as session:
            training.train(RunSpec.of(config), run_dir, session, None)
    finally:
        torch.set_num_threads(threads)
    newest = checkpoint.latest(run_dir / "checkpoints")
    assert newest is not None
    found: dict[str, Tensor] = {}
    for path in sorted(newest.rglob("*.safetensors")):
        if path.stem == "environments":  # where they are, and not what was learned
            continue
        found |= {f"{path.relative_to(newest)}:{key}": tensor for key, tensor in load_file(path).items()}
    return found


def digest(tensors: dict[str, Tensor]) -> str:
    found = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def sums(tensors: dict[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor.double().sum()) for name, tensor in sorted(tensors.items())}


def processor() -> str:
    return next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))


@pytest.mark.parametrize("run", often(("reach by ppo", "reach by grpo", "openvla tiny"), RUNS))
def test_the_same_seeds_give_the_parameters_that_were_recorded(run: str, tmp_path: Path) -> None:
    recorded = json.loads(RECORD.read_text())[run]
    found = parameters_after(run, tmp_path)
    assert sums(found) == pytest.approx(recorded["sums"], rel=1e-3, abs=1e-2)
    if processor() == recorded["processor"]:
        assert digest(found) == recorded["sha256"]


def record(runs: Sequence[str]) -> None:
    recorded = json.loads(RECORD.read_text())
    for run in runs:
        with tempfile.TemporaryDirectory() as folder:
            found = parameters_after(run, Path(folder))
        recorded[run] = {"processor": processor(), "sha256": digest(found), "sums": sums(found)}
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    record(sys.argv[1:] or list(RUNS))
