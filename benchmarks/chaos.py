"""One random fault every ten seconds of a training run: does it end as if nothing had happened?

`python -m benchmarks.chaos --json FILE` trains twice with the same settings: undisturbed, and while every `--every`
seconds a process of the run is killed, stopped, or made to raise, drawn with `--seed`. A killed driver is started again
with `--resume auto`. At the end the checkpoints and metrics of both are compared to the last bit.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import tyro

from benchmarks.faults import STATES, difference_of, write_faults
from embodied.config.files import parse_config, save_config
from embodied.execution.recovery import FILE
from embodied.reporting.metrics import read
from embodied_bench.settings import show_and_write
from sim_farm.workers import faults
from sim_farm.workers.faults import Fault

RAISED = (
    ("physics 0", "step"), ("physics 1", "step"), ("physics 1", "reset"), ("policy", "rollout"),
    ("policy", "load_weights"), ("learner", "receive"), ("learner", "finish"), ("learner", "save"),
)  # fmt: skip
"""Where an exception may strike."""
ROLES = {"workers": 12, "raylet": 1, "gcs_server": 1, "driver": 1}
"""How often each is drawn, of those whose process is killed or stopped."""
DEADLINE_S = 15.0
"""Of a call: a stopped process costs so much."""


@dataclass(frozen=True)
class Chaos:
    """Training under random faults."""

    seconds: float = 600.0
    """So long faults are injected; the run then goes on to its end without any."""
    every: float = 10.0
    """Seconds from one fault to the next."""
    iterations: int = 6000
    """Enough that the run lasts longer than its faults."""
    seed: int = 0
    json: Path | None = None
    """Write the result to this file."""


@dataclass
class LearnerRole:
    """`embodied train` in a process of its own, which is started again when it was killed."""

    folder: Path
    name: str
    env: dict[str, str]
    starts: int = 0
    codes: list[int] = field(default_factory=list)
    """What each start but the last ended with."""
    _process: subprocess.Popen[bytes] | None = None

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def ended(self) -> bool:
        """Whether it has come to its end; begins it, or begins it again, where it is not running."""
        code = None if self._process is None else self._process.poll()
        if self._process is not None and code is None:
            return False
        if code == 0:
            return True
        if code is not None:
            self.codes.append(code)
        command = [
            sys.executable, "-m", "embodied.cli", "train", str(self.folder / "chaos.yaml"), "--name", self.name,
            "--runs-dir", str(self.folder), "--eval.episodes", "1", "--eval.videos", "0", "--resume", "auto",
        ]  # fmt: skip
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(command, env=self.env, stdout=log, stderr=subprocess.STDOUT)
        self.starts += 1
        return False

    def processes(self, role: str) -> list[psutil.Process]:
        """Those of a role that run now."""
        if self._process is None or self._process.poll() is not None:
            return []
        driver = psutil.Process(self._process.pid)
        if role == "driver":
            return [driver]
        found = []
        for process in driver.children(recursive=True):
            try:
                named, title = process.name(), " ".join(process.cmdline())
            except psutil.NoSuchProcess:
                continue
            if (title.startswith("ray::_") if role == "workers" else named == role) and not _gone(process):
                found.append(process)
        return found


def _gone(process: psutil.Process) -> bool:
    return bool(process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD))


@dataclass
class Adversary:
    """Draws a fault and injects it."""

    learner: LearnerRole
    file: Path
    drawn: random.Random
    injected: Counter[str] = field(default_factory=Counter)
    _stopped: list[tuple[float, psutil.Process]] = field(default_factory=list)
    _waiting: str | None = None
    """The exception that is to strike next."""

    def strike(self) -> None:
        kind = self.drawn.choice(("kill", "stop", "raise"))
        if kind == "raise":
            worker, phase = self.drawn.choice(RAISED)
            self._note_raised()
            write_faults(self.file, [Fault(worker, phase, "raise")])
            self._waiting = f"{worker}, raise"
            return
        role = self.drawn.choices(list(ROLES), list(ROLES.values()))[0]
        number, found = self.drawn.random(), self.learner.processes(role)
        if not found:  # it is just being started again
            self.injected["nobody there"] += 1
            return
        victim = found[int(number * len(found))]
        try:
            victim.send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        except psutil.NoSuchProcess:
            self.injected["nobody there"] += 1
            return
        self.injected[f"{role}, {kind}"] += 1
        if role == "driver" and kind == "stop":  # as from a terminal, which lets it go on
            self._stopped.append((time.monotonic() + 2.0, victim))

    def _note_raised(self) -> None:
        """Count the last exception if it has struck."""
        mark = Path(f"{self.file}.fired-0")
        if mark.exists() and self._waiting is not None:
            self.injected[self._waiting] += 1
        mark.unlink(missing_ok=True)
        self._waiting = None

    def let_go_on(self) -> None:
        now = time.monotonic()
        for until, process in self._stopped:
            if now >= until and process.is_running():
                process.send_signal(signal.SIGCONT)
        self._stopped = [(until, process) for until, process in self._stopped if now < until]

    def finish(self) -> None:
        self._note_raised()
        write_faults(self.file, [])


def main(settings: Chaos) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        runtime = {"mode": "ray", "deadline_s": DEADLINE_S}
        data = {
            **STATES,
            "iterations": settings.iterations,
            "checkpoint_every": 20,
            "keep_checkpoints": 3,
            "runtime": runtime,
        }
        save_config(parse_config(data, "benchmarks/chaos.py"), folder / "chaos.yaml")
        begin = time.monotonic()
        calm = LearnerRole(folder, "undisturbed", dict(os.environ))
        while not calm.ended():
            time.sleep(0.2)
        calm_s, begin = time.monotonic() - begin, time.monotonic()
        print(f"undisturbed: {calm_s:.0f} s", flush=True)
        learner, injected = under_fire(settings, folder)
        rows = [json.loads(line) for line in (learner.run / FILE).read_text().splitlines()]
        down_s = sorted(row["down_s"] for row in rows if "down_s" in row)
        figures: dict[str, Any] = {
            **asdict(settings),
            "injected": dict(sorted(injected.items())),
            "faults": sum(injected.values()) - injected["nobody there"],
            "losses_noted": sum(row["outcome"] in ("the run goes on", "it was replaced") for row in rows),
            "drivers_started": learner.starts,
            "drivers_ended_with": learner.codes,
            "median_down_s": down_s[len(down_s) // 2] if down_s else None,
            "undisturbed_s": calm_s,
            "disturbed_s": time.monotonic() - begin,
            "difference": difference_of(learner.run, calm.run),
        }
        if settings.json is not None:
            kept = settings.json.with_suffix(".run.log")
            kept.write_bytes((folder / f"{learner.name}.log").read_bytes())
        show_and_write({**figures, "json": None}, settings.json)


def under_fire(settings: Chaos, folder: Path) -> tuple[LearnerRole, Counter[str]]:
    """The learner once it has ended, and how often each fault was injected."""
    file = folder / "faults.json"
    file.write_text("[]")
    learner = LearnerRole(folder, "disturbed", {**os.environ, faults.VARIABLE: str(file)})
    adversary = Adversary(learner, file, random.Random(settings.seed))
    begin = time.monotonic()
    due = begin + settings.every
    while not learner.ended():
        now = time.monotonic()
        adversary.let_go_on()
        if now >= due and now - begin < settings.seconds:
            adversary.strike()
            due += settings.every
            done = len(read(learner.run)) if (learner.run / "metrics.jsonl").exists() else 0
            print(f"{now - begin:5.0f} s  iteration {done}  {dict(adversary.injected)}", flush=True)
        elif now - begin >= settings.seconds:
            adversary.finish()
        time.sleep(0.1)
    adversary.finish()
    return learner, adversary.injected


if __name__ == "__main__":
    main(tyro.cli(Chaos, description=__doc__))
