"""Optimizers for PyTorch over this project's Adam.

    from superoffload.torch import CPUAdamW

    optimizer = CPUAdamW(model.parameters(), lr=1e-5, weight_decay=0.1, max_grad_norm=1.0)

The same bits come out for any number of threads and on every instruction set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ._adamw import (
    FORMATS,
    _cpu_adam,
    check_apart,
    check_group,
    check_isa,
    check_param,
    check_saved_groups,
    check_saved_state,
    hyper,
    refuse_unless,
)
from ._offload import OffloadAdamW, OffloadStep
from ._trainer import SuperOffloadTrainerMixin

__all__ = ["CPUAdamW", "LastStep", "OffloadAdamW", "OffloadStep", "SuperOffloadTrainerMixin"]

MOMENTS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASTER = "master_param"


class LastStep(NamedTuple):
    """What the last step did."""

    grad_norm: float | None
    """The norm of all gradients before clipping; None without `max_grad_norm`."""
    clip: float
    """The factor on every gradient; 0 where the step was skipped."""
    skipped: bool
    """A gradient was NaN or infinite, so that the step changed nothing."""


class CPUAdamW(torch.optim.Optimizer):
    """AdamW for parameters on the CPU, in place of `torch.optim.AdamW` and DeepSpeed's `DeepSpeedCPUAdam`.

    Parameters are float32, or bfloat16 and float16 with a float32 copy in the state (`master_param`), which is what is stepped. Gradients are
    any of the three. `moments="bfloat16"` stores both moments in 16 bits. With `max_grad_norm` the norm of all gradients is clipped in `step`,
    and a step whose norm is not finite is skipped; `last` tells. `threads` is `torch.get_num_threads()` unless given.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        moments: str = "float32",
        max_grad_norm: float | None = None,
        threads: int | None = None,
        isa: str = "auto",
    ) -> None:
        refuse_unless(adamw_mode, "adamw_mode=False (weight decay added to gradients) is not offered: use torch.optim.Adam, or leave it out")
        refuse_unless(fp32_optimizer_states, "fp32_optimizer_states=False is not offered: moments='bfloat16' stores moments in 16 bits")
        refuse_unless(moments in MOMENTS, f"moments must be 'float32' or 'bfloat16', not {moments!r}")
        refuse_unless(threads is None or threads >= 1, f"threads must be at least 1, not {threads}; None takes torch.get_num_threads()")
        refuse_unless(max_grad_norm is None or max_grad_norm > 0, f"max_grad_norm must be above 0, not {max_grad_norm}; None does not clip")
        check_isa(isa)
        self.moments, self.max_grad_norm, self.threads, self.isa = moments, max_grad_norm, threads, isa
        self.last: LastStep | None = None
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "bias_correction": bias_correction}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("moments", "max_grad_norm", "threads", "isa", "last")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            params = self._params()
            for index, param in enumerate(params):
                _check_param(index, param)
            check_apart(params)
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Steps every parameter that has a gradient; Python's other threads run meanwhile."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        given, groups, stepped, steps, held = [], [], [], [], []
        index = first = 0
        for number, group in enumerate(self.param_groups):
            groups.append(hyper(group))
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    arrays = self._arrays(index, param, state)
                    given.append(_given(index, param, arrays, first, int(state["step"].item()) + 1, number))
                    held.append(arrays)
                    stepped.append(param)
                    steps.append(state["step"])
                first += param.numel()
                index += 1
        if not given:
            return loss
        threads = torch.get_num_threads() if self.threads is None else self.threads
        norm, scale = _cpu_adam.step(given, groups, threads, self.isa, self.max_grad_norm)
        self.last = LastStep(norm, scale or 0.0, scale is None)
        if scale is not None:
            torch._foreach_add_(steps, 1)
            torch.autograd.graph.increment_version(stepped)
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this optimizer, of `torch.optim.AdamW` or of `DeepSpeedCPUAdam`."""
        groups, params = state_dict["param_groups"], self._params()
        check_saved_groups(groups)
        saved = [number for group in groups for number in group["params"]]
        # What does not fit in number is refused by torch, below.
        states = {
            param: self._loaded(index, param, state_dict["state"][number])
            for index, (param, number) in enumerate(zip(params, saved))
            if number in state_dict["state"]
        }
        super().load_state_dict(state_dict)
        # torch gives state the format of its parameter.
        self.state.update(states)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _loaded(self, index: int, param: torch.Tensor, saved: dict[str, Any]) -> dict[str, Any]:
        formats = {"exp_avg": MOMENTS[self.moments], "exp_avg_sq": MOMENTS[self.moments]}
        if param.dtype != torch.float32 and MASTER in saved:
            formats[MASTER] = torch.float32
        check_saved_state(index, param, saved, tuple(formats))
        arrays = {key: torch.empty(param.shape, dtype=dtype).copy_(saved[key]) for key, dtype in formats.items()}
        return {"step": torch.tensor(float(saved["step"])), **arrays}

    def _arrays(self, index: int, param: torch.Tensor, state: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """Weights that are stepped, moments and gradient; state that is not there yet is made."""
        _check_param(index, param)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros(param.shape, dtype=MOMENTS[self.moments])
        if param.dtype == torch.float32:
            weights = param
        else:
            if MASTER not in state:
                state[MASTER] = param.detach().to(torch.float32, copy=True)
            weights = state[MASTER]
            _check_state(index, MASTER, weights, param, torch.float32)
        exp_avg, exp_avg_sq, grad = state["exp_avg"], state["exp_avg_sq"], param.grad
        _check_state(index, "exp_avg", exp_avg, param, MOMENTS[self.moments])
        _check_state(index, "exp_avg_sq", exp_avg_sq, param, MOMENTS[self.moments])
        if grad.layout != torch.strided:
            raise ValueError(f"the gradient of parameter {index} is sparse: step it with torch.optim.SparseAdam, or make it with sparse=False")
        if grad.dtype not in FORMATS or grad.device.type != "cpu":
            raise ValueError(f"the gradient of parameter {index} is {grad.dtype} on {grad.device}: it must be a 16- or 32-bit float on the CPU")
        return weights, exp_avg, exp_avg_sq, grad.contiguous()


def _given(index: int, param: torch.Tensor, arrays: tuple[torch.Tensor, ...], first: int, step: int, group: int) -> tuple[Any, ...]:
    weights, exp_avg, exp_avg_sq, grad = arrays
    narrow = 0 if weights is param else param.data_ptr()
    addresses = (weights.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr(), grad.data_ptr(), narrow)
    formats = (FORMATS[exp_avg.dtype], FORMATS[grad.dtype], FORMATS[param.dtype])
    return index, addresses, formats, param.numel(), first, step, group


def _check_param(index: int, param: torch.Tensor) -> None:
    check_param(index, param)
    if param.device.type != "cpu":
        raise ValueError(f"parameter {index} is on {param.device}: this optimizer steps on the CPU; move it with .cpu(), or use OffloadAdamW")


def _check_state(index: int, key: str, array: torch.Tensor, param: torch.Tensor, dtype: torch.dtype) -> None:
    if array.dtype != dtype or array.numel() != param.numel() or array.device.type != "cpu" or not array.is_contiguous():
        raise ValueError(f"{key} of parameter {index} was changed: it must be contiguous, {dtype}, on the CPU, with {param.numel()} elements")
