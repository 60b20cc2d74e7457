"""`OffloadAdamW` in the Trainers of transformers and TRL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._adamw import refuse_unless
from ._offload import OffloadAdamW

NAME = "adamw_superoffload"

TAKEN = ("adamw_torch", "adamw_torch_fused", NAME)
"""Values of `optim` that OffloadAdamW can replace: AdamW with 32-bit states."""


class SuperOffloadTrainerMixin:
    """Mixin that makes a Trainer of transformers or TRL use `OffloadAdamW`. Put it before the Trainer in the list of base classes:

        class OffloadTrainer(SuperOffloadTrainerMixin, SFTTrainer): ...

    Learning rate, betas, epsilon, weight decay, `max_grad_norm` and `gradient_accumulation_steps` come from `TrainingArguments`. Pass other arguments
    of `OffloadAdamW` as `optim_args="bucket_mib=128,threads=8"`, or, if the Trainer accepts it, as
    `optimizer_cls_and_kwargs=(OffloadAdamW, {"bucket_mib": 128})`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        behind = cls.__mro__[cls.__mro__.index(SuperOffloadTrainerMixin) + 1 :]
        if not any("create_optimizer" in vars(base) for base in behind):
            raise TypeError(f"SuperOffloadTrainerMixin must come before the Trainer: class {cls.__name__}(SuperOffloadTrainerMixin, Trainer)")

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        if self.optimizer is None:
            given, own = self.optimizer_cls_and_kwargs or (OffloadAdamW, {})
            refuse_unless(given is OffloadAdamW, f"SuperOffloadTrainerMixin uses OffloadAdamW, not {given.__name__}: leave the mixin out")
            adam = {"lr": self.args.learning_rate, "betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}
            self.optimizer_cls_and_kwargs = OffloadAdamW, {**adam, **settings(self.args), **own}
        optimizer = super().create_optimizer(*args, **kwargs)
        offload = self._offload()
        refuse_unless(
            isinstance(offload, OffloadAdamW), f"SuperOffloadTrainerMixin uses OffloadAdamW, not {type(offload).__name__}: leave the mixin out"
        )
        offload.overlap_forward(_layers(self.model))
        _hold_for_callbacks(self, offload)
        return optimizer

    def create_accelerator_and_postprocess(self) -> None:
        """Replace accelerate's clipping: every release of the Trainer gets the norm from there, also without clipping."""
        settings(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = lambda *_, **__: self._offload().grad_norm()

    def _offload(self) -> Any:
        """Return the optimizer itself. accelerate wraps it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _hold_for_callbacks(trainer: Any, optimizer: OffloadAdamW) -> None:
    """Wait for the weights after `step` if a callback may read them, for example to average weights. Callbacks of transformers do not read them."""
    from transformers import TrainerCallback

    class WeightsAreThere(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            if any(not type(each).__module__.startswith(("transformers.", __name__)) for each in trainer.callback_handler.callbacks):
                optimizer.wait_for_weights()

    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [WeightsAreThere(), *(each for each in callbacks if type(each).__qualname__ != WeightsAreThere.__qualname__)]


def register_optim() -> None:
    """Make the Trainer of transformers support `TrainingArguments(optim="adamw_superoffload", optim_args=...)`, without a subclass.

    Needs transformers 5. transformers has no public interface for this, so the function extends its list of names and its table of handlers.
    """
    from transformers.training_args import OptimizerNames

    try:
        from transformers.trainer_optimizer import _OPTIMIZER_HANDLERS
    except ImportError as error:
        raise ImportError("register_optim needs transformers 5, which has a table of optimizers: use SuperOffloadTrainerMixin instead") from error
    if NAME not in OptimizerNames._value2member_map_:
        member = str.__new__(OptimizerNames, NAME)
        member._name_, member._value_ = NAME.upper(), NAME
        OptimizerNames._member_map_[member._name_] = OptimizerNames._value2member_map_[NAME] = member
        OptimizerNames._member_names_.append(member._name_)
    _OPTIMIZER_HANDLERS[OptimizerNames(NAME)] = lambda context: (
        OffloadAdamW,
        {**context.optimizer_kwargs, **context.adam_kwargs, **settings(context.args)},
    )


def settings(args: Any) -> dict[str, Any]:
    """Return the settings of OffloadAdamW from `TrainingArguments`, except for Adam's hyperparameters."""
    optim = str(getattr(args.optim, "value", args.optim))
    refuse_unless(
        optim in TAKEN,
        f"optim={optim!r} is not AdamW with states in 32 bits, which OffloadAdamW replaces: remove optim, or do not use OffloadAdamW",
    )
    refuse_unless(not args.fp16, "fp16=True needs a GradScaler, which OffloadAdamW does not support: use bf16=True")
    refuse_unless(
        args.n_gpu <= 1,
        f"{args.n_gpu} GPUs are visible, on which Trainer would use nn.DataParallel, and OffloadAdamW supports one GPU: set CUDA_VISIBLE_DEVICES=0",
    )
    refuse_unless(args.world_size == 1, f"OffloadAdamW steps the gradients of one process, and there are {args.world_size}: use FSDP with CPUAdamW")
    return {
        "max_grad_norm": args.max_grad_norm,
        "accumulation_steps": args.gradient_accumulation_steps,
        **_optim_args(args.optim_args or ""),
    }


def _truth(word: str) -> bool:
    refuse_unless(word.lower() in ("true", "false", "1", "0"), f"{word!r} is neither true nor false")
    return word.lower() in ("true", "1")


OPTIM_ARGS: dict[str, Callable[[str], Any]] = {
    "bucket_mib": float,
    "speculate": _truth,
    "moments": str,
    "masters": str,
    "threads": int,
    "isa": str,
}


def _optim_args(text: str) -> dict[str, Any]:
    """Parse `optim_args` in the notation of transformers: `name=value`, separated by commas."""
    given = {}
    for pair in filter(None, text.replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        refuse_unless(name in OPTIM_ARGS, f"optim_args: {name!r} is no setting of OffloadAdamW; its settings are {', '.join(OPTIM_ARGS)}")
        try:
            given[name] = OPTIM_ARGS[name](value)
        except ValueError as error:
            raise ValueError(f"optim_args: {pair}: {error}") from None
    return given


def _layers(model: Any) -> list[Any]:
    """Return the modules that must not be split between devices, which are the decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
