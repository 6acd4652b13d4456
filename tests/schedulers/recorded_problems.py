"""The problems whose plans are recorded, and what is recorded of them. Run to record them anew:

python -m tests.schedulers.recorded_problems tests/schedulers/recorded/choices.json
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import schedulers
from benchmarks import planner, scaling, tasks_together
from schedulers import MODES, Cluster, Mode, Node, Plan, PlanError, Profile, SearchOptions, Workflow, alternatives
from tests.schedulers import test_choice_per_task, test_communication, test_pools, test_shared_weights, test_uneven
from tests.schedulers.baselines import SMALL
from tests.schedulers.instances import (
    TWO_CORES,
    libero_tasks,
    ppo,
    ppo_profile,
    random_home,
    random_problem,
    random_tasks,
)

Instance = tuple[Workflow, Profile, Cluster]


def _random_memory(seed: int) -> Instance:
    return random_problem(500 + seed, pools=1 + seed % 2, memory=True)


def _large(which: str) -> Instance:
    kind, seed = which.split()
    return planner.large(kind, int(seed))


def _published(which: str) -> Instance:
    workload, gpus = which.split()
    workflow, profile = planner.published(workload)
    return workflow, profile, planner.machines(int(gpus))


def _scaling(which: str) -> Instance:
    gpus, environments, trained, network = which.split()
    workflow = scaling.workflow_of(int(environments))
    profile = scaling.profile_of(int(environments), trained == "full")
    return workflow, profile, scaling.machines(int(gpus), network)


def _together(which: str) -> Instance:
    tasks = (tasks_together.PUSHCUBE, tasks_together.LIBERO)
    cores = int(which)
    return tasks_together.workflow_of(*tasks), tasks_together.profile_of(*tasks), Cluster((Node("node0", cores, 1),))


def _libero(which: str) -> Instance:
    return (*libero_tasks(int(which)), Cluster((Node("node0", 16, 1),)))


def _pools(seed: int) -> Instance:
    workflow, profile, cluster = random_tasks(seed, count=1 + seed % 2, gpu=True)
    return workflow, test_pools.drawing_elsewhere(profile, 0.5), cluster


KINDS: dict[str, Callable[[str], Instance]] = {
    "ppo": lambda flow: (ppo(flow=flow), ppo_profile(policy=0.02), TWO_CORES),
    "random": lambda seed: random_problem(int(seed), pools=1 + int(seed) % 2, memory=int(seed) % 3 == 0),
    "memory": lambda seed: _random_memory(int(seed)),
    "tail": lambda seed: _tailed(int(seed)),
    "home": lambda seed: random_home(int(seed), pools=1 + int(seed) % 2, links=int(seed) % 2 == 0),
    "uneven": lambda seed: test_uneven.random_uneven(int(seed), int(seed) % 2 == 0),
    "communication": lambda seed: test_communication.communicating(int(seed)),
    "lending": lambda seed: test_shared_weights.sharing(int(seed)),
    "pools": lambda seed: _pools(int(seed)),
    "tasks": lambda seed: random_tasks(int(seed), gpu=int(seed) % 2 == 0, memory=int(seed) % 3 == 0),
    "three tasks": lambda seed: random_tasks(int(seed), count=3, gpu=int(seed) % 2 == 0),
    "one of each": lambda _: (*test_choice_per_task.one_of_each(), test_choice_per_task.MACHINE),
    "published": _published,
    "scaling": _scaling,
    "together": _together,
    "libero": _libero,
    "large": _large,
}

KEYS = [
    *(f"ppo:{flow}" for flow in ("barrier", "micro_batch")),
    *(f"{kind}:{seed}" for kind in ("random", "memory", "tail", "home", "uneven") for seed in range(16)),
    *(f"{kind}:{seed}" for kind in ("communication", "lending") for seed in range(10)),
    *(f"pools:{seed}" for seed in range(4)),
    *(f"tasks:{seed}" for seed in range(8)),
    *(f"three tasks:{seed}" for seed in range(2)),
    "one of each:",
    *(f"published:{workload} {gpus}" for workload in planner.PUBLISHED_LATENCY_S for gpus in planner.GPUS),
    *(
        f"scaling:{gpus} {environments} {trained} {network}"
        for gpus in scaling.GPUS
        for environments in sorted({gpus * scaling.PER_GPU, scaling.FIXED})
        for trained in ("lora", "full")
        for network in scaling.NETWORKS
    ),
    *(f"together:{cores}" for cores in tasks_together.CORES),
    *(f"libero:{count}" for count in (2, 3, 10)),
    *(f"large:{kind} {seed}" for kind in ("chain3", "chain6", "ppo") for seed in range(2)),
    "large:chain8 0",
]


def _tailed(seed: int) -> Instance:
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2)
    return workflow, replace(profile, arrivals=(0.3, 0.5, 0.6, 1.0) if seed % 3 else ()), cluster


def instance(key: str) -> Instance:
    kind, _, which = key.partition(":")
    return KINDS[kind](which)


def recorded(key: str) -> dict[str, Any] | str:
    """The plan chosen, the best plan of each mode from the fastest on, and what is predicted of them: times to the
    last bit, plans by their digest. Where there is no plan, the message that says so."""
    workflow, profile, cluster = instance(key)
    kind, _, which = key.partition(":")
    ahead = kind in ("random", "tail") and int(which) % 4 == 1
    options = SMALL if kind not in ("published", "scaling", "together", "libero", "large") else SearchOptions()
    search = replace(options, deadline_s=3600.0)
    try:
        best = schedulers.plan(workflow, profile, cluster, ahead=ahead, search=search, explain=False)
        found = alternatives(workflow, profile, cluster, ahead=ahead, search=search)
    except PlanError as error:
        return str(error)
    result: dict[str, Any] = {"chosen": best.mode, **_described(best, workflow, profile, cluster)}
    if len(found) > 1:
        result["modes"] = [[mode, _seconds(found[mode]).hex(), digest(found[mode])] for mode in _ranked(found)]
    if kind == "published":
        plans = {"halves": planner.in_halves(*_parts(which)), "quarters": planner.in_quarters(*_parts(which))}
        result |= {name: _described(other, workflow, profile, cluster) for name, other in plans.items()}
    return result


def _parts(which: str) -> tuple[str, int]:
    workload, gpus = which.split()
    return workload, int(gpus)


def _ranked(found: dict[Mode, Plan]) -> list[Mode]:
    return sorted(found, key=lambda mode: (_seconds(found[mode]), MODES.index(mode)))


def _described(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster) -> dict[str, Any]:
    prediction = schedulers.predict(plan, workflow, profile, cluster)
    assert plan.prediction is None or prediction.iteration_s == plan.prediction.iteration_s
    large = len(cluster.nodes) > 16
    played = schedulers.simulate(plan, workflow, profile, cluster, seed=1, variation=0.3).seconds if not large else 0.0
    return {
        "plan": digest(plan),
        "iteration_s": prediction.iteration_s.hex(),
        "certified": bool(plan.prediction and plan.prediction.lower_bound_s >= prediction.iteration_s * (1 - 1e-9)),
        "parts_s": [
            [second.hex() for second in prediction.phases_s],
            {name: second.hex() for name, second in prediction.components_s.items()},
            prediction.switch_s.hex(),
            (prediction.communication_s or 0.0).hex(),
        ],
        "in_turn_s": schedulers.predict_sequential(plan, workflow, profile, cluster).iteration_s.hex(),
        "played_s": played.hex(),
    }


def _seconds(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


def digest(plan: Plan) -> str:
    """Digest of the plan's file without its prediction and its sentences."""
    text = json.dumps(schedulers.to_data(replace(plan, prediction=None, why=())), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    lines = [f"{json.dumps(key)}: {json.dumps(recorded(key))}" for key in KEYS]
    Path(sys.argv[1]).write_text("{\n" + ",\n".join(lines) + "\n}\n")
