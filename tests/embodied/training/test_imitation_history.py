"""Learning from demonstrations by policies that decide on several observations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from torch import Tensor

from embodied.config.schema import Config
from embodied.demonstrations import Dataset, History
from embodied.run import checkpoint
from embodied.training.imitator import Imitator
from embodied.training.sft import imitate
from policies import Inputs, PolicyError
from tests.embodied.demonstrations.test_inspection import foreign, with_column
from tests.embodied.support.expert import record_reach
from tests.embodied.training.test_imitation import PIXELS, STATES, config_of, imitator_of, info_of
from tests.policies.test_history import Earlier

EPISODES = 24


def with_history(settings: dict[str, Any], observations: int, distance: int = 1, **policy: Any) -> dict[str, Any]:
    """The settings with a policy of several observations."""
    options = {**settings["policy"]["options"], "observations": observations, "distance": distance}
    return {**settings, "policy": {**settings["policy"], **policy, "options": options}}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", EPISODES)


@pytest.fixture(scope="module")
def echoes(demos: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """States without order, three numbers each, and actions that are the state of two env steps before."""
    rows = np.arange(len(demos))
    begins = np.array([episode.begin for episode in demos.episodes])[demos.episode_of(rows)]
    state = np.zeros((len(demos), demos.features["observation.environment_state"].shape[0]), np.float32)
    state[:, :3] = np.random.default_rng(0).uniform(-1, 1, (len(demos), 3))
    folder = foreign(demos.folder, tmp_path_factory.mktemp("echoes") / "demos")
    with_column(folder, "observation.environment_state", lambda _: state)
    return Dataset(with_column(folder, "action", lambda _: state[np.maximum(rows - 2, begins), :3]))


def learned(config: Config, count: int) -> tuple[list[float], dict[str, float]]:
    """Losses of the first steps, and what is measured after them."""
    imitator = imitator_of(config)
    try:
        return [imitator.step() for _ in range(count)], imitator.measure()
    finally:
        imitator.close()


def test_what_only_an_earlier_observation_tells_is_learned(echoes: Dataset) -> None:
    off = {}
    for count, distance in ((1, 1), (2, 1), (2, 2), (3, 1)):
        settings = with_history(STATES, count, distance)
        off[count, distance] = learned(config_of(settings, echoes, steps=150), 150)[1]["sft/held_out_distance"]
    assert max(off[2, 2], off[3, 1]) < 0.4 * min(off[1, 1], off[2, 1]), off


def test_statistics_are_of_the_rows(demos: Dataset) -> None:
    """The same as those of one observation, whatever the number of observations."""
    states = [
        imitator_of(config_of(settings, demos)).policy.state_dict() for settings in (STATES, with_history(STATES, 3, 2))
    ]
    for name in ("normalizer.mean", "normalizer.var", "normalizer.count"):
        assert torch.equal(*(state[name] for state in states))


def test_stopped_and_resumed_is_not_stopped(demos: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With changed pictures of several observations, which a process has read in the parts and threads in the
    whole."""
    settings = with_history(PIXELS, 2, 3)
    config = config_of(settings, demos, steps=6, measure_every=6, augment="openpi", batch=8)
    info = info_of(config)
    whole = imitate(config, info, tmp_path / "whole", None)
    take = Imitator.step

    def step(imitator: Imitator) -> float:
        if imitator.done == 3:
            raise KeyboardInterrupt
        return take(imitator)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Imitator, "step", step)
        by_process = config.model_copy(update={"sft": config.sft.model_copy(update={"loader_workers": 1})})
        imitate(by_process, info, tmp_path / "parts", None)
    found = checkpoint.latest(tmp_path / "parts" / "checkpoints")
    assert found is not None and checkpoint.read_state(found).iteration == 3
    parts = imitate(config, info, tmp_path / "parts", found)
    assert parts["sft/held_out_loss"] == whole["sft/held_out_loss"]
    one, other = (
        load_file(tmp_path / run / "checkpoints" / "000006" / "policy/model.safetensors") for run in ("whole", "parts")
    )
    assert one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_a_checkpoint_of_another_history_is_refused(demos: Dataset, tmp_path: Path) -> None:
    config = config_of(with_history(STATES, 2), demos, steps=2, measure_every=2)
    imitate(config, info_of(config), tmp_path / "two", None)
    found = checkpoint.latest(tmp_path / "two" / "checkpoints")
    other = config_of(with_history(STATES, 3, init=str(found)), demos)
    with pytest.raises(PolicyError, match=r"spec.observations is 2, expected 3; architecture.observations is 2"):
        imitator_of(other)


def test_actions_before_the_present_one_are_learned_from(demos: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not measured: the distance is of what is executed."""
    kind = "tests.policies.test_history:EARLIER"
    config = config_of(with_history(STATES, 2, kind=kind, chunk=2), demos, batch=16)
    given = list[tuple[Tensor, Tensor]]()
    of_rows = Earlier.imitate

    def imitates(policy: Earlier, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        given.append((actions, counted))
        return of_rows(policy, inputs, actions, counted, noise)

    monkeypatch.setattr(Earlier, "imitate", imitates)
    imitator = imitator_of(config)
    rows = imitator._rows(0)
    imitator.step()
    ((actions, counted),) = given
    assert actions.shape == (16, 3, 3)
    begins = np.array([episode.begin for episode in demos.episodes])[demos.episode_of(rows)]
    assert counted[:, 0].tolist() == (rows > begins).tolist() and not counted.all()
    assert np.array_equal(actions[:, 0].numpy(), demos.column("action")[np.maximum(rows - 1, begins)])
    measured = imitator.measure()["sft/held_out_distance"]
    held_out = demos.batch(imitator.demonstrations.held_out, 2, (), History(2, 1))
    decided = imitator.policy.act(held_out.inputs(), None).chunk.numpy()
    off = np.abs(decided - held_out.actions)[~held_out.padding]
    assert measured == pytest.approx(float(off.mean()), rel=1e-5)
    imitator.close()
