"""What a run imports before its first iteration."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_run_imports_no_compiler_and_no_charts_before_its_first_iteration(tmp_path: Path) -> None:
    """Each takes half a second or more, and nothing needs it yet; Ray is of runs that are not inline."""
    code = f"""
import sys
from pathlib import Path
from embodied.commands.train import train_run
from embodied.config.files import parse_config

class Seen(Exception):
    pass

def look(end):
    late = {{"matplotlib", "scipy.stats", "torch._dynamo", "sympy", "ray", "mani_skill", "transformers"}}
    print("EARLY", sorted(late & sys.modules.keys()))
    raise Seen

config = parse_config({{
    "iterations": 1, "name": "run", "runtime": {{"mode": "inline"}}, "rollout": {{"decisions": 4}},
    "env": {{"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 4}},
}}, "test")
try:
    train_run(config, "test", Path({str(tmp_path)!r}), False, [look])
except Seen:
    print("SEEN")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert "EARLY []" in done.stdout and "SEEN" in done.stdout, done.stdout + done.stderr
