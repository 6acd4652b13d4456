"""What a model's directory says of generation: generation_config.json, else config.json, as transformers reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import PolicyError, shown
from policies.files import CONFIG, read_json

FILE = "generation_config.json"
NEUTRAL: Mapping[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "guidance_scale": 1.0,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "sequence_bias": None,
    "stop_strings": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "watermarking_config": None,
}
"""Settings of transformers' `generate`, beside those of sampling, that change what is said; values that do not."""


@dataclass(frozen=True)
class GenerationSettings:
    """Settings of a directory that count for what a model says."""

    path: Path
    """File that has them."""
    ends: tuple[int, ...]
    """Token ids that end a sequence."""
    left_out: Mapping[str, Any]
    """Settings that transformers' `generate` follows, and a policy does not."""

    @classmethod
    def read(cls, folder: Path) -> GenerationSettings:
        """Raises `PolicyError` where a file cannot be read, or names ends that are no token ids."""
        path = folder / FILE if (folder / FILE).is_file() else folder / CONFIG
        found = read_json(path)
        named = (found if found.get("eos_token_id") is not None else read_json(folder / CONFIG)).get("eos_token_id")
        ends = named if isinstance(named, list) else [] if named is None else [named]
        if not all(type(end) is int and end >= 0 for end in ends):
            raise PolicyError(f"eos_token_id of {path} is a token id or a list of such, got {shown(named)}")
        left_out = {
            name: found[name]
            for name, neutral in NEUTRAL.items()
            if found.get(name) not in (None, neutral) and found[name] not in ([], {})
        }
        return cls(path, tuple(ends), left_out)
