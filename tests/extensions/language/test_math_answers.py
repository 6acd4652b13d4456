"""The verifier `math`: expected answers as MATH has them, and the ways in which a model says its answer."""

from __future__ import annotations

import importlib.util
import json

import pytest

from embodied_language.text.math_answers import _final, math_equal
from embodied_language.text.problem_files import ProblemFile, _task
from sim_farm.contract import FarmError

INSTALLED = importlib.util.find_spec("math_verify") is not None
needs_package = pytest.mark.skipif(not INSTALLED, reason='pip install "math-verify[antlr4_9_3]"')

SAID = [
    "%s",
    "$%s$",
    "\\boxed{%s}",
    "We add.\n\\[ \\boxed{%s} \\] as wanted.",
    "First $x$ is 7. The answer is $%s$.",
    "So it is \\(%s\\).",
    "<answer>%s</answer>",
]
"""Ways to say an answer."""

SAME_TEXT = [
    (r"3\sqrt{13}", r"3 \sqrt{13}"),
    (r"\text{Evelyn}", "Evelyn"),
    (r"\text{June 20}", "June 20"),
    (r"\text{(C)}", "C"),
    ("C", r"\textbf{(C)}"),
    ("2516_8", "2516_{8}"),
    ("6:30", r"6\text{:}30"),
    ("6:30", "6{:}30"),
    (r"90^\circ", "90"),
    ("90", r"90^{\circ}"),
    (r"\$18.90", "18.90"),
    (r"1,\!000", "1000"),
    (r"11,\! 111,\! 100", "11111100"),
    ("1000", "1{,}000"),
    ("[-2,7]", r"\left[-2, 7\right]"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"10\%", "10"),
    (r"36^\circ 15'", r"36^\circ 15'"),
    (r"0.\overline{3}", r"0.\overline{3}"),
    (r"\emptyset", r"\varnothing"),
]
"""Expected and right answers that are one text in several spellings: these need no package."""

EQUAL = [
    (r"\frac{14}{3}", "14/3"),
    (r"\frac43", r"\dfrac{4}{3}"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)"),
    ("p - q", "-q+p"),
    (r"11\sqrt2", r"11\sqrt{2}"),
    ("x^2 + 7x + 10", "(x+2)(x+5)"),
    (r"\$18.90", r"18.9 \text{ dollars}"),
    (r"10\%", "0.1"),
    ("1,2,3", r"3, 1, \text{ and } 2"),
    (r"1 \pm \sqrt{19}", r"1-\sqrt{19}, 1+\sqrt{19}"),
    (r"864 \mbox{ inches}^2", "864"),
    (r"\begin{pmatrix} -1/3 \\ 2 \end{pmatrix}", r"\begin{bmatrix}-\frac13\\2\end{bmatrix}"),
    (r"3\frac{1}{2}", "3.5"),
    ("6 - 5i", "-5i+6"),
    (r"(-\infty, 2) \cup (3,\infty)", r"(-\infty,2)\cup(3,\infty)"),
    ("y = 2x+3", "2x+3"),
    ("5", "x=5"),
]
"""The same, which math-verify computes."""

WRONG = [
    (r"3\sqrt{13}", "3"),
    ("3", r"3\sqrt{13}"),
    (r"11\sqrt2", "11"),
    ("x^2 + 7x + 10", "10"),
    (r"\left( 3, \frac{\pi}{2} \right)", "3"),
    ("2k+2", "2"),
    (r"\frac{3}{4}\pi", r"\frac{3}{4}"),
    ("2516_8", "2516_7"),
    ("2516_8", "2516"),
    ("6:30", "6"),
    ("6:30", "1/5"),
    ("3:1", "3"),
    ("1,2,3", "3"),
    ("[-2,7]", "(-2,7)"),
    ("(2,1)", "(1,2)"),
    (r"1 \pm \sqrt{19}", r"1 + \sqrt{19}"),
    (r"\text{(C)}", "D"),
    (r"1,\!000", "1"),
    (r"36^\circ 15'", "51"),
    (r"2 \text{ hours and } 3 \text{ minutes}", "2"),
    ("x<3", "3"),
    (r"10\%", "100"),
    (r"3 \foo{13}", "3"),
    (r"0.\overline{3}", "0"),
    ("12", "1 2"),
]
"""Wrong answers, with what of them, or of the expected one, a partial reading would take."""


@pytest.mark.parametrize("said", SAID)
def test_spellings_of_one_text_are_equal_without_the_package(said: str):
    assert [(gold, answer) for gold, answer in SAME_TEXT if math_equal(said % answer, gold) != 1.0] == []


@needs_package
@pytest.mark.parametrize("said", SAID)
def test_a_right_answer_counts_and_a_part_of_one_does_not(said: str):
    assert [(gold, answer) for gold, answer in EQUAL if math_equal(said % answer, gold) != 1.0] == []
    assert [(gold, answer) for gold, answer in WRONG if math_equal(said % answer, gold) != 0.0] == []


@pytest.mark.parametrize("form", ["$%s$", "$$%s$$", "\\boxed{%s}", "We find $7$, so it is $\\boxed{%s}$."])
def test_an_expected_answer_may_stand_in_dollars_or_a_box(form: str):
    assert math_equal("\\boxed{\\frac{14}{3}}", form % "\\frac{14}{3}") == 1.0


@pytest.mark.parametrize(
    ("text", "final"),
    [
        ("So we get 12 apples.", "12"),
        ("It costs $12.", "12"),
        ("She makes 9 * 2 = $18 every day.", "18"),
        ("There are 1,234 of them", "1,234"),
        ("The answer is **12**.", "12"),
        ("**Answer:** 12", "12"),
        ("Final answer: 3\\sqrt{13}", "3\\sqrt{13}"),
        ("$x=1$ and $x=2$", "x=1,x=2"),
        ("\\boxed{1} and \\boxed{2}", "1,2"),
        ("\\boxed{1} is wrong, it is \\boxed{2}", "2"),
        ("\\boxed{}\\boxed{12}", "12"),
        ("\\boxed{\\frac{1}{\\boxed{2}}", "2"),
        ("", ""),
        ("the length is 3\\sqrt{13} and more", "the length is 3\\sqrt{13} and more"),
    ],
)
def test_the_final_expression_of_an_answer(text: str, final: str):
    assert _final(text) == final


@needs_package
@pytest.mark.parametrize(
    ("answer", "expected", "right"),
    [
        ("The answer is 72 clips.", "72", True),
        ("The answer is 3 + 69 = 72 clips.", "72", True),
        ("The answer is the sum of 3 and 69, which is 72.", "72", True),
        ("The answer is 2 pi", "2", False),
        ("The answer is 3 million", "3", False),
        ("answer: between 3 and 72", "72", False),
        ("answer: less than 72", "72", False),
        ("answer: 2 hours and 30 minutes", "30", False),
        (r"\boxed{B. 42}", "B", True),
        (r"\boxed{\textbf{(B) } 42}", r"\text{(B)}", True),
        (r"\boxed{B. 42}", "A", False),
        (r"\boxed{(A) and (B)}", "A", False),
        (r"\boxed{A. or B.}", "A", False),
        (r"\boxed{5, 5}", "5", False),
        (r"\boxed{5}", "5, 5", False),
        (r"\boxed{5} and $\boxed{5}$", "5", True),
        (r"\boxed{x=\pm 2}", "2,-2", True),
        (r"\boxed{AB}", "BA", False),
        (r"\boxed{yx}", "xy", True),
        (r"\boxed{50\%}", "50", True),
        (r"\boxed{72}", "So she has 5 clips.\n#### 72", True),
    ],
)
def test_units_choices_and_lists(answer: str, expected: str, right: bool):
    assert math_equal(answer, expected) == float(right)


@needs_package
def test_a_column_without_answers_is_refused(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text(2 * (json.dumps({"prompt": "1+1?", "answer": "so " + "x" * 3000}) + "\n"))
    with pytest.raises(FarmError, match="the verifier math scores .* of 1 more rows: .* Name the column"):
        _task(ProblemFile(str(path), verifier="math"))


@pytest.mark.skipif(INSTALLED, reason="math-verify is installed")
def test_without_the_package_a_file_is_refused(tmp_path):
    path = tmp_path / "file.jsonl"
    path.write_text('{"prompt": "1+1?", "answer": "2"}')
    with pytest.raises(FarmError, match='the verifier math needs the package math-verify: pip install "math-verify'):
        _task(ProblemFile(str(path), verifier="math"))
