"""`embodied runs`: the runs below folders: how far each has come, and what it has reached; as a page with --out."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import tyro

from embodied.errors import UserError
from embodied.files import parse_yaml, read_json
from embodied.reporting.live import duration
from embodied.reporting.tables import table
from embodied.run import RUNS

CONFIG, METRICS, EVALUATION, PROTOCOL = "config.yaml", "metrics.jsonl", "eval.json", "protocol.json"
LEVELS = 3
"""Levels of folders in which runs are looked for: a run's name may be a path."""
TAIL = 2**16
"""Bytes at the end of a record that are read. A row has a few thousand."""
LARGEST_CONFIG = 2**20
LONGEST = 100
"""Characters of a name, or of a problem, that are shown."""
WANTED = {"env": "task", "policy": "kind", "sft": "steps", "iterations": "", "stop_at": "", "stop_at_success": ""}
"""Settings that are read, and of a section which one. All of them would take a hundred runs more than a second."""
UNREADABLE = (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError, UserError)
"""Exceptions that reading a file of any content may raise."""
RUNNING, STOPPED = "running", "stopped"
HEAD = ("run", "policy on task", "state", "success", "return", "env steps", "time", "when")


@dataclass(frozen=True)
class Arguments:
    """List the runs below a folder, or below several: what each trains, its state, its success and return with the
    number of evaluated episodes (or those of the last training episodes), env steps, seconds of iterations, time of the
    last write."""

    folders: tyro.conf.Positional[tuple[Path, ...]] = ()
    """Folders of runs, of one person or several. None: --runs-dir."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    out: Path | None = None
    """Write a page of all evaluated results to this file: a table for each protocol, sorted by a click."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Listed:
    """A run as it is listed. What its folder does not say is None."""

    name: str
    path: str
    state: str
    stage: str = "rl"
    """`sft` where it has learned from demonstrations."""
    policy: str | None = None
    task: str | None = None
    iteration: int | None = None
    """Iterations, or optimiser steps of `embodied sft`, that have ended."""
    iterations: int | None = None
    success: float | None = None
    evaluated: bool = False
    """True if `success` and `mean_return` are of the evaluation, and not of the last training episodes."""
    episodes: int | None = None
    """Episodes of the evaluation."""
    mean_return: float | None = None
    env_steps: int | None = None
    wall_s: float | None = None
    changed: float | None = None
    """When the run last wrote a row, or else began: seconds since 1970."""
    problem: str | None = None
    """Problem of the folder; None: it was read whole."""

    @property
    def stopped(self) -> bool:
        """True if the run is unfinished and no process trains into its folder."""
        return self.state.startswith(STOPPED)

    @property
    def running(self) -> bool:
        """True while a process trains into the folder."""
        return self.state.startswith(RUNNING)


def run(args: Arguments) -> dict[str, Any]:
    """Print the runs, the one that wrote last at the end. Returns them as plain data."""
    if args.folders and args.runs_dir != RUNS:
        raise UserError("give folders, or --runs-dir, and not both")
    folders = tuple(dict.fromkeys(args.folders)) or (args.runs_dir,)
    if len(folders) == 1:
        check_folder(folders[0], "with --runs-dir" if not args.folders else "as `embodied runs FOLDER`")
    elif not any(folder.is_dir() for folder in folders):
        raise UserError(f"there are no folders {', '.join(map(str, folders))}: name folders of runs")
    there = [folder for folder in folders if folder.is_dir()]
    found = [(root, listed(folder, root)) for root in there for folder in run_folders(root)]
    found.sort(key=lambda pair: (pair[1].changed or 0.0, pair[1].name))
    if len(folders) == 1:
        lines = table(HEAD, [row_of(one) for _, one in found])
    else:
        lines = table(("folder", *HEAD), [(_plain(str(root)), *row_of(one)) for root, one in found])
    print("\n".join(lines) if found else none_below(*folders))
    absent = [str(folder) for folder in folders if folder not in there]
    for folder in absent:
        print(f"{_plain(folder)} is not a folder")
    result = {
        "folders": [str(folder) for folder in folders],
        "absent": absent,
        "runs": [asdict(one) for _, one in found],
    }
    if args.out is None:
        return result
    from embodied.reporting.results_page import labels, write_results_page

    names = labels(folders)
    left = [(one.name, names[root], *row_of(one)[1:3]) for root, one in found if not one.evaluated]
    page = write_results_page(args.out, folders, LEVELS, left)
    print(f"page: {page['page']}, {len(page['results'])} results")
    return {**result, **page}


def check_folder(runs_dir: Path, how: str) -> None:
    """Raise `UserError` where there is no such folder; `how` says how another is named."""
    if not runs_dir.is_dir():
        raise UserError(f"there is no folder {runs_dir}: `embodied train CONFIG` makes one, or name another {how}")


def none_below(*folders: Path) -> str:
    return f"no runs below {', '.join(map(str, folders))}: `embodied train CONFIG` makes one"


def run_folders(folder: Path, levels: int = LEVELS) -> Iterator[Path]:
    """The folders of runs below `folder`, also those that lack a part."""
    try:
        below = sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError:
        return
    for path in below:
        if (path / PROTOCOL).exists():
            continue  # an evaluation without a run
        if any((path / name).exists() for name in (CONFIG, METRICS, "checkpoints")):
            yield path
        elif levels > 1:
            yield from run_folders(path, levels - 1)


def listed(folder: Path, runs_dir: Path) -> Listed:
    """The run in the folder. Raises nothing: a file that cannot be read is its `problem`."""
    found: dict[str, Any] = {}
    problems = []
    for file, read in ((CONFIG, _configured), (METRICS, _trained), (EVALUATION, _evaluated)):
        try:
            found |= read(folder / file)
        except FileNotFoundError:
            if file == CONFIG:
                problems.append(f"{CONFIG} is missing")
        except UNREADABLE as error:
            said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            problems.append(f"{file} cannot be read: {said}")
    target, recent = found.pop("stop_at", None), found.pop("recent", None)
    steps = found.pop("sft_steps", None)
    if found.pop("learned", False):  # by `embodied sft`, whose iterations are optimiser steps
        found |= {"iterations": steps, "env_steps": None, "stage": "sft"}
    if "changed" not in found:
        found["changed"] = _changed(folder)
    total = found.get("iterations")
    ended = total is not None and found.get("iteration", 0) >= total
    reached = target is not None and recent is not None and recent >= target
    state = _state(_is_owned(folder / ".owner"), ended or reached, found)
    name = _plain(str(folder.relative_to(runs_dir)))
    return Listed(name, str(folder), state, **found, problem=_plain("; ".join(problems)) or None)


def _state(owned: bool, ended: bool, found: dict[str, Any]) -> str:
    of = f"iteration {found.get('iteration', 0)} of {found.get('iterations') or '?'}"
    if owned:
        return f"{RUNNING}, {of}"
    if ended:
        return "finished" if found.get("evaluated") else "trained, not evaluated"
    return f"{STOPPED} at {of}"


def _configured(path: Path) -> dict[str, Any]:
    """Settings of the run: of a file that `save_config` wrote, the lines that are `WANTED`."""
    with path.open("rb") as file:
        lines = file.read(LARGEST_CONFIG).decode().splitlines()
    section, kept = "", []
    for line in lines:
        if line[:1].isalpha():
            section = line.partition(":")[0]
        if section in WANTED and (line.startswith(f"{section}:") or line.startswith(f"  {WANTED[section]}:")):
            kept.append(line)
    data = parse_yaml("\n".join(kept), "it")
    task, policy, learned = str(data["env"]["task"]), str(data["policy"]["kind"]), data["sft"]["steps"]
    target = data.get("stop_at", data.get("stop_at_success"))  # the latter in runs of earlier versions
    return {
        "task": _plain(task),
        "policy": _plain(policy),
        "iterations": int(data["iterations"]),
        "sft_steps": int(learned),
        "stop_at": None if target is None else float(target),
    }


def _trained(path: Path) -> dict[str, Any]:
    """The last whole row of the record."""
    with path.open("rb") as file:
        size, when = os.fstat(file.fileno()).st_size, os.fstat(file.fileno()).st_mtime
        file.seek(max(size - TAIL, 0))
        *lines, _torn = file.read(TAIL).split(b"\n")
    whole = [line.strip(b"\0") for line in (lines if size <= TAIL else lines[1:]) if line.strip(b"\0")]
    if not whole:
        if size > TAIL:
            raise ValueError(f"its last {TAIL} bytes have no whole row")
        return {}
    row = json.loads(whole[-1])
    recent, has_success = _number(row.get("env/success_recent")), "env/success_recent" in row
    return {
        "iteration": int(row["iteration"]),
        "env_steps": int(row["env_steps"]),
        "wall_s": _number(row.get("wall_s")),
        "recent": recent if has_success else _number(row.get("env/return_recent")),
        "success": recent if recent is not None else _number(row.get("env/success_once")),
        "mean_return": _number(row.get("env/return")),
        "learned": any(key.startswith("sft/") for key in row),
        "changed": when,
    }


def _evaluated(path: Path) -> dict[str, Any]:
    data = read_json(path)
    # A task may know no success; a return may not be finite.
    success, mean_return = (_number(data.get(name)) for name in ("success_rate", "return"))
    return {
        "success": success,
        "mean_return": mean_return,
        "evaluated": data["episodes"] > 0,
        "episodes": int(data["episodes"]),
    }


def _changed(folder: Path) -> float | None:
    try:
        return (folder / CONFIG if (folder / CONFIG).exists() else folder).stat().st_mtime
    except OSError:
        return None


def _is_owned(path: Path) -> bool:
    """True while a process holds the run's lock. It is not tried where the process that is named there has ended, lest
    one that begins at this moment finds it taken."""
    try:
        owner = json.loads(path.read_text())
        if owner["host"] == socket.gethostname() and not Path(f"/proc/{int(owner['process'])}").exists():
            return False
        with path.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except UNREADABLE:
        pass
    return False


def _number(value: Any) -> float | None:
    """The number; None for another value, and for one that is not finite."""
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e100 else None


def _plain(text: str) -> str:
    """Text that a terminal prints as it is, in one line and not too long."""
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(text.split()))
    return text if len(text) <= LONGEST else text[:LONGEST] + "..."


def row_of(one: Listed) -> tuple[str, ...]:
    """The run under `HEAD`."""
    said = (one.policy, one.task)
    of = f" of {one.episodes:,}" if one.evaluated else " (training)"
    return (
        one.name,
        " on ".join(part or "?" for part in said) if any(said) else "",
        one.state if one.problem is None else f"{one.state}; {one.problem}",
        "" if one.success is None else f"{100 * one.success:.1f}%{of}",
        "" if one.mean_return is None else f"{one.mean_return:.3g}{of if one.success is None else ''}",
        "" if one.env_steps is None else f"{one.env_steps:,}",
        "" if one.wall_s is None else duration(one.wall_s),
        "" if one.changed is None else f"{datetime.fromtimestamp(one.changed):%Y-%m-%d %H:%M}",
    )
