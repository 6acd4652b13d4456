"""Inputs of SmolVLA: camera frames to pixel values, instructions to the backbone's tokens.

B rows, L tokens, frames of H x W pixels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn import functional

from policies.contract import PolicyError
from policies.files import SHOWN_ERROR, read_json, shown
from policies.flow_vla.prompts import filled_up
from policies.resampling import fitted_size
from policies.smolvla.backbone import TOKENIZER, TOKENIZER_CONFIG

AROUND_IMAGES = ("<fake_token_around_image>", "<global-img>", "<fake_token_around_image>")
"""Special tokens of which two stand before each image and one after it, where a checkpoint has them."""
PAD = "<|im_end|>"
"""Token that fills prompts up, where the tokenizer names none. Nothing sees it."""


def pixel_values(frames: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, height, width] in -1..1 for a `size` of (width, height): bilinear samples,
    filled up with black at the left and at the top (LeRobot's `resize_with_pad`)."""
    pixels = (frames.float() / 255).permute(0, 3, 1, 2)
    (height, width), (columns, rows) = frames.shape[1:3], size
    if (height, width) != (rows, columns):
        fitted = fitted_size(height, width, rows, columns)
        pixels = functional.interpolate(pixels, fitted, mode="bilinear", align_corners=False)
        pixels = functional.pad(pixels, (columns - fitted[1], 0, rows - fitted[0], 0))
    return pixels * 2 - 1


class Prompts:
    """The tokenizer of a backbone."""

    def __init__(self, folder: Path, length: int, vocab_size: int) -> None:
        """Prompts are filled up to `length`. Raises `PolicyError` where the folder holds no tokenizer, or one with more
        tokens than the network knows."""
        from tokenizers import Tokenizer

        path = folder / TOKENIZER
        if not path.is_file():
            raise PolicyError(f"incomplete backbone: {path} is missing")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
            # A file may ask for truncation or padding of its own.
            self._tokenizer.no_truncation()
            self._tokenizer.no_padding()
            last = max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        except BaseException as error:  # the library raises nothing narrower, and panics where a file is damaged
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise PolicyError(f"{path} is no tokenizer: {str(error)[:SHOWN_ERROR]}") from None
        if last >= vocab_size:
            raise PolicyError(f"{path} has more tokens than the network, which knows {vocab_size}")
        self._path, self._length = path, length
        said = folder / TOKENIZER_CONFIG
        named = read_json(said).get("pad_token", PAD) if said.is_file() else PAD
        pad = named.get("content") if isinstance(named, dict) else named
        try:
            found = self._tokenizer.token_to_id(pad) if isinstance(pad, str) else None
        except UnicodeEncodeError as error:
            raise PolicyError(f"{said}: pad_token is {shown(pad)}, which is no text: {error.reason}") from None
        self._pad = 0 if found is None else found

    def around_images(self) -> tuple[int, ...]:
        """Special tokens: two before each image, one after it. Raises `PolicyError` where the tokenizer lacks them."""
        found = tuple(self._tokenizer.token_to_id(token) for token in AROUND_IMAGES)
        if None in found:
            raise PolicyError(
                f"add_image_special_tokens is true, and {self._path} lacks {AROUND_IMAGES[found.index(None)]!r}: take "
                "the backbone that the policy was trained with"
            )
        return found

    def tokens(self, instruction: str) -> list[int]:
        """Tokens of the whole prompt: the instruction with a line feed at its end."""
        text = instruction if instruction.endswith("\n") else f"{instruction}\n"
        return list(self._tokenizer.encode(text).ids)

    def batch(self, instructions: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """int64 [B, L] and bool [B, L] which of them are the prompt's. All prompts are filled up to one length: a row
        does not depend on the other rows of its batch.

        Raises `PolicyError` for a prompt that is longer: what would be cut off is the instruction.
        """
        return filled_up(instructions, [self.tokens(text) for text in instructions], self._length, self._pad)
