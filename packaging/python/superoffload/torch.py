"""AdamW optimizers for PyTorch that compute on the CPU.

    from superoffload.torch import CPUAdamW

    optimizer = CPUAdamW(model.parameters(), lr=1e-5, weight_decay=0.1, max_grad_norm=1.0)

Results are bit-identical for every number of threads and on every instruction set.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"superoffload.torch needs PyTorch ({error}): pip install torch", name=error.name) from error

from ._accelerate import follow_accelerator
from ._adamw import (
    _cpu_adam,
    check_apart,
    check_group,
    check_isa,
    hyper,
    local,
    refuse_switches,
    refuse_unless,
    step_count,
    taken,
)
from ._load import LIVE, check_saved_state, load_state
from ._moments import FORMATS, KEYS, check_beta1, check_formats
from ._offload import OffloadAdamW, OffloadStep
from ._rows import MASTER, Batch, Row, check_cpu_param
from ._shards import GRADIENT_CLIPPING, check_norm_group, check_partitioned, groups_of, is_partitioned, over_ranks, refuse_partitioned
from ._trainer import SuperOffloadTrainerMixin, register_optim

__all__ = ["CPUAdamW", "LastStep", "OffloadAdamW", "OffloadStep", "SuperOffloadTrainerMixin", "follow_accelerator", "register_optim"]


class LastStep(NamedTuple):
    """Result of the last step of `CPUAdamW`."""

    grad_norm: float | None
    """Norm of all gradients before clipping; None without `max_grad_norm`."""
    clip: float
    """Factor by which all gradients were multiplied; 0 if the step was skipped."""
    skipped: bool
    """Whether the step was skipped because a gradient was NaN or infinite."""


class CPUAdamW(torch.optim.Optimizer):
    """AdamW for parameters on the CPU. Replaces `torch.optim.AdamW` and DeepSpeed's `DeepSpeedCPUAdam`.

    Parameters may be float32, bfloat16 or float16. For bfloat16 and float16 parameters the state has a float32 copy, `master_param`, which the
    optimizer updates and then rounds. Gradients may have any of the three formats.

    Parameters may be `DTensor`s of FSDP2 with CPU offload: each rank steps its shard, and the gradient norm covers all shards.

    Args:
        params: Parameters or parameter groups, as for `torch.optim.AdamW`.
        lr: Learning rate.
        betas: Coefficients of the running averages of the gradient and of its square.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        moments: Format of both moments in the state: "float32", "bfloat16", or "int8", which has groups of 128 elements in 132 bytes. With "int8"
            the moments of a parameter are a flat array of bytes, and `DTensor`s are refused.
        masters: Format of the float32 weights. Only "float32" is supported.
        max_grad_norm: Clip the norm of all gradients to this value in `step`, and skip a step whose gradients are not finite. `last` has the norm
            and the clip factor. None disables clipping and the check for finite gradients.
        norm_group: Needed with `max_grad_norm`, plain parameters and several ranks: the process group over which the parameters are sharded, or
            "replicated" if each rank has whole gradients.
        threads: Number of threads; `torch.get_num_threads()` by default.
        isa: Instruction set of the CPU; "auto" selects the fastest one.
        foreach: Accepted for compatibility with `torch.optim.AdamW`, and ignored.
        fused: Accepted for compatibility with `torch.optim.AdamW`, and ignored.
        amsgrad: Only False is supported.
        capturable: Only False is supported.
        maximize: Only False is supported.
        differentiable: Only False is supported.
        bias_correction: Only True is supported. Accepted for compatibility with `DeepSpeedCPUAdam`.
        adamw_mode: Only True is supported. Accepted for compatibility with `DeepSpeedCPUAdam`.
        fp32_optimizer_states: Only True is supported. Accepted for compatibility with `DeepSpeedCPUAdam`.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
        moments: str = "float32",
        masters: str = "float32",
        max_grad_norm: float | None = None,
        norm_group: Any = "auto",
        threads: int | None = None,
        isa: str = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        refuse_switches(amsgrad=amsgrad, capturable=capturable, maximize=maximize, differentiable=differentiable)
        refuse_unless(adamw_mode, "adamw_mode=False (weight decay added to gradients) is not supported: use torch.optim.Adam, or leave it out")
        refuse_unless(fp32_optimizer_states, "fp32_optimizer_states=False is not supported: moments='bfloat16' stores moments in 16 bits, 'int8' in 8")
        check_formats(moments, masters)
        refuse_unless(threads is None or threads >= 1, f"threads must be at least 1, not {threads}; None takes torch.get_num_threads()")
        refuse_unless(max_grad_norm is None or max_grad_norm > 0, f"max_grad_norm must be above 0, not {max_grad_norm}; None does not clip")
        check_isa(isa)
        check_norm_group(norm_group)
        self.moments, self.max_grad_norm, self.norm_group, self.threads, self.isa = moments, max_grad_norm, norm_group, threads, isa
        self.last: LastStep | None = None
        self._group_count, self._saw_partitioned = 0, False
        self._forget_rows()
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad, "bias_correction": bias_correction}
        super().__init__(params, defaults)

    def __getstate__(self) -> dict[str, Any]:
        own = ("moments", "max_grad_norm", "norm_group", "threads", "isa", "last", "_group_count", "_saw_partitioned")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        added_later = {"norm_group": "auto", "_group_count": len(state["param_groups"]), "_saw_partitioned": False}
        super().__setstate__({**added_later, **state} if "moments" in state else state)
        self._forget_rows()

    def _forget_rows(self) -> None:
        LIVE.add(self)
        self._rows: dict[int, Row] = {}
        self._batches: list[tuple[tuple[Any, ...], Batch]] = []
        self._stepped: list[Row] = []

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        try:
            check_group(self.param_groups[-1])
            check_beta1(self.param_groups[-1], self.moments)
            check_partitioned(self._params(), self.max_grad_norm)
            trained = [(index, param) for index, param in enumerate(self._params()) if param.requires_grad and not is_partitioned(param)]
            for index, param in trained:
                check_cpu_param(index, param)
                FORMATS[self.moments].check_param(index, param)
            check_apart([local(param) for _, param in trained])
            self._groups_of_all()
        except ValueError:
            self.param_groups.pop()
            raise
        self._group_count = len(self.param_groups)
        self._saw_partitioned = self._saw_partitioned or any(map(is_partitioned, self._params()))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all parameters that have a gradient. Other Python threads can run meanwhile."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_engine()
        spread = self._groups_of_all()
        self._batch(self._with_gradients())
        threads = torch.get_num_threads() if self.threads is None else self.threads
        groups = [hyper(group) for group in self.param_groups]
        updates, held = [], []
        for _, batch in self._batches:
            update, gradients = batch.update(groups, threads, self.isa)
            updates.append(update), held.append(gradients)
        norm, scale = self._judge(updates, spread)
        if scale is not None:
            _cpu_adam.step(updates, scale)
            torch.autograd.graph.increment_version([row.param for row in self._stepped])
        if updates:
            self.last = LastStep(norm, scale or 0.0, scale is None)
        return loss

    def _check_engine(self) -> None:
        """Check that DeepSpeed's engine has replaced partitioned parameters, and that no norm is asked for where it steps group by group."""
        if self._saw_partitioned:
            for index, param in enumerate(self._params()):
                refuse_partitioned(index, param)
        if self.max_grad_norm is not None and len(self.param_groups) < self._group_count and "deepspeed" in sys.modules:
            raise ValueError(
                f"max_grad_norm: this step has {len(self.param_groups)} of {self._group_count} parameter groups, because DeepSpeed's engine "
                f"steps them one after the other, so that no step has the norm of all gradients: {GRADIENT_CLIPPING}"
            )

    def _groups_of_all(self) -> list[tuple[Any, ...]]:
        """Return the distinct process groups of all parameters' norms. All ranks join the sums over these groups, with a gradient or without."""
        if self.max_grad_norm is None:
            return []
        return list(dict.fromkeys(groups_of(param, self.norm_group) for param in self._params() if param.requires_grad or param.grad is not None))

    def _with_gradients(self) -> list[Row]:
        """Return the parameters to step, in the flat order."""
        stepped, index, first, moments = [], 0, 0, FORMATS[self.moments]
        for number, group in enumerate(self.param_groups):
            for param in group["params"]:
                first = moments.first(first)
                if param.grad is not None:
                    row, state, place = self._rows.get(index), self.state[param], (index, first, number)
                    if row is None or not row.holds(place, param, state):
                        row = self._rows[index] = Row(place, param, state, moments)
                    stepped.append(row)
                first += local(param).numel()
                index += 1
        return stepped

    def _batch(self, stepped: list[Row]) -> None:
        """Build one batch of rows per tuple of process groups. The batches of the last step are reused if the rows are the same."""
        if stepped == self._stepped:
            return
        parts: dict[tuple[Any, ...], list[Row]] = {}
        for row in stepped:
            parts.setdefault(groups_of(row.param, self.norm_group) if self.max_grad_norm is not None else (), []).append(row)
        self._stepped = []
        self._batches = [(groups, Batch(rows)) for groups, rows in parts.items()]
        self._stepped = stepped

    def _judge(self, updates: list[Any], spread: list[tuple[Any, ...]]) -> tuple[float | None, float | None]:
        """Return the norm of all gradients and the clip factor; the factor is None if a gradient is not finite."""
        if self.max_grad_norm is None:
            return None, 1.0
        by_groups = dict(zip((groups for groups, _ in self._batches), updates))
        total, saw_nonfinite = 0.0, False
        for groups in spread:
            update = by_groups.get(groups)
            if update is not None:
                update.sums()
            squares, its_nonfinite = over_ranks(*_cpu_adam.squares([] if update is None else [update]), groups)
            total, saw_nonfinite = total + squares, saw_nonfinite or its_nonfinite
        return _cpu_adam.verdict(total, saw_nonfinite, self.max_grad_norm)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of a `CPUAdamW`, `OffloadAdamW`, `torch.optim.AdamW` or `DeepSpeedCPUAdam` optimizer.

        Arrays of `state_dict` with the right format and layout become the state without a copy, as in torch. Arrays that another optimizer of this
        package uses are copied.
        """
        load_state(self, state_dict, self._params(), self._loaded)

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    def _loaded(self, index: int, param: torch.Tensor, saved: dict[str, Any], seen: set[int]) -> dict[str, Any]:
        # OffloadAdamW calls the float32 weights "param".
        master = MASTER if MASTER in saved else "param"
        check_saved_state(index, param, saved, KEYS if param.dtype == torch.float32 else (*KEYS, master))
        arrays = {key: FORMATS[self.moments].taken(key, param, saved[key], seen) for key in KEYS}
        if param.dtype != torch.float32 and master in saved:
            arrays[MASTER] = taken(param, saved[master], torch.float32, seen)
        return {"step": step_count(saved["step"]), **arrays}
