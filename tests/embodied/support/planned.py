"""A small configuration, its profile measured once a module, and commands in this process: for tests of plans."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

import schedulers
from embodied import cli
from embodied.config.files import parse_config
from embodied.execution.session import Session, open_session
from embodied.planning import profiler as profiling
from embodied.planning.profiler import profile_run
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from schedulers import Profile

CORES = sorted(os.sched_getaffinity(0))[:2]
ENVS = 4
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "iterations": 2,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 9},
    "policy": {"chunk": 2, "options": {"widths": [16]}},
    "rollout": {"decisions": 8},
    "optim": {"epochs": 1, "minibatch": 16},
    "eval": {"episodes": 4, "videos": 0},
    "runtime": {"mode": "inline"},
}
IMAGES: dict[str, Any] = {
    **SETTINGS,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 9, "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["images"],
        "chunk": 2,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16], "steps": 2},
    },
    "rollout": {"decisions": 2},
}


@pytest.fixture(scope="module", autouse=True)
def few_iterations() -> Iterator[None]:
    """Measure as little as can be: these tests ask what is measured, not how well."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "MOST", profiling.LEAST)
        yield


_measured: list[Profile] = []


@pytest.fixture(scope="module")
def profile(few_iterations: None, ray_runtime: RayRuntime) -> Profile:
    """Measured as `embodied profile` does, by workers in processes of their own; once for the modules of a process."""
    if not _measured:
        config = parse_config({**SETTINGS, "runtime": {"deadline_s": 120}}, "test")
        _measured.append(profile_run(RunSpec.of(config), Session(config, ray_runtime, tuple(CORES)), Path()))
    return _measured[0]


@pytest.fixture
def files(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with `small.yaml` and its `profile.json`."""
    write_config(tmp_path / "small.yaml", SETTINGS)
    schedulers.save(profile, tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(settings))


def train(folder: Path, **sections: Any) -> Path:
    """A short run inline; its folder."""
    config = parse_config({**SETTINGS, **sections}, "test")
    found = prepare_run(config, folder, resume=folder.exists())
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, replace(session, cores=tuple(CORES)), found)
    return folder


def assert_same_parameters(found: Path, expected: Path) -> None:
    folders = [checkpoint.latest(run / "checkpoints") for run in (found, expected)]
    assert folders[0] is not None and folders[1] is not None and folders[0].name == folders[1].name
    for path in folders[1].rglob("*.safetensors"):
        tensors, others = load_file(folders[0] / path.relative_to(folders[1])), load_file(path)
        assert tensors.keys() == others.keys()
        assert all(tensors[key].tobytes() == other.tobytes() for key, other in others.items()), path.name


class Commands:
    """Runs commands in this process and hands back what they said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def run(self, *arguments: str) -> tuple[int, str]:
        self._capsys.readouterr()
        try:
            status = cli.main([str(argument) for argument in arguments])
        except SystemExit as end:  # how the parser refuses
            status = int(end.code or 0)
        found = self._capsys.readouterr()
        return status, " ".join((found.out + found.err).split())

    def done(self, *arguments: str) -> str:
        status, output = self.run(*arguments)
        assert status == 0, output
        return output

    def refused(self, *arguments: str) -> str:
        """The message of a command that is refused before it builds an environment."""
        status, output = self.run(*arguments)
        assert status == 2, output
        assert "Building" not in output, "workers had been started already"
        return output


@pytest.fixture
def embodied(capsys: pytest.CaptureFixture[str]) -> Commands:
    return Commands(capsys)
