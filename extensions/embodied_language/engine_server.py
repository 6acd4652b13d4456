"""A small generation server that speaks the routes of SGLang and of vLLM which a run needs, for models of a CPU's size.

    python -m embodied_language.engine_server MODEL --port 30000

It is there for trials on one machine and for tests of what asks it; nothing but `InProcessEngine` computes. A batch is
written after the other, and an update waits for the one under way. It listens on the loopback interface, and has no
password: any program that reaches it can have it read any model's directory of its machine.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from embodied_language.engines import Completion, Drawing, InProcessEngine
from policies.errors import PolicyError, shown

LARGEST = 2**26
"""Bytes of a request."""

Body = Mapping[str, Any]


class GenerationServer:
    """The routes. Each takes the request's body and gives the answer's; `PolicyError` refuses a request."""

    def __init__(self, engine: InProcessEngine, model: str) -> None:
        self._engine, self._model = engine, model
        self._open = threading.Event()
        """Cleared by /pause: requests wait for /resume."""
        self._open.set()
        self.routes: dict[tuple[str, str], Callable[[Body], Any]] = {
            ("GET", "/health"): lambda body: {},
            ("POST", "/tokenize"): self.tokenize,
            # SGLang's
            ("GET", "/model_info"): lambda body: {"model_path": self._model, "weight_version": engine.version},
            ("POST", "/generate"): self.generate,
            ("POST", "/update_weights_from_disk"): self.update_weights_from_disk,
            # vLLM's
            ("GET", "/v1/models"): lambda body: {"data": [{"id": model, "max_model_len": engine.context}]},
            ("GET", "/weight_info"): lambda body: {"weight_version": engine.version},
            ("POST", "/v1/completions"): self.completions,
            ("POST", "/pause"): self.pause,
            ("POST", "/collective_rpc"): self.collective_rpc,
            ("POST", "/update_weight_version"): self.update_weight_version,
            ("POST", "/resume"): self.resume,
        }

    def tokenize(self, body: Body) -> Any:
        tokens = self._engine.prompts.encode(str(body.get("prompt", "")))
        return {"tokens": tokens, "count": len(tokens), "max_model_len": self._engine.context}

    # --- SGLang

    def generate(self, body: Body) -> Any:
        asked, several = _prompts(body.get("input_ids"))
        parameters = body.get("sampling_params") or {}
        drawing = self._drawing(parameters, "max_new_tokens")
        n = int(parameters.get("n", 1))
        found = [
            {
                "output_ids": answer.tokens,
                "meta_info": {
                    "output_token_logprobs": [
                        [p, t, None] for t, p in zip(answer.tokens, answer.log_prob, strict=True)
                    ],
                    "finish_reason": _reason(answer, drawing),
                    "completion_tokens": len(answer.tokens),
                    "weight_version": answer.version,
                },
            }
            for answer in self._written(asked, n, drawing)
        ]
        return found if several or n > 1 else found[0]

    def update_weights_from_disk(self, body: Body) -> Any:
        self._engine.update_weights(Path(str(body.get("model_path"))), str(body.get("weight_version", "default")))
        return {"success": True, "message": "Succeeded to update model weights."}

    # --- vLLM

    def completions(self, body: Body) -> Any:
        asked, _ = _prompts(body.get("prompt"))
        drawing = self._drawing(body, "max_tokens")
        choices = [
            {
                "index": index,
                "token_ids": answer.tokens,
                "logprobs": {"token_logprobs": answer.log_prob},
                "finish_reason": _reason(answer, drawing)["type"],
            }
            for index, answer in enumerate(self._written(asked, int(body.get("n", 1)), drawing))
        ]
        return {"object": "text_completion", "model": self._model, "choices": choices}

    def pause(self, body: Body) -> Any:
        if body.get("mode") != "wait":
            raise PolicyError("this server pauses by mode=wait")
        self._open.clear()
        self._engine.await_written()
        return {"status": "paused"}

    def collective_rpc(self, body: Body) -> Any:
        if body.get("method") != "reload_weights":
            raise PolicyError(f"this server knows the method reload_weights, got {shown(body.get('method'))}")
        self._engine.update_weights(Path(str(body["kwargs"]["weights_path"])), self._engine.version)
        return {"results": [None]}

    def update_weight_version(self, body: Body) -> Any:
        self._engine.rename_weights(str(body["new_version"]))
        return {"success": True, "new_version": self._engine.version}

    def resume(self, body: Body) -> Any:
        self._open.set()
        return {"status": "resumed"}

    # --- both

    def _written(self, prompts: Sequence[Sequence[int]], n: int, drawing: Drawing) -> list[Completion]:
        self._open.wait()
        return self._engine.generate(prompts, n, drawing)

    def _drawing(self, parameters: Body, count: str) -> Drawing:
        ends = parameters.get("stop_token_ids") or self._engine.prompts.ends
        return Drawing(
            count=int(parameters.get(count, 16)),
            ends=tuple(int(end) for end in ends),
            temperature=float(parameters.get("temperature", 1.0)),
            top_p=float(parameters.get("top_p", 1.0)),
        )


def _prompts(given: Any) -> tuple[list[list[int]], bool]:
    """The prompts, and whether they were a list. Raises `PolicyError` for what is no token ids."""
    several = isinstance(given, list) and bool(given) and isinstance(given[0], list)
    prompts = given if several else [given]
    if not all(isinstance(p, list) and p and all(type(token) is int for token in p) for p in prompts):
        raise PolicyError(f"prompts are lists of token ids, got {shown(given)}")
    return prompts, several


def _reason(answer: Completion, drawing: Drawing) -> dict[str, Any]:
    last = answer.tokens[-1]
    return {"type": "stop", "matched": last} if last in drawing.ends else {"type": "length", "length": drawing.count}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    generation: GenerationServer

    def do_GET(self) -> None:
        self._answer("GET", {})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        # A page in a browser says where it is from, or sends no JSON without asking first.
        if length and (self.headers.get_content_type() != "application/json" or "Origin" in self.headers):
            self._send(HTTPStatus.FORBIDDEN, {"error": {"message": "requests are JSON, and not from a browser"}})
        elif length > LARGEST:
            self._send(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, {"error": {"message": f"more than {LARGEST} bytes"}})
            self.close_connection = True
        else:
            try:
                self._answer("POST", json.loads(self.rfile.read(length) or b"{}"))
            except ValueError as error:
                self._send(HTTPStatus.BAD_REQUEST, {"error": {"message": f"no JSON: {error}"}})

    def _answer(self, method: str, body: Any) -> None:
        path = urlsplit(self.path)
        route = self.generation.routes.get((method, path.path))
        if route is None:
            self._send(HTTPStatus.NOT_FOUND, {"error": {"message": f"no route {method} {path.path}"}})
            return
        try:
            found = route({**{name: values[-1] for name, values in parse_qs(path.query).items()}, **body})
        except (PolicyError, KeyError, TypeError, ValueError) as error:
            self._send(HTTPStatus.BAD_REQUEST, {"error": {"message": str(error) or type(error).__name__}})
        else:
            self._send(HTTPStatus.OK, found)

    def _send(self, status: HTTPStatus, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not listed."""


class _Listening(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


def listening(host: str, port: int, generation: GenerationServer) -> ThreadingHTTPServer:
    """The server, which answers once it is told to; port 0: a free one. Raises `OSError`, `OverflowError`."""
    return _Listening((host, port), type("Handler", (_Handler,), {"generation": generation}))


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m embodied_language.engine_server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("model", type=Path, help="directory of a causal language model, as transformers saves it")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=30000, help="0: a free one (default: %(default)s)")
    parser.add_argument("--rows", type=int, default=64, help="answers written side by side (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        engine = InProcessEngine(given.model, rows=given.rows, seed=given.seed)
        server = listening(given.host, given.port, GenerationServer(engine, str(given.model)))
    except (PolicyError, OSError, OverflowError) as error:
        print(error, file=sys.stderr)
        return 1
    with server:
        print(f"{given.model} is served at http://{given.host}:{server.server_port}; Ctrl-C ends", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
