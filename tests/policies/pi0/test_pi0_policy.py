"""pi0 and pi0.5 as policies: the laws of all, and what is theirs alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import policies
from policies import Inputs, Policy, PolicyError, PolicySpec, load, save
from policies.checkpoint import load_into
from policies.pi0 import sizes
from policies.pi0.config import own_sizes
from policies.pi0.files import load_network, save_directory
from tests.policies import conformance
from tests.policies.pi0.cases import GOLDEN, NO_STATE, SPEC, inputs_of, make
from tests.variants import often

TURNED, DELTA = {"kind": "turn_images"}, {"kind": "delta_actions", "dims": 6}
CASES: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "pi0": ("pi0", SPEC, {}),
    "pi0, four of six actions": ("pi0", replace(SPEC, chunk=4), {}),
    "pi0, every weight, less noise at the start": ("pi0", SPEC, {"train": "all", "start_noise": 0.3}),
    "pi0, differences to the state": ("pi0", SPEC, {"transforms": [TURNED, DELTA]}),
    "pi0, one of all that are drawn": ("pi0", SPEC, {"scored": "any"}),
    "pi0, every step, critic on the suffix": ("pi0", SPEC, {"scored": "all", "critic": "suffix"}),
    "pi0, flow-noise, four of six actions": ("pi0", replace(SPEC, chunk=4), {"scored": "learned", "critic": "suffix"}),
    "pi0.5, every weight, also by the critic": ("pi05", NO_STATE, {"train": "all", "critic_trains_network": True}),
    "pi0, adapters": ("pi0", SPEC, {"lora_rank": 2, "lora_parts": ["vlm", "expert", "vision"]}),
    "pi0.5, adapters on the expert": ("pi05", NO_STATE, {"lora_rank": 2, "lora_parts": ["expert"]}),
    "pi0.5, no state": ("pi05", NO_STATE, {"resize": "interpolate"}),
    "pi0.5, state in the prompt, every weight": ("pi05", SPEC, {"state_in_prompt": True, "train": "all"}),
}


def policy_of(case: str) -> tuple[Policy, Inputs]:
    family, spec, options = CASES[case]
    policy = make(family, spec, **options)
    conformance.perturb(policy, 0.02, seed=6)
    return policy, inputs_of(spec, 6, seed=7)


LEROBOT = str(GOLDEN / "pi05" / "checkpoint_lerobot")
DEVICE, DENSITY = conformance.law_all_is_computed_on_the_policys_device, "law_log_prob_is_the_density_that_act_samples"
NOT_FOR = {case for case in CASES if "state in the prompt" in case}
"""Of the law of devices: a state becomes words on the host."""
OFTEN = ("pi0", "pi0, flow-noise, four of six actions", "pi0.5, every weight, also by the critic", "pi0, adapters")
"""Between them all ways of drawing, scoring and training but one."""
MODE = conformance.law_imitation_brings_the_mode_to_the_demonstrations
OBEYS = [
    # The density is counted over many samples: a minute for each policy.
    pytest.param(
        case,
        law,
        id=f"{case}-{law.__name__}",
        marks=[pytest.mark.slow]
        * (law.__name__ == DENSITY or case not in (OFTEN if law is not DEVICE else ("pi0", OFTEN[2]))),
    )
    for case in CASES
    for law in conformance.LAWS
    if law is not DEVICE or case not in NOT_FOR
]


def silent(policy: Any) -> list[str]:
    """Parameters without a gradient: those that are frozen, and those that no output of `evaluate` depends on. Of the
    last layer only keys and values reach the expert; the summary, through which the rest is seen, has no gradient
    unless the critic trains the network."""
    if policy.critic_trains_network:
        return []
    last = f"network.mixture.vlm.layers.{policy.sizes.vlm.depth - 1}."
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.", "post_attention_layernorm")
    names = [name for name, _ in policy.named_parameters()]
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    idle = [n for n in names if n.startswith(tuple(last + part for part in parts)) or ".vlm.norm." in n]
    return sorted(frozen.union(idle))


@pytest.mark.parametrize(("case", "law"), OBEYS)
def test_policy_obeys(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is conformance.law_gradients_reach_every_parameter:
        law(policy, inputs, silent(policy))
    else:
        law(policy, inputs)


# Hundreds of steps, once for all: sampler and imitation are one code for every case.
IMITATED = [(case, law) for case in OFTEN[:3] for law in conformance.IMITATION_LAWS if law is not MODE or case == "pi0"]


@pytest.mark.parametrize(
    ("case", "law"), often(IMITATED, [(case, law) for case in CASES for law in conformance.IMITATION_LAWS])
)
def test_policy_imitates(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is MODE:
        law(policy, inputs, steps=400, lr=1e-2, tolerance=0.3 if "adapters" in case else 0.2)
    else:
        law(policy, inputs)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_the_mode_is_what_openpi_samples_from_no_noise(family: str) -> None:
    """Preprocessing, units and integration together, by the network's own parts."""
    spec = SPEC if family == "pi0" else NO_STATE
    policy, inputs = make(family, spec, steps=10), inputs_of(spec, 3, seed=2)
    with torch.no_grad():
        seen = policy._observation(inputs)
        prefix = policy.network.prefix(seen)
        x = policy.network.sample(prefix, seen.state, torch.zeros(3, 6, 8), 10)
    expected = policy.units.action.unnormalise(x[..., :7]).float()
    assert (policy.act(inputs, None).chunk - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_camera_that_is_left_out_is_one_that_is_masked(family: str) -> None:
    spec = SPEC if family == "pi0" else NO_STATE
    policy, inputs = make(family, spec), inputs_of(spec, 3, seed=2)
    x, t = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1.0, 0.6, 0.1])
    with torch.no_grad():
        two = policy._observation(inputs)
        assert two.pixels.shape[1] == 2
        absent = torch.full_like(two.pixels[:, :1], -1.0)
        three = replace(
            two,
            pixels=torch.cat([two.pixels, absent], 1),
            present=torch.tensor([[True, True, False]]).expand(3, -1),
        )
        left_out, masked = (
            policy.network.velocity(policy.network.prefix(seen), two.state, x, t) for seen in (two, three)
        )
    assert (left_out - masked).abs().max() < 1e-5


def test_what_is_precomputed_changes_nothing_and_spares_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, inputs = policy_of("pi0")
    action = policy.act(inputs, conformance.random_noise(policy, 6, 1))
    plain = policy.evaluate(inputs, action.trace)
    known = {**action.trace, **policy.precompute(inputs)}

    def forbidden(*_: object) -> None:
        raise AssertionError("the prefix is computed again")

    monkeypatch.setattr(policy.network, "prefix", forbidden)
    spared = policy.evaluate(inputs, known)
    for name in ("log_prob", "value"):
        assert torch.equal(getattr(plain, name), getattr(spared, name))
    whole, _ = policy_of("pi0, every weight, less noise at the start")
    assert whole.precompute(inputs) == {}


def test_which_weights_are_trained() -> None:
    expert = {n for n, p in make("pi05", NO_STATE).network.named_parameters() if p.requires_grad}
    assert expert and all(n.startswith(("mixture.expert.", "action_", "time_mlp")) for n in expert)
    assert all(p.requires_grad for p in make("pi05", NO_STATE, train="all").network.parameters())


def test_every_step_is_drawn_for_some_row_and_scored_as_it_was_drawn() -> None:
    policy = make("pi0")
    inputs = inputs_of(SPEC, 40, seed=4)
    action = policy.act(inputs, conformance.random_noise(policy, 40, 3))
    steps = action.trace["step"]
    assert set(steps.flatten().tolist()) == {0, 1, 2}
    found = policy.evaluate(inputs, action.trace).log_prob
    assert (found - action.log_prob).abs().max() < 1e-3 and (found - action.log_prob).abs().mean() < 1e-5


def test_16_bits_compute_near_what_32_do() -> None:
    inputs = inputs_of(SPEC, 4, seed=3)
    whole, half = make("pi0"), make("pi0", dtype="bfloat16")
    kept = {name for name, p in half.network.named_parameters() if p.dtype == torch.float32}
    assert all(".self_attn." not in name and ".mlp." not in name for name in kept)
    for part in ("action_in_proj.weight", "vision.embeddings.position_embedding.weight", "mixture.expert.norm.weight"):
        assert part in kept, "openpi keeps it in 32 bits"
    assert any("post_attention_layernorm" in name for name in kept) and "projector.weight" not in kept
    noise = conformance.random_noise(whole, 4, 1)
    taken, rounded = whole.act(inputs, noise), half.act(inputs, noise)
    assert rounded.chunk.dtype == torch.float32
    near = (taken.chunk - rounded.chunk).abs().mean()
    assert 0 < near < 0.05 * taken.chunk.std()
    again = half.evaluate(inputs, {**rounded.trace, **half.precompute(inputs)})
    assert (again.log_prob - rounded.log_prob).exp().sub(1).abs().mean() < half.ratio_tolerance
    counted = torch.ones(4, 6, dtype=torch.bool)
    losses = [float(p.imitate(inputs, taken.chunk, counted, noise).mean().detach()) for p in (whole, half)]
    assert abs(losses[0] - losses[1]) < 0.05 * losses[0]


def test_actions_that_fill_up_are_the_mean_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind an episode's end is seen by the actions that are learned: its place is the units' centre."""
    policy, inputs = make("pi0"), inputs_of(SPEC, 2, seed=3)
    assert bool((policy.units.action.centre != 0).all())
    counted = torch.tensor([[True] * 4 + [False] * 2] * 2)
    actions = torch.zeros(2, 6, 7)
    noise = conformance.random_noise(policy, 2, 1)
    actions[:, 4:] = policy.units.action.centre
    read = []
    velocity = policy.network.joint_velocity

    def seen(observation: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        read.append(x)
        return velocity(observation, x, t)

    monkeypatch.setattr(policy.network, "joint_velocity", seen)
    policy.imitate(inputs, actions, torch.ones_like(counted), noise)
    actions[:, 4:] = torch.nan
    assert policy.imitate(inputs, actions, counted, noise).isfinite().all()
    assert (read[0] - read[1]).abs().max() < 1e-6


def test_nothing_is_precomputed_where_that_is_said() -> None:
    policy, inputs = make("pi0", cache_prefix=False), inputs_of(SPEC, 2, seed=3)
    assert policy.precompute(inputs) == {}
    action = policy.act(inputs, conformance.random_noise(policy, 2, 1))
    policy.evaluate(inputs, action.trace).log_prob.sum().backward()
    assert all(p.grad is None for p in policy.network.mixture.vlm.parameters())


@pytest.mark.parametrize("scored", ["one", "all", "learned"])
def test_every_scored_step_is_scored_as_it_was_drawn(scored: str) -> None:
    """With what is precomputed too; the mean over steps is the sum by their number and one more."""
    policy, inputs = make("pi0", scored=scored), inputs_of(SPEC, 5, seed=4)
    noise = conformance.random_noise(policy, 5, 3)
    action = policy.act(inputs, noise)
    assert action.trace["x"].shape == (5, 1 if scored == "one" else 3, 6 * 8)
    found = policy.evaluate(inputs, {**action.trace, **policy.precompute(inputs)})
    assert (found.log_prob - action.log_prob).exp().sub(1).abs().mean() < 1e-4
    assert (found.entropy != 0).all() == (scored == "learned")
    mean = make("pi0", scored=scored, step_reduction="mean").act(inputs, noise)
    divisor = 1 if scored == "one" else 4
    assert (divisor * mean.log_prob - action.log_prob).abs().max() < 1e-4
    assert torch.equal(mean.chunk, action.chunk)


def test_noise_at_the_start_is_acted_with_and_not_imitated() -> None:
    whole, less = (make("pi0", start_noise=start) for start in (1.0, 0.25))
    inputs, noise = inputs_of(SPEC, 4, seed=3), conformance.random_noise(whole, 4, 1)
    actions, counted = torch.zeros(4, 6, 7), torch.ones(4, 6, dtype=torch.bool)
    assert torch.equal(*(policy.imitate(inputs, actions, counted, noise) for policy in (whole, less)))
    greedy = whole.act(inputs, None).chunk
    far, near = (float((policy.act(inputs, noise).chunk - greedy).abs().mean()) for policy in (whole, less))
    assert near < 0.6 * far


def test_the_value_is_the_same_whatever_was_drawn() -> None:
    policy, inputs = make("pi0", critic="suffix", scored="learned"), inputs_of(SPEC, 4, seed=4)
    values = [policy.act(inputs, conformance.random_noise(policy, 4, seed)).value for seed in (1, 2)]
    action = policy.act(inputs, conformance.random_noise(policy, 4, 3))
    values += [policy.value(inputs), policy.evaluate(inputs, action.trace).value]
    assert all((value - values[0]).abs().max() < 1e-5 for value in values)
    conformance.perturb(policy, 0.1, seed=2)
    assert (policy.value(inputs) - values[0]).abs().min() > 1e-4


def test_a_network_for_the_noise_is_saved_and_may_be_new(tmp_path: Path) -> None:
    """Supervised learning knows nothing of it."""
    taught, learned = make("pi0"), make("pi0", scored="learned")
    conformance.perturb(learned, 0.05, seed=2)
    save(learned, tmp_path / "learned")
    again: Any = load(tmp_path / "learned")
    for name, tensor in learned.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    before = {name: tensor.clone() for name, tensor in learned.noise_net.state_dict().items()}
    save(taught, tmp_path / "taught")
    load_into(learned, tmp_path / "taught")
    assert all(torch.equal(learned.noise_net.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(learned.network.action_in_proj.weight, taught.network.action_in_proj.weight)
    load_into(taught, tmp_path / "learned")


@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint_lerobot"])
def test_an_adapter_is_all_that_is_saved_and_is_merged_into_what_is_exported(
    family: str, layout: str, tmp_path: Path
) -> None:
    spec = SPEC if family == "pi0" else NO_STATE
    options = {"checkpoint": str(GOLDEN / family / layout), "prompt": "openpi"}
    base, policy = make(family, spec, **options), make(family, spec, lora_rank=2, lora_alpha=4.0, **options)
    inputs = inputs_of(spec, 3, seed=1)
    assert policy.has_new_adapter and torch.equal(base.act(inputs, None).chunk, policy.act(inputs, None).chunk)
    conformance.perturb(policy, 0.05, seed=1)
    chunk = policy.act(inputs, None).chunk
    assert not policy.has_new_adapter and (chunk - base.act(inputs, None).chunk).abs().max() > 1e-3
    with policy.without_adapter():
        assert torch.equal(base.act(inputs, None).chunk, policy.act(inputs, None).chunk)
    save(policy, tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved" / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < names and "model.safetensors" not in names
    stored = load_file(tmp_path / "saved" / "policy" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in stored}
    config = json.loads((tmp_path / "saved" / "policy" / "adapter_config.json").read_text())
    assert modules and all(re.fullmatch(config["target_modules"], module) for module in modules)
    assert modules < {name.removesuffix(".weight") for name in base.network.checkpoint_state()}
    assert torch.equal(load(tmp_path / "saved").act(inputs, None).chunk, chunk)
    policy.export(tmp_path / "exported")
    merged = make(family, spec, **{**options, "checkpoint": str(tmp_path / "exported")})
    assert (merged.act(inputs, None).chunk - chunk).abs().max() < 1e-4
    conformance.perturb(base, 0.05, seed=2)
    base.export(tmp_path / "other")
    with pytest.raises(PolicyError, match="an adapter of another base"):
        load_into(
            make(family, spec, lora_rank=2, lora_alpha=4.0, **{**options, "checkpoint": str(tmp_path / "other")}),
            tmp_path / "saved",
        )


def test_what_no_weight_depends_on_may_differ(tmp_path: Path) -> None:
    """Supervised learning takes whole chunks; reinforcement executes fewer actions of other integrations."""
    save(make("pi0"), tmp_path / "saved")
    other = make("pi0", replace(SPEC, chunk=3), steps=5, noise_level=0.3, train="all")
    conformance.perturb(other, 0.1, seed=1)
    load_into(other, tmp_path / "saved")
    same = make("pi0", replace(SPEC, chunk=3), steps=5)
    assert torch.equal(*(p.act(inputs_of(SPEC, 2, seed=1), None).chunk for p in (other, same)))
    with pytest.raises(PolicyError, match="architecture.transforms"):
        load_into(make("pi0", transforms=[TURNED]), tmp_path / "saved")


def test_a_policy_that_an_earlier_version_saved_converts_as_it_did(tmp_path: Path) -> None:
    policy, inputs = make("pi0", transforms=[TURNED, DELTA]), inputs_of(SPEC, 2, seed=1)
    save(policy, tmp_path / "saved")
    path = tmp_path / "saved" / "policy" / "config.json"
    config = json.loads(path.read_text())
    del config["architecture"]["transforms"]
    config["architecture"] |= {"rotate_images": True, "delta_dims": 6}
    path.write_text(json.dumps(config))
    assert torch.equal(load(tmp_path / "saved").act(inputs, None).chunk, policy.act(inputs, None).chunk)
    load_into(policy, tmp_path / "saved")
    with pytest.raises(PolicyError, match="architecture.transforms"):
        load_into(make("pi0"), tmp_path / "saved")


def test_actions_are_differences_to_the_state_where_it_is_said() -> None:
    plain, delta = make("pi0"), make("pi0", transforms=[DELTA])
    inputs = inputs_of(SPEC, 3, seed=5)
    assert inputs.proprio is not None
    moved = delta.act(inputs, None).chunk - plain.act(inputs, None).chunk
    assert (moved[..., :6] - inputs.proprio[:, None, :6]).abs().max() < 1e-6 and not moved[..., 6].any()


def test_units_of_demonstrations_are_adopted_and_saved(tmp_path: Path) -> None:
    policy = make("pi0", asset="demonstrations")
    g = torch.Generator().manual_seed(1)
    actions, proprio = 3 + 2 * torch.randn(500, 7, generator=g), torch.randn(500, 7, generator=g)
    proprio[:, 6] = 4.0
    policy.adopt_units(actions, proprio)
    normalised = policy.units.action.normalise(actions)
    assert normalised.mean().abs() < 1e-9 and (normalised.std(correction=0) - 1).abs() < 1e-3
    assert not policy.units.state.normalise(proprio)[:, 6].any(), "what never changes became noise"
    blind = make("pi05", NO_STATE, asset="demonstrations")
    blind.adopt_units(actions, proprio)
    assert torch.equal(blind.units.action.scale, policy.units.action.scale), "it reads no proprioception"
    save(policy, tmp_path / "saved")
    again: Any = load(tmp_path / "saved")
    assert torch.equal(again.units.action.scale, policy.units.action.scale)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint_lerobot"])
def test_units_of_demonstrations_are_exported(family: str, layout: str, tmp_path: Path) -> None:
    """In whichever mode the checkpoint has statistics."""
    spec = SPEC if family == "pi0" else NO_STATE
    options = {"checkpoint": str(GOLDEN / family / layout), "prompt": "openpi"}
    policy = make(family, spec, asset="demonstrations", **options)
    g = torch.Generator().manual_seed(1)
    policy.adopt_units(3 + 2 * torch.randn(500, 7, generator=g), torch.randn(500, 7, generator=g))
    policy.export(tmp_path / "exported")
    again = make(family, spec, **{**options, "checkpoint": str(tmp_path / "exported")})
    for name, tensor in policy.units.state_dict().items():
        torch.testing.assert_close(again.units.get_buffer(name), tensor, rtol=0, atol=1e-12)
    inputs = inputs_of(spec, 2, seed=1)
    assert (policy.act(inputs, None).chunk - again.act(inputs, None).chunk).abs().max() < 1e-5


@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint_lerobot"])
@pytest.mark.parametrize("horizon", [3, 9])
def test_another_horizon_may_be_learned_with_the_same_weights(layout: str, horizon: int, tmp_path: Path) -> None:
    """Fewer or more actions than the checkpoint predicts: all are learned, the first are executed, and what is saved
    and exported says how many."""
    options = {"checkpoint": str(GOLDEN / "pi0" / layout), "prompt": "openpi", "train": "all"}
    spec = replace(SPEC, chunk=3, horizon=horizon)
    policy, inputs = make("pi0", spec, **options), inputs_of(SPEC, 2, seed=1)
    assert (
        policy.spec.predicted == horizon
        and policy.network.state_dict().keys() == make("pi0").network.state_dict().keys()
    )
    noise = conformance.random_noise(policy, 2, 1)
    action = policy.act(inputs, noise)
    assert action.chunk.shape == (2, 3, 7)
    assert (policy.evaluate(inputs, action.trace).log_prob - action.log_prob).abs().max() < 1e-4
    counted = torch.ones(2, horizon, dtype=torch.bool)
    losses = [policy.imitate(inputs, wanted, counted, noise) for wanted in _but_for_the_last(horizon)]
    assert (losses[0] - losses[1]).abs().min() > 1e-3, "the last of the predicted actions is not learned"
    save(policy, tmp_path / "saved")
    again = load(tmp_path / "saved")
    policy.export(tmp_path / "exported")
    exported = make("pi0", replace(spec, horizon=0), **options | {"checkpoint": str(tmp_path / "exported")})
    for other in (again, exported):
        assert other.spec.predicted == horizon
        assert torch.equal(other.act(inputs, None).chunk, policy.act(inputs, None).chunk)


def _but_for_the_last(horizon: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Demonstrated chunks that differ in their last action."""
    first = torch.zeros(2, horizon, 7)
    second = first.clone()
    second[:, -1] = 3.0
    return first, second


@pytest.mark.parametrize("family", ["pi0", "pi05"])
@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint_lerobot"])
def test_a_saved_policy_needs_nothing_of_what_it_began_with(family: str, layout: str, tmp_path: Path) -> None:
    spec = SPEC if family == "pi0" else NO_STATE
    shutil.copytree(GOLDEN / family / layout, tmp_path / "base")
    policy = make(family, spec, checkpoint=str(tmp_path / "base"), prompt="openpi")
    conformance.perturb(policy, 0.02, seed=3)
    save(policy, tmp_path / "first")
    shutil.rmtree(tmp_path / "base")
    with pytest.raises(PolicyError, match="is gone, from which tokenizer and statistics"):
        save(policy, tmp_path / "second")
    again = load(tmp_path / "first")
    save(again, tmp_path / "second")
    save(load(tmp_path / "second"), tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    last = load(tmp_path / "second")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(last.state_dict()[name], tensor), name
    inputs, noise = inputs_of(spec, 2, seed=1), conformance.random_noise(policy, 2, 1)
    assert torch.equal(last.act(inputs, noise).chunk, policy.act(inputs, noise).chunk)
    last.export(tmp_path / "exported")
    config, first = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "exported", GOLDEN / family / layout)
    )
    assert config == first, "entries of this project are in what other programs read"


@pytest.mark.parametrize("name", ["pi0-tiny", "pi05-tiny"])
def test_random_weights_are_those_of_their_seed(name: str, tmp_path: Path) -> None:
    folders = [sizes.write_random(tmp_path / str(i), name, i // 2) for i in range(3)]
    states = [load_network(folder).state_dict() for folder in folders]
    same, other = (all(torch.equal(a[n], b[n]) for n in a) for a, b in (states[:2], states[1:]))
    assert same and not other
    spec = PolicySpec(3, 4, cameras=("front",), image_size=28, proprio_dim=5)
    policy = policies.build("pi0", spec, seed=1, checkpoint=str(folders[0]), steps=2)
    inputs = inputs_of(spec, 2, seed=1)
    assert policy.act(inputs, None).chunk.isfinite().all()
    save(policy, tmp_path / "saved")
    again = load(tmp_path / "saved")
    assert torch.equal(again.act(inputs, None).chunk, policy.act(inputs, None).chunk)


def test_a_network_of_published_size_says_no_sizes(tmp_path: Path) -> None:
    """What a policy was built with is not what its network's sizes are."""
    policy = make("pi0")
    config = {"action_dim": 8, "action_horizon": 6, "kind": "pi0", "spec": {}, "architecture": {"checkpoint": "here"}}
    for ours in (False, True):
        save_directory(policy.network, policy.source, tmp_path, config, ours)
        assert json.loads((tmp_path / "config.json").read_text()) == {"action_dim": 8, "action_horizon": 6}
    assert own_sizes(config) is None and own_sizes({**config, "sizes": {"vocab_size": 3}}) == {"vocab_size": 3}


def test_units_of_demonstrations_replace_no_units(tmp_path: Path) -> None:
    """LeRobot's IDENTITY is a mode in which statistics are not read."""
    shutil.copytree(GOLDEN / "pi05" / "checkpoint_lerobot", tmp_path / "base")
    for path in (tmp_path / "base").glob("policy_*processor.json"):
        path.write_text(re.sub(r'"(STATE|ACTION)": "[A-Z_]+"', r'"\1": "IDENTITY"', path.read_text()))
    options = {"checkpoint": str(tmp_path / "base"), "prompt": "openpi"}
    policy = make("pi05", NO_STATE, asset="demonstrations", **options)
    policy.adopt_units(3 + 2 * torch.randn(50, 7, generator=torch.Generator().manual_seed(1)), None)
    policy.export(tmp_path / "exported")
    again = make("pi05", NO_STATE, **{**options, "checkpoint": str(tmp_path / "exported")})
    torch.testing.assert_close(again.units.action.scale, policy.units.action.scale, rtol=0, atol=1e-6)


def test_names_of_models_and_what_is_no_seed_are_refused(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="unknown model 'pi-0'.*pi0"):
        sizes.find("pi-0")
    folder = sizes.write_random(tmp_path, "pi0-tiny")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "random_weights": "seven"}))
    with pytest.raises(PolicyError, match="random_weights must be a seed, with pi05"):
        load_network(folder)


@pytest.mark.parametrize("layout", ["checkpoint", "checkpoint_lerobot"])
def test_an_exported_policy_is_a_checkpoint_of_its_project(layout: str, tmp_path: Path) -> None:
    source = GOLDEN / "pi05" / layout
    policy = make("pi05", NO_STATE, checkpoint=str(source), prompt="openpi")
    conformance.perturb(policy, 0.02, seed=3)
    policy.export(tmp_path / "out")
    names = {path.relative_to(source) for path in source.rglob("*")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} == names
    again = load_network(tmp_path / "out")
    assert all(torch.equal(again.state_dict()[n], t) for n, t in policy.network.state_dict().items())
    stored, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", source))
    assert stored.keys() == first.keys()


@pytest.mark.parametrize(
    ("family", "spec", "options", "message"),
    [
        (
            "pi0",
            replace(SPEC, chunk=7),
            {},
            "the checkpoint predicts 6 actions, and policy.chunk is 7: at most that, or set policy.horizon",
        ),
        ("pi0", replace(SPEC, horizon=2), {}, "chunks of 6 actions need a horizon of at least that; .* is 2"),
        ("pi0", NO_STATE, {}, "the policy reads the robot's state: add 'proprio'"),
        ("pi0", SPEC, {"state_in_prompt": True}, "the checkpoint is a pi0, which has the state beside the prompt"),
        ("pi0", replace(SPEC, action_dim=9), {}, "the checkpoint has 8 numbers for actions and states"),
        ("pi0", replace(SPEC, proprio_dim=8), {}, "statistics are of 7 numbers, proprioception has 8 here"),
        ("pi0", replace(SPEC, cameras=()), {}, "pi0 takes one to 3 cameras"),
        ("pi0", SPEC, {"steps": 0}, "needs steps >= 1"),
        ("pi0", SPEC, {"scored": "some"}, "the scored steps must be one, any, all, learned"),
        ("pi0", SPEC, {"step_reduction": "median"}, "their reduction sum, mean, got 'one', 'median'"),
        ("pi0", SPEC, {"scored": "learned", "noise_bounds": [0.2, 0.1]}, "0 < least <= most"),
        ("pi0", SPEC, {"lora_rank": 2, "lora_parts": ["language"]}, "lora_parts must be some of vlm, expert, vision"),
        ("pi0", SPEC, {"critic": "state"}, "pi0's critic must be one of prefix, suffix"),
        ("pi0", SPEC, {"transforms": [DELTA | {"dims": 8}]}, "delta_actions has dims of 1 to 7, .* got 8"),
        ("pi05", NO_STATE, {"transforms": [DELTA]}, "delta_actions has dims of 1 to 0"),
        ("pi0", SPEC, {"transforms": [DELTA], "asset": "demonstrations"}, "leave delta_actions out"),
        ("pi05", NO_STATE, {"checkpoint": LEROBOT}, "has the state in them: set state_in_prompt to true, or prompt to"),
        ("pi0", SPEC, {"resize": "nearest"}, "pi0's resize must be one of pillow, interpolate"),
        ("pi0", SPEC, {"prompt": "openvla"}, "pi0's prompt must be one of openpi, lerobot"),
        ("pi0", SPEC, {"asset": "nowhere"}, "norm_stats.json of nowhere is wanted"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, spec: PolicySpec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make(family, spec, **options)


def test_inputs_that_lack_something_are_refused() -> None:
    policy, inputs = make("pi0"), inputs_of(SPEC, 2, seed=1)
    with pytest.raises(PolicyError, match="reads the camera 'wrist', the inputs have: front"):
        policy.act(replace(inputs, frames={"front": inputs.frames["front"]}), None)
    with pytest.raises(PolicyError, match="reads an instruction for each row: got 0 for 2"):
        policy.act(replace(inputs, instruction=()), None)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name, message in ((str(tmp_path / "no"), "is not a folder here; name one"), ("", "pi0 needs a checkpoint")):
        with pytest.raises(PolicyError, match=message):
            make("pi0", checkpoint=name)
    (tmp_path / "config.json").write_text(json.dumps({"action_horizon": 6}))
    with pytest.raises(PolicyError, match="no weights in"):
        make("pi0", checkpoint=str(tmp_path))
