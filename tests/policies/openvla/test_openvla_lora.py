"""Adapters: what they hang on, PEFT's layout in and out, merged export."""

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import policies
from policies import PolicyError
from policies.conformance import laws
from policies.contract import actor_parameters
from policies.files import ADAPTER_CONFIG
from policies.openvla.adapters import targets
from policies.openvla.model import load_model
from tests.policies.openvla.cases import CHUNK, ONE_ACTION, error, make, random_inputs
from tests.policies.openvla.tiny import write_tiny

PARTS = ["language", "projector", "vision"]
ADAPTER = "adapter_model.safetensors"
UNUSED = "vision_backbone.fused_featurizer.attn_pool.q"


def tuned(tiny, **options):
    """As after some training: no matrix of the adapter is zero."""
    return make("openvla", ONE_ACTION, tiny, **{"lora_rank": 3, "lora_alpha": 5.0, "lora_parts": PARTS, **options})


@pytest.fixture
def saved(tiny, tmp_path):
    """The adapter's directory, PEFT's alone."""
    policies.save(tuned(tiny), tmp_path / "run")
    folder = tmp_path / "adapter"
    shutil.copytree(tmp_path / "run/policy", folder)
    (folder / "config.json").unlink()
    return folder


def edit(folder, **entries):
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def test_adapters_hang_on_the_layers_that_matter(tiny):
    policy = tuned(tiny)
    adapted = {name for name, module in policy.model.named_modules() if hasattr(module, "lora_A")}
    plain = load_model(tiny)
    linear = {name for name, module in plain.named_modules() if isinstance(module, nn.Linear)}
    assert adapted == linear - {"language_model.lm_head"}
    assert not any(name.removesuffix(".weight") in adapted for name in plain.unused)
    trained = {name for name, p in policy.model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{side}.default.weight" for name in adapted for side in "AB"}
    assert all(p.dtype == torch.float32 for p in actor_parameters(policy))


def test_targets_name_no_dead_block_of_the_whole_model(tiny):
    import re

    model = load_model(tiny)
    pattern = re.compile(targets(model, PARTS))
    dead = [name.removesuffix(".weight") for name in model.unused]
    assert dead and not any(pattern.fullmatch(name) for name in dead)


def test_a_new_adapter_changes_nothing(tiny):
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    plain, fresh = (
        policies.build("openvla", ONE_ACTION, 0, checkpoint=str(tiny), lora_rank=rank).act(inputs, None)
        for rank in (0, 4)
    )
    assert error(plain.log_prob, fresh.log_prob) <= 1e-6


def test_actor_parameters_are_the_adapter(tiny):
    policy = tuned(tiny)
    trained = {id(p) for p in actor_parameters(policy)}
    assert trained == {id(p) for p in policy.model.parameters() if p.requires_grad}
    assert not trained & {id(p) for p in policy.value_head.parameters()}


def test_checkpoint_holds_the_adapter_and_not_the_base(tiny, tmp_path):
    policy = tuned(tiny)
    policies.save(policy, tmp_path)
    files = sorted(path.name for path in (tmp_path / "policy").iterdir())
    assert files == [ADAPTER_CONFIG, ADAPTER, "config.json", "dataset_statistics.json"]
    names = set(load_file(tmp_path / "policy" / ADAPTER))
    assert "base_model.model.language_model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert "base_model.model.vision_backbone.featurizer.blocks.0.attn.qkv.lora_B.weight" in names
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(policies.load(tmp_path).act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0


def test_peft_reads_the_adapter(tiny, saved):
    from peft import PeftModel

    read: Any = PeftModel.from_pretrained(load_model(tiny), str(saved))
    whole = read.base_model.model
    policy = tuned(tiny)
    pixels = torch.randn(2, 1, 6, 28, 28, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        assert error(whole.embed_images(pixels), policy.model.embed_images(pixels)) <= 1e-6
        tokens = torch.arange(6).view(2, 3)
        assert error(*(m.language_model(tokens).logits for m in (whole, policy.model))) <= 1e-5


def test_a_saved_adapter_is_the_adapter(tiny, saved):
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    loaded: Any = policies.build("openvla", ONE_ACTION, 9, checkpoint=str(tiny), adapter=str(saved))
    assert error(loaded.act(inputs, None).log_prob, tuned(tiny).act(inputs, None).log_prob) == 0
    assert {id(p) for p in actor_parameters(loaded)} == {id(p) for p in loaded.model.parameters() if p.requires_grad}


def test_a_run_that_began_with_an_adapter_loads_without_it(tiny, saved, tmp_path):
    policy = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    policies.save(policy, tmp_path / "run")
    shutil.rmtree(saved)
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(policies.load(tmp_path / "run").act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0


def test_dropout_of_a_saved_adapter_is_off(tiny, saved):
    edit(saved, lora_dropout=0.5)
    policy = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    laws.law_scores_agree(policy.train(), random_inputs(ONE_ACTION, 3, seed=1))


def test_an_adapter_that_also_hits_unused_layers_is_kept_whole(tiny, saved, tmp_path):
    """The references' lists of suffixes hit the last blocks and the pooling too."""
    tensors = load_file(saved / ADAPTER)
    for side, shape in (("A", (3, 24)), ("B", (24, 3))):
        tensors[f"base_model.model.{UNUSED}.lora_{side}.weight"] = torch.ones(shape)
    save_file(tensors, saved / ADAPTER)
    edit(saved, target_modules=["q", "proj", "qkv", "fc1", "fc2", "q_proj"], a_newer_setting=None)
    policy = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    assert not any("attn_pool" in name for name, _ in policy.named_parameters())
    policies.save(policy, tmp_path / "again")
    again = load_file(tmp_path / "again/policy" / ADAPTER)
    assert again.keys() == tensors.keys() and torch.equal(
        again[f"base_model.model.{UNUSED}.lora_A.weight"], torch.ones(3, 24)
    )
    loaded = policies.load(tmp_path / "again")
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(loaded.act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0


def test_an_adapter_on_the_head_counts(tiny, saved, tmp_path):
    g = torch.Generator().manual_seed(1)
    tensors = load_file(saved / ADAPTER)
    for side, shape in (("A", (3, 32)), ("B", (576, 3))):
        name = f"base_model.model.language_model.lm_head.lora_{side}.weight"
        tensors[name] = torch.randn(shape, generator=g)
    save_file(tensors, saved / ADAPTER)
    policy = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    policies.export(policy, tmp_path / "merged")
    merged = policies.build("openvla", ONE_ACTION, 0, checkpoint=str(tmp_path / "merged"))
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(merged.act(inputs, None).log_prob, policy.act(inputs, None).log_prob) <= 1e-4
    assert error(merged.act(inputs, None).log_prob, tuned(tiny).act(inputs, None).log_prob) > 1e-2


@pytest.mark.parametrize(("kind", "spec"), [("openvla", ONE_ACTION), ("openvla_oft", CHUNK)])
def test_merged_export_is_a_whole_checkpoint(tiny, tmp_path, kind, spec):
    policy = make(kind, spec, tiny, lora_rank=3, lora_parts=PARTS)
    policies.export(policy, tmp_path / "merged")
    merged: Any = policies.build(kind, spec, 0, checkpoint=str(tmp_path / "merged"))
    inputs = random_inputs(spec, 3, seed=1)
    assert error(merged.act(inputs, None).log_prob, policy.act(inputs, None).log_prob) <= 1e-5
    assert (
        error(merged.act(inputs, None).log_prob, make(kind, spec, tiny, lora_rank=0).act(inputs, None).log_prob) > 1e-3
    )
    kept = load_model(tiny)
    for name, tensor in kept.unused.items():
        assert torch.equal(tensor, merged.model.unused[name])


def test_export_in_bfloat16_rounds_once(tiny, tmp_path):
    policy = tuned(tiny, dtype="bfloat16")
    policies.export(policy, tmp_path)
    name = "projector.fc1"
    layer = policy.model.get_submodule(name)
    delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight * (5.0 / 3)
    exact = layer.base_layer.weight.float() + delta
    stored = load_model(tmp_path).get_parameter(f"{name}.weight")
    assert stored.dtype == torch.bfloat16 and torch.equal(stored, exact.bfloat16())


def test_an_adapter_trained_on_other_weights_is_refused(saved, tmp_path):
    other = write_tiny(tmp_path / "other", seed=2)
    with pytest.raises(
        PolicyError, match="an adapter of another base: it was trained on .*checkpoint, with other weights"
    ):
        make("openvla", ONE_ACTION, other, adapter=str(saved))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [({"width": 16}, r"is \[32, 3\], expected \[16, 3\]"), ({"layers": 1}, "which this model has not")],
)
def test_an_adapter_of_other_sizes_is_refused(saved, tmp_path, sizes, message):
    edit(saved, base_digest=None, base_model_name_or_path=None)
    other = write_tiny(tmp_path / "other", seed=2, **sizes)
    with pytest.raises(PolicyError, match=message):
        make("openvla", ONE_ACTION, other, adapter=str(saved))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"peft_type": "IA3"}, "only LORA adapters are supported, this one is 'IA3'"),
        ({"use_dora": True}, "use_dora is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changes the base"),
        ({"bias": "all"}, "adapters with biases are not supported"),
        ({"r": 0}, "an adapter of r=0 cannot be made"),
        ({"r": 7}, r"is \[3, .*\], expected \[7, "),
    ],
)
def test_other_adapters_are_refused(tiny, saved, entries, message):
    edit(saved, **entries)
    with pytest.raises(PolicyError, match=message):
        make("openvla", ONE_ACTION, tiny, adapter=str(saved))


def test_a_pickled_adapter_is_not_read(tiny, saved):
    (saved / ADAPTER).rename(saved / "adapter_model.bin")
    with pytest.raises(PolicyError, match="adapter_model.bin is a pickle, which is not read"):
        make("openvla", ONE_ACTION, tiny, adapter=str(saved))


def test_tensors_of_no_adapter_are_refused(tiny, saved):
    save_file(load_file(saved / ADAPTER) | {"base_model.model.projector.fc1.weight": torch.ones(1)}, saved / ADAPTER)
    with pytest.raises(PolicyError, match="no low-rank adapter's: 'projector.fc1.weight'"):
        make("openvla", ONE_ACTION, tiny, adapter=str(saved))


def elsewhere(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "moved" / folder.name)


def equal(a, b):
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("options", [{}, {"lora_rank": 0}], ids=["adapter", "every weight"])
def test_a_checkpoint_goes_where_its_base_lies_elsewhere(tiny, tmp_path, options):
    policy = tuned(tiny, **options)
    policies.save(policy, tmp_path / "run")
    other = make(
        "openvla", ONE_ACTION, elsewhere(tiny, tmp_path), image_backend="pillow",
        **{"lora_rank": 3, "lora_alpha": 5.0, "lora_parts": PARTS, **options},
    )  # fmt: skip
    with torch.no_grad():
        for parameter in actor_parameters(other):
            parameter.add_(0.1)
    assert not equal(policy, other)
    policies.load_into(other, tmp_path / "run")
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert equal(policy, other) and error(other.act(inputs, None).chunk, policy.act(inputs, None).chunk) == 0


def test_a_checkpoint_goes_where_the_adapter_it_began_with_lies_elsewhere(tiny, saved, tmp_path):
    policy = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    policies.save(policy, tmp_path / "next")
    other = policies.build(
        "openvla", ONE_ACTION, 1, checkpoint=str(tiny), adapter=str(elsewhere(saved, tmp_path)), value_widths=[16]
    )
    assert not equal(policy, other)
    policies.load_into(other, tmp_path / "next")
    assert equal(policy, other)


def test_another_base_is_still_refused(tiny, tmp_path):
    policies.save(tuned(tiny), tmp_path / "run")
    other = tuned(write_tiny(tmp_path / "other", seed=2))
    with pytest.raises(PolicyError, match="an adapter of another base"):
        policies.load_into(other, tmp_path / "run")


def test_an_adapter_that_counts_otherwise_is_refused(tiny, saved, tmp_path):
    policies.save(make("openvla", ONE_ACTION, tiny, adapter=str(saved)), tmp_path / "next")
    edit(saved, lora_alpha=6.0)
    other = make("openvla", ONE_ACTION, tiny, adapter=str(saved))
    with pytest.raises(PolicyError, match="another adapter: lora_alpha is 5.0, expected 6.0"):
        policies.load_into(other, tmp_path / "next")


@pytest.mark.parametrize("adapted", [False, True], ids=["whole into adapter", "adapter into whole"])
def test_an_adapter_and_a_whole_network_are_not_mistaken_for_each_other(tiny, saved, tmp_path, adapted):
    ways = [make("openvla", ONE_ACTION, tiny, **options) for options in ({}, {"adapter": str(saved)})]
    policies.save(ways[adapted], tmp_path / "next")
    with pytest.raises(PolicyError, match=str(tmp_path / "next/policy")):
        policies.load_into(ways[not adapted], tmp_path / "next")


def test_what_an_older_checkpoint_lacks_is_the_default(tiny, tmp_path):
    policies.save(tuned(tiny), tmp_path)
    path = tmp_path / "policy/config.json"
    config = json.loads(path.read_text())
    for name in ("prompt", "environment_jpeg", "value_per_action"):
        del config["architecture"][name]
    path.write_text(json.dumps(config))
    policies.load_into(tuned(tiny), tmp_path)
    with pytest.raises(PolicyError, match=r"architecture.environment_jpeg is False, expected True\."):
        policies.load_into(tuned(tiny, environment_jpeg=True), tmp_path)


@pytest.mark.slow
def test_load_into_refuses_another_adapter(tiny, tmp_path):
    policies.save(tuned(tiny), tmp_path)
    with pytest.raises(PolicyError, match="architecture.lora_rank is 3, expected 4"):
        policies.load_into(tuned(tiny, lora_rank=4), tmp_path)
    laws.law_saved_policy_is_the_policy(tuned(tiny), random_inputs(ONE_ACTION, 3, seed=1))


@pytest.mark.parametrize(("kind", "spec"), [("openvla", ONE_ACTION), ("openvla_oft", CHUNK)])
def test_without_its_adapter_a_policy_is_one_that_never_had_any(kind, spec, tiny):
    inputs = random_inputs(spec, 3, seed=1)
    policy = make(kind, spec, tiny, lora_rank=3, lora_parts=PARTS)
    plain = policies.build(kind, spec, 0, checkpoint=str(tiny), value_widths=[16])
    plain.value_head.load_state_dict(policy.value_head.state_dict())
    base = {name.replace(".base_layer", ""): t for name, t in policy.state_dict().items() if ".lora_" not in name}
    plain.load_state_dict(base)
    noise = torch.randn(3, policy.noise_dim, generator=torch.Generator().manual_seed(2))
    trace = policy.act(inputs, noise).trace
    trained = {name: p.requires_grad for name, p in policy.named_parameters()}
    before, expected = (p.evaluate(inputs, trace).log_prob for p in (policy, plain))
    with policy.without_adapter():
        found, acted = policy.evaluate(inputs, trace).log_prob, policy.act(inputs, noise)
    plain_action = plain.act(inputs, noise)
    assert torch.equal(found, expected) and torch.equal(acted.log_prob, plain_action.log_prob)
    assert torch.equal(acted.chunk, plain_action.chunk)
    assert not torch.equal(found, before), "the adapter does nothing: nothing was tested"
    again = policy.evaluate(inputs, trace).log_prob
    assert torch.equal(again, before)
    assert {name: p.requires_grad for name, p in policy.named_parameters()} == trained
    again.sum().backward()
    assert all(p.grad is not None for p in actor_parameters(policy))


def test_after_an_error_within_the_adapter_acts_again(tiny):
    policy = tuned(tiny)
    inputs = random_inputs(ONE_ACTION, 2, seed=1)
    before = policy.act(inputs, None).log_prob
    with pytest.raises(ZeroDivisionError), policy.without_adapter():
        raise ZeroDivisionError
    assert torch.equal(policy.act(inputs, None).log_prob, before)


def test_an_adapter_is_new_until_it_changes_something(tiny):
    options = {"checkpoint": str(tiny), "lora_rank": 2, "value_widths": [16]}
    assert policies.build("openvla", ONE_ACTION, 0, **options).has_new_adapter
    assert not tuned(tiny).has_new_adapter
    whole = policies.build("openvla", ONE_ACTION, 0, checkpoint=str(tiny))
    assert not whole.has_new_adapter
    with pytest.raises(PolicyError, match="no adapter"):
        whole.without_adapter()
