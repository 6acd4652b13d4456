"""ACT as a policy: the laws, what it refuses, what it saves and exports."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import Inputs, PolicyError, PolicySpec, load, save
from policies.checkpoint import load_into
from policies.conformance import laws
from policies.registry import check, kinds_that_read, policy_kind
from tests.policies.act.cases import (
    SPEC,
    golden_checkpoint,
    make,
    new_checkpoint,
    older_checkpoint,
    variant_checkpoint,
)
from tests.variants import often

TASK = PolicySpec(action_dim=3, chunk=2, proprio_dim=4, cameras=("base", "wrist"), image_size=40)
CASES: dict[str, tuple[PolicySpec, dict[str, Any]]] = {
    "two cameras and a state": (TASK, {}),
    "no state, no VAE, norms first": (
        replace(TASK, cameras=("base",), proprio_dim=0),
        {"use_vae": False, "pre_norm": True, "n_decoder_layers": 2},
    ),
}
FIRST = "network.decoder.layers.0."
"""Layer whose tokens are zero before their places are added: all have equal values, whatever they attend to."""
IDLE = {
    "two cameras and a state": FIRST + "self_attn.in_proj_weight",
    "no state, no VAE, norms first": FIRST + "norm1.weight",
}


LONG = {
    laws.law_imitation_brings_the_mode_to_the_demonstrations: "",
    laws.law_log_prob_is_the_density_that_act_samples: "no state, no VAE, norms first",
    laws.law_all_is_computed_on_the_policys_device: "two cameras and a state",
}
"""Laws that cost seconds, and the case that the default run has of each. The loss, which imitation repeats hundreds of
times, is beside LeRobot's in test_act_golden."""


def once_where_they_are_long(of: Iterable[Any]) -> list[Any]:
    """Laws and cases."""
    every = [(law, case) for law in of for case in CASES]
    return often([(law, case) for law, case in every if LONG.get(law, case) == case], every)


def task_inputs(spec: PolicySpec, rows: int = 6) -> Inputs:
    return laws.random_inputs(spec, rows, seed=7)


def trained(folder: Path, spec: PolicySpec, entries: dict[str, Any], **options: Any) -> Any:
    """A new policy as after some training."""
    policy = make(new_checkpoint(folder, **entries), spec, **options)
    generator = torch.Generator().manual_seed(1)
    actions, proprio = torch.randn(100, spec.action_dim, generator=generator), torch.randn(100, 4, generator=generator)
    policy.adopt_units(0.5 * actions, proprio)
    laws.perturb(policy, 0.02, seed=6)
    return policy


@pytest.mark.parametrize(("law", "case"), once_where_they_are_long(laws.LAWS))
def test_laws(law: Any, case: str, tmp_path: Path) -> None:
    spec, entries = CASES[case]
    policy = trained(tmp_path / "new", spec, entries, critic_trains_network=True)
    if law is laws.law_gradients_reach_every_parameter:
        # The latent is zero when the policy acts: neither what reads it nor what finds it has a part in the scores.
        vae = {name for name, _ in policy.named_parameters() if name.startswith("network.vae_encoder")}
        _without_rounding(policy, IDLE[case])
        law(policy, task_inputs(spec), without=vae | {"network.encoder_latent_input_proj.weight", IDLE[case]})
    else:
        law(policy, task_inputs(spec))


def _without_rounding(policy: Any, name: str) -> None:
    """Let gradients of the parameter be 0 that are rounding errors."""
    policy.get_parameter(name).register_hook(lambda grad: torch.where(grad.abs() < 1e-6, 0.0, grad))


@pytest.mark.parametrize(("law", "case"), once_where_they_are_long(laws.IMITATION_LAWS))
def test_laws_of_imitation(law: Any, case: str, tmp_path: Path) -> None:
    spec, entries = CASES[case]
    law(trained(tmp_path / "new", spec, entries), task_inputs(spec))


def test_ratios_are_one_on_policy(tmp_path: Path) -> None:
    """Of decisions that were made in batches of 8 and are evaluated in batches of 24."""
    policy = trained(tmp_path / "new", TASK, {})
    inputs, noise = laws.random_inputs(TASK, 48, seed=3), laws.random_noise(policy, 48, seed=4)
    acted = [policy.act(inputs.rows(rows), noise[rows]) for rows in torch.arange(48).split(8)]
    action, log_prob = torch.cat([a.trace["action"] for a in acted]), torch.cat([a.log_prob for a in acted])
    ratios = []
    for rows in torch.arange(48).split(24):
        with torch.no_grad():
            again = policy.evaluate(inputs.rows(rows), {"action": action[rows]}).log_prob
        ratios.append((again - log_prob[rows]).sum((1, 2)).exp())
    assert (torch.cat(ratios) - 1).abs().mean() < 1e-5


# --- checkpoints


def test_kinds_that_read_it() -> None:
    assert kinds_that_read({"type": "act"}) == ["act"] and "act" not in kinds_that_read({"type": "pi0"})


@pytest.mark.parametrize("checkpoint", [golden_checkpoint, older_checkpoint], ids=["0.6", "0.3"])
def test_an_exported_policy_is_the_policy(checkpoint: Any, tmp_path: Path) -> None:
    """Whatever it was read from, in today's layout; a second export is the first."""
    policy, inputs = make(checkpoint(tmp_path / "base")), laws.random_inputs(SPEC, 3, seed=1)
    laws.perturb(policy, 0.01, seed=2)
    policies.export(policy, tmp_path / "first")
    shutil.rmtree(tmp_path / "base")
    again = make(tmp_path / "first")
    assert torch.equal(policy.act(inputs, None).chunk, again.act(inputs, None).chunk)
    policies.export(again, tmp_path / "second")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "second")]
    assert files[0] == files[1] and len(files[0]) == 6
    for name in files[0]:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    config = json.loads((tmp_path / "first/config.json").read_text())
    notes = policy_kind("act").format.chunk_notes
    assert not notes({"checkpoint": str(tmp_path / "first")}, 4, ())
    (note,) = notes({"checkpoint": str(tmp_path / "first")}, 2, ())
    assert "LeRobot executes 4 actions of a chunk (n_action_steps), and policy.chunk is 2" in note
    assert config["n_action_steps"] == 4 and not {"kind", "spec", "architecture", "backbone_width"} & config.keys()


@pytest.mark.parametrize("name", ["ranges", "quantiles", "no_vae_no_state"])
def test_statistics_of_every_mode_are_exported(name: str, tmp_path: Path) -> None:
    folder, spec = variant_checkpoint(name, tmp_path / name)
    policy = make(folder, spec)
    policies.export(policy, tmp_path / "out")
    for path in folder.glob("policy_*.safetensors"):
        first, second = load_file(path), load_file(tmp_path / "out" / path.name)
        for key, tensor in second.items():
            assert first[key].shape == tensor.shape and torch.equal(first[key], tensor), key
    for path in folder.glob("policy_*.json"):
        first, second = (json.loads((at / path.name).read_text()) for at in (folder, tmp_path / "out"))
        assert first == second, path.name


def test_units_of_demonstrations_are_adopted_saved_and_exported(tmp_path: Path) -> None:
    policy = make(golden_checkpoint(tmp_path / "golden"), asset="demonstrations")
    generator = torch.Generator().manual_seed(1)
    actions, proprio = 3 + 2 * torch.randn(500, 7, generator=generator), torch.randn(500, 8, generator=generator)
    proprio[:, 6] = 4.0
    policy.adopt_units(actions, proprio)
    normalised = policy.units.action.normalise(actions)
    assert normalised.mean().abs() < 1e-9 and (normalised.std(correction=0) - 1).abs() < 1e-3
    assert policy.normalised_by == "the rows learned from"
    save(policy, tmp_path / "saved")
    again: Any = load(tmp_path / "saved")
    assert torch.equal(again.units.action.scale, policy.units.action.scale)
    policies.export(again, tmp_path / "out")
    exported, inputs = make(tmp_path / "out"), laws.random_inputs(SPEC, 2, seed=1)
    assert (exported.act(inputs, None).chunk - policy.act(inputs, None).chunk).abs().max() < 1e-5
    assert exported.normalised_by == "the checkpoint's own"


def test_a_new_network_reads_what_the_task_gives(tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new")
    first, same = (make(folder, TASK) for _ in range(2))
    other = make(new_checkpoint(tmp_path / "other", random_weights=1), TASK)
    assert torch.equal(first.network.action_head.weight, same.network.action_head.weight)
    assert not torch.equal(first.network.action_head.weight, other.network.action_head.weight)
    assert first.config.cameras == ("observation.images.base", "observation.images.wrist")
    assert first.spec.predicted == 6 and make(folder, replace(TASK, horizon=6)).spec.predicted == 6
    assert first.normalised_by == "the rows learned from"
    save(first, tmp_path / "saved")
    assert "random_weights" not in json.loads((tmp_path / "saved/policy/config.json").read_text())
    shutil.rmtree(folder)
    again: Any = load(tmp_path / "saved")
    inputs = task_inputs(TASK)
    assert torch.equal(first.act(inputs, None).chunk, again.act(inputs, None).chunk)


def test_only_networks_that_lerobot_has_are_exported(tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match="ResNet has the width 4, and LeRobot's are of 64"):
        policies.export(make(new_checkpoint(tmp_path / "new"), TASK), tmp_path / "out")
    policies.export(make(new_checkpoint(tmp_path / "wide", backbone_width=64), TASK), tmp_path / "out")
    assert make(tmp_path / "out", TASK).config.backbone_width == 64


@pytest.mark.parametrize(
    "modes", [{"VISUAL": "IDENTITY", "STATE": "MEAN_STD"}, {"ACTION": "MIN_MAX"}, {"VISUAL": "QUANTILES"}]
)
def test_a_new_network_is_exported_with_its_pictures_as_it_saw_them(modes: dict[str, str], tmp_path: Path) -> None:
    """By ImageNet's statistics, or as they are where VISUAL is IDENTITY or not named."""
    entries = {"backbone_width": 64, "normalization_mapping": modes}
    policy = trained(tmp_path / "new", TASK, entries)
    policies.export(policy, tmp_path / "out")
    inputs = task_inputs(TASK)
    chunks = [each.act(inputs, None).chunk for each in (policy, make(tmp_path / "out", TASK))]
    assert (chunks[0] - chunks[1]).abs().max() < 1e-5
    assert policy.pictures[0, 0, 0].item() == (0.485 if modes.get("VISUAL") == "QUANTILES" else 0.0)


@pytest.mark.parametrize(
    ("entries", "task", "message"),
    [
        (
            {"input_features": {"observation.environment_state": {"type": "ENV", "shape": [3]}}},
            TASK,
            "input_features is .*ENV.*take input_features out of the file",
        ),
        ({"n_action_steps": 77}, TASK, "n_action_steps is 77, .* give the new network .*random_weights.* 2: take"),
        ({}, replace(TASK, horizon=4), "chunk_size is 6, and .* 4: take chunk_size out"),
        ({"temporal_ensemble_coeff": 0.01}, TASK, r"n_action_steps is 2 \(policy.chunk, for a new network\)"),
        ({"spec": {"chunk": 3}}, TASK, "'spec' is .*, an entry that is not known here"),
    ],
)
def test_entries_that_a_new_network_would_not_have_are_refused(
    entries: dict[str, Any], task: PolicySpec, message: str, tmp_path: Path
) -> None:
    with pytest.raises(PolicyError, match=message):
        make(new_checkpoint(tmp_path / "new", **entries), task)


def test_what_no_weight_depends_on_may_differ(tmp_path: Path) -> None:
    """Supervised learning takes whole chunks; reinforcement executes fewer actions and trains the network's critic."""
    folder = new_checkpoint(tmp_path / "new")
    policy = make(folder, replace(TASK, chunk=6))
    save(policy, tmp_path / "saved")
    other = make(folder, TASK, initial_log_std=-1.0, critic_trains_network=True)
    laws.perturb(other, 0.1, seed=1)
    load_into(other, tmp_path / "saved")
    inputs = task_inputs(TASK)
    assert torch.allclose(policy.act(inputs, None).chunk[:, :2], other.act(inputs, None).chunk, atol=1e-6)
    assert torch.equal(policy.log_std, other.log_std)
    with pytest.raises(PolicyError, match="architecture.transforms"):
        load_into(make(folder, TASK, transforms=[{"kind": "turn_images"}]), tmp_path / "saved")


def test_the_latent_is_drawn_by_the_noise_in_supervised_learning_alone(tmp_path: Path) -> None:
    policy = make(new_checkpoint(tmp_path / "new"), TASK)
    inputs, noise = task_inputs(TASK), laws.random_noise(policy, 6, 1)
    other = noise.clone()
    other[:, policy.executed :] += 1
    assert torch.equal(policy.act(inputs, noise).chunk, policy.act(inputs, other).chunk)
    actions, counted = laws.demonstrations(policy, 6)
    losses = [policy.losses(inputs, actions, counted, each) for each in (noise, other)]
    assert (losses[0][0] != losses[1][0]).all() and torch.equal(losses[0][1], losses[1][1])
    policy.imitate(inputs, actions, counted, noise).sum().backward()
    assert policy.log_std.grad is None, "supervised learning left the deviation to reinforcement"


def test_predictions_begin_with_the_chunk(tmp_path: Path) -> None:
    policy = trained(tmp_path / "new", TASK, {})
    inputs, noise = task_inputs(TASK), laws.random_noise(policy, 6, 1)
    mode = policy.predict(inputs, None)
    assert mode.shape == (6, 6, 3) and policy.ensemble is None
    assert torch.allclose(mode[:, :2], policy.act(inputs, None).chunk, atol=1e-6)
    drawn = policy.predict(inputs, noise)
    assert torch.allclose(drawn[:, :2], policy.act(inputs, noise).chunk, atol=1e-6)
    assert torch.equal(drawn[:, 2:], mode[:, 2:])


def test_a_policy_that_lerobot_evaluates_in_16_bits_is_noted(whole: Path, tmp_path: Path) -> None:
    folder = changed(whole, tmp_path / "changed", "config.json", lambda config: config.update(use_amp=True))
    (note,) = policy_kind("act").format.assumed({"checkpoint": str(folder)})
    assert "use_amp is true" in note
    assert not policy_kind("act").format.assumed({"checkpoint": str(whole)})


def test_predictions_are_averaged_as_the_checkpoint_or_the_option_says(whole: Path, tmp_path: Path) -> None:
    """With one action of a chunk that is executed: LeRobot refuses more."""
    entries = {"temporal_ensemble_coeff": 0.01, "n_action_steps": 1}
    folder = changed(whole, tmp_path / "changed", "config.json", lambda config: config.update(entries))
    one = replace(SPEC, chunk=1)
    assert make(folder, one).ensemble == 0.01 and make(folder, one, temporal_ensemble=0.5).ensemble == 0.5
    assert make(folder).ensemble is None and make(whole, one).ensemble is None
    form, named = policy_kind("act").format, {"checkpoint": str(folder)}
    (first, second) = form.chunk_notes(named, 4, ())
    assert "executes 1 actions" in first and "set it to 1 to evaluate so" in second
    (note,) = form.chunk_notes(named, 1, ())
    assert "temporal_ensemble_coeff 0.01): set policy.options.temporal_ensemble to false" in note
    assert form.ensemble(named, 1) == 0.01 and form.ensemble(named, 4) is None
    off = {**named, "temporal_ensemble": False}
    check("act", off)
    assert form.ensemble(off, 1) is None and not form.chunk_notes(off, 1, ())
    assert make(folder, one, temporal_ensemble=False).ensemble is None
    assert make(folder, temporal_ensemble=False).ensemble is None
    for spec, coefficient in ((one, 0.01), (SPEC, None)):
        policies.export(make(folder, spec), tmp_path / str(spec.chunk))
        config = json.loads((tmp_path / str(spec.chunk) / "config.json").read_text())
        assert (config["temporal_ensemble_coeff"], config["n_action_steps"]) == (coefficient, spec.chunk)


def test_commands_of_a_gripper_are_not_averaged(whole: Path) -> None:
    """A mean of commands of -1 and 1 is none that the transform may give."""
    one, gripper = replace(SPEC, chunk=1), {"transforms": [{"kind": "gripper", "convention": "libero"}]}
    with pytest.raises(PolicyError, match="set policy.options.temporal_ensemble to false, or leave gripper out"):
        make(whole, one, temporal_ensemble=0.01, **gripper)
    assert make(whole, one, **gripper).ensemble is None


def test_pictures_are_turned_and_the_gripper_converted(tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new")
    plain = make(folder, TASK)
    turned = make(folder, TASK, transforms=[{"kind": "turn_images"}, {"kind": "gripper", "convention": "libero"}])
    inputs = task_inputs(TASK)
    flipped = replace(inputs, frames={name: frame.flip(1, 2) for name, frame in inputs.frames.items()})
    chunks = plain.act(flipped, None).chunk, turned.act(inputs, None).chunk
    assert torch.equal(chunks[0][..., :-1], chunks[1][..., :-1]) and set(chunks[1][..., -1].unique().tolist()) <= {
        -1,
        0,
        1,
    }
    assert policy_kind("act").format.converts(turned.architecture()).keys() == {"orientation", "gripper"}


def test_cameras_are_matched_by_name(tmp_path: Path) -> None:
    """The network reads its pictures in its own order; others than its names are taken in the task's."""
    folder, spec = variant_checkpoint("norms_first", tmp_path / "two")
    policy = make(folder, replace(spec, cameras=("base", "wrist")))
    assert policy.cameras == ("wrist", "base") == spec.cameras
    assert make(folder, replace(spec, cameras=("one", "two"))).cameras == ("one", "two")
    with pytest.raises(PolicyError, match="the checkpoint knows the camera wrist is .*, and has none for 'left'"):
        make(folder, replace(spec, cameras=("wrist", "left")))


# --- what is refused

REFUSED_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "another backbone": ({"vision_backbone": "resnet50"}, "vision_backbone.*'resnet18' or 'resnet34'.*resnet50"),
    "dilation": ({"replace_final_stride_with_dilation": True}, "replace_final_stride_with_dilation"),
    "two observations": ({"n_obs_steps": 2}, "n_obs_steps.*should be 1"),
    "ensembling by a word": ({"temporal_ensemble_coeff": "much"}, "temporal_ensemble_coeff.*much"),
    "ensembling by a text": ({"temporal_ensemble_coeff": "0.01", "n_action_steps": 1}, "coeff.*valid number.*'0.01'"),
    "ensembling by true": ({"temporal_ensemble_coeff": True, "n_action_steps": 1}, "coeff.*valid number.*True"),
    "ensembling of chunks": ({"temporal_ensemble_coeff": 0.01}, "n_action_steps is 4 .*set the first to null, or the"),
    "a size in quotes": ({"chunk_size": "6"}, "chunk_size.*valid integer.*'6'"),
    "entries of a saved policy": ({"architecture": {}, "kind": "act"}, "'kind' is 'act', an entry that is not known"),
    "a seed beside weights": ({"random_weights": 0}, "random_weights is 0, the seed .* and weights are there"),
    "states of two dimensions": (
        {
            "input_features": {
                "observation.images.top": {"type": "VISUAL", "shape": [3, 64, 64]},
                "observation.state": {"type": "STATE", "shape": [8, 2]},
            }
        },
        "observation.state and action each have one dimension, got",
    ),
    "an adapter": ({"use_peft": True}, "use_peft is true, and adapters of ACT are not read"),
    "too many actions": ({"n_action_steps": 7}, "n_action_steps is 7, and of a chunk of 6 at most all are executed"),
    "an unknown entry": ({"memory": 3}, "'memory' is 3, an entry that is not known here"),
    "a gated layer": ({"feedforward_activation": "glu"}, "feedforward_activation.*'relu' or 'gelu'"),
    "heads that do not fit": ({"n_heads": 3}, "dim_model is 32, and must be a multiple of 4 and of n_heads, 3"),
    "another policy": ({"type": "diffusion"}, "type is 'diffusion', and LeRobot's directories of ACT have act"),
    "another mode": ({"normalization_mapping": {"STATE": "MEAN"}}, "normalization_mapping.STATE"),
    "modes that differ": (
        {"normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MEAN_STD"}},
        "STATE is normalised in several ways",
    ),
    "a state of the environment": (
        {"input_features": {"observation.environment_state": {"type": "ENV", "shape": [4]}}},
        "a state of the environment, which no simulator here gives",
    ),
    "no pictures": ({"input_features": {}}, "has the pictures none; the network reads at least one"),
    "wide pictures": (
        {"input_features": {"observation.images.top": {"type": "VISUAL", "shape": [3, 48, 64]}}},
        "pictures here are square",
    ),
    "another layer": ({"dim_feedforward": 47}, "linear1.*the tensors are of another model than config.json says"),
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_checkpoint(tmp_path_factory.mktemp("whole") / "golden")


def changed(whole: Path, folder: Path, file: str, change: Any) -> Path:
    """A directory with another file; its weights are a link."""
    shutil.copytree(whole, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    (folder / "model.safetensors").symlink_to(whole / "model.safetensors")
    content = json.loads((folder / file).read_text())
    change(content)
    (folder / file).write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("case", REFUSED_ENTRIES)
def test_what_is_not_done_here_is_refused_by_name(case: str, whole: Path, tmp_path: Path) -> None:
    entries, message = REFUSED_ENTRIES[case]
    folder = changed(whole, tmp_path / "changed", "config.json", lambda config: config.update(entries))
    with pytest.raises(PolicyError, match=message):
        make(folder)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (replace(SPEC, chunk=7), "predicts 6 actions, and policy.chunk is 7: at most that"),
        (replace(SPEC, horizon=5), r"predicts 6 actions \(chunk_size\), each by weights of its own"),
        (replace(SPEC, cameras=("a", "b")), "reads the pictures observation.images.top, and the task gives a, b"),
        (replace(SPEC, cameras=()), "the task gives none: set env.cameras to as many, and have images in"),
        (replace(SPEC, image_size=32), "pictures of 64 pixels, and the task gives 32: set env.image_size to 64"),
        (replace(SPEC, proprio_dim=0), "reads the robot's state: add 'proprio' to policy.reads"),
        (replace(SPEC, proprio_dim=5), "states and actions have 8 and 7 numbers, the task's 5 and 7"),
        (replace(SPEC, action_dim=3), "states and actions have 8 and 7 numbers, the task's 8 and 3"),
    ],
)
def test_a_task_of_other_sizes_is_refused(spec: PolicySpec, message: str, whole: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        make(whole, spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": ""}, "act needs a checkpoint: set policy.options.checkpoint"),
        ({"checkpoint": "/nowhere"}, "/nowhere is not a folder here"),
        ({"asset": "libero"}, "act's asset is demonstrations or empty, got 'libero'"),
        ({"temporal_ensemble": 200.0}, "act's temporal_ensemble is a number of -100 to 100, or false, got 200.0"),
        ({"temporal_ensemble": True}, "act's temporal_ensemble is a number of -100 to 100, or false, got True"),
        ({"temporal_ensemble": 0.0}, "policy.chunk is 4: set policy.chunk to 1, or leave temporal_ensemble out"),
        ({"temporal_ensemble": 0.01}, "policy.chunk is 4: set policy.chunk to 1, or leave temporal_ensemble out"),
        ({"initial_log_std": 3.0}, "act's initial_log_std is of -20 to 2, got 3.0"),
        ({"value_widths": [0]}, "value_widths is a list of positive layer widths"),
        (
            {"asset": "demonstrations", "transforms": [{"kind": "delta_actions", "dims": 3}]},
            "leave delta_actions out of transforms",
        ),
    ],
)
def test_an_option_of_another_value_is_refused(options: dict[str, Any], message: str, whole: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        policies.build("act", SPEC, 1, **{"checkpoint": str(whole), **options})


def test_files_that_are_missing_or_too_many_are_refused(whole: Path, tmp_path: Path) -> None:
    def broken(name: str, change: Any) -> Path:
        folder = changed(whole, tmp_path / name, "config.json", lambda config: None)
        change(folder)
        return folder

    cases = {
        "no weights in": lambda folder: (folder / "model.safetensors").unlink(),
        "policy_postprocessor.json is missing": lambda folder: (folder / "policy_postprocessor.json").unlink(),
        "more.safetensors is there, and nothing": lambda folder: (folder / "more.safetensors").write_bytes(b""),
        "processor.safetensors is missing": lambda folder: next(folder.glob("*step_3*")).unlink(),
    }
    for number, (message, change) in enumerate(cases.items()):
        folder = broken(str(number), change)
        with pytest.raises(PolicyError, match=message):
            make(folder)


@pytest.mark.parametrize(("file", "place"), [("policy_preprocessor.json", 3), ("policy_postprocessor.json", 0)])
def test_missing_statistics_are_refused(file: str, place: int, whole: Path, tmp_path: Path) -> None:
    """Until demonstrations give them; pictures have none from these."""

    def drop(content: Any) -> None:
        (tmp_path / "changed" / content["steps"][place].pop("state_file")).unlink()

    folder = changed(whole, tmp_path / "changed", file, drop)
    with pytest.raises(PolicyError, match="has no statistics of"):
        make(folder)
    if place == 0:
        assert make(folder, asset="demonstrations").normalised_by == "the rows learned from"


@pytest.mark.parametrize("asset", ["", "demonstrations"])
def test_pictures_without_statistics_stay_as_they_are(asset: str, tmp_path: Path) -> None:
    """As LeRobot's normaliser leaves them, whatever their mode."""
    folder = golden_checkpoint(tmp_path / "golden")
    (state,) = folder.glob("policy_preprocessor_step_*.safetensors")
    tensors = load_file(state)
    kept = {name: tensor for name, tensor in tensors.items() if "images" not in name}
    assert len(kept) < len(tensors)
    save_file(kept, state)
    policy = make(folder, asset=asset)
    frames = laws.random_inputs(SPEC, 2, seed=1).frames["top"]
    seen = policy._observation(Inputs(proprio=torch.zeros(2, 8), frames={"top": frames}))
    assert torch.equal(seen.pixels[:, 0], frames.permute(0, 3, 1, 2).float() / 255)


def test_a_picture_of_older_files_without_statistics_is_refused_with_advice_that_helps(tmp_path: Path) -> None:
    folder = older_checkpoint(tmp_path / "older")
    tensors = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in tensors.items() if "images" not in name}, folder / "model.safetensors")
    with pytest.raises(PolicyError, match="observation.images.top.* Set VISUAL to IDENTITY in config.json") as error:
        make(folder, asset="demonstrations")
    assert "asset" not in str(error.value)


def test_a_step_of_another_policy_is_refused(whole: Path, tmp_path: Path) -> None:
    def add(content: Any) -> None:
        content["steps"].append({"registry_name": "pi0_new_line_processor", "config": {}})

    folder = changed(whole, tmp_path / "changed", "policy_preprocessor.json", add)
    with pytest.raises(PolicyError, match=r"step 4 \(pi0_new_line_processor\) is of another policy: act has the steps"):
        check("act", {"checkpoint": str(folder)})
