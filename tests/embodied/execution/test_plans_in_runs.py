"""Plans in runs and in comparisons: a planned run computes the same, and a plan that cannot run is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedulers
from embodied.planning import profiler as profiling
from embodied.reporting.metrics import read
from schedulers import Plan, Profile
from tests.embodied.support import planned
from tests.embodied.support.planned import CORES, ENVS, Commands, assert_same_parameters, train

few_iterations, profile, files, embodied = planned.few_iterations, planned.profile, planned.files, planned.embodied


def hand_written(**changes: Any) -> dict[str, Any]:
    """A hybrid plan as somebody would write it; `changes` are made to it."""
    first, last = 0, len(CORES) - 1
    return {
        "workflow": "ppo",
        "mode": "hybrid",
        "groups": 2,
        "phases": [
            {
                "micro_batch": ENVS,
                "placements": [
                    {"components": ["physics"], "devices": [f"here:cores:{first}"]},
                    {"components": ["policy"], "devices": [f"here:cores:{last}"]},
                ],
            },
            {
                "micro_batch": ENVS,
                "placements": [{"components": ["learner"], "devices": [f"here:cores:{first}-{last}"]}],
            },
        ],
    } | changes


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    clock = ("time/", "farm/")
    return {k: v for k, v in row.items() if not k.startswith(clock) and k not in ("wall_s", "learner/update_s")}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs without a plan, by their number of groups."""
    folder = tmp_path_factory.mktemp("configured")
    return {groups: train(folder / str(groups), farm={"groups": groups}) for groups in (1, 2, 4)}


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    if len(CORES) < 2:
        # Nothing to try on a machine of one core: a plan for two would be refused, which another test sees.
        pytest.skip("plans that split cores need two of them")
    yield


def test_a_run_keeps_the_plan_it_was_given_and_computes_the_same(
    embodied: Commands, files: Path, configured: dict[int, Path]
) -> None:
    options = ["--plan.mode", "auto", "--plan.profile", "profile.json"]
    output = embodied.done("train", "small.yaml", *options, "--name", "it", "--json", "r.json")
    plan = schedulers.load(Plan, "runs/it/plan.json")
    assert Path("runs/it/profile.json").read_text() == Path("profile.json").read_text(), "what it was planned with"
    result = json.loads(Path("r.json").read_text())
    assert plan.prediction is not None and all(sentence in output for sentence in plan.why)
    assert (result["mode"], result["predicted_iteration_s"]) == (plan.mode, plan.prediction.iteration_s)
    assert_same_parameters(Path("runs/it"), configured[plan.groups[0]])
    rows = [timeless(row) for row in read(configured[plan.groups[0]])]
    for row, other in zip(map(timeless, read(Path("runs/it"))), rows, strict=True):
        assert row == {**other, "time/switch_s": 0.0} or row == other
    page = Path("runs/it/report.html").read_text()
    assert "<h2>Plan</h2>" in page and "Predicted" in page


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_every_mode_computes_the_same(
    mode: str, two_cores: None, files: Path, configured: dict[int, Path], profile: Profile
) -> None:
    run = train(files / mode, plan={"mode": mode, "profile": "profile.json"})
    plan = schedulers.load(Plan, run / "plan.json")
    assert plan.mode == mode
    assert_same_parameters(run, configured[plan.groups[0]])


@pytest.mark.slow
def test_a_run_without_a_profile_measures_and_keeps_one_and_goes_on_with_it(files: Path) -> None:
    run = train(files / "run", plan={"mode": "auto"}, iterations=1)
    before = (run / "profile.json").stat().st_mtime_ns
    schedulers.load(Profile, run / "profile.json")
    plan = (run / "plan.json").read_text()
    train(run, plan={"mode": "auto"}, iterations=2)
    assert (run / "profile.json").stat().st_mtime_ns == before, "measured again"
    assert (run / "plan.json").read_text() == plan
    assert [row["iteration"] for row in read(run)] == [1, 2]


@pytest.mark.parametrize("unload", [False, True])
def test_a_plan_that_was_written_by_hand_runs(
    unload: bool, two_cores: None, files: Path, configured: dict[int, Path]
) -> None:
    Path("mine.json").write_text(json.dumps(hand_written(unload=unload)))
    run = train(files / "run", plan={"mode": "mine.json"})
    kept = schedulers.load(Plan, run / "plan.json")
    assert (kept.mode, kept.groups, kept.unload, kept.prediction) == ("hybrid", (2,), unload, None)
    assert_same_parameters(run, configured[2])


def without(component: str) -> list[Any]:
    return [
        {**phase, "placements": [p for p in phase["placements"] if component not in p["components"]]}
        for phase in hand_written()["phases"]
    ]


def placed_at(device: str) -> list[Any]:
    phases = hand_written()["phases"]
    phases[1]["placements"][0]["devices"] = [device]
    return phases


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"phases": placed_at("here:cores:900")}, "takes here:cores:900, but node 'here' has here:cores:0"),
        ({"phases": placed_at("hear:cores:0")}, "node 'hear', which the cluster does not have; nearest: here"),
        ({"phases": placed_at("here:accelerators:0")}, "has no accelerators"),
        ({"phases": without("learner")[:1]}, "leaves out learner"),
        ({"phases": without("policy")}, "leaves out policy"),
        ({"groups": 3}, "3 groups do not divide the 4 items of the loop; nearest: 1, 2, 4"),
        ({"mode": "hybird"}, "nearest: hybrid"),
        ({"mode": "collocated"}, "its phases are hybrid"),
        ({"workflow": "grpo"}, "for workflow 'grpo', not for 'ppo'"),
        ({"grups": 2}, "unknown key 'grups'; nearest: groups"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(
    changes: dict[str, Any], named: str, two_cores: None, embodied: Commands, files: Path
) -> None:
    Path("mine.json").write_text(json.dumps(hand_written(**changes)))
    output = embodied.refused("train", "small.yaml", "--plan.mode", "mine.json", "--name", "it")
    assert named in output
    assert not Path("runs/it").exists(), "a run that never began must leave no folder"


def test_a_plan_that_does_not_fit_in_memory_is_refused(
    two_cores: None, embodied: Commands, files: Path, profile: Profile
) -> None:
    large = {name: replace(c, resident_bytes=1e15) for name, c in profile.components.items()}
    schedulers.save(replace(profile, components=large), "large.json")
    Path("mine.json").write_text(json.dumps(hand_written()))
    options = ["--plan.mode", "mine.json", "--plan.profile", "large.json", "--name", "it"]
    output = embodied.refused("train", "small.yaml", *options)
    assert "GB on node here" in output and "unload" in output
    output = embodied.refused("train", "small.yaml", "--plan.mode", "auto", "--plan.profile", "large.json")
    assert "fits in the cluster's memory" in output


def test_a_plan_file_that_is_not_there_is_refused(embodied: Commands, files: Path) -> None:
    output = embodied.refused("train", "small.yaml", "--plan.mode", "gone.json")
    assert "there is no plan file 'gone.json'" in output
    output = embodied.refused("train", "small.yaml", "--plan.mode", "profile.json")
    assert "a plan is expected here, not a profile" in output


@pytest.mark.slow
def test_replanning_and_running_ahead_exclude_each_other(embodied: Commands, files: Path) -> None:
    output = embodied.refused("train", "small.yaml", "--plan.replan", "--plan.ahead", "--plan.mode", "auto")
    assert "plan.replan" in output and "plan.ahead" in output
    sides = (["physics", "policy"], ["learner"])
    places = [{"components": names, "devices": [f"here:cores:{i}"]} for i, names in enumerate(sides)]
    phases = [{"micro_batch": ENVS, "placements": places}]
    plan = {"workflow": "ppo", "mode": "disaggregated", "ahead": 1, "phases": phases}
    Path("ahead.json").write_text(json.dumps(plan))
    output = embodied.refused("train", "small.yaml", "--plan.replan", "--plan.mode", "ahead.json")
    assert "plan.replan" in output and "ahead.json, which runs ahead" in output


# --- embodied compare


@pytest.mark.slow
def test_modes_are_compared_with_the_plan_that_auto_would_run(embodied: Commands, files: Path) -> None:
    output = embodied.done(
        "compare", "small.yaml", "--profile", "profile.json", "--repeats", "1", "--name", "it", "--json", "r.json"
    )
    result = json.loads(Path("r.json").read_text())
    (chosen,) = [row for row in result["modes"] if row["chosen"]]
    assert chosen["mode"] == result["chosen"] and result["regret"] >= 0
    assert result["workload"] == "it", "what --name calls it"
    assert result["iterations"] == profiling.LEAST - 1, "the first iteration warms up and does not count"
    for row in result["modes"]:
        assert row["measured_low_s"] <= row["measured_s"] <= row["measured_high_s"]
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["mode"] in output and "|" not in row["placement"]
    page = Path("compare/it/compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "<h2>Why</h2>" in page
    (policy,) = re.findall(r"""Content-Security-Policy"\s+content="([^"]*)""", page)
    assert "img-src data:" in policy, "a browser would show none of the pictures"
    assert page.count("<tr>") == 1 + len(result["modes"]) + 1 + 4 * len(result["modes"]), "modes, and their phases"
    for row in result["modes"]:
        parts = {name: phase["measured"] for name, phase in row["phases"].items()}
        assert min(parts.values()) >= 0 and parts["waiting_s"] < parts["rollout_s"] > 0 < parts["update_s"]
        assert row["phases"]["update_s"]["predicted"] > 0
    assert f"{result['chosen']} (*) was predicted best" in output
    for name in ("compare.png", "timelines.png"):
        assert Path("compare/it", name).read_bytes().startswith(b"\x89PNG")


def test_a_comparison_of_nothing_is_refused(embodied: Commands, files: Path) -> None:
    assert "--repeats is at least 1" in embodied.refused("compare", "small.yaml", "--repeats", "0")
