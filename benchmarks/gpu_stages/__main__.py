"""Runs one part in this process: `python -m benchmarks.gpu_stages MODULE --out FILE ...`; `gpu.py` types it.

FILE holds the figures so far from the first `keep` on, and in the end also what went wrong, if anything did.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.work import Figures, Work

TAIL = 25
"""Lines of a traceback that are recorded."""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("module")
    for name in ("out", "scratch", "stage", "variant", "model", "device"):
        parser.add_argument(f"--{name}", required=True)
    options = parser.parse_args()
    out = Path(options.out)
    faulthandler.enable()
    # The runner's deadline arrives as Ctrl-C would, so that every worker is ended by those who made it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kept: Figures = {}

    def keep(figures: Figures) -> None:
        kept.update(figures)
        _write(out, {"figures": kept})

    try:
        run = getattr(importlib.import_module(f"benchmarks.gpu_stages.{options.module}"), options.stage)
        keep(run(Work(options.variant, options.model, options.device, Path(options.scratch), keep)))
    except BaseException as error:  # also KeyboardInterrupt and SystemExit: each is recorded, and is the end here
        lines = traceback.format_exc().strip().splitlines()
        print("\n".join(lines), file=sys.stderr, flush=True)
        message = f"{type(error).__name__}: {error}"[:2000]
        _write(out, {"figures": kept, "message": message, "traceback": lines[-TAIL:]})
        return 1
    return 0


def _write(path: Path, result: dict[str, Any]) -> None:
    aside = path.with_suffix(".partial")
    aside.write_text(json.dumps(result, default=str))
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
