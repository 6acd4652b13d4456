"""Steps of the optimiser that both kinds of training take: decay, schedules, the average of the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policies
from embodied.commands.evaluate import subject_of
from embodied.config.schema import OptimConfig, risen
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.evaluation.provenance import lineage
from embodied.learning.optimizer import OptimizerSteps, make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.run import checkpoint
from embodied.run.folder import whole_checkpoint, with_init
from embodied.runtime.ranks import Ranks
from embodied.training.sft import imitate
from policies.contract import Policy, PolicySpec
from tests.embodied.support.expert import record_reach
from tests.embodied.training.test_imitation import STATES, config_of, info_of
from tests.embodied.training.test_imitation_ranks import VLA


def made(**options: Any) -> Policy:
    return policies.build("gaussian_mlp", PolicySpec(action_dim=2, state_dim=3), 1, widths=[8], **options)


def steps_of(policy: Policy, **settings: Any) -> tuple[OptimizerSteps, torch.optim.Adam]:
    optim = OptimConfig(max_grad_norm=1e9, **settings)
    adam = make_optimizer(policy, optim, policy_lr=0.1, value_lr=0.2, eps=1e-8)
    return OptimizerSteps(ReplicatedPolicy(policy, Ranks()), adam, optim), adam


def learn(policy: Policy, steps: OptimizerSteps, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    steps.begin()
    for parameter in policy.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=g)
    steps.norm()
    steps.take()


def parameters(policy: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in policy.named_parameters()}


def test_matrices_decay_as_adamw_has_it_and_nothing_else_does() -> None:
    """Beside torch's AdamW on the matrices, and Adam on norms and biases."""
    policy, other = made(), made()
    steps, _ = steps_of(policy, weight_decay=0.3)
    value = {id(p) for p in other.value_head.parameters()}
    reference = [
        (torch.optim.AdamW if p.ndim > 1 else torch.optim.Adam)(
            [p], lr=0.2 if id(p) in value else 0.1, weight_decay=0.3 if p.ndim > 1 else 0.0
        )
        for p in other.parameters()
    ]
    for seed in range(4):
        learn(policy, steps, seed)
        for parameter, own in zip(other.parameters(), policy.parameters(), strict=True):
            parameter.grad = own.grad
        for optimizer in reference:
            optimizer.step()
    for name, expected in parameters(other).items():
        torch.testing.assert_close(parameters(policy)[name], expected, rtol=1e-6, atol=1e-7)
    plain = made()
    steps, _ = steps_of(plain)
    for seed in range(4):
        learn(plain, steps, seed)
    changed = {name for name, p in parameters(plain).items() if not torch.allclose(p, parameters(policy)[name])}
    assert changed == {name for name, p in plain.named_parameters() if p.ndim > 1}


def test_steps_and_state_are_those_of_torch_bit_for_bit() -> None:
    """Also where the state was written and read on the way."""
    settings: dict[str, Any] = {"eps": 1e-8, "fused": True, "decoupled_weight_decay": True}
    policy, other = made(), made()
    steps, adam = steps_of(policy, weight_decay=0.3)
    groups = [{**group, "params": []} for group in adam.param_groups]
    theirs = dict(zip(policy.parameters(), other.parameters(), strict=True))
    for group, own in zip(groups, adam.param_groups, strict=True):
        group["params"] = [theirs[parameter] for parameter in own["params"]]
    reference = torch.optim.Adam(groups, **settings)
    for seed in range(4):
        learn(policy, steps, seed)
        for own, parameter in theirs.items():
            parameter.grad = None if own.grad is None else own.grad.clone()
        reference.step()
        adam.load_state_dict(adam.state_dict())
    for own, parameter in theirs.items():
        assert torch.equal(own, parameter)
        for name, value in reference.state[parameter].items():
            assert torch.equal(adam.state[own][name], value), name
    assert adam.state_dict()["param_groups"] == reference.state_dict()["param_groups"]


def test_decay_of_nothing_is_refused() -> None:
    policy = made()
    for parameter in policy.parameters():
        parameter.requires_grad_(parameter.ndim < 2)
    with pytest.raises(UserError, match=r"optim.weight_decay is 0.1, and nothing that is trained is a matrix"):
        steps_of(policy, weight_decay=0.1)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"constant": [1, 1, 1, 1], "linear": [1, 0.75, 0.5, 0.25]}),
        ({"lr_schedule": "constant"}, {"linear": [1, 1, 1, 1]}),
        ({"lr_schedule": "linear"}, {"constant": [1, 0.75, 0.5, 0.25]}),
        ({"lr_schedule": "cosine"}, {"linear": [1, 0.5 + 0.5 / 2**0.5, 0.5, 0.5 - 0.5 / 2**0.5]}),
    ],
)
def test_schedules(settings: dict[str, Any], expected: dict[str, list[float]]) -> None:
    for otherwise, shares in expected.items():
        found = [OptimConfig(**settings).fallen(step, 4, otherwise) for step in range(4)]
        assert found == pytest.approx(shares)
    assert [risen(step, 3) for step in range(5)] == [0.25, 0.5, 0.75, 1, 1]


def test_the_average_of_the_weights() -> None:
    """a <- d a + (1 - d) w after every step, from the weights before the first one on; of 16-bit weights in float32."""
    for dtype in (torch.float32, torch.bfloat16):
        policy = made().to(dtype)
        steps, adam = steps_of(policy, ema=0.75)
        expected = {name: p.float() for name, p in parameters(policy).items()}
        for seed in range(5):
            learn(policy, steps, seed) if dtype == torch.float32 else None
            if dtype != torch.float32:
                steps.begin()
                for p in policy.parameters():
                    p.grad = torch.ones_like(p)
                steps.norm()
                steps.take()
            expected = {name: a + 0.25 * (parameters(policy)[name].float() - a) for name, a in expected.items()}
        found = {name: adam.state[p]["average"] for name, p in policy.named_parameters()}
        for name, average in expected.items():
            assert found[name].dtype == torch.float32
            torch.testing.assert_close(found[name], average, rtol=1e-6, atol=1e-6)
    # What has no gradient has not moved: it is averaged from its first step on.
    policy = made()
    steps, adam = steps_of(policy, ema=0.5)
    steps.begin()
    for parameter in policy.value_head.parameters():
        parameter.grad = torch.ones_like(parameter)
    steps.norm()
    steps.take()
    assert {p for p in adam.state if "average" in adam.state[p]} == set(policy.value_head.parameters())


def test_an_average_that_begins_later_has_every_parameter_that_was_trained_before() -> None:
    """A checkpoint has the average of all parameters with moments, or of none."""
    policy = made()
    steps, adam = steps_of(policy)
    learn(policy, steps, 1)
    later = OptimizerSteps(steps._parallel, adam, OptimConfig(ema=0.5))
    later.begin()
    for parameter in policy.value_head.parameters():
        parameter.grad = torch.ones_like(parameter)
    later.norm()
    later.take()
    assert all("average" in adam.state[parameter] for parameter in policy.parameters() if adam.state.get(parameter))


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", 6, image_size=56)


@pytest.mark.parametrize("settings", [STATES, pytest.param(VLA, marks=pytest.mark.slow)], ids=["states", "lora"])
def test_a_checkpoint_has_the_average_beside_the_weights(
    settings: dict[str, Any], demos: Dataset, tmp_path: Path
) -> None:
    """It is a policy for every command that takes one; a run that goes on has the same one."""
    policy = settings["policy"]
    if "checkpoint" in policy["options"]:
        policy = {**policy, "options": {**policy["options"], "lora_rank": 4}}
    data = {**settings, "policy": policy, "optim": {"ema": 0.5, "lr_schedule": "cosine"}}
    config = config_of(data, demos, steps=4, batch=4, measure_every=2, checkpoint_every=2)
    for name in ("whole", "parts"):
        begun = None if name == "whole" else tmp_path / "whole" / "checkpoints" / "000002"
        imitate(config, info_of(config), tmp_path / name, begun)
    folders = [tmp_path / name / "checkpoints" / "000004" for name in ("whole", "parts")]
    averages, again = (policies.load(folder / "average", code=[]) for folder in folders)
    raw = policies.load(folders[0])
    state = checkpoint.OptimizerState.read(folders[0])
    trained = set(state.averages)
    assert trained == set(state.steps)
    for name, parameter in averages.named_parameters():
        assert torch.equal(parameter, dict(again.named_parameters())[name]), "bit for bit after a resume"
        same = torch.equal(parameter, dict(raw.named_parameters())[name])
        assert same == (name not in trained), name
        if name in trained:
            assert torch.equal(parameter, state.averages[name].to(parameter.dtype))
    # Commands find it by its folder, and by its name.
    run_dir = tmp_path / "whole"
    named = whole_checkpoint(run_dir, Path("average"))
    assert named is not None and named == folders[0] / "average"
    assert checkpoint.digest(named) != checkpoint.digest(folders[0])
    assert subject_of(str(run_dir), config, named, tmp_path).checkpoint == named
    begun_from = config.model_copy(update={"policy": config.policy.model_copy(update={"init": named})})
    assert with_init(begun_from, tmp_path).policy.init == named
    assert lineage(named, config.policy).starts("tabletop/reach", []) == lineage(folders[0], config.policy).starts(
        "tabletop/reach", []
    )
    plain = config_of({**data, "optim": {}}, demos, steps=6, batch=4)
    imitate(plain, info_of(plain), tmp_path / "whole", folders[0])
    with pytest.raises(UserError, match="000006 has no average of the weights: its run kept none"):
        whole_checkpoint(run_dir, Path("average"))
