"""Caching what depends on nothing but arguments, whatever mode torch is in when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


def cached_apart(most: int | None = None) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Caches a pure function of hashable arguments, which is computed on a thread of its own.

    Default devices, autocast, inference and dispatch modes belong to a thread. The first call may come inside any of
    them, and what it leaves in the cache must not: a coefficient on the meta device, an inference tensor.

    Args:
        most: results to keep, the latest; ``None`` for all.
    """

    def cached(function: Callable[P, T]) -> Callable[P, T]:
        @lru_cache(maxsize=most)
        @wraps(function)
        def compute(*args: P.args, **kwargs: P.kwargs) -> T:
            with ThreadPoolExecutor(max_workers=1) as apart:
                return apart.submit(function, *args, **kwargs).result()

        return cast("Callable[P, T]", compute)

    return cached
