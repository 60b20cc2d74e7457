"""Compares `superoffload.torch` with torch's own AdamW. Skipped with a message if torch is not installed."""

import ast
import copy
import hashlib
import inspect
import io
import math
import os
import pickle
import threading
import time
import unittest
from pathlib import Path

try:
    import torch
except ImportError as error:
    raise unittest.SkipTest(f"LEFT OUT: superoffload.torch is not tested, because torch is not installed ({error})") from error

from superoffload import _cpu_adam
from superoffload.torch import CPUAdamW

HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-4, "weight_decay": 0.1}
SHAPES = [(3, 5), (1,), (64, 1025), (70_000,), (4096,), (0, 4), ()]
U = 2.0**-24


def params(dtype=torch.float32, shapes=SHAPES, seed=0):
    make = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=make).to(dtype)) for shape in shapes]


def give_grads(params, step, scale=1.0):
    make = torch.Generator().manual_seed(1000 + step)
    for param in params:
        param.grad = (scale * torch.randn(param.shape, generator=make)).to(param.dtype)


def bits(tensor):
    """Return a hash: unittest would spend hours on a diff of large values."""
    return hashlib.sha256(tensor.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest()


def all_bits(optimizer):
    params = [param for group in optimizer.param_groups for param in group["params"]]
    states = [optimizer.state[param] for param in params]
    return [bits(param) for param in params] + [(key, bits(state[key])) for state in states for key in sorted(state)]


def run(steps=5, dtype=torch.float32, scale=1.0, **settings):
    own = params(dtype)
    optimizer = CPUAdamW(own, **HYPER, **settings)
    for step in range(steps):
        give_grads(own, step, scale)
        optimizer.step()
    return optimizer


class Arithmetic(unittest.TestCase):
    def test_a_hundred_steps_stay_within_the_derived_bound_of_torchs(self):
        """Compares both implementations with exact arithmetic, to first order in the rounding unit U. A margin of 1 % covers the higher orders.

        First moment, per step: CPUAdamW rounds two constants, a product and a sum, 3 U max|g| in all. Torch's lerp rounds a difference, a weight,
        a product and a sum, (1 + 6 (1 - beta1)) U max|g|. Both errors persist for 1 / (1 - beta1) steps.
        Second moment: all terms are positive, so relative errors add up: 3 U per step here, 4 U in torch. The square root halves them.
        Update: CPUAdamW rounds root, constant, fused sum, quotient and constant; torch rounds root, constant, quotient, sum, constant, product
        and quotient: 12 U. Weights: constant and product of the decay, and the sum, 6 U per step.
        """
        lr, (beta1, beta2), eps, decay = HYPER["lr"], HYPER["betas"], HYPER["eps"], HYPER["weight_decay"]
        ours, theirs = params(), params()
        mine, torchs = CPUAdamW(ours, **HYPER), torch.optim.AdamW(theirs, foreach=False, **HYPER)
        exact = [(p.detach().double(), torch.zeros(p.shape).double(), torch.zeros(p.shape).double()) for p in ours]
        bounds = [torch.zeros(p.shape).double() for p in ours]
        largest = 0.0
        for step in range(1, 101):
            scale = 10.0 ** (step % 3 - 1)
            give_grads(ours, step, scale), give_grads(theirs, step, scale)
            mine.step(), torchs.step()
            largest = max(largest, *(p.grad.abs().max().item() for p in ours if p.numel()))
            for i, param in enumerate(ours):
                p, m, v = exact[i]
                g = param.grad.double()
                m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
                rate, root = lr / (1 - beta1**step), (v / (1 - beta2**step)).sqrt() + eps
                p = p * (1 - lr * decay) - rate * m / root
                exact[i] = (p, m, v)
                of_m = 1.01 * (4 + 6 * (1 - beta1)) * U * largest / (1 - beta1)
                of_v = 1.01 * 7 * U * step * v
                bounds[i] += 1.01 * (6 * U * p.abs() + rate * (of_m + m.abs() * (3.5 * step + 12) * U) / root)
                state, other = mine.state[param], torchs.state[theirs[i]]
                self.assertTrue(((state["exp_avg"] - other["exp_avg"]).abs() <= of_m).all(), (step, i))
                self.assertTrue(((state["exp_avg_sq"].double() - other["exp_avg_sq"].double()).abs() <= of_v).all(), (step, i))
                self.assertTrue(((param - theirs[i]).abs() <= bounds[i]).all(), (step, i))

    def test_bits_are_the_same_for_any_threads_and_every_instruction_set(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for moments in ("float32", "bfloat16", "int8"):
                for settings in ({}, {"max_grad_norm": 0.7}):
                    settings = {"dtype": dtype, "moments": moments, **settings}
                    want = all_bits(run(threads=1, isa="scalar", **settings))
                    for isa in ["auto", *_cpu_adam.instruction_sets()]:
                        self.assertEqual(all_bits(run(threads=2, isa=isa, **settings)), want, (isa, settings))
                    for threads in (3, 64):
                        self.assertEqual(all_bits(run(threads=threads, **settings)), want, (threads, settings))

    def test_nan_and_inf_go_in_as_in_torch(self):
        ours, theirs = params(), params()
        mine, torchs = CPUAdamW(ours, **HYPER), torch.optim.AdamW(theirs, foreach=False, **HYPER)
        for step in range(2):
            give_grads(ours, step), give_grads(theirs, step)
            for side in (ours, theirs):
                side[2].grad[7, 3], side[3].grad[5] = math.nan, math.inf
            mine.step(), torchs.step()
        for one, other in zip(ours, theirs):
            self.assertTrue(torch.equal(one.isnan(), other.isnan()))
            for key in ("exp_avg", "exp_avg_sq"):
                self.assertTrue(torch.equal(mine.state[one][key].isfinite(), torchs.state[other][key].isfinite()), key)
        self.assertEqual(int(ours[2].isnan().sum()), 1)

    def test_clipping_is_clip_grad_norm(self):
        for limit in (0.5, 1e6):
            clipped, plain = params(), params()
            mine, other = CPUAdamW(clipped, max_grad_norm=limit, **HYPER), CPUAdamW(plain, **HYPER)
            for step in range(3):
                give_grads(clipped, step), give_grads(plain, step)
                norm = torch.nn.utils.clip_grad_norm_([p for p in plain if p.numel()], limit)
                mine.step(), other.step()
                self.assertAlmostEqual(mine.last.grad_norm / norm.item(), 1, places=5)
                self.assertEqual((mine.last.clip < 1, mine.last.skipped), (limit == 0.5, False))
            for one, two in zip(clipped, plain):
                torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)

    def test_a_norm_that_is_not_finite_skips_the_step_and_says_so(self):
        for poison in (math.nan, math.inf, 1e30):
            optimizer = run(max_grad_norm=1.0)
            before, own = all_bits(optimizer), optimizer.param_groups[0]["params"]
            give_grads(own, 9)
            own[2].grad[63, 1024] = poison
            optimizer.step()
            self.assertEqual((optimizer.last.skipped, optimizer.last.clip, all_bits(optimizer) == before), (True, 0.0, True))
            give_grads(own, 10)
            optimizer.step()
            self.assertEqual((optimizer.last.skipped, optimizer.state[own[2]]["step"].item()), (False, 6))

    def test_16_bit_parameters_are_their_float32_copies_rounded(self):
        for dtype in (torch.bfloat16, torch.float16):
            narrow = params(dtype)
            wide = [torch.nn.Parameter(p.detach().float()) for p in narrow]
            mine, other = CPUAdamW(narrow, **HYPER), CPUAdamW(wide, **HYPER)
            for step in range(4):
                give_grads(narrow, step)
                for one, two in zip(narrow, wide):
                    two.grad = one.grad.float()
                mine.step(), other.step()
            for one, two in zip(narrow, wide):
                self.assertTrue(torch.equal(mine.state[one]["master_param"], two))
                self.assertTrue(torch.equal(one, two.to(dtype)))

    def test_gradients_of_16_bits_step_float32_parameters(self):
        if not hasattr(torch.Tensor, "grad_dtype"):
            self.skipTest("LEFT OUT: this torch gives a gradient the format of its parameter")
        one, two = params()[2], params()[2]
        one.grad_dtype = torch.bfloat16
        one.grad = torch.ones(one.shape, dtype=torch.bfloat16) / 3
        two.grad = one.grad.float()
        CPUAdamW([one], **HYPER).step(), CPUAdamW([two], **HYPER).step()
        self.assertTrue(torch.equal(one, two))


class Use(unittest.TestCase):
    def test_groups_schedulers_and_parameters_that_come_later(self):
        ours, theirs = params(), params()
        mine = CPUAdamW([{"params": ours[:2], "lr": 0.1}, {"params": ours[2:4], "weight_decay": 0.0, "betas": (0.5, 0.6)}], **HYPER)
        torchs = torch.optim.AdamW([{"params": theirs[:2], "lr": 0.1}, {"params": theirs[2:4], "weight_decay": 0.0, "betas": (0.5, 0.6)}], **HYPER)
        schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)) for o in (mine, torchs)]
        for step in range(5):
            if step == 2:
                mine.add_param_group({"params": ours[4:], "lr": 0.05}), torchs.add_param_group({"params": theirs[4:], "lr": 0.05})
                schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (mine, torchs)]
            give_grads(ours, step), give_grads(theirs, step)
            for side in (mine, torchs):
                side.step()
            for schedule in schedules:
                schedule.step()
        for one, two in zip(ours, theirs):
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
        self.assertEqual(mine.state[ours[4]]["step"].item(), 3)

    def test_closures_unused_parameters_and_zero_grad(self):
        own = params()
        optimizer = CPUAdamW(own, **HYPER)

        def closure():
            optimizer.zero_grad()
            loss = (own[0] ** 2).sum()
            loss.backward()
            return loss

        before = [bits(param) for param in own]
        losses = [optimizer.step(closure).item() for _ in range(3)]
        self.assertLess(losses[2], losses[0])
        self.assertEqual([bits(param) == old for param, old in zip(own, before)], [False] + [True] * (len(own) - 1))
        self.assertEqual(list(optimizer.state), own[:1])
        optimizer.zero_grad()
        self.assertIsNone(own[0].grad)
        self.assertIsNone(optimizer.step())

    def test_autograd_sees_that_a_parameter_changed(self):
        own = params()[0]
        optimizer = CPUAdamW([own], **HYPER)
        loss = (own * own).sum()
        own.grad = torch.ones_like(own)
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            loss.backward()

    def test_other_threads_run_during_a_step(self):
        own = [torch.nn.Parameter(torch.zeros(8_000_000))]
        own[0].grad = torch.ones(8_000_000)
        optimizer = CPUAdamW(own, threads=1, isa="scalar")
        optimizer.step()
        ticks, done = [], threading.Event()

        def tick():
            while not done.is_set():
                ticks.append(time.perf_counter())
                time.sleep(1e-4)

        other = threading.Thread(target=tick)
        other.start()
        began = time.perf_counter()
        optimizer.step()
        ended = time.perf_counter()
        done.set()
        other.join()
        within = [at for at in ticks if began + 0.1 * (ended - began) < at < ended - 0.1 * (ended - began)]
        self.assertGreater(len(within), 1)

    def test_steps_on_other_threads_and_in_a_forked_child(self):
        want = all_bits(run(threads=2))
        got = []
        other = threading.Thread(target=lambda: got.append(all_bits(run(threads=2))))
        other.start()
        other.join()
        self.assertEqual(got, [want])
        child = os.fork()
        if child == 0:
            # The threads of torch's own operations do not survive a fork; the optimizer's must.
            torch.set_num_threads(1)
            os._exit(0 if all_bits(run(threads=2)) == want else 1)
        for _ in range(600):
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                break
            time.sleep(0.1)
        else:
            os.kill(child, 9)
        self.assertEqual((ended, status), (child, 0))


class States(unittest.TestCase):
    def go_on(self, source, target, hyper):
        """Run five steps with `source`, load its state into `target`, run three more steps with both, and return the state of each."""
        ones, twos = params(), params()
        one = source(ones, **hyper)
        for step in range(5):
            give_grads(ones, step)
            one.step()
        with torch.no_grad():
            for a, b in zip(twos, ones):
                a.copy_(b)
        two = target(twos, lr=1.0)
        two.load_state_dict(copy.deepcopy(one.state_dict()))
        for step in range(5, 8):
            give_grads(ones, step), give_grads(twos, step)
            one.step(), two.step()
        return one, two

    def test_states_go_to_torchs_adamw_and_back(self):
        torchs = lambda params, **hyper: torch.optim.AdamW(params, foreach=False, **hyper)  # noqa: E731
        for source, target in ((torchs, CPUAdamW), (CPUAdamW, torchs)):
            one, two = self.go_on(source, target, HYPER)
            for a, b in zip(one.param_groups[0]["params"], two.param_groups[0]["params"]):
                torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
                self.assertEqual(float(two.state[b]["step"]), 8)
            self.assertEqual(two.param_groups[0]["betas"], HYPER["betas"])
        one, two = self.go_on(CPUAdamW, CPUAdamW, HYPER)
        self.assertEqual(all_bits(one), all_bits(two))

    def test_deepspeeds_state_loads(self):
        one = run()
        saved = copy.deepcopy(one.state_dict())
        for state in saved["state"].values():
            state["step"] = int(state["step"])
        saved["param_groups"][0].update(bias_correction=True, amsgrad=False)
        two = CPUAdamW([p.detach().clone().requires_grad_() for p in one.param_groups[0]["params"]])
        two.load_state_dict(saved)
        self.assertEqual(all_bits(one), all_bits(two))

    def test_a_state_goes_through_files_pickles_and_copies(self):
        for dtype, moments in ((torch.float32, "bfloat16"), (torch.bfloat16, "float32"), (torch.bfloat16, "int8")):
            one = run(dtype=dtype, moments=moments, max_grad_norm=0.7, threads=2)
            file = io.BytesIO()
            torch.save(one.state_dict(), file)
            file.seek(0)
            loaded = CPUAdamW([p.detach().clone().requires_grad_() for p in one.param_groups[0]["params"]], moments=moments, max_grad_norm=0.7)
            loaded.load_state_dict(torch.load(file, weights_only=True))
            others = [loaded, pickle.loads(pickle.dumps(one)), copy.deepcopy(one)]
            self.assertEqual(others[1].last, one.last)
            for other in others:
                for optimizer in (one, other):
                    own = optimizer.param_groups[0]["params"]
                    give_grads(own, 50)
                before = copy.deepcopy(one)
                give_grads(before.param_groups[0]["params"], 50)
                before.step(), other.step()
                self.assertEqual(all_bits(before), all_bits(other))

    def test_a_state_loads_into_every_format_of_moments(self):
        ones = {moments: run(dtype=torch.bfloat16, moments=moments) for moments in ("float32", "bfloat16", "int8")}
        for source, one in ones.items():
            for target in ones:
                own = [p.detach().clone().requires_grad_() for p in one.param_groups[0]["params"]]
                two = CPUAdamW(own, moments=target)
                two.load_state_dict(one.state_dict())
                if source == target:
                    self.assertEqual(all_bits(one), all_bits(two))
                give_grads(own, 50)
                two.step()
                for there, here in zip(one.param_groups[0]["params"], own):
                    want, got = (CPUAdamW([p.detach().clone().requires_grad_()], moments="float32") for p in (there, here))
                    want.load_state_dict({**want.state_dict(), "state": {0: one.state[there]}})
                    got.load_state_dict({**got.state_dict(), "state": {0: two.state[here]}})
                    a, b = (each.state[each.param_groups[0]["params"][0]] for each in (want, got))
                    self.assertEqual((float(a["step"]), float(b["step"])), (5, 6))
                    # A step moves moments towards the gradient and its square. Loading and the step round second moments to one of their neighbours,
                    # which differ by an eighth.
                    grad = here.grad.float()
                    for key, kept, new in (("exp_avg", 0.9, 0.1 * grad), ("exp_avg_sq", 0.95, 0.05 * grad * grad)):
                        bound = 0.3 * (kept * a[key].abs() + new.abs()) + (0.01 if "int8" in (source, target) else 1e-6)
                        self.assertTrue(((b[key] - (kept * a[key] + new)).abs() <= bound).all(), (source, target, key))

    def test_moments_in_8_bits_train_as_float32_moments_do(self):
        """Descends a quadratic with noise for 200 steps. Both formats reach the same distance from the minimum, and int8 needs 132 bytes for a
        moment of 128 elements."""
        distances = {}
        for moments in ("float32", "int8"):
            make = torch.Generator().manual_seed(3)
            target, param = torch.randn(5000, generator=make), torch.zeros(5000, requires_grad=True)
            optimizer = CPUAdamW([param], lr=0.05, betas=(0.9, 0.99), weight_decay=0.0, moments=moments)
            for _ in range(200):
                param.grad = param.detach() - target + 0.1 * torch.randn(5000, generator=make)
                optimizer.step()
            distances[moments] = (param.detach() - target).square().mean().sqrt().item()
            state = optimizer.state[param]
        self.assertEqual((state["exp_avg"].dtype, state["exp_avg"].numel()), (torch.uint8, 40 * 132))
        self.assertLess(distances["int8"], 1.1 * distances["float32"])
        self.assertLess(distances["float32"], 0.1)

    def test_moments_in_8_bits_of_other_sizes_and_groups_are_refused(self):
        optimizer = run(moments="int8")
        before, good = all_bits(optimizer), optimizer.state_dict()
        for why, change in (
            ("exp_avg of parameter 2 is", lambda s: s["state"][2].update(exp_avg=torch.zeros(132, dtype=torch.uint8))),
            (r"betas\[0\] must be at most 0.93", lambda s: s["param_groups"][0].update(betas=(0.95, 0.999))),
        ):
            saved = copy.deepcopy(good)
            change(saved)
            with self.assertRaisesRegex(ValueError, why):
                optimizer.load_state_dict(saved)
            self.assertEqual(all_bits(optimizer), before)
        own = optimizer.param_groups[0]["params"]
        give_grads(own, 1)
        optimizer.state[own[2]]["exp_avg"] = torch.zeros(132, dtype=torch.uint8)
        with self.assertRaisesRegex(ValueError, "exp_avg of parameter 2 was changed: it must be torch.uint8"):
            optimizer.step()

    def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(self):
        optimizer = run()
        before, good = all_bits(optimizer), optimizer.state_dict()
        for why, change in (
            ("exp_avg of parameter 2 is", lambda s: s["state"][2].update(exp_avg=torch.zeros(3))),
            ("the state of parameter 0 lacks exp_avg_sq", lambda s: s["state"][0].pop("exp_avg_sq")),
            ("amsgrad=True", lambda s: s["param_groups"][0].update(amsgrad=True)),
            ("lacks betas", lambda s: s["param_groups"][0].pop("betas")),
            ("this group has Adam's", lambda s: s["param_groups"][0].update(decoupled_weight_decay=False)),
            ("doesn't match", lambda s: s["param_groups"][0]["params"].pop()),
        ):
            saved = copy.deepcopy(good)
            change(saved)
            with self.assertRaisesRegex(ValueError, why):
                optimizer.load_state_dict(saved)
            self.assertEqual(all_bits(optimizer), before)


class Stub(unittest.TestCase):
    def test_the_stub_has_the_names_of_the_extension_module(self):
        tree = ast.parse((Path(_cpu_adam.__file__).parent / "_cpu_adam.pyi").read_text())
        stub = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        constants = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
        self.assertEqual({*stub, *constants}, {name for name in dir(_cpu_adam) if not name.startswith("__")})
        methods = {f"{name}.{each.name}": each for name, node in stub.items() if isinstance(node, ast.ClassDef) for each in node.body}
        for name, node in {**stub, **methods}.items():
            if isinstance(node, ast.ClassDef):
                self.assertEqual({each.name for each in node.body} - {"__new__"}, {n for n in vars(getattr(_cpu_adam, name)) if n[0] != "_"})
            elif not name.endswith("__new__"):
                made = inspect.signature(eval(f"_cpu_adam.{name}", {"_cpu_adam": _cpu_adam}))
                self.assertEqual([each.arg for each in node.args.args], list(made.parameters), name)


class Refusals(unittest.TestCase):
    def test_parameters_that_cannot_be_stepped_name_their_index_and_the_remedy(self):
        whole, good = torch.zeros(20), torch.zeros(2, requires_grad=True)
        parts = [whole[:11].requires_grad_(), whole.detach()[10:].requires_grad_()]
        for bad, why in (
            (torch.zeros(4, 6)[:, :3], r"parameter 1 has gaps or repeats in memory.*Parameter\(param\.contiguous\(\)\)"),
            (torch.zeros(3, dtype=torch.float64), "parameter 1 is torch.float64: use float32"),
            (torch.zeros(3, dtype=torch.complex64), "parameter 1 is torch.complex64"),
            (torch.zeros(3, device="meta"), r"parameter 1 is on meta.*\.cpu\(\)"),
            (torch.zeros(3, 3).to_sparse(), r"parameter 1 is sparse.*to_dense"),
        ):
            bad.requires_grad_()
            with self.assertRaisesRegex(ValueError, why):
                CPUAdamW([good, bad])
            optimizer = CPUAdamW([good])
            with self.assertRaisesRegex(ValueError, why):
                optimizer.add_param_group({"params": [bad]})
            self.assertEqual(len(optimizer.param_groups), 1)
        with self.assertRaisesRegex(ValueError, "parameters 1 and 2 share memory.*clone"):
            CPUAdamW([good, *parts])
        CPUAdamW([part.detach()[:9].requires_grad_() for part in parts])

    def test_what_is_not_offered_is_refused_with_what_is(self):
        for keywords, why in (
            ({"amsgrad": True}, "torch.optim.AdamW"), ({"adamw_mode": False}, "torch.optim.Adam"), ({"bias_correction": False}, "leave it out"),
            ({"fp32_optimizer_states": False}, "moments='bfloat16'"), ({"moments": "int4"}, "'int4'"), ({"masters": "split"}, "PyTorch owns"), ({"threads": 0}, "at least 1"),
            ({"max_grad_norm": 0.0}, "above 0"), ({"isa": "sse9"}, "one of auto, scalar"), ({"lr": -1.0}, "lr must be"),
            ({"moments": "int8", "betas": (0.95, 0.999)}, r"betas\[0\] must be at most 0.93"), ({"betas": (0.9, 1.0)}, "betas must be"), ({"eps": math.nan}, "eps must be"), ({"weight_decay": -1}, "weight_decay must be"),
        ):  # fmt: skip
            with self.assertRaisesRegex(ValueError, why):
                CPUAdamW(params(), **keywords)
        CPUAdamW(params(), adamw_mode=True, bias_correction=True, fp32_optimizer_states=True)

    def test_gradients_and_state_that_cannot_be_used_are_refused(self):
        table = torch.nn.Embedding(10, 4, sparse=True)
        table(torch.tensor([1, 2])).sum().backward()
        with self.assertRaisesRegex(ValueError, "gradient of parameter 0 is sparse.*SparseAdam"):
            CPUAdamW(table.parameters()).step()
        optimizer = run()
        own = optimizer.param_groups[0]["params"]
        give_grads(own, 1)
        optimizer.state[own[2]]["exp_avg"] = torch.zeros(3)
        with self.assertRaisesRegex(ValueError, "exp_avg of parameter 2 was changed"):
            optimizer.step()
        optimizer = run()
        own = optimizer.param_groups[0]["params"]
        optimizer.state[own[3]]["exp_avg"] = own[3].grad
        with self.assertRaisesRegex(ValueError, r"arrays of parameter 3 share memory.*\.clone\(\)"):
            optimizer.step()

    def test_a_gradient_that_is_not_contiguous_is_taken(self):
        one, two = params()[2], params()[2]
        one.grad = torch.randn(1025, 64, generator=torch.Generator().manual_seed(1)).t()
        two.grad = one.grad.contiguous()
        CPUAdamW([one]).step(), CPUAdamW([two]).step()
        self.assertTrue(torch.equal(one, two))


if __name__ == "__main__":
    unittest.main()
