"""The conformance suite as a stranger runs it: what it says of a policy that does not keep the laws."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.conformance.laws import IMITATION_LAWS, LAWS
from policies.conformance.promises import PROMISES

ROOT = Path(__file__).parents[2]
OWN_DICE = """
import torch
from own_policy import Linear


class OwnDice(Linear):
    def act(self, inputs, noise):
        return super().act(inputs, None if noise is None else torch.randn_like(noise))
"""


def suite(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "strange.py").write_text(OWN_DICE)
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    command = [sys.executable, "-m", "policies.conformance", "-q", "--tb=line", *arguments]
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)


def test_a_policy_that_draws_by_itself_is_found_out(tmp_path: Path) -> None:
    sizes = ("--options", '{"std": 0.3}', "--sizes", '{"state_dim": 7}')
    done = suite(tmp_path, "--policy", "strange:OwnDice", *sizes, "--report", "report.json")
    assert done.returncode == 1
    laws = {each["law"]: each for each in json.loads((tmp_path / "report.json").read_text())["laws"]}
    broken = {law for law, each in laws.items() if each["outcome"] == "broken"}
    assert broken >= {"law_noise_decides", "law_global_generators_are_untouched"}
    assert "two evaluations of one checkpoint differ" in laws["law_noise_decides"]["otherwise"]
    assert "BROKEN          global generators are untouched: the policy drew from" in done.stdout
    assert laws["law_scores_agree"]["outcome"] == "holds"
    assert all(laws[law.__name__]["why"] == "the policy has no imitate" for law in IMITATION_LAWS)


@pytest.mark.slow  # two seconds each, for torch; sim_farm's suite tells mistakes in the default run
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name it with --policy my_package.my_policy:MyPolicy"),
        (("--policy", "strange:OwnDice", "--sizes", '{"state": 3}'), "--sizes has no 'state'; valid: action_dim"),
        (("--policy", "strange:OwnDice", "--options", '{"sdt": 3}'), "no architecture argument 'sdt'"),
    ],
)
def test_a_mistake_gives_one_message(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = suite(tmp_path, *arguments)
    assert done.returncode == 4 and message in done.stderr and "Traceback" not in done.stderr + done.stdout


def test_every_law_belongs_to_one_promise_and_is_a_sentence() -> None:
    laws = [law for promise in PROMISES for law in promise.laws]
    assert len(laws) == len(set(laws)) and set(laws) == {*LAWS, *IMITATION_LAWS}
    assert all((law.__doc__ or "").strip().partition("\n")[0].endswith(".") for law in laws)
