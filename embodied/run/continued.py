"""A resumed run keeps its settings, except those given on the command line, and records when they changed.

    RUN/config.yaml                 the settings that it trains with now
    RUN/config.until-000040.yaml    those of its iterations up to the 40th, where they were others

Changes that would make the run's records untrue are refused by name: another seed, task or policy.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import get_console

from embodied import hub
from embodied.config.files import (
    CONFIGS,
    all_settings,
    former_settings,
    load_config,
    save_config,
    saved_config,
    with_settings,
)
from embodied.config.schema import Config, refuse_code
from embodied.errors import UserError, shown
from embodied.run import RUNS
from embodied.run.saved_settings import CONFIG, recorded_settings

OPTION = "policy.options."
CHECKPOINT = f"{OPTION}checkpoint"
VERBS = {"rl": "train", "sft": "sft"}
"""The verb that makes a run of a stage."""
AMOUNTS = {"rl": "iterations", "sft": "steps"}
"""The unit of progress of a stage, in the plural."""
SCHEDULES = {"rl": "constant", "sft": "linear"}
"""The schedule that an unset optim.lr_schedule means, by the run's stage."""
EARLIER = "config.until-"
"""Begins the name of the file with the settings of earlier iterations."""
LEARNING = ("workflow", "rollout", "advantage", "loss", "optim", "reward")
"""Sections of settings that decide what is learned."""
FIXED = ("seed", "env", "extra_tasks", "policy")
"""Settings, and sections, whose values a run keeps from its beginning to its end."""
ELSEWHERE = ("policy.device", "policy.replicas")
"""Settings of these sections that say where something is computed."""
LEARNED_FROM = (
    "data",
    "features",
    "episodes",
    "weights",
    "gripper",
    "insist",
    "holdout",
    "batch",
)
"""Settings of `sft` that decide what `embodied sft` learns from, and so what a step of it is."""


@dataclass(frozen=True)
class Change:
    """A setting that has another value than it had."""

    key: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} {shown(self.before)} -> {shown(self.now)}"

    @property
    def typed(self) -> str:
        """The option with its present value, as typed on the command line."""
        section, dot, last = self.key.replace("_", "-").rpartition(".")
        if isinstance(self.now, bool) and self.key in all_settings() and all_settings()[self.key].annotation is bool:
            return f"--{section}{dot}{'' if self.now else 'no-'}{last}"
        values = self.now if isinstance(self.now, list) else [self.now]
        return shlex.join([f"--{section}{dot}{last}", *(str(value) for value in values)])


@dataclass(frozen=True)
class Part:
    """Iterations of a run from which on it had other settings."""

    iteration: int
    """Iterations that were done before."""
    changes: tuple[Change, ...]


def typed_keys(words: Iterable[str]) -> frozenset[str]:
    """Keys of the settings that the words of a command set; each option of the policy has a key
    (`policy.options.rows`)."""
    named = [word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")]
    sections = (key.rpartition(".") for key in named)
    negated = [f"{section}{dot}{last.removeprefix('no_')}" for section, dot, last in sections]
    return frozenset(key for key in (*named, *negated) if key in all_settings() or key.startswith(OPTION))


def continued(given: Config, run_dir: Path, typed: Collection[str], source: str, stage: str = "rl") -> Config:
    """The settings with which the run in the folder is resumed: its own, and those of the `given` ones whose keys were
    `typed`. If other settings of the configuration `source` differ from the run's, a line is printed.

    A run that has done all of its iterations continues to the configuration's number, if that is larger and no learning
    rate falls with it. Raises `UserError` where the run's settings name code that the given ones do not.
    """
    recorded = recorded_settings(run_dir)
    refuse_code(recorded, run_dir / CONFIG, given.named_code)
    if former := former_settings(run_dir / CONFIG):
        say(f"{run_dir / CONFIG} has former settings, which are ignored: {', '.join(former)}")
    before, now = _flat(recorded), _flat(given)
    typed = {key for key in typed if key in before.keys() | now.keys()}
    if stage == "rl" and not _falls(recorded, stage) and before["iterations"] <= min(done(run_dir), now["iterations"]):
        typed.add("iterations")
    options = {key: value for key, value in before.items() if key.startswith(OPTION) and key not in typed}
    options |= {key: value for key, value in now.items() if key.startswith(OPTION) and key in typed}
    own = {key: now[key] for key in typed if not key.startswith(OPTION)}
    own |= {"name": given.name, "policy.options": {key.removeprefix(OPTION): value for key, value in options.items()}}
    found = with_settings(recorded, own, str(run_dir / CONFIG))
    if reached := done(run_dir):
        # The policy's options are read as its kind declares them later on.
        known = [one for one in changes(recorded, found) if not one.key.startswith(OPTION)]
        refuse_fixed(known, recorded.policy.kind, run_dir, reached, stage)
    differing = [change for change in changes(given, recorded) if change.key not in typed]
    _say_untaken(differing, run_dir, Path(source).name)
    return found


def _say_untaken(differing: Iterable[Change], run_dir: Path, source: str) -> None:
    """Say which settings of the configuration are others than the run's, which keeps its own."""
    # What a run pins, and where it began, a configuration names otherwise.
    found = [one for one in differing if one.key not in ("policy.init", "sft.data", "runtime.address")]
    found = [one for one in found if one.key != CHECKPOINT or not hub.same_repository(one.before, one.now)]
    if not found:
        return
    values = ", ".join(f"{one.key} {shown(one.now)} ({source}: {shown(one.before)})" for one in found)
    free = [Change(one.key, one.now, one.before) for one in found if not is_fixed(one.key, "rl")]
    how = f". To take those of {source}, type them: {' '.join(one.typed for one in free)}" if free else ""
    say(f"{run_dir} keeps the settings that were not typed now: {values}{how}")


def changes(before: Config, now: Config) -> list[Change]:
    """The settings that differ but for the name, with each option of the policy as a setting, in the schema's order."""
    old, new = _flat(before), _flat(now)
    if now.policy.hub_name is not None and before.policy.hub_name is not None:
        new[CHECKPOINT] = hub.kept(now.policy.hub_name, before.policy.hub_name)
    keys = (key for key in {**old, **new} if key != "name")
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def is_fixed(key: str, stage: str, incidental: Collection[str] = ()) -> bool:
    """True if a run of the stage has one value of the setting, as what it has recorded would not be true of another.

    `incidental`: the policy's options that say where things lie or how they are computed.
    """
    if stage == "sft" and key == "env.num_envs":  # of the evaluation alone
        return False
    if key in ELSEWHERE or key.removeprefix(OPTION) in incidental:
        return False
    return key.partition(".")[0] in FIXED or (stage == "sft" and key in {f"sft.{name}" for name in LEARNED_FROM})


def refuse_fixed(found: Iterable[Change], kind: str, run_dir: Path, iteration: int, stage: str) -> None:
    """Raise `UserError` if one of the changes concerns a setting that is fixed for a run. `kind` is that of the run's
    policy."""
    # Where a run began `begun_from` has looked at.
    refused = [one for one in found if one.key != "policy.init" and is_fixed(one.key, stage)]
    if refused:
        from policies.registry import policy_kind  # an import of seconds, which what is parsed does not wait for

        incidental = policy_kind(kind).incidental
        refused = [one for one in refused if is_fixed(one.key, stage, incidental)]
    if not refused:
        return
    values = " and ".join(f"{one.key} {shown(one.before)}, not {shown(one.now)}" for one in refused)
    raise UserError(
        f"{run_dir} has done {iteration} {AMOUNTS[stage]} with {values}: what it has recorded would not be true of "
        f"{'it' if len(refused) == 1 else 'them'}. Leave {' and '.join(one.key for one in refused)} as before, or "
        f"begin another run with another --name (from what this one has learned: --policy.init {run_dir})"
    )


def note_changes(config: Config, run_dir: Path, iteration: int, stage: str) -> None:
    """Say which settings are others than the run recorded, and keep those of its iterations so far.

    Raises `UserError`, and changes nothing, where a run has one value of one of them.
    """
    recorded = saved_config(run_dir / CONFIG)
    found = changes(recorded, config)
    refuse_fixed(found, recorded.policy.kind, run_dir, iteration, stage)
    _refuse_after_end(found, run_dir, iteration, _amount(config, stage), stage)
    kept = keep_settings(run_dir, recorded, config, iteration)
    if found:
        listed = "; ".join(map(str, found))
        where = f" ({kept.name} has the settings until then)" if kept is not None else ""
        say(f"{run_dir} goes on after {iteration} {AMOUNTS[stage]} with other settings: {listed}{where}")
    if (stretched := _stretched(recorded, config, iteration, stage)) is not None:
        say(stretched)
    if iteration >= _amount(config, stage):
        further = _further(iteration, stage)
        say(f"{run_dir} has done all its {iteration} {AMOUNTS[stage]}; with more it goes on ({further})")


def _refuse_after_end(found: Sequence[Change], run_dir: Path, iteration: int, amount: int, stage: str) -> None:
    """Raise `UserError` if no iteration follows and settings of learning change, or fewer iterations are requested than
    are done: the run's records would describe another training than the real one."""
    kept = [one for one in found if one.key.partition(".")[0] in (*LEARNING, "iterations", "sft")]
    if iteration < amount or not kept:
        return
    listed = " and ".join(f"{one.key} {shown(one.before)}, not {shown(one.now)}" for one in kept)
    raise UserError(
        f"{run_dir} has done all its {iteration} {AMOUNTS[stage]}, with {listed}: leave "
        f"{'it' if len(kept) == 1 else 'them'} as before, or let more follow ({_further(iteration, stage)})"
    )


def _further(iteration: int, stage: str) -> str:
    """The option that lets a run continue."""
    return f"{'--sft.steps' if stage == 'sft' else '--iterations'} {2 * iteration}"


def _stretched(before: Config, now: Config, done: int, stage: str) -> str | None:
    """A sentence on learning rates that fall to zero at another time than they did; None where none do."""
    rate = "sft.lr" if stage == "sft" else "optim.policy_lr"
    then, here = (_share(config, done, stage) for config in (before, now))
    if then == here:
        return None
    return (
        f"learning rates {_fall(now, stage)}: the next has {here:.0%} of {rate} "
        f"in place of {then:.0%}, so that the run is another than one with these settings from its beginning"
    )


def _fall(config: Config, stage: str) -> str:
    over = f"fall to zero over {_amount(config, stage)} {AMOUNTS[stage]} now"
    return over if _falls(config, stage) else "do not fall any more"


def _falls(config: Config, stage: str) -> bool:
    return (config.optim.lr_schedule or SCHEDULES[stage]) != "constant"


def _amount(config: Config, stage: str) -> int:
    return config.sft.steps if stage == "sft" else config.iterations


def _share(config: Config, done: int, stage: str) -> float:
    """Share of the learning rate that is left after `done` iterations (or steps), if it falls to zero."""
    amount = _amount(config, stage)
    return config.optim.fallen(min(done, amount), amount, SCHEDULES[stage])


def keep_settings(run_dir: Path, recorded: Config, config: Config, iteration: int) -> Path | None:
    """Keep the settings of the iterations so far in a separate file, where those that follow have others. Returns
    the file, None where there is none."""
    later = [path for number, path in _earlier(run_dir) if number >= iteration]
    before = saved_config(later[0]) if later else recorded  # a run that went back behind a change
    for path in later:
        path.unlink()
    if not changes(before, config):
        return None
    kept = run_dir / f"{EARLIER}{iteration:06d}.yaml"
    save_config(before, kept)
    return kept


def parts(run_dir: Path) -> list[Part]:
    """The iterations after which the run had other settings, with what changed. Raises `UserError` for a file that
    cannot be read."""
    files = _earlier(run_dir)
    if not files:
        return []
    settings = [saved_config(path) for _, path in files] + [saved_config(run_dir / CONFIG)]
    pairs = zip(files, settings, settings[1:], strict=False)
    found = [Part(number, tuple(changes(before, now))) for (number, _), before, now in pairs]
    return [part for part in found if part.changes]


def _earlier(run_dir: Path) -> list[tuple[int, Path]]:
    """The files with the settings of earlier iterations, by the last of these."""
    found = [(path.stem.removeprefix(EARLIER), path) for path in run_dir.glob(f"{EARLIER}*.yaml")]
    return sorted((int(number), path) for number, path in found if number.isdecimal())


def command(run_dir: Path, runs_dir: Path, source: str | None, config: Config, stage: str = "rl") -> str:
    """The command that resumes the run, as it is typed in the current folder.

    `source` names the configuration that the run began with; None: unknown.
    """
    known = source is not None and (Path(source).is_file() or (CONFIGS / f"{source}.yaml").is_file())
    begun = str(source if known else run_dir / CONFIG)
    words = ["embodied", VERBS[stage], begun, "--name", str(run_dir.relative_to(runs_dir))]
    words += [] if runs_dir == RUNS else ["--runs-dir", str(runs_dir)]
    there = load_config(begun).named_code if known else {}
    code = [config.typed(key) for key in dict.fromkeys(config.named_code.values()) if key not in there.values()]
    return " ".join([shlex.join([*words, "--resume", "auto"]), *code])


def say(text: str) -> None:
    """Print a line without wrapping it at the terminal's width, so that commands in it can be copied."""
    get_console().print(text, markup=False, highlight=False, soft_wrap=True, style="yellow")


def forget_earlier(run_dir: Path) -> None:
    """Remove the settings of earlier iterations, of a run that begins anew."""
    for _, path in _earlier(run_dir):
        path.unlink()


def done(run_dir: Path) -> int:
    """Iterations that the run's newest checkpoint has, lasting or interim."""
    found = [path.name for root in ("", "interim") for path in (run_dir / "checkpoints" / root).glob("[0-9]*")]
    return max((int(name) for name in found if name.isdecimal()), default=0)


def _flat(config: Config) -> dict[str, Any]:
    """The settings by their keys as a file has them, with each option of the policy as a setting."""
    data, found = config.model_dump(mode="json"), dict[str, Any]()
    for key in all_settings():
        value: Mapping[str, Any] | Any = data
        for part in key.split("."):
            value = value[part]
        if f"{key}." == OPTION:
            found |= {f"{OPTION}{name}": one for name, one in value.items()}
        else:
            found[key] = value
    return found
