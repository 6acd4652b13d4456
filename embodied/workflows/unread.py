"""Settings that nothing in a run would read: each is refused, with what would read it. Known without torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from embodied.config.files import all_settings
from embodied.config.schema import Config
from embodied.errors import UserError, shown
from embodied.workflows.recipes import RECIPES, Recipe
from embodied.workflows.run_spec import RunSpec


@dataclass(frozen=True)
class Reader:
    """A part of a training run that reads settings and that not every run has."""

    settings: tuple[str, ...]
    name: str
    there: Callable[[Config, Recipe], bool]
    """True if the run has it."""
    remedy: str = ""
    """Settings that add the part to the run; empty if the workflow decides whether a run has it."""


def _estimators(*names: str) -> Callable[[Config, Recipe], bool]:
    return lambda config, recipe: not isinstance(recipe.estimator, str) or recipe.estimator in names


def _objectives(*names: str) -> Callable[[Config, Recipe], bool]:
    return lambda config, recipe: not isinstance(recipe.objective, str) or recipe.objective in names


def _worker_reads(section: str) -> Callable[[Config, Recipe], bool]:
    """True if a component declares the section in its `reads`."""
    return lambda config, recipe: any(section in c.reads for c in recipe.components)


def _has_reference(config: Config, recipe: Recipe) -> bool:
    return any("reference_log_prob" in c.adds for c in recipe.components)


READERS = (
    Reader(("rollout.decisions",), "rollout of decisions", lambda config, recipe: recipe.rollout == "decisions"),
    Reader(
        ("rollout.episodes_per_env", "rollout.episode_group"),
        "rollout of whole episodes",
        lambda config, recipe: recipe.rollout == "episodes",
    ),
    Reader(
        ("rollout.max_episodes_per_env", "advantage.scale", "advantage.keep_rates"),
        "comparison within episode groups",
        _estimators("group_relative"),
    ),
    Reader(
        ("advantage.gamma", "advantage.lam"),
        "generalised advantages",
        _estimators("gae"),
    ),
    Reader(("advantage.credit",), "credit of single decisions", _estimators("gae", "reinforce")),
    Reader(
        ("advantage.outcome", "advantage.overlong"),
        "outcome of an episode in its advantages",
        _estimators("group_relative", "reinforce"),
    ),
    Reader(("advantage.baseline",), "baseline of outcomes", _estimators("reinforce")),
    Reader(("loss.clip", "loss.clip_high"), "clipped ratio", _objectives("ratio")),
    Reader(
        (
            "advantage.bootstrap",
            "advantage.normalise_returns",
            "loss.value_clip",
            "loss.value_coef",
            "optim.value_lr",
            "optim.critic_warmup",
        ),
        "critic",
        lambda config, recipe: recipe.critic,
    ),
    Reader(("loss.reference_kl",), "reference policy", _has_reference),
    Reader(("reward.model",), "reward worker", _worker_reads("reward")),
    Reader(
        ("env.cameras", "env.image_size", "env.orientation"),
        "policy that reads images",
        lambda config, recipe: "images" in config.policy.reads,
        "add images to policy.reads",
    ),
    Reader(
        ("plan.ahead", "plan.replan", "plan.profile"),
        "plan",
        lambda config, recipe: config.plan.mode != "configured",
        "set plan.mode to auto",
    ),
)
"""Every setting that some training runs do not read. Those of `farm`, `runtime`, `optim.ranks` and the like, which say
where something is computed, are not among them: a run inline or by a plan has its own, with the same result."""
DEFAULTS = Config()


def check_unread(run: RunSpec) -> None:
    """Raise `UserError` for settings other than their defaults that nothing in the run reads."""
    config, recipe = run.config, run.recipe
    found = []
    for reader in READERS:
        given = [key for key in reader.settings if _value(config, key) != _value(DEFAULTS, key)]
        if not given or reader.there(config, recipe):
            continue
        values = " and ".join(f"{key} is {shown(_value(config, key))}" for key in given)
        it = ("it", "it at its default") if len(given) == 1 else ("them", "them at their defaults")
        if reader.remedy:
            where, remedy = "this run", reader.remedy
        else:
            where = f"the workflow {config.workflow}"
            names = [name for name, other in RECIPES.items() if reader.there(config, other)]
            # ppo stands for ppo_reference too, but not where only the latter has what is wanted.
            remedy = "set workflow to " + " or ".join(n for n in names if n.partition("_")[0] not in {*names} - {n})
        defaults = " ".join(f"--{key} {_value(DEFAULTS, key)}" for key in given)
        found.append(
            f"{values}, and {where} has no {reader.name}, which would read {it[0]}: {remedy}, or leave {it[1]} "
            f"({defaults})"
        )
    if found:
        raise UserError("; ".join(found))


def _value(config: Config, key: str) -> Any:
    return operator.attrgetter(key)(config)


# --- settings that a command does not read, whatever the configuration


@dataclass(frozen=True)
class Reads:
    """Settings that a command reads."""

    settings: tuple[str, ...]
    """Sections, as `env`, and single keys, as `optim.micro_batch`."""
    but: tuple[str, ...] = ()
    """Keys of these sections that it does not read."""

    def __contains__(self, key: str) -> bool:
        return (key in self.settings or key.partition(".")[0] in self.settings) and key not in self.but

    def beside(self, key: str) -> str:
        """The settings of the key's section that are read, or else the sections."""
        section = key.partition(".")[0]
        own = [name.removeprefix(f"{section}.") for name in all_settings() if name.startswith(f"{section}.")]
        if own := [name for name in own if f"{section}.{name}" in self]:
            return f"of {section} it reads {', '.join(own)}"
        return f"it reads {', '.join(name for name in self.settings if '.' not in name)}"


_EPISODES = ("seed", "env", "farm", "policy", "extra_tasks", "runtime")
_ACTS = ("policy.replicas", "env.delay")
"""Settings of training runs alone. In other commands one process decides, and `env.delay` is that of the training: it
says for how many actions the policy was built, and which delay its evaluations have."""
_ITERATIONS = (*_EPISODES, "workflow", "rollout", "advantage", "loss", "optim", "reward", "plan")
_DURING = ("eval.every",)
VERBS = {
    "train": Reads((*(name for name in Config.model_fields if name != "sft"),)),
    "sft": Reads(
        (
            *(*_EPISODES, "name", "track", "sft", "eval"),
            *("optim.micro_batch", "optim.max_grad_norm", "optim.ranks", "optim.sharding"),
            *("optim.moments", "optim.recompute"),
            *("optim.lr_schedule", "optim.weight_decay", "optim.ema"),
        ),
        ("policy.replicas", *_DURING),
    ),
    "eval": Reads((*_EPISODES, "eval"), (*_ACTS, *_DURING)),
    "record": Reads(
        (
            *("seed", "env", "farm", "policy", "runtime"),
            *("eval.greedy", "eval.init_states", "eval.num_envs"),
        ),
        _ACTS,
    ),
    "serve": Reads(("seed", "env", "policy"), _ACTS),
    "inspect": Reads(
        ("seed", "env", "policy", "extra_tasks", "sft", "eval.tasks"),
        (
            *(*_ACTS, "sft.steps", "sft.batch", "sft.lr", "sft.warmup", "sft.measure_every", "sft.checkpoint_every"),
            *("sft.augment", "sft.loader_workers"),
        ),
    ),
    "profile": Reads(_ITERATIONS),
    "plan": Reads(_ITERATIONS),
    "compare": Reads((*_ITERATIONS, "name")),
}
"""Settings that each command reads. A file serves several commands: only what is typed is held against it.
What profiles and plans a training run takes that run's settings."""


def check_read(verb: str, typed: Mapping[str, Any]) -> None:
    """Raise `UserError` for settings, given with these values by their keys, that the command does not read."""
    unread = {key: value for key, value in typed.items() if key not in VERBS[verb]}
    if not unread:
        return
    given = " and ".join(f"{key} ({shown(value)})" for key, value in unread.items())
    leave = "leave it out" if len(unread) == 1 else "leave them out"
    beside = "; ".join(dict.fromkeys(VERBS[verb].beside(key) for key in unread))
    others = [other for other, reads in VERBS.items() if all(key in reads for key in unread)]
    by = f"; read by {', '.join(f'`embodied {other}`' for other in others)}" if others else ""
    raise UserError(f"`embodied {verb}` does not read {given}: {leave}; {beside}{by}")


def changed_settings(before: Config, after: Config) -> dict[str, Any]:
    """The settings whose values differ between two configurations, with the values of the second."""
    return {key: _value(after, key) for key in all_settings() if _value(before, key) != _value(after, key)}
