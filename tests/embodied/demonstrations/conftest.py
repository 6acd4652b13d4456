"""The same four episodes, replayed once and written once for every test of recording and reading."""

from __future__ import annotations

from contextlib import closing

import pytest

from embodied.demonstrations import Dataset
from sim_farm.client.episode_replay import Replayer
from sim_farm.conformance.checks import random_actions
from sim_farm.contract import EpisodeSpec, TaskInfo
from sim_farm.registry import make_physics
from tests.embodied.demonstrations.examples import PUSH, Replays, write


@pytest.fixture(scope="session")
def info() -> TaskInfo:
    with closing(make_physics(PUSH)) as physics:
        return physics.info


@pytest.fixture(scope="session")
def replays(info: TaskInfo) -> Replays:
    """Four episodes of 12, 9, 12 and 9 steps."""
    with closing(Replayer(PUSH)) as replayer:
        specs = [EpisodeSpec(seed) for seed in range(4)]
        return [(spec, replayer.replay(spec, random_actions(info, 12 if spec.seed % 2 == 0 else 9))) for spec in specs]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory, info: TaskInfo, replays: Replays) -> Dataset:
    return write(tmp_path_factory.mktemp("written") / "demos", info, replays)
