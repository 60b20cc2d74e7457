"""How gradients leave the device of the parameters and how weights go back to it: over streams of a GPU, or as plain copies on the CPU."""

from __future__ import annotations

import contextlib
import mmap
import time
from collections.abc import Iterable
from typing import Any

import torch

Pairs = Iterable[tuple[torch.Tensor, torch.Tensor]]
"""Targets and sources of copies."""

HUGE_FROM_BYTES = 4 << 20
"""Arrays from here on have pages of their own."""


def link_to(device: torch.device) -> CudaLink | PlainLink:
    return CudaLink(device) if device.type == "cuda" else PlainLink()


def host_array(param: torch.Tensor) -> torch.Tensor:
    """Zeros in float32 in the layout of `param`, on huge pages where they are large. Not pinned: only the CPU touches them."""
    size = 4 * param.numel()
    if size < HUGE_FROM_BYTES:
        zeros = torch.zeros(param.numel(), dtype=torch.float32, device="cpu")
    else:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A kernel without huge pages refuses the advice, and the array is as good on small ones.
        with contextlib.suppress(OSError):
            room.madvise(mmap.MADV_HUGEPAGE)
        # A data loader's forked workers would keep every page that a step writes, so that there would be two of each.
        room.madvise(mmap.MADV_DONTFORK)
        zeros = torch.frombuffer(room, dtype=torch.float32)
    return zeros.as_strided(param.shape, param.stride())


class CudaLink:
    """A stream each way. They live as long as this, since the allocator keeps a pool for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def room(self, size: int) -> torch.Tensor:
        """Bytes of the host that copies can run to and from."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def adopt(self, weights: torch.Tensor) -> None:
        """The allocator gives this memory to nobody else before the copies to it have passed."""
        weights.record_stream(self.up)

    def mark(self) -> torch.cuda.Event:
        """Passed once the device has done what this thread told it so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def bring(self, target: torch.Tensor, gradient: torch.Tensor, after: Any) -> None:
        """Copies `gradient` to the host once it is there, and once `after` has passed, if it is given. The allocator waits for the copy: nobody else
        has to hold the gradient."""
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            self.down.wait_event(after)
        with torch.cuda.stream(self.down):
            target.copy_(gradient, non_blocking=True)
        gradient.record_stream(self.down)

    def brought(self) -> torch.cuda.Event:
        """Passed once all that was brought is on the host. Waiting for it takes no core."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.down)
        return event

    def send(self, pairs: Pairs, after: Any) -> torch.cuda.Event:
        """Copies to the device once `after` has passed, if it is given; the event has passed when they have."""
        if after is not None:
            self.up.wait_event(after)
        with torch.cuda.stream(self.up):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(self.up)
        return event

    def hold(self, event: torch.cuda.Event) -> None:
        """What the device is told from now on runs after `event`."""
        torch.cuda.current_stream(self.device).wait_event(event)


class Instant:
    """An event of the CPU, which has passed when it is made."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: Instant) -> float:
        return 1e3 * (later.at - self.at)


class PlainLink:
    """The same for parameters on the CPU: a copy is done when the call returns."""

    def room(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, device="cpu")

    def adopt(self, weights: torch.Tensor) -> None:
        pass

    def mark(self) -> Instant:
        return Instant()

    def bring(self, target: torch.Tensor, gradient: torch.Tensor, after: Any) -> None:
        target.copy_(gradient)

    def brought(self) -> Instant:
        return Instant()

    def send(self, pairs: Pairs, after: Any) -> Instant:
        for target, source in pairs:
            target.copy_(source)
        return Instant()

    def hold(self, event: Instant) -> None:
        pass
