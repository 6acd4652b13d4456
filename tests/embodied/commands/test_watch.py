"""`embodied watch`: the page follows runs that train, and shows nothing else."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.client import HTTPConnection
from pathlib import Path
from threading import Thread

import pytest

import embodied
from embodied import cli
from embodied.commands.watch import HOST, serving
from embodied.config.files import load_config, with_settings
from embodied.reporting import report
from embodied.training.callbacks import IterationEnd
from tests.embodied.commands.test_listed_runs import ROW, make

SMALL = {
    "iterations": 2, "name": "trains", "runtime.mode": "inline", "rollout.decisions": 16,
    "eval.episodes": 2, "eval.videos": 0, "stop_at": None,
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    status: int
    text: str
    version: str
    kind: str


Ask = Callable[..., Answer]


@pytest.fixture
def ask(tmp_path: Path) -> Iterator[Ask]:
    """Asks a server of the folder `runs` as a browser does."""
    (tmp_path / "runs").mkdir()
    with serving(tmp_path / "runs", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()

        def ask(path: str, *, version: str = "", host: str = HOST, method: str = "GET") -> Answer:
            connection = HTTPConnection(HOST, server.server_port)
            headers = {"Host": host, **({"If-None-Match": version} if version else {})}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            text = answer.read().decode("utf-8", "replace")
            connection.close()
            named = (answer.headers.get(name) or "" for name in ("ETag", "Content-Type"))
            return Answer(answer.status, text, *named)

        yield ask
        server.shutdown()


@pytest.mark.parametrize("path", ["/", "/one/"])
def test_the_page_is_made_again_where_a_run_has_another_row(path: str, ask: Ask, tmp_path: Path) -> None:
    run = make(tmp_path / "runs/one", 1)
    first = ask(path)
    assert "iteration 1 of 4" in first.text and first.version in first.text
    assert ask(path, version=first.version).status == 304
    with (run / "metrics.jsonl").open("a") as rows:
        rows.write(json.dumps({"iteration": 2, **ROW}) + "\n")
    second = ask(path, version=first.version)
    assert second.status == 200 and "iteration 2 of 4" in second.text and second.version != first.version


def test_a_run_that_was_stopped_has_the_command_that_goes_on_with_it(ask: Ask, tmp_path: Path) -> None:
    make(tmp_path / "runs/group/one", 1)
    learned = make(tmp_path / "runs/learned", 0, sft={"steps": 200})
    (learned / "metrics.jsonl").write_text(json.dumps({"iteration": 100, "env_steps": 6400, "sft/loss": 0.1}) + "\n")
    root = tmp_path / "runs"
    own = f"{root}/group/one/config.yaml --name group/one --runs-dir {root} --resume auto"
    assert f"go on with <code>embodied train {own}</code>" in ask("/group/one/").text
    assert f"go on with <code>embodied sft {root}/learned/config.yaml" in ask("/learned/").text
    make(tmp_path / "runs/done", 4, 1.0)
    assert "go on with" not in ask("/done/").text


@pytest.mark.slow
def test_a_run_is_followed_while_it_trains(ask: Ask, tmp_path: Path) -> None:
    seen = [ask("/")]
    page: list[Answer] = []

    def look(iteration: IterationEnd) -> None:
        """Called before the iteration's own row is written."""
        ended = iteration.iteration - 1
        seen.append(ask("/", version=seen[-1].version))
        assert seen[-1].status == 200, "a row more, and the page is another"
        assert f"running, iteration {ended} of 2" in seen[-1].text
        assert ask("/", version=seen[-1].version).status == 304
        assert re.findall(r"<tr><td>(\d+)</td>", seen[-1].text) == [str(i) for i in range(ended, 0, -1)]
        if ended:
            page.append(ask("/trains/"))
            assert f"running, iteration {ended} of 2" in page[0].text and "all sessions of the run" in page[0].text

    config = with_settings(load_config("reach"), SMALL, "test")
    embodied.train(config, runs_dir=tmp_path / "runs", callbacks=[look])
    listed, last = ask("/", version=seen[-1].version), ask("/trains/", version=page[0].version)
    assert len(seen) == 3 and "finished" in listed.text and "running" not in listed.text
    assert "Success in evaluation" in last.text and "connect-src 'self'" in last.text
    assert "connect-src" not in (tmp_path / "runs/trains/report.html").read_text(), "a page in a file asks nobody"


def test_names_lead_to_runs_whatever_they_are_made_of(ask: Ask, tmp_path: Path) -> None:
    names = ["a/b", "<b>x&y 50%25 ?#ä", b"\xff".decode(errors="surrogateescape")]
    for name in names:
        make(tmp_path / "runs" / name, 2)
    listed = ask("/").text
    links = re.findall(r'<td><a href="(/[^"]+/)">', listed)
    assert len(links) == len(names) and "<b>x" not in listed
    for link in links:
        answer = ask(link)
        assert answer.status == 200 and "stopped at iteration 2 of 4" in answer.text, link


def test_a_film_too_large_for_the_page_is_a_file_of_the_run(
    ask: Ask, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    films = make(tmp_path / "runs/one", 1) / "videos"
    films.mkdir()
    (films / "fail 1.mp4").write_text("a film")
    (films / "notes.txt").write_text("notes")
    monkeypatch.setattr(report, "VIDEO_BYTES", 0)
    source = re.search(r'<video [^>]*src="([^"]+)"', ask("/one/").text)
    assert source is not None
    found = ask(f"/one/{source[1]}")
    assert (found.status, found.text, found.kind) == (200, "a film", "video/mp4")
    assert ask("/one/videos/notes.txt").status == 404


@pytest.mark.parametrize(
    "path",
    ["/secret", "/../secret", "/%2e%2e/secret", "/one/config.yaml", "/one/../../secret", "/one/videos/../config.yaml",
     "/one/videos/%2e%2e%2fconfig.yaml", "//etc/passwd", "/out/", "/linked/", "/checkpoints/", "/none/"],
)  # fmt: skip
def test_nothing_else_is_shown(path: str, ask: Ask, tmp_path: Path) -> None:
    """Neither other files of a run, nor what a run's links lead to outside of the folder."""
    (tmp_path / "secret").write_text("secret: 7")
    make(tmp_path / "elsewhere", 1)
    make(tmp_path / "runs/one", 1)
    (tmp_path / "runs/out").symlink_to(tmp_path / "elsewhere")
    linked = make(tmp_path / "runs/linked", 1) / "config.yaml"
    linked.unlink()
    linked.symlink_to(tmp_path / "secret")
    answer = ask(path)
    assert answer.status == 404 and "secret: 7" not in answer.text
    assert re.findall(r'<td><a href="/([^"]+)/">', ask("/").text) == ["one"]


def test_it_is_read_by_pages_of_this_machine_alone_and_writes_nothing(ask: Ask, tmp_path: Path) -> None:
    make(tmp_path / "runs/one", 1)
    before = sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*"))
    assert ask("/", host="elsewhere.example").status == ask("/one/", host="elsewhere.example:80").status == 403
    assert ask("/", host="localhost:8765").status == 200
    assert {ask("/one/", method=method).status for method in ("POST", "PUT", "DELETE")} == {501}
    assert ask("/one/").status == 200
    assert sorted((path, path.stat().st_mtime_ns) for path in tmp_path.rglob("*")) == before


def test_a_folder_without_runs_and_a_run_without_anything_are_said(ask: Ask, tmp_path: Path) -> None:
    assert "no runs below" in ask("/").text
    (tmp_path / "runs/begun/checkpoints").mkdir(parents=True)
    assert "begun" in ask("/").text
    assert "is not a run&#x27;s folder" in ask("/begun/").text


@pytest.mark.parametrize("port", ["taken", "65536", "-1"])
def test_a_port_that_cannot_be_had_is_one_message(
    port: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server((HOST, 0)) as other:
        number = str(other.getsockname()[1]) if port == "taken" else port
        assert cli.main(["watch", str(tmp_path), "--port", number]) == 2
    message = capsys.readouterr().err
    wanted = f"port {number} of {HOST} is in use" if port == "taken" else "--port is from 0 (a free one) to 65535"
    assert wanted in message and "Traceback" not in message


def test_a_folder_that_is_not_there_is_one_message(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["watch", str(tmp_path / "none")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_ctrl_c_ends_it_without_a_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "embodied.cli", "watch", str(tmp_path), "--port", "0"]
    with subprocess.Popen([*command, "--json", str(tmp_path / "result.json")], text=True,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        address = re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0 and process.stderr.read() == ""
    assert address is not None
    assert json.loads((tmp_path / "result.json").read_text())["address"] == address[0]
