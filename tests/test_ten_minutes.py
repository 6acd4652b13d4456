"""docs/ten-minutes.md and examples/first_hour.ipynb run as they are written, block after block, in an empty folder.

At full size, since what is trained is to have learned. `tests/pages` runs the page from the wheel, shortened.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from embodied.cli import main
from tests.pages.blocks import ROOT, Block, blocks_of

PAGE = (ROOT / "docs" / "ten-minutes.md").read_text()
BLOCKS = list(blocks_of("docs/ten-minutes.md"))
DEFAULT = ("2.", "3.", "7.")
"""Sections whose commands the default run types. What the others show has default tests elsewhere."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, whose modules are importable."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("my_")]:
        del sys.modules[name]


def section_of(block: Block) -> str:
    """The heading above the block."""
    above = "\n".join(PAGE.splitlines()[: block.line])
    return re.findall(r"^## (.*)$", above, re.MULTILINE)[-1]


def work_through(blocks: list[Block]) -> None:
    """Write, type or execute each block."""
    names: dict[str, Any] = {}
    for block in blocks:
        if block.file:
            Path(block.file).write_text(block.text)
        elif block.language == "python":
            exec(block.text, names)
        elif block.language == "sh":
            for command in block.commands:
                program, *arguments = command.words
                assert program == "embodied" and main(arguments) == 0, command.place


def evaluation(run: Path) -> dict[str, Any]:
    assert (run / "report.html").is_file()
    return json.loads((run / "eval.json").read_text())


def test_a_simulator_and_a_policy_of_the_page_learn(folder: Path) -> None:
    work_through([block for block in BLOCKS if section_of(block).startswith(DEFAULT)])
    assert evaluation(folder / "runs" / "trolley")["success_rate"] > 0.5
    assert evaluation(folder / "runs" / "mine")["success_rate"] > 0.5


@pytest.mark.slow
def test_the_whole_page_runs_as_written(folder: Path) -> None:
    work_through(BLOCKS)
    names = re.findall(r"--name (\w+)", PAGE)
    assert names == ["first", "second", "trolley", "red", "signs"]
    for name in (*names, "mine", "watched"):
        assert evaluation(folder / "runs" / name)["episodes"] >= 4, name
    assert len((folder / "runs" / "watched" / "metrics.jsonl").read_text().splitlines()) < 20


def test_only_the_installation_is_not_run_here() -> None:
    assert [block.text.split()[0] for block in BLOCKS if block.language not in ("sh", "python", "yaml")] == ["git"]
    assert all(block.file for block in BLOCKS if block.language == "yaml")


@pytest.mark.slow  # what it calls is what the page calls
def test_the_notebook_runs_from_its_first_cell_to_its_last(folder: Path) -> None:
    notebook: Any = nbformat.read(ROOT / "examples" / "first_hour.ipynb", as_version=4)
    nbformat.validate(notebook)
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not cell.outputs, "clear the outputs before you commit it"
            exec(cell.source, names)
    assert names["again"].episodes == 20 and names["page"].is_file()
    assert names["action"].shape == (1, 3) and names["evaluation"].success_rate > 0.5
