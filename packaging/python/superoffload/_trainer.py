"""`OffloadAdamW` in Hugging Face's Trainer, and in TRL's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._adamw import refuse_unless
from ._offload import OffloadAdamW

NAME = "adamw_superoffload"

TAKEN = ("adamw_torch", "adamw_torch_fused", NAME)
"""Values of `optim` for which OffloadAdamW stands in: AdamW with states in 32 bits."""


class SuperOffloadTrainerMixin:
    """Goes before a Trainer, which then steps by `OffloadAdamW`, with the settings of its `TrainingArguments`.

        class OffloadTrainer(SuperOffloadTrainerMixin, SFTTrainer): ...

    Learning rate, betas, epsilon, weight decay, `max_grad_norm` and `gradient_accumulation_steps` are the arguments'; others of `OffloadAdamW`
    are given by `optim_args="bucket_mib=128,install_early=true"`, or to Trainers that take it as
    `optimizer_cls_and_kwargs=(OffloadAdamW, {"bucket_mib": 128})`.
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
            adam = {"lr": self.args.learning_rate, "betas": (self.args.adam_beta1, self.args.adam_beta2), "eps": self.args.adam_epsilon}
            self.optimizer_cls_and_kwargs = OffloadAdamW, {**adam, **settings(self.args), **own}
        optimizer = super().create_optimizer(*args, **kwargs)
        offload = self._offload()
        refuse_unless(
            isinstance(offload, OffloadAdamW), f"SuperOffloadTrainerMixin steps by OffloadAdamW, not by {type(offload).__name__}: leave the mixin out"
        )
        offload.overlap_forward(_layers(self.model))
        _hold_for_callbacks(self, offload)
        return optimizer

    def create_accelerator_and_postprocess(self) -> None:
        """The one place where every release of the Trainer asks for the norm, also where it does not clip."""
        settings(self.args)
        super().create_accelerator_and_postprocess()
        self.accelerator.clip_grad_norm_ = lambda *_, **__: self._offload().grad_norm()

    def _offload(self) -> Any:
        """The optimizer itself, of which accelerate makes one that wraps it."""
        return getattr(self.optimizer, "optimizer", self.optimizer)


def _hold_for_callbacks(trainer: Any, optimizer: OffloadAdamW) -> None:
    """A callback that is not one of transformers' may read weights once `step` is done, an average of weights for one: these are there by then."""
    from transformers import TrainerCallback

    class WeightsAreThere(TrainerCallback):
        def on_optimizer_step(self, *_: Any, **__: Any) -> None:
            if any(not type(each).__module__.startswith(("transformers.", __name__)) for each in trainer.callback_handler.callbacks):
                optimizer.wait_for_weights()

    callbacks = trainer.callback_handler.callbacks
    callbacks[:] = [WeightsAreThere(), *(each for each in callbacks if type(each).__qualname__ != WeightsAreThere.__qualname__)]


def register_optim() -> None:
    """Lets transformers' own Trainer step by `OffloadAdamW`, without a subclass: `TrainingArguments(optim="adamw_superoffload", optim_args=...)`.

    transformers has no public way for this: its list of names and its table of handlers are extended. It needs transformers 5.
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
    """Settings of OffloadAdamW in `TrainingArguments`, but for the arithmetic of Adam."""
    optim = str(getattr(args.optim, "value", args.optim))
    refuse_unless(optim in TAKEN, f"OffloadAdamW is AdamW with states in 32 bits: leave optim={optim!r} out, or OffloadAdamW")
    refuse_unless(not args.fp16, "fp16=True scales the loss, and OffloadAdamW takes no GradScaler: use bf16=True")
    refuse_unless(
        args.n_gpu <= 1,
        f"{args.n_gpu} GPUs are visible, on which Trainer would use nn.DataParallel, and OffloadAdamW takes one: set CUDA_VISIBLE_DEVICES=0",
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


OPTIM_ARGS: dict[str, Callable[[str], Any]] = {"bucket_mib": float, "speculate": _truth, "install_early": _truth, "threads": int, "isa": str}


def _optim_args(text: str) -> dict[str, Any]:
    """As transformers writes them: `name=value`, with commas between."""
    given = {}
    for pair in filter(None, text.replace(" ", "").split(",")):
        name, _, value = pair.partition("=")
        refuse_unless(name in OPTIM_ARGS, f"optim_args: OffloadAdamW has no {name!r} there, but {', '.join(OPTIM_ARGS)}")
        try:
            given[name] = OPTIM_ARGS[name](value)
        except ValueError as error:
            raise ValueError(f"optim_args: {pair}: {error}") from None
    return given


def _layers(model: Any) -> list[Any]:
    """The modules that are never split between devices: decoder layers."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]
