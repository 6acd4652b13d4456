"""Inputs of pi0: camera frames to pixel values, instructions to PaliGemma's tokens.

B rows, L tokens. Frames are fitted into a square, black at the sides, in -1..1.

openpi has two ways. `pillow` is what its clients do to every frame (openpi_client/image_tools.py): Pillow's bilinear
filter, which averages where it makes frames smaller. `interpolate` is the training code's and LeRobot's
(models_pytorch/preprocessing_pytorch.py): bilinear samples without averaging, of floats. Pixels differ measurably; a
checkpoint wants the one that it was trained with. LeRobot 0.4 filled pictures of 0..1 up with -1, as openpi does those
of -1..1: in the network's units its sides are at -3. B frames of H x W pixels, S the side of the square.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import PolicyError
from policies.flow_vla.prompts import filled_up
from policies.resampling import fit_square, fitted_size

Resize = Literal["pillow", "interpolate"]
BLACK, OF_LEROBOT_04 = -1.0, -3.0
"""Padding value of pictures, in the network's units."""


def pixel_values(frames: Tensor, size: int, way: Resize, sides: float = BLACK) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, S, S] in -1..1, filled up with `sides` where it is interpolated."""
    if way == "pillow":
        return (fit_square(frames, size, "bilinear").float() / 255 * 2 - 1).permute(0, 3, 1, 2)
    height, width = frames.shape[1:3]
    rows, columns = fitted_size(height, width, size, size)
    pixels = (frames.float() / 255 * 2 - 1).permute(0, 3, 1, 2)
    pixels = functional.interpolate(pixels, (rows, columns), mode="bilinear", align_corners=False).clamp(-1, 1)
    above, beside = (size - rows) // 2, (size - columns) // 2
    return functional.pad(pixels, (beside, size - columns - beside, above, size - rows - above), value=sides)


# --- instructions to PaliGemma's tokens, as each project encodes them

Convention = Literal["openpi", "lerobot", "lerobot-0.4"]
TOKENIZER = "tokenizer.model"
BINS = 256


class Prompts:
    """The tokenizer of a checkpoint."""

    def __init__(self, folder: Path, length: int, convention: Convention, state_dim: int = 0) -> None:
        """Prompts are cut and filled up to `length`. `state_dim` is that to which LeRobot 0.4 filled states up.

        Raises `PolicyError` where there is no SentencePiece model.
        """
        from sentencepiece import SentencePieceProcessor

        path = folder / TOKENIZER
        if not path.is_file():
            raise PolicyError(
                f"incomplete checkpoint: {path} is missing, PaliGemma's SentencePiece model. LeRobot's "
                "checkpoints do not have it: copy tokenizer.model of google/paligemma-3b-pt-224 there, which "
                f"`hf download google/paligemma-3b-pt-224 tokenizer.model --local-dir {folder}` does"
            )
        try:
            self._tokenizer: Any = SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError, ValueError) as error:
            raise PolicyError(f"{path} is no SentencePiece model: {str(error)[:500]}") from error
        self._length, self._convention, self._state_dim = length, convention, state_dim

    def text(self, instruction: str, state: Tensor | None) -> str:
        """Text that is encoded; `state` [D] is normalised, None where the prompt has none."""
        if state is not None:
            numbers = " ".join(map(str, self._bins(state)))
            return f"Task: {cleaned(instruction)}, State: {numbers};\nAction: "
        if self._convention == "openpi":
            return f"{cleaned(instruction)}\n"
        return instruction if instruction.endswith("\n") else f"{instruction}\n"

    def tokens(self, instruction: str, state: Tensor | None) -> list[int]:
        """Tokens of the whole prompt, with its beginning-of-sequence token."""
        text = self.text(instruction, state)
        if state is None and self._convention == "openpi":
            return [*self._tokenizer.encode(text[:-1], add_bos=True), *self._tokenizer.encode("\n")]
        return list(self._tokenizer.encode(text, add_bos=True))

    def batch(self, instructions: tuple[str, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """int64 [B, L] and bool [B, L] which of them are the prompt's; `state` [B, D] normalised, or None.

        Raises `PolicyError` for a prompt that is longer: what would be cut off is the instruction.
        """
        states = [None] * len(instructions) if state is None else state
        found = [self.tokens(text, own) for text, own in zip(instructions, states, strict=True)]
        return filled_up(instructions, found, self._length)

    def _bins(self, state: Tensor) -> list[int]:
        if self._convention == "lerobot-0.4" and len(state) < self._state_dim:
            state = torch.cat([state, state.new_zeros(self._state_dim - len(state))])
        edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)[:-1]
        return (torch.bucketize(state.double(), edges, right=True) - 1).tolist()


def cleaned(instruction: str) -> str:
    """openpi's."""
    return instruction.strip().replace("_", " ").replace("\n", " ")
