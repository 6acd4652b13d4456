"""Runtimes: workers in this process, or as Ray actors on one machine or many.

Ray ends a process that has lost its raylet, unless the process with the id in RAY_RAYLET_PID lives. Without that
variable the process's parent counts, which Ray takes for dead where it is process 1: after `nohup`, or in a container.
A driver has to outlive its raylet, and so sets its own id. Ray reads the variable when it is imported, which the
modules of this folder do. Ray's workers have the id of their raylet.
"""

import os
import sys
from pathlib import Path

from embodied.errors import UserError

_NUMBER = "RAY_RAYLET_PID"


def _is_raylet(number: str) -> bool:
    try:
        return Path(f"/proc/{int(number)}/comm").read_text().strip() == "raylet"
    except (ValueError, OSError):
        return False


if not _is_raylet(os.environ.get(_NUMBER, "")):
    os.environ[_NUMBER] = str(os.getpid())


def check_interpreter() -> None:
    """Raise `UserError` if the path of this Python has a blank: Ray's raylet does not quote it, and would wait for
    workers that never start."""
    if any(character.isspace() for character in sys.executable):
        raise UserError(
            f"Ray starts its workers by the path of this Python, which has a blank: {sys.executable!r}. Make the "
            "virtual environment in a folder without one, or run everything in one process: --runtime.mode inline"
        )
