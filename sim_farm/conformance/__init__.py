"""The conformance suite of simulators: the laws that a backend keeps, for pytest to run over any simulator.

    pytest --pyargs sim_farm.conformance --backend my_package.my_sim:BACKEND/task

The laws are functions too (`physics_laws`, `render_laws`, `process_laws`). This package is an entry point of pytest,
which loads it wherever the project is installed; its options are there only where the suite is asked for.
"""

from __future__ import annotations

from typing import Any


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Load the suite's plugin, with its options, if the suite is named on the command line."""
    if any(arg.partition(":")[0] == __name__ for arg in args):
        early_config.pluginmanager.import_plugin(f"{__name__}.plugin")
