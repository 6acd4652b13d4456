"""Whether a reused environment is a new one: episodes in environments that had others before, beside new ones.

    nice -n 10 python benchmarks/resets.py --tasks tabletop/push libero/libero_goal/0 --json FILE

Without `--tasks` it takes all of tabletop and ManiSkill and ten of LIBERO, for hours.

Each task's episodes (tests/sim_farm/histories.py: solved by an expert, disturbed, left midway, rich in contacts) run in
a new environment each, and then in one that is reused for all of them, in three orders. Every bit of every state,
scene, reward and flag is compared, and the picture of each episode's last scene.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from embodied.bench.results import show_and_write
from sim_farm.catalogue import task_names
from sim_farm.contract import PhysicsResult, Renderer, TaskSpec
from sim_farm.registry import make_physics, make_renderer
from tests.sim_farm.histories import History, digest, histories, played, task_of

STEPS = {"tabletop": 100, "maniskill": 50, "libero": 100}
"""Env steps of an episode."""
LIBERO = (
    *(f"libero/libero_goal/{i}" for i in (0, 4, 5, 7, 8)),
    *(f"libero/libero_spatial/{i}" for i in (0, 3)),
    *(f"libero/libero_object/{i}" for i in (0, 5)),
    "libero/libero_10/9",
)


@dataclass(frozen=True)
class Arguments:
    """Episodes of reused environments that differ from those of new ones."""

    tabletop: int = 200
    """Episodes of each of its tasks; each is run in three orders."""
    maniskill: int = 200
    libero: int = 200
    tasks: tuple[str, ...] = ()
    """Only these; none: all of `tabletop` and ManiSkill, ten of LIBERO."""
    json: Path | None = None
    """Write the result to this file."""


def orders(count: int) -> list[list[int]]:
    """Forwards, backwards, shuffled."""
    forwards = list(range(count))
    return [forwards, forwards[::-1], np.random.default_rng(0).permutation(count).tolist()]


def measure(name: str, count: int) -> dict[str, Any]:
    """The task's row."""
    steps = STEPS[name.partition("/")[0]]
    spec, chosen, before = (
        task_of(name, steps, cameras=1, image_size=64),
        histories(name, count, steps),
        time.process_time(),
    )
    with closing(make_renderer(spec)) as renderer:
        new = [_once(spec, renderer, history) for history in chosen]
        differ: list[str] = []
        with closing(make_physics(spec)) as physics:
            for number, order in enumerate(orders(count)):
                for place in order:
                    results = played(physics, chosen[place])
                    found = digest(results), _picture(renderer, results)
                    if found != new[place][:2]:
                        differ.append(f"order {number}, {chosen[place]}: {_where(found, new[place])}")
    return {
        "task": name,
        "episodes": 3 * count,
        "episodes_that_differ": len(differ),
        "solved": sum(row[2] for row in new) / count,
        "env_steps": 3 * sum(row[3] for row in new),
        "cpu_s": time.process_time() - before,
        "differ": differ[:20],
    }


def _once(spec: TaskSpec, renderer: Renderer, history: History) -> tuple[str, bytes, bool, int]:
    """In a new environment: the digest, the last picture, whether it was solved, and its env steps."""
    with closing(make_physics(spec)) as physics:
        results = played(physics, history)
    return digest(results), _picture(renderer, results), bool(results[-1].success.any()), len(results) - 1


def _picture(renderer: Renderer, results: list[PhysicsResult]) -> bytes:
    camera = renderer.info.cameras[0]
    return renderer.render([results[-1].scene], [camera])[camera].tobytes()


def _where(found: tuple[str, bytes], new: tuple[str, bytes, bool, int]) -> str:
    return " and ".join(
        what for what, one, other in zip(("states", "picture"), found, new, strict=False) if one != other
    )


def names(arguments: Arguments) -> Iterator[tuple[str, int]]:
    """The tasks with their numbers of episodes."""
    every = [f"{sim}/{task}" for sim in ("tabletop", "maniskill") for task in task_names(sim)] + list(LIBERO)
    for name in arguments.tasks or every:
        yield name, getattr(arguments, name.partition("/")[0])


def main() -> None:
    arguments = tyro.cli(Arguments)
    rows: list[dict[str, Any]] = []
    for name, count in names(arguments):
        rows.append(measure(name, count))
        figures = {
            key: sum(row[key] for row in rows) for key in ("episodes", "episodes_that_differ", "env_steps", "cpu_s")
        }
        show_and_write({**figures, "tasks": rows}, arguments.json)  # after each task: all of them take hours


if __name__ == "__main__":
    main()
