"""The relay in one process: what is behind it gives the same, messages are checked, and a far end may be lost at any
moment. Real machines are in `test_cluster.py`."""

from __future__ import annotations

import re
from collections.abc import Set
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from embodied.runtime import remote
from embodied.runtime.deadlines import Deadline
from embodied.runtime.remote import (
    DRAWN,
    ENDED,
    OBSERVED,
    OUTCOME,
    REDRAWN,
    REQUEST,
    SHOWN,
    STANDING,
    TOLD,
    FarLost,
    FarPhysics,
    Relay,
    require_software,
    software,
)
from sim_farm.client.farm import Farm
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, Starts, evaluation_episodes
from sim_farm.shared_memory.slot_layout import FarmSpec, WorkerMemory
from sim_farm.workers.hosts import InProcess, WorkerHandle
from sim_farm.workers.worker import WorkerSetup
from tests.sim_farm.driving import Trace, assert_same, drive, run
from tests.variants import often

REACH = TaskSpec("tabletop/reach", max_episode_steps=7)
STATES = FarmSpec(REACH, EndlessEpisodes(3), num_envs=8, chunk=3, groups=2, physics_workers=2)
PICTURES = replace(
    STATES, task=replace(REACH, cameras=1, image_size=32), render_workers=1, final_frames="ended"
)  # fmt: skip
CHUNKS = 12


# --- a far end in this process


@dataclass
class LocalFar:
    """A far end in this process. It is lost before or after the exchanges whose numbers are given, or hangs in them."""

    setup: WorkerSetup
    dies_before: Set[int]
    dies_after: Set[int]
    hangs_in: Set[int]
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    renewed: list[str] = field(default_factory=list)
    """Why, each time."""
    far: FarPhysics | None = None

    def open(self, opening: bytes) -> Future[None]:
        self.far = FarPhysics(self.setup, opening)
        return _done(None)

    def exchange(self, request: bytes) -> Future[bytes]:
        number = len(self.requests)
        self.requests.append(request)
        if self.far is None or number in self.dies_before:
            self.far = None
            return _lost()
        if number in self.hangs_in:
            self.far = None
            return Future()
        answer = self.far.exchange(request)
        if number in self.dies_after:
            self.far = None
            return _lost()
        self.answers.append(answer)
        return _done(answer)

    def restart(self, why: str) -> None:
        assert self.far is None, "a far end that lives was replaced"
        self.renewed.append(why)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _lost() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(FarLost("its process died"))
    return future


class Relays(InProcess):
    """Every physics worker behind a relay, in the caller's process."""

    def __init__(
        self, dies_before: Set[int] = frozenset(), dies_after: Set[int] = frozenset(), hangs_in: Set[int] = frozenset()
    ) -> None:
        super().__init__()
        self.faults = (dies_before, dies_after, hangs_in)
        self.fars: list[LocalFar] = []

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        if not setup.is_physics:
            return super().launch(setup, memory)
        self.fars.append(LocalFar(setup, *self.faults))
        worker = Relay(setup, memory, self.fars[-1], Deadline(0.2))
        worker.build()
        return _Pumped(worker)


@dataclass(frozen=True)
class _Pumped:
    worker: Relay

    def ring(self) -> None:
        while self.worker.run_pending() or self.worker.waits:
            pass

    def close(self, deadline_s: float) -> None:
        self.worker.close()


SHAPES = {
    "states": STATES,
    "drawn starts": replace(STATES, episodes=EndlessEpisodes(3, Starts(seeds=8))),
    "pictures": PICTURES,
    "three observations": replace(PICTURES, observations=3, distance=2),
    "listed": replace(PICTURES, episodes=ListedEpisodes(evaluation_episodes(2, 11), 8), final_frames="truncated"),
}
EVERY_SHAPE = pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())


def trace_of(spec: FarmSpec, host: InProcess) -> Trace:
    with closing(Farm.create(spec, host)) as farm:
        return drive(farm, end=CHUNKS)


@EVERY_SHAPE
def test_physics_behind_a_relay_gives_what_physics_beside_the_client_gives(spec: FarmSpec) -> None:
    assert_same(run(spec, chunks=CHUNKS), trace_of(spec, Relays()), "a relay changes results")


@pytest.mark.parametrize("shape", often(("drawn starts", "listed"), SHAPES))
def test_a_group_in_parts_gives_the_same(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = SHAPES[shape]
    monkeypatch.setattr(remote, "ANSWER_BYTES", 1)
    host = Relays()
    assert_same(run(spec, chunks=CHUNKS), trace_of(spec, host), "parts change results")
    assert len(host.fars[0].requests) == 4 * (CHUNKS + 1), "of a worker's four environments each is a part"


@pytest.mark.parametrize(
    ("shape", "when"),
    often(
        [("drawn starts", "after"), ("states", "after")],
        [(shape, when) for shape in SHAPES for when in ("before", "after")],
    ),
)
def test_a_far_end_that_is_lost_at_any_exchange_changes_nothing(shape: str, when: str) -> None:
    spec = SHAPES[shape]
    expected = run(spec, chunks=CHUNKS)
    for numbers in ({0}, {1, 2}, {5, 6, 9}, {12}, {2 * CHUNKS + 1}):
        host = Relays(numbers) if when == "before" else Relays(dies_after=numbers)
        assert_same(expected, trace_of(spec, host), f"losses at {numbers} change results")
        assert all(far.renewed == ["its process died"] * len(numbers) for far in host.fars)


@pytest.mark.slow
@EVERY_SHAPE
def test_a_far_end_that_hangs_is_replaced_like_a_lost_one(spec: FarmSpec) -> None:
    """Sooner than who waits for the farm gives up: within half of that deadline, as messages say."""
    host = Relays(hangs_in={0, 6, 7})
    assert_same(run(spec, chunks=CHUNKS), trace_of(spec, host), "far ends that hang change results")
    for far in host.fars:
        assert len(far.renewed) == 3
        matches = [re.fullmatch(r"it has not answered for (\d+\.\d) s", why) for why in far.renewed]
        assert all(match and float(match[1]) >= 0.1 for match in matches), far.renewed


def test_a_snapshot_is_restored_behind_a_relay() -> None:
    """A reset that continues an episode carries the actions that lead there."""
    with closing(Farm.create(STATES, Relays())) as farm:
        drive(farm, end=4)
        snapshot = farm.snapshot()
        expected = drive(farm, begin=4, end=9, reset=False)
    assert snapshot["base_step"].any(), "no episode was under way"
    for host in (Relays(), Relays(dies_before={0, 3}), Relays(dies_after={1, 2})):
        with closing(Farm.create(STATES, host)) as farm:
            farm.restore(snapshot)
            resumed = drive(farm, begin=4, end=9)
        assert_same(expected, {env: rows[1:] for env, rows in resumed.items()}, "restoring changes results")


def test_every_field_that_physics_reads_or_writes_is_carried() -> None:
    """Whoever adds a field to the slots decides here whether a far end needs it."""
    answers = {*OUTCOME, *OBSERVED, *SHOWN, *REDRAWN, *TOLD, *ENDED, *DRAWN}
    carried = {*REQUEST, *STANDING, *answers, "history"}
    own = {"bells", "stop", "phase", "since_ns", "requested_ns", "physics_of", "built", "message", "wire_bytes"}
    client = {"drawn", "collected"}
    drawing = {"private_bytes", "draws", "renderer_of", "away", "away_ns", "left", "moved_bytes"}
    drawing |= {"frame_row", "past_row", "final_row", "final_past_row"}  # a far end never draws
    derived = {"final_instruction"}
    with closing(Farm.create(PICTURES, InProcess())) as farm:
        assert set(farm.tasks[0].memory.slots.fields) == carried | own | client | drawing | derived


def test_a_message_of_the_wrong_length_is_refused() -> None:
    host = Relays()
    with closing(Farm.create(STATES, host)) as farm:
        drive(farm, end=1)
        far, envs = host.fars[0], farm.envs_of(0)[::2]
        for answer in (far.answers[0][:-1], far.answers[0] + b"\0"):
            with pytest.raises(FarmError, match="message between farm and far physics"):
                remote.unpack_answer(answer, farm.tasks[0].slots, envs, draws=False)
        assert far.far is not None
        with pytest.raises(FarmError, match="message between farm and far physics"):
            far.far.exchange(far.requests[0][:-2])


def test_other_software_is_refused_by_name() -> None:
    require_software(software())
    with pytest.raises(FarmError, match=r"has numpy .* instead of 0\.1: the same trajectories need the same software"):
        require_software({**software(), "numpy": "0.1"})
