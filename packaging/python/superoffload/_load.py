"""`load_state_dict` for optimizers that store their state in other formats than torch would choose. Torch's hooks run as usual."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._adamw import check_group, is_sharded, local
from ._moments import KEYS, check_beta1, has_shape

LIVE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""All live optimizers of this package in this process."""

Loaded = Callable[[int, torch.Tensor, dict[str, Any], set[int]], dict[str, Any]]
"""Creates the state of a parameter. Arguments: the parameter's index, the parameter, its saved state, and the storage already in use."""


def load_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], params: list[torch.Tensor], loaded: Loaded) -> None:
    """Load the state of `params`. Pre-hooks can change the saved state; post-hooks see the loaded state."""
    states: dict[torch.Tensor, dict[str, Any]] = {}

    # `take` runs as the last pre-hook, and the lambda below as the first post-hook.
    def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        check_saved_groups(saved["param_groups"], optimizer.moments)
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        # Storage of other optimizers must be copied.
        seen = _in_use()
        # Torch rejects groups of different length.
        for index, (param, number) in enumerate(zip(params, numbers)):
            if number in saved["state"]:
                states[param] = loaded(index, param, saved["state"][number], seen)
        # Torch would convert the state to its parameter's format and device, so torch gets no state.
        return {**saved, "state": {}}

    handles = [
        optimizer.register_load_state_dict_pre_hook(take),
        optimizer.register_load_state_dict_post_hook(lambda _: optimizer.state.update(states), prepend=True),
    ]
    try:
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    finally:
        for handle in handles:
            handle.remove()


def check_saved_groups(groups: list[dict[str, Any]], moments: str) -> None:
    for group in groups:
        if missing := [key for key in ("lr", "betas", "eps", "weight_decay") if key not in group]:
            raise ValueError(f"load_state_dict: a parameter group lacks {', '.join(missing)}: it is not AdamW's")
        check_group(group)
        check_beta1(group, moments)


def check_saved_state(index: int, param: torch.Tensor, saved: dict[str, Any], arrays: tuple[str, ...]) -> None:
    """Check that the saved state has the step and both moments, and that those of `arrays` that are present have the parameter's shape."""
    if missing := [key for key in ("step", *KEYS) if key not in saved]:
        raise ValueError(f"load_state_dict: the state of parameter {index} lacks {', '.join(missing)}: it is not AdamW's")
    for key in (key for key in arrays if key in saved):
        if not (has_shape(param, saved[key]) if key in KEYS else saved[key].shape == param.shape):
            raise ValueError(f"load_state_dict: {key} of parameter {index} is {list(saved[key].shape)}, the parameter {list(param.shape)}")
        if is_sharded(saved[key]) != is_sharded(param):
            raise ValueError(
                f"load_state_dict: {key} of parameter {index} is a {type(saved[key]).__name__}, the parameter a {type(param).__name__}: "
                "load it by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )


def _in_use() -> set[int]:
    """Return the addresses of the storage of all optimizers' states."""
    states = (state for optimizer in LIVE for state in optimizer.state.values())
    return {local(array).untyped_storage().data_ptr() for state in states for array in state.values() if torch.is_tensor(array) and array.numel()}
