"""The files of a run that never was: curves and spans of the shape that training gives."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np

from embodied.evaluation.films import EpisodeFrames, write_tiled
from embodied.reporting.metrics import MetricsWriter
from embodied.run.trace import Span, TraceWriter

MS = 1_000_000
STAGES, CHUNKS = 2, 12

CONFIG = """\
name: tabletop_reach
stop_at: 0.8
env: {task: tabletop/reach, cameras: 1, image_size: 64}
policy: {kind: small_cnn, reads: [images], options: {note: "<script>alert('no')</script> & more"}}
ppo: {gamma: 0.99, clip_low: 0.2}
"""

EVALUATION = {
    "task": "tabletop/reach <b>",
    "episodes": 200,
    "success_rate": 0.945,
    "success_low": 0.904,
    "success_high": 0.969,
    "episode_len": 41.7,
    "return": 0.93,
    "wall_s": 73.0,
    "protocol": {
        "task_set": "tabletop/reach",
        "episodes": 200,
        "maximum_steps": 100,
        "seeds": "0 to 199",
        "sampling": "greedy",
        "hardware": "2 CPU cores, no GPU",
        "command": "embodied eval runs/tabletop_reach",
    },
}


def metrics_row(iteration: int, rng: random.Random) -> dict[str, float]:
    success = 1 / (1 + math.exp(-(iteration - 17) / 4))
    noise = rng.gauss(0, 0.03)
    shares = {"physics": 0.34, "render": 0.2, "policy": 0.17, "learner": 0.19, "transport": 0.03}
    shares = {name: share * rng.uniform(0.85, 1.1) for name, share in shares.items()}
    return {
        "wall_s": 9.5 * iteration + rng.random(),
        "env/success_once": min(max(success * 0.97 + noise, 0.0), 1.0),
        "env/success_recent": success * 0.97,
        "env/return": success * 0.9 + noise,
        "env/episode_len": 100 - 60 * success + 40 * noise,
        "env/episodes": 80,
        "learner/approx_kl": 0.01 * rng.uniform(0.5, 1.5),
        "learner/clip_fraction": 0.12 * rng.uniform(0.7, 1.3),
        "learner/entropy": 1.2 - 0.5 * success + noise,
        "learner/explained_variance": success * 0.9,
        "learner/policy_loss": -0.02 + noise / 10,
        "learner/value_loss": 0.4 * math.exp(-iteration / 12) + 0.01,
        "learner/grad_norm": math.nan if iteration == 8 else 0.5 + abs(noise) * 5,
        "farm/env_steps_per_s": 431 + 400 * noise,
        **{f"time/{name}": share for name, share in shares.items()},
        "time/idle": max(0.0, 1 - sum(shares.values())),
    }


def iteration_spans(begin_ns: int, iteration: int = 0) -> list[Span]:
    """Two stages that take turns: physics, render, policy, and back to physics; then the learner."""
    spans: list[Span] = []
    busy = {track: begin_ns for track in ("physics 0", "physics 1", "render 0", "policy")}
    ready = [begin_ns] * STAGES
    flow = iteration * 10_000
    acted: list[int | None] = [None] * STAGES
    for chunk in range(CHUNKS):
        for stage in range(STAGES):
            came_from: int | None = acted[stage]
            work = ((f"physics {stage}", "step", 21), ("render 0", "render", 9), ("policy", "act", 11))
            for track, name, length_ms in work:
                start_ns = max(busy[track], ready[stage])
                end_ns = start_ns + length_ms * MS
                flow += 1
                came = () if came_from is None else (came_from,)
                args = {"stage": stage, "chunk": chunk}
                spans.append(Span(track, name, start_ns, end_ns, args, flow_from=came, flow_to=(flow,)))
                came_from = flow
                busy[track] = ready[stage] = end_ns
            acted[stage] = came_from
    begin_update = max(busy.values()) + 2 * MS
    spans.append(Span("driver", "transport", begin_update - 2 * MS, begin_update))
    spans += [
        Span("learner", f"epoch {i}", begin_update + i * 60 * MS, begin_update + (i * 60 + 58) * MS) for i in range(4)
    ]
    return spans


def write_trace(path: Path, iterations: int = 40) -> TraceWriter:
    writer = TraceWriter(path)
    begin_ns = 1_000_000 * MS
    for index in range(iterations):
        writer.iteration(index, at_ns=begin_ns)
        spans = iteration_spans(begin_ns, index)
        writer.add(spans)
        begin_ns = max(span.end_ns for span in spans) + MS
    writer.write()
    return writer


def episode(frames: int, success: bool, label: str, side: int = 64) -> EpisodeFrames:
    """A square that wanders over a coloured ground."""
    ground = np.mgrid[:side, :side].transpose(1, 2, 0)
    pictures = []
    for t in range(frames):
        picture = np.full((side, side, 3), 90, np.uint8)
        picture[..., :2] = ground * 255 // side
        at = 4 + (side - 12) * t // frames
        picture[at : at + 8, at : at + 8] = 255
        pictures.append(picture)
    return EpisodeFrames("reach the red ball", pictures, success, label)


def write_run(path: Path, iterations: int = 40) -> Path:
    rng = random.Random(3)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(CONFIG)
    (path / "eval.json").write_text(json.dumps(EVALUATION))
    with MetricsWriter(path) as writer:
        for iteration in range(1, iterations + 1):
            writer.write(iteration, 4096 * iteration, metrics_row(iteration, rng))
    write_trace(path / "trace.json", iterations)
    episodes = [episode(12 + n, n % 3 > 0, f"seed {n}") for n in range(6)]
    write_tiled(path / "videos" / "failures_first.mp4", episodes, fps=10)
    return path
