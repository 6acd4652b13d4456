"""Policy servers written by hand on the format of openpi's client library, well-behaved and not, on real sockets."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
from websockets.sync.server import ServerConnection, serve

Answer = Callable[[dict[str, Any]], Any]
"""From an observation to the map that is sent back, or to a text."""


def packed(value: Any) -> bytes:
    """As openpi_client.msgpack_numpy packs."""

    def array(found: Any) -> Any:
        if isinstance(found, np.generic):
            return {b"__npgeneric__": True, b"data": found.item(), b"dtype": found.dtype.str}
        return {b"__ndarray__": True, b"data": found.tobytes(), b"dtype": found.dtype.str, b"shape": found.shape}

    message = msgpack.packb(value, default=array)
    assert isinstance(message, bytes)
    return message


def unpacked(data: bytes) -> Any:
    def array(found: dict[Any, Any]) -> Any:
        if b"__ndarray__" in found:
            return np.ndarray(buffer=found[b"data"], dtype=np.dtype(found[b"dtype"]), shape=found[b"shape"])
        return found

    return msgpack.unpackb(data, object_hook=array)


def state_as_actions(observation: dict[str, Any]) -> dict[str, Any]:
    """Five actions of seven numbers, a function of what is seen."""
    seen = observation["observation/state"].astype(np.float64).sum() + len(observation["prompt"])
    seen += observation["observation/image"].mean()
    return {"actions": np.full((5, 7), seen / 100), "policy_timing": {"infer_ms": 1.0}}


@contextmanager
def served(answer: Answer, first: Any = None, asked: list[dict[str, Any]] | None = None) -> Iterator[str]:
    """The address of a server that answers so, with the metadata `first` as its first message (a text or bytes as they
    are). `asked` collects the observations."""
    first = packed({"robot": "panda"} if first is None else first) if not isinstance(first, (str, bytes)) else first

    def talk(client: ServerConnection) -> None:
        client.send(first)
        for message in client:
            assert isinstance(message, bytes)
            observation = unpacked(message)
            if asked is not None:
                asked.append(observation)
            found = answer(observation)
            if found is None:
                client.close()
                return
            client.send(found if isinstance(found, (str, bytes)) else packed(found))

    with serve(talk, "127.0.0.1", 0, compression=None, max_size=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"ws://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def mute() -> Iterator[str]:
    """The address of a port that accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        yield f"ws://127.0.0.1:{silent.getsockname()[1]}"


@contextmanager
def web_server() -> Iterator[str]:
    """The address of a server that answers everything as one of web pages does."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            client, _ = listening.accept()
            with client:
                client.recv(65536)
                client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi")

        threading.Thread(target=answer, daemon=True).start()
        yield f"ws://127.0.0.1:{listening.getsockname()[1]}"


def hangs(_: dict[str, Any]) -> dict[str, Any]:
    """Answers after any patience."""
    time.sleep(3)
    return {}
