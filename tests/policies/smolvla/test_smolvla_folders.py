"""Folders of SmolVLA, read, saved and exported: LeRobot's old and new, backbones, adapters, random weights."""

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
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError, PolicySpec, load, save
from policies.checkpoint import load_into
from policies.conformance import laws
from policies.lerobot.processors import POST, PRE
from policies.registry import check, kinds_that_read, policy_kind
from policies.smolvla.backbone import PUBLISHED
from policies.smolvla.sizes import write_random
from tests.policies.smolvla.cases import GOLDEN, SPEC, edit, inputs_of, make, of_lerobot_03

FORM = policy_kind("smolvla").format


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the checkpoint."""
    return Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "checkpoint"))


def step_of(folder: Path, name: str, change: Callable[[dict[str, Any]], object], file: str = PRE) -> None:
    """Change the parameters of a processor's step."""
    raw = json.loads((folder / file).read_text())
    change(next(step["config"] for step in raw["steps"] if step["registry_name"] == name))
    (folder / file).write_text(json.dumps(raw))


def acts(policy: Any, seed: int = 1) -> torch.Tensor:
    return policy.act(inputs_of(policy.spec, 3, seed), laws.random_noise(policy, 3, seed)).chunk


# --- LeRobot's folders


def test_a_folder_is_known_by_its_type() -> None:
    assert kinds_that_read({"type": "smolvla"}) == ["smolvla"]
    with pytest.raises(PolicyError, match="is of smolvla, and policy.kind is pi0: set policy.kind to smolvla"):
        check("pi0", {"checkpoint": str(GOLDEN / "checkpoint")})


@pytest.mark.parametrize("prefix", ["", "_orig_mod."], ids=["plain", "compiled"])
def test_statistics_among_the_weights_are_those_of_processors(prefix: str, folder: Path) -> None:
    of_lerobot_03(folder)
    if prefix:
        tensors = load_file(folder / "model.safetensors")
        renamed = {re.sub(r"^model\.", f"model.{prefix}", name): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors")
    old, new = make(checkpoint=str(folder)), make()
    assert old.source.processors is None
    for name, tensor in new.units.state_dict().items():
        torch.testing.assert_close(old.units.get_buffer(name), tensor, rtol=1e-7, atol=1e-9)
    assert (acts(old) - acts(new)).abs().max() < 1e-5


def test_an_old_folder_is_saved_and_exported_as_a_new_one(folder: Path, tmp_path: Path) -> None:
    of_lerobot_03(folder)
    old = make(checkpoint=str(folder))
    save(old, tmp_path / "saved")
    assert torch.equal(acts(load(tmp_path / "saved")), acts(old))
    policies.export(old, tmp_path / "exported")
    exported = make(checkpoint=str(tmp_path / "exported"), backbone="")
    assert exported.source.processors is not None and (acts(exported) - acts(old)).abs().max() < 1e-5


@pytest.mark.parametrize(("mode", "first", "second"), [("MIN_MAX", "min", "max"), ("MEAN_STD", "mean", "std")])
def test_a_number_that_never_changes_has_a_unit(mode: str, first: str, second: str, folder: Path) -> None:
    modes = {"VISUAL": "IDENTITY", "STATE": mode, "ACTION": mode}
    edit(folder / "config.json", normalization_mapping=modes)
    for file in (PRE, POST):
        raw = json.loads((folder / file).read_text())
        for step in raw["steps"]:
            if "norm_map" in step["config"]:
                step["config"]["norm_map"] = modes
                tensors = load_file(folder / step["state_file"])
                for key in ("action", "observation.state"):
                    tensors[f"{key}.{second}"][1] = tensors[f"{key}.{first}"][1] if mode == "MIN_MAX" else 0.0
                save_file(tensors, folder / step["state_file"])
        (folder / file).write_text(json.dumps(raw))
    policy = make(checkpoint=str(folder))
    assert bool((policy.units.action.scale > 0).all()) and acts(policy).isfinite().all()


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"adapt_to_pi_aloha": True}, "adapt_to_pi_aloha is True, and only False is applied here"),
        ({"use_delta_joint_actions_aloha": True}, "use_delta_joint_actions_aloha is True, and only False is applied"),
        ({"n_obs_steps": 2}, "n_obs_steps is 2, and only 1 is applied here"),
        ({"min_period": 0.1}, "min_period is 0.1, and only 0.004 is applied here"),
        ({"n_action_steps": 7}, "n_action_steps is 7, and is of 1 to chunk_size, 6"),
        ({"num_vlm_layers": 7}, "num_vlm_layers is 7, and the backbone has 6 layers: set policy.options.backbone"),
        ({"num_expert_layers": 2}, "num_expert_layers is 2, and the vision-language model has 4"),
        ({"attention_mode": "causal"}, "attention_mode is 'causal' .*; known are cross_attn and self_attn"),
        ({"resize_imgs_with_padding": None}, "resize_imgs_with_padding is None; pictures are brought to"),
        ({"resize_imgs_with_padding": [64, 96]}, "gives 4 x 6 patches of 16 pixels, and the connector joins 2 x 2"),
        ({"expert_width_multiplier": 0.01}, "expert_width_multiplier 0.01 of a width of 48 is 0"),
        ({"use_peft": True}, "use_peft is true, and no adapter_config.json is there"),
        ({"rtc_config": {"enabled": True}}, "rtc_config is .*, and here an evaluation asks for real-time chunking"),
        ({"num_steps": 0}, "num_steps is 0, and is of 1 to 1000"),
        ({"memory": 3}, "'memory' is 3, an entry that is not known here"),
        ({"device_map": "auto"}, "'device_map' is 'auto', an entry that is not known here"),
        ({"input_features": {"observation.images.image": {"type": "PICTURE", "shape": [3, 64, 64]}}}, "type: .*VISUAL"),
        (
            {"input_features": {"observation.images.image": {"type": "VISUAL", "shape": [64, 64, 3]}}},
            r"have \[3, H, W\]",
        ),
        ({"tokenizer_max_length": 20}, "max_length is 24, and config.json's tokenizer_max_length 20"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(entries: dict[str, Any], message: str, folder: Path) -> None:
    edit(folder / "config.json", **entries)
    with pytest.raises(PolicyError, match=message):
        make(checkpoint=str(folder), steps=None)


@pytest.mark.parametrize("entries", [{"prefix_length": 60}, {"pad_language_to": "max_length"}, {"use_cache": False}])
def test_what_fills_a_prefix_up_changes_nothing(entries: dict[str, Any], folder: Path) -> None:
    edit(folder / "config.json", **entries)
    assert torch.equal(acts(make(checkpoint=str(folder))), acts(make()))


def test_a_checkpoint_without_statistics_learns_with_those_of_demonstrations(folder: Path) -> None:
    for path in folder.glob("policy_*"):
        path.unlink()
    with pytest.raises(PolicyError, match=r"has no statistics of observation\.state.* policy\.options\.asset to demo"):
        make(checkpoint=str(folder))
    assert acts(make(checkpoint=str(folder), asset="demonstrations")).isfinite().all()


def test_a_prompt_without_its_line_feed_is_refused(folder: Path) -> None:
    raw = json.loads((folder / PRE).read_text())
    raw["steps"] = [step for step in raw["steps"] if "new_line" not in step["registry_name"]]
    (folder / PRE).write_text(json.dumps(raw))
    with pytest.raises(PolicyError, match="no smolvla_new_line_processor comes before it"):
        make(checkpoint=str(folder))


@pytest.mark.parametrize(("chunk", "task", "notes"), [(4, "libero/libero_goal/1", 0), (3, "tabletop/reach", 1)])
def test_it_is_said_how_many_actions_are_executed(chunk: int, task: str, notes: int) -> None:
    named = {"checkpoint": str(GOLDEN / "checkpoint"), "backbone": str(GOLDEN / "vlm")}
    found = FORM.chunk_notes(named, chunk, [task])
    assert len(found) == notes
    assert notes == 0 or "executes 4 actions of a chunk (n_action_steps), and policy.chunk is 3" in found[0]


def test_fifty_actions_in_libero_are_warned_of(folder: Path) -> None:
    edit(folder / "config.json", chunk_size=50, n_action_steps=50)
    named = {"checkpoint": str(folder), "backbone": str(GOLDEN / "vlm")}
    (note,) = FORM.chunk_notes(named, 50, ["libero/libero_spatial/0"])
    assert "policy.chunk is 50" in note and "set policy.chunk to 10" in note
    assert not FORM.chunk_notes(named, 50, ["tabletop/reach"])


def normalise_pictures(folder: Path) -> None:
    """Have a mode for pictures, of which the folder has statistics."""
    for file, name in ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor")):
        step_of(folder, name, lambda said: said["norm_map"].update(VISUAL="MEAN_STD"), file)
    edit(folder / "config.json", normalization_mapping=dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD"))


@pytest.mark.parametrize("old", [False, True], ids=["processors", "buffers"])
@pytest.mark.parametrize("options", [{}, {"asset": "demonstrations"}], ids=["its own units", "demonstrations"])
def test_normalised_pictures_are_refused(old: bool, options: dict[str, Any], folder: Path) -> None:
    normalise_pictures(folder)
    if old:
        of_lerobot_03(folder)
    with pytest.raises(PolicyError, match="are normalised by MEAN_STD, which is not applied here: set VISUAL"):
        make(checkpoint=str(folder), **options)


def test_pictures_without_statistics_are_exported_as_they_are(folder: Path, tmp_path: Path) -> None:
    """LeRobot leaves them as they are, whatever the mode."""
    normalise_pictures(folder)
    for path in folder.glob("policy_*.safetensors"):
        save_file({name: tensor for name, tensor in load_file(path).items() if "images" not in name}, path)
    policy = make(checkpoint=str(folder), asset="demonstrations")
    policies.export(policy, tmp_path / "exported")
    again = make(checkpoint=str(tmp_path / "exported"), backbone="")
    assert (acts(again) - acts(policy)).abs().max() < 1e-5


def test_a_mode_of_an_unknown_kind_is_refused(folder: Path) -> None:
    step_of(folder, "normalizer_processor", lambda said: said["norm_map"].update(STAET="MEAN_STD"))
    with pytest.raises(PolicyError, match="STAET"):
        make(checkpoint=str(folder))
    of_lerobot_03(folder)
    edit(folder / "config.json", normalization_mapping={"STAET": "MEAN_STD", "ACTION": "MEAN_STD"})
    with pytest.raises(PolicyError, match=r"'STAET': .* gives kinds \(STATE, VISUAL"):
        make(checkpoint=str(folder))


def test_prompts_are_as_long_as_the_tokenizers_step_says(folder: Path) -> None:
    edit(folder / "config.json", tokenizer_max_length=...)
    step_of(folder, "tokenizer_processor", lambda said: said.update(max_length=96))
    policy = make(checkpoint=str(folder))
    assert policy.words(("open the drawer",), torch.zeros(1, 32))[0].shape == (1, 96)


def test_a_tokenizer_of_another_model_is_refused(folder: Path) -> None:
    step_of(folder, "tokenizer_processor", lambda said: said.update(tokenizer_name="google/paligemma-3b-pt-224"))
    with pytest.raises(PolicyError, match="tokenizer_name is 'google/paligemma-3b-pt-224', and the vision-language"):
        make(checkpoint=str(folder))
    for name in (None, str(GOLDEN / "vlm")):
        step_of(folder, "tokenizer_processor", lambda said, name=name: said.update(tokenizer_name=name))
        make(checkpoint=str(folder))


@pytest.mark.parametrize(
    ("entries", "options", "note"),
    [
        ({"use_amp": True}, {}, "LeRobot acts with this policy under autocast"),
        ({"load_vlm_weights": True}, {}, "the action expert in bfloat16"),
        ({"load_vlm_weights": True}, {"dtype": "bfloat16"}, None),
        ({"train_expert_only": False}, {}, "LeRobot trained expert, projections, language ("),
        ({"train_expert_only": False, "freeze_vision_encoder": False}, {}, "projections, language, vision ("),
        ({"train_expert_only": False}, {"train": ["expert"]}, None),
        ({"train_state_proj": False}, {}, "did not train the projection of the state"),
        ({}, {}, None),
    ],
)
def test_what_is_computed_or_trained_differently_is_said(
    entries: dict[str, Any], options: dict[str, Any], note: str | None, folder: Path
) -> None:
    edit(folder / "config.json", **entries)
    notes = FORM.assumed({"checkpoint": str(folder), "backbone": str(GOLDEN / "vlm"), **options})
    assert len(notes) == (note is not None) and all(str(note) in said for said in notes)


# --- backbones


def test_a_checkpoint_without_its_backbone_names_the_option_and_the_command(folder: Path) -> None:
    edit(folder / "config.json", vlm_model_name=PUBLISHED)
    step_of(folder, "tokenizer_processor", lambda said: said.update(tokenizer_name=PUBLISHED))
    with pytest.raises(PolicyError) as caught:
        make(checkpoint=str(folder), backbone="")
    assert "policy.options.backbone" in str(caught.value)
    command = f"hf download {PUBLISHED} config.json tokenizer.json tokenizer_config.json --local-dir backbone"
    assert command in str(caught.value)
    with pytest.raises(PolicyError, match="backbone: /nowhere is not a folder here; get both with"):
        make(backbone="/nowhere")


def test_a_backbone_is_found_within_the_checkpoint_by_its_name_and_in_the_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = acts(make())
    edit(folder / "config.json", vlm_model_name=str(GOLDEN / "vlm"))
    assert torch.equal(acts(make(checkpoint=str(folder), backbone="")), expected)
    edit(folder / "config.json", vlm_model_name="tiny/SmolVLM2-tiny-Instruct")
    cache = tmp_path / "hub"
    kept = cache / "models--tiny--SmolVLM2-tiny-Instruct"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    shutil.copytree(GOLDEN / "vlm", kept / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(cache), raising=False)
    found = make(checkpoint=str(folder), backbone="")
    assert cache in found.source.backbone.parents and torch.equal(acts(found), expected)
    shutil.copytree(GOLDEN / "vlm", folder / "vlm")
    within = make(checkpoint=str(folder), backbone="")
    assert within.source.backbone == folder / "vlm" and torch.equal(acts(within), expected)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"model_type": "idefics3"}, "is of 'idefics3': SmolVLA's vision-language model is a SmolVLM2"),
        ({"text_config": {"model_type": "gemma"}}, r"text_config\.model_type"),
        ({"text_config": {"hidden_act": "gelu"}}, r"text_config\.hidden_act"),
        ({"scale_factor": 0}, "scale_factor"),
        ({"text_config": {"hidden_size": 64}}, "the tensors are of another model than config.json says"),
        ({"text_config": {"vocab_size": 300}}, "has more tokens than the network|of another model"),
    ],
)
def test_another_backbone_is_refused(entries: dict[str, Any], message: str, tmp_path: Path) -> None:
    vlm = Path(shutil.copytree(GOLDEN / "vlm", tmp_path / "vlm"))
    raw = json.loads((vlm / "config.json").read_text())
    parts = {name: raw[name] | said if isinstance(said, dict) else said for name, said in entries.items()}
    (vlm / "config.json").write_text(json.dumps(raw | parts))
    with pytest.raises(PolicyError, match=message):
        make(backbone=str(vlm))


# --- saving and exporting


def test_a_saved_policy_needs_neither_checkpoint_nor_backbone(folder: Path, tmp_path: Path) -> None:
    vlm = Path(shutil.copytree(GOLDEN / "vlm", tmp_path / "vlm"))
    policy = make(checkpoint=str(folder), backbone=str(vlm), scored="learned", train=["expert", "vision"])
    laws.perturb(policy, 0.05, seed=2)
    save(policy, tmp_path / "saved")
    shutil.rmtree(folder)
    shutil.rmtree(vlm)
    again: Any = load(tmp_path / "saved")
    for name, tensor in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert torch.equal(acts(again), acts(policy))


def test_tensors_that_were_read_lie_where_drawn_ones_do(tmp_path: Path) -> None:
    """A file has them at any address, by which products of them are rounded otherwise."""
    folder = write_random(tmp_path / "random", "smolvla-tiny")
    drawn = make(replace(SPEC, action_dim=4, proprio_dim=5, cameras=("base",)), checkpoint=str(folder), backbone="")
    save(drawn, tmp_path / "saved")
    for policy in (drawn, load(tmp_path / "saved")):
        assert {parameter.data_ptr() % 64 for parameter in policy.parameters()} == {0}


def test_what_is_exported_has_every_tensor_of_the_checkpoint(tmp_path: Path) -> None:
    policies.export(make(), tmp_path / "exported")
    written, given = (load_file(f / "model.safetensors") for f in (tmp_path / "exported", GOLDEN / "checkpoint"))
    assert written.keys() == given.keys() and all(torch.equal(written[name], given[name]) for name in given)
    texts = [(f / "config.json").read_text() for f in (tmp_path / "exported", GOLDEN / "checkpoint")]
    # What is integrated and executed is the policy's.
    assert json.loads(texts[0]) == json.loads(texts[1]) | {"num_steps": 3, "n_action_steps": SPEC.chunk}


def test_units_of_demonstrations_are_exported_with_their_features(tmp_path: Path) -> None:
    """LeRobot cuts actions to the numbers that config.json says, and reads cameras by its names."""
    spec = PolicySpec(action_dim=4, chunk=3, proprio_dim=5, cameras=("base", "wrist"), image_size=48)
    policy = make(spec, asset="demonstrations")
    g = torch.Generator().manual_seed(1)
    actions, proprio = 3 + 2 * torch.randn(500, 4, generator=g), torch.randn(500, 5, generator=g)
    policy.adopt_units(actions, proprio)
    policies.export(policy, tmp_path / "exported")
    raw = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert raw["output_features"] == {"action": {"type": "ACTION", "shape": [4]}}
    assert list(raw["input_features"]) == ["observation.state", "observation.images.base", "observation.images.wrist"]
    again = make(spec, checkpoint=str(tmp_path / "exported"), backbone="")
    for name, tensor in policy.units.state_dict().items():
        torch.testing.assert_close(again.units.get_buffer(name), tensor, rtol=0, atol=1e-6)
    assert (acts(again) - acts(policy)).abs().max() < 1e-5
    save(policy, tmp_path / "saved")
    assert torch.equal(acts(load(tmp_path / "saved")), acts(policy))


@pytest.mark.parametrize("horizon", [3, 9])
def test_another_horizon_may_be_learned_with_the_same_weights(horizon: int, tmp_path: Path) -> None:
    spec = replace(SPEC, chunk=3, horizon=horizon)
    policy = make(spec)
    assert policy.spec.predicted == horizon and acts(policy).shape == (3, 3, 7)
    policies.export(policy, tmp_path / "exported")
    raw = json.loads((tmp_path / "exported" / "config.json").read_text())
    assert raw["chunk_size"] == horizon and raw["n_action_steps"] == 3
    again = make(replace(spec, horizon=0), checkpoint=str(tmp_path / "exported"), backbone="")
    assert torch.equal(acts(again), acts(policy))


# --- adapters


@pytest.mark.parametrize("parts", [["expert_qv", "projections"], ["expert", "language", "vision"]])
def test_an_adapter_is_all_that_is_saved_and_is_merged_into_what_is_exported(parts: list[str], tmp_path: Path) -> None:
    base, policy = make(), make(lora_rank=2, lora_alpha=4.0, lora_parts=parts)
    assert policy.has_new_adapter and torch.equal(acts(base), acts(policy))
    laws.perturb(policy, 0.05, seed=1)
    chunk = acts(policy)
    assert not policy.has_new_adapter and (chunk - acts(base)).abs().max() > 1e-3
    with policy.without_adapter():
        assert torch.equal(acts(base), acts(policy))
    save(policy, tmp_path / "saved")
    names = {path.name for path in (tmp_path / "saved" / "policy").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} < names and "model.safetensors" not in names
    stored = load_file(tmp_path / "saved" / "policy" / "adapter_model.safetensors")
    modules = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in stored}
    config = json.loads((tmp_path / "saved" / "policy" / "adapter_config.json").read_text())
    assert modules and all(re.fullmatch(config["target_modules"], module) for module in modules)
    assert modules < {name.removesuffix(".weight") for name in base.network.checkpoint_state()}
    assert torch.equal(acts(load(tmp_path / "saved")), chunk)
    policies.export(policy, tmp_path / "exported")
    merged = make(checkpoint=str(tmp_path / "exported"), backbone="")
    assert (acts(merged) - chunk).abs().max() < 1e-4
    laws.perturb(base, 0.05, seed=2)
    policies.export(base, tmp_path / "other")
    with pytest.raises(PolicyError, match="an adapter of another base"):
        other = make(checkpoint=str(tmp_path / "other"), lora_rank=2, lora_alpha=4.0, lora_parts=parts)
        load_into(other, tmp_path / "saved")


def test_default_adapters_are_lerobots(tmp_path: Path) -> None:
    """Layers that its `use_peft` adapts by default (SmolVLAPolicy._get_default_peft_targets)."""
    common = "state_proj|action_in_proj|action_out_proj|action_time_mlp_in|action_time_mlp_out"
    theirs = rf"(model\.vlm_with_expert\.lm_expert\..*\.(q|v)_proj|model\.({common}))"
    names = [name.removesuffix(".weight") for name in make().network.checkpoint_state()]
    policy = make(lora_rank=2)
    config = policy.network.adapter_config["target_modules"]
    adapted = {name for name in names if re.fullmatch(config, name)}
    assert len(adapted) == 4 * 2 + 5
    assert adapted == {name for name in names if re.fullmatch(theirs, name)}


def test_an_adapter_of_lerobots_is_read(folder: Path, tmp_path: Path) -> None:
    """`use_peft` leaves config.json and processors beside it, which then count; its base is named by its folder."""
    trained = make(lora_rank=4, lora_alpha=8.0)
    laws.perturb(trained, 0.05, seed=1)
    save(trained, tmp_path / "saved")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    stored = tmp_path / "saved" / "policy"
    shutil.copyfile(stored / "adapter_model.safetensors", adapter / "adapter_model.safetensors")
    raw = json.loads((stored / "adapter_config.json").read_text())
    raw |= {"base_model_name_or_path": str(folder), "modules_to_save": [], "task_type": None}
    (adapter / "adapter_config.json").write_text(json.dumps({k: v for k, v in raw.items() if k != "base_digest"}))
    for path in [folder / "config.json", *folder.glob("policy_*")]:
        shutil.copyfile(path, adapter / path.name)
    edit(adapter / "config.json", use_peft=True)
    ways: list[dict[str, Any]] = [{"checkpoint": str(folder), "adapter": str(adapter)}, {"checkpoint": str(adapter)}]
    for named in ways:
        policy = make(**named)
        assert policy.adapted and torch.equal(acts(policy), acts(trained))
        assert policy.trains_prefix is False
    with pytest.raises(PolicyError, match="lora_rank is for a new adapter"):
        make(adapter=str(adapter), lora_rank=2)


# --- random weights


def test_random_weights_are_those_of_their_seed(tmp_path: Path) -> None:
    folders = [write_random(tmp_path / str(i), "smolvla-tiny", i // 2) for i in range(3)]
    spec = replace(SPEC, action_dim=4, proprio_dim=5, cameras=("base",))
    states = [make(spec, checkpoint=str(f), backbone="", asset="demonstrations").network.state_dict() for f in folders]
    name = "mixture.expert.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(states[0][each], states[1][each]) for each in states[0])
    assert not torch.equal(states[0][name], states[2][name])
    with pytest.raises(PolicyError, match="unknown model 'smolvla-tinny'.*smolvla-tiny"):
        write_random(tmp_path / "3", "smolvla-tinny")
    policies.export(make(spec, checkpoint=str(folders[0]), backbone=""), tmp_path / "exported")
    assert acts(make(spec, checkpoint=str(tmp_path / "exported"), backbone="")).isfinite().all()


def test_embeddings_of_words_may_be_stored_as_the_head_that_is_tied_to_them(folder: Path, tmp_path: Path) -> None:
    expected, path = acts(make()), folder / "model.safetensors"
    tensors = load_file(path)
    vlm = "model.vlm_with_expert.vlm."
    tensors[f"{vlm}lm_head.weight"] = tensors.pop(f"{vlm}model.text_model.embed_tokens.weight")
    save_file(tensors, path)
    with pytest.raises(PolicyError, match="embed_tokens"):
        make(checkpoint=str(folder))
    tied = Path(shutil.copytree(GOLDEN / "vlm", tmp_path / "vlm"))
    edit(tied / "config.json", tie_word_embeddings=True)
    policy = make(checkpoint=str(folder), backbone=str(tied))
    assert torch.equal(acts(policy), expected)
    policies.export(policy, tmp_path / "exported")
    assert torch.equal(acts(make(checkpoint=str(tmp_path / "exported"), backbone="")), expected)
