"""The suite's plugin of pytest: the options that name the policy, and the report."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest
import torch

import policies
from policies import Inputs, Policy, PolicyError, PolicySpec
from policies.capabilities import Observes
from policies.conformance.laws import perturb, random_inputs
from policies.conformance.promises import PROMISES
from policies.conformance.reporting import Reporter
from policies.registry import policy_kind

STATE = PolicySpec(action_dim=3, state_dim=5)
CHOICES = PolicySpec(action_dim=1, state_dim=5, discrete_actions=10_000)
"""Enough of them that two draws are hardly ever the same decision."""
ROWS = 6
BUILD = pytest.StashKey[Callable[[], Policy]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("policies.conformance")
    group.addoption("--policy", metavar="KIND", help="my_package.my_policy:MyPolicy, or a registered gaussian_mlp")
    group.addoption("--options", metavar="JSON", default="{}", help="the policy's options, as in policy.options")
    group.addoption(
        "--sizes",
        metavar="JSON",
        default="{}",
        help='fields of PolicySpec, for example {"proprio_dim": 7, "cameras": ["base"], "chunk": 4}; the others are '
        "those of a policy that reads 5 numbers of state and gives 3 of action",
    )
    group.addoption("--report", metavar="FILE", help="write the report to this file, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.help:
        return
    kind = config.getoption("--policy")
    if kind is None:
        raise pytest.UsageError(
            "policies.conformance examines a policy: name it with --policy my_package.my_policy:MyPolicy, or --policy "
            "gaussian_mlp for a registered one"
        )
    torch.set_num_threads(1)  # small matrices are fastest on one
    try:
        options, spec = _object(config, "--options"), _spec(kind, _object(config, "--sizes"))

        def build() -> Policy:
            return policies.build(kind, spec, seed=0, **options)

        build()
    except PolicyError as error:
        raise pytest.UsageError(str(error)) from error
    except Exception as error:  # whatever the policy's own code raises is its author's to mend
        place = traceback.extract_tb(error.__traceback__)[-1]
        why = f"{type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        raise pytest.UsageError(f"no {kind} can be built with these options and sizes: {why}") from error
    config.stash[BUILD] = build
    if not hasattr(config, "workerinput"):  # the processes of pytest-xdist report to the one that has started them
        config.pluginmanager.register(Reporter(kind, PROMISES, config.getoption("--report")))


@pytest.fixture
def policy(pytestconfig: pytest.Config) -> Policy:
    """A policy as after some training: statistics observed, no parameter at its initial value."""
    policy = pytestconfig.stash[BUILD]()
    if isinstance(policy, Observes):
        policy.observe(random_inputs(policy.spec, 100, seed=5))
    perturb(policy, 0.05, seed=6)
    return policy


@pytest.fixture
def inputs(policy: Policy) -> Inputs:
    """A batch for the policy, with an instruction for each row."""
    told = tuple(f"take the {name} block" for name in ("red", "green", "blue", "white", "black", "grey"))
    return replace(random_inputs(policy.spec, ROWS, seed=7), instruction=told)


def _object(config: pytest.Config, option: str) -> dict[str, Any]:
    """The JSON object of the option. Raises `PolicyError`."""
    text = config.getoption(option)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise PolicyError(f"{option} takes a JSON object, got {text!r}: {error}") from error
    if not isinstance(found, dict):
        raise PolicyError(f'{option} takes a JSON object, {{"name": value}}, got {text!r}')
    return found


def _spec(kind: str, sizes: dict[str, Any]) -> PolicySpec:
    """The sizes that the policy is built for: those given, else small ones of the kind. Raises `PolicyError`."""
    known = [field.name for field in fields(PolicySpec)]
    for name, value in sizes.items():
        if name not in known:
            raise PolicyError(f"--sizes has no {name!r}; valid: {', '.join(known)}")
        if name == "cameras":
            if not isinstance(value, list) or not all(isinstance(camera, str) for camera in value):
                raise PolicyError(f'--sizes: cameras are a list of names, ["base"], got {value!r}')
        elif name in ("action_low", "action_high"):
            if not isinstance(value, list) or not all(type(bound) in (int, float) for bound in value):
                raise PolicyError(f"--sizes: {name} is a list of numbers, [-2.0, 0.0], got {value!r}")
        elif type(value) is not int:
            raise PolicyError(f"--sizes: {name} is a whole number, got {value!r}")
    sizes = {name: tuple(value) if isinstance(value, list) else value for name, value in sizes.items()}
    return replace(CHOICES if policy_kind(kind).chooses else STATE, **sizes)
