"""Buckets: the parameters in flat order, split into ranges of equal size in bytes. A bucket is copied and stepped as a unit."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ._adamw import FORMATS, _cpu_adam, flat, step_count
from ._edits import sampled
from ._link import host_zeros
from ._moments import KEYS, Packed, Plain

ALIGN = 64

MASTERS = Plain("float32", torch.float32)
"""Format of the float32 weights."""

GONE = (
    "this gradient was moved to the CPU: OffloadAdamW clips in step() by its max_grad_norm, so leave out GradScaler and any other code that reads "
    "more of .grad after backward than a norm. Call backward() once for each of accumulation_steps before step(), discard gradients that no step uses with "
    "zero_grad() before the next backward(), and give checkpointed layers that share a parameter use_reentrant=False"
)


class Gone(torch.Tensor):
    """Placeholder in `.grad` after the gradient has been copied to the host. It supports norms, and multiplication by the factor of
    `clip_grad_norm_` if `step` uses the same factor. All other operations raise an error, including those of autograd."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    owner: Any = None
    """Weak reference to the optimizer."""
    index: int

    @staticmethod
    def __new__(cls, param: torch.Tensor, index: int, owner: Any) -> Gone:
        gone = torch.Tensor._make_wrapper_subclass(cls, param.shape, dtype=param.dtype, device=param.device)
        gone.index, gone.owner = index, owner
        return gone

    def __init__(self, *_: Any) -> None:
        pass

    def __repr__(self) -> str:
        return f"Gone({list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gone, second = args[0] if args else None, args[1] if len(args) > 1 else None
        optimizer = gone.owner() if isinstance(gone, Gone) else None
        if optimizer is not None and func is torch.ops.aten.linalg_vector_norm.default and second in (None, 2) and len(args) < 3:
            return torch.tensor(optimizer._norm_of(gone.index), dtype=torch.float32, device=gone.device)
        if optimizer is not None and func is torch.ops.aten.mul_.Tensor and isinstance(second, torch.Tensor) and second.numel() == 1:
            optimizer._check_factor(second.item())
            return gone
        raise RuntimeError(GONE)


@dataclass(eq=False)
class Member:
    """A parameter of the optimizer."""

    index: int
    group: int
    param: torch.Tensor
    first: int
    """Offset of the first element in the flat order."""
    parts: list[Part] = field(default_factory=list)
    micro_steps: int = 0
    """Number of backward passes since the last step that produced a gradient."""
    is_taken: bool = False
    """Whether the gradient has been copied to the host."""
    number: int = 0
    """Number of the step that uses the gradient."""
    version: int | None = None
    """Torch's version counter of the parameter after this optimizer's last change; None if unknown."""
    seen: weakref.ref[torch.Tensor] | None = None
    """The gradient to which backward passes accumulate."""
    borrows: bool = False
    """Whether the arrays of the state belong to the caller of load_state_dict."""

    address: int = 0
    gone: Gone | None = None
    """Placeholder in `.grad` after the copy to the host; None if the parameter is frozen and has no bucket."""

    def join(self, owner: weakref.ref[Any]) -> None:
        """Prepare the parameter for training."""
        self.address, self.gone = self.param.data_ptr(), Gone(self.param, self.index, owner)


@dataclass(eq=False)
class Part:
    """A range of a parameter's elements in one bucket."""

    member: Member
    bucket: Bucket
    start: int
    stop: int
    offset: int
    """Offset in bytes in the bucket."""
    known: torch.Tensor | None = None
    """Sample of the weights after the last step, for the comparison with `sample`, which is a view of the device's weights."""
    sampled_from: torch.Tensor | None = None
    should_be: torch.Tensor | None = None
    """View of the sampled elements of `sampled_from`, the float32 weights."""

    def __post_init__(self) -> None:
        # Not `detach`, which shares the version counter: the counter is incremented where the gradient is taken.
        self.weights = flat(self.member.param.data)[self.start : self.stop]
        self.sample = self._sampled(self.weights)

    def _sampled(self, elements: torch.Tensor) -> torch.Tensor:
        shape = self.member.param.shape
        return sampled(elements, shape[-1] if shape else 1)

    def note(self, weights: torch.Tensor) -> None:
        """Record a sample of the weights that the device should have. `weights` are the parameter's float32 weights."""
        if weights is not self.sampled_from:
            self.sampled_from, self.should_be = weights, self._sampled(flat(weights)[self.start : self.stop])
        self.known = self.should_be.to(self.weights.dtype, copy=True)

    def of(self, room: torch.Tensor) -> torch.Tensor:
        """Return a view of this part's elements in memory with the bucket's layout."""
        return room[self.offset : self.offset + self.weights.nbytes].view(self.weights.dtype)

    def given(self, state: dict[str, torch.Tensor], moments: str, slot: torch.Tensor, stage: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the part as the extension module expects it."""
        arrays = [state["param"].data_ptr() + 4 * self.start]
        arrays += [state[key].data_ptr() + _cpu_adam.moment_bytes(moments, self.start) for key in KEYS]
        at = [0 if room is None else room.data_ptr() + self.offset for room in (slot, stage)]
        formats, first = (moments, *2 * (FORMATS[self.weights.dtype],)), self.member.first + self.start
        return self.member.index, (*arrays, *at), formats, self.stop - self.start, first, self.member.number, self.member.group


@dataclass(eq=False)
class Pending:
    """A step that is not yet applied to the state, although its weights are on their way to the device."""

    update: Any
    parts: list[Part]
    scale: float


@dataclass(eq=False)
class Bucket:
    """A range of parameters that is copied and stepped as a unit."""

    size: int = 0
    """Size in bytes of the bucket's weights, and of its gradients."""
    parts: list[Part] = field(default_factory=list)
    slot: torch.Tensor | None = None
    """Gradients in host memory; allocated when the first gradient arrives."""
    spare: torch.Tensor | None = None
    """Gradients of the pending step, or else free memory."""
    staged: torch.Tensor | None = None
    """New weights that are not on the device yet. Without speculation, weights go through a `Stage` instead."""
    pending: Pending | None = None
    """The step that the state lacks. Only the worker thread accesses it."""
    arrived: list[Part] = field(default_factory=list)
    """Parts with gradients that were copied from the device since the last step."""
    landed: Any = None
    """Event after which the gradients are on the host."""
    update: Any = None
    """The extension module's object for the current step."""
    is_speculated: bool = False
    """Whether the weights of the coming step have been computed, or are being computed, before the verdict."""
    task: Future[None] | None = None
    """The last submitted task. The slot is free when the task is done."""
    writing: Future[None] | None = None
    """The task that copies weights to the device, until a reader has waited for it."""
    sent: Any = None
    """Event after which the weights are on the device."""

    def wait(self) -> None:
        if self.task is not None:
            self.task.result()


class Stage:
    """Host memory for new weights on their way to the device."""

    def __init__(self, room: torch.Tensor) -> None:
        self.room, self.sent = room, None


def cut(members: list[Member], size: int) -> list[Bucket]:
    """Split parameters into buckets of at most `size` bytes, a multiple of `ALIGN`. Parameters are split at multiples of the norm's block size."""
    buckets: list[Bucket] = []
    room = 0
    for member in members:
        elems, width, start = member.param.numel(), member.param.element_size(), 0
        while True:
            stop = elems if (elems - start) * width <= room else start + room // width // _cpu_adam.NORM_BLOCK * _cpu_adam.NORM_BLOCK
            if not buckets or stop == start < elems:
                buckets.append(Bucket())
                room = size
                continue
            bucket = buckets[-1]
            part = Part(member, bucket, start, stop, bucket.size)
            for owner in (member, bucket):
                owner.parts.append(part)
            padded = -(-(stop - start) * width // ALIGN) * ALIGN
            bucket.size, room, start = bucket.size + padded, room - padded, stop
            if start == elems:
                break
    return buckets


def arrays_of(moments: Plain | Packed) -> dict[str, Plain | Packed]:
    """Return the names of the arrays in a parameter's state with their formats."""
    return {**dict.fromkeys(KEYS, moments), "param": MASTERS}


def _new_array(param: torch.Tensor, array: Plain | Packed) -> torch.Tensor:
    return array.shaped(param, host_zeros(array.count(param), array.dtype))


def new_state(param: torch.Tensor, moments: Plain | Packed) -> dict[str, torch.Tensor]:
    """Return the state of a parameter before its first step."""
    state = {key: _new_array(param, array) for key, array in arrays_of(moments).items()}
    # The conversion to float32 runs on the host, because the device has no memory for it.
    state["param"].copy_(param.detach().to("cpu"))
    return {"step": step_count(), **state}


def own_arrays(state: dict[str, torch.Tensor], param: torch.Tensor, moments: Plain | Packed) -> None:
    """Copy the state, one array after the other, into memory like that of `new_state`."""
    for key, array in arrays_of(moments).items():
        state[key] = _new_array(param, array).copy_(state[key])


def take_changes(master: torch.Tensor, param: torch.Tensor) -> None:
    """Update the float32 weights where other code has changed the parameter. A float32 weight that rounds to the parameter's value is kept."""
    weights = param.detach().to("cpu")
    is_kept = master.to(weights.dtype) == weights
    master.copy_(torch.where(is_kept, master, weights.float()))
