"""The pages: what they point to exists, what is generated is current, and what README shows runs."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import re
import sys
import typing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import embodied
from embodied.cli import VERBS, function_of, offered
from embodied.config.files import all_settings
from embodied.config.schema import Config
from policies.registry import arguments_of, policy_kind

ROOT = Path(__file__).parent.parent
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
PAGES = (
    ROOT / "README.md",
    *(ROOT / f"{name}.md" for name in ("CHANGELOG", "CONTRIBUTING", "SECURITY")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "examples" / "README.md",
)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
SOURCE = re.compile(r"\b(?:embodied|sim_farm|policies|schedulers|tests|benchmarks|examples)(?:/\w+)*/\w+\.py\b")
MOST_README_LINES = 150
STATUS = re.compile(r"^- Status: accepted$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as they are linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_relative_link_points_to_an_existing_file_and_heading(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{_name(page)} links to {link}, which does not exist"
        assert not anchor or anchor in _anchors(target), f"{_name(page)} links to {link}, a heading that is not there"


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    for name in SOURCE.findall(page.read_text()):
        assert (ROOT / name).is_file(), f"{_name(page)} names {name}, which does not exist"


IMPORT = re.compile(r"^from ((?:embodied|sim_farm|policies|schedulers)[\w.]*) import ([\w, ]+)$", re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if IMPORT.search(page.read_text())], ids=_name)
def test_every_name_that_a_page_imports_exists(page: Path) -> None:
    for module, names in IMPORT.findall(page.read_text()):
        for name in names.split(", "):
            assert hasattr(importlib.import_module(module), name), f"{_name(page)} imports {name} from {module}"


SECTIONS = {key.partition(".")[0] for key in all_settings() if "." in key}
SETTING = re.compile(rf"`(?:--)?((?:{'|'.join(sorted(SECTIONS))})\.[a-z_.-]+)")
OPTION = re.compile(r"(?<=[\s`])--([a-z][a-z0-9._-]*)")
COMMAND = re.compile(r"embodied (\w+)\b([^`#|\n]*)")


def _options(verb: str) -> set[str]:
    """The options of a verb but for settings; of all verbs of several benches."""
    arguments = getattr(sys.modules[function_of(verb).__module__], "Arguments", None)
    kinds = [typing.get_args(kind)[0] for kind in typing.get_args(arguments)] or [arguments]
    own = {field.name for kind in kinds if kind is not None for field in dataclasses.fields(kind)}
    return {"json", "help", "help_all"} | own


@pytest.mark.parametrize("page", [page for page in PAGES if page.parent.name != "decisions"], ids=_name)
def test_every_setting_and_option_that_a_page_names_exists(page: Path) -> None:
    text, settings = page.read_text().replace("\\\n", " "), set(all_settings())
    for named in SETTING.findall(text):
        key = named.rstrip(".").replace("-", "_")
        known = key in settings or key.startswith(("policy.options", *(f"{found}." for found in settings)))
        # `stream.py` and the like are files.
        assert known or key.endswith((".py", ".md", ".yaml", ".json")), f"{_name(page)} names the setting {named}"
    for verb, rest in COMMAND.findall(text):
        for option in OPTION.findall(rest) if verb in {*VERBS, *offered()} else ():
            key = option.replace("-", "_").replace(".no_", ".")
            known = key in settings or key.startswith("policy.options.") or key.removeprefix("no_") in _options(verb)
            assert known, f"{_name(page)} gives `embodied {verb}` the option --{option}"


def _script(name: str) -> ModuleType:
    """The module docs/NAME.py, which is in no package."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "settings.md", "modules.md"])
def test_a_generated_page_is_current(name: str) -> None:
    current = _script("reference").PAGES[name]()
    assert (ROOT / "docs" / name).read_text() == current, f"docs/{name} is old: run `make docs`"


def _navigation(entries: list[Any]) -> list[str]:
    """The pages that the site's navigation names."""
    values = [value for entry in entries for value in entry.values()]
    return [page for value in values for page in (_navigation(value) if isinstance(value, list) else [value])]


def test_the_site_s_navigation_has_every_page_once() -> None:
    named = _navigation(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    # The index of the decisions names each, and a page of measurements that of earlier ones.
    pages = [page for page in PAGES if page not in DECISIONS and page.name != "history.md"]
    assert sorted(named) == sorted(str(_script("site").place(page)) for page in pages)


def test_a_link_out_of_the_pages_leads_to_a_copy_on_the_site(tmp_path: Path) -> None:
    site = _script("site")
    site.write_pages(tmp_path)
    names = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert {"index.md", "docs/decisions/README.md", "sim_farm/contract.py.md", "assets/modes.png"} <= names
    for copy in tmp_path.rglob("*.md"):
        text = copy.read_text()
        for link in LINK.findall("" if copy.name.endswith(".py.md") else text):
            target = copy.parent / link.partition("#")[0]
            assert "://" in link or target.exists(), f"{copy.relative_to(tmp_path)} links to {link}"
    assert "class TaskInfo" in (tmp_path / "sim_farm/contract.py.md").read_text()


@pytest.mark.slow
def test_the_site_is_built_without_a_warning() -> None:
    pytest.importorskip("zensical", reason="`make site` installs what the site is built with")
    assert _script("site").main() == 0
    page = ROOT / "build" / "site" / "docs" / "ten-minutes.html"
    parts = re.findall(r'<(?:script|link)\b[^>]*?(?:src|href)="?([^"\s>]+)', page.read_text())
    files = [part.partition("?")[0] for part in parts if not part.startswith(("#", "data:"))]
    assert len(files) > 3
    assert [file for file in files if not (page.parent / file).exists()] == [], "nothing comes from elsewhere"


@pytest.mark.parametrize("page", DECISIONS, ids=lambda page: page.stem)
def test_a_decision_has_its_parts_and_is_in_the_index(page: Path) -> None:
    text = page.read_text()
    assert text.startswith(f"# {page.name[:4]}. ")
    assert re.search(r"^- Date: \d{4}-\d\d-\d\d$", text, re.MULTILINE) and STATUS.search(text)
    for part in ("Considered", "Consequence"):
        assert re.search(rf"^\*\*{part}\.\*\* ", text, re.MULTILINE), f"{_name(page)} has no paragraph **{part}.**"
    assert f"]({page.name})" in (page.parent / "README.md").read_text(), "docs/decisions/README.md lacks it"


def test_a_decision_is_linked_from_what_it_binds() -> None:
    roots = ("embodied", "sim_farm", "policies", "schedulers", "extensions", "benchmarks", "examples", "tests")
    modules = [path for root in roots for path in (ROOT / root).rglob("*.py")]
    pages = [page for page in PAGES if page.parent.name != "decisions"] + sorted((ROOT / "examples").rglob("*.md"))
    text = "\n".join(path.read_text() for path in (*pages, ROOT / "tests" / "README.md", *modules))
    linked = set(re.findall(r"decisions/(\d{4})", text))
    assert [page.name for page in DECISIONS if page.name[:4] not in linked] == []


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= MOST_README_LINES


def _readme_block(beginning: str) -> str:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return next(block for block in blocks if beginning in block)


@pytest.mark.parametrize(
    ("block", "task", "policy"),
    [("class Point", "point:BACKEND/reach", {}), ("class Linear", "tabletop/reach", {"kind": "linear:Linear"})],
)
def test_the_readme_s_parts_of_one_s_own_train(
    block: str, task: str, policy: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = block.split()[1].lower()
    (tmp_path / f"{name}.py").write_text(_readme_block(block))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    try:
        importlib.import_module(name)
        config = Config.model_validate(
            {
                "iterations": 2,
                "env": {"task": task, "num_envs": 4},
                "policy": policy,
                "rollout": {"decisions": 16},
                "eval": {"episodes": 4, "videos": 0},
                "runtime": {"mode": "inline"},
            }
        )
        assert embodied.train(config, runs_dir="runs").evaluation.episodes == 4
    finally:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("pi0", "pi0.md"), ("openvla_oft", "openvla.md")),
        *((kind, "lerobot.md") for kind in ("smolvla", "act", "diffusion")),
    ],
)
def test_every_option_of_a_policy_is_explained(kind: str, name: str) -> None:
    text = (ROOT / "docs" / name).read_text()
    options = set(arguments_of(policy_kind(kind))) - {"weights"}  # that one `policies.load` sets
    assert not [option for option in options if f"`{option}`" not in text]
