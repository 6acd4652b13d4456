"""The documentation's site: what its pages ask for is there. `make site` builds it, and fails where it is not."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def site() -> Any:
    """The script that builds the site, as a module."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "site.py")))


def test_what_a_page_asks_for_and_lacks_is_named(site: Any, tmp_path: Path) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "docs").mkdir()
    (tmp_path / "assets" / "there is.css").touch()
    (tmp_path / "docs" / "page.html").write_text(
        '<link rel="stylesheet" href="../assets/there%20is.css?v=1"><link rel="next" href="other.html">'
        '<script src="../assets/gone.js"></script><img src="data:,"><script src="https://host/away.js"></script>'
        '<link rel="icon" href="/assets/icon.png">'
    )
    assert list(site.missing(tmp_path)) == [
        (Path("docs/page.html"), "../assets/gone.js"),
        (Path("docs/page.html"), "/assets/icon.png"),
    ]


def test_a_page_that_is_opened_as_a_file_finds_the_index_of_the_search(site: Any, tmp_path: Path) -> None:
    index = {"items": [{"title": "a \u2028 b"}]}
    (tmp_path / "search.json").write_text(json.dumps(index))
    site.write_search(tmp_path)
    name, _, value = (tmp_path / "search.js").read_text().rstrip(";\n").partition(" = ")
    assert name == "var __index" and json.loads(value) == index


def test_the_style_that_the_pages_name_is_among_them(site: Any, tmp_path: Path) -> None:
    site.write_pages(tmp_path / "pages")
    (style,) = [line for line in (ROOT / "mkdocs.yml").read_text().splitlines() if line.startswith("extra_css")]
    named = style.partition("[")[2].rstrip("]")
    assert (tmp_path / "pages" / named).is_file()
