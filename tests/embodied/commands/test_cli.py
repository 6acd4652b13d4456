"""The command line as a user meets it: one whole run, and each mistake with its one clear message."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from embodied import cli
from embodied.commands.short_help import CHANGED, EXAMPLES, READ
from embodied.commands.train import with_settings
from embodied.config.files import all_settings, shipped_configs
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.files import parse_yaml

ROOT = Path(__file__).resolve().parents[3]
COMMAND = Path(sys.executable).parent / "embodied"
SMALL = ["--runtime.mode", "inline", "--farm.groups", "1", "--iterations", "2", "--rollout.decisions", "16"]
SMALL += ["--eval.episodes", "6", "--eval.videos", "2"]


def embodied(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(COMMAND), *arguments], capture_output=True, text=True, timeout=240, env={**os.environ, **settings}
    )


def refusal(*arguments: str, **settings: str) -> str:
    """The message of a command that must be refused: exit status 2, no traceback."""
    done = embodied(*arguments, **settings)
    output = done.stdout + done.stderr
    assert done.returncode == 2, output
    assert "Traceback" not in output, output
    return " ".join(output.split())


def here(*arguments: str) -> tuple[int, str]:
    """Exit status and what is said of a command in this process, where nothing has to be imported anew."""
    output = io.StringIO()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            status: Any = cli.main(list(arguments))
        except SystemExit as left:  # the parser's way
            status = left.code
    return int(status or 0), output.getvalue()


def refusal_here(*arguments: str) -> str:
    """The message of a command that must be refused; an exception would be the traceback."""
    status, output = here(*arguments)
    assert status == 2, output
    return " ".join(output.split())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A small run of the built-in scene, trained and evaluated. In this process: a new one takes five seconds to import
    what it needs."""
    runs = tmp_path_factory.mktemp("runs")
    status, output = here(
        "train", "reach", "--name", "first", "--runs-dir", str(runs), "--json", str(runs / "r.json"), *SMALL
    )
    assert status == 0, output
    yield runs / "first"


def test_train_leaves_everything_that_the_readme_lists(run: Path) -> None:
    for name in ("config.yaml", "metrics.jsonl", "trace.json", "eval.json", "report.html", "videos/evaluation.mp4"):
        assert (run / name).stat().st_size > 0, name
    assert list((run / "tensorboard").iterdir())
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    assert {p.name for p in latest.iterdir()} >= {"manifest.json", "policy", "value_head.safetensors", "state.json"}


def test_the_result_is_written_as_json_with_units_in_its_names(run: Path) -> None:
    result = json.loads((run.parent / "r.json").read_text())
    assert result["episodes"] == 6 and 0 <= result["success_low"] <= result["success_rate"] <= result["success_high"]
    assert result["wall_s"] > 0 and result["env_steps_per_s"] > 0 and result["protocol"]["hardware"]


@pytest.mark.slow
def test_the_command_trains_in_a_process_of_its_own(run: Path, tmp_path: Path) -> None:
    done = embodied("train", "reach", "--name", "first", "--runs-dir", str(tmp_path), *SMALL)
    assert done.returncode == 0, done.stdout + done.stderr
    for file in ("eval.json", "checkpoints/latest"):
        assert (tmp_path / "first" / file).is_file() and (run / file).is_file()


@pytest.mark.slow
def test_evaluating_again_gives_the_same(run: Path, tmp_path: Path) -> None:
    before = json.loads((run / "eval.json").read_text())
    status, output = here("eval", str(run), "--eval.videos", "0", "--json", str(tmp_path / "e.json"))
    assert status == 0, output
    again = json.loads((tmp_path / "e.json").read_text())
    for key in ("success_rate", "episode_len", "return", "episodes"):
        assert again[key] == before[key], key


def test_report_can_be_written_again(run: Path) -> None:
    (run / "report.html").unlink()
    assert here("report", "first", "--runs-dir", str(run.parent))[0] == 0
    assert (run / "report.html").stat().st_size > 10_000


def test_a_run_that_exists_is_refused_with_the_way_out(run: Path) -> None:
    output = refusal_here("train", "reach", "--name", "first", "--runs-dir", str(run.parent), *SMALL)
    assert "--resume auto" in output and "--name" in output


@pytest.mark.slow
def test_resume_goes_on_where_the_run_stopped(run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "first"
    shutil.copytree(run, copy)
    resumed = ["--name", "first", "--runs-dir", str(tmp_path), "--resume", "auto", *SMALL, "--iterations", "3"]
    status, output = here("train", "reach", *resumed)
    assert status == 0, output
    rows = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    assert [row["iteration"] for row in rows] == [1, 2, 3]


@pytest.mark.parametrize("mode", ["inline", "ray"])
def test_a_wrong_task_name_shows_the_nearest(mode: str, tmp_path: Path) -> None:
    output = refusal_here(
        "train", "reach", "--env.task", "tabletop/reech", "--runtime.mode", mode, "--runs-dir", str(tmp_path)
    )
    assert "tabletop/reach" in output
    assert not list(tmp_path.iterdir()), "a run that never began must leave no folder"


def test_a_control_mode_that_the_task_lacks_lists_those_it_has(tmp_path: Path) -> None:
    output = refusal_here("train", "reach", *SMALL, "--env.control-mode", "pd_joint_pos", "--runs-dir", str(tmp_path))
    assert "pd_joint_pos" in output and "ee_delta_pos" in output


def test_a_batch_that_does_not_divide_names_one_that_does(tmp_path: Path) -> None:
    overrides = ["--env.num-envs", "7", "--farm.physics-workers", "2", "--farm.groups", "2"]
    output = refusal_here("train", "reach", *SMALL, *overrides, "--runs-dir", str(tmp_path))
    assert "7 environments do not divide" in output and "8" in output


def test_a_checkpoint_of_another_policy_is_refused(run: Path) -> None:
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    output = refusal_here(
        "eval", "reach", "--checkpoint", str(latest), "--policy.kind", "flow", "--policy.options", "{}"
    )
    assert "another policy" in output or "policy.options" in output


def test_a_checkpoint_of_another_task_is_refused(run: Path) -> None:
    latest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    output = refusal_here("eval", "reach", "--checkpoint", str(latest), "--env.task", "tabletop/push", *SMALL[:4])
    assert "another policy" in output and "state_dim" in output


def test_a_damaged_checkpoint_is_refused(run: Path, tmp_path: Path) -> None:
    import shutil

    shutil.copytree(run, tmp_path / "damaged")
    folder = tmp_path / "damaged" / "checkpoints"
    weights = folder / (folder / "latest").read_text().strip() / "policy" / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-5] ^= 1
    weights.write_bytes(data)
    assert "damaged" in refusal_here("eval", str(tmp_path / "damaged"))


def test_a_read_only_folder_is_refused_before_anything_starts() -> None:
    # Nobody can make a folder here, root included: tests often run as root, whom permissions do not stop.
    output = refusal_here("train", "reach", "--runs-dir", "/sys/embodied-runs", *SMALL)
    assert "cannot be written" in output and "--runs-dir" in output and "Starting" not in output


def test_a_full_shared_memory_says_how_much_is_missing(tmp_path: Path) -> None:
    pixels = ["--env.cameras", "1", "--env.image-size", "1024", "--env.num-envs", "60000", "--policy.kind", "flow"]
    reads = ["--policy.reads", "proprio", "images", "--runtime.mode", "ray", "--farm.physics-workers", "1"]
    config = tmp_path / "big.yaml"
    config.write_text("env: {task: tabletop/reach}\npolicy: {kind: flow, options: {encoder: cnn}}\n")
    output = refusal_here("train", str(config), *pixels, *reads, "--runs-dir", str(tmp_path / "runs"))
    assert "shared memory" in output and "--shm-size" in output and "Starting" not in output


@pytest.mark.slow
def test_no_vulkan_device_names_the_doctor(tmp_path: Path) -> None:
    nothing = str(tmp_path / "none.json")
    output = refusal(
        "train",
        "pushcube",
        *SMALL,
        "--runs-dir",
        str(tmp_path / "r"),
        VK_DRIVER_FILES=nothing,
        VK_ICD_FILENAMES=nothing,
    )
    assert "Vulkan" in output and "embodied doctor" in output


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    assert "--loss.clip" in refusal_here("train", "reach", "--loss.clp", "0.1")
    config = tmp_path / "typo.yaml"
    config.write_text("loss: {clp: 0.1}\n")
    assert "loss.clip" in refusal_here("train", str(config))


def test_options_of_the_policy_that_the_configuration_does_not_name(tmp_path: Path) -> None:
    """A refusal names such options: they can be given as it says."""
    from tests.policies.openvla.oft_directory import write_oft

    folder = write_oft(tmp_path / "directory")
    start = ["eval", "openvla_oft_tiny", "--policy.options.checkpoint", str(folder)]
    output = refusal_here(*start)
    assert "set policy.options.head to l1" in output and "set policy.options.film to true" in output
    output = refusal_here(*start, "--policy.options.head", "l1", "--policy.options.proprio=false")
    assert "action_head" not in output and "vision_backbone--150000_checkpoint.pt is there and not used" in output
    options = ["--policy.options.head", "l1", "--policy.options.film", "--policy.options.no-value-per-action"]
    found = options_of("openvla_oft_tiny", *options, "--policy.options.lora-parts", "language", "vision", "--seed", "3")
    assert found["head"] == "l1" and found["film"] is True and found["value_per_action"] is False
    assert found["lora_parts"] == ["language", "vision"]
    assert "no architecture argument 'hed'; did you mean head?" in refusal_here(
        "eval", "openvla_oft_tiny", "--policy.options.hed", "l1"
    )


def test_an_option_of_the_simulator_is_typed_and_removed() -> None:
    def parsed(*arguments: str) -> dict[str, Any]:
        return cli._parse("train", cli.arguments_of("train"), arguments[0], [*arguments]).settings.env.options

    assert parsed("reach", "--env.options.gravity", "3", "--env.options.no-floor") == {"gravity": 3, "floor": False}
    assert parsed("countdown_grpo", "--env.options.tokenizer", "mine") == {"tokenizer": "mine"}
    assert parsed("countdown_grpo", "--env.options.tokenizer=") == {}


def options_of(*arguments: str) -> dict[str, Any]:
    """The policy's options as a command has them."""
    kind = cli.arguments_of("train")
    parsed = cli._parse("train", kind, arguments[0], [*arguments])
    return cli._with_options(parsed, [*arguments]).settings.policy.options


@pytest.mark.parametrize(
    ("kind", "words", "found"),
    [
        ("language", "prompt|{} Put it in a box.", {"prompt": "{} Put it in a box."}),
        ("language", "prompt|{} {}: a # b", {"prompt": "{} {}: a # b"}),
        ("language", "prompt|{}", {"prompt": "{}"}),
        ("language", "system|12", {"system": "12"}),
        ("language", "system|no", {"system": "no"}),
        ("language", "temperature|6e-1", {"temperature": 0.6}),
        ("language", "temperature|1", {"temperature": 1}),
        ("language", "rows|1e1", {"rows": 10.0}),
        ("language", "no-chat", {"chat": False}),
        ("language", "chat|false", {"chat": False}),
        ("openvla", "lora_parts|vision", {"lora_parts": ["vision"]}),
        ("openvla", "lora_parts|[vision, language]", {"lora_parts": ["vision", "language"]}),
        ("openvla", "transforms|{name: a}", {"transforms": [{"name": "a"}]}),
        ("openvla_oft", "step|150000", {"step": 150000}),
        ("openvla_oft", "step|latest", {"step": "latest"}),
        ("openvla_oft", "proprio", {"proprio": True}),
        ("pi0", "steps|null", {"steps": None}),
        ("pi0", "noise_bounds|8e-2|16e-2", {"noise_bounds": [0.08, 0.16]}),
        ("gaussian_mlp", "widths|64", {"widths": [64]}),
    ],
)
def test_an_option_is_read_as_its_kind_declares_it(
    kind: str, words: str, found: dict[str, Any], tmp_path: Path
) -> None:
    config = tmp_path / "own.yaml"
    config.write_text(f"policy: {{kind: {kind}}}\n")
    name, *values = words.split("|")
    assert options_of(str(config), f"--policy.options.{name}", *values) == found


def test_an_option_of_one_value_takes_one(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("policy: {kind: language, options: {temperature: 1}}\n")
    assert options_of(str(config), "--policy.options.temperature", "0.8") == {"temperature": 0.8}, "not a whole number"
    with pytest.raises(UserError, match="--policy.options.prompt takes one value, got 2: put a text"):
        options_of(str(config), "--policy.options.prompt", "{}", "box")
    with pytest.raises(UserError, match="--policy.options.prompt has no value"):
        options_of(str(config), "--policy.options.prompt")


def test_options_of_the_policy_are_removed_whether_or_not_the_configuration_names_them(tmp_path: Path) -> None:
    config = tmp_path / "own.yaml"
    config.write_text("policy: {options: {widths: [8, 8], log_std_init: -1.0}}\n")
    assert options_of(str(config)) == {"widths": [8, 8], "log_std_init": -1.0}
    assert options_of(str(config), "--policy.options.log-std-init=", "--seed", "3") == {"widths": [8, 8]}
    assert options_of(str(config), "--policy.options.widths=", "--policy.options.adapter=") == {"log_std_init": -1.0}
    assert options_of(str(config), "--policy.options.widths=", "--policy.options.widths", "[4]")["widths"] == [4]
    output = refusal_here("train", str(config), "--policy.options.logstd-init=")
    assert "did you mean --policy.options.log_std_init=?" in output


def test_an_option_that_the_kind_does_not_have_is_refused_with_how_to_remove_it(tmp_path: Path) -> None:
    command = ["eval", "reach", "--policy.kind", "random", "--runs-dir", str(tmp_path)]
    output = refusal_here(*command)
    option = re.search(r"--policy\.options\.\w+=", output)
    assert option is not None and "random has no architecture argument" in output
    assert option[0] not in refusal_here(*command, option[0])


def test_an_unknown_configuration_or_run_names_the_nearest() -> None:
    assert "pushcube" in refusal_here("train", "pushcubes")
    assert "no run" in refusal_here("report", "no-such-run")


def test_policies_that_read_images_need_a_camera(tmp_path: Path) -> None:
    output = refusal_here("train", "reach", *SMALL, "--policy.reads", "images", "--runs-dir", str(tmp_path))
    assert "env.cameras" in output


SETTINGS_VERBS = ("train", "sft", "eval", "record", "serve", "profile", "plan", "compare", "inspect")
"""Verbs that take every setting."""


def test_the_whole_help_is_generated_from_the_configuration() -> None:
    _, shown = here("train", "--help-all")
    assert "--loss.clip-high" in shown and "Clip range of the probability" in shown


@pytest.mark.parametrize("verb", SETTINGS_VERBS)
def test_help_is_one_page_of_own_options_of_what_is_changed_most_and_of_examples(verb: str) -> None:
    status, shown = here(verb, "--help")
    assert status == 0 and len(shown.splitlines()) < 100
    assert "--loss.clip-high" not in shown and f"embodied {verb} --help-all" in shown
    for name in cli.arguments_of(verb).__dataclass_fields__.keys() - {"settings"}:
        assert re.search(rf"--{name.replace('_', '-')}\b|positional", shown), name
    for key in READ.get(verb, CHANGED):
        assert f"  --{key.replace('_', '-')} " in shown, key
        assert key in all_settings()
    for command, _ in EXAMPLES[verb][:3]:
        assert command in shown
    words = set(re.split(r"[\s,]+", shown))
    assert words >= set(shipped_configs())


def test_help_shows_the_values_of_the_configuration_that_is_named() -> None:
    assert "(tabletop/reach)" in here("train", "reach", "--help")[1]


def test_the_example_of_each_changed_setting_is_a_value_of_it() -> None:
    for key, example in CHANGED.items():
        with_settings(Config(), {key: parse_yaml(example, "the example")}, key)


def in_a_new_process(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_help_of_no_verb_with_settings_imports_torch() -> None:
    in_a_new_process(f"""
import sys
from embodied import cli
for verb in {SETTINGS_VERBS}:
    try:
        cli.main([verb, "--help"])
    except SystemExit as left:
        assert not left.code
    assert not {{"torch", "ray", "mujoco", "sapien"}} & sys.modules.keys(), verb
""")


def test_the_version_is_that_of_the_installed_package_and_nothing_is_imported_for_it() -> None:
    shown = in_a_new_process("""
import sys
from embodied import cli
assert cli.main(["--version"]) == 0
assert not {"torch", "tyro", "pydantic", "numpy", "rich"} & sys.modules.keys()
""")
    assert shown == f"embodied {metadata.version('embodied-farm')}\n"


MISTAKES = {
    "task": ("train pushcube --env.task maniskill/PushCub-v1", "did you mean maniskill/PushCube-v1"),
    "kind": ("train pushcube --policy.kind gausian_mlp", "unknown policy 'gausian_mlp'; did you mean gaussian_mlp"),
    "groups": ("train reach_grpo --env.num_envs 7", "7 environments of tabletop/reach do not make episode groups of 4"),
    "workers": ("train reach --env.num_envs 7 --farm.physics-workers 2", "7 environments do not divide into 2 physics"),
    "trials": ("eval reach --eval.num-envs 7 --farm.physics-workers 2", "7 environments do not divide into 2 physics"),
    "cluster": ("train reach --cluster gpu:6379", "type --runtime.address in its place"),
    "data": ("sft reach --sft.data demonstrations", "type --data in its place"),
    "joined": ("train reach --stop-at-success=0.9", "no --stop-at-success any more: type --stop-at in its place"),
    "joined in a section": ("eval reach --eval.event objects:3@2", "type --eval.axes in its place"),
    "checkpoint": ("train openvla_small --policy.options.checkpoint gone", "policy.options.checkpoint: gone is not a"),
    "path": ("train pi0_small --policy.options.checkpoint not/a/folder", "not/a/folder is not a folder here"),
    "compared": ("compare reach_grpo --env.num-envs 7", "do not make episode groups of 4"),
    "recorded": ("record reach --out demos --env.task tabletop/rech", "did you mean tabletop/reach"),
    "learned": ("sft pi0_small --policy.kind pi1", "did you mean pi0"),
    "planned": ("plan reach --policy.kind gausian_mlp", "did you mean gaussian_mlp"),
    "measured": ("profile reach --env.task tabletop/rech", "did you mean tabletop/reach"),
    "unread": ("train reach --reward.model a.b:C", "reward.model is 'a.b:C', and the workflow ppo has no reward"),
    "compared with": ("train reach --loss.reference_kl 0.1", "set workflow to ppo_reference or grpo_reference"),
    "named": ("eval reach --name mine", "`embodied eval` begins none: leave it out; --folder says where"),
    "profiled": ("profile reach --name=mine", "`embodied profile` begins none: leave it out; --out says where"),
    "removed": ("eval pi0_small --policy.options.chekpoint=", "did you mean --policy.options.checkpoint=?"),
}


def test_common_mistakes_are_answered_before_torch_is_imported() -> None:
    code = f"""
import contextlib, io, json, sys
from embodied import cli
answers = {{}}
for name, (command, _) in {MISTAKES}.items():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        assert cli.main(command.split()) == 2, command
    assert not {{"torch", "ray", "mujoco", "sapien"}} & sys.modules.keys(), command
    answers[name] = said.getvalue()
print(json.dumps(answers))
"""
    answers = json.loads(in_a_new_process(code))
    for name, (command, part) in MISTAKES.items():
        assert part in answers[name], (command, answers[name])


def test_a_sweep_of_what_is_wrong_alone_is_not_refused_for_it(tmp_path: Path) -> None:
    output = refusal_here(
        "train", "reach", "--env.task", "tabletop/rech", "--sweep", "env.task=tabletop/reach,tabletop/push",
        "--policy.kind", "gausian_mlp", "--runs-dir", str(tmp_path),
    )  # fmt: skip
    assert "gausian_mlp" in output and "tabletop/rech" not in output.replace("tabletop/reach", "")


def hidden(folder: Path, *command: str) -> tuple[int, str]:
    """Exit status and last line of a command where modules in the folder come before all others."""
    path = f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}{os.pathsep}{ROOT}"
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env={**os.environ, "PYTHONPATH": path})
    assert not done.stdout
    return done.returncode, done.stderr


@pytest.mark.parametrize("name", ["policies/__init__.py", "schedulers.py", "sim_farm/__init__.py"])
def test_a_module_that_hides_one_of_ours_is_named_with_ours(name: str, tmp_path: Path) -> None:
    own = tmp_path / name
    own.parent.mkdir(exist_ok=True)
    own.touch()
    ours = ROOT / name.partition("/")[0].removesuffix(".py")
    for command in ([str(COMMAND), "train", "reach"], [sys.executable, "-m", "embodied.cli", "doctor"]):
        status, output = hidden(tmp_path, *command)
        assert status == 2 and len(output.splitlines()) == 1, output
        assert output.startswith(f"embodied: {own} hides") and str(ours) in output
    status, output = hidden(tmp_path, sys.executable, "-c", "import embodied")
    assert status == 1 and output.splitlines()[-1].startswith(f"ImportError: {own} hides") and str(ours) in output


def test_a_folder_that_hides_nothing_is_no_mistake(tmp_path: Path) -> None:
    (tmp_path / "policies").mkdir()  # without __init__.py: Python prefers a package
    assert hidden(tmp_path, sys.executable, "-c", "import embodied, policies.errors") == (0, "")


def test_help_may_be_read_in_part() -> None:
    """As by `embodied train --help | head`."""
    command = [str(Path(sys.executable).parent / "embodied"), "train", "--help"]
    shown = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert shown.stdout is not None and shown.stderr is not None
    assert shown.stdout.readline().startswith("usage: embodied train")
    shown.stdout.close()
    assert not shown.stderr.read() and shown.wait() == 0


@pytest.mark.parametrize("verb", ["train", "sft", "eval", "record", "profile", "plan", "compare"])
@pytest.mark.parametrize("options", [(), ("--iterations", "1")])
def test_without_a_configuration_usage_and_configurations_are_shown(
    verb: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, *options]) == 2
    output = capsys.readouterr().err
    assert output.startswith(f"usage: embodied {verb} ")
    for name, about in shipped_configs().items():
        assert any(line.split() == [name, *about.split()] for line in output.splitlines()), name
        assert len(about) > 20, "the file begins with a comment that says what it is"


def test_help_names_every_verb_and_imports_none() -> None:
    code = """
import sys
from embodied import cli
assert cli.main([]) == cli.main(["--help"]) == 0
loaded = {name.partition(".")[0] for name in sys.modules} & {"torch", "ray", "tyro", "pydantic", "numpy"}
assert not loaded, loaded
"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for verb in (*cli.VERBS, *cli.offered()):
        assert re.search(rf"^  {verb} +\w.{{10,}}$", shown, re.MULTILINE), verb


def test_an_unknown_verb_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["trian"]) == 2
    assert "did you mean train" in capsys.readouterr().err


def test_a_missing_package_is_named_with_what_installs_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("report", "arguments"):
        monkeypatch.delitem(sys.modules, f"embodied.commands.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert cli.main(["report", "some"]) == 2
    output = capsys.readouterr().err
    assert "'tyro'" in output and "embodied-farm[all]" in output


# --- evaluation


UNTRAINED = """
env: {task: tabletop/reach, num_envs: 4}
policy: {kind: random, chunk: 4}
farm: {groups: 1, physics_workers: 1}
eval: {episodes: 3, greedy: false, videos: 2}
runtime: {mode: inline}
"""


@pytest.fixture()
def untrained(tmp_path: Path) -> list[str]:
    """The arguments that evaluate a policy without parameters, whose configuration is no run."""
    (tmp_path / "untrained.yaml").write_text(UNTRAINED)
    return ["eval", str(tmp_path / "untrained.yaml"), "--runs-dir", str(tmp_path / "runs")]


@pytest.mark.slow
def test_a_suite_is_evaluated_into_a_table_and_a_folder(untrained: list[str], tmp_path: Path) -> None:
    written = ["--folder", str(tmp_path / "e"), "--json", str(tmp_path / "j")]
    status, output = here(*untrained, "--eval.tasks", "tabletop", *written)
    assert status == 0, output
    assert json.loads((tmp_path / "j").read_text()) == json.loads((tmp_path / "e" / "eval.json").read_text())
    table = (tmp_path / "e" / "eval.md").read_text()
    assert table in output and "| **tabletop**" in table
    assert (tmp_path / "e" / "videos" / "evaluation.mp4").stat().st_size > 0
    output = refusal_here(*untrained, "--eval.tasks", "tabletop", "--folder", str(tmp_path / "e"))
    assert "--resume auto" in output and "--folder" in output


def test_a_run_keeps_every_evaluation_and_shows_the_one_of_most_episodes(run: Path) -> None:
    reached = json.loads((run / "eval.json").read_text())["episodes"]
    for episodes, shown in ((reached - 1, reached), (reached + 1, reached + 1)):
        status, output = here("eval", str(run), "--eval.episodes", str(episodes), "--eval.videos", "0")
        assert status == 0, output
        folders = sorted((run / "evals").iterdir(), key=lambda folder: folder.stat().st_mtime)
        assert len(folders) >= 2
        assert json.loads((run / "eval.json").read_text())["episodes"] == shown
        said = f"stays the evaluation of {reached} episodes; this one, of {episodes}, is in {folders[-1]}"
        assert (said in " ".join(output.split())) == (episodes < reached)
    assert f" of {reached + 1} " in here("runs", "--runs-dir", str(run.parent))[1]
    assert here("report", str(folders[-1]))[0] == 0


def test_a_run_is_not_compared_with_itself(run: Path) -> None:
    newest = run / "checkpoints" / (run / "checkpoints" / "latest").read_text().strip()
    for itself in (run, newest):
        output = refusal_here("eval", str(run), "--against", str(itself), "--eval.videos", "0")
        assert f"--against {itself} is what is evaluated itself, {newest}" in output, output
    for option in ("--against", "--checkpoint"):
        output = refusal_here("eval", str(run), option, str(newest.parent / "000999"))
        assert f"there is no checkpoint {newest.parent / '000999'}: " in output and str(newest) in output, output


def test_an_unknown_suite_or_index_shows_the_nearest(untrained: list[str], tmp_path: Path) -> None:
    assert "tabletop" in refusal_here(*untrained, "--eval.tasks", "tabeltop")
    assert "tabletop/reach" in refusal_here(*untrained, "--eval.tasks", "tabletop/push", "tabletop/reech")
    assert not (tmp_path / "runs").exists(), "an evaluation that never began must leave no folder"


def test_a_configuration_whose_policy_needs_training_is_refused(tmp_path: Path) -> None:
    output = refusal_here("eval", "reach", *SMALL[:4], "--runs-dir", str(tmp_path / "runs"))
    assert "--checkpoint" in output
    assert not list(tmp_path.glob("runs/evals/*"))


def test_a_published_protocol_refuses_other_tasks(untrained: list[str]) -> None:
    output = refusal_here(*untrained, "--eval.protocol", "openvla-oft")
    assert "tabletop/reach" in output and "libero/libero_spatial" in output


def test_ray_is_not_started_from_a_python_whose_path_has_a_blank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray would wait for workers until its deadline."""
    monkeypatch.setattr(sys, "executable", "/my folder/.venv/bin/python")
    for verb in ("train reach", "train reach --dry-run"):
        message = refusal_here(*verb.split())
        assert "which has a blank: '/my folder/.venv/bin/python'" in message and "--runtime.mode inline" in message
