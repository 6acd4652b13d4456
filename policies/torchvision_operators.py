"""torchvision beside a torch that its compiled part was not built for."""

from __future__ import annotations

import importlib
import sys

import torch

_library: torch.library.Library | None = None
"""Schemas live as long as the object that defined them."""


def import_torchvision() -> None:
    """Import torchvision, which timm needs; call it before the first import of timm.

    The wheels of the package index are built for the torch with CUDA. Beside a CPU build of torch their compiled
    part does not load, and torchvision, which describes its operators to torch's compiler when it is imported,
    ends with "operator torchvision::nms does not exist". Nothing here uses an operator: with the two schemas
    defined the rest, in pure Python, imports and works. Where torchvision can be imported, nothing is changed.
    """
    global _library
    try:
        importlib.import_module("torchvision")
    except RuntimeError as error:
        if "torchvision::nms" not in str(error):
            raise
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        _library = torch.library.Library("torchvision", "DEF")
        for operator in ("nms", "qnms"):
            _library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        importlib.import_module("torchvision")
