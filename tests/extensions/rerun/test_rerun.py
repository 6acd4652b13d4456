"""Recordings for the Rerun viewer, read back with Rerun's own reader and compared with what they were made of."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import rerun as rr

from embodied.commands.record import record_run
from embodied.config.files import saved_config
from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.writer import Episode as WrittenEpisode
from embodied.demonstrations.writer import EpisodesWriter, new_folder
from embodied.errors import UserError
from embodied.evaluation.evaluate import evaluated_task
from embodied.evaluation.folder import EPISODES, EvalFolder, read_folder
from embodied_rerun.command import Arguments, run
from sim_farm.client.episode_replay import Replayer
from tests.embodied.support.evaluations import config, evaluated

LEROBOT = Path(__file__).parents[2] / "embodied" / "demonstrations" / "lerobot"
SHORT: dict[str, dict[str, Any]] = {
    "env": {"task": "tabletop/reach", "num_envs": 8, "max_episode_steps": 6},
    "policy": {"kind": "random", "chunk": 2},
    "farm": {"physics_workers": 1},
    "eval": {"greedy": False, "videos": 0, "episodes": 8},
    "runtime": {"mode": "inline"},
}
IMAGES: dict[str, dict[str, Any]] = {
    "env": {"cameras": 1, "image_size": 32},
    "policy": {"reads": ["proprio", "images"]},
}
PERTURBED: dict[str, dict[str, Any]] = {"eval": {"axes": ["start:1"]}}


@dataclass(frozen=True)
class Read:
    """A recording as Rerun reads it."""

    columns: Mapping[str, npt.NDArray[Any]]
    """Scalars [n, D], by entity."""
    texts: Mapping[str, list[tuple[int, str]]]
    """Step and text, by entity."""
    frames: Mapping[str, npt.NDArray[np.uint8]]
    """[n, H, W, 3], by entity."""
    seconds: npt.NDArray[np.float64]
    """[n] of the timeline `time`, of the actions."""
    facts: Mapping[str, Any]


def read(path: Path) -> Read:
    reader = rr.chunk.RrdReader(path)
    assert len(reader.recordings()) == 1 and reader.blueprints()
    columns, texts, facts = dict[str, Any](), dict[str, list[tuple[int, str]]](), dict[str, Any]()
    pictures, formats = dict[str, dict[int, Any]](), dict[str, Mapping[str, Any]]()
    seconds = np.zeros(0)
    for chunk in reader.stream():
        batch, entity = chunk.to_record_batch(), chunk.entity_path
        data = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "Image:buffer"}
        steps = data.get("step", [])
        if "Scalars:scalars" in data:
            assert steps == list(range(len(steps)))
            columns[entity] = np.array(data["Scalars:scalars"])
            if entity == "/action":
                seconds = np.array([time.total_seconds() for time in data["time"]])
        elif "TextDocument:text" in data:
            texts[entity] = [(step, text) for step, (text,) in zip(steps, data["TextDocument:text"], strict=True)]
        elif "Image:buffer" in batch.schema.names:
            buffers = batch.column("Image:buffer").flatten().flatten().to_numpy().reshape(len(steps), -1)
            pictures.setdefault(entity, {}).update(zip(steps, buffers, strict=True))
        elif "Image:format" in data:
            formats[entity] = data["Image:format"][0][0]
        elif entity == "/__properties/episode":
            facts = {name: values[0][0] for name, values in data.items() if not name.startswith("rerun.")}
    frames = {}
    for entity, by_step in pictures.items():
        assert sorted(by_step) == list(range(len(by_step)))
        size = formats[entity]["height"], formats[entity]["width"], 3
        frames[entity] = np.stack([by_step[i].reshape(size) for i in range(len(by_step))])
    return Read(columns, texts, frames, seconds, facts)


def same(found: npt.NDArray[Any], meant: npt.NDArray[Any]) -> bool:
    """Equal bit for bit in the type that the source has."""
    return found.astype(meant.dtype).tobytes() == np.ascontiguousarray(meant).tobytes()


@pytest.mark.parametrize("sections", [{}, IMAGES, PERTURBED], ids=["states", "images", "perturbed"])
def test_a_recording_has_the_evaluated_episode_bit_for_bit(tmp_path: Path, sections: dict[str, Any]) -> None:
    folder = evaluated(tmp_path / "evaluation", config(SHORT, **sections))
    protocol = folder.identity.protocol
    numbers = [0, 3, protocol.total - 1]
    result = run(Arguments(str(folder.path), episodes=",".join(map(str, numbers)), out=tmp_path / "out"))
    assert result["episodes"] == numbers and not result["left_out"]

    applied = protocol.applied(saved_config(folder.path / "config.yaml"), "tabletop/reach")
    task = evaluated_task(applied, protocol.perturbations.get("tabletop/reach", ()))
    if not sections.get("policy"):  # the policy sees no frames: those of the first camera are drawn
        task = replace(task, cameras=1, image_size=256, orientation="upright")
    replayer = Replayer(task)
    for number in numbers:
        outcome = folder.in_order()[number]
        assert outcome.trial == number
        found = read(tmp_path / "out" / f"episode_{number:06d}.rrd")
        replay = replayer.replay(outcome.spec, folder.actions(outcome))
        assert same(found.columns["/action"], folder.actions(outcome))
        assert same(found.columns["/observation/state"], replay.proprio)
        assert same(found.columns["/observation/environment_state"], replay.state)
        assert same(found.columns["/next/reward"][:, 0], replay.reward)
        assert same(found.columns["/next/success"][:, 0], replay.success)
        assert same(found.columns["/next/done"][:, 0], replay.done)
        assert list(found.frames) == ["/observation/images/front"]
        assert same(found.frames["/observation/images/front"], replay.frames["front"])
        assert found.texts == {"/instruction": [(0, replay.instruction)]}
        np.testing.assert_allclose(found.seconds, np.arange(outcome.length) / replayer.describe().control_hz, atol=1e-9)
        assert found.facts["success"] is outcome.success and found.facts["return"] == outcome.total_reward
        assert found.facts["seed"] == outcome.spec.seed and found.facts["protocol"] == protocol.sha256
        assert ("condition" in found.facts) == (protocol.condition("tabletop/reach", number) is not None)
    replayer.close()


def compare(source: Path, out: Path, numbers: tuple[int, ...] | None = None) -> dict[int, Read]:
    """The dataset's recordings, each compared with what the dataset says."""
    dataset = Dataset(source)
    found = {}
    for episode in dataset.episodes:
        if numbers is not None and episode.index not in numbers:
            continue
        recording = found[episode.index] = read(out / f"episode_{episode.index:06d}.rrd")
        rows = np.arange(episode.begin, episode.end)
        for name, feature in dataset.features.items():
            entity = "/" + name.replace(".", "/")
            if feature.is_camera or name in layout.BOOKKEEPING:
                assert entity not in recording.columns
            elif feature.dtype == "string":
                assert [text for _, text in recording.texts[entity]] == dataset.column(name)[rows].tolist()
            else:
                values = dataset.column(name)[rows]
                assert same(recording.columns[entity].reshape(values.shape), values)
        assert len(recording.frames) == len(dataset.cameras)
        for camera in dataset.cameras:
            entity = "/observation/images/" + camera.replace(".", "/")
            assert same(recording.frames[entity], dataset.frames(camera, rows))
        begins = [text for step, text in recording.texts["/instruction"]]
        assert begins == list(dict.fromkeys(dataset.instructions(rows)))
        np.testing.assert_allclose(recording.seconds, np.arange(len(rows)) / dataset.fps, atol=1e-9)
    assert sorted(path.name for path in out.iterdir()) == [f"episode_{number:06d}.rrd" for number in sorted(found)]
    return found


@pytest.mark.parametrize("cameras", [1, 0])
def test_a_recording_has_the_demonstration_bit_for_bit(tmp_path: Path, cameras: int) -> None:
    drawn = {"task": "tabletop/reach_red", "max_episode_steps": 30, "cameras": cameras, "image_size": 32}
    settings = config(SHORT, env=drawn, policy={"kind": "scripted", "chunk": 1, "reads": ["state", "instruction"]})
    record_run("demos", settings, None, tmp_path / "demos", 3, False, tmp_path)
    result = run(Arguments(str(tmp_path / "demos"), episodes="0,2", out=tmp_path / "out"))
    assert result["episodes"] == [0, 2]
    found = compare(tmp_path / "demos", tmp_path / "out", (0, 2))
    dataset = Dataset(tmp_path / "demos")
    for number, recording in found.items():
        row = dataset.episodes[number].row
        assert (recording.facts["seed"], recording.facts["success"]) == (row["seed"], row["success"])
        assert recording.facts["task"] == "tabletop/reach_red"
    assert bool(found[0].frames) == bool(cameras)


@pytest.mark.parametrize("name", ["v20", "v21", "v30", "other"])
def test_datasets_of_others_are_recorded_bit_for_bit(tmp_path: Path, name: str) -> None:
    run(Arguments(str(LEROBOT / name), out=tmp_path / "out"))
    compare(LEROBOT / name, tmp_path / "out")


def test_an_instruction_that_changes_within_an_episode_is_shown_from_its_first_step(tmp_path: Path) -> None:
    features = {layout.ACTION: layout.Feature("float32", (2,)), "note": layout.Feature("string", (1,))}
    with new_folder(tmp_path / "data") as folder:
        writer = EpisodesWriter(folder, features, 10)
        texts = ["reach"] * 2 + ["grasp"] * 3
        columns = {
            layout.ACTION: np.arange(10, dtype=np.float32).reshape(5, 2),
            "note": np.array(list("abcde"), object),
        }
        writer.append(WrittenEpisode(columns, {}, texts, {}))
        writer.close()
    run(Arguments(str(tmp_path / "data"), out=tmp_path / "out"))
    found = read(tmp_path / "out" / "episode_000000.rrd")
    assert found.texts["/instruction"] == [(0, "reach"), (2, "grasp")]
    assert found.texts["/note"] == list(enumerate("abcde"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> EvalFolder:
    return evaluated(tmp_path_factory.mktemp("kept") / "evals" / "evaluation", config(SHORT, eval={"episodes": 24}))


def test_ten_episodes_are_recorded_with_failures_first(folder: EvalFolder, tmp_path: Path) -> None:
    result = run(Arguments(str(folder.path), out=tmp_path / "out"))
    solved = {outcome.trial for outcome in folder.in_order() if outcome.success}
    failed = [trial for trial in range(24) if trial not in solved]
    assert len(result["episodes"]) == 10
    assert set(result["episodes"]) <= set(failed) or set(failed) <= set(result["episodes"])


def test_an_episode_that_comes_out_otherwise_is_left_out_and_named(
    folder: EvalFolder, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folder.path, changed)
    lines = (changed / EPISODES).read_text().splitlines()
    other = json.loads(lines[1])
    lines[1] = json.dumps({**other, "success_once": not other["success_once"]})
    (changed / EPISODES).write_text("\n".join(lines) + "\n")
    result = run(Arguments(str(changed), episodes="0-2", out=tmp_path / "out"))
    assert result["episodes"] == [0, 2] and result["left_out"] == [1]
    assert "episodes 1 came out otherwise" in capsys.readouterr().out
    with pytest.raises(UserError, match="nothing is written"):
        run(Arguments(str(changed), episodes="1", out=tmp_path / "none"))
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"episodes": "3,24-30"}, r"--episodes 3,24-30: .* has no episode 24, 25, 26, 27, 28 ...; it has 0-23"),
        ({"episodes": "first"}, "--episodes: 'first' is no list of ranges"),
        ({"source": "nowhere"}, "'nowhere' is neither an evaluation"),
        ({"out": Path(__file__).parent}, "exists already: name another folder with --out"),
    ],
)
def test_mistakes_are_refused_by_name(
    folder: EvalFolder, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    given: dict[str, Any] = {"source": str(folder.path), "out": tmp_path / "out"}
    with pytest.raises(UserError, match=message):
        run(Arguments(**given | arguments))
    assert not (tmp_path / "out").exists()


def test_a_run_is_recorded_from_its_newest_evaluation(folder: EvalFolder, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "mine").mkdir(parents=True)
    shutil.copy(folder.path / "config.yaml", runs / "mine")
    with pytest.raises(UserError, match=r"mine has no evaluated episodes: embodied eval .*mine"):
        run(Arguments("mine", runs_dir=runs, out=tmp_path / "out"))
    shutil.copytree(folder.path, runs / "mine" / "evals" / "final")
    result = run(Arguments("mine", runs_dir=runs, episodes="4", out=tmp_path / "out"))
    assert result["source"] == str(runs / "mine" / "evals" / "final") and result["episodes"] == [4]


SIMULATOR = """
from dataclasses import replace

from sim_farm.backends.tabletop import TabletopPhysics
from sim_farm.contract import Backend

BACKEND = Backend("mine", lambda spec: TabletopPhysics(replace(spec, name="tabletop/reach")), None, lambda: ["reach"])
"""


@pytest.fixture
def foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EvalFolder]:
    """An evaluation whose task is named by its simulator's code."""
    (tmp_path / "foreign_simulator.py").write_text(SIMULATOR)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    task = "foreign_simulator:BACKEND/reach"
    yield evaluated(tmp_path / "evaluation", config(SHORT, env={"task": task, "num_envs": 4}, eval={"episodes": 4}))
    sys.modules.pop("foreign_simulator", None)


def test_a_folder_does_not_bring_code_that_is_run(foreign: EvalFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names a simulator by its code, foreign_simulator:BACKEND"):
        run(Arguments(str(foreign.path), out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_without_the_sdk_the_extra_is_named() -> None:
    code = "import sys; sys.modules['rerun'] = None; from embodied.cli import main; sys.exit(main(['rerun', 'x']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 2 and "pip install 'embodied-farm[rerun]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_damaged_evaluation_is_refused_by_name(folder: EvalFolder, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(folder.path, changed)
    next((changed / "actions").rglob("0.npy")).write_bytes(b"no numbers")
    with pytest.raises(UserError, match=r"0\.npy cannot be read"):
        run(Arguments(str(changed), episodes="0", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists() and read_folder(changed).outcomes
