"""Success after supervised learning with and without augmentation and an average of the weights, from the same
demonstrations and seeds.

    embodied record tabletop_scripted --env.task tabletop/reach_red --out demos/red --episodes 100
    embodied record tabletop_scripted --env.task tabletop/reach_blue --out demos/blue --episodes 100
    python benchmarks/learning/supervised.py demos/red demos/blue --json benchmarks/results/learning_supervised.json

Every run is one of `embodied sft` that keeps an average of the weights, which changes nothing of what it trains.
Variants of one configuration and seed, and the average of each, are evaluated on the same episodes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from embodied import evaluate
from embodied.commands.sft import sft_run
from embodied.config.files import load_config, with_settings
from embodied.reporting.metrics import read
from embodied.statistics import seeds_interval
from embodied_bench.settings import show_and_write

Settings = dict[str, Any]
CONFIGS: dict[str, dict[str, Settings]] = {
    "openvla_small": {
        "plain": {},
        "centre crop": {"policy.options.center_crop": True},
        "oft": {"policy.options.center_crop": True, "sft.augment": "oft"},
        "openpi": {"sft.augment": "openpi"},
    },
    "pi0_small": {"plain": {}, "openpi": {"sft.augment": "openpi"}, "lerobot": {"sft.augment": "lerobot"}},
}
"""Settings of each variant. `oft` is for a policy that acts on the centre crop, beside one that does without it."""


EMA = 0.95
"""Decay of the average: it covers about the last 20 of a small configuration's 50 or 150 steps."""


@dataclass(frozen=True)
class Arguments:
    """Train each variant from the same demonstrations and seeds, and evaluate all on the same episodes."""

    data: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Recordings."""
    configs: tuple[str, ...] = ("openvla_small", "pi0_small")
    variants: tuple[str, ...] = ()
    """Variants of each configuration that are trained; none: all."""
    seeds: tuple[int, ...] = (1, 2, 3)
    out: Path = Path("runs/supervised")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def run(name: str, variant: str, settings: Settings, seed: int, arguments: Arguments) -> dict[str, Any]:
    """The evaluations of one `embodied sft`, which continues where it was stopped, of its weights and of their average,
    and its held-out loss."""
    own = {"name": f"{name}-{variant.replace(' ', '-')}-{seed}", "seed": seed, "sft.data": arguments.data}
    own |= {"optim.ema": EMA, "eval.videos": 0, "runtime.mode": "inline"}
    config = with_settings(load_config(name), settings | own, name)
    folder = Path(sft_run(config, name, arguments.out, True)["run"])
    evaluated = json.loads((folder / "eval.json").read_text())
    return {
        "success_rate": evaluated["success_rate"],
        "average": evaluate(folder, checkpoint="average").success_rate,
        "episodes": evaluated["episodes"],
        "loss": read(folder)[-1]["sft/held_out_loss"],
    }


def summary(rates: Sequence[float], results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    mean, low, high = seeds_interval(rates, [result["episodes"] for result in results])
    return {"success_rates": list(rates), "success_rate": mean, "success_low": low, "success_high": high}


def main() -> None:
    arguments = tyro.cli(Arguments)
    found: dict[str, dict[str, Any]] = {}
    for name in arguments.configs:
        for variant, settings in CONFIGS[name].items():
            if arguments.variants and variant not in arguments.variants:
                continue
            results = [run(name, variant, settings, seed, arguments) for seed in arguments.seeds]
            found.setdefault(name, {})[variant] = {
                "weights": summary([result["success_rate"] for result in results], results),
                "average": summary([result["average"] for result in results], results),
                "held_out_loss": [result["loss"] for result in results],
            }
    show_and_write({"seeds": list(arguments.seeds), "success": found}, arguments.json)


if __name__ == "__main__":
    main()
