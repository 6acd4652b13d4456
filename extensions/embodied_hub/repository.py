"""A repository of the Hugging Face hub: what it holds, upload, download; failures as messages with the next step."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from embodied.errors import UserError, shown
from embodied.hub import PATTERNS, Kind, Name
from embodied_hub.record import CARD, RECORD, TRAINING, USE, Record, digest, files_of, read_record

MAIN = "main"
ATTRIBUTES = ".gitattributes"
"""The hub's own file in every repository."""
EMPTY = frozenset({ATTRIBUTES, CARD})
"""Files that the hub itself makes in a new repository."""
TAKEN = (CARD, RECORD, USE, TRAINING)
"""Files of a push that are fetched beside those that are read as data (`embodied.hub.PATTERNS`)."""
NOT_WRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""Reasons for which a disc takes no file."""


def parsed(text: str) -> tuple[Name, Kind | None]:
    """The repository that is typed as `org/name`, `org/name@revision`, or with `datasets/` or `models/` before it.
    Raises `UserError`."""
    prefix, _, rest = text.partition("/")
    kinds: Mapping[str, Kind] = {"datasets": "dataset", "models": "model"}
    kind = kinds.get(prefix) if rest.partition("@")[0].count("/") == 1 else None
    name = Name.parse(rest if kind else text)
    if name is None:
        raise UserError(
            f"{shown(text)} is no name of a repository: org/name, where org is your user or organisation on the hub "
            "(embodied push RUN org/name)"
        )
    return name, kind


def typed(name: Name, kind: Kind) -> str:
    """The repository as it is typed and linked to."""
    return f"datasets/{name}" if kind == "dataset" else str(name)


def address(name: Name, kind: Kind) -> str:
    from huggingface_hub.constants import ENDPOINT

    return f"{ENDPOINT}/{typed(Name(name.repository, None), kind)}"


def check_online() -> None:
    """Raise `UserError` where the hub must not be asked."""
    from huggingface_hub.constants import is_offline_mode

    if is_offline_mode():
        raise UserError("HF_HUB_OFFLINE is set, so the hub is not asked: unset it, or look at --dry-run")


def check_token() -> None:
    """Raise `UserError` where nobody is logged in."""
    from huggingface_hub import get_token

    if not get_token():
        raise UserError(
            "the hub accepts files from users alone, and no token is here: run `hf auth login`, or set HF_TOKEN to a "
            "token with write access (https://huggingface.co/settings/tokens)"
        )


@dataclass(frozen=True)
class Listed:
    """A file as the hub lists it."""

    size: int
    sha256: str | None
    """Hash of a large file's contents; None where git keeps the file."""
    blob: str
    """Git's name of the content, of a file that git keeps."""


@dataclass(frozen=True)
class Repository:
    """A repository at a commit."""

    name: Name
    kind: Kind
    commit: str
    private: bool
    files: Mapping[str, Listed]

    @property
    def pinned(self) -> Name:
        return Name(self.name.repository, self.commit)

    @property
    def is_empty(self) -> bool:
        return not self.files.keys() - EMPTY

    def takes(self, file: str) -> bool:
        """True for a file that is fetched."""
        return any(fnmatchcase(file, pattern) for pattern in self._patterns)

    @property
    def _patterns(self) -> tuple[str, ...]:
        return (*PATTERNS[self.kind], *TAKEN)

    def record(self) -> Record | None:
        """The record that a push has left; None without one. Raises `UserError`."""
        from huggingface_hub import hf_hub_download

        if RECORD not in self.files:
            return None
        with _in_words(self.name, self.kind):
            path = hf_hub_download(self.name.repository, RECORD, repo_type=self.kind, revision=self.commit)
        return read_record(Path(path))

    def download(self) -> Path:
        """The folder of its data, card and record in the hub's cache, which may be there already. Raises `UserError`
        where a file is not what the hub lists."""
        from huggingface_hub import snapshot_download

        patterns = list(self._patterns)
        with _in_words(self.name, self.kind):
            folder = Path(
                snapshot_download(
                    self.name.repository, repo_type=self.kind, revision=self.commit, allow_patterns=patterns
                )
            )
        self.verify(folder)
        return folder

    def verify(self, folder: Path) -> list[str]:
        """Names of the repository's files that the folder lacks. Raises `UserError` for one that differs from what the
        hub lists."""
        absent = []
        for file, listed in self.files.items():
            path = folder / file
            if not path.is_file():
                absent.append(file)
                continue
            wrong = path.stat().st_size != listed.size
            wrong = wrong or (digest(path) != listed.sha256 if listed.sha256 else _blob(path) != listed.blob)
            if wrong:
                raise UserError(
                    f"{path} is not the file that the hub lists in {self.name}: delete {folder}, and pull again"
                )
        return absent


def find(name: Name, kind: Kind | None) -> Repository | None:
    """The repository of the name; without a kind that of a model, or else of a dataset. None where there is none, or
    where it has no such revision. Raises `UserError`."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    for each in (kind,) if kind else ("model", "dataset"):
        with _in_words(name, each):
            try:
                info: Any = HfApi().repo_info(
                    name.repository, repo_type=each, revision=name.revision, files_metadata=True
                )
            except GatedRepoError:
                raise
            except (RepositoryNotFoundError, RevisionNotFoundError):
                continue
        files = {
            one.rfilename: Listed(one.size or 0, None if one.lfs is None else one.lfs.sha256, one.blob_id or "")
            for one in info.siblings or ()
        }
        return Repository(name, each, info.sha or "", bool(info.private), files)
    return None


def upload(folder: Path, name: Name, kind: Kind, private: bool, message: str, tag: str | None = None) -> str:
    """Make the repository if there is none, and let its revision hold exactly the folder's files, by one commit.
    Returns the commit.

    `tag`: moved to the commit. Raises `UserError`.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, branch = HfApi(), name.revision or MAIN
    with _in_words(name, kind):
        api.create_repo(name.repository, repo_type=kind, private=private or None, exist_ok=True)
        if branch != MAIN:
            api.create_branch(name.repository, repo_type=kind, branch=branch, exist_ok=True)
    there = find(name, kind)
    files = files_of(folder)
    stale = sorted(there.files.keys() - files.keys() - {ATTRIBUTES}) if there is not None else []
    with _in_words(name, kind):
        done = api.create_commit(
            name.repository, repo_type=kind, revision=branch, commit_message=message,
            operations=[
                *(CommitOperationAdd(file, path) for file, path in files.items()),
                *(CommitOperationDelete(file) for file in stale),
            ],
            parent_commit=None if there is None else there.commit,
        )  # fmt: skip
        if tag is not None:
            _tag(api, name, kind, tag, done.oid)
    return str(done.oid)


def _tag(api: Any, name: Name, kind: Kind, tag: str, commit: str) -> None:
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        api.delete_tag(name.repository, repo_type=kind, tag=tag)
    except RevisionNotFoundError:  # it is the first
        pass
    api.create_tag(name.repository, repo_type=kind, tag=tag, revision=commit)


@contextmanager
def _in_words(name: Name, kind: Kind) -> Iterator[None]:
    """Raise what the hub refuses, and a network that is none, as `UserError`."""
    import httpx2
    from huggingface_hub.constants import ENDPOINT, HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError

    where = address(name, kind)
    try:
        yield
    except GatedRepoError as error:
        raise UserError(f"{where} is given out on request: ask there, then run `hf auth login`") from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"there is no {where}, or it is private: check the name, or run `hf auth login` as a user who may read it"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise UserError(
                f"the hub refuses {where} to this token: run `hf auth login` with one that has write access to "
                f"{name.repository.partition('/')[0]}"
            ) from error
        raise UserError(f"{ENDPOINT} answers {status}: {_first(error)}; try again later") from error
    except (httpx2.HTTPError, OSError) as error:
        if isinstance(error, OSError) and (error.filename is not None or error.errno in NOT_WRITTEN):
            raise UserError(
                f"{error.filename or HF_HUB_CACHE}: {error.strerror}: free it, or set HF_HOME to a folder that can be "
                "written"
            ) from error
        raise UserError(
            f"{ENDPOINT} cannot be reached ({_first(error)}): look at the network, or at HF_ENDPOINT"
        ) from error
    except (ValueError, RuntimeError) as error:  # a card that the hub refuses, an upload that broke
        raise UserError(f"{ENDPOINT} does not accept it: {_first(error)}") from error


def _first(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _blob(path: Path) -> str:
    """Git's name of a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data, usedforsecurity=False).hexdigest()
