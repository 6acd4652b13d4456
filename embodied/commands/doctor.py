"""`embodied doctor`: what this machine lacks, and the command that mends it."""

from __future__ import annotations

from embodied.doctor import checks


def main(arguments: list[str]) -> int:
    """Exit status 0 if nothing is missing. Imports only the standard library: any package may be what is missing."""
    return checks.run(arguments, "embodied doctor")
