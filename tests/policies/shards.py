"""Shards of tiny checkpoints, made by PyTorch's own FSDP in two processes, as verl and RLinf leave them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

WORLD = 2


class Named(nn.Module):
    """A module whose state dict has these tensors."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            *path, last = name.split(".")
            at: nn.Module = self
            for step in path:
                if step not in at._modules:
                    at.add_module(step, nn.Module())
                at = at.get_submodule(step)
            at.register_parameter(last, nn.Parameter(tensor.clone(), requires_grad=tensor.is_floating_point()))


def trained(base: Path) -> dict[str, Tensor]:
    """Tensors of a checkpoint after a training that changed all of them."""
    from policies.files import Shards

    shards = Shards.find(base)
    return {name: shards.tensor(name) * 1.25 for name in sorted(shards.files)}


def write_by_rank(rank: int, out: Path, bases: list[Path]) -> None:
    """One folder for each base, of its name."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=WORLD)
    for base in bases:
        _write(rank, base, out / base.name)
    dist.barrier()
    dist.destroy_process_group()


def _write(rank: int, base: Path, out: Path) -> None:
    """What verl's FSDPCheckpointManager and RLinf's FSDP strategy save, but for the optimizer's state."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardedStateDictConfig, StateDictType, fully_shard

    plain = trained(base)
    for name, shape, names in (("fsdp2", (WORLD,), ("fsdp",)), ("hsdp", (WORLD, 1), ("ddp", "fsdp"))):
        model = Named(plain)
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        (out / name).mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), out / name / f"model_world_size_{WORLD}_rank_{rank}.pt")
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    again = Named(plain)
    fully_shard(again, mesh=init_device_mesh("cpu", (WORLD,)))
    dcp.save({"fsdp_checkpoint": {"model": again.state_dict()}}, checkpoint_id=str(out / "rlinf/dcp_checkpoint"))
    local = {name: tensor.to_local() for name, tensor in again.state_dict().items()}
    for folder in ("local", "full/model_state_dict"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    state = {"model": local, "lr_schedulers": [{"last_epoch": 3}], "rng": {"numpy": np.random.get_state()}}
    torch.save(state, out / "local" / f"checkpoint_rank_{rank}.pt")
    old = FullyShardedDataParallel(
        Named(plain), device_mesh=init_device_mesh("cpu", (WORLD,), mesh_dim_names=("fsdp",)),
        device_id=torch.device("cpu"), use_orig_params=True,
    )  # fmt: skip
    (out / "fsdp1").mkdir(exist_ok=True)
    sharded = ShardedStateDictConfig(offload_to_cpu=False)
    with FullyShardedDataParallel.state_dict_type(old, StateDictType.SHARDED_STATE_DICT, sharded):
        torch.save(old.state_dict(), out / "fsdp1" / f"model_world_size_{WORLD}_rank_{rank}.pt")
    if rank == 0:
        torch.save(whole, out / "full/model_state_dict/full_weights.pt")
        for name in ("fsdp1", "fsdp2", "hsdp"):
            fsdp_config = {"FSDP_version": 1 if name == "fsdp1" else 2, "world_size": WORLD}
            (out / name / "fsdp_config.json").write_text(json.dumps(fsdp_config))
            (out / name / f"optim_world_size_{WORLD}_rank_0.pt").write_bytes(b"not read")


if __name__ == "__main__":
    write_by_rank(int(sys.argv[1]), Path(sys.argv[2]), [Path(base) for base in sys.argv[3:]])
