"""Text boxes of pages, measured in Chromium at 390 and 1,400 px: none covers another or leaves its page."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import schedulers
from embodied.commands.compare import Ran, _row, write_comparison
from embodied.commands.runs import listed, run_folders
from embodied.commands.watch import list_page
from embodied.reporting.report import write_page, write_report
from embodied.reporting.results_page import write_results_page
from embodied.reporting.runs_page import write_runs_page
from embodied.run.trace import Span
from schedulers import Node
from tests.embodied.reporting.browser import Measured, measured
from tests.embodied.reporting.synthetic import EVALUATION, write_run
from tests.embodied.reporting.test_runs_page import write_run as write_small_run
from tests.schedulers.instances import ppo, ppo_profile

WIDTHS = (390, 1400)
SITE = Path(__file__).parents[3] / "build" / "site"
LONG = "/home/someone/a_folder_with_a_rather_long_name/checkpoints_of_last_week/libero_spatial_no_noops/000120"
AXES = ("camera", "lighting", "background", "table texture", "distractors", "instruction")


def perturbed() -> dict[str, Any]:
    """Result of an evaluation in which six axes end alike, at 100%."""
    success = {"success_rate": 1.0, "success_low": 0.96, "success_high": 1.0}
    paired = {"difference": 0.0, "difference_low": -0.04, "difference_high": 0.04, "p_value": 1.0}
    rows = [
        {"axis": axis, "level": level, "from_step": 0, "episodes": 100, **success, **paired}
        for axis in AXES
        for level in (1, 2, 3)
    ]
    starts = {"trained": 0, "evaluated": 100, "known": True}
    notes = ["0 of 100 seeds were trained on", f"the statistics are those of {LONG}"]
    return {**EVALUATION, **success, "conditions": rows, "trained_on": starts, "notes": notes}


def run_page(folder: Path) -> Path:
    """Report of a run by a plan, with an evaluation under perturbations, and with long paths."""
    run = write_run(folder)
    (run / "eval.json").write_text(json.dumps(perturbed()))
    (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"note: {LONG}\n")
    planned = schedulers.plan(ppo(), ppo_profile(), schedulers.Cluster((Node("here", 2),)))
    (run / "plan.json").write_text(schedulers.text_of(planned))
    rows = [json.loads(row) | {"time/iteration_s": 9.5} for row in (run / "metrics.jsonl").read_text().splitlines()]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return write_report(run)


def compared_page(folder: Path) -> Path:
    """The page of `embodied compare`, of all modes."""
    folder.mkdir()
    found = schedulers.alternatives(ppo(), ppo_profile(), schedulers.Cluster((Node("here", 2),)))
    spans = [Span("physics 0", "step", 0, 10**9), Span("policy", "act", 10**9, 2 * 10**9)]
    summary = SimpleNamespace(env_steps=1000)
    iterations: Any = (SimpleNamespace(wall_s=2.0, spans=spans, begin_ns=0, summary=summary),) * 2
    ran = [Ran(plan, iterations, (0.45,)) for plan in found.values()]
    simulated: dict[str, schedulers.Simulation] = {
        one.plan.mode: schedulers.simulate(one.plan, ppo(), ppo_profile()) for one in ran
    }
    rows = [_row("a_workload_with_a_long_name", one, one is ran[0], simulated[one.plan.mode]) for one in ran]
    result = {
        "workload": "a_workload_with_a_long_name",
        "modes": rows,
        "hardware": "AMD EPYC, 2 cores",
        "date": "today",
    }
    return write_comparison(folder, result, ran, simulated)


def runs_pages(folder: Path) -> list[Path]:
    """Runs that end alike, at 100%: three seeds of one setting, and of several settings with long names."""
    each = [0.2, 0.6, 0.9, 1.0, 1.0]
    runs = [write_small_run(folder / f"pushcube-seed{seed}", seed, 1e-4, each, 1.0) for seed in (1, 2, 3)]
    write_runs_page(runs, folder / "seeds.html")
    for lr in (2e-4, 3e-4, 4e-4):
        names = [f"libero_spatial_openvla_oft_small_policy_lr{lr}-seed{seed}" for seed in (1, 2, 3)]
        runs += [write_small_run(folder / name, seed, lr, each, 1.0) for seed, name in enumerate(names)]
    write_runs_page(runs, folder / "settings.html")
    write_page(
        folder / "list.html", "Runs", list_page(folder, [(f.name, listed(f, folder)) for f in run_folders(folder)])
    )
    unfinished = [("a_run_that_has_only_just_begun", "runs", "flow on tabletop/reach", "stopped at iteration 3 of 40")]
    write_results_page(folder / "results.html", [folder, folder.parent / "absent"], 3, unfinished)
    return [folder / name for name in ("seeds.html", "settings.html", "list.html", "results.html")]


def faults_of(found: list[Measured]) -> dict[tuple[str, int], tuple[str, ...]]:
    return {(one.page, one.width): one.faults for one in found if one.faults}


def test_no_text_of_a_page_covers_another_or_leaves_it(tmp_path: Path) -> None:
    runs = tmp_path / LONG.strip("/")
    pages = [
        run_page(tmp_path / "a_run_with_a_rather_long_name"),
        compared_page(tmp_path / "compare"),
        *runs_pages(runs),
    ]
    found = measured(pages, WIDTHS, tmp_path)
    assert [one.width for one in found] == [*WIDTHS] * len(pages) and all(one.texts > 30 for one in found)
    assert faults_of(found) == {}


def test_what_covers_or_leaves_is_found(tmp_path: Path) -> None:
    """The measure itself: without it, a browser that measures nothing would be content."""
    page = tmp_path / "page.html"
    page.write_text(
        '<body style="margin:0"><div style="height:20px">below</div><div style="position:absolute;top:3px">above</div>'
        '<div style="white-space:nowrap;margin-top:40px">' + "wide " * 40
        + '</div><div style="overflow:auto;white-space:nowrap">'
        + "scrolled " * 100 + '</div><svg viewBox="0 0 100 50" width="100" style="overflow:visible;margin-top:40px">'
        '<text x="10" y="-8">high</text></svg><details><summary>shut</summary>' + "unseen " * 3 + "</details>"
    )  # fmt: skip
    narrow, wide = (one.faults for one in measured([page], (390, 4000), tmp_path))
    both = {'"below" and "above" cover each other', '"high" leaves its drawing'}
    assert set(wide) == both
    assert {fault for fault in narrow if "pixels" not in fault} == {
        *both,
        '"' + ("wide " * 8).strip() + '" leaves the page',
    }
    assert any(fault.startswith("the page is ") for fault in narrow)


@pytest.mark.slow
def test_no_text_of_the_site_covers_another_or_leaves_it(tmp_path: Path) -> None:
    if not SITE.is_dir():
        pytest.skip("`make site` builds the site whose pages are measured")
    names = ("index.html", "docs/start.html", "docs/settings.html")
    found = measured([SITE / name for name in names], WIDTHS, tmp_path, ".md-content, .md-header")
    assert all(one.texts > 100 for one in found) and faults_of(found) == {}
