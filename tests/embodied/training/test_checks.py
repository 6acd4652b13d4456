"""What can be known without a worker is refused before Ray is started."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from embodied import cli
from embodied.config.files import CONFIGS, load_config, shipped_configs
from embodied.training.dry_run import dry_run
from embodied.workflows.recipes import RECIPES
from policies.registry import policy_kind
from tests.embodied.support.checked import check
from tests.sim_farm.libero_stock import settings_naming
from tests.variants import often

VERBS = ("train", "eval", "profile", "compare", "record", "sft")


class RayStarted(Exception):
    """A command came as far as starting Ray."""


class NoRay:
    """Found by the import system before the runtime that starts Ray; ends a command that asks for it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "embodied.runtime.ray.runtime":
            raise RayStarted


@pytest.fixture(autouse=True)
def no_ray(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delitem(sys.modules, "embodied.runtime.ray.runtime", raising=False)
    monkeypatch.setattr(sys, "meta_path", [NoRay(), *sys.meta_path])
    monkeypatch.chdir(tmp_path)


def command(verb: str, config: str, *arguments: str) -> list[str]:
    more = {"record": ["--out", "demos"], "compare": ["--out", "compared"]}
    return [verb, config, *arguments, *more.get(verb, [])]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    status = cli.main([*arguments])
    output = capsys.readouterr().err
    assert status == 2, output
    return " ".join(output.split())


MISTAKES = {
    "task": (["--env.task", "tabletop/reech"], "did you mean tabletop/reach"),
    "simulator": (["--env.task", "manyskill/PushCube-v1"], "did you mean maniskill"),
    "policy": (["--policy.kind", "gausian_mlp"], "did you mean gaussian_mlp"),
    "option": (["--policy.options", "{width: [8]}"], "no architecture argument 'width'; did you mean widths"),
    "cameras": (["--policy.reads", "images"], "set env.cameras to 1 or more"),
}


EVERY = [(verb, mistake) for verb in VERBS for mistake in MISTAKES]
OFTEN = [(verb, mistake) for verb, mistake in EVERY if verb == "train" or mistake == "task"]


@pytest.mark.parametrize(("verb", "mistake"), often(OFTEN, EVERY))
def test_a_mistake_is_refused_before_ray_is_started(
    verb: str, mistake: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    override, remedy = MISTAKES[mistake]
    if mistake == "option":  # given as a dictionary, which the command line has no form for
        settings = {**yaml.safe_load((CONFIGS / "reach.yaml").read_text()), "policy": {"options": {"width": [8]}}}
        (tmp_path / "own.yaml").write_text(yaml.safe_dump(settings))
        output = refusal(capsys, *command(verb, "own.yaml"))
    else:
        output = refusal(capsys, *command(verb, "reach", *override))
    assert remedy in output
    assert not [path for path in tmp_path.rglob("*") if path.name != "own.yaml"], "nothing is left behind"


@pytest.mark.parametrize("verb", often(("train", "eval"), ("train", "eval", "record", "sft")))
def test_environments_that_do_not_divide_are_refused_before_ray_is_started(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["--env.num-envs", "7", "--farm.physics-workers", "2"]
    assert "7 environments do not divide" in refusal(capsys, *command(verb, "reach", *overrides))


@pytest.mark.parametrize("verb", often(("train",), ("train", "profile", "compare")))
def test_environments_that_do_not_fill_episode_groups_are_refused_before_ray_is_started(
    verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = refusal(capsys, *command(verb, "reach_grpo", "--env.num-envs", "30"))
    assert "do not make episode groups of 4" in output


def test_a_workflow_with_an_edge_that_nobody_serves_is_refused_before_ray_is_started(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    edges = tuple(
        replace(edge, carries="opinions") if edge.target == "learner" else edge for edge in RECIPES["ppo"].edges
    )
    monkeypatch.setitem(RECIPES, "ppo", replace(RECIPES["ppo"], edges=edges))
    assert "no worker serves that edge" in refusal(capsys, "train", "reach")


def test_a_wrong_task_of_the_evaluation_is_refused_before_the_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert "tabletop/reach" in refusal(capsys, "train", "reach", "--eval.tasks", "tabletop/reech")
    assert "do not divide" in refusal(capsys, "train", "reach", "--eval.num-envs", "3")


@pytest.mark.parametrize("verb", often(("train", "eval"), VERBS))
def test_a_checkpoint_folder_that_is_missing_or_incomplete_is_refused_before_ray_is_started(
    verb: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    output = refusal(capsys, *command(verb, "openvla_ppo_maniskill"))
    assert "policy.options.checkpoint: openvla-7b is not a folder" in output
    (tmp_path / "openvla-7b").mkdir()
    assert "openvla-7b/config.json is missing" in refusal(capsys, *command(verb, "openvla_ppo_maniskill"))
    (tmp_path / "openvla-7b" / "config.json").write_text("{}")
    assert "no weights in openvla-7b" in refusal(capsys, *command(verb, "openvla_ppo_maniskill"))


@pytest.mark.parametrize("verb", often(("train", "eval"), ("train", "eval", "profile", "record")))
def test_missing_assets_are_refused_before_ray_is_started(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(settings_naming(tmp_path, Path("/nowhere"))))
    output = refusal(capsys, *command(verb, "libero_spatial_ppo"))
    assert f"{tmp_path}/config.yaml names '/nowhere' as assets, which is no folder" in output


def test_an_initial_policy_that_is_not_there_is_refused_before_ray_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert "neither a run" in refusal(capsys, "train", "reach", "--policy.init", "nothing")


def weights_are_here(name: str) -> bool:
    """Those of the configuration's policy: it needs none, or they are shipped."""
    named = load_config(name).policy.architecture.get("checkpoint")
    return named is None or Path(named).is_dir()


UNTRAINED = [name for name in shipped_configs() if not policy_kind(load_config(name).policy.kind).trainable]
COMPLETE = [name for name in shipped_configs() if weights_are_here(name) and name not in UNTRAINED]


@pytest.mark.parametrize("name", UNTRAINED)
def test_a_policy_without_weights_is_not_trained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    kind = load_config(name).policy.kind
    assert f"the policy {kind} has nothing to learn: `embodied eval`" in refusal(capsys, "train", name)


@pytest.mark.parametrize("name", COMPLETE)
def test_what_is_right_goes_on_to_start_ray(name: str) -> None:
    """Every shipped configuration whose weights are here."""
    with pytest.raises(RayStarted):
        cli.main(["train", name])


def test_more_policy_replicas_than_groups_are_refused_before_ray_is_started(
    capsys: pytest.CaptureFixture[str],
) -> None:
    three = ["train", "reach", "--policy.replicas", "3"]
    output = refusal(capsys, *three)
    assert "3 policy replicas would share 2 groups" in output
    assert "set policy.replicas to 2 or less, or farm.groups to more" in output
    with pytest.raises(RayStarted):
        cli.main([*three, "--farm.groups", "4"])


def edited(tmp_path: Path, name: str, **options: Any) -> str:
    """A shipped configuration whose policy has further options."""
    settings = yaml.safe_load((CONFIGS / f"{name}.yaml").read_text())
    settings["policy"]["options"] |= options
    path = tmp_path / f"{name}_edited.yaml"
    path.write_text(yaml.safe_dump(settings))
    return str(path)


@pytest.mark.parametrize("verb", ["train", "sft"])
@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ([], "tabletop/reach_red has upright"),
        (["--env.orientation", "rotated"], "tabletop/reach_red has rotated"),
        # By the environments of the protocol that the run is evaluated by.
        (
            ["--env.orientation", "stock", "--eval.protocol", "openpi", "--eval.tasks", "libero/libero_goal/1"],
            "libero/libero_goal/1 has rotated",
        ),
    ],
)
def test_pictures_are_turned_once_from_what_the_simulator_gives(
    verb: str, arguments: list[str], found: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """LIBERO's own pictures are upside down: `upright` has turned them already, and not as the training data were."""
    output = refusal(
        capsys, *command(verb, edited(tmp_path, "pi0_small", transforms=[{"kind": "turn_images"}]), *arguments)
    )
    assert f"transforms has turn_images, which converts from env.orientation stock, and {found}" in output


def test_the_conventions_of_every_task_are_looked_at(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(edited(tmp_path, "pi0_small", transforms=[{"kind": "turn_images"}]))
    settings = yaml.safe_load(path.read_text())
    settings["env"]["orientation"] = "stock"
    settings["extra_tasks"][0]["orientation"] = "rotated"
    path.write_text(yaml.safe_dump(settings))
    assert "tabletop/reach_blue has rotated" in refusal(capsys, *command("train", str(path)))


def test_a_gripper_is_not_converted_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = edited(tmp_path, "openvla_oft_tiny", transforms=[{"kind": "gripper", "convention": "libero"}])
    output = refusal(capsys, *command("train", config, "--env.gripper", "inverted"))
    assert (
        "transforms has gripper, which converts from env.gripper simulator, and tabletop/reach has inverted" in output
    )


@pytest.mark.parametrize(
    ("text", "says"), [(None, "No such file"), ("[" * 100_000, "recursion"), ('[{"worker": "policy"}]', "'phase'")]
)
def test_faults_that_cannot_be_read_are_refused(
    text: str | None, says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "faults.json"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("EMBODIED_FAULTS", str(file))
    output = refusal(capsys, "train", "reach", "--runs-dir", str(tmp_path / "runs"))
    assert f"EMBODIED_FAULTS={file} is not a list of faults" in output and says in output


def test_what_a_checkpoint_leaves_open_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    """openpi's files do not say how numbers were normalised: a wrong guess would fail silently."""
    checkpoint = Path(__file__).parents[2] / "golden" / "pi0" / "checkpoint"
    config = load_config("pi0_small")
    options = {"checkpoint": str(checkpoint)}
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"options": options})})
    for _ in range(2):
        check(config, "serve")
    (sentence,) = (message for message in caplog.messages if "z-scores" in message)
    assert "policy.options.normalisation: quantile" in sentence


@pytest.mark.parametrize("name", ["sft", "ppo", "grpo", "dapo", "reinforce"])
def test_the_recipes_of_countdown_are_runs_of_one_network(name: str) -> None:
    found = dry_run(load_config(f"countdown_{name}"))
    assert found["policy"]["reads"] == "instruction [B texts]" and found["policy"]["action_chunk"] == "[B, 88, 1]"
    assert 1e6 < found["policy"]["trained"] < 5e6


def test_a_dry_run_says_shapes_memory_and_placement_and_starts_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    found = dry_run(load_config("openvla_small"))
    assert [task["name"] for task in found["tasks"]] == ["tabletop/reach_red", "tabletop/reach_blue"]
    assert found["policy"]["reads"] == "front [B, 56, 56, 3] and instruction [B texts]"
    assert found["policy"]["action_chunk"] == "[B, 1, 3]"
    iteration = found["iteration"]
    assert (iteration["samples"], iteration["minibatch"], iteration["optimiser_steps"]) == (2048, 512, 8)
    assert found["bytes"]["frames"] >= 2048 * 56 * 56 * 3 > found["bytes"]["trajectories"] > 0
    assert found["bytes"]["gradients"] + found["bytes"]["moments"] == 12 * found["policy"]["trained"]
    assert "iteration: environments 32, samples 2,048" in capsys.readouterr().out
    assert cli.main(["train", "reach", "--dry-run", "--env.task", "tabletop/rech"]) == 2


def test_a_dry_run_of_episodes_and_of_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "reach_grpo", "--dry-run", "--plan.mode", "auto"]) == 0
    said = capsys.readouterr().out
    assert "samples at most 640" in said and "plan searched for when the run begins (auto)" in said


UNFIT = {
    "choices for real numbers": (
        "reach",
        ["--policy.kind", "categorical_mlp"],
        "set policy.kind to gaussian_mlp or flow",
    ),
    "of a slow simulator": (
        "pushcube",
        ["--policy.kind", "categorical_mlp"],
        "set policy.kind to gaussian_mlp or flow",
    ),
    "real numbers for choices": ("cartpole", ["--policy.kind", "gaussian_mlp"], "set policy.kind to categorical_mlp"),
    "no state": ("reach", ["--policy.reads", "proprio"], "the task has state of 16 numbers, proprio of 10 numbers"),
    "no camera": ("reach", ["--policy.kind", "flow", "--policy.options.encoder", "cnn"], "Set policy.reads to what"),
    "an option": ("openvla_tiny", ["--policy.options.temperature", "0"], "temperature must be greater than 0, got 0"),
}


@pytest.mark.parametrize("case", UNFIT)
@pytest.mark.parametrize("verb", ["train", "eval"])
def test_a_policy_that_does_not_fit_the_task_is_refused_before_ray_is_started(
    case: str, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config, changes, remedy = UNFIT[case]
    options = (
        [] if config == "openvla_tiny" else ["--policy.options.initial-log-std=", "--policy.options.critic-widths="]
    )
    assert remedy in refusal(capsys, *command(verb, config, *changes, *options))


def test_a_checkpoint_of_other_sizes_is_refused_before_ray_is_started(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    small = ["--iterations", "1", "--rollout.decisions", "16", "--eval.episodes", "1", "--eval.videos", "0"]
    assert cli.main(["train", "reach", "--name", "first", "--runtime.mode", "inline", *small]) == 0
    capsys.readouterr()
    for verb in (["eval", "runs/first"], ["train", "reach", "--policy.init", "runs/first"]):
        output = refusal(capsys, *verb, "--env.task", "tabletop/push")
        assert "spec.state_dim is 16, expected 35" in output and "Set env.task, env.control_mode" in output


NOTHING = {
    "train reach --policy.kind gausian_mlp": "did you mean gaussian_mlp",
    "train reach --seeds 1 2 --policy.kind gausian_mlp": "did you mean gaussian_mlp",
    "train tabletop_scripted": "has nothing to learn",
    "train reach --optim.ranks 9 --optim.minibatch 4": "9 ranks, and a minibatch 4 rows",
    "train reach --policy.replicas 3": "3 policy replicas would share 2 groups",
    "train reach --eval.tasks tabletop/reech": "did you mean tabletop/reach",
    "train reach --advantage.credit action": "set it to action or element",
    "train reach_grpo --env.num-envs 30": "do not make episode groups of 4",
    "record reach --env.task gymnasium/CartPole-v1 --policy.reads images --out demos": "set env.cameras to 1 or more",
    "sft reach --optim.ranks 9 --sft.batch 4": "9, and a minibatch has 4 rows",
}
"""Commands whose mistakes need nothing to be seen."""


def test_what_needs_nothing_is_answered_before_torch_is_imported() -> None:
    code = "\n".join(
        (
            "import sys",
            "from embodied.cli import main",
            "for command in sys.argv[1:]:",
            "    assert main(command.split()) == 2, command",
            "    assert 'torch' not in sys.modules, command",
        )
    )
    found = subprocess.run([sys.executable, "-c", code, *NOTHING], capture_output=True, text=True, timeout=300)
    said = found.stderr.splitlines()
    assert len(said) == len(NOTHING) and found.returncode == 0, found.stderr
    for command, line in zip(NOTHING, said, strict=True):
        assert NOTHING[command] in line, line
