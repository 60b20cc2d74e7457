"""Changes of weights through `.data`. Torch's version counter does not count them, so a sample of the device's weights is compared with the
state before each step. The comparison finds each change of a share of the elements, but may miss a change of a few of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ._buckets import Member, Part

SAMPLES = 512
"""Number of sampled elements in a large part of a parameter. A change of one element in 100 is missed with a probability of 0.006."""

WHOLE = 16 * SAMPLES
"""Parts of at most this number of elements are compared as a whole."""

ADVICE = "change weights under torch.no_grad(), without .data"


def sampled(weights: torch.Tensor, width: int) -> torch.Tensor:
    """Return a view of all elements, or of elements at equal distances. The distance is a prime number and no divisor of the parameter's row length
    `width`, so that the elements come from all columns and from any regular mask."""
    if weights.numel() <= WHOLE:
        return weights
    distance = -(-weights.numel() // SAMPLES)
    while not _is_prime(distance) or width % distance == 0:
        distance += 1
    return weights[::distance]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))


class Seen:
    """Samples of the device's weights at one time, on their way to the host."""

    def __init__(self, link: Any, parts: Iterable[Part]) -> None:
        self._parts: dict[torch.dtype, list[Part]] = {}
        for part in parts:
            self._parts.setdefault(part.weights.dtype, []).append(part)
        self._there = [link.peek(torch.cat([part.sample for part in parts])) for parts in self._parts.values()]
        self._arrived = link.brought()

    def changed(self) -> set[Member]:
        """Return the parameters whose weights differ from their state. Their state must be the one after the last step."""
        self._arrived.synchronize()
        changed = set()
        for there, parts in zip(self._there, self._parts.values()):
            known = [part.known for part in parts]
            if not torch.equal(there, torch.cat(known)):
                seen = there.split([len(sample) for sample in known])
                changed |= {part.member for part, one, other in zip(parts, seen, known) if not _are_equal(one, other)}
        return changed


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare weights. NaN equals NaN, because its bits may change where it is rounded."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())
