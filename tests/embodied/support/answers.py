"""A small language model, uneven answers to it as trajectories, and losses of them written out token by token.

What is written out here shares nothing with the code under test but the network, which it asks for one unpadded
sequence at a time. Formulas: GAE (Schulman et al. 2016), the clipped surrogate (Schulman et al. 2017), GRPO (Shao et
al. 2024), DAPO (Yu et al. 2025), REINFORCE++ (Hu et al. 2025).
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policies
from embodied.trajectories.batch import TensorDecisions, Trajectories
from policies import Inputs, PolicySpec

ASSET = Path(__file__).parents[3] / "assets" / "countdown_lm"
CHUNK, LONGEST, TOKENS, END = 6, 12, 172, 2
SPEC = PolicySpec(action_dim=1, chunk=CHUNK, state_dim=LONGEST, discrete_actions=TOKENS)
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def small_model(folder: Path, **changes: Any) -> Path:
    """The directory of a language model of some thousand parameters, with the tokenizer of the shipped one."""
    shutil.copytree(ASSET, folder)
    config = {**json.loads((ASSET / "config.json").read_text()), **SIZES, "num_key_value_heads": 1, **changes}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def exact_policy(folder: str, value_per_action: bool = False) -> Any:
    """A policy in float64, with logits and values that differ from token to token."""
    policy: Any = policies.build(
        "language", SPEC, 0, checkpoint=folder, temperature=1.3, value_per_action=value_per_action
    )
    network = policy.model.network
    for name, _ in [*network.named_modules()]:
        if name.endswith("norm"):  # transformers' own goes through float32
            exact = torch.nn.RMSNorm(SIZES["hidden_size"], network.config.rms_norm_eps)
            network.get_submodule(name.rpartition(".")[0]).register_module(name.rpartition(".")[2], exact)
    policy.double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=g, dtype=torch.float64)
    policy.ratio_tolerance = math.inf  # the recorded log-probs are made up, so that ratios leave the clip range
    return policy


@dataclass
class Decision:
    """One decision of an episode; the lists have a number for each executed token."""

    text: str
    so_far: list[int]
    tokens: list[int]
    old: list[float] = field(default_factory=list)
    reference: list[float] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    """Of the critic that acted, token by token; the first is the decision's."""
    reward: list[float] = field(default_factory=list)


@dataclass
class Episode:
    group: int
    decisions: list[Decision]
    terminated: bool
    final_value: float

    @property
    def solved(self) -> bool:
        return self.terminated and self.decisions[-1].reward[-1] == 1.0

    @property
    def length(self) -> int:
        return sum(len(decision.tokens) for decision in self.decisions)


def episodes(policy: Any) -> list[Episode]:
    """Twelve episodes in three groups, one of which nobody solves: answers of 1 to `LONGEST` tokens, prompts of uneven
    length; those of more than `CHUNK` tokens are of two decisions, and one in five is cut off."""
    g = torch.Generator().manual_seed(2)
    lengths = (1, 5, 6, 9, 12, 2, 12, 3, 11, 4, 7, 12)
    found = []
    for number, length in enumerate(lengths):
        group, ended = number // 4, length < LONGEST
        text = "Make 9 from 1, 2." + " 3, 4, 5." * group
        answer = torch.randint(3, TOKENS, (length,), generator=g).tolist()
        if ended:
            answer[-1] = END
        decisions = []
        for first in range(0, length, CHUNK):
            tokens = answer[first : first + CHUNK]
            noise = torch.randn(3, len(tokens), generator=g, dtype=torch.float64)
            said = log_probs(policy, text, answer[:first], tokens)[0].detach()
            decisions.append(
                Decision(
                    text,
                    answer[:first],
                    tokens,
                    old=(said + 0.3 * noise[0]).tolist(),
                    reference=(said + 0.5 * noise[1]).tolist(),
                    value=noise[2].tolist(),
                    reward=[0.0] * len(tokens),
                )
            )
        decisions[-1].reward[-1] = float(ended and group < 2 and number % 2)
        found.append(Episode(group, decisions, ended, 0.0 if ended else 0.4))
    return found


def log_probs(policy: Any, text: str, so_far: Sequence[int], tokens: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """float64 [n] each, of n tokens: log-probs, entropies and values, from one forward pass per token."""
    said, entropies, values = [], [], []
    asked = [*policy.prompts.tokens(text), *so_far]
    for place, token in enumerate(tokens):
        whole = torch.tensor([[*asked, *tokens[:place]]])
        state = policy.model.network.model(input_ids=whole, use_cache=False).last_hidden_state[0, -1]
        logits = policy.model.network.lm_head(state)[:TOKENS] / policy.options.temperature
        every = logits - logits.exp().sum().log()
        said.append(every[token])
        entropies.append(-(every.exp() * every).sum())
        values.append(policy.value_head(state).squeeze())
    return torch.stack(said), torch.stack(entropies), torch.stack(values)


def trajectories(found: Sequence[Episode], side_by_side: bool, per_action: bool) -> Trajectories:
    """The episodes, each in a column of its own; or, as a rollout of decisions has them, one after the other in two."""
    columns = [[episode] for episode in found] if side_by_side else [list(found[::2]), list(found[1::2])]
    rows = [[d for episode in column for d in episode.decisions] for column in columns]
    if not side_by_side:  # a rollout has as many decisions of every environment
        rows = [row[: min(map(len, rows))] for row in rows]
    count, wide = max(map(len, rows)), len(columns)
    blank = torch.zeros(count, wide, CHUNK, dtype=torch.float64)
    log_prob, reference, value, step_reward = (blank.clone() for _ in range(4))
    tokens, states = torch.full((count, wide, CHUNK), END), torch.full((count, wide, LONGEST), -1.0)
    executed = torch.zeros(count, wide, dtype=torch.int64)
    flags = torch.zeros(3, count, wide, dtype=torch.bool)
    final_value = torch.zeros(count, wide, dtype=torch.float64)
    texts = [["" for _ in range(wide)] for _ in range(count)]
    for b, (column, row) in enumerate(zip(columns, rows, strict=True)):
        last = {id(episode.decisions[-1]): episode for episode in column}
        for t, decision in enumerate(row):
            n = len(decision.tokens)
            executed[t, b], texts[t][b] = n, decision.text
            tokens[t, b, :n] = torch.tensor(decision.tokens)
            states[t, b, : len(decision.so_far)] = torch.tensor(decision.so_far, dtype=torch.float32)
            for tensor, numbers in (
                (log_prob, decision.old), (reference, decision.reference), (value, decision.value),
                (step_reward, decision.reward),
            ):  # fmt: skip
                tensor[t, b, :n] = torch.tensor(numbers, dtype=torch.float64)
            if id(decision) in last:
                episode = last[id(decision)]
                flags[0, t, b], flags[1, t, b], flags[2, t, b] = (
                    episode.terminated, not episode.terminated, episode.solved,
                )  # fmt: skip
                final_value[t, b] = episode.final_value
    inputs = Inputs(instruction=tuple(text for row in texts for text in row), state=states.flatten(0, 1))
    batch = Trajectories(
        decisions=TensorDecisions(inputs, {"tokens": tokens.flatten(0, 1)}),
        log_prob=log_prob[..., None],
        value=value if per_action else value[..., 0],
        reward=step_reward.sum(2),
        success=flags[2],
        executed=executed,
        mask=executed > 0,
        terminated=flags[0],
        truncated=flags[1],
        final_value=final_value,
        last_value=torch.full((wide,), 0.25, dtype=torch.float64),
        version=0,
        step_reward=step_reward,
        reference_log_prob=reference[..., None],
    )
    return replace(batch, episode_group=torch.tensor([e.group for e in found])) if side_by_side else batch


def deviation(numbers: Sequence[float]) -> float:
    """Unbiased."""
    mean = sum(numbers) / len(numbers)
    return math.sqrt(sum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


@dataclass
class Token:
    """What the loss of one token is made of."""

    decision: Decision
    place: int
    advantage: float
    weight: float = 1.0


@dataclass(frozen=True)
class Terms:
    """Coefficients of a written-out loss."""

    low: float = 0.2
    high: float = 0.2
    entropy: float = 0.0
    reference: float = 0.0


@dataclass
class Loss:
    total: Tensor
    policy: float
    entropy: float
    reference_kl: float
    value: float = 0.0


def surrogate(policy: Any, tokens: Sequence[Token], terms: Terms) -> Loss:
    """The policy's loss: a sum over tokens, divided by the sum of their weights."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(3)]
    kl_of_units, known = 0.0, {}
    for token in tokens:
        d = token.decision
        if id(d) not in known:
            known[id(d)] = log_probs(policy, d.text, d.so_far, d.tokens)
        said, entropies, _ = known[id(d)]
        now, a = said[token.place], token.advantage
        ratio = torch.exp(now - d.old[token.place])
        clipped = torch.clip(ratio, 1 - terms.low, 1 + terms.high)
        one = -torch.min(a * ratio, a * clipped)
        gap = d.reference[token.place] - now
        divergence = torch.exp(gap) - gap - 1
        kl_of_units += float(divergence.detach())
        for index, term in enumerate((one, entropies[token.place], divergence)):
            sums[index] = sums[index] + token.weight * term
    weights = sum(token.weight for token in tokens)
    total = (sums[0] - terms.entropy * sums[1] + terms.reference * sums[2]) / weights
    loss, entropy = (float(found.detach()) / weights for found in sums[:2])
    return Loss(total, loss, entropy, kl_of_units / len(tokens))
