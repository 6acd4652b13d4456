"""Runs on a file of problems: rows asked and trained on, prompts that are too long, verifiers that fail."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from embodied.commands.train import train_run
from embodied.config.files import parse_config, with_settings
from embodied.config.schema import Config, PolicyConfig
from embodied.errors import UserError
from embodied.evaluation.folder import read_folder
from embodied.evaluation.protocol import problem_notes, protocol_of
from embodied.evaluation.provenance import lineage, trained_sentence
from embodied_language.text.problem_files import ProblemFile, problem_backend
from policies import PolicyError
from sim_farm.contract import EpisodeSpec
from tests.embodied.support import evaluations, text_runs
from tests.embodied.support.checked import check
from tests.embodied.support.text_runs import settings
from tests.extensions.language import verifiers

run = evaluations.run  # the fixture

OWN = verifiers.__name__
ROWS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_runs.few_tokens(tmp_path_factory.mktemp("runs") / "model")


def problems(folder: Path, texts: list[str]) -> str:
    folder.mkdir(exist_ok=True)
    path = folder / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "answer": "expected"}) + "\n" for text in texts))
    return str(path)


TEXTS = [f"Say {n}." for n in range(ROWS)]


def tasks(monkeypatch: pytest.MonkeyPatch, **files: ProblemFile) -> None:
    """Make these files the tasks of this module's backend."""
    monkeypatch.setattr(f"{__name__}.BACKEND", problem_backend(**files))


BACKEND = problem_backend()


def asked(model: Path, task: str, **changes: Any) -> Config:
    return parse_config(
        settings(model, **changes) | {"env": settings(model)["env"] | {"task": f"{__name__}:BACKEND/{task}"}}, "test"
    )


def test_each_problem_is_asked_as_often_and_counts_as_trained_on(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = problems(tmp_path / "a", TEXTS)
    other = problems(tmp_path / "b", [*TEXTS[5:], "New?"])
    tasks(monkeypatch, ten=ProblemFile(path), other=ProblemFile(other))
    config = asked(model, "ten", iterations=1, eval={"episodes": 2 * ROWS}, name="run")
    train_run(config, "test", tmp_path / "runs", False)
    (folder,) = (tmp_path / "runs" / "run" / "evals").iterdir()
    outcomes = read_folder(folder).in_order()
    assert Counter(outcome.spec.seed % ROWS for outcome in outcomes) == dict.fromkeys(range(ROWS), 2)
    assert len({outcome.beginning for outcome in outcomes}) == ROWS
    result = json.loads((folder / "eval.json").read_text())
    assert result["trained_on"] == {"kind": "problems", "trained": ROWS, "evaluated": ROWS, "known": True}
    assert result["notes"] == [
        f"{ROWS} of {ROWS} problems were trained on",
        f"each of the {ROWS} problems of {path} is asked 2 times, and answered greedily alike each time: "
        f"--eval.episodes {ROWS} asks each once",
    ]
    (whole,) = (tmp_path / "runs" / "run" / "checkpoints").glob("0*")
    found = lineage(whole, PolicyConfig())
    starts = found.starts(f"{__name__}:BACKEND/other", [EpisodeSpec(seed) for seed in range(6)])
    assert (starts.trained, starts.evaluated) == (5, 6), "another file, of which five problems are the same"
    monkeypatch.setattr(f"{__name__}.BACKEND", problem_backend(other=ProblemFile(other), ten=ProblemFile("gone.jsonl")))
    lost = found.starts(f"{__name__}:BACKEND/other", [EpisodeSpec(seed) for seed in range(6)])
    assert trained_sentence(lost, ()).endswith("a file of problems that it was trained on cannot be read")


@pytest.mark.parametrize(
    ("episodes", "note"),
    [
        (None, "each of the 10 problems of {} is asked once"),
        (4, "the first 4 of the 10 problems of {} are asked, each once"),
        (10, "each of the 10 problems of {} is asked once"),
        (15, "each of the 10 problems of {} is asked once, the first 5 once more, and answered greedily alike"),
    ],
)
def test_an_evaluation_says_which_problems_it_asks(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, episodes: int | None, note: str
) -> None:
    path = problems(tmp_path, TEXTS)
    tasks(monkeypatch, ten=ProblemFile(path))
    protocols = [protocol_of(asked(model, "ten", eval={"episodes": episodes}, seed=seed)) for seed in (0, 1)]
    assert problem_notes(protocols[0])[0].startswith(note.format(path))
    first, second = ([spec.seed % ROWS for spec in p.episodes(p.tasks[0])] for p in protocols)
    assert first == second == [n % ROWS for n in range(episodes or ROWS)], "whatever the run's seed"


def test_the_protocol_is_of_the_file_s_content(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = set()
    for n, texts in enumerate((TEXTS, TEXTS[::-1], TEXTS)):
        tasks(monkeypatch, ten=ProblemFile(problems(tmp_path / str(n), texts)))
        hashes.add(protocol_of(asked(model, "ten")).sha256)
    assert len(hashes) == 2, "the same content elsewhere is the same"


def test_prompts_that_are_too_long_are_named_before_a_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = problems(tmp_path, [*TEXTS[:8], "Say " + "9" * 600, "Say " + "8" * 700])
    tasks(monkeypatch, long=ProblemFile(path), ten=ProblemFile(problems(tmp_path / "ten", TEXTS)))
    said = rf"{path} has problems that are too long for {model}, 2 of 10: row 9, 10\. The prompt of row 10 has 3"
    config = asked(model, "long")
    with pytest.raises(PolicyError, match=said):
        check(config)
    with pytest.raises(PolicyError, match=said):
        check(with_settings(asked(model, "ten"), {"eval.tasks": [config.env.task]}, "test"), "eval")
    check(asked(model, "ten"))


def test_a_verifier_that_fails_on_every_answer_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = problems(tmp_path, TEXTS)
    tasks(monkeypatch, fails=ProblemFile(path, verifier=f"{OWN}:often_fails"))
    reason = (
        rf"broken: the verifier {OWN}:often_fails failed: KeyError: 'boxed' \({verifiers.__file__}, line \d+\) "
        rf"\(on row \d+ of {path}\)"
    )
    config = asked(model, "fails", name="run", rollout={"episodes_per_env": 2})
    with pytest.raises(UserError, match=rf"the last \d+ episodes that the task ended were all {reason}"):
        train_run(config, "test", tmp_path / "runs", False)
    sampled = asked(model, "fails", eval={"episodes": 40, "greedy": False})
    with pytest.raises(
        UserError, match=rf"{config.env.task}: the first 8 episodes that the task ended were all {reason}"
    ):
        evaluations.evaluated(tmp_path / "evaluated", sampled)


def test_a_verifier_that_fails_on_some_answers_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = problems(tmp_path, TEXTS)
    tasks(monkeypatch, some=ProblemFile(path, verifier=f"{OWN}:fails_on_some"))
    train_run(
        asked(model, "some", name="run", iterations=2, rollout={"episodes_per_env": 2}),
        "test",
        tmp_path / "runs",
        False,
    )
    said = capsys.readouterr()
    assert f"the verifier {OWN}:fails_on_some failed: ValueError: three" in said.out + said.err


def test_seeds_say_nothing_of_episodes_that_begin_alike(run: Path) -> None:
    """Where twenty seeds have two beginnings, a seed that was not trained on is no beginning that was not."""
    (whole,) = (path.parent for path in run.glob("checkpoints/0*/manifest.json"))
    found, episodes = lineage(whole, PolicyConfig()), [EpisodeSpec(seed) for seed in range(20)]
    assert trained_sentence(found.starts("tabletop/reach", episodes, 20), ()) == "0 of 20 seeds were trained on"
    alike = found.starts("tabletop/reach", episodes, 2)
    assert not alike.known and trained_sentence(alike, ()) == (
        "it is not known how many of 20 seeds were trained on: the 20 episodes begin in 2 different ways, and training "
        "episodes of other seeds may have begun alike"
    )
    assert found.starts("tabletop/push", episodes, 2).known, "nothing was trained on there"


def test_an_evaluation_keeps_the_beginnings_of_its_episodes(tmp_path: Path) -> None:
    folder = evaluations.evaluated(tmp_path / "whole", evaluations.config(eval={"episodes": 4}))
    begun = {outcome.beginning for outcome in folder.in_order()}
    assert len(begun) == 4 and "" not in begun
    assert read_folder(folder.path).in_order() == folder.in_order()
