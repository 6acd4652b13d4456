"""Inspection of a dataset: what was understood of it, beside the environment, as a table and as pictures.

[ datasets, environment -> Inspection ] before the first step of a training, and by `embodied inspect`; what is wrong or
odd is found by `findings`.
"""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw
from rich import get_console
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from embodied.config.schema import Check, Config, PolicyConfig
from embodied.demonstrations import layout
from embodied.demonstrations.findings import (
    SHOWN,
    Dimension,
    Environment,
    Finding,
    Numbers,
    check_history,
    check_instructions,
    compared,
    dimension,
    frame_size,
    names_of,
    oddities,
)
from embodied.demonstrations.mixture import Demonstrations, Source, succeeded
from embodied.demonstrations.reader import ALONE, Dataset, History
from embodied.errors import UserError
from policies.capabilities import ResizesFrames, source_of_statistics
from policies.contract import Policy
from policies.registry import observations_of, policy_kind
from sim_farm.contract import TaskInfo

Float32 = npt.NDArray[np.float32]

NO_CONVENTIONS = "nothing says by which control mode, gripper, orientation and image size it was recorded"
"""Note on a dataset that is no recording of ours."""


@dataclass(frozen=True)
class Facts:
    """One dataset."""

    folder: str
    version: str
    features: str | Mapping[str, str] | None
    episodes: int
    """In the dataset."""
    learned_from: tuple[int, ...]
    """Numbers (episode_index) of the episodes that are learned from."""
    held_out: tuple[int, ...]
    copies: int
    rows: int
    """Rows of the episodes that are used."""
    solved: int | None
    """Number of used episodes that were solved; None: the dataset does not say."""
    share: float
    """Share of this dataset among the samples that are drawn."""
    fps: float
    cameras: Mapping[str, tuple[int, int]]
    """Height and width of each camera's frames."""
    instructions: Mapping[str, int]
    """Number of episodes of each instruction."""
    sizes: Mapping[str, int]
    """Numbers of each vector that the dataset has."""
    action: tuple[Dimension, ...]
    proprio: tuple[Dimension, ...]
    state: tuple[Dimension, ...]
    notes: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """Features that the policy neither reads nor learns."""


@dataclass(frozen=True)
class Inspection:
    """The table: datasets, the environment they are compared with, and what was found."""

    datasets: tuple[Facts, ...]
    findings: tuple[Finding, ...] = ()
    task: str | None = None
    control_hz: float | None = None
    image_size: int | None = None
    instruction: str | None = None
    transforms: tuple[str, ...] = ()
    """Transforms of the data, in order."""
    network_image_size: int | None = None
    """Pixels of the pictures that the policy's network is shown; None: those of the frames."""
    statistics: str = ""
    """Source of the statistics that normalise, in words."""
    insist: tuple[Check, ...] = field(default=())

    @property
    def refused(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f.check is not None and f.check not in self.insist)

    @property
    def warnings(self) -> tuple[Finding, ...]:
        return tuple(f for f in self.findings if f not in self.refused)

    def as_data(self) -> dict[str, Any]:
        """The inspection as plain data for JSON."""
        return {
            **asdict(self),
            "findings": [{"check": f.check, "text": f.text, "refused": f in self.refused} for f in self.findings],
        }

    def with_policy(self, policy: Policy, init: Path | None) -> Inspection:
        """The table with what the policy makes of the data. Raises `UserError` for frames of a size that its network
        cannot take."""
        size = policy.network_image_size if isinstance(policy, ResizesFrames) else None
        if size is None and self.image_size is not None:
            for facts in self.datasets:
                for camera in policy.spec.cameras:
                    if facts.cameras[camera] != (self.image_size,) * 2:
                        height, width = facts.cameras[camera]
                        remedy = (
                            f"--env.image-size {height}"
                            if height == width
                            else "the environment's are square: draw the episodes anew where the recording is "
                            "converted (docs/demonstrations.md), or choose a policy that resizes what it sees"
                        )
                        raise UserError(
                            f"{facts.folder}: frames of {camera} are {height} x {width}, and the network of "
                            f"{policy.kind} is made for {self.image_size} x {self.image_size} (env.image_size): "
                            f"{remedy}"
                        )
        kept = f"those of {init} (policy.init), for actions; observations: the rows learned from as well"
        return replace(self, network_image_size=size, statistics=kept if init else source_of_statistics(policy))

    def with_findings(self, more: Iterable[Finding]) -> Inspection:
        """The table with further findings."""
        return replace(self, findings=(*self.findings, *more))

    def raise_refusals(self) -> None:
        """Raise `UserError` with all refusals, and the option that insists."""
        if self.refused:
            checks = " ".join(dict.fromkeys(f.check for f in self.refused if f.check))
            raise UserError(
                "; ".join(f.text for f in self.refused)
                + f". Nothing was learned; to learn from it nevertheless: --sft.insist {checks}"
            )


def inspected(demonstrations: Demonstrations, config: Config | None, environment: Environment | None) -> Inspection:
    """The table of the demonstrations. Without an environment, nothing is compared."""
    begins = [len(source.rows(source.train)) for source in demonstrations.sources]
    weights = np.array(demonstrations.weights or begins, float)
    shares = weights / max(weights.sum(), 1e-9)
    facts, findings = [], list[Finding]()
    reads = ("state", "proprio") if config is None else config.policy.reads
    history = ALONE if config is None else _history(config.policy)
    for source, share in zip(demonstrations.sources, shares.tolist(), strict=True):
        own = Numbers.of(source, demonstrations.gripper)
        found = _facts(source, share, own, environment)
        proprio, state = found.proprio if "proprio" in reads else (), found.state if "state" in reads else ()
        unread = () if environment is None or config is None else _unread(source.dataset, config, environment.info)
        facts.append(replace(found, proprio=proprio, state=state, unread=unread))
        findings += [*oddities(source, own), *check_history(source, history)]
        if environment is not None and config is not None:
            findings += compared(source, own, config, environment, history)
    if environment is not None and config is not None and "instruction" in config.policy.reads:
        # A run of several tasks has datasets of each.
        groups = [demonstrations.sources] if config.extra_tasks else [(source,) for source in demonstrations.sources]
        findings += [finding for group in groups for finding in check_instructions(group, environment)]
    table = Inspection(tuple(facts), tuple(dict.fromkeys(findings)))
    if environment is None or config is None:
        return table
    return replace(
        table,
        task=environment.info.spec.name,
        control_hz=environment.info.control_hz,
        image_size=environment.info.spec.image_size if "images" in config.policy.reads else None,
        instruction=environment.instruction,
        transforms=tuple(_transforms(demonstrations, config, history)),
        insist=config.sft.insist,
    )


def _history(policy: PolicyConfig) -> History:
    """The observations that the policy reads with each row. A policy without weights reads one: it may be a server,
    which is not asked."""
    learns = policy_kind(policy.kind).trainable
    return History(*observations_of(policy.kind, policy.architecture)) if learns else ALONE


def _unread(dataset: Dataset, config: Config, info: TaskInfo) -> tuple[str, ...]:
    reads = config.policy.reads
    used = {layout.ACTION, layout.REWARD, layout.SUCCESS, layout.DONE, *layout.BOOKKEEPING}
    used |= {layout.PROPRIO} if "proprio" in reads else set()
    used |= {layout.STATE} if "state" in reads else set()
    used |= {dataset.cameras[camera] for camera in info.cameras if camera in dataset.cameras and "images" in reads}
    return tuple(name for name in dataset.features if name not in used)


def _facts(source: Source, share: float, own: Numbers, environment: Environment | None) -> Facts:
    dataset, used = source.dataset, [source.dataset.episodes[i] for i in source.episodes]
    info = None if environment is None else environment.info
    outcomes = [succeeded(dataset, episode) for episode in used]
    counts = Counter(text for episode in used for text in episode.instructions)
    limits = None if info is None else list(zip(info.action_low, info.action_high, strict=True))
    begun = {layout.PROPRIO: None, layout.STATE: None} if environment is None else {
        layout.PROPRIO: environment.proprio, layout.STATE: environment.state
    }  # fmt: skip

    def dimensions(name: str, values: Float32, ranges: Sequence[tuple[float, float]] | None) -> tuple[Dimension, ...]:
        names = names_of(dataset, name, values.shape[1])
        fits = ranges if ranges is not None and len(ranges) == values.shape[1] else [None] * values.shape[1]
        return tuple(
            dimension(label, values[:, i], limit) for i, (label, limit) in enumerate(zip(names, fits, strict=True))
        )

    def beginnings(name: str) -> list[tuple[float, float]] | None:
        seen = begun[name]
        return None if seen is None else list(zip(seen.min(0).tolist(), seen.max(0).tolist(), strict=True))

    state = dimensions(layout.STATE, own.state, beginnings(layout.STATE))
    proprio = dimensions(layout.PROPRIO, own.proprio, beginnings(layout.PROPRIO))
    return Facts(
        folder=str(dataset.folder),
        version=dataset.version,
        features=source.features,
        episodes=len(dataset.episodes),
        learned_from=tuple(dataset.episodes[i].index for i in source.train),
        held_out=tuple(dataset.episodes[i].index for i in source.held_out),
        copies=source.copies,
        rows=len(own.action),
        solved=None if None in outcomes else sum(map(bool, outcomes)),
        share=share,
        fps=float(dataset.fps),
        cameras={name: frame_size(dataset, name) for name in dataset.cameras},
        instructions=dict(counts.most_common()),
        sizes={
            name: math.prod(dataset.features[name].shape)
            for name in (layout.ACTION, layout.PROPRIO, layout.STATE)
            if name in dataset.features
        },
        action=dimensions(layout.ACTION, own.action, limits),
        proprio=tuple(replace(d, beyond=None) for d in proprio),
        state=tuple(replace(d, beyond=None) for d in state),
        notes=dataset.notes
        if dataset.task is not None or any(layout.PROVENANCE in n for n in dataset.notes)
        else (*dataset.notes, _conventions_note(dataset)),
    )


def _conventions_note(dataset: Dataset) -> str:
    """Findings about the conventions of a dataset that this project did not record."""
    if not dataset.conventions:
        return NO_CONVENTIONS
    return "by import.json: " + "; ".join(f"{name}: {text}" for name, text in dataset.conventions.items())[:1000]


def _transforms(demonstrations: Demonstrations, config: Config, history: History) -> Iterator[str]:
    for source in demonstrations.sources:
        if source.features is not None:
            yield f"features of {source.dataset.folder} renamed: {source.features}"
    if config.sft.gripper != "as_is":
        yield f"last action element: sft.gripper {config.sft.gripper}"
    if history.observations > 1:
        steps = "env step" if history.distance == 1 else "env steps"
        yield (
            f"{history.observations} observations of each row, {history.distance} {steps} apart, the first of an "
            "episode in place of those before it"
        )
    if demonstrations.left_out:
        yield f"the last {demonstrations.left_out} rows of each episode are not learned from (drop_n_last_frames)"
    entries = config.policy.options.get("transforms", ())
    for entry in entries if isinstance(entries, (list, tuple)) else ():
        yield f"policy.options.transforms: {entry}"


# --- the table, for a terminal and, as text, for a file

ROWS = 16
"""Dimensions of a state that are listed; data.json has all."""
WIDTH = 118
"""Columns of the text."""


def show_table(found: Inspection) -> None:
    """Print it: in a terminal at its width, elsewhere as `text`."""
    console = get_console()
    if console.is_terminal:
        console.print(table(found))
    else:
        console.print(Text(text(found).rstrip()), soft_wrap=True)


def table(found: Inspection) -> RenderableType:
    """The whole table: datasets, dimensions, what is done to the data, warnings and refusals."""
    parts: list[RenderableType] = [Text("What was understood of the data", style="bold")]
    for facts in found.datasets:
        parts += [_summary(facts, found), *_dimensions(facts)]
    if found.transforms:
        parts.append(Text("Transforms, in order: " + "; ".join(found.transforms)))
    if found.statistics:
        parts.append(Text(f"Statistics: {found.statistics}"))
    parts += [Text(f"warning: {f.text}", style="yellow") for f in found.warnings]
    parts += [Text(f"refused ({f.check}): {f.text}", style="red") for f in found.refused]
    return Group(*parts)


def text(found: Inspection) -> str:
    """The table as plain text."""
    console = Console(file=io.StringIO(), width=WIDTH, force_terminal=False, color_system=None)
    console.print(table(found))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _summary(facts: Facts, found: Inspection) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column()
    solved = "" if facts.solved is None else f", {facts.solved} of them solved"
    copies = f", {facts.copies} copies of these left out" if facts.copies else ""
    share = f", {100 * facts.share:.3g}% of the samples" if facts.share < 1 else ""
    learned, held_out = len(facts.learned_from), len(facts.held_out)
    rows = {
        "dataset": f"{facts.folder} ({facts.version})" + share,
        "episodes": f"{facts.episodes}; {learned + held_out} used{solved}: {learned} learned from, "
        f"{held_out} held out{copies}",
        "env steps": f"{facts.rows} in the episodes that are used",
        "instructions": _instructions(facts) + _against(found.instruction, f"{found.task} says"),
        "frames": (", ".join(f"{name} {h} x {w}" for name, (h, w) in facts.cameras.items()) or "none")
        + _against(found.image_size, "env.image_size")
        + _against(found.network_image_size, "the network is shown"),
        "rate": f"{facts.fps:g} frames per second" + _against(found.control_hz, "env steps per second"),
        "numbers": ", ".join(f"{name} {size}" for name, size in facts.sizes.items()) or "none",
    }
    if facts.unread:
        rows["not read"] = ", ".join(facts.unread)
    for name, value in rows.items():
        grid.add_row(name, Text(value))
    for note in facts.notes:
        grid.add_row("note", Text(note, style="yellow"))
    return grid


def _instructions(facts: Facts) -> str:
    some = [f"{text!r} ({count})" for text, count in list(facts.instructions.items())[:SHOWN]]
    more = f", and {len(facts.instructions) - SHOWN} more" if len(facts.instructions) > SHOWN else ""
    return (", ".join(some) or "none") + more


def _against(value: object, name: str) -> str:
    if value is None:
        return ""
    return f"; {name}: {value:g}" if isinstance(value, (int, float)) else f"; {name}: {value!r}"


def _dimensions(facts: Facts) -> Iterator[Table]:
    if facts.action:
        yield _listed("action", facts.action, "environment takes")
    for name, dimensions in (("state", facts.proprio), ("full state", facts.state)):
        if dimensions:
            yield _listed(name, dimensions, "at a reset")


def _listed(title: str, dimensions: Sequence[Dimension], compared: str) -> Table:
    ranged = any(d.environment is not None for d in dimensions)
    beyond = any(d.beyond is not None for d in dimensions)
    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    found.add_column(title, no_wrap=True)
    heads = [
        "min",
        "q01",
        "mean",
        "std",
        "q99",
        "max",
        *([compared] if ranged else []),
        *(["beyond"] if beyond else []),
    ]
    for head in heads:
        found.add_column(head, justify="right", no_wrap=True)
    found.add_column("")
    for d in dimensions[:ROWS]:
        cells = [f"{value:.3g}" for value in (d.low, d.q01, d.mean, d.std, d.q99, d.high)]
        if ranged:
            cells.append("" if d.environment is None else " to ".join(f"{end:.3g}" for end in d.environment))
        if beyond:
            cells.append("" if d.beyond is None else f"{100 * d.beyond:.3g}%")
        found.add_row(d.name, *cells, Text(d.remark, style="yellow"))
    if len(dimensions) > ROWS:
        found.add_row("...", *[""] * len(heads), f"and {len(dimensions) - ROWS} more")
    return found


# --- Pictures of a dataset: a contact sheet of frames, and a histogram of each action dimension.


EPISODES, MOMENTS, CAMERAS = 6, 6, 4
"""Episodes (rows) and frames (columns) of a contact sheet, and the largest number of cameras, one below the other."""
HEIGHT, MARGIN, LABEL = 128, 4, 16
"""Pixels of a picture, between pictures, and of a line of text."""
BINS = 60


def contact_sheet(dataset: Dataset, episodes: Sequence[int], path: Path) -> None:
    """Write a PNG: a row for each of some episodes, from its first frame to its last, for each camera."""
    cameras = list(dataset.cameras)[:CAMERAS]
    chosen = [episodes[i] for i in np.unique(np.linspace(0, len(episodes) - 1, EPISODES).astype(int))]
    widths = {}
    for camera in cameras:
        height, width = dataset.frames(camera, [dataset.episodes[chosen[0]].begin]).shape[1:3]
        widths[camera] = max(1, round(HEIGHT * width / height))
    sheet = Image.new(
        "RGB",
        (MARGIN + MOMENTS * (max(widths.values()) + MARGIN), len(cameras) * len(chosen) * (HEIGHT + LABEL + MARGIN)),
        "white",
    )
    drawing, top = ImageDraw.Draw(sheet), 0
    for camera in cameras:
        for number in chosen:
            episode = dataset.episodes[number]
            rows = np.linspace(episode.begin, episode.end - 1, MOMENTS).astype(np.int64)
            instructions = ", ".join(episode.instructions)
            text = f"{camera}, episode {number}, {episode.length} steps: {instructions}"[: sheet.width // 6]
            drawing.text((MARGIN, top + 2), text.encode("ascii", "replace").decode(), fill="black")
            for place, frame in enumerate(dataset.frames(camera, rows)):
                picture = Image.fromarray(frame).resize((widths[camera], HEIGHT))
                sheet.paste(picture, (MARGIN + place * (widths[camera] + MARGIN), top + LABEL))
            top += HEIGHT + LABEL + MARGIN
    sheet.save(path)


def histograms(
    actions: npt.NDArray[np.float32],
    names: Sequence[str],
    limits: Sequence[tuple[float, float]] | None,
    path: Path,
) -> None:
    """Write a PNG with a histogram of each dimension of the actions [N, A]; the environment's range is shaded."""
    # Training reads the table of this module; only the pictures wait for matplotlib.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(3.2 * columns, 2.2 * rows), squeeze=False)
    for place, axis in enumerate(axes.flat):
        if place >= len(names):
            axis.set_axis_off()
            continue
        axis.hist(actions[:, place].astype(np.float64), bins=BINS, color="#3b6ea5")
        axis.set_yscale("log")
        if limits is not None and np.isfinite(limits[place]).all():
            axis.axvspan(*limits[place], color="#5aa469", alpha=0.18, zorder=0)
        axis.set_title(f"action {names[place]}", fontsize=9)
        axis.tick_params(labelsize=7)
    note = "shaded: the range that the environment takes; " if limits is not None else ""
    figure.suptitle(f"{note}counts of env steps, logarithmic", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
