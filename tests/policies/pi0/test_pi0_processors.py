"""LeRobot's processors, step by step: each is applied as LeRobot applies it, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError, load, save
from policies.conformance import laws
from policies.lerobot.processors import POST, PRE, Relative
from policies.lerobot.statistics import read_lerobot
from policies.pi0.kind import PI0
from tests.policies.pi0.cases import DELTA, GOLDEN, SPEC, inputs_of, make, velocity

Json = dict[str, Any]
Change = Callable[[Path], Any]
NAMES = ["x", "y", "z", "roll", "pitch", "yaw", "Gripper_left"]
RELATIVE: Json = {
    "registry_name": "relative_actions_processor",
    "config": {"enabled": True, "exclude_joints": ["gripper"], "action_names": NAMES},
}
ABSOLUTE: Json = {"registry_name": "absolute_actions_processor", "config": {"enabled": True}}
BASE, WRIST = "observation.images.base_0_rgb", "observation.images.left_wrist_0_rgb"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "pi05" / "checkpoint_lerobot", tmp_path / "checkpoint"))


def edit(path: Path, change: Callable[[Json], object]) -> None:
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def step_of(folder: Path, file: str, name: str, change: Callable[[Json], object]) -> None:
    edit(folder / file, lambda raw: change(next(s for s in raw["steps"] if s["registry_name"] == name)))


def insert(folder: Path, file: str, at: int, step: Json) -> None:
    edit(folder / file, lambda raw: raw["steps"].insert(at, step))


def relative(folder: Path, **config: Any) -> None:
    insert(folder, PRE, 2, {**RELATIVE, "config": RELATIVE["config"] | config})
    insert(folder, POST, 1, ABSOLUTE)


def built(folder: Path, **options: Any) -> Any:
    return make("pi05", checkpoint=str(folder), state_in_prompt=True, **options)


def plain() -> Any:
    return built(GOLDEN / "pi05" / "checkpoint_lerobot")


# --- relative actions


@pytest.mark.parametrize(
    ("config", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"exclude_joints": ["YAW", "x"]}, [1, 2, 3, 4, 6]),
        ({"exclude_joints": []}, list(range(7))),
        ({"action_names": None}, list(range(7))),
        ({"action_names": ["gripper"]}, [1, 2, 3, 4, 5, 6]),
        ({"action_names": [*NAMES, "gripper"]}, [0, 1, 2, 3, 4, 5]),
    ],
)
def test_actions_are_relative_to_the_state_but_for_excluded_joints(
    config: Json, numbers: list[int], folder: Path
) -> None:
    relative(folder, **config)
    policy, inputs = built(folder), inputs_of(SPEC, 3, seed=5)
    assert inputs.proprio is not None
    moved = policy.act(inputs, None).chunk - plain().act(inputs, None).chunk
    expected = torch.zeros(3, 1, 7)
    expected[:, 0, numbers] = inputs.proprio[:, numbers]
    assert (moved - expected).abs().max() < 1e-6


def test_excluded_joints_that_no_name_has_are_reported(folder: Path) -> None:
    """LeRobot takes their numbers as relative, without a word."""
    relative(folder, exclude_joints=["hand", "gripper"])
    sentences = [text for text in PI0.format.assumed({"checkpoint": str(folder)}) if "relative" in text]
    assert len(sentences) == 1 and "excludes hand, which is in none of its action_names" in sentences[0]


def test_what_is_learned_is_relative_and_log_probs_are_of_what_acted(folder: Path) -> None:
    relative(folder)
    policy, inputs = built(folder), inputs_of(SPEC, 3, seed=5)
    noise, counted = laws.random_noise(policy, 3, 1), torch.ones(3, 6, dtype=torch.bool)
    action = policy.act(inputs, noise)
    assert (policy.evaluate(inputs, action.trace).log_prob - action.log_prob).abs().max() < 1e-4
    assert inputs.proprio is not None
    actions = torch.randn(3, 6, 7, generator=torch.Generator().manual_seed(2))
    shift = torch.cat([inputs.proprio[:, None, :6], torch.zeros(3, 1, 1)], -1)
    losses = policy.imitate(inputs, actions + shift, counted, noise), plain().imitate(inputs, actions, counted, noise)
    assert (losses[0] - losses[1]).abs().max() < 1e-5
    assert (policy.imitate(inputs, actions, counted, noise) - losses[1]).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["delta_actions_processor", "relative_actions_processor"])
def test_what_is_saved_and_exported_keeps_the_steps(name: str, folder: Path, tmp_path: Path) -> None:
    """LeRobot 0.5.1 calls the step by its older name."""
    relative(folder)
    step_of(folder, PRE, RELATIVE["registry_name"], lambda step: step.update(registry_name=name))
    policy, inputs = built(folder), inputs_of(SPEC, 2, seed=5)
    save(policy, tmp_path / "saved")
    policies.export(policy, tmp_path / "exported")
    assert json.loads((tmp_path / "exported" / PRE).read_text()) == json.loads((folder / PRE).read_text())
    for again in (load(tmp_path / "saved"), built(tmp_path / "exported")):
        assert torch.equal(again.act(inputs, None).chunk, policy.act(inputs, None).chunk)
    assert policy.architecture()["transforms"] == [], "what the processors say is not the user's"


def test_relative_actions_need_the_state_and_units_of_their_own(folder: Path) -> None:
    relative(folder)
    with pytest.raises(PolicyError, match="'proprio' is in policy.reads"):
        make("pi05", replace(SPEC, proprio_dim=0), checkpoint=str(folder), prompt="openpi")
    with pytest.raises(PolicyError, match="says already that actions are relative.*leave delta_actions out"):
        built(folder, transforms=[DELTA])
    with pytest.raises(PolicyError, match="leave relative_actions out of transforms"):
        built(folder, asset="demonstrations")


# --- normalisers

MODES: dict[str, Callable[[torch.Tensor, Json], torch.Tensor]] = {
    "MEAN_STD": lambda x, s: (x - s["mean"]) / (s["std"] + 1e-8),
    "MIN_MAX": lambda x, s: 2 * (x - s["min"]) / (s["max"] - s["min"]) - 1,
    "QUANTILES": lambda x, s: 2 * (x - s["q01"]) / (s["q99"] - s["q01"]) - 1,
    "QUANTILE10": lambda x, s: 2 * (x - s["q10"]) / (s["q90"] - s["q10"]) - 1,
    "IDENTITY": lambda x, s: x,
}
"""LeRobot's formulas, to the network's units."""


def with_modes(folder: Path, state: str, action: str) -> dict[str, Json]:
    """Have these modes everywhere, and statistics of all kinds; return the statistics."""
    g = torch.Generator().manual_seed(4)
    found: dict[str, Json] = {}
    for key in ("observation.state", "action"):
        middle, half = torch.randn(7, generator=g), torch.rand(7, generator=g) + 0.5
        found[key] = {"mean": middle + 0.1, "std": half / 2, "min": middle - half, "max": middle + half}
        found[key] |= {"q01": middle - 0.9 * half, "q99": middle + 0.8 * half}
        found[key] |= {"q10": middle - 0.6 * half, "q90": middle + 0.5 * half}
    flat = {f"{key}.{name}": tensor for key, named in found.items() for name, tensor in named.items()}
    edit(folder / "config.json", lambda raw: raw["normalization_mapping"].update(STATE=state, ACTION=action))
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        step_of(folder, file, name, lambda s: s["config"]["norm_map"].update(STATE=state, ACTION=action))
        save_file(flat, next(folder.glob(f"*_{name}.safetensors")))
    return found


@pytest.mark.parametrize("state", MODES)
@pytest.mark.parametrize("action", MODES)
def test_each_feature_has_its_own_mode(state: str, action: str, folder: Path) -> None:
    stats = with_modes(folder, state, action)
    units, x = read_lerobot(folder), torch.randn(50, 7, dtype=torch.float64)
    for found, key, mode in ((units.state, "observation.state", state), (units.action, "action", action)):
        expected = MODES[mode](x, {name: tensor.double() for name, tensor in stats[key].items()})
        assert (found.normalise(x) - expected).abs().max() < 1e-6
        assert (found.unnormalise(expected) - x).abs().max() < 1e-6


def test_numbers_that_never_change_have_eps_as_their_range(folder: Path) -> None:
    stats = with_modes(folder, "MEAN_STD", "MIN_MAX")
    path = next(folder.glob("*_normalizer_processor.safetensors"))
    flat = load_file(path)
    flat["observation.state.std"][2] = flat["action.max"][3] = 0
    flat["action.min"][3] = 0
    for each in (path, next(folder.glob("*_unnormalizer_processor.safetensors"))):
        save_file(flat, each)
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        step_of(folder, file, name, lambda s: s["config"].update(eps=1e-4))
    units = read_lerobot(folder)
    assert float(units.state.scale[2]) == pytest.approx(1e-4)
    assert float(units.state.scale[1]) == pytest.approx(float(stats["observation.state"]["std"][1]) + 1e-4)
    assert float(units.action.unnormalise(torch.zeros(7))[3]) == pytest.approx(0.5e-4)


def test_only_observations_that_are_requested_are_normalised(folder: Path) -> None:
    step_of(folder, PRE, "normalizer_processor", lambda s: s["config"].update(normalize_observation_keys=["other"]))
    assert read_lerobot(folder).state.scale == 1
    step_of(folder, PRE, "normalizer_processor", lambda s: s["config"].pop("normalize_observation_keys"))
    step_of(folder, PRE, "normalizer_processor", lambda s: s["config"]["features"].pop("observation.state"))
    assert read_lerobot(folder).state.scale == 1


def test_a_base_checkpoint_without_statistics_learns_with_those_of_demonstrations(folder: Path, tmp_path: Path) -> None:
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        step_of(folder, file, name, lambda s: s.pop("state_file"))
        next(folder.glob(f"*_{name}.safetensors")).unlink()
    with pytest.raises(PolicyError, match="no statistics of observation.state.*asset to demonstrations"):
        built(folder)
    policy, g = built(folder, asset="demonstrations"), torch.Generator().manual_seed(1)
    policy.adopt_units(3 + 2 * torch.randn(50, 7, generator=g), torch.randn(50, 7, generator=g))
    policies.export(policy, tmp_path / "exported")
    again, inputs = built(tmp_path / "exported"), inputs_of(SPEC, 2, seed=1)
    assert (policy.act(inputs, None).chunk - again.act(inputs, None).chunk).abs().max() < 1e-5


# --- pictures, cameras, words


def test_pictures_are_resized_as_the_layout_does(folder: Path) -> None:
    """LeRobot 0.4 filled up pictures of 0..1 with -1, before it brought them to -1..1; later ones with 0."""
    assert built(folder).resize == "interpolate" and make("pi0").resize == "pillow"
    assert built(folder, resize="pillow").resize == "pillow"
    frames = torch.randint(0, 256, (2, 40, 60, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    floats = frames.permute(0, 3, 1, 2).float() / 255
    resized = torch.nn.functional.interpolate(floats, (18, 28), mode="bilinear", align_corners=False)
    for prompt, side in (("lerobot-0.4", -1.0), ("lerobot", 0.0)):
        theirs = torch.nn.functional.pad(resized, (0, 0, 5, 5), value=side) * 2 - 1
        assert (built(folder, prompt=prompt).pixels(frames) - theirs).abs().max() < 1e-5


def test_cameras_are_read_in_the_order_of_the_features_that_they_are_renamed_to(folder: Path) -> None:
    inputs, straight = inputs_of(SPEC, 2, seed=1), plain()
    swapped = {"observation.images.front": WRIST, "observation.images.wrist": BASE}
    step_of(folder, PRE, "rename_observations_processor", lambda s: s["config"].update(rename_map=swapped))
    turned = replace(inputs, frames={"front": inputs.frames["wrist"], "wrist": inputs.frames["front"]})
    assert torch.equal(built(folder).act(inputs, None).chunk, straight.act(turned, None).chunk)
    assert not torch.equal(built(folder).act(inputs, None).chunk, straight.act(inputs, None).chunk)
    named = replace(SPEC, cameras=("left_wrist_0_rgb", "base_0_rgb"))
    policy = make("pi05", named, checkpoint=str(GOLDEN / "pi05" / "checkpoint_lerobot"), state_in_prompt=True)
    assert policy.cameras == ("base_0_rgb", "left_wrist_0_rgb")
    only = {"observation.images.front": BASE}
    step_of(folder, PRE, "rename_observations_processor", lambda s: s["config"].update(rename_map=only))
    with pytest.raises(PolicyError, match="two of the task's cameras are one of the checkpoint's"):
        make("pi05", replace(SPEC, cameras=("front", "base_0_rgb")), checkpoint=str(folder), state_in_prompt=True)


def test_prompts_are_as_long_as_the_tokenizers_step_says(folder: Path) -> None:
    edit(folder / "config.json", lambda c: (c.pop("tokenizer_max_length"), c["architecture"].pop("max_token_len")))
    step_of(folder, PRE, "tokenizer_processor", lambda s: s["config"].update(max_length=60))
    assert built(folder)._observation(inputs_of(SPEC, 2, seed=1)).tokens.shape == (2, 60)


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_side_on_which_prompts_are_filled_up_does_not_matter(side: str, folder: Path) -> None:
    step_of(folder, PRE, "tokenizer_processor", lambda s: s["config"].update(padding_side=side))
    policy, inputs = built(folder), inputs_of(SPEC, 2, seed=1)
    seen = policy._observation(inputs)
    moved = replace(seen, tokens=seen.tokens.flip(1), counted=seen.counted.flip(1))
    length = int(seen.counted.sum(1).max())
    for row in range(2):  # the same words, at the other end
        n = int(seen.counted[row].sum())
        moved.tokens[row, -n:], moved.tokens[row, :-n] = seen.tokens[row, :n], 0
    assert length < seen.tokens.shape[1]
    x, t = torch.zeros(2, 6, 8), torch.full((2,), 0.7)
    with torch.no_grad():
        one, other = (velocity(policy.network, policy.network.prefix(each), seen.state, x, t) for each in (seen, moved))
    assert (one - other).abs().max() < 1e-5


def test_steps_that_do_nothing_here_are_passed(folder: Path) -> None:
    for name in ("observation_processor", "to_batch_processor_observation", "device_processor"):
        insert(folder, PRE, 1, {"registry_name": name, "config": {}})
    insert(folder, PRE, 1, {"registry_name": "image_crop_resize_processor", "config": {"crop_params_dict": None}})
    insert(folder, PRE, 1, {**RELATIVE, "config": {"enabled": False}})
    insert(folder, POST, 2, {"registry_name": "torch2numpy_action_processor", "config": {"squeeze_batch_dim": True}})
    inputs = inputs_of(SPEC, 2, seed=1)
    assert torch.equal(built(folder).act(inputs, None).chunk, plain().act(inputs, None).chunk)


# --- what is refused

REFUSED: dict[str, tuple[Change, str]] = {
    "an unknown step": (
        lambda f: insert(f, PRE, 1, {"registry_name": "my_step", "config": {"gain": 3}}),
        r"policy_preprocessor.json, step 1: 'my_step' with {'gain': 3} is not applied here; known are .*tokenizer_proc",
    ),
    "a class of somebody's": (
        lambda f: insert(f, POST, 0, {"class": "my.module.Step", "config": {}}),
        r"policy_postprocessor.json, step 0: 'my.module.Step'",
    ),
    "a crop": (
        lambda f: insert(
            f, PRE, 1, {"registry_name": "image_crop_resize_processor", "config": {"resize_size": [9, 9]}}
        ),
        "image_crop_resize_processor with .*resize_size.* is not applied here",
    ),
    "rotated pictures of LIBERO": (
        lambda f: insert(f, PRE, 0, {"registry_name": "libero_processor", "config": {}}), "'libero_processor'",
    ),
    "a parameter that is not known": (
        lambda f: step_of(f, PRE, "to_batch_processor", lambda s: s.update(config={"axis": 1})), "axis",
    ),
    "half precision": (
        lambda f: step_of(f, PRE, "device_processor", lambda s: s["config"].update(float_dtype="bfloat16")),
        "device_processor with .*bfloat16.* is not applied here",
    ),
    "relative, and not made absolute": (
        lambda f: insert(f, PRE, 2, RELATIVE), "makes actions relative, and none is enabled that makes them absolute",
    ),
    "absolute, and not relative": (
        lambda f: insert(f, POST, 1, ABSOLUTE), "makes actions absolute, and none is enabled that makes them relative",
    ),
    "config.json says relative": (
        lambda f: edit(f / "config.json", lambda c: c.update(use_relative_actions=True)),
        "use_relative_actions is True, and the steps of policy_preprocessor.json say False",
    ),
    "config.json excludes other joints": (
        lambda f: _all(
            f, relative, lambda f: edit(f / "config.json", lambda c: c.update(relative_exclude_joints=["x"]))
        ),
        r"relative_exclude_joints is \['x'\], and the step in policy_preprocessor.json has \['gripper'\]",
    ),
    "relative to the normalised state": (
        lambda f: _all(f, lambda f: insert(f, PRE, 3, RELATIVE), lambda f: insert(f, POST, 1, ABSOLUTE)),
        "relative_actions_processor.* comes after normalizer_processor",
    ),
    "two normalisers": (
        lambda f: edit(f / PRE, lambda raw: raw["steps"].insert(2, raw["steps"][2])), "there is one already",
    ),
    "no normaliser": (
        lambda f: edit(f / PRE, lambda raw: raw["steps"].pop(2)), "has no step normalizer_processor",
    ),
    "modes of config.json": (
        lambda f: edit(f / "config.json", lambda c: c["normalization_mapping"].update(STATE="MEAN_STD")),
        "STATE is normalised in several ways: 'QUANTILES' in .*; 'MEAN_STD' in .*config.json",
    ),
    "modes of the two processors": (
        lambda f: step_of(
            f, POST, "unnormalizer_processor", lambda s: s["config"]["norm_map"].update(ACTION="MIN_MAX")
        ),
        "ACTION is normalised in several ways",
    ),
    "a mode that is not known": (
        lambda f: step_of(f, PRE, "normalizer_processor", lambda s: s["config"]["norm_map"].update(STATE="LOG")), "LOG",
    ),
    "pictures by their mean": (
        lambda f: _visual(f), "pictures of observation.images.base_0_rgb are normalised by MEAN_STD",
    ),
    "statistics of another training": (
        lambda f: _scaled(f), "have different statistics of action",
    ),
    "a state file that is not there": (
        lambda f: next(f.glob("*_normalizer_processor.safetensors")).unlink(), "is missing",
    ),
    "a state file elsewhere": (
        lambda f: step_of(f, PRE, "normalizer_processor", lambda s: s.update(state_file="../x.safetensors")),
        "no safetensors file beside it",
    ),
    "a state that nobody reads": (
        lambda f: save_file({"x": torch.zeros(1)}, f / "policy_preprocessor_step_9_x.safetensors"),
        "policy_preprocessor_step_9_x.safetensors is there, and nothing reads it",
    ),
    "a length of prompts": (
        lambda f: edit(f / "config.json", lambda c: c.update(tokenizer_max_length=48)),
        "max_length is 56, and config.json's tokenizer_max_length 48",
    ),
    "another tokenizer": (
        lambda f: step_of(f, PRE, "tokenizer_processor", lambda s: s["config"].update(tokenizer_name="gpt2")),
        "tokenizer_name is 'gpt2'; known are PaliGemma's",
    ),
    "no state in the prompt": (
        lambda f: edit(f / PRE, lambda raw: raw["steps"].pop(3)), "has no step pi05_prepare_state",
    ),
    "prompts before the state is normalised": (
        lambda f: edit(f / PRE, lambda raw: raw["steps"].insert(2, raw["steps"].pop(3))),
        "normalizer_processor.* comes after pi05_prepare_state",
    ),
    "one camera of two": (
        lambda f: step_of(f, PRE, "rename_observations_processor", lambda s: s["config"].update(
            rename_map={"observation.images.front": BASE})),
        "knows the camera front is observation.images.base_0_rgb, and has none for 'wrist'",
    ),
    "a camera that is not read": (
        lambda f: step_of(f, PRE, "rename_observations_processor", lambda s: s["config"].update(
            rename_map={"observation.images.front": "observation.images.top"})),
        "makes 'observation.images.top' of the camera 'front', which the checkpoint does not read",
    ),
    "one camera twice": (
        lambda f: step_of(f, PRE, "rename_observations_processor", lambda s: s["config"].update(
            rename_map={"observation.images.front": BASE, "observation.wrist": BASE})),
        "rename_map makes .* of two observations",
    ),
    "a state by another name": (
        lambda f: step_of(f, PRE, "rename_observations_processor", lambda s: s["config"].update(
            rename_map={"observation.state": "observation.joints"})),
        "rename_map makes 'observation.joints' of observation.state",
    ),
    "more cameras than it has": (
        lambda f: edit(f / "config.json", lambda c: [c["input_features"].pop(key) for key in (BASE, WRIST)]),
        "reads 1 cameras .*, the task gives front, wrist",
    ),
    "another robot's actions": (
        lambda f: edit(f / "config.json", lambda c: c["output_features"]["action"].update(shape=[6])),
        r"output_features has action of \[6\], and the task's has 7 numbers",
    ),
    "several observations": (lambda f: edit(f / "config.json", lambda c: c.update(n_obs_steps=2)), "n_obs_steps is 2"),
    "Aloha's joints": (lambda f: edit(f / "config.json", lambda c: c.update(adapt_to_pi_aloha=True)), "adapt_to_pi_al"),
    "a memory": (lambda f: edit(f / "config.json", lambda c: c.update(use_visual_memory=True)), "use_visual_memory"),
    "chunks that are blended": (
        lambda f: edit(f / "config.json", lambda c: c.update(rtc_config={"enabled": True})), "rtc_config is",
    ),
    "other periods of time": (
        lambda f: edit(f / "config.json", lambda c: c.update(max_period=8.0)), "max_period is 8.0",
    ),
    "an entry of the future": (
        lambda f: edit(f / "config.json", lambda c: c.update(use_telepathy=True)),
        "'use_telepathy' is True, an entry that is not known here",
    ),
    "pictures of another size": (
        lambda f: edit(f / "config.json", lambda c: c.update(image_resolution=[42, 42])), "to 42 pixels.* has 28",
    ),
    "pictures that are no squares": (
        lambda f: edit(f / "config.json", lambda c: c.update(image_resolution=[28, 42])), "brought to a square",
    ),
    "an adapter that is not there": (
        lambda f: edit(f / "config.json", lambda c: c.update(use_peft=True)), "use_peft is true, and no adapter_config",
    ),
    "openpi's statistics beside": (
        lambda f: (f / "norm_stats.json").write_text("{}"), "norm_stats.json is there, and nothing reads it",
    ),
}  # fmt: skip


def _all(folder: Path, *changes: Change) -> None:
    for change in changes:
        change(folder)


def _visual(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c["normalization_mapping"].update(VISUAL="MEAN_STD"))
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        step_of(folder, file, name, lambda s: s["config"]["norm_map"].update(VISUAL="MEAN_STD"))
    path = next(folder.glob("*_normalizer_processor.safetensors"))
    save_file({**load_file(path), f"{BASE}.mean": torch.zeros(3, 1, 1), f"{BASE}.std": torch.ones(3, 1, 1)}, path)


def _scaled(folder: Path) -> None:
    path = next(folder.glob("*_unnormalizer_processor.safetensors"))
    save_file({name: 2 * tensor for name, tensor in load_file(path).items()}, path)


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_applied_is_refused_by_name(what: str, folder: Path) -> None:
    change, message = REFUSED[what]
    change(folder)
    with pytest.raises(PolicyError, match=message) as refusal:
        built(folder)
    assert str(folder) in str(refusal.value)


def test_normalised_pictures_are_refused_with_units_of_demonstrations_too(folder: Path) -> None:
    _visual(folder)
    with pytest.raises(PolicyError, match="are normalised by MEAN_STD, which is not applied here"):
        built(folder, asset="demonstrations")


def test_actions_under_autocast_are_said(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(use_amp=True, use_relative_actions=False))
    (note,) = PI0.format.assumed({"checkpoint": str(folder)})
    assert "use_amp is true" in note


def test_entries_that_are_off_or_of_the_training_are_passed(folder: Path) -> None:
    off = {"use_telepathy": False, "notes": None, "optimizer_momentum": 0.9, "rtc_config": {"enabled": False}}
    edit(folder / "config.json", lambda c: c.update(off, num_inference_steps=4, compile_model=True))
    policy = make("pi05", checkpoint=str(folder), state_in_prompt=True, steps=None)
    assert policy.architecture()["steps"] == 4
    for name in ("train_config.json", "README.md", "tokenizer.json"):
        (folder / name).write_text("{}")
    (folder / "training_state").mkdir()
    (folder / "training_state" / "optimizer_state.safetensors").write_bytes(b"")
    shutil.copytree(GOLDEN / "pi05" / "checkpoint_lerobot", folder / "checkpoints" / "000100")
    (folder / "up").symlink_to(folder.parent)
    built(folder)
    (folder / "checkpoints" / "000100" / "config.json").unlink()
    with pytest.raises(PolicyError, match=r"000100/model.safetensors is there, and nothing reads it"):
        built(folder)


def test_times_of_imitation_are_those_that_config_json_says(folder: Path) -> None:
    edit(folder / "config.json", lambda c: c.update(time_sampling_beta_alpha=2.0, time_sampling_offset=0.0005))
    u = torch.linspace(0, 1, 5, dtype=torch.float64)
    assert torch.allclose(built(folder).times.of(u), 0.0005 + 0.999 * u**0.5)
    assert torch.allclose(make("pi0").times.of(u), 0.001 + 0.999 * u ** (1 / 1.5))
    edit(folder / "config.json", lambda c: c.update(time_sampling_beta_beta=2.0))
    with pytest.raises(PolicyError, match=r"times are drawn from Beta\(alpha, 1\) here"):
        built(folder)


def test_a_pi0s_prompt_ends_in_a_new_line(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "pi0" / "checkpoint_lerobot", tmp_path / "checkpoint"))
    step_of(folder, PRE, "pi0_new_line_processor", lambda s: s.update(registry_name="smolvla_new_line_processor"))
    make("pi0", checkpoint=str(folder))
    edit(folder / PRE, lambda raw: raw["steps"].pop(2))
    with pytest.raises(PolicyError, match="no pi0_new_line_processor comes before it"):
        make("pi0", checkpoint=str(folder))


def test_a_directory_of_lerobot_03_is_refused_with_the_way_to_convert_it(folder: Path) -> None:
    (folder / PRE).unlink()
    with pytest.raises(PolicyError, match="migrate_policy_normalization"):
        built(folder)


def test_excluded_joints_are_parts_of_names() -> None:
    step = Relative(enabled=True, exclude_joints=["grip", "", None], action_names=["left_GRIPPER.pos", "x", 3])
    assert step.dims(4) == (1, 2, 3)


# --- openpi's


def statistics(folder: Path) -> Path:
    return next(folder.rglob("norm_stats.json"))


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_normalisation_is_an_option_of_the_training(family: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / family / "checkpoint", tmp_path / "checkpoint"))
    stats = json.loads(statistics(folder).read_text())["norm_stats"]["actions"]
    mean, std, q01, q99 = (torch.tensor(stats[n][:7], dtype=torch.float64) for n in ("mean", "std", "q01", "q99"))
    scales = {"z-score": std + 1e-6, "quantile": (q99 - q01 + 1e-6) / 2}
    default, other = ("z-score", "quantile") if family == "pi0" else ("quantile", "z-score")
    for option, expected in (("auto", default), (default, default), (other, other)):
        policy = make(family, checkpoint=str(folder), normalisation=option, state_in_prompt=family == "pi05")
        assert torch.allclose(policy.units.action.scale, scales[expected], rtol=0, atol=1e-12)
        assert policy.architecture()["normalisation"] == expected
    (assumption,) = [s for s in PI0.format.assumed({"checkpoint": str(folder)}) if "z-scores" in s]
    assert f"{default} is taken" in assumption and f"policy.options.normalisation: {other}" in assumption
    assert not any("z-scores" in s for s in PI0.format.assumed({"checkpoint": str(folder), "normalisation": other}))


def test_normalisation_is_what_the_statistics_allow(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "pi05" / "checkpoint", tmp_path / "checkpoint"))
    edit(statistics(folder), lambda raw: [p.pop(n) for p in raw["norm_stats"].values() for n in ("q01", "q99")])
    options: Json = {"checkpoint": str(folder), "state_in_prompt": True}
    assert make("pi05", **options).architecture()["normalisation"] == "z-score"
    assert not any("z-scores" in sentence for sentence in PI0.format.assumed({"checkpoint": str(folder)}))
    with pytest.raises(PolicyError, match="has no q01 of numbers, which QUANTILES takes"):
        make("pi05", normalisation="quantile", **options)
    with pytest.raises(PolicyError, match="normalisation must be one of auto, z-score, quantile"):
        make("pi05", normalisation="minmax", **options)


def test_a_setting_is_required_where_no_file_says_if_actions_are_differences() -> None:
    openpi = {"checkpoint": str(GOLDEN / "pi0" / "checkpoint")}
    assert any("differences to the state" in sentence for sentence in PI0.format.assumed(openpi))
    assert not any("differences" in sentence for sentence in PI0.format.assumed({**openpi, "transforms": [DELTA]}))


def test_a_setting_is_required_where_no_file_says_which_lerobot_trained(folder: Path) -> None:
    (assumption,) = PI0.format.assumed({"checkpoint": str(folder)})
    assert "policy.options.prompt to lerobot-0.4" in assumption
    assert not PI0.format.assumed({"checkpoint": str(folder), "prompt": "lerobot-0.4"})
    edit(folder / "config.json", lambda c: c.update(use_relative_actions=False))  # an entry of 0.5.1 and later
    assert not PI0.format.assumed({"checkpoint": str(folder)}), "its processors say all"


def test_options_of_openpi_are_refused_where_processors_say_it(folder: Path) -> None:
    for options in ({"normalisation": "z-score"}, {"asset": "toy/libero"}):
        with pytest.raises(PolicyError, match="normalisation and asset are of openpi's checkpoints"):
            built(folder, **options)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"pi05": True}, "pi05 is True, and the checkpoint has no time_mlp_in"),
        ({"action_space": "joint"}, "'action_space' is 'joint', an entry that is not known here"),
    ],
)
def test_entries_of_openpis_config_are_compared(entries: Json, message: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(GOLDEN / "pi0" / "checkpoint", tmp_path / "checkpoint"))
    edit(folder / "config.json", lambda c: c.update(max_token_len=20, pytorch_compile_mode="x", dtype="bfloat16"))
    make("pi0", checkpoint=str(folder))
    edit(folder / "config.json", lambda c: c.update(entries))
    with pytest.raises(PolicyError, match=message):
        make("pi0", checkpoint=str(folder))


def test_a_saved_policy_is_no_checkpoint(tmp_path: Path) -> None:
    save(make("pi0", asset="demonstrations"), tmp_path / "saved")
    with pytest.raises(PolicyError, match=r"units.safetensors is there, and nothing reads it: .*embodied export"):
        make("pi0", checkpoint=str(tmp_path / "saved" / "policy"))
