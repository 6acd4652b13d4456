"""OpenVLA-OFT's directories: what its side files compute, and that each is used or refused by name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError, PolicySpec
from policies.conformance import laws
from policies.files import INDEX
from policies.registry import check
from tests.fuzzing import mutation
from tests.fuzzing.law import few_or_many, holds
from tests.policies.openvla.cases import OFT, ONE_ACTION, error, make, random_inputs
from tests.policies.openvla.oft_directory import CHUNK, STEP, normalised_actions, save, side, stored, write_oft

SPEC = PolicySpec(action_dim=7, chunk=CHUNK, cameras=("base", "wrist"), image_size=40, proprio_dim=8)
USED: dict[str, Any] = {"head": "l1", "proprio": True, "film": True}
UNUSED: dict[str, Any] = {"head": "tokens", "proprio": False, "film": False}
QKV = "vision_backbone.featurizer.blocks.0.block.attn.qkv"
NAMES = {f"{name}--{STEP}_checkpoint.pt" for name in ("action_head", "proprio_projector", "vision_backbone")}


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    """To be read only."""
    return write_oft(tmp_path_factory.mktemp("oft") / "directory")


@pytest.fixture
def folder(directory, tmp_path) -> Path:
    """To be changed."""
    return Path(shutil.copytree(directory, tmp_path / "directory"))


def oft(folder: Path, **options: Any) -> Any:
    return policies.build("openvla_oft", SPEC, 0, checkpoint=str(folder), **{"value_widths": [8], **options})


def plain(folder: Path, policy: Any, inputs: Any) -> torch.Tensor:
    """[B, C, A] in -1..1, row by row, from the formulas written out."""
    pixels = policy._pixels(inputs)
    rows = (torch.tensor(policy.prompts.tokens(text)) for text in inputs.instruction)
    return torch.stack([normalised_actions(folder, pixels[i], ids, inputs.proprio[i]) for i, ids in enumerate(rows)])


@pytest.mark.parametrize("adapters", [True, False], ids=["LoRA", "every weight"])
def test_it_computes_what_the_formulas_say(adapters, tmp_path):
    folder = write_oft(tmp_path / "directory", adapters=adapters)
    policy = oft(folder, **USED)
    inputs = random_inputs(SPEC, 3, seed=1)  # prompts of three lengths
    with torch.no_grad():
        predicted = policy.action_head(policy.states(inputs))
    expected = plain(folder, policy, inputs)
    assert error(predicted, expected) <= 2e-5 and expected.abs().max() > 1
    action = policy.act(inputs, None)
    entry = next(iter(json.loads((folder / "config.json").read_text())["norm_stats"].values()))["action"]
    low, high = (torch.tensor(entry[name], dtype=torch.float64) for name in ("q01", "q99"))
    units = 0.5 * (expected.double() + 1) * (high - low + 1e-8) + low
    assert error(action.chunk[..., :-1], units[..., :-1]) <= 2e-5
    assert error(action.chunk[..., -1], expected[..., -1]) <= 2e-5


def test_each_side_file_counts(directory):
    inputs = random_inputs(SPEC, 2, seed=1)
    whole = oft(directory, **USED).act(inputs, None).chunk
    for option in ({"film": False}, {"proprio": False}, {"head": "tokens"}):
        assert error(oft(directory, **USED | option).act(inputs, None).chunk, whole) > 1e-2, option
    complete = oft(directory, **USED)
    others = random_inputs(SPEC, 2, seed=1, texts=("lift", "lift"))
    assert error(*(complete.vision_features(each) for each in (inputs, others))) > 1e-2


def test_the_towers_are_those_of_the_file(directory):
    policy = oft(directory, **USED)
    weight = policy.model.vision_backbone.featurizer.patch_embed.proj.weight
    name = "vision_backbone.featurizer.patch_embed.proj.weight"
    assert torch.equal(weight, side(directory, "vision_backbone")[name])
    assert not torch.equal(weight, stored(directory)[name])


@pytest.mark.parametrize("convention", ["official", "rlinf"])
def test_laws(directory, convention):
    policy = oft(directory, convention=convention, **USED | {"head": "tokens"})
    for law in (laws.law_shapes_and_dtypes, laws.law_scores_agree, laws.law_rows_are_independent):
        law(policy, random_inputs(SPEC, 4, seed=2))


def test_it_learns_from_demonstrations(directory):
    policy = oft(directory, **USED)
    inputs = random_inputs(SPEC, 2, seed=1)
    actions = 0.1 * torch.ones(2, CHUNK, 7)
    policy.imitate(inputs, actions, torch.ones(2, CHUNK, dtype=torch.bool), torch.zeros(2, 0)).sum().backward()
    for part in ("vision_backbone.featurizer.blocks.0.scale", "vision_backbone.fused_featurizer.blocks.1.shift"):
        assert policy.model.get_submodule(part).weight.grad.abs().sum() > 0
    assert policy.action_head.model.fc1.weight.grad.abs().sum() > 0


def test_saved_as_safetensors_and_exported_as_published(directory, tmp_path):
    policy = oft(directory, **USED)
    laws.perturb(policy, 0.02, seed=6)
    policies.save(policy, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run/policy").glob("*--*")}
    assert names == {f"{name[:-3]}.safetensors" for name in NAMES}
    inputs = random_inputs(SPEC, 3, seed=1)
    chunk = policy.act(inputs, None).chunk
    loaded: Any = policies.load(tmp_path / "run")
    assert error(loaded.act(inputs, None).chunk, chunk) == 0
    other = oft(directory, **USED)
    policies.load_into(other, tmp_path / "run")
    assert error(other.act(inputs, None).chunk, chunk) == 0
    policies.export(loaded, tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").glob("*--*")} == NAMES
    for name in ("action_head", "proprio_projector", "vision_backbone"):
        before, after = (side(where, name) for where in (directory, tmp_path / "exported"))
        assert before.keys() == after.keys()
        assert all(tensor.shape == after[key].shape for key, tensor in before.items())
    assert error(oft(tmp_path / "exported", **USED).act(inputs, None).chunk, chunk) == 0
    with torch.no_grad():
        predicted = policy.action_head(policy.states(inputs))
    assert error(predicted, plain(tmp_path / "exported", policy, inputs)) <= 2e-5


@pytest.mark.parametrize("parts", [["language", "projector"], ["language", "vision"]], ids=str)
def test_a_new_adapter_on_towers_that_the_instruction_modulates(directory, tmp_path, parts):
    policy = oft(directory, lora_rank=2, lora_parts=parts, **USED)
    laws.perturb(policy, 0.05, seed=6)
    inputs = random_inputs(SPEC, 3, seed=1)
    chunk = policy.act(inputs, None).chunk
    policies.save(policy, tmp_path / "run")
    names = load_file(tmp_path / "run/policy/adapter_model.safetensors")
    assert not any(".block." in name for name in names)
    assert not (tmp_path / "run/policy" / f"vision_backbone--{STEP}_checkpoint.safetensors").exists()
    assert error(policies.load(tmp_path / "run").act(inputs, None).chunk, chunk) == 0
    policies.export(policy, tmp_path / "exported")
    assert error(oft(tmp_path / "exported", **USED).act(inputs, None).chunk, chunk) <= 1e-5
    features = policy.precompute(inputs)
    assert bool(features) == ("vision" not in parts)
    if features:
        with torch.no_grad():
            assert error(policy.states(inputs, None, features["features"]), policy.states(inputs)) <= 1e-5


def refusal(folder: Path, kind: str = "openvla_oft", **options: Any) -> str:
    """What building says, which is what the quick check says too."""
    spec = SPEC if kind == "openvla_oft" else ONE_ACTION
    with pytest.raises(PolicyError) as first:
        policies.build(kind, spec, 0, checkpoint=str(folder), **options)
    with pytest.raises(PolicyError) as second:
        check(kind, {"checkpoint": str(folder), **options})
    assert str(first.value) == str(second.value)
    return str(first.value)


def test_a_file_that_nothing_uses_is_refused_by_name_with_its_option(folder):
    message = refusal(folder)
    for name in NAMES:
        assert str(folder / name) in message
    for way in ("options.head to l1", "options.proprio to true", "options.film to true"):
        assert f"set policy.{way}" in message
    assert "vision_backbone" in refusal(folder, head="l1", proprio=True)
    assert "proprio_projector" in refusal(folder, head="tokens", film=False)
    assert "action_head" in refusal(folder, proprio=False, film=True)
    oft(folder, **UNUSED)


@pytest.mark.parametrize(
    "name", [*sorted(NAMES), "action_head--latest_checkpoint.pt", "action_head--9_checkpoint.safetensors"]
)
def test_empty_files(tiny, tmp_path, name):
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    (folder / name).write_bytes(b"")
    assert name in refusal(folder)
    with pytest.raises(PolicyError, match=f"{name} is (empty|damaged)"):
        oft(folder, **{"head": None, "proprio": None, "film": None} | option_of(name))


def option_of(name: str) -> dict[str, Any]:
    options = {"action_head": "head", "proprio_projector": "proprio", "vision_backbone": "film"}
    return {option: USED[option] for component, option in options.items() if name.startswith(component)}


def test_plain_openvla_uses_none(folder):
    assert "set policy.kind to openvla_oft" in refusal(folder, "openvla")
    assert f"vision_backbone--{STEP}_checkpoint.pt" in refusal(folder, "openvla")


def test_a_diffusion_head_is_refused(folder):
    (folder / f"noisy_action_projector--{STEP}_checkpoint.pt").write_bytes(b"")
    assert "noisy_action_projector--150000_checkpoint.pt belongs to a diffusion head" in refusal(folder, **USED)
    (folder / f"noisy_action_projector--{STEP}_checkpoint.pt").unlink()
    save(folder, "action_head", STEP, {"module.noise_predictor.mlp_resnet.fc1.weight": torch.zeros(2, 2)})
    with pytest.raises(PolicyError, match="action_head--150000_checkpoint.pt is a diffusion head"):
        oft(folder, **USED)


def test_several_steps(folder):
    for name in ("action_head", "proprio_projector", "vision_backbone"):
        (folder / f"{name}--100000_checkpoint.pt").write_bytes(b"of another step")
    assert "set policy.options.step to one of 100000, 150000" in refusal(folder, **USED)
    assert "policy.options.step is 5: take one of 100000, 150000" in refusal(folder, step=5, **USED)
    for step in (150000, "150000"):
        oft(folder, step=step, **USED)
    with pytest.raises(PolicyError, match="--100000_checkpoint.pt"):
        oft(folder, step=100000, **USED)


def test_files_of_different_steps_do_not_belong_together(folder):
    name = f"proprio_projector--{STEP}_checkpoint.pt"
    (folder / name).rename(folder / "proprio_projector--10_checkpoint.pt")
    assert "were saved at different steps" in refusal(folder, **USED)


def test_two_files_of_one_step(folder):
    shutil.copyfile(
        folder / f"action_head--{STEP}_checkpoint.pt", folder / f"action_head--{STEP}_checkpoint.safetensors"
    )
    assert "one of a step is enough" in refusal(folder, **USED)


def test_the_latest_step(folder):
    for name in NAMES:
        (folder / name).rename(folder / name.replace(STEP, "latest"))
    inputs = random_inputs(SPEC, 2, seed=1)
    policies.export(oft(folder, **USED), folder.parent / "out")
    again = oft(folder.parent / "out", **USED)
    assert error(again.act(inputs, None).chunk, oft(folder, **USED).act(inputs, None).chunk) == 0
    assert (folder.parent / "out/vision_backbone--latest_checkpoint.pt").exists()


@pytest.mark.parametrize(
    "name",
    [
        "full_weights.pt",
        "pytorch_model.bin",
        "pytorch_model-00001-of-00002.bin",
        "vla--150000_checkpoint.pt",
        "action_head.pt",
        "model-00009-of-00009.safetensors",
        "model.safetensors",
        "ema.pth",
        "last.ckpt",
        "model_world_size_2_rank_0.pt",
    ],
)
@pytest.mark.parametrize("kind", ["openvla", "openvla_oft"])
def test_weights_that_nothing_names_are_refused(tiny, tmp_path, kind, name):
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    (folder / name).write_bytes(b"x")
    assert f"{folder / name} lies beside the weights, and nothing says what it is for" in refusal(folder, kind)


def test_the_state_of_a_training_may_lie_beside_the_weights(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    for name in (
        "optimizer.pt",
        "optimizer.bin",
        "scheduler.pt",
        "training_args.bin",
        "rng_state.pth",
        "rng_state_0.pth",
        "scaler.pt",
        "random_states_0.pkl",
    ):
        (folder / name).write_bytes(b"")
    make("openvla", ONE_ACTION, folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda s: s.pop("vision_backbone.featurizer.blocks.0.scale.bias"),
            "missing: 'vision_backbone.featurizer.blocks.0.sc",
        ),
        (
            lambda s: s.pop("vision_backbone.featurizer.blocks.2.shift.bias"),
            "missing: 'vision_backbone.featurizer.blocks.2.sh",
        ),
        (lambda s: s.update(more=torch.zeros(1)), "1 unexpected: 'more'"),
        (lambda s: s.pop(f"{QKV}.lora_B.default.weight"), "is not whole"),
        (
            lambda s: s.update({"vision_backbone.featurizer.blocks.0.scale.weight": torch.zeros(3, 3)}),
            r"is \[3, 3\], expected \[24, 32\]",
        ),
        (
            lambda s: s.update({f"{QKV}.lora_A.default.weight": torch.ones(3, 3)}),
            "does not fit its matrix",
        ),
        (lambda s: s.update({"vision_backbone.featurizer.norm.bias": torch.full((24,), torch.nan)}), "not finite"),
    ],
)
def test_a_backbone_that_does_not_fit_is_refused(folder, change, message):
    state = side(folder, "vision_backbone")
    change(state)
    save(folder, "vision_backbone", STEP, state)
    with pytest.raises(PolicyError, match=f"vision_backbone--{STEP}_checkpoint.pt.*{message}"):
        oft(folder, **USED)


def test_the_scale_of_the_backbones_adapters_is_reported_beside_it(folder):
    inputs = random_inputs(SPEC, 2, seed=1)
    (folder / "lora_adapter").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    (folder / "lora_adapter/adapter_config.json").write_text(json.dumps(config))
    twice = oft(folder, **USED)
    name = "featurizer.blocks.0.block.attn.qkv"
    state = side(folder, "vision_backbone")
    a, b, base = (
        state[f"vision_backbone.{name}.{part}.weight"] for part in ("lora_A.default", "lora_B.default", "base_layer")
    )
    assert error(twice.model.vision_backbone.get_submodule(name).weight, base + 2 * b @ a) <= 1e-6
    assert error(twice.act(inputs, None).chunk, oft(folder, **USED).act(inputs, None).chunk) == 0
    (folder / "lora_adapter/adapter_config.json").write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(PolicyError, match="has adapters of rank 4, .*adapter_config.json says r 3"):
        oft(folder, **USED)


def test_units_may_be_the_extremes(tiny, tmp_path):
    """OpenVLA-OFT's ALOHA checkpoints: its constants say BOUNDS instead of BOUNDS_Q99."""
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    entry = config["norm_stats"]["tiny"]
    with pytest.raises(PolicyError, match="no usable min, max and mask"):
        oft(folder, bounds="extremes")
    for part in entry.values():
        if isinstance(part, dict):
            part |= {"min": [2 * v for v in part["q01"]], "max": [3 * v for v in part["q99"]]}
    path.write_text(json.dumps(config))
    statistics = oft(folder, bounds="extremes").statistics
    assert (
        statistics.low.tolist() == entry["action"]["min"]
        and statistics.proprio_high.tolist() == entry["proprio"]["max"]
    )
    assert oft(folder).statistics.high.tolist() == entry["action"]["q99"]
    policies.save(oft(folder, bounds="extremes"), tmp_path / "run")
    loaded: Any = policies.load(tmp_path / "run")
    assert torch.equal(loaded.statistics.low, statistics.low)
    with pytest.raises(PolicyError, match="bounds must be one of percentiles, extremes"):
        oft(folder, bounds="q98")


def test_proprioception_without_a_unit_stays_as_it_is(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    config = json.loads((folder / "config.json").read_text())
    config["norm_stats"]["tiny"]["proprio"]["mask"] = [True] * 7 + [False]
    (folder / "config.json").write_text(json.dumps(config))
    seen = torch.tensor([[0.3] * 8, [4.0] * 8], dtype=torch.float64)
    unit = oft(folder).statistics.normalise_proprio(seen)
    assert unit[:, -1].tolist() == [pytest.approx(0.3, abs=1e-12), 1.0]
    assert error(unit[:, :7], oft(tiny).statistics.normalise_proprio(seen)[:, :7]) == 0


def test_a_small_file_does_not_ask_for_much_memory(folder):
    wide = torch.zeros(1).expand(10**9, 4)
    torch.save({"fc1.weight": wide}, folder / f"proprio_projector--{STEP}_checkpoint.pt")
    with pytest.raises(PolicyError, match="bytes, and a tensor in it asks for 16000000000"):
        oft(folder, **USED)


def test_a_name_with_and_without_its_prefix(folder):
    state = side(folder, "action_head")
    save(folder, "action_head", STEP, state | {"model.fc1.bias": state["module.model.fc1.bias"]})
    with pytest.raises(PolicyError, match="holds 'model.fc1.bias' twice"):
        oft(folder, **USED)


def test_golden_directory_with_safetensors(tmp_path):
    """Side files that were converted by hand."""
    folder = Path(shutil.copytree(OFT / "checkpoint", tmp_path / "checkpoint"))
    spec = PolicySpec(action_dim=7, chunk=4, cameras=("base",), proprio_dim=8)
    options = {"unnorm_key": "toy_long", "head": "l1", "proprio": True, "value_widths": [8]}
    inputs = random_inputs(spec, 2, seed=1)
    before = policies.build("openvla_oft", spec, 0, checkpoint=str(folder), **options).act(inputs, None).chunk
    for path in folder.glob("*.pt"):
        save_file(torch.load(path, weights_only=True), path.with_suffix(".safetensors"))
        path.unlink()
    after = policies.build("openvla_oft", spec, 0, checkpoint=str(folder), **options).act(inputs, None).chunk
    assert error(before, after) == 0


@pytest.mark.parametrize("component", ["action_head", "proprio_projector", "vision_backbone"])
@few_or_many(6, 10_000)
def test_damaged_side_files(folder, component, cases):
    """Small ones, with one tensor changed in no way: what is read is read again and again."""
    path = folder / f"{component}--{STEP}_checkpoint.pt"
    whole = path.read_bytes()
    policy = oft(folder, **USED)
    from policies.files import check_tensors, read_state
    from policies.openvla.film import read_film

    def damaged(rng) -> Path:
        content = mutation.content(rng, whole)
        path.unlink()
        path.write_bytes(content)
        return path

    def read(path: Path) -> None:
        if component == "vision_backbone":
            read_film(policy.model, path)
        else:
            check_tensors(path, read_state(path), getattr(policy, component).state_dict())

    holds(cases, damaged, read, (PolicyError,))


def test_an_index_that_is_there_twice(tiny, tmp_path):
    folder = Path(shutil.copytree(tiny, tmp_path / "checkpoint"))
    save_file(stored(folder), folder / "model.safetensors")
    assert f"{INDEX} does not name it" in refusal(folder)
