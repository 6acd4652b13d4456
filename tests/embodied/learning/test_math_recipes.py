"""The recipes for mathematics fit together, with a small model of a long context in the published one's place."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from embodied.config.files import load_config, with_settings
from embodied.training.dry_run import dry_run

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"
PROBLEMS = """
from embodied_language.text.problem_files import ProblemFile, problem_backend

BACKEND = problem_backend(math=ProblemFile({path!r}, answer="solution", answer_tokens=27648))
"""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


@pytest.mark.parametrize(("name", "answers", "group"), [("math_1_5b_grpo", 8192, 16), ("math_7b_grpo", 16384, 32)])
def test_shapes_and_memory_of_the_recipe(
    name: str, answers: int, group: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, problems = tmp_path / "model", tmp_path / "boba.jsonl"
    shutil.copytree(MODEL, model)
    config = json.loads((model / "config.json").read_text()) | {"max_position_embeddings": 32768}
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text()) | {"chat_template": TEMPLATE}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    problems.write_text(
        "".join(json.dumps({"prompt": f"1 + {i} = ?", "solution": str(1 + i)}) + "\n" for i in range(9))
    )
    (tmp_path / "problems.py").write_text(PROBLEMS.format(path=str(problems)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    settings = {"env.options.tokenizer": str(model), "policy.options.checkpoint": str(model), "policy.device": "cpu"}
    found = dry_run(with_settings(load_config(name), settings, "test"))
    assert found["policy"]["action_chunk"] == "[B, 27648, 1]"
    iteration = found["iteration"]
    assert iteration["samples_at_most"] == answers and iteration["optimiser_steps"] == 4
    assert answers % group == 0 and iteration["micro_batch"] == 1
    # Answers are kept dense: so many bytes a token, whether it is said or not.
    assert 16 <= found["bytes"]["trajectories"] / (answers * 27648) <= 64
