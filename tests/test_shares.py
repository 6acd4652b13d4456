"""Shares of the slow tests: every file is in one, and no share is much longer than another."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import shares
from tests.shares import NoShare, Share

ROOT = Path(__file__).parent.parent


def test_every_file_with_slow_tests_is_in_exactly_one_share() -> None:
    seconds = shares.seconds_of_files()
    every = [file for share in shares.shares(seconds) for file in share.files]
    assert sorted(every) == sorted(seconds) and "tests/sim_farm/test_libero_plus_beside.py" in every


def test_measured_files_are_there() -> None:
    measured = shares.json.loads(shares.SECONDS.read_text())
    assert set(measured) <= set(shares.seconds_of_files()), "slow_seconds.json names files without slow tests"


def test_long_files_are_spread() -> None:
    found = shares.shares({"a": 50, "b": 40, "c": 30, "d": 20, "e": 10}, 2)
    assert found == [Share(1, ("a", "d", "e"), 80), Share(2, ("b", "c"), 70)]


@pytest.mark.parametrize("number", [0, shares.COUNT + 1])
def test_a_share_that_does_not_exist_is_refused(number: int) -> None:
    with pytest.raises(NoShare, match=f"no share {number} of the slow tests: they are 1 to {shares.COUNT}"):
        shares.share(number)


@pytest.mark.parametrize("wanted", ["99", "x"])
def test_pytest_refuses_it_with_one_line(wanted: str) -> None:
    command = [sys.executable, "-m", "pytest", "--share", wanted, "--collect-only", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 4 and f"--share {wanted}" in done.stderr and "Traceback" not in done.stderr


def test_a_pass_is_written_into_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "README.md"
    page.write_text(f"before\n{shares.BEGIN}{shares.END}after\n")
    monkeypatch.setattr(shares, "PAGE", page)
    monkeypatch.setattr(shares, "git", lambda *arguments: "0123abcd")
    shares.passed(2)
    shares.passed(1)
    lines = page.read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert [line.split("|")[-2].split(",")[0].strip() for line in lines[4:7]] == ["0123abcd", "0123abcd", "not yet"]
