"""Instructions to the tokens that a language model reads before it answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import SHOWN_ERROR
from policies.torchvision_operators import import_torchvision

MOST_KNOWN = 4096
"""Prompts whose tokens are kept."""


class Prompts:
    """The tokenizer of a model's directory, with the text around an instruction.

    `size` counts the token ids, `end` is the end-of-sequence token's.
    """

    def __init__(self, folder: Path, *, chat: bool, system: str, template: str) -> None:
        """Raises `PolicyError` for a directory without a tokenizer, an end-of-sequence token or a chat template."""
        import_torchvision()
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise PolicyError(f"incomplete checkpoint: {folder / 'tokenizer.json'} is missing")
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises anything for what it has not thought of
            raise PolicyError(f"{folder} has no tokenizer that can be read: {str(error)[:SHOWN_ERROR]}") from error
        if self._tokenizer.eos_token_id is None:
            raise PolicyError(f"{folder}/tokenizer_config.json names no eos_token: an answer could not end")
        if chat and not self._tokenizer.chat_template:
            raise PolicyError(f"the tokenizer of {folder} has no chat template: leave policy.options.chat false")
        self.end: int = self._tokenizer.eos_token_id
        self.size = max(self._tokenizer.get_vocab().values()) + 1
        self._chat, self._system, self._template = chat, system, template
        self._known: dict[str, list[int]] = {}

    def tokens(self, instruction: str) -> list[int]:
        """The tokens before the answer. An empty instruction is that of an environment that rests."""
        found = self._known.get(instruction)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[instruction] = self._tokens(self._template.replace("{}", instruction))
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text by itself, without those that begin or end a sequence."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _tokens(self, text: str) -> list[int]:
        if self._chat:
            messages = [{"role": "system", "content": self._system}] if self._system else []
            text = self._tokenizer.apply_chat_template(
                [*messages, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
            return self.encode(text) or [self.end]
        return self._tokenizer.encode(text) or [self.end]
