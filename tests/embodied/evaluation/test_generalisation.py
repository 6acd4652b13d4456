"""Evaluations under perturbations and with events, training with randomisation, and what results and pages say."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from embodied.commands.report import report_runs
from embodied.config.schema import Config, Event, event_of, levels_of
from embodied.errors import UserError
from embodied.evaluation.conditions import by_condition, differing_pairs, unperturbed
from embodied.evaluation.folder import EPISODES
from embodied.evaluation.protocol import as_data, from_data, protocol_of
from embodied.reporting.conditions import read_conditions
from embodied.rollout.executed_chunks import Delayed
from embodied.workflows.run_spec import RunSpec
from sim_farm.contract import FarmError
from sim_farm.episodes import Episodes
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import RANDOM, assert_same_episodes, config, evaluated, refusal, trained
from tests.variants import often

SEEING: dict[str, Any] = RANDOM | {
    "env": {"task": "tabletop/reach_red", "num_envs": 4, "cameras": 1, "image_size": 32, "max_episode_steps": 5},
    "policy": {"kind": "scripted", "reads": ["state", "images", "instruction"]},
    "eval": {"episodes": 4, "videos": 0, "axes": ["start:2,5,objects:2,5", "noise:2,5"]},
}


AXES: tuple[str, ...] = tuple(SEEING["eval"]["axes"])


# --- the protocol


def test_the_protocol_repeats_every_trial_on_every_axis_and_level() -> None:
    protocol = protocol_of(config(SEEING, eval={"protocol": "generalisation", "axes": []}))
    table = protocol.perturbations["tabletop/reach_red"]
    axes = ("camera", "start", "objects", "noise", "brightness", "words")
    assert [(one.axis, one.level) for one in table] == [(axis, level) for axis in axes for level in range(1, 6)]
    specs = protocol.episodes("tabletop/reach_red")
    assert len(specs) == protocol.total == 4 * 31
    for trial, spec in enumerate(specs):
        assert replace(spec, perturbation=None) == specs[trial % 4]
        assert spec.perturbation == (None if trial < 4 else trial // 4 - 1)
    assert "camera 1 to 5, start 1 to 5" in protocol.line()


def test_default_axes_are_those_that_the_policy_notices() -> None:
    protocol = protocol_of(config(eval={"protocol": "generalisation"}))
    table = protocol.perturbations["tabletop/reach"]
    assert list(dict.fromkeys(one.axis for one in table)) == ["start", "objects"]
    assert protocol.trials == 50


def test_perturbations_are_in_the_hash_and_survive_json() -> None:
    perturbed = protocol_of(config(SEEING, eval={"axes": [*AXES, "objects:3@2", "words:go to the blue ball@4"]}))
    plain = protocol_of(config(SEEING, eval={"axes": []}))
    assert from_data(json.loads(json.dumps(as_data(perturbed)))) == perturbed
    assert perturbed.sha256 != plain.sha256 and "perturbations" not in as_data(plain)
    other = protocol_of(config(SEEING, eval={"axes": [*AXES, "objects:4@2", "words:go to the blue ball@4"]}))
    assert other.sha256 != perturbed.sha256


def test_the_spelling_of_levels_is_not_in_the_hash() -> None:
    """The hash that this protocol had when levels were a setting of their own."""
    written = (["start,objects", "noise"], ["start:1-5", "objects:1,2,3-5,noise"], "start:1-5,objects:1-5,noise:1-5")
    hashes = {protocol_of(config(SEEING, eval={"axes": axes})).sha256 for axes in written}
    assert hashes == {"df0103b5d79866084c5a6757b2b69f504fb80db115b0cffebdf7fff624c0a95b"}
    assert list(levels_of(["camera:2", "noise, start:1-2,4"]).items()) == [
        ("camera", (2,)), ("noise", (1, 2, 3, 4, 5)), ("start", (1, 2, 4))
    ]  # fmt: skip
    some = protocol_of(config(SEEING, eval={"axes": ["start:2", "noise:1,3"]})).perturbations["tabletop/reach_red"]
    assert [(one.axis, one.level) for one in some] == [("start", 2), ("noise", 1), ("noise", 3)]


@pytest.mark.parametrize("text", ["objects@3", "objects:high@3", "objects:3@soon", "3@4", "camera:1,objects:3@4"])
def test_what_is_no_event_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="objects"):
        event_of(text + " objects" * ("objects" not in text))
    with pytest.raises(UserError, match="event|no list of ranges"):
        config(SEEING, eval={"axes": [text]})


def test_axes_and_events_stand_in_one_list() -> None:
    found = config(SEEING, eval={"axes": ["start:2,noise:1", "objects:3@2", "words:go left, then right@4"]}).eval
    assert found.perturbed == {"start": (2,), "noise": (1,)}
    assert found.events == (Event("objects", 3, 2), Event("words", 0, 4, "go left, then right"))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"axes": ["camra"]}, "camra.*did you mean camera"),
        ({"axes": ["start:1-9"]}, "levels 1 to 5, got 6"),
        ({"axes": ["lighting:3@2"]}, "no axis .*lighting"),
        ({"axes": ["start:"]}, "no list of ranges"),
        ({"axes": ["words"], "instruction": "go"}, "takes the place of every instruction"),
    ],
)
def test_mistakes_are_one_message_before_anything_runs(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises((UserError, FarmError), match=said):
        evaluated(tmp_path / "e", config(SEEING, eval=settings))
    assert not (tmp_path / "e").exists()


# --- the episodes


@pytest.fixture(scope="module")
def perturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("perturbed") / "e"
    evaluated(folder, config(SEEING, eval={"videos": 1, "axes": [*AXES, "start:5@2"]}))
    return folder


def test_each_episode_s_line_says_what_was_otherwise(perturbed: Path) -> None:
    lines = [json.loads(line) for line in (perturbed / EPISODES).read_text().splitlines()]
    assert len(lines) == 4 * 8
    plain = {line["trial"]: line for line in lines if "axis" not in line}
    assert sorted(plain) == [0, 1, 2, 3]
    protocol = from_data(json.loads((perturbed / "protocol.json").read_text())["protocol"])
    for line in lines:
        assert line["seed"] == plain[line["trial"] % 4]["seed"]
        other = protocol.condition("tabletop/reach_red", line["trial"])
        assert not isinstance(other, Delayed)
        found = (line.get("axis"), line.get("level"), line.get("from_step"), line.get("perturbation_sha256"))
        assert found == ((None,) * 4 if other is None else (other.axis, other.level, other.from_step, other.digest))


def test_the_result_pairs_each_condition_with_the_unperturbed_episodes(perturbed: Path) -> None:
    result = json.loads((perturbed / "eval.json").read_text())
    folder = evaluations.read_folder(perturbed)
    protocol, outcomes = folder.identity.protocol, folder.in_order()
    assert result["episodes"] == 4 == len(unperturbed(protocol, outcomes))
    rows = {(row["axis"], row["level"], row["from_step"]): row for row in result["conditions"]}
    assert list(rows) == list(by_condition(protocol, outcomes))
    solved = sum(bool(o.success) for o in unperturbed(protocol, outcomes))
    for key, members in by_condition(protocol, outcomes).items():
        mine = sum(bool(o.success) for o in members)
        assert rows[key]["success_rate"] == mine / 4 and rows[key]["difference"] == pytest.approx((mine - solved) / 4)
    rates = {row["success_rate"] for row in result["conditions"]}
    assert len(rates) > 1, "nothing came out otherwise"
    pairs = differing_pairs(protocol, outcomes, 4)
    assert pairs and all(one.success != other.success and one.trial == other.trial % 4 for one, other in pairs)
    assert (perturbed / "videos" / "perturbed.mp4").stat().st_size > 1000


def test_table_and_picture_show_every_condition(perturbed: Path) -> None:
    text = (perturbed / "eval.md").read_text()
    assert all(name in text for name in ("start 2", "objects 5", "noise 2", "start 5 from step 2", "McNemar"))
    drawn = ElementTree.parse(perturbed / "eval.svg").getroot()  # noqa: S314  our own file
    texts = {element.text for element in drawn.iter() if element.tag.endswith("text")}
    assert {"start", "objects", "noise", "start from step 2"} <= texts


def test_until_its_event_an_episode_is_equal(perturbed: Path) -> None:
    """Its actions, bit for bit; afterwards they are others."""
    folder = evaluations.read_folder(perturbed)
    known = {outcome.trial: folder.actions(outcome) for outcome in folder.in_order()}
    event = [trial for trial in known if trial >= 4 * 7]
    assert len(event) == 4
    assert all(np.array_equal(known[trial][:2], known[trial % 4][:2]) for trial in event)
    longer = [trial for trial in event if len(known[trial]) > 2 < len(known[trial % 4])]
    assert longer and not any(np.array_equal(known[trial][2], known[trial % 4][2]) for trial in longer)


def test_a_sampled_policy_draws_alike_in_both_of_a_pair(tmp_path: Path) -> None:
    """Until the event, whatever the number of environments side by side: trials, not rows, key the noise."""
    settings: dict[str, Any] = {"episodes": 5, "axes": ["objects:5@4"], "num_envs": 4}
    folder = evaluated(tmp_path / "e", config(eval=settings))
    known = {outcome.trial: folder.actions(outcome) for outcome in folder.in_order()}
    assert all(np.array_equal(known[trial][:4], known[trial - 5][:4]) for trial in range(5, 10))


HOW = [
    {"farm": {"groups": 1, "physics_workers": 2, "render_workers": 1}},
    {"farm": {"groups": 2}, "eval": {"num_envs": 8}},
    {"runtime": {"mode": "ray"}, "farm": {"physics_workers": 2, "render_workers": 2}},
]


@pytest.mark.parametrize("how", often(HOW[:1], HOW), ids=str)
def test_workers_and_mode_change_no_bit(perturbed: Path, how: dict[str, Any], tmp_path: Path) -> None:
    one = evaluations.read_folder(perturbed)
    settings = config(SEEING, eval={"axes": [*AXES, "start:5@2"]} | how.get("eval", {}))
    settings = settings.model_copy(
        update={
            "farm": settings.farm.model_copy(update=how.get("farm", {})),
            "runtime": settings.runtime.model_copy(update=how.get("runtime", {})),
        }
    )
    assert_same_episodes(one, evaluated(tmp_path / "e", settings))


def test_an_interrupted_one_goes_on(perturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    shutil.copytree(perturbed, folder)
    lines = (folder / EPISODES).read_text().splitlines(keepends=True)
    (folder / EPISODES).write_text("".join(lines[:9]))
    whole = evaluated(folder, config(SEEING, eval={"axes": [*AXES, "start:5@2"]}), resume=True)
    assert_same_episodes(evaluations.read_folder(perturbed), whole)
    said = refusal(folder, config(SEEING, eval={"axes": ["start"]}), resume=True)
    assert "holds another evaluation" in said and "perturbations" in said


def test_two_policies_are_compared_under_every_condition(perturbed: Path, tmp_path: Path) -> None:
    settings = config(SEEING, eval={"axes": [*AXES, "start:5@2"]})
    evaluated(tmp_path / "e", settings, against=str(perturbed))
    comparison = json.loads((tmp_path / "e" / "eval.json").read_text())["comparison"]
    assert len(comparison["conditions"]) == 7
    assert all(row["difference"] == 0 and row["episodes"] == 4 for row in comparison["conditions"])


# --- training


def training_episodes(config: Config) -> Episodes:
    run = RunSpec.of(config)
    return run.episodes(run.tasks[0])


def test_training_draws_from_the_axes_and_evaluation_does_not(tmp_path: Path) -> None:
    env = {"randomise": ["start:1,2", "objects:1-2"]}
    settings = config(env=env)
    drawn = {training_episodes(settings).spec(0, n).perturbation for n in range(100)}  # type: ignore[union-attr]
    assert drawn == {None, 0, 1, 2, 3}
    assert {spec.perturbation for spec in protocol_of(settings).episodes("tabletop/reach")} == {None}
    with pytest.raises(FarmError, match="reads images"):
        training_episodes(config(env={"randomise": ["noise"]}))


@pytest.mark.slow
def test_runs_with_and_without_randomisation_are_shown_beside_each_other(tmp_path: Path) -> None:
    """The page of each, and of both, has its evaluation under perturbations."""
    sections = {"env": {"randomise": ["start"]}, "eval": {"axes": ["start:1,5"]}}
    runs = [
        trained(tmp_path, "plain", 1, sections={"eval": sections["eval"]}),
        trained(tmp_path, "randomised", 1, sections=sections),
    ]
    for run in runs:
        assert "Under perturbations" in (run / "report.html").read_text()
        assert len(read_conditions(json.loads((run / "eval.json").read_text()))) == 3
    result = report_runs([str(run) for run in runs], tmp_path, tmp_path / "both.html")
    page = Path(result["report"]).read_text()
    assert "Under perturbations" in page and "start 5" in page and "randomise" in page
