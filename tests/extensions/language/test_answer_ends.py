"""Tokens that end an answer: the tokenizer's, and those that the model's files name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from embodied_language.text.tokenizer import AnswerTokenizer, answer_tokenizer
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"
OTHER = 5


def model(folder: Path, **ends: Any) -> str:
    """The model's tokenizer, with these `eos_token_id`s in its files."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, folder / name)
    for name, named in ends.items():
        (folder / f"{name}.json").write_text(json.dumps({"eos_token_id": named}))
    return str(folder)


@pytest.mark.parametrize(
    ("files", "ends"),
    [
        ({}, {2}),
        ({"config": OTHER}, {2, OTHER}),
        ({"config": [OTHER, 6]}, {2, OTHER, 6}),
        ({"generation_config": [2, OTHER], "config": 6}, {2, OTHER}),
        ({"generation_config": None, "config": [OTHER]}, {2, OTHER}),
    ],
    ids=str,
)
def test_ends_are_the_tokenizer_s_and_those_of_the_first_file_that_names_some(files: Any, ends: Any, tmp_path: Path):
    tokenizer = AnswerTokenizer(model(tmp_path / "model", **files))
    assert tokenizer.end == 2 and tokenizer.ends == ends


def test_an_answer_ends_at_any_of_them(tmp_path: Path):
    folder = model(tmp_path / "model", generation_config=[2, OTHER])
    text = answer_tokenizer(folder).ids("11")
    physics = make_physics(TaskSpec("text/countdown_3", options={"tokenizer": folder}))
    for end in (2, OTHER):
        physics.reset(EpisodeSpec(3))  # make 11 from 5, 17, 11
        result = physics.step(np.array([*text, end, *text], np.float32)[:, None])
        assert result.steps == len(text) + 1 and result.terminated[-1] and result.reward[-1] == 1.0


def test_an_end_that_is_no_token_id_is_refused(tmp_path: Path):
    with pytest.raises(FarmError, match="is a token id or a list of such, got '</s>'"):
        AnswerTokenizer(model(tmp_path / "model", config="</s>"))
