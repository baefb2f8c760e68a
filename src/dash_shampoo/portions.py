"""Working off many things a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def portions(items: Iterable[T], size: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Runs of items whose sizes add up to at most ``most``, or of one item that is larger alone."""
    portion: list[T] = []
    total = 0
    for item in items:
        own = size(item)
        if portion and total + own > most:
            yield portion
            portion, total = [], 0
        portion.append(item)
        total += own
    if portion:
        yield portion
