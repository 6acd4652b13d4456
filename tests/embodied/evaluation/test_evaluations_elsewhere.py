"""Evaluations beside each other, and one that is dealt out over the nodes of a cluster: the lines of one alone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodied.commands.evaluate import evaluate_run, subject_of
from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.evaluation.evaluate import evaluate, evaluation_folder
from embodied.evaluation.protocol import protocol_of
from embodied.execution.session import Session
from embodied.run.saved_settings import settings_of
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import config
from tests.embodied.support.ray_nodes import Machines, started

pytestmark = pytest.mark.slow  # Ray nodes of their own, and two commands at once

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(sys.executable).parent / "embodied"
run = evaluations.run  # the fixture: its policy multiplies matrices


def settings(run: Path, **sections: dict[str, Any]) -> Config:
    base = settings_of(str(run), run.parent).model_dump(mode="json")
    base["eval"] |= {"episodes": 24, "greedy": False, "num_envs": 8}
    return config(base, **sections)


@pytest.fixture(scope="module")
def alone(run: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("alone") / "e"
    evaluate_run(str(run), settings(run), None, folder.parent, into=folder)
    return (folder / "episodes.jsonl").read_text()


@pytest.mark.parametrize("mode", ["inline", "ray"])
def test_two_evaluations_at_once_have_the_lines_of_one_alone(mode: str, run: Path, alone: str, tmp_path: Path) -> None:
    own = settings(run, runtime={"mode": mode}, farm={"physics_workers": 2, "groups": 2})
    save_config(own, run / "config.yaml")
    command = [COMMAND, "eval", str(run), "--folder"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen(
            [*command, str(tmp_path / name)], cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True
        )
        for name in ("first", "second")
    ]
    for process in both:
        out, _ = process.communicate()
        assert process.returncode == 0, out
    for name in ("first", "second"):
        assert (tmp_path / name / "episodes.jsonl").read_text() == alone


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started("near", "far", patient=True) as found:
        yield found


@pytest.mark.parametrize("nodes", [["far"], ["near", "far"]], ids=["all far", "near and far"])
def test_an_evaluation_over_nodes_has_the_lines_of_one_alone(
    run: Path, alone: str, nodes: list[str], machines: Machines, tmp_path: Path
) -> None:
    runtime = {"mode": "ray", "address": machines.address}
    own = settings(run, runtime=runtime, farm={"physics_workers": 2, "groups": 2, "nodes": nodes})
    subject, protocol = subject_of(str(run), own, None, tmp_path), protocol_of(own)
    session = Session(own, machines.runtime, tuple(sorted(os.sched_getaffinity(0))))
    with evaluation_folder(subject, protocol, tmp_path / "e", resume=False) as folder:
        evaluate(subject, protocol, session, folder)
    assert (tmp_path / "e" / "episodes.jsonl").read_text() == alone
