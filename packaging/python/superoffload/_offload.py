"""AdamW on the CPU for parameters on a GPU, while backward runs."""

from __future__ import annotations

import math
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
    check_saved_state,
    flat,
    hyper,
    in_layout_of,
    is_sharded,
    refuse_switches,
    refuse_unless,
    step_count,
    taken,
)
from ._buckets import ALIGN, ARRAYS, Bucket, Gone, Member, Part, Pending, Stage, cut, new_state, own_arrays, take_changes
from ._hooks import Hold, on_gradient, remove
from ._link import link_to
from ._load import LIVE, load_state
from ._shards import ranks

STAGES = 3
"""Where weights are installed early, new weights of that many buckets are between the CPU's passes and the device at once."""


@dataclass
class OffloadStep:
    """What a step did."""

    grad_norm: float
    """The norm of all gradients before clipping."""
    clip: float
    """The factor on every gradient; 0 where the step was skipped."""
    verdict: str
    """`commit`: gradients were used as they are. `clip`: they were clipped. `skip`: one was NaN or infinite, and nothing changed."""
    speculated: int
    """Buckets whose new weights were made before the verdict."""
    redone: int
    """Buckets of these whose new weights were of no use."""
    waits: list[tuple[Any, Any]] = field(default_factory=list, repr=False)
    """Events of the device's stream before and after it waited."""

    @property
    def exposed_ms(self) -> float:
        """Milliseconds from the end of backward in which the device waited for this step's weights, in `step` and in forward passes so far."""
        if self.waits:
            self.waits[-1][1].synchronize()
        return sum(before.elapsed_time(after) for before, after in self.waits)


@dataclass
class _Round:
    """From the first gradient that leaves the device to the end of `step`."""

    hyper: list[tuple[float, ...]]
    speculates: bool
    members: list[Member] = field(default_factory=list)
    buckets: list[Bucket] = field(default_factory=list)
    """As they were completed: what comes last is needed first by the next forward pass."""
    ended: Any = None
    """The event at the end of backward."""
    norm: float = 0.0
    scale: float | None = None
    is_judged: bool = False
    norms: dict[int, float] | None = None
    """Of each parameter's gradient, once code has asked for one."""


class OffloadAdamW(torch.optim.Optimizer):
    """AdamW whose state lies in host memory and whose arithmetic runs on the CPU, while backward runs.

    Parameters are bfloat16, float16 or float32, on one GPU (or on the CPU, by the same path); frozen ones cost nothing. A gradient leaves the
    device as soon as the last of `accumulation_steps` backward passes has made it, and `.grad` is empty afterwards. With `speculate` the CPU
    makes new weights before all gradients are there; `step` then finds that the norm was within `max_grad_norm` (None or 0: no limit) and takes
    them, or steps again with gradients clipped, or leaves everything as it was where a gradient is NaN or infinite. Bits are those of a step that
    waited for its gradients (`speculate=False`) and of `CPUAdamW` with the same `max_grad_norm`. `last` has what `step` did.

    The device gets new weights in `step`: until then, all code sees the weights of the last step. With `install_early` each bucket's new weights
    go to the device as soon as they are made, while backward runs. `step` then has less to wait for, and between `backward` and `step` no code
    may read weights: no forward pass, no checkpoint, and no operation of backward that kept a weight where autograd does not see it.

    With `speculate` the state takes a step while the device runs the next forward pass, or in one pass over memory with the step after it:
    call `synchronize` before you read `state` yourself. It takes a second set of gradients on the host.

    `foreach`, `fused`, `capturable`, `maximize` and `differentiable` are understood as keywords of `torch.optim.AdamW`.

    `bucket_mib` is what is copied and stepped at a time. `threads` is two fewer than torch's unless given.
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
        max_grad_norm: float | None = 1.0,
        accumulation_steps: int = 1,
        bucket_mib: float = 64,
        speculate: bool = True,
        install_early: bool = False,
        threads: int | None = None,
        isa: str = "auto",
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        maximize: bool = False,
        differentiable: bool = False,
    ) -> None:
        refuse_switches(amsgrad=amsgrad, capturable=capturable, maximize=maximize, differentiable=differentiable)
        refuse_unless(speculate or not install_early, "install_early=True needs speculate=True: without speculation no weights are made early")
        refuse_unless(max_grad_norm is None or 0 <= max_grad_norm, f"max_grad_norm must be 0 or more, not {max_grad_norm}; 0 does not clip")
        refuse_unless(accumulation_steps >= 1, f"accumulation_steps must be at least 1, not {accumulation_steps}")
        refuse_unless(1 / 64 <= bucket_mib <= 4096, f"bucket_mib must be from 1/64 to 4096, not {bucket_mib}")
        refuse_unless(threads is None or threads >= 1, f"threads must be at least 1, not {threads}; None leaves two of torch's to Python")
        check_isa(isa)
        _refuse_ranks()
        self.max_grad_norm, self.accumulation_steps, self.isa = max_grad_norm, accumulation_steps, isa
        self.speculate, self.install_early = speculate, install_early
        self.threads = threads or max(1, torch.get_num_threads() - 2)
        self.last: OffloadStep | None = None
        self._bucket_bytes = int(bucket_mib * 2**20) // ALIGN * ALIGN
        self._members: list[Member] = []
        self._buckets: list[Bucket] = []
        self._held_by_forward: set[Bucket] = set()
        self._round: _Round | None = None
        self._history = _cpu_adam.History()
        # One thread: what it is told, it does in that order.
        self._worker = ThreadPoolExecutor(1, "superoffload")
        self._link: Any = None
        self._behind: deque[Bucket] = deque()
        self._failure: Exception | None = None
        self._stages: Any = None
        # The worker's: memory that holds no gradient and no weights.
        self._free: list[torch.Tensor] = []
        self._handles: list[Any] = []
        self._holds: list[Any] = []
        for handles in (self._handles, self._holds):
            weakref.finalize(self, remove, handles)
        LIVE.add(self)
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError("OffloadAdamW holds a thread and streams, so that it cannot be pickled or copied: save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_unless(self._round is None, "add_param_group: gradients of a step have left already: call step() or zero_grad() first")
        super().add_param_group(param_group)
        group, first = len(self.param_groups) - 1, len(self._members)
        members = [Member(index, group, param) for index, param in enumerate(self.param_groups[-1]["params"], first)]
        try:
            check_group(self.param_groups[-1])
            self._admit([member for member in members if member.param.requires_grad])
        except ValueError:
            self.param_groups.pop()
            raise
        self._members += members

    def _admit(self, members: list[Member]) -> None:
        """Gives parameters that are trained their buckets and hooks. A frozen one has neither; if it is trained later, `step` admits it."""
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
        # The next bucket may be larger than those that memory was made for.
        self._stages = None

    def overlap_forward(self, modules: Iterable[torch.nn.Module]) -> None:
        """Lets `step` return before the weights of `modules` are on the device: each waits for its own when it is called, or saved.

        Give the layers of a model, each of which is called in every forward pass. Whoever reads their weights elsewhere between `step` and
        the next forward pass, or copies the model, calls `wait_for_weights` first. A second call replaces the modules of the first.
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
            hold = Hold(owner, list(buckets))
            self._holds += [module.register_forward_pre_hook(hold), module.register_state_dict_pre_hook(hold)]
        self._held_by_forward = {bucket for bucket in self._buckets if all(part.member.param in inside for part in bucket.parts)}

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Judges the gradients and makes their step final. What the device is told afterwards sees the new weights."""
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
            self._restore(now)
        else:
            torch._foreach_add_([self.state[member.param]["step"] for member in now.members], 1)
            self._make_final(now, groups, holds)
        self._end(now)
        self._hold([bucket for bucket in now.buckets if bucket not in self._held_by_forward], now.ended)
        return loss

    @torch.no_grad()
    def grad_norm(self) -> float | None:
        """The norm of all gradients, before `step` and before clipping; waits until they are on the CPU. None: there are none."""
        now = self._judge()
        return None if now is None else now.norm

    def _norm_of(self, index: int) -> float:
        """The norm of the gradient of a parameter, for code that asks its `.grad`."""
        self.grad_norm()
        now = self._round
        if now.norms is None:
            squares = _cpu_adam.squares_by_parameter([bucket.update for bucket in now.buckets])
            now.norms = {index: square**0.5 for index, square in squares.items()}
        return now.norms[index]

    def _check_factor(self, factor: float) -> None:
        """`clip_grad_norm_` multiplies gradients by this, and `step` would multiply them by its own factor once more."""
        scale = self._round.scale
        if scale is not None and not math.isclose(factor, scale, rel_tol=1e-3):
            raise RuntimeError(
                f"gradients are multiplied by {factor:.6g} after backward, and OffloadAdamW, which clips in step() by max_grad_norm="
                f"{self.max_grad_norm}, multiplies them by {scale:.6g}: give OffloadAdamW the max_grad_norm of clip_grad_norm_, and ask "
                "grad_norm() where only the norm is wanted"
            )

    @torch.no_grad()
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops all gradients. Where a step has begun, the weights become again what they were."""
        if now := self._round:
            now.ended = self._link.mark()
            self._restore(now)
            self._end(now)
            self._hold(now.buckets)
        for member in self._members:
            member.micro_steps, member.seen = 0, None
        super().zero_grad(set_to_none)

    def wait_for_weights(self) -> None:
        """What the device is given from now on sees the weights of the last step, also those of modules of `overlap_forward`."""
        self._hold(self._buckets)

    def synchronize(self) -> None:
        """Returns when state and weights are those after the last `step`."""
        for bucket in self._buckets:
            bucket.wait()
        self._settle_all(self._buckets)
        self._hold(self._buckets)
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.synchronize()

    def state_dict(self) -> dict[str, Any]:
        """As of `torch.optim.AdamW`, and the float32 weights as `param`."""
        self.synchronize()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state of this optimizer, of `CPUAdamW` or of `torch.optim.AdamW`.

        Of the saved float32 weights those are used that round to the weights that the parameters have at the next step. Arrays of `state_dict` are
        not copied before that step, so that a `state_dict` that is dropped until then costs no memory beside the state.
        """
        load_state(self, state_dict, [member.param for member in self._members], _loaded)
        for member in self._members:
            member.version, member.borrows = None, True

    def __setstate__(self, state: dict[str, Any]) -> None:
        """torch installs a state that was loaded by this, after its checks."""
        self.zero_grad()
        self.synchronize()
        super().__setstate__(state)

    def _hyper(self) -> list[tuple[float, ...]]:
        return [hyper(group) for group in self.param_groups]

    def _on_gradient(self, member: Member) -> None:
        """After each backward pass that gave `member` a gradient."""
        if member.param.grad is None:
            # Another hook has taken it.
            return
        with torch.no_grad():
            if member.is_taken:
                self._forget(member)
            # Where zero_grad of the model has dropped what was there, this pass is the first one again.
            is_same = member.seen is not None and member.seen() is member.param.grad
            member.micro_steps = member.micro_steps + 1 if is_same else 1
            if member.micro_steps == self.accumulation_steps:
                self._take(member, in_backward=True)
            else:
                member.seen = weakref.ref(member.param.grad)

    def _forget(self, member: Member) -> None:
        """Undoes `_take` of a gradient that was dropped, by zero_grad of the model, say."""
        if self.install_early:
            raise RuntimeError(
                f"the gradient of parameter {member.index} was set after backward(), and with install_early its weights are those of the coming "
                "step: drop gradients with this optimizer's zero_grad()"
            )
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
        """Brings a gradient to the host, and hands on the buckets that are complete by it."""
        param = member.param
        _check_gradient(member)
        now = self._round = self._round or self._begin()
        if now.is_judged:
            raise RuntimeError(f"the gradient of parameter {member.index} comes after grad_norm(): call step() first")
        # The worker may be busy with the last step, which reads what is changed below.
        for part in member.parts:
            part.bucket.wait()
            if part.bucket.slot is None:
                part.bucket.slot = self._room() if self.speculate else self._link.room(part.bucket.size)
        state = self._state_of(member)
        member.number = int(state["step"].item()) + 1
        gradient = flat(in_layout_of(param, param.grad.detach()))
        if self.install_early:
            # Weights change from here on: autograd refuses whoever saved them for a later backward pass.
            torch.autograd.graph.increment_version(param)
        param.grad, member.version, member.is_taken, member.seen = member.gone, param._version, True, None
        now.members.append(member)
        for part in member.parts:
            # The slot may hold the weights that the last step sent.
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
            state.update(new_state(member.param))
        elif member.param._version != member.version:
            self._settle_all(part.bucket for part in member.parts)
            if member.borrows:
                own_arrays(state, member.param)
                member.borrows = False
            take_changes(state["param"], member.param)
        return state

    def _submit(self, bucket: Bucket, speculates: bool) -> None:
        now = self._round
        # In the flat order, whatever the hooks' order was.
        bucket.arrived.sort(key=lambda part: part.offset)
        bucket.landed, bucket.is_speculated = self._link.brought(), speculates
        bucket.task = self._worker.submit(self._first_pass, bucket, list(bucket.arrived), now.hyper, speculates)
        if speculates and self.install_early:
            bucket.writing = bucket.task
        now.buckets.append(bucket)

    def _judge(self) -> _Round | None:
        """Takes what has not left yet, and waits until the norm is known."""
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
        submitted = set(now.buckets)
        for bucket in self._buckets:
            if bucket.arrived and bucket not in submitted:
                self._submit(bucket, speculates=False)
        for bucket in now.buckets:
            bucket.wait()
        self._raise_failure()
        updates = [bucket.update for bucket in self._buckets if bucket.arrived]
        now.norm, now.scale = _cpu_adam.verdict(*_cpu_adam.squares(updates), self.max_grad_norm or 0.0)
        now.is_judged = True
        return now

    def _make_final(self, now: _Round, groups: list[tuple[float, ...]], holds: bool) -> None:
        """First the weights that the device lacks, in the order in which it needs them; then the state."""
        last_first = now.buckets[::-1]
        for bucket in sorted(last_first, key=lambda bucket: bucket in self._held_by_forward):
            if not (holds and bucket.is_speculated):
                self._submit_weights(bucket, groups, now.ended, lambda update: update.weights(now.scale))
            elif not self.install_early:
                self._submit_weights(bucket, groups, now.ended, None)
        task = self._worker.submit(self._defer, [(bucket, bucket.arrived) for bucket in now.buckets], now.scale)
        for bucket in now.buckets:
            bucket.task = task

    def _restore(self, now: _Round) -> None:
        """Drops new weights. Where the device has them, it gets those of the state."""
        for bucket in reversed(now.buckets):
            if bucket.is_speculated and self.install_early:
                self._submit_weights(bucket, now.hyper, now.ended, lambda update: update.emit())
            else:
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
        """The device waits until it has the weights of `buckets`."""
        before = since or self._link.mark()
        written = [bucket for bucket in buckets if bucket.writing is not None]
        for bucket in written:
            bucket.writing.result()
            self._link.hold(bucket.sent)
            bucket.writing = None
        if self.last and (written or since):
            self.last.waits.append((before, self._link.mark()))

    def _first_pass(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], speculates: bool) -> None:
        """The worker's, as all below."""
        pending = bucket.pending
        if pending and not (speculates and _are_same(pending.parts, parts)):
            self._settle(bucket)
            pending = None
        bucket.landed.synchronize()
        if not speculates:
            bucket.update = self._update(bucket, parts, groups, None)
            bucket.update.sums()
            return
        stage = self._stage(bucket)
        bucket.update = self._update(bucket, parts, groups, stage.room)
        if pending:
            bucket.update.commit_then_speculate(pending.update, pending.scale)
            bucket.pending = None
            if not self.install_early:
                # The gradients of the step before have done their work.
                self._free.append(bucket.spare)
                bucket.spare = None
        else:
            bucket.update.speculate()
        if self.install_early:
            self._send(bucket, parts, stage, None)

    def _write(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], after: Any, act: Callable[[Any], None] | None) -> None:
        """Sends new weights to the device: those that `act` makes, or without it those that are made."""
        stage = self._stage(bucket)
        if act is not None:
            bucket.update = self._update(bucket, parts, groups, stage.room)
            act(bucket.update)
        self._send(bucket, parts, stage, after)

    def _send(self, bucket: Bucket, parts: list[Part], stage: Stage, after: Any) -> None:
        stage.sent = bucket.sent = self._link.send([(part.weights, part.of(stage.room)) for part in parts], after)

    def _stage(self, bucket: Bucket) -> Stage:
        """Memory for new weights of `bucket`. Weights that wait for `step` have the bucket's own; else a few stages serve all buckets."""
        if self.speculate and not self.install_early:
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
        """Host memory for any bucket, since buckets swap theirs."""
        return self._link.room(max(bucket.size for bucket in self._buckets))

    def _free_room(self, size: int) -> torch.Tensor:
        room = self._free.pop() if self._free else None
        # A parameter group that came later may have made larger buckets.
        return room if room is not None and room.nbytes >= size else self._room()

    def _defer(self, buckets: list[tuple[Bucket, list[Part]]], scale: float) -> None:
        """The state takes the step later; where nothing speculates, now. What backward brings last, and has the least time for then, comes first."""
        for bucket, parts in buckets:
            bucket.pending = Pending(bucket.update, parts, scale)
            if not self.speculate:
                self._settle(bucket)
            elif self.install_early:
                bucket.slot, bucket.spare = bucket.spare, bucket.slot
            else:
                # The next gradients arrive where the weights of this step leave.
                bucket.slot, bucket.spare, bucket.staged = bucket.staged, bucket.slot, None
        self._behind = deque(bucket for bucket, _ in reversed(buckets))
        self._catch_up()

    def _catch_up(self) -> None:
        """Commits one bucket and comes again, behind all that was asked for meanwhile, until gradients come that wait for the worker."""
        if not self._behind or (self._round and self._round.speculates):
            return
        try:
            self._settle(self._behind.popleft())
            self._worker.submit(self._catch_up)
        except Exception as error:  # noqa: BLE001 -- Nobody waits for this task: the next step raises it.
            self._failure = self._failure or error

    def _settle(self, bucket: Bucket) -> None:
        """The state of `bucket` takes the step that is pending."""
        pending, bucket.pending = bucket.pending, None
        if pending:
            pending.update.commit(pending.scale)

    def _settle_all(self, buckets: Iterable[Bucket]) -> None:
        """Not the worker's: waits until the state of `buckets` has taken the last step."""
        self._worker.submit(lambda buckets: [self._settle(bucket) for bucket in buckets], list(buckets)).result()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure:
            raise self._failure

    def _update(self, bucket: Bucket, parts: list[Part], groups: list[tuple[float, ...]], stage: torch.Tensor | None) -> Any:
        given = [part.given(self.state[part.member.param], bucket.slot, stage) for part in parts]
        return _cpu_adam.Update(given, groups, self.threads, self.isa)


def _are_same(some: list[Part], others: list[Part]) -> bool:
    return len(some) == len(others) and all(one is other for one, other in zip(some, others))


def _unstage(bucket: Bucket) -> None:
    """The worker's: new weights are of no use."""
    if bucket.staged is not None:
        bucket.spare, bucket.staged = bucket.staged, None


def _refuse_ranks() -> None:
    if (count := ranks()) > 1:
        raise RuntimeError(f"OffloadAdamW steps the gradients of one process, and torch.distributed has {count}: use FSDP or ZeRO with CPUAdamW")


def _check_member(member: Member, first: torch.Tensor) -> None:
    index, param = member.index, member.param
    refuse_unless(not is_sharded(param), f"parameter {index} is a DTensor: step shards by CPUAdamW, with CPUOffloadPolicy of FSDP2")
    check_param(index, param)
    if param.device.type not in ("cpu", "cuda"):
        raise ValueError(f"parameter {index} is on {param.device}: OffloadAdamW takes parameters of one CUDA device, or of the CPU")
    if param.device != first.device:
        raise ValueError(f"parameter {index} is on {param.device}, others are on {first.device}: OffloadAdamW takes those of one device")


def _check_gradient(member: Member) -> None:
    param, grad, where = member.param, member.param.grad, f"the gradient of parameter {member.index}"
    if isinstance(grad, Gone):
        raise RuntimeError(f"{where} has gone to another OffloadAdamW: drop that one first, by del and gc.collect()")
    if grad.layout != torch.strided:
        raise ValueError(f"{where} is sparse: step it with torch.optim.SparseAdam, or make it with sparse=False")
    if grad.dtype != param.dtype or grad.device != param.device:
        raise ValueError(f"{where} is {grad.dtype} on {grad.device}, the parameter {param.dtype} on {param.device}: both must be the same")
    if param.data_ptr() != member.address:
        raise RuntimeError(f"parameter {member.index} has moved in memory: move and cast the model before the optimizer is made")


def _check_untouched(member: Member) -> None:
    """Between backward and `step`."""
    if member.param._version != member.version:
        raise RuntimeError(f"parameter {member.index} was changed between backward() and step(): change it after step()")


def _loaded(index: int, param: torch.Tensor, saved: dict[str, Any], seen: set[int]) -> dict[str, torch.Tensor]:
    """Without saved float32 weights, those of the parameter."""
    names = {key: key for key in ARRAYS}
    # CPUAdamW's name for the same.
    names["param"] = "param" if "param" in saved else "master_param"
    check_saved_state(index, param, saved, tuple(names.values()))
    sources = {key: saved.get(name, param.detach()) for key, name in names.items()}
    return {"step": step_count(saved["step"]), **{key: taken(param, source, torch.float32, seen) for key, source in sources.items()}}
