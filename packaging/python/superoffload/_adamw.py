"""Checks of parameter groups, parameters and state, which both AdamW optimizers of `superoffload.torch` share."""

from __future__ import annotations

import sys
from typing import Any

import torch

try:
    from . import _cpu_adam
except ImportError as error:
    name = f"{sys.implementation.name} {sys.version.split()[0]}{sys.abiflags}"
    why = (
        f"superoffload.torch lacks its extension module for {name} ({error}): install superoffload from a wheel into CPython from 3.10 on, "
        "with the GIL"
    )
    raise ImportError(why) from error

FORMATS = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def hyper(group: dict[str, Any]) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    return float(group["lr"]), float(beta1), float(beta2), float(group["eps"]), float(group["weight_decay"])


def check_group(group: dict[str, Any]) -> None:
    lr, beta1, beta2, eps, weight_decay = hyper(group)
    for name, value in (("lr", lr), ("eps", eps), ("weight_decay", weight_decay)):
        refuse_unless(0 <= value < float("inf"), f"{name} must be 0 or more, not {value}")
    for beta in (beta1, beta2):
        refuse_unless(0 <= beta < 1, f"betas must be at least 0 and below 1, not {(beta1, beta2)}")
    refuse_switches(**{name: group.get(name) for name in ("amsgrad", "maximize", "differentiable")})
    refuse_unless(group.get("bias_correction", True), "bias_correction=False is not offered: leave it out")
    refuse_unless(group.get("decoupled_weight_decay", True) or not weight_decay, "weight decay here is AdamW's, and this group has Adam's")


def refuse_switches(**switches: Any) -> None:
    """Reject keywords of `torch.optim.AdamW` that change results, if they are enabled. `foreach` and `fused` only choose between implementations of
    torch, so any value of them is accepted."""
    for name, value in switches.items():
        refuse_unless(not value, f"{name}=True is not offered: use torch.optim.AdamW for it")


def check_param(index: int, param: torch.Tensor) -> None:
    """Check that the parameter is dense, has a supported format, and is a plain tensor or a `DTensor`. The optimizer checks the device."""
    where = f"parameter {index}"
    if type(param) not in (torch.Tensor, torch.nn.Parameter) and not is_sharded(param):
        raise ValueError(f"{where} is a {type(param).__name__}: pass plain tensors, or DTensors to CPUAdamW")
    if param.layout != torch.strided:
        raise ValueError(f"{where} is sparse: make it dense with .to_dense()")
    if param.dtype not in FORMATS:
        raise ValueError(f"{where} is {param.dtype}: use float32, bfloat16 or float16, or torch.optim.AdamW")
    if not is_dense(local(param)):
        why = "give the model torch.nn.Parameter(param.contiguous()) in its place before the optimizer is made"
        raise ValueError(f"{where} has gaps or repeats in memory: {why}")


def check_apart(params: list[torch.Tensor]) -> None:
    if both := _cpu_adam.overlap([(param.data_ptr(), param.nbytes) for param in params]):
        raise ValueError(f"parameters {both[0]} and {both[1]} share memory: pass one of them, or a clone of the other")


def check_isa(isa: str) -> None:
    known = ["auto", *_cpu_adam.instruction_sets()]
    refuse_unless(isa in known, f"isa must be one of {', '.join(known)} on this CPU, not {isa!r}")


def refuse_unless(holds: Any, why: str) -> None:
    if not holds:
        raise ValueError(why)


def step_count(steps: float = 0.0) -> torch.Tensor:
    """Return a step count. It is always float32, because torch's default format may be too narrow to count in."""
    return torch.tensor(float(steps), dtype=torch.float32, device="cpu")


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a `DTensor`. Does not import the module of `DTensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a tensor."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one contiguous range of memory, in any order of dimensions."""
    if tensor.is_contiguous():
        return True
    outer_first = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return tensor.permute(outer_first).is_contiguous()


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def in_layout_of(param: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` if it has the memory layout of the dense `param`, else a copy with that layout."""
    if tensor.stride() == param.stride() or (tensor.is_contiguous() and param.is_contiguous()):
        return tensor
    return torch.empty_like(param, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def taken(param: torch.Tensor, saved: torch.Tensor, dtype: torch.dtype, seen: set[int]) -> torch.Tensor:
    """Return a saved array for the state of `param`. The array itself is returned if its format, device and layout are right, as in torch, so that
    loading needs no extra memory; otherwise a copy. `seen` has the storage of the arrays used so far, because arrays must not share storage."""
    own, there = local(param), local(saved)
    storage = there.untyped_storage().data_ptr()
    fits = there.dtype == dtype and there.device.type == "cpu" and not saved.requires_grad and in_layout_of(own, there) is there
    if is_sharded(param):
        fits = fits and (saved.device_mesh, saved.placements) == (param.device_mesh, param.placements)
    if not fits or storage in seen:
        device = {} if is_sharded(param) else {"device": "cpu"}
        return torch.empty_like(param, dtype=dtype, requires_grad=False, **device).copy_(saved.detach())
    if there.numel():
        seen.add(storage)
    return saved
