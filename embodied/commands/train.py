"""`embodied train`: train, evaluate, film, report; several seeds or settings one after the other.

Its functions import what computes, so that a mistake in the arguments is answered before torch is imported.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import print as show

from embodied.commands.arguments import TrainArguments as Arguments
from embodied.config.files import all_settings, with_settings
from embodied.config.schema import Config
from embodied.errors import UserError, nearest
from embodied.files import parse_yaml
from embodied.imports import uncollected
from embodied.run.continued import continued, say, typed_keys
from embodied.run.saved_settings import CONFIG
from embodied.workflows.unread import check_read

if TYPE_CHECKING:
    from embodied.training.callbacks import Callback
    from embodied.training.checks import Checked


def run(args: Arguments) -> dict[str, Any]:
    settings = args.settings
    if args.dry_run:
        from embodied.run.folder import begun_from
        from embodied.training.dry_run import dry_run

        return dry_run(begun_from(settings, args.runs_dir, args.resume == "auto"), args.card)
    if args.seeds or args.sweep:
        resume, words = args.resume == "auto", args.words
        return train_variants(settings, args.config, args.runs_dir, resume, args.seeds, args.sweep, words=words)
    return train_run(settings, args.config, args.runs_dir, args.resume == "auto")


def train_variants(
    config: Config,
    source: str,
    runs_dir: Path,
    resume: bool,
    seeds: Sequence[int],
    sweep: Sequence[str],
    *,
    words: Sequence[str] = (),
) -> dict[str, Any]:
    """Train every variant and write the page that compares them. Returns their results, and their summary.

    All variants are checked before the first begins. With `resume`, each continues from its newest checkpoint. `words`
    are the command's words, if there was a command: settings that they do not name keep each run's values.
    """
    from embodied.reporting.runs_page import write_runs_page
    from embodied.training.checks import Checked, check_settings

    every = variants(config, source, seeds, sweep)
    if resume and words:
        typed = {*typed_keys(words), "seed", *(_choices(entry)[0] for entry in sweep)}
        every = [continued_run(variant, runs_dir, typed, source) for variant in every]
    checked = []
    for variant in every:
        run_dir = runs_dir / (variant.name or "") if resume else None
        check_settings(Checked(command="train", config=variant, run_dir=run_dir))
        checked.append(_checked(variant, runs_dir, resume))
        if not resume and (runs_dir / (variant.name or "")).exists():
            raise UserError(
                f"the run folder {runs_dir / (variant.name or '')} exists: choose another --name, or go on "
                "with all of them by --resume auto"
            )
    results = []
    for number, each in enumerate(checked, start=1):
        show(f"[bold]{each.config.name}[/], {number} of {len(checked)}")
        try:
            results.append(_train(each, source, runs_dir, resume))
        except KeyboardInterrupt:
            if words:
                again = words if resume else (*words, "--resume", "auto")
                say(f"go on with all of them: {shlex.join(['embodied', 'train', *again])}")
            raise
    page = runs_dir / f"{config.name or Path(source).stem}.html"
    compared = write_runs_page([runs_dir / (variant.name or "") for variant in every], page)
    show(f"compared: [bold]{page}[/]")
    return {"runs": results, **compared}


def continued_run(config: Config, runs_dir: Path, typed: Collection[str], source: str) -> Config:
    """The settings with which the run of that name is resumed, if it has begun."""
    run_dir = runs_dir / (config.name or "")
    return continued(config, run_dir, typed, source) if config.name and (run_dir / CONFIG).is_file() else config


def train_run(
    config: Config, source: str, runs_dir: Path, resume: bool, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    """Train, evaluate, film, report; `callbacks` see each iteration. Returns the result as plain data."""
    return _train(_checked(config, runs_dir, resume), source, runs_dir, resume, callbacks)


def _checked(config: Config, runs_dir: Path, resume: bool) -> Checked:
    """The run with what it begins from, all checked that needs no worker."""
    with uncollected():
        from embodied.run.folder import begun_from
        from embodied.training.checks import Checked, check_start

    config = begun_from(config, runs_dir, resume)
    run_dir = runs_dir / config.name if resume and config.name else None
    checked = Checked(command="train", config=config, run_dir=run_dir)
    check_start(checked)
    return checked


def _train(
    checked: Checked, source: str, runs_dir: Path, resume: bool, callbacks: Sequence[Callback] = ()
) -> dict[str, Any]:
    with uncollected():
        from embodied.commands.evaluate import finish_run
        from embodied.execution.session import open_session
        from embodied.reporting.trackers import tracked
        from embodied.run.folder import open_run_folder
        from embodied.training import loop
        from embodied.training.checks import check_tasks

    config = checked.config
    with (
        open_run_folder(config, source, runs_dir, resume, "rl") as (run_dir, found),
        tracked(config, run_dir) as tracking,
        open_session(config) as session,
    ):
        check_tasks(checked, session)
        result = loop.train(checked.run, run_dir, session, found, callbacks, tracking=tracking)
        return finish_run(config, run_dir, session, result, found is not None, tracking=tracking)


# --- One configuration as several: a seed each, or a setting's values. They run one after the other.


def variants(config: Config, source: str, seeds: Sequence[int], sweep: Sequence[str]) -> list[Config]:
    """The configuration with each combination of the sweep's values and the seeds, each under a different name.

    `sweep` has entries `optim.policy_lr=1e-4,3e-4`. Raises `UserError` for a key that there is not, a value that it
    cannot take, or what is named twice.
    """
    choices = [_choices(entry) for entry in sweep]
    check_read("train", dict(choices))
    if len({key for key, _ in choices}) < len(choices) or len(set(seeds)) < len(seeds):
        raise UserError("each setting of --sweep, and each of --seeds, is named once")
    found = []
    for values in itertools.product(*(values for _, values in choices)):
        for seed in seeds or (config.seed,):
            chosen = dict(zip((key for key, _ in choices), values, strict=True))
            found.append(_changed(config, source, chosen, seed))
    if len({variant.name for variant in found}) < len(found):
        raise UserError("--sweep: two values of a setting are the same, or come to the same name of a run")
    return found


def _choices(entry: str) -> tuple[str, list[Any]]:
    key, equals, values = entry.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not values:
        raise UserError(f"--sweep takes KEY=VALUE,VALUE (optim.policy_lr=1e-4,3e-4), got {entry!r}")
    if key not in all_settings():
        raise UserError(f"--sweep: unknown key {key!r}{nearest(key, list(all_settings()))}")
    if key in ("seed", "name"):
        raise UserError(f"--sweep does not take {key}: --seeds 1 2 3 does, and names follow")
    try:
        return key, parse_yaml(f"[{values}]", "what was given")
    except UserError as error:
        raise UserError(f"--sweep: {values!r} are no values with commas between: {error}") from error


def _changed(config: Config, source: str, chosen: dict[str, Any], seed: int) -> Config:
    parts = [config.name or Path(source).stem]
    # A name is a folder's: no slash, no space.
    parts += [re.sub(r"[^\w.+-]+", "_", f"{key.rpartition('.')[2]}{value}") for key, value in chosen.items()]
    return with_settings(config, {**chosen, "seed": seed, "name": "-".join((*parts, f"seed{seed}"))}, "--sweep")
