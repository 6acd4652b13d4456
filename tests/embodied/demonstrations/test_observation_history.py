"""Rows of demonstrations with the observations before them, as a policy of several observations reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from embodied import cli
from embodied.commands.record import record_run
from embodied.config.files import parse_config
from embodied.demonstrations import Dataset, DatasetError, History
from embodied.demonstrations.augmentation import RECIPES, Augmentation
from embodied.demonstrations.findings import Environment, observed
from embodied.demonstrations.inspection import Inspection, inspected, text
from embodied.demonstrations.loader import Loader, Request
from embodied.demonstrations.mixture import Demonstrations
from embodied.errors import UserError
from embodied.training.sft import read_demonstrations
from embodied.workflows.run_spec import task_spec
from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
from policies.policy_kind import PolicyFormat, PolicyKind
from tests.embodied.demonstrations.test_inspection import foreign, with_column, without
from tests.embodied.demonstrations.test_loader import CAMERAS, HERE, content, demonstrations_of, requests_of
from tests.embodied.support.expert import record_reach

HISTORY = History(observations=3, distance=2)
EPISODES = 6
SETTINGS: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 2},
    "policy": {"reads": ["state"], "options": {"widths": [16], "observations": 3, "distance": 2}},
    "runtime": {"mode": "inline"},
}


def seen_by(dataset: Dataset, row: int, history: History) -> list[int]:
    """Rows of the observations of a row, counted one by one."""
    episode = dataset.episodes[int(dataset.episode_of(np.array([row]))[0])]
    back = [history.distance * k for k in reversed(range(history.observations))]
    return [max(row - steps, episode.begin) for steps in back]


# --- what is read


@pytest.mark.parametrize("history", [History(2, 1), HISTORY, History(4, 7)])
def test_each_row_comes_with_the_rows_before_it(written: Dataset, history: History) -> None:
    order = np.random.default_rng(0).permutation(len(written))
    batch = written.batch(order, 2, ["wrist"], history)
    plain = written.batch(order, 2, ["wrist"])
    assert batch.proprio is not None and batch.state is not None
    for place, row in enumerate(order.tolist()):
        rows = seen_by(written, row, history)
        expected = written.batch(rows, 1, ["wrist"])
        assert expected.proprio is not None and expected.state is not None
        assert np.array_equal(batch.proprio[place], expected.proprio)
        assert np.array_equal(batch.state[place], expected.state)
        assert np.array_equal(batch.frames["wrist"][place], expected.frames["wrist"])
    assert np.array_equal(batch.actions, plain.actions) and np.array_equal(batch.padding, plain.padding)
    assert batch.instruction == plain.instruction


def test_one_observation_has_no_axis(written: Dataset) -> None:
    batch, plain = (written.batch([5, 0, 5, 30], 3, ["front"], *more) for more in ((History(),), ()))
    assert batch.proprio is not None and plain.proprio is not None and batch.proprio.ndim == 2
    assert np.array_equal(batch.proprio, plain.proprio)
    assert np.array_equal(batch.frames["front"], plain.frames["front"]) and batch.frames["front"].ndim == 4


def test_a_picture_that_rows_have_in_common_is_decoded_once(written: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = list[int]()
    of_rows = Dataset.frames

    def frames(dataset: Dataset, camera: str, indices: Any) -> Any:
        decoded.extend(np.asarray(indices).tolist())
        return of_rows(dataset, camera, indices)

    monkeypatch.setattr(Dataset, "frames", frames)
    first = written.episodes[1].begin
    written.batch([first, first + 1, first + 2, first + 3], 1, ["front"], History(3, 1))
    assert decoded == [first, first + 1, first + 2, first + 3]


def test_actions_may_begin_before_the_row(written: Dataset) -> None:
    """Those before an episode's beginning are its first action, as those after its end are its last, and are no part
    of it."""
    actions = written.column("action")
    batch = written.batch(range(len(written)), 3, (), History(actions=2))
    assert batch.actions.shape == (len(written), 5, 3)
    for episode in written.episodes:
        for row in range(episode.begin, episode.end):
            wanted = np.arange(row - 2, row + 3)
            assert np.array_equal(batch.actions[row], actions[wanted.clip(episode.begin, episode.end - 1)])
            outside = (wanted < episode.begin) | (wanted >= episode.end)
            assert batch.padding[row].tolist() == outside.tolist()


def test_an_earlier_row_with_numbers_that_are_not_finite_is_refused(written: Dataset, tmp_path: Path) -> None:
    row = written.episodes[1].begin + 2

    def spoiled(values: np.ndarray) -> np.ndarray:
        values[row, 0] = np.nan
        return values

    dataset = Dataset(with_column(foreign(written.folder, tmp_path / "spoiled"), "observation.state", spoiled))
    dataset.batch([row + 1], 1, ())
    with pytest.raises(DatasetError, match=f"not finite, first in row {row}"):
        dataset.batch([row + 4], 1, (), HISTORY)


# --- what an environment shows


class Watcher(Policy):
    """Acts by its noise alone, and keeps what it was shown, by the seed and the env step of the episode."""

    kind = "watcher"
    shown: ClassVar[dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec, self.noise_dim, self.value_head = spec, spec.chunk * spec.action_dim, nn.Identity()

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        assert inputs.state is not None and inputs.proprio is not None and inputs.episode is not None
        assert noise is not None
        for row, (seed, _, step) in enumerate(inputs.episode.tolist()):
            self.shown.setdefault((seed, step), (inputs.state[row].clone(), inputs.proprio[row].clone()))
        chunk = noise.view(-1, self.spec.chunk, self.spec.action_dim)
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        raise NotImplementedError

    def value(self, inputs: Inputs) -> Tensor:
        assert inputs.state is not None
        return torch.zeros(len(inputs.state))

    def architecture(self) -> dict[str, Any]:
        return {}


class WatcherFormat(PolicyFormat):
    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        return HISTORY.observations, HISTORY.distance


WATCHER = PolicyKind(Watcher, format=WatcherFormat())


@pytest.mark.parametrize("chunk", [1, 3])
def test_demonstrations_show_what_the_environment_showed(chunk: int, tmp_path: Path) -> None:
    """To the last bit, at every decision of every recorded episode."""
    kind, Watcher.shown = f"{__name__}:WATCHER", {}
    config = parse_config(
        {
            "env": {"task": "tabletop/push", "num_envs": 2, "max_episode_steps": 12},
            "policy": {"kind": kind, "reads": ["state", "proprio", "episode"], "chunk": chunk},
            "eval": {"greedy": False},
            "runtime": {"mode": "inline"},
        },
        "test",
    )
    record_run("test", config, None, tmp_path / "demos", 4, False, tmp_path / "no-runs")
    dataset, decisions = Dataset(tmp_path / "demos"), 0
    for episode in dataset.episodes:
        rows = np.arange(episode.begin, episode.end, chunk)
        batch = dataset.batch(rows, chunk, (), HISTORY)
        for place, row in enumerate(rows.tolist()):
            state, proprio = Watcher.shown[episode.row["seed"], row - episode.begin]
            assert batch.state is not None and np.array_equal(batch.state[place], state)
            assert batch.proprio is not None and np.array_equal(batch.proprio[place], proprio)
            decisions += 1
    assert decisions >= 4 * 12 // chunk - 4


# --- what the loader makes of it


def test_processes_and_threads_read_the_same_history() -> None:
    demonstrations = demonstrations_of(HERE / "converted", HERE / "other")

    def read_by(workers: int) -> list[Any]:
        augmentation = Augmentation("openpi", seed=0)
        with Loader(
            demonstrations, chunk=3, cameras=CAMERAS, history=HISTORY, augmentation=augmentation, workers=workers
        ) as loader:
            return content(loader.read(requests_of(demonstrations, 8, 6)))

    expected = read_by(0)
    assert read_by(1) == expected, "two and more read as one does (test_loader)"


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_observations_of_a_row_are_changed_alike(recipe: str) -> None:
    """The same picture, shown as each of the observations, stays the same; the last one is changed as it is alone."""
    pictures = np.random.default_rng(0).integers(0, 256, (4, 1, 40, 40, 3), np.uint8)
    rows, augmentation = np.array([5, 3, 8, 5]), Augmentation(recipe, 7)
    found = augmentation.applied({"front": np.repeat(pictures, 3, axis=1)}, rows, 2)["front"]
    assert found.shape == (4, 3, 40, 40, 3)
    assert (found == found[:, :1]).all()
    assert (found[:, 0] == augmentation.applied({"front": pictures[:, 0]}, rows, 2)["front"]).all()
    assert (found[:, 0] != pictures[:, 0]).any((1, 2, 3)).all()


def test_an_epochs_pictures_are_changed_in_all_observations() -> None:
    demonstrations, rows = demonstrations_of(HERE / "converted"), np.array([4, 9])
    with Loader(
        demonstrations, chunk=1, cameras=CAMERAS, history=HISTORY, augmentation=Augmentation("lerobot", seed=0)
    ) as loader:
        batches = [batch for _, batch in loader.read(Request(rows, epoch) for epoch in (None, 0))]
    plain, changed = (batch.frames[CAMERAS[0]] for batch in batches)
    assert plain.shape == changed.shape and plain.shape[:2] == (2, 3)
    assert (plain != changed).any((2, 3, 4)).all()


# --- what is said of the data


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", EPISODES).folder


@pytest.fixture(scope="module")
def reach() -> Environment:
    return observed(task_spec(parse_config(SETTINGS, "test")))


def understood(
    environment: Environment, folder: Path, options: Mapping[str, Any] = {}, **sft: Any
) -> tuple[Demonstrations, Inspection]:
    policy = SETTINGS["policy"] | {"options": {**SETTINGS["policy"]["options"], **options}}
    config = parse_config({**SETTINGS, "policy": policy, "sft": {"data": [str(folder)], **sft}}, "test")
    found = read_demonstrations(config, environment.info)
    return found, inspected(found, config, environment)


def test_the_table_says_what_a_row_is_read_with(ours: Path, reach: Environment) -> None:
    _, found = understood(reach, ours)
    assert not found.findings
    assert "3 observations of each row, 2 env steps apart, the first of an episode in place" in text(found)
    _, alone = understood(reach, ours, {"observations": 1})
    assert "observations of each row" not in text(alone)


def test_a_policy_elsewhere_is_not_asked_how_much_it_reads(ours: Path, tmp_path: Path) -> None:
    """`embodied inspect` compares the data with the environment of its configuration, whether its server runs or
    not."""
    (tmp_path / "c.yaml").write_text(
        "{env: {task: tabletop/reach, num_envs: 2}, policy: {kind: remote, reads: [state], options: {address: 'ws://"
        "127.0.0.1:1'}}, runtime: {mode: inline}}"
    )
    command = ["inspect", str(ours), "--config", str(tmp_path / "c.yaml"), "--out", str(tmp_path / "out")]
    assert cli.main(command) == 0


def test_episodes_shorter_than_what_the_policy_looks_back_are_named(ours: Path, reach: Environment) -> None:
    longest = max(episode.length for episode in Dataset(ours).episodes)
    (finding,) = understood(reach, ours, {"observations": 2, "distance": longest})[1].findings
    assert finding.check is None
    assert f"2 observations lies {longest} env steps back, and the longest episode that is used has {longest} env" in (
        finding.text
    )
    assert not understood(reach, ours, {"observations": 2, "distance": longest - 1})[1].findings


@pytest.mark.parametrize(
    ("fps", "distance", "apart"),
    [
        (10, 1, "0.1 s apart in the one and 0.05 s in the other (the dataset has no two frames closer than 0.1 s)"),
        (10, 2, "0.2 s apart in the one and 0.1 s in the other"),
        (40, 1, "0.025 s apart in the one and 0.05 s in the other"),
    ],
)
def test_another_frame_rate_moves_the_observations_apart(
    ours: Path, reach: Environment, tmp_path: Path, fps: int, distance: int, apart: str
) -> None:
    folder = foreign(ours, tmp_path / "slow", {"fps": fps})
    _, found = understood(reach, folder, {"distance": distance})
    with pytest.raises(UserError) as raised:
        found.raise_refusals()
    assert f"the 3 observations of a decision are {apart}" in str(raised.value)
    assert ("closer than" in str(raised.value)) == ("closer than" in apart)
    assert "--sft.insist fps" in str(raised.value)
    understood(reach, folder, {"distance": distance}, insist=["fps"])[1].raise_refusals()
    with pytest.raises(UserError) as raised:
        understood(reach, folder, {"observations": 1})[1].raise_refusals()
    assert "observations of a decision" not in str(raised.value)


def test_a_dataset_without_the_state_that_is_read_is_refused(ours: Path, reach: Environment, tmp_path: Path) -> None:
    folder = without(foreign(ours, tmp_path / "blind"), "observation.environment_state")
    with pytest.raises(UserError, match=r"no observation.environment_state, which .*reads \['state'\] needs"):
        understood(reach, folder)
