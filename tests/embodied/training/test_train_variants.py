"""`embodied train --seeds` and `--sweep`: each run is what it would be by itself, and mistakes cost no minutes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from embodied.commands.train import variants
from embodied.config.files import parse_config
from embodied.errors import UserError
from tests.embodied.commands.test_cli import here, refusal_here

SHORT = ["--runtime.mode", "inline", "--farm.groups", "1", "--iterations", "2", "--rollout.decisions", "16"]
SHORT += ["--eval.episodes", "4", "--eval.videos", "0", "--env.num-envs", "4"]


@pytest.mark.slow
def test_each_run_of_seeds_is_the_run_of_that_seed(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    status, output = here(
        "train", "reach", "--name", "r", "--seeds", "3", "5", "--runs-dir", str(tmp_path), "--json", str(out), *SHORT
    )
    assert status == 0, output
    status, output = here("train", "reach", "--name", "alone", "--seed", "5", "--runs-dir", str(tmp_path), *SHORT)
    assert status == 0, output
    weights = "checkpoints/000002/policy/model.safetensors"
    several, alone, other = (load_file(tmp_path / name / weights) for name in ("r-seed5", "alone", "r-seed3"))
    assert all((several[name] == alone[name]).all() for name in alone)
    assert any((several[name] != other[name]).any() for name in alone)
    result = json.loads(out.read_text())
    assert [run["run"] for run in result["runs"]] == [str(tmp_path / f"r-seed{seed}") for seed in (3, 5)]
    (group,) = result["groups"]
    assert group["seeds"] == [3, 5] and group["success_rates"] == [run["success_rate"] for run in result["runs"]]
    assert (tmp_path / "r.html").is_file() and "r.html" in output or Path(result["report"]) == tmp_path / "r.html"


def test_a_sweep_has_each_combination_of_values_and_seeds() -> None:
    config = parse_config({"name": "n"}, "test")
    found = variants(config, "reach", [1, 2], ["optim.policy-lr=0.0001, 3.0e-4", "loss.clip=0.1"])
    assert [(one.name, one.seed, one.optim.policy_lr, one.loss.clip) for one in found] == [
        (f"n-policy_lr{lr}-clip0.1-seed{seed}", seed, lr, 0.1) for lr in (1e-4, 3e-4) for seed in (1, 2)
    ]
    (one,) = variants(config, "reach", [], ["advantage.keep_rates=[0.1, 0.9]"])
    assert one.advantage.keep_rates == (0.1, 0.9) and "/" not in (one.name or "") and " " not in (one.name or "")
    (only,) = variants(parse_config({"seed": 4}, "test"), "configs/reach.yaml", [], ["advantage.bootstrap=always"])
    assert (only.name, only.seed, only.advantage.bootstrap) == ("reach-bootstrapalways-seed4", 4, "always")


@pytest.mark.parametrize(
    ("seeds", "sweep", "says"),
    [
        ((1, 1), (), "named once"),
        ((), ("loss.clip=0.1", "loss.clip=0.2"), "named once"),
        ((), ("loss.clip",), "KEY=VALUE,VALUE"),
        ((), ("loss.clp=1",), "unknown key 'loss.clp'; did you mean loss.clip"),
        ((), ("seed=1,2",), "--seeds 1 2 3 does"),
        ((), ("loss.clip=0.1,0.1",), "are the same"),
        ((), ("loss.clip=[0.1",), "no values with commas between"),
        ((), ("loss.clip=0.1,-3",), "loss.clip: .* greater than 0"),
    ],
)
def test_what_cannot_be_swept_is_refused(seeds: tuple[int, ...], sweep: tuple[str, ...], says: str) -> None:
    with pytest.raises(UserError, match=says):
        variants(parse_config({}, "test"), "reach", seeds, sweep)


def test_nothing_begins_where_one_of_the_runs_cannot(tmp_path: Path) -> None:
    (tmp_path / "r-seed2").mkdir()
    output = refusal_here("train", "reach", "--name", "r", "--seeds", "1", "2", "--runs-dir", str(tmp_path), *SHORT)
    assert "r-seed2 exists" in output and not (tmp_path / "r-seed1").exists()
    output = refusal_here(
        "train", "reach", "--name", "s", "--sweep", "env.num_envs=4,0", "--runs-dir", str(tmp_path), *SHORT
    )
    assert "env.num_envs" in output and not list(tmp_path.glob("s*"))
