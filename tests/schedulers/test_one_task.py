"""Plans of one task are what they were before a plan could have several."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from schedulers import Cluster, Plan, PlanError, Profile, Workflow, alternatives, from_data, plan, simulate, to_data
from tests.schedulers.baselines import SMALL
from tests.schedulers.instances import TWO_CORES, ppo, ppo_profile, random_home, random_problem

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "one_task.json").read_text())
"""Plans with predictions and reasons, and a simulated time, as they were before."""


def instance(key: str) -> tuple[Workflow, Profile, Cluster]:
    kind, _, which = key.partition(" ")
    if kind == "ppo":
        return ppo(flow=which), ppo_profile(policy=0.02), TWO_CORES
    seed = int(which)
    if kind == "home":
        return random_home(seed, pools=1 + seed % 2, links=seed % 2 == 0)
    return random_problem(seed, pools=1 + seed % 2, memory=seed % 3 == 0)


@pytest.mark.parametrize("key", RECORDED)
def test_plans_predictions_and_reasons_of_one_task_are_those_recorded(key: str) -> None:
    workflow, profile, cluster = instance(key)
    ahead = key.startswith("random") and int(key.split()[1]) % 4 == 1
    try:
        found = alternatives(workflow, profile, cluster, ahead=ahead, search=SMALL)
        best = plan(workflow, profile, cluster, ahead=ahead, search=SMALL)
    except PlanError as error:
        assert str(error) == RECORDED[key]
        return
    played = simulate(best, workflow, profile, cluster, seed=1, variation=0.3).seconds
    now: dict[str, Any] = {
        "best": to_data(best),
        **{mode: to_data(other) for mode, other in found.items()},
        "played": played,
    }
    assert json.loads(json.dumps(now)) == RECORDED[key]


@pytest.mark.parametrize("key", RECORDED)
def test_plan_files_of_one_task_are_read_and_written_as_they_were(key: str) -> None:
    for data in RECORDED[key].values() if isinstance(RECORDED[key], dict) else ():
        if isinstance(data, dict):
            read = from_data(Plan, data)
            assert read.groups == (data["groups"],) and to_data(read) == data
