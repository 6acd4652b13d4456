"""Adapters of pi0 that PEFT itself writes, as LeRobot's `use_peft` leaves them and as openpi's network would."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import policies
from policies import PolicyError, load, load_into, save
from policies.conformance import laws
from policies.torchvision_operators import import_torchvision
from tests.policies.pi0.cases import GOLDEN, SPEC, inputs_of, make
from tests.policies.pi0.test_pi0_processors import POST, PRE, edit, step_of
from tests.variants import often

import_torchvision()
from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

LEROBOTS = (
    r"(.*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.(state_proj|action_in_proj|action_out_proj|"
    r"action_time_mlp_in|action_time_mlp_out))"
)
"""The target modules that LeRobot 0.5 and 0.6 have for pi0 and pi0.5."""
LISTED = ["q_proj", "v_proj", "fc1", "projector.linear", "multi_modal_projector.linear"]
FAMILIES = ("pi0", "pi05")


class Stand(nn.Module):
    """A tree of linear layers that have the names and weights of a checkpoint's matrices: what PEFT wraps."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.config = {"model_type": "custom"}
        self.matrices = {n: t for n, t in load_file(folder / "model.safetensors").items() if t.dim() == 2}
        for name, tensor in self.matrices.items():
            *way, last, kind = name.split(".")
            within: nn.Module = self
            for part in way:
                if not hasattr(within, part):
                    within.add_module(part, nn.Module())
                within = getattr(within, part)
            linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False)
            linear.weight = nn.Parameter(tensor.float())
            assert kind == "weight"
            within.add_module(last, linear)


def peft_adapter(base: Path, target: Path, **config: Any) -> dict[str, torch.Tensor]:
    """An adapter of random matrices as PEFT saves it; returns the base's matrices with it, as PEFT merges them."""
    stand = Stand(base)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        lora_config = LoraConfig(
            **{"r": 2, "lora_alpha": 6, "target_modules": LEROBOTS, "init_lora_weights": False, **config}
        )
        model = get_peft_model(stand, lora_config)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data *= 0.2
    model.peft_config["default"].base_model_name_or_path = str(base)
    model.save_pretrained(str(target))
    merged = model.merge_and_unload().state_dict()
    return {name: merged[name].detach().contiguous() for name in stand.matrices}


def merged_checkpoint(base: Path, matrices: dict[str, torch.Tensor], target: Path) -> Path:
    shutil.copytree(base, target)
    path = target / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    save_file(tensors | matrices, path, {"format": "pt"})
    return target


def described(base: Path, adapter: Path) -> Path:
    """Beside the adapter what LeRobot's training writes: configuration and processors."""
    for path in base.glob("policy_*"):
        shutil.copyfile(path, adapter / path.name)
    shutil.copyfile(base / "config.json", adapter / "config.json")
    edit(adapter / "config.json", lambda c: c.update(use_peft=True, pretrained_path=str(base)))
    (adapter / "train_config.json").write_text("{}")
    return adapter


def made(family: str, **options: Any) -> Any:
    return make(family, SPEC, **{"state_in_prompt": family == "pi05", **options})


COUNTED: dict[str, dict[str, Any]] = {
    "list": {},
    "rslora": {"use_rslora": True},
    "patterns": {
        "rank_pattern": {"gemma_expert.model.layers.0.self_attn.q_proj": 4, "fc1": 1},
        "alpha_pattern": {"v_proj": 9},
    },
}
LAYOUTS = ("checkpoint", "checkpoint_lerobot")
EACH_ONCE = [
    ("pi0", "checkpoint", "patterns"),
    ("pi05", "checkpoint_lerobot", "rslora"),
    ("pi05", "checkpoint", "list"),
]
EVERY = [(family, layout, counted) for counted in COUNTED for family in FAMILIES for layout in LAYOUTS]


@pytest.mark.parametrize(("family", "layout", "counted"), often(EACH_ONCE, EVERY))
def test_what_peft_saves_counts_as_peft_counts_it(family: str, layout: str, counted: str, tmp_path: Path) -> None:
    config = {"target_modules": LISTED, **COUNTED[counted]}
    base = GOLDEN / family / layout
    merged = merged_checkpoint(base, peft_adapter(base, tmp_path / "adapter", **config), tmp_path / "merged")
    policy, inputs = made(family, checkpoint=str(base), adapter=str(tmp_path / "adapter")), inputs_of(SPEC, 2, seed=1)
    expected = made(family, checkpoint=str(merged)).act(inputs, None).chunk
    assert (policy.act(inputs, None).chunk - expected).abs().max() < 1e-4
    assert (expected - made(family, checkpoint=str(base)).act(inputs, None).chunk).abs().max() > 1e-3
    assert policy.adapted and all("lora_" in n for n, p in policy.network.named_parameters() if p.requires_grad)
    policies.export(policy, tmp_path / "exported")
    found, wanted = (load_file(folder / "model.safetensors") for folder in (tmp_path / "exported", merged))
    first = load_file(base / "model.safetensors")
    adapted = {n for n, t in wanted.items() if not torch.equal(t, first[n])}
    assert adapted == {n for n, t in found.items() if not torch.equal(t, first[n])}, "only what is adapted changes"
    assert all((found[name] - wanted[name]).abs().max() < 1e-6 for name in adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_lerobots_directory_of_an_adapter_brings_its_base_and_its_own_processors(family: str, tmp_path: Path) -> None:
    base = GOLDEN / family / "checkpoint_lerobot"
    merged = merged_checkpoint(base, peft_adapter(base, tmp_path / "adapter"), tmp_path / "merged")
    adapter = described(base, tmp_path / "adapter")
    for folder in (adapter, merged):  # other statistics than the base's
        for path in folder.glob("policy_*.safetensors"):
            save_file({name: 1.5 * tensor for name, tensor in load_file(path).items()}, path)
    inputs = inputs_of(SPEC, 2, seed=1)
    expected = made(family, checkpoint=str(merged)).act(inputs, None).chunk
    policy = made(family, checkpoint=str(adapter))
    again = made(family, checkpoint=str(base), adapter=str(adapter))
    for each in (policy, again):
        assert (each.act(inputs, None).chunk - expected).abs().max() < 1e-4
    assert policy.architecture()["checkpoint"] == str(base.resolve())
    laws.perturb(policy, 0.02, seed=2)
    save(policy, tmp_path / "saved")
    policies.export(policy, tmp_path / "exported")
    shutil.rmtree(adapter)
    copied = load(tmp_path / "saved")
    assert torch.equal(copied.act(inputs, None).chunk, policy.act(inputs, None).chunk)
    exported = made(family, checkpoint=str(tmp_path / "exported"))
    assert not json.loads((tmp_path / "exported" / "config.json").read_text())["use_peft"]
    assert (exported.act(inputs, None).chunk - policy.act(inputs, None).chunk).abs().max() < 1e-4
    # What is saved is such a directory again, which PEFT adds to LeRobot's network.
    stand = PeftModel.from_pretrained(Stand(base), str(tmp_path / "saved" / "policy")).merge_and_unload().state_dict()
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    adapted = [name for name in stand if not torch.equal(stand[name], load_file(base / "model.safetensors")[name])]
    assert adapted and all((stand[name] - tensors[name]).abs().max() < 1e-6 for name in adapted)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_new_adapter_is_one_of_lerobots_network(family: str, tmp_path: Path) -> None:
    base = GOLDEN / family / "checkpoint_lerobot"
    policy = made(family, checkpoint=str(base), lora_rank=2, lora_parts=["vlm", "expert", "vision"])
    laws.perturb(policy, 0.05, seed=1)
    save(policy, tmp_path / "saved")
    policies.export(policy, tmp_path / "exported")
    folder = str(tmp_path / "saved" / "policy")
    stand = PeftModel.from_pretrained(Stand(base), folder).merge_and_unload().state_dict()
    tensors = load_file(tmp_path / "exported" / "model.safetensors")
    assert all((tensor - tensors[name]).abs().max() < 1e-6 for name, tensor in stand.items())


def test_an_adapter_is_trained_further_and_loaded_into_its_like(tmp_path: Path) -> None:
    base = GOLDEN / "pi0" / "checkpoint"
    peft_adapter(base, tmp_path / "adapter", target_modules=LISTED)
    options = {"checkpoint": str(base), "adapter": str(tmp_path / "adapter")}
    policy, other = made("pi0", **options), made("pi0", **options)
    assert policy.trains_prefix, "adapters hang on the vision-language model"
    inputs, noise = inputs_of(SPEC, 2, seed=1), laws.random_noise(policy, 2, 1)
    action = policy.act(inputs, noise)
    loss = policy.evaluate(inputs, action.trace).log_prob.sum()
    loss.backward()
    assert any(p.grad is not None and p.grad.any() for n, p in policy.named_parameters() if "lora_A" in n)
    laws.perturb(policy, 0.02, seed=3)
    save(policy, tmp_path / "saved")
    load_into(other, tmp_path / "saved")
    assert torch.equal(other.act(inputs, None).chunk, policy.act(inputs, None).chunk)
    peft_adapter(base, tmp_path / "louder", target_modules=LISTED, lora_alpha=20)
    louder = made("pi0", checkpoint=str(base), adapter=str(tmp_path / "louder"))
    with pytest.raises(PolicyError, match="is another adapter: lora_alpha is 6, expected 20"):
        load_into(louder, tmp_path / "saved")


def test_the_experts_unused_head_may_be_adapted_and_is_kept(tmp_path: Path) -> None:
    """No output depends on it; PEFT's lists of suffixes hit it."""
    base = GOLDEN / "pi0" / "checkpoint_lerobot"
    peft_adapter(base, tmp_path / "adapter", target_modules=["q_proj", "gemma_expert.lm_head"])
    policy = made("pi0", checkpoint=str(base), adapter=str(tmp_path / "adapter"))
    save(policy, tmp_path / "saved")
    stored = load_file(tmp_path / "saved" / "policy" / "adapter_model.safetensors")
    assert any("gemma_expert.lm_head" in name for name in stored)
    assert load(tmp_path / "saved").adapted


def changed(name: str, value: Any) -> Any:
    return lambda folder: edit(folder / "adapter_config.json", lambda c: c.update({name: value}))


def _foreign(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({name.replace("gemma_expert", "gemma_artist"): t for name, t in load_file(path).items()}, path)


def _half(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: tensors[name] for name in sorted(tensors)[1:]}, path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("use_dora", True), "use_dora is not supported"),
        (changed("modules_to_save", ["action_in_proj"]), "modules_to_save is not supported"),
        (changed("peft_type", "LOHA"), "only LORA adapters are supported"),
        (changed("init_lora_weights", "pissa"), "changes the base"),
        (changed("base_model_name_or_path", "lerobot/pi0_fast"), "it names 'lerobot/pi0_fast'"),
        (_foreign, "it adapts .*gemma_artist.*, which this model has not"),
        (_half, "half an adapter"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "adapter_model.safetensors is missing"),
        (lambda folder: (folder / "adapter_config.json").unlink(), "has no adapter_config.json"),
        (lambda folder: shutil.rmtree(folder), r"policy.options.adapter: .* is not a folder here"),
        (lambda folder: (folder / POST).write_text("{}"), "processors or statistics and no config.json"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(change: Any, message: str, tmp_path: Path) -> None:
    base = GOLDEN / "pi0" / "checkpoint_lerobot"
    peft_adapter(base, tmp_path / "adapter")
    change(tmp_path / "adapter")
    with pytest.raises(PolicyError, match=message):
        made("pi0", checkpoint=str(base), adapter=str(tmp_path / "adapter"))


def test_an_adapter_beside_weights_is_used_or_refused(tmp_path: Path) -> None:
    base = Path(shutil.copytree(GOLDEN / "pi0" / "checkpoint", tmp_path / "base"))
    peft_adapter(base, base, target_modules=LISTED)
    with pytest.raises(PolicyError, match=r"adapter_.*is there, and nothing reads it: set policy.options.adapter to"):
        made("pi0", checkpoint=str(base))
    assert made("pi0", checkpoint=str(base), adapter=str(base)).adapted
    with pytest.raises(PolicyError, match="lora_rank is for a new adapter or adapter for a saved one"):
        made("pi0", checkpoint=str(base), adapter=str(base), lora_rank=2)


def test_an_adapter_whose_base_is_not_here_says_what_to_set(tmp_path: Path) -> None:
    base = GOLDEN / "pi05" / "checkpoint_lerobot"
    peft_adapter(base, tmp_path / "adapter")
    adapter = described(base, tmp_path / "adapter")
    edit(adapter / "adapter_config.json", lambda c: c.update(base_model_name_or_path="lerobot/pi05_base"))
    with pytest.raises(PolicyError, match="its base 'lerobot/pi05_base' is not a folder here: set"):
        made("pi05", checkpoint=str(adapter))
    with pytest.raises(PolicyError, match="it names 'lerobot/pi05_base'.*any_base to true"):
        made("pi05", checkpoint=str(base), adapter=str(adapter))
    assert made("pi05", checkpoint=str(base), adapter=str(adapter), any_base=True).adapted


def test_an_adapter_is_not_added_twice(tmp_path: Path) -> None:
    base = GOLDEN / "pi0" / "checkpoint"
    config = {"target_modules": LISTED, "r": 4, "lora_alpha": 80}
    matrices = peft_adapter(base, tmp_path / "adapter", **config)
    merged = merged_checkpoint(base, matrices, tmp_path / "merged")
    edit(tmp_path / "adapter" / "adapter_config.json", lambda c: c.update(base_model_name_or_path=None))
    made("pi0", checkpoint=str(base), adapter=str(tmp_path / "adapter"))
    with pytest.raises(PolicyError, match="was merged into the weights of .* already"):
        made("pi0", checkpoint=str(merged), adapter=str(tmp_path / "adapter"))


def test_processors_of_an_adapter_count_where_they_differ(tmp_path: Path) -> None:
    base = GOLDEN / "pi05" / "checkpoint_lerobot"
    peft_adapter(base, tmp_path / "adapter")
    adapter = described(base, tmp_path / "adapter")
    step_of(adapter, PRE, "tokenizer_processor", lambda s: s["config"].update(padding_side="left"))
    insert = {"registry_name": "my_step", "config": {}}
    edit(adapter / PRE, lambda raw: raw["steps"].append(insert))
    with pytest.raises(PolicyError, match="adapter/policy_preprocessor.json, step 6: 'my_step'"):
        made("pi05", checkpoint=str(base), adapter=str(adapter))
