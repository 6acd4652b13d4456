"""The protocol of an evaluation: what it says, what its hash covers, and what is refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, get_args

import pytest

from embodied.config.files import parse_config
from embodied.config.schema import Config, EvalConfig
from embodied.errors import UserError
from embodied.evaluation.protocol import (
    GENERALISATION,
    LATENCY,
    PRESETS,
    Protocol,
    as_data,
    expand,
    from_data,
    protocol_of,
)
from embodied.rollout.executed_chunks import Delayed
from sim_farm.catalogue import check_task
from sim_farm.contract import FarmError, TaskInfo, TaskSpec
from sim_farm.perturbations import Perturbation
from sim_farm.registry import backend


def config(**sections: Any) -> Config:
    return parse_config({"env": {"task": "tabletop/reach"}, **sections}, "test")


def refusal(**sections: Any) -> str:
    with pytest.raises(UserError) as caught:
        protocol_of(config(**sections))
    return str(caught.value)


# --- which tasks


def test_a_pattern_names_a_task_a_suite_or_a_simulator() -> None:
    everything = tuple(f"tabletop/{task}" for task in backend("tabletop").tasks())
    assert expand(["tabletop"]) == everything
    assert expand(["tabletop/reach"]) == ("tabletop/reach",)
    assert expand(["tabletop/push,tabletop/reach"]) == expand(["tabletop/push", "tabletop/reach"])


def test_a_task_named_twice_is_evaluated_once() -> None:
    assert expand(["tabletop/push", "tabletop"])[0] == "tabletop/push"
    assert sorted(expand(["tabletop/push", "tabletop"])) == sorted(expand(["tabletop"]))


@pytest.mark.parametrize(
    ("given", "hint"),
    [("tabletop/reech", "tabletop/reach"), ("tablettop/reach", "tabletop"), ("nonsense", "valid: "), ("", "valid: ")],
)
def test_an_unknown_task_or_suite_is_refused_with_the_nearest(given: str, hint: str) -> None:
    message = refusal(eval={"tasks": [given]})
    assert repr(given) in message and hint in message


# --- the hash


def test_equal_settings_have_equal_hashes_and_any_other_setting_another() -> None:
    base = protocol_of(config())
    assert protocol_of(config()).sha256 == base.sha256
    others: dict[str, Any] = {
        "name": "x", "limits": {"tabletop/push": None}, "trials": 7, "init_states": (1,), "env_seed": 3,
        "settle_steps": 2, "orientation": "stock", "image_size": 99, "gripper": "binary", "control_mode": "m",
        "reward": "sparse", "greedy": False, "seed": 5, "instruction": "wave",
        "seeding": "once", "unseeded_resets": 1, "cameras": 2, "chunk": 3, "version": 1,
        "ignore_terminations": True, "attempts": 2, "task_digests": {"tabletop/reach": "0"},
        "perturbations": {"tabletop/reach": (Perturbation("words", 1, words="please {}"),)},
        "delays": (Delayed("naive", "1", 3),), "trained_delay": Delayed("naive", "1", 3),
    }  # fmt: skip
    assert others.keys() == {f.name for f in fields(Protocol)}
    hashes = {replace(base, **{name: value}).sha256 for name, value in others.items()} | {base.sha256}
    assert len(hashes) == len(others) + 1


def test_a_protocol_reads_back_equal_and_a_changed_one_is_refused() -> None:
    protocol = protocol_of(config(eval={"init_states": [0, 2], "episodes": 2}))
    data = as_data(protocol)
    assert from_data(data) == protocol
    assert "instruction" not in data, "hashes of evaluations made before protocols had one would be others"
    instructed = replace(protocol, instruction="wave")
    assert from_data(as_data(instructed)) == instructed and "instruction 'wave'" in instructed.line()
    with pytest.raises(UserError, match="changed"):
        from_data({**data, "trials": 3})


def test_a_policy_that_reads_no_instruction_cannot_be_given_one() -> None:
    assert "the policy reads state" in refusal(eval={"instruction": "wave"})


# --- the episodes


def test_episodes_do_not_depend_on_how_many_or_which_tasks_there_are() -> None:
    few, many = (protocol_of(config(eval={"episodes": n})).episodes("tabletop/reach") for n in (3, 8))
    assert many[:3] == few
    assert protocol_of(config(eval={"tasks": ["tabletop"], "episodes": 3})).episodes("tabletop/reach") == few
    assert len({spec.seed for spec in many}) == 8


def test_trials_begin_from_the_listed_initial_states_in_turn() -> None:
    protocol = protocol_of(config(eval={"init_states": [4, 1], "episodes": 5, "greedy": False}))
    assert [spec.init_state for spec in protocol.episodes(protocol.tasks[0])] == [4, 1, 4, 1, 4]


def test_greedy_trials_that_would_repeat_an_episode_are_refused() -> None:
    message = refusal(eval={"init_states": [4, 1], "episodes": 3})
    assert "2 initial states" in message and "--eval.episodes" in message


# --- published protocols


LIBERO = "libero/libero_spatial/3"


def published(name: str, **more: Any) -> Protocol:
    return protocol_of(parse_config({"env": {"task": LIBERO}, "eval": {"protocol": name, **more}}, "test"))


def test_every_preset_can_be_named_in_a_configuration() -> None:
    literal = EvalConfig.model_fields["protocol"].annotation
    named = {name for option in get_args(literal) for name in get_args(option)}
    assert named == {*PRESETS, GENERALISATION, LATENCY}


@pytest.mark.parametrize(
    ("name", "steps", "gripper"),
    [
        ("openvla-oft", (220, 280, 300, 520, 400), "inverted"),
        ("openpi", (220, 280, 300, 520, 400), "simulator"),
        ("lerobot", (280, 280, 300, 520, 400), "simulator"),
        ("simplevla-rl", (512, 512, 512, 512, 512), "inverted"),
    ],
)
def test_presets_say_what_was_published(name: str, steps: tuple[int, ...], gripper: str) -> None:
    suites = [f"libero/libero_{suite}" for suite in ("spatial", "object", "goal", "10", "90")]
    assert PRESETS[name].limits == dict(zip(suites, steps, strict=True))
    protocol = published(name)
    assert protocol.limits == {LIBERO: steps[0]} and protocol.gripper == gripper
    assert (protocol.trials, protocol.settle_steps, protocol.orientation, protocol.image_size) == (
        50,
        10,
        "rotated",
        256,
    )
    assert [spec.init_state for spec in protocol.episodes(protocol.tasks[0])] == list(range(50))


def test_a_preset_overrides_the_training_s_conventions_in_the_simulator_alone() -> None:
    trained = parse_config({"env": {"task": LIBERO, "max_episode_steps": 99}, "policy": {"chunk": 8}}, "test")
    applied = protocol_of(
        parse_config({"env": {"task": LIBERO}, "policy": {"chunk": 8}, "eval": {"protocol": "openvla-oft"}}, "test")
    ).applied(trained, LIBERO)
    env = applied.env
    assert (env.max_episode_steps, env.settle_steps, env.orientation, env.gripper) == (220, 10, "rotated", "inverted")
    assert applied.policy == trained.policy and env.cameras == trained.env.cameras


def test_fewer_trials_than_published_are_reported_as_fewer() -> None:
    assert "10 trials a task (published: 50) from initial states 0 to 9" in published("openvla-oft", episodes=10).line()
    as_theirs = {"reads": ["images"], "chunk": 8}
    whole = parse_config(
        {"env": {"task": LIBERO, "cameras": 2}, "policy": as_theirs, "eval": {"protocol": "openvla-oft"}}, "test"
    )
    assert "published" not in protocol_of(whole).line()
    assert "cameras agentview, robot0_eye_in_hand" in protocol_of(whole).line()


def test_what_a_policy_sees_and_how_often_it_decides_belongs_to_the_protocol() -> None:
    def of(cameras: Any, chunk: int, name: str = "openpi") -> Protocol:
        data = {
            "env": {"task": LIBERO, "cameras": cameras},
            "policy": {"reads": ["images"], "chunk": chunk},
            "eval": {"protocol": name},
        }
        return protocol_of(parse_config(data, "test"))

    base = of(2, 5)
    assert of(("agentview", "robot0_eye_in_hand"), 5) == base, "counted and named cameras are the same"
    assert len({base.sha256, of(1, 5).sha256, of(2, 10).sha256}) == 3
    assert "action chunks of 10 env steps (published: 5)" in of(2, 10).line()
    assert "cameras agentview (published: agentview, robot0_eye_in_hand)" in of(1, 5).line()
    assert "published" not in of(1, 8, "simplevla-rl").line() and "published" not in of(2, 50, "lerobot").line()
    assert of(3, 5).cameras == 3, "a camera that a policy sees is left out"
    assert base.same_episodes(of(1, 10)) and not base.same_episodes(of(2, 5, "lerobot"))
    other = parse_config({"env": {"task": LIBERO, "cameras": 1}, "policy": {"chunk": 2}}, "test")
    assert (base.shown_to(other).chunk, base.shown_to(other).cameras) == (2, 0)


@pytest.mark.parametrize(
    ("name", "seeds", "resets", "unseeded"),
    [
        ("openvla-oft", (0, 0, 0), (0, 1, 2), 0),
        ("openpi", (7, 7, 7), (0, 1, 2), 0),
        ("lerobot", (1000, 1001, 1002), (0, 0, 0), 1),
        ("simplevla-rl", (0, 0, 0), (0, 0, 0), 0),
    ],
)
def test_the_simulator_is_seeded_as_in_the_published_evaluation(
    name: str, seeds: tuple[int, ...], resets: tuple[int, ...], unseeded: int
) -> None:
    protocol = published(name, episodes=3)
    specs = protocol.episodes(protocol.tasks[0])
    assert tuple(spec.seed for spec in specs) == seeds and tuple(spec.resets for spec in specs) == resets
    assert all(spec.unseeded_resets == unseeded for spec in specs)


def test_a_protocol_is_read_as_it_was_written() -> None:
    protocol = published("openpi", episodes=3)
    data = as_data(protocol)
    assert from_data(data) == protocol
    with pytest.raises(UserError, match="changed"):
        from_data({**data, "trials": 9})
    for version in (2, 4, None):
        with pytest.raises(UserError, match=f"version {version} of protocols is not known"):
            from_data({**data, "version": version})


# --- the tasks' files


def test_the_files_of_libero_s_tasks_belong_to_the_protocol() -> None:
    protocol = published("openpi", tasks=["libero/libero_spatial"])
    assert protocol.task_digests.keys() == protocol.limits.keys()
    assert len(set(protocol.task_digests.values())) == 10
    other = replace(protocol, task_digests={**protocol.task_digests, LIBERO: "0" * 64})
    assert other.sha256 != protocol.sha256 and not other.same_episodes(protocol)
    assert not protocol_of(config()).task_digests, "tabletop's tasks are in the simulator's code"


def test_a_simulator_with_other_task_files_than_the_protocol_s_is_refused() -> None:
    protocol = published("openpi")
    info = TaskInfo(TaskSpec(LIBERO), 7, (), (), 8, 25, 0, (), 220, 20.0, init_states=50)
    protocol.check(LIBERO, replace(info, digest=protocol.task_digests[LIBERO]))
    with pytest.raises(UserError, match="has other task files than the process that evaluates"):
        protocol.check(LIBERO, replace(info, digest="0" * 64))


@pytest.mark.parametrize(
    "suite", ["libero_spatial_swap", "libero_goal_with_mug", "libero_object_temp_x0.1", "libero_spatial_lan"]
)
def test_suites_that_others_made_of_libero_s_are_refused(suite: str) -> None:
    for name in (f"libero/{suite}", f"libero/{suite}/0"):
        message = refusal(eval={"tasks": [name]})
        assert "LIBERO-PRO" in message and "libero/libero_90" in message and "did you mean" not in message
    with pytest.raises(FarmError, match="only LIBERO's own suites are known"):
        check_task(f"libero/{suite}/0")


# --- ranges


def test_initial_states_are_named_by_ranges() -> None:
    protocol = protocol_of(config(eval={"init_states": "25-49,3", "episodes": 26}))
    assert protocol.init_states == (*range(25, 50), 3)
    assert "initial states 25 to 49, 3, seeds" in protocol.line()
    assert protocol_of(config(eval={"init_states": [0, "2-4"], "episodes": 4})).init_states == (0, 2, 3, 4)
    env = config(env={"init_states": "0-2,7"}).env
    assert list(env.recorded_starts) == [0, 1, 2, 7]
    assert list(config(env={"init_states": 3}).env.recorded_starts) == [0, 1, 2]
    assert config(env={"init_states": "3"}).env.init_states == 3, "as the command line reads it"
    assert not config().env.recorded_starts


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("24-0", "write 0-24"),
        ("0-5,3", "names 3 twice"),
        ("a-b", "no list of ranges"),
        ("0-", "no list of ranges"),
        ("", "no list of ranges"),
        ("0-999999", "beyond 99999"),
    ],
)
def test_what_is_no_range_of_initial_states_is_refused(given: str, message: str) -> None:
    for section in ({"env": {"init_states": given}}, {"eval": {"init_states": given}}):
        with pytest.raises(UserError, match=message):
            config(**section)


def test_more_trials_than_initial_states_are_refused() -> None:
    with pytest.raises(UserError, match="60 greedy trials from 50 initial states"):
        published("openvla-oft", episodes=60)


def test_a_preset_says_nothing_of_other_simulators() -> None:
    message = refusal(eval={"protocol": "openvla-oft"})
    assert "tabletop/reach" in message and "libero/libero_spatial" in message and "--eval.protocol" in message


def of_suite(name: str, **settings: Any) -> Protocol:
    given = {"protocol": name, "tasks": ["libero/libero_goal/0"], **settings}
    return protocol_of(config(policy={"kind": "scripted", "reads": ["state", "instruction"]}, eval=given))


def test_a_suite_of_perturbations_repeats_each_trial_under_its_variants() -> None:
    protocol = of_suite("libero-plus", axes=["start:1,2", "objects:1,2"])
    table = protocol.perturbations["libero/libero_goal/0"]
    assert protocol.total == 1 + len(table) > 20
    assert {(one.axis, one.level) for one in table} == {(axis, k) for axis in ("start", "objects") for k in (1, 2)}
    assert all(one.source is not None and one.source.startswith("libero_goal/") for one in table)
    assert from_data(as_data(protocol)) == protocol
    assert of_suite("libero-pro", axes="swap", episodes=3).total == 6
    some = of_suite("libero-plus", axes=["start:1", "objects:2"]).perturbations["libero/libero_goal/0"]
    assert list(some) == [one for one in table if (one.axis, one.level) in (("start", 1), ("objects", 2))]


def test_what_the_policy_is_told_belongs_to_the_protocol() -> None:
    intended, published = (of_suite(name, axes="task") for name in ("libero-pro", "libero-pro-published"))
    assert intended.name == published.name == "libero-pro"
    assert intended.sha256 != published.sha256
    assert intended.perturbations["libero/libero_goal/0"][0].words == "open the bottom drawer of the cabinet"
    assert published.perturbations["libero/libero_goal/0"][0].words == "open the middle drawer of the cabinet"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"axes": "light"}, "has no axis 'light': it has camera, start, words, noise, objects"),
        ({"axes": "objects:1@3"}, "leave those of eval.axes out"),
        ({"tasks": ["tabletop/reach"]}, "says nothing of tabletop/reach"),
    ],
)
def test_what_a_suite_does_not_have_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        of_suite("libero-plus", **settings)
