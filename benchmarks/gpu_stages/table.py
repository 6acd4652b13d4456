"""The table of what was measured, beside what was wanted: on the screen, or between two marks of a file."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gpu_stages.parts import STAGES
from benchmarks.gpu_stages.record import MEASURED, Entry, Record

BEGIN, END = "<!-- gpu: written by `python benchmarks/gpu.py --table FILE` -->", "<!-- /gpu -->"
HEADER = "| stage | measured | wanted | beside |\n|---|---|---|---|"
WITHOUT_MODEL = ("doctor", "paths", "draw", "language")
"""Stages that measure no model that the command names."""
Figures = dict[str, Any]


def show(record: Record, target: str) -> int:
    """Print the table (`-`), or write it into the file between its marks; exit status."""
    text = table(record)
    if target == "-":
        print(text)
        return 0
    path = Path(target)
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        print(f"{path} has no lines {BEGIN} and {END} to write between", file=sys.stderr)
        return 2
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    return 0


def table(record: Record) -> str:
    """Markdown: a row for each part, and above the table what they were measured on."""
    if not record.entries:
        return f"Nothing is measured yet: there is no {record.path.name}."
    order = [stage.name for stage in STAGES]
    entries = sorted(record.entries.items(), key=lambda named: order.index(named[0].partition("/")[0]))
    lines = [f"Measured on {where}." for where in dict.fromkeys(_where(entry) for _, entry in entries)]
    return "\n".join([*lines, "", HEADER, *(_row(name, entry) for name, entry in entries)])


def _where(entry: Entry) -> str:
    versions = entry["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "transformers", "driver") if versions.get(name))
    return f"{entry['date'][:10]} on {entry['hardware']}; {named}; commit {entry['commit']}"


def _row(name: str, entry: Entry) -> str:
    stage, wanted, figures = name.partition("/")[0], WANTED.get(name.partition("/")[0]), entry["figures"]
    what = f"{name} ({entry['model']})" if entry["model"] not in name and stage not in WITHOUT_MODEL else name
    if entry["state"] != MEASURED:
        message = entry.get("message", "").splitlines()[0][:200].replace("|", "/")
        return f"| {what} | {entry['state']}: {message} | {_goals(wanted, entry)} | |"
    measured, beside = ROWS[stage](figures)
    return f"| {what} | {measured} | {_goals(wanted, entry)} | {beside} |"


# --- what was wanted, of one H200 in bfloat16

Goal = tuple[str, Callable[[Figures], bool | None]]
"""In words, and whether the figures reach it; None where they do not say."""


def _least(key: str, least: float) -> Callable[[Figures], bool | None]:
    return lambda figures: figures[key] >= least if key in figures else None


def _most(key: str, most: float) -> Callable[[Figures], bool | None]:
    return lambda figures: figures[key] <= most if key in figures else None


def _any_case(key: str, least: float) -> Callable[[Figures], bool | None]:
    return lambda figures: any(case.get(key, 0) >= least for case in figures.get("cases", ())) or None


def _of(policy: str, reached: Callable[[Figures], bool | None]) -> Callable[[Figures], bool | None]:
    return lambda figures: reached(figures) if figures.get("policy") == policy else None


WANTED: dict[str, tuple[Goal, ...]] = {
    "act": (
        ("100 actions/s", _least("actions_per_s", 100)),
        ("90 chunks/s", _of("openvla_oft", _least("chunks_per_s", 90))),
        ("120 chunks/s", _of("pi0", _least("chunks_per_s", 120))),
        ("25 ms for one", _of("pi0", _most("time_to_first_action_s", 0.025))),
    ),
    "learn": (
        ("25 samples/s", _least("samples_per_s", 25)),
        ("utilisation 35%", _any_case("mfu", 0.35)),
        ("one copy of the weights", _most("copies_of_weights", 1.1)),
    ),
    "weights": (("one copy of the weights", _most("copies_of_weights", 1.1)),),
    "draw": (("10 times software", _least("ratio_to_software", 10)),),
    "modes": (
        ("chosen within 3% of the best", _most("regret", 0.03)),
        ("predicted within 10%", _most("largest_error", 0.1)),
    ),
    "paths": (("all equal", lambda figures: figures["equal"] == figures["tried"] if "equal" in figures else None),),
}


def _goals(wanted: tuple[Goal, ...] | None, entry: Entry) -> str:
    if entry["device"] == "cpu":
        return "(tried on a CPU)"
    judged = [(text, reached(entry["figures"])) for text, reached in wanted or ()]
    return ", ".join(f"{text}: {'yes' if yes else 'no'}" for text, yes in judged if yes is not None)


# --- what was measured, in words


def _doctor(f: Figures) -> tuple[str, str]:
    rates = f"{f['matmul_flops_per_s'] / 1e12:,.2f} TFLOP/s, {f['memory_bytes_per_s'] / 1e9:,.0f} GB/s"
    if "to_host_bytes_per_s" in f:
        rates += f", {f['to_host_bytes_per_s'] / 1e9:.0f} GB/s to the host, {f['to_device_bytes_per_s'] / 1e9:.0f} back"
    lacking = [name.partition(":")[0] for name in f["lacking"]]
    return rates, f"not as it was tested: {', '.join(lacking)}" if lacking else "nothing is lacking"


def _paths(f: Figures) -> tuple[str, str]:
    worst = max((case.get("update_difference", float("inf")) for case in f["cases"]), default=0.0)
    return f"{f['equal']} of {f['tried']} runs equal the CPU's", f"largest difference {worst:.1e} of an update"


def _act(f: Figures) -> tuple[str, str]:
    unit = "actions/s" if "actions_per_s" in f else "chunks/s"
    measured = f"{f['decisions_per_s']:,.1f} {unit} by {f['batch']}, {f['share_of_limit']:.2f} of the limit"
    return (
        measured,
        f"{f['peak_memory_bytes'] / 1e9:.1f} GB; first action after {1e3 * f['time_to_first_action_s']:.0f} ms",
    )


def _learn(f: Figures) -> tuple[str, str]:
    how = [
        f"micro-batch {f['micro_batch']}",
        *["recomputing"] * f["recomputed"],
        *["cached"] * f["cached_features"],
    ]
    measured = f"{f['samples_per_s']:,.1f} samples/s, utilisation {f['mfu']:.0%}"
    return measured, f"{', '.join(how)}; {f['peak_memory_bytes'] / 1e9:.1f} GB"


def _offload(f: Figures) -> tuple[str, str]:
    measured = f"{f['bytes'] / 1e9:.2f} GB out in {f['unload_s']:.2f} s, back in {f['load_s']:.2f} s"
    limits = f"{f['limit_unload_s']:.2f} s and {f['limit_load_s']:.2f} s by the bandwidth"
    return measured, f"{limits}; the first time {f['first_unload_s']:.2f} s"


def _draw(f: Figures) -> tuple[str, str]:
    where = "GPU" if f["device"] != "cpu" else "software"
    measured = f"{f['frames_per_s']:,.0f} frames/s ({where}, {f['cameras']} x {f['image_size']}²)"
    if "software_frames_per_s" not in f:
        return measured, "in software it cannot be drawn there"
    return (
        measured,
        f"{f['software_frames_per_s']:,.0f} in software on {f['cores']} cores: {f['ratio_to_software']:.1f} times",
    )


def _weights(f: Figures) -> tuple[str, str]:
    measured = f"{1e3 * f['seconds']:,.1f} ms for {f['handed_over_bytes'] / 1e6:,.1f} MB"
    return measured, f["path"] + (
        f"; {f['copies_of_weights']:.2f} copies on the GPU" if "copies_of_weights" in f else ""
    )


def _modes(f: Figures) -> tuple[str, str]:
    rows = [f"{row['mode']} {row['measured_s']:.2f} s (predicted {row['predicted_s']:.2f})" for row in f["modes"]]
    return (
        f"{', '.join(rows)} an iteration",
        f"{f['chosen']} chosen, regret {f['regret']:.1%}, mean error {f['error']:.1%}",
    )


def _graph(f: Figures) -> tuple[str, str]:
    rows = [row for row in f["batches"] if "graph_s" in row]
    if not rows:
        return "there is none without a GPU", ""
    measured = ", ".join(
        f"batch {row['batch']}: {1e3 * row['graph_s']:.1f} instead of {1e3 * row['eager_s']:.1f} ms" for row in rows
    )
    differ = [f"{row['largest_difference']:.1g}" for row in rows if not row["equal"]]
    return measured, f"largest differences {', '.join(differ)}" if differ else "equal to the last bit"


def _language(f: Figures) -> tuple[str, str]:
    if "modes" in f:
        return _modes(f)
    if "mfu" in f:
        measured = f"{f['tokens_per_s']:,.0f} tokens/s, utilisation {f['mfu']:.0%}"
        return measured, f"{f['rows']} rows of {f['length']}; {f['peak_memory_bytes'] / 1e9:.1f} GB"
    rates = f["tokens_per_s"]
    measured = f"{rates['ours']:,.0f} tokens/s, {f['rows']} answers side by side"
    return measured, f"{f['ratio_to_generate']:.2f} times transformers' `generate` ({rates['generate']:,.0f})"


ROWS: dict[str, Callable[[Figures], tuple[str, str]]] = {
    "doctor": _doctor, "paths": _paths, "act": _act, "learn": _learn, "offload": _offload, "draw": _draw,
    "weights": _weights, "modes": _modes, "graph": _graph, "language": _language,
}  # fmt: skip
