"""Evaluations under delays: what is executed meanwhile, exactness, the protocol, its result and pages."""

from __future__ import annotations

import json
import shutil
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import embodied
from embodied.commands.evaluate import evaluate_run
from embodied.commands.report import report_runs
from embodied.config.schema import Config, delay_of, delay_text
from embodied.errors import UserError
from embodied.evaluation.folder import EvalFolder, read_folder
from embodied.evaluation.protocol import Protocol, as_data, from_data, protocol_of
from embodied.reporting.conditions import read_conditions
from embodied.rollout.executed_chunks import Delayed, ExecutedChunks
from embodied.rollout.loaded_policy import LoadedPolicy
from embodied.run.saved_settings import settings_of
from embodied.workflows.context import make_policy, policy_spec
from embodied.workflows.run_spec import task_spec
from sim_farm.workers.hosts import InProcess
from tests.embodied.support import evaluations
from tests.embodied.support.evaluations import assert_same_episodes, config, evaluated, refusal
from tests.embodied.support.served import serving

TASK = "tabletop/reach"
CLOCK: dict[str, Any] = {
    "env": {"task": TASK, "num_envs": 4, "max_episode_steps": 20},
    "policy": {"kind": "tests.embodied.support.clock_policy:Clock", "reads": ["state", "episode"], "chunk": 8},
    "farm": {"physics_workers": 1},
    "eval": {"episodes": 5, "videos": 0},
    "runtime": {"mode": "inline"},
}
FLOW = {"policy": {"kind": "flow", "chunk": 4, "options": {"widths": [16], "steps": 2}}}
"""A run whose policy multiplies matrices, and samples."""


def executed(folder: EvalFolder, trial: int) -> list[str]:
    """For each action of the trial the env step of its decision and its place there, as `16+3`."""
    found = folder.actions(next(one for one in folder.in_order() if one.trial == trial))
    numbers = np.round(found[:, 0].astype(np.float64) * 1e5).astype(int)
    return [f"{number // 100}+{number % 100}" for number in numbers.tolist()]


# --- what is executed


def test_meanwhile_the_rest_of_the_last_chunk_is_executed() -> None:
    chunks = ExecutedChunks(interval=5)
    first, second, third = (np.arange(8, dtype=np.float32)[:, None] + 100 * k for k in range(3))
    assert chunks.left_over is None
    assert chunks.execute(first, 3).ravel().tolist() == [0, 1, 2, 3, 4], "the first decision is waited for"
    assert chunks.left_over is not None and chunks.left_over.ravel().tolist() == [5, 6, 7]
    assert chunks.execute(second, 3).ravel().tolist() == [5, 6, 7, 103, 104]
    assert chunks.execute(third, 1).ravel().tolist() == [105, 201, 202, 203, 204]


def test_predictions_that_have_arrived_are_averaged() -> None:
    """a_t = sum w_i a_i / sum w_i, w_i = exp(-m i), with the oldest first, of chunks that are two env steps apart."""
    m, draw = 0.5, np.random.default_rng(1)
    decisions = draw.standard_normal((4, 7, 2)).astype(np.float32)
    chunks = ExecutedChunks(2, m)
    found = [chunks.execute(decided, 1) for decided in decisions]
    for k in range(4):
        for step in range(2):
            known = range(k + (step >= 1 or k == 0))
            predicted = [decisions[j, 2 * (k - j) + step] for j in known if 2 * (k - j) + step < 7]
            weights = np.exp(-m * np.arange(len(predicted)))
            np.testing.assert_allclose(found[k][step], weights @ np.array(predicted) / weights.sum(), rtol=1e-5)


def test_a_drawn_delay_is_a_function_of_its_decision() -> None:
    delayed = Delayed("naive", "1:0.6,4:0.4", 4)
    assert (delayed.most, delayed.axis) == (4, "naive 1:0.6,4:0.4")
    found = [delayed.drawn(3, 7, trial, step) for trial in range(50) for step in range(0, 40, 4)]
    assert found == [delayed.drawn(3, 7, trial, step) for trial in range(50) for step in range(0, 40, 4)]
    assert set(found) == {1, 4} and abs(found.count(1) / len(found) - 0.6) < 0.07
    assert found != [delayed.drawn(4, 7, trial, step) for trial in range(50) for step in range(0, 40, 4)]


@pytest.fixture(scope="module")
def clocked(tmp_path_factory: pytest.TempPathFactory) -> EvalFolder:
    settings = config(CLOCK, eval={"delay": ["3", "1:50,4:50"]})
    return evaluated(tmp_path_factory.mktemp("clocked") / "e", settings)


def test_an_evaluation_executes_chunks_late(clocked: EvalFolder) -> None:
    assert [(o.trial, o.length) for o in clocked.in_order()] == [(trial, 20) for trial in range(15)]
    plain = [f"{step // 8 * 8}+{step % 8}" for step in range(20)]
    late = ["0+0", "0+1", "0+2", "0+3", "0+4"]
    for step in (5, 10, 15):
        late += [f"{step - 5}+{5 + i}" for i in range(3)] + [f"{step}+{i}" for i in (3, 4)]
    for trial in range(5):
        assert executed(clocked, trial) == plain
        assert executed(clocked, 5 + trial) == late
        drawn = executed(clocked, 10 + trial)
        for step in range(4, 20, 4):
            delay = Delayed("naive", "1:0.5,4:0.5", 4).drawn(0, _key(), trial, step)
            expected = [f"{step - 4}+{4 + i}" for i in range(delay)] + [f"{step}+{i}" for i in range(delay, 4)]
            assert drawn[step : step + 4] == expected


def _key() -> int:
    return zlib.crc32(TASK.encode())


# --- exactness


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return evaluations.trained(tmp_path_factory.mktemp("runs"), "run", seed=1, sections=FLOW)


def settings(run: Path, **sections: dict[str, Any]) -> Config:
    base = settings_of(str(run), run.parent).model_dump(mode="json")
    base["eval"] |= {"episodes": 6, "greedy": False, "delay": ["2"], "delay_method": ["naive", "ensemble"]}
    return config(base, **sections)


@pytest.fixture(scope="module")
def own(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("own") / "e"
    evaluate_run(str(run), settings(run), None, run.parent, into=folder)
    return folder


def test_trials_without_a_delay_are_those_of_a_plain_evaluation(run: Path, own: Path, tmp_path: Path) -> None:
    plain = settings(run, eval={"delay": (), "delay_method": ()})
    evaluate_run(str(run), plain, None, run.parent, into=tmp_path / "plain")
    alone, beside = read_folder(tmp_path / "plain"), read_folder(own)
    assert alone.in_order() == beside.in_order()[:6] and len(beside.in_order()) == 18
    for outcome in alone.in_order():
        assert np.array_equal(alone.actions(outcome), beside.actions(outcome))
    late = [o for o in beside.in_order() if o.trial in (0, 6, 12)]
    first, naive, averaged = (beside.actions(one) for one in late)
    assert np.array_equal(first[:2], naive[:2]) and np.array_equal(first[:2], averaged[:2])
    assert np.array_equal(first[2:4], naive[2:4]) and not np.array_equal(first[4:6], naive[4:6])


@pytest.mark.parametrize(
    "how",
    [{"farm": {"groups": 1}}, pytest.param({"runtime": {"mode": "ray"}}, marks=pytest.mark.slow)],
    ids=["groups", "ray"],
)
def test_a_delay_is_the_same_in_every_mode(run: Path, own: Path, how: dict[str, Any], tmp_path: Path) -> None:
    if "farm" in how:
        how = how | {"eval": {"num_envs": 4}}  # as many rows of a batch
    evaluate_run(str(run), settings(run, **how), None, run.parent, into=tmp_path / "e")
    assert_same_episodes(read_folder(own), read_folder(tmp_path / "e"))


def test_a_delayed_evaluation_goes_on(run: Path, own: Path, tmp_path: Path) -> None:
    folder = tmp_path / "e"
    shutil.copytree(own, folder)
    lines = (folder / "episodes.jsonl").read_text().splitlines()
    (folder / "episodes.jsonl").write_text("".join(f"{line}\n" for line in lines[:8] + lines[13:14]))
    result = evaluate_run(str(run), settings(run), None, run.parent, into=folder, resume=True)
    assert result["episodes_of_earlier_sessions"] == 9
    assert_same_episodes(read_folder(own), read_folder(folder))
    assert (folder / "episodes.jsonl").read_text() == (own / "episodes.jsonl").read_text()


def test_a_delay_is_the_same_of_a_served_policy(run: Path, own: Path, tmp_path: Path) -> None:
    with serving(embodied.load_policy(run)) as (address, _):
        base = settings(run).model_dump(mode="json")
        base["policy"] |= {"kind": "remote", "options": {"address": address}}
        evaluate_run("remote", config(base), None, tmp_path, into=tmp_path / "e")
    assert_same_episodes(read_folder(own), read_folder(tmp_path / "e"))


# --- real-time chunking


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("continued") / "e"
    evaluate_run("smolvla", FLOW_VLA, None, folder.parent, into=folder)
    return folder


FLOW_VLA = config(
    CLOCK,
    env={"task": "tabletop/reach_red", "cameras": 1, "image_size": 56, "num_envs": 2},
    policy={
        "kind": "smolvla",
        "reads": ["images", "instruction", "proprio"],
        "chunk": 4,
        "horizon": 12,
        "options": {"checkpoint": "assets/smolvla_small", "asset": "demonstrations", "steps": 4},
    },
    eval={"episodes": 2, "delay": 2, "delay_method": ["naive", "rtc", "rtc_lerobot"], "greedy": False},
)
"""A flow policy with random weights: its chunks agree with nothing by themselves."""


def test_real_time_chunks_continue_what_is_executed(continued: Path) -> None:
    folder = read_folder(continued)
    found = {one.trial: folder.actions(one) for one in folder.in_order()}
    for trial in (0, 1):
        naive, paper, lerobot = (found[trial + 2 * place] for place in (1, 2, 3))
        for other in (paper, lerobot):  # the first chunk has nothing to continue
            assert np.array_equal(naive[:6], other[:6]) and not np.array_equal(naive[6:8], other[6:8])
        assert not np.array_equal(paper[6:], lerobot[6:])

        def jump(actions: np.ndarray) -> float:
            """Mean step from the last action of a chunk to the first of the next one."""
            return float(np.mean([np.abs(actions[t] - actions[t - 1]).mean() for t in range(6, 20, 4)]))

        assert jump(lerobot) < 0.6 * jump(naive)


def test_a_served_policy_continues_its_chunks_alike(continued: Path, tmp_path: Path) -> None:
    own = FLOW_VLA
    spec = policy_spec(own, InProcess().describe(task_spec(own)))
    loaded = LoadedPolicy(make_policy(own, spec), own, None)
    with serving(loaded) as (address, _):
        base = own.model_dump(mode="json")
        base["policy"] |= {"kind": "remote", "options": {"address": address}, "horizon": 0}
        result = evaluate_run("remote", config(base), None, tmp_path, into=tmp_path / "e")
    assert_same_episodes(read_folder(continued), read_folder(tmp_path / "e"))
    measured = result["decisions"]
    assert measured["control_hz"] > 0 and delay_of(measured["delay"])[0][0] >= 1


def test_a_served_policy_that_cannot_continue_is_refused(run: Path, tmp_path: Path) -> None:
    with serving(embodied.load_policy(run)) as (address, _):
        base = settings(run, eval={"delay_method": ["rtc"]}).model_dump(mode="json")
        base["policy"] |= {"kind": "remote", "options": {"address": address}}
        assert "rtc is not for the policy remote" in refusal(tmp_path / "e", config(base))


# --- the protocol


def test_the_protocol_has_every_delay_and_method() -> None:
    protocol = protocol_of(config(CLOCK, eval={"protocol": "latency", "delay_method": ["naive"]}))
    assert protocol.delays == tuple(Delayed("naive", str(delay), 8 - delay) for delay in (1, 2, 3, 4))
    assert protocol.total == 5 * 5 and protocol.name == "latency"
    assert "each trial also with a delay of env steps: naive 1 2 3 4 (a decision every 4/5/6/7" in protocol.line()
    assert protocol_of(config(CLOCK, eval={"protocol": "latency", "episodes": None})).trials == 50
    specs = protocol.episodes(TASK)
    assert specs == specs[:5] * 5
    assert from_data(json.loads(json.dumps(as_data(protocol)))) == protocol
    plain = protocol_of(config(CLOCK))
    assert "delays" not in as_data(plain) and plain.sha256 != protocol.sha256


def test_a_policy_that_learned_under_a_delay_is_evaluated_under_it() -> None:
    def of(**evaluation: Any) -> Protocol:
        return protocol_of(config(CLOCK, env={"delay": "2:80,3:20"}, policy={"chunk": 5}, eval=evaluation))

    own, wait = Delayed("naive", "2:0.8,3:0.2", 5), Delayed("wait", "0", 5)
    protocol = of()
    assert (protocol.trained_delay, protocol.delays) == (own, (wait,)) and protocol.count(TASK) == 10
    assert [protocol.delayed(TASK, trial) for trial in (0, 4, 5, 9)] == [own, own, None, None]
    said = "; with the delay of the training, in env steps: naive 2:0.8,3:0.2; each trial also without a delay; "
    assert said in protocol.line()
    assert from_data(json.loads(json.dumps(as_data(protocol)))) == protocol
    plain, named = of(delay=0), of(delay=2)
    assert not plain.every_delay[0] and not plain.delays and plain.trained_delay is None
    assert named.trained_delay is None and [one.delay for one in named.delays] == ["2"]
    assert of(protocol="latency").trained_delay is None
    assert len({one.sha256 for one in (protocol, plain, named)}) == 3
    perturbed = of(axes=["start:1"])
    assert perturbed.trained_delay == own and not perturbed.delays
    assert perturbed.delayed(TASK, 0) == perturbed.delayed(TASK, 5) == own
    other = protocol.shown_to(config(CLOCK))
    assert other.trained_delay == replace(own, interval=5) and other.delays == (replace(wait, interval=8),)
    assert other.same_episodes(protocol) and not other.same_episodes(plain)


def test_perturbed_trials_have_the_delay_of_the_training_too(tmp_path: Path) -> None:
    own = {"env": {"delay": "3"}, "policy": {"chunk": 5}}
    folder = evaluated(tmp_path / "e", config(CLOCK, **own, eval={"axes": ["start:1"], "episodes": 2}))
    late = [*(f"0+{i}" for i in range(8)), "5+3", "5+4", "5+5", "5+6", "5+7", "10+3"]
    assert [executed(folder, trial)[:14] for trial in range(4)] == [late] * 4


def test_default_methods_are_those_that_the_policy_can_have() -> None:
    def methods(kind: str, **more: Any) -> list[str]:
        policy = {"kind": kind, "reads": ["state"], "chunk": 2, **more}
        delays = protocol_of(config(CLOCK, policy=policy, eval={"protocol": "latency"})).delays
        return list(dict.fromkeys(one.method for one in delays))

    assert methods("flow") == ["naive", "ensemble"]
    assert methods("categorical_mlp") == ["naive"]
    assert methods("pi0", options={"checkpoint": "assets/pi0_small"}) == ["naive", "ensemble", "rtc", "rtc_lerobot"]


def test_decisions_are_a_chunk_apart_where_enough_is_predicted() -> None:
    def intervals(**policy: Any) -> list[tuple[str, int]]:
        delays = protocol_of(config(CLOCK, policy={"kind": "flow", "reads": ["state"], **policy}, eval=NAIVE)).delays
        return [(one.delay, one.interval) for one in delays]

    assert intervals(chunk=3, horizon=6) == [("1", 3), ("2", 3), ("3", 3)]
    assert intervals(chunk=4, horizon=6) == [("1", 4), ("2", 4), ("3", 3)]
    assert intervals(chunk=20, horizon=40)[-1] == ("8", 20)
    small = {"kind": "pi0", "options": {"checkpoint": "assets/pi0_small"}}
    assert intervals(chunk=2, **small) == [("1", 2), ("2", 2)], "of its files"


NAIVE = {"protocol": "latency", "delay_method": "naive"}


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"eval": {"delay": 5}}, "5 env steps is beyond the chunk.*predicts 8 actions.* at most 4, or .* at least 5"),
        ({"eval": {"delay": 1}, "policy": {"chunk": 1}}, "policy.chunk is 1.*Set eval.delay to 0, or"),
        ({"eval": {"delay": 1, "delay_method": "rtc"}}, "rtc is not for the policy .*Clock.* to naive ensemble"),
        ({"eval": {"delay_method": "naive"}}, "no delay is asked for: set eval.delay"),
        ({"eval": {"delay": 1, "axes": ["start"]}}, "under perturbations or under delays"),
        ({"eval": {"delay": "soon"}}, "'soon' is no delay"),
        ({"eval": {"delay": [0, 2]}}, "beside other delays, trials without one are always run"),
        ({"eval": {"delay": 0, "delay_method": "naive"}}, "no delay is asked for: set eval.delay"),
        ({"eval": {"delay": 0, "protocol": "latency"}}, "eval.delay is 0, and the protocol latency"),
        ({"env": {"delay": 9}}, r"9 env steps is beyond the chunk.*Set env.delay to at most 8 \(of a trained"),
        ({"eval": {"delay": ["2", "2:5"]}}, "a delay is named twice in 2 2:5"),
    ],
)  # fmt: skip
def test_mistakes_are_one_message_before_anything_runs(
    sections: dict[str, dict[str, Any]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        evaluated(tmp_path / "e", config(CLOCK, **sections))
    assert not (tmp_path / "e").exists()


def test_texts_of_delays() -> None:
    assert delay_of("3") == ((3, 1.0),) and delay_of("0") == ((0, 1.0),)
    assert delay_of("2:30, 0:10") == ((0, 0.25), (2, 0.75))
    assert delay_text(delay_of("2:30, 0:10")) == "0:0.25,2:0.75" and delay_text(delay_of(" 3:7")) == "3"
    spelled = [["2:80,3:20"], ["3:1,2:4"], ["2:0.8,3:0.2"]]
    assert len({protocol_of(config(CLOCK, eval={"delay": delay})).sha256 for delay in spelled}) == 1
    rare = delay_text([(2, 9_000 / 10_000), (3, 999 / 10_000), (9, 1 / 10_000)])
    assert rare == "2:0.9,3:0.0999,9:0.0001" and delay_text(delay_of(rare)) == rare
    assert delay_text([(2, 1 - 8e-5), (9, 8e-5)]) == "2", "one slow decision of many is no delay that is drawn"
    for text in ("", "-1", "1,2", "1:0", "1:2,1:3", "1.5", "1:1e3", "2:99999,3:1"):
        with pytest.raises(ValueError, match="delay"):
            delay_of(text)


def test_another_policys_chunk_has_room_too(run: Path, tmp_path: Path) -> None:
    shorter = {"policy": FLOW["policy"] | {"chunk": 2}}
    other = evaluations.trained(tmp_path, "other", seed=2, sections=shorter)
    said = refusal_of(str(run), settings(run), tmp_path, str(other))
    assert "2 env steps is beyond the chunk: a decision of flow predicts 2 actions" in said


def refusal_of(run: str, asked: Config, into: Path, against: str) -> str:
    with pytest.raises(UserError) as caught:
        evaluate_run(run, asked, None, into, into=into / "refused", against=against)
    return str(caught.value)


# --- what is told


def test_results_are_paired_with_the_trials_without_a_delay(run: Path, own: Path) -> None:
    result = json.loads((own / "eval.json").read_text())
    rows = result["conditions"]
    assert [(row["axis"], row["level"], row["episodes"]) for row in rows] == [("naive", 2, 6), ("ensemble", 2, 6)]
    outcomes = {one.trial: bool(one.success) for one in read_folder(own).in_order()}
    for place, row in enumerate(rows, start=1):
        assert row["success_rate"] == np.mean([outcomes[6 * place + trial] for trial in range(6)])
        assert row["difference"] == pytest.approx(row["success_rate"] - result["success_rate"])
        assert row["difference_low"] <= row["difference"] <= row["difference_high"] and "p_value" in row
    text = (own / "eval.md").read_text()
    assert "delay, env steps" in text and "| naive 2" in text and "only delayed" in text
    assert (
        "delay in env steps" in (own / "eval.svg").read_text() and "no delay (wait)" in (own / "eval.svg").read_text()
    )
    named = [one.name for one in read_conditions(result)]
    assert named == ["no delay (wait)", "naive, 2 env steps", "ensemble, 2 env steps"]
    line = json.loads((own / "episodes.jsonl").read_text().splitlines()[6])
    assert (line["method"], line["delay"], line["interval"]) == ("naive", "2", 2)


def test_the_runs_page_shows_success_by_delay(run: Path, tmp_path: Path) -> None:
    home = tmp_path / "run"
    shutil.copytree(run, home)
    evaluate_run(str(home), settings(home), None, tmp_path)
    assert report_runs([str(home)], tmp_path) is not None
    page = (home / "report.html").read_text()
    assert "Under delays" in page and "naive, 2 env steps" in page and "no delay (wait)" in page
    shutil.copytree(home, tmp_path / "twin")
    several = report_runs([str(home), str(tmp_path / "twin")], tmp_path, tmp_path / "both.html")
    page = Path(several["report"]).read_text()
    assert "Under delays" in page and "ensemble 2" in page and "no delay (wait)" in page
    assert "unperturbed" not in page
