"""Reads and changes of weights between `backward` and `step` of OffloadAdamW, and gradients dropped there. They behave as with torch's AdamW.
Skipped with a message if torch is not installed."""

import copy
import gc
import io
import itertools
import os
import time
import unittest
import warnings
from functools import partial

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: reads of OffloadAdamW's weights are not tested, because torch is not installed ({error})") from error

from superoffload._edits import SAMPLES, sampled
from superoffload.torch import CPUAdamW, OffloadAdamW

SMALL = 1 / 64
IN = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


def model(layers=4):
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers)))


def offload(own, **settings):
    return OffloadAdamW(own, **{"lr": 0.1, "bucket_mib": SMALL, "max_grad_norm": None, **settings})


def finished(optimizer):
    """Wait until the tasks of backward are done, so that weights no longer change."""
    for bucket in optimizer._buckets:
        bucket.wait()


def weights(module):
    return [param.detach().clone() for param in module.parameters()]


def same(some, others):
    return all(torch.equal(one, other) for one, other in zip(some, others, strict=True))


class BetweenBackwardAndStep(unittest.TestCase):
    def ready(self, **settings):
        """Return a model after one step and a second backward pass with speculation, and the weights of the first step."""
        net = model()
        optimizer = offload(net.parameters(), **settings)
        optimizer.overlap_forward(list(net))
        net(IN).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        before = weights(net)
        net(IN).square().mean().backward()
        finished(optimizer)
        self.assertTrue(all(bucket.is_speculated for bucket in optimizer._buckets))
        return net, optimizer, before

    def test_readers_see_the_weights_of_the_last_step(self):
        net, optimizer, before = self.ready()
        twin = model()
        with torch.no_grad():
            for param, weight in zip(twin.parameters(), before):
                param.copy_(weight)
        average = torch.optim.swa_utils.AveragedModel(twin)
        with torch.no_grad():
            evaluated = net(IN)
        self.assertTrue(torch.equal(evaluated, twin(IN)), "evaluation")
        self.assertTrue(same(net.state_dict().values(), before), "state_dict")
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        self.assertTrue(same(weights(torch.load(file, weights_only=False)), before), "torch.save of the model")
        self.assertTrue(same(weights(copy.deepcopy(net)), before), "deepcopy")
        average.update_parameters(net)
        self.assertTrue(same(weights(average.module), before), "moving average")
        reader = torch.nn.Linear(64, 64)
        reader.weight = net[2].weight
        self.assertTrue(torch.equal(reader.weight, before[4]), "a second model with the same parameter")
        optimizer.step()
        optimizer.synchronize()
        self.assertEqual((optimizer.last.verdict, optimizer.last.redone), ("commit", 0))
        self.assertFalse(any(torch.equal(param, weight) for param, weight in zip(net.parameters(), before)))

    def test_a_checkpoint_there_holds_weights_and_state_of_one_step(self):
        net, optimizer, _ = self.ready()
        saved = copy.deepcopy((net.state_dict(), optimizer.state_dict()))
        optimizer.step()
        net(IN).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        other = model()
        other.load_state_dict(saved[0])
        resumed = offload(other.parameters())
        resumed.load_state_dict(saved[1])
        for _ in range(2):
            other(IN).square().mean().backward()
            resumed.step()
        resumed.synchronize()
        self.assertTrue(same(weights(net), weights(other)))

    def test_losses_of_actor_and_critic_are_those_of_torch(self):
        def losses(make):
            torch.manual_seed(0)
            critic, actor = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
            optimizers = [make(list(critic.parameters())), make(list(actor.parameters()))]
            seen = []
            for _ in range(4):
                critic(IN).square().mean().backward()
                if isinstance(optimizers[0], OffloadAdamW):
                    finished(optimizers[0])
                critic.requires_grad_(False)
                loss = critic(actor(IN)).mean()
                loss.backward()
                critic.requires_grad_(True)
                seen.append(loss.item())
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
            return seen

        for one, other in zip(losses(offload), losses(lambda own: torch.optim.AdamW(own, lr=0.1))):
            self.assertAlmostEqual(one, other, places=4)

    def test_a_weight_that_backward_needs_later_is_the_last_steps(self):
        class Product(torch.autograd.Function):
            """Saves a weight without autograd's version counter."""

            @staticmethod
            def forward(ctx, x, weight):
                ctx.weight = weight
                return x @ weight.t()

            @staticmethod
            def backward(ctx, gradient):
                time.sleep(0.02)
                return gradient @ ctx.weight, None

        def last(make):
            torch.manual_seed(0)
            one, two = torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)
            optimizer = make([*one.parameters(), *two.parameters()])
            for _ in range(3):
                one(torch.tanh(Product.apply(two(IN), one.weight.detach()))).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            return two.weight.detach()

        torch.testing.assert_close(last(offload), last(lambda own: torch.optim.AdamW(own, lr=0.1)), rtol=1e-4, atol=1e-4)

class ChangesThroughData(unittest.TestCase):
    """Torch's version counter does not count them. They are found by a sample of the weights."""

    CHANGES = {
        "clamp": lambda weight: weight.clamp_(-0.01, 0.01),
        "mask of columns": lambda weight: weight.mul_(torch.arange(64) % 2),
        "mask of 2 percent": lambda weight: weight.view(-1)[7::50].zero_(),
        "permuted rows": lambda weight: weight.copy_(weight.flip(0)),
        "an average": lambda weight: weight.lerp_(torch.ones(64, 64, dtype=weight.dtype), 0.1),
    }

    def run_with(self, change, when, make, dtype=torch.float32, bad=None):
        """Return the weights after four steps; `change` edits a weight before or after the third backward pass."""
        net = model().to(dtype)
        optimizer = make(net.parameters())
        for step in range(4):
            if step == 2 and when == "before backward":
                change(net[1].weight.data)
            net(IN.to(dtype)).square().mean().mul(float("nan") if step == bad else 1.0).backward()
            if step == 2 and when == "before step":
                change(net[1].weight.data)
            optimizer.step()
            optimizer.zero_grad()
            if hasattr(optimizer, "synchronize"):
                optimizer.synchronize()
        return weights(net)

    def test_they_count_as_with_cpu_adamw(self):
        cases = itertools.product(self.CHANGES.items(), ("before backward", "before step"), (torch.float32, torch.bfloat16), (None, 1e-3), (True, False))
        for (name, change), when, dtype, limit, speculate in cases:
            with self.subTest(name=name, when=when, dtype=dtype, limit=limit, speculate=speculate), warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                want = self.run_with(change, when, partial(CPUAdamW, lr=0.1, max_grad_norm=limit or 1e9), dtype)
                self.assertEqual(said, [])
                got = self.run_with(change, when, partial(offload, max_grad_norm=limit, speculate=speculate), dtype)
                self.assertTrue(same(got, want))
                self.assertRegex(" ".join(str(each.message) for each in said), r"^OffloadAdamW: parameter 2 was changed through \.data.*no_grad\(\)")

    def test_they_stay_where_the_step_is_skipped(self):
        change = self.CHANGES["clamp"]
        want = self.run_with(change, "before step", partial(CPUAdamW, lr=0.1, max_grad_norm=1e9), bad=2)
        self.assertTrue(same(self.run_with(change, "before step", offload, bad=2), want))

    def test_weights_that_nobody_changes_are_not_suspected(self):
        """NaN, negative zero, clipped and skipped steps, 16 bits, and parts in several buckets."""
        for dtype, speculate in itertools.product((torch.float32, torch.bfloat16, torch.float16), (True, False)):
            net = model().to(dtype)
            with torch.no_grad():
                net[0].bias[:2] = float("nan")
                net[2].bias.mul_(-0.0)
            optimizer = offload(net.parameters(), speculate=speculate, max_grad_norm=0.1)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for step in range(6):
                    for param in net.parameters():
                        (param.nan_to_num() * (step + 1) * (float("inf") if step == 3 else 1e-3)).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

    def test_a_sample_has_elements_of_all_columns_and_of_any_mask(self):
        for rows, columns in ((1024, 1024), (1000, 1025), (2048, 999), (33, 3 * 5 * 7 * 11), (70_000, 1), (1, 70_000), (1024, 17), (5, 7), (128, 128)):
            elems = rows * columns
            where = sampled(torch.arange(elems), columns)
            self.assertGreater(len((where % columns).unique()), min(columns, len(where)) * 0.98, (rows, columns))
            self.assertTrue(len(where) == elems or 0.85 * SAMPLES < len(where) <= SAMPLES, (rows, columns, len(where)))
            for period in (2, 3, 5, 10, 16, 50, 100):
                for first in range(min(period, elems)):
                    self.assertTrue((where % period == first).any() or period > elems, (rows, columns, period, first))

    def test_a_parameter_that_moves_between_backward_and_step_is_refused(self):
        net = model()
        optimizer = offload(net.parameters())
        net(IN).square().mean().backward()
        net[1].weight.data = net[1].weight.data.clone()
        with self.assertRaisesRegex(RuntimeError, "parameter 2 has moved in memory"):
            optimizer.step()


class DroppedGradients(unittest.TestCase):
    """Gradients dropped by the model's zero_grad, which the optimizer does not see."""

    def follow(self, loop, **settings):
        ours, theirs = model(), model()
        common = {"lr": 0.1, "max_grad_norm": 1e9}
        mine, other = OffloadAdamW(ours.parameters(), bucket_mib=SMALL, **common, **settings), CPUAdamW(theirs.parameters(), **common)
        for net, optimizer in ((ours, mine), (theirs, other)):
            loop(net, optimizer)
        mine.synchronize()
        self.assertTrue(same(weights(ours), weights(theirs)))

    def test_after_an_error_in_backward(self):
        class Full(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.view_as(x)

            @staticmethod
            def backward(ctx, gradient):
                raise torch.OutOfMemoryError("CUDA out of memory.")

        def loop(net, optimizer):
            for step in range(4):
                if step != 2:
                    net(IN).square().mean().backward()
                    optimizer.step()
                    net.zero_grad()
                    continue
                with self.assertRaises(torch.OutOfMemoryError):
                    net[3](net[2](Full.apply(net[1](net[0](IN))))).square().mean().backward()
                net.zero_grad()

        self.follow(loop)

    def test_whole_and_in_part(self):
        def loop(net, optimizer):
            for step in range(6):
                net(IN).square().mean().backward()
                dropped = (net, net[1], net[3])[step % 3]
                dropped.zero_grad()
                if step != 3:
                    net(IN[step:]).square().mean().backward() if dropped is net else dropped(IN).square().mean().backward()
                optimizer.step()
                net.zero_grad()

        self.follow(loop)

    def test_nothing_is_left(self):
        def loop(net, optimizer):
            for step in range(3):
                net(IN).square().mean().backward()
                net.zero_grad()
                optimizer.step()
                net(IN).square().mean().backward()
                optimizer.step()
                net.zero_grad()

        self.follow(loop)

    def test_between_passes_that_accumulate(self):
        def loop(net, optimizer):
            for step in range(4):
                if step % 2:
                    net(IN).square().mean().backward()
                    net.zero_grad()
                for _ in range(3):
                    net(IN[step:]).square().mean().backward()
                optimizer.step()
                net.zero_grad()

        self.follow(loop, accumulation_steps=3)

    def test_a_gan_steps_as_by_torch(self):
        """The loop of torch's DCGAN example, with both passes of the discriminator in one."""

        def train(make):
            torch.manual_seed(0)
            generator, discriminator = torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)
            of_g, of_d = make(list(generator.parameters())), make(list(discriminator.parameters()))
            for _ in range(4):
                discriminator.zero_grad()
                fake = generator(IN)
                (discriminator(IN) - discriminator(fake.detach())).mean().backward()
                of_d.step()
                generator.zero_grad()
                discriminator(fake).mean().backward()
                of_g.step()
            for optimizer in (of_g, of_d):
                getattr(optimizer, "synchronize", int)()
            return torch.cat([param.detach().flatten() for param in [*generator.parameters(), *discriminator.parameters()]])

        torch.testing.assert_close(train(offload), train(lambda own: torch.optim.AdamW(own, lr=0.1)), rtol=1e-4, atol=1e-4)


class OutsideClipping(unittest.TestCase):
    """`clip_grad_norm_` of torch, accelerate or Lightning, with the limit of OffloadAdamW."""

    def test_the_norm_is_there_and_the_factor_is_the_same(self):
        ours, theirs = model(), model()
        mine, other = offload(ours.parameters(), max_grad_norm=0.5), CPUAdamW(theirs.parameters(), lr=0.1, max_grad_norm=0.5)
        for step in range(5):
            for net in (ours, theirs):
                (net(IN).square().mean() * 10**step).backward()
            each = [param.grad.norm().item() for param in theirs.parameters()]
            self.assertTrue(all(abs(p.grad.norm().item() / norm - 1) < 1e-4 for p, norm in zip(ours.parameters(), each)))
            norm = torch.nn.utils.clip_grad_norm_(ours.parameters(), 0.5)
            mine.step(), other.step()
            other.zero_grad()
            self.assertAlmostEqual(norm.item() / other.last.grad_norm, 1, places=5)
        mine.synchronize()
        self.assertTrue(same(weights(ours), weights(theirs)))

    def test_another_limit_is_refused(self):
        net = model()
        optimizer = offload(net.parameters(), max_grad_norm=1.0)
        (net(IN).square().mean() * 1000).backward()
        for limit in (0.1, float("inf")):
            with self.assertRaisesRegex(RuntimeError, r"max_grad_norm=1.0.*give OffloadAdamW the max_grad_norm of clip_grad_norm_"):
                torch.nn.utils.clip_grad_norm_(net.parameters(), limit)
        optimizer.step()
        self.assertEqual(optimizer.last.verdict, "clip")


class Forked(unittest.TestCase):
    def child(self, act):
        """Return the error that `act` raises in a forked process."""
        read, write = os.pipe()
        if os.fork() == 0:
            said = "nothing"
            try:
                act()
            except BaseException as error:
                said = f"{type(error).__name__}: {error}"
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        import select

        ready, _, _ = select.select([read], [], [], 30)
        self.assertTrue(ready, "the child hangs")
        said = os.read(read, 1 << 16).decode()
        os.close(read)
        os.wait()
        return said

    def test_a_forked_process_is_told_that_it_has_no_state(self):
        own = torch.nn.Parameter(torch.ones(2 << 20))
        optimizer = OffloadAdamW([own])
        own.sum().backward()
        optimizer.step()
        torch.set_num_threads(1)

        def step():
            # Not by backward, which torch refuses by itself in a child of a process that has used a GPU.
            own.grad = torch.ones_like(own)
            optimizer.step()

        for act in (optimizer.state_dict, lambda: optimizer.state[own], optimizer.synchronize, step):
            said = self.child(act)
            self.assertRegex(said, "RuntimeError: OffloadAdamW: its state and its thread stay in the process.*before the fork")
        optimizer.state_dict()


class Hooks(unittest.TestCase):
    def test_a_model_with_layers_that_wait_is_pickled_and_copied(self):
        net = model()
        optimizer = offload(net.parameters())
        optimizer.overlap_forward(list(net))
        net(IN).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        file = io.BytesIO()
        torch.save(net, file)
        file.seek(0)
        for other in (torch.load(file, weights_only=False), copy.deepcopy(net)):
            self.assertTrue(torch.equal(other(IN), net(IN)))

    def test_layers_are_given_anew(self):
        net = model()
        optimizer = offload(net.parameters())
        for layers in (list(net), list(net)[:2]):
            optimizer.overlap_forward(layers)
        self.assertEqual([len(layer._forward_pre_hooks) for layer in net], [1, 1, 0, 0])
        net(IN).square().mean().backward()
        optimizer.step()
        del optimizer
        gc.collect()
        self.assertEqual([len(layer._forward_pre_hooks) for layer in net], [0] * 4)

    def test_compiled_autograd_does_not_trace_the_hook(self):
        net = model(2)
        optimizer = offload(net.parameters())
        before = weights(net)
        compiled = torch.compile(lambda: net(IN).square().mean().backward(), backend="eager")
        with torch._dynamo.config.patch(compiled_autograd=True):
            compiled()
        optimizer.step()
        optimizer.synchronize()
        self.assertFalse(same(weights(net), before))

    def test_step_waits_for_its_own_weights_first(self):
        """Backward completes norm and head first, and `step` waits for them. The layers wait for their own weights."""
        net = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        optimizer = offload(net.parameters(), max_grad_norm=1e-3)
        optimizer.overlap_forward(list(net)[:-1])
        sent, send = [], optimizer._link.send
        optimizer._link.send = lambda pairs, after: (sent.append(pairs[0][0].data_ptr()), send(pairs, after))[1]
        net(IN).square().mean().backward()
        optimizer.step()
        optimizer.synchronize()
        start, bytes_of = net[-1].weight.data_ptr(), net[-1].weight.nbytes
        self.assertTrue(start <= sent[0] < start + bytes_of, "the last layer's weights are not the first to be sent")


if __name__ == "__main__":
    unittest.main()
