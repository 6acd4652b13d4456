"""The policy `remote`: what it sends, what it makes of answers, and one message for each failure of a server."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import policies
from policies.contract import Inputs, PolicyError, PolicySpec
from policies.registry import check
from policies.remote.keys import keys_of
from policies.remote.messages import pack, unpack
from policies.remote.policy import Remote
from tests.policies.remote.handmade_server import (
    Answer,
    free_port,
    hangs,
    mute,
    packed,
    served,
    state_as_actions,
    unpacked,
    web_server,
)

CAMERAS = ("agentview", "robot0_eye_in_hand")
SPEC = PolicySpec(action_dim=7, chunk=4, proprio_dim=8, cameras=CAMERAS, image_size=32)


def inputs(rows: int, size: int = 32) -> Inputs:
    random = np.random.default_rng(rows)
    return Inputs(
        proprio=torch.from_numpy(random.standard_normal((rows, 8)).astype(np.float32)),
        frames={name: torch.from_numpy(random.integers(0, 256, (rows, size, size, 3), np.uint8)) for name in CAMERAS},
        instruction=tuple(f"task {row}" for row in range(rows)),
    )


def remote(address: str, spec: PolicySpec = SPEC, **options: Any) -> Remote:
    policy = policies.build("remote", spec, 0, address=address, **options)
    assert isinstance(policy, Remote)
    return policy


# --- messages


@pytest.mark.parametrize("dtype", ["u1", "<f4", "<f8", "<i8", "|b1", ">f4", "<f2"])
def test_arrays_travel_as_openpi_packs_them(dtype: str) -> None:
    array = (np.arange(24).reshape(2, 3, 4) % 2).astype(dtype)
    message = {"a": array, "nested": [{"text": "x"}, None, 1.5, array[:0]]}
    assert pack(message) == packed(message)
    for found in (unpack(packed(message)), unpacked(pack(message))):
        assert found["a"].dtype == array.dtype and np.array_equal(found["a"], array)
        assert found["nested"][:3] == [{"text": "x"}, None, 1.5] and found["nested"][3].shape == (0, 3, 4)


def array_of(dtype: Any, data: Any, shape: Any) -> dict[bytes, Any]:
    return {b"__ndarray__": True, b"dtype": dtype, b"data": data, b"shape": shape}


@pytest.mark.parametrize(
    "message",
    [
        array_of("|O", b"\0" * 8, [1]),
        array_of("V8", b"\0" * 8, [1]),
        array_of("<f4,<f4", b"\0" * 8, [1]),
        array_of(["<f4"], b"\0" * 8, [2]),
        array_of("<f4", b"\0" * 8, [3]),
        array_of("<f4", b"\0" * 8, [-2]),
        array_of("<f4", b"\0" * 8, ["2"]),
        array_of("<f4", b"", [2**62, 2**62]),
        array_of("<f4", "text", [1]),
        {b"__ndarray__": True},
        {b"__npgeneric__": True, b"dtype": "|O", b"data": 1},
        {b"__npgeneric__": True, b"dtype": "<f4", b"data": "x"},
    ],
)
def test_arrays_of_anything_but_numbers_are_refused(message: Any) -> None:
    with pytest.raises(PolicyError):
        unpack(packed({"a": message}))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x92\x01", b"GET / HTTP/1.1", b"\x91" * 5000, b"\x81\x91\x01\x01"])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    try:
        found = unpack(data)
    except PolicyError:
        return
    assert not isinstance(found, dict)


def test_objects_cannot_be_packed() -> None:
    for thing in (object(), np.array([object()]), np.zeros(1, complex), {1}):
        with pytest.raises(PolicyError, match="cannot be packed"):
            pack({"a": thing})


# --- keys


def test_keys_are_those_of_openpis_libero_client_unless_others_are_given() -> None:
    keys = keys_of(CAMERAS, {"proprio": "joints"})
    assert keys == {
        "images.agentview": "observation/image", "images.robot0_eye_in_hand": "observation/wrist_image",
        "proprio": "joints", "state": "observation/environment_state", "instruction": "prompt",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("cameras", "given", "message"),
    [
        (CAMERAS, {"propio": "x"}, "did you mean proprio"),
        (CAMERAS, {"images.front": "x"}, "images.front"),
        (CAMERAS, {"proprio": 3}, "a key is a text"),
        (CAMERAS, {"proprio": "prompt"}, "two names"),
        ((*CAMERAS, "third"), {}, "camera third has no key"),
    ],
)
def test_a_mapping_that_does_not_fit_is_refused(cameras: tuple[str, ...], given: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        keys_of(cameras, given)


# --- asking


def test_each_row_is_asked_as_openpis_client_asks_and_gets_its_own_answer() -> None:
    asked: list[dict[str, Any]] = []
    seen = inputs(6, 48)
    with served(state_as_actions, asked=asked) as address:
        policy = remote(address, connections=3)
        chunk = policy.act(seen, None).chunk
        policy.close()
    del asked[0]  # the picture of nothing by which the server was tried
    assert len(asked) == 6 and chunk.shape == (6, 4, 7) and chunk.dtype == torch.float32
    for observation in asked:
        row = int(observation["prompt"].removeprefix("task "))
        assert observation.keys() == {"observation/image", "observation/wrist_image", "observation/state", "prompt"}
        assert seen.proprio is not None and np.array_equal(observation["observation/state"], seen.proprio[row])
        picture = Image.fromarray(seen.frames["agentview"][row].numpy()).resize((224, 224), Image.Resampling.BILINEAR)
        assert np.array_equal(observation["observation/image"], np.asarray(picture))
        expected = state_as_actions(observation)["actions"][:4].astype(np.float32)
        assert np.array_equal(chunk[row].numpy(), expected)


def test_as_many_requests_are_under_way_together_as_there_are_connections() -> None:
    """Three meet in the server, which answers none of them before."""
    meeting, tried = threading.Barrier(3), threading.Event()

    def answer(observation: dict[str, Any]) -> dict[str, Any]:
        if tried.is_set():
            meeting.wait(timeout=60)
        tried.set()
        return state_as_actions(observation)

    with served(answer) as address:
        policy = remote(address, connections=3, image_size=0)
        assert policy.act(inputs(6), None).chunk.shape == (6, 4, 7)
        policy.close()


def test_it_is_built_again_from_what_it_says_of_itself() -> None:
    with served(state_as_actions) as address:
        first = remote(address, keys={"state": "s"}, image_size=16)
        again = policies.build("remote", first.spec, 1, **first.architecture())
        assert again.architecture() == first.architecture()
        assert torch.equal(again.act(inputs(2), None).chunk, first.act(inputs(2), None).chunk)


# --- servers that fail


def test_where_no_server_is_nothing_is_built() -> None:
    with pytest.raises(PolicyError, match="no policy server answers at ws://127.0.0.1") as caught:
        check("remote", {"address": f"ws://127.0.0.1:{free_port()}"})
    assert "embodied serve" in str(caught.value)


@pytest.mark.parametrize("address", ["", "localhost:8000", "http://localhost:8000", "ws://", "ws://host:port"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(PolicyError, match="ws://HOST:PORT"):
        check("remote", {"address": address})


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (mute, "no policy server answers"),
        (web_server, "does not speak websocket"),
        (lambda: served(state_as_actions, "hello"), "first message is the text 'hello'"),
        (lambda: served(state_as_actions, b"\xc1"), "no server of openpi's protocol"),
        (lambda: served(state_as_actions, [1, 2]), "no map"),
        (lambda: served(state_as_actions, {"embodied": 3}), "no noise_dim"),
    ],
)
def test_a_server_of_another_protocol_is_found_before_anything_is_built(
    start: Callable[[], AbstractContextManager[str]], message: str
) -> None:
    with start() as address, pytest.raises(PolicyError, match=message) as caught:
        check("remote", {"address": address, "timeout_s": 0.5})
    assert address in str(caught.value) or "noise_dim" in message


def nonsense(value: float) -> Answer:
    def answer(observation: dict[str, Any]) -> dict[str, Any]:
        found = state_as_actions(observation)
        found["actions"][2, 3] = value
        return found

    return answer


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: {"actions": np.zeros((5, 8))}, r"shape \[5, 8\], and the task takes \['H', 7\]"),
        (lambda _: {"actions": np.zeros((1, 5, 7))}, "another robot"),
        (lambda _: {"actions": np.zeros((3, 7))}, "set policy.chunk to at most 3"),
        (lambda _: {"actions": np.zeros(7)}, "no actions"),
        (lambda _: {"actions": [[0.0] * 7] * 5}, "no actions"),
        (lambda _: {"action": np.zeros((5, 7))}, r"but \['action'\]"),
        (nonsense(float("nan")), "not finite"),
        (nonsense(float("inf")), "not finite"),
        (lambda _: 'Traceback (most recent call last):\n  File "x"\nKeyError: \'observation/joints\'\n', "KeyError"),
        (lambda _: b"\xc1", "no server of openpi's protocol"),
        (lambda _: [1], "no map"),
        (lambda _: None, "has gone"),
        (hangs, "did not answer within 0.3 s"),
    ],
)  # fmt: skip
def test_an_answer_that_cannot_be_executed_is_named_before_the_first_env_step(answer: Answer, message: str) -> None:
    with served(answer) as address, pytest.raises(PolicyError, match=message) as caught:
        remote(address, first_timeout_s=0.3)
    assert address in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_that_has_gone_is_named() -> None:
    answered: list[int] = []

    def answer(observation: dict[str, Any]) -> dict[str, Any] | None:
        answered.append(1)
        return state_as_actions(observation) if len(answered) < 4 else None

    with served(answer) as address:
        policy = remote(address, connections=1)
        with pytest.raises(PolicyError, match="has gone"):
            policy.act(inputs(6), None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"connections": 0}, "connections 0"),
        ({"timeout_s": 0.0}, "timeout_s 0"),
        ({"image_size": -1}, "0 to 4096"),
        ({"image_size": "x"}, "0 to 4096"),
        ({"keys": ["a"]}, "map of names"),
        ({"adress": "ws://x"}, "did you mean address"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        check("remote", {"address": "ws://127.0.0.1:1", **options})
