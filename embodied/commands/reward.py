"""`embodied reward`: train a success classifier from recorded episodes."""

from __future__ import annotations

import time
from typing import Any

from rich import print as show

from embodied.commands.arguments import RewardArguments as Arguments
from embodied.errors import UserError
from embodied.training.classifier_training import ClassifierTraining, learn_success, read_labelled


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
