"""Short runs of two checkouts of the project, compared bit for bit: parameters, optimiser state, files of a run.

    python -m tests.equal_runs --keep base.json                 # in the checkout before a change
    python -m tests.equal_runs --against base.json [ROW ...]    # in the checkout after it, on the same machine

Floats round by processor, so nothing is recorded in the repository: both checkouts run beside each other. Each row is a
command of `embodied train` or `embodied sft`, typed as a user would.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[1]
SMALL = "--iterations 2 --env.num-envs 4 --rollout.decisions 8 --eval.videos 0 --eval.episodes 2"
EPISODES = "--iterations 2 --env.num-envs 16 --eval.videos 0 --eval.episodes 2"
NAMED_BY_TIME = ("tensorboard", "evals/", "films/")
"""Files of a run whose names hold a time."""
INLINE, RAY = "--runtime.mode inline", "--runtime.mode ray"
DECISIONS = """cartpole pendulum pushcube pushcube_rgb reach reach_reward openvla_tiny openvla_tiny_kl openvla_oft_tiny
openvla_small openvla_small_lora openvla_oft_small openvla_oft_two_cubes pi0_small pi0_two_cubes pi0_goal_small
smolvla_small act_small diffusion_small libero_spatial_ppo countdown_ppo"""
EPISODE_GROUPS = """reach_grpo reach_grpo_kl openvla_oft_small_grpo openvla_oft_small_dapo openvla_oft_small_reinforce
act_small_grpo pi0_small_stepnft smolvla_two_cubes countdown_grpo countdown_dapo countdown_reinforce"""
ROWS = {
    **{f"{name} inline": f"train {name} {SMALL} {INLINE}" for name in DECISIONS.split()},
    **{f"{name} inline": f"train {name} {EPISODES} {INLINE}" for name in EPISODE_GROUPS.split()},
    **{f"{name} Ray": f"train {name} {SMALL} {RAY}" for name in ("reach", "pushcube", "openvla_tiny", "pi0_small")},
    **{f"{name} Ray": f"train {name} {EPISODES} {RAY}" for name in ("reach_grpo", "countdown_grpo")},
    "reach two ranks": f"train reach {SMALL} {RAY} --optim.ranks 2",
    "reach two replicas": f"train reach {SMALL} {RAY} --policy.replicas 2",
    "openvla_tiny two ranks": f"train openvla_tiny {SMALL} {RAY} --optim.ranks 2",
    "reach one step ahead": f"train reach {SMALL} {RAY} --iterations 4 --plan.mode disaggregated --plan.ahead",
    "openvla_small sft": f"sft openvla_small --data DEMOS --sft.steps 5 --sft.batch 16 {INLINE}",
    "pi0_small sft": f"sft pi0_small --data DEMOS --sft.steps 5 --sft.batch 16 {INLINE}",
}
"""The command of each row."""
DEMOS = f"record tabletop_scripted --episodes 6 {INLINE} --out"
"""The command that records what the supervised rows learn from; the same commands in both checkouts."""


def command(words: str, folder: Path, python: str) -> None:
    """Run `embodied WORDS` of this checkout in the folder. Raises `RuntimeError` with its output where it fails."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "extensions")]),
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
    run = [python, str(ROOT / "embodied_command.py"), *words.split()]
    code = f"import sys; sys.argv = {run[1:]!r}; from embodied_command import main; sys.exit(main())"
    ended = subprocess.run([python, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"embodied {words}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")


def digests(run: Path) -> dict[str, str]:
    """A hash of the tensors of each file of the newest checkpoint, and the names of the run's files."""
    newest = max(path for path in (run / "checkpoints").iterdir() if path.name.isdecimal())
    found = {}
    for path in sorted(newest.rglob("*.safetensors")):
        tensors, sha = load_file(path), hashlib.sha256()
        for name, tensor in sorted(tensors.items()):
            sha.update(name.encode() + tensor.contiguous().numpy().tobytes())
        found[str(path.relative_to(newest))] = sha.hexdigest()
    names = sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())
    return found | {"files": " ".join(name for name in names if not name.startswith(NAMED_BY_TIME))}


def results(rows: Iterable[str]) -> dict[str, dict[str, str]]:
    """The digests of each row's run."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if any(" sft" in row for row in rows):
            command(f"{DEMOS} {folder / 'demos'}", folder, sys.executable)
        for number, row in enumerate(rows):
            words = ROWS[row].replace("DEMOS", str(folder / "demos"))
            try:
                command(f"{words} --seed 3 --name row{number}", folder, sys.executable)
                found[row] = digests(folder / "runs" / f"row{number}")
            except RuntimeError as error:
                found[row] = {"failed": str(error)}
            print(f"{row}: {found[row].get('failed', 'done')}", flush=True)
    return found


def main() -> int:
    """Exit status 1 where a row differs from the kept one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", metavar="ROW", help=f"of {', '.join(ROWS)}; all by default")
    parser.add_argument("--keep", type=Path, help="write the digests to this file")
    parser.add_argument("--against", type=Path, help="compare with the digests of this file")
    given = parser.parse_args()
    found = results(given.rows or list(ROWS))
    if given.keep:
        given.keep.write_text(json.dumps(found, indent=1))
    if not given.against:
        return 0
    before, differ = json.loads(given.against.read_text()), 0
    for row, now in found.items():
        then = before.get(row, {})
        parts = sorted(key for key in now.keys() | then.keys() if now.get(key) != then.get(key) or key == "failed")
        print(f"{row}: {'equal' if not parts else 'DIFFERS in ' + ', '.join(parts)}")
        differ += bool(parts)
    return int(differ > 0)


if __name__ == "__main__":
    sys.exit(main())
