"""The guard of a Ray that was started here: a small process that outlives its parent by a moment and cleans up.

Where the process that started Ray is killed, the guard ends Ray's processes at once and removes Ray's folder, which
nothing else would. The standard input has one line per process that is to be ended; its end is the end of the parent.

It is run as a file, with only the standard library: it lives as long as the run.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path

KEEP = "keep"
"""The line that lets the folder stay, with Ray's logs in it."""
REMOVING_S = 5.0
"""Longest time of attempts to remove the folder: Ray's workers end within two seconds, and write into it until then."""


def main(folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    kept, watched = False, []
    for line in sys.stdin:
        if line.strip() == KEEP:
            kept = True
            continue
        with contextlib.suppress(OSError):  # it has ended already
            watched.append(os.pidfd_open(int(line)))  # a number could be another process's by then
    for process in watched:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
    until = time.monotonic() + REMOVING_S
    while not kept and folder.exists() and time.monotonic() < until:
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
