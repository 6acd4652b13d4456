"""`embodied pull`: a policy or a dataset from the Hugging Face hub, verified, with the command that uses it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro
from rich import get_console
from rich.markup import escape

from embodied.errors import UserError
from embodied.files import read_json
from embodied_hub import repository
from embodied_hub.record import CARD, RECORD, USE, Record, digest, files_of
from embodied_hub.repository import Repository

EXAMPLES = (
    ("embodied pull ORG/NAME --out FOLDER", "a policy or a dataset, its digests compared, and how it is used"),
    ("embodied pull datasets/ORG/NAME", "the dataset of that name, into the cache"),
)


@dataclass(frozen=True)
class Arguments:
    """Fetch a policy or a dataset from the Hugging Face hub, compare sizes and digests, and print what it is and the
    command that uses it. Of a policy only what is read as data is fetched: no pickle and no code."""

    name: tyro.conf.Positional[str]
    """`org/name` or `org/name@revision`; `datasets/org/name` where a policy has the same name."""
    out: Path | None = None
    """Folder to write. It must not exist yet. None: the files stay in the hub's cache (HF_HOME)."""
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    name, kind = repository.parsed(args.name)
    if args.out is not None and args.out.exists():
        raise UserError(f"{args.out} exists: name another folder with --out")
    repository.check_online()
    found = repository.find(name, kind)
    if found is None:
        revision = f" with a revision {name.revision}" if name.revision else ""
        raise UserError(
            f"there is no {kind or 'policy or dataset'} {name.repository}{revision} at "
            f"{repository.address(name, kind or 'model').removesuffix('/' + name.repository)}, or it is private: check "
            "the name, or run `hf auth login`"
        )
    folder = found.download()
    record = _verified(found, folder)
    if args.out is not None:
        _copy(found, folder, args.out)
        folder = args.out
    listed = sorted(found.files.keys() - {repository.ATTRIBUTES})
    absent = [file for file in listed if not (found.takes(file) and (folder / file).is_file())]
    count = len(listed) - len(absent)
    place = str(folder) if args.out is not None else str(found.pinned)
    command = _command(found, record, folder, place)
    lines = [f"[bold]{escape(str(folder))}[/]: {escape(_what(found, record))}; {count} files as the hub lists them"]
    if absent:
        named = escape(", ".join(absent[:8]))
        lines.append(f"not fetched, as nothing here reads them: {named}{' ...' if len(absent) > 8 else ''}")
    if (folder / CARD).is_file():
        lines.append(f"its card: {escape(str(folder / CARD))}")
    get_console().print("\n".join([*lines, escape(command)]), highlight=False, soft_wrap=True)
    return {
        "repository": str(found.pinned), "kind": found.kind, "folder": str(folder), "command": command,
        "record": None if record is None else {"name": record.name, "identity": record.identity}, "not_fetched": absent,
    }  # fmt: skip


def _verified(found: Repository, folder: Path) -> Record | None:
    """The record of the push, if there is one, with which the files agree. Raises `UserError`."""
    record = found.record()
    named = set[str]() if record is None else {*record.files}
    missing = sorted(
        file for file in named if file not in found.files or (found.takes(file) and not (folder / file).is_file())
    )
    if missing:
        raise UserError(
            f"{found.name} lacks {', '.join(missing[:8])}{' ...' if len(missing) > 8 else ''}, which {RECORD} "
            "names: somebody has deleted that since. Pull an earlier commit (org/name@commit), or push it again"
        )
    for file, expected in ({} if record is None else record.files).items():
        path = folder / file
        if path.is_file() and digest(path) != expected:
            raise UserError(
                f"{file} of {found.name} is not the file that was pushed ({RECORD} has another sha256): somebody has "
                "changed it since. Pull an earlier commit (org/name@commit), or fetch it with `hf download`"
            )
    return record


def _copy(found: Repository, source: Path, out: Path) -> None:
    """Copy what is fetched of a repository from its folder in the cache, which is made of links and may hold more."""
    aside = out.with_name(f".{out.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for file, path in files_of(source).items():
            if found.takes(file):
                (aside / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, aside / file)
        aside.rename(out)
    except OSError as error:
        raise UserError(f"{out} cannot be written ({error.strerror}): name another folder with --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _what(found: Repository, record: Record | None) -> str:
    if record is None:
        return f"a {'dataset' if found.kind == 'dataset' else 'checkpoint'} that no `embodied push` has written"
    if record.kind == "dataset":
        return f"the dataset {record.name}, pushed with embodied-farm {record.version}"
    what = "the adapter" if record.kind == "adapter" else "the policy"
    return (
        f"{what} ({record.policy}) of run {record.name}, checkpoint {record.checkpoint}, pushed with embodied-farm "
        f"{record.version}"
    )


def _command(found: Repository, record: Record | None, folder: Path, place: str) -> str:
    """The command that uses it."""
    if found.kind == "dataset":
        return f"embodied sft CONFIG --data {place}"
    if record is None:
        from policies.registry import kinds_that_read

        try:
            kinds = kinds_that_read(read_json(folder / "config.json"))
        except (OSError, ValueError):
            kinds = []
        kind = f" --policy.kind {kinds[0]}" if kinds else ""
        return f"embodied eval CONFIG{kind} --policy.options.checkpoint {place}"
    if record.kind == "adapter":  # the option takes folders alone
        return f"embodied eval {folder / USE} --policy.options.adapter {folder}"
    return f"embodied eval {folder / USE} --policy.options.checkpoint {place}"
