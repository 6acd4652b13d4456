"""Damaged folders of evaluations: read as they are, or refused by the file's name and what to do."""

from __future__ import annotations

from pathlib import Path
from random import Random

import numpy as np
import pytest

from embodied.config.files import load_config
from embodied.errors import UserError
from embodied.evaluation.folder import Identity, open_folder, read_folder
from embodied.evaluation.protocol import protocol_of
from embodied.rollout.evaluator import EpisodeResult
from tests.embodied.reporting.test_fuzzed_runs import as_lines
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

TRIALS = 3


def write_folder(path: Path) -> Path:
    config = load_config("reach")
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"episodes": TRIALS})})
    protocol = protocol_of(config)
    with open_folder(path, Identity(protocol, {"kind": "mlp", "chunk": 1}), config, resume=False) as folder:
        for trial, spec in enumerate(protocol.episodes(config.env.task)):
            actions = np.random.default_rng(trial).normal(size=(2, 3)).astype(np.float32)
            folder.add(EpisodeResult(config.env.task, trial, spec, trial > 0, trial > 0, 0.5, 2, 50, actions))
    return path


def read(path: Path) -> None:
    folder = read_folder(path)
    for outcome in folder.in_order():
        folder.actions(outcome)
    folder.left(folder.identity.protocol.tasks[0])


@few_or_many(50, 10_000)
def test_damaged_evaluations(cases: range, tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "whole")
    read(whole)
    holds(cases, Damaged(whole, tmp_path / "damaged", {".jsonl": as_lines}), read, (UserError,))


@pytest.mark.parametrize(("task", "trial"), [("tabletop/push", 0), ("tabletop/reach", TRIALS), ("tabletop/reach", -1)])
def test_an_episode_that_the_protocol_does_not_have_is_refused(task: str, trial: int, tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "whole")
    lines = (whole / "episodes.jsonl").read_text()
    (whole / "episodes.jsonl").write_text(lines.replace('"tabletop/reach", "trial": 0', f'"{task}", "trial": {trial}'))
    with pytest.raises(UserError, match="line 1 of .*episodes.jsonl is an episode that the protocol does not have"):
        read_folder(whole)


def test_actions_that_claim_more_than_the_file_holds_are_refused(tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "whole")
    (file,) = whole.rglob("0.npy")
    file.write_bytes(file.read_bytes().replace(b"(2, 3), ", b"(2, 3000000000000), ".ljust(8)))
    with pytest.raises(UserError, match=r"0\.npy cannot be read .*: delete the episode's line"):
        read(whole)


def test_the_damage_of_a_case_is_its_seeds(tmp_path: Path) -> None:
    damaged = Damaged(write_folder(tmp_path / "whole"), tmp_path / "damaged", {".jsonl": as_lines})
    first = {path.name: path.read_bytes() for path in damaged(Random(5)).iterdir() if path.is_file()}
    damaged(Random(6))
    assert first == {path.name: path.read_bytes() for path in damaged(Random(5)).iterdir() if path.is_file()}
