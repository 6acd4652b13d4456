"""Set-up: pins, extras, the Makefile's targets, and that the second time nothing is installed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sim_farm.registry import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
OWN = "embodied-farm"
HASHES = ROOT / "setup" / "hashes.txt"
APART = {"trackio"}
"""Wants another Pillow than is pinned: who uses it installs it without constraints.txt."""


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pairs = [re.fullmatch(r"([a-z0-9-]+)==([0-9][0-9a-z.\-]*)", line) for line in lines]
    assert None not in pairs, "each line is name==version, without a build such as +cpu"
    return {pair[1]: pair[2] for pair in pairs if pair}


def requirements() -> list[Requirement]:
    """Every requirement of the project and its extras, other than on its own extras."""
    extras = project()["optional-dependencies"].values()
    texts = [*project()["dependencies"], *(text for extra in extras for text in extra)]
    return [found for text in texts if (found := Requirement(text)).name != OWN]


def test_every_pin_has_hashes_of_its_version() -> None:
    entries = re.findall(r"^(\S+)==(\S+)((?: \\\n    --hash=sha256:[0-9a-f]{64})+)$", HASHES.read_text(), re.MULTILINE)
    found = {name: version for name, version, _ in entries}
    assert found == {name: version for name, version in pins().items() if name not in ("torch", "torchvision")}, (
        "run setup/lock.py after a pin has changed"
    )


def test_every_requirement_stops_before_the_next_major_version() -> None:
    for requirement in requirements():
        pinned = next((spec.version for spec in requirement.specifier if spec.operator == "=="), None)
        assert pinned or any(spec.operator == "<" for spec in requirement.specifier), f"{requirement} has no ceiling"


def run(command: list[str], cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    # `make test` hands its own flags on to a make inside a test.
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=inherited | environment)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree that was never set up, with everything the set-up reads."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "setup", tmp_path / "setup")
    (tmp_path / "embodied/doctor").mkdir(parents=True)
    for name in ("checks.py", "probes.py"):
        shutil.copy(ROOT / "embodied/doctor" / name, tmp_path / "embodied/doctor")
    return tmp_path


def test_every_requirement_is_pinned_to_a_version_it_allows() -> None:
    pinned = pins()
    for requirement in requirements():
        if requirement.name in APART:
            continue
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_each_simulator_has_the_extra_that_its_error_message_names() -> None:
    assert set(BACKENDS) <= set(project()["optional-dependencies"])


def test_each_part_has_an_extra_and_refers_only_to_extras_that_exist() -> None:
    extras = project()["optional-dependencies"]
    assert {"farm", "policies", "schedulers", "all", "dev", "bench"} <= set(extras)
    references = [Requirement(text) for extra in extras.values() for text in extra if text.startswith(OWN)]
    assert {name for reference in references for name in reference.extras} <= set(extras)


def test_train_sets_up_and_then_trains(tree: Path) -> None:
    steps = run(["make", "--dry-run", "train"], tree).stdout
    order = [steps.index(step) for step in ("setup/python.sh", "setup/system.sh", "embodied train pushcube")]
    assert order == sorted(order)


def test_test_sets_up_and_then_runs_linter_type_checker_and_tests(tree: Path) -> None:
    steps = run(["make", "--dry-run", "test"], tree).stdout
    order = [steps.index(step) for step in ("setup/python.sh", "ruff check", "pyrefly check", "pytest")]
    assert order == sorted(order)


def test_ci_runs_make_test_and_a_share_of_the_slow_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & stat.S_IXUSR
    shebang, *lines = script.read_text().splitlines()
    assert shebang.endswith("bash")
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make test", "make test-share"]


def test_a_folder_whose_path_has_a_blank_is_refused_at_once(tree: Path) -> None:
    folder = tree / "with blank"
    shutil.copytree(tree / "setup", folder / "setup")
    done = run(["sh", "setup/python.sh"], folder)
    assert done.returncode == 1 and "the path of this folder has a blank" in done.stderr
    assert not (folder / ".venv").exists()


def test_second_set_up_does_nothing_until_the_pins_change(tree: Path) -> None:
    first = run(["make", "--dry-run", "setup"], tree).stdout
    stamps = re.findall(r"^touch (\S+)$", first, re.MULTILINE)
    assert len(stamps) == 2
    for stamp in stamps:
        (tree / stamp).parent.mkdir(exist_ok=True)
        (tree / stamp).touch()
    assert run(["make", "--question", "setup"], tree).returncode == 0

    with (tree / "constraints.txt").open("a") as constraints:
        constraints.write("another-package==1.0\n")
    assert run(["make", "--question", "setup"], tree).returncode == 1
    assert "setup/python.sh" in run(["make", "--dry-run", "setup"], tree).stdout


def test_without_a_suitable_python_the_set_up_says_so(tree: Path) -> None:
    result = run(["sh", "setup/python.sh"], tree, PYTHON="no-such-python")
    assert result.returncode != 0
    assert "no Python 3.11 or 3.12 found (tried: no-such-python)" in result.stderr
    assert not (tree / ".venv").exists()


@pytest.mark.slow
def test_set_up_that_may_not_install_vulkan_prints_how_and_goes_on(tree: Path) -> None:
    (tree / ".venv").symlink_to(sys.prefix)
    empty = tree / "no-drivers"
    empty.mkdir()
    without = {"VK_DRIVER_FILES": str(empty), "VK_ICD_FILENAMES": str(empty), "SYSTEM_PACKAGES": "no"}
    result = run(["sh", "setup/system.sh"], tree, **without)
    assert result.returncode == 0
    assert "no working vulkan. Type this" in result.stderr
    assert "Mesa" in result.stderr or "mesa-vulkan-drivers" in result.stderr


@pytest.mark.slow
def test_set_up_that_finds_vulkan_and_opengl_asks_for_nothing(tree: Path) -> None:
    (tree / ".venv").symlink_to(sys.prefix)
    result = run(["sh", "setup/system.sh"], tree, SYSTEM_PACKAGES="no")
    assert result.returncode == 0
    assert "Type this" not in result.stderr


def test_set_up_that_may_not_install_chromium_prints_how_and_goes_on(tree: Path) -> None:
    programs = tree / "programs"  # a machine with apt-get, without a browser
    programs.mkdir()
    (programs / "apt-get").symlink_to("/bin/true")
    for name in ("sh", "id"):
        (programs / name).symlink_to(shutil.which(name) or name)
    (tree / ".venv" / "bin").mkdir(parents=True)
    (tree / ".venv" / "bin" / "python").symlink_to("/bin/true")  # it finds MagickWand
    result = run(["sh", "setup/test_programs.sh"], tree, PATH=str(programs), SYSTEM_PACKAGES="no")
    assert result.returncode == 0
    assert "no chromium. Type this" in result.stderr and "install -y --no-install-recommends chromium" in result.stderr
    (programs / "chromium").symlink_to("/bin/true")
    found = run(["sh", "setup/test_programs.sh"], tree, PATH=str(programs))
    assert found.returncode == 0 and not found.stdout + found.stderr


def test_both_containers_copy_what_the_set_up_reads_and_call_it(tmp_path: Path) -> None:
    docker, apptainer = (ROOT / "Dockerfile").read_text(), (ROOT / "apptainer.def").read_text()
    lines = [line.split()[1:-1] for line in docker.splitlines() if line.startswith("COPY ")]
    copied = {name for names in lines for name in names}
    files = apptainer.partition("%files\n")[2].partition("\n\n")[0].splitlines()
    assert {line.split()[0] for line in files} == copied
    for name in copied:
        (tmp_path / name).symlink_to(ROOT / name)
        assert (ROOT / name).exists(), name
    steps = run(["make", "--dry-run", "setup"], tmp_path)
    assert steps.returncode == 0 and "setup/python.sh" in steps.stdout and "setup/system.sh" in steps.stdout
    for text in (docker, apptainer):
        assert len(re.findall(r"GPU=.* make setup\b", text)) == 1
        assert not re.search(r"pip install|\bsetup/\w|\.sh\b", text), "the set-up is make's"


def test_an_image_for_a_gpu_gets_torch_with_cuda() -> None:
    script = ". setup/common.sh; has_gpu && echo yes"
    assert run(["sh", "-c", script], GPU="yes").stdout == "yes\n"


def test_the_citation_has_the_project_s_version_and_licence() -> None:
    found = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    # Those that version 1.2.0 of the format requires.
    assert {"authors", "cff-version", "message", "title"} <= set(found) and found["cff-version"] == "1.2.0"
    assert (found["version"], found["license"]) == (project()["version"], project()["license"])
