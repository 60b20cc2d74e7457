"""Parameters in the flat order, cut into buckets of equal bytes: what is copied and stepped at a time."""

from __future__ import annotations

import weakref
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import torch

from ._adamw import FORMATS, _cpu_adam, flat, step_count
from ._link import host_array

ALIGN = 64

ARRAYS = ("exp_avg", "exp_avg_sq", "param")
"""Arrays of a parameter's state."""

GONE = (
    "this gradient has gone to the CPU: OffloadAdamW clips in step() by its max_grad_norm, so leave out GradScaler and whatever else reads more of "
    ".grad after backward than a norm. Call backward() once for each of accumulation_steps before step(), drop gradients that no step takes by "
    "zero_grad() before the next backward(), and give checkpointed layers that share a parameter use_reentrant=False"
)


class Gone(torch.Tensor):
    """Stands in `.grad` after the gradient has left. It has a norm, and takes the factor of `clip_grad_norm_` where that is the factor of `step`. All
    other arithmetic, autograd's included, is refused."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    owner: Any = None
    """The optimizer, by a weak reference."""
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
    """A parameter of an optimizer."""

    index: int
    group: int
    param: torch.Tensor
    parts: list[Part] = field(default_factory=list)
    micro_steps: int = 0
    """Backward passes since the last step that gave a gradient."""
    is_taken: bool = False
    """The gradient has left."""
    number: int = 0
    """Of the step that it is for."""
    version: int | None = None
    """torch's count of changes after the last one made here; None: unknown."""
    seen: weakref.ref[torch.Tensor] | None = None
    """The gradient that backward passes add to."""
    borrows: bool = False
    """Arrays of its state are those of the caller of load_state_dict."""

    address: int = 0
    gone: Gone | None = None
    """What stands in `.grad` after the gradient has left; None: the parameter is frozen, and has no bucket."""

    def join(self, owner: weakref.ref[Any]) -> None:
        """Before the parameter is trained."""
        self.address, self.gone = self.param.data_ptr(), Gone(self.param, self.index, owner)


@dataclass(eq=False)
class Part:
    """Elements of a parameter that lie in one bucket."""

    member: Member
    bucket: Bucket
    start: int
    stop: int
    offset: int
    """Of its first byte in the bucket."""

    def __post_init__(self) -> None:
        # Not `detach`, whose result shares the count of changes: copies to it are counted where the gradient is taken.
        self.weights = flat(self.member.param.data)[self.start : self.stop]

    def of(self, room: torch.Tensor) -> torch.Tensor:
        """Its elements in memory of the bucket's layout."""
        return room[self.offset : self.offset + self.weights.nbytes].view(self.weights.dtype)

    def given(self, state: dict[str, torch.Tensor], slot: torch.Tensor, stage: torch.Tensor | None) -> tuple[Any, ...]:
        """As the extension module takes it."""
        arrays = [state[key].data_ptr() + 4 * self.start for key in ("param", "exp_avg", "exp_avg_sq")]
        at = [0 if room is None else room.data_ptr() + self.offset for room in (slot, stage)]
        formats = ("float32", *2 * (FORMATS[self.weights.dtype],))
        return self.member.index, (*arrays, *at), formats, self.stop - self.start, self.start, self.member.number, self.member.group


@dataclass(eq=False)
class Pending:
    """A step whose weights are on their way to the device, and which the state is to take yet."""

    update: Any
    parts: list[Part]
    scale: float


@dataclass(eq=False)
class Bucket:
    """What is copied and stepped at a time."""

    size: int = 0
    """Bytes of its weights, and of their gradients."""
    parts: list[Part] = field(default_factory=list)
    slot: torch.Tensor | None = None
    """Gradients on the host; made when the first one comes."""
    spare: torch.Tensor | None = None
    """Those of the step that is pending, and else free room."""
    staged: torch.Tensor | None = None
    """New weights that the device does not have yet. Where weights are installed early, they pass through a `Stage` instead."""
    pending: Pending | None = None
    """The worker's alone."""
    arrived: list[Part] = field(default_factory=list)
    """Those whose gradients have left the device since the last step."""
    landed: Any = None
    """The event after which they are on the host."""
    update: Any = None
    """What is done to them."""
    is_speculated: bool = False
    """Weights of the coming step are made, or being made."""
    task: Future[None] | None = None
    """The last thing that was asked for: the slot is free when it is done."""
    writing: Future[None] | None = None
    """The task that sends weights to the device, which a reader has not waited for yet."""
    sent: Any = None
    """The event after which they are there."""

    def wait(self) -> None:
        if self.task is not None:
            self.task.result()


class Stage:
    """Memory for new weights on their way to the device."""

    def __init__(self, room: torch.Tensor) -> None:
        self.room, self.sent = room, None


def cut(members: list[Member], size: int) -> list[Bucket]:
    """Buckets of at most `size` bytes, a multiple of `ALIGN`. A parameter may lie in several; it is cut where the norm's blocks begin."""
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


def new_state(param: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of a parameter before its first step."""
    state = {key: host_array(param) for key in ARRAYS}
    # Not widened on the device, which has no room for that.
    state["param"].copy_(param.detach().to("cpu"))
    return {"step": step_count(), **state}


def own_arrays(state: dict[str, torch.Tensor], param: torch.Tensor) -> None:
    """Moves the state, one array after the other, into memory as `new_state` takes it."""
    for key in ARRAYS:
        state[key] = host_array(param).copy_(state[key])


def take_changes(master: torch.Tensor, param: torch.Tensor) -> None:
    """Weights that somebody has changed are taken anew; where the fp32 copy rounds to what is there, it stays."""
    weights = param.detach().to("cpu")
    is_kept = master.to(weights.dtype) == weights
    master.copy_(torch.where(is_kept, master, weights.float()))
