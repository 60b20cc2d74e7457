"""`OffloadAdamW` in loops of accelerate and Lightning, which clip and accumulate themselves. Each class is skipped with a message if its package is
not installed."""

import importlib.util
import logging
import math
import unittest
import unittest.mock

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: OffloadAdamW in foreign loops is not tested, because torch is not installed ({error})") from error

from superoffload.torch import CPUAdamW, OffloadAdamW, follow_accelerator

torch.set_num_threads(1)

ROWS = torch.randn(28, 16, generator=torch.Generator().manual_seed(1))
LIMIT = 0.05


def has(package):
    return importlib.util.find_spec(package) is not None


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def data():
    return torch.utils.data.DataLoader(ROWS, batch_size=4)


def offload(own, **settings):
    return OffloadAdamW(own, **{"lr": 1e-2, "bucket_mib": 1 / 64, "max_grad_norm": None, **settings})


def torchs(own):
    return torch.optim.AdamW(own, lr=1e-2)


def close(case, some, others):
    case.assertEqual(len(some), len(others))
    for one, other in zip(some, others):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@unittest.skipUnless(has("accelerate"), "LEFT OUT: OffloadAdamW with accelerate is not tested, because accelerate is not installed")
class Accelerate(unittest.TestCase):
    """Seven batches, accumulated by three: the last accumulation of an epoch has one batch."""

    def setUp(self):
        from accelerate.state import AcceleratorState, GradientState, PartialState

        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()

    def train(self, make, follow, limit=LIMIT, accumulation=3, before=False):
        from accelerate import Accelerator

        accelerator = Accelerator(gradient_accumulation_steps=accumulation, cpu=True)
        net = model()
        optimizer = make(net.parameters())
        if follow and before:
            follow_accelerator(accelerator, optimizer)
        net, optimizer, batches = accelerator.prepare(net, optimizer, data())
        if follow and not before:
            follow_accelerator(accelerator, optimizer)
        norms, speculated = [], []
        for _ in range(2):
            for rows in batches:
                with accelerator.accumulate(net):
                    accelerator.backward(net(rows).square().mean())
                    if accelerator.sync_gradients and limit is not None:
                        norms.append(accelerator.clip_grad_norm_(net.parameters(), limit))
                    optimizer.step()
                    if accelerator.sync_gradients and follow:
                        speculated.append(optimizer.optimizer.last.speculated)
                    optimizer.zero_grad()
        self.setUp()
        if follow:
            optimizer.optimizer.synchronize()
        return [param.detach().clone() for param in net.parameters()], norms, speculated

    def test_clipping_and_accumulation_are_those_of_accelerate(self):
        for limit in (LIMIT, float("inf"), None):
            for before in (True, False):
                ours, norms, speculated = self.train(offload, True, limit, before=before)
                theirs, their_norms, _ = self.train(torchs, False, limit)
                close(self, ours, theirs)
                close(self, norms, their_norms)
                self.assertEqual(len(speculated), 6)
                if limit != LIMIT:
                    self.assertTrue(all(speculated), "a short accumulation was not speculated")

    def test_a_loop_that_does_not_clip_uses_the_optimizers_limit(self):
        ours, *_ = self.train(lambda own: offload(own, max_grad_norm=LIMIT), True, None)
        theirs, *_ = self.train(torchs, False, LIMIT)
        close(self, ours, theirs)

    def test_a_limit_counts_for_one_step(self):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        net = model()
        optimizer = offload(net.parameters())
        follow_accelerator(accelerator, optimizer)
        for clips in (True, False):
            for drops in (True, False):
                net(ROWS).square().mean().backward()
                if clips or drops:
                    accelerator.clip_grad_norm_(net.parameters(), 1e-6)
                optimizer.zero_grad() if drops else optimizer.step()
            self.assertEqual(optimizer.last.verdict, "clip" if clips else "commit")

    def test_two_optimizers_clip_each_their_own(self):
        def train(make, follow):
            from accelerate import Accelerator

            self.setUp()
            accelerator = Accelerator(cpu=True)
            nets = [model(), model()]
            optimizers = [make(net.parameters()) for net in nets]
            for optimizer in optimizers if follow else ():
                follow_accelerator(accelerator, optimizer)
            norms = []
            for _ in range(3):
                for net, optimizer in zip(nets, optimizers):
                    net(ROWS).square().mean().backward()
                    norms.append(accelerator.clip_grad_norm_(net.parameters(), LIMIT))
                    optimizer.step()
                    optimizer.zero_grad()
            return norms

        close(self, train(offload, True), train(torchs, False))

    def test_what_does_not_fit_is_refused(self):
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=True)
        net, other = model(), model()
        optimizer = offload(net.parameters())
        with self.assertRaisesRegex(ValueError, "follow_accelerator needs an OffloadAdamW, not a CPUAdamW"):
            follow_accelerator(accelerator, CPUAdamW(net.parameters()))
        follow_accelerator(accelerator, optimizer)
        (net(ROWS).square().mean() + other(ROWS).square().mean()).backward()
        with self.assertRaisesRegex(ValueError, "4 of the 4 that OffloadAdamW steps were given, and 4 that it does not step.*one optimizer at a time"):
            accelerator.clip_grad_norm_([*net.parameters(), *other.parameters()], 1.0)
        with self.assertRaisesRegex(ValueError, "1 of the 4 that OffloadAdamW steps"):
            accelerator.clip_grad_norm_(net[0].weight, 1.0)
        with self.assertRaisesRegex(ValueError, "2-norm, not by norm_type=1"):
            accelerator.clip_grad_norm_(net.parameters(), 1.0, norm_type=1)
        for name, value, why in (("scaler", object(), "use 'bf16'"), ("num_processes", 2, "accelerate has 2: use FSDP with CPUAdamW")):
            with unittest.mock.patch.object(type(accelerator), name, value, create=True), self.assertRaisesRegex(ValueError, why):
                if name == "scaler":
                    accelerator.scaler = value
                follow_accelerator(accelerator, optimizer)
            accelerator.scaler = None


@unittest.skipUnless(has("lightning"), "LEFT OUT: OffloadAdamW with Lightning is not tested, because lightning is not installed")
class Lightning(unittest.TestCase):
    def train(self, make, accumulation=1, limit=None):
        import lightning

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

        class Module(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net, self.losses = model(), []

            def training_step(self, rows):
                loss = self.net(rows).square().mean()
                self.losses.append(loss.item())
                return loss

            def configure_optimizers(self):
                optimizer = make(self.parameters())
                return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

        module = Module()
        trainer = lightning.Trainer(
            max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            accumulate_grad_batches=accumulation, gradient_clip_val=limit,
        )  # fmt: skip
        trainer.fit(module, data())
        return [param.detach() for param in module.parameters()], module.losses

    def test_losses_are_those_of_torchs_adamw(self):
        for accumulation in (1, 7):
            # Lightning's clipping needs the optimizer's limit.
            for limit in (None, LIMIT):
                ours, losses = self.train(lambda own: offload(own, accumulation_steps=accumulation, max_grad_norm=limit), accumulation, limit)  # noqa: B023
                theirs, their_losses = self.train(torchs, accumulation, limit)
                self.assertTrue(all(math.isclose(one, other, rel_tol=1e-4) for one, other in zip(losses, their_losses, strict=True)))
                close(self, ours, theirs)


if __name__ == "__main__":
    unittest.main()
