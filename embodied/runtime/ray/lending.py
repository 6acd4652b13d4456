"""Tensors that were lent on another machine, fetched in parts: so they pass through Ray's object stores, which have a
fixed size, whatever their own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from ray.exceptions import GetTimeoutError

from embodied import progress
from embodied.runtime.lent_tensors import LentTensors
from embodied.runtime.ray.cluster import value_within
from sim_farm.client.farm import WorkerTimeout

PART_BYTES = 32 * 2**20
"""Of one part. Two are under way at a time."""


def parts_of(lent: LentTensors, lender: Any, name: str, timeout_s: float) -> Iterator[np.ndarray]:
    """The bytes of what the worker `name` in the actor `lender` has lent, part by part.

    Raises `WorkerTimeout` where one does not come within `timeout_s`, `WorkerFailed` where the lender is gone and
    `LentOver` where it has lent something newer.
    """

    def ask(first: int) -> Any:
        return lender.lent_part.remote(lent.ticket, first, min(first + PART_BYTES, lent.nbytes))

    begins = list(range(0, lent.nbytes, PART_BYTES))
    coming = ask(begins[0])
    for following in (*begins[1:], None):
        reference, coming = coming, None if following is None else ask(following)
        try:
            part: np.ndarray = value_within(timeout_s, reference, name, "lend")
        except GetTimeoutError as error:
            raise WorkerTimeout(f"{name} did not hand on its weights: no part came for {timeout_s:g} s") from error
        yield part
        progress.report()
