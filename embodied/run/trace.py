"""Traces: spans of time on named tracks, and the file that ui.perfetto.dev opens.

Times are `time.monotonic_ns()`, a clock that all processes of a machine share. The file is the JSON
trace-event format: one process per component, one thread per track, and arrows ("flow events") between
spans of different tracks, for example from the observation a render worker finished to the action chunk
that the policy inferred from it.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from embodied.files import read_json, write_whole

COMPONENTS: dict[str, str] = {
    "physics": "#3b76c4",
    "render": "#1f9e8f",
    "policy": "#e58a1f",
    "learner": "#8d61c4",
    "transport": "#cc4b63",
    "idle": "#a9b1bb",
}
"""Name to colour. The colours keep their distance on white, on black, and to the colour-blind."""

ITERATIONS = "iteration"
"""The track that `TraceWriter.iteration` fills: one span per iteration, with `iteration` and `complete` in
its args. An iteration is complete once the next one has begun."""

LARGEST_NS = 2**63
MOST_BYTES = 2**30
"""Size limit of a trace that is read: `TraceWriter` bounds the number of spans."""

_PROCESS_ORDER = (ITERATIONS, "driver", *COMPONENTS)


class TraceError(Exception):
    """A file that is not a trace, with a message that names it."""


@dataclass(frozen=True)
class Span:
    """Something that a track did from `start_ns` to `end_ns`.

    A number in one span's `flow_to` and another's `flow_from` draws an arrow from the end of the first to
    the start of the second. Numbers are unique within a run.
    """

    track: str
    name: str
    start_ns: int
    end_ns: int
    args: dict[str, Any] = field(default_factory=dict)
    flow_from: tuple[int, ...] = ()
    flow_to: tuple[int, ...] = ()

    @property
    def component(self) -> str:
        """Component that the span's time counts for: its own name if that is a component's, else that of its track."""
        return self.name if self.name in COMPONENTS else _component_of(self.track)


@dataclass
class _Iteration:
    """Spans of one iteration; `index` is None for those before the first."""

    index: int | None
    start_ns: int
    end_ns: int | None = None
    spans: list[Span] = field(default_factory=list)
    dropped: int = 0

    def marked(self) -> list[Span]:
        """The spans, and before them the iteration's own."""
        if self.index is None:
            return self.spans
        complete = self.end_ns is not None
        end_ns = self.end_ns or max((span.end_ns for span in self.spans), default=self.start_ns)
        args = {"iteration": self.index, "complete": complete, "spans_dropped": self.dropped}
        name = f"iteration {self.index}"
        return [Span(ITERATIONS, name, self.start_ns, max(end_ns, self.start_ns), args), *self.spans]


@dataclass
class SpanRecorder:
    """Collects the driver's spans of one iteration."""

    _spans: list[Span] = field(default_factory=list)

    def mark(self, track: str, name: str, begin_ns: int, end_ns: int | None = None, **args: Any) -> None:
        """Add a span that ends at `end_ns`, or now."""
        self._spans.append(Span(track, name, begin_ns, end_ns or time.monotonic_ns(), args))

    def take(self) -> list[Span]:
        """Return the spans that were collected since the last call."""
        taken, self._spans = self._spans, []
        return taken


class TraceWriter:
    """Collects spans in bounded memory: those of the first `keep_first` and the last `keep_last` iterations,
    and at most `max_spans` of each; the number of spans that this cost is written with the iteration."""

    def __init__(
        self, path: str | os.PathLike[str], keep_first: int = 3, keep_last: int = 3, max_spans: int = 100_000
    ) -> None:
        if keep_first < 0 or keep_last < 1 or max_spans < 1:
            raise ValueError(
                f"keep_first={keep_first}, keep_last={keep_last}, max_spans={max_spans}:"
                " the current iteration is always kept, so the last two must be at least 1"
            )
        self.path = Path(path)
        self._keep_first, self._keep_last, self._max_spans = keep_first, keep_last, max_spans
        self._setup = _Iteration(index=None, start_ns=0)
        self._iterations: list[_Iteration] = []

    def iteration(self, index: int, at_ns: int | None = None) -> None:
        """Mark the beginning of an iteration (now, unless a time is given). Spans added until the next mark
        belong to it."""
        at_ns = time.monotonic_ns() if at_ns is None else at_ns
        if self._iterations:
            self._iterations[-1].end_ns = at_ns
        self._iterations.append(_Iteration(index, at_ns))
        if len(self._iterations) > self._keep_first + self._keep_last:
            del self._iterations[self._keep_first]

    def add(self, spans: Iterable[Span]) -> None:
        current = self._iterations[-1] if self._iterations else self._setup
        for span in spans:
            if span.end_ns < span.start_ns:
                raise ValueError(f"span {span.name!r} of {span.track!r} ends before it begins: {span}")
            if len(current.spans) < self._max_spans:
                current.spans.append(span)
            else:
                current.dropped += 1

    def write(self) -> None:
        """Write what is kept. A reader finds the old file or the new one, whole. Raises `OSError`."""
        spans = [span for part in (self._setup, *self._iterations) for span in part.marked()]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps(_to_json(spans), default=str, separators=(",", ":")))


def load(path: str | os.PathLike[str]) -> list[Span]:
    """The spans of a file that `TraceWriter` wrote, by track and start; raises `TraceError` if it is not one.

    Numbers of arrows that lost one end with an iteration that was not kept are gone.
    """
    try:
        content = read_json(Path(path), MOST_BYTES)
        return _from_json(content["traceEvents"], content["otherData"]["origin_ns"])
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        reason = f"{type(error).__name__}: {error}"[:200]
        raise TraceError(f"{path} is not a trace that this project wrote: {reason}") from error


def natural_order(text: str) -> list[tuple[int, str]]:
    """A sort key that puts `physics 10` after `physics 9`."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text) if part]


def track_order(track: str) -> tuple[int, list[tuple[int, str]]]:
    """A sort key of tracks: the driver first, then in the order in which data flows."""
    component = _component_of(track)
    known = component in _PROCESS_ORDER
    return _PROCESS_ORDER.index(component) if known else len(_PROCESS_ORDER), natural_order(track)


def _component_of(track: str) -> str:
    return track.split(" ", 1)[0]


def _to_json(spans: Sequence[Span]) -> dict[str, Any]:
    origin_ns = min((span.start_ns for span in spans), default=0)
    starts = {flow for span in spans for flow in span.flow_to}
    whole_flows = starts & {flow for span in spans for flow in span.flow_from}
    by_track: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_track[span.track].append(span)

    events: list[dict[str, Any]] = []
    pids: dict[str, int] = {}
    tid = 0
    for track in sorted(by_track, key=track_order):
        component = _component_of(track)
        if component not in pids:
            pids[component] = len(pids) + 1
            events += _metadata("process", pids[component], 0, pids[component], name=component)
        for number, lane in enumerate(_lanes(by_track[track]), 1):
            tid += 1
            where = {"pid": pids[component], "tid": tid}
            name = track if number == 1 else f"{track} ({number})"
            events += _metadata("thread", where["pid"], tid, tid, name=name, track=track)
            for span in lane:
                events += _span_events(span, where, origin_ns, whole_flows)
    return {"displayTimeUnit": "ms", "otherData": {"origin_ns": origin_ns}, "traceEvents": events}


def _lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Divide a track's spans so that within a lane they follow or enclose one another: a thread of the format
    is a stack, and of spans that overlap only partly a viewer would show nonsense."""
    lanes: list[tuple[list[Span], list[int]]] = []  # each with the ends of the spans still open
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        for lane, open_ends in lanes:
            while open_ends and open_ends[-1] <= span.start_ns:
                open_ends.pop()
            if not open_ends or span.end_ns <= open_ends[-1]:
                lane.append(span)
                open_ends.append(span.end_ns)
                break
        else:
            lanes.append(([span], [span.end_ns]))
    return [lane for lane, _ in lanes]


def _metadata(kind: str, pid: int, tid: int, order: int, **args: str) -> list[dict[str, Any]]:
    common = {"ph": "M", "pid": pid, "tid": tid}
    return [
        {**common, "name": f"{kind}_name", "args": args},
        {**common, "name": f"{kind}_sort_index", "args": {"sort_index": order}},
    ]


def _span_events(span: Span, where: dict[str, int], origin_ns: int, flows: set[int]) -> list[dict[str, Any]]:
    start_us = (span.start_ns - origin_ns) / 1e3
    duration_us = (span.end_ns - span.start_ns) / 1e3
    # A viewer ties an arrow to the span that encloses its time. One nanosecond before its end a span still
    # encloses it, while at its end the next one may have begun.
    leave_us = (max(span.start_ns, span.end_ns - 1) - origin_ns) / 1e3
    arrow = {**where, "name": "flow", "cat": "flow"}
    event = {**where, "ph": "X", "name": span.name, "cat": span.component, "ts": start_us, "dur": duration_us}
    return [
        {**event, "args": span.args},
        *({**arrow, "ph": "f", "bp": "e", "id": n, "ts": start_us} for n in span.flow_from if n in flows),
        *({**arrow, "ph": "s", "id": n, "ts": leave_us} for n in span.flow_to if n in flows),
    ]


def _from_json(events: Sequence[dict[str, Any]], origin_ns: int) -> list[Span]:
    tracks = {e["tid"]: str(e["args"]["track"]) for e in events if e["name"] == "thread_name"}
    spans: list[Span] = []
    for event in events:
        if event["ph"] == "X":
            start_ns = origin_ns + round(event["ts"] * 1e3)
            end_ns = start_ns + round(event["dur"] * 1e3)
            if not -LARGEST_NS < start_ns <= end_ns < LARGEST_NS:
                raise ValueError(f"a span from {start_ns:.3g} to {end_ns:.3g} ns")
            args = {str(key): value for key, value in event["args"].items()}
            spans.append(Span(tracks[event["tid"]], str(event["name"]), start_ns, end_ns, args))
        elif event["ph"] in "sf":  # follows its span
            span, number = spans[-1], int(event["id"])
            if event["ph"] == "s":
                spans[-1] = replace(span, flow_to=(*span.flow_to, number))
            else:
                spans[-1] = replace(span, flow_from=(*span.flow_from, number))
    return sorted(spans, key=lambda span: (track_order(span.track), span.start_ns))
