"""Real Ray nodes on the loopback interface, which stand for machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from embodied.execution.assignment import Assignment, configured
from embodied.planning import run_plans
from embodied.runtime.api import NodeInfo
from embodied.runtime.ray.far_physics import FarHost
from embodied.runtime.ray.local_ray import AUTHENTICATION
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.run_spec import RunSpec

ROOT = Path(__file__).resolve().parents[3]

CLUSTER = """
import json, os, sys
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # so that nothing listens but on the loopback interface
from ray.cluster_utils import Cluster
small = {"node_ip_address": "127.0.0.1", "num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}
quick = {"initial_delay_ms": 500, "period_ms": 500, "timeout_ms": 3000, "failure_threshold": 4}
quick = {f"health_check_{name}": value for name, value in quick.items()} if sys.argv[1] == "quick" else {}
head = {"include_dashboard": False, "include_log_monitor": False, "node_name": sys.argv[2], "_system_config": quick}
cluster = Cluster(initialize_head=True, head_node_args={**small, **head})
settings = json.loads(os.environ.pop("OTHERS"))
others = {name: cluster.add_node(**small, node_name=name, env_vars=settings) for name in sys.argv[3:]}
raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in others.items()}
print(json.dumps([cluster.address, raylets]), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclass(frozen=True)
class Machines:
    address: str
    raylets: dict[str, int]
    """Process ids, by the node's name."""
    runtime: RayRuntime

    def node(self, name: str) -> NodeInfo:
        return next(node for node in self.runtime.nodes() if node.name == name)

    def host(self, far: int = 2) -> FarHost:
        """The first so many physics workers on the other node."""
        return self.runtime.far_host((self.node("far").id,) * far)

    def place_physics(self, patch: pytest.MonkeyPatch, *names: str) -> None:
        """Runs without a plan have their physics workers on these nodes in turn."""
        nodes = [self.node(name).id for name in names]

        def placed(run: RunSpec, cores: tuple[int, ...], known: Mapping[str, str] | None = None) -> Assignment:
            found = configured(run, cores, known)
            count = len(found.farms[0].physics)
            homes = tuple(nodes[i % len(nodes)] for i in range(count))
            return replace(found, farms=(replace(found.farms[0], physics=(None,) * count, physics_nodes=homes),))

        patch.setattr(run_plans, "configured", placed)


@contextmanager
def started(*names: str, patient: bool = False, settings: Mapping[str, str] | None = None) -> Iterator[Machines]:
    """Nodes of these names, the first of which is this process's; nothing of them is left afterwards. A node that is
    lost is noticed within seconds, unless one is `patient`, as many workers on few cores need it. `settings` are
    environment variables of the other nodes."""
    # The token of the shared Ray, which ends before this process joins the nodes, is not theirs.
    environment = {name: value for name, value in os.environ.items() if name not in AUTHENTICATION}
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it becomes part of the sockets' names
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, "patient" if patient else "quick", *names],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**environment, "RAY_TMPDIR": folder, "OTHERS": json.dumps(dict(settings or {}))}, cwd=ROOT,
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the cluster did not start"
        address, raylets = json.loads(line)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        runtime = RayRuntime(address, 600.0 if patient else 240.0)
        try:
            yield Machines(address, raylets, runtime)
            family = [*family, *psutil.Process(process.pid).children(recursive=True)]
        finally:
            runtime.close()
    finally:
        try:
            process.communicate("", timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
        for member in family:
            if member.is_running():
                member.kill()
        _, alive = psutil.wait_procs(family, timeout=240)
        shutil.rmtree(folder, ignore_errors=True)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
