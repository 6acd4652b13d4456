"""The blocks of the pages: what is typed, what is a file, what is Python, and what is only shown."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
GENERATED = ("cli.md", "settings.md", "architecture.md")
"""Pages of docs/ that `make docs` writes; no command stands in them."""
PAGES = ("README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))
PROGRAMS = (
    "embodied", "make", "python", "python3.11", "pip", "pytest", "git", "cd", "source", "export", "sh", "ray", "vllm",
    "echo", "cat", "hf",
)  # fmt: skip
FILE = re.compile(r"(?:import [^#\n]*)?# ((?:\w+/)*\w+\.(?:py|yaml))\b")
"""First line of a block that is a file."""
VARIABLES = re.compile(r"(?:[A-Z_0-9a-z]+=\S+ +)*")


@dataclass(frozen=True)
class Block:
    """A block of a page between two lines of three backquotes."""

    page: str
    line: int
    """Of its first line, from 1."""
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def first(self) -> str:
        return self.text.partition("\n")[0]

    @property
    def file(self) -> str | None:
        """Name of the file that it is."""
        found = FILE.match(self.text) if self.language in ("python", "yaml") else None
        return found[1] if found else None

    @property
    def is_script(self) -> bool:
        return self.text.startswith("#!")

    @property
    def commands(self) -> list[Command]:
        """What is typed, in order, without comments; nothing where the block is of another kind."""
        if self.language not in ("", "sh", "bash") or not _program(self.first.removeprefix("$ ")):
            return []
        found, begun = [], None
        for number, line in enumerate(self.text.splitlines(), self.line):
            if begun is None and line.startswith("$ "):  # beside what it prints
                line = line.removeprefix("$ ")
            elif begun is None and self.first.startswith("$ "):
                continue
            if begun is None and not line.strip():
                continue
            number, before = begun or (number, "")
            text = f"{before}\n{line}" if before else line
            if line.endswith("\\"):
                begun = (number, text)
                continue
            try:
                shlex.split(text, comments=True)
            except ValueError:  # a quotation goes on in the next line
                begun = (number, text)
                continue
            begun = None
            found.append(Command(self.page, number, _without_comment(text)))
        return found

    @property
    def printed(self) -> str:
        """What a block shows of a command's output: all of it, or what follows a line with a prompt."""
        return self.text.partition("\n")[2] if self.first.startswith("$ ") else "" if self.commands else self.text


@dataclass(frozen=True)
class Command:
    """A command of a page, as it is typed but for its comment."""

    page: str
    line: int
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def words(self) -> list[str]:
        """Program and arguments, without variables before them."""
        return shlex.split(VARIABLES.sub("", self.text, count=1).replace("\\\n", " "))


def blocks_of(page: str) -> Iterator[Block]:
    """The blocks of the page of that path below the project's root, in order."""
    begun: tuple[int, str] | None = None
    lines: list[str] = []
    for number, line in enumerate((ROOT / page).read_text().splitlines(), 1):
        if line.startswith("```"):
            if begun is not None:
                yield Block(page, *begun, "".join(f"{one}\n" for one in lines))
            begun, lines = (None, []) if begun is not None else ((number + 1, line[3:].strip()), [])
        elif begun is not None:
            lines.append(line)


def _program(line: str) -> bool:
    words = VARIABLES.sub("", line, count=1).split()
    return bool(words) and words[0] in PROGRAMS


def _without_comment(text: str) -> str:
    """Without what follows a `#` after blanks outside of quotations."""
    quote = ""
    for at, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (at == 0 or text[at - 1].isspace()):
            return text[:at].rstrip()
    return text.rstrip()
