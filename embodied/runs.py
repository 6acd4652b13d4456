"""Runs as folders: what `train`, `eval` and `report` do from beginning to end."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rich import print as show

from embodied import checkpoint, training
from embodied.config import Config, UserError, load_config, parse_config
from embodied.evaluation import EpisodeResult, Evaluator, run_to_end, summarise
from embodied.reporting.live import steps
from embodied.reporting.report import write_report
from embodied.reporting.run_folder import ReportError
from embodied.reporting.video import EpisodeFrames, write_tiled
from embodied.session import Session, open_session
from embodied.workers import farm_spec, make_evaluator, policy_spec, task_spec
from policies.contract import PolicySpec
from sim_farm.contract import TaskSpec
from sim_farm.episodes import ListedEpisodes, evaluation_episodes
from sim_farm.replay import Projector

FILM_SIZE = 256
FILM_FRAMES = 60
"""Frames of a filmed episode, about; longer episodes are filmed every second, third, ... step."""


def settings_of(run: str, runs_dir: Path) -> Config:
    """The configuration of a run's folder, or, where there is no such run, of a configuration called so."""
    folder = find_run(run, runs_dir)
    if folder is None:
        try:
            return load_config(run)
        except UserError as error:
            raise UserError(f"no run {run!r} here or below {runs_dir}/, and {error}") from error
    path = folder / "config.yaml"
    return parse_config(yaml.safe_load(path.read_text()), str(path))


def find_run(run: str, runs_dir: Path) -> Path | None:
    """The run's folder: `run` itself, or below `runs_dir`. None if neither holds a run."""
    for folder in (Path(run), runs_dir / run):
        if (folder / "config.yaml").is_file():
            return folder
    return None


def train_run(config: Config, source: str, runs_dir: Path, resume: bool) -> dict[str, Any]:
    """Train, evaluate, film, report. Returns the result as plain data."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    if resume and config.name is None:
        raise UserError("--resume auto goes on with a run that has a name; say which with --name")
    name = config.name or f"{Path(source).stem}-{stamp}"
    run_dir = runs_dir / name
    found = training.prepare_run(config, run_dir, resume)
    show(f"[bold]{run_dir}[/]: {config.policy.kind} on {config.env.task}", flush=True)
    try:
        return _train_and_evaluate(config, run_dir, found)
    finally:
        # A run that failed before its first iteration leaves nothing worth a name.
        if not training.has_content(run_dir):
            shutil.rmtree(run_dir, ignore_errors=True)


def _train_and_evaluate(config: Config, run_dir: Path, found: Path | None) -> dict[str, Any]:
    with open_session(config) as session:
        result = training.train(config, run_dir, session, found)
        evaluated = _evaluate(config, run_dir, session, checkpoint.latest(run_dir / "checkpoints"))
        result = {**evaluated, "eval_wall_s": evaluated["wall_s"], **result}
    result["report"] = str(write_report(run_dir))
    show(f"report: [bold]{result['report']}[/]")
    return result


def evaluate_run(run: str, config: Config, folder: Path | None, runs_dir: Path) -> dict[str, Any]:
    """Evaluate a checkpoint with the protocol of the configuration; results and films go into the run's folder."""
    run_dir = find_run(run, runs_dir)
    if folder is None and run_dir is not None:
        folder = checkpoint.latest(run_dir / "checkpoints")
        if folder is None:
            raise UserError(f"{run_dir} has no checkpoint yet; train it first, or name one with --checkpoint")
    if folder is None:
        raise UserError(f"{run!r} is a configuration, not a run: name the checkpoint to evaluate with --checkpoint")
    checkpoint.verify(folder)
    with open_session(config) as session:
        return _evaluate(config, run_dir, session, folder)


def report_run(run: str, runs_dir: Path) -> dict[str, Any]:
    """Write the page of a run."""
    folder = find_run(run, runs_dir)
    if folder is None:
        raise UserError(f"no run {run!r}: neither {run}/config.yaml nor {runs_dir / run}/config.yaml exists")
    try:
        path = write_report(folder)
    except ReportError as error:
        raise UserError(str(error)) from error
    show(f"report: [bold]{path}[/]")
    return {"run": str(folder), "report": str(path)}


def _evaluate(config: Config, run_dir: Path | None, session: Session, folder: Path | None) -> dict[str, Any]:
    """Run the protocol, show the result, and keep it with the films in `run_dir`."""
    begin = time.monotonic()
    protocol = config.eval
    listed = evaluation_episodes(config.seed, protocol.episodes)
    num_envs = protocol.num_envs or config.env.num_envs
    spec = farm_spec(config, ListedEpisodes(listed, num_envs), len(session.cores), num_envs)
    with session.farm(spec) as farm:
        sizes: PolicySpec = policy_spec(config, farm.info)
        limit = farm.info.max_episode_steps
        worker = session.runtime.place("evaluator", make_evaluator, config, sizes, session.reach(farm), folder)
        deadline_s = config.runtime.deadline_s
        with steps(f"Evaluating {config.env.task}", protocol.episodes) as bar:
            results = run_to_end(
                lambda budget_s: worker.call(Evaluator.advance, budget_s, deadline_s), protocol.episodes, bar.advance
            )
        worker.end()
    summary: dict[str, Any] = {
        "task": config.env.task,
        **summarise(results),
        "wall_s": time.monotonic() - begin,
        "checkpoint": str(folder),
        "protocol": {
            "episodes": protocol.episodes,
            "seeds": f"stream of evaluation seeds of run seed {config.seed}",
            "max_episode_steps": limit,
            "chunk": config.policy.chunk,
            "sampling": "greedy" if protocol.greedy else "sampled",
            "success": "solved at any env step",
            "interval": "95% Wilson",
            "hardware": hardware(),
        },
    }
    show(
        f"{config.env.task}: success [bold]{summary['success_rate']:.3f}[/] "
        f"(95% interval {summary['success_low']:.3f} to {summary['success_high']:.3f}, {len(results)} episodes, "
        f"{summary['protocol']['sampling']})"
    )
    if run_dir is not None:
        (run_dir / "eval.json").write_text(json.dumps(summary, indent=1) + "\n")
        if protocol.videos:
            _film(config, run_dir, session, _worth_seeing(results, protocol.videos))
    return summary


def hardware() -> str:
    """What the figures were measured on, in a line."""
    model = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{model}, {len(os.sched_getaffinity(0))} cores, {gpu}"


def _worth_seeing(results: Sequence[EpisodeResult], count: int) -> list[EpisodeResult]:
    """Failures first, then successes, each in the order of trials."""
    return sorted(results, key=lambda result: (result.success, result.trial))[:count]


def _film(config: Config, run_dir: Path, session: Session, episodes: Sequence[EpisodeResult]) -> None:
    """Replay the episodes and tile them into one video; the work is dealt out to as many projectors as cores."""
    task = task_spec(config)
    film = TaskSpec(task.name, task.control_mode, task.reward, task.max_episode_steps, 1, FILM_SIZE)
    count = min(len(session.cores), len(episodes)) if config.runtime.mode == "ray" else 1
    session.runtime.prepare(count)
    with steps("Filming", len(episodes)) as bar:
        projectors = [session.runtime.place(f"projector {i}", Projector, film) for i in range(count)]
        frames: list[list[np.ndarray]] = []
        for start in range(0, len(episodes), count):
            batch = list(zip(projectors, episodes[start : start + count], strict=False))
            pending = [p.refer(Projector.film, e.spec, e.actions, max(1, e.length // FILM_FRAMES)) for p, e in batch]
            for (projector, _), reference in zip(batch, pending, strict=True):
                frames.append(projector.fetch(reference))
                bar.advance()
    tiles = [
        EpisodeFrames(config.env.task, film_frames, episode.success, f"episode {episode.trial}")
        for film_frames, episode in zip(frames, episodes, strict=True)
    ]
    (run_dir / "videos").mkdir(exist_ok=True)
    write_tiled(run_dir / "videos" / "evaluation.mp4", tiles, fps=15)
