"""`embodied bench farm`: the farm's env steps per second, beside its peer and its limit, in the same run."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from embodied.config.schema import Config
from embodied.execution.session import open_session
from embodied.reporting.live import steps
from embodied_bench.farm_peers import Kind, LoopProcess, LoopSpec, VectorEnv, peers_of
from embodied_bench.settings import BenchFarm, provenance
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec

ROUNDS = 3
TOGETHER = "limit together"
"""Bare loops on all cores at once, over as many environments as the farm has."""
ALONE = "farms of one process"
"""Such a farm on each core at once, with as many environments together: slots and client, but without waiting."""


def bench_farm(bench: BenchFarm) -> dict[str, Any]:
    """Measure farm, peers and limit in turn, three rounds of each; medians count.

    What the farm is compared with is started where it is measured, and ends with it: all of it together would not fit
    into the memory of a small machine, where a process that draws LIBERO takes 1.3 GB.
    """
    config = Config()
    with open_session(config) as session, contextlib.ExitStack() as stack:
        cores = session.cores
        task = TaskSpec(bench.task, cameras=bench.cameras, image_size=bench.size)
        spec = FarmSpec(
            task,
            EndlessEpisodes(0),
            bench.num_envs,
            bench.chunk,
            bench.groups,
            physics_workers=len(cores),
            render_workers=bench.render_workers,
            final_frames="never",
        )
        farm = stack.enter_context(session.farm(spec))
        loops, driver = _loops(bench, cores), _Driver(farm)
        rates: dict[str, list[float]] = {"farm": [], **{name: [] for name in loops}}
        with steps("Measuring", ROUNDS * len(rates)) as bar:
            for _ in range(ROUNDS):
                session.runtime.watch()
                rates["farm"].append(driver.measure(bench.seconds))
                bar.advance()
                for name, members in loops.items():
                    rates[name].append(_together(members, bench.seconds))
                    bar.advance()
        result = _result(bench, rates, len(cores))
    _show(rates, result)
    return result


def _loops(bench: BenchFarm, cores: tuple[int, ...]) -> dict[str, tuple[LoopSpec, ...]]:
    """The loops that the farm is compared with; those of one name run at once, and their rates add up."""
    shape = (bench.task, bench.cameras, bench.size, bench.chunk)
    found: dict[str, tuple[LoopSpec, ...]] = {
        name: (LoopSpec(kind, *shape, envs, cores),) for name, (kind, envs) in compared_loops(bench).items()
    }
    # Cores share memory bandwidth, and several environments share a core's caches: this is what the hardware has.
    each = bench.num_envs // len(cores)
    shared: tuple[tuple[str, Kind], ...] = ((TOGETHER, "bare"), (ALONE, "farm"))
    return found | {name: tuple(LoopSpec(kind, *shape, each, (core,)) for core in cores) for name, kind in shared}


def _together(specs: tuple[LoopSpec, ...], seconds: float) -> float:
    """Env steps per second of new loops, which are measured at the same time."""
    with contextlib.ExitStack() as stack:
        members = [LoopProcess(spec) for spec in specs]
        for member in members:
            stack.callback(member.close)
        for member in members:
            member.wait_ready()
        for member in members:
            member.start(seconds)
        return sum(member.finish() for member in members)


def compared_loops(bench: BenchFarm) -> dict[str, tuple[Kind, int]]:
    """Loops that the farm is compared with: kind and number of environments of each."""
    loops: dict[str, tuple[Kind, int]] = {"limit": ("bare", 1)}
    if peers_of(bench.task) is not None:
        loops["stock"] = ("stock", 1)
    return loops | {peer.name: (peer.kind, peer.num_envs) for peer in _vector_envs(bench)}


def _vector_envs(bench: BenchFarm) -> tuple[VectorEnv, ...]:
    peers = peers_of(bench.task)
    return peers.vector_envs if peers is not None and bench.peer else ()


class _Driver:
    """Random actions, as fast as the farm takes them."""

    def __init__(self, farm: Farm) -> None:
        self._farm = farm
        envs, dims = len(farm.envs_of(0)), farm.infos[0].action_dim
        shape = (64, envs, farm.specs[0].chunk, dims)
        self._actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
        self._turn = 0
        for group in range(farm.specs[0].groups):
            farm.reset(group)

    def measure(self, seconds: float) -> float:
        self._run(0.5)
        return self._run(seconds)

    def _run(self, seconds: float) -> float:
        done, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            for group in range(self._farm.specs[0].groups):
                done += int(self._farm.collect(group).steps.sum())
                self._farm.submit(group, self._actions[self._turn % len(self._actions)])
                self._turn += 1
        return done / (time.perf_counter() - begin)


def _result(bench: BenchFarm, rates: dict[str, list[float]], cores: int) -> dict[str, Any]:
    median = {name: float(np.median(values)) for name, values in rates.items()}
    result: dict[str, Any] = provenance() | {
        "task": bench.task,
        "cameras": bench.cameras,
        "size": bench.size,
        "chunk": bench.chunk,
        "num_envs": bench.num_envs,
        "render_workers": bench.render_workers,
        "cores": cores,
        "env_steps_per_s": median["farm"],
        "limit_env_steps_per_s": median["limit"] * cores,
        "share_of_limit": median["farm"] / (median["limit"] * cores),
        "limit_together_env_steps_per_s": median[TOGETHER],
        "share_of_limit_together": median["farm"] / median[TOGETHER],
        "env_step_s": _parts(median, cores),
        "rates": rates,
    }
    if "stock" in median:
        result["stock_limit_env_steps_per_s"] = median["stock"] * cores
        result["share_of_stock_limit"] = median["farm"] / (median["stock"] * cores)
    peers = {peer.name: median[peer.name] for peer in _vector_envs(bench)}
    if peers:
        best = max(peers, key=peers.__getitem__)
        result |= {"peer": best, "peer_env_steps_per_s": peers[best], "ratio_to_peer": median["farm"] / peers[best]}
    return result


def _parts(median: dict[str, float], cores: int) -> dict[str, float]:
    """Seconds of a core for each env step, and what they go to. The parts add up to the whole."""
    whole, alone, bare = (cores / median[name] for name in ("farm", ALONE, TOGETHER))
    return {"whole": whole, "simulation": bare, "slots_and_client": alone - bare, "processes": whole - alone}


def _show(rates: dict[str, list[float]], result: dict[str, Any]) -> None:
    table = Table(title=f"{result['task']}, {result['cameras']} cameras, chunk {result['chunk']}")
    for column in ("", "env steps/s", "min", "max", "farm is"):
        table.add_column(column, justify="right" if column else "left")
    names = {
        "farm": "farm",
        "limit": f"bare loop x {result['cores']} cores (limit)",
        TOGETHER: f"bare loops on {result['cores']} cores at once, as many environments",
        ALONE: f"farms of one process on {result['cores']} cores at once, as many environments",
        "stock": f"the simulator's own step x {result['cores']} cores",
    }
    for name, values in rates.items():
        scale = result["cores"] if name in ("limit", "stock") else 1
        low, mid, high = (scale * float(f(values)) for f in (np.min, np.median, np.max))
        ratio = "" if name == "farm" else f"{result['env_steps_per_s'] / mid:.2f} x"
        label = names.get(name, f"{name} environments, pinned")
        table.add_row(label, f"{mid:,.0f}", f"{low:,.0f}", f"{high:,.0f}", ratio)
    Console().print(table)
    whole, simulation, own, processes = (f"{1e6 * seconds:,.0f}" for seconds in result["env_step_s"].values())
    Console().print(
        f"Of an env step's {whole} us on a core the simulator takes {simulation}, the farm's own work (slots, client) "
        f"{own}, and that processes share cores and wait for each other {processes}.",
        soft_wrap=True,
    )
