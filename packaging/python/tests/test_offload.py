"""Compares `OffloadAdamW` with its own synchronous mode, `CPUAdamW` and torch's AdamW, for parameters on the CPU, and on a GPU if there is one.
Skipped with a message if torch is not installed."""

import copy
import gc
import hashlib
import io
import math
import pickle
import random
import re
import threading
import time
import unittest
import weakref
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: OffloadAdamW is not tested, because torch is not installed ({error})") from error

from superoffload import _cpu_adam
from superoffload._link import PlainLink
from superoffload._offload import _wait
from superoffload.torch import CPUAdamW, OffloadAdamW

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
SHAPES = [(3, 5), (1,), (64, 1025), (70_000,), (4096,), (0, 4), ()]
# The smallest allowed size: several buckets, and tensors that span two of them.
SMALL = 1 / 64


def params(dtype=torch.float32, device="cpu", shapes=SHAPES):
    make = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=make).to(device, dtype)) for shape in shapes]


def backward(params, step, scale=1.0, poison=None, order=None):
    """Give each parameter, through autograd, a gradient that is equal on every device."""
    make = torch.Generator().manual_seed(1000 + step)
    wanted = [(scale * torch.randn(param.shape, generator=make)).to(param.device, param.dtype) for param in params]
    if poison is not None:
        wanted[2][63, 1024] = poison
    # Autograd starts with the term that was added last.
    loss = 0.0
    for i in order or range(len(params)):
        loss = loss + (params[i] * wanted[i]).sum().float()
    loss.backward()


def bits(optimizer):
    """Return a hash of weights, float32 weights, moments and steps."""
    if isinstance(optimizer, OffloadAdamW):
        optimizer.synchronize()
    digest = hashlib.sha256()
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        state = optimizer.state.get(param) or {}
        master = state.get("param", state.get("master_param", param))
        for tensor in (param, master, *(state[key] for key in ("exp_avg", "exp_avg_sq", "step") if key in state)):
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def weight_bits(params):
    return [hashlib.sha256(p.detach().cpu().reshape(-1).view(torch.uint8).numpy()).hexdigest() for p in params]


def offload(own, **settings):
    return OffloadAdamW(own, **{**HYPER, "bucket_mib": SMALL, "max_grad_norm": 500.0, **settings})


def on_cpu(own, **settings):
    return CPUAdamW(own, **{**HYPER, "max_grad_norm": 500.0, "threads": 1, **settings})


def trouble(step):
    """Return a scale and an invalid value: most steps commit, some clip, and some have a gradient that is not finite."""
    return {5: (2.0, None), 13: (1.0, math.nan), 18: (1.0, math.inf)}.get(step % 23, (1.0, None))


def run(make, steps=46, dtype=torch.float32, device="cpu", order=None):
    """Return a digest of the weights after each step and of the final state, and the result of each step."""
    own = params(dtype, device)
    optimizer, lasts, digest = make(own), [], hashlib.sha256()
    for step in range(steps):
        backward(own, step, *trouble(step), order=order(step) if order else None)
        optimizer.step()
        optimizer.zero_grad()
        lasts.append(optimizer.last)
        digest.update("".join(weight_bits(own)).encode())
    return digest.hexdigest() + bits(optimizer), lasts


def speculated(optimizer):
    """Wait until all tasks submitted in backward are done."""
    for bucket in optimizer._buckets:
        bucket.wait()


class Exactness(unittest.TestCase):
    def test_a_thousand_steps_have_one_digest(self):
        want, _ = run(on_cpu, steps=1000, dtype=torch.bfloat16)
        got, lasts = run(offload, steps=1000, dtype=torch.bfloat16)
        waited, never = run(lambda own: offload(own, speculate=False), steps=1000, dtype=torch.bfloat16)
        self.assertEqual((got, waited), (want, want))
        verdicts = [last.verdict for last in lasts]
        self.assertEqual([verdicts.count(word) for word in ("commit", "clip", "skip")], [870, 44, 86])
        self.assertEqual({last.speculated > 0 for last in lasts}, {True})
        for last in lasts:
            self.assertEqual(last.redone, 0 if last.verdict == "commit" else last.speculated)
        self.assertEqual({last.speculated for last in never}, {0})

    def test_every_format_and_bucket_size_has_the_digest_of_cpu_adamw(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            want, wants = run(on_cpu, dtype=dtype)
            for bucket_mib in (SMALL, 0.1, 64):
                got, lasts = run(lambda own, mib=bucket_mib: offload(own, bucket_mib=mib), dtype=dtype)
                self.assertEqual(got, want, (dtype, bucket_mib))
                for last, other in zip(lasts, wants):
                    same = last.grad_norm == other.grad_norm or math.isnan(last.grad_norm)
                    self.assertTrue(same and (last.clip, last.verdict == "skip") == (other.clip, other.skipped))

    def test_every_format_of_moments_has_the_digest_of_cpu_adamw(self):
        for moments in ("bfloat16", "int8"):
            want, _ = run(lambda own, moments=moments: on_cpu(own, moments=moments), dtype=torch.bfloat16)
            for settings in ({}, {"bucket_mib": 64}, {"speculate": False}, {"threads": 3, "isa": "scalar"}):
                settings = {"moments": moments, **settings}
                self.assertEqual(run(lambda own, settings=settings: offload(own, **settings), dtype=torch.bfloat16)[0], want, settings)

    def test_threads_and_instruction_sets_change_no_bit(self):
        want, _ = run(lambda own: offload(own, threads=1, isa="scalar"), steps=23, dtype=torch.bfloat16)
        for isa in ["auto", *_cpu_adam.instruction_sets()]:
            self.assertEqual(run(lambda own, isa=isa: offload(own, threads=2, isa=isa), steps=23, dtype=torch.bfloat16)[0], want, isa)
        for threads in (3, 64):
            self.assertEqual(run(lambda own, n=threads: offload(own, threads=n), steps=23, dtype=torch.bfloat16)[0], want, threads)

    def test_the_order_of_gradients_changes_no_bit(self):
        def shuffled(step):
            return random.Random(step).sample(range(len(SHAPES)), len(SHAPES))

        self.assertEqual(run(offload, order=shuffled)[0], run(offload)[0])
        # Added one by one to the first square, all other squares are lost to rounding, but their sum is not.
        gradients = [1.0] + 8 * [2.0**-27]
        for bucket_mib in (SMALL, 64):
            for order in (gradients, gradients[::-1]):
                own = params(shapes=[(4096,)] * len(gradients))
                optimizer = offload(own, bucket_mib=bucket_mib)
                for gradient in order:
                    (own[gradients.index(gradient)] if gradient == 1.0 else own.pop())[0].mul(gradient).backward()
                self.assertEqual(optimizer.grad_norm(), 1.0, (bucket_mib, order))

    def test_steps_follow_torchs_adamw_and_clip_grad_norm(self):
        ours, theirs = params(), params()
        mine, torchs = offload(ours, max_grad_norm=100.0), torch.optim.AdamW(theirs, foreach=False, **HYPER)
        for step in range(20):
            backward(ours, step), backward(theirs, step)
            norm = torch.nn.utils.clip_grad_norm_([p for p in theirs if p.numel()], 100.0)
            mine.step(), torchs.step()
            mine.zero_grad(), torchs.zero_grad()
            self.assertAlmostEqual(mine.last.grad_norm / norm.item(), 1, places=5)
            for one, other in zip(ours, theirs):
                torch.testing.assert_close(one, other, rtol=2**-22, atol=2e-7 * (step + 1))

    def test_accumulated_gradients_are_those_of_cpu_adamw_also_where_passes_are_missing(self):
        ours, theirs = params(torch.bfloat16), params(torch.bfloat16)
        mine, other = offload(ours, accumulation_steps=4, max_grad_norm=1e6), on_cpu(theirs, max_grad_norm=1e6)
        for step in range(8):
            for micro in range(3 if step == 5 else 4):
                for side in (ours, theirs):
                    # One backward pass does not use the third parameter.
                    backward(side if micro else side[:2] + side[3:], 10 * step + micro)
            mine.step(), other.step()
            self.assertEqual(mine.last.speculated > 0, step != 5)
            mine.zero_grad(), other.zero_grad()
        self.assertEqual(bits(mine), bits(other))

    def test_a_learning_rate_that_changes_after_backward_counts(self):
        ours, theirs = params(), params()
        mine, other = offload(ours), on_cpu(theirs)
        for step in range(6):
            backward(ours, step), backward(theirs, step)
            for group in mine.param_groups + other.param_groups:
                group["lr"] = 0.01 / (1 + step)
            mine.step(), other.step()
            self.assertEqual((mine.last.verdict, mine.last.redone > 0), ("commit", step > 0))
            mine.zero_grad(), other.zero_grad()
        self.assertEqual(bits(mine), bits(other))

    def test_gradients_that_are_dropped_leave_no_trace(self):
        for step_before in (True, False):
            ours, theirs = params(torch.bfloat16), params(torch.bfloat16)
            mine, other = offload(ours), on_cpu(theirs)
            if step_before:
                backward(ours, 0), backward(theirs, 0)
                mine.step(), other.step()
            other.zero_grad()
            before = weight_bits(ours)
            backward(ours, 1)
            speculated(mine)
            self.assertEqual(weight_bits(ours), before)
            mine.zero_grad()
            self.assertEqual(weight_bits(ours), before)
            self.assertIsNone(mine.step())
            backward(ours, 2), backward(theirs, 2)
            mine.step(), other.step()
            self.assertEqual(bits(mine), bits(other))

    def test_groups_schedulers_and_unused_parameters(self):
        def make(cls, own, **more):
            groups = [{"params": own[:2], "lr": 0.1}, {"params": own[2:4], "weight_decay": 0.0, "betas": (0.5, 0.6), "eps": 1e-3}]
            return cls(groups, **HYPER, max_grad_norm=500.0, **more)

        ours, theirs = params(), params()
        mine, other = make(OffloadAdamW, ours, bucket_mib=SMALL), make(CPUAdamW, theirs)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (mine, other)]
        for step in range(6):
            if step == 3:
                mine.add_param_group({"params": ours[4:], "lr": 0.05}), other.add_param_group({"params": theirs[4:], "lr": 0.05})
                schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, other)]
            for side in (ours, theirs):
                # The first parameter is unused until the last step, and the gradient of the fifth comes late.
                backward(side[step < 5 : 4 if step < 3 else None], step)
            for optimizer in (mine, other):
                optimizer.step()
                optimizer.zero_grad()
            for schedule in schedules:
                schedule.step()
        self.assertEqual(mine.state[ours[0]]["step"].item(), 1)
        self.assertEqual(mine.state[ours[4]]["step"].item(), 3)
        self.assertEqual(bits(mine), bits(other))

    def test_a_closure_gives_its_loss(self):
        own = params()
        optimizer = offload(own)

        def closure():
            optimizer.zero_grad()
            loss = (own[2] ** 2).sum()
            loss.backward()
            return loss

        losses = [optimizer.step(closure).item() for _ in range(3)]
        self.assertLess(losses[2], losses[0])

    def test_torchs_default_device_is_not_the_states(self):
        ours, theirs = params(), params()
        mine, other = offload(ours), on_cpu(theirs)
        backward(theirs, 0)
        other.step()
        for p, twin in zip(ours, theirs):
            p.grad = twin.grad
        with torch.device("meta"):
            mine.step()
            mine.load_state_dict(copy.deepcopy(mine.state_dict()))
        self.assertEqual(bits(mine), bits(other))

    def test_frozen_parameters_stay_and_may_be_trained_later(self):
        ours, theirs = params(), params()
        ours[3].requires_grad_(False)
        mine, other = offload(ours), on_cpu(theirs)
        ours[3].requires_grad_(True)
        backward(ours, 0), backward(theirs, 0)
        mine.step(), other.step()
        self.assertEqual(bits(mine), bits(other))


class Network(torch.nn.Module):
    """A model with tied embeddings and layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(300, 64)
        self.layers = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.LayerNorm(64), torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(4))
        self.head = torch.nn.Linear(64, 300, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return torch.nn.functional.cross_entropy(self.head(hidden).float().flatten(0, 1), ids.flatten())


def train(model, optimizer, steps, device="cpu", first=0):
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step)).to(device)
        loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Models(unittest.TestCase):
    def test_a_model_with_tied_weights_trains_as_by_cpu_adamw(self):
        one, other = Network(), Network()
        mine, cpu = offload(one.parameters(), max_grad_norm=1.0), on_cpu(other.parameters(), max_grad_norm=1.0)
        losses = train(one, mine, 30)
        self.assertEqual(losses, train(other, cpu, 30))
        self.assertLess(losses[-1], losses[0])
        self.assertEqual(bits(mine), bits(cpu))

    def test_layers_wait_for_their_weights_in_forward_and_when_they_are_saved(self):
        one, other = Network(), Network()
        mine, cpu = offload(one.parameters(), speculate=False), on_cpu(other.parameters())
        mine.overlap_forward(one.layers)
        write, late = mine._write, threading.Event()

        def slow(bucket, *rest):
            if bucket in mine._held_by_forward:
                late.wait(0.02)
            write(bucket, *rest)

        with mock.patch.object(mine, "_write", slow):
            losses = train(one, mine, 6)
            self.assertTrue(any(bucket.writing is not None for bucket in mine._buckets))
            saved = {name: tensor.clone() for name, tensor in one.state_dict().items()}
        self.assertGreater(len(mine.last.waits), 1)
        self.assertEqual(losses, train(other, cpu, 6))
        for name, tensor in other.state_dict().items():
            self.assertTrue(torch.equal(saved[name], tensor), name)
        self.assertEqual(bits(mine), bits(cpu))

    def test_compiled_layers_and_models_train_alike(self):
        def compiled(whole):
            digests = []
            for speculate in (True, False):
                torch.compiler.reset()
                model = Network()
                optimizer = offload(model.parameters(), speculate=speculate, max_grad_norm=1.0)
                optimizer.overlap_forward(model.layers)
                if whole:
                    model = torch.compile(model, backend="aot_eager")
                else:
                    for layer in model.layers:
                        layer.compile(backend="aot_eager")
                train(model, optimizer, 12)
                digests.append(bits(optimizer))
            return digests

        for whole in (False, True):
            one, other = compiled(whole)
            self.assertEqual(one, other, whole)

    def test_checkpointed_layers_train_alike(self):
        from torch.utils.checkpoint import checkpoint

        digests = []
        for use_reentrant in (False, True):
            model = Network()
            for layer in model.layers:
                layer.forward = lambda x, forward=layer.forward, way=use_reentrant: checkpoint(forward, x, use_reentrant=way)
            optimizer = offload(model.parameters())
            train(model, optimizer, 12)
            digests.append(bits(optimizer))
        plain = Network()
        optimizer = offload(plain.parameters())
        train(plain, optimizer, 12)
        self.assertEqual(digests, [bits(optimizer)] * 2)


class Later:
    """An event that passes when a future has its result."""

    def __init__(self, future):
        self.synchronize, self.query = future.result, future.done


class SlowLink(PlainLink):
    """Copies run some time after they are submitted, in order per direction, like copies on CUDA streams."""

    def __init__(self):
        self.down, self.up = ThreadPoolExecutor(1), ThreadPoolExecutor(1)

    def bring(self, target, gradient, after):
        if after is not None:
            self.down.submit(after.synchronize)
        self.down.submit(self.copy, [(target, gradient)])

    def brought(self):
        return Later(self.down.submit(int))

    def send(self, pairs, after):
        return Later(self.up.submit(self.copy, list(pairs)))

    def hold(self, event):
        event.synchronize()

    @staticmethod
    def copy(pairs):
        time.sleep(5e-4)
        for target, source in pairs:
            target.copy_(source)


class Copies(unittest.TestCase):
    def setUp(self):
        slow = mock.patch("superoffload._offload.link_to", lambda _: SlowLink())
        slow.start()
        self.addCleanup(slow.stop)

    def test_nothing_is_read_or_written_before_its_copy(self):
        want, _ = run(on_cpu, dtype=torch.bfloat16)
        for speculate in (True, False):
            self.assertEqual(run(lambda own, s=speculate: offload(own, speculate=s), dtype=torch.bfloat16)[0], want)

    def test_layers_that_wait_in_forward_have_their_weights(self):
        other = Network()
        cpu = on_cpu(other.parameters(), max_grad_norm=1.0)
        want = train(other, cpu, 12)
        for speculate in (True, False):
            model = Network()
            optimizer = offload(model.parameters(), max_grad_norm=1.0, speculate=speculate)
            optimizer.overlap_forward(model.layers)
            self.assertEqual(train(model, optimizer, 12), want)
            self.assertEqual(bits(optimizer), bits(cpu))

    def test_a_model_whose_optimizer_is_gone_has_the_weights_of_the_last_step(self):
        class Slower(SlowLink):
            def send(self, pairs, after):
                return Later(self.up.submit(lambda: (time.sleep(0.01), self.copy(pairs))))

        other, model = Network(), Network()
        train(other, on_cpu(other.parameters(), max_grad_norm=1.0), 2)
        ids = torch.arange(64).view(4, 16)
        for waits in (False, True):
            with mock.patch("superoffload._offload.link_to", lambda _: Slower()):
                model = Network()
                optimizer = offload(model.parameters(), max_grad_norm=1.0)
                optimizer.overlap_forward(model.layers)
                train(model, optimizer, 2)
                del optimizer
                gc.collect()
                if waits:
                    # The worker's last task ends the optimizer, and the hooks go with it.
                    deadline = time.monotonic() + 10
                    while any(layer._forward_pre_hooks for layer in model.layers) and time.monotonic() < deadline:
                        time.sleep(0.001)
                self.assertEqual(model(ids).item(), other(ids).item(), waits)

    def test_dropped_gradients_and_weights_that_follow(self):
        ours, theirs = params(), params()
        mine, other = offload(ours), on_cpu(theirs)
        for step in range(6):
            before = weight_bits(ours)
            backward(ours, 100 + step)
            mine.zero_grad()
            self.assertEqual(weight_bits(ours), before)
            backward(ours, step), backward(theirs, step)
            mine.step(), other.step()
            other.zero_grad()
            self.assertEqual(weight_bits(ours), weight_bits(theirs))
        self.assertEqual(bits(mine), bits(other))


    def test_states_that_are_stepped_at_once_have_the_same_bits(self):
        """Clipped steps update from no to all states in the pass that makes the weights."""
        clipped = {"max_grad_norm": 1.0}
        want, _ = run(lambda own: on_cpu(own, **clipped), steps=30, dtype=torch.bfloat16)
        counts = set()

        def fixed(late):
            def wait(now):
                _wait(now)
                return late(len(counts))

            return wait

        class Counted(OffloadAdamW):
            def _make_final(self, *args):
                counts.add(self._at_once)
                super()._make_final(*args)

        for late in (lambda _: 0, lambda _: 5, lambda _: 1000, lambda seen: 7 * (seen % 2)):
            with mock.patch("superoffload._offload._wait", fixed(late)):
                make = lambda own: Counted(own, **{**HYPER, "bucket_mib": SMALL, **clipped})  # noqa: E731
                self.assertEqual(run(make, steps=30, dtype=torch.bfloat16)[0], want)
        self.assertGreater(len(counts), 5)

    def test_the_worker_commits_while_it_waits_for_gradients(self):
        committed = []

        class Watched(OffloadAdamW):
            def _catch_up(self):
                """Leave all buckets to the time of the next gradients."""

            def _commit_until(self, event):
                before = len(self._behind)
                super()._commit_until(event)
                committed.append(before - len(self._behind))

        class SlowGradients(SlowLink):
            def bring(self, target, gradient, after):
                self.down.submit(time.sleep, 0.01)
                super().bring(target, gradient, after)

        with mock.patch("superoffload._offload.link_to", lambda _: SlowGradients()):
            make = lambda own: Watched(own, **{**HYPER, "bucket_mib": SMALL, "max_grad_norm": 500.0})  # noqa: E731
            got, _ = run(make, steps=8)
        self.assertEqual(got, run(on_cpu, steps=8)[0])
        self.assertGreater(sum(committed), 0)


class Speculation(unittest.TestCase):
    def test_speculation_rests_where_it_keeps_failing(self):
        own = params()
        optimizer = offload(own, max_grad_norm=1.0)
        counts = []
        for step in range(6):
            backward(own, step)
            optimizer.step()
            counts.append(optimizer.last.speculated > 0)
        self.assertEqual(counts, [True] * 4 + [False] * 2)

    def test_the_state_takes_a_step_when_the_cpu_is_idle_or_with_the_next_step(self):
        own = params()
        optimizer = offload(own)
        settle, settled = optimizer._settle, []
        with mock.patch.object(optimizer, "_settle", lambda bucket: (settled.append(bucket.pending is not None), settle(bucket))):
            backward(own, 0)
            optimizer.step()
            deadline = time.monotonic() + 60
            while sum(settled) < len(optimizer._buckets) and time.monotonic() < deadline:
                time.sleep(0.01)
            self.assertEqual((len(settled), {bucket.pending for bucket in optimizer._buckets}), (len(optimizer._buckets), {None}))
            settled.clear()
            with mock.patch.object(optimizer, "_catch_up", lambda: None):
                for step in range(1, 4):
                    backward(own, step)
                    optimizer.step()
                self.assertEqual(settled, [])
                optimizer.synchronize()
            self.assertEqual(settled, [True] * len(optimizer._buckets))

    def test_weights_that_forward_needs_first_are_made_first(self):
        own, passed, written = params(), [], []
        optimizer = offload(own, speculate=False)

        def noted(name, seen):
            act = getattr(optimizer, name)
            return mock.patch.object(optimizer, name, lambda bucket, *rest: (seen.append(bucket), act(bucket, *rest)))

        with noted("_first_pass", passed), noted("_write", written):
            backward(own, 0)
            optimizer.step()
            optimizer.synchronize()
        self.assertGreater(len(passed), 3)
        self.assertEqual(written, passed[::-1])

    def test_gradients_are_freed_in_backward(self):
        own = params()
        seen = []
        for p in own:
            p.register_post_accumulate_grad_hook(lambda p: seen.append(weakref.ref(p.grad)))
        optimizer = offload(own)
        backward(own, 0)
        self.assertEqual((len(seen), [ref() for ref in seen]), (len(own), [None] * len(own)))
        optimizer.step()
        self.assertEqual([p.grad for p in own], [None] * len(own))

    def test_forked_processes_do_not_hold_the_state(self):
        own = params(shapes=[(2 << 20,)])
        optimizer = offload(own)
        backward(own, 0)
        optimizer.step()
        address = optimizer.state[own[0]]["param"].data_ptr()
        is_there = False
        with open("/proc/self/smaps") as lines:
            for line in lines:
                if mapping := re.match("([0-9a-f]+)-([0-9a-f]+) ", line):
                    start, end = (int(number, 16) for number in mapping.groups())
                    is_there = start <= address < end
                elif is_there and line.startswith("VmFlags:"):
                    flags = line.split()
        self.assertIn("dc", flags)

    def test_the_norm_is_known_before_the_step(self):
        own = params()
        optimizer = offload(own)
        self.assertIsNone(optimizer.grad_norm())
        backward(own, 0)
        norm = optimizer.grad_norm()
        optimizer.step()
        self.assertEqual(optimizer.last.grad_norm, norm)

    def test_exposed_is_what_passes_between_backward_and_the_weights(self):
        own = params()
        optimizer = offload(own, bucket_mib=64)
        for name in ("_first_pass", "_write"):
            act, optimizer.speculate = getattr(optimizer, name), name == "_first_pass"
            with mock.patch.object(optimizer, name, lambda *rest, act=act: (time.sleep(0.05), act(*rest))):
                backward(own, 0)
                optimizer.step()
            self.assertGreater(optimizer.last.exposed_ms, 30)

    def test_no_limit_still_skips_what_is_not_finite(self):
        for limit in (None, 0.0):
            own = params()
            optimizer = offload(own, max_grad_norm=limit)
            before = weight_bits(own)
            backward(own, 0, scale=100.0, poison=math.nan)
            optimizer.step()
            self.assertEqual((optimizer.last.verdict, weight_bits(own)), ("skip", before))
            backward(own, 1, scale=100.0)
            optimizer.step()
            self.assertEqual((optimizer.last.verdict, optimizer.last.clip), ("commit", 1.0))


class States(unittest.TestCase):
    def go_on(self, source, target, dtype):
        """Run five steps with `source`, load its state from a file into `target`, and run three more steps with both."""
        ones = params(dtype)
        one = source(ones)
        for step in range(5):
            backward(ones, step)
            one.step(), one.zero_grad()
        file = io.BytesIO()
        torch.save(one.state_dict(), file)
        file.seek(0)
        twos = [torch.nn.Parameter(p.detach().clone()) for p in ones]
        two = target(twos)
        two.load_state_dict(torch.load(file, weights_only=True))
        for step in range(5, 8):
            for own, optimizer in ((ones, one), (twos, two)):
                backward(own, step)
                optimizer.step(), optimizer.zero_grad()
        return one, two

    def test_a_state_goes_on_to_the_same_bits(self):
        for dtype in (torch.float32, torch.bfloat16):
            for source in (offload, on_cpu):
                one, two = self.go_on(source, offload, dtype)
                self.assertEqual(bits(one), bits(two), (dtype, source))
                self.assertEqual(two.param_groups[0]["betas"], HYPER["betas"])

    def test_a_state_in_8_bits_goes_on_to_the_same_bits(self):
        def int8(make):
            return lambda own: make(own, moments="int8")

        for source in (offload, on_cpu):
            for target in (offload, on_cpu):
                one, two = self.go_on(int8(source), int8(target), torch.bfloat16)
                self.assertEqual(bits(one), bits(two), (source, target))

    def test_states_go_to_torchs_adamw_and_back(self):
        def torchs(own):
            return torch.optim.AdamW(own, foreach=False, **HYPER)

        def unclipped(own):
            return offload(own, max_grad_norm=None)

        for source, target in ((torchs, unclipped), (unclipped, torchs)):
            one, two = self.go_on(source, target, torch.float32)
            if isinstance(two, OffloadAdamW):
                two.synchronize()
            for a, b in zip(one.param_groups[0]["params"], two.param_groups[0]["params"]):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
                self.assertEqual(float(two.state[b]["step"]), 8)

    def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(self):
        own = params()
        optimizer = offload(own)
        backward(own, 0)
        optimizer.step()
        before, good = bits(optimizer), optimizer.state_dict()
        for why, change in (
            ("exp_avg of parameter 2 is", lambda s: s["state"][2].update(exp_avg=torch.zeros(3))),
            ("param of parameter 2 is", lambda s: s["state"][2].update(param=torch.zeros(3))),
            ("the state of parameter 0 lacks exp_avg_sq", lambda s: s["state"][0].pop("exp_avg_sq")),
            ("lacks betas", lambda s: s["param_groups"][0].pop("betas")),
            ("doesn't match", lambda s: s["param_groups"][0]["params"].pop()),
        ):
            saved = copy.deepcopy(good)
            change(saved)
            with self.assertRaisesRegex(ValueError, why):
                optimizer.load_state_dict(saved)
            self.assertEqual(bits(optimizer), before)

    def test_weights_that_somebody_changes_are_taken_anew_and_others_keep_their_fp32_copy(self):
        own = params(torch.bfloat16)
        optimizer = offload(own)
        backward(own, 0)
        optimizer.step(), optimizer.synchronize()
        masters = [optimizer.state[p]["param"].clone() for p in own]
        with torch.no_grad():
            own[2].copy_(own[2].clone())
            own[2][3, 4] = 7.0
        masters[2][3, 4] = 7.0
        twins = [torch.nn.Parameter(p.detach().clone()) for p in own]
        twin = offload(twins)
        saved = copy.deepcopy(optimizer.state_dict())
        for number, master in enumerate(masters):
            saved["state"][number]["param"] = master
        twin.load_state_dict(saved)
        backward(own, 1), backward(twins, 1)
        optimizer.step(), twin.step()
        self.assertEqual(bits(optimizer), bits(twin))

    def test_a_change_finds_the_state_after_the_last_step(self):
        digests = set()
        for waits in (True, False):
            own = params(torch.bfloat16)
            optimizer = offload(own)
            backward(own, 0)
            optimizer.step()
            if waits:
                optimizer.synchronize()
            with torch.no_grad():
                own[2][3, 4] = 7.0
            backward(own, 1)
            optimizer.step()
            digests.add(bits(optimizer))
        self.assertEqual(len(digests), 1)


class NeverIdle:
    """The CPU never has time for a commit: each commit runs together with the next step, or when the state is requested."""

    def setUp(self):
        super().setUp()
        never = mock.patch.object(OffloadAdamW, "_catch_up", lambda self: None)
        never.start()
        self.addCleanup(never.stop)


class LateExactness(NeverIdle, Exactness):
    pass


class LateCopies(NeverIdle, Copies):
    pass


class LateStates(NeverIdle, States):
    pass


class Refusals(unittest.TestCase):
    def ready(self, **settings):
        own = params()
        optimizer = offload(own, **settings)
        backward(own, 0)
        return own, optimizer

    def test_who_reads_a_gradient_that_has_gone_is_told(self):
        own, optimizer = self.ready()
        scaler = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for read in (lambda: own[0].grad.sum(), lambda: scaler.unscale_(optimizer), lambda: backward(own, 1)):
            with self.assertRaisesRegex(RuntimeError, r"moved to the CPU.*clips in step\(\) by its max_grad_norm.*use_reentrant=False"):
                read()
        optimizer.step()
        optimizer.zero_grad()
        backward(own, 1)
        optimizer.step()
        self.assertEqual(optimizer.last.verdict, "commit")

    def test_gradients_that_come_after_the_norm_are_refused(self):
        late = torch.nn.Parameter(torch.ones(2))
        own = [*params(), late]
        optimizer = offload(own)
        backward(own[:-1], 0)
        optimizer.grad_norm()
        with self.assertRaisesRegex(RuntimeError, r"gradient of parameter 7 was computed after grad_norm\(\)"):
            late.sum().backward()

    def test_weights_that_are_needed_later_in_backward_are_not_changed_in_silence(self):
        own = torch.nn.Parameter(torch.ones(5))
        optimizer = offload([own], max_grad_norm=None)
        loss = (own * own).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_weights_that_change_between_backward_and_step_are_refused(self):
        own, optimizer = self.ready()
        with torch.no_grad():
            own[2].add_(1)
        with self.assertRaisesRegex(RuntimeError, r"parameter 2 was changed between backward\(\) and step\(\)"):
            optimizer.step()

    def test_a_second_optimizer_of_a_parameter_is_told_of_the_first(self):
        own, first = self.ready()
        first.step()
        second = offload(own)
        with self.assertRaisesRegex(RuntimeError, "gradient of parameter . has been taken by another OffloadAdamW: delete that optimizer"):
            backward(own, 1)
        del first
        gc.collect()
        second.zero_grad()
        backward(own, 1)
        second.step()
        self.assertEqual(second.last.verdict, "commit")

    def test_parameters_that_move_are_refused(self):
        own = params()
        optimizer = offload(own)
        own[2].data = own[2].data.clone()
        with self.assertRaisesRegex(RuntimeError, "parameter 2 has moved.*before the optimizer is made"):
            backward(own, 0)
        del optimizer

    def test_sparse_gradients_are_refused(self):
        table = torch.nn.Embedding(10, 4, sparse=True)
        optimizer = offload(table.parameters())
        with self.assertRaisesRegex(ValueError, "gradient of parameter 0 is sparse.*SparseAdam"):
            table(torch.tensor([1, 2])).sum().backward()
        del optimizer

    def test_more_than_one_process_is_refused(self):
        where = "torch.distributed."
        with mock.patch(where + "is_initialized", return_value=True), mock.patch(where + "get_world_size", return_value=2):
            with self.assertRaisesRegex(RuntimeError, "torch.distributed has 2.*FSDP or ZeRO with CPUAdamW"):
                offload(params())

    def test_parameters_that_cannot_be_taken_name_their_index_and_the_remedy(self):
        whole, good = torch.zeros(20), torch.zeros(2)
        for bad, why in (
            (torch.zeros(4, 6)[:, :3], r"parameter 1 has gaps or repeats in memory.*Parameter\(param\.contiguous\(\)\)"),
            (torch.zeros(3, dtype=torch.float64), "parameter 1 is torch.float64: use float32"),
            (torch.zeros(3, device="meta"), "parameter 1 is on meta"),
            (good.detach()[:1], "parameters 0 and 1 share memory.*clone"),
        ):
            optimizer = OffloadAdamW([good.requires_grad_()])
            with self.assertRaisesRegex(ValueError, why):
                optimizer.add_param_group({"params": [bad.detach().requires_grad_()]})
            self.assertEqual((len(optimizer.param_groups), len(optimizer._members)), (1, 1))
        OffloadAdamW([whole[:10], whole[10:]])

    def test_settings_that_are_not_offered_are_refused(self):
        for keywords, why in (
            ({"max_grad_norm": -1.0}, "0 or more"), ({"accumulation_steps": 0}, "at least 1"), ({"bucket_mib": 0}, "from 1/64"),
            ({"threads": 0}, "at least 1"), ({"isa": "sse9"}, "one of auto, scalar"), ({"lr": -1.0}, "lr must be"),
            ({"moments": "int4"}, "'int4'"), ({"masters": "split"}, "PyTorch owns"),
            ({"moments": "int8", "betas": (0.95, 0.999)}, r"betas\[0\] must be at most 0.93"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, why):
                OffloadAdamW(params(), **keywords)
        optimizer = offload(params())
        for copied in (pickle.dumps, copy.deepcopy):
            with self.assertRaisesRegex(TypeError, r"save its state_dict\(\)"):
                copied(optimizer)

    def test_what_fails_on_the_worker_is_raised(self):
        own = params()
        optimizer = offload(own)
        with mock.patch.object(optimizer._link, "send", side_effect=RuntimeError("no copy")):
            backward(own, 0)
            with self.assertRaisesRegex(RuntimeError, "no copy"):
                optimizer.step()
        own = params()
        optimizer = offload(own)
        with mock.patch.object(optimizer, "_settle", side_effect=RuntimeError("no state")):
            backward(own, 0)
            optimizer.step()
            for what in (optimizer.synchronize, optimizer.state_dict, lambda: backward(own, 1)):
                with self.assertRaisesRegex(RuntimeError, "no state"):
                    what()

    def test_an_optimizer_that_is_gone_leaves_gradients_and_threads_alone(self):
        own = params()
        before = set(threading.enumerate())
        optimizer = offload(own)
        backward(own, 0)
        optimizer.step()
        (worker,) = set(threading.enumerate()) - before
        del optimizer
        gc.collect()
        backward(own, 1)
        self.assertTrue(all(p.grad is not None and p.grad.norm() >= 0 for p in own))
        worker.join(timeout=10)
        self.assertFalse(worker.is_alive())


if __name__ == "__main__":
    unittest.main()
