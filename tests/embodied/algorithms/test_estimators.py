"""Estimators and rows: their edge cases, and a workflow of one's own exactly as docs/workflows.md writes it."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from embodied.algorithms.advantages import generalised_advantages, normalise
from embodied.algorithms.estimators import gae, group_relative, outcomes
from embodied.algorithms.samples import Estimate, Samples, join_samples, samples_of
from embodied.config.files import load_config, parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.session import open_session
from embodied.reporting.metrics import read
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.trajectories.batch import TensorDecisions, Trajectories
from embodied.workflows import recipes as workflows
from embodied.workflows.recipes import GRPO, PPO, recipe_of
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import workflow_of
from policies.contract import Inputs

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "workflows.md").read_text()
T, B, C, A, S = 5, 6, 2, 3, 4
LENGTHS = (5, 2, 3, 1, 4, 5)
"""Decisions of each episode."""


def make_batch(seed: int = 0, group: tuple[int, ...] | None = (9, 9, 9, 4, 4, 4)) -> Trajectories:
    """Six episodes of noise, in groups; every number is its own."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(T)[:, None] < torch.tensor(LENGTHS)
    ends = torch.arange(T)[:, None] == torch.tensor(LENGTHS) - 1
    solved = ends & (torch.arange(B) % 2 == 0)
    return Trajectories(
        decisions=TensorDecisions(
            Inputs(state=torch.randn(T * B, S, generator=g)), {"action": torch.randn(T * B, C, A, generator=g)}
        ),
        log_prob=torch.randn(T, B, C, A, generator=g),
        value=torch.randn(T, B, generator=g),
        reward=torch.randn(T, B, generator=g) * mask,
        success=solved,
        executed=torch.where(ends, 1, C) * mask,
        mask=mask,
        terminated=solved,
        truncated=ends & ~solved,
        final_value=torch.randn(T, B, generator=g) * (ends & ~solved),
        last_value=torch.zeros(B),
        version=0,
        episode_group=None if group is None else torch.tensor(group),
    )


def config_of(unit: str = "chunk", **advantage: Any) -> Config:
    return parse_config(
        {
            "workflow": "grpo",
            "rollout": {"episode_group": 3},
            "advantage": {"outcome": "return", **advantage},
            "loss": {"ratio_unit": unit},
        },
        "test",
    )


def estimate(**changes: Any) -> Estimate:
    zeros = torch.zeros(T, B)
    whole: dict[str, Any] = {"advantage": zeros, "returns": zeros, "keep": zeros == 0, "weight": zeros + 1}
    return Estimate(**{**whole, **changes})


# --- rows


def test_rows_are_the_decisions_that_were_taken_and_teach() -> None:
    batch = make_batch()
    keep = torch.rand(T, B, generator=torch.Generator().manual_seed(1)) < 0.5
    numbers = torch.arange(T * B).view(T, B).float()
    rows = samples_of(batch, estimate(advantage=numbers, returns=-numbers, keep=keep, weight=numbers + 1))
    expected = [t * B + b for t in range(T) for b in range(B) if t < LENGTHS[b] and keep[t, b]]
    assert rows.advantage.int().tolist() == expected
    assert len(rows) == len(expected) < int(batch.mask.sum())
    assert torch.equal(rows.returns, -rows.advantage) and torch.equal(rows.weight, rows.advantage + 1)
    assert batch.inputs.state is not None and rows.inputs.state is not None
    assert torch.equal(rows.inputs.state, batch.inputs.state[expected])
    assert torch.equal(rows.trace["action"], batch.trace["action"][expected])
    assert torch.equal(rows.log_prob, batch.log_prob.flatten(0, 1)[expected])
    assert torch.equal(rows.value, batch.value.flatten()[expected])
    assert torch.equal(rows.executed, batch.executed.flatten()[expected])
    assert torch.equal(rows.importance, torch.ones(len(expected), 1))


def test_nothing_is_copied_where_everything_is_learned_from() -> None:
    batch = replace(make_batch(), mask=torch.ones(T, B, dtype=torch.bool), executed=torch.full((T, B), C))
    rows = samples_of(batch, estimate())
    assert rows.decisions is batch.decisions and len(rows) == T * B


def test_no_row_is_left_where_nothing_teaches() -> None:
    rows = samples_of(make_batch(), estimate(keep=torch.zeros(T, B, dtype=torch.bool)))
    assert len(rows) == 0 and rows.inputs.state is not None and rows.inputs.state.shape == (0, S)
    assert len(join_samples([rows, rows])) == 0


def fields(rows: Samples) -> dict[str, Tensor]:
    assert rows.inputs.state is not None
    named = {name: value for name, value in vars(rows).items() if isinstance(value, Tensor)}
    return {**named, "state": rows.inputs.state, **rows.trace}


def test_joined_rows_are_one_part_after_the_other() -> None:
    parts = [samples_of(make_batch(seed), estimate(advantage=torch.full((T, B), float(seed)))) for seed in range(3)]
    empty = samples_of(make_batch(7), estimate(keep=torch.zeros(T, B, dtype=torch.bool)))
    joined = join_samples([parts[0], empty, parts[1], parts[2]])
    for name, tensor in fields(joined).items():
        assert torch.equal(tensor, torch.cat([fields(part)[name] for part in parts])), name
    assert join_samples([parts[0]]) is parts[0]


# --- gae


def test_gae_is_normalised_over_the_decisions_that_were_taken() -> None:
    batch = make_batch(group=None)
    found = gae(batch, Config())
    taken = found.advantage[batch.mask]
    assert float(taken.mean()) == pytest.approx(0, abs=1e-6) and float(taken.std()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(found.keep, batch.mask) and (found.weight == 1).all()
    found = gae(batch, parse_config({"advantage": {"gamma": 0.8, "lam": 0.7}}, "test"))
    advantage, returns = generalised_advantages(
        batch.reward, batch.value, batch.terminated, batch.truncated, batch.final_value, batch.last_value, 0.8, 0.7
    )
    assert torch.equal(found.advantage, normalise(advantage, batch.mask)) and torch.equal(found.returns, returns)


def test_what_masked_decisions_hold_does_not_matter_to_gae() -> None:
    batch = make_batch(group=None)
    hole = torch.where(batch.mask, 0.0, 1e3)
    found = gae(replace(batch, value=batch.value + hole), Config())
    assert torch.equal(found.advantage[batch.mask], gae(batch, Config()).advantage[batch.mask])


# --- group-relative


def test_outcomes_count_what_was_done_and_no_more() -> None:
    batch = make_batch()
    hole = ~batch.mask
    dirty = replace(batch, reward=batch.reward + 5 * hole, success=batch.success | hole)
    returns = outcomes(dirty, config_of().advantage)
    assert returns.tolist() == pytest.approx([sum(batch.reward[:n, b].tolist()) for b, n in enumerate(LENGTHS)])
    assert outcomes(dirty, config_of(outcome="success").advantage).tolist() == [1, 0, 1, 0, 1, 0]


def test_groups_that_lost_a_member_teach_nothing() -> None:
    batch = make_batch(group=(9, 9, 4, 4, 4, 7))
    found = group_relative(batch, config_of())
    assert found.keep.any(0).tolist() == [False, False, True, True, True, False]
    assert not found.advantage[:, [0, 1, 5]].any() and found.advantage[:, 2:5].all()
    assert len(samples_of(batch, found)) == sum(LENGTHS[2:5])


def test_columns_may_come_in_any_order() -> None:
    batch, order = make_batch(), torch.tensor([3, 0, 5, 1, 4, 2])
    per_column = ("reward", "success", "executed", "mask", "terminated", "truncated")
    assert batch.episode_group is not None
    shuffled = replace(
        batch, episode_group=batch.episode_group[order], **{k: getattr(batch, k)[:, order] for k in per_column}
    )
    for scale in ("group", "batch", "none"):
        found, expected = (group_relative(b, config_of(scale=scale)) for b in (shuffled, batch))
        for name in ("advantage", "keep", "weight"):
            assert torch.equal(getattr(found, name), getattr(expected, name)[:, order]), name


def test_no_group_teaches_where_all_outcomes_are_equal() -> None:
    batch = make_batch()
    still = replace(batch, reward=torch.zeros(T, B), success=torch.zeros(T, B, dtype=torch.bool))
    for outcome in ("return", "success"):
        found = group_relative(still, config_of(outcome=outcome))
        assert not found.keep.any() and not found.advantage.any()
        assert len(samples_of(still, found)) == 0


@pytest.mark.parametrize(
    ("bounds", "kept"),
    [
        ((0.1, 0.9), [True, True]),
        ((0.5, 0.9), [True, False]),
        ((0.0, 0.5), [False, True]),
        ((0.4, 0.6), [False, False]),
        ((1 / 3, 2 / 3), [True, True]),
    ],
)
def test_groups_outside_the_rates_are_left_out(bounds: tuple[float, float], kept: list[bool]) -> None:
    """Two of three solved, then one of three; whatever the outcome is judged by."""
    for outcome in ("success", "return"):
        found = group_relative(make_batch(), config_of(outcome=outcome, keep_rates=bounds))
        assert found.keep.any(0).tolist() == [kept[0]] * 3 + [kept[1]] * 3
        assert (found.keep == found.keep[0]).all()


def test_rates_do_not_bring_back_groups_with_equal_outcomes() -> None:
    batch = make_batch()
    equal = replace(batch, reward=torch.zeros(T, B))
    assert not group_relative(equal, config_of(keep_rates=(0.0, 1.0))).keep.any()


def test_a_rollout_of_decisions_has_no_groups() -> None:
    with pytest.raises(ValueError, match="need whole episodes: a workflow with rollout='episodes'"):
        group_relative(make_batch(group=None), config_of())


# --- what a workflow declares


def grpo(images: bool = False, episodes_per_env: int = 1, **advantage: Any) -> Config:
    policy = {"reads": ["proprio", "images"]} if images else {}
    return parse_config(
        {
            "workflow": "grpo",
            "env": {"num_envs": 12, "cameras": int(images)},
            "policy": {**policy, "chunk": 4},
            "rollout": {"episode_group": 3, "episodes_per_env": episodes_per_env},
            "advantage": advantage,
            "optim": {"epochs": 1, "minibatch": 0},
        },
        "test",
    )


def test_the_learner_begins_early_only_where_its_update_is_a_sum_over_parts() -> None:
    assert RunSpec.of(grpo()).groups_suffice and RunSpec.of(grpo()).streams
    assert not RunSpec.of(grpo(scale="batch")).groups_suffice and not RunSpec.of(grpo(scale="batch")).streams
    for change in ({"epochs": 2, "minibatch": 0}, {"epochs": 1, "minibatch": 64}):
        other = grpo().model_copy(update={"optim": Config().optim.model_copy(update=change)})
        assert RunSpec.of(other).groups_suffice and not RunSpec.of(other).streams
    ppo = parse_config({"optim": {"epochs": 1, "minibatch": 0}}, "test")
    assert not RunSpec.of(ppo).groups_suffice and not RunSpec.of(ppo).streams


def test_a_workflow_has_the_configurations_sizes() -> None:
    flow = workflow_of(RunSpec.of(grpo(episodes_per_env=2)), max_episode_steps=[50])
    assert flow.items == 24 and flow.episodes_per_env == 2
    (loop,) = flow.loops
    assert loop.steps == 13 and loop.components == ("physics", "policy")
    last = next(edge for edge in flow.edges if edge.target == "learner")
    assert (last.flow, last.unit) == ("micro_batch", 3)
    assert {(edge.source, edge.target) for edge in flow.edges} == {("physics", "policy"), ("policy", "learner")}
    drawn = workflow_of(RunSpec.of(grpo(images=True)), max_episode_steps=[50])
    assert drawn.names == ("physics", "render", "policy", "learner")
    assert {edge.source for edge in drawn.edges} == {"physics", "render", "policy"}
    late = workflow_of(RunSpec.of(grpo(scale="batch")), max_episode_steps=[50])
    assert next(edge for edge in late.edges if edge.target == "learner").flow == "barrier"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("grop", "no workflow 'grop'; did you mean grpo.*package.module:NAME"),
        ("no.such.module:PPO", "no.such.module:PPO cannot be imported on .*: there is no module no in"),
        (
            "embodied.workflows:PPQ",
            "embodied.workflows:PPQ: the module embodied.workflows .* has no PPQ; did you mean PPO",
        ),
        ("embodied.workflows.recipes:POLICY", "recipes:POLICY is a WorkflowComponent, not an embodied"),
    ],
)
def test_a_workflow_that_is_not_there_is_named(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe_of(parse_config({"workflow": name}, "test"))


# --- the page


def block(language: str, beginning: str) -> str:
    """The page's code block of that language whose first line begins so."""
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if text.startswith(beginning)]
    assert len(found) == 1, f"{len(found)} blocks begin with {beginning!r}"
    return found[0]


def written(folder: Path) -> Path:
    """The page's example as files; the path of its configuration."""
    (folder / "my_package").mkdir()
    (folder / "my_package" / "my_module.py").write_text(block("python", "# my_package/my_module.py"))
    path = folder / "my_reinforce.yaml"
    path.write_text(block("yaml", "# my_reinforce.yaml"))
    return path


def test_the_page_shows_ppo_as_it_is() -> None:
    names = dict(vars(workflows))
    exec(block("python", "PPO = "), names)
    assert names["PPO"] == PPO
    same = replace(GRPO, name="ppo", edges=PPO.edges, rollout="decisions", estimator="gae", critic=True)
    assert same == PPO, "GRPO differs in more places than the page says"
    assert GRPO.edges[:-1] == PPO.edges[:-1]


def test_the_pages_own_workflow_is_what_it_says_and_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(str(written(tmp_path)))
    monkeypatch.syspath_prepend(str(tmp_path))
    changes: dict[str, Any] = {"iterations": 15, "runtime": {"mode": "inline"}}
    config = parse_config({**config.model_dump(), **changes, "seed": 1}, "test")
    assert (
        recipe_of(config).name == "my_reinforce"
        and not RunSpec.of(config).groups_suffice
        and not RunSpec.of(config).streams
    )

    reinforce = importlib.import_module("my_package.my_module").reinforce
    batch = make_batch()
    found = reinforce(batch, config_of())
    returns = [sum(batch.reward[:n, b].tolist()) for b, n in enumerate(LENGTHS)]
    gains = [returns[b] - np.mean(returns[b // 3 * 3 : b // 3 * 3 + 3]) for b in range(B)]
    rows = np.repeat(gains, LENGTHS)
    for b, n in enumerate(LENGTHS):
        expected = (gains[b] - rows.mean()) / rows.std(ddof=1)
        assert found.advantage[:n, b].tolist() == pytest.approx([expected] * n, abs=1e-5)
    assert torch.equal(found.keep, batch.mask)

    prepare_run(config, tmp_path / "run", resume=False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), tmp_path / "run", session, None)
    history = read(tmp_path / "run")
    before, after = (np.mean([row["env/return"] for row in part]) for part in (history[:3], history[-3:]))
    assert before < 0.3 and after > before + 0.3, f"mean return {before:.2f}, then {after:.2f}"


def test_the_pages_own_component_charges_for_env_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_package").mkdir()
    (tmp_path / "my_package" / "step_cost.py").write_text(block("python", "# my_package/step_cost.py"))
    monkeypatch.syspath_prepend(str(tmp_path))
    settings: dict[str, Any] = {
        "iterations": 1,
        "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
        "policy": {"chunk": 2, "options": {"widths": [16]}},
        "rollout": {"decisions": 8},
        "optim": {"epochs": 1, "minibatch": 0},
        "runtime": {"mode": "inline"},
    }
    rows = {}
    for name in ("ppo", "my_package.step_cost:PPO_STEP_COST"):
        config = parse_config({**settings, "workflow": name}, "test")
        folder = tmp_path / recipe_of(config).name
        prepare_run(config, folder, resume=False)
        with open_session(config) as session:
            training.train(RunSpec.of(config), folder, session, None)
        (rows[recipe_of(config).name],) = read(folder)
    plain, charged = rows["ppo"], rows["ppo_step_cost"]
    assert charged["time/step_cost_s"] >= 0 and "time/step_cost_s" not in plain
    assert charged["env_steps"] == plain["env_steps"], "the rollout is the same"
    assert charged["learner/value_loss"] != plain["learner/value_loss"], "the critic learns other returns"

    worker = importlib.import_module("my_package.step_cost").StepCost()
    batch = make_batch()
    assert torch.equal(worker.work(batch).reward, batch.reward - 0.01 * batch.executed)


@pytest.mark.slow
def test_the_pages_own_workflow_runs_by_the_pages_own_command(tmp_path: Path) -> None:
    """Every process of a run on Ray finds the module."""
    written(tmp_path)
    command = block("bash", "PYTHONPATH=").strip()
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        f"{command} --iterations 2 --runs-dir {tmp_path / 'runs'} --name mine --eval.episodes 2 --eval.videos 0",
        shell=True, cwd=tmp_path, env={**os.environ, "PATH": path}, check=True, timeout=250,
    )  # fmt: skip
    assert [row["env/episodes"] for row in read(tmp_path / "runs" / "mine")] == [64, 64]
