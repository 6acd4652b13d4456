"""The trace file: what Perfetto needs in order to show it, and that memory stays bounded."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from embodied.run.trace import ITERATIONS, Span, TraceError, TraceWriter, load, natural_order
from tests.embodied.reporting.synthetic import MS, iteration_spans, write_trace


def events_of(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())["traceEvents"]


def write(path: Path, spans: list[Span]) -> list[dict[str, Any]]:
    writer = TraceWriter(path)
    writer.add(spans)
    writer.write()
    return events_of(path)


def test_what_was_written_is_what_is_read(tmp_path: Path) -> None:
    origin_ns = 987_654_321_123_456_789  # a clock that has run for years: nanoseconds must survive
    spans = [
        Span("render 0", "render", origin_ns + 17, origin_ns + 1018, {"stage": 1}, (), (5,)),
        Span("policy", "act", origin_ns + 1019, origin_ns + 2_000_000_001, {"batch": 8}, (5,), ()),
    ]
    write(tmp_path / "trace.json", spans)
    assert load(tmp_path / "trace.json") == spans


def test_memory_holds_the_first_and_the_last_iterations(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", iterations=40)
    iterations = [span for span in load(tmp_path / "trace.json") if span.track == ITERATIONS]
    assert [span.args["iteration"] for span in iterations] == [0, 1, 2, 37, 38, 39]
    assert [span.args["complete"] for span in iterations] == [True] * 5 + [False]


def test_spans_beyond_an_iterations_limit_are_counted(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", max_spans=3)
    writer.iteration(0, at_ns=0)
    writer.add([Span("policy", "act", n, n + 1) for n in range(10)])
    writer.write()
    iteration, *spans = load(tmp_path / "trace.json")
    assert len(spans) == 3
    assert iteration.args["spans_dropped"] == 7


def test_spans_before_the_first_iteration_are_kept(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace.json", keep_first=0, keep_last=1)
    writer.add([Span("driver", "set-up", 0, 5)])
    for index in range(4):
        writer.iteration(index, at_ns=10 + index)
    writer.write()
    assert [span.name for span in load(tmp_path / "trace.json")] == ["iteration 3", "set-up"]


def test_every_arrow_has_both_ends_and_points_forward(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", iterations=12)
    events = events_of(tmp_path / "trace.json")
    leaves = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
    arrives = {event["id"]: event["ts"] for event in events if event["ph"] == "f"}
    assert leaves and leaves.keys() == arrives.keys()
    assert all(leaves[number] <= arrives[number] for number in leaves)
    assert all(event["bp"] == "e" for event in events if event["ph"] == "f")


def test_arrows_to_an_iteration_that_was_not_kept_are_left_out(tmp_path: Path) -> None:
    events = write(tmp_path / "trace.json", [Span("policy", "act", 0, 5, flow_from=(1,), flow_to=(2,))])
    assert not [event for event in events if event["ph"] in "sf"]


def test_an_arrow_lies_within_the_span_that_it_belongs_to(tmp_path: Path) -> None:
    events = write(tmp_path / "trace.json", iteration_spans(0))
    span: dict[str, Any] = {}
    for event in events:
        if event["ph"] == "X":
            span = event
        elif event["ph"] in "sf":
            assert event["tid"] == span["tid"]
            assert span["ts"] <= event["ts"] < span["ts"] + span["dur"]


def test_spans_of_a_thread_enclose_or_follow_one_another(tmp_path: Path) -> None:
    spans = [
        Span("driver", "wait stage 0", 0, 100 * MS),
        Span("driver", "wait stage 1", 50 * MS, 150 * MS),  # overlaps the first without being within
        Span("driver", "collect", 60 * MS, 70 * MS),
        Span("driver", "update", 100 * MS, 120 * MS),
    ]
    events = write(tmp_path / "trace.json", spans)
    threads = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            threads[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(threads) == 2
    for intervals in threads.values():
        for a in intervals:
            assert all(b[0] >= a[1] or b[1] <= a[1] for b in intervals if b[0] >= a[0] and b != a)
    assert {span.name for span in load(tmp_path / "trace.json")} == {span.name for span in spans}


def test_tracks_are_named_and_sorted_as_data_flows(tmp_path: Path) -> None:
    names = ["learner", "policy", "render 0", "physics 10", "physics 9", "driver", "checkpoints"]
    events = write(tmp_path / "trace.json", [Span(name, "work", 0, 1) for name in names])
    order = {e["tid"]: e["args"]["sort_index"] for e in events if e["name"] == "thread_sort_index"}
    threads = [(order[e["tid"]], e["args"]["name"]) for e in events if e["name"] == "thread_name"]
    expected = ["driver", "physics 9", "physics 10", "render 0", "policy", "learner", "checkpoints"]
    assert [name for _, name in sorted(threads)] == expected
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {"driver", "physics", "render", "policy", "learner", "checkpoints"}


def test_writing_leaves_nothing_beside_the_file(tmp_path: Path) -> None:
    writer = write_trace(tmp_path / "trace.json", iterations=2)
    writer.write()
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"traceEvents": []}', '{"traceEvents": 3}', "\0"])
def test_a_file_that_is_no_trace_is_refused_by_name(tmp_path: Path, content: str) -> None:
    (tmp_path / "trace.json").write_text(content)
    with pytest.raises(TraceError, match="trace.json"):
        load(tmp_path / "trace.json")


def test_a_span_that_ends_before_it_begins_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ends before it begins"):
        TraceWriter(tmp_path / "trace.json").add([Span("policy", "act", 5, 4)])


def test_a_span_counts_as_what_it_is_named_or_where_it_is() -> None:
    assert Span("render 3", "render", 0, 1).component == "render"
    assert Span("render 3", "idle", 0, 1).component == "idle"
    assert Span("driver", "transport", 0, 1).component == "transport"


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["physics 10", "physics 2", "10", "physics"], key=natural_order) == [
        "physics",
        "physics 2",
        "physics 10",
        "10",
    ]
