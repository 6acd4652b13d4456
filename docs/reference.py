"""Write docs/cli.md, docs/settings.md, docs/metrics.md and docs/modules.md from the command line, the configuration's
schema, the declared metrics and the modules' docstrings.

    python docs/reference.py            (or `make docs`)

A test fails where they are out of date.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import sys
import textwrap
import types
import typing
from pathlib import Path
from typing import Any, Literal

import tyro
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from embodied.cli import VERBS, first_of, function_of, offered
from embodied.commands.short_help import EXAMPLES
from embodied.config.schema import Config
from embodied.metric import Metric
from embodied.training import declared_metrics

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent
PACKAGES = ("embodied", "sim_farm", "policies", "schedulers", "extensions")
NOTE = "<!-- Written by docs/reference.py: change the source, then run `make docs`. -->"
CLI = """
`embodied VERB --help` says the same, with the settings that are changed most; `embodied VERB --help-all` has every one,
and `embodied --version` says which version this is. Verbs that take CONFIG or RUN take every [setting](settings.md) as
an option (`--loss.clip 0.1`), and every verb takes `--json FILE`. CONFIG is a file of `configs/` (`embodied train`
lists them) or the path of one; RUN is a run's folder, or its name below `runs/`.

Options of the policy are given and removed whether or not the configuration names them: `--policy.options.NAME VALUE`
gives one, and `--policy.options.NAME=`, with nothing after the sign, removes it, which leaves the policy's own default.
A value is read as the policy's kind declares it: a text stands as it is typed, without YAML's quotes
(`--policy.options.prompt '{} Be brief.'`), several words are a list, and a number may be `6e-1`, here as in YAML files.

A setting that a verb does not read (`embodied sft CONFIG --optim.ranks 2`) is refused when it is typed, with those that
it reads. In a file it may stand, since a file serves several verbs.

Exit status: 0 done; 1 a failure of ours, with a traceback (of `doctor`: something is missing); 2 a mistake that the
message says how to mend; 130 interrupted.
"""
SETTINGS = """
Every setting with its default. A YAML file says what differs (`loss: {clip: 0.1}`), the command line overrides it
(`--loss.clip 0.1`), and a run saves all of them in `config.yaml`.
"""
MODULES = """
Every module with the first sentence of its docstring. [Architecture](architecture.md) says how they work together, and
[which file to change](architecture.md#which-file-to-change).
"""
POSITIONAL = typing.get_args(tyro.conf.Positional[int])[1]
"""Mark of an argument that is typed without its name."""
METRICS = """
A run's numbers, under one name in its record and in the [libraries that follow it](tracking.md). A name with `<…>` is a
family with a metric for each.
"""


def cli_page() -> str:
    """The page of verbs: what each does, examples, and its own options."""
    lines = [f"# The command line\n\n{NOTE}\n{CLI}"]
    for verb in (*VERBS, *offered()):
        module = _module(verb)
        first = VERBS[verb][1] if verb in VERBS else first_of(module.Arguments)
        about = (inspect.getdoc(module) or "").splitlines()[0].partition(": ")[2].rstrip(".")
        lines += [f"## {verb}", "", f"`embodied {verb}{' ' + first if first else ''}`: {about}.", ""]
        examples = EXAMPLES[verb] if verb in VERBS else module.EXAMPLES
        lines += ["| command | does |", "|---|---|"]
        lines += [f"| `{command.replace('|', chr(92) + '|')}` | {does} |" for command, does in examples]
        lines.append("")
        arguments = getattr(module, "Arguments", None)
        for kind in typing.get_args(arguments) or ((arguments,) if arguments else ()):
            kind = typing.get_args(kind)[0] if typing.get_args(kind) else kind
            several = verb == "bench"
            lines += [f"`{verb} {kind.__name__.removeprefix('Bench').lower()}`", ""] if several else []
            lines += [*_options(kind), ""]
    return "\n".join(lines).rstrip() + "\n"


def _module(verb: str) -> types.ModuleType:
    if verb in VERBS:
        return importlib.import_module(f"embodied.commands.{VERBS[verb][0]}")
    return sys.modules[function_of(verb).__module__]


def _options(kind: Any) -> list[str]:
    docs = _attribute_docs(kind)
    hints, marked = typing.get_type_hints(kind), typing.get_type_hints(kind, include_extras=True)
    lines = ["| option | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(kind):
        if field.name in ("settings", "json", "words"):
            continue
        given = field.default is dataclasses.MISSING or field.default is tyro.MISSING
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        positional = required or POSITIONAL in getattr(marked[field.name], "__metadata__", ())
        name = field.name.upper() if positional else "--" + field.name.replace("_", "-")
        default = "required" if given else _shown(field.default)
        meaning = docs.get(field.name, "")
        choices = _choices(hints[field.name])
        lines.append(f"| `{name}` | {default} | {_cell(meaning)}{f' One of {choices}.' if choices else ''} |")
    return lines


def settings_page() -> str:
    """The page of settings: every key of the schema with its default and its meaning."""
    lines = [f"# Settings\n\n{NOTE}\n{SETTINGS}"]
    sections = [(name, field) for name, field in Config.model_fields.items() if _section(field) is not None]
    lines += ["## The run", "", *_settings("", Config), ""]
    for name, field in sections:
        model = _section(field)
        assert model is not None
        own = inspect.getdoc(model) if model.__doc__ else None
        lines += [f"## {name}", ""]
        if own and "docstring" not in own and own != inspect.getdoc(BaseModel):
            lines += [_cell(own), ""]
        lines += [*_settings(f"{name}.", model), ""]
    return "\n".join(lines).rstrip() + "\n"


def _settings(prefix: str, model: type[BaseModel]) -> list[str]:
    lines = ["| setting | default | meaning |", "|---|---|---|"]
    for name, field in model.model_fields.items():
        if _section(field) is None:
            choices = _choices(field.annotation)
            more = f" One of {choices}." if choices else ""
            lines.append(f"| `{prefix}{name}` | {_shown(field.default)} | {_cell(field.description or '')}{more} |")
    return lines


def metrics_page() -> str:
    """The page of metrics: every name with its unit and its meaning."""
    lines = [f"# Metrics\n\n{NOTE}\n{METRICS}"]
    sections = (
        ("Every row", "Of `metrics.jsonl` and `selection.jsonl`.", declared_metrics.COUNTS),
        ("Training", "`embodied train`: a row of `metrics.jsonl` for each iteration.", declared_metrics.TRAINING),
        ("Demonstrations", "`embodied sft`: a row every `sft.measure_every` steps.", declared_metrics.IMITATION),
        (
            "Evaluations during training",
            "With `eval.every`: a row of `selection.jsonl` for each.",
            declared_metrics.EVALUATION,
        ),
        (
            "The evaluation at the end",
            "In trackers alone; `eval.json` has it. `final/…` is what `eval/…` is, of other episodes.",
            (),
        ),
    )
    for title, where, metrics in sections:
        lines += [f"## {title}", "", where, "", *_metrics(metrics)]
    return "\n".join(lines).rstrip() + "\n"


def _metrics(metrics: tuple[Metric, ...]) -> list[str]:
    lines = [f"| `{metric.name}` | {metric.unit} | {_cell(metric.meaning)} |" for metric in metrics]
    return ["| metric | unit | meaning |", "|---|---|---|", *lines, ""] if metrics else []


def _section(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _choices(kind: Any) -> str:
    """The values of a literal type, also within a tuple or beside None; empty for a type with other values too."""
    if typing.get_origin(kind) is Literal:
        return ", ".join(f"`{value}`" for value in typing.get_args(kind))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(kind) if member is not type(None)]
        return _choices(members[0]) if len(members) == 1 else ""
    if typing.get_origin(kind) in (tuple, typing.Annotated):
        return next(filter(None, map(_choices, typing.get_args(kind))), "")
    return ""


def _attribute_docs(kind: Any) -> dict[str, str]:
    """The strings under the fields of a class, its bases included."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0].body  # type: ignore[attr-defined]
        for field, after in zip(body, body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
            ):
                found[ast.unparse(field.target)] = inspect.cleandoc(str(after.value.value))
    return found


def _shown(value: Any) -> str:
    if value is None or value == () or value == {}:
        return "none"
    if isinstance(value, (tuple, list)):
        return " ".join(f"`{item}`" for item in value)
    return f"`{value}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def modules_page() -> str:
    """The page of modules: a table for each folder."""
    return f"# Modules\n\n{NOTE}\n{MODULES}" + "\n".join(_modules())


def _modules() -> list[str]:
    """A table for each folder: its modules with the first sentence of their docstrings."""
    lines = list[str]()
    for package in PACKAGES:
        for folder in (ROOT / package, *sorted(path for path in (ROOT / package).rglob("*") if path.is_dir())):
            modules = [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]
            if not modules:
                continue
            name = folder.relative_to(ROOT)
            lines += ["", f"### {name}/", "", _sentence(folder / "__init__.py"), "", "| module | what |", "|---|---|"]
            lines += [f"| [{path.name}](../{name}/{path.name}) | {_cell(_sentence(path))} |" for path in modules]
    return [*lines, ""]


def _sentence(path: Path) -> str:
    """The first sentence of the module's docstring; empty where there is none."""
    text = (ast.get_docstring(ast.parse(path.read_text())) if path.is_file() else "") or ""
    about = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", about)[0]


PAGES = {
    "cli.md": cli_page,
    "settings.md": settings_page,
    "metrics.md": metrics_page,
    "modules.md": modules_page,
}


def main() -> None:
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page())


if __name__ == "__main__":
    main()
