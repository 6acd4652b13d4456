"""The help of a verb that takes every setting, on one page: its own arguments, and the settings changed most."""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shutil
import textwrap
import typing
from typing import Annotated, Any, Literal

import tyro

from embodied.config.files import all_settings, shipped_configs
from embodied.config.schema import Config

CHANGED = {
    "env.task": "tabletop/reach",
    "env.num_envs": "32",
    "workflow": "grpo",
    "iterations": "200",
    "seed": "1",
    "name": "first",
    "policy.kind": "flow",
    "policy.init": "runs/first",
    "rollout.decisions": "128",
    "optim.policy_lr": "1e-4",
    "loss.clip": "0.1",
    "farm.physics_workers": "4",
    "runtime.mode": "inline",
    "plan.mode": "auto",
    "eval.episodes": "50",
    "eval.every": "10",
}
"""The settings that are changed most, each with an example of a value."""
READ = {"serve": ("policy.kind", "policy.init")}
"""Settings of `CHANGED` that a verb reads, for verbs that do not read them all."""
EXAMPLES = {
    "train": (
        ("embodied train CONFIG --loss.clip 0.1 --seed 3", "any setting can be given"),
        ("embodied train CONFIG --name N --resume auto", "goes on with a run, or begins it"),
        ("embodied train CONFIG --seeds 1 2 3", "once with each seed, and a page with the mean curve and its interval"),
        ("embodied train CONFIG --sweep optim.policy_lr=1e-4,3e-4", "once with each value of a setting"),
        ("embodied train CONFIG --eval.every 10", "evaluates every tenth checkpoint and keeps the best"),
        ("embodied train CONFIG --plan.mode auto", "measures, plans, trains"),
        ("embodied train CONFIG --runtime.address HOST:PORT", "on a Ray cluster"),
        ("embodied train CONFIG --policy.replicas 4 --optim.ranks 4 --farm.groups 8", "more policy workers, ranks"),
    ),
    "sft": (
        ("embodied sft CONFIG --data FOLDER|ORG/NAME ...", "learns from ours or any LeRobot dataset (3.x, 2.1, 2.0)"),
    ),
    "eval": (
        ("embodied eval RUN", "100 unseen episodes with the 95% interval"),
        ("embodied eval RUN --eval.tasks libero/libero_spatial --eval.protocol openvla-oft", "a published protocol"),
        ("embodied eval RUN --against RUN2", "both on the same episodes, their difference, a film of it"),
        ("embodied eval RUN --eval.instruction TEXT", "another instruction than the task's"),
        ("embodied eval CONFIG --policy.options.checkpoint FOLDER|ORG/NAME@REVISION", "a checkpoint of others"),
        ("embodied eval remote_libero --policy.options.address ws://HOST:PORT", "a policy server of openpi's protocol"),
    ),
    "serve": (
        ("embodied serve RUN --port 8000", "openpi's protocol at ws://127.0.0.1:8000, for clients of this machine"),
        ("embodied serve RUN --host ADDRESS --batch 8", "for others too; requests that wait together are one batch"),
        ("embodied serve CONFIG --policy.options.checkpoint FOLDER|ORG/NAME@REVISION", "a checkpoint of others"),
    ),
    "record": (
        ("embodied record RUN --out FOLDER --episodes 50 --only-successes", "demonstrations in LeRobot's layout"),
    ),
    "profile": (("embodied profile CONFIG --out profile.json", "every component alone, beside others, sharing cores"),),
    "plan": (("embodied plan CONFIG --profile profile.json --cluster FILE", "for this machine or one that you lack"),),
    "compare": (("embodied compare CONFIG", "collocated, disaggregated and hybrid: measured beside predicted"),),
    "inspect": (("embodied inspect FOLDER|CHECKPOINT", "a table, a contact sheet, histograms of actions"),),
    "reward": (("embodied reward FOLDER ... --out CLASSIFIER", "a success classifier for reward.model"),),
    "export": (("embodied export RUN --out FOLDER", "a directory of OpenVLA, openpi or LeRobot, adapter merged"),),
    "report": (("embodied report RUN RUN ...", "one page; of several runs curves with bands over seeds"),),
    "runs": (
        ("embodied runs", "what each trains, its state, success, return, env steps, time"),
        ("embodied runs FOLDER FOLDER --out results.html", "the results of several people on one page"),
    ),
    "watch": (("embodied watch", "the same in the browser, and each run's page, while they train"),),
    "doctor": (("embodied doctor", "what is missing, with commands"),),
}
"""Commands of each verb, the usual ones first, with what they do."""
SHOWN = 3
"""Commands in the help."""
WIDEST = 120


def show_help(verb: str, kind: Any, settings: Config) -> None:
    """Print the verb's own arguments in full, `CHANGED` with the values that `settings` has, commands, and the
    configurations."""
    with contextlib.suppress(SystemExit):  # the parser's way to end
        tyro.cli(_own(kind), args=["--help"], prog=f"embodied {verb}")
    width = min(shutil.get_terminal_size((WIDEST, 24)).columns, WIDEST)
    every = f"`embodied {verb} --help-all` and docs/settings.md have every one"
    print(f"\nsettings that are changed most ({every}):")
    print(_columns([_setting(key, CHANGED[key], settings) for key in READ.get(verb, CHANGED)], width))
    print("\nexamples:")
    print(_columns([(command, f"# {does}") for command, does in EXAMPLES[verb][:SHOWN]], width))
    print("\nconfigurations (`embodied train` alone says what each is):")
    print(_filled(list(shipped_configs()), width))


def _own(kind: Any) -> Any:
    """The type of the verb's arguments without settings: what is neither shown nor parsed takes no time."""
    hidden = [("settings", Annotated[None, tyro.conf.Suppress], None)]
    docs = {"__doc__": kind.__doc__}
    return dataclasses.make_dataclass(kind.__name__, hidden, bases=(kind,), frozen=True, namespace=docs)


def _setting(key: str, example: str, settings: Config) -> tuple[str, str]:
    """The option with its example, and the first sentence of its description."""
    value: Any = settings
    for part in key.split("."):
        value = getattr(value, part)
    field = all_settings()[key]
    choices = typing.get_args(field.annotation) if typing.get_origin(field.annotation) is Literal else ()
    sentence = re.split(r"(?<=[.;])\s", field.description or "")[0].rstrip(".;")
    meaning = " ".join((" | ".join(choices) or sentence).split())
    return f"--{key.replace('_', '-')} {example}", f"{meaning} ({'none' if value is None else value})"


def _columns(rows: list[tuple[str, str]], width: int) -> str:
    """Two columns; the second is wrapped, and begins on a new line where the first is long."""
    first = min(max(len(left) for left, _ in rows) + 4, width // 2)
    lines = []
    for left, right in rows:
        wrapped = textwrap.wrap(right, max(width - first, 20))
        head = f"  {left}".ljust(first)
        lines += [head + wrapped[0]] if len(head) == first else [head, " " * first + wrapped[0]]
        lines += [" " * first + line for line in wrapped[1:]]
    return "\n".join(lines)


def _filled(names: list[str], width: int) -> str:
    text = ", ".join(names)
    return textwrap.fill(text, width, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
