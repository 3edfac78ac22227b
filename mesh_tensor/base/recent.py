"""Recent: what was made for some sizes and may be needed again, for the sizes that were asked for last; what a thread
made of the same things before; and work that makes many objects which all stay, without the garbage collector looking
at them again and again."""

from __future__ import annotations

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from functools import lru_cache, wraps
from typing import Generic, ParamSpec, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

KERNEL_SIZES = 256  # that a kernel, or mt.redistribute, keeps programs, launches, layouts and compiled code for
MODULE_SIZES = 64  # that a module keeps plans and launches for


class Recent(Generic[K, V]):
    """At most `most` values by key. The one that was not asked for longest makes room. Several threads may ask."""

    __slots__ = ("_kept", "_most")

    def __init__(self, most: int) -> None:
        self._most, self._kept = most, OrderedDict[K, V]()

    def get(self, key: K) -> V | None:
        """The value, or None."""
        value = self._kept.get(key)
        if value is not None and len(self._kept) > 1:
            with suppress(KeyError):  # another thread has made room
                self._kept.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> V:
        """Keep `value`; gives it back."""
        self._kept[key] = value
        while len(self._kept) > self._most:
            with suppress(KeyError):  # another thread was faster
                self._kept.popitem(last=False)
        return value

    def made(self, key: K, make: Callable[[], V]) -> V:
        """The value, which `make` makes unless it is kept."""
        value = self.get(key)
        return self.put(key, make()) if value is None else value

    def changed(self, change: Callable[[V], V]) -> Recent[K, V]:
        """What `change` gives for each value, by the same keys."""
        made = Recent[K, V](self._most)
        made._kept.update((key, change(value)) for key, value in list(self._kept.items()))
        return made

    def drop(self, unwanted: Callable[[K], bool]) -> None:
        """Forget the values of such keys."""
        for key in list(self._kept):
            if unwanted(key):
                self._kept.pop(key, None)

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[V]:
        return iter(list(self._kept.values()))


P = ParamSpec("P")
R = TypeVar("R")


def uncollected(work: Callable[P, R]) -> Callable[P, R]:
    """`work`, during which cycles are not collected. Of threads that do such work at a time, the first to end turns
    collection on again, which costs the others time and nothing else."""

    @wraps(work)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if not gc.isenabled():
            return work(*args, **kwargs)
        try:
            gc.disable()  # in here: Ctrl-C may come as soon as it returns
            return work(*args, **kwargs)
        finally:
            gc.enable()

    return run


def made_once(most: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For functions of what can be hashed, whose results nobody changes: each thread keeps the last `most`. TVM's
    analyzers are in some of them, and are not for two threads at a time."""

    def keeping(work: Callable[P, R]) -> Callable[P, R]:
        own = threading.local()

        @wraps(work)
        def kept(*args: P.args, **kwargs: P.kwargs) -> R:
            if not hasattr(own, "made"):
                own.made = lru_cache(maxsize=most)(work)
            return own.made(*args, **kwargs)

        return kept

    return keeping
