"""`embodied push`: a run's policy, or a dataset, on the Hugging Face hub, with a card and what loads it."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro
from rich import get_console
from rich.markup import escape
from safetensors import SafetensorError

from embodied.errors import UserError
from embodied.hub import Kind, Name
from embodied.run.saved_settings import CONFIG, find_run
from embodied_hub import repository
from embodied_hub.record import CARD, RECORD, files_of

if TYPE_CHECKING:
    from embodied_hub.record import Record

EXAMPLES = (
    ("embodied push RUN ORG/NAME --licence apache-2.0", "the policy in its community's layout, with a card"),
    ("embodied push RUN ORG/NAME --dry-run", "writes what would go up into a folder, without the network"),
    ("embodied push FOLDER ORG/NAME --private", "a dataset"),
)


@dataclass(frozen=True)
class Arguments:
    """Put a run's policy, or a dataset, on the Hugging Face hub: the files as its community's programs load them, a
    card with results, conventions, data, versions and the lines that load it, and a record that identifies it."""

    what: tyro.conf.Positional[str]
    """A run's folder, or its name below --runs-dir. Or the folder of a dataset."""
    name: tyro.conf.Positional[str]
    """Repository: `org/name`. It is made if there is none."""
    checkpoint: Path | None = None
    """Folder of a checkpoint. None: the run's best, else its newest."""
    licence: str | None = None
    """The hub's name of the licence, for example apache-2.0. None: the card says that none is stated."""
    private: bool = False
    """A new repository is readable by its organisation alone."""
    revision: str | None = None
    """Branch to push to, which is made if there is none. None: main."""
    replace: bool = False
    """Also replace what another run, another dataset or somebody else has put there."""
    dry_run: bool = False
    """Write the folder and list what would go up. No network is used."""
    out: Path | None = None
    """Folder that a dry run writes. It must not exist yet. None: NAME-dry-run in the current folder."""
    runs_dir: Path = Path("runs")
    """Folder of the runs."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Source:
    """The run or dataset that is pushed."""

    kind: Kind
    called: str
    """In words, `run warm`."""
    identity: str
    write: Callable[[Path], str]
    """Writes the folder, and returns a sentence about it."""
    tag: str | None = None


def run(args: Arguments) -> dict[str, Any]:
    name, kind = repository.parsed(args.name)
    name = Name(name.repository, args.revision or name.revision)
    if not args.dry_run:
        repository.check_online()
        repository.check_token()
    source = _source(args, name)
    if kind not in (None, source.kind):
        raise UserError(f"{source.called} is a {source.kind}, and {args.name} is the name of a {kind}: type {name}")
    if args.dry_run:
        return _dry_run(source, name, args.out or Path(f"{name.repository.partition('/')[2]}-dry-run"))
    if not args.replace:
        _refuse_another(source, name)
    if args.private:
        _refuse_public(source, name)
    with (
        _writing("a temporary folder", "set TMPDIR to a folder with room for what goes up"),
        tempfile.TemporaryDirectory(prefix="embodied-push-") as folder_name,
    ):
        folder = Path(folder_name)
        said = source.write(folder)
        commit = repository.upload(
            folder, name, source.kind, private=args.private, message=f"embodied push: {source.called}", tag=source.tag
        )
        files = _sizes(folder)
    _show(
        f"[bold]{repository.address(name, source.kind)}[/]: {escape(said)}; commit {commit[:12]}, {_total(files)}",
        f"embodied pull {repository.typed(name, source.kind)}",
    )
    return _result(source, name, files) | {"commit": commit, "url": repository.address(name, source.kind)}


def _source(args: Arguments, name: Name) -> Source:
    """The run or dataset that is named."""
    from embodied_hub import dataset_folder, policy_folder

    folder, run_dir = Path(args.what), find_run(args.what, args.runs_dir)
    if run_dir is not None:

        def write(target: Path) -> str:
            done = policy_folder.write(run_dir, args.checkpoint, name, args.licence, target)
            what = f"the adapter of {done.base}" if done.is_adapter else "the whole policy"
            by = done.loaded.program or "this project alone"
            return f"{done.policy.kind} of {done.checkpoint}, {what}, loaded by {by}"

        return Source("model", f"run {run_dir.resolve().name}", policy_folder.identity_of(run_dir), write)
    if dataset_folder.is_dataset(folder):
        from embodied.demonstrations import Dataset

        dataset = Dataset(folder)

        def link(target: Path) -> str:
            dataset_folder.write(folder, name, args.licence, target)
            return f"{len(dataset.episodes)} episodes, {len(dataset)} env steps"

        called, identity = f"dataset {folder.resolve().name}", dataset_folder.identity_of(dataset)
        return Source("dataset", called, identity, link, tag=dataset_folder.tag_of(dataset))
    raise UserError(
        f"{args.what} is neither a run (no {args.what}/{CONFIG}, no {args.runs_dir / args.what}/{CONFIG}) nor a "
        f"dataset (no {folder / 'meta/info.json'})"
    )


def _refuse_another(source: Source, name: Name) -> None:
    """Raise `UserError` where the repository holds something else than an earlier push of the same."""
    found = repository.find(name, source.kind)
    if found is None or found.is_empty:
        return
    record = found.record()
    if record is not None and record.identity == source.identity:
        return
    holds = f"{len(found.files)} files that no `embodied push` has written" if record is None else _called(record)
    raise UserError(
        f"{repository.address(name, source.kind)} holds {holds}, and {source.called} is another: choose another name, "
        "another --revision, or put it in the place of what is there with --replace"
    )


def _refuse_public(source: Source, name: Name) -> None:
    """Raise `UserError` where the repository exists and everybody reads it."""
    found = repository.find(Name(name.repository, None), source.kind)
    if found is not None and not found.private:
        raise UserError(
            f"{repository.address(name, source.kind)} is public, and --private makes new repositories private alone: "
            "make it private in its settings on the hub, or choose another name"
        )


def _called(record: Record) -> str:
    what = "the dataset" if record.kind == "dataset" else "the run"
    return f"{what} {record.name} ({record.identity[:12]})"


def _dry_run(source: Source, name: Name, out: Path) -> dict[str, Any]:
    if out.exists():
        raise UserError(f"{out} exists: name another folder with --out")
    with (
        _writing(str(out), "name another folder with --out"),
        _new_folder(out.with_name(f".{out.name}.partial")) as folder,
    ):
        said = source.write(folder)
        for path in folder.rglob("*"):
            if path.is_symlink():  # of a dataset: what a reader of the folder wants is the file
                target = path.resolve()
                path.unlink()
                shutil.copyfile(target, path)
        folder.rename(out)
    files = _sizes(out)
    _show(
        *(f"{size:>12,}  {escape(file)}" for file, size in files.items()),
        f"[bold]{escape(str(out))}[/]: {escape(said)}; {_total(files)} would go to "
        f"{repository.address(name, source.kind)}",
    )
    return _result(source, name, files) | {"folder": str(out)}


def _show(*lines: str) -> None:
    get_console().print("\n".join(lines), highlight=False, soft_wrap=True)


def _result(source: Source, name: Name, files: dict[str, int]) -> dict[str, Any]:
    return {"repository": str(name), "kind": source.kind, "identity": source.identity, "files": files}


def _sizes(folder: Path) -> dict[str, int]:
    files = {file: path.stat().st_size for file, path in files_of(folder).items()}
    first = {file: files[file] for file in (CARD, RECORD)}
    return first | files


def _total(files: dict[str, int]) -> str:
    return f"{len(files)} files, {sum(files.values()) / 1e6:,.1f} MB"


@contextmanager
def _writing(place: str, advice: str) -> Iterator[None]:
    """Raise as `UserError` that a place takes no files; safetensors has an error of its own for a full disc."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UserError(f"{place} cannot be written ({reason}): {advice}") from error


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which is gone at the end unless it was renamed."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
