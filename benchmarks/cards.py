"""Which policy learns on which card? `python benchmarks/cards.py --json benchmarks/results/cards.json`

The program's own prediction (`embodied train --dry-run --card`) for networks of the published sizes, without numbers in
them: nothing is downloaded, and little memory is taken. `--page docs/cards.md` writes the tables of that page.
"""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import tyro

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.planning.memory import CARDS, RESERVE, CardMemory, Passes, card_memory, changes, smallest_change
from embodied_bench.settings import show_and_write
from policies.contract import Inputs, Policy, PolicySpec
from policies.lora import AdaptedPolicy
from policies.openvla import sizes as openvla_sizes
from policies.pi0 import sizes as pi0_sizes
from policies.random_weights import INSTRUCTION, RANDOM_WEIGHTS, undrawn
from policies.smolvla import sizes as smolvla_sizes

ROWS, PASSES = 8, 8
"""Rows of a decision and of a micro-batch; micro-batches of an optimiser step."""
PROMPT, ANSWER = 256, 1024
"""Tokens of a language model's prompts and answers."""
RANK = 32
METHODS = ("PPO", "supervised")
"""GRPO needs what PPO does without a value head, which is small."""
ONE = PolicySpec(action_dim=7, cameras=("base",), image_size=224)
TWO = PolicySpec(action_dim=7, chunk=5, proprio_dim=8, cameras=("base", "wrist"), image_size=224)
QWEN = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "torch_dtype": "bfloat16", RANDOM_WEIGHTS: 0, "num_hidden_layers": 28,
}  # fmt: skip
LANGUAGE: Mapping[str, Mapping[str, Any]] = {
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2,
        "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
        "vocab_size": 152064, "tie_word_embeddings": False,
    },
}  # fmt: skip
KNOWN = 151665
"""Tokens that Qwen2.5's tokenizer knows."""


@dataclass(frozen=True)
class Network:
    """A policy of a published size."""

    kind: str
    spec: PolicySpec
    options: Mapping[str, Any]
    full: Mapping[str, Any] | None
    """Options with which every weight is trained; None: the policy has no such option."""
    adapts: bool = True


def write_language(folder: Path, name: str) -> Path:
    """The folder of a language model without weights; its tokenizer spells, and knows as many tokens as Qwen2.5's."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**QWEN, **LANGUAGE[name], "eos_token_id": 1, "pad_token_id": 0}))
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"<pad>": 0, "<end>": 1, "word": 2, **{f"word{number}": number for number in range(3, KNOWN)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="word"))  # noqa: S106 - no password
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(["<pad>", "<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    special = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    return folder


def write_lerobot(folder: Path, kind: str) -> Path:
    """The folder of a new network with LeRobot's defaults."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"type": kind, RANDOM_WEIGHTS: 0}))
    return folder


def networks(root: Path) -> Iterator[tuple[str, Network]]:
    """Policies by name, with their folders below `root`."""
    bf16 = {"dtype": "bfloat16"}
    for name, model, spec in (
        ("OpenVLA", "openvla-7b", ONE), ("OpenVLA-OFT", "openvla-oft-7b", replace(ONE, chunk=8)),
    ):  # fmt: skip
        folder = str(openvla_sizes.write_random(root / name, model))
        options = {"checkpoint": folder, "unnorm_key": "demonstrations", **bf16}
        yield name, Network(openvla_sizes.find(model)[0], spec, options, {})
    for name, model in (("π₀", "pi0"), ("π₀.₅", "pi05")):
        folder = str(pi0_sizes.write_random(root / model, model))
        yield name, Network("pi0", TWO, {"checkpoint": folder, "asset": "demonstrations", **bf16}, {"train": "all"})
    folder = str(smolvla_sizes.write_random(root / "smolvla", "smolvla"))
    options = {"checkpoint": folder, "asset": "demonstrations"}
    yield "SmolVLA", Network("smolvla", TWO, options, None)
    for name, kind, spec in (
        ("ACT", "act", replace(TWO, chunk=100)),
        ("Diffusion Policy", "diffusion", replace(TWO, chunk=8, observations=2)),
    ):  # fmt: skip
        options = {"checkpoint": str(write_lerobot(root / kind, kind))}
        yield name, Network(kind, spec, options, {}, adapts=False)
    words = PolicySpec(action_dim=1, chunk=ANSWER, discrete_actions=KNOWN)
    for name in LANGUAGE:
        options = {"checkpoint": str(write_language(root / name, name)), "rows": ROWS, **bf16}
        yield name, Network("language", words, options, {})


def inputs_of(spec: PolicySpec) -> Inputs:
    """One row of observations without content."""
    seen, size = (1, spec.observations) if spec.observations > 1 else (1,), spec.image_size
    return Inputs(
        proprio=torch.zeros(*seen, spec.proprio_dim) if spec.proprio_dim else None,
        frames={name: torch.zeros(*seen, size, size, 3, dtype=torch.uint8) for name in spec.cameras},
        instruction=(" ".join(["word"] * PROMPT) if spec.discrete_actions else INSTRUCTION,),
    )


def config_of(network: Network) -> Config:
    """A run's settings of optimiser and workflow."""
    return parse_config(
        {
            "workflow": "ppo",
            "policy": {"kind": network.kind, "reads": ["images"] if network.spec.cameras else ["instruction"]},
            "optim": {"epochs": 1, "minibatch": ROWS * PASSES, "micro_batch": ROWS},
        },
        "benchmarks/cards.py",
    )


class Predictions:
    """Predictions of one policy, of what it trains and of its method, each made once."""

    def __init__(self, network: Network, adapter: bool, method: str) -> None:
        self._network, self._adapter, self._method = network, adapter, method
        self._built: dict[str | None, Policy] = {}
        self.known: dict[str, CardMemory] = {}
        """By the settings that differ from `config_of`."""

    def policy(self, base: str | None) -> Policy:
        network = self._network
        if base not in self._built:
            options = {"lora_rank": RANK} if self._adapter else network.full or {}
            with undrawn():
                self._built[base] = policies.build(network.kind, network.spec, 0, base, **network.options, **options)
        return self._built[base]

    def memory(self, config: Config) -> CardMemory:
        changed = changes(config_of(self._network), config)
        if changed not in self.known:
            policy = self.policy(config.policy.base)
            rows = min(config.optim.micro_batch or ROWS, ROWS * PASSES)
            passes = Passes(
                inputs_of(policy.spec), ROWS, rows, of_a_step=-(-ROWS * PASSES // rows), critic=self._method == "PPO",
                imitates=self._method == "supervised",
            )  # fmt: skip
            self.known[changed] = card_memory(config, policy, passes)
            if self.known[changed].update is None:
                raise RuntimeError(f"{self._network.kind} is not predicted")
        return self.known[changed]


def verdicts(network: Network, adapter: bool, method: str) -> dict[str, Any]:
    """For each card the changes of settings with which a run fits: none, some, or null where no change suffices. Also
    the GB that were predicted on the way, by these changes."""
    predictions, config = Predictions(network, adapter, method), config_of(network)
    adapted = isinstance(policy := predictions.policy(None), AdaptedPolicy) and policy.adapted
    cards: dict[str, str | None] = {}
    for card in CARDS:
        changed = smallest_change(config, predictions.memory, card, adapted)
        cards[str(card)] = None if changed is None else changes(config, changed)
    needs = {changed: round((memory.total + RESERVE) / 1e9, 2) for changed, memory in predictions.known.items()}
    return {"cards": cards, "needs_gb": needs}


def _cell(changed: str | None) -> str:
    """A verdict in a cell: the changed settings without their sections."""
    if changed is None:
        return "no"
    parts = [part.split(".", 1)[1].strip().removesuffix(" true") for part in changed.split("--")[1:]]
    return ", ".join(parts) or "fits"


def page(rows: list[dict[str, Any]]) -> str:
    """The verdicts as a table in Markdown, with the GB that the settings need as they are."""
    lines = ["| policy | trained | method | needs, GB | " + " | ".join(f"{card} GB" for card in CARDS) + " |"]
    lines.append("|" + "---|" * (4 + len(CARDS)))
    for row in rows:
        cells = [_cell(changed) for changed in row["cards"].values()]
        needs = f"{row['needs_gb']['']:.1f}"
        lines.append(" | ".join([f"| {row['policy']}", row["trained"], row["method"], needs, *cells]) + " |")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class Cards:
    """Verdicts of policies and methods on cards."""

    only: str = ""
    """Name of one policy, as in the table; the others keep their rows of `json`. Empty: every policy."""
    json: Path | None = None
    """Write the result to this file, after each row."""
    page: Path | None = None
    """Write the table of `json` to this page in place of its own, and predict nothing."""


def main(settings: Cards) -> None:
    known = settings.json is not None and settings.json.exists()
    kept = json.loads(settings.json.read_text())["rows"] if known and settings.json else []
    if settings.page is not None:
        before, rest = settings.page.read_text().split("| policy | trained |", 1)
        settings.page.write_text(before + page(kept) + "\n" + rest.split("\n\n", 1)[1])
        return
    with tempfile.TemporaryDirectory() as root:
        every = dict(networks(Path(root)))
        rows = {name: [row for row in kept if row["policy"] == name] for name in every}
        if settings.only not in ("", *every):
            raise SystemExit(f"--only {settings.only}: the policies are {', '.join(every)}")
        for name in [settings.only] if settings.only else every:
            network, rows[name] = every[name], []
            for adapter in (True,) * network.adapts + (False,) * (network.full is not None):
                for method in METHODS:
                    trained = "LoRA" if adapter else "every weight"
                    row = {"policy": name, "trained": trained, "method": method} | verdicts(network, adapter, method)
                    print(row, flush=True)
                    rows[name].append(row)
                    found = {"micro_batch": ROWS, "passes": PASSES, "rows": [*itertools.chain(*rows.values())]}
                    show_and_write(found, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Cards, description=__doc__))
