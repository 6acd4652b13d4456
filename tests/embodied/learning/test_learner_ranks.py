"""The learner as several ranks: the update that one would make, in real processes on Ray, connected by gloo."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from embodied.algorithms.estimators import gae, group_relative
from embodied.algorithms.samples import Estimate
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import PeerFailed, UserError
from embodied.execution.assignment import Assignment, configured
from embodied.execution.iteration import OnPolicy, merged_update, start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session, open_session
from embodied.learning.learner import Learner
from embodied.run import checkpoint
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ranks import Ranks
from embodied.runtime.ray.runtime import RayRuntime
from embodied.trajectories.batch import Trajectories
from embodied.workflows.recipes import GRPO, LEARNER, PPO, Recipe
from embodied.workflows.run_spec import RunSpec
from sim_farm.client.farm import WorkerFailed
from tests.embodied.learning.test_learner import make_batch
from tests.embodied.support import runs
from tests.embodied.support.checked import check
from tests.embodied.support.ranks_alone import Counted, alone, assert_near, config_of, connected, state_at, weights_of
from tests.embodied.support.runs import CORES, ITERATIONS, Run, assert_was_a_test, assigned, inline, kept_in

# --- whole runs: every rank keeps what it was given, in a folder of its own


def keep(batch: Trajectories, config: Config) -> None:
    assert config.name is not None
    folder = Path("/", config.name) / str(os.getpid())
    folder.mkdir(exist_ok=True)
    runs.keep(batch, kept_in(folder, config))


def kept_gae(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return gae(batch, config)


def kept_group_relative(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return group_relative(batch, config)


KEPT_PPO = replace(PPO, estimator=kept_gae)
KEPT_GRPO = replace(GRPO, estimator=kept_group_relative)
STATES: dict[str, Any] = {**runs.STATES, "workflow": f"{__name__}:KEPT_PPO"}
GROUPS: dict[str, Any] = {**runs.GROUPS, "workflow": f"{__name__}:KEPT_GRPO"}
IMAGES: dict[str, Any] = {**runs.IMAGES, "workflow": "ppo"}


def run(
    settings: dict[str, Any],
    session: Session,
    assignment: Assignment,
    folder: Path,
    look: Callable[[OnPolicy], object] = lambda workers: None,
) -> Run:
    """Three iterations by the assignment, and a look at the workers. Every rank is given the same trajectories."""
    (folder / "gathered").mkdir(parents=True)
    config = kept_in(folder / "gathered", parse_config(settings, "test"))
    with start_run(RunSpec.of(config), folder, session, assignment) as workers:
        workers.begin(None, 0)
        iterations = [workers.iterate(i, drain=i == ITERATIONS - 1) for i in range(ITERATIONS)]
        look(workers)
        if assignment.unload:
            workers.learner.call_all(LearnerRole.load_back)
        weights = workers.learner.call_all(LearnerRole.weights)[0]
        parameters = {name: tensor.clone() for name, tensor in weights.items()}
    given = [[load_file(path) for path in sorted(rank.iterdir())] for rank in (folder / "gathered").iterdir()]
    for other in given[1:]:
        for part, its in zip(given[0], other, strict=True):
            assert all(torch.equal(its[name], tensor) for name, tensor in part.items())
    return Run(iterations, given[0] if given else [], parameters)


OFTEN = {("grpo, part by part", "sharded", 2)}
"""Of the combinations of algorithm, sharding and ranks those that run always."""


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    return Session(Config(), ray_runtime, tuple(CORES))


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Runs of one rank in this process; each is computed once."""
    known: dict[str, Run] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as here:

        def of(settings: dict[str, Any], ahead: int = 0) -> Run:
            key = f"{settings} {ahead}"
            if key not in known:
                plan = replace(inline(APART), ahead=ahead)
                known[key] = run(settings, here, plan, tmp_path_factory.mktemp("reference"))
            return known[key]

        yield of
    torch.set_num_threads(threads)


APART = assigned("disaggregated", learner=(0,), policy=(0,), one_process=False)


def of_ranks(ranks: int, ahead: int = 0, together: bool = False) -> Assignment:
    """Ranks of one thread each, wherever the system likes."""
    components = {"policy": (Affinity(),), "learner": (Affinity(),) * ranks}
    return replace(APART, components=components, ahead=ahead, hosts=(0,) if together else ())


def with_optim(settings: dict[str, Any], **optim: Any) -> dict[str, Any]:
    return {**settings, "optim": {**settings["optim"], **optim}}


def assert_same(found: Run, expected: Run) -> None:
    """The same episodes; what is gathered before the first update bit for bit, and what is learned within rounding."""
    assert found.episodes == expected.episodes
    if expected.gathered:
        assert_was_a_test(found)
        for name, tensor in expected.gathered[0].items():
            assert torch.equal(found.gathered[0][name], tensor), name
    assert_near(found.parameters, expected.parameters)


@pytest.mark.parametrize(
    ("settings", "sharding", "ranks"),
    [
        pytest.param(settings, sharding, ranks, id=f"{name}-{sharding}-{ranks}", marks=marks)
        for name, settings in (("ppo", STATES), ("grpo, part by part", GROUPS))
        for sharding in ("whole", "sharded")
        for ranks in (2, 4)
        for marks in [() if (name, sharding, ranks) in OFTEN else pytest.mark.slow]
    ],
)
def test_ranks_learn_what_one_learns(
    settings: dict[str, Any], sharding: str, ranks: int, ray: Session, reference: Any, tmp_path: Path
) -> None:
    expected = reference(settings)
    found = run(with_optim(settings, sharding=sharding), ray, of_ranks(ranks), tmp_path / "ray")
    assert_same(found, expected)
    assert [one.learned["learner/ranks"] for one in found.iterations] == [ranks] * ITERATIONS
    for mine, its in zip(found.iterations, expected.iterations, strict=True):
        for name in ("policy_loss", "entropy", "approx_kl", "grad_norm", "explained_variance"):
            assert mine.learned[f"learner/{name}"] == pytest.approx(
                its.learned[f"learner/{name}"], abs=1e-4, nan_ok=True
            )


@pytest.mark.slow
def test_one_rank_on_ray_is_the_learner_that_it_was(ray: Session, reference: Any, tmp_path: Path) -> None:
    found = run(STATES, ray, of_ranks(1), tmp_path / "ray")
    expected = reference(STATES)
    assert all(torch.equal(found.parameters[name], tensor) for name, tensor in expected.parameters.items())


@pytest.mark.slow
def test_uneven_shares_and_ranks_without_a_row(ray: Session, reference: Any, tmp_path: Path) -> None:
    """48 rows in minibatches of 5: the last has 3 rows for 4 ranks, and a micro-batch is one row."""
    settings = with_optim(STATES, minibatch=5, micro_batch=1, epochs=1)
    for sharding in ("whole", "sharded"):
        found = run(with_optim(settings, sharding=sharding), ray, of_ranks(4), tmp_path / sharding)
        assert_same(found, reference(settings))


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("whole", marks=pytest.mark.slow), "sharded"])
def test_ranks_behind_a_rollout_that_is_ahead(sharding: str, ray: Session, reference: Any, tmp_path: Path) -> None:
    """The log-probs of the present policy are computed in shares, too."""
    found = run(with_optim(STATES, sharding=sharding), ray, of_ranks(2, ahead=1), tmp_path / "ray")
    assert_same(found, reference(STATES, ahead=1))


@pytest.mark.slow
def test_each_rank_reads_its_own_frames(ray: Session, reference: Any, tmp_path: Path) -> None:
    expected = reference(IMAGES)
    found = run(IMAGES, ray, of_ranks(2), tmp_path / "ray")
    assert_same(found, expected)
    for mine, its in zip(found.iterations, expected.iterations, strict=True):
        assert mine.learned["learner/frames_read"] == its.learned["learner/frames_read"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("sharding", [pytest.param("whole", marks=pytest.mark.slow), "sharded"])
def test_rank_0_may_act_in_its_own_process(sharding: str, ray: Session, reference: Any, tmp_path: Path) -> None:
    """Where it holds a shard it has no policy to share, and who acts has a process of its own."""
    found = run(with_optim(STATES, sharding=sharding), ray, of_ranks(2, together=True), tmp_path / "ray")
    assert_same(found, reference(STATES))
    for one in found.iterations:
        (path,) = {span.args["path"] for span in one.spans if span.name == "publish weights"}
        assert path == ("the same policy" if sharding == "whole" else "shared memory")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["whole", "sharded"])
def test_ranks_may_leave_the_memory(sharding: str, ray: Session, reference: Any, tmp_path: Path) -> None:
    found = run(with_optim(STATES, sharding=sharding), ray, replace(of_ranks(3), unload=True), tmp_path / "ray")
    assert_same(found, reference(STATES))
    for one in found.iterations:
        bytes_of = [span.args["bytes"] for span in one.spans if span.args.get("worker") == "learner"]
        assert bytes_of[-1] > 0


# --- ranks alone


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "sharding"), [(2, "whole"), (4, "whole"), (4, "sharded")])
def test_a_share_of_the_work_falls_with_the_ranks(
    ranks: int, sharding: str, ray_runtime: RayRuntime, tmp_path: Path
) -> None:
    config, batch = config_of(minibatch=24, epochs=1, sharding=sharding), make_batch()
    whole = alone(config, tmp_path).counted_update(batch, 0)
    assert whole > 0
    with connected(ray_runtime, ranks, config, tmp_path) as group:
        found = group.call_all(Counted.counted_update, batch, 0)
    assert found == [pytest.approx(whole / ranks, rel=0.15)] * ranks


@pytest.mark.slow
def test_shards_are_shards(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """Parameters and moments are divided; what cannot be is padded. The work is divided too."""
    config = config_of(minibatch=24, epochs=1, sharding="sharded")
    one = alone(config, tmp_path)
    work = one.counted_update(make_batch(), 0)
    assert work > 0
    with connected(ray_runtime, 2, config, tmp_path) as group:
        assert group.call_all(Counted.counted_update, make_batch(), 0) == [pytest.approx(work / 2, rel=0.15)] * 2
        found = group.call_all(Counted.local_numbers)
        assert sum(found) == one.local_numbers()
        assert max(found) < 0.6 * one.local_numbers()
        assert group.call_all(Learner.shares_policy) == [False] * 2


@pytest.mark.slow
def test_all_ranks_decide_alike(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """The bound of the KL divergence, skipped steps, and what is not on-policy."""
    bound = config_of(target_kl=1e-6)
    expected = alone(bound, tmp_path).update(make_batch(), 0)
    assert expected["learner/stopped_by_kl"] == 1
    with connected(ray_runtime, 2, bound, tmp_path) as group:
        for found in group.call_all(Learner.update, make_batch(), 0):
            assert {k: v for k, v in found.items() if k != "learner/update_s"} == pytest.approx(
                {k: v for k, v in expected.items() if k != "learner/update_s"}, rel=1e-3, abs=1e-6, nan_ok=True
            )
    batch = make_batch()
    value, reward = batch.value.clone(), batch.reward.clone()
    value[0, 0] = reward[0, 0] = float("nan")
    with connected(ray_runtime, 2, config_of(epochs=1, minibatch=0), tmp_path) as group:
        before = weights_of(group)
        one, other = group.call_all(Learner.update, replace(batch, value=value), 0)
        assert one["learner/skipped_steps"] == other["learner/skipped_steps"] > 0
        assert all(torch.equal(before[name], t) for name, t in weights_of(group).items() if "normalizer" not in name)
        assert len(list((tmp_path / "non_finite").iterdir())) == one["learner/skipped_steps"], "written once"
        for found in group.call_all(Learner.update, replace(batch, reward=reward), 1):
            assert found["learner/broken_episodes"] == 1 and found["learner/skipped_steps"] == 0
        with pytest.raises(UserError, match=r"^learner \d: at the first minibatch the mean \|ratio - 1\|"):
            group.call_all(Learner.update, replace(batch, log_prob=batch.log_prob + 0.1, version=2), 2)


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["whole", "sharded"])
def test_a_checkpoint_of_ranks_is_one_of_any_number(sharding: str, ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """Saved on 4 ranks, continued on 1 and 2; saved on 2 of those and on 1, continued on 4."""
    config, batches = config_of(sharding=sharding), [make_batch(seed) for seed in range(3)]
    straight = alone(config_of(), tmp_path)

    def learn(group: WorkerGroup[Counted], number: int) -> None:
        lagging = replace(batches[number], version=-1)  # those batches are of the policy that began
        group.call_all(Learner.update, lagging, number)

    expected = []
    for number in range(3):
        straight.update(replace(batches[number], version=-1), number)
        expected.append({name: tensor.clone() for name, tensor in straight.weights().items()})
    with connected(ray_runtime, 4, config, tmp_path) as group:
        learn(group, 0)
        group.call_all(Learner.save, tmp_path / "four", state_at(1), {})
        assert_near(weights_of(group), expected[0])
    folder = tmp_path / "four" / "000001"
    checkpoint.verify(folder)
    for ranks in (1, 2):
        with connected(ray_runtime, ranks, config, tmp_path) as group:
            group.call_all(Learner.load, folder)
            assert_near(weights_of(group), expected[0])
            learn(group, 1)
            assert_near(weights_of(group), expected[1])
            group.call_all(Learner.save, tmp_path / str(ranks), state_at(2), {})
    for ranks in (1, 2):
        with connected(ray_runtime, 4, config, tmp_path) as group:
            group.call_all(Learner.load, tmp_path / str(ranks) / "000002")
            learn(group, 2)
            assert_near(weights_of(group), expected[2])


@pytest.mark.slow
def test_a_checkpoint_that_cannot_be_read_is_one_message(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    with connected(ray_runtime, 2, config_of(), tmp_path) as group:
        with pytest.raises(Exception, match="^learner 0: no policy here"):
            group.call_all(Learner.load, tmp_path / "nowhere")
        assert weights_of(group), "the ranks go on"


@pytest.mark.slow
# --- bad input


def test_more_ranks_than_rows_of_a_minibatch_are_refused(ray: Session, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="9 ranks, and a minibatch 8 rows.*set optim.ranks to 8 or less"):
        check(config_of(ranks=9))
    check(config_of(ranks=9, minibatch=0))
    with pytest.raises(UserError, match="17 ranks, and a minibatch 16 rows"):
        run(STATES, ray, of_ranks(17), tmp_path / "ray")


def test_inline_is_one_rank() -> None:
    config = parse_config({"optim": {"ranks": 4}, "runtime": {"mode": "inline"}}, "test")
    assert len(configured(RunSpec.of(config), (0, 1)).components["learner"]) == 1
    on_ray = config.model_copy(update={"runtime": Config().runtime})
    assert len(configured(RunSpec.of(on_ray), (0, 1)).components["learner"]) == 4


class DiesInStart(Learner):
    @classmethod
    def make(cls, context: Any) -> Learner:
        if context.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().make(context)


class DiesInJoin(Learner):
    def join(self, address: str, timeout_s: float) -> None:
        if self.ranks.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        super().join(address, timeout_s)


class DiesInUpdate(Learner):
    def finish(self, iteration: int) -> dict[str, float]:
        if self.ranks.rank == 1 and iteration == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().finish(iteration)


def with_learner(cls: type[Learner]) -> Recipe:
    components = tuple(
        replace(LEARNER, worker=f"{__name__}:{cls.__name__}") if c.name == LEARNER.name else c
        for c in KEPT_PPO.components
    )
    return replace(KEPT_PPO, components=components)


START, JOIN, UPDATE = with_learner(DiesInStart), with_learner(DiesInJoin), with_learner(DiesInUpdate)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "message", "sharding"),
    [
        pytest.param("START", r"^learner 1 died during 'start'", "whole", marks=pytest.mark.slow),
        pytest.param("JOIN", r"^learner 2 died during 'join'", "whole", marks=pytest.mark.slow),
        pytest.param("UPDATE", r"^learner 1 died during 'finish'", "whole", marks=pytest.mark.slow),
        ("UPDATE", r"^learner 1 died during 'finish'", "sharded"),
    ],
)
def test_a_rank_that_dies_is_named_in_one_message(
    recipe: str, message: str, sharding: str, ray: Session, tmp_path: Path
) -> None:
    settings = with_optim({**STATES, "workflow": f"{__name__}:{recipe}"}, sharding=sharding)
    with pytest.raises(WorkerFailed, match=message):
        run(settings, ray, of_ranks(3 if recipe == "JOIN" else 2), tmp_path / "ray")
    # The processes that are left serve the next run; those of ranks serve no other.
    found = run(with_optim(STATES, epochs=1), ray, of_ranks(1), tmp_path / "next")
    assert_was_a_test(found)


def joined(ranks: Sequence[Ranks], addresses: Sequence[str], connect_s: float) -> list[BaseException | None]:
    """What each rank says, all of them in this process: they never get as far as to be connected."""
    errors: list[BaseException | None] = [None] * len(ranks)

    def one(number: int) -> None:
        try:
            ranks[number].join(addresses[number], 60.0, connect_s)
        except Exception as error:  # whatever it is, the test is of what each of them says
            errors[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_rank_that_is_not_there_is_named(tmp_path: Path) -> None:
    ranks = [Ranks("learner", rank, 3) for rank in (0, 1)]
    address = ranks[0].listen()
    for rank, error in enumerate(joined(ranks, [address] * 2, 5.0)):
        assert isinstance(error, PeerFailed)
        assert re.search(rf"learner {rank} .*waited 5 s at {address} for learner 2", str(error)), str(error)
    assert not torch.distributed.is_initialized()
    nobody = Ranks("learner", 1, 2)
    (error,) = joined([nobody], [address], 1.0)
    assert isinstance(error, PeerFailed)
    assert re.search(rf"learner 1 of 2 on .* did not connect to learner 0 at {address} within 1 s", str(error))


@pytest.mark.slow
def test_ranks_with_other_versions_of_torch_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Ranks("learner", rank, 2) for rank in (0, 1)]
    address = ranks[0].listen()
    monkeypatch.setattr(torch, "__version__", "2.12.0")
    other = threading.Thread(target=lambda: joined(ranks[1:], [address], 5.0))
    other.start()
    ranks[0]._store.wait(["rank 1"])  # type: ignore[union-attr]
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    (error,) = joined(ranks[:1], [address], 5.0)
    other.join()
    assert isinstance(error, UserError)
    assert "learner 0 at 127.0.0.1 has 2.13.0, learner 1 at 127.0.0.1 has 2.12.0" in str(error)


def test_the_metrics_of_ranks_are_one_updates() -> None:
    one = {"learner/grad_norm": 2.0, "learner/frames_read": 5.0, "learner/update_s": 1.0}
    assert merged_update([one, {**one, "learner/update_s": 3.0}]) == {
        "learner/grad_norm": 2.0, "learner/frames_read": 10.0, "learner/update_s": 3.0, "learner/ranks": 2.0,
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_ranks(ray: Session, reference: Any, tmp_path: Path) -> None:
    """Through the executor: two iterations on 4 ranks, the third on 2."""
    config = kept_in(tmp_path / "gathered", parse_config(STATES, "test"))
    (tmp_path / "gathered").mkdir()
    with start_run(RunSpec.of(config), tmp_path, ray, of_ranks(4)) as workers:
        workers.begin(None, 0)
        done = [workers.iterate(number) for number in range(2)]
        workers.save(tmp_path, state_at(2), done[-1].environments)
    with start_run(RunSpec.of(config), tmp_path, ray, of_ranks(2)) as workers:
        workers.load(tmp_path / "000002")
        workers.begin(checkpoint.read_environments(tmp_path / "000002"), 2)
        workers.iterate(2)
        first, _ = workers.learner.call_all(LearnerRole.weights)
        assert_near({name: tensor.clone() for name, tensor in first.items()}, reference(STATES).parameters, 1e-4)
