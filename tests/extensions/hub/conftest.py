"""A hub of this machine, and runs and datasets to push there.

Large files go up by Git LFS, as `huggingface_hub` sends them where hf_xet is not installed; Xet's own storage is not
stood in for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from embodied.commands.evaluate import evaluate_run
from embodied.commands.sft import sft_run
from embodied.config.files import load_config, parse_config, save_config
from embodied.config.schema import Config
from embodied.demonstrations import Dataset
from tests.embodied.support.expert import record_reach
from tests.embodied.support.hub_server import TOKEN, Hub, serving

NOWHERE = "http://127.0.0.1:9"
SHORT = {
    "env": {"num_envs": 2, "max_episode_steps": 4},
    "sft": {"steps": 2, "batch": 4, "holdout": 0.0},
    "eval": {"episodes": 2, "videos": 0},
    "runtime": {"mode": "inline"},
}


@dataclass(frozen=True)
class Trained:
    """A run that has learned from demonstrations, below the folder of runs in which its base was evaluated too."""

    config: Config
    demos: Dataset
    run: Path

    @property
    def runs_dir(self) -> Path:
        return self.run.parent


@pytest.fixture(scope="session")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", 4, image_size=56)


@pytest.fixture(scope="session")
def trained(demos: Dataset, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """An adapter of the smallest OpenVLA."""
    root = tmp_path_factory.mktemp("runs")
    data = load_config("openvla_tiny").model_dump(mode="json")
    for section, differs in SHORT.items():
        data[section] |= differs
    data["sft"]["data"] = [str(demos.folder)]
    config = parse_config(data, "test")
    result = sft_run(config.model_copy(update={"name": "warm"}), "test", root, False)
    own = root / "openvla_tiny.yaml"
    save_config(config, own)
    evaluate_run(str(own), config, None, root)
    return Trained(config, demos, Path(result["run"]))


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who is logged in, an empty cache, and no hub to reach."""
    _reach(monkeypatch, NOWHERE)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)  # the hub of the test knows LFS alone
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


@pytest.fixture
def server(nowhere: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = Hub()
    with serving(repositories) as address:
        _reach(monkeypatch, address)
        yield repositories


def _reach(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
    template = address + "/{repo_id}/resolve/{revision}/{filename}"  # as the library makes it when it is imported
    monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
