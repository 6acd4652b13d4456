"""Laws over the source: nothing from outside is run, and what is read is data. See SECURITY.md."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("embodied", "sim_farm", "policies", "schedulers", "extensions")
FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
RUNNING = ("cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve")
"""Modules whose readers run what they read."""
NAMED = {
    "policies/files.py": {"pickle"},  # for the exception that torch raises where it refuses one
}
ARGUMENTS = {"allow_pickle", "trust_remote_code"}
OBJECTS = ("all_gather_object", "broadcast_object_list", "gather_object", "recv_object_list", "scatter_object_list")
"""torch.distributed's messages that are pickles."""
EVERYWHERE = ("0.0.0.0", "::")  # noqa: S104 - these are what is looked for


def offences(tree: ast.AST) -> Iterator[str]:
    """What in a module's source would run what comes from outside, or listen to everybody."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (f"import {name.name}" for name in node.names if name.name.split(".")[0] in RUNNING)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNNING:
            yield f"import {node.module}"
        elif isinstance(node, ast.Attribute) and node.attr in OBJECTS:
            yield node.attr
        elif isinstance(node, ast.Attribute) and node.attr in ("loads", "Unpickler") and _is(node.value, RUNNING):
            yield f"{ast.unparse(node)}"
        elif isinstance(node, ast.Constant) and node.value in EVERYWHERE:
            yield f"address {node.value!r}"
        elif isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            yield from (name for name in ARGUMENTS & set(given) if not _false(given[name]))
            if ast.unparse(node.func) == "torch.load" and not _true(given.get("weights_only")):
                yield "torch.load"


def _is(node: ast.expr, names: tuple[str, ...]) -> bool:
    return isinstance(node, ast.Name) and node.id in names


def _false(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def _true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True


def test_no_module_reads_pickles_runs_remote_code_or_listens_to_everybody() -> None:
    assert len(FILES) > 150
    found = {}
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        allowed = {f"import {module}" for module in NAMED.get(name, ())}
        if bad := set(offences(ast.parse(path.read_text()))) - allowed:
            found[name] = bad
    assert not found


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from cloudpickle import loads", "pickle.loads(x)", "np.load(f, allow_pickle=True)",
        "np.load(f, allow_pickle=how)", "AutoModel.from_pretrained(n, trust_remote_code=True)", "torch.load(f)",
        "torch.load(f, weights_only=False)", "dist.broadcast_object_list(x)", "server.bind(('0.0.0.0', 1))",
    ],
)  # fmt: skip
def test_the_law_sees_what_breaks_it(code: str) -> None:
    assert list(offences(ast.parse(code)))


REFUSED = {
    "S102": "exec(text)",
    "S103": "os.chmod(path, 0o777)",
    "S104": "host = '0.0.0.0'",
    "S108": "path = '/tmp/name'",
    "S202": "tarfile.open(path).extractall(folder)",
    "S301": "pickle.loads(data)",
    "S302": "marshal.loads(data)",
    "S306": "tempfile.mktemp()",
    "S307": "eval(text)",
    "S310": "urllib.request.urlopen(address)",
    "S506": "yaml.load(text)",
    "S602": "subprocess.run(text, shell=True)",
    "S605": "os.system(text)",
}


def test_the_linter_refuses_what_bandit_would() -> None:
    """`make lint` checks bandit's rules by ruff; what is excepted has its reason in pyproject.toml."""
    imports = "import marshal\nimport os\nimport pickle\nimport subprocess\nimport tarfile\nimport tempfile\n"
    source = imports + "import urllib.request\nimport yaml\n" + "\n".join(REFUSED.values())
    ruff = [str(Path(sys.executable).with_name("ruff")), "check", "--output-format", "json", "--stdin-filename"]
    output = subprocess.run(
        [*ruff, "embodied/x.py", "-"], input=source, capture_output=True, text=True, cwd=ROOT
    ).stdout
    assert {found["code"] for found in json.loads(output)} >= set(REFUSED)
