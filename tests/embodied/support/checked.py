"""A configuration as a command checks it before it starts workers."""

from __future__ import annotations

from embodied.config.schema import Config
from embodied.training.checks import Checked, check_settings, check_start


def check(config: Config, command: str = "train") -> None:
    checked = Checked(command=command, config=config)
    check_settings(checked)
    check_start(checked)
