"""Shards of a training to a Hugging Face directory: see `embodied_importers.sharded`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich import print as show
from rich.markup import escape

from embodied.demonstrations.writer import new_folder
from embodied.errors import UserError
from embodied.hub import checkpoint_folder
from embodied_importers.formats import ImportRequest
from embodied_importers.sharded import convert
from policies.contract import PolicyError
from policies.files import write_json

IMPORT = "import.json"
"""File beside the converted weights that records their source and what was left out."""


def import_source(request: ImportRequest) -> dict[str, Any]:
    """Convert the shards at `request.source`. Returns the result as plain data. Raises `UserError`."""
    base = None if request.base is None else checkpoint_folder(request.base)
    with new_folder(request.out) as aside:
        try:
            done = convert(request.source, base, aside)
        except PolicyError as error:
            raise UserError(str(error)) from error
        result = {"checkpoint": str(request.out), "source": str(request.source), "base": request.base, **asdict(done)}
        write_json(aside / IMPORT, result)
    changed = "" if done.changed is None else f", {done.changed} of them other than the base's"
    merged = f"; an adapter was merged into {done.merged} of them" if done.merged else ""
    show(f"{escape(str(request.out))}: {done.tensors} tensors of {done.kind}{changed}{merged}")
    for what, names in (("not in the base, left out", done.left_out), ("not read or copied", done.left_alone)):
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            show(escape(f"  {what}: {', '.join(names[:8])}{more}"))
    if done.changed == 0:
        show("  [yellow]Every tensor is the base's: the training changed nothing, or --base names its result[/yellow]")
    return result
