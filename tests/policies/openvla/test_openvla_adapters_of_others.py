"""Adapters that strangers have made: whose base they are, whether they were merged, what PEFT may have put in them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG
from policies.lora import is_merged, scaling
from policies.openvla.adapters import attach_saved
from policies.openvla.model import load_model
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.policies.openvla.cases import ONE_ACTION, error, random_inputs
from tests.policies.openvla.oft_directory import CHUNK, STEP, stored, write_oft
from tests.policies.openvla.tiny import write_tiny
from tests.variants import often

LAYERS = r"language_model\.model\.layers\.\d+\.(self_attn\.(q|k|v|o)_proj|mlp\.(gate|up|down)_proj)|projector\.fc[123]"


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A base as it is published, to be read only."""
    return write_tiny(tmp_path_factory.mktemp("models") / "openvla-7b", seed=3)


@pytest.fixture(scope="module")
def made(base, tmp_path_factory) -> Path:
    """What PEFT itself saves of a training on the base: the adapter, and the base with it merged."""
    folder = tmp_path_factory.mktemp("made")
    peft_saves(base, folder, target_modules=LAYERS)
    return folder


def peft_saves(base: Path, folder: Path, *, size: float = 0.3, **config: Any) -> None:
    model: Any = load_model(base)  # before PEFT is imported: it mends a torchvision without operators
    from peft import LoraConfig, get_peft_model

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        adapted: Any = get_peft_model(Plain(model), LoraConfig(**{"r": 4, "lora_alpha": 8, **config}))
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.data.normal_(0, size)
    adapted.save_pretrained(folder / "adapter")
    merged = adapted.merge_and_unload().state_dict()
    shutil.copytree(base, folder / "merged")
    for path in sorted((folder / "merged").glob("*.safetensors")):
        tensors = load_file(path)
        names = {name: name.replace(".scale_factor", ".gamma") for name in tensors}
        save_file({name: merged.get(own, tensors[name]).contiguous() for name, own in names.items()}, path)


class Plain(torch.nn.Module):
    """The network under the checkpoint's names alone, as far as PEFT asks."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.vision_backbone, self.projector = model.vision_backbone, model.projector
        self.language_model = model.language_model

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.language_model.lm_head


@pytest.fixture
def adapter(made, tmp_path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(made / "adapter", tmp_path / "adapter"))


def edit(folder: Path, **entries: Any) -> None:
    path = folder / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def adapted(checkpoint: Path, adapter: Path, **options: Any) -> Any:
    return policies.build(
        "openvla", ONE_ACTION, 0, checkpoint=str(checkpoint), adapter=str(adapter), value_widths=[8], **options
    )


def plain(checkpoint: Path) -> Any:
    return policies.build("openvla", ONE_ACTION, 0, checkpoint=str(checkpoint), value_widths=[8])


def test_merged_by_peft_and_merged_here_are_equal(base, made, tmp_path):
    policy = adapted(base, made / "adapter")
    policies.export(policy, tmp_path / "out")
    ours, theirs, before = (stored(folder) for folder in (tmp_path / "out", made / "merged", base))
    changed = {name for name, tensor in ours.items() if not torch.equal(tensor, before[name])}
    tensors = load_file(made / "adapter" / ADAPTER)
    hit = {name.removeprefix("base_model.model.").split(".lora_")[0] + ".weight" for name in tensors}
    assert changed == hit
    assert all(error(ours[name], theirs[name]) <= 1e-6 for name in ours)
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(plain(made / "merged").act(inputs, None).log_prob, policy.act(inputs, None).log_prob) <= 1e-4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging_changes_the_adapted_matrices_alone(base, made, tmp_path, dtype):
    policies.export(adapted(base, made / "adapter", dtype=dtype), tmp_path / "out")
    kind = getattr(torch, dtype)
    tensors = load_file(made / "adapter" / ADAPTER)
    for name, tensor in stored(tmp_path / "out").items():
        at = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{at}.lora_A.weight" not in tensors:
            assert torch.equal(tensor, stored(base)[name].to(kind)), name
        else:
            delta = 2 * tensors[f"{at}.lora_B.weight"] @ tensors[f"{at}.lora_A.weight"]
            assert error(tensor, (stored(base)[name].to(kind).float() + delta).to(kind)) <= 1e-6, name


SAME = (
    None, "/elsewhere/openvla-7b/", "/home/a/.cache/huggingface/hub/models--openvla--openvla-7b/snapshots/31f090d",
    "", "openvla/openvla-7b", "/elsewhere/models/openvla-7b", "OpenVLA/OpenVLA-7B",
)  # fmt: skip


@pytest.mark.parametrize("named", often(SAME[:3], SAME))
def test_the_base_that_an_adapter_names(base, adapter, named):
    edit(adapter, base_model_name_or_path=named)
    adapted(base, adapter)


@pytest.mark.parametrize(
    "named",
    ["openvla/openvla-7b-finetuned-libero-spatial", "/elsewhere/openvla-7b-prismatic", "someone/openvla",
     "/home/a/.cache/huggingface/hub/models--a--openvla-v01-7b/snapshots/31f090d", "x" * 5000],
)  # fmt: skip
def test_another_base_is_refused(base, adapter, named):
    edit(adapter, base_model_name_or_path=named)
    with pytest.raises(PolicyError, match="is an adapter of another base: it names .*any_base to true"):
        adapted(base, adapter)
    adapted(base, adapter, any_base=True)


def test_a_fine_tune_is_not_its_base(base, adapter, tmp_path):
    """Its folder is called after the base, and so is what it was loaded from."""
    tuned = Path(shutil.copytree(base, tmp_path / "openvla-7b-finetuned-libero-spatial"))
    config = json.loads((tuned / "config.json").read_text())
    (tuned / "config.json").write_text(json.dumps(config | {"_name_or_path": "openvla/openvla-7b"}))
    edit(adapter, base_model_name_or_path="openvla/openvla-7b")
    with pytest.raises(PolicyError, match="another base"):
        adapted(tuned, adapter)
    renamed = tuned.rename(tmp_path / "base")
    adapted(renamed, adapter)


def test_names_in_the_hubs_cache(base, adapter, tmp_path):
    cached = tmp_path / "models--openvla--openvla-7b/snapshots/31f090d"
    shutil.copytree(base, cached)
    edit(adapter, base_model_name_or_path="openvla/openvla-7b")
    adapted(cached, adapter)
    edit(adapter, base_model_name_or_path="someone/openvla-7b")
    with pytest.raises(PolicyError, match="another base"):
        adapted(cached, adapter)


def test_a_named_folder_that_is_there_is_compared_by_its_tensors(base, adapter, tmp_path):
    edit(adapter, base_model_name_or_path=str(base))
    adapted(Path(shutil.copytree(base, tmp_path / "under_another_name")), adapter)
    other = write_tiny(tmp_path / "openvla-7b", seed=9)
    with pytest.raises(PolicyError, match="has other weights than"):
        adapted(other, adapter)


@pytest.mark.parametrize("named", [None, "openvla/openvla-7b"])
def test_an_adapter_that_was_merged_already_is_refused(made, adapter, tmp_path, named):
    edit(adapter, base_model_name_or_path=named)
    merged = Path(shutil.copytree(made / "merged", tmp_path / "openvla-7b"))
    with pytest.raises(PolicyError, match="was merged into the weights of .*openvla-7b already: it would count twice"):
        adapted(merged, adapter)
    adapted(merged, adapter, any_base=True)


def test_our_own_adapter_on_its_own_export(base, made, tmp_path):
    policy = adapted(base, made / "adapter")
    policies.save(policy, tmp_path / "run")
    policies.export(policy, tmp_path / "out")
    with pytest.raises(PolicyError, match="was merged into the weights of .*out already"):
        adapted(tmp_path / "out", tmp_path / "run/policy")


def test_tensors_tell_whether_an_adapter_is_merged():
    g = torch.Generator().manual_seed(1)
    adapter: dict[str, torch.Tensor] = {}
    state: dict[str, torch.Tensor] = {}
    config = {"lora_alpha": 16, "use_rslora": True, "alpha_pattern": {"layers.1": 4}}
    for layer in range(4):
        a, b, w = (0.1 * torch.randn(*shape, generator=g) for shape in ((8, 96), (64, 8), (64, 96)))
        adapter |= {f"layers.{layer}.lora_A.weight": a, f"layers.{layer}.lora_B.weight": b}
        state[f"layers.{layer}.weight"] = w
    assert [scaling(config, f"layers.{i}", 4) for i in (0, 1)] == [8.0, 2.0]
    assert is_merged(state, adapter, config) is False
    added = {
        f"layers.{i}.weight": state[f"layers.{i}.weight"]
        + scaling(config, f"layers.{i}", 8)
        * adapter[f"layers.{i}.lora_B.weight"]
        @ adapter[f"layers.{i}.lora_A.weight"]
        for i in range(4)
    }
    assert is_merged(added, adapter, config) is True
    assert is_merged({name: t.bfloat16() for name, t in added.items()}, adapter, config) is True
    none = {name: t if "lora_A" in name else torch.zeros_like(t) for name, t in adapter.items()}
    small = {name: t if "lora_A" in name else 1e-3 * t for name, t in adapter.items()}
    assert is_merged(state, none, config) is None and is_merged(state, small, config) is None
    assert is_merged({}, adapter, config) is None


def test_a_folder_beside_the_merged_weights(made, tmp_path):
    """OpenVLA-OFT with merge_lora_during_training leaves both."""
    folder = Path(shutil.copytree(made / "merged", tmp_path / "run--150000_chkpt"))
    shutil.copytree(made / "adapter", folder / "lora_adapter")
    plain(folder)
    with pytest.raises(PolicyError, match="it has merged into them.* Leave policy.options.adapter out"):
        adapted(folder, folder / "lora_adapter", any_base=True)


def test_a_folder_beside_its_base_is_not_forgotten(base, made, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "openvla-7b"))
    shutil.copytree(made / "adapter", folder / "lora_adapter")
    with pytest.raises(PolicyError, match="lora_adapter is not merged into the weights beside it"):
        plain(folder)
    adapted(folder, folder / "lora_adapter")


def test_an_adapter_among_the_weights_is_not_forgotten(base, made, tmp_path):
    folder = Path(shutil.copytree(base, tmp_path / "openvla-7b"))
    for name in (ADAPTER, ADAPTER_CONFIG):
        shutil.copyfile(made / "adapter" / name, folder / name)
    with pytest.raises(
        PolicyError, match=f"{ADAPTER} lies beside the weights, and is not used: set policy.options.ada"
    ):
        plain(folder)
    inputs = random_inputs(ONE_ACTION, 2, seed=1)
    policy = adapted(folder, folder)
    assert error(policy.act(inputs, None).log_prob, adapted(base, made / "adapter").act(inputs, None).log_prob) == 0
    policies.save(policy, tmp_path / "run")
    assert error(policies.load(tmp_path / "run").act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0


@pytest.mark.parametrize(
    "entries",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "lora_only"},
        {"lora_bias": True},
        {"layer_replication": [[0, 1]]},
        {"trainable_token_indices": [1]},
        {"target_parameters": ["mlp.weight"]},
        {"use_qalora": True},
        {"use_bdlora": {"a": 1}},
        {"arrow_config": {"a": 1}},
        {"alora_invocation_tokens": [1]},
        {"megatron_config": {"a": 1}},
        {"init_lora_weights": "olora"},
        {"init_lora_weights": "loftq"},
        {"eva_config": {"rho": 2}},
        {"something_of_next_year": 3},
    ],
)
def test_what_is_not_supported_is_refused_by_name(base, adapter, entries):
    edit(adapter, **entries)
    with pytest.raises(PolicyError, match=f"{ADAPTER_CONFIG}: .*({next(iter(entries))}|adapters with biases)"):
        adapted(base, adapter)


LISTED = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
    "projector.fc1",
    "projector.fc2",
    "projector.fc3",
]


@pytest.mark.parametrize(
    "config",
    [
        {"target_modules": ["q_proj", "v_proj"]},
        {"target_modules": "all-linear"},
        {"target_modules": ["q_proj", "fc1"], "exclude_modules": ["projector.fc1"]},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
        {"target_modules": LAYERS, "use_rslora": True},
        {"target_modules": LAYERS, "rank_pattern": {"projector.fc1": 2}, "alpha_pattern": {"projector.fc1": 32}},
        {"target_modules": ["q_proj"], "fan_in_fan_out": True},
    ],
    ids=["list", "all-linear", "exclude", "layers", "rslora", "patterns", "fan_in_fan_out"],
)
def test_what_peft_merges_is_what_the_adapter_computes(base, tmp_path, config):
    peft_saves(base, tmp_path, **config)
    edit(tmp_path / "adapter", base_model_name_or_path=None)
    inputs = random_inputs(ONE_ACTION, 2, seed=1)
    adapted_log_prob = adapted(base, tmp_path / "adapter").act(inputs, None).log_prob
    assert error(adapted_log_prob, plain(tmp_path / "merged").act(inputs, None).log_prob) <= 2e-4
    assert error(adapted_log_prob, plain(base).act(inputs, None).log_prob) > 1e-3


@pytest.mark.parametrize("targets", [LAYERS, LISTED], ids=["regex", "list"])
def test_missing_tensors_are_refused_by_name(base, adapter, targets):
    edit(adapter, target_modules=targets)
    adapted(base, adapter)
    tensors = load_file(adapter / ADAPTER)
    layer = "language_model.model.layers.1.mlp.up_proj"
    rest = {name: tensor for name, tensor in tensors.items() if layer not in name}
    assert len(rest) == len(tensors) - 2
    save_file(rest, adapter / ADAPTER)
    with pytest.raises(PolicyError, match=f"is not whole: target_modules .* names '{layer}'"):
        adapted(base, adapter)


def test_half_an_adapter_is_refused(base, adapter):
    tensors = load_file(adapter / ADAPTER)
    name = min(name for name in tensors if "lora_B" in name)
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, adapter / ADAPTER)
    with pytest.raises(PolicyError, match=f"differ in '{name.removeprefix('base_model.model.')}'"):
        adapted(base, adapter)


@pytest.mark.parametrize("pattern", ["(" * 30, 5], ids=["broken", "number"])
def test_patterns_that_are_none_are_refused(base, adapter, pattern):
    edit(adapter, target_modules=pattern)
    with pytest.raises(PolicyError, match="target_modules"):
        adapted(base, adapter)


def test_a_pattern_of_a_stranger_does_not_hang(base, adapter):
    edit(adapter, target_modules=r"(\w+\.?)+[!?]")  # Python's own `re` takes for ever
    adapted(base, adapter)


def test_what_was_saved_with_an_adapter_goes_with_it(tmp_path):
    """OpenVLA-OFT without merge_lora_during_training: the adapter in a folder, side files and statistics beside it."""
    spec = policies.PolicySpec(action_dim=7, chunk=CHUNK, cameras=("base",), image_size=40, proprio_dim=8)
    base = write_tiny(tmp_path / "openvla-7b", seed=5)
    peft_saves(base, tmp_path / "made", target_modules=LAYERS)
    run = tmp_path / "run"
    shutil.copytree(tmp_path / "made/adapter", run / "lora_adapter")
    edit(run / "lora_adapter", base_model_name_or_path="openvla/openvla-7b")
    trained = write_oft(tmp_path / "trained")
    for path in trained.glob("*.pt"):
        shutil.copyfile(path, run / path.name)
    statistics = json.loads((base / "config.json").read_text())["norm_stats"]
    (run / "dataset_statistics.json").write_text(json.dumps({"mine": statistics["tiny"]}))
    options: dict[str, Any] = {"checkpoint": str(base), "adapter": str(run / "lora_adapter"), "unnorm_key": "mine"}
    with pytest.raises(PolicyError, match=f"run/action_head--{STEP}_checkpoint.pt is there and not used"):
        policies.build("openvla_oft", spec, 0, **options)
    used = {"head": "l1", "proprio": True, "film": True}
    # Its scale is the one that the adapter's configuration says.
    policy = policies.build("openvla_oft", spec, 0, **options, **used)
    inputs = random_inputs(spec, 2, seed=1)
    chunk = policy.act(inputs, None).chunk
    policies.save(policy, tmp_path / "saved")
    shutil.rmtree(run)
    assert error(policies.load(tmp_path / "saved").act(inputs, None).chunk, chunk) == 0


@few_or_many(4)
def test_damaged_adapters(base, made, tmp_path, cases):
    """The base is whole, and loaded once: to build it anew takes most of a case's time."""
    damaged = Damaged(made / "adapter", tmp_path / "adapter")
    inputs = random_inputs(ONE_ACTION, 1, seed=1)
    whole = plain(base)

    def read(path: Path) -> None:
        policy = copy.deepcopy(whole)
        attach_saved(policy.model, path)
        for name, tensor in policy.state_dict().items():
            assert not tensor.is_floating_point() or tensor.isfinite().all(), name
        policy.act(inputs, None)

    holds(cases, damaged, read, (PolicyError,))
