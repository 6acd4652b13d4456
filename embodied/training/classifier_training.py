"""Training a success classifier from recorded episodes: what `embodied reward` does.

A frame is positive if it is among the last of a successful episode, else negative. Half of every batch is
positive. Whole episodes are held out, and the classifier is measured on them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from embodied.demonstrations import Dataset
from embodied.demonstrations.mixture import open_dataset
from embodied.errors import UserError
from embodied.learning.success_classifier import Looks, SuccessClassifier
from embodied.reporting.live import steps as progress_bar
from embodied.trajectories.random_streams import CLASSIFICATION, generator, permutation

MEASURED = 256
"""Frames that are looked at together when the held-out episodes are measured."""

Index = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ClassifierTraining:
    """Settings of a success classifier's training."""

    last: int = 2
    """Frames at the end of a successful episode that are positive."""
    steps: int = 200
    batch: int = 64
    lr: float = 1e-3
    holdout: float = 0.2
    """Share of the episodes that is measured and not learned from."""
    seed: int = 0


@dataclass(frozen=True)
class Labelled:
    """Frames of some datasets, counted through all of them, and which are positive."""

    datasets: tuple[Dataset, ...]
    looks: Looks
    positive: npt.NDArray[np.bool_]
    """Label of each frame."""
    episode: Index
    """The number of each frame's episode."""

    def inputs(self, rows: Index) -> tuple[dict[str, Tensor], tuple[str, ...]]:
        """Frames and instructions of the rows, in their order."""
        begins = np.cumsum([0, *(len(dataset) for dataset in self.datasets)])
        order, parts = [], []
        for dataset, begin, end in zip(self.datasets, begins[:-1], begins[1:], strict=True):
            places = np.flatnonzero((rows >= begin) & (rows < end))
            if len(places):
                order.append(places)
                parts.append(dataset.batch(rows[places] - begin, 1, self.looks.cameras))
        back = np.argsort(np.concatenate(order))
        texts = [text for part in parts for text in part.instruction]
        frames = {name: np.concatenate([part.frames[name] for part in parts])[back] for name in self.looks.cameras}
        return {name: torch.from_numpy(f) for name, f in frames.items()}, tuple(texts[i] for i in back.tolist())


def read_labelled(folders: Sequence[Path], last: int) -> Labelled:
    """The datasets with their labels. Raises `UserError` for one without successes, frames, or of other frames."""
    if not folders:
        raise UserError("no episodes are named: a dataset, as `embodied record` writes them")
    datasets = tuple(open_dataset(folder) for folder in folders)
    looks = [_looks_of(dataset) for dataset in datasets]
    for dataset, its in zip(datasets, looks, strict=True):
        if its != looks[0]:
            raise UserError(f"the frames of {dataset.folder} are {its}, those of {datasets[0].folder} {looks[0]}")
    positive, episode, count = [], [], 0
    for dataset in datasets:
        for recorded in dataset.episodes:
            from_end = np.arange(recorded.length, 0, -1)
            positive.append((from_end <= last) & bool(recorded.row["success"]))
            episode.append(np.full(recorded.length, count))
            count += 1
    return Labelled(datasets, looks[0], np.concatenate(positive), np.concatenate(episode))


def _looks_of(dataset: Dataset) -> Looks:
    if not dataset.cameras:
        raise UserError(f"{dataset.folder} has no frames: record it with --env.cameras 1")
    if any("success" not in episode.row for episode in dataset.episodes):
        raise UserError(f"{dataset.folder} does not say which episodes were solved: record it with `embodied record`")
    shapes = {dataset.features[name].picture[:2] for name in dataset.cameras.values()}
    sides = {side for shape in shapes for side in shape}
    if len(sides) != 1:
        raise UserError(f"the frames of {dataset.folder} are not square and of one size: {sorted(shapes)}")
    orientation = "upright" if dataset.task is None else dataset.task.orientation
    return Looks(tuple(dataset.cameras), sides.pop(), orientation)


def learn_success(labelled: Labelled, settings: ClassifierTraining) -> tuple[SuccessClassifier, dict[str, float]]:
    """A classifier, and its accuracy on frames of held-out episodes.

    A function of the frames and the settings. Raises `UserError` where there is nothing to tell apart.
    """
    learned, held_out = _divided(labelled, settings)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(settings.seed)
        classifier = SuccessClassifier(labelled.looks)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=settings.lr)
    with progress_bar("Learning what success looks like", settings.steps) as bar:
        for step, rows in enumerate(_batches(labelled, learned, settings)):
            for group in optimizer.param_groups:
                group["lr"] = settings.lr * (1 - step / settings.steps)
            optimizer.zero_grad(set_to_none=True)
            wanted = torch.from_numpy(labelled.positive[rows]).float()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(classifier(*labelled.inputs(rows)), wanted)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            bar.advance(1, f"loss {float(loss.detach()):.4g}")
    return classifier, measure(classifier, labelled, held_out) if len(held_out) else {}


def measure(classifier: SuccessClassifier, labelled: Labelled, rows: Index) -> dict[str, float]:
    """Accuracy on the rows: shares of positive and negative frames that are classified as such, their mean, and the
    area under the ROC curve."""
    pieces = [rows[i : i + MEASURED] for i in range(0, len(rows), MEASURED)]
    probabilities = torch.cat([classifier.probability(*labelled.inputs(piece)) for piece in pieces]).numpy()
    positive = labelled.positive[rows]
    high, low = probabilities[positive], probabilities[~positive]
    found = {"held_out_frames": float(len(rows)), "held_out_positive": float(len(high))}
    if not len(high) or not len(low):
        return found
    higher = (high[:, None] > low).mean() + (high[:, None] == low).mean() / 2
    right, wrong = float((high >= 0.5).mean()), float((low >= 0.5).mean())
    accuracy = (right + 1 - wrong) / 2
    return found | {
        "true_positive_rate": right,
        "false_positive_rate": wrong,
        "balanced_accuracy": accuracy,
        "roc_area": float(higher),
    }


def _divided(labelled: Labelled, settings: ClassifierTraining) -> tuple[Index, Index]:
    """The frames to learn from, and those of the held-out episodes."""
    episodes = int(labelled.episode[-1]) + 1
    held_out = permutation(settings.seed, 0, 0, episodes)[: round(settings.holdout * episodes)]
    out = np.isin(labelled.episode, held_out)
    learned = np.flatnonzero(~out)
    count = int(labelled.positive[learned].sum())
    if not 0 < count < len(learned):
        which = "no episode that was solved" if not count else "no frame before success"
        raise UserError(f"there is {which} among those to learn from: record more of both, or change --last")
    return learned, np.flatnonzero(out)


def _batches(labelled: Labelled, rows: Index, settings: ClassifierTraining) -> Iterator[Index]:
    """The rows of each step: half positive and half negative, drawn by the seed and the step's number."""
    positive = labelled.positive[rows]
    kinds, half = (rows[positive], rows[~positive]), settings.batch // 2
    for step in range(settings.steps):
        draw = generator(CLASSIFICATION, settings.seed, 0, step, 0)
        yield np.concatenate([kind[draw.integers(len(kind), size=half)] for kind in kinds])
