"""GRPO through the executor: as many episodes as it takes, resumed as if it had not stopped, and it learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied.algorithms.estimators import group_relative
from embodied.execution.iteration import Iteration
from embodied.reporting.metrics import read
from tests.embodied.run.test_resume import assert_same_run, rewind
from tests.embodied.run.test_resume import run as train
from tests.embodied.support import episode_parts
from tests.embodied.support.episode_parts import (
    ENVS,
    NOTING,
    SEEN,
    SIZE,
    begun,
    config_of,
    iterations_of,
)

skilled = episode_parts.skilled

# --- as many episodes as it takes


def parts_in(one: Iteration) -> int:
    return sum(span.name.startswith("roll out part") for span in one.spans)


@pytest.mark.slow
def test_episodes_go_on_until_enough_groups_teach(skilled: Path, tmp_path: Path) -> None:
    SEEN.clear()
    config = config_of(
        workflow=NOTING,
        iterations=4,
        advantage={"outcome": "success"},
        rollout={"episodes_per_env": 1, "max_episodes_per_env": 4},
    )
    counts = []
    with begun(config, tmp_path, skilled) as workers:
        begun_episodes = 0
        for number in range(config.iterations):
            SEEN.clear()
            one = workers.iterate(number)
            counts.append(parts_in(one))
            informative = [int(group_relative(part, config).keep[0].sum()) // SIZE for part in SEEN]
            assert len(informative) == counts[-1]
            wanted = ENVS // SIZE
            assert sum(informative[:-1]) < wanted, "a part too many"
            assert sum(informative) >= wanted or counts[-1] == 4, "a part too few"
            begun_episodes += counts[-1]
            assert (one.environments["base_episode"] == begun_episodes).all(), "an episode began before it was decided"
            assert (one.environments["base_step"] == 0).all()
            assert len(one.summary.episodes) == ENVS * counts[-1]
    assert len(set(counts)) > 1, f"this seed does not test it: {counts}"


# --- a stop changes nothing


@pytest.mark.parametrize(
    "changes",
    [
        {"rollout": {"episodes_per_env": 2}},
        {
            "advantage": {"outcome": "success"},
            "rollout": {"episodes_per_env": 1, "max_episodes_per_env": 3},
            "env": {"max_episode_steps": 41},
            "policy": {"options": {"widths": [16], "initial_log_std": 1.5}},
        },
    ],
    ids=["episodes_per_env", "max_episodes_per_env"],
)
def test_a_run_that_stopped_goes_on_as_if_it_had_not(changes: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(**changes)
    train(config, tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "stopped", 1)
    train(config, tmp_path / "stopped", resume=True)
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")
    assert any(row["learner/steps"] for row in read(tmp_path / "whole")[1:]), "nothing was learned after the stop"


# --- and it learns


@pytest.mark.slow  # test_golden_parameters.py knows what such a run learns, to the last bit
def test_the_return_rises(tmp_path: Path) -> None:
    """Two seeds: from hardly moving to a goal that is reached in most episodes, in 25 iterations."""
    config = config_of(
        iterations=25,
        env={"num_envs": 32, "max_episode_steps": 20},
        rollout={"episodes_per_env": 1},
        optim={"max_grad_norm": 0.5},
    )
    for seed in (1, 2):
        done, _ = iterations_of(config.model_copy(update={"seed": seed}), tmp_path)
        returns = [float(np.mean([e.total_reward for e in one.summary.episodes])) for one in done]
        solved = [float(np.mean([e.success for e in one.summary.episodes])) for one in done]
        first, last = np.mean(returns[:5]), np.mean(returns[-5:])
        assert first < 0.3 and last > 0.8, f"seed {seed}: mean return {first:.2f}, then {last:.2f}"
        assert np.mean(solved[-5:]) > 0.5, f"seed {seed}: {np.mean(solved[-5:]):.2f} solved"
