"""The page of `embodied runs --out`: results of several folders in a table for each protocol, sorted by a click."""

from __future__ import annotations

import html
import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from embodied import cli
from embodied.config.files import parse_config, save_config
from embodied.statistics import wilson
from tests.embodied.reporting.browser import OPTIONS, _program
from tests.embodied.reporting.test_report import Page

PROTOCOL = {
    "name": None, "limits": {"tabletop/reach": None}, "trials": 50, "greedy": True, "seed": 0, "chunk": 4,
    "image_size": 128, "interval": "95% Wilson",
}  # fmt: skip


def write_result(folder: Path, success: float | None, digest: str, kind: str = "gaussian", **protocol: Any) -> Path:
    """A run's folder with an evaluation of 50 episodes, written on the day that `digest` begins with."""
    folder.mkdir(parents=True)
    settings = {"env": {"task": "tabletop/reach"}, "policy": {"kind": kind}, "name": folder.name}
    save_config(parse_config(settings, "test"), folder / "config.yaml")
    found: dict[str, Any] = {
        "task": "tabletop/reach",
        "episodes": 50,
        "return": 0.5,
        "return_low": 0.4,
        "return_high": 0.6,
    }
    if success is not None:
        low, high = wilson(round(50 * success), 50)
        found |= {"success_rate": success, "success_low": low, "success_high": high}
    found["protocol"] = {**PROTOCOL, **protocol, "sha256": digest.ljust(64, "0")}
    (folder / "eval.json").write_text(json.dumps(found))
    os.utime(folder / "eval.json", (int(digest[:2], 16) * 86400 * 30,) * 2)
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Runs of two people: of one protocol by three policies, one of them with another seed; of another; without any
    result; and a result that cannot be read."""
    anna, ben = tmp_path / "anna", tmp_path / "ben"
    write_result(anna / "a-run", 0.9, "01")
    write_result(anna / "b-run", 0.1, "02", kind="flow", seed=3)
    write_result(anna / "evals" / "baseline", 0.5, "03", kind="random", chunk=1)
    write_result(ben / "c-run", 1.0, "04", name="openvla-oft", limits={"libero/libero_spatial/0": 220})
    write_result(ben / "d-run", 0.5, "05", trials=20)
    write_result(ben / "e-run", None, "06", limits={"gymnasium/CartPole-v1": None})
    (write_result(ben / "f-run", 0.5, "07") / "eval.json").unlink()
    (write_result(ben / "g-run", 0.5, "08") / "eval.json").write_text("[")
    return anna, ben


def written(tmp_path: Path, *arguments: str | Path) -> dict[str, Any]:
    command = ["runs", *map(str, arguments), "--out", str(tmp_path / "page.html"), "--json", str(tmp_path / "r.json")]
    assert cli.main(command) == 0
    return json.loads((tmp_path / "r.json").read_text())


def test_results_of_several_folders_stand_in_a_table_for_each_protocol(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    result = written(tmp_path, *folders)
    found = {one["run"]: one for one in result["results"]}
    assert [*found] == ["a-run", "b-run", "evals/baseline", "c-run", "d-run", "e-run"]
    low, high = wilson(45, 50)
    assert found["a-run"] == {
        "folder": "anna", "run": "a-run", "policy": "gaussian", "task": "tabletop/reach", "protocol": None,
        "protocol_sha256": "01".ljust(64, "0"), "success_rate": 0.9, "success_low": low, "success_high": high,
        "return": 0.5, "return_low": 0.4, "return_high": 0.6, "episodes": 50, "date": found["a-run"]["date"],
    }  # fmt: skip
    assert found["e-run"]["success_rate"] is None and found["c-run"]["protocol"] == "openvla-oft"
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    tables = [section for section in re.findall(r"<section>.*?</section>", text, re.DOTALL) if "<table" in section]
    runs = [re.findall(r"<td>([\w/]*-run|evals/baseline)</td>", table) for table in tables]
    assert runs == [["a-run", "b-run", "evals/baseline"], ["c-run"], ["d-run"], ["e-run"], ["f-run", "g-run"]]
    assert page.says("90%") and page.says("0.4 to 0.6")
    assert page.says("flow") and page.says("04" + "0" * 10) and page.says("openvla-oft")
    assert page.says("Not evaluated") and page.says("stopped at iteration 0")
    assert not page.sources, "the page asks for other files"


def test_what_is_broken_or_absent_is_named_and_the_rest_is_there(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = written(tmp_path, *folders, tmp_path / "nobody")
    assert result["absent"] == [str(tmp_path / "nobody")] and len(result["results"]) == 6
    assert result["broken"] == [str(folders[1] / "g-run"), str(tmp_path / "nobody")]
    assert "nobody is not a folder" in capsys.readouterr().out
    page = Page((tmp_path / "page.html").read_text())
    assert page.says("Cannot be read") and page.says("nobody: it is not a folder") and page.says("g-run: ")


def test_a_run_that_two_folders_lead_to_is_listed_once(folders: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "team").mkdir()
    (tmp_path / "team" / "anna").symlink_to(folders[0])
    found = written(tmp_path, folders[0], tmp_path / "team")["results"]
    assert [one["run"] for one in found] == ["a-run", "b-run", "evals/baseline"]


def test_several_folders_are_listed_with_theirs(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", *map(str, folders)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split("|")[1].strip() == "folder"
    assert any("ben" in line and "c-run" in line for line in lines)
    assert cli.main(["runs", str(tmp_path / "none"), str(tmp_path / "nobody")]) == 2
    assert "there are no folders" in capsys.readouterr().err
    assert cli.main(["runs", str(tmp_path / "none")]) == 2
    assert "embodied runs FOLDER" in capsys.readouterr().err


CLICK = """<script>
const table = document.querySelector(".results table"), orders = [];
for (const column of COLUMNS) {
  table.rows[0].cells[column].click();
  orders.push([...table.rows].slice(1).map((row) => row.cells[0].textContent));
}
document.body.innerHTML = `<pre id="found">${JSON.stringify(orders)}</pre>`;
</script>"""


def test_a_click_sorts_and_equal_rows_keep_their_order(tmp_path: Path) -> None:
    for number, (name, success) in enumerate((("x", 0.1), ("y", 0.9), ("z", 0.1), ("w", 1.0))):
        write_result(tmp_path / "runs" / name, success, f"0{number}", kind="flow")
    (tmp_path / "runs" / "v").mkdir()
    written(tmp_path, tmp_path / "runs")
    page = tmp_path / "clicked.html"
    clicks = CLICK.replace("COLUMNS", "[1, 1, 0, 0, 6]")
    page.write_text((tmp_path / "page.html").read_text().replace("</body>", f"{clicks}</body>"))
    command = [_program(), *OPTIONS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    assert json.loads(html.unescape(found[1])) == [
        ["w", "y", "x", "z"],  # success, the largest first
        ["x", "z", "y", "w"],
        ["w", "x", "y", "z"],  # names
        ["z", "y", "x", "w"],
        ["w", "z", "y", "x"],  # dates, the latest first
    ]


def test_results_that_do_not_say_their_protocol_are_compared_within_a_task(tmp_path: Path) -> None:
    for name, task in (("one", "tabletop/reach"), ("two", "tabletop/push"), ("three", "tabletop/reach")):
        path = write_result(tmp_path / "runs" / name, 0.5, "01") / "eval.json"
        found = {**json.loads(path.read_text()), "task": task}
        del found["protocol"]
        path.write_text(json.dumps(found))
    written(tmp_path, tmp_path / "runs")
    page = (tmp_path / "page.html").read_text()
    assert re.findall(r"<h2[^>]*>(tabletop/\w+)", page) == ["tabletop/reach", "tabletop/push"]


def test_a_page_that_cannot_be_written_and_folders_named_twice_are_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["runs", *map(str, folders), "--out", str(folders[0])]) == 2
    assert f"the page {folders[0]} cannot be written" in " ".join(capsys.readouterr().err.split())
    assert cli.main(["runs", str(folders[0]), "--runs-dir", str(folders[1])]) == 2
    assert "not both" in capsys.readouterr().err
