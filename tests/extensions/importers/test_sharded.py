"""Shards of trainings, converted to a Hugging Face directory: equal bit for bit, or refused by name."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import policies
from embodied_importers.sharded import Conversion, convert, recognises
from policies import PolicyError
from policies.files import CONFIG, Shards, read_tensors
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.policies.openvla.cases import ONE_ACTION
from tests.policies.openvla.tiny import write_tiny
from tests.policies.pi0.cases import GOLDEN, SPEC
from tests.policies.shards import WORLD, trained
from tests.variants import often

PI0 = GOLDEN / "pi0" / "checkpoint"
VERL = ("fsdp1", "fsdp2", "hsdp")
SHARDED = [(base, how) for base in ("openvla", "pi0") for how in (*VERL, "local", "full")]
LEFT = {**dict.fromkeys(VERL, "optim_world_size_2_rank_0.pt")}


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("bases")
    return {"openvla": write_tiny(folder / "openvla"), "pi0": Path(shutil.copytree(PI0, folder / "pi0"))}


@pytest.fixture(scope="module")
def left(bases: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of each base, written by two processes under PyTorch's FSDP."""
    folder = tmp_path_factory.mktemp("left")
    command = [sys.executable, "-W", "ignore", "-m", "tests.policies.shards"]
    ranks = [
        subprocess.Popen([*command, str(rank), str(folder), *map(str, bases.values())], env=os.environ)
        for rank in range(WORLD)
    ]
    assert [process.wait(timeout=300) for process in ranks] == [0] * WORLD
    return folder


@pytest.fixture
def verl(left: Path, tmp_path: Path) -> Path:
    """A copy of verl's shards of the tiny pi0."""
    return Path(shutil.copytree(left / "pi0/fsdp2", tmp_path / "actor"))


def tensors(folder: Path) -> dict[str, Tensor]:
    shards = Shards.find(folder)
    return {name: shards.tensor(name) for name in sorted(shards.files)}


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    same = found.keys() == expected.keys()
    return same and all(t.dtype == expected[n].dtype and torch.equal(t, expected[n]) for n, t in found.items())


def refused(path: Path, base: Path | None = PI0) -> str:
    out = path.with_name("refused")
    out.mkdir(exist_ok=True)
    with pytest.raises(PolicyError) as error:
        convert(path, base, out)
    return str(error.value)


def converted(path: Path, base: Path | None, out: Path) -> Conversion:
    out.mkdir()
    return convert(path, base, out)


def state_file(folder: Path, change: Callable[[dict[str, Tensor]], object] = lambda _: None) -> Path:
    """full_weights.pt of the tiny pi0, with a change."""
    state = trained(PI0)
    change(state)
    folder.mkdir(exist_ok=True)
    torch.save(state, folder / "full_weights.pt")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("base", "how"), often([("pi0", "fsdp2")], SHARDED))
def test_every_tensor_is_the_trained_one_bit_for_bit(left, bases, tmp_path, base, how) -> None:
    assert recognises(left / base / how)
    done = converted(left / base / how, bases[base], tmp_path / "out")
    expected = trained(bases[base])
    assert equal(tensors(tmp_path / "out"), expected)
    assert done.tensors == done.changed == len(expected)
    assert done.left_alone == ([LEFT[how]] if how in LEFT else [])
    assert done.left_out == (["lr_schedulers", "rng"] if how == "local" else [])
    others = {p.relative_to(bases[base]) for p in bases[base].rglob("*") if p.suffix != ".safetensors"}
    assert others <= {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*")}


@pytest.mark.slow
def test_a_policy_acts_with_what_was_converted(left, bases, tmp_path) -> None:
    for base, kind, spec, options in (
        ("openvla", "openvla", ONE_ACTION, {"unnorm_key": "tiny"}), ("pi0", "pi0", SPEC, {})
    ):  # fmt: skip
        converted(left / base / "fsdp2", bases[base], tmp_path / base)
        policy = policies.build(kind, spec, seed=0, checkpoint=str(tmp_path / base), value_widths=[8], **options)
        policies.export(policy, tmp_path / f"{base}-again")
        assert equal(tensors(tmp_path / f"{base}-again"), trained(bases[base]))


@pytest.mark.slow
def test_nothing_that_was_allowed_before_is_allowed_or_forgotten(left, tmp_path) -> None:
    import torch.distributed.tensor  # noqa: F401  (allows its own classes)

    before = set(torch.serialization.get_safe_globals())
    converted(left / "pi0/fsdp2", PI0, tmp_path / "out")
    assert set(torch.serialization.get_safe_globals()) == before != set()
    assert equal(tensors(tmp_path / "out"), trained(PI0))


def test_wrappers_of_modules_are_taken_out_of_names(tmp_path) -> None:
    def wrapped(state: dict[str, Tensor], lead: str) -> None:
        for name in list(state):
            state[f"{lead}{name.replace('.', '._fsdp_wrapped_module.', 1)}"] = state.pop(name)

    for i, lead in enumerate(("module.", "base_model.model.", "model.", "_orig_mod.", "module._orig_mod.")):
        folder = state_file(tmp_path / f"of{i}", partial(wrapped, lead=lead))
        converted(folder, PI0, tmp_path / f"out{i}")
        assert equal(tensors(tmp_path / f"out{i}"), trained(PI0))


def test_a_name_that_lacks_the_base_s_first_part(tmp_path) -> None:
    base = Path(shutil.copytree(PI0, tmp_path / "base"))
    from safetensors.torch import save_file

    save_file({f"model.{name}": t for name, t in tensors(PI0).items()}, base / "model.safetensors")
    converted(state_file(tmp_path / "left"), base, tmp_path / "out")
    assert equal(tensors(tmp_path / "out"), {f"model.{name}": t for name, t in trained(PI0).items()})


@pytest.mark.parametrize("inside", ["actor/model_state_dict", "actor", "model_state_dict"])
def test_the_folders_of_a_training_are_searched(tmp_path, inside) -> None:
    folder = tmp_path / "global_step_10"
    (folder / inside).mkdir(parents=True)
    (folder / "actor/dcp_checkpoint").mkdir(parents=True)
    (folder / "actor/dcp_checkpoint/__0_0.distcp").write_bytes(b"")
    shutil.copy(state_file(tmp_path / "left") / "full_weights.pt", folder / inside)
    if inside != "model_state_dict":
        converted(folder, PI0, tmp_path / "out")
        assert equal(tensors(tmp_path / "out"), trained(PI0))
    converted(folder / inside / "full_weights.pt", PI0, tmp_path / "of the file")
    assert equal(tensors(tmp_path / "of the file"), trained(PI0))


def test_dtypes_are_the_shards_own(tmp_path) -> None:
    def half(state: dict[str, Tensor]) -> None:
        state.update({name: tensor.bfloat16() for name, tensor in state.items()})

    converted(state_file(tmp_path / "left", half), PI0, tmp_path / "out")
    assert {tensor.dtype for tensor in tensors(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.slow
def test_without_a_base_the_folder_beside_the_shards_says_what_they_are(verl, tmp_path) -> None:
    assert "does not say of which model the weights are: give the checkpoint" in refused(verl, None)
    (verl / "huggingface").mkdir()
    for name in (CONFIG, "tokenizer.model"):
        shutil.copy(PI0 / name, verl / "huggingface")
    done = converted(verl, None, tmp_path / "out")
    assert equal(tensors(tmp_path / "out"), trained(PI0)) and done.changed is None
    shutil.copy(PI0 / "model.safetensors", verl / "huggingface")
    done = converted(verl, None, tmp_path / "of weights")
    assert equal(tensors(tmp_path / "of weights"), trained(PI0)) and done.changed == done.tensors


def test_a_training_that_changed_nothing_is_reported(tmp_path) -> None:
    (tmp_path / "left").mkdir()
    torch.save(tensors(PI0), tmp_path / "left/full_weights.pt")
    assert converted(tmp_path / "left", PI0, tmp_path / "out").changed == 0


def test_value_heads_and_second_names_of_tied_tensors_are_left_out(tmp_path) -> None:
    def more(state: dict[str, Tensor]) -> None:
        state["value_head.0.weight"] = torch.ones(2, 2)
        state["lm_head.again.weight"] = state[a_matrix()].clone()

    done = converted(state_file(tmp_path / "left", more), PI0, tmp_path / "out")
    assert done.left_out == ["lm_head.again.weight", "value_head.0.weight"]
    assert equal(tensors(tmp_path / "out"), trained(PI0))


def with_adapter(state: dict[str, Tensor], name: str, rank: int = 2) -> None:
    module, matrix = name.removesuffix(".weight"), state.pop(name)
    generator = torch.Generator().manual_seed(0)
    state[f"base_model.model.{module}.base_layer.weight"] = matrix
    state[f"base_model.model.{module}.lora_A.default.weight"] = torch.randn(rank, matrix.shape[1], generator=generator)
    state[f"base_model.model.{module}.lora_B.default.weight"] = torch.randn(matrix.shape[0], rank, generator=generator)
    for other in [other for other in state if not other.startswith("base_model.model.")]:
        state[f"base_model.model.{other}"] = state.pop(other)


def a_matrix() -> str:
    return next(name for name, t in trained(PI0).items() if t.dim() == 2 and name.endswith("q_proj.weight"))


def test_an_adapter_within_is_merged_by_the_alpha_that_its_config_says(tmp_path) -> None:
    name = a_matrix()
    folder = state_file(tmp_path / "left", lambda state: with_adapter(state, name))
    assert "holds an adapter (LoRA), and nothing says its alpha: write what it was trained with into" in refused(folder)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 6}
    state = torch.load(folder / "full_weights.pt", weights_only=True)
    a, b = (state[f"base_model.model.{name.removesuffix('.weight')}.lora_{x}.default.weight"] for x in "AB")
    for i, (extra, scaling) in enumerate((({}, 3.0), ({"use_rslora": True}, 6 / 2**0.5))):
        (folder / "adapter_config.json").write_text(json.dumps(config | extra))
        done = converted(folder, PI0, tmp_path / f"out{i}")
        expected = trained(PI0)
        expected[name] = expected[name] + scaling * (b @ a)
        assert equal(tensors(tmp_path / f"out{i}"), expected) and done.merged == 1
    for wrong, problem in (
        ({"r": 4}, "says that r is 4"), ({"r": 0}, "r must be at least 1"),
        ({"alpha_pattern": {"q_proj": 3}}, "alpha_pattern are not supported"), ({"use_dora": True}, "use_dora"),
    ):  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(config | wrong))
        assert problem in refused(folder)


@pytest.mark.slow
def test_an_adapter_beside_weights_without_one_is_refused(verl) -> None:
    (verl / "lora_adapter").mkdir()
    (verl / "lora_adapter/adapter_config.json").write_text('{"peft_type": "LORA"}')
    assert "lora_adapter/adapter_config.json lies beside the weights, and these hold no adapter" in refused(verl)


@pytest.mark.slow
def test_ranks_that_are_missing_or_of_another_training(verl, left) -> None:
    first, second = (verl / f"model_world_size_2_rank_{rank}.pt" for rank in range(2))
    kept = second.read_bytes()
    second.unlink()
    assert "lacks the shards of 1 of 2 ranks (1)" in refused(verl)
    second.write_bytes(first.read_bytes())
    assert "the files are not those of all ranks" in refused(verl)
    shutil.copy(left / "openvla/fsdp2" / second.name, second)
    assert "are of different trainings" in refused(verl)
    second.write_bytes(kept)
    (verl / "model_world_size_4_rank_3.pt").write_bytes(kept)
    assert "shards of trainings with 2 and 4 ranks" in refused(verl)
    (verl / "model_world_size_4_rank_3.pt").unlink()
    (verl / "model_world_size_2_rank_01.pt").write_bytes(kept)
    assert "are of one rank: move one of them away" in refused(verl)
    (verl / "model_world_size_2_rank_01.pt").unlink()
    (verl / "fsdp_config.json").write_text('{"world_size": 8}')
    assert "says world_size 8, and the shards are of 2 ranks" in refused(verl)
    assert f"is the part of one rank: name the folder, {verl}" in refused(first)


@pytest.mark.slow
def test_replicas_that_differ(left, tmp_path) -> None:
    folder = Path(shutil.copytree(left / "pi0/hsdp", tmp_path / "actor"))
    path = folder / "model_world_size_2_rank_1.pt"
    data = bytearray(path.read_bytes())
    at = data.find(trained(PI0)[a_matrix()].numpy().tobytes()[:64])
    data[at + 2] ^= 1
    path.write_bytes(data)
    assert "the ranks have different copies of" in refused(folder)


@pytest.mark.slow
def test_local_shards_that_lack_the_last_rank(left, tmp_path) -> None:
    folder = Path(shutil.copytree(left / "pi0/local", tmp_path / "local"))
    (folder / "checkpoint_rank_1.pt").unlink()
    assert "the files are not those of all ranks, or --base names another model" in refused(folder)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda s: s.pop(max(s)), "1 of the base are missing"),
        (lambda s: s.update(surprise=torch.arange(3.0)), "1 are not in the base: 'surprise'"),
        (lambda s: s.update({max(s): torch.zeros(3, 7)}), "--base names another model"),
        (lambda s: s[max(s)].fill_(float("nan")), "not finite"),
        (lambda s: s.update({max(s): s[max(s)].to(torch.int8)}), "only floating-point weights are read"),
        (lambda s: s.update({max(s): 3}), "and not a tensor"),
        (lambda s: s.update({f"_orig_mod.{max(s)}": torch.zeros(1)}), "without wrappers"),
        (lambda s: s.clear(), "holds no tensors by name"),
    ],
    ids=["missing", "unexpected", "shape", "nan", "quantised", "no tensor", "twice", "empty"],
)
def test_state_dicts_of_something_else(tmp_path, change, expected) -> None:
    message = refused(state_file(tmp_path / "left", change))
    assert expected in message and "full_weights.pt" in message


@pytest.mark.slow
def test_the_base_of_another_model(left, bases) -> None:
    assert "does not hold the tensors of" in refused(left / "openvla/full", PI0)
    assert "Name with --base the checkpoint" in refused(left / "openvla/fsdp2", PI0)
    assert "is not a folder here" in refused(left / "pi0/full", PI0 / "none")
    assert "has no config.json" in refused(left / "pi0/full", left)


@pytest.mark.slow
def test_distributed_checkpoints_are_refused_with_the_command_that_converts_them(left, tmp_path) -> None:
    folder = left / "pi0/rlinf/dcp_checkpoint"
    message = refused(folder)
    file = folder.with_name("dcp_checkpoint.pt")
    assert f"`python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {file}`" in message
    for part in (".metadata", "__0_0.distcp"):
        assert recognises(folder / part) and "format_utils dcp_to_torch" in refused(folder / part)
    dcp_to_torch_save(folder, file)  # which that command calls
    converted(file, PI0, tmp_path / "out")
    assert equal(tensors(tmp_path / "out"), trained(PI0))


class Evil:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.folder),)


@pytest.mark.parametrize("name", ["full_weights.pt", "model_world_size_1_rank_0.pt", "checkpoint_rank_0.pt"])
def test_code_in_a_file_is_not_run(tmp_path, name) -> None:
    (tmp_path / "left").mkdir()
    path = tmp_path / "left" / name
    torch.save({**trained(PI0), "extra": Evil(tmp_path / "run")}, path)
    assert "holds more than tensors, and is not read" in refused(tmp_path / "left")
    path.write_bytes(pickle.dumps({"extra": Evil(tmp_path / "run")}, protocol=2))
    assert str(path) in refused(tmp_path / "left")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["full_weights.pt", "model_world_size_2_rank_0.pt", "checkpoint_rank_0.pt"])
@pytest.mark.parametrize("inside", ["", "actor", "actor/model_state_dict"])
@pytest.mark.parametrize(("kind", "base"), [("openvla", "openvla"), ("openvla_oft", "openvla"), ("pi0", "pi0")])
def test_weights_beside_those_of_a_training_are_not_loaded_alone(bases, tmp_path, kind, base, inside, name) -> None:
    folder = Path(shutil.copytree(bases[base], tmp_path / "base"))
    (folder / inside).mkdir(parents=True, exist_ok=True)
    (folder / inside / name).write_bytes(b"x")
    with pytest.raises(PolicyError, match="may be its base alone: make a checkpoint of both first"):
        policies.build(kind, SPEC if kind == "pi0" else ONE_ACTION, seed=0, checkpoint=str(folder))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["openvla", "openvla_oft", "pi0"])
def test_shards_in_the_place_of_a_checkpoint_name_the_import(verl, kind) -> None:
    (verl / "huggingface").mkdir()
    shutil.copy(PI0 / CONFIG, verl / "huggingface")
    for place in (verl, verl / "huggingface")[: 2 if kind == "pi0" else 1]:
        with pytest.raises(PolicyError, match=f"{verl} holds what a training left, which has to be made a checkpoint"):
            policies.build(kind, SPEC if kind == "pi0" else ONE_ACTION, seed=0, checkpoint=str(place))


@pytest.mark.slow
@few_or_many(4)
@pytest.mark.parametrize("how", ["fsdp2", "local", "full/model_state_dict"])
def test_damaged_shards(left, tmp_path, how, cases) -> None:
    whole = Path(shutil.copytree(left / "pi0" / how, tmp_path / "whole"))

    def read(path: Path) -> None:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        (tmp_path / "out").mkdir()
        convert(path, PI0, tmp_path / "out")
        for tensor in read_tensors(tmp_path / "out/model.safetensors").values():
            assert tensor.isfinite().all()

    holds(cases, Damaged(whole, tmp_path / "left", {".pt": damaged_pickle}), read, (PolicyError,))


def damaged_pickle(rng: Random, original: bytes) -> bytes:
    """Bytes of the pickle in an archive changed, which are a small part of it; or of the archive."""
    end = original.find(b"byteorder")
    if rng.random() < 0.3 or end < 0:
        return mutation.content(rng, original)
    data = bytearray(original)
    for _ in range(rng.choice((1, 2, 8))):
        data[rng.randrange(end)] = rng.randrange(256)
    return bytes(data)
