"""Updates on answers in tokens, against losses and gradients that are written out token by token, in float64."""

from __future__ import annotations

import math
import multiprocessing
import random
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.runtime.ranks import Ranks
from embodied.trajectories.batch import Trajectories
from embodied.workflows.run_spec import RunSpec
from embodied_language import packing
from embodied_language import policy as language_policy
from tests.embodied.support import answers
from tests.embodied.support.answers import (
    Decision,
    Episode,
    Loss,
    Terms,
    Token,
    deviation,
    log_probs,
    surrogate,
    trajectories,
)
from tests.embodied.support.ranks_alone import Counted, assert_near
from tests.variants import often

EXACT = 1e-10
GAMMA, LAMBDA = 0.9, 0.8
Written = Callable[[Any, Sequence[Episode]], Loss]


# --- the losses, written out


def tokens_of(episode: Episode, advantage: float) -> list[Token]:
    return [Token(d, place, advantage) for d in episode.decisions for place in range(len(d.tokens))]


def group_relative(
    policy: Any, found: Sequence[Episode], terms: Terms, scale: str = "group",
    margin: int = 0, masked: bool = False,
) -> Loss:  # fmt: skip
    """(R - mean of the group) / (its unbiased deviation + 1e-6); groups of equal outcomes are left out."""
    outcome = [float(e.solved) - (min(max(e.length - (answers.LONGEST - margin), 0) / margin, 1) if margin else 0.0)
               for e in found]  # fmt: skip
    tokens: list[Token] = []
    for episode in found:
        peers = [outcome[i] for i, other in enumerate(found) if other.group == episode.group]
        if max(peers) == min(peers) or (masked and not episode.terminated):
            continue
        gain = outcome[found.index(episode)] - sum(peers) / len(peers)
        divisor = {"group": deviation(peers) + 1e-6, "batch": deviation(outcome) + 1e-6, "none": 1.0}[scale]
        tokens += tokens_of(episode, gain / divisor)
    return surrogate(policy, tokens, terms)


def reinforce(policy: Any, found: Sequence[Episode], terms: Terms, baseline: bool, by_token: bool) -> Loss:
    """A = R, normalised over all decisions or tokens."""
    tokens: list[Token] = []
    returns: list[float] = []
    for episode in found:
        peers = [float(other.solved) for other in found if other.group == episode.group]
        score = float(episode.solved) - (sum(peers) / len(peers) if baseline else 0.0)
        steps = [(d, place) for d in episode.decisions for place in range(len(d.tokens))]
        for d, place in steps:
            tokens.append(Token(d, place, score))
            if by_token or place == 0:
                returns.append(tokens[-1].advantage)
    mean, spread = sum(returns) / len(returns), deviation(returns) + 1e-8
    for token in tokens:
        token.advantage = (token.advantage - mean) / spread
    return surrogate(policy, tokens, terms)


def actor_critic(policy: Any, found: Sequence[Episode], terms: Terms, by_token: bool) -> Loss:
    """GAE over decisions or tokens, normalised; a clipped Huber loss of half weight for the critic."""
    columns = [list(found[::2]), list(found[1::2])]
    decisions = [[(e, d) for e in column for d in e.decisions] for column in columns]
    kept = min(map(len, decisions))
    tokens: list[Token] = []
    advantages: list[tuple[Decision, int, float]] = []
    for column in decisions:
        following, carry = 0.25, 0.0  # the value after the rollout's last decision
        for episode, d in reversed(column[:kept]):
            if d is episode.decisions[-1]:
                following, carry = (0.0 if episode.terminated else episode.final_value), 0.0
            for place in reversed(range(len(d.tokens))) if by_token else (0,):
                reward = d.reward[place] if by_token else sum(d.reward)
                carry = reward + GAMMA * following - d.value[place] + GAMMA * LAMBDA * carry
                following = d.value[place]
                advantages.append((d, place, carry))
    numbers = [advantage for *_, advantage in advantages]
    mean, spread = sum(numbers) / len(numbers), deviation(numbers) + 1e-8
    critic = torch.zeros((), dtype=torch.float64)
    for d, place, advantage in advantages:
        places = (place,) if by_token else range(len(d.tokens))
        tokens += [Token(d, p, (advantage - mean) / spread) for p in places]
        old = d.value[place]
        value = log_probs(policy, d.text, d.so_far, d.tokens)[2][place]
        near = old + torch.clip(value - old, -0.2, 0.2)
        critic = critic + torch.maximum(*(huber(v - (advantage + old)) for v in (value, near)))
    loss = surrogate(policy, tokens, terms)
    critic = critic / len(numbers)
    return Loss(loss.total + 0.5 * critic, loss.policy, loss.entropy, loss.reference_kl, float(critic.detach()))


def huber(error: Tensor) -> Tensor:
    return 0.5 * error**2 if abs(error) <= 10 else 10 * (abs(error) - 5)


# --- the settings that are to give them


def settings(workflow: str, loss: dict[str, Any], advantage: dict[str, Any], minibatch: int = 0) -> dict[str, Any]:
    return {
        "workflow": workflow,
        "env": {"max_episode_steps": answers.LONGEST},
        "rollout": {} if workflow == "ppo" else {"episode_group": 4},
        "loss": {"ratio_unit": "action", **loss},
        "advantage": advantage,
        "optim": {"epochs": 1, "minibatch": minibatch, "max_grad_norm": math.inf},
    }


GAE = {"gamma": GAMMA, "lam": LAMBDA}
DAPO: dict[str, Any] = {"clip_high": 0.28}
ALGORITHMS: dict[str, tuple[dict[str, Any], Written]] = {
    "ppo": (
        settings("ppo", {"entropy_coef": 0.01}, GAE),
        lambda p, e: actor_critic(p, e, Terms(entropy=0.01), by_token=False),
    ),
    "ppo by token": (
        settings("ppo", {"clip_high": 0.28}, {**GAE, "credit": "action"}),
        lambda p, e: actor_critic(p, e, Terms(high=0.28), by_token=True),
    ),
    "grpo": (settings("grpo", {}, {}), lambda p, e: group_relative(p, e, Terms())),
    "grpo with a reference": (
        settings("grpo_reference", {"reference_kl": 0.1}, {}),
        lambda p, e: group_relative(p, e, Terms(reference=0.1)),
    ),
    "dr.grpo": (
        settings("grpo", {}, {"scale": "none"}), lambda p, e: group_relative(p, e, Terms(), scale="none")
    ),
    "scaled by the batch": (
        settings("grpo", {}, {"scale": "batch"}, 1000), lambda p, e: group_relative(p, e, Terms(), scale="batch")
    ),
    "dapo": (
        settings("grpo", DAPO, {"overlong": 5}),
        lambda p, e: group_relative(p, e, Terms(high=0.28), margin=5),
    ),
    "dapo that masks what was cut off": (
        settings("grpo", DAPO, {"overlong": "masked"}),
        lambda p, e: group_relative(p, e, Terms(high=0.28), masked=True),
    ),
    "reinforce++": (
        settings("reinforce_reference", {"reference_kl": 0.2}, {"credit": "action"}),
        lambda p, e: reinforce(p, e, Terms(reference=0.2), baseline=False, by_token=True),
    ),
    "reinforce++ by decision, with a baseline": (
        settings("reinforce_reference", {"reference_kl": 0.2}, {"baseline": "group"}),
        lambda p, e: reinforce(p, e, Terms(reference=0.2), baseline=True, by_token=False),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return answers.small_model(tmp_path_factory.mktemp("exact") / "model")


@pytest.fixture(scope="module")
def written(folder: Path) -> Callable[[str], tuple[Loss, dict[str, Tensor]]]:
    """Loss and gradient of an algorithm, each written out once."""
    known: dict[str, tuple[Loss, dict[str, Tensor]]] = {}

    def of(name: str) -> tuple[Loss, dict[str, Tensor]]:
        if name not in known:
            policy = answers.exact_policy(str(folder), name == "ppo by token")
            loss = ALGORITHMS[name][1](policy, answers.episodes(policy))
            loss.total.backward()  # type: ignore[no-untyped-call]
            known[name] = loss, {n: p.grad for n, p in policy.named_parameters() if p.grad is not None}
        return known[name]

    return of


def config_of(name: str, micro_batch: int | None) -> Config:
    data = ALGORITHMS[name][0]
    return parse_config({**data, "optim": {**data["optim"], "micro_batch": micro_batch}}, "test")


def assert_exact(
    found: dict[str, float], gradients: dict[str, Tensor], expected: tuple[Loss, dict[str, Tensor]]
) -> None:
    loss, others = expected
    assert found["learner/policy_loss"] == pytest.approx(loss.policy, abs=EXACT, rel=EXACT)
    assert found["learner/entropy"] == pytest.approx(loss.entropy, rel=EXACT)
    assert found["learner/value_loss"] == pytest.approx(loss.value, abs=EXACT, rel=EXACT)
    if "learner/reference_kl" in found:
        assert found["learner/reference_kl"] == pytest.approx(loss.reference_kl, rel=EXACT)
    assert found["learner/clip_fraction"] > 0.1, "nothing was clipped: the test would not see it"
    assert others.keys() == gradients.keys()
    assert max(float(gradient.abs().max()) for gradient in others.values()) > 1e-3
    for parameter, gradient in others.items():
        worst = float((gradients[parameter] - gradient).abs().max())
        assert worst < EXACT, f"{parameter} differs by {worst:.1e}"


def updated(
    name: str, micro_batch: int | None, folder: Path, run_dir: Path
) -> tuple[dict[str, float], dict[str, Tensor]]:
    by_token = name == "ppo by token"
    policy = answers.exact_policy(str(folder), by_token)
    batch = trajectories(answers.episodes(policy), not name.startswith("ppo"), by_token)
    learner = Counted(policy, RunSpec.of(config_of(name, micro_batch)), run_dir)
    return learner.update(batch, 0), learner.gradients()


@pytest.mark.parametrize(
    ("name", "micro_batch"),
    often(
        [("ppo by token", None), ("grpo with a reference", 3), ("dapo", 1), ("reinforce++", 3)],
        [(name, size) for name in ALGORITHMS for size in (None, 1, 3)],
    ),
)
def test_loss_and_gradient_are_those_written_out(
    name: str, micro_batch: int | None, folder: Path, written: Any, tmp_path: Path
) -> None:
    """In one packed pass, and split into passes of 1 and of 3 decisions."""
    assert_exact(*updated(name, micro_batch, folder, tmp_path), written(name))


def padded_lines(lengths: Sequence[int]) -> list[list[int]]:
    return [[row] for row in range(len(lengths))]


@pytest.mark.parametrize("name", often(["dapo"], ALGORITHMS))
def test_padding_changes_nothing(name: str, folder: Path, written: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Each answer in a line of its own, padded to the longest."""
    monkeypatch.setattr(packing, "shared_lines", padded_lines)
    assert_exact(*updated(name, None, folder, tmp_path), written(name))


@pytest.mark.parametrize("name", often(["dapo"], ALGORITHMS))
def test_logits_of_a_few_tokens_at_once_change_nothing(
    name: str, folder: Path, written: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(language_policy, "LOGITS_AT_ONCE", 5 * answers.TOKENS)
    assert_exact(*updated(name, None, folder, tmp_path), written(name))


@pytest.mark.parametrize("micro_batch", [None, 2, 3, 7])
def test_hardly_any_padding_is_forwarded(micro_batch: int | None, folder: Path, tmp_path: Path) -> None:
    """Answers of 1 to 12 tokens after prompts of uneven length."""
    policy = answers.exact_policy(str(folder))
    episodes = answers.episodes(policy)
    learner = Counted(policy, RunSpec.of(config_of("dapo", micro_batch)), tmp_path)
    forwarded: list[int] = []
    network: Any = policy.model.network.model
    network.register_forward_pre_hook(
        lambda module, given, named: forwarded.append(named["input_ids"].numel()), with_kwargs=True
    )
    learner.update(trajectories(episodes, True, False), 0)
    decisions = [decision for episode in episodes for decision in episode.decisions]
    real = sum(len(policy.prompts.tokens(d.text)) + len(d.so_far) + len(d.tokens) - 1 for d in decisions)
    assert real <= sum(forwarded) <= real / 0.9
    assert len(forwarded) == -(-len(decisions) // (micro_batch or len(decisions))), "one pass a micro-batch"


def test_rows_of_any_lengths_are_packed_with_little_padding() -> None:
    draw = random.Random(0)
    for _ in range(200):
        lengths = [draw.choice((draw.randint(1, 9), draw.randint(1, 300))) for _ in range(draw.randint(1, 40))]
        lines = packing.shared_lines(lengths)
        assert sorted(row for line in lines for row in line) == list(range(len(lengths)))
        columns = max(sum(lengths[row] for row in line) for line in lines)
        assert sum(lengths) >= 0.9 * columns * len(lines)


# --- two ranks


JOBS = [*((name, "whole") for name in ALGORITHMS), ("dapo", "sharded"), ("ppo by token", "sharded")]


def rank_of(name: str, sharding: str, ranks: Ranks, folder: str, run_dir: Path) -> tuple[Counted, Trajectories]:
    """The rank's learner, which takes passes of 2 decisions, and what it learns from."""
    by_token, config = name == "ppo by token", config_of(name, 2)
    optim = {"sharding": sharding, "recompute": sharding == "sharded"}  # as the recipes of 1.5B and 7B
    config = config.model_copy(update={"optim": config.optim.model_copy(update=optim)})
    policy = answers.exact_policy(folder, by_token)
    batch = trajectories(answers.episodes(policy), not name.startswith("ppo"), by_token)
    return Counted(policy, RunSpec.of(config), run_dir, Affinity(), ranks), batch


def second_rank(pipe: Connection, folder: str, run_dir: Path) -> None:
    torch.set_num_threads(1)
    for name, sharding in JOBS:
        learner, batch = rank_of(name, sharding, Ranks("learner", 1, 2), folder, run_dir)
        learner.join(pipe.recv(), 300.0)
        metrics = learner.update(batch, 0)
        learner.weights()
        gradients = {} if sharding == "sharded" else learner.gradients()
        pipe.send((metrics, {key: gradient.numpy() for key, gradient in gradients.items()}))
        learner.leave()


@pytest.mark.slow
def test_two_ranks_have_the_gradient_of_one(folder: Path, written: Any, tmp_path: Path) -> None:
    """Two processes, connected by gloo, with the whole policy or a shard of it: then the parameters are compared."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=second_rank, args=(theirs, str(folder), tmp_path), daemon=True)
    other.start()
    for name, sharding in JOBS:
        learner, batch = rank_of(name, sharding, Ranks("learner", 0, 2), str(folder), tmp_path)
        address = learner.listen()
        ours.send(address)
        learner.join(address, 300.0)
        metrics = learner.update(batch, 0)
        weights = {key: tensor.clone() for key, tensor in learner.weights().items()}
        same, gradients = ours.recv()
        if sharding == "whole":
            assert_exact(metrics, learner.gradients(), written(name))
            its = {key: torch.from_numpy(gradient) for key, gradient in gradients.items()}
            assert_exact(same, its, written(name))
        else:
            assert metrics["learner/policy_loss"] == pytest.approx(written(name)[0].policy, abs=EXACT, rel=EXACT)
            alone, batch = rank_of(name, "whole", Ranks(), str(folder), tmp_path)
            alone.update(batch, 0)
            assert_near(weights, alone.weights(), EXACT)
        learner.leave()
    other.kill()
    other.join()
