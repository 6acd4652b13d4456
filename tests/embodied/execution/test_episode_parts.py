"""What a part of an iteration on episode groups is: whole episodes, complete groups, each named once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from embodied.errors import UserError
from embodied.execution.roles import RolloutRole
from embodied.rollout.rollout_summary import EpisodePart
from embodied.trajectories.batch import Trajectories
from embodied.workflows.run_spec import RunSpec
from tests.embodied.support import episode_parts
from tests.embodied.support.episode_parts import (
    CHUNK,
    ENVS,
    LIMIT,
    NOTING,
    SEEN,
    SIZE,
    begun,
    config_of,
    iterations_of,
    roll,
)

skilled = episode_parts.skilled
parts = episode_parts.parts


def test_a_part_is_one_whole_episode_of_every_environment(parts: list[Trajectories]) -> None:
    lengths = set()
    for batch in parts:
        ended = (batch.terminated | batch.truncated) & batch.mask
        assert batch.mask[0].all() and torch.equal(ended.sum(0), torch.ones(ENVS, dtype=torch.int64))
        for env in range(ENVS):
            (last,) = ended[:, env].nonzero()[:, 0].tolist()
            assert batch.mask[: last + 1, env].all() and not batch.mask[last + 1 :, env].any()
            assert batch.executed[last + 1 :, env].sum() == 0 and batch.reward[last + 1 :, env].abs().sum() == 0
            lengths.add(int(batch.executed[:, env].sum()))
        assert batch.mask[-1].any(), "a row that is nobody's decision"
    assert LIMIT in lengths and min(lengths) < LIMIT - CHUNK, f"no early end: {lengths}"


def test_groups_are_complete_and_named_once(parts: list[Trajectories]) -> None:
    seen: set[int] = set()
    for batch in parts:
        assert batch.episode_group is not None
        names, count = batch.episode_group.unique(return_counts=True)
        assert count.tolist() == [SIZE] * (ENVS // SIZE)
        assert not seen & set(names.tolist())
        seen |= set(names.tolist())
    assert len(seen) == len(parts) * ENVS // SIZE


def test_members_of_a_group_begin_alike_and_go_on_differently(parts: list[Trajectories]) -> None:
    first_states = set()
    for batch in parts:
        assert batch.episode_group is not None and batch.inputs.state is not None
        first = batch.inputs.state.view(-1, ENVS, 16)[0]
        actions = batch.trace["action"].view(-1, ENVS, CHUNK, 3)[0]
        for name in batch.episode_group.unique():
            members = (batch.episode_group == name).nonzero()[:, 0]
            assert (first[members] == first[members[0]]).all()
            assert len(actions[members].unique(dim=0)) == SIZE, "members share their noise"
            first_states.add(first[members[0]].numpy().tobytes())
    assert len(first_states) == len(parts) * ENVS // SIZE, "groups begin alike"


def test_environments_that_end_early_go_on_with_the_next_part(skilled: Path, tmp_path: Path) -> None:
    """And what they gather is what they gather when everybody waits."""
    with begun(config_of(), tmp_path, skilled) as workers:
        going = [roll(workers, 0, 3)]
        now = workers.rollout_worker.call(RolloutRole.snapshot)
        ahead = (now["base_episode"] == 1) & (now["base_step"] > 0)
        assert ahead.any() and not ahead.all()
        going += [roll(workers, 1, 3), roll(workers, 2, 3)]
        now = workers.rollout_worker.call(RolloutRole.snapshot)
        assert (now["base_episode"] == 3).all() and (now["base_step"] == 0).all(), "somebody began a fourth episode"
    with begun(config_of(), tmp_path, skilled) as workers:
        waiting = []
        for number in range(3):
            waiting.append(roll(workers, number, number + 1))
            now = workers.rollout_worker.call(RolloutRole.snapshot)
            assert (now["base_episode"] == number + 1).all() and (now["base_step"] == 0).all()
    for found, expected in zip(going, waiting, strict=True):
        for name in ("mask", "executed", "success", "terminated", "truncated", "episode_group"):
            assert torch.equal(getattr(found, name), getattr(expected, name)), name
        for name in ("log_prob", "reward"):  # other batches, other rounding
            mask = found.mask.view(*found.mask.shape, *[1] * (getattr(found, name).ndim - 2))
            difference = (getattr(found, name) - getattr(expected, name)) * mask
            assert difference.abs().max() < 1e-4, name


LONG = {"num_envs": 32, "max_episode_steps": 60}
"""Episodes of very different lengths."""


def test_each_part_tells_its_own_episodes(skilled: Path, tmp_path: Path) -> None:
    """Even where an environment has ended an episode of the next part before the part is complete."""
    with begun(config_of(env=LONG), tmp_path, skilled) as workers:
        for number in range(3):
            part = EpisodePart(number * 32, (number + 1) * 32)
            summary = workers.rollout_worker.call(RolloutRole.rollout_episodes, part, 3, 60.0)
            batch = workers.rollout_worker.call(RolloutRole.trajectories)
            now = workers.rollout_worker.call(RolloutRole.snapshot)
            assert number or now["base_episode"].max() >= 2, "nobody was two parts ahead"
            assert [e.env for e in summary.episodes] == list(range(32))
            assert [e.length for e in summary.episodes] == batch.executed.sum(0).tolist()
            assert [e.success for e in summary.episodes] == (batch.success & batch.mask).any(0).tolist()
            assert summary.env_steps == sum(e.length for e in summary.episodes)


def test_an_iteration_has_no_more_decisions_than_its_longest_environment(skilled: Path, tmp_path: Path) -> None:
    """Between two parts of an iteration nobody waits for the others."""
    SEEN.clear()
    config = config_of(
        workflow=NOTING,
        farm={"groups": 1},
        env={"max_episode_steps": 60},
        iterations=1,
    )  # fmt: skip
    (one,), _ = iterations_of(config, tmp_path, skilled)
    acted = sum(span.name.startswith("act") for span in one.summary.spans)
    decisions = torch.stack([batch.mask.sum(0) for batch in SEEN])
    assert acted == decisions.sum(0).max() < decisions.max(1).values.sum()


def test_environments_that_do_not_make_groups_are_refused(tmp_path: Path) -> None:
    config = config_of(env={"num_envs": 10})
    with pytest.raises(
        UserError, match="10 environments of tabletop/reach do not make episode groups of 4; set env.num_envs to 8"
    ):
        RunSpec.of(config).check_episode_groups()
