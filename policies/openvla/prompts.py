"""Instructions to prompt tokens. B rows, L tokens of the longest prompt."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.files import SHOWN_ERROR
from policies.openvla.config import ModelConfig

TOKENIZER = "tokenizer.json"
TEMPLATE = "In: What action should the robot take to {}?\nOut:"
TEMPLATES = {
    "openvla": TEMPLATE,
    "openvla-v01": (
        "A chat between a curious user and an artificial intelligence assistant. "
        "The assistant gives helpful, detailed, and polite answers to the user's questions. "
        "USER: What action should the robot take to {}? ASSISTANT:"
    ),
}
"""Prompts of openvla-7b and its descendants, and of openvla-v01-7b, whose language model is Vicuna."""
EMPTY = "▁"
"""The piece of a lone space. Llama's tokenizer puts it (29871) between the prompt and the action tokens of the training
texts, so the state at it is what predicts the first action: every prompt ends with it."""
BOS = "<s>"


class Prompts:
    """The tokenizer of a checkpoint, with its prompt around an instruction."""

    def __init__(self, folder: Path, config: ModelConfig, template: str = "openvla") -> None:
        """`template` is one of `TEMPLATES`."""
        from tokenizers import Tokenizer

        if template not in TEMPLATES:
            raise PolicyError(f"prompt must be one of {', '.join(TEMPLATES)}, got {template!r}")
        path = folder / TOKENIZER
        if not path.is_file():
            raise PolicyError(f"incomplete checkpoint: {path} is missing")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises nothing narrower
            raise PolicyError(f"{path} is no tokenizer: {str(error)[:SHOWN_ERROR]}") from error
        # A file may ask for truncation or padding of its own.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        bos, empty = (self._tokenizer.token_to_id(piece) for piece in (BOS, EMPTY))
        if bos is None or empty is None:
            raise PolicyError(f"{path} is not Llama's tokenizer: it lacks {BOS!r} or {EMPTY!r}")
        rows = int(config.llama.get("vocab_size", 32064))
        if max(self._tokenizer.get_vocab().values()) >= rows:
            raise PolicyError(f"{path} has more tokens than the model, which knows {rows}")
        self.bos, self.empty = bos, empty
        self._template = TEMPLATES[template]
        self._pad = config.pad_token
        self._known: dict[str, list[int]] = {}

    def tokens(self, instruction: str) -> list[int]:
        """The prompt's tokens: BOS first, the empty token last."""
        if not isinstance(instruction, str):
            raise PolicyError(f"an instruction is a text, got a {type(instruction).__name__}")
        if not instruction.strip():
            raise PolicyError("an instruction is empty: the policy needs to be told what to do")
        tokens = self._known.get(instruction)
        if tokens is None:
            tokens = self._tokenizer.encode(self._template.format(instruction.lower())).ids
            if tokens[0] != self.bos:
                tokens = [self.bos, *tokens]
            if tokens[-1] != self.empty:
                tokens = [*tokens, self.empty]
            self._known[instruction] = tokens
        return tokens

    def batch(self, instructions: tuple[str, ...], longest: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """int64 [B, L] tokens, padded on the right, and int64 [B] their lengths, at most `longest`."""
        rows = [self.tokens(instruction) for instruction in instructions]
        for instruction, row in zip(instructions, rows, strict=True):
            if len(row) > longest:
                raise PolicyError(
                    f"an instruction is too long: its prompt has {len(row)} tokens, and beside images and actions the "
                    f"model has room for {longest}: {instruction[:60]!r}"
                )
        length = max(len(row) for row in rows)
        padded = [row + [self._pad] * (length - len(row)) for row in rows]
        return torch.tensor(padded, device=device), torch.tensor([len(row) for row in rows], device=device)
