"""The two ends of the ways between GPUs: what a learner and who acts do to hand weights over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from embodied.devices import await_devices, device_of
from embodied.errors import UserError
from embodied.learning.gpu_memory import GpuTensors, gpu_name, show
from embodied.learning.weight_ways import End
from embodied.learning.weights import check_weights
from embodied.learning.weights_group import WeightsGroup
from embodied.runtime.ranks import LOOPBACK
from policies.contract import Policy


class WeightsSource:
    """Of a learner."""

    policy: Policy
    _takers: WeightsGroup | None = None
    """Connections to those that weights are broadcast to."""
    _shown: Mapping[str, Tensor] | None = None
    """What others of its GPU may map."""

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def whereabouts(self) -> End:
        """Its process and its GPU."""
        return _end(self.policy)

    def listen_for_weights(self, names: tuple[str, ...], host: str = LOOPBACK) -> str:
        """Wait at this machine's address for those that weights are broadcast to; `names` are the learner's and theirs.
        HOST:PORT for `join_for_weights`."""
        self._takers = WeightsGroup(size=len(names), device=device_of(self.policy), names=names)
        return self._takers.listen(host)

    def join_for_weights(self, address: str, timeout_s: float) -> None:
        """Connect to them. Raises `PeerFailed`, which names both ends, where they are not all there in time."""
        assert self._takers is not None, "listen_for_weights says where"
        self._takers.join(address, timeout_s)

    def hand_out(self, shows: bool) -> GpuTensors | None:
        """Broadcast the weights to those that have joined, and show them to others of this GPU until `withdraw`."""
        try:
            tensors = self.weights()
        except BaseException:
            self.leave_takers()  # they need not wait until it is late
            raise
        if self._takers is not None:
            self._takers.send(tensors)
        if not shows:
            return None
        device = device_of(self.policy)
        self._shown = {name: tensor.to(device) for name, tensor in tensors.items()}
        return show(self._shown)

    def show_sample(self) -> GpuTensors:
        """A number on its GPU, shown to others there until `withdraw`."""
        self._shown = {"sample": torch.zeros(1, device=device_of(self.policy))}
        return show(self._shown)

    def withdraw(self) -> None:
        """What was shown has been copied."""
        self._shown = None

    def leave_takers(self) -> None:
        """Close the connections to those that weights are broadcast to."""
        if self._takers is not None:
            self._takers.leave()


class WeightsTarget:
    """Of who acts."""

    _source: WeightsGroup | None = None
    """Connections to the learner and to others that it broadcasts to."""

    @property
    def policy(self) -> Policy:
        raise NotImplementedError

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    def whereabouts(self) -> End:
        """Its process and its GPU."""
        return _end(self.policy)

    def join_for_weights(self, address: str, rank: int, names: tuple[str, ...], timeout_s: float) -> None:
        """Connect to the learner at `address` as member `rank` of those named; rank 0, the learner's: not at all."""
        if rank:
            device = device_of(self.policy)
            self._source = WeightsGroup(rank=rank, size=len(names), device=device, names=names)
            self._source.join(address, timeout_s)

    def can_map(self, sample: GpuTensors | None) -> bool:
        """Whether this process can map what the learner shows; without anything to map, it can."""
        if sample is None:
            return True
        try:
            sample.mapped()
        except UserError:
            return False
        return True

    def take_weights(self, shown: GpuTensors | None, version: int) -> None:
        """Take weights that the learner shows on this GPU, or, without, broadcasts.

        Raises `WrongWeights` unless they are exactly the policy's, and `PeerFailed` where somebody else has not got
        them. Those that it had are then kept.
        """
        policy = self.policy
        if shown is None:
            assert self._source is not None, "it has not joined"
            state: Any = self._source.receive(lambda layout: check_weights(policy, layout))
        else:
            state = shown.mapped()
        self.load_weights(state, version)
        await_devices(state.values())  # from here on the learner may change its own


def _end(policy: Policy) -> End:
    return End(os.getpid(), gpu_name(device_of(policy)))
