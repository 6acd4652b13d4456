"""pi0 and pi0.5 as policies: the laws of all, and what is theirs alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies import Inputs, Policy, PolicyError, PolicySpec
from policies.conformance import laws
from tests.policies.pi0.cases import DELTA, GOLDEN, NO_STATE, SPEC, TURNED, inputs_of, make, sample, velocity
from tests.variants import often

CASES: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "pi0": ("pi0", SPEC, {}),
    "pi0, four of six actions": ("pi0", replace(SPEC, chunk=4), {}),
    "pi0, every weight, less noise at the start": ("pi0", SPEC, {"train": "all", "start_noise": 0.3}),
    "pi0, differences to the state": ("pi0", SPEC, {"transforms": [TURNED, DELTA]}),
    "pi0, one of all that are drawn": ("pi0", SPEC, {"scored": "any"}),
    "pi0, every step, critic on the suffix": ("pi0", SPEC, {"scored": "all", "critic": "suffix"}),
    "pi0, flow-noise, four of six actions": ("pi0", replace(SPEC, chunk=4), {"scored": "learned", "critic": "suffix"}),
    "pi0.5, every weight, also by the critic": ("pi05", NO_STATE, {"train": "all", "critic_trains_network": True}),
    "pi0, adapters": ("pi0", SPEC, {"lora_rank": 2, "lora_parts": ["vlm", "expert", "vision"]}),
    "pi0.5, adapters on the expert": ("pi05", NO_STATE, {"lora_rank": 2, "lora_parts": ["expert"]}),
    "pi0.5, no state": ("pi05", NO_STATE, {"resize": "interpolate"}),
    "pi0.5, state in the prompt, every weight": ("pi05", SPEC, {"state_in_prompt": True, "train": "all"}),
}


def policy_of(case: str) -> tuple[Policy, Inputs]:
    family, spec, options = CASES[case]
    policy = make(family, spec, **options)
    laws.perturb(policy, 0.02, seed=6)
    return policy, inputs_of(spec, 6, seed=7)


LEROBOT = str(GOLDEN / "pi05" / "checkpoint_lerobot")
DEVICE, DENSITY = laws.law_all_is_computed_on_the_policys_device, "law_log_prob_is_the_density_that_act_samples"
NOT_FOR = {case for case in CASES if "state in the prompt" in case}
"""Of the law of devices: a state becomes words on the host."""
OFTEN = ("pi0, flow-noise, four of six actions", "pi0.5, every weight, also by the critic", "pi0, adapters")
"""Between them all ways of drawing, scoring and training but one."""
MODE = laws.law_imitation_brings_the_mode_to_the_demonstrations
OBEYS = [
    # The density is counted over many samples: a minute for each policy.
    pytest.param(
        case,
        law,
        id=f"{case}-{law.__name__}",
        marks=[pytest.mark.slow]
        * (law.__name__ == DENSITY or case not in (OFTEN if law is not DEVICE else OFTEN[1:2])),
    )
    for case in CASES
    for law in laws.LAWS
    if law is not DEVICE or case not in NOT_FOR
]


def silent(policy: Any) -> list[str]:
    """Parameters without a gradient: those that are frozen, and those that no output of `evaluate` depends on. Of the
    last layer only keys and values reach the expert; the summary, through which the rest is seen, has no gradient
    unless the critic trains the network."""
    if policy.options.critic_trains_network:
        return []
    last = f"network.mixture.vlm.layers.{policy.sizes.vlm.depth - 1}."
    parts = ("self_attn.q_proj", "self_attn.o_proj", "mlp.", "post_attention_layernorm")
    names = [name for name, _ in policy.named_parameters()]
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    idle = [n for n in names if n.startswith(tuple(last + part for part in parts)) or ".vlm.norm." in n]
    return sorted(frozen.union(idle))


@pytest.mark.parametrize(("case", "law"), OBEYS)
def test_policy_obeys(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is laws.law_gradients_reach_every_parameter:
        law(policy, inputs, silent(policy))
    else:
        law(policy, inputs)


# MODE takes hundreds of steps. The loss has a test of its own below, and golden samples test the integration.
IMITATED = [(case, law) for case in OFTEN[:2] for law in laws.IMITATION_LAWS if law is not MODE]


@pytest.mark.parametrize(
    ("case", "law"), often(IMITATED, [(case, law) for case in CASES for law in laws.IMITATION_LAWS])
)
def test_policy_imitates(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is MODE:
        law(policy, inputs, steps=400, lr=1e-2, tolerance=0.3 if "adapters" in case else 0.2)
    else:
        law(policy, inputs)


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_the_mode_is_what_openpi_samples_from_no_noise(family: str) -> None:
    """Preprocessing, units and integration together, by the network's own parts."""
    spec = SPEC if family == "pi0" else NO_STATE
    policy, inputs = make(family, spec, steps=10), inputs_of(spec, 3, seed=2)
    with torch.no_grad():
        seen = policy._observation(inputs)
        prefix = policy.network.prefix(seen)
        x = sample(policy.network, prefix, seen.state, torch.zeros(3, 6, 8), 10)
    expected = policy.units.action.unnormalise(x[..., :7]).float()
    assert (policy.act(inputs, None).chunk - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", ["pi0", "pi05"])
def test_a_camera_that_is_left_out_is_one_that_is_masked(family: str) -> None:
    spec = SPEC if family == "pi0" else NO_STATE
    policy, inputs = make(family, spec), inputs_of(spec, 3, seed=2)
    x, t = torch.randn(3, 6, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1.0, 0.6, 0.1])
    with torch.no_grad():
        two = policy._observation(inputs)
        assert two.pixels.shape[1] == 2
        absent = torch.full_like(two.pixels[:, :1], -1.0)
        three = replace(
            two,
            pixels=torch.cat([two.pixels, absent], 1),
            present=torch.tensor([[True, True, False]]).expand(3, -1),
        )
        left_out, masked = (
            velocity(policy.network, policy.network.prefix(seen), two.state, x, t) for seen in (two, three)
        )
    assert (left_out - masked).abs().max() < 1e-5


def test_what_is_precomputed_changes_nothing_and_spares_the_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, inputs = policy_of("pi0")
    action = policy.act(inputs, laws.random_noise(policy, 6, 1))
    plain = policy.evaluate(inputs, action.trace)
    known = {**action.trace, **policy.precompute(inputs)}

    def forbidden(*_: object) -> None:
        raise AssertionError("the prefix is computed again")

    monkeypatch.setattr(policy.network, "prefix", forbidden)
    spared = policy.evaluate(inputs, known)
    for name in ("log_prob", "value"):
        assert torch.equal(getattr(plain, name), getattr(spared, name))
    whole, _ = policy_of("pi0, every weight, less noise at the start")
    assert whole.precompute(inputs) == {}


def test_which_weights_are_trained() -> None:
    expert = {n for n, p in make("pi05", NO_STATE).network.named_parameters() if p.requires_grad}
    assert expert and all(n.startswith(("mixture.expert.", "action_", "time_mlp")) for n in expert)
    assert all(p.requires_grad for p in make("pi05", NO_STATE, train="all").network.parameters())


def test_every_step_is_drawn_for_some_row_and_scored_as_it_was_drawn() -> None:
    policy = make("pi0")
    inputs = inputs_of(SPEC, 40, seed=4)
    action = policy.act(inputs, laws.random_noise(policy, 40, 3))
    steps = action.trace["step"]
    assert set(steps.flatten().tolist()) == {0, 1, 2}
    found = policy.evaluate(inputs, action.trace).log_prob
    assert (found - action.log_prob).abs().max() < 1e-3 and (found - action.log_prob).abs().mean() < 1e-5


def test_16_bits_compute_near_what_32_do() -> None:
    inputs = inputs_of(SPEC, 4, seed=3)
    whole, half = make("pi0"), make("pi0", dtype="bfloat16")
    kept = {name for name, p in half.network.named_parameters() if p.dtype == torch.float32}
    assert all(".self_attn." not in name and ".mlp." not in name for name in kept)
    for part in ("action_in_proj.weight", "vision.embeddings.position_embedding.weight", "mixture.expert.norm.weight"):
        assert part in kept, "openpi keeps it in 32 bits"
    assert any("post_attention_layernorm" in name for name in kept) and "projector.weight" not in kept
    noise = laws.random_noise(whole, 4, 1)
    taken, rounded = whole.act(inputs, noise), half.act(inputs, noise)
    assert rounded.chunk.dtype == torch.float32
    near = (taken.chunk - rounded.chunk).abs().mean()
    assert 0 < near < 0.05 * taken.chunk.std()
    again = half.evaluate(inputs, {**rounded.trace, **half.precompute(inputs)})
    assert (again.log_prob - rounded.log_prob).exp().sub(1).abs().mean() < half.ratio_tolerance
    counted = torch.ones(4, 6, dtype=torch.bool)
    losses = [float(p.imitate(inputs, taken.chunk, counted, noise).mean().detach()) for p in (whole, half)]
    assert abs(losses[0] - losses[1]) < 0.05 * losses[0]


def test_actions_that_fill_up_are_the_mean_action(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands behind an episode's end is seen by the actions that are learned: its place is the units' centre."""
    policy, inputs = make("pi0"), inputs_of(SPEC, 2, seed=3)
    assert bool((policy.units.action.centre != 0).all())
    counted = torch.tensor([[True] * 4 + [False] * 2] * 2)
    actions = torch.zeros(2, 6, 7)
    noise = laws.random_noise(policy, 2, 1)
    actions[:, 4:] = policy.units.action.centre
    read = []
    velocity = policy.network.joint_velocity

    def seen(observation: Any, x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        read.append(x)
        return velocity(observation, x, t)

    monkeypatch.setattr(policy.network, "joint_velocity", seen)
    policy.imitate(inputs, actions, torch.ones_like(counted), noise)
    actions[:, 4:] = torch.nan
    assert policy.imitate(inputs, actions, counted, noise).isfinite().all()
    assert (read[0] - read[1]).abs().max() < 1e-6


def test_imitation_is_openpis_flow_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    """x = t noise + (1 - t) actions, of which the velocity is noise - actions (openpi's Pi0.compute_loss): the noise is
    at t = 1, where the integration begins."""
    policy, inputs = make("pi0"), inputs_of(SPEC, 3, seed=3)
    noise, counted = laws.random_noise(policy, 3, 1), torch.ones(3, 6, dtype=torch.bool)
    size = policy.denoising.size
    begin = noise[:, :size].view(3, 6, -1)
    t = policy.times.of(policy.denoising.uniform_of(noise)[:, 0]).float()[:, None, None]
    calls, velocity = [], policy.network.joint_velocity

    def seen(observation: Any, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        calls.append((x, at, velocity(observation, x, at)))
        return calls[-1][2]

    monkeypatch.setattr(policy.network, "joint_velocity", seen)
    wanted = torch.zeros_like(begin)  # the mean action is 0 in the network's units
    loss = policy.imitate(inputs, policy.units.action.centre.expand(3, 6, 7).clone(), counted, noise)
    ((x, at, v),) = calls
    assert torch.equal(at, t[:, 0, 0]) and (x - (t * begin + (1 - t) * wanted)).abs().max() < 1e-5
    assert torch.allclose(loss, (v - (begin - wanted)).square()[..., :7].mean((1, 2)), rtol=1e-4)


def test_nothing_is_precomputed_where_that_is_declared() -> None:
    policy, inputs = make("pi0", cache_prefix=False), inputs_of(SPEC, 2, seed=3)
    assert policy.precompute(inputs) == {}
    action = policy.act(inputs, laws.random_noise(policy, 2, 1))
    policy.evaluate(inputs, action.trace).log_prob.sum().backward()
    assert all(p.grad is None for p in policy.network.mixture.vlm.parameters())


@pytest.mark.parametrize("scored", ["one", "all", "learned"])
def test_every_scored_step_is_scored_as_it_was_drawn(scored: str) -> None:
    """With what is precomputed too; the mean over steps is the sum by their number and one more."""
    policy, inputs = make("pi0", scored=scored), inputs_of(SPEC, 5, seed=4)
    noise = laws.random_noise(policy, 5, 3)
    action = policy.act(inputs, noise)
    assert action.trace["x"].shape == (5, 1 if scored == "one" else 3, 6 * 8)
    found = policy.evaluate(inputs, {**action.trace, **policy.precompute(inputs)})
    assert (found.log_prob - action.log_prob).exp().sub(1).abs().mean() < 1e-4
    assert (found.entropy != 0).all() == (scored == "learned")
    mean = make("pi0", scored=scored, step_reduction="mean").act(inputs, noise)
    divisor = 1 if scored == "one" else 4
    assert (divisor * mean.log_prob - action.log_prob).abs().max() < 1e-4
    assert torch.equal(mean.chunk, action.chunk)


def test_noise_at_the_start_is_acted_with_and_not_imitated() -> None:
    whole, less = (make("pi0", start_noise=start) for start in (1.0, 0.25))
    inputs, noise = inputs_of(SPEC, 4, seed=3), laws.random_noise(whole, 4, 1)
    actions, counted = torch.zeros(4, 6, 7), torch.ones(4, 6, dtype=torch.bool)
    assert torch.equal(*(policy.imitate(inputs, actions, counted, noise) for policy in (whole, less)))
    greedy = whole.act(inputs, None).chunk
    far, near = (float((policy.act(inputs, noise).chunk - greedy).abs().mean()) for policy in (whole, less))
    assert near < 0.6 * far


def test_the_value_is_the_same_whatever_was_drawn() -> None:
    policy, inputs = make("pi0", critic="suffix", scored="learned"), inputs_of(SPEC, 4, seed=4)
    values = [policy.act(inputs, laws.random_noise(policy, 4, seed)).value for seed in (1, 2)]
    action = policy.act(inputs, laws.random_noise(policy, 4, 3))
    values += [policy.value(inputs), policy.evaluate(inputs, action.trace).value]
    assert all((value - values[0]).abs().max() < 1e-5 for value in values)
    laws.perturb(policy, 0.1, seed=2)
    assert (policy.value(inputs) - values[0]).abs().min() > 1e-4


def test_actions_are_differences_to_the_state_where_that_is_declared() -> None:
    plain, delta = make("pi0"), make("pi0", transforms=[DELTA])
    inputs = inputs_of(SPEC, 3, seed=5)
    assert inputs.proprio is not None
    moved = delta.act(inputs, None).chunk - plain.act(inputs, None).chunk
    assert (moved[..., :6] - inputs.proprio[:, None, :6]).abs().max() < 1e-6 and not moved[..., 6].any()


@pytest.mark.parametrize(
    ("family", "spec", "options", "message"),
    [
        (
            "pi0",
            replace(SPEC, chunk=7),
            {},
            "the checkpoint predicts 6 actions, and policy.chunk is 7: at most that, or set policy.horizon",
        ),
        ("pi0", replace(SPEC, horizon=2), {}, "chunks of 6 actions need a horizon of at least that; .* is 2"),
        ("pi0", NO_STATE, {}, "the policy reads the robot's state: add 'proprio'"),
        ("pi0", SPEC, {"state_in_prompt": True}, "the checkpoint is a pi0, which has the state beside the prompt"),
        ("pi0", replace(SPEC, action_dim=9), {}, "the checkpoint has 8 numbers for actions and states"),
        ("pi0", replace(SPEC, proprio_dim=8), {}, "statistics are of 7 numbers, proprioception has 8 here"),
        ("pi0", replace(SPEC, cameras=()), {}, "pi0 takes one to 3 cameras"),
        ("pi0", SPEC, {"steps": 0}, "needs steps >= 1"),
        ("pi0", SPEC, {"scored": "some"}, "the scored steps must be one, any, all, learned"),
        ("pi0", SPEC, {"step_reduction": "median"}, "their reduction sum, mean, got 'one', 'median'"),
        ("pi0", SPEC, {"scored": "learned", "noise_bounds": [0.2, 0.1]}, "0 < least <= most"),
        ("pi0", SPEC, {"lora_rank": 2, "lora_parts": ["language"]}, "lora_parts must be some of vlm, expert, vision"),
        ("pi0", SPEC, {"critic": "state"}, "pi0's critic must be one of prefix, suffix"),
        ("pi0", SPEC, {"transforms": [DELTA | {"dims": 8}]}, "delta_actions has dims of 1 to 7, .* got 8"),
        ("pi05", NO_STATE, {"transforms": [DELTA]}, "delta_actions has dims of 1 to 0"),
        ("pi0", SPEC, {"transforms": [DELTA], "asset": "demonstrations"}, "leave delta_actions out"),
        ("pi05", NO_STATE, {"checkpoint": LEROBOT}, "has the state in them: set state_in_prompt to true, or prompt to"),
        ("pi0", SPEC, {"resize": "nearest"}, "pi0's resize must be one of pillow, interpolate"),
        ("pi0", SPEC, {"prompt": "openvla"}, "pi0's prompt must be one of openpi, lerobot"),
        ("pi0", SPEC, {"asset": "nowhere"}, "norm_stats.json of nowhere is wanted"),
    ],
)
def test_what_does_not_fit_is_refused(family: str, spec: PolicySpec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make(family, spec, **options)


def test_inputs_that_lack_something_are_refused() -> None:
    policy, inputs = make("pi0"), inputs_of(SPEC, 2, seed=1)
    with pytest.raises(PolicyError, match="reads the camera 'wrist', the inputs have: front"):
        policy.act(replace(inputs, frames={"front": inputs.frames["front"]}), None)
    with pytest.raises(PolicyError, match="reads an instruction for each row: got 0 for 2"):
        policy.act(replace(inputs, instruction=()), None)
