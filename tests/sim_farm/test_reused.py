"""A reused environment is a new one: after episodes that were solved, rich in contacts or left midway, everything that
can be read of it is what can be read of a new one, and an episode takes the same course to the last bit."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np
import pytest

from sim_farm.catalogue import task_names
from sim_farm.conformance.checks import ONE, assert_equal, random_actions
from sim_farm.contract import Float32
from sim_farm.registry import make_physics
from tests.sim_farm.histories import KINDS, digest, histories, in_a_new_one, played, task_of
from tests.sim_farm.readable import differences, readable
from tests.variants import often

OTHERWISE = {
    r"_data\.timer\b": "how long MuJoCo took",
    r"_data\.efc_AR_\w+$": "MuJoCo's dual solvers, which do not run: memory that is taken at each step and not written",
    r"_data\.i?efc_J_(row|col)\w+$": "indices of sparse constraint Jacobians where they are dense: not written either",
    r"_data\.(iefc_J|iM\w*|iLD\w*)$": "MuJoCo's islands: written as far as bodies touch others, and not read beyond",
    r"_data\.((tree|dof)_island|map_\w+|\w+_island)$": "the same",
    r"\.global_id$": "SAPIEN numbers the entities of a process",
    r"\.scene\.id$": "SAPIEN numbers the scenes of a process",
    r"\.per_scene_id$": "SAPIEN numbers what a scene shows, from the first that was ever in it",
    r"\.render_system\.device\b": "a scene that was moved names its device; a built one has the environment's",
    r"\.check_contact\.closure": "the geoms of a model's parts, looked up when a task's logic first asks for them",
    r"\._np_random\b": "gymnasium's generators for drawing from spaces, which nobody does; the system seeds them",
}
"""Paths of what may be something else in a reused environment, and why."""
STEPS = {"tabletop": 40, "maniskill": 40, "libero": 20}
"""Env steps of an episode."""
LIBERO = [f"libero/libero_{suite}" for suite in ("goal/0", "goal/7", "spatial/0", "object/3", "10/3", "10/9", "90/20")]
EVERY = [f"{simulator}/{task}" for simulator in ("tabletop", "maniskill") for task in task_names(simulator)] + LIBERO
OFTEN = ["tabletop/push", "maniskill/PushCube-v1", "libero/libero_goal/7"]


def reading(physics: Any) -> dict[str, bytes | str]:
    """All that can be read of it. Environments of a LIBERO task share a model, which is lent to this one for it."""
    if hasattr(physics.backend, "_user"):
        physics.backend._user.take()
    return readable(physics, OTHERWISE)


def assert_nothing_differs(used: Any, new: Any, when: str) -> None:
    one, other = reading(used), reading(new)
    assert len(one) > 500, f"only {len(one)} values were read"
    found = differences(one, other)
    assert not found, f"{when} {len(found)} of {len(one)} values differ:\n" + "\n".join(found[:20])


@pytest.mark.slow
@pytest.mark.parametrize("task", often(OFTEN, EVERY))
def test_everything_that_can_be_read_of_a_reused_environment_is_that_of_a_new_one(task: str) -> None:
    steps = STEPS[task.partition("/")[0]]
    spec = task_of(task, steps, cameras=1)
    with closing(make_physics(spec)) as used, closing(make_physics(spec)) as new:
        solved = [played(used, history)[-1].success.any() for history in histories(task, steps // 5, steps)]
        assert any(solved) or task not in OFTEN[:2], "none of the episodes before was solved"
        assert_equal(used.reset(ONE), new.reset(ONE), "the reset differs")
        assert_nothing_differs(used, new, "after the reset")
        for count in (1, 6):
            actions: Float32 = np.repeat(random_actions(used.info, count, seed=count), 2, axis=0)
            assert_equal(used.step(actions), new.step(actions), f"the {2 * count} env steps differ")
            assert_nothing_differs(used, new, f"after {2 * count} env steps")


@pytest.mark.parametrize("task", often(OFTEN, EVERY))
def test_episodes_of_a_reused_environment_are_those_of_new_ones_in_any_order(task: str) -> None:
    """`benchmarks/resets.py` asks it of more episodes, and of pictures."""
    steps = STEPS[task.partition("/")[0]]
    spec, chosen = task_of(task, steps, cameras=1), histories(task, len(KINDS), steps)
    new = [digest(in_a_new_one(spec, history)) for history in chosen]
    with closing(make_physics(spec)) as used:
        for order in ([0, 1, 2, 3], [2, 1, 3, 0]):
            for place in order:
                assert digest(played(used, chosen[place])) == new[place], (
                    f"{chosen[place]} in the order {order} differs"
                )


def test_a_comparison_sees_what_differs() -> None:
    """In attributes, arrays, closures and properties of compiled objects."""
    with closing(make_physics(task_of("tabletop/push", 40))) as one:
        with closing(make_physics(task_of("tabletop/push", 40))) as other:
            one.reset(ONE)
            other.reset(ONE)
            backend: Any = one.backend  # type: ignore[attr-defined]
            assert_nothing_differs(one, other, "at first")
            backend._data.qacc_warmstart[2] += 1e-300
            (found,) = differences(reading(one), reading(other))
            assert found.startswith(".backend._data.qacc_warmstart")
            backend._steps_left -= 1
            assert len(differences(reading(one), reading(other))) == 2
    counter = [0]
    first, second = readable(lambda: counter, {}), readable(lambda: [1], {})
    assert differences(first, second), "a closure is not looked into"
