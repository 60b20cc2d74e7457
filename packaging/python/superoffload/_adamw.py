"""What both AdamW optimizers of `superoffload.torch` say of groups and parameters."""

from __future__ import annotations

from typing import Any

import torch

try:
    from . import _cpu_adam
except ImportError as error:
    why = f"superoffload.torch lacks its extension module ({error}): install superoffload from a wheel, which has it"
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
    for name in ("amsgrad", "maximize", "differentiable"):
        refuse_unless(not group.get(name), f"{name}=True is not offered: use torch.optim.AdamW for it")
    refuse_unless(group.get("bias_correction", True), "bias_correction=False is not offered: leave it out")
    refuse_unless(group.get("decoupled_weight_decay", True) or not weight_decay, "weight decay here is AdamW's, and this group has Adam's")


def check_saved_groups(groups: list[dict[str, Any]]) -> None:
    for group in groups:
        if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
            raise ValueError(f"load_state_dict: a parameter group lacks {', '.join(missing)}: it is not AdamW's")
        check_group(group)


def check_saved_state(index: int, param: torch.Tensor, saved: dict[str, Any], arrays: tuple[str, ...]) -> None:
    """`arrays` must have the parameter's shape, if they are there; step and both moments must be."""
    if missing := [key for key in ("step", "exp_avg", "exp_avg_sq") if key not in saved]:
        raise ValueError(f"load_state_dict: the state of parameter {index} lacks {', '.join(missing)}: it is not AdamW's")
    for key in arrays:
        if key in saved and saved[key].shape != param.shape:
            raise ValueError(f"load_state_dict: {key} of parameter {index} is {list(saved[key].shape)}, the parameter {list(param.shape)}")


def check_param(index: int, param: torch.Tensor) -> None:
    """Plain, dense, contiguous, of a known format; where it may lie is the optimizer's to say."""
    where = f"parameter {index}"
    if type(param) not in (torch.Tensor, torch.nn.Parameter):
        raise ValueError(f"{where} is a {type(param).__name__}: pass plain tensors, of a sharded one its local part")
    if param.layout != torch.strided:
        raise ValueError(f"{where} is sparse: make it dense with .to_dense()")
    if param.dtype not in FORMATS:
        raise ValueError(f"{where} is {param.dtype}: use float32, bfloat16 or float16, or torch.optim.AdamW")
    if not param.is_contiguous():
        raise ValueError(f"{where} is not contiguous: make it so with .contiguous() before the optimizer is made")


def check_apart(params: list[torch.Tensor]) -> None:
    if both := _cpu_adam.overlap([(param.data_ptr(), param.nbytes) for param in params]):
        raise ValueError(f"parameters {both[0]} and {both[1]} share memory: pass one of them, or a clone of the other")


def check_isa(isa: str) -> None:
    known = ["auto", *_cpu_adam.instruction_sets()]
    refuse_unless(isa in known, f"isa must be one of {', '.join(known)} on this CPU, not {isa!r}")


def refuse_unless(holds: Any, why: str) -> None:
    if not holds:
        raise ValueError(why)
