"""Writes setup/hashes.txt: the sha256 of every file that a pin of constraints.txt may be installed from.

`python setup/lock.py`, after a pin has changed. The digests are those that https://pypi.org states. Left out are
wheels for Pythons and systems that the project does not run on, and torch and torchvision: their builds for the CPU
come from PyTorch's own index.
"""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

ROOT = Path(__file__).parent.parent
INDEX = "https://pypi.org/simple"
OTHER_INDEX = {"torch", "torchvision"}
PYTHONS = re.compile(r"cp311|cp312|py3|py2\.py3|abi3")
SYSTEMS = re.compile(r"any|manylinux|linux_|macosx")


def main() -> None:
    pins = re.findall(r"^([\w.-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    lines = ["# Written by setup/lock.py from constraints.txt."]
    for name, version in pins:
        if name in OTHER_INDEX:
            continue
        digests = sorted(set(digests_of(name, Version(version))))
        if not digests:
            raise SystemExit(f"{INDEX} has no file of {name} {version}")
        lines.append(" \\\n    ".join([f"{name}=={version}", *(f"--hash=sha256:{digest}" for digest in digests)]))
    (ROOT / "setup" / "hashes.txt").write_text("\n".join(lines) + "\n")


def digests_of(name: str, version: Version) -> Iterator[str]:
    accept = {"Accept": "application/vnd.pypi.simple.v1+json"}
    request = urllib.request.Request(f"{INDEX}/{canonicalize_name(name)}/", headers=accept)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310
        page: dict[str, Any] = json.load(answer)
    for file in page["files"]:
        if _is_of(file["filename"], version):
            yield file["hashes"]["sha256"]


def _is_of(filename: str, version: Version) -> bool:
    """Whether it is a file of the version, and for what the project runs on."""
    try:
        if not filename.endswith(".whl"):
            return parse_sdist_filename(filename)[1] == version
        _, found, _, tags = parse_wheel_filename(filename)
    except (InvalidSdistFilename, InvalidWheelFilename):
        return False
    fits = any(PYTHONS.search(f"{tag.interpreter}-{tag.abi}") and SYSTEMS.search(tag.platform) for tag in tags)
    return fits and found == version


if __name__ == "__main__":
    main()
