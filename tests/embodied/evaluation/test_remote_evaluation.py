"""Evaluations of a policy in another program: the episodes of the policy itself, and nothing lost where it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied
import policies
from embodied import cli
from embodied.commands.evaluate import evaluate_run
from embodied.config.files import save_config, with_settings
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.folder import read_folder
from embodied.rollout.loaded_policy import LoadedPolicy
from embodied.run.saved_settings import settings_of
from policies.contract import PolicyError
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import assert_same_episodes, config
from tests.embodied.support.served import acted, observations, serving, small_policy
from tests.policies.remote.handmade_server import free_port, served
from tests.variants import often

ROOT = Path(__file__).resolve().parents[3]
run = evaluations.run  # the fixture: its policy reads the state


def asking(address: str, settings: Config, **sections: dict[str, Any]) -> Config:
    """The settings with the policy at the address in place of their own."""
    base = settings.model_dump(mode="json")
    base["policy"] |= {"kind": "remote", "options": {"address": address}}
    base["eval"] |= {"episodes": 21}
    return config(base, **sections)


def lines(folder: Path) -> str:
    return (folder / "episodes.jsonl").read_text()


@pytest.mark.parametrize(
    ("groups", "greedy"), often([(1, True), (2, False)], [(1, True), (1, False), (2, True), (2, False)])
)
def test_a_served_policys_evaluation_equals_its_own_line_for_line(
    run: Path, greedy: bool, groups: int, tmp_path: Path
) -> None:
    settings = settings_of(str(run), tmp_path)
    base = settings.model_dump(mode="json")
    base["eval"] |= {"episodes": 21, "greedy": greedy}
    own = config(base, farm={"groups": groups, "physics_workers": 1})
    evaluate_run(str(run), own, None, tmp_path, into=tmp_path / "own")
    with serving(embodied.load_policy(run)) as (address, _):
        evaluate_run("remote", asking(address, own), None, tmp_path, into=tmp_path / "remote")
    assert lines(tmp_path / "own") == lines(tmp_path / "remote")
    assert_same_episodes(read_folder(tmp_path / "own"), read_folder(tmp_path / "remote"))


def test_a_served_policy_of_several_observations_is_evaluated_as_it_evaluates_itself(tmp_path: Path) -> None:
    """The client's environments give what the server's metadata ask for, env steps apart whatever the chunk."""
    options = {"widths": [16], "observations": 3, "distance": 2}
    own_run = evaluations.trained(tmp_path, "several", 3, sections={"policy": {"options": options, "chunk": 2}})
    own = config(settings_of(str(own_run), tmp_path).model_dump(mode="json"), eval={"episodes": 21})
    evaluate_run(str(own_run), own, None, tmp_path, into=tmp_path / "own")
    with serving(embodied.load_policy(own_run)) as (address, _):
        result = evaluate_run("remote", asking(address, own), None, tmp_path, into=tmp_path / "remote")
    assert lines(tmp_path / "own") == lines(tmp_path / "remote")
    assert (result["server"]["embodied"]["observations"], result["server"]["embodied"]["distance"]) == (3, 2)


@pytest.mark.slow  # records, trains and evaluates a vision-language-action model
def test_a_served_vision_language_action_models_evaluation_equals_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    record = "record tabletop_scripted --env.task tabletop/reach_red --out demos --episodes 4"
    sft = "sft pi0_small --data demos --name warm --sft.steps 2 --sft.batch 16 --eval.episodes 2 --eval.videos 0"
    for command in (record, sft):
        assert cli.main([*command.split(), "--runtime.mode", "inline"]) == 0
    warm = tmp_path / "runs" / "warm"
    own = config(settings_of(str(warm), tmp_path).model_dump(mode="json"), env={"num_envs": 4}, eval={"episodes": 6})
    evaluate_run(str(warm), own, None, tmp_path, into=tmp_path / "own")
    with serving(embodied.load_policy(warm)) as (address, _):
        remote = asking(address, own, eval={"episodes": 6})
        evaluate_run("remote", remote, None, tmp_path, into=tmp_path / "remote")
    assert lines(tmp_path / "own") == lines(tmp_path / "remote")
    assert lines(tmp_path / "own").count("\n") == 12  # two tasks


def test_the_result_has_the_servers_metadata_and_the_time_that_it_took(run: Path, tmp_path: Path) -> None:
    settings = settings_of(str(run), tmp_path)
    with serving(embodied.load_policy(run), origin={"checkpoint_sha256": "abc"}) as (address, _):
        result = evaluate_run("remote", asking(address, settings), None, tmp_path, into=tmp_path / "e")
    assert result["server"]["embodied"]["checkpoint_sha256"] == "abc"
    decisions = result["decisions"]
    assert 0 < decisions["latency_p50_s"] <= decisions["latency_p99_s"] <= decisions["latency_max_s"]
    assert decisions["decisions"] > 0 and 0 < decisions["waiting_share"] <= 1
    assert "not known" in result["notes"][0]
    policy = json.loads((tmp_path / "e" / "protocol.json").read_text())["policy"]
    assert policy["server"] == result["server"] and "address" not in policy["options"]


def still(observation: dict[str, Any]) -> dict[str, Any]:
    """Slow motion that depends on what is seen."""
    return {"actions": np.tanh(observation["observation/environment_state"][None, :3]) * np.ones((2, 1)) * 0.1}


STATES: dict[str, Any] = {
    "env": {"task": "tabletop/reach", "num_envs": 4},
    "policy": {"kind": "remote", "chunk": 2, "reads": ["state"]},
    "farm": {"physics_workers": 1},
    "eval": {"episodes": 6, "videos": 0},
    "runtime": {"mode": "inline"},
}


def states(address: str, **options: Any) -> Config:
    return config(STATES, policy={"options": {"address": address, **options}})


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        (lambda: None, "has gone"),
        (lambda: {"actions": np.full((2, 3), np.nan)}, "not finite"),
        (lambda: "Traceback (most recent call last):\nZeroDivisionError: division by zero", "ZeroDivisionError"),
        (lambda: (threading.Event().wait(3), {"actions": np.zeros((2, 3))})[1], "did not answer within 0.5 s"),
    ],
    ids=["dies", "nonsense", "traceback", "hangs"],
)
def test_a_server_that_fails_amid_an_evaluation_costs_a_message_and_resume_goes_on(
    fails: Any, message: str, tmp_path: Path
) -> None:
    """With four environments and an end after ever so many steps, some episodes have ended when it fails."""
    whole, part = tmp_path / "whole", tmp_path / "part"
    with served(still) as address:
        evaluate_run("remote", states(address), None, tmp_path, into=whole)
    limit = max(outcome.limit for outcome in read_folder(whole).outcomes.values())
    answered: list[int] = []

    def failing(observation: dict[str, Any]) -> Any:
        answered.append(1)
        return still(observation) if len(answered) < 4 * limit // 2 + 8 else fails()

    with served(failing) as address, pytest.raises(PolicyError, match=message) as caught:
        evaluate_run("remote", states(address, timeout_s=0.5), None, tmp_path, into=part)
    kept = len(read_folder(part).outcomes)
    assert 0 < kept < 6
    assert f"{kept} of 6 episodes are kept in {part}; --resume auto goes on with them" in str(caught.value)
    with served(still) as address:  # at another address: what is compared is what the server says of itself
        result = evaluate_run("remote", states(address, timeout_s=60.0), None, tmp_path, into=part, resume=True)
    assert result["episodes_of_earlier_sessions"] == kept
    assert lines(part) == lines(whole)


def test_another_server_does_not_go_on_with_the_episodes_of_the_first(tmp_path: Path) -> None:
    with served(still, {"model": "first"}) as address:
        evaluate_run("remote", states(address), None, tmp_path, into=tmp_path / "e")
    with served(still, {"model": "second"}) as address, pytest.raises(UserError, match="policy.server"):
        evaluate_run("remote", states(address), None, tmp_path, into=tmp_path / "e", resume=True)


def test_groups_are_decided_for_side_by_side(tmp_path: Path) -> None:
    """A request of each of the two groups meets in the server, which answers neither before."""
    meeting, tried = threading.Barrier(2), threading.Event()

    def answer(observation: dict[str, Any]) -> dict[str, Any]:
        if tried.is_set():
            meeting.wait(timeout=100)
        tried.set()
        return still(observation)

    settings = config(
        STATES,
        env={"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 6},
        farm={"physics_workers": 1, "groups": 2},
        eval={"episodes": 2, "videos": 0},
    )
    with served(answer) as address:
        base = settings.model_dump(mode="json")
        base["policy"]["options"] = {"address": address}
        evaluate_run("remote", config(base), None, tmp_path, into=tmp_path / "e")
    assert len(read_folder(tmp_path / "e").outcomes) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy.options.address", f"ws://127.0.0.1:{free_port()}"], "no policy server answers"),
        (["--policy.options.address", "nowhere"], "ws://HOST:PORT"),
    ],
)
def test_without_a_server_nothing_runs(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_config(states("ws://127.0.0.1:1"), tmp_path / "remote.yaml")
    assert cli.main(["eval", str(tmp_path / "remote.yaml"), "--folder", str(tmp_path / "e"), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "e").exists()


def test_a_remote_policy_is_not_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(still) as address:
        save_config(states(address), tmp_path / "remote.yaml")
        assert cli.main(["train", str(tmp_path / "remote.yaml"), "--runs-dir", str(tmp_path)]) == 2
    assert "nothing to learn" in capsys.readouterr().err


def test_environments_of_another_convention_than_the_served_policys_are_refused(tmp_path: Path) -> None:
    pictures = {"env": {"cameras": 1, "image_size": 32, "task": "tabletop/reach", "orientation": "rotated"}}
    with serving(small_policy()) as (address, _), pytest.raises(UserError, match="set env.orientation to upright"):
        base = {
            **STATES,
            "policy": {**STATES["policy"], "reads": ["images", "proprio"], "options": {"address": address}},
        }
        evaluate_run("remote", config(base, **pictures), None, tmp_path, into=tmp_path / "e")


@pytest.mark.parametrize(("setting", "value"), [("gripper", "inverted"), ("control_mode", "pd_ee_delta_pos")])
def test_a_gripper_or_control_mode_of_another_training_is_refused(setting: str, value: str, tmp_path: Path) -> None:
    loaded = small_policy()
    served = replace(loaded, config=with_settings(loaded.config, {f"env.{setting}": value}, "test"))
    with serving(served) as (address, _), pytest.raises(UserError, match=f"set env.{setting} to {value}"):
        policy = {**STATES["policy"], "reads": ["images", "proprio"], "options": {"address": address}}
        pictures = {"cameras": 1, "image_size": 32, "task": "tabletop/reach"}
        evaluate_run("remote", config({**STATES, "policy": policy}, env=pictures), None, tmp_path, into=tmp_path / "e")


def test_cameras_in_another_order_than_the_served_policys_are_refused() -> None:
    spec = replace(small_policy().spec, cameras=("wrist", "base"))
    with serving(small_policy()) as (address, _), pytest.raises(PolicyError, match="reads the camera wrist as"):
        policies.build("remote", spec, 0, address=address)


# --- the published client


CLIENT = """
import json, sys
import numpy as np
from openpi_client import websocket_client_policy
client = websocket_client_policy.WebsocketClientPolicy("127.0.0.1", int(sys.argv[1]))
sent = np.load(sys.argv[2])
answers = [
    client.infer({**{key.replace(":", "/"): sent[key][row] for key in sent}, "prompt": "do something"})["actions"]
    for row in range(len(sent["observation:state"]))
]
np.save(sys.argv[3], np.stack(answers))
print(json.dumps(sorted(client.get_server_metadata())))
"""


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """openpi-client and vla-eval as the package index has them; beside the environment, since the one asks for NumPy 1,
    and the other's benchmarks for far more than its client does."""
    folder = tmp_path_factory.mktemp("published")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder)]
    packages = ["openpi-client==0.1.2", "vla-eval==0.8.0", "lazyregistry==0.4.0", "anyio", "idna", "sniffio"]
    subprocess.run([*pip, *packages, "typing-extensions"], check=True)
    yield folder


VLA_EVAL = """
import asyncio, json, sys
import numpy as np
from vla_eval.connection import Connection
from vla_eval.protocol.numpy_codec import set_image_format

set_image_format(sys.argv[4])
sent = np.load(sys.argv[2])

async def main():
    got = []
    async with Connection(f"ws://127.0.0.1:{sys.argv[1]}/vla-eval") as server:
        for episode in range(2):
            await server.start_episode({"task": {"name": "a task"}})
            for row in range(len(sent["states"])):
                images = {"agentview": sent["base"][row], "wrist": sent["wrist"][row]}
                seen = {"images": images, "states": sent["states"][row], "task_description": "do something"}
                got.append((await server.act(seen))["actions"])
            await server.end_episode({"metrics": {"success": False}})
        await server.start_episode({"task": {"name": "a task"}})
        try:
            await server.act({"images": {}})
        except RuntimeError as error:
            refused = str(error)
    np.save(sys.argv[3], np.stack(got))
    print(json.dumps([server.server_info["observation_params"], refused]))

asyncio.run(main())
"""


@pytest.mark.slow  # asks the package index
@pytest.mark.parametrize("pictures", ["png", "raw"])
def test_vla_evals_published_client_gets_the_env_steps_of_the_chunks_that_act_gives(
    published: Path, pictures: str, tmp_path: Path
) -> None:
    """A policy of chunks of three is asked five times an episode: it decides about the first and the fourth."""
    loaded, sent = small_policy(chunk=3), observations(5)
    base, wrist, states = (
        np.stack([one[f"observation/{key}"] for one in sent]) for key in ("image", "wrist_image", "state")
    )
    np.savez(tmp_path / "sent.npz", base=base, wrist=wrist, states=states)
    with serving(loaded) as (address, server):
        given = [address.rpartition(":")[2], tmp_path / "sent.npz", tmp_path / "got.npy", pictures]
        environment = {**os.environ, "PYTHONPATH": str(published)}
        program = [sys.executable, "-c", VLA_EVAL, *map(str, given)]
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
        assert server.latencies["requests"] == 4  # decisions, not env steps
    asks, refused = json.loads(done.stdout)
    assert asks == {"send_wrist_image": True, "send_state": True} and "the observation lacks" in refused
    expected = np.concatenate([acted(loaded, sent[0]), acted(loaded, sent[3])[:2]])
    assert np.array_equal(np.load(tmp_path / "got.npy"), np.concatenate([expected, expected]))


@pytest.mark.slow  # asks the package index
def test_the_published_client_gets_the_actions_that_act_gives_bit_for_bit(published: Path, tmp_path: Path) -> None:
    loaded: LoadedPolicy = small_policy()
    sent = observations(5)
    keys = [key for key in sent[0] if key != "prompt"]
    arrays = {key.replace("/", ":"): np.stack([each[key] for each in sent]) for key in keys}
    np.savez(tmp_path / "sent.npz", **arrays)  # type: ignore[arg-type]
    with serving(loaded) as (address, _):
        program = [
            sys.executable,
            "-c",
            CLIENT,
            address.rpartition(":")[2],
            tmp_path / "sent.npz",
            tmp_path / "got.npy",
        ]
        environment = {**os.environ, "PYTHONPATH": str(published)}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '["embodied"]'
    for found, observation in zip(np.load(tmp_path / "got.npy"), sent, strict=True):
        assert np.array_equal(found, acted(loaded, observation))
