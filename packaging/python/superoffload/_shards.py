"""Norm of gradients that are sharded over the ranks of process groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._adamw import is_sharded

REPLICATED = "replicated"


def ranks() -> int:
    """Return the number of ranks of torch.distributed; 1 if it is not in use."""
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


def check_norm_group(norm_group: Any) -> None:
    if isinstance(norm_group, str) and norm_group not in ("auto", REPLICATED):
        raise ValueError(f"norm_group must be 'auto', 'replicated' or a process group, not {norm_group!r}")


def groups_of(param: torch.Tensor, norm_group: Any) -> tuple[Any, ...]:
    """Return the process groups over which the squares of the gradient of `param` are summed, one group after the other."""
    if is_sharded(param):
        mesh = param.device_mesh
        return tuple(mesh.get_group(dim) for dim, placement in enumerate(param.placements) if not placement.is_replicate())
    if ranks() == 1 or norm_group == REPLICATED:
        return ()
    if norm_group == "auto":
        raise ValueError(
            f"max_grad_norm: torch.distributed has {ranks()} ranks, and a plain parameter does not show whether each rank has a shard of it. "
            "With FSDP1 pass norm_group=torch.distributed.group.WORLD, or the group that the model is sharded over; with DDP pass "
            "norm_group='replicated'; with DeepSpeed leave max_grad_norm out and set gradient_clipping in its configuration"
        )
    return (norm_group,)


def over_ranks(squares: float, saw_nonfinite: bool, groups: Iterable[Any]) -> tuple[float, bool]:
    """Sum both values over the ranks of each group. The values are added in rank order, so results are bit-identical on all ranks."""
    for group in groups:
        mine = torch.tensor([squares, float(saw_nonfinite)], dtype=torch.float64, device=_device(group))
        shares = [torch.empty_like(mine) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(shares, mine, group=group)
        squares, saw_nonfinite = 0.0, False
        for share in shares:
            of_rank, its_nonfinite = share.tolist()
            squares, saw_nonfinite = squares + of_rank, saw_nonfinite or bool(its_nonfinite)
    return squares, saw_nonfinite


def _device(group: Any) -> torch.device:
    """Return the device for tensors of the group's backend."""
    known = {device.type for device in group._device_types}
    return torch.device("cpu" if "cpu" in known else torch.accelerator.current_accelerator())
