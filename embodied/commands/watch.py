"""`embodied watch`: the runs below a folder on a page in the browser, which follows them while they train.

The page is served on this machine's loopback interface alone. It is made from the runs' folders whenever it is asked
for; nothing is written, and what lies outside of the folder is not shown.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from html import escape
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from string import Template
from threading import Lock
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import tyro

from embodied.commands.runs import CONFIG, HEAD, Listed, check_folder, listed, none_below, row_of, run_folders
from embodied.config.files import saved_config
from embodied.errors import UserError
from embodied.reporting import report
from embodied.reporting.charts import compact
from embodied.reporting.live import tell
from embodied.reporting.run_record import RETURN, ReportError, RunFolder, read_run
from embodied.run import RUNS
from embodied.run.continued import command

HOST, PORT, LAST_PORT = "127.0.0.1", 8765, 65535
ROWS = 5
"""Latest iterations that the list shows of a run that trains."""
EVERY_MS = 2000
"""Milliseconds between an answer and the page's next request."""
SCRIPT = """
// Asks for the page again and shows the new one in place of the old, where the runs have changed.
let version = $version;
async function follow() {
  const state = document.getElementById("state");
  try {
    const answer = await fetch(location.href, {cache: "no-store", headers: {"If-None-Match": version}});
    if (answer.ok || answer.status === 404) {
      const next = new DOMParser().parseFromString(await answer.text(), "text/html").querySelector("main");
      const open = [...document.querySelectorAll("details[open] > summary")].map((line) => line.textContent);
      document.querySelector("main").replaceWith(next);
      for (const line of document.querySelectorAll("details > summary"))
        line.parentElement.open = open.includes(line.textContent);
      version = answer.headers.get("ETag");
      listen();
    } else state.textContent = "follows the runs";
  } catch { state.textContent = "embodied watch has ended"; }
  setTimeout(follow, $every);
}
setTimeout(follow, $every);
"""
ABOVE = '<nav>{} <span class="legend" id="state">follows the runs</span></nav>\n'


@dataclass(frozen=True)
class Arguments:
    """Show the runs below a folder in the browser, on a page of this machine that follows them while they train: the
    list of runs, the latest iterations of those that train, and each run's report as it would be written now."""

    runs_dir: tyro.conf.Positional[Path] = RUNS
    """Folder of the runs."""
    port: int = PORT
    """Port of 127.0.0.1 for the page; 0: a free one."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    """Serve the page until Ctrl-C."""
    check_port(args.port)
    check_folder(args.runs_dir, "as `embodied watch FOLDER`")
    with serving(args.runs_dir, args.port) as server:
        address = f"http://{HOST}:{server.server_port}/"
        try:
            tell(f"{args.runs_dir}: {address} (Ctrl-C ends it)")
            server.serve_forever()
        except KeyboardInterrupt:
            print()  # below the terminal's ^C
    return {"runs_dir": str(args.runs_dir), "address": address}


def check_port(port: int) -> None:
    """Raise `UserError` for a number that no port has."""
    if not 0 <= port <= LAST_PORT:
        raise UserError(f"--port is from 0 (a free one) to {LAST_PORT}, got {port}")


class Server(ThreadingHTTPServer):
    """A thread for each connection: a browser also opens some ahead of its requests."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report what a handler raised, but for a browser that has gone away."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


def serving(runs_dir: Path, port: int) -> Server:
    """A server of the page. Raises `UserError` where the port cannot be had."""
    try:
        return Server((HOST, port), partial(Pages, runs_dir, Lock()))
    except OSError as error:
        used = error.errno == errno.EADDRINUSE
        why = "is in use, perhaps by another `embodied watch`" if used else f"cannot be had ({error.strerror})"
        raise UserError(f"port {port} of {HOST} {why}: choose another with --port, or 0 for a free one") from error


class Pages(BaseHTTPRequestHandler):
    """Answers `/` with the list of runs, `/RUN/` with a run's report, and `/RUN/videos/FILE` with a film that is too
    large to be a part of it. A path is looked up among the runs and films that there are, and never opened."""

    def __init__(self, runs_dir: Path, drawing: Lock, *given: Any) -> None:
        self._runs_dir, self._drawing = runs_dir, drawing
        super().__init__(*given)

    def do_GET(self) -> None:
        # Another site's name that was made to mean this machine reads nothing.
        if self.headers.get("Host", "").partition(":")[0] not in (HOST, "localhost"):
            return self._send(HTTPStatus.FORBIDDEN, "text/plain", f"ask for {HOST} or localhost".encode())
        try:
            self._answer()
        except FileNotFoundError:  # a run replaces its files while they are read: the page asks again
            self._send(HTTPStatus.SERVICE_UNAVAILABLE, "text/plain", b"the run's files have just changed")

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path, errors="surrogateescape").strip("/")
        runs = {str(folder.relative_to(self._runs_dir)): folder for folder in _within(self._runs_dir)}
        if not path:
            found = [(name, listed(folder, self._runs_dir)) for name, folder in runs.items()]
            return self._send_page("Runs", found, lambda: list_page(self._runs_dir, found))
        if path in runs:
            one, state = runs[path], listed(runs[path], self._runs_dir)
            return self._send_page(state.name, [state, *_written(one)], lambda: run_page(one, state, self._runs_dir))
        name, _, film = path.rpartition("/videos/")
        for file in read_run(runs[name]).videos if name in runs else ():
            if file.name == film:
                return self._send(HTTPStatus.OK, "video/mp4", file.read_bytes())
        self._send_page("Not there", path, lambda: f"{ABOVE.format(ALL)}<p>There is no run {escape(path)}.</p>", 404)

    def _send_page(self, title: str, state: Any, body: Callable[[], str], status: int = HTTPStatus.OK) -> None:
        """Answer with the page, unless the browser has the one of this state."""
        version = hashlib.sha256(repr(state).encode("utf-8", "backslashreplace")).hexdigest()
        if self.headers.get("If-None-Match") == version:
            return self._send(HTTPStatus.NOT_MODIFIED, "text/html", b"")
        script = Template(SCRIPT).substitute(version=json.dumps(version), every=EVERY_MS)
        with self._drawing:  # matplotlib's settings are the process's
            page = report.page(title, body(), script)
        self._send(status, "text/html; charset=utf-8", page.encode(), version)

    def _send(self, status: int, kind: str, content: bytes, version: str = "") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("ETag", version)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged: the page sends one every two seconds."""


# --- what is on the pages

ALL = '<a href="/">All runs</a>'


def list_page(runs_dir: Path, found: Iterable[tuple[str, Listed]]) -> str:
    """The list of runs, the one that wrote last first, and below it the latest iterations of each that trains."""
    found = sorted(found, key=lambda named: (named[1].changed or 0.0, named[0]), reverse=True)
    rows = [(_link(name, one), *map(escape, _in_order(row_of(one))[1:])) for name, one in found]
    none = f'<p class="notice">{escape(none_below(runs_dir))}</p>'
    shown = report.table(_in_order(HEAD), rows, "runs") if rows else none
    header = f'<header><h1>Runs</h1><p class="facts">{escape(str(runs_dir.resolve()))}</p></header>'
    trains = [latest(Path(one.path), _link(name, one)) for name, one in found if one.running]
    return "\n".join([ABOVE.format(""), header, report.section("All runs", shown), *trains])


def _in_order(row: tuple[str, ...]) -> tuple[str, ...]:
    """A row with the policy last: what changes comes first, and is seen on a narrow page."""
    name, policy, *rest = row
    return name, *rest, policy


def latest(folder: Path, title: str) -> str:
    """A run's main figures and its latest iterations; `title` is HTML."""
    try:
        run = read_run(folder)
    except ReportError:  # it has only just begun
        return report.section(title, "")
    head = ("iteration", "env steps", "env steps/s", *(("success",) if run.measure is not RETURN else ()), "return")
    rows = report.table(head, _latest_rows(run)) if run.rows else ""
    return report.section(title, report.figures_of(run) + rows)


def _latest_rows(run: RunFolder) -> Iterator[tuple[str, ...]]:
    keys = ("farm/env_steps_per_s", *((run.measure.each,) if run.measure is not RETURN else ()), RETURN.each)
    shows = (compact, *((run.measure.show,) if run.measure is not RETURN else ()), RETURN.show)
    columns = [run.column(key) for key in keys]
    for place in reversed(range(max(len(run.rows) - ROWS, 0), len(run.rows))):
        row, values = run.rows[place], [column[place] for column in columns]
        numbers = ["–" if value is None else show(value) for show, value in zip(shows, values, strict=True)]
        yield str(row["iteration"]), f"{row['env_steps']:,}", *numbers


def run_page(folder: Path, state: Listed, runs_dir: Path) -> str:
    """A run's report as it would be written now, below the run's state and, for a stopped run, the command that
    resumes it."""
    try:
        content = report.report_of(read_run(folder))
    except ReportError as error:
        content = f'<p class="notice">{escape(str(error))}</p>'
    how = ""
    with suppress(UserError):  # of a damaged configuration, which the report says
        if state.stopped:
            typed = command(folder, runs_dir, None, saved_config(folder / CONFIG), state.stage)
            how = f'<p class="note">go on with <code>{escape(typed)}</code></p>'
    return ABOVE.format(f"{ALL} · {escape(state.state)}") + how + content


def _link(name: str, one: Listed) -> str:
    return f'<a href="/{quote(os.fsencode(name))}/">{escape(one.name)}</a>'


def _within(runs_dir: Path) -> Iterator[Path]:
    """The folders of runs whose files all lie below the folder: a link may lead to another folder."""
    root = runs_dir.resolve()
    for folder in run_folders(runs_dir):
        if all(path.resolve().is_relative_to(root) for path in (folder, *folder.iterdir(), *folder.glob("videos/*"))):
            yield folder


def _written(folder: Path) -> list[tuple[str, int, int]]:
    """Name, time and size of each file that a report may be made of."""
    files = [*folder.iterdir(), *folder.glob("videos/*")]
    return sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file())
