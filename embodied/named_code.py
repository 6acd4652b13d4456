"""Settings that name code, `package.module:NAME`: whoever writes them has the run execute what he likes.

In a configuration that a user writes they are his to use. The configuration in a run's folder may have come from
elsewhere together with its checkpoint, and using somebody's weights must not run somebody's code: there they are
refused unless the user names the same code himself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from embodied.errors import UserError

KEYS = ("workflow", "reward.function")


def refuse_code(named: Mapping[str, str], path: Path, allowed: Collection[str]) -> None:
    """Raise `UserError` where the configuration that a run has saved at `path` names, by key, other code than is
    `allowed`."""
    refused = {key: name for key, name in named.items() if name not in allowed}
    if refused:
        raise UserError(
            f"{path} names code that would be run: {', '.join(f'{key}: {name}' for key, name in refused.items())}. "
            "A run's folder may come from elsewhere, so this is done only if you say so. If you trust the code that "
            "has this name on this machine, type "
            + " ".join(f"--{key} {name}" for key, name in refused.items())
            + f" as well (from Python: code={[*refused.values()]})"
        )
