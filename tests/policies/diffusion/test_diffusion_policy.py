"""Diffusion Policy as a policy: the laws, denoising that is scored, what it refuses, saves and exports."""

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
from policies.conformance import laws
from policies.diffusion.policy import nearest_counted
from policies.registry import check, kinds_that_read, policy_kind
from tests.policies.diffusion.cases import (
    SPEC,
    TASK,
    golden_checkpoint,
    make,
    new_checkpoint,
    older_checkpoint,
    variant_checkpoint,
)
from tests.variants import often

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "two observations, two cameras": ({"crop_shape": [34, 34]}, {}),
    "three observations, DDIM, some steps": (
        {"n_obs_steps": 3, "prediction_type": "sample", "resize_shape": [40, 37], "crop_ratio": 0.9},
        {"noise_scheduler_type": "DDIM", "num_inference_steps": 5, "trained_steps": 3, "gamma_denoising": 0.8},
    ),
    "one observation, batch norms": (
        {"n_obs_steps": 1, "use_group_norm": False, "do_mask_loss_for_padding": True},
        {"num_inference_steps": 4},
    ),
}


LONG = {
    laws.law_imitation_brings_the_mode_to_the_demonstrations: "",
    laws.law_log_prob_is_the_density_that_act_samples: "one observation, batch norms",
    laws.law_all_is_computed_on_the_policys_device: "three observations, DDIM, some steps",
}
"""Laws that cost seconds, and the case that the default run has of each. The loss, which imitation repeats hundreds of
times, is beside LeRobot's in test_diffusion_golden."""


def once_where_they_are_long(of: Iterable[Any]) -> list[Any]:
    """Laws and cases."""
    every = [(law, case) for law in of for case in CASES]
    return often([(law, case) for law, case in every if LONG.get(law, case) == case], every)


def task_inputs(spec: PolicySpec, rows: int = 6) -> Inputs:
    return laws.random_inputs(spec, rows, seed=7)


def trained(folder: Path, entries: dict[str, Any], spec: PolicySpec = TASK, **options: Any) -> Any:
    """A new policy as after some training."""
    policy = make(new_checkpoint(folder, **entries), spec, **options)
    generator = torch.Generator().manual_seed(1)
    actions, proprio = torch.randn(100, spec.action_dim, generator=generator), torch.randn(100, 4, generator=generator)
    policy.adopt_units(0.5 * actions, proprio)
    laws.perturb(policy, 0.02, seed=6)
    return policy


@pytest.mark.parametrize(("law", "case"), once_where_they_are_long(laws.LAWS))
def test_laws(law: Any, case: str, tmp_path: Path) -> None:
    entries, options = CASES[case]
    policy = trained(tmp_path / "new", entries, critic_trains_network=True, **options)
    inputs = task_inputs(policy.spec)
    if law is laws.law_gradients_reach_every_parameter:
        # A softmax does not change where the same number is added to all that it compares.
        idle = {f"network.rgb_encoder.{camera}.pool.nets.bias" for camera in range(2)}
        for name in idle:
            policy.get_parameter(name).register_hook(lambda grad: torch.where(grad.abs() < 1e-5, 0.0, grad))
        law(policy, inputs, without=idle)
    else:
        law(policy, inputs)


@pytest.mark.parametrize(("law", "case"), once_where_they_are_long(laws.IMITATION_LAWS))
def test_laws_of_imitation(law: Any, case: str, tmp_path: Path) -> None:
    entries, options = CASES[case]
    policy = trained(tmp_path / "new", entries, **options)
    if law is laws.law_imitation_brings_the_mode_to_the_demonstrations:
        # Noise is learned more slowly than what it hides; before, the mode is off by more than 1.
        law(policy, task_inputs(policy.spec), tolerance=0.1 if "prediction_type" in entries else 0.4)
    else:
        law(policy, task_inputs(policy.spec))


# --- denoising that is scored


@pytest.mark.parametrize("case", CASES)
def test_ratios_are_one_on_policy(case: str, tmp_path: Path) -> None:
    """Of decisions that were made in batches of 8 and are evaluated in batches of 24."""
    entries, options = CASES[case]
    policy = trained(tmp_path / "new", entries, **options)
    inputs, noise = laws.random_inputs(policy.spec, 48, seed=3), laws.random_noise(policy, 48, seed=4)
    acted = [policy.act(inputs.rows(rows), noise[rows]) for rows in torch.arange(48).split(8)]
    trace = {name: torch.cat([a.trace[name] for a in acted]) for name in acted[0].trace}
    log_prob, ratios = torch.cat([a.log_prob for a in acted]), []
    for rows in torch.arange(48).split(24):
        with torch.no_grad():
            again = policy.evaluate(inputs.rows(rows), {name: t[rows] for name, t in trace.items()}).log_prob
        ratios.append((again - log_prob[rows]).sum((1, 2)).exp())
    assert (torch.cat(ratios) - 1).abs().mean() < 1e-5


def test_one_of_the_trained_steps_is_scored_and_earlier_ones_less_often(tmp_path: Path) -> None:
    """As often as the discount of their advantage says."""
    policy = trained(tmp_path / "new", {}, num_inference_steps=5, trained_steps=3, gamma_denoising=0.5)
    uniform = (torch.arange(7000, dtype=torch.float64) + 0.5) / 7000
    counts = policy.denoising.step_of(uniform).bincount(minlength=5)
    assert counts.tolist() == [0, 0, 1000, 2000, 4000]
    steps = policy.act(task_inputs(policy.spec), laws.random_noise(policy, 6, seed=1)).trace["step"]
    assert ((steps >= 2) & (steps < 5)).all()


def test_deviations_have_a_lower_bound_for_draws_and_one_for_scores(tmp_path: Path) -> None:
    """The last step of DDPM, and all of DDIM, have none of their own."""
    folder = new_checkpoint(tmp_path / "new")
    own = make(folder, TASK, min_sampling_denoising_std=0.0, min_logprob_denoising_std=0.01).denoising
    both = make(folder, TASK, min_sampling_denoising_std=0.1, min_logprob_denoising_std=0.2).denoising
    assert own.deviations[-1] == 0 and (own.deviations[:-1] > 0).all()
    assert torch.equal(both.deviations, own.deviations.clamp(min=0.1))
    assert torch.allclose(both.log_scored.exp(), own.deviations.clamp(min=0.2))
    flat = make(folder, TASK, noise_scheduler_type="DDIM", min_sampling_denoising_std=0.0).denoising
    assert not flat.deviations.any()


def test_a_decision_is_scored_by_the_deviation_of_its_step(tmp_path: Path) -> None:
    """The second difference of log N(x; m, s^2) over x +- h is -(h / s)^2, wherever m is."""
    deviations = {"min_sampling_denoising_std": 0.1, "min_logprob_denoising_std": 0.2}
    policy = trained(tmp_path / "new", {}, num_inference_steps=5, trained_steps=3, **deviations)
    inputs = task_inputs(policy.spec)
    trace = policy.act(inputs, laws.random_noise(policy, 6, seed=1)).trace

    def score(shift: float) -> torch.Tensor:
        with torch.no_grad():
            return policy.evaluate(inputs, {**trace, "x_next": trace["x_next"] + shift}).log_prob.double()

    found = score(0.5) + score(-0.5) - 2 * score(0.0)
    scored = policy.denoising.deviations.clamp(min=0.2)[trace["step"]]
    torch.testing.assert_close(
        found, -(0.5 / scored.double()).square()[:, None, None].expand_as(found), rtol=1e-3, atol=1e-3
    )


def test_executed_actions_begin_at_the_present(tmp_path: Path) -> None:
    """Behind those of the observations before it; the others of the horizon are predicted, and not executed."""
    policy = trained(tmp_path / "new", {"n_obs_steps": 3})
    assert (policy.config.horizon, policy.spec.predicted, policy.earlier_actions) == (4, 2, 2)
    inputs, noise = task_inputs(policy.spec), laws.random_noise(policy, 6, seed=1)
    said = policy._denoised(policy._condition(inputs), noise)[0]
    expected = policy.units.action.unnormalise(said[:, 2:4]).float()
    assert torch.equal(policy.act(inputs, noise).chunk, expected)


def test_actions_that_are_not_counted_are_the_nearest_that_are() -> None:
    actions = torch.arange(1.0, 7.0).expand(3, 6)[..., None]
    counted = torch.tensor([[0, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]).bool()
    found = nearest_counted(torch.where(counted[..., None], actions, torch.nan), counted)[..., 0]
    assert found.tolist() == [[2, 2, 3, 3, 3, 3], [1, 2, 3, 4, 5, 6], [0] * 6]


def test_crops_are_random_in_supervised_learning_alone(tmp_path: Path) -> None:
    """Each row and camera has a place of its own, which is that of all its observations."""
    task = replace(TASK, image_size=40)
    policy = trained(tmp_path / "new", {"crop_shape": [36, 30]}, task)
    ramp = torch.arange(1600.0).view(1, 1, 1, 1, 40, 40).expand(2, 2, 2, 3, 40, 40)
    corners = torch.tensor([[[0.0, 0.0], [0.999, 0.999]], [[0.5, 0.1], [0.2, 0.9]]]).double()
    found = policy._cropped(ramp, corners)
    assert found.shape == (2, 2, 2, 3, 36, 30)
    first = found[..., 0, 0]
    assert first[0, :, 0].unique().tolist() == [0] and first[0, :, 1].unique().tolist() == [4 * 40 + 10]
    assert first[1, :, 0].unique().tolist() == [2 * 40 + 1] and first[1, :, 1].unique().tolist() == [1 * 40 + 9]
    assert torch.equal(found[..., -1, -1], first + 35 * 40 + 29)
    assert policy._cropped(ramp, None)[0, 0, 0, 0, 0, 0] == 2 * 40 + 5
    inputs, noise = task_inputs(policy.spec), laws.random_noise(policy, 6, seed=1)
    moved = noise.clone()
    moved[:, -4:] += 1
    actions, counted = laws.demonstrations(policy, 6)
    assert torch.equal(policy.act(inputs, noise).chunk, policy.act(inputs, moved).chunk)
    assert (policy.imitate(inputs, actions, counted, noise) != policy.imitate(inputs, actions, counted, moved)).all()
    still = trained(tmp_path / "still", {"crop_shape": [36, 30], "crop_is_random": False}, task)
    assert torch.equal(*(still.imitate(inputs, actions, counted, each) for each in (noise, moved)))


def test_ends_of_episodes_that_are_left_out(tmp_path: Path) -> None:
    """As LeRobot leaves them out; for a new network as many as its file says."""
    left_out = policy_kind("diffusion").format.left_out_rows
    assert left_out({"checkpoint": str(golden_checkpoint(tmp_path / "golden"))}) == 7
    assert left_out({"checkpoint": str(new_checkpoint(tmp_path / "new"))}) == 0
    assert left_out({"checkpoint": str(new_checkpoint(tmp_path / "two", drop_n_last_frames=2))}) == 2
    assert policy_kind("act").format.left_out_rows({}) == 0


# --- checkpoints


def test_kinds_that_read_it() -> None:
    assert kinds_that_read({"type": "diffusion"}) == ["diffusion"]


@pytest.mark.parametrize("checkpoint", [golden_checkpoint, older_checkpoint], ids=["0.6", "0.3"])
def test_an_exported_policy_is_the_policy(checkpoint: Any, tmp_path: Path) -> None:
    """Whatever it was read from, in today's layout; a second export is the first."""
    policy = make(checkpoint(tmp_path / "base"))
    inputs = laws.random_inputs(policy.spec, 3, seed=1)
    laws.perturb(policy, 0.01, seed=2)
    policies.export(policy, tmp_path / "first")
    shutil.rmtree(tmp_path / "base")
    again = make(tmp_path / "first")
    # A range to which eps was added is written as one without, and denoising magnifies what differs.
    torch.testing.assert_close(policy.act(inputs, None).chunk, again.act(inputs, None).chunk, atol=1e-4, rtol=1e-4)
    policies.export(again, tmp_path / "second")
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("first", "second")]
    assert files[0] == files[1] and len(files[0]) == 6
    for name in files[0]:
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes(), name
    config = json.loads((tmp_path / "first/config.json").read_text())
    assert config["n_action_steps"] == 4 and not {"kind", "spec", "architecture", "backbone_width"} & config.keys()
    notes = policy_kind("diffusion").format.chunk_notes
    assert not notes({"checkpoint": str(tmp_path / "first")}, 4, ())
    (note,) = notes({"checkpoint": str(tmp_path / "first")}, 2, ())
    assert "LeRobot executes 4 actions of a chunk (n_action_steps), and policy.chunk is 2" in note


@pytest.mark.parametrize("name", ["shared", "ddpm_sample", "two_cameras"])
def test_statistics_of_every_mode_are_exported(name: str, tmp_path: Path) -> None:
    folder, spec = variant_checkpoint(name, tmp_path / name)
    policies.export(make(folder, spec), tmp_path / "out")
    for path in folder.glob("policy_*.safetensors"):
        first, second = load_file(path), load_file(tmp_path / "out" / path.name)
        for key, tensor in second.items():
            assert first[key].shape == tensor.shape and torch.allclose(first[key], tensor, atol=1e-7), key


def test_the_way_of_denoising_is_exported(tmp_path: Path) -> None:
    policy = make(golden_checkpoint(tmp_path / "base"), noise_scheduler_type="DDIM", num_inference_steps=5)
    policies.export(policy, tmp_path / "out")
    again = make(tmp_path / "out")
    assert (again.denoising.steps, again._sampler) == (5, "DDIM")
    inputs = laws.random_inputs(policy.spec, 2, seed=1)
    assert torch.equal(policy.act(inputs, None).chunk, again.act(inputs, None).chunk)


def test_units_of_demonstrations_are_ranges_and_are_saved_and_exported(tmp_path: Path) -> None:
    policy = make(golden_checkpoint(tmp_path / "golden"), asset="demonstrations")
    generator = torch.Generator().manual_seed(1)
    actions, proprio = 3 + 2 * torch.randn(500, 7, generator=generator), torch.randn(500, 8, generator=generator)
    proprio[:, 6] = 4.0
    policy.adopt_units(actions, proprio)
    normalised = policy.units.action.normalise(actions)
    assert torch.allclose(normalised.amin(0), -torch.ones(7).double()) and torch.allclose(
        normalised.amax(0), torch.ones(7).double()
    )
    assert policy.units.state.normalise(proprio)[0, 6] == 0 and policy.normalised_by == "the rows learned from"
    save(policy, tmp_path / "saved")
    again: Any = load(tmp_path / "saved")
    assert torch.equal(again.units.action.scale, policy.units.action.scale)
    policies.export(again, tmp_path / "out")
    exported, inputs = make(tmp_path / "out"), laws.random_inputs(policy.spec, 2, seed=1)
    assert (exported.act(inputs, None).chunk - policy.act(inputs, None).chunk).abs().max() < 1e-5
    assert exported.normalised_by == "the checkpoint's own"


def test_a_new_network_reads_what_the_task_gives(tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new")
    first, same = (make(folder, TASK) for _ in range(2))
    other = make(new_checkpoint(tmp_path / "other", random_weights=1), TASK)
    weight = "unet.final_conv.1.weight"
    assert torch.equal(first.network.get_parameter(weight), same.network.get_parameter(weight))
    assert not torch.equal(first.network.get_parameter(weight), other.network.get_parameter(weight))
    assert first.config.cameras == ("observation.images.base", "observation.images.wrist")
    assert first.config.horizon == 4 and first.spec.predicted == 3 and first.config.use_group_norm
    assert make(folder, replace(TASK, horizon=7)).config.horizon == 8
    save(first, tmp_path / "saved")
    shutil.rmtree(folder)
    again: Any = load(tmp_path / "saved")
    inputs = task_inputs(first.spec)
    assert torch.equal(first.act(inputs, None).chunk, again.act(inputs, None).chunk)
    with pytest.raises(PolicyError, match="ResNet has the width 2, and LeRobot's are of 64"):
        policies.export(first, tmp_path / "out")


def test_a_new_network_that_would_see_nothing_is_refused(tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new", crop_shape=[32, 32])
    with pytest.raises(PolicyError, match=r"reads pictures of \[32, 32\]. The ResNet reduces them to one place"):
        make(folder, TASK)


def test_a_compiled_network_is_read(tmp_path: Path) -> None:
    """torch.compile puts a name in front of the U-Net's tensors."""
    plain = make(golden_checkpoint(tmp_path / "golden"))
    tensors = load_file(tmp_path / "golden/model.safetensors")
    named = {name.replace("diffusion.unet.", "diffusion.unet._orig_mod."): t for name, t in tensors.items()}
    save_file(named, tmp_path / "golden/model.safetensors")
    assert named.keys() != tensors.keys()
    inputs = laws.random_inputs(plain.spec, 2, seed=1)
    assert torch.equal(make(tmp_path / "golden").act(inputs, None).chunk, plain.act(inputs, None).chunk)


def test_pictures_are_turned_and_the_gripper_converted(tmp_path: Path) -> None:
    folder = new_checkpoint(tmp_path / "new")
    plain = make(folder, TASK)
    turned = make(folder, TASK, transforms=[{"kind": "turn_images"}, {"kind": "gripper", "convention": "libero"}])
    inputs = task_inputs(plain.spec)
    flipped = replace(inputs, frames={name: frame.flip(2, 3) for name, frame in inputs.frames.items()})
    chunks = plain.act(flipped, None).chunk, turned.act(inputs, None).chunk
    assert torch.equal(chunks[0][..., :-1], chunks[1][..., :-1])
    assert set(chunks[1][..., -1].unique().tolist()) <= {-1, 0, 1}


def test_actions_relative_to_the_state_are_of_the_present_one(tmp_path: Path) -> None:
    folder = golden_checkpoint(tmp_path / "golden")
    plain, relative = make(folder), make(folder, transforms=[{"kind": "delta_actions", "dims": 3}])
    inputs = laws.random_inputs(plain.spec, 2, seed=1)
    chunks = plain.act(inputs, None).chunk, relative.act(inputs, None).chunk
    assert inputs.proprio is not None
    expected = inputs.proprio[:, -1, None, :3].expand(-1, 4, -1)
    torch.testing.assert_close(chunks[1][..., :3] - chunks[0][..., :3], expected, atol=1e-5, rtol=1e-5)


# --- what is refused

REFUSED_ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "another backbone": ({"vision_backbone": "resnet50"}, "vision_backbone.*'resnet18' or 'resnet34'.*resnet50"),
    "a transformer": ({"use_transformer": True}, "asks for a transformer that denoises, and only the U-Net is read"),
    "a transformer by name": ({"noise_net": "Transformer"}, "asks for a transformer that denoises"),
    "another scheduler": ({"noise_scheduler_type": "EDM"}, "noise_scheduler_type.*'DDPM' or 'DDIM'.*EDM"),
    "another prediction": ({"prediction_type": "v_prediction"}, "prediction_type.*'epsilon' or 'sample'"),
    "another schedule": ({"beta_schedule": "sigmoid"}, "beta_schedule.*sigmoid"),
    "a schedule without signal": (
        {"beta_schedule": "linear", "beta_start": 0.99, "beta_end": 0.999},
        "leaves no signal, or no noise",
    ),
    "too many steps": ({"num_inference_steps": 21}, "num_inference_steps is 21, and at most the 20"),
    "too many actions": (
        {"n_action_steps": 8},
        "n_action_steps is 8. The horizon has 8 actions .* at most 7 are executed",
    ),
    "a horizon that is not halved": ({"horizon": 10}, "horizon is 10, and must be a multiple of 4"),
    "groups that do not fit": ({"n_groups": 5}, "down_dims has 16, and must have multiples of n_groups, 5"),
    "a first width": ({"down_dims": [12, 32]}, "down_dims begins with 12, and must begin with a multiple of 8"),
    "an even kernel": ({"kernel_size": 4}, "kernel_size is 4, and must be odd"),
    "an odd embedding": ({"diffusion_step_embed_dim": 15}, "diffusion_step_embed_dim is 15, and must be even"),
    "a large crop": ({"crop_shape": [64, 40]}, r"crop_shape cuts \[64, 40\] out of pictures of \[48, 48\]"),
    "a small ratio": ({"resize_shape": [9, 9], "crop_ratio": 0.1}, r"crop_ratio cuts \[0, 0\] out of pictures of"),
    "an adapter": ({"use_peft": True}, "use_peft is true, and adapters of Diffusion Policy are not read"),
    "an unknown entry": ({"memory": 3}, "'memory' is 3, an entry that is not known here"),
    "another policy": ({"type": "act"}, "type is 'act', and LeRobot's directories of Diffusion Policy have"),
    "another width": ({"down_dims": [16, 64]}, "the tensors are of another model than config.json says"),
    "modes that differ": (
        {"normalization_mapping": {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MIN_MAX"}},
        "STATE is normalised in several ways",
    ),
    "a state of the environment": (
        {"input_features": {"observation.environment_state": {"type": "ENV", "shape": [4]}}},
        "a state of the environment, which no simulator here gives",
    ),
    "no state": (
        {"input_features": {"observation.image": {"type": "VISUAL", "shape": [3, 48, 48]}}},
        "input_features has no observation.state, which every Diffusion Policy",
    ),
    "a seed beside weights": ({"random_weights": 0}, "random_weights is 0, the seed .* and weights are there"),
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
        (replace(SPEC, chunk=8), "7 actions are predicted, and policy.chunk is 8: at most that"),
        (replace(SPEC, horizon=5), r"predicts 7 actions from the present on \(horizon 8\), and policy.horizon is 5"),
        (replace(SPEC, cameras=("a", "b")), "reads the pictures observation.image, and the task gives a, b"),
        (replace(SPEC, image_size=32), "pictures of 48 pixels, and the task gives 32: set env.image_size to 48"),
        (replace(SPEC, proprio_dim=0), "reads the robot's state: add 'proprio' to policy.reads"),
        (replace(SPEC, action_dim=3), "states and actions have 8 and 7 numbers, the task's 8 and 3"),
        (replace(SPEC, observations=3), "decides on 2 observations at a distance of 1 env steps, and the spec has 3"),
    ],
)
def test_a_task_of_other_sizes_is_refused(spec: PolicySpec, message: str, whole: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        make(whole, spec)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checkpoint": ""}, "diffusion needs a checkpoint: set policy.options.checkpoint"),
        ({"asset": "libero"}, "diffusion's asset is demonstrations or empty, got 'libero'"),
        ({"noise_scheduler_type": "EDM"}, "noise_scheduler_type is DDPM or DDIM or empty, got 'EDM'"),
        ({"num_inference_steps": 21}, "num_inference_steps is 21, and at most the 20 steps of the training are taken"),
        ({"num_inference_steps": -1}, "num_inference_steps is of 0 to 10000, got -1"),
        ({"trained_steps": 21}, "trained_steps is 21, and there are 20 denoising steps"),
        ({"min_sampling_denoising_std": -0.1}, "min_sampling_denoising_std is of 0 to 10, got -0.1"),
        ({"min_logprob_denoising_std": 0.0}, "min_logprob_denoising_std is of 0.0001 to 10, got 0.0"),
        ({"gamma_denoising": 0.0}, "gamma_denoising is above 0 and at most 1, got 0.0"),
        ({"value_widths": [0]}, "value_widths is a list of positive layer widths"),
    ],
)
def test_an_option_of_another_value_is_refused(options: dict[str, Any], message: str, whole: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        policies.build("diffusion", SPEC, 1, **{"checkpoint": str(whole), **options})


def test_inputs_without_the_observations_are_refused(whole: Path) -> None:
    policy, one = make(whole), laws.random_inputs(SPEC, 2, seed=1)
    two = laws.random_inputs(policy.spec, 2, seed=1)
    with pytest.raises(PolicyError, match=r"reads proprio \[B, 2, 8\], the inputs have \[2, 8\]"):
        policy.act(replace(two, proprio=one.proprio), None)
    with pytest.raises(PolicyError, match=r"must be uint8 \[B, 2, H, W, 3\], got uint8 \[2, 48, 48, 3\]"):
        policy.act(replace(two, frames=one.frames), None)
    with pytest.raises(PolicyError, match="reads the camera 'image', the inputs have: none"):
        policy.act(replace(two, frames={}), None)


def test_missing_statistics_are_refused(whole: Path, tmp_path: Path) -> None:
    """Until demonstrations give them."""

    def drop(content: Any) -> None:
        (tmp_path / "changed" / content["steps"][0].pop("state_file")).unlink()

    folder = changed(whole, tmp_path / "changed", "policy_postprocessor.json", drop)
    with pytest.raises(PolicyError, match="has no statistics of"):
        make(folder)
    assert make(folder, asset="demonstrations").normalised_by == "the rows learned from"


def test_what_differs_from_lerobot_is_said(whole: Path, tmp_path: Path) -> None:
    assumed = policy_kind("diffusion").format.assumed
    assert not assumed({"checkpoint": str(whole)})
    folder, spec = variant_checkpoint("two_cameras", tmp_path / "two")
    (note,) = assumed({"checkpoint": str(folder)})
    assert "use_group_norm is false" in note
    check("diffusion", {"checkpoint": str(folder)})
    with pytest.raises(PolicyError, match="is of diffusion, and policy.kind is act: set policy.kind to diffusion"):
        check("act", {"checkpoint": str(folder)})
    assert make(folder, replace(spec, cameras=("base", "wrist"))).cameras == ("wrist", "base")
