"""What a pi0 saves, exports and begins with: adapters, units of demonstrations, horizons, random weights."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import policies
from policies import PolicyError, PolicySpec, load, save
from policies.checkpoint import load_into
from policies.conformance import laws
from policies.pi0 import sizes
from policies.pi0.checkpoint import load_network, save_directory
from policies.pi0.config import own_sizes
from tests.policies.pi0.cases import GOLDEN, NO_STATE, SPEC, TURNED, inputs_of, make


def test_a_network_for_the_noise_is_saved_and_may_be_new(tmp_path: Path) -> None:
    """Supervised learning knows nothing of it."""
    fixed, learned = make("pi0"), make("pi0", scored="learned")
    laws.perturb(learned, 0.05, seed=2)
    save(learned, tmp_path / "learned")
    again: Any = load(tmp_path / "learned")
    for name, tensor in learned.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    before = {name: tensor.clone() for name, tensor in learned.noise_net.state_dict().items()}
    save(fixed, tmp_path / "taught")
    load_into(learned, tmp_path / "taught")
    assert all(torch.equal(learned.noise_net.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(learned.network.action_in_proj.weight, fixed.network.action_in_proj.weight)
    load_into(fixed, tmp_path / "learned")


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
    laws.perturb(policy, 0.05, seed=1)
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
    policies.export(policy, tmp_path / "exported")
    merged = make(family, spec, **{**options, "checkpoint": str(tmp_path / "exported")})
    assert (merged.act(inputs, None).chunk - chunk).abs().max() < 1e-4
    laws.perturb(base, 0.05, seed=2)
    policies.export(base, tmp_path / "other")
    with pytest.raises(PolicyError, match="an adapter of another base"):
        load_into(
            make(family, spec, lora_rank=2, lora_alpha=4.0, **{**options, "checkpoint": str(tmp_path / "other")}),
            tmp_path / "saved",
        )


def test_what_no_weight_depends_on_may_differ(tmp_path: Path) -> None:
    """Supervised learning takes whole chunks; reinforcement executes fewer actions of other integrations."""
    save(make("pi0"), tmp_path / "saved")
    other = make("pi0", replace(SPEC, chunk=3), steps=5, noise_level=0.3, train="all")
    laws.perturb(other, 0.1, seed=1)
    load_into(other, tmp_path / "saved")
    same = make("pi0", replace(SPEC, chunk=3), steps=5)
    assert torch.equal(*(p.act(inputs_of(SPEC, 2, seed=1), None).chunk for p in (other, same)))
    with pytest.raises(PolicyError, match="architecture.transforms"):
        load_into(make("pi0", transforms=[TURNED]), tmp_path / "saved")


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
    policies.export(policy, tmp_path / "exported")
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
    noise = laws.random_noise(policy, 2, 1)
    action = policy.act(inputs, noise)
    assert action.chunk.shape == (2, 3, 7)
    assert (policy.evaluate(inputs, action.trace).log_prob - action.log_prob).abs().max() < 1e-4
    counted = torch.ones(2, horizon, dtype=torch.bool)
    losses = [policy.imitate(inputs, wanted, counted, noise) for wanted in _but_for_the_last(horizon)]
    assert (losses[0] - losses[1]).abs().min() > 1e-3, "the last of the predicted actions is not learned"
    save(policy, tmp_path / "saved")
    again = load(tmp_path / "saved")
    policies.export(policy, tmp_path / "exported")
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
    laws.perturb(policy, 0.02, seed=3)
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
    inputs, noise = inputs_of(spec, 2, seed=1), laws.random_noise(policy, 2, 1)
    assert torch.equal(last.act(inputs, noise).chunk, policy.act(inputs, noise).chunk)
    policies.export(last, tmp_path / "exported")
    config, first = (
        json.loads((f / "config.json").read_text()) for f in (tmp_path / "exported", GOLDEN / family / layout)
    )
    if layout == "checkpoint_lerobot":  # what is executed and integrated is the policy's
        first |= {"n_action_steps": spec.chunk, "num_inference_steps": 3}
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
    policies.export(policy, tmp_path / "exported")
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
    laws.perturb(policy, 0.02, seed=3)
    policies.export(policy, tmp_path / "out")
    names = {path.relative_to(source) for path in source.rglob("*")}
    assert {path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*")} == names
    again = load_network(tmp_path / "out")
    assert all(torch.equal(again.state_dict()[n], t) for n, t in policy.network.state_dict().items())
    stored, first = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", source))
    assert stored.keys() == first.keys()


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    for name, message in ((str(tmp_path / "no"), "is not a folder here; name one"), ("", "pi0 needs a checkpoint")):
        with pytest.raises(PolicyError, match=message):
            make("pi0", checkpoint=name)
    (tmp_path / "config.json").write_text(json.dumps({"action_horizon": 6}))
    with pytest.raises(PolicyError, match="no weights in"):
        make("pi0", checkpoint=str(tmp_path))
