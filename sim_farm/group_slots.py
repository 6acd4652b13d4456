"""The rows of the slots of one group of environments, read and written as views, without an index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.contract import UInt8
from sim_farm.layout import FarmSpec

Slots = Mapping[str, npt.NDArray[Any]]


class GroupSlots:
    """Views of a group's B rows, made once. An index array would cost more than a small array's copy."""

    def __init__(self, spec: FarmSpec, slots: Slots, group: int) -> None:
        # As `FarmSpec.group_of`: environments are dealt out to the physics workers first, then to the groups.
        share = spec.groups * spec.physics_workers
        dealt = (spec.num_envs // share, spec.groups, spec.physics_workers)
        self.envs: npt.NDArray[np.int64] = np.arange(spec.num_envs).reshape(dealt)[:, group].ravel()
        """[B] the group's environments, in the order of its rows."""
        self._shapes = {
            name: (len(self.envs), *array.shape[1:]) for name, array in slots.items() if len(array) == spec.num_envs
        }
        self._views = {name: slots[name].reshape(*dealt, *shape[1:])[:, group] for name, shape in self._shapes.items()}
        self._instructions: tuple[bytes, tuple[str, ...]] = b"", ()

    def view(self, name: str) -> npt.NDArray[Any]:
        """The group's rows where they lie: [B / physics workers, physics workers, ...]."""
        return self._views[name]

    def get(self, name: str) -> npt.NDArray[Any]:
        """A copy of the group's rows [B, ...]."""
        return self._views[name].copy().reshape(self._shapes[name])

    def put(self, name: str, rows: npt.NDArray[Any]) -> None:
        """Write the group's rows [B, ...]."""
        view = self._views[name]
        view[...] = rows.reshape(view.shape)

    def fill(self, name: str, value: int) -> None:
        """Write one value into all of the group's rows."""
        self._views[name][...] = value

    def instructions(self) -> tuple[str, ...]:
        """[B] the instructions, decoded only where one has changed since the last call."""
        data = self._views["instruction"].tobytes()
        if data != self._instructions[0]:
            self._instructions = data, texts(self.get("instruction"))
        return self._instructions[1]


def texts(rows: UInt8) -> tuple[str, ...]:
    """The texts that rows of UTF-8 bytes hold, up to the zeros at their ends."""
    return tuple(bytes(row).rstrip(b"\0").decode() for row in rows)
