"""Shared arrays: laid out the same for all who attach, filled, and gone when their creator is."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sim_farm.contract import FarmError
from sim_farm.shared_memory.memory import FOLDER, MAGIC, PREFIX, Block, Field

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {
    "bells": Field((3,), "int32", 0),
    "reward": Field((2, 5), "float32", float("nan")),
    "empty": Field((4, 0), "float32", 1),
    "ticket": Field((7,), "int64", -1),
    "frames": Field((2, 1, 3, 3, 3), "uint8"),
}


@pytest.fixture(params=[True, False], ids=["shared", "own"])
def block(request: pytest.FixtureRequest) -> Iterator[Block]:
    with closing(Block.create(FIELDS, shared=request.param)) as block:
        yield block


def test_arrays_have_their_shape_kind_and_a_cache_line_of_their_own(block: Block) -> None:
    begins = []
    for name, field in FIELDS.items():
        array = block.arrays[name]
        assert array.shape == field.shape and array.dtype == np.dtype(field.dtype)
        assert array.flags.writeable and array.flags.c_contiguous
        begins.append(array.ctypes.data)
    if block.name is not None:
        assert all(begin % 64 == 0 for begin, field in zip(begins, FIELDS.values(), strict=True) if field.nbytes)
    assert all((begin - begins[0]) % 64 == 0 for begin in begins), "two arrays share a cache line"


def test_arrays_do_not_overlap(block: Block) -> None:
    for number, array in enumerate(block.arrays.values()):
        array.view(np.uint8)[...] = number
    for number, array in enumerate(block.arrays.values()):
        assert (array.view(np.uint8) == number).all()


def test_fresh_arrays_hold_their_fill_or_the_magic_value(block: Block) -> None:
    assert (block.arrays["bells"] == 0).all() and (block.arrays["ticket"] == -1).all()
    assert np.isnan(block.arrays["reward"]).all()
    assert (block.arrays["frames"] == MAGIC).all()


def test_an_attached_process_sees_what_others_write() -> None:
    with closing(Block.create(FIELDS, shared=True)) as block, closing(Block.attach(FIELDS, str(block.name))) as other:
        block.arrays["reward"][1] = np.arange(5)
        other.arrays["frames"][1, 0, 2] = 7
        assert np.array_equal(other.arrays["reward"][1], np.arange(5))
        assert (block.arrays["frames"][1, 0, 2] == 7).all() and block.arrays["frames"][0, 0, 0, 0, 0] == MAGIC


def test_the_creators_close_removes_the_name_and_an_attached_ones_does_not() -> None:
    block = Block.create(FIELDS, shared=True)
    file = FOLDER / str(block.name)
    assert file.name.startswith(PREFIX) and file.stat().st_mode & 0o077 == 0, "others may read the memory"
    Block.attach(FIELDS, file.name).close()
    assert file.exists()
    block.close()
    block.close()
    assert not file.exists() and not block.arrays


def test_an_attached_process_that_ends_leaves_the_memory() -> None:
    code = f"""
from sim_farm.shared_memory.memory import Block, Field
fields = {FIELDS!r}
block = Block.attach(fields, NAME)
block.arrays["ticket"][3] = 42
""".replace("nan)", "float('nan'))")
    with closing(Block.create(FIELDS, shared=True)) as block:
        code = code.replace("NAME", repr(block.name))
        subprocess.run([sys.executable, "-c", code], check=True, timeout=240, cwd=ROOT)
        assert (FOLDER / str(block.name)).exists()
        assert block.arrays["ticket"][3] == 42


def test_a_killed_creator_leaves_nothing() -> None:
    code = """
import time
from sim_farm.shared_memory.memory import Block, Field
print(Block.create({"frames": Field((1000,), "uint8")}, shared=True).name, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        file = FOLDER / process.stdout.readline().strip()
        assert file.name.startswith(PREFIX) and file.exists()
        os.kill(process.pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while file.exists():
        assert time.monotonic() < deadline, f"{file} outlives its creator"
        time.sleep(0.01)


def test_too_large_a_block_is_refused_at_once_with_the_remedy(own_memory: Callable[[], set[Path]]) -> None:
    with pytest.raises(FarmError, match=r"many frames needs 9,536,743.2 MiB of shared memory .* remount.*--shm-size"):
        Block.create({"frames": Field((10**13,), "uint8")}, shared=True, what="many frames")
    assert not own_memory()


def test_every_byte_is_reserved_when_the_block_is_made() -> None:
    with closing(Block.create({"frames": Field((3 * 2**20,), "uint8", 0)}, shared=True)) as block:
        assert (FOLDER / str(block.name)).stat().st_blocks * 512 >= 3 * 2**20
