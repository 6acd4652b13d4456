"""Learning from demonstrations on several ranks: the gradient, the parameters and the rows of one."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import policies
from embodied.cli import main
from embodied.config.schema import Config
from embodied.demonstrations import Batch, Dataset
from embodied.errors import PeerFailed, UserError
from embodied.execution.session import open_session
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.sharding import rank_bytes
from embodied.run import checkpoint
from embodied.training import sft
from embodied.training.checks import require_rows
from embodied.training.imitator import Imitator, Pass
from embodied.training.sft import imitate, read_demonstrations
from policies.contract import Inputs
from policies.small.encoders import Normalizer
from sim_farm.client.farm import WorkerFailed
from tests.embodied.support.checked import check
from tests.embodied.support.expert import record_reach
from tests.embodied.support.ranks_in_processes import on_ranks
from tests.embodied.training.test_imitation import PIXELS, STATES, config_of, info_of
from tests.embodied.training.test_pi0_end_to_end import CHECKPOINT
from tests.variants import often

FLOW: dict[str, Any] = {**STATES, "policy": {"kind": "flow", "chunk": 4, "options": {"widths": [32]}}}
HISTORY: dict[str, Any] = {
    **STATES,
    "policy": {"options": {**STATES["policy"]["options"], "observations": 2, "distance": 3}},
}
VLA: dict[str, Any] = {
    **PIXELS,
    "env": {**PIXELS["env"], "image_size": 56},
    "policy": {
        "kind": "openvla",
        "reads": ["images", "instruction"],
        "options": {"checkpoint": "assets/openvla_tiny", "unnorm_key": "demonstrations"},
    },
}
PI0: dict[str, Any] = {
    **VLA,
    "policy": {
        "kind": "pi0",
        "chunk": 4,
        "reads": ["images", "instruction"],
        "options": {"checkpoint": str(CHECKPOINT), "asset": "demonstrations", "steps": 3, "train": "all"},
    },
}


class Exact(Imitator):
    """In float64."""

    def _use(self, parallel: ReplicatedPolicy) -> None:
        if parallel.ranks.size == 1 or not parallel.ranks.addresses:  # before it is sharded
            self.policy.double()
            for module in self.policy.modules():  # which rounds each row to float32
                if isinstance(module, Normalizer):
                    module.register_forward_hook(lambda module, given, found: found.double())
        super()._use(parallel)

    def _noise(self, count: int, key: int) -> npt.NDArray[Any]:
        return super()._noise(count, key).astype(np.float64)

    def _loss(self, read: Pass, batch: Batch, noise: npt.NDArray[Any]) -> Tensor:
        actions: npt.NDArray[Any] = batch.actions.astype(np.float64)
        return super()._loss(read, replace(batch, actions=actions), noise)

    def _shown(self, batch: Batch) -> Inputs:
        inputs = super()._shown(batch)
        return replace(inputs, state=None if inputs.state is None else inputs.state.double())


def make(rank: int, ranks: int, kind: type[Imitator], config: Config, *_: Any) -> Imitator:
    info = info_of(config)
    return kind(config, info, read_demonstrations(config, info), None, rank, ranks)


def whole(tensor: Tensor) -> Tensor:
    return getattr(tensor, "full_tensor", lambda: tensor)().detach().clone()


def gradient(own: Imitator, *_: Any) -> dict[str, Tensor]:
    """Of the first step, before it is scaled down, and the loss."""
    own.begin()
    loss = own.step()
    found = {n: whole(p.grad) for n, p in own.policy.named_parameters() if p.grad is not None}
    return {**found, "loss": torch.tensor(loss, dtype=torch.float64)}


def learned(own: Imitator, kind: Any, config: Config, *_: Any) -> dict[str, Any]:
    """Parameters and rows of a few steps."""
    own.begin()
    losses = [own.step() for _ in range(config.sft.steps)]
    parameters = {n: whole(p) for n, p in own.policy.named_parameters()}
    return {"losses": losses, "parameters": parameters, "measured": own.measure(), "more": own.step()}


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return record_reach(tmp_path_factory.mktemp("recorded") / "demos", 6, image_size=56)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= tolerance, name


@pytest.mark.parametrize(
    ("ranks", "sharding", "micro"),
    often(
        [(2, "sharded", 4), (3, "whole", None)],
        [(ranks, sharding, micro) for ranks in (2, 3) for sharding in ("whole", "sharded") for micro in (None, 1, 4)],
    ),
)
def test_ranks_and_micro_batches_have_the_gradient_of_one(
    ranks: int, sharding: str, micro: int | None, demos: Dataset
) -> None:
    """Two datasets of uneven shares: ranks have different numbers of passes, and one has none of a dataset."""
    for settings in (HISTORY, FLOW):
        data = {"data": [str(demos.folder)] * 2, "episodes": ["0", "1-5"], "batch": 7, "holdout": 0}
        optim = {"max_grad_norm": float("inf")}
        one = config_of({**settings, "optim": optim}, demos, **data)
        several = config_of({**settings, "optim": {**optim, "sharding": sharding, "micro_batch": micro}}, demos, **data)
        (expected,) = on_ranks(1, make, gradient, Exact, one)
        assert max(float(g.abs().max()) for g in expected.values()) > 1e-3, "there is a gradient to compare"
        for found in on_ranks(ranks, make, gradient, Exact, several):
            assert_near(found, expected, 1e-12)


@pytest.mark.parametrize("micro", [1, 3, 64])
def test_any_split_into_micro_batches_has_the_same_gradient(micro: int, demos: Dataset) -> None:
    settings = {**FLOW, "optim": {"max_grad_norm": float("inf")}}
    (expected,) = on_ranks(1, make, gradient, Exact, config_of(settings, demos, batch=16))
    split = {**settings, "optim": {**settings["optim"], "micro_batch": micro}}
    (found,) = on_ranks(1, make, gradient, Exact, config_of(split, demos, batch=16))
    assert_near(found, expected, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(VLA, id="openvla"),
        pytest.param(PI0, id="pi0"),
        pytest.param(PIXELS | {"env": VLA["env"]}, id="pixels"),
    ],
)
@pytest.mark.parametrize("sharding", ["whole", "sharded"])
def test_large_policies_learn_on_ranks_what_one_learns(settings: dict[str, Any], sharding: str, demos: Dataset) -> None:
    sft = {"batch": 6, "steps": 3, "lr": 1e-4}
    optim = {"micro_batch": 2}
    (expected,) = on_ranks(1, make, learned, Imitator, config_of({**settings, "optim": optim}, demos, **sft))
    config = config_of({**settings, "optim": {**optim, "sharding": sharding}}, demos, **sft)
    for found in on_ranks(2, make, learned, Imitator, config):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        assert found["measured"] == pytest.approx(expected["measured"], rel=1e-3)
        assert found["more"] == pytest.approx(expected["more"], rel=1e-3), "it learns on after it was measured"
        # A key's bias has no gradient but rounding, since it adds the same to every logit; Adam's steps do not say so.
        mine, its = (
            {name: p for name, p in each["parameters"].items() if not name.endswith("k_proj.bias")}
            for each in (found, expected)
        )
        assert_near(mine, its, 1e-5)


def saved_and_loaded(own: Imitator, kind: Any, config: Config, root: Path, begin: Path | None) -> dict[str, Tensor]:
    """Two steps from the beginning or from a checkpoint, and a checkpoint of them."""
    own.begin() if begin is None else own.load(begin)
    for _ in range(2):
        own.step()
    own.save(root, own.state(0.0), {})
    own.saved()
    averages = {
        f"average of {n}": whole(own.optimizer.state[p]["average"])
        for n, p in own.policy.named_parameters()
        if p in own.optimizer.state
    }
    return {n: whole(p) for n, p in own.policy.named_parameters()} | averages


@pytest.mark.parametrize("sharding", ["whole", "sharded"])
def test_a_checkpoint_of_ranks_is_gone_on_with_by_any_number(sharding: str, demos: Dataset, tmp_path: Path) -> None:
    """Bit for bit by as many ranks, to rounding by others."""
    optim = {"ema": 0.9, "weight_decay": 0.1, "lr_schedule": "cosine"}
    config = config_of({**FLOW, "optim": {"sharding": sharding, **optim}}, demos, batch=8, steps=8)
    for number, begin in ((2, None), (4, tmp_path / "a" / "000002")):
        folder = tmp_path / "a"
        straight = on_ranks(2, make, saved_and_loaded, Imitator, config, folder, begin)[0]
        checkpoint.verify(folder / f"{number:06d}")
    again = on_ranks(2, make, saved_and_loaded, Imitator, config, tmp_path / "b", tmp_path / "a" / "000002")[0]
    assert all(torch.equal(again[name], tensor) for name, tensor in straight.items())
    for ranks in (1, 3):
        found = on_ranks(
            ranks, make, saved_and_loaded, Imitator, config, tmp_path / f"{ranks}", tmp_path / "a" / "000002"
        )
        assert_near(found[0], straight, 1e-5)
    saved = policies.load(tmp_path / "a" / "000004" / "average")
    for name, parameter in saved.named_parameters():
        assert torch.equal(parameter, straight.get(f"average of {name}", straight[name]))


class Mortal(Imitator):
    """The second rank is killed in its tenth step."""

    def step(self) -> float:
        if self.done == 9 and self.ranks.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["whole", "sharded"])
def test_a_run_whose_rank_was_killed_continues_bit_for_bit(
    sharding: str, demos: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {**FLOW, "optim": {"ranks": 2, "sharding": sharding, "ema": 0.9}, "runtime": {"mode": "ray"}}
    config = config_of(settings, demos, batch=8, steps=12, checkpoint_every=4)

    def learn(run: str, begin: Path | None = None) -> None:
        with open_session(config) as session:
            imitate(config, info_of(config), tmp_path / run, begin, session=session)

    learn("whole")
    with monkeypatch.context() as patched, pytest.raises((WorkerFailed, PeerFailed), match="learner 1 died"):
        patched.setattr(sft, "Imitator", Mortal)
        learn("killed")
    found = checkpoint.latest(tmp_path / "killed" / "checkpoints")
    assert found is not None and checkpoint.read_state(found).iteration in (4, 8)  # the second may be half written
    learn("killed", found)
    files = [path.relative_to(tmp_path / "whole") for path in (tmp_path / "whole").rglob("000012/**/*.safetensors")]
    assert len(files) >= 3  # the policy, its average, the optimiser's state
    for file in files:
        one, other = (load_file(tmp_path / run / file) for run in ("whole", "killed"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def held(own: Imitator, *_: Any) -> dict[str, int]:
    """Bytes on this rank after a step."""
    own.begin()
    own.step()

    def size(tensors: Iterable[Any]) -> int:
        local = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
        return sum(t.numel() * t.element_size() for t in local)

    states = list(own.optimizer.state.values())
    return {
        "weights": size(own.policy.parameters()),
        "gradients": size(p.grad for p in own.policy.parameters() if p.grad is not None),
        "moments": size(state[key] for state in states for key in checkpoint.MOMENTS),
        "average": size(state[checkpoint.AVERAGE] for state in states),
    }


SHORT = {**VLA, "policy": {**VLA["policy"], "options": {**VLA["policy"]["options"], "dtype": "bfloat16"}}}


@pytest.mark.parametrize(
    ("settings", "sharding"),
    [(FLOW, "sharded"), (FLOW, "whole"), pytest.param(SHORT, "sharded", marks=pytest.mark.slow)],
    ids=["flow, sharded", "flow, whole", "openvla in 16 bits, sharded"],
)
def test_each_rank_holds_what_the_dry_run_says(settings: dict[str, Any], sharding: str, demos: Dataset) -> None:
    config = config_of({**settings, "optim": {"sharding": sharding, "ema": 0.9}}, demos, batch=4)
    fresh = make(0, 1, Imitator, config).policy
    critic = sum(p.numel() for p in fresh.value_head.parameters()) * 4  # it is not learned, nor has it a gradient
    expected = rank_bytes(fresh, 2, sharding == "sharded", averaged=True)
    for found in on_ranks(2, make, held, Imitator, config):
        for name, size in found.items():
            assert size == pytest.approx(expected[name], rel=0.05, abs=2 * critic), name


def test_the_command_says_what_each_rank_will_hold(demos: Dataset, tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        json.dumps({**FLOW, "runtime": {}, "optim": {"ranks": 3, "sharding": "sharded"}})
    )
    options = [
        "--data",
        str(demos.folder),
        "--dry-run",
        "--runs-dir",
        str(tmp_path),
        "--json",
        str(tmp_path / "out.json"),
    ]
    assert main(["sft", str(tmp_path / "own.yaml"), *options]) == 0
    found = json.loads((tmp_path / "out.json").read_text())
    assert found["placement"]["ranks"] == 3 and found["placement"]["each_has"] == "a shard of the policy"
    assert found["steps"]["rows_of_a_rank"] == 11 and found["data"]["episodes"] == 6
    assert 2 * found["bytes"]["weights"] == found["bytes"]["moments"] > 0 == found["bytes"]["average"]
    assert not (tmp_path / "own").exists()


def test_ranks_without_a_row_are_refused(demos: Dataset) -> None:
    config = config_of({**STATES, "optim": {"ranks": 9}}, demos, batch=8)
    with pytest.raises(UserError, match=r"optim.ranks is 9, and a minibatch has 8 rows.*optim.ranks to 8 or less"):
        check(config, "sft")
    check(config_of({**STATES, "optim": {"ranks": 8}}, demos, batch=8), "sft")
    with pytest.raises(UserError, match="a minibatch has 5 rows"):
        require_rows(config_of({**STATES, "optim": {"ranks": 8}}, demos, batch=8), 5)
