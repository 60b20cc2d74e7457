"""Norm of gradients that are sharded over the ranks of process groups."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ._adamw import is_sharded

REPLICATED = "replicated"

GRADIENT_CLIPPING = "leave max_grad_norm out and set gradient_clipping in DeepSpeed's configuration"


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
            f"norm_group='replicated'; with DeepSpeed {GRADIENT_CLIPPING}"
        )
    return (norm_group,)


def is_partitioned(param: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-3 has partitioned the parameter. The parameter itself then has no elements, or has them only for a while."""
    return hasattr(param, "ds_tensor") and hasattr(param, "ds_status")


def check_partitioned(params: list[torch.Tensor], max_grad_norm: float | None) -> None:
    """Check parameters before DeepSpeed's engine replaces them by its own partitions."""
    if max_grad_norm is not None and any(map(is_partitioned, params)):
        raise ValueError(
            "max_grad_norm: DeepSpeed's ZeRO-3 has partitioned these parameters, and its engine steps one partition after the other, so that no step "
            f"has the norm of all gradients: {GRADIENT_CLIPPING}"
        )


def refuse_partitioned(index: int, param: torch.Tensor) -> None:
    if is_partitioned(param):
        raise RuntimeError(
            f"parameter {index} is partitioned by DeepSpeed's ZeRO-3, and its elements are not here: give this optimizer to deepspeed.initialize and "
            "call the engine's step(); its configuration needs zero_force_ds_cpu_optimizer=false and zero_allow_untested_optimizer=true"
        )


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
