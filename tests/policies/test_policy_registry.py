"""Building from a seed, the files on disk, and every way in which they can be wrong."""

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import PolicyError, PolicySpec, kinds
from policies.conformance.laws import perturb
from policies.contract import actor_parameters
from policies.registry import policy_kind
from policies.small.gaussian_mlp import GaussianMLP

SPEC = PolicySpec(action_dim=3, chunk=2, state_dim=5)
SMALL = {"widths": [16, 16], "critic_widths": [8]}
KINDS = ["gaussian_mlp", "flow"]


def build(kind: str = "gaussian_mlp", spec: PolicySpec = SPEC, seed: int = 0, **architecture):
    return policies.build(kind, spec, seed, **{**SMALL, **architecture})


def same(a: policies.Policy, b: policies.Policy) -> bool:
    other = b.state_dict()
    return all(torch.equal(tensor, other[name]) for name, tensor in a.state_dict().items())


@pytest.fixture
def saved(tmp_path) -> Path:
    policies.save(build(), tmp_path)
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_seed_determines_the_policy_and_nothing_else(kind):
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    first = build(kind)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(2)
    assert same(first, build(kind))
    assert not same(first, build(kind, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_value_head_is_the_critic_and_shares_no_parameter(kind):
    policy = build(kind)
    critic = {id(p) for p in policy.value_head.parameters()}
    actor = {id(p) for p in actor_parameters(policy)}
    assert critic and not critic & actor
    assert critic | actor == {id(p) for p in policy.parameters()}


def test_unknown_names_come_with_the_nearest():
    with pytest.raises(PolicyError, match="unknown policy 'gausian_mlp'; did you mean gaussian_mlp"):
        build("gausian_mlp")
    with pytest.raises(PolicyError, match="unknown policy 'xyz'; valid: act, categorical_mlp, countdown_solver, diff"):
        build("xyz")
    with pytest.raises(PolicyError, match="no architecture argument 'width'; did you mean widths"):
        build(width=3)


@pytest.mark.parametrize("widths", ["abc", 5, [0], [16, 2.5], [-1]])
def test_impossible_widths_are_refused(widths):
    with pytest.raises(PolicyError, match="critic_widths is a list of positive layer widths"):
        build(critic_widths=widths)


@pytest.mark.parametrize(
    "wrong",
    [{"steps": "4"}, {"joint": 1}, {"steps": True}, {"encoder": ["cnn"]}, {"widths": 5}, {"start_std": "x"}],
)
def test_values_of_another_type_are_refused(wrong):
    with pytest.raises(PolicyError, match=f"flow's {next(iter(wrong))} is of the kind of .*, got"):
        build("flow", **wrong)


def test_an_empty_action_is_refused():
    with pytest.raises(PolicyError, match="must be at least 1, got 3, 0"):
        build(spec=replace(SPEC, chunk=0))


def test_a_horizon_that_does_not_fit_is_refused():
    with pytest.raises(PolicyError, match="horizon of 2: gaussian_mlp executes all that it predicts; .* is 4"):
        build(spec=replace(SPEC, chunk=2, horizon=4))
    with pytest.raises(PolicyError, match="need a horizon of at least that; policy.horizon is 1"):
        build("flow", spec=replace(SPEC, chunk=2, horizon=1))


def test_what_was_saved_before_there_was_a_horizon_is_loaded(tmp_path):
    policy = build("flow", spec=replace(SPEC, chunk=2))
    policies.save(policy, tmp_path)
    config = json.loads((tmp_path / "policy/config.json").read_text())
    del config["spec"]["horizon"]
    (tmp_path / "policy/config.json").write_text(json.dumps(config))
    policies.load_into(policy, tmp_path)
    assert policies.load(tmp_path).spec == policy.spec


def test_a_policy_of_the_other_kind_of_actions_is_refused():
    choices = PolicySpec(action_dim=1, state_dim=5, discrete_actions=3)
    for kind in ("gaussian_mlp", "flow", "random"):
        with pytest.raises(PolicyError, match=f"one of 3 choices, and {kind} says .* policy.kind to categorical_mlp"):
            policies.build(kind, choices, 0)
    with pytest.raises(PolicyError, match="chooses among .* are real numbers: set policy.kind to gaussian_mlp"):
        build("categorical_mlp")


def test_a_state_policy_needs_a_state():
    with pytest.raises(PolicyError, match="state_dim must be at least 1"):
        build(spec=PolicySpec(action_dim=3, cameras=("base",)))


def test_files_are_where_the_checkpoint_layout_says(saved):
    files = sorted(str(path.relative_to(saved)) for path in saved.rglob("*") if path.is_file())
    assert files == ["policy/config.json", "policy/model.safetensors", "value_head.safetensors"]
    actor = load_file(saved / "policy/model.safetensors")
    assert "normalizer.mean" in actor and "log_std" in actor
    assert not any(name.startswith("value_head") for name in actor)


def test_saving_again_replaces(saved):
    policy = build(seed=1)
    policies.save(policy, saved)
    assert same(policies.load(saved), policy)


@pytest.mark.parametrize("file", ["policy/config.json", "policy/model.safetensors", "value_head.safetensors"])
def test_missing_file_is_named(saved, file):
    (saved / file).unlink()
    with pytest.raises(PolicyError, match=f"{file} is missing"):
        policies.load(saved)


@pytest.mark.parametrize("file", ["policy/config.json", "policy/model.safetensors", "value_head.safetensors"])
def test_truncated_file_is_named_and_no_tensor_of_it_is_used(saved, file):
    path = saved / file
    path.write_bytes(path.read_bytes()[:-40])
    policy = build(seed=1)
    with pytest.raises(PolicyError, match=file):
        policies.load_into(policy, saved)
    assert same(policy, build(seed=1))
    with pytest.raises(PolicyError, match=file):
        policies.load(saved)


def test_pickle_is_not_read(saved):
    class Bomb:
        def __reduce__(self):
            return (Path.write_text, (saved / "executed", "x"))

    (saved / "value_head.safetensors").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PolicyError, match="damaged or no safetensors"):
        policies.load(saved)
    assert not (saved / "executed").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("log_std"), "lacks the tensor 'log_std'"),
        (lambda t: t.update(extra=torch.zeros(1)), "a tensor that this policy has not: 'extra'"),
        (
            lambda t: t.update(log_std=torch.zeros(3)),
            r"'log_std' is float32 \[3\], expected float32 \[2, 3\]",
        ),
        (
            lambda t: t.update(log_std=torch.zeros(2, 3, dtype=torch.bfloat16)),
            r"'log_std' is bfloat16 \[2, 3\], expected float32 \[2, 3\]",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(saved, change, message):
    path = saved / "policy/model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    policy = build(seed=1)
    with pytest.raises(PolicyError, match=message):
        policies.load_into(policy, saved)
    assert same(policy, build(seed=1))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "must hold an object"),
        ("{", "cannot be read"),
        ({"kind": 3}, "must hold kind"),
        ({"kind": "flo"}, "unknown policy 'flo'; did you mean flow"),
        ({"spec": {"chunk": 2}}, "spec.action_dim is missing"),
        ({"spec": {"action_dim": "3"}}, "spec.action_dim cannot be '3'"),
        ({"spec": {"action_dim": 3, "chunks": 2}}, "spec has no field 'chunks'; did you mean chunk"),
        ({"architecture": {"wide": 1}}, "no architecture argument 'wide'"),
    ],
)
def test_wrong_configuration_is_explained(saved, config, message):
    path = saved / "policy/config.json"
    text = config if isinstance(config, str) else json.dumps(json.loads(path.read_text()) | config)
    path.write_text(text)
    with pytest.raises(PolicyError, match=message):
        policies.load(saved)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: build("flow"), "it holds a gaussian_mlp for .*'state_dim': 5.* expected a flow for"),
        (lambda: build(spec=replace(SPEC, state_dim=7)), "spec.state_dim is 5, expected 7"),
        (lambda: build(widths=[16, 8]), r"architecture.widths is \[16, 16\], expected \[16, 8\]"),
    ],
)
def test_checkpoint_of_another_policy_is_refused(saved, other, message):
    with pytest.raises(PolicyError, match=f"holds another policy than this run's: {message}"):
        policies.load_into(other(), saved)


def without(folder: Path, *names: str) -> None:
    """As an older version wrote it, before there were these entries of the architecture."""
    path = folder / "policy/config.json"
    config = json.loads(path.read_text())
    for name in names:
        del config["architecture"][name]
    path.write_text(json.dumps(config))


class Sharded(GaussianMLP):
    """A policy with a number that has the name of a capability's method."""

    def __init__(self, spec, **options):
        super().__init__(spec, **options)
        self.shards = 4


def test_an_attribute_with_the_name_of_a_capability_is_refused():
    with pytest.raises(PolicyError, match="has an attribute 'shards', .* by which a policy is GathersInGroups"):
        policies.build(f"{__name__}:Sharded", PolicySpec(2, state_dim=3), 0)


def test_what_an_older_checkpoint_lacks_is_the_default(tmp_path):
    policies.save(build("flow"), tmp_path)
    without(tmp_path, "steps", "joint", "encoder")
    policy = build("flow", seed=1)
    policies.load_into(policy, tmp_path)
    assert same(policy, build("flow")) and same(policy, policies.load(tmp_path))
    with pytest.raises(PolicyError, match="architecture.steps is 4, expected 2\\. Set"):
        policies.load_into(build("flow", steps=2), tmp_path)


def test_a_list_that_an_older_checkpoint_lacks_is_the_default(tmp_path):
    policies.save(policies.build("gaussian_mlp", SPEC, 0), tmp_path)
    without(tmp_path, "widths")
    policy = policies.build("gaussian_mlp", SPEC, 1)
    policies.load_into(policy, tmp_path)
    assert same(policy, policies.build("gaussian_mlp", SPEC, 0))


def test_load_into_replaces_every_tensor(saved):
    policy = build(seed=1)
    perturb(policy, 0.1, 2)
    policy.observe(policies.Inputs(state=torch.ones(3, 5)))
    policies.load_into(policy, saved)
    assert same(policy, build())


def test_the_kinds_without_weights_are_those_that_cannot_be_trained():
    assert {kind for kind in kinds.KINDS if not policy_kind(kind).trainable} == kinds.WITHOUT_WEIGHTS
