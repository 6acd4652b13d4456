"""SmolVLA as a policy: the laws of all, and what is its alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from policies import Inputs, Policy, PolicyError, PolicySpec
from policies.conformance import laws
from policies.flow_vla.network import Observation
from policies.smolvla.inputs import Prompts
from tests.policies.smolvla.cases import GOLDEN, SPEC, TEXTS, inputs_of, make
from tests.variants import often

TURNED, DELTA = {"kind": "turn_images"}, {"kind": "delta_actions", "dims": 6}
EVERYTHING = ["expert", "projections", "language", "vision"]
SPECIAL: dict[str, Any] = {
    "checkpoint": str(GOLDEN / "image_tokens/checkpoint"),
    "backbone": str(GOLDEN / "image_tokens/vlm"),
}
CASES: dict[str, tuple[PolicySpec, dict[str, Any]]] = {
    "as published": (SPEC, {}),
    "every part, less noise at the start": (SPEC, {"train": EVERYTHING, "start_noise": 0.3}),
    "one camera, differences to the state": (replace(SPEC, cameras=("image",)), {"transforms": [TURNED, DELTA]}),
    "one of all that are drawn": (SPEC, {"scored": "any"}),
    "every step, critic on the suffix": (replace(SPEC, chunk=6), {"scored": "all", "critic": "suffix"}),
    "flow-noise, special tokens": (SPEC, {"scored": "learned", "critic": "suffix", **SPECIAL}),
    "language, also by the critic": (SPEC, {"train": ["language"], "critic_trains_network": True}),
    "adapters": (SPEC, {"lora_rank": 2}),
    "adapters on every part": (SPEC, {"lora_rank": 2, "lora_parts": EVERYTHING}),
    "the expert alone": (SPEC, {"train": ["expert"], "scored": "all"}),
}
DEVICE, DENSITY = laws.law_all_is_computed_on_the_policys_device, laws.law_log_prob_is_the_density_that_act_samples
MODE = laws.law_imitation_brings_the_mode_to_the_demonstrations
OFTEN = ("flow-noise, special tokens", "every part, less noise at the start", "adapters")


def policy_of(case: str) -> tuple[Policy, Inputs]:
    spec, options = CASES[case]
    policy = make(spec, **options)
    laws.perturb(policy, 0.02, seed=6)
    return policy, inputs_of(spec, 6, seed=7)


OBEYS = [
    pytest.param(
        case,
        law,
        id=f"{case}-{law.__name__}",
        marks=[pytest.mark.slow] * (law is DENSITY or case not in (OFTEN if law is not DEVICE else OFTEN[:1])),
    )
    for case in CASES
    for law in laws.LAWS
]


@pytest.mark.parametrize(("case", "law"), OBEYS)
def test_policy_obeys(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is laws.law_gradients_reach_every_parameter:
        law(policy, inputs, [name for name, parameter in policy.named_parameters() if not parameter.requires_grad])
    else:
        law(policy, inputs)


IMITATED = [(case, law) for case in OFTEN[:2] for law in laws.IMITATION_LAWS if law is not MODE]


@pytest.mark.parametrize(
    ("case", "law"), often(IMITATED, [(case, law) for case in CASES for law in laws.IMITATION_LAWS])
)
def test_policy_imitates(case: str, law: Callable[..., None]) -> None:
    policy, inputs = policy_of(case)
    if law is MODE:
        law(policy, inputs, steps=400, lr=1e-2, tolerance=0.3)
    else:
        law(policy, inputs)


def test_padding_of_a_prompt_changes_nothing_but_rounding() -> None:
    """Also with special tokens around images, and with the state's token after the padding."""
    every: list[dict[str, Any]] = [{}, SPECIAL]
    for options in every:
        policy = make(**options)
        inputs, t = inputs_of(SPEC, 2, seed=3), torch.tensor([0.9, 0.2])
        x = torch.randn(2, 6, policy.sizes.action_dim, generator=torch.Generator().manual_seed(1))
        seen = policy._observation(inputs)
        found = []
        for length in (12, 24, 40):
            tokens, counted = Prompts(policy.source.backbone, length, policy.sizes.vocab_size).batch(TEXTS)
            padded = Observation(seen.pixels, seen.present, tokens, counted, seen.state)
            with torch.no_grad():
                found.append(policy.network.joint_velocity(padded, x, t))
        assert max((other - found[0]).abs().max() for other in found[1:]) < 1e-5
        shorter = make(**options)
        shorter.prompts._pad = 7
        with torch.no_grad():
            other = shorter.network.joint_velocity(shorter._observation(inputs), x, t)
        assert (other - found[1]).abs().max() < 1e-5, "the token that fills up is seen"


def test_a_row_does_not_depend_on_the_lengths_of_other_prompts() -> None:
    policy, inputs = make(), inputs_of(SPEC, 2, seed=3)
    noise = laws.random_noise(policy, 2, 1)
    short = replace(inputs, instruction=(TEXTS[1], "move"))
    long = replace(inputs, instruction=(TEXTS[1], " ".join(["move"] * 10)))
    first, second = (policy.act(each, noise) for each in (short, long))
    assert torch.equal(first.chunk[0], second.chunk[0]) and not torch.equal(first.chunk[1], second.chunk[1])


@pytest.mark.parametrize("options", [{}, SPECIAL], ids=["cross layers", "special tokens"])
def test_actions_see_the_actions_before_them(options: dict[str, Any]) -> None:
    """Unlike pi0's, which see each other."""
    policy, inputs = make(**options), inputs_of(SPEC, 2, seed=3)
    x = torch.zeros(2, 6, policy.sizes.action_dim)
    moved = x.clone()
    moved[:, 3] += 1
    t = torch.full((2,), 0.5)
    seen = policy._observation(inputs)
    with torch.no_grad():
        before, after = (policy.network.joint_velocity(seen, each, t) for each in (x, moved))
    change = (before - after).abs().amax((0, 2))
    assert not change[:3].any() and bool((change[3:] > 1e-6).all())


def test_what_is_precomputed_spares_the_vision_language_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the state's token: what projects the state is trained."""
    policy, inputs = policy_of("as published")
    action = policy.act(inputs, laws.random_noise(policy, 6, 1))
    plain = policy.evaluate(inputs, action.trace)
    known = {**action.trace, **policy.precompute(inputs)}
    assert known["keys"].shape[3] == known["present"].shape[1] == 2 * policy.sizes.patches + 24

    def forbidden(*_: object) -> None:
        raise AssertionError("the prefix is computed again")

    monkeypatch.setattr(policy.network, "prefix", forbidden)
    spared = policy.evaluate(inputs, known)
    for name in ("log_prob", "value"):
        assert torch.equal(getattr(plain, name), getattr(spared, name))
    spared.log_prob.sum().backward()
    gradient: Any = policy.get_parameter("network.state_proj.weight").grad
    assert gradient is not None and gradient.any()
    assert policy_of("every part, less noise at the start")[0].precompute(inputs) == {}


@pytest.mark.parametrize(
    ("train", "beginnings"),
    [
        (["expert"], ("mixture.expert.",)),
        (["projections"], ("state_proj", "action_")),
        (["language"], ("embedding.", "projector.", "mixture.vlm.layers.")),
        (["vision"], ("vision.",)),
    ],
)
def test_parts_are_trained_by_name(train: list[str], beginnings: tuple[str, ...]) -> None:
    policy = make(train=train)
    trained = {name for name, parameter in policy.network.named_parameters() if parameter.requires_grad}
    assert trained and all(name.startswith(beginnings) for name in trained)
    assert not any(name.startswith(("mixture.vlm.layers.3.", "mixture.vlm.norm")) for name in trained)


@pytest.mark.parametrize("scored", ["one", "any", "all", "learned"])
def test_every_scored_step_is_scored_as_it_was_drawn(scored: str) -> None:
    policy, inputs = make(scored=scored, steps=4), inputs_of(SPEC, 8, seed=4)
    action = policy.act(inputs, laws.random_noise(policy, 8, 3))
    for trace in (action.trace, {**action.trace, **policy.precompute(inputs)}):
        found = policy.evaluate(inputs, trace)
        assert (found.log_prob - action.log_prob).exp().sub(1).abs().mean() < 1e-5


def test_16_bits_compute_near_what_32_do() -> None:
    """LeRobot has the vision-language model alone in them."""
    inputs = inputs_of(SPEC, 4, seed=3)
    whole, half = make(), make(dtype="bfloat16")
    wide = {name for name, p in half.network.named_parameters() if p.dtype == torch.float32}
    assert wide and all(name.startswith(("mixture.expert.", "state_proj", "action_")) for name in wide)
    noise = laws.random_noise(whole, 4, 1)
    taken, rounded = whole.act(inputs, noise), half.act(inputs, noise)
    assert rounded.chunk.dtype == torch.float32
    assert 0 < (taken.chunk - rounded.chunk).abs().mean() < 0.05 * taken.chunk.std()
    again = half.evaluate(inputs, {**rounded.trace, **half.precompute(inputs)})
    assert (again.log_prob - rounded.log_prob).exp().sub(1).abs().mean() < half.ratio_tolerance
    counted = torch.ones(4, 6, dtype=torch.bool)
    actions = torch.zeros(4, 6, 7)
    losses = [float(p.imitate(inputs, actions, counted, noise).mean().detach()) for p in (whole, half)]
    assert abs(losses[0] - losses[1]) < 0.05 * losses[0]


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (replace(SPEC, chunk=7), {}, "the checkpoint predicts 6 actions, and policy.chunk is 7: at most that"),
        (replace(SPEC, proprio_dim=0), {}, "smolvla reads the robot's state: add 'proprio'"),
        (replace(SPEC, cameras=()), {}, "smolvla takes one camera or more, the task gives none: set env.cameras"),
        (replace(SPEC, cameras=("image", "image2", "c")), {}, "reads 2 cameras .*: set env.cameras to as many"),
        (replace(SPEC, cameras=("image", "wrist")), {}, "knows the camera image .*, and has none for 'wrist'"),
        (replace(SPEC, action_dim=33), {}, "the checkpoint has 32 numbers for actions and 32 for states"),
        (replace(SPEC, action_dim=6), {}, "output_features has action of \\[7\\], and the task's has 6 numbers"),
        (replace(SPEC, proprio_dim=7), {}, "has observation.state of \\[8\\], and the task's has 7 numbers"),
        (SPEC, {"train": ["head"]}, "smolvla's train must be some of expert, projections, language, vision"),
        (SPEC, {"train": []}, "smolvla's train must be some of expert"),
        (SPEC, {"lora_rank": 2, "lora_parts": ["vlm"]}, "lora_parts must be some of expert, expert_qv, projections"),
        (SPEC, {"critic": "state"}, "smolvla's critic must be one of prefix, suffix"),
        (SPEC, {"asset": "other"}, "smolvla's asset must be one of demonstrations, got 'other'"),
        (SPEC, {"steps": 0}, "needs steps >= 1"),
        (SPEC, {"transforms": [DELTA], "asset": "demonstrations"}, "leave delta_actions out"),
    ],
)
def test_what_does_not_fit_is_refused(spec: PolicySpec, options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        make(spec, **options)


def test_inputs_that_lack_something_are_refused() -> None:
    policy, inputs = make(), inputs_of(SPEC, 2, seed=1)
    with pytest.raises(PolicyError, match="reads the camera 'image2', the inputs have: image"):
        policy.act(replace(inputs, frames={"image": inputs.frames["image"]}), None)
    with pytest.raises(PolicyError, match="smolvla reads an instruction for each row: got 0 for 2"):
        policy.act(replace(inputs, instruction=()), None)
    with pytest.raises(PolicyError, match=r"the prompt .* has \d+ tokens, the checkpoint 24"):
        policy.act(replace(inputs, instruction=("move " * 30,) * 2), None)
