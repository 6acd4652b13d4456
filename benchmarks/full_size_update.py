"""An update of π₀ at its published size on this machine: `python benchmarks/full_size_update.py --json FILE`.

Random weights are drawn in bfloat16. An adapter on the language model and the expert takes one optimiser step from
demonstrations, of one row. The measurement is the largest resident memory of the process (VmHWM) before the policy is
built, until it is built, and during the step; the prediction of `--dry-run --card` stands beside it.
"""

from __future__ import annotations

import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import tyro

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.learning.optimizer import OptimizerSteps, make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.recompute import recompute
from embodied.planning.memory import Passes, card_memory
from embodied.runtime.ranks import Ranks
from embodied_bench.settings import show_and_write
from policies.conformance import laws
from policies.contract import Inputs, Policy, PolicySpec
from policies.pi0 import sizes
from policies.random_weights import undrawn

SPEC = PolicySpec(action_dim=7, chunk=4, proprio_dim=8, cameras=("base",), image_size=224)


@dataclass(frozen=True)
class Update:
    """One optimiser step of an adapter on π₀."""

    model: str = "pi0"
    """A name of `policies.pi0.sizes`."""
    base: str | None = None
    """nf4 or int8; None: bfloat16."""
    recompute: bool = True
    lora_rank: int = 32
    predict_only: bool = False
    json: Path | None = None
    """Write the result to this file."""


def most_resident() -> int:
    """The most bytes that this process has had resident since it was last asked, or since it began."""
    status = Path("/proc/self/status").read_text()
    found = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    return found


def config_of(settings: Update) -> Config:
    optim = {"epochs": 1, "minibatch": 1, "micro_batch": 1, "recompute": settings.recompute}
    policy = {"kind": "pi0", "reads": ["images", "proprio", "instruction"]}
    return parse_config({"workflow": "ppo", "policy": policy, "optim": optim}, "benchmarks/full_size_update.py")


def build(settings: Update, folder: Path) -> Policy:
    options = {
        "checkpoint": str(folder),
        "asset": "demonstrations",
        "dtype": "bfloat16",
        "lora_rank": settings.lora_rank,
    }
    return policies.build("pi0", SPEC, 0, settings.base, **options)


def step(policy: Policy, config: Config, inputs: Inputs) -> None:
    """An optimiser step with the loss of imitation."""
    if config.optim.recompute:
        recompute(policy)
    optimizer = make_optimizer(policy, config.optim, policy_lr=1e-5, value_lr=None, eps=1e-8)
    steps = OptimizerSteps(ReplicatedPolicy(policy, Ranks()), optimizer, config.optim)
    actions, counted = laws.demonstrations(policy, 1)
    steps.begin()
    policy.imitate(inputs, actions, counted, laws.random_noise(policy, 1, 1)).sum().backward()
    steps.norm()
    steps.take()


def main(settings: Update) -> None:
    config = config_of(settings)
    inputs = replace(laws.random_inputs(SPEC, 1, seed=3), instruction=("reach the red ball",))
    with tempfile.TemporaryDirectory() as root:
        folder = sizes.write_random(Path(root) / settings.model, settings.model)
        with undrawn():
            empty = build(settings, folder)
        predicted = card_memory(config, empty, Passes(inputs, 1, 1, imitates=True))
        del empty
        # A process that only learns: no decision.
        lasting = sum(value or 0 for name, value in asdict(predicted).items() if name not in ("decision", "update"))
        of_a_step = lasting + (predicted.update or 0)
        found: dict[str, Any] = {"parts_bytes": asdict(predicted), "predicted_bytes": of_a_step}
        if not settings.predict_only:
            found["libraries_bytes"] = most_resident()
            begun = time.process_time()
            policy = build(settings, folder)
            found["built_bytes"] = most_resident()
            found["parameters"] = sum(p.numel() for p in policy.parameters())
            step(policy, config, inputs)
            found["step_bytes"] = most_resident()
            found["finite"] = all(bool(p.isfinite().all()) for p in policy.parameters() if p.requires_grad)
            found["cpu_s"] = time.process_time() - begun
    show_and_write({**asdict(replace(settings, json=None)), **found}, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Update, description=__doc__))
