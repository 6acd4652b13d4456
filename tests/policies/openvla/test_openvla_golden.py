"""OpenVLA against what the reference computes, stage by stage: the first stage that differs names the fault."""

from typing import Any

import pytest
import torch
from torch.nn import functional

import policies
from policies import Inputs, PolicySpec
from policies.openvla.action_tokens import action_of, decode, score, token_of
from policies.openvla.config import read_config
from policies.openvla.images import read_preprocessing
from policies.openvla.model import load_model, to_checkpoint
from policies.openvla.prompts import Prompts
from tests.policies.openvla.cases import INSTRUCTIONS, OPENVLA, error, golden, statistics_of

GOLDEN = golden(OPENVLA)
CHECKPOINT = OPENVLA / "checkpoint"
LOGITS: dict[str, Any] = dict(atol=1e-4, rtol=1e-4)
ROWS = [0, 1]
DATASETS = ["toy_spatial_no_noops", "toy_bridge"]


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT)


@pytest.fixture(scope="module")
def images(model):
    """[2, 1, 6, 28, 28] of both rows."""
    return GOLDEN["pixel_values.resize-naive"][:, None]


def prompt(row: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = GOLDEN[f"tokens.{row}.input_ids"]
    return tokens, torch.tensor([tokens.shape[1]])


def padded(model, images):
    """The sequence of both rows, the shorter one padded."""
    ids, mask = GOLDEN["batch_right.input_ids"], GOLDEN["batch_right.attention_mask"]
    return model.sequence(model.embed_images(images), ids, mask.sum(1))


@pytest.mark.parametrize("backend", ["device", "pillow"])
@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
@pytest.mark.parametrize("row", ROWS)
def test_pixel_values(row, strategy, backend):
    preprocess = read_preprocessing(CHECKPOINT, strategy=strategy, backend=backend)
    pixels = preprocess(GOLDEN[f"image.{row}.rgb"][None])
    assert error(pixels[0], GOLDEN[f"pixel_values.{strategy}"][row]) <= 2e-6


@pytest.mark.parametrize("row", ROWS)
def test_prompt_tokens_end_with_the_empty_token(row):
    tokens = Prompts(CHECKPOINT, read_config(CHECKPOINT)).tokens(INSTRUCTIONS[row].upper())
    assert tokens == GOLDEN[f"tokens.{row}.input_ids"][0].tolist()
    assert tokens[:-1] == GOLDEN[f"tokens.{row}.input_ids_no_empty"][0].tolist()


@pytest.mark.parametrize(("name", "vocab"), [("toy", 512), ("llama", 32000)])
def test_numbers_become_tokens_and_tokens_bin_centres(name, vocab):
    assert torch.equal(token_of(GOLDEN["action_table.values"], vocab), GOLDEN[f"action_table.tokens.{name}"])
    centres = action_of(GOLDEN[f"action_table.decode_in.{name}"], vocab)
    assert error(centres, GOLDEN[f"action_table.decode_out.{name}"]) <= 1e-12


def test_the_two_lowest_action_tokens_are_one_action():
    first, second, third = action_of(torch.tensor([31744, 31745, 31746]), 32000).tolist()
    assert first == second != third


@pytest.mark.parametrize("row", ROWS)
def test_features_projector_hidden_states_and_logits(model, images, row):
    dino, siglip = model.vision_backbone.features(images[row])
    torch.testing.assert_close(dino, GOLDEN[f"single.{row}.vision.dino"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(siglip, GOLDEN[f"single.{row}.vision.siglip"], atol=2e-5, rtol=1e-4)
    embedded = model.embed_images(images[row : row + 1])
    torch.testing.assert_close(embedded, GOLDEN[f"single.{row}.projector_features"], atol=2e-5, rtol=1e-4)
    hidden = model.hidden(model.sequence(embedded, *prompt(row)))
    torch.testing.assert_close(hidden, GOLDEN[f"single.{row}.hidden_states"][-1], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(model.language_model.lm_head(hidden), GOLDEN[f"single.{row}.logits"], **LOGITS)


def test_logits_of_a_padded_batch(model, images):
    sequence = padded(model, images)
    assert torch.equal(sequence.valid.long(), GOLDEN["batch_right.valid"])
    logits = model.language_model.lm_head(model.hidden(sequence))
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[sequence.valid], GOLDEN["batch_right.logits"][sequence.valid], **LOGITS)


def test_padding_on_the_left_is_the_same(model, images):
    sequence = padded(model, images)
    last = model.predicting(model.hidden(sequence), sequence, 1)[:, 0]
    torch.testing.assert_close(model.language_model.lm_head(last), GOLDEN["batch_left.last_logits"], **LOGITS)


@pytest.mark.parametrize("row", ROWS)
def test_greedy_tokens_of_a_row_and_of_a_padded_batch(model, images, row):
    alone = decode(model, model.sequence(model.embed_images(images[row : row + 1]), *prompt(row)), 7, None)
    assert torch.equal(alone.tokens, GOLDEN[f"single.{row}.greedy_tokens"])
    assert torch.equal(alone.tokens, GOLDEN[f"single.{row}.greedy_tokens_restricted"])
    together = decode(model, padded(model, images), 7, None)
    assert torch.equal(together.tokens[row], alone.tokens[0])


@pytest.mark.parametrize("key", DATASETS)
@pytest.mark.parametrize("row", ROWS)
def test_actions_in_units(row, key):
    statistics = statistics_of(CHECKPOINT, read_config(CHECKPOINT).raw, key)
    normalised = action_of(GOLDEN[f"single.{row}.greedy_tokens"][0], 512)
    assert error(normalised, GOLDEN[f"single.{row}.action_normalised"]) <= 1e-12
    assert error(statistics.unnormalise(normalised), GOLDEN[f"single.{row}.action.{key}"]) <= 1e-9


@pytest.mark.parametrize("key", DATASETS)
@pytest.mark.parametrize("row", ROWS)
def test_policy_from_a_frame_and_an_instruction_to_an_action(row, key):
    spec = PolicySpec(action_dim=7, cameras=("base",))
    policy = policies.build("openvla", spec, 0, checkpoint=str(CHECKPOINT), unnorm_key=key)
    inputs = Inputs(frames={"base": GOLDEN[f"image.{row}.rgb"][None]}, instruction=(INSTRUCTIONS[row],))
    action = policy.act(inputs, None)
    assert torch.equal(action.trace["tokens"], GOLDEN[f"single.{row}.greedy_tokens"])
    assert error(action.chunk[0, 0], GOLDEN[f"single.{row}.action.{key}"].float()) == 0


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_scores_of_given_tokens(model, images, temperature):
    tokens, sequence = GOLDEN["given.action_tokens"], padded(model, images)
    hidden = model.hidden(sequence.extended(model.embed_tokens(tokens[:, :-1])))
    states = model.predicting(hidden, sequence, 7)
    torch.testing.assert_close(states[:, 0], GOLDEN["given.hidden_a0"], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(model.language_model.lm_head(states), GOLDEN["given.logits"], **LOGITS)
    log_prob, entropy = score(model.action_logits(states), tokens - 256, temperature)
    assert error(log_prob, GOLDEN[f"given.logp.T{temperature}"]) <= 2e-5
    assert error(entropy, GOLDEN[f"given.entropy.T{temperature}"]) <= 2e-5


def test_supervised_loss_and_its_gradients():
    model = load_model(CHECKPOINT)
    images = model.embed_images(GOLDEN["pixel_values.resize-naive"][:, None])
    prompts = GOLDEN["batch_right.attention_mask"].sum(1)
    sequence = model.sequence(images, GOLDEN["batch_right.input_ids"], prompts)
    labelled = torch.stack([row[row != -100] for row in GOLDEN["sft.labels"]])  # seven actions and </s>
    hidden = model.hidden(sequence.extended(model.embed_tokens(labelled[:, :-1])))
    logits = model.language_model.lm_head(model.predicting(hidden, sequence, 8))
    loss = functional.cross_entropy(logits.flatten(0, 1), labelled.flatten())
    torch.testing.assert_close(loss, GOLDEN["sft.loss"], rtol=1e-3, atol=0)
    loss.backward()
    found = {to_checkpoint(name): parameter.grad for name, parameter in model.named_parameters()}
    gradients = {name: gradient for name, gradient in found.items() if gradient is not None and gradient.any()}
    assert gradients.keys() == found.keys()
    prefix = "sft.grad_norm."
    for name in [name for name in GOLDEN if name.startswith(prefix)]:
        norm = torch.linalg.vector_norm(gradients[name.removeprefix(prefix)])
        assert error(norm, GOLDEN[name]) <= 1e-3 * float(GOLDEN[name]), name


def test_published_vocabulary():
    """Token 29871 after the prompt, actions in 31744..31999, from a checkpoint in bfloat16."""
    folder = OPENVLA / "checkpoint_fullvocab"
    model = load_model(folder, "float32")
    ids = functional.pad(GOLDEN["fullvocab.input_ids"], (0, 1), value=29871)
    images = model.embed_images(GOLDEN["pixel_values.resize-naive"][:1, None])
    sequence = model.sequence(images, ids, torch.tensor([ids.shape[1]]))
    logits = model.action_logits(model.predicting(model.hidden(sequence), sequence, 1))[0, 0]
    torch.testing.assert_close(logits, GOLDEN["fullvocab.last_logits_action"], **LOGITS)
    tokens = decode(model, sequence, 7, None).tokens
    assert torch.equal(tokens, GOLDEN["fullvocab.greedy_tokens"])
    for key in DATASETS:
        statistics = statistics_of(folder, model.config.raw, key)
        assert error(statistics.unnormalise(action_of(tokens[0], 32000)), GOLDEN[f"fullvocab.action.{key}"]) <= 1e-9
