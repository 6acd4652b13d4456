"""How LeRobot loads the folders that are written for it."""

from __future__ import annotations

from policies.policy_kind import LoadedBy

VERSION = "0.6.1"
"""The release that was seen to compute the same with such folders."""
LINES = """
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

policy = get_policy_class("{kind}").from_pretrained(folder)
before, after = make_pre_post_processors(policy.config, pretrained_path=str(folder))
"""


def loaded_by_lerobot(kind: str, note: str = "") -> LoadedBy:
    """The lines for a policy of this `type`."""
    return LoadedBy(f"LeRobot {VERSION}", "lerobot", LINES.format(kind=kind).strip(), note)
