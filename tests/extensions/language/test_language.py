"""Language models as policies: what they say, what they are scored with, and what they leave on the disk."""

from __future__ import annotations

import heapq
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from embodied_language.generation import Sampling, choose, generate
from policies import Inputs, PolicyError, PolicySpec
from policies.contract import actor_parameters
from policies.torchvision_operators import import_torchvision

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"
SPEC = PolicySpec(action_dim=1, chunk=12, state_dim=12, discrete_actions=172)
ASKED = (
    "Make 24 from 3, 8, 20.",
    "Make 7 from 1, 2.",
    "Make 100 from 20, 20, 3, 4.",
    "Make 1 from 1.",
    "Make 9 from 9, 9.",
)
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "tie_word_embeddings": False},
}


NEVER = (-1,)
"""A token that no answer ends with."""


def written(folder: Path, family: str = "qwen2") -> Path:
    """A small model's directory, with weights that make answers of uneven length."""
    shutil.copytree(MODEL, folder)
    config = json.loads((MODEL / "config.json").read_text())
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **FAMILIES[family]}))
    return folder


@pytest.fixture(scope="module", params=FAMILIES)
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = written(tmp_path_factory.mktemp("models") / request.param, request.param)
    policy = policies.build("language", SPEC, 0, checkpoint=str(folder), rows=2, value_per_action=True)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    # So that answers end at different lengths.
    return policy


def inputs(rows: int = 5) -> Inputs:
    return Inputs(instruction=ASKED[:rows], state=torch.full((rows, 12), -1.0))


def noise(rows: int = 5) -> torch.Tensor:
    return torch.randn(rows, 12, generator=torch.Generator().manual_seed(2))


def test_evaluation_gives_the_log_probs_and_values_of_the_act(policy):
    action = policy.act(inputs(), noise())
    found = policy.evaluate(inputs(), action.trace)
    assert torch.allclose(action.log_prob, found.log_prob, atol=1e-4)
    assert torch.allclose(action.value[:, 0], found.value[:, 0], atol=1e-4)
    ended = (action.trace["tokens"] == policy.prompts.end).cumsum(1).cumsum(1) > 1
    assert not action.log_prob[..., 0][ended].any() and not found.log_prob[..., 0][ended].any()


def test_what_a_row_says_depends_on_it_alone(policy):
    whole = policy.act(inputs(), noise())
    for row in range(5):
        alone = policy.act(inputs().rows(torch.tensor([row])), noise()[row : row + 1])
        assert torch.equal(alone.chunk[0], whole.chunk[row])
        assert torch.allclose(alone.log_prob[0], whole.log_prob[row], atol=1e-4)


def test_the_likeliest_tokens_are_those_of_transformers(policy, tmp_path: Path):
    import_torchvision()
    from transformers import AutoModelForCausalLM

    policies.export(policy, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    said = policy.act(inputs(), None).trace["tokens"]
    spare = list(range(policy.prompts.size, policy.model.vocabulary))  # rows of the head that no tokenizer knows
    for row, text in enumerate(ASKED):
        asked = torch.tensor([policy.prompts.tokens(text)])
        wanted = model.generate(
            asked, max_new_tokens=12, do_sample=False, eos_token_id=2, pad_token_id=2, suppress_tokens=spare
        )
        wanted = wanted[0, asked.shape[1] :]
        assert torch.equal(said[row, : len(wanted)], wanted) and (said[row, len(wanted) :] == 2).all()


def test_an_answer_begun_elsewhere_goes_on_the_same(policy):
    whole = policy.act(inputs(), None).trace["tokens"]
    state = torch.full((5, 12), -1.0)
    state[:, :3] = whole[:, :3]
    assert 2 not in whole[:, :3]
    rest = policy.act(replace(inputs(), state=state), None).trace["tokens"]
    assert torch.equal(rest[:, :9], whole[:, 3:])


def test_rows_that_wait_say_what_rows_side_by_side_say(policy):
    asked = [policy.prompts.tokens(text) for text in ASKED]
    one, all_at_once = (
        generate(policy.model, asked, 12, policy.prompts.ends, noise(), Sampling(rows=rows)) for rows in (1, 5)
    )
    assert torch.equal(one.tokens, all_at_once.tokens)


def test_each_answer_may_have_a_limit_of_its_own(policy):
    asked, limits = [policy.prompts.tokens(text) for text in ASKED], (3, 12, 1, 5, 12)
    ends = policy.prompts.ends
    whole = generate(policy.model, asked, 12, ends, noise(), Sampling(rows=2))
    limited = generate(policy.model, asked, 12, ends, noise(), Sampling(rows=2), limits)
    for row, limit in enumerate(limits):
        assert torch.equal(limited.tokens[row, :limit], whole.tokens[row, :limit])
        assert (limited.tokens[row, limit:] == policy.prompts.end).all() and not limited.log_prob[row, limit:].any()


def test_a_row_that_rests_costs_one_token(policy):
    action = policy.act(replace(inputs(2), instruction=(ASKED[0], "")), noise(2))
    assert torch.equal(action.chunk[0], policy.act(inputs(1), noise(2)[:1]).chunk[0])
    assert (action.trace["tokens"][1, 1:] == policy.prompts.end).all() and not action.log_prob[1, 1:].any()


def test_a_call_takes_the_turns_that_the_planner_counts(policy, monkeypatch: pytest.MonkeyPatch):
    limits, turns = (2, 12, 1, 5, 3, 9, 1, 4, 12, 2, 6), 0
    logits = policy.model.logits

    def counted(states: torch.Tensor) -> torch.Tensor:
        nonlocal turns
        turns += 1
        return logits(states)

    monkeypatch.setattr(policy.model, "logits", counted)
    asked = [policy.prompts.tokens(ASKED[0])] * len(limits)
    generate(policy.model, asked, 12, NEVER, None, Sampling(rows=3), limits)
    ready = [0, 0, 0]  # list scheduling, as schedulers.turns has it
    for limit in limits:
        heapq.heapreplace(ready, ready[0] + limit)
    assert turns == max(ready)


def test_the_state_of_an_environment_that_rests_is_no_answer(policy):
    """Its slot holds zeros, which are a token's id."""
    state = torch.full((2, 10 * policy.model.context), -1.0)
    state[1] = 0.0
    asked = replace(inputs(2), instruction=(ASKED[0], ""), state=state)
    assert torch.equal(policy.act(asked, noise(2)).chunk[0], policy.act(inputs(2), noise(2)).chunk[0])


def test_tokens_are_drawn_with_their_probabilities():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    uniform = (torch.arange(4000) + 0.5) / 4000
    drawn = torch.special.ndtri(uniform.double()).float()
    tokens, _ = choose(logits.expand(4000, -1), drawn, Sampling(temperature=2.0))
    shares = torch.bincount(tokens, minlength=4) / 4000
    assert torch.allclose(shares, torch.softmax(logits[0] / 2, -1), atol=1e-3)
    likely, _ = choose(logits.expand(4000, -1), drawn, Sampling(top_p=0.7))
    assert set(likely.tolist()) == {1, 2}


def test_imitation_raises_the_demonstrated_answer(policy, tmp_path: Path):
    tokens = policy.prompts.tokens("(3+8)*20")
    actions = torch.full((5, 12, 1), 2.0)
    actions[:, : len(tokens), 0] = torch.tensor(tokens, dtype=torch.float32)
    counted = (torch.arange(12) <= len(tokens)).expand(5, -1)
    loss = policy.imitate(inputs(), actions, counted, noise())
    log_prob = policy.evaluate(inputs(), {"tokens": actions[..., 0].long()}).log_prob[..., 0]
    assert torch.allclose(loss, -log_prob.sum(1), atol=1e-3)


def test_a_saved_policy_is_the_policy(policy, tmp_path: Path):
    policies.save(policy, tmp_path / "saved")
    again = policies.load(tmp_path / "saved")
    one, two = policy.act(inputs(), noise()), again.act(inputs(), noise())
    assert torch.equal(one.chunk, two.chunk) and torch.equal(one.log_prob, two.log_prob)


def test_a_policy_with_a_value_for_each_token_begins_with_one_that_has_one_value(policy, tmp_path: Path):
    policies.save(policy, tmp_path / "saved")
    other = policies.build("language", SPEC, 1, checkpoint=policy.options.checkpoint, rows=2)
    policies.load_into(other, tmp_path / "saved")
    first, second = policy.act(inputs(), noise()), other.act(inputs(), noise())
    assert torch.allclose(first.value[:, 0], second.value, atol=1e-5)
    assert torch.allclose(first.log_prob, second.log_prob, atol=1e-5)


def test_an_adapter_is_trained_saved_and_merged(tmp_path: Path):
    folder = written(tmp_path / "base")
    first = policies.build("language", SPEC, 0, checkpoint=str(folder))
    policies.export(first, tmp_path / "whole")  # of which the weights are in a file, as an adapter's base has them
    policy: Any = policies.build("language", SPEC, 0, checkpoint=str(tmp_path / "whole"), lora_rank=4)
    names = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert names and all("lora_" in name or name.startswith("value_head") for name in names)
    with torch.no_grad():
        for parameter in actor_parameters(policy):
            parameter += 0.2 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    policies.save(policy, tmp_path / "saved")
    one, two = policy.act(inputs(), noise()), policies.load(tmp_path / "saved").act(inputs(), noise())
    assert torch.equal(one.chunk, two.chunk)
    policies.export(policy, tmp_path / "merged")
    merged = policies.build("language", SPEC, 0, checkpoint=str(tmp_path / "merged"))
    assert torch.allclose(merged.act(inputs(), noise()).log_prob, one.log_prob, atol=1e-4)


@pytest.mark.parametrize(
    ("spec", "options", "message"),
    [
        (SPEC, {}, "needs a language model"),
        (SPEC, {"checkpoint": "nowhere"}, "nowhere is not a folder here"),
        (SPEC, {"checkpoint": str(MODEL), "temperature": 0.0}, "temperature must be greater than 0"),
        (SPEC, {"checkpoint": str(MODEL), "top_p": 1.5}, "top_p is a share"),
        (SPEC, {"checkpoint": str(MODEL), "chat": True}, "has no chat template"),
        (SPEC, {"checkpoint": str(MODEL), "system": "Be brief."}, "set chat to true"),
        (SPEC, {"checkpoint": str(MODEL), "prompt": "Solve:"}, "prompt has {prompt} where"),
        (
            replace(SPEC, discrete_actions=9),
            {"checkpoint": str(MODEL)},
            "answered in 9 tokens.*set env.options.tokenizer",
        ),
        (replace(SPEC, proprio_dim=2), {"checkpoint": str(MODEL)}, "language reads texts"),
    ],
)
def test_what_cannot_be_is_refused(spec: PolicySpec, options: dict[str, Any], message: str):
    with pytest.raises(PolicyError, match=message):
        policies.build("language", spec, 0, **options)


def test_a_prompt_longer_than_the_context_is_refused():
    policy = policies.build("language", SPEC, 0, checkpoint=str(MODEL))
    with pytest.raises(PolicyError, match="more than the model's context of 256"):
        policy.act(Inputs(instruction=("Make 1 from 1. " * 60,)), None)
