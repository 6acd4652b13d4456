"""What is understood of a dataset before it is learned from: what cannot be right is refused, what is odd is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embodied.cli import main
from embodied.config.files import parse_config
from embodied.config.schema import Config, SFTConfig
from embodied.demonstrations import Dataset
from embodied.demonstrations.findings import Environment, dimension, observed
from embodied.demonstrations.inspection import Inspection, inspected, text
from embodied.demonstrations.layout import Feature
from embodied.demonstrations.mixture import (
    SHIPPED,
    Demonstrations,
    Needed,
    fitting,
    numbers_in,
    open_sources,
    option,
    renames,
)
from embodied.errors import UserError
from embodied.training.sft import imitate, read_demonstrations
from embodied.workflows.run_spec import task_spec
from sim_farm.client.episode_replay import Replayer
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.registry import make_physics
from tests.embodied.demonstrations.examples import FOREIGN, write
from tests.embodied.demonstrations.test_fuzzed_datasets import as_parquet
from tests.embodied.support.expert import record_reach
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

EPISODES = 8
SETTINGS: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 2, "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images", "instruction"],
        "options": {"encoder": "cnn", "features": 16, "widths": [16]},
    },
    "sft": {"steps": 3, "batch": 8},
    "eval": {"episodes": 2, "videos": 0},
    "runtime": {"mode": "inline"},
}
GRASP = TaskSpec("tabletop/pick_and_place", cameras=1, image_size=32, max_episode_steps=40)


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", EPISODES).folder


@pytest.fixture(scope="module")
def grasps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes in which the arm and, for five steps at a time, the gripper do anything, without provenance."""
    random, replayer, replays = np.random.default_rng(0), Replayer(GRASP), []
    for seed in range(4):
        actions = random.uniform(-1, 1, (30, 4)).astype(np.float32)
        actions[:, 3] = np.repeat(random.choice([-1, 1], 6), 5)
        replays.append((EpisodeSpec(seed), replayer.replay(EpisodeSpec(seed), actions)))
    physics = make_physics(GRASP)
    physics.close()
    folder = tmp_path_factory.mktemp("grasps") / "grasps"
    write(folder, physics.info, replays)
    (folder / "meta/embodied.json").unlink()
    return folder


@pytest.fixture(scope="module")
def reach() -> Environment:
    return observed(task_spec(parse_config(SETTINGS, "test")))


@pytest.fixture(scope="module")
def grasp() -> Environment:
    return observed(GRASP)


def foreign(source: Path, target: Path, info: Mapping[str, Any] | None = None) -> Path:
    """The dataset as another project's, with other entries of info.json."""
    shutil.copytree(source, target)
    (target / "meta/embodied.json").unlink(missing_ok=True)
    path = target / "meta/info.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(info or {})))
    return target


def with_column(folder: Path, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """The dataset with other numbers in a column of vectors."""
    for path in (folder / "data").glob("*/*.parquet"):
        table = pq.ParquetFile(path).read()
        values = change(np.array(table[name].to_pylist(), np.float32))
        column = pa.array(values.tolist(), pa.list_(pa.float32(), values.shape[1]))
        pq.write_table(table.set_column(table.column_names.index(name), name, column), path)
    info = json.loads((folder / "meta/info.json").read_text())
    info["features"][name]["shape"] = [values.shape[1]]
    (folder / "meta/info.json").write_text(json.dumps(info))
    return folder


def without(folder: Path, name: str) -> Path:
    """The dataset without a feature."""
    info = json.loads((folder / "meta/info.json").read_text())
    del info["features"][name]
    (folder / "meta/info.json").write_text(json.dumps(info))
    for path in (folder / "data").glob("*/*.parquet"):
        table = pq.ParquetFile(path).read()
        if name in table.column_names:
            pq.write_table(table.drop_columns([name]), path)
    return folder


def called(folder: Path, names: Mapping[str, str]) -> Path:
    """The dataset with its features called otherwise."""
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    info["features"] = {names.get(name, name): entry for name, entry in info["features"].items()}
    path.write_text(json.dumps(info))
    for old, new in names.items():
        if (folder / "videos" / old).exists():
            (folder / "videos" / old).rename(folder / "videos" / new)
    for path in [*(folder / "meta/episodes").glob("*/*.parquet"), *(folder / "data").glob("*/*.parquet")]:
        table = pq.ParquetFile(path).read()
        columns = table.column_names
        for old, new in names.items():
            columns = [new if c == old else c.replace(f"videos/{old}/", f"videos/{new}/") for c in columns]
        pq.write_table(table.rename_columns(columns), path)
    return folder


def config_of(*folders: Path, settings: Mapping[str, Any] = SETTINGS, **sft: Any) -> Config:
    data = {"data": [str(folder) for folder in folders], **sft}
    return parse_config({**settings, "sft": {**settings["sft"], **data}}, "test")


def understood(
    environment: Environment, *folders: Path, settings: Mapping[str, Any] = SETTINGS, **sft: Any
) -> Inspection:
    config = config_of(*folders, settings=settings, **sft)
    return inspected(read_demonstrations(config, environment.info), config, environment)


def findings_of(found: Inspection) -> str:
    return " | ".join(finding.text for finding in found.findings)


def test_our_own_recording_is_as_it_should_be(ours: Path, reach: Environment) -> None:
    found = understood(reach, ours)
    assert not found.findings
    (facts,) = found.datasets
    assert sorted(facts.learned_from + facts.held_out) == list(range(EPISODES))
    assert facts.solved == EPISODES
    assert [d.environment for d in facts.action] == [(-1, 1)] * 3
    assert [d.beyond for d in facts.action] == [0, 0, 0]
    actions = Dataset(ours).column("action")
    assert [d.high for d in facts.action] == actions.max(0).tolist()
    shown = text(found)
    for part in (
        *("front 32 x 32; env.image_size: 32", "20 frames per second; env steps per second: 20", "-1 to 1"),
        "; tabletop/reach says: '",  # a run of several tasks has datasets of the others too
    ):
        assert part in shown


@pytest.mark.parametrize("factor", [50.0, 180 / np.pi, 2.5])
def test_actions_in_other_units_are_refused_until_one_insists(
    ours: Path, reach: Environment, tmp_path: Path, factor: float
) -> None:
    folder = with_column(foreign(ours, tmp_path / "large"), "action", lambda values: values * factor)
    found = understood(reach, folder)
    with pytest.raises(UserError, match=r"dimension 0 has .* takes -1 to 1 .*% beyond.*--sft.insist actions"):
        found.raise_refusals()
    insisted = understood(reach, folder, insist=["actions"])
    insisted.raise_refusals()
    assert "actions are not those of" in " ".join(finding.text for finding in insisted.warnings)


def test_nothing_is_written_where_the_data_is_refused(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = with_column(foreign(ours, tmp_path / "large"), "action", lambda values: 50 * values)
    with pytest.raises(UserError, match="--sft.insist actions"):
        imitate(config_of(folder), reach.info, tmp_path / "run", None)
    assert not (tmp_path / "run").exists()
    imitate(config_of(folder, insist=["actions"]), reach.info, tmp_path / "run", None)
    data = json.loads((tmp_path / "run/data.json").read_text())
    assert data["findings"][0]["check"] == "actions"
    assert not data["findings"][0]["refused"]
    assert data["statistics"]
    assert len(data["datasets"][0]["learned_from"]) == EPISODES - 1
    assert [(one["folder"], one["task"]) for one in data["starts"]] == [(str(folder), None)]


def test_tiny_actions_are_odd(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = with_column(foreign(ours, tmp_path / "tiny"), "action", lambda values: values / 50)
    assert "of the range that tabletop/reach takes: are they in other units" in findings_of(understood(reach, folder))


def test_a_policy_of_ours_may_say_more_than_the_environment_takes(
    ours: Path, reach: Environment, tmp_path: Path
) -> None:
    folder = with_column(Path(shutil.copytree(ours, tmp_path / "ours")), "action", lambda values: 4 * values)
    found = understood(reach, folder)
    assert not found.refused
    assert "clipped by the environment" in findings_of(found)


@pytest.mark.parametrize(
    ("change", "option", "converted"),
    [
        (lambda grip: (grip + 1) / 2, "from_0_1", True),
        (lambda grip: (1 - grip) / 2, "from_1_0", True),
        (lambda grip: -grip, "from_plus_minus", False),
    ],
)
def test_a_gripper_in_another_convention_names_what_mends_it(
    grasps: Path, grasp: Environment, tmp_path: Path, change: Callable[[Any], Any], option: str, converted: bool
) -> None:
    """0 and 1 are refused; a sign that the robot's state contradicts is a warning. What is named mends it."""

    def changed(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:, :3], change(values[:, 3:])], 1)

    settings = {**SETTINGS, "env": {**SETTINGS["env"], "task": GRASP.name}}
    folder = with_column(shutil.copytree(grasps, tmp_path / "other"), "action", changed)
    found = understood(grasp, folder, settings=settings)
    assert bool(found.refused) == converted
    assert f"--sft.gripper {option}" in findings_of(found)
    if converted:
        with pytest.raises(UserError, match="--sft.insist gripper"):
            found.raise_refusals()
    config = config_of(folder, settings=settings, gripper=option)
    mended = read_demonstrations(config, grasp.info)
    assert "gripper" not in findings_of(inspected(mended, config, grasp))
    original = Dataset(grasps)
    assert np.array_equal(mended.column("action"), original.column("action")[mended.train])
    for _, batch in mended.batches(mended.train[:4], 2, ()):
        assert set(np.unique(batch.actions[..., -1])) <= {-1, 1}


def test_a_gripper_in_other_units_is_refused_and_one_that_never_moves_is_reported(
    grasps: Path, grasp: Environment, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "env": {**SETTINGS["env"], "task": GRASP.name}}

    def fingers(values: np.ndarray) -> np.ndarray:
        return np.concatenate([values[:, :3], 0.02 * (values[:, 3:] + 1)], 1)

    widths = with_column(shutil.copytree(grasps, tmp_path / "widths"), "action", fingers)
    with pytest.raises(UserError, match=r"is 0 or 0\.04, and .* takes -1 or 1: convert the column"):
        understood(grasp, widths, settings=settings).raise_refusals()
    closed = with_column(shutil.copytree(grasps, tmp_path / "closed"), "action", lambda v: np.minimum(v, [9, 9, 9, -1]))
    found = understood(grasp, closed, settings=settings)
    assert not found.refused and "is always -1: the policy learns neither to open nor to close" in findings_of(found)


def test_a_gripper_of_two_ends_where_the_environment_takes_0_to_1(grasps: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "env": {**SETTINGS["env"], "task": GRASP.name, "gripper": "inverted"}}
    environment = observed(task_spec(parse_config(settings, "test")))
    assert "--env.gripper simulator" in findings_of(understood(environment, grasps, settings=settings))


def test_a_rate_that_is_not_the_environments_is_refused(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = foreign(ours, tmp_path / "slow")
    path = folder / "meta/info.json"
    path.write_text(path.read_text().replace('"fps": 20', '"fps": 10').replace('"fps": 20.0', '"fps": 10.0'))
    for data in (folder / "data").glob("*/*.parquet"):
        table = pq.ParquetFile(data).read()
        slow = pa.array((table["frame_index"].to_numpy() / 10).astype(np.float32))
        pq.write_table(table.set_column(table.column_names.index("timestamp"), "timestamp", slow), data)
    states = {**SETTINGS, "policy": {"kind": "gaussian_mlp", "reads": ["state"]}}
    found = understood(reach, folder, settings=states)
    with pytest.raises(UserError, match=r"10 frames per second, and .* 20 env steps.*--sft.insist fps"):
        found.raise_refusals()
    understood(reach, folder, settings=states, insist=["fps"]).raise_refusals()


def test_absolute_targets_where_differences_are_taken_are_refused(
    ours: Path, reach: Environment, tmp_path: Path
) -> None:
    folder = foreign(ours, tmp_path / "absolute")
    state = Dataset(folder).column("observation.state")[:, :3]
    with_column(folder, "action", lambda values: state[np.minimum(np.arange(len(values)) + 1, len(values) - 1)])
    with pytest.raises(UserError, match="absolute targets, and ee_delta_pos takes differences"):
        understood(reach, folder).raise_refusals()


@pytest.mark.parametrize("camera", ["front", "side"])
def test_frames_that_stand_on_their_heads_are_odd(tmp_path: Path, camera: str) -> None:
    """What no number shows: the environment's own pictures are compared, under another project's names."""
    env = {**SETTINGS["env"], "cameras": [camera], "orientation": "rotated"}
    settings = {**SETTINGS, "env": env}
    turned = task_spec(parse_config(settings, "test"))
    replayer, physics = Replayer(turned), make_physics(turned)
    physics.close()
    episodes = [EpisodeSpec(seed) for seed in range(10, 16)]
    actions = np.zeros((4, 3), np.float32)
    write(tmp_path / "turned", physics.info, [(episode, replayer.replay(episode, actions)) for episode in episodes])
    (tmp_path / "turned/meta/embodied.json").unlink()
    upright = {**SETTINGS, "env": {**env, "orientation": "upright"}}
    environment = observed(task_spec(parse_config(upright, "test")), draw=True)
    assert "--env.orientation rotated" in findings_of(understood(environment, tmp_path / "turned", settings=upright))
    alike = observed(turned, draw=True)
    assert "correlation" not in findings_of(understood(alike, tmp_path / "turned", settings=settings))
    (tmp_path / "turned/meta/import.json").write_text('{"conventions": {"orientation": "upright"}}')
    message = findings_of(understood(alike, tmp_path / "turned", settings=settings))
    assert (
        "frames of meta/import.json are upright, and env.orientation is rotated: --env.orientation upright" in message
    )


def test_cameras_that_have_changed_places_are_odd(tmp_path: Path) -> None:
    settings = {**SETTINGS, "env": {**SETTINGS["env"], "cameras": ["front", "wrist"]}}
    task = task_spec(parse_config(settings, "test"))
    replayer, environment = Replayer(task), observed(task, draw=True)
    episodes = [
        (EpisodeSpec(seed), replayer.replay(EpisodeSpec(seed), np.zeros((4, 3), np.float32))) for seed in (9, 8, 7)
    ]
    write(tmp_path / "both", environment.info, episodes)
    (tmp_path / "both/meta/embodied.json").unlink()
    assert "look like" not in findings_of(understood(environment, tmp_path / "both", settings=settings))
    front, wrist = "observation.images.front", "observation.images.wrist"
    swapped = findings_of(
        understood(environment, tmp_path / "both", settings=settings, features={front: wrist, wrist: front})
    )
    assert "frames of front look like the environment's wrist" in swapped


def test_states_of_another_robot_are_odd(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = with_column(foreign(ours, tmp_path / "far"), "observation.state", lambda values: values + 3)
    assert "is not where the environment's episodes begin" in findings_of(understood(reach, folder))


def test_instructions_that_the_task_never_gives_are_odd(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = foreign(ours, tmp_path / "told")
    path = folder / "meta/tasks.parquet"
    table = pq.ParquetFile(path).read()
    pq.write_table(table.set_column(1, "task", pa.array(["wave"] * len(table))), path)
    assert "no instruction is 'move the gripper to the green ball'" in findings_of(understood(reach, folder))


def test_dimensions_that_explode_when_they_are_normalised_are_named(
    ours: Path, reach: Environment, tmp_path: Path
) -> None:
    """One that is noise around a value, one that hardly ever moves; a constant one is harmless."""
    random = np.random.default_rng(0)

    def changed(values: np.ndarray) -> np.ndarray:
        values[:, 0] = 0.3 + 1e-7 * random.standard_normal(len(values))
        values[:, 1] = 0.5
        return values

    found = understood(reach, with_column(foreign(ours, tmp_path / "still"), "action", changed))
    (warning,) = [finding.text for finding in found.warnings if ": action: " in finding.text]
    assert "dimension 0 varies by" in warning
    assert "dimension 1 " not in warning
    rare = np.where(np.arange(1000) == 3, 0.9, 1e-3 * random.standard_normal(1000)).astype(np.float32)
    assert "nearly constant: 98% lie in" in dimension("x", rare, None).remark
    assert not dimension("x", random.standard_normal(1000).astype(np.float32), None).remark


def test_a_camera_of_another_name_is_refused_with_the_mapping_that_fits(
    ours: Path, reach: Environment, tmp_path: Path
) -> None:
    names = {"observation.images.front": "observation.images.image"}
    folder = called(foreign(ours, tmp_path / "other"), names)
    with pytest.raises(UserError) as error:
        understood(reach, folder)
    command = "--sft.features '{observation.images.image: observation.images.front}'"
    assert str(error.value).endswith(command)
    found = understood(reach, folder, features={"observation.images.image": "observation.images.front"})
    assert not found.refused
    rows = np.array([0, 3])
    mapped = read_demonstrations(
        config_of(folder, features={"observation.images.image": "observation.images.front"}), reach.info
    )
    frames = next(iter(mapped.batches(rows, 1, ("front",))))[1].frames["front"]
    assert np.array_equal(frames, Dataset(ours).frames("front", rows))


def test_openpis_keys(ours: Path, reach: Environment, tmp_path: Path) -> None:
    ours_by_theirs = {"image": "observation.images.front", "state": "observation.state", "actions": "action"}
    folder = called(foreign(ours, tmp_path / "openpi"), {ours: theirs for theirs, ours in ours_by_theirs.items()})
    with pytest.raises(
        UserError, match=r"--sft.features '\{actions: action, image: .*front, state: observation.state\}'"
    ):
        understood(reach, folder)
    assert not understood(reach, folder, features=ours_by_theirs).refused


@pytest.mark.parametrize("layout", SHIPPED)
def test_shipped_mappings_are_found_by_what_they_have(layout: str) -> None:
    shipped = SHIPPED[layout]
    camera, vector = Feature("video", (256, 256, 3)), Feature("float32", (7,))
    features = {key: camera if "image" in key else vector for key in shipped.names}
    features |= {"observation.state": vector, "action": vector} if "action" not in shipped.names.values() else {}
    needed = [Needed(name, 0 if "images" in name else 7) for name in dict.fromkeys(shipped.names.values())]
    assert fitting(features, needed) == layout
    if layout != "lerobot-libero":  # which has two names for one camera, of different tools
        assert renames(layout, features, "it") == shipped.names


@pytest.mark.parametrize(
    ("features", "message"),
    [
        ("lerobot-liberos", "no shipped mapping; did you mean lerobot-libero"),
        ("openpi-libero", "has none of its keys"),
        ({"observation.images.image": "observation.images.front"}, "has no 'observation.images.image'; did you mean"),
        ({"observation.images.front": "front"}, "is no name of ours"),
        ({"observation.images.top": "observation.state", "observation.state": "observation.images.top"}, "has no"),
        ({"observation.environment_state": "observation.state"}, "would have observation.state twice"),
        ("{image: [1]}", "valid"),
    ],
)
def test_mappings_that_are_none(ours: Path, reach: Environment, features: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        understood(reach, ours, features=features)


def test_what_a_dataset_lacks_is_reported(ours: Path, reach: Environment, tmp_path: Path) -> None:
    for name, message in (
        ("action", "has no action, which"),
        ("observation.state", "has no observation.state, which"),
        ("observation.images.front", "has no observation.images.front, which"),
    ):
        with pytest.raises(UserError, match=message):
            understood(reach, without(foreign(ours, tmp_path / name), name))
    short = with_column(foreign(ours, tmp_path / "short"), "observation.state", lambda values: values[:, :8])
    with pytest.raises(UserError, match="observation.state in .* has 8 numbers, that of tabletop/reach 10"):
        understood(reach, short)


def test_frames_of_another_size(ours: Path, tmp_path: Path) -> None:
    """A network that is made for one size refuses others; the way on is named."""
    settings = {**SETTINGS, "env": {**SETTINGS["env"], "image_size": 64}}
    config = config_of(foreign(ours, tmp_path / "other"), settings=settings)
    physics = make_physics(task_spec(config))
    physics.close()
    with pytest.raises(UserError, match="front are 32 x 32, .* made for 64 x 64 .*--env.image-size 32"):
        imitate(config, physics.info, tmp_path / "run", None)


# --- which episodes


def test_episodes_by_number_and_range(ours: Path, reach: Environment) -> None:
    dataset = Dataset(ours)
    assert numbers_in("0-2,5", dataset) == [0, 1, 2, 5]
    assert numbers_in("all", dataset) == list(range(EPISODES))
    for wrong in ("0-99", "5-2", "-1", "one", "", "0:4"):
        with pytest.raises(UserError, match="sft.episodes"):
            numbers_in(wrong, dataset)
    (facts,) = understood(reach, ours, episodes="1-4,7", holdout=0.2).datasets
    assert sorted(facts.learned_from + facts.held_out) == [1, 2, 3, 4, 7]
    assert len(facts.held_out) == 1


def test_only_solved_episodes(ours: Path, reach: Environment, tmp_path: Path) -> None:
    failed = shutil.copytree(ours, tmp_path / "failed")
    for path in (failed / "meta/episodes").glob("*/*.parquet"):
        table = pq.ParquetFile(path).read()
        outcome = pa.array([number not in (0, 3) for number in range(len(table))])
        pq.write_table(table.set_column(table.column_names.index("success"), "success", outcome), path)
    (facts,) = understood(reach, failed, episodes=("solved",)).datasets
    assert sorted(facts.learned_from + facts.held_out) == [1, 2, 4, 5, 6, 7]
    (facts,) = understood(reach, failed, episodes="solved:0-2,5").datasets
    assert sorted(facts.learned_from + facts.held_out) == [1, 2, 5]
    with pytest.raises(UserError, match="none of the 1 episodes of .* was solved"):
        understood(reach, failed, episodes="solved:3")
    unlabelled = without(foreign(failed, tmp_path / "untold"), "next.success")
    for path in (unlabelled / "meta/episodes").glob("*/*.parquet"):
        pq.write_table(pq.ParquetFile(path).read().drop_columns(["success"]), path)
    with pytest.raises(UserError, match="does not record which episodes were solved"):
        understood(reach, unlabelled, episodes=("solved",))


def test_the_same_data_twice_is_refused_under_any_name(ours: Path, reach: Environment, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(ours)
    copied = foreign(ours, tmp_path / "copied")
    for other in (ours, tmp_path / "link", ours / "../demos", copied):
        with pytest.raises(UserError, match="held out of one would be learned from"):
            understood(reach, ours, other)
    assert len(understood(reach, ours, copied, episodes=["0-3", "4-7"]).datasets) == 2


def test_copies_of_held_out_episodes_are_not_learned_from(ours: Path, reach: Environment) -> None:
    found = read_demonstrations(config_of(ours, ours, insist=["repeated"], holdout=0.3), reach.info)
    columns = np.concatenate([dataset.column("action") for dataset in found.datasets])
    held_out = {row.tobytes() for row in columns[found.held_out]}
    assert not held_out & {row.tobytes() for row in columns[found.train]}
    assert all(source.held_out for source in found.sources)
    assert sum(source.copies for source in found.sources) > 0
    assert "copies of held-out ones" in findings_of(inspected(found, None, None))


def test_each_dataset_is_represented_among_the_held_out(ours: Path, reach: Environment) -> None:
    found = read_demonstrations(config_of(ours, ours, episodes=["0-1", "2-7"], holdout=0.2), reach.info)
    assert [len(source.held_out) for source in found.sources] == [1, 1]


def test_a_policy_that_reads_the_instruction_alone_learns_where_it_decides(ours: Path, reach: Environment) -> None:
    """From the first row of an episode on, in steps of a chunk; other policies learn at every env step."""
    every, blind, telling = (
        read_demonstrations(
            config_of(ours, settings={**SETTINGS, "policy": {**SETTINGS["policy"], "chunk": 4, **reads}}, holdout=0.3),
            reach.info,
        )
        for reads in ({}, {"reads": ["instruction"]}, {"reads": ["instruction", "state"]})
    )
    (source,) = blind.sources
    episodes = [source.dataset.episodes[number] for number in source.train]
    assert blind.train.tolist() == [row for e in episodes for row in range(e.begin, e.end, 4)]
    assert every.train.tolist() == telling.train.tolist() == [row for e in episodes for row in range(e.begin, e.end)]
    assert len(blind.held_out) < len(every.held_out) and np.array_equal(blind.column("action"), every.column("action"))


def test_weights_say_how_often_a_dataset_is_drawn(ours: Path, reach: Environment, tmp_path: Path) -> None:
    config = config_of(ours, ours, episodes=["0-1", "2-7"], weights=[3, 1])
    found = read_demonstrations(config, reach.info)
    chances = found.chances
    assert chances is not None
    first = found.train < len(Dataset(ours))
    assert chances[first].sum() == pytest.approx(0.75)
    assert chances.sum() == pytest.approx(1)
    assert [facts.share for facts in inspected(found, config, reach).datasets] == [0.75, 0.25]
    assert imitate(config, reach.info, tmp_path / "run", None)["steps"] == 3
    with pytest.raises(UserError, match="sft.weights has 1 numbers and sft.data 2"):
        read_demonstrations(config_of(ours, ours, episodes=["0-1", "2-7"], weights=[3]), reach.info)


@few_or_many(10)
def test_damaged_datasets(cases: range, tmp_path: Path) -> None:
    def looked_at(folder: Path) -> None:
        sources = open_sources(SFTConfig(data=(folder,)), 0)
        json.dumps(inspected(Demonstrations(sources), None, None).as_data())

    damaged = Damaged(FOREIGN, tmp_path / "data", {".parquet": as_parquet})
    holds(cases, damaged, looked_at, (UserError,))


# --- the command


@pytest.mark.slow
def test_inspect_draws_a_recording(ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, result = tmp_path / "out", tmp_path / "out.json"
    assert main(["inspect", str(ours), "--out", str(out), "--json", str(result)]) == 0
    assert "move the gripper to the green ball" in capsys.readouterr().out
    data = json.loads(result.read_text())
    assert data["task"] == "tabletop/reach"
    assert data["findings"] == []
    sheet = Image.open(out / "contact_sheet.png")
    assert np.asarray(sheet).std() > 20
    assert Image.open(out / "actions.png").width > 300
    assert json.loads((out / "data.json").read_text())["datasets"][0]["episodes"] == EPISODES


@pytest.mark.slow
def test_inspect_compares_others_with_a_configuration(
    ours: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(json.dumps(SETTINGS))
    folder = called(foreign(ours, tmp_path / "other"), {"observation.images.front": "observation.images.image"})
    plain = ["inspect", str(folder), "--out", str(tmp_path / "out")]
    assert main(plain) == 0
    assert "compared with nothing" in capsys.readouterr().out
    compared = [*plain, "--config", str(tmp_path / "own.yaml")]
    assert main(compared) == 2
    assert "--sft.features" in capsys.readouterr().err
    entry = {"observation.images.image": "observation.images.front"}
    assert option(entry) == "--sft.features '{observation.images.image: observation.images.front}'"
    assert main([*compared, "--sft.features", option(entry).partition(" ")[2].strip("'")]) == 0


def test_an_episode_that_is_left_out_need_not_be_finite(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = foreign(ours, tmp_path / "odd")
    first = Dataset(folder).episodes[0].length

    def spoiled(values: np.ndarray) -> np.ndarray:
        values[: first - 1, 0] = np.nan
        return values

    with_column(folder, "action", spoiled)
    with pytest.raises(UserError, match=r"not finite, first in row 0 \(episode 0\): leave the episode out"):
        read_demonstrations(config_of(folder), reach.info)
    left = read_demonstrations(config_of(folder, episodes=["1-5"]), reach.info)
    assert np.isfinite(left.column("action")).all()


def test_few_rows_do_not_refuse_a_gripper(
    ours: Path, grasps: Path, reach: Environment, grasp: Environment, tmp_path: Path
) -> None:
    """Of ours the conventions are recorded; of others both ends have to be seen often enough."""

    def ended(source: Path, name: str, rows: int) -> Path:
        """The last action is 1 in so many rows, and 0 in the others."""

        def change(actions: np.ndarray) -> np.ndarray:
            return np.column_stack([actions[:, :-1], np.arange(len(actions)) < rows]).astype(np.float32)

        return with_column(Path(shutil.copytree(source, tmp_path / name)), "action", change)

    settings = {**SETTINGS, "env": {**SETTINGS["env"], "task": GRASP.name}}
    assert not understood(reach, ended(ours, "ours", 20)).refused
    assert not understood(grasp, ended(grasps, "once", 1), settings=settings).refused
    assert [f.check for f in understood(grasp, ended(grasps, "often", 60), settings=settings).refused] == ["gripper"]
