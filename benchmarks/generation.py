"""Tokens per second of the language policy's generation, beside transformers' `generate` on the same weights.

    python benchmarks/generation.py --json benchmarks/results/generation.json

Answers differ in length as those of reasoning models do: the lengths are quantiles of a log-normal distribution whose
longest is ten times the mean, shuffled. The policy's generation writes `rows` of them side by side and replaces one
that has ended at once. transformers' `generate` is given as many prompts at a time, which end when the longest of them
has ended, and, as a second peer, all prompts at a time. It is told each answer's length by a stopping criterion, and
takes prompts padded on the left. Both take the likeliest tokens, which are compared. Weights are random: no value of
theirs changes the time.

The three take turns. A ratio is the median of those of measurements that followed each other; that of CPU times is
given too, since a machine may be shared with other work.
"""

from __future__ import annotations

import json
import math
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist, median
from typing import Any

import torch
import tyro
from torch import Tensor

from embodied.devices import find_device
from embodied_bench.machine import finish
from embodied_bench.settings import show_and_write
from embodied_language.generation import Sampling, generate
from embodied_language.model import CausalModel, load_model, read_config
from policies.random_weights import RANDOM_WEIGHTS
from policies.torchvision_operators import import_torchvision

MODEL = Path(__file__).parent.parent / "assets" / "countdown_lm"
NO_TOKEN = (-1,)
"""In the place of tokens that end an answer: lengths are given."""
LONGEST, FEWEST = 10.0, 32
"""The longest answer, in mean lengths; so few answers have one of such a length."""
DEEPER: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": 8192,
    "max_position_embeddings": 1024,
}
"""A network of 16 M parameters, as Qwen2."""


@dataclass(frozen=True)
class Arguments:
    """Tokens per second of generation with answers of uneven length, beside transformers' `generate`."""

    answers: int = 256
    """Prompts, each with one answer: at least 32, or the longest could not be ten times the mean."""
    rows: int = 32
    """Answers that are written side by side."""
    prompt: int = 24
    """Tokens of the longest prompt; the shortest has half of them."""
    mean: int = 20
    """Mean length of an answer in tokens."""
    rounds: int = 3
    """Measurements of each."""
    threads: int = 2
    """torch's threads."""
    device: str = "cpu"
    """Where the networks are: cpu, or a GPU such as cuda."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Seconds:
    """One measurement."""

    wall: float
    cpu: float


def uneven(count: int, mean: int, random: torch.Generator) -> list[int]:
    """Lengths of so many answers: quantiles of a log-normal distribution, scaled to the mean, in random order."""
    last = NormalDist().inv_cdf(1 - 0.5 / count)
    # exp(sigma last) is LONGEST times the mean, exp(sigma^2 / 2).
    sigma = last - math.sqrt(last**2 - 2 * math.log(LONGEST))
    drawn = [math.exp(sigma * NormalDist().inv_cdf((i + 0.5) / count)) for i in range(count)]
    lengths = [max(1, round(value * mean * count / sum(drawn))) for value in drawn]
    return [lengths[place] for place in torch.randperm(count, generator=random).tolist()]


def transformers_generate(model: CausalModel, prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Tensor]:
    """The answers by transformers' `generate`, all prompts in one call."""
    import_torchvision()
    from transformers import StoppingCriteria, StoppingCriteriaList

    longest, device = max(map(len, prompts)), model.network.device
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=device)
    wanted = torch.tensor(lengths, device=device)

    class Lengths(StoppingCriteria):
        """Each answer ends at its own length."""

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] - longest >= wanted

    found = model.network.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(lengths),
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([Lengths()]),
    )
    return [row[longest : longest + length] for row, length in zip(found, lengths, strict=True)]


Writer = Callable[[Sequence[int]], Sequence[Tensor]]
"""Writes answers of these lengths."""


def measured(write: Writer, lengths: Sequence[int], device: torch.device) -> tuple[Seconds, Sequence[Tensor]]:
    """Seconds of one call, and its answers."""
    begun, used = time.perf_counter(), time.process_time()
    answers = write(lengths)
    finish(device)
    return Seconds(time.perf_counter() - begun, time.process_time() - used), answers


def share_of_equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Share of the answers whose tokens are the same."""
    return sum(map(torch.equal, ours, theirs)) / len(ours)


def compare(model: CausalModel, arguments: Arguments) -> dict[str, Any]:
    """The three in turn on one model. Raises `AssertionError` where their tokens differ in 32 bits: in 16, likeliest
    tokens are often tied."""
    random = torch.Generator().manual_seed(0)
    lengths = uneven(arguments.answers, arguments.mean, random)
    sizes = torch.randint(arguments.prompt // 2, arguments.prompt + 1, (arguments.answers,), generator=random).tolist()
    prompts = [torch.randint(3, model.vocabulary, (size,), generator=random).tolist() for size in sizes]

    def ours(lengths: Sequence[int]) -> Sequence[Tensor]:
        found = generate(model, prompts, max(lengths), NO_TOKEN, None, Sampling(rows=arguments.rows), lengths).tokens
        return [row[:length] for row, length in zip(found, lengths, strict=True)]

    def in_batches(size: int) -> Writer:
        def write(lengths: Sequence[int]) -> Sequence[Tensor]:
            found: list[Tensor] = []
            for first in range(0, len(prompts), size):
                part = slice(first, first + size)
                found += transformers_generate(model, prompts[part], lengths[part])
            return found

        return write

    writers: dict[str, Writer] = {
        "ours": ours,
        "generate": in_batches(arguments.rows),
        "generate_all_at_once": in_batches(arguments.answers),
    }
    taken: dict[str, list[Seconds]] = {name: [] for name in writers}
    equal: dict[str, float] = {}
    for write in writers.values():
        write([2] * len(prompts))  # whatever is made on first use
    for _ in range(arguments.rounds):
        answers: dict[str, Sequence[Tensor]] = {}
        for name, write in writers.items():
            seconds, answers[name] = measured(write, lengths, model.network.device)
            taken[name].append(seconds)
        equal = {name: share_of_equal(answers["ours"], answers[name]) for name in writers}
        assert model.dtype != torch.float32 or min(equal.values()) == 1, f"shares of equal answers: {equal}"
    tokens = sum(lengths)
    result: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": tokens,
        "longest": max(lengths),
        "answers_equal": equal,
        "tokens_per_s": {name: tokens / median(each.wall for each in found) for name, found in taken.items()},
    }
    for name in writers:
        if name != "ours":
            pairs = list(zip(taken[name], taken["ours"], strict=True))
            result[f"ratio_to_{name}"] = median(peer.wall / own.wall for peer, own in pairs)
            result[f"ratio_to_{name}_by_cpu_time"] = median(peer.cpu / own.cpu for peer, own in pairs)
    return result | {"runs": {name: [asdict(each) for each in found] for name, found in taken.items()}}


def main(arguments: Arguments) -> None:
    if arguments.answers < FEWEST:
        sys.exit(f"--answers is at least {FEWEST}, got {arguments.answers}")
    torch.set_num_threads(arguments.threads)
    small, device = MODEL, find_device(arguments.device)
    figures: dict[str, Any] = {key: getattr(arguments, key) for key in ("answers", "rows", "prompt", "mean", "threads")}
    with tempfile.TemporaryDirectory() as scratch:
        config = Path(scratch) / "config.json"
        config.write_text(json.dumps(read_config(small) | DEEPER | {RANDOM_WEIGHTS: 1}))
        for folder in (small, config.parent):
            model = load_model(folder).to(device)
            size = sum(parameter.numel() for parameter in model.parameters())
            figures[f"qwen2_{size / 1e6:.1f}m"] = compare(model, arguments)
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
