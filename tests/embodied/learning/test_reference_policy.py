"""The frozen reference policy: what it says of decisions, what the loss makes of it, and that it costs no copy."""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policies
from embodied.algorithms.samples import samples_of
from embodied.config.files import CONFIGS, load_config, parse_config
from embodied.config.schema import Config, LossConfig
from embodied.errors import UserError
from embodied.execution.assignment import configured
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import LearnerRole, RolloutRole
from embodied.execution.session import open_session
from embodied.learning.scorers import ReferenceWorker
from embodied.learning.update import Denominators, LossFunction, micro_batch_loss
from embodied.reporting.metrics import read
from embodied.run.folder import begun_from
from embodied.trajectories.batch import Trajectories
from embodied.workflows.context import WorkerContext, make_policy, policy_spec
from embodied.workflows.recipes import recipe_of
from embodied.workflows.run_spec import RunSpec
from policies.contract import Policy, actor_parameters
from tests.embodied.run.test_resume import assert_same_run, rewind
from tests.embodied.run.test_resume import run as train
from tests.embodied.support.checked import check

STATES: dict[str, Any] = {
    "workflow": "ppo_reference",
    "seed": 4,
    "iterations": 3,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
    "farm": {"physics_workers": 1},
    "policy": {"chunk": 2, "options": {"widths": [16], "initial_log_std": 0.0}},
    "rollout": {"decisions": 8},
    "loss": {"reference_kl": 0.1},
    "optim": {"epochs": 1, "minibatch": 0, "micro_batch": 7, "policy_lr": 1e-2},
    "runtime": {"mode": "inline", "deadline_s": 120},
}
GROUPS: dict[str, Any] = {
    "workflow": "grpo_reference",
    "rollout": {"decisions": 64, "episode_group": 2, "episodes_per_env": 2},
    "advantage": {"outcome": "return"},
}
"""`decisions` is back at its default: no rollout of episodes reads it."""
ADAPTED: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 4},
    "rollout": {"decisions": 4},
    "optim": {"minibatch": 0, "micro_batch": 3, "epochs": 1},
    "runtime": {"mode": "inline"},
}


def config_of(base: dict[str, Any] = STATES, **changes: Any) -> Config:
    """The settings with changes, section by section."""
    merged = {k: {**base.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}
    return parse_config({**base, **merged}, "test")


def adapted(**changes: Any) -> Config:
    """The shipped configuration with LoRA, with seconds of work."""
    return config_of(load_config("openvla_tiny_kl").model_dump(mode="json"), **{**ADAPTED, **changes})


@contextmanager
def begun(config: Config, folder: Path, one_process: bool = False) -> Iterator[OnPolicy]:
    """The run's workers, in this process."""
    with open_session(config) as session:
        assignment = replace(configured(RunSpec.of(config), session.cores), hosts=(0,) if one_process else ())
        with start_run(RunSpec.of(config), folder, session, assignment) as workers:
            workers.begin(None, 0)
            yield workers


def roll(workers: OnPolicy) -> Trajectories:
    """An iteration's trajectories, before anybody has worked on them."""
    workers.rollout_worker.call(RolloutRole.rollout, workers.spec.config.rollout.decisions, 60.0)
    return workers.rollout_worker.call(RolloutRole.trajectories)


def reference_beside(workers: OnPolicy, policy: Policy) -> ReferenceWorker:
    """A reference worker that is given the learner's policy."""
    config = workers.spec.config
    spec = policy_spec(config, workers.farm.infos[0])
    affinity = workers.assignment.first_of("reference")
    worker = ReferenceWorker.make(WorkerContext(RunSpec.of(config), spec, workers.run_dir, affinity, shares=True))
    worker.share(policy)
    return worker


def passed(worker: ReferenceWorker, batch: Trajectories) -> Tensor:
    """[T, B, C, A] that the worker adds."""
    assert worker.receive(batch, 0) > 0
    found = worker.trajectories().reference_log_prob
    assert found is not None
    return found


# --- what it says


def test_the_reference_of_a_whole_policy_is_what_training_began_with(tmp_path: Path) -> None:
    config = config_of()
    with begun(config, tmp_path) as workers:
        policy = workers.learner.call(LearnerRole.own_policy)
        worker = reference_beside(workers, policy)
        for number in range(2):
            workers.iterate(number)
        batch = roll(workers)
        untrained = make_policy(config, policy.spec)
        expected = untrained.evaluate(batch.inputs, batch.trace).log_prob.view_as(batch.log_prob)
        found = passed(worker, batch)
        assert (found - expected).abs().max() < 1e-5
        assert (found - batch.log_prob).abs().max() > 1e-3, "nothing was learned: nothing was tested"


def test_decisions_that_nobody_took_are_not_evaluated(tmp_path: Path) -> None:
    with begun(config_of(), tmp_path) as workers:
        batch = roll(workers)
        worker = reference_beside(workers, workers.learner.call(LearnerRole.own_policy))
        mask = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        whole = passed(worker, batch)
        before = batch.decisions.memory.column("log_prob").clone()  # type: ignore[attr-defined]
        part = passed(worker, replace(batch, mask=mask))
        assert not part[~mask].any() and whole[~mask].any()
        assert (part - whole)[mask].abs().max() < 1e-6
        assert torch.equal(batch.decisions.memory.column("log_prob"), before)  # type: ignore[attr-defined]


def test_parts_are_handed_out_in_their_order(tmp_path: Path) -> None:
    with begun(config_of(), tmp_path) as workers:
        worker = reference_beside(workers, workers.learner.call(LearnerRole.own_policy))
        batch = roll(workers)
        halves = [batch.columns(0, 2), batch.columns(2, 4)]
        for half in halves:
            worker.receive(half, 0)
        assert [worker.trajectories().log_prob is half.log_prob for half in halves] == [True, True]


# --- with LoRA


def test_the_reference_beside_an_adapter_holds_no_weights(tmp_path: Path) -> None:
    """Policy worker, reference and learner in one process: the parameters of one network are all there are."""
    gc.collect()
    before = {id(p) for p in gc.get_objects() if issubclass(type(p), nn.Parameter)}
    with begun(adapted(), tmp_path, one_process=True) as workers:
        workers.iterate(0)
        policy = workers.learner.call(LearnerRole.own_policy)
        gc.collect()
        alive = [p for p in gc.get_objects() if issubclass(type(p), nn.Parameter) and id(p) not in before]
        own = list(policy.parameters())
        assert {id(p) for p in alive} == {id(p) for p in own}
        assert len({p.untyped_storage().data_ptr() for p in alive}) <= len(own)
        assert sum(p.numel() for p in alive) == sum(p.numel() for p in own) > 10_000


@pytest.mark.slow
def test_a_new_adapter_left_out_is_the_policy_that_training_began_with(tmp_path: Path) -> None:
    config = adapted()
    with begun(config, tmp_path) as workers:
        policy = workers.learner.call(LearnerRole.own_policy)
        worker = reference_beside(workers, policy)
        batch = roll(workers)
        first = passed(worker, batch)
        began = make_policy(config, policy.spec).evaluate(batch.inputs, batch.trace).log_prob.view_as(first)
        assert (first - began).abs().max() < 1e-5
        workers.iterate(0)
        again = policy.evaluate(batch.inputs, batch.trace).log_prob.view_as(first)
        assert (again - began).abs().max() > 1e-4, "nothing was learned: nothing was tested"
        batch = roll(workers)
        expected = make_policy(config, policy.spec).evaluate(batch.inputs, batch.trace).log_prob.view_as(first)
        assert (passed(worker, batch) - expected).abs().max() < 1e-5


@pytest.mark.slow
def test_an_adapter_that_had_learned_before_is_part_of_the_reference(tmp_path: Path) -> None:
    """Left out, it would draw the policy back to where the warm start began."""
    config = adapted()
    with begun(config, tmp_path) as workers:
        policy = workers.learner.call(LearnerRole.own_policy)
        for number in range(2):
            workers.iterate(number)
        policies.save(policy, tmp_path / "warm")
    config = adapted(policy={"init": str(tmp_path / "warm")})
    with begun(config, tmp_path) as workers:
        policy = workers.learner.call(LearnerRole.own_policy)
        assert not policy.has_new_adapter
        batch = roll(workers)
        found = passed(reference_beside(workers, policy), batch)
        assert (found - batch.log_prob).abs().max() < 1e-4
        with policy.without_adapter():
            base = policy.evaluate(batch.inputs, batch.trace).log_prob.detach()
        assert (found - base.view_as(found)).abs().max() > 1e-3, "the adapter changes nothing: nothing was tested"


# --- what the loss makes of it


@pytest.mark.parametrize("unit", ["chunk", "action", "element"])
def test_the_loss_has_k3_of_every_unit_by_its_weight(unit: str, tmp_path: Path) -> None:
    """exp(ref - logp) - (ref - logp) - 1, written out unit by unit: its gradient is what the pull adds to the
    gradient, and its mean what is reported."""
    pull = 0.3
    with begun(config_of(), tmp_path) as workers:
        policy = make_policy(workers.spec.config, workers.learner.call(LearnerRole.own_policy).spec)
        batch = roll(workers)
        assert (batch.executed < 2).any(), "no chunk was cut short: actions that were not executed are not tested"
        reference = batch.log_prob + torch.randn(batch.log_prob.shape, generator=torch.Generator().manual_seed(3)) / 3
        estimate = workers.spec.recipe.estimator_function()(batch, workers.spec.config)
        weight = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(5)) + 0.5
        rows = samples_of(replace(batch, reference_log_prob=reference), replace(estimate, weight=weight))
        gradients, reported = [], 0.0
        for coefficient in (0.0, pull):
            policy.zero_grad()
            settings = LossConfig(ratio_unit=unit, reference_kl=coefficient)  # type: ignore[arg-type]
            loss, share = micro_batch_loss(policy, rows, LossFunction(settings), Denominators(10.0, len(rows)))
            loss.backward()  # type: ignore[no-untyped-call]
            gradients.append([p.grad.clone() for p in actor_parameters(policy) if p.grad is not None])
            reported = float(share.measured["reference_kl"])
        now = policy.evaluate(rows.inputs, rows.trace).log_prob
        loss, mean = torch.zeros(()), 0.0
        assert rows.reference_log_prob is not None
        for row, executed in enumerate(rows.executed.tolist()):
            logp, ref = now[row, :executed], rows.reference_log_prob[row, :executed]
            logp, ref = {
                "chunk": (logp.sum().reshape(1), ref.sum().reshape(1)),
                "action": (logp.sum(1), ref.sum(1)),
                "element": (logp.flatten(), ref.flatten()),
            }[unit]
            for mine, its in zip(logp, ref, strict=True):
                k3 = torch.exp(its - mine) - (its - mine) - 1
                loss = loss + pull * rows.weight[row] * k3 / 10.0
                mean += float(k3.detach())
        policy.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        written = [p.grad for p in actor_parameters(policy) if p.grad is not None]
        for without, with_pull, expected in zip(*gradients, written, strict=True):
            assert torch.allclose(with_pull - without, expected, rtol=1e-3, atol=1e-5)
        assert any(expected.abs().max() > 1e-2 for expected in written)
        assert reported == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize("changes", [{}, GROUPS], ids=["ppo", "grpo"])
def test_the_divergence_is_zero_at_first_and_grows(changes: dict[str, Any], tmp_path: Path) -> None:
    train(config_of(**changes), tmp_path / "run")
    rows = read(tmp_path / "run")
    divergence = [row["learner/reference_kl"] for row in rows]
    assert 0 <= divergence[0] < 1e-8 and all(later > 1e-5 and math.isfinite(later) for later in divergence[1:])
    assert all(row["time/reference_s"] > 0 for row in rows)


def test_a_stronger_pull_keeps_the_policy_nearer(tmp_path: Path) -> None:
    last = []
    for pull in (1e-6, 100.0):
        train(config_of(iterations=6, checkpoint_every=6, loss={"reference_kl": pull}), tmp_path / str(pull))
        last.append(read(tmp_path / str(pull))[-1]["learner/reference_kl"])
    assert last[1] < last[0] / 2


# --- runs


def test_a_run_that_goes_on_has_the_reference_that_it_began_with(tmp_path: Path) -> None:
    train(config_of(), tmp_path / "whole")
    rewind(tmp_path / "whole", tmp_path / "crashed", 2)
    train(config_of(), tmp_path / "crashed", resume=True)
    assert_same_run(tmp_path / "crashed", tmp_path / "whole")


@pytest.mark.slow
def test_runs_with_a_reference_are_the_same_in_processes(tmp_path: Path) -> None:
    config = config_of(**GROUPS, iterations=2)
    train(config, tmp_path / "inline")
    runtime = config.runtime.model_copy(update={"mode": "ray"})
    train(config.model_copy(update={"runtime": runtime}), tmp_path / "ray")
    assert_same_run(tmp_path / "ray", tmp_path / "inline")


# --- what is refused


@pytest.mark.parametrize(
    ("workflow", "pull", "says"),
    [
        ("ppo_reference", 0.0, "set it to the weight"),
        ("grpo", 0.01, "the workflow grpo has no reference policy, .* set workflow to ppo_reference"),
        ("ppo", 0.01, "the workflow ppo has no reference policy, .* set workflow to ppo_reference"),
    ],
)
def test_a_reference_without_a_pull_and_a_pull_without_a_reference_are_refused(
    workflow: str, pull: float, says: str
) -> None:
    with pytest.raises(UserError, match=says) as caught:
        check(config_of(workflow=workflow, loss={"reference_kl": pull}))
    assert "loss.reference_kl" in str(caught.value)


def test_a_run_whose_beginning_is_gone_does_not_go_on_with_another_reference(tmp_path: Path) -> None:
    with begun(config_of(), tmp_path) as workers:
        policy = workers.learner.call(LearnerRole.own_policy)
        policies.save(policy, tmp_path / "warm")
    config = config_of(name="run", iterations=1, policy={"init": str(tmp_path / "warm")})
    train(config, tmp_path / "run")
    assert begun_from(config, tmp_path, True).policy.init == tmp_path / "warm"
    (tmp_path / "warm").rename(tmp_path / "moved")
    with pytest.raises(UserError, match="which is gone"):
        begun_from(config, tmp_path, True)
    plain = config_of(name="run", workflow="ppo", loss={"reference_kl": 0.0})
    assert begun_from(plain, tmp_path, True).policy.init is None


@pytest.mark.parametrize("name", ["openvla_tiny_kl", "reach_grpo_kl"])
def test_the_shipped_configurations_have_a_reference(name: str) -> None:
    assert (CONFIGS / f"{name}.yaml").is_file()
    config = load_config(name)
    check(config)
    assert "reference" in {component.name for component in recipe_of(config).after_rollout}
