"""OpenVLA and OpenVLA-OFT as policies: the laws, sampling, padding, adapters."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

import policies
from policies import Policy, PolicyError, PolicySpec
from policies.conformance import laws
from policies.openvla.action_tokens import choose, score
from tests.policies.openvla.cases import CHUNK, ONE_ACTION, error, gripper_of, make, random_inputs
from tests.variants import often

WITH_PROPRIO = replace(CHUNK, proprio_dim=8)
LORA = {"lora_rank": 4, "lora_parts": ["language", "projector", "vision"]}
CASES: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "openvla": ("openvla", ONE_ACTION, {}),
    "openvla, temperature": (
        "openvla",
        ONE_ACTION,
        {"temperature": 1.6, "center_crop": True, "transforms": [{"kind": "turn_images"}]},
    ),
    "openvla, demonstrations": (
        "openvla",
        ONE_ACTION,
        {"unnorm_key": "demonstrations", "transforms": gripper_of("maniskill")},
    ),
    "openvla, adapter": ("openvla", ONE_ACTION, LORA),
    "oft": ("openvla_oft", CHUNK, {"temperature": 1.6}),
    "oft, no stop token": ("openvla_oft", replace(CHUNK, cameras=("base",)), {"convention": "rlinf"}),
    "oft, adapter": ("openvla_oft", CHUNK, LORA),
}
OFTEN = ("openvla, adapter", "oft")
SLOW = [laws.law_log_prob_is_the_density_that_act_samples]
LAWS = [law for law in laws.LAWS if law not in SLOW]


@pytest.fixture
def policy(case, tiny) -> Policy:
    kind, spec, options = CASES[case]
    return make(kind, spec, tiny, **options)


def frozen(policy: Policy) -> set[str]:
    return {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_policy_obeys(policy, law):
    inputs = random_inputs(policy.spec, 6, seed=7)
    if law is laws.law_gradients_reach_every_parameter:
        law(policy, inputs, without=frozen(policy))
    else:
        law(policy, inputs)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["openvla", "oft"])
def test_log_prob_is_the_density_that_act_samples(policy):
    law = laws.law_log_prob_is_the_density_that_act_samples
    law(policy, random_inputs(policy.spec, 6, seed=7))


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.6])
def test_every_token_is_drawn_as_often_as_its_probability_says(temperature):
    """Noise on a fine grid of quantiles: a token gets as many of them as its interval holds, one more or less."""
    draws = 100_000
    logits = torch.randn(256, generator=torch.Generator().manual_seed(1)) * 2
    quantiles = (torch.arange(draws, dtype=torch.float64) + 0.5) / draws
    choices = choose(logits.expand(draws, 256), torch.special.ndtri(quantiles), temperature)
    counts = torch.bincount(choices, minlength=256)
    expected = torch.softmax(logits.double() / temperature, 0) * draws
    assert error(counts, expected) <= 1
    assert (choices.diff() <= 0).all(), "greater noise gave a lesser action"
    log_prob, entropy = score(logits.expand(draws, 256), choices, temperature)
    assert error(log_prob.exp() * draws, expected[choices]) < 0.1
    assert entropy[0] == pytest.approx(float(-log_prob.double().mean()), abs=1e-3)


def test_weights_learned_at_one_temperature_act_at_another(tiny, tmp_path):
    """Demonstrations are learned from at temperature 1, and GRPO explores at 1.6 (SimpleVLA-RL)."""
    learned, explores = (make("openvla", ONE_ACTION, tiny, temperature=t) for t in (1.0, 1.6))
    with torch.no_grad():
        for parameter in learned.parameters():
            parameter += 0.01
    policies.save(learned, tmp_path)
    policies.load_into(explores, tmp_path)
    inputs = random_inputs(ONE_ACTION, 4, seed=3)
    tokens = learned.act(inputs, laws.random_noise(learned, 4, seed=4)).trace
    cold, warm = (policy.evaluate(inputs, tokens) for policy in (learned, explores))
    assert (warm.entropy > cold.entropy).all() and error(warm.value, cold.value) == 0


@pytest.mark.parametrize("noise", [-40.0, 40.0])
def test_extreme_noise_gives_a_token(noise):
    assert 0 <= int(choose(torch.zeros(1, 256), torch.tensor([noise]), 1.0)) < 256


@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_padding_changes_nothing(policy):
    """A row beside a much longer instruction, and alone: tokens, log-probs, entropy and value."""
    inputs = random_inputs(policy.spec, 2, seed=3, texts=("push", "put the black bowl on the plate next to the stove"))
    noise = laws.random_noise(policy, 2, seed=4)
    both = policy.act(inputs, noise)
    alone = policy.act(inputs.rows(torch.tensor([0])), noise[:1])
    assert torch.equal(both.trace["tokens"][:1], alone.trace["tokens"])
    assert error(both.log_prob[:1], alone.log_prob) <= 1e-5 and error(both.value[:1], alone.value) <= 1e-5
    evaluated = policy.evaluate(inputs, both.trace)
    one = policy.evaluate(inputs.rows(torch.tensor([0])), alone.trace)
    assert error(evaluated.entropy[:1], one.entropy) <= 1e-5 and error(evaluated.value[:1], one.value) <= 1e-5


@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_ratio_of_unchanged_weights_in_shuffled_minibatches(policy):
    """As the learner sees them: other rows together than in the rollout, so other padding."""
    inputs = random_inputs(policy.spec, 12, seed=3)
    action = policy.act(inputs, laws.random_noise(policy, 12, seed=4))
    ratios = []
    for part in torch.randperm(12, generator=torch.Generator().manual_seed(5)).split(5):
        trace = {name: tensor[part] for name, tensor in action.trace.items()}
        evaluation = policy.evaluate(inputs.rows(part), trace)
        ratios.append((evaluation.log_prob - action.log_prob[part]).sum((1, 2)).exp())
    assert error(torch.cat(ratios), torch.ones(12)) <= 1e-4


@pytest.mark.parametrize("case", ["openvla", "oft"])
def test_ratio_in_bfloat16(case, tiny):
    kind, spec, options = CASES[case]
    policy = make(kind, spec, tiny, **options, dtype="bfloat16")
    assert policy.ratio_tolerance == 1e-1
    inputs = random_inputs(spec, 6, seed=3)
    action = policy.act(inputs, laws.random_noise(policy, 6, seed=4))
    evaluation = policy.evaluate(inputs, action.trace)
    assert evaluation.log_prob.dtype == evaluation.value.dtype == torch.float32
    ratio = (evaluation.log_prob - action.log_prob).exp().detach()
    assert float((ratio - 1).abs().mean()) <= 2e-2


def test_value_reads_the_state_before_the_first_action(tiny):
    """The value depends on frames and instruction, and not on the actions that follow."""
    policy = make("openvla", ONE_ACTION, tiny)
    inputs = random_inputs(ONE_ACTION, 4, seed=3)
    action = policy.act(inputs, laws.random_noise(policy, 4, seed=4))
    other = {"tokens": action.trace["tokens"].flip(0)}
    assert error(policy.evaluate(inputs, other).value, action.value) <= 1e-5
    renamed = replace(inputs, instruction=tuple(reversed(inputs.instruction)))
    assert error(policy.value(renamed)[[1, 2]], action.value[[1, 2]]) > 1e-4


def test_the_image_matters(tiny):
    """Decoding that drops the image from the cache's first pass gives constant actions without any error."""
    policy = make("openvla", ONE_ACTION, tiny)
    inputs = random_inputs(ONE_ACTION, 4, seed=3, texts=("push",))
    other = replace(inputs, frames={"base": inputs.frames["base"].flip(0)})
    noise = laws.random_noise(policy, 4, seed=4)
    assert error(policy.act(inputs, noise).log_prob, policy.act(other, noise).log_prob) > 1e-2


@pytest.mark.parametrize("on", [False, True])
def test_a_policy_of_an_earlier_version_that_recomputed_by_an_option_is_read(tiny, tmp_path, on):
    policy = make("openvla", ONE_ACTION, tiny)
    policies.save(policy, tmp_path)
    path = tmp_path / "policy" / "config.json"
    config = json.loads(path.read_text())
    config["architecture"]["gradient_checkpointing"] = on
    path.write_text(json.dumps(config))
    inputs = random_inputs(ONE_ACTION, 2, seed=3)
    assert error(policies.load(tmp_path).act(inputs, None).log_prob, policy.act(inputs, None).log_prob) == 0
    policies.load_into(policy, tmp_path)
    with pytest.raises(PolicyError, match=r"no policy\.options\.gradient_checkpointing .* set optim\.recompute in its"):
        make("openvla", ONE_ACTION, tiny, gradient_checkpointing=on)


def test_gripper_is_converted_for_the_environment(tiny):
    inputs = random_inputs(ONE_ACTION, 6, seed=3)
    raw, libero, maniskill = (
        make("openvla", ONE_ACTION, tiny, transforms=gripper_of(gripper)).act(inputs, None).chunk
        for gripper in ("raw", "libero", "maniskill")
    )
    assert torch.equal(raw[..., :-1], libero[..., :-1]) and torch.equal(raw[..., :-1], maniskill[..., :-1])
    assert torch.equal(libero[..., -1], -torch.sign(2 * raw[..., -1] - 1))
    assert torch.equal(maniskill[..., -1], 2 * (raw[..., -1] > 0.5).float() - 1)


def test_the_prompt_is_the_checkpoints(tiny):
    """Both end with the empty token, at which the value is read and the first action predicted."""
    plain, vicuna = (make("openvla", ONE_ACTION, tiny, prompt=prompt) for prompt in ("openvla", "openvla-v01"))
    assert vicuna.architecture()["prompt"] == "openvla-v01"
    text = (
        "A chat between a curious user and an artificial intelligence assistant. The assistant gives helpful, "
        "detailed, and polite answers to the user's questions. USER: What action should the robot take to push it? "
        "ASSISTANT:"
    )
    tokenizer = vicuna.prompts._tokenizer
    assert vicuna.prompts.tokens("Push it") == [*tokenizer.encode(text).ids, vicuna.prompts.empty]
    assert plain.prompts.tokens("Push it")[-1] == plain.prompts.empty
    inputs = random_inputs(ONE_ACTION, 3, seed=1)
    assert error(plain.act(inputs, None).log_prob, vicuna.act(inputs, None).log_prob) > 1e-3


def test_two_datasets_need_a_key(tiny, tmp_path):
    from tests.policies.openvla.tiny import write_tiny

    folder = write_tiny(tmp_path / "two", datasets=("libero_spatial", "bridge_no_noops"))
    with pytest.raises(PolicyError, match="several datasets: set unnorm_key to one of bridge_no_noops, libero_spatial"):
        make("openvla", ONE_ACTION, folder)
    with pytest.raises(PolicyError, match="unknown unnorm_key 'bridg'; .* has: 'bridge_no_noops', 'libero_spatial'"):
        make("openvla", ONE_ACTION, folder, unnorm_key="bridg")
    named = [make("openvla", ONE_ACTION, folder, unnorm_key=key) for key in ("bridge", "libero_spatial_no_noops")]
    assert [policy.statistics.key for policy in named] == ["bridge_no_noops", "libero_spatial"]


@pytest.mark.parametrize(
    ("kind", "spec", "options", "message"),
    [
        ("openvla", replace(ONE_ACTION, chunk=2), {}, "one camera and gives one action, the task asks for 1 and 2"),
        ("openvla", CHUNK, {}, "the task asks for 2 and 3"),
        ("openvla", replace(ONE_ACTION, action_dim=6), {}, r"actions \(tiny\) have 7 dimensions, the task takes 6"),
        ("openvla_oft", replace(CHUNK, cameras=()), {}, "at least one camera"),
        ("openvla_oft", CHUNK, {"convention": "mine"}, "convention must be one of official, simplevla-rl, rlinf"),
        ("openvla_oft", CHUNK, {"head": "l2"}, "head must be one of tokens, l1"),
        ("openvla_oft", CHUNK, {"head": "l1"}, r"must hold one file action_head--\*_checkpoint.pt, found: none"),
        ("openvla_oft", WITH_PROPRIO, {"proprio": True}, r"one file proprio_projector--\*_checkpoint.pt, found: none"),
        ("openvla_oft", CHUNK, {"film": True}, r"one file vision_backbone--\*_checkpoint.pt, found: none"),
        ("openvla", ONE_ACTION, {"prompt": "vicuna"}, "prompt must be one of openvla, openvla-v01, got 'vicuna'"),
        (
            "openvla",
            ONE_ACTION,
            {"transforms": [{"kind": "gripper", "convention": "robotiq"}]},
            "entry 0: gripper.convention: .*'libero' or 'maniskill'",
        ),
        ("openvla", ONE_ACTION, {"temperature": 0.0}, "temperature must be greater than 0"),
        ("openvla", ONE_ACTION, {"dtype": "int8"}, "dtype must be one of checkpoint, float32, bfloat16, float16"),
        ("openvla", ONE_ACTION, {"lora_rank": -1}, "give lora_rank"),
        ("openvla", ONE_ACTION, {"lora_rank": 2, "lora_parts": ["head"]}, "lora_parts must be some of language"),
        ("openvla", ONE_ACTION, {"image_backend": "gpu"}, "image backend must be one of device, pillow"),
        ("openvla", ONE_ACTION, {"lora_ranks": 2}, "no architecture argument 'lora_ranks'; did you mean lora_rank"),
        ("openvla_oft", CHUNK, {"convenion": "rlinf"}, "no architecture argument 'convenion'; did you mean convention"),
        ("openvla_oft", CHUNK, {"temperatur": 1.0}, "did you mean temperature"),
    ],
)
def test_impossible_options_are_refused(tiny, kind, spec, options, message):
    with pytest.raises(PolicyError, match=message):
        make(kind, spec, tiny, **options)


def test_a_policy_needs_a_checkpoint():
    with pytest.raises(PolicyError, match="openvla needs a checkpoint: set policy.options.checkpoint"):
        policies.build("openvla", ONE_ACTION, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"instruction": ("", "push", "push")}, "an instruction is empty"),
        ({"instruction": ("  \n", "push", "push")}, "an instruction is empty"),
        ({"instruction": (3, "push", "push")}, "an instruction is a text, got a int"),
        ({"instruction": ()}, "reads an instruction for each row: got 0 for 3"),
        ({"instruction": ("push " * 1000, "push", "push")}, "an instruction is too long: its prompt has 50.. tokens"),
        ({"frames": {}}, "reads the camera 'base', the inputs have: none"),
        ({"frames": {"base": torch.zeros(3, 40, 40, 3)}}, "frames of 'base' must be uint8"),
    ],
)
def test_impossible_inputs_are_refused(tiny, change, message):
    policy = make("openvla", ONE_ACTION, tiny)
    inputs = replace(random_inputs(ONE_ACTION, 3, seed=1), **change)
    with pytest.raises(PolicyError, match=message):
        policy.act(inputs, None)


def test_noise_of_another_width_is_refused(tiny):
    with pytest.raises(PolicyError, match=r"noise must be \[B, 7\] for this policy, got \[3, 6\]"):
        make("openvla", ONE_ACTION, tiny).act(random_inputs(ONE_ACTION, 3, seed=1), torch.zeros(3, 6))
