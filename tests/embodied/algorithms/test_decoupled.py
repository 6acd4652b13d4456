"""The decoupled objective: what is learned from a rollout that an older policy has acted in."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algorithms.estimators import gae, group_relative
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.iteration import start_run
from embodied.execution.roles import RolloutRole
from embodied.execution.session import Session
from embodied.learning.learner import Learner
from embodied.learning.parallel import values_of
from embodied.learning.update import OffPolicy
from embodied.rollout.rollout_summary import EpisodePart
from embodied.trajectories.batch import Trajectories
from embodied.workflows.context import make_policy
from embodied.workflows.run_spec import RunSpec
from policies.contract import PolicySpec, actor_parameters
from tests.embodied.support.copied_out import copied_out
from tests.embodied.support.runs import GROUPS, STATES, assigned, inline, kept_in


def gathered(settings: dict[str, Any], session: Session, folder: Path) -> tuple[Config, Trajectories]:
    """A rollout, or an episode of every environment, of a new policy; learned from in one step over all rows."""
    optim = {**settings["optim"], "epochs": 1, "minibatch": 0, "max_grad_norm": 1e9}
    (folder / "gathered").mkdir(parents=True)
    config = kept_in(folder / "gathered", parse_config({**settings, "optim": optim}, "test"))
    with start_run(RunSpec.of(config), folder, session, inline(assigned())) as workers:
        workers.begin(None, 0)
        if settings is GROUPS:
            workers.rollout_worker.call(RolloutRole.rollout_episodes, EpisodePart(0, 4), 1, 60.0)
        else:
            workers.rollout_worker.call(RolloutRole.rollout, config.rollout.decisions, 60.0)
        return config, copied_out(workers.rollout_worker.call(RolloutRole.trajectories))


def moved_learner(config: Config, folder: Path, by: float) -> Learner:
    """The learner of a policy whose actor is not quite that which acted."""
    policy = make_policy(config, PolicySpec(action_dim=3, chunk=2, state_dim=16))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in actor_parameters(policy):
            parameter.add_(by * torch.randn(parameter.shape, generator=generator))
    return Learner(policy, RunSpec.of(config), folder)


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_a_rollout_of_an_older_policy_is_learned_from_by_the_decoupled_objective(
    settings: dict[str, Any], here: Session, tmp_path: Path
) -> None:
    """The first step's gradient is that of the mean of -A w ratio, ratios to the policy as it is, and w how much
    likelier it makes what was done than the policy that acted did, at most 2 (Hilton et al. 2022)."""
    config, batch = gathered(settings, here, tmp_path)
    learner = moved_learner(config, tmp_path, 0.1)
    with pytest.raises(OffPolicy):  # by a policy of the same version
        moved_learner(config, tmp_path, 0.1).update(batch, 0)
    learner.update(batch, 1)
    policy = moved_learner(config, tmp_path, 0.1).policy
    alive = torch.arange(2) < batch.executed.flatten()[:, None]
    new = (policy.evaluate(batch.inputs, batch.trace).log_prob * alive[..., None]).sum((1, 2))
    old = (batch.log_prob.flatten(0, 1) * alive[..., None]).sum((1, 2))
    weight = (new - old).exp().detach()
    assert weight.max() > 2 and weight.min() < 0.8, "the policies hardly differ"
    estimate = (group_relative if settings is GROUPS else gae)(batch, config)
    mask = (batch.mask & estimate.keep).flatten()
    ratio = (new - new.detach()).exp()
    loss = -(estimate.advantage.flatten() * weight.clamp(max=2) * ratio)[mask].mean()
    loss.backward()
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            found = dict(learner.policy.named_parameters())[name].grad
            torch.testing.assert_close(found, parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("normalised", [False, True])
def test_a_rollout_of_an_older_policy_is_judged_by_the_present_critic(
    normalised: bool, here: Session, tmp_path: Path
) -> None:
    """Of the decisions; final observations keep the value that the older critic gave them."""
    config, batch = gathered(STATES, here, tmp_path)
    settings = config.advantage.model_copy(update={"normalise_returns": normalised})
    config = config.model_copy(update={"advantage": settings})

    def learner() -> Learner:
        found = moved_learner(config, tmp_path, 0.0)
        with torch.no_grad():
            for parameter in found.policy.value_head.parameters():
                parameter.mul_(1.3)
        return found

    def gradient(trajectories: Trajectories) -> Tensor:
        """Of the critic, in an update of the iteration 1."""
        teacher = learner()
        teacher.update(trajectories, 1)
        head = teacher.policy.value_head
        return torch.cat([p.grad.flatten() for p in head.parameters() if p.grad is not None])

    now = learner().policy.value(batch.inputs).reshape(batch.value.shape)
    holes = torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(0)) < 0.7
    torch.testing.assert_close(values_of(learner()._parallel, replace(batch, mask=holes), 0), now * holes)
    judged = gradient(replace(batch, version=0))
    torch.testing.assert_close(judged, gradient(replace(batch, version=1, value=now)), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(judged, gradient(replace(batch, version=1)), rtol=1e-2)


@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_where_nothing_lies_between_them_it_is_the_plain_objective(
    settings: dict[str, Any], here: Session, tmp_path: Path
) -> None:
    config, batch = gathered(settings, here, tmp_path)
    plain, decoupled = (moved_learner(config, tmp_path, 0.0) for _ in range(2))
    plain.update(batch, 0)
    decoupled.update(batch, 1)
    for name, tensor in plain.policy.named_parameters():
        if tensor.grad is not None:
            other = dict(decoupled.policy.named_parameters())[name].grad
            torch.testing.assert_close(other, tensor.grad, rtol=1e-4, atol=1e-6, msg=name)
