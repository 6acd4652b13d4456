"""The order of the modules within the runtime: each imports only those that come before it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import embodied.runtime

FOLDER = Path(embodied.runtime.__file__).parent
ORDER = (
    "deadlines", "nodes", "handles", "groups", "supervision", "contract", "memory_budget", "inline", "relay",
    "ray_guard", "ray_session", "ray_processes", "ray_cluster", "ray_lending", "ray_links", "ray_farm",
    "ray_worker_process", "ray_workers", "ray_runtime",
)  # fmt: skip


def imported(path: Path) -> set[str]:
    """Names of the runtime's modules that the file imports, anywhere in it."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "embodied.runtime":
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("embodied.runtime."):
            found.add(node.module.split(".")[2])
        elif isinstance(node, ast.Import):
            found |= {name.name.split(".")[2] for name in node.names if name.name.startswith("embodied.runtime.")}
    return found


@pytest.mark.parametrize("module", ORDER)
def test_a_module_of_the_runtime_imports_only_those_before_it(module: str) -> None:
    above = imported(FOLDER / f"{module}.py") - set(ORDER[: ORDER.index(module)])
    assert not above, f"{module} imports {above}"


def test_every_module_of_the_runtime_has_its_place() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {*ORDER, "__init__"}


def test_only_modules_named_after_ray_import_it() -> None:
    for path in FOLDER.glob("*.py"):
        text = path.read_text()
        assert ("\nimport ray" in text or "\nfrom ray" in text) <= path.name.startswith("ray_"), path


def test_workers_report_progress_without_knowing_the_runtime() -> None:
    assert not imported(FOLDER.parent / "progress.py")
