"""`embodied rerun`: episodes of an evaluation or a dataset as recordings for the Rerun viewer."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tyro
from rich import get_console
from rich.markup import escape

from embodied.demonstrations.writer import new_folder
from embodied.errors import UserError
from embodied.reporting.live import steps
from embodied.run import RUNS
from embodied_rerun.episodes import source_of

EXAMPLES = (
    ("embodied rerun reach-1", "episodes of the run's newest evaluation, failures first"),
    ("embodied rerun DATASET --episodes 0-4", "demonstrations in LeRobot's layout"),
)


@dataclass(frozen=True)
class Arguments:
    """Write episodes as recordings that the Rerun viewer opens: frames, states, actions, rewards, instruction and
    success, one file per episode. Evaluated episodes are replayed from their seeds and actions."""

    source: tyro.conf.Positional[str]
    """Folder of an evaluation, of a run (or its name below --runs-dir), or of a dataset in LeRobot's layout; or the
    Hugging Face name of a dataset (`org/name`)."""
    episodes: str | None = None
    """Episodes by number and range: `0-9,25`. A dataset has their numbers in its files; those of an evaluation count
    through the tasks of its protocol. None: ten of them, of an evaluation failures first."""
    out: Path | None = None
    """Folder to write, with a file `episode_000017.rrd` per episode. It must not exist yet. None: rerun-NAME in the
    current folder."""
    runs_dir: Path = RUNS
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    if find_spec("rerun") is None:
        raise UserError("`embodied rerun` needs the Python package 'rerun-sdk': pip install 'embodied-farm[rerun]'")
    from embodied_rerun.recording import write_recording

    source = source_of(args.source, args.runs_dir)
    numbers = source.chosen(args.episodes)
    out = args.out or Path(f"rerun-{source.folder.resolve().name}")
    written, total = list[int](), 0
    with new_folder(out) as folder, steps("Recording", len(numbers)) as bar:
        for episode in source.episodes(numbers):
            path = folder / f"episode_{episode.number:06d}.rrd"
            write_recording(path, episode)
            written.append(episode.number)
            total += path.stat().st_size
            bar.advance()
        if not written:
            raise UserError(
                f"no episode of {source.folder} came out of its replay as it was evaluated: nothing is written"
            )
    left_out = sorted({*numbers} - {*written})
    lines = [
        f"[bold]{escape(str(out))}[/]: {len(written)} episodes of {escape(str(source.folder))}, {total / 1e6:.1f} MB"
    ]
    if left_out:
        listed = ", ".join(map(str, left_out))
        lines.append(f"episodes {listed} came out otherwise when they were replayed, and were left out")
    lines.append(f"open them: rerun {escape(str(out))}/*.rrd")
    get_console().print("\n".join(lines), highlight=False, soft_wrap=True)
    return {"source": str(source.folder), "out": str(out), "episodes": written, "left_out": left_out, "bytes": total}
