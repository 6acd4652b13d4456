"""`sim_farm.vector_env` beside the fastest loops that are written in C++: EnvPool, mjbatch and `mujoco.rollout`.

    python benchmarks/best_peers.py --json benchmarks/results/best_peers.json
    python benchmarks/best_peers.py --only metaworld/push --cores 1

EnvPool has rewritten Meta-World and Gymnasium-Robotics in C++, and is compared on their tasks, whose stock environments
the farm runs. mjbatch and `mujoco.rollout` run MuJoCo alone, and are the limit of `tabletop`, a simulator of this
project. The peers are installed beside, in environments of the cache folder; the project's own stays as it is. EnvPool
holds MuJoCo 3.6.0, mjbatch asks for 3.14.0: the farm runs on the same one.

The work is equal: the same tasks, number of environments, cores (that many workers or threads, pinned), states, frame
skip, limits of episodes with a new one in the step after an end, and random actions drawn beforehand. First an episode
of both is compared (`equal_work`). Starts are drawn from different random streams in EnvPool: there the hand, which
follows the actions alone as long as it touches nothing, and mean rewards are compared. In tabletop all positions are.
mjbatch and `mujoco.rollout` compute no reward; the latter executes whole episodes of controls known beforehand.

Farm and peer are measured in turn. Figures are medians, ratios the medians of those of measurements that followed each
other. CPU time is that of all processes and threads; on a machine with other work it alone is comparable.
`cpu_ms_of_one_environment` has what an env step of one environment takes in one process: MuJoCo, ours, and stock.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.best_peers_loops import Comparison
from embodied_bench.settings import show_and_write
from sim_farm.cache_folder import cache

LOOPS = Path(__file__).with_name("best_peers_loops.py")


@dataclass(frozen=True)
class Installed:
    """Packages of an environment beside the project's, and those that are installed without what they ask for:
    Meta-World asks for another MuJoCo than EnvPool holds."""

    packages: tuple[str, ...]
    alone: tuple[str, ...] = ()


USUAL = ("numpy==2.4.6", "gymnasium==1.4.0", "psutil==7.2.2", "PyOpenGL==3.1.10")
ENVPOOL = Installed(
    (*USUAL, "envpool==1.2.5", "mujoco==3.6.0", "gymnasium-robotics==1.4.2", "scipy==1.17.1", "imageio==2.38.1"),
    ("metaworld==3.1.1",),
)
MJBATCH = Installed((*USUAL, "mjbatch==0.1.4", "mujoco==3.14.0"))
GOAL_SHOWN = (("partially_observable", False),)


def metaworld(name: str, peer: str) -> Comparison:
    task = f"metaworld_farm:BACKEND/{name}-v3"
    return Comparison(
        f"metaworld/{name}",
        task,
        "envpool",
        f"MetaWorld/{peer}-v3",
        GOAL_SHOWN,
        same=(0, 4),  # the hand's position and how far the gripper is open
        reward_scale=10.0,
        stock="MetaWorld",
    )


def fetch(name: str) -> Comparison:
    # What is achieved (3) and the goal (3) come before the rest of the observation, which begins with the gripper.
    task = f"gymnasium_robotics_farm:BACKEND/{name}"
    return Comparison(f"robotics/{name}", task, "envpool", f"{name}Dense-v4", same=(6, 9), stock="Robotics")


PUSH_POSITIONS = (0, 12)
COMPARISONS = {
    each.name: (each, installed)
    for each, installed in (
        (metaworld("reach", "Reach"), ENVPOOL),
        (metaworld("push", "Push"), ENVPOOL),
        (metaworld("door-open", "DoorOpen"), ENVPOOL),
        (fetch("FetchReach"), ENVPOOL),
        (fetch("FetchPush"), ENVPOOL),
        (Comparison("tabletop/push", "tabletop/push", "mjbatch", same=PUSH_POSITIONS), MJBATCH),
        (Comparison("tabletop/push rollout", "tabletop/push", "rollout", same=PUSH_POSITIONS), MJBATCH),
    )
}


@dataclass(frozen=True)
class Arguments:
    """Env steps per second of the farm, beside EnvPool, mjbatch and `mujoco.rollout`."""

    only: tuple[str, ...] = tuple(COMPARISONS)
    """Names of comparisons."""
    num_envs: int = 16
    """Environments of each."""
    cores: int = 2
    """Cores that the farm's workers, or the peer's threads, are pinned to."""
    seconds: float = 1.5
    """Duration of each measurement."""
    rounds: int = 5
    """Measurements of each."""
    json: Path | None = None
    """Write the result to this file."""


def interpreter(installed: Installed) -> Path:
    """The Python of an environment with these packages, which is made once."""
    name = next(package for package in installed.packages if package.startswith(("envpool", "mjbatch")))
    folder = cache() / "best_peers" / name.replace("==", "-")
    python, record = folder / "bin" / "python", folder / "installed.json"
    wanted = json.dumps(asdict(installed))
    if not record.exists() or record.read_text() != wanted:
        print(f"Installing {name} in {folder}", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        pip = (str(python), "-m", "pip", "--quiet", "install")
        subprocess.run([*pip, *installed.packages], check=True)
        if installed.alone:
            subprocess.run([*pip, "--no-deps", *installed.alone], check=True)
        record.write_text(wanted)
    return python


def measured(given: Comparison, python: Path) -> dict[str, object]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    folders = (".", "examples/metaworld", "examples/gymnasium_robotics")
    environment["PYTHONPATH"] = os.pathsep.join(str(LOOPS.parent.parent / folder) for folder in folders)
    command = [str(python), str(LOOPS), json.dumps(asdict(given))]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"{given.name} ended with status {done.returncode}; its messages stand above")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Arguments) -> None:
    if unknown := set(arguments.only) - set(COMPARISONS):
        raise SystemExit(f"no comparison {', '.join(sorted(unknown))}; valid: {', '.join(COMPARISONS)}")
    cores = tuple(sorted(os.sched_getaffinity(0)))[: arguments.cores]
    if len(cores) < arguments.cores:
        raise SystemExit(f"{arguments.cores} cores are asked for, and this process may use {len(cores)}: set --cores")
    pythons = {installed: interpreter(installed) for installed in {COMPARISONS[name][1] for name in arguments.only}}
    figures: dict[str, object] = {"num_envs": arguments.num_envs, "cores": len(cores), "load": os.getloadavg()[0]}
    for name in arguments.only:
        given, installed = COMPARISONS[name]
        print(name, file=sys.stderr)
        given = replace(
            given,
            num_envs=arguments.num_envs,
            cores=cores,
            seconds=arguments.seconds,
            rounds=arguments.rounds,
        )
        figures[name] = measured(given, pythons[installed])
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
