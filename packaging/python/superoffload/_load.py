"""`load_state_dict` of an optimizer that gives its state other formats than torch would, with torch's hooks around it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ._adamw import check_saved_groups, local

LIVE: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
"""The optimizers of this package in this process."""

Loaded = Callable[[int, torch.Tensor, dict[str, Any], set[int]], dict[str, Any]]
"""Makes the state of a parameter, by its index, of what is saved, and of the storage that is taken already."""


def load_state(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any], params: list[torch.Tensor], loaded: Loaded) -> None:
    """Sets the state of `params`. Hooks before it see the saved state and may change it, hooks after it see the state that was set."""
    states: dict[torch.Tensor, dict[str, Any]] = {}

    # The last of the hooks before, and the first of those after.
    def take(_: Any, saved: dict[str, Any]) -> dict[str, Any]:
        check_saved_groups(saved["param_groups"])
        numbers = [number for group in saved["param_groups"] for number in group["params"]]
        # What another optimizer steps is copied.
        seen = _in_use()
        # Groups that do not fit in number are refused by torch.
        for index, (param, number) in enumerate(zip(params, numbers)):
            if number in saved["state"]:
                states[param] = loaded(index, param, saved["state"][number], seen)
        # torch would give the state the format and the device of its parameter.
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
    """Addresses of the storage of all states."""
    states = (state for optimizer in LIVE for state in optimizer.state.values())
    return {local(array).untyped_storage().data_ptr() for state in states for array in state.values() if torch.is_tensor(array) and array.numel()}
