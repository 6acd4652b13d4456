"""Policies that users train, with a replica and a rank on another node: they learn what one process learns."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.session import Session, open_session
from tests.embodied.execution.test_instances import assert_learned_alike
from tests.embodied.learning.test_learner_ranks import IMAGES, STATES, of_ranks, run, with_optim
from tests.embodied.support import runs
from tests.embodied.support.ray_nodes import Machines, started
from tests.embodied.support.runs import Run, assigned, inline

pytestmark = pytest.mark.slow


def openvla(sharding: str, **options: Any) -> dict[str, Any]:
    """The toy that is shipped, on frames of the size that it reads."""
    options = {"checkpoint": "assets/openvla_tiny", "unnorm_key": "demonstrations", **options}
    settings: dict[str, Any] = {
        **IMAGES,
        "env": {**IMAGES["env"], "image_size": 56},
        "policy": {"kind": "openvla", "reads": ["images", "instruction"], "options": options},
    }
    optim = {"minibatch": 8, "micro_batch": 2, "policy_lr": 3e-4}  # the rate of the configuration that is shipped
    return with_optim(settings, sharding=sharding, **optim)


CASES = {
    "openvla, adapter": openvla("whole", lora_rank=4),
    "openvla, adapter, shards": openvla("sharded", lora_rank=4),
    "openvla, all weights": openvla("whole"),
    "openvla, all weights, shards": openvla("sharded"),
    "libero": {**runs.LIBERO, "env": {**runs.LIBERO["env"], "num_envs": 4}},
}


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started("near", "far", patient=True) as found:
        yield found


@pytest.mark.parametrize("case", CASES)
def test_on_two_nodes_it_learns_what_one_process_learns(case: str, machines: Machines, tmp_path: Path) -> None:
    """The same episodes, the first trajectories bit for bit, parameters after three iterations to 3e-5."""
    learned_alike_apart(CASES[case], machines, tmp_path)


def learned_alike_apart(settings: dict[str, Any], machines: Machines, folder: Path) -> tuple[Run, Run]:
    """A run with a replica and a rank on the node `far`, and one of this process alone: they have learned the same."""
    settings = {**settings, "workflow": STATES["workflow"]}
    plan = replace(of_ranks(2), farms=assigned("disaggregated", 2, policy=(), one_process=False).farms)
    here, far = Affinity(), Affinity(node=machines.node("far").id)
    apart = replace(plan, components={"policy": (far, here), "learner": (here, far)})
    session = Session(Config(), machines.runtime, tuple(sorted(os.sched_getaffinity(0))))
    found = run(settings, session, apart, folder / "apart")
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as alone:
        expected = run(settings, alone, inline(plan), folder / "here")
    assert all(one.learned["learner/steps"] > 0 and one.learned["learner/grad_norm"] > 0 for one in found.iterations)
    assert_learned_alike(found, expected)
    acting = {span.track for one in found.iterations for span in one.spans if span.name.startswith("act for group")}
    assert acting == {"policy 0", "policy 1"}, "a replica has not acted"
    return found, expected
