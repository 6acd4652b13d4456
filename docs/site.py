"""Build the documentation's site in build/site: `make site`.

The pages stay as they are read in the source tree. Their copies in build/pages have the same places there, and each
file that they link to is beside them, source files as pages that show them: a link out of docs/ leads somewhere where
nothing but the site is at hand. The build fails where a link does not, and where a page of the site asks for a script,
a style or a picture that is not there.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
SITE = ROOT / "build" / "site"
STYLE = ROOT / "docs" / "site.css"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[^)\s]*\))")
"""Target of a link, without its anchor."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
"""Source files that become pages, and what they are highlighted as."""


def main() -> int:
    write_pages(PAGES)
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]  # of mkdocs.yml
    status = subprocess.run(build, cwd=ROOT).returncode
    if status == 0:
        write_search(SITE)
        absent = list(missing(SITE))
        print("".join(f"{page} asks for {target}, which is not there\n" for page, target in absent), end="")
        status = 1 if absent else 0
    return status


def write_search(site: Path) -> None:
    """Write `search.js` beside `search.json`, with the same index: a page that is opened as a file asks for it, since
    a browser lets it read no other."""
    (site / "search.js").write_text(f"var __index = {(site / 'search.json').read_text()};\n")


class _Parts(HTMLParser):
    """The scripts, styles, icons and media that a page asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        asks = {"script": "src", "img": "src", "video": "src", "source": "src", "link": "href"}.get(tag)
        of_another_page = tag == "link" and values.get("rel") not in ("stylesheet", "icon")
        if asks and (target := values.get(asks)) and not of_another_page:
            self.found.append(target)


def missing(site: Path) -> Iterator[tuple[Path, str]]:
    """The pages of the built site that ask for a file of it that is not there, and the file."""
    for page in sorted(site.rglob("*.html")):
        parts = _Parts()
        parts.feed(page.read_text())
        for target in parts.found:
            path = unquote(target.partition("?")[0].partition("#")[0])
            if "://" in target or target.startswith(("data:", "//")):
                continue
            if not (site / path.lstrip("/") if path.startswith("/") else page.parent / path).is_file():
                yield page.relative_to(site), target


def write_pages(folder: Path) -> None:
    """Write README.md, docs/ and all that these link to into `folder`, which is made anew. Raises `FileNotFoundError`
    for a link to a file that is not there."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / place(STYLE)).parent.mkdir(parents=True)
    shutil.copy(STYLE, folder / place(STYLE))
    waiting, written = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))], set[Path]()
    while waiting:
        source = waiting.pop()
        if source in written:
            continue
        written.add(source)
        copy = folder / place(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.suffix == ".md":
            copy.write_text(page(source))
            waiting += linked(source)
        elif source.suffix in LANGUAGES:
            title, language = source.relative_to(ROOT), LANGUAGES[source.suffix]
            copy.write_text(f"# {title}\n\n````{language}\n{source.read_text()}````\n")
        else:
            shutil.copy(source, copy)


def place(source: Path) -> Path:
    """Where the copy of a file of the source tree is, from the root of the pages."""
    name = source.relative_to(ROOT)
    if name == Path("README.md"):
        return Path("index.md")
    return name.with_name(f"{name.name}.md") if name.suffix in LANGUAGES else name


def linked(source: Path) -> Iterator[Path]:
    """The files that a page links to."""
    return (found for target in LINK.findall(source.read_text()) if (found := file_of(source, target)))


def file_of(source: Path, target: str) -> Path | None:
    """The file that a page's link leads to, of a folder its README.md; None for an address elsewhere."""
    if "://" in target:
        return None
    found = (source.parent / target).resolve()
    return found / "README.md" if found.is_dir() else found


def page(source: Path) -> str:
    """Text of a page, its links leading to the copies."""
    up = "../" * (len(source.relative_to(ROOT).parts) - 1)

    def led(link: re.Match[str]) -> str:
        found = file_of(source, link[0])
        return link[0] if found is None else f"{up}{place(found)}"

    return LINK.sub(led, source.read_text())


if __name__ == "__main__":
    raise SystemExit(main())
