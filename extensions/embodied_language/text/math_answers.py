r"""The verifier `math`: whether an answer equals the expected expression, by the package math-verify.

The expected answer is one expression as MATH's and MATH-500's `answer` column has it: LaTeX without dollars
(`3\sqrt{13}`), a plain number, or words; or a solution with it in its last `\boxed{...}` or behind `####`. Of the
policy's answer the final expression counts: the last `\boxed{...}`; else what follows the last "answer is" or
"answer:"; else the last formula between dollars; else the whole text, or in prose its last number. A unit after a
number is left out, and so is a percent sign, as in MATH's answers: 50% equals 50 and 1/2.

Both are read as a whole: an expression that math-verify reads in part, or not at all, equals one of the same text
alone. So do capital letters, which are names and no product (AB is not BA). A choice may have what it says behind its
letter (`B. 42`). One value equals no list of values.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
from typing import Any

from sim_farm.contract import FarmError

PACKAGE = "math_verify"
LONGEST = 2000
"""Characters of an expression; a longer one equals none."""
BOX = re.compile(r"\\f?boxe?d?\s*\{")
TAGS = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
ANNOUNCED = re.compile(r"answer(?:\s+is|\s*:)\s*:?", re.IGNORECASE)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\\\[(.+?)\\\]|\$(.+?)\$|\\\((.+?)\\\)", re.DOTALL)
JOINED = re.compile(r"[\s$,;]*(?:\band\b|\bor\b)?[\s$]*")
"""What may stand between two parts of one answer: `\\boxed{1}` and `\\boxed{2}`."""
WORDS = re.compile(r"(?<![\\a-zA-Z])(?!(?:and|or)\b)[a-zA-Z]{2,}[\s,.]+\w")
NUMBER = re.compile(r"(?<![\w.\\{(\[])[-+]?\$?(?:\d[\d,]*\.?\d*|\.\d+)(?:/\d+)?(?:\s*\\?%)?(?![\w\\^/{}()\]]|[.,]\d)")
UNIT = re.compile(
    rf"({NUMBER.pattern})\s+(?!(?:pi|sqrt|times|over|squared|cubed|factorial|half|percent|dozen|or|and|to|hundred|thousand|"
    r"[mbtr]+illion)\b)[a-zA-Z]{2,}"
)
"""A number with the word that it counts."""
OPEN = re.compile(r"(?:\d[\d.,/]*\s*(?:[a-zA-Z%$]+\s+)?(?:and|or|nor|to)|\b(?:than|not|except))\s+$", re.IGNORECASE)
"""Words before a number that make the number a part of the answer: `between 3 and`, `less than`."""
NAMES = r"text|textbf|textit|textrm|textnormal|mathrm|mathbf|mathit|mbox|hbox|operatorname"
LITERAL = re.compile(
    rf"\d\s*:\s*\d|\d_|\b[0-9A-F]{{2,}}_|\\circ\}}?\s*\d|(?<![_^\d])\d+\s+\d|\d\s*'|\\(?:{NAMES})\s*\{{[^{{}}]*\}}\s*\d"
)
"""Times and ratios, numbers in a base, degrees with minutes, `2 hours 3 minutes`: math-verify reads a part of them."""
SAME = (
    (re.compile(r",\\!\s*(?=\d{3})"), ""),
    (re.compile(r"\\[dtc]frac"), r"\\frac"),
    (re.compile(r"\\frac\s+(\d)\s+(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\(?:left|right)(?![a-zA-Z])\.?|\\displaystyle|(?<!\\)\\[!,;: ]|~|\\q?quad"), ""),
    (re.compile(rf"\\(?:{NAMES})\s*\{{\s*:\s*\}}|\\colon(?![a-zA-Z])"), ":"),
    (re.compile(r"\{([,:])\}"), r"\1"),
    (re.compile(r"\\varnothing"), r"\\emptyset"),
    (re.compile(rf",?\s*\\(?:{NAMES})\s*\{{\s*(?:and|or)\s*\}}"), ","),
    (re.compile(r"\\\$|(?<!\d)\$(?=\d)"), ""),
    (re.compile(r"^\s*[a-zA-Z]\s*\\in(?![a-zA-Z])\s*"), ""),
    (re.compile(r"(?<=\d)\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degrees?|\u00b0)\s*(?!\d)"), ""),
)
"""Spellings that mean the same, in order."""
PERCENT = re.compile(rf"(?:\\?%|\\(?:{NAMES})\s*\{{\s*percent(?:age)?\s*\}}|\bpercent(?:age)?)\s*$", re.IGNORECASE)
THOUSANDS = re.compile(r"[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?|[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
CHOICE = re.compile(r"\(([a-z])\)")
"""A letter between brackets, as of multiple choice, in a normalised text."""
LETTER = re.compile(r"[A-J]")
OPTION = re.compile(r"\(?([A-J])\)?\s*(?:[.:]|(?<=\)))\s*(?!.*\b[A-J]\b)\S.*", re.DOTALL)
"""The letter of a choice, and what it says, in which no other letter stands."""
CAPITALS = re.compile(r"[A-Z]{2,}")
GROUP = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")


def check_package() -> None:
    """Raise `FarmError` where math-verify is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise FarmError(
            'the verifier math needs the package math-verify: pip install "math-verify[antlr4_9_3]" (of the ANTLR that '
            "LIBERO's packages have too)"
        )


def math_equal(answer: str, expected: str) -> float:
    """1.0 if the answer's final expression equals the expected one, 0.0 otherwise."""
    gold, of_hundred = _spelled(_boxed(expected) or _bare(expected.rpartition("####")[2]))
    tagged = TAGS.findall(answer)
    answer = (tagged[-1] if tagged else answer).rpartition("####")[2]
    found, found_of_hundred = _spelled(_final(answer))
    if not found or max(len(gold), len(found)) > LONGEST:
        return 0.0
    if _normal(gold) in (_normal(found), _normal(_spelled(_bare(answer))[0])):
        return 1.0
    letter, option = _named(gold).strip("() "), OPTION.fullmatch(_named(found).strip())
    if LETTER.fullmatch(letter) and option:
        return float(option[1] == letter)
    if LITERAL.search(gold) or LITERAL.search(found) or _one_of_several(gold, found) or _one_of_several(found, gold):
        return 0.0
    if CAPITALS.fullmatch(gold) and CAPITALS.fullmatch(found):
        return 0.0
    if _verified(found, gold):
        return 1.0
    if of_hundred == found_of_hundred:
        return 0.0
    parts = (found, gold) if of_hundred else (gold, found)
    return float(_verified(parts[0], rf"\frac{{{parts[1]}}}{{100}}"))


def _verified(found: str, gold: str) -> bool:
    """True if math-verify reads both as a whole and finds them equal."""
    library: Any = importlib.import_module(PACKAGE)
    logging.getLogger(PACKAGE).setLevel(logging.ERROR)  # it warns that nothing limits its time: this process is limited
    latex = [library.LatexExtractionConfig()]
    # Its own time limits use signals of the main thread; this process has a limit of its own.
    read = [
        library.parse(f"${text}$", extraction_config=latex, fallback_mode="no_fallback", parsing_timeout=None)
        for text in (gold, found)
    ]
    return all(read) and bool(library.verify(*read, timeout_seconds=None))


def _final(answer: str) -> str:
    """The final expression of an answer; empty where it has none."""
    if (boxed := _boxed(answer)) is not None:
        return boxed
    answer = answer.replace("\\$", "")
    if answer.count("$") % 2:  # of money
        answer = re.sub(r"\$(?=\s*\.?\d)", "", answer)
    announced = [match.end() for match in ANNOUNCED.finditer(answer)]
    last = answer[announced[-1] :].strip() if announced else answer.strip()
    if formulas := list(FORMULA.finditer(last)):
        return _last_joined([(one.start(), one.end(), _content(one)) for one in formulas], last)
    line = last.splitlines()[0] if announced and last else last
    if counted := UNIT.fullmatch(_bare(line).rpartition("=")[2].strip()):
        return _bare(counted[1])
    numbers = list(NUMBER.finditer(line)) if WORDS.search(line) else []
    if not numbers or (announced and OPEN.search(line[: numbers[-1].start()])):
        return _bare(line)
    return _bare(numbers[-1][0])


def _boxed(text: str) -> str | None:
    """The content of the text's last box, or of several that are joined; None where there is none that ends."""
    boxes = []
    for begin in BOX.finditer(text):
        depth, at = 1, begin.end()
        while at < len(text) and depth:
            escaped = text[at - 1] == "\\" and text[at - 2 : at] != "\\\\"
            depth += 0 if escaped else {"{": 1, "}": -1}.get(text[at], 0)
            at += 1
        if not depth:
            boxes.append((begin.start(), at, text[begin.end() : at - 1]))
    return _last_joined(boxes, text) if boxes else None


def _last_joined(parts: list[tuple[int, int, str]], text: str) -> str:
    """The last of the parts, each (begin, end, content) of the text, with those that are joined to it."""
    joined = [parts[-1]]
    for part in reversed(parts[:-1]):
        if not JOINED.fullmatch(text[part[1] : joined[0][0]]):
            break
        joined.insert(0, part)
    return ",".join(dict.fromkeys(_bare(content) for _, _, content in joined if content.strip()))


def _content(formula: re.Match[str]) -> str:
    return next(group for group in formula.groups() if group is not None)


def _bare(text: str) -> str:
    """The text without dollars, brackets or stars around it, and without a full stop."""
    text = text.strip().strip("*").strip()
    whole = FORMULA.fullmatch(text.rstrip(".,;* "))
    return (_content(whole) if whole else text).strip().rstrip(".,;* ").strip()


def _spelled(text: str) -> tuple[str, bool]:
    """The expression in one spelling, and whether it was a percentage, whose sign is left out: 10 is right for 10%."""
    for pattern, other in SAME:
        text = pattern.sub(other, text)
    number = PERCENT.sub("", text).strip()
    percentage, text = number != text.strip(), number
    return text.replace(",", "").replace(" ", "") if THOUSANDS.fullmatch(text) else text, percentage


def _one_of_several(one: str, several: str) -> bool:
    """True if the first is one value, and the second has a comma outside brackets."""
    outer = several
    while (inner := GROUP.sub("", outer)) != outer:
        outer = inner
    return "," in outer and "," not in one and "\\pm" not in one and "\\mp" not in one


def _named(text: str) -> str:
    """The expression without commands around its words."""
    return re.sub(rf"\\(?:{NAMES})\s*\{{([^{{}}]*)\}}", r"\1", text)


def _normal(text: str) -> str:
    """The expression for a comparison of texts."""
    text = _named(text)
    text = re.sub(r"([_^])\{(\w)\}", r"\1\2", text)
    text = "".join(re.sub(r"(?<=\d)\s+(?=\d)", "|", text).split()).casefold().rstrip(".")
    choice = CHOICE.fullmatch(text)
    return choice[1] if choice else text
