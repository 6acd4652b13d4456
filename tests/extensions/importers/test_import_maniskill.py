"""Recordings of other projects: what reproduces is written, what does not is left out by name."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied import cli
from embodied.config.schema import RuntimeConfig
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied_importers.command import run as import_recording
from embodied_importers.formats import ImportRequest, Observations, convertible, format_of, moving
from sim_farm.client.episode_replay import Replayer
from sim_farm.contract import FarmError

RECORDINGS = Path(__file__).parent / "recordings"
SOLVED, UNSOLVED = "traj_0", "traj_1"
"""Episodes of `pushcube.h5`."""


def imported(source: Path, out: Path, **settings: Any) -> dict[str, Any]:
    """The result of `embodied import`, without pictures."""
    observations = Observations(cameras=0, **settings.pop("env", {}))
    return import_recording(
        ImportRequest(source, out=out, env=observations, runtime=RuntimeConfig(mode="inline"), **settings)
    )


def edited(folder: Path, change: Callable[[h5py.File, dict[str, Any]], object], suffix: str = ".h5") -> Path:
    """A copy of ManiSkill's recording, changed by `change(file, json)`."""
    path = folder / f"edited{suffix}"
    shutil.copy(RECORDINGS / "pushcube.h5", path)
    metadata = json.loads((RECORDINGS / "pushcube.json").read_text())
    with h5py.File(path, "r+") as file:
        change(file, metadata)
    path.with_suffix(".json").write_text(json.dumps(metadata))
    return path


def libero(folder: Path, change: Callable[[h5py.Group], None] = lambda data: None) -> Path:
    """LIBERO's demonstration, whose group `data` is changed by `change`."""
    path = folder / "demo.hdf5"
    path.write_bytes(gzip.decompress((RECORDINGS / "libero_spatial.hdf5.gz").read_bytes()))
    with h5py.File(path, "r+") as file:
        change(file["data"])
    return path


def refused(source: Path, out: Path, **settings: Any) -> str:
    """The message that refuses to import it; nothing is left in `out`."""
    with pytest.raises((UserError, FarmError)) as caught:
        imported(source, out, **settings)
    assert not out.exists() and not list(out.parent.glob(".*.partial"))
    return str(caught.value)


@pytest.mark.slow
def test_maniskills_recording_comes_out_bit_for_bit(tmp_path: Path) -> None:
    """From the command line, drawn anew, and replayed from its seeds by what the dataset says."""
    out, summary = tmp_path / "out", tmp_path / "said.json"
    command = (
        f"import {RECORDINGS / 'pushcube.h5'} --out {out} --env.image-size 32 --runtime.mode inline --json {summary}"
    )
    assert cli.main(command.split()) == 0
    result, dataset = json.loads(summary.read_text()), Dataset(out)
    assert (result["reproduced"], result["reproduced_exactly"], result["largest_deviation"]) == (2, 2, 0)
    assert dataset.batch([0, 31]).frames["base_camera"].shape == (2, 32, 32, 3)
    provenance = json.loads((out / "meta/embodied.json").read_text())
    assert provenance["task"]["control_mode"] == "pd_ee_delta_pos" and len(provenance["sha256"]) == 64
    assert provenance["recorded_episodes"] == [SOLVED, UNSOLVED] and provenance["left_out"] == {}
    with h5py.File(RECORDINGS / "pushcube.h5") as file:
        for episode, name in zip(dataset.episodes, (SOLVED, UNSOLVED), strict=True):
            rows = slice(episode.begin, episode.end)
            assert np.array_equal(dataset.column("action")[rows], file[name]["actions"][()])
            assert np.array_equal(dataset.column("next.success")[rows], file[name]["success"][()])
    first = dataset.episodes[0]
    assert first.spec is not None and dataset.task is not None
    replayer = Replayer(dataset.task)
    replay = replayer.replay(first.spec, dataset.column("action")[: first.end])
    replayer.close()
    assert np.array_equal(replay.state, dataset.column("observation.environment_state")[: replay.steps])


def test_idle_actions_and_failures_are_left_out(tmp_path: Path) -> None:
    result = imported(RECORDINGS / "pushcube.h5", tmp_path / "out", drop_idle=True, only_successes=True)
    assert (result["episodes"], result["env_steps"], result["idle_steps_left_out"]) == (1, 17, 5)
    assert result["left_out"] == {UNSOLVED: "it does not end solved"} and result["not_reproduced"] == 0
    actions = Dataset(tmp_path / "out").column("action")
    assert np.linalg.norm(actions[:, :-1], axis=1).min() > 1e-4


def test_what_is_idle_is_as_published() -> None:
    """The gripper's element is compared with the action that was kept last, and not at all at the beginning."""
    move, still, close = [1, 0, -1], [0, 5e-5, -1], [0, 0, 1]
    actions = np.array([still, move, still, close, close, still, still], np.float32)
    assert moving(actions).tolist() == [False, True, False, True, False, True, False]


@pytest.mark.slow
def test_edited_actions_do_not_reproduce(tmp_path: Path) -> None:
    def edit(file: h5py.File, metadata: dict[str, Any]) -> None:
        file[f"{SOLVED}/actions"][2, 0] += 0.5

    source = edited(tmp_path, edit)
    result = imported(source, tmp_path / "out")
    assert (result["reproduced"], result["not_reproduced"], result["episodes"]) == (1, 1, 1)
    assert result["left_out"][SOLVED].startswith("step 2: a state is 0.")
    assert "none of the 1 episodes" in refused(source, tmp_path / "none", episodes=("0",))
    assert imported(source, tmp_path / "wide", tolerance=1.0, episodes=("1",))["recorded_episodes"] == [UNSOLVED]


@pytest.mark.slow
def test_another_outcome_does_not_reproduce(tmp_path: Path) -> None:
    def edit(file: h5py.File, metadata: dict[str, Any]) -> None:
        file[f"{SOLVED}/success"][-1] = False

    result = imported(edited(tmp_path, edit), tmp_path / "out")
    assert result["left_out"] == {SOLVED: "step 21: recorded as not solved, replayed as solved"}


def test_a_recorded_state_that_no_seed_leads_to(tmp_path: Path) -> None:
    """It begins there all the same, and the dataset names no seed."""

    def edit(file: h5py.File, metadata: dict[str, Any]) -> None:
        for entry in metadata["episodes"]:
            entry["episode_seed"] = entry["reset_kwargs"]["seed"] = 99

    result = imported(edited(tmp_path, edit), tmp_path / "out", tolerance=1e-2)
    assert result["reproduced"] == 2 and 0 < result["largest_deviation"] < 1e-2
    assert [episode.spec for episode in Dataset(tmp_path / "out").episodes] == [None, None]


def test_episodes_without_an_entry_or_a_group_are_named(tmp_path: Path) -> None:
    def edit(file: h5py.File, metadata: dict[str, Any]) -> None:
        metadata["episodes"][1]["episode_id"] = 5

    result = imported(edited(tmp_path, edit), tmp_path / "out")
    assert result["left_out"] == {
        "traj_5": "the .h5 file has no such group", "traj_1": "edited.json has no entry of it",
    }  # fmt: skip


def _with_env_info(**changes: Any) -> Callable[[h5py.File, dict[str, Any]], None]:
    return lambda file, metadata: metadata["env_info"].update(changes)


def _linked(link: Any) -> Callable[[h5py.File, dict[str, Any]], None]:
    def edit(file: h5py.File, metadata: dict[str, Any]) -> None:
        del file[f"{UNSOLVED}/actions"]
        file[f"{UNSOLVED}/actions"] = link

    return edit


def _virtual(file: h5py.File, metadata: dict[str, Any]) -> None:
    del file[f"{UNSOLVED}/actions"]
    layout = h5py.VirtualLayout((10, 4), "f4")
    layout[:] = h5py.VirtualSource("elsewhere.h5", "actions", (10, 4))
    file[UNSOLVED].create_virtual_dataset("actions", layout)


def _option(file: h5py.File, metadata: dict[str, Any]) -> None:
    metadata["episodes"][0]["reset_kwargs"]["options"] = {"height": 3}


def _other_mode(file: h5py.File, metadata: dict[str, Any]) -> None:
    metadata["episodes"][0]["control_mode"] = "pd_joint_pos"


def _old_states(file: h5py.File, metadata: dict[str, Any]) -> None:
    del file[f"{SOLVED}/env_states"]
    file[f"{SOLVED}/env_states"] = np.zeros((23, 70), np.float32)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (
            _with_env_info(env_id="PushCub-v1"),
            "unknown task 'maniskill/PushCub-v1'; did you mean maniskill/PushCube-v1",
        ),
        (_with_env_info(env_kwargs={"sim_config": {"sim_freq": 240}}), "was recorded with sim_config="),
        (_linked(h5py.ExternalLink("other.h5", "/actions")), "links are not followed"),
        (_linked(h5py.SoftLink(f"/{SOLVED}/actions")), "links are not followed"),
        (_virtual, "lies in another file"),
        (_option, "was reset with the option 'height'"),
        (_other_mode, "has episodes of 2 control modes"),
        (_old_states, "as ManiSkill 2 wrote it"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(edit: Any, says: str, tmp_path: Path) -> None:
    source = edited(tmp_path, edit)
    message = refused(source, tmp_path / "out")
    assert says in message


def test_settings_that_the_recording_has_not(tmp_path: Path) -> None:
    source = RECORDINGS / "pushcube.h5"
    assert "has the episodes 0 to 1" in refused(source, tmp_path / "out", episodes=("1-3",))
    assert "train" in refused(source, tmp_path / "out", episodes=("train",))
    assert "--task names libero/" in refused(source, tmp_path / "out", task="libero/libero_goal/0")
    assert "--tolerance" in refused(source, tmp_path / "out", tolerance=-1.0)
    absolute = edited(
        tmp_path, lambda file, metadata: [e.update(control_mode="pd_joint_pos") for e in metadata["episodes"]]
    )
    assert "--drop-idle is for actions that are differences" in refused(absolute, tmp_path / "out", drop_idle=True)
    assert "takes 8: it was recorded with another robot" in refused(absolute, tmp_path / "out")
    absolute.with_suffix(".json").unlink()
    assert "lacks edited.json beside it" in refused(absolute, tmp_path / "out")


def test_a_format_is_what_the_file_holds(tmp_path: Path) -> None:
    """A name says nothing: LIBERO's script has written files without a suffix."""
    renamed = libero(tmp_path).rename(tmp_path / "libero_spatial")
    found = format_of(renamed)
    assert found is not None and found.name.startswith("LIBERO")
    said = convertible(RECORDINGS / "pushcube.h5")
    assert said is not None and f": embodied import {RECORDINGS / 'pushcube.h5'} --out " in said
    for name, content in (("demo.hdf5", b"\x89HDF\r\n\x1a\n" + bytes(99)), ("a.h5", b"PK"), ("empty.h5", b"")):
        (tmp_path / name).write_bytes(content)
        message = refused(tmp_path / name, tmp_path / "out")
        assert name in message and "ManiSkill's trajectories" in message
    assert "not there" in refused(tmp_path / "nowhere.h5", tmp_path / "out")
    assert "a folder with a.h5" in refused(tmp_path, tmp_path / "out")
