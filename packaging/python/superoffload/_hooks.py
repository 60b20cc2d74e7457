"""Hooks of `OffloadAdamW` that torch calls: on parameters, on modules, and after a fork. No hook keeps the optimizer alive."""

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
    """Return a hook that runs after a gradient has been accumulated."""

    # Compiled autograd would trace the hook.
    @torch.compiler.disable
    def take(_param: torch.Tensor) -> None:
        if (optimizer := owner()) is not None:
            optimizer._on_gradient(member)

    return take


class Hold:
    """Hook that runs before a module is called or saved, and waits for its weights, also if the optimizer is gone. In a copy of the model, pickled or
    not, the hook does nothing."""

    def __init__(self, owner: weakref.ref[OffloadAdamW], link: Any, buckets: list[Bucket]) -> None:
        self._owner, self._link, self._buckets = owner, link, buckets

    @torch.compiler.disable
    def __call__(self, *_: Any) -> None:
        if any(bucket.writing is not None for bucket in self._buckets):
            optimizer = self._owner()
            hold(self._link, self._buckets) if optimizer is None else optimizer._hold(self._buckets)

    def __reduce__(self) -> Any:
        return Nothing, ()


def hold(link: Any, buckets: Iterable[Bucket]) -> None:
    """Make the device's stream wait for the weights of `buckets`."""
    for bucket in buckets:
        if (writing := bucket.writing) is not None:
            writing.result()
            link.hold(bucket.sent)
            bucket.writing = None


class Nothing:
    """A hook that does nothing."""

    def __call__(self, *_: Any) -> None:
        pass


def remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def leave(handles: Iterable[Any], buckets: Iterable[Bucket]) -> None:
    """Remove the modules' hooks when the optimizer is gone, and all its tasks are done. After that, no layer waits for the last weights."""
    for bucket in buckets:
        if bucket.writing is not None and bucket.sent is not None:
            bucket.sent.synchronize()
    remove(handles)


class Elsewhere:
    """Placeholder for the state and the thread, which a forked process does not have."""

    def __getattr__(self, *_: Any) -> Any:
        raise RuntimeError(FORKED)

    __getitem__ = __iter__ = __len__ = __contains__ = __getattr__


def _leave_behind() -> None:
    """Detach the optimizers in a forked child, which must not wait for the worker thread or access memory that was not forked."""
    for optimizer in [optimizer for optimizer in LIVE if hasattr(optimizer, "_worker")]:
        LIVE.discard(optimizer)
        optimizer.state = optimizer._worker = Elsewhere()
        for bucket in optimizer._buckets:
            bucket.task = bucket.writing = None


os.register_at_fork(after_in_child=_leave_behind)
