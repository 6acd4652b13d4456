"""The states of a supervised worker, without a process."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim_farm.workers.supervision import FRUITLESS, OFTEN, WITHIN_S, Event, State, Supervised

BACK = (Event.STARTED, Event.BUILT, Event.CURRENT)


def after(worker: Supervised, *events: Event, at_s: float = 0.0) -> Supervised:
    for event in events:
        worker = worker.after(event, at_s)
    return worker


def test_a_lost_worker_serves_again_once_it_has_what_its_predecessor_had() -> None:
    worker = Supervised().lost(10.0, done=7)
    seen = [worker]
    for event, at_s in zip(BACK, (10.5, 12.0, 13.0), strict=True):
        seen.append(seen[-1].after(event, at_s))
    assert [one.state for one in seen] == [State.DEAD, State.RESTARTING, State.STALE, State.HEALTHY]
    assert [one.serves for one in seen] == [False, False, False, True]
    assert [one.down_s for one in seen] == [None, None, None, 3.0]


def test_silence_makes_it_suspect_and_progress_makes_it_healthy() -> None:
    late = after(Supervised(), Event.LATE)
    assert late.state is State.SUSPECT and late.serves
    assert after(late, Event.LATE) == late
    assert after(late, Event.PROGRESS).state is State.HEALTHY


@pytest.mark.parametrize("events", [(Event.BUILT,), (Event.STARTED, Event.CURRENT), (Event.PROGRESS,), (Event.LATE,)])
def test_no_step_on_the_way_back_is_left_out(events: tuple[Event, ...]) -> None:
    with pytest.raises(ValueError, match="cannot have the event"):
        after(Supervised().lost(0.0, 0), *events)


def test_losses_without_anything_new_between_them_are_hopeless() -> None:
    worker = Supervised()
    for number in range(FRUITLESS):
        assert not worker.hopeless
        worker = after(worker.lost(1000.0 * number, done=5), *BACK)
    assert worker.hopeless


def test_losses_with_something_new_between_them_are_hopeless_only_within_a_time() -> None:
    for apart_s, hopeless in ((WITHIN_S / OFTEN / 2, True), (WITHIN_S / OFTEN * 2, False)):
        worker = Supervised()
        for number in range(OFTEN):
            assert not worker.hopeless
            worker = after(worker.lost(apart_s * number, done=number), *BACK)
        assert worker.hopeless is hopeless


@given(st.lists(st.one_of(st.none(), st.sampled_from(Event)), max_size=30))
def test_whatever_happens_it_serves_only_after_all_steps_since_its_last_loss(events: list[Event | None]) -> None:
    """None: it is lost. Events that are refused change nothing."""
    worker, since = Supervised(), list(BACK)
    for time_s, event in enumerate(events):
        if event is None:
            worker, since = worker.lost(time_s, time_s), []
            continue
        try:
            worker = worker.after(event, time_s)
        except ValueError:
            continue
        since += [event] if event in BACK else []
        assert worker.serves == (since == list(BACK)), f"{worker.state} after {since}"
    assert len(worker.losses) <= OFTEN
    assert all(one.at_s < other.at_s for one, other in pairwise(worker.losses))
