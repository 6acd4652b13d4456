"""The result of a benchmark: its figures, with time, hardware and command of the measurement."""

from __future__ import annotations

import json
import shlex
import sys
from datetime import date
from pathlib import Path
from typing import Any

from embodied.doctor.hardware import hardware
from embodied.reporting.results import write_json


def provenance() -> dict[str, str]:
    """When, on what and by which command the figures are measured: it stands before each of them."""
    program = Path(sys.argv[0])
    started = f"python {program}" if program.suffix == ".py" else program.name
    return {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "command": " ".join([started, shlex.join(sys.argv[1:])]).rstrip(),
    }


def show_and_write(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures of the script that runs; write them to `path` too, if one is given."""
    result = provenance() | figures
    print(json.dumps(result, indent=1))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
