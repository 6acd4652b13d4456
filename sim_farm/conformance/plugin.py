"""The suite's plugin of pytest: the option that names the simulator, and the report."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from sim_farm.conformance.checks import close_kept
from sim_farm.conformance.promises import PROMISES
from sim_farm.conformance.reporting import Reporter
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.registry import make_physics, resolve

SIZE = 48
"""Side of the pictures in pixels."""
TASK = pytest.StashKey[TaskSpec]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("sim_farm.conformance")
    group.addoption("--backend", metavar="NAME", help="my_package.my_sim:BACKEND/task, or a registered tabletop/reach")
    group.addoption("--report", metavar="FILE", help="write the report to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.help:
        return
    name = config.getoption("--backend")
    if name is None:
        raise pytest.UsageError(
            "sim_farm.conformance examines a task of a simulator: name it with --backend "
            "my_package.my_sim:BACKEND/task, or --backend tabletop/reach for a registered one"
        )
    try:
        config.stash[TASK] = examined(name)
    except FarmError as error:
        raise pytest.UsageError(str(error)) from error
    except Exception as error:  # whatever the simulator's own code raises is its author's to mend
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise pytest.UsageError(f"no environment of {name} can be made: {why}") from error
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist report to the one that has started them
        config.pluginmanager.register(Reporter(name, PROMISES, config.getoption("--report")))


@pytest.fixture(scope="session")
def task(pytestconfig: pytest.Config) -> Iterator[TaskSpec]:
    """The task that is examined, with a camera if it has one."""
    yield pytestconfig.stash[TASK]
    close_kept()


def examined(name: str) -> TaskSpec:
    """The task, with its first camera if it has one. Raises `FarmError` for a task that cannot be."""
    plain = TaskSpec(name, image_size=SIZE)
    with closing(make_physics(plain)):
        pass
    if resolve(name)[0].make_renderer is None:
        return plain
    seen = replace(plain, cameras=1)
    try:
        with closing(make_physics(seen)):
            return seen
    except FarmError:  # of a simulator that draws, a task without cameras
        return plain
