"""What several tests of this package pretend to have."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.embodied.pretend_device import GPU_BYTES, PretendDevice


def _on(tensor: Tensor, device: Any) -> Tensor:
    """A tensor that is asked for without a device is wherever the context has put it."""
    return tensor if device is None else tensor.to(device)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendDevice]:
    """A GPU for the length of a test."""

    class Stream:
        def synchronize(self) -> None:
            device.waits.append("synchronize")

    grouped = torch._C._group_tensors_by_device_and_dtype
    # The optimiser and the clipping group tensors by device in C++, which sees where they really are.
    monkeypatch.setattr(
        torch._C,
        "_group_tensors_by_device_and_dtype",
        lambda lists, *options: {(place_of(g[0]), k[1]): g for k, g in grouped(lists, *options).items()},
    )
    made = torch.tensor  # it alone is made behind the back of what watches operations
    monkeypatch.setattr(torch, "tensor", lambda data, device=None, **options: _on(made(data, **options), device))
    # The rest is what torch asks of a driver, and there is none.
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=GPU_BYTES))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Pretence")
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream())
    # Else `Module.to` would fill a plain parameter with what is not one.
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with PretendDevice() as device:
            yield device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


def place_of(group: Any) -> torch.device:
    """Of a group of tensors that C++ believes on the CPU."""
    return next(tensor.device for tensor in group[0] if tensor is not None)
