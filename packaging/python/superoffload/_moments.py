"""Formats of AdamW's moments between steps: float32, bfloat16, or 8 bits in groups with shared exponents."""

from __future__ import annotations

from typing import Any

import torch

from ._adamw import _cpu_adam, hyper, in_layout_of, is_sharded, local, refuse_unless, taken

KEYS = ("exp_avg", "exp_avg_sq")

TAKES_WEIGHTS = (
    "masters must be 'float32', not {!r}: PyTorch owns the 16-bit weights, and split masters would be stored as a part of them; "
    "`superoffload train --masters split` has them"
)


class Plain:
    """Moments with the shape and the memory layout of the parameter."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.dtype = name, dtype

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(param, dtype=self.dtype, requires_grad=False)

    def count(self, param: torch.Tensor) -> int:
        """Return the number of elements of an array of moments."""
        return param.numel()

    def shaped(self, param: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
        """Return a flat array of `count` elements in the shape in which the state has it."""
        return array.as_strided(param.shape, param.stride())

    def first(self, first: int) -> int:
        """Return the offset of the first element in the flat order, for a parameter that follows `first` elements."""
        return first

    def check_param(self, index: int, param: torch.Tensor) -> None:
        """Check that moments in this format can belong to the parameter. All parameters can have such moments."""

    def flaw(self, own: torch.Tensor, array: torch.Tensor) -> str | None:
        """Return the required properties of the moments of a parameter with the elements `own`, if `array` lacks them."""
        there = local(array)
        if array.dtype == self.dtype and there.shape == own.shape and there.device.type == "cpu" and in_layout_of(own, there) is there:
            return None
        return f"{self.dtype}, on the CPU, of shape {list(own.shape)} and strides {list(own.stride())}"

    def taken(self, key: str, param: torch.Tensor, saved: torch.Tensor, seen: set[int]) -> torch.Tensor:
        """Return saved moments in this format; see `_adamw.taken`."""
        return taken(param, unpacked(key, param, saved) if is_packed(saved) else saved, self.dtype, seen)


class Packed:
    """Moments in 8 bits: groups of 128 elements in memory order, 132 bytes each, in a flat array of bytes."""

    name, dtype = "int8", torch.uint8

    def zeros(self, param: torch.Tensor) -> torch.Tensor:
        return torch.zeros(self.count(param), dtype=torch.uint8)

    def count(self, param: torch.Tensor) -> int:
        return _cpu_adam.moment_bytes(self.name, param.numel())

    def shaped(self, param: torch.Tensor, array: torch.Tensor) -> torch.Tensor:
        return array

    def first(self, first: int) -> int:
        return -(-first // _cpu_adam.MOMENT_GROUP) * _cpu_adam.MOMENT_GROUP

    def check_param(self, index: int, param: torch.Tensor) -> None:
        why = "a group of moments in 8 bits cannot be divided between ranks: use moments='bfloat16'"
        refuse_unless(not is_sharded(param), f"parameter {index} is a DTensor, and {why}")

    def flaw(self, own: torch.Tensor, array: torch.Tensor) -> str | None:
        size = self.count(own)
        if is_packed(array) and array.numel() == size and array.device.type == "cpu" and array.is_contiguous():
            return None
        return f"torch.uint8, contiguous, on the CPU, of {size} elements"

    def taken(self, key: str, param: torch.Tensor, saved: torch.Tensor, seen: set[int]) -> torch.Tensor:
        if not is_packed(saved):
            return packed(key, param, saved)
        storage = saved.untyped_storage().data_ptr()
        if self.flaw(param, saved) or storage in seen:
            return torch.empty(saved.shape, dtype=torch.uint8).copy_(saved.detach())
        seen.add(storage)
        return saved


FORMATS: dict[str, Plain | Packed] = {
    "float32": Plain("float32", torch.float32),
    "bfloat16": Plain("bfloat16", torch.bfloat16),
    Packed.name: Packed(),
}


def check_formats(moments: str, masters: str) -> None:
    """Check the names of the formats of moments and of float32 weights."""
    refuse_unless(moments in FORMATS, f"moments must be {', '.join(map(repr, FORMATS))}, not {moments!r}")
    refuse_unless(masters == "float32", TAKES_WEIGHTS.format(masters))


def check_beta1(group: dict[str, Any], moments: str) -> None:
    """Check that first moments in this format follow gradients at the group's beta1."""
    _, beta1, *_ = hyper(group)
    most = _cpu_adam.beta1_max(moments)
    refuse_unless(
        beta1 <= most,
        f"betas[0] must be at most {most} with moments={moments!r}, not {beta1}: rounded first moments would no longer change",
    )


def is_packed(array: torch.Tensor) -> bool:
    """Whether saved moments have 8 bits. No other format of moments has bytes."""
    return array.dtype == torch.uint8 and array.dim() == 1


def has_shape(param: torch.Tensor, array: torch.Tensor) -> bool:
    """Whether saved moments are those of a parameter of this shape, in any format."""
    return array.shape == param.shape if not is_packed(array) else array.numel() == Packed().count(param)


def packed(key: str, param: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return moments in 8 bits. The parameter gives the order of the elements in memory."""
    values = in_layout_of(param, values.detach().to("cpu", torch.float32))
    groups = Packed().zeros(param)
    _cpu_adam.pack_moment(key == KEYS[1], values.data_ptr(), groups.data_ptr(), param.numel())
    return groups


def unpacked(key: str, param: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of moments in 8 bits, in the layout of the parameter."""
    groups = groups.detach().to("cpu").contiguous()
    values = torch.empty_like(param, dtype=torch.float32, device="cpu", requires_grad=False)
    _cpu_adam.unpack_moment(key == KEYS[1], groups.data_ptr(), values.data_ptr(), param.numel())
    return values
