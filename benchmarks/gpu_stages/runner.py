"""Runs parts one after the other, each in a process of its own with a deadline, and keeps what they measure."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.parts import Part
from benchmarks.gpu_stages.record import MEASURED, Entry, Record

SOURCES = ("embodied", "sim_farm", "policies", "schedulers", "extensions", "benchmarks/gpu_stages")
MARK = "EMBODIED_GPU_STAGE"
"""Variable by which every process that a part has started is recognised, also in a session of its own, as Ray's are."""
GRACE_S = 20.0
"""What a part that is told to end is given for ending its workers."""
LOG_TAIL = 15


@dataclass(frozen=True)
class Machine:
    """What results belong to."""

    hardware: str
    gpu: bool
    versions: dict[str, str]
    error: str
    """Why torch cannot be used; empty where it can."""
    driver: str
    commit: str
    sources: str
    """Digest of everything that is measured."""

    @property
    def identity(self) -> dict[str, str]:
        """What all figures belong to."""
        return {"hardware": self.hardware, "sources": self.sources, "torch": self.versions.get("torch", "none")}

    @property
    def summary(self) -> str:
        torch = f"torch {self.versions.get('torch', 'is not installed')}"
        return f"{torch}{f' (cannot be used: {self.error})' if self.error else ''}, sources {self.sources}"


def look_at_machine(root: Path) -> Machine:
    """Asks a process of its own, so that this one holds nothing of the GPU. Never raises for what is missing."""
    found: dict[str, Any] = {"hardware": "unknown", "gpu": False, "versions": {}, "error": ""}
    try:
        command = [sys.executable, "-m", "benchmarks.gpu_stages.machine"]
        result = subprocess.run(command, env=environment(root, ""), capture_output=True, text=True, timeout=180)
        found |= json.loads(result.stdout) if result.returncode == 0 else {"error": tail(result.stderr, 1)}
    except (subprocess.TimeoutExpired, ValueError) as error:
        found["error"] = f"{type(error).__name__}: {error}"
    driver = output_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], root)
    commit = output_of(["git", "rev-parse", "--short=12", "HEAD"], root)
    if commit and output_of(["git", "status", "--porcelain"], root):
        commit += " with changes"
    return Machine(driver=driver, commit=commit, sources=digest(root), **found)


def digest(root: Path) -> str:
    """Of all sources that are measured: a copy of a working tree may have no git history."""
    found = hashlib.sha256()
    for path in sorted(p for folder in SOURCES for p in (root / folder).rglob("*.py")):
        found.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def environment(root: Path, mark: str) -> dict[str, str]:
    """Of a part's process: packages are found as by this one, also from another folder, as Ray's workers have it."""
    path = [
        str(root),
        str(root / "extensions"),
        *(str(Path(p).resolve()) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p),
    ]
    variables = {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path)), "PYTHONUNBUFFERED": "1", MARK: mark}
    # Nothing asks a network: what is not here is an error at once, not after a minute of trying.
    variables |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**os.environ, **variables}


def output_of(command: Sequence[str], cwd: Path) -> str:
    """What a command prints; empty where it is not there, fails or hangs."""
    try:
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


def tail(text: str, lines: int = LOG_TAIL) -> str:
    return "\n".join(text.strip().splitlines()[-lines:])


class Runner:
    """Runs parts until the time is up."""

    def __init__(self, root: Path, record: Record, machine: Machine, device: str, seconds: float) -> None:
        self._root, self._record, self._machine, self._device = root, record, machine, device
        self._deadline = time.monotonic() + seconds
        self._logs = record.path.with_name(f"{record.path.stem}_logs")
        self.interrupted = False

    def run(self, parts: Sequence[Part], again: bool) -> int:
        """Run what is not measured yet (`again`: all), what failed before last. 0 where all went well."""
        failed = 0
        wanted = [part for part in parts if again or not self._record.is_measured(part.name, self._identity(part))]
        for part in parts:
            if part not in wanted:
                print(f"{part.name:24} measured already")
        # A part that cannot work here would otherwise take every later call's time from the others.
        wanted.sort(key=lambda part: not again and self._record.was_tried(part.name, self._identity(part)))
        for part in wanted:
            left = self._deadline - time.monotonic() - GRACE_S
            if left < part.usual_s:
                why = f"{max(left, 0):.0f} s are left, it takes about {part.usual_s:.0f}"
                print(f"{part.name:24} not begun: {why}; call again")
                continue
            print(f"{part.name:24} ...", flush=True)
            entry = self._measure(part, min(left, part.stage.limit_s))
            self._record.put(part.name, entry)
            failed += entry["state"] != MEASURED
            print(f"{part.name:24} {entry['state']} in {entry['wall_s']:.0f} s{_message_of(entry)}", flush=True)
            if self.interrupted:
                break
        print(f"results: {self._record.path}; what the parts printed: {self._logs}")
        return 1 if failed else 0

    def _measure(self, part: Part, limit_s: float) -> Entry:
        mark, begin = uuid.uuid4().hex, time.monotonic()
        self._logs.mkdir(parents=True, exist_ok=True)
        log = self._logs / f"{part.name.replace('/', '-')}.txt"
        with tempfile.TemporaryDirectory(prefix="gpu-part-") as folder, log.open("w") as printed:
            # The part's own files too: it may have no time to delete 15 GB.
            out, scratch = Path(folder) / "figures.json", Path(folder) / "scratch"
            scratch.mkdir()
            process = subprocess.Popen(
                self._command(part, out, scratch), cwd=self._root, env=self._environment(mark),
                stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            late = ""
            try:
                if not _ended(process, limit_s):
                    late = f"ended after {limit_s:.0f} s"
            except KeyboardInterrupt:
                self.interrupted, late = True, "interrupted"
            finally:
                _end(process, mark)
            result = json.loads(out.read_text()) if out.exists() else {}
        if late:
            state, message = "late", f"{late}; what it had measured until then is kept"
        elif process.returncode == 0:
            state, message = MEASURED, ""
        else:
            state, message = "failed", result.get("message") or _death(process.returncode)
        found = self._provenance(part) | {"state": state, "wall_s": time.monotonic() - begin}
        found["figures"] = result.get("figures", {})
        if message:
            lines = result.get("traceback") or tail(log.read_text(errors="replace")).splitlines()
            found |= {"message": message, "traceback": lines}
        return found

    def _environment(self, mark: str) -> dict[str, str]:
        # Threads of networks so small would only wait for each other.
        single = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if self._device == "cpu" else {}
        return environment(self._root, mark) | single

    def _command(self, part: Part, out: Path, scratch: Path) -> list[str]:
        options = {"out": out, "scratch": scratch, "stage": part.stage.name, "variant": part.variant}
        options |= {"model": part.model, "device": self._device}
        given = [word for name, value in options.items() for word in (f"--{name}", str(value))]
        return [sys.executable, "-m", "benchmarks.gpu_stages", part.stage.module, *given]

    def _provenance(self, part: Part) -> Entry:
        machine = self._machine
        words = ["--only", part.name, *(["--model", part.model] if part.model else [])]
        return {
            "date": datetime.now().isoformat(timespec="minutes"),
            "hardware": machine.hardware,
            "versions": {**machine.versions, "driver": machine.driver or "none"},
            "commit": machine.commit or "unknown",
            "command": shlex.join(
                ["python", "benchmarks/gpu.py", *words, *(["--cpu"] if self._device == "cpu" else [])]
            ),
            "device": self._device,
            "model": part.model,
            "identity": self._identity(part),
        }

    def _identity(self, part: Part) -> dict[str, str]:
        """What a part's figures belong to: with another value of any of these they have to be measured again."""
        return {**self._machine.identity, "device": self._device, "model": part.model}


def _ended(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """End a part that has not ended: as Ctrl-C does, then by force; and whatever it has left behind."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        if not _ended(process, GRACE_S - 5):
            process.kill()
            process.wait()
    for pid in _marked(mark):
        try:
            os.kill(pid, signal.SIGKILL)
        except OSError:
            pass  # it has ended meanwhile


def _marked(mark: str) -> list[int]:
    """Processes of this user that were started, through whomever, with that mark."""
    wanted, found = f"{MARK}={mark}".encode(), []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
        except OSError:
            pass  # another user's, or gone
    return found


def _death(status: int) -> str:
    if status < 0:
        name = signal.Signals(-status).name
        return f"the process was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
    return f"the process ended with status {status} and said nothing"


def _message_of(entry: Entry) -> str:
    return f": {entry['message'].splitlines()[0][:160]}" if entry.get("message") else ""
