"""Where workers live: in this process, or as Ray actors on one machine or many.

Ray ends a process that has lost its raylet, unless the process with the number in RAY_RAYLET_PID lives; where none is
given, the process's parent counts instead, which Ray takes for dead where it is process 1: after `nohup`, or in a
container. A driver is to outlive its raylet, and so gives its own number. Ray reads it when it is imported, which the
modules of this folder do. Workers of Ray have the number of their raylet.
"""

import os
from pathlib import Path

_NUMBER = "RAY_RAYLET_PID"


def _is_raylet(number: str) -> bool:
    try:
        return Path(f"/proc/{int(number)}/comm").read_text().strip() == "raylet"
    except (ValueError, OSError):
        return False


if not _is_raylet(os.environ.get(_NUMBER, "")):
    os.environ[_NUMBER] = str(os.getpid())
