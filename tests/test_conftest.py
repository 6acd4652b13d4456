"""The test run itself: a test that ends its process fails by name, and the others run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILES = 12
FILE = """
import os, signal, pytest
def test_before(): pass
def test_that_crashes(): os.kill(os.getpid(), signal.SIGSEGV)
def test_after(): pass
"""


def test_a_test_that_ends_its_process_fails_by_name_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_crash.py").write_text(FILE)
    # Several files for each process: that of the crash has done some before.
    for number in range(FILES):
        (tmp_path / f"test_{number}.py").write_text("def test_other(): pass\n")
    options = ["-n", "2", "--no-loadscope-reorder", "-p", "tests.conftest", "-p", "no:cacheprovider"]
    where = ["--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path)]
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *where], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"1 failed, {FILES + 2} passed" in done.stdout
    assert "crashed while running 'test_crash.py::test_that_crashes'" in done.stdout
