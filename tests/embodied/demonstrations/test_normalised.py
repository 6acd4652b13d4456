"""Demonstrations beside the statistics that normalise them: what lies far outside is named, with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import policies
from embodied.commands.record import record_run
from embodied.config.files import load_config, parse_config, with_settings
from embodied.demonstrations.normalised import check_normalised
from embodied.errors import UserError
from embodied.training.sft import imitate
from embodied.workflows.run_spec import task_spec
from policies.capabilities import Normalised
from policies.contract import Inputs, PolicySpec
from policies.openvla.normalisation import Statistics
from sim_farm.workers.hosts import InProcess

CHECKPOINT = Path(__file__).parents[2] / "golden" / "pi05" / "checkpoint"
SETTINGS: dict[str, Any] = {
    "env": {"task": "tabletop/reach_red", "cameras": 1, "image_size": 32, "num_envs": 4, "max_episode_steps": 12},
    "policy": {"kind": "pi0", "chunk": 4, "reads": ["images", "instruction"]},
    "sft": {"steps": 1, "batch": 8},
    "runtime": {"mode": "inline"},
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    scene = {"env.task": "tabletop/reach_red", "env.cameras": 1, "env.image_size": 32, "runtime.mode": "inline"}
    script = with_settings(load_config("tabletop_scripted"), scene, "script")
    record_run("tabletop_scripted", script, None, folder / "demos", 3, False, folder)
    return folder / "demos"


def with_statistics(folder: Path, width: float) -> Path:
    """The tiny pi0.5 whose statistics of the second action have this width, around 0.3."""
    shutil.copytree(CHECKPOINT, folder)
    (path,) = folder.glob("**/norm_stats.json")
    data = json.loads(path.read_text())
    data["norm_stats"]["actions"]["q01"] = [-1.0, 0.3 - width / 2, -1.0]
    data["norm_stats"]["actions"]["q99"] = [1.0, 0.3 + width / 2, 1.0]
    path.write_text(json.dumps(data))
    return folder


def learn(checkpoint: Path, demos: Path, run_dir: Path, **sft: Any) -> dict[str, Any]:
    options = {
        "checkpoint": str(checkpoint),
        "steps": 2,
        "value_widths": [8],
        "normalisation": "quantile",
        **sft.pop("options", {}),
    }
    policy = {**SETTINGS["policy"], "options": options}
    data = {**SETTINGS, "policy": policy, "sft": {**SETTINGS["sft"], "data": [str(demos)], **sft}}
    config = parse_config(data, "test")
    return imitate(config, InProcess().describe(task_spec(config)), run_dir, None)


def test_a_dimension_of_no_width_is_refused_before_the_first_step(demos: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        learn(with_statistics(tmp_path / "narrow", 1e-3), demos, tmp_path / "run")
    said = str(caught.value)
    for part in (
        "action beside the statistics that normalise it (the checkpoint's own)",
        "dimension 1 is -1 to ",
        "0.2995 to 0.3005 became -1 to 1, a width of 0.001",
        "values are normalised beyond 10, the farthest to 2.6e+03",
        "--policy.options.asset demonstrations",
        "--sft.insist statistics",
    ):
        assert part in said, said
    assert "dimension 0" not in said and not (tmp_path / "run").exists()


def test_it_is_learned_from_if_one_insists_or_takes_the_statistics_of_the_demonstrations(
    demos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow = with_statistics(tmp_path / "narrow", 1e-3)
    insisted = learn(narrow, demos, tmp_path / "insisted", insist=["statistics"])
    assert insisted["sft/loss"] > 1e3 and "warning: action beside the statistics" in capsys.readouterr().out
    own = learn(narrow, demos, tmp_path / "own", options={"asset": "demonstrations"})
    assert own["sft/loss"] < 10 and "beside the statistics" not in capsys.readouterr().out
    wide = learn(with_statistics(tmp_path / "wide", 2.0), demos, tmp_path / "wide_run")
    assert wide["sft/loss"] < 10 and "beside the statistics" not in capsys.readouterr().out


def findings(values: np.ndarray, low: list[float], high: list[float]) -> list[tuple[str, str | None]]:
    one = Normalised("action", torch.from_numpy(values), torch.tensor(low), torch.tensor(high))
    return [(found.text, found.check) for found in check_normalised([one], {}, "theirs", "Do this")]


NUMBERS = np.random.default_rng(0).uniform(-1, 1, (1000, 2))


def test_outliers_are_a_warning() -> None:
    values = NUMBERS.copy()
    values[:9, 1] = 50
    ((text, check),) = findings(values, [-1, -1], [1, 1])
    assert check is None and "dimension 1" in text and "9 of 1,000 values" in text and "the farthest to 50" in text
    assert findings(NUMBERS, [-1, -1], [1, 1]) == []


def test_few_rows_refuse_nothing() -> None:
    ((_, check),) = findings(50 + NUMBERS[:9], [-1, -1], [1, 1])
    assert check is None
    ((_, check),) = findings(50 + NUMBERS[:10], [-1, -1], [1, 1])
    assert check == "statistics"


def test_statistics_of_one_number() -> None:
    values = NUMBERS.copy()
    values[:, 0] = 0.3
    assert findings(values, [0.3, -1], [0.3, 1]) == [], "what was one number, and is"
    ((text, check),) = findings(NUMBERS, [0.3, -1], [0.3, 1])
    assert check == "statistics" and "the statistics know one number, 0.3" in text and "without bound" in text


def test_a_number_that_stays_as_it_is_is_not_compared() -> None:
    assert findings(100 * NUMBERS, [np.nan, -100], [np.nan, 100]) == []


def test_actions_that_take_a_small_part_of_the_statistics_are_odd() -> None:
    ((text, check),) = findings(NUMBERS, [-100, -100], [100, 100])
    assert check is None and "take 0.98% or less of what became -1 to 1" in text


def test_policies_say_what_normalises_what() -> None:
    """Each kind's statistics, by what they take to -1 and 1; what OpenVLA leaves as it is has none."""
    config = load_config("openvla_tiny")
    spec = PolicySpec(action_dim=7, chunk=1, cameras=("front",), image_size=64)
    openvla = policies.build("openvla", spec, 0, **config.policy.architecture)
    (found,) = openvla.normalised_numbers(Inputs(), torch.zeros(3, 7))
    statistics = openvla.get_submodule("statistics")
    assert isinstance(statistics, Statistics)
    ends = statistics.unnormalise(torch.tensor([[-1.0], [1.0]]).expand(2, 7))
    scaled = statistics.mask
    assert (
        scaled.any()
        and torch.equal(found.low[scaled], ends[0, scaled])
        and torch.equal(found.high[scaled], ends[1, scaled])
    )
    assert found.low[~scaled].isnan().all() and found.values.shape == (3, 7)

    small = policies.build("gaussian_mlp", PolicySpec(action_dim=2, chunk=1, state_dim=2), 0, widths=[8])
    small.observe(Inputs(state=torch.tensor([[0.0, 5.0], [2.0, 5.0]])))
    (state,) = small.normalised_numbers(Inputs(state=torch.tensor([[100.0, 5.0]] * 20)), torch.zeros(20, 2))
    ((text, check),) = [(f.text, f.check) for f in check_normalised([state], {}, "its own", "")]
    assert check == "statistics" and "dimension 0 is 100 to 100, and 0 to 2 became -1 to 1" in text
    assert "the farthest to 99" in text and "dimension 1" not in text
