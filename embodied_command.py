"""The program `embodied`. It lies beside the package `embodied`, so that it can say where another module of that name
hides the package."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """Run the command line. Returns its exit status; 2 where the package is hidden."""
    message = hidden("embodied")
    if message is not None:
        print(f"embodied: {message}", file=sys.stderr)
        return 2
    from embodied.cli import main

    return main()


def hidden(name: str) -> str | None:
    """A message where `import name` finds another module than the package of that name beside this file, or else None.
    Nothing is imported."""
    ours, found = Path(__file__).resolve().parent / name, _place(name)
    if found is None or not ours.is_dir() or ours in (found.resolve(), found.resolve().parent):
        return None
    return (
        f"{found} hides this project's package {name}, {ours}: rename it, start from another folder, or take its "
        "folder out of PYTHONPATH"
    )


def _place(name: str) -> Path | None:
    """The file that `import name` executes; None where there is none."""
    try:
        spec = find_spec(name)
    except ValueError:  # imported already, from nowhere
        return None
    return None if spec is None or spec.origin is None else Path(spec.origin)
