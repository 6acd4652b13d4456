"""Hugging Face's hub as far as a download and an upload ask it, over folders of this machine: what its own client sees
is HTTP. Requests that the hub would refuse are refused here: without a token, of another shape, with another digest."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlparse

TOKEN = "hf_of_a_test"  # noqa: S105
"""The token that may write."""
LARGE = (".safetensors", ".parquet", ".mp4", ".model")
"""Endings of files that the hub keeps by their sha256, and not in git."""


class Hub:
    """Repositories in memory: `add` a folder as a commit of one, with branches and tags."""

    def __init__(self) -> None:
        self.store = Path(tempfile.mkdtemp(prefix="hub-"))
        """Files that were uploaded, by their digests."""
        self.private: set[str] = set()
        self.uploads: list[str] = []
        """Method and path of each request that writes."""
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

    def create(self, repository: str, private: bool) -> bool:
        """A new repository with the file that the hub puts there; False if there is one already."""
        if any(known == repository for known, _ in self.commits):
            return False
        self.private |= {repository} if private else set()
        first = self.keep(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        self.commit(repository, "main", {".gitattributes": first})
        return True

    def commit(self, repository: str, branch: str, files: dict[str, Path]) -> str:
        text = json.dumps([repository, branch, len(self.commits), {n: str(p) for n, p in sorted(files.items())}])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        self.commits[repository, commit] = files
        self.revisions[repository, branch] = commit
        return commit

    def keep(self, data: bytes) -> Path:
        path = self.store / hashlib.sha256(data).hexdigest()
        path.write_bytes(data)
        return path

    def contents(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The files of a revision."""
        found = self.found(repository, revision)
        assert found is not None
        return {name: path.read_bytes() for name, path in found[1].items()}

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

        def do_POST(self) -> None:
            self._change()

        def do_PUT(self) -> None:
            self._change()

        def do_DELETE(self) -> None:
            self._change()

        def _change(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            parts = [unquote(part) for part in urlparse(self.path).path.strip("/").split("/")]
            hub.uploads.append(f"{self.command} {'/'.join(parts)}")
            if self.command == "PUT" and parts[0] == "lfs":  # a signed address, for which no token is asked
                right = hashlib.sha256(data).hexdigest() == parts[1]
                hub.keep(data)
                return self._send(b"", 0, {"ETag": f'"{parts[1]}"'}, status=200 if right else 400)
            if self.headers.get("Authorization") != f"Bearer {TOKEN}":
                return self._send(b"", 0, {"X-Error-Message": "Invalid username or password."}, status=401)
            if parts[-2:] == ["objects", "batch"]:
                return self._json(self._batch(json.loads(data)))
            if parts[:3] == ["api", "repos", "create"]:
                asked = json.loads(data)
                kind = f"{asked.get('type') or 'model'}s"
                name = f"{asked['organization']}/{asked['name']}"
                made = hub.create(f"{kind}/{name}", asked.get("visibility") == "private")
                place = "" if kind == "models" else f"{kind}/"
                return self._json({"url": f"{address}/{place}{name}"}, status=200 if made else 409)
            if parts[1:] == ["validate-yaml"]:
                fine = json.loads(data)["content"].startswith("---\n")
                return self._json({"errors": [] if fine else [{"message": "no metadata"}]}, status=200 if fine else 400)
            self._change_repository("/".join(parts[1:4]), parts[4], "/".join(parts[5:]), data)

        def _change_repository(self, repository: str, what: str, revision: str, data: bytes) -> None:
            if not any(known == repository for known, _ in hub.commits):
                return self._refuse("RepoNotFound")
            if what == "preupload":
                files = json.loads(data)["files"]
                assert all({"path", "sample", "size"} <= file.keys() for file in files)
                modes = [(file["path"], "lfs" if file["path"].endswith(LARGE) else "regular") for file in files]
                return self._json({"files": [{"path": p, "uploadMode": m, "shouldIgnore": False} for p, m in modes]})
            if what == "commit":
                return self._commit(repository, revision, [json.loads(line) for line in data.splitlines()])
            known = (repository, revision) in hub.revisions
            if what in ("branch", "tag") and self.command == "POST":
                asked = json.loads(data or b"{}")
                at = asked.get("startingPoint") or "main"
                name, at = (asked["tag"], revision) if what == "tag" else (revision, at)
                if (repository, name) in hub.revisions:
                    return self._json({"error": "it exists"}, status=409)
                hub.revisions[repository, name] = hub.revisions.get((repository, at), at)
                return self._json({})
            if what == "tag" and self.command == "DELETE" and known:
                del hub.revisions[repository, revision]
                return self._json({})
            self._refuse("RevisionNotFound")

        def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
            assert (asked["operation"], asked["hash_algo"]) == ("upload", "sha256") and "basic" in asked["transfers"]
            answers: list[dict[str, Any]] = [{"oid": one["oid"], "size": one["size"]} for one in asked["objects"]]
            for one in answers:
                if not (hub.store / one["oid"]).exists():
                    one["actions"] = {"upload": {"href": f"{address}/lfs/{one['oid']}", "header": {}}}
            return {"transfer": "basic", "objects": answers}

        def _commit(self, repository: str, branch: str, lines: list[dict[str, Any]]) -> None:
            found = hub.found(repository, branch)
            if found is None:
                return self._refuse("RevisionNotFound")
            files = dict(found[1])
            header = lines[0]["value"]
            assert lines[0]["key"] == "header" and header["summary"]
            if header.get("parentCommit", found[0]) != found[0]:
                return self._json({"error": "A commit has happened since."}, status=412)
            for line in lines[1:]:
                key, value = line["key"], line["value"]
                if key == "file":
                    assert value["encoding"] == "base64" and not value["path"].endswith(LARGE)
                    files[value["path"]] = hub.keep(base64.b64decode(value["content"]))
                elif key == "lfsFile":
                    path = hub.store / value["oid"]
                    assert value["algo"] == "sha256" and path.stat().st_size == value["size"]
                    files[value["path"]] = path
                else:
                    assert key == "deletedFile", key
                    del files[value["path"]]
            commit = hub.commit(repository, branch, files)
            self._json({"success": True, "commitOid": commit, "commitUrl": f"{address}/{repository}/commit/{commit}"})

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
                    "X-Repo-Commit": found[0], "ETag": f'"{_etag(name, data)}"',
                    "Content-Type": "application/octet-stream",
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
                private = {"private": repository in hub.private}
                every = [_listed(name, path.read_bytes()) for name, path in files.items()]
                self._json({"id": "/".join(parts[1:3]), "sha": commit, "siblings": every, **private})

        def _json(self, data: object, status: int = 200) -> None:
            text = json.dumps(data).encode()
            self._send(text, len(text), {"Content-Type": "application/json"}, status)

        def _refuse(self, code: str) -> None:
            self._send(b"", 0, {"X-Error-Code": code, "X-Error-Message": code}, status=404)

        def _send(self, data: bytes, length: int, headers: dict[str, str], status: int = 200) -> None:
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(length)}.items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    address = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield address
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
        shutil.rmtree(hub.store)


def _listed(name: str, data: bytes) -> dict[str, Any]:
    found: dict[str, Any] = {"rfilename": name, "size": len(data), "blobId": _blob(data)}
    if name.endswith(LARGE):
        found["lfs"] = {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return found


def _etag(name: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if name.endswith(LARGE) else _blob(data)


def _blob(data: bytes) -> str:
    """Git's name of a file's contents."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
