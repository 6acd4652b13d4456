"""`embodied profile`: measure the components, write the profile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import print as show

import schedulers
from embodied.commands.arguments import ProfileArguments as Arguments
from embodied.config.schema import Config
from embodied.execution.session import open_session
from embodied.files import write_whole
from embodied.planning.profiler import profile_run
from embodied.planning.run_plans import make_folder
from embodied.run import RUNS
from embodied.run.folder import with_init
from embodied.training.checks import Checked, check_start, check_tasks
from schedulers import ComponentProfile, Profile


def run(args: Arguments) -> dict[str, Any]:
    return profile_command(with_init(args.settings, RUNS, required=False), args.out)


def profile_command(config: Config, out: Path) -> dict[str, Any]:
    """Measure the components of a run, those of all of its tasks, and write the profile."""
    checked = Checked(command="profile", config=config)
    check_start(checked)
    run = checked.run
    make_folder(out.resolve().parent)  # before minutes of measuring
    with open_session(config) as session:
        check_tasks(checked, session)
        profile = profile_run(run, session, out.resolve().parent)
    write_whole(out, schedulers.text_of(profile))
    show(_profile_table(profile, ", ".join(task.env.task for task in run.tasks)))
    show("\n".join(_memory_lines(profile)))
    show(f"profile: [bold]{out}[/]")
    return {"profile": str(out), **schedulers.to_data(profile)}


def _profile_table(profile: Profile, title: str) -> Any:
    from rich.table import Table

    table = Table("component", "items", "devices", "ms", "95% interval", "contention", title=title)
    for name, component in _everywhere(profile):
        for point in component.points:
            interval = f"{1e3 * point.low:.2f} to {1e3 * point.high:.2f}"
            table.add_row(
                name, str(point.batch), str(point.devices), f"{1e3 * point.seconds:.2f}", interval,
                f"x {component.contention:.2f}",
            )  # fmt: skip
    return table


def _everywhere(profile: Profile) -> Iterator[tuple[str, ComponentProfile]]:
    """Components by name; where one was measured on both pools, once for each, with the pool in its name."""
    for name, component in profile.components.items():
        other = component.other_pool
        yield name if other is None else f"{name} on {component.pool}", component
        if other is not None:
            yield f"{name} on {other.pool}", other


def _memory_lines(profile: Profile) -> list[str]:
    """Memory of each component, and the seconds of an offload and a reload."""
    lines = []
    for name, component in _everywhere(profile):
        if component.resident_bytes or component.bytes_per_item:
            more = f" and {component.bytes_per_item / 1e6:.1f} MB per item" if component.bytes_per_item else ""
            lines.append(f"{name} holds {component.resident_bytes / 1e6:.1f} MB per process{more}")
        if component.process_bytes:
            switch = f"out in {1e3 * component.unload_s:.1f} ms, back in {1e3 * component.load_s:.1f} ms"
            lines.append(f"{name} holds {component.process_bytes / 1e6:.1f} MB; {switch}")
    return lines
