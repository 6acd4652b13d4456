"""Prints what the project needs from others, its optional parts included, a line each: `python setup/requirements.py`;
what other extras need: `python setup/requirements.py docs`.

pip compares hashes of what comes from an index, and the project itself comes from none.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
EXTRAS = ("all", "dev", "bench")


def main() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {*project["dependencies"], *(need for extra in sys.argv[1:] or EXTRAS for need in needs_of(project, extra))}
    print("\n".join(sorted(found)))


def needs_of(project: dict[str, Any], extra: str) -> Iterator[str]:
    for need in project["optional-dependencies"][extra]:
        own = re.fullmatch(rf"{re.escape(project['name'])}\[(.*)\]", need)
        if own is None:
            yield need
        else:
            for other in own[1].split(","):
                yield from needs_of(project, other.strip())


if __name__ == "__main__":
    main()
