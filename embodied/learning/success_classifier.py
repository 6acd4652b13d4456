"""Success classifier: a small network that predicts from frames and an instruction if a task is solved, or nearly.

FOLDER/classifier.json           cameras, size and orientation of frames
FOLDER/classifier.safetensors    the weights
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from safetensors.torch import save_file
from torch import Tensor, nn

from embodied.errors import UserError
from policies.contract import Inputs, PolicyError, PolicySpec
from policies.files import check_tensors, checked, read_json, read_tensors
from policies.small.encoders import CnnEncoder

DESCRIPTION, WEIGHTS = "classifier.json", "classifier.safetensors"
FEATURES, WORD_FEATURES, HIDDEN = 64, 16, 64
WORD_BUCKETS = 1024
"""Number of word embeddings: a word's checksum modulo this is its index, without a vocabulary."""


@dataclass(frozen=True)
class Looks:
    """The frames that a classifier reads."""

    cameras: tuple[str, ...]
    image_size: int
    orientation: str
    """Orientation of the frames, one of `env.orientation`."""


class _Description(BaseModel):
    """The file DESCRIPTION."""

    cameras: Annotated[tuple[str, ...], Field(min_length=1, max_length=16)]
    image_size: Annotated[int, Field(ge=16, le=1024)]
    orientation: str


class SuccessClassifier(nn.Module):
    """Frames through the policies' small CNN, the instruction as a bag of its words; one logit per row."""

    def __init__(self, looks: Looks) -> None:
        super().__init__()
        self.looks = looks
        spec = PolicySpec(action_dim=1, cameras=looks.cameras, image_size=looks.image_size)
        self.frames = CnnEncoder(spec, FEATURES)
        self.words = nn.EmbeddingBag(WORD_BUCKETS, WORD_FEATURES, mode="mean")
        self.head = nn.Sequential(nn.Linear(FEATURES + WORD_FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, frames: Mapping[str, Tensor], instructions: Sequence[str]) -> Tensor:
        """float32 [N] logits. Frames are uint8 [N, H, W, 3] on the classifier's device; other cameras are ignored."""
        device = self.words.weight.device
        bags = [[zlib.crc32(word.encode()) % WORD_BUCKETS for word in words_of(text)] for text in instructions]
        ids = torch.tensor([word for bag in bags for word in bag], dtype=torch.int64, device=device)
        begins = torch.tensor([0, *(len(bag) for bag in bags)][:-1], dtype=torch.int64, device=device).cumsum(0)
        features = torch.cat([self.frames(Inputs(frames=frames)), self.words(ids, begins)], -1)
        return self.head(features)[:, 0]

    @torch.no_grad()
    def probability(self, frames: Mapping[str, Tensor], instructions: Sequence[str]) -> Tensor:
        """float32 [N] in 0..1: probability that the task is solved, or nearly, at even prior odds."""
        return self(frames, instructions).sigmoid()

    def save(self, folder: Path) -> None:
        """Write both files into the folder, which is made."""
        folder.mkdir(parents=True)
        save_file({name: tensor.contiguous() for name, tensor in self.state_dict().items()}, folder / WEIGHTS)
        (folder / DESCRIPTION).write_text(json.dumps(asdict(self.looks), indent=2) + "\n")

    @classmethod
    def load(cls, folder: Path) -> SuccessClassifier:
        """The classifier in the folder, on the CPU. Raises `UserError` where there is none, or a damaged one."""
        if not (folder / DESCRIPTION).exists() or not (folder / WEIGHTS).exists():
            raise UserError(
                f"there is no success classifier in {folder}: train one with `embodied reward DATA --out {folder}`"
            )
        try:
            found = checked(folder / DESCRIPTION, _Description, read_json(folder / DESCRIPTION))
            with torch.device("meta"):  # no memory is taken before the tensors are seen to fit
                classifier = cls(Looks(found.cameras, found.image_size, found.orientation))
            tensors = read_tensors(folder / WEIGHTS)
            check_tensors(folder / WEIGHTS, tensors, classifier.state_dict())
            classifier.load_state_dict({name: tensor.clone() for name, tensor in tensors.items()}, assign=True)
        except PolicyError as error:
            raise UserError(f"the success classifier in {folder} is damaged ({error}): train it again") from error
        return classifier


def words_of(text: str) -> list[str]:
    """The words of an instruction, in lower case."""
    return re.findall(r"\w+", text.lower())
