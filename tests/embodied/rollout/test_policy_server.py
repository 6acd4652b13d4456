"""The policy server: clients of openpi's protocol get what `act` gives, whatever others ask; a mistake is one text."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import msgpack
import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import ClientConnection, connect

import policies
from embodied import cli
from embodied.config.files import with_settings
from embodied.config.schema import delay_of
from embodied.rollout.loaded_policy import LoadedPolicy
from policies.contract import Action, Inputs
from policies.remote.policy import DELAY, EXTENSION, JACOBIAN, LEFT_OVER, NOISE, THERE
from policies.resampling import fit_square
from sim_farm.contract import TaskSpec
from sim_farm.conventions import _to_simulator
from tests.embodied.support.evaluations import trained
from tests.embodied.support.served import acted, observations, serving, small_policy
from tests.policies.remote.handmade_server import packed, unpacked

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(sys.executable).parent / "embodied"


class Client:
    """A client written by hand on the format of openpi's client library."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        first = socket.recv()
        assert isinstance(first, bytes)
        self.metadata: dict[str, Any] = unpacked(first)

    def infer(self, observation: dict[str, Any]) -> dict[str, Any]:
        answer = self.answer(packed(observation))
        assert isinstance(answer, bytes), answer
        return unpacked(answer)

    def actions(self, observation: dict[str, Any]) -> np.ndarray:
        return self.infer(observation)["actions"]

    def answer(self, message: str | bytes) -> str | bytes:
        self.socket.send(message)
        return self.socket.recv()


@pytest.fixture(scope="module")
def loaded() -> LoadedPolicy:
    return small_policy()


def asked(address: str, sent: list[dict[str, Any]]) -> list[np.ndarray]:
    with connect(address, compression=None) as socket:
        client = Client(socket)
        return [client.actions(observation) for observation in sent]


def send(socket: Any, kind: str, payload: Any, seq: Any = 1) -> None:
    socket.send(msgpack.packb({"type": kind, "payload": payload, "seq": seq, "timestamp": 0.0}))


def told(socket: Any, kind: str, payload: Any, seq: Any = 1) -> tuple[str, Any]:
    """Type and payload of the answer to a message of vla-eval, which is packed here by hand."""
    send(socket, kind, payload, seq)
    answer = msgpack.unpackb(socket.recv())
    return answer["type"], answer["payload"]


def by_hand(values: np.ndarray, **also: Any) -> dict[str, Any]:
    return {"data": values.tobytes(), "dtype": values.dtype.str, "shape": list(values.shape), **also}


def seen_by_vla_eval(observation: dict[str, Any]) -> dict[str, Any]:
    pictures = {name: observation[f"observation/{name}"] for name in ("image", "wrist_image")}
    return {
        "images": {name: by_hand(one, __image__=True, format="raw") for name, one in pictures.items()},
        "states": by_hand(observation["observation/state"], __ndarray__=True),
        "task_description": observation["prompt"],
    }


def test_a_client_of_vla_eval_gets_env_step_after_env_step_of_a_chunk(loaded: LoadedPolicy) -> None:
    """Chunks are of three env steps, and an episode begins with a decision of its own."""
    first, other = map(seen_by_vla_eval, observations(2))
    chunks = [acted(loaded, observation) for observation in observations(2)]
    with serving(loaded) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        assert told(socket, "hello", {})[1]["observation_params"] == {"send_wrist_image": True, "send_state": True}
        got = [told(socket, "observation", first)[1], *(told(socket, "observation", other)[1] for _ in range(3))]
        send(socket, "episode_start", {})
        got.append(told(socket, "observation", first)[1])
    actions = np.stack([np.frombuffer(one["actions"]["data"], np.float32) for one in got])
    assert np.array_equal(actions, np.concatenate([chunks[0], chunks[1][:1], chunks[0][:1]]))


LIBERO_CAMERAS = ("agentview", "robot0_eye_in_hand")
BENCHMARK = "vla_eval.benchmarks.libero.benchmark:LIBEROBenchmark"


def of_libero(cameras: tuple[str, ...] = LIBERO_CAMERAS, **env: Any) -> LoadedPolicy:
    """The small policy as one of LIBERO, trained with these settings."""
    small = small_policy()
    settings = {f"env.{key}": value for key, value in {"task": "libero/libero_spatial/0", **env}.items()}
    policy = policies.build("flow", replace(small.spec, cameras=cameras), 3, encoder="cnn")
    return replace(small, policy=policy, config=with_settings(small.config, settings, "test"))


def shown_by_libero(agentview: np.ndarray, wrist: np.ndarray, state: np.ndarray) -> dict[str, Any]:
    pictures = {"agentview": agentview, "wrist": wrist}
    return {
        "images": {name: by_hand(one, __image__=True, format="raw") for name, one in pictures.items()},
        "states": by_hand(state, __ndarray__=True),
        "task_description": "do something",
    }


@pytest.mark.parametrize("hello", [{"benchmark": BENCHMARK}, {}, None], ids=["named", "unnamed", "no hello"])
@pytest.mark.parametrize("gripper", ["simulator", "binary", "inverted"])
@pytest.mark.parametrize(
    ("orientation", "seen"),
    [
        ("rotated", np.asarray),
        ("stock", lambda picture: picture[::-1, ::-1]),  # as the simulator gives it
        ("upright", lambda picture: picture[:, ::-1]),  # that has the lowest row first
    ],
)
def test_a_client_of_libero_shows_and_executes_what_the_policy_was_trained_with(
    hello: dict[str, Any] | None, gripper: str, orientation: str, seen: Any
) -> None:
    """vla-eval's LIBERO shows pictures turned by 180 degrees, and takes the simulator's gripper, -1 for open."""
    loaded = of_libero(gripper=gripper, orientation=orientation)
    sent = observations(1)[0]
    base, wrist, state = (sent[f"observation/{key}"] for key in ("image", "wrist_image", "state"))
    chunk = loaded.act({"images": dict(zip(LIBERO_CAMERAS, map(seen, (base, wrist)), strict=True)), "proprio": state})
    taken = _to_simulator(chunk, TaskSpec("libero/libero_spatial/0", gripper=cast(Any, gripper)))
    with serving(loaded) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        if hello is not None:
            kind, said = told(socket, "hello", hello)
            assert kind == "hello" and said["action_spec"]["gripper"]["format"] == "binary_close_positive"
            assert said["observation_params"]["quat_no_antipodal"] is True
        got = [told(socket, "observation", shown_by_libero(base, wrist, state))[1]["actions"] for _ in chunk]
    assert np.array_equal(np.stack([np.frombuffer(one["data"], np.float32) for one in got]), taken)


@pytest.mark.parametrize("cameras", [LIBERO_CAMERAS[::-1], LIBERO_CAMERAS[1:]], ids=["other order", "wrist alone"])
def test_a_camera_of_libero_gets_its_own_picture(cameras: tuple[str, ...]) -> None:
    loaded, sent = of_libero(cameras, orientation="rotated"), observations(1)[0]
    base, wrist, state = (sent[f"observation/{key}"] for key in ("image", "wrist_image", "state"))
    pictures = dict(zip(LIBERO_CAMERAS, (base, wrist), strict=True))
    chunk = loaded.act({"images": pictures, "proprio": state})
    with serving(loaded) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        assert told(socket, "hello", {})[1]["observation_params"]["send_wrist_image"] is True
        got = told(socket, "observation", shown_by_libero(base, wrist, state))[1]["actions"]
    assert np.array_equal(np.frombuffer(got["data"], np.float32), chunk[0])


@pytest.mark.parametrize(
    ("env", "benchmark", "says"),
    [
        ({}, "vla_eval.benchmarks.calvin.benchmark:CALVINBenchmark", "was trained in libero/libero_spatial/0"),
        ({"task": "tabletop/push"}, BENCHMARK, "was trained in tabletop/push"),
    ],
)
def test_a_client_of_another_robot_is_refused_at_hello(env: dict[str, Any], benchmark: str, says: str) -> None:
    sent = observations(1)[0]
    seen = shown_by_libero(*(sent[f"observation/{key}"] for key in ("image", "wrist_image", "state")))
    with serving(of_libero(**env)) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        kind, said = told(socket, "hello", {"benchmark": benchmark})
        assert kind == "error" and says in said["error"]
        assert told(socket, "observation", seen)[0] == "error"


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"images": {"a": {"__image__": True, "format": "png", "data": b"no picture"}}}, "no message of vla-eval"),
        ({"states": {"__ndarray__": True, "data": b"", "dtype": "|O", "shape": [1]}}, "arrays are of numbers"),
        ({"images": {}}, "the observation lacks"),
    ],
    ids=["picture", "objects", "nothing"],
)
def test_what_is_no_observation_of_vla_eval_is_one_error(loaded: LoadedPolicy, message: Any, says: str) -> None:
    with serving(loaded) as (address, _), connect(f"{address}/vla-eval", compression=None) as socket:
        kind, payload = told(socket, "observation", message)
        assert kind == "error" and says in payload["error"]
        assert "whole number" in told(socket, "hello", {}, seq="one")[1]["error"]
        assert told(socket, "hello", {})[0] == "hello"  # the connection goes on


# --- what is answered


def test_a_client_gets_the_actions_that_act_gives_bit_for_bit(loaded: LoadedPolicy) -> None:
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        for number, observation in enumerate(observations(3)):
            found = client.infer(observation)
            assert found["actions"].dtype == np.float32 and np.array_equal(found["actions"], acted(loaded, observation))
            assert found["server_timing"]["infer_ms"] > 0
            assert ("prev_total_ms" in found["server_timing"]) == (number > 0)


def test_metadata_say_what_the_policy_reads_and_decides(loaded: LoadedPolicy) -> None:
    with serving(loaded, origin={"checkpoint_sha256": "x"}) as (address, _):
        with connect(address, compression=None) as socket:
            said = Client(socket).metadata["embodied"]
    assert said["keys"] == {
        "images.base": "observation/image", "images.wrist": "observation/wrist_image", "proprio": "observation/state"
    }  # fmt: skip
    assert (said["chunk"], said["action_dim"], said["proprio_dim"], said["image_size"]) == (3, 7, 8, 32)
    assert said["checkpoint_sha256"] == "x" and said["noise_dim"] == loaded.policy.noise_dim
    assert said["conventions"] == {"orientation": "upright", "gripper": "simulator"}


def test_pictures_of_another_size_are_fitted_in(loaded: LoadedPolicy) -> None:
    import torch

    observation = observations(1)[0]
    large = np.random.default_rng(0).integers(0, 256, (48, 64, 3), np.uint8)
    fitted = fit_square(torch.from_numpy(large)[None], 32, "bilinear")[0].numpy()
    with serving(loaded) as (address, _):
        found = asked(address, [observation | {"observation/image": large}])[0]
    assert np.array_equal(found, acted(loaded, observation | {"observation/image": fitted}))
    assert not fitted[:4].any() and fitted[4:28].any()


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64, np.float16])
@pytest.mark.parametrize("first", [False, True], ids=["channels last", "channels first"])
def test_pictures_are_read_as_openpis_own_server_reads_them(loaded: LoadedPolicy, dtype: Any, first: bool) -> None:
    """Real numbers are shares of 255, three channels may stand first (openpi's `_parse_image`)."""
    observation = observations(1)[0]
    pictures = {key: value for key, value in observation.items() if "image" in key}
    sent = {key: value if dtype is np.uint8 else (value / 255).astype(dtype) for key, value in pictures.items()}
    seen = {key: value if dtype is np.uint8 else (255 * value).astype(np.uint8) for key, value in sent.items()}
    if first:
        sent = {key: np.moveaxis(value, -1, 0).copy() for key, value in sent.items()}
    with serving(loaded) as (address, _):
        assert np.array_equal(asked(address, [observation | sent])[0], acted(loaded, observation | seen))


def test_other_keys_can_be_named(loaded: LoadedPolicy) -> None:
    observation = observations(1)[0]
    renamed = dict(observation)
    renamed["joints"] = renamed.pop("observation/state")
    with serving(loaded, keys={"proprio": "joints"}) as (address, _):
        assert np.array_equal(asked(address, [renamed])[0], acted(loaded, observation))


# --- a decision depends on its own request alone


@pytest.mark.parametrize("rows", [1, 4])
def test_decisions_do_not_depend_on_who_else_asks(loaded: LoadedPolicy, rows: int) -> None:
    sent = [observations(count + 2) for count in range(5)]
    with serving(loaded, rows=rows) as (address, _):
        alone = [asked(address, each) for each in sent]
    with serving(loaded, rows=rows) as (address, _), ThreadPoolExecutor(5) as clients:
        together = list(clients.map(lambda each: asked(address, each), sent))
    for first, second in zip(alone, together, strict=True):
        for one, other in zip(first, second, strict=True):
            if rows == 1:
                assert np.array_equal(one, other)
            else:  # the row's place in a batch may round a matrix product otherwise
                np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


def test_requests_that_wait_together_are_one_batch(loaded: LoadedPolicy) -> None:
    """The first is computed until six more have come, which are then two batches of four rows."""
    shapes: list[int] = []
    entered, go_on = threading.Event(), threading.Event()
    act = loaded.policy.act

    def slow(inputs: Inputs, noise: Any) -> Action:
        entered.set()
        assert go_on.wait(120)
        shapes.append(len(inputs.frames["base"]))
        return act(inputs, noise)

    loaded.policy.act = slow  # type: ignore[method-assign]
    try:
        with serving(loaded, rows=4) as (address, server), ThreadPoolExecutor(7) as clients:
            first = clients.submit(asked, address, observations(1))
            assert entered.wait(120)
            others = [clients.submit(asked, address, observations(1)) for _ in range(6)]
            while len(server._waiting) < 6:
                threading.Event().wait(0.01)
            go_on.set()
            found = [each.result() for each in (first, *others)]
            assert server.latencies["rows"] == 7 and server.latencies["batches"] == 3
    finally:
        del loaded.policy.act
    assert shapes == [4, 4, 4] and len(found) == 7


def test_noise_is_the_requests_own(loaded: LoadedPolicy) -> None:
    """Sent by the client; or drawn by the seed, the observation and its number, whatever other clients ask."""
    import torch

    observation = observations(1)[0]
    noise = np.random.default_rng(0).standard_normal(loaded.policy.noise_dim).astype(np.float32)
    inputs, _ = loaded.inputs(
        {"images": {"base": observation["observation/image"], "wrist": observation["observation/wrist_image"]},
         "proprio": observation["observation/state"]}
    )  # fmt: skip
    expected = loaded.policy.act(inputs, torch.from_numpy(noise[None])).chunk[0].numpy()
    with serving(loaded, sample=True, seed=1) as (address, _):
        first = asked(address, [observation, observation, observation | {NOISE: noise}, observation | {NOISE: None}])
    with serving(loaded, sample=True, seed=1) as (address, _), ThreadPoolExecutor(3) as clients:
        again, *others = clients.map(lambda _: asked(address, [observation, observation]), range(3))
    with serving(loaded, sample=True, seed=2) as (address, _):
        another = asked(address, [observation])[0]
    assert np.array_equal(first[2], expected) and np.array_equal(first[3], acted(loaded, observation))
    assert np.array_equal(first[0], again[0]) and np.array_equal(first[1], again[1])
    assert all(np.array_equal(each[1], first[1]) for each in others)
    assert not np.array_equal(first[0], first[1]) and not np.array_equal(first[0], another)


# --- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"observation/state": None}, "proprio is float32"),
        ({"observation/state": np.zeros(7)}, "the policy reads (8,)"),
        ({"observation/state": "text"}, "proprio is float32"),
        ({"observation/state": np.full(8, np.nan)}, "not finite"),
        ({"observation/image": np.full((32, 32, 3), 1.5, np.float32)}, "float32 from 1.5 to 1.5"),
        ({"observation/image": np.full((32, 32, 3), -1.0)}, "float64 from -1 to -1"),
        ({"observation/image": np.full((32, 32, 3), np.nan, np.float32)}, "real numbers from 0 to 1"),
        ({"observation/image": np.zeros((32, 32, 3), np.int64)}, "got int64 [32, 32, 3]"),
        ({"observation/image": np.zeros((32, 32, 4), np.uint8)}, "got uint8 [32, 32, 4]"),
        ({"observation/image": np.zeros((4, 40, 40), np.uint8)}, "uint8 [H, W, 3]"),
        ({"observation/image": b"PNG"}, "got bytes"),
        ({"observation/image": np.zeros((0, 0, 3), np.uint8)}, "uint8 [H, W, 3]"),
        ({"observation/image": np.zeros((2, 32, 32, 3), np.uint8)}, "some parts of the observation are a batch"),
        ({NOISE: np.zeros(3, np.float32)}, "embodied/noise is float32"),
        ({"observation/wrist_image": ...}, "lacks 'observation/wrist_image'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_text_and_the_next_request_is_answered(
    loaded: LoadedPolicy, change: dict[str, Any], message: str
) -> None:
    good = observations(1)[0]
    bad = {key: value for key, value in (good | change).items() if value is not ...}
    with serving(loaded) as (address, server), connect(address, compression=None) as socket:
        client = Client(socket)
        said = client.answer(packed(bad))
        assert isinstance(said, str) and message in said and "Traceback" not in said
        assert np.array_equal(client.actions(good), acted(loaded, good))
        assert server.latencies["refused"] == 1


@pytest.mark.parametrize("prompt", [np.asarray("do something"), np.asarray(["do something"]), b"do something"])
def test_an_instruction_is_taken_as_numpy_and_as_bytes_have_it(loaded: LoadedPolicy, prompt: Any) -> None:
    """As openpi's transforms make and read it."""
    reads = loaded.config.policy.model_copy(update={"reads": ("images", "proprio", "instruction")})
    reading = replace(loaded, config=loaded.config.model_copy(update={"policy": reads}))
    good = observations(1)[0]
    with serving(reading) as (address, _):
        assert np.array_equal(asked(address, [good | {"prompt": prompt}])[0], acted(loaded, good))


@pytest.mark.parametrize("prompt", [3, [], [3], {"a": "b"}, np.zeros(2), b"\xff", np.asarray(["a", "b"])])
def test_an_instruction_is_a_text(loaded: LoadedPolicy, prompt: Any) -> None:
    reads = loaded.config.policy.model_copy(update={"reads": ("images", "proprio", "instruction")})
    reading = replace(loaded, config=loaded.config.model_copy(update={"policy": reads}))
    with serving(reading) as (address, _), connect(address, compression=None) as socket:
        client, good = Client(socket), observations(1)[0]
        said = client.answer(packed(good | {"prompt": prompt}))
        assert isinstance(said, str) and ("instruction" in said or "rows" in said)
        assert np.array_equal(client.actions(good), acted(loaded, good))


@pytest.mark.parametrize("message", ["hello", b"\xc1", packed([1, 2]), packed({1: 2})])
def test_what_is_no_observation_is_one_text(loaded: LoadedPolicy, message: str | bytes) -> None:
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        said = Client(socket).answer(message)
        assert isinstance(said, str) and len(said) < 500


def test_a_client_that_leaves_before_its_answer_disturbs_nobody(loaded: LoadedPolicy) -> None:
    good = observations(1)[0]
    with serving(loaded) as (address, _):
        for _ in range(3):
            with connect(address, compression=None) as socket:
                Client(socket).socket.send(packed(good))
                socket.socket.close()
        assert np.array_equal(asked(address, [good])[0], acted(loaded, good))


# --- beside the protocol


def get(address: str, path: str) -> bytes:
    with urllib.request.urlopen(address.replace("ws", "http", 1) + path, timeout=120) as answer:  # noqa: S310
        assert answer.status == 200
        return answer.read()


def test_health_and_latencies_are_answered_over_http(loaded: LoadedPolicy) -> None:
    with serving(loaded) as (address, _):
        assert get(address, "/healthz") == b"OK\n"
        assert json.loads(get(address, "/metrics"))["requests"] == 0
        asked(address, observations(4))
        found = json.loads(get(address, "/metrics"))
        assert "delay" not in found
        late = delay_of(json.loads(get(address, "/metrics?hz=0.01"))["delay"])
    assert late == ((1, 1.0),), "an action that comes within an env step is one late"
    assert found["requests"] == found["rows"] == 4 and found["refused"] == 0
    assert 0 < found["latency_p50_s"] <= found["latency_p95_s"] <= found["latency_max_s"]


def test_a_request_with_a_left_over_is_answered_with_all_that_is_predicted() -> None:
    """A policy without real-time chunking says so; a small one that predicts more answers all of it."""
    loaded = small_policy()
    good = observations(1)[0]
    with serving(loaded) as (address, _), connect(address, compression=None) as socket:
        client = Client(socket)
        assert client.metadata[EXTENSION]["continues"] is False and client.metadata[EXTENSION]["predicted"] == 3
        nothing = np.zeros((0, 7), np.float32)
        assert np.array_equal(client.infer(good | {LEFT_OVER: nothing})["actions"], acted(loaded, good))
        for more, said in (
            ({LEFT_OVER: np.zeros((2, 7), np.float32)}, "the policy flow continues no chunk"),
            ({LEFT_OVER: np.zeros((2, 6), np.float32)}, r"is float32 \[1, 'L', 7\]"),
            ({LEFT_OVER: np.zeros((1, 2, 7, 1), np.float32)}, r"is float32 \[1, 'L', 7\]"),
            ({LEFT_OVER: [0.0]}, "is float32 .* got list"),
            ({LEFT_OVER: np.full((1, 7), np.nan, np.float32)}, "not finite"),
            ({LEFT_OVER: nothing, DELAY: 4}, "env steps of 0 to 3"),
            ({LEFT_OVER: nothing, JACOBIAN: "no"}, "true or false"),
            ({LEFT_OVER: nothing, THERE: np.ones(2, np.bool_)}, "left_over_there is bool"),
        ):
            answer = client.answer(packed(good | more))
            assert isinstance(answer, str) and re.search(said, answer), answer
        assert np.array_equal(client.infer(good)["actions"], acted(loaded, good))


def test_a_page_in_a_browser_cannot_talk_to_it(loaded: LoadedPolicy) -> None:
    with serving(loaded) as (address, _), pytest.raises(InvalidStatus, match="403"):
        connect(address, origin="http://example.org", compression=None).__enter__()  # type: ignore[arg-type]


# --- the command


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield trained(tmp_path_factory.mktemp("runs"), "run", seed=1)


def test_a_port_in_use_is_one_message_before_the_weights_are_read(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main(["serve", str(run), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 cannot be had" in said and "--port" in said and said.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "70000"], "--port is of 0 to 65535"),
        (["--batch", "0"], "--batch is of 1"),
        (["--host", "no.such.host.invalid"], "no address of this machine"),
        (["--port", "0", "--keys", "images.front", "x"], "images.front"),
    ],
)
def test_arguments_that_cannot_be_are_one_message(
    run: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", str(run), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_an_untrained_policy_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "reach", "--port", "0"]) == 2
    assert "has to be trained" in capsys.readouterr().err


@pytest.mark.slow  # starts the command, whose imports take seconds
@pytest.mark.parametrize("named", ["run", "checkpoint"])
def test_the_command_serves_until_it_is_interrupted(run: Path, named: str, tmp_path: Path) -> None:
    served = run if named == "run" else run / "checkpoints" / "000001"
    process = subprocess.Popen(
        [COMMAND, "serve", str(served), "--port", "0", "--json", str(tmp_path / "served.json")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "500"},
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = line[line.index("ws://") :].partition(";")[0]
        with connect(address, compression=None) as client:
            state = np.zeros(unpacked(client.recv())["embodied"]["state_dim"])  # type: ignore[arg-type]
            client.send(packed({"observation/environment_state": state}))
            assert unpacked(client.recv())["actions"].ndim == 2  # type: ignore[arg-type]
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0 and "1 requests answered" in out and not err
    assert json.loads((tmp_path / "served.json").read_text())["requests"] == 1
