"""`embodied plan` for accelerators on which nothing was measured."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
import schedulers
from embodied.config.files import parse_config
from embodied.planning.estimates import ExecutedCosts, card_of, decision_seconds, update_seconds, with_estimates
from embodied.planning.run_plans import sized_workflow
from embodied.workflows.run_spec import RunSpec
from policies.capabilities import CountsWork
from policies.contract import Inputs, PolicySpec
from policies.work import Work, weight_count
from schedulers import Cluster, Node, Plan, Profile
from schedulers.cards import CARDS, EFFICIENCY, UPDATE_EFFICIENCY
from tests.embodied.support import planned
from tests.embodied.support.planned import ENVS, SETTINGS, Commands
from tests.extensions.bench.test_bench_policy import tiny, tiny_flow

few_iterations, profile, files, embodied = planned.few_iterations, planned.profile, planned.files, planned.embodied
H100 = CARDS["H100"]


def cluster_file(*nodes: str) -> None:
    Path("cluster.yaml").write_text("nodes:\n" + "".join(f"  - {{cores: 4, {node}}}\n" for node in nodes))


def test_policy_and_learner_are_planned_on_a_card_by_its_roofline(
    embodied: Commands, files: Path, profile: Profile
) -> None:
    cluster_file("accelerators: 1, card: H100")
    output = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml", "--json", "result.json")
    plan, result = schedulers.load(Plan, "plan/plan.json"), json.loads(Path("result.json").read_text())
    assert plan.pools == {"physics": "cores", "policy": "accelerators", "learner": "accelerators"}
    for name, share in (("policy", 40), ("learner", 25)):
        said = f"Times of {name} are estimated: roofline of the H100 at {share}% of its rate; measure with `embodied"
        assert said in output
    assert "With all components on cores, as measured, an iteration would take" in output
    assert result["estimated"] == ["policy", "learner"] and result["on_cores_iteration_s"] > result["iteration_s"]
    written = schedulers.load(Profile, "plan/profile.json")
    assert written.components["physics"] == profile.components["physics"]
    assert all("roofline" in written.components[name].estimated for name in ("policy", "learner"))


def test_without_a_card_accelerators_stay_unused_and_the_output_says_why(embodied: Commands, files: Path) -> None:
    cluster_file("accelerators: 2")
    output = embodied.done("plan", "small.yaml", "--cluster", "cluster.yaml")
    assert "2 of 2 accelerators are unused" in output and "card: one of H100, H200, A100, L40S, RTX 4090" in output
    assert set(schedulers.load(Plan, "plan/plan.json").pools.values()) == {"cores"}
    assert not Path("plan/profile.json").exists()


@pytest.mark.parametrize(
    ("nodes", "named"),
    [
        (["accelerators: 1, card: H10"], "a card 'H10'; nearest: H100"),
        (["accelerators: 1, card: H100", "accelerators: 1"], "'node1' of the cluster has accelerators, but no card"),
    ],
)
def test_cards_that_cannot_be_are_refused(nodes: list[str], named: str, embodied: Commands, files: Path) -> None:
    cluster_file(*nodes)
    assert named in embodied.refused("plan", "small.yaml", "--cluster", "cluster.yaml")
    assert not Path("plan").exists()


def test_measured_times_are_never_replaced(profile: Profile) -> None:
    config = parse_config(SETTINGS, "test")
    workflow, cluster = sized_workflow(RunSpec.of(config)), Cluster((Node("there", 4, 1, card="H100"),))
    on_gpu = replace(profile.components["learner"], pool="accelerators")
    for learner in (on_gpu, replace(profile.components["learner"], other_pool=on_gpu)):
        measured = replace(profile, components={**profile.components, "learner": learner})
        assert with_estimates(measured, config, workflow, cluster) is measured
    assert with_estimates(profile, config, workflow, Cluster((Node("there", 4, 1),))) is profile
    assert with_estimates(profile, config, workflow, cluster) is not profile


def test_of_several_cards_the_slowest_counts() -> None:
    nodes = [Node(f"node{i}", 4, 1, card=name) for i, name in enumerate(("H200", "A100", "H100"))]
    assert card_of(Cluster(tuple(nodes))) == CARDS["A100"]


def test_a_small_policys_work_is_that_of_its_layers() -> None:
    spec = PolicySpec(action_dim=2, chunk=1, state_dim=5)
    policy = policies.build("gaussian_mlp", spec, 0, widths=[16])
    costs = ExecutedCosts(policy, Inputs(state=torch.zeros(1, 5)))
    weights = weight_count(policy)
    (one,), (many,) = costs.decision(1), costs.decision(8)
    assert one.flops == 2 * weights and many.flops == 8 * one.flops and many.nbytes == one.nbytes
    # Forwards, and the gradients of weights and of all inputs but the observation.
    assert 2 * one.flops < costs.update(1, False).flops < 3 * one.flops
    assert all(p.grad is None for p in policy.parameters())


@pytest.mark.parametrize("model", ["openvla-tiny", "openvla-oft-tiny", "pi0-tiny"])
def test_large_networks_are_counted_by_their_own_rules(model: str) -> None:
    policy: Any = tiny_flow(model) if model.startswith("pi0") else tiny(model)
    assert isinstance(policy, CountsWork)
    costs = policy.costs("pick up the bowl")
    total = sum(costs.decision(4), Work())
    lower = max(total.flops / (H100.flops_per_s * EFFICIENCY), total.nbytes / H100.bytes_per_s)
    assert decision_seconds(costs, 4, H100) >= lower * (1 - 1e-9)
    assert decision_seconds(costs, 4, CARDS["L40S"]) > decision_seconds(costs, 4, H100)


def test_an_update_takes_all_epochs_micro_batches() -> None:
    class Fixed:
        """One second's arithmetic for each row."""

        def decision(self, rows: int) -> list[Work]:
            return []

        def update(self, rows: int, cached: bool) -> Work:
            return Work(rows * H100.flops_per_s * UPDATE_EFFICIENCY)

    changed = {**SETTINGS, "optim": {**SETTINGS["optim"], "epochs": 3, "micro_batch": 4}}
    config = parse_config(changed, "test")
    workflow = sized_workflow(RunSpec.of(config))
    samples = ENVS * SETTINGS["rollout"]["decisions"]
    assert update_seconds(Fixed(), config, workflow, workflow.items, H100) == pytest.approx(3 * samples)
    assert update_seconds(Fixed(), config, workflow, workflow.items // 2, H100) == pytest.approx(1.5 * samples)
