"""The record that a push leaves in the repository, `embodied/record.json`: what the files are of, and their digests.

    FOLDER/
      README.md                 the card
      embodied/record.json      this record
      embodied/use.yaml         of a policy: the configuration that evaluates it
      embodied/training.yaml    of a policy: the settings that trained it
      ...                       the policy or the dataset in its community's layout

It lies in a folder of its own, so that an export of a policy that began from this one does not copy it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from embodied.errors import UserError
from embodied.files import read_json

FOLDER = "embodied"
RECORD = f"{FOLDER}/record.json"
USE, TRAINING = f"{FOLDER}/use.yaml", f"{FOLDER}/training.yaml"
CARD = "README.md"
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Line = Annotated[str, Field(pattern=r"^\P{Cc}*$", max_length=255)]
"""Text for a terminal, without its control characters."""


@dataclass(frozen=True)
class Record:
    """The record of a pushed repository: its files and what they were made from."""

    kind: Literal["policy", "adapter", "dataset"]
    name: Line
    """Name of the run or of the dataset's folder."""
    identity: Digest
    """Two records of one run, or of one dataset, have the same."""
    version: Line
    """Version of embodied-farm that pushed it."""
    checkpoint: Line = ""
    """Name of the run's checkpoint."""
    policy: Line = ""
    """The policy's kind."""
    files: Mapping[str, Digest] = field(default_factory=dict)
    """sha256 of each file, by its path, but of this one and the card, which people edit on the hub."""

    def written(self, folder: Path) -> None:
        """Write the record into the folder, whose other files are complete."""
        files = {name: digest(path) for name, path in files_of(folder).items() if name not in (RECORD, CARD)}
        (folder / FOLDER).mkdir(exist_ok=True)
        text = json.dumps({**asdict(self), "files": files}, indent=1)
        (folder / RECORD).write_text(f"{text}\n")


def read_record(path: Path) -> Record:
    """The record in the file. Raises `UserError`."""
    try:
        return TypeAdapter(Record).validate_python(read_json(path))
    except (OSError, ValueError, ValidationError) as error:
        raise UserError(f"{path} is no record of `embodied push`: {str(error).splitlines()[0][:200]}") from error


def files_of(folder: Path) -> dict[str, Path]:
    """The folder's files by their paths in it, but for hidden ones. Links to folders are followed.

    Raises `UserError` for a link that leads nowhere.
    """
    found = list[Path]()
    for name, below, files in os.walk(folder, followlinks=True):
        here = Path(name)
        below[:] = [each for each in below if not each.startswith(".") and not _leads_back(here / each)]
        shown = [here / each for each in files if not each.startswith(".")]
        if lost := [path for path in shown if not path.exists()]:
            raise UserError(
                f"{lost[0]} is a link to a file that is not there ({lost[0].readlink()}): restore the file or remove "
                "the link"
            )
        found += [path for path in shown if path.is_file()]
    return {path.relative_to(folder).as_posix(): path for path in sorted(found)}


def _leads_back(folder: Path) -> bool:
    """True for a link to a folder that the link itself lies in."""
    return folder.parent.resolve().is_relative_to(folder.resolve())


def digest(path: Path) -> str:
    """sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
