"""Runs whose answers an engine writes: what is learned from them, what is refused, and an engine that is killed."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.iteration import start_run
from embodied.execution.session import Session
from embodied.learning import update
from embodied.learning.update import EngineMismatch
from embodied.reporting import metrics
from embodied.workflows.run_spec import RunSpec
from embodied_language.engine_server import GenerationServer
from policies.contract import PolicyError
from tests.embodied.support.runs import assigned, inline
from tests.extensions.language.served_engine import served

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"


def config_of(engine: str, **changes: Any) -> Config:
    """PPO from a network without training, which finds something to learn in every answer: to say it less surely."""
    settings = {
        "workflow": "ppo",
        "iterations": 3,
        "env": {
            "task": "text/countdown_3",
            "options": {"tokenizer": str(MODEL)},
            "max_episode_steps": 8,
            "num_envs": 4,
        },
        "farm": {"groups": 1},
        "policy": {
            "kind": "language",
            "chunk": 8,
            "reads": ["instruction", "state"],
            "options": {"checkpoint": str(MODEL), "engine": engine, "engine_timeout_s": 60.0},
        },
        "rollout": {"decisions": 2},
        "loss": {"ratio_unit": "action", "entropy_coef": 1.0, **changes},
        "optim": {"epochs": 1, "minibatch": 4, "policy_lr": 1e-3, "value_lr": 1e-1},
    }
    return parse_config(settings, "test")


def test_each_version_reaches_the_engine_once_and_its_answers_are_learned_from(here: Session, tmp_path: Path) -> None:
    loaded: list[str] = []

    class Notes(GenerationServer):
        def update_weights_from_disk(self, body: Any) -> Any:
            loaded.append(Path(body["model_path"]).name)
            return super().update_weights_from_disk(body)

    with served(MODEL, kind=Notes) as address:
        config = config_of(f"sglang {address}")
        with start_run(RunSpec.of(config), tmp_path, here, inline(assigned())) as workers:
            workers.begin(None, 0)
            learned = [workers.iterate(iteration).learned for iteration in range(2)]
    assert loaded == ["000000", "000001", "000002"]
    for each in learned:  # of the engine's weights and the learner's, which are the same
        assert 0 <= each["learner/engine_kl"] < 1e-6 and each["learner/first_ratio_error"] < 1e-4
        assert each["learner/steps"] == 2
    assert learned[0]["learner/entropy"] < learned[1]["learner/entropy"]


def test_a_rollout_ahead_is_corrected_and_no_measure_of_the_engine(here: Session, tmp_path: Path) -> None:
    with served(MODEL) as address:
        config = config_of(f"vllm {address}")
        with start_run(RunSpec.of(config), tmp_path, here, inline(assigned(ahead=1, one_process=False))) as workers:
            workers.begin(None, 0)
            first, second = (workers.iterate(iteration, drain=iteration == 1).learned for iteration in range(2))
    assert "learner/engine_kl" in first and "learner/engine_kl" not in second
    assert second["learner/first_ratio_error"] < 1e-4


def test_an_engine_that_has_not_taken_the_weights_ends_the_run(
    here: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Pretends(GenerationServer):
        """Says that it has the weights, and keeps those it began with."""

        def update_weights_from_disk(self, body: Any) -> Any:
            self._engine.rename_weights(body["weight_version"])
            return {"success": True}

    with served(MODEL, kind=Pretends) as address:
        monkeypatch.setattr(update, "ENGINE_KL_LIMIT", 1e-4)
        config = config_of(f"sglang {address}")
        optim = config.optim.model_copy(update={"policy_lr": 3e-2})
        with start_run(
            RunSpec.of(config.model_copy(update={"optim": optim})), tmp_path, here, inline(assigned())
        ) as workers:
            workers.begin(None, 0)
            workers.iterate(0)
            with pytest.raises(EngineMismatch, match="more than 0.0001: it does not write by"):
                workers.iterate(1)


def test_an_engine_that_is_not_there_is_named_before_the_first_rollout(here: Session, tmp_path: Path) -> None:
    config = config_of("sglang http://127.0.0.1:9")
    options = {**config.policy.options, "engine_timeout_s": 0.5}
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"options": options})})
    with start_run(RunSpec.of(config), tmp_path, here, inline(assigned())) as workers:
        with pytest.raises(PolicyError, match="no answer of the engine at http://127.0.0.1:9 within 0.5 s"):
            workers.begin(None, 0)


# --- whole runs, with an engine in a process of its own


def started(port: int = 0) -> tuple[subprocess.Popen[str], int]:
    """An engine, which answers, and its port."""
    command = [sys.executable, "-m", "embodied_language.engine_server", str(MODEL), "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    return server, int(re.findall(r":(\d+);", server.stdout.readline())[0])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "dialect"), [("inline", "vllm"), ("ray", "sglang")])
def test_a_run_whose_engine_is_killed_and_started_again_loses_nothing(mode: str, dialect: str, tmp_path: Path) -> None:
    server, port = started()
    settings = config_of(f"{dialect} http://127.0.0.1:{port}").model_dump(mode="json")
    settings |= {"iterations": 6, "track": [], "checkpoint_every": 3}
    settings["policy"]["options"]["engine_timeout_s"] = 500.0
    settings["runtime"]["mode"] = mode
    settings["eval"] |= {"episodes": 4, "videos": 0}
    if mode == "ray":  # two replicas, of which either may be the one that finds it out
        settings["farm"]["groups"] = settings["policy"]["replicas"] = 2
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "embodied.cli", "train", str(tmp_path / "run.yaml"), "--name", "engine"]
    command += ["--runs-dir", str(tmp_path), "--json", str(tmp_path / "result.json")]
    rows = tmp_path / "engine" / "metrics.jsonl"
    try:
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
            waited = threading.Event()
            while run.poll() is None and not (rows.is_file() and rows.read_text().count("\n") >= 2):
                waited.wait(0.05)
            server.send_signal(signal.SIGKILL)
            server.wait()
            server, _ = started(port)
            said, _ = run.communicate()
    finally:
        server.kill()
        server.wait()
    assert run.returncode == 0, said
    found = metrics.read(tmp_path / "engine")
    assert [row["iteration"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert all(row["learner/engine_kl"] < 1e-6 for row in found)
    assert len({row["env_steps"] for row in found}) == 6
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["deterministic"] is False and "recoveries" not in result
