"""Checkpoints are complete or absent, and a damaged one is recognised before a tensor of it is used."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import policies
from embodied.errors import UserError
from embodied.run import checkpoint
from embodied.run.checkpoint import CheckpointError, RunState
from policies.contract import Inputs, Policy, PolicyError, PolicySpec, actor_parameters
from tests.full_disk import full_disk

STATE = RunState(iteration=3, env_steps=384, wall_s=1.5, recent_success=(True, False, True))
ENVIRONMENTS = {"base_step": np.arange(4, dtype=np.int32), "history": np.full((4, 5, 2), np.nan, np.float32)}
LAYOUT = {
    "manifest.json",
    "policy/config.json",
    "policy/model.safetensors",
    "value_head.safetensors",
    "optimizer.safetensors",
    "state.json",
    "environments.safetensors",
}


def make_policy(seed: int = 0, widths: tuple[int, ...] = (16,)) -> Policy:
    spec = PolicySpec(action_dim=2, chunk=2, state_dim=4)
    return policies.build("gaussian_mlp", spec, seed, widths=list(widths))


def make_optimizer(policy: Policy) -> torch.optim.Adam:
    groups = [list(actor_parameters(policy)), list(policy.value_head.parameters())]
    return torch.optim.Adam([{"params": group, "lr": 1e-2} for group in groups], fused=True)


def step(policy: Policy, optimizer: torch.optim.Adam, seed: int = 0) -> None:
    g = torch.Generator().manual_seed(seed)
    inputs = Inputs(state=torch.randn(8, 4, generator=g))
    found = policy.evaluate(inputs, {"action": torch.randn(8, 2, 2, generator=g)})
    optimizer.zero_grad()
    (found.log_prob.sum() + found.value.sum()).backward()
    optimizer.step()
    policy.observe(inputs)


def write(root: Path, iteration: int = 3, policy: Policy | None = None) -> Path:
    policy = policy or make_policy()
    optimizer = make_optimizer(policy)
    step(policy, optimizer)
    state = RunState(iteration, STATE.env_steps, STATE.wall_s, STATE.recent_success)
    return checkpoint.write(root, state, policy, optimizer, ENVIRONMENTS)


def files_of(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def content(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


# --- what is written


def test_the_layout_is_the_documented_one(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert folder == tmp_path / "000003"
    assert files_of(folder) == LAYOUT
    assert (tmp_path / "latest").read_text() == "000003\n"
    assert files_of(tmp_path) == {f"000003/{name}" for name in LAYOUT} | {"latest"}, "something was left behind"
    described = checkpoint.__doc__ or ""
    assert all(Path(name).name in described or name.startswith("policy/") for name in LAYOUT)


def test_the_manifest_covers_every_other_file(tmp_path: Path) -> None:
    folder = write(tmp_path)
    assert json.loads((folder / "manifest.json").read_text()).keys() == LAYOUT - {"manifest.json"}


def test_no_file_is_executable_data(tmp_path: Path) -> None:
    folder = write(tmp_path)
    for name, data in content(folder).items():
        assert name.endswith((".json", ".safetensors"))
        assert not data.startswith((b"\x80", b"PK")), f"{name} is a pickle or a zip of one"


def test_what_is_read_is_what_was_written(tmp_path: Path) -> None:
    policy = make_policy()
    optimizer = make_optimizer(policy)
    step(policy, optimizer)
    folder = checkpoint.write(tmp_path, STATE, policy, optimizer, ENVIRONMENTS)
    other = make_policy(seed=1)
    again = make_optimizer(other)
    checkpoint.verify(folder)
    checkpoint.load_weights(folder, other)
    checkpoint.load_optimizer(folder, other, again)
    assert checkpoint.read_state(folder) == STATE
    environments = checkpoint.read_environments(folder)
    assert environments.keys() == ENVIRONMENTS.keys()
    for key, array in ENVIRONMENTS.items():
        assert np.array_equal(environments[key], array, equal_nan=True) and environments[key].dtype == array.dtype
    for seed in range(3):  # the same steps from here: nothing of the optimiser was lost
        assert_equal(other, policy)
        step(policy, optimizer, seed)
        step(other, again, seed)


def assert_equal(found: Policy, expected: Policy) -> None:
    state: dict[str, Tensor] = expected.state_dict()
    for name, tensor in found.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_an_optimiser_that_has_not_stepped_is_written_and_read(tmp_path: Path) -> None:
    policy = make_policy()
    folder = checkpoint.write(tmp_path, STATE, policy, make_optimizer(policy), {})
    checkpoint.verify(folder)
    again = make_optimizer(policy)
    checkpoint.load_optimizer(folder, policy, again)
    assert not again.state
    assert checkpoint.read_environments(folder) == {}


# --- damage


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.verify(folder)
    assert isinstance(caught.value, UserError), "a user would be shown a traceback"
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message
    return message


@pytest.mark.parametrize("name", sorted(LAYOUT - {"manifest.json"}))
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_byte_is_recognised(name: str, place: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    data = bytearray((folder / name).read_bytes())
    at = {"first": 0, "middle": len(data) // 2, "last": len(data) - 1}[place]
    data[at] ^= 0x01
    (folder / name).write_bytes(data)
    assert f"{name} is not what was written" in refusal(folder)


@pytest.mark.parametrize("name", sorted(LAYOUT - {"manifest.json"}))
def test_a_truncated_or_missing_file_is_recognised(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    data = (folder / name).read_bytes()
    for kept in (data[:-1], b""):
        (folder / name).write_bytes(kept)
        assert f"{name} is not what was written" in refusal(folder)
    (folder / name).unlink()
    assert f"{name} is missing" in refusal(folder)
    (folder / name).write_bytes(data)
    checkpoint.verify(folder)


def test_a_missing_or_broken_manifest_is_recognised(tmp_path: Path) -> None:
    folder = write(tmp_path)
    whole = (folder / "manifest.json").read_bytes()
    for broken in (b"", whole[:-2], whole[: len(whole) // 2], b"{", b"{}", b"[]", b"\xff" + whole[1:]):
        (folder / "manifest.json").write_bytes(broken)
        assert "not a complete checkpoint" in refusal(folder)
    (folder / "manifest.json").unlink()
    assert "not a complete checkpoint" in refusal(folder)


@pytest.mark.parametrize(
    "added", ["optimizer/", "policy/adapter_model.safetensors", "policy/extra/", "notes.txt", "link"]
)
def test_what_was_put_there_later_is_recognised(added: str, tmp_path: Path) -> None:
    """Readers look at what is there: shards of an optimiser go before its one file, an adapter is read with a base."""
    folder = write(tmp_path)
    path = folder / added
    if added.endswith("/"):
        path.mkdir()
    elif added == "link":
        path.symlink_to(tmp_path)
    else:
        path.write_bytes((folder / "value_head.safetensors").read_bytes())
    assert f"{added.rstrip('/')} is not in its manifest.json" in refusal(folder)


@pytest.mark.parametrize(
    "name", ["../000002/state.json", "/etc/hostname", "policy/../state.json", "./state.json", "", ".", "manifest.json"]
)
def test_a_manifest_lists_files_of_its_own_folder(name: str, tmp_path: Path) -> None:
    folder = write(tmp_path)
    listed = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**listed, name: listed["state.json"]}))
    assert f"{name!r} is no name of a file in the folder" in refusal(folder)


def test_a_manifest_is_no_larger_than_one_can_be(tmp_path: Path) -> None:
    folder = write(tmp_path)
    path = folder / "manifest.json"
    path.write_bytes(path.read_bytes() + b" " * checkpoint.MOST_MANIFEST_BYTES)
    assert f"larger than {checkpoint.MOST_MANIFEST_BYTES} bytes" in refusal(folder)


def test_a_folder_that_is_not_there_is_recognised(tmp_path: Path) -> None:
    assert f"there is no checkpoint {tmp_path / '000009'}, and none beside it" in refusal(tmp_path / "000009")
    for name in ("000001", "000008", "000012"):
        (tmp_path / name).mkdir()
    near = ", ".join(str(tmp_path / name) for name in ("000008", "000012", "000001"))
    assert f": {near} are there" in refusal(tmp_path / "000009")


def test_another_policys_checkpoint_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    folder = write(tmp_path, policy=make_policy(widths=(24,)))
    checkpoint.verify(folder)
    policy, untouched = make_policy(), make_policy()
    with pytest.raises(PolicyError, match=r"another policy than this run's: architecture\.critic_widths is \[24\]"):
        checkpoint.load_weights(folder, policy)
    assert_equal(policy, untouched)


# --- the latest one


def test_latest_is_the_newest_written(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    for iteration in (1, 2, 10):
        assert checkpoint.latest(tmp_path) != write(tmp_path, iteration)
        assert checkpoint.latest(tmp_path) == tmp_path / f"{iteration:06d}"


def test_the_best_is_kept_beside_the_newest(tmp_path: Path) -> None:
    for iteration in (1, 2, 3, 4):
        write(tmp_path, iteration)
    assert checkpoint.best(tmp_path) is None
    checkpoint.mark_best(tmp_path, tmp_path / "000002")
    checkpoint.keep_newest(tmp_path, 1)
    assert checkpoint.best(tmp_path) == tmp_path / "000002" and checkpoint.latest(tmp_path) == tmp_path / "000004"
    assert not (tmp_path / "000001").exists() and not (tmp_path / "000003").exists()
    checkpoint.mark_best(tmp_path, None)
    assert checkpoint.best(tmp_path) is None


@pytest.mark.parametrize("pointer", ["000009\n", "", "..", "\udcff"], ids=repr)
def test_a_pointer_to_no_checkpoint_names_no_best(pointer: str, tmp_path: Path) -> None:
    write(tmp_path, 1)
    (tmp_path / "best").write_text(pointer, errors="surrogateescape")
    assert checkpoint.best(tmp_path) is None


def test_a_checkpoint_is_written_again_in_place(tmp_path: Path) -> None:
    write(tmp_path, policy=make_policy(seed=1))
    folder = write(tmp_path, policy=make_policy(seed=2))
    checkpoint.verify(folder)
    expected = make_policy(seed=2)
    step(expected, make_optimizer(expected))
    assert_equal(policies.load(folder), expected)


# --- finding one that is whole


@pytest.mark.parametrize("pointer", [None, "000001\n", "000009\n", "", "\udcff"], ids=repr)
def test_the_newest_whole_checkpoint_is_found_whatever_latest_says(pointer: str | None, tmp_path: Path) -> None:
    for iteration in (1, 2, 10):
        write(tmp_path, iteration)
    (tmp_path / "latest").unlink()
    if pointer is not None:
        (tmp_path / "latest").write_text(pointer, errors="surrogateescape")
    assert checkpoint.latest(tmp_path) == tmp_path / "000010"
    assert checkpoint.recover(tmp_path) == (tmp_path / "000010", [])
    assert (tmp_path / "latest").read_text() == "000010\n"


def test_damaged_checkpoints_are_set_aside_for_the_one_before_them(tmp_path: Path) -> None:
    for iteration in (1, 2, 3):
        write(tmp_path, iteration)
    (tmp_path / "000003" / "manifest.json").unlink()
    (tmp_path / "000002" / "state.json").write_text("{}")
    found, damages = checkpoint.recover(tmp_path)
    assert found == tmp_path / "000001" == checkpoint.latest(tmp_path)
    assert [name in str(damage) for name, damage in zip(("000003", "000002"), damages, strict=True)] == [True, True]
    assert {path.name for path in tmp_path.glob("*.damaged")} == {"000002.damaged", "000003.damaged"}
    assert checkpoint.latest(write(tmp_path, 2).parent) == tmp_path / "000002", "its place is free again"


def test_where_no_checkpoint_is_whole_nothing_is_changed(tmp_path: Path) -> None:
    assert checkpoint.recover(tmp_path) == (None, [])
    for iteration in (1, 2):
        (write(tmp_path, iteration) / "state.json").unlink()
    before = content(tmp_path)
    with pytest.raises(CheckpointError, match="000002.*state.json is missing.*000001.*remove the folder .*--name"):
        checkpoint.recover(tmp_path)
    assert content(tmp_path) == before


# --- crashes


def test_what_a_crash_left_aside_is_no_checkpoint_and_in_nobodys_way(tmp_path: Path) -> None:
    write(tmp_path, 2)
    aside = tmp_path / ".000003.partial"
    shutil.copytree(tmp_path / "000002", aside)
    (aside / "junk").write_text("left by a crash")
    last = checkpoint.latest(tmp_path)
    assert last is not None and last == tmp_path / "000002"
    checkpoint.verify(last)
    folder = write(tmp_path, 3)
    assert files_of(folder) == LAYOUT and not aside.exists()
    checkpoint.verify(folder)
    for number in (3, 4, 5):
        shutil.copytree(folder, tmp_path / f".00000{number}.{('replaced', 'partial', 'removed')[number - 3]}")
    assert checkpoint.recover(tmp_path) == (folder, [])
    assert {path.name for path in tmp_path.iterdir()} == {"000002", "000003", "latest"}, "a disk fills up"


def write_and_die(root: Path, event: str, ending: str) -> None:
    """Write checkpoint 2 in a process that is killed as it begins to open (or rename) the path that ends so."""
    policy = make_policy()
    optimizer = make_optimizer(policy)

    def kill(happening: str, arguments: tuple[object, ...]) -> None:
        if happening == event and str(arguments[0]).endswith(ending):
            os.kill(os.getpid(), signal.SIGKILL)

    pid = os.fork()
    if pid == 0:
        sys.addaudithook(kill)
        checkpoint.write(root, RunState(2, 0, 0.0, ()), policy, optimizer, ENVIRONMENTS)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, "it was not killed at that moment"


@pytest.mark.parametrize(
    ("event", "ending"),
    [
        ("open", "config.json"),
        ("open", "state.json"),
        ("open", "manifest.json"),
        ("os.rename", ".000002.partial"),
        ("open", ".latest.partial"),
        ("os.rename", ".latest.partial"),
    ],
)
def test_a_process_killed_while_writing_leaves_the_earlier_checkpoint(event: str, ending: str, tmp_path: Path) -> None:
    earlier = content(write(tmp_path, 1))
    write_and_die(tmp_path, event, ending)
    last = checkpoint.latest(tmp_path)
    # The new one becomes visible only as a whole, and counts from then on, whatever `latest` says.
    assert last is not None and last == tmp_path / ("000002" if ".latest" in ending else "000001")
    checkpoint.verify(last)
    assert content(tmp_path / "000001") == earlier
    checkpoint.verify(write(tmp_path, 2))
    assert checkpoint.latest(tmp_path) == tmp_path / "000002"


@pytest.mark.parametrize(
    ("event", "ending", "new"),
    [
        ("os.rename", ".000002.partial", False),  # between the two renames
        ("os.rename", ".000002.replaced", True),
        ("shutil.rmtree", ".000002.removed", True),
    ],
)
def test_a_process_killed_while_it_writes_one_again_leaves_the_old_one_or_the_new_one(
    event: str, ending: str, new: bool, tmp_path: Path
) -> None:
    write(tmp_path, 1)
    old = content(write(tmp_path, 2, make_policy(seed=1)))
    write_and_die(tmp_path, event, ending)
    assert checkpoint.recover(tmp_path) == (tmp_path / "000002", [])
    assert (content(tmp_path / "000002") != old) == new
    written = content(write(tmp_path, 2, make_policy(seed=2)))
    assert written != old and content(tmp_path / "000002") == written
    assert {path.name for path in tmp_path.iterdir()} == {"000001", "000002", "latest"}, "something was left"


def test_a_checkpoint_that_cannot_take_its_place_leaves_the_old_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    old, rename = content(write(tmp_path, 2, make_policy(seed=1))), Path.rename

    def full(path: Path, target: Path) -> Path:
        if path.name == ".000002.partial":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", full)
    with pytest.raises(CheckpointError, match="No space left on device"):
        write(tmp_path, 2, make_policy(seed=2))
    assert checkpoint.latest(tmp_path) == tmp_path / "000002" and content(tmp_path / "000002") == old


@pytest.mark.parametrize("room", [64, 2000])
def test_a_full_disk_is_a_message_and_leaves_the_earlier_checkpoint(room: int, tmp_path: Path) -> None:
    """With room for 2000 bytes, JSON is written and tensors are not."""
    write(tmp_path, 2)
    with full_disk(room), pytest.raises(CheckpointError, match="cannot write the checkpoint .*000003.* Earlier checkp"):
        write(tmp_path, 3)
    assert checkpoint.latest(tmp_path) == tmp_path / "000002"
    checkpoint.verify(tmp_path / "000002")
