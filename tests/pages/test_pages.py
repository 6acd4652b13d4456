"""Every command and program of the pages runs as it is written: in an empty folder, from the wheel, in order.

What is shortened is the amount, never the command (`tables.SHORT`). What a page shows of a command's output is compared
with what it prints, numbers aside. The default run knows every block: each is run, or in a table of `tables.py` with
the reason why not.
"""

from __future__ import annotations

import ast
import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml

import schedulers
from embodied import cli
from embodied.config.files import load_config, parse_config, save_config
from tests.pages import tables
from tests.pages.blocks import PAGES, ROOT, VARIABLES, Block, Command, blocks_of

RUN = [page for page in PAGES if any(block.commands or block.language == "python" for block in blocks_of(page))]
PRELUDE = """
import embodied

def _few(function, **few):
    def call(*given, **named):
        return function(*given, **{**named, **few})
    return call

def _train(config, settings=None, **named):
    few = {"iterations": 1, "eval.episodes": 2, "eval.videos": 0, "runtime.mode": "inline"}
    return _whole(config, {**(settings or {}), **few}, **named)

_whole, embodied.train = embodied.train, _train
embodied.evaluate = _few(embodied.evaluate, episodes=2)
embodied.record = _few(embodied.record, episodes=2)
"""
"""Before a page's Python: few iterations and episodes."""


def entry(table: Iterable[tuple[str, str]], page: str, text: str) -> tuple[str, str] | None:
    """The key of the table that the page's command or block begins with; of several the longest."""
    found = [key for key in table if key[0] == page and text.startswith(key[1])]
    return max(found, key=lambda key: len(key[1]), default=None)


def all_blocks() -> list[Block]:
    return [block for page in PAGES for block in blocks_of(page)]


def commands_of(block: Block) -> list[Command]:
    """What is typed; a script is one command."""
    return [Command(block.page, block.line, block.text)] if block.is_script else block.commands


def is_output(block: Block) -> bool:
    return block.language == "" and bool(block.printed.strip())


def named(page: str, text: str) -> str:
    """With the names that stand for the reader's own."""
    for name, value in tables.NAMES.get(page, ()):
        text = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])" if name.isupper() else re.escape(name), value, text)
    return text


# --- each block has its place


def test_every_block_is_run_or_in_a_table_with_the_reason_why_not() -> None:
    for block in all_blocks():
        if block.language == "python" and block.file is None:
            ast.parse(f"{{{block.text}}}" if block.text.startswith('"') else block.text)
        if block.language == "json":
            schedulers.from_data(schedulers.Plan, json.loads(block.text))
        if block.language == "yaml" and block.file != "cluster.yaml":
            parse_config(yaml.safe_load(block.text), block.place)
        if is_output(block):
            shown = block.printed
            known = entry({**tables.SHOWN, **tables.NOT_COMPARED}, block.page, shown)
            assert known, f"{block.place} shows {shown.splitlines()[0]!r}: say in tests/pages/tables.py what prints it"
        assert block.language in ("", "sh", "bash", "python", "yaml", "json", "toml"), block.place


def test_no_table_names_what_is_on_no_page() -> None:
    typed = {(command.page, command.text) for block in all_blocks() for command in commands_of(block)}
    python = {(block.page, block.text) for block in all_blocks() if block.language == "python"}
    output = {(block.page, block.printed) for block in all_blocks() if is_output(block)}
    for table, texts in (
        (tables.NOT_RUN, typed),
        (tables.INSTEAD, typed),
        (tables.SHORTER, typed | {(page, command) for (page, _), command in tables.INSTEAD.items()}),
        (tables.SKETCHES, python),
        (tables.SHOWN, output),
        (tables.NOT_COMPARED, output),
    ):
        for page, beginning in table:
            assert any(page == its and text.startswith(beginning) for its, text in texts), (page, beginning)
    for page, names in tables.NAMES.items():
        text = (ROOT / page).read_text()
        assert all(name in text for name, _ in names), page
    makefile = (ROOT / "Makefile").read_text()
    for _, command in tables.INSTEAD:
        assert f"\n{command.removeprefix('make ')}: " in makefile, f"the Makefile has no target for `{command}`"


def test_a_block_is_read_as_a_shell_reads_it() -> None:
    text = "$ embodied runs   # all\nrun  state\n\n$ embodied report a b\n"
    assert [command.text for command in Block("page", 3, "", text).commands] == ["embodied runs", "embodied report a b"]
    long = Block("page", 3, "", "embodied eval a \\\n  --json b\nA=1 echo '[1,\n2]' '#'\n\n")
    assert [command.line for command in long.commands] == [3, 5]
    assert [command.words for command in long.commands] == [
        ["embodied", "eval", "a", "--json", "b"], ["echo", "[1,\n2]", "#"],
    ]  # fmt: skip
    assert Block("page", 1, "", "runs/first: a\niter 1\n").commands == []
    assert Block("page", 1, "python", "import numpy  # point.py: x\n").file == "point.py"


# --- commands that are not run


NOT_RUN = [
    command for block in all_blocks() for command in block.commands
    if entry(tables.NOT_RUN, command.page, command.text) and command.words[0] == "embodied" and command.words[2:]
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("page", sorted({command.page for command in NOT_RUN}))
def test_a_command_that_is_not_run_has_options_that_there_are(page: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs/first").mkdir(parents=True)
    save_config(load_config("reach"), tmp_path / "runs/first/config.yaml")
    for command in NOT_RUN:
        if command.page != page:
            continue
        _, verb, *arguments = Command(page, command.line, named(page, command.text)).words
        first = arguments[0] if arguments and not arguments[0].startswith("-") else ""
        try:
            cli._parse(verb, cli.arguments_of(verb), first, arguments)
        except (SystemExit, cli.UserError) as error:
            raise AssertionError(f"{command.place}: `{command.text}`: {error}") from error


@pytest.mark.slow
def test_scripts_of_the_pages_are_read_by_the_shell() -> None:
    scripts = [block for block in all_blocks() if block.is_script]
    assert scripts
    for block in scripts:
        subprocess.run(["bash", "-n"], input=block.text, text=True, check=True)


# --- commands that are run


Shell = Callable[[str], str]


@pytest.fixture
def shell(installed: Path, tmp_path: Path) -> Shell:
    """Runs a command in the test's empty folder with the installed wheel, and returns what it prints."""
    path = os.pathsep.join((str(installed / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(installed), "COLUMNS": "200"}

    def run(command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert done.returncode == 0, f"`{command}` ends with {done.returncode}:\n{done.stdout[-4000:]}"
        return done.stdout

    return run


def shortened(page: str, text: str, as_named: str) -> str:
    """A command of `embodied` with the options after it that make it short. `as_named` has the reader's names in it."""
    verb = VARIABLES.sub("", as_named, count=1).split()[:2]
    if verb[:1] != ["embodied"]:
        return as_named
    options = [tables.SHORT.get(verb[1], "")]
    if verb[1] in tables.INLINE and not any(word in text for word in tables.WITH_WORKERS):
        options.append("--runtime.mode inline")
    key = entry(tables.SHORTER, page, text)
    return " ".join([as_named, *options, *([tables.SHORTER[key]] if key else [])])


def shape(line: str) -> str:
    """A line without its numbers, times and digests, and with single blanks and dashes."""
    line = re.sub(r"\b[0-9a-f]{12,64}\b", "0", line)
    line = re.sub(r"-?\d(?:[\d,:]|\.(?!\.\.))*", "0", line)
    line = re.sub(r"(?:0 (?:h|min) )+0 s\b", "0 s", re.sub(r"\s+", " ", line))
    return re.sub(r"-+", "-", line).strip()


def is_shown_by(wanted: str) -> Callable[[str], object]:
    """Whether a printed line is the page's, of which `...` stands for any part; both without their numbers."""
    return re.compile(".*".join(re.escape(part.strip()) for part in wanted.split("..."))).fullmatch


def assert_shown(shown: str, printed: str, place: str) -> None:
    """Every line that the page shows is one that was printed, numbers aside."""
    found = [shape(line) for line in printed.splitlines()]
    for line in shown.partition("\n\n")[0].splitlines():
        assert any(map(is_shown_by(shape(line)), found)), f"{place} shows {line!r}; printed was:\n{printed}"


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", RUN)
def test_a_page_s_commands_run_as_they_are_written(page: str, shell: Shell, tmp_path: Path) -> None:
    for name in tables.FILES.get(page, ()):
        shutil.copy(ROOT / name, tmp_path)
    for command in tables.PREPARED.get(page, ()):
        shell(shortened(page, command, command))
    printed: dict[str, str] = {}
    python: list[str] = []

    def run_python(line: int) -> None:
        """Blocks of Python that follow one another are one program."""
        if python:
            (tmp_path / f"line_{line}.py").write_text(PRELUDE + "\n".join(python))
            shell(f"python line_{line}.py")
            python.clear()

    def type_in(text: str, line: int) -> None:
        run_python(line)
        if entry(tables.NOT_RUN, page, text):
            return
        instead = entry(tables.INSTEAD, page, text)
        text = tables.INSTEAD[instead] if instead else text
        if text:
            command = shortened(page, text, named(page, text))
            print(f"{page}:{line}: {command}", flush=True)
            printed[text] = shell(command)

    last = 0
    outputs = []
    for block in blocks_of(page):
        last = block.line
        if block.is_script:
            continue
        if block.file is not None:
            (tmp_path / block.file).parent.mkdir(exist_ok=True, parents=True)
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "python" and not entry(tables.SKETCHES, page, block.text):
            python.append(named(page, block.text))
        for command in block.commands:
            type_in(command.text, command.line)
        if is_output(block) and (key := entry(tables.SHOWN, page, block.printed)):
            outputs.append((block, tables.SHOWN[key]))
    run_python(last)
    for command in tables.AFTER.get(page, ()):
        type_in(command, last)
    for block, commands in outputs:
        assert_shown(block.printed, "\n".join(printed[command] for command in commands), block.place)
    assert not glob.glob(str(tmp_path / "**/*.partial"), recursive=True)
