"""Damaged files in a run's folder: the page is written all the same, and says what cannot be read."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from embodied.reporting.metrics import SELECTION, MetricsWriter
from embodied.reporting.report import write_report
from embodied.reporting.run_record import ReportError, read_run
from embodied.reporting.runs_page import write_runs_page
from embodied.run.trace import TraceWriter
from tests.embodied.reporting.synthetic import CONFIG, EVALUATION, MS, iteration_spans, metrics_row
from tests.embodied.reporting.test_plan_section import PLAN
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

DRAWN = ("wall_s", "env/success_once", "env/success_recent", "env/episodes", "time/physics", "learner/approx_kl")
"""Few metrics: each is a chart."""
LARGEST_PAGE = 8 * 2**20
"""Bytes; the pages of the whole folders have 60 kB."""


def write_folder(path: Path) -> Path:
    """A run's folder with every file that a page is made from."""
    path.mkdir()
    (path / "config.yaml").write_text(CONFIG)
    (path / "plan.json").write_text(json.dumps(PLAN))
    second = {**EVALUATION, "task": "tabletop/push", "protocol": {"limits": {"tabletop/push": 50}, "trials": 4}}
    (path / "eval.json").write_text(json.dumps([EVALUATION, second]))
    for file, keys in (("metrics.jsonl", DRAWN), (SELECTION, ("eval/success_rate",))):
        with MetricsWriter(path, file=file) as writer:
            for iteration in range(1, 5):
                row = {**metrics_row(iteration, Random(3)), "eval/success_rate": 0.5}
                ends = {"eval/success_low": 0.4, "eval/success_high": 0.6} if file == SELECTION else {}
                writer.write(iteration, 4096 * iteration, {key: row[key] for key in keys} | ends)
    trace = TraceWriter(path / "trace.json")
    for index in range(2):
        trace.iteration(index, at_ns=index * 10**10)
        trace.add(iteration_spans(index * 10**10 + MS, index)[:20])
    trace.write()
    return path


def as_lines(rng: Random, original: bytes) -> bytes:
    """A record of which one line says something else."""
    lines = original.splitlines()
    at = rng.randrange(len(lines))
    lines[at] = mutation.as_json(rng, json.loads(lines[at]))
    return b"\n".join(lines) + b"\n"


def as_yaml(rng: Random, original: bytes) -> bytes:
    return mutation.as_yaml(rng, yaml.safe_load(original))


def page_of_one(path: Path) -> Path:
    return write_report(path)


def page_of_two(other: Path, path: Path) -> Path:
    out = path.parent / "page.html"
    result = write_runs_page([path, other], out)
    json.dumps(result)
    return out


def read(write: Callable[[Path], Path], path: Path) -> None:
    """Write the page, then raise what a file of the folder could not be read for."""
    page = write(path).read_text()
    assert page.rstrip().endswith("</html>") and len(page) < LARGEST_PAGE
    wrong = [text for name, text in read_run(path).missing.items() if name != "videos"]
    if wrong:
        raise ReportError(f"{path}: {wrong[0]}")


@pytest.mark.slow
@pytest.mark.parametrize("pages", ["one", "two"])
@few_or_many(10)
def test_damaged_runs(pages: str, cases: range, tmp_path: Path) -> None:
    whole = write_folder(tmp_path / "whole")
    write: Any = page_of_one if pages == "one" else partial(page_of_two, whole)
    read(write, whole)
    (whole / "report.html").unlink(missing_ok=True)
    damaged = Damaged(whole, tmp_path / "damaged", {".jsonl": as_lines, ".yaml": as_yaml})
    holds(cases, damaged, partial(read, write), (ReportError,))
