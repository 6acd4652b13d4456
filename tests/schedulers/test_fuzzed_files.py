"""Damaged files of workflows, profiles, clusters and plans: refused by name, or used without an error or a hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest

import schedulers
from schedulers import (
    Cluster,
    Plan,
    PlanError,
    Profile,
    Workflow,
    check_profile,
    load,
    to_data,
    validate,
)
from tests.fuzzing import mutation
from tests.fuzzing.law import few_or_many, holds
from tests.schedulers.instances import random_problem

MEASURED = Path(__file__).parents[1] / "fuzzing/measured"
"""A plan and a profile that the command line has written."""
PROBLEMS = 12


@cache
def problem(seed: int) -> tuple[Workflow, Profile, Cluster]:
    return random_problem(seed, pools=2, memory=True)


@cache
def plan_of(seed: int) -> Plan:
    return schedulers.plan(*problem(seed), explain=seed % 2 == 0)


@cache
def originals(kind: type) -> tuple[Any, ...]:
    """Valid files' data: what the planner makes of random problems, what was measured, what a person writes."""
    if kind is Plan:
        return (*(to_data(plan_of(seed)) for seed in range(PROBLEMS)), json.loads((MEASURED / "plan.json").read_text()))
    found = [to_data(part) for seed in range(PROBLEMS) for part in problem(seed) if type(part) is kind]
    if kind is Profile:
        found.append(json.loads((MEASURED / "profile.json").read_text()))
    if kind is Cluster:
        found.append(
            {"nodes": [{"name": "gpu", "cores": 96, "accelerators": 8, "accelerator_bytes": 80e9, "count": 4}]}
        )
    return tuple(found)


def plan(workflow: Workflow, profile: Profile, cluster: Cluster) -> Plan:
    return schedulers.plan(workflow, profile, cluster, search=schedulers.SearchOptions(deadline_s=0.2))


def used(kind: type, value: Any) -> None:
    """What becomes of a file that is accepted: it fits the rest, or does not, and says so."""
    workflow, profile, cluster = problem(0)
    uses: dict[type, list[Callable[[], Any]]] = {
        Plan: [lambda: validate(value, workflow, cluster, profile)],
        Cluster: [lambda: validate(plan_of(0), workflow, value, profile), lambda: plan(workflow, profile, value)],
        Profile: [
            lambda: check_profile(value, workflow, {"cpu": "test"}, any_hardware=True),
            lambda: validate(plan_of(0), workflow, cluster, value),
            lambda: plan(workflow, value, cluster),
        ],
        Workflow: [lambda: validate(plan_of(0), value, cluster, profile), lambda: plan(value, profile, cluster)],
    }
    for use in uses[kind]:
        with suppress(PlanError):
            use()


@pytest.mark.parametrize("kind", [Workflow, Profile, Cluster, Plan])
@few_or_many(15)
def test_damaged_files(kind: Any, cases: range, tmp_path: Path) -> None:
    file = tmp_path / "file.json"

    def damaged(rng: Random) -> Path:
        file.write_bytes(mutation.as_json(rng, rng.choice(originals(kind))))
        return file

    holds(cases, damaged, lambda path: used(kind, load(kind, path)), (PlanError,))
