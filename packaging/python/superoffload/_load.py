"""`load_state_dict` for optimizers that store their state in other formats than torch would choose. Torch's hooks run as usual."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._adamw import check_saved_groups, local

LIVE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""All live optimizers of this package in this process."""

Loaded = Callable[[int, torch.Tensor, dict[str, Any], set[int]], dict[str, Any]]
"""Creates the state of a parameter. Arguments: the parameter's index, the parameter, its saved state, and the storage already in use."""


def load_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], params: list[torch.Tensor], loaded: Loaded) -> None:
    """Load the state of `params`. Pre-hooks can change the saved state; post-hooks see the loaded state."""
    states: dict[torch.Tensor, dict[str, Any]] = {}

    # `take` runs as the last pre-hook, and the lambda below as the first post-hook.
    def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        check_saved_groups(saved["param_groups"])
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


def _in_use() -> set[int]:
    """Return the addresses of the storage of all optimizers' states."""
    states = (state for optimizer in LIVE for state in optimizer.state.values())
    return {local(array).untyped_storage().data_ptr() for state in states for array in state.values() if torch.is_tensor(array) and array.numel()}
