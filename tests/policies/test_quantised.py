"""A frozen base in 4 or 8 bits under an adapter, of every policy that adapters hang on."""

from __future__ import annotations

import copy
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import policies
from policies import Inputs, PolicyError, PolicySpec, lora
from policies.conformance import laws
from policies.contract import actor_parameters
from policies.quantised import (
    BLOCK,
    RELATIVE_ERROR,
    QuantisedEmbedding,
    QuantisedLinear,
    QuantisedMatrix,
    count_weights,
    quantise,
    quantised_layers,
)
from tests.variants import often

ASSETS = Path(__file__).parents[2] / "assets"
ONE = PolicySpec(action_dim=7, cameras=("base",), image_size=56)
FLOW = replace(ONE, chunk=4, proprio_dim=7)
WORDS = PolicySpec(action_dim=1, chunk=12, state_dim=12, discrete_actions=172)


@dataclass(frozen=True)
class Case:
    kind: str
    spec: PolicySpec
    options: dict[str, Any]


def _case(kind: str, spec: PolicySpec, **options: Any) -> Case:
    return Case(kind, spec, {"lora_rank": 4, **options})


CASES = {
    "openvla": _case("openvla", ONE, checkpoint=str(ASSETS / "openvla_small"), unnorm_key="demonstrations"),
    "openvla_oft": _case(
        "openvla_oft", replace(ONE, chunk=2), checkpoint=str(ASSETS / "openvla_small"), unnorm_key="demonstrations"
    ),
    "pi0": _case("pi0", FLOW, checkpoint=str(ASSETS / "pi0_small"), asset="demonstrations", steps=3),
    "pi05": _case("pi0", FLOW, asset="demonstrations", steps=3, prompt="openpi"),
    "smolvla": _case("smolvla", FLOW, checkpoint=str(ASSETS / "smolvla_small"), asset="demonstrations", steps=2),
    "language": _case("language", WORDS, checkpoint=str(ASSETS / "countdown_lm"), rows=2),
}
COSINE = {"int8": 0.99, "nf4": 0.3}
"""Least cosine of the adapter's gradient with that above the plain base; matrices are at most 384 wide."""
PAIRS = (*((name, "nf4") for name in CASES), ("pi0", "int8"))
TEXTS = ("reach the red ball", "push it")


@pytest.fixture(scope="module", autouse=True)
def pi05(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A directory of a pi0.5 of the size of `pi0_small`, with random weights."""
    folder = tmp_path_factory.mktemp("pi05")
    shutil.copyfile(ASSETS / "pi0_small" / "tokenizer.model", folder / "tokenizer.model")
    config = json.loads((ASSETS / "pi0_small" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"random_weights": 0, "pi05": True}))
    CASES["pi05"].options["checkpoint"] = str(folder)


def build(name: str, base: str | None, **options: Any) -> Any:
    """The policy after some training. Any: tests look into it."""
    case = CASES[name]
    policy = policies.build(case.kind, case.spec, 0, base, **{**case.options, **options})
    laws.perturb(policy, 0.02, seed=6)
    return policy


def inputs_of(name: str, rows: int = 4) -> Inputs:
    spec = CASES[name].spec
    if spec.discrete_actions:
        return Inputs(
            instruction=tuple(f"Make {20 + row} from 3, 8, 20." for row in range(rows)),
            state=torch.full((rows, 12), -1.0),
        )
    found = laws.random_inputs(spec, rows, seed=3)
    return replace(found, instruction=tuple(TEXTS[row % 2] for row in range(rows)))


def imitation_gradient(policy: Any, name: str) -> Tensor:
    """The adapter's gradient of the loss on demonstrations."""
    actions, counted = laws.demonstrations(policy, 4)
    policy.zero_grad()
    policy.imitate(inputs_of(name), actions, counted, laws.random_noise(policy, 4, seed=1)).sum().backward()
    return torch.cat([p.grad.flatten() for p in actor_parameters(policy) if p.grad is not None])


def nbytes(parameters: Any) -> int:
    return sum(p.numel() * p.element_size() for p in parameters)


def all_alike(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return x.keys() == y.keys() and all(torch.equal(x[name], y[name]) for name in x)


@pytest.mark.parametrize("base", ["nf4", "int8"])
@pytest.mark.parametrize("name", CASES)
def test_rollout_and_update_compute_with_one_quantised_base(name, base):
    policy, plain = build(name, base), build(name, None)
    assert sum(1 for _ in quantised_layers(policy)) >= 20
    assert count_weights(policy) == count_weights(plain)
    trained = [n for n, p in policy.named_parameters() if p.requires_grad]
    assert trained == [n for n, p in plain.named_parameters() if p.requires_grad]
    inputs = inputs_of(name)
    action = policy.act(inputs, laws.random_noise(policy, 4, seed=1))
    # A second policy, as another process builds it, decides the same.
    again = build(name, base).act(inputs, laws.random_noise(policy, 4, seed=1))
    assert torch.equal(action.chunk, again.chunk) and torch.equal(action.log_prob, again.log_prob)
    scored = policy.evaluate(inputs, action.trace)
    ratio = (scored.log_prob - action.log_prob).sum((1, 2)).exp()
    assert (ratio - 1).abs().mean().item() < 1e-5
    ours, theirs = imitation_gradient(policy, name), imitation_gradient(plain, name)
    assert float(torch.cosine_similarity(ours, theirs, dim=0)) >= COSINE[base]
    assert not torch.equal(ours, theirs)


LAWS = [
    laws.law_shapes_and_dtypes,
    laws.law_scores_agree,
    laws.law_rows_are_independent,
    laws.law_act_leaves_no_graph,
    laws.law_saved_policy_is_the_policy,
]


@pytest.mark.parametrize(("name", "base"), often((("openvla", "nf4"), ("pi0", "int8")), PAIRS))
def test_quantised_policies_obey_the_laws(name, base):
    for law in LAWS:
        law(build(name, base), inputs_of(name))
    if name != "language":  # answers are of a length that the host asks for
        laws.law_all_is_computed_on_the_policys_device(build(name, base), inputs_of(name))


@pytest.mark.parametrize(("base", "share"), [("nf4", 0.30), ("int8", 0.55)])
def test_bytes_of_a_quantised_base(tmp_path, base, share):
    folder = tmp_path / "wide"
    folder.mkdir()
    for path in (ASSETS / "countdown_lm").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 2}
    (folder / "config.json").write_text(json.dumps({**config, **sizes}))
    frozen = {}
    for each in (None, base):
        policy = build("language", each, checkpoint=str(folder), dtype="bfloat16")
        frozen[each] = nbytes(p for p in policy.parameters() if not p.requires_grad)
    assert frozen[base] <= share * frozen[None]


@pytest.mark.parametrize(("name", "base"), PAIRS)
def test_an_export_is_the_dequantised_base_with_the_adapter(name, base, tmp_path):
    policy = build(name, base)
    policies.export(policy, tmp_path / "merged")
    options = {k: v for k, v in CASES[name].options.items() if k not in ("lora_rank", "asset")}
    merged = policies.build(
        CASES[name].kind, CASES[name].spec, 0, **{**options, "checkpoint": str(tmp_path / "merged")}
    )
    inputs = inputs_of(name)
    torch.testing.assert_close(merged.act(inputs, None).chunk, policy.act(inputs, None).chunk, atol=2e-3, rtol=2e-3)
    base_files = lora.plain_state(build(name, None).adaptable)
    quantised = lora.plain_state(policy.adaptable)
    assert base_files.keys() == quantised.keys()
    assert {name: t.shape for name, t in quantised.items()} == {name: t.shape for name, t in base_files.items()}
    changed = [name for name, tensor in quantised.items() if not torch.equal(tensor, base_files[name])]
    assert len(changed) == len({id(layer.matrix) for _, layer in quantised_layers(policy)})


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_rows_of_an_embedding_are_those_of_its_matrix(base):
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        matrix = QuantisedMatrix(torch.randn(100, 192).to(dtype), base)
        index = torch.tensor([[3, 99], [0, 3]])
        assert matrix.dequantised().dtype == dtype
        assert torch.equal(matrix.rows(index), matrix.dequantised()[index])


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_what_quantising_changes(base):
    weight = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    changed = QuantisedMatrix(weight, base).dequantised() - weight
    assert float(changed.norm() / weight.norm()) == pytest.approx(RELATIVE_ERROR[base], rel=0.03)


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_layers_that_share_a_matrix_share_the_quantised_one(base):
    model = nn.ModuleDict({"words": nn.Embedding(100, 64), "head": nn.Linear(64, 100, bias=False)})
    model["head"].weight = model["words"].weight
    model.requires_grad_(False)
    quantise(model, base)
    assert isinstance(model["words"], QuantisedEmbedding) and isinstance(model["head"], QuantisedLinear)
    assert model["words"].matrix is model["head"].matrix
    assert count_weights(model) == 6400


def test_trained_and_narrow_layers_stay_as_they_are():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, BLOCK - 1), nn.Linear(BLOCK - 1, 64), nn.Linear(64, 64))
    model[1].requires_grad_(False)
    model[3].requires_grad_(False)
    quantise(model, "nf4")
    assert [type(layer) for layer in model] == [nn.Linear, nn.Linear, nn.Linear, QuantisedLinear]


@pytest.mark.parametrize("base", ["nf4", "int8"])
def test_gradients_of_a_quantised_layer_are_those_of_its_dequantised_matrix(base):
    torch.manual_seed(1)
    layer = nn.Linear(96, 128)
    layer.weight.requires_grad_(False)
    model = nn.Sequential(layer)
    quantise(model, base)
    plain = copy.deepcopy(layer)
    quantised: Any = model[0]
    plain.weight.data = quantised.weight
    found = []
    for module in (model[0], plain):
        x = torch.linspace(-1, 1, 5 * 96).view(5, 96).requires_grad_()
        module(x).square().sum().backward()
        found.append(x.grad)
    torch.testing.assert_close(*found)
    torch.testing.assert_close(model[0].bias.grad, plain.bias.grad)


def test_a_copy_without_memory_has_no_copy_of_the_base():
    from embodied.learning.parallel import copy_without_memory

    copied = copy_without_memory(build("openvla", "nf4"))
    assert all(p.is_meta for p in copied.parameters())
    assert not list(copied.adaptable.buffers()) or nbytes(copied.adaptable.buffers()) < 2**14


def test_an_adapter_moves_between_a_quantised_base_and_the_plain_one(tmp_path):
    """Its file names the base as it was, and a folder says in what its base was stored."""
    for base, other in (("nf4", None), (None, "int8")):
        folder = tmp_path / str(base)
        trained = build("openvla", base)
        policies.save(trained, folder)
        assert policies.load(folder).base == base
        found = policies.build("openvla", ONE, 1, other, **CASES["openvla"].options)
        policies.load_into(found, folder)
        assert all_alike(
            {n: p for n, p in trained.named_parameters() if p.requires_grad},
            {n: p for n, p in found.named_parameters() if p.requires_grad},
        )
        assert (folder / "policy" / "model.safetensors").exists() is False


@pytest.mark.parametrize(
    ("kind", "spec", "base", "options", "says"),
    [
        ("openvla", ONE, "nf4", {"lora_rank": 0}, "set policy.options.lora_rank"),
        ("gaussian_mlp", PolicySpec(action_dim=2, state_dim=3), "nf4", {}, "Leave policy.base out"),
        ("openvla", ONE, "fp4", {}, "nf4 or int8"),
    ],
)
def test_a_base_that_cannot_be_quantised_is_refused(kind, spec, base, options, says):
    given = {**(CASES[kind].options if kind in CASES else {}), **options}
    with pytest.raises(PolicyError, match=says):
        policies.build(kind, spec, 0, base, **given)
    with pytest.raises(PolicyError, match=says):
        policies.registry.check(kind, given, base)


def test_a_model_without_wide_frozen_layers_is_refused():
    with pytest.raises(PolicyError, match="nothing can be quantised"):
        quantise(nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), "nf4")


def test_a_folder_with_an_unknown_type_of_base_is_refused(tmp_path):
    policies.save(build("openvla", "nf4"), tmp_path)
    path = tmp_path / "policy" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantised_base": ["nf4"]}))
    with pytest.raises(PolicyError, match="a base is of nf4 or int8"):
        policies.load(tmp_path)
