"""Every mode on real workloads, measured beside predicted: `python benchmarks/modes.py --json FILE`.

Runs `embodied compare` on workloads from light to heavy inference, then collects prediction errors and regrets.
Nothing else should run on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import tyro
from rich import get_console

from embodied.commands.compare import compare_command, comparison_table
from embodied.config.files import load_config, parse_config
from embodied.reporting.plan_picture import draw_bars
from embodied_bench.settings import show_and_write

SHORT_LIBERO = {
    "rollout": {"decisions": 4},
    "env": {"max_episode_steps": 32, "num_envs": 4, "cameras": 1, "image_size": 64},
}
"""One iteration is one episode of four decisions: seconds instead of half a minute."""
DEEP = {
    "encoder": "cnn", "critic_reads_state": True, "critic_widths": [256, 256], "steps": 4,
    "noise_level": 0.5, "start_std": 0.1, "channels": [512, 1024, 1024], "extra_layers": 5,
}  # fmt: skip
"""An image policy widened and deepened until it takes longer than the simulator."""

HEAVY = {**SHORT_LIBERO, "policy": {"options": DEEP}, "optim": {"epochs": 1}}

WORKLOADS: dict[str, tuple[str, dict[str, Any]]] = {
    "PushCube, states": ("pushcube", {}),
    "PushCube, pixels, small policy": ("pushcube_rgb", {"rollout": {"decisions": 8}}),
    "LIBERO, pixels, small policy": ("libero_spatial_ppo", SHORT_LIBERO),
    "LIBERO, pixels, deep policy": ("libero_spatial_ppo", HEAVY),
    # Disaggregated plans alone run ahead: the learner's time disappears behind the rollout's.
    "LIBERO, deep policy, one step ahead": ("libero_spatial_ppo", {**HEAVY, "plan": {"ahead": True}}),
    # An update that takes as long as a rollout on one core, and that a second core hardly helps. Every update is whole:
    # where it ended early its time would be another each time.
    "PushCube, states, one step ahead": (
        "pushcube",
        {"optim": {"epochs": 24, "target_kl": None}, "plan": {"ahead": True}},
    ),
}


@dataclass(frozen=True)
class Modes:
    """Compare the modes on real workloads."""

    out: Path = Path("compare")
    """Folder for a page per workload."""
    repeats: int = 2
    only: tuple[str, ...] = ()
    """Numbers of the workloads to run, from 0; none: all."""
    json: Path | None = None
    """Write the figures to this file."""


def main(settings: Modes) -> None:
    results = []
    for number, (name, (config, differs)) in enumerate(WORKLOADS.items()):
        if settings.only and str(number) not in settings.only:
            continue
        merged = _merge(load_config(config).model_dump(mode="json"), differs)
        results.append(
            compare_command(parse_config(merged, name), name, settings.out / str(number), None, settings.repeats)
        )
    rows = [row for result in results for row in result["modes"]]
    draw_bars(settings.out / "modes.png", rows)
    get_console().print(comparison_table(results), markup=False, highlight=False, soft_wrap=True)
    fastest = {min(r["modes"], key=lambda row: row["measured_s"])["mode"] for r in results}
    figures = {
        "workloads": results,
        "mean_absolute_error": fmean(abs(row["error"]) for row in rows),
        "largest_regret": max(result["regret"] for result in results),
        "winning_modes": sorted(fastest),
    }
    show_and_write(figures, settings.json)


def _merge(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    return {
        **first,
        **{k: _merge(first[k], v) if isinstance(v, dict) and k != "options" else v for k, v in second.items()},
    }


if __name__ == "__main__":
    main(tyro.cli(Modes, description=__doc__))
