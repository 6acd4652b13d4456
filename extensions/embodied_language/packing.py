"""Rows of uneven length in one pass, with little padding.

A row is the tokens of one sequence. Rows follow each other in lines; a row's tokens see none of its neighbours in the
line, and its positions begin at 0. There is one pass whatever the lengths: processes that hold shards of a model
gather its layers together, so each of them has to call these as often as the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PADDING = 0.1
"""Share of padding in a pass, at most."""


@dataclass(frozen=True)
class Packed:
    """Tokens of one pass: L lines of T columns."""

    tokens: Tensor
    """int64 [L, T], zeros on the right of a line's last row."""
    seen: Tensor
    """bool [L, T, T]: the tokens that each token sees: those before it in its row, and itself."""
    positions: Tensor
    """int64 [L, T]: places within the row."""
    begin: Sequence[tuple[int, int]]
    """Line and first column of each row."""


def packed(rows: Sequence[Sequence[int]], device: torch.device) -> Packed:
    """Every row once."""
    lines = shared_lines([len(row) for row in rows])
    columns = max(sum(len(rows[row]) for row in line) for line in lines)
    tokens, positions = torch.zeros(2, len(lines), columns, dtype=torch.int64)
    row_of = torch.full((len(lines), columns), -1)
    begin = [(0, 0)] * len(rows)
    for number, line in enumerate(lines):
        first = 0
        for row in line:
            place = slice(first, first + len(rows[row]))
            tokens[number, place] = torch.tensor(rows[row])
            positions[number, place] = torch.arange(len(rows[row]))
            row_of[number, place] = row
            begin[row] = number, first
            first = place.stop
    row_of = row_of.to(device)
    earlier = torch.ones(columns, columns, dtype=torch.bool, device=device).tril()
    seen = (row_of[:, :, None] == row_of[:, None, :]) & earlier
    return Packed(tokens.to(device), seen, positions.to(device), begin)


def shared_lines(lengths: Sequence[int]) -> list[list[int]]:
    """The rows, by their indices, of each line: lines are as long as the longest row, or so many times as long that at
    most `MOST_PADDING` of them all is padding. Attention is computed over whole lines: shorter ones cost less."""
    longest = max(lengths)
    room = 0
    while True:
        room += longest
        lines = _filled(lengths, room)
        columns = max(sum(lengths[row] for row in line) for line in lines)
        if sum(lengths) >= (1 - MOST_PADDING) * columns * len(lines):
            return lines


def _filled(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Lines of at most `room` tokens: each row is in the first that has room for it, the longest rows first."""
    lines: list[list[int]] = []
    free: list[int] = []
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        line = next((line for line, left in enumerate(free) if left >= lengths[row]), len(lines))
        if line == len(lines):
            lines.append([])
            free.append(room)
        lines[line].append(row)
        free[line] -= lengths[row]
    return lines
