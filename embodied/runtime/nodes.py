"""The machines of a Ray cluster: what they have, and whether they run the same software."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import sim_farm
from sim_farm.contract import FarmError

DECIDING = ("numpy", "torch", "mujoco", "robosuite", "hf-libero", "sapien", "mani-skill")
"""Packages on whose version it depends what a physics step yields."""


@dataclass(frozen=True)
class NodeInfo:
    """One machine of the cluster, as Ray knows it."""

    id: str
    """Ray's name for it: hexadecimal, new with every start."""
    name: str
    """What `ray start --node-name` said, or else the host's name."""
    address: str
    cores: int
    """What Ray may give to workers there; here, what this process may use."""
    accelerators: int
    memory_bytes: int
    """What Ray may give to workers: the machine's memory less the object store."""
    is_here: bool
    """Whether it is the client's node: that of this process, where policy, learner and pictures are made."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address}, {self.id[:8]})"

    @classmethod
    def of(cls, entry: Mapping[str, Any], here: str) -> NodeInfo:
        """From an entry of `ray.nodes()`; `here` is the id of the client's node."""
        resources = entry["Resources"]
        address = entry["NodeManagerAddress"]
        given, is_here = entry["NodeName"], entry["NodeID"] == here
        return cls(
            id=entry["NodeID"],
            name=given if given not in ("", address) else entry["NodeManagerHostname"],
            address=address,
            cores=len(os.sched_getaffinity(0)) if is_here else int(resources.get("CPU", 0)),
            accelerators=int(resources.get("GPU", 0)),
            memory_bytes=int(resources.get("memory", 0)),
            is_here=is_here,
        )


@dataclass(frozen=True)
class Link:
    """Between two machines, as a relay would use it."""

    message_s: float
    """For a small message, one way."""
    bytes_per_s: float
    """Of longer ones, beyond that."""


@cache
def software() -> dict[str, str]:
    """What decides the trajectories of this machine's simulators, by name: versions, and a digest of `sim_farm`."""
    versions = {"python": platform.python_version()}
    for package in DECIDING:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {**versions, "sim_farm": _digest(Path(sim_farm.__file__).parent)}


def require_software(expected: Mapping[str, str]) -> None:
    """Raise `FarmError` naming this machine and each difference, if its software is not the `expected`."""
    mine = software()
    wrong = [f"{name} {mine.get(name)} instead of {value}" for name, value in expected.items() if mine[name] != value]
    if wrong:
        raise FarmError(
            f"{socket.gethostname()} has {', '.join(wrong)}: the same trajectories need the same software on every "
            "machine; install there what the machine has where training was started"
        )


def _digest(folder: Path) -> str:
    """Twelve hexadecimal digits of the folder's sources."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.suffix in (".py", ".xml"):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]
