"""Settings that nothing in a run would read: each is refused, with what would read it. Known without torch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError, shown
from embodied.workflows.recipes import RECIPES, Recipe, recipe_of


@dataclass(frozen=True)
class Reader:
    """What reads settings, where not every training run has it."""

    settings: tuple[str, ...]
    name: str
    there: Callable[[Config, Recipe], bool]
    """True if the run has it."""
    remedy: str = ""
    """How to have it; empty where the workflow decides."""


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
        ("advantage.gamma", "advantage.lam", "advantage.normalise"),
        "generalised advantages",
        _estimators("gae"),
    ),
    Reader(("advantage.credit",), "credit of single decisions", _estimators("gae", "reinforce")),
    Reader(
        ("advantage.outcome", "advantage.overlong_margin", "advantage.mask_truncated"),
        "outcome of an episode in its advantages",
        _estimators("group_relative", "reinforce"),
    ),
    Reader(("advantage.baseline",), "baseline of outcomes", _estimators("reinforce")),
    Reader(
        ("advantage.reward_kl",),
        "divergence that is taken off rewards",
        lambda config, recipe: _estimators("reinforce")(config, recipe) and _has_reference(config, recipe),
    ),
    Reader(("loss.weight",), "loss over whole episodes", _estimators("group_relative", "reinforce", "binary")),
    Reader(("loss.clip", "loss.clip_high", "loss.dual_clip"), "clipped ratio", _objectives("ratio")),
    Reader(("loss.contrast_scale", "loss.contrast_drift"), "contrast of velocities", _objectives("contrast")),
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
    Reader(("loss.reference_kl", "loss.reference_kl_target"), "reference policy", _has_reference),
    Reader(("reward.function", "reward.classifier", "reward.threshold"), "reward worker", _worker_reads("reward")),
    Reader(
        ("env.cameras", "env.image_size", "env.orientation"),
        "policy that reads images",
        lambda config, recipe: "images" in config.policy.reads,
        "add images to policy.reads",
    ),
    Reader(
        ("eval.every_episodes",),
        "evaluation during training",
        lambda config, recipe: config.eval.every > 0,
        "set eval.every to 1 or more",
    ),
    Reader(
        ("eval.prompt",),
        "suite of perturbed instructions",
        lambda config, recipe: config.eval.protocol in ("libero-plus", "libero-pro"),
        "set eval.protocol to libero-plus or libero-pro",
    ),
    Reader(
        ("loss.engine_weight_max", "loss.engine_kl_max"),
        "generation engine",
        lambda config, recipe: bool(config.policy.options.get("engine")),
        "set policy.options.engine",
    ),
    Reader(
        ("plan.ahead", "plan.replan"),
        "plan that is searched for",
        lambda config, recipe: config.plan.mode != "configured" or config.plan.file is not None,
        "set plan.mode to auto",
    ),
    Reader(
        ("plan.profile", "plan.any_hardware"),
        "plan",
        lambda config, recipe: config.plan.mode != "configured" or config.plan.file is not None,
        "set plan.mode to auto",
    ),
)
"""Every setting that some training runs do not read. Those of `farm`, `runtime`, `optim.ranks` and the like, which say
where something is computed, are not among them: a run inline or by a plan has its own, with the same result."""
DEFAULTS = Config()


def check_unread(config: Config) -> None:
    """Raise `UserError` for settings other than their defaults that nothing in the configuration's run reads."""
    recipe = recipe_of(config)
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
