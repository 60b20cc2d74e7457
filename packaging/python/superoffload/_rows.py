"""Parameters on the CPU and their state, in the form that the extension module expects."""

from __future__ import annotations

from typing import Any

import torch

from ._adamw import FORMATS, _cpu_adam, check_param, in_layout_of, is_sharded, local, step_count
from ._moments import KEYS, Packed, Plain

MASTER = "master_param"
MASTERS = Plain("float32", torch.float32)


def check_cpu_param(index: int, param: torch.Tensor) -> None:
    check_param(index, param)
    if param.device.type != "cpu":
        raise ValueError(f"parameter {index} is on {param.device}: this optimizer steps on the CPU; move it with .cpu(), or use OffloadAdamW")


class Row:
    """A parameter and its state. The constructor checks both once; a step compares only identities and addresses."""

    __slots__ = ("param", "own", "place", "moments", "state", "addresses", "exp_avg", "exp_avg_sq", "master", "count")

    def __init__(self, place: tuple[int, int, int], param: torch.Tensor, state: dict[str, Any], moments: Plain | Packed) -> None:
        """Create missing state and check the state. `place` has the parameter's index, the offset of its first element in the flat order, and the
        number of its group."""
        self.place, self.param, self.moments = place, param, moments
        index = place[0]
        check_cpu_param(index, param)
        self.own = local(param)
        self.count = state["step"] = _count(state.get("step"))
        moments.check_param(index, param)
        for key in KEYS:
            if key not in state:
                state[key] = moments.zeros(param)
            self._check(key, moments.flaw(self.own, state[key]))
        if param.dtype != torch.float32 and MASTER not in state:
            state[MASTER] = param.detach().to(torch.float32, copy=True)
        self.exp_avg, self.exp_avg_sq, self.master = (state.get(key) for key in (*KEYS, MASTER))
        if param.dtype != torch.float32:
            self._check(MASTER, MASTERS.flaw(self.own, self.master))
        self.addresses = self._addresses()

    def _check(self, key: str, flaw: str | None) -> None:
        if flaw:
            raise ValueError(f"{key} of parameter {self.place[0]} was changed: it must be {flaw}")

    def _addresses(self) -> tuple[int, ...]:
        own, exp_avg, exp_avg_sq, count = self.own, self.exp_avg, self.exp_avg_sq, self.count
        if is_sharded(self.param):
            own, exp_avg, exp_avg_sq = local(self.param), local(exp_avg), local(exp_avg_sq)
        if self.param.dtype == torch.float32:
            return own.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), 0, count.data_ptr()
        return local(self.master).data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), own.data_ptr(), count.data_ptr()

    def holds(self, place: tuple[int, int, int], param: torch.Tensor, state: dict[str, Any]) -> bool:
        """Whether the row still describes this parameter, place and state."""
        return (
            param is self.param
            and place == self.place
            and state.get("step") is self.count
            and state.get("exp_avg") is self.exp_avg
            and state.get("exp_avg_sq") is self.exp_avg_sq
            and state.get(MASTER) is self.master
            and self._addresses() == self.addresses
        )

    def given(self) -> tuple[Any, ...]:
        """Return the row as the extension module expects it."""
        index, first, group = self.place
        return index, self.addresses, (self.moments.name, FORMATS[self.param.dtype]), self.own.numel(), first, group

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient's elements in the memory layout of the parameter."""
        if is_sharded(grad) or is_sharded(self.param):
            grad = self._local_gradient(grad)
        index = self.place[0]
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of parameter {index} is sparse: step it with torch.optim.SparseAdam, or make it with sparse=False")
        if grad.dtype not in FORMATS or grad.device.type != "cpu":
            raise ValueError(f"the gradient of parameter {index} is {grad.dtype} on {grad.device}: it must be a 16- or 32-bit float on the CPU")
        return in_layout_of(self.own, grad)

    def _local_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        placed = [(each.device_mesh, each.placements) if is_sharded(each) else None for each in (grad, self.param)]
        if placed[0] != placed[1]:
            raise ValueError(f"the gradient of parameter {self.place[0]} is not sharded as the parameter is: redistribute it before step()")
        return local(grad)


class Batch:
    """Rows that are stepped together."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows
        self._arrays = _cpu_adam.Arrays([row.given() for row in rows])

    def update(self, groups: list[tuple[float, ...]], threads: int, isa: str) -> tuple[Any, list[torch.Tensor]]:
        """Return the step with the rows' gradients, and the tensors that must live until the step is done."""
        gradients = [row.gradient(row.param.grad) for row in self.rows]
        others = [
            (position, FORMATS[gradient.dtype])
            for position, (row, gradient) in enumerate(zip(self.rows, gradients))
            if gradient.dtype is not row.own.dtype
        ]
        addresses = [gradient.data_ptr() for gradient in gradients]
        return self._arrays.gradients(addresses, others, groups, threads, isa), gradients


def _count(steps: Any) -> torch.Tensor:
    """Return the step count itself if the extension module can increment it, else a float32 copy."""
    if steps is None:
        return step_count()
    is_good = torch.is_tensor(steps) and steps.dtype == torch.float32 and steps.device.type == "cpu" and steps.numel() == 1
    return steps if is_good else step_count(float(steps))
