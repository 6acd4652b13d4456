"""Generation engines: the one of the process and servers, asked over real connections, do the same."""

from __future__ import annotations

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import policies
from embodied_language.engine_clients import DIALECTS, PROBE, EngineServers, Gone, servers_of
from embodied_language.engine_server import GenerationServer
from embodied_language.engines import Completion, Drawing, InProcessEngine
from embodied_language.model import load_model, save_model
from embodied_language.prompts import Prompts
from policies import Inputs, PolicyError, PolicySpec
from policies.capabilities import PublishedWeights
from tests.extensions.language.served_engine import served

MODEL = Path(__file__).parents[3] / "assets" / "countdown_lm"
PROMPTS = [[9, 30, 4], [8] * 20, [40], [12, 13, 14, 15, 16], [100, 3], [7, 7, 7]]
LIKELIEST = Drawing(count=12, ends=(2,), temperature=0.0)
DIALECT_NAMES = sorted(DIALECTS)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small models, whose answers differ."""
    root, found = tmp_path_factory.mktemp("models"), []
    for seed in (0, 1):
        source = root / f"source-{seed}"
        shutil.copytree(MODEL, source)
        config = json.loads((MODEL / "config.json").read_text())
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        (source / "config.json").write_text(json.dumps({**config, **sizes, "random_weights": seed}))
        model = load_model(source)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.15 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        save_model(model, root / f"model-{seed}")
        found.append(root / f"model-{seed}")
    return found


def asking(text: str, folder: Path = MODEL, timeout_s: float = 60.0) -> EngineServers:
    prompts = Prompts(folder, chat=False, system="", template="{}")
    return EngineServers.of(text, timeout_s, prompts.encode(PROBE), prompts.size)


def tokens(answers: list[Completion]) -> list[tuple[int, ...]]:
    return [answer.tokens for answer in answers]


# --- what all engines do


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_a_server_says_what_the_engine_of_the_process_says(dialect: str, folders: list[Path]) -> None:
    own = InProcessEngine(folders[0], rows=2)
    ending = replace(LIKELIEST, ends=(own.generate(PROMPTS, 1, LIKELIEST)[0].tokens[5],))
    wanted = own.generate(PROMPTS, 2, ending)
    assert len({len(answer.tokens) for answer in wanted}) > 1
    with served(folders[0]) as first, served(folders[1]) as second:
        engine = asking(f"{dialect} {first} {second}")
        engine.update_weights(folders[0], "one")
        found = engine.generate(PROMPTS, 2, ending, "one")
    assert tokens(found) == tokens(wanted) and {answer.version for answer in found} == {"one"}
    for one, other in zip(found, wanted, strict=True):
        assert one.log_prob == pytest.approx(other.log_prob, abs=1e-4)


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_every_token_that_ends_an_answer_is_sent_to_a_server(dialect: str, folders: list[Path]) -> None:
    own = InProcessEngine(folders[0])
    whole = own.generate(PROMPTS, 1, LIKELIEST)
    ending = replace(LIKELIEST, ends=(2, *{answer.tokens[3] for answer in whole[:2]}))
    wanted = own.generate(PROMPTS, 1, ending)
    assert {answer.tokens[-1] for answer in wanted} > set(ending.ends[1:])
    with served(folders[0]) as address:
        engine = asking(f"{dialect} {address}")
        engine.update_weights(folders[0], "one")
        assert tokens(engine.generate(PROMPTS, 1, ending, "one")) == tokens(wanted)


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_an_answer_is_of_one_version_while_weights_change(dialect: str, folders: list[Path]) -> None:
    wanted = {str(folder): tokens(InProcessEngine(folder).generate(PROMPTS, 1, LIKELIEST)) for folder in folders}
    assert wanted[str(folders[0])] != wanted[str(folders[1])]
    with served(folders[0]) as address:
        (server,) = servers_of(f"{dialect} {address}")
        server.load(folders[0], str(folders[0]), 60.0)
        seen: list[str] = []
        changing = threading.Event()

        def ask() -> None:
            while not changing.is_set():
                try:
                    found = server.complete(PROMPTS, 1, LIKELIEST, 60.0)
                except Gone:  # vLLM's answers name no version: what a change may have touched is asked again
                    continue
                (version,) = {answer.version for answer in found}
                assert tokens(found) == wanted[version]
                seen.append(version)

        with ThreadPoolExecutor(3) as threads:
            asked = [threads.submit(ask) for _ in range(3)]
            try:
                for folder in [folders[1], folders[0]]:
                    server.load(folder, str(folder), 60.0)
                    before = len(seen)
                    while len(seen) < before + 2 and not any(each.done() for each in asked):
                        time.sleep(0.005)
            finally:
                changing.set()
            for each in asked:
                each.result()
    assert set(seen) == {str(folder) for folder in folders}


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_a_server_that_came_back_is_given_the_weights_again(dialect: str, folders: list[Path]) -> None:
    wanted = tokens(InProcessEngine(folders[1]).generate(PROMPTS, 1, LIKELIEST))
    with served(folders[0]) as address:
        engine = asking(f"{dialect} {address}")
        engine.update_weights(folders[1], "new")
    with served(folders[0], port=int(address.rpartition(":")[2])):
        assert tokens(engine.generate(PROMPTS, 1, LIKELIEST, "new", folders[1])) == wanted


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_an_answer_that_ended_at_another_token_is_gone_on_with(dialect: str, folders: list[Path]) -> None:
    wanted = InProcessEngine(folders[0]).generate(PROMPTS, 1, LIKELIEST)
    middle = next(answer.tokens[1] for answer in wanted if len(answer.tokens) > 3)

    class EndsEarly(GenerationServer):
        def _drawing(self, parameters: Any, count: str) -> Drawing:
            return replace(super()._drawing(parameters, count), ends=(middle,))

    with served(folders[0], kind=EndsEarly) as address:
        engine = asking(f"{dialect} {address}")
        engine.update_weights(folders[0], "one")
        found = engine.generate(PROMPTS, 1, LIKELIEST, "one")
    assert tokens(found) == [answer.tokens for answer in wanted]


# --- what cannot be: one message, in bounded time


def other_vocabulary(folder: Path, into: Path) -> Path:
    """The model with a tokenizer in which two tokens have changed places."""
    shutil.copytree(folder, into)
    tokenizer = json.loads((into / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["3"], vocabulary["8"] = vocabulary["8"], vocabulary["3"]
    (into / "tokenizer.json").write_text(json.dumps(tokenizer))
    return into


def test_an_engine_of_another_vocabulary_is_refused(folders: list[Path], tmp_path: Path) -> None:
    other = other_vocabulary(folders[0], tmp_path / "other")
    own = Prompts(folders[0], chat=False, system="", template="{}").encode(PROBE)
    assert Prompts(other, chat=False, system="", template="{}").encode(PROBE) != own
    with served(other) as address, pytest.raises(PolicyError, match="has another vocabulary than the policy"):
        asking(f"sglang {address}").update_weights(folders[0], "one")


class Keeps(GenerationServer):
    """Has one version whatever it is given."""

    def update_weights_from_disk(self, body: Any) -> Any:
        return {"success": True, "message": ""}

    def update_weight_version(self, body: Any) -> Any:
        return {"success": True, "new_version": body["new_version"]}


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_a_server_that_answers_another_version_is_named(dialect: str, folders: list[Path]) -> None:
    with served(folders[0], kind=Keeps) as address:
        engine = asking(f"{dialect} {address}")
        with pytest.raises(PolicyError, match=f"{address} answers by the weights default, and new was asked for"):
            engine.generate(PROMPTS, 1, LIKELIEST, "new", folders[0])


def test_a_model_of_other_sizes_is_refused(folders: list[Path], tmp_path: Path) -> None:
    config = json.loads((folders[0] / "config.json").read_text())
    shutil.copytree(MODEL, tmp_path / "larger")
    (tmp_path / "larger" / "config.json").write_text(json.dumps({**config, "vocab_size": 200, "random_weights": 0}))
    with served(folders[0]) as address, pytest.raises(PolicyError, match="refuses.*vocabulary of 200 tokens"):
        asking(f"sglang {address}").update_weights(tmp_path / "larger", "one")


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_a_server_that_hangs_is_waited_for_no_longer_than_told(dialect: str, folders: list[Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        engine = asking(f"{dialect} http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.5)
        with pytest.raises(PolicyError, match="did not answer .* within .* s: see whether it hangs"):
            engine.generate(PROMPTS, 1, LIKELIEST, "one", folders[0])
        with pytest.raises(PolicyError, match="did not answer /tokenize within"):
            engine.update_weights(folders[0], "one")


def test_a_server_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        port = bound.getsockname()[1]
    with pytest.raises(PolicyError, match=f"no answer of the engine at http://127.0.0.1:{port} within 0.5 s"):
        asking(f"sglang http://127.0.0.1:{port}", timeout_s=0.5).update_weights(MODEL, "one")


def test_another_program_is_no_engine(folders: list[Path]) -> None:
    class Other(GenerationServer):
        def __init__(self, engine: InProcessEngine, model: str) -> None:
            super().__init__(engine, model)
            self.routes = {("POST", "/tokenize"): lambda body: ["hello"]}

    with served(folders[0], kind=Other) as address:
        with pytest.raises(PolicyError, match=r"is no SGLang server.*/tokenize answers \['hello'\]"):
            asking(f"sglang {address}").update_weights(folders[0], "one")
        with pytest.raises(PolicyError, match="has no route /generate: it is no SGLang server"):
            asking(f"sglang {address}").generate(PROMPTS, 1, LIKELIEST, "one")


@pytest.mark.parametrize("text", ["http://127.0.0.1:1", "tgi http://127.0.0.1:1", "sglang", "vllm 127.0.0.1:8000"])
def test_an_engine_is_a_dialect_and_addresses(text: str) -> None:
    with pytest.raises(PolicyError, match="policy.options.engine is a dialect"):
        policies.build("language", SPEC, 0, checkpoint=str(MODEL), engine=text)


def test_a_request_of_a_browser_and_one_that_cannot_be_are_refused(folders: list[Path]) -> None:
    with served(folders[0]) as address:
        (server,) = servers_of(f"sglang {address}")
        import httpx

        page = httpx.post(f"{address}/generate", content="{}", headers={"Content-Type": "text/plain"}, trust_env=False)
        assert page.status_code == 403
        with pytest.raises(PolicyError, match="the token 99999; known: 0 to 171"):
            server.complete([[99999]], 1, LIKELIEST, 60.0)
        with pytest.raises(PolicyError, match="more than the context of 256"):
            server.complete([[1] * 250], 1, LIKELIEST, 60.0)


# --- the policy that asks


SPEC = PolicySpec(action_dim=1, chunk=12, state_dim=12, discrete_actions=172)
ASKED = Inputs(
    instruction=("Make 24 from 3, 8, 20.", "Make 7 from 1, 2.", "Make 1 from 1."), state=torch.full((3, 12), -1.0)
)


@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_what_an_engine_drew_is_scored_as_it_says(dialect: str, folders: list[Path], tmp_path: Path) -> None:
    with served(folders[0]) as address:
        options = {"checkpoint": str(folders[1]), "temperature": 0.7, "value_per_action": True}
        policy: Any = policies.build("language", SPEC, 0, engine=f"{dialect} {address}", **options)
        with torch.no_grad():
            policy.value_head.weight.normal_(generator=torch.Generator().manual_seed(0))
        weights = PublishedWeights(tmp_path / "engine" / "000003", 3)
        weights.folder.parent.mkdir()
        policy.publish(weights)
        action = policy.sample(ASKED, weights)
        resting = policy.sample(replace(ASKED, instruction=("", ASKED.instruction[1], "")), weights)
    assert (resting.trace["tokens"][[0, 2]] == policy.prompts.end).all() and resting.log_prob[1].any()
    found = policy.evaluate(ASKED, action.trace)
    said = found.log_prob != 0
    assert torch.allclose(action.log_prob, found.log_prob, atol=1e-4)
    assert torch.allclose(action.value[said[..., 0]], found.value[said[..., 0]], atol=1e-4)
    assert [path.name for path in weights.folder.parent.iterdir()] == ["000003"]


# --- processes that end


@contextmanager
def process(folder: Path, port: int = 0) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A server in a process of its own, and its port."""
    command = [sys.executable, "-m", "embodied_language.engine_server", str(folder), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            said = server.stdout.readline()
            yield server, int(re.findall(r":(\d+);", said)[0])
        finally:
            server.kill()


@pytest.mark.slow
@pytest.mark.parametrize("dialect", DIALECT_NAMES)
def test_a_server_that_is_killed_while_it_writes_costs_another_attempt(dialect: str, folders: list[Path]) -> None:
    long = replace(LIKELIEST, count=200)
    prompts = [[token, other] for token in range(10, 30) for other in range(10, 14)]
    wanted = tokens(InProcessEngine(folders[1]).generate(prompts, 1, long))
    with ThreadPoolExecutor(1) as thread:
        with process(folders[0]) as (server, port):
            engine = asking(f"{dialect} http://127.0.0.1:{port}", timeout_s=300.0)
            engine.update_weights(folders[1], "new")
            idle = psutil.Process(server.pid).cpu_times().user
            asked = thread.submit(engine.generate, prompts, 1, long, "new", folders[1])
            while psutil.Process(server.pid).cpu_times().user < idle + 0.1:
                time.sleep(0.01)
            assert not asked.done(), "it is killed in the middle"
            server.send_signal(signal.SIGKILL)
            server.wait()
        with process(folders[0], port):
            found = asked.result()
    assert tokens(found) == wanted


@pytest.mark.slow
def test_another_server_takes_what_a_killed_one_had(folders: list[Path]) -> None:
    long = replace(LIKELIEST, count=200)
    prompts = [[token, other] for token in range(10, 30) for other in range(10, 14)]
    wanted = tokens(InProcessEngine(folders[1]).generate(prompts, 1, long))
    with process(folders[0]) as (killed, one), process(folders[0]) as (_, two), ThreadPoolExecutor(1) as thread:
        engine = asking(f"sglang http://127.0.0.1:{one} http://127.0.0.1:{two}", timeout_s=300.0)
        engine.update_weights(folders[1], "new")
        idle = psutil.Process(killed.pid).cpu_times().user
        asked = thread.submit(engine.generate, prompts, 1, long, "new", folders[1])
        while psutil.Process(killed.pid).cpu_times().user < idle + 0.1:
            time.sleep(0.01)
        assert not asked.done()
        killed.send_signal(signal.SIGKILL)
        assert tokens(asked.result()) == wanted
