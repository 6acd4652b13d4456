"""Frozen matrices in 4 or 8 bits: the base of a low-rank adapter (QLoRA, Dettmers et al. 2023, arXiv 2305.14314).

A matrix is divided into blocks of 64 numbers, each with its largest magnitude. A number is stored as the index of the
nearest of 16 levels, which are quantiles of a normal distribution (`nf4`), or of 255 levels at equal distances
(`int8`), times that magnitude. The magnitudes of `nf4` are stored in 8 bits, in blocks of 256. Every product computes
with the dequantised matrix, in the type that the matrix had; the memory for it is free again after the product, and the
backward pass dequantises again. bitsandbytes quantises and dequantises, on CPUs and GPUs.

A rollout and an update compute with the same dequantised numbers: quantising adds nothing to the ratio of their
probabilities.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from policies.errors import PolicyError, shown

BASES = ("nf4", "int8")
BLOCK = 64
"""Numbers of a block; a matrix with a shorter side stays as it is, which saves next to nothing and is mostly a
projection of a state or an action."""
RELATIVE_ERROR = {"nf4": 0.092, "int8": 0.006}
"""Norm of what quantising changes, as a share of the matrix's, for numbers of a normal distribution."""
NESTED_BLOCK = 256
"""Magnitudes of a block of magnitudes."""
# PEFT imports bitsandbytes where that is installed, which then warns that a product for some CPUs, not used here, is
# absent.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
INSTALL = "pip install 'embodied-farm[quantised]'"
HANG_ONE = "set policy.options.lora_rank for a new one, or policy.options.adapter, or leave policy.base out"


def no_adapter(kind: str, base: str) -> str:
    """The beginning of a message about a policy that has no adapter."""
    return f"policy.base {base} is for a frozen base under an adapter, and the policy {kind} has none"


def check_base(base: str) -> None:
    """Raise `PolicyError` for an unknown type of base, and where bitsandbytes is not installed."""
    if base not in BASES:
        raise PolicyError(f"a base is of {' or '.join(BASES)}, got {shown(base)}")
    library()


def quantise(model: nn.Module, base: str) -> None:
    """Replace the frozen linear layers and embeddings of the model by quantised ones; layers that share a matrix share
    the quantised one. Raises `PolicyError` for a model without any."""
    check_base(base)
    used: dict[nn.Parameter, list[tuple[nn.Module, str, nn.Module]]] = {}
    for parent in model.modules():
        for name, layer in parent._modules.items():
            weight = None if layer is None else layer._parameters.get("weight")
            if layer is not None and weight is not None:
                used.setdefault(weight, []).append((parent, name, layer))
    found = {weight: places for weight, places in used.items() if all(_fits(layer) for *_, layer in places)}
    if not found:
        raise PolicyError(
            f"nothing can be quantised: the policy has no frozen linear layer of {BLOCK} by {BLOCK} numbers or more. "
            "Leave policy.base out"
        )
    for weight, places in found.items():
        matrix = QuantisedMatrix(weight.detach(), base)
        for parent, name, layer in places:
            kind = QuantisedLinear if isinstance(layer, nn.Linear) else QuantisedEmbedding
            setattr(parent, name, kind(layer, matrix))


def quantised_layers(model: nn.Module) -> Iterator[tuple[str, QuantisedLinear | QuantisedEmbedding]]:
    """The quantised layers by name; a layer that shares its matrix is one of them."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (QuantisedLinear, QuantisedEmbedding)):
            yield name, module


def dequantised_state(model: nn.Module) -> dict[str, Tensor]:
    """`state_dict` with each quantised matrix dequantised, under the name that it had."""
    state = model.state_dict()
    for name, layer in quantised_layers(model):
        for part in layer.matrix.state_dict():
            del state[f"{name}.matrix.{part}"]
        state[f"{name}.weight"] = layer.weight
    return state


def weight_dtype(layer: nn.Module) -> torch.dtype:
    """Type in which a linear layer or an embedding computes: its weight's, without dequantising it. An adapter may hang
    on it."""
    layer = getattr(layer, "base_layer", layer)
    if isinstance(layer, (QuantisedLinear, QuantisedEmbedding)):
        return layer.matrix.dtype
    return layer.weight.dtype  # type: ignore[return-value]


def count_weights(model: nn.Module) -> int:
    """Number of the model's weights; a quantised matrix has as many as before, in fewer bytes."""
    matrices = [module for module in model.modules() if isinstance(module, QuantisedMatrix)]
    stored = sum(p.numel() for matrix in matrices for p in matrix.parameters())
    return sum(p.numel() for p in model.parameters()) - stored + sum(math.prod(matrix.shape) for matrix in matrices)


class QuantisedMatrix(nn.Module):
    """A matrix [R, C] of the type `dtype`. Its parts are parameters without a gradient, so that whatever copies, moves
    or counts a policy's parameters does so with these; those of `state_dict` are no checkpoint's."""

    def __init__(self, weight: Tensor, base: str) -> None:
        super().__init__()
        functions = library()
        self.base, self.dtype, self.shape = base, weight.dtype, (weight.shape[0], weight.shape[1])
        parts: dict[str, Tensor]
        if base == "int8":
            codes, state = functions.quantize_blockwise(weight, code=_levels(weight.device), blocksize=BLOCK)
            parts = {"codes": codes, "largest": state.absmax}
        else:
            codes, state = functions.quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
            offset = state.absmax.mean()
            nested, nested_state = functions.quantize_blockwise(
                state.absmax - offset, code=dynamic_levels(weight.device), blocksize=NESTED_BLOCK
            )
            parts = {
                "codes": codes,
                "largest": nested,
                "largest_scale": nested_state.absmax,
                "largest_offset": offset.reshape(1),
            }
        for name, part in parts.items():
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))

    codes: nn.Parameter
    """uint8: the levels' indices, [R, C] of int8, [R C / 2, 1] of nf4, two in a byte."""
    largest: nn.Parameter
    """[R C / 64]: float32 magnitudes of the blocks; of nf4 uint8 indices."""
    largest_scale: nn.Parameter
    """Of nf4: float32 [R C / 64 / 256], the magnitudes of `largest`."""
    largest_offset: nn.Parameter
    """Of nf4: float32 [1], which `largest` are differences to."""

    def dequantised(self) -> Tensor:
        """[R, C] of `dtype`."""
        return self._numbers(self.codes, self._magnitudes(), self.shape)

    def rows(self, index: Tensor) -> Tensor:
        """[.., C]: the rows `index` (int64), without dequantising the others. C is a multiple of 64."""
        rows, columns = self.shape
        flat = index.flatten()
        codes = self.codes.view(rows, -1)[flat]
        largest = self._magnitudes().view(rows, -1)[flat]
        if self.base == "nf4":
            codes = codes.view(-1, 1)
        return self._numbers(codes, largest.flatten(), (len(flat), columns)).view(*index.shape, columns)

    def _magnitudes(self) -> Tensor:
        """float32 [R C / 64]."""
        if self.base == "int8":
            return self.largest
        library()
        found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
            self.largest, self.largest_scale, dynamic_levels(self.largest.device), NESTED_BLOCK, torch.float32
        )
        return found + self.largest_offset

    def _numbers(self, codes: Tensor, largest: Tensor, shape: tuple[int, int]) -> Tensor:
        library()  # whose operators these are
        if self.base == "int8":
            found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(
                codes, largest, _levels(codes.device), BLOCK, self.dtype
            )
            return found.view(shape)
        found = torch.ops.bitsandbytes.dequantize_4bit(codes, largest, BLOCK, self.base, shape, self.dtype)
        return found

    def extra_repr(self) -> str:
        return f"{self.base}, {self.shape[0]} x {self.shape[1]} of {self.dtype}"


class QuantisedLinear(nn.Linear):
    """A linear layer whose matrix is quantised; its bias is not."""

    def __init__(self, layer: nn.Module, matrix: QuantisedMatrix) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = matrix.shape
        self.matrix = matrix
        self.bias = layer.bias  # type: ignore[assignment]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[out, in] dequantised: for who reads the matrix of a linear layer."""
        return self.matrix.dequantised()

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = _Product.apply(input, self.matrix, self.bias)
        return found


class QuantisedEmbedding(nn.Embedding):
    """An embedding whose matrix is quantised; the rows that are looked up are dequantised."""

    def __init__(self, layer: nn.Module, matrix: QuantisedMatrix) -> None:
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = matrix.shape
        self.padding_idx = layer.padding_idx  # type: ignore[assignment]
        self.matrix = matrix

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """[rows, D] dequantised."""
        return self.matrix.dequantised()

    def forward(self, input: Tensor) -> Tensor:
        return self.matrix.rows(input)

    def extra_repr(self) -> str:
        return f"{self.num_embeddings}, {self.embedding_dim}"


class _Product(torch.autograd.Function):
    """x [.., in] to x W^T + b [.., out]. The backward pass dequantises W again: only its codes are kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: QuantisedMatrix, bias: Tensor | None) -> Tensor:
        ctx.matrix = matrix
        return functional.linear(x, matrix.dequantised(), bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (gradient,) = gradients
        of_x = gradient @ ctx.matrix.dequantised() if ctx.needs_input_grad[0] else None
        return of_x, None, gradient.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None


def _fits(layer: nn.Module) -> bool:
    """True for a frozen matrix of a plain linear layer, or of an embedding that looks rows up and does nothing else."""
    if type(layer) is nn.Embedding:
        plain = layer.max_norm is None and layer.embedding_dim % BLOCK == 0
    else:
        plain = type(layer) is nn.Linear
    return plain and not layer.weight.requires_grad and min(layer.weight.shape) >= BLOCK  # type: ignore[union-attr]


@cache
def library() -> Any:
    """`bitsandbytes.functional`. Raises `PolicyError` where it is not installed."""
    try:
        import bitsandbytes.functional as library
    except ImportError as error:
        raise PolicyError(f"numbers in 4 or 8 bits need bitsandbytes: {INSTALL} ({error})") from error
    return library


def _levels(device: torch.device) -> Tensor:
    """float32 [256]: the levels of int8, at equal distances."""
    return _on(device, "create_linear_map")


def dynamic_levels(device: torch.device, signed: bool = True) -> Tensor:
    """float32 [256]: levels that are closer together near zero, bitsandbytes' own for numbers of any distribution. Both
    1 and -1 are levels, so that the largest number of a block is stored as it is."""
    return _on(device, "create_dynamic_map", signed)


def _on(device: torch.device, levels: str, signed: bool = True) -> Tensor:
    """Levels by the name of their function, kept on each device that numbers are on."""
    kept = device if device.type != "meta" else torch.device("cpu")
    return _made(kept, levels, signed).to(device)


@cache
def _made(device: torch.device, levels: str, signed: bool) -> Tensor:
    with _disable_current_modes():  # in a mode that follows shapes alone they would be kept without their numbers
        found: Tensor = getattr(library(), levels)(signed=signed)
        if signed:
            found[0] = -1.0
        return found.to(device)
