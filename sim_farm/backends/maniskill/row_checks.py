"""Which operations of PyTorch give a row of a batch what they give it alone, bit for bit.

PyTorch's kernels work through vectors of numbers and then, one by one, through what is left. Some of them round
differently in the two parts, and into which part a number falls depends on the size of the batch. `ARITHMETIC` and
`OVER` list operations that do not, on any set of kernels (`ATEN_CPU_CAPABILITY`):
tests/sim_farm/test_maniskill_together.py compares batches of up to 32 rows. `by_rows` runs two others row by row.

`RowChecks` follows the operations of a computation and finds out whether a result comes from others than these, or from
one that mixes rows, such as a mean over all environments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def _names(listed: str) -> frozenset[str]:
    return frozenset(listed.split())


# Names of operations; one that works in place has a further underscore.
ARITHMETIC = _names(
    "add sub subtract rsub mul multiply div divide true_divide neg negative abs absolute maximum minimum clamp clip "
    "clamp_min clamp_max sqrt rsqrt reciprocal square sin cos tan asin arcsin acos arccos atan arctan tanh exp expm1 "
    "log log1p erf sign floor ceil round trunc lerp rad2deg deg2rad isnan isfinite isinf lt le gt ge eq ne less "
    "less_equal greater greater_equal not_equal logical_and logical_or logical_not logical_xor bitwise_and bitwise_or "
    "bitwise_not bitwise_xor __and__ __or__ __xor__ where masked_fill pow"
)
"""Element by element."""
OVER = _names(
    "any all max min argmax argmin sum mean prod linalg_norm linalg_vector_norm norm linalg_cross cross matmul mm bmm "
    "mv einsum"
)
"""Over other dimensions than that of the rows."""
PLACING = _names(
    "select slice index index_put _index_put_impl cat concat concatenate hstack vstack stack clone detach alias view "
    "reshape _unsafe_view _reshape_alias expand expand_as broadcast_to repeat unbind unsqueeze squeeze permute "
    "transpose t numpy_T movedim flip split split_with_sizes chunk narrow gather index_select to _to_copy contiguous "
    "type_as lift_fresh lift copy fill zero zeros ones full empty arange eye scalar_tensor zeros_like ones_like "
    "full_like empty_like new_zeros new_ones new_full new_empty"
)
"""Nothing is computed."""
KNOWN = ARITHMETIC | OVER | PLACING
REDUCING = _names("any all max min argmax argmin sum mean prod linalg_norm linalg_vector_norm norm")
PRODUCTS = _names("matmul mm bmm mv einsum")
READ = _names("_local_scalar_dense is_nonzero item")
"""What a number is read by, for instance to go by it."""
EXPONENTS = (0.5, 1, 2, 3)
"""Those of `pow` that are computed by multiplications and roots."""
FEW = 4
"""So many numbers have the same sum wherever they lie in memory, and in any product of matrices as small. Products with
16 columns are summed in an order that depends on the number of rows."""


class apart:
    """Within the block operations are of one row, whatever they are."""

    depth = 0

    def __enter__(self) -> None:
        apart.depth += 1

    def __exit__(self, *_: Any) -> None:
        apart.depth -= 1


@contextmanager
def by_rows() -> Iterator[None]:
    """Within the block `torch.atan2` and `torch.sigmoid` compute row by row."""
    stock = torch.atan2, torch.sigmoid
    torch.atan2, torch.sigmoid = map(_row_by_row, stock)
    try:
        yield
    finally:
        torch.atan2, torch.sigmoid = stock


def _row_by_row(function: Callable[..., Any]) -> Any:
    def each(*args: Any) -> Any:
        rows = len(args[0]) if args[0].dim() else 0
        if not rows or any(arg.shape != args[0].shape for arg in args):
            return function(*args)
        with apart():
            return torch.cat([function(*(arg[i : i + 1] for arg in args)) for i in range(rows)])

    return each


class RowChecks(TorchDispatchMode):
    """Follows what is computed within the block, for a batch of `count` rows."""

    active: ClassVar[RowChecks | None] = None

    def __init__(self, count: int) -> None:
        super().__init__()
        self._count = count
        self._doubts: dict[int, str] = {}
        """Memory of tensors that may not be, row by row, what they would be alone; and why."""
        self._rows: set[int] = set()
        """Memory of tensors that have a row for each environment."""
        self._kept: list[torch.Tensor] = []
        self.doubt = ""
        """Why a result may be another one alone; empty: it is not."""

    def __enter__(self) -> RowChecks:
        RowChecks.active = self
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        RowChecks.active = None
        super().__exit__(exc_type, exc_val, exc_tb)

    def mark(self, tensor: torch.Tensor) -> None:
        """The tensor has a row for each environment."""
        self._rows.add(_memory(tensor))
        self._kept.append(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = list(_tensors((args, kwargs or {})))
        name = func._schema.name.split(":")[-1]
        doubt = next((self._doubts[_memory(one)] for one in given if _memory(one) in self._doubts), "")
        doubt = doubt or ("" if apart.depth else self._doubt_about(name, args, given))
        result = func(*args, **(kwargs or {}))
        if doubt and name in READ:
            self.doubt = self.doubt or doubt  # what comes next depends on it
        rows = any(_memory(one) in self._rows for one in given)
        for one in _tensors(result):
            if rows and one.dim() and len(one) == self._count:
                self.mark(one)
            if doubt:
                self._doubts[_memory(one)] = doubt
                self._kept.append(one)
        return result

    def _doubt_about(self, name: str, args: Any, given: Sequence[torch.Tensor]) -> str:
        plain = name.rstrip("_") if not name.startswith("__") else name
        if plain in READ:
            return ""
        if plain not in KNOWN:
            return f"torch's `{plain}` may round differently in a batch"
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if plain == "pow" and not (len(args) > 1 and args[1] in EXPONENTS):
            return "torch's `pow` may round differently in a batch"
        if plain in PRODUCTS and any(size > FEW for one in given for size in self._row_shape(one)):
            return f"torch's `{plain}` of matrices of more than {FEW} may round differently in a batch"
        if first is None or plain not in REDUCING or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
            return ""
        dims = _reduced(plain, args, first.dim())
        if _memory(first) in self._rows and first.dim() and len(first) == self._count and 0 in dims:
            return f"torch's `{plain}` is taken over all environments"
        size = 1
        for dim in dims:
            size *= first.shape[dim]
        in_order = first.is_contiguous() and dims == list(range(first.dim() - len(dims), first.dim()))
        if plain in ("sum", "mean", "prod") and size > FEW and not in_order:
            return f"torch's `{plain}` of {size} numbers may round differently in a batch"
        return ""

    def _row_shape(self, tensor: torch.Tensor) -> Sequence[int]:
        return tensor.shape[1:] if tensor.dim() and len(tensor) == self._count else tensor.shape


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which has a row for each environment."""
    if RowChecks.active is not None:
        RowChecks.active.mark(tensor)
    return tensor


def result(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, which is one of the results that `RowChecks` looks at."""
    checks = RowChecks.active
    if checks is not None:
        checks.doubt = checks.doubt or checks._doubts.get(_memory(tensor), "")
    return tensor


def _reduced(name: str, args: Any, dims: int) -> list[int]:
    """Dimensions that a reduction is taken over. Norms have their order first."""
    place = 2 if name in ("linalg_norm", "linalg_vector_norm", "norm") else 1
    given = args[place] if len(args) > place else None
    if given is None or given == []:
        return list(range(dims))
    return sorted(dim % dims for dim in (given if isinstance(given, (list, tuple)) else [given]))


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _tensors(data: Any) -> Iterator[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, dict):
        yield from _tensors(tuple(data.values()))
    elif isinstance(data, (list, tuple)):
        for one in data:
            yield from _tensors(one)
