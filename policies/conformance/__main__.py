"""`python -m policies.conformance --policy ...`: the suite, and what to install where pytest is missing."""

from __future__ import annotations

import importlib.util
import sys

if importlib.util.find_spec("pytest") is None:
    sys.exit("the conformance suite is run by pytest: pip install 'embodied-farm[conformance]'")

import pytest

if __name__ == "__main__":
    sys.exit(pytest.main(["--pyargs", "policies.conformance", "-p", "policies.conformance.plugin", *sys.argv[1:]]))
