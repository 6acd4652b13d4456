"""Small policies that decide on several observations."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import policies
from policies import Inputs, Policy, PolicyError, PolicySpec, files
from policies.capabilities import earlier_actions
from policies.conformance import laws
from policies.layers import counted_mean, mlp, only_counted
from policies.policy_kind import PolicyKind
from policies.registry import check, policy_kind
from policies.small.encoders import HistoryFormat
from policies.small.gaussian_mlp import GaussianMLP
from tests.policies.test_policy_laws import HISTORY, IMAGE, SMALL, STATE, trained


def changed(inputs: Inputs, place: int) -> Inputs:
    """The inputs with another observation at `place` of K."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        tensor[:, place] = 255 - tensor[:, place] if tensor.dtype == torch.uint8 else tensor[:, place] + 1
        return tensor

    return replace(
        inputs,
        state=None if inputs.state is None else other(inputs.state),
        proprio=None if inputs.proprio is None else other(inputs.proprio),
        frames={name: other(frames) for name, frames in inputs.frames.items()},
    )


@pytest.mark.parametrize("case", HISTORY)
def test_each_observation_moves_the_decision(case):
    policy = trained(*HISTORY[case])
    inputs = laws.random_inputs(policy.spec, 6, seed=7)
    before = policy.act(inputs, None).chunk
    for place in range(policy.spec.observations):
        moved = (policy.act(changed(inputs, place), None).chunk != before).flatten(1).any(1)
        assert moved.all(), f"observation {place} of {policy.spec.observations} does not matter"


@pytest.mark.parametrize("case", HISTORY)
def test_statistics_are_of_the_present_observations(case):
    kind, spec, options = HISTORY[case]
    policy = trained(kind, spec, options)
    one = policies.build(kind, spec, seed=0, **{**options, "observations": 1, "distance": 1})
    assert one.spec.observations == 1
    inputs = laws.random_inputs(policy.spec, 100, seed=5)
    now = replace(
        inputs,
        state=None if inputs.state is None else inputs.state[:, -1],
        proprio=None if inputs.proprio is None else inputs.proprio[:, -1],
        frames={name: frames[:, -1] for name, frames in inputs.frames.items()},
    )
    one.observe(now)
    means = {name: tensor for name, tensor in one.state_dict().items() if name.endswith((".mean", ".var", ".count"))}
    assert means
    for name, tensor in means.items():
        assert torch.equal(policy.state_dict()[name], tensor), name


def test_a_critic_on_states_reads_the_present_one():
    policy = trained(*HISTORY["flow, one camera, and the present state is predicted"])
    inputs = laws.random_inputs(policy.spec, 6, seed=7)
    assert inputs.state is not None
    for place, same in ((0, True), (1, False)):
        state = inputs.state.clone()
        state[:, place] += 1
        values = policy.value(replace(inputs, state=state))
        assert torch.equal(values, policy.value(inputs)) == same


@pytest.mark.parametrize("kind", ["gaussian_mlp", "flow"])
def test_one_observation_is_what_the_options_default_to(kind):
    """The weights that the seed gives, and decisions, are those of a policy whose options do not name them."""
    plain: Policy = policies.build(kind, STATE, seed=3, **SMALL)
    named: Policy = policies.build(kind, STATE, seed=3, **SMALL, observations=1, distance=1)
    assert plain.architecture() == named.architecture() and plain.spec == named.spec == STATE
    for name, tensor in plain.state_dict().items():
        assert torch.equal(tensor, named.state_dict()[name])


def test_a_policy_saved_before_there_were_observations_is_loaded(tmp_path):
    policy = trained("gaussian_mlp", STATE, SMALL)
    policies.save(policy, tmp_path)
    path = tmp_path / "policy" / "config.json"
    config = files.read_json(path)
    for name in ("observations", "distance"):
        del config["spec"][name], config["architecture"][name]
    files.write_json(path, config)
    loaded = policies.load(tmp_path)
    policies.load_into(policy, tmp_path)
    assert loaded.spec == policy.spec and loaded.architecture() == policy.architecture()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observations": 0}, "observations 0 and distance 1: each is of 1 to 64"),
        ({"observations": 2, "distance": 65}, "observations 2 and distance 65"),
        ({"observations": 2.5}, "observations is of the kind of 1, got 2.5"),
        ({"observations": "2"}, "observations is of the kind of 1, got '2'"),
    ],
)
@pytest.mark.parametrize("kind", ["gaussian_mlp", "flow"])
def test_observations_that_no_policy_has_are_refused(kind, options, message):
    with pytest.raises(PolicyError, match=message):
        policies.build(kind, STATE, seed=0, **SMALL, **options)
    with pytest.raises(PolicyError, match=message):
        check(kind, {**SMALL, **options})  # before the task is known


def test_kinds_without_history_refuse_it():
    spec = PolicySpec(action_dim=1, chunk=1, state_dim=5, discrete_actions=4)
    with pytest.raises(PolicyError, match="categorical_mlp has no architecture argument 'observations'"):
        policies.build("categorical_mlp", spec, seed=0, observations=2)
    with pytest.raises(PolicyError, match="decides on 1 observations at a distance of 1 env steps, and the spec has 2"):
        policies.build("categorical_mlp", replace(spec, observations=2), seed=0)


def test_inputs_of_another_number_of_observations_are_refused():
    two = trained("gaussian_mlp", STATE, {**SMALL, "observations": 2})
    one = trained("gaussian_mlp", STATE, SMALL)
    with pytest.raises(PolicyError, match=r"reads state \[B, 2, 5\], the inputs have \[6, 5\]"):
        two.act(laws.random_inputs(STATE, 6, seed=7), None)
    with pytest.raises(PolicyError, match=r"reads state \[B, 5\], the inputs have \[6, 2, 5\]"):
        one.act(laws.random_inputs(two.spec, 6, seed=7), None)
    camera = trained("flow", replace(IMAGE, proprio_dim=0), {**SMALL, "encoder": "cnn", "observations": 2})
    with pytest.raises(PolicyError, match=r"frames of 'base' must be uint8 \[B, 2, 32, 32, 3\], got uint8 \[6, 32"):
        camera.act(laws.random_inputs(replace(IMAGE, proprio_dim=0), 6, seed=7), None)


def test_a_format_that_disagrees_with_its_policy_is_refused():
    """A class derived from one with the option, whose kind does not say how many observations are read."""
    assert policy_kind("tests.policies.test_history:Derived").format.observations({"observations": 2}) == (1, 1)
    with pytest.raises(PolicyError, match="a spec of 2 observations at a distance of 1, and its format says 1 at 1"):
        policies.build("tests.policies.test_history:Derived", STATE, seed=0, **SMALL, observations=2)


class Derived(GaussianMLP):
    """A user's class without a `PolicyKind` of its own."""


class Earlier(GaussianMLP):
    """Predicts from the action before the present one on, which it executes none of."""

    earlier_actions = 1

    def __init__(
        self,
        spec: PolicySpec,
        *,
        widths: Sequence[int] = (32,),
        critic_widths: Sequence[int] | None = None,
        initial_log_std: float = -1.0,
        observations: int = 1,
        distance: int = 1,
    ) -> None:
        options: Any = {"initial_log_std": initial_log_std, "observations": observations, "distance": distance}
        super().__init__(spec, widths=widths, critic_widths=critic_widths, **options)
        self.before = mlp(self.spec.observations * spec.state_dim, [], spec.action_dim, last_gain=1.0)

    def imitate(
        self, inputs: Inputs, actions: torch.Tensor, counted: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        said = self.before(self._state(inputs))[:, None]
        off = counted_mean((said - only_counted(actions[:, :1], counted[:, :1])).square(), counted[:, :1])
        return off + super().imitate(inputs, actions[:, 1:], counted[:, 1:], noise)


EARLIER = PolicyKind(Earlier, format=HistoryFormat(), scales_to_bounds=True)


@pytest.mark.parametrize("law", laws.IMITATION_LAWS, ids=lambda law: law.__name__)
def test_a_policy_that_imitates_earlier_actions_obeys(law):
    policy = trained("tests.policies.test_history:EARLIER", replace(STATE, chunk=3), {**SMALL, "observations": 2})
    assert earlier_actions(policy) == 1
    law(policy, laws.random_inputs(policy.spec, 6, seed=7))
