"""Directories: read whole or not at all, and written again as they were."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError
from policies.openvla.heads import ActionHead
from policies.openvla.model import load_model, save_model
from tests.policies.openvla.cases import OFT, ONE_ACTION, OPENVLA, error, make, random_inputs
from tests.policies.openvla.tiny import write_tiny

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
SCALE = "vision_backbone.featurizer.blocks.0.ls1.scale_factor"


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    """A checkpoint to be damaged."""
    return Path(shutil.copytree(tiny, tmp_path / "checkpoint"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def edit_json(path: Path, **entries) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


def edit_tensors(folder: Path, file: str, change, in_index: bool = True) -> None:
    tensors = load_file(folder / file)
    change(tensors)
    save_file(tensors, folder / file)
    if in_index:
        files = {name: path.name for path in folder.glob("*.safetensors") for name in load_file(path)}
        edit_json(folder / INDEX, weight_map=files)


@pytest.mark.parametrize("source", [OPENVLA / "checkpoint", OPENVLA / "checkpoint_fullvocab", OFT / "checkpoint"])
def test_saved_again_it_is_equal_tensor_by_tensor_and_file_by_file(source, tmp_path):
    save_model(load_model(source), tmp_path)
    for path in source.glob("*.safetensors"):
        before, after = load_file(path), load_file(tmp_path / path.name)
        assert before.keys() == after.keys()
        for name, tensor in before.items():
            assert tensor.dtype == after[name].dtype and torch.equal(tensor, after[name]), name
    index = json.loads((source / INDEX).read_text())["weight_map"]
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == index
    for path in source.glob("*.json"):
        if path.name != INDEX:
            assert json.loads(path.read_text()) == json.loads((tmp_path / path.name).read_text()), path.name


def test_dtype_can_be_chosen(tiny, tmp_path):
    model = load_model(tiny, "bfloat16")
    assert {t.dtype for t in model.checkpoint_state().values()} == {torch.bfloat16}
    save_model(model, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert {t.dtype for t in tensors_of(tmp_path).values()} == {torch.bfloat16}


def test_a_single_file_without_an_index_is_read_and_written(tiny, folder, tmp_path):
    save_file(tensors_of(folder), folder / "model.safetensors")
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    model = load_model(folder)
    assert all(torch.equal(t, model.state_dict()[name]) for name, t in load_model(tiny).state_dict().items())
    save_model(model, tmp_path / "again")
    assert (
        not (tmp_path / "again" / INDEX).exists() and tensors_of(tmp_path / "again").keys() == tensors_of(tiny).keys()
    )


def test_layer_scales_of_either_spelling_are_read(tiny, folder):
    def rename(tensors):
        for name in [name for name in tensors if name.endswith("scale_factor")]:
            tensors[name.replace("scale_factor", "gamma")] = tensors.pop(name)

    edit_tensors(folder, FIRST, rename)
    model = load_model(folder)
    assert model.checkpoint_state().keys() == tensors_of(tiny).keys()
    assert torch.equal(model.checkpoint_state()[SCALE], tensors_of(tiny)[SCALE])


def test_whole_policy_is_saved_as_a_hugging_face_directory(tiny, tmp_path):
    policy = make("openvla", ONE_ACTION, tiny)
    policies.save(policy, tmp_path)
    assert tensors_of(tmp_path / "policy").keys() == tensors_of(tiny).keys()
    raw = json.loads((tiny / "config.json").read_text())
    assert raw.items() <= json.loads((tmp_path / "policy/config.json").read_text()).items()
    as_checkpoint = policies.build("openvla", ONE_ACTION, 0, checkpoint=str(tmp_path / "policy"))
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(as_checkpoint.act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0


def test_whole_policy_loads_without_the_checkpoint_that_it_came_from(tmp_path):
    origin = write_tiny(tmp_path / "origin", seed=3)
    policy = make("openvla", ONE_ACTION, origin)
    policies.save(policy, tmp_path / "run")
    shutil.rmtree(origin)
    loaded = policies.load(tmp_path / "run")
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(loaded.act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0
    assert loaded.architecture() == policy.architecture()


def test_a_policy_saved_over_the_files_that_it_was_read_from_stays_whole(tmp_path):
    origin = write_tiny(tmp_path / "origin", seed=3)
    policies.save(make("openvla", ONE_ACTION, origin), tmp_path / "run")
    loaded = policies.load(tmp_path / "run")
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    before = loaded.act(inputs, None).log_prob
    policies.save(loaded, tmp_path / "run")
    assert error(loaded.act(inputs, None).log_prob, before) == 0
    assert error(policies.load(tmp_path / "run").act(inputs, None).log_prob, before) == 0


def test_training_does_not_write_into_the_files_that_were_read(tmp_path):
    origin = write_tiny(tmp_path / "origin", seed=3)
    before = {path.name: path.read_bytes() for path in origin.iterdir()}
    policy = make("openvla", ONE_ACTION, origin)  # moves every weight
    assert error(policy.model.projector.fc1.bias, load_model(origin).projector.fc1.bias) > 0
    assert before == {path.name: path.read_bytes() for path in origin.iterdir()}


def test_regression_policy_is_saved_with_its_side_files(tmp_path):
    spec = policies.PolicySpec(action_dim=7, chunk=4, cameras=("base",), proprio_dim=8)
    options = {"unnorm_key": "toy_long", "proprio": True, "head": "l1"}
    policy = make("openvla_oft", spec, OFT / "checkpoint", **options)
    policies.save(policy, tmp_path)
    names = {path.name for path in (OFT / "checkpoint").glob("*.pt")}
    assert {path.name for path in (tmp_path / "policy").glob("*--*")} == {f"{name[:-3]}.safetensors" for name in names}
    policies.export(policy, tmp_path / "exported")
    assert {path.name for path in (tmp_path / "exported").glob("*--*")} == names
    inputs = random_inputs(spec, 2, seed=1)
    assert error(policies.load(tmp_path).act(inputs, None).chunk, policy.act(inputs, None).chunk) == 0


def test_the_seed_determines_the_tiny_checkpoint(tiny, tmp_path):
    before = torch.random.get_rng_state()
    same, other = (tensors_of(write_tiny(tmp_path / str(seed), seed=seed)) for seed in (1, 2))
    assert torch.equal(before, torch.random.get_rng_state())
    first = tensors_of(tiny)
    assert all(torch.equal(tensor, same[name]) for name, tensor in first.items())
    assert not any(torch.equal(tensor, other[name]) for name, tensor in first.items())


@pytest.mark.slow
def test_another_process_draws_the_same_tiny_checkpoint(tmp_path):
    """Whose sets are in another order."""
    program = "import sys; from tests.policies.openvla.tiny import write_tiny; write_tiny(sys.argv[1], seed=1)"
    drawn = []
    for order in ("1", "2"):
        folder = tmp_path / order
        subprocess.run([sys.executable, "-c", program, folder], env={**os.environ, "PYTHONHASHSEED": order}, check=True)
        drawn.append(tensors_of(folder))
    assert all(torch.equal(tensor, drawn[1][name]) for name, tensor in drawn[0].items())


def put_pickle(path: Path) -> None:
    class Bomb:
        def __reduce__(self):
            return (Path.write_text, (path.parent / "executed", "x"))

    path.write_bytes(pickle.dumps(Bomb()))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / SECOND).unlink(), f"incomplete checkpoint: .*{SECOND} is missing"),
        (lambda f: (f / "config.json").unlink(), "incomplete checkpoint: .*config.json is missing"),
        (lambda f: (f / "tokenizer.json").unlink(), "incomplete checkpoint: .*tokenizer.json is missing"),
        (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json is no tokenizer"),
        (lambda f: (f / "preprocessor_config.json").unlink(), "preprocessor_config.json is missing"),
        (lambda f: (f / "preprocessor_config.json").write_text("{}"), "lacks an entry .*'input_sizes'"),
        (lambda f: (f / FIRST).write_bytes((f / FIRST).read_bytes()[:-40]), f"{FIRST} is damaged or no safetensors"),
        (lambda f: put_pickle(f / FIRST), f"{FIRST} is damaged or no safetensors file"),
        (lambda f: (f / INDEX).write_text("[]"), "index.json must hold an object, it holds a list"),
        (lambda f: (f / INDEX).write_text("{"), "index.json cannot be read"),
        (lambda f: edit_json(f / INDEX, weight_map=3), "has no weight_map"),
        (lambda f: edit_json(f / INDEX, weight_map={"a": "../b.safetensors"}), "names '../b.safetensors', which is no"),
        (lambda f: (f / "config.json").write_text("{"), "config.json cannot be read"),
        (lambda f: edit_json(f / "config.json", model_type="llava"), "is not OpenVLA's: its model_type is 'llava'"),
        (lambda f: edit_json(f / "config.json", use_fused_vision_backbone=False), "only the fused vision backbone"),
        (lambda f: edit_json(f / "config.json", text_config={"model_type": "gemma"}), "must be a llama, it is 'gemma'"),
        (lambda f: edit_json(f / "config.json", text_config=3), "lacks an entry or has one of the wrong type"),
        (lambda f: edit_json(f / "config.json", norm_stats={}), "no statistics in .*: neither dataset_statistics.json"),
        (lambda f: edit_json(f / "config.json", norm_stats={"a": {}}), "'a' has no usable q01, q99 and mask"),
        (lambda f: edit_json(f / "config.json", timm_model_kwargs=None), "timm has no vision tower 'tiny_dinov2'"),
    ],
)
def test_damaged_directories_are_refused_with_one_message(folder, damage, message):
    damage(folder)
    with pytest.raises(PolicyError, match=message):
        make("openvla", ONE_ACTION, folder)
    assert not (folder / "executed").exists()


@pytest.mark.parametrize(
    ("change", "in_index", "message"),
    [
        (lambda t: t.pop("projector.fc1.bias"), True, "1 missing: 'projector.fc1.bias'"),
        (lambda t: t.update(extra=torch.zeros(1)), True, "1 unexpected: 'extra'"),
        (lambda t: t.update(extra=torch.zeros(1)), False, "'extra' is in it, but not in the index"),
        (lambda t: t.pop("projector.fc1.bias"), False, "'projector.fc1.bias' is in the index, but not in it"),
        (
            lambda t: t.update({"projector.fc3.bias": torch.zeros(3)}),
            True,
            r"'projector.fc3.bias' is \[3\], expected \[32\]",
        ),
        (lambda t: t.update({SCALE: torch.zeros(24, dtype=torch.int8)}), True, "quantised weights are not supported"),
        (lambda t: [t.pop(name) for name in list(t) if "attn_pool" in name], True, r"13 missing: .*, \.\.\."),
    ],
)
def test_every_tensor_is_accounted_for(folder, change, in_index, message):
    edit_tensors(folder, FIRST, change, in_index)
    with pytest.raises(PolicyError, match=message):
        load_model(folder)


def test_pickled_weights_are_not_read(folder):
    for name in (FIRST, SECOND, INDEX):
        (folder / name).unlink()
    put_pickle(folder / "pytorch_model.bin")
    with pytest.raises(
        PolicyError, match="pytorch_model.bin is a pickle, which is not read: convert it to safetensors"
    ):
        load_model(folder)
    assert not (folder / "executed").exists()


def test_a_folder_that_is_not_there():
    with pytest.raises(PolicyError, match="incomplete checkpoint: /nowhere/config.json is missing"):
        load_model("/nowhere")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: put_pickle(path), "holds more than tensors, and is not read"),
        (lambda path: path.write_bytes(path.read_bytes()[:200]), "is damaged"),
        (lambda path: torch.save([1, 2], path), "is not a state dict"),
        (
            lambda path: torch.save({"a": torch.zeros(1)}, path),
            "does not hold the tensors .* missing: .* 1 unexpected: 'a'",
        ),
        (lambda path: path.write_bytes(b""), "is empty"),
    ],
)
def test_damaged_side_files_are_refused(tmp_path, damage, message):
    path = tmp_path / "action_head--7_checkpoint.pt"
    shutil.copyfile(OFT / "checkpoint" / path.name, path)
    ActionHead.read(path, 7, 48)
    damage(path)
    with pytest.raises(PolicyError, match=message):
        ActionHead.read(path, 7, 48)
    assert not (tmp_path / "executed").exists()
