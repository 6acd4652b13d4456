"""Evaluated results of several folders of runs on one page: a table for each protocol, sorted by a click.

Results of one table are of the same protocol, but for the seed of its episodes and the conventions by which a policy
sees and acts. Results of different tables are not compared.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

from embodied.errors import UserError
from embodied.files import read_yaml
from embodied.reporting import charts, report
from embodied.reporting.run_record import Evaluation, find, named, read_evaluation

CONFIG, EVALUATION = "config.yaml", "eval.json"
CONVENTIONS = ("cameras", "chunk", "control_mode", "gripper", "image_size", "orientation")
"""Entries of a protocol that follow the policy: how it sees and acts."""
OF_A_RESULT = ("seed", "sha256", "hardware", "simulators")
"""Entries that differ between results of one table."""
HASH = 12
"""Digits of a protocol's sha256 that are shown."""
DATE = "%Y-%m-%d %H:%M"
HEAD = ("run", "success or return", "episodes", "policy", "folder", "protocol", "written")
UNFINISHED = ("run", "folder", "policy and task", "state")


@dataclass(frozen=True)
class Result:
    """The evaluation of a run, or one without a run."""

    folder: str
    """Folder of runs in which it was found (`labels`)."""
    name: str
    """Its own folder, below the folder of runs."""
    policy: str
    task: str
    """The tasks of its protocol; those of a suite are counted."""
    evaluation: Evaluation
    """All tasks together."""
    when: float
    """Seconds since 1970."""

    @property
    def protocol(self) -> str:
        """Sha256 of the protocol; empty in results that do not say it."""
        return str(self.evaluation.protocol.get("sha256", ""))

    @property
    def comparable(self) -> str:
        """Equal texts: results that are compared in one table."""
        left_out = (*CONVENTIONS, *OF_A_RESULT)
        protocol = self.evaluation.protocol or {"task": self.task}  # one that does not say how it was measured
        kept = {key: value for key, value in protocol.items() if key not in left_out}
        return json.dumps(kept, sort_keys=True, default=str)


def results_below(folder: Path, levels: int) -> Iterator[Path]:
    """The folders below `folder`, in as many levels, that hold a result: runs, and evaluations without a run. What lies
    within a run's folder is left out."""
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return
    for path in below:
        if (path / EVALUATION).exists():
            yield path
        elif levels > 1 and not (path / CONFIG).exists():
            yield from results_below(path, levels - 1)


def labels(folders: Sequence[Path]) -> dict[Path, str]:
    """The name of each folder on the page: its own name, or its path if two folders have the same name."""
    names = [folder.resolve().name for folder in folders]
    unique = len({*names}) == len(names)
    return {folder: name if unique else str(folder) for folder, name in zip(folders, names, strict=True)}


def read_results(folders: Sequence[Path], levels: int) -> tuple[list[Result], list[tuple[str, str]]]:
    """The results of all folders, in their order, each once; and of those that cannot be read, path and reason."""
    names = labels(folders)
    found, broken, seen = list[Result](), list[tuple[str, str]](), set[Path]()
    for folder in folders:
        if not folder.is_dir():
            broken.append((str(folder), "it is not a folder"))
        for path in results_below(folder, levels):
            if path.resolve() in seen:
                continue
            seen.add(path.resolve())
            try:
                found.append(_read(path, path.relative_to(folder), names[folder]))
            except (OSError, ValueError, UserError) as error:
                broken.append((str(path), " ".join(str(error).split())[:200]))
    return found, broken


def _read(path: Path, name: Path, folder: str) -> Result:
    evaluation = read_evaluation(path / EVALUATION)
    limits = evaluation.protocol.get("limits")
    tasks = [*map(str, limits)] if isinstance(limits, Mapping) and limits else [evaluation.task]
    return Result(
        folder=folder,
        name=str(name),
        policy=named(find(read_yaml(path / CONFIG), "policy")),
        task=_in_suites(tasks),
        evaluation=evaluation,
        when=(path / EVALUATION).stat().st_mtime,
    )


def _in_suites(tasks: Sequence[str]) -> str:
    """`libero/libero_spatial (10 tasks), tabletop/reach`."""
    suites: dict[str, list[str]] = {}
    for task in tasks:
        suites.setdefault(task.rpartition("/")[0], []).append(task)
    return ", ".join(own[0] if len(own) == 1 else f"{suite} ({len(own)} tasks)" for suite, own in suites.items())


def write_results_page(
    out: Path, folders: Sequence[Path], levels: int, unfinished: Sequence[tuple[str, ...]]
) -> dict[str, Any]:
    """Write the page to `out`: the results below the folders, a row (`UNFINISHED`) for each run that has none, and what
    cannot be read. Returns the results as plain data."""
    found, broken = read_results(folders, levels)
    groups: dict[str, list[Result]] = {}
    for one in found:
        groups.setdefault(one.comparable, []).append(one)
    names, each = ", ".join(map(str, folders)), "A table is of one protocol, and results of two tables are not compared"
    facts = f"{len(found)} results from {escape(names)}. {each}. Written {datetime.now():{DATE}}"
    body = [f'<header><h1>Results</h1><p class="facts"><span>{facts}.</span></p></header>']
    body += [_table(group) for group in groups.values()]
    if unfinished:
        rows = [tuple(map(escape, row)) for row in unfinished]
        body.append(report.section("Not evaluated", report.table(UNFINISHED, rows, "sortable settings")))
    if broken:
        lines = "".join(f'<p class="notice">{escape(path)}: {escape(why)}</p>' for path, why in broken)
        body.append(report.section("Cannot be read", lines))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        report.write_page(out, "Results", "\n".join(body))
    except OSError as error:
        raise UserError(f"the page {out} cannot be written ({error.strerror}); choose another --out") from error
    return {"page": str(out), "results": [_data(one) for one in found], "broken": [path for path, _ in broken]}


def _table(group: Sequence[Result]) -> str:
    protocol = group[0].evaluation.protocol
    parts = [
        f"protocol {protocol['name']}" if protocol.get("name") else "own protocol",
        f"{protocol['trials']} trials a task" if "trials" in protocol else "",
        ("greedy" if protocol["greedy"] else "sampled actions") if "greedy" in protocol else "",
        *(f"{key}: {protocol[key]}" for key in ("instruction", "success", "interval") if protocol.get(key)),
    ]
    lead = "; ".join(str(part) for part in parts if part)
    lead = f"{lead[0].upper()}{lead[1:]}."
    if len({one.protocol for one in group}) > 1:
        lead += " Hashes differ with the seed of the episodes, and with how the policy sees and acts."
    if len({json.dumps(one.evaluation.protocol.get("simulators"), default=str) for one in group}) > 1:
        lead += " Versions of the simulator differ."
    return report.section(
        escape(group[0].task), report.table(HEAD, map(_cells, group), "sortable results"), escape(lead)
    )


def _cells(one: Result) -> tuple[str, ...]:
    rate, between, show = _measured(one.evaluation)
    bounds = "" if between is None else f" <small>{escape(report.interval(*between, show))}</small>"
    return (
        escape(one.name),
        _sorted_by(rate, "–" if rate is None else show(rate) + bounds),
        _sorted_by(one.evaluation.episodes, f"{one.evaluation.episodes:,}"),
        escape(one.policy),
        escape(one.folder),
        f"<code>{escape(one.protocol[:HASH])}</code>",
        _sorted_by(one.when, _day(one.when)),
    )


def _measured(one: Evaluation) -> tuple[float | None, tuple[float, float] | None, Any]:
    """Success, or of a task that knows none the return; its interval, where it is known; and how it is shown."""
    if one.success is not None:
        return one.success[0], one.success[1:], charts.percent
    return one.mean_return, one.return_between, charts.compact


def _sorted_by(key: float | None, shown: str) -> str:
    """A cell that is sorted by a number; without one it is the last."""
    return f'<span data-sort="{"" if key is None else repr(key)}">{shown}</span>'


def _day(when: float) -> str:
    return f"{datetime.fromtimestamp(when):{DATE}}"


def _data(one: Result) -> dict[str, Any]:
    evaluation = one.evaluation
    success, between = evaluation.success, evaluation.return_between
    return {
        "folder": one.folder,
        "run": one.name,
        "policy": one.policy,
        "task": one.task,
        "protocol": evaluation.protocol.get("name"),
        "protocol_sha256": one.protocol,
        "success_rate": None if success is None else success[0],
        "success_low": None if success is None else success[1],
        "success_high": None if success is None else success[2],
        "return": evaluation.mean_return,
        "return_low": None if between is None else between[0],
        "return_high": None if between is None else between[1],
        "episodes": evaluation.episodes,
        "date": _day(one.when),
    }
