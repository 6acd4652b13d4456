"""`embodied record`: a policy acts on the farm; its episodes are replayed, drawn, and written as a dataset."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich import print as show

from embodied.commands.arguments import RecordArguments as Arguments
from embodied.config.schema import Config
from embodied.demonstrations.writer import DatasetWriter, new_folder
from embodied.errors import UserError
from embodied.evaluation.evaluate import trials_farm
from embodied.execution.session import Session, in_order, open_session, replayers_of
from embodied.reporting.live import steps
from embodied.rollout.evaluator import EpisodeResult, Evaluator, make_evaluator, run_to_end
from embodied.run.folder import whole_checkpoint, with_init
from embodied.run.saved_settings import find_run
from embodied.runtime.handles import Handle
from embodied.training.checks import Checked, check_start, check_tasks
from embodied.workflows.context import policy_spec
from embodied.workflows.run_spec import task_spec
from sim_farm.client.episode_replay import ReplayedEpisode, Replayer
from sim_farm.contract import EpisodeSpec
from sim_farm.episodes import episode_seed

DEMONSTRATION = 2
"""First word of the key of these episodes' seeds: neither training's nor evaluation's, which a policy that learns
from the recording must not have seen."""


def run(args: Arguments) -> dict[str, Any]:
    settings = with_init(args.settings, args.runs_dir, required=False)
    return record_run(
        args.run, settings, args.checkpoint, args.out, args.episodes, args.only_successes, args.runs_dir,
        args.instructions, args.disturb,
    )  # fmt: skip


def demonstration_episodes(
    run_seed: int, count: int, init_states: Sequence[int] | None = None
) -> tuple[EpisodeSpec, ...]:
    """`count` episodes whose seeds come from a separate stream, from `init_states` in turn where there are any.

    A longer list begins with the shorter one.
    """
    states = init_states or (None,)
    return tuple(
        EpisodeSpec(episode_seed(DEMONSTRATION, run_seed, 0, trial), states[trial % len(states)])
        for trial in range(count)
    )


def record_run(
    run: str,
    config: Config,
    folder: Path | None,
    out: Path,
    episodes: int,
    only_successes: bool,
    runs_dir: Path,
    instructions: Sequence[str] = (),
    disturb: float = 0.0,
) -> dict[str, Any]:
    """Let the checkpoint `folder`, or the one that `run` ends with, act in `episodes` episodes; record them in `out`.

    Where `run` is a configuration and no checkpoint is named, its policy must need no training. With
    `only_successes` the episodes that it failed are left out. The cameras are those of `env.cameras`, whether the
    policy reads them or not. `instructions` are recorded in turn in place of the task's own. Actions are executed with
    noise of standard deviation `disturb`, and recorded without. Returns the result as plain data; raises `UserError`.
    """
    if episodes < 1:
        raise UserError(f"--episodes is at least 1, got {episodes}")
    if not 0 <= disturb < math.inf:
        raise UserError(f"--disturb is a standard deviation of at least 0, got {disturb}")
    if not all(text.strip() for text in instructions):
        raise UserError("--instructions: one of the wordings is empty")
    folder = whole_checkpoint(find_run(run, runs_dir), folder)
    checked = Checked(command="record", config=config, checkpoint=folder)
    check_start(checked)
    begin = time.monotonic()
    with new_folder(out) as aside, open_session(config) as session:
        check_tasks(checked, session)
        # One replayer and the writer before anybody acts: what cannot be written is refused now, not hours later.
        task = replace(task_spec(config), cameras=config.env.cameras, perturbations=())
        replayer = session.runtime.start("replayer 0", Replayer, task)
        info = replayer.call(Replayer.describe)
        provenance = {
            "task": asdict(info.spec),
            "policy": {"kind": config.policy.kind, "checkpoint": None if folder is None else str(folder)},
            "sampling": "sampled" if config.eval.greedy is False else "greedy",
            "run_seed": config.seed,
            "episodes_run": episodes,
            "only_successes": only_successes,
            "instructions": list(instructions),
            "disturb": disturb,
        }
        writer = DatasetWriter(aside, info, provenance)
        results = _act(config, session, folder, episodes, disturb)
        sound = [result for result in results if math.isfinite(result.total_reward)]  # what a dataset may hold
        wanted = [result for result in sound if result.success or not only_successes]
        if not wanted:
            raise UserError(f"none of the {episodes} episodes was solved: run more, or leave out --only-successes")
        not_reproduced = _write(writer, replayers_of(replayer, task, session, len(wanted)), wanted, instructions)
    solved = sum(bool(result.success) for result in results)
    result = {
        "dataset": str(out),
        "task": config.env.task,
        "episodes": writer.episodes,
        "env_steps": writer.frames,
        "cameras": list(info.cameras),
        "not_reproduced": not_reproduced,
        "episodes_run": episodes,
        "solved": solved if info.has_success else None,
        "success_rate": solved / episodes if info.has_success else None,
        "wall_s": time.monotonic() - begin,
    }
    _show(result)
    return result


def _show(result: dict[str, Any]) -> None:
    show(
        f"[bold]{result['dataset']}[/]: {result['episodes']} episodes, {result['env_steps']} env steps of "
        f"{result['task']}, cameras: {', '.join(result['cameras']) or 'none (--env.cameras 1 records pictures)'}"
    )
    if result["not_reproduced"]:
        show(f"{result['not_reproduced']} episodes came out otherwise when they were replayed, and were left out")


def _act(config: Config, session: Session, folder: Path | None, episodes: int, disturb: float) -> list[EpisodeResult]:
    """The policy's episodes, as actions, in the order of trials. No frame is drawn that the policy does not read."""
    specs = demonstration_episodes(config.seed, episodes, config.eval.recorded_states)
    with session.farm(trials_farm(config, session, specs, range(episodes)), workers=1) as farm:
        sizes = policy_spec(config, farm.infos[0])
        reach = session.reach(farm)
        worker = session.runtime.start("evaluator", make_evaluator, config, sizes, reach, folder, disturb)
        deadline_s = worker.deadline.inner().seconds
        with steps(f"Running {config.policy.kind} on {config.env.task}", episodes) as bar:
            results = run_to_end(
                lambda budget_s: worker.call(Evaluator.advance, budget_s, deadline_s), episodes, bar.advance
            )
        worker.end()
    return results


def _write(
    writer: DatasetWriter,
    replayers: Sequence[Handle[Replayer]],
    results: Sequence[EpisodeResult],
    instructions: Sequence[str],
) -> int:
    """Replay, draw and write the episodes. An episode with another outcome than before is left out. Returns the number
    of these."""
    not_reproduced = 0
    with steps("Recording", len(results)) as bar:
        for result, replay in in_order(replayers, results, _begin_replay):
            if (replay.steps, bool(replay.success.any())) == (result.length, bool(result.success)):
                if result.decided is not None:
                    replay = replace(replay, actions=result.decided)
                if instructions:
                    replay = replace(replay, instruction=instructions[result.trial % len(instructions)])
                writer.add(result.spec, replay)
            else:
                not_reproduced += 1
            bar.advance()
    writer.close()
    return not_reproduced


def _begin_replay(replayer: Handle[Replayer], result: EpisodeResult) -> ReplayedEpisode:
    return replayer.submit(Replayer.replay, result.spec, result.actions)
