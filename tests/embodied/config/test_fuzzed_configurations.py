"""Damaged configurations, clusters in YAML, and what a profile and a success classifier say of themselves: refused by
name, or used without an error or a hang."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

import schedulers
from embodied.config.files import CONFIGS, load_config, parse_config, save_config
from embodied.config.schema import HERE, Config
from embodied.errors import UserError
from embodied.learning.success_classifier import SuccessClassifier
from embodied.planning.clusters import read_cluster
from embodied.planning.profiler import work_of
from embodied.planning.run_plans import checked_profile, sized_workflow
from embodied.workflows.run_spec import RunSpec
from schedulers import PlanError
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds
from tests.schedulers.instances import random_problem

MEASURED = Path(__file__).parents[2] / "fuzzing/measured/profile.json"
CLUSTERS: tuple[dict[str, Any], ...] = (
    {"nodes": [{"cores": 96, "accelerators": 8, "memory_bytes": "1e12", "accelerator_bytes": "80e9", "count": 64}],
     "link_bytes_per_s": "25e9", "device_link_bytes_per_s": "450e9", "link_s": "20e-6"},
    {"nodes": [{"name": "here", "cores": 8}, {"name": "far", "cores": 8, "count": 3}], "head_node": "here"},
    {"kind": "cluster", "format": 1, "nodes": [{"name": "node0", "cores": 2, "memory_bytes": 8e9}]},
)  # fmt: skip


@cache
def texts(folder: Path) -> tuple[Any, ...]:
    return tuple(yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml")))


def writes(file: Path, originals: tuple[Any, ...]) -> Callable[[Random], Path]:
    def damaged(rng: Random) -> Path:
        file.write_bytes(mutation.as_yaml(rng, rng.choice(originals)))
        return file

    return damaged


@few_or_many(37)
def test_damaged_configurations(cases: range, tmp_path: Path) -> None:
    holds(cases, writes(tmp_path / "mine.yaml", texts(CONFIGS)), _config, (UserError,))


@few_or_many(12)
def test_damaged_configurations_of_runs(cases: range, tmp_path: Path) -> None:
    """As a run saves it, every key written out."""
    (tmp_path / "checkpoints").mkdir()
    save_config(Config(), tmp_path / "config.yaml")
    originals = (yaml.safe_load((tmp_path / "config.yaml").read_text()),)
    holds(cases, writes(tmp_path / "config.yaml", originals), _config, (UserError,))


def _config(path: Path) -> None:
    config = load_config(str(path))
    save_config(config, path.with_name("again.yaml"))
    assert repr(load_config(str(path.with_name("again.yaml")))) == repr(config)  # an option may be NaN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (mutation.bomb(12), "more than 100000 values"),
        ("env: &a {task: *a}", "nested too deeply|contains itself"),
        ("optim: {epochs: 1}\noptim: {epochs: 2}", "'optim' stands there twice"),
        ("policy: {options: {x: 2001-01-01}}", "is a date to YAML: put it in quotes"),
        ("policy: {options: {x: 2001-99-99}}", "month must be in"),
        ('name: "a\\0b"', "an end in its midst"),
        ("name: ../../elsewhere", "below runs/"),
        ("name: /elsewhere", "below runs/"),
        ("optim: {policy_lr: .nan}", "optim.policy_lr: it should be a finite number"),
        ("iterations: 1" + "0" * 30, "at most 2147483647"),
        ("farm: {devices: [1" + "0" * 30 + "]}", "at most 2147483647"),
        ("x: !!python/object/apply:os.system [echo]", "could not determine a constructor"),
    ],
)
def test_what_a_configuration_cannot_say(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=rf"mine\.yaml(?s:.*)({message})"):
        load_config(str(tmp_path / "mine.yaml"))


def test_what_may_be_infinite_is_saved_so(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("optim: {max_grad_norm: .inf}")
    config = load_config(str(tmp_path / "mine.yaml"))
    save_config(config, tmp_path / "saved.yaml")
    assert load_config(str(tmp_path / "saved.yaml")).optim.max_grad_norm == float("inf") == config.optim.max_grad_norm


@few_or_many(20)
def test_damaged_clusters(cases: range, tmp_path: Path) -> None:
    workflow, profile, _ = random_problem(0, pools=2)

    def read(path: Path) -> None:
        cluster = read_cluster(str(path), "cpu")
        with suppress(PlanError):
            schedulers.plan(workflow, profile, cluster, search=schedulers.SearchOptions(deadline_s=0.2))

    holds(cases, writes(tmp_path / "cluster.yaml", CLUSTERS), read, (UserError, PlanError))


@few_or_many(15, 10_000)
def test_damaged_profiles_of_a_configuration(cases: range, tmp_path: Path) -> None:
    """A profile's fingerprint holds the configuration that it was measured with, as text."""
    whole = load_config("reach").model_dump(mode="json")
    whole["env"]["num_envs"], whole["rollout"]["decisions"] = 4, 8
    config = parse_config(whole, "test")
    workflow, file = sized_workflow(RunSpec.of(config)), tmp_path / "profile.json"
    profile = json.loads(MEASURED.read_text())
    profile["fingerprint"] |= work_of(config)
    measured = {key: json.loads(text) for key, text in work_of(config).items()}

    def damaged(rng: Random) -> Path:
        settings = {key: mutation.as_json(rng, value).decode(errors="replace") for key, value in measured.items()}
        chosen = dict(rng.sample(sorted(settings.items()), rng.choice((0, 1, 1, 2))))
        file.write_bytes(mutation.as_json(rng, {**profile, "fingerprint": {**profile["fingerprint"], **chosen}}))
        return file

    holds(
        cases, damaged, lambda path: checked_profile(path, RunSpec.of(config), workflow, True), (UserError, PlanError)
    )


@few_or_many(10, 10_000)
def test_damaged_success_classifiers(cases: range, tmp_path: Path) -> None:
    assets = Damaged(HERE / "assets/reach_success", tmp_path / "classifier")
    holds(cases, assets, SuccessClassifier.load, (UserError,))
