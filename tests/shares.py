"""Shares of the slow tests: `.ci/run` runs the default tests and then one share, in turn.

    make test-share               the share that CI runs next at this commit
    make test-share SHARE=3       another one
    python tests/shares.py        the shares and their files

A share is whole files, whose tests share what is expensive. `slow_seconds.json` has each file's seconds, as measured on
one process; `pytest --share K --slow-seconds FILE` adds those of the tests that it ran. A file that is not in it counts
as `UNKNOWN_S`. The file of passes, which tests/README.md shows, is written by `python tests/shares.py --passed K`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
SECONDS = Path(__file__).with_name("slow_seconds.json")
PAGE = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- shares -->\n", "<!-- /shares -->\n"
COUNT = 12
MINUTES = 35
"""Of a share: the tests that have not begun by then are left out, and named."""
UNKNOWN_S = 60.0


@dataclass(frozen=True)
class Share:
    """Files of tests, by their paths from the root, and the seconds that their slow tests take in one process."""

    number: int
    files: tuple[str, ...]
    seconds: float


class NoShare(Exception):
    """There is no share of this number."""


def seconds_of_files() -> dict[str, float]:
    """Measured seconds of the files that are there and have slow tests."""
    measured: dict[str, float] = json.loads(SECONDS.read_text())
    slow = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "tests").rglob("test_*.py")
        if any(word in path.read_text() for word in ("mark.slow", "often("))
    }
    return {file: measured.get(file, UNKNOWN_S) for file in sorted(slow)}


def shares(seconds: dict[str, float], count: int = COUNT) -> list[Share]:
    """Files over `count` shares: the longest first, each into the share that has least."""
    found: list[tuple[float, list[str]]] = [(0.0, []) for _ in range(count)]
    for file in sorted(seconds, key=lambda file: (-seconds[file], file)):
        place = min(range(count), key=lambda index: found[index][0])
        found[place] = found[place][0] + seconds[file], [*found[place][1], file]
    return [Share(index + 1, tuple(sorted(files)), total) for index, (total, files) in enumerate(found)]


def share(number: int) -> Share:
    """Raises `NoShare`."""
    every = shares(seconds_of_files())
    if not 1 <= number <= len(every):
        raise NoShare(f"there is no share {number} of the slow tests: they are 1 to {len(every)}")
    return every[number - 1]


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def next_number() -> int:
    """The share that is run at this commit: in turn with the number of commits."""
    return int(git("rev-list", "--count", "HEAD")) % COUNT + 1


def passed(number: int) -> None:
    """Write into the page that the share passed at this commit. Raises `NoShare`."""
    found = share(number)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    rows = {row.split("|")[1].strip(): row for row in table.splitlines()[2:]}
    commit, minutes = git("rev-parse", "--short=8", "HEAD"), found.seconds / 60
    row = f"| {number} | {len(found.files)} | {minutes:.0f} | {commit}, {date.today()} |"
    rows[str(number)] = row
    head = ["| share | files | minutes of one process | last passed at |", "|---|---|---|---|"]
    lines = [*head, *(rows.get(str(n), f"| {n} | | | not yet |") for n in range(1, COUNT + 1))]
    PAGE.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def main(arguments: list[str]) -> None:
    match arguments:
        case []:
            for one in shares(seconds_of_files()):
                print(f"share {one.number}: {one.seconds / 60:.0f} minutes of one process")
                print(*(f"  {file}" for file in one.files), sep="\n")
        case ["next"]:
            print(next_number())
        case ["--passed", number] if number.isdecimal():
            passed(int(number))
        case _:
            raise NoShare(f"python tests/shares.py [next | --passed NUMBER], not {' '.join(arguments)}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except NoShare as error:
        sys.exit(f"error: {error}")
