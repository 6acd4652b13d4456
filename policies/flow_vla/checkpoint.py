"""Weights of a flow-matching model's directory, by the names of the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from policies.contract import PolicyError
from policies.files import Shards
from policies.lerobot.buffers import BUFFERS


def stored_names(shards: Shards, own_name: Callable[[str], str]) -> dict[str, str]:
    """The files' name of each tensor that is no statistic of LeRobot's, by the network's name. Raises `PolicyError` for
    a tensor that is there twice."""
    stored = [name for name in shards.files if not BUFFERS.match(name)]
    names = {own_name(name): name for name in stored}
    if len(names) < len(stored):
        raise PolicyError(f"{shards.folder} holds a tensor more than once, under names of several layouts")
    return names


def read_named(
    shards: Shards, names: Mapping[str, str], expected: Mapping[str, Tensor], stored_name: Callable[[str], str]
) -> dict[str, Tensor]:
    """The tensors expected, by the network's names, of which `names` gives those in the files and `stored_name` what
    the missing ones are called. Raises `PolicyError` unless the files have exactly these, beside statistics."""
    wanted = {names.get(own, stored_name(own)): tensor for own, tensor in expected.items()}
    found = shards.read(wanted, unread=[name for name in shards.files if BUFFERS.match(name)])
    return {own: found[names[own]] for own in expected}
