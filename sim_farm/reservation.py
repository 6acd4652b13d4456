"""What a farm needs before a worker is started: tasks that fit together, and memory, all of it or none."""

from __future__ import annotations

from collections.abc import Sequence

from sim_farm.contract import FarmError, TaskInfo
from sim_farm.frame_memory import FrameMemory, nbytes_of
from sim_farm.hosts import Host
from sim_farm.layout import FarmSpec, slot_fields
from sim_farm.memory import Block, require, size_of
from sim_farm.worker_memory import BELL


def reserve(
    specs: Sequence[FarmSpec], infos: Sequence[TaskInfo], shared: bool, frame_rows: int | None
) -> tuple[list[Block], Block, FrameMemory | None]:
    """Each task's slots, the client's bell, and the frame memory where there are cameras; of `frame_rows`, or with two
    rows for every environment.

    Raises `FarmError`, before any is taken, unless all of it fits.
    """
    cameras, size = len(infos[0].cameras), infos[0].spec.image_size
    rows = 2 * sum(spec.num_envs for spec in specs) if frame_rows is None else frame_rows
    fields = [slot_fields(spec, info) for spec, info in zip(specs, infos, strict=True)]
    if shared:
        needs = {"the farm's slots": sum(size_of(each) for each in fields)}
        if cameras:
            needs[f"the frame memory ({rows:,} rows of {cameras} x {size} x {size} pixels)"] = nbytes_of(
                rows, cameras, size
            )
        require(needs)
    frames = FrameMemory.create(rows, cameras, size, shared) if cameras else None
    return [Block.create(each, shared) for each in fields], Block.create(BELL, shared), frames


def check_lengths(tasks: int, hosts: Sequence[Host], cores: Sequence[tuple[int | None, ...]]) -> None:
    """Raise `FarmError` unless there are hosts and cores for the tasks, and hosts of one kind."""
    if len(hosts) != tasks or (cores and len(cores) != tasks):
        raise FarmError(
            f"a farm of {tasks} tasks takes one host or {tasks}, and cores for none or for each task; got "
            f"{len(hosts)} hosts and cores for {len(cores)} tasks"
        )
    if len({host.shared for host in hosts}) > 1:
        raise FarmError("the workers of a farm are all in this process, or none is: give hosts of one kind")


def check_alike(infos: Sequence[TaskInfo]) -> None:
    """Raise `FarmError` where the tasks cannot share one policy and one frame memory."""
    first = infos[0]
    for other in infos[1:]:
        for what, one, two, remedy in (
            ("actions of size", first.action_dim, other.action_dim, "choose a control mode with as many in both"),
            ("cameras:", len(first.cameras), len(other.cameras), "name as many cameras for both"),
            ("an image size of", first.spec.image_size, other.spec.image_size, "give both the same image_size"),
        ):
            if one != two:
                raise FarmError(
                    f"{first.spec.name} has {what} {one} and {other.spec.name} has {what} {two}, and the tasks of one "
                    f"farm share them: {remedy}, or train the tasks in runs of their own"
                )
