"""A process that draws: `python -m benchmarks.gpu_stages.drawer TASK ...`. Stage `draw` starts some of them.

Says `ready` on a line when it has drawn once, waits for a line on standard input, draws for some seconds, and says how
many frames in how many seconds. A driver that crashes takes this process along, and no other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task")
    for name in ("cameras", "size", "scenes", "core", "seed"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True, help="a GPU's number, or cpu")
    parser.add_argument("--seconds", type=float, required=True)
    options = parser.parse_args()
    os.sched_setaffinity(0, {options.core})

    import numpy as np

    from sim_farm import EpisodeSpec, TaskSpec, make_physics, make_renderer, render_devices

    render_devices.ask(int(options.device) if options.device.isdecimal() else options.device)
    spec = TaskSpec(options.task, cameras=options.cameras, image_size=options.size)
    physics, random = make_physics(spec), np.random.default_rng(options.seed)
    scenes = [physics.reset(EpisodeSpec(options.seed)).scene]
    for _ in range(options.scenes - 1):
        actions = random.uniform(-1, 1, (2, physics.info.action_dim)).astype(np.float32)
        scenes.append(physics.step(actions).scene)
    renderer, cameras = make_renderer(spec), physics.info.cameras
    frames = renderer.render(scenes, cameras)
    flat = [name for name in cameras if np.ptp(frames[name]) == 0]
    if flat:
        raise RuntimeError(f"the pictures of {', '.join(flat)} are of one colour")
    print("ready", flush=True)
    sys.stdin.readline()
    begin, calls = time.perf_counter(), 0
    while time.perf_counter() - begin < options.seconds:
        renderer.render(scenes, cameras)
        calls += 1
    seconds = time.perf_counter() - begin
    print(json.dumps({"frames": calls * options.scenes * len(cameras), "seconds": seconds}), flush=True)
    # Not by way of the interpreter's end: drivers that are unloaded in the wrong order crash there.
    os._exit(0)


if __name__ == "__main__":
    main()
