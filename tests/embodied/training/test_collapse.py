"""When a run says that it unlearns: not for noise, once for each fall."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from embodied.cli import main
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.errors import UserError
from embodied.reporting.metrics import read
from embodied.training.watches import PATIENCE, STANDSTILL, BrokenWatch, CollapseWatch, StandstillWatch
from embodied.trajectories.batch import FAULTY, EndedEpisode


def warned_at(rates: Sequence[float | None]) -> list[int]:
    """The iterations at which something is said of these success rates of the last 100 episodes."""
    watch = CollapseWatch(100)
    rows = [{"iteration": i, "env/success_recent": rate, "learner/approx_kl": 0.5} for i, rate in enumerate(rates, 1)]
    return [i for i, row in enumerate(rows, 1) if watch.see(row) is not None]


def test_a_fall_that_lasts_is_reported_once() -> None:
    assert warned_at([None, 0.5, 0.9] + [0.3] * 20) == [3 + PATIENCE]


def test_a_second_fall_after_a_recovery_is_reported_again() -> None:
    rates = [0.9, *[0.3] * PATIENCE, 0.9, *[0.3] * PATIENCE]
    assert warned_at(rates) == [1 + PATIENCE, 2 + 2 * PATIENCE]


def test_noise_is_not_a_fall() -> None:
    """100 episodes each, of a policy that stays as it is."""
    random = np.random.default_rng(0)
    assert not warned_at((random.binomial(100, 0.6, 300) / 100).tolist())


def test_a_short_fall_is_not_reported() -> None:
    assert not warned_at([0.9, *[0.3] * (PATIENCE - 1), 0.85, *[0.3] * (PATIENCE - 1)])


def test_the_note_names_the_rates_with_intervals_and_what_explains_them() -> None:
    watch = CollapseWatch(100)
    message = None
    for i, rate in enumerate([0.9] + [0.3] * PATIENCE):
        message = watch.see(
            {"iteration": i, "env/success_recent": rate, "learner/approx_kl": 0.5, "learner/entropy": 2.0}
        )
    assert message is not None
    assert (
        "30% (22% to 40%)" in message
        and "90% (83% to 94%) at iteration 0" in message
        and "approx_kl 0.5, entropy 2" in message
    )


# --- a run that learns nothing

LEARNED = {"env/episodes": 8.0, "env/return": 0.5, "learner/steps": 2.0, "learner/grad_norm": 0.1}
ALIKE = {**LEARNED, "learner/steps": 0.0, "learner/informative_groups": 0.0, "env/success_once": 0.0}
BROKEN = {**ALIKE, "env/return": float("nan")}


def watched(*rows: dict[str, float]) -> tuple[StandstillWatch, list[int]]:
    """The watch after the rows, and the iterations at which it said something."""
    watch = StandstillWatch(parse_config({"workflow": "grpo"}, "test"))
    return watch, [i for i, row in enumerate(rows, 1) if watch.see(row) is not None]


def test_a_standstill_is_said_once_and_at_the_end() -> None:
    watch, said = watched(LEARNED, *[ALIKE] * 6)
    assert said == [1 + STANDSTILL]
    end = watch.at_end()
    assert end is not None and "the last 6 iterations" in end and "nothing was learned" not in end
    assert "no episode group was informative (0% of the episodes solved" in end and "--policy.init" in end
    assert watched(*[ALIKE] * 3, LEARNED, *[ALIKE] * 3)[1] == [3, 7]


def test_a_run_that_has_learned_says_nothing_at_the_end_and_a_short_one_that_has_not_does() -> None:
    assert watched(LEARNED, ALIKE)[0].at_end() is None
    end = watched(ALIKE)[0].at_end()
    assert end is not None and end.startswith("nothing was learned: the last iteration")
    assert watched({"iteration": 1.0})[0].at_end() is None, "a record that does not say it"


def test_each_cause_is_named() -> None:
    causes = {
        "optim.target_kl": {**LEARNED, "learner/steps": 0.0, "learner/stopped_by_kl": 1.0},
        "the gradient was zero": {**LEARNED, "learner/grad_norm": 0.0},
        "Every episode is solved": {**ALIKE, "env/success_once": 1.0},
        "all 8 episodes were left out": BROKEN,
    }
    for cause, row in causes.items():
        assert cause in str(watched(row)[0].at_end())
    still = StandstillWatch(parse_config({"optim": {"policy_lr": 0}}, "test"))
    assert still.see(LEARNED) is None and "optim.policy_lr is 0" in str(still.at_end())


def ends(*rows: dict[str, float], last: bool = False, episodes: tuple[EndedEpisode, ...] = ()) -> str:
    """The error that ends a run after these rows; empty if it goes on. `episodes` are those of the last."""
    watch = BrokenWatch()
    for row in rows:
        watch.see(row)
    try:
        watch.end(episodes, "", last=last)
    except UserError as error:
        return str(error)
    return ""


def test_broken_episodes_end_a_run_after_some_iterations_or_at_its_end() -> None:
    assert not ends(BROKEN, BROKEN)
    assert ends(BROKEN, BROKEN, last=True)
    assert ends(*[BROKEN] * STANDSTILL)
    assert not ends(*[ALIKE] * STANDSTILL, last=True)
    assert not ends(LEARNED, BROKEN, last=True)


def test_episodes_broken_by_a_fault_of_the_task_end_a_run_at_once() -> None:
    """Those that the step limit ended count neither way."""
    faulty = tuple(EndedEpisode(env, False, math.nan, 4, fault="it fell apart") for env in range(FAULTY))
    cut = EndedEpisode(0, False, 0.0, 4, truncated=True)
    assert ends(LEARNED, episodes=(cut, *faulty)) == (
        f"the last {FAULTY} episodes that the task ended were all broken: it fell apart"
    )
    assert not ends(LEARNED, episodes=(cut, *faulty[1:]))
    assert not ends(LEARNED, episodes=(*faulty, EndedEpisode(0, False, 0.0, 4)))


SMALL: dict[str, Any] = {
    "name": "run",
    "iterations": 4,
    "env": {"task": "tabletop/push", "num_envs": 8, "max_episode_steps": 4},
    "workflow": "grpo",
    "rollout": {"episode_group": 4},
    "policy": {"options": {"widths": [8]}},
    "eval": {"episodes": 1, "videos": 0},
    "runtime": {"mode": "inline"},
    "track": [],
}


def test_a_run_whose_groups_are_never_informative_says_so_and_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Episodes of four env steps solve nothing."""
    result = train_run(parse_config(SMALL, "test"), "test", tmp_path, resume=False)
    said = capsys.readouterr().out
    assert result["not_learned"].startswith("nothing was learned: the last 4 iterations did not change the policy")
    assert said.count("the last 3 iterations did not change the policy: no episode group was informative") == 1
    assert said.rstrip().endswith(result["not_learned"])


def test_a_run_whose_episodes_are_all_broken_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "astray.py").write_text(ASTRAY)
    monkeypatch.syspath_prepend(tmp_path)
    own = {"env": {"task": "astray:gymnasium/Astray-v0", "num_envs": 8}, "advantage": {"outcome": "return"}}
    settings = {**SMALL, "iterations": 9, **own}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", str(tmp_path / "own.yaml"), "--runs-dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "every episode of 3 iterations was broken. The last: left out 8 episodes" in said.err
    assert "go on with: embodied train" in said.out and len(read(tmp_path / "run")) == 3


# Its first episodes, by which an environment is tried when it is described, are whole.
ASTRAY = """
import gymnasium, numpy

class Astray(gymnasium.Env):
    observation_space = action_space = gymnasium.spaces.Box(-1, 1, (1,), numpy.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.whole = seed is not None and seed < 10
        return self.np_random.uniform(-1, 1, 1).astype(numpy.float32), {}

    def step(self, action):
        reward = 0.0 if self.whole else float("nan")
        return self.np_random.uniform(-1, 1, 1).astype(numpy.float32), reward, True, False, {}

gymnasium.register("Astray-v0", Astray, max_episode_steps=4)
"""
