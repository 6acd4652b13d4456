"""Entries of a LeRobot folder's config.json: each is applied, known to change nothing, or refused by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import shown

OF_TRAINING = ("optimizer_", "scheduler_")
"""Beginnings of entries that change nothing once a policy is trained."""


def check_known_entries(
    path: Path, raw: Mapping[str, Any], read: Collection[str], passed: Collection[str], fixed: Mapping[str, Any]
) -> None:
    """Raise `PolicyError` for an entry that asks for what is not done here, and for one that is not known unless it is
    off: false, null, 0 or empty. `read` are applied, `passed` and those of `OF_TRAINING` change nothing, and `fixed`
    have one value."""
    for name, value in raw.items():
        if name in fixed:
            if value is not None and value != fixed[name]:
                raise PolicyError(
                    f"{path}: {name} is {shown(value)}, and only {fixed[name]} is applied here: run it with LeRobot, "
                    "or take a checkpoint that was trained without it"
                )
        elif (
            name not in read
            and name not in passed
            and not name.startswith(OF_TRAINING)
            and value not in (None, False, 0, "", [], {})
        ):
            raise PolicyError(
                f"{path}: {shown(name)} is {shown(value, 300)}, an entry that is not known here; take it out if no "
                "picture, state or action depends on it"
            )
    rtc = raw.get("rtc_config")
    if rtc and "rtc_config" in read and not (isinstance(rtc, dict) and not rtc.get("enabled", True)):
        raise PolicyError(
            f"{path}: rtc_config is {shown(rtc)}, and here an evaluation asks for real-time chunking, not a checkpoint "
            "(eval.delay_method rtc_lerobot, policy.options.rtc_schedule and rtc_guidance): set it to null"
        )


def autocast_notes(path: Path, raw: Mapping[str, Any]) -> list[str]:
    """A sentence where LeRobot would act with this config.json in fewer bits than its weights have."""
    if not raw.get("use_amp"):
        return []
    return [
        f"{path}: use_amp is true, so LeRobot acts with this policy under autocast, which computes in 16 bits. Here "
        "nothing is cast to fewer bits than its weights have: actions differ by rounding"
    ]
