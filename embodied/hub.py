"""Hugging Face names in place of folders: `org/name`, or `org/name@revision` with a branch, a tag or a commit.

A folder of that name wins. Else the repository's files lie in huggingface_hub's cache (HF_HOME), to which they are
downloaded once; of checkpoints only what is read as data: safetensors, JSON and tokenizers, never a pickle or code.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from embodied.errors import UserError, shown

Kind = Literal["model", "dataset"]
PATTERNS: dict[Kind, tuple[str, ...]] = {
    "model": ("*.safetensors", "*.json", "*.model", "*--*_checkpoint.pt"),
    "dataset": ("*.json", "*.jsonl", "*.parquet", "*.mp4"),
}
"""Files that are downloaded. `*--*_checkpoint.pt` are OpenVLA-OFT's trained parts beside the network; only tensors are
loaded from them (`weights_only`)."""
SETTING: dict[Kind, str] = {"model": "policy.options.checkpoint", "dataset": "sft.data"}
COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True)
class Name:
    """A repository and one of its revisions."""

    repository: str
    revision: str | None

    @classmethod
    def parse(cls, text: str) -> Name | None:
        """None for a text that is no name of a repository."""
        match = re.fullmatch(r"([\w.-]{1,96}/[\w.-]{1,96})(?:@([\w./-]{1,200}))?", text, re.ASCII)
        if match is None or any(part in (".", "..") for part in match[1].split("/")):
            return None
        return cls(match[1], match[2])

    def __str__(self) -> str:
        return self.repository + (f"@{self.revision}" if self.revision else "")


def is_repository(text: str) -> bool:
    """True for the name of a repository, unless a folder of that name exists."""
    return Name.parse(text) is not None and not Path(text).exists()


def checkpoint_folder(name: str | Path, fetch: bool = True) -> Path:
    """The folder `name`, or that of the model of this name, downloaded if it is not in the cache.

    Without `fetch` there is no network access. Raises `UserError` with the command that fetches it on another machine.
    """
    return _folder(str(name), "model", fetch)


def check_checkpoint(name: str) -> None:
    """Raise as `checkpoint_folder` does where there is no such folder or model, or it cannot be reached. Downloads
    no more than its config.json."""
    if not Path(name).exists():
        _snapshot(_parsed(name, "model"), "model", fetch=True, patterns=("config.json",))


def dataset_folder(name: str | Path, fetch: bool = True) -> Path:
    """The folder `name`, or that of the dataset of this name, downloaded if it is not in the cache.

    Without `fetch` there is no network access. Raises `UserError` with the command that fetches it on another machine.
    """
    return _folder(str(name), "dataset", fetch)


def pinned(name: str | Path, folder: Path) -> str:
    """The name with the commit whose files lie in `folder`, as a run records it; that of a folder as it is."""
    found = None if Path(name).exists() else Name.parse(str(name))
    return str(name) if found is None else str(Name(found.repository, folder.name))


def kept(given: str | Path, recorded: str | Path) -> str:
    """The name that a resumed run uses: with the commit that it recorded, if `given` names no commit."""
    name, known = Name.parse(str(given)), Name.parse(str(recorded))
    same = name is not None and known is not None and name.repository == known.repository
    fixed = name is not None and name.revision is not None and COMMIT.fullmatch(name.revision) is not None
    return str(recorded if same and not fixed else given)


def same_repository(one: object, other: object) -> bool:
    """True for two names of one repository, whatever their revisions."""
    names = [Name.parse(name) if isinstance(name, str) else None for name in (one, other)]
    return None not in names and len({name.repository for name in names if name is not None}) == 1


def _folder(text: str, kind: Kind, fetch: bool) -> Path:
    if Path(text).exists():
        return Path(text)
    name = _parsed(text, kind)
    folder = _snapshot(name, kind, fetch)
    if kind == "model" and not any(folder.rglob("*.safetensors")):
        raise UserError(
            f"{SETTING[kind]}: {name} holds no safetensors; weights in pickles (*.bin, *.pt) are not read: convert "
            f"them, or choose a revision that has safetensors (https://huggingface.co/{name.repository}/tree/main)"
        )
    return folder


def _parsed(text: str, kind: Kind) -> Name:
    name = Name.parse(text)
    if name is None:
        raise UserError(
            f"{SETTING[kind]}: {shown(text)} is no folder here, and no name of a Hugging Face repository "
            "(org/name or org/name@revision)"
        )
    return name


def _snapshot(name: Name, kind: Kind, fetch: bool, patterns: tuple[str, ...] | None = None) -> Path:
    """The folder of the repository's files in the cache: those of its kind, or of these patterns."""
    import httpx2
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        IncompleteSnapshotError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    elsewhere = (
        f". Where there is a network, run\n  {_command(name, kind)}\nand copy the folder HF_HOME of there "
        f"(~/.cache/huggingface) to {_cache().parent} here"
    )
    try:
        folder = snapshot_download(
            name.repository, repo_type=kind, revision=name.revision, allow_patterns=list(patterns or PATTERNS[kind]),
            local_files_only=not fetch,
        )  # fmt: skip
        return Path(folder)
    except GatedRepoError:
        page = f"https://huggingface.co/{'datasets/' if kind == 'dataset' else ''}{name.repository}"
        why = f"its authors give it out on request: ask at {page}, then run `hf auth login`"
    except RepositoryNotFoundError:
        why = f"there is no {kind} of that name, or it is private (run `hf auth login`)"
    except RevisionNotFoundError:
        why = f"it has no revision {name.revision}"
    except IncompleteSnapshotError:
        why = f"only part of it is in the cache {_cache()}, and the rest cannot be downloaded here{elsewhere}"
    except LocalEntryNotFoundError as error:
        offline = not fetch or "outgoing traffic has been disabled" in str(error)
        network = "nothing is downloaded now (HF_HUB_OFFLINE)" if offline else f"{_endpoint()} cannot be reached"
        why = f"it is not in the cache {_cache()}, and {network}{elsewhere}"
    except HFValidationError as error:
        why = str(error).splitlines()[0][:200]
    except (HfHubHTTPError, httpx2.HTTPError, OSError, ValueError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        why = f"{_endpoint()} says: {first[:200]}{elsewhere}"
    raise UserError(f"{SETTING[kind]}: {name} is no folder here, and cannot be had from Hugging Face: {why}")


def _command(name: Name, kind: Kind) -> str:
    """The command that fetches what is read here into the cache of the machine on which it is run."""
    words = ["hf", "download", name.repository]
    words += ["--repo-type", kind] * (kind != "model") + ["--revision", name.revision or ""] * bool(name.revision)
    return shlex.join([*words, *(word for pattern in PATTERNS[kind] for word in ("--include", pattern))])


def _cache() -> Path:
    from huggingface_hub.constants import HF_HUB_CACHE

    return Path(HF_HUB_CACHE)


def _endpoint() -> str:
    from huggingface_hub.constants import ENDPOINT

    return ENDPOINT
