"""The record of a run: every row that was written is read, whatever happened in between."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from embodied.reporting.metrics import MetricsError, MetricsWriter, read
from tests.full_disk import full_disk


def write_rows(run_dir: Path, iterations: range, success: float = 0.5) -> None:
    with MetricsWriter(run_dir) as writer:
        for i in iterations:
            writer.write(i, 100 * i, {"wall_s": 2.0 * i, "env/success_once": success})


def test_rows_are_read_as_written(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    rows = read(tmp_path)
    assert rows[1] == {"iteration": 2, "env_steps": 200, "wall_s": 4.0, "env/success_once": 0.5}
    assert list(rows[0])[:3] == ["iteration", "env_steps", "wall_s"]


def test_a_row_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(1, 100, {"wall_s": 1.0})
    assert len(read(tmp_path)) == 1
    writer.close()


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, 100, {"a": math.nan, "b": -math.inf, "c": float(np.float32(0.25)), "d": 3})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert "NaN" not in line and "Infinity" not in line
    row = json.loads(line)
    assert (row["a"], row["b"], row["c"], row["d"]) == (None, None, 0.25, 3)


def test_a_resumed_run_repeats_the_rows_after_its_checkpoint(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 8))
    with MetricsWriter(tmp_path) as writer:
        writer.truncate(after_iteration=4)
        writer.write(5, 500, {"wall_s": 11.0, "env/success_once": 0.9})
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3, 4, 5]
    assert read(tmp_path)[-1]["env/success_once"] == 0.9


@pytest.mark.parametrize(
    "torn", [b'{"iteration": 3, "env_st', b"\0" * 5000, b'{"iteration": 3\0\0', b"\xff\xfe{"], ids=repr
)
def test_a_line_torn_by_a_crash_is_not_a_row(torn: bytes, tmp_path: Path) -> None:
    """Some file systems leave zeros of what was never written."""
    write_rows(tmp_path, range(1, 3))
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(torn)
    assert len(read(tmp_path)) == 2
    write_rows(tmp_path, range(3, 4))  # and the next row is not glued to it
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3]
    assert b"\0" not in (tmp_path / "metrics.jsonl").read_bytes()


def test_zeros_before_a_row_are_no_part_of_it(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 3))
    path = tmp_path / "metrics.jsonl"
    first, second, _ = path.read_bytes().split(b"\n")
    path.write_bytes(first + b"\n" + b"\0" * 99 + second + b"\n" + b"\0" * 9 + b"\n")
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2]


def test_a_full_disk_is_reported_once_and_no_record_is_lost(tmp_path: Path) -> None:
    messages: list[str] = []
    with MetricsWriter(tmp_path, say=messages.append) as writer:

        def add(number: int) -> None:
            writer.write(number, number, {"a": 1.0 / number})

        add(1)
        size = (tmp_path / "metrics.jsonl").stat().st_size
        with full_disk(size + 20):  # room for half of a row
            for number in (2, 3, 4):
                add(number)
            assert (tmp_path / "metrics.jsonl").stat().st_size == size, "half a row is left"
        assert [row["iteration"] for row in read(tmp_path)] == [1]
        add(5)
    assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3, 4, 5]
    assert (
        len(messages) == 2
        and "File too large" in messages[0]
        and "free some room" in messages[0]
        and "has all rows" in messages[1]
    )


def test_a_record_that_cannot_go_back_keeps_its_rows(tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 30))
    with MetricsWriter(tmp_path) as writer:
        with full_disk(100), pytest.raises(MetricsError, match="free some room"):
            writer.truncate(after_iteration=20)
        assert len(read(tmp_path)) == 29
        writer.truncate(after_iteration=20)
    assert len(read(tmp_path)) == 20


@pytest.mark.parametrize(
    "damaged",
    ["?", "[]", "{}", '{"iteration": 1e999}', '{"iteration": 2, "env_steps": 1, "a": "x"}', "[" * 50000],
    ids=lambda text: text[:20],
)
def test_a_damaged_line_is_named(damaged: str, tmp_path: Path) -> None:
    write_rows(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    first, _, last, _ = path.read_text().split("\n")
    path.write_text("\n".join([first, damaged, last, ""]))
    with pytest.raises(MetricsError, match="line 2 .* delete the line"):
        read(tmp_path)


def test_a_run_without_a_record_has_no_rows(tmp_path: Path) -> None:
    assert read(tmp_path) == []


def test_a_record_may_go_back_while_it_is_written(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as writer:
        for number in (1, 2, 3):
            writer.write(number, 100 * number, {"env/success_once": 0.5})
        writer.truncate(after_iteration=1)
        writer.write(2, 200, {"env/success_once": 0.75})
    assert [(row["iteration"], row["env/success_once"]) for row in read(tmp_path)] == [(1, 0.5), (2, 0.75)]
