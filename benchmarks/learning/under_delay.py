"""Success under delays of policies that learned without one, and of policies that learned under one.

    python benchmarks/learning/under_delay.py --json benchmarks/results/learning_under_delay.json

All act from the state. All of a task are built alike, for decisions of twice as many actions as its largest delay D has
env steps. In training all of these may be executed: a policy that learns under a delay of d decides every 2 D - d env
steps, over as many env steps in all. In evaluations decisions are D env steps apart, and all face the same episodes.
What is there already in --out is gone on with, and --json is written after each evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro
from rich import get_console
from rich.table import Table

from embodied.commands.evaluate import evaluate_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config, delay_of
from embodied.devices import hardware
from embodied.evaluation.conditions import by_condition, difference, unperturbed
from embodied.evaluation.folder import EvalFolder, read_folder
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.statistics import mean_interval, seeds_interval

EVALUATED_SEED = 1_000
"""Seed of all evaluations, so that every policy faces the same episodes."""
UNTOUCHED, WAITS = "untouched", "0"


@dataclass(frozen=True)
class Study:
    """A task, and the largest delay in it."""

    config: str
    delay: int
    settings: Mapping[str, Any]

    @property
    def trained(self) -> tuple[str, ...]:
        """Delays in training, as `env.delay` takes them."""
        fixed = tuple(str(delay) for delay in range(1, self.delay + 1))
        return (WAITS, *fixed, f"0:50,{self.delay}:50")


PUSH = {
    "env.task": "tabletop/push", "env.num_envs": 16, "rollout.decisions": 128, "iterations": 60,
    "policy.options.widths": (128, 128), "optim.minibatch": 256,
}  # fmt: skip
STUDIES = {"reach": Study("reach", 1, {}), "push": Study("reach", 1, PUSH), "push_2": Study("reach", 2, PUSH)}


@dataclass(frozen=True)
class Arguments:
    """Train policies under delays and without, and evaluate all under the same delays."""

    studies: tuple[str, ...] = tuple(STUDIES)
    seeds: tuple[int, ...] = (1, 2, 3)
    episodes: int = 200
    out: Path = Path("runs/under_delay")
    """Folder of the runs and evaluations."""
    json: Path | None = None
    """Write the result to this file."""


def main(args: Arguments) -> None:
    result: dict[str, Any] = {
        "command": f"python benchmarks/learning/under_delay.py --studies {' '.join(args.studies)}",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "seeds": list(args.seeds),
        "episodes": args.episodes,
        "studies": {},
    }
    for name in args.studies:
        study = STUDIES[name]
        evaluated: dict[str, list[EvalFolder]] = {UNTOUCHED: [_evaluated(name, UNTOUCHED, 1, args)]}
        for trained in study.trained:
            for seed in args.seeds:
                evaluated.setdefault(trained, []).append(_evaluated(name, trained, seed, args))
                rows = [_row(delay, evaluated) for delay in range(study.delay + 1)]
                config = _config(study)
                result["studies"][name] = {
                    "config": study.config, "task": config.env.task, "iterations": config.iterations,
                    "predicted": 2 * study.delay, "executed": study.delay, "rows": rows,
                }  # fmt: skip
                if args.json is not None:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
        _show(name, result["studies"][name]["rows"])


def _config(study: Study) -> Config:
    # The evaluation that ends a training is not counted.
    base = {"runtime.mode": "inline", "eval.videos": 0, "eval.episodes": 4}
    return with_settings(load_config(study.config), base | dict(study.settings), study.config)


def _evaluated(name: str, trained: str, seed: int, args: Arguments) -> EvalFolder:
    """The evaluation, without a delay and under each, of a policy that was trained under the delay `trained` or not at
    all."""
    study, run = STUDIES[name], f"{name}-{trained.replace(':', '_').replace(',', '-')}-{seed}"
    config, folder = _config(study), args.out / "evaluations" / run
    delay = WAITS if trained == UNTOUCHED else trained
    chunk = 2 * study.delay - delay_of(delay)[-1][0]
    own: dict[str, Any] = {"name": run, "seed": seed, "env.delay": delay, "policy.chunk": chunk}
    if trained == UNTOUCHED:
        own |= {"iterations": 1, "optim.critic_warmup": 1}  # the policy stays as it begins
    else:
        own["iterations"] = config.iterations * 2 * study.delay // chunk
    if not (args.out / run / "eval.json").is_file():
        train_run(with_settings(config, own, run), study.config, args.out, (args.out / run).exists())
    late = {
        "seed": EVALUATED_SEED, "eval.episodes": args.episodes,
        "eval.delay": tuple(str(delay) for delay in range(1, study.delay + 1)),
        # Half of the actions that the policy is built for are executed.
        "policy.chunk": study.delay, "env.delay": str(study.delay),
    }  # fmt: skip
    if not (folder / "eval.json").is_file():
        evaluate_run(str(args.out / run), with_settings(config, late, run), None, args.out, folder, folder.exists())
    return read_folder(folder)


def _row(delay: int, evaluated: dict[str, list[EvalFolder]]) -> dict[str, Any]:
    """Under one delay of the evaluations, of each kind of policy: success; what the delay costs it; what it has over
    the policy of the same seed that learned without a delay."""
    row: dict[str, Any] = {"delay": delay}
    for kind, folders in evaluated.items():
        members = [_members(folder, delay) for folder in folders]
        rates = [sum(bool(one.success) for one in each) / len(each) for each in members]
        row[kind] = {"success_rates": rates, **_interval("success", seeds_interval(rates, [*map(len, members)]))}
        if delay:
            row[kind] |= _compared("cost", members, [_members(folder, 0) for folder in folders])
        if kind not in (UNTOUCHED, WAITS):
            waits = [_members(folder, delay) for folder in evaluated[WAITS]]
            row[kind] |= _compared("gain", members, waits[: len(members)])
    return row


def _members(folder: EvalFolder, delay: int) -> Sequence[EpisodeOutcome]:
    protocol, outcomes = folder.identity.protocol, folder.in_order()
    return by_condition(protocol, outcomes)["naive", delay, 0] if delay else unperturbed(protocol, outcomes)


def _compared(
    name: str, these: Sequence[Sequence[EpisodeOutcome]], those: Sequence[Sequence[EpisodeOutcome]]
) -> dict[str, Any]:
    """Differences over the same episodes, seed by seed, and their mean."""
    pairs = [difference(list(zip(one, other, strict=True))) for one, other in zip(these, those, strict=True)]
    found = mean_interval([pair["difference"] for pair in pairs])
    if len(pairs) == 1:
        found = pairs[0]["difference"], pairs[0]["difference_low"], pairs[0]["difference_high"]
    return {f"{name}s": pairs, **_interval(name, found)}


def _interval(name: str, found: tuple[float, float, float]) -> dict[str, float]:
    mean, low, high = found
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _show(study: str, rows: Sequence[dict[str, Any]]) -> None:
    """Success by delay, of each kind of policy by its delay in training."""
    kinds = [kind for kind in rows[0] if kind != "delay"]
    table = Table(f"{study}, delay", *(f"trained: {kind}" for kind in kinds))
    for row in rows:
        table.add_row(str(row["delay"]), *(f"{row[kind]['success']:.1%}" for kind in kinds))
    get_console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
