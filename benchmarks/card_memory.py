"""Is the predicted memory of a card what is allocated? `python benchmarks/card_memory.py --json FILE`.

Networks of some million numbers learn and decide on the CPU: the run's own `Learner` takes two optimiser steps, or the
optimiser's steps are taken with the loss of imitation. The measurement is the most bytes that torch's allocator has
given out at once beside the weights, by its own records (`torch.profiler`). It does not use the prediction.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from torch import nn
from torch.profiler import ProfilerActivity, profile

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import decide
from embodied.learning.learner import Learner
from embodied.learning.optimizer import OptimizerSteps, make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.recompute import recompute
from embodied.planning.memory import Passes, card_memory
from embodied.runtime.ranks import Ranks
from embodied.trajectories.batch import TensorDecisions, Trajectories
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write
from policies.conformance import laws
from policies.contract import Inputs, Policy, PolicySpec
from policies.openvla import sizes as openvla_sizes
from policies.pi0 import sizes as pi0_sizes
from policies.smolvla import sizes as smolvla_sizes

ASSETS = Path(__file__).parents[1] / "assets"
Method = Literal["ppo", "grpo", "sft"]
PICTURE = PolicySpec(action_dim=7, cameras=("base",), image_size=56)
FLOW = replace(PICTURE, chunk=4, proprio_dim=7)
WORDS = PolicySpec(action_dim=1, chunk=48, discrete_actions=172)
STATE = PolicySpec(action_dim=7, chunk=2, state_dim=32)


@dataclass(frozen=True)
class Row:
    """A learner, and what it computes."""

    network: str
    method: Method
    rows: int = 8
    """Samples of a micro-batch, and of a decision."""
    passes: int = 1
    """Micro-batches of an optimiser step."""
    lora_rank: int = 0
    base: str | None = None
    recompute: bool = False
    moments: str | None = None
    ema: float | None = None

    @property
    def trained(self) -> str:
        if not self.lora_rank:
            return "every weight"
        return "LoRA" if self.base is None else f"LoRA over {self.base}"

    @property
    def settings(self) -> str:
        """The other settings in words."""
        found = ["recomputed"] * self.recompute + [f"moments {self.moments}"] * (self.moments is not None)
        found += ["average of the weights"] * (self.ema is not None) + [f"{self.passes} passes"] * (self.passes > 1)
        return ", ".join(found)


ROWS = (
    Row("openvla", "ppo"),
    Row("openvla", "ppo", lora_rank=8, passes=2),
    Row("openvla", "grpo", lora_rank=8, base="nf4", recompute=True),
    Row("openvla", "sft", lora_rank=8, base="int8"),
    Row("openvla", "sft", ema=0.9),
    Row("openvla_oft", "grpo", recompute=True),
    Row("openvla_oft", "grpo", lora_rank=8, passes=2),
    Row("openvla_oft", "sft", lora_rank=8, base="nf4"),
    Row("pi0", "ppo", moments="int8"),
    Row("pi0", "ppo", lora_rank=8, recompute=True, passes=2),
    Row("pi0", "grpo", lora_rank=8, base="int8"),
    Row("pi0", "sft", ema=0.9, passes=2),
    Row("pi05", "ppo", lora_rank=8),
    Row("pi05", "sft", recompute=True),
    Row("smolvla", "ppo", lora_rank=8),
    Row("smolvla", "grpo", lora_rank=8, base="nf4"),
    Row("smolvla", "sft"),
    Row("act", "ppo"),
    Row("act", "sft", passes=2),
    Row("diffusion", "ppo"),
    Row("diffusion", "sft", ema=0.9),
    Row("language", "ppo"),
    Row("language", "grpo", recompute=True, passes=2),
    Row("language", "grpo", lora_rank=8, base="nf4"),
    Row("language", "sft", moments="int8"),
    Row("gaussian_mlp", "ppo", rows=512),
)


def _changed(path: Path, **entries: Any) -> None:
    """Set entries of a JSON file; those of a nested object keep the others."""
    known = json.loads(path.read_text())
    for name, value in entries.items():
        known[name] = {**known[name], **value} if isinstance(value, dict) and name in known else value
    path.write_text(json.dumps(known))


def _folder(network: str, root: Path) -> Path:
    """The files of a network of some million numbers."""
    folder = root / network
    if folder.exists():
        return folder
    if network in ("openvla", "openvla_oft"):
        openvla_sizes.write_random(folder, "openvla-small")
        text = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 4}
        _changed(folder / "config.json", text_config=text)
    elif network in ("pi0", "pi05"):
        pi0_sizes.write_random(folder, f"{network}-small")
        stack = {"width": 256, "depth": 4, "mlp_dim": 1024, "head_dim": 64}
        sizes = json.loads((folder / "config.json").read_text())["architecture"]
        expert = {**sizes["expert"], **stack, "width": 128, "mlp_dim": 512}
        _changed(folder / "config.json", architecture={"vlm": {**sizes["vlm"], **stack}, "expert": expert})
    elif network == "smolvla":
        smolvla_sizes.write_random(folder, "smolvla-small")
        text = {"hidden_size": 256, "intermediate_size": 1024, "head_dim": 64}
        _changed(folder / "vlm" / "config.json", text_config=text)
    elif network in ("act", "diffusion", "language"):
        source = ASSETS / {"act": "act_small", "diffusion": "diffusion_small", "language": "countdown_lm"}[network]
        folder.mkdir()
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        larger: dict[str, dict[str, Any]] = {
            "act": {"dim_model": 128, "dim_feedforward": 1024, "backbone_width": 32},
            "diffusion": {},
            "language": {"hidden_size": 320, "intermediate_size": 1280},
        }
        _changed(folder / "config.json", **larger[network])
    return folder


def build(row: Row, root: Path) -> Policy:
    """The policy of a row, with random weights."""
    folder = str(_folder(row.network, root))
    adapter = {"lora_rank": row.lora_rank} if row.lora_rank else {}
    kinds: Mapping[str, tuple[str, PolicySpec, dict[str, Any]]] = {
        "openvla": ("openvla", PICTURE, {"unnorm_key": "demonstrations"}),
        "openvla_oft": ("openvla_oft", replace(PICTURE, chunk=2), {"unnorm_key": "demonstrations"}),
        "pi0": ("pi0", FLOW, {"asset": "demonstrations", "steps": 3}),
        "pi05": ("pi0", FLOW, {"asset": "demonstrations", "steps": 3, "prompt": "openpi"}),
        "smolvla": ("smolvla", FLOW, {"asset": "demonstrations", "steps": 2}),
        "act": ("act", replace(FLOW, chunk=2, image_size=64), {}),
        "diffusion": ("diffusion", replace(FLOW, chunk=2, image_size=64, observations=2), {"num_inference_steps": 5}),
        "language": ("language", WORDS, {"rows": 4}),
        "gaussian_mlp": ("gaussian_mlp", STATE, {"widths": [1024, 1024]}),
    }
    kind, spec, options = kinds[row.network]
    if row.network in ("pi0", "pi05") and not row.lora_rank:
        options = {**options, "train": "all"}
    checkpoint = {} if row.network == "gaussian_mlp" else {"checkpoint": folder}
    return policies.build(kind, spec, 0, row.base, **checkpoint, **options, **adapter)


def config_of(row: Row, policy: Policy) -> Config:
    """The run's settings: steps so small that every ratio stays one."""
    minibatch = row.rows * row.passes
    reads = {"images": policy.spec.cameras, "proprio": policy.spec.proprio_dim, "state": policy.spec.state_dim}
    return parse_config(
        {
            "workflow": "ppo" if row.method == "sft" else row.method,
            "policy": {"kind": policy.kind, "reads": [*(name for name, read in reads.items() if read), "instruction"]},
            "rollout": {"episode_group": 2} if row.method == "grpo" else {},
            "optim": {
                "epochs": 1, "minibatch": minibatch, "micro_batch": row.rows, "recompute": row.recompute,
                "moments": row.moments, "ema": row.ema, "policy_lr": 1e-12, "value_lr": 1e-12,
            },
        },
        "benchmarks/card_memory.py",
    )  # fmt: skip


def inputs_of(policy: Policy, rows: int) -> Inputs:
    found = laws.random_inputs(policy.spec, rows, seed=3)
    text = "Make 24 from 3, 8, 20." if policy.spec.discrete_actions else "reach the red ball"
    return replace(found, instruction=(text,) * rows)


def allocated(compute: Callable[[], object]) -> int:
    """Most bytes that the CPU's allocator has given out during a computation, beyond those before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        compute()
    profiler: Any = found.profiler
    events = [event for event in profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def rollout(row: Row, policy: Policy) -> Trajectories:
    """Trajectories of random observations, for two optimiser steps. In an episode group one episode is solved."""
    rows, spec = 2 * row.rows * row.passes, policy.spec
    inputs = inputs_of(policy, rows)
    parts = [inputs.rows(index) for index in torch.arange(rows).split(row.rows)]
    decided = [decide(policy, part, laws.random_noise(policy, row.rows, seed)) for seed, part in enumerate(parts)]
    trace = {name: torch.cat([action.trace[name] for action in decided]) for name in decided[0].trace}
    log_prob, value = (torch.cat([getattr(a, name) for a in decided]) for name in ("log_prob", "value"))
    in_groups = row.method == "grpo"
    shape = (1, rows) if in_groups else (rows // 2, 2)
    none = torch.zeros(shape, dtype=torch.bool)
    solved = torch.arange(rows).view(shape) % 2 == 0
    ended = ~none if in_groups else none
    return Trajectories(
        TensorDecisions(inputs, trace), log_prob.view(*shape, spec.chunk, spec.action_dim), value.view(shape).float(),
        solved.float(), solved & ended, torch.full(shape, spec.chunk), ~none, ended, none, torch.zeros(shape),
        torch.zeros(shape[1]), 0, episode_group=torch.arange(rows) // 2 if in_groups else None,
    )  # fmt: skip


def imitate(row: Row, policy: Policy, config: Config) -> None:
    """Two optimiser steps with the loss of imitation."""
    if row.recompute:
        recompute(policy)
    optimizer = make_optimizer(policy, config.optim, policy_lr=1e-12, value_lr=None, eps=1e-8)
    steps = OptimizerSteps(ReplicatedPolicy(policy, Ranks()), optimizer, config.optim)
    for _ in range(2):
        steps.begin()
        for _ in range(row.passes):
            actions, counted = laws.demonstrations(policy, row.rows)
            if policy.spec.discrete_actions:
                actions = actions.clamp(min=3.0)  # no token that ends an answer
            noise = laws.random_noise(policy, row.rows, 1)
            policy.imitate(inputs_of(policy, row.rows), actions, counted, noise).sum().backward()
        steps.norm()
        steps.take()


def largest_convolution(policy: Policy) -> int:
    """Bytes of the largest weight of a convolution. Working copies of it are not predicted: a backend's own choice of
    layout makes them (the CPU's up to three, the GPU's were not measured)."""
    convolutions = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    weights = [module.weight for module in policy.modules() if isinstance(module, convolutions)]
    return max((weight.numel() * weight.element_size() for weight in weights), default=0)


def compare(row: Row, root: Path) -> dict[str, Any]:
    """Bytes of a row, predicted and measured, and their ratios."""
    policy = build(row, root)
    config = config_of(row, policy)
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    passes = Passes(
        inputs_of(policy, 1), row.rows, row.rows, of_a_step=row.passes, critic=row.method == "ppo",
        imitates=row.method == "sft",
    )  # fmt: skip
    predicted = card_memory(config, policy, passes)
    if predicted.decision is None or predicted.update is None:
        raise RuntimeError(f"{row} is not predicted")
    lasting = predicted.gradients + predicted.moments + predicted.average
    policy = build(row, root)  # as it was
    convolution = largest_convolution(policy)
    inputs, noise = inputs_of(policy, row.rows), laws.random_noise(policy, row.rows, 1)
    decide(policy, inputs, noise)  # tables that are made once
    decision = allocated(lambda: decide(policy, inputs, noise))
    if row.method == "sft":
        learning = allocated(lambda: imitate(row, policy, config))
    else:
        batch = rollout(row, policy)
        with tempfile.TemporaryDirectory() as folder:
            learning = allocated(lambda: Learner(policy, RunSpec.of(config), Path(folder)).update(batch, 0))
    peak, most = lasting + max(predicted.decision, predicted.update), max(lasting + decision, learning)
    return {
        **asdict(row),
        "trained": row.trained,
        "settings": row.settings,
        "weights_bytes": weights,
        "largest_convolution_bytes": convolution,
        "decision_bytes": decision,
        "decision_predicted": predicted.decision,
        "decision_ratio": predicted.decision / decision,
        "learning_bytes": learning,
        "learning_predicted": lasting + predicted.update,
        "learning_ratio": (lasting + predicted.update) / learning,
        "peak_bytes": most,
        "peak_predicted": peak,
        "peak_ratio": peak / most,
    }


def compared(rows: tuple[Row, ...] = ROWS) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root:
        for row in rows:
            yield compare(row, Path(root))


@dataclass(frozen=True)
class CardMemoryBench:
    """Predicted memory beside what is allocated."""

    only: str = ""
    """Networks whose names contain it."""
    json: Path | None = None
    """Write the result to this file."""


def main(settings: CardMemoryBench) -> None:
    found = []
    for row in compared(tuple(row for row in ROWS if settings.only in row.network)):
        name = ", ".join(filter(None, (row["network"], row["method"], row["trained"], row["settings"])))
        ratios = ", ".join(f"{part} {row[f'{part}_ratio']:.3f}" for part in ("peak", "learning", "decision"))
        print(f"{name}: {ratios}; learning takes {row['learning_bytes'] / 1e6:.1f} MB", flush=True)
        found.append(row)
    show_and_write({"rows": found}, settings.json)


if __name__ == "__main__":
    main(tyro.cli(CardMemoryBench, description=__doc__))
