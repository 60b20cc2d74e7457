"""What torch calls for `OffloadAdamW`: hooks on parameters, on modules, and after a fork. None of them keeps the optimizer alive."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from ._load import LIVE

if TYPE_CHECKING:
    from ._buckets import Bucket, Member
    from ._offload import OffloadAdamW

FORKED = (
    "OffloadAdamW: its state and its thread stay in the process that made them, and this is a forked one: call state_dict() before the fork, "
    "or start the process by spawn"
)


def on_gradient(owner: weakref.ref[OffloadAdamW], member: Member) -> Any:
    """A hook for after a gradient is there."""

    # Compiled autograd would trace it.
    @torch.compiler.disable
    def take(_param: torch.Tensor) -> None:
        if (optimizer := owner()) is not None:
            optimizer._on_gradient(member)

    return take


class Hold:
    """A hook for before a layer is called or saved: waits for its weights. A copy of the model, pickled or not, has nothing to wait for."""

    def __init__(self, owner: weakref.ref[OffloadAdamW], buckets: list[Bucket]) -> None:
        self._owner, self._buckets = owner, buckets

    @torch.compiler.disable
    def __call__(self, *_: Any) -> None:
        if (optimizer := self._owner()) is not None and any(bucket.writing is not None for bucket in self._buckets):
            optimizer._hold(self._buckets)

    def __reduce__(self) -> Any:
        return Nothing, ()


class Nothing:
    """A hook that does nothing."""

    def __call__(self, *_: Any) -> None:
        pass


def remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


class Elsewhere:
    """Stands for a state and a thread that a forked process does not have."""

    def __getattr__(self, *_: Any) -> Any:
        raise RuntimeError(FORKED)

    __getitem__ = __iter__ = __len__ = __contains__ = __getattr__


def _leave_behind() -> None:
    """In a child, in which nobody may wait for the worker, or touch memory that was not forked."""
    for optimizer in [optimizer for optimizer in LIVE if hasattr(optimizer, "_worker")]:
        LIVE.discard(optimizer)
        optimizer.state = optimizer._worker = Elsewhere()
        for bucket in optimizer._buckets:
            bucket.task = bucket.writing = None


os.register_at_fork(after_in_child=_leave_behind)
