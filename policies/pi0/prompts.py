"""From instructions to PaliGemma's tokens, as each project has it. B rows, L tokens.

    openpi, pi0 and pi0.5 without a state    encode(text), then encode("\n") by itself
    LeRobot, pi0                             encode(text + "\n"), whatever is in the text
    pi0.5 with a state                       encode("Task: text, State: 185 111 228;\nAction: ")

A prompt with a state is written alike by both projects. The text is stripped, with spaces for `_` and line breaks, by
openpi and in prompts with a state; LeRobot's pi0 leaves it as it is. States are numbered by 256 bins of -1..1; below -1
the number is -1 (np.digitize). LeRobot 0.4 fills states up with zeros first, which are bin 128.
Sources: openpi/models/tokenizer.py, lerobot/policies/pi0*/processor_pi0*.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from policies.contract import PolicyError

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
        """What is encoded; `state` [D] is normalised, None where the prompt has none."""
        if state is not None:
            numbers = " ".join(map(str, self._bins(state)))
            return f"Task: {cleaned(instruction)}, State: {numbers};\nAction: "
        if self._convention == "openpi":
            return f"{cleaned(instruction)}\n"
        return instruction if instruction.endswith("\n") else f"{instruction}\n"

    def tokens(self, instruction: str, state: Tensor | None) -> list[int]:
        """Of the whole prompt, with its beginning-of-sequence token."""
        text = self.text(instruction, state)
        if state is None and self._convention == "openpi":
            return [*self._tokenizer.encode(text[:-1], add_bos=True), *self._tokenizer.encode("\n")]
        return list(self._tokenizer.encode(text, add_bos=True))

    def batch(self, instructions: tuple[str, ...], state: Tensor | None) -> tuple[Tensor, Tensor]:
        """int64 [B, L] and bool [B, L] which of them are the prompt's; `state` [B, D] normalised, or None.

        Raises `PolicyError` for a prompt that is longer: what would be cut off is the instruction.
        """
        tokens = torch.zeros(len(instructions), self._length, dtype=torch.long)
        counted = torch.zeros(tokens.shape, dtype=torch.bool)
        for row, instruction in enumerate(instructions):
            found = self.tokens(instruction, None if state is None else state[row])
            if len(found) > self._length:
                raise PolicyError(f"the prompt {instruction!r} has {len(found)} tokens, the checkpoint {self._length}")
            tokens[row, : len(found)] = torch.tensor(found)
            counted[row, : len(found)] = True
        return tokens, counted

    def _bins(self, state: Tensor) -> list[int]:
        if self._convention == "lerobot-0.4" and len(state) < self._state_dim:
            state = torch.cat([state, state.new_zeros(self._state_dim - len(state))])
        edges = torch.linspace(-1, 1, BINS + 1, dtype=torch.float64)[:-1]
        return (torch.bucketize(state.double(), edges, right=True) - 1).tolist()


def cleaned(instruction: str) -> str:
    """openpi's."""
    return instruction.strip().replace("_", " ").replace("\n", " ")
