"""Where the text of a page stands in a browser: boxes that cover each other, or leave the page or their drawing.

The pages are opened in frames of one window of headless Chromium, each at the widths that are asked for: a window of
its own is at least 500 pixels wide.
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--allow-file-access-from-files",
    "--window-size=1600,1000",
    "--virtual-time-budget=20000",
)
MEASURE = Path(__file__).with_name("boxes.js")


@dataclass(frozen=True)
class Measured:
    """A page at a width."""

    page: str
    width: int
    """Pixels that its window is wide, as the page itself sees it."""
    texts: int
    """Number of pieces of text that are visible."""
    faults: tuple[str, ...]
    """A sentence for each piece of text that covers another, or leaves the page or its drawing."""


def measured(pages: Sequence[Path], widths: Sequence[int], folder: Path, root: str = "body") -> list[Measured]:
    """Each page at each width. Text outside of the elements `root` (a selector of CSS) is left out; `folder` takes
    the window's page and the browser's profile. Skips or fails the test where there is no Chromium."""
    program = _program()
    frames = "".join(
        f'<iframe src="{html.escape(page.resolve().as_uri())}" width="{width}" height="900" style="border:0"></iframe>'
        for page in pages
        for width in widths
    )
    script = MEASURE.read_text().replace("ROOT", json.dumps(root))
    window = folder / "window.html"
    window.write_text(f'<!DOCTYPE html><body>{frames}<pre id="found"></pre><script>{script}</script>')
    command = [program, *OPTIONS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", window.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540)
    found = re.search(r'<pre id="found">(.+?)</pre>', done.stdout, re.DOTALL)
    assert found and found[1].startswith("["), f"not measured: {found and found[1]} {done.stderr[-2000:]}"
    shutil.rmtree(folder / "profile", ignore_errors=True)
    names = [page for page in pages for _ in widths]
    return [
        Measured(page.name, frame["width"], frame["texts"], tuple(frame["faults"]))
        for page, frame in zip(names, json.loads(html.unescape(found[1])), strict=True)
    ]


def _program() -> str:
    found = next((path for name in PROGRAMS if (path := shutil.which(name))), None)
    if found is None:
        missing = "pages are measured in Chromium, which is not installed: `sh setup/test_programs.sh` does it"
        if os.environ.get("SYSTEM_PACKAGES") == "no":
            pytest.skip(missing)
        pytest.fail(missing)
    return found
