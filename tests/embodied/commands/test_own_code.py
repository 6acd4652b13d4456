"""Code of a stranger, used by its name: a simulator, a policy and a workflow that no file of this project mentions."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import yaml

import embodied
import policies
from embodied.cli import main
from embodied.config.files import load_config, parse_config
from embodied.demonstrations.mixture import open_dataset
from embodied.errors import UserError
from embodied.evaluation.folder import read_folder
from embodied.evaluation.protocol import expand
from embodied.reporting.metrics import read
from embodied.workflows.recipes import recipe_of
from policies.contract import PolicyError, PolicySpec
from policies.registry import policy_kind
from sim_farm.catalogue import check_task
from sim_farm.conformance.physics_laws import physics_is_a_function_of_seed_and_actions
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import backend, make_physics
from sim_farm.workers import faults
from tests.embodied.run.test_resume import assert_same_run
from tests.embodied.support import stranger
from tests.embodied.support.ray_nodes import started

TASK, KIND, WORKFLOW = "stranger.sim:BACKEND/reach", stranger.NAMES["policy.kind"], stranger.NAMES["workflow"]
TYPED = [word for key, name in stranger.NAMES.items() for word in (f"--{key}", TASK if key == "env.task" else name)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the package, which is not on `sys.path`."""
    stranger.write(tmp_path)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(stranger.settings()))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    yield tmp_path
    for name in [name for name in sys.modules if name.partition(".")[0] in ("stranger", "broken")]:
        del sys.modules[name]
    if "mani_skill" in sys.modules:
        from gymnasium.envs.registration import registry
        from mani_skill.utils.registration import REGISTERED_ENVS

        for known in (registry, REGISTERED_ENVS):
            known.pop("PushGently-v1", None)


def offered(folder: Path, group: str, *lines: str, package: str = "stranger") -> None:
    """Have a package on `sys.path` offer entry points."""
    info = folder / f"{package}-1.2.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.2\n")
    with (info / "entry_points.txt").open("a") as file:
        file.write("\n".join([f"[embodied_farm.{group}]", *lines, ""]))
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def test_a_stranger_s_package_trains_evaluates_and_goes_on_from_the_command_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mine.yaml", "--name", "whole"]) == 0
    assert main(["train", "mine.yaml", "--name", "parts", "--iterations", "2"]) == 0
    assert main(["train", "mine.yaml", "--name", "parts", "--resume", "auto"]) == 0
    assert_same_run(folder / "runs/parts", folder / "runs/whole")
    assert main(["eval", "whole"]) == 2, "its folder names code, which was not typed"
    assert all(f"--{key} {name}" in capsys.readouterr().err for key, name in list(stranger.NAMES.items())[:1])
    assert main(["eval", "whole", *TYPED, "--eval.tasks", "stranger.sim:BACKEND", "--folder", "found"]) == 0
    assert read_folder(Path("found")).identity.protocol.tasks == (TASK, f"{TASK}_again")


def test_and_from_python(folder: Path) -> None:
    config = parse_config(stranger.settings(), "test")
    run = embodied.train(config.model_copy(update={"iterations": 2, "name": "parts"})).run
    assert embodied.train(config.model_copy(update={"name": "parts"}), resume=True).run == run
    assert [row["iteration"] for row in read(run)] == [1, 2, 3]
    assert embodied.evaluate(run, code=[*stranger.NAMES.values()], episodes=3).episodes == 3
    policy = policies.load(run / "checkpoints/000003", code=[KIND])
    assert policy.kind == KIND and policy.architecture() == {"std": 0.4}


@pytest.mark.slow
def test_on_ray_it_trains_alike_and_a_killed_physics_worker_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embodied.train(parse_config(stranger.settings(name="inline"), "test"))
    # The workers find what this process does, whatever put it there and wherever it is started.
    sys.path.append(str(folder))
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    lost = Path("faults.json").resolve()
    lost.write_text(json.dumps([{"worker": "physics 1", "phase": "step", "kind": "kill", "nth": 20}]))
    monkeypatch.setenv(faults.VARIABLE, str(lost))
    embodied.train(parse_config(stranger.settings("ray", name="ray"), "test"), runs_dir=folder / "runs")
    assert Path(f"{lost}.fired-0").exists(), "the fault has not struck"
    assert_same_run(folder / "runs/ray", folder / "runs/inline")


@pytest.mark.slow
def test_the_command_trains_evaluates_and_goes_on_on_ray(folder: Path) -> None:
    ray = ["--runtime.mode", "ray"]
    assert main(["train", "mine.yaml", "--name", "whole"]) == 0
    assert main(["train", "mine.yaml", "--name", "parts", "--iterations", "2", *ray]) == 0
    assert main(["train", "mine.yaml", "--name", "parts", "--resume", "auto", *ray]) == 0
    assert_same_run(folder / "runs/parts", folder / "runs/whole")
    assert main(["eval", "parts", *TYPED, *ray, "--folder", "found"]) == 0


@pytest.mark.slow
def test_an_own_maniskill_task_trains_on_ray_as_inline_and_a_killed_physics_worker_is_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = {"task": "stranger.tasks:maniskill/PushGently-v1", "num_envs": 4, "cameras": 1, "image_size": 32}
    policy = {"kind": "flow", "reads": ["proprio", "images"], "options": {"encoder": "cnn", "features": 16}}
    kinds = {"env": env, "policy": policy, "iterations": 2, "rollout": {"decisions": 8}}
    embodied.train(parse_config(stranger.settings(name="inline", **kinds), "test"))
    lost = Path("faults.json").resolve()
    lost.write_text(json.dumps([{"worker": "physics 1", "phase": "step", "kind": "kill", "nth": 5}]))
    monkeypatch.setenv(faults.VARIABLE, str(lost))
    embodied.train(parse_config(stranger.settings("ray", name="ray", **kinds), "test"))
    assert Path(f"{lost}.fired-0").exists(), "the fault has not struck"
    assert_same_run(folder / "runs/ray", folder / "runs/inline")


@pytest.mark.slow
def test_a_machine_that_lacks_the_module_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with started("near", "far") as machines:
        sys.path.append(str(folder))
        monkeypatch.chdir("/")
        settings = stranger.settings("ray", farm={"physics_workers": 2, "nodes": ["far"]})
        settings["runtime"]["address"] = machines.address
        machines.runtime.close()
        with pytest.raises((FarmError, UserError), match="stranger.sim:BACKEND cannot be imported on .*no module"):
            embodied.train(parse_config(settings, "test"), runs_dir=folder / "runs")


# --- by an entry point


def test_an_installed_package_s_entry_points_are_names(folder: Path) -> None:
    offered(folder, "simulators", "point = stranger.sim:BACKEND", "tabletop = stranger.sim:BACKEND")
    offered(folder, "policies", "linear = stranger.policy:Linear")
    offered(folder, "workflows", "halved = stranger.flow:MINE")
    assert backend("point") is backend("stranger.sim:BACKEND")
    assert backend("tabletop").name == "tabletop", "a shipped name cannot be replaced"
    env = {"task": "point/reach", "num_envs": 4}
    settings = stranger.settings(env=env, policy={"kind": "linear"}, workflow="halved")
    run = embodied.train(parse_config(settings, "test")).run
    assert load_config(str(run / "config.yaml")).named_code == {}, "what is installed is no code of the run's"
    assert embodied.evaluate(run).episodes == 4
    assert policies.load(run / "checkpoints/000003").kind == "linear"
    assert expand(["point"]) == ("point/reach", "point/reach_again")


def test_an_entry_point_that_cannot_be_used_names_its_package_and_the_cause(folder: Path) -> None:
    offered(folder, "simulators", "gone = not_there.sim:BACKEND", "wrong = stranger.sim:Point", "twice = a.b:C")
    offered(folder, "policies", "deaf = stranger.policy:Deaf")
    offered(folder, "workflows", "list = stranger.flow:halved")
    offered(folder, "simulators", "twice = a.b:D", package="other")
    package = "the package stranger 1.2 offers 'gone' in embodied_farm.simulators, which cannot be used: "
    with pytest.raises(FarmError, match=f"^{package}not_there.sim:BACKEND cannot be imported on .*no module not_there"):
        check_task("gone/reach")
    with pytest.raises(FarmError, match="the entry point 'wrong' is the class Point, not a sim_farm.contract.Backend"):
        check_task("wrong/reach")
    with pytest.raises(FarmError, match=r"stranger 1\.2 and .*other 1\.2 both offer 'twice'|other .* and .*stranger"):
        check_task("twice/reach")
    with pytest.raises(PolicyError, match="the entry point 'deaf' is no policy: it lacks the methods evaluate, val"):
        policy_kind("deaf")
    with pytest.raises(UserError, match="list is a function, not an embodied.workflows.Recipe"):
        recipe_of(parse_config({"workflow": "list"}, "test"))


def test_an_unknown_name_is_refused_with_the_nearest_entry_point(folder: Path) -> None:
    offered(folder, "simulators", "mujocosim = stranger.sim:BACKEND")
    offered(folder, "policies", "linear = stranger.policy:Linear")
    offered(folder, "workflows", "halved = stranger.flow:MINE")
    with pytest.raises(FarmError, match="unknown simulator 'mujocosin'; did you mean mujocosim"):
        check_task("mujocosin/reach")
    with pytest.raises(PolicyError, match="unknown policy 'linaer'; did you mean linear"):
        policy_kind("linaer")
    with pytest.raises(UserError, match="no workflow 'halfed'; did you mean halved"):
        recipe_of(parse_config({"workflow": "halfed"}, "test"))


# --- a mistake is one message


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("strangr.sim:BACKEND/reach", "strangr.sim:BACKEND cannot be imported on .*: there is no module strangr in"),
        ("stranger.sin:BACKEND/reach", "there is no module stranger.sin in the current folder"),
        ("stranger.sim:BACKND/reach", r"the module stranger.sim \(.*sim.py\) has no BACKND; did you mean BACKEND\?"),
        ("stranger.sim:tabeltop/reach", r"has no tabeltop; did you mean tabletop"),
        ("stranger.sim:Point/reach", "stranger.sim:Point is the class Point, not a sim_farm.contract.Backend"),
        ("stranger.sim:BACKEND/raech", "unknown task 'stranger.sim:BACKEND/raech'; did you mean stranger.sim:B"),
        ("stranger.sim:BACKEND", "a task is named <simulator>/<task>"),
        ("stranger.sim:/reach", "code is named package.module:NAME, got 'stranger.sim:'"),
        ("../sim:BACKEND/reach", "a task is named|code is named|unknown simulator"),
        ("broken.syntax:BACKEND/reach", r"SyntaxError: .*syntax.py, line 1"),
        ("broken.raises:BACKEND/reach", r"ZeroDivisionError: division by zero \(.*raises.py, line 2\)"),
        ("broken.needs:BACKEND/reach", "it needs the Python package no_such_package, which is not installed there"),
    ],
)
def test_a_simulator_that_cannot_be_is_refused(task: str, message: str, folder: Path) -> None:
    (folder / "broken").mkdir()
    (folder / "broken/syntax.py").write_text("def :\n")
    (folder / "broken/raises.py").write_text("\nBACKEND = 1 / 0\n")
    (folder / "broken/needs.py").write_text("import no_such_package\n")
    for use in (check_task, lambda task: make_physics(TaskSpec(task))):
        with pytest.raises(FarmError, match=message) as caught:
            use(task)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("strangr.policy:Linear", "there is no module strangr in the current folder"),
        ("stranger.policy:Liner", r"has no Liner; did you mean Linear\?"),
        ("stranger.policy:Deaf", "stranger.policy:Deaf is no policy: it lacks the methods evaluate, value, arch"),
        ("stranger.policy:Stranger", "is not derived from policies.Policy and lacks the methods evaluate, value, arch"),
        ("stranger.sim:BACKEND", "stranger.sim:BACKEND is a Backend, not a class derived from policies.Policy"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(kind: str, message: str, folder: Path) -> None:
    with pytest.raises(PolicyError, match=message):
        policies.build(kind, PolicySpec(2, state_dim=4), seed=1)


def test_a_mistake_is_told_before_a_run_begins(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["train", "mine.yaml", "--name", "run", "--runtime.mode", "ray"]
    for option, name in (("env.task", "stranger.sim:BACK/reach"), ("policy.kind", "x.y:Z"), ("workflow", "x.y:Z")):
        assert main([*command, f"--{option}", name]) == 2
        output = capsys.readouterr().err
        assert "Traceback" not in output and re.match(r"embodied: .*(has no BACK|no module x)", output)
    assert not Path("runs").exists()


def test_nothing_is_imported_before_it_is_used(folder: Path) -> None:
    config = load_config("mine.yaml")
    assert config.named_code == {name: key for key, name in stranger.NAMES.items()}
    assert "stranger.sim" not in sys.modules and str(folder) not in sys.path
    make_physics(TaskSpec(config.env.task))
    assert sys.path[-1] == str(folder), "looked in last"
    assert "stranger.policy" not in sys.modules


def test_the_laws_of_a_simulator_are_checked_by_its_name(folder: Path) -> None:
    physics_is_a_function_of_seed_and_actions(TaskSpec(TASK))


def test_a_simulator_that_executes_less_than_a_chunk_is_refused(folder: Path) -> None:
    text = stranger.SIMULATOR.replace("len(solved) < len(actions)", "not solved")
    (folder / "stranger/sim.py").write_text(text)
    physics = make_physics(TaskSpec(TASK))
    physics.reset(EpisodeSpec(1))
    with pytest.raises(FarmError, match=f"{TASK} executed 1 of 3 actions, and its episode goes on"):
        physics.step(np.zeros((3, 2), np.float32))


def test_a_package_s_verb_is_listed_and_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verb of docs/extensions.md, as it is printed there."""
    page = (Path(__file__).parents[3] / "docs/extensions.md").read_text()
    (folder / "stranger/count.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    monkeypatch.syspath_prepend(folder)
    offered(folder, "verbs", "count = stranger.count:run", "broken = stranger.none:run")
    (folder / "runs/first/checkpoints/000001").mkdir(parents=True)
    assert main(["count", "runs", "--json", "found.json"]) == 0
    assert json.loads(Path("found.json").read_text()) == {"checkpoints": 1}
    capsys.readouterr()
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^  count +the number of checkpoints in a folder of runs$", shown, re.MULTILINE)
    assert re.search(r"^  broken +cannot be used: the module stranger.none is not there$", shown, re.MULTILINE)
    assert main(["count"]) == 2
    assert "usage: embodied count FOLDER" in capsys.readouterr().err
    assert main(["count", "nowhere"]) == 2
    assert "nowhere is not a folder" in capsys.readouterr().err
    assert main(["broken"]) == 2
    assert (
        "the package stranger 1.2 offers 'broken' in embodied_farm.verbs, which cannot be used"
        in capsys.readouterr().err
    )


def test_a_package_says_what_lies_at_a_path_that_is_no_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "stranger/sets.py").write_text(
        "def found(path):\n    return 'theirs: convert it' if path.name == 'a' else None"
    )
    monkeypatch.syspath_prepend(folder)
    offered(folder, "convertible_datasets", "stranger = stranger.sets:found")
    (folder / "a").mkdir()
    with pytest.raises(UserError, match="a is theirs: convert it"):
        open_dataset(Path("a"))
