"""Which pool the components are on that were measured on both: a plan's choice, made around the search for one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import product

from schedulers.profile import Pool, Profile

MOST_CHOICES = 16
"""That are all searched; of more, so many that are found one by one."""

Pools = Mapping[str, Pool]


def free(profile: Profile, names: Iterable[str], there: Collection[Pool]) -> dict[str, tuple[Pool, ...]]:
    """The pools of each component that was measured on both, as far as the cluster has them: its own first."""
    found = {}
    for name in names:
        component = profile.components.get(name)
        if component is not None and component.elsewhere is not None:
            pools = tuple(pool for pool in (component.pool, component.elsewhere.pool) if pool in there)
            found[name] = pools or (component.pool,)
    return found


def count(options: Mapping[str, tuple[Pool, ...]]) -> int:
    """How many choices `explore` asks for at most."""
    every = 1
    for pools in options.values():
        every *= len(pools)
    return every if every <= MOST_CHOICES else 2 + len(options)


def explore(options: Mapping[str, tuple[Pool, ...]], seconds: Callable[[Pools], float]) -> bool:
    """Ask for the seconds of every choice; whether that were all.

    Of more than `MOST_CHOICES` two are asked for, everything on its own pool and everything elsewhere, and the better
    one is then improved: each component in turn goes to its other pool, and stays there where that is faster.
    """
    every = [dict(zip(options, pools, strict=True)) for pools in product(*options.values())]
    if len(every) <= MOST_CHOICES:
        for choice in every:
            seconds(choice)
        return True
    ends = [every[0], every[-1]]
    times = [seconds(choice) for choice in ends]
    best, least = min(zip(ends, times, strict=True), key=lambda pair: pair[1])
    for name, pools in options.items():
        if len(pools) > 1:
            moved = {**best, name: pools[1 - pools.index(best[name])]}
            time_s = seconds(moved)
            if time_s < least:
                best, least = moved, time_s
    return False
