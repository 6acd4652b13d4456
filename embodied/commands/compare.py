"""`embodied compare`: every mode on the same work, measured beside predicted."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from rich import get_console
from rich import print as show

import schedulers
from embodied.commands.arguments import CompareArguments as Arguments
from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.errors import UserError
from embodied.execution.assignment import HOME, assign
from embodied.execution.iteration import Iteration, start_run
from embodied.execution.session import Session, open_session
from embodied.files import write_json, write_whole
from embodied.other_programs import OtherPrograms, in_words
from embodied.planning.clusters import planned_for, run_cluster
from embodied.planning.profiler import profile_run, run_iterations
from embodied.planning.run_plans import PROFILE, checked_profile, make_folder, sized_workflow
from embodied.reporting import report
from embodied.reporting.phase_times import PHASES, phase_times, rows_of, why_not_fastest
from embodied.reporting.plan_picture import Bar, bars_of, bars_of_spans, draw_bars, draw_timelines
from embodied.reporting.tables import table
from embodied.run import RUNS
from embodied.run.folder import with_init
from embodied.statistics import typical
from embodied.training.checks import Checked, check_start, check_tasks
from embodied.workflows.run_spec import RunSpec
from schedulers import DeviceRange, Plan, Simulation

COMPARED = Path("compare")
"""Folder of comparisons without --out."""


def run(args: Arguments) -> dict[str, Any]:
    settings = with_init(args.settings, RUNS, required=False)
    name = settings.name or Path(args.config).stem
    out = args.out or (COMPARED / settings.name if settings.name else COMPARED)
    return compare_command(settings, name, out, args.profile, args.repeats)


@dataclass(frozen=True)
class Ran:
    """A plan and the iterations that were run by it."""

    plan: Plan
    iterations: tuple[Iteration, ...]
    others: tuple[float, ...] = ()
    """Shares of the cores' time that other programs used meanwhile, one of each time that the plan was run."""

    @property
    def other_programs(self) -> float | None:
        """Their mean; None where none was sampled."""
        return fmean(self.others) if self.others else None

    @property
    def seconds(self) -> list[float]:
        return [iteration.wall_s for iteration in self.iterations]

    @property
    def usual(self) -> Iteration:
        """The one of median time: the timeline of an outlier would say little about the mode."""
        return sorted(self.iterations, key=lambda iteration: iteration.wall_s)[len(self.iterations) // 2]

    @property
    def bars(self) -> list[Bar]:
        """Components at work in it."""
        return bars_of_spans(self.usual.spans, self.usual.begin_ns)


def compare_command(config: Config, name: str, out: Path, profile: Path | None, repeats: int) -> dict[str, Any]:
    """Run every mode's best plan on the same work. Writes table, charts and timelines to `out`."""
    if repeats < 1:
        raise UserError(f"--repeats is at least 1, not {repeats}")
    checked = Checked(command="compare", config=config)
    check_start(checked)
    run = checked.run
    workflow, measured = sized_workflow(run), None
    if profile is not None:  # refused before anything is started
        measured = checked_profile(profile, run, workflow)
    make_folder(out)
    with open_session(config) as session:
        check_tasks(checked, session)
        if measured is None:
            show("measuring the workflow's components ...")
            measured = profile_run(run, session, out)
            write_whole(out / PROFILE, schedulers.text_of(measured))
        cluster = run_cluster(session)
        workflow = planned_for(workflow, measured, cluster)
        ahead = config.plan.ahead
        plans = schedulers.alternatives(workflow, measured, cluster, ahead=ahead)
        best_plan = schedulers.plan(workflow, measured, cluster, ahead=ahead)  # what `auto` would run
        plans[best_plan.mode] = best_plan
        ran = _run_all(run, session, out, list(plans.values()), repeats)
    chosen = next(r for r in ran if r.plan is best_plan)
    simulated: dict[str, Simulation] = {r.plan.mode: schedulers.simulate(r.plan, workflow, measured) for r in ran}
    rows = [_row(name, r, r is chosen, simulated[r.plan.mode]) for r in ran]
    best = min(row["measured_s"] for row in rows)
    result = {
        "workload": name,
        "task": ", ".join(task.env.task for task in run.tasks),
        "modes": rows,
        "chosen": chosen.plan.mode,
        "regret": next(row["measured_s"] for row in rows if row["chosen"]) / best - 1,
        "error": fmean(abs(row["error"]) for row in rows),
        "iterations": len(ran[0].iterations),
        "seed": config.seed,
        "command": " ".join(sys.argv),
        "hardware": hardware(),
        "date": date.today().isoformat(),
        "folder": str(out),
    }
    write_json(out / "compare.json", result)
    page = write_comparison(out, result, ran, simulated)
    get_console().print(comparison_table([result]), markup=False, highlight=False, soft_wrap=True)
    show(f"report: [bold]{page}[/]")
    return result


def predicted_s(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


def _run_all(run: RunSpec, session: Session, out: Path, plans: Sequence[Plan], repeats: int) -> list[Ran]:
    """All plans in turn, and again: what the machine does meanwhile falls on all of them."""
    found: dict[str, tuple[Iteration, ...]] = {plan.mode: () for plan in plans}
    shares: dict[str, tuple[float, ...]] = {plan.mode: () for plan in plans}
    for _ in range(repeats):
        for plan in plans:
            with start_run(run, out, session, assign(plan, run, session.cores, session.nodes)) as workers:
                others = OtherPrograms(session.cores)
                found[plan.mode] += tuple(run_iterations(workers)[1:])
                share = others.share()
                shares[plan.mode] += () if share is None else (share,)
    return [Ran(plan, found[plan.mode], shares[plan.mode]) for plan in plans]


def _row(name: str, ran: Ran, chosen: bool, simulated: Simulation) -> dict[str, Any]:
    middle, low, high = typical(ran.seconds)
    predicted = phase_times(bars_of(simulated), simulated.seconds)
    return {
        "workload": name,
        "mode": ran.plan.mode,
        "chosen": chosen,
        "predicted_s": predicted_s(ran.plan),
        "measured_s": middle,
        "measured_low_s": low,
        "measured_high_s": high,
        "error": predicted_s(ran.plan) / middle - 1,
        "other_programs": ran.other_programs,
        "phases": rows_of(predicted, phase_times(ran.bars, ran.usual.wall_s)),
        "env_steps_per_s": fmean(i.summary.env_steps for i in ran.iterations) / middle,
        "groups": list(ran.plan.groups),
        "placement": "; ".join(_placed(ran.plan)),
    }


def _placed(plan: Plan) -> list[str]:
    """A text per phase, without the bars that separate a table's cells."""
    return [
        " beside ".join(f"{'+'.join(p.components)} on {', '.join(map(_range, p.devices))}" for p in phase.placements)
        for phase in plan.phases
    ]


def _range(span: DeviceRange) -> str:
    last, where = span.first + span.count - 1, "" if span.node == HOME else f"{span.node} "
    return where + (f"{span.pool} {span.first}-{last}" if span.count > 1 else f"{span.pool.removesuffix('s')} {last}")


# --- the table and the page


HEAD = ("workload", "mode", "predicted s", "measured s", "95% interval", "error", "env steps/s", "placement")
PHASE_HEAD = ("mode and phase", "predicted s", "measured s", "measured - predicted")
PHASE_LEAD = (
    "Predicted: the simulation of the plan. Measured: the iteration of median time, from beginnings and ends of the "
    "same work. Sync and the rest: weight sync, switches between phases, sending of trajectories."
)


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """All modes of all workloads, and under it mean error and the fastest. Chosen plans are marked with a star."""
    rows = [_cells(row) for result in results for row in result["modes"]]
    return "\n".join([*table(HEAD, rows), "", *_findings(results)]) + "\n"


def _findings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    errors = [abs(row["error"]) for result in results for row in result["modes"]]
    mean = f"Mean absolute prediction error: {100 * sum(errors) / len(errors):.1f}%."
    shares = [row.get("other_programs") for result in results for row in result["modes"]]
    known = [share for share in shares if share is not None]
    busy = in_words(fmean(known) if known else None)
    return [
        f"{mean} {busy}".rstrip(),
        *(f"{result['workload']}: {' '.join(why_not_fastest(result['modes']))}" for result in results),
    ]


def write_comparison(
    out: Path,
    result: Mapping[str, Any],
    ran: Sequence[Ran],
    simulated: Mapping[str, Simulation],
) -> Path:
    """Write `compare.png`, `timelines.png` and the self-contained `compare.html`; the page's path."""
    draw_bars(out / "compare.png", result["modes"])
    timelines = {}
    for one in ran:
        timelines[f"{one.plan.mode}, predicted"] = bars_of(simulated[one.plan.mode])
        timelines[f"{one.plan.mode}, measured"] = one.bars
    draw_timelines(out / "timelines.png", timelines)
    why = "".join(
        f"<h3>{escape(one.plan.mode)}</h3><p>{'<br>'.join(escape(sentence) for sentence in one.plan.why)}</p>"
        for one in ran
        if one.plan.why
    )
    rows = [tuple(map(escape, _cells(row))) for row in result["modes"]]
    findings = "<br>".join(escape(line) for line in _findings([result]))
    body = (
        f"<header><h1>Modes compared: {escape(str(result['workload']))}</h1>"
        f"<p class='facts'><span>{escape(result['hardware'])}, {result['date']}</span></p></header>"
        f"<section>{report.table(HEAD, rows)}<p>{findings}</p></section>"
        + report.section("Predicted and measured", report.picture(out / "compare.png"))
        + report.section("Phases of one iteration", report.table(PHASE_HEAD, _phase_cells(result["modes"])), PHASE_LEAD)
        + report.section("Timelines of one iteration", report.picture(out / "timelines.png", "scroll wide"))
        + (report.section("Why", why) if why else "")
    )
    page = out / "compare.html"
    report.write_page(page, f"compare {result['workload']}", body)
    return page


def _phase_cells(modes: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """A row for each phase of each mode."""
    return [
        (
            escape(f"{row['mode']}: {title}"),
            f"{row['phases'][name]['predicted']:.3f}",
            f"{row['phases'][name]['measured']:.3f}",
            f"{row['phases'][name]['measured'] - row['phases'][name]['predicted']:+.3f}",
        )
        for row in modes
        for name, title in PHASES.items()
    ]


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["workload"],
        row["mode"] + (" *" if row["chosen"] else ""),
        f"{row['predicted_s']:.3f}",
        f"{row['measured_s']:.3f}",
        f"{row['measured_low_s']:.3f} to {row['measured_high_s']:.3f}",
        f"{100 * row['error']:+.1f}%",
        f"{row['env_steps_per_s']:.0f}",
        f"{row['placement']}; {_groups(row['groups'])}",
    )


def _groups(of_tasks: Sequence[int]) -> str:
    """Groups of environments of each task."""
    return f"{' and '.join(map(str, of_tasks))} group{'s' if max(of_tasks) > 1 or len(of_tasks) > 1 else ''}"
