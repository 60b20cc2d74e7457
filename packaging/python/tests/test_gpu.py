"""`OffloadAdamW` on a GPU: streams, late copies, errors in backward, compiled layers, memory. `tests/gpu/torch.sh` runs it. Skipped with a message if
torch or a GPU is missing."""

import gc
import unittest
import warnings
from unittest import mock

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: OffloadAdamW is not tested on a GPU, because torch is not installed ({error})") from error

from superoffload._link import CudaLink
from test_offload import Network, backward, bits, offload, on_cpu, params, run, train

CYCLES = 20_000_000
"""Cycles of the GPU that a late copy waits, about 10 ms."""


class LateLink(CudaLink):
    """Copies begin late, so that whatever does not wait for them reads old memory."""

    def bring(self, target, gradient, after):
        with torch.cuda.stream(self.down):
            torch.cuda._sleep(CYCLES // 10)
        super().bring(target, gradient, after)

    def send(self, pairs, after):
        with torch.cuda.stream(self.up):
            torch.cuda._sleep(CYCLES)
        return super().send(pairs, after)


class Full(torch.autograd.Function):
    """Runs out of memory in backward."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return torch.empty(1 << 50, device="cuda")


def network(**settings):
    model = Network().cuda().bfloat16()
    optimizer = offload(model.parameters(), max_grad_norm=1.0, **settings)
    optimizer.overlap_forward(model.layers)
    return model, optimizer


@unittest.skipUnless(torch.cuda.is_available(), "LEFT OUT: OffloadAdamW is not tested on a GPU, because there is none")
class Gpu(unittest.TestCase):
    def setUp(self):
        torch.use_deterministic_algorithms(True, warn_only=True)
        self.addCleanup(torch.use_deterministic_algorithms, False)

    def trained(self, steps=8, **settings):
        """Return losses and digest of a plain run."""
        model, optimizer = network(**settings)
        return train(model, optimizer, steps, "cuda"), bits(optimizer)

    def test_a_gpu_has_the_digest_of_the_cpu(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            want, _ = run(on_cpu, steps=200, dtype=dtype)
            for speculate in (True, False):
                got, lasts = run(lambda own, s=speculate: offload(own, speculate=s), steps=200, dtype=dtype, device="cuda")
                self.assertEqual(got, want, (dtype, speculate))
                self.assertEqual(max(last.speculated for last in lasts) > 0, speculate)
                self.assertGreaterEqual(lasts[-1].exposed_ms, 0.0)

    def test_layers_wait_for_their_weights(self):
        digests, losses = set(), []
        for speculate in (True, False):
            for overlap in (True, False):
                model = Network().cuda().bfloat16()
                optimizer = offload(model.parameters(), speculate=speculate, max_grad_norm=1.0)
                if overlap:
                    optimizer.overlap_forward(model.layers)
                losses.append(train(model, optimizer, 50, "cuda"))
                digests.add(bits(optimizer))
        self.assertEqual((len(digests), losses), (1, [losses[0]] * 4))

    def test_gradients_leave_the_device(self):
        own = params(torch.bfloat16, "cuda", shapes=[(8 << 20,)] * 8)
        optimizer = offload(own, bucket_mib=16)
        for step in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            for p in own:
                (p.float().mean() * 0.1).backward()
            torch.cuda.synchronize()
            self.assertEqual(torch.cuda.memory_allocated() - before, 0)
            optimizer.step()
        self.assertEqual(optimizer.last.verdict, "commit")

    def test_late_copies_change_no_bit(self):
        want, _ = run(on_cpu, steps=24, dtype=torch.bfloat16)
        losses = self.trained()
        for settings in ({}, {"speculate": False}):
            with mock.patch("superoffload._offload.link_to", LateLink), self.subTest(settings=settings):
                self.assertEqual(run(lambda own: offload(own, **settings), steps=24, dtype=torch.bfloat16, device="cuda")[0], want)  # noqa: B023
                self.assertEqual(self.trained(**settings), losses)

    def test_a_second_stream_changes_no_bit(self):
        want = self.trained()
        for settings in ({}, {"speculate": False}):
            for whole in (True, False):
                with self.subTest(settings=settings, whole=whole), mock.patch("superoffload._offload.link_to", LateLink):
                    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
                    model, optimizer = network(**settings)
                    losses = []
                    for step in range(8):
                        # The first layers' passes, or all passes and the step, run on the second stream.
                        side.wait_stream(main)
                        with torch.cuda.stream(side):
                            ids = torch.randint(0, 300, (4, 16), generator=torch.Generator().manual_seed(step)).cuda()
                            loss = model(ids)
                            if whole:
                                loss.backward()
                                optimizer.step()
                        main.wait_stream(side)
                        if not whole:
                            loss.backward()
                            optimizer.step()
                        optimizer.zero_grad()
                        losses.append(loss.item())
                    self.assertEqual((losses, bits(optimizer)), want)

    def test_training_goes_on_after_out_of_memory_in_backward(self):
        want = self.trained()
        for settings in ({}, {"speculate": False}):
            for drop in ("model", "optimizer"):
                model, optimizer = network(**settings)
                losses = train(model, optimizer, 4, "cuda")
                ids = torch.zeros(4, 16, dtype=torch.long, device="cuda")
                hook = model.layers[1].register_forward_hook(lambda _module, _inputs, output: Full.apply(output))
                with self.assertRaises(torch.OutOfMemoryError):
                    model(ids).backward()
                hook.remove()
                (model if drop == "model" else optimizer).zero_grad()
                losses += train(model, optimizer, 4, "cuda", first=4)
                self.assertEqual((losses, bits(optimizer)), want, (settings, drop))

    def test_compiled_layers_train_alike(self):
        results = []
        for settings in ({}, {"speculate": False}):
            torch.compiler.reset()
            model, optimizer = network(**settings)
            for layer in model.layers:
                layer.compile()
            results.append((train(model, optimizer, 8, "cuda"), bits(optimizer)))
        self.assertEqual(results, [results[0]] * 2)

    def test_changes_through_data_count_as_on_the_cpu(self):
        for dtype in (torch.float32, torch.bfloat16):
            sides = []
            for device in ("cpu", "cuda"):
                own = params(dtype, device)
                optimizer = on_cpu(own) if device == "cpu" else offload(own)
                for step in range(6):
                    if step == 3:
                        own[3].data.clamp_(-0.5, 0.5)
                    backward(own, step)
                    if step == 4:
                        own[2].data.mul_(0.5)
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        optimizer.step()
                    optimizer.zero_grad()
                sides.append(bits(optimizer))
            self.assertEqual(*sides)

    def test_a_model_whose_optimizer_is_gone_has_the_weights_of_the_last_step(self):
        ids = torch.arange(64, device="cuda").view(4, 16)
        results = []
        for link in (CudaLink, LateLink):
            with mock.patch("superoffload._offload.link_to", link):
                model, optimizer = network()
                train(model, optimizer, 3, "cuda")
                if link is CudaLink:
                    optimizer.synchronize()
                del optimizer
                gc.collect()
                results.append(model(ids).item())
        self.assertEqual(*results)

    def test_parameters_of_two_gpus_are_refused(self):
        if torch.cuda.device_count() < 2:
            self.skipTest("LEFT OUT: parameters of two GPUs are not tested, because there is one GPU")
        with self.assertRaisesRegex(ValueError, "parameter 1 is on cuda:1, the other parameters are on cuda:0: OffloadAdamW needs all of them on one device"):
            offload([torch.nn.Parameter(torch.ones(4, device=f"cuda:{index}")) for index in range(2)])

    def test_a_trainer_on_two_visible_gpus_is_refused(self):
        try:
            import transformers

            from test_trainer import ROWS, OffloadTrainer, arguments, model
        except (ImportError, unittest.SkipTest) as error:
            self.skipTest(f"LEFT OUT: the Trainer is not tested on two GPUs, because of transformers ({error})")
        if torch.cuda.device_count() < 2:
            self.skipTest("LEFT OUT: the Trainer is not tested on two GPUs, because there is one GPU")
        with self.assertRaisesRegex(ValueError, "nn.DataParallel.*CUDA_VISIBLE_DEVICES=0"):
            OffloadTrainer(model=model(), args=transformers.TrainingArguments(**arguments("/dev/null")), train_dataset=ROWS)


if __name__ == "__main__":
    unittest.main()
