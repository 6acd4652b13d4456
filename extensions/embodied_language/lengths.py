"""Prompts that are too long: found from the files of a model, before it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied_language.model import read_config
from embodied_language.prompts import Prompts
from policies.contract import PolicyError
from policies.torchvision_operators import import_torchvision

SHOWN = 10
"""Rows that a message names."""
MARGIN = 16
"""Tokens that a tokenizer may add of its own, beside those of the chat template."""


@dataclass(frozen=True)
class TooLong:
    """An instruction whose prompt leaves no room for the answer."""

    row: int
    """From 1."""
    tokens: int
    """Of its prompt."""


def check_prompts(architecture: Mapping[str, Any], instructions: Sequence[str], answer: int, source: str) -> None:
    """Raise `PolicyError` where the prompt of an instruction, with an answer of up to `answer` tokens, is longer than
    the model's context. `source` is the file of the instructions, a row each."""
    folder = Path(str(architecture["checkpoint"]))
    context = _context(folder)
    if context is None:
        return
    found = too_long(architecture, instructions, context - answer)
    if not found:
        return
    longest = max(found, key=lambda one: one.tokens)
    rows = ", ".join(str(one.row) for one in found[:SHOWN]) + (", ..." if len(found) > SHOWN else "")
    shorter = context - longest.tokens
    less = f"; or set policy.chunk and env.max_episode_steps to {shorter} or less" if shorter >= answer // 2 else ""
    raise PolicyError(
        f"{source} has problems that are too long for {folder}, {len(found)} of {len(instructions)}: row {rows}. The "
        f"prompt of row {longest.row} has {longest.tokens} tokens, its answer up to {answer}, and the model's context "
        f"is {context}: leave such rows out of the file, or take a model with a longer context{less}"
    )


def too_long(architecture: Mapping[str, Any], instructions: Sequence[str], room: int) -> list[TooLong]:
    """The instructions whose prompts have more than `room` tokens, in order."""
    folder, system = Path(str(architecture["checkpoint"])), str(architecture.get("system", ""))
    template = str(architecture.get("prompt", "{}"))
    prompts = Prompts(folder, chat=bool(architecture.get("chat", False)), system=system, template=template)
    around = len(prompts.tokens("")) + MARGIN
    found = []
    for row, instruction in enumerate(instructions, start=1):
        if len(instruction.encode()) + around <= room:  # a token is of one byte at least
            continue
        tokens = len(prompts.tokens(instruction))
        if tokens > room:
            found.append(TooLong(row, tokens))
    return found


def _context(folder: Path) -> int | None:
    """Tokens of the model's longest sequence; None where its config.json does not say."""
    import_torchvision()
    from transformers import AutoConfig

    raw = read_config(folder)
    try:
        config: Any = AutoConfig.for_model(raw.pop("model_type"), **raw)
        return int(config.get_text_config().max_position_embeddings)
    except Exception:  # transformers raises anything for what it has not thought of; the model's loader says it
        return None
