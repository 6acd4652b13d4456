"""Findings about a dataset: numbers, frames and instructions that contradict the environment, or look wrong.

A finding is a refusal, which names the check that `sft.insist` overrules, or a warning. The bounds are the constants
below; docs/demonstrations.md explains them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from embodied.config.schema import Check, Config
from embodied.demonstrations import layout
from embodied.demonstrations.mixture import SHIPPED, GripperMap, Source
from embodied.demonstrations.reader import Dataset, History
from embodied.errors import shown
from sim_farm.contract import EpisodeSpec, FarmError, Physics, TaskInfo, TaskSpec, UInt8
from sim_farm.registry import make_physics, make_renderer

Float32 = npt.NDArray[np.float32]

TOLERANCE = 1e-3
"""Fraction of half the environment's range by which an action may exceed it and count as within."""
FAR = 1.5
"""Times half the range, from its middle: an action farther than that is far beyond."""
FAR_SHARE = 0.05
"""Actions are refused where more than this share of a dimension is far beyond the range; of recordings of ours, whose
actions are those of a policy before they are clipped, from `FAR_OURS` times half the range on."""
FAR_OURS = 10.0
ENOUGH = 10
"""Rows that have to show something before it is refused: what fewer show is said, or not concluded. A recording of two
episodes may be at one end of a dimension but for one row."""
SMALL = 0.05
"""Fraction of half the range; actions that all stay below it are odd."""
EXPLODES = 20.0
"""Normalised values larger than this are named."""
NOISE = 1e-5
"""Width of a dimension, over its largest value, below which what varies is rounding."""
TWO_VALUED = 0.95
"""Share of a column that lies at its two ends, from which on it is taken for two-valued."""
FOLLOWS = 0.1
"""Mean distance of an action from the state's number, over the latter's deviation, below which it is that number."""
FRAMES = 16
"""First frames of episodes that the environment's are compared with, in the mean."""
ALIKE, MORE_ALIKE = 0.6, 0.2
"""Correlation from which on frames are alike, and by how much more turned frames must be."""
RESETS = 4
"""Beginnings of episodes that the data is compared with."""
GRIP_STEPS = 8
"""Env steps over which the gripper is moved to see what its two ends do."""
SHOWN = 6
"""Instructions and dimensions that a line lists."""


@dataclass(frozen=True)
class Environment:
    """Conventions and ranges of a task's simulator, and its states after K resets."""

    info: TaskInfo
    instruction: str
    proprio: Float32
    """[K, P] at the beginning of episodes."""
    state: Float32
    """[K, S]"""
    grip: Float32
    """[P]: proprioception after the last action element was at its upper end for some env steps, less that after its
    lower end."""
    frames: Mapping[str, UInt8] = field(default_factory=dict)
    """For each camera uint8 [K, H, W, 3] at the beginning of episodes; nothing where none were drawn."""


def observed(task: TaskSpec, draw: bool = False) -> Environment:
    """The task as a simulator of this process shows it. `draw`: with frames, where this process can draw."""
    physics = make_physics(task)
    try:
        begun = [physics.reset(EpisodeSpec(seed)) for seed in range(RESETS)]
        ends = [_after_grip(physics, end) for end in (physics.info.action_low[-1], physics.info.action_high[-1])]
        return Environment(
            physics.info,
            begun[0].instruction,
            np.stack([result.proprio for result in begun]),
            np.stack([result.state for result in begun]),
            ends[1] - ends[0],
            _drawn(task, [result.scene for result in begun]) if draw and physics.info.cameras else {},
        )
    finally:
        physics.close()


def _drawn(task: TaskSpec, scenes: Sequence[UInt8]) -> Mapping[str, UInt8]:
    """Frames of the scenes; nothing if this process cannot draw. The farm's processes may still be able to; if not,
    they raise the error."""
    try:
        renderer = make_renderer(task)
    except (FarmError, RuntimeError):
        return {}
    try:
        drawn = renderer.render(scenes, renderer.info.cameras)
        return {camera: np.array(frames) for camera, frames in drawn.items()}
    finally:
        renderer.close()


def _after_grip(physics: Physics, end: float) -> Float32:
    """[P] after the same episode's beginning with the last action element kept at `end`."""
    info = physics.info
    begun = physics.reset(EpisodeSpec(0))
    rest = info.rest_action or tuple(
        (low + high) / 2 for low, high in zip(info.action_low, info.action_high, strict=True)
    )
    if not np.isfinite([*rest, end]).all():
        return np.zeros_like(begun.proprio)
    return physics.step(np.tile(np.array([*rest[:-1], end], np.float32), (GRIP_STEPS, 1))).proprio


@dataclass(frozen=True)
class Dimension:
    """One number of the actions or of the robot's state, over all rows that are used."""

    name: str
    low: float
    high: float
    q01: float
    q99: float
    mean: float
    std: float
    environment: tuple[float, float] | None = None
    """Range that the environment takes, or that its episodes begin in."""
    beyond: float | None = None
    """Share of the rows outside that range."""
    remark: str = ""


@dataclass(frozen=True)
class Finding:
    """Something that cannot be right, or is odd."""

    text: str
    check: Check | None = None
    """The check whose refusal it is, which `sft.insist` overrules; None: a warning."""


@dataclass(frozen=True)
class Numbers:
    """The columns of the episodes that are used: N rows."""

    action: Float32
    """[N, A], in the environment's convention as far as the gripper is converted."""
    proprio: Float32
    """[N, P]; [N, 0] where the dataset has none."""
    state: Float32
    follows: npt.NDArray[np.bool_]
    """[N]: whether the next row belongs to the same episode."""

    @classmethod
    def of(cls, source: Source, gripper: GripperMap) -> Numbers:
        rows, dataset = source.rows(source.episodes), source.dataset
        last = np.array([dataset.episodes[i].end - 1 for i in source.episodes], np.int64)

        def column(name: str) -> Float32:
            if name not in dataset.features:
                return np.empty((len(rows), 0), np.float32)
            return dataset.column(name)[rows].reshape(len(rows), -1).astype(np.float32)

        action = column(layout.ACTION)
        return cls(
            gripper.applied(action) if action.shape[1] else action,
            column(layout.PROPRIO),
            column(layout.STATE),
            ~np.isin(rows, last),
        )


def frame_size(dataset: Dataset, camera: str) -> tuple[int, int]:
    """Height and width of a camera's frames, as info.json has them."""
    return dataset.features[dataset.cameras[camera]].picture[:2]


def names_of(dataset: Dataset, feature: str, count: int) -> tuple[str, ...]:
    """Names of a vector's elements in the dataset, or else their positions."""
    entry = dataset.info.get("features", {}).get(feature, {})
    names = entry.get("names") if isinstance(entry, dict) else None
    while isinstance(names, dict) and len(names) == 1:
        names = next(iter(names.values()))
    if isinstance(names, list) and len(names) == count and all(isinstance(name, str) for name in names):
        return tuple(f"{i} {name[:20]}" for i, name in enumerate(names))
    return tuple(map(str, range(count)))


def dimension(name: str, values: Float32, limits: tuple[float, float] | None) -> Dimension:
    """The numbers of one dimension, values [N]."""
    wide = values.astype(np.float64)
    q01, q99 = np.quantile(wide, (0.01, 0.99)).tolist()
    found = Dimension(
        name, float(wide.min()), float(wide.max()), q01, q99, float(wide.mean()), float(wide.std()), limits
    )  # fmt: skip
    if limits is not None and np.isfinite(limits).all():
        found = replace(found, beyond=float((_reach(wide, limits) > 1 + TOLERANCE).mean()))
    return replace(found, remark=_remark(found))


def _reach(values: npt.NDArray[Any], limits: tuple[float, float]) -> npt.NDArray[np.float64]:
    """Distance from the middle of a range, over half its width."""
    low, high = limits
    return np.abs(np.asarray(values, np.float64) - (low + high) / 2) / max((high - low) / 2, 1e-12)


def _remark(found: Dimension) -> str:
    width, largest = found.high - found.low, max(abs(found.low), abs(found.high))
    if width == 0:
        return "constant"
    if width < NOISE * largest:
        return f"varies by {width:.2g} around {found.mean:.4g}: rounding"
    middle, half = (found.q01 + found.q99) / 2, (found.q99 - found.q01) / 2
    farthest = max(found.high - middle, middle - found.low)
    if half == 0 or farthest / half > EXPLODES:
        size = "without bound" if half == 0 else f"to {farthest / half:.3g}"
        return f"nearly constant: 98% lie in {found.q01:.4g} to {found.q99:.4g}, the others are normalised {size}"
    deviations = max(found.high - found.mean, found.mean - found.low) / found.std
    return f"nearly constant: reaches {deviations:.3g} deviations" if deviations > EXPLODES else ""


def oddities(source: Source, own: Numbers) -> Iterator[Finding]:
    """Warnings about the dataset alone, without comparing it with the environment."""
    dataset = source.dataset
    for name, values in ((layout.ACTION, own.action), (layout.PROPRIO, own.proprio)):
        labels = names_of(dataset, name, values.shape[1])
        odd = [dimension(label, values[:, i], None) for i, label in enumerate(labels)]
        two = name == layout.ACTION and values.shape[1] and _two_valued(values[:, -1]) is not None
        remarks = [(d.name, d.remark) for d in (odd[:-1] if two else odd) if d.remark and d.remark != "constant"]
        if remarks:
            listed = "; ".join(f"dimension {label} {remark}" for label, remark in remarks[:SHOWN])
            yield Finding(f"{dataset.folder}: {name}: {listed}")
        still = [d.name for d in odd if d.remark == "constant"]
        if still and len(still) == len(odd):
            check: Check | None = "actions" if name == layout.ACTION and len(values) >= ENOUGH else None
            yield Finding(f"{dataset.folder}: {name} never changes: all of its numbers are constant", check)
    if source.copies:
        yield Finding(
            f"{dataset.folder}: {source.copies} episodes are copies of held-out ones, and are not learned from"
        )


def check_history(source: Source, history: History) -> Iterator[Finding]:
    """A warning about episodes that are all shorter than what the policy looks back."""
    back = history.distance * (history.observations - 1)
    longest = max((source.dataset.episodes[i].length for i in source.episodes), default=0)
    if 0 < longest <= back:
        yield Finding(
            f"{source.dataset.folder}: the oldest of the policy's {history.observations} observations lies {back} env "
            f"steps back, and the longest episode that is used has {longest} env steps: its first observation always "
            "stands for the oldest one. A policy of fewer observations, or of a smaller distance, learns more from it"
        )


def compared(
    source: Source, own: Numbers, config: Config, environment: Environment, history: History
) -> Iterator[Finding]:
    """Findings in which the environment contradicts the dataset."""
    yield from _check_actions(source.dataset, own, environment)
    yield from _check_gripper(source.dataset, own, environment)
    yield from _check_rate(source, environment.info, history)
    if "images" in config.policy.reads:
        yield from _check_orientation(source, config)
        yield from _check_frames(source, environment)
        size = environment.info.spec.image_size
        for camera in environment.info.cameras:
            found = frame_size(source.dataset, camera)
            if found != (size, size):
                square = f": --env.image-size {found[0]}" if found[0] == found[1] else ""
                yield Finding(
                    f"{source.dataset.folder}: frames of {camera} are {found[0]} x {found[1]}, and those that the "
                    f"policy acts on {size} x {size}{square}"
                )
    if _is_recording_of(source.dataset, environment.info) is False:
        return  # of another task of the run
    if "proprio" in config.policy.reads:
        yield from _check_state(source.dataset, layout.PROPRIO, own.proprio, environment.proprio)
    if "state" in config.policy.reads:
        yield from _check_state(source.dataset, layout.STATE, own.state, environment.state)


def _is_recording_of(dataset: Dataset, info: TaskInfo) -> bool | None:
    """True if the dataset is a recording of this task; None: it does not say."""
    return None if dataset.task is None else dataset.task.name == info.spec.name


def _check_actions(dataset: Dataset, own: Numbers, environment: Environment) -> Iterator[Finding]:
    info = environment.info
    ours = dataset.task is not None
    labels, wrong, beyond, reached = names_of(dataset, layout.ACTION, own.action.shape[1]), [], [], []
    for i, limits in enumerate(zip(info.action_low, info.action_high, strict=True)):
        if not np.isfinite(limits).all():
            continue
        reach = _reach(own.action[:, i], limits)
        share, far = float((reach > 1 + TOLERANCE).mean()), reach > (FAR_OURS if ours else FAR)
        reached.append(float(reach.max()))
        deviation = (
            f"dimension {labels[i]} has {own.action[:, i].min():.4g} to {own.action[:, i].max():.4g}, and "
            f"{info.spec.name} takes {limits[0]:.4g} to {limits[1]:.4g} ({100 * share:.1f}% beyond)"
        )
        if far.mean() > FAR_SHARE and far.sum() >= ENOUGH:
            wrong.append(deviation)
        elif share > 0:
            beyond.append(deviation)
    if wrong:
        yield Finding(
            f"{dataset.folder}: the actions are not those of {info.spec.control_mode}: {'; '.join(wrong[:SHOWN])}. "
            "Other units (degrees, metres) or absolute targets where differences are taken: convert them, or choose "
            "the control mode that takes them (--env.control-mode)",
            "actions",
        )
    if beyond:
        yield Finding(
            f"{dataset.folder}: actions beyond the range are clipped by the environment: {'; '.join(beyond[:SHOWN])}"
        )
    moving = reached[:-1] if _two_valued(own.action[:, -1]) is not None else reached
    if moving and 0 < max(moving) < SMALL:
        yield Finding(
            f"{dataset.folder}: the actions reach {100 * max(moving):.2g}% of the range that {info.spec.name} takes: "
            "are they in other units (metres, radians) than the environment's?"
        )
    same = _followed(own, info)
    if same:
        names = ", ".join(labels[i] for i in same[:SHOWN])
        takes_differences = "delta" in (info.spec.control_mode or "")
        yield Finding(
            f"{dataset.folder}: the actions are the robot's own state in dimensions {names}: absolute targets"
            + (f", and {info.spec.control_mode} takes differences" if takes_differences else ""),
            "actions" if takes_differences else None,
        )


def _followed(own: Numbers, info: TaskInfo) -> list[int]:
    """Dimensions of the actions that equal the state's number of the same place, nearly; none unless most do."""
    count = min(own.action.shape[1], own.proprio.shape[1])
    rows = np.flatnonzero(own.follows)
    a, s = (values[:, :count].astype(np.float64) for values in (own.action, own.proprio))
    if len(rows) < ENOUGH:
        return []
    # A target is where the robot is, or where it is an env step later.
    distance = np.minimum(np.abs(a[rows] - s[rows]).mean(0), np.abs(a[rows] - s[rows + 1]).mean(0))
    near = (s.std(0) > 1e-3) & (distance < FOLLOWS * s.std(0))
    return np.flatnonzero(near).tolist() if near.sum() >= max(2, math.ceil(0.5 * info.action_dim)) else []


def _two_valued(values: Float32) -> tuple[float, float] | None:
    """The two ends of a column that is nearly always at one of them, and at both for `ENOUGH` rows."""
    low, high = float(values.min()), float(values.max())
    near = 0.02 * (high - low)
    at_ends = (values <= low + near).sum(), (values >= high - near).sum()
    both = high > low and min(at_ends) >= ENOUGH
    return (low, high) if both and sum(at_ends) >= TWO_VALUED * len(values) else None


def _is(ends: tuple[float, float], wanted: tuple[float, float]) -> bool:
    return bool(np.allclose(ends, wanted, atol=0.02 * (wanted[1] - wanted[0])))


def _check_gripper(dataset: Dataset, own: Numbers, environment: Environment) -> Iterator[Finding]:
    info, grip = environment.info, own.action[:, -1]
    ours = dataset.task is not None  # its conventions have been compared
    limits = (info.action_low[-1], info.action_high[-1])
    ends, agrees = None if ours else _two_valued(grip), _agreement(own, environment)
    where = f"{dataset.folder}: the last action (the gripper's)"
    takes = f"env.gripper {info.spec.gripper} takes {limits[0]:g} or {limits[1]:g}"
    movement = f"it moves the gripper {'as the environment does' if agrees > 0 else 'the other way'}"

    def remedy(straight: str, other: str) -> str:
        if agrees:
            return f"{movement} (so the robot's state says): {straight if agrees > 0 else other}"
        return f"{straight} where the larger one does what the environment's {limits[1]:g} does, else {other}"

    if ends is not None and _is(ends, (0, 1)) and _is(limits, (-1, 1)):
        other = "--sft.gripper from_1_0 (or --env.gripper inverted, as OpenVLA has it in LIBERO)"
        yield Finding(f"{where} is 0 or 1, and {takes}; {remedy('--sft.gripper from_0_1', other)}", "gripper")
    elif ends is not None and _is(ends, (-1, 1)) and _is(limits, (0, 1)):
        straight, other = "--sft.gripper from_minus_plus", "--sft.gripper from_plus_minus (or --env.gripper simulator)"
        yield Finding(f"{where} is -1 or 1, and {takes}; {remedy(straight, other)}", "gripper")
    elif ends is not None and environment.grip.any() and not _is(ends, limits):
        yield Finding(
            f"{where} is {ends[0]:g} or {ends[1]:g}, and {takes}: convert the column to these two, as finger widths or "
            "other units must be",
            "gripper",
        )
    elif ends is not None and agrees < 0:
        turned = "from_plus_minus" if _is(ends, (-1, 1)) else "from_1_0"
        yield Finding(f"{where}: {movement} (so the robot's state says): --sft.gripper {turned}, if that is right")
    elif environment.grip.any() and grip.min() == grip.max():
        yield Finding(f"{where} is always {grip.min():g}: the policy learns neither to open nor to close")
    elif ours or ends is not None or not environment.grip.any():
        return
    elif _is(limits, (-1, 1)) and 0 <= grip.min() < 0.1 and grip.max() > 0.5:
        yield Finding(
            f"{where} is within {grip.min():.3g} to {grip.max():.3g}, the upper half of what the environment "
            "takes (-1 to 1): is it an opening of 0 to 1? --sft.gripper from_0_1 (or from_1_0) stretches it"
        )


def _agreement(own: Numbers, environment: Environment) -> int:
    """1: what the gripper's upper end does to proprioception in the environment, it does in the data; -1: the opposite;
    0: undecided."""
    grip, response = own.action[:, -1].astype(np.float64), environment.grip.astype(np.float64)
    if own.proprio.shape[1] != len(response) or not response.any() or grip.min() == grip.max():
        return 0
    upper = grip > (grip.min() + grip.max()) / 2
    rows = np.flatnonzero(own.follows)
    after = own.proprio[rows + 1].astype(np.float64)
    groups = after[upper[rows]], after[~upper[rows]]
    if min(map(len, groups)) < ENOUGH:
        return 0
    spread = np.sqrt(sum(group.var(0) / len(group) for group in groups))
    contrast = np.divide(groups[0].mean(0) - groups[1].mean(0), spread, out=np.zeros(len(response)), where=spread > 0)
    # The numbers that the gripper moves, and nothing else does in the environment's trial.
    moved = (np.abs(response) > 0.3 * np.abs(response).max()) & (np.abs(contrast) > 4)
    votes = np.sign(contrast[moved]) * np.sign(response[moved])
    return int(votes[0]) if len(votes) and (votes == votes[0]).all() else 0


def _check_rate(source: Source, info: TaskInfo, history: History) -> Iterator[Finding]:
    fps, hz = float(source.dataset.fps), info.control_hz
    if abs(fps - hz) <= max(0.5, 0.02 * hz):
        return
    shipped = SHIPPED.get(source.features) if isinstance(source.features, str) else None
    if shipped and (shipped.written_fps, shipped.control_hz) == (fps, hz):
        yield Finding(
            f"{source.dataset.folder}: info.json has {fps:g} frames per second, which {source.features}'s tool always "
            f"writes; the recordings are of {hz:g}, as {info.spec.name} is"
        )
        return
    likely = [name for name, known in SHIPPED.items() if (known.written_fps, known.control_hz) == (fps, hz)]
    hint = f" ({' and '.join(likely)} write {fps:g} for recordings of {hz:g}: --sft.features says so)" if likely else ""
    apart = ""
    if history.observations > 1:
        there, here, closest = history.distance / hz, history.distance / fps, 1 / fps
        apart = (
            f", and the {history.observations} observations of a decision are {here:.3g} s apart in the one and "
            f"{there:.3g} s in the other"
        )
        if closest > 1.02 * there:
            apart += f" (the dataset has no two frames closer than {closest:.3g} s)"
    yield Finding(
        f"{source.dataset.folder}: {fps:g} frames per second, and {info.spec.name} runs at {hz:g} env steps a second: "
        f"an action of the one moves {max(fps, hz) / min(fps, hz):.3g} times as long as one of the other{apart}{hint}",
        "fps",
    )


def _check_orientation(source: Source, config: Config) -> Iterator[Finding]:
    shipped = SHIPPED.get(source.features) if isinstance(source.features, str) else None
    imported = source.dataset.conventions.get("orientation")
    known, by = (imported, layout.IMPORT) if imported else (shipped and shipped.orientation, source.features)
    if known and source.dataset.task is None and known != config.env.orientation:
        yield Finding(
            f"{source.dataset.folder}: frames of {by} are {known}, and env.orientation is {config.env.orientation}: "
            f"--env.orientation {known}",
            "orientation",
        )


def _check_frames(source: Source, environment: Environment) -> Iterator[Finding]:
    """Frames that are alike only once they are turned or mirrored, or that are another camera's."""
    dataset, info = source.dataset, environment.info
    if dataset.task is not None:  # a recording of ours, whose conventions have been compared
        return
    chosen = source.episodes[:: -(-len(source.episodes) // FRAMES)]
    rows = [dataset.episodes[i].begin for i in chosen]
    down = -1 if info.stock_upside_down else 1
    turns = {"upright": (1, 1), "stock": (down, 1), "rotated": (-down, -1)}
    now = turns[info.spec.orientation]
    outlines = {camera: _outline(frames) for camera, frames in environment.frames.items()}
    for camera, drawn in outlines.items():
        seen = _outline(dataset.frames(camera, rows))
        others = {name: float((seen * other).mean()) for name, other in outlines.items()}
        nearest = max(others, key=lambda name: others[name])
        if others[nearest] > ALIKE and others[nearest] - others[camera] > 2 * MORE_ALIKE:
            yield Finding(
                f"{dataset.folder}: frames of {camera} look like the environment's {nearest} (correlation "
                f"{others[nearest]:.2f}, and {others[camera]:.2f} with its {camera}): is sft.features as it should be?"
            )
            continue
        alike = {
            (v, h): float((seen[::v, ::h] * drawn).mean()) for v in (1, -1) for h in (1, -1)
        }  # correlations: outlines have mean 0 and deviation 1
        best = max(alike.values())
        if best < ALIKE or best - alike[1, 1] < MORE_ALIKE:
            continue
        named = [name for name, (v, h) in turns.items() if best - alike[v * now[0], h * now[1]] < MORE_ALIKE / 3]
        remedy = f"--env.orientation {named[0]}" if named else "they are mirrored, which no env.orientation is"
        yield Finding(
            f"{dataset.folder}: frames of {camera} look like the environment's turned (correlation {best:.2f}, "
            f"and {alike[1, 1]:.2f} as env.orientation {info.spec.orientation} has them): {remedy}; `embodied inspect` "
            "draws them"
        )


def _outline(frames: UInt8) -> npt.NDArray[np.float64]:
    """[24, 24] the mean of the frames [K, H, W, 3] in grey, with mean 0 and deviation 1."""
    mean = Image.fromarray(frames.mean(0).astype(np.uint8)).convert("L").resize((24, 24), Image.Resampling.BOX)
    grey = np.asarray(mean, np.float64)
    return (grey - grey.mean()) / max(float(grey.std()), 1e-9)


def _check_state(dataset: Dataset, name: str, values: Float32, begun: Float32) -> Iterator[Finding]:
    """Findings where episodes of the environment begin far outside the data's range."""
    few = dataset.task is not None and len(dataset.episodes) < ENOUGH
    if values.shape[1] != begun.shape[1] or few:  # a few of ours do not span where episodes begin
        return
    low, high = values.min(0).astype(np.float64), values.max(0).astype(np.float64)
    room = np.maximum(high - low, 0.05 * np.maximum(np.abs(low), np.abs(high))) + 1e-3
    outside = ((begun < low - room) | (begun > high + room)).all(0)
    if outside.any():
        labels = names_of(dataset, name, values.shape[1])
        deviations = [
            f"{labels[i]} is {low[i]:.4g} to {high[i]:.4g} in the data and {begun[:, i].mean():.4g} at a reset"
            for i in np.flatnonzero(outside)[:SHOWN].tolist()
        ]
        yield Finding(
            f"{dataset.folder}: {name} is not where the environment's episodes begin: {'; '.join(deviations)}. "
            "Other numbers, another order or other units?"
        )


def check_instructions(sources: Sequence[Source], environment: Environment) -> Iterator[Finding]:
    where = " and ".join(str(source.dataset.folder) for source in sources)
    episodes = [source.dataset.episodes[i] for source in sources for i in source.episodes]
    instructions = {text for episode in episodes for text in episode.instructions}
    if all(_is_recording_of(source.dataset, environment.info) is False for source in sources):
        return
    empty = any(not text.strip() for text in instructions)
    if empty:
        yield Finding(
            f"{where}: some episodes have no instruction, and the policy reads it: no instruction "
            "leads to what it learns from them. Leave them out (sft.episodes), or write it into the dataset's tasks"
        )
    if instructions and environment.instruction not in instructions:
        some = ", ".join(shown(text) for text in sorted(instructions)[:SHOWN])
        yield Finding(
            f"{where}: no instruction is {shown(environment.instruction)}, which "
            f"{environment.info.spec.name} gives the policy; there are {len(instructions)}: {some}"
        )
