"""A loaded language model beside its own class: log-probs after a few tokens, computed both ways.

The class's forward reads a row of eight tokens. Here the same tokens are read in lines that rows share, as for
learning, and with a cache, as for acting: five forward passes of a few tokens, which take about as long as an answer of
five. Meanwhile a sliding window is three tokens wide, so that it counts, whatever its size.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from embodied_language.generation import RowCache, read_prompts, read_token
from embodied_language.packing import packed
from policies.errors import PolicyError
from policies.files import CONFIG, SHOWN_ERROR

if TYPE_CHECKING:
    from embodied_language.model import CausalModel

LENGTHS = (8, 5)
"""Tokens of the two rows, of which the second is the begin of the first."""
AT_ONCE = (6, 3)
"""Tokens of them that a cache is given at once; the others follow one by one."""
WINDOW = 3
TOLERANCES = {torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.05}
"""Largest difference in nats, in the mean over the distribution after a token: a deep network's rounding."""
ADVICE = (
    "Choose a checkpoint of another family: Qwen2, Qwen3, Llama, Mistral, Gemma 2, Gemma 3 (text), Phi-3, Granite, "
    "Cohere and SmolLM3 are tested"
)


@torch.no_grad()
def check_alike(model: CausalModel) -> None:
    """Raise `PolicyError`, which names the family, if the model's log-probs are not those of its own class."""
    where = f"{model.source / CONFIG}: {type(model.network).__name__}"
    tokens = [(2 * place + 1) * model.vocabulary // (2 * LENGTHS[0]) for place in range(LENGTHS[0])]
    row = torch.tensor([tokens], device=model.network.device)
    with _short_window(model):
        try:
            own = model.network(input_ids=row, use_cache=False).logits[0].float().log_softmax(-1)
        except Exception as error:  # the family's own code
            raise PolicyError(f"{where} cannot be computed: {_short(error)}") from error
        if not own.isfinite().all():
            raise PolicyError(f"{where} gives log-probs that are not finite, in {str(model.dtype).split('.')[1]}")
        for way, states_of in (("in shared lines", _in_lines), ("with a cache", _with_cache)):
            try:
                found = states_of(model, tokens)
                said = model.logits(torch.stack([state for _, state in found])).log_softmax(-1)
            except Exception as error:  # a family's code, with arguments that it was not written for
                raise PolicyError(f"{where} cannot be computed {way}: {_short(error)}. {ADVICE}") from error
            wanted = own[[place for place, _ in found]]
            off = float((wanted.exp() * (wanted - said).abs()).sum(-1).max())
            if not off <= TOLERANCES.get(model.dtype, TOLERANCES[torch.float32]):
                raise PolicyError(
                    f"{where} is computed differently {way} than by transformers' own forward: its log-probs are "
                    f"{off:.2g} nats off. {ADVICE}"
                )


def _in_lines(model: CausalModel, tokens: list[int]) -> list[tuple[int, Tensor]]:
    """Places of the rows' tokens, and the states [D] that predict the next ones, as an evaluation computes them."""
    one = packed([tokens[:length] for length in LENGTHS], model.network.device)
    states = model.states(one.tokens, one.seen, one.positions)
    begins = zip(one.begin, LENGTHS, strict=True)
    return [(place, states[line, begin + place]) for (line, begin), length in begins for place in range(length)]


def _with_cache(model: CausalModel, tokens: list[int]) -> list[tuple[int, Tensor]]:
    """The same from the last tokens that are read at once, as acting computes them."""
    cache = RowCache(model, len(LENGTHS), LENGTHS[0])
    device = model.network.device
    length = torch.tensor(AT_ONCE, device=device)
    states = read_prompts(model, cache, 0, [tokens[:count] for count in AT_ONCE])
    found = list(zip((length - 1).tolist(), states, strict=True))
    while int(length.max()) < LENGTHS[0]:
        following = torch.tensor([tokens[place] for place in length.tolist()], device=device)
        states = read_token(model, cache, following, length)
        found += zip(length.tolist(), states, strict=True)
        length = length + 1
    return found


@contextmanager
def _short_window(model: CausalModel) -> Iterator[None]:
    """Within, a sliding window that counts in the model's context is `WINDOW` tokens wide."""
    config = model.network.config
    slides = any(model.windows().values())
    whole = config.sliding_window if slides else None
    try:
        if slides:
            config.sliding_window = WINDOW
        yield
    finally:
        if slides:
            config.sliding_window = whole


def _short(error: Exception) -> str:
    return str(error)[:SHOWN_ERROR] or type(error).__name__
