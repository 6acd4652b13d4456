"""An environment that notes in a file of which kind its process is."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np

FOLDER = "FARM_TESTS_NOTES"
"""Variable that names the folder of the files."""
IMPORTED_IN = os.getpid()


class Noted(gymnasium.Env[Any, Any]):
    """Its file is called as the process's number."""

    def __init__(self, **more: Any) -> None:
        notes = {"imported_in": IMPORTED_IN, "parent": os.getppid(), "drawn": np.random.random(), **more}  # noqa: NPY002
        Path(os.environ[FOLDER], str(os.getpid())).write_text(json.dumps(notes))
        self.observation_space = self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


if "farm-forks/Noted-v0" not in gymnasium.registry:
    gymnasium.register("farm-forks/Noted-v0", entry_point=f"{__name__}:Noted", max_episode_steps=5)
