"""The report on a run's plan: its reasons, whether it kept what it promised, and what crossed the wire."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest

from embodied.reporting.metrics import MetricsWriter
from embodied.reporting.report import plan_section, write_report
from embodied.reporting.run_record import read_run

WHY = ["Hybrid: 2.0 s per iteration, 2 groups.", "The best collocated plan would take 1.20 times as long <b>."]
PLAN: dict[str, Any] = {
    "format": 1,
    "kind": "plan",
    "workflow": "ppo",
    "mode": "hybrid",
    "phases": [],
    "prediction": {"iteration_s": 2.0, "phases_s": [2.0], "components_s": {}, "switch_s": 0.0, "lower_bound_s": 2.0},
    "why": WHY,
}


def run_folder(path: Path, *rows: dict[str, float], plan: Any = None) -> Path:
    """A run's folder with these rows of metrics and the file `plan.json`: data, or text as it is."""
    path.mkdir()
    (path / "config.yaml").write_text("env: {task: tabletop/reach}\n")
    with MetricsWriter(path) as writer:
        for number, row in enumerate(rows, start=1):
            writer.write(number, 100 * number, row)
    if plan is not None:
        (path / "plan.json").write_text(plan if isinstance(plan, str) else json.dumps(plan))
    return path


def text_of(folder: Path) -> str:
    return " ".join(unescape(re.sub(r"<[^<>]*>", " ", plan_section(read_run(folder)))).split())


def took(*seconds: float) -> list[dict[str, float]]:
    return [{"time/iteration_s": value} for value in seconds]


def test_a_run_without_a_plan_has_no_section(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", *took(1.0, 2.0))
    assert plan_section(read_run(folder)) == ""
    assert "<h2>Plan</h2>" not in write_report(folder).read_text()


def test_reasons_and_what_was_measured_beside_what_was_predicted(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", *took(9.0, 2.5, 2.4, 2.6, 2.5), plan=PLAN)
    section, text = plan_section(read_run(folder)), text_of(folder)
    assert all(sentence in unescape(section) for sentence in WHY) and "long &lt;b&gt;" in section
    assert "Predicted 2 s per iteration, measured 2.5 s (median of 5): -20%." in text
    assert section in write_report(folder).read_text()


@pytest.mark.parametrize(("shares", "busy"), [((0.4, 0.5), True), ((0.01, 0.02), False), ((), False)])
def test_a_measurement_on_a_busy_machine_says_so(shares: tuple[float, ...], busy: bool, tmp_path: Path) -> None:
    rows = [{"time/iteration_s": 10.0, "time/other_programs": share} for share in shares] or took(10.0)
    text = text_of(run_folder(tmp_path / "run", *rows, plan=PLAN))
    said = "-80%. Other programs used 45% of the cores' time meanwhile: what was measured is longer than alone."
    assert (said in text) is busy and "-80%." in text and ("Other programs" in text) is busy


@pytest.mark.parametrize("damage", ['{"mode": "hyb', "[1, 2]", "", "\x00\x01"])
def test_a_plan_that_cannot_be_read_costs_only_its_own_paragraph(damage: str, tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", *took(2.0), plan=damage)
    text = text_of(folder)
    assert "plan.json cannot be read." in text and "Predicted" not in text
    assert "cannot be read" in write_report(folder).read_text()


@pytest.mark.parametrize(
    "odd",
    [{"prediction": [1]}, {"prediction": None}, {"prediction": {}}, {"prediction": {"iteration_s": "2"}}, {"why": 3}],
)
def test_a_plan_with_odd_values_does_no_harm(odd: dict[str, Any], tmp_path: Path) -> None:
    text = text_of(run_folder(tmp_path / "run", *took(2.0), plan={**PLAN, **odd}))
    assert ("edited by hand" in text) == ("why" in odd) and ("Predicted" in text) == ("why" in odd)


def test_a_plan_by_hand_names_its_mode(tmp_path: Path) -> None:
    plan = {key: value for key, value in PLAN.items() if key not in ("why", "prediction")}
    text = text_of(run_folder(tmp_path / "run", *took(2.0), plan=plan))
    assert "hybrid, edited by hand" in text and "Predicted" not in text


def test_no_iteration_yet_is_no_measurement(tmp_path: Path) -> None:
    for name, rows in (("none", []), ("nothing", took(0.0, float("nan")))):
        text = text_of(run_folder(tmp_path / name, *rows, plan=PLAN))
        assert WHY[0] in text and "measured" not in text


def test_bytes_between_machines_are_reported_with_and_without_a_plan(tmp_path: Path) -> None:
    sent = [{"time/iteration_s": 2.0, "farm/wire_bytes_per_env_step": size} for size in (1400.0, 1600.0)]
    for name, plan in (("planned", PLAN), ("configured", None)):
        folder = run_folder(tmp_path / name, *sent, plan=plan)
        assert "Between machines: 1,500 bytes per env step" in text_of(folder)
        assert "1,500 bytes per env step" in write_report(folder).read_text()
    here = [{"time/iteration_s": 2.0, "farm/wire_bytes_per_env_step": 0.0}]
    assert "Between machines" not in text_of(run_folder(tmp_path / "here", *here, plan=PLAN))
