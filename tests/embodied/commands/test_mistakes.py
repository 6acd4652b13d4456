"""A value that a setting cannot have is one message, wherever it is given: the setting, the value, what is allowed."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from typing import Any

import annotated_types
import pytest

import embodied
from embodied import cli
from embodied.config.files import all_settings, parse_config
from embodied.errors import UserError

UNBOUNDED = {"stop_at", "loss.entropy_coef"}
"""Numbers that may be any: a return, a weight of either sign, an entropy (of a density), a reward."""
TOGETHER = 3
"""Mistakes of one command: a message names five, and some of these settings have two."""


def bounds(key: str) -> list[Any]:
    """The bounds of a setting's number, wherever its type has them."""
    field = all_settings()[key]

    def walk(kind: Any) -> Iterator[Any]:
        if typing.get_origin(kind) is typing.Annotated:
            yield from typing.get_args(kind)[1:]
        for part in typing.get_args(kind):
            yield from walk(part)

    found = [*field.metadata, *walk(field.annotation)]
    found += [part for one in found for part in getattr(one, "metadata", ())]
    return [one for one in found if isinstance(one, (annotated_types.Ge, annotated_types.Gt))]


def is_number(kind: Any) -> bool:
    parts = typing.get_args(kind)
    if typing.get_origin(kind) is typing.Literal or str in parts:
        return False
    return kind in (int, float) or any(is_number(part) for part in parts)


NUMBERS = [key for key, field in all_settings().items() if is_number(field.annotation)]


def too_small(key: str) -> str:
    bound = bounds(key)[0]
    return str(bound.gt) if isinstance(bound, annotated_types.Gt) else str(bound.ge - 1)


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status: Any = cli.main([*arguments])
    except SystemExit as left:  # the parser's way
        status = left.code
    said = capsys.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said and "pydantic" not in said
    return " ".join(said.split())


def test_every_number_has_a_bound() -> None:
    assert {key for key in NUMBERS if not bounds(key)} == UNBOUNDED


def test_a_number_below_its_bound_is_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    bounded = [key for key in NUMBERS if key not in UNBOUNDED]
    for first in range(0, len(bounded), TOGETHER):
        keys = bounded[first : first + TOGETHER]
        typed = [part for key in keys for part in (f"--{key.replace('_', '-')}", *[too_small(key)] * pair(key))]
        said = refusal(capsys, "train", "reach", *typed)
        for key in keys:
            assert re.search(rf"{re.escape(key)}(\.\d)?: it should be (at least|greater than) .*\(got ", said), said


def pair(key: str) -> int:
    return 2 if key == "advantage.keep_rates" else 1


@pytest.mark.parametrize("verb", ["train", "sft", "eval", "record", "serve", "profile", "plan", "compare", "inspect"])
def test_every_verb_says_it(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = ["inspect", "data", "--config", "reach"] if verb == "inspect" else [verb, "reach"]
    more = ["--out", "demos"] if verb == "record" else []
    said = refusal(capsys, *first, "--seed", "-1", "--policy.device", "gpu", *more)
    assert "seed: it should be at least 0 (got -1); policy.device: it should be auto, cpu, cuda, or" in said


def test_a_share_is_no_percentage(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "train", "reach", "--advantage.lam", "95")
    assert "advantage.lam: it should be at most 1 (got 95.0); 95% is 0.95" in said
    for key, given in {"sft.holdout": 10, "advantage.gamma": "95", "loss.clip": 20}.items():
        section, _, name = key.partition(".")
        with pytest.raises(UserError, match=rf"{key}: it should be .* 1 \(got .*\); {given}% is "):
            parse_config({section: {name: given}}, "own.yaml")


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("bench farm --seconds -1", "--seconds: it should be greater than 0 (got -1.0)"),
        ("bench policy --batches 4 0", "--batches.1: it should be at least 1 (got 0)"),
        ("bench transport --size 0", "--size: it should be at least 1 (got 0)"),
        ("bench learner --lora-rank -1", "--lora-rank: it should be at least 0 (got -1)"),
        ("reward demos --out classifier --lr 0", "--lr: it should be greater than 0 (got 0.0)"),
        ("reward demos --out classifier --seed -1", "--seed: it should be at least 0 (got -1)"),
        ("reward demos --out classifier --holdout 20", "--holdout is a share of the episodes"),
        ("record reach --out demos --episodes 0", "--episodes is at least 1, got 0"),
        ("serve reach --port -1", "--port is of 0 to 65535, got -1"),
        ("compare reach --repeats 0", "--repeats is at least 1, not 0"),
        ("watch --port -1", "--port is from 0 (a free one) to 65535, got -1"),
        ("train reach --seeds -1", "seed: it should be at least 0 (got -1)"),
        ("train reach --sweep optim.policy_lr=-6e-1", "optim.policy_lr: it should be at least 0 (got -0.6)"),
    ],
)
def test_a_verbs_own_numbers_have_bounds_too(command: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refusal(capsys, *command.split())


def test_a_setting_of_several_types_has_one_mistake() -> None:
    with pytest.raises(
        UserError, match=r"env.cameras: it should be at least 0 or it should be a valid tuple \(got -1\)$"
    ):
        parse_config({"env": {"cameras": -1}}, "own.yaml")


def test_from_python_too() -> None:
    with pytest.raises(UserError, match=r"embodied.train: iterations: it should be at least 1 \(got 0\)"):
        embodied.train("reach", {"iterations": 0})


@pytest.mark.parametrize("text", ["6e-1", "6E-1", "0.6", "60.e-2", "6e-01"])
def test_a_number_in_yaml_is_a_number_however_it_is_written(text: str) -> None:
    from embodied.files import parse_yaml, yaml_text

    assert parse_yaml(f"options: {{temperature: {text}}}", "it") == {"options": {"temperature": 0.6}}
    texts = {"name": text, "other": [text, "e1", "1e", "-8e3x"]}
    assert parse_yaml(yaml_text(texts), "it") == texts, "a text stays one"


def test_a_number_beside_another_is_no_number_to_the_base_of_60() -> None:
    from embodied.files import parse_yaml, yaml_text

    texts = {"delay": "2:20", "later": "1:2:3", "half": "1:20.5"}
    assert parse_yaml("{delay: 2:20, later: 1:2:3, half: 1:20.5}", "it") == texts
    assert parse_yaml(yaml_text(texts), "it") == texts
    assert parse_config({"env": parse_yaml("delay: 1:20", "it")}, "own.yaml").env.delay == "1"


def test_a_seed_beside_several_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "reach", "--seeds", "0", "1", "--seed", "3", "--name", "both"]) == 2
    assert "--seeds names the seed of each run, and --seed one" in capsys.readouterr().err
