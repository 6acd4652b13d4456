"""Adam without `torch.compile`: the same steps, and a second less before the first.

PyTorch wraps five methods of its optimisers so that compiled code calls them uncompiled. The first call of each wrapper
imports the compiler, which takes more than a second of CPU time and 70 MB. Nothing here is compiled.
"""

from __future__ import annotations

from inspect import unwrap

import torch
from torch.optim import Adam, Optimizer


class EagerAdam(Adam):
    """`torch.optim.Adam` with the methods that PyTorch's wrappers call."""

    add_param_group = unwrap(Optimizer.add_param_group)
    zero_grad = unwrap(Optimizer.zero_grad)
    state_dict = unwrap(Optimizer.state_dict)
    load_state_dict = unwrap(Optimizer.load_state_dict)
    step = torch.no_grad()(unwrap(Adam.step))
