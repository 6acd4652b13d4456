"""The pages: what they point to exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SOURCE = re.compile(r"\b(?:embodied|sim_farm|policies|schedulers|tests|benchmarks)(?:/\w+)*/\w+\.py\b")


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_points_to_an_existing_file_and_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name} links to {link}, which does not exist"
        assert not anchor or anchor in _anchors(target), f"{page.name} links to {link}, a heading that is not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    for name in SOURCE.findall(page.read_text()):
        assert (ROOT / name).is_file(), f"{page.name} names {name}, which does not exist"


def test_the_readme_names_every_module_of_the_packages_whose_modules_it_lists() -> None:
    listed = (ROOT / "README.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    for folder in ("embodied", "sim_farm", "schedulers"):
        section = re.split(r"\n(?=\w)", listed.partition(f"\n{folder}/")[2])[0]
        names = {path.name for path in (ROOT / folder).glob("*.py")} | {
            f"{path.parent.name}/" for path in (ROOT / folder).glob("*/__init__.py")
        }
        # `errors.py` of schedulers is the one exception class of the package, `__init__.py` its front door.
        missing = {name for name in names if name not in section} - {"__init__.py", "errors.py"}
        assert not missing, f"README.md does not say what {folder}'s {', '.join(sorted(missing))} are"
