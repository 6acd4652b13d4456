"""The wheel and the source archive: they have the configurations and scenes with them, and what is installed works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied.config.files import CONFIGS
from embodied.reporting.metrics import read
from sim_farm.workers import faults
from tests.embodied.run.test_resume import assert_same_run
from tests.embodied.support import stranger

ROOT = Path(__file__).parent.parent
FILES = ("embodied_command.py", "pyproject.toml", "LICENSE", "MANIFEST.in", "CITATION.cff", "constraints.txt")
SOURCES = ("embodied", "sim_farm", "policies", "schedulers", "extensions", "configs", "assets")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy, so that the source tree stays as it is and nothing of an earlier build gets into what is built."""
    copy = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in (*ROOT.glob("*.md"), *(ROOT / name for name in FILES)):
        shutil.copy(path, copy)
    return copy


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive")
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(out)!r})"
    subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, check=True)
    return next(out.glob("*.tar.gz"))


@pytest.fixture(scope="module")
def wheel(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the source archive, which lacks nothing that the source tree's own wheel has."""
    return wheel_of(archive, tmp_path_factory.mktemp("wheel"))


def wheel_of(source: Path, out: Path) -> Path:
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(out), str(source))
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    pip("install", "--no-deps", "--target", str(folder), str(wheel))
    return folder


def pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", "--no-input", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def python(installed: Path, folder: Path, *arguments: str) -> str:
    """What a Python prints that is started in `folder` and finds the installed packages before the source tree's."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(installed)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_archive_has_no_links_and_no_tests(archive: Path) -> None:
    with tarfile.open(archive) as opened:
        members = opened.getmembers()
    assert members and all(member.isfile() or member.isdir() for member in members), "a link leads nowhere"
    assert not [member.name for member in members if "/tests/" in member.name]


@pytest.mark.slow
def test_the_archive_and_the_source_tree_give_equal_wheels(wheel: Path, source: Path, tmp_path: Path) -> None:
    ours, theirs = zipfile.ZipFile(wheel_of(source, tmp_path)), zipfile.ZipFile(wheel)
    assert sorted(ours.namelist()) == sorted(theirs.namelist())
    for linked in (
        "policies/named_code.py",
        "embodied/configs/reach.yaml",
        "sim_farm/backends/tabletop/scenes/reach.xml",
    ):
        assert ours.read(linked) == theirs.read(linked) == (ROOT / linked).read_bytes(), linked


def test_one_wheel_is_for_every_python_and_system(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")


@pytest.mark.slow
def test_a_package_index_would_take_the_archive_and_the_wheel(archive: Path, wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "tool", with_pip=True)
    tool = str(tmp_path / "tool" / "bin" / "python")
    subprocess.run([tool, "-m", "pip", "install", "--quiet", "twine<8"], check=True, capture_output=True)
    check = [tool, "-m", "twine", "check", "--strict", str(archive), str(wheel)]
    done = subprocess.run(check, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") == 2, done.stdout + done.stderr


def test_the_wheel_is_small_and_has_each_scene_once(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert wheel.stat().st_size < 17e6  # of which the small policies that recipes begin with take 13 MB
    assert [name for name in names if name.endswith("/reach.xml")] == ["sim_farm/backends/tabletop/scenes/reach.xml"]
    packaged = {name.partition("/")[0] for name in names if "dist-info" not in name}
    extensions = {path.name for path in (ROOT / "extensions").iterdir() if path.is_dir()}
    assert packaged == {*SOURCES, *extensions, "embodied_command.py"} - {"configs", "assets", "extensions"}
    checkpoints = [path.parent for path in (ROOT / "assets").glob("*/config.json")]
    files = {f"embodied/{path.relative_to(ROOT)}" for folder in checkpoints for path in folder.rglob("*.*")}
    assert files and files <= set(names), "a shipped checkpoint is not whole in the wheel"


def test_configurations_scenes_and_page_are_found_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    code = f"""
from pathlib import Path
from typing import Any
import embodied, sim_farm
from embodied.config.files import CONFIGS
from embodied.reporting import report

assert Path(embodied.__file__).is_relative_to({str(installed)!r}), embodied.__file__
assert Path(report.__file__).with_name("page.html").is_file()
assert {{path.name for path in CONFIGS.glob("*.yaml")}} == set({sorted(p.name for p in CONFIGS.glob("*.yaml"))})
config = embodied.load_config("reach")
physics, renderer = sim_farm.make(config.env.task, cameras=1, size=64)
scene = physics.reset(sim_farm.EpisodeSpec(0)).scene
print(renderer.render([scene], renderer.info.cameras)["front"].std() > 1)
"""
    assert python(installed, tmp_path, "-c", code).split() == ["True"]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "named"),
    [
        ("sim_farm", ("--backend", "own_simulator:BACKEND/reach")),
        pytest.param("policies", ("--policy", "own_policy:Linear"), marks=pytest.mark.slow),
    ],
)
def test_the_conformance_suite_is_one_command(
    package: str, named: tuple[str, str], installed: Path, tmp_path: Path
) -> None:
    for name in ("own_simulator", "own_policy"):
        shutil.copy(ROOT / "examples" / f"{name}.py", tmp_path)
    suite = ("--pyargs", f"{package}.conformance", *named, "--report", "report.json")
    printed = python(installed, tmp_path, "-m", "pytest", "-q", *suite)
    report = json.loads((tmp_path / "report.json").read_text())
    found = [law["outcome"] for law in report["laws"]]
    assert report["examined"] == named[1] and set(found) == {"holds", "not applicable"}
    assert f"the laws of {named[1]}: {found.count('holds')} hold, {found.count('not applicable')} not" in printed


def test_pytest_knows_the_suite_s_options_only_where_it_is_named(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "def test_own(request):\n    assert not hasattr(request.config.option, 'backend')"
    )
    assert "1 passed" in python(installed, tmp_path, "-m", "pytest", "-q", "test_own.py")


def command(installed: Path, folder: Path, *arguments: str) -> str:
    """What the installed command prints that is started in `folder`."""
    return python(installed, folder, str(installed / "bin" / "embodied"), *arguments)


def test_the_installed_command_says_its_version(installed: Path, tmp_path: Path) -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert version in command(installed, tmp_path, "--version")


@pytest.mark.parametrize("own", ["embodied/__init__.py", "embodied.py"])
def test_a_module_called_embodied_is_named_with_ours(own: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / own).parent.mkdir(exist_ok=True)
    (tmp_path / own).write_text("raise RuntimeError('it was imported')")
    path = {**os.environ, "PYTHONPATH": f".{os.pathsep}{installed}"}
    program = [sys.executable, installed / "bin" / "embodied", "train", "reach"]
    done = subprocess.run(program, cwd=tmp_path, env=path, capture_output=True, text=True)
    assert done.returncode == 2 and not done.stdout
    assert done.stderr.startswith(f"embodied: {tmp_path / own} hides this project's package embodied, {installed}")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_installed_command_trains_evaluates_and_reports(installed: Path, tmp_path: Path) -> None:
    small = ("--runtime.mode", "inline", "--eval.episodes", "4", "--eval.videos", "0")
    command(installed, tmp_path, "train", "reach", "--name", "first", "--iterations", "2", *small)
    (tmp_path / "runs" / "first" / "report.html").unlink()
    assert "tabletop/reach" in command(installed, tmp_path, "eval", "first", *small)
    command(installed, tmp_path, "report", "first")
    assert (tmp_path / "runs" / "first" / "report.html").is_file()
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


@pytest.mark.slow
def test_the_doctor_of_an_installed_wheel_says_what_is_there(installed: Path, tmp_path: Path) -> None:
    assert "numpy" in python(installed, tmp_path, "-m", "embodied.cli", "doctor")


@pytest.mark.parametrize("where", ["source", "installed"])
def test_a_shipped_checkpoint_is_found_from_any_folder(where: str, installed: Path, tmp_path: Path) -> None:
    code = """
import embodied
from pathlib import Path
from typing import Any
for name in ("openvla_tiny", "openvla_oft_tiny"):
    policy = embodied.load_config(name).policy
    print((Path(policy.architecture["checkpoint"]) / "config.json").is_file(), policy.options["checkpoint"])
"""
    packages = ROOT if where == "source" else installed
    assert python(packages, tmp_path, "-c", code).splitlines() == ["True assets/openvla_tiny"] * 2


# --- a stranger's package beside ours, in an environment that has neither source tree


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment of its own with our wheel and a stranger's, by `pip` and without a source tree.

    What both depend on, gigabytes, comes from where this process has it: that folder's own links to source trees are
    not followed, as only the folders of the environment itself are looked through for them.
    """
    made = tmp_path_factory.mktemp("environment")
    venv.create(made, with_pip=False, symlinks=True)
    source = tmp_path_factory.mktemp("stranger")
    stranger.write_project(source)
    theirs = wheel_of(source, tmp_path_factory.mktemp("stranger_wheel"))
    pip("--python", str(made / "bin" / "python"), "install", "--no-deps", "--no-index", str(wheel), str(theirs))
    packages = next(made.glob("lib/python*/site-packages"))
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return made


@pytest.fixture
def run_in(environment: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs a program of the environment in the test's empty folder, and returns what it prints."""
    (tmp_path / "faults.json").write_text("[]")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *arguments: str) -> str:
        done = subprocess.run(
            [environment / "bin" / program, *arguments],
            cwd=tmp_path, env={**kept, faults.VARIABLE: str(tmp_path / "faults.json")}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_from_the_wheel_to_an_evaluated_policy_and_its_page(run_in: Callable[..., str], tmp_path: Path) -> None:
    """The commands of docs/start.md after the installation, at full size."""
    run_in("embodied", "train", "reach", "--name", "first", "--stop-at", "0.95")
    assert read(tmp_path / "runs/first")[-1]["env/success_recent"] >= 0.95
    evaluation = json.loads((tmp_path / "runs/first/eval.json").read_text())
    assert evaluation["success_rate"] >= 0.95 and evaluation["episodes"] == 100
    code = """
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread
from embodied.commands.watch import serving
with serving(Path("runs"), 0) as server:
    Thread(target=server.serve_forever, daemon=True).start()
    for path in ("/", "/first/"):
        connection = HTTPConnection("127.0.0.1", server.server_port)
        connection.request("GET", path)
        print(connection.getresponse().read().decode())
    server.shutdown()
"""
    shown = run_in("python", "-c", code)
    assert "finished" in shown and "Success in evaluation" in shown and "data:video/mp4" in shown


INSTALLED = stranger.settings(workflow="halved", policy={"kind": "linear", "options": {"std": 0.4}})
INSTALLED["env"] = {"task": "point/reach", "num_envs": 4}
MANISKILL = INSTALLED | {
    "env": {"task": "stranger.tasks:maniskill/PushGently-v1", "num_envs": 4, "cameras": 1, "image_size": 32},
    "policy": {"kind": "flow", "reads": ["proprio", "images"], "options": {"encoder": "cnn", "features": 16}},
    "rollout": {"decisions": 8},
}
LOST = {"worker": "physics 1", "phase": "step", "kind": "kill"}
RAY = ("--runtime.mode", "ray")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("settings", "code", "nth"),
    [(INSTALLED, (), 20), (MANISKILL, ("--env.task", "stranger.tasks:maniskill/PushGently-v1"), 5)],
    ids=["simulator, policy and estimator", "ManiSkill task"],
)
def test_what_a_stranger_installs_trains_goes_on_survives_and_is_evaluated(
    settings: dict[str, Any], code: tuple[str, ...], nth: int, run_in: Callable[..., str], tmp_path: Path
) -> None:
    places = run_in("python", "-c", "import embodied, stranger; print(embodied.__file__, stranger.__file__)").split()
    assert all("site-packages" in place and not Path(place).is_relative_to(ROOT) for place in places), places
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))

    def train(name: str, *more: str) -> None:
        run_in("embodied", "train", "mine.yaml", "--name", name, *more)

    train("whole")
    train("parts", "--iterations", "2")
    train("parts", "--resume", "auto")
    assert_same_run(tmp_path / "runs/parts", tmp_path / "runs/whole")
    (tmp_path / "faults.json").write_text(json.dumps([LOST | {"nth": nth}]))
    train("ray", "--iterations", "2", *RAY)
    assert (tmp_path / "faults.json.fired-0").exists(), "no worker was lost"
    train("ray", "--resume", "auto", *RAY)
    assert_same_run(tmp_path / "runs/ray", tmp_path / "runs/whole")
    assert [row["iteration"] for row in read(tmp_path / "runs/ray")] == [1, 2, 3]
    printed = [run_in("embodied", "eval", "ray", *code, *mode) for mode in (("--runtime.mode", "inline"), RAY)]
    task = settings["env"]["task"]
    rows = [next(line for line in text.splitlines() if line.startswith(f"| {task}")) for text in printed]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_what_a_stranger_installs_passes_both_conformance_suites(run_in: Callable[..., str], tmp_path: Path) -> None:
    for package, named in (
        ("sim_farm", ("--backend", "point/reach")),
        ("sim_farm", ("--backend", "stranger.tasks:maniskill/PushGently-v1")),
        ("policies", ("--policy", "linear")),
    ):
        run_in("python", "-m", "pytest", "-q", "--pyargs", f"{package}.conformance", *named, "--report", "report.json")
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["examined"] == named[1]
        assert {law["outcome"] for law in report["laws"]} == {"holds", "not applicable"}
