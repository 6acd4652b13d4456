"""Large policies at a toy's size on several ranks of the learner: weights, shards, checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from embodied.config.files import parse_config
from embodied.learning.learner import Learner
from embodied.run import checkpoint
from embodied.runtime.ray.runtime import RayRuntime
from embodied.trajectories.batch import TensorDecisions, Trajectories
from policies.contract import Inputs, Policy, PolicySpec
from policies.pi0 import sizes as pi0_sizes
from tests.embodied.support.ranks_alone import Counted, alone, assert_near, connected, state_at, weights_of
from tests.variants import often


def tiny_policy(**options: Any) -> Policy:
    """OpenVLA at a toy's size."""
    spec = PolicySpec(action_dim=3, cameras=("front",), image_size=56)
    options = {"checkpoint": "assets/openvla_tiny", "unnorm_key": "demonstrations", **options}
    return policies.build("openvla", spec, seed=1, **options)


def tiny_pi0(**options: Any) -> Policy:
    spec = PolicySpec(action_dim=3, cameras=("front",), image_size=56, proprio_dim=4)
    return policies.build("pi0", spec, seed=1, **{"asset": "demonstrations", "steps": 2, **options})


def tiny_batch(policy: Policy, rows: int = 12) -> Trajectories:
    """What it would have gathered from a world of noise."""
    g = torch.Generator().manual_seed(0)
    frames = torch.randint(0, 256, (rows, 56, 56, 3), generator=g, dtype=torch.uint8)
    proprio = torch.randn(rows, policy.spec.proprio_dim, generator=g)
    inputs = Inputs(frames={"front": frames}, instruction=("reach the ball",) * rows, proprio=proprio)
    action = policy.act(inputs, torch.randn(rows, policy.noise_dim, generator=g))
    shape = (rows // 2, 2)
    none = torch.zeros(shape, dtype=torch.bool)
    return Trajectories(
        TensorDecisions(inputs, action.trace), action.log_prob.view(*shape, 1, 3), action.value.view(shape).float(),
        torch.randn(shape, generator=g), none, torch.ones(shape, dtype=torch.int64), ~none, none, none,
        torch.zeros(shape), torch.zeros(2), 0,
    )  # fmt: skip


PROJECTOR_PRECOMPUTED = {"lora_rank": 4, "lora_parts": ["language"]}
TRAINED: dict[str, dict[str, Any]] = {
    "lora": {"lora_rank": 4},
    "full": {},
    "recomputed": {},
    "lora, projector precomputed": PROJECTOR_PRECOMPUTED,
    "lora, projector precomputed, recomputed": PROJECTOR_PRECOMPUTED,
}
EVERY = [(options, sharding, (2, 4)) for options in TRAINED for sharding in ("whole", "sharded")]
ALL_AT_ONCE = ("lora, projector precomputed, recomputed", "sharded", (2,))
"""What runs always; `test_learner_ranks.py` has 4 ranks, and weights that are all learned."""


@pytest.mark.slow
@pytest.mark.parametrize(("trained", "sharding", "numbers"), often([ALL_AT_ONCE], [*EVERY, ALL_AT_ONCE]), ids=str)
def test_openvla_on_ranks(
    trained: str, sharding: str, numbers: tuple[int, ...], ray_runtime: RayRuntime, tmp_path: Path
) -> None:
    options, again = TRAINED[trained], "recomputed" in trained
    config = parse_config(
        {
            "seed": 5, "iterations": 10, "policy": {"reads": ["images", "instruction"]},
            "optim": {"epochs": 2, "minibatch": 6, "micro_batch": 2, "sharding": sharding, "recompute": again},
        }, "test",
    )  # fmt: skip
    one = alone(config, tmp_path, tiny_policy, **options)
    batch = tiny_batch(one.policy)
    for number in range(3):
        one.update(replace(batch, version=number - min(number, 1)), number)
    expected = {name: tensor.clone() for name, tensor in one.weights().items()}
    for ranks in numbers:
        with connected(ray_runtime, ranks, config, tmp_path, tiny_policy, **options) as group:
            for number in range(3):
                group.call_all(Learner.update, replace(batch, version=number - min(number, 1)), number)
            assert_near(weights_of(group), expected)
            group.call_all(Learner.save, tmp_path / str(ranks), state_at(3), {})
        other = alone(config, tmp_path, tiny_policy, **options)
        other.load(tmp_path / str(ranks) / "000003")
        assert_near(dict(other.weights()), expected)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["whole", "sharded"])
@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("pi0", {"train": "all"}),
        ("pi0", {"train": "expert", "critic": "suffix"}),
        ("pi05", {"train": "all", "state_in_prompt": True, "scored": "all"}),
        ("pi0", {"lora_rank": 2, "lora_parts": ["vlm", "expert", "vision"]}),
    ],
    ids=["all", "expert", "pi0.5, every step", "adapters"],
)
def test_pi0_on_ranks(
    family: str, options: dict[str, Any], sharding: str, ray_runtime: RayRuntime, tmp_path: Path
) -> None:
    """Prefix and suffix are passes of their own, and every step of an integration is one of the suffix's."""
    options["checkpoint"] = str(pi0_sizes.write_random(tmp_path / "tiny", f"{family}-tiny"))
    config = parse_config(
        {
            "seed": 5, "iterations": 10, "policy": {"reads": ["images", "instruction", "proprio"]},
            "optim": {"epochs": 2, "minibatch": 6, "micro_batch": 2, "sharding": sharding},
        }, "test",
    )  # fmt: skip
    one = alone(config, tmp_path, tiny_pi0, **options)
    batch = tiny_batch(one.policy)
    before = {name: tensor.clone() for name, tensor in one.weights().items()}
    for number in range(2):
        one.update(batch, number)
    expected = {name: tensor.clone() for name, tensor in one.weights().items()}
    assert any(not torch.equal(before[name], tensor) for name, tensor in expected.items())
    with connected(ray_runtime, 2, config, tmp_path, tiny_pi0, **options) as group:
        for number in range(2):
            group.call_all(Learner.update, batch, number)
        assert_near(weights_of(group), expected)
        numbers = group.call_all(Counted.local_numbers)
        assert sharding == "whole" or max(numbers) < 0.6 * one.local_numbers()
        group.call_all(Learner.save, tmp_path / "saved", state_at(2), {})
    other = alone(config, tmp_path, tiny_pi0, **options)
    other.load(tmp_path / "saved" / "000002")
    assert_near(dict(other.weights()), expected)


@pytest.mark.slow
def test_sixteen_bits_are_sharded_with_masters(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """Steps that vanish in bfloat16 add up in the masters, which a checkpoint keeps."""
    config = parse_config(
        {
            "seed": 5, "policy": {"reads": ["images", "instruction"]},
            "optim": {"epochs": 1, "minibatch": 6, "sharding": "sharded", "policy_lr": 1e-6},
        }, "test",
    )  # fmt: skip
    one = alone(config, tmp_path, tiny_policy, dtype="bfloat16")
    batch = tiny_batch(one.policy)
    with connected(ray_runtime, 2, config, tmp_path, tiny_policy, dtype="bfloat16") as group:
        group.call_all(Learner.update, batch, 0)
        weights = weights_of(group)
        assert {tensor.dtype for name, tensor in weights.items() if name.startswith("model.")} == {torch.bfloat16}
        group.call_all(Learner.save, tmp_path / "two", state_at(1), {})
    saved = checkpoint.OptimizerState.read(tmp_path / "two" / "000001").tensors
    name = "model.language_model.lm_head.weight"
    assert saved[f"master.{name}"].dtype == torch.float32
    moved = (saved[f"master.{name}"] - dict(one.policy.named_parameters())[name].float()).abs()
    assert 0 < moved.max() < 1e-5
    with connected(ray_runtime, 2, config, tmp_path, tiny_policy, dtype="bfloat16") as group:
        group.call_all(Learner.load, tmp_path / "two" / "000001")
        group.call_all(Learner.save, tmp_path / "again", state_at(1), {})
    again = checkpoint.OptimizerState.read(tmp_path / "again" / "000001").tensors
    assert again.keys() == saved.keys()
    assert all(torch.equal(again[key], tensor) for key, tensor in saved.items())
    one.load(tmp_path / "two" / "000001")  # without masters, and without complaint
