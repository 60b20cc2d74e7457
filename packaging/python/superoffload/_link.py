"""Copies of gradients to the host and of weights to the device: on CUDA streams, or as plain copies on the CPU."""

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
"""Arrays of at least this size are allocated with huge pages."""


def link_to(device: torch.device) -> CudaLink | PlainLink:
    return CudaLink(device) if device.type == "cuda" else PlainLink()


def host_zeros(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a flat array of zeros, on huge pages if it is large. Not pinned, because only the CPU accesses it."""
    size = count * dtype.itemsize
    if size < HUGE_FROM_BYTES:
        return torch.zeros(count, dtype=dtype, device="cpu")
    room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages rejects the advice; the array then uses small pages.
    with contextlib.suppress(OSError):
        room.madvise(mmap.MADV_HUGEPAGE)
    # With forked data loader workers, each write would copy a page, and memory would double.
    room.madvise(mmap.MADV_DONTFORK)
    return torch.frombuffer(room, dtype=dtype)


class CudaLink:
    """One CUDA stream per direction. The streams live as long as this object, because the allocator keeps a memory pool for each."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.down, self.up = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def room(self, size: int) -> torch.Tensor:
        """Allocate pinned host memory of `size` bytes."""
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def adopt(self, weights: torch.Tensor) -> None:
        """Keep the allocator from reusing this memory before the copies to it are done."""
        weights.record_stream(self.up)

    def mark(self) -> torch.cuda.Event:
        """Return an event that passes when the device has done the work that this thread has submitted so far."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return event

    def bring(self, target: torch.Tensor, gradient: torch.Tensor, after: Any) -> None:
        """Copy `gradient` to the host when the device has produced it, and not before the event `after`, if given. The allocator keeps the gradient's
        memory until the copy is done, so the caller need not hold the gradient."""
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        if after is not None:
            self.down.wait_event(after)
        with torch.cuda.stream(self.down):
            target.copy_(gradient, non_blocking=True)
        gradient.record_stream(self.down)

    def brought(self) -> torch.cuda.Event:
        """Return an event that passes when all gradients are on the host. Waiting for it does not occupy a core."""
        event = torch.cuda.Event(blocking=True)
        event.record(self.down)
        return event

    def peek(self, weights: torch.Tensor) -> torch.Tensor:
        """Start a copy of a few weights to pinned host memory, which is done when the next event of `brought` has passed. Not on the device's
        stream: it would wait for the copies of gradients, and the work behind it as well."""
        self.down.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.down):
            there = weights.to("cpu", non_blocking=True)
        weights.record_stream(self.down)
        return there

    def send(self, pairs: Pairs, after: Any) -> torch.cuda.Event:
        """Copy to the device, not before the event `after`, if given. Returns an event that passes when the copies are done."""
        if after is not None:
            self.up.wait_event(after)
        with torch.cuda.stream(self.up):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        event = torch.cuda.Event(blocking=True)
        event.record(self.up)
        return event

    def hold(self, event: torch.cuda.Event) -> None:
        """Make device work that is submitted from now on wait for `event`."""
        torch.cuda.current_stream(self.device).wait_event(event)


class Instant:
    """An event of the CPU. It has passed when it is created."""

    def __init__(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Instant) -> float:
        return 1e3 * (later.at - self.at)


class PlainLink:
    """Link for parameters on the CPU. A copy is done when the call returns."""

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

    def peek(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def send(self, pairs: Pairs, after: Any) -> Instant:
        for target, source in pairs:
            target.copy_(source)
        return Instant()

    def hold(self, event: Instant) -> None:
        pass
