"""An evaluation from beginning to end. Each task has a separate farm; an episode is kept as soon as it has ended."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rich import get_console

from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.errors import UserError
from embodied.evaluation.attempts import summarised
from embodied.evaluation.conditions import (
    compared_conditions,
    conditions_data,
    difference,
    differing_pairs,
    unperturbed,
)
from embodied.evaluation.films import Shown, differing, worth_seeing, write_film
from embodied.evaluation.folder import EvalFolder, Identity, newest_of, open_folder
from embodied.evaluation.protocol import Protocol, as_data, problem_notes, suite_notes, suite_of
from embodied.evaluation.provenance import (
    Lineage,
    TrainedStarts,
    lineage,
    outside_files,
    statistics_note,
    together,
    trained_sentence,
)
from embodied.execution.assignment import configured_farm, farm_spec, history_of
from embodied.execution.recovery import Recovery, until_done
from embodied.execution.session import Session
from embodied.files import new_folder, read_json, write_whole
from embodied.reporting.charts import standalone
from embodied.reporting.conditions import read_conditions, success_by_level
from embodied.reporting.live import duration, optional, steps, tell
from embodied.reporting.run_record import PERTURBED
from embodied.reporting.tables import evaluation_table
from embodied.rollout.evaluator import EpisodeOutcome, Evaluator, as_they_end, deal_out, make_evaluator
from embodied.run import checkpoint
from embodied.runtime.handles import Handle
from embodied.trajectories.batch import FAULTY
from embodied.workflows.context import policy_spec
from embodied.workflows.conventions import notes_on, overruled
from embodied.workflows.run_spec import task_spec
from policies.errors import PolicyError
from policies.registry import policy_kind
from sim_farm.catalogue import exact_replay, has_cameras, task_files, versions
from sim_farm.contract import EpisodeSpec, TaskSpec
from sim_farm.episodes import ListedEpisodes
from sim_farm.perturbations import Perturbation
from sim_farm.shared_memory.slot_layout import FarmSpec

RESULT = "eval.json"
OF_EPISODES = ("trials", "sha256", "hardware", "simulators")
"""Entries in which two protocols may differ while the evaluation with more episodes replaces the other."""
PAIRS = 4
"""Columns of a film of differences."""


@dataclass(frozen=True)
class Subject:
    """The policy to evaluate, and the places of its results."""

    name: str
    config: Config
    checkpoint: Path | None
    """None: a policy without parameters."""
    run_dir: Path | None
    """Folder of the run whose page shows the result."""
    home: Path
    """Folder of the evaluations' folders."""
    at_end: bool = False
    """True of the evaluation that a training ends with: what its run has reached."""

    @cached_property
    def files(self) -> dict[str, dict[str, str]]:
        """Path and digest of what the policy's options name, by option."""
        return outside_files(self.config.policy)

    @cached_property
    def statistics(self) -> str | None:
        """Name of the dataset whose statistics give actions their unit, where others have named it."""
        return policy_kind(self.config.policy.kind).format.statistics_name(self.config.policy.architecture)

    @cached_property
    def ensemble(self) -> float | None:
        """Coefficient with which predictions of several decisions are averaged; None: they are not."""
        policy = self.config.policy
        return policy_kind(policy.kind).format.ensemble(policy.architecture, policy.chunk)

    @cached_property
    def server(self) -> Mapping[str, Any] | None:
        """Metadata of the server that decides; None if this program computes the policy."""
        return policy_kind(self.config.policy.kind).format.served_by(self.config.policy.architecture)

    @property
    def named(self) -> str | None:
        """The checkpoint for people: a run's, or else the one that the policy's options or policy.init name."""
        if self.checkpoint is not None or self.config.policy.init is not None:
            return str(self.checkpoint or self.config.policy.init)
        return ", ".join(one["path"] for one in self.files.values()) or None

    def identity(self, protocol: Protocol) -> Identity:
        config = self.config
        begun = self.checkpoint or config.policy.init
        policy = {
            **{k: v for k, v in config.policy.model_dump(mode="json").items() if (k, v) != ("base", None)},
            "cameras": config.model_dump(mode="json")["env"]["cameras"],
            "checkpoint_sha256": None if begun is None else checkpoint.digest(begun),
            "files": self.files,
            **({} if self.ensemble is None else {"temporal_ensemble": self.ensemble}),
        }
        if self.server is not None:
            incidental = policy_kind(config.policy.kind).incidental
            policy["options"] = {name: v for name, v in config.policy.options.items() if name not in incidental}
            policy["server"] = self.server
        return Identity(protocol, policy)


@contextmanager
def evaluation_folder(subject: Subject, protocol: Protocol, folder: Path | None, resume: bool) -> Iterator[EvalFolder]:
    """The folder of `--folder`; else with `resume` the newest of the same evaluation; else a new one."""
    identity = subject.identity(protocol)
    if folder is None and resume:
        folder = newest_of(subject.home, identity)
    if folder is None:
        label = subject.name if subject.checkpoint is None else subject.checkpoint.name
        folder = new_folder(subject.home, label, "name another place with --folder")
    with open_folder(folder, identity, subject.config, resume) as opened:
        yield opened


def evaluate(subject: Subject, protocol: Protocol, session: Session, folder: EvalFolder) -> dict[str, Any]:
    """Run the episodes that the folder lacks; write and return the result as plain data."""
    begin, before = time.monotonic(), len(folder.outcomes)
    total = protocol.total
    if before:
        _say(f"{folder.path}: {before} of {total} episodes are there already")
    origin = lineage(subject.checkpoint, subject.config.policy)
    warnings = _warnings(subject, protocol)
    for warning in warnings:
        _say(f"Note: {warning}")
    recovery = Recovery(folder.path, "episodes")
    try:
        decisions = until_done(
            lambda: _run_episodes(subject, protocol, session, folder, recovery, warnings),
            recovery,
            session,
            lambda: len(folder.outcomes),
        )
    except (KeyboardInterrupt, PolicyError) as error:
        kept = (
            f"{len(folder.outcomes)} of {total} episodes are kept in {folder.path}; --resume auto goes on with "
            "them, behind the same command"
        )
        if isinstance(error, KeyboardInterrupt):
            _say(kept)
        elif subject.server is not None and folder.outcomes:  # a server that is started again can go on
            raise PolicyError(f"{error}. {kept}") from error
        raise
    folder.put_in_order()
    everything = folder.in_order()
    outcomes = unperturbed(protocol, everything)
    has_success = any(outcome.success is not None for outcome in outcomes)
    if not has_success:
        _require_returns(protocol, outcomes, folder.path)
    starts = {task: _starts(origin, task, [o for o in outcomes if o.task == task]) for task in protocol.tasks}
    result = {
        **_tables(protocol, outcomes, starts),
        **({"conditions": conditions_data(protocol, everything)} if protocol.has_conditions else {}),
        "notes": [trained_sentence(together(list(starts.values())), origin.unknown), *warnings],
        "wall_s": time.monotonic() - begin,
        "episodes_of_earlier_sessions": before,
        "checkpoint": subject.named,
        "files": subject.files,
        "statistics": subject.statistics,
        **({} if subject.server is None else {"server": subject.server}),
        **({} if decisions is None else {"decisions": decisions}),
        "folder": str(folder.path),
        "protocol": {
            **as_data(protocol),
            "chunk": subject.config.policy.chunk,
            "success": protocol.success_line if has_success else "none: the measure is the return",
            "interval": "95% Wilson" if has_success else "95% Student's t",
            "hardware": hardware(),
            "simulators": {name: versions(name) for name in sorted({t.partition("/")[0] for t in protocol.tasks})},
        },
        "protocol_line": protocol.line({outcome.limit for outcome in outcomes}, has_success),
        "policy_line": f"{subject.config.policy.kind}, {_chunks_of(subject)}, {_weights_of(subject)}; {hardware()}",
    }
    write_result(folder.path, result)
    return result


def film(subject: Subject, protocol: Protocol, session: Session, folder: EvalFolder) -> None:
    """Film episodes of an evaluation that has ended, and show its result and films in its run's folder."""
    recovery, total = Recovery(folder.path, "episodes"), protocol.total
    outcomes = unperturbed(protocol, folder.in_order())
    if protocol.has_conditions and subject.config.eval.videos:
        with optional("the film of the perturbed episodes"):
            until_done(lambda: _film_perturbed(subject, protocol, session, folder), recovery, session, lambda: total)
    filmed = _filmed(protocol.tasks) if subject.config.eval.videos else set[str]()
    if seen := [outcome for outcome in outcomes if outcome.task in filmed]:
        seen = worth_seeing(seen, subject.config.eval.videos)
        with optional("the film"):
            until_done(lambda: _film(subject, session, folder, seen), recovery, session, lambda: total)
    _show_in_run(folder.path, subject)


def trials_farm(
    config: Config,
    session: Session,
    specs: tuple[EpisodeSpec, ...],
    left: Sequence[int],
    perturbations: tuple[Perturbation, ...] = (),
    conditions: int = 0,
) -> FarmSpec:
    """The farm on which a policy acts in the trials `left` (indices of `specs`) of the configuration's task, which are
    repeated under a number of conditions, perturbations or others."""
    num_envs = config.eval.num_envs or config.env.num_envs
    place = configured_farm(config, session.cores, session.nodes)
    shape = farm_spec(config, ListedEpisodes(specs, num_envs), place, num_envs)
    shape = replace(shape, task=evaluated_task(config, perturbations))
    paired = len(specs) // (1 + conditions) if conditions else 0
    return deal_out(shape, specs, left, paired)


def evaluated_task(config: Config, perturbations: tuple[Perturbation, ...] = ()) -> TaskSpec:
    """The configuration's task as evaluations simulate it."""
    ignored = config.eval.ignore_terminations
    return replace(task_spec(config), ignore_terminations=ignored, perturbations=perturbations)


def compare(result: dict[str, Any], first: EvalFolder, second: EvalFolder, against: str) -> dict[str, Any]:
    """The result with its difference to another evaluation of the same episodes. Raises `UserError` if they differ."""
    mine, its = first.identity.protocol, second.identity.protocol
    if not mine.same_episodes(its):
        raise UserError(f"{second.path} is an evaluation by another protocol: its episodes cannot be paired")
    if mine.conventions != its.conventions:
        _say(f"Note: each policy acts by its own conventions: {against} {its.conventions}; here {mine.conventions}")
    ours, theirs = first.in_order(), second.in_order()
    if any(outcome.success is None for outcome in ours):
        raise UserError(
            f"{first.identity.protocol.tasks[0]} has no success by which episodes could be paired: compare the returns "
            f"in {first.path} and {second.path}"
        )
    if [(o.task, o.trial, o.spec) for o in ours] != [(o.task, o.trial, o.spec) for o in theirs]:
        raise UserError(f"{second.path} has {len(theirs)} of {len(ours)} episodes: finish it first with --resume auto")
    protocol = first.identity.protocol
    plain, others = unperturbed(protocol, ours), unperturbed(protocol, theirs)
    pairs = list(zip(plain, others, strict=True))
    rows = [{"task": task, **difference([pair for pair in pairs if pair[0].task == task])} for task in protocol.tasks]
    perturbed = compared_conditions(protocol, ours, theirs)
    comparison = {
        "against": against,
        "folder": str(second.path),
        **difference(pairs),
        "success_rate": sum(bool(o.success) for o in others) / len(others),
        "tasks": rows,
        **({"conditions": perturbed} if perturbed else {}),
        **({} if mine.conventions == its.conventions else {"conventions": its.conventions}),
    }
    return {**result, "comparison": comparison}


def film_differences(subject: Subject, session: Session, first: EvalFolder, second: EvalFolder, against: str) -> None:
    """Film up to four episodes that one of the two solved and the other did not: above those of the second, which is
    called `against`, below those of the subject. The run's page then shows the comparison."""
    path = first.path / "videos" / "against.mp4"
    path.unlink(missing_ok=True)
    pairs = differing(first.in_order(), second.in_order(), min(subject.config.eval.videos, PAIRS))
    above, below = Path(against).name, subject.name
    shown = [_shown(subject, second, o, f"{above}, episode {o.trial}") for _, o in pairs]
    shown += [_shown(subject, first, o, f"{below}, episode {o.trial}") for o, _ in pairs]
    filmed = _filmed(first.identity.protocol.tasks)
    shown = [one for one in shown if one.outcome.task in filmed]
    if shown:
        with optional("the film of the differences"):
            write_film(path, session, shown, len(pairs))
    _show_in_run(first.path, subject)


def _filmed(tasks: Sequence[str]) -> set[str]:
    """Those of the tasks that can be filmed: seen by a camera, and replayed. Tells which cannot be replayed."""
    seen = {task for task in tasks if has_cameras(task)}
    for task in sorted(task for task in seen if not exact_replay(task)):
        tell(f"No film of {task}: a film is a replay, and the simulator declares exact_replay=False")
    return {task for task in seen if exact_replay(task)}


def write_result(folder: Path, result: dict[str, Any]) -> None:
    """`eval.json`, `eval.md` and, where episodes were perturbed, `eval.svg`, each complete or absent."""
    files = {RESULT: json.dumps(result, indent=1) + "\n", "eval.md": evaluation_table(result)}
    if conditions := read_conditions(result):
        files["eval.svg"] = standalone(success_by_level(conditions))
    for name, text in files.items():
        write_whole(folder / name, text)


def _run_episodes(
    subject: Subject,
    protocol: Protocol,
    session: Session,
    folder: EvalFolder,
    recovery: Recovery,
    warnings: list[str],
) -> dict[str, float | str] | None:
    """Task by task, on a farm each; one worker holds the policy for all of them. Adds what only the simulators know to
    the warnings. Returns how long its decisions took; None where no episode is left."""
    # Decisions under a delay are other env steps apart, so that they have a farm of their own.
    unfinished = [
        (task, delayed, left)
        for task in protocol.tasks
        for delayed in protocol.every_delay
        if (left := [trial for trial in folder.left(task) if protocol.delayed(task, trial) == delayed])
    ]
    ahead, done, begin = sum(len(left) for _, _, left in unfinished), 0, time.monotonic()
    worker: Handle[Evaluator] | None = None
    control_hz = 0.0
    for number, (task, delayed, left) in enumerate(unfinished, start=1):
        config = protocol.applied(subject.config, task)
        title = f"Evaluating {task}" + ("" if delayed is None else f", {delayed.method}, delay {delayed.delay}")
        if len(unfinished) > 1:
            title += f" ({number} of {len(unfinished)}"
            left_s = (time.monotonic() - begin) * (ahead - done) / max(done, 1)
            title += f", {duration(left_s)} left in all)" if done else ")"
        table = protocol.perturbations.get(task, ())
        shape = trials_farm(config, session, protocol.episodes(task), left, table, len(protocol.conditions(task)))
        shape = shape if delayed is None else replace(shape, chunk=delayed.interval)
        with session.farm(shape, workers=int(worker is None)) as farm:
            if (why := farm.infos[0].inexact) and (note := not_repeatable(task, why)) not in warnings:
                warnings.append(note)
                _say(f"Note: {note}")
            sizes, reach, control_hz = policy_spec(config, farm.infos[0]), session.reach(farm), farm.infos[0].control_hz
            if worker is None:
                worker = session.runtime.start(
                    "evaluator", make_evaluator, config, sizes, reach, subject.checkpoint, 0.0, delayed
                )
            else:
                worker.call(Evaluator.begin, task, sizes, reach, delayed)
            recovery.serving(len(folder.outcomes))
            _run_task(worker, folder, len(left), title, worker.deadline.inner().seconds)
            recovery.note_replaced(session.runtime, len(folder.outcomes), _say)
        done += len(left)
    if worker is None:
        return None
    decisions = worker.call(Evaluator.decision_times, control_hz)
    worker.end()
    return decisions


def not_repeatable(task: str, why: str) -> str:
    """A warning of a task whose episodes nobody can have again."""
    return (
        f"the seeds of {task} do not determine its episodes: {why}. Another evaluation by this protocol, whatever its "
        "hash, is of other episodes, and nothing of it can be filmed or recorded"
    )


def _say(text: str) -> None:
    get_console().print(text, markup=False, highlight=False, soft_wrap=True)


def _run_task(worker: Handle[Evaluator], folder: EvalFolder, episodes: int, title: str, deadline_s: float) -> None:
    faulty, sound = 0, False
    with steps(title, episodes) as bar:
        for result in as_they_end(lambda budget_s: worker.call(Evaluator.advance, budget_s, deadline_s), episodes):
            faulty += bool(result.fault)
            sound |= not result.fault and result.length < result.limit
            if result.fault and not sound and faulty >= min(FAULTY, episodes):
                raise UserError(
                    f"{result.task}: the first {faulty} episodes that the task ended were all broken: {result.fault}"
                )
            folder.add(result)
            if not math.isfinite(result.total_reward):
                lost = "" if exact_replay(result.task) else ", or a worker was lost"
                why = result.fault or f"a number of the simulator's was not finite{lost}"
                place = f"{result.task}, trial {result.trial}: after {result.length} env steps"
                _say(f"{place} {why}; the episode counts as failed")
            bar.advance()
    worker.call(Evaluator.end)


def _require_returns(protocol: Protocol, outcomes: Sequence[EpisodeOutcome], folder: Path) -> None:
    """Raise `UserError` for a task that is measured by its return, and has none: each of its episodes is broken."""
    for task in protocol.tasks:
        own = [outcome for outcome in outcomes if outcome.task == task]
        if not any(math.isfinite(outcome.total_reward) for outcome in own):
            raise UserError(
                f"{task}: all {len(own)} episodes are broken, since a number of the simulator's was not finite in "
                f"each: there is no return to tell. Mend the task, and evaluate again without --resume ({folder} keeps "
                "the episodes)"
            )


def _warnings(subject: Subject, protocol: Protocol) -> list[str]:
    """Warnings about files of tasks, and statistics of another suite, that do not match their names, and about
    conventions that are not those of the policy's training."""
    files = [found for task in protocol.tasks if (found := task_files(task)) is not None]
    found = list(dict.fromkeys(note for one in files for note in one.foreign))
    found += suite_notes(protocol)
    found += problem_notes(protocol)
    if subject.statistics is not None:
        note = statistics_note(subject.statistics, dict.fromkeys(map(suite_of, protocol.tasks)))
        found += [] if note is None else [note]
    applied = protocol.applied(subject.config, protocol.tasks[0])
    begun = subject.checkpoint or subject.config.policy.init
    if begun is not None:
        return found + notes_on(begun, applied)
    return found + overruled(subject.config, applied)


def _chunks_of(subject: Subject) -> str:
    """Sentence about the number of executed actions of a decision, the observations that it is made on where there are
    several, and averages over several decisions."""
    history = history_of(subject.config)
    seen = ""
    if history.observations > 1:
        seen = f" on {history.observations} observations, {history.distance} env steps apart"
    averaged = "" if subject.ensemble is None else f", temporal ensembling with coefficient {subject.ensemble:g}"
    return f"chunks of {subject.config.policy.chunk}{seen}{averaged}"


def _weights_of(subject: Subject) -> str:
    """The policy's checkpoint, files and statistics in a line."""
    parts = [str(subject.checkpoint or subject.config.policy.init or "")]
    parts += [f"{one['path']} (sha256 {one['sha256'][:12]})" for one in subject.files.values()]
    base = subject.config.policy.base
    parts += [] if base is None else [f"base in {base}"]
    parts += [] if subject.statistics is None else [f"statistics of {subject.statistics}"]
    parts += [] if subject.server is None else ["the weights of a policy server (eval.json: server)"]
    return ", ".join(part for part in parts if part) or "no checkpoint"


def _starts(origin: Lineage, task: str, outcomes: Sequence[EpisodeOutcome]) -> TrainedStarts:
    """The starts of the task's episodes, beside those that the policy was trained on."""
    begun = [outcome.beginning for outcome in outcomes]
    return origin.starts(task, [outcome.spec for outcome in outcomes], len(set(begun)) if all(begun) else None)


def _tables(
    protocol: Protocol, outcomes: Sequence[EpisodeOutcome], starts: Mapping[str, TrainedStarts]
) -> dict[str, Any]:
    """The summary of everything, of each suite, and of each task."""
    by_task = {task: [o for o in outcomes if o.task == task] for task in protocol.tasks}
    by_suite: dict[str, list[EpisodeOutcome]] = {}
    for task, own in by_task.items():
        by_suite.setdefault(suite_of(task), []).extend(own)

    def summary(own: Sequence[EpisodeOutcome]) -> dict[str, float]:
        return summarised(own, protocol.attempts)

    def trained(tasks: Iterable[str]) -> dict[str, Any]:
        return {"trained_on": together([starts[task] for task in tasks]).as_data()}

    tasks = [
        {"task": task, "max_episode_steps": own[0].limit, **summary(own), **trained([task])}
        for task, own in by_task.items()
    ]
    members = {suite: [task for task in by_task if suite_of(task) == suite] for suite in by_suite}
    return {
        "task": protocol.tasks[0] if len(tasks) == 1 else f"{len(tasks)} tasks",
        **summary(outcomes),
        **trained(protocol.tasks),
        "suites": [
            {"suite": suite, "tasks": len(members[suite]), **summary(own), **trained(members[suite])}
            for suite, own in by_suite.items()
        ],
        "tasks": tasks,
    }


def _film(subject: Subject, session: Session, folder: EvalFolder, outcomes: Sequence[EpisodeOutcome]) -> None:
    shown = [_shown(subject, folder, outcome, f"episode {outcome.trial}") for outcome in outcomes]
    write_film(folder.path / "videos" / "evaluation.mp4", session, shown)


def _film_perturbed(subject: Subject, protocol: Protocol, session: Session, folder: EvalFolder) -> None:
    """Film pairs of episodes with different outcomes: above without the perturbation, below with it."""
    path = folder.path / "videos" / "perturbed.mp4"
    path.unlink(missing_ok=True)
    filmed = _filmed(protocol.tasks)
    seen = [outcome for outcome in folder.in_order() if outcome.task in filmed]
    pairs = differing_pairs(protocol, seen, min(subject.config.eval.videos, PAIRS))
    own = protocol.trained_delay
    above = "unperturbed" if own is None else f"{own.axis} {own.level}"
    shown = [_shown(subject, folder, plain, f"{above}, episode {plain.trial}") for plain, _ in pairs]
    for plain, other in pairs:
        condition = protocol.condition(other.task, other.trial)
        assert condition is not None
        label = f"{condition.axis} {condition.level}, episode {plain.trial}"
        shown.append(_shown(subject, folder, other, label))
    if shown:
        write_film(path, session, shown, len(pairs))


def _shown(subject: Subject, folder: EvalFolder, outcome: EpisodeOutcome, label: str) -> Shown:
    """The episode to film, by the conventions that its actions are of: those of its folder's protocol."""
    protocol, task = folder.identity.protocol, outcome.task
    simulated = evaluated_task(protocol.applied(subject.config, task), protocol.perturbations.get(task, ()))
    return Shown(outcome, folder.actions(outcome), label, simulated)


def _show_in_run(folder: Path, subject: Subject) -> None:
    """Show the result in the run's own folder, if it is what the run has reached: its evaluation at the end of the
    training, or a later one that says more of it.

    Another stays in its folder alone, but for its perturbed episodes, which the run's page shows beside.
    """
    run_dir = subject.run_dir
    if run_dir is None or subject.config.eval.instruction is not None:
        return
    result, known = read_json(folder / RESULT), None if subject.at_end else _reached(run_dir)
    reached = known is None or _says_more(result, known, run_dir)
    if reached:
        _copy(folder, run_dir, (RESULT, "eval.md", "videos/evaluation.mp4", "videos/against.mp4"))
    elif known is not None:
        tell(
            f"What {run_dir} has reached stays the evaluation of {known['episodes']} episodes; this one, of "
            f"{result['episodes']}, is in {folder}"
        )
    if subject.at_end or "conditions" in result:
        _copy(folder, run_dir, ("eval.svg", "videos/perturbed.mp4"))
        (run_dir / PERTURBED).unlink(missing_ok=True)
        if not reached:
            shutil.copyfile(folder / RESULT, run_dir / PERTURBED)


def _copy(folder: Path, run_dir: Path, names: Iterable[str]) -> None:
    """Copy the files that are there, and remove those of another evaluation that are not."""
    for name in names:
        if (folder / name).is_file():
            (run_dir / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(folder / name, run_dir / name)
        else:
            (run_dir / name).unlink(missing_ok=True)


def _reached(run_dir: Path) -> Mapping[str, Any] | None:
    """The result that the run's folder shows; None where there is none that can be read."""
    try:
        found = read_json(run_dir / RESULT)
        return found if found["episodes"] and found["protocol"] and "checkpoint" in found else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _says_more(result: Mapping[str, Any], known: Mapping[str, Any], run_dir: Path) -> bool:
    """True if the result should replace the run's known one. It must have the same protocol, and either no fewer
    episodes of the same checkpoint, or the checkpoint that the run ends with now where the known result has another."""
    ours, theirs = ({k: v for k, v in one["protocol"].items() if k not in OF_EPISODES} for one in (result, known))
    if ours != theirs:
        return False
    root = run_dir / "checkpoints"
    of = [one["checkpoint"] for one in (result, known)] + [checkpoint.best(root) or checkpoint.latest(root)]
    own, other, end = (None if path is None else Path(path).resolve().parts[-3:] for path in of)
    return result["episodes"] >= known["episodes"] if own == other else own == end
