"""No damage of a checkpoint goes unnoticed, and no edit of it ends in a traceback."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from embodied.algorithms.controls import ReturnScale
from embodied.errors import UserError
from embodied.run import checkpoint
from embodied.run.checkpoint import CheckpointError, OptimizerState, RunState
from policies.contract import PolicyError
from sim_farm import EndlessEpisodes, Farm, FarmError, FarmSpec, InProcess, TaskSpec
from tests.embodied.run.test_checkpoint import content, make_optimizer, make_policy, step, write
from tests.variants import often

REACH = FarmSpec(TaskSpec("tabletop/reach", max_episode_steps=7), EndlessEpisodes(5), num_envs=3, chunk=2)


# --- damage


@pytest.mark.parametrize(("flips", "cuts"), often([(30, 6)], [(30, 6), (1000, 100)]))
def test_flipped_bits_and_truncations_are_all_recognised_and_the_one_before_is_used(
    flips: int, cuts: int, tmp_path: Path
) -> None:
    drawn = random.Random(flips)
    earlier, newest = write(tmp_path, 1), write(tmp_path, 2)
    whole = content(newest)
    for number in range(flips + cuts):
        sizes = [len(data) for data in whole.values()]
        name = drawn.choices(list(whole), sizes if number % 2 else None)[0]  # small files as often as large ones
        data = bytearray(whole[name])
        if number < flips:
            at = drawn.randrange(8 * len(data))
            data[at // 8] ^= 1 << at % 8
        else:
            del data[drawn.randrange(len(data)) :]
        (newest / name).write_bytes(data)
        found, damages = checkpoint.recover(tmp_path)
        assert found == earlier and len(damages) == 1, f"change {number} of {name} is not recognised"
        (tmp_path / "000002.damaged").rename(newest)
        (newest / name).write_bytes(whole[name])
    checkpoint.verify(newest)


# --- edits: what was changed has a manifest that agrees with it


EDITED = ("state.json", "manifest.json", "environments.safetensors", "optimizer.safetensors", "policy/config.json")
NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 1.5, 10**30, 2**63, -1e308, 1e999, float("nan"), "", "x", "../../etc", "/etc/passwd", "nan",
    [], [[]], {}, {"a": {}}, [True, 1], "0" * 64, "\udcff", "a" * 5000,
)  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So little work is not worth the others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def farm() -> Iterator[Farm]:
    with closing(Farm.create(REACH, InProcess())) as made:
        made.reset(0)
        for number in range(2):
            made.collect(0)
            made.submit(0, np.full((3, 2, 3), 0.1 * number, np.float32))
        made.collect(0)
        yield made


@pytest.fixture
def folder(farm: Farm, tmp_path: Path) -> Path:
    """A checkpoint as a run writes them, with episodes under way."""
    policy = make_policy()
    optimizer = make_optimizer(policy)
    step(policy, optimizer)
    environments = farm.snapshot()
    assert environments["base_step"].all()
    state = RunState(3, 384, 1.5, (True, False), "rl", {"return_mean": -1.0, "return_weight": 0.1})
    return checkpoint.write(tmp_path / "checkpoints", state, policy, optimizer, environments)


def read_all(folder: Path, farm: Farm) -> None:
    """What a run that goes on reads, in its order."""
    policy = make_policy(1)
    optimizer = make_optimizer(policy)
    checkpoint.verify(folder)
    checkpoint.load_weights(folder, policy)
    checkpoint.load_optimizer(folder, policy, optimizer)
    state = checkpoint.read_state(folder)
    ReturnScale.read(state.controls)
    environments = checkpoint.read_environments(folder)
    farm.restore(environments)
    step(policy, optimizer)
    for tensor in policy.state_dict().values():
        assert tensor.isfinite().all(), "it was taken and is of no use"


def certify(folder: Path, name: str) -> None:
    """Have the manifest agree with a changed file."""
    listed = json.loads((folder / "manifest.json").read_text())
    listed[name] = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(listed))


def edit_bytes(data: bytes, drawn: random.Random) -> bytes:
    at, length = drawn.randrange(len(data) + 1), drawn.choice((1, 1, 2, 8, 64))
    other = drawn.choice(
        (drawn.randbytes(length), b"\0" * length, b"[" * 20000, data[at:], b"1" * 5000, b'"', b"}", b"-")
    )
    return data[:at] + other + data[at + drawn.choice((0, length)) :]


def edit_json(value: Any, drawn: random.Random) -> Any:
    """The value with one thing in it changed, at a random depth."""
    if not isinstance(value, dict | list) or not value or drawn.random() < 0.1:
        return drawn.choice(NASTY)
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    key, how = drawn.choice(keys), drawn.randrange(5)
    if how == 0:
        del value[key]
    elif how == 1 and isinstance(value, dict):
        value[drawn.choice(["x", "../x", "/x", "", "a/../b", "optimizer.step", "manifest.json", "x\0"])] = value[key]
    elif how == 2 and isinstance(value, dict):
        value[f"{key}x"] = value.pop(key)
    else:
        value[key] = edit_json(value[key], drawn)
    return value


def edit_arrays(arrays: dict[str, np.ndarray], drawn: random.Random) -> dict[str, np.ndarray]:
    """One array changed: gone, renamed, of another type or shape, or with a value that cannot be."""
    name = drawn.choice(sorted(arrays))
    array, how = arrays.pop(name).copy(), drawn.randrange(5)
    if how == 1:
        arrays[name + "x"] = array
    elif how == 2:
        types = (np.float32, np.int64, np.uint8, np.float16, np.bool_, np.complex64)
        with np.errstate(all="ignore"):
            arrays[name] = array.astype(drawn.choice(types))
    elif how == 3:
        arrays[name] = drawn.choice((array[:-1], array[None], array.reshape(-1)[:0], array.reshape(-1)))
    elif how == 4 and array.size:
        value = drawn.choice((np.nan, np.inf, -1e30, 2**62, -1, 0, 9e9, -(2**62)))
        with np.errstate(all="ignore"):
            array.reshape(-1)[drawn.randrange(array.size)] = np.array(value).astype(array.dtype)
        arrays[name] = array
    return arrays


def edit(folder: Path, name: str, drawn: random.Random) -> None:
    path = folder / name
    if drawn.random() < 0.4:
        path.write_bytes(edit_bytes(path.read_bytes(), drawn))
    elif name.endswith(".json"):
        path.write_text(json.dumps(edit_json(json.loads(path.read_text()), drawn)), errors="surrogateescape")
    else:
        save_file(edit_arrays(load_file(path), drawn), path)
    if name != "manifest.json":
        certify(folder, name)


@pytest.mark.parametrize("number", often([60], [60, 10_000]))
@pytest.mark.parametrize("name", EDITED)
def test_an_edited_checkpoint_is_used_or_refused_with_a_message(
    name: str, number: int, folder: Path, farm: Farm
) -> None:
    """Ten thousand edits, in the long run of each file that is read."""
    whole, refused, drawn = content(folder), 0, random.Random(number)
    for _ in range(number):
        edit(folder, name, drawn)
        try:
            read_all(folder, farm)
        except (UserError, PolicyError, FarmError) as error:
            refused += 1
            assert len(str(error)) > 20 and "\n" not in str(error)
        for changed in (name, "manifest.json"):
            (folder / changed).write_bytes(whole[changed])
    read_all(folder, farm)
    assert refused > number / 3, "hardly an edit was seen"


STATE = "state.json"
WRONG_STATES: tuple[tuple[tuple[str, ...], Any, str], ...] = (
    (("iteration",), -1, "iteration must be a finite number from 0 on, not -1"),
    (("iteration",), float("nan"), "iteration must be a finite number from 0 on, not nan"),
    (("env_steps",), 1.5, "env_steps must be a whole number"),
    (("env_steps",), True, "env_steps must be a finite number"),
    (("wall_s",), "long", "wall_s must be a finite number from 0 on, not 'long'"),
    (("recent_success",), [1], "recent_success must be a list of true and false"),
    (("stage",), "rt", "stage must be rl or sft, not 'rt'"),
    (("controls",), [], "controls must be an object"),
    (("controls", "return_mean"), float("inf"), r"controls\.return_mean must be a finite number, not inf"),
    (("controls", "return_moan"), 1.0, "a control 'return_moan'; did you mean return_mean"),
    (("iterations",), 3, "unknown key 'iterations'; did you mean iteration"),
    (("optimizer",), {}, r"optimizer\.step must be an object, not None"),
    (("optimizer", "step", "value_head.weight"), 1, "value_head.weight is in state.json alone"),
)
BIAS = "exp_avg_sq.value_head.2.bias"


@pytest.mark.parametrize(("keys", "value", "message"), WRONG_STATES, ids=lambda one: str(one)[:40])
def test_counters_that_cannot_be_are_refused(
    keys: tuple[str, ...], value: Any, message: str, folder: Path, farm: Farm
) -> None:
    data = json.loads((folder / STATE).read_text())
    inner = data
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    (folder / STATE).write_text(json.dumps(data))
    certify(folder, STATE)
    with pytest.raises(UserError, match=message):
        read_all(folder, farm)


def changed(array: np.ndarray, at: Any, value: Any) -> np.ndarray:
    array = array.copy()
    array[at] = value
    return array


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("base_step", lambda a: changed(a, 1, 7), "base_step of environment 1 is 7, and can be 0 to 6"),
        ("base_episode", lambda a: changed(a, 2, -1), "base_episode of environment 2 is -1"),
        ("base_episode", lambda a: a.astype(np.float32), "base_episode holds float32, and int64 was written"),
        ("base_start", lambda a: changed(a, 0, -2), "base_start of environment 0 is -2"),
        ("history", lambda a: changed(a, (1, 3, 0), np.nan), "history of environment 1 has no finite .* step 3"),
        ("history", lambda a: a[:, :-1], "history of tabletop/reach has shape"),
    ],
    ids=lambda one: one[:30] if isinstance(one, str) else "",
)  # fmt: skip
def test_environments_that_cannot_be_are_refused(
    name: str, change: Callable[[np.ndarray], np.ndarray], message: str, folder: Path, farm: Farm
) -> None:
    file, before = "environments.safetensors", farm.snapshot()
    arrays = load_file(folder / file)
    save_file({**arrays, name: np.ascontiguousarray(change(arrays[name]))}, folder / file)
    certify(folder, file)
    with pytest.raises((UserError, FarmError), match=message):
        read_all(folder, farm)
    for key, array in farm.snapshot().items():
        assert np.array_equal(array, before[key], equal_nan=True), "a part of it was taken"


@pytest.mark.parametrize(
    ("edit_moments", "message"),
    [
        (lambda a: {**a, BIAS: a[BIAS] * np.nan}, rf"'{BIAS}' has numbers that are not finite"),
        (lambda a: {**a, BIAS: -1 - a[BIAS]}, f"{BIAS} is a mean of squares and holds negative"),
        (lambda a: {**a, BIAS: a[BIAS].astype(np.int64)}, f"{BIAS} holds torch.int64"),
        (lambda a: {**a, BIAS: a[BIAS].astype(np.float16)}, rf"{BIAS}' is float16 \[1\], the parameter float32 \[1\]"),
        (lambda a: {**a, BIAS: np.zeros(2, np.float32)}, rf"{BIAS}' is float32 \[2\], the parameter float32 \[1\]"),
        (lambda a: {key: array for key, array in a.items() if key != BIAS}, f"{BIAS} is in state.json alone"),
        (lambda a: {**a, "exp_avg.other": a[BIAS]}, "exp_avg.other is not in state.json"),
        (lambda a: {**a, "master.other": a[BIAS]}, "'master.other' is of no parameter"),
    ],
)
def test_moments_that_cannot_be_are_refused_and_change_nothing(
    edit_moments: Callable[[dict[str, np.ndarray]], dict[str, np.ndarray]], message: str, folder: Path
) -> None:
    file, policy = "optimizer.safetensors", make_policy(1)
    optimizer = make_optimizer(policy)
    save_file(edit_moments(load_file(folder / file)), folder / file)
    certify(folder, file)
    checkpoint.verify(folder)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load_optimizer(folder, policy, optimizer)
    assert not optimizer.state


# --- shards of an optimiser


def edit_header(data: bytes, drawn: random.Random) -> bytes:
    """A safetensors file with one thing changed in its header, or in what torch says there of a shard's place."""
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    places = json.loads(header["__metadata__"]["DCP_SHARDING_INFO"])
    if drawn.random() < 0.5:
        header["__metadata__"]["DCP_SHARDING_INFO"] = json.dumps(edit_json(places, drawn))
    else:
        header = edit_json(header, drawn)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data[end:]


@pytest.mark.parametrize("number", often([40], [40, 2000]))
def test_edited_shards_are_used_or_refused_with_a_message(number: int, folder: Path, farm: Farm) -> None:
    """Two ranks' halves of every tensor."""
    tensors = load_file(folder / "optimizer.safetensors")
    (folder / "optimizer.safetensors").unlink()
    (folder / "optimizer").mkdir()
    names = [f"optimizer/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)]
    for rank, name in enumerate(names):
        rows = {key: -(-len(array) // 2) * rank for key, array in tensors.items()}
        halves = {key: array[rows[key] :] if rank else array[: -(-len(array) // 2)] for key, array in tensors.items()}
        info = {key: {"saved_offsets": [rows[key]] + [0] * (array.ndim - 1)} for key, array in tensors.items()}
        save_file(halves, folder / name, metadata={"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0"})
    checkpoint.write_manifest(folder)
    read_all(folder, farm)
    expected = {key: torch.from_numpy(array) for key, array in tensors.items()}
    found = OptimizerState.read(folder).tensors
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    whole, refused, drawn = content(folder), 0, random.Random(number)
    for _ in range(number):
        name = drawn.choice(names)
        change = edit_header if drawn.random() < 0.7 else edit_bytes
        (folder / name).write_bytes(change(whole[name], drawn))
        certify(folder, name)
        try:
            read_all(folder, farm)
        except UserError as error:
            refused += 1
            assert "optimizer" in str(error)
        for changed in (name, "manifest.json"):
            (folder / changed).write_bytes(whole[changed])
    assert refused > number / 3, "hardly an edit was seen"
