"""Exceptions of a simulator's own code, said in a sentence with the place in it."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sim_farm.contract import FarmError

STANDARD = sysconfig.get_path("stdlib")
OURS = str(Path(__file__).parent)


@contextmanager
def failures_of(task: str, doing: str) -> Iterator[None]:
    """Whatever is raised within becomes a `FarmError` of one sentence; one that is raised stays as it is."""
    try:
        yield
    except FarmError:
        raise
    except (Exception, SystemExit) as error:  # whatever its author's code raises: an exit would end the run unsaid
        said = " ".join(str(error).split())[:500]
        raise FarmError(
            f"{task} failed in {doing}: {type(error).__name__}{': ' if said else ''}{said} ({_place(error)})"
        ) from error


def _place(error: BaseException) -> str:
    """Place where the error was raised: the innermost line that belongs neither to this package nor to an installed
    one, if there is one."""
    frames = traceback.extract_tb(error.__traceback__)
    others = (STANDARD, OURS, "<")
    own = [one for one in frames if "-packages" not in one.filename and not one.filename.startswith(others)]
    at = (own or frames)[-1]
    return f"{at.filename}, line {at.lineno}, in {at.name}"
