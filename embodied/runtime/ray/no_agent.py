"""The process that a raylet starts in place of one of its agents, which nothing here needs.

The raylet waits for files with its agents' ports before it serves, and ends with either of them. So this process writes
the files, with Ray's number for a service that is not in use. Then it waits for the end of its standard input, which is
the raylet's.

It is run as a file, with only the standard library: it lives as long as Ray.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

UNUSED = "-1"


def main(folder: Path, ports: Sequence[str]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is the driver's to decide about
    for port in ports:
        file = folder / f"{port}_{os.environ['RAY_NODE_ID']}"
        part = file.with_name(f"{file.name}.part")  # the raylet must not read a file that is still empty
        part.write_text(UNUSED)
        part.rename(file)
    sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
