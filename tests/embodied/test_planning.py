"""From a configuration to a plan: what is measured, what is refused, and that a planned run computes the same."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.numpy import load_file

import schedulers
from embodied import checkpoint, cli
from embodied.config_files import parse_config
from embodied.errors import UserError
from embodied.execution.session import Session, open_session
from embodied.planning import clusters
from embodied.planning import profiler as profiling
from embodied.planning import run_plans as planning
from embodied.planning.profiler import profile_config
from embodied.reporting.metrics import read
from embodied.run_folder import prepare_run
from embodied.runtime.ray_runtime import RayRuntime
from embodied.training import loop as training
from schedulers import Plan, PlanError, Profile

CORES = sorted(os.sched_getaffinity(0))[:2]
ENVS = 4
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "iterations": 2,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": 9},
    "policy": {"chunk": 2, "options": {"widths": [16]}},
    "rollout": {"decisions": 8},
    "optim": {"epochs": 1, "minibatch": 16, "threads": 1},
    "eval": {"episodes": 4, "videos": 0},
    "runtime": {"mode": "inline", "trace": False},
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


@pytest.fixture(scope="module")
def profile(few_iterations: None, ray_runtime: RayRuntime) -> Profile:
    """Measured as `embodied profile` does, by workers in processes of their own."""
    config = parse_config({**SETTINGS, "runtime": {"deadline_s": 120}}, "test")
    return profile_config(config, Session(config, ray_runtime, tuple(CORES)), Path())


@pytest.fixture
def files(profile: Profile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with `small.yaml` and its `profile.json`."""
    write_config(tmp_path / "small.yaml", SETTINGS)
    schedulers.save(profile, tmp_path / "profile.json")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_config(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(yaml.safe_dump(settings))


class Said:
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
        status, said = self.run(*arguments)
        assert status == 0, said
        return said

    def refused(self, *arguments: str) -> str:
        """The message of a command that is refused before it builds an environment."""
        status, said = self.run(*arguments)
        assert status == 2, said
        assert "Building" not in said, "workers had been started already"
        return said


@pytest.fixture
def embodied(capsys: pytest.CaptureFixture[str]) -> Said:
    return Said(capsys)


# --- what is measured


def test_every_component_is_measured_on_one_core_and_on_all(profile: Profile) -> None:
    assert profile.workflow == "ppo"
    assert set(profile.components) == {"physics", "policy", "learner"}
    for name, component in profile.components.items():
        measured = {(point.batch, point.devices) for point in component.points}
        assert measured == {(batch, devices) for batch in (ENVS // 2, ENVS) for devices in (1, len(CORES))}, name
        for point in component.points:
            assert 0 < point.seconds < 10 and 0 <= point.low <= point.seconds <= point.high, (name, point)
        assert component.pool == "cores" and component.beside >= 1 and component.variation >= 0
    (shared,) = profile.together
    assert shared.components == ("physics", "policy") and (shared.batch, shared.groups) == (ENVS, 2)
    assert 0 <= shared.low <= shared.seconds <= shared.high and shared.seconds > 0


def test_memory_and_switches_are_measured(profile: Profile) -> None:
    physics, policy, learner = (profile.components[name] for name in ("physics", "policy", "learner"))
    # A process with Python, NumPy and MuJoCo in it; the tabletop's environments are small.
    assert 2e7 < physics.resident_bytes + physics.bytes_per_item * ENVS < 2e9
    # Adam keeps two more numbers for each parameter.
    assert 0 < policy.process_bytes < learner.process_bytes < 4 * policy.process_bytes
    for component in (policy, learner):
        assert component.unload_s > 0
        assert component.load_s > 0
    # Ranks would hold the whole policy.
    assert (physics.lends, policy.lends, learner.lends) == (False, False, True)


def test_a_profile_says_what_it_belongs_to(profile: Profile) -> None:
    assert {"hardware.processor", "hardware.cores", "hardware.accelerator"} <= set(profile.fingerprint)
    assert {"software.torch", "software.python"} <= set(profile.fingerprint)
    sections = {"workflow", "env", "extra_tasks", "policy", "rollout", "advantage", "loss", "optim"}
    assert sections == {key.removeprefix("work.") for key in profile.fingerprint if key.startswith("work.")}
    assert json.loads(profile.fingerprint["work.env"])["num_envs"] == ENVS


def test_a_profile_is_equal_when_it_is_read_again(profile: Profile, tmp_path: Path) -> None:
    schedulers.save(profile, tmp_path / "profile.json")
    assert schedulers.load(Profile, tmp_path / "profile.json") == profile


def test_drawing_is_measured_where_the_policy_looks(tmp_path: Path) -> None:
    config = parse_config(IMAGES, "test")
    with open_session(config) as session:
        found = profile_config(config, replace(session, cores=tuple(CORES)), tmp_path)
    assert set(found.components) == {"physics", "render", "policy", "learner"}
    assert all(point.seconds > 0 for point in found.components["render"].points)
    assert found.components["render"].unload_s > 0 and found.components["render"].load_s > 0
    assert found.transfers["render>policy"] >= 32 * 32 * 3 > found.transfers["physics>render"] > 0
    assert not list(tmp_path.iterdir()), "measuring leaves nothing behind"


def test_environments_that_cannot_be_halved_are_refused(embodied: Said, files: Path) -> None:
    said = embodied.refused("profile", "small.yaml", "--env.num-envs", "3")
    assert "3 environments do not divide" in said and "env.num_envs" in said


def test_the_profile_command_makes_the_folder_it_writes_to(embodied: Said, files: Path) -> None:
    embodied.done("profile", "small.yaml", "--out", "deep/er/profile.json", "--json", "result.json")
    written = json.loads(Path("deep/er/profile.json").read_text())
    result = json.loads(Path("result.json").read_text())
    assert result["components"].keys() == written["components"].keys() and result["profile"] == "deep/er/profile.json"


def test_a_folder_that_cannot_be_made_is_refused_before_measuring(embodied: Said, files: Path) -> None:
    said = embodied.refused("profile", "small.yaml", "--out", "small.yaml/profile.json")
    assert "small.yaml" in said and "--out" in said
    assert "--out" in embodied.refused("plan", "small.yaml", "--out", "small.yaml")


# --- profiles that do not belong


AUTO = ["train", "--plan.mode", "auto", "--name", "it", "--plan.profile"]


@pytest.mark.parametrize(
    ("verb", "change", "named"),
    [
        (["plan", "--profile"], ["--optim.epochs", "3"], "optim"),
        (["plan", "--profile"], ["--env.task", "tabletop/push"], "env"),
        (["plan", "--profile"], ["--workflow", "grpo", "--rollout.episode-group", "2"], "workflow"),
        (["compare", "--profile"], ["--env.num-envs", "8"], "env"),
        (AUTO, ["--optim.epochs", "3"], "optim"),
        (AUTO, ["--env.num-envs", "8"], "env"),
    ],
)
def test_a_profile_of_other_settings_is_refused(
    verb: list[str], change: list[str], named: str, embodied: Said, files: Path
) -> None:
    said = embodied.refused(verb[0], "small.yaml", *verb[1:], "profile.json", *change)
    assert "profile.json was measured with other settings of" in said and named in said
    assert "embodied profile" in said, "what to do is not said"
    assert not any(Path(name).exists() for name in ("runs/it", "compare", "plan"))


def test_settings_that_times_do_not_depend_on_may_differ(embodied: Said, files: Path) -> None:
    embodied.done("plan", "small.yaml", "--iterations", "7", "--eval.episodes", "3", "--seed", "9")


def test_a_profile_of_other_hardware_is_refused_unless_that_is_wanted(
    embodied: Said, files: Path, profile: Profile
) -> None:
    other = replace(profile, fingerprint={**profile.fingerprint, "hardware.processor": "Abacus 9"})
    schedulers.save(other, "profile.json")
    said = embodied.refused("plan", "small.yaml")
    assert "other hardware" in said and "Abacus 9" in said and "--plan.any-hardware" in said
    embodied.done("plan", "small.yaml", "--plan.any-hardware")
    said = embodied.refused("plan", "small.yaml", "--plan.any-hardware", "--optim.epochs", "3")
    assert "optim" in said, "other settings are no other hardware"


def test_a_profile_of_another_workflow_is_refused(files: Path, profile: Profile) -> None:
    config = parse_config(SETTINGS, "test")
    schedulers.save(replace(profile, workflow="grpo"), "profile.json")
    with pytest.raises((UserError, PlanError), match="profile.json.*'grpo', not of 'ppo'"):
        planning.checked_profile(Path("profile.json"), config, planning.sized_workflow(config), any_hardware=True)


def test_files_that_are_no_profile_are_refused(embodied: Said, files: Path) -> None:
    text = Path("profile.json").read_text()
    Path("half.json").write_text(text[: len(text) // 2])
    assert "'half.json' cannot be read as JSON" in embodied.refused("plan", "small.yaml", "--profile", "half.json")
    said = embodied.refused("plan", "small.yaml", "--profile", "missing.json")
    assert "there is no profile file 'missing.json'" in said
    Path("typed.json").write_text(text.replace('"seconds"', '"second"', 1))
    said = embodied.refused("plan", "small.yaml", "--profile", "typed.json")
    assert "typed.json" in said and "unknown key 'second'; nearest: seconds" in said
    data = json.loads(text)
    data["components"]["policy"]["points"][0]["seconds"] = -1
    Path("negative.json").write_text(json.dumps(data))
    assert "cannot be less than 0" in embodied.refused("plan", "small.yaml", "--profile", "negative.json")


# --- embodied plan


def test_a_plan_comes_with_its_reasons_its_timeline_and_its_picture(embodied: Said, files: Path) -> None:
    said = embodied.done("plan", "small.yaml", "--json", "result.json")
    result = json.loads(Path("result.json").read_text())
    plan = schedulers.load(Plan, "plan/plan.json")
    assert plan == schedulers.from_data(Plan, result["plan"])
    assert plan.why and all(sentence in said for sentence in plan.why)
    assert plan.prediction is not None and result["iteration_s"] == plan.prediction.iteration_s
    assert "collocated" in result["modes"] and result["modes"][plan.mode] == result["iteration_s"]
    assert plan.prediction.lower_bound_s <= min(result["modes"].values()) * (1 + 1e-9)
    events = json.loads(Path("plan/predicted.json").read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert {"physics", "policy", "learner"} <= {event["name"].split()[0] for event in work}
    longest = max(event["ts"] + event["dur"] for event in work) / 1e6
    assert longest == pytest.approx(plan.prediction.iteration_s)
    assert Path("plan/predicted.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("mode", ["collocated", "hybrid", "disaggregated"])
def test_one_mode_can_be_asked_for(mode: str, embodied: Said, files: Path) -> None:
    embodied.done("plan", "small.yaml", "--plan.mode", mode)
    assert schedulers.load(Plan, "plan/plan.json").mode == mode


def test_a_mode_that_does_not_exist_is_refused(embodied: Said, files: Path) -> None:
    said = embodied.refused("plan", "small.yaml", "--plan.mode", "colocated")
    assert "colocated" in said and "'collocated'" in said
    write_config(Path("wrong.yaml"), {**SETTINGS, "plan": {"mode": "colocated"}})
    said = embodied.refused("train", "wrong.yaml")
    assert "plan.mode" in said and "'collocated'" in said


def test_a_cluster_that_one_does_not_have(embodied: Said, files: Path) -> None:
    # As docs/planning.md writes it.
    Path("cluster.yaml").write_text(
        "nodes:\n  - {count: 64, cores: 96, accelerators: 8, memory_bytes: 1.0e12, accelerator_bytes: 80.0e9}\n"
        "link_bytes_per_s: 5.0e10\n"
    )
    found = clusters.read_cluster("cluster.yaml", "cpu")
    assert len(found.nodes) == 64 and found.nodes[63].cores == 96 and found.link_bytes_per_s == 5e10
    assert (found.nodes[0].memory_bytes, found.nodes[0].accelerator_bytes) == (1e12, 80e9)
    said = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml")
    plan = schedulers.load(Plan, "plan/plan.json")
    names = {node.name for node in found.nodes}
    assert {span.node for phase in plan.phases for p in phase.placements for span in p.devices} <= names
    assert "per iteration" in said


def test_a_cluster_file_may_have_a_home(embodied: Said, files: Path) -> None:
    """What does not travel is planned for it, whatever the other node could do."""
    Path("cluster.yaml").write_text(
        "nodes:\n  - {name: small, cores: 2}\n  - {name: large, cores: 64}\nhome: small\nlink_s: 1.0e-9\n"
    )
    said = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml")
    plan = schedulers.load(Plan, "plan/plan.json")
    for phase in plan.phases:
        for placement in phase.placements:
            assert placement.components == ("physics",) or placement.nodes == {"small"}
    assert "On small alone" in said or "Nothing is on large" in said


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("nodes: [{name: a, cores: 4}]\nhome: b\n", "home 'b' is none of its nodes"),
        ("nodes: []\n", "the cluster has no nodes"),
        ("nodes: [{count: 0, cores: 4}]\n", "at least 1, not 0"),
        ("nodes: [{cores: 0}]\n", "0 cores"),
        ("nodes: [{coers: 4}]\n", "unknown key 'coers'; nearest: cores"),
        ("nodes: [{cores: many}]\n", "cores is a whole number"),
        ("nodes: [{cores: 4}\n", "is not valid YAML"),
        ("", "a cluster is a mapping"),
    ],
)
def test_a_cluster_file_with_a_mistake_is_refused(text: str, named: str, embodied: Said, files: Path) -> None:
    Path("cluster.yaml").write_text(text)
    said = embodied.refused("plan", "small.yaml", "--cluster", "cluster.yaml")
    assert named in said and "cluster.yaml" in said
    assert not Path("plan").exists(), "nothing may be written"


def test_a_cluster_file_that_is_not_there_or_no_text_is_refused(embodied: Said, files: Path) -> None:
    assert "no cluster file 'clstr.yaml'" in embodied.refused("plan", "small.yaml", "--cluster", "clstr.yaml")
    Path("binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "binary.yaml is not valid YAML" in embodied.refused("plan", "small.yaml", "--cluster", "binary.yaml")


# --- plans in runs


def hand_written(**changes: Any) -> dict[str, Any]:
    """A hybrid plan as somebody would write it; `changes` are made to it."""
    first, last = 0, len(CORES) - 1
    return {
        "workflow": "ppo",
        "mode": "hybrid",
        "groups": 2,
        "phases": [
            {
                "micro_batch": ENVS,
                "placements": [
                    {"components": ["physics"], "devices": [f"here:cores:{first}"]},
                    {"components": ["policy"], "devices": [f"here:cores:{last}"]},
                ],
            },
            {
                "micro_batch": ENVS,
                "placements": [{"components": ["learner"], "devices": [f"here:cores:{first}-{last}"]}],
            },
        ],
    } | changes


def train(folder: Path, **sections: Any) -> Path:
    """A short run inline; its folder."""
    config = parse_config({**SETTINGS, **sections}, "test")
    found = prepare_run(config, folder, resume=folder.exists())
    with open_session(config) as session:
        training.train(config, folder, replace(session, cores=tuple(CORES)), found)
    return folder


def assert_same_parameters(found: Path, expected: Path) -> None:
    folders = [checkpoint.latest(run / "checkpoints") for run in (found, expected)]
    assert folders[0] is not None and folders[1] is not None and folders[0].name == folders[1].name
    for path in folders[1].rglob("*.safetensors"):
        tensors, others = load_file(folders[0] / path.relative_to(folders[1])), load_file(path)
        assert tensors.keys() == others.keys()
        assert all(tensors[key].tobytes() == other.tobytes() for key, other in others.items()), path.name


def timeless(row: Mapping[str, Any]) -> dict[str, Any]:
    clock = ("time/", "farm/")
    return {k: v for k, v in row.items() if not k.startswith(clock) and k not in ("wall_s", "learner/update_s")}


@pytest.fixture(scope="module")
def configured(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs without a plan, by their number of groups."""
    folder = tmp_path_factory.mktemp("configured")
    return {groups: train(folder / str(groups), farm={"groups": groups}) for groups in (1, 2, 4)}


@pytest.fixture(scope="module")
def two_cores() -> Iterator[None]:
    if len(CORES) < 2:
        # Nothing to try on a machine of one core: a plan for two would be refused, which another test sees.
        pytest.skip("plans that split cores need two of them")
    yield


def test_a_run_keeps_the_plan_it_was_given_and_computes_the_same(
    embodied: Said, files: Path, configured: dict[int, Path]
) -> None:
    options = ["--plan.mode", "auto", "--plan.profile", "profile.json"]
    said = embodied.done("train", "small.yaml", *options, "--name", "it", "--json", "r.json")
    plan = schedulers.load(Plan, "runs/it/plan.json")
    assert Path("runs/it/profile.json").read_text() == Path("profile.json").read_text(), "what it was planned with"
    result = json.loads(Path("r.json").read_text())
    assert plan.prediction is not None and all(sentence in said for sentence in plan.why)
    assert (result["mode"], result["predicted_iteration_s"]) == (plan.mode, plan.prediction.iteration_s)
    assert_same_parameters(Path("runs/it"), configured[plan.groups[0]])
    rows = [timeless(row) for row in read(configured[plan.groups[0]])]
    for row, other in zip(map(timeless, read(Path("runs/it"))), rows, strict=True):
        assert row == {**other, "time/switch_s": 0.0} or row == other
    page = Path("runs/it/report.html").read_text()
    assert "<h2>Plan</h2>" in page and "Predicted" in page


@pytest.mark.parametrize("mode", ["collocated", "disaggregated", "hybrid"])
def test_every_mode_computes_the_same(
    mode: str, two_cores: None, files: Path, configured: dict[int, Path], profile: Profile
) -> None:
    run = train(files / mode, plan={"mode": mode, "profile": "profile.json"})
    plan = schedulers.load(Plan, run / "plan.json")
    assert plan.mode == mode
    assert_same_parameters(run, configured[plan.groups[0]])


def test_a_run_without_a_profile_measures_and_keeps_one_and_goes_on_with_it(files: Path) -> None:
    run = train(files / "run", plan={"mode": "auto"}, iterations=1)
    before = (run / "profile.json").stat().st_mtime_ns
    schedulers.load(Profile, run / "profile.json")
    plan = (run / "plan.json").read_text()
    train(run, plan={"mode": "auto"}, iterations=2)
    assert (run / "profile.json").stat().st_mtime_ns == before, "measured again"
    assert (run / "plan.json").read_text() == plan
    assert [row["iteration"] for row in read(run)] == [1, 2]


@pytest.mark.parametrize("unload", [False, True])
def test_a_plan_that_was_written_by_hand_runs(
    unload: bool, two_cores: None, files: Path, configured: dict[int, Path]
) -> None:
    Path("mine.json").write_text(json.dumps(hand_written(unload=unload)))
    run = train(files / "run", plan={"file": "mine.json"})
    kept = schedulers.load(Plan, run / "plan.json")
    assert (kept.mode, kept.groups, kept.unload, kept.prediction) == ("hybrid", (2,), unload, None)
    assert_same_parameters(run, configured[2])


def without(component: str) -> list[Any]:
    return [
        {**phase, "placements": [p for p in phase["placements"] if component not in p["components"]]}
        for phase in hand_written()["phases"]
    ]


def placed_at(device: str) -> list[Any]:
    phases = hand_written()["phases"]
    phases[1]["placements"][0]["devices"] = [device]
    return phases


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"phases": placed_at("here:cores:900")}, "takes here:cores:900, but node 'here' has here:cores:0"),
        ({"phases": placed_at("hear:cores:0")}, "node 'hear', which the cluster does not have; nearest: here"),
        ({"phases": placed_at("here:accelerators:0")}, "has no accelerators"),
        ({"phases": without("learner")[:1]}, "leaves out learner"),
        ({"phases": without("policy")}, "leaves out policy"),
        ({"groups": 3}, "3 groups do not divide the 4 items of the loop; nearest: 1, 2, 4"),
        ({"mode": "hybird"}, "nearest: hybrid"),
        ({"mode": "collocated"}, "its phases are hybrid"),
        ({"workflow": "grpo"}, "for workflow 'grpo', not for 'ppo'"),
        ({"grups": 2}, "unknown key 'grups'; nearest: groups"),
    ],
)
def test_a_plan_that_cannot_run_is_refused(
    changes: dict[str, Any], named: str, two_cores: None, embodied: Said, files: Path
) -> None:
    Path("mine.json").write_text(json.dumps(hand_written(**changes)))
    said = embodied.refused("train", "small.yaml", "--plan.file", "mine.json", "--name", "it")
    assert named in said
    assert not Path("runs/it").exists(), "a run that never began must leave no folder"


def test_a_plan_that_does_not_fit_in_memory_is_refused(
    two_cores: None, embodied: Said, files: Path, profile: Profile
) -> None:
    large = {name: replace(c, resident_bytes=1e15) for name, c in profile.components.items()}
    schedulers.save(replace(profile, components=large), "large.json")
    Path("mine.json").write_text(json.dumps(hand_written()))
    options = ["--plan.file", "mine.json", "--plan.profile", "large.json", "--name", "it"]
    said = embodied.refused("train", "small.yaml", *options)
    assert "GB on node here" in said and "unload" in said
    said = embodied.refused("train", "small.yaml", "--plan.mode", "auto", "--plan.profile", "large.json")
    assert "fits in the cluster's memory" in said


def test_a_plan_file_that_is_not_there_is_refused(embodied: Said, files: Path) -> None:
    said = embodied.refused("train", "small.yaml", "--plan.file", "gone.json")
    assert "there is no plan file 'gone.json'" in said
    said = embodied.refused("train", "small.yaml", "--plan.file", "profile.json")
    assert "a plan is expected here, not a profile" in said


def test_replanning_and_running_ahead_exclude_each_other(embodied: Said, files: Path) -> None:
    said = embodied.refused("train", "small.yaml", "--plan.replan", "--plan.ahead", "--plan.mode", "auto")
    assert "plan.replan" in said and "plan.ahead" in said
    sides = (["physics", "policy"], ["learner"])
    places = [{"components": names, "devices": [f"here:cores:{i}"]} for i, names in enumerate(sides)]
    phases = [{"micro_batch": ENVS, "placements": places}]
    plan = {"workflow": "ppo", "mode": "disaggregated", "ahead": 1, "phases": phases}
    Path("ahead.json").write_text(json.dumps(plan))
    said = embodied.refused("train", "small.yaml", "--plan.replan", "--plan.file", "ahead.json")
    assert "plan.replan" in said and "ahead.json, which runs ahead" in said


# --- several tasks


MIXED: dict[str, Any] = {**SETTINGS, "extra_tasks": [{"num_envs": 2 * ENVS}]}
"""The same task again: not the same work."""


@pytest.fixture(scope="module")
def mixed(few_iterations: None, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    config = parse_config(MIXED, "test")
    with open_session(config) as session:
        folder = tmp_path_factory.mktemp("mixed")
        return profile_config(config, replace(session, cores=tuple(CORES)), folder)


def test_a_run_of_several_tasks_has_one_profile(mixed: Profile) -> None:
    """Each task's simulators by themselves, the policy by the environments that it decides for, the learner once."""
    assert list(mixed.components) == ["physics", "physics-1", "policy", "learner"]
    sizes = {name: {point.batch for point in found.points} for name, found in mixed.components.items()}
    assert sizes == {
        "physics": {ENVS // 2, ENVS}, "physics-1": {ENVS, 2 * ENVS}, "policy": {ENVS // 2, ENVS, 2 * ENVS},
        "learner": {3 * ENVS // 2, 3 * ENVS},
    }  # fmt: skip
    assert all(point.seconds > 0 for found in mixed.components.values() for point in found.points)
    calls = [(point.batch, point.devices) for point in mixed.components["policy"].points]
    assert len(calls) == len(set(calls)), "what two tasks measured of the same batch is one point"
    assert {entry.components for entry in mixed.together} == {("physics", "policy"), ("physics-1", "policy")}
    assert {"policy>physics-1", "physics-1>policy", "policy>learner"} <= mixed.transfers.keys()


def test_a_run_of_several_tasks_has_one_plan_that_says_what_overlapping_gains(
    mixed: Profile, embodied: Said, files: Path
) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    said = embodied.done("plan", "mixed.yaml", "--profile", "mixed.json", "--json", "result.json")
    plan, result = schedulers.load(Plan, "plan/plan.json"), json.loads(Path("result.json").read_text())
    assert sorted(path.name for path in Path("plan").iterdir()) == ["plan.json", "predicted.json", "predicted.png"]
    assert len(plan.groups) == 2 and all(sentence in said for sentence in plan.why)
    assert "one after the other" in said
    assert sum("task 1" in sentence.lower() for sentence in plan.why) >= 1, "why the second task is where it is"
    # Where components slow each other down at the same time, as measured, overlapping may cost something.
    together, in_turn = result["iteration_s"], result["tasks_in_turn_iteration_s"]
    effect = f"saves {1 - together / in_turn:.0%}" if together <= in_turn else f"costs {together / in_turn - 1:.0%}"
    assert together > 0 and f"overlapping {effect}" in said


def test_a_run_of_several_tasks_keeps_one_plan_and_computes_the_same(mixed: Profile, files: Path) -> None:
    schedulers.save(mixed, "mixed.json")
    planned = train(files / "planned", **{**MIXED, "plan": {"mode": "auto", "profile": "mixed.json"}})
    plan = schedulers.load(Plan, planned / "plan.json")
    assert [path.name for path in planned.glob("plan*.json")] == ["plan.json"]
    assert [path.name for path in planned.glob("profile*.json")] == ["profile.json"]
    core = (schedulers.DeviceRange("here", "cores", 0, 1),)
    turns = schedulers.Phase((schedulers.Placement(("physics", "physics-1", "policy", "learner"), core),), 3 * ENVS)
    schedulers.save(Plan("ppo", "collocated", (turns,), plan.groups), files / "turns.json")
    by_hand = {"file": str(files / "turns.json")}
    assert_same_parameters(planned, train(files / "turns", **{**MIXED, "plan": by_hand}))


def test_a_profile_of_one_task_is_not_one_of_two(mixed: Profile, embodied: Said, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    said = embodied.refused("train", "mixed.yaml", "--plan.mode", "auto", "--plan.profile", "profile.json")
    assert "profile.json was measured with other settings of extra_tasks" in said
    schedulers.save(mixed, "mixed.json")
    said = embodied.refused("train", "small.yaml", "--plan.mode", "auto", "--plan.profile", "mixed.json")
    assert "mixed.json was measured with other settings of extra_tasks" in said


# --- embodied compare


def test_modes_are_compared_with_the_plan_that_auto_would_run(embodied: Said, files: Path) -> None:
    said = embodied.done(
        "compare", "small.yaml", "--profile", "profile.json", "--repeats", "1", "--out", "it", "--json", "r.json"
    )
    result = json.loads(Path("r.json").read_text())
    (chosen,) = [row for row in result["modes"] if row["chosen"]]
    assert chosen["mode"] == result["chosen"] and result["regret"] >= 0
    assert result["iterations"] == profiling.LEAST - 1, "the first iteration warms up and does not count"
    for row in result["modes"]:
        assert row["measured_low_s"] <= row["measured_s"] <= row["measured_high_s"]
        assert row["error"] == pytest.approx(row["predicted_s"] / row["measured_s"] - 1)
        assert row["mode"] in said and "|" not in row["placement"]
    page = Path("it/compare.html").read_text()
    assert page.count("data:image/png;base64,") == 2 and "<h2>Why</h2>" in page
    (policy,) = re.findall(r"""Content-Security-Policy"\s+content="([^"]*)""", page)
    assert "img-src data:" in policy, "a browser would show none of the pictures"
    assert page.count("<tr>") == 1 + len(result["modes"])
    for name in ("compare.png", "timelines.png"):
        assert Path("it", name).read_bytes().startswith(b"\x89PNG")


def test_a_comparison_of_nothing_is_refused(embodied: Said, files: Path) -> None:
    assert "--repeats is at least 1" in embodied.refused("compare", "small.yaml", "--repeats", "0")


def test_modes_are_compared_on_several_tasks_too(mixed: Profile, embodied: Said, files: Path) -> None:
    write_config(Path("mixed.yaml"), MIXED)
    schedulers.save(mixed, "mixed.json")
    options = ["--profile", "mixed.json", "--repeats", "1", "--out", "it", "--json", "r.json"]
    embodied.done("compare", "mixed.yaml", *options)
    result = json.loads(Path("r.json").read_text())
    assert result["task"] == "tabletop/reach, tabletop/reach"
    assert all(len(row["groups"]) == 2 and "physics-1" in row["placement"] for row in result["modes"])
