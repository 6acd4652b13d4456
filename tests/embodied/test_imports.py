"""Imports without garbage collection."""

from __future__ import annotations

import gc
import subprocess
import sys

from embodied.imports import uncollected


def test_collection_is_off_in_the_block_and_as_before_after_it() -> None:
    with uncollected():
        with uncollected():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


IMPORT = """
import gc, sys
from embodied.cli import main

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "torch":
            print("torch is imported,", "collected" if gc.isenabled() else "not collected")
            raise KeyboardInterrupt

sys.meta_path.insert(0, Finder())
main(["train", "reach", "--runtime.mode", "inline"])
print("and after it", "collected" if gc.isenabled() else "not collected")
"""


def test_a_command_imports_torch_without_collection() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["torch is imported, not collected", "and after it collected"], done.stderr
