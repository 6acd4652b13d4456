"""The benchmarks run and say what they measured. Their figures are in `benchmarks/`; no test asserts on time."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from embodied_bench.farm import compared_loops
from embodied_bench.settings import BenchFarm

COMMAND = Path(sys.executable).parent / "embodied"


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = tmp_path / "result.json"
    done = subprocess.run(
        [str(COMMAND), "bench", *arguments, "--json", str(result)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(result.read_text())
    assert found["command"] == " ".join(["embodied", "bench", *arguments, "--json", str(result)])
    assert date.fromisoformat(found["date"]) and "cores" in found["hardware"]
    return found


@pytest.mark.slow
def test_bench_farm_measures_farm_and_limit_in_the_same_run(tmp_path: Path) -> None:
    sizes = ["--cameras", "1", "--size", "32", "--chunk", "2", "--num-envs", "4", "--seconds", "0.3"]
    found = bench(tmp_path, "farm", "--task", "tabletop/reach", *sizes)
    assert found["env_steps_per_s"] > 0 and found["limit_env_steps_per_s"] > 0
    assert abs(found["share_of_limit"] - found["env_steps_per_s"] / found["limit_env_steps_per_s"]) < 1e-9
    assert all(len(rounds) == 3 for rounds in found["rates"].values())
    whole, *parts = found["env_step_s"].values()
    assert whole == pytest.approx(sum(parts)) == pytest.approx(found["cores"] / found["env_steps_per_s"])


@pytest.mark.parametrize(
    ("task", "peer", "names"),
    [
        ("tabletop/reach", True, ["limit"]),
        ("maniskill/PushCube-v1", True, ["limit", "stock", "AsyncVectorEnv 2", "AsyncVectorEnv 8"]),
        ("libero/libero_goal/0", True, ["limit", "stock", "AsyncVectorEnv 2", "SubprocVectorEnv 2"]),
        ("libero/libero_goal/0", False, ["limit", "stock"]),
    ],
)
def test_the_farm_is_compared_with_what_the_simulators_users_run(task: str, peer: bool, names: list[str]) -> None:
    assert list(compared_loops(BenchFarm(task, peer=peer))) == names


@pytest.mark.slow
def test_bench_transport_measures_every_way(tmp_path: Path) -> None:
    found = bench(tmp_path, "transport", "--size", "64", "--messages", "100")
    assert set(found["transports"]) == {"slots", "pipe", "queue", "ray", "memcpy"}
    for transport in found["transports"].values():
        assert 0 < transport["latency_s"] <= transport["latency_p95_s"] and transport["bytes_per_s"] > 0
    assert found["bytes"] == 2 * 64 * 64 * 3
