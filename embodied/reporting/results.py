"""A command's result as a JSON file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from embodied.errors import UserError


def write_json(path: Path, result: dict[str, Any]) -> None:
    """Write a result; a file that cannot be written is the user's mistake, and the result is shown instead."""
    try:
        path.write_text(json.dumps(result, indent=1, default=str) + "\n")
    except OSError as error:
        shown = json.dumps(result, default=str)
        raise UserError(f"cannot write {path} ({error.strerror}); the result is: {shown}") from error
