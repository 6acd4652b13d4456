"""The conformance suite of policies: the laws that a policy keeps, for pytest to run over any policy.

    pytest --pyargs policies.conformance --policy my_package.my_policy:MyPolicy

The laws are functions too (`laws`). This package is an entry point of pytest, which loads it wherever the project is
installed; its options are there only where the suite is asked for.
"""

from __future__ import annotations

from typing import Any


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Load the suite's plugin, with its options, if the suite is named on the command line."""
    if any(arg.partition(":")[0] == __name__ for arg in args):
        early_config.pluginmanager.import_plugin(f"{__name__}.plugin")
