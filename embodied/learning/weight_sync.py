"""Weight sync: the learner publishes its weights, policy workers load them.

    the learner's own policy object         nothing is done
    another policy in the learner's process copied from the learner's tensors
    another process                         shared memory, written once and mapped by every reader
    another process on the same GPU         the learner's tensors, mapped there (CUDA IPC) and copied
    other GPUs of the machine               a broadcast to all of them (`weight_group`)
    another machine                         Ray

Names, shapes and types are checked before a tensor is taken: a policy has the new weights as a whole or keeps the old
ones, and either all that receive a broadcast load it or none.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from embodied.devices import CPU, await_devices, device_of
from embodied.errors import PeerFailed, UserError
from embodied.learning.weight_group import GpuTensors, WeightGroup, gpu_name, share_on_gpu
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ranks import LOOPBACK
from policies.contract import Policy

LISTED = 3
"""Number of names of each kind in a message."""


# --- weights of a policy


class WrongWeights(UserError):
    """Weights of another policy."""


def trained(policy: Policy) -> dict[str, Tensor]:
    """The tensors that a learner publishes of such a policy: trained parameters and buffers, by name."""
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    return {name: tensor for name, tensor in policy.state_dict(keep_vars=True).items() if name not in frozen}


def check_weights(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Raise `WrongWeights`, which names them, unless these are all of the policy's trained tensors and no others."""
    own = trained(policy)
    wrong = [
        *_listed("missing", sorted(own.keys() - state.keys())),
        *_listed("unknown", sorted(state.keys() - own.keys())),
        *(
            f"{name} is {_kind(state[name])} instead of {_kind(tensor)}"
            for name, tensor in own.items()
            if name in state and _kind(state[name]) != _kind(tensor)
        ),
    ]
    if wrong:
        raise WrongWeights(
            f"the published weights are not the acting policy's: {'; '.join(wrong[: 2 * LISTED])}. The old ones are "
            "kept; make both policies from the same configuration, with the same version of the software"
        )


def map_weights(policy: Policy, state: Mapping[str, Tensor]) -> None:
    """Have the policy compute with these very tensors, where it computes on the CPU; else copy them to its device."""
    own = trained(policy)
    for name, tensor in own.items():
        if tensor.device == CPU:
            tensor.data = state[name]
        else:
            tensor.data.copy_(state[name], non_blocking=True)
    await_devices(own.values())


def _listed(what: str, names: Sequence[str]) -> list[str]:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return [f"{what} {', '.join(names[:LISTED])}{more}"] if names else []


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


# --- transports


class Transport(Enum):
    """Transport of weights from the learner to a policy worker."""

    REFERENCE = "by reference"
    SHARED_MEMORY = "shared memory"
    """The host's: written once, read by all."""
    GPU_MEMORY = "GPU memory"
    """The learner's tensors, mapped by the other process (CUDA IPC) and copied on the GPU."""
    BROADCAST = "broadcast"
    """From GPU to GPUs, to all at once (NCCL)."""
    RAY = "Ray, between machines"


ON_GPUS = (Transport.GPU_MEMORY, Transport.BROADCAST)
"""Transports that do not pass through the host's memory."""


@dataclass(frozen=True)
class Location:
    """The process, the GPU and the machine of a policy."""

    process: int
    """The system's id of the process."""
    device: str = ""
    """The GPU's name, the same in every process; '' for the host's memory."""
    node: str = ""
    """Id of the cluster's node; '' for the machine that the run was started on."""

    @classmethod
    def of(cls, policy: Policy) -> Location:
        """Location of a policy of this process."""
        return cls(os.getpid(), gpu_name(device_of(policy)))


def transport_between(source: Location, target: Location) -> Transport:
    """The shortest transport from a learner to a policy worker."""
    if source.node != target.node:
        return Transport.RAY
    if source.process == target.process:
        return Transport.REFERENCE
    if not source.device or not target.device:
        return Transport.SHARED_MEMORY
    return Transport.GPU_MEMORY if source.device == target.device else Transport.BROADCAST


def transports_to(source: Location, targets: Sequence[Location]) -> tuple[Transport, ...]:
    """The transport to each of several policy workers.

    If one needs a copy in the host's memory, all others of the machine read it: the copy is there anyway, and one
    transport is waited for instead of two.
    """
    found = tuple(transport_between(source, target) for target in targets)
    if Transport.RAY in found:
        return tuple(Transport.SHARED_MEMORY if each in ON_GPUS else each for each in found)
    return (Transport.SHARED_MEMORY,) * len(found) if Transport.SHARED_MEMORY in found else found


# --- the two ends


class WeightsPublisher:
    """The learner's part of weight sync."""

    policy: Policy
    _receivers: WeightGroup | None = None
    """Connections to the policy workers that weights are broadcast to."""
    _shared: Mapping[str, Tensor] | None = None
    """Tensors that other processes on this GPU may map."""

    def weights(self) -> dict[str, Tensor]:
        raise NotImplementedError

    def location(self) -> Location:
        """Its process and its GPU."""
        return Location.of(self.policy)

    def open_broadcast(self, names: tuple[str, ...], host: str = LOOPBACK) -> str:
        """Accept the policy workers that weights are broadcast to, at this machine's address `host`.

        `names` are the learner's and theirs. Returns HOST:PORT for `join_broadcast`.
        """
        self._receivers = WeightGroup(size=len(names), device=device_of(self.policy), names=names)
        return self._receivers.listen(host)

    def join_broadcast(self, address: str, timeout_s: float) -> None:
        """Connect to them. Raises `PeerFailed`, which names both ends, where not all are there in time."""
        assert self._receivers is not None, "open_broadcast comes first"
        self._receivers.join(address, timeout_s)

    def publish_weights(self, shares: bool) -> GpuTensors | None:
        """Broadcast the weights to the policy workers that have joined. With `shares`, also share them with other
        processes on this GPU until `release_shared`."""
        try:
            tensors = self.weights()
        except BaseException:
            self.close_broadcast()  # receivers need not wait for their deadline
            raise
        if self._receivers is not None:
            self._receivers.send(tensors)
        if not shares:
            return None
        device = device_of(self.policy)
        self._shared = {name: tensor.to(device) for name, tensor in tensors.items()}
        return share_on_gpu(self._shared)

    def share_sample(self) -> GpuTensors:
        """A number on the GPU, shared until `release_shared`."""
        self._shared = {"sample": torch.zeros(1, device=device_of(self.policy))}
        return share_on_gpu(self._shared)

    def release_shared(self) -> None:
        """Free what was shared; every reader has its copy."""
        self._shared = None

    def close_broadcast(self) -> None:
        """Close the connections to the policy workers that weights are broadcast to."""
        if self._receivers is not None:
            self._receivers.leave()


class WeightsLoader:
    """A policy worker's part of weight sync."""

    _publisher: WeightGroup | None = None
    """Connections to the learner and to the other receivers of its broadcasts."""

    @property
    def policy(self) -> Policy:
        raise NotImplementedError

    def load_weights(self, state: Mapping[str, Tensor], version: int) -> None:
        raise NotImplementedError

    def at_version(self, version: int) -> None:
        raise NotImplementedError

    def location(self) -> Location:
        """Its process and its GPU."""
        return Location.of(self.policy)

    def join_broadcast(self, address: str, rank: int, names: tuple[str, ...], timeout_s: float) -> None:
        """Connect to the learner at `address` as member `rank` of those named. Rank 0 is the learner's: do nothing."""
        if rank:
            device = device_of(self.policy)
            self._publisher = WeightGroup(rank=rank, size=len(names), device=device, names=names)
            self._publisher.join(address, timeout_s)

    def can_map(self, sample: GpuTensors | None) -> bool:
        """True if this process can map the tensors that the learner shares, or there are none."""
        if sample is None:
            return True
        try:
            sample.mapped()
        except UserError:
            return False
        return True

    def load_published(self, shared: GpuTensors | None, version: int) -> None:
        """Load the weights that the learner shares on this GPU, or, without, those that it broadcasts.

        Raises `WrongWeights` unless they are exactly the policy's, and `PeerFailed` where another receiver has not got
        them. The old weights are then kept.
        """
        policy = self.policy
        if shared is None:
            assert self._publisher is not None, "join_broadcast comes first"
            state: Any = self._publisher.receive(lambda layout: check_weights(policy, layout))
        else:
            state = shared.mapped()
        self.load_weights(state, version)
        await_devices(state.values())  # afterwards the learner may change its own


# --- the sync of a run


@dataclass(frozen=True)
class WeightSync:
    """Weight sync from a learner to all policy workers of a run."""

    learner: WorkerGroup[Any]
    """`WeightsPublisher`s: the learner's ranks."""
    sharing: WorkerGroup[Any]
    """Policy workers that compute with the policy of the learner's rank in their process."""
    separate: WorkerGroup[Any]
    """Policy workers (`WeightsLoader`) that share no learner's policy."""
    transports: tuple[Transport, ...]
    """To each of the separate ones."""
    nodes: int
    """Number of machines that the separate ones are on."""

    @classmethod
    def connect(
        cls,
        learner: WorkerGroup[Any],
        policies: WorkerGroup[Any],
        *,
        learner_node: str,
        sharing: Sequence[int],
        nodes: Mapping[int, str],
        timeout_s: float,
    ) -> WeightSync:
        """Choose the transports and open their connections; later waits end after `timeout_s`.

        `sharing` are the ranks of policy workers that compute with the learner's own policy, `nodes` the machine of
        each other one by rank. Raises `PeerFailed`, which names
        both ends, where two do not find each other.
        """
        separate = policies.some(nodes)
        transports: tuple[Transport, ...] = ()
        if nodes:
            source = replace(learner.call_one(0, WeightsPublisher.location), node=learner_node)
            found = separate.call_all(WeightsLoader.location)
            targets = [replace(each, node=node) for each, node in zip(found, nodes.values(), strict=True)]
            transports = transports_to(source, targets)
            if Transport.GPU_MEMORY in transports and not _can_map(learner, separate, transports):
                transports = (Transport.SHARED_MEMORY,) * len(transports)
        sync = cls(learner, policies.some(sharing), separate, transports, len(set(nodes.values())))
        sync._connect_broadcast(timeout_s)
        return sync

    @property
    def path(self) -> str:
        """Transports of the weights, in words."""
        same = "the same policy"
        if not self.transports:
            return same
        if self.transports[0] in ON_GPUS:
            counts = Counter(self.transports).items()
            path = " and ".join(f"{transport.value} to {count}" for transport, count in counts)
        else:
            path = self.separate.path_from(self.learner.first())
            if self.separate.size > 1:
                path += f", one copy {'on each node ' if self.nodes > 1 else ''}for {self.separate.size} replicas"
        return f"{path}; {same} for {self.sharing.size}" if self.sharing.size else path

    def publish(self, version: int) -> None:
        """Load the learner's weights, of `version` updates, into all policy workers. The learner is called once."""
        if self.transports:
            # The other ranks take part where shards are gathered, and return nothing.
            others = [self.learner.submit_one(rank, WeightsPublisher.weights) for rank in range(1, self.learner.size)]
            if self.transports[0] in ON_GPUS:
                self._publish_on_gpus(version, others)
            else:
                source = self.learner.first()
                loaded = self.separate.pipe(WeightsLoader.load_weights, source, WeightsPublisher.weights, version)
                for rank, reference in enumerate(others, 1):
                    self.learner.get_one(rank, reference)
                self.separate.get(loaded)
        self.sharing.call_all(WeightsLoader.at_version, version)

    def _publish_on_gpus(self, version: int, others: list[Any]) -> None:
        shares = Transport.GPU_MEMORY in self.transports
        published: Any = self.learner.submit_one(0, WeightsPublisher.publish_weights, shares)
        shared = [published if each is Transport.GPU_MEMORY else None for each in self.transports]
        loaded = self.separate.submit_scattered(WeightsLoader.load_published, [(each, version) for each in shared])
        self._await([published, *others], loaded)
        if shares:
            self.learner.call_one(0, WeightsPublisher.release_shared)

    def _connect_broadcast(self, timeout_s: float) -> None:
        receivers = [rank for rank, each in enumerate(self.transports) if each is Transport.BROADCAST]
        if not receivers:
            return
        names = (self.learner.handles[0].name, *(self.separate.handles[rank].name for rank in receivers))
        address = self.learner.call_one(0, WeightsPublisher.open_broadcast, names)
        joining: Any = self.learner.submit_one(0, WeightsPublisher.join_broadcast, address, timeout_s)
        members = [receivers.index(rank) + 1 if rank in receivers else 0 for rank in range(self.separate.size)]
        arguments = [(address, member, names, timeout_s) for member in members]
        self._await([joining], self.separate.submit_scattered(WeightsLoader.join_broadcast, arguments))

    def _await(self, published: list[Any], loaded: list[Any]) -> None:
        """Wait for both ends. A failure of their own is raised rather than `PeerFailed`, which follows from it."""
        lost: PeerFailed | None = None
        try:
            self.separate.get(loaded)
        except PeerFailed as error:
            lost = error
        for rank, reference in enumerate(published):
            try:
                self.learner.get_one(rank, reference)
            except PeerFailed as error:
                lost = lost or error
        if lost is not None:
            raise lost


def _can_map(learner: WorkerGroup[Any], separate: WorkerGroup[Any], transports: Sequence[Transport]) -> bool:
    """True if the processes on the learner's GPU can map what it shares: containers and allocators may forbid it."""
    sample = learner.call_one(0, WeightsPublisher.share_sample)
    try:
        each = [(sample if transport is Transport.GPU_MEMORY else None,) for transport in transports]
        return all(separate.scatter(WeightsLoader.can_map, each))
    finally:
        learner.call_one(0, WeightsPublisher.release_shared)
