"""`OffloadAdamW` in loops of Hugging Face accelerate."""

from __future__ import annotations

from typing import Any

import torch

from ._adamw import refuse_unless
from ._offload import OffloadAdamW


def follow_accelerator(accelerator: Any, optimizer: Any) -> None:
    """Let `OffloadAdamW` take accumulation and clipping from accelerate:

        model, optimizer, data = accelerator.prepare(model, OffloadAdamW(model.parameters(), lr=1e-5, max_grad_norm=None), data)
        follow_accelerator(accelerator, optimizer)

    A gradient leaves the device in the backward pass in which `accelerator.sync_gradients` is True, whatever `accumulation_steps` is; also in a
    short accumulation at the end of the data. `accelerator.clip_grad_norm_` sets the limit for the coming `step` and returns the norm. Without this
    call, `step` uses `max_grad_norm`.

    Args:
        accelerator: The `accelerate.Accelerator`. Several optimizers can follow it.
        optimizer: The optimizer, before or after `accelerator.prepare`.
    """
    own = getattr(optimizer, "optimizer", optimizer)
    refuse_unless(isinstance(own, OffloadAdamW), f"follow_accelerator needs an OffloadAdamW, not a {type(own).__name__}")
    refuse_unless(accelerator.scaler is None, "mixed_precision='fp16' needs a GradScaler, which OffloadAdamW does not support: use 'bf16'")
    count = accelerator.num_processes
    refuse_unless(count == 1, f"OffloadAdamW steps the gradients of one process, and accelerate has {count}: use FSDP with CPUAdamW")
    gradient_state = accelerator.gradient_state
    own._is_last_pass = lambda: gradient_state.sync_gradients
    accelerator.clip_grad_norm_ = Clipping(own, accelerator.clip_grad_norm_)


class Clipping:
    """`clip_grad_norm_` of an accelerator, whose limit becomes that of the optimizer's next step."""

    def __init__(self, optimizer: OffloadAdamW, otherwise: Any) -> None:
        self._optimizer, self._otherwise = optimizer, otherwise

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        trained = {param for param in given if param.grad is not None}
        own = {param for group in self._optimizer.param_groups for param in group["params"] if param.grad is not None}
        if not trained & own:
            return self._otherwise(given, max_norm, norm_type)
        refuse_unless(
            trained == own,
            f"clip_grad_norm_: of the parameters with a gradient, {len(trained & own)} of the {len(own)} that OffloadAdamW steps were given, and "
            f"{len(trained - own)} that it does not step; step() clips by the norm of its own: give the parameters of one optimizer at a time",
        )
        refuse_unless(norm_type == 2, f"clip_grad_norm_: OffloadAdamW clips by the 2-norm, not by norm_type={norm_type}")
        # A limit of infinity asks for the norm alone.
        norm = self._optimizer.grad_norm(0.0 if max_norm == float("inf") else float(max_norm))
        return torch.tensor(norm, device=next(iter(own)).device)
