"""Compatibility of both optimizers of `superoffload.torch` with torch.optim.AdamW: keywords, hooks, memory layouts, formats, and loading.
Skipped with a message if torch is not installed."""

import contextlib
import copy
import mmap
import signal
import subprocess
import sys
import time
import unittest
from unittest import mock

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: superoffload.torch is not tested, because torch is not installed ({error})") from error

from superoffload import _cpu_adam
from superoffload.torch import CPUAdamW, OffloadAdamW

BOTH = (CPUAdamW, OffloadAdamW)
EXTRA = {CPUAdamW: {}, OffloadAdamW: {"bucket_mib": 1 / 64, "max_grad_norm": None}}


def made(cls, own, **settings):
    return cls(own, **{"lr": 1e-2, **EXTRA.get(cls, {"foreach": False}), **settings})


def step(optimizer, params, gradient=None):
    for index, param in enumerate(params):
        make = torch.Generator().manual_seed(index)
        param.grad = torch.randn(param.shape, generator=make, dtype=torch.float32).to(param.dtype) if gradient is None else gradient(param)
    optimizer.step()
    getattr(optimizer, "synchronize", int)()


class Counts(unittest.TestCase):
    def test_steps_are_counted_in_float32_whatever_torchs_default_is(self):
        for cls in BOTH:
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                torch.set_default_dtype(dtype)
                try:
                    own = [torch.nn.Parameter(torch.ones(4, dtype=torch.float32))]
                    optimizer = made(cls, own)
                    for _ in range(300):
                        step(optimizer, own, torch.ones_like)
                    again = made(cls, own)
                    again.load_state_dict(optimizer.state_dict())
                finally:
                    torch.set_default_dtype(torch.float32)
                for each in (optimizer, again):
                    count = each.state[own[0]]["step"]
                    self.assertEqual((count.dtype, count.item()), (torch.float32, 300), (cls, dtype))

    def test_torchs_default_device_is_not_the_states(self):
        for cls in BOTH:
            own = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4).bfloat16())]
            optimizer = made(cls, own)
            for param in own:
                param.grad = torch.ones_like(param)
            with torch.device("meta"):
                optimizer.step()
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            for state in optimizer.state.values():
                self.assertEqual({tensor.device.type for tensor in state.values()}, {"cpu"})

    def test_a_count_that_another_format_holds_is_taken_over(self):
        own = [torch.nn.Parameter(torch.ones(4))]
        optimizer = made(CPUAdamW, own)
        step(optimizer, own)
        optimizer.state[own[0]]["step"] = torch.tensor(7, dtype=torch.int64)
        step(optimizer, own)
        self.assertEqual(optimizer.state[own[0]]["step"].item(), 8)

    def test_a_signal_finds_weights_and_count_of_one_step(self):
        class Stop(Exception):
            pass

        def stop(*_):
            raise Stop

        own = torch.nn.Parameter(torch.ones(4_000_000))
        own.grad = torch.ones_like(own)
        optimizer = CPUAdamW([own], isa="scalar", threads=1, max_grad_norm=1e9)
        optimizer.step()
        began = time.perf_counter()
        optimizer.step()
        step_s = time.perf_counter() - began
        before = signal.signal(signal.SIGALRM, stop)
        try:
            whole = 0
            for try_ in range(20):
                weight, count = own[0].item(), optimizer.state[own]["step"].item()
                signal.setitimer(signal.ITIMER_REAL, step_s * (0.3 + 0.3 * (try_ % 5)))
                with contextlib.suppress(Stop):
                    optimizer.step()
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.assertEqual(own[0].item() != weight, optimizer.state[own]["step"].item() == count + 1)
                whole += own[0].item() != weight
            self.assertGreater(whole, 0)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def test_flush_denormal_of_the_calling_thread_changes_no_bit(self):
        def moments(threads, flush):
            own = torch.nn.Parameter(torch.ones(1_000_000))
            own.grad = torch.full_like(own, 1e-21)
            optimizer = CPUAdamW([own], threads=threads)
            optimizer.step()
            if flush and not torch.set_flush_denormal(True):
                self.skipTest("LEFT OUT: this CPU has no mode that flushes denormal numbers")
            try:
                optimizer.step()
            finally:
                torch.set_flush_denormal(False)
            return optimizer.state[own]["exp_avg_sq"].view(torch.int32).unique().tolist()

        want = moments(1, False)
        self.assertNotEqual(want, [0])
        self.assertEqual([moments(threads, True) for threads in (1, 2, 4)], [want] * 3)


class Keywords(unittest.TestCase):
    def test_torchs_keywords_are_taken_where_they_change_nothing(self):
        for cls in BOTH:
            for keyword, value in (
                ("foreach", None), ("foreach", True), ("foreach", False), ("fused", None), ("fused", True), ("fused", False), ("amsgrad", False),
                ("maximize", False), ("capturable", False), ("differentiable", False),
            ):  # fmt: skip
                made(cls, [torch.nn.Parameter(torch.ones(2))], **{keyword: value})
            for keyword in ("amsgrad", "maximize", "capturable", "differentiable"):
                with self.assertRaisesRegex(ValueError, f"{keyword}=True is not offered: use torch.optim.AdamW"):
                    made(cls, [torch.nn.Parameter(torch.ones(2))], **{keyword: True})

    def test_frozen_parameters_of_any_kind_are_taken_and_cost_nothing(self):
        frozen = [
            torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.float64), torch.zeros(8, device="meta"), torch.zeros(8, 8)[:, :3],
            torch.zeros(3 << 20),
        ]  # fmt: skip
        for cls in BOTH:
            own = [torch.nn.Parameter(tensor, requires_grad=False) for tensor in frozen]
            trained = torch.nn.Parameter(torch.ones(100))
            optimizer = made(cls, [own[0], trained, *own[1:]])
            step(optimizer, [trained])
            self.assertEqual(list(optimizer.state), [trained])
            self.assertFalse(torch.equal(trained, torch.ones(100)))
            if cls is OffloadAdamW:
                (bucket,) = optimizer._buckets
                self.assertLess(sum(room.nbytes for room in (bucket.slot, bucket.spare) if room is not None), 4096)
                trained.sum().backward()
                optimizer.step()
                self.assertEqual(optimizer.last.speculated, 1)

    def test_a_frozen_parameter_that_cannot_be_stepped_is_refused_when_it_has_a_gradient(self):
        for cls in BOTH:
            own = torch.nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
            optimizer = made(cls, [torch.nn.Parameter(torch.ones(2)), own])
            own.requires_grad_()
            own.grad = torch.ones_like(own)
            with self.assertRaisesRegex(ValueError, "parameter 1 is torch.float64"):
                optimizer.step()


class Layouts(unittest.TestCase):
    def test_dense_parameters_are_stepped_in_any_order_of_dimensions(self):
        make = torch.Generator().manual_seed(0)
        images = torch.randn(8, 6, 3, 3, generator=make).to(memory_format=torch.channels_last)
        volumes = torch.randn(2, 3, 2, 2, 2, generator=make).to(memory_format=torch.channels_last_3d)
        for cls in BOTH:
            for dtype in (torch.float32, torch.bfloat16):
                for tensor in (images, volumes, torch.randn(5, 7, generator=make).t(), torch.randn(4, 1, generator=make).t()):
                    one, two = (torch.nn.Parameter(kind.clone().to(dtype)) for kind in (tensor, tensor.contiguous()))
                    self.assertEqual(one.stride(), tensor.stride())
                    mine, other = made(cls, [one]), made(cls, [two])
                    for _ in range(2):
                        step(mine, [one]), step(other, [two])
                        one.grad = torch.ones_like(one).contiguous()
                    self.assertTrue(torch.equal(one, two), (cls, dtype, tensor.shape))
                    again = made(cls, [one])
                    again.load_state_dict(copy.deepcopy(other.state_dict()))
                    step(again, [one]), step(other, [two])
                    self.assertTrue(torch.equal(one, two), (cls, dtype, tensor.shape))

    def test_the_kernels_advice_on_huge_pages_is_not_needed(self):
        class Small(mmap.mmap):
            def madvise(self, option, *rest):
                if option == mmap.MADV_HUGEPAGE:
                    raise OSError(22, "Invalid argument")
                return super().madvise(option, *rest)

        own = [torch.nn.Parameter(torch.ones(2 << 20))]
        optimizer = made(OffloadAdamW, own)
        with mock.patch("superoffload._link.mmap.mmap", Small):
            step(optimizer, own)
        self.assertEqual(optimizer.state[own[0]]["step"].item(), 1)


class Loading(unittest.TestCase):
    def test_hooks_of_torch_see_and_change_the_saved_state(self):
        """Hooks may match parameters in another order by name, as in torch's documentation."""

        def by_name(optimizer, saved):
            was, now = saved["param_groups"][0]["param_names"], optimizer.param_groups[0]["param_names"]
            states = {index: saved["state"][was.index(name)] for index, name in enumerate(now)}
            return {"state": states, "param_groups": [{**saved["param_groups"][0], "param_names": now}]}

        for cls in BOTH:
            one = {name: torch.nn.Parameter(torch.ones(4)) for name in "abc"}
            source = made(cls, list(one.items()))
            step(source, list(one.values()))
            two = {name: torch.nn.Parameter(torch.ones(4)) for name in "cba"}
            target, seen = made(cls, list(two.items())), []
            target.register_load_state_dict_pre_hook(by_name)
            target.register_load_state_dict_post_hook(lambda target, seen=seen, two=two: seen.append(target.state[two["a"]]["exp_avg"].clone()))
            target.load_state_dict(copy.deepcopy(source.state_dict()))
            for name in "abc":
                self.assertTrue(torch.equal(target.state[two[name]]["exp_avg"], source.state[one[name]]["exp_avg"]), name)
            self.assertTrue(torch.equal(seen[0], source.state[one["a"]]["exp_avg"]))
            # A post-hook may change the state, too.
            target.register_load_state_dict_post_hook(lambda target, two=two: target.state[two["a"]]["exp_avg"].zero_())
            target.load_state_dict(copy.deepcopy(target.state_dict()))
            self.assertEqual(target.state[two["a"]]["exp_avg"].abs().sum().item(), 0)
            self.assertEqual(len(target._optimizer_load_state_dict_pre_hooks), 1)

    def test_float32_weights_go_to_and_fro(self):
        make = torch.Generator().manual_seed(0)
        for source, target in ((OffloadAdamW, CPUAdamW), (CPUAdamW, OffloadAdamW), (CPUAdamW, CPUAdamW), (OffloadAdamW, OffloadAdamW)):
            one = torch.nn.Parameter(torch.randn(1000, generator=make).bfloat16())
            first = made(source, [one])
            for _ in range(5):
                step(first, [one])
            two = torch.nn.Parameter(one.detach().clone())
            second = made(target, [two])
            second.load_state_dict(copy.deepcopy(first.state_dict()))
            step(first, [one]), step(second, [two])
            master = {CPUAdamW: "master_param", OffloadAdamW: "param"}
            self.assertTrue(torch.equal(first.state[one][master[source]], second.state[two][master[target]]), (source, target))
            self.assertTrue(torch.equal(one, two))

    def test_loading_takes_no_memory_beside_the_saved_arrays(self):
        code = """if True:
            import sys, torch
            from superoffload.torch import CPUAdamW, OffloadAdamW
            cls, dtype, count = globals()[sys.argv[1]], getattr(torch, sys.argv[2]), 8 << 20
            optimizer = cls([torch.nn.Parameter(torch.zeros(count, dtype=dtype))])
            saved = {"step": torch.tensor(3.0), "exp_avg": torch.ones(count), "exp_avg_sq": torch.ones(count), "param": torch.zeros(count)}
            now = lambda key: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
            open("/proc/self/clear_refs", "w").write("5")
            before = now("VmRSS")
            optimizer.load_state_dict({"state": {0: saved}, "param_groups": optimizer.state_dict()["param_groups"]})
            print((now("VmHWM") - before) * 1024 / (12 * count))
        """
        for cls in BOTH:
            for dtype in ("float32", "bfloat16"):
                run = subprocess.run([sys.executable, "-W", "ignore", "-c", code, cls.__name__, dtype], capture_output=True, text=True, check=True)
                self.assertLess(float(run.stdout), 0.3, (cls, dtype))

    def test_arrays_that_are_saved_once_for_two_are_not_shared(self):
        for cls in BOTH:
            own = [torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))]
            optimizer, zeros = made(cls, own), torch.zeros(4)
            state = {"step": torch.tensor(3.0), "exp_avg": zeros, "exp_avg_sq": zeros}
            optimizer.load_state_dict({"state": {0: state, 1: dict(state)}, "param_groups": optimizer.state_dict()["param_groups"]})
            step(optimizer, own)
            self.assertEqual([optimizer.state[param]["step"].item() for param in own], [4, 4])

    def test_a_state_that_another_optimizer_steps_is_copied(self):
        for source in BOTH:
            for target in BOTH:
                one, two = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
                first, second = made(source, [one]), made(target, [two])
                step(first, [one])
                second.load_state_dict(first.state_dict())
                before = second.state[two]["exp_avg"].clone()
                step(first, [one])
                self.assertTrue(torch.equal(second.state[two]["exp_avg"], before), (source, target))
                step(second, [two])
                self.assertEqual(first.state[one]["step"].item(), 2)

    def test_a_state_of_the_caller_is_not_stepped_by_offload_adamw(self):
        own = [torch.nn.Parameter(torch.ones(4))]
        optimizer, moments = made(OffloadAdamW, own), torch.zeros(4)
        state = {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": torch.zeros(4)}
        optimizer.load_state_dict({"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]})
        step(optimizer, own)
        self.assertEqual(moments.abs().sum().item(), 0)


class Changes(unittest.TestCase):
    def test_16_bit_weights_that_somebody_changes_count_in_cpu_adamw(self):
        """The float32 copy is kept if it rounds to the weight."""
        make = torch.Generator().manual_seed(0)
        for dtype in (torch.bfloat16, torch.float16):
            for isa in ["auto", *_cpu_adam.instruction_sets()]:
                own = torch.nn.Parameter(torch.randn(10_000, generator=make).to(dtype))
                optimizer = CPUAdamW([own], lr=1e-2, isa=isa)
                step(optimizer, [own])
                wide = torch.nn.Parameter(optimizer.state[own]["master_param"].clone())
                own.data.clamp_(-0.01, 0.01)
                with torch.no_grad():
                    own[7] = 3.0
                    changed = wide.to(dtype) != own
                    wide[changed] = own[changed].float()
                other = CPUAdamW([wide], lr=1e-2, isa=isa)
                other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                own.grad = torch.ones_like(own)
                wide.grad = torch.ones_like(wide)
                optimizer.step(), other.step()
                self.assertTrue(torch.equal(optimizer.state[own]["master_param"], wide), (dtype, isa))
                self.assertLess(own.abs().sort().values[-2].item(), 0.05)

    def test_nan_stays_the_nan_that_it_is(self):
        own = torch.nn.Parameter(torch.zeros(10_000).bfloat16())
        optimizer = CPUAdamW([own])
        own.grad = torch.full_like(own, float("nan"))
        optimizer.step()
        before = optimizer.state[own]["master_param"].view(torch.int32).clone()
        own.grad = torch.zeros_like(own)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        self.assertTrue(torch.equal(optimizer.state[own]["master_param"].view(torch.int32), before))


if __name__ == "__main__":
    unittest.main()
