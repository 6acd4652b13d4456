"""A policy for other programs, in openpi's websocket protocol: a client sends observations and gets action chunks.

A request is one observation, and its decision equals `LoadedPolicy.act`'s, bit for bit. It does not depend on other
requests: with `rows` of 1 each is computed alone. With more, requests that wait together form one batch, which always
has `rows` rows (missing rows repeat the first): so the shape of matrix products, and with it their rounding, does not
depend on other clients. A request of several rows, which clients of this project send, is one batch.

A request to a policy of K > 1 observations has an axis K in each array, the oldest observation first. It may be of one
observation instead where requests are known to be an env step apart, because each answer is of one action, and where
the client says at which of them an episode begins (`EPISODE_START`): the server then keeps what the connection showed.

A request with a left-over (`LEFT_OVER`) is answered with all actions that the decision predicts, in agreement with what
the client has left of its last chunk: real-time chunking. It is computed alone.

At the path /vla-eval the same port speaks the protocol of vla-evaluation-harness (`embodied.rollout.vla_eval`). Beside
the websockets it answers GET /healthz and /health, and GET /metrics with counts and latencies as JSON; GET
/metrics?hz=20 also with the delay in env steps at that rate, as `eval.delay` takes it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

import numpy as np
import torch
from torch import Tensor
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from embodied.devices import continue_chunk, decide, predict
from embodied.errors import UserError, shown
from embodied.rollout import vla_eval
from embodied.rollout.executed_chunks import measured_delay
from embodied.rollout.loaded_policy import LoadedPolicy, ObservedEpisode, rows_of
from embodied.statistics import latency_percentiles
from embodied.trajectories.batch import join_inputs
from embodied.trajectories.random_streams import SERVING, generator
from policies.capabilities import LeftOver, Predicts, RealTimeChunks
from policies.contract import Inputs, PolicyError
from policies.remote.keys import CAMERA, keys_of
from policies.remote.messages import LARGEST, pack, unpack
from policies.remote.policy import DELAY, EXTENSION, JACOBIAN, LEFT_OVER, NOISE, THERE
from policies.resampling import fit_square

EPISODE_START = "embodied/episode_start"
"""Key by which a client that shows one observation a request says whether it is the first of an episode."""
REMEMBERED = 100_000
"""Number of latest requests from which the latencies are computed."""
_log = logging.getLogger(__name__)


def bind(host: str, port: int) -> socket.socket:
    """A socket of this address, which nobody can reach until `PolicyServer.run` listens; port 0: a free one. Raises
    `UserError`."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        bound = socket.socket(family, kind, protocol)
    except (OSError, OverflowError) as error:
        raise UserError(f"--host {host} --port {port} is no address of this machine: {error}") from error
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise UserError(
            f"port {port} of {host} cannot be had ({error.strerror}): end what listens there, or name another --port"
        ) from error
    return bound


@dataclass(eq=False)
class _Request:
    """An observation that waits for its decision."""

    inputs: Inputs
    noise: Tensor | None
    """[B, Z]; None: the mode is asked for."""
    single: bool
    """True if it may be decided in a batch with others."""
    left: LeftOver | None
    """Left-over of its client's last chunk, where all that is predicted is asked for."""
    answer: asyncio.Future[np.ndarray]


@dataclass
class _Times:
    """Latencies of the latest requests, and counts of all."""

    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """From a request's arrival to its answer."""
    computing_s: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    """Seconds of computing each batch."""
    requests: int = 0
    refused: int = 0
    rows: int = 0
    batches: int = 0
    clients: int = 0
    """Connected now."""

    def as_data(self) -> dict[str, float]:
        latencies = latency_percentiles(self.latencies_s)
        return {
            "requests": self.requests,
            "refused": self.refused,
            "rows": self.rows,
            "batches": self.batches,
            "clients": self.clients,
            "computing_p50_s": float(np.median(self.computing_s)) if self.computing_s else 0.0,
            **{name: value for name, value in latencies.items() if name != "decisions"},
        }


class PolicyServer:
    """Answers clients until it is stopped."""

    def __init__(
        self,
        loaded: LoadedPolicy,
        *,
        keys: Mapping[str, str] | None = None,
        rows: int = 1,
        sample: bool = False,
        seed: int = 0,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        """`keys`: the clients' keys by the names used here, where they are not openpi's (`policies.remote.keys`).
        `rows`: of a batch. `sample`: actions are drawn, as `seed` determines, for clients that say neither; otherwise
        they are the policy's mode. `origin`: digests of what the policy is made of, for its clients' records. Raises
        `PolicyError` for keys that do not fit."""
        self._loaded, self._rows, self._sample, self._seed = loaded, rows, sample, seed
        self._origin = {} if origin is None else dict(origin)
        self._keys = keys_of(loaded.spec.cameras, keys)
        self._waiting: deque[_Request] = deque()
        self._arrived = asyncio.Event()
        self._computing = ThreadPoolExecutor(1, "policy")
        self._times = _Times()

    @property
    def metadata(self) -> dict[str, Any]:
        """Metadata that clients receive first. An evaluation keeps it: it identifies the policy, not the machine."""
        spec, config = self._loaded.spec, self._loaded.config
        read = [name for name in config.policy.reads if name != "episode"]
        history = {"observations": spec.observations, "distance": spec.distance} if spec.observations > 1 else {}
        conventions: dict[str, str] = {"gripper": config.env.gripper}
        if spec.cameras:
            conventions["orientation"] = config.env.orientation
        if config.env.control_mode is not None:
            conventions["control_mode"] = config.env.control_mode
        return {
            EXTENSION: {
                "policy": self._loaded.policy.kind,
                **self._origin,
                "task": config.env.task,
                "conventions": conventions,
                "reads": read,
                "keys": {name: key for name, key in self._keys.items() if self._is_read(name)},
                "image_size": spec.image_size if spec.cameras else 0,
                "state_dim": spec.state_dim,
                "proprio_dim": spec.proprio_dim,
                "action_dim": spec.action_dim,
                "chunk": spec.chunk,
                **history,
                "predicted": spec.predicted,
                "continues": isinstance(self._loaded.policy, RealTimeChunks),
                "noise_dim": self._loaded.policy.noise_dim,
                "rows": self._rows,
                "sample": self._sample,
            }
        }

    @property
    def latencies(self) -> dict[str, float]:
        """Counts of requests, and percentiles of their latency."""
        return self._times.as_data()

    async def run(self, bound: socket.socket, stop: asyncio.Event, started: Callable[[], Any] = lambda: None) -> None:
        """Listen on the socket until `stop` is set; `started` is called once clients can connect."""
        deciding = asyncio.create_task(self._decide_all())
        try:
            async with serve(
                self._talk,
                sock=bound,
                compression=None,
                max_size=LARGEST,
                process_request=self._answer_get,
                origins=[None],  # a browser says one: no page that somebody visits can talk to this port
                close_timeout=1.0,
            ) as server:
                started()
                await self._until_stopped(server, stop, deciding)
        finally:
            deciding.cancel()
            self._computing.shutdown(cancel_futures=True)

    async def _until_stopped(self, server: Server, stop: asyncio.Event, deciding: asyncio.Task[None]) -> None:
        stopped = asyncio.create_task(stop.wait())
        await asyncio.wait({stopped, deciding}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        server.close()
        if deciding.done():
            deciding.result()

    # --- a client

    async def _talk(self, client: ServerConnection) -> None:
        """A connection, from its first message to its end."""
        self._times.clients += 1
        try:
            if client.request is not None and client.request.path.rstrip("/") == vla_eval.PATH:
                await self._talk_vla_eval(client)
            else:
                await self._talk_openpi(client)
        except ConnectionClosed:
            pass
        finally:
            self._times.clients -= 1

    async def _talk_openpi(self, client: ServerConnection) -> None:
        before_s: float | None = None
        await client.send(pack(self.metadata))
        asked, episode = 0, self._loaded.begin_episode()
        async for message in client:
            begin = time.monotonic()
            try:
                if isinstance(message, str):
                    raise UserError(f"a request is an observation packed by msgpack, got the text {shown(message)}")
                observation = unpack(message)
                if not isinstance(observation, Mapping):
                    raise UserError(f"a request is a map of an observation's parts, got {shown(observation)}")
                starts = _starts(observation)
                if starts:
                    episode = self._loaded.begin_episode()
                inputs, batched = self._inputs(observation, episode, starts)
                noise, left = self._noise(observation, message, asked, inputs), self._left_over(observation, inputs)
                chunks = await self._decided(inputs, noise, not batched and left is None, left)
                actions = chunks if batched else chunks[0]
            except (UserError, PolicyError) as error:
                self._times.refused += 1
                await client.send(str(error))
                continue
            finally:
                asked += 1
            timing = {"infer_ms": (time.monotonic() - begin) * 1e3}
            timing |= {} if before_s is None else {"prev_total_ms": before_s * 1e3}
            await client.send(pack({"actions": actions, "server_timing": timing}))
            before_s = self._answered(begin)

    async def _talk_vla_eval(self, client: ServerConnection) -> None:
        chunk = np.zeros((0, 0), np.float32)
        """The env steps that were decided and not yet asked for."""
        asked, benchmark, episode = 0, None, self._loaded.begin_episode()
        async for data in client:
            begin, seq = time.monotonic(), 0
            try:
                message = vla_eval.unpack(data)
                seq = message.seq
                match message.type:
                    case "hello":
                        benchmark = message.payload.get("benchmark")
                        await client.send(vla_eval.pack("hello", self._hello(benchmark), seq))
                    case "episode_start":
                        chunk, episode = chunk[:0], self._loaded.begin_episode()
                    case "observation":
                        convert = self._conversion(benchmark)
                        # A later decision may look back at an env step at which none is made.
                        if not len(chunk) or self._loaded.spec.observations > 1:
                            seen = vla_eval.observation(message.payload, self._keys, convert)
                            episode.observe(self._named(seen, convert.turn))
                        if not len(chunk):
                            inputs = episode.inputs()
                            noise = self._noise({}, message.data, asked, inputs)
                            chunk = convert.executed((await self._decided(inputs, noise, True))[0])
                            asked += 1
                            self._answered(begin)
                        action, chunk = chunk[0], chunk[1:]
                        await client.send(vla_eval.pack("action", {"actions": action}, seq))
                    case "episode_end" | "error":
                        pass
                    case other:
                        raise UserError(f"vla-eval's messages are hello, episode_start and so on, got {shown(other)}")
            except (UserError, PolicyError) as error:
                self._times.refused += 1
                await client.send(vla_eval.pack("error", {"error": str(error)}, seq))

    def _hello(self, benchmark: Any) -> dict[str, Any]:
        try:
            convert = self._conversion(benchmark)
        except UserError as error:
            _log.warning("a client of vla-eval is refused: %s", error)  # it shows nobody the answer
            raise
        if convert.note:
            _log.warning("%s", convert.note)
        return vla_eval.hello(self._loaded.policy.kind, convert, self.metadata)

    def _conversion(self, benchmark: Any) -> vla_eval.Conversion:
        """Raises `UserError` for a client of another robot."""
        return vla_eval.conversion(benchmark, self._loaded.config, self._loaded.spec.cameras)

    def _answered(self, begin: float) -> float:
        """Count a request that came at `begin`; its latency."""
        latency_s = time.monotonic() - begin
        self._times.requests += 1
        self._times.latencies_s.append(latency_s)
        return latency_s

    async def _decided(
        self, inputs: Inputs, noise: Tensor | None, single: bool, left: LeftOver | None = None
    ) -> np.ndarray:
        """Action chunks [B, C, A]; with a left-over all predicted actions [B, P, A]. Raises `PolicyError`."""
        answer: asyncio.Future[np.ndarray] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Request(inputs, noise, single, left, answer))
        self._arrived.set()
        return await answer

    def _inputs(
        self, observation: Mapping[str, Any], episode: ObservedEpisode, starts: bool | None
    ) -> tuple[Inputs, bool]:
        """The inputs of a request, and whether it was a batch. Raises `UserError`."""
        spec, named = self._loaded.spec, self._named(observation)
        if spec.observations == 1 or starts is None:
            try:
                return self._loaded.inputs(named)
            except UserError as error:
                if spec.observations == 1 or spec.chunk > 1:
                    raise
                raise UserError(
                    f"{error}. A client that asks at every env step may send one observation a request, with "
                    f"{EPISODE_START!r}: True for the first of an episode and False for the others"
                ) from None
        if spec.chunk > 1:
            raise UserError(
                f"the policy answers {spec.chunk} actions a request, so that requests do not show every env step, and "
                f"it decides on {spec.observations} observations: send all of them in each array, the oldest first, "
                f"without {EPISODE_START!r}"
            )
        if not starts and not episode.begun:
            raise UserError(f"the first observation of a connection begins an episode: {EPISODE_START!r} is True")
        episode.observe(named)
        return episode.inputs(), False

    def _named(self, observation: Mapping[str, Any], turn: tuple[int, int] = (1, 1)) -> dict[str, Any]:
        """The observation as `LoadedPolicy.act` takes it, pictures resized. `turn`: steps over the rows and columns of
        its pictures. Raises `UserError` for what is missing."""
        found: dict[str, Any] = {}
        for name, key in self._keys.items():
            if not self._is_read(name):
                continue
            if key not in observation:
                has = shown(sorted(map(str, observation)), 300)
                raise UserError(f"the observation lacks {key!r}, which the policy reads as its {name}; it has {has}")
            value = observation[key]
            if name.startswith(CAMERA):
                pictures = _pictures(key, value)[..., :: turn[0], :: turn[1], :]
                found.setdefault("images", {})[name.removeprefix(CAMERA)] = self._resized(pictures)
            else:
                found[name] = _text(key, value) if name == "instruction" else value
        return found

    def _is_read(self, name: str) -> bool:
        return name.startswith(CAMERA) or name in self._loaded.config.policy.reads

    def _resized(self, pictures: np.ndarray) -> np.ndarray:
        """Pictures uint8 [..., H, W, 3] at the size that the policy reads, fitted in with black at the sides, unless
        their client has done so for the network."""
        size = self._loaded.spec.image_size
        if pictures.shape[-3:-1] in {(side, side) for side in self._loaded.image_sizes}:
            return pictures
        resized = fit_square(torch.from_numpy(pictures.reshape(-1, *pictures.shape[-3:]).copy()), size, "bilinear")
        return resized.numpy().reshape(*pictures.shape[:-3], size, size, 3)

    def _noise(self, observation: Mapping[str, Any], message: bytes, asked: int, inputs: Inputs) -> Tensor | None:
        """[B, Z]: what the client sends; or else drawn by the seed, the request and how many its client sent before, so
        that no other client changes it. None: the mode is asked for. Raises `UserError` for another shape."""
        rows, size = rows_of(inputs), self._loaded.policy.noise_dim
        if NOISE in observation:
            sent = observation[NOISE]
            if sent is None:
                return None
            if (
                not isinstance(sent, np.ndarray)
                or sent.dtype != np.float32
                or sent.shape not in ((rows, size), (size,))
            ):
                raise UserError(f"{NOISE} is float32 {[rows, size]}, got {shown(getattr(sent, 'shape', sent))}")
            return torch.from_numpy(sent.reshape(rows, size).copy())
        if not self._sample:
            return None
        digest = int.from_bytes(hashlib.sha256(message).digest()[:8])
        drawn = generator(SERVING, self._seed, digest, asked, 0).standard_normal((rows, size), np.float32)
        return torch.from_numpy(drawn)

    def _left_over(self, observation: Mapping[str, Any], inputs: Inputs) -> LeftOver | None:
        """The remaining actions of the client's last chunk; None: it sends none. Raises `UserError`."""
        if LEFT_OVER not in observation:
            return None
        policy, rows = self._loaded.policy, rows_of(inputs)
        sent, there = observation[LEFT_OVER], observation.get(THERE, np.ones(rows, np.bool_))
        delay, jacobian, most = observation.get(DELAY, 0), observation.get(JACOBIAN, True), policy.spec.predicted
        size = policy.spec.action_dim
        if isinstance(sent, np.ndarray) and sent.ndim == 2:
            sent = sent[None]
        if (
            not isinstance(sent, np.ndarray)
            or sent.dtype != np.float32
            or sent.ndim != 3
            or sent.shape[::2] != (rows, size)
        ):
            got = f"{getattr(sent, 'dtype', type(sent).__name__)} {shown(getattr(sent, 'shape', sent))}"
            raise UserError(f"{LEFT_OVER} is float32 {[rows, 'L', size]}, or {['L', size]} of one row, got {got}")
        if not np.isfinite(sent).all():
            raise UserError(f"{LEFT_OVER} has a number that is not finite")
        if not isinstance(there, np.ndarray) or there.dtype != np.bool_ or there.shape != (rows,):
            raise UserError(f"{THERE} is bool {[rows]}, got {shown(there)}")
        if type(delay) is not int or not 0 <= delay <= most or type(jacobian) is not bool:
            raise UserError(
                f"{DELAY} is a number of env steps of 0 to {most}, the actions that a decision predicts, and "
                f"{JACOBIAN} true or false; got {shown(delay)} and {shown(jacobian)}"
            )
        if sent.shape[1] and not isinstance(policy, RealTimeChunks):
            raise UserError(
                f"the policy {policy.kind} continues no chunk: send {LEFT_OVER} without actions, or leave it out"
            )
        return LeftOver(torch.from_numpy(sent.copy()), torch.from_numpy(there.copy()), delay, jacobian)

    # --- decisions

    async def _decide_all(self) -> None:
        """Batch after batch of what waits, each computed in the one thread that the policy has."""
        loop = asyncio.get_running_loop()
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            while self._waiting:
                batch = self._next_batch()
                try:
                    chunks = await loop.run_in_executor(self._computing, self._compute, batch)
                except Exception as error:  # a policy may fail at one observation, and be well at the next
                    _log.exception("a decision failed")
                    for request in batch:
                        if not request.answer.done():
                            request.answer.set_exception(PolicyError(f"the policy failed: {str(error)[:500]}"))
                    continue
                for request, chunk in zip(batch, chunks, strict=True):
                    if not request.answer.done():  # else its client has gone
                        request.answer.set_result(chunk)

    def _next_batch(self) -> list[_Request]:
        """The request that waits longest, with others that may join it, and wait for the same: a mode, or a draw."""
        first = self._waiting.popleft()
        if not first.single:
            return [first]
        joining = [r for r in self._waiting if r.single and (r.noise is None) == (first.noise is None)]
        batch = [first, *joining[: self._rows - 1]]
        self._waiting = deque(request for request in self._waiting if request not in batch)
        return batch

    def _compute(self, batch: Sequence[_Request]) -> list[np.ndarray]:
        """[B, C, A] for each request of the batch."""
        begin = time.monotonic()
        inputs, noise = batch[0].inputs, batch[0].noise
        if batch[0].single and self._rows > 1:
            rows = [*range(len(batch)), *([0] * (self._rows - len(batch)))]
            inputs = join_inputs([request.inputs for request in batch], torch.tensor(rows))
            noise = None if noise is None else torch.cat([r.noise for r in batch if r.noise is not None])[rows]
        policy, left = self._loaded.policy, batch[0].left
        with torch.no_grad():
            if left is not None and isinstance(policy, RealTimeChunks):
                chunk = continue_chunk(policy, inputs, noise, left).numpy()
            elif left is not None and isinstance(policy, Predicts):
                chunk = predict(policy, inputs, noise).numpy()
            else:
                chunk = decide(policy, inputs, noise).chunk.numpy()
        if not np.isfinite(chunk).all():
            raise PolicyError("its actions are not finite")
        self._times.computing_s.append(time.monotonic() - begin)
        self._times.batches += 1
        self._times.rows += len(batch) if batch[0].single else len(chunk)
        return [chunk[i : i + 1] for i in range(len(batch))] if batch[0].single else [chunk]

    def _answer_get(self, client: ServerConnection, request: Request) -> Response | None:
        """/healthz, /health and /metrics; every other path is a websocket's."""
        if request.path in ("/healthz", "/health"):
            return client.respond(HTTPStatus.OK, "OK\n")
        path, _, query = request.path.partition("?")
        if path == "/metrics":
            rate = re.fullmatch(r"hz=([0-9]{1,5}(?:\.[0-9]{1,5})?)", query, re.ASCII)
            delay = {} if rate is None else {"delay": measured_delay(self._times.latencies_s, float(rate[1]))}
            body = (json.dumps({**self.latencies, **delay}) + "\n").encode()
            headers = Headers(
                {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
            )
            return Response(HTTPStatus.OK, HTTPStatus.OK.phrase, headers, body)
        return None


def _pictures(key: str, value: Any) -> np.ndarray:
    """Pictures uint8 [H, W, 3], with up to two axes of rows and observations before them, of what a client sends: as
    openpi's own server, also with the channels first, and of real numbers in [0, 1]. Raises `UserError` for others."""
    dtype, shape = getattr(value, "dtype", type(value).__name__), list(getattr(value, "shape", ()))
    says = f"{key} is a picture uint8 [H, W, 3] or [3, H, W], or of real numbers from 0 to 1, or a batch of such; got"
    if not isinstance(value, np.ndarray) or value.ndim not in (3, 4, 5) or not value.size:
        raise UserError(f"{says} {dtype} {shape}")
    if value.shape[-1] != 3 and value.shape[-3] == 3:
        value = np.moveaxis(value, -3, -1)
    if value.shape[-1] != 3 or (value.dtype != np.uint8 and value.dtype.kind != "f"):
        raise UserError(f"{says} {dtype} {shape}")
    if value.dtype == np.uint8:
        return value
    low, high = float(value.min()), float(value.max())
    if not (low >= 0 and high <= 1):  # not a number is neither
        raise UserError(f"{says} {dtype} from {low:g} to {high:g}")
    return (255 * value).astype(np.uint8)


def _starts(observation: Mapping[str, Any]) -> bool | None:
    """True if the observation is the first of its episode; None if the request does not say. Raises `UserError`."""
    found = observation.get(EPISODE_START)
    if found is not None and not isinstance(found, (bool, np.bool_)):
        raise UserError(f"{EPISODE_START} is true for the first observation of an episode, got {shown(found)}")
    return None if found is None else bool(found)


def _text(key: str, value: Any) -> Any:
    """An instruction in UTF-8 as a text. Raises `UserError` for other bytes."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{key} is an instruction, a text in UTF-8; got {shown(value)}") from error
