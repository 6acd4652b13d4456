"""Hugging Face's hub as far as a download asks it, over folders of this machine: what its own client sees is HTTP."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlparse


class Hub:
    """Repositories in memory: `add` a folder as a commit of one, with branches and tags."""

    def __init__(self) -> None:
        self.commits: dict[tuple[str, str], dict[str, Path]] = {}
        """By repository ("models/org/name") and commit, the files."""
        self.revisions: dict[tuple[str, str], str] = {}
        """By repository and branch or tag, the commit."""
        self.requests: list[str] = []
        """Files whose contents were asked for."""

    def add(self, repository: str, folder: Path, *revisions: str) -> str:
        files = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        digest = hashlib.sha1(usedforsecurity=False)
        for name, path in files.items():
            digest.update(name.encode() + path.read_bytes())
        commit = digest.hexdigest()
        self.commits[repository, commit] = files
        for revision in revisions or ("main",):
            self.revisions[repository, revision] = commit
        return commit

    def found(self, repository: str, revision: str) -> tuple[str, dict[str, Path]] | None:
        commit = self.revisions.get((repository, revision), revision)
        files = self.commits.get((repository, commit))
        return None if files is None else (commit, files)


@contextmanager
def serving(hub: Hub) -> Iterator[str]:
    """The address (HF_ENDPOINT) of a server that gives out these repositories."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, body: bool) -> None:
            parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
            if parts[0] == "api":
                self._api(parts[1:])
            else:
                kind = parts.pop(0) if parts[0] == "datasets" else "models"
                repository, revision, name = "/".join([kind, *parts[:2]]), parts[3], "/".join(parts[4:])
                found = hub.found(repository, revision)
                if found is None or name not in found[1]:
                    return self._refuse("EntryNotFound")
                data = found[1][name].read_bytes()
                hub.requests += [name] * body
                self._send(data if body else b"", len(data), {
                    "X-Repo-Commit": found[0], "ETag": f'"{_blob(data)}"', "Content-Type": "application/octet-stream",
                })  # fmt: skip

        def _api(self, parts: list[str]) -> None:
            repository, what = "/".join(parts[:3]), parts[3:]
            if not any(known == repository for known, _ in hub.commits):
                return self._refuse("RepoNotFound")
            found = hub.found(repository, what[1] if len(what) > 1 else "main")
            if found is None:
                return self._refuse("RevisionNotFound")
            commit, files = found
            if what[:1] == ["tree"]:
                entries = [(name, path.read_bytes()) for name, path in files.items()]
                self._json([{"type": "file", "path": n, "size": len(d), "oid": _blob(d)} for n, d in entries])
            else:
                self._json({"id": "/".join(parts[1:3]), "sha": commit, "siblings": [{"rfilename": n} for n in files]})

        def _json(self, data: object) -> None:
            text = json.dumps(data).encode()
            self._send(text, len(text), {"Content-Type": "application/json"})

        def _refuse(self, code: str) -> None:
            self._send(b"", 0, {"X-Error-Code": code, "X-Error-Message": code}, status=404)

        def _send(self, data: bytes, length: int, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(length)}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _blob(data: bytes) -> str:
    """Git's name of a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
