"""Checkpoints that cannot be written, as on a full disk: said once, tried again, and what ends a run says the first."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from embodied.reporting.live import tell
from embodied.run.checkpoint import CheckpointError


class Unwritten:
    """What of a run's checkpoints could not be written since the last that was."""

    def __init__(self) -> None:
        self._first: CheckpointError | None = None
        self._last: CheckpointError | None = None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Within, a checkpoint is written, or begun: where that fails, the run goes on."""
        try:
            yield
        except CheckpointError as error:
            self._last = error
            if self._first is None:
                self._first = error
                tell(
                    f"{error}. The run goes on, and tries again at the next checkpoint. If there is no room on that "
                    "disk, make some: remove what nobody needs, and keep fewer checkpoints (--keep-checkpoints 2)"
                )

    def over(self) -> None:
        """One has been written."""
        if self._first is not None:
            tell("checkpoints are written again")
        self._first = self._last = None

    def error(self) -> CheckpointError:
        """What ends a run whose last checkpoint cannot be written."""
        assert self._first is not None and self._last is not None
        if str(self._first) == str(self._last):
            return self._last
        return CheckpointError(f"{self._last}. The first that could not be written was another: {self._first}")
