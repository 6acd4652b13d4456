"""What a part of a stage is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


@dataclass(frozen=True)
class Work:
    """One part, in the process that runs it."""

    variant: str
    """What follows the stage's name: a model, a task, a way. Empty where a stage has one part."""
    model: str
    """A name of `policies.openvla.sizes` or `policies.pi0.sizes`: `openvla-7b`."""
    device: str
    """`cuda` or `cpu`."""
    scratch: Path
    """A folder of its own, which the runner deletes afterwards."""
    keep: Callable[[Figures], None]
    """Keep what is measured so far: it stays, whatever happens to this process."""

    @property
    def tiny(self) -> bool:
        """Sizes at which it is tried whether everything runs, in seconds."""
        return self.device == "cpu"
