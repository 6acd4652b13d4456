"""`embodied inspect`: what a dataset or a checkpoint holds, beside what an environment takes, without training."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from rich import print as show
from rich.markup import escape

from embodied.commands.arguments import InspectArguments as Arguments
from embodied.config.files import parse_config
from embodied.config.schema import Config, EnvConfig
from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.findings import Environment, names_of, observed
from embodied.demonstrations.inspection import contact_sheet, histograms, inspected, show_table, text
from embodied.demonstrations.mixture import Demonstrations, GripperMap, gripper_map, open_sources
from embodied.files import write_whole
from embodied.hub import dataset_folder
from embodied.run.checkpoint import latest
from embodied.run.continued import parts
from embodied.training.sft import DATA, read_demonstrations
from embodied.workflows.run_spec import task_spec
from policies.checkpoint_inspection import Checkpoint, Range, inspect_checkpoint, looks_like_checkpoint
from sim_farm.contract import FarmError

MOST_NUMBERS = 16
"""Dimensions of statistics that are printed."""


def run(args: Arguments) -> dict[str, Any]:
    path = dataset_folder(args.path)
    newest = latest(path / "checkpoints") if (path / "checkpoints").is_dir() else None
    if newest is not None or looks_like_checkpoint(path):
        found = inspect_checkpoint(newest or path)
        _show_checkpoint(found)
        changed = parts(path) if newest is not None else []
        for part in changed:
            listed = "; ".join(map(str, part.changes))
            show(f"[dim]settings after {part.iteration}[/]  {escape(listed)}")
        return asdict(found) | ({"settings_changed": [asdict(part) for part in changed]} if changed else {})
    return _inspect_data(args, path)


def _inspect_data(args: Arguments, path: Path) -> dict[str, Any]:
    config = args.settings if args.config is not None else None
    sft = args.settings.sft.model_copy(update={"data": (path,)})
    environment: Environment | None = None
    if config is not None:
        config = config.model_copy(update={"sft": sft})
        environment = observed(task_spec(config), draw="images" in config.policy.reads)
        demonstrations = read_demonstrations(config, environment.info)
    else:
        sources = open_sources(sft, args.settings.seed)
        own = _own_config(sources[0].dataset)
        if own is not None:
            config = own.model_copy(update={"sft": sft})
            try:
                _refuse_code(config)
                environment = observed(task_spec(config), draw="images" in config.policy.reads)
            except FarmError as error:
                show(f"[yellow]not compared with {escape(config.env.task)}: {escape(str(error))}[/]")
        gripper = GripperMap() if environment is None else gripper_map(sft.gripper, environment.info)
        demonstrations = Demonstrations(sources, gripper)
    understood = inspected(demonstrations, config, environment)
    show_table(understood)
    if environment is None:
        show("[dim]compared with nothing: name the training that it is for with --config[/]")
    out = args.out or Path(f"inspect-{Path(args.path).resolve().name}")
    out.mkdir(parents=True, exist_ok=True)
    pictures = _draw(demonstrations, environment, out)
    write_whole(out / DATA, json.dumps(understood.as_data() | {"text": text(understood)}, indent=1))
    show(f"written: [bold]{escape(', '.join(str(path) for path in (*pictures, out / DATA)))}[/]")
    return understood.as_data() | {"pictures": [str(path) for path in pictures]}


def _refuse_code(config: Config) -> None:
    """Raise `FarmError` where a dataset, which may come from elsewhere, names a simulator that would be imported."""
    if config.named_code:
        raise FarmError("it names code, which is run only if a configuration of yours names it: say so with --config")


def _own_config(dataset: Dataset) -> Config | None:
    """The settings that a recording of ours was made with; None for other datasets."""
    if dataset.task is None:
        return None
    names = {field for field in EnvConfig.model_fields} & {field.name for field in fields(dataset.task)}
    env = {name: getattr(dataset.task, name) for name in names} | {"task": dataset.task.name}
    reads = ["state", "proprio", "instruction", *(["images"] if dataset.cameras else [])]
    env["cameras"] = list(dataset.cameras) if dataset.cameras else 0
    return parse_config({"env": env, "policy": {"reads": reads}}, str(dataset.folder))


def _draw(demonstrations: Demonstrations, environment: Environment | None, out: Path) -> list[Path]:
    source = demonstrations.sources[0]
    dataset, written = source.dataset, list[Path]()
    if dataset.cameras:
        written.append(out / "contact_sheet.png")
        contact_sheet(dataset, source.episodes, written[-1])
    if layout.ACTION in dataset.features:
        rows = source.rows(source.episodes)
        actions = dataset.column(layout.ACTION)[rows].reshape(len(rows), -1)
        info = None if environment is None else environment.info
        limits = None if info is None else list(zip(info.action_low, info.action_high, strict=True))
        if limits is not None and len(limits) != actions.shape[1]:
            limits = None
        written.append(out / "actions.png")
        names = names_of(dataset, layout.ACTION, actions.shape[1])
        histograms(demonstrations.gripper.applied(actions), names, limits, written[-1])
    return written


def _show_checkpoint(found: Checkpoint) -> None:
    types = ", ".join(f"{count} {dtype}" for dtype, count in found.dtypes.items()) or "none"
    lines = [("checkpoint", found.folder), ("kind", found.kind), *found.sizes.items()]
    lines.append(("tensors", f"{found.tensors} ({types}), {found.parameters:,} numbers"))
    lines += [(f"adapter {name}", value) for name, value in found.adapter.items()]
    lines += [(f"step {number}", step) for number, step in enumerate(found.steps, start=1)]
    lines += [(f"{entry.dataset}: {entry.vector}", f"{entry.ends} {_numbers(entry)}") for entry in found.statistics]
    lines.append(("loads as", ", ".join(found.loads_as) or "no policy without a further option"))
    lines.append(("beside", ", ".join(found.beside) or "nothing"))
    for name, value in lines:
        show(f"[dim]{escape(name)}[/]  {escape(str(value))}")
    for warning in found.warnings:
        show(f"[yellow]warning: {escape(warning)}[/]")


def _numbers(entry: Range) -> str:
    pairs = [f"{low:.3g} to {high:.3g}" for low, high in zip(entry.low, entry.high, strict=True)]
    more = f", and {len(pairs) - MOST_NUMBERS} more" if len(pairs) > MOST_NUMBERS else ""
    return ", ".join(pairs[:MOST_NUMBERS]) + more
