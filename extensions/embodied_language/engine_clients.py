"""Generation engines behind addresses: SGLang's and vLLM's own HTTP routes, asked as one engine.

Routes and fields are those of SGLang 0.5 (python/sglang/srt/entrypoints/http_server.py, managers/io_struct.py; its
"SGLang for RL Systems") and of vLLM 0.30 and later (vllm/entrypoints/openai/completion/protocol.py,
vllm/entrypoints/serve/dev/rlhf and dev/rpc, which VLLM_SERVER_DEV_MODE=1 opens), read in November 2026. Both have a
route that takes weights from a folder of safetensors, without pickled tensors, and say the version of theirs.

A server that is gone is asked again, or another one is, until the batch's time is over: what it had written is lost,
and every answer is taken once. A server that has come back with other weights is given the run's again first.
"""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import httpx

from embodied_language.engines import Completion, Drawing
from policies.errors import PolicyError, shown

PROBE = "Make 24 from 3, 8, 20. 한국어, Ελλάδα; <think> x**2 </think>"
"""A text whose tokens tell one vocabulary from another."""
AGAIN_S = 0.2
"""Wait before a server that is gone is asked again."""
CONNECT_S = 10.0
RESTORED = 2
"""Times that a server is given the run's weights again for one batch."""


class Gone(Exception):
    """The server cannot be reached, or broke off: another request may succeed."""


@cache
def _client() -> httpx.Client:
    """The process's connections. Proxies of the environment are for other networks than a cluster's own."""
    return httpx.Client(trust_env=False)


@dataclass(frozen=True)
class Server:
    """One server. Methods raise `Gone`, and `PolicyError` for what the server refuses and what it cannot have meant."""

    address: str
    """http://HOST:PORT"""
    name: ClassVar[str]
    start: ClassVar[str]
    """Command that starts one, in words."""

    def version(self, timeout_s: float) -> str:
        """Version of the weights that it has."""
        raise NotImplementedError

    def complete(
        self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, timeout_s: float
    ) -> list[Completion]:
        """n answers to each prompt, in order."""
        raise NotImplementedError

    def load(self, folder: Path, version: str, timeout_s: float) -> None:
        """Load weights, between the answers to two requests."""
        raise NotImplementedError

    def ask(self, method: str, path: str, timeout_s: float, body: Any = None) -> Any:
        """The answer's JSON. Raises `Gone` and `PolicyError`."""
        timeout = httpx.Timeout(max(timeout_s, 0.01), connect=min(max(timeout_s, 0.01), CONNECT_S))
        try:
            answer = _client().request(method, self.address + path, json=body, timeout=timeout)
        except httpx.ConnectTimeout as error:
            raise Gone(f"no connection within {timeout.connect:g} s") from error
        except httpx.TimeoutException as error:
            raise PolicyError(
                f"the {self.name} server at {self.address} did not answer {path} within {timeout_s:.0f} s: see whether "
                "it hangs, or raise policy.options.engine_timeout_s"
            ) from error
        except httpx.TransportError as error:
            raise Gone(str(error) or type(error).__name__) from error
        except (httpx.InvalidURL, ValueError) as error:
            raise PolicyError(f"{self.address} is no address of an engine: {error}") from error
        if answer.status_code >= 500:
            raise Gone(f"status {answer.status_code}: {_message(answer)}")
        if answer.status_code == 404:
            raise PolicyError(
                f"{self.address} has no route {path}: it is no {self.name} server as a run needs it; {self.start}"
            )
        if not answer.is_success:
            raise PolicyError(f"the {self.name} server at {self.address} refuses {path}: {_message(answer)}")
        try:
            return answer.json()
        except ValueError:
            return None

    def tokens(self, text: str, timeout_s: float) -> list[int]:
        """The tokens of a text, as the server's tokenizer has them."""
        found = self.ask("POST", "/tokenize", timeout_s, {"prompt": text, "add_special_tokens": False})
        with self._reading("/tokenize", found):
            return [int(token) for token in found["tokens"]]

    @contextmanager
    def _reading(self, path: str, found: Any) -> Iterator[None]:
        """Raise `PolicyError` where the block does not find in the answer what it looks for."""
        try:
            yield
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise PolicyError(
                f"{self.address} is no {self.name} server as a run needs it: {path} answers {shown(found)}"
            ) from error


class SGLang(Server):
    """SGLang. An answer has its version; an update waits for the answers under way, and clears the prefix cache."""

    name = "SGLang"
    start = "start one by `python -m sglang.launch_server --model-path MODEL`"

    def version(self, timeout_s: float) -> str:
        found = self.ask("GET", "/model_info", timeout_s)
        with self._reading("/model_info", found):
            return str(found["weight_version"])

    def complete(
        self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, timeout_s: float
    ) -> list[Completion]:
        parameters = {
            "max_new_tokens": drawing.count,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "top_k": -1,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "n": n,
            "stop_token_ids": list(drawing.ends),
            "skip_special_tokens": False,
        }
        body = {
            "input_ids": [list(prompt) for prompt in prompts],
            "sampling_params": parameters,
            "return_logprob": True,
        }
        found = self.ask("POST", "/generate", timeout_s, body)
        with self._reading("/generate", found):
            answers = [each["meta_info"] for each in (found if isinstance(found, list) else [found])]
            if any(info["finish_reason"]["type"] == "abort" for info in answers):
                raise Gone("it broke off answers")
            return [
                Completion(
                    tuple(int(token) for _, token, *_ in info["output_token_logprobs"]),
                    tuple(float(log_prob) for log_prob, *_ in info["output_token_logprobs"]),
                    str(info["weight_version"]),
                )
                for info in answers
            ]

    def load(self, folder: Path, version: str, timeout_s: float) -> None:
        # Without a pause: SGLang holds an update back until no request is under way, and requests until it is done.
        body = {"model_path": str(folder), "weight_version": version, "flush_cache": True}
        found = self.ask("POST", "/update_weights_from_disk", timeout_s, body)
        if not (isinstance(found, dict) and found.get("success")):
            raise PolicyError(f"the SGLang server at {self.address} did not load {folder}: {shown(found)}")


class VLLM(Server):
    """vLLM. An answer has no version: it is that of the server, if it is the same before and after."""

    name = "vLLM"
    start = "start one of 0.30 or later by `VLLM_SERVER_DEV_MODE=1 vllm serve MODEL`"

    def version(self, timeout_s: float) -> str:
        found = self.ask("GET", "/weight_info", timeout_s)
        with self._reading("/weight_info", found):
            return str(found["weight_version"])

    def complete(
        self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, timeout_s: float
    ) -> list[Completion]:
        before = self.version(timeout_s)
        body = {
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": drawing.count,
            "temperature": drawing.temperature,
            "top_p": drawing.top_p,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "n": n,
            # Tokens that end an answer are those that are sent, whatever the server's own files say.
            "ignore_eos": True,
            "stop_token_ids": list(drawing.ends),
            "skip_special_tokens": False,
            "logprobs": 1,
            "return_token_ids": True,
        }
        found = self.ask("POST", "/v1/completions", timeout_s, body)
        after = self.version(timeout_s)
        if before != after:
            raise Gone("its weights changed while it answered")
        with self._reading("/v1/completions", found):
            choices = sorted(found["choices"], key=lambda choice: choice["index"])
            if any(choice["finish_reason"] == "abort" for choice in choices):
                raise Gone("it broke off answers")
            return [
                Completion(
                    tuple(int(token) for token in choice["token_ids"]),
                    tuple(float(log_prob) for log_prob in choice["logprobs"]["token_logprobs"]),
                    after,
                )
                for choice in choices
            ]

    def load(self, folder: Path, version: str, timeout_s: float) -> None:
        # If the load fails, the server stays paused: weights that are half loaded are not to answer.
        self.ask("POST", "/pause?mode=wait", timeout_s)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self.ask("POST", "/collective_rpc", timeout_s, body)
        self.ask("POST", "/update_weight_version", timeout_s, {"new_version": version})
        self.ask("POST", "/resume", timeout_s)


DIALECTS: dict[str, type[Server]] = {"sglang": SGLang, "vllm": VLLM}


@dataclass(frozen=True)
class EngineServers:
    """Servers of one dialect as one `Engine`: a batch is divided among them."""

    servers: tuple[Server, ...]
    timeout_s: float
    """Longest time for a batch or an update, with everything that is done again."""
    probe: tuple[int, ...]
    """The tokens of `PROBE`, by the tokenizer of the model that is trained."""
    vocabulary: int
    """Number of its tokens."""

    @classmethod
    def of(cls, text: str, timeout_s: float, probe: Sequence[int], vocabulary: int) -> EngineServers:
        """The servers of a text as `servers_of` reads it."""
        return cls(servers_of(text), timeout_s, tuple(probe), vocabulary)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing, version: str, folder: Path | None = None
    ) -> list[Completion]:
        """`Engine.generate`. `folder`: of the weights, for a server that has others: one that was started again. Raises
        `PolicyError` where a server keeps to others, or answers what cannot be, and after `timeout_s`."""
        if not prompts:
            return []
        deadline, count = time.monotonic() + self.timeout_s, len(self.servers)
        parts = [list(range(first, len(prompts), count)) for first in range(min(count, len(prompts)))]

        def written(first: int) -> list[Completion]:
            asked = [prompts[index] for index in parts[first]]
            return self._asked(first, asked, n, drawing, (version, folder), deadline)

        answers: list[Completion | None] = [None] * (len(prompts) * n)
        with ThreadPoolExecutor(len(parts)) as threads:
            for rows, found in zip(parts, threads.map(written, range(len(parts))), strict=True):
                for place, row in enumerate(rows):
                    answers[row * n : (row + 1) * n] = found[place * n : (place + 1) * n]
        return [answer for answer in answers if answer is not None]

    def update_weights(self, folder: Path, version: str) -> None:
        """`Engine.update_weights`, of all servers. Raises `PolicyError` for a server of another vocabulary too."""
        deadline = time.monotonic() + self.timeout_s
        with ThreadPoolExecutor(len(self.servers)) as threads:
            list(threads.map(lambda server: self._give(server, folder, version, deadline), self.servers))

    def _give(self, server: Server, folder: Path, version: str, deadline: float) -> None:
        """Load the weights into a server, which may be about to come back."""
        while True:
            try:
                self._check_vocabulary(server, deadline)
                server.load(folder, version, deadline - time.monotonic())
                return
            except Gone as error:
                _wait_for(server, error, deadline, self.timeout_s)

    def _asked(
        self,
        first: int,
        prompts: Sequence[Sequence[int]],
        n: int,
        drawing: Drawing,
        weights: tuple[str, Path | None],
        deadline: float,
    ) -> list[Completion]:
        """The answers of the server with this number; where it is gone, of the next, and so on in turn."""
        version, folder = weights
        tried = restored = 0
        while True:
            server = self.servers[(first + tried) % len(self.servers)]
            try:
                found = server.complete(prompts, n, drawing, deadline - time.monotonic())
                others = sorted({answer.version for answer in found} - {version})
                if not others:
                    self._check(server, found, len(prompts) * n, drawing)
                    return [
                        self._to_the_end(server, prompts[place // n], answer, drawing, deadline)
                        for place, answer in enumerate(found)
                    ]
                if folder is None or restored == RESTORED:
                    raise PolicyError(
                        f"the engine at {server.address} answers by the weights {others[0]}, and {version} was asked "
                        "for: let no other run or program change its weights"
                    )
                restored += 1
                with _alone(folder):  # several workers find it out at once
                    if server.version(deadline - time.monotonic()) != version:
                        self._give(server, folder, version, deadline)
            except Gone as error:
                tried += 1
                _wait_for(server, error, deadline, self.timeout_s)

    def _check(self, server: Server, found: Sequence[Completion], expected: int, drawing: Drawing) -> None:
        """Raise `PolicyError` for answers that cannot be."""
        if len(found) != expected:
            raise PolicyError(f"the engine at {server.address} gave {len(found)} answers to {expected} questions")
        for answer in found:
            if not 0 < len(answer.tokens) == len(answer.log_prob) <= drawing.count:
                raise PolicyError(
                    f"the engine at {server.address} gave an answer of {len(answer.tokens)} tokens and "
                    f"{len(answer.log_prob)} log-probs, and 1 to {drawing.count} were asked for"
                )
            if max(answer.tokens) >= self.vocabulary or min(answer.tokens) < 0:
                raise self._other_vocabulary(server, f"it said the token {max(answer.tokens)}")

    def _to_the_end(
        self, server: Server, prompt: Sequence[int], answer: Completion, drawing: Drawing, deadline: float
    ) -> Completion:
        """The answer, gone on with where the engine ended it at a token that is not among `drawing.ends`, which the
        server's own files may name."""
        while answer.tokens[-1] not in drawing.ends and len(answer.tokens) < drawing.count:
            left = replace(drawing, count=drawing.count - len(answer.tokens))
            (more,) = server.complete([[*prompt, *answer.tokens]], 1, left, deadline - time.monotonic())
            if more.version != answer.version:
                raise Gone("its weights changed while it answered")
            self._check(server, [more], 1, left)
            answer = Completion(answer.tokens + more.tokens, answer.log_prob + more.log_prob, answer.version)
        return answer

    def _check_vocabulary(self, server: Server, deadline: float) -> None:
        """Raise `PolicyError` unless the server's tokenizer is that of the model that is trained."""
        found = server.tokens(PROBE, deadline - time.monotonic())
        if tuple(found) != self.probe:
            raise self._other_vocabulary(server, f"{PROBE!r} has {len(found)} tokens there, here {len(self.probe)}")

    def _other_vocabulary(self, server: Server, how: str) -> PolicyError:
        return PolicyError(
            f"the engine at {server.address} has another vocabulary than the policy ({how}): start it with the model "
            "that is trained, policy.options.checkpoint"
        )


def servers_of(text: str) -> tuple[Server, ...]:
    """The servers of a text `DIALECT ADDRESS [ADDRESS ...]`. Raises `PolicyError`."""
    dialect, *addresses = text.split() or [""]
    if dialect not in DIALECTS or not addresses or not all(a.startswith(("http://", "https://")) for a in addresses):
        raise PolicyError(
            f"policy.options.engine is a dialect ({', '.join(DIALECTS)}) and the addresses of its servers, for example "
            f"'sglang http://127.0.0.1:30000'; got {shown(text)}"
        )
    return tuple(DIALECTS[dialect](address.rstrip("/")) for address in addresses)


def _wait_for(server: Server, error: Gone, deadline: float, timeout_s: float) -> None:
    """Wait a little before the next attempt. Raises `PolicyError` where there is no time for one."""
    if time.monotonic() + AGAIN_S >= deadline:
        raise PolicyError(
            f"no answer of the engine at {server.address} within {timeout_s:g} s (last: {error}): start it, or raise "
            "policy.options.engine_timeout_s"
        ) from error
    time.sleep(AGAIN_S)


_mine = threading.Lock()


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """In the block, no other thread, and no other process that sees the folder, is in such a block."""
    with _mine, open(folder.parent / "restoring.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _message(answer: httpx.Response) -> str:
    """Text of a refusal, shortened."""
    try:
        found = answer.json()
        said = found.get("error", found)
        return str(said.get("message", said) if isinstance(said, dict) else said)[:300]
    except (ValueError, AttributeError):
        return shown(answer.text, 300)
