"""Build the documentation's site in build/site: `make site`.

The pages stay as they are read in the source tree. Their copies in build/pages have the same places there, and each
file that they link to is beside them, source files as pages that show them: a link out of docs/ leads somewhere where
nothing but the site is at hand. The build fails where a link does not.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ROOT / "build" / "pages"
LINK = re.compile(r"(?<=\]\()([^)\s#]+)(?=[^)\s]*\))")
"""Target of a link, without its anchor."""
LANGUAGES = {".py": "python", ".yaml": "yaml", ".json": "json"}
"""Source files that become pages, and what they are highlighted as."""


def main() -> int:
    write_pages(PAGES)
    build = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]  # of mkdocs.yml
    return subprocess.run(build, cwd=ROOT).returncode


def write_pages(folder: Path) -> None:
    """Write README.md, docs/ and all that these link to into `folder`, which is made anew. Raises `FileNotFoundError`
    for a link to a file that is not there."""
    shutil.rmtree(folder, ignore_errors=True)
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
