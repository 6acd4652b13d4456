"""What a benchmark's script leaves: its figures with when, on what and how they were measured."""

from __future__ import annotations

import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

from embodied.cli import write_json
from embodied.hardware import hardware


def show_and_write(figures: dict[str, Any], path: Path | None) -> None:
    """Print the figures of the script that runs; write them to `path` too, if one is given."""
    result = {
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "command": "python " + " ".join(sys.argv),
        **figures,
    }
    print(json.dumps(result, indent=1))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, result)
