"""Short runs on answers in tokens: a small model, and problems of which a new model solves about half."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from embodied.algorithms.estimators import group_relative
from embodied.algorithms.samples import Estimate
from embodied.config.schema import Config
from embodied.trajectories.batch import Trajectories
from embodied.workflows.recipes import GRPO
from embodied_language.text.physics import text_backend
from embodied_language.text.problems import Problem, TextTask
from tests.embodied.support import answers
from tests.embodied.support.copied_out import copied_out

LIMIT, CHUNK = 12, 12
SEEN: list[Trajectories] = []
"""The parts that the workflow `NOTING` was asked about, until somebody clears it."""


def noting(batch: Trajectories, config: Config) -> Estimate:
    SEEN.append(copied_out(batch))
    return group_relative(batch, config)


NOTED = replace(GRPO, estimator=noting)
NOTING = f"{__name__}:NOTED"


def even(threshold: int, answer: str) -> float:
    """1.0 for an answer whose length, with the problem's number, is even."""
    return float((len(answer) + threshold) % 2 == 0)


def even_problem(seed: int) -> Problem:
    return Problem(f"Make {seed % 97} from 1.", partial(even, seed % 2), lambda answer: "Again: ")


def begun(answer: str) -> float:
    """1.0 for an answer that begins with a seven."""
    return float(answer.startswith("7"))


def begun_problem(seed: int) -> Problem:
    return Problem(even_problem(seed).text, begun)


def raising_problem(seed: int) -> Problem:
    return Problem(even_problem(seed).text, lambda answer: 1 / (len(answer) % 3))


BACKEND = text_backend(
    "even",
    lambda: {
        "one": TextTask(even_problem, prompt_bytes=32, answer_tokens=LIMIT),
        "begun": TextTask(begun_problem, prompt_bytes=32, answer_tokens=LIMIT),
        "raises": TextTask(raising_problem, prompt_bytes=32, answer_tokens=LIMIT),
        "turns": TextTask(even_problem, prompt_bytes=32, answer_tokens=LIMIT, turns=3, reply_tokens=8),
    },
)


def few_tokens(folder: Path, **changes: Any) -> Path:
    """The directory of a small model that knows thirteen tokens: a new one ends an answer after as many on average."""
    answers.small_model(folder, **changes)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = {token: number for token, number in vocabulary.items() if number < 13}
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["id"] < 13]
    path.write_text(json.dumps(tokenizer))
    return folder


def settings(model: Path, task: str = "one", **changes: Any) -> dict[str, Any]:
    """Of a run on `even` problems; sections in `changes` are merged."""
    data: dict[str, Any] = {
        "workflow": "grpo",
        "seed": 5,
        "iterations": 3,
        "checkpoint_every": 1,
        "env": {
            "task": f"{__name__}:BACKEND/{task}", "options": {"tokenizer": str(model)}, "max_episode_steps": LIMIT,
            "num_envs": 8,
        },
        "farm": {"groups": 2},
        "policy": {
            "kind": "language", "chunk": CHUNK, "reads": ["instruction", "state"],
            "options": {"checkpoint": str(model), "rows": 3},
        },
        "rollout": {"episode_group": 4},
        "loss": {"ratio_unit": "action"},
        "optim": {"epochs": 1, "minibatch": 0, "micro_batch": 3, "policy_lr": 1e-2},
        "eval": {"episodes": 4, "videos": 0},
        "runtime": {"mode": "inline", "deadline_s": 300},
    }  # fmt: skip
    return {**data, **{k: {**data.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()}}
