"""Instructions to the tokens that a language model reads before it answers."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from embodied_language.generation_settings import GenerationSettings
from policies.contract import PolicyError
from policies.errors import shown
from policies.files import CONFIG, SHOWN_ERROR, read_json
from policies.torchvision_operators import import_torchvision

_log = logging.getLogger(__name__)
MOST_KNOWN = 4096
"""Prompts whose tokens are kept."""
PLACE, SHORT_PLACE = "{prompt}", "{}"
"""Where the instruction stands in a template."""
OWN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Names of the class that reads tokenizer.json as it is."""
PROBE = "Make 29 from 13, 14, 2."
"""A user's message that a chat template is tried with."""
TEMPLATE_FILE = "chat_template.jinja"
LATEX = re.compile(r"\\[A-Za-z]+(?:\{\})+")
"""A command of LaTeX with empty arguments, such as `\\boxed{}`."""


def around(template: str) -> Sequence[str]:
    """The texts of a template between which the instruction stands.

    It stands for each `{prompt}`; in a template without one for its only `{}` that is no argument of a LaTeX command.
    Other braces stay as they are. Raises `PolicyError` where that is none, or several.
    """
    if PLACE in template:
        return template.split(PLACE)
    of_latex = [match.span() for match in LATEX.finditer(template)]
    places = [match.start() for match in re.finditer(re.escape(SHORT_PLACE), template)]
    places = [place for place in places if not any(first <= place < end for first, end in of_latex)]
    if len(places) != 1:
        raise PolicyError(
            f"prompt has {PLACE} where the instruction stands, or one {SHORT_PLACE} that is no argument of a LaTeX "
            f"command, got {shown(template)}: write {PLACE}"
        )
    return template[: places[0]], template[places[0] + len(SHORT_PLACE) :]


class Prompts:
    """The tokenizer of a model's directory, with the text around an instruction (`around`).

    `size` counts the token ids, `text_size` those that were not added to the tokenizer. `ends` are those that end an
    answer: first `end`, the tokenizer's end-of-sequence token, then the others that the directory's generation settings
    name.
    """

    def __init__(self, folder: Path, *, chat: bool, system: str, template: str) -> None:
        """Raises `PolicyError` for a directory without a tokenizer, an end-of-sequence token or a chat template, for a
        chat template that cannot be applied or leaves a message out, and for a template that does not say where the
        instruction stands."""
        import_torchvision()
        from transformers import PreTrainedTokenizerFast

        if not (folder / "tokenizer.json").is_file():
            raise PolicyError(f"incomplete checkpoint: {folder / 'tokenizer.json'} is missing")
        try:
            self._tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(folder), local_files_only=True)
        except Exception as error:  # transformers raises anything for what it has not thought of
            raise PolicyError(f"{folder} has no tokenizer that can be read: {str(error)[:SHOWN_ERROR]}") from error
        _compare_class(folder)
        if self._tokenizer.eos_token_id is None:
            raise PolicyError(f"{folder}/tokenizer_config.json names no eos_token: an answer could not end")
        if chat and not self._tokenizer.chat_template:
            raise PolicyError(f"the tokenizer of {folder} has no chat template: leave policy.options.chat false")
        self.end: int = self._tokenizer.eos_token_id
        self.size = max(self._tokenizer.get_vocab().values()) + 1
        self.text_size: int = self._tokenizer.vocab_size
        named = GenerationSettings.read(folder).ends
        self.ends = tuple(dict.fromkeys([self.end, *(end for end in named if end < self.size)]))
        self._chat, self._system, self._around = chat, system, around(template)
        self._known: dict[str, list[int]] = {}
        if chat:
            self._check_chat(folder)

    def tokens(self, instruction: str) -> list[int]:
        """The tokens before the answer. An empty instruction is that of an environment that rests."""
        found = self._known.get(instruction)
        if found is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            found = self._known[instruction] = self._tokens(instruction.join(self._around))
        return found

    def encode(self, text: str) -> list[int]:
        """The tokens of a text by itself, without those that begin or end a sequence."""
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _chatted(self, text: str) -> str:
        """The text as a user's message in the chat template, after the system's."""
        messages = [{"role": "system", "content": self._system}] if self._system else []
        return self._tokenizer.apply_chat_template(
            [*messages, {"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )

    def _check_chat(self, folder: Path) -> None:
        """Apply the chat template once. Raises `PolicyError`, which names its file."""
        own = folder / TEMPLATE_FILE
        where = f"the chat template in {own if own.is_file() else folder / 'tokenizer_config.json'}"
        mend = "mend it, or leave policy.options.chat false"
        try:
            told = self._chatted(PROBE)
        except Exception as error:  # of jinja2, or of the template itself
            what = f"{where} cannot be applied: {str(error)[:SHOWN_ERROR].rstrip('.') or type(error).__name__}"
            if self._system and self._applies_without_system():
                mend = (
                    "it takes no system message: unset policy.options.system, or put its text in policy.options.prompt"
                )
            raise PolicyError(f"{what}; {mend}") from error
        for text, name in ((PROBE, "the user's message"), (self._system.strip(), "the system's message")):
            if text not in told:
                raise PolicyError(f"{where} leaves {name} out; {mend}")

    def _applies_without_system(self) -> bool:
        system, self._system = self._system, ""
        try:
            return PROBE in self._chatted(PROBE)
        except Exception:  # as above
            return False
        finally:
            self._system = system

    def _tokens(self, text: str) -> list[int]:
        if self._chat:
            return self.encode(self._chatted(text)) or [self.end]
        return self._tokenizer.encode(text) or [self.end]


@cache
def _compare_class(folder: Path) -> None:
    """Warn once per process where the class that tokenizer_config.json names reads other tokens than tokenizer.json
    says, as it may have settings of its own, such as a token that begins a sequence."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    file = folder / "tokenizer_config.json"
    settings = [read_json(one) for one in (file, folder / CONFIG) if one.is_file()]
    named = settings[0].get("tokenizer_class") if file.is_file() else None
    if named is None or named in OWN_CLASSES or any("auto_map" in one for one in settings):  # which is code of its own
        return
    try:
        other, own = (
            one.from_pretrained(str(folder), local_files_only=True).encode(PROBE)
            for one in (AutoTokenizer, PreTrainedTokenizerFast)
        )
    except Exception:  # transformers raises anything, and then there is nothing to compare with
        return
    if other != own:
        _log.warning(
            "%s",
            f"{file} names {named}, which reads {PROBE!r} as the tokens {other}, and tokenizer.json as {own}: the "
            f"latter are used. Read an export's tokenizer with {OWN_CLASSES[0]}, not AutoTokenizer",
        )
