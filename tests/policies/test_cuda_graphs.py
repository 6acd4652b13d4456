"""What can be seen without a GPU: arguments are taken apart and put together, and calls go straight to the function.

Recording and replay are measured, and compared to the last bit, by `python benchmarks/gpu.py --only graph`.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from policies.cuda_graphs import forget, put_together, replayed, taken_apart


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: tuple[Tensor, int]


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    @replayed
    def doubled(self, pair: Pair, *, more: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """As it says."""
        return {"sum": self.weight * (pair.first + pair.second[0] * pair.second[1]), **(more or {})}


def test_nested_values_are_put_together_as_they_were() -> None:
    value = ((Pair(torch.ones(2), (torch.zeros(3), 4)), None), {"a": [torch.arange(2)], "b": "text", "c": {}})
    tensors, shape = taken_apart(value)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 0, 0], [0, 1]]
    again = put_together([tensor + 1 for tensor in tensors], shape)
    assert again[0][0].first.tolist() == [2, 2] and again[0][0].second[1] == 4 and again[0][1] is None
    assert isinstance(again[1]["a"], list) and again[1]["a"][0].tolist() == [1, 2]
    assert again[1]["b"] == "text" and again[1]["c"] == {}


def test_a_shape_tells_calls_apart_that_need_recordings_of_their_own() -> None:
    shapes = [taken_apart(value)[1] for value in ((torch.ones(1), None), (None, torch.ones(1)), (torch.ones(1), 2))]
    assert len(set(shapes)) == 3
    assert taken_apart((torch.ones(1), 2))[1] == taken_apart((torch.zeros(5), 2))[1]
    with pytest.raises(TypeError):
        hash(taken_apart({"a": {1, 2}})[1])


@pytest.mark.parametrize("gradients", [True, False])
def test_without_a_gpu_or_with_gradients_the_function_runs_as_it_is(gradients: bool) -> None:
    module, pair = Doubling(), Pair(torch.ones(2), (torch.ones(2), 3))
    with torch.set_grad_enabled(gradients):
        for _ in range(3):
            assert module.doubled(pair, more={"x": torch.ones(1)})["sum"].tolist() == [8, 8]
    assert module.doubled(pair)["sum"].requires_grad
    assert Doubling.doubled.__doc__ == "As it says."
    forget(module)
    assert (
        copy.deepcopy(module).doubled(pair)["sum"].tolist()
        == pickle.loads(pickle.dumps(module)).doubled(pair)["sum"].tolist()
    )
