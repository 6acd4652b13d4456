"""Answers, token by token: a batch of rows in which a finished one is replaced at once.

Each row has its own number of tokens, and its own place in a cache of keys and values; there is no padding between a
prompt and what is said after it. B rows, S of them under way together, L tokens of the longest prompt, C the most
tokens of an answer, V the tokens that the tokenizer knows, D the width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from embodied_language.model import CausalModel


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn from the logits."""

    temperature: float = 1.0
    """Logits are divided by it."""
    top_p: float = 1.0
    """Only the likeliest tokens are drawn, as many as have this share of the probability together. Log-probs are those
    of the whole distribution."""
    rows: int = 64
    """S: rows that are under way together."""


@dataclass(frozen=True)
class Answers:
    """The answers to B prompts."""

    tokens: Tensor
    """int64 [B, C]: token ids; beyond an answer's end the first of the tokens that end one."""
    log_prob: Tensor
    """float32 [B, C]; 0 beyond an answer's end."""
    states: Tensor
    """[B, C, D], or [B, 1, D] of each first token: the states that the tokens were drawn from; 0 beyond an answer's
    end."""


def choose(logits: Tensor, noise: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """int64 [B] the tokens drawn from the logits [B, V], or the likeliest without noise; float32 [B] their log-probs.

    `noise` [B] is standard normal. Its distribution function is a uniform number, which the cumulative probabilities of
    the tokens in the order of their ids turn into a token.
    """
    scaled = logits / sampling.temperature
    every = torch.log_softmax(scaled, -1)
    if noise is None:
        tokens = logits.argmax(-1)
    else:
        # In float64, so that the sum's rounding does not depend on how rows are batched.
        shares = torch.softmax(scaled.double(), -1)
        if sampling.top_p < 1:
            largest, order = shares.sort(dim=-1, descending=True, stable=True)
            dropped = largest.cumsum(-1) - largest >= sampling.top_p  # the first is always kept
            shares = shares.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
        rising = shares.cumsum(-1)
        uniform = torch.special.ndtr(noise.double())[:, None] * rising[:, -1:]
        tokens = (rising <= uniform).sum(-1).clamp(max=logits.shape[-1] - 1)
    return tokens, every.gather(-1, tokens[:, None]).squeeze(-1)


@torch.no_grad()
def generate(
    model: CausalModel,
    prompts: Sequence[Sequence[int]],
    count: int,
    ends: Sequence[int],
    noise: Tensor | None,
    sampling: Sampling,
    limits: Sequence[int] | None = None,
    first_states: bool = False,
) -> Answers:
    """Answers of at most C = `count` tokens, each up to the first that is among `ends`. `noise` is [B, C]; None: the
    likeliest. `limits`: the most tokens of each, at most C; None: C. `first_states`: states of first tokens alone,
    since those of many long answers fill a GPU.

    What a row says depends on its prompt and its noise, not on its neighbours, but for the rounding of matrix products.
    """
    device = model.network.device
    batch, size = len(prompts), min(sampling.rows, len(prompts))
    most = torch.tensor([count] * batch if limits is None else limits, device=device)
    ending = torch.tensor(ends, device=device)
    tokens = torch.full((batch, count), ends[0], dtype=torch.int64, device=device)
    log_prob = torch.zeros(batch, count, device=device)
    states = torch.zeros(batch, 1 if first_states else count, model.width, dtype=model.dtype, device=device)
    cache = RowCache(model, size, max(map(len, prompts)) + count)
    row = torch.empty(0, dtype=torch.int64, device=device)  # [S'] the prompt that each place of the cache answers
    said, length = row.clone(), row.clone()  # tokens of each answer so far, and of prompt and answer
    now = states.new_zeros(0, model.width)  # the state that each place's next token is drawn from
    waiting = list(range(batch))
    while waiting or len(row):
        new = waiting[: size - len(row)]
        if new:
            del waiting[: len(new)]
            asked = [prompts[index] for index in new]
            now = torch.cat([now, read_prompts(model, cache, len(row), asked)])
            row = torch.cat([row, torch.tensor(new, device=device)])
            said = torch.cat([said, said.new_zeros(len(new))])
            length = torch.cat([length, torch.tensor([len(prompt) for prompt in asked], device=device)])
        chosen, scores = choose(model.logits(now), None if noise is None else noise[row, said], sampling)
        tokens[row, said], log_prob[row, said] = chosen, scores
        kept = (said < states.shape[1]).nonzero().squeeze(1)
        states[row[kept], said[kept]] = now[kept]
        said = said + 1
        goes_on = ~torch.isin(chosen, ending) & (said < most[row])
        if not bool(goes_on.all()):
            order = _close_up(goes_on)
            cache.keep(order)
            row, said, length, chosen = row[order], said[order], length[order], chosen[order]
        now = read_token(model, cache, chosen, length) if len(row) else now[:0]
        length = length + 1
    return Answers(tokens, log_prob, states)


@torch.no_grad()
def read_longest(
    model: CausalModel, prompts: Sequence[Sequence[int]], count: int, noise: Tensor | None, sampling: Sampling
) -> None:
    """The passes of `generate` that take the most memory where no answer ends early: S prompts are read, then the last
    token but one of their answers. Nothing is drawn, and nothing returned."""
    device, size = model.network.device, min(sampling.rows, len(prompts))
    cache = RowCache(model, size, max(map(len, prompts)) + count)
    before = read_prompts(model, cache, 0, prompts[:size])
    length = torch.tensor([len(prompt) + max(count - 2, 0) for prompt in prompts[:size]], device=device)
    now = read_token(model, cache, torch.zeros(size, dtype=torch.int64, device=device), length)
    choose(model.logits(now), None if noise is None else noise[:size, 0], sampling)
    del before  # the states that the first tokens were drawn from are kept, one a row


def up_to_end(tokens: Tensor, ends: Sequence[int]) -> Tensor:
    """bool [B, C]: the tokens int64 [B, C] that belong to the answers: up to the first of each that is among `ends`,
    which belongs to it."""
    ended = torch.isin(tokens, torch.tensor(ends, device=tokens.device))
    return ended.cumsum(1).cumsum(1) <= 1


def _close_up(goes_on: Tensor) -> Tensor:
    """int64 [K]: the K of the places bool [S] that go on, in an order that moves few of them: the last ones fill the
    gaps among the first K."""
    kept = torch.arange(int(goes_on.sum()), device=goes_on.device)
    kept[~goes_on[: len(kept)]] = goes_on[len(kept) :].nonzero().squeeze(1) + len(kept)
    return kept


def read_prompts(model: CausalModel, cache: RowCache, first: int, prompts: Sequence[Sequence[int]]) -> Tensor:
    """[n, D] the states at the ends of n prompts, whose keys and values fill the places from `first` on."""
    tokens, lengths = padded(prompts, model.network.device)
    columns = torch.arange(tokens.shape[1], device=tokens.device)
    cache.fill(first, *tokens.shape)
    states = model.states(tokens, causal(lengths, tokens.shape[1]), columns.expand(len(prompts), -1), cache)
    return states[torch.arange(len(prompts), device=tokens.device), lengths - 1]


def read_token(model: CausalModel, cache: RowCache, tokens: Tensor, length: Tensor) -> Tensor:
    """[S, D] the states after one more token [S] of each place, which have `length` [S] tokens before it."""
    used = int(length.max()) + 1
    cache.append(length, used)
    seen = torch.arange(used, device=length.device) <= length[:, None]
    return model.states(tokens[:, None], seen[:, None], length[:, None], cache)[:, 0]


def padded(rows: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """int64 [B, T] the rows' tokens with zeros on the right, and int64 [B] their numbers."""
    lengths = torch.tensor([len(row) for row in rows])
    tokens = torch.zeros(len(rows), int(lengths.max()), dtype=torch.int64)
    for place, row in enumerate(rows):
        tokens[place, : len(row)] = torch.tensor(row)
    return tokens.to(device), lengths.to(device)


def causal(lengths: Tensor, columns: int) -> Tensor:
    """bool [B, T, T]: the keys that each of T = `columns` tokens sees, in rows of `lengths` [B] tokens. A token beyond
    a row's end sees itself, so that its softmax has something to sum."""
    place = torch.arange(columns, device=lengths.device)
    earlier = place[:, None] >= place
    inside = place < lengths[:, None]
    return (earlier & inside[:, None]) | torch.eye(columns, dtype=torch.bool, device=lengths.device)


class RowCache:
    """Keys and values of S rows, each with a number of columns of its own; transformers' layers call `update`.

    A prompt fills whole places (`fill`), a token one column of each (`append`). Rows that are done are dropped
    (`keep`), and the last ones take their places.
    """

    is_compileable = False

    def __init__(self, model: CausalModel, rows: int, columns: int) -> None:
        self._layers: list[tuple[Tensor, ...] | None] = [None] * model.network.config.num_hidden_layers
        self._rows, self._columns = rows, columns
        self._places: slice | None = None
        self._at, self._used = torch.empty(0), 0

    def fill(self, first: int, count: int, columns: int) -> None:
        """The next pass is of prompts of so many columns, for `count` places from `first` on."""
        self._places, self._used = slice(first, first + count), max(self._used, columns)

    def append(self, at: Tensor, used: int) -> None:
        """The next pass is of one token in each of the first rows, for the columns `at` [S]; `used` are in use then."""
        self._places, self._at, self._used = None, at, used

    def keep(self, rows: Tensor) -> None:
        """The rows int64 [K] have the first K places; those that are elsewhere move, as far as columns are in use."""
        to = (rows != torch.arange(len(rows), device=rows.device)).nonzero().squeeze(1)
        for layer in self._layers if len(to) else ():
            for tensor in layer or ():
                tensor[to, :, : self._used] = tensor[rows[to], :, : self._used]

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Take the keys and values [n, heads, T, d] of a pass, and give those that its tokens may see."""
        held = self._layers[layer]
        if held is None:
            # Keys and values may be of different widths.
            held = self._layers[layer] = tuple(
                new.new_zeros(self._rows, new.shape[1], self._columns, new.shape[3]) for new in (keys, values)
            )
        if self._places is not None:
            for tensor, new in zip(held, (keys, values), strict=True):
                tensor[self._places, :, : new.shape[2]] = new
            return keys, values
        rows = torch.arange(len(keys), device=keys.device)
        for tensor, new in zip(held, (keys, values), strict=True):
            tensor[rows, :, self._at] = new[:, :, 0]
        return held[0][: len(keys), :, : self._used], held[1][: len(keys), :, : self._used]

    def get_seq_length(self, layer: int = 0) -> int:
        """Zero: positions and masks are given."""
        return 0
