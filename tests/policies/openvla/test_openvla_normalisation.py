"""Units that come from demonstrations: taken over once, and kept wherever the policy goes."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policies
from policies import PolicyError
from policies.openvla.normalisation import DEMONSTRATIONS, STATISTICS, read_datasets
from tests.policies.openvla.cases import CHUNK, OFT, ONE_ACTION, error, gripper_of, make, random_inputs
from tests.policies.openvla.tiny import write_tiny

LORA = {"lora_rank": 3}
LIBERO = gripper_of("libero")
WAYS: dict[str, dict[str, Any]] = {"adapter": LORA, "whole": {}}


def actions(seed: int = 1, rows: int = 501) -> torch.Tensor:
    """[N, 7]: each dimension of another spread, the gripper's commands -1 and 1."""
    found = torch.randn(rows, 7, generator=torch.Generator().manual_seed(seed)) * torch.arange(1, 8) / 10
    found[:, -1] = found[:, -1].sign()
    return found


def tuned(checkpoint: Path, **options: Any) -> Any:
    """A policy that has adopted the units of demonstrations."""
    policy = make("openvla", ONE_ACTION, checkpoint, **{"unnorm_key": DEMONSTRATIONS, "transforms": LIBERO, **options})
    policy.adopt_units(actions(), None)
    return policy


def same(a: Any, b: Any) -> bool:
    first, second = a.statistics.state_dict(), b.statistics.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_before_there_are_demonstrations_units_are_the_networks(tiny):
    policy = make("openvla", ONE_ACTION, tiny, unnorm_key=DEMONSTRATIONS)
    normalised = torch.linspace(-0.9, 0.9, 7)[None]
    assert error(policy.in_units(normalised, None)[0], normalised) <= 1e-7
    assert policy.statistics.mask.all()


@pytest.mark.parametrize(("gripper", "mask"), [("raw", [True] * 7), ("libero", [True] * 6 + [False])])
def test_units_are_the_percentiles_of_the_demonstrations(tiny, gripper, mask):
    statistics = tuned(tiny, transforms=gripper_of(gripper)).statistics
    low, high = np.quantile(actions().double().numpy(), (0.01, 0.99), axis=0)
    dims = 7 if gripper == "raw" else 6
    assert statistics.low.tolist()[:dims] == low.tolist()[:dims]
    assert statistics.high.tolist()[:dims] == high.tolist()[:dims]
    assert statistics.mask.tolist() == mask
    if gripper == "libero":  # what the model says: 0 closed, 1 open
        assert (statistics.low[-1], statistics.high[-1]) == (0, 1)


def test_the_checkpoints_own_units_stay(tiny):
    policy = make("openvla", ONE_ACTION, tiny)
    policy.adopt_units(actions(), None)
    assert same(policy, make("openvla", ONE_ACTION, tiny)) and policy.statistics.key == "tiny"


def test_a_checkpoint_without_statistics_can_learn_demonstrations(tmp_path):
    folder = write_tiny(tmp_path / "none", datasets=())
    policy = tuned(folder)
    policies.export(policy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / STATISTICS).read_text()).keys() == {DEMONSTRATIONS}
    with pytest.raises(PolicyError, match="no statistics in"):
        make("openvla", ONE_ACTION, folder)


@pytest.mark.parametrize("way", WAYS)
def test_units_are_saved_with_the_policy(tiny, tmp_path, way):
    policy = tuned(tiny, **WAYS[way])
    policies.save(policy, tmp_path)
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    other = make("openvla", ONE_ACTION, tiny, unnorm_key=DEMONSTRATIONS, transforms=LIBERO, **WAYS[way])
    other.adopt_units(actions(seed=2), None)
    assert not same(policy, other)
    policies.load_into(other, tmp_path)
    for copied in (policies.load(tmp_path), other):
        assert same(policy, copied)
        assert error(copied.act(inputs, None).chunk, policy.act(inputs, None).chunk) == 0


def test_units_go_where_the_weights_go(tiny):
    policy = tuned(tiny)
    worker = make("openvla", ONE_ACTION, tiny, unnorm_key=DEMONSTRATIONS, transforms=LIBERO)
    worker.load_state_dict({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    assert same(policy, worker)


def test_units_are_moved_and_never_cast(tiny):
    policy = tuned(tiny)
    before = policy.statistics.low.clone()
    policy.to(torch.bfloat16)
    assert policy.model.dtype == torch.bfloat16
    assert policy.statistics.low.dtype == torch.float64 and torch.equal(policy.statistics.low, before)
    policy.to("meta", torch.float16)
    assert {tensor.device.type for tensor in policy.statistics.buffers()} == {"meta"}
    assert policy.statistics.proprio_high.dtype == torch.float64 and policy.statistics.mask.dtype == torch.bool


def test_an_adapter_brings_its_units_to_another_run(tiny, tmp_path):
    policy = tuned(tiny, **LORA)
    policies.save(policy, tmp_path)
    (tmp_path / "policy/config.json").unlink()  # PEFT's directory alone
    again = policies.build(
        "openvla", ONE_ACTION, 0, checkpoint=str(tiny), adapter=str(tmp_path / "policy"), unnorm_key=DEMONSTRATIONS
    )
    assert same(policy, again)


@pytest.mark.parametrize("way", WAYS)
def test_an_exported_checkpoint_says_what_its_units_are(tmp_path, way):
    """Beside those of the checkpoint's own datasets, in both places in which the reference looks."""
    origin = write_tiny(tmp_path / "origin", datasets=("libero_spatial", "bridge"))
    policy = tuned(origin, **WAYS[way])
    policies.export(policy, tmp_path / "out")
    written = json.loads((tmp_path / "out" / STATISTICS).read_text())
    before = json.loads((origin / "config.json").read_text())["norm_stats"]
    assert written.keys() == {"libero_spatial", "bridge", DEMONSTRATIONS}
    assert before.items() <= written.items()
    assert json.loads((tmp_path / "out/config.json").read_text())["norm_stats"] == written
    entry = written[DEMONSTRATIONS]["action"]
    assert entry["q01"] == policy.statistics.low.tolist() and entry["mask"] == [True] * 6 + [False]
    exported = policies.build(
        "openvla", ONE_ACTION, 0, checkpoint=str(tmp_path / "out"), unnorm_key=DEMONSTRATIONS, transforms=LIBERO
    )
    assert same(policy, exported)
    shared = policies.build("openvla", ONE_ACTION, 0, checkpoint=str(tmp_path / "out"), unnorm_key="bridge")
    assert same(shared, make("openvla", ONE_ACTION, origin, unnorm_key="bridge"))


def test_proprioception_has_units_too(tmp_path):
    folder = Path(shutil.copytree(OFT / "checkpoint", tmp_path / "checkpoint"))
    spec = replace(CHUNK, chunk=4, proprio_dim=8)
    options: dict[str, Any] = {"unnorm_key": DEMONSTRATIONS, "head": "tokens", "proprio": True}
    policy = make("openvla_oft", spec, folder, **options)
    seen = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    assert error(policy.statistics.normalise_proprio(seen), seen.clamp(-1, 1)) <= 1e-6
    with pytest.raises(PolicyError, match="reads proprioception, which the demonstrations lack"):
        policy.adopt_units(actions(), None)
    policy.adopt_units(actions(), seen)
    low, high = np.quantile(seen.double().numpy(), (0.01, 0.99), axis=0)
    assert policy.statistics.proprio_low.tolist() == low.tolist()
    assert policy.statistics.proprio_high.tolist() == high.tolist()
    policies.save(policy, tmp_path / "run")
    assert same(policy, policies.load(tmp_path / "run"))
    policies.export(policy, tmp_path / "out")
    entry = json.loads((tmp_path / "out" / STATISTICS).read_text())[DEMONSTRATIONS]["proprio"]
    assert entry == {"q01": low.tolist(), "q99": high.tolist()}


@pytest.mark.parametrize(
    "wrong", [actions()[:, :6], actions()[:0], actions()[0], torch.full((3, 7), torch.nan)], ids=str
)
def test_impossible_demonstrations_are_refused(tiny, wrong):
    with pytest.raises(PolicyError, match=r"demonstrated actions must be finite numbers \[N, 7\], got"):
        make("openvla", ONE_ACTION, tiny, unnorm_key=DEMONSTRATIONS).adopt_units(wrong, None)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.unlink(), "no statistics in"),
        (lambda path: path.write_text("{"), "dataset_statistics.json cannot be read"),
        (lambda path: path.write_text('{"tiny": {}}'), "unknown unnorm_key 'demonstrations'"),
        (
            lambda path: path.write_text('{"demonstrations": {"action": {"q01": [0], "q99": [1]}}}'),
            "have 1 low, not 7",
        ),
    ],
)
def test_a_saved_adapter_without_its_units_is_refused(tiny, tmp_path, damage, message):
    policy = tuned(tiny, **LORA)
    policies.save(policy, tmp_path)
    damage(tmp_path / "policy" / STATISTICS)
    with pytest.raises(PolicyError, match=message):
        policies.load_into(policy, tmp_path)
    assert same(policy, tuned(tiny, **LORA))


def test_percentiles_that_are_swapped_are_refused(tmp_path):
    """Every action would be mirrored."""
    folder = Path(write_tiny(str(tmp_path / "tiny")))
    path = folder / STATISTICS
    datasets = read_datasets(folder, json.loads((folder / "config.json").read_text()))
    entry = datasets["tiny"]["action"]
    entry["q01"], entry["q99"] = entry["q99"], entry["q01"]
    path.write_text(json.dumps(datasets))
    with pytest.raises(PolicyError, match="q01 is above q99 in dimension 0. Copy dataset_statistics.json again"):
        make("openvla", ONE_ACTION, folder, unnorm_key="tiny")
    del entry["q01"]
    path.write_text(json.dumps(datasets))
    with pytest.raises(PolicyError, match="it lacks 'q01'"):
        make("openvla", ONE_ACTION, folder, unnorm_key="tiny")
