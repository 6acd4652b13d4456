"""`embodied import`: recordings and checkpoints of other projects, converted to ours."""

from __future__ import annotations

import importlib
from dataclasses import fields
from typing import Any

from embodied.errors import UserError
from embodied_importers.formats import ImportRequest as Arguments
from embodied_importers.formats import recognised

EXAMPLES = (("embodied import SOURCE --out FOLDER", "ManiSkill, LIBERO, robomimic, RLDS; RLinf's and verl's shards"),)
EVERY = ("source", "out", "quiet", "json")
"""Options that every format takes."""


def run(args: Arguments) -> dict[str, Any]:
    known = recognised(args.source)
    for field in fields(args):
        if field.name not in (*EVERY, *known.options) and getattr(args, field.name) != field.default:
            raise UserError(
                f"--{field.name.replace('_', '-')} is not for {args.source}, which is in the format {known.name}; what "
                f"can be given is: {', '.join('--' + name.replace('_', '-') for name in known.options)}"
            )
    return importlib.import_module(f"embodied_importers.{known.importer}").import_source(args)
