"""OpenVLA-OFT against what the reference computes."""

from typing import Any

import pytest
import torch

import policies
from policies import Inputs, PolicySpec
from policies.openvla.action_tokens import action_of, score
from policies.openvla.config import read_config
from policies.openvla.model import load_model
from policies.openvla.oft import chunk_states
from tests.policies.openvla.cases import OFT, OFT_INSTRUCTIONS, error, golden, statistics_of

GOLDEN = golden(OFT)
CHECKPOINT = OFT / "checkpoint"
KEY = "toy_spatial_no_noops"
LOGITS: dict[str, Any] = dict(atol=2e-3, rtol=1e-3)
ROWS = [0, 1]
ONE = PolicySpec(action_dim=7, chunk=4, cameras=("base",))
TWO = PolicySpec(action_dim=7, chunk=4, cameras=("base", "wrist"))


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT)


def make(spec: PolicySpec, **options) -> Any:
    plain = {"unnorm_key": KEY, "head": "tokens", "proprio": False}
    return policies.build("openvla_oft", spec, 0, checkpoint=str(CHECKPOINT), **plain | options)


def inputs(row: int) -> Inputs:
    """Row 0 sees image 0 first and image 1 second, row 1 the other way round."""
    first, second = (GOLDEN[f"image.{i}.rgb"][None] for i in (row, 1 - row))
    return Inputs(
        frames={"base": first, "wrist": second},
        proprio=GOLDEN["proprio.raw"][row : row + 1].float(),
        instruction=(OFT_INSTRUCTIONS[row],),
    )


def sequence(model, row: int):
    ids = GOLDEN[f"tokens.{row}.input_ids"]
    return model.sequence(
        model.embed_images(GOLDEN["pixel_values"][row][None, None]), ids, torch.tensor([ids.shape[1]])
    )


def logits(model, states):
    return model.language_model.lm_head(states)


@pytest.mark.parametrize("row", ROWS)
def test_chunk_in_one_pass(model, row):
    states = chunk_states(model, sequence(model, row), 28, stop=True)
    assert error(states, GOLDEN[f"disc.{row}.hidden"]) <= 1e-3
    torch.testing.assert_close(logits(model, states), GOLDEN[f"disc.{row}.logits"], **LOGITS)
    wrong = error(logits(model, states), GOLDEN[f"causal_contrast.{row}.logits"])
    assert wrong > 1, "attention is causal"


@pytest.mark.parametrize("row", ROWS)
def test_convention_without_stop_token(model, row):
    states = chunk_states(model, sequence(model, row), 28, stop=False)
    torch.testing.assert_close(logits(model, states), GOLDEN[f"nostop.{row}.logits"], **LOGITS)
    assert error(states[:, 0], GOLDEN[f"nostop.{row}.hidden_value"]) <= 1e-3
    assert make(ONE, convention="rlinf").stop is False and make(ONE, convention="simplevla-rl").stop is True


@pytest.mark.parametrize(("name", "stop"), [("batch_right", True), ("batch_left_nostop", False)])
def test_padded_batches(model, name, stop):
    """Wherever the reference pads."""
    rows = [GOLDEN[f"tokens.{row}.input_ids"][0] for row in ROWS]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=512)
    lengths = torch.tensor([len(row) for row in rows])
    padded = model.sequence(model.embed_images(GOLDEN["pixel_values"][:, None]), ids, lengths)
    states = chunk_states(model, padded, 28, stop)
    torch.testing.assert_close(logits(model, states), GOLDEN[f"{name}.logits"], **LOGITS)


@pytest.mark.parametrize("temperature", [1.0, 1.6])
@pytest.mark.parametrize("row", ROWS)
def test_policy_scores_given_tokens(row, temperature):
    policy = make(ONE, temperature=temperature)
    evaluation = policy.evaluate(inputs(row), {"tokens": GOLDEN["given.action_tokens"][row : row + 1]})
    assert error(evaluation.log_prob.flatten(1), GOLDEN[f"disc.{row}.logp.T{temperature}"]) <= 1e-3
    assert error(evaluation.entropy.flatten(1), GOLDEN[f"disc.{row}.entropy.T{temperature}"]) <= 1e-3


@pytest.mark.parametrize("key", [KEY, "toy_long"])
@pytest.mark.parametrize("row", ROWS)
def test_policy_acts(row, key):
    action = make(ONE, unnorm_key=key).act(inputs(row), None)
    tokens = GOLDEN[f"disc.{row}.tokens"]
    assert torch.equal(action.trace["tokens"], tokens)
    assert torch.equal(tokens, GOLDEN[f"disc.{row}.tokens_restricted"])
    expected = GOLDEN[f"disc.{row}.actions.{key}"]
    assert error(action.chunk[0], expected.float()) == 0
    statistics = statistics_of(CHECKPOINT, read_config(CHECKPOINT).raw, key)
    exact = statistics.unnormalise(action_of(tokens, 512).view(4, 7), 1e-8)
    assert error(exact, expected) <= 1e-9


@pytest.mark.parametrize("row", ROWS)
def test_two_images_in_the_order_of_the_cameras(model, row):
    policy = make(TWO)
    states = policy.states(inputs(row))
    torch.testing.assert_close(logits(policy.model, states), GOLDEN[f"disc2img.{row}.logits"], **LOGITS)


@pytest.mark.parametrize("proprio", [True, False])
@pytest.mark.parametrize("row", ROWS)
def test_regression_head(row, proprio):
    spec = PolicySpec(action_dim=7, chunk=4, cameras=("base", "wrist"), proprio_dim=8)
    policy = make(spec if proprio else TWO, head="l1", proprio=proprio)
    name = f"l1.{'proprio' if proprio else 'noproprio'}.{row}"
    states = policy.states(inputs(row))
    assert error(states, GOLDEN[f"{name}.hidden"]) <= 1e-3
    assert error(policy.action_head(states), GOLDEN[f"{name}.normalised"]) <= 1e-3
    action = policy.act(inputs(row), None)
    assert error(action.chunk[0], GOLDEN[f"{name}.actions"]) <= 1e-3


@pytest.mark.parametrize("row", ROWS)
def test_proprioception(row):
    statistics = statistics_of(CHECKPOINT, read_config(CHECKPOINT).raw, KEY)
    assert error(statistics.normalise_proprio(GOLDEN["proprio.raw"]), GOLDEN["proprio.normalised"]) <= 1e-9
    spec = PolicySpec(action_dim=7, chunk=4, cameras=("base",), proprio_dim=8)
    projector = make(spec, proprio=True).proprio_projector
    token = projector(GOLDEN["proprio.normalised"][row : row + 1].float())
    assert error(token, GOLDEN[f"l1.proprio.{row}.token"]) <= 2e-5


def test_scores_use_the_action_tokens_alone(model):
    states = chunk_states(model, sequence(model, 0), 28, stop=True)
    every = logits(model, states)
    assert torch.allclose(model.action_logits(states), every[..., 256:512], atol=1e-4)
    log_prob, _ = score(model.action_logits(states), GOLDEN["given.action_tokens"][:1] - 256, 1.0)
    assert error(log_prob, GOLDEN["disc.0.logp.T1.0"]) <= 1e-3
