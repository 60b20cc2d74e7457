"""`OffloadAdamW` in Hugging Face's Trainer, and in TRL's."""

from __future__ import annotations

from typing import Any

from ._adamw import refuse_unless
from ._offload import OffloadAdamW


class SuperOffloadTrainerMixin:
    """Goes before a Trainer, which then steps by `OffloadAdamW`, with the settings of its `TrainingArguments`.

        class OffloadTrainer(SuperOffloadTrainerMixin, SFTTrainer): ...

    Learning rate, betas, epsilon, weight decay, `max_grad_norm` and `gradient_accumulation_steps` are the arguments'; others of `OffloadAdamW`
    go to the Trainer as `optimizer_cls_and_kwargs=(OffloadAdamW, {"bucket_mib": 128})`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(SuperOffloadTrainerMixin) + 1 :]
        if not any("create_optimizer" in vars(base) for base in behind):
            raise TypeError(f"SuperOffloadTrainerMixin goes before the Trainer: class {cls.__name__}(SuperOffloadTrainerMixin, Trainer)")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            given, own = self.optimizer_cls_and_kwargs or (OffloadAdamW, {})
            refuse_unless(given is OffloadAdamW, f"SuperOffloadTrainerMixin steps by OffloadAdamW, not by {given.__name__}: leave the mixin out")
            self.optimizer_cls_and_kwargs = OffloadAdamW, {**_settings(self.args), **own}
        optimizer = super().create_optimizer(*args, **kwargs)
        optimizer.overlap_forward(_layers(self.model))
        return optimizer

    def create_accelerator_and_postprocess(self) -> None:
        """The one place where every release of the Trainer asks for the norm, also where it does not clip."""
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = lambda *_, **__: self._offload().grad_norm()

    def _offload(self) -> OffloadAdamW:
        # accelerate wraps what it is given.
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _settings(args: Any) -> dict[str, Any]:
    optim = str(getattr(args.optim, "value", args.optim))
    refuse_unless(optim.startswith("adamw_torch"), f"SuperOffloadTrainerMixin steps by AdamW: leave optim={optim!r} out, or the mixin")
    refuse_unless(not args.fp16, "fp16=True scales the loss, and OffloadAdamW takes no GradScaler: use bf16=True")
    return {
        "lr": args.learning_rate,
        "betas": (args.adam_beta1, args.adam_beta2),
        "eps": args.adam_epsilon,
        "max_grad_norm": args.max_grad_norm,
        "accumulation_steps": args.gradient_accumulation_steps,
    }


def _layers(model: Any) -> list[Any]:
    """The modules that are never split between devices: decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
