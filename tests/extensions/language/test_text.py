"""Text tasks: the laws of physics, a verifier under attack, and problems from files."""

from __future__ import annotations

import json
import random
import re
import string
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import policies
from embodied_language.countdown_solver import solutions, working
from embodied_language.text.countdown import COUNTDOWN, verify
from embodied_language.text.problem_files import ProblemFile, _task, problem_backend
from embodied_language.text.problems import Problem
from embodied_language.text.tokenizer import answer_tokenizer
from policies import Inputs, PolicyError, PolicySpec
from sim_farm.conformance.physics_laws import PHYSICS_LAWS
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics
from sim_farm.workers.physics_worker import replayed
from tests.extensions.language import verifiers

OWN = verifiers.__name__
TOKENIZER = str(Path(__file__).parents[3] / "assets" / "countdown_lm")
SPEC = TaskSpec("text/countdown_3", options={"tokenizer": TOKENIZER})
TWO_TRIES = TaskSpec("text/countdown_3_two_tries", options={"tokenizer": TOKENIZER})
END = answer_tokenizer(TOKENIZER).end


def tokens(text: str) -> np.ndarray:
    """float32 [C, 1]: the answer's token ids and the end."""
    from tokenizers import Tokenizer

    ids = Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json").encode(text).ids
    return np.array([*ids, END], np.float32)[:, None]


@pytest.mark.parametrize("spec", [SPEC, TWO_TRIES], ids=lambda spec: spec.name)
@pytest.mark.parametrize("law", PHYSICS_LAWS, ids=lambda law: law.__name__)
def test_physics_obeys(law, spec: TaskSpec):
    law(spec)


def test_the_end_token_ends_the_episode_and_the_verifier_scores_what_is_before_it():
    physics = make_physics(SPEC)
    first = physics.reset(EpisodeSpec(3))
    assert first.instruction == "Make 11 from 5, 17, 11."
    result = physics.step(np.concatenate([tokens("11"), tokens("5")]))
    assert result.steps == 2 and result.reward.tolist() == [0, 1] and result.terminated.tolist() == [False, True]
    physics.reset(EpisodeSpec(3))
    wrong = physics.step(tokens("17-5"))
    assert wrong.terminated[-1] and not wrong.success.any() and not wrong.reward.any()


def test_an_answer_that_is_cut_off_is_worth_nothing():
    physics = make_physics(TaskSpec("text/countdown_3", options={"tokenizer": TOKENIZER}, max_episode_steps=4))
    physics.reset(EpisodeSpec(3))
    result = physics.step(tokens("11+5-5")[:4])
    assert result.truncated[-1] and not result.terminated.any() and not result.reward.any()


def said(state: np.ndarray) -> str:
    """The text of a state, with its special tokens."""
    from tokenizers import Tokenizer

    ids = [int(token) for token in state if token >= 0]
    return Tokenizer.from_file(f"{TOKENIZER}/tokenizer.json").decode(ids, skip_special_tokens=False)


def test_a_wrong_answer_is_replied_to_and_tried_again():
    physics = make_physics(TWO_TRIES)
    physics.reset(EpisodeSpec(3))
    first = physics.step(np.concatenate([tokens("17-5"), tokens("11")]))
    assert first.steps == len(tokens("17-5")) and not first.ended and not first.reward.any()
    assert said(first.state) == "17-5<end>That is 12. Again: ", "the next prompt has the first turn"
    second = physics.step(tokens("11"))
    assert second.terminated[-1] and second.reward.tolist() == [0, 1] and second.success[-1]
    physics.reset(EpisodeSpec(3))
    assert said(physics.step(tokens("+")).state) == "+<end>That is wrong. Again: "
    last = physics.step(tokens("5"))
    assert last.terminated[-1] and not last.success.any() and last.steps == 2


def test_turns_share_the_limit_of_an_episode():
    physics = make_physics(replace(TWO_TRIES, max_episode_steps=5))
    physics.reset(EpisodeSpec(3))
    assert physics.step(tokens("17-5")[:3]).steps == 3
    assert not physics.step(tokens("")).ended
    cut_off = physics.step(tokens("11"))
    assert cut_off.truncated[-1] and cut_off.steps == 1 and not cut_off.reward.any()


def test_an_episode_of_turns_is_replayed_to_where_it_was():
    one, other = make_physics(TWO_TRIES), make_physics(TWO_TRIES)
    parts = [tokens("17-5"), tokens("5+17")[:2]]
    for physics in (one, other):
        physics.reset(EpisodeSpec(3))
    expected = [one.step(part) for part in parts][-1]
    found = replayed(other, np.concatenate(parts))
    assert np.array_equal(found.state, expected.state) and found.instruction == expected.instruction
    assert one.step(tokens("")).ended and other.step(tokens("")).ended


@pytest.mark.parametrize(
    "answer",
    [
        "11",
        " 11 ",
        "(5-5+11)".replace("5-5+", ""),
        "11 = 11",
        "Let me think. <answer>17-5</answer> <answer>11</answer>",
    ],
)
def test_a_right_answer_is_seen(answer):
    assert verify((5, 17, 11), 11, answer) == 1.0


def test_every_problem_has_an_answer():
    for name, task in COUNTDOWN.items():
        count = int(name.split("_")[1])
        for seed in range(50):
            problem = task.problem(seed)
            assert len(problem.text.encode()) <= task.prompt_bytes, name
            assert problem.text == task.problem(seed).text
            target, *numbers = map(int, re.findall("[0-9]+", problem.text))
            found = solutions(target, tuple(sorted(numbers)))
            assert len(numbers) == count and found, problem.text
            judged = {problem.verify(answer) for answer in found}
            assert judged == {0.0 if name.endswith("mismatched") else 1.0}, problem.text


WORKING = re.compile(
    r"(?P<last>[0-9]+)(?P<wanted>(?:[-+*/]+[0-9]+)+):(?P<large>[0-9]+), (?P<small>[0-9]+)(?P<made>(?:[-+*/][0-9]+)+)"
)
SIGNED = re.compile(r"([-+*/]+)([0-9]+)")


def computed(left: int, sign: str, right: int) -> Fraction:
    if sign == "/":
        return Fraction(left, right)
    return Fraction({"+": left + right, "-": left - right, "*": left * right}[sign])


def test_the_solver_s_working_is_true_line_by_line_and_its_answer_right():
    longest = 0
    for seed in range(3000):
        problem = COUNTDOWN["countdown_3"].problem(seed)
        target, *numbers = map(int, re.findall("[0-9]+", problem.text))
        said = working(target, tuple(numbers))
        assert problem.verify(said) == 1.0, said
        longest = max(longest, len(tokens(said)))
        lines = said.partition("<")[0].split(".")
        for place, line in enumerate(lines):
            read = WORKING.fullmatch(line)
            assert read, said
            last, large, small = (int(read[name]) for name in ("last", "large", "small"))
            assert last == numbers[place] and sorted([last, large, small]) == sorted(numbers)
            wanted = {int(value): sign for sign, value in SIGNED.findall(read["wanted"])}
            for value, sign in wanted.items():
                first, second = (last, value) if len(sign) == 2 else (value, last)
                assert computed(first, sign[0], second) == target, said
            made = [int(value) for _, value in SIGNED.findall(read["made"])]
            for sign, value in SIGNED.findall(read["made"]):
                assert computed(large, sign, small) == int(value), said
            assert [value in wanted for value in made] == [line is lines[-1] and value == made[-1] for value in made]
    assert longest <= 88  # policy.chunk of the recipes


def test_the_solver_shows_the_working_of_a_share_of_its_answers():
    spec = PolicySpec(action_dim=1, chunk=88, state_dim=128, discrete_actions=172)
    problems = [COUNTDOWN["countdown_3"].problem(seed) for seed in range(200)]
    tokenizer = answer_tokenizer(TOKENIZER)
    for share in (0.0, 0.45, 1.0):
        solver = policies.build("countdown_solver", spec, 0, tokenizer=TOKENIZER, worked=share)
        chunk = solver.act(Inputs(instruction=tuple(problem.text for problem in problems)), None).chunk
        said = [row[: row.index(END)] for row in chunk[..., 0].int().tolist()]
        answers = [tokenizer.text(row) for row in said]
        assert all(p.verify(answer) == 1.0 for p, answer in zip(problems, answers, strict=True))
        shown = sum(not answer.startswith("<answer>") for answer in answers) / len(answers)
        assert abs(shown - share) < (0.1 if 0 < share < 1 else 1e-9)
    with pytest.raises(PolicyError, match="worked is a share from 0 to 1, got 2"):
        policies.build("countdown_solver", spec, 0, tokenizer=TOKENIZER, worked=2)


def test_held_out_problems_are_never_stated_in_training():
    def stated(name: str) -> set[tuple[int, ...]]:
        texts = (COUNTDOWN[name].problem(seed).text for seed in range(2000))
        return {(target, *sorted(numbers)) for target, *numbers in (map(int, re.findall("[0-9]+", t)) for t in texts)}

    train, unseen = stated("countdown_3"), stated("countdown_3_unseen")
    assert len(train) > 1000 and len(unseen) > 500 and not train & unseen


def wrong_answers(numbers: tuple[int, ...], target: int) -> list[str]:
    """A thousand answers that are wrong, or no expressions: numbers taken twice, code, digits of other scripts."""
    draw = random.Random(0)
    a, b, c = numbers
    found = [
        str(target),
        f"{target}+0",
        f"{a}-{a}+{target}",
        f"{a}*1",
        f"{a}{b}",
        f"{a} {b}",
        f"-{a}",
        f"+{a}",
        f"{a}**{b}",
        f"{a}//{b}",
        f"{a}%{b}",
        f"{a}/0",
        f"{a}/({b}-{b})",
        f"0{a}",
        f"{a}.0",
        "1e1",
        f"0x{a}",
        f"({a}",
        f"{a})",
        "()",
        "",
        " ",
        "=",
        f"={target}",
        f"{target}={target}",
        f"{a}={target}",
        f"{a}+{b}+{c}={target},",
        f"{a}+{b}+{c},{target}",
        f"{a}+{b}+{c}={target}, {a}",
        f"{a}+{b}+{c}={target}={target}",
        f"{a}+{b}+{c}={target}.0",
        f"{a}+{b}+{c}=0{target}",
        f"{a}+{b}+{c}=\uff14\uff14",
        f"{a}+{b}+{c};",
        f"{a}+{b}\u200b+{c}",
        f"{a}+{b}+{c}\x00",
        f"{a}+{b}+({c}",
        f"{a}+{b}+{c})",
        f"({a},{b},{c})",
        f"{a}+{b}+{c}+{c}-{c}",
        f"{a}+{b}+{c}+0",
        f"({a}+{b}+{c})*1",
        f"{a}+{b}+{c}/({a}-{a})",
        f"--{a}+{b}+{c}",
        f"0{a}+{b}+{c}",
        f"{a}+{b}+{c}//1",
        f"{a}+{b}+{c}**1",
        f"{a}_{b}+{c}",
        "\u0667+\u0661\u0668+\u0661\u0669",
        "\uff17+\uff11\uff18+\uff11\uff19",
        "<answer></answer>" + f"<answer>{target}</answer>",
        f"<answer>{a}+{b}+{c}</answer><answer>{a}</answer>",
        f"<answer>{a}+{b}+{c}</ANSWER>",
        "(" * 60 + f"{a}+{b}+{c}" + ")" * 59,
        f"{a}+{b}+{c}" + " " * 300 + "+1",
        f"{a}*{b}" + f"*{c}" * 40,
        f"{10**30}-{10**30}+{target}",
        "__import__('os').system('true')",
        f"eval('{target}')",
        f"{target} # {a}",
        f"lambda: {target}",
        "True",
        "nan",
        "inf",
        f"{target}\n",
        f"\t{target}",
        "\uff11\uff12",
        "\u0661\u0662",
        "\u00b2",
        "\u2460",
        "\u2212" + str(a),
        f"{a}\u00d7{b}",
        "<answer></answer>",
        f"<answer>{target}",
        f"<answer>{a}</answer>{target}",
        "(" * 100_000,
        "1" * 100_000,
        "9" * 5000 + f"-{a}",
        f"{a}+" * 1000 + f"{a}",
        "(" * 90 + str(target) + ")" * 90,
    ]
    signs = "+-*/() 0123456789=." + string.ascii_letters
    while len(found) < 1000:
        kind = draw.randrange(4)
        if kind == 0:  # numbers that are not there, or there once too often
            one, two = draw.choice(numbers), draw.randint(21, 99)
            found.append(f"{one}{draw.choice('+-*/')}{one}{draw.choice('+-')}{two}")
        elif kind == 3:  # the right expression, with something that spoils it
            right = f"{a}+{b}+{c}={target}"
            place = draw.randrange(len(right) + 1)
            found.append(right[:place] + draw.choice("\u0660\u00bd\u2212\uff0b\t\n;$_^!'\\x") + right[place:])
        elif kind == 1:
            found.append("".join(draw.choice(signs) for _ in range(draw.randint(1, 30))))
        else:
            found.append("".join(chr(draw.randint(0x80, 0xFFFF)) for _ in range(draw.randint(1, 10))))
    return found


def test_a_thousand_wrong_answers_are_wrong():
    numbers, target = (7, 18, 19), 44
    assert verify(numbers, target, "7+18+19") == 1.0
    assert not [answer[:80] for answer in wrong_answers(numbers, target) if verify(numbers, target, answer)]


def test_problems_come_from_a_file(tmp_path: Path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"q": f"{n}+1?", "a": f"so it is #### {n + 1}"}) + "\n" for n in range(3)))
    backend = problem_backend(sums=ProblemFile(str(path), prompt="q", answer="a"))
    physics = backend.make_physics(TaskSpec("problems/sums", reward="sparse", options={"tokenizer": TOKENIZER}))
    assert physics.reset(EpisodeSpec(4)).instruction == "1+1?"
    assert physics.step(tokens("2")).success[-1]


def test_white_space_inside_the_tags_is_blanks():
    for answer in ("\n5+\n17 -\t11\n", "\r\n11 = 11\r\n", "\t(11)\n=\n11"):
        assert verify((5, 17, 11), 11, f"So:\n<answer>{answer}</answer>\n") == 1.0
    for answer in ("1\n1", "11\n5", "11 =\n1\n1", "1\u2028 1", "11\x1c"):
        assert verify((5, 17, 11), 11, f"<answer>{answer}</answer>") == 0.0


def test_a_verifier_that_hangs_or_fails_is_named_and_makes_the_reward_nan(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("embodied_language.text.verifying.VerifierProcess.__init__.__defaults__", (5.0,))
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "one?", "answer": "1"}\n')
    backend = problem_backend(one=ProblemFile(str(path), verifier=f"{OWN}:hangs"))
    physics = backend.make_physics(TaskSpec("problems/one", reward="sparse", options={"tokenizer": TOKENIZER}))
    here = rf"{re.escape(verifiers.__file__)}, line \d+\) \(on row 1 of {re.escape(str(path))}\)"
    for answer, said in (("9", "did not end within 5 s"), ("8", f"ValueError: no eights \\({here}"), ("7", "gave 7.0")):
        physics.reset(EpisodeSpec(0))
        result = physics.step(tokens(answer))
        assert np.isnan(result.reward[-1]) and not physics.reset(EpisodeSpec(0)).fault
        assert re.search(f"the verifier {OWN}:hangs .*{said}.*the answer was '{answer}'", result.fault)
    physics.reset(EpisodeSpec(0))
    assert physics.step(tokens("1")).success[-1]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (TaskSpec("text/countdown_3"), "set env.options.tokenizer to the folder"),
        (TaskSpec("text/countdown_3", options={"tokenizer": "nowhere"}), "nowhere has no tokenizer.json"),
        (TaskSpec("text/countdown_3", options={"tokenizer": TOKENIZER}, cameras=1), "is text and has no cameras"),
        (replace(SPEC, max_episode_steps=0), "max_episode_steps"),
        (TaskSpec("text/countdown_9", options={"tokenizer": TOKENIZER}), "did you mean text/countdown_"),
        (TaskSpec("tabletop/reach", options={"tokenizer": TOKENIZER}), "tabletop/reach has no option 'tokenizer'"),
    ],
)
def test_what_cannot_be_is_refused(spec: TaskSpec, message: str):
    with pytest.raises(FarmError, match=message):
        make_physics(spec)


RETURNS = [
    (
        "gives_a_dict",
        r"gives_a_dict gave a dict \({'score'.*: write `return result\['score'\]`.*the expected answer of row",
    ),
    ("gives_a_tuple", r"gives_a_tuple gave a tuple \(.*: write `return result\[0\]`"),
    ("gives_none", "gives_none gave None, .*: write `return 0.0` where the answer is wrong"),
    ("gives_none_for_a_wrong_answer", "gave None.* with the empty text as the answer to row 1"),
    ("gives_a_coroutine", "gave a coroutine.* write `def` in place of `async def`"),
    (
        "of_verl",
        r"of_verl takes \(data_source: .*, and a verifier takes \(answer, expected\): write .*return of_verl\(",
    ),
    ("Verifying", "Verifying is a class; name an instance of it"),
]


def test_a_verifier_that_finds_no_expected_answer_right_is_said(tmp_path: Path, caplog):
    path = tmp_path / "programs.jsonl"
    rows = [{"prompt": "x", "answer": "[[1, 2]]"}] * 20
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    stated(ProblemFile(str(path), verifier=f"{OWN}:runs_a_program"))
    (said,) = caplog.messages
    assert "expected answer of row 1 of" in said and "those of 7 more rows. If" in said and "arguments swapped" in said
    # One that is right is enough.
    rows[-3] = {"prompt": "x", "answer": "lambda n: n + 1"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    caplog.clear()
    stated(ProblemFile(str(path), verifier=f"{OWN}:runs_a_program", answer_tokens=9))
    assert not caplog.messages


def test_an_array_of_one_number_is_a_score(tmp_path: Path):
    path = tmp_path / "one.jsonl"
    path.write_text('{"prompt": "x", "answer": "1"}\n')
    (problem,) = stated(ProblemFile(str(path), verifier=f"{OWN}:gives_an_array"))
    assert (problem.verify("1"), problem.verify("2")) == (1.0, 0.0)


@pytest.mark.parametrize(
    ("written", "said", "right"),
    [
        ("0.00001", "0.00001", True),
        ("1e22", "1" + 22 * "0", True),
        ("-0.0", "0", True),
        ("9007199254740994.0", "9007199254740994", True),
        ('"1,072"', "1072", True),
        ("1072", "1,072", True),
        ("1072", "10,72", False),
        ('"1,072 apples"', "1072 apples", False),
        ('"72"', "72.0", False),
    ],
)
def test_exact_compares_numbers_in_plain_decimals(tmp_path: Path, written: str, said: str, right: bool):
    path = tmp_path / "one.jsonl"
    path.write_text(f'{{"prompt": "x", "answer": {written}}}\n')
    assert stated(ProblemFile(str(path)))[0].verify(said) == float(right)


@pytest.mark.parametrize(
    ("text", "file", "message"),
    [
        ("", {}, "has no problems"),
        ('{"prompt": "x"}\n', {}, "row 1: no column 'answer'; it has prompt"),
        ("{", {}, "cannot be read: line 1 is no JSON"),
        ('{"prompt": "x", "answer": "1"}\n', {"answer_tokens": 0}, "answer_tokens of a text task is at least 1, got 0"),
        ('{"prompt": "x", "answer": "1"}\n', {"verifier": "exactly"}, "a verifier is exact, math, or a function"),
        ('{"prompt": "x", "answer": "1"}\n', {"verifier": "nowhere:f"}, "the verifier nowhere:f cannot be imported"),
        ('{"prompt": "x", "answer": "1"}\n', {"verifier": f"{OWN}:NUMBER"}, "is a int, not a function"),
        ('{"prompt": "x", "answer": "8"}\n', {"verifier": f"{OWN}:hangs"}, "no eights .*expected answer of row 1"),
        ('{"prompt": "x", "answer": "1"}\n', {"instruction": "Hm."}, "has {prompt} where the problem stands"),
        ('["x", "1"]\n', {}, "row 1: a list .* is no object with columns"),
        ('\n\n{"prompt": null, "answer": "1"}\n', {}, r"row 1 \(line 3\): the statement is null"),
        ('{"prompt": "x", "answer": null}\n', {}, "row 1: the answer is null"),
        ('{"prompt": "x", "answer": NaN}\n', {}, "row 1: the answer is null"),
        ('{"prompt": " ", "answer": "1"}\n', {}, "row 1: the statement is empty"),
        ('{"prompt": "x", "answer": "so ####"}\n', {}, "row 1: the answer is empty"),
        ('{"prompt": "x", "answer": true}\n', {}, "row 1: the answer is True: write it as the text that is meant"),
        ('{"prompt": "x", "answer": ["1", "2"]}\n', {}, "row 1: the answer is a list"),
        ('{"prompt": "x", "answer": {"a": 1}}\n', {}, "row 1: the answer is a struct with a: .* COLUMN.a"),
        ('{"prompt": {"a": 1}, "answer": "1"}\n', {}, "row 1: the statement is a struct with a"),
        ('{"prompt": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], "answer": "1"}\n',
         {}, "row 1: the statement has messages of 'user', 'assistant': a problem has one of 'user'"),
        ('{"prompt": [{"role": "user", "content": [{"type": "image"}]}], "answer": "1"}\n', {}, "parts with a text"),
        ('{"prompt": [{"role": "user", "content": "<image> What?"}], "images": [{"path": "a.png"}], "answer": "1"}\n',
         {}, "row 1: the column 'images' is not empty, and a problem is told in words alone"),
        *((json.dumps({"prompt": "x", "answer": "1"}) + "\n", {"verifier": f"{OWN}:{name}"}, message)
          for name, message in RETURNS),
    ],
)  # fmt: skip
def test_files_without_problems_are_refused(tmp_path: Path, text: str, file: dict[str, Any], message: str):
    path = tmp_path / "problems.jsonl"
    path.write_text(text)
    backend = problem_backend(these=ProblemFile(str(path), **file))
    with pytest.raises(FarmError, match=message):
        backend.make_physics(TaskSpec("problems/these", reward="sparse", options={"tokenizer": TOKENIZER}))


USER = [{"role": "user", "content": "How many?"}]
SHAPES = [
    ({"prompt": "How many?", "answer": "72"}, {}),
    ({"prompt": USER, "answer": 72.0}, {}),
    ({"prompt": USER, "answer": 72}, {}),
    ({"prompt": json.dumps(USER), "answer": {"style": "rule", "ground_truth": "72"}}, {}),
    ({"prompt": USER, "answer": json.dumps({"ground_truth": 72})}, {}),
    ({"prompt": USER, "reward_model": {"ground_truth": "72"}}, {"answer": "reward_model.ground_truth"}),
    ({"prompt": USER, "reward_model": json.dumps({"ground_truth": "72"})}, {"answer": "reward_model.ground_truth"}),
    ({"in": {"prompt": USER}, "a.b": "it is #### 72"}, {"prompt": "in.prompt", "answer": "a.b"}),
    ({"prompt": [{"role": "user", "content": [{"type": "text", "text": "How many?"}]}], "answer": "72"}, {}),
    ({"prompt": USER, "completion": [{"role": "assistant", "content": "72"}]}, {"answer": "completion"}),
]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
@pytest.mark.parametrize(("row", "columns"), SHAPES)
def test_statements_and_answers_come_in_the_shapes_of_datasets(tmp_path: Path, row: dict, columns: dict, suffix: str):
    path = tmp_path / f"file.{suffix}"
    if suffix == "jsonl":
        path.write_text(json.dumps(row) + "\n")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.Table.from_pylist([row]), path)
    problem = stated(ProblemFile(str(path), **columns))[0]
    assert problem.text == "How many?" and problem.verify("72") == 1.0 and problem.place == f"row 1 of {path}"


def stated(file: ProblemFile) -> list[Problem]:
    """Every problem of the file, in order."""
    task = _task(file)
    assert task.files is not None
    return [task.problem(seed) for seed in range(len(task.files.instructions))]


def test_a_system_message_comes_before_the_user_s(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_text(json.dumps({"prompt": [{"role": "system", "content": "Be short."}, *USER], "answer": "72"}))
    assert stated(ProblemFile(str(path)))[0].text == "Be short.\n\nHow many?"


def test_braces_of_an_instruction_stay(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "{0} or {prompt}?", "answer": "1"}')
    file = ProblemFile(str(path), instruction="{prompt} Answer in \\boxed{}, {as} {{here}}.")
    assert stated(file)[0].text == "{0} or {prompt}? Answer in \\boxed{}, {as} {{here}}."


def test_lines_end_with_line_feeds_alone(tmp_path: Path):
    """Other separators of Unicode are part of a text; a byte order mark, CRLF and empty lines are none of a problem."""
    path = tmp_path / "file.jsonl"
    texts = ["Say\u2028what\u0085follows.", "two\u2029\x0c", "three"]
    lines = [json.dumps({"prompt": text, "answer": "1"}, ensure_ascii=False) for text in texts]
    path.write_bytes(("\ufeff" + "\r\n\r\n".join(lines) + "\n").encode())
    assert [problem.text for problem in stated(ProblemFile(str(path)))] == texts


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_a_number_of_few_bits_is_the_one_that_was_written(tmp_path: Path, precision: str):
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = tmp_path / "file.parquet"
    answers = pa.array(np.array([0.1, 3.0], precision))
    inner = pa.StructArray.from_arrays([answers, pa.array(["x", None])], ["ground_truth", "style"])
    pq.write_table(pa.table({"prompt": ["a", "b"], "answer": answers, "reward_model": inner}), path)
    for name in ("answer", "reward_model", "reward_model.ground_truth"):
        one, other = stated(ProblemFile(str(path), answer=name))
        assert one.verify("0.1") == other.verify("3") == 1.0


def test_another_file_of_a_backend_is_not_read(tmp_path: Path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}')
    backend = problem_backend(good=ProblemFile(str(path)), bad=ProblemFile(str(tmp_path / "nowhere.jsonl")))
    assert backend.tasks() == ["good", "bad"]
    assert backend.make_physics(
        TaskSpec("problems/good", reward="sparse", options={"tokenizer": TOKENIZER})
    ).info.digest
    with pytest.raises(FarmError, match=r"the problems of .*nowhere\.jsonl cannot be read"):
        backend.make_physics(TaskSpec("problems/bad", reward="sparse", options={"tokenizer": TOKENIZER}))
