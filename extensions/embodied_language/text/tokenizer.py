"""The tokenizer of a model's folder: which text the token ids of an answer are, and which ids end it.

Read by the `tokenizers` library alone, so that physics workers need neither transformers nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from sim_farm.contract import FarmError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"
GENERATION, MODEL = "generation_config.json", "config.json"
"""Files whose `eos_token_id` names token ids that end an answer: the first that names some."""


class AnswerTokenizer:
    """Token ids to text, and text to token ids. `size` counts the ids. `ends` are those that end an answer: that of the
    tokenizer's end-of-sequence token, which is `end`, and those that the model's files name."""

    def __init__(self, folder: str) -> None:
        """Raises `FarmError` where the folder holds no tokenizer, or one without an end-of-sequence token."""
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise FarmError("text tasks need the Python package tokenizers: pip install tokenizers") from error
        path = Path(folder) / FILE
        if not path.is_file():
            raise FarmError(
                f"env.options.tokenizer: {folder} has no {FILE}. Name the folder of the language model that answers, "
                "as transformers saves it"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            said, *settings = (_object(path.parent / name) for name in (CONFIG, GENERATION, MODEL))
        except Exception as error:  # the library raises bare exceptions
            raise FarmError(f"{path} cannot be read: {error}") from error
        end = said.get("eos_token")
        token = end.get("content") if isinstance(end, dict) else end
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise FarmError(f"{path.parent / CONFIG} names no eos_token of {FILE}: an answer could not end")
        self.end = found
        named = next((each["eos_token_id"] for each in settings if each.get("eos_token_id") is not None), [])
        ends = named if isinstance(named, list) else [named]
        if not all(type(token) is int for token in ends):
            raise FarmError(f"eos_token_id in {path.parent} is a token id or a list of such, got {named!r}")
        self.ends = frozenset([found, *ends])
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def ids(self, text: str) -> list[int]:
        """The token ids of the text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of the token ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


def _object(path: Path) -> dict[str, Any]:
    """Content of a JSON file; empty where there is none, or no object in it."""
    found = json.loads(path.read_text()) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


@cache
def answer_tokenizer(folder: str) -> AnswerTokenizer:
    """The folder's tokenizer, read once in each process."""
    return AnswerTokenizer(folder)
