"""`embodied push` and `embodied pull` against a hub of this machine: what goes up comes down, or is refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import policies
from embodied.config.files import load_config, saved_config
from embodied.demonstrations import Dataset
from embodied.errors import UserError
from embodied.hub import Name
from embodied.run import checkpoint
from embodied.training.sft import DATA
from embodied_hub import pull, push
from embodied_hub.record import files_of, read_record
from embodied_hub.repository import parsed
from embodied_hub.settings import training_of, without_places
from policies import Policy
from tests.embodied.commands.test_cli import here, refusal_here
from tests.embodied.support.hub_server import LARGE, Hub
from tests.extensions.hub.conftest import NOWHERE, Trained


def pushed(trained: Trained, name: str = "me/warm", what: str | Path = "warm", **options: Any) -> dict[str, Any]:
    return push.run(push.Arguments(str(what), name, runs_dir=trained.runs_dir, **options))


def front_matter(text: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def newest(run: Path) -> Path:
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    return found


def chunk(policy: Policy, demos: Dataset) -> torch.Tensor:
    from dataclasses import replace

    inputs = demos.batch([0, 3, 7], policy.spec.chunk, policy.spec.cameras).inputs()
    return policy.act(replace(inputs, state=None, proprio=None), None).chunk


def test_what_is_pushed_is_pulled_and_acts_alike(trained: Trained, server: Hub, tmp_path: Path) -> None:
    done = pushed(trained, licence="apache-2.0", private=True)
    there = server.contents("models/me/warm")
    assert server.private == {"models/me/warm"} and done["commit"] == server.revisions["models/me/warm", "main"]
    assert there.keys() == {".gitattributes", *done["files"]}
    assert server.uploads[0] == "POST api/repos/create" and server.uploads[-1] == "POST api/models/me/warm/commit/main"
    assert sum(upload.startswith("PUT lfs/") for upload in server.uploads) == sum(n.endswith(LARGE) for n in there)
    found = pull.run(pull.Arguments("me/warm", out=tmp_path / "got"))
    got = {name: path.read_bytes() for name, path in files_of(tmp_path / "got").items()}
    assert got == {name: data for name, data in there.items() if name != ".gitattributes"}
    assert found["not_fetched"] == [] and found["repository"] == f"me/warm@{done['commit']}"
    use = tmp_path / "got/embodied/use.yaml"
    assert found["command"] == f"embodied eval {use} --policy.options.adapter {tmp_path / 'got'}"
    settings = load_config(str(use))
    assert settings.env == trained.config.env and settings.eval == trained.config.eval
    options = settings.policy.architecture | {"adapter": str(tmp_path / "got")}
    own = policies.load(newest(trained.run))
    assert torch.equal(
        chunk(policies.build("openvla", own.spec, 0, **options), trained.demos), chunk(own, trained.demos)
    )


def test_an_adapter_goes_up_alone_and_names_its_base_and_no_folder_of_this_machine(
    trained: Trained, server: Hub
) -> None:
    pushed(trained)
    there = server.contents("models/me/warm")
    assert {"adapter_config.json", "adapter_model.safetensors", "dataset_statistics.json"} <= there.keys()
    assert not any(name.startswith("model") for name in there)
    assert json.loads(there["adapter_config.json"])["base_model_name_or_path"] == "assets/openvla_tiny"
    for folder in {trained.run, trained.runs_dir, trained.demos.folder, Path.cwd()}:
        assert [name for name, data in there.items() if str(folder).encode() in data] == []


def test_a_policy_whose_base_is_a_folder_of_the_user_goes_up_merged(
    trained: Trained, nowhere: None, tmp_path: Path
) -> None:
    run = tmp_path / "runs/mine"
    shutil.copytree(trained.run, run)
    base = str(Path(trained.config.policy.architecture["checkpoint"]).resolve())
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("checkpoint: assets/openvla_tiny", f"checkpoint: {base}"))
    assert saved_config(run / "config.yaml").policy.options["checkpoint"] == base
    pushed(trained, what=run, dry_run=True, out=tmp_path / "out")
    assert (tmp_path / "out/model.safetensors.index.json").exists() or (tmp_path / "out/model.safetensors").exists()
    assert not (tmp_path / "out/adapter_config.json").exists()
    options = load_config(str(tmp_path / "out/embodied/use.yaml")).policy.options
    assert options["checkpoint"] == "me/warm" and not any(name.startswith("lora") for name in options)
    own = policies.load(newest(run))
    merged = policies.build("openvla", own.spec, 0, **{**options, "checkpoint": str(tmp_path / "out")})
    assert (chunk(merged, trained.demos) - chunk(own, trained.demos)).abs().max() < 1e-5
    card = (tmp_path / "out/README.md").read_text()
    assert "and no other program: config.json names no Python code of the network (auto_map)" in card
    assert base not in "".join(path.read_text(errors="ignore") for path in files_of(tmp_path / "out").values())


def test_the_card_has_results_data_versions_and_the_lines_that_load_it(trained: Trained, server: Hub) -> None:
    pushed(trained, licence="mit")
    card = server.contents("models/me/warm")["README.md"].decode()
    result = json.loads((trained.run / "eval.json").read_text())
    front = front_matter(card)
    assert (front["license"], front["library_name"], front["pipeline_tag"]) == ("mit", "peft", "robotics")
    metric = front["model-index"][0]["results"][0]["metrics"][0]
    assert metric["value"] == result["success_rate"] and front["model-index"][0]["name"] == "warm"
    sha256 = result["protocol"]["sha256"]
    assert metric["args"] == {"episodes": 2, "protocol_sha256": sha256} and f"sha256 `{sha256}`" in card
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    between = f"{100 * result['success_low']:.1f} to {100 * result['success_high']:.1f}"
    rate = f"{100 * result['success_rate']:.1f}"
    for name in ("the base, untouched", "this policy"):
        row = next(row for row in rows if row[0] == name)
        assert row[3] == "2" and (name != "this policy" or row == [name, rate, between, "2"])
    assert "model = PeftModel.from_pretrained(network, folder)" in card
    assert "embodied eval warm/embodied/use.yaml --policy.options.adapter warm" in card
    assert any(row[0] == "pictures" and row[1].startswith("upright") for row in rows)
    data = next(row for row in rows if row[0] == "demos")
    assert data[2:5] == ["4", "4", "4"] and len(data[5].strip("`")) == 64
    assert [row[1] for row in rows if row[0] == "torch"] == [torch.__version__]
    assert "embodied sft embodied/training.yaml" in card and "lora_rank: 16" in card


def test_a_run_without_an_evaluation_says_so(trained: Trained, nowhere: None, tmp_path: Path) -> None:
    run = tmp_path / "warm"
    shutil.copytree(trained.run, run, ignore=shutil.ignore_patterns("evals"))
    pushed(trained, what=run, dry_run=True, out=tmp_path / "out")
    card = (tmp_path / "out/README.md").read_text()
    assert "No evaluation of this checkpoint is recorded" in card and "model-index" not in front_matter(card)


def test_a_repository_is_replaced_by_its_own_run_alone(trained: Trained, server: Hub, tmp_path: Path) -> None:
    first = pushed(trained)
    stale = server.commit(
        "models/me/warm", "main", server.commits["models/me/warm", first["commit"]] | {"old.json": server.keep(b"{}")}
    )
    again = pushed(trained)
    assert again["commit"] != stale and "old.json" not in server.contents("models/me/warm")
    other = tmp_path / "runs/other"
    shutil.copytree(trained.run, other)
    (other / "metrics.jsonl").write_text('{"iteration": 1, "wall_s": 1.5}\n')
    with pytest.raises(
        UserError, match=r"me/warm holds the run warm \(\w{12}\), and run other is another: .*--replace"
    ):
        pushed(trained, what=other)
    assert server.revisions["models/me/warm", "main"] == again["commit"]
    pushed(trained, what=other, revision="second")  # a branch of its own holds nothing yet
    assert server.revisions["models/me/warm", "main"] == again["commit"]
    assert server.revisions["models/me/warm", "second"] != again["commit"]
    pushed(trained, what=other, replace=True)
    assert json.loads(server.contents("models/me/warm")["embodied/record.json"])["name"] == "other"


def test_what_others_have_put_there_is_left_alone(trained: Trained, server: Hub) -> None:
    commit = server.add("models/me/warm", trained.demos.folder)
    with pytest.raises(UserError, match="me/warm holds .* files that no `embodied push` has written, and run warm is"):
        pushed(trained)
    assert server.revisions["models/me/warm", "main"] == commit


def test_a_dataset_is_pushed_with_the_tag_that_lerobot_asks_for(server: Hub, trained: Trained, tmp_path: Path) -> None:
    demos = trained.demos
    pushed(trained, "me/demos", demos.folder, licence="cc-by-4.0")
    done = pushed(trained, "me/demos", demos.folder, licence="cc-by-4.0")
    assert server.revisions["datasets/me/demos", "v3.0"] == done["commit"]
    there = server.contents("datasets/me/demos")
    own = {name: path.read_bytes() for name, path in files_of(demos.folder).items()}
    assert {name: there[name] for name in own} == own
    card = there["README.md"].decode()
    assert front_matter(card)["tags"] == ["LeRobot", "embodied-farm"]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in card.splitlines() if line.startswith("|")]
    said = {row[0]: row[1] for row in cells}
    assert (said["episodes"], said["env steps"], said["solved"]) == ("4", str(len(demos)), "4 of 4")
    assert said["task"] == "tabletop/reach" and said["policy"] == "reach_expert" and said["`action`"] == "float32"
    found = pull.run(pull.Arguments("datasets/me/demos", out=tmp_path / "got"))
    assert found["command"] == f"embodied sft CONFIG --data {tmp_path / 'got'}"
    assert len(Dataset(tmp_path / "got")) == len(demos)
    assert {name: path.read_bytes() for name, path in files_of(tmp_path / "got").items() if name in own} == own
    cached = pull.run(pull.Arguments("me/demos@v3.0"))
    assert cached["command"] == f"embodied sft CONFIG --data me/demos@{done['commit']}"


def test_a_dry_run_needs_no_network_and_no_token(
    trained: Trained, nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    done = pushed(trained, dry_run=True, out=tmp_path / "out")
    sizes = {name: path.stat().st_size for name, path in files_of(tmp_path / "out").items()}
    assert done["files"] == sizes and done["folder"] == str(tmp_path / "out")
    copied = pushed(trained, "me/demos", trained.demos.folder, dry_run=True, out=tmp_path / "data")
    assert not any(path.is_symlink() for path in (tmp_path / "data").rglob("*"))
    assert "data/chunk-000/file-000.parquet" in copied["files"]
    with pytest.raises(UserError, match="out exists: name another folder"):
        pushed(trained, dry_run=True, out=tmp_path / "out")


def logged_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", "/nowhere/token")


def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize(
    ("typed", "before", "message"),
    [
        (["push", "warm", "me"], None, "'me' is no name of a repository: org/name"),
        (["push", "warm", "me/x/y"], None, "'me/x/y' is no name of a repository"),
        (["push", "cold", "me/x"], None, "cold is neither a run .* nor a dataset .no cold/meta/info.json"),
        (["push", "warm", "datasets/me/x"], None, "run warm is a model, and datasets/me/x is the name of a dataset"),
        (["push", "warm", "me/x"], logged_out, "no token is here: run `hf auth login`, or set HF_TOKEN"),
        (["push", "warm", "me/x"], offline, "HF_HUB_OFFLINE is set, so the hub is not asked"),
        (["push", "warm", "me/x"], None, f"{NOWHERE} cannot be reached .*: look at the network"),
        (["pull", "me/x"], None, f"{NOWHERE} cannot be reached"),
        (["pull", "me/x"], offline, "HF_HUB_OFFLINE is set"),
        (["pull", "x"], None, "'x' is no name of a repository"),
        (["pull", "me/x", "--out", "."], None, ". exists: name another folder with --out"),
    ],
)
def test_a_mistake_has_one_message(
    typed: list[str],
    before: Callable[[pytest.MonkeyPatch], None] | None,
    message: str,
    trained: Trained,
    nowhere: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import re

    if before is not None:
        before(monkeypatch)
    runs = ["--runs-dir", str(trained.runs_dir)] if typed[0] == "push" else []
    assert re.search(message, refusal_here(*typed, *runs))


def test_a_run_without_a_checkpoint_and_one_without_a_community_are_refused(
    trained: Trained, server: Hub, tmp_path: Path
) -> None:
    run = tmp_path / "warm"
    shutil.copytree(trained.run, run, ignore=shutil.ignore_patterns("checkpoints"))
    assert "has no checkpoint yet" in refusal_here("push", str(run), "me/x")
    assert not server.commits


def test_what_is_not_there_and_what_was_changed_is_not_pulled(trained: Trained, server: Hub, tmp_path: Path) -> None:
    assert "there is no policy or dataset me/x at" in refusal_here("pull", "me/x")
    assert "there is no policy or dataset me/x with a revision v9" in refusal_here("pull", "me/x@v9")
    pushed(trained)
    changed = dict(server.contents("models/me/warm"))
    for name, data in changed.items():
        path = tmp_path / "changed" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.replace(b"lora_", b"LORA_") if name == "adapter_config.json" else data)
    server.add("models/me/warm", tmp_path / "changed")
    message = refusal_here("pull", "me/warm", "--out", str(tmp_path / "got"))
    assert "adapter_config.json of me/warm is not the file that was pushed" in message
    assert not (tmp_path / "got").exists()


def test_a_damaged_cache_is_named(trained: Trained, server: Hub) -> None:
    pushed(trained)
    folder = Path(pull.run(pull.Arguments("me/warm"))["folder"])
    weights = (folder / "adapter_model.safetensors").resolve()
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(bytes(data))
    with pytest.raises(UserError, match="adapter_model.safetensors is not the file that the hub lists in me/warm"):
        pull.run(pull.Arguments("me/warm"))


def test_a_strangers_checkpoint_is_pulled_without_its_code(server: Hub, trained: Trained, tmp_path: Path) -> None:
    folder = tmp_path / "theirs"
    shutil.copytree(trained.config.policy.architecture["checkpoint"], folder)
    (folder / "modeling_prismatic.py").write_text("raise SystemExit")
    (folder / "optimizer.pt").write_bytes(b"a pickle")
    commit = server.add("models/org/theirs", folder)
    status, said = here("pull", "org/theirs", "--json", str(tmp_path / "result.json"))
    result = json.loads((tmp_path / "result.json").read_text())
    assert status == 0 and "a checkpoint that no `embodied push` has written" in " ".join(said.split())
    assert result["not_fetched"] == ["modeling_prismatic.py", "optimizer.pt"]
    wanted = f"embodied eval CONFIG --policy.kind openvla --policy.options.checkpoint org/theirs@{commit}"
    assert result["command"] == wanted
    assert load_file(Path(result["folder"]) / "model-00001-of-00002.safetensors")


def test_a_linked_folder_of_a_dataset_goes_up_and_paths_of_this_machine_do_not(
    trained: Trained, server: Hub, tmp_path: Path
) -> None:
    shutil.copytree(trained.demos.folder, tmp_path / "linked")
    (tmp_path / "linked/data").rename(tmp_path / "elsewhere")
    (tmp_path / "linked/data").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "linked/meta/here").symlink_to(tmp_path / "linked")  # it leads back
    path = tmp_path / "linked/meta/embodied.json"
    said = json.loads(path.read_text())
    said["policy"]["checkpoint"] = "/home/someone/runs/reach-1/checkpoints/000060"
    path.write_text(json.dumps(said))
    (tmp_path / "linked/meta/import.json").write_text('{"source": "~/recordings/bridge"}')
    pushed(trained, "me/linked", tmp_path / "linked")
    there = server.contents("datasets/me/linked")
    assert there.keys() >= files_of(trained.demos.folder).keys() and not any("here" in name for name in there)
    assert json.loads(there["meta/embodied.json"])["policy"]["checkpoint"] == "reach-1"
    assert json.loads(there["meta/import.json"]) == {"source": "bridge"}
    assert json.loads(path.read_text()) == said
    pull.run(pull.Arguments("me/linked"))  # the record has the digests of what went up


def test_a_link_of_a_dataset_that_leads_nowhere_is_named(trained: Trained, nowhere: None, tmp_path: Path) -> None:
    shutil.copytree(trained.demos.folder, tmp_path / "linked")
    (tmp_path / "linked/meta/notes.md").symlink_to(tmp_path / "gone")
    said = refusal_here("push", str(tmp_path / "linked"), "me/linked", "--dry-run", "--out", str(tmp_path / "out"))
    assert f"linked/meta/notes.md is a link to a file that is not there ({tmp_path / 'gone'})" in said
    assert not (tmp_path / "out").exists()


def test_a_record_that_would_write_to_a_terminal_is_refused(tmp_path: Path) -> None:
    fields = {"kind": "dataset", "name": "demos", "identity": "0" * 64, "version": "1.0"}
    path = tmp_path / "record.json"
    path.write_text(json.dumps(fields))
    assert read_record(path).name == "demos"
    path.write_text(json.dumps(fields | {"name": "demos\x1b[2J"}))
    with pytest.raises(UserError, match="is no record of `embodied push`"):
        read_record(path)


def test_a_checkpoint_of_another_run_is_refused(trained: Trained, nowhere: None, tmp_path: Path) -> None:
    shutil.copytree(trained.run, tmp_path / "other")
    with pytest.raises(UserError, match="belongs to the run other .*and not to .*warm: push that run"):
        pushed(trained, checkpoint=newest(tmp_path / "other"), dry_run=True, out=tmp_path / "out")
    pushed(trained, checkpoint=newest(trained.run), dry_run=True, out=tmp_path / "out")


def test_a_public_repository_takes_nothing_private(trained: Trained, server: Hub) -> None:
    first = pushed(trained, "me/demos", trained.demos.folder)
    for options in ({}, {"replace": True}, {"revision": "second"}):
        with pytest.raises(UserError, match="datasets/me/demos is public, and --private makes new"):
            pushed(trained, "me/demos", trained.demos.folder, private=True, **options)
    assert server.revisions["datasets/me/demos", "main"] == first["commit"]


def test_settings_go_up_without_hosts_and_folders(trained: Trained) -> None:
    assert trained.config.runtime.mode == "inline" and "runtime" not in training_of(trained.config)
    farm = trained.config.farm.model_copy(update={"nodes": ("node-7",)})
    assert "node-7" not in str(training_of(trained.config.model_copy(update={"farm": farm})))
    given = ["/a/b", "~/b", "~me/b", "../../b", "file:///a/b", "/a/b/checkpoints/000060", "org/b", "~5", "..."]
    assert without_places(given) == ["b", "b", "b", "b", "b", "b", "org/b", "~5", "..."]


def test_a_home_that_is_the_root_takes_nothing_from_the_card(
    trained: Trained, nowhere: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/")
    pushed(trained, licence="https://example.org/licence", dry_run=True, out=tmp_path / "out")
    assert "`https://example.org/licence`" in (tmp_path / "out/README.md").read_text()


def test_a_file_that_the_record_names_and_the_hub_lacks_is_refused(trained: Trained, server: Hub) -> None:
    done = pushed(trained, "me/demos", trained.demos.folder)
    files = dict(server.commits["datasets/me/demos", done["commit"]])
    del files["meta/stats.json"]
    server.commit("datasets/me/demos", "main", files)
    with pytest.raises(UserError, match="me/demos lacks meta/stats.json, which embodied/record.json names: somebody"):
        pull.run(pull.Arguments("me/demos"))


def test_a_pulled_folder_has_no_more_than_is_fetched(trained: Trained, server: Hub, tmp_path: Path) -> None:
    from huggingface_hub import snapshot_download

    shutil.copytree(trained.demos.folder, tmp_path / "theirs")
    (tmp_path / "theirs/run.py").write_text("raise SystemExit")
    server.add("datasets/org/x", tmp_path / "theirs")
    snapshot_download("org/x", repo_type="dataset")
    found = pull.run(pull.Arguments("org/x", out=tmp_path / "got"))
    assert files_of(tmp_path / "got").keys() == files_of(trained.demos.folder).keys()
    assert found["not_fetched"] == ["run.py"]


def test_names_in_square_brackets_are_printed_as_they_are(trained: Trained, server: Hub, tmp_path: Path) -> None:
    source = tmp_path / "[bold]demos"
    shutil.copytree(trained.demos.folder, source)
    pushed(trained, "me/demos", source)
    status, said = here("pull", "me/demos", "--out", str(tmp_path / "[red]"))
    assert status == 0 and "the dataset [bold]demos, pushed" in said and f"{tmp_path}/[red]/README.md" in said


def test_a_disc_that_takes_no_files_is_not_called_a_network(
    trained: Trained, server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed(trained, "me/demos", trained.demos.folder)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "file/hub"))
    with pytest.raises(UserError, match="file/.*: Not a directory: free it, or set HF_HOME"):
        pull.run(pull.Arguments("me/demos"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.raises(UserError, match="temporary folder cannot be written .Not a directory.: set TMPDIR"):
        pushed(trained, "me/new", trained.demos.folder)


def test_slashes_of_a_revision_are_no_part_of_the_name() -> None:
    assert parsed("datasets/org/name@refs/pr/1") == (Name("org/name", "refs/pr/1"), "dataset")
    assert parsed("org/name@refs/pr/1") == (Name("org/name", "refs/pr/1"), None)


def test_the_card_names_the_organisation_of_a_dataset(trained: Trained, nowhere: None, tmp_path: Path) -> None:
    shutil.copytree(trained.run, tmp_path / "warm")
    path = tmp_path / "warm" / DATA
    text = path.read_text()
    assert str(trained.demos.folder) in text
    path.write_text(text.replace(str(trained.demos.folder), f"org/reach@{'0' * 40}"))
    pushed(trained, what=tmp_path / "warm", dry_run=True, out=tmp_path / "out")
    assert f"org/reach@{'0' * 40}" in (tmp_path / "out/README.md").read_text()
