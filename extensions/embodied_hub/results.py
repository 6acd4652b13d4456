"""The evaluations of a checkpoint and of what its run began from, as the run's folders hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.evaluate import RESULT
from embodied.evaluation.folder import Identity, read_identity
from embodied.evaluation.provenance import outside_files
from embodied.files import read_json
from embodied.run import checkpoint
from embodied.run.saved_settings import recorded_settings, run_of_checkpoint


@dataclass(frozen=True)
class Evaluation:
    """An evaluation that has ended."""

    identity: Identity
    result: Mapping[str, Any]
    """`eval.json`."""
    written_s: float
    """Time at which its result was written."""

    @property
    def sha256(self) -> str:
        """Hash of the protocol."""
        return str(self.result["protocol"]["sha256"])


@dataclass(frozen=True)
class Beginning:
    """The evaluation of the policy that a run began from, on the same episodes as its checkpoint's."""

    name: str
    evaluation: Evaluation


def of_checkpoint(run_dir: Path, folder: Path) -> list[Evaluation]:
    """Evaluations of the checkpoint: the newest of each protocol, the newest first."""
    digest = checkpoint.digest(folder)
    return _newest(one for one in _below(run_dir / "evals") if one.identity.policy.get("checkpoint_sha256") == digest)


def of_beginnings(run_dir: Path, protocols: set[str]) -> list[Beginning]:
    """Evaluations by one of these protocols of the checkpoint that the run began from, of the one before that, and of
    the base that no run has trained; the base first. Those that are not there are left out."""
    found: list[Beginning] = []
    seen = set[Path]()
    while run_dir.resolve() not in seen:
        seen.add(run_dir.resolve())
        try:
            config = recorded_settings(run_dir)
            begun, before = config.policy.init, None
            if begun is None:
                found += _named("the base, untouched", _of_base(config, run_dir.parent / "evals"), protocols)
            elif begun.is_dir() and (before := run_of_checkpoint(begun)) is not None:
                found += _named(before.name, of_checkpoint(before, begun), protocols)
        except UserError:  # it is gone or damaged: the card then has fewer rows
            break
        if before is None:
            break
        run_dir = before
    return found[::-1]


def _named(name: str, evaluations: list[Evaluation], protocols: set[str]) -> list[Beginning]:
    return [Beginning(name, one) for one in evaluations if one.sha256 in protocols]


def _of_base(config: Config, home: Path) -> list[Evaluation]:
    """Evaluations of the configuration's policy as it is built, from the same files."""
    files = {name: one["sha256"] for name, one in outside_files(config.policy).items()}
    if not files:
        return []

    def is_base(policy: Mapping[str, Any]) -> bool:
        its = {name: one.get("sha256") for name, one in (policy.get("files") or {}).items()}
        return policy.get("checkpoint_sha256") is None and policy.get("kind") == config.policy.kind and its == files

    return _newest(one for one in _below(home) if is_base(one.identity.policy))


def _below(home: Path) -> Iterator[Evaluation]:
    for path in sorted(home.glob(f"*/{RESULT}")):
        with suppress(OSError, ValueError, UserError):  # it is damaged, and evaluated anew where it is wanted
            yield Evaluation(read_identity(path.parent), read_json(path), path.stat().st_mtime)


def _newest(evaluations: Iterator[Evaluation]) -> list[Evaluation]:
    ordered = sorted(evaluations, key=lambda one: one.written_s)
    return list({one.sha256: one for one in ordered}.values())[::-1]
