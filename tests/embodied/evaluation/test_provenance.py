"""What an evaluation says of where its policy comes from: its files, its statistics, the starts it was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from embodied.commands.evaluate import evaluate_run, subject_of
from embodied.commands.record import demonstration_episodes, record_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import HERE, PolicyConfig
from embodied.errors import UserError
from embodied.evaluation.evaluate import evaluation_folder
from embodied.evaluation.protocol import protocol_of
from embodied.evaluation.provenance import digest_of, lineage, recorded_starts, statistics_note, trained_sentence
from embodied.reporting.report import write_report
from embodied.run.saved_settings import settings_of
from policies.registry import policy_kind
from sim_farm.contract import EpisodeSpec
from sim_farm.episodes import start_seed
from tests.embodied.support import evaluations

run = evaluations.run  # the fixture

SPATIAL = "libero/libero_spatial/0"
EVERY = [EpisodeSpec(0, state) for state in range(50)]
PLAIN = PolicyConfig()


def as_run(source: Path, target: Path, **sections: Any) -> Path:
    """A run's folder with another configuration: its newest checkpoint."""
    shutil.copytree(source, target)
    data = yaml.safe_load((target / "config.yaml").read_text())
    for key, value in sections.items():
        data[key] = {**data[key], **value} if isinstance(value, dict) else value
    (target / "config.yaml").write_text(yaml.safe_dump(data))
    (newest,) = (path.parent for path in target.glob("checkpoints/0*/manifest.json"))
    return newest


def imitated(checkpoint: Path) -> None:
    """Make the checkpoint one of a run that learned from demonstrations."""
    state = json.loads((checkpoint / "state.json").read_text())
    (checkpoint / "state.json").write_text(json.dumps({**state, "stage": "sft"}))


# --- the starts that were trained on


def test_recorded_states_that_were_trained_on_are_counted(run: Path, tmp_path: Path) -> None:
    """All 50 of a run from all, none of the half that a run did not begin from, none of another task."""
    whole = as_run(run, tmp_path / "whole", env={"task": SPATIAL, "init_states": 50})
    starts = lineage(whole, PLAIN).starts(SPATIAL, EVERY)
    assert trained_sentence(starts, ()) == "50 of 50 initial states were trained on"
    half = lineage(as_run(run, tmp_path / "half", env={"task": SPATIAL, "init_states": "0-24"}), PLAIN)
    assert half.starts(SPATIAL, EVERY[25:]).as_data() == {
        "kind": "initial states", "trained": 0, "evaluated": 25, "known": True,
    }  # fmt: skip
    assert half.starts(SPATIAL, EVERY[20:]).trained == 5
    assert half.starts("libero/libero_spatial/1", EVERY).trained == 0
    assert lineage(as_run(run, tmp_path / "seeds", env={"task": SPATIAL}), PLAIN).starts(SPATIAL, EVERY).trained == 0


@pytest.mark.slow
def test_the_runs_that_a_run_began_from_count_too(run: Path, tmp_path: Path) -> None:
    further = [{"task": "libero/libero_spatial/1", "init_states": "40-44"}]
    first = as_run(run, tmp_path / "a", env={"task": SPATIAL, "init_states": "0-9"}, extra_tasks=further)
    second = as_run(run, tmp_path / "b", env={"task": SPATIAL, "init_states": "5-14"}, policy={"init": str(first)})
    found = lineage(second, PLAIN)
    assert found.starts(SPATIAL, EVERY).trained == 15 and not found.unknown
    assert found.starts("libero/libero_spatial/1", EVERY).trained == 5
    shutil.rmtree(tmp_path / "a")
    found = lineage(second, PLAIN)
    starts = found.starts(SPATIAL, EVERY)
    assert trained_sentence(starts, found.unknown) == (
        "at least 10 of 50 initial states were trained on: nothing is recorded of the starts that "
        f"{first} was trained on"
    )


def test_seeds_of_fixed_starts_are_counted(run: Path, tmp_path: Path) -> None:
    fixed = lineage(as_run(run, tmp_path / "fixed", env={"init_states": "seeds:16"}), PLAIN)
    seen = [EpisodeSpec(start_seed(number)) for number in range(12, 20)]
    assert fixed.starts("tabletop/reach", seen).as_data() == {
        "kind": "seeds", "trained": 4, "evaluated": 8, "known": True,
    }  # fmt: skip


def test_demonstrations_that_were_learned_from_count(run: Path, tmp_path: Path) -> None:
    config = with_settings(
        load_config("tabletop_scripted"), {"runtime.mode": "inline", "env.cameras": 0, "env.num_envs": 4}, "test"
    )
    record_run("tabletop_scripted", config, None, tmp_path / "demos", 4, False, tmp_path)
    learned = as_run(run, tmp_path / "sft", sft={"data": [str(tmp_path / "demos")]}, env={"init_states": 50})
    imitated(learned)
    found = lineage(learned, PLAIN)
    demonstrated = demonstration_episodes(config.seed, 6)
    starts = found.starts(config.env.task, demonstrated)
    assert (starts.trained, starts.evaluated, starts.known) == (4, 6, True)
    assert found.starts("tabletop/reach", EVERY).trained == 0, "env.init_states is of reinforcement"
    # As tools leave it that go through pandas: whole numbers as floats, NaN where there is none.
    (file,) = (tmp_path / "demos" / "meta" / "episodes").glob("*/*.parquet")
    rows = pq.read_table(file)
    floats = pa.array([7.0, float("nan"), 9.0, float("nan")])
    pq.write_table(rows.set_column(rows.column_names.index("init_state"), "init_state", floats), file)
    recorded = recorded_starts(tmp_path / "demos")
    assert recorded is not None and recorded.init_states == {7, 9} and len(recorded.seeds) == 2
    # What the run itself has written of the episodes that it used wins.
    record = {"folder": "demos", "task": SPATIAL, "init_states": [3, 4], "seeds": []}
    (tmp_path / "sft" / "data.json").write_text(json.dumps({"starts": [record]}))
    assert lineage(learned, PLAIN).starts(SPATIAL, EVERY).trained == 2
    (tmp_path / "sft" / "data.json").write_text(json.dumps({"starts": [{**record, "task": None}]}))
    assert lineage(learned, PLAIN).unknown == ("demos",)
    (tmp_path / "sft" / "data.json").write_text("[")
    (tmp_path / "demos" / "meta" / "embodied.json").unlink()
    assert lineage(learned, PLAIN).unknown == (str(tmp_path / "demos"),)


def test_what_others_have_trained_is_not_known(run: Path, tmp_path: Path) -> None:
    given = load_config("openvla_tiny").policy
    found = lineage(None, given)
    assert found.unknown == (given.architecture["checkpoint"],)
    sentence = trained_sentence(found.starts(SPATIAL, EVERY), found.unknown)
    assert sentence.startswith("it is not known how many of 50 initial states were trained on: nothing is recorded of")
    alone = tmp_path / "alone"
    shutil.copytree(as_run(run, tmp_path / "r"), alone)
    assert lineage(alone, PLAIN).unknown == (str(alone),), "a checkpoint in no run's folder"
    assert not lineage(None, PLAIN).unknown, "a new policy has learned nothing"


def test_a_result_says_what_was_trained_on_everywhere(run: Path, tmp_path: Path) -> None:
    target = tmp_path / "run"
    as_run(run, target, env={"init_states": "seeds:16"})
    settings = settings_of(str(target), tmp_path)
    evaluate_run(str(target), settings, None, tmp_path)
    result = json.loads((target / "eval.json").read_text())
    assert result["notes"][0] == "0 of 4 seeds were trained on"
    assert result["trained_on"] == result["tasks"][0]["trained_on"] == result["suites"][0]["trained_on"]
    table = (target / "eval.md").read_text()
    assert "Note: 0 of 4 seeds were trained on." in table and "|     0 of 4 |" in table
    assert "no training run sees" not in table
    page = write_report(target).read_text()
    assert "0 of 4 seeds were trained on." in page and "<td>0 of 4</td>" in page
    assert result["protocol"]["simulators"]["tabletop"].startswith("mujoco ")


# --- the files that a policy is made of


def tiny(folder: Path, **settings: Any) -> Any:
    return with_settings(load_config("openvla_tiny"), {"policy.options.checkpoint": str(folder), **settings}, "test")


def test_a_checkpoint_of_the_options_is_named_and_its_files_are_part_of_the_identity(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(HERE / "assets" / "openvla_tiny", folder)
    config = tiny(folder, **{"eval.episodes": 2, "env.num_envs": 2, "farm.groups": 1, "farm.physics_workers": 1,
                             "env.max_episode_steps": 8, "eval.videos": 0, "runtime.mode": "inline"})  # fmt: skip
    result = evaluate_run("openvla_tiny", config, None, tmp_path, into=tmp_path / "e")
    assert result["checkpoint"] == str(folder)
    digest = result["files"]["checkpoint"]["sha256"]
    assert digest == digest_of(folder)
    assert f"{folder} (sha256 {digest[:12]})" in (tmp_path / "e" / "eval.md").read_text()
    preprocessing = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").write_text(json.dumps({**preprocessing, "further": 1}))
    with pytest.raises(UserError, match="policy.files is .* asked for is"):
        with evaluation_folder(
            subject_of("openvla_tiny", config, None, tmp_path), protocol_of(config), tmp_path / "e", resume=True
        ):
            pass


def test_any_file_and_any_block_of_weights_changes_the_digest(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    (folder / "assets" / "libero").mkdir(parents=True)
    statistics, weights = folder / "assets" / "libero" / "norm_stats.json", folder / "model.safetensors"
    statistics.write_text("{}")
    weights.write_bytes(bytes(9 * 2**20))
    seen = {digest_of(folder)}
    for place in (0, 5 * 2**20, 9 * 2**20 - 1):
        with weights.open("r+b") as file:
            file.seek(place)
            file.write(b"x" * 20_000 if place == 5 * 2**20 else b"x")
        seen.add(digest_of(folder))
    statistics.write_text("{ }")
    seen.add(digest_of(folder))
    statistics.rename(folder / "norm_stats.json")
    seen.add(digest_of(folder))
    assert len(seen) == 6
    (folder / "README.md").write_text("about it")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "download").write_text("when")
    assert digest_of(folder) in seen


# --- the statistics


@pytest.mark.parametrize(
    ("name", "suite", "foreign"),
    [
        ("libero_spatial_no_noops", "libero/libero_spatial", False),
        ("libero_spatial", "libero/libero_goal", True),
        ("libero_10_no_noops", "libero/libero_10", False),
        ("libero_90", "libero/libero_10", True),
        ("physical-intelligence/libero", "libero/libero_goal", False),
        ("bridge_orig", "libero/libero_goal", True),
        ("libero_spatial", "maniskill", True),
        ("ManiSkill/PushCube", "maniskill", False),
        ("trossen", "tabletop", True),
    ],
)
def test_statistics_of_another_suite_are_reported(name: str, suite: str, foreign: bool) -> None:
    sentence = f"actions are un-normalised by the statistics of {name}, and {suite} is evaluated"
    assert statistics_note(name, [suite]) == (sentence if foreign else None)


def test_policies_name_their_statistics(tmp_path: Path) -> None:
    def of(kind: str, **architecture: Any) -> str | None:
        return policy_kind(kind).format.statistics_name(architecture)

    assert of("openvla_oft", unnorm_key="libero_spatial_no_noops", checkpoint="x") == "libero_spatial_no_noops"
    assert of("openvla", unnorm_key="demonstrations", checkpoint="x") is None
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "dataset_statistics.json").write_text('{"libero_goal": {}}')
    assert of("openvla_oft", checkpoint=str(tmp_path)) == "libero_goal"
    (tmp_path / "train_config.json").write_text('{"dataset": {"repo_id": "somebody/libero"}}')
    assert of("pi0", checkpoint=str(tmp_path)) == "somebody/libero"
    asset = tmp_path / "assets" / "physical-intelligence" / "libero"
    asset.mkdir(parents=True)
    (asset / "norm_stats.json").write_text("{}")
    assert of("pi0", checkpoint=str(tmp_path)) == "physical-intelligence/libero"
    assert of("pi0", checkpoint=str(tmp_path), asset="trossen") == "trossen"
    assert of("pi0", checkpoint=str(tmp_path), asset="demonstrations") is None
    assert of("gaussian_mlp") is None
