"""Workers that die: whenever it happens, a replacement goes on and nothing that comes out differs.

First in one process, where a worker can be made to die before any write it makes to the shared slots; then real
processes and SIGKILL.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from sim_farm.client.farm import Farm, WorkerFailed, WorkerTimeout
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.episodes import ANY, EndlessEpisodes, ListedEpisodes, Starts, evaluation_episodes
from sim_farm.perturbations import ObjectOffset, Perturbation, PictureChange
from sim_farm.shared_memory.frame_memory import FrameMemory
from sim_farm.shared_memory.memory import FOLDER
from sim_farm.shared_memory.slot_layout import FAILED, WAITING, WORKING, FarmSpec, WorkerMemory
from sim_farm.workers.hosts import InProcess, WorkerHandle, make_worker
from sim_farm.workers.processes import Processes
from sim_farm.workers.worker import Worker, WorkerSetup
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, run

REACH = TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7)
ENDLESS = FarmSpec(REACH, EndlessEpisodes(2), num_envs=2, chunk=3, final_frames="ended")
DRAWN = replace(ENDLESS, episodes=EndlessEpisodes(2, Starts(seeds=5)))
LISTED = replace(ENDLESS, episodes=ListedEpisodes(evaluation_episodes(2, 3), 2))
EVENTS = (
    Perturbation("objects", 3, scene=(ObjectOffset(0.03),), words="now {}", from_step=2),
    Perturbation("noise", 3, picture=(PictureChange("gaussian_noise", (25.0,)),)),
)
PERTURBED = replace(
    ENDLESS,
    task=replace(REACH, perturbations=EVENTS),
    episodes=EndlessEpisodes(2, Starts(perturbations=len(EVENTS))),
)
FUSED: dict[str, Any] = {}
BLIND: dict[str, Any] = {"task": replace(REACH, cameras=0)}
SPLIT: dict[str, Any] = {"physics_workers": 2, "render_workers": 1}
DEFAULT = (("blind", "listed"), ("blind", "drawn"), ("split", "endless"))
EACH = pytest.mark.parametrize(
    ("shape", "base"),
    [
        pytest.param(
            shape, base, id=f"{form}-{episodes}", marks=[] if (form, episodes) in DEFAULT else pytest.mark.slow
        )
        for form, shape in (("fused", FUSED), ("blind", BLIND), ("split", SPLIT))
        for episodes, base in (
            ("endless", ENDLESS),
            ("listed", LISTED),
            ("drawn", DRAWN),
            *([] if form == "blind" else [("perturbed", PERTURBED)]),
        )
    ],
)
"""Each list once; the slow run has every shape of each."""


def request(farm: Farm, number: int) -> None:
    """Begin with the reset (-1) or go on with chunk `number`."""
    for group in range(farm.groups):
        if number < 0:
            farm.reset(group)
        else:
            farm.submit(group, actions_for(farm, group, number))


def collect(farm: Farm, trace: Trace) -> None:
    for group in range(farm.groups):
        append(trace, farm.collect(group, deadline_s=60))


# --- in one process: death before a chosen write


class Death(BaseException):
    """Nothing a worker does can catch it, as with SIGKILL."""


@dataclass
class Fate:
    """Counts the writes to each slot array once it is armed, and kills before the `number`-th write to `name`."""

    name: str = ""
    number: int = 0
    armed: bool = False
    writes: Counter[str] = field(default_factory=Counter)

    def written(self, name: str) -> None:
        self.writes[name] += self.armed
        if self.armed and self.name == name and self.writes[name] == self.number:
            raise Death


class Watched(np.ndarray):
    """An array of the slots whose writes are counted."""

    fate: Fate
    name: str

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, Watched):
            self.fate, self.name = parent.fate, parent.name

    def __setitem__(self, key: Any, value: Any) -> None:
        self.fate.written(self.name)
        super().__setitem__(key, value)


def watched(array: np.ndarray, name: str, fate: Fate) -> np.ndarray:
    view = array.view(Watched)
    view.fate, view.name = fate, name
    return view


class WatchedFrames(FrameMemory):
    """The rows of another frame memory, whose writes are counted too."""

    def __init__(self, memory: FrameMemory, fate: Fate) -> None:
        super().__init__(memory.rows, memory.cameras, memory.size, memory._block)
        self._fate = fate

    @property
    def frames(self) -> np.ndarray:
        return watched(super().frames, "frames", self._fate)

    @property
    def frames_of(self) -> np.ndarray:
        return watched(super().frames_of, "frames_of", self._fate)


class MortalWorkers(InProcess):
    """Workers that `fate` may kill while they work, and that are replaced at once."""

    def __init__(self, fate: Fate) -> None:
        super().__init__()
        self.fate = fate

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        return _MortalHandle(setup, memory, self.fate)


class _MortalHandle:
    def __init__(self, setup: WorkerSetup, memory: WorkerMemory, fate: Fate) -> None:
        self._setup, self._memory, self._fate = setup, memory, fate
        self.worker = self._start()

    def _start(self) -> Worker:
        memory = self._memory
        if memory.frames is not None:
            memory = replace(memory, frames=WatchedFrames(memory.frames, self._fate))
        worker = make_worker(self._setup, memory)
        worker.slots = {name: watched(array, name, self._fate) for name, array in memory.slots.arrays.items()}
        worker.build()
        return worker

    def replace_worker(self) -> None:
        self.worker.close()
        self.worker = self._start()

    def ring(self) -> None:
        while True:
            try:
                self.worker.run_pending()
                return
            except Death:
                self.replace_worker()

    def close(self, deadline_s: float) -> None:
        self.worker.close()


def run_with(fate: Fate, spec: FarmSpec, chunks: int = 6) -> Trace:
    with closing(Farm.create(spec, MortalWorkers(fate))) as farm:
        fate.armed = True
        return drive(farm, end=chunks, deadline_s=1)


@EACH
@pytest.mark.parametrize("moments", [1, pytest.param(30, marks=pytest.mark.slow)])
def test_a_worker_that_dies_before_any_of_its_writes_changes_nothing(
    shape: dict[str, Any], base: FarmSpec, moments: int
) -> None:
    """Before the first, the last, and others between of the writes to each of the arrays."""
    spec = replace(base, **shape)
    undisturbed = Fate()
    expected = run_with(undisturbed, spec)
    assert_same(expected, run(spec, chunks=6), "watching changes results")
    broken = []
    for name, count in undisturbed.writes.items():
        for number in sorted(set(np.linspace(1, count, moments).astype(int).tolist())):
            try:
                assert_same(expected, run_with(Fate(name, number), spec), "death changes results")
            except Exception as error:
                broken.append(f"before write {number} to {name}: {type(error).__name__} {str(error)[:200]}")
    assert not broken, "\n".join([f"{len(broken)} deaths change results:", *broken])


@pytest.mark.slow
@EACH
def test_a_worker_that_dies_after_it_finished_changes_nothing(shape: dict[str, Any], base: FarmSpec) -> None:
    """Its results lie in the slots and have not been collected; this holds for the first reset too."""
    spec = replace(base, **shape)
    expected = run(spec, chunks=6)
    for moment in (0, 1, 3, 4, 6):
        with closing(Farm.create(spec, MortalWorkers(Fate()))) as farm:
            trace: Trace = {env: [] for env in range(spec.num_envs)}
            for number in range(-1, 6):
                request(farm, number)
                if number == moment - 1:
                    _replace_all(farm)
                collect(farm, trace)
        assert_same(expected, trace, f"death before collect {moment} changes results")


def test_a_worker_that_dies_after_a_later_reset_changes_nothing() -> None:
    """A reset of a running farm, as after `restore`, is not mistaken for a chunk when it is replayed."""
    expected = run(ENDLESS, chunks=6)
    with closing(Farm.create(ENDLESS, MortalWorkers(Fate()))) as farm:
        drive(farm, end=4)
        farm.reset(0)
        _replace_all(farm)
        farm.collect(0)
        tail = drive(farm, begin=4, end=6, reset=False)
    assert_same(tail, {env: rows[5:] for env, rows in expected.items()}, "death after a reset changes results")


def _replace_all(farm: Farm) -> None:
    for handle in farm.tasks[0].handles:
        assert isinstance(handle, _MortalHandle)
        handle.replace_worker()


# --- processes of their own


def serve(setup: WorkerSetup) -> None:
    make_worker(setup).serve()
    assert "numpy" in sys.modules and gc.get_freeze_count() > 10_000, "collections look at what was imported"


class MortalProcesses(Processes):
    """Its workers are killed and stopped by their numbers."""

    def __init__(self) -> None:
        super().__init__(240.0, 240.0)

    def signal(self, index: int, number: signal.Signals) -> None:
        os.kill(self.pids()[index], number)

    def replace_worker(self, index: int) -> None:
        """SIGKILL, and another with the same setup."""
        pid = self.pids()[index]
        self.signal(index, signal.SIGKILL)

        def replaced() -> bool:
            self.watch()
            return self.pids()[index] != pid

        until(replaced)


@contextmanager
def processes(*specs: FarmSpec) -> Iterator[tuple[Farm, MortalProcesses]]:
    with closing(MortalProcesses()) as host, closing(Farm.create(specs, host)) as farm:
        yield farm, host


def until(condition: Callable[[], Any]) -> None:
    """Look every 0.2 ms, and give up after a minute."""
    deadline = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < deadline, "it did not happen within a minute"
        time.sleep(2e-4)


def test_killed_physics_workers_are_replaced_without_a_trace() -> None:
    """Before it is asked, stopped with work it has not begun, while it works, and with results nobody collected."""
    spec = replace(ENDLESS, physics_workers=2)
    with processes(spec) as (farm, host):
        slots, trace = farm.tasks[0].slots, {env: [] for env in range(2)}  # type: ignore[var-annotated]
        host.replace_worker(0)  # while it starts
        request(farm, -1)
        collect(farm, trace)
        host.replace_worker(1)  # while it waits
        request(farm, 0)
        collect(farm, trace)
        host.signal(0, signal.SIGSTOP)
        request(farm, 1)
        host.replace_worker(0)  # before it begins
        collect(farm, trace)
        request(farm, 2)
        until(lambda: slots["phase"][1] == WORKING or slots["simulated"][1] == slots["requested"][1])
        host.replace_worker(1)  # while it works, or just after
        collect(farm, trace)
        request(farm, 3)
        until(lambda: (slots["drawn"] == slots["requested"]).all())
        host.replace_worker(0)  # after it finished
        collect(farm, trace)
        for number in (4, 5):
            request(farm, number)
            collect(farm, trace)
    assert_same(run(spec, chunks=6), trace, "killed workers change results")


@pytest.mark.slow
def test_killed_render_workers_are_replaced_without_a_trace() -> None:
    spec = replace(ENDLESS, **SPLIT)
    render = 2
    with processes(spec) as (farm, host):
        slots, trace = farm.tasks[0].slots, {env: [] for env in range(2)}  # type: ignore[var-annotated]
        request(farm, -1)
        collect(farm, trace)
        host.replace_worker(render)  # while it waits
        request(farm, 0)
        collect(farm, trace)
        host.signal(render, signal.SIGSTOP)
        request(farm, 1)
        until(lambda: (slots["simulated"] == slots["requested"]).all())
        host.replace_worker(render)  # with frames to draw
        collect(farm, trace)
        request(farm, 2)
        until(lambda: slots["phase"][render] == WORKING or (slots["drawn"] == slots["requested"]).all())
        host.replace_worker(render)  # while it draws
        collect(farm, trace)
    assert_same(run(spec, chunks=3), trace, "killed render workers change results")


def test_processes_give_what_one_process_gives_and_serve_the_next_farm() -> None:
    spec = replace(LISTED, **SPLIT)
    with closing(MortalProcesses()) as host:
        with closing(Farm.create(spec, host)) as farm:
            name, pids = str(farm.tasks[0].memory.slots.name), host.pids()
            assert name.startswith("embodied-") and (FOLDER / name).exists()
            assert_same(run(spec), drive(farm), "processes change results")
        assert not (FOLDER / name).exists(), "the farm's memory is still there"
        assert not host.pids(), "a worker did not leave when the farm was closed"
        with closing(Farm.create(spec, host)):
            assert sorted(host.pids()) == sorted(pids), "processes are left idle and others are started"


def test_another_process_address_drives_the_same_workers() -> None:
    with processes(ENDLESS) as (farm, _):
        other = Farm.attach(farm.address)
        assert_same(run(ENDLESS, chunks=3), drive(other, end=3), "an attached client sees other results")
        other.detach()
        assert (FOLDER / str(farm.tasks[0].memory.slots.name)).exists(), (
            "the memory went with a client that had only attached"
        )


def test_a_worker_that_does_not_answer_is_named_and_may_still_answer() -> None:
    spec = replace(ENDLESS, physics_workers=2)
    with processes(spec) as (farm, host):
        drive(farm, end=1)
        until(lambda: farm.tasks[0].slots["phase"][1] == WAITING)
        host.signal(1, signal.SIGSTOP)
        farm.submit(0, actions_for(farm, 0, 1))
        with pytest.raises(WorkerTimeout, match=r"physics 1 .* 1 s: .* waiting for work .* environment 1 to simulate"):
            farm.collect(0, deadline_s=1)
        host.signal(1, signal.SIGCONT)
        assert farm.collect(0, deadline_s=60).steps.all()


class BrokenEpisodes(EndlessEpisodes):
    """The first episodes are as they should be; the second cannot be told."""

    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec:
        if episode:
            raise KeyError("the list of episodes was lost")
        return super().spec(env, episode, start)


def test_a_workers_error_reaches_the_client_with_its_message() -> None:
    """A user's mistake as one sentence, an error of our own with its traceback; the worker ends."""
    absent = ListedEpisodes((EpisodeSpec(0, init_state=3),) * 2, 2)
    for episodes, message in ((absent, "no recorded initial states"), (BrokenEpisodes(2), "(?s)Traceback.*was lost")):
        with processes(replace(ENDLESS, episodes=episodes)) as (farm, host):
            with pytest.raises(WorkerFailed, match=message):
                for number in range(-1, 4):
                    request(farm, number)
                    farm.collect(0, deadline_s=60)
            assert farm.tasks[0].slots["phase"][0] == FAILED
            host.watch()
        assert not host.take_replaced(), "another worker would fail as well"


def test_an_idle_process_that_has_died_is_replaced_for_the_next_farm() -> None:
    spec = replace(LISTED, **SPLIT)
    with closing(MortalProcesses()) as host:
        with closing(Farm.create(spec, host)):
            pids = host.pids()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda: all(process.ended() for process in host._idle))
        with closing(Farm.create(spec, host)) as farm:
            assert_same(run(spec), drive(farm), "new processes change results")
            assert not {*pids} & {*host.pids()}


class Unreadable:
    """An object that another process cannot unpickle, as one of a class of the caller's script."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("no number",)


def test_a_process_that_cannot_read_its_setup_ends() -> None:
    with closing(MortalProcesses()) as host:
        host.describe(LISTED.task)
        (process,) = host._idle
        process._connection.send(Unreadable())
        until(process.ended)
        assert process.ended() == "ended (status 1)"
