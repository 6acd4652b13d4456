"""An environment in which LeRobot's own SmolVLA runs beside the project's Python and libraries."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PACKAGES = (
    "draccus==0.11.5", "mergedeep==1.3.4", "pyyaml-include==1.4.1", "typing-inspect==0.9.0", "mypy-extensions==1.1.0",
    "toml==0.10.2", "einops==0.8.1", "termcolor==3.1.0",
)  # fmt: skip
"""What LeRobot imports and the project does not install."""
PARAMETERS = re.compile(r"^(class|def) (\w+)\[([^\]]+)\](\((.*)|:.*)$", re.MULTILINE)
"""A class or function with type parameters, which Python 3.12 has and 3.11 has not."""
SCRIPT = Path(__file__).parent / "with_lerobot.py"
ROOT = Path(__file__).parents[3]


def install(folder: Path) -> Path:
    """Install LeRobot 0.6.1 into the folder, and rewrite its statements of Python 3.12. Returns the folder."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    newer = ["--python-version", "3.12", "--only-binary=:all:"]
    for arguments in ([*newer, "lerobot==0.6.1"], [*PACKAGES]):
        subprocess.run([*pip, *arguments], check=True)
    for path in (folder / "lerobot").rglob("*.py"):
        text = path.read_text()
        older = without_type_parameters(text)
        if older != text:
            path.write_text(older)
    return folder


def without_type_parameters(text: str) -> str:
    """The module's text in the syntax of Python 3.11."""
    names: dict[str, None] = {}

    def generic(found: re.Match[str]) -> str:
        kind, name, parameters, rest = found[1], found[2], found[3], found[4]
        own = [parameter.partition(":")[0].strip() for parameter in parameters.split(",")]
        names.update(dict.fromkeys(own))
        if kind == "def":
            return f"def {name}{rest}"
        bases = rest[1:] if rest.startswith("(") else f"){rest}"
        return f"class {name}(Generic[{', '.join(own)}], {bases}"

    text = re.sub(r"^type (\w+) = ", r"\1 = ", text, flags=re.MULTILINE)
    text = PARAMETERS.sub(generic, text)
    if not names:
        return text
    variables = "".join(f"{name} = TypeVar({name!r})\n" for name in names)
    first = re.search(r"^(import|from) (?!__future__)", text, re.MULTILINE)
    assert first is not None
    place = first.start()
    return f"{text[:place]}from typing import Generic, TypeVar\n{variables}{text[place:]}"


def run(folder: Path, *arguments: str) -> None:
    """Run `with_lerobot.py` with the packages of the folder. Raises `AssertionError` with what it printed."""
    path = os.pathsep.join([str(ROOT), str(folder)])
    settings = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *arguments]
    done = subprocess.run(command, env=settings, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
