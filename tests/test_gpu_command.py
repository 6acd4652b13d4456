"""`python benchmarks/gpu.py`: parts in processes of their own, what is kept of them, and the table.

Every stage itself is tried with a tiny model by `python benchmarks/gpu.py --cpu`, here those of seconds."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu_stages import table
from benchmarks.gpu_stages.parts import STAGES, Part, parts_of, select
from benchmarks.gpu_stages.record import MEASURED, Record
from benchmarks.gpu_stages.runner import MARK, Machine, Runner, _marked, digest

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("openvla-tiny", "openvla-oft-tiny")
MACHINE = Machine("a processor, 2 cores, no GPU", False, {"torch": "2"}, "", "580", "abc", "digest")
OFFLOAD = next(stage for stage in STAGES if stage.name == "offload")
GOOD = Part(OFFLOAD, "", "openvla-tiny", 1.0)
WRONG = Part(replace(OFFLOAD, name="weights", module="work"), "", "openvla-tiny", 1.0)
"""Its module has no `weights`."""


def run(path: Path, *parts: Part, again: bool = False, machine: Machine = MACHINE, seconds: float = 200) -> int:
    return Runner(ROOT, Record(path), machine, "cpu", seconds).run(parts, again)


def entries(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["parts"]


def test_parts_are_made_for_each_model_where_a_stage_is_about_models() -> None:
    names = [part.name for part in parts_of(MODELS, "cpu")]
    assert names[:3] == ["doctor", "paths", "act/openvla-tiny"]
    assert {"act/openvla-oft-tiny", "learn/openvla-tiny", "draw/libero", "weights/full", "modes/ray"} < set(names)
    assert [part.name for part in select(parts_of(MODELS, "cpu"), ["modes/ray", "act"])] == [
        "act/openvla-tiny", "act/openvla-oft-tiny", "modes/ray",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="there is no stage acting; there are: act, act/openvla-oft-tiny"):
        select(parts_of(MODELS, "cpu"), ["acting"])


@pytest.mark.slow
def test_what_fails_is_recorded_and_the_others_go_on_and_a_later_call_continues(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results" / "gpu.json"
    assert run(path, WRONG, GOOD) == 1
    found = entries(path)
    assert found["weights"]["state"] == "failed" and "weights" in found["weights"]["message"]
    assert "AttributeError" in found["weights"]["traceback"][-1]
    assert found["offload"]["state"] == MEASURED and found["offload"]["figures"]["equal_after"]
    assert found["offload"]["command"] == "python benchmarks/gpu.py --only offload --model openvla-tiny --cpu"
    assert (tmp_path / "results" / "gpu_logs" / "weights.txt").read_text().count("AttributeError") == 1

    capfd.readouterr()
    assert run(path, GOOD) == 0
    assert "measured already" in capfd.readouterr().out
    assert entries(path) == found

    # Of other sources it is measured again; with no time left it is not begun, and what there was stays.
    assert run(path, GOOD, machine=replace(MACHINE, sources="other"), seconds=0) == 0
    assert "not begun" in capfd.readouterr().out and entries(path) == found


@pytest.mark.slow
def test_a_part_that_is_late_is_ended_with_all_that_it_has_started(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    late = replace(GOOD, stage=replace(OFFLOAD, limit_s=0.3))
    assert run(path, late) == 1
    assert entries(path)["offload"]["state"] == "late"


def test_a_process_that_has_left_its_session_is_recognised_by_the_mark() -> None:
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    process = subprocess.Popen(command, env={MARK: "one of a kind"}, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while _marked("one of a kind") != [process.pid]:
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()
    assert _marked("another") == []


def test_a_failure_does_not_take_the_place_of_what_was_measured_before(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json")
    good = {"state": MEASURED, "identity": {"sources": "1"}, "figures": {"a": 1}}
    record.put("act", good)
    record.put("act", {"state": "failed", "identity": {"sources": "2"}, "figures": {}})
    again = Record(tmp_path / "gpu.json")
    assert again.is_measured("act", {"sources": "1"}) and not again.is_measured("act", {"sources": "2"})
    assert again.was_tried("act", {"sources": "2"}) and not again.was_tried("act", {"sources": "1"})
    record.put("act", good)
    assert "failed_since" not in entries(tmp_path / "gpu.json")["act"]


def test_a_file_that_is_no_record_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "gpu.json").write_text("[]")
    with pytest.raises(SystemExit, match="is no record of this command"):
        Record(tmp_path / "gpu.json")
    assert (tmp_path / "gpu.json").read_text() == "[]"


def test_the_table_stands_between_its_marks_with_what_was_wanted(tmp_path: Path) -> None:
    record = Record(tmp_path / "gpu.json")
    rates = {"decisions_per_s": 120.0, "actions_per_s": 120.0, "batch": 64, "share_of_limit": 0.6}
    rates |= {"peak_memory_bytes": 3e10, "time_to_first_action_s": 0.1}
    known = {
        "date": "2026-11-22T08:00", "hardware": "H200", "versions": {"torch": "2"}, "commit": "abc", "identity": {},
        "device": "cuda", "model": "openvla-7b",
    }  # fmt: skip
    record.put("act/openvla-7b", known | {"state": MEASURED, "figures": rates})
    record.put("learn/openvla-7b", known | {"state": "failed", "figures": {}, "message": "out | of memory\nmore"})
    page = tmp_path / "page.md"
    page.write_text(f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n")
    assert table.show(record, str(page)) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| act/openvla-7b | 120.0 actions/s by 64, 0.60 of the limit | 100 actions/s: yes |" in text
    assert "| learn/openvla-7b | failed: out / of memory |" in text
    assert "Measured on 2026-11-22 on H200; torch 2; commit abc." in text

    page.write_text("no marks")
    assert table.show(record, str(page)) == 2 and page.read_text() == "no marks"


def test_the_digest_is_of_the_sources(tmp_path: Path) -> None:
    (tmp_path / "embodied").mkdir()
    source = tmp_path / "embodied" / "a.py"
    source.write_text("1")
    first = digest(tmp_path)
    source.write_text("2")
    assert digest(tmp_path) != first
    (tmp_path / "embodied" / "notes.md").write_text("2")
    second = digest(tmp_path)
    source.write_text("1")
    assert digest(tmp_path) == first != second


def test_the_command_says_its_stages_without_torch() -> None:
    """Whatever package does not work on the machine, the command itself does."""
    code = "import sys; sys.modules['torch'] = None; sys.argv = ['gpu.py', '--help']; import runpy; "
    code += f"runpy.run_path({str(ROOT / 'benchmarks/gpu.py')!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert all(stage.name in result.stdout for stage in STAGES)
