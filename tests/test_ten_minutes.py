"""docs/ten-minutes.md and examples/first_hour.ipynb run as they are written, block after block, in an empty folder."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from embodied.cli import main

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "ten-minutes.md").read_text()
SECTIONS = re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
"""First line of a block that is a file."""
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


def work_through(sections: list[str]) -> None:
    """Write, type or execute each block of the sections."""
    names: dict[str, Any] = {}
    for language, text in BLOCK.findall("".join(sections)):
        if file := FILE.match(text):
            Path(file[1]).write_text(text)
        elif language == "python":
            exec(text, names)
        elif language == "sh":
            for line in text.replace("\\\n", "").splitlines():
                program, *arguments = shlex.split(line)
                assert program == "embodied" and main(arguments) == 0, line


def evaluation(run: Path) -> dict[str, Any]:
    assert (run / "report.html").is_file()
    return json.loads((run / "eval.json").read_text())


def test_a_simulator_and_a_policy_of_the_page_learn(folder: Path) -> None:
    work_through([section for section in SECTIONS if section.startswith(DEFAULT)])
    assert evaluation(folder / "runs" / "trolley")["success_rate"] > 0.5
    assert evaluation(folder / "runs" / "mine")["success_rate"] > 0.5


@pytest.mark.slow
def test_the_whole_page_runs_as_written(folder: Path) -> None:
    work_through(SECTIONS)
    names = re.findall(r"--name (\w+)", PAGE)
    assert names == ["first", "second", "trolley", "red", "signs"]
    for name in (*names, "mine", "watched"):
        assert evaluation(folder / "runs" / name)["episodes"] >= 4, name
    assert len((folder / "runs" / "watched" / "metrics.jsonl").read_text().splitlines()) < 20


def test_only_the_installation_is_not_run_here() -> None:
    blocks = BLOCK.findall("".join(SECTIONS))
    assert [text.split()[0] for language, text in blocks if language not in ("sh", "python", "yaml")] == ["git"]
    assert all(FILE.match(text) for language, text in blocks if language == "yaml")


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
