"""Conventions that a policy was trained under, compared with those of the environments in which it acts.

A policy that sees its pictures turned, or whose gripper opens where it is to close, fails by construction, and looks
like a bad policy. What it was trained under stands in its run's config.yaml. A difference by which it is wrong is
refused, one that matters less is said.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.run.saved_settings import recorded_settings, run_of_checkpoint
from embodied.workflows.run_spec import task_spec, tasks_of
from policies.registry import policy_kind
from sim_farm.contract import TaskInfo
from sim_farm.conventions import turns
from sim_farm.workers.hosts import InProcess

ONE_WAY = frozenset({"simulator", "binary"})
"""Gripper conventions that agree on which sign of an action opens and which closes."""
BY_PROTOCOL = ("env.orientation", "env.gripper", "env.image_size")
"""Settings that a published protocol of evaluations determines."""


@dataclass(frozen=True)
class Difference:
    """A convention that is another one where the policy acts."""

    setting: str
    trained: Any
    here: Any
    follows: str
    """The policy's settings that follow from it."""
    is_wrong: bool = True
    """True if the policy acts wrongly by it; False: perhaps less well."""


def trained_under(folder: Path) -> Config | None:
    """The configuration under which the policy of a checkpoint was trained last; None where nothing says it: it does
    not lie below its run."""
    run_dir = run_of_checkpoint(folder)
    try:
        return None if run_dir is None else recorded_settings(run_dir)
    except UserError:
        return None


def differences(trained: Config, here: Config) -> list[Difference]:
    """The conventions that differ between a policy's training (`trained`) and its use (`here`), each once."""
    found = [difference for task in tasks_of(here) for difference in _in_task(trained, task)]
    return list({difference.setting: difference for difference in reversed(found)}.values())[::-1]


def check_alike(whose: str, trained: Config, here: Config, remedy: str = "", protocol: str | None = None) -> None:
    """Raise `UserError` where a policy that was `trained` so is wrong `here`. `remedy`: what else may be done than to
    take the conventions of its training; `protocol`: a published one that determines those `here`."""
    wrong = [difference for difference in differences(trained, here) if difference.is_wrong]
    if not wrong:
        return
    fixed = () if protocol is None else BY_PROTOCOL
    typed = [f"--{one.setting.replace('_', '-')} {_typed(one.trained)}" for one in wrong if one.setting not in fixed]
    ways = [f"let it act as it was trained ({' '.join(typed)})"] if typed else []
    if any(one.setting in fixed for one in wrong):
        ways.append(
            f"evaluate by another protocol than {protocol}, which determines that, or by none (--eval.protocol)"
        )
    raise UserError(f"{_sentence(whose, wrong)}: {', or '.join([*ways, *([remedy] if remedy else [])])}")


def check_checkpoint(folder: Path, here: Config, remedy: str = "", protocol: str | None = None) -> None:
    """`check_alike` for the policy of a checkpoint, where its training is recorded."""
    trained = trained_under(folder)
    if trained is not None:
        check_alike(str(folder), trained, here, remedy, protocol)


def notes_on(folder: Path, here: Config) -> list[str]:
    """A sentence for each convention in which a checkpoint's policy acts differently `here`, or a sentence that its
    training is not recorded."""
    trained = trained_under(folder)
    if trained is None:
        return [_unrecorded(folder, here)]
    return [_sentence(str(folder), [difference]) for difference in differences(trained, here)]


def in_words(trained: Config) -> dict[str, str]:
    """The conventions under which a policy was trained, for people: what another program has to show and to execute."""
    env, policy = trained.env, trained.policy
    said = {"task": env.task, "reads": ", ".join(policy.reads)}
    if "images" in policy.reads:
        said["cameras"] = (
            f"the first {env.cameras} of the task" if isinstance(env.cameras, int) else ", ".join(env.cameras)
        )
        said["pictures"] = f"{env.orientation} (env.orientation), {env.image_size} x {env.image_size} pixels"
    if not policy_kind(policy.kind).chooses:
        said["gripper"] = f"{env.gripper} (env.gripper)"
        said["control mode"] = _shown(env.control_mode)
        said["chunk"] = f"{policy.chunk} actions are executed of a decision"
    if transforms := policy.options.get("transforms"):
        said["transforms"] = f"{transforms}, between these and the network: no part of this directory"
    return said


def overruled(own: Config, here: Config) -> list[str]:
    """Sentences about conventions that the configuration of a pretrained policy says, and that are others `here`, since
    a protocol determines them. What it leaves at the default says nothing."""
    cls, default = policy_kind(own.policy.kind), Config()
    if not (cls.pretrained and cls.trainable):
        return []
    said = [one for one in differences(own, here) if one.setting in BY_PROTOCOL and one.is_wrong]
    named = {
        f"env.{name}" for name in ("orientation", "gripper") if getattr(own.env, name) != getattr(default.env, name)
    }
    return [_sentence("the policy of this configuration", [one], "is") for one in said if one.setting in named]


def _unrecorded(folder: Path, here: Config) -> str:
    taken = [f"gripper {here.env.gripper}"]
    if "images" in here.policy.reads:
        taken.insert(0, f"orientation {here.env.orientation}")
    return (
        f"nothing says under which conventions {folder} was trained, which does not lie below its run: taken are "
        f"{' and '.join(taken)}"
    )


def _sentence(whose: str, found: list[Difference], was: str = "was trained") -> str:
    trained = " and ".join(f"{one.setting} {_shown(one.trained)}" for one in found)
    here = " and ".join(_shown(one.here) for one in found)
    follows = ", and ".join(dict.fromkeys(one.follows for one in found))
    return f"{whose} {was} with {trained}, and acts here with {here}, by which {follows}"


def _in_task(trained: Config, here: Config) -> Iterator[Difference]:
    """Differences in one task: from the training's settings for it, or else for the training's first task."""
    tasks = tasks_of(trained)
    before = next((task for task in tasks if task.env.task == here.env.task), tasks[0]).env
    now, sees = here.env, "images" in trained.policy.reads and "images" in here.policy.reads
    if _simulator(before.task) != _simulator(now.task):
        # The same words mean another thing of another robot.
        yield Difference("env.task", before.task, now.task, "robot, gripper and rate are another simulator's", False)
        return
    if sees and _turned(before.orientation, here):
        yield Difference("env.orientation", before.orientation, now.orientation, "its pictures are turned")
    if before.gripper != now.gripper:
        one_way = {before.gripper, now.gripper} <= ONE_WAY
        follows = "a gripper's command between the two ends is another" if one_way else "its gripper does the opposite"
        yield Difference("env.gripper", before.gripper, now.gripper, follows, not one_way)
    if _other_mode(before.control_mode, here):
        yield Difference(
            "env.control_mode", before.control_mode, now.control_mode, "its actions move the robot otherwise"
        )
    if sees and type(before.cameras) is type(now.cameras) and before.cameras != now.cameras:
        yield Difference("env.cameras", before.cameras, now.cameras, "it sees other cameras, or in another order")
    if sees and before.image_size != now.image_size:
        yield Difference("env.image_size", before.image_size, now.image_size, "its pictures have another size")
    was, chunk = trained.policy.chunk, here.policy.chunk
    if trained.policy.kind == here.policy.kind:
        # A policy that is built for as many actions is the same one, also where some of them are executed late.
        free = trained.decided == here.decided or "spec.chunk" in policy_kind(here.policy.kind).incidental
        if was != chunk:
            yield Difference("policy.chunk", was, chunk, "it decides at other intervals", not free)
        elif before.delay != now.delay:
            yield Difference("env.delay", before.delay, now.delay, "other actions of a decision are executed", not free)


def _turned(orientation: Any, here: Config) -> bool:
    """True if frames of this orientation look different from the environment's."""
    both = {orientation, here.env.orientation}
    if len(both) == 1 or both != {"upright", "stock"}:
        return len(both) > 1
    upside_down = _described(here).stock_upside_down
    return turns("upright", upside_down) != turns("stock", upside_down)


def _other_mode(mode: str | None, here: Config) -> bool:
    """True if the control mode differs from the environment's; None is the simulator's default."""
    both = {mode, here.env.control_mode}
    return len(both) > 1 and (None not in both or _described(here).spec.control_mode not in both)


def _described(here: Config) -> TaskInfo:
    """The task as its simulator has it by default, which has to be made for it."""
    return InProcess().describe(replace(task_spec(here), control_mode=None, cameras=0, perturbations=()))


def _simulator(task: str) -> str:
    return task.partition("/")[0].rpartition(":")[2]


def _shown(value: Any) -> str:
    return "the simulator's default" if value is None else _typed(value)


def _typed(value: Any) -> str:
    """The value as it is typed on the command line."""
    return " ".join(value) if isinstance(value, tuple) else str(value)
