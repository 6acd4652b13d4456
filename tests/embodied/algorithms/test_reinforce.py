"""REINFORCE++ and overlong punishment: what is made of episodes of a real rollout, and that a run learns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.estimators import judged, outcomes, reinforce
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.trajectories.batch import Trajectories, join_columns
from tests.embodied.run.test_resume import run as train
from tests.embodied.support import episode_parts
from tests.embodied.support.checked import check
from tests.embodied.support.episode_parts import LIMIT, SIZE, episodes_in_parts

skilled = episode_parts.skilled  # the fixture: a policy that solves some episodes


def config_of(**changes: Any) -> Config:
    return episode_parts.config_of(**{"workflow": "reinforce", **changes})


@pytest.fixture(scope="module")
def batch(skilled: Path, tmp_path_factory: pytest.TempPathFactory) -> Trajectories:
    """An iteration's episodes, side by side."""
    return join_columns(episodes_in_parts(config_of(), tmp_path_factory.mktemp("episodes"), skilled))


@pytest.mark.parametrize("baseline", ["none", "group"])
def test_every_decision_has_what_is_left_of_its_episode_normalised_over_all(baseline: str, batch: Trajectories) -> None:
    found = reinforce(batch, config_of(advantage={"baseline": baseline, "outcome": "return"}))
    assert batch.episode_group is not None
    literal: dict[tuple[int, int], float] = {}
    score = [float(batch.reward[batch.mask[:, b], b].double().sum()) for b in range(len(batch.episode_group))]
    for b, group in enumerate(batch.episode_group.tolist()):
        members = [score[i] for i, name in enumerate(batch.episode_group.tolist()) if name == group]
        assert len(members) == SIZE
        for t in batch.mask[:, b].nonzero()[:, 0].tolist():
            literal[t, b] = score[b] - (sum(members) / SIZE if baseline == "group" else 0.0)
    values = torch.tensor(list(literal.values()), dtype=torch.float64)
    expected = torch.zeros(batch.mask.shape, dtype=torch.float64)
    for (t, b), value in literal.items():
        expected[t, b] = (value - values.mean()) / values.std()
    torch.testing.assert_close(found.advantage.double(), expected, atol=1e-5, rtol=1e-4)
    assert torch.equal(found.keep, batch.mask)


def test_long_episodes_lose_of_their_outcome(batch: Trajectories) -> None:
    plain = outcomes(batch, config_of().advantage)
    found = judged(batch, config_of(advantage={"overlong": 4}))
    length = (batch.executed * batch.mask).sum(0)
    assert (length == LIMIT).any() and (length <= LIMIT - 4).any()
    torch.testing.assert_close(plain - found, ((length - (LIMIT - 4)) / 4).clamp(0, 1).float())


@pytest.mark.parametrize("limit", [None, 9])
def test_a_margin_without_a_limit_is_refused(limit: int | None, batch: Trajectories) -> None:
    config = config_of(env={"max_episode_steps": limit}, advantage={"overlong": 10})
    with pytest.raises(UserError, match=f"max_episode_steps of tabletop/reach {limit or 'not set'}"):
        judged(batch, config)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"workflow": "ppo", "advantage": {"overlong": 4}}, "no outcome of an episode"),
        ({"env": {"max_episode_steps": None}, "advantage": {"overlong": 4}}, "not set"),
        (
            {"extra_tasks": [{"task": "tabletop/push", "max_episode_steps": 3}], "advantage": {"overlong": 4}},
            "tabletop/push 3",
        ),
        ({"rollout": {"max_episodes_per_env": 4}}, "has no comparison within episode groups"),
        (
            {
                "workflow": "ppo",
                "rollout": {"episodes_per_env": 1, "episode_group": 8},
                "advantage": {"outcome": "success"},
                "optim": {"critic_warmup": 3},
            },
            "3 of 3 iterations: the policy would never learn",
        ),
    ],
)
def test_settings_that_nothing_reads_are_refused_before_a_worker_starts(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        check(config_of(**changes))


LEARNING: dict[str, Any] = {
    "iterations": 12,
    "env": {"num_envs": 32, "max_episode_steps": 20},
    "rollout": {"episode_group": 4, "episodes_per_env": 1},
    "optim": {"epochs": 2, "minibatch": 256, "policy_lr": 3e-3},
}


@pytest.mark.slow
@pytest.mark.parametrize("workflow", ["reinforce", "reinforce_reference"])
def test_the_return_rises(workflow: str, tmp_path: Path) -> None:
    own = {"loss": {"reference_kl": 0.001}} if "reference" in workflow else {}
    config = config_of(workflow=workflow, name="run", advantage={"baseline": "group"}, **own, **LEARNING)
    train(config, tmp_path / "run")
    returns = [row["env/return"] for row in read(tmp_path / "run")]
    assert sum(returns[-3:]) / 3 > returns[0] + 0.15, returns
