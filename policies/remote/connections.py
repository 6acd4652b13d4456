"""Connections to a policy server: opened with its metadata, one question at a time each, every wait with an end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from websockets.exceptions import ConnectionClosed, InvalidURI, WebSocketException
from websockets.sync.client import ClientConnection, connect
from websockets.uri import parse_uri

from policies.errors import PolicyError, shown
from policies.remote.messages import LARGEST, pack, unpack

CLOSE_S = 1.0
"""Wait for a server to answer the end of a connection: one that hangs does not."""


class Connection:
    """One websocket to the server at `address`, and the server's `metadata`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        """Raises `PolicyError` where no server answers within `timeout_s`, or one of another protocol does."""
        self._address = address
        self._open = ExitStack()
        check_address(address)
        try:
            # openpi's server computes in the loop that would answer a ping: it may be silent for as long as its first
            # decision is compiled. A question's own deadline is what notices that it hangs.
            connecting = connect(
                address,
                compression=None,
                max_size=LARGEST,
                open_timeout=timeout_s,
                close_timeout=CLOSE_S,
                ping_interval=None,
                proxy=None,
            )
            self._socket: ClientConnection = self._open.enter_context(connecting)
        except (OSError, TimeoutError) as error:
            raise PolicyError(
                f"no policy server answers at {address} ({str(error) or type(error).__name__}): start one (`embodied "
                "serve RUN`, openpi's scripts/serve_policy.py), or name another with policy.options.address"
            ) from error
        except (WebSocketException, ValueError, EOFError) as error:
            raise PolicyError(f"{address} is no policy server: it does not speak websocket ({error})") from error
        try:
            self.metadata = self._metadata(timeout_s)
        except PolicyError:
            self.close()
            raise

    def ask(self, question: bytes, timeout_s: float) -> npt.NDArray[np.float32]:
        """The `actions` that the server answers to a packed observation, [..., H, A], all finite. Raises `PolicyError`.

        Afterwards the connection cannot be used further if it raises.
        """
        try:
            self._socket.send(question)
            answer = self._socket.recv(timeout_s)
        except TimeoutError:
            raise PolicyError(
                f"the policy server at {self._address} did not answer within {timeout_s:g} s: see whether it hangs, or "
                "raise policy.options.timeout_s"
            ) from None
        except (ConnectionClosed, OSError) as error:
            raise PolicyError(f"the policy server at {self._address} has gone ({error}): start it again") from error
        if isinstance(answer, str):
            raise PolicyError(f"the policy server at {self._address} failed: {_last_line(answer)}")
        return self._actions(self._unpacked(answer, "its answer"))

    def close(self) -> None:
        self._open.close()

    def _metadata(self, timeout_s: float) -> Mapping[str, Any]:
        try:
            first = self._socket.recv(timeout_s)
        except TimeoutError:
            raise PolicyError(
                f"{self._address} is no server of openpi's protocol: it sent no metadata within {timeout_s:g} s"
            ) from None
        except (ConnectionClosed, OSError) as error:
            raise PolicyError(
                f"{self._address} is no server of openpi's protocol: it sent no metadata ({error})"
            ) from error
        if isinstance(first, str):
            raise PolicyError(
                f"{self._address} is no server of openpi's protocol: its first message is the text {shown(first)}"
            )
        return self._unpacked(first, "its first message")

    def _unpacked(self, data: bytes, which: str) -> dict[str, Any]:
        try:
            found = unpack(data)
        except PolicyError as error:
            raise PolicyError(f"{self._address} is no server of openpi's protocol: {which} is {error}") from error
        if not isinstance(found, dict):
            raise PolicyError(
                f"{self._address} is no server of openpi's protocol: {which} is {shown(found)}, and no map"
            )
        return found

    def _actions(self, answer: Mapping[str, Any]) -> npt.NDArray[np.float32]:
        actions = answer.get("actions")
        if not isinstance(actions, np.ndarray) or actions.dtype.kind not in "fiu" or actions.ndim < 2:
            has = f"{shown(sorted(map(str, answer)))}" if actions is None else shown(actions)
            raise PolicyError(f"the policy server at {self._address} answers no actions [H, A] of numbers, but {has}")
        if not np.isfinite(actions).all():
            raise PolicyError(
                f"the policy server at {self._address} answers actions that are not finite: the first is "
                f"{actions[~np.isfinite(actions)][0]}"
            )
        return actions.astype(np.float32)


class Connections:
    """At most `most` connections to one server, each opened when all others are in use."""

    def __init__(self, address: str, most: int, timeout_s: float) -> None:
        """Opens one. Raises `PolicyError` as `Connection` does."""
        self._address, self._timeout_s = address, timeout_s
        first = Connection(address, timeout_s)
        self.metadata = first.metadata
        self._free, self._turn = [first], threading.BoundedSemaphore(most)

    def ask(self, question: bytes, timeout_s: float) -> npt.NDArray[np.float32]:
        """`Connection.ask` on a free one. May be called from several threads."""
        with self._one() as connection:
            return connection.ask(question, timeout_s)

    def close(self) -> None:
        while self._free:
            self._free.pop().close()

    @contextmanager
    def _one(self) -> Iterator[Connection]:
        with self._turn:
            try:
                connection = self._free.pop()  # atomic
            except IndexError:
                connection = Connection(self._address, self._timeout_s)
            try:
                yield connection
            except PolicyError:
                connection.close()
                raise
            self._free.append(connection)


def metadata_of(address: str, timeout_s: float) -> Mapping[str, Any]:
    """The server's metadata. Raises `PolicyError` as `Connection` does."""
    connection = Connection(address, timeout_s)
    connection.close()
    return connection.metadata


def question_of(observation: Mapping[str, Any]) -> bytes:
    """The packed observation."""
    return pack(dict(observation))


def check_address(address: str) -> None:
    """Raise `PolicyError` unless it is that of a websocket."""
    try:
        parse_uri(address)
    except (InvalidURI, ValueError):
        raise PolicyError(
            f"policy.options.address is that of a policy server, ws://HOST:PORT; got {shown(address)}"
        ) from None


def _last_line(text: str) -> str:
    """The line of a traceback that says what was wrong."""
    lines = [line for line in text.splitlines() if line.strip()]
    return shown(lines[-1].strip() if lines else text, 300)
