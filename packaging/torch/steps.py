"""Runs ten clipped steps with the extension module, without torch, and prints a digest of the results. It is the same on all machines.

    packaging/torch/steps.py _cpu_adam.abi3.so
"""

import ctypes
import hashlib
import sys
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader

COUNT = 100_003

loader = ExtensionFileLoader("_cpu_adam", sys.argv[1])
module = module_from_spec(spec_from_loader("_cpu_adam", loader))
loader.exec_module(module)

digests = set()
for isa in module.instruction_sets():
    weights, first, second, gradient = [(ctypes.c_float * COUNT)() for _ in range(4)]
    steps = ctypes.c_float()
    weights[:] = [(i * 2654435761 % 1009) / 1009 for i in range(COUNT)]
    places = (*map(ctypes.addressof, (weights, first, second)), 0, ctypes.addressof(steps))
    arrays = module.Arrays([(0, places, ("float32", "float32"), COUNT, 0, 0)])
    for step in range(1, 11):
        gradient[:] = [(i * 40503 * step % 2003) / 1001 - 1 for i in range(COUNT)]
        update = arrays.gradients([ctypes.addressof(gradient)], [], [(1e-3, 0.9, 0.999, 1e-8, 0.01)], 2, isa)
        update.sums()
        _, scale = module.verdict(*module.squares([update]), 1.0)
        module.step([update], scale)
    digests.add(hashlib.sha256(bytes(weights) + bytes(first) + bytes(second)).hexdigest())
print(*digests)
sys.exit(len(digests) != 1)
