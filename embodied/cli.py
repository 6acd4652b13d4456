"""The command line: `embodied VERB ...`. What it does can also be done from Python, see `embodied/__init__.py`.

Each verb is a module in `embodied/commands/` with the dataclass `Arguments` and the function `run`. Only the verb that
was typed is imported, after its arguments (`embodied/commands/arguments.py`) were parsed and the first checks made:
`--help` and the common mistakes wait for no torch, and `embodied doctor` works where packages are missing. Installed
packages bring further verbs by entry points (docs/extensions.md).

Exit status: 0 done, 1 our own failure (with a traceback), 2 a mistake that the message says how to mend,
130 interrupted.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib
import os
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from embodied.errors import UserError, nearest, one_kind_of_mistake
from embodied.imports import uncollected

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from embodied.config.schema import Config

VERBS = {
    "train": ("train", "CONFIG"),
    "sft": ("sft", "CONFIG"),
    "eval": ("evaluate", "RUN|CONFIG"),
    "record": ("record", "RUN|CONFIG"),
    "serve": ("serve", "RUN|CHECKPOINT|CONFIG"),
    "profile": ("profile", "CONFIG"),
    "plan": ("plan", "CONFIG"),
    "compare": ("compare", "CONFIG"),
    "inspect": ("inspect", "FOLDER|CHECKPOINT"),
    "reward": ("reward", "DATA"),
    "export": ("export", "RUN"),
    "report": ("report", "RUN"),
    "runs": ("runs", ""),
    "watch": ("watch", ""),
    "doctor": ("doctor", ""),
}
"""Verb to its module in `embodied.commands` and what it must be given first."""
ABOUT = "Reinforcement learning for robot policies, with simulators as first-class workers."
ENTRY_POINTS = "embodied_farm.verbs"
"""Group in which packages offer verbs, name to `module:run`. A name of `VERBS` cannot be replaced.

`run(args: Arguments)` does what the verb is for, and returns plain data for `--json`. `Arguments` is a dataclass, or a
union of them for subcommands, that tyro parses, with the field `json: Path | None`. The module's docstring begins with
"`embodied VERB`: what it does", and its `EXAMPLES` are commands with what each does.
"""
OWN = ("runs", "watch")
"""Verbs whose modules have the arguments themselves; those of the others are in `embodied/commands/arguments.py`."""
NAMES_NO_RUN = {"eval": "--folder", "record": "--out", "profile": "--out", "plan": "--out", "inspect": "--out"}
"""Verbs that take every setting and begin no run, whose name `--name` would be, and what says where their result is."""
SPELLED = {("train", "--cluster"): "--runtime.address", ("sft", "--sft.data"): "--data"}
"""Options that a verb does not take, and the one that says the same."""
HELP = ("-h", "--help")
HELP_ALL = "--help-all"
"""The help with every setting."""
POLICY_OPTION, ENV_OPTION = "--policy.options.", "--env.options."


def main(arguments: list[str] | None = None) -> int:
    """Run a command; the exit status. Installed as `embodied`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Ending a run by `kill` should leave as little behind as ending it by Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if not arguments or arguments[0] in HELP:
        print(_help())
        return 0
    if arguments[0] == "--version":
        print(_version())
        return 0
    try:
        return _run(arguments[0], arguments[1:])
    except UserError as error:
        name = "\033[1;31membodied:\033[0m" if sys.stderr.isatty() else "embodied:"
        print(f"{name} {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("embodied: interrupted", file=sys.stderr)
        return 130


def offered() -> dict[str, EntryPoint]:
    """The verbs that installed packages offer, by name."""
    from importlib import metadata

    return {entry.name: entry for entry in metadata.entry_points(group=ENTRY_POINTS) if entry.name not in VERBS}


def _run(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS and verb not in (others := offered()):
        raise UserError(f"there is no `embodied {verb}`{nearest(verb, [*VERBS, *others])}")
    first = VERBS[verb][1] if verb in VERBS else first_of(arguments_of(verb))
    given = bool(arguments) and not arguments[0].startswith("-")
    if first and not given and not {*HELP, HELP_ALL} & set(arguments):
        print(_usage(verb, first), file=sys.stderr)
        return 2
    if verb == "doctor":  # all that is imported below may be what it has to say is missing
        return _module(verb).main(arguments)
    with uncollected():
        args = _parse(verb, arguments_of(verb), arguments[0] if given else "", arguments)
    with one_kind_of_mistake():
        with uncollected():
            # A mistake that names and numbers show is answered before torch is imported, which takes seconds.
            if hasattr(args, "check"):
                args.check()
            if hasattr(args, "settings") and not (verb == "train" and (args.seeds or args.sweep)):  # runs of their own
                _check_settings(verb, args)
            args = _with_options(args, arguments)
            function = function_of(verb)
        with _shown(args):
            result = function(args)
    if getattr(args, "json", None) is not None:
        from embodied.files import write_json

        write_json(args.json, result)
    return 0


def _check_settings(verb: str, args: Any) -> None:
    from embodied.training.checks import LEARNS, Checked, check_settings

    resumed = verb in LEARNS and args.resume == "auto"
    run_dir = args.runs_dir / (args.settings.name or "") if resumed else None
    check_settings(Checked(command=verb, config=args.settings, run_dir=run_dir))


def _shown(args: Any) -> AbstractContextManager[None]:
    """The verb's progress is shown, but for `--quiet`."""
    if not getattr(args, "quiet", False):
        return nullcontext()
    from embodied.reporting.live import quiet

    return quiet()


def arguments_of(verb: str) -> Any:
    """The type of the verb's arguments. Raises `UserError` if a package that they need is missing."""
    if verb not in VERBS:
        return sys.modules[function_of(verb).__module__].Arguments
    if verb in OWN:
        return _module(verb).Arguments
    return getattr(_module(verb, "arguments"), f"{verb.capitalize()}Arguments")


def function_of(verb: str) -> Callable[[Any], Any]:
    """The function that the verb calls with its arguments. Raises as `arguments_of` does."""
    if verb in VERBS:
        return _module(verb).run
    from sim_farm.named_code import entry_point

    return entry_point(ENTRY_POINTS, verb, UserError)


def first_of(kind: Any) -> str:
    """Name of the verb's required first argument: the first field without a default, else nothing."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    required = fields and (fields[0].default, fields[0].default_factory) == (dataclasses.MISSING,) * 2
    return fields[0].name.upper() if required else ""


def _module(verb: str, name: str = "") -> ModuleType:
    """The module of one of `VERBS`, or the one of that name beside it."""
    try:
        return importlib.import_module(f"embodied.commands.{name or VERBS[verb][0]}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"`embodied {verb}` needs the Python package {error.name!r}: pip install 'embodied-farm[all]'; "
            "`embodied doctor` says all that is missing"
        ) from error


def _refuse_former(arguments: list[str]) -> None:
    """Raise `UserError` for an option that is part of another setting now."""
    from embodied.config.schema import JOINED

    options = {argument.partition("=")[0].replace("_", "-") for argument in arguments}
    for former, present in JOINED.items():
        if (option := f"--{former}".replace("_", "-")) in options:
            raise UserError(f"there is no {option} any more: type --{present.replace('_', '-')} in its place")


def _parse(verb: str, kind: Any, named: str, arguments: list[str]) -> Any:
    """The arguments as typed data. Defaults of the settings come from the configuration or run that is named."""
    import tyro

    if verb in NAMES_NO_RUN and _given(arguments, "--name"):
        raise UserError(
            f"--name is the name of a run that begins, and `embodied {verb}` begins none: leave it out; "
            f"{NAMES_NO_RUN[verb]} says where the result is written"
        )
    for (of, option), ours in SPELLED.items():
        if verb == of and any(argument.partition("=")[0] == option for argument in arguments):
            raise UserError(f"`embodied {verb}` has no {option}: type {ours} in its place")
    words, options = arguments, dict[str, Any]()
    typed, typed_env = dict[str, list[str]](), dict[str, list[str]]()
    names = {field.name for field in dataclasses.fields(kind)} if dataclasses.is_dataclass(kind) else set()
    asked_for_all = HELP_ALL in arguments
    arguments = [HELP[-1] if argument == HELP_ALL else argument for argument in arguments]
    if "settings" in names:
        _refuse_former(arguments)
        first = VERBS[verb][1]
        # What comes first names the configuration or run; of `inspect`, which looks at something else, an option does.
        source = named if "CONFIG" in first else _given(arguments, "--config")
        if source:
            settings = _settings(source, arguments, "run" in names, "CHECKPOINT" in first)
            known, arguments = _without_removed(arguments, POLICY_OPTION, settings.policy.options)
            typed, arguments = _typed_options(arguments, POLICY_OPTION)
            policy = settings.policy.model_copy(update={"options": known})
            known, arguments = _without_removed(arguments, ENV_OPTION, settings.env.options)
            typed_env, arguments = _typed_options(arguments, ENV_OPTION)
            env = settings.env.model_copy(update={"options": known})
            options["default"] = kind(named, settings=settings.model_copy(update={"policy": policy, "env": env}))
        else:
            options["default"] = kind(named)
    try:
        if "settings" in names and set(HELP) & set(arguments) and not asked_for_all:
            from embodied.commands.short_help import show_help

            show_help(verb, kind, options["default"].settings)
            raise SystemExit(0)
        if "settings" in names:
            from embodied.commands.arguments import unchecked_sections

            options["registry"] = unchecked_sections()
        args = tyro.cli(
            kind, args=arguments, prog=f"embodied {verb}", config=(tyro.conf.HelptextFromCommentsOff,), **options
        )
    except BrokenPipeError:
        # The reader of the help, `head` for example, has ended. What is still buffered has no reader either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    if "settings" not in names:
        return args
    from embodied.config.files import checked
    from embodied.config.options import guessed
    from embodied.workflows.unread import changed_settings, check_read

    settings = _with_policy_options(checked(args.settings, "on the command line"), typed, guessed(typed))
    if typed_env:
        env = settings.env.model_copy(update={"options": settings.env.options | guessed(typed_env)})
        settings = settings.model_copy(update={"env": env})
    check_read(verb, changed_settings(options["default"].settings, settings))
    args = dataclasses.replace(args, settings=settings)
    return args.typed(words) if hasattr(args, "typed") else args


def _without_removed(arguments: list[str], option: str, known: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The configuration's options but for those that `--policy.options.NAME=` (`option`) takes away, and the other
    arguments.

    One that the configuration does not name is taken away already. Raises `UserError` where that is a slip."""
    removed = [argument for argument in arguments if _removes(argument, option)]
    names = [argument[len(option) : -1].replace("-", "_") for argument in removed]
    for name in names:
        slip = name not in known and difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if slip:
            raise UserError(f"{option}{name}= removes an option that is not there; did you mean {option}{slip[0]}=?")
    kept = {name: value for name, value in known.items() if name not in names}
    return kept, [argument for argument in arguments if argument not in removed]


def _removes(argument: str, option: str) -> bool:
    """True for `--policy.options.NAME=`, where `option` is the part before the name."""
    return argument.startswith(option) and argument.endswith("=") and argument.count("=") == 1


def _typed_options(arguments: list[str], option: str) -> tuple[dict[str, list[str]], list[str]]:
    """The words of each option that is typed after `option`, `--policy.options.`, and the other arguments."""
    rest: list[str] = []
    values = rest
    found: dict[str, list[str]] = {}
    for argument in arguments:
        key, equals, value = argument.partition("=")
        if _removes(argument, option):
            values = rest
        elif not argument.startswith("--"):
            values.append(argument)
        elif key.startswith(option):
            values = found.setdefault(key.removeprefix(option).replace("-", "_"), [])
            values += [value] if equals else []
        else:
            values = rest
            values.append(argument)
    return found, rest


def _with_options(args: Any, arguments: list[str]) -> Any:
    """The arguments with the typed options of the policy as its kind declares them, which has to be imported."""
    from embodied.config.options import as_declared

    typed, _ = _typed_options(arguments, POLICY_OPTION)
    if not typed:
        return args
    from policies.registry import policy_kind, types_of

    options = as_declared(typed, types_of(policy_kind(args.settings.policy.kind)))
    return dataclasses.replace(args, settings=_with_policy_options(args.settings, typed, options))


def _with_policy_options(config: Config, typed: Collection[str], options: dict[str, Any]) -> Config:
    """The configuration with these options of the policy, and those of the configuration that were not typed."""
    own = {name: value for name, value in config.policy.options.items() if name not in typed}
    policy = config.policy.model_copy(update={"options": own | options})
    return config.model_copy(update={"policy": policy})


def _settings(named: str, arguments: list[str], may_be_a_run: bool, may_be_a_checkpoint: bool) -> Config:
    from embodied.config.schema import KEYS, typed_code

    code = [typed_code(word) for key in KEYS for word in _words(arguments, key)]
    if may_be_a_run:
        from embodied.run.saved_settings import run_of_checkpoint, settings_of

        if may_be_a_checkpoint and (folder := run_of_checkpoint(Path(named))) is not None:
            named = str(folder)
        return settings_of(named, _option(arguments, "--runs-dir", "runs"), code)
    from embodied.config.files import load_config

    return load_config(named, code)


def _option(arguments: list[str], name: str, default: str) -> Path:
    """The value of an option that is needed before the others can be parsed."""
    return Path(_given(arguments, name) or default)


def _given(arguments: list[str], name: str) -> str:
    """The value of an option as it was typed; nothing where it was not."""
    for i, argument in enumerate(arguments):
        if argument == name and i + 1 < len(arguments):
            return arguments[i + 1]
        if argument.startswith(f"{name}="):
            return argument.partition("=")[2]
    return ""


def _version() -> str:
    from importlib import metadata

    try:
        return f"embodied {metadata.version('embodied-farm')}"
    except metadata.PackageNotFoundError:
        return "embodied, of a source tree that is not installed (pip install -e '.[all]')"


def _words(arguments: list[str], key: str) -> list[str]:
    """The words that were typed after the option of a key; none where it was not."""
    words: list[str] = []
    ours = False
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if argument.startswith("--"):
            ours = name.replace("-", "_") == f"__{key}"
            words += [value] if ours and equals else []
        elif ours:
            words.append(argument)
    return words


def _help() -> str:
    modules = {verb: f"embodied.commands.{name}" for verb, (name, _) in VERBS.items()}
    modules |= {verb: entry.module for verb, entry in offered().items()}
    lines = [f"usage: embodied VERB ...\n\n{ABOUT}\n"]
    lines += [f"  {verb:8} {_about(module)}" for verb, module in modules.items()]
    last = "\n`embodied VERB --help` says what a verb takes, `embodied --version` which version this is."
    return "\n".join([*lines, last])


def _about(module: str) -> str:
    """Description of the module's verb, read from its source: importing all modules would take seconds."""
    try:
        spec = find_spec(module)
    except Exception:  # whatever a package of others raises where it begins: the verb's own message says it
        spec = None
    if spec is None or spec.origin is None:
        return f"cannot be used: the module {module} is not there"
    about = ast.get_docstring(ast.parse(Path(spec.origin).read_text())) or ""
    return about.partition("\n")[0].partition(": ")[2].rstrip(".")


def _usage(verb: str, first: str) -> str:
    options = "[--KEY VALUE ...]" if "CONFIG" in first else "[--OPTION VALUE ...]"
    text = f"usage: embodied {verb} {first} {options}   (`embodied {verb} --help` says which)"
    if "CONFIG" not in first:
        return text
    from embodied.config.files import shipped_configs

    lines = [f"  {name:30} {about}" for name, about in shipped_configs().items()]
    run = "RUN is a run's folder, or its name below --runs-dir. " if "RUN" in first else ""
    return "\n".join([text, "", f"{run}CONFIG is the path of a YAML file, or one of these:", *lines])


if __name__ == "__main__":
    # Ray's workers must find the same modules as this process, whatever the folder it is started from.
    os.environ.setdefault("PYTHONPATH", str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
