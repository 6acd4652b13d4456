"""Demonstrations beside the statistics by which the policy normalises them.

A number that lies far outside of them makes a loss beyond all others, or is clipped to an end that means something
else. N rows of D numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from embodied.demonstrations.findings import ENOUGH, FAR_SHARE, SHOWN, SMALL, Finding
from policies.capabilities import Normalised

Float64 = npt.NDArray[np.float64]

OUTSIDE = 10.0
"""Normalised values beyond it are reported: their squared error is above 100, while that of others is about 1. At most
1% of the values from which statistics were made are ten deviations away (Chebyshev), and 98% lie within -1 to 1 by
percentiles. So more than `FAR_SHARE` of a dimension's values cannot be outliers."""


def check_normalised(
    numbers: Sequence[Normalised], names: Mapping[str, Sequence[str]], statistics: str, remedy: str
) -> Iterator[Finding]:
    """Findings where numbers lie far outside of the statistics, or all actions in a small part of them.

    `names` are those of the dimensions by `Normalised.name`; `statistics` says whose they are; `remedy` what to do.
    """
    for one in numbers:
        values, low, high = (t.detach().double().cpu().numpy() for t in (one.values, one.low, one.high))
        reach = _reach(values, low, high)
        outside = (reach > OUTSIDE).sum(0)
        many = (outside > FAR_SHARE * len(values)) & (outside >= ENOUGH)
        labels = names.get(one.name, ())
        labels = labels if len(labels) == len(low) else [str(i) for i in range(len(low))]
        where = f"{one.name} beside the statistics that normalise it ({statistics})"
        for chosen, check in ((many, "statistics"), ((outside > 0) & ~many, None)):
            lines = [
                f"dimension {labels[i]} is {_range(values[:, i])}, and {_ends(low[i], high[i])}; "
                f"{int(outside[i]):,} of {len(values):,} values are normalised beyond {OUTSIDE:g}, "
                f"the farthest {_size(float(reach[:, i].max()))}"
                for i in np.flatnonzero(chosen)[:SHOWN].tolist()
            ]
            if lines:
                yield Finding(f"{where}: {'; '.join(lines)}. {remedy}", check)
        moves = _moves(values, low, high)
        if one.name == "action" and 0 < moves < SMALL:
            yield Finding(
                f"{where}: the demonstrations take {100 * moves:.2g}% or less of what became -1 to 1, in every "
                f"dimension: are they in other units? {remedy}"
            )


def _reach(values: Float64, low: Float64, high: Float64) -> Float64:
    """[N, D] distance from the middle of what became -1 and 1, over half its width; 0 where nothing is normalised."""
    middle, half = (low + high) / 2, (high - low) / 2
    distance = np.abs(values - middle)
    distance[distance <= 1e-6 * np.maximum(1, np.abs(middle))] = 0  # float32
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num(distance / half, nan=0.0, posinf=np.inf)


def _moves(values: Float64, low: Float64, high: Float64) -> float:
    """Width of 98% of the values over that of the statistics, in the dimension where it is largest."""
    first, last = np.quantile(values, (0.01, 0.99), axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        return float(np.nan_to_num((last - first) / (high - low), nan=0.0, posinf=np.inf).max(initial=0.0))


def _range(values: Float64) -> str:
    return f"{values.min():.4g} to {values.max():.4g}"


def _ends(low: float, high: float) -> str:
    if low == high:
        return f"the statistics know one number, {low:.4g}"
    return f"{low:.4g} to {high:.4g} became -1 to 1, a width of {high - low:.3g}"


def _size(reach: float) -> str:
    return f"to {reach:.3g}" if np.isfinite(reach) else "without bound"
