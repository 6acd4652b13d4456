"""Several runs on one page: runs that differ in the seed are one curve, and what is said of them is what they did."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import t as student

from embodied.config.files import parse_config, save_config
from embodied.reporting.run_record import ReportError, read_run
from embodied.reporting.runs_page import alike, write_runs_page
from embodied.statistics import wilson
from tests.embodied.reporting.test_report import Page

STEPS = 1000


def write_run(folder: Path, seed: int, lr: float, success: list[float], evaluated: float | None = None) -> Path:
    """A run's folder with an iteration of 1,000 env steps and 10 s for each success rate."""
    folder.mkdir(parents=True)
    save_config(
        parse_config({"seed": seed, "name": folder.name, "optim": {"policy_lr": lr}}, "test"), folder / "config.yaml"
    )
    rows = [
        {"iteration": i, "env_steps": i * STEPS, "wall_s": 10.0 * i, "env/success_recent": rate, "env/return": 2 * rate}
        for i, rate in enumerate(success, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if evaluated is not None:
        found = {"task": "t", "episodes": 100, "success_rate": evaluated, "protocol": {}}
        (folder / "eval.json").write_text(json.dumps(found))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [
        write_run(tmp_path / "low1", 1, 1e-4, [0.2, 0.5, 0.95], 0.9),
        write_run(tmp_path / "high1", 1, 3e-4, [0.1, 0.1, 0.2], 0.2),
        write_run(tmp_path / "low2", 2, 1e-4, [0.4, 0.7, 0.8, 0.9], 1.0),
    ]


def test_runs_that_differ_in_the_seed_are_one_curve(folders: list[Path], tmp_path: Path) -> None:
    groups = alike([read_run(folder) for folder in folders])
    assert [group.label for group in groups] == ["policy_lr 0.0001", "policy_lr 0.0003"]
    assert [group.seeds for group in groups] == [[1, 2], [1]]


def test_the_table_says_what_the_runs_did(folders: list[Path], tmp_path: Path) -> None:
    result = write_runs_page(folders, tmp_path / "page.html")
    first, second = result["groups"]
    half = float(student.ppf(0.975, 1)) * 0.1 / 2  # two values 0.1 apart: their standard error is 0.05
    assert first["success_rate"] == pytest.approx(0.95) and first["success_low"] == pytest.approx(0.95 - half)
    assert first["success_high"] == 1.0
    assert first["time_to_target_s"] == [30.0, 40.0] and second["time_to_target_s"] == [None]
    low, high = wilson(20, 100)  # of one seed only its episodes say how sure its success is
    assert (second["success_low"], second["success_high"]) == pytest.approx((low, high))
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("95%") and page.says("90%, 100%") and page.says("not reached") and page.says("35 s")
    assert page.says("optim.policy_lr") and not page.says("optim.value_lr")
    assert not page.sources, "the page asks for other files"


def test_seeds_that_end_alike_are_not_shown_as_certain(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{seed}", seed, 1e-4, [0.3, 1.0], 1.0) for seed in (1, 2, 3)]
    (group,) = write_runs_page(runs, tmp_path / "page.html")["groups"]
    low, _ = wilson(300, 300)
    assert group["success_rate"] == group["success_high"] == 1.0 and group["success_low"] == pytest.approx(low)
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("100% 98.7% to 100%") and not page.says("100% to 100%")
    assert page.says("Student's t over seeds, but for success never narrower than Wilson's of all their episodes")
    assert (tmp_path / "page.html").read_text().count("fill-opacity: 0.18") == 3, "the curves' bands have a width too"


def test_equal_returns_have_no_interval(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{seed}", seed, 1e-4, [0.3, 1.0]) for seed in (1, 2)]
    for run in runs:
        rows = [{"iteration": 1, "env_steps": 10, "wall_s": 1.0, "env/return": 500.0}]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        (run / "eval.json").write_text(json.dumps({"task": "t", "episodes": 100, "return": 500.0, "protocol": {}}))
    (group,) = write_runs_page(runs, tmp_path / "page.html")["groups"]
    assert group["return"] == 500.0 and group["return_low"] is None
    assert not Page((tmp_path / "page.html").read_text()).says("500 to 500")


def test_a_curve_is_the_mean_as_far_as_all_its_runs_went(folders: list[Path], tmp_path: Path) -> None:
    write_runs_page(folders, tmp_path / "page.html")
    points = Page((tmp_path / "page.html").read_text()).points[0]
    means = {head: texts for _, head, *texts in points}
    at_two = next(texts for head, texts in means.items() if float(str(head).split()[0].replace(",", "")) >= 2000)
    values = {str(text).rpartition(" ")[0]: float(str(text).rpartition(" ")[2].rstrip("%")) for text in at_two}
    assert values["policy_lr 0.0001 (low1, low2)"] == pytest.approx(60, abs=1)
    assert values["policy_lr 0.0003 (high1)"] == pytest.approx(10, abs=1)
    assert len(means) == len(points) and np.diff([point[0] for point in points]).min() >= 0  # type: ignore[call-overload]


def test_a_band_is_drawn_for_several_seeds_and_not_for_one(folders: list[Path], tmp_path: Path) -> None:
    def bands(members: list[Path]) -> int:
        write_runs_page(members, tmp_path / "page.html")
        return (tmp_path / "page.html").read_text().count("fill-opacity: 0.18")

    assert bands(folders[1:2]) == 0
    assert bands([folders[0], folders[2]]) == 3, "one for each of the charts"
    assert bands(folders) == 3, "the other settings have one seed"


def test_one_setting_is_named_after_its_workflow_and_has_no_differences(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{seed}", seed, 1e-4, [0.1, 0.2]) for seed in (1, 2)]
    write_runs_page(runs, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("ppo") and not page.says("What differed")


def test_an_evaluation_by_another_protocol_is_not_pooled(folders: list[Path], tmp_path: Path) -> None:
    found = json.loads((folders[2] / "eval.json").read_text())
    protocol = {"limits": {"t": 30}, "trials": 100, "instruction": "wave", "seed": 2}
    (folders[2] / "eval.json").write_text(json.dumps({**found, "protocol": protocol}))
    first, _ = write_runs_page(folders, tmp_path / "page.html")["groups"]
    assert first["success_rates"] == [0.9]
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("1 evaluations by another protocol") and page.says("instruction wave")


def test_a_run_without_an_iteration_is_named(folders: list[Path], tmp_path: Path) -> None:
    (folders[1] / "metrics.jsonl").unlink()
    with pytest.raises(ReportError, match="high1: metrics.jsonl has no rows yet"):
        write_runs_page(folders, tmp_path / "page.html")


def test_equal_curves_are_told_apart_and_named(folders: list[Path], tmp_path: Path) -> None:
    twin = write_run(tmp_path / "twin", 1, 5e-4, [0.1, 0.1, 0.2])  # the success of high1, with another setting
    write_runs_page([*folders, twin], tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert html.count("high1 and twin are equal.") == 3, "in each of the charts"
    assert html.count("stroke-dasharray: 6,4") == 3
    assert re.findall(r"<text[^>]*>(low1|low2|policy_lr 0.0001|high1|twin)</text>", html).count("twin") == 3, (
        "at the ends"
    )


def test_each_run_is_named_where_its_curve_ends_and_under_the_pointer(folders: list[Path], tmp_path: Path) -> None:
    write_runs_page(folders, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    ends = re.findall(r"<text[^>]*>(low1|low2|policy_lr 0.0001|high1)</text>", html[: html.index("</figure>")])
    assert sorted(ends) == ["high1", "low1", "low2", "policy_lr 0.0001"]
    by_head = {head: texts for _, head, *texts in Page(html).points[0]}
    assert by_head["2,000 env steps, iteration 2"][:2] == ["low1 50%", "low2 70%"], (
        "the values of metrics.jsonl themselves"
    )


def test_many_equal_curves_are_counted(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"run{seed}", 0, seed * 1e-4, [0.5, 1.0]) for seed in range(1, 8)]
    write_runs_page(runs, tmp_path / "page.html")
    assert Page((tmp_path / "page.html").read_text()).says("run1, run2, run3, run4 and 3 more are equal.")


def test_a_chart_without_values_says_why(folders: list[Path], tmp_path: Path) -> None:
    few = folders[1] / "metrics.jsonl"
    rows = [json.loads(line) for line in few.read_text().splitlines()]
    few.write_text("".join(json.dumps({**row, "env/success_recent": None, "env/episodes": 20}) + "\n" for row in rows))
    write_runs_page(folders, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("high1: the mean is over 100 training episodes, and 60 have ended.")
    for folder in folders:  # none has any return
        file = folder / "metrics.jsonl"
        file.write_text(file.read_text().replace("env/return", "env/other"))
    write_runs_page(folders, tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert len(page.points) == 2 and page.says("low1: no values were recorded.")


def test_what_differed_comes_before_the_curves(folders: list[Path], tmp_path: Path) -> None:
    write_runs_page(folders, tmp_path / "page.html")
    html = (tmp_path / "page.html").read_text()
    assert html.index("What differed") < html.index("Results") < html.index("Learning")
