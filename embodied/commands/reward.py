"""`embodied reward`: train a success classifier from recorded episodes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import print as show

from embodied.errors import UserError
from embodied.training.classifier_training import ClassifierTraining, learn_success, read_labelled


@dataclass(frozen=True)
class Arguments:
    """Train a success classifier from recorded episodes, solved and not: what `reward.classifier` names in a
    configuration whose workflow has a reward worker (ppo_reward)."""

    data: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Datasets in LeRobot's layout with frames, as `embodied record` writes them."""
    out: Path = tyro.MISSING
    """Folder of the classifier; there must be none of that name."""
    last: int = 2
    """Frames at the end of a solved episode that count as solved."""
    steps: int = 200
    """Optimiser steps."""
    batch: int = 64
    """Frames per step, half of them of success."""
    lr: float = 1e-3
    """Learning rate of the first step; it falls linearly to zero."""
    holdout: float = 0.2
    """Share of the episodes that is measured and not learned from."""
    seed: int = 0
    """Initial weights, batches and held-out episodes are a function of it."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    for name, least in (("last", 1), ("steps", 1), ("batch", 2)):
        if getattr(args, name) < least:
            raise UserError(f"--{name} is at least {least}, got {getattr(args, name)}")
    if not 0 <= args.holdout < 1:
        raise UserError(f"--holdout is a share of the episodes, 0 to less than 1, got {args.holdout}")
    if args.out.exists():
        raise UserError(f"{args.out} exists: name another folder with --out")
    begin = time.monotonic()
    labelled = read_labelled(args.data, args.last)
    settings = ClassifierTraining(args.last, args.steps, args.batch, args.lr, args.holdout, args.seed)
    classifier, measured = learn_success(labelled, settings)
    classifier.save(args.out)
    figures = ", ".join(f"{name.replace('_', ' ')} {value:.3g}" for name, value in measured.items())
    show(f"[bold]{args.out}[/]: learned from {', '.join(map(str, args.data))}; {figures or 'nothing was held out'}")
    return {
        "classifier": str(args.out),
        "episodes": int(labelled.episode[-1]) + 1,
        **measured,
        "wall_s": time.monotonic() - begin,
    }
