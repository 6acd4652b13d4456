"""The packages' borders: who may import whom."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "sim_farm": {"embodied", "policies", "schedulers", "ray"},
    "policies": {"embodied", "sim_farm", "schedulers", "ray"},
    "schedulers": {"embodied", "sim_farm", "policies", "ray", "torch"},
    "embodied": set(),
}
"""The core's packages, and what none of their modules imports."""
EXTENSIONS = sorted(path.name for path in (ROOT / "extensions").iterdir() if path.is_dir())


LAYERS = (
    {"cli", "commands"},
    {"training"},
    {"demonstrations"},
    {"planning", "evaluation"},
    {"execution"},
    {"rollout"},
    {"learning"},
    {"workflows"},
    {"algorithms", "reporting"},
    {"trajectories"},
    {"runtime"},
    {"doctor", "config", "run"}
    | {"devices", "files", "hub", "errors", "imports", "metric", "progress", "other_programs", "statistics"},
)
"""Of `embodied`, from the top down."""


@cache
def _statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Those that import, wherever in the file."""
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Import | ast.ImportFrom)]


@cache
def _known() -> set[str]:
    """Modules of `embodied`, as dotted names."""
    return {".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "embodied").rglob("*.py")}


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in _statements(path):
        if isinstance(node, ast.Import):
            found |= {name.name.partition(".")[0] for name in node.names}
        elif node.module and node.level == 0:
            found.add(node.module.partition(".")[0])
    return found


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_know_nothing_of_each_other(package: str) -> None:
    for path in (ROOT / package).rglob("*.py"):
        assert not _imports(path) & FORBIDDEN[package], path


@pytest.mark.parametrize("package", FORBIDDEN)
def test_the_core_names_no_extension(package: str) -> None:
    kind = [] if package in ("policies", "sim_farm") else [r"[\"']language[\"']"]  # a part of OpenVLA, and an axis
    names = re.compile("|".join([*EXTENSIONS, "countdown", *kind]))
    for path in (ROOT / package).rglob("*.py"):
        assert not names.search(path.read_text()), path


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_an_extension_knows_the_core_and_no_other_extension(extension: str) -> None:
    for path in (ROOT / "extensions" / extension).rglob("*.py"):
        assert not _imports(path) & ({*EXTENSIONS, "tests", "benchmarks"} - {extension}), path


def _modules(path: Path) -> set[str]:
    """Modules of `embodied` that a file imports, as dotted names."""
    found: set[str] = set()
    for node in _statements(path):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif node.module:
            assert node.level == 0, f"{path}: a relative import"
            found |= {node.module, *(f"{node.module}.{name.name}" for name in node.names)}
    return {name for name in found if name.startswith("embodied.") and name in _known()}


def test_each_folder_imports_only_from_below_its_own_line() -> None:
    line = {name: number for number, names in enumerate(LAYERS) for name in names}
    for path in (ROOT / "embodied").rglob("*.py"):
        mine = path.relative_to(ROOT / "embodied").parts[0].removesuffix(".py")
        if mine == "__init__":  # the front door opens all of them, when it is asked
            continue
        for module in _modules(path):
            other = module.split(".")[1]
            below = line[other] > line[mine] or other == mine or line[other] == line[mine] == len(LAYERS) - 1
            assert below or (mine, other) == ("cli", "commands"), f"{path} imports {module}"


def test_no_modules_import_each_other_in_a_circle() -> None:
    paths = {".".join(p.relative_to(ROOT).with_suffix("").parts): p for p in (ROOT / "embodied").rglob("*.py")}
    order = TopologicalSorter({name: _modules(path) for name, path in paths.items() if "__init__" not in name})
    order.prepare()  # raises CycleError


def test_only_the_runtime_imports_ray() -> None:
    allowed = set((ROOT / "embodied/runtime/ray").glob("*.py"))
    for path in (ROOT / "embodied").rglob("*.py"):
        assert "ray" not in _imports(path) or path in allowed, path


def test_nothing_unpickles_or_runs_remote_code() -> None:
    for package in ("embodied", "sim_farm", "policies", "extensions"):
        for path in (ROOT / package).rglob("*.py"):
            text = path.read_text()
            for call in ("pickle.load", "yaml.load("):
                assert call not in text, f"{path}: {call}"
            # OpenVLA-OFT's side files are in PyTorch's format; restricted to tensors, reading it runs nothing.
            for call in re.findall(r"torch\.load\(.*", text):
                assert call.endswith(", weights_only=True)"), f"{path}: {call}"


@pytest.mark.parametrize("package", ["sim_farm", "policies", "embodied.config.schema", "embodied.run.trace"])
def test_importing_a_front_door_imports_no_simulator(package: str) -> None:
    heavy = "{'mani_skill', 'sapien', 'mujoco', 'ray', 'timm', 'transformers'}"
    code = f"import sys, {package}; found = {heavy} & set(sys.modules); assert not found, found"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
