"""Directories of tiny language models as transformers saves them, with the tokenizer of assets/countdown_lm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

import policies
from policies import PolicySpec
from policies.torchvision_operators import import_torchvision

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 192, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
KNOWN = 172
"""Token ids that the tokenizer knows; the embedding has rows to spare."""


def transformers() -> Any:
    """The library, which reads torchvision's operators as it is imported."""
    import_torchvision()
    import transformers as library

    return library


def written(folder: Path, family: str, **config: Any) -> Path:
    """A directory of a model of the family, whose next tokens are far from equally likely."""
    library = transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(family, **{**SIZES, **config}))
    with torch.no_grad():
        made.get_output_embeddings().weight.mul_(8)
    made.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    return folder


def edited(folder: Path, file: str = "config.json", **entries: Any) -> Path:
    """The directory, with these entries in a JSON file of it."""
    path = folder / file
    found = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(found | entries))
    return folder


def policy_of(folder: Path, chunk: int = 12, **options: Any) -> Any:
    spec = PolicySpec(action_dim=1, chunk=chunk, discrete_actions=KNOWN)
    return policies.build("language", spec, 0, checkpoint=str(folder), **options)


def own_log_probs(folder: Path, asked: list[int], said: list[int], **options: Any) -> torch.Tensor:
    """float32 [T]: log-probs of the T tokens said after those asked, among the tokenizer's, by transformers alone."""
    model = transformers().AutoModelForCausalLM.from_pretrained(folder, **options).eval()
    with torch.no_grad():
        logits = model(torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1, :KNOWN].float()
    return logits.log_softmax(-1).gather(-1, torch.tensor(said)[:, None])[:, 0]
