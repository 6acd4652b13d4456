"""Whether a reused environment is a new one: episodes in environments that had others before, beside new ones.

    nice -n 10 python benchmarks/resets.py --tasks tabletop/push libero/libero_goal/0 --json FILE

Without `--tasks` it takes all of tabletop and ManiSkill and ten of LIBERO, for hours.

Each task's episodes (tests/sim_farm/histories.py: solved by an expert, disturbed, left midway, rich in contacts) run in
a new environment each, and then in one that is reused for all of them, in three orders. Every bit of every state,
scene, reward and flag is compared, and the picture of each episode's last scene.

With `--evaluation FOLDER` the episodes are those of an evaluation, by their recorded actions: a trained policy's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from embodied.config.files import load_config  # noqa: E402
from embodied.evaluation.folder import read_folder  # noqa: E402
from embodied.workflows.run_spec import task_spec  # noqa: E402
from embodied_bench.settings import show_and_write  # noqa: E402
from sim_farm.catalogue import task_names  # noqa: E402
from sim_farm.contract import EpisodeSpec, Float32, Physics, PhysicsResult, Renderer, TaskSpec  # noqa: E402
from sim_farm.registry import make_physics, make_renderer  # noqa: E402
from tests.sim_farm.histories import History, digest, histories, played, task_of  # noqa: E402

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
    evaluation: Path | None = None
    """The folder of an evaluation of one task, whose episodes are run instead."""
    json: Path | None = None
    """Write the result to this file."""


def orders(count: int) -> list[list[int]]:
    """Forwards, backwards, shuffled."""
    forwards = list(range(count))
    return [forwards, forwards[::-1], np.random.default_rng(0).permutation(count).tolist()]


@dataclass(frozen=True)
class Recorded:
    """An episode and the actions [T, A] of somebody who has seen it."""

    episode: EpisodeSpec
    actions: Float32

    def __str__(self) -> str:
        return f"{self.episode}, {len(self.actions)} env steps"


Episode = History | Recorded


def scripted(name: str, count: int) -> tuple[TaskSpec, Sequence[Episode]]:
    """A task, and episodes of all kinds."""
    steps = STEPS[name.partition("/")[0]]
    return task_of(name, steps, cameras=1, image_size=64), histories(name, count, steps)


def evaluated(path: Path) -> tuple[TaskSpec, Sequence[Episode]]:
    """The first task of an evaluation, and its episodes."""
    folder = read_folder(path)
    protocol = folder.identity.protocol
    name = protocol.tasks[0]
    spec = task_spec(protocol.applied(load_config(str(path / "config.yaml")), name))
    outcomes = [outcome for outcome in folder.in_order() if outcome.task == name]
    chosen = [Recorded(outcome.spec, folder.actions(outcome)) for outcome in outcomes]
    if not chosen:
        raise SystemExit(f"{path} has no episode of {name} yet")
    return replace(spec, cameras=1, image_size=64), chosen


def run(physics: Physics, episode: Episode) -> list[PhysicsResult]:
    """The beginning, and what each env step brought."""
    if isinstance(episode, History):
        return played(physics, episode)
    return [physics.reset(episode.episode), *(physics.step(action[None]) for action in episode.actions)]


def measure(spec: TaskSpec, chosen: Sequence[Episode]) -> dict[str, Any]:
    """The task's row."""
    count, before = len(chosen), time.process_time()
    with closing(make_renderer(spec)) as renderer:
        new = [_once(spec, renderer, history) for history in chosen]
        differ: list[str] = []
        with closing(make_physics(spec)) as physics:
            for number, order in enumerate(orders(count)):
                for place in order:
                    results = run(physics, chosen[place])
                    found = digest(results), _picture(renderer, results)
                    if found != new[place][:2]:
                        differ.append(f"order {number}, {chosen[place]}: {_where(found, new[place])}")
    return {
        "task": spec.name,
        "episodes": 3 * count,
        "episodes_that_differ": len(differ),
        "solved": sum(row[2] for row in new) / count,
        "env_steps": 3 * sum(row[3] for row in new),
        "cpu_s": time.process_time() - before,
        "differ": differ[:20],
    }


def _once(spec: TaskSpec, renderer: Renderer, episode: Episode) -> tuple[str, bytes, bool, int]:
    """In a new environment: the digest, the last picture, whether it was solved, and its env steps."""
    with closing(make_physics(spec)) as physics:
        results = run(physics, episode)
    return digest(results), _picture(renderer, results), bool(results[-1].success.any()), len(results) - 1


def _picture(renderer: Renderer, results: list[PhysicsResult]) -> bytes:
    camera = renderer.info.cameras[0]
    return renderer.render([results[-1].scene], [camera])[camera].tobytes()


def _where(found: tuple[str, bytes], new: tuple[str, bytes, bool, int]) -> str:
    return " and ".join(
        what for what, one, other in zip(("states", "picture"), found, new, strict=False) if one != other
    )


def requested(arguments: Arguments) -> Iterator[tuple[TaskSpec, Sequence[Episode]]]:
    """The tasks with their episodes."""
    if arguments.evaluation is not None:
        yield evaluated(arguments.evaluation)
        return
    every = [f"{sim}/{task}" for sim in ("tabletop", "maniskill") for task in task_names(sim)] + list(LIBERO)
    for name in arguments.tasks or every:
        yield scripted(name, getattr(arguments, name.partition("/")[0]))


def main() -> None:
    arguments = tyro.cli(Arguments)
    rows: list[dict[str, Any]] = []
    for spec, chosen in requested(arguments):
        rows.append(measure(spec, chosen))
        figures = {
            key: sum(row[key] for row in rows) for key in ("episodes", "episodes_that_differ", "env_steps", "cpu_s")
        }
        show_and_write({**figures, "tasks": rows}, arguments.json)  # after each task: all of them take hours


if __name__ == "__main__":
    main()
