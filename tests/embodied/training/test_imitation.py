"""Learning from demonstrations: the policy does as they do, and reinforcement goes on from there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

import policies
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import parse_config, save_config
from embodied.config.schema import Config, PolicyConfig
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.evaluation.provenance import lineage
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.run.checkpoint import CheckpointError
from embodied.run.folder import prepare_run, with_init
from embodied.run.saved_settings import settings_of
from embodied.training.imitator import STAGE, Imitator
from embodied.training.sft import imitate, read_demonstrations
from embodied.workflows.run_spec import task_spec
from policies.small.gaussian_mlp import GaussianMLP
from sim_farm.contract import EpisodeSpec, TaskInfo
from sim_farm.registry import make_physics
from tests.embodied.support.checked import check
from tests.embodied.support.expert import record_reach
from tests.full_disk import full_disk

EPISODES = 24
STATES: dict[str, Any] = {
    "seed": 2,
    "env": {"task": "tabletop/reach", "num_envs": 4},
    "policy": {"options": {"widths": [64, 64], "initial_log_std": -1.5}},
    "rollout": {"decisions": 32},
    "optim": {"minibatch": 64, "epochs": 2},
    "sft": {"steps": 200, "batch": 32, "lr": 3e-3, "measure_every": 50},
    "eval": {"episodes": 20, "videos": 0},
    "runtime": {"mode": "inline"},
}
PIXELS = {
    **STATES,
    "env": {"task": "tabletop/reach", "num_envs": 4, "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images"],
        "chunk": 4,
        "options": {"encoder": "cnn", "features": 32, "widths": [64]},
    },
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", EPISODES)


def config_of(settings: dict[str, Any], demos: Dataset, **sft: Any) -> Config:
    return parse_config({**settings, "sft": {**settings["sft"], "data": [str(demos.folder)], **sft}}, "test")


def info_of(config: Config) -> TaskInfo:
    physics = make_physics(task_spec(config))
    physics.close()
    return physics.info


def imitator_of(config: Config) -> Imitator:
    info = info_of(config)
    found = Imitator(config, info, read_demonstrations(config, info))
    found.begin()
    return found


@pytest.fixture(scope="module")
def warm(demos: Dataset, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `embodied sft` says of a run on states."""
    root = tmp_path_factory.mktemp("runs")
    config = config_of(STATES, demos).model_copy(update={"name": "warm"})
    return sft_run(config, "test", root, False)


@pytest.mark.slow
def test_what_has_seen_the_expert_solves_unseen_episodes(warm: dict[str, Any], demos: Dataset) -> None:
    assert len(demos.episodes) == EPISODES
    assert warm["success_rate"] >= 0.9
    rows = read(warm["run"])
    assert [row["iteration"] for row in rows] == [50, 100, 150, 200]
    assert rows[-1]["env_steps"] == 200 * 32
    assert rows[-1]["sft/held_out_distance"] < 0.8 * rows[0]["sft/held_out_distance"]
    page = (Path(warm["run"]) / "report.html").read_text()
    assert "Learning from demonstrations" in page
    assert "Time to success" not in page


def test_a_run_says_which_starts_it_has_learned_from(warm: dict[str, Any], demos: Dataset) -> None:
    """Without the held-out episodes; an evaluation of it counts the starts that it has in common."""
    run = Path(warm["run"])
    (starts,) = json.loads((run / "data.json").read_text())["starts"]
    assert starts["task"] == "tabletop/reach" and not starts["init_states"]
    every = {episode.row["seed"] for episode in demos.episodes}
    assert set(starts["seeds"]) < every and len(starts["seeds"]) == EPISODES - round(0.1 * EPISODES)
    assert warm["trained_on"] == {"kind": "seeds", "trained": 0, "evaluated": 20, "known": True}
    newest = checkpoint.latest(run / "checkpoints")
    demonstrated = [EpisodeSpec(seed) for seed in every]
    found = lineage(newest, PolicyConfig()).starts("tabletop/reach", demonstrated)
    assert (found.trained, found.evaluated) == (len(starts["seeds"]), EPISODES)


def test_a_run_begins_with_what_was_learned_from_demonstrations(warm: dict[str, Any], demos: Dataset) -> None:
    root = Path(warm["run"]).parent
    config = config_of(STATES, demos).model_copy(update={"name": "further", "iterations": 1})
    begun = config.model_copy(update={"policy": config.policy.model_copy(update={"init": Path("warm")})})
    result = train_run(begun, "test", root, False)
    plain = train_run(config.model_copy(update={"name": "plain"}), "test", root, False)
    first, without = read(result["run"])[0], read(plain["run"])[0]
    assert first["env/success_once"] >= 0.9
    assert first["env/episodes"] > 2 * without["env/episodes"], "solved episodes are short"
    # The weights that it begins with keep the statistics beside them; those of a new policy follow its rollout.
    warmed, further, new = (
        policies.load(checkpoint.latest(root / name / "checkpoints") or root).state_dict()
        for name in ("warm", "further", "plain")
    )
    statistics = [name for name in warmed if name.startswith("normalizer.")]
    assert statistics and all(torch.equal(warmed[name], further[name]) for name in statistics)
    assert any(not torch.equal(warmed[name], new[name]) for name in statistics)
    # The folder that is recorded is the checkpoint, whatever the run learns later.
    saved = settings_of("further", root).policy.init
    assert saved == checkpoint.latest(root / "warm" / "checkpoints")


@pytest.mark.slow
def test_pixels_with_action_chunks(demos: Dataset, tmp_path: Path) -> None:
    config = config_of(PIXELS, demos, steps=60, measure_every=20)
    result = imitate(config, info_of(config), tmp_path / "run", None)
    rows = read(tmp_path / "run")
    assert rows[-1]["sft/held_out_loss"] < 0.9 * rows[0]["sft/held_out_loss"]
    assert result["sft/held_out_loss"] == rows[-1]["sft/held_out_loss"]
    policies.load(tmp_path / "run" / "checkpoints" / "000060")


@pytest.mark.parametrize("augment", [None, "openpi"])
def test_stopped_and_resumed_is_not_stopped(
    demos: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, augment: str | None
) -> None:
    """Also with changed pictures, which a process has read in the parts and threads in the whole."""
    config = config_of(PIXELS if augment else STATES, demos, steps=40, measure_every=20, augment=augment)
    info = info_of(config)
    whole = imitate(config, info, tmp_path / "whole", None)
    take = Imitator.step

    def step(imitator: Imitator) -> float:
        if imitator.done == 25:
            raise KeyboardInterrupt
        return take(imitator)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Imitator, "step", step)
        config = config.model_copy(
            update={"sft": config.sft.model_copy(update={"loader_workers": 1 if augment else 0})}
        )
        imitate(config, info, tmp_path / "parts", None)
    found = checkpoint.latest(tmp_path / "parts" / "checkpoints")
    assert found is not None
    assert checkpoint.read_state(found).iteration == 25
    parts = imitate(config, info, tmp_path / "parts", found)
    assert parts["sft/held_out_loss"] == whole["sft/held_out_loss"]
    for name in ("policy/model.safetensors", "optimizer.safetensors"):
        one, other = (load_file(tmp_path / run / "checkpoints" / "000040" / name) for run in ("whole", "parts"))
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one)


def test_changed_pictures_are_learned_from_and_not_measured(demos: Dataset) -> None:
    after, measured = {}, set()
    for augment in (None, "openpi", "oft", "lerobot"):
        imitator = imitator_of(config_of(PIXELS, demos, augment=augment))
        measured.add(imitator.measure()["sft/held_out_loss"])
        imitator.step()
        after[augment] = torch.cat([p.detach().flatten() for p in imitator.policy.parameters()])
    assert len(measured) == 1
    assert all(not torch.equal(after[one], after[other]) for one, other in combinations(after, 2))


def test_augmentation_of_a_policy_that_reads_no_pictures_is_refused(demos: Dataset) -> None:
    with pytest.raises(UserError, match="sft.augment is oft, and the policy reads no pictures .policy.reads state"):
        check(config_of(STATES, demos, augment="oft"), "sft")


@pytest.mark.slow
def test_a_killed_training_has_a_checkpoint_of_not_long_ago(demos: Dataset, tmp_path: Path) -> None:
    config = config_of(STATES, demos, steps=100_000, checkpoint_every=20)
    save_config(config, tmp_path / "own.yaml")
    program = "import sys; from embodied.cli import main; main(sys.argv[1:])"
    command = ["sft", str(tmp_path / "own.yaml"), "--runs-dir", str(tmp_path), "--name", "killed"]
    process = subprocess.Popen(
        [sys.executable, "-c", program, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    latest = tmp_path / "killed" / "checkpoints" / "latest"
    while not latest.exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    found = prepare_run(config, tmp_path / "killed", True, STAGE)
    assert found is not None
    assert checkpoint.read_state(found).iteration % 20 == 0


def test_a_full_disk_does_not_end_a_training_before_its_end(
    demos: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write, full = checkpoint.write_state, {4}

    def out_of_room(root: Path, state: checkpoint.RunState, *others: Any) -> Path:
        with full_disk(1000 if state.iteration in full else 1 << 40):
            return write(root, state, *others)

    monkeypatch.setattr(checkpoint, "write_state", out_of_room)
    config = config_of(STATES, demos, steps=6, checkpoint_every=2)
    assert imitate(config, info_of(config), tmp_path / "run", None)["steps"] == 6
    assert {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()} == {"000002", "000006", "latest"}
    output = capsys.readouterr().out
    assert output.count("cannot write the checkpoint") == output.count("checkpoints are written again") == 1
    full.add(6)
    with pytest.raises(CheckpointError, match=r"cannot write .*000006: .*\. The first that .*000004"):
        imitate(config, info_of(config), tmp_path / "other", None)
    take = Imitator.step

    def step(imitator: Imitator) -> float:
        if imitator.done == 4:
            raise UserError("the loss went astray")
        return take(imitator)

    monkeypatch.setattr(Imitator, "step", step)
    with pytest.raises(UserError, match="went astray"):  # what was first, not what follows from it
        imitate(config, info_of(config), tmp_path / "third", None)


def test_what_has_learned_keeps_its_units_and_its_beginning(warm: dict[str, Any], demos: Dataset) -> None:
    """A second training, on other demonstrations; and one that goes on when its beginning is gone or has moved on."""
    root = Path(warm["run"]).parent
    config = config_of(STATES, demos, steps=5, measure_every=5)
    first = with_init(
        config.model_copy(update={"policy": config.policy.model_copy(update={"init": Path(warm["run"])})}), root
    )
    with pytest.MonkeyPatch.context() as patched:
        units = {"own_units": "", "normalised_by": "", "adopt_units": lambda *_: pytest.fail("units redefined")}
        for name, value in units.items():
            patched.setattr(GaussianMLP, name, value, raising=False)
        imitator_of(first)
    named = config.model_copy(update={"name": "second", "policy": first.policy})
    sft_run(named, "test", root, False)
    begun = settings_of("second", root).policy.init
    moved = named.model_copy(update={"policy": config.policy.model_copy(update={"init": Path("nowhere")})})
    more = moved.model_copy(update={"sft": moved.sft.model_copy(update={"steps": 7, "data": ()})})
    assert sft_run(more, "test", root, True)["steps"] == 7
    kept = settings_of("second", root)
    assert kept.policy.init == begun
    assert kept.sft.steps == 7
    other = more.model_copy(update={"sft": more.sft.model_copy(update={"data": (Path("others"),)})})
    with pytest.raises(UserError, match="learns from .*, not others"):
        sft_run(other, "test", root, True)


def test_an_early_interruption_keeps_what_was_learned(
    demos: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the first row of metrics too; a run that has learned nothing leaves no folder."""
    config = config_of(STATES, demos, measure_every=50).model_copy(update={"name": "early"})
    take = Imitator.step
    for last in (0, 3):

        def step(imitator: Imitator, last: int = last) -> float:
            if imitator.done == last:
                raise KeyboardInterrupt
            return take(imitator)

        monkeypatch.setattr(Imitator, "step", step)
        with pytest.raises(KeyboardInterrupt):
            sft_run(config, "test", tmp_path, False)
        assert (tmp_path / "early" / "checkpoints" / "latest").exists() == (last == 3)
        assert (tmp_path / "early").exists() == (last == 3)


def test_held_out_episodes_are_not_learned_from(demos: Dataset) -> None:
    config = config_of(STATES, demos, holdout=0.25)
    found = read_demonstrations(config, info_of(config))
    held_out = {int(demos.episode_of(found.held_out)[i]) for i in range(len(found.held_out))}
    learned = set(demos.episode_of(found.train).tolist())
    assert len(held_out) == EPISODES // 4
    assert not held_out & learned
    assert len(held_out | learned) == EPISODES


@pytest.mark.parametrize("datasets", [1, 2])
def test_micro_batches_change_memory_and_not_the_step(demos: Dataset, datasets: int) -> None:
    """Of a policy whose loss is drawn too, and whatever is in which dataset."""
    after = []
    for micro in (None, 5):
        optim = {**PIXELS["optim"], "micro_batch": micro}
        data, parts = [str(demos.folder)] * datasets, ["0-9", "10-23"] if datasets == 2 else []
        imitator = imitator_of(config_of({**PIXELS, "optim": optim}, demos, data=data, episodes=parts, lr=1e-4))
        imitator.step()
        after.append(torch.cat([p.detach().flatten() for p in imitator.policy.parameters()]))
    assert (after[0] - after[1]).abs().max() < 1e-5


def test_several_datasets_are_learned_from_as_one(demos: Dataset) -> None:
    config = config_of(STATES, demos, data=[str(demos.folder)] * 2, episodes=["0-9", "10-23"])
    found = read_demonstrations(config, info_of(config))
    assert len(found.train) + len(found.held_out) == len(demos)
    rows = np.array([0, len(demos), 1])
    parts = list(found.batches(rows, 2, ()))
    assert [places.tolist() for places, _ in parts] == [[0, 2], [1]]
    assert np.array_equal(parts[0][1].actions[0], parts[1][1].actions[0])


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"task": "tabletop/pick_and_place"}, "the actions in .* have 3 numbers, those of tabletop/pick_and_place 4"),
        ({"task": "tabletop/push"}, "was recorded in tabletop/reach, and the run is of tabletop/push"),
        ({"orientation": "rotated"}, "was recorded with env.orientation upright, the run has rotated"),
        ({"image_size": 64}, "was recorded with env.image_size 32, the run has 64"),
    ],
)
def test_demonstrations_of_something_else_are_refused(demos: Dataset, env: dict[str, Any], message: str) -> None:
    config = config_of({**PIXELS, "env": {**PIXELS["env"], **env}}, demos)
    with pytest.raises(UserError, match=message):
        read_demonstrations(config, info_of(config))


def test_demonstrations_must_be_named(demos: Dataset) -> None:
    config = config_of(STATES, demos, data=())
    with pytest.raises(UserError, match="--data FOLDER"):
        read_demonstrations(config, info_of(config))


def test_each_verb_goes_on_with_its_own_runs(warm: dict[str, Any], demos: Dataset) -> None:
    root = Path(warm["run"]).parent
    config = config_of(STATES, demos).model_copy(update={"name": "warm"})
    with pytest.raises(UserError, match="`embodied sft`.*--policy.init"):
        train_run(config, "test", root, True)


def test_a_beginning_that_is_none_or_of_another_policy(warm: dict[str, Any], demos: Dataset) -> None:
    root = Path(warm["run"]).parent
    config = config_of(STATES, demos).model_copy(update={"name": "other", "iterations": 1})
    absent = config.policy.model_copy(update={"init": Path("nowhere")})
    with pytest.raises(UserError, match="neither a run"):
        train_run(config.model_copy(update={"policy": absent}), "test", root, False)
    wider = config.policy.model_copy(update={"init": Path("warm"), "options": {"widths": [32]}})
    with pytest.raises(policies.PolicyError, match=r"architecture.widths is \[64, 64\], expected \[32\]"):
        train_run(config.model_copy(update={"policy": wider}), "test", root, False)
    assert not (root / "other").exists()


def test_the_command(warm: dict[str, Any], demos: Dataset, tmp_path: Path) -> None:
    from embodied.cli import main

    (tmp_path / "own.yaml").write_text(json.dumps({**STATES, "eval": {"episodes": 2, "videos": 0}}))
    options = ["--data", str(demos.folder), "--sft.steps", "10", "--runs-dir", str(tmp_path), "--name", "typed"]
    assert main(["sft", str(tmp_path / "own.yaml"), *options, "--json", str(tmp_path / "out.json")]) == 0
    assert json.loads((tmp_path / "out.json").read_text())["steps"] == 10
    assert main(["sft", str(tmp_path / "own.yaml"), *options]) == 2, "the run exists"


def test_a_policy_without_imitate_is_refused(demos: Dataset) -> None:
    settings = {**STATES, "policy": {"kind": "examples.own_policy:Linear"}}
    with pytest.raises(
        policies.PolicyError, match="own_policy:Linear cannot learn from demonstrations: it has no `imi"
    ):
        imitator_of(config_of(settings, demos))
