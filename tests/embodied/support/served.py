"""Policies served in this process, on real sockets, for the tests of both ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

import policies
from embodied.config.files import parse_config
from embodied.rollout.loaded_policy import LoadedPolicy
from embodied.rollout.policy_server import PolicyServer, bind
from policies.contract import PolicySpec


@contextmanager
def serving(loaded: LoadedPolicy, **how: Any) -> Iterator[tuple[str, PolicyServer]]:
    """Address and server, which a thread of this process runs."""
    server, bound = PolicyServer(loaded, **how), bind("127.0.0.1", 0)
    loop, stop, started = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
    running = threading.Thread(target=lambda: loop.run_until_complete(server.run(bound, stop, started.set)))
    running.start()
    try:
        assert started.wait(120)
        yield f"ws://127.0.0.1:{bound.getsockname()[1]}", server
    finally:
        loop.call_soon_threadsafe(stop.set)
        running.join()
        loop.close()


def small_policy(chunk: int = 3, **more: Any) -> LoadedPolicy:
    """A flow policy with an untrained network that reads two pictures and eight numbers, and gives seven; with `more`
    options."""
    reads = ["images", "proprio"]
    options = {"encoder": "cnn", **more}
    config = parse_config({"policy": {"kind": "flow", "reads": reads, "chunk": chunk, "options": options}}, "test")
    spec = PolicySpec(action_dim=7, chunk=chunk, proprio_dim=8, cameras=("base", "wrist"), image_size=32)
    return LoadedPolicy(policies.build("flow", spec, 3, **options), config, None)


def observations(count: int) -> list[dict[str, Any]]:
    """As openpi's LIBERO client sends them, but for the size of the pictures."""
    random = np.random.default_rng(count)
    return [
        {
            "observation/image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "observation/wrist_image": random.integers(0, 256, (32, 32, 3), np.uint8),
            "observation/state": random.standard_normal(8),
            "prompt": "do something",
        }
        for _ in range(count)
    ]


def acted(loaded: LoadedPolicy, observation: Mapping[str, Any]) -> np.ndarray:
    """What `act` decides for such an observation."""
    pictures = {"base": observation["observation/image"], "wrist": observation["observation/wrist_image"]}
    with torch.no_grad():
        return loaded.act({"images": pictures, "proprio": observation["observation/state"]})
