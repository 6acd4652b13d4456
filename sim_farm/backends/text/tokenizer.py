"""The tokenizer of a model's folder: which text the token ids of an answer are, and which id ends it.

Read by the `tokenizers` library alone, so that physics workers need neither transformers nor torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from sim_farm.contract import FarmError

FILE, CONFIG = "tokenizer.json", "tokenizer_config.json"


class AnswerTokenizer:
    """Token ids to text, and text to token ids. `size` counts the ids; `end` is the end-of-sequence token's."""

    def __init__(self, folder: str) -> None:
        """Raises `FarmError` where the folder holds no tokenizer, or one without an end-of-sequence token."""
        try:
            import tokenizers
        except ModuleNotFoundError as error:
            raise FarmError("text tasks need the Python package tokenizers: pip install tokenizers") from error
        path = Path(folder) / FILE
        if not path.is_file():
            raise FarmError(
                f"env.tokenizer: {folder} has no {FILE}. Name the folder of the language model that answers, as "
                "transformers saves it"
            )
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
            said = json.loads((path.parent / CONFIG).read_text()) if (path.parent / CONFIG).is_file() else {}
        except Exception as error:  # the library raises bare exceptions
            raise FarmError(f"{path} cannot be read: {error}") from error
        end = said.get("eos_token") if isinstance(said, dict) else None
        token = end.get("content") if isinstance(end, dict) else end
        found = self._tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise FarmError(f"{path.parent / CONFIG} names no eos_token of {FILE}: an answer could not end")
        self.end = found
        self.size = max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    def ids(self, text: str) -> list[int]:
        """The token ids of the text."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, ids: Sequence[int]) -> str:
        """The text of the token ids; special tokens are left out."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)


@cache
def answer_tokenizer(folder: str) -> AnswerTokenizer:
    """The folder's tokenizer, read once in each process."""
    return AnswerTokenizer(folder)
