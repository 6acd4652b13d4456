"""docs/operating.md explains messages: the code says them in these words."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "operating.md"
VARIES = r"…|\b[A-Z]+\b"
"""What stands for something else in a message on the page: NAME, METHOD, N and the like."""
LEAST = 8
"""Characters of a piece that is looked for."""


def _messages() -> list[str]:
    """The first cells of the table of messages, by what stands in backquotes."""
    table = PAGE.read_text().partition("## Messages")[2].partition("**Exit status")[0]
    cells = re.findall(r"^\| (`.*?`) \|", table, re.MULTILINE)
    return [message for cell in cells for message in re.findall("`(.*?)`", cell)]


def _texts() -> str:
    """Every text in the code, with `\\0` for what is inserted into it."""
    found = []
    for package in ("embodied", "sim_farm", "policies"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


@pytest.fixture(scope="module")
def texts() -> str:
    return _texts()


def test_there_is_a_table() -> None:
    assert len(_messages()) > 20


@pytest.mark.parametrize("message", _messages())
def test_a_message_has_these_words(message: str, texts: str) -> None:
    pieces = [piece.strip(" ,.:;'") for piece in re.split(VARIES, message)]
    quoted = [piece for piece in pieces if len(piece) >= LEAST]
    assert quoted, f"nothing to look for in {message!r}"
    for piece in quoted:
        assert piece in texts, f"{PAGE.name} has {piece!r}, which no message has"
