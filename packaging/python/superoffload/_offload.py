"""AdamW on the CPU for parameters on a GPU. The CPU works while backward runs."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import torch

from ._adamw import (
    _cpu_adam,
    check_apart,
    check_group,
    check_isa,
    check_param,
    flat,
    hyper,
    in_layout_of,
    is_sharded,
    refuse_switches,
    refuse_unless,
    step_count,
    taken,
)
from ._buckets import ALIGN, Bucket, Gone, Member, Part, Pending, Stage, cut, new_state, own_arrays, take_changes
from ._edits import ADVICE, Seen
from ._hooks import Hold, hold, leave, on_gradient, remove
from ._link import link_to
from ._load import LIVE, check_saved_state, load_state
from ._moments import FORMATS, KEYS, check_beta1, check_formats
from ._shards import is_partitioned, ranks

STAGES = 3
"""Number of buckets with new weights in flight between the CPU and the device at once, without speculation."""


@dataclass
class OffloadStep:
    """Result of a step of `OffloadAdamW`."""

    grad_norm: float
    """Norm of all gradients before clipping."""
    clip: float
    """Factor by which all gradients were multiplied; 0 if the step was skipped."""
    verdict: str
    """`commit`: gradients were used unchanged. `clip`: gradients were clipped. `skip`: a gradient was NaN or infinite, and nothing changed."""
    speculated: int
    """Number of buckets with new weights that were computed before the verdict."""
    redone: int
    """Number of these buckets with new weights that had to be discarded."""
    waits: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Pairs of events of the device's stream, before and after it waited for weights."""

    @property
    def exposed_ms(self) -> float:
        """Milliseconds in which the device waited for this step's weights after the end of backward, in `step` and in forward passes so far."""
        if self.waits:
            self.waits[-1][1].synchronize()
        return sum(before.elapsed_time(after) for before, after in self.waits)


@dataclass
class _Round:
    """State of one step, from the first gradient that leaves the device to the end of `step`."""

    hyper: list[tuple[float, ...]]
    speculates: bool
    members: list[Member] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    """Buckets in the order of completion. The next forward pass needs the last ones first."""
    ended: Any = None
    """Event at the end of backward."""
    squares: tuple[float, bool] = (0.0, False)
    """Sum of squares of all gradients, and whether one of them is NaN or infinite."""
    norm: float = 0.0
    scale: float | None = None
    is_judged: bool = False
    norms: dict[int, float] | None = None
    """Norm of each parameter's gradient, once user code has requested one."""

    def limit(self, max_grad_norm: float | None) -> None:
        self.norm, self.scale = _cpu_adam.verdict(*self.squares, max_grad_norm or 0.0)


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW for parameters on a GPU, with state in host memory. The CPU computes the update while backward runs.

    Parameters may be bfloat16, float16 or float32, and must be on one GPU. Parameters on the CPU work as well. Frozen parameters need no memory. A
    gradient is copied to the host as soon as the last of `accumulation_steps` backward passes has produced it. Do not use `.grad` after backward:
    it then holds a placeholder, which supports only norms and `clip_grad_norm_`. `last` describes the last step.

    With `speculate` the CPU computes new weights before all gradients have arrived. `step` then computes the gradient norm, and either keeps the new
    weights, or computes them again with clipped gradients, or drops them if a gradient is NaN or infinite. Results are bit-identical to those without
    speculation, and to those of `CPUAdamW` with the same `max_grad_norm`.

    With `speculate` the state is updated while the device runs the next forward pass, or together with the next step. Call `synchronize` before you
    read `state` yourself.

    Args:
        params: Parameters or parameter groups, as for `torch.optim.AdamW`.
        lr: Learning rate.
        betas: Coefficients of the running averages of the gradient and of its square.
        eps: Term added to the denominator.
        weight_decay: Decoupled weight decay.
        moments: Format of both moments in the state: "float32", "bfloat16", or "int8", which has groups of 128 elements in 132 bytes.
        masters: Format of the float32 weights. Only "float32" is supported.
        max_grad_norm: Clip the norm of all gradients to this value in `step`. None or 0 disables clipping.
        accumulation_steps: Number of backward passes before each `step`.
        bucket_mib: Size in MiB of a bucket, the unit of copies and updates.
        speculate: Compute new weights before the gradient norm is known. Needs host memory for a second set of gradients.
        threads: Number of threads; `torch.get_num_threads() - 2` by default.
        isa: Instruction set of the CPU; "auto" selects the fastest one.
        foreach: Accepted for compatibility with `torch.optim.AdamW`, and ignored.
        fused: Accepted for compatibility with `torch.optim.AdamW`, and ignored.
        amsgrad: Only False is supported.
        capturable: Only False is supported.
        maximize: Only False is supported.
        differentiable: Only False is supported.
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
        moments: str = "float32",
        masters: str = "float32",
        max_grad_norm: float | None = 1.0,
        accumulation_steps: int = 1,
        bucket_mib: float = 64,
        speculate: bool = True,
        threads: int | None = None,
        isa: str = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        refuse_switches(amsgrad=amsgrad, capturable=capturable, maximize=maximize, differentiable=differentiable)
        refuse_unless(max_grad_norm is None or 0 <= max_grad_norm, f"max_grad_norm must be 0 or more, not {max_grad_norm}; 0 does not clip")
        refuse_unless(accumulation_steps >= 1, f"accumulation_steps must be at least 1, not {accumulation_steps}")
        refuse_unless(1 / 64 <= bucket_mib <= 4096, f"bucket_mib must be from 1/64 to 4096, not {bucket_mib}")
        refuse_unless(threads is None or threads >= 1, f"threads must be at least 1, not {threads}; None uses all threads of torch except two")
        check_formats(moments, masters)
        check_isa(isa)
        _refuse_ranks()
        self.moments, self.max_grad_norm, self.accumulation_steps, self.isa = moments, max_grad_norm, accumulation_steps, isa
        self.speculate = speculate
        # With accelerate: whether the present backward pass is the last one before `step`.
        self._is_last_pass: Callable[[], bool] | None = None
        self.threads = threads or max(1, torch.get_num_threads() - 2)
        self.last: OffloadStep | None = None
        self._bucket_bytes = int(bucket_mib * 2**20) // ALIGN * ALIGN
        self._members: list[Member] = []
        # Number of elements of all members in the flat order.
        self._elems = 0
        self._buckets: list[Bucket] = []
        self._held_by_forward: set[Bucket] = set()
        self._round: _Round | None = None
        self._history = _cpu_adam.History()
        # Number of buckets whose state a step without speculation updates together with the weights. Other states follow in backward.
        self._at_once = 0
        # A single thread runs all tasks in the order of their submission.
        self._worker = ThreadPoolExecutor(1, "superoffload")
        self._link: Any = None
        self._behind: deque[Bucket] = deque()
        self._failure: Exception | None = None
        self._stages: Any = None
        # Host memory that holds neither gradients nor weights. Only the worker thread accesses it.
        self._free: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self._holds: list[Any] = []
        weakref.finalize(self, remove, self._handles)
        weakref.finalize(self, leave, self._holds, self._buckets)
        LIVE.add(self)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OffloadAdamW holds a thread and streams, so it cannot be pickled or copied: save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        why = "add_param_group: gradients of the coming step have already been copied to the CPU: call step() or zero_grad() first"
        refuse_unless(self._round is None, why)
        super().add_param_group(param_group)
        group, first, elems = len(self.param_groups) - 1, len(self._members), self._elems
        members = [Member(index, group, param, self._place(param)) for index, param in enumerate(self.param_groups[-1]["params"], first)]
        try:
            check_group(self.param_groups[-1])
            check_beta1(self.param_groups[-1], self.moments)
            self._admit([member for member in members if member.param.requires_grad])
        except ValueError:
            self.param_groups.pop()
            self._elems = elems
            raise
        self._members += members

    def _place(self, param: torch.Tensor) -> int:
        """Return the offset of the parameter's first element in the flat order, behind the parameters before it."""
        first = FORMATS[self.moments].first(self._elems)
        self._elems = first + param.numel()
        return first

    def _admit(self, members: list[Member]) -> None:
        """Give trainable parameters their buckets and hooks. A frozen parameter has neither; `step` admits it if it is trained later."""
        if not members:
            return
        trained = [member for member in self._members if member.gone is not None]
        for member in members:
            _check_member(member, (trained or members)[0].param)
        check_apart([member.param for member in trained + members])
        self._link = self._link or link_to(members[0].param.device)
        for member in members:
            member.join(weakref.ref(self))
            self._link.adopt(member.param.data)
            self._handles.append(member.param.register_post_accumulate_grad_hook(on_gradient(weakref.ref(self), member)))
        self._buckets += cut(members, self._bucket_bytes)
        # The next bucket may be larger than the existing stages.
        self._stages = None

    def overlap_forward(self, modules: Iterable[torch.nn.Module]) -> None:
        """Let `step` return before the weights of `modules` are on the device. Each module waits for its weights when it is called or saved.

        Call `wait_for_weights` before you copy the model, or before code other than the modules' forward reads their weights.

        Args:
            modules: The layers of the model. Every forward pass must call each of them. A second call replaces the modules of the first.
        """
        modules, owner = list(modules), weakref.ref(self)
        if self._holds:
            self._hold(self._buckets)
            remove(self._holds)
            self._holds.clear()
        inside = {param for module in modules for param in module.parameters()}
        for module in modules:
            own = set(module.parameters())
            buckets = {part.bucket: None for member in self._members if member.param in own for part in member.parts}
            wait = Hold(owner, self._link, list(buckets))
            self._holds += [module.register_forward_pre_hook(wait), module.register_state_dict_pre_hook(wait)]
        self._held_by_forward = {bucket for bucket in self._buckets if all(part.member.param in inside for part in bucket.parts)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Finish the step: compute the gradient norm, then keep, clip or skip the update. Device work submitted afterwards uses the new weights."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        now = self._judge()
        if now is None:
            return loss
        groups = self._hyper()
        holds = now.scale == 1.0 and groups == now.hyper
        speculated = sum(bucket.is_speculated for bucket in now.buckets)
        verdict = "skip" if now.scale is None else "commit" if now.scale == 1.0 else "clip"
        self.last = OffloadStep(now.norm, now.scale or 0.0, verdict, speculated, 0 if holds else speculated)
        self._history.record(now.scale)
        if now.scale is None:
            self._drop(now)
        else:
            torch._foreach_add_([self.state[member.param]["step"] for member in now.members], 1)
            self._make_final(now, groups, holds)
        self._end(now)
        self._hold([bucket for bucket in now.buckets if bucket not in self._held_by_forward], now.ended)
        return loss

    @torch.no_grad()
    def grad_norm(self, max_grad_norm: float | None = None) -> float | None:
        """Return the norm of all gradients before clipping, or None without gradients. Waits until all gradients are on the CPU. Call before `step`.

        Args:
            max_grad_norm: Limit for the coming `step` alone; 0 disables clipping. None keeps the optimizer's limit.
        """
        now = self._judge()
        if now is not None and max_grad_norm is not None:
            now.limit(max_grad_norm)
        return None if now is None else now.norm

    def _norm_of(self, index: int) -> float:
        """Return the norm of one parameter's gradient, for code that reads the norm of its `.grad`."""
        self.grad_norm()
        now = self._round
        if now.norms is None:
            squares = _cpu_adam.squares_by_parameter([bucket.update for bucket in now.buckets])
            now.norms = {index: square**0.5 for index, square in squares.items()}
        return now.norms[index]

    def _check_factor(self, factor: float) -> None:
        """Check the factor by which `clip_grad_norm_` multiplies gradients: it must agree with the factor of `step`."""
        scale = self._round.scale
        if scale is not None and not math.isclose(factor, scale, rel_tol=1e-3):
            raise RuntimeError(
                f"gradients are multiplied by {factor:.6g} after backward, and OffloadAdamW, which clips in step() by max_grad_norm="
                f"{self.max_grad_norm}, multiplies them by {scale:.6g}: give OffloadAdamW the max_grad_norm of clip_grad_norm_, and ask "
                "grad_norm() where only the norm is wanted"
            )

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients. If a step has begun, the weights are restored."""
        if now := self._round:
            now.ended = self._link.mark()
            self._drop(now)
            self._end(now)
            self._hold(now.buckets)
        for member in self._members:
            member.micro_steps, member.seen = 0, None
        super().zero_grad(set_to_none)

    def wait_for_weights(self) -> None:
        """Make device work that is submitted from now on wait for the weights of the last step, including modules of `overlap_forward`."""
        self._hold(self._buckets)

    def synchronize(self) -> None:
        """Wait until the state and the weights are those after the last `step`."""
        for bucket in self._buckets:
            bucket.wait()
        self._settle_all(self._buckets)
        self._hold(self._buckets)
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """Return the state like `torch.optim.AdamW`, with the float32 weights as `param`. Calls `synchronize`."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of an `OffloadAdamW`, `CPUAdamW` or `torch.optim.AdamW` optimizer.

        A saved float32 weight is used if it rounds to the parameter's value at the next step; otherwise the parameter's value is used. Arrays of
        `state_dict` are copied at that step, one after the other. If you drop `state_dict` before, loading needs no memory besides the state.
        """
        load_state(self, state_dict, [member.param for member in self._members], self._loaded)
        for member in self._members:
            member.version, member.borrows = None, True

    def _loaded(self, index: int, param: torch.Tensor, saved: dict[str, Any], seen: set[int]) -> dict[str, torch.Tensor]:
        """Return a parameter's state. Without saved float32 weights, the parameter's value is used."""
        # CPUAdamW calls the float32 weights "master_param".
        master = "param" if "param" in saved else "master_param"
        check_saved_state(index, param, saved, (*KEYS, master))
        arrays = {key: FORMATS[self.moments].taken(key, param, saved[key], seen) for key in KEYS}
        arrays["param"] = taken(param, saved.get(master, param.detach()), torch.float32, seen)
        return {"step": step_count(saved["step"]), **arrays}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Torch calls this to install a loaded state, after its checks."""
        self.zero_grad()
        self.synchronize()
        super().__setstate__(state)

    def _hyper(self) -> list[tuple[float, ...]]:
        return [hyper(group) for group in self.param_groups]

    def _on_gradient(self, member: Member) -> None:
        """Runs after each backward pass that produced a gradient for `member`."""
        if member.param.grad is None:
            # Another hook has taken the gradient.
            return
        with torch.no_grad():
            if member.is_taken:
                self._forget(member)
            # If the model's zero_grad has dropped the gradient, this backward pass counts as the first one again.
            is_same = member.seen is not None and member.seen() is member.param.grad
            member.micro_steps = member.micro_steps + 1 if is_same else 1
            if self._is_last_pass() if self._is_last_pass else member.micro_steps == self.accumulation_steps:
                self._take(member, in_backward=True)
            else:
                member.seen = weakref.ref(member.param.grad)

    def _forget(self, member: Member) -> None:
        """Undo `_take` of a gradient that was dropped, for example by the model's zero_grad."""
        now = self._round
        now.members.remove(member)
        now.is_judged = member.is_taken = False
        now.norms = None
        for bucket in {part.bucket: None for part in member.parts}:
            if bucket in now.buckets:
                now.buckets.remove(bucket)
                bucket.is_speculated = False
                bucket.task = self._worker.submit(_unstage, bucket)
        for part in member.parts:
            part.bucket.wait()
            part.bucket.arrived.remove(part)

    def _take(self, member: Member, in_backward: bool) -> None:
        """Copy a gradient to the host, and submit the buckets that it completes."""
        param = member.param
        _check_gradient(member)
        now = self._round = self._round or self._begin()
        if now.is_judged:
            raise RuntimeError(f"the gradient of parameter {member.index} was computed after grad_norm() had returned: call step() first")
        # The worker may still be busy with the last step, which reads memory that is changed below.
        for part in member.parts:
            part.bucket.wait()
            if part.bucket.slot is None:
                part.bucket.slot = self._room() if self.speculate else self._link.room(part.bucket.size)
        state = self._state_of(member)
        member.number = int(state["step"].item()) + 1
        gradient = flat(in_layout_of(param, param.grad.detach()))
        param.grad, member.version, member.is_taken, member.seen = member.gone, param._version, True, None
        now.members.append(member)
        for part in member.parts:
            # The slot may hold weights that the last step is sending.
            self._link.bring(part.of(part.bucket.slot), gradient[part.start : part.stop], part.bucket.sent)
            part.bucket.arrived.append(part)
            if len(part.bucket.arrived) == len(part.bucket.parts):
                self._submit(part.bucket, now.speculates and in_backward)

    def _begin(self) -> _Round:
        _refuse_ranks()
        self._raise_failure()
        return _Round(self._hyper(), self.speculate and self._history.pays())

    def _state_of(self, member: Member) -> dict[str, torch.Tensor]:
        state = self.state[member.param]
        if "step" not in state:
            state.update(new_state(member.param, FORMATS[self.moments]))
        elif member.param._version != member.version:
            self._take_changes(member)
        return state

    def _take_changes(self, member: Member) -> None:
        """Update the float32 weights of a parameter that other code has changed."""
        state = self.state[member.param]
        self._settle_all(part.bucket for part in member.parts)
        if member.borrows:
            own_arrays(state, member.param, FORMATS[self.moments])
            member.borrows = False
        take_changes(state["param"], member.param)

    def _seen(self, now: _Round) -> Seen:
        """Return a sample of the weights that backward has used."""
        parts = [part for member in now.members for part in member.parts]
        # The last step's weights may still be on their way.
        self._hold({part.bucket: None for part in parts})
        return Seen(self._link, parts)

    def _take_uncounted_changes(self, now: _Round, seen: Seen) -> None:
        """Take over changes through `.data`. New weights that were computed without them are computed again."""
        changed = sorted(seen.changed(), key=lambda member: member.index)
        for member in changed:
            self._take_changes(member)
            for part in member.parts:
                part.bucket.is_speculated = False
        if changed:
            warnings.warn(
                f"OffloadAdamW: parameter {changed[0].index} was changed through .data. Changes of this kind are found by a sample, which may miss a "
                f"change of a few elements, and each costs a second computation of the step: {ADVICE}",
                stacklevel=4,
            )

    def _submit(self, bucket: Bucket, speculates: bool) -> None:
        now = self._round
        # Sort into the flat order, since hooks run in any order.
        bucket.arrived.sort(key=lambda part: part.offset)
        bucket.landed, bucket.is_speculated = self._link.brought(), speculates
        bucket.task = self._worker.submit(self._first_pass, bucket, list(bucket.arrived), now.hyper, speculates)
        now.buckets.append(bucket)

    def _judge(self) -> _Round | None:
        """Take gradients that have not been copied yet, and wait until the norm is known."""
        for member in self._members:
            if member.is_taken and member.param.grad is not member.gone:
                self._forget(member)
            if member.param.grad is not None and not member.is_taken:
                if member.gone is None:
                    self._admit([member])
                self._take(member, in_backward=False)
        now = self._round
        if now is None or now.is_judged:
            return now
        if not now.members:
            self._end(now)
            return None
        now.ended = self._link.mark()
        for member in now.members:
            _check_untouched(member)
        seen = self._seen(now)
        submitted = set(now.buckets)
        for bucket in self._buckets:
            if bucket.arrived and bucket not in submitted:
                self._submit(bucket, speculates=False)
        late = _wait(now)
        if not now.speculates:
            self._at_once = min(len(self._buckets), max(0, self._at_once + (late // 2 if late > 2 else -1)))
        self._raise_failure()
        self._take_uncounted_changes(now, seen)
        updates = [bucket.update for bucket in self._buckets if bucket.arrived]
        now.squares = _cpu_adam.squares(updates)
        now.limit(self.max_grad_norm)
        now.is_judged = True
        return now

    def _make_final(self, now: _Round, groups: list[tuple[float, ...]], holds: bool) -> None:
        """Send the weights that the device lacks, in the order in which it needs them; then update the state."""
        order = sorted(now.buckets[::-1], key=lambda bucket: bucket in self._held_by_forward)
        redone = [bucket for bucket in order if not (holds and bucket.is_speculated)]
        # Backward completes these buckets first, so their states are needed first. Forward needs their weights last.
        at_once = set(redone[len(redone) - (min(self._at_once, len(redone)) if self.speculate else len(redone)) :])
        for bucket in order:
            if holds and bucket.is_speculated:
                self._submit_weights(bucket, groups, now.ended, None)
            elif bucket in at_once:
                self._submit_weights(bucket, groups, now.ended, lambda update: update.step(now.scale))
            else:
                self._submit_weights(bucket, groups, now.ended, lambda update: update.weights(now.scale))
        deferred = [(bucket, None if bucket in at_once else bucket.arrived) for bucket in now.buckets]
        task = self._worker.submit(self._defer, deferred, now.scale)
        for bucket in now.buckets:
            bucket.task = task

    def _drop(self, now: _Round) -> None:
        """Drop new weights, which the device does not have yet."""
        for bucket in now.buckets:
            bucket.task = self._worker.submit(_unstage, bucket)

    def _submit_weights(self, bucket: Bucket, groups: list[tuple[float, ...]], after: Any, act: Callable[[Any], None] | None) -> None:
        bucket.writing = bucket.task = self._worker.submit(self._write, bucket, list(bucket.arrived), groups, after, act)

    def _end(self, now: _Round) -> None:
        params = [member.param for member in now.members]
        torch.autograd.graph.increment_version(params)
        for member in now.members:
            member.param.grad, member.version, member.is_taken = None, member.param._version, False
        for member in self._members:
            member.micro_steps, member.seen = 0, None
        for bucket in self._buckets:
            bucket.arrived, bucket.is_speculated = [], False
        self._round = None

    def _hold(self, buckets: Iterable[Bucket], since: Any = None) -> None:
        """Make the device's stream wait for the weights of `buckets`."""
        before = since or self._link.mark()
        written = [bucket for bucket in buckets if bucket.writing is not None]
        hold(self._link, written)
        if self.last and (written or since):
            self.last.waits.append((before, self._link.mark()))

    def _first_pass(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], speculates: bool) -> None:
        """Compute a bucket's sums of squares and, with speculation, its new weights. This method and those below run on the worker thread."""
        self._commit_until(bucket.landed)
        pending = bucket.pending
        if pending and not _are_same(pending.parts, parts):
            self._settle(bucket)
            pending = None
        bucket.landed.synchronize()
        if speculates:
            self._speculate(bucket, parts, groups, pending)
        else:
            bucket.update = self._update(bucket, parts, groups, None)
            if pending:
                bucket.update.commit_then_sums(pending.update, pending.scale)
                bucket.pending = None
            else:
                bucket.update.sums()
        for part in parts:
            part.note(self.state[part.member.param]["param"])

    def _speculate(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], pending: Pending | None) -> None:
        stage = self._stage(bucket)
        bucket.update = self._update(bucket, parts, groups, stage.room)
        if pending:
            bucket.update.commit_then_speculate(pending.update, pending.scale)
            bucket.pending = None
            # The gradients of the previous step are no longer needed.
            self._free.append(bucket.spare)
            bucket.spare = None
        else:
            bucket.update.speculate()

    def _write(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], after: Any, act: Callable[[Any], None] | None) -> None:
        """Send new weights to the device. `act` computes them; without it they have been computed already."""
        stage = self._stage(bucket)
        if act is not None:
            bucket.update = self._update(bucket, parts, groups, stage.room)
            act(bucket.update)
        stage.sent = bucket.sent = self._link.send([(part.weights, part.of(stage.room)) for part in parts], after)

    def _stage(self, bucket: Bucket) -> Stage:
        """Return host memory for the new weights of `bucket`: the bucket's own memory, or without speculation one of a few shared stages."""
        if self.speculate:
            if bucket.staged is None and bucket.pending is None and bucket.spare is not None:
                bucket.staged, bucket.spare = bucket.spare, None
            elif bucket.staged is None:
                bucket.staged = self._free_room(bucket.size)
            return Stage(bucket.staged)
        if self._stages is None:
            self._stages = cycle([Stage(self._room()) for _ in range(STAGES)])
        stage = next(self._stages)
        if stage.sent is not None:
            stage.sent.synchronize()
        return stage

    def _room(self) -> torch.Tensor:
        """Allocate host memory that is large enough for any bucket, because buckets swap their memory."""
        return self._link.room(max(bucket.size for bucket in self._buckets))

    def _free_room(self, size: int) -> torch.Tensor:
        room = self._free.pop() if self._free else None
        # A parameter group that was added later may have larger buckets.
        return room if room is not None and room.nbytes >= size else self._room()

    def _defer(self, buckets: list[tuple[Bucket, list[Part] | None]], scale: float) -> None:
        """Apply the step to the state later. Buckets that backward completes last come first. The state of a bucket without parts is up to date."""
        for bucket, parts in buckets:
            bucket.pending = None if parts is None else Pending(bucket.update, parts, scale)
            if self.speculate:
                # The next gradients arrive in the memory from which the weights of this step leave.
                bucket.slot, bucket.spare, bucket.staged = bucket.staged, bucket.slot, None
        self._behind = deque(bucket for bucket, _ in reversed(buckets))
        self._catch_up()

    def _catch_up(self) -> None:
        """Commit one bucket, then queue itself behind all tasks submitted meanwhile. Stops when the worker has gradients to speculate on: from
        then on, `_commit_until` uses its idle time."""
        if not self._behind or (self._round and self._round.speculates):
            return
        try:
            self._settle(self._behind.popleft())
            self._worker.submit(self._catch_up)
        except Exception as error:  # noqa: BLE001 -- Nobody waits for this task: the next step raises it.
            self._failure = self._failure or error

    def _commit_until(self, event: Any) -> None:
        """Commit buckets while the worker would otherwise wait for `event`. They are then only speculated on when their gradients arrive."""
        while self._behind and not event.query():
            self._settle(self._behind.popleft())

    def _settle(self, bucket: Bucket) -> None:
        """Apply the pending step to the state of `bucket`."""
        pending, bucket.pending = bucket.pending, None
        if pending:
            pending.update.commit(pending.scale)

    def _settle_all(self, buckets: Iterable[Bucket]) -> None:
        """Wait until the last step has been applied to the state of `buckets`. Does not run on the worker thread."""
        self._worker.submit(lambda buckets: [self._settle(bucket) for bucket in buckets], list(buckets)).result()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _update(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], stage: torch.Tensor | None) -> Any:
        given = [part.given(self.state[part.member.param], self.moments, bucket.slot, stage) for part in parts]
        return _cpu_adam.Update(given, groups, self.threads, self.isa)


def _wait(now: _Round) -> int:
    """Wait for the first pass over all gradients. Returns the number of buckets whose gradients had arrived when backward ended, and whose first
    pass was not done."""
    late = None
    for bucket in now.buckets:
        if late is None and now.ended.query():
            late = sum(each.landed.query() and not each.task.done() for each in now.buckets)
        bucket.wait()
    return late or 0


def _are_same(some: list[Part], others: list[Part]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others))


def _unstage(bucket: Bucket) -> None:
    """Discard new weights. Runs on the worker thread."""
    if bucket.staged is not None:
        bucket.spare, bucket.staged = bucket.staged, None


def _refuse_ranks() -> None:
    if (count := ranks()) > 1:
        raise RuntimeError(f"OffloadAdamW steps the gradients of one process, and torch.distributed has {count}: use FSDP or ZeRO with CPUAdamW")


def _check_member(member: Member, first: torch.Tensor) -> None:
    index, param = member.index, member.param
    refuse_unless(not is_sharded(param), f"parameter {index} is a DTensor: step shards by CPUAdamW, with CPUOffloadPolicy of FSDP2")
    refuse_unless(not is_partitioned(param), f"parameter {index} is partitioned by DeepSpeed's ZeRO-3: use CPUAdamW, with offload_optimizer")
    check_param(index, param)
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameter {index} is on {param.device}: OffloadAdamW needs parameters on one CUDA device, or on the CPU")
    if param.device != first.device:
        both = f"parameter {index} is on {param.device}, the other parameters are on {first.device}"
        raise ValueError(f"{both}: OffloadAdamW needs all of them on one device")


def _check_gradient(member: Member) -> None:
    param, grad, where = member.param, member.param.grad, f"the gradient of parameter {member.index}"
    if isinstance(grad, Gone):
        raise RuntimeError(f"{where} has been taken by another OffloadAdamW: delete that optimizer first, with del and gc.collect()")
    if grad.layout != torch.strided:
        raise ValueError(f"{where} is sparse: step it with torch.optim.SparseAdam, or make it with sparse=False")
    if grad.dtype != param.dtype or grad.device != param.device:
        raise ValueError(f"{where} is {grad.dtype} on {grad.device}, the parameter {param.dtype} on {param.device}: both must be the same")
    _check_address(member)


def _check_untouched(member: Member) -> None:
    """Check that the parameter was not changed between backward and `step`."""
    if member.param._version != member.version:
        raise RuntimeError(f"parameter {member.index} was changed between backward() and step(): change it after step()")
    _check_address(member)


def _check_address(member: Member) -> None:
    if member.param.data_ptr() != member.address:
        raise RuntimeError(f"parameter {member.index} has moved in memory: move and cast the model before the optimizer is made")
