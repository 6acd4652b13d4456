"""Training under a delay, in whole runs: no plan changes what is computed, what was executed is scored as it was
acted, a resumed run is the whole one, and the policy is evaluated with and without a delay."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from embodied import cli
from embodied.commands.evaluate import evaluate_run
from embodied.commands.report import report_runs
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.evaluation.folder import EvalFolder, read_folder
from embodied.evaluation.protocol import Protocol
from embodied.execution.session import Session
from embodied.reporting.metrics import SELECTION, read
from embodied.reporting.run_record import read_run
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.rollout.executed_chunks import Delayed
from embodied.run import checkpoint
from embodied.run.saved_settings import settings_of
from embodied.training.selection import OTHER_SEEDS, selection_protocol
from embodied.workflows.conventions import differences
from tests.embodied.execution.test_executor import Reference, ray, reference
from tests.embodied.execution.test_observation_history import APART, assert_on_policy, looking_back
from tests.embodied.run import test_resume
from tests.embodied.support.runs import GROUPS, IMAGES, STATES, assert_equal, assert_was_a_test, assigned, inline, run
from tests.variants import often

__all__ = ["ray", "reference"]


def late(settings: dict[str, Any], delay: int | str) -> dict[str, Any]:
    return {**settings, "env": {**settings["env"], "delay": delay}}


SETTINGS = {
    "one env step": late(STATES, 1),
    "a whole chunk": late(STATES, 2),
    "drawn": late(STATES, "0:40,1:20,2:40"),
    "pictures": late(looking_back(IMAGES, 2, 1, 2), "1:50,2:50"),
    "episode groups": late(GROUPS, "1:50,2:50"),
}
PLANS = {
    "two groups, 2 splits": assigned("disaggregated", 2, (0,), (), (1,), (1,)),
    "two processes that leave memory": replace(assigned(one_process=False), unload=True),
    "one step ahead": assigned("disaggregated", 2, (0,), (), (1,), (0,), one_process=False, ahead=1),
}
DRAWN_APART = ("pictures", "drawn apart")
"""Delays and several observations at once, by processes of which one draws."""
EVERY = [*((name, plan) for name in SETTINGS for plan in PLANS), DRAWN_APART]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_executed_is_scored_as_it_was_acted(name: str, reference: Reference) -> None:
    found = reference(SETTINGS[name], inline(assigned()))
    assert_was_a_test(found)
    assert_on_policy(found)
    chunk, most = SETTINGS[name]["policy"]["chunk"], {"one env step": 1}.get(name, 2)
    for part in found.gathered:
        assert part["log_prob"].shape[2] == chunk + most
        first, executed, mask = part["first"], part["executed"], part["mask"]
        assert (first[mask] + executed[mask]).max() == chunk + most
        assert (executed[mask] == 0).any() == (name == "drawn"), "a delay of 0 overtakes one of a whole chunk"
        assert set(first[mask].tolist()) == {"one env step": {0, 1}, "a whole chunk": {0, 2}}.get(name, {0, 1, 2})


@pytest.mark.parametrize(
    ("name", "plan"),
    often([DRAWN_APART, ("episode groups", "two processes that leave memory")], EVERY),
)
def test_no_plan_changes_what_is_computed(
    name: str, plan: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    assignment = APART if plan == "drawn apart" else PLANS[plan]
    found = run(SETTINGS[name], ray, assignment, tmp_path / "ray")
    assert_was_a_test(found)
    if not assignment.ahead:
        assert_on_policy(found)
    assert_equal(found, reference(SETTINGS[name], assignment))


@pytest.mark.slow
def test_replicas_change_nothing(ray: Session, reference: Reference, tmp_path: Path) -> None:
    plan = assigned(groups=2, one_process=False)
    replicas = replace(plan, components={**plan.components, "policy": (Affinity(),) * 2})
    found = run(SETTINGS["episode groups"], ray, replicas, tmp_path / "ray")
    assert_on_policy(found)
    assert_equal(found, reference(SETTINGS["episode groups"], plan))


def test_two_tasks_have_one_delay(reference: Reference) -> None:
    both = late(STATES, "1:50,2:50") | {"extra_tasks": [{"task": "tabletop/reach", "max_episode_steps": 5}]}
    farm = inline(assigned(groups=2))
    found = reference(both, replace(farm, farms=farm.farms * 2))
    assert_was_a_test(found)
    assert_on_policy(found)
    assert not torch.equal(found.gathered[0]["first"][:, :4], found.gathered[0]["first"][:, 4:])


@pytest.mark.parametrize("delay", [1, "0:40,1:20,2:40"])
def test_a_resumed_run_is_the_whole_one(delay: int | str, tmp_path: Path) -> None:
    settings = late({**test_resume.STATES, "checkpoint_every": 2}, delay)
    settings["policy"] = {**settings["policy"], "chunk": 2}
    test_resume.run(test_resume.config_of(settings, 4), tmp_path / "whole")
    test_resume.run(test_resume.config_of(settings, 2), tmp_path / "parts")
    environments = checkpoint.read_environments(tmp_path / "parts" / "checkpoints" / "000002")
    assert environments["base_step"].any() and environments["left_over"].any(), "no episode was under way"
    test_resume.run(test_resume.config_of(settings, 4), tmp_path / "parts", resume=True)
    test_resume.assert_same_run(tmp_path / "parts", tmp_path / "whole")


def test_no_delay_is_the_default() -> None:
    assert parse_config(late(STATES, 0), "test") == parse_config(STATES, "test")


# --- evaluated


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    settings: dict[str, Any] = {
        **late(STATES, "1:50,2:50"), "workflow": "ppo", "iterations": 1, "name": "late",
        "eval": {"episodes": 4, "videos": 0, "every": 1}, "runtime": {"mode": "inline"}, "farm": {"physics_workers": 1},
    }  # fmt: skip
    train_run(parse_config(settings, "test"), "late", folder, resume=False)
    return folder / "late"


def test_a_trained_policy_acts_with_and_without_a_delay(trained: Path, tmp_path: Path) -> None:
    settings = settings_of(str(trained), trained.parent).model_dump(mode="json")
    settings["eval"] |= {"delay": ["2"]}
    evaluate_run(str(trained), Config.model_validate(settings), None, trained.parent, into=tmp_path / "e")
    folder = read_folder(tmp_path / "e")
    plain, delayed = (folder.actions(folder.in_order()[trial]) for trial in (0, 4))
    assert np.array_equal(plain[:2], delayed[:2]) and not np.array_equal(plain[2:4], delayed[2:4])


def evaluated(trained: Path, into: Path, seed: int = 3, **evaluation: Any) -> EvalFolder:
    settings = settings_of(str(trained), trained.parent).model_dump(mode="json") | {"seed": seed}
    settings["eval"] |= evaluation
    evaluate_run(str(trained), Config.model_validate(settings), None, trained.parent, into=into)
    return read_folder(into)


def assert_same(ours: Sequence[EpisodeOutcome], theirs: Sequence[EpisodeOutcome], *folders: EvalFolder) -> None:
    first, second = folders
    for one, other in zip(ours, theirs, strict=True):
        assert one.total_reward == other.total_reward and np.array_equal(first.actions(one), second.actions(other))


def test_a_run_ends_with_an_evaluation_under_its_delay_and_without(trained: Path, tmp_path: Path) -> None:
    named = evaluated(trained, tmp_path / "named", delay=["1:50,2:50"])
    result = json.loads((trained / "eval.json").read_text())
    own = read_folder(Path(result["folder"]))
    assert_same(own.in_order()[:4], named.in_order()[4:], own, named)
    assert_same(own.in_order()[4:], named.in_order()[:4], own, named)
    assert result["episodes"] == 4 and [one["axis"] for one in result["conditions"]] == ["wait"]
    for row, outcomes in ((result, named.in_order()[4:]), (result["conditions"][0], named.in_order()[:4])):
        assert row["return"] == pytest.approx(np.mean([one.total_reward for one in outcomes]))
    text = (trained / "eval.md").read_text()
    assert "with the delay of the training, in env steps: naive 1:0.5,2:0.5; each trial also without a delay" in text
    assert "The tables above are of the episodes under the delay of the training." in text
    assert "| no delay (wait)" in text
    later = evaluated(trained, tmp_path / "later")
    assert later.identity == own.identity
    assert_same(own.in_order(), later.in_order(), own, later)


def test_no_delay_is_evaluated_on_request(trained: Path, tmp_path: Path) -> None:
    plain, own = evaluated(trained, tmp_path / "e", delay=["0"]), newest(trained)
    assert_same(plain.in_order(), own.in_order()[4:], plain, own)
    assert "delay" not in (tmp_path / "e" / "eval.md").read_text()


def newest(trained: Path) -> EvalFolder:
    return read_folder(Path(json.loads((trained / "eval.json").read_text())["folder"]))


def test_checkpoints_are_chosen_under_the_delay(trained: Path, tmp_path: Path) -> None:
    chosen = read_folder(trained / "evals" / "selection" / "000001")
    named = evaluated(trained, tmp_path / "e", 3 ^ OTHER_SEEDS, delay=["1:50,2:50"])
    assert_same(chosen.in_order(), named.in_order()[4:], chosen, named)
    (row,) = read(trained, SELECTION)
    assert row["eval/return"] == pytest.approx(np.mean([one.total_reward for one in named.in_order()[4:]]))

    def of(**evaluation: Any) -> Protocol:
        return selection_protocol(parse_config({**late(STATES, 1), "eval": evaluation}, "test"))

    own = Delayed("naive", "1", 2)
    for evaluation in ({}, {"delay": 2, "delay_method": "ensemble"}, {"protocol": "latency"}, {"axes": ["start"]}):
        assert (of(**evaluation).trained_delay, of(**evaluation).total) == (own, 50)
    assert of(delay=0).trained_delay is None


def test_pages_show_a_run_by_its_success_under_the_delay(trained: Path, tmp_path: Path) -> None:
    twins = [tmp_path / "a", tmp_path / "b"]
    for twin in twins:
        shutil.copytree(trained, twin, ignore=shutil.ignore_patterns("perturbed.json"))  # of other tests
        result = json.loads((twin / "eval.json").read_text())
        rates = {"success_rate": 0.75, "success_low": 0.5, "success_high": 0.9}
        (twin / "eval.json").write_text(json.dumps(result | rates))  # so that the numbers differ
    names = [one.name for one in read_run(twins[0]).conditions]
    assert names == ["naive 1:0.5,2:0.5, 2 env steps", "no delay (wait)"]
    report_runs([str(twins[0])], tmp_path)
    page = (twins[0] / "report.html").read_text()
    assert "Under delays" in page and "The episodes under the delay of the training are repeated without one" in page
    assert "75%" in page
    both = report_runs([*map(str, twins)], tmp_path, tmp_path / "both.html")
    page = Path(both["report"]).read_text()
    assert "naive 1:0.5,2:0.5 2" in page and "no delay (wait)" in page and "delay 1:0.5,2:0.5" in page
    assert [one["success_rate"] for one in both["groups"]] == [0.75]


def test_an_evaluation_has_a_delay_of_its_own(
    trained: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parent)
    assert cli.main(["eval", str(trained), "--env.delay", "1"]) == 2
    assert "`embodied eval` does not read env.delay ('1'): leave it out" in " ".join(capsys.readouterr().err.split())


def test_a_policy_that_learned_longer_chunks_is_trained_with_their_end_executed_late() -> None:
    def of(chunk: int, delay: int = 0, kind: str = "gaussian_mlp") -> Config:
        return parse_config(late({**STATES, "policy": {"kind": kind, "chunk": chunk}}, delay), "test")

    (alike,) = differences(of(8), of(6, 2))
    assert alike.setting == "policy.chunk" and not alike.is_wrong
    assert [(one.setting, one.is_wrong) for one in differences(of(6, 2), of(6, 1))] == [("env.delay", True)]
    assert [(one.setting, one.is_wrong) for one in differences(of(8), of(6, 1))] == [("policy.chunk", True)]
    assert [(one.setting, one.is_wrong) for one in differences(of(8, 0, "act"), of(8, 1, "act"))] == [
        ("env.delay", False)
    ]


# --- refused


SMOLVLA = {
    "kind": "smolvla", "reads": ["images", "instruction", "proprio"], "chunk": 4, "horizon": 5,
    "options": {"checkpoint": "assets/smolvla_small", "asset": "demonstrations"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"env": {"delay": 3}}, "env.delay 3 is beyond the chunk: policy.chunk is 2.* at most 2, or policy.chunk to"),
        (
            {"env": {"task": "tabletop/reach_red", "cameras": 1, "image_size": 56, "delay": 2}, "policy": SMOLVLA},
            "policy.chunk is 4, and a decision of smolvla predicts 5 actions.* Set env.delay to at most 1",
        ),
        ({"env": {"delay": "soon"}}, "'soon' is no delay"),
        ({"extra_tasks": [{"task": "tabletop/push", "delay": 1}]}, "all tasks of a run have one"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_message_before_a_run(sections: dict[str, Any], said: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**STATES, "workflow": "ppo", "name": "wrong", "runtime": {"mode": "inline"}}
    settings |= {name: {**settings.get(name, {}), **own} if isinstance(own, dict) else own
                 for name, own in sections.items()}  # fmt: skip
    with pytest.raises(UserError, match=said):
        train_run(parse_config(settings, "test"), "wrong", tmp_path, resume=False)
    assert not (tmp_path / "wrong").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("train countdown_grpo", "nothing goes on while the policy language writes an answer"),
        ("train openvla_tiny", "a decision of openvla predicts 1 actions.* Set env.delay to 0"),
        ("sft pi0_small --data demos", "demonstrations have no delay: set --env.delay 0"),
    ],
)
def test_what_has_no_delay_is_refused(
    words: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main([*words.split(), "--env.delay", "1"]) == 2
    found = " ".join(capsys.readouterr().err.split())
    assert re.search(said, found), found
