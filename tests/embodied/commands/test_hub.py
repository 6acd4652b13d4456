"""Hugging Face names: from a cache, from a server that speaks the hub's protocol, and where nothing can be reached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from embodied import hub
from embodied.config.files import load_config
from embodied.config.schema import Config, PolicyConfig
from embodied.errors import UserError
from embodied.run.folder import fetched
from policies.contract import PolicyError
from tests.embodied.commands.test_cli import embodied, refusal
from tests.embodied.demonstrations.examples import FOREIGN
from tests.embodied.support.checked import check
from tests.embodied.support.hub_server import Hub, serving
from tests.policies.openvla.tiny import write_tiny

NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as published ones are: with weights in pickles and code beside the safetensors."""
    folder = write_tiny(tmp_path_factory.mktemp("hub") / "tiny", action_dim=3)
    (folder / "pytorch_model.bin").write_bytes(b"a pickle")
    (folder / "modeling_prismatic.py").write_text("raise SystemExit")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, with no hub to reach, as HF_HOME and HF_ENDPOINT would have it."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf/hub"))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", NOWHERE)
    return tmp_path / "hf/hub"


@pytest.fixture
def server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = Hub()
    with serving(repositories) as address:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"  # as the library makes it when it is imported
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield repositories


def with_policy(**settings: object) -> Config:
    of_vla = {"kind": "openvla", "reads": ["images", "instruction"]}
    return Config(policy=PolicyConfig.model_validate({**of_vla, **settings}))


@pytest.mark.parametrize("text", ["a", "a/b/c", "/a/b", "./a", "../a", "a/b@", "a/..", "~/a", "a b/c", "a/b@x y", "é/"])
def test_what_is_no_name_of_a_repository(text: str) -> None:
    assert hub.Name.parse(text) is None
    with pytest.raises(UserError, match="is no folder here, and no name"):
        hub.checkpoint_folder(text)


def test_a_folder_of_that_name_wins(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org/name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub.checkpoint_folder("org/name") == hub.dataset_folder("org/name") == Path("org/name")
    assert hub.pinned("org/name", Path("org/name")) == "org/name"


def test_a_cache_that_was_copied_is_enough(cache: Path, tiny: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = cache / "models--org--tiny"
    shutil.copytree(tiny, repository / "snapshots" / commit, ignore=shutil.ignore_patterns("*.bin", "*.py"))
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    config = fetched(with_policy(options={"checkpoint": "org/tiny", "unnorm_key": "tiny"}))
    assert config.policy.hub_name == f"org/tiny@{commit}"
    assert config.policy.architecture["checkpoint"] == str(repository / "snapshots" / commit)
    check(config.model_copy(update={"env": config.env.model_copy(update={"cameras": 1})}), "serve")
    with pytest.raises(UserError, match="(?s)org/tiny@v2 is no folder here.*hf download org/tiny --revision v2"):
        hub.checkpoint_folder("org/tiny@v2")


def test_only_data_is_downloaded_and_once(server: Hub, tiny: Path, cache: Path, tmp_path: Path) -> None:
    tiny = Path(shutil.copytree(tiny, tmp_path / "tiny"))
    (tiny / "action_head--100_checkpoint.pt").write_bytes(b"tensors")  # OpenVLA-OFT's, of which tensors alone are read
    commit = server.add("models/org/tiny", tiny, "main", "v1")
    folder = hub.checkpoint_folder("org/tiny@v1")
    assert hub.pinned("org/tiny@v1", folder) == f"org/tiny@{commit}"
    there = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert there == {path.name for path in tiny.iterdir()} - {"pytorch_model.bin", "modeling_prismatic.py"}
    assert all((folder / name).read_bytes() == (tiny / name).read_bytes() for name in there)
    requests = list(server.requests)
    assert hub.checkpoint_folder(f"org/tiny@{commit}") == hub.checkpoint_folder("org/tiny@v1", fetch=False) == folder
    assert server.requests == requests


def test_a_moved_branch_is_another_commit_and_a_run_keeps_its_own(server: Hub, tiny: Path, tmp_path: Path) -> None:
    first = server.add("models/org/tiny", tiny)
    begun = fetched(with_policy(options={"checkpoint": "org/tiny"})).policy.hub_name
    changed = Path(shutil.copytree(tiny, tmp_path / "changed"))
    (changed / "README.json").write_text("{}")
    second = server.add("models/org/tiny", changed)
    assert (begun, fetched(with_policy(options={"checkpoint": "org/tiny"})).policy.hub_name) == (
        f"org/tiny@{first}",
        f"org/tiny@{second}",
    )
    assert begun is not None
    assert hub.kept("org/tiny", begun) == hub.kept("org/tiny@main", begun) == begun
    assert hub.kept(f"org/tiny@{second}", begun) == f"org/tiny@{second}"
    assert hub.kept("org/other", begun) == "org/other"
    assert hub.same_repository("org/tiny", begun) and not hub.same_repository("org/other", begun)
    assert not hub.same_repository("assets/openvla_tiny", None)


def test_a_dataset_is_read_from_its_snapshot(server: Hub, cache: Path) -> None:
    from embodied.demonstrations import Dataset

    server.add("datasets/org/demos", FOREIGN, "v3.0")
    assert len(Dataset(hub.dataset_folder("org/demos@v3.0")).batch([0, 14]).actions) == 2
    with pytest.raises(UserError, match="sft.data: org/demos@main .*has no revision main$"):
        hub.dataset_folder("org/demos@main")
    with pytest.raises(UserError, match="there is no model of that name"):
        hub.checkpoint_folder("org/demos")


def test_a_repository_without_safetensors_is_refused(server: Hub, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "pickled").mkdir()
    for name in ("config.json", "pytorch_model.bin"):
        shutil.copy(tiny / name, tmp_path / "pickled")
    server.add("models/org/pickled", tmp_path / "pickled")
    with pytest.raises(UserError, match="org/pickled holds no safetensors; weights in pickles .* are not read"):
        hub.checkpoint_folder("org/pickled")


def test_without_a_network_the_command_is_named(cache: Path) -> None:
    for fetch, why in ((True, f"{NOWHERE} cannot be reached"), (False, "nothing is downloaded")):
        with pytest.raises(UserError) as refused:
            hub.dataset_folder("org/demos@v3.0", fetch=fetch)
        message = str(refused.value)
        assert "sft.data: org/demos@v3.0 is no folder here, and cannot be had from Hugging Face" in message
        assert f"it is not in the cache {cache}" in message
        assert why in message
        assert "\n  hf download org/demos --repo-type dataset --revision v3.0 --include '*.json' " in message
        assert f"copy the folder HF_HOME of there (~/.cache/huggingface) to {cache.parent} here" in message


def test_a_name_is_for_policies_of_a_checkpoint(cache: Path) -> None:
    with pytest.raises(UserError, match="policy.options.checkpoint 'org/x' is a checkpoint .*policy.kind is flow"):
        fetched(with_policy(kind="flow", options={"checkpoint": "org/x"}))


def test_a_checkpoint_of_another_kind_is_refused_with_its_kind(tiny: Path) -> None:
    pi0 = "tests/golden/pi05/checkpoint_lerobot"
    for kind, folder, right in (("pi0", str(tiny), "openvla or openvla_oft"), ("openvla", pi0, "pi0")):
        says = f"config.json is of {right}, and policy.kind is {kind}: set policy.kind"
        with pytest.raises(PolicyError, match=says):
            check(with_policy(kind=kind, options={"checkpoint": folder}), "serve")


def test_a_checkpoint_of_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"type": "xvla"}))
    with pytest.raises(PolicyError, match="config.json is of 'xvla', which no kind of policies reads"):
        check(with_policy(options={"checkpoint": str(tmp_path)}), "serve")


def test_a_folder_of_the_project_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shipped = load_config("openvla_tiny")
    assert fetched(shipped) == shipped and shipped.policy.hub_name is None
    assert Path(shipped.policy.architecture["checkpoint"], "config.json").is_file()
    absent = with_policy(options={"checkpoint": "assets/absent"})
    with pytest.raises(PolicyError, match="policy.options.checkpoint: assets/absent is not a folder"):
        check(fetched(absent), "serve")


@pytest.mark.slow
def test_an_evaluation_from_the_hub_records_the_commit(tiny: Path, tmp_path: Path) -> None:
    repositories = Hub()
    commit = repositories.add("models/org/tiny", tiny)
    command = ["eval", "openvla_tiny", "--policy.options.checkpoint", "org/tiny", "--policy.options.unnorm-key", "tiny",
               "--eval.episodes", "1", "--eval.videos", "0", "--env.max-episode-steps", "2", "--env.num-envs", "1",
               "--runtime.mode", "inline", "--farm.groups", "1"]  # fmt: skip
    home = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    message = refusal(*command, **home, HF_ENDPOINT=NOWHERE)
    assert "hf download org/tiny --include" in message and f"to {tmp_path / 'hf'} here" in message
    with serving(repositories) as address:
        done = embodied(*command, "--folder", str(tmp_path / "eval"), **home, HF_ENDPOINT=address)
    assert done.returncode == 0, done.stdout + done.stderr
    recorded = yaml.safe_load((tmp_path / "eval/config.yaml").read_text())
    assert recorded["policy"]["options"]["checkpoint"] == f"org/tiny@{commit}"
