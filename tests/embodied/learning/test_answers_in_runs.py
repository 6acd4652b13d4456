"""Whole runs on answers in tokens: resumed, killed, planned, in turns, sampled dynamically, and with bad input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.algorithms.estimators import group_relative, judged
from embodied.config.files import parse_config
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.run.folder import fetched
from embodied.trajectories.batch import join_columns
from embodied_language.text.tokenizer import answer_tokenizer
from policies import PolicyError
from sim_farm.contract import FarmError
from sim_farm.episodes import MAX_GROUPS
from tests.embodied.run.test_resume import assert_same_run
from tests.embodied.run.test_resume import run as train
from tests.embodied.support import text_runs
from tests.embodied.support.text_runs import settings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_runs.few_tokens(tmp_path_factory.mktemp("runs") / "model")


def trained(folder: Path, data: dict[str, Any], resume: bool = False) -> Path:
    train(parse_config(data, "test"), folder, resume)
    return folder


def test_a_run_that_is_resumed_is_the_run(model: Path, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", settings(model))
    parts = trained(tmp_path / "parts", settings(model, iterations=1))
    assert_same_run(trained(parts, settings(model), resume=True), whole)
    rows = read(whole)
    assert all(row["learner/grad_norm"] > 0 for row in rows), "nothing was learned: the run would not test it"
    assert len({row["env/episode_len"] for row in rows}) > 1


@pytest.mark.slow  # five seconds: sixteen iterations
def test_reinforcement_raises_the_reward(model: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {
        "env": {"num_envs": 64, "max_episode_steps": 3},
        "policy": {"chunk": 3},
        "optim": {"policy_lr": 2e-2, "micro_batch": 64},
    }
    rows = read(trained(tmp_path / "run", settings(model, "begun", iterations=16, checkpoint_every=16, **changes)))
    success = [float(row["env/success_once"]) for row in rows]
    assert success[0] < 0.2 and min(success[-3:]) > 0.6, success


def test_an_answer_goes_on_in_the_next_iteration(model: Path, tmp_path: Path) -> None:
    """By ppo, whose iteration has a number of decisions: one that stops in the middle of answers goes on with them."""
    data = settings(model, workflow="ppo", policy={"chunk": 3}, env={"max_episode_steps": 30}, rollout={"decisions": 2})
    data["rollout"] = {"decisions": 2}
    whole = trained(tmp_path / "whole", data)
    parts = trained(tmp_path / "parts", {**data, "iterations": 2})
    kept = checkpoint.read_environments(parts / "checkpoints" / "000002")
    assert kept["base_step"].max() > 2 * 3, "an answer is longer than an iteration"
    assert_same_run(trained(parts, data, resume=True), whole)


# --- turns


def test_what_was_said_in_a_turn_is_read_in_the_next(model: Path, tmp_path: Path) -> None:
    """A decision's prompt is the problem, the answers before, and what was said to them; an episode's reward is one."""
    data = settings(model, "turns", workflow=text_runs.NOTING, iterations=1, env={"max_episode_steps": 36})
    text_runs.SEEN.clear()
    trained(tmp_path / "run", data)
    tokenizer = answer_tokenizer(str(model))
    batch = join_columns(text_runs.SEEN)
    tokens = batch.trace["tokens"].view(*batch.mask.shape, -1)
    assert batch.inputs.state is not None
    states = batch.inputs.state.view(*batch.mask.shape, -1)
    ends = (tokens == tokenizer.end).any(2) & batch.mask
    assert ends.sum(0).max() == 3, "nobody needed three turns"
    for t, b in batch.mask[1:].nonzero().tolist():
        before, said = states[t, b], tokens[t, b, : int(batch.executed[t, b])]
        expected = [*before[before >= 0].int().tolist(), *said.tolist()]
        if said[-1] == tokenizer.end:
            expected += tokenizer.ids("Again: ")
        after = states[t + 1, b]
        assert after[after >= 0].int().tolist() == expected
    assert torch.equal(batch.reward.sum(0), batch.success.any(0).float())


# --- dynamic sampling


def test_groups_are_taken_in_the_order_of_their_problems(model: Path, tmp_path: Path) -> None:
    """However long their answers are: the groups of the first episodes count first, until enough of them differ."""
    wanted = 2
    data = settings(model, workflow=text_runs.NOTING, iterations=1, rollout={"max_episodes_per_env": 6})
    text_runs.SEEN.clear()
    trained(tmp_path / "run", data)
    parts = text_runs.SEEN
    informative = []
    for number, part in enumerate(parts):
        assert part.episode_group is not None
        assert (part.episode_group // MAX_GROUPS == number).all(), "episode number n of every environment is part n"
        solved = part.success.any(0).view(-1, 4).sum(1)
        informative.append(int(((solved > 0) & (solved < 4)).sum()))
    assert sum(informative) >= wanted > sum(informative[:-1]) or len(parts) == 6
    (row,) = read(tmp_path / "run")
    assert row["learner/informative_groups"] == sum(informative)


# --- length


def test_the_end_of_an_answer_costs_what_its_length_says(model: Path, tmp_path: Path) -> None:
    """Yu et al. 2025, eq. 13: 0 up to 12 - 5 tokens, one fifth more for each then, and -1 for 12 or what is cut off."""
    data = settings(model, workflow=text_runs.NOTING, iterations=1, rollout={"episodes_per_env": 3})
    data["advantage"] = {"overlong": 5}
    text_runs.SEEN.clear()
    trained(tmp_path / "run", data)
    batch = join_columns(text_runs.SEEN)
    found = judged(batch, parse_config(data, "test")).tolist()
    lengths = batch.executed.sum(0).tolist()
    for outcome, solved, length in zip(found, batch.success.any(0).tolist(), lengths, strict=True):
        assert outcome == pytest.approx(solved - min(max((length - 7) / 5, 0), 1))
    assert {min(max(length - 7, 0), 5) for length in lengths} >= {0, 5} and len({*lengths}) > 4
    masked = {**data, "advantage": {"overlong": "masked"}}
    estimate = group_relative(batch, parse_config(masked, "test"))
    assert batch.truncated.any() and not estimate.keep[:, batch.truncated.any(0)].any()
    assert estimate.keep.any()


# --- bad input: one message each


def message(data: dict[str, Any], folder: Path) -> str:
    with pytest.raises((UserError, FarmError, PolicyError)) as caught:
        trained(folder, data)
    return str(caught.value)


def test_a_prompt_longer_than_the_model_takes_is_one_message(tmp_path: Path) -> None:
    short = text_runs.few_tokens(tmp_path / "short", max_position_embeddings=14)
    assert "more than the model's context of 14" in message(settings(short, iterations=1), tmp_path / "run")


def test_limits_of_zero_are_one_message(model: Path) -> None:
    with pytest.raises(UserError, match="max_episode_steps: it should be at least 1"):
        parse_config(settings(model, env={"max_episode_steps": 0}), "test")
    with pytest.raises(UserError, match="no file of a language has one: set policy.chunk to at least 1"):
        fetched(parse_config(settings(model, policy={"chunk": 0}), "test"))


def test_a_verifier_that_fails_is_counted_and_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its episodes are no part of the update, nor the groups that they leave incomplete."""
    trained(tmp_path / "run", settings(model, "raises", rollout={"episodes_per_env": 3}))
    said = capsys.readouterr()
    assert re.search("the verifier failed: ZeroDivisionError: .*text_runs.py, line", said.out + said.err)
    assert sum(row.get("learner/broken_episodes") or 0 for row in read(tmp_path / "run")) > 0


def test_a_model_without_a_pad_token_is_trained(tmp_path: Path) -> None:
    bare = text_runs.few_tokens(tmp_path / "bare", pad_token_id=None)
    config = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "pad_token"}))
    trained(tmp_path / "run", settings(bare, iterations=1))
    (row,) = read(tmp_path / "run")
    assert row["learner/grad_norm"] > 0 and row["learner/first_ratio_error"] < 1e-4
