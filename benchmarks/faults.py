"""What becomes of a run that loses a worker? `python benchmarks/faults.py --json FILE`.

Every cell is a short run, most on a built-in scene, into which one fault is injected: a role's process is killed or
stopped, or raises, in one of its phases. It is recovered where the run comes to its end by itself (a killed driver's:
once it is started again with `--resume auto`), and equal where its checkpoints and metrics are, to the last bit, those
of the same run without a fault.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import tyro
from safetensors.numpy import load_file

from embodied.config.files import parse_config, save_config
from embodied.config.schema import Config
from embodied.execution.recovery import FILE
from embodied.execution.session import Session, open_session
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.training.loop import train
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write
from sim_farm.workers import faults
from sim_farm.workers.faults import Fault

ITERATIONS = 5
PATIENT_S, IMPATIENT_S, SLOW_S = 240.0, 20.0, 40.0
"""Deadlines of a call. Where something is stopped an impatient one is waited for; `SLOW_S` with a slow simulator."""
STATES: dict[str, Any] = {
    "seed": 4,
    "iterations": ITERATIONS,
    "checkpoint_every": 2,
    "env": {"task": "tabletop/push", "num_envs": 4, "max_episode_steps": 13},
    "farm": {"physics_workers": 2, "groups": 2},
    "policy": {"options": {"widths": [16], "initial_log_std": 0.0}},
    "rollout": {"decisions": 16},
    "optim": {"target_kl": 0.5, "epochs": 2, "minibatch": 24, "policy_lr": 3e-3},
}
PICTURES: dict[str, Any] = {
    **STATES,
    "env": {"task": "tabletop/push", "num_envs": 2, "max_episode_steps": 10, "cameras": 1, "image_size": 64},
    "farm": {"physics_workers": 1, "render_workers": 1, "groups": 2},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images"],
        "chunk": 4,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "rollout": {"decisions": 4},
    "optim": {"epochs": 1, "minibatch": 4},
}
SEVERAL: dict[str, Any] = {
    **STATES,
    "policy": {**STATES["policy"], "replicas": 2},
    "optim": {**STATES["optim"], "ranks": 2},
}
SIMULATORS = {"maniskill": "maniskill/PushCube-v1", "libero": "libero/libero_spatial/0"}
LONG: dict[str, Any] = {**STATES, "iterations": 100, "checkpoint_every": 20}
"""Workers that run need Ray's own processes seldom: in a short run nobody would miss one that is stopped."""
WORKLOADS = {
    "states": STATES,
    "long": LONG,
    "pictures": PICTURES,
    "several": SEVERAL,
    **{name: {**PICTURES, "env": {**PICTURES["env"], "task": task}} for name, task in SIMULATORS.items()},
}
DRAWN = {"start": 1, "open": 1, "draw": 12}
PHASES = {
    ("states", "physics 1"): {"start": 1, "reset": 1, "step": 40},
    ("pictures", "render 0"): DRAWN,
    ("states", "policy"): {"make": 1, "begin": 1, "rollout": 3, "load_weights": 3},
    ("states", "learner"): {"make": 1, "receive": 3, "finish": 3, "weights": 2, "save": 2},
    ("several", "policy 1"): {"make": 1, "load_weights": 3, "decide_request": 40},
    ("several", "learner 1"): {"make": 1, "join": 1, "receive": 3, "finish": 3, "weights": 2, "save": 2},
    **{(name, "physics 0"): {"start": 1, "reset": 1, "step": 40} for name in SIMULATORS},
    **{(name, "render 0"): DRAWN for name in SIMULATORS},
}
"""Of a worker in a workload the phases in which a fault strikes, and how often they were reached then."""
DRIVER = {"start": 1, "rollout": 3, "update": 3, "save": 2}
STEADY = ("rollout", "update", "save")
"""The driver's phases in which there are workers that could be lost with Ray."""


@dataclass(frozen=True)
class Cell:
    """One fault in one workload."""

    workload: str
    fault: Fault

    @property
    def victim(self) -> str:
        return self.fault.child or self.fault.worker

    @property
    def name(self) -> str:
        return f"{self.workload}, {self.victim}, {self.fault.phase}, {self.fault.kind}"

    @property
    def ends_the_process(self) -> bool:
        """Whether the process that trains dies or stands still."""
        return self.victim == "driver" and self.fault.kind in ("kill", "stop")

    @property
    def deadline_s(self) -> float:
        if self.fault.kind != "stop":
            return PATIENT_S
        return SLOW_S if self.workload in SIMULATORS else IMPATIENT_S


def matrix() -> list[Cell]:
    """Every role, fault and phase."""
    kinds: tuple[faults.Kind, ...] = ("kill", "stop", "raise")
    cells = [
        Cell(workload, Fault(worker, phase, kind, nth))
        for (workload, worker), phases in PHASES.items()
        for phase, nth in phases.items()
        for kind in kinds
    ]
    cells += [Cell("states", Fault("driver", phase, kind, nth)) for phase, nth in DRIVER.items() for kind in kinds]
    for child in ("raylet", "gcs_server"):
        for phase in STEADY:
            cells += [Cell("long", Fault("driver", phase, kind, DRIVER[phase], child=child)) for kind in kinds[:2]]
    return cells


@dataclass(frozen=True)
class Outcome:
    """What became of a cell."""

    cell: str
    struck: bool
    recovered: bool
    """Whether the run came to its end."""
    named: bool
    """Whether the record of its losses names the victim."""
    difference: str | None
    """From the run without a fault: the first one found; None where they are equal to the last bit."""
    down_s: tuple[float, ...]
    """Of each loss, how long it took until the run, or the worker, was back."""
    wall_s: float
    error: str | None = None

    @property
    def good(self) -> bool:
        return self.struck and self.recovered and self.named and self.difference is None


@dataclass
class Lab:
    """Runs cells, those of one deadline in one session: processes that were started serve again."""

    folder: Path
    _undisturbed: dict[str, Path] = field(default_factory=dict)

    def run(self, cells: list[Cell]) -> Iterator[Outcome]:
        """Their outcomes, in the order of their deadlines."""
        for deadline_s in sorted({cell.deadline_s for cell in cells}, reverse=True):
            mine = [cell for cell in cells if cell.deadline_s == deadline_s]
            alone = [cell for cell in mine if cell.ends_the_process]
            with self._faults() as file, open_session(_config("states", deadline_s)) as session:
                for cell in mine:
                    if cell not in alone:
                        yield self._within(cell, session, file)
            for cell in alone:
                yield self._by_itself(cell)

    def undisturbed(self, workload: str, session: Session | None = None) -> Path:
        """The run's folder without a fault."""
        if workload not in self._undisturbed:
            folder = self.folder / f"undisturbed-{workload}"
            config = _config(workload, PATIENT_S)
            if session is not None:
                _train(config, folder, session)
            else:
                with open_session(config) as own:
                    _train(config, folder, own)
            self._undisturbed[workload] = folder
        return self._undisturbed[workload]

    @contextmanager
    def _faults(self) -> Iterator[Path]:
        """The file that the session's processes look at."""
        file = self.folder / "faults.json"
        file.write_text("[]")
        os.environ[faults.VARIABLE] = str(file)
        try:
            yield file
        finally:
            del os.environ[faults.VARIABLE]

    def _within(self, cell: Cell, session: Session, file: Path) -> Outcome:
        expected = self.undisturbed(cell.workload, session)
        folder, mark, begin = self._place(cell), Path(f"{file}.fired-0"), time.monotonic()
        mark.unlink(missing_ok=True)
        write_faults(file, [cell.fault])
        error = None
        try:
            _train(_config(cell.workload, cell.deadline_s), folder, session)
        except Exception as found:
            error = f"{type(found).__name__}: {found}"
        write_faults(file, [])
        return _outcome(cell, folder, expected, mark.exists(), time.monotonic() - begin, error)

    def _by_itself(self, cell: Cell) -> Outcome:
        """In a process of its own, which is started again where it is killed, and goes on where it is stopped."""
        expected, folder = self.undisturbed(cell.workload), self._place(cell)
        file = self.folder / "own.json"
        mark, begin = Path(f"{file}.fired-0"), time.monotonic()
        mark.unlink(missing_ok=True)
        write_faults(file, [cell.fault])
        save_config(_config(cell.workload, PATIENT_S), self.folder / "own.yaml")
        command = [
            sys.executable, "-m", "embodied.cli", "train", str(self.folder / "own.yaml"), "--name", folder.name,
            "--runs-dir", str(self.folder), "--eval.episodes", "1", "--eval.videos", "0", "--resume", "auto",
        ]  # fmt: skip
        output = ""
        for _ in range(2):
            process = subprocess.Popen(
                command,
                env={**os.environ, faults.VARIABLE: str(file)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            if cell.fault.kind == "stop":
                _continue_when(mark, process)
            output = process.communicate()[0].decode()
            if process.returncode == 0:
                break
        error = None if process.returncode == 0 else output[-400:]
        return _outcome(cell, folder, expected, mark.exists(), time.monotonic() - begin, error)

    def _place(self, cell: Cell) -> Path:
        return self.folder / cell.name.replace(", ", "-").replace(" ", "")


def _config(workload: str, deadline_s: float) -> Config:
    runtime = {"mode": "ray", "deadline_s": deadline_s}
    return parse_config({**WORKLOADS[workload], "runtime": runtime}, "benchmarks/faults.py")


def _train(config: Config, folder: Path, session: Session) -> None:
    prepare_run(config, folder, False)
    train(RunSpec.of(config), folder, session, None)


def write_faults(file: Path, found: list[Fault]) -> None:
    aside = file.with_suffix(".new")
    aside.write_text(json.dumps([asdict(fault) for fault in found]))
    aside.replace(file)


def _continue_when(mark: Path, process: subprocess.Popen[bytes]) -> None:
    """Let a process that was stopped go on after two seconds."""
    while process.poll() is None and not mark.exists():
        time.sleep(0.05)
    time.sleep(2.0)
    if process.poll() is None:
        process.send_signal(signal.SIGCONT)


def _outcome(cell: Cell, folder: Path, expected: Path, struck: bool, wall_s: float, error: str | None) -> Outcome:
    lines = (folder / FILE).read_text().splitlines() if (folder / FILE).exists() else []
    rows = [json.loads(line) for line in lines]
    # A driver that dies leaves no line of it; one that was only stopped has lost nothing.
    named = cell.ends_the_process or any(cell.victim in row.get("error", "") for row in rows)
    difference = error or difference_of(folder, expected)
    down_s = tuple(row["down_s"] for row in rows if "down_s" in row)
    return Outcome(cell.name, struck, error is None, named, difference, down_s, wall_s, error)


def difference_of(found: Path, expected: Path) -> str | None:
    """The first difference between two runs that should be equal to the last bit, times apart; None where they are."""
    last = [checkpoint.latest(run / "checkpoints") for run in (found, expected)]
    if last[0] is None or last[1] is None or last[0].name != last[1].name:
        return f"the last checkpoints are {last}"
    checkpoint.verify(last[0])
    for path in sorted(last[1].rglob("*.safetensors")):
        name = path.relative_to(last[1])
        tensors, others = load_file(last[0] / name), load_file(path)
        if tensors.keys() != others.keys():
            return f"{name}: other tensors"
        for key, tensor in tensors.items():
            if tensor.tobytes() != others[key].tobytes():
                return f"{name}: {key}"
    rows, other_rows = ([_timeless(row) for row in read(run)] for run in (found, expected))
    return None if rows == other_rows else "metrics.jsonl"


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    clock = ("time/", "farm/", "wall_s", "learner/update_s")
    return {key: value for key, value in row.items() if not key.startswith(clock)}


@dataclass(frozen=True)
class Faults:
    """The matrix, or some of it."""

    only: str = ""
    """Cells whose names contain this."""
    json: Path | None = None
    """Write the outcomes to this file."""


def main(settings: Faults) -> None:
    cells = [cell for cell in matrix() if settings.only in cell.name]
    outcomes = []
    with tempfile.TemporaryDirectory() as folder:
        for outcome in Lab(Path(folder)).run(cells):
            outcomes.append(outcome)
            down = ", ".join(f"{seconds:.1f} s" for seconds in outcome.down_s) or "-"
            verdict = "recovered" if outcome.good else f"NOT RECOVERED: {outcome.difference}, named {outcome.named}"
            print(
                f"{len(outcomes):3}/{len(cells)}  {outcome.cell:48} {verdict}  down {down}  {outcome.wall_s:.0f} s",
                flush=True,
            )
    down_s = sorted(seconds for outcome in outcomes for seconds in outcome.down_s)
    figures: dict[str, Any] = {
        "cells": len(outcomes),
        "recovered": sum(outcome.good for outcome in outcomes),
        "median_down_s": down_s[len(down_s) // 2] if down_s else None,
        "longest_down_s": down_s[-1] if down_s else None,
        "outcomes": [asdict(outcome) for outcome in outcomes],
    }
    show_and_write(figures, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Faults, description=__doc__))
